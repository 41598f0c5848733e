"""Records of a fixed size, which only the user knows (``record_bytes``)."""

from collections.abc import Iterator, Mapping
from typing import Any

from aifs.core.errors import DatasetError
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock

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
