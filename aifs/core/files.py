"""The only place that opens, writes, syncs, renames or removes persistent files.

Everything here blocks: call it from a worker thread, except where the caller knows that the bytes are
few and go to the page cache (the journal's append). Errors are the operating system's own ``OSError``;
the layer above knows what they mean.

Tests put a ``Hook`` below it: to fail or slow down single operations, and to record every change so
that a power cut can be replayed (what was not synced may be lost, torn or reordered).

What is durable: nothing, until ``sync_file`` (the bytes and size of one file), ``sync_dir`` (the names in one
directory) or ``sync_filesystem`` (all of the filesystem below a directory) has returned.
"""

import ctypes
import errno
import os
import sys
from typing import Protocol


class Hook(Protocol):
    """What a test may install with ``set_hook``. ``op`` is the name of the function here."""

    def before(self, op: str, path: str) -> None:
        """Called before the operation; may raise OSError or SimulatedCrash, or wait."""

    def after(self, op: str, path: str, *args: object) -> None:
        """Called after it has succeeded, with its arguments."""


_hook: Hook | None = None
_paths: dict[int, str] = {}  # descriptor -> path; kept only while a hook is installed


def set_hook(hook: Hook | None) -> None:
    """Install (or with None remove) the one test hook. Descriptors opened earlier have no path: ''."""
    global _hook
    _hook = hook
    _paths.clear()


def is_hooked() -> bool:
    """Whether a hook is installed: then any operation may wait, and none may run where waiting is not allowed."""
    return _hook is not None


def _before(op: str, path: str) -> None:
    if _hook is not None:
        _hook.before(op, path)


def _after(op: str, path: str, *args: object) -> None:
    if _hook is not None:
        _hook.after(op, path, *args)


def _path_of(fd: int) -> str:
    return _paths.get(fd, "") if _hook is not None else ""


def open_file(path: str, *, create: bool = False, exclusive: bool = False, write: bool = True) -> int:
    """A descriptor for ``path``; with ``create`` the file is made if it is missing (mode 0600)."""
    _before("open_file", path)
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    if create:
        flags |= os.O_CREAT
    if exclusive:
        flags |= os.O_EXCL
    fd = os.open(path, flags, 0o600)
    if _hook is not None:
        _paths[fd] = path
        _hook.after("open_file", path, create)
    return fd


def close_file(fd: int) -> None:
    _paths.pop(fd, None)
    os.close(fd)


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Up to ``length`` bytes; fewer only at the end of the file."""
    if _hook is not None:
        _hook.before("read_at", _path_of(fd))
    return os.pread(fd, length, offset)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; returns the bytes read, fewer only at the end of the file."""
    if _hook is not None:
        _hook.before("read_into", _path_of(fd))
    done = os.preadv(fd, [buffer], offset)
    while 0 < done < len(buffer):
        more = os.preadv(fd, [buffer[done:]], offset + done)
        if more == 0:
            break
        done += more
    return done


def read_cached(fd: int, buffer: memoryview, offset: int) -> int:
    """As much of ``buffer`` as the page cache can fill at once, perhaps nothing; never waits for a device.

    Raises OSError with EOPNOTSUPP where the filesystem cannot promise that.
    """
    if _hook is not None:
        _hook.before("read_cached", _path_of(fd))
    try:
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    path = _path_of(fd)
    _before("write_at", path)
    done = os.pwrite(fd, data, offset)
    if done < len(data):
        view = memoryview(data)
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    _after("write_at", path, data, offset)


def truncate(fd: int, length: int) -> None:
    path = _path_of(fd)
    _before("truncate", path)
    os.ftruncate(fd, length)
    _after("truncate", path, length)


def allocate(fd: int, length: int, offset: int = 0) -> None:
    """Reserve disk space for ``length`` bytes from ``offset`` on, extending the file with zeros."""
    path = _path_of(fd)
    _before("allocate", path)
    old = os.fstat(fd).st_size
    os.posix_fallocate(fd, offset, length)
    _after("truncate", path, max(old, offset + length))


def sync_file(fd: int) -> None:
    """The file's bytes and size are on stable storage when this returns."""
    path = _path_of(fd)
    _before("sync_file", path)
    os.fdatasync(fd)
    _after("sync_file", path)


def sync_dir(path: str) -> None:
    """The names in the directory ``path`` are on stable storage when this returns."""
    _before("sync_dir", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
    _after("sync_dir", path)


_libc = ctypes.CDLL(None, use_errno=True)


def sync_filesystem(path: str) -> None:
    """Everything on the filesystem that holds the directory ``path`` is on stable storage (syncfs(2))."""
    _before("sync_filesystem", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if _libc.syncfs(fd) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)
    _after("sync_filesystem", path)


_MEMORY_FILESYSTEMS = (0x01021994, 0x858458F6)  # tmpfs, ramfs: f_type in statfs(2)


def is_in_memory(path: str) -> bool:
    """Whether ``path`` lies on a filesystem that never waits for a device, so that calls take microseconds."""
    result = ctypes.create_string_buffer(256)
    if _libc.statfs(os.fsencode(path), result) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    kind = int.from_bytes(result.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder)
    return kind in _MEMORY_FILESYSTEMS


def make_dir(path: str) -> None:
    """Make the directory ``path`` (mode 0700) unless it exists; its parent must. The new name is not synced."""
    _before("make_dir", path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    _after("make_dir", path)


def make_dirs(path: str) -> None:
    """Make ``path`` and its missing parents (mode 0700); the new names are not synced."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        make_dir(path)


def rename(old: str, new: str) -> None:
    _before("rename", old)
    os.rename(old, new)
    _after("rename", old, new)


def unlink(path: str) -> None:
    _before("unlink", path)
    os.unlink(path)
    _after("unlink", path)


def remove_dir(path: str) -> None:
    _before("remove_dir", path)
    os.rmdir(path)
    _after("remove_dir", path)


def replace_file(path: str, data: bytes) -> None:
    """Make ``path`` hold ``data``, all or nothing, durable when this returns."""
    temporary = f"{path}.new"
    fd = open_file(temporary, create=True)
    try:
        truncate(fd, 0)
        write_at(fd, data, 0)
        sync_file(fd)
    finally:
        close_file(fd)
    rename(temporary, path)
    sync_dir(os.path.dirname(path))


def read_file(path: str) -> bytes | None:
    """The whole of a small file, or None if there is none."""
    _before("read_file", path)
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
