"""Records of a fixed size, which only the user knows (``row_bytes``)."""

from collections.abc import Iterator, Mapping
from typing import Any

from aifs.core.errors import DatasetError
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock

NAME = "records"
SUFFIXES: tuple[str, ...] = ()


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    """``options``: ``row_bytes``, the size of a row."""
    row_bytes = options.get("row_bytes")
    if not isinstance(row_bytes, int) or row_bytes < 1:
        raise DatasetError("format='records' needs row_bytes, the size of a row in bytes")
    if file.size % row_bytes:
        raise DatasetError(f"{file.size} bytes are not a multiple of row_bytes={row_bytes}")
    block_rows = max(1, min(BLOCK_ROWS, BLOCK_BYTES // row_bytes))
    for first in range(0, file.size // row_bytes, block_rows):
        rows = min(block_rows, file.size // row_bytes - first)
        yield RowBlock(first * row_bytes, rows * row_bytes, rows)
