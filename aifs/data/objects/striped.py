"""The objects of one striped file: reads and writes of byte ranges, exact lengths, durability.

What is done where: reads that the page cache can answer and writes to memory filesystems run on the
trio thread, since that takes less than the hand-off to a worker; everything else runs in the
servers' workers, for all objects of a request at once. Whatever may cut or remove an object runs in
workers even in memory, where freeing a large file takes long.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Lock

from aifs.core import files
from aifs.core.errors import FsError, Unavailable
from aifs.data.objects.holes import find_data, first_range
from aifs.data.objects.known import Known
from aifs.data.objects.runs import Run, runs_of
from aifs.data.patience import until_answered
from aifs.data.reading.blocks import Block, object_name
from aifs.data.reading.buffers import scatter
from aifs.data.reading.cached_reads import CachedReads, collect
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.unsynced import Unsynced
from aifs.data.workers import Call, gather, outcomes
from aifs.layout.placement import LOST
from aifs.layout.striped import Striped


class StripedObjects:
    """All use of one file's objects goes through one of these at a time.

    ``read`` and ``sync`` may overlap with everything; ``write`` with other writes; ``settle`` and
    ``trim`` with neither ``write`` nor each other. Calls that use worker threads are not
    cancellable while they do, but for ``read``. Descriptors are opened when an object is first
    touched.
    """

    def __init__(
        self,
        servers: Servers,
        layout: Striped,
        ino: int,
        oid: int,
        *,
        new: bool = False,
        background: str = "",
    ) -> None:
        """``new``: no object of this oid has ever been made, which spares asking. Raises
        Unavailable.

        ``background``: an I/O priority (see core.files). Everything runs in workers, at that
        priority.
        """
        self._layout = layout
        self._key = (ino, oid)
        self._servers = [servers[number] for number in layout.servers]
        self._buffers = servers.buffers
        self._background = background
        self._cached = CachedReads(
            servers.cache, layout, self._servers, self._key, self._read_object, self._in_use
        )
        self._fds: list[int | None] = [None] * len(self._servers)
        self._known = [Known(0 if new else None) for _ in self._servers]
        self._inherited = not new  # objects may hold what an earlier user wrote and did not sync
        self._unsynced = Unsynced()
        self._lost: dict[int, str] = {}
        self._closing: dict[
            int, AbstractContextManager
        ] = {}  # held while an object is synced, to be closed
        self._retired: list[tuple[DataServer, int]] = []
        self._busy = 0
        self._closed = False

    # --- bytes ---

    async def read(self, offset: int, length: int, size: int, strict: bool) -> memoryview:
        """Exactly ``length`` bytes, of a file that has ``size``; bytes that no object holds are
        zeros.

        With ``strict`` the file is settled: bytes that an object must hold are not allowed to be
        missing, and what has to come from servers is cached and read ahead. Raises Unavailable,
        naming server and object. The memory is reused once no view of it is left.
        """
        buffer = self._buffers.take(length)
        calls: list[Call] = []
        loads: list[tuple[Run, list[Block]]] = []
        ahead = None
        for run in runs_of(self._layout, offset, buffer):
            server = self._servers[run[0]]
            if server.may_inline:
                self._read_run(run, size, strict)
                continue
            place = (run[0], run[1], sum(map(len, run[2])))
            blocks = self._cached.find(*place) if strict else None
            if blocks is None and self._read_cached(run, server):
                continue
            if strict and ahead is None:
                ahead = self._cached.observe(offset, length)
            if blocks is None and strict:
                blocks = self._cached.load(*place, size)
            if blocks is None:
                calls.append((server.workers, self._read_run, (run, size, strict)))
            else:
                loads.append((run, blocks))
        if ahead:
            self._cached.read_ahead(
                ahead, size
            )  # before anything is waited for: the file is still settled
        if calls:
            # What lands late may be the removal of what would be opened, but for settled files.
            await self._gather(calls, abandonable=True, waits=not strict)
        for run, blocks in loads:
            held = await collect(blocks, run[1], sum(map(len, run[2])))
            if len(held) == length:
                return held  # all of the request
            self._fill(run, held, size)
        return buffer

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """As a strict ``read``, but into ``buffer``, and past all caches of ours."""
        await self._gather(
            [
                (self._servers[run[0]].workers, self._read_run, (run, size, True))
                for run in runs_of(self._layout, offset, buffer)
            ]
        )

    async def backing(self, size: int) -> int | None:
        """The descriptor, ours, of the first object, if that is on a local server and has exactly
        ``size`` bytes.
        """
        server, fd = self._servers[0], self._fds[0]
        if fd is None and server.storage.is_local:
            [fd] = await self._gather([(server.workers, self._descriptor, (0, False))])
        return (
            fd
            if fd is not None
            and server.storage.is_local
            and server.stat(self._key, fd).length == size
            else None
        )

    async def write(self, offset: int, data: bytes | memoryview) -> None:
        """All of ``data`` is in the servers' page caches on return. Objects are made as they are
        needed.

        Raises NoSpace, QuotaExceeded, Unavailable: then any part of it may have been written.
        """
        self._cached.forget()
        runs = runs_of(self._layout, offset, memoryview(data))
        calls: list[Call] = []
        try:
            for run in runs:
                server = self._servers[run[0]]
                if self._may_inline(server):
                    self._write_run(run)
                else:
                    calls.append((server.workers, self._write_run, (run,)))
            if calls:
                await self._gather(calls)
        except BaseException:
            for index, _, _ in runs:
                self._known[index].length = None
            raise
        for index, object_offset, parts in runs:
            self._known[index].written(object_offset, sum(map(len, parts)))

    def _read_cached(self, run: Run, server: DataServer) -> bool:
        index, offset, parts = run
        fd = self._fds[index]
        if fd is None:
            return False
        for part in parts:
            if not server.read_cached(fd, part, offset):
                return False
            offset += len(part)
        return True

    def _read_object(self, index: int, buffer: memoryview, offset: int) -> int:
        fd = self._descriptor(index, create=False)
        return 0 if fd is None else self._servers[index].read(self._key, fd, buffer, offset)

    def _read_run(self, run: Run, size: int, strict: bool) -> None:
        index, offset, parts = run
        # One request to the server, whatever the stripe unit.
        target = parts[0] if len(parts) == 1 else memoryview(bytearray(sum(map(len, parts))))
        done = self._read_object(index, target, offset)
        if done < len(target):
            if strict:
                self._require(index, offset + done, offset + len(target), size)
            target[done:] = bytes(len(target) - done)
        if len(parts) > 1:
            scatter(target, parts)

    def _fill(self, run: Run, held: memoryview, size: int) -> None:
        """The run's memory, from what its object holds of it."""
        index, offset, parts = run
        length = sum(map(len, parts))
        if len(held) < length:
            self._require(index, offset + len(held), offset + length, size)
            held = memoryview(bytes(held).ljust(length, b"\0"))
        scatter(held, parts)

    def _require(self, index: int, length: int, end: int, size: int) -> None:
        expected = self._layout.object_length(index, size)
        if length < min(end, expected):
            server = self._servers[index]
            path = server.object_path(*self._key)
            raise Unavailable(
                f"data server {server.id}: {path} ends before byte {min(end, expected)} of {expected}"
            )

    def _write_run(self, run: Run) -> None:
        index, offset, parts = run
        fd = self._descriptor(index, create=True)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            self._servers[index].write(self._key, fd, data, offset)
        finally:
            self._unsynced.mark(index)

    # --- holes ---

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """Start and end of what comes first from byte ``offset`` on of a file of ``size`` bytes and
        may be no hole: all before it is one. Both are ``size`` if there is nothing. One call to
        each server; ``strict``: see ``read``. Raises Unavailable.
        """
        found = await self._gather(
            [
                (server.workers, self._find_data, (index, offset, size, strict))
                for index, server in enumerate(self._servers)
            ],
            waits=not strict,
        )
        return first_range(self._layout, dict(enumerate(found)), offset, size)

    def _find_data(
        self, index: int, offset: int, size: int, strict: bool
    ) -> tuple[int, int] | None:
        fd, server = self._descriptor(index, create=False), self._servers[index]
        length = 0 if fd is None else server.stat(self._key, fd).length
        end = self._layout.object_length(index, size)
        if strict:
            self._require(index, length, end, size)
        return find_data(server, self._key, fd, self._layout, index, offset, min(end, length))

    async def punch(self, offset: int, length: int) -> None:
        """The range reads as zeros on return, and takes no space. One call to each server that has
        an object.

        Raises NotSupported where a server's filesystem has no such thing, Unavailable: then any
        part of it may be zeros.
        """
        self._cached.forget()
        for known in self._known:
            known.length = None
        await self._gather(
            [
                (server.workers, self._punch, (index, offset, offset + length))
                for index, server in enumerate(self._servers)
            ]
        )

    def _punch(self, index: int, offset: int, end: int) -> None:
        start, stop = (self._layout.object_length(index, at) for at in (offset, end))
        fd = self._descriptor(index, create=False) if start < stop else None
        if fd is not None:
            try:
                self._servers[index].punch(self._key, fd, start, stop - start)
            finally:
                self._unsynced.mark(index)

    # --- lengths ---

    async def trim(self, size: int) -> None:
        """No object is longer on return than a file of ``size`` bytes calls for. Raises
        Unavailable.
        """
        self._cached.forget()
        calls = []
        for index, known in enumerate(self._known):
            target = self._layout.object_length(index, size)
            if known.length is None or known.length > target:
                calls.append((index, self._trim_object, target))
        await self._learn(calls)

    async def settle(self, size: int) -> None:
        """Objects exist on return exactly as a file of ``size`` bytes calls for: made, cut,
        extended or removed.

        ``sync`` then covers whatever may not be durable of them, also the work of earlier users of
        the file. Raises NoSpace, QuotaExceeded, Unavailable.
        """
        self._cached.forget()
        calls = []
        for index, known in enumerate(self._known):
            target = self._layout.object_length(index, size)
            if self._inherited or not known.exact or known.length != target:
                calls.append((index, self._settle_object, target))
        await self._learn(calls)
        self._inherited = False

    async def _learn(self, calls: list) -> None:
        """Run (index, function, target length) and take over what each says of its object."""
        if not calls:
            return
        for index, _, _ in calls:
            self._known[index].length = None
        results = await self._gather(
            [
                (self._servers[index].workers, function, (index, target))
                for index, function, target in calls
            ]
        )
        for (index, _, _), known in zip(calls, results, strict=True):
            self._known[index] = known

    def _trim_object(self, index: int, target: int) -> Known:
        fd = self._descriptor(index, create=False)
        return Known(0) if fd is None else self._cut(index, fd, target, extend=False)

    def _settle_object(self, index: int, target: int) -> Known:
        try:
            if target:
                return self._cut(index, self._descriptor(index, create=True), target, extend=True)
            self._remove(index)
            return Known(0)
        finally:
            self._unsynced.mark(index)

    def _cut(self, index: int, fd: int, target: int, extend: bool) -> Known:
        server = self._servers[index]
        status = server.stat(self._key, fd)
        if status.length > target or (extend and status.length < target):
            try:
                server.truncate(self._key, fd, target)
            finally:
                self._unsynced.mark(index)
            status = server.stat(self._key, fd)
        # An empty object is one too many: settling will remove it.
        return Known(status.length, status.blocks, exact=status.length > 0)

    def _remove(self, index: int) -> None:
        server = self._servers[index]
        with server.lock_of(self._key[1]):
            server.remove_object(self._key)
            fd, self._fds[index] = self._fds[index], None
        if fd is not None:
            self._retired.append((server, fd))  # a read may be using it
        self._lost.pop(index, None)

    def blocks(self) -> int | None:
        """Blocks of 512 bytes that the objects take: exact after ``settle``, a good guess while
        being written.

        None while nothing is known, which is before the first ``trim`` or ``settle`` of objects
        that are not new. Does not block.
        """
        if self._inherited and any(known.length is None for known in self._known):
            return None
        return sum(known.blocks for known in self._known)

    # --- durability ---

    async def sync(self, all_objects: bool = False) -> None:
        """Every object that has changed, by us, is durable on return, with its length, its name, or
        its absence.

        Raises NoSpace, QuotaExceeded, Unavailable. Where the system has failed to write bytes back,
        it forgets them: then this fails each time it is called.
        """
        if all_objects:
            self._unsynced.mark(*range(len(self._servers)))
        calls: list[Call] = []
        for index, generation in self._unsynced.snapshot().items():
            server = self._servers[index]
            if self._may_inline(server):
                self._sync_object(index, generation)
            else:
                calls.append((server.workers, self._sync_object, (index, generation)))
        if calls:
            await self._gather(calls)

    def _sync_object(self, index: int, generation: int) -> None:
        server = self._servers[index]
        with self._closing.get(index, nullcontext()):
            fd = self._descriptor(index, create=False)
            if index in self._lost:
                raise Unavailable(f"bytes were lost earlier: {self._lost[index]}")
            if fd is not None:
                try:
                    server.sync_object(self._key, fd)
                except FsError as error:
                    self._lost[index] = str(error)
                    raise
        server.sync_names_near(self._key[1])
        self._unsynced.done(index, generation)

    # --- descriptors ---

    def _descriptor(self, index: int, create: bool) -> int | None:
        fd = self._fds[index]
        if fd is None:
            server = self._servers[index]
            with server.lock_of(self._key[1]):
                fd = self._fds[index]
                if fd is None:
                    fd = self._fds[index] = server.open_object(self._key, create)
        return fd

    def _may_inline(self, server: DataServer) -> bool:
        return server.may_inline and not self._background and not server.hangs

    async def _gather(
        self, calls: list[Call], abandonable: bool = False, waits: bool = True
    ) -> list:
        """``abandonable``: it may be cancelled, for what the calls write to is nobody else's.
        ``waits``: see until_answered.
        """
        if waits:
            await until_answered(workers for workers, _, _ in calls)
        if self._background:
            calls = [
                (w, files.at_priority, (self._background, function, *args))
                for w, function, args in calls
            ]
        self._in_use(1)
        return await gather(calls, partial(self._in_use, -1), abandonable)

    def _in_use(self, change: int) -> None:
        self._busy += change
        self._close_unused()

    def close_idle(self) -> int:
        """Give up the descriptors until they are needed again, unless a call uses them; how many.
        Does not block.
        """
        if self._busy:
            return 0
        unsynced = self._unsynced.snapshot()
        closed = [(index, fd) for index, fd in enumerate(self._fds) if fd is not None]
        for index, fd in closed:
            self._fds[index] = None
            lock = self._closing.setdefault(index, Lock()) if index in unsynced else None
            lost = partial(self._lost.setdefault, index)
            self._servers[index].close_idle(self._key, fd, lock, lost)
        return len(closed)

    def close(self) -> None:
        """Give up the descriptors, once no call uses them any more. Nothing is synced. Does not
        block.
        """
        self._closed = True
        self._close_unused()

    def _close_unused(self) -> None:
        if self._busy:
            return
        for server, fd in self._retired:
            server.close_object(fd, removed=True)
        self._retired.clear()
        if self._closed:
            for index, fd in enumerate(self._fds):
                if fd is not None:
                    self._servers[index].close_object(fd)
                    self._fds[index] = None


