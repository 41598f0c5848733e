"""``aifs server`` and ``aifs host``: a store's data servers and burst directories, and its hosts.

A store is reached by its mount, or opened for the command; orders are extended attributes of its
root (vfs/server_hints.py).
"""

import json
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

import click

from aifs.cli import door
from aifs.cli.command import DURATION, PATH, SERVER, Column, Report, Table, group, number
from aifs.cli.door import aifs_at, holder_of, mount_of, read_status
from aifs.cli.output import count, describe_error, duration, print_error, progress, rate, size
from aifs.core.errors import (
    AifsError,
    FsError,
    MountError,
    StoreBusy,
    StoreError,
    TimeoutReached,
)
from aifs.core.names import absolute
from aifs.core.units import format_duration

if TYPE_CHECKING:
    from aifs.core.config import Config

_ID = click.IntRange(0, 0x7FFF)
_BURST = click.option("--burst", is_flag=True, help="ID is that of a burst directory.")
_WAIT = click.option(
    "--wait", is_flag=True, help="Wait until nothing is left there, with a progress bar."
)
_TIMEOUT = click.option(
    "--timeout", "timeout_s", type=DURATION, help="Stop waiting after so long (exit code 7)."
)
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 0.5
_FAILED_SHOWN = 3


_SERVERS = (
    Column(
        "server", lambda one: f"burst {one['id']}" if one["role"] == "burst" else str(one["id"])
    ),
    Column("standing"),
    Column("state"),
    Column("domain"),
    Column("class"),
    Column("used", "used_bytes", size, "unknown"),
    Column("free", "free_bytes", size, "unknown"),
    Column("left", lambda one: describe_left(one)),
    Column("path"),
    Column("last error", "last_error"),
)


@group("server", short_help="Add, drain, replace and remove data servers.")
def server_command() -> None:
    """Look at, add, drain, replace and remove data servers and burst directories of a store.

    PLACE is a mountpoint, or a SOURCE, mounted or not. The work for a store that is not mounted is
    done by the command itself, to its end; a mount goes on with it when the command has returned,
    and after a restart.
    """


@server_command.command(
    "ls",
    examples="aifs server ls /mnt/store\naifs server ls /srv/store --json",
    sizes=True,
)
@click.argument("place", type=PATH)
def ls_command(place: str) -> Report:
    """Show the servers of PLACE: whether they work, and the bytes left on those that are drained or
    lost.
    """
    import trio

    state = trio.run(look, place)
    lines = []
    if any(server["left"] and server["left"]["objects"] for server in state["servers"]):
        rest_s = state["estimate_s"]
        estimate = "" if rest_s is None else f", about {duration(rest_s)} left"
        lines = ["", f"moving {rate(state['bytes_per_s'])}{estimate}"]
    for failed in state["failed"][:_FAILED_SHOWN]:
        print_error(f"{failed['path']}: {failed['reason']}")
    return Report(state, Table(_SERVERS, state["servers"]), *lines)


def describe_left(server: dict[str, Any]) -> str:
    """The objects left on a server that is to be emptied; '' for one in use."""
    if server["standing"] == "active":
        return ""
    left = server["left"]
    if left is None:
        return "being counted"
    what = (
        f"{count(left['objects'], 'object')} ({size(left['bytes'])})"
        if left["objects"]
        else "nothing"
    )
    return what if server["successor"] is None else f"{what}, to {server['successor']}"


