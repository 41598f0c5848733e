"""Whether the process that works on a file lives: it holds a lock of the file.

Locks belong to open file descriptions (fcntl(2)), so they end with the process. Without locks in
the filesystem all succeed, and no file counts as abandoned.
"""

import errno
import fcntl
import os
import struct

from aifs.core import files, trees

_FLOCK = struct.Struct("@hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length, pid
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class Locked(Exception):
    """Another descriptor holds the lock."""


def lock(fd: int, byte: int = 0) -> None:
    """Take the lock ``byte`` of a file open for writing. Raises Locked, OSError."""
    _lock(fd, fcntl.F_WRLCK, byte)


def wait(fd: int, byte: int, shared: bool) -> None:
    """Wait for the lock ``byte`` of a file open for writing, or, to share it, reading. Raises
    OSError."""
    _lock(fd, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte, fcntl.F_OFD_SETLKW)


def unlock(fd: int, byte: int) -> None:
    """Let go of the lock ``byte``. Raises OSError."""
    _lock(fd, fcntl.F_UNLCK, byte)


def _lock(fd: int, kind: int, byte: int = 0, how: int = fcntl.F_OFD_SETLK) -> bool:
    """Whether the filesystem has locks."""
    try:
        fcntl.fcntl(fd, how, _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0))
    except (BlockingIOError, PermissionError):
        raise Locked from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def is_at(path: str, fd: int) -> bool:
    """Whether ``path`` is the file that is open."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(fd))
    except FileNotFoundError:
        return False


def create_beside(target: str) -> tuple[str, int]:
    """A new, locked file beside ``target``: its path, and a descriptor to write. Raises OSError."""
    while True:
        path = trees.beside(target)
        fd = trees.create_file(path)
        try:
            lock(fd)
            if is_at(path, fd):
                return path, fd
        except Locked:  # by a process that takes it for abandoned, and removes it
            pass
        except BaseException:
            files.close_file(fd)
            files.unlink(path)
            raise
        files.close_file(fd)


def remove_abandoned(path: str) -> None:
    """Remove the file unless a process holds it, or the filesystem has no locks. Raises OSError."""
    fd = files.open_file(path, write=False)
    try:
        if _lock(fd, fcntl.F_RDLCK) and is_at(path, fd):
            files.unlink(path)
    except Locked:
        pass
    finally:
        files.close_file(fd)
