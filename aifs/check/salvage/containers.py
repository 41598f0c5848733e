"""Interleaved files, told by what lies in containers alone: headers of chunks, records of files,
recipes.

A file with a recipe is an extent list: the recipe says which chunks it is made of, which are its
own, or shared ones that lie anywhere.
"""

from dataclasses import dataclass, field

from aifs.check.findings import Progress
from aifs.check.salvage.inventory import Part, Placed, Saved, place
from aifs.check.salvage.striped import Incomplete, best_label
from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.digests import HASHED, digests_of
from aifs.data.containers import chunk_codec
from aifs.data.containers.chunk_codec import RECIPE, RECORDS, FileRecord, Recipe
from aifs.data.containers.files import ContainerFiles
from aifs.data.containers.readers import Entry
from aifs.data.containers.scan import ContainerScan, Found
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import (
    HEADER_BYTES,
    Extent,
    Interleaved,
    Location,
    padded,
    redundancy_of,
)
from aifs.layout.striped import Striped

_WINDOW = 1 << 20
_MAGIC = b"AIFC"
_HOLE = digests_of(bytes(HASHED))


@dataclass(slots=True)
class _Generation:
    """What was found of one generation of a file. ``places``: of each chunk, by number, where
    copies of it lie.
    """

    record: FileRecord | None = None
    places: dict[int, list[Location]] = field(default_factory=dict)

    @property
    def has_recipe(self) -> bool:
        return any(places[0].codec == RECIPE for places in self.places.values())


