"""``aifs server``: the data servers and burst directories of a store, which come and go while it is
in use.
"""

import os
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import DURATION, PATH
from aifs.cli.output import count, print_error
from aifs.core.errors import StoreError, TimeoutReached
from aifs.core.units import describe_size, format_duration

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


@click.group("server", short_help="Add, drain, replace and remove data servers.")
def server_group() -> None:
    """Look at, add, drain, replace and remove data servers and burst directories of a store.

    PLACE is a mountpoint, or a SOURCE, mounted or not. The work for a store that is not mounted is
    done by the command itself, to its end; a mount goes on with it when the command has returned,
    and after a restart.
    """


@server_group.command(
    "status",
    epilog="\b\nExamples:\n  aifs server status /mnt/store\n  aifs server status /srv/store --json",
)
@click.argument("place", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def status_command(place: str, as_json: bool) -> None:
    """Show the servers of PLACE: whether they work, and what is left on those that are drained or
    lost.
    """
    import trio

    from aifs.cli.output import print_json, print_table
    from aifs.cli.server_orders import look

    state = trio.run(look, place)
    if as_json:
        print_json(state)
        return
    rows = [
        (
            _name(server),
            server["standing"],
            server["state"],
            server["domain"],
            server["class"],
            _size(server["used_bytes"]),
            _size(server["free_bytes"]),
            describe_left(server),
            server["path"],
            server["last_error"],
        )
        for server in state["servers"]
    ]
    print_table(
        (
            "server",
            "standing",
            "state",
            "domain",
            "class",
            "used",
            "free",
            "left",
            "path",
            "last error",
        ),
        rows,
        right=("used", "free"),
    )
    if any(server["left"] and server["left"]["objects"] for server in state["servers"]):
        print()
        print(f"moving {describe_size(state['bytes_per_s'])}/s{_estimate(state)}")
    for failed in state["failed"][:_FAILED_SHOWN]:
        print_error(f"{failed['path']}: {failed['reason']}")


def _name(server: dict[str, Any]) -> str:
    return f"burst {server['id']}" if server["role"] == "burst" else str(server["id"])


def _size(size: int | None) -> str:
    return "unknown" if size is None else describe_size(size)


def describe_left(server: dict[str, Any]) -> str:
    """What is left on a server that is to be left; '' for one in use."""
    if server["standing"] == "active":
        return ""
    left = server["left"]
    if left is None:
        return "being counted"
    what = (
        f"{count(left['objects'], 'object')} ({describe_size(left['bytes'])})"
        if left["objects"]
        else "nothing"
    )
    return what if server["successor"] is None else f"{what}, to {server['successor']}"


def _estimate(state: dict[str, Any]) -> str:
    return (
        ""
        if state["estimate_s"] is None
        else f", about {format_duration(round(state['estimate_s']))} left"
    )


_ADD = """\b
Examples:
  aifs server add /srv/store /mnt/disk5/aifs
  aifs server add --domain rack-b /mnt/store /mnt/b5/aifs
  aifs server add --class cold /mnt/store /mnt/disks/aifs
  aifs server add --burst /srv/store /nvme1/aifs-burst"""


@server_group.command("add", epilog=_ADD)
@click.option("--burst", is_flag=True, help="Add it to the burst tier: a directory on local NVMe.")
@click.option(
    "--domain",
    default="",
    metavar="NAME",
    help="What fails together with it, such as its host or rack.",
)
@click.option(
    "--class",
    "storage_class",
    default="",
    metavar="NAME",
    help="It is for files that have aged, and not for new ones: see user.aifs.age.",
)
@click.argument("place", metavar="PLACE", type=PATH)
@click.argument("directory", type=PATH)
def add_command(burst: bool, domain: str, storage_class: str, place: str, directory: str) -> None:
    """Make the empty DIRECTORY a data server of the store. New files use it, unless it has a class.

    The store remembers its servers; a YAML file need not list those that were added.
    """
    import trio

    from aifs.cli.server_orders import opened

    directory = os.path.abspath(directory)

    async def add() -> dict[str, Any]:
        async with opened(place, adding=directory) as door:
            fields = {"path": directory, "role": "burst" if burst else "data", "domain": domain}
            if storage_class:
                fields["class"] = storage_class
            await door.order(hints.SERVER_ADD, **fields)
            return _find(await door.state(), path=directory)

    print(f"added {directory} to the store, as {_described(trio.run(add))}")


def _find(state: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The newest server of which all this is true. Raises StoreError."""
    found = [server for server in state["servers"] if fields.items() <= server.items()]
    if not found:
        raise StoreError(
            "there is no such server in this store: "
            f"{', '.join(f'{k} {v}' for k, v in fields.items())}"
        )
    return found[-1]


def _described(server: dict[str, Any]) -> str:
    return f"{'burst directory' if server['role'] == 'burst' else 'data server'} {server['id']}"


_DRAIN = """\b
Examples:
  aifs server drain /mnt/store 3 --wait
  aifs server drain /mnt/store 3 --undo
  aifs server drain --burst /mnt/store 0"""


@server_group.command("drain", epilog=_DRAIN)
@_BURST
@click.option("--undo", is_flag=True, help="Use it again. What has moved stays where it is.")
@_WAIT
@_TIMEOUT
@click.argument("place", type=PATH)
@click.argument("server", metavar="ID", type=_ID)
def drain_command(
    burst: bool, undo: bool, wait: bool, timeout_s: float | None, place: str, server: int
) -> None:
    """Move everything off the server ID. New files do not use it any more; nothing is unavailable
    meanwhile.
    """
    import trio

    from aifs.cli.server_orders import OpenDoor, opened

    which = _which(burst, server)

    async def drain() -> bool:
        async with opened(place) as door:
            await door.order(hints.SERVER_DRAIN, **which, undo=undo)
            if undo or not (wait or isinstance(door, OpenDoor)):
                return False
            await wait_for_order(door, which, timeout_s)
            return True

    emptied = trio.run(drain)
    name = _described(which)
    if undo:
        print(f"{name} is used again")
    elif emptied:
        print(
            f"{name} is empty; take it out with: aifs server remove {'--burst ' * burst}{place} "
            f"{server}"
        )
    else:
        print(f"{name} is being drained; aifs server status {place} shows how far it is")


def _which(burst: bool, server: int) -> dict[str, Any]:
    return {"role": "burst" if burst else "data", "id": server}


async def wait_for_order(door: Any, which: dict[str, Any], timeout_s: float | None) -> None:
    """Until nothing is left on a server. Raises TimeoutReached; StoreError if what is left cannot
    be moved.
    """
    import trio

    from aifs.cli.progress import progress

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


_REPLACE = """\b
Examples:
  aifs server replace /mnt/store 3 /mnt/disk9/aifs
  aifs server replace /srv/store 3 /mnt/disk9/aifs"""


@server_group.command("replace", epilog=_REPLACE)
@_WAIT
@_TIMEOUT
@click.argument("place", type=PATH)
@click.argument("server", metavar="ID", type=_ID)
@click.argument("directory", type=PATH)
def replace_command(
    wait: bool, timeout_s: float | None, place: str, server: int, directory: str
) -> None:
    """Have the empty DIRECTORY take over from the data server ID, under a number of its own.

    What can be read from the old server is moved; what cannot is rebuilt from replicas or parity.
    """
    import trio

    from aifs.cli.server_orders import OpenDoor, opened

    directory, which = os.path.abspath(directory), _which(False, server)

    async def replace() -> tuple[dict[str, Any], bool]:
        async with opened(place, adding=directory) as door:
            await door.order(hints.SERVER_REPLACE, id=server, path=directory)
            new = _find(await door.state(), path=directory)
            waited = wait or isinstance(door, OpenDoor)
            if waited:
                await wait_for_order(door, which, timeout_s)
            return new, waited

    new, waited = trio.run(replace)
    if waited:
        print(
            f"{_described(new)} has taken over; take the old one out with: aifs server remove "
            f"{place} {server}"
        )
    else:
        print(f"{_described(new)} takes over; aifs server status {place} shows how far it is")


_REMOVE = """\b
Examples:
  aifs server remove /mnt/store 3
  aifs server remove /mnt/store 3 --lost
  aifs server remove --burst /srv/store 1"""


@server_group.command("remove", epilog=_REMOVE)
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
def remove_command(
    burst: bool,
    lost: bool,
    sentence: str,
    wait: bool,
    timeout_s: float | None,
    place: str,
    server: int,
) -> None:
    """Take the server ID out of the store, if nothing lies there any more. Its number is never used
    again.
    """
    import trio

    from aifs.cli.server_orders import OpenDoor, opened

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
    print(f"{_described(which)} is removed from the store")
    _warn_if_named(source, paths)


def _warn_if_named(source: str, paths: list[str]) -> None:
    """A configuration file that names a directory which is no part of the store any more keeps it
    from being mounted.
    """
    from aifs.cli.output import print_error
    from aifs.core import config

    if config.is_directory_source(source):
        return
    loaded = config.load(source, {})
    named = set(map(os.path.realpath, (*loaded.servers, *loaded.burst.directories)))
    for path in (path for path in paths if os.path.realpath(path) in named):
        print_error(
            f"warning: {source} still names {path}: take it out of the file, or the next mount is "
            "refused"
        )


async def _removal(
    door: Any, which: dict[str, Any], lost: bool, lose_files: bool
) -> dict[str, Any]:
    """Ask for it; how it ends."""
    import trio

    await door.order(hints.SERVER_REMOVE, **which, lost=lost, lose_files=lose_files)
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
        return f"; aifs server status {place} shows how far that is, and --wait waits for it"
    if "would be lost" in outcome["reason"]:
        return f"; put it back, or give them up with: --force-lose-files {confirmation!r}"
    return ""
