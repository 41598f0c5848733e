"""Striped layout: RAID-0 order over the objects of one file.

A file is cut into *stripe units* of ``unit`` bytes. With n servers, unit u lies in object u mod n, at
offset (u div n) * unit of that object. Objects are numbered by their place in ``servers``; that order is
chosen once per file (see ``placement``) and recorded with it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

UNIT_MIN = 4096
UNIT_MAX = 1 << 30


class Extent(NamedTuple):
    """A run of a file's bytes that is one run in one object."""

    index: int  # of the object, in the order of Striped.servers
    object_offset: int
    file_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Striped:
    """The layout of one file: the unit in bytes and the ids of its data servers, in stripe order."""

    unit: int
    servers: tuple[int, ...]

    def extents(self, offset: int, length: int) -> Iterator[Extent]:
        """The byte range as extents, in file order. Together they cover it exactly; none is empty."""
        unit, count = self.unit, len(self.servers)
        end = offset + length
        while offset < end:
            row_unit, within = divmod(offset, unit)
            row, index = divmod(row_unit, count)
            step = min(unit - within, end - offset) if count > 1 else end - offset
            yield Extent(index, row * unit + within, offset, step)
            offset += step

    def object_length(self, index: int, size: int) -> int:
        """How long object ``index`` is when the file has ``size`` bytes; 0 means that it does not exist."""
        unit, count = self.unit, len(self.servers)
        full_rows, rest = divmod(size, unit * count)
        return full_rows * unit + min(max(rest - index * unit, 0), unit)
