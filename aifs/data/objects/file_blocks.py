"""Blocks of a file, rather than of one of its objects, in the read cache: for bytes that have to be
put together, or compared with checksums, before anybody may have them.

To tell a unit that is lost takes the other units of its row, which a stream will ask for next; and
a checksum covers a whole MiB. So blocks are filled once, for all readers, and ahead of them, from
all servers at a time.
"""

from collections.abc import Awaitable, Callable, Hashable

from aifs.core.complete import is_complete
from aifs.data.objects.cached_reads import WHOLE_BLOCKS_FROM, collect
from aifs.data.reading.blocks import FilledSource
from aifs.data.reading.patterns import AccessPattern
from aifs.data.servers import Servers
from aifs.layout.striped import Striped

FillRange = Callable[[int, memoryview, int], Awaitable[None]]
"""Fills memory with the bytes of the file from an offset on; last the file's size."""


class FileBlocks(FilledSource):
    """Of one file, whose bytes nobody changes."""

    def __init__(
        self,
        servers: Servers,
        layout: Striped,
        name: Hashable,
        block: int,
        fill: FillRange,
        in_use: Callable[[int], None],
    ) -> None:
        """``name`` and ``block``: see BlockSource; ``in_use``: see FilledSource."""
        super().__init__(name, block, self._fill_block, in_use)
        self._servers = servers
        self._layout = layout
        self._fill_range = fill
        self._pattern = AccessPattern()
        self._size = 0

    async def read(
        self, offset: int, length: int, size: int, only_streams: bool = False
    ) -> memoryview | None:
        """Bytes of a file of ``size`` bytes. ``only_streams``: None if the read is none of a
        stream, and others have not had the blocks filled: then these are not worth it.

        Raises what ``fill`` raises.
        """
        cache, pattern, block = self._servers.cache, self._pattern, self.block
        ahead = pattern.observe(offset, length, cache.window_max)
        numbers = range(offset // block, (offset + length - 1) // block + 1)
        blocks = [
            cache.find(self.name, n, min(block, offset + length - n * block)) for n in numbers
        ]
        is_stream = pattern.following or length >= WHOLE_BLOCKS_FROM
        if only_streams and None in blocks and (pattern.random or not is_stream):
            return None
        self._size = size
        blocks = [
            found or cache.start(self, number, size)
            for number, found in zip(numbers, blocks, strict=True)
        ]
        self._read_ahead(ahead)
        if is_complete(blocks):
            return await collect(blocks, offset, length, block)
        del blocks  # nobody who waits for memory may hold any
        return await cache.fetch(self, offset, length, size)

    async def fetch(self, offset: int, length: int, size: int) -> memoryview:
        """The same, of one block, for who does not read the file himself."""
        self._size = size
        return await self._servers.cache.fetch(self, offset, length, size)

    def _read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            end = min(begin + length, self._size)
            for number in range(begin // self.block, -(-end // self.block)):
                if not self._servers.cache.read_ahead(self, number, self._size):
                    self._pattern.refused(begin, number * self.block)
                    return

    def forget(self) -> None:
        """Blocks that have been filled may have wrong bytes, or will have."""
        self._servers.cache.invalidate(self.name)

    @property
    def busy(self) -> bool:
        """See BlockSource."""
        servers = (self._servers.find(number) for number in self._layout.servers)
        return all(server is None or server.workers.busy for server in servers)

    async def _fill_block(self, buffer: memoryview, offset: int) -> int:
        part = buffer[: min(self.block, self._size - offset)]
        await self._fill_range(offset, part, self._size)
        return len(part)
