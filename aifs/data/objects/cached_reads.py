"""Reads of an object set's bytes, each from a given column: from memory, page cache, read cache or
server, and ahead of the reader.

Reads from the page cache or memory filesystems run on the trio thread, cheaper than a hand-off to a
worker. A settled file's bytes on slow servers go through the read cache, by whole blocks, where
that pays; the rest is asked of workers, for all columns at once.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, Protocol

from aifs.core.errors import FsError, Unavailable
from aifs.data.objects.columns import Columns
from aifs.data.patience import gives_up, in_time
from aifs.data.reading.buffers import scatter
from aifs.data.reading.patterns import AccessPattern
from aifs.data.reading.read_cache import BLOCK, Block
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.storage import Key
from aifs.layout.striped import Striped

WHOLE_BLOCKS_FROM = 64 << 10
"""Smaller requests, without read-ahead, fetch no whole blocks until a stream is seen."""

_AT_ALL = nullcontext()

Sources = Sequence[int]
"""For each data column the column that its bytes are read from."""


def object_name(server: DataServer, key: Key) -> Hashable:
    """The name of an object of a data server in the cache."""
    return (server.id, *key)


class ObjectSource:
    """An object of a data server. ``read`` runs in its workers: (buffer, offset) to bytes read.
    ``in_use`` is called, on the trio thread, with +1 before and -1 after."""

    __slots__ = ("_in_use", "_read", "_workers", "block", "cause", "name")

    def __init__(
        self,
        server: DataServer,
        key: Key,
        read: Callable[[memoryview, int], int],
        block: int = BLOCK,
        in_use: Callable[[int], None] = lambda change: None,
    ) -> None:
        self.name = object_name(server, key)
        self.cause = server.workers.name
        self.block = block
        self._workers = server.workers
        self._read = read
        self._in_use = in_use

    @property
    def busy(self) -> bool:
        return self._workers.busy

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        def ended(result: int | BaseException) -> None:
            self._in_use(-1)
            tell(result)

        self._in_use(1)
        self._workers.start(ended, self._read, buffer, offset)


class Stage(Protocol):
    """Reads one file's bytes. Each stage adds to the one below: caches (``CachedReads``), recovery
    of lost or late columns (``Recovery``), checks (``CheckedReads``), sharing among hosts
    (``TogetherReads``)."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Bytes.read."""

    async def read_past(self, offset: int, buffer: memoryview, size: int) -> None:
        """As a strict ``read``, but into ``buffer``, and past all caches of ours."""

    def read_now(self, offset: int, buffer: memoryview, size: int) -> bool:
        """A strict ``read`` into ``buffer``, if it takes no waiting; wholly, or nothing counts.
        Raises Unavailable. Does not block."""

    async def find(self, offset: int, buffer: memoryview) -> bool:
        """Fill ``buffer`` with a settled file's bytes if the read cache has, or loads, all; whether
        it did. Raises Unavailable."""

    def forget(self) -> None:
        """The objects are about to change. Does not block."""

    def end(self) -> None:
        """The file is read no more. Does not block."""


class Fetching(NamedTuple):
    """How much is asked for at a time."""

    block: int = BLOCK
    """Bytes per fetch."""
    window: int = 0
    """Longest read-ahead; 0: as the cache allows."""
    whole_from: int = WHOLE_BLOCKS_FROM
    """Requests of so many bytes fetch whole blocks without a stream."""


