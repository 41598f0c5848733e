"""The sequence of an epoch: rows of blocks that each share gives, in order
(docs/guide/datasets.md). Pure arithmetic over an index; a beginning costs a window's blocks."""

import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple, Protocol

from aifs.core.errors import DatasetError
from aifs.datasets.index import Index

# The order of an epoch: permutations that are computed, never stored (REIMU, sec. 3; the cipher is
# a Feistel network with cycle walking: Black and Rogaway, Ciphers with Arbitrary Finite Domains,
# 2002).
#
# Algorithm number 1. Its output for a seed never changes: golden files hold it, and states that
# jobs have saved rely on it. Another algorithm gets another number.

ALGORITHM = 1

ROUNDS = 6

_MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """A 64-bit hash of a 64-bit number (the finalizer of SplitMix64: Steele, Lea, Flood, 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def key_of(seed: int, *parts: int) -> int:
    """A permutation's 64-bit key, of a seed, and numbers that identify it (epoch, objects,
    window)."""
    key = mix(seed & _MASK)
    for part in parts:
        key = mix(key ^ (part & _MASK))
    return key


def permuted(index: int, size: int, key: int) -> int:
    """The place of ``index`` in the permutation ``key`` of ``range(size)``, at most 2**62. A few
    microseconds; no memory."""
    if size < 2:
        return index
    half_bits = ((size - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & half_mask
        for number in range(ROUNDS):
            left, right = right, left ^ (mix(key ^ (number << 56) ^ right) & half_mask)
        index = (left << half_bits) | right
        # The network permutes the next power of four: what falls outside goes round again.
        if index < size:
            return index


def file_windows(sizes: Sequence[int], window: int, key: int) -> list[list[int]]:
    """Files in an epoch's order, cut into windows of at least ``window`` bytes (the last may be
    smaller; 0: one). Datasets beyond the burst tier are staged by windows, each file once."""
    order = [permuted(number, len(sizes), key) for number in range(len(sizes))]
    windows: list[list[int]] = []
    room = 0
    for number in order:
        if room <= 0 and (window or not windows):
            windows.append([])
            room = window
        windows[-1].append(number)
        room -= sizes[number]
    return windows


SHUFFLES = ("blocks", "window", "none", "rows")

_FILES, _BLOCKS, _ROWS = 1, 2, 3  # what a key permutes
_MANY_BLOCKS = 10_000


@dataclass(frozen=True, slots=True)
class EpochOrder:
    """The parameters of an epoch's order, besides the dataset. The first part of a state."""

    seed: int  # of all epochs of a run
    epoch: int = 0  # from 0
    shares: int = 64
    """K: equal parts of an epoch; worlds and workers divide it."""

    group: int = 156
    """Rows of a share that are shuffled in memory; all shares' groups are the shuffle buffer."""

    window: int = 0
    """Bytes of the files that are shuffled with each other; 0 is all (``shuffle="blocks"``)."""

    shuffle: str = "blocks"  # one of SHUFFLES
    algorithm: int = ALGORITHM  # the number of datasets/sequence.py

    def __post_init__(self) -> None:
        if self.algorithm != ALGORITHM:
            raise DatasetError(f"no order with algorithm number {self.algorithm} is known here")
        if self.shuffle not in SHUFFLES:
            raise DatasetError(f"shuffle={self.shuffle!r}: one of {', '.join(SHUFFLES)}")
        if self.shares < 1 or self.group < 1 or self.window < 0:
            raise DatasetError("shares and group are at least 1, window at least 0")

    def state(self) -> dict[str, Any]:
        return asdict(self)


