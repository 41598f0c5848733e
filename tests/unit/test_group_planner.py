"""The planner of grouped writes: against the linear program, against brute force, and whole chunks
placed by the rules.
"""

import itertools
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.errors import Invalid, NoSpace
from aifs.group import lp, planner
from aifs.group.network import Network
from aifs.group.pattern import ChunkClass, Destination, Pattern, Source
from aifs.group.plan import Plan, problems

MB, MIB = 10**6, 1 << 20


@st.composite
def patterns(
    draw: st.DrawFn, nodes: int = 5, chunks: tuple[int, int] = (100, 2000), caps: bool = True
) -> Pattern:
    """Any pattern; counts are such that a chunk is a small part of what a node moves."""
    bandwidth = st.integers(100, 1000).map(lambda number: number * MB)
    sources, destinations = draw(st.integers(1, nodes)), draw(st.integers(1, nodes))
    replicas = draw(st.integers(1, min(3, destinations)))
    holders = st.sets(st.integers(0, sources - 1), min_size=1).map(
        lambda found: tuple(sorted(found))
    )
    classes = draw(
        st.lists(
            st.builds(
                ChunkClass, st.sampled_from((MIB // 4, MIB, 4 * MIB)), st.integers(*chunks), holders
            ),
            min_size=1,
            max_size=6,
        )
    )
    copies = replicas * sum(kind.bytes for kind in classes)

    def cap(nodes: int) -> st.SearchStrategy[int | None]:
        share = st.floats(1.1, 4).map(lambda factor: int(copies / nodes * factor))
        return st.none() | share if caps else st.none()

    pairs = list(itertools.product(range(sources), range(destinations)))
    return Pattern(
        tuple(Source(f"s{i}", draw(bandwidth), draw(cap(sources))) for i in range(sources)),
        tuple(
            Destination(f"d{i}", draw(bandwidth), draw(cap(destinations)))
            for i in range(destinations)
        ),
        tuple(classes),
        draw(st.dictionaries(st.sampled_from(pairs), bandwidth)),
        replicas,
    )


def chunk_s(pattern: Pattern) -> float:
    """How long the largest chunk takes over the slowest part: no rounding can be blamed for
    more.
    """
    slowest = min(
        *(node.bandwidth for node in (*pattern.sources, *pattern.destinations)),
        *pattern.links.values(),
        1 << 60,
    )
    return max(kind.size for kind in pattern.classes) / slowest


def check(plan: Plan) -> None:
    """A plan that can be carried out: every chunk from holders, to R distinct destinations, within
    the caps.
    """
    assert not problems(plan.pattern, plan.shares)
    placed: Counter[tuple[int, int, int]] = Counter()
    moved = 0
    for transfer in plan.transfers():
        assert transfer.source in plan.pattern.classes[transfer.kind].sources
        moved += transfer.count * plan.pattern.classes[transfer.kind].size
        if plan.pattern.classes[transfer.kind].count <= 3000:
            for chunk in range(transfer.first, transfer.first + transfer.count):
                placed[transfer.kind, chunk, transfer.destination] += 1
    assert moved == plan.pattern.bytes * plan.pattern.replicas
    assert set(placed.values()) <= {1}
    copies = Counter((kind, chunk) for kind, chunk, _ in placed)
    assert set(copies.values()) <= {plan.pattern.replicas}


@settings(max_examples=60, deadline=None)
@given(patterns())
def test_the_fast_planner_is_within_two_percent_of_the_linear_program(pattern: Pattern) -> None:
    try:
        _, optimum_s = lp.solve(pattern)
    except NoSpace:
        with pytest.raises(NoSpace):
            planner.plan(pattern)
        return
    plan = planner.plan(pattern)
    check(plan)
    assert plan.lower_bound_s <= optimum_s * (1 + 1e-6)
    assert optimum_s * (1 - 1e-6) <= plan.time_s <= 1.02 * optimum_s + chunk_s(pattern)


@settings(max_examples=20, deadline=None)
@given(patterns(), st.booleans())
def test_the_lower_bound_is_exact_without_links_or_without_replicas(
    pattern: Pattern, linked: bool
) -> None:
    pattern = replace(pattern, replicas=1) if linked else replace(pattern, links={})
    try:
        _, optimum_s = lp.solve(pattern)
    except NoSpace:
        return
    assert planner.plan(pattern).lower_bound_s == pytest.approx(optimum_s, rel=1e-6)


def best_whole(pattern: Pattern) -> float:
    """The least time of all plans in whole chunks, by trying all."""
    ways = []
    for kind in pattern.classes:
        options = [
            tuple(zip(senders, takers, strict=True))
            for takers in itertools.combinations(range(len(pattern.destinations)), pattern.replicas)
            for senders in itertools.product(kind.sources, repeat=pattern.replicas)
        ]
        ways.append(itertools.combinations_with_replacement(options, kind.count))
    sizes = [kind.size for kind in pattern.classes]
    best = float("inf")
    for way in itertools.product(*map(list, ways)):
        sent, taken, carried = Counter(), Counter(), Counter()
        for size, options in zip(sizes, way, strict=True):
            for source, destination in itertools.chain.from_iterable(options):
                sent[source] += size
                taken[destination] += size
                carried[source, destination] += size
        times = [size / pattern.sources[source].bandwidth for source, size in sent.items()]
        times += [
            size / pattern.destinations[destination].bandwidth
            for destination, size in taken.items()
        ]
        times += [carried[link] / bandwidth for link, bandwidth in pattern.links.items()]
        best = min(best, max(times))
    return best


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_tiny_plans_against_brute_force(seed: int) -> None:
    rng = random.Random(seed)
    sources, destinations = rng.randint(1, 2), rng.randint(1, 3)
    replicas = rng.randint(1, min(2, destinations))

    def bandwidth() -> int:
        return rng.choice((1, 1, 2, 3)) * MB

    pattern = Pattern(
        tuple(Source(f"s{i}", bandwidth()) for i in range(sources)),
        tuple(Destination(f"d{i}", bandwidth()) for i in range(destinations)),
        tuple(
            ChunkClass(
                size * MB,
                rng.randint(1, 2),
                tuple(sorted(rng.sample(range(sources), rng.randint(1, sources)))),
            )
            for size in (1, 2)
        ),
        {(rng.randrange(sources), rng.randrange(destinations)): MB} if rng.random() < 0.5 else {},
        replicas,
    )
    best_s = best_whole(pattern)
    plan = planner.plan(pattern)
    check(plan)
    assert best_s - 1e-9 <= plan.time_s <= best_s + chunk_s(pattern) + 1e-9
    assert plan.lower_bound_s <= best_s + 1e-9


def test_feasible_agrees_with_the_optimum() -> None:
    pattern = next(iter(ranks(8, 3, replicas=2)))
    _, optimum_s = lp.solve(pattern)
    assert lp.feasible(pattern, optimum_s * 1.001) and not lp.feasible(pattern, optimum_s * 0.999)


def ranks(number: int, servers: int, replicas: int) -> list[Pattern]:
    """Parameters that four ranks share, and optimizer state of each; then the same with links."""
    sources = tuple(Source(f"rank{i}", 3000 * MB) for i in range(number))
    destinations = tuple(Destination(f"server{i}", (1 + i % 2) * 1000 * MB) for i in range(servers))
    quarter = number // 4
    shared = [
        ChunkClass(4 * MIB, 300, tuple(range(first, number, quarter))) for first in range(quarter)
    ]
    own = [ChunkClass(4 * MIB, 400, (rank,)) for rank in range(number)]
    plain = Pattern(sources, destinations, (*shared, *own), {}, replicas)
    links = {(source, server): 150 * MB for source in range(number) for server in range(servers)}
    return [plain, replace(plain, links=links)]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("linked", [False, True])
def test_many_ranks(replicas: int, linked: bool) -> None:
    plan = planner.plan(ranks(32, 8, replicas)[linked])
    check(plan)
    assert plan.gap < 0.02
    assert plan.balance("destination") > 0.97


def test_holders_of_shared_bytes_share_the_work() -> None:
    plan = planner.plan(ranks(32, 8, 1)[0])
    assert plan.balance("source") > 0.98


def test_a_ring_of_holders_is_evened_out_over_its_whole_length() -> None:
    """Each rank holds its own chunks and its neighbour's; all of the first is put on one."""
    number = 300
    pattern = Pattern(
        tuple(Source(f"s{i}", MB) for i in range(number)),
        (Destination("d", 1 << 40),),
        (
            *(ChunkClass(1000, 100, (i, i + 1)) for i in range(number - 1)),
            ChunkClass(1000, 100, (0,)),
        ),
    )
    plan = planner.plan(pattern)
    check(plan)
    assert plan.time_s == pytest.approx(0.1, rel=0.02)


def test_the_plan_says_what_is_slowest() -> None:
    pattern = Pattern(
        (Source("a", 100 * MB), Source("b", 100 * MB)),
        (Destination("x", 1000 * MB), Destination("y", 1000 * MB)),
        (ChunkClass(MB, 100, (0,)), ChunkClass(MB, 20, (0, 1))),
    )
    plan = planner.plan(pattern)
    assert plan.bottleneck.role == "source" and plan.bottleneck.name == "a"
    assert plan.time_s == plan.lower_bound_s == 1.0
    assert plan.gap == 0
    slow = planner.plan(replace(pattern, links={(0, 0): MB, (0, 1): 10 * MB}))
    assert slow.bottleneck.role == "link" and slow.time_s == pytest.approx(100 / 11, rel=0.02)


def test_bytes_of_links_add_up() -> None:
    plan = planner.plan(ranks(8, 4, 2)[1])
    for role, at in (("source", 0), ("destination", 1)):
        loads = [load.bytes for load in plan.loads if load.role == role]
        assert loads == [
            sum(size for link, size in plan.link_bytes.items() if link[at] == node)
            for node in range(len(loads))
        ]


def test_nothing_to_write_takes_no_time() -> None:
    for solver in planner.SOLVERS:
        plan = planner.plan(Pattern((Source("s", 1),), (Destination("d", 1),), ()), solver)
        assert (plan.shares, plan.time_s, plan.gap, plan.balance("source")) == ((), 0.0, 0.0, 1.0)
        assert not list(plan.transfers())


def test_what_does_not_fit_is_named() -> None:
    pattern = Pattern(
        (Source("s", MB),),
        (Destination("d", MB, 50), Destination("e", MB, 30)),
        (ChunkClass(10, 9, (0,)),),
    )
    with pytest.raises(NoSpace, match="space of d, space of e: only 80 of 90 bytes"):
        planner.plan(pattern)
    with pytest.raises(NoSpace):
        planner.plan(pattern, "lp")
    with pytest.raises(NoSpace, match="memory of s"):
        planner.plan(
            replace(pattern, sources=(Source("s", MB, 89),), destinations=(Destination("d", MB),))
        )
    with pytest.raises(NoSpace, match="whole chunks do not fit"):
        planner.plan(
            replace(pattern, destinations=(Destination("d", MB, 55), Destination("e", MB, 35)))
        )


def test_caps_are_obeyed_where_they_cost_time() -> None:
    pattern = Pattern(
        (Source("s", 1000 * MB),),
        (Destination("fast", 900 * MB, 100 * MIB), Destination("slow", 100 * MB)),
        (ChunkClass(MIB, 500, (0,)),),
    )
    plan = planner.plan(pattern)
    check(plan)
    assert plan.bottleneck.name == "slow" and plan.gap < 0.005


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sources": ()}, "at least one source"),
        (
            {"destinations": (Destination("d", 1), Destination("d", 1))},
            "destination d is given twice",
        ),
        ({"sources": (Source("s", 0),)}, "source s: a bandwidth of 0"),
        ({"replicas": 2}, "2 replicas need as many destinations, not 1"),
        ({"classes": (ChunkClass(0, 1, (0,)),)}, "class 0: 1 chunks of 0 bytes"),
        ({"classes": (ChunkClass(1, 1, (1,)),)}, "class 0: there is no such source"),
        ({"classes": (ChunkClass(1, 1, (0, 0)),)}, "class 0: its sources"),
        ({"links": {(0, 1): 1}}, "link 0 to 1"),
        ({"links": {(0, 0): 0}}, "s to d: a bandwidth of 0"),
    ],
)
def test_wrong_patterns_are_refused(change: dict[str, object], message: str) -> None:
    right = Pattern((Source("s", 1),), (Destination("d", 1),), (ChunkClass(1, 1, (0,)),))
    with pytest.raises(Invalid, match=message):
        replace(right, **change)
    with pytest.raises(Invalid, match="no solver"):
        planner.plan(right, "guess")


@settings(max_examples=50, deadline=None)
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
