"""Records of a fixed size given by the user (``record_bytes``): each is ``bytes`` (Arrow: one
column ``record``)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError
from aifs.datasets.formats.reading import DatasetFile, OpenBlock
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock
from aifs.datasets.order import ChosenBlocks, OrderSources, in_order
from aifs.datasets.virtual import Joined

if TYPE_CHECKING:
    import pyarrow

NAME = "records"
SUFFIXES: tuple[str, ...] = ()


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    """``options``: ``record_bytes``, the size of a row."""
    record_bytes = options.get("record_bytes")
    if not isinstance(record_bytes, int) or record_bytes < 1:
        raise DatasetError("format='records' needs record_bytes, the size of a row in bytes")
    yield from blocks_of(file.size, record_bytes)


def blocks_of(size: int, record_bytes: int) -> Iterator[RowBlock]:
    """Of a file of ``size`` bytes. Raises DatasetError for a piece of a record."""
    if size % record_bytes:
        raise DatasetError(f"{size} bytes are not a multiple of record_bytes={record_bytes}")
    block_rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // record_bytes))
    for first in range(0, size // record_bytes, block_rows):
        rows = min(block_rows, size // record_bytes - first)
        yield RowBlock(first * record_bytes, rows * record_bytes, rows)


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


def open_file(file: DatasetFile, options: Mapping[str, Any]) -> OpenBlock:
    return lambda number, block: _Block(
        file.read(block.offset, block.length), block.length // block.rows
    )


def order(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """Records."""
    return in_order(blocks)
