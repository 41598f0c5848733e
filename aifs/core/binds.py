"""Bind mounts: a directory of the mount at another path, with its options in one step."""

import ctypes
import os
import struct
from collections.abc import Iterable
from contextlib import suppress

from aifs.core.mountinfo import Mount, all_mounts, mounted_at

_OPEN_TREE, _MOVE_MOUNT, _MOUNT_SETATTR = 428, 429, 442  # on every architecture
_AT_FDCWD, _AT_EMPTY_PATH = -100, 0x1000
_OPEN_TREE_CLONE = 1
_MOVE_FROM_DESCRIPTOR = 4
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_ATTRIBUTES = struct.Struct("=QQQQ")
"""Of mount_setattr(2): to set, to clear, propagation, user namespace."""
_ACCESS_TIMES = 0x70

OPTIONS = {"rw": 0, "ro": 1, "nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 0x10}

_libc = ctypes.CDLL(None, use_errno=True)


def canonical(path: str) -> str:
    """As the kernel lists a mount at ``path``; it is not asked itself, as its daemon may hang."""
    above, name = os.path.split(path.rstrip("/"))
    return os.path.join(os.path.realpath(above), name)


def bound_at(target: str) -> Mount | None:
    """The mount at ``target``, if there is one."""
    return mounted_at(canonical(target))


def bound_elsewhere(device: int, root: str, target: str) -> list[str]:
    """The other places where this directory is mounted."""
    place = canonical(target)
    return [
        mount.mountpoint
        for mount in all_mounts()
        if (mount.device, mount.root) == (device, root) and mount.mountpoint != place
    ]


def bind(directory: int, target: str, options: Iterable[str]) -> None:
    """Mount the open directory at the directory ``target``, which is made. If it is interrupted,
    nothing is mounted. Raises OSError."""
    with suppress(FileExistsError):
        os.mkdir(target, 0o750)
    tree = _call(
        _OPEN_TREE, directory, b"", _AT_EMPTY_PATH | _OPEN_TREE_CLONE | os.O_CLOEXEC, path=target
    )
    try:
        wanted = 0
        for option in options:
            wanted |= OPTIONS[option]
        if wanted:
            cleared = _ACCESS_TIMES if wanted & _ACCESS_TIMES else 0
            attributes = _ATTRIBUTES.pack(wanted, cleared, 0, 0)
            size = ctypes.c_size_t(len(attributes))
            _call(_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH, attributes, size, path=target)
        place = os.fsencode(target)
        _call(_MOVE_MOUNT, tree, b"", _AT_FDCWD, place, _MOVE_FROM_DESCRIPTOR, path=target)
    finally:
        os.close(tree)


def unbind(target: str) -> None:
    """Unmount all that is mounted at ``target``, also if its daemon hangs, and remove the
    directory. Programs that have files open there keep them. Raises OSError."""
    while bound_at(target) is not None:
        if _libc.umount2(os.fsencode(target), _MNT_DETACH | _UMOUNT_NOFOLLOW):
            raise _error(target)
    with suppress(FileNotFoundError):
        os.rmdir(target)


def _call(number: int, *args: object, path: str) -> int:
    result: int = _libc.syscall(number, *args)
    if result < 0:
        raise _error(path)
    return result


def _error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)
