"""The check of containers on the data servers: their objects against the table, and the files that lost bytes."""

from collections.abc import Callable, Collection
from typing import NamedTuple

from aifs.check.findings import Problem
from aifs.check.scan import for_each
from aifs.core.errors import FsError
from aifs.data.naming import StoredObject
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.meta import chunks, keys
from aifs.meta.chunks import Container
from aifs.meta.kv import Engine, ReadTransaction


class ContainerObjects:
    """Reads the table as it is when ``expect`` is called, which is after recovery and repairs."""

    def __init__(self, engine: Engine, servers: Servers, user_of: Callable[[int], int | None]) -> None:
        """``user_of``: object id to the inode that has it."""
        self._engine = engine
        self._servers = servers
        self._user_of = user_of
        self._table: dict[int, Container] = {}
        self._ends: dict[int, _Cut] = {}
        self.problems: list[Problem] = []

    async def expect(self) -> None:
        """Read the table; before the servers are listed."""
        await for_each(self._engine, *keys.all_of(b"t"), self._remember, lambda count: None)

    def _remember(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        try:
            self._table[keys.number(key)] = chunks.decode_container(value)
        except FsError:
            pass  # named by the check of the records

    def matches(self, server: DataServer, found: StoredObject) -> bool:
        """Whether an object with inode number 0 is a container; takes note of its length."""
        record = self._table.get(found.oid)
        if found.ino or record is None or record.server != server.id:
            return False
        del self._table[found.oid]
        if found.length < record.length:
            self._ends[found.oid] = _Cut(found.length, found.path)
            detail = f"{server.name}: has {found.length} of {record.length} bytes"
            self.problems.append(Problem("short-container", found.path, detail, where=found.path))
        return True

    async def conclude(self, listed: Collection[int]) -> None:
        """Name the containers that the servers ``listed`` do not have, and the files that have lost bytes."""
        for number, record in self._table.items():
            if record.length and record.server in listed:
                server = self._servers[record.server]
                path = server.object_path(0, number)
                self._ends[number] = _Cut(0, path)
                self.problems.append(Problem("missing-container", path, f"{server.name}: is missing", where=path))
        if self._ends:
            await for_each(self._engine, *keys.all_of(b"l"), self._losses, lambda count: None)

    def _losses(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        oid, first = keys.chunk_list_parts(key)
        ino = self._user_of(oid)
        try:
            if ino is None or not any(share[0] in self._ends for share in chunks.decode_shares(value)):
                return
            places = chunks.decode_chunks(value)
        except FsError:
            return  # named already
        lost = [
            (index, self._ends[place.container].path)
            for index, place in enumerate(places, first)
            if place is not None and self._is_cut(place)
        ]
        if lost:
            first, last = lost[0][0], lost[-1][0]
            numbers = f"chunk {first}" if len(lost) == 1 else f"{len(lost)} chunks from {first} to {last}"
            self.problems.append(Problem("lost-chunk", ino, f"inode {ino}: {numbers} lay in {lost[0][1]}"))

    def _is_cut(self, place: Location) -> bool:
        cut = self._ends.get(place.container)
        return cut is not None and place.offset + HEADER_BYTES + place.stored > cut.length


class _Cut(NamedTuple):
    """A container that is shorter than it was."""

    length: int
    path: str
