"""One burst copy: a file of the burst tier with all bytes of one file of the filesystem.

It is the object ``(0, id)`` of its burst directory. Its own length and times count: the kernel may
read and write it without the daemon (passthrough). Calls that take microseconds run on the trio
thread (reads of the page cache; opening and writing in memory), others in the directory's workers.

One descriptor is for reading, passthrough and leases; the other, for writing, exists only while the
daemon writes, since a lease proves that nobody can write.
"""

import ctypes
import errno
import fcntl
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from typing import Any

from aifs.core import files
from aifs.core.errors import FsError, NoSuchAddress, NotSupported, Unavailable
from aifs.core.libc import library
from aifs.data.reading.buffers import BufferPool
from aifs.data.server import DataServer, MissingObject
from aifs.data.workers import gather, outcomes
from aifs.meta.records import Copy

_FREED_INLINE = 1 << 20  # bytes of memory that may be given back on the trio thread


class BurstCopy:
    """The daemon's only use of one copy at a time. Does no I/O before it is asked to.

    Reads and writes may overlap. Calls in worker threads are not cancellable. Every call raises
    Unavailable, naming directory and path, if the copy is missing or its device fails.
    """

    def __init__(
        self, device: DataServer, copy_id: int, buffers: BufferPool, fd: int | None = None
    ) -> None:
        """``fd``: the descriptor for reading, if the copy has just been made."""
        self.device = device
        self.id = copy_id
        self._fd = fd  # for reading
        self._buffers = buffers
        self._key = (0, copy_id)
        """As the device names the object: (0, id)."""
        self._writer: int | None = None
        """The descriptor for writing; None while nobody has asked for one since it was closed."""
        self._leased = False
        """Whether ``fd`` has a read lease, which may have been broken."""
        self._was_open = fd is not None
        """Whether the copy has been opened since this was made."""
        self.source = 0
        """The object set whose blocks it was until a change; 0: it was made as a copy."""
        self._changes = self._synced_changes = 0  # by us
        self._closing: AbstractContextManager | None = (
            None  # held while what was written is synced, to be closed
        )
        self._name_in_doubt = fd is None
        """Whether the name may not be durable, as an earlier process made it."""
        self.lost = ""
        """Why synced bytes are not durable; '' as long as none are known to be lost."""
        self._busy = 0
        """How many calls in workers use the descriptors."""
        self._closed = False
        """``close`` has been called: descriptors go when no call uses them any more."""
        self._removed = False
        """The copy had no name any more when it was closed."""

    @property
    def server(self) -> int:
        """The number of the burst directory, as in records."""
        return self.device.id

    @property
    def place(self) -> Copy:
        """As in the record of the inode."""
        return Copy(self.device.id, self.id)

    @property
    def is_open(self) -> bool:
        """Whether it has been opened, so that ``stat`` knows its attributes."""
        return self._was_open

    # --- descriptors ---

    @property
    def fd(self) -> int:
        """For reading; from ``ensure_open`` to ``close`` or ``close_idle``, which leaves a leased
        or used copy."""
        assert self._fd is not None
        return self._fd

    async def ensure_open(self) -> int:
        """The copy is there, and ``stat``, ``lease`` and ``fd``, which is returned, can be used."""
        return await self._do(self.open_now) if self._fd is None else self._fd

    async def backing(self) -> int:
        """A descriptor to set up passthrough with, ours: it stays open until ``close``."""
        return await self.ensure_open()

    async def release_writers(self) -> None:
        """Nothing of ours is open for writing on return. No call that writes may be under way."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await self._do(files.close_file, writer)

    def lease(self) -> bool:
        """Whether nobody has the copy open or mapped for writing, nor unnoticed from now on: a
        program that opens it to write waits for ``unlease``, up to 45 s. Does not block."""
        if not self._leased:
            fd = self.open_now()
            self._leased = self.device.call("lease", self._key, take_read_lease, fd)
        return self._leased

    async def is_used(self) -> bool:
        """Whether a program has the copy open or mapped, also for reading alone."""
        return is_used(await self.ensure_open())

    @property
    def is_leased(self) -> bool:
        """Whether the lease has held from ``lease`` until now. Does not block."""
        return self._leased and is_whole(self.fd)

    def unlease(self) -> bool:
        """Give up the lease; whether it has held until now. Does not block."""
        held, self._leased = self._leased, False
        return held and drop_lease(self.fd)

    def open_now(self) -> int:
        """``ensure_open`` in a worker of the device; returns the descriptor for reading."""
        with self.device.lock_of(self.id):
            if self._fd is None:
                self._fd = self._open(write=False)
                self._was_open = True
            return self._fd

    def _open_writer(self) -> int:
        with self.device.lock_of(self.id):
            if self._writer is None:
                self.unlease()  # or we would wait for ourselves
                self._writer = self._open(write=True)
        self._changes += 1  # by the caller
        return self._writer

    def _open(self, write: bool) -> int:
        fd = self.device.open_object(self._key, create=False, write=write)
        if fd is None:
            path = self.device.where(self._key)
            raise MissingObject(
                f"{self.device.name}: {path} is missing, which holds a file's bytes"
            )
        return fd

    def close(self, removed: bool = False) -> None:
        """Give up the descriptors, once unused. Nothing is synced. Does not block. ``removed``: the
        copy has no name any more; closing it frees its space, which takes long."""
        self._closed, self._removed = True, removed
        self._close_unused()

    def close_idle(self) -> int:
        """Give up the descriptors until needed, unless used or leased; how many. Does not block."""
        if self._busy or self._leased:
            return 0
        fds, self._fd, self._writer = (self._writer, self._fd), None, None
        unsynced = None
        if self._changes != self._synced_changes:
            unsynced = self._closing = self._closing or Lock()
        closed = [fd for fd in fds if fd is not None]
        for fd in closed:
            self.device.close_idle(self._key, fd, unsynced, self._lose)
        return len(closed)

    def _lose(self, reason: str) -> None:
        self.lost = reason

    def _close_unused(self) -> None:
        if self._closed and not self._busy:
            self.unlease()  # passthrough may keep the file open
            fds, self._fd, self._writer = (self._writer, self._fd), None, None
            for fd in fds:
                if fd is not None:
                    self.device.close_object(fd, self._removed)

    async def _do(self, function: Callable[..., Any], *args: Any) -> Any:
        """On the trio thread if it cannot wait for a device, else in a worker."""
        return function(*args) if self.device.may_inline else await self._work(function, *args)

    async def _work(self, function: Callable[..., Any], *args: Any) -> Any:
        self._busy += 1
        try:
            return (await gather([(self.device.workers, function, args)]))[0]
        finally:
            self._busy -= 1
            self._close_unused()

    # --- bytes ---

    def stat(self) -> os.stat_result:
        """Length, blocks and times, as they are, of a copy that has been opened. Does not block."""
        if self._fd is not None:
            return self.device.call("stat", self._key, os.fstat, self._fd)
        path = self.device.where(self._key)
        return self.device.call("stat", self._key, os.stat, path)

    async def read(self, offset: int, length: int) -> memoryview:
        """``length`` bytes, fewer at the end. The memory is reused once no view is left."""
        fd = await self.ensure_open()
        length = min(length, self.stat().st_size - offset)
        if length <= 0:
            return memoryview(b"")
        buffer = self._buffers.take(length)
        if not self.device.may_inline and self.device.read_cached(fd, buffer, offset):
            return buffer
        return buffer[: await self._do(self.device.read, self._key, fd, buffer, offset)]

    async def resident(self, step: int) -> list[int] | None:
        """Pages of each ``step`` bytes in memory; None if unknown. Passed-through reads bring them
        there."""
        fd = await self.ensure_open()
        work = resident, fd, self.stat().st_size, step
        return await self._do(self.device.call, "resident", self._key, *work)

    def may_be_written_unseen(self) -> bool:
        """Whether a mapping may go on writing with the same mtime: the kernel changes it when a
        page becomes writable, which lasts until write-back, and for ever in memory. The copy was
        opened. Does not block."""
        return (
            self.device.may_inline
            or self._fd is None
            or self.device.call("stat", self._key, is_dirty, self._fd)
        )

    async def write(self, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` to the page cache. Raises NoSpace, QuotaExceeded: then any part may
        be written."""
        await self._do(self.write_now, offset, data)

    def write_now(self, offset: int, data: bytes | memoryview) -> None:
        """As ``write``, in the thread that calls: a worker of the device."""
        self.device.write(self._key, self._open_writer(), data, offset)

    async def append(self, data: bytes | memoryview) -> None:
        """As ``write``, at the end, even if others write there."""
        await self._do(self._append, data)

    def _append(self, data: bytes | memoryview) -> None:
        self.device.call("write", self._key, files.append, self._open_writer(), data)

    def written(self) -> None:
        """Another writer wrote: sync before descriptors are given up, because later ones may not
        learn of failed write-backs."""
        self._changes += 1

    async def truncate(self, size: int) -> None:
        """Cut or extend to ``size`` bytes."""
        await self.ensure_open()
        frees_much = self.stat().st_size - size > _FREED_INLINE
        await (self._work if frees_much else self._do)(self._truncate, size)

    def _truncate(self, size: int) -> None:
        self.device.truncate(self._key, self._open_writer(), size)

    def fill_now(self, parts: Sequence[tuple[int, memoryview]], size: int) -> None:
        """Write an empty copy's parts in a worker; it then has ``size`` bytes and no writer."""
        fd = self._open(write=True)
        try:
            for offset, data in parts:
                self.device.write(self._key, fd, data, offset)
            self.device.truncate(self._key, fd, size)
        finally:
            files.close_file(fd)

    async def allocate(self, mode: int, offset: int, length: int) -> None:
        """fallocate(2), modes as in core.files. Raises NoSpace; NotSupported by the filesystem."""
        await self._work(self._allocate, mode, offset, length)

    def _allocate(self, mode: int, offset: int, length: int) -> None:
        writer = self._open_writer()
        self.device.call("write", self._key, _allocate, writer, mode, offset, length)

    async def copy_range(self, source: "BurstCopy", offset: int, to: int, length: int) -> int:
        """Copy bytes from ``offset`` of ``source`` to ``to``; how many, fewer only at its end."""
        await source.ensure_open()
        source._busy += 1
        try:
            return await self._work(self._copy_range, source.fd, offset, to, length)
        finally:
            source._busy -= 1
            source._close_unused()

    def _copy_range(self, source: int, offset: int, to: int, length: int) -> int:
        return self.device.call(
            "write", self._key, files.copy_range, source, offset, self._open_writer(), to, length
        )

    async def seek(self, offset: int, whence: int) -> int:
        """lseek(2) with SEEK_DATA or SEEK_HOLE. Raises NoSuchAddress behind the last data, or
        end."""
        await self.ensure_open()
        return await self._work(self.device.call, "seek", self._key, _seek, self.fd, offset, whence)

    async def data_range(self, offset: int, size: int) -> tuple[int, int]:
        """As Bytes.data_range."""
        await self.ensure_open()
        call = self.device.call, "read", self._key, files.next_data, self.fd, offset, size
        return await self._work(*call) or (size, size)

    async def set_mtime(self, mtime_ns: int) -> None:
        """The copy's mtime is ``mtime_ns``, until the next write."""
        await self._do(self._set_mtime, mtime_ns)

    def _set_mtime(self, mtime_ns: int) -> None:
        self.device.call("write", self._key, files.set_mtime, self.open_now(), mtime_ns)

    # --- durability ---

    async def sync(self) -> None:
        """Make all earlier bytes, by anyone, length and name durable. Fails each time once the
        system has failed to write bytes back."""
        await self._do(self._sync)

    def _sync(self) -> None:
        changes = self._changes
        with self._closing or nullcontext():
            fd = self.open_now()
            if self.lost:
                raise Unavailable(f"bytes were lost earlier: {self.lost}")
            try:
                self.device.sync_object(self._key, fd)
            except FsError as error:
                self.lost = str(error)
                raise
        self._synced_changes = changes
        if self._name_in_doubt:
            self.device.doubt_names_near(self.id, alone=True)
            self._name_in_doubt = False
        self.device.sync_names_near(self.id)


