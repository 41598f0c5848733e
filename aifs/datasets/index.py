"""The index of a dataset: its files, and in each file its blocks.

A *block* is what is read at once: a Parquet row group, an Arrow record batch, or a run of lines,
tar members, documents, records or small files of at most ``BLOCK_ROWS`` rows and about
``BLOCK_BYTES``. Nothing here is per row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

BLOCK_ROWS = 1000
BLOCK_BYTES = 4 << 20


class FileBytes(Protocol):
    """The bytes of one file, wherever they are."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes at ``offset``; fewer only at the end of the file."""
        ...


class RowBlock(NamedTuple):
    """A run of a file's bytes that holds whole rows."""

    offset: int
    length: int
    rows: int


class Version(NamedTuple):
    """What tells that a file is still the one that was indexed."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One file of a dataset."""

    path: bytes
    """Below the dataset's directory."""

    version: Version
    blocks: Sequence[RowBlock]
    """In the order of their offsets; without blocks the file has no rows."""


@dataclass(frozen=True, slots=True)
class Index:
    """A dataset: files in the order of their paths, as bytes compare."""

    format: str
    """The name of a format (aifs.datasets.formats)."""

    files: Sequence[IndexedFile]
