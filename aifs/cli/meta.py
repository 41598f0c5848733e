"""``aifs meta``: backups of a store's metadata; the database of a cluster."""

import os
import socket
import time

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.cli.meta_copy import copy_command
from aifs.cli.meta_serve import serve_command

_PAUSE_S = 0.05
_ANSWER_S = 10.0


@click.group("meta")
def meta_group() -> None:
    """Back up, restore, move and serve the metadata of stores.

    While a store is mounted backups are made by themselves, every meta.backup_interval, onto its
    data servers.
    """


meta_group.add_command(serve_command)
meta_group.add_command(copy_command)


_BACKUP_EXAMPLES = """\b
Examples:
  aifs meta backup /mnt/store
  aifs meta backup /srv/store --to /backup/store-meta"""


@meta_group.command("backup", epilog=_BACKUP_EXAMPLES)
@click.argument("source", type=PATH, metavar="SOURCE|MNT")
@click.option(
    "--to", "directory", type=PATH, help="Write a whole copy into this directory instead."
)
def backup_command(source: str, directory: str | None) -> None:
    """Back up the metadata of the store SOURCE, mounted or not, or of the mount MNT, now. Returns
    when it is durable.
    """
    from aifs.cli.mounts import FSTYPE, mounted_at
    from aifs.core import config
    from aifs.core.errors import StoreBusy
    from aifs.store.owner import read_owner
    from aifs.store.restore import back_up

    directory = os.path.abspath(directory) if directory is not None else ""
    mount = mounted_at(os.path.realpath(source))
    if mount is not None and mount.fstype == FSTYPE:
        _ask(mount.mountpoint, directory)
        return
    loaded = config.load(source, {})
    try:
        back_up(loaded, directory)
    except StoreBusy:
        owner = read_owner(loaded.meta.directory)
        if (
            owner is None
            or owner.closed
            or not owner.mountpoint
            or owner.host != socket.gethostname()
        ):
            raise
        _ask(owner.mountpoint, directory)


def _ask(mountpoint: str, directory: str) -> None:
    """Have the mount make one, and wait for it."""
    from aifs.cli.answers import require_answer
    from aifs.cli.mounts import read_status
    from aifs.core.errors import MountError

    require_answer(mountpoint)

    token = f"{os.getpid()}-{time.time_ns()}"
    hints.put(mountpoint, hints.BACKUP, f"{token}:{directory}")
    while (error := read_status(mountpoint)["backup"]["answers"].get(token)) is None:
        time.sleep(_PAUSE_S)
    if error:
        raise MountError(f"{mountpoint}: no backup was made: {error}")


@meta_group.command(
    "list",
    epilog="\b\nExamples:\n  aifs meta list /srv/store\n  aifs meta list /srv/store --from "
    "/backup/store-meta",
)
@click.argument("source", type=PATH)
@click.option(
    "--from", "directory", type=PATH, help="Look into this directory instead of the data servers."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def list_command(source: str, directory: str | None, as_json: bool) -> None:
    """Show which states of the metadata of the store SOURCE are backed up on its data servers, the
    newest first.
    """
    from dataclasses import asdict

    from aifs.cli.output import describe_time, print_json, print_table
    from aifs.cli.server_orders import recorded
    from aifs.core import config
    from aifs.core.units import describe_size
    from aifs.store.restore import answering, find, states

    loaded = answering(recorded(config.load(source, {})))
    found = list(states(find(loaded, directory or "")[1]))
    if as_json:
        print_json([asdict(state) for state in found])
        return
    rows = [
        (
            state.generation,
            state.seq,
            describe_time(state.created_ns / 1e9) if state.created_ns else "damaged",
            state.segments,
            describe_size(state.bytes),
        )
        for state in found
    ]
    print_table(
        ("generation", "sequence", "made", "files", "size"),
        rows,
        right=("generation", "sequence", "files", "size"),
    )


_RESTORE_EXAMPLES = """\b
Examples:
  aifs meta restore /srv/store
  aifs meta restore /srv/store --from /backup/store-meta
  aifs fsck /srv/store"""


@meta_group.command("restore", epilog=_RESTORE_EXAMPLES)
@click.argument("source", type=PATH)
@click.option(
    "--from",
    "directory",
    type=PATH,
    help="Take the backup from this directory instead of the data servers.",
)
@click.option(
    "--at", type=int, help="The newest state up to this sequence number (aifs meta list)."
)
@click.option(
    "--force", is_flag=True, help="Also if another host is seen to use the store: it loses it."
)
def restore_command(source: str, directory: str | None, at: int | None, force: bool) -> None:
    """Make the metadata directory of the store SOURCE anew from the newest backup that is whole.

    The directory must be empty or missing. Whoever used the store with other metadata loses the
    right to it; that nobody does is looked for first. Files are as they were when the backup was
    made; what was written since, or its objects, stays on the servers, unknown: aifs fsck names it.
    """
    from aifs.cli.output import describe_time
    from aifs.core import config
    from aifs.store.restore import answering, find, restore

    loaded = answering(config.load(source, {}))
    _require_unmounted(find(loaded, "")[0])
    state = restore(loaded, directory or "", at, force)
    print(
        f"restored {loaded.meta.directory} to the state of {describe_time(state.created_ns / 1e9)} "
        f"(sequence {state.seq}, generation {state.generation})"
    )
    print(
        f"aifs fsck {source} tells what is missing, and what is there that the metadata does not "
        "know of"
    )


def _require_unmounted(store: str) -> None:
    """A daemon that has lost its metadata directory goes on, on the same data servers, without
    anything that says so.

    Raises MountError if one of this host serves the store with that uuid.
    """
    from aifs.cli.mounts import FSTYPE, all_mounts
    from aifs.cli.output import print_error
    from aifs.core.errors import MountError
    from aifs.core.limits import within

    for mount in all_mounts():
        if mount.fstype != FSTYPE:
            continue
        try:
            served = within(_ANSWER_S, _store_of, mount.mountpoint)
        except (TimeoutError, MountError) as error:
            print_error(f"{mount.mountpoint}: nobody knows which store is mounted here: {error}")
            continue
        if served == store:
            raise MountError(
                f"{mount.mountpoint}: the store is mounted here; copy what you need, and unmount "
                "it first"
            )


def _store_of(mountpoint: str) -> str:
    """The uuid of the store that is mounted there; '' if its daemon is dead, or it has been
    unmounted meanwhile.
    """
    from aifs.cli.answers import is_dead
    from aifs.cli.mounts import mounted_at, read_status
    from aifs.core.errors import MountError

    try:
        return read_status(mountpoint)["uuid"]
    except MountError:
        if is_dead(mountpoint) or mounted_at(mountpoint) is None:
            return ""
        raise