@server_command.command(
    "add",
    examples="aifs server add /srv/store /mnt/disk5/aifs\n"
    "aifs server add --domain rack-b /mnt/store /mnt/b5/aifs\n"
    "aifs server add --class cold /mnt/store /mnt/disks/aifs\n"
    "aifs server add --class archive /mnt/store s3://bucket/aifs\n"
    "aifs server add --burst /srv/store /nvme1/aifs-burst",
)
@click.option("--burst", is_flag=True, help="Add it to the burst tier: a directory on local NVMe.")
@click.option(
    "--domain",
    default="",
    metavar="NAME",
    help="The part that fails together with it, such as its host or rack.",
)
@click.option(
    "--class",
    "storage_class",
    default="",
    metavar="NAME",
    help="It is for files that have aged, and not for new ones: see user.aifs.age.",
)
@click.argument("place", metavar="PLACE", type=PATH)
@click.argument("directory", type=SERVER)
def add_command(burst: bool, domain: str, storage_class: str, place: str, directory: str) -> Report:
    """Make the empty DIRECTORY, or an unused prefix of a bucket, a data server of the store. New
    files use it, unless it has a class.

    The store remembers its servers. It is added to the list in the YAML file, too, if there is one.
    """
    import trio

    directory = absolute(directory)

    async def add() -> tuple[str, dict[str, Any]]:
        async with opened(place, adding=directory) as door:
            fields = {"path": directory, "role": "burst" if burst else "data", "domain": domain}
            if storage_class:
                fields["class"] = storage_class
            await door.order("server-add", **fields)
            return door.source, _find(await door.state(), path=directory)

    source, server = trio.run(add)
    said = {"path": directory, "domain": domain, "class": storage_class}
    _note(source, {name: text for name, text in said.items() if text}, burst)
    return Report(server, f"added {directory} to the store, as {_described(server)}")


