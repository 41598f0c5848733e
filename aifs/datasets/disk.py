"""Files of a dataset on disk: as the formats index them, and as rows are read from them."""

import errno
import os

from aifs.core.files import close_file, open_file
from aifs.datasets.index import FileBytes, Version


class DiskFile:
    """A file as it is; see ``FileBytes``. It is closed with the last reference to it."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._fd = -1
        self._fd = open_file(path, write=False)
        self.version = self.current()
        """When it was opened."""

    def __del__(self) -> None:
        if self._fd != -1:
            close_file(self._fd)

    @property
    def size(self) -> int:
        return self.version.size

    def current(self) -> Version:
        """Its present version."""
        return version_of(os.fstat(self._fd))

    def expect_random(self) -> None:
        """Reads come in random order: the kernel should not read ahead."""
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_RANDOM)

    def read(self, offset: int, length: int) -> bytes:
        parts = []
        while length > 0 and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset += len(part)
            length -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def beside(self, suffix: str) -> FileBytes:
        return DiskFile(os.path.splitext(self.path)[0] + suffix)


class IndexedDiskFile:
    """A file as it was when it was indexed; see ``DatasetFile``."""

    def __init__(self, path: str, version: Version) -> None:
        self.path = path
        self._version = version
        self._disk = DiskFile(path)
        self._require_same()

    @property
    def size(self) -> int:
        return self._version.size

    def read(self, offset: int, length: int) -> bytes:
        data = self._disk.read(offset, length)
        self._require_same()  # after the bytes: they are of this version
        if len(data) != length:
            raise changed(self.path)
        return data

    def _require_same(self) -> None:
        if self._disk.current() != self._version:
            raise changed(self.path)


def version_of(found: os.stat_result) -> Version:
    return Version(found.st_size, found.st_mtime_ns)


def changed(path: str | bytes) -> OSError:
    """ESTALE, with the file's name."""
    return OSError(errno.ESTALE, "the file has changed since the dataset was indexed", path)
