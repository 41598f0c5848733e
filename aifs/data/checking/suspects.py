"""Which columns to do without when bytes of a protected file are wrong and nobody says whose fault
that is. Pure.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations, islice

from aifs.layout.striped import Striped

_SETS_MAX = 256


def suspect_sets(
    layout: Striped, columns: Iterable[int], lost: int = 0
) -> Iterator[frozenset[int]]:
    """Sets of columns, the smaller ones first, without which the bytes of the data ``columns`` can
    still be told.

    Each includes those of the mask ``lost``; the first one is these alone. At most 256 sets, beyond
    which the search is given up: that is damage of many replicas in one place.
    """
    gone = frozenset(column for column in range(len(layout.servers)) if lost >> column & 1)
    if layout.parity:
        others = [column for column in range(len(layout.servers)) if column not in gone]
    else:
        others = [
            copy
            for column in sorted(set(columns))
            for copy in layout.copies(column)
            if copy not in gone
        ]
    needed = sorted(set(columns))

    def usable(suspects: frozenset[int]) -> bool:
        if layout.parity:
            return len(suspects) <= layout.parity
        return all(any(copy not in suspects for copy in layout.copies(column)) for column in needed)

    sizes = range(len(others) + 1) if layout.is_protected else range(1)
    found = (gone | set(extra) for size in sizes for extra in combinations(others, size))
    yield from islice(filter(usable, found), _SETS_MAX)


def source_of(layout: Striped, column: int, suspects: frozenset[int]) -> int | None:
    """The column to read the bytes of data ``column`` from; None: they have to be decoded."""
    return next((copy for copy in layout.copies(column) if copy not in suspects), None)
