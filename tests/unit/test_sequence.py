"""The sequence of an epoch against a plain oracle; the record of an index."""

import pickle
import struct
import sys
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import DatasetError
from aifs.datasets.index import Index, IndexedFile, RowBlock, Version, decode, encode, index_of
from aifs.datasets.sequence import (
    SHUFFLES,
    Epoch,
    EpochOrder,
    PlainArithmetic,
    ShuffleGroup,
    arithmetic_for,
    file_windows,
    key_of,
    permuted,
)

Row = tuple[int, int]
"""Number of the block, and of the row within it."""


def oracle(index: Index, order: EpochOrder) -> list[Row]:
    """The whole global sequence, as docs/guide/datasets.md says it, by lists of all rows."""
    blocks = range(len(index.rows))
    total = sum(index.rows)
    shares: list[list[Row]] = [[] for _ in range(order.shares)]
    if order.shuffle != "blocks":
        rows = [(block, row) for block in blocks for row in range(index.rows[block])]
        if order.shuffle == "rows":
            key = key_of(order.seed, order.epoch, 3)
            return [rows[permuted(number, total, key)] for number in range(total)]
        if order.shuffle == "none":
            return rows
        buffer = order.group * order.shares
        found = []
        for count, begin in enumerate(range(0, total, buffer)):
            part = rows[begin : begin + buffer]
            key = key_of(order.seed, order.epoch, 3, 0, 0, count)
            found += [part[permuted(number, len(part), key)] for number in range(len(part))]
        return found
    windows: list[Any] = [range(len(index.paths))]
    if order.window:
        key = key_of(order.seed, order.epoch, 1)
        windows = file_windows(index.sizes, order.window, key) or windows
    carried: list[Row] = []
    for number, files in enumerate(windows):
        mine = [block for file in files for block in index.blocks_of(file)]
        key = key_of(order.seed, order.epoch, 2, number)
        mine = [mine[permuted(place, len(mine), key)] for place in range(len(mine))]
        rows = carried + [(block, row) for block in mine for row in range(index.rows[block])]
        each, over = divmod(len(rows), order.shares)
        if number < len(windows) - 1:
            carried = rows[len(rows) - over :]
            over = 0
        at = 0
        for share in range(order.shares):
            run = rows[at : at + each + (share < over)]
            at += len(run)
            for count, begin in enumerate(range(0, len(run), order.group)):
                part = run[begin : begin + order.group]
                key = key_of(order.seed, order.epoch, 3, number, share, count)
                shares[share] += [part[permuted(i, len(part), key)] for i in range(len(part))]
    return [shares[number % order.shares][number // order.shares] for number in range(total)]


def rows_of(group: ShuffleGroup) -> list[Row]:
    rows = [(piece.block, piece.first + i) for piece in group.pieces for i in range(piece.rows)]
    places = range(group.start, group.start + group.rows * group.step, group.step)
    if group.key is None:
        return [rows[place] for place in places]
    return [rows[permuted(place, group.size, group.key)] for place in places]


def index_with(files: list[list[int]]) -> Index:
    """Files with blocks of so many rows each."""
    return index_of(
        "records",
        (
            IndexedFile(
                b"%03d" % number,
                Version(10 * sum(blocks), number),
                [RowBlock(10 * at, 10, rows) for at, rows in enumerate(blocks)],
            )
            for number, blocks in enumerate(files)
        ),
    )


INDEXES = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=6).map(index_with)
ORDERS = st.builds(
    EpochOrder,
    seed=st.integers(0, 1 << 64),
    epoch=st.integers(0, 3),
    shares=st.sampled_from([1, 2, 3, 8, 64]),
    group=st.sampled_from([1, 2, 7, 156]),
    window=st.sampled_from([0, 1, 100, 300]),
    shuffle=st.sampled_from(SHUFFLES),
)


@given(INDEXES, ORDERS)
def test_each_row_comes_once_where_the_contract_says(index: Index, order: EpochOrder) -> None:
    epoch = Epoch(index, order)
    expected = oracle(index, order)
    assert sorted(expected) == [(b, r) for b, rows in enumerate(index.rows) for r in range(rows)]
    for share in range(order.shares):
        rows = [row for group in epoch.groups(share) for row in rows_of(group)]
        assert rows == expected[share :: order.shares]
        assert len(rows) == epoch.rows_of(share)
        if order.shuffle == "blocks":
            read = [(p.block, p.first + i) for p in epoch.pieces(share) for i in range(p.rows)]
            assert sorted(read) == sorted(rows)


@given(INDEXES)
def test_an_index_is_what_was_kept(index: Index) -> None:
    record = encode(index)
    for same in (decode(record), pickle.loads(pickle.dumps(index))):
        assert [same.file(n) for n in range(len(same.paths))] == [
            index.file(n) for n in range(len(index.paths))
        ]
    for torn in (record[:-1], record[:-9] + b"x" + record[-8:], b""):
        with pytest.raises(DatasetError):
            decode(torn)


@pytest.mark.parametrize(
    "version, block",
    [
        (Version(-1, 0), RowBlock(0, 1, 1)),
        (Version(1, 0), RowBlock(-1, 1, 1)),
        (Version(1, 0), RowBlock(0, -(1 << 63), 1)),
        (Version(1, 0), RowBlock(0, 1, -1)),
        (Version(1, 0), RowBlock(0, 1, (1 << 62) + 1)),
    ],
)
def test_an_index_of_impossible_numbers_is_refused(version: Version, block: RowBlock) -> None:
    """Also where they are among many others; an mtime may be negative."""
    blocks = [RowBlock(0, 1, 1), block, RowBlock((1 << 63) - 1, 1, 1)]
    record = encode(index_of("text", [IndexedFile(b"a", version, blocks)]))
    with pytest.raises(DatasetError, match=r"impossible numbers|more rows"):
        decode(record)
    before_1970 = IndexedFile(b"a", Version(1, -5), blocks[:1])
    assert decode(encode(index_of("text", [before_1970]))).version(0) == (1, -5)


@pytest.mark.parametrize("names", [b"", b"\xff\xfe\0a\0", b"text", b"text\0a\0b\0", bytes(1 << 16)])
def test_an_index_of_other_names_than_it_says_is_refused(names: bytes) -> None:
    """It is a user's file; the first two were a traceback in the daemon's log."""
    record = encode(index_of("text", [IndexedFile(b"a", Version(9, 1), [RowBlock(0, 9, 3)])]))
    magic, files, blocks, length, catalogue = struct.unpack_from("<8s4Q", record)
    columns = record[40 : len(record) - 8 - length]
    changed = struct.pack("<8s4Q", magic, files, blocks, len(names), catalogue) + columns + names
    with pytest.raises(DatasetError, match="other names than there are"):
        decode(changed + struct.pack("<Q", zlib.crc32(changed)))


def test_threads_that_begin_together_make_a_window_once() -> None:
    """Eight threads of a reader each computed, and held, the permutation of all blocks."""

    class Counted(PlainArithmetic):
        made = 0

        def blocks(self, runs: Sequence[range], key: int | None) -> Sequence[int]:
            self.made += 1
            threading.Event().wait(0.1)  # the others would come in meanwhile
            return super().blocks(runs, key)

    arithmetic = Counted()
    epoch = Epoch(index_with([[5] * 6] * 6), EpochOrder(seed=1, shares=8), arithmetic)
    with ThreadPoolExecutor(8) as pool:
        groups = list(pool.map(lambda share: epoch.group(share, 0), range(8)))
    assert arithmetic.made == 1
    assert sum(group.rows for group in groups) == 180


def test_numpy_permutes_many_blocks_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = pytest.importorskip("aifs.datasets.arrays")
    few, many = index_with([[1] * 10]), index_with([[1] * 20_000])
    assert isinstance(arithmetic_for(few), PlainArithmetic)
    assert isinstance(arithmetic_for(many), arrays.ArrayArithmetic)
    monkeypatch.setitem(sys.modules, "aifs.datasets.arrays", None)
    assert isinstance(arithmetic_for(many), PlainArithmetic)


def test_thousands_of_windows_without_rows() -> None:
    """A RecursionError: what a window passes on was looked for in the one before, and so on."""
    files = [
        IndexedFile(b"%05d" % number, Version(10, 0), [RowBlock(0, 10, 3)] if number < 9 else [])
        for number in range(3000)
    ]
    epoch = Epoch(index_of("text", files), EpochOrder(seed=1, shares=64, window=1))
    rows = [
        (piece.block, piece.first + row)
        for share in range(64)
        for piece in epoch.pieces(share)
        for row in range(piece.rows)
    ]
    assert sorted(rows) == [(block, row) for block in range(9) for row in range(3)]
