"""Which blocks a rank's order file holds, and where they lie in it."""

import os
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Protocol

from aifs.core.errors import DatasetError
from aifs.datasets.index import FileBytes, Index, RowBlock
from aifs.datasets.order_files.names import OrderName
from aifs.datasets.sequence import Epoch, EpochOrder, arithmetic_for

BLOCKS_MAX = 1 << 19
"""Of a dataset whose order is made a file: 2 TiB of 4 MiB. Without numpy each takes 15 us."""


class OrderSources(Protocol):
    """The files of a dataset."""

    @property
    def index(self) -> Index: ...

    def open(self, source: int) -> FileBytes:
        """The file with this number."""
        ...

    def beside(self, file: int) -> int:
        """The number, as a source, of what belongs to a file: the .idx of a .bin. Raises
        DatasetError."""
        ...


class ChosenBlocks:
    """Blocks of an index in the order of an epoch."""

    def __init__(self, index: Index, numbers: Sequence[int]) -> None:
        self.index = index
        self.numbers = numbers
        """Of the blocks, in the index."""

    def __len__(self) -> int:
        return len(self.numbers)

    def block(self, place: int) -> RowBlock:
        return self.index.block(self.numbers[place])

    def file(self, place: int) -> int:
        """The number of the file that it lies in."""
        return self.index.file_of(self.numbers[place])

    def files(self) -> Sequence[int]:
        """Numbers of the files that any of them lies in."""
        return sorted({self.file(place) for place in range(len(self))})

    @contextmanager
    def naming(self, file: int) -> Iterator[None]:
        """What is wrong inside is said to be wrong with this file."""
        try:
            yield
        except DatasetError as error:
            raise DatasetError(f"{self.name(file)}: {error}") from error

    def name(self, file: int) -> str:
        """What messages call the file."""
        return os.fsdecode(self.index.paths[file])


def chosen_of(index: Index, name: OrderName) -> ChosenBlocks:
    """What the file ``name`` holds: of the epoch's rows, in the order of its blocks, rank r of w
    has the blocks that begin in the r-th of w equal runs. So ranks have as many rows as one
    another, but for less than a block, and together each block once.

    Raises DatasetError for too many blocks.
    """
    if len(index.rows) > BLOCKS_MAX:
        raise DatasetError(
            f"{len(index.rows):,} blocks are more than {BLOCKS_MAX:,}; make order files of parts of"
            " the dataset"
        )
    _require_sound(index)
    order = EpochOrder(name.seed, name.epoch, shares=1)
    epoch = Epoch(index, order, arithmetic_for(index))
    numbers = epoch.blocks(0)
    starts = list(accumulate((index.rows[number] for number in numbers), initial=0))
    bounds = (epoch.total_rows * rank // name.world for rank in (name.rank, name.rank + 1))
    first, end = (bisect_left(starts, bound, 0, len(numbers)) for bound in bounds)
    return ChosenBlocks(index, numbers[first:end])


def _require_sound(index: Index) -> None:
    """Raises DatasetError for blocks that do not lie in their files: an index is a user's file."""
    bounds = index.first_blocks
    is_sound = bounds[0] == 0 and bounds[-1] == len(index.rows)
    for file, (first, end) in enumerate(pairwise(bounds)):
        is_sound = is_sound and first <= end and _all_within(index, range(first, end), file)
    if not is_sound:
        raise DatasetError("the dataset's index is damaged: remove it, and make it again")


def _all_within(index: Index, blocks: range, file: int) -> bool:
    size = index.sizes[file]
    return all(
        0 <= index.offsets[one] <= size - index.lengths[one]
        and index.lengths[one] >= 0
        and index.rows[one] > 0
        for one in blocks
    )
