"""The map of clean blocks, and its order of eviction."""

import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.burst import block_map
from aifs.burst.block_map import (
    BLOCK_MAX,
    BLOCK_MIN,
    BLOCKS,
    SUM_BYTES,
    BlockMap,
    BlockSegment,
    block_size,
    decode,
    encode,
)

BLOCK = BLOCK_MIN


def checksum(source: int, index: int) -> bytes:
    return (source * 1000 + index).to_bytes(SUM_BYTES, "little")


def filled(limit: int, *sources: int, blocks: int = BLOCKS) -> BlockMap:
    made = BlockMap(BLOCK)
    made.limit = limit
    for source in sources:
        for index in range(blocks):
            made.put(source, index, checksum(source, index))
    return made


STEP = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 5), st.integers(0, 300)),
    st.tuples(st.just("use"), st.integers(1, 5), st.integers(0, 300)),
    st.tuples(st.just("drop"), st.integers(1, 5), st.integers(0, 300)),
    st.tuples(st.just("end"), st.integers(1, 5), st.just(0)),
    st.tuples(st.just("evict"), st.just(0), st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(STEP, max_size=120))
def test_it_is_a_set_of_blocks(steps: list[tuple[str, int, int]]) -> None:
    made, model = BlockMap(BLOCK), set[tuple[int, int]]()
    made.limit = 40 * BLOCK
    for step, source, index in steps:
        number, bit = divmod(index, BLOCKS)
        segment = made.sources.get(source, {}).get(number)
        if step == "put":
            made.put(source, index, checksum(source, index))
            model.add((source, index))
        elif step == "use" and segment is not None:
            made.use(segment, BLOCK)
        elif step == "drop" and segment is not None:
            made.drop(segment, 1 << bit)
            model.discard((source, index))
        elif step == "end":
            assert made.end(source) or source not in {of for of, _ in model}
            model = {block for block in model if block[0] != source}
        elif step == "evict" and (gone := made.evict()) is not None:
            assert not made.is_current(gone)
            model -= {(gone.source, gone.number * BLOCKS + bit) for bit in range(BLOCKS)}
    assert made.bytes == len(model) * BLOCK
    for source in range(1, 6):
        assert made.bytes_of(source) == sum(of == source for of, _ in model) * BLOCK
        for start, stop in ((0, 301 * BLOCK), (7, BLOCK // 2), (BLOCK - 1, 130 * BLOCK + 9)):
            held = [
                max(0, min(stop, (index + 1) * BLOCK) - max(start, index * BLOCK))
                for of, index in model
                if of == source
            ]
            assert made.bytes_in(source, start, stop - start) == sum(held)
        for index in range(301):
            assert made.has(source, index) == ((source, index) in model)
    again = BlockMap(BLOCK)
    again.restore(decode(BLOCK, 3, encode(BLOCK, 3, made.snapshot())))
    assert again.bytes == made.bytes
    for source, index in model:
        [(segment, mask)] = again.span(source, index * BLOCK + 7, 100) or []
        assert segment.sum_of(index % BLOCKS) == checksum(source, index)
        assert mask == 1 << index % BLOCKS and not segment.checked


@given(st.integers(0, 300 * BLOCK), st.integers(1, 100 * BLOCK), st.integers(0, 300))
def test_a_range_is_there_if_all_its_blocks_are(offset: int, length: int, missing: int) -> None:
    made = filled(1 << 40, 7, blocks=450)
    number, bit = divmod(missing, BLOCKS)
    made.drop(made.sources[7][number], 1 << bit)
    found = made.span(7, offset, length)
    lacks = offset // BLOCK <= missing <= (offset + length - 1) // BLOCK
    assert (found is None) == lacks
    assert made.held(7, offset, length) == (max(0, missing * BLOCK - offset) if lacks else length)
    if found is not None:
        blocks = sum(mask.bit_count() for _, mask in found)
        assert blocks == (offset + length - 1) // BLOCK - offset // BLOCK + 1


def test_a_scan_does_not_empty_it() -> None:
    limit = 40 * BLOCKS * BLOCK
    made = filled(limit, *range(1, 31))
    for _ in range(2):  # all of these are read again
        for source in range(1, 31):
            made.use(made.sources[source][0], BLOCKS * BLOCK)
    for source in range(1000, 1400):
        for index in range(BLOCKS):
            made.put(source, index, checksum(source, index))
            made.use(made.sources[source][0], 4096)  # the neighbours of a small file
        while made.excess > 0:
            made.evict()
    kept = sum(source in made.sources for source in range(1, 31))
    assert kept >= 28


def test_segments_that_others_read_stay() -> None:
    limit = 40 * BLOCKS * BLOCK
    made = filled(limit, *range(1, 31))
    for start in (100, 104):  # something comes in between
        for source in range(start, start + 4):
            made.put(source, 0, checksum(source, 0))
            made.use(made.sources[source][0], BLOCKS * BLOCK)
        assert made.is_round_over() and not made.is_round_over()
        for source in range(1, 11):
            made.use_segments(source, 1)
            made.use_segments(source + 10, 2)  # it has no such segment
        made.use_segments(999, 1)
    for source in range(1000, 1050):
        for index in range(BLOCKS):
            made.put(source, index, checksum(source, index))
        while made.excess > 0:
            made.evict()
    assert [source for source in range(1, 31) if source in made.sources] == [*range(1, 11)]


def test_what_is_wanted_stays_until_nobody_wants_it() -> None:
    made = filled(100 * BLOCK, *range(1, 101), blocks=1)
    for source in range(1, 101):  # more than a scan would have
        made.want(source, 0, BLOCK, source > 20)
    for source in range(101, 181):
        made.put(source, 0, checksum(source, 0))
        while made.excess:
            made.evict()
    assert len(made.sources.keys() & {*range(21, 101)}) == 80
    for source in range(21, 101):
        made.want(source, 0, BLOCK, False)
    for source in range(181, 301):
        made.put(source, 0, checksum(source, 0))
        made.want(source, 0, BLOCK, True)
        while made.excess:
            made.evict()
    assert not made.sources.keys() & {*range(21, 81)}


def test_a_part_of_a_long_source_is_used() -> None:
    made = BlockMap(BLOCK)
    made.limit = 100 * BLOCKS * BLOCK
    for number in range(66):
        made.put(1, number * BLOCKS, checksum(1, number))
    made.use(made.sources[1][0], 50 * BLOCKS * BLOCK)
    before = {number: segment.uses for number, segment in made.sources[1].items()}
    made.use_segments(1, 1 << 1 | 1 << 40)
    used = [n for n, segment in made.sources[1].items() if segment.uses > before[n]]
    assert used == [1, 40, 65], "a mask has 64 bits"


def test_what_comes_back_soon_stays() -> None:
    limit = 10 * BLOCKS * BLOCK
    made = filled(limit, *range(1, 21))
    gone = []
    while made.excess > 0 and (segment := made.evict()) is not None:
        gone.append(segment.source)
    back = gone[-1]
    made.put(back, 0, checksum(back, 0))
    assert made.sources[back][0].is_main


def test_the_map_of_a_large_tier_is_small() -> None:
    """8 TB, in blocks of 1 MiB, in files of half a GiB."""
    count = 2000
    tracemalloc.start()
    made = BlockMap(BLOCK_MAX)
    segments = [BlockSegment(number // 4, number % 4, (1 << BLOCKS) - 1) for number in range(count)]
    made.restore(segments)
    for segment in segments:
        segment.checked, segment.used_at = segment.have, 1 << 42
    del segments, segment
    size = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert size / count * (8 << 40) / (BLOCKS * BLOCK_MAX) < 100 << 20


def test_the_map_of_many_small_files_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a source with a segment of its own: there are not more than fit in memory."""
    monkeypatch.setattr(block_map, "SEGMENTS_MAX", 200)
    made = BlockMap(BLOCK)
    made.limit = 1 << 60
    for source in range(200):
        made.put(source, 0, checksum(source, 0))
    assert not made.excess > 0
    assert all(len(s.sums) == SUM_BYTES for of in made.sources.values() for s in of.values())
    for source in range(200, 300):
        made.put(source, 0, checksum(source, 0))
        while made.excess > 0:
            assert made.evict() is not None
    assert made.segments == 200


@pytest.mark.parametrize(("room", "size"), [(0, 1), (512 << 30, 1), (1 << 40, 2), (8 << 40, 16)])
def test_the_blocks_of_any_tier_fit_in_memory(room: int, size: int) -> None:
    assert block_size(room) == size * BLOCK_MIN
    assert room // block_size(room) <= 1 << 23 and block_size(room) <= BLOCK_MAX


def test_a_damaged_map_is_none() -> None:
    record = encode(BLOCK, 3, filled(1 << 30, 1, 2).snapshot())
    for damaged in (b"", record[:-1], record + b"x", record[: len(record) // 2], b"x" + record[1:]):
        with pytest.raises(ValueError):
            decode(BLOCK, 3, damaged)
    for block, state in ((2 * BLOCK, 3), (BLOCK, 4)):
        with pytest.raises(ValueError):
            decode(block, state, record)
    rng = random.Random(1)
    for _ in range(200):
        try:
            decode(BLOCK, 3, record[: rng.randrange(24, len(record))])
        except ValueError:
            continue
        raise AssertionError


def test_what_is_held_neither_goes_nor_takes_room() -> None:
    made = filled(100 * BLOCKS * BLOCK, 1, 2, 3)
    made.hold(2, True)
    assert made.held_bytes == BLOCKS * BLOCK and made.limit == 99 * BLOCKS * BLOCK
    made.limit = 0
    gone = [made.evict() for _ in range(2)]
    assert [segment and segment.source for segment in gone] == [1, 3]
    assert made.evict() is None and not made.excess
    made.hold(2, False)
    assert not made.held_bytes and made.limit == BLOCKS * BLOCK
    made.hold(2, True)
    assert made.end(2) and not made.held_sources and made.bytes == made.held_bytes == 0


def test_a_block_of_what_is_held_that_is_wrong_counts_no_more() -> None:
    made = filled(100 * BLOCKS * BLOCK, 1, 2)
    made.hold(2, True)
    made.drop(made.sources[2][0], 1)
    assert made.held_bytes == made.bytes_of(2) == (BLOCKS - 1) * BLOCK
    made.limit = 0
    gone = made.evict()
    assert gone is not None and gone.source == 1
    assert made.evict() is None  # it does not look for more for ever
    made.hold(2, False)
    assert not made.held_bytes
