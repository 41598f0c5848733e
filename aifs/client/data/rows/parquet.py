"""Rows of Parquet files: dictionaries, by columns. Option ``columns``: these alone are read.

Row groups are decoded in pieces of about 4 MiB, as they are when they are decoded: a dictionary of
one long word may stand for gigabytes. Of a row group of more than 32 MiB only the rows are held
that were asked for last: rows in rising order cost one pass, going back begins at its start again.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import (
    Clipped,
    Seekable,
    joined,
    naming,
    python_rows,
    require_distinct,
    require_rows,
    takeable,
)
from aifs.core.errors import DatasetError
from aifs.datasets.formats.parquet import footer, metadata
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

_HELD = 32 << 20
_PIECE_BYTES = 4 << 20
_PIECE_ROWS = 1024
_FIRST_ROWS = 32  # of a row group, of which it is not known how large they are
_READ = 1 << 20


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
        """The piece with this row, and the number of its first row. Earlier pieces are dropped if
        the group is too large to be held."""
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
    """No method of a block: it would hold the block, which holds it, and its file stay open."""
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
        """Has a position of its own, so that several threads may read."""
        from pyarrow import parquet

        return parquet.ParquetFile(
            Seekable(self._file), metadata=self.meta, buffer_size=_READ, pre_buffer=False
        )

    def open_block(self, number: int, block: RowBlock) -> _Block:
        if number >= len(self._groups):
            require_rows(self.path, block.offset, 0, block.rows)
        group = self._groups[number]
        rows = self.meta.row_group(group).num_rows
        require_rows(self.path, block.offset, rows, block.rows)
        return _Block(self, group, block)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file, options.get("columns"))
