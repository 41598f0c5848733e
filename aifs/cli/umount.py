"""``aifs umount``: unmount, and wait until everything is safe. Also the protocol of umount(8)
helpers.
"""

import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.arguments import DURATION, MOUNTPOINT
from aifs.cli.drain import Left, drain, left
from aifs.cli.output import print_error
from aifs.core.errors import MountError, TimeoutReached, UserError
from aifs.core.limits import within

if TYPE_CHECKING:
    from aifs.store.owner import Owner

NOTICE_S = 5.0
_PAUSE_S = 0.5
_END_S = 5.0  # what a process that has closed the store may take to end

_KERNEL = "the system hands over what programs have changed in memory that they have mapped"

EPILOG = """
\b
Examples:
  aifs umount /mnt/store
  aifs umount /mnt/store --drain
  aifs umount --force /mnt/store"""


@click.command("umount", epilog=EPILOG)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("-l", "--lazy", is_flag=True, help="Take it away now; do not wait for its users.")
@click.option(
    "-f",
    "--force",
    is_flag=True,
    help="End it now, whatever its users and its servers do: kill the daemon. Nothing acknowledged "
    "is lost.",
)
@click.option(
    "--drain", "drain_first", is_flag=True, help="First wait until all is on the capacity tier."
)
@click.option(
    "--timeout",
    "timeout_s",
    type=DURATION,
    default="2min",
    show_default=True,
    help="Wait for the daemon no longer than that (exit code 7); it goes on.",
)
@click.option("-n", is_flag=True, hidden=True, expose_value=False)
@click.option("-v", is_flag=True, hidden=True, expose_value=False)
@click.option("-r", is_flag=True, hidden=True, expose_value=False)
@click.option("-t", hidden=True, expose_value=False)
def umount_command(
    mountpoint: str, lazy: bool, force: bool, drain_first: bool, timeout_s: float
) -> None:
    """Unmount MOUNTPOINT.

    Returns when the daemon has ended: everything that was acknowledged is on stable storage by
    then. What the burst tier has not drained yet stays there, as safe as its devices are, and is
    drained after the next mount, or before with --drain. A mount whose daemon was killed is just
    taken away; what was acknowledged is found by the next mount. The same goes, with an error,
    where the daemon could not write everything to its servers. While a server does not answer, the
    command says so. With --force programs that use the mount get errors, and what they have changed
    in mapped memory and not synced is lost; what was acknowledged is recovered by the next mount.
    That is refused as long as the system cannot end calls to a server.

    A bind mount of a mount, or a mount that has one, is only taken away: the daemon serves what is
    left.
    """
    from aifs.cli.answers import AwaitsDatabase, is_dead
    from aifs.cli.mounts import LOCKED, end, mounted_at, read_status, require_aifs, unmount
    from aifs.core.mountinfo import stays_mounted

    path = require_aifs(mountpoint)
    os.chdir("/")  # do not be the one who keeps it busy
    if (mount := mounted_at(path)) is not None and stays_mounted(mount):
        if drain_first:
            _drain(path)
        unmount(path, lazy=lazy or force)
        return
    if force:
        mount = mounted_at(path)
        if mount is not None:  # else it has just been unmounted
            end(mount)
        return
    begin_s, answers = time.monotonic(), True
    try:
        if lazy or is_dead(path):
            unmount(path, lazy=True)
            return
        status = read_status(path)
        undrained = _drain(path) if drain_first else find_undrained(path)
    except AwaitsDatabase as error:
        mount = mounted_at(path)
        if drain_first or mount is None:
            raise
        owner = error.owner
        status = {"pid": owner.pid, "mountpoint": owner.mountpoint, "source": mount.source}
        undrained, answers = Left(0, 0, 0), False  # nobody knows
    pid = status["pid"]
    try:
        daemon = os.pidfd_open(pid)
    except ProcessLookupError:
        raise MountError(
            f"{mountpoint}: its daemon (pid {pid}) runs where this process cannot wait for it; "
            "unmount there"
        ) from None
    # Draining has no limit; what else was asked for counts.
    until_s = (time.monotonic() if drain_first else begin_s) + timeout_s
    try:
        limit_s = max(until_s - time.monotonic(), _PAUSE_S)
        is_taken = unmount(path, limit_s=limit_s, answers=answers)
        closed = wait_for_daemon(mountpoint, daemon, status, is_taken, until_s)
    finally:
        os.close(daemon)
    if undrained.files and sys.stdout.isatty():  # scripts compare what umount(8) prints: nothing
        print(f"in the burst tier alone until the next mount drains it: {undrained}")
    if closed:
        print_error(
            f"everything is safe, but the daemon (pid {pid}) cannot end: {closed}. {LOCKED}"
        )
    else:
        _require_orderly_end(mountpoint, status)


