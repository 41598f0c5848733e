"""Containers without a filesystem: writer, reader, and a catalogue in memory."""

import tempfile
from contextlib import closing, contextmanager
from itertools import accumulate, count
from pathlib import Path

import trio

from aifs.burst.making import MakingTools
from aifs.burst.transfer import Limiter, Mover
from aifs.core.budget import Budget
from aifs.data.chunk_codec import digest_of
from aifs.data.containers import pieces
from aifs.data.containers.appending import append
from aifs.data.containers.chunked import ChunkedObjects
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.data.containers.pieces import FileSource, OpenCopies
from aifs.data.containers.writer import ContainerWriter
from aifs.data.servers import Servers
from aifs.layout.interleaved import (
    HEADER_BYTES,
    Extent,
    Interleaved,
    Location,
    container_layout,
    named,
    padded,
)
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.layout.striped import Striped
from tests.support.copies import Copies

CONTAINER = 20 << 20
KINDS = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}


def slots_on(servers: tuple[int, ...], redundancy: Redundancy) -> tuple[Striped, ...]:
    """One that begins with each server."""
    count = redundancy.least_servers
    rings = [servers[start:] + servers[:start] for start in range(len(servers))]
    return tuple(container_layout(ring[:count], redundancy) for ring in rings)


class Shelf:
    """Writer, reader, and a catalogue in memory. ``lists``: chunks by oid, those of the file's
    own."""

    def __init__(
        self,
        servers: Servers,
        directory: Path,
        verify: bool = False,
        redundancy: Redundancy = PLAIN,
    ) -> None:
        self.servers = servers
        self.directory = directory
        self.slots = slots_on(tuple(servers), redundancy)
        self.verify = verify
        self.damaged = set()
        self.files = ContainerFiles(
            servers, self.find, lambda oid, ino, column: self.damaged.add((oid, column))
        )
        self.budget = Budget(64 << 20)
        tools = MakingTools(servers, Mover(self.budget, Limiter(0), "none"), self.files)
        self.carry_out = lambda value, cancelled: append(value, tools, cancelled)
        self._how = self.slots, self.carry_out
        self.writer = ContainerWriter(self, CONTAINER)
        self.extents: dict[int, list[Extent]] = {}
        self.shared: dict[bytes, Location] = {}
        self.table: dict[int, Striped] = {}
        self.ends: dict[int, int] = {}
        self.lost: dict[int, int] = {}
        self.sealed = set()
        self._ids = count(1000)

    def go_on(self, other: "Shelf") -> None:
        """With all that is known there."""
        self.extents, self.table, self.ends = other.extents, other.table, other.ends
        self.lost, self._ids = other.lost, other._ids

    @property
    def lists(self) -> dict[int, list[Location | None]]:
        """Where the files' own chunks lie."""
        return {
            oid: [None if extent.shared else extent.place for extent in extents]
            for oid, extents in self.extents.items()
        }

    @property
    def server_of(self) -> dict[int, int]:
        """Of plain containers."""
        return {container: layout.servers[0] for container, layout in self.table.items()}

    async def find(self, container: int) -> ContainerEntry | None:
        await trio.lowlevel.checkpoint()
        if container not in self.table:
            return None
        return ContainerEntry(
            self.table[container], self.ends.get(container, 0), self.lost.get(container, 0)
        )

    async def new(self, layout: Striped) -> int:
        await trio.lowlevel.checkpoint()
        container = next(self._ids)
        self.table[container] = layout
        return container

    async def seal(self, container: int) -> None:
        self.sealed.add(container)

    def grows(self, layout: Striped) -> bool:
        return True

    def changed(self, container: int, layout: Striped) -> None:
        self.files.changed(container, layout)

    def record(self, places, lost: dict[int, int]) -> None:
        """What the transaction does that records an append."""
        for place in filter(None, places):
            end = padded(self.table[place.container], place.offset + HEADER_BYTES + place.stored)
            self.ends[place.container] = max(self.ends.get(place.container, 0), end)
        for container, columns in lost.items():
            self.lost[container] = self.lost.get(container, 0) | columns

    @contextmanager
    def sources(self, contents: dict[int, bytes], chunk: int = 65536, level: int = 0):
        copies = Copies(self.servers)
        try:
            yield [
                FileSource(
                    oid + 1, oid, len(content), copies(content), Interleaved(chunk), level, True
                )
                for oid, content in contents.items()
            ]
        finally:
            copies.close()

    async def store(
        self, contents: dict[int, bytes], chunk: int = 65536, level: int = 0, keep: bool = True
    ) -> list:
        with self.sources(contents, chunk, level) as sources:
            with closing(OpenCopies(self.servers)) as copies:
                cut = [pieces.cut(source, copies) for source in sources]
            whole = [piece for file in cut for piece in file if piece is not None]
            async with self.writer.append(whole, *self._how) as (places, lost):
                following = iter(places)
                if keep:
                    self.record(places, lost)
                for source, file in zip(sources, cut, strict=True):
                    extents = [
                        Extent(source.layout.length(number, source.size), piece and next(following))
                        for number, piece in enumerate(file)
                    ]
                    if keep:
                        self.extents[source.oid] = extents
            return places

    async def store_extents(
        self, contents: dict[int, bytes], chunk: int = 65536, level: int = 0
    ) -> None:
        """The same as files of a group: cut at borders that differ from file to file, without
        zeros, and equal chunks are stored once, except each fifth, which is the file's own."""
        with self.sources(contents, chunk, level) as sources:
            lists: dict[int, list[Extent]] = {}
            wanted: dict[tuple, pieces.HashedPiece] = {}
            for source in sources:
                data, start, some = contents[source.oid], 0, []
                while start < len(data):
                    end = min(len(data), start + chunk - len(some) % 3 * (chunk // 5))
                    part = data[start:end]
                    if not part.strip(b"\0"):
                        some.append(Extent(len(part)))
                    else:
                        own = (source.oid, len(some)) if len(some) % 5 == 4 else (0, 0)
                        piece = pieces.HashedPiece(
                            source.origin,
                            source.ino,
                            start,
                            len(part),
                            digest_of(part),
                            level,
                            *own,
                        )
                        some.append(named(len(part), piece.digest))
                        wanted.setdefault((piece.digest, *own), piece)
                        some[-1] = some[-1]._replace(shared=not own[0])
                    start = end
                lists[source.oid] = some
            new = {
                key: piece for key, piece in wanted.items() if key[1] or key[0] not in self.shared
            }
            async with self.writer.append(list(new.values()), *self._how) as (places, lost):
                self.record(places, lost)
                found = dict(zip(new, places, strict=True))
                self.shared |= {key[0]: place for key, place in found.items() if not key[1]}
            for source in sources:
                placed = []
                for index, extent in enumerate(lists[source.oid]):
                    key = (extent.digest, source.oid, index)
                    place = self.shared[extent.digest] if extent.shared else found.get(key)
                    placed.append(extent._replace(place=place))
                self.extents[source.oid] = placed

    def objects(self, oid: int) -> ChunkedObjects:
        async def load(offset: int):
            await trio.lowlevel.checkpoint()
            starts = list(accumulate((extent.length for extent in self.extents[oid]), initial=0))
            first = max(number for number in range(0, len(starts), 5) if starts[number] <= offset)
            return starts[first], self.extents[oid][first : first + 5]

        return ChunkedObjects(self.files, load, self.verify)

    async def content(self, oid: int, size: int) -> bytes:
        return bytes(await self.objects(oid).read(0, size, size, True)) if size else b""

    def close(self) -> None:
        self.files.close()


@contextmanager
def shelf(servers: Servers, tmp_path: Path, verify: bool = False, redundancy: Redundancy = PLAIN):
    directory = Path(tempfile.mkdtemp(dir=tmp_path))
    made = Shelf(servers, directory, verify, redundancy)
    try:
        yield made
    finally:
        made.close()


def content(seed: int, size: int) -> bytes:
    """Half of it can be compressed, a part is zeros."""
    block = bytes((seed * 7 + index) % 251 for index in range(997))
    data = bytearray((block * (size // 997 + 1))[:size])
    for start in range((seed % 5) * 65536, size, 5 * 65536):
        if seed % 3:
            data[start : start + 65536] = bytes(len(data[start : start + 65536]))
    return bytes(data)
