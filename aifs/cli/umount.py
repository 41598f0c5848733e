"""``aifs umount``: unmount, and wait until everything is safe; umount(8)'s protocol for helpers."""

import glob
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from aifs.cli.command import DURATION, MOUNTPOINT, command
from aifs.cli.door import ANSWER_S, AwaitsDatabase, daemon_of, is_dead, read_status, require_aifs
from aifs.cli.output import print_error
from aifs.cli.tiers import Left, drain, left
from aifs.core import connections
from aifs.core.errors import MountError, TimeoutReached, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, Mount, all_mounts, mounted_at, stays_mounted

if TYPE_CHECKING:
    from aifs.store.owner import Owner

NOTICE_S = 5.0
_PAUSE_S = 0.5
_END_S = 5.0  # what a process that has closed the store may take to end

_KILLED_S = 10.0  # what a process that was killed may take to end

SAFE = (
    "what was acknowledged survives the end of the daemon; what fsync, syncfs or a publish "
    "acknowledged, a power cut, too"
)
LOCKED = "Until these calls end, or this host is started anew, the store cannot be mounted"

UMOUNT_HELPER = "/sbin/umount.fuse.aifs"

_KERNEL = "the system hands over what programs have changed in memory that they have mapped"


@command(
    "umount",
    examples="aifs umount /mnt/store\naifs umount /mnt/store --drain\n"
    "aifs umount --force /mnt/store",
    sizes=True,
)
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
    then. Undrained files stay in the burst tier, as safe as its devices are, and is
    drained after the next mount, or before with --drain. A mount whose daemon was killed is just
    taken away; the next mount finds all that was acknowledged. The same goes, with an error,
    where the daemon could not write everything to its servers. While a server does not answer, the
    command says so. With --force programs that use the mount get errors, and what they have changed
    in mapped memory and not synced is lost; the next mount recovers all that was acknowledged.
    That is refused as long as the system cannot end calls to a server.

    A bind mount of a mount, or a mount that has one, is only taken away: the daemon serves what is
    left.
    """
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
    """Wait for the daemon's end, or for a store closed in order by one that cannot end: then why.
    Prints what it waits for. Raises TimeoutReached; MountError if the store was not closed in
    order."""
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
    except OSError:
        # A mount that cannot tell, because its metadata is gone, has to go all the same.
        return Left(0, 0, 0)


def _require_orderly_end(mountpoint: str, status: dict[str, Any]) -> None:
    """Raises MountError if the daemon that gave ``status`` has not closed its store in order: the
    owner file, if readable, still names it."""
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
    """The owner file that the daemon of ``status`` left in its store, unless closed in order."""
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


# --- taking mounts away ---------------------------------------------------------------------------


def end(mount: Mount) -> None:
    """Take a mount away and kill its daemon; waiting callers get an error. A daemon with another
    bind mount goes on. Nothing acknowledged is lost. Raises MountError if the daemon cannot be
    ended."""
    if stays_mounted(mount):
        unmount(mount.mountpoint, lazy=True)
        return
    pid = daemon_of(mount)
    connection = daemon = None
    with suppress(OSError):  # then the daemon's end is that of the connection
        connection = connections.open_abort(mount.device)
    if pid is not None:
        with suppress(OSError):
            daemon = os.pidfd_open(pid)
    unmount(mount.mountpoint, lazy=True)
    if daemon is not None:
        signal.pidfd_send_signal(daemon, signal.SIGKILL)
    if connection is not None:
        connections.abort(connection)
    if daemon is not None and not select.select([daemon], [], [], _KILLED_S)[0]:
        raise MountError(
            f"{mount.mountpoint}: unmounted, and its daemon (pid {pid}) is killed, but the system "
            f"cannot end calls that it has made to a server; {SAFE}. {LOCKED}"
        )


def unmount(
    mountpoint: str, lazy: bool = False, limit_s: float | None = None, answers: bool = True
) -> bool:
    """Take the mount away; ``lazy``: now, while users may go on. Without ``answers`` processes that
    wait for one go on, too. Raises MountError.

    By umount(8) without helpers, which forgets ``register``; by FUSE's own if not root. False if
    the system is still busy after ``limit_s``, with mapped changes.
    """
    if os.geteuid() == 0:
        command = ["umount", "--internal-only", "--no-canonicalize", *["--lazy"] * lazy]
    else:
        command = ["fusermount3", "-u", *["-z"] * lazy, "--"]
    done = _run(*command, mountpoint, limit_s=limit_s)
    if done is None:
        return False
    if done.returncode == 0:
        return True
    if "busy" in done.stderr:
        users = _users_in_time(mountpoint)
        if not (users or answers):
            return unmount(mountpoint, lazy=True)
        raise MountError(f"{mountpoint}: is in use by {_describe(users)}")
    if "not found in" in done.stderr:  # fusermount3 looks for the caller's own mounts alone
        raise MountError(
            f"{mountpoint}: was mounted by another user; only that user or root can unmount it"
        )
    raise MountError(f"{mountpoint}: cannot be unmounted: {done.stderr.strip()}")


def register(source: str, mountpoint: str) -> None:
    """Let umount(8) call the installed helper, which waits until all is safe: umount.fuse.aifs is
    sought only for mounts in its table, where ``mount --fake`` puts them."""
    if os.geteuid() == 0 and os.path.exists(UMOUNT_HELPER):
        options = [
            "--fake",
            "--internal-only",
            "--no-canonicalize",
            "-t",
            FSTYPE,
            "-o",
            "uhelper=fuse.aifs",
        ]
        done = _run("mount", *options, source, mountpoint)
        if done is not None and done.returncode:
            print_error(f"umount(8) will not wait for this mount's daemon: {done.stderr.strip()}")


def _run(*command: str, limit_s: float | None = None) -> subprocess.CompletedProcess[str] | None:
    """None, leaving the process alone, if it has not ended after ``limit_s``."""
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command,
        stdout=pipe,
        stderr=pipe,
        text=True,
        errors="surrogateescape",
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _users_in_time(mountpoint: str) -> list[str]:
    """Reading /proc may wait for a page that the process waits for."""
    try:
        return within(ANSWER_S, _users_of, mountpoint)
    except TimeoutError:
        return ["a process that waits for a page of a file"]


def _users_of(mountpoint: str) -> list[str]:
    below = [
        mount.mountpoint for mount in all_mounts() if mount.mountpoint.startswith(f"{mountpoint}/")
    ]
    return [f"the mount {path}" for path in below] + _processes_using(mountpoint)


def _describe(users: list[str]) -> str:
    if not users:
        return "a process that cannot be seen from here; fuser -vm shows more"
    more = f" and {len(users) - 3} more" if len(users) > 3 else ""
    return ", ".join(users[:3]) + more


def _processes_using(mountpoint: str) -> list[str]:
    found = []
    for process in sorted(glob.glob("/proc/[0-9]*"), key=lambda path: int(path[6:])):
        try:
            links = [f"{process}/{name}" for name in ("cwd", "root", "exe")]
            for folder in ("fd", "map_files"):
                links += [entry.path for entry in os.scandir(f"{process}/{folder}")]
            if any(_is_below(mountpoint, link) for link in links):
                with open(f"{process}/comm") as comm:
                    found.append(f"{comm.read().strip()} (pid {process[6:]})")
        except OSError:  # the process is gone, or is another user's
            continue
    return found


def _is_below(mountpoint: str, link: str) -> bool:
    try:
        target = os.readlink(link)
    except OSError:  # closed meanwhile
        return False
    return target == mountpoint or target.startswith(f"{mountpoint}/")
