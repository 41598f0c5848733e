"""Moving whole files between burst copies and the capacity tier.

Pieces are read in workers of the source and written in those of the target, several at a time, so
that hung devices hold up nobody else. They are read: a mapping would end the process at a failing
device or a cut file; a reused buffer is not slower.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import trio

from aifs.burst.copy import BurstCopy
from aifs.core import faults, files
from aifs.core.budget import Budget
from aifs.core.errors import FsError, Unavailable
from aifs.core.tasks import run_all
from aifs.data.checks import HASHED, digests_of, join_digests
from aifs.data.objects.columns import Columns
from aifs.data.objects.holes import Source, pieces_with_data, without_zeros
from aifs.data.objects.object_set import ObjectSet
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.workers import Workers, gather

_WRITTEN = faults.declare(
    "burst.drain.written", "new objects hold the bytes of a burst copy, not synced"
)

_LOOK_S = 0.5
"""Pause between looks of a waiting task at limit and others."""

PIECE = 4 << 20
_SMALL = 256 << 10
_PIECES_AT_ONCE = 4  # of one file
_COLUMN_PIECES_AT_ONCE = 3


class Limiter:
    """Bytes per second for all that share it, 0 for any number. Callers wait once, in order."""

    def __init__(self, rate: int, is_lifted: Callable[[], bool] = lambda: False) -> None:
        """``is_lifted`` says whether the limit does not count just now."""
        self.rate = rate
        self._is_lifted = is_lifted
        self._free_at = 0.0

    def set_rate(self, rate: int) -> None:
        """From now on; tasks that wait already do so no longer than before."""
        self.rate, self._free_at = rate, 0.0

    @property
    def counts(self) -> bool:
        """Whether somebody may have to wait just now."""
        return self.rate > 0 and not self._is_lifted()

    async def take(self, count: int) -> None:
        """Wait until ``count`` more bytes may be moved. Does not suspend if at once."""
        if not self.counts:
            return
        now = trio.current_time()
        start = max(self._free_at, now)
        self._free_at = start + count / self.rate
        while start > now and self.counts:
            await trio.sleep(min(start - now, _LOOK_S))
            now = trio.current_time()


class ColumnReader(Protocol):
    """The bytes that belong in a column."""

    async def following(self) -> tuple[int, memoryview] | None:
        """The next bytes, and their offset; None at the end. Several tasks may ask. Raises
        Unavailable."""


class TargetFails(Exception):
    """Bytes could not be written to a column."""

    def __init__(self, error: FsError) -> None:
        super().__init__(error)
        self.error = error


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except FsError as error:
        raise TargetFails(error) from error


@dataclass(slots=True)
class _Piece:
    """Bytes of a file in memory, and which of them are not holes."""

    data: memoryview
    ranges: list[tuple[int, int]]
    digests: bytes


class Mover:
    """All moving of bytes between the tiers. Used from one trio thread."""

    def __init__(
        self,
        budget: Budget,
        limiter: Limiter,
        io_priority: str,
        is_in_the_way: Callable[[], bool] = lambda: False,
        make_way: Callable[[], Awaitable[None]] | None = None,
        is_urgent: Callable[[], bool] = lambda: False,
        buffers: BudgetedBuffers | None = None,
    ) -> None:
        """``io_priority``: see core.files. While ``is_in_the_way`` (others need the processor), one
        piece is moved at a time. ``make_way`` is awaited before each. ``is_urgent``: somebody
        waits. ``buffers``: the budget's, if shared."""
        self.moved_bytes = 0
        self.io_priority = io_priority
        self.is_in_the_way = is_in_the_way
        self.make_way = make_way
        self.is_urgent = is_urgent
        self._moving = 0
        self._waiting = trio.lowlevel.ParkingLot()
        self._limiter = limiter
        self.buffers = buffers or BudgetedBuffers(budget)

    # --- the limits ---

    @property
    def is_free(self) -> bool:
        """Whether nothing limits it just now: then ``begin`` does not wait."""
        is_held = self._limiter.counts or self.is_in_the_way()
        return not is_held and self.make_way is None

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit of bytes per second, which may be lifted just now."""
        return self._limiter.rate > 0

    async def begin(self, length: int) -> None:
        """Wait until a piece of this length may be moved, until ``end``. 0: it calls ``take``
        itself."""
        if self.make_way is not None:
            await self.make_way()
        await self.take(length)
        while self._moving and self.is_in_the_way():
            with trio.move_on_after(_LOOK_S):  # a mover may wait for memory that we hold
                await self._waiting.park()
        self._moving += 1

    def end(self, moved: int) -> None:
        """A piece that was begun is done with; ``moved``: so many bytes of it."""
        self._moving -= 1
        self.moved_bytes += moved
        self._waiting.unpark_all()

    async def take(self, length: int) -> None:
        """Wait until the limit lets ``length`` bytes pass."""
        await self._limiter.take(length)

    # --- pieces ---

    async def drain_out(
        self,
        copy: BurstCopy,
        size: int,
        objects: ObjectSet,
        cancelled: Callable[[], bool],
        spare: int = 0,
        sparse: bool = False,
    ) -> bytes | None:
        """Copy an unchanging burst copy's ``size`` bytes to new ``objects``; durable, with
        ``spare`` more columns than needed of protected ones.

        Returns the checksums (see join_digests); None if ``cancelled``, asked between pieces.
        ``sparse``: its holes stay, unread. Raises NoSpace, QuotaExceeded, Unavailable.
        """
        piece_size = _whole_rows(objects.row)
        offsets: Sequence[int] = range(0, size, piece_size)
        if sparse:
            offsets = await self._run(copy, _pieces_with_data, size, piece_size)

        async def read(offset: int, buffer: memoryview) -> _Piece:
            return await self._run(copy, _read_piece, offset, buffer, sparse)

        return await self._store(read, offsets, size, objects, cancelled, spare)

    async def store_anew(
        self,
        source: Source,
        size: int,
        objects: ObjectSet,
        workers: Workers,
        cancelled: Callable[[], bool],
        spare: int = 0,
        sparse: bool = False,
    ) -> bytes | None:
        """``drain_out`` of a settled file on the capacity tier, hashed in ``workers``. ``sparse``:
        holes are not read. Each MiB of zeros becomes a hole."""
        piece_size = _whole_rows(objects.row)
        offsets: Sequence[int] = range(0, size, piece_size)
        if sparse:
            offsets = [offset async for offset in pieces_with_data(source, size, piece_size)]

        async def read(offset: int, buffer: memoryview) -> _Piece:
            await source.read_into(offset, buffer, size)
            call = (self.io_priority, _hashed_piece, offset, buffer)
            return (await gather([(workers, files.at_priority, call)]))[0]

        return await self._store(read, offsets, size, objects, cancelled, spare)

    async def _store(
        self,
        read: Callable[[int, memoryview], Awaitable[_Piece]],
        offsets: Sequence[int],
        size: int,
        objects: ObjectSet,
        cancelled: Callable[[], bool],
        spare: int,
    ) -> bytes | None:
        piece_size = _whole_rows(objects.row)
        digests: dict[int, bytes] = {}  # by offset of the piece

        async def move(offset: int, buffer: memoryview) -> None:
            piece = await read(offset, buffer)
            if piece.ranges:
                await objects.write(offset, piece.data, piece.ranges)
            digests[offset] = piece.digests

        if not await self._move_pieces(move, offsets, size, piece_size, cancelled):
            return None
        await objects.settle(size)
        faults.reach(_WRITTEN)
        found = join_digests(digests, size, piece_size, objects.is_protected)
        await objects.sync(spare)
        return found

    async def _move_pieces(
        self,
        move: Callable[[int, memoryview], Awaitable[None]],
        offsets: Sequence[int],
        size: int,
        piece_size: int,
        cancelled: Callable[[], bool],
    ) -> bool:
        """``_move`` pieces of a file: ``move`` gets each offset, and memory."""

        async def move_one(piece: tuple[int, int]) -> int:
            offset, length = piece
            await move(offset, await self._buffer(length))
            return length

        pieces = ((offset, min(piece_size, size - offset)) for offset in offsets)
        return await self._move(move_one, pieces, cancelled, min(_PIECES_AT_ONCE, len(offsets)))

    async def _move(
        self,
        move: Callable[[tuple[int, int]], Awaitable[int]],
        pieces: Iterable[tuple[int, int]],
        cancelled: Callable[[], bool],
        at_once: int,
    ) -> bool:
        """Call ``move`` with ``pieces``, some at a time; it returns the bytes moved, at most a
        piece's second number, which the limit is asked for. False if ``cancelled`` was ever true:
        bytes are missing."""
        skipped = False

        async def move_one(piece: tuple[int, int]) -> None:
            nonlocal skipped
            moved = 0
            await self.begin(piece[1])
            try:
                if cancelled():
                    skipped = True
                else:
                    moved = await move(piece)
            finally:
                self.end(moved)

        await _in_parallel(move_one, pieces, at_once)
        return not skipped and not cancelled()

    async def begin_column(self, sink: Columns, column: int) -> bool:
        """Before a column is written; whether it has no object. An immutable one is removed: the
        column is ``unread``. Raises TargetFails."""
        with _writing():
            if not sink.server(column).storage.in_place:
                await sink.settle(column, 0)
            return await sink.read(column, 0, memoryview(bytearray(1))) == 0

    async def make_column(
        self,
        reader: ColumnReader,
        sink: Columns,
        column: int,
        length: int,
        cancelled: Callable[[], bool],
        sparse: bool,
    ) -> bool:
        """Copy all of ``reader`` to a column's object of this length, durably. ``sparse``: skip
        MiBs of zeros in a new one. False if ``cancelled``. Raises errors of ``reader``; TargetFails
        for failed writes."""
        ended = False

        def pieces() -> Iterator[tuple[int, int]]:
            """How long each is, and how many there are, the reader finds out."""
            while not ended and not cancelled():
                yield 0, 0

        async def move(_: tuple[int, int]) -> int:
            nonlocal ended
            found = await reader.following()
            if found is None:
                ended = True
                return 0
            offset, part = found
            await self.take(len(part))
            with _writing():
                for start, run in without_zeros(part) if sparse else [(0, part)]:
                    await sink.write(column, offset + start, run)
            return len(part)

        if not await self._move(move, pieces(), cancelled, _COLUMN_PIECES_AT_ONCE):
            return False
        with _writing():
            await sink.settle(column, length)
            await sink.sync(column)
        return True

    async def stage_in(
        self,
        source: Source,
        size: int,
        copy: BurstCopy,
        cancelled: Callable[[], bool],
        sparse: bool = False,
    ) -> bool:
        """Copy a settled file into a new, empty burst copy, unsynced. ``sparse``: holes are not
        read. False if ``cancelled``. Each MiB of zeros becomes a hole. Nothing of ours is open for
        writing on return. Raises NoSpace, QuotaExceeded, Unavailable."""
        whole = 0 < size <= PIECE
        write = _write_all if whole else _write_piece

        async def move(offset: int, buffer: memoryview) -> None:
            await source.read_into(offset, buffer, size)
            await self._run(copy, write, offset, buffer)

        offsets: Sequence[int] = range(0, size, PIECE)
        if not whole:
            await copy.truncate(size)
            if sparse:
                offsets = [offset async for offset in pieces_with_data(source, size, PIECE)]
        done = await self._move_pieces(move, offsets, size, PIECE, cancelled)
        if not whole:
            await copy.release_writers()
        return done

    async def read_whole(self, copy: BurstCopy, size: int) -> bytes:
        """All bytes of a small burst copy. Raises Unavailable."""
        if size == 0:
            return b""
        piece = await self._run(copy, _read_piece, 0, memoryview(bytearray(size)), False)
        return bytes(piece.data)

    async def _buffer(self, length: int) -> memoryview:
        # Of few sizes, so that those that are free fit.
        return (
            await self.buffers.take(_SMALL if length <= _SMALL else -(-length // PIECE) * PIECE)
        )[:length]

    async def _run(self, copy: BurstCopy, function: Callable[..., Any], *args: Any) -> Any:
        call = (self.io_priority, function, copy, *args)
        return (await gather([(copy.device.workers, files.at_priority, call)]))[0]


async def _in_parallel(
    move: Callable[[tuple[int, int]], Awaitable[None]],
    pieces: Iterable[tuple[int, int]],
    at_once: int,
) -> None:
    """Call ``move`` with ``pieces``, some at a time; none after the first error, which is
    raised."""
    if at_once == 1:  # most files are one piece; a nursery for each would be felt
        for piece in pieces:
            await move(piece)
        return

    following = iter(pieces)
    failed = False

    async def work() -> None:
        nonlocal failed
        try:
            for piece in following:
                await trio.lowlevel.checkpoint()
                if failed:
                    return
                await move(piece)
        except BaseException:
            failed = True
            raise

    await run_all(*[work] * at_once)


def _whole_rows(row: int) -> int:
    """A length, about PIECE or more, of whole rows and ranges of checksums."""
    step = math.lcm(row, HASHED)
    return max(PIECE // step * step, step)


def _pieces_with_data(copy: BurstCopy, size: int, piece_size: int) -> list[int]:
    """Offsets of the pieces that are not holes, and of the last one."""
    ranges = copy.device.call("read", (0, copy.id), files.data_ranges, copy.open_now(), 0, size)
    pieces = {
        piece
        for start, end in ranges
        for piece in range(start // piece_size, (end - 1) // piece_size + 1)
    }
    return [piece * piece_size for piece in sorted(pieces | {(size - 1) // piece_size})]


def _read_piece(copy: BurstCopy, offset: int, buffer: memoryview, sparse: bool) -> _Piece:
    device, key, end = copy.device, (0, copy.id), offset + len(buffer)
    fd = copy.open_now()
    ranges = [(offset, end)]
    if sparse:
        ranges = device.call("read", key, files.data_ranges, fd, offset, len(buffer))
    if device.read(key, fd, buffer, offset) < len(buffer):
        raise Unavailable(f"{device.name}: {device.where(key)} ends before byte {end}")
    return _Piece(buffer, ranges, digests_of(buffer))


def _hashed_piece(offset: int, buffer: memoryview) -> _Piece:
    ranges: list[tuple[int, int]] = []
    for at, part in without_zeros(buffer):
        start, end = offset + at, offset + at + len(part)
        if ranges and ranges[-1][1] == start:
            start = ranges.pop()[0]
        ranges.append((start, end))
    return _Piece(buffer, ranges, digests_of(buffer))


def _write_piece(copy: BurstCopy, offset: int, buffer: memoryview) -> None:
    for start, part in without_zeros(buffer):
        copy.write_now(offset + start, part)


def _write_all(copy: BurstCopy, _: int, buffer: memoryview) -> None:
    copy.fill_now(without_zeros(buffer), len(buffer))
