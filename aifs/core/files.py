"""The only place that opens, writes, syncs, renames or removes persistent files.

Everything blocks: call it from a worker thread, except for a few bytes to the page cache (the
journal's append). Errors are the system's ``OSError``.

Tests put a ``Hook`` below: to fail or slow single operations, and to record changes for replays of
power cuts (unsynced changes may be lost, torn or reordered).

Durable means: after ``sync_file`` (a file's bytes and size), ``sync_dir`` (names in a directory) or
``sync_filesystem`` (all of a directory's filesystem).
"""

import errno
import fcntl
import os
import resource
import select
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from aifs.core import libc


class Hook(Protocol):
    """A hook of tests, for ``set_hook``. ``op`` is the name of the function here."""

    def before(self, op: str, path: str) -> None:
        """Called before the operation; may raise OSError or SimulatedCrash, or wait."""

    def after(self, op: str, path: str, *args: object) -> None:
        """Called after it has succeeded, with its arguments."""


_hook: Hook | None = None
_paths: dict[int, str] = {}  # descriptor -> path; kept only while a hook is installed
_open: set[int] = set()  # what open_file has given; adding and taking away is atomic


def set_hook(hook: Hook | None) -> None:
    """Install (or, None, remove) the one test hook. Earlier descriptors have no path: ''."""
    global _hook
    _hook = hook
    _paths.clear()


def is_hooked() -> bool:
    """Whether a hook is installed: operations may wait, and must not run where that is
    forbidden."""
    return _hook is not None


def _before(op: str, path: str) -> None:
    if _hook is not None:
        _hook.before(op, path)


def _after(op: str, path: str, *args: object) -> None:
    if _hook is not None:
        _hook.after(op, path, *args)


def _path_of(fd: int) -> str:
    return _paths.get(fd, "") if _hook is not None else ""


def open_file(
    path: str,
    *,
    create: bool = False,
    exclusive: bool = False,
    write: bool = True,
    append: bool = False,
    foreign: bool = False,
) -> int:
    """A descriptor for ``path``; ``create``: made if missing (mode 0600).

    ``append``: all is written at the end, also on shared filesystems with writers on other hosts,
    which do not know RWF_APPEND. ``foreign``: others may make names there: follows no symlink
    (ELOOP), waits for no special file (EINVAL), writes no file with other names (EMLINK).
    """
    _before("open_file", path)
    flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
    if foreign:
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
    if create:
        flags |= os.O_CREAT
    if exclusive:
        flags |= os.O_EXCL
    if append:
        flags |= os.O_APPEND
    fd = os.open(path, flags, 0o600)
    if foreign:
        found = os.fstat(fd)
        is_file = stat.S_ISREG(found.st_mode)
        if not is_file or (write and found.st_nlink > 1):
            os.close(fd)
            if not is_file:
                raise OSError(errno.EINVAL, "not a regular file", path)
            raise OSError(errno.EMLINK, "it has other names, too", path)
    _open.add(fd)
    if _hook is not None:
        _paths[fd] = path
        _hook.after("open_file", path, create)
    return fd


def duplicate(fd: int) -> int:
    """Another descriptor of what is open as ``fd``, to be closed by itself. Does not block."""
    copy = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)
    _open.add(copy)
    return copy


def close_file(fd: int) -> None:
    _open.discard(fd)
    _paths.pop(fd, None)
    os.close(fd)


def descriptors() -> int:
    """How many descriptors ``open_file`` has given that are still open. Does not block."""
    return len(_open)


def descriptors_max() -> int:
    """How many descriptors this process may have. Does not block."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def read_at(fd: int, length: int, offset: int) -> bytes:
    """Up to ``length`` bytes; fewer only at the end of the file."""
    if _hook is not None:
        _hook.before("read_at", _path_of(fd))
    return os.pread(fd, length, offset)


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill ``buffer`` from ``offset``; the bytes read, fewer only at the end."""
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
    """Fill what the page cache has, perhaps nothing; waits for no device, nor hook (then it has
    nothing). Raises OSError (EOPNOTSUPP) if the filesystem cannot promise that."""
    if _hook is not None:
        return 0
    try:
        return os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return 0


