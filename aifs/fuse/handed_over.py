"""Requests that pyfuse3 does not know, from the bridge: a task answers each."""

import errno
import fcntl
import os
import struct
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from typing import Any

import pyfuse3
import trio

from aifs.core import ioctl
from aifs.core.config import KernelConfig
from aifs.core.errors import FsError, Invalid, NoSuchIoctl, NotSupported
from aifs.core.waiting import current_unique
from aifs.files.kept import Done
from aifs.files.lock_homes import FCNTL, FLOCK
from aifs.files.lock_table import LAST, Lock
from aifs.files.types import WRITABLE, Caller
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.fuse.bridge import PREFERRED_IO, listing_reply, reply_entry
from aifs.fuse.kept import KeptMount
from aifs.fuse.operations import LAST_DOT, answers
from aifs.fuse.requests import Scheduler
from aifs.meta.keys import entry_numbers
from aifs.meta.records import APPEND_ONLY, IMMUTABLE, INHERITS_PROJECT, SNAPSHOT, TRASHED
from aifs.vfs.filesystem import Filesystem

(
    LOOKUP,
    FORGET,
    STATFS,
    RELEASE,
    FLUSH,
    GETLK,
    SETLK,
    SETLKW,
    INTERRUPT,
    IOCTL,
    FALLOCATE,
    READDIRPLUS,
    LSEEK,
    COPY_FILE_RANGE,
    SYNCFS,
    STATX,
    COPY_FILE_RANGE_64,
) = (
    1,
    2,
    17,
    18,
    25,
    31,
    32,
    33,
    36,
    39,
    43,
    44,
    46,
    47,
    50,
    52,
    53,
)

_UNIQUE = struct.Struct("=Q")
_IOCTL = struct.Struct(
    "=QIIQII"
)  # handle, flags, command, argument, in_size, out_size; then the data
_IOCTL_REPLY = struct.Struct("=iIII")  # result, flags, in_iovs, out_iovs; then the data
_GETFLAGS, _SETFLAGS, _FSGETXATTR, _FSSETXATTR = 0x80086601, 0x40086602, 0x801C581F, 0x401C5820
_FLAGS = struct.Struct("=I")
_FSXATTR = struct.Struct("=I8xI12x")  # flags, project
_XFLAGS = {IMMUTABLE: 0x8, APPEND_ONLY: 0x10, INHERITS_PROJECT: 0x200}
_FALLOCATE = struct.Struct("=QQQII")  # handle, offset, length, mode, padding
_READDIR = struct.Struct("=8xQI20x")  # offset, size of the reply
_SHORTEST_ENTRY = 160  # bytes of a reply to READDIRPLUS
_LSEEK = struct.Struct("=QqII")  # handle, offset (which may be negative), whence, padding
_STATX_REPLY = struct.Struct("=QII16x")  # how long it holds (s, ns), flags; then the attributes
_ATTRIBUTES = struct.Struct(
    "=IIQIIIHxxQQQQ"
)  # mask, blksize, flags, links, owner, mode, ino, size, blocks, mask of flags
_TIME = struct.Struct("=qI4x")
_DEVICES = struct.Struct("=IIII112x")  # rdev, dev, as major and minor
_BASIC_STATS, _BTIME = 0x7FF, 0x800
_STATFS_REPLY = struct.Struct("=QQQQQIII28x")  # as StatFs; then the size of a fragment
_OFFSET = struct.Struct("=Q")
_RELEASE = struct.Struct("=QIIQ")  # handle, flags of open(2), flags, owner of an flock(2) lock
_RELEASE_FLOCK = 1 << 1
_FLUSH = struct.Struct("=Q8xQ")  # handle, whose fcntl(2) locks end
_LOCK = struct.Struct("=QQQQIII4x")  # handle, owner, first byte, last byte, type, pid, flags
_LOCK_FLOCK = 1 << 0
_LOCK_REPLY = struct.Struct("=QQII")  # first byte, last byte, type, pid
_COPY = struct.Struct(
    "=QQQQQQQ"
)  # handle in, offset in, inode out, handle out, offset out, length, flags
_COPIED = struct.Struct("=II")  # bytes, padding
_COPIED_MAX = (
    1 << 30
)  # of one COPY_FILE_RANGE: fits its 32 bits, and keeps an interrupt from waiting long