def _find(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The newest server with these fields. Raises StoreError."""
    found = [server for server in state["servers"] if fields.items() <= server.items()]
    if not found:
        raise StoreError(
            "there is no such server in this store: "
            f"{', '.join(f'{k} {v}' for k, v in fields.items())}"
        )
    return found[-1]


def _described(server: dict[str, Any]) -> str:
    return f"{'burst directory' if server['role'] == 'burst' else 'data server'} {server['id']}"


@server_command.command(
    "drain",
    examples="aifs server drain /mnt/store 3 --wait\naifs server drain /mnt/store 3 --undo\n"
    "aifs server drain --burst /mnt/store 0",
)
@_BURST
@click.option("--undo", is_flag=True, help="Use it again. What has moved stays where it is.")
@_WAIT
@_TIMEOUT
@click.argument("place", type=PATH)
@click.argument("server", metavar="ID", type=_ID)
def drain_command(
    burst: bool, undo: bool, wait: bool, timeout_s: float | None, place: str, server: int
) -> Report:
    """Move everything off the server ID. New files do not use it any more; nothing is unavailable
    meanwhile.
    """
    import trio

    which = _which(burst, server)

    async def drain() -> bool:
        async with opened(place) as door:
            await door.order("server-drain", **which, undo=undo)
            if undo or not (wait or isinstance(door, OpenDoor)):
                return False
            await wait_for_order(door, which, timeout_s)
            return True

    emptied = trio.run(drain)
    name = _described(which)
    if undo:
        text = f"{name} is used again"
    elif emptied:
        out = f"aifs server rm {'--burst ' * burst}{place} {server}"
        text = f"{name} is empty; take it out with: {out}"
    else:
        text = f"{name} is being drained; aifs server ls {place} shows how far it is"
    return Report(which | {"empty": emptied}, text)


def _which(burst: bool, server: int) -> dict[str, Any]:
    return {"role": "burst" if burst else "data", "id": server}


async def wait_for_order(door: Any, which: dict[str, Any], timeout_s: float | None) -> None:
    """Wait until nothing is left on a server. Raises TimeoutReached; StoreError for what cannot be
    moved."""
    import trio

    begin, total, pause_s = trio.current_time(), 0, _PAUSE_MIN_S
    with progress(f"emptying {_described(which)}") as show:
        while True:
            state = await door.state()
            left = _find(state, **which)["left"]
            if left is not None:
                if not left["objects"]:
                    return
                total = max(total, left["bytes"])
                show(total - left["bytes"], total)
                if state["failing"] >= sum(
                    (server["left"] or {}).get("objects", 0) for server in state["servers"]
                ):
                    first = state["failed"][0]
                    raise StoreError(
                        f"{count(left['objects'], 'object')} cannot be moved for now, and will be "
                        f"tried again; {first['path']}: {first['reason']}"
                    )
            if timeout_s is not None and trio.current_time() - begin >= timeout_s:
                raise TimeoutReached(
                    f"{_described(which)} is not empty after {format_duration(timeout_s)}"
                )
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)


@server_command.command(
    "replace",
    examples="aifs server replace /mnt/store 3 /mnt/disk9/aifs\n"
    "aifs server replace /srv/store 3 /mnt/disk9/aifs",
)
@_WAIT
@_TIMEOUT
@click.argument("place", type=PATH)
@click.argument("server", metavar="ID", type=_ID)
@click.argument("directory", type=SERVER)
def replace_command(
    wait: bool, timeout_s: float | None, place: str, server: int, directory: str
) -> Report:
    """Have the empty DIRECTORY, or an unused prefix of a bucket, take over from the data server ID,
    under a number of its own.

    Objects that the old server still reads are moved; others are rebuilt from replicas or parity.
    """
    import trio

    directory, which = absolute(directory), _which(False, server)

    async def replace() -> tuple[dict[str, Any], bool]:
        async with opened(place, adding=directory) as door:
            await door.order("server-replace", id=server, path=directory)
            new = _find(await door.state(), path=directory)
            _note(door.source, {"path": directory}, is_burst=False)
            waited = wait or isinstance(door, OpenDoor)
            if waited:
                await wait_for_order(door, which, timeout_s)
            return new, waited

    new, waited = trio.run(replace)
    text = f"takes over; aifs server ls {place} shows how far it is"
    if waited:
        text = f"has taken over; take the old one out with: aifs server rm {place} {server}"
    return Report(new, f"{_described(new)} {text}")


@server_command.command(
    "rm",
    examples="aifs server rm /mnt/store 3\naifs server rm /mnt/store 3 --lost\n"
    "aifs server rm --burst /srv/store 1",
)
@_BURST
@click.option(
    "--lost", is_flag=True, help="It is gone for good: give up what cannot be rebuilt from others."
)
@click.option(
    "--force-lose-files",
    "sentence",
    default="",
    metavar="SENTENCE",
    help="With --lost: also if files are lost by that. The command tells the sentence to confirm "
    "it with.",
)
@_WAIT
@_TIMEOUT
@click.argument("place", type=PATH)
@click.argument("server", metavar="ID", type=_ID)
def rm_command(
    burst: bool,
    lost: bool,
    sentence: str,
    wait: bool,
    timeout_s: float | None,
    place: str,
    server: int,
) -> Report:
    """Take the server ID out of the store, if nothing lies there any more. Its number is never used
    again.
    """
    import trio

    which = _which(burst, server)
    confirmation = f"lose the files of {_described(which)}"
    if sentence and sentence != confirmation:
        raise click.UsageError(f"to confirm, give --force-lose-files {confirmation!r}")

    async def remove() -> tuple[str, list[str]]:
        async with opened(place) as door:
            servers = (await door.state())["servers"]
            paths = [one["path"] for one in servers if which.items() <= one.items()]
            while True:
                outcome = await _removal(door, which, lost, bool(sentence))
                if not outcome["reason"]:
                    return door.source, paths
                if not outcome["passing"] or not (wait or isinstance(door, OpenDoor)):
                    raise StoreError(outcome["reason"] + _advice(outcome, confirmation, place))
                await wait_for_order(door, which, timeout_s)
                await trio.sleep(_PAUSE_MAX_S)

    source, paths = trio.run(remove)
    _leave_out(source, paths)
    return Report(which, f"{_described(which)} is removed from the store")


def _note(source: str, place: dict[str, str], is_burst: bool) -> None:
    """Write a directory that came to the store into the list of its configuration file, if that has
    one: a restore looks there for backups."""
    from aifs.core import config, config_file

    file = config.load(source, {}).file
    try:
        config_file.add(
            file,
            "burst.directories" if is_burst else "servers",
            place if len(place) > 1 else place["path"],
        )
    except OSError as error:
        print_error(f"warning: {file} does not name {place['path']}: {describe_error(error)}")


def _leave_out(source: str, paths: list[str]) -> None:
    """Take directories that left the store out of its configuration file: it could not be mounted
    with them."""
    from aifs.core import config, config_file

    file = config.load(source, {}).file
    above = os.path.dirname(file)
    gone = {*map(os.path.realpath, paths), *paths}

    def is_gone(text: str) -> bool:
        return text in gone or os.path.realpath(os.path.join(above, text)) in gone

    for key in ("servers", "burst.directories"):
        try:
            if config_file.leave_out(file, key, is_gone):
                print_error(f"{file} names it no more")
        except OSError as error:
            print_error(f"warning: {file} may still name {paths[0]}: {describe_error(error)}")


async def _removal(
    door: Any, which: dict[str, Any], lost: bool, lose_files: bool
) -> dict[str, Any]:
    """Ask for it; how it ends."""
    import trio

    await door.order("server-remove", **which, lost=lost, lose_files=lose_files)
    pause_s = _PAUSE_MIN_S
    while True:
        state = await door.state()
        for removal in state["removals"]:
            if which.items() <= removal.items() and removal["outcome"] is not None:
                return removal["outcome"]
        await trio.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)


def _advice(outcome: dict[str, Any], confirmation: str, place: str) -> str:
    if outcome["passing"]:
        return f"; aifs server ls {place} shows how far that is, and --wait waits for it"
    if "would be lost" in outcome["reason"]:
        return f"; put it back, or give them up with: --force-lose-files {confirmation!r}"
    return ""


# --- hosts ----------------------------------------------------------------------------------------

_HOSTS = (
    Column("host", lambda host: f"{host['name']}{' (this one)' if host['is_this'] else ''}"),
    Column("session", show=number),
    Column("state"),
    Column("lease left", "lease_left_s", duration),
    Column("lag", show=number),
    Column("undrained", "undrained_bytes", size, "unknown"),
    Column("mirrors", "mirror_bytes", size, "unknown"),
    Column("delegated", "delegations", number),
    Column("role", lambda host: "yes" if host["has_role"] else ""),
    Column("address"),
)


@group("host", short_help="Show the hosts that have a store mounted, and fence one.")
def host_command() -> None:
    """The hosts that have a store mounted, in a cluster."""


@host_command.command(
    "ls",
    short_help="Show the hosts that have a store mounted.",
    examples="aifs host ls /mnt/store\naifs host ls /mnt/store --json",
    sizes=True,
)
@click.argument("mountpoint", type=PATH)
def ls_hosts_command(mountpoint: str) -> Report:
    """Show all hosts that have the store of MOUNTPOINT mounted, as the database and they themselves
    report.

    A host that is silent has not renewed its lease. It is ended soon, and others go on without it.
    A host that is joining copies the metadata, and serves nobody yet. The lag of a host is how many
    changes of others it has not heard of. A directory that is delegated to a host is changed there
    without waiting for the database. Undrained bytes are in the burst tier of their host alone,
    except for the mirrors of them that other hosts keep; the mirrors of a host are of the bytes of
    others. The host with the role does the background work of the whole store.
    """
    state = door.read(_cluster_at(mountpoint), "hosts")
    return Report(state, Table(_HOSTS, state["hosts"]))


@host_command.command(
    "fence",
    short_help="End the session of a host.",
    examples="aifs host fence /mnt/store gpu-003",
)
@click.argument("mountpoint", type=PATH)
@click.argument("name")
def fence_command(mountpoint: str, name: str) -> Report:
    """End the session of the host NAME at once, instead of when its lease is over.

    A host that is fenced changes nothing any more, wherever it hangs: its mount ends as soon as it
    notices. Its undrained bytes are there again when it mounts the store again.
    """
    door.put(_cluster_at(mountpoint), "fence", name)
    return Report({"fenced": name}, f"the session of host {name} has ended")


def _cluster_at(path: str) -> str:
    """The mountpoint. Raises StoreError if its store has one host."""
    mountpoint = mount_of(path)
    if not read_status(mountpoint)["cluster"]["hosts"]:
        raise StoreError(f"{path}: its store has one host (meta.engine is local)")
    return mountpoint


# --- reaching a store -----------------------------------------------------------------------------


class Door(Protocol):
    """The way to an open store."""

    where: str

    @property
    def source(self) -> str:
        """The SOURCE that the store was, or would be, mounted from."""

    async def order(self, name: str, **fields: Any) -> None:
        """Raises StoreError that says why the order is refused."""

    async def state(self) -> dict[str, Any]:
        """The value of ``user.aifs.servers``."""


class MountDoor:
    """By the mount at ``where``."""

    def __init__(self, where: str) -> None:
        self.where = where

    @property
    def source(self) -> str:
        """The SOURCE of the mount."""
        return read_status(self.where)["source"]

    async def order(self, name: str, **fields: Any) -> None:
        try:
            door.put(self.where, name, json.dumps(fields))
        except PermissionError:
            raise StoreError(f"{self.where}: only root may change the servers of a mount") from None
        except OSError as error:
            reason = (await self.state())["refused"] or error.strerror
            raise StoreError(f"refused by the mount at {self.where}: {reason}") from None

    async def state(self) -> dict[str, Any]:
        try:
            return door.read(self.where, "servers")
        except OSError as error:
            raise MountError(
                f"{self.where}: the mount does not tell its servers: {error.strerror}"
            ) from None


class OpenDoor:
    """By the filesystem that this process has open."""

    def __init__(self, fs: Any, where: str) -> None:
        self.fs = fs
        self.where = self.source = where

    async def order(self, name: str, **fields: Any) -> None:
        from aifs.files.types import ROOT
        from aifs.meta.keys import ROOT_INO

        try:
            await self.fs.setxattr(
                ROOT_INO, f"user.aifs.{name}".encode(), os.fsencode(json.dumps(fields)), caller=ROOT
            )
        except FsError as error:
            raise StoreError(str(error)) from None

    async def state(self) -> dict[str, Any]:
        from aifs.meta.keys import ROOT_INO

        return json.loads(await self.fs.getxattr(ROOT_INO, b"user.aifs.servers"))


@asynccontextmanager
async def opened(place: str, adding: str = "") -> AsyncIterator[Door]:
    """The door to ``place``, a mountpoint or a SOURCE. ``adding``: a directory that the
    configuration may name. An unmounted store is opened as by a mount, even if servers are missing.
    Raises StoreError, StoreBusy, ConfigError."""
    from aifs.vfs import open_filesystem

    mountpoint = aifs_at(place)
    async with AsyncExitStack() as stack:
        if not mountpoint:
            config = _tolerant(place)
            try:
                fs = await stack.enter_async_context(open_filesystem(config, adding=adding))
            except StoreBusy as busy:
                mountpoint = holder_of(config, busy)
        yield MountDoor(mountpoint) if mountpoint else OpenDoor(fs, place)


async def look(place: str) -> dict[str, Any]:
    """The state of ``place``, a mountpoint or a SOURCE, without changes. Raises as ``opened``."""
    from aifs.store.store import open_store
    from aifs.upkeep.server_admin import describe_idle

    mountpoint = aifs_at(place)
    if not mountpoint:
        config = _tolerant(place)
        try:
            store = await open_store(config)
        except StoreBusy as busy:
            mountpoint = holder_of(config, busy)
        else:
            try:
                return await describe_idle(store)
            finally:
                store.close()
    return await MountDoor(mountpoint).state()


def recorded(config: "Config") -> "Config":
    """With the servers that its store has by now; unchanged without a visible store."""
    import trio

    if config.is_cluster or not os.path.isdir(config.meta.directory):
        return config
    try:
        rows = trio.run(look, config.source)["servers"]
    except (AifsError, OSError):
        return config
    return config.with_servers(rows) if all(row["path"] for row in rows) else config


def _tolerant(place: str) -> "Config":
    from aifs.core import config

    return config.load(place, {"data.missing": "allow"})
