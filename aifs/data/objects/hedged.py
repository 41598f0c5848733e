"""Blocks of a protected file that a server takes long for, told by other columns: once for all who
wait for them.

What is read for that goes through the read cache, too: the other data columns of a coded file are
there, or will be asked for next. So a hedge costs the parity of a block, and not what tells it.
"""

from collections.abc import Sequence
from functools import partial

import trio

from aifs.core.complete import is_complete
from aifs.core.errors import FsError
from aifs.data.objects.cached_reads import CachedReads, collect
from aifs.data.objects.columns import Columns, Range
from aifs.data.reading.blocks import Block, FilledSource
from aifs.data.servers import Servers
from aifs.layout.striped import Striped

HEAD_START_S = 0.005
"""What the columns that a hedged read waits for have before others are asked: those that do not
hang need less.
"""

_GRACE_S = 0.05
"""What a server at most has to answer after all: one that is new, or has been slow before, is not
known to be late otherwise.
"""


class Hedges:
    """Of one file, whose bytes nobody changes."""

    def __init__(
        self, servers: Servers, layout: Striped, columns: Columns, cached: CachedReads
    ) -> None:
        self._cache = servers.cache
        self._servers = servers
        self._layout = layout
        self._columns = columns
        self._source = cached.source
        self._block = cached.block

    def hedge(
        self, offset: int, length: int, size: int, sources: Sequence[int], unread: int
    ) -> bool:
        """A range of a file of ``size`` bytes is late, whose data columns are read from the columns
        ``sources``: have its blocks that are still loading told without these, and without those of
        the mask ``unread``.

        False: the range is not read by blocks, or there is no memory.
        """
        blocks: dict[Block, int] = {}
        for index, start, _, count in self._layout.extents(offset, length):
            column = sources[index]
            for number in range(start // self._block, -(-(start + count) // self._block)):
                block = self._cache.peek(self._source(column).name, number)
                if block is None:
                    return False
                blocks[block] = column
        return all(
            self._cache.hedge(block, self._told(block, column, size, unread))
            for block, column in blocks.items()
        )

    def _told(self, block: Block, column: int, size: int, unread: int) -> FilledSource:
        tell = partial(self._tell, block, column, size, unread)
        return FilledSource(block.name, self._block, tell, self._columns.in_use)

    async def fetch_all(self, ranges: Sequence[Range]) -> list[memoryview | FsError]:
        """As Columns.fetch_all; what is loaded or loading is not fetched again."""
        held = [self._find(*place) for place in ranges]
        fetched = iter(
            await self._columns.fetch_all(
                [r for r, blocks in zip(ranges, held, strict=True) if not blocks]
            )
        )
        answers: list[memoryview | FsError] = []
        for (_, offset, length), blocks in zip(ranges, held, strict=True):
            try:
                answers.append(
                    await collect(blocks, offset, length, self._block) if blocks else next(fetched)
                )
            except FsError as error:
                answers.append(error)
        return answers

    def _find(self, column: int, offset: int, length: int) -> Sequence[Block]:
        """The blocks that hold a range of a column; none if one of them lacks."""
        source, end, block = self._source(column), offset + length, self._block
        numbers = range(offset // block, -(-end // block))
        blocks = [
            self._cache.find(source.name, number, min(block, end - number * block))
            for number in numbers
        ]
        return blocks if is_complete(blocks) else ()

    async def _tell(
        self,
        block: Block,
        column: int,
        size: int,
        unread: int,
        buffer: memoryview,
        offset: int,
    ) -> int:
        begin_s = trio.current_time()
        await trio.sleep(HEAD_START_S)
        if not block.loading:
            return 0
        data = await self._columns.reconstruct(
            column, offset, len(buffer), size, unread, self._read
        )
        buffer[: len(data)] = data
        taken_s = trio.current_time() - begin_s
        trio.lowlevel.spawn_system_task(self._judge, block, column, taken_s)
        return len(data)

    async def _judge(self, block: Block, column: int, taken_s: float) -> None:
        """The block has been told in so long. Where all servers have much to do, its own one
        answers in as long again, or what is usual for it; else it is late."""
        latency = self._columns.server(column).latency
        await trio.sleep(
            max(taken_s, min(self._servers.hedging.usual_s([latency], block.size), _GRACE_S))
        )
        if not block.answered:
            latency.was_late()

    async def _read(self, column: int, offset: int, length: int, size: int) -> memoryview:
        """As Columns.exact, of bytes in one block."""
        if not length:
            return memoryview(b"")
        source, end = self._source(column), self._layout.object_length(column, size)
        number = offset // self._block
        needed = offset + length - number * self._block
        block = self._cache.find(source.name, number, needed) or self._cache.start(
            source, number, end
        )
        if block is None:  # there is no memory for it
            return await self._columns.exact(column, offset, length, size)
        data = await collect([block], offset, length, self._block)
        self._columns.require_whole(column, offset, data, length, size)
        return data
