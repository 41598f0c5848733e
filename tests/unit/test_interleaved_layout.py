"""How chunks are dealt out into stripes."""

from hypothesis import given
from hypothesis import strategies as st

from aifs.layout.interleaved import CHUNK, CHUNK_MAX, HEADER_BYTES, STRIPE, Interleaved, deal

sizes = st.lists(st.integers(1, CHUNK_MAX + HEADER_BYTES) | st.integers(1, 200_000), max_size=80)


@given(sizes, st.lists(st.integers(0, 300), min_size=1, max_size=7, unique=True), st.integers(0, 1 << 40))
def test_deal(sizes, servers, start):
    stripes = deal(sizes, servers, start)
    assert [i for stripe in stripes for i in range(stripe.first, stripe.end)] == list(range(len(sizes)))
    for number, stripe in enumerate(stripes):
        assert stripe.server == servers[(start + number) % len(servers)]
        filled = sum(sizes[stripe.first : stripe.end])
        assert stripe.end > stripe.first
        assert filled <= STRIPE or stripe.end == stripe.first + 1
        if stripe.end < len(sizes):
            assert filled + sizes[stripe.end] > STRIPE, "a stripe is as full as it gets"


def test_a_stripe_holds_four_whole_chunks_and_many_small_ones():
    assert [stripe.end for stripe in deal([CHUNK + HEADER_BYTES] * 9, (5, 6), 1)] == [4, 8, 9]
    assert len(deal([100_000 + HEADER_BYTES] * 100_000, range(4), 0)) < 100_000 * 100_100 / STRIPE * 1.03


@given(st.integers(1, 10_000_000), st.integers(1, CHUNK_MAX))
def test_chunks_cover_the_file(size, chunk):
    layout = Interleaved(chunk)
    count = layout.count(size)
    assert layout.length(0, size) + (count - 2) * chunk + layout.length(count - 1, size) == size or count == 1
    assert 0 < layout.length(count - 1, size) <= chunk
    assert layout.count(0) == 0
