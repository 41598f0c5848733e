"""Reading interleaved files: chunk by chunk, from containers that many files share (see container_files)."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from aifs.core.errors import Unavailable
from aifs.core.tasks import run_all
from aifs.data.chunk_codec import PLAIN
from aifs.data.container_files import ContainerFiles
from aifs.data.server import Missing
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location

Chunks = Sequence[Location | None]
Load = Callable[[int], Awaitable[tuple[int, Chunks]]]
"""Where some chunks of a file lie, among them the one asked for: number of the first, places (None: a hole)."""


class ChunkedObjects:
    """One interleaved file, for reading: what StripedObjects are for a striped one. It never changes."""

    def __init__(self, containers: ContainerFiles, layout: Interleaved, load: Load) -> None:
        self._containers = containers
        self._layout = layout
        self._load = load
        self._first = 0
        self._chunks: Chunks = ()

    async def read(self, offset: int, length: int, size: int, strict: bool) -> memoryview:
        """Exactly ``length`` bytes of a file that has ``size``, as StripedObjects.read; what lacks is never zeros."""
        buffer = self._containers.servers.buffers.take(length)
        waiting = []
        done = 0
        while done < length:
            index, within = divmod(offset + done, self._layout.chunk)
            part = buffer[done : done + min(self._layout.chunk - within, length - done)]
            done += len(part)
            place = await self._find(index)
            if not self._read_now(place, index, within, part):
                waiting.append((place, index, within, part))
        if len(waiting) == 1:
            await self._read_part(*waiting[0])
        elif waiting:
            await run_all(*(partial(self._read_part, *args) for args in waiting))
        return buffer

    def _read_now(self, place: Location | None, index: int, within: int, part: memoryview) -> bool:
        if place is None:
            part[:] = bytes(len(part))
            return True
        if within + len(part) > place.raw:
            raise Unavailable(f"chunk {index} in container {place.container} has {place.raw} bytes only")
        if place.codec != PLAIN or self._containers.verify:
            return False
        return self._containers.read_now(place.container, place.offset + HEADER_BYTES + within, part)

    async def _read_part(self, place: Location, index: int, within: int, part: memoryview) -> None:
        try:
            await self._read_waiting(place, within, part)
        except Missing:
            self._chunks = ()
            moved = await self._find(index)
            if moved is None or moved == place:
                raise
            await self._read_waiting(moved, within, part)  # it was compacted meanwhile

    async def _read_waiting(self, place: Location, within: int, part: memoryview) -> None:
        if place.codec == PLAIN and not self._containers.verify:
            await self._containers.read(place.container, place.offset + HEADER_BYTES + within, part)
        else:
            part[:] = (await self._containers.read_chunk(place))[within : within + len(part)]

    async def _find(self, index: int) -> Location | None:
        if not 0 <= index - self._first < len(self._chunks):
            self._first, self._chunks = await self._load(index)
            if index - self._first >= len(self._chunks):
                raise Unavailable(f"chunk {index} lacks in the list of chunks")
        return self._chunks[index - self._first]

    async def is_hole(self, offset: int) -> bool:
        """Whether the whole chunk that byte ``offset`` lies in is a hole."""
        return await self._find(offset // self._layout.chunk) is None

    def blocks(self) -> None:
        """Unknown here: the inode's record has it."""

    async def sync(self) -> None:
        """Nothing to do: it was durable before it was recorded."""

    def close(self) -> None:
        """Nothing to give up: descriptors are shared."""
