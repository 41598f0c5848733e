"""Rows of a fixed size: ``bytes`` of that many bytes each (Arrow: one column ``record``)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.client.data.rows import DatasetFile
from aifs.datasets.index import RowBlock

if TYPE_CHECKING:
    import pyarrow


class _Block:
    def __init__(self, data: bytes, record_bytes: int) -> None:
        self._data = data
        self._record_bytes = record_bytes

    def take(self, rows: Sequence[int]) -> list[bytes]:
        data, length = self._data, self._record_bytes
        return [data[row * length : (row + 1) * length] for row in rows]

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        import pyarrow

        kind = pyarrow.binary(self._record_bytes)
        column = pyarrow.Array.from_buffers(
            kind, rows, [None, pyarrow.py_buffer(self._data)], offset=first
        )
        return pyarrow.record_batch([column], names=["record"])


class _File:
    def __init__(self, file: DatasetFile) -> None:
        self._file = file

    def open_block(self, number: int, block: RowBlock) -> _Block:
        return _Block(self._file.read(block.offset, block.length), block.length // block.rows)


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> _File:
    return _File(file)
