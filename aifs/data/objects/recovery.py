"""Reads of a protected object set that survive lost, wrong, or late columns.

A *healthy* read has a good column for each data column, and costs the same as without protection. A
*hedged* read that takes too long goes around late columns, too. A data column without a good copy
is computed from parity: by whole rows, through the read cache for a stream.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import is_complete, run_all, some_of
from aifs.data.objects.cached_reads import CachedReads, Run, Sources, collect, ranges_of, runs_of
from aifs.data.objects.checked_reads import FileBlocks
from aifs.data.objects.coding import code_of
from aifs.data.objects.columns import Columns, FetchAll, Range
from aifs.data.reading.buffers import scatter
from aifs.data.reading.read_cache import BLOCK_MAX, Block, FilledSource, ReadCache
from aifs.data.servers import Servers
from aifs.data.storage import Key
from aifs.layout.striped import Striped

_NOTHING = memoryview(b"")

HEAD_START_S = 0.005
"""Time that columns have before a hedge asks others."""

_GRACE_S = 0.05
"""Grace for a server that is new, or was slow: it is not known to be late otherwise."""


class Hedges:
    """Late blocks of one protected, unchanging file, told by other columns once for all readers.

    Bytes read for that go through the read cache: other data columns of a coded file are there, or
    come next, so a hedge costs a block's parity alone.
    """

    def __init__(self, servers: Servers, columns: Columns, cached: CachedReads) -> None:
        self._cache = servers.cache
        self._servers = servers
        self._layout = columns.layout
        self._columns = columns
        self._source = cached.source
        self._block = cached.block

    def hedge(
        self, offset: int, length: int, size: int, sources: Sequence[int], unread: int
    ) -> bool:
        """Have the loading blocks of a late range, read from columns ``sources``, told without
        these and ``unread``. False: it is not read by blocks, or memory is short."""
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
        """The blocks of a column's range; none if one is missing."""
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
        """Note how long a hedge took. The block's own server has as long again, or its usual time,
        because under load all are slow; then it is late."""
        latency = self._columns.server(column).latency
        await trio.sleep(
            max(taken_s, min(self._servers.hedging.usual_s([latency], block.size), _GRACE_S))
        )
        if not block.answered:
            latency.was_late()

    async def _read(self, column: int, offset: int, length: int, size: int) -> memoryview:
        """Columns.exact within one block."""
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