async def sync_copies(copies: Sequence[BurstCopy]) -> list[BaseException | None]:
    """As ``sync`` of each, all together: the error of each, if any."""
    if all(copy.device.may_inline for copy in copies):
        return [_outcome_of(copy._sync) for copy in copies]
    for copy in copies:
        copy._busy += 1
    try:
        return await outcomes([(copy.device.workers, copy._sync, ()) for copy in copies])
    finally:
        for copy in copies:
            copy._busy -= 1
            copy._close_unused()


def _outcome_of(function: Callable[[], None]) -> BaseException | None:
    try:
        function()
    except FsError as error:
        return error
    return None


# What follows is an answer about the file, not a failure of the device.


def _allocate(fd: int, mode: int, offset: int, length: int) -> None:
    try:
        files.change_allocation(fd, mode, offset, length)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise NotSupported from None


def _seek(fd: int, offset: int, whence: int) -> int:
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        raise NoSuchAddress from None


def take_read_lease(fd: int) -> bool:
    """Lease a file (``fd`` is read-only); False if it is open, or mapped, for writing.

    When somebody opens it to write, the system ends the lease after up to 45 s of waiting. The
    signal for this is one that does no harm.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # the usual one, SIGIO, kills
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    return True


def is_used(fd: int) -> bool:
    """Whether a file is open or mapped, also read-only, besides ``fd``. False if unknown."""
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:  # there are no leases here
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_whole(fd: int) -> bool:
    """Whether the lease on a file still holds, and nobody waits for its end."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def drop_lease(fd: int) -> bool:
    """End the lease; returns whether it was whole until now."""
    whole = is_whole(fd)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return whole


