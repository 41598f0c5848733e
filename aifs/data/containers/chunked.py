"""Reading interleaved files: chunk by chunk, from containers that many files share (see
``files``).
"""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple, cast

import trio

from aifs.core.errors import Unavailable
from aifs.core.tasks import run_all
from aifs.data.chunk_codec import PLAIN
from aifs.data.containers.files import ContainerFiles
from aifs.data.objects.cached_reads import WHOLE_BLOCKS_FROM
from aifs.layout.interleaved import CHUNK, HEADER_BYTES, Extent, Interleaved, Location

Chunks = Sequence[Location | None]
Load = Callable[[int], Awaitable[tuple[int, Chunks]]]
"""Where some chunks of a file lie, among them the one asked for: number of the first, places (None:
a hole).
"""

LoadExtents = Callable[[int], Awaitable[tuple[int, int, Sequence[Extent]]]]
"""Some extents of a file, among them that with the byte asked for: where the first begins, its
number, and they.
"""


class _Known(NamedTuple):
    """Chunks of a file that follow each other. Chunk i is bytes ``starts``[i] to ``starts``[i + 1]
    - 1.
    """

    starts: Sequence[int]
    places: Chunks


class _Part(NamedTuple):
    """Bytes of one chunk, to be read: those from ``within`` on, of which the first is byte
    ``offset`` of the file. ``asked``: how many the request is for that they are a part of."""

    place: Location | None
    offset: int
    within: int
    target: memoryview
    asked: int


class ChunkedObjects:
    """One interleaved file, for reading: what ObjectSet are for a striped one. It never
    changes.
    """

    def __init__(
        self,
        containers: ContainerFiles,
        layout: Interleaved,
        load: Load | LoadExtents,
        verify: bool = False,
    ) -> None:
        """``load`` tells extents if the layout is variable. ``verify``: compare all bytes with
        checksums, not just those of chunks that are fetched whole anyway."""
        self._containers = containers
        self._layout = layout
        self._load = load
        self._verify = verify
        self._known = _Known((0,), ())

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """Exactly ``length`` bytes of a file that has ``size``, as ObjectSet.read; what lacks
        is never zeros.
        """
        buffer = self._containers.servers.buffers.take(length)
        waiting = []
        done = 0
        while done < length:
            start, end, place = await self._find(offset + done)
            within = offset + done - start
            target = buffer[done : done + min(end - offset - done, length - done)]
            part = _Part(place, offset + done, within, target, length)
            done += len(target)
            if not self._read_now(part):
                waiting.append(part)
        if len(waiting) == 1:
            await self._read_part(waiting[0])
        elif waiting:
            await run_all(*(partial(self._read_part, part) for part in waiting))
        return buffer

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """The same into ``buffer``, chunk by chunk."""
        for start in range(0, len(buffer), CHUNK):
            part = buffer[start : start + CHUNK]
            part[:] = await self.read(offset + start, len(part), size, True)

    def _read_now(self, part: _Part) -> bool:
        place, offset, within, target, _ = part
        if place is None:
            target[:] = bytes(len(target))
            return True
        if within + len(target) > place.raw:
            start = offset - within
            raise Unavailable(
                f"chunk at {start} in container {place.container} has {place.raw} bytes only"
            )
        if place.codec != PLAIN or self._verify:
            return False
        return self._containers.read_now(
            place.container, place.offset + HEADER_BYTES + within, target
        )

    async def _read_part(self, part: _Part) -> None:
        try:
            await self._read_waiting(part)
        except Unavailable:
            self._known = _Known((0,), ())
            _, _, moved = await self._find(part.offset)
            if moved is None or moved == part.place:
                raise
            await self._read_waiting(
                part._replace(place=moved)
            )  # it was compacted, or replaced, meanwhile

    async def _read_waiting(self, part: _Part) -> None:
        place, _, within, target, _ = part
        assert place is not None  # a hole takes no waiting
        if place.codec == PLAIN and not self._verify and not self._reads_whole(place, part.asked):
            await self._containers.read(
                place.container, place.offset + HEADER_BYTES + within, target
            )
        else:
            target[:] = (await self._containers.read_chunk(place))[within : within + len(target)]

    def _reads_whole(self, place: Location, asked: int) -> bool:
        """Whether to read by way of the whole chunk: other files may share it, and be read, too."""
        if not self._layout.variable:
            return False
        is_waste = asked < min(WHOLE_BLOCKS_FROM, place.raw)
        return not is_waste or self._containers.has_chunk(place)

    async def _find(self, offset: int) -> tuple[int, int, Location | None]:
        """Start and end of the chunk with byte ``offset`` of the file, and where it lies."""
        known = self._known
        if not known.starts[0] <= offset < known.starts[-1]:
            known = self._known = await self._learn(offset)
            if not known.starts[0] <= offset < known.starts[-1]:
                raise Unavailable(f"the chunk with byte {offset} lacks in the list of chunks")
        number = bisect_right(known.starts, offset) - 1
        return known.starts[number], known.starts[number + 1], known.places[number]

    async def _learn(self, offset: int) -> _Known:
        if self._layout.variable:
            # What ``load`` tells depends on the layout, which no type can say.
            start, _, extents = await cast(LoadExtents, self._load)(offset)
            starts = list(accumulate((extent.length for extent in extents), initial=start))
            return _Known(starts, [extent.place for extent in extents])
        chunk = self._layout.chunk
        first, places = await cast(Load, self._load)(offset // chunk)
        return _Known(range(first * chunk, (first + len(places) + 1) * chunk, chunk), places)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As Bytes.data_range, by the chunks."""
        while offset < size:
            await self._find(offset)
            starts, places = self._known
            number = bisect_right(starts, offset) - 1
            while number < len(places) and places[number] is None:
                number += 1
            offset = max(offset, starts[number])
            if number < len(places):
                while number < len(places) and places[number] is not None:
                    number += 1
                return min(offset, size), min(starts[number], size)
            await trio.lowlevel.checkpoint()
        return size, size

    def blocks(self) -> None:
        """Unknown here: the inode's record has it."""

    async def backing(self, size: int) -> None:
        """There is no such file."""

    async def sync(self, spare: int = 0, all_objects: bool = False) -> int:
        """Nothing to do: it was durable before it was recorded."""
        return 0

    def close_idle(self) -> int:
        """Nothing to give up: descriptors are shared."""
        return 0

    def close(self) -> None:
        """The same."""