class Recovery:
    """Of one object set, whose bytes nobody changes."""

    def __init__(
        self,
        servers: Servers,
        columns: Columns,
        cached: CachedReads,
        unread: int,
    ) -> None:
        self.unread = unread
        """The mask of columns that must not be read; it may change at any time."""
        self._servers = servers
        self._layout = layout = columns.layout
        self._key = columns.key
        self._columns = columns
        self._cached = cached
        self._hedges = Hedges(servers, columns, cached)
        block = layout.row * max(BLOCK_MAX // layout.row, 1)
        self._rows = FileBlocks(
            servers, layout, _rows_name(self._key), block, self._read_row, columns.in_use
        )

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Stage; the file is settled. Raises Unavailable if too many columns cannot be read."""
        if self._layout.parity and None in self._sources(range(self._layout.width)):
            data = await self._rows.read(offset, length, size, only_streams=True)
            if data is not None:
                return data
        touched = self._touched(offset, length)
        sources = self._sources(touched)
        if not is_complete(sources):
            buffer = self._servers.buffers.take(length)
            runs = runs_of(self._layout, offset, buffer)
            if await self._read_degraded(runs, sources, size, self._columns.fetch_all):
                return buffer
            return await self._read_around(offset, length, size)
        if all(self._columns.server(sources[column]).may_inline for column in touched):
            delay_s = math.inf  # memory answers, or nothing does
        else:
            delay_s = self._delay_s([sources[column] for column in touched], length)
        with trio.move_on_after(delay_s):
            return await self._read_healthy(sources, offset, length, size)
        self._servers.hedging.hedged()
        if self._hedges.hedge(offset, length, size, sources, self.unread):
            return await self._read_healthy(sources, offset, length, size)
        attempts = (
            partial(self._cached.read, offset, length, size, True, sources),
            partial(self._read_around, offset, length, size, hedged=True),
        )
        return next(iter((await some_of(attempts, 1, 0)).values()))

    async def read_past(self, offset: int, buffer: memoryview, size: int) -> None:
        """See Stage."""
        await self._read_into(offset, buffer, size, self._columns.fetch_all)

    def read_now(self, offset: int, buffer: memoryview, size: int) -> bool:
        """See Stage."""
        sources = self._sources(self._touched(offset, len(buffer)))
        if not is_complete(sources):
            return False
        return self._cached.read_now(offset, buffer, size, sources)

    async def find(self, offset: int, buffer: memoryview) -> bool:
        """See Stage."""
        return await self._cached.find(offset, buffer)

    def forget(self) -> None:
        """See Stage."""
        self._cached.forget()

    def end(self) -> None:
        """See Stage. Rows that have been put together may be of columns that are wrong."""
        self._rows.forget()

    # --- healthy reads ---

    async def _read_healthy(
        self, sources: Sources, offset: int, length: int, size: int
    ) -> memoryview:
        try:
            return await self._cached.read(offset, length, size, True, sources)
        except Unavailable:
            return await self._read_around(offset, length, size)

    def _touched(self, offset: int, length: int) -> Iterable[int]:
        first, last = offset // self._layout.unit, (offset + length - 1) // self._layout.unit
        width = self._layout.width
        return (
            range(width)
            if last - first + 1 >= width
            else {unit % width for unit in range(first, last + 1)}
        )

    def _sources(self, touched: Iterable[int]) -> list[int | None]:
        """The column to read each data column from; None for one of ``touched`` without a good
        one."""
        columns = range(self._layout.width)
        sources: list[int | None] = list(columns)
        for column in touched if self._layout.parity else columns:
            copies = self._copies(column)
            sources[column] = next((copy for copy in copies if self._columns.is_good(copy)), None)
            if sources[column] is None and column not in touched:
                sources[column] = column
        return sources

    def _copies(self, column: int) -> tuple[int, ...]:
        """Readable columns with a data column's bytes, first by file."""
        copies = self._layout.copies(column)
        first = self._key[0] % len(copies)
        return tuple(
            copy for copy in copies[first:] + copies[:first] if not self.unread >> copy & 1
        )

    def _delay_s(self, sources: Iterable[int], length: int) -> float:
        columns = self._columns
        latencies = [columns.server(column).latency for column in sources]
        others = columns.latencies(range(len(self._layout.servers)))
        return self._servers.hedging.delay_s(latencies, length, others, self._layout.width)

    # --- degraded reads ---

    async def _read_row(self, offset: int, buffer: memoryview, size: int) -> None:
        """Fill a block of rows, from cached columns if possible."""
        await self._read_into(offset, buffer, size, self._hedges.fetch_all)

    async def _read_into(
        self, offset: int, buffer: memoryview, size: int, fetch_all: FetchAll
    ) -> None:
        sources = self._sources(self._touched(offset, len(buffer)))
        runs = runs_of(self._layout, offset, buffer)
        if not await self._read_degraded(runs, sources, size, fetch_all):
            await self._all(runs, size, hedged=None not in sources)

    async def _read_degraded(
        self, runs: Sequence[Run], sources: Sequence[int | None], size: int, fetch_all: FetchAll
    ) -> bool:
        """Fill the memory of ``runs``, a request for each needed range; columns without a source
        are told by parity. Whether that worked; else nothing counts. Does not wait for slow
        servers."""
        columns, width = self._columns, self._layout.width
        good = [
            column
            for column in range(len(self._layout.servers))
            if not self.unread >> column & 1 and columns.is_good(column)
        ]
        others = good[:width] if self._layout.parity else []
        if len(others) < width and any(sources[index] is None for index, _, _ in runs):
            return False
        ranges = ranges_of(self._layout, runs, sources, others, size)
        touched = {column for column, _, _ in ranges}
        worker = min(
            touched, key=lambda c: (not columns.is_good(c), columns.server(c).workers.outstanding)
        )
        if all(columns.server(column).may_inline for column in touched):
            direct = {(sources[i], offset, len(p[0])): p[0] for i, offset, p in runs if len(p) == 1}
            buffers = [direct.get(r) or self._servers.buffers.take(r[2]) for r in ranges]
            [done] = await columns.attempt(
                [(worker, self._read_and_assemble, (runs, sources, others, ranges, buffers))]
            )
            return done is True
        # Not into the memory itself: a server that hangs may write to what it was given at any time
        # later.
        with trio.move_on_after(self._delay_s(touched, max(length for _, _, length in ranges))):
            answers = await fetch_all(ranges)
            if any(
                isinstance(a, FsError) or len(a) < r[2]
                for r, a in zip(ranges, answers, strict=True)
            ):
                return False
            [done] = await columns.attempt(
                [(worker, self._assemble, (runs, sources, others, ranges, answers))]
            )
            return done is True
        self._servers.hedging.hedged()
        return False

    def _read_and_assemble(
        self,
        runs: Sequence[Run],
        sources: Sequence[int | None],
        others: Sequence[int],
        ranges: Sequence[Range],
        buffers: Sequence[memoryview],
    ) -> bool:
        """Fill ``runs`` by ``buffers`` for ``ranges``; False if these end too early. Blocks."""
        for (column, offset, length), buffer in zip(ranges, buffers, strict=True):
            if self._columns.read_now(column, buffer, offset) < length:
                return False
        return self._assemble(runs, sources, others, ranges, buffers)

    def _assemble(
        self,
        runs: Sequence[Run],
        sources: Sequence[int | None],
        others: Sequence[int],
        ranges: Sequence[Range],
        answers: Sequence[memoryview],
    ) -> bool:
        """Fill the memory of ``runs`` from what was read; whether all was there. Blocks."""
        held: dict[int, list[tuple[int, memoryview]]] = {}
        for (column, start, _), answer in zip(ranges, answers, strict=True):
            held.setdefault(column, []).append((start, answer))

        def found(column: int, offset: int, length: int) -> memoryview:
            for start, answer in held.get(column, ()):
                if start <= offset < start + len(answer):
                    return answer[offset - start : offset - start + length]
            return _NOTHING

        for index, offset, parts in runs:
            source = sources[index]
            if source is not None:
                whole = found(source, offset, sum(map(len, parts)))
                if not any(answer is parts[0] for answer in answers):
                    scatter(whole, parts)  # else it was read to where it belongs
                continue
            for part in parts:
                units = {column: found(column, offset, len(part)) for column in others}
                code_of(self._layout.width, self._layout.parity).reconstruct(units, index, part)
                offset += len(part)
        return True

    # --- column by column, from whichever can tell ---

    async def _read_around(
        self, offset: int, length: int, size: int, hedged: bool = False
    ) -> memoryview:
        """``hedged``: do not wait for the columns themselves."""
        buffer = self._servers.buffers.take(length)
        await self._all(runs_of(self._layout, offset, buffer), size, hedged)
        return buffer

    async def _all(self, runs: Sequence[Run], size: int, hedged: bool) -> None:
        if len(runs) == 1:
            await self._tell(runs[0], size, hedged)
        elif runs:
            await run_all(*(partial(self._tell, run, size, hedged) for run in runs))

    async def _tell(self, run: Run, size: int, hedged: bool) -> None:
        index, offset, parts = run
        length = sum(map(len, parts))
        copies = sorted(self._copies(index), key=lambda copy: not self._columns.is_good(copy))
        attempts: list[Callable[[], Any]] = [
            partial(self._columns.exact, copy, offset, length, size) for copy in copies
        ]
        if self._layout.parity:
            others = partial(self._columns.reconstruct, index, offset, length, size, self.unread)
            attempts.insert(1 if copies and self._columns.is_good(copies[0]) else 0, others)
        if not attempts:
            raise Unavailable(
                f"inode {self._key[0]}, object {self._key[1]}: all copies of column {index} are "
                "lost"
            )
        delay_s = (
            HEAD_START_S
            if hedged
            else self._delay_s(filter(self._columns.is_good, copies[:1]), length)
        )
        [(winner, data)] = (await some_of(attempts, 1, delay_s)).items()
        if hedged and winner and copies and not self.unread >> copies[0] & 1:
            self._columns.server(copies[0]).latency.was_late()
        scatter(data, parts)


def forget_columns(cache: ReadCache, layout: Striped, key: Key) -> None:
    """Forget what a wrong column, now right, may have told: rows and blocks."""
    cache.invalidate(_rows_name(key))
    for number in layout.servers:
        cache.invalidate((number, *key))


def _rows_name(key: Key) -> Hashable:
    return ("rows", *key)
