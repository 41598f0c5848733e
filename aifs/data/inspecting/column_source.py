"""The right bytes of one column of an object set: read from its own object, or told by the others,
and checked.

A column that is only moved is read where it lies, and compared with the file's checksums where
these cover whole runs of it; else a wrong byte stays as wrong as it was, for a scrub to find. A
column that others have to tell is never made of bytes that cannot be right: each MiB of the file
that it has a part in is told without the columns that may be wrong, until the checksum is right.
"""

from collections.abc import Iterator
from functools import partial

from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.checks import Untold, source_of, suspect_sets
from aifs.data.checking.digests import DIGEST_BYTES, DIGESTS_AT_ONCE, HASHED, digests_of
from aifs.data.objects.checked_reads import LoadDigests
from aifs.data.objects.coding import code_of
from aifs.data.objects.columns import Columns, columns_of
from aifs.data.patience import Hanging
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.server import DataServer
from aifs.data.servers import Servers

_PIECE = 4 << 20


class ColumnSource:
    """Reads one column of ``columns``. The file's bytes, its layout and its size do not change
    meanwhile.
    """

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
        """``unread``: mask of columns that must not be read. ``worker``: the server in whose
        threads bytes are compared with checksums.
        """
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
        """Whether each checksum covers one run of the column, or none of it."""
        return self._data is not None and (
            self._layout.width == 1 or self._layout.unit % HASHED == 0
        )

    @property
    def _piece(self) -> int:
        """How many bytes of the column are told at a time."""
        if self._is_aligned:
            return _PIECE
        return min(max(_PIECE // self._layout.row, 1) * self._layout.unit, _PIECE)

    async def skip_holes(self, there: Columns) -> None:
        """Leave out what is zeros anyway: holes of the file, where ``there`` has none of the
        column's bytes either. For a file without checksums."""
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
        """The right bytes, in ``part``, or memory of its length. Raises Unavailable, which says
        why they cannot be told.
        """
        own: FsError | None = None
        if not self._unread >> self._column & 1:
            try:
                if await self._read_own(offset, part):
                    return part
                own = Unavailable(f"column {self._column} has wrong bytes")
            except FsError as error:
                if isinstance(
                    error, Hanging
                ):  # which may write to what it was given at any time later
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
        """By way of all whole MiBs of the file that have to do with it."""
        layout, unit = self._layout, self._layout.unit
        if self._data is None:
            first, last = (
                offset // unit * layout.row,
                ((offset + len(part) - 1) // unit + 1) * layout.row,
            )
        else:
            first, last = (
                self._layout.file_offset(self._column, offset),
                self._layout.file_offset(self._column, offset + len(part) - 1) + 1,
            )
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
        """Fill ``part`` with the parity of the rows that ``data`` begins with."""
        layout, unit = self._layout, self._layout.unit
        for number, start in enumerate(range(0, len(part), unit)):
            row = data[number * layout.row : (number + 1) * layout.row]
            units = [row[at : at + unit] for at in range(0, layout.row, unit)]
            targets = [memoryview(bytearray(len(units[0]))) for _ in range(layout.parity)]
            targets[self._column - layout.width] = part[start : start + unit]
            code_of(layout.width, layout.parity).encode(units, targets)

    async def _tell(self, first: int, data: memoryview) -> None:
        """Fill ``data`` with bytes of the file from ``first`` on, told without the column
        itself.
        """
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
        """Fill ``data`` with bytes of the file, told by columns that are not in the mask
        ``unread``: one run of each is read. Their checksums if ``hashed``, else b"".

        Raises Unavailable.
        """
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
                start, target = (
                    object_offset - low,
                    data[file_offset - first : file_offset - first + length],
                )
                source = sources[index]
                if source is None:
                    parts = {column: unit[start : start + length] for column, unit in units.items()}
                    code_of(layout.width, layout.parity).reconstruct(parts, index, target)
                else:
                    target[:] = held[source][start : start + length]
            return digests_of(data) if hashed else b""

        return await self._servers.run(self._worker, put_together)

    async def _fetch(self, low: int, lengths: dict[int, int]) -> dict[int, memoryview]:
        """So many bytes of each of these columns, from ``low`` on."""
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
        """Columns that were wrong, or failed, in one place are doubted first in the next one."""
        doubtful = unread & ~self._unread & ~(1 << self._column)
        self._doubted = unread if doubtful else 0
        if certain:
            self.wrong.update(columns_of(doubtful))

    async def _is_right(self, first: int, data: memoryview) -> bool:
        """Whether bytes of the file, of whole MiBs, have their checksums; True where there are
        none.
        """
        expected = await self._expected(first, len(data))
        return not expected or await self._servers.run(self._worker, digests_of, data) == expected

    async def _expected(self, first: int, length: int) -> bytes:
        """The checksums of whole MiBs of the file; b"" where there are none."""
        expected = b""
        number, end = first // HASHED, -(-(first + length) // HASHED)
        while number < end:
            start, digests = await self._load(number)
            stop = min(end, start + DIGESTS_AT_ONCE)
            expected += digests[(number - start) * DIGEST_BYTES : (stop - start) * DIGEST_BYTES]
            number = stop
        return expected
