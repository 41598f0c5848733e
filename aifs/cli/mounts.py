"""What the system says about mounts, and unmounting: /proc/self/mountinfo, the status xattr,
umount(8).
"""

import errno
import glob
import os
import select
import signal
import subprocess
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from aifs.cli import hints
from aifs.cli.output import print_error
from aifs.core import connections
from aifs.core.errors import MountError, UserError
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, Mount, all_mounts, first_aifs, mounted_at

if TYPE_CHECKING:
    from aifs.store.owner import Owner

WAITS_S = (1.0, 7.0, 22.0)
"""After each of these an owner file is looked at: in 8 s a daemon has noticed that its database is
away. One that answers is not, so what it takes to read the file is not needed then.
"""

ANSWER_S = sum(WAITS_S)
"""How long a daemon may take to answer what it always can. One that works hard takes some
milliseconds.
"""

_END_S = 10.0  # what a process that was killed may take to end

SAFE = (
    "what was acknowledged survives the end of the daemon; what fsync, syncfs or a publish "
    "acknowledged, a power cut, too"
)
LOCKED = "Until these calls end, or this host is started anew, the store cannot be mounted"

UMOUNT_HELPER = "/sbin/umount.fuse.aifs"


class Stuck(MountError):
    """The daemon of a mount lives, and does not answer."""


class AwaitsDatabase(MountError):
    """The daemon of a mount lives, and answers nobody before its database does. ``owner``: what it
    says of itself."""

    def __init__(self, path: str, owner: "Owner") -> None:
        super().__init__(f"{path}: {owner.doing}")
        self.owner = owner


def _require_database(path: str) -> None:
    """Raises AwaitsDatabase if the daemon of the mount there says so in its owner file, which can
    be read without asking the mount.
    """
    try:
        from aifs.core import config
        from aifs.store.owner import find_holder, read_owner
    except ImportError:  # where no daemon can run: nobody there knows the file
        return
    mount, owner = mounted_at(path), None
    with suppress(OSError, UserError):  # it may be out of reach for who is not root
        loaded = config.load(mount.source, {}) if mount is not None else None
        if loaded is not None and loaded.is_cluster and find_holder(loaded.meta.directory):
            owner = read_owner(loaded.meta.directory)
    if owner is not None and owner.doing:
        raise AwaitsDatabase(path, owner)


def is_dead(path: str) -> bool:
    """Whether the daemon of the mount at ``path`` was killed without unmounting. Raises Stuck after
    ANSWER_S, AwaitsDatabase.

    Asked by an extended attribute that nothing has: a stat may be answered from the kernel's cache,
    and a statvfs wait for a data server.
    """
    for limit_s in WAITS_S:
        try:
            within(limit_s, os.getxattr, path, hints.NONE)
        except TimeoutError:
            _require_database(path)
        except OSError as error:
            return error.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        else:
            return False
    raise Stuck(
        f"{path}: no answer for {ANSWER_S:g} s; the daemon is stuck. To mount the store here "
        "again, or aifs umount --force, ends it, and loses nothing that was acknowledged"
    )


def require_answer(path: str) -> None:
    """Raises Stuck if whoever asks about ``path`` would have to wait, and could not be killed."""
    is_dead(path)


def end(mount: Mount) -> None:
    """Take a mount away and kill its daemon, whether or not it answers; what waits for it gets an
    error.

    Nothing acknowledged is lost. Raises MountError if the system cannot end the daemon.
    """
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
        users = _users_of(mountpoint)
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
