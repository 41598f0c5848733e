"""What formats share: small reads at rising offsets by few calls, and runs of rows as blocks."""

from collections.abc import Iterable, Iterator

from aifs.core.errors import DatasetError
from aifs.datasets.index import BLOCK_BYTES, BLOCK_ROWS, FileBytes, RowBlock

ROW_BYTES_MAX = 1 << 30
"""A row is held in memory: a longer one is a mistake, or an attack."""

_NEAR = 4 << 10
_FAR = 64 << 10


class SmallReads:
    """Reads of a few bytes at rising offsets of one file.

    Each call of the file fetches 4 KiB; where the reads lie close together, up to 64 KiB.
    """

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
