"""Megatron's pair of files: a ``.bin`` of tokens, and an ``.idx`` that says where its documents
begin. A row is a document: a numpy array of tokens (Arrow: a column ``tokens`` of lists).

The .idx (little-endian): ``MMIDIDX\\0\\0``, version 1 (u64), a code for the type of tokens (u8),
how many sequences (u64) and document bounds (u64); the tokens of each sequence (i32), where each
begins in the .bin (i64), the first sequence of each document and the end (i64); perhaps modes (i8).
"""

import bisect
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

from aifs.core.errors import DatasetError
from aifs.datasets.disk import IndexedDiskFile, version_of
from aifs.datasets.formats.columns import naming
from aifs.datasets.formats.reading import Clipped, DatasetFile, OpenBlock, row_bytes_checked
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock
from aifs.datasets.order import ChosenBlocks, OrderSources, in_order
from aifs.datasets.virtual import Joined, ShiftedNumbers, SourceRange

if TYPE_CHECKING:
    import numpy
    import pyarrow

NAME = "megatron"
SUFFIXES: tuple[str, ...] = (".bin",)

MAGIC = b"MMIDIDX\0\0"

DTYPES = {
    1: ("uint8", 1),
    2: ("int8", 1),
    3: ("int16", 2),
    4: ("int32", 4),
    5: ("int64", 8),
    6: ("float64", 8),
    7: ("float32", 4),
    8: ("uint16", 2),
}
"""Name and bytes of a token, by code."""

VERSION = 1

HEADER = struct.Struct("<9sQBQQ")


class Documents:
    """Where the documents of a .bin lie, as its .idx says. Reads what it is asked for alone."""

    def __init__(self, idx: FileBytes, bin_size: int) -> None:
        """Raises DatasetError if this is no .idx, not all of one, or one of another .bin."""
        head = idx.read(0, HEADER.size)
        if len(head) < HEADER.size or not head.startswith(MAGIC):
            raise DatasetError("its .idx is none of Megatron's, or torn")
        # How many sequences there are.
        _, version, code, self.sequences, bounds = HEADER.unpack(head)
        if version != VERSION or code not in DTYPES or bounds < 1:
            raise DatasetError(f"its .idx has version {version}, type {code}, {bounds} bounds")
        # Of the type of tokens.
        self.code = code
        # Of a token: its numpy name, its bytes.
        self.dtype, self.itemsize = DTYPES[code]
        # How many documents there are.
        self.count = bounds - 1
        # Where in the .idx the three lists begin.
        self.lengths_at = HEADER.size
        # (of where sequences begin in the .bin)
        self.pointers_at = self.lengths_at + 4 * self.sequences
        # (of the first sequences of documents)
        self.bounds_at = self.pointers_at + 8 * self.sequences
        if self.bounds_at + 8 * bounds > idx.size:
            raise DatasetError(
                f"its .idx has {idx.size} bytes, too few for {self.sequences} sequences and"
                f" {self.count} documents: it is torn"
            )
        self._idx = idx
        # Where the last sequence ends in the .bin.
        self.end = 0
        if self.sequences:
            last = self._number(self.lengths_at + 4 * (self.sequences - 1), "<i")
            self.end = self._pointer(self.sequences - 1) + last * self.itemsize
        if self.end != bin_size or self.bound(0) or self.bound(self.count) != self.sequences:
            raise DatasetError(
                f"its .idx tells of {self.end} bytes, of {bin_size}: it belongs to another .bin,"
                " its sequences are not in order, or one of both is torn"
            )

    def start(self, document: int) -> int:
        """The offset of its first byte in the .bin; of ``count`` the end."""
        sequence = self.bound(document)
        at = self._pointer(sequence) if sequence < self.sequences else self.end
        if not (0 <= sequence <= self.sequences and 0 <= at <= self.end):
            raise DatasetError(f"document {document} begins at byte {at}, of {self.end}")
        return at

    def at(self, offset: int) -> int:
        """The first document that begins at ``offset`` or later."""
        return bisect.bisect_left(range(self.count), offset, key=self.start)

    def bound(self, document: int) -> int:
        """The number of its first sequence; of ``count`` that of all. Not checked."""
        return self._number(self.bounds_at + 8 * document, "<q")

    def _pointer(self, sequence: int) -> int:
        return self._number(self.pointers_at + 8 * max(sequence, 0), "<q")

    def _number(self, at: int, kind: str) -> int:
        data = self._idx.read(at, struct.calcsize(kind))
        if len(data) < struct.calcsize(kind):
            raise DatasetError("its .idx ends while it is read")
        return struct.unpack(kind, data)[0]


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    """A few reads of the .idx per block, and none of the .bin."""
    try:
        documents = Documents(file.beside(".idx"), file.size)
    except FileNotFoundError as error:
        raise DatasetError("its .idx is missing") from error
    first = start = 0
    while first < documents.count:
        last = min(first + BLOCK_ROWS, documents.count)
        end = documents.start(last)
        if end - start > BLOCK_BYTES:
            fits = bisect.bisect_right(
                range(first + 1, last), start + BLOCK_BYTES, key=documents.start
            )
            last = first + max(1, fits)
            end = documents.start(last)
        # Empty documents stay with what follows them at the same byte: so an offset tells where a
        # block begins.
        if last < documents.count and documents.start(last - 1) == end:
            last = first + 1 + bisect.bisect_left(range(first + 1, last), end, key=documents.start)
            if end == start:
                last = (
                    first
                    + 1
                    + bisect.bisect_right(
                        range(first + 1, documents.count), end, key=documents.start
                    )
                )
                end = documents.start(last)
        if not start <= end <= documents.end:
            raise DatasetError(f"document {last} begins at byte {end}, before document {first}")
        if last == first + 1:
            row_bytes_checked(start, end - start)
        yield RowBlock(start, end - start, last - first)
        first, start = last, end


