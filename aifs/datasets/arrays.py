"""The order's permutations by numpy: those of all blocks of a window at once."""

from collections.abc import Iterable, Sequence

import numpy as np

from aifs.datasets.index import Index
from aifs.datasets.sequence import ROUNDS, FileRead, ShareReads

_AT_ONCE = 1 << 15  # numbers: what is computed of them stays in a processor's cache


class ArrayArithmetic:
    """See ``sequence.Arithmetic``: the results of ``PlainArithmetic``, a hundred times faster."""

    def blocks(self, runs: Sequence[range], key: int | None) -> Sequence[int]:
        parts = [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]
        numbers = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return (numbers if key is None else numbers[all_permuted(len(numbers), key)]).data

    def starts(self, rows: Sequence[int], blocks: Sequence[int]) -> Sequence[int]:
        counts = np.asarray(rows, np.int64)[np.asarray(blocks, np.int64)]
        return np.concatenate(([0], np.cumsum(counts))).data

    def files_read(self, index: Index, reads: Iterable[ShareReads]) -> Sequence[FileRead]:
        cut = [*map(_cut, reads)]
        if not cut:
            return []
        blocks, firsts, lasts = map(np.concatenate, zip(*cut))
        files = np.searchsorted(index.first_blocks, blocks, "right") - 1
        lengths, rows = np.asarray(index.lengths)[blocks], np.asarray(index.rows)[blocks]
        count = len(index.paths)
        first = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(first, files, firsts)
        last, read = np.zeros(count, np.int64), np.zeros(count, np.int64)
        np.maximum.at(last, files, lasts)
        np.add.at(read, files, lengths * (lasts - firsts) // rows)
        found = np.flatnonzero(last)
        columns = (found, first[found], last[found], read[found])
        return [*map(FileRead, *(column.tolist() for column in columns))]


def _cut(reads: ShareReads) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The blocks with rows to read, and these rows of the share, from and until."""
    starts = np.asarray(reads.starts, np.int64) + reads.shift
    bounds = np.clip(starts, reads.rows.start, reads.rows.stop)
    is_read = bounds[:-1] < bounds[1:]
    blocks = np.asarray(reads.blocks, np.int64)
    return blocks[is_read], bounds[:-1][is_read], bounds[1:][is_read]


def all_permuted(size: int, key: int) -> np.ndarray:
    """``layout.order.permuted`` of each number below ``size``. The network permutes the next power
    of four, computed at once: going round again is looking up."""
    if size < 2:
        return np.arange(size)
    half_bits = ((size - 1).bit_length() + 1) // 2
    half_mask = (1 << half_bits) - 1
    # What a round mixes in depends on one half of the number, of which there are few.
    keys = np.array([key ^ (number << 56) for number in range(ROUNDS)], np.uint64)
    halves = np.arange(half_mask + 1, dtype=np.uint64)
    mixed = (_mixed(keys[:, None] ^ halves) & np.uint64(half_mask)).astype(np.int64)
    total = 1 << 2 * half_bits
    leads_to = np.empty(total, np.int64)
    for first in range(0, total, _AT_ONCE):
        numbers = np.arange(first, min(first + _AT_ONCE, total))
        left, right = numbers >> half_bits, numbers & half_mask
        for of_half in mixed:
            left, right = right, left ^ of_half[right]
        leads_to[first : first + len(numbers)] = (left << half_bits) | right
    found = leads_to[:size]
    while len(outside := np.flatnonzero(found >= size)):
        found[outside] = leads_to[found[outside]]
    return found


def _mixed(values: np.ndarray) -> np.ndarray:
    """``layout.order.mix`` of each, in 64 bits."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
