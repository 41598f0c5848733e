"""``aifs umount``: unmount, and wait until everything is safe. Also the protocol of umount(8) helpers."""

import os
import select
import sys
from typing import Any

import click

from aifs.cli.arguments import PATH
from aifs.cli.drain import Left, drain, left
from aifs.cli.output import print_error
from aifs.core.errors import MountError, UserError

NOTICE_S = 5.0


EPILOG = """
\b
Examples:
  aifs umount /mnt/store
  aifs umount /mnt/store --drain
"""


@click.command("umount", epilog=EPILOG)
@click.argument("mountpoint", type=PATH)
@click.option("-l", "--lazy", is_flag=True, help="Take it away now; do not wait for its users.")
@click.option(
    "--drain", "drain_first", is_flag=True, help="First wait until all is on the capacity tier."
)
@click.option("-n", is_flag=True, hidden=True, expose_value=False)
@click.option("-f", is_flag=True, hidden=True, expose_value=False)
@click.option("-v", is_flag=True, hidden=True, expose_value=False)
@click.option("-r", is_flag=True, hidden=True, expose_value=False)
@click.option("-t", hidden=True, expose_value=False)
def umount_command(mountpoint: str, lazy: bool, drain_first: bool) -> None:
    """Unmount MOUNTPOINT.

    Returns when the daemon has ended: everything that was acknowledged is on stable storage by then. What the burst tier
    has not drained yet stays there, as safe as its devices are, and is drained after the next mount, or before
    with --drain.
    A mount whose daemon was killed is just taken away; what was acknowledged is found by the next mount. The same
    goes, with an error, where the daemon could not write everything to its servers.
    """
    from aifs.cli.mounts import is_dead, read_status, require_aifs, unmount

    path = require_aifs(mountpoint)
    os.chdir("/")  # do not be the one who keeps it busy
    if lazy or is_dead(path):
        unmount(path, lazy=True)
        return
    status = read_status(path)
    undrained = _drain(path) if drain_first else _undrained(path)
    pid = status["pid"]
    try:
        daemon = os.pidfd_open(pid)
    except ProcessLookupError:
        raise MountError(
            f"{mountpoint}: its daemon (pid {pid}) runs where this process cannot wait for it; unmount there"
        ) from None
    try:
        unmount(path)
        if not select.select([daemon], [], [], NOTICE_S)[0]:
            print_error(
                f"waiting for the daemon (pid {pid}): it writes, or a container still has the mount"
            )
            select.select([daemon], [], [])
    finally:
        os.close(daemon)
    if undrained.files and sys.stdout.isatty():  # scripts compare what umount(8) prints: nothing
        print(f"in the burst tier alone until the next mount drains it: {undrained}")
    _require_orderly_end(mountpoint, status)


def _drain(mountpoint: str) -> Left:
    drain([mountpoint], None)
    return left([mountpoint])


def _undrained(mountpoint: str) -> Left:
    try:
        return left([mountpoint])
    except (
        OSError
    ):  # a mount that cannot tell, because its metadata is gone, has to go all the same
        return Left(0, 0, 0)


def _require_orderly_end(mountpoint: str, status: dict[str, Any]) -> None:
    """Raises MountError if the daemon that gave ``status`` has not closed its store in order.

    Then the store's owner file still names it. That file may be out of reach for who is not root.
    """
    from aifs.core import config
    from aifs.vfs.owner import read_owner

    try:
        loaded = config.load(status["source"], {})
        owner = read_owner(loaded.meta.directory)
    except (OSError, UserError):
        return
    if owner is not None and (owner.pid, owner.mountpoint) == (status["pid"], status["mountpoint"]):
        raise MountError(
            f"{mountpoint}: unmounted, but its daemon could not close the store in order, and its log "
            f"{loaded.log.file} says why; what was acknowledged is recovered by the next mount"
        )