def write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    path = ""
    if _hook is not None:
        path = _path_of(fd)
        _hook.before("write_at", path)
    done = os.pwrite(fd, data, offset)
    if done < len(data):
        view = memoryview(data)
        while done < len(view):
            done += os.pwrite(fd, view[done:], offset + done)
    if _hook is not None:
        _hook.after("write_at", path, data, offset)


def append(fd: int, data: bytes | memoryview) -> None:
    """Write all of ``data`` at the end of the file: in one piece, unless the disk is full then."""
    path, end = "", 0
    if _hook is not None:
        path, end = _path_of(fd), os.fstat(fd).st_size
        _hook.before("write_at", path)
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwritev(fd, [view[done:]], 0, os.RWF_APPEND)
    if _hook is not None:
        _hook.after("write_at", path, data, end)


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


def sync_filesystem(path: str) -> None:
    """Bring the filesystem of the directory ``path`` to stable storage (syncfs(2))."""
    _before("sync_filesystem", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if number := libc.call("syncfs", fd):
            raise OSError(number, os.strerror(number), path)
    finally:
        os.close(fd)
    _after("sync_filesystem", path)


def make_dir(path: str) -> None:
    """Make the directory ``path`` (mode 0700) unless it exists; its parent must. Not synced."""
    _before("make_dir", path)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        return
    _after("make_dir", path)


def make_dirs(path: str) -> None:
    """Make ``path`` and its missing parents (mode 0700); the new names are not synced."""
    missing = []
    while path and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for path in reversed(missing):
        make_dir(path)


def rename(old: str, new: str) -> None:
    _before("rename", old)
    os.rename(old, new)
    _after("rename", old, new)


def unlink(path: str, parent: int | None = None) -> None:
    """``parent``: a descriptor of the name's directory, wherever ``path`` leads."""
    _before("unlink", path)
    os.unlink(path if parent is None else os.path.basename(path), dir_fd=parent)
    _after("unlink", path)


def remove_dir(path: str, parent: int | None = None) -> None:
    """``parent``: as ``unlink``'s."""
    _before("remove_dir", path)
    os.rmdir(path if parent is None else os.path.basename(path), dir_fd=parent)
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


def read_file(path: str, *, anew: bool = False) -> bytes | None:
    """A small file, or None. ``anew``: from the device, if the kernel can."""
    _before("read_file", path)
    try:
        with open(path, "rb") as file:
            if anew:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            return file.read()
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise


def read_foreign(path: str, bytes_max: int) -> bytes | None:
    """``read_file`` where others may make names (``open_file``). Raises OSError: EFBIG if
    longer."""
    try:
        fd = open_file(path, write=False, foreign=True)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None
        raise
    try:
        size = os.fstat(fd).st_size
        if size > bytes_max:
            raise OSError(errno.EFBIG, f"longer than {bytes_max} bytes", path)
        return read_at(fd, size, 0)
    finally:
        close_file(fd)


# --- what only files of the burst tier need -------------------------------------------------------

KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 0x1, 0x2, 0x10
"""Modes of fallocate(2), to be combined; 0 allocates."""

_COPY_MAX = 1 << 30  # bytes that one copy_file_range(2) is asked for
_COPY_BUFFER = 1 << 20
_SEND_WAIT_MS = 50


def change_allocation(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2): allocate, punch or zero a range. EOPNOTSUPP where the filesystem cannot."""
    path = _path_of(fd)
    _before("change_allocation", path)
    old = os.fstat(fd).st_size
    if number := libc.call("fallocate", fd, mode, offset, length):
        raise OSError(number, os.strerror(number))
    if _hook is not None:
        size = os.fstat(fd).st_size
        if size != old:
            _after("truncate", path, size)
        if mode & (PUNCH_HOLE | ZERO_RANGE) and offset < size:
            _after("write_at", path, bytes(min(length, size - offset)), offset)


def copy_range(source: int, offset: int, target: int, to: int, length: int) -> int:
    """Copy bytes between files, in the kernel if possible; how many, fewer only at the end."""
    path = _path_of(target)
    _before("copy_range", path)
    done = 0
    while done < length:
        count = min(length - done, _COPY_MAX)
        try:
            copied = os.copy_file_range(source, target, count, offset + done, to + done)
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            data = os.pread(source, min(count, _COPY_BUFFER), offset + done)
            copied = os.pwrite(target, data, to + done) if data else 0
        if copied == 0:
            break
        done += copied
    if _hook is not None and done:
        _after("write_at", path, os.pread(target, done, to), to)
    return done


def send_range(socket: int, fd: int, offset: int, length: int) -> int:
    """Send bytes of a file by a non-blocking socket, in the kernel; how many, fewer after
    ``_SEND_WAIT_MS`` without progress. Raises OSError, also at the file's end."""
    _before("send_range", _path_of(fd))
    waits, sent = select.poll(), 0
    waits.register(socket, select.POLLOUT)
    while sent < length:
        try:
            count = os.sendfile(socket, fd, offset + sent, length - sent)
        except BlockingIOError:
            if not waits.poll(_SEND_WAIT_MS):
                break
        else:
            if not count:
                raise OSError(errno.ENODATA, f"the file ends at {offset + sent}")
            sent += count
    return sent


def set_mtime(fd: int, mtime_ns: int) -> None:
    _before("set_mtime", _path_of(fd))
    os.utime(fd, ns=(mtime_ns, mtime_ns))


def set_mode(fd: int, mode: int) -> None:
    _before("set_mode", _path_of(fd))
    os.fchmod(fd, mode)


def copy_mode(fd: int, original: os.stat_result) -> None:
    """Give a file another's mode; set-id bits only with equal owner and group: else they would
    grant another user's rights."""
    own, mode = os.fstat(fd), stat.S_IMODE(original.st_mode)
    if (own.st_uid, own.st_gid) != (original.st_uid, original.st_gid):
        mode &= ~(stat.S_ISUID | stat.S_ISGID)
    set_mode(fd, mode)


def set_owner(fd: int, uid: int, gid: int) -> None:
    _before("set_owner", _path_of(fd))
    os.fchown(fd, uid, gid)


def give_to(path: str, uid: int, gid: int) -> None:
    _before("give_to", path)
    os.chown(path, uid, gid)


def next_data(fd: int, offset: int, end: int) -> tuple[int, int] | None:
    """The first part, (start, end), of a range that is no hole; or None."""
    try:
        start = os.lseek(fd, offset, os.SEEK_DATA) if offset < end else end
        return (start, min(os.lseek(fd, start, os.SEEK_HOLE), end)) if start < end else None
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None  # a hole up to the end, or a file that has been cut this very moment
        raise


def data_ranges(fd: int, offset: int, length: int) -> list[tuple[int, int]]:
    """The parts, as (start, end), of a range of a file that are not holes."""
    ranges = []
    end = offset + length
    while (found := next_data(fd, offset, end)) is not None:
        ranges.append(found)
        offset = found[1]
    return ranges


# --- I/O priority ---------------------------------------------------------------------------------

_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)
_IOPRIO_CLASSES = {"none": 0, "best-effort": 2 << 13 | 7, "idle": 3 << 13}


