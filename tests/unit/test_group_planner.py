"""The planner of grouped writes: against the bound of every subset, against brute force, and whole
chunks placed by the rules.
"""

import itertools
import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import NoSpace
from aifs.saves.planner import ChunkClass, Destination, Network, Pattern, Plan, Source, plan

MB, MIB = 10**6, 1 << 20


@st.composite
def patterns(draw: st.DrawFn, nodes: int = 5) -> Pattern:
    """Any pattern; counts are such that a chunk is a small part of what a node moves."""
    bandwidth = st.integers(100, 1000).map(lambda number: number * MB)
    sources, destinations = draw(st.integers(1, nodes)), draw(st.integers(1, nodes))
    holders = st.sets(st.integers(0, sources - 1), min_size=1).map(
        lambda found: tuple(sorted(found))
    )
    sizes = st.sampled_from((MIB // 4, MIB, 4 * MIB))
    kinds = st.builds(ChunkClass, sizes, st.integers(100, 2000), holders)
    classes = draw(st.lists(kinds, min_size=1, max_size=6))
    total = sum(kind.bytes for kind in classes)
    space = st.floats(1.1, 4).map(lambda factor: int(total / destinations * factor))
    links = draw(st.lists(bandwidth, max_size=3))
    link = st.none() | st.integers(0, len(links) - 1) if links else st.none()
    return Pattern(
        [Source(draw(bandwidth), draw(link)) for _ in range(sources)],
        [Destination(draw(bandwidth), draw(st.none() | space)) for _ in range(destinations)],
        classes,
        links,
    )


def chunk_s(pattern: Pattern) -> float:
    """How long the largest chunk takes over the slowest part: no rounding can be blamed for
    more."""
    nodes = (*pattern.sources, *pattern.destinations)
    slowest = min([*(node.bandwidth for node in nodes), *pattern.links])
    return max(kind.size for kind in pattern.classes) / slowest


def check(pattern: Pattern, made: Plan) -> None:
    """Every chunk goes once, from a holder; the space is enough, and the time is that of the
    slowest."""
    sent, taken = Counter(), Counter()
    ends = [0] * len(pattern.classes)
    for kind, first, end, source, destination in made.transfers:
        chunks = pattern.classes[kind]
        assert source in chunks.sources and first == ends[kind] < end
        ends[kind] = end
        sent[source] += (end - first) * chunks.size
        taken[destination] += (end - first) * chunks.size
    assert ends == [kind.chunks for kind in pattern.classes]
    for number, node in enumerate(pattern.destinations):
        assert node.space is None or taken[number] <= node.space
    times = [size / pattern.sources[number].bandwidth for number, size in sent.items()]
    times += [size / pattern.destinations[number].bandwidth for number, size in taken.items()]
    for host, rate in enumerate(pattern.links):
        passed = sum(size for n, size in sent.items() if pattern.sources[n].link == host)
        times.append(passed / rate)
    assert made.time_s == max(times)


def egress(pattern: Pattern, some: tuple[int, ...]) -> int:
    """What these sources send in a second, over the links of their hosts."""
    rates: Counter[int | None] = Counter()
    for source in (pattern.sources[number] for number in some):
        rates[source.link] += source.bandwidth
    return rates[None] + sum(
        min(rate, pattern.links[host]) for host, rate in rates.items() if host is not None
    )


def least_s(pattern: Pattern) -> float:
    """What bytes need that only some sources have, for every set of sources; and all bytes, at the
    destinations, when those that are full have taken what they can."""
    bounds = []
    for size in range(1, len(pattern.sources) + 1):
        for some in itertools.combinations(range(len(pattern.sources)), size):
            alone = sum(kind.bytes for kind in pattern.classes if {*kind.sources} <= {*some})
            bounds.append(alone / egress(pattern, some))
    for size in range(len(pattern.destinations)):
        for full in itertools.combinations(pattern.destinations, size):
            if all(node.space is not None for node in full):
                rate = sum(node.bandwidth for node in pattern.destinations) - sum(
                    node.bandwidth for node in full
                )
                bounds.append((pattern.bytes - sum(node.space for node in full)) / rate)
    return max(bounds)


@pytest.mark.sweep
@given(patterns())
def test_a_plan_is_close_to_the_least_time_of_all(pattern: Pattern) -> None:
    room = [node.space for node in pattern.destinations]
    if None not in room and sum(room) < pattern.bytes + 4 * MIB * len(room):
        return  # it may not fit, or not in whole chunks
    made = plan(pattern)
    check(pattern, made)
    assert made.lower_bound_s == pytest.approx(least_s(pattern), rel=1e-6)
    assert made.lower_bound_s * (1 - 1e-6) <= made.time_s
    assert made.time_s <= made.lower_bound_s + chunk_s(pattern)


def best_whole(pattern: Pattern) -> float:
    """The least time of all plans in whole chunks, by trying all."""
    ways = [
        itertools.combinations_with_replacement(
            list(itertools.product(kind.sources, range(len(pattern.destinations)))), kind.chunks
        )
        for kind in pattern.classes
    ]
    best = float("inf")
    for way in itertools.product(*map(list, ways)):
        sent, taken = Counter(), Counter()
        for kind, links in zip(pattern.classes, way, strict=True):
            for source, destination in links:
                sent[source] += kind.size
                taken[destination] += kind.size
        times = [size / pattern.sources[number].bandwidth for number, size in sent.items()]
        times += [size / pattern.destinations[number].bandwidth for number, size in taken.items()]
        best = min(best, max(times))
    return best


@given(st.integers(0, 1 << 32))
def test_tiny_plans_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    sources = rng.randint(1, 2)
    pattern = Pattern(
        [Source(rng.choice((1, 1, 2, 3)) * MB) for _ in range(sources)],
        [Destination(rng.choice((1, 1, 2, 3)) * MB) for _ in range(rng.randint(1, 3))],
        [
            ChunkClass(
                size * MB,
                rng.randint(1, 2),
                tuple(sorted(rng.sample(range(sources), rng.randint(1, sources)))),
            )
            for size in (1, 2)
        ],
    )
    best_s, made = best_whole(pattern), plan(pattern)
    check(pattern, made)
    assert made.lower_bound_s - 1e-9 <= best_s
    assert best_s - 1e-9 <= made.time_s <= best_s + chunk_s(pattern) + 1e-9


def test_many_ranks() -> None:
    """Parameters that four ranks share, and optimizer state of each."""
    number, quarter = 32, 8
    shared = [
        ChunkClass(4 * MIB, 300, tuple(range(first, number, quarter))) for first in range(quarter)
    ]
    own = [ChunkClass(4 * MIB, 400, (rank,)) for rank in range(number)]
    pattern = Pattern(
        [Source(3000 * MB)] * number,
        [Destination((1 + number % 2) * 1000 * MB) for number in range(8)],
        [*shared, *own],
    )
    made = plan(pattern)
    check(pattern, made)
    assert made.time_s < 1.005 * made.lower_bound_s


def test_a_ring_of_holders_is_evened_out_over_its_whole_length() -> None:
    """Each rank holds its own chunks and its neighbour's; all of the first is put on one."""
    number = 300
    own = [ChunkClass(1000, 100, (i, i + 1)) for i in range(number - 1)]
    pattern = Pattern(
        [Source(MB)] * number, [Destination(1 << 40)], [*own, ChunkClass(1000, 100, (0,))]
    )
    made = plan(pattern)
    check(pattern, made)
    assert made.time_s == pytest.approx(0.1, rel=0.02)


def test_nothing_to_write_takes_no_time() -> None:
    assert plan(Pattern([Source(1)], [Destination(1)], [])) == Plan([], 0.0, 0.0)


def test_what_does_not_fit_is_told() -> None:
    kinds = [ChunkClass(10, 9, (0,))]
    with pytest.raises(NoSpace, match="room for 80 bytes of a group that needs 90"):
        plan(Pattern([Source(MB)], [Destination(MB, 50), Destination(MB, 30)], kinds))
    with pytest.raises(NoSpace, match="no data server has room for one more chunk of 10 bytes"):
        plan(Pattern([Source(MB)], [Destination(MB, 55), Destination(MB, 35)], kinds))


@pytest.mark.parametrize("space", [100 * MIB, 100 * MIB - 1])
def test_space_is_obeyed_to_the_byte_where_it_costs_time(space: int) -> None:
    pattern = Pattern(
        [Source(1000 * MB)],
        [Destination(900 * MB, space), Destination(100 * MB)],
        [ChunkClass(MIB, 500, (0,))],
    )
    made = plan(pattern)
    check(pattern, made)
    assert made.time_s == pytest.approx(400 * MIB / (100 * MB), rel=0.005)


def test_few_bytes_beside_very_many_are_sent_by_who_has_them() -> None:
    """They are lost in the rounding of the flow."""
    pattern = Pattern(
        [Source(1000 * MB)] * 2,
        [Destination(1000 * MB)],
        [ChunkClass(4 * MIB, 1 << 25, (0, 1)), ChunkClass(MIB // 16, 1, (0,))],
    )
    check(pattern, plan(pattern))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 20)), max_size=20))
def test_the_maximum_flow_equals_the_minimum_cut(edges: list[tuple[int, int, int]]) -> None:
    network = Network(6)
    edges = [edge for edge in edges if edge[0] != edge[1]]
    for tail, head, cap in edges:
        network.add(tail, head, cap=cap)
    cuts = [
        sum(cap for tail, head, cap in edges if tail in inside and head not in inside)
        for size in range(5)
        for others in itertools.combinations(range(1, 5), size)
        for inside in [{0, *others}]
    ]
    assert network.max_flow(0, 5, 1.0, 1e6) == pytest.approx(min(cuts))