_MAY_BE_AT_ONCE = {SETLK: "setlk", SETLKW: "setlkw", FLUSH: "flush"}
_MAY_BE_INTERRUPTED = frozenset((FALLOCATE, SETLKW, FLUSH))
"""A signal ends these, and our ioctl, with EINTR, also if a handler is installed with
SA_RESTART, because the kernel takes no ERESTARTSYS of us. A program that has been killed waits for
the others.

=================== === ============================================================================
IOCTL, ours         yes they wait for drains and for other ranks
IOCTL, chattr(1)    no  it waits for the record alone, and no program expects EINTR
FALLOCATE           yes it may write zeros for minutes, and fallocate(2) knows EINTR
SETLKW              yes it waits for other programs; fcntl(2) and flock(2) know EINTR
FLUSH               yes close(2) succeeds; RELEASE does the rest
GETLK, SETLK        no  their home answers within its limit
COPY_FILE_RANGE     no  a request copies 1 GiB at most within the burst tier, else 4 MiB
SYNCFS              no  as fsync(2), which waits for the disk
STATFS              no  it does not wait; statfs(2) would fail in one call of six with a timer
READDIRPLUS, STATX, no  they wait for records alone, and no program expects EINTR
LSEEK
=================== === ============================================================================

Requests that pyfuse3 answers (LOOKUP, OPEN, READ, WRITE, RENAME, ...) are never interrupted.
"""

Handler = Callable[[int, bytes, Caller], Awaitable[bytes]]
"""Inode number, body and caller of a request to the body of the answer."""


def _may_be_interrupted(opcode: int, body: bytes) -> bool:
    if opcode == IOCTL:
        _, _, request, *_ = _IOCTL.unpack_from(body)
        return request in ioctl.REQUESTS
    return opcode in _MAY_BE_INTERRUPTED


Reply = Callable[[int, int, bytes], None]
"""Answers a request (its unique number) with an errno and data."""


