"""How chunks are dealt out into stripes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.layout.interleaved import (
    CHUNK,
    CHUNK_MAX,
    HEADER_BYTES,
    STRIPE,
    Interleaved,
    container_layout,
    deal,
    padded,
    redundancy_of,
)
from aifs.layout.redundancy import Redundancy

sizes = st.lists(st.integers(1, CHUNK_MAX + HEADER_BYTES) | st.integers(1, 200_000), max_size=80)


@pytest.mark.sweep
@given(sizes, st.integers(1, 7), st.integers(0, 1 << 40))
def test_deal(sizes, slots, start):
    stripes = deal(sizes, slots, start)
    assert [i for stripe in stripes for i in range(stripe.first, stripe.end)] == list(
        range(len(sizes))
    )
    for number, stripe in enumerate(stripes):
        assert stripe.slot == (start + number) % slots
        filled = sum(sizes[stripe.first : stripe.end])
        assert stripe.end > stripe.first
        assert filled <= STRIPE or stripe.end == stripe.first + 1
        if stripe.end < len(sizes):
            assert filled + sizes[stripe.end] > STRIPE, "a stripe is as full as it gets"


def test_a_stripe_holds_four_whole_chunks_and_many_small_ones():
    whole = CHUNK + HEADER_BYTES
    assert [(stripe.slot, stripe.end) for stripe in deal([whole] * 9, 2, 1)] == [
        (1, 4),
        (0, 8),
        (1, 9),
    ]
    assert len(deal([100_000 + HEADER_BYTES] * 100_000, 4, 0)) < 100_000 * 100_080 / STRIPE * 1.03


@given(st.integers(0, 1 << 50), st.integers(2, 16), st.integers(1, 8))
def test_coded_containers_grow_by_whole_rows(length, data, parity):
    redundancy = Redundancy(1, data, parity)
    layout = container_layout(tuple(range(data + parity)), redundancy)
    assert (layout.width, layout.parity, redundancy_of(layout)) == (data, parity, redundancy)
    end = padded(layout, length)
    assert end % layout.row == 0
    assert 0 <= end - length < layout.row
    assert {layout.object_length(column, end) for column in range(data + parity)} == {end // data}


@given(st.integers(0, 1 << 50), st.integers(1, 8))
def test_others_grow_by_bytes(length, replicas):
    layout = container_layout(tuple(range(replicas)), Redundancy(replicas))
    assert (layout.width, redundancy_of(layout)) == (1, Redundancy(replicas))
    assert padded(layout, length) == length


@given(st.integers(1, 10_000_000), st.integers(1, CHUNK_MAX))
def test_chunks_cover_the_file(size, chunk):
    layout = Interleaved(chunk)
    count = layout.count(size)
    assert (
        layout.length(0, size) + (count - 2) * chunk + layout.length(count - 1, size) == size
        or count == 1
    )
    assert 0 < layout.length(count - 1, size) <= chunk
    assert layout.count(0) == 0