async def delete_objects(servers: Servers, layout: Striped, ino: int, oid: int) -> None:
    """Delete the objects of ``oid``, durably; those that do not exist are no error. Raises NoSpace,
    Unavailable.
    """
    failed = await delete_batch(servers, {oid: (ino, layout)})
    if failed:
        raise failed[oid]


async def delete_batch(
    servers: Servers, doomed: Mapping[int, tuple[int, Striped]]
) -> dict[int, FsError]:
    """Delete the objects of many files: oid to (ino, layout). What is deleted is durably so on
    return.

    Returns the errors, by oid, of those of which something may be left. One request to each server,
    for all.
    """
    failed: dict[int, FsError] = {}
    keys: dict[int, list[tuple[int, int]]] = {}
    for oid, (ino, layout) in doomed.items():
        for number in layout.servers:
            keys.setdefault(number, []).append((ino, oid))
    calls: list[Call] = []
    for number, chosen in keys.items():
        server = servers.find(number)
        if server is None or server.standing == LOST:
            continue  # what may lie there is nobody's concern any more
        for key in chosen:
            servers.cache.invalidate(object_name(server, key))
        calls.append((server.workers, server.remove_objects, (chosen,)))
    for (_, _, [chosen]), errors in zip(calls, await outcomes(calls) if calls else [], strict=True):
        if isinstance(errors, FsError):
            errors = dict.fromkeys((oid for _, oid in chosen), errors)
        elif isinstance(errors, BaseException):
            raise errors
        failed.update(errors)
    return failed
