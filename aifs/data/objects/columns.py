"""The objects of one object set by columns: for rebuild, move, scrub and repair, and below whole
files (see ``object_set``). A mask ``unread`` of columns not to read has bit c for column c."""

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

from aifs.core import files
from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import is_complete, some_of
from aifs.data.health import Latency
from aifs.data.objects.coding import code_of
from aifs.data.objects.holes import find_data, first_range
from aifs.data.patience import until_answered
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import Unsynced
from aifs.data.workers import Call, outcomes
from aifs.layout.striped import Striped

Range = tuple[int, int, int]
"""Column, offset in its object, length."""

Exact = Callable[[int, int, int, int], Awaitable[memoryview]]
"""As Columns.exact."""

FetchAll = Callable[[Sequence[Range]], Awaitable[list[memoryview | FsError]]]
"""As Columns.fetch_all."""

_READS = {"open", "read", "reach"}
_PAGE = 4096  # what filesystems allocate by


@dataclass(slots=True)
class Known:
    """Length and space of one object, known because only this process changes them."""

    length: int | None = None  # None: nothing is known
    blocks: int = 0  # of 512 bytes
    exact: bool = True  # ``blocks`` is counted, not estimated

    def written(self, offset: int, length: int) -> None:
        """``length`` bytes have been written at ``offset``."""
        if self.length is None:
            return
        end = offset + length
        if offset == self.length and self.blocks == _blocks(offset):
            self.blocks = _blocks(end)
        else:
            self.exact = False
            self.blocks = min(
                self.blocks + _blocks(length) + _blocks(1), _blocks(max(end, self.length))
            )
        self.length = max(end, self.length)