_CACHESTAT = 451  # on all architectures, since Linux 6.5
_LACKING = (errno.ENOSYS, errno.EPERM, errno.EOPNOTSUPP)
"""The kernel is too old, a filter of system calls is too, or the filesystem has no page cache."""


class _Range(ctypes.Structure):
    _fields_ = [("offset", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _Answer(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    ]


def resident(fd: int, size: int, step: int) -> list[int] | None:
    """Pages of each ``step`` bytes in memory; None if unknown. Raises OSError."""
    found = []
    for offset in range(0, size, step):
        if (answer := _ask(fd, offset, step)) is None:
            return None
        found.append(answer.cached)
    return found


def is_dirty(fd: int) -> bool:
    """Whether pages in memory may differ from the device; if not, a later write by a mapping
    changes the mtime. Takes 1 us for a small file, 100 us for 1 GiB in the cache. Raises
    OSError."""
    answer = _ask(fd, 0, 0)
    return answer is None or answer.dirty + answer.writeback > 0


def _ask(fd: int, offset: int, length: int) -> _Answer | None:
    """Of a range; ``length`` 0: up to the end. None if unknown."""
    asked, answer = _Range(offset, length), _Answer()
    if library().syscall(_CACHESTAT, fd, ctypes.byref(asked), ctypes.byref(answer), 0):
        number = ctypes.get_errno()
        if number in _LACKING:
            return None
        raise OSError(number, os.strerror(number))
    return answer
