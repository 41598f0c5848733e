"""The right bytes of one column of an object set: read from its object, or told by others.

A column that only moves is read in place, and compared with checksums that cover whole runs of it;
else a wrong byte stays for a scrub to find. A column computed from others is right: each MiB of the
file that it is part of is computed without the columns that may be wrong, until its checksum fits.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.data.checks import (
    DIGEST_BYTES,
    DIGESTS_AT_ONCE,
    HASHED,
    ContainerCheck,
    Untold,
    digests_of,
    source_of,
    suspect_sets,
)
from aifs.data.inspecting.inspection import Inspection
from aifs.data.inspecting.window import Loss, Verdict
from aifs.data.objects.checked_reads import LoadDigests
from aifs.data.objects.coding import code_of
from aifs.data.objects.columns import Columns, columns_of
from aifs.data.patience import Hanging
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import STRIPE

_PIECE = 4 << 20


class ColumnSource:
    """Reads one column of ``columns``. Bytes, layout and size of the file do not change."""

    def __init__(
        self,
        servers: Servers,
        buffers: BudgetedBuffers,
        columns: Columns,
        size: int,
        column: int,
        unread: int,
        load: LoadDigests,
        worker: DataServer,
    ) -> None:
        """``unread``: mask of columns not to read. ``worker``: server whose threads check bytes."""
        self._servers = servers
        self._buffers = buffers
        self._columns = columns
        self._layout = layout = columns.layout
        self._size = size
        self._column = column
        self._unread = unread
        self._load = load
        self._worker = worker
        self._data = layout.data_column(column)
        self._doubted = 0  # mask of columns that were wrong, or failed, in the place before
        self._length = layout.object_length(column, size)
        self._starts = iter(range(0, self._length, self._piece))
        self.wrong: set[int] = set()
        """Other columns that turned out to have wrong bytes."""

    @property
    def _is_aligned(self) -> bool:
        """Whether each checksum covers one run of the column, or none."""
        return self._data is not None and (
            self._layout.width == 1 or self._layout.unit % HASHED == 0
        )

    @property
    def _piece(self) -> int:
        if self._is_aligned:
            return _PIECE
        return min(max(_PIECE // self._layout.row, 1) * self._layout.unit, _PIECE)

    async def skip_holes(self, there: Columns) -> None:
        """Skip zeros: holes of a file without checksums, where ``there`` has no bytes either."""
        layout, starts = self._layout, set[int]()
        for find in (
            partial(self._columns.data_range, unread=self._unread),
            partial(there.any_data, [self._column]),
        ):
            at = 0
            while at < self._size:
                start, end = await find(at, self._size)
                at = -(-end // layout.row) * layout.row
                first, last = start // layout.row * layout.unit, at // layout.row * layout.unit
                starts.update(
                    range(first - first % self._piece, min(last, self._length), self._piece)
                )
        self._starts = iter(sorted(starts))

    async def following(self) -> tuple[int, memoryview] | None:
        """As of ContainerColumn. Raises Untold."""
        offset = next(self._starts, None)
        if offset is None:
            return None
        part = (await self._buffers.take(self._piece))[: self._length - offset]
        try:
            return offset, await self._fill(offset, part)
        except FsError as error:
            raise Untold(str(error)) from error

    async def _fill(self, offset: int, part: memoryview) -> memoryview:
        """The right bytes, in ``part`` or other memory. Raises Unavailable, with the reason."""
        own: FsError | None = None
        if not self._unread >> self._column & 1:
            try:
                if await self._read_own(offset, part):
                    return part
                own = Unavailable(f"column {self._column} has wrong bytes")
            except FsError as error:
                if isinstance(error, Hanging):
                    # It may write to what it was given at any time later.
                    part = (await self._buffers.take(self._piece))[: len(part)]
                own = error
        if not self._layout.is_protected:
            raise own or Unavailable("its bytes lie nowhere else")
        if self._is_aligned:
            for start in range(0, len(part), HASHED):
                run = part[start : start + HASHED]
                await self._tell(self._layout.file_offset(self._column, offset + start), run)
        else:
            await self._tell_rows(offset, part)
        return part

    async def _read_own(self, offset: int, part: memoryview) -> bool:
        done = await self._columns.read(self._column, offset, part)
        if done < len(part):
            raise Unavailable(f"column {self._column} ends before byte {offset + len(part)}")
        if not self._is_aligned:
            return True
        runs = range(0, len(part), HASHED)
        return all(
            [
                await self._is_right(
                    self._layout.file_offset(self._column, offset + at), part[at : at + HASHED]
                )
                for at in runs
            ]
        )

    async def _tell_rows(self, offset: int, part: memoryview) -> None:
        """By way of all whole MiBs of the file that overlap."""
        layout, unit = self._layout, self._layout.unit
        if self._data is None:
            first = offset // unit * layout.row
            last = ((offset + len(part) - 1) // unit + 1) * layout.row
        else:
            first = self._layout.file_offset(self._column, offset)
            last = self._layout.file_offset(self._column, offset + len(part) - 1) + 1
        first -= first % HASHED
        last = min(-(-last // HASHED) * HASHED, self._size)
        data = (await self._buffers.take(-(-(last - first) // HASHED) * HASHED))[: last - first]
        await self._tell(first, data)
        if self._data is None:
            await self._servers.run(
                self._worker, self._encode, data[offset // unit * layout.row - first :], part
            )
            return
        for index, object_offset, file_offset, length in layout.extents(first, len(data)):
            start, end = max(object_offset, offset), min(object_offset + length, offset + len(part))
            if index == self._data and start < end:
                at = file_offset - first + start - object_offset
                part[start - offset : end - offset] = data[at : at + end - start]

    def _encode(self, data: memoryview, part: memoryview) -> None:
        """Fill ``part`` with the parity of the first rows of ``data``."""
        layout, unit = self._layout, self._layout.unit
        for number, start in enumerate(range(0, len(part), unit)):
            row = data[number * layout.row : (number + 1) * layout.row]
            units = [row[at : at + unit] for at in range(0, layout.row, unit)]
            targets = [memoryview(bytearray(len(units[0]))) for _ in range(layout.parity)]
            targets[self._column - layout.width] = part[start : start + unit]
            code_of(layout.width, layout.parity).encode(units, targets)

    async def _tell(self, first: int, data: memoryview) -> None:
        """Fill ``data`` with bytes of the file from ``first`` on, without the column itself."""
        failure: FsError | None = None
        expected = await self._expected(first, len(data))
        for unread in self._suspicions(first, len(data)):
            try:
                digests = await self._read_without(unread, first, data, bool(expected))
            except FsError as error:
                failure = failure or error
                continue
            if digests == expected:
                self._remember(unread, certain=failure is None)
                return
        if failure is not None:
            raise failure
        last = first + len(data) - 1
        raise Unavailable(
            f"bytes {first} to {last} do not have their checksum, whichever columns tell them"
        )

    async def _read_without(self, unread: int, first: int, data: memoryview, hashed: bool) -> bytes:
        """Fill ``data`` with bytes of the file, by one run of each column outside ``unread``.
        Returns checksums if ``hashed``, else b"". Raises Unavailable."""
        layout, size = self._layout, self._size
        extents = list(layout.extents(first, len(data)))
        low = min(extent.object_offset for extent in extents)
        high = max(extent.object_offset + extent.length for extent in extents)
        sources = {
            index: source_of(layout, index, unread)
            for index in {extent.column for extent in extents}
        }
        usable = [column for column in range(len(layout.servers)) if not unread >> column & 1]
        needed = {source for source in sources.values() if source is not None}
        if None in sources.values():
            needed.update(usable[: layout.width])
        held = await self._fetch(
            low, {c: max(min(layout.object_length(c, size), high) - low, 0) for c in needed}
        )
        if None in sources.values() and len(usable) < layout.width:
            raise Unavailable(
                f"{len(usable)} of {layout.width} columns are left to tell the others"
            )

        def put_together() -> bytes:
            units = (
                {column: held[column] for column in usable[: layout.width]}
                if None in sources.values()
                else {}
            )
            for index, object_offset, file_offset, length in extents:
                start = object_offset - low
                target = data[file_offset - first : file_offset - first + length]
                source = sources[index]
                if source is None:
                    parts = {column: unit[start : start + length] for column, unit in units.items()}
                    code_of(layout.width, layout.parity).reconstruct(parts, index, target)
                else:
                    target[:] = held[source][start : start + length]
            return digests_of(data) if hashed else b""

        return await self._servers.run(self._worker, put_together)

    async def _fetch(self, low: int, lengths: dict[int, int]) -> dict[int, memoryview]:
        ranges = [(column, low, length) for column, length in lengths.items() if length]
        held = dict.fromkeys(lengths, memoryview(b""))
        for (column, _, length), answer in zip(
            ranges, await self._columns.fetch_all(ranges), strict=True
        ):
            if isinstance(answer, FsError):
                raise answer
            self._columns.require_whole(column, low, answer, length, self._size)
            held[column] = answer
        return held

    def _suspicions(self, first: int, length: int) -> Iterator[int]:
        if self._doubted:
            yield self._doubted
        touched = {extent.column for extent in self._layout.extents(first, length)}
        yield from suspect_sets(self._layout, touched, self._unread | 1 << self._column)

    def _remember(self, unread: int, certain: bool) -> None:
        """Doubt columns first that were wrong, or failed, before."""
        doubtful = unread & ~self._unread & ~(1 << self._column)
        self._doubted = unread if doubtful else 0
        if certain:
            self.wrong.update(columns_of(doubtful))

    async def _is_right(self, first: int, data: memoryview) -> bool:
        """Whether whole MiBs of the file match any checksums."""
        expected = await self._expected(first, len(data))
        return not expected or await self._servers.run(self._worker, digests_of, data) == expected

    async def _expected(self, first: int, length: int) -> bytes:
        """Checksums of whole MiBs of the file; b"" for none."""
        expected = b""
        number, end = first // HASHED, -(-(first + length) // HASHED)
        while number < end:
            start, digests = await self._load(number)
            stop = min(end, start + DIGESTS_AT_ONCE)
            expected += digests[(number - start) * DIGEST_BYTES : (stop - start) * DIGEST_BYTES]
            number = stop
        return expected


LoadLive = Callable[[], Awaitable[Sequence[tuple[int, int]]]]
"""Start and end of all chunks of a container that files need."""

_STEP = 2 * STRIPE


class _Dead:
    """Takes all up to ``end`` as it is."""

    def __init__(self, end: int) -> None:
        self.end = end

    def at(self, data: memoryview, offset: int, is_last: bool) -> tuple[int, bool | None] | None:
        return (min(len(data), self.end - offset), True) if offset < self.end else None


class ContainerColumn:
    """Tells one column of a container that nobody appends to, checked by its chunks' headers.

    It goes by windows, from the beginning; only judged bytes enter the column. A chunk that no
    columns give rightly is an error if a file needs it, else it stays as it is. A column of a coded
    container that only moves is copied as it is.
    """

    def __init__(
        self,
        servers: Servers,
        buffers: BudgetedBuffers,
        columns: Columns,
        size: int,
        column: int,
        unread: int,
        load_live: LoadLive,
    ) -> None:
        """``columns``: the container's. ``unread``: mask of columns not to read."""
        self.wrong: set[int] = set()
        """Other columns that turned out to have wrong bytes."""
        self._columns = columns
        self._buffers = buffers
        self._layout = layout = columns.layout
        self._container = columns.key[1]
        """Its id."""
        self._size = size
        self._column = column
        self._load_live = load_live
        self._is_copied = layout.parity > 0 and not unread >> column & 1
        """Whether the bytes of the column itself are copied, as long as they are right."""
        self._inspection = Inspection(servers, buffers, columns, size, unread=unread, step=_STEP)
        self._spare = self._not_needed(unread)
        """Mask of columns that are read only where others are not enough."""
        self._check: ContainerCheck | _Dead = self._new_check()
        """Of what follows: of chunks, or of bytes that nobody needs."""
        self._at = 0
        """Where in the container it goes on."""
        self._turn = trio.Lock()
        """Held by the task that reads the next piece."""

    def _new_check(self) -> ContainerCheck:
        return ContainerCheck(self._layout.row if self._layout.parity else 1)

    def _not_needed(self, unread: int) -> int:
        """The mask of columns read only if others are not enough."""
        layout = self._layout
        usable = [column for column in range(len(layout.servers)) if not unread >> column & 1]
        usable.sort(key=lambda column: (column != self._column, not self._columns.is_good(column)))
        return sum(1 << column for column in usable[layout.width :])

    async def following(self) -> tuple[int, memoryview] | None:
        """The next bytes of the column, and their offset; None at the end. Several tasks may ask.
        Raises Unavailable, with the reason."""
        async with self._turn:
            if self._is_copied:
                try:
                    return await self._copy()
                except FsError:
                    # All of it: only the first chunk's place is known.
                    self._is_copied = False
                    self._at = 0
                    self._spare = 0
            while self._at < self._size:
                verdict, offset, right = await self._inspection.tell(
                    self._at, self._check, self._column, self._spare
                )
                self.wrong |= {flaw.column for flaw in verdict.flaws if flaw.column != self._column}
                await self._go_on(verdict)
                if right:
                    return offset, right
            return None

    async def _copy(self) -> tuple[int, memoryview] | None:
        offset, end = self._at, self._layout.object_length(self._column, self._size)
        if offset == end:
            return None
        part = (await self._buffers.take(STRIPE))[: end - offset]
        if await self._columns.read(self._column, offset, part) < len(part):
            raise Unavailable(f"column {self._column} ends before byte {offset + len(part)}")
        self._at += len(part)
        return offset, part

    async def _go_on(self, verdict: Verdict) -> None:
        for loss in verdict.losses:
            await self._require_dead(loss)
        self._at = verdict.next
        if isinstance(self._check, _Dead) and self._at >= self._check.end:
            self._check = self._new_check()

    async def _require_dead(self, loss: Loss) -> None:
        """Go on behind bytes that nothing tells, if no file needs them. Raises Untold."""
        live = await self._load_live()
        end = loss.end
        if end < 0:  # of a header: the next place that is known
            end = min((start for start, _ in live if start > loss.start), default=self._size)
            self._check = _Dead(end)
        if self._inspection.failed or any(
            start < end and loss.start < stop for start, stop in live
        ):
            raise Untold(
                f"container {self._container}: bytes {loss.start} to {end - 1} are not what their "
                "checksums say, whichever columns tell them"
            )
