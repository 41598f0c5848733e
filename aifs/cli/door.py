"""The door to a mount: where it is, whether its daemon answers, its attributes, the files below.
Imports little, because commands ask about each given path."""

import errno
import json
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core import connections, ioctl
from aifs.core.errors import MountError, StoreBusy, UserError
from aifs.core.ioctl import explained
from aifs.core.limits import within
from aifs.core.mountinfo import FSTYPE, Mount, all_mounts, first_aifs, mounted_at

if TYPE_CHECKING:
    from aifs.core.config import Config
    from aifs.store.owner import Owner

PREFIX = "user.aifs."

WAITS_S = (1.0, 7.0, 22.0)
"""After each of these an owner file is looked at: in 8 s a daemon has noticed a missing database.
An answering daemon needs no look."""

ANSWER_S = sum(WAITS_S)
"""Limit for answers that a daemon always has; a busy one takes some milliseconds."""


class Stuck(MountError):
    """The daemon of a mount lives, and does not answer."""


class AwaitsDatabase(MountError):
    """The daemon of a mount waits for its database, and answers nobody. ``owner``: its owner
    file."""

    def __init__(self, path: str, owner: "Owner") -> None:
        super().__init__(f"{path}: {owner.doing}")
        self.owner = owner


def _require_database(path: str) -> None:
    """Raises AwaitsDatabase if the owner file of the mount's daemon, read without the mount, says
    so."""
    try:
        from aifs.core import config
        from aifs.store.owner import find_holder, read_owner
    except ImportError:  # where no daemon can run: nobody there knows the file
        return
    mount, owner = mounted_at(path), None
    with suppress(OSError, UserError):  # it may be out of reach except for root
        loaded = config.load(mount.source, {}) if mount is not None else None
        if loaded is not None and loaded.is_cluster and find_holder(loaded.meta.directory):
            owner = read_owner(loaded.meta.directory)
    if owner is not None and owner.doing:
        raise AwaitsDatabase(path, owner)


def is_dead(path: str) -> bool:
    """Whether the daemon of the mount at ``path`` was killed. Raises Stuck after ANSWER_S,
    AwaitsDatabase. Asks for an unknown attribute: the kernel's cache may answer a stat, and a
    statvfs wait for a data server."""
    for limit_s in WAITS_S:
        try:
            within(limit_s, os.getxattr, path, "user.aifs")
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
    """Raises Stuck if a caller that asks about ``path`` would wait, and could not be killed."""
    is_dead(path)


def daemon_of(mount: Mount) -> int | None:
    """The pid of the mount's daemon, answering or not; None if there is none, or it is not
    visible."""
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


def aifs_at(place: str) -> str:
    """``place``, absolute, if an AIFS is mounted there, else ''."""
    absolute = os.path.realpath(place)
    mount = mounted_at(absolute)
    return absolute if mount is not None and mount.fstype == FSTYPE else ""


def holder_of(config: "Config", busy: StoreBusy) -> str:
    """Where the store that is in use is mounted on this host. Raises ``busy`` if nowhere."""
    from aifs.store.owner import read_owner

    owner = read_owner(config.meta.directory)
    if owner is None or owner.closed or not owner.mountpoint or owner.host != socket.gethostname():
        raise busy
    require_answer(owner.mountpoint)
    return owner.mountpoint


def mount_of(path: str) -> str:
    """The mountpoint of the AIFS that ``path`` lies in. Raises MountError if it lies in none."""
    mount, ends = first_aifs(path)
    if mount is None or not (ends or os.path.lexists(path)):
        return require_aifs(path)
    return mount.mountpoint


def require_inside(path: str, follow: bool = True) -> os.stat_result:
    """The status of ``path``, or of the symlink. Raises MountError outside of an AIFS, OSError."""
    found = os.stat(path, follow_symlinks=follow)
    if FSTYPE not in {mount.fstype for mount in all_mounts() if mount.device == found.st_dev}:
        raise MountError(f"{path}: does not lie in an AIFS mount")
    return found


def read_status(mountpoint: str) -> dict[str, Any]:
    """The status that the daemon reports. Raises MountError if it is dead or stuck."""
    require_answer(mountpoint)
    try:
        return within(ANSWER_S, read, mountpoint, "status")
    except OSError as error:
        if is_dead(mountpoint):
            raise MountError(
                f"{mountpoint}: the daemon of this mount is gone; mount the store here again, "
                f"or run: aifs umount {mountpoint}"
            ) from None
        raise MountError(
            f"{mountpoint}: the mount does not tell its status: {error.strerror}"
        ) from None


