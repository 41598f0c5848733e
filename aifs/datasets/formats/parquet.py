"""Parquet: a row group is a block; rows are dictionaries by columns. pyarrow reads the footers.
Option ``columns``: these alone.

Row groups are decoded in pieces of about 4 MiB: a dictionary of one long word may stand for
gigabytes. Of one above 32 MiB only the last asked rows are held: rising rows cost one pass, going
back starts again.
"""

import itertools
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.columns import joined, naming, python_rows, require_distinct, takeable
from aifs.datasets.formats.reading import Clipped, DatasetFile, OpenBlock, Seekable, require_rows
from aifs.datasets.index import FileBytes, RowBlock

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

NAME = "parquet"
SUFFIXES: tuple[str, ...] = (".parquet",)

MAGIC = b"PAR1"
_TAIL = 64 << 10
_FOOTER_MAX = 256 << 20
"""A larger footer is an attack: it would be held in memory."""
_HELD = 32 << 20
_PIECE_BYTES = 4 << 20
_PIECE_ROWS = 1024
_FIRST_ROWS = 32  # of a row group, of which it is not known how large they are
_READ = 1 << 20


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    if not file.size:
        return
    data = footer(file)
    spans = list(_spans(metadata(data), file.size - len(data)))
    yield from spans


def footer(file: FileBytes) -> bytes:
    """A Parquet file's end, from its metadata on. Raises DatasetError for no, or a cut, Parquet
    file."""
    tail = file.read(max(0, file.size - _TAIL), _TAIL)
    if len(tail) < 12 or tail[-4:] != MAGIC or file.read(0, 4) != MAGIC:
        encrypted = ": it is encrypted" if tail[-4:] == b"PARE" else ""
        raise DatasetError(f"no Parquet file, or a torn one ({file.size} bytes){encrypted}")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length + 4 > file.size or length > _FOOTER_MAX:
        raise DatasetError(f"a footer of {length} bytes in a file of {file.size}: it is damaged")
    if length > len(tail):
        tail = file.read(file.size - length, length)
        if len(tail) < length:
            raise DatasetError("the footer ends while it is read")
    return tail[-length:]


def metadata(footer: bytes) -> "parquet.FileMetaData":
    """Decode a footer by pyarrow. Raises DatasetError. Its columns are asked for after
    ``_require_told``."""
    import pyarrow
    from pyarrow import parquet

    with _footer_faults():
        return parquet.read_metadata(pyarrow.BufferReader(MAGIC + footer))


@contextmanager
def _footer_faults() -> Iterator[None]:
    """Raise DatasetError for any error of pyarrow."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, ValueError, MemoryError) as error:
        message = (str(error).splitlines() or [type(error).__name__])[0]
        if "decrypt" in message:
            raise DatasetError("its first column is encrypted") from error
        raise DatasetError(f"a damaged footer: {message}") from error


def _spans(meta: "parquet.FileMetaData", end: int) -> Iterator[RowBlock]:
    """Of each row group; ``end``: of the row groups' bytes."""
    if not meta.num_columns:
        raise DatasetError("no columns")
    every = [meta.row_group(number) for number in range(meta.num_row_groups)]
    # One without rows may say that it lies at byte 0, where nothing is.
    numbers = [number for number, group in enumerate(every) if group.num_rows]
    groups = [every[number] for number in numbers]
    if not groups:
        return
    _require_told(meta, end, numbers, [0])
    starts = [_start(group.column(0)) for group in groups]
    # As all writers leave them, groups follow one another: the first column says enough.
    if all(first < following for first, following in itertools.pairwise([*starts, end])):
        ends = [*starts[1:], end]
    else:
        starts, ends = [], []
        _require_told(meta, end, numbers, range(meta.num_columns))
        for group in groups:
            columns = [group.column(number) for number in range(meta.num_columns)]
            starts.append(min(map(_start, columns)))
            ends.append(max(_start(each) + each.total_compressed_size for each in columns))
    for number, (group, first, last) in enumerate(zip(groups, starts, ends, strict=True)):
        if group.num_rows < 0 or not 4 <= first <= last <= end:
            raise DatasetError(
                f"row group {number}: {group.num_rows} rows in bytes {first} to {last}, of {end}"
            )
        yield RowBlock(first, last - first, group.num_rows)


def _require_told(
    meta: "parquet.FileMetaData", end: int, groups: Sequence[int], columns: Sequence[int]
) -> None:
    """Raises DatasetError if these columns are encrypted or missing: pyarrow would end the process.
    A buffering reader finds out, by an exception, before the first byte."""
    from pyarrow import parquet

    with _footer_faults(), suppress(_ReadError):
        file = parquet.ParquetFile(Seekable(end, _unread), metadata=meta, pre_buffer=True)
        next(file.reader.iter_batches(1, list(groups), list(columns), False), None)


class _ReadError(Exception):
    pass


def _unread(offset: int, length: int) -> bytes:
    raise _ReadError


def _start(column: "parquet.ColumnChunkMetaData") -> int:
    dictionary, data = column.dictionary_page_offset, column.data_page_offset
    return dictionary if dictionary and 0 < dictionary < data else data


