"""Reads of a settled striped file that have to wait for servers: through the read cache, and ahead
of the reader.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial

from aifs.data.reading.blocks import BLOCK, Block, ObjectSource, object_name
from aifs.data.reading.patterns import Pattern
from aifs.data.reading.read_cache import ReadCache
from aifs.data.server import DataServer
from aifs.data.storage import Key
from aifs.layout.striped import Striped

WHOLE_BLOCKS_FROM = 64 << 10
"""A smaller request, which the kernel has not read ahead of, fetches only what it asks for until a
stream is seen.
"""


class CachedReads:
    """One per user of a file's objects, used only while nobody changes them; blocks are shared.
    Does not suspend.
    """

    def __init__(
        self,
        cache: ReadCache,
        layout: Striped,
        servers: Sequence[DataServer],
        key: Key,
        read: Callable[[int, memoryview, int], int],
        in_use: Callable[[int], None],
    ) -> None:
        """``read``: (number of the object, buffer, offset) to bytes read, in a worker; ``in_use``:
        see ObjectSource.
        """
        self._cache = cache
        self._layout = layout
        self._servers = servers
        self._key = key
        self._read = read
        self._in_use = in_use
        self._pattern = Pattern()

    @cached_property
    def _sources(self) -> list[ObjectSource]:
        """Made when they are first needed: most files are never read from a server that one has to
        wait for.
        """
        return [
            ObjectSource(server, self._key, partial(self._read, index), in_use=self._in_use)
            for index, server in enumerate(self._servers)
        ]

    def find(self, index: int, offset: int, length: int) -> list[Block] | None:
        """The blocks that hold a range of object ``index``, loaded or loading; None if some are
        missing.
        """
        if self._cache.empty:
            return None
        blocks = []
        for number, needed in _pieces(offset, length):
            block = self._cache.find(self._sources[index], number, needed)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def observe(self, offset: int, length: int) -> list[tuple[int, int]]:
        """Note a read of the file that waits for servers, or would without the cache; what to
        ``read_ahead`` after it.
        """
        return self._pattern.observe(offset, length, self._cache.window_max)

    def load(self, index: int, offset: int, length: int, size: int) -> list[Block] | None:
        """As ``find``, with what is missing being fetched. None if that is waste, or there is no
        memory for it.
        """
        if self._pattern.random or (length < WHOLE_BLOCKS_FROM and not self._pattern.following):
            return None
        source, end = self._sources[index], self._layout.object_length(index, size)
        blocks = []
        for number, needed in _pieces(offset, length):
            block = self._cache.find(source, number, needed) or self._cache.start(
                source, number, end
            )
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def read_ahead(self, ranges: list[tuple[int, int]], size: int) -> None:
        """Fetch ``ranges`` of a file of ``size`` bytes, as far as servers and memory are free."""
        for begin, length in ranges:
            for index, number, offset in self._blocks_of(begin, min(begin + length, size)):
                end = self._layout.object_length(index, size)
                if number * BLOCK < end and not self._servers[index].may_inline:
                    if not self._cache.read_ahead(self._sources[index], number, end):
                        self._pattern.refused(begin, offset)
                        return

    def forget(self) -> None:
        """The objects are about to change. What others have read of them counts, too: who copies a
        file has objects of his own.
        """
        if not self._cache.empty:
            for server in self._servers:
                self._cache.invalidate(object_name(server, self._key))

    def _blocks_of(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(object, block, an offset in the file up to which all before it suffice), in the order of
        the file.
        """
        unit, count = self._layout.unit, len(self._servers)
        if unit >= BLOCK:
            for index, object_offset, offset, length in self._layout.extents(begin, end - begin):
                for number, _ in _pieces(object_offset, length):
                    yield index, number, max(offset, offset + number * BLOCK - object_offset)
            return
        # A block holds units of several rows: go by rows of blocks.
        row = unit * count
        first, last = begin // row * unit // BLOCK, (max(begin, end - 1) // row + 1) * unit
        for number in range(first, -(-last // BLOCK)):
            for index in range(count):
                yield index, number, max(begin, number * BLOCK // unit * row)


def _pieces(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """The blocks that hold a range of an object, and how many bytes of each, from its start on,
    that takes.
    """
    for number in range(offset // BLOCK, (offset + length - 1) // BLOCK + 1):
        yield number, min(BLOCK, offset + length - number * BLOCK)


async def collect(blocks: Sequence[Block], offset: int, length: int) -> memoryview:
    """A range of an object, from the blocks that hold it; shorter where the object ends. Copied if
    they are several.
    """
    views = []
    for block in blocks:
        views.append(await block.bytes())
        if len(views[-1]) < BLOCK:
            break
    start = offset % BLOCK
    return (views[0] if len(views) == 1 else memoryview(b"".join(views)))[start : start + length]