def wait_for_daemon(
    mountpoint: str, daemon: int, status: dict[str, Any], is_taken: bool, until_s: float
) -> str:
    """Until the daemon has ended, or has closed the store in order but cannot end: then why. Says
    what it waits for.

    Raises TimeoutReached; MountError if the store could not be closed in order.
    """
    from aifs.cli.mounts import SAFE
    from aifs.store.owner import IN_ORDER

    pid, said, closed_s = status["pid"], "", 0.0
    notice_s = time.monotonic() + NOTICE_S
    while not select.select([daemon], [], [], _PAUSE_S)[0]:
        now_s = time.monotonic()
        owner = _owner(status)
        doing = owner.doing if owner is not None else ""
        if owner is not None and owner.closed:
            closed_s = closed_s or now_s
            if now_s >= min(closed_s + _END_S, until_s):
                if owner.closed == IN_ORDER:
                    return doing
                break
        why = doing or ("it writes, or a container still has the mount" if is_taken else _KERNEL)
        if now_s >= until_s:
            raise TimeoutReached(
                f"{mountpoint}: the daemon (pid {pid}) has not closed the store in time: {why}. It "
                f"goes on; {SAFE}. To end it now: kill -9 {pid}; the next mount recovers the store"
            )
        if now_s >= notice_s and why != said:
            said = why
            print_error(f"waiting for the daemon (pid {pid}): {why}")
    return ""


def _drain(mountpoint: str) -> Left:
    drain([mountpoint], None)
    return left([mountpoint])


def find_undrained(mountpoint: str) -> Left:
    try:
        return within(NOTICE_S, left, [mountpoint])
    except (
        OSError
    ):  # a mount that cannot tell, because its metadata is gone, has to go all the same
        return Left(0, 0, 0)


def _require_orderly_end(mountpoint: str, status: dict[str, Any]) -> None:
    """Raises MountError if the daemon that gave ``status`` has not closed its store in order.

    Then the store's owner file still names it. That file may be out of reach for who is not root.
    """
    from aifs.cli.mounts import SAFE
    from aifs.core import config
    from aifs.store.owner import IN_ORDER

    owner = _owner(status)
    if owner is not None and owner.closed != IN_ORDER:
        log = config.load(status["source"], {}).log.file
        raise MountError(
            f"{mountpoint}: unmounted, but its daemon could not close the store in order, and its "
            f"log {log} says why; {SAFE}; the next mount recovers the store"
        )


def _owner(status: dict[str, Any]) -> "Owner | None":
    """What the daemon that gave ``status`` has written of itself into its store, if it has not
    closed that in order.
    """
    from aifs.core import config
    from aifs.store.owner import read_owner

    try:
        owner = read_owner(config.load(status["source"], {}).meta.directory)
    except (OSError, UserError):
        return None
    is_its = owner is not None and (owner.pid, owner.mountpoint) == (
        status["pid"],
        status["mountpoint"],
    )
    return owner if is_its else None
