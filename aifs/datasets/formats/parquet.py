"""Parquet: each row group is a block. pyarrow reads the footers."""

import io
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from aifs.core.errors import DatasetError
from aifs.datasets.index import FileBytes, RowBlock

if TYPE_CHECKING:
    from pyarrow import parquet

NAME = "parquet"
SUFFIXES: tuple[str, ...] = (".parquet",)

MAGIC = b"PAR1"
_TAIL = 64 << 10
_FOOTER_MAX = 256 << 20
"""A larger footer is an attack: it would be held in memory."""


def blocks(file: FileBytes, options: Mapping[str, Any]) -> Iterator[RowBlock]:
    if not file.size:
        return
    data = footer(file)
    spans = list(_spans(metadata(data), file.size - len(data)))
    yield from spans


def footer(file: FileBytes) -> bytes:
    """The end of a Parquet file, from the first byte of its metadata. Raises DatasetError if this
    is no Parquet file, or not all of one."""
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
    """Decode a footer by pyarrow. Raises DatasetError.

    Its columns are asked for after ``_require_told`` alone.
    """
    import pyarrow
    from pyarrow import parquet

    with _footer_faults():
        return parquet.read_metadata(pyarrow.BufferReader(MAGIC + footer))


@contextmanager
def _footer_faults() -> Iterator[None]:
    """Raise DatasetError for any error that pyarrow raises for a footer."""
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
    """Raises DatasetError if these columns of these row groups are encrypted, or missing: asked for
    them pyarrow ends the process.

    A reader that buffers ahead finds out, with an exception, before it reads the first byte.
    """
    from pyarrow import parquet

    with _footer_faults(), suppress(_ReadError):
        file = parquet.ParquetFile(_Unread(end), metadata=meta, pre_buffer=True)
        next(file.reader.iter_batches(1, list(groups), list(columns), False), None)


class _ReadError(Exception):
    pass


class _Unread(io.RawIOBase):
    """A file of which only the size is known."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read(self, length: int | None = -1) -> bytes:
        raise _ReadError


def _start(column: "parquet.ColumnChunkMetaData") -> int:
    dictionary, data = column.dictionary_page_offset, column.data_page_offset
    return dictionary if dictionary and 0 < dictionary < data else data
