"""Whole chunks in memory: those of extent lists, which files share, and those that had to be
unpacked or compared.

Files that share a chunk are different files to the kernel: its page cache helps the readers of each
one only. So whoever reads a part of such a chunk has the whole of it fetched, unpacked and
compared, once for all who ask meanwhile, and it stays for those who come later; where there is no
memory for one, those get it who wait for it already.

Chunks go in the order in which they were fetched; how many are kept: see ``keeping``.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import trio

from aifs.core.budget import Budget
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.reading.keeping import Keeping
from aifs.layout.interleaved import Location

_SHARE = 4
_SMALLEST = 64 << 10  # buffers come in sizes 4 times larger than the one before

Key = tuple[int, int]
"""Container, and offset in it: what lies there is never changed."""

Load = Callable[[Location, memoryview], Awaitable[None]]
"""Fill memory with the file's bytes of a chunk. Raises Missing, Unavailable."""


class _Load:
    """A chunk on its way. ``data``: None until it is there, and if it could not be had."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self.data: memoryview | None = None


class _Chunk(NamedTuple):
    """``fetched``: bytes that had been fetched when it was kept."""

    data: memoryview
    fetched: int


class ChunkCache:
    """Used from one trio thread."""

    def __init__(self, budget: Budget) -> None:
        self._buffers = BudgetedBuffers(budget)
        self._keeping = Keeping(budget.total, _SHARE)  # counts bytes as they do in the budget
        self._chunks: dict[Key, _Chunk] = {}  # fetched last at the end
        self._bytes = 0
        self._loads: dict[Key, _Load] = {}
        budget.add_cache(self._give_back)

    def find(self, place: Location) -> memoryview | None:
        """The file's bytes of a chunk, read-only, if they are here. Does not block."""
        chunk = self._chunks.get((place.container, place.offset))
        if chunk is None:
            return None
        self._keeping.read_again(chunk.fetched)
        return chunk.data

    async def get(self, place: Location, load: Load) -> memoryview:
        """The file's bytes of a chunk, read-only: those that are here, or that others fetch, or
        what ``load`` fetches.

        Cancellable: then one of the others who wait fetches it. Raises what ``load`` raises.
        """
        key = place.container, place.offset
        while True:
            data = self.find(place)
            if data is not None:
                return data
            other = self._loads.get(key)
            if other is None:
                return await self._load(key, place, load)
            await other.ended.wait()
            if other.data is not None:
                return other.data

    async def _load(self, key: Key, place: Location, load: Load) -> memoryview:
        own = self._loads[key] = _Load()
        memory = self._buffers.try_take(_size(place.raw))
        is_kept = memory is not None
        target = memory[: place.raw] if is_kept else memoryview(bytearray(place.raw))
        del memory
        try:
            await load(place, target)
            own.data = target.toreadonly()
        finally:
            own.ended.set()
            is_current = self._loads.get(key) is own
            if is_current:
                del self._loads[key]
        if is_kept and is_current:
            self._keep(key, own.data)
        return own.data

    def _keep(self, key: Key, data: memoryview) -> None:
        size = _size(len(data))
        self._keeping.fetched += size
        self._bytes += size
        self._chunks[key] = _Chunk(data, self._keeping.fetched)
        limit = self._keeping.limit
        while self._bytes > limit and len(self._chunks) > 1:
            self._drop(next(iter(self._chunks)))

    def forget(self, container: int) -> None:
        """Where the bytes of a container are read from has changed: ask there again."""
        for key in [key for key in self._chunks if key[0] == container]:
            self._drop(key)
        for key in [key for key in self._loads if key[0] == container]:
            del self._loads[
                key
            ]  # those who wait get what is on its way, and nobody who comes later

    def _drop(self, key: Key) -> None:
        self._bytes -= _size(len(self._chunks.pop(key).data))

    def _give_back(self, size: int) -> None:
        before = self._bytes
        while self._chunks and before - self._bytes < size:
            self._drop(next(iter(self._chunks)))
        self._buffers.give_back(size)


def _size(raw: int) -> int:
    """The buffer for so many bytes, in few sizes."""
    size = _SMALLEST
    while size < raw:
        size *= 4
    return size
