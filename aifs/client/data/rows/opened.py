"""An open file of a dataset, as libraries and the parsers of aifs.datasets.formats want to read it;
their errors with the file's name."""

import io
from collections.abc import Iterator
from contextlib import contextmanager

from aifs.client.data.rows import DatasetFile
from aifs.core.errors import DatasetError
from aifs.datasets.index import FileBytes


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
    """A Python file of an open file, with a position of its own."""

    def __init__(self, file: DatasetFile) -> None:
        super().__init__()
        self._bytes = Clipped(file)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._bytes.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def read(self, length: int | None = -1) -> bytes:
        if length is None or length < 0:
            length = self._bytes.size
        data = self._bytes.read(self._at, length)
        self._at += len(data)
        return data


@contextmanager
def naming(path: str, offset: int) -> Iterator[None]:
    """Errors of pyarrow, and of our parsers, say which file is damaged, and where."""
    import pyarrow

    try:
        yield
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        if getattr(error, "errno", None):  # of the filesystem: not what the bytes say
            raise
        message = (str(error).splitlines() or [type(error).__name__])[0]
        raise DatasetError(f"{path}: damaged in the block at byte {offset}: {message}") from error


def require_rows(path: str, offset: int, found: int, rows: int) -> None:
    """Raises DatasetError if a block has not as many rows as the index says."""
    if found != rows:
        raise DatasetError(
            f"{path}: {found} rows in the block at byte {offset}, where the index has {rows}: make"
            " the index again"
        )
