"""The bytes of a settled file: what those in objects are named by, as a plain value, and what all
of them are read through.
"""

from typing import NamedTuple, Protocol

from aifs.data.objects.holes import Sparse
from aifs.layout.striped import Striped


class InObjects(NamedTuple):
    """The bytes of a settled file are in objects."""

    ino: int
    oid: int
    layout: Striped
    unread: int = 0
    """Mask of columns that must not be read."""
    digests: bytes = b""
    """The checksum of each MiB of the file; b"" of a file that has none."""


class Source(Sparse, Protocol):
    """The bytes of a settled file of ``size`` bytes."""

    async def read_into(self, offset: int, buffer: memoryview, size: int) -> None:
        """Fill ``buffer`` from ``offset`` on, a multiple of a MiB; its end is another, or the
        file's. Raises Unavailable.
        """