class SavedContainers:
    """Used from one trio thread. ``problems``: what could not be told of containers."""

    def __init__(self, servers: Servers, sets: dict[int, list[Part]], progress: Progress) -> None:
        """``sets``: the objects of each container."""
        self._servers = servers
        self._sets = sets
        self._progress = progress
        self._entries: dict[int, Entry] = {}
        self._placed: dict[int, Placed] = {}
        self.files = ContainerFiles(servers, self._find)
        self.files.on_damage = self._damaged
        self.generations: dict[int, dict[int, _Generation]] = {}  # by ino and oid
        self._shared: dict[
            bytes, list[Location]
        ] = {}  # by digest: where copies of a shared chunk lie
        self._good: dict[bytes, Location] = {}  # one that is not damaged
        self.problems: list[tuple[int, str]] = []

    async def _find(self, container: int) -> Entry | None:
        return self._entries.get(container)

    def _damaged(self, container: int, _: int, column: int) -> None:
        layout, length, lost = self._entries[container]
        if layout.survives(lost | 1 << column):
            self._entries[container] = Entry(layout, length, lost | 1 << column)
            self.files.moved(container)

    # --- what lies in them ---

    async def scan(self) -> None:
        """Go through the headers of all containers."""
        for number, (container, parts) in enumerate(sorted(self._sets.items())):
            self._progress("containers", number, len(self._sets))
            try:
                placed = await self._place(container, parts)
            except Incomplete as error:
                self.problems.append((container, str(error)))
                continue
            length = _whole_length(placed)
            self._placed[container] = placed
            self._entries[container] = Entry(placed.layout, length, _shorter(placed, length))
            await self._scan(container, placed.layout, length)

    async def _place(self, container: int, parts: list[Part]) -> Placed:
        label = best_label(parts)
        layout = label.layout if label is not None else await self._layout_inside(container, parts)
        if layout is None:
            raise Incomplete("nothing says how it is laid out")
        placed = place(parts, layout, self._servers)
        missing = sum(
            1 << column for column in range(len(layout.servers)) if column not in placed.parts
        )
        if not layout.survives(missing):
            raise Incomplete(
                f"{missing.bit_count()} of its {len(layout.servers)} columns are missing, which is too many"
            )
        return placed

    async def _layout_inside(self, container: int, parts: list[Part]) -> Striped | None:
        """As the first record in it says, if the column that holds it is there."""
        for part in parts:
            server = self._servers[part.server]
            try:
                layout = await self._servers.run(server, _read_layout, server, container)
            except FsError:
                continue
            if layout is not None:
                return layout
        return None

    async def _scan(self, container: int, layout: Striped, length: int) -> None:
        offset: int | None = 0
        while offset is not None and offset < length:
            scan = ContainerScan(self.files, container, layout, length, offset)
            try:
                while found := await scan.following():
                    for chunk in found:
                        self._take(container, layout, chunk)
                return
            except Unavailable as error:
                offset = await self._next_header(container, length, scan.offset + 1)
                if offset is not None:
                    self.problems.append(
                        (container, f"damaged from byte {scan.offset} to {offset}: {error}")
                    )
        # Behind the last header may lie what an append that did not end has left.

    async def _next_header(self, container: int, length: int, start: int) -> int | None:
        while start + HEADER_BYTES <= length:
            window = memoryview(bytearray(min(_WINDOW, length - start)))
            try:
                await self.files.read(container, start, window)
            except Unavailable:
                start += len(window)
                continue
            at = bytes(window).find(_MAGIC)
            while at >= 0 and at + HEADER_BYTES <= len(window):
                try:
                    chunk_codec.unpack_header(window[at : at + HEADER_BYTES])
                    return start + at
                except ValueError:
                    at = bytes(window).find(_MAGIC, at + 1)
            if start + len(window) >= length:
                return None
            start += len(window) - HEADER_BYTES + 1
        return None

    def _take(self, container: int, layout: Striped, chunk: Found) -> None:
        header = chunk.header
        place = Location(
            layout.servers[0],
            container,
            chunk.offset,
            header.stored,
            header.raw,
            header.codec,
            header.digest,
        )
        if not header.ino:
            self._shared.setdefault(header.digest, []).append(place)
            return
        generation = self.generations.setdefault(header.ino, {}).setdefault(
            header.oid, _Generation()
        )
        if generation.record is None or (header.codec == RECIPE and chunk.record is not None):
            generation.record = chunk.record
        generation.places.setdefault(header.index, []).append(place)

    # --- files ---

    async def piece_together(self, ino: int, oid: int, verify: bool) -> Saved:
        """The file of this generation; ``verify``: all its bytes are read. Raises Incomplete."""
        generation = self.generations[ino][oid]
        record = generation.record
        if record is None:
            raise Incomplete("its chunks are there, but no record says what file they are of")
        if len(generation.places) != record.count:
            raise Incomplete(
                f"{record.count - len(generation.places)} of its {record.count} chunks are missing"
            )
        saved = Saved(
            ino,
            oid,
            record.size,
            record.mode,
            record.uid,
            record.gid,
            record.mtime_ns,
            record.path,
            Interleaved(record.chunk, variable=generation.has_recipe),
        )
        if generation.has_recipe:
            saved.extents = await self._extents(generation, record.size, verify)
            saved.blocks = sum(
                -(-extent.length // 512) for extent in saved.extents if extent.place is not None
            )
        else:
            await self._chunks(saved, generation, verify)
        return saved

    async def _chunks(self, saved: Saved, generation: _Generation, verify: bool) -> None:
        chunks: list[Location | None] = [None] * saved.layout.count(saved.size)
        digests = [_HOLE] * len(chunks)
        for index, places in sorted(generation.places.items()):
            if index >= len(chunks):
                raise Incomplete(f"chunk {index} lies behind its end")
            chunks[index] = await self._whole(places, verify)
            digests[index] = chunks[index].digest
        saved.chunks = chunks
        saved.blocks = sum(-(-place.raw // 512) for place in chunks if place is not None)
        saved.digests = b"".join(digests)

    async def _extents(self, generation: _Generation, size: int, verify: bool) -> list[Extent]:
        """All extents of a file, and its recipes behind them, of which every one is there."""
        extents: dict[int, Extent] = {}
        recipes: dict[int, Extent] = {}
        count = 0
        for index, places in generation.places.items():
            if places[0].codec != RECIPE:
                continue
            place = await self._whole(places, verify=True)
            recipe = await self._recipe(place)
            recipes[index], count = Extent(0, place), recipe.count
            for number, (length, digest) in enumerate(recipe.extents, recipe.first):
                extents[number] = await self._extent(generation, number, length, digest, verify)
        whole = [extents[number] for number in sorted(extents)]
        if len(whole) != count or sum(extent.length for extent in whole) != size:
            raise Incomplete(f"its recipes tell {len(whole)} of its {count} extents")
        return [*whole, *(recipes[index] for index in sorted(recipes))]

    async def _recipe(self, place: Location) -> Recipe:
        memory = memoryview(bytearray(HEADER_BYTES + place.stored))
        try:
            await self.files.read_stored(place, memory)
            return chunk_codec.unpack_recipe(memory[HEADER_BYTES:])
        except (FsError, ValueError) as error:
            raise Incomplete(str(error)) from None

    async def _extent(
        self, generation: _Generation, number: int, length: int, digest: bytes, verify: bool
    ) -> Extent:
        if not digest:
            return Extent(length)
        own = generation.places.get(number)
        if own is not None:
            return Extent(length, await self._whole(own, verify))
        if digest not in self._good:
            places = [place for place in self._shared.get(digest, []) if place.raw == length]
            if not places:
                raise Incomplete(f"a shared chunk, extent {number} of it, is nowhere")
            places.sort(key=lambda place: redundancy_of(self.layout_of(place.container)).tolerates)
            place = await self._whole(places, verify)
            self._good.setdefault(digest, place)  # the same for all files, whoever was faster
        return Extent(length, self._good[digest], shared=True)

    async def _whole(self, places: list[Location], verify: bool) -> Location:
        """The last one that is not damaged."""
        error = ""
        for copy in reversed(places):
            if not verify:
                return copy
            try:
                await self.files.read_stored(
                    copy, memoryview(bytearray(HEADER_BYTES + copy.stored))
                )
                return copy
            except FsError as raised:
                error = str(raised)
        raise Incomplete(error)

    def layout_of(self, container: int) -> Striped:
        return self._entries[container].layout

    def lost(self, container: int, end: int) -> int:
        """The mask of columns that must not be read, if the last chunk in use ends there."""
        layout, length, lost = self._entries[container]
        placed = self._placed[container]
        return lost & ~_shorter(placed, length) | _shorter(placed, padded(layout, end))


def _whole_length(placed: Placed) -> int:
    """How far so many columns reach as the bytes need."""
    layout, parts = placed
    lengths = sorted((part.length for part in parts.values()), reverse=True)
    if not layout.parity:
        return lengths[0]
    rows = lengths[layout.width - 1] // layout.unit if len(lengths) >= layout.width else 0
    return rows * layout.row


def _shorter(placed: Placed, length: int) -> int:
    layout, parts = placed
    columns = range(len(layout.servers))
    held = {column: parts[column].length if column in parts else 0 for column in columns}
    return sum(
        1 << column for column in columns if held[column] < layout.object_length(column, length)
    )


def _read_layout(server: DataServer, container: int) -> Striped | None:
    """The layout that the object's first bytes tell, if they are the first of its container.
    Blocks.
    """
    key = (0, container)
    fd = server.open_object(key, create=False, write=False)
    if fd is None:
        return None
    try:
        head = memoryview(bytearray(_WINDOW))
        head = head[: server.read(key, fd, head, 0)]
        header = chunk_codec.unpack_header(head[:HEADER_BYTES])
        if header.codec != RECORDS or header.oid != container:
            return None
        return chunk_codec.unpack_records(head[HEADER_BYTES : HEADER_BYTES + header.stored])[0]
    except ValueError:
        return None
    finally:
        server.close_object(fd)
