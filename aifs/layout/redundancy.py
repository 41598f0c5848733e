"""The redundancy of new files, by policy and configuration, and its layout. Pure."""

from typing import NamedTuple

from aifs.core.errors import Invalid
from aifs.core.units import format_size

ROW_MAX = 4 << 20
"""A row of a coded file is at most so long, so that a piece that is drained holds whole ones."""

REPLICAS_MAX = 8
DATA_MAX = 16
PARITY_MAX = 8
COLUMNS_MAX = 32
"""Of a protected file, so that a mask of them is a u32."""


class Redundancy(NamedTuple):
    """``replicas`` of each byte (1: one), or ``parity`` for each ``data`` columns (0: none)."""

    replicas: int = 1
    data: int = 0
    parity: int = 0

    @property
    def is_protected(self) -> bool:
        return self.replicas > 1 or self.parity > 0

    @property
    def tolerates(self) -> int:
        """How many columns, whichever, may be lost."""
        return self.replicas - 1 + self.parity

    @property
    def least_servers(self) -> int:
        """How many servers a file needs to be protected so."""
        return self.data + self.parity if self.parity else self.replicas

    def columns(self, count: int, available: int) -> int:
        """Servers of ``available`` for a file striped over ``count`` (0: all): ``least_servers`` at
        least, even if missing. Coded files have a fixed number."""
        if self.parity:
            return self.least_servers
        width = min(count or available, available // self.replicas)
        if self.replicas > 1:
            width = min(width, COLUMNS_MAX // self.replicas)
        return max(width, 1) * self.replicas

    def unit(self, unit: int) -> int:
        """New files' stripe unit, by the usual ``unit``: coded rows have at most ROW_MAX."""
        if not self.parity:
            return unit
        return 1 << (min(unit, ROW_MAX // self.data).bit_length() - 1)


PLAIN = Redundancy()


def parse_ec(text: str) -> tuple[int, int]:
    """Data and parity columns of ``4+2``; (0, 0) for ``none``. Raises Invalid."""
    if text == "none":
        return 0, 0
    data, plus, parity = text.partition("+")
    if not (
        plus
        and all(part.isascii() and part.isdigit() and len(part) <= 3 for part in (data, parity))
    ):
        raise Invalid(f"layout: ec={text} is neither 'none' nor DATA+PARITY, as in 'ec=4+2'")
    numbers = int(data), int(parity)
    if not (2 <= numbers[0] <= DATA_MAX and 1 <= numbers[1] <= PARITY_MAX):
        raise Invalid(
            f"layout: ec={text}: there may be 2 to {DATA_MAX} data and 1 to {PARITY_MAX} parity "
            "columns"
        )
    return numbers


def format_ec(data: int, parity: int) -> str:
    return f"{data}+{parity}" if parity else "none"


def check_coded_unit(unit: int, data: int) -> None:
    """Raises Invalid if files with ``data`` data columns cannot have this unit."""
    if unit & (unit - 1):
        raise Invalid(f"layout: unit={format_size(unit)}: with ec it has to be a power of two")
    if unit * data > ROW_MAX:
        most = format_size(Redundancy(data=data, parity=1).unit(unit))
        raise Invalid(
            f"layout: unit={format_size(unit)}: with {data} data columns it may be {most} at most"
        )
