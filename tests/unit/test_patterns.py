"""What a reader will want next."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.data.reading.patterns import STEPS_MAX, STREAMS, WINDOW_MAX, WINDOW_MIN, AccessPattern

KIB, MIB = 1 << 10, 1 << 20

lengths = st.sampled_from([4 * KIB, 128 * KIB, MIB]) | st.integers(1, 4 * MIB)


class Reader:
    """Follows one pattern; knows what was announced before it was read."""

    def __init__(self) -> None:
        self.pattern = AccessPattern()
        self.announced: list[tuple[int, int]] = []
        self.foreseen = 0
        self.requests = 0

    def read(self, offset: int, length: int) -> list[tuple[int, int]]:
        self.requests += 1
        self.foreseen += any(
            begin <= offset and offset + length <= begin + size for begin, size in self._joined()
        )
        ranges = self.pattern.observe(offset, length)
        assert all(begin >= 0 and size > 0 for begin, size in ranges)
        self.announced += ranges
        return ranges

    def _joined(self) -> list[tuple[int, int]]:
        joined: list[tuple[int, int]] = []
        for begin, size in sorted(self.announced):
            if joined and joined[-1][0] + joined[-1][1] >= begin:
                last = joined[-1]
                joined[-1] = (last[0], max(last[1], begin + size - last[0]))
            else:
                joined.append((begin, size))
        return joined


@given(st.integers(0, 1 << 40), lengths, st.integers(3, 60))
def test_a_sequential_reader_is_foreseen(start, length, count):
    reader = Reader()
    for number in range(count):
        reader.read(start + number * length, length)
        end = start + (number + 1) * length
        assert all(begin + size <= end + WINDOW_MAX for begin, size in reader.announced)
    assert reader.foreseen == count - 2
    # Nothing is announced twice, nor with gaps.
    assert all(
        one[0] + one[1] == other[0]
        for one, other in zip(reader.announced, reader.announced[1:], strict=False)
    )


def test_the_window_grows_as_it_is_read():
    reader = Reader()
    sizes = [
        size for number in range(1000) for _, size in reader.read(number * 128 * KIB, 128 * KIB)
    ]
    assert sizes[0] == WINDOW_MIN
    assert all(size <= WINDOW_MAX for size in sizes)
    assert sizes[1] < sizes[2] < sizes[3] < sizes[4]
    assert len(sizes) < 15


def test_the_limit_is_kept():
    pattern = AccessPattern()
    for number in range(100):
        for begin, size in pattern.observe(number * MIB, MIB, 3 * MIB):
            assert begin + size <= (number + 1 + 3) * MIB


@given(
    st.integers(-50, 50).filter(lambda steps: abs(steps) > 1 or steps == -1),
    st.integers(4, 40),
    lengths,
)
def test_a_strided_reader_is_foreseen(steps, count, length):
    distance = steps * 3 * length
    start = max(0, -distance * count)
    reader = Reader()
    for number in range(count):
        reader.read(start + number * distance, length)
        assert len(reader.announced) <= number + STEPS_MAX + 1
    assert reader.foreseen >= count - 3
    assert all((begin - start) % distance == 0 for begin, _ in reader.announced)
    assert len(set(reader.announced)) == len(reader.announced)


@given(
    st.integers(2, STREAMS // 2),
    st.integers(0, 1000),
    st.sampled_from([4 * KIB, 128 * KIB, MIB]),
    st.booleans(),
)
def test_interleaved_streams_are_told_apart(streams, seed, length, even):
    chance = random.Random(seed)
    reader = Reader()
    # Evenly spaced ones, each a part of a file, may look like a strided one where they begin.
    position = [
        number << 33 if even else (number * number << 33) + number * 12_288
        for number in range(streams)
    ]
    turns = [number for number in range(streams) for _ in range(30)]
    chance.shuffle(turns)
    for stream in turns:
        reader.read(position[stream], length)
        position[stream] += length
    # Each stream's first two requests come as a surprise.
    assert reader.foreseen >= reader.requests - (5 if even else 3) * streams
    assert sum(size for _, size in reader.announced) <= streams * (30 * length + 2 * WINDOW_MAX)


@given(st.lists(st.integers(0, 3), min_size=10, max_size=60))
def test_requests_that_overtake_one_another_are_one_stream(swaps):
    offsets = [number * 128 * KIB for number in range(len(swaps))]
    for place, swap in enumerate(swaps):
        if place > 4 and place + swap < len(offsets):
            offsets[place], offsets[place + swap] = offsets[place + swap], offsets[place]
    reader = Reader()
    for offset in offsets:
        reader.read(offset, 128 * KIB)
    assert reader.foreseen >= reader.requests - 3
    assert not reader.pattern.random


def test_random_requests_announce_next_to_nothing():
    chance, reader = random.Random(1), Reader()
    for _ in range(3000):
        reader.read(chance.randrange(1 << 26) * 4096, 4096)
    assert len(reader.announced) < 10
    assert reader.pattern.random
    assert len(reader.pattern.streams) <= STREAMS
    for number in range(2):
        reader.read(number * 4096, 4096)
    assert not reader.pattern.random and reader.pattern.following


def test_the_window_collapses_where_requests_do_not_fit():
    reader, chance = Reader(), random.Random(2)
    for number in range(400):
        reader.read(number * 128 * KIB, 128 * KIB)
    for _ in range(6):
        reader.read((1 << 40) + chance.randrange(1 << 20) * MIB, 4096)
    offset = max(begin + size for begin, size in reader.announced if begin < 1 << 39)
    ranges = []
    while not ranges:
        ranges = reader.read(offset, 128 * KIB)
        offset += 128 * KIB
    assert ranges[0][1] <= 2 * MIB


@pytest.mark.parametrize("distance", [128 * KIB, 10 * MIB, -10 * MIB])
def test_what_was_refused_is_announced_again(distance):
    pattern, wanted = AccessPattern(), set()
    start = 1 << 40
    for number in range(200):
        ranges = pattern.observe(start + number * distance, 128 * KIB)
        for begin, size in ranges:
            if number % 3:
                wanted.update(range(begin, begin + size, 128 * KIB))
            else:
                pattern.refused(begin, begin)
                break
    wanted.update(start + number * distance for number in range(3))
    missing = [number for number in range(200) if start + number * distance not in wanted]
    assert len(missing) <= 2, missing


anywhere = st.integers(0, 1 << 30) | st.integers(0, 20).map(lambda page: page * 4096)


@given(st.lists(st.tuples(anywhere, lengths, st.booleans())))
def test_anything_goes(plan):
    pattern = AccessPattern()
    for offset, length, refuse in plan:
        ranges = pattern.observe(offset, length, 8 * MIB)
        assert all(begin >= 0 and size > 0 for begin, size in ranges)
        assert sum(size for _, size in ranges) <= max(8 * MIB, STEPS_MAX * length)
        if refuse and ranges:
            pattern.refused(ranges[-1][0], ranges[-1][0])
        assert len(pattern.streams) <= STREAMS