# --- attributes (aifs/files/asks.py has their meaning) --------------------------------------------


def read(path: str, name: str, follow: bool = True) -> dict[str, Any]:
    """The value of the attribute user.aifs.``name``. Raises OSError."""
    return json.loads(os.getxattr(path, f"{PREFIX}{name}", follow_symlinks=follow))


def is_missing(error: OSError) -> bool:
    """Whether it says that there is no such attribute."""
    return error.errno == errno.ENODATA


def put(path: str, name: str, value: str = "") -> None:
    """Set the attribute. Raises OSError with the reason of the mount."""
    with explained(path, f"{PREFIX}{name}"):
        os.setxattr(path, f"{PREFIX}{name}", os.fsencode(value))


def remove(path: str, name: str) -> None:
    """Take the attribute back. Raises OSError, as ``put``."""
    with explained(path, f"{PREFIX}{name}"):
        os.removexattr(path, f"{PREFIX}{name}")


_LISTED_FROM = 16
"""Names of one directory from which on it is listed."""

_INOS_AT_ONCE = 700
"""Of 20 digits each they fit into an argument of the ioctl."""


class FileId(NamedTuple):
    device: int
    ino: int


class Batch(NamedTuple):
    """Files and directories of one mount."""

    path: str
    """Of one of them."""
    inos: list[int]

    def call(self, name: str, **fields: Any) -> dict[str, Any]:
        """The answer of the hint *name* for all of them. Raises OSError with the mount's reason."""
        above = self.path if os.path.isdir(self.path) else os.path.dirname(self.path)
        return ioctl.call_at(above, name, self.path, inos=self.inos, **fields)


def batches(
    files: Iterable[tuple[str, FileId]], most: Callable[[], int] = lambda: _INOS_AT_ONCE
) -> Iterator[Batch]:
    """These, so many at a time."""
    waiting = dict[int, Batch]()  # by device
    for path, (device, ino) in files:
        batch = waiting.setdefault(device, Batch(path, []))
        batch.inos.append(ino)
        if len(batch.inos) >= most():
            yield waiting.pop(device)
    yield from waiting.values()


# --- files below ----------------------------------------------------------------------------------


def named(paths: Sequence[str]) -> Iterator[tuple[str, FileId]]:
    """Raises as ``require_files``."""
    return zip(paths, require_files(paths), strict=True)


def files_below(paths: Sequence[str]) -> Iterator[tuple[str, FileId]]:
    """These and those below, as ``walk`` finds them. Raises as ``require_files``."""
    for path, (device, ino) in named(paths):
        if os.path.isdir(path):
            yield from ((below, FileId(device, it)) for below, it in walk(path))
        else:
            yield path, FileId(device, ino)


def require_files(paths: Sequence[str]) -> list[FileId]:
    """Each path is a regular file or a directory in an AIFS mount. Raises MountError, OSError."""
    found, devices = list[FileId](), set[int]()
    siblings = _siblings(paths)
    for path in paths:
        known = siblings.get(path)
        if known is None:
            status = os.stat(path)
            if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
                raise MountError(f"{path}: is neither a file nor a directory")
            known = FileId(status.st_dev, status.st_ino)
        if known.device not in devices:
            require_inside(path)
            devices.add(known.device)
        found.append(known)
    return found


def _siblings(paths: Iterable[str]) -> dict[str, FileId]:
    """Those of many in one directory that it lists as regular files, faster than by stat."""
    found = dict[str, FileId]()
    for parent, number in Counter(map(os.path.dirname, paths)).items():
        if number >= _LISTED_FROM:
            with suppress(OSError), os.scandir(parent or ".") as entries:
                device = os.stat(parent or ".").st_dev
                for entry in entries:
                    if entry.is_file(follow_symlinks=False):
                        found[os.path.join(parent, entry.name)] = FileId(device, entry.inode())
    return found


def walk(path: str, directories: bool = False) -> Iterator[tuple[str, int]]:
    """``path`` if it is a regular file, else those below, in the directory's order; maybe
    directories; and their inode numbers. Symlinks, other mounts and vanishing files are left out.
    Raises OSError."""
    top = os.stat(path)
    if not stat.S_ISDIR(top.st_mode):
        yield path, top.st_ino
        return
    waiting = [(path, top.st_ino)]
    while waiting:
        directory = waiting.pop()
        if directories:
            yield directory
        try:
            entries = list(os.scandir(directory[0]))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield entry.path, entry.inode()
            elif (
                entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_dev == top.st_dev
            ):
                waiting.append((entry.path, entry.inode()))
