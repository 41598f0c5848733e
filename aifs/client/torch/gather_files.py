"""The files that ranks read together, one after the other as if they were one, and how fast that
goes lately.
"""

import os
import time
from collections.abc import Sequence
from typing import NamedTuple

from aifs.client.manifest import CheckpointError
from aifs.client.torch.gather_plan import Range, Speeds
from aifs.core import files

_WORTH_MEASURING = 1 << 20

measured: dict[str, float] = {}
"""Bytes per second, as they were lately: of 'storage', and of the 'network'."""


class FoundFiles(NamedTuple):
    """What a rank has found. ``identity``: what makes it other bytes than files of these names and
    sizes.
    """

    paths: Sequence[str]
    identity: str = ""

    @property
    def names(self) -> list[str]:
        return [os.path.basename(path) for path in self.paths]


class Files:
    """A context manager. Used from one thread at a time, but for ``close``."""

    def __init__(self, paths: Sequence[str]) -> None:
        """Raises OSError."""
        self._paths = paths
        self._number = self._fd = -1  # the one that is open
        self._closed = False
        self._sizes: list[int] = []
        try:
            for number in range(len(paths)):
                self._sizes.append(os.fstat(self._open(number)).st_size)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return sum(self._sizes)

    def fill(self, content: memoryview, begin: int, end: int) -> None:
        """Read a range to its place in memory for all. Raises CheckpointError where a file has
        become shorter, OSError.
        """
        begin_s, start = time.monotonic(), 0
        for number, size in enumerate(self._sizes):
            first, last = max(begin, start), min(end, start + size)
            if (
                first < last
                and files.read_into(self._open(number), content[first:last], first - start)
                < last - first
            ):
                raise CheckpointError(f"{self._paths[number]}: was cut while it was read")
            start += size
        measure("storage", (begin, end), begin_s)

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
        """Whoever still reads fails."""
        self._closed = True
        self._close()

    def __enter__(self) -> "Files":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def measure(what: str, moved: Range, begin_s: float) -> None:
    """Bytes have been moved since."""
    seconds = time.monotonic() - begin_s
    if moved[1] - moved[0] >= _WORTH_MEASURING and seconds > 0:
        rate = (moved[1] - moved[0]) / seconds
        measured[what] = (measured.get(what, rate) + rate) / 2


def known_speeds() -> Speeds:
    return Speeds(measured.get("storage"), measured.get("network"))
