"""What the system says about mounts, and unmounting: /proc/self/mountinfo, the status xattr,
umount(8).
"""

import glob
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import Any

from aifs.cli import hints
from aifs.cli.answers import ANSWER_S, is_dead, require_answer
from aifs.cli.output import print_error
from aifs.core import connections
from aifs.core.errors import MountError, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import (
    FSTYPE,
    Mount,
    all_mounts,
    first_aifs,
    mounted_at,
    stays_mounted,
)

_END_S = 10.0  # what a process that was killed may take to end

SAFE = (
    "what was acknowledged survives the end of the daemon; what fsync, syncfs or a publish "
    "acknowledged, a power cut, too"
)
LOCKED = "Until these calls end, or this host is started anew, the store cannot be mounted"

UMOUNT_HELPER = "/sbin/umount.fuse.aifs"


def end(mount: Mount) -> None:
    """Take a mount away and kill its daemon, whether or not it answers; what waits for it gets an
    error. A daemon that serves a bind mount, too, goes on.

    Nothing acknowledged is lost. Raises MountError if the system cannot end the daemon.
    """
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
    if daemon is not None and not select.select([daemon], [], [], _END_S)[0]:
        raise MountError(
            f"{mount.mountpoint}: unmounted, and its daemon (pid {pid}) is killed, but the system "
            f"cannot end calls that it has made to a server; {SAFE}. {LOCKED}"
        )


def daemon_of(mount: Mount) -> int | None:
    """The pid of the daemon that serves the mount, also if it does not answer; None if nobody does,
    or that cannot be seen.
    """
    from aifs.core import config
    from aifs.store.owner import find_holder

    with suppress(OSError, UserError):
        pid = find_holder(config.load(mount.source, {}).meta.directory)
        if pid is not None:
            return pid
    with suppress(OSError, MountError):
        pid = read_status(mount.mountpoint)["pid"]
        return pid if connections.serves(pid) else None  # that of a container is another's here
    return None


def resolve(path: str) -> str:
    """realpath(3) of a path that may be a mountpoint; then the mount is asked nothing."""
    mount, ends = first_aifs(path)
    return mount.mountpoint if mount is not None and ends else os.path.realpath(path)


def require_aifs(path: str) -> str:
    """The absolute path of the AIFS mountpoint ``path``. Raises MountError if it is none."""
    absolute = resolve(path)
    mount = mounted_at(absolute)
    if mount is None or mount.fstype != FSTYPE:
        if not os.path.lexists(absolute):
            raise MountError(f"{path}: no such directory")
        what = f"a mount of type {mount.fstype}" if mount else "not a mountpoint"
        above = next(
            (each for each in reversed(all_mounts()) if absolute.startswith(f"{each.mountpoint}/")),
            None,
        )
        if mount is None and above is not None and above.fstype == FSTYPE:
            what = f"below the mount {above.mountpoint}"
        raise MountError(f"{path}: no AIFS is mounted here; it is {what}")
    return absolute


def mount_of(path: str) -> str:
    """The mountpoint of the AIFS that ``path`` lies in. Raises MountError if it lies in none."""
    mount, ends = first_aifs(path)
    if mount is None or not (ends or os.path.lexists(path)):
        return require_aifs(path)
    return mount.mountpoint


def require_inside(path: str, follow: bool = True) -> os.stat_result:
    """The status of ``path``, or of the symlink itself. Raises MountError if it does not lie in an
    AIFS, OSError.
    """
    found = os.stat(path, follow_symlinks=follow)
    if FSTYPE not in {mount.fstype for mount in all_mounts() if mount.device == found.st_dev}:
        raise MountError(f"{path}: does not lie in an AIFS mount")
    return found


def read_status(mountpoint: str) -> dict[str, Any]:
    """What the daemon says of itself. Raises MountError if it is dead or stuck."""
    require_answer(mountpoint)
    try:
        return within(ANSWER_S, hints.read, mountpoint, hints.STATUS)
    except OSError as error:
        if is_dead(mountpoint):
            raise MountError(
                f"{mountpoint}: the daemon of this mount is gone; mount the store here again, "
                f"or run: aifs umount {mountpoint}"
            ) from None
        raise MountError(
            f"{mountpoint}: the mount does not tell its status: {error.strerror}"
        ) from None


def unmount(
    mountpoint: str, lazy: bool = False, limit_s: float | None = None, answers: bool = True
) -> bool:
    """Take the mount away; ``lazy``: now, though its users may go on until they are done. Without
    ``answers`` who is only seen to wait for one, such as a command that was given up, goes on, too.
    MountError.

    By umount(8) without helpers, which also forgets what ``register`` noted; by FUSE's own if not
    root. False if the system is still busy with it after ``limit_s``: it first hands over what
    programs have mapped and changed.
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
    """Let umount(8) call the installed helper for this mount, which waits until all is safe.

    umount(8) looks for umount.fuse.aifs only if its table has the mount; ``mount --fake`` puts it
    there.
    """
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
    """None, and the process is left alone, if it has not ended after ``limit_s``."""
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
    """What /proc says of a process may wait for a page that it waits for itself."""
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
