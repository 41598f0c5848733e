"""Which columns to do without when bytes of a protected file are wrong and nobody says whose fault
that is. Pure.
"""

from collections.abc import Iterable, Iterator
from itertools import combinations, islice

from aifs.layout.striped import Striped

_SETS_MAX = 256


def suspect_sets(layout: Striped, columns: Iterable[int], unread: int = 0) -> Iterator[int]:
    """Masks of columns, those of fewer first, without which the bytes of the data ``columns`` can
    still be told.

    Each includes those of the mask ``unread``; the first one is these alone. At most 256, beyond
    which the search is given up: that is damage of many replicas in one place.
    """
    needed = sorted(set(columns))
    if layout.parity:
        candidates: Iterable[int] = range(len(layout.servers))
    else:
        candidates = (copy for column in needed for copy in layout.copies(column))
    others = [column for column in candidates if not unread >> column & 1]

    def is_enough(mask: int) -> bool:
        if layout.parity:
            return mask.bit_count() <= layout.parity
        return all(source_of(layout, column, mask) is not None for column in needed)

    sizes = range(len(others) + 1) if layout.is_protected else range(1)
    masks = (
        unread | sum(1 << column for column in extra)
        for size in sizes
        for extra in combinations(others, size)
    )
    yield from islice(filter(is_enough, masks), _SETS_MAX)


def source_of(layout: Striped, column: int, unread: int) -> int | None:
    """The column to read the bytes of data ``column`` from; None: they have to be decoded."""
    return next((copy for copy in layout.copies(column) if not unread >> copy & 1), None)
