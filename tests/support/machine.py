"""Runs system calls below a directory, and says what each of them answered.

The answers are plain values: two machines in lock-step compare two filesystems.
"""

import ctypes
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import time
from contextlib import contextmanager
from typing import Any, Self

from aifs.core import files
from tests.support.posix_ops import LARGEST, PAGE
from tests.support.sequences import Op, payload

RENAME_NOREPLACE, RENAME_EXCHANGE = 1, 2

_libc = ctypes.CDLL(None, use_errno=True)


def renameat2(source: bytes, target: bytes, flags: int) -> None:
    """rename(2) with flags; paths are relative to the working directory. Raises OSError."""
    if _libc.renameat2(-100, source, -100, target, flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def link_open(fd: int, target: str | bytes) -> None:
    """Give an open file one more name: linkat(2) of /proc/self/fd/N."""
    anywhere = os.open("/", os.O_PATH)  # with it Python says AT_SYMLINK_FOLLOW
    try:
        os.link(f"/proc/self/fd/{fd}", target, src_dir_fd=anywhere)
    finally:
        os.close(anywhere)


_BYTES_BUT_NO_PATH = {"symlink": 1, "setxattr": 3, "fsetxattr": 3, "set_acl": 3}
"""By operation the position of the argument."""
_NO_DESCRIPTOR = 1 << 20


class Machine:
    """Runs operations below ``root``. Use it in a ``with`` statement; needs to be root.

    The working directory of the process is ``root`` while an operation runs, so no path of another
    filesystem is ever part of one.
    """

    def __init__(self, root: str) -> None:
        self.root = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        self._slots: dict[int, int] = {}
        self._maps: dict[int, tuple[mmap.mmap, int]] = {}
        """What is kept mapped, and a descriptor of the file."""
        self._timed = (
            True  # until a mapping is kept: writing to memory moves times whenever it is noticed
        )
        self._memory = os.open("/proc/self/mem", os.O_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close_slots()
        os.close(self._memory)
        os.close(self.root)

    def close_slots(self) -> None:
        for number in list(self._maps):
            self._drop_map(number)
        while self._slots:
            os.close(self._slots.popitem()[1])

    def show(self) -> None:
        """What was done, and written to files that are open, or mapped, is there for all hosts."""
        for fd in [*self._slots.values(), *(fd for _, fd in self._maps.values())]:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                os.fsync(fd)
        os.fchmod(self.root, stat.S_IMODE(os.fstat(self.root).st_mode))

    @contextmanager
    def inside(self):
        """The process works in the root directory, with a umask of 022."""
        before = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
        mask = os.umask(0o022)
        os.fchdir(self.root)
        try:
            yield
        finally:
            os.fchdir(before)
            os.umask(mask)
            os.close(before)

    def run(self, op: Op) -> tuple:
        """("ok", value) or (errno's name,), and what the operation did to the files that it
        mentions."""
        before = self.describe(op)
        with self.inside():
            started_ns = time.time_ns()
            result = self._attempt(op)
        after = self.describe(op)
        return result, _changes(op, before, after, started_ns, self._timed)

    def _attempt(self, op: Op) -> tuple:
        kind, *args = op
        try:
            if kind == "as_user":
                with _user(args[0]):
                    return self._attempt(args[1])
            return "ok", getattr(self, "_" + kind)(*args)
        except OSError as error:
            return (errno.errorcode[error.errno],)

    def _fd(self, slot: int) -> int:
        return self._slots.get(slot, _NO_DESCRIPTOR)

    def describe(self, op: Op) -> dict[Any, dict[str, int] | None]:
        """Attributes of everything mentioned: paths, the directories that they are in,
        descriptors."""
        if op[0] == "as_user":
            op = op[2]
        found: dict[Any, dict[str, int] | None] = {}
        with self.inside():
            for position, arg in enumerate(op[1:], 1):
                if isinstance(arg, bytes) and position != _BYTES_BUT_NO_PATH.get(op[0]):
                    for path in (arg, os.path.dirname(arg.rstrip(b"/")) or b"."):
                        found[path] = _attributes(path)
        if op[1] in self._slots:
            found[op[1]] = _attributes(self._slots[op[1]])
        return found

    def tree(self) -> dict[bytes, tuple]:
        """Everything below the root: attributes, content, extended attributes, and which names are
        links."""
        found: dict[bytes, tuple] = {}
        inodes: dict[int, bytes] = {}
        with self.inside():
            pending = [b"."]
            while pending:
                path = pending.pop()
                info = os.lstat(path)
                first = inodes.setdefault(info.st_ino, path)
                content: object = None
                if stat.S_ISREG(info.st_mode):
                    content = _content(path, info.st_size)
                elif stat.S_ISLNK(info.st_mode):
                    content = os.readlink(path)
                elif stat.S_ISDIR(info.st_mode):
                    content = sorted(os.listdir(path))
                    pending += sorted((os.path.join(path, name) for name in content), reverse=True)
                names = sorted(os.listxattr(path, follow_symlinks=False))
                xattrs = [(name, os.getxattr(path, name, follow_symlinks=False)) for name in names]
                found[path] = (_public(info), content, xattrs, first)
        return found

    # The operations, by name.

    _mkdir, _rmdir, _mknod = map(staticmethod, (os.mkdir, os.rmdir, os.mknod))
    _unlink, _rename, _readlink = map(staticmethod, (os.unlink, os.rename, os.readlink))
    _truncate, _chmod, _rename2 = map(staticmethod, (os.truncate, os.chmod, renameat2))

    def _open(self, slot: int, path: bytes, flags: int, mode: int) -> None:
        fd = os.open(path, flags, mode)
        self._close(slot)
        self._slots[slot] = fd

    _open_plain = _tmpfile = _open

    def _close(self, slot: int) -> None:
        if slot in self._slots:
            os.close(self._slots.pop(slot))

    def _read(self, slot: int, length: int) -> tuple[int, str]:
        return _digest(os.read(self._fd(slot), length))

    def _pread(self, slot: int, length: int, offset: int) -> tuple[int, str]:
        return _digest(os.pread(self._fd(slot), length, offset))

    def _write(self, slot: int, seed: int, length: int) -> int:
        return os.write(self._fd(slot), payload(seed, length))

    def _pwrite(self, slot: int, seed: int, length: int, offset: int) -> int:
        return os.pwrite(self._fd(slot), payload(seed, length), offset)

    _fill = _pwrite

    def _lseek(self, slot: int, offset: int, whence: int) -> int | None:
        fd = self._fd(slot)
        return None if stat.S_ISDIR(os.fstat(fd).st_mode) else os.lseek(fd, offset, whence)

    def _ftruncate(self, slot: int, size: int) -> None:
        os.ftruncate(self._fd(slot), size)

    def _fsync(self, slot: int, data_only: bool) -> None:
        (os.fdatasync if data_only else os.fsync)(self._fd(slot))

    def _fstat(self, slot: int) -> dict[str, int]:
        return _public(os.fstat(self._fd(slot)))

    def _follow_stat(self, path: bytes) -> dict[str, int]:
        return _public(os.stat(path))

    def _link(self, source: bytes, target: bytes) -> None:
        os.link(source, target, follow_symlinks=False)

    def _link_slot(self, slot: int, target: bytes) -> None:
        link_open(self._fd(slot), target)

    def _symlink(self, target: bytes, times: int, path: bytes) -> None:
        os.symlink(target * times, path)

    def _fchmod(self, slot: int, mode: int) -> None:
        os.fchmod(self._fd(slot), mode)

    def _chown(self, path: bytes, uid: int, gid: int, follow: bool) -> None:
        os.chown(path, uid, gid, follow_symlinks=follow)

    def _fchown(self, slot: int, uid: int, gid: int) -> None:
        os.fchown(self._fd(slot), uid, gid)

    def _utime(
        self, path: bytes, times_ns: tuple[int, int] | None, follow: bool
    ) -> dict[str, int] | bool:
        if times_ns:
            os.utime(path, ns=times_ns, follow_symlinks=follow)
            return _times(os.stat(path, follow_symlinks=follow))
        os.utime(path, follow_symlinks=follow)
        return abs(os.stat(path, follow_symlinks=follow).st_mtime_ns - time.time_ns()) < _RECENT_NS

    def _futime(self, slot: int, times_ns: tuple[int, int]) -> dict[str, int]:
        os.utime(self._fd(slot), ns=times_ns)
        return _times(os.fstat(self._fd(slot)))

    def _setxattr(self, path: bytes, name: str, value: bytes, flags: int) -> None:
        os.setxattr(path, name, value, flags, follow_symlinks=False)

    def _fsetxattr(self, slot: int, name: str, value: bytes, flags: int) -> None:
        os.setxattr(self._fd(slot), name, value, flags)

    _set_acl = _setxattr

    def _getxattr(self, path: bytes, name: str) -> bytes:
        return os.getxattr(path, name, follow_symlinks=False)

    def _listxattr(self, path: bytes) -> list[str]:
        return sorted(os.listxattr(path, follow_symlinks=False))

    def _removexattr(self, path: bytes, name: str) -> None:
        os.removexattr(path, name, follow_symlinks=False)

    _drop_acl = _removexattr

    def _listdir(self, path: bytes) -> list[tuple[bytes, int]]:
        with os.scandir(path) as entries:
            return sorted(
                (entry.name, stat.S_IFMT(entry.stat(follow_symlinks=False).st_mode))
                for entry in entries
            )

    def _access(self, path: bytes, mode: int) -> bool:
        return os.access(path, mode, effective_ids=True)

    def _map(
        self, slot: int, length: int, offset: int, protection: int
    ) -> tuple[mmap.mmap, int] | None:
        """A shared mapping of the whole range, or None where a page of it lies beyond the end of
        the file."""
        fd = self._fd(slot)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or not length or offset + length > info.st_size:
            return None
        start = offset // PAGE * PAGE
        return mmap.mmap(
            fd, offset + length - start, mmap.MAP_SHARED, protection, offset=start
        ), offset - start

    def _map_write(self, slot: int, seed: int, length: int, offset: int) -> int | None:
        mapped = self._map(slot, length, offset, mmap.PROT_READ | mmap.PROT_WRITE)
        if mapped is None:
            return None
        with mapped[0] as view:
            view[mapped[1] : mapped[1] + length] = payload(seed, length)
            view.flush()
        return length

    def _map_read(self, slot: int, length: int, offset: int) -> tuple[int, str] | None:
        mapped = self._map(slot, length, offset, mmap.PROT_READ)
        if mapped is None:
            return None
        with mapped[0] as view:
            return _digest(view[mapped[1] : mapped[1] + length])

    def _keep_map(self, slot: int, number: int, length: int, offset: int) -> bool:
        """A mapping that outlives the descriptor."""
        mapped = self._map(slot, length, offset, mmap.PROT_READ | mmap.PROT_WRITE)
        if mapped is None:
            return False
        self._drop_map(number)
        self._maps[number] = mapped[0], os.dup(self._fd(slot))
        self._timed = False
        return True

    def _poke(self, number: int, seed: int, length: int, offset: int) -> int | None:
        """Write to a kept mapping, by way of /proc: where the file has been cut, that is an error
        and no signal. Not behind the end within the last page: kernel filesystems differ in whether
        such bytes are seen when the file grows over them (ext4 clears them, tmpfs does not)."""
        mapping, fd = self._maps.get(number, (None, -1))
        if mapping is None or offset + length > len(mapping):
            return None
        end = os.fstat(fd).st_size
        if offset < -(-end // PAGE) * PAGE and offset + length > end:
            return None
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
        return os.pwrite(self._memory, payload(seed, length), address + offset)

    def _drop_map(self, number: int) -> None:
        if number in self._maps:
            mapping, fd = self._maps.pop(number)
            mapping.close()
            os.close(fd)

    def _fallocate(self, slot: int, mode: int, offset: int, length: int) -> None:
        arguments = ctypes.c_int64(offset), ctypes.c_int64(length)
        if _libc.fallocate(self._fd(slot), mode, *arguments):
            number = ctypes.get_errno()
            if number != errno.EOPNOTSUPP or mode & ~files.KEEP_SIZE:
                raise OSError(number, os.strerror(number))
            # Nothing can be reserved: what a program does then, but for writing zeros.
            fd, end = self._fd(slot), offset + length
            if not mode and end > os.fstat(fd).st_size:
                os.ftruncate(fd, end)

    def _seek_data(self, slot: int, offset: int) -> bool:
        """Filesystems may find data where there are zeros, but must pass over nothing else."""
        fd = self._fd(slot)
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode):
            return False
        try:
            found = os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            found = info.st_size
        os.lseek(fd, 0, os.SEEK_SET)
        passed = min(found - offset, LARGEST)
        readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
        return passed <= 0 or not readable or not os.pread(fd, passed, offset).strip(b"\0")

    def _direct_write(self, path: bytes, seed: int, length: int, offset: int) -> int:
        fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644
        )
        try:
            with mmap.mmap(-1, length) as aligned:
                aligned[:] = payload(seed, length)
                return os.pwrite(fd, aligned, offset)
        finally:
            os.close(fd)

    def _direct_read(self, path: bytes, length: int, offset: int) -> tuple[int, str]:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            with mmap.mmap(-1, length) as aligned:
                count = os.preadv(fd, [aligned], offset)
                return _digest(aligned[:count])
        finally:
            os.close(fd)

    def _copy_range(
        self, source: int, target: int, length: int, source_at: int, target_at: int
    ) -> int:
        """As programs do it: a call may copy less, such as up to where a hole ends."""
        done = 0
        while copied := os.copy_file_range(
            self._fd(source), self._fd(target), length - done, source_at + done, target_at + done
        ):
            done += copied
        return done


@contextmanager
def _user(uid: int):
    """The effective user and group of the process are ``uid``, without other groups."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(uid)
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def _digest(data: bytes) -> tuple[int, str]:
    return len(data), hashlib.blake2b(data, digest_size=8).hexdigest()


def _content(path: bytes, size: int) -> tuple:
    """Digests of a file's first and last bytes and, unless it is very large, of all of it."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        start = _digest(os.pread(fd, 4 * LARGEST, 0))
        return start, _digest(os.pread(fd, LARGEST, max(0, size - LARGEST)))
    finally:
        os.close(fd)


def _public(info: os.stat_result) -> dict[str, int]:
    """What two filesystems agree about in the attributes of one file."""
    # Where the kernel writes past the daemon, a write takes these away also if root has written.
    mode = info.st_mode & ~_PRIVILEGES if stat.S_ISREG(info.st_mode) else info.st_mode
    found = {"mode": mode, "nlink": info.st_nlink, "uid": info.st_uid, "gid": info.st_gid}
    if stat.S_ISREG(info.st_mode) or stat.S_ISLNK(info.st_mode):
        found["size"] = info.st_size
    if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
        found["rdev"] = info.st_rdev
    return found


def _times(info: os.stat_result) -> dict[str, int]:
    return {"atime_ns": info.st_atime_ns, "mtime_ns": info.st_mtime_ns}


def _attributes(target: bytes | int) -> dict[str, int] | None:
    try:
        info = os.fstat(target) if isinstance(target, int) else os.lstat(target)
    except OSError:
        return None
    return {
        **_public(info),
        "ino": info.st_ino,
        "mtime_ns": info.st_mtime_ns,
        "ctime_ns": info.st_ctime_ns,
    }


_PRIVILEGES = stat.S_ISUID | stat.S_ISGID
_COMPARED = ("mode", "nlink", "uid", "gid", "size", "rdev")
_UNTIMED = "map_write map_read copy_range open open_plain fallocate keep_map poke drop_map".split()
_CLOCK_TICK_NS = 20_000_000
_RECENT_NS = 60 * 10**9


def _changes(op: Op, before: dict, after: dict, started_ns: int, timed: bool) -> dict:
    """What became of each file mentioned: its attributes, and which of its times moved."""
    kind = op[2][0] if op[0] == "as_user" else op[0]
    sets_now = kind == "utime" and None in (op[2] if op[0] == "as_user" else op)
    known = {attributes["ino"]: attributes for attributes in before.values() if attributes}
    found: dict[Any, dict[str, object] | None] = {}
    for key, new in after.items():
        if new is None:
            found[key] = None
            continue
        found[key] = {name: value for name, value in new.items() if name in _COMPARED}
        assert new["ctime_ns"] <= time.time_ns() + _CLOCK_TICK_NS, (
            f"{key!r} changed in the future by {op!r}"
        )
        old = known.get(new["ino"])
        same_size = kind in ("truncate", "ftruncate") and old and old.get("size") == new.get("size")
        # The kernel alone carries its bytes, and tells FUSE nothing.
        fifo = stat.S_ISFIFO(new["mode"])
        # Cutting a file to the size that it has may touch its times or not, and the kernel's "now"
        # has coarse ticks.
        if old is None or kind in _UNTIMED or same_size or fifo or sets_now or not timed:
            continue
        for name in ("mtime_ns", "ctime_ns"):
            found[key][name] = "moved" if new[name] != old[name] else "kept"
        if found[key]["ctime_ns"] == "moved":
            assert new["ctime_ns"] >= started_ns - _CLOCK_TICK_NS, (
                f"{key!r} got an old ctime by {op!r}"
            )
    return found