class HandedOver:
    """Takes requests from the bridge (``take``), and answers from tasks in the nursery set before
    the first."""

    def __init__(
        self, fs: Filesystem, scheduler: Scheduler, reply: Reply, kernel: KernelConfig
    ) -> None:
        self._fs = fs
        self._kernel = kernel
        self._scheduler = scheduler
        self._running: dict[int, trio.CancelScope | None] = {}
        """By unique number; None: not to be interrupted."""
        self._reply = reply
        self._nursery: trio.Nursery | None = None
        kept = fs.kernel.kept
        self.kept = kept if isinstance(kept, KeptMount) else None
        """As of Operations."""
        self._unique = 0
        """Of the request whose handler is about to be called."""
        self._handlers: dict[int, Handler] = {
            STATFS: self.statfs,
            IOCTL: self.ioctl,
            FALLOCATE: self.fallocate,
            READDIRPLUS: self.readdir,
            LSEEK: self.lseek,
            COPY_FILE_RANGE: self.copy_file_range,
            COPY_FILE_RANGE_64: self.copy_file_range_64,
            SYNCFS: self.syncfs,
            STATX: self.statx,
            GETLK: self.getlk,
            SETLK: self.setlk,
            SETLKW: self.setlkw,
            FLUSH: self.flush,
            RELEASE: self.release,
        }

    def serve_in(self, nursery: trio.Nursery) -> None:
        """Requests are answered by its tasks from now on."""
        self._nursery = nursery

    def take(
        self, opcode: int, unique: int, nodeid: int, caller: tuple[int, int, int], body: bytes
    ) -> bool:
        """Take a request. Returns at once, True if it will be answered (INTERRUPT: if it was
        ours; LOOKUP: if it has been answered). FORGET is of many inodes at once, and gets no
        answer."""
        if opcode == LOOKUP:
            return self._lookup_at_once(unique, nodeid, body[:-1])
        if opcode == FORGET:
            self._fs.forget([*memoryview(body).cast("Q")])
            return False
        if opcode == INTERRUPT:
            (interrupted,) = _UNIQUE.unpack_from(body)
            if (scope := self._running.get(interrupted)) is not None:
                scope.cancel()
            return interrupted in self._running
        assert self._nursery is not None
        if opcode == RELEASE:
            self._fs.locks.begin_close(nodeid)
        elif opcode in _MAY_BE_AT_ONCE and self._answer_at_once(opcode, unique, nodeid, body):
            return True
        self._scheduler.waiting_requests += 1
        self._running[unique] = trio.CancelScope() if _may_be_interrupted(opcode, body) else None
        self._nursery.start_soon(
            self._answer, self._handlers[opcode], unique, nodeid, body, Caller(*caller)
        )
        return True

    def _lookup_at_once(self, unique: int, parent: int, name: bytes) -> bool:
        """Answer by records alone, as nearly all lookups can be; else return False. If requests
        wait, so that other tasks have their turn before the next one is read, too."""
        fs, begin_ns = self._fs, time.perf_counter_ns()
        if self._scheduler.waiting_requests or fs.operation_log.is_on:
            return False
        if not fs.keeps_name(parent, name):
            return False
        found = fs.lookup_at_once(parent, name)
        if found is None or not reply_entry(unique, *found):
            return False
        fs.served["lookup"].add(time.perf_counter_ns() - begin_ns)
        return True

    def _answer_at_once(self, opcode: int, unique: int, nodeid: int, body: bytes) -> bool:
        """Answer without suspending, as most locks allow at home: a task costs ten times as much.
        Whether it did; not while the operation log is on."""
        if self._fs.operation_log.is_on:
            return False
        number, begin_ns = 0, time.perf_counter_ns()
        try:
            if opcode == FLUSH:
                is_done = self._flush_at_once(nodeid, body)
            else:
                is_done = self._set_lock_at_once(nodeid, body, opcode == SETLKW)
        except FsError as error:
            number, is_done = error.errno, True
        if is_done:
            self._reply(unique, number, b"")
            served = self._fs.served[_MAY_BE_AT_ONCE[opcode]]
            served.add(time.perf_counter_ns() - begin_ns, number)
        return is_done

    async def _answer(
        self, handler: Handler, unique: int, nodeid: int, body: bytes, caller: Caller
    ) -> None:
        # After a signal RELEASE does the rest of a FLUSH, so close(2) never fails by it.
        number, data = 0 if handler == self.flush else errno.EINTR, b""
        try:
            with self._running[unique] or nullcontext():
                try:
                    self._unique = unique
                    data = await handler(nodeid, body, caller)
                    number = 0
                except pyfuse3.FUSEError as error:
                    number = error.errno
        finally:
            del self._running[unique]
            self._scheduler.waiting_requests -= 1
            self._reply(unique, number, data)

    def unique(self) -> int:
        """As of Operations."""
        return self._unique

    async def answer_again(self, operation: str, handler: Any, args: Any, done: Done) -> Any:
        """As of Operations. The parts that serve ioctls ask themselves (KeptState.repeated)."""
        return await handler(self, *args)

    @answers
    async def ioctl(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        _, _, request, _, in_size, out_size = _IOCTL.unpack_from(body)
        if request in (_GETFLAGS, _SETFLAGS, _FSGETXATTR, _FSSETXATTR):
            return _IOCTL_REPLY.pack(0, 0, 0, 0) + await self._flags(nodeid, request, body)
        if request not in ioctl.REQUESTS:
            raise NoSuchIoctl()
        argument = ioctl.unpack(body[_IOCTL.size :][:in_size])
        if argument.version != ioctl.VERSION and argument.name != "version":
            raise Invalid(f"version {argument.version}, but the daemon has {ioctl.VERSION}")
        answer = await self._fs.call(nodeid, argument.name, argument.text, caller)
        data = ioctl.pack(argument.name, answer)
        if len(data) > out_size:
            raise Invalid("no room for the result")
        return _IOCTL_REPLY.pack(0, 0, 0, 0) + data

    async def _flags(self, ino: int, request: int, body: bytes) -> bytes:
        """The ioctls of chattr(1) and lsattr(1); the kernel has checked rights."""
        if request in (_SETFLAGS, _FSSETXATTR):
            argument = _FLAGS if request == _SETFLAGS else _FSXATTR
            if len(body) < _IOCTL.size + argument.size:
                raise Invalid("the argument is too short")
        inode = await self._fs.getattr(ino)
        xflags = sum(xflag for flag, xflag in _XFLAGS.items() if inode.flags & flag)
        if request == _GETFLAGS:
            return _FLAGS.pack(inode.flags & ~(TRASHED | SNAPSHOT))
        if request == _FSGETXATTR:
            return _FSXATTR.pack(xflags, inode.project)
        project = inode.project
        if request == _SETFLAGS:
            (flags,) = _FLAGS.unpack_from(body, _IOCTL.size)
        else:
            wanted, project = _FSXATTR.unpack_from(body, _IOCTL.size)
            if wanted & ~sum(_XFLAGS.values()):
                raise NotSupported()
            flags = sum(flag for flag, xflag in _XFLAGS.items() if wanted & xflag)
        await self._fs.set_flags(ino, flags, project)
        return b""

    @answers
    async def fallocate(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        handle, offset, length, mode, _ = _FALLOCATE.unpack_from(body)
        await self._fs.fallocate(handle, mode, offset, length, caller)
        return b""

    @answers
    async def readdir(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        # Entries that have no room in a reply are read again for the next one, because the kernel
        # keeps names and attributes as those of the time when it asked.
        offset, size = _READDIR.unpack_from(body)
        directory = await self._fs.getattr(nodeid) if offset < LAST_DOT else None
        cookie, limit = max(offset, LAST_DOT) - 1, size // _SHORTEST_ENTRY
        listing = await self._fs.readdir(nodeid, cookie, limit)
        if directory is not None:
            listing.put_dots(directory, offset)
        are_kept = self._fs.keeps_names(nodeid)
        data, count = listing_reply(listing, size, are_kept)
        if count and not listing.is_last and self._nursery is not None:
            _, reached = entry_numbers(listing.entries[count - 1][0])
            self._nursery.start_soon(self._fs.read_ahead, nodeid, reached, limit)
        return data

    @answers
    async def lseek(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        handle, offset, whence, _ = _LSEEK.unpack_from(body)
        return _OFFSET.pack(await self._fs.lseek(handle, offset, whence))

    @answers
    async def copy_file_range(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        return _COPIED.pack(await self._copy(body, caller), 0)

    @answers
    async def copy_file_range_64(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        return _OFFSET.pack(await self._copy(body, caller))

    async def _copy(self, body: bytes, caller: Caller) -> int:
        handle_in, offset_in, _, handle_out, offset_out, length, flags = _COPY.unpack_from(body)
        if flags:
            raise Invalid("copy_file_range(2) has no flags")
        length = min(length, _COPIED_MAX)
        return await self._fs.copy_file_range(
            handle_in, offset_in, handle_out, offset_out, length, caller
        )

    @answers
    async def statfs(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        """pyfuse3 does not say of which inode: those in quotas have their own answers."""
        of = await self._fs.statfs(nodeid)
        sizes = of.block_size, of.name_max, of.block_size
        return _STATFS_REPLY.pack(of.blocks, of.free, of.available, of.files, of.files_free, *sizes)

    @answers
    async def syncfs(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        await self._fs.sync()
        return b""

    @answers
    async def statx(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        """The kernel sends this for a program that asks when a file was born, else GETATTR."""
        inode = await self._fs.getattr(nodeid)
        size = self._fs.told_size(inode)
        is_kept = size == inode.size and not self._fs.changes_unseen(nodeid)
        kept_s = self._kernel.attr_timeout_s if is_kept else 0
        seconds, rest = divmod(kept_s, 1)
        times = (inode.atime_ns, inode.birth_ns, inode.ctime_ns, inode.mtime_ns)
        return b"".join(
            (
                _STATX_REPLY.pack(int(seconds), int(rest * 10**9), 0),
                _ATTRIBUTES.pack(
                    _BASIC_STATS | (_BTIME if inode.birth_ns else 0),
                    PREFERRED_IO,
                    0,
                    inode.links,
                    inode.uid,
                    inode.gid,
                    inode.mode,
                    inode.ino,
                    size,
                    inode.blocks,
                    0,
                ),
                *(_TIME.pack(*divmod(time_ns, 10**9)) for time_ns in times),
                _DEVICES.pack(os.major(inode.rdev), os.minor(inode.rdev), 0, 0),
            )
        )

    # --- locks; only where they are ours: in a cluster ---

    @answers
    async def getlk(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        _, space, lock = self._lock(nodeid, body)
        found = await self._fs.locks.test(nodeid, space, lock)
        if found is None:
            return _LOCK_REPLY.pack(0, 0, fcntl.F_UNLCK, 0)
        pid = found.pid if found.owner.session == lock.owner.session else 0
        kind = fcntl.F_WRLCK if found.exclusive else fcntl.F_RDLCK
        return _LOCK_REPLY.pack(found.start, found.end, kind, pid)

    @answers
    async def setlk(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        return await self._set_lock(nodeid, body, False)

    @answers
    async def setlkw(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        return await self._set_lock(nodeid, body, True)

    async def _set_lock(self, ino: int, body: bytes, wait: bool) -> bytes:
        handle, space, lock = self._lock(ino, body)
        if _LOCK.unpack_from(body)[4] == fcntl.F_UNLCK:
            await self._fs.locks.unlock(ino, space, lock.owner, lock.start, lock.end)
        else:
            await self._fs.locks.lock(ino, handle, space, lock, wait)
            self._drop_size(ino)
        return b""

    def _set_lock_at_once(self, ino: int, body: bytes, wait: bool) -> bool:
        handle, space, lock = self._lock(ino, body)
        locks = self._fs.locks
        if _LOCK.unpack_from(body)[4] == fcntl.F_UNLCK:
            return locks.unlock_at_once(ino, space, lock.owner, lock.start, lock.end)
        is_locked = locks.lock_at_once(ino, handle, space, lock, wait)
        if is_locked:
            self._drop_size(ino)
        return is_locked

    def _drop_size(self, ino: int) -> None:
        """Drop a size that the kernel may have from an older listing: a lock's owner sees all
        writes under it before, also by way of other hosts."""
        if self._fs.is_joined(ino):
            self._fs.kernel.drop_attributes(ino)

    def _lock(self, ino: int, body: bytes) -> tuple[int, int, Lock]:
        """Handle, space, and lock of a request. Raises NotSupported for a virtual file."""
        if ino >= FIRST_VIRTUAL:
            raise NotSupported("it is no file on record")
        handle, owner, start, end, kind, pid, flags = _LOCK.unpack_from(body)
        is_exclusive = kind == fcntl.F_WRLCK
        lock = Lock(self._fs.locks.owner(owner), start, min(end, LAST), is_exclusive, pid)
        return handle, FLOCK if flags & _LOCK_FLOCK else FCNTL, lock

    @answers
    async def flush(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        """close(2) waits until other hosts see the written bytes, and find no lock."""
        handle, number = _FLUSH.unpack_from(body)
        try:
            await self._fs.flush(handle)
        finally:
            await self._fs.locks.flush(nodeid, self._fs.locks.owner(number))
        return b""

    def _flush_at_once(self, ino: int, body: bytes) -> bool:
        handle, number = _FLUSH.unpack_from(body)
        locks = self._fs.locks
        if handle & WRITABLE and not self._fs.is_flushed(handle):
            return False
        return locks.flush_at_once(ino, locks.owner(number))

    @answers
    async def release(self, nodeid: int, body: bytes, caller: Caller) -> bytes:
        """Close a file that was locked. Its locks end when others see the written bytes."""
        handle, _, flags, number = _RELEASE.unpack_from(body)
        locks = self._fs.locks
        try:
            if self.kept is None or not self.kept.was_closed(current_unique(), handle):
                await self._fs.release(handle)
        finally:
            flocker = locks.owner(number) if flags & _RELEASE_FLOCK else None
            is_gone = not self._fs.handles.has(handle)
            await locks.end_close(nodeid, handle, flocker, is_gone)
        return b""