def shares_of(world: int) -> int:
    """The default number of shares: the lowest multiple of the world that is at least 64."""
    return -(-64 // world) * world


class Piece(NamedTuple):
    """Rows of one block, one after the other."""

    block: int
    first: int
    rows: int


class ShuffleGroup(NamedTuple):
    """Rows of one share in a row, and the pieces read for them. Row i is row ``permuted(start + i *
    step, size, key)`` of the pieces' ``size`` rows (``start + i * step``, without a key)."""

    share: int  # whose rows these are
    first: int  # the number of the first of them within the share
    rows: int  # how many they are
    pieces: list[Piece]  # what is read for them
    size: int  # rows of all pieces: more than ``rows`` where shares deal out what they read
    key: int | None  # of the permutation; None keeps the order of the pieces
    start: int = 0  # the place of the first row before the permutation
    step: int = 1  # places from one row to the next


class ShareReads(NamedTuple):
    """A share's blocks in a window, before its rows are shuffled in memory. Block i gives rows
    ``starts[i] + shift`` until ``starts[i + 1] + shift``, within ``rows``."""

    blocks: Sequence[int]
    starts: Sequence[int]
    """One more than blocks."""
    shift: int
    rows: range


class FileRead(NamedTuple):
    """The part of a file that some shares read."""

    file: int
    """Its number in the index."""
    first: int
    """The row of a share for which it is read first."""
    last: int
    """From this row on none of them reads it any more."""
    bytes: int
    """Of the blocks, by the part of their rows."""


class Arithmetic(Protocol):
    """Arithmetic over all blocks of a window at once."""

    def blocks(self, runs: Sequence[range], key: int | None) -> Sequence[int]:
        """The numbers in ``runs``, which follow one another, permuted."""
        ...

    def starts(self, rows: Sequence[int], blocks: Sequence[int]) -> Sequence[int]:
        """Starts of ``blocks`` with successive rows; then the last one's end."""
        ...

    def files_read(self, index: Index, reads: Iterable[ShareReads]) -> Sequence[FileRead]:
        """Of which files shares read these blocks, by number of the file."""
        ...


class PlainArithmetic:
    """Without numpy: 15 us per block."""

    def blocks(self, runs: Sequence[range], key: int | None) -> Sequence[int]:
        numbers = array("q", chain.from_iterable(runs))
        if key is None:
            return numbers
        size = len(numbers)
        return array("q", (numbers[permuted(index, size, key)] for index in range(size)))

    def starts(self, rows: Sequence[int], blocks: Sequence[int]) -> Sequence[int]:
        return array("q", accumulate((rows[block] for block in blocks), initial=0))

    def files_read(self, index: Index, reads: Iterable[ShareReads]) -> Sequence[FileRead]:
        found: dict[int, FileRead] = {}
        for blocks, starts, shift, rows in reads:
            for block, (start, stop) in zip(blocks, pairwise(starts)):
                first, last = max(start + shift, rows.start), min(stop + shift, rows.stop)
                if first >= last:
                    continue
                file = index.file_of(block)
                length = index.lengths[block] * (last - first) // index.rows[block]
                before = found.get(file, FileRead(file, first, last, 0))
                begin, end = min(first, before.first), max(last, before.last)
                found[file] = FileRead(file, begin, end, before.bytes + length)
        return [found[file] for file in sorted(found)]


def arithmetic_for(index: Index) -> Arithmetic:
    """By numpy, where it is installed and saves more than its import takes: 0.1 s and 20 MB."""
    if len(index.rows) >= _MANY_BLOCKS:
        with suppress(ImportError):
            from aifs.datasets.arrays import ArrayArithmetic

            return ArrayArithmetic()
    return PlainArithmetic()


class Epoch:
    """An epoch of a dataset. Any thread may call its methods, without I/O; they wait for one
    another when a window begins."""

    def __init__(
        self, index: Index, order: EpochOrder, arithmetic: Arithmetic = PlainArithmetic()
    ) -> None:
        self.index = index
        self.order = order
        self.total_rows = index.total_rows
        self._arithmetic = arithmetic
        self.windows: Sequence[Sequence[int]] = [range(len(index.paths))]
        """Numbers of files, in the order in which the epoch needs them."""
        if order.shuffle == "blocks" and order.window:
            key = key_of(order.seed, order.epoch, _FILES)
            self.windows = file_windows(index.sizes, order.window, key) or self.windows
        self._ends = self._ends_of_windows()
        self._making = threading.Lock()
        """Held while a window begins: with many blocks that takes time, and memory."""
        self._last: dict[int, _Window] = {}

    @property
    def deals(self) -> bool:
        """Whether all shares read the same rows, and deal them out."""
        return self.order.shuffle in ("window", "none")

    def _ends_of_windows(self) -> list[int]:
        if len(self.windows) == 1:
            return [self.total_rows]
        rows, ends = self.index.rows, self.index.first_blocks
        of_files = [sum(rows[first:end]) for first, end in pairwise(ends)]
        return list(accumulate(sum(of_files[file] for file in files) for files in self.windows))

    def rows_of(self, share: int) -> int:
        """The rows of a share in the epoch; shares differ by one at most."""
        return max(0, -(-(self.total_rows - share) // self.order.shares))

    def counts(self, done: int) -> list[int]:
        """How many rows each share has given when ``done`` rows of the epoch were handed out."""
        shares = self.order.shares
        return [max(0, -(-(done - share) // shares)) for share in range(shares)]

    def group(self, share: int, row: int) -> ShuffleGroup:
        """The group that row ``row`` of a share is in."""
        if self.order.shuffle == "blocks":
            return self._own_group(share, row)
        if self.order.shuffle == "rows":
            return self._scattered_group(share, row)
        return self._dealt_group(share, row)

    def groups(self, share: int, row: int = 0) -> Iterator[ShuffleGroup]:
        """The groups of a share in turn, the first being that of ``row``."""
        rows = self.rows_of(share)
        while row < rows:
            group = self.group(share, row)
            yield group
            row = group.first + group.rows

    def pieces(self, share: int, row: int = 0) -> Iterator[Piece]:
        """A share's pieces in order, before its rows are shuffled, from the group of ``row`` on.
        Neighbouring pieces of a block are one."""
        last: Piece | None = None
        for group in self.groups(share, row):
            for piece in group.pieces:
                if last is not None and _follows(last, piece):
                    last = Piece(last.block, last.first, last.rows + piece.rows)
                    continue
                if last is not None:
                    yield last
                last = piece
        if last is not None:
            yield last

    def files_read(self, number: int, shares: Collection[int]) -> Sequence[FileRead]:
        """``shuffle="blocks"``: the files of which these shares read something in a window."""
        window = self._window(number)
        reads = chain.from_iterable(window.reads(window.run_of(share)) for share in shares)
        return self._arithmetic.files_read(self.index, reads)

    def window_of(self, row: int) -> int:
        """The window that row ``row`` of each share is in."""
        shares = self.order.shares
        number = bisect_right(self._ends, row, key=lambda end: end // shares)
        return min(number, len(self.windows) - 1)

    def _own_group(self, share: int, row: int) -> ShuffleGroup:
        """``shuffle="blocks"``: a share has a run of each window to itself."""
        order = self.order
        number = self.window_of(row)
        window = self._window(number)
        run = window.run_of(share)
        count = (row - window.first_row) // order.group
        begin = run.start + count * order.group
        rows = min(order.group, run.stop - begin)
        key = key_of(order.seed, order.epoch, _ROWS, number, share, count)
        first = window.first_row + count * order.group
        return ShuffleGroup(share, first, rows, window.pieces(begin, rows), rows, key)

    def _dealt_group(self, share: int, row: int) -> ShuffleGroup:
        """``shuffle="window"`` and ``"none"``: all shares read the same rows and deal them out."""
        order = self.order
        count = row // order.group
        begin = count * order.group * order.shares
        size = min(order.group * order.shares, self.total_rows - begin)
        key = None
        if order.shuffle == "window":
            key = key_of(order.seed, order.epoch, _ROWS, 0, 0, count)
        rows = -(-(size - share) // order.shares)
        pieces = self._window(0).pieces(begin, size)
        return ShuffleGroup(
            share, count * order.group, rows, pieces, size, key, share, order.shares
        )

    def _scattered_group(self, share: int, row: int) -> ShuffleGroup:
        """``shuffle="rows"``: each row from anywhere."""
        order = self.order
        first = row - row % order.group
        rows = min(order.group, self.rows_of(share) - first)
        key = key_of(order.seed, order.epoch, _ROWS)
        window = self._window(0)
        pieces: list[Piece] = []
        for number in range(first, first + rows):
            taken = permuted(number * order.shares + share, self.total_rows, key)
            pieces += window.pieces(taken, 1)
        return ShuffleGroup(share, first, rows, pieces, rows, None)

    def _window(self, number: int) -> "_Window":
        with self._making:
            window = self._last.get(number)
            if window is None:
                window = self._made(number)
                # The one before may still be read from: shares do not cross at the same instant.
                before = self._last.get(number - 1)
                self._last = {number: window} | ({} if before is None else {number - 1: before})
            return window

    def blocks(self, number: int) -> Sequence[int]:
        """The blocks of a window, in the order in which its rows are divided into shares."""
        return self._arithmetic.blocks(self._runs(number), self._blocks_key(number))

    def _made(self, number: int) -> "_Window":
        shares = self.order.shares
        before = self._ends[number - 1] if number else 0
        carried = self._last_pieces(number - 1, before % shares) if before % shares else []
        blocks = self.blocks(number)
        starts = self._arithmetic.starts(self.index.rows, blocks)
        rows = before % shares + self._ends[number] - before
        is_last = number == len(self.windows) - 1
        each, over = divmod(rows, shares)
        return _Window(before // shares, each, over if is_last else 0, carried, blocks, starts)

    def _runs(self, number: int) -> list[range]:
        """The blocks of a window, by file."""
        if isinstance(self.windows[number], range):
            return [range(len(self.index.rows))]
        return [self.index.blocks_of(file) for file in self.windows[number]]

    def _blocks_key(self, number: int) -> int | None:
        if self.order.shuffle != "blocks":
            return None
        return key_of(self.order.seed, self.order.epoch, _BLOCKS, number)

    def _last_pieces(self, number: int, rows: int) -> list[Piece]:
        """A window's last rows, and earlier ones' if fewer, read with the next."""
        pieces: list[Piece] = []
        while rows:
            found = self._from_the_end(number, rows)
            pieces = found + pieces
            rows -= sum(piece.rows for piece in found)
            number -= 1
        return pieces

    def _from_the_end(self, number: int, rows: int) -> list[Piece]:
        """The last ``rows`` rows of a window, or all."""
        runs = self._runs(number)
        ends = list(accumulate(map(len, runs)))
        size, key = ends[-1], self._blocks_key(number)
        pieces: list[Piece] = []
        for index in reversed(range(size)):
            if rows == 0:
                break
            place = permuted(index, size, key) if key is not None else index
            run = bisect_right(ends, place)
            block = runs[run][place - ends[run]]
            taken = min(rows, self.index.rows[block])
            if taken:
                pieces.append(Piece(block, self.index.rows[block] - taken, taken))
                rows -= taken
        pieces.reverse()
        return pieces


def _follows(last: Piece, piece: Piece) -> bool:
    return piece.block == last.block and piece.first == last.first + last.rows


class _Window:
    """One window in the order of its permuted blocks."""

    def __init__(
        self,
        first_row: int,
        each: int,
        over: int,
        carried: list[Piece],
        blocks: Sequence[int],
        starts: Sequence[int],
    ) -> None:
        self.first_row = first_row  # of each share: how many it has given before this window
        self._each = each  # rows that each share has of this window
        self._over = over  # so many shares, the first, have one more
        self._carried = carried  # rows of windows before, which come first
        self._carried_rows = sum(piece.rows for piece in carried)
        self._blocks = blocks
        self._starts = starts  # of the blocks, after what was carried

    def run_of(self, share: int) -> range:
        """The positions, among the rows of the window, that a share has."""
        begin = share * self._each + min(share, self._over)
        return range(begin, begin + self._each + (share < self._over))

    def reads(self, run: range) -> Iterator[ShareReads]:
        """The pieces of the share that has this run, without an object for each block."""
        rows = range(self.first_row, self.first_row + len(run))
        carried = [piece.block for piece in self._carried]
        counts = (piece.rows for piece in self._carried)
        starts: Sequence[int] = [*accumulate(counts, initial=0)]
        yield ShareReads(carried, starts, self.first_row - run.start, rows)
        begin, end = run.start - self._carried_rows, run.stop - self._carried_rows
        first = max(0, bisect_right(self._starts, begin) - 1)
        last = max(first, bisect_left(self._starts, end))
        blocks, starts = self._blocks[first:last], self._starts[first : last + 1]
        yield ShareReads(blocks, starts, self.first_row - begin, rows)

    def pieces(self, begin: int, rows: int) -> list[Piece]:
        """The ``rows`` rows from position ``begin`` on."""
        pieces: list[Piece] = []
        at = 0
        for piece in self._carried if begin < self._carried_rows else ():
            skipped = max(0, begin - at)
            at += piece.rows
            taken = min(rows, piece.rows - skipped)
            if taken > 0:
                pieces.append(Piece(piece.block, piece.first + skipped, taken))
                begin += taken
                rows -= taken
        begin -= self._carried_rows
        number = bisect_right(self._starts, begin) - 1
        while rows > 0:
            start, end = int(self._starts[number]), int(self._starts[number + 1])
            taken = min(rows, end - begin)
            if taken:
                pieces.append(Piece(int(self._blocks[number]), begin - start, taken))
                begin += taken
                rows -= taken
            number += 1
        return pieces
