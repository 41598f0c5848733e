"""An epoch's order as a file, ``seed=7,epoch=0,rank=0-of-8.tar``: a rank's blocks in a row, in the
dataset's format, for programs without AIFS (docs/guide/datasets.md, Virtual files). Pure: index and
order become pieces of files; formats with order files say of what (``order``)."""

import os
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

from aifs.core.errors import DatasetError
from aifs.datasets.index import FileBytes, Index, RowBlock
from aifs.datasets.sequence import Epoch, EpochOrder, arithmetic_for
from aifs.datasets.virtual import Joined, SourceRange

FORMAT_OF_SUFFIX = {
    b".tar": "tar",
    b".jsonl": "jsonl",
    b".txt": "text",
    b".bin": "megatron",
    b".idx": "megatron",
    b".rec": "records",
}
"""By suffix."""

_BY_READER = (b".parquet", b".arrow", b".arrows")
_EXAMPLE = "seed=7,epoch=0,rank=0-of-8.tar"
_NUMBER = re.compile(r"(?:0|[1-9][0-9]{0,17})")
_WORLD_MAX = 1 << 20


class OrderName(NamedTuple):
    """The fields of a name."""

    seed: int  # of all epochs
    epoch: int  # from 0
    rank: int  # from 0
    world: int  # how many ranks there are
    record_bytes: int
    """Of fixed-size records; 0 of other formats."""
    suffix: bytes
    """With its dot: a key of ``FORMAT_OF_SUFFIX``."""

    @property
    def format(self) -> str:
        return FORMAT_OF_SUFFIX[self.suffix]


def parsed(name: bytes) -> OrderName:
    """The fields of ``name``: ``seed``; maybe ``epoch`` (else 0), ``rank`` (else 0-of-1);
    ``record_bytes`` of records. Raises DatasetError for no order's name."""
    stem, dot, suffix = name.rpartition(b".")
    if dot + suffix in _BY_READER:
        raise DatasetError(
            "Parquet and Arrow have no order files: read the dataset with aifs.client.data"
        )
    if dot + suffix not in FORMAT_OF_SUFFIX:
        known = " ".join(map(bytes.decode, FORMAT_OF_SUFFIX))
        raise DatasetError(f"an order file's name ends with one of {known}, as {_EXAMPLE}")
    given: dict[str, str] = {}
    for field in stem.decode(errors="replace").split(","):
        key, equals, value = field.partition("=")
        if not equals or key in given or key not in ("seed", "epoch", "rank", "record_bytes"):
            raise DatasetError(f"{field!r} in the name of an order file, which is as {_EXAMPLE}")
        given[key] = value
    rank, _, world = given.pop("rank", "0-of-1").partition("-of-")
    found = OrderName(
        _number(given.get("seed", "")),
        _number(given.get("epoch", "0")),
        _number(rank),
        _number(world),
        _number(given.get("record_bytes", "0")),
        dot + suffix,
    )
    if not found.rank < found.world <= _WORLD_MAX:
        raise DatasetError(f"rank={rank}-of-{world}: ranks count from 0, and are below the world")
    if (found.format == "records") != bool(found.record_bytes):
        raise DatasetError("a name with .rec, and no other, has record_bytes=, the size of a row")
    return found


def _number(text: str) -> int:
    if not _NUMBER.fullmatch(text):
        raise DatasetError(f"{text!r} is no number, in the name of an order file as {_EXAMPLE}")
    return int(text)


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
        """A file's companion's number as a source: the .idx of a .bin. Raises DatasetError."""
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
        """Errors inside name this file."""
        try:
            yield
        except DatasetError as error:
            raise DatasetError(f"{self.name(file)}: {error}") from error

    def name(self, file: int) -> str:
        """The file's name in messages."""
        return os.fsdecode(self.index.paths[file])


def chosen_of(index: Index, name: OrderName) -> ChosenBlocks:
    """The blocks of the file ``name``: rank r of w has blocks of the epoch's order that begin in
    the r-th of w equal runs of rows. Ranks differ by less than a block, and have each block once.
    Raises DatasetError for too many blocks."""
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
    """Raises DatasetError for blocks outside their files: an index is a user's file."""
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


def in_order(
    blocks: ChosenBlocks, after: Callable[[int, RowBlock], bytes] = lambda file, block: b""
) -> Joined:
    """The blocks in a row; ``after`` each (of this file) its returned bytes."""
    found = Joined()
    for place in range(len(blocks)):
        file, block = blocks.file(place), blocks.block(place)
        found.add(SourceRange(file, block.offset, block.length))
        found.add(after(file, block))
    return found
