"""The objects of one protected file: reads that survive lost columns, and the writes of a drain."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import run_all
from aifs.data.objects.coding import code_of, encode_rows
from aifs.data.objects.columns import Columns, FetchAll, Range
from aifs.data.objects.hedged import HEAD_START_S, Hedges
from aifs.data.objects.races import some_of
from aifs.data.objects.runs import Run, ranges_of, runs_of
from aifs.data.objects.striped import StripedObjects
from aifs.data.reading.buffers import scatter
from aifs.data.reading.degraded_reads import DegradedReads
from aifs.data.servers import Servers
from aifs.layout.striped import Striped

Ranges = Sequence[tuple[int, int]]
"""Start and end of each."""

_NOTHING = memoryview(b"")


class ProtectedObjects:
    """Replaces StripedObjects where the layout is protected. Such a file is written once, by a
    drain or a rebuild into a new oid, and never changed; so there is no ``trim``, and no
    ``backing``.

    A *healthy* read is one of StripedObjects that are made of one good column for each data column;
    it costs the same. It is *hedged*: when it takes too long, the bytes are also told around the
    columns that it waits for.
    """

    def __init__(
        self,
        servers: Servers,
        layout: Striped,
        ino: int,
        oid: int,
        *,
        lost: int = 0,
        new: bool = False,
        background: str = "",
        on_damage: Callable[[int, int, int], None] = lambda oid, ino, column: None,
    ) -> None:
        """``lost``: mask of columns that must not be read. ``on_damage`` is called with oid, ino
        and column, once for each whose object turns out to be missing or short. The rest as for
        StripedObjects."""
        self._servers = servers
        self._layout = layout
        self._key = (ino, oid)
        self._background = background
        self._columns = Columns(servers, layout, ino, oid, new=new, background=background)
        self._columns.on_short = self._short
        self._on_damage = on_damage
        self._lost = lost
        self._rows = DegradedReads(servers, layout, self._key, self._read_row, self._columns.in_use)
        self._hedges = Hedges(servers, layout, self._key, self._columns)
        self._healthy: tuple[tuple[int, ...], StripedObjects] | None = (
            None  # columns, and what is made of them
        )
        self._closed = False
        self._failed = 0
        self._error: FsError | None = None
        self._blocks: int | None = None
        self._present: Iterable[int] = range(len(layout.servers))  # columns that have objects

    @property
    def row(self) -> int:
        """What ``write`` takes multiples of."""
        return self._layout.row if self._layout.parity else 1

    @property
    def failed(self) -> int:
        """The mask of columns that could not be written; what is there must not be read."""
        return self._failed

    # --- reads ---

    async def read(self, offset: int, length: int, size: int, strict: bool = True) -> memoryview:
        """As StripedObjects.read of a settled file; bytes of columns that cannot be read are told
        by others. Raises Unavailable if too many cannot."""
        if self._layout.parity and None in self._sources(range(self._layout.width)):
            data = await self._rows.read(offset, length, size)
            if data is not None:
                return data
        touched = self._touched(offset, length)
        sources = self._sources(touched)
        healthy = None if None in sources else self._made_of(tuple(sources))
        if healthy is None:
            buffer = self._servers.buffers.take(length)
            if await self._read_degraded(
                runs_of(self._layout, offset, buffer), sources, size, self._columns.fetch_all
            ):
                return buffer
            return await self._read_around(offset, length, size)
        if all(self._columns.server(sources[column]).may_inline for column in touched):
            delay_s = math.inf  # memory answers, or nothing does
        else:
            delay_s = self._delay_s([sources[column] for column in touched], length)
        with trio.move_on_after(delay_s):
            return await self._read_healthy(healthy, offset, length, size)
        self._servers.hedging.hedged()
        if self._hedges.hedge(offset, length, size, sources, frozenset(self._lost_columns())):
            return await self._read_healthy(healthy, offset, length, size)
        attempts = (
            partial(healthy.read, offset, length, size, True),
            partial(self._read_around, offset, length, size, hedged=True),
        )
        return next(iter((await some_of(attempts, 1, 0)).values()))

    async def _read_healthy(
        self, healthy: StripedObjects, offset: int, length: int, size: int
    ) -> memoryview:
        try:
            return await healthy.read(offset, length, size, True)
        except Unavailable:
            return await self._read_around(offset, length, size)

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """The same, into ``buffer``, past all caches of ours."""
        await self._read_into(offset, buffer, size, self._columns.fetch_all)

    async def _read_row(self, offset: int, buffer: memoryview, size: int) -> None:
        """The same, but what the cache has of the columns is taken from there."""
        await self._read_into(offset, buffer, size, self._hedges.fetch_all)

    async def _read_into(
        self, offset: int, buffer: memoryview, size: int, fetch_all: FetchAll
    ) -> None:
        touched = self._touched(offset, len(buffer))
        sources, runs = self._sources(touched), runs_of(self._layout, offset, buffer)
        if not await self._read_degraded(runs, sources, size, fetch_all):
            await self._all(runs, size, hedged=None not in sources)

    async def backing(self, size: int) -> int | None:
        """None: the kernel could not read around what is lost."""
        return None

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As StripedObjects.data_range, told by the columns that can be read."""
        return await self._columns.data_range(offset, size, frozenset(self._lost_columns()))

    def _touched(self, offset: int, length: int) -> Iterable[int]:
        """The data columns that hold a range of the file."""
        first, last = offset // self._layout.unit, (offset + length - 1) // self._layout.unit
        width = self._layout.width
        return (
            range(width)
            if last - first + 1 >= width
            else {unit % width for unit in range(first, last + 1)}
        )

    def _sources(self, touched: Iterable[int]) -> list[int | None]:
        """For each data column, the column to read it from; None for one of ``touched`` that none
        is good for.
        """
        sources: list[int | None] = list(range(self._layout.width))
        for column in touched if self._layout.parity else sources[:]:
            copies = self._copies(column)
            sources[column] = next((copy for copy in copies if self._columns.is_good(copy)), None)
            if sources[column] is None and column not in touched:
                sources[column] = column
        return sources

    def _copies(self, column: int) -> tuple[int, ...]:
        """Those that hold the bytes of a data column and may be read; which comes first depends on
        the file.
        """
        copies = self._layout.copies(column)
        first = self._key[0] % len(copies)
        return tuple(copy for copy in copies[first:] + copies[:first] if not self._lost >> copy & 1)

    def _made_of(self, sources: tuple[int, ...]) -> StripedObjects | None:
        """None if a server is not in the table any more."""
        if self._healthy is None or self._healthy[0] != sources:
            plain = Striped(
                self._layout.unit, tuple(self._layout.servers[column] for column in sources)
            )
            try:
                objects = StripedObjects(
                    self._servers, plain, *self._key, background=self._background
                )
            except Unavailable:
                return None
            if self._healthy is not None:
                self._healthy[1].close()
            self._healthy = sources, objects
            if self._closed:
                objects.close()  # for one more read, of somebody who has been overtaken
        return self._healthy[1]

    def _delay_s(self, sources: Iterable[int], length: int) -> float:
        latencies = [self._columns.server(column).latency for column in sources]
        return self._servers.hedging.delay_s(latencies, length)

    async def _read_degraded(
        self, runs: Sequence[Run], sources: Sequence[int | None], size: int, fetch_all: FetchAll
    ) -> bool:
        """Fill the memory of ``runs``, with one request for each range of a column that is needed;
        those of data columns without a source are told by parity. Whether that has worked; else
        nothing counts. Does not wait for slow servers."""
        columns = self._columns
        lost = self._lost
        good = [
            c for c in range(len(self._layout.servers)) if not lost >> c & 1 and columns.is_good(c)
        ]
        others = good[: self._layout.width] if self._layout.parity else []
        if len(others) < self._layout.width and any(sources[index] is None for index, _, _ in runs):
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
        """Fill the memory of ``runs``, by way of ``buffers`` for ``ranges``; False if these end too
        early. Blocks.
        """
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
        """Fill the memory of ``runs`` from what was read."""
        held: dict[int, list[tuple[int, memoryview]]] = {}
        for (column, start, _), answer in zip(ranges, answers, strict=True):
            held.setdefault(column, []).append((start, answer))

        def found(column: int, offset: int, length: int) -> memoryview:
            for start, answer in held.get(column, ()):
                if start <= offset < start + len(answer):
                    return answer[offset - start : offset - start + length]
            return _NOTHING

        for index, offset, parts in runs:
            if sources[index] is not None:
                whole = found(sources[index], offset, sum(map(len, parts)))
                if not any(
                    answer is parts[0] for answer in answers
                ):  # else it was read to where it belongs
                    scatter(whole, parts)
                continue
            for part in parts:
                units = {column: found(column, offset, len(part)) for column in others}
                code_of(self._layout.width, self._layout.parity).reconstruct(units, index, part)
                offset += len(part)
        return True

    async def _read_around(
        self, offset: int, length: int, size: int, hedged: bool = False
    ) -> memoryview:
        """``hedged``: nobody waits for the columns themselves."""
        buffer = self._servers.buffers.take(length)
        await self._all(runs_of(self._layout, offset, buffer), size, hedged)
        return buffer

    async def _all(self, runs: Sequence[Run], size: int, hedged: bool) -> None:
        if len(runs) == 1:
            await self._tell(runs[0], size, hedged)
        elif runs:
            await run_all(*(partial(self._tell, run, size, hedged) for run in runs))

    async def _tell(self, run: Run, size: int, hedged: bool) -> None:
        """Fill the run's memory, from whichever columns can tell its bytes."""
        index, offset, parts = run
        length = sum(map(len, parts))
        copies = sorted(self._copies(index), key=lambda copy: not self._columns.is_good(copy))
        attempts: list[Callable[[], Any]] = [
            partial(self._columns.exact, copy, offset, length, size) for copy in copies
        ]
        if self._layout.parity:
            others = partial(
                self._columns.reconstruct,
                index,
                offset,
                length,
                size,
                frozenset(self._lost_columns()),
            )
            attempts.insert(1 if copies and self._columns.is_good(copies[0]) else 0, others)
        if not attempts:
            raise Unavailable(
                f"inode {self._key[0]}, object {self._key[1]}: all copies of column {index} are lost"
            )
        delay_s = (
            HEAD_START_S
            if hedged
            else self._delay_s(filter(self._columns.is_good, copies[:1]), length)
        )
        [(winner, data)] = (await some_of(attempts, 1, delay_s)).items()
        if hedged and winner and copies and not self._lost >> copies[0] & 1:
            self._columns.server(copies[0]).latency.was_late()
        scatter(data, parts)

    def _lost_columns(self) -> list[int]:
        return [column for column in range(len(self._layout.servers)) if self._lost >> column & 1]

    def _short(self, column: int) -> None:
        """An object lacks bytes that it must have."""
        if not self._lost >> column & 1:
            self._lost |= 1 << column
            ino, oid = self._key
            self._on_damage(oid, ino, column)

    # --- writes ---

    async def write(self, offset: int, data: bytes | memoryview, ranges: Ranges = ()) -> None:
        """Write whole rows (the last may be the end of the file) of an oid that is new, to all
        columns.

        ``ranges`` of the file, if given, are all of it that are not holes, which stay holes. A
        column that fails is left out from then on. Raises what failed if too many have.
        """
        memory = memoryview(data)
        calls = []
        for start, end in ranges or ((offset, offset + len(memory)),):
            for index, object_offset, parts in runs_of(
                self._layout, start, memory[start - offset : end - offset]
            ):
                for column in self._layout.copies(index):
                    calls.append((column, self._columns.write_now, (column, object_offset, parts)))
        if not self._layout.parity:
            await self._run(calls)
            return
        working = [
            c
            for c, server in enumerate(self._layout.servers)
            if self._servers.find(server) is not None
        ]
        while True:
            spans = self._parity_of(offset, memory, ranges)
            column = next(c for c in working if not self._failed >> c & 1)
            await self._run([*calls, (column, encode_rows, (self._layout, spans))])
            if not self._failed >> column & 1:
                break
            calls = []  # nobody has encoded it, or nobody knows that
        await self._run(
            [
                (column, self._columns.write_now, (column, object_offset, [parity[number]]))
                for object_offset, _, parity in spans
                for number, column in enumerate(
                    range(self._layout.width, len(self._layout.servers))
                )
            ]
        )

    def _parity_of(
        self, offset: int, memory: memoryview, ranges: Ranges
    ) -> list[tuple[int, memoryview, list[memoryview]]]:
        """The rows that have to be encoded: offset in the parity objects, bytes of the file, and
        memory for the result.
        """
        row, unit = self._layout.row, self._layout.unit
        spans: list[list[int]] = []
        for start, end in ranges or ((offset, offset + len(memory)),):
            first, last = start // row * row, min(-(-end // row) * row, offset + len(memory))
            if spans and first <= spans[-1][1]:
                spans[-1][1] = max(last, spans[-1][1])
            else:
                spans.append([first, last])
        take = self._servers.buffers.take
        return [
            (
                first // row * unit,
                memory[first - offset : last - offset],
                [
                    take(self._layout.object_length(0, last - first))
                    for _ in range(self._layout.parity)
                ],
            )
            for first, last in spans
        ]

    async def settle(self, size: int) -> None:
        """Objects exist on return as a file of ``size`` bytes calls for, except those of columns
        that fail. Raises what failed if too many have."""
        lengths = {c: self._layout.object_length(c, size) for c in range(len(self._layout.servers))}
        self._present = [column for column, length in lengths.items() if length]
        settled = await self._run(
            [(c, self._columns.settle_now, (c, lengths[c])) for c in self._present]
        )
        self._blocks = sum(
            max(
                (settled[copy] for copy in self._layout.copies(column) if copy in settled),
                default=lengths[column] // 512,
            )
            for column in range(self._layout.width)
            if lengths[column]
        )

    async def sync(self, spare: int = 0) -> int:
        """The objects are durable on return, except those of the mask that is returned, which
        failed.

        Raises what failed if not even ``spare`` more columns (at most one less than the layout
        tolerates) than the bytes need are durable.
        """
        await self._run([(column, self._columns.sync_now, (column,)) for column in self._present])
        self._check(min(spare, self._layout.tolerates - 1))
        return self._failed

    async def _run(self, calls: Iterable[tuple[int, Callable[..., Any], tuple]]) -> dict[int, Any]:
        """Run (column, function, args) where the column has not failed; by column, what those
        returned that do not fail now (of several, any)."""
        usable = [call for call in calls if not self._failed >> call[0] & 1]
        results = await self._columns.attempt(usable)
        for (column, _, _), result in zip(usable, results, strict=True):
            if isinstance(result, FsError):
                self._failed |= 1 << column
                self._error = self._error or result
        self._check(0)
        return {
            call[0]: r
            for call, r in zip(usable, results, strict=True)
            if not isinstance(r, FsError)
        }

    def _check(self, spare: int) -> None:
        if self._error is not None and self._layout.spare(self._failed) < spare:
            raise self._error

    def blocks(self) -> int | None:
        """Blocks of 512 bytes that the file's bytes took when they were settled, once and without
        parity, as du(1) shows for files without protection; None if they were not."""
        return self._blocks

    def close_idle(self) -> int:
        """As StripedObjects.close_idle."""
        healthy = 0 if self._healthy is None else self._healthy[1].close_idle()
        return healthy + self._columns.close_idle()

    def close(self) -> None:
        """As StripedObjects.close."""
        self._closed = True
        self._columns.close()
        self._rows.forget()
        if self._healthy is not None:
            self._healthy[1].close()
