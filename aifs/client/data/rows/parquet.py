"""Rows of Parquet files: dictionaries, by columns. Option ``columns``: these alone are read.

A row group of more than 32 MiB (decoded) is decoded as a stream, of which only the rows are held
that were asked for last: rows in rising order cost one pass, going back begins at its start again.
"""

import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.client.data.rows.opened import Clipped, Seekable, naming, require_rows
from aifs.core.errors import DatasetError
from aifs.datasets.formats.parquet import footer, metadata
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow
    from pyarrow import parquet

_HELD = 32 << 20
_PIECE_ROWS = 1024
_READ = 1 << 20


class _Block:
    """A row group. The lock is held while some of it is decoded."""

    def __init__(self, file: "_File", group: int, block: RowBlock) -> None:
        self._file = file
        self._group = group
        self._offset = block.offset
        self._rows = block.rows
        # Too large to be held as a whole.
        self._is_streamed = file.meta.row_group(group).total_byte_size > _HELD
        # Of the three that follow, and of the stream.
        self._lock = threading.Lock()
        # Decoded, one after the other.
        self.pieces: deque[pyarrow.RecordBatch] = deque()
        # Numbers of the first row of the pieces, and of the row after the last one.
        self._first = self._end = 0
        # What is not decoded yet; None: nothing has been.
        self._stream: Iterator[pyarrow.RecordBatch] | None = None
        if not self._is_streamed:
            self._covered(0, block.rows)

    def take(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        import pyarrow

        if not rows:
            return []
        first = min(rows)
        table = self._covered(first, max(rows) + 1)
        return table.take(pyarrow.array([row - first for row in rows])).to_pylist()

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        return self._covered(first, first + rows).combine_chunks().to_batches()[0]

    def _covered(self, first: int, end: int) -> "pyarrow.Table":
        """Rows from ``first`` to before ``end``."""
        import pyarrow

        with self._lock, naming(self._file.path, self._offset):
            if self._stream is None or first < self._first:
                self.pieces.clear()
                self._first = self._end = 0
                self._stream = self._decoded()
            while self._end < end:
                piece = next(self._stream, None)
                if piece is None:
                    raise DatasetError(
                        f"{self._end} rows in row group {self._group}, of {self._rows}"
                    )
                self.pieces.append(piece)
                self._end += piece.num_rows
                self._forget(first)
            self._forget(first)
            table = pyarrow.Table.from_batches(self.pieces)
            return table.slice(first - self._first, end - first)

    def _forget(self, first: int) -> None:
        """What is before this row, if the group is too large to be held."""
        while self._is_streamed and self.pieces:
            if self._first + self.pieces[0].num_rows > first:
                return
            self._first += self.pieces.popleft().num_rows

    def _decoded(self) -> Iterator["pyarrow.RecordBatch"]:
        size = _PIECE_ROWS if self._is_streamed else self._rows
        return self._file.opened().iter_batches(
            size, [self._group], self._file.columns, use_threads=False
        )


class _File:
    def __init__(self, file: DatasetFile, columns: Sequence[str] | None) -> None:
        self._file = file
        self.path = file.path
        self.columns = None if columns is None else list(columns)
        with naming(file.path, file.size):
            self.meta = metadata(footer(Clipped(file)))
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
