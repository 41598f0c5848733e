"""The index of a dataset: its files, and in each file its blocks.

A *block* is read at once: a Parquet row group, an Arrow record batch, or a run of lines, tar
members, documents, records or small files of at most ``BLOCK_ROWS`` rows and about ``BLOCK_BYTES``.
Nothing here is per row, and there is no object per block: an index is columns of 64-bit integers,
which are read from its file as they are.

The record of an index, in a separate file (``INDEX_NAME``):

    magic       8 bytes, ``AIFSidx1``
    header      ``<4Q``: files, blocks, bytes of the names, bytes of the catalogue
    columns     64-bit integers, little-endian: of each file its size, its mtime in ns, the number
                of its first block (and one more: the number of blocks); of each block its offset,
                its length, its rows
    names       the format's name and the files' paths, each with a zero byte after it
    catalogue   of the format "files" (see ``Index.catalogue``)
    crc32       ``<Q`` of all before it"""

import struct
import sys
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, Protocol

from aifs.core.errors import DatasetError

INDEX_NAME = ".aifs-index"
"""The file in a dataset's directory that holds its index."""

BLOCK_ROWS = 1000
BLOCK_BYTES = 4 << 20

_ROWS_MAX = 1 << 62  # what layout.order.permuted takes

_MAGIC = b"AIFSidx1"
_HEADER = struct.Struct("<8s4Q")
_END = struct.Struct("<Q")

_Column = memoryview | array
_HIGHEST_BYTE = 7 if sys.byteorder == "little" else 0


class FileBytes(Protocol):
    """The bytes of one file, wherever they are."""

    @property
    def size(self) -> int: ...

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes at ``offset``; fewer only at the end of the file."""
        ...

    def beside(self, suffix: str) -> "FileBytes":
        """The file with ``suffix`` (".idx") in place of this one's. Raises FileNotFoundError."""
        ...


class RowBlock(NamedTuple):
    """A run of a file's bytes that holds whole rows."""

    offset: int
    length: int
    rows: int


class Version(NamedTuple):
    """Equal as long as a file is the one that was indexed."""

    size: int
    mtime_ns: int


@dataclass(frozen=True, slots=True)
class IndexedFile:
    """One file of a dataset."""

    path: bytes
    """Below the dataset's directory; empty if the dataset is this one file."""

    version: Version
    blocks: Sequence[RowBlock]
    """In the order of their offsets; without blocks the file has no rows."""


@dataclass(frozen=True)
class Index:
    """A dataset: files by path, as bytes compare; blocks are numbered through them."""

    format: str
    """The name of a format (aifs.datasets.formats)."""

    paths: Sequence[bytes]
    """Of the files, below the dataset's directory."""

    sizes: Sequence[int]
    """Of the files, in bytes."""

    mtimes_ns: Sequence[int]
    """Of the files."""

    first_blocks: Sequence[int]
    """Of each file the number of its first block; then the number of all blocks."""

    offsets: Sequence[int]
    """Of the blocks, within their files."""

    lengths: Sequence[int]
    """Of the blocks, in bytes."""

    rows: Sequence[int]
    """Of the blocks."""

    catalogue: bytes | memoryview = b""
    """For "files": the one "file" of the dataset, whose blocks are runs of it; else empty."""

    @cached_property
    def total_rows(self) -> int:
        return sum(self.rows)

    def blocks_of(self, file: int) -> range:
        """Numbers of the blocks of the file with this number."""
        return range(self.first_blocks[file], self.first_blocks[file + 1])

    def bytes_of(self, file: int) -> int:
        """Of all blocks of the file with this number."""
        return sum(self.lengths[self.first_blocks[file] : self.first_blocks[file + 1]])

    def file_of(self, block: int) -> int:
        """The number of the file that holds this block."""
        return bisect_right(self.first_blocks, block) - 1

    def block(self, number: int) -> RowBlock:
        return RowBlock(self.offsets[number], self.lengths[number], self.rows[number])

    def version(self, file: int) -> Version:
        return Version(self.sizes[file], self.mtimes_ns[file])

    def file(self, number: int) -> IndexedFile:
        """One file with its blocks, as objects."""
        blocks = [self.block(block) for block in self.blocks_of(number)]
        return IndexedFile(self.paths[number], self.version(number), blocks)

    def __reduce__(self) -> tuple[Callable[[bytes], "Index"], tuple[bytes]]:
        return decode, (encode(self),)


