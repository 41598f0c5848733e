"""The .idx to a .bin that holds documents in another order (the .bin is as ``plain`` has it): the
lists of the files' own .idx, block by block, in which positions are shifted."""

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from aifs.core.errors import DatasetError
from aifs.datasets.formats.megatron import HEADER, MAGIC, VERSION, Documents
from aifs.datasets.index import RowBlock
from aifs.datasets.order_files.chosen import ChosenBlocks, OrderSources
from aifs.datasets.virtual import Joined, ShiftedNumbers, SourceRange


class _Run(NamedTuple):
    """What an .idx says of a block."""

    source: int
    documents: Documents
    block: RowBlock
    first: int  # document
    low: int  # the first sequence
    high: int  # after the last one


def joined(blocks: ChosenBlocks, sources: OrderSources) -> Joined:
    """As the package has it; two reads of an .idx for each block."""
    runs = list(_runs(blocks, sources))
    sequences = sum(run.high - run.low for run in runs)
    documents = sum(run.block.rows for run in runs)
    codes = {run.documents.code for run in runs} or {1}
    if len(codes) > 1:
        raise DatasetError("the tokens of the dataset's files are of several types")
    found = Joined()
    found.add(HEADER.pack(MAGIC, VERSION, codes.pop(), sequences, documents + 1))
    for run in runs:
        at = run.documents.lengths_at + 4 * run.low
        found.add(SourceRange(run.source, at, 4 * (run.high - run.low)))
    start = 0
    for run in runs:
        at = run.documents.pointers_at + 8 * run.low
        length = 8 * (run.high - run.low)
        found.add(ShiftedNumbers(run.source, at, length, start - run.block.offset))
        start += run.block.length
    start = 0
    for run in runs:
        at = run.documents.bounds_at + 8 * run.first
        found.add(ShiftedNumbers(run.source, at, 8 * run.block.rows, start - run.low))
        start += run.high - run.low
    found.add(sequences.to_bytes(8, "little"))
    return found


def _runs(blocks: ChosenBlocks, sources: OrderSources) -> Iterator[_Run]:
    index = blocks.index
    files: dict[int, tuple[int, Documents, list[int]]] = {}
    for file in blocks.files():
        with blocks.naming(file):
            source = sources.beside(file)
            documents = Documents(sources.open(source), index.sizes[file])
        of_blocks = (index.rows[number] for number in index.blocks_of(file))
        files[file] = source, documents, list(accumulate(of_blocks, initial=0))
    for place, number in enumerate(blocks.numbers):
        file, block = blocks.file(place), blocks.block(place)
        source, documents, firsts = files[file]
        first = firsts[number - index.first_blocks[file]]
        with blocks.naming(file):
            if first + block.rows > documents.count:
                raise DatasetError("its documents are not those of the index: make that again")
            low, high = documents.bound(first), documents.bound(first + block.rows)
            if not 0 <= low <= high <= documents.sequences:
                raise DatasetError(f"document {first} has sequences {low} to {high}")
        yield _Run(source, documents, block, first, low, high)
