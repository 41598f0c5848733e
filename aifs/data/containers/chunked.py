"""Reading interleaved files by chunks, from shared containers (see ``files``)."""

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import trio

from aifs.core.errors import Unavailable
from aifs.core.tasks import run_all
from aifs.data.chunk_codec import PLAIN
from aifs.data.containers.files import ContainerFiles
from aifs.data.objects.cached_reads import WHOLE_BLOCKS_FROM
from aifs.layout.interleaved import CHUNK, HEADER_BYTES, Extent, Location

Load = Callable[[int], Awaitable[tuple[int, Sequence[Extent]]]]
"""Neighbouring extents of a file with the byte asked for, and the first one's start."""


class _Known(NamedTuple):
    """Neighbouring extents; extent i has bytes ``starts``[i] to ``starts``[i + 1] - 1."""

    starts: Sequence[int]
    extents: Sequence[Extent]


_NOTHING = _Known((0,), ())


class _Part(NamedTuple):
    """Bytes to read of one chunk, from ``within`` on: byte ``offset`` of the file. ``asked``: the
    whole request's."""

    extent: Extent
    offset: int
    within: int
    target: memoryview
    asked: int


class ChunkedObjects:
    """An interleaved file, for reading, like ObjectSet for a striped one. It never changes."""

    def __init__(
        self,
        containers: ContainerFiles,
        load: Load,
        verify: bool = False,
    ) -> None:
        """``verify``: compare all bytes with checksums, not only chunks fetched whole."""
        self._containers = containers
        self._load = load
        self._verify = verify
        self._known = self._before = _NOTHING
        """The extents that were looked up last, and those before them: reads may go to and fro."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """Exactly ``length`` bytes of a file that has ``size``, as ObjectSet.read, but missing
        bytes are never zeros."""
        buffer = self._containers.servers.buffers.take(length)
        waiting = []
        done = 0
        while done < length:
            start, end, extent = await self._find(offset + done)
            within = offset + done - start
            target = buffer[done : done + min(end - offset - done, length - done)]
            part = _Part(extent, offset + done, within, target, length)
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
        (_, place, _), offset, within, target, _ = part
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
            self._known = self._before = _NOTHING
            _, _, moved = await self._find(part.offset)
            if moved.place is None or moved == part.extent:
                raise
            # It was compacted, or replaced, meanwhile.
            await self._read_waiting(part._replace(extent=moved))

    async def _read_waiting(self, part: _Part) -> None:
        (_, place, is_shared), _, within, target, asked = part
        assert place is not None  # a hole takes no waiting
        is_whole = self._verify or (is_shared and self._reads_whole(place, asked))
        if place.codec == PLAIN and not is_whole:
            await self._containers.read(
                place.container, place.offset + HEADER_BYTES + within, target
            )
        else:
            target[:] = (await self._containers.read_chunk(place))[within : within + len(target)]

    def _reads_whole(self, place: Location, asked: int) -> bool:
        """Whether to read a shared chunk as a whole: other files may need it."""
        is_waste = asked < min(WHOLE_BLOCKS_FROM, place.raw)
        return not is_waste or self._containers.has_chunk(place)

    async def _find(self, offset: int) -> tuple[int, int, Extent]:
        """Start and end of the extent with byte ``offset``, and it."""
        known = self._known
        if not known.starts[0] <= offset < known.starts[-1]:
            known, self._before = self._before, known
            if not known.starts[0] <= offset < known.starts[-1]:
                known = await self._learn(offset)
            self._known = known
            if not known.starts[0] <= offset < known.starts[-1]:
                raise Unavailable(f"the chunk list has nothing for byte {offset}")
        number = bisect_right(known.starts, offset) - 1
        return known.starts[number], known.starts[number + 1], known.extents[number]

    async def _learn(self, offset: int) -> _Known:
        start, extents = await self._load(offset)
        return _Known(list(accumulate([e.length for e in extents], initial=start)), extents)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As Bytes.data_range, by the chunks."""
        while offset < size:
            await self._find(offset)
            starts, extents = self._known
            number = bisect_right(starts, offset) - 1
            while number < len(extents) and extents[number].place is None:
                number += 1
            offset = max(offset, starts[number])
            if number < len(extents):
                while number < len(extents) and extents[number].place is not None:
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
