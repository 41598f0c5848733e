"""Shared by all formats: the interfaces of files and their rows, reads of bytes, rows as blocks."""

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from aifs.core.errors import DatasetError
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock

if TYPE_CHECKING:
    import pyarrow

ROW_BYTES_MAX = 1 << 30
"""A row is held in memory: a longer one is a mistake, or an attack."""

_NEAR = 4 << 10
_FAR = 64 << 10


class DatasetFile(Protocol):
    """One open file of a dataset, as it was when it was indexed."""

    @property
    def path(self) -> str:
        """Where it is: to be named in errors, and for libraries that open files themselves."""
        ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """All of these ``length`` bytes. Raises OSError (ESTALE), with the file's name, for another
        file than indexed. Blocks; holds no lock."""
        ...


class BlockRows(Protocol):
    """The rows of one block, in memory; not yet decoded where the format allows it."""

    def take(self, rows: Sequence[int]) -> list[Any]:
        """These rows, by their numbers in the block, in this order, as users get them."""
        ...

    def batch(self, first: int, rows: int) -> "pyarrow.RecordBatch":
        """``rows`` rows from ``first`` on, undecoded. All batches of a dataset have one schema."""
        ...


OpenBlock = Callable[[int, RowBlock], BlockRows]
"""Reads the block with this number (from 0) within a file, whose footer or header has been read.
Blocks."""


class SmallReads:
    """Small reads at rising offsets: each call fetches 4 KiB, up to 64 KiB for close reads."""

    def __init__(self, file: FileBytes) -> None:
        self._file = file
        self._data = b""
        self._start = 0
        self._length = _NEAR

    @property
    def size(self) -> int:
        """Of the file, in bytes."""
        return self._file.size

    def at(self, offset: int, length: int) -> bytes:
        """These bytes, all of them. Raises DatasetError if the file ends before."""
        start = offset - self._start
        if start < 0 or start + length > len(self._data):
            self._fetch(offset, length)
            start = 0
        return self._data[start : start + length]

    def _fetch(self, offset: int, length: int) -> None:
        if offset < 0 or offset + length > self._file.size:
            raise DatasetError(
                f"{length} bytes at byte {offset} lie beyond the end (byte {self._file.size}):"
                " the file is torn"
            )
        end = self._start + len(self._data)
        is_near = self._start <= offset < end + self._length
        self._length = min(2 * self._length, _FAR) if is_near else _NEAR
        self._data = self._file.read(offset, max(length, self._length))
        self._start = offset
        if len(self._data) < length:
            raise DatasetError(f"the file ends at byte {offset + len(self._data)} while it is read")


class InMemory:
    """Bytes, as a file has them."""

    def __init__(self, data: bytes | memoryview) -> None:
        self._data = memoryview(data)

    @property
    def size(self) -> int:
        return len(self._data)

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length])

    def beside(self, suffix: str) -> FileBytes:
        raise FileNotFoundError(suffix)


class Clipped:
    """A ``FileBytes`` of an open file."""

    def __init__(self, file: DatasetFile) -> None:
        self._file = file

    @property
    def size(self) -> int:
        return self._file.size

    def read(self, offset: int, length: int) -> bytes:
        length = min(length, self.size - offset)
        return self._file.read(offset, length) if length > 0 else b""

    def beside(self, suffix: str) -> FileBytes:
        raise FileNotFoundError(suffix)


class Seekable(io.RawIOBase):
    """A Python file with its own position, of ``size`` bytes that ``fetch`` reads."""

    def __init__(self, size: int, fetch: Callable[[int, int], bytes]) -> None:
        super().__init__()
        self._size = size
        self._fetch = fetch
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, length: int | None = -1) -> bytes:
        if length is None or length < 0:
            length = self._size
        data = self._fetch(self._at, length)
        self._at += len(data)
        return data


def row_bytes_checked(offset: int, length: int) -> int:
    """``length``. Raises DatasetError if no row can have so many bytes."""
    if length > ROW_BYTES_MAX:
        raise DatasetError(
            f"the row at byte {offset} has {length} bytes; rows are held in memory and have at most"
            f" {ROW_BYTES_MAX}"
        )
    return length


def in_blocks(rows: Iterable[tuple[int, int]]) -> Iterator[RowBlock]:
    """Blocks of rows (start and end of each) that lie one after the other."""
    first = last = count = 0
    for start, end in rows:
        row_bytes_checked(start, end - start)
        if count and (count == BLOCK_ROWS or end - first > BLOCK_BYTES):
            yield RowBlock(first, last - first, count)
            count = 0
        if not count:
            first = start
        last = end
        count += 1
    if count:
        yield RowBlock(first, last - first, count)


def require_rows(path: str, offset: int, found: int, rows: int) -> None:
    """Raises DatasetError if a block has not as many rows as the index says."""
    if found != rows:
        raise DatasetError(
            f"{path}: {found} rows in the block at byte {offset}, where the index has {rows}: make"
            " the index again"
        )
