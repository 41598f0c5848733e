"""Names of virtual files and directories, and their inode numbers, which no record can have."""

from aifs.core.errors import ReadOnly
from aifs.core.names import VIRTUAL

FIRST = 1 << 62
"""In all virtual numbers. With the directory's number: ``.aifs-data``."""

ORDERS = FIRST | 1 << 59
"""The same of ``.aifs-data/order``."""

FILES = FIRST | 1 << 60
"""From here on come files, one number for each content."""


def require_on_record(ino: int) -> None:
    """Raises ReadOnly for what is virtual, which nobody changes."""
    if ino >= FIRST:
        raise ReadOnly("it is virtual")


def require_missing(parent: int, name: bytes) -> None:
    """Of a name to be taken away that is not on record. Raises ReadOnly if it is virtual."""
    if name == VIRTUAL:
        raise ReadOnly("it is virtual")
    require_on_record(parent)


def directory_of(ino: int) -> int:
    """The directory on record that a virtual directory belongs to."""
    return ino & ~ORDERS
