"""Streams of reads of a coded file some of whose columns cannot be read: whole rows at a time,
through the read cache.

To tell a unit that is lost takes the other units of its row, which a stream will ask for next. So
rows are put together once, for all readers, and ahead of them, from all servers at a time.
"""

from collections.abc import Awaitable, Callable, Hashable

import trio

from aifs.data.reading.blocks import BLOCK_MAX
from aifs.data.reading.cached_reads import WHOLE_BLOCKS_FROM
from aifs.data.reading.patterns import Pattern
from aifs.data.reading.read_cache import ReadCache
from aifs.data.servers import Servers
from aifs.data.storage import Key
from aifs.layout.striped import Striped

Fill = Callable[[int, memoryview, int], Awaitable[None]]
"""Fills memory with the bytes of the file from an offset on; last the file's size."""


def rows_name(key: Key) -> Hashable:
    """What rows of an object set are invalidated by in the read cache."""
    return ("rows", *key)


def forget_columns(cache: ReadCache, layout: Striped, key: Key) -> None:
    """A column of an object set was wrong, and is not any more: so may be what it has told others
    by, rows and blocks.
    """
    cache.invalidate(rows_name(key))
    for number in layout.servers:
        cache.invalidate((number, *key))


class DegradedReads:
    """Of one file, whose bytes nobody changes. A Source of the read cache, for rows of the file."""

    def __init__(
        self, servers: Servers, layout: Striped, key: Key, fill: Fill, in_use: Callable[[int], None]
    ) -> None:
        """``in_use``: see ObjectSource."""
        self.name = rows_name(key)
        self.block = layout.row * max(BLOCK_MAX // layout.row, 1)
        self._servers = servers
        self._layout = layout
        self._fill = fill
        self._in_use = in_use
        self._pattern = Pattern()
        self._size = 0

    async def read(self, offset: int, length: int, size: int) -> memoryview | None:
        """Bytes of a file of ``size`` bytes; None if the read is none of a stream, and others have
        not had the rows put together: then rows are not worth it.

        Raises Unavailable.
        """
        cache, pattern = self._servers.cache, self._pattern
        ahead = pattern.observe(offset, length, cache.window_max)
        numbers = range(offset // self.block, (offset + length - 1) // self.block + 1)
        missing = [
            n
            for n in numbers
            if cache.find(self, n, min(self.block, offset + length - n * self.block)) is None
        ]
        if missing and (pattern.random or not (pattern.following or length >= WHOLE_BLOCKS_FROM)):
            return None
        self._size = size
        for number in missing:
            cache.start(self, number, size)
        self._read_ahead(ahead)
        return await cache.fetch(self, offset, length, size)

    def _read_ahead(self, ranges: list[tuple[int, int]]) -> None:
        for begin, length in ranges:
            for number in range(
                begin // self.block, -(-min(begin + length, self._size) // self.block)
            ):
                if not self._servers.cache.read_ahead(self, number, self._size):
                    self._pattern.refused(begin, number * self.block)
                    return

    def forget(self) -> None:
        """Rows that have been put together may be of columns that are wrong."""
        self._servers.cache.invalidate(self.name)

    # --- as a source of the cache ---

    @property
    def busy(self) -> bool:
        """See read_cache.Source."""
        servers = (self._servers.find(number) for number in self._layout.servers)
        return all(server is None or server.workers.busy for server in servers)

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        """See read_cache.Source."""
        self._in_use(1)
        part = buffer[: min(self.block, self._size - offset)]
        trio.lowlevel.spawn_system_task(self._load, tell, part, offset, self._size)

    async def _load(
        self, tell: Callable[[int | BaseException], None], part: memoryview, offset: int, size: int
    ) -> None:
        try:
            await self._fill(offset, part, size)
        except Exception as error:  # noqa: BLE001 (raised again where the bytes are waited for)
            tell(error)
        else:
            tell(len(part))
        finally:
            self._in_use(-1)