def index_of(format: str, files: Iterable[IndexedFile], catalogue: bytes = b"") -> Index:
    """The index of ``files`` in any order; each one's blocks are iterated once, before the next."""
    taken = sorted((file.path, file.version, _columns(file.blocks)) for file in files)
    first_blocks = array("q", [0])
    columns = array("q"), array("q"), array("q")
    for _, _, of_file in taken:
        for column, part in zip(columns, of_file, strict=True):
            column.extend(part)
        first_blocks.append(len(columns[0]))
    paths = [path for path, _, _ in taken]
    sizes = array("q", (version.size for _, version, _ in taken))
    mtimes_ns = array("q", (version.mtime_ns for _, version, _ in taken))
    return Index(format, paths, sizes, mtimes_ns, first_blocks, *columns, catalogue)


def _columns(blocks: Iterable[RowBlock]) -> list["array[int]"]:
    """Offsets, lengths, rows: 9 MB for 388,000 blocks, not 60 MB of objects."""
    return [array("q", column) for column in zip(*blocks)] or [array("q") for _ in range(3)]


def encode(index: Index) -> bytes:
    """The record of ``index`` (the head of this module)."""
    names = b"".join(name + b"\0" for name in (index.format.encode(), *index.paths))
    columns = (
        index.sizes,
        index.mtimes_ns,
        index.first_blocks,
        index.offsets,
        index.lengths,
        index.rows,
    )
    header = _HEADER.pack(
        _MAGIC, len(index.paths), len(index.rows), len(names), len(index.catalogue)
    )
    record = b"".join([header, *map(_little, columns), names, index.catalogue])
    return record + _END.pack(zlib.crc32(record))


def decode(record: bytes) -> Index:
    """The index of a record, with columns in it. Raises DatasetError for any other, cut or
    contradictory bytes: writers need not be trusted."""
    view = memoryview(record)
    if len(view) < _HEADER.size + _END.size or view[: len(_MAGIC)] != _MAGIC:
        raise DatasetError("no index of a dataset")
    _, files, blocks, names_length, catalogue_length = _HEADER.unpack_from(view)
    counts = (files, files, files + 1, blocks, blocks, blocks)
    end = _HEADER.size + 8 * sum(counts) + names_length + catalogue_length
    if len(view) != end + _END.size or _END.unpack_from(view, end)[0] != zlib.crc32(view[:end]):
        raise DatasetError("a torn index of a dataset")
    at = _HEADER.size
    columns: list[_Column] = []
    for count in counts:
        columns.append(_native(view[at : at + 8 * count]))
        at += 8 * count
    text = bytes(view[at : at + names_length])
    names = text.split(b"\0")[:-1] if text.count(b"\0") == 1 + files else []
    sizes, mtimes_ns, first_blocks, offsets, lengths, rows = columns
    is_ascending = all(first <= after for first, after in pairwise(first_blocks))
    if not is_ascending or first_blocks[0] != 0 or first_blocks[-1] != blocks:
        raise DatasetError("an index whose files do not have the blocks that are there")
    if not all(map(_are_natural, (sizes, offsets, lengths, rows))):
        raise DatasetError("an index of impossible numbers")
    if len(names) != 1 + files or not names[0].isascii():
        raise DatasetError("an index whose files have other names than there are")
    format, *paths = names
    catalogue = view[at + names_length : end]
    index = Index(
        format.decode(), paths, sizes, mtimes_ns, first_blocks, offsets, lengths, rows, catalogue
    )
    if index.total_rows > _ROWS_MAX:
        raise DatasetError("an index of more rows than can be counted")
    return index


def _are_natural(column: _Column) -> bool:
    """Whether no number is negative, by highest bytes: ten times faster than the minimum, which
    would dominate opening."""
    highest = memoryview(column).cast("B")[_HIGHEST_BYTE::8]
    return bytes(highest).isascii()


def _little(column: Sequence[int]) -> bytes:
    values = array("q", column)
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()


def _native(column: memoryview) -> _Column:
    if sys.byteorder == "little":
        return column.cast("q")
    values = array("q", column.tobytes())
    values.byteswap()
    return values
