"""The files that ranks read together, one after the other as if they were one, and how fast that
goes lately.
"""

import io
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from aifs.client.checkpoints.manifest import CheckpointError
from aifs.client.torch.gather_plan import Range, Speeds
from aifs.core import files

_WORTH_MEASURING = 1 << 20

measured: dict[str, float] = {}
"""Bytes per second, as they were lately: of 'storage', and of the 'network'."""


class FoundFiles(NamedTuple):
    """The files that a rank has found. ``identity``: a digest that differs for other bytes in files
    of these names and sizes."""

    paths: Sequence[str]
    identity: str = ""

    @property
    def names(self) -> list[str]:
        return [os.path.basename(path) for path in self.paths]


class Files:
    """A context manager. Used from one thread at a time, except ``close``."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises OSError."""
        self._paths = paths
        self._number = self._fd = -1  # the one that is open
        self._closed = False
        self.sizes: list[int] = []
        """Of the files, in bytes."""
        try:
            for number in range(len(paths)):
                self.sizes.append(os.fstat(self._open(number)).st_size)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return sum(self.sizes)

    def fill(self, content: memoryview, begin: int, end: int) -> None:
        """Read a range to its place in memory for all. Raises as ``read_into``."""
        begin_s = time.monotonic()
        self.read_into(content[begin:end], begin)
        measure("storage", (begin, end), begin_s)

    def read_into(self, target: memoryview, begin: int) -> None:
        """Fill ``target`` with the bytes from ``begin`` on. Raises CheckpointError where a file has
        become shorter, OSError."""
        done = 0
        for number, (first, last) in self.places(begin, begin + len(target)):
            part = target[done : done + last - first]
            if files.read_into(self._open(number), part, first) < len(part):
                raise CheckpointError(f"{self._paths[number]}: was cut while it was read")
            done += len(part)

    def places(self, begin: int, end: int) -> Iterator[tuple[int, Range]]:
        """Where a range lies: the numbers of the files, and the range in each."""
        start = 0
        for number, size in enumerate(self.sizes):
            first, last = max(begin, start), min(end, start + size)
            if first < last:
                yield number, (first - start, last - start)
            start += size

    def _open(self, number: int) -> int:
        if number != self._number:
            self._close()
            self._fd, self._number = files.open_file(self._paths[number], write=False), number
            if self._closed:
                self._close()
        return self._fd

    def _close(self) -> None:
        fd, self._number, self._fd = self._fd, -1, -1
        if fd >= 0:
            files.close_file(fd)

    def close(self) -> None:
        """Reads in progress fail."""
        self._closed = True
        self._close()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class AsFile(io.RawIOBase):
    """Bytes as a file for torch to read."""

    def __init__(self, size: int, read_into: Callable[[memoryview, int], object]) -> None:
        """``read_into``: fills memory with the bytes from an offset on."""
        self._size, self._read_into, self._position = size, read_into, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        target = memoryview(buffer).cast("B")
        count = min(len(target), max(self._size - self._position, 0))
        self._read_into(target[:count], self._position)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = base + offset
        return self._position


def measure(what: str, moved: Range, begin_s: float) -> None:
    """Bytes have been moved since."""
    seconds = time.monotonic() - begin_s
    if moved[1] - moved[0] >= _WORTH_MEASURING and seconds > 0:
        rate = (moved[1] - moved[0]) / seconds
        measured[what] = (measured.get(what, rate) + rate) / 2


def known_speeds() -> Speeds:
    return Speeds(measured.get("storage"), measured.get("network"))