def _blocks(length: int) -> int:
    return -(-length // _PAGE) * (_PAGE // 512)


class Columns:
    """The objects of one striped file (or container: ino 0) as they lie on their servers.

    All runs in the servers' workers, at the I/O priority ``background``. ``fetch`` and
    ``reconstruct`` are cancellable: a server's call then ends by itself; others are not while
    waiting. Only ``reconstruct`` uses other columns. Methods ``_now`` block, in any thread.

    Descriptors are opened at first use. A written idle one is synced before it is closed: each
    later sync hears of a failure.
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
        on_short: Callable[[int], None] = lambda column: None,
    ) -> None:
        """Does no I/O; an unregistered server raises Unavailable when used. ``new``: no object of
        this oid was ever made, so no name of an earlier process needs a sync. ``on_short`` is
        called, on the trio thread, for columns with objects that end too early."""
        self.key = (ino, oid)
        """(inode, oid); inode 0: a container."""
        self.unsynced = Unsynced[int]()
        """Columns whose objects have changed, by us, and may not be durable."""
        self._servers = servers
        self.layout = layout
        self._new = new
        self._on_short = on_short
        self._background = background
        self._used: list[DataServer | None] = [None] * len(layout.servers)
        """By column, its server, once it has been asked for."""
        self._fds: list[int | None] = [None] * len(layout.servers)
        """By column, the descriptor of its object; None: it is not open."""
        self._lost: dict[int, str] = {}  # why bytes that were written are not durable
        self._closing: dict[int, Lock] = {}  # held while an object is synced, to be closed
        self._retired: list[tuple[DataServer, int]] = []  # descriptors of removed objects
        self._busy = 0  # calls that use descriptors
        self._closed = False
        """``close`` has been called: descriptors go when no call uses them any more."""

    def server(self, column: int) -> DataServer:
        """Raises Unavailable."""
        server = self._used[column]
        if server is None:
            server = self._used[column] = self._servers[self.layout.servers[column]]
        return server

    def is_good(self, column: int) -> bool:
        """Whether the column's server can be expected to answer reads soon."""
        server = self._servers.find(self.layout.servers[column])
        if server is None or server.absent or server.hangs or server.latency.is_late:
            return False
        return not server.health.failing & _READS or server.health.usable

    def latencies(self, columns: Iterable[int]) -> Iterator[Latency]:
        """Of the servers of those columns that can be expected to answer soon."""
        return (self.server(column).latency for column in columns if self.is_good(column))

    # --- reading ---

    async def read(self, column: int, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``; the bytes read, fewer only at the object's end, 0 without one. Raises
        Unavailable."""
        return await self._run(column, self.read_now, column, buffer, offset)

    async def fetch(self, column: int, offset: int, length: int) -> memoryview:
        """As ``read``, into memory of its own."""
        [answer] = await self.fetch_all([(column, offset, length)])
        if isinstance(answer, FsError):
            raise answer
        return answer

    async def fetch_all(self, ranges: Sequence[Range]) -> list[memoryview | FsError]:
        """All these at once; what each gave."""
        buffers = [self._servers.buffers.take(length) for _, _, length in ranges]
        calls = [
            (column, self.read_now, (column, buffer, offset))
            for (column, offset, _), buffer in zip(ranges, buffers, strict=True)
        ]
        answers = await self.attempt(calls, abandonable=True, inline=True)
        return [
            a if isinstance(a, FsError) else buffer[:a]
            for a, buffer in zip(answers, buffers, strict=True)
        ]

    def read_now(self, column: int, buffer: memoryview, offset: int) -> int:
        """As ``read``."""
        fd = self._fds[column]
        if fd is None:
            fd = self.descriptor_now(column)
        return 0 if fd is None else self.server(column).read(self.key, fd, buffer, offset)

    def opened(self, column: int) -> int | None:
        """Ours, of the column's object, if it is open."""
        return self._fds[column]

    def is_open(self, column: int) -> bool:
        """Whether there is a descriptor of the column's object."""
        return self._fds[column] is not None

    def read_cached(self, column: int, parts: Sequence[memoryview], offset: int) -> bool:
        """Fill successive ``parts`` if the page cache has them. Does not block."""
        fd = self._fds[column]
        if fd is None:
            return False
        server = self.server(column)
        for part in parts:
            if not server.read_cached(fd, part, offset):
                return False
            offset += len(part)
        return True

    async def reconstruct(
        self,
        column: int,
        offset: int,
        length: int,
        size: int,
        unread: int = 0,
        read: Exact | None = None,
    ) -> memoryview:
        """The right bytes at ``offset`` of the column's object, told by other columns: up to
        ``length``, fewer only at its end in a file of ``size``.

        Neither the column nor ``unread`` are read; slow servers only if nothing else is left; by
        ``read``, or ``exact``. Raises Unavailable, which names missing columns.
        """
        layout = self.layout
        length = min(length, layout.object_length(column, size) - offset)
        if length <= 0:
            return memoryview(b"")
        others = layout.copies(column) if layout.replicas > 1 else range(len(layout.servers))
        usable = [other for other in others if other != column and not unread >> other & 1]
        usable.sort(key=lambda other: not self.is_good(other))
        needed = 1 if layout.replicas > 1 else layout.width
        if not layout.is_protected or len(usable) < needed:
            raise Unavailable(
                f"inode {self.key[0]}, object {self.key[1]}: column {column} (data server "
                f"{layout.servers[column]}) cannot be recovered: {len(usable)} of {needed} other "
                "columns are left"
            )
        held = {
            other: min(max(layout.object_length(other, size) - offset, 0), length)
            for other in usable
        }
        attempts = [
            partial(read or self.exact, other, offset, held[other], size) for other in usable
        ]
        delay_s = self._servers.hedging.delay_s(
            self.latencies(usable[:needed]), length, self.latencies(usable), needed
        )
        answers = await some_of(attempts, needed, delay_s)
        units = {usable[number]: unit for number, unit in answers.items()}
        if layout.replicas > 1:
            return next(iter(units.values()))
        return await self.decode(column, units, length)

    async def decode(self, column: int, units: Mapping[int, memoryview], length: int) -> memoryview:
        """``length`` bytes of a coded column from as many others as there are data columns, with
        the same range; shorter ones count as zero-filled."""
        target = self._servers.buffers.take(length)
        code = code_of(self.layout.width, self.layout.parity)
        answered = max(units, key=lambda other: (len(units[other]) > 0, self.is_good(other)))
        await self._run(answered, code.reconstruct, dict(sorted(units.items())), column, target)
        return target

    async def exact(self, column: int, offset: int, length: int, size: int) -> memoryview:
        """``fetch`` bytes that the object must have in a file of ``size``. Raises Unavailable
        otherwise."""
        if not length:
            return memoryview(b"")
        data = await self.fetch(column, offset, length)
        self.require_whole(column, offset, data, length, size)
        return data

    def require_whole(
        self, column: int, offset: int, data: memoryview, length: int, size: int
    ) -> None:
        """Raises Unavailable, and calls ``on_short``, if ``data`` is shorter than ``length``. For
        the trio thread."""
        if len(data) < length:
            self._on_short(column)
            self.require(column, offset + len(data), offset + length, size)

    def require(self, column: int, length: int, end: int, size: int) -> None:
        """Raises Unavailable if an object of ``length`` bytes ends before ``end``, and too early
        for a file of ``size``."""
        end = min(end, self.layout.object_length(column, size))
        if length < end:
            server, expected = self.server(column), self.layout.object_length(column, size)
            path = server.where(self.key)
            if self._fds[column] is None:
                raise Unavailable(f"{server.name}: {path} is missing")
            raise Unavailable(f"{server.name}: {path} ends before byte {end} of {expected}")

    # --- holes ---

    async def data_range(
        self, offset: int, size: int, strict: bool = True, unread: int = 0
    ) -> tuple[int, int]:
        """ObjectSet.data_range without columns ``unread`` and failing ones: else all may be data.
        Raises Unavailable if only each column itself can tell."""
        while columns := self._telling(unread):
            calls = [(c, self._find_data, (c, offset, size, strict)) for c in columns]
            found = dict(zip(columns, await self.attempt(calls, waits=not strict), strict=True))
            failed = {c: answer for c, answer in found.items() if isinstance(answer, FsError)}
            if not failed:
                return first_range(self.layout, found, offset, size)
            if not self.layout.is_protected:
                raise next(iter(failed.values()))
            unread |= sum(1 << column for column in failed)
        return offset, size

    async def any_data(self, columns: Sequence[int], offset: int, size: int) -> tuple[int, int]:
        """The same of what any of these columns has, right or wrong; of those that fail nothing."""
        calls = [(column, self._find_data, (column, offset, size, False)) for column in columns]
        found = zip(columns, await self.attempt(calls), strict=True)
        read = {column: part for column, part in found if not isinstance(part, FsError)}
        return first_range(self.layout, read, offset, size)

    def _telling(self, unread: int) -> Sequence[int]:
        """Columns that together show where data is; none if too few are left."""
        layout = self.layout
        if not layout.is_protected:
            return range(layout.width)
        usable = [c for c in range(len(layout.servers)) if not unread >> c & 1 and self.is_good(c)]
        chosen = [
            next((copy for copy in layout.copies(column) if copy in usable), None)
            for column in range(layout.width)
        ]
        if is_complete(chosen):
            return chosen
        # Parity alone may be zeros where its row is not; but where that many columns are, all are.
        return usable if layout.parity and len(usable) >= layout.width else []

    def _find_data(
        self, column: int, offset: int, size: int, strict: bool
    ) -> tuple[int, int] | None:
        fd, server = self.descriptor_now(column), self.server(column)
        length = 0 if fd is None else server.stat(self.key, fd).length
        end = self.layout.object_length(column, size)
        if strict:  # what is missing is no hole
            self.require(column, length, end, size)
        return find_data(server, self.key, fd, self.layout, column, offset, min(end, length))

    # --- changing ---

    async def write(self, column: int, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` to the server's page cache, making the object if need be. Raises
        NoSpace, QuotaExceeded, Unavailable."""
        await self._run(column, self.write_now, column, offset, [data])

    def write_now(self, column: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """The same for parts that follow each other."""
        fd = self._made_now(column)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        try:
            self.server(column).write(self.key, fd, data, offset)
        finally:
            self.unsynced.mark(column)

    def punch_now(self, column: int, start: int, end: int) -> None:
        """The range of the object, if there is one, reads as zeros and takes no space on return."""
        fd = self.descriptor_now(column) if start < end else None
        if fd is not None:
            try:
                self.server(column).punch(self.key, fd, start, end - start)
            finally:
                self.unsynced.mark(column)

    async def settle(self, column: int, length: int) -> None:
        """Make, cut or extend the object to this length (0: remove). Raises NoSpace, QuotaExceeded,
        Unavailable."""
        await self._run(column, self.settle_now, column, length)

    def settle_now(self, column: int, length: int) -> Known:
        """``settle``; returns the object's state. The next sync covers it, even another user's
        changes."""
        try:
            if length:
                return self._cut(column, self._made_now(column), length, True)
            self._remove(column)
            return Known(0)
        finally:
            self.unsynced.mark(column)

    def trim_now(self, column: int, length: int) -> Known:
        """The object is no longer than that on return; what is known of it then."""
        fd = self.descriptor_now(column)
        return Known(0) if fd is None else self._cut(column, fd, length, extend=False)

    def _cut(self, column: int, fd: int, length: int, extend: bool) -> Known:
        server = self.server(column)
        status = server.stat(self.key, fd)
        if status.length > length or (extend and status.length < length):
            try:
                server.truncate(self.key, fd, length)
            finally:
                self.unsynced.mark(column)
            status = server.stat(self.key, fd)
        # An empty object is one too many: settling will remove it.
        return Known(status.length, status.blocks, exact=status.length > 0)

    def _remove(self, column: int) -> None:
        server = self.server(column)
        with server.lock_of(self.key[1]):
            server.remove_object(self.key)
            fd, self._fds[column] = self._fds[column], None
        if fd is not None:
            self._retired.append((server, fd))  # somebody may be reading it
        self._lost.pop(column, None)

    async def sync(self, column: int) -> None:
        """Make the object's bytes, length and name (or absence) durable, even another user's
        changes. Raises NoSpace, QuotaExceeded, Unavailable."""
        self.unsynced.mark(column)
        await self._run(column, self.sync_now, column, self.unsynced.get(column), not self._new)

    @property
    def lost(self) -> str:
        """Why synced bytes are not durable; '' as long as none are known to be lost."""
        return next(iter(self._lost.values()), "")

    def sync_now(self, column: int, generation: int, doubt: bool = False) -> None:
        """``sync`` of what was ``unsynced`` in this ``generation``. ``doubt``: the name may be a
        dead process's."""
        server = self.server(column)
        with self._closing.get(column, nullcontext()):
            fd = self.descriptor_now(column)
            if column in self._lost:
                raise Unavailable(f"bytes were lost earlier: {self._lost[column]}")
            if fd is not None:
                try:
                    server.sync_object(self.key, fd)
                except FsError as error:
                    self._lost[column] = str(error)
                    raise
        if doubt:
            server.doubt_names_near(self.key[1])
        server.sync_names_near(self.key[1])
        self.unsynced.done(column, generation)

    # --- calls ---

    async def _run(self, column: int, function: Callable[..., Any], *args: Any) -> Any:
        [answer] = await self.attempt([(column, function, args)])
        if isinstance(answer, FsError):
            raise answer
        return answer

    async def attempt(
        self,
        calls: Sequence[tuple[int, Callable[..., Any], tuple]],
        *,
        abandonable: bool = False,
        inline: bool = False,
        waits: bool = False,
    ) -> list[Any]:
        """Run (column, function, args) in the servers' workers, all at once; results or FsErrors in
        order.

        ``abandonable``: cancellable, because the calls write to memory of their own. ``inline``:
        calls to memory need no worker. ``waits``: see until_answered.
        """
        handed: list[Call] = []
        places: list[int] = []
        answers: list[Any] = [None] * len(calls)
        for place, (column, function, args) in enumerate(calls):
            try:
                server = self.server(column)
                if inline and self.needs_no_worker(column):
                    answers[place] = function(*args)
                    continue
            except FsError as error:
                answers[place] = error
                continue
            places.append(place)
            if self._background:
                function, args = files.at_priority, (self._background, function, *args)
            handed.append((server.workers, function, args))
        if handed:
            if waits:
                await until_answered(workers for workers, _, _ in handed)
            self.in_use(1)
            results = await outcomes(handed, partial(self.in_use, -1), abandonable)
            for place, result in zip(places, results, strict=True):
                if isinstance(result, BaseException) and not isinstance(result, FsError):
                    raise result
                answers[place] = result
        return answers

    def needs_no_worker(self, column: int) -> bool:
        """Whether calls for the column may run on the trio thread. Raises Unavailable."""
        server = self.server(column)
        return server.may_inline and not self._background and not server.hangs

    # --- descriptors ---

    def descriptor_now(self, column: int, create: bool = False) -> int | None:
        """Ours, of the column's object; None if there is none and it is not to be made."""
        fd = self._fds[column]
        if fd is None:
            server = self.server(column)
            with server.lock_of(self.key[1]):
                fd = self._fds[column]
                if fd is None:
                    pin = self.layout.pin
                    fd = self._fds[column] = (
                        server.open_object(self.key, create)
                        if pin is None
                        else server.open_pinned(self.key, pin)
                    )
        return fd

    def _made_now(self, column: int) -> int:
        """Its descriptor; the object is made if there is none."""
        fd = self.descriptor_now(column, create=True)
        assert fd is not None
        return fd

    def in_use(self, change: int) -> None:
        """As long as the sum of changes is more than 0, descriptors are kept."""
        self._busy += change
        if not self._busy and (self._closed or self._retired):
            self._close_unused()

    def close_idle(self) -> int:
        """Close descriptors until needed again, unless in use; how many. Does not block."""
        if self._busy:
            return 0
        unsynced = self.unsynced.snapshot()
        closed = [(column, fd) for column, fd in enumerate(self._fds) if fd is not None]
        for column, fd in closed:
            self._fds[column] = None
            lock = self._closing.setdefault(column, Lock()) if column in unsynced else None
            self.server(column).close_idle(self.key, fd, lock, partial(self._lose, column))
        return len(closed)

    def _lose(self, column: int, reason: str) -> None:
        self._lost.setdefault(column, reason)

    def close(self) -> None:
        """Close descriptors once unused. Nothing is synced. Does not block."""
        self._closed = True
        self.in_use(0)

    def _close_unused(self) -> None:
        for server, fd in self._retired:
            server.close_object(fd, removed=True)
        self._retired.clear()
        if self._closed:
            for column, held in enumerate(self._fds):
                if held is not None:
                    self._fds[column] = None
                    self.server(column).close_object(held)


def columns_of(mask: int) -> Iterable[int]:
    """The columns of a mask, ascending."""
    return (column for column in range(mask.bit_length()) if mask >> column & 1)
