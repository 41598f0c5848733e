"""What an epoch reads next, against a plain walk through all its pieces; orders as text."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import DatasetError, Invalid
from aifs.datasets.ahead import (
    MOSTLY,
    Announced,
    FileNeed,
    files_needed,
    parse,
    peak_bytes,
    shares_read,
)
from aifs.datasets.arrays import ArrayArithmetic
from aifs.datasets.index import Index, IndexedFile, RowBlock, Version, decode, encode, index_of
from aifs.datasets.sequence import Epoch, EpochOrder, PlainArithmetic

EVERYTHING = 1 << 40


def index_with(files: list[list[int]]) -> Index:
    """Files with blocks of so many rows, of 10 bytes each, after a header of 7 bytes."""
    found = []
    for number, blocks in enumerate(files):
        ends = [7 + 10 * sum(blocks[: at + 1]) for at in range(len(blocks))]
        rows = [RowBlock(end - 10 * count, 10 * count, count) for end, count in zip(ends, blocks)]
        found.append(IndexedFile(b"%03d" % number, Version(max([7, *ends]), number), rows))
    return index_of("text", found)


INDEXES = st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=8).map(index_with)


@st.composite
def epochs(draw: st.DrawFn) -> tuple[Epoch, list[int]]:
    """An epoch, and the shares that are read here."""
    shares = draw(st.integers(1, 9))
    order = EpochOrder(draw(st.integers(0, 99)), 1, shares, 3, draw(st.sampled_from([0, 60, 200])))
    mine = draw(st.lists(st.integers(0, shares - 1), min_size=1, unique=True))
    arithmetic = draw(st.sampled_from([PlainArithmetic(), ArrayArithmetic()]))
    return Epoch(draw(INDEXES), order, arithmetic), mine


def walked(epoch: Epoch, window: int, shares: list[int]) -> list[FileNeed]:
    """The same, by every row of every share."""
    index, rows_of = epoch.index, {}
    for share in shares:
        row = 0
        for group in epoch.groups(share):
            for piece in group.pieces:
                for _ in range(piece.rows):
                    if epoch.window_of(row) == window:
                        rows_of.setdefault(index.file_of(piece.block), []).append(row)
                    row += 1
    return sorted(
        (
            FileNeed(file, min(rows), max(rows) + 1)
            for file, rows in rows_of.items()
            if len(rows) >= MOSTLY * sum(index.rows[block] for block in index.blocks_of(file))
        ),
        key=lambda need: (need.first, need.file),
    )


@pytest.mark.sweep
@given(epochs())
def test_files_are_those_that_the_shares_read_most_of(drawn: tuple[Epoch, list[int]]) -> None:
    epoch, shares = drawn
    for window in range(len(epoch.windows)):
        assert files_needed(epoch, window, shares, EVERYTHING) == walked(epoch, window, shares)


@given(epochs(), st.integers(0, 400))
def test_a_window_that_cannot_be_kept_is_left_alone(
    drawn: tuple[Epoch, list[int]], most: int
) -> None:
    epoch, shares = drawn
    for window in range(len(epoch.windows)):
        needed = files_needed(epoch, window, shares, most)
        everything = walked(epoch, window, shares)
        rows = {row for need in everything for row in (need.first, need.last - 1)}
        peak = max(
            (
                sum(epoch.index.sizes[n.file] for n in everything if n.first <= row < n.last)
                for row in rows
            ),
            default=0,
        )
        assert peak == peak_bytes(epoch.index, everything)
        expected = everything if peak <= most else []
        assert needed in ([], expected)
        if sum(epoch.index.sizes) <= 2 * most:
            assert needed == expected


@given(epochs())
def test_hosts_have_no_file_in_common(drawn: tuple[Epoch, list[int]]) -> None:
    """Whatever shares each of them reads, but for what lies between two windows."""
    epoch, mine = drawn
    theirs = [share for share in range(epoch.order.shares) if share not in mine]
    for window, files in enumerate(epoch.windows):
        ours, others = (
            {need.file for need in files_needed(epoch, window, shares, EVERYTHING)}
            for shares in (mine, theirs)
        )
        assert not ours & others & set(files)


def test_files_of_one_block_each_are_divided_among_the_hosts() -> None:
    epoch = Epoch(index_with([[10]] * 160), EpochOrder(7, shares=16))
    hosts = [
        {need.file for need in files_needed(epoch, 0, shares_read(4, [reader], 16), EVERYTHING)}
        for reader in range(4)
    ]
    assert sorted(file for files in hosts for file in files) == list(range(160))
    assert {len(files) for files in hosts} == {40}


NUMBERS = st.integers(0, (1 << 63) - 1)


@given(
    st.builds(
        Announced,
        st.builds(EpochOrder, NUMBERS, NUMBERS, st.just(64), window=NUMBERS),
        st.just(8),
        st.sampled_from([range(8), range(3, 4), range(2, 5)]),
        st.one_of(st.none(), st.integers(0, 1 << 50)),
        NUMBERS,
    )
)
def test_what_is_announced_is_read_back(said: Announced) -> None:
    assert parse(said.text()) == said
    assert len(said.text()) < 248


def test_short_orders() -> None:
    assert parse("seed=7") == Announced(EpochOrder(7), 1, range(1), 0, 0)
    told = parse("seed=7,epoch=1,world=6,rank=2,ahead=16GiB,done=999")
    assert told.order.shares == 66 and told.readers == range(2, 3)
    assert told.row == 15 and told.ahead == 16 << 30


@pytest.mark.parametrize(
    "text",
    [
        *("", "epoch=1", "seed=x", "seed=-1", "seed=123456789012345678901", "seed=7,seed=8"),
        *("seed=7,world=0", "seed=7,world=3,shares=64", "seed=7,world=8,rank=8"),
        *("seed=7,world=8,rank=5-3", "seed=7,world=8,rank=", "seed=7,shares=1000000"),
        *("seed=7,window=much", "seed=7,done=half", "seed=7,color=red"),
    ],
)
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(Invalid, match="order"):
        parse(text)


@pytest.mark.sweep
@given(INDEXES, st.data())
def test_an_index_that_contradicts_itself_is_refused(index: Index, data: st.DataObject) -> None:
    """Whoever wrote it: who reads it may trust what it says."""
    name = data.draw(st.sampled_from(["sizes", "offsets", "lengths", "rows", "first_blocks"]))
    column = list(getattr(index, name))
    if not column:
        return
    column[data.draw(st.integers(0, len(column) - 1))] = data.draw(st.integers(-9, 9))
    try:
        found = decode(encode(replace(index, **{name: column})))
    except DatasetError:
        return
    assert found.first_blocks[0] == 0 and found.first_blocks[-1] == len(found.rows)
    assert all(first <= after for first, after in pairwise(found.first_blocks))
    assert all(value >= 0 for each in (found.sizes, found.rows, found.lengths) for value in each)