class CachedReads:
    """One per user of an object set; blocks are shared. The cache is used only for unchanged
    objects."""

    def __init__(self, servers: Servers, columns: Columns, fetching: Fetching) -> None:
        self.block = fetching.block
        self._cache = cache = servers.cache
        self._buffers = servers.buffers
        self._layout = layout = columns.layout
        self._own = range(layout.width)
        self._is_one = layout.width == 1
        self._columns = columns
        self._window = fetching.window or cache.window_max
        self._whole_from = fetching.whole_from
        self._pattern = AccessPattern()
        self._sources: dict[int, ObjectSource] = {}

    def source(self, column: int) -> ObjectSource:
        """The column's object, as the cache knows it. Raises Unavailable."""
        source = self._sources.get(column)
        if source is None:
            columns = self._columns
            source = self._sources[column] = ObjectSource(
                columns.server(column),
                columns.key,
                partial(columns.read_now, column),
                self.block,
                columns.in_use,
            )
        return source

    async def read(
        self,
        offset: int,
        length: int,
        size: int,
        strict: bool = True,
        sources: Sources | None = None,
        into: memoryview | None = None,
    ) -> memoryview:
        """See Stage. ``into``: the caller's memory to fill; not cancellable while it is written
        to."""
        columns, sources = self._columns, self._own if sources is None else sources
        buffer = self._buffers.take(length) if into is None else into
        calls: list[tuple[int, Callable[..., Any], tuple]] = []
        loads: list[tuple[int, Run, list[Block]]] = []
        ahead = None
        for run in runs_of(self._layout, offset, buffer):
            index, begin, parts = run
            column = sources[index]
            if columns.server(column).may_inline:
                self._read_run(column, begin, parts, size, strict)
                continue
            length = sum(map(len, parts))
            blocks = self._find(column, begin, length) if strict else None
            if blocks is None and columns.read_cached(column, parts, begin):
                continue
            if strict and ahead is None:
                ahead = self._pattern.observe(offset, len(buffer), self._window)
            if blocks is None and strict:
                blocks = self._load(column, begin, length, size)
            if blocks is None:
                calls.append((column, self._read_run, (column, begin, parts, size, strict)))
            else:
                loads.append((column, run, blocks))
        if ahead:
            # Before anything is waited for: the file is still settled.
            self._read_ahead(ahead, size, sources)
        if calls:
            # What lands late may be the removal of what would be opened, but for settled files.
            await self._gather(calls, abandonable=into is None, waits=not strict)
        for column, (_, begin, parts), blocks in loads:
            length = sum(map(len, parts))
            with in_time(columns.server(column).workers.patience) if gives_up() else _AT_ALL:
                held = await collect(blocks, begin, length, self.block)
            if len(held) == len(buffer):
                return held  # all of the request
            if len(held) < length:
                columns.require(column, begin + len(held), begin + length, size)
                held = memoryview(bytes(held).ljust(length, b"\0"))
            scatter(held, parts)
        return buffer

    async def find(self, offset: int, buffer: memoryview) -> bool:
        """See Stage."""
        found = []
        for index, begin, parts in runs_of(self._layout, offset, buffer):
            blocks = self._find(index, begin, sum(map(len, parts)))
            if blocks is None:
                return False
            found.append((begin, parts, blocks))
        for begin, parts, blocks in found:
            length = sum(map(len, parts))
            held = await collect(blocks, begin, length, self.block)
            if len(held) < length:
                return False
            scatter(held, parts)
        return True

    async def read_past(self, offset: int, buffer: memoryview, size: int) -> None:
        """See Stage."""
        await self._gather(
            [
                (index, self._read_run, (index, begin, parts, size, True))
                for index, begin, parts in runs_of(self._layout, offset, buffer)
            ]
        )

    async def open(self) -> bool:
        """Have the descriptors of a settled file; whether some were missing. Raises Unavailable."""
        columns = self._columns
        closed = [column for column in self._own if not columns.is_open(column)]
        if closed:
            calls = [(column, columns.descriptor_now, (column,)) for column in closed]
            await self._gather(calls, abandonable=True)
        return bool(closed)

    def read_now(
        self, offset: int, buffer: memoryview, size: int, sources: Sources | None = None
    ) -> bool:
        """See Stage."""
        columns, sources = self._columns, self._own if sources is None else sources
        if self._is_one and columns.read_cached(sources[0], (buffer,), offset):
            return True  # what small reads of containers mostly are
        for index, begin, parts in runs_of(self._layout, offset, buffer):
            column = sources[index]
            if columns.server(column).may_inline:
                self._read_run(column, begin, parts, size, True)
            elif self._is_one or not columns.read_cached(column, parts, begin):
                return False
        return True

    def loaded(self, offset: int) -> tuple[int, memoryview] | None:
        """For one column: offset and cached block with this byte, or None. Does not block."""
        number = offset // self.block
        block = self._cache.peek(self.source(0).name, number) if self._is_one else None
        return None if block is None or block.view is None else (number * self.block, block.view)

    def end(self) -> None:
        """See Stage."""

    def forget(self) -> None:
        """See Stage. Others' reads count, too: a copying task has objects of its own."""
        if not self._cache.empty:
            for number in self._layout.servers:
                self._cache.invalidate((number, *self._columns.key))

    # --- from the servers ---

    def _read_run(
        self, column: int, offset: int, parts: list[memoryview], size: int, strict: bool
    ) -> None:
        """Fill ``parts`` by one request, whatever the stripe unit. Blocks."""
        target = parts[0] if len(parts) == 1 else memoryview(bytearray(sum(map(len, parts))))
        done = self._columns.read_now(column, target, offset)
        if done < len(target):
            if strict:
                self._columns.require(column, offset + done, offset + len(target), size)
            target[done:] = bytes(len(target) - done)
        if len(parts) > 1:
            scatter(target, parts)

    async def _gather(
        self, calls: Sequence[tuple], abandonable: bool = False, waits: bool = False
    ) -> None:
        answers = await self._columns.attempt(calls, abandonable=abandonable, waits=waits)
        for answer in answers:
            if isinstance(answer, FsError):
                try:
                    raise answer
                finally:
                    del answer, answers  # they would tie a knot with the traceback

    # --- through the cache ---

    def _find(self, column: int, offset: int, length: int) -> list[Block] | None:
        """The blocks of a range, loaded or loading; None if some are missing."""
        if self._cache.empty:
            return None
        blocks = []
        for number, needed in self._pieces(offset, length):
            block = self._cache.find(self.source(column).name, number, needed)
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _load(self, column: int, offset: int, length: int, size: int) -> list[Block] | None:
        """``_find``, fetching missing blocks. None if that is waste, or memory is short."""
        pattern = self._pattern
        if pattern.random or (length < self._whole_from and not pattern.following):
            return None
        source, end = self.source(column), self._layout.object_length(column, size)
        blocks = []
        for number, needed in self._pieces(offset, length):
            block = self._cache.find(source.name, number, needed) or self._cache.start(
                source, number, end
            )
            if block is None:
                return None
            blocks.append(block)
        return blocks

    def _read_ahead(self, ranges: list[tuple[int, int]], size: int, sources: Sources) -> None:
        """Fetch ``ranges`` of a file, as far as servers and memory are free."""
        for begin, length in ranges:
            for index, number, offset in self._blocks_of(begin, min(begin + length, size)):
                column = sources[index]
                end = self._layout.object_length(column, size)
                if number * self.block >= end or self._columns.server(column).may_inline:
                    continue
                if not self._cache.read_ahead(self.source(column), number, end):
                    self._pattern.refused(begin, offset)
                    return

    def _blocks_of(self, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
        """(data column, block, offset in the file up to which all before suffices), in file
        order."""
        unit, count, block = self._layout.unit, self._layout.width, self.block
        if unit >= block or count == 1:
            for index, object_offset, offset, length in self._layout.extents(begin, end - begin):
                for number, _ in self._pieces(object_offset, length):
                    yield index, number, max(offset, offset + number * block - object_offset)
            return
        # A block holds units of several rows: go by rows of blocks.
        row = unit * count
        first, last = begin // row * unit // block, (max(begin, end - 1) // row + 1) * unit
        for number in range(first, -(-last // block)):
            for index in range(count):
                yield index, number, max(begin, number * block // unit * row)

    def _pieces(self, offset: int, length: int) -> Iterator[tuple[int, int]]:
        """The blocks of a range, and the bytes needed of each, from its start."""
        block = self.block
        for number in range(offset // block, (offset + length - 1) // block + 1):
            yield number, min(block, offset + length - number * block)


async def collect(
    blocks: Sequence[Block], offset: int, length: int, size: int = BLOCK
) -> memoryview:
    """A range of an object from its blocks of ``size`` bytes, shorter at the object's end. Several
    are copied."""
    views = []
    start, left = offset % size, length
    for block in blocks:
        view = await block.bytes()
        views.append(view[start : start + left])
        if len(view) < size:
            break
        start, left = 0, left - len(views[-1])
    return views[0] if len(views) == 1 else memoryview(b"".join(views))


Run = tuple[int, int, list[memoryview]]
"""Index of an object, offset in it, and successive parts of a request's memory."""


def runs_of(layout: Striped, offset: int, memory: memoryview) -> list[Run]:
    """Places of ``memory``, a file's from ``offset`` on, in the data columns: a run each."""
    unit, count = layout.unit, layout.width
    number, within = divmod(offset, unit)
    if within + len(memory) <= unit:
        return [(number % count, number // count * unit + within, [memory])]
    runs: dict[int, Run] = {}
    for index, object_offset, file_offset, length in layout.extents(offset, len(memory)):
        start = file_offset - offset
        run = runs.setdefault(index, (index, object_offset, []))
        run[2].append(memory[start : start + length])
    return list(runs.values())


def ranges_of(
    layout: Striped,
    runs: Sequence[Run],
    sources: Sequence[int | None],
    others: Sequence[int],
    size: int,
) -> list[tuple[int, int, int]]:
    """Disjoint ranges (column, offset, length) to read for runs. ``sources``: the column for each
    data column; ``others``: those that tell one without."""
    ends: dict[int, list[tuple[int, int]]] = {}
    for index, offset, parts in runs:
        end, source = offset + sum(map(len, parts)), sources[index]
        for column in others if source is None else [source]:
            last = min(end, layout.object_length(column, size)) if source is None else end
            if offset < last:
                ends.setdefault(column, []).append((offset, last))
    ranges: list[tuple[int, int, int]] = []
    for column, spans in ends.items():
        for start, end in sorted(spans):
            if ranges and ranges[-1][0] == column and start <= sum(ranges[-1][1:]):
                ranges[-1] = column, ranges[-1][1], max(end - ranges[-1][1], ranges[-1][2])
            else:
                ranges.append((column, start, end - start))
    return ranges


class LocalReads:
    """Reads of an object set by this host's blocks of it: the topmost stage. See Stage.

    Blocks hold bytes as the stages below return them: recovered, checked, shared. A read with all
    blocks here asks no server. Others are widened to whole blocks, kept in the background: so
    neighbours in a container come along.
    """

    def __init__(
        self,
        servers: Servers,
        source: int,
        below: Stage,
        cached: CachedReads | None,
    ) -> None:
        """``cached``: the stage below, if it is that, and its bytes need not be recovered."""
        self._blocks = servers.blocks
        self._source = source
        self._below = below
        self._cached = cached
        self._buffers = servers.buffers
        self.read_past, self.find = below.read_past, below.find
        self.forget, self.end = below.forget, below.end
        self.fixed: int | None = None
        """A container's bytes that never change: whole blocks, or all; None: all of a settled
        file."""

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """See Stage."""
        blocks, source, below = self._blocks, self._source, self._below
        if not strict:
            return await below.read(offset, length, size, strict)
        end, start, stop = self._end(size), offset, offset + length
        if held := blocks.held(source, offset, length):
            buffer = self._buffers.take(length)
            if await blocks.read(source, offset, buffer[:held], end):
                if held < length:
                    buffer[held:] = await self.read(offset + held, length - held, size)
                return buffer
            del buffer
        cached = None if self.fixed is None else self._cached  # of a container
        if cached is not None:
            await cached.open()  # page caches suit small reads
        if not blocks.takes(source):
            return await below.read(offset, length, size)
        if stop <= end:
            block = blocks.block
            start, stop = start - start % block, min(-(-stop // block) * block, end)
        corrections = blocks.corrections
        try:
            data = await below.read(start, stop - start, size, strict)
        except Unavailable:
            if stop - start == length:
                raise
            return await below.read(offset, length, size)  # what lies beside it is away
        if blocks.corrections != corrections:
            return data[offset - start :][:length]
        around = None if cached is None else cached.loaded(start)
        if around is not None:  # a stripe, with what lies beside it
            blocks.fill(source, *around, end)
        else:
            blocks.fill(source, start, data, end)
        return data[offset - start :][:length]

    def read_now(self, offset: int, buffer: memoryview, size: int) -> bool:
        """See Stage. ``read`` brings the bytes that are not in blocks, and keeps them."""
        if not self._blocks.takes(self._source):
            return self._below.read_now(offset, buffer, size)
        return self._blocks.read_now(self._source, offset, buffer, self._end(size))

    def _end(self, size: int) -> int:
        return size if self.fixed is None else self.fixed