class _Block:
    """A row group. The lock is held while some of it is decoded."""

    def __init__(self, file: "_File", group: int, block: RowBlock) -> None:
        self._file = file
        self._group = group
        self._offset = block.offset
        self._rows = block.rows
        # Of all that follows.
        self._lock = threading.Lock()
        # Decoded, one after the other.
        self.pieces: deque[pyarrow.RecordBatch] = deque()
        self._bytes = 0  # of the pieces
        # Numbers of the first row of the pieces, and of the row after the last one.
        self._first = self._end = 0
        # What is not decoded yet.
        self._stream = _decoded(file, group)
        if file.meta.row_group(group).total_byte_size <= _HELD:
            with self._lock, naming(file.path, block.offset):
                while self._end < self._rows and self._bytes <= _HELD:
                    self._decode_piece()
                if self._end == self._rows:
                    self.pieces = deque([joined(self.pieces)])  # faster to take rows from

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        found: list[Any] = [None] * len(rows)
        left = deque(sorted(range(len(rows)), key=rows.__getitem__))
        while left:
            start, piece = self._piece_with(rows[left[0]])
            places = []
            while left and rows[left[0]] < start + piece.num_rows:
                places.append(left.popleft())
            with naming(self._file.path, self._offset):
                taken = python_rows(piece, [rows[place] - start for place in places])
            for place, row in zip(places, taken, strict=True):
                found[place] = row
        return found

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        pieces = []
        end = first + rows
        while first < end:
            start, piece = self._piece_with(first)
            pieces.append(piece.slice(first - start, end - first))
            first += pieces[-1].num_rows
        with naming(self._file.path, self._offset):
            return joined(pieces)

    def _piece_with(self, row: int) -> tuple[int, "pyarrow.RecordBatch"]:
        """The piece with this row, and its first row. Earlier ones are dropped from a large
        group."""
        with self._lock, naming(self._file.path, self._offset):
            if row < self._first:
                self.pieces.clear()
                self._bytes = self._first = self._end = 0
                self._stream = _decoded(self._file, self._group)
            while True:
                while self._bytes > _HELD and self._first + self.pieces[0].num_rows <= row:
                    piece = self.pieces.popleft()
                    self._bytes -= _decoded_bytes(piece)
                    self._first += piece.num_rows
                if row < self._end:
                    break
                self._decode_piece()
            start = self._first
            for piece in self.pieces:
                if row < start + piece.num_rows:
                    break
                start += piece.num_rows
            return start, piece

    def _decode_piece(self) -> None:
        piece = next(self._stream, None)
        if piece is None:
            raise DatasetError(f"{self._end} rows in row group {self._group}, of {self._rows}")
        self.pieces.append(piece)
        self._bytes += _decoded_bytes(piece)
        self._end += piece.num_rows


def _decoded(file: "_File", group: int) -> Iterator["pyarrow.RecordBatch"]:
    """No method: it would hold its block, which holds it, and the file open."""
    opened = file.opened()
    most = _FIRST_ROWS
    for piece in opened.iter_batches(most, [group], file.columns, use_threads=False):
        fitting = _PIECE_BYTES * piece.num_rows // max(1, _decoded_bytes(piece))
        most = max(1, min(4 * most, _PIECE_ROWS, fitting))
        opened.reader.set_batch_size(most)
        yield takeable(piece)


def _decoded_bytes(piece: "pyarrow.RecordBatch") -> int:
    """Without dictionaries, which pieces share."""
    import pyarrow

    columns = (
        column.indices if isinstance(column, pyarrow.DictionaryArray) else column
        for column in piece.columns
    )
    return sum(column.nbytes for column in columns)


class _File:
    def __init__(self, file: DatasetFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self.path = file.path
        self.columns = None if columns is None else list(columns)
        with naming(file.path, file.size):
            self.meta = metadata(footer(Clipped(file)))
            paths = [self.meta.schema.column(each).path for each in range(self.meta.num_columns)]
            for name in self.columns or ():
                if not any(path == name or path.startswith(f"{name}.") for path in paths):
                    raise DatasetError(f"no column {name!r}")
            require_distinct(self.meta.schema.to_arrow_schema(), self.columns)
        groups = range(self.meta.num_row_groups)
        # Row groups without rows are no blocks.
        self._groups = [number for number in groups if self.meta.row_group(number).num_rows]

    def opened(self) -> "parquet.ParquetFile":
        """Each has its own position, so that several threads may read."""
        from pyarrow import parquet

        return parquet.ParquetFile(
            Seekable(self._file.size, Clipped(self._file).read),
            metadata=self.meta,
            buffer_size=_READ,
            pre_buffer=False,
        )

    def open_block(self, number: int, block: RowBlock) -> _Block:
        if number >= len(self._groups):
            require_rows(self.path, block.offset, 0, block.rows)
        group = self._groups[number]
        rows = self.meta.row_group(group).num_rows
        require_rows(self.path, block.offset, rows, block.rows)
        return _Block(self, group, block)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return _File(file, options.get("columns")).open_block