class _Block:
    def __init__(self, tokens: "numpy.ndarray", bounds: "numpy.ndarray") -> None:
        """``bounds``: where each document begins, in tokens; and the end."""
        self._tokens = tokens
        self._bounds = bounds

    def take(self, rows: Sequence[int]) -> list["numpy.ndarray"]:
        # Copies: a row that the caller keeps must not keep its block.
        bounds = self._bounds
        return [self._tokens[bounds[row] : bounds[row + 1]].copy() for row in rows]

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        offsets = pyarrow.array(self._bounds[first : first + rows + 1], pyarrow.int64())
        lists = pyarrow.LargeListArray.from_arrays(offsets, pyarrow.array(self._tokens))
        return pyarrow.record_batch([lists], names=["tokens"])


class _File:
    """The .idx is read where it is needed, never mapped: one that shrinks would end the process."""

    def __init__(self, file: DatasetFile) -> None:
        self._file = file
        path = os.path.splitext(file.path)[0] + ".idx"
        self._idx = Clipped(IndexedDiskFile(path, version_of(os.stat(path))))
        with naming(file.path, 0):
            self._documents = Documents(self._idx, file.size)

    def open_block(self, number: int, block: RowBlock) -> _Block:
        import numpy

        documents, size = self._documents, self._documents.itemsize
        with naming(self._file.path, block.offset):
            first = documents.at(block.offset)
            sequences = self._numbers("<i8", documents.bounds_at, first, block.rows + 1)
            low, high = int(sequences[0]), int(sequences[-1])
            if not 0 <= low <= high <= documents.sequences:
                raise DatasetError(f"document {first} has sequences {low} to {high} in its .idx")
            starts = self._numbers("<i8", documents.pointers_at, low, high - low)
            pointers = numpy.append(starts, block.offset + block.length)
            lengths = self._numbers("<i4", documents.lengths_at, low, high - low).astype("i8")
            follow = numpy.array_equal(pointers[:-1] + lengths * size, pointers[1:])
            if (
                (numpy.diff(sequences) < 0).any()
                or pointers[0] != block.offset
                or (lengths < 0).any()
                or not follow
            ):
                raise DatasetError(
                    f"the sequences of the block at byte {block.offset} do not follow one another"
                    " in its .idx"
                )
        data = self._file.read(block.offset, block.length)
        bounds = (pointers[sequences - low] - block.offset) // size
        return _Block(numpy.frombuffer(data, numpy.dtype(documents.dtype)), bounds)

    def _numbers(self, kind: str, at: int, first: int, count: int) -> "numpy.ndarray":
        """``count`` numbers of the list at byte ``at``, from ``first`` on."""
        import numpy

        each = numpy.dtype(kind).itemsize
        found = numpy.frombuffer(self._idx.read(at + each * first, each * count), kind)
        if len(found) != count:
            raise DatasetError("its .idx ends too early: make the dataset's index again")
        return found


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return _File(file).open_block


def order(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """The .bin: documents."""
    return in_order(blocks)


class _Run(NamedTuple):
    """The entries of a block in an .idx."""

    source: int
    documents: Documents
    block: RowBlock
    first: int  # document
    low: int  # the first sequence
    high: int  # after the last one


def order_idx(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """The .idx to the .bin of ``order``: the files' lists by block, positions shifted. Two reads of
    an .idx for each block."""
    runs = list(_runs(blocks, sources))
    sequences = sum(run.high - run.low for run in runs)
    documents = sum(run.block.rows for run in runs)
    codes = {run.documents.code for run in runs} or {1}
    if len(codes) > 1:
        raise DatasetError("the tokens of the dataset's files are of several types")
    found = Joined()
    found.add(HEADER.pack(MAGIC, VERSION, codes.pop(), sequences, documents + 1))
    for run in runs:
        at = run.documents.lengths_at + 4 * run.low
        found.add(SourceRange(run.source, at, 4 * (run.high - run.low)))
    start = 0
    for run in runs:
        at = run.documents.pointers_at + 8 * run.low
        length = 8 * (run.high - run.low)
        found.add(ShiftedNumbers(run.source, at, length, start - run.block.offset))
        start += run.block.length
    start = 0
    for run in runs:
        at = run.documents.bounds_at + 8 * run.first
        found.add(ShiftedNumbers(run.source, at, 8 * run.block.rows, start - run.low))
        start += run.high - run.low
    found.add(sequences.to_bytes(8, "little"))
    return found


def _runs(blocks: ChosenBlocks, sources: OrderSources) -> Iterator[_Run]:
    index = blocks.index
    files: dict[int, tuple[int, Documents, list[int]]] = {}
    for file in blocks.files():
        with blocks.naming(file):
            source = sources.beside(file)
            documents = Documents(sources.open(source), index.sizes[file])
        of_blocks = (index.rows[number] for number in index.blocks_of(file))
        files[file] = source, documents, list(accumulate(of_blocks, initial=0))
    for place, number in enumerate(blocks.numbers):
        file, block = blocks.file(place), blocks.block(place)
        source, documents, firsts = files[file]
        first = firsts[number - index.first_blocks[file]]
        with blocks.naming(file):
            if first + block.rows > documents.count:
                raise DatasetError("its documents are not those of the index: make that again")
            low, high = documents.bound(first), documents.bound(first + block.rows)
            if not 0 <= low <= high <= documents.sequences:
                raise DatasetError(f"document {first} has sequences {low} to {high}")
        yield _Run(source, documents, block, first, low, high)
