"""The check of containers on the data servers: their objects against the table, and the files that
lost bytes.
"""

from bisect import bisect_left
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from aifs.check.findings import Problem
from aifs.check.scan import for_each
from aifs.core.errors import FsError
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import StoredObject
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.meta import chunk_lists, chunks, keys, shared
from aifs.meta.chunks import Container
from aifs.meta.degraded import find_unread, put_unread
from aifs.meta.kv import Engine


class ContainerObjects:
    """Reads the table as it is when ``expect`` is called, which is after recovery and repairs."""

    def __init__(
        self, engine: Engine, servers: Servers, user_of: Callable[[int], int | None]
    ) -> None:
        """``user_of``: object id to the inode that has it."""
        self._engine = engine
        self._view = engine.view
        self._servers = servers
        self._user_of = user_of
        self._table: dict[int, _Expected] = {}
        self._ends: dict[int, _Cut] = {}
        self._shared: dict[bytes, Location] = {}  # by digest, of those that are lost
        self.problems: list[Problem] = []

    async def expect(self) -> None:
        """Read the table; before the servers are listed."""
        await for_each(self._engine, *keys.all_of(b"t"), self._remember, lambda count: None)

    async def _remember(self, key: bytes, value: bytes) -> None:
        number = keys.number(key)
        if len(key) != len(keys.container(0)):
            return  # named by the check of the records
        try:
            self._table[number] = _Expected(
                chunks.decode_container(value), await self._view(find_unread, number)
            )
        except FsError:
            pass  # named by the check of the records

    def matches(self, server: DataServer, found: StoredObject) -> bool:
        """Whether an object with inode number 0 is a container's; takes note of its length."""
        expected = self._table.get(found.oid)
        if found.ino or expected is None or server.id not in expected.record.layout.servers:
            return False
        expected.lengths[expected.record.layout.servers.index(server.id)] = found.length
        return True

    async def conclude(self, listed: Collection[int]) -> None:
        """Name what is missing or short on the servers ``listed``, and the files that have lost
        bytes.
        """
        for number, expected in self._table.items():
            self._judge(number, expected, listed)
        if self._ends:
            await for_each(self._engine, *keys.all_of(b"h"), self._lost_shared, lambda count: None)
            await for_each(self._engine, *keys.all_of(b"l"), self._losses, lambda count: None)

    def _judge(self, number: int, expected: "_Expected", listed: Collection[int]) -> None:
        wrong: list[tuple[str, int, str]] = []
        for column, name in enumerate(expected.record.layout.servers):
            needed = expected.needed(column)
            length = expected.lengths.get(column)
            if length is None and needed and name in listed:
                expected.lengths[column] = 0
                wrong.append(("missing-container", column, "is missing"))
            elif length is not None and length < needed:
                wrong.append(("short-container", column, f"has {length} of {needed} bytes"))
        if not wrong:
            return
        readable = expected.readable()
        for kind, column, detail in wrong:
            server = self._servers[expected.record.layout.servers[column]]
            path, fix = server.where((0, number)), None
            if readable == expected.record.length:
                kind, fix = "degraded", partial(put_unread, oid=number, ino=0, mask=1 << column)
            else:
                self._ends[number] = _Cut(readable, path)
            self.problems.append(Problem(kind, path, f"{server.name}: {detail}", fix, where=path))

    async def _lost_shared(self, key: bytes, value: bytes) -> None:
        digest = keys.shared_digest(key)
        try:
            place = shared.decode_shared(digest, value).place
        except FsError:
            return  # named already
        if self._is_cut(place):
            self._shared[digest] = place

    async def _losses(self, key: bytes, value: bytes) -> None:
        oid, first = keys.chunk_list_parts(key)
        ino = self._user_of(oid)
        is_extents = chunk_lists.is_extents(value)
        try:
            if ino is None:
                return
            own = any(share[0] in self._ends for share in chunk_lists.decode_shares(value))
            if not own and not (is_extents and self._shared):
                return
            if is_extents:
                extents = chunk_lists.decode_extents(value)[1]
                places = [self._shared.get(e.digest) if e.shared else e.place for e in extents]
            else:
                places = chunk_lists.decode_chunks(value)
        except FsError:
            return  # named already
        lost = [
            (index, self._ends[place.container].path)
            for index, place in enumerate(places, first)
            if place is not None and self._is_cut(place)
        ]
        if lost:
            first, last = lost[0][0], lost[-1][0]
            numbers = (
                f"chunk {first}" if len(lost) == 1 else f"{len(lost)} chunks from {first} to {last}"
            )
            self.problems.append(
                Problem("lost-chunk", ino, f"inode {ino}: {numbers} lay in {lost[0][1]}")
            )

    def _is_cut(self, place: Location) -> bool:
        cut = self._ends.get(place.container)
        return cut is not None and place.offset + HEADER_BYTES + place.stored > cut.length


class _Expected:
    """A container. ``unread``: mask of columns that nobody reads; ``lengths``: of the objects that
    are there, by column.
    """

    def __init__(self, record: Container, unread: int) -> None:
        self.record = record
        self.unread = unread
        self.lengths: dict[int, int] = {}

    def needed(self, column: int, size: int | None = None) -> int:
        """How long a column must be for the first ``size`` bytes to be read from it."""
        if self.unread >> column & 1:
            return 0
        return self.record.layout.object_length(
            column, self.record.length if size is None else size
        )

    def readable(self) -> int:
        """How many of the first bytes can be told by what is there. Columns of which nothing is
        known count as whole.
        """

        def is_lost(size: int) -> bool:
            missing = self.unread
            for column, length in self.lengths.items():
                missing |= (length < self.needed(column, size)) << column
            return not self.record.layout.survives(missing)

        return bisect_left(range(self.record.length + 1), True, lo=1, key=is_lost) - 1


class _Cut(NamedTuple):
    """A container of which only the first ``length`` bytes can be told."""

    length: int
    path: str
