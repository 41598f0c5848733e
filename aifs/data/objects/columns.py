"""One object set, column by column: for rebuild, move, scrub and repair, and below protected
objects.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from functools import partial
from typing import Any

from aifs.core import files
from aifs.core.errors import FsError, Unavailable
from aifs.data.objects.coding import code_of
from aifs.data.objects.holes import find_data, first_range
from aifs.data.objects.races import some_of
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.workers import Call, outcomes
from aifs.layout.striped import Striped

Range = tuple[int, int, int]
"""Column, offset in its object, length."""

Exact = Callable[[int, int, int, int], Awaitable[memoryview]]
"""As Columns.exact."""

FetchAll = Callable[[Sequence[Range]], Awaitable[list[memoryview | FsError]]]
"""As Columns.fetch_all."""

_READS = {"open", "read", "reach"}


class Columns:
    """The objects of one striped file (or container: ino 0) as they lie on their servers.

    Everything runs in the servers' workers, at the I/O priority ``background``. ``fetch`` and
    ``reconstruct`` may be cancelled: what a server does for them then ends by itself; the others
    may not while they wait. Nothing here fails over to other columns, except ``reconstruct``, which
    is that.
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
        """Does no I/O; a server that is not registered raises Unavailable when its column is used.
        ``new``: no object of this oid has ever been made, so no earlier process may have left one
        whose name is not durable."""
        self.on_short: Callable[[int], None] = lambda column: None
        """Told of columns whose objects ended where ``reconstruct`` needed bytes."""
        self._servers = servers
        self._layout = layout
        self._key = (ino, oid)
        self._new = new
        self._background = background
        self._used: dict[int, DataServer] = {}
        self._fds: dict[int, int] = {}
        self._retired: list[tuple[DataServer, int]] = []
        self._busy = 0
        self._closed = False

    def server(self, column: int) -> DataServer:
        """Raises Unavailable."""
        server = self._used.get(column)
        if server is None:
            server = self._used[column] = self._servers[self._layout.servers[column]]
        return server

    def is_good(self, column: int) -> bool:
        """Whether the column's server can be expected to answer reads soon."""
        server = self._servers.find(self._layout.servers[column])
        if server is None or server.absent or server.hangs or server.latency.is_late:
            return False
        return not server.health.failing & _READS or server.health.usable

    # --- bytes ---

    async def read(self, column: int, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer`` from the column's object; the bytes read, fewer only at its end, 0 if it
        does not exist.

        Raises Unavailable.
        """
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
        answers = await self.attempt(calls, abandonable=True)
        return [
            a if isinstance(a, FsError) else buffer[:a]
            for a, buffer in zip(answers, buffers, strict=True)
        ]

    def read_now(self, column: int, buffer: memoryview, offset: int) -> int:
        """As ``read``. Blocks."""
        fd = self._descriptor(column, create=False)
        return 0 if fd is None else self.server(column).read(self._key, fd, buffer, offset)

    async def write(self, column: int, offset: int, data: bytes | memoryview) -> None:
        """All of ``data`` is in the server's page cache on return; the object is made if need be.
        Raises NoSpace, QuotaExceeded, Unavailable."""
        await self._run(column, self.write_now, column, offset, [data])

    def write_now(self, column: int, offset: int, parts: Sequence[bytes | memoryview]) -> None:
        """The same for parts that follow each other. Blocks."""
        fd = self._descriptor(column, create=True)
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        self.server(column).write(self._key, fd, data, offset)

    async def reconstruct(
        self,
        column: int,
        offset: int,
        length: int,
        size: int,
        without: frozenset[int] = frozenset(),
        read: Exact | None = None,
    ) -> memoryview:
        """What belongs at ``offset`` of the column's object, told by other columns: up to
        ``length`` bytes, fewer only at the end that the object has where the file has ``size``
        bytes.

        Neither the column itself nor those of ``without`` are read; those whose servers are slow
        only if nothing else is left; ``read``: how, if not by ``exact``. Raises Unavailable, which
        names what lacks.
        """
        layout = self._layout
        length = min(length, layout.object_length(column, size) - offset)
        if length <= 0:
            return memoryview(b"")
        others = layout.copies(column) if layout.replicas > 1 else range(len(layout.servers))
        usable = [other for other in others if other != column and other not in without]
        usable.sort(key=lambda other: not self.is_good(other))
        needed = 1 if layout.replicas > 1 else layout.width
        if not layout.is_protected or len(usable) < needed:
            raise Unavailable(
                f"inode {self._key[0]}, object {self._key[1]}: column {column} (data server {layout.servers[column]}) cannot be "
                f"told: {len(usable)} of {needed} other columns are left"
            )
        held = {
            other: min(max(layout.object_length(other, size) - offset, 0), length)
            for other in usable
        }
        attempts = [
            partial(read or self.exact, other, offset, held[other], size) for other in usable
        ]
        latencies = [self.server(other).latency for other in usable[:needed] if self.is_good(other)]
        answers = await some_of(attempts, needed, self._servers.hedging.delay_s(latencies, length))
        units = {usable[number]: unit for number, unit in answers.items()}
        if layout.replicas > 1:
            return next(iter(units.values()))
        return await self.decode(column, units, length)

    async def decode(self, column: int, units: Mapping[int, memoryview], length: int) -> memoryview:
        """``length`` bytes of a coded column, from as many others as there are data columns, which
        have the same range of theirs; shorter ones count as if zeros followed."""
        target = self._servers.buffers.take(length)
        code = code_of(self._layout.width, self._layout.parity)
        answered = max(units, key=lambda other: (len(units[other]) > 0, self.is_good(other)))
        await self._run(answered, code.reconstruct, dict(sorted(units.items())), column, target)
        return target

    async def exact(self, column: int, offset: int, length: int, size: int) -> memoryview:
        """As ``fetch``, of bytes that the object must have where the file has ``size``. Raises
        Unavailable if it has not.
        """
        if not length:
            return memoryview(b"")
        data = await self.fetch(column, offset, length)
        self.require(column, offset, len(data), length, size)
        return data

    def require(self, column: int, offset: int, found: int, length: int, size: int) -> None:
        """Raises Unavailable, and tells ``on_short``, if there are fewer bytes than there must
        be.
        """
        if found < length:
            self.on_short(column)
            raise self._too_short(column, offset + length, size)

    def _too_short(self, column: int, end: int, size: int) -> Unavailable:
        server, expected = self.server(column), self._layout.object_length(column, size)
        path = server.object_path(*self._key)
        return Unavailable(f"{server.name}: {path} ends before byte {end} of {expected}")

    async def data_range(
        self, offset: int, size: int, without: frozenset[int] = frozenset()
    ) -> tuple[int, int]:
        """As StripedObjects.data_range, as far as it can be told without the columns of
        ``without``, and without those that fail: else all of the file may be data."""
        unusable = set(without)
        while columns := self._telling(unusable):
            calls = [(c, self._find_data, (c, offset, size, True)) for c in columns]
            found = dict(zip(columns, await self.attempt(calls), strict=True))
            failed = [c for c, answer in found.items() if isinstance(answer, FsError)]
            if not failed:
                return first_range(self._layout, found, offset, size)
            unusable.update(failed)
        return offset, size

    async def any_data(self, columns: Sequence[int], offset: int, size: int) -> tuple[int, int]:
        """The same of what any of these columns has, right or wrong; of those that fail nothing."""
        calls = [(column, self._find_data, (column, offset, size, False)) for column in columns]
        found = zip(columns, await self.attempt(calls), strict=True)
        read = {column: part for column, part in found if not isinstance(part, FsError)}
        return first_range(self._layout, read, offset, size)

    def _telling(self, unusable: Set[int]) -> list[int]:
        """Columns that together tell where there is data; none if too few are left."""
        layout = self._layout
        usable = [c for c in range(len(layout.servers)) if c not in unusable and self.is_good(c)]
        chosen = [
            next((copy for copy in layout.copies(column) if copy in usable), None)
            for column in range(layout.width)
        ]
        if None not in chosen:
            return chosen
        # Parity alone may be zeros where its row is not; but where that many columns are, all are.
        return usable if layout.parity and len(usable) >= layout.width else []

    def _find_data(
        self, column: int, offset: int, size: int, strict: bool
    ) -> tuple[int, int] | None:
        fd, server = self._descriptor(column, create=False), self.server(column)
        length = 0 if fd is None else server.stat(self._key, fd).length
        end = self._layout.object_length(column, size)
        if strict and length < end:  # what lacks is no hole
            raise self._too_short(column, end, size)
        return find_data(server, self._key, fd, self._layout, column, offset, min(end, length))

    # --- length and durability ---

    async def settle(self, column: int, length: int) -> int:
        """The object is exactly so long on return, made, cut or extended (0: removed); its blocks
        of 512 bytes.

        Raises NoSpace, QuotaExceeded, Unavailable.
        """
        return await self._run(column, self.settle_now, column, length)

    def settle_now(self, column: int, length: int) -> int:
        """Blocks."""
        server = self.server(column)
        if not length:
            with server.lock_of(self._key[1]):
                server.remove_object(self._key)
                if column in self._fds:
                    self._retired.append(
                        (server, self._fds.pop(column))
                    )  # somebody may be reading it
            return 0
        fd = self._descriptor(column, create=True)
        if server.stat(self._key, fd).length != length:
            server.truncate(self._key, fd, length)
        return server.stat(self._key, fd).blocks

    async def sync(self, column: int) -> None:
        """The object's bytes, length and name (or absence) are durable on return. Raises NoSpace,
        QuotaExceeded, Unavailable."""
        await self._run(column, self.sync_now, column)

    def sync_now(self, column: int) -> None:
        """Blocks."""
        server = self.server(column)
        fd = self._descriptor(column, create=False)
        if fd is not None:
            server.sync_object(self._key, fd)
        if not self._new:
            server.doubt_names_near(self._key[1])
        server.sync_names_near(self._key[1])

    # --- calls ---

    def _descriptor(self, column: int, create: bool) -> int | None:
        fd = self._fds.get(column)
        if fd is None:
            server = self.server(column)
            with server.lock_of(self._key[1]):
                fd = self._fds.get(column)
                if fd is None:
                    fd = server.open_object(self._key, create)
                    if fd is not None:
                        self._fds[column] = fd
        return fd

    async def _run(self, column: int, function: Callable[..., Any], *args: Any) -> Any:
        [answer] = await self.attempt([(column, function, args)])
        if isinstance(answer, FsError):
            raise answer
        return answer

    async def attempt(
        self, calls: Sequence[tuple[int, Callable[..., Any], tuple]], abandonable: bool = False
    ) -> list[Any]:
        """Run (column, function, args) in the workers of the columns' servers, all at once; what
        each returned, or its FsError, in order. ``abandonable``: it may be cancelled, for what the
        calls write to is nobody else's."""
        handed: list[Call] = []
        places: list[int] = []
        answers: list[Any] = [None] * len(calls)
        for place, (column, function, args) in enumerate(calls):
            try:
                server = self.server(column)
                if abandonable and server.may_inline and not self._background:
                    answers[place] = function(*args)  # reads of memory
                    continue
            except FsError as error:
                answers[place] = error
                continue
            places.append(place)
            if self._background:
                handed.append(
                    (server.workers, files.at_priority, (self._background, function, *args))
                )
            else:
                handed.append((server.workers, function, args))
        if handed:
            self.in_use(1)
            results = await outcomes(handed, partial(self.in_use, -1), abandonable)
            for place, result in zip(places, results, strict=True):
                if isinstance(result, BaseException) and not isinstance(result, FsError):
                    raise result
                answers[place] = result
        return answers

    def in_use(self, change: int) -> None:
        """As long as the sum of changes is more than 0, descriptors are kept."""
        self._busy += change
        self._close_unused()

    def close_idle(self) -> int:
        """As that of StripedObjects, of columns that are only read."""
        if self._busy:
            return 0
        fds, self._fds = self._fds, {}
        for column, fd in fds.items():
            self.server(column).close_object(fd)
        return len(fds)

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
            for column, fd in self._fds.items():
                self.server(column).close_object(fd)
            self._fds.clear()