def at_priority(priority: str, function: Callable[..., Any], *args: Any) -> Any:
    """``function(*args)`` at an I/O priority of this thread: 'idle', 'best-effort' (its lowest) or
    'none', for reads and syncs, if the disk's scheduler knows it."""
    value = _IOPRIO_CLASSES[priority]
    if not value or _IOPRIO_SET is None:
        return function(*args)
    libc.call("syscall", _IOPRIO_SET, 1, 0, value)  # 1: a thread, 0: this one
    try:
        return function(*args)
    finally:
        libc.call("syscall", _IOPRIO_SET, 1, 0, 0)


def boot_id() -> str:
    """The running kernel's name, new after each start of the machine, or power cut."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


# --- writing back early ---------------------------------------------------------------------------

_WRITE = 2  # SYNC_FILE_RANGE_WRITE


def start_writing(fd: int, offset: int, length: int) -> None:
    """Have these bytes written from now on, to help ``sync_file``, which reports errors. Does not
    wait, makes nothing durable."""
    with suppress(OSError):
        _before("start_writing", _path_of(fd))
    libc.call("sync_file_range", fd, offset, length, _WRITE)


# --- writing past the page cache ------------------------------------------------------------------


def set_direct(fd: int, direct: bool) -> None:
    """Write past the page cache (O_DIRECT) from now on, or through it. EINVAL if impossible."""
    _before("set_direct", _path_of(fd))
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
