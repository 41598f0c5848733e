"""Where a striped file has data and holes, told by its objects; and a settled file's bytes, as a
plain value."""

from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol

from aifs.data.server import DataServer
from aifs.data.storage import Key
from aifs.layout.striped import Striped

Range = tuple[int, int]
"""Start and end."""

_PART_BYTES = 1 << 20
_ZEROS = bytes(_PART_BYTES)


def without_zeros(buffer: memoryview) -> list[tuple[int, memoryview]]:
    """The MiBs that are not all zeros, with their offsets. Two bytes tell most of them apart."""
    parts = [
        (start, buffer[start : start + _PART_BYTES]) for start in range(0, len(buffer), _PART_BYTES)
    ]
    return [
        (start, part)
        for start, part in parts
        if part[0] or part[-1] or bytes(part) != _ZEROS[: len(part)]
    ]


class Sparse(Protocol):
    """A source that knows where a file has data."""

    async def data_range(self, offset: int, size: int, strict: bool = True) -> Range: ...


async def pieces_with_data(
    source: Sparse, size: int, piece: int, at: int = 0
) -> AsyncIterator[int]:
    """Offsets of pieces without holes, in order: multiples of ``piece``, from ``at`` on."""
    while at < size:
        start, end = await source.data_range(at, size)
        for offset in range(max(start - start % piece, at), end, piece):
            yield offset
        at = -(-end // piece) * piece


def find_data(
    server: DataServer,
    key: Key,
    fd: int | None,
    layout: Striped,
    column: int,
    offset: int,
    end: int,
) -> Range | None:
    """The first data in a column's object, within ``end`` bytes and not before the file's
    ``offset``, or None. ``fd`` None: no object. Blocks."""
    if layout.data_column(column) is None:
        offset -= offset % layout.row
    begin = layout.object_length(column, offset)
    if fd is None or begin >= end:
        return None
    return server.next_data(key, fd, begin, end)


def first_range(
    layout: Striped, found: Mapping[int, Range | None], offset: int, size: int
) -> Range:
    """See Bytes.data_range; ``found``: ``find_data`` of columns that tell all data; for other
    columns than data, whole rows count. Pure."""
    whole_rows = any(layout.data_column(column) is None for column in found)
    ranges = []
    for column, part in found.items():
        if part is None:
            continue
        start = layout.file_offset(column, part[0])
        end = layout.file_offset(column, part[1] - 1) + 1
        if whole_rows:
            start, end = start - start % layout.row, -(-end // layout.row) * layout.row
        ranges.append((max(start, offset), min(end, size)))
    if not ranges:
        return size, size
    ranges.sort()
    first, last = ranges[0]
    for start, end in ranges[1:]:
        if start <= last:
            last = max(last, end)
    return first, last


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
        """Fill ``buffer`` from a multiple of a MiB to another, or the file's end. Raises
        Unavailable."""
