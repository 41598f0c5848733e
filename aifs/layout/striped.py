"""Striped layout: RAID-0 order over the objects of one file, with replicas or parity beside it
where it is protected.

A file is cut into *stripe units* of ``unit`` bytes. With ``width`` data columns, unit u lies in
data column u mod width, at offset (u div width) * unit of its object. *Columns* are the objects in
the order of ``servers``; that order is chosen once per file (see ``placement``) and recorded with
it; no server has two of them.

- *plain*: the data columns are all there is.
- *replicated* (``replicas`` = r > 1): replica j of data column c is column c + j * width.
- *coded* (``parity`` = m > 0): after the data columns come m parity columns. A *row* is ``width``
  units, one of each data column; the units of its parity are computed over them, each zero-padded
  to the length of the row's first one. So a parity object is as long as that of data column 0, and
  where a whole row is zeros (a hole), so is its parity.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from aifs.layout.kinds import Layout
from aifs.layout.placement import BURST_FIRST

UNIT_MIN = 4096
UNIT_MAX = 1 << 30


class ColumnExtent(NamedTuple):
    """A run of a file's bytes that is one run in one object."""

    column: int
    """The number of the data column."""
    object_offset: int
    file_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Striped(Layout):
    """A file's layout: unit in bytes, data servers by columns, redundancy."""

    unit: int
    servers: tuple[int, ...]
    replicas: int = 1
    parity: int = 0

    kind: ClassVar[str] = "striped"

    @property
    def objects(self) -> "Striped | None":
        """See Layout."""
        return self

    @property
    def is_possible(self) -> bool:
        """See Layout."""
        servers = self.servers
        distinct = 0 < len(servers) == len(set(servers)) and max(servers) < BURST_FIRST
        return distinct and UNIT_MIN <= self.unit <= UNIT_MAX

    @property
    def width(self) -> int:
        """How many data columns there are: they are columns 0 to width - 1."""
        return len(self.servers) // self.replicas - self.parity

    @property
    def is_protected(self) -> bool:
        return self.replicas > 1 or self.parity > 0

    @property
    def tolerates(self) -> int:
        """How many columns, whichever, may be lost."""
        return self.replicas - 1 + self.parity

    @property
    def row(self) -> int:
        """Bytes of the file that one row holds."""
        return self.unit * self.width

    @property
    def data(self) -> "Striped":
        """The data columns alone, which hold all bytes of the file, as a plain layout."""
        return Striped(self.unit, self.servers[: self.width]) if self.is_protected else self

    def data_column(self, column: int) -> int | None:
        """The data column whose bytes this one holds; None for parity."""
        if column < self.width:
            return column
        return None if self.parity else column % self.width

    def copies(self, column: int) -> tuple[int, ...]:
        """The columns that hold the same bytes, itself among them, in order of replicas."""
        if self.replicas == 1:
            return (column,)
        return tuple(range(column % self.width, len(self.servers), self.width))

    def moved(self, column: int, server: int) -> "Striped":
        """The same with one column on another server."""
        servers = (*self.servers[:column], server, *self.servers[column + 1 :])
        return Striped(self.unit, servers, self.replicas, self.parity)

    def spare(self, unread: int) -> int:
        """How many more columns may be lost besides ``unread``; negative: bytes are lost."""
        if self.replicas > 1:
            return (
                min(
                    sum(not unread >> copy & 1 for copy in self.copies(column))
                    for column in range(self.width)
                )
                - 1
            )
        return self.parity - unread.bit_count()

    def survives(self, unread: int) -> bool:
        """Whether all bytes can be told without the columns of the mask ``unread``."""
        return self.spare(unread) >= 0

    def extents(self, offset: int, length: int) -> Iterator[ColumnExtent]:
        """Extents of data columns that cover the range, in file order, none empty."""
        unit, count = self.unit, self.width
        end = offset + length
        while offset < end:
            row_unit, within = divmod(offset, unit)
            row, index = divmod(row_unit, count)
            step = min(unit - within, end - offset) if count > 1 else end - offset
            yield ColumnExtent(index, row * unit + within, offset, step)
            offset += step

    def object_length(self, index: int, size: int) -> int:
        """The length of column ``index`` in a file of ``size`` bytes; 0: no object."""
        unit, count = self.unit, self.width
        if index >= count:
            index = 0 if self.parity else index % count
        full_rows, rest = divmod(size, unit * count)
        return full_rows * unit + min(max(rest - index * unit, 0), unit)

    def file_offset(self, column: int, offset: int) -> int:
        """The file's offset of an object's byte; for parity, its row's start."""
        row, within = divmod(offset, self.unit)
        data = self.data_column(column)
        return row * self.row + (0 if data is None else data * self.unit + within)
