"""Placement and layout hints."""

from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aifs.core.errors import Invalid
from aifs.layout.hint import KINDS, Policy, format_layout_hint, parse_layout_hint
from aifs.layout.placement import ALGORITHM, WEIGHTS, Candidate, place, spread, weight_of

TEN = tuple(range(10))

GOLDEN = [
    (0, (0, 1, 2, 3), 0, (2, 1, 0, 3)),
    (1, (0, 1, 2, 3), 0, (1, 0, 3, 2)),
    (2, (0, 1, 2, 3), 0, (0, 3, 2, 1)),
    (3, (0, 1, 2, 3), 0, (3, 2, 1, 0)),
    (4, (0, 1, 2, 3), 0, (2, 0, 3, 1)),
    (5, (0, 1, 2, 3), 2, (0, 3)),
    (6, (0, 1, 2, 3), 2, (3, 1)),
    (7, (0, 1, 2, 3), 1, (1,)),
    (2**63 - 1, (0, 1, 2, 3), 3, (0, 1, 2)),
    (1000, (7,), 0, (7,)),
    (1001, (2, 5, 9), 2, (5, 2)),
    (123456789, TEN, 4, (7, 5, 9, 8)),
    (123456790, TEN, 4, (8, 6, 3, 1)),
]


@pytest.mark.parametrize(("seed", "servers", "count", "expected"), GOLDEN)
def test_algorithm_1_never_changes(seed, servers, count, expected):
    assert place(1, seed, servers, count) == expected


ALIKE = tuple(Candidate(number, str(number)) for number in range(4))
RACKS = tuple(Candidate(number, "abc"[number % 3], WEIGHTS[number % 4]) for number in range(8))

GOLDEN_SPREADS = [
    (0, ALIKE, 4, 1, (2, 1, 0, 3)),
    (5, ALIKE, 2, 1, (0, 3)),
    (5, ALIKE, 4, 2, (0, 1, 3, 2)),
    (1, RACKS, 6, 1, (6, 7, 2, 3, 5, 1)),
    (1, RACKS, 6, 2, (6, 2, 5, 7, 3, 1)),
    (2**63 - 1, RACKS, 3, 1, (4, 6, 5)),
    (77, RACKS, 8, 2, (2, 3, 6, 0, 7, 4, 5, 1)),
]


@pytest.mark.parametrize(("seed", "candidates", "columns", "replicas", "expected"), GOLDEN_SPREADS)
def test_algorithm_2_never_changes(seed, candidates, columns, replicas, expected):
    assert spread(2, seed, candidates, columns, replicas) == expected


def test_new_files_use_a_published_algorithm():
    assert spread(ALGORITHM, 5, ALIKE, 3) == spread(2, 5, ALIKE, 3) == place(1, 5, (0, 1, 2, 3), 3)
    for algorithm in (place, spread):
        with pytest.raises(ValueError, match="no placement algorithm 99"):
            algorithm(99, 0, TEN, 0)


@st.composite
def spreads(draw):
    """Candidates, width and replicas."""
    ids = draw(st.sets(st.integers(0, 0x7FFF), min_size=1, max_size=14))
    domains = st.sampled_from("abcdef"[: draw(st.integers(1, 6))])
    candidates = [
        Candidate(number, draw(domains), draw(st.sampled_from(WEIGHTS))) for number in sorted(ids)
    ]
    replicas = draw(st.integers(1, min(3, len(ids))))
    return candidates, draw(st.integers(1, len(ids) // replicas)), replicas


@given(st.integers(0, 2**64 - 1), spreads())
def test_a_spread_is_distinct_servers_in_domains_as_different_as_can_be(seed, case):
    candidates, width, replicas = case
    chosen = spread(2, seed, candidates, width * replicas, replicas)
    assert len(set(chosen)) == len(chosen) == width * replicas
    domain = {candidate.id: candidate.domain for candidate in candidates}
    assert set(chosen) <= set(domain)
    sizes = Counter(domain.values())
    if replicas == 1:
        # No domain has more columns than it must: none could give one up to a domain with room that
        # has two fewer.
        used = Counter(domain[server] for server in chosen)
        assert all(
            used[low] == sizes[low] or used[high] - used[low] < 2 for high in used for low in sizes
        )
    elif min(sizes.values()) * len(sizes) >= width * replicas and len(sizes) >= replicas:
        for column in range(width):
            assert len({domain[server] for server in chosen[column::width]}) == replicas


@pytest.mark.sweep
def test_servers_with_more_space_get_more():
    first = Counter(spread(2, seed, RACKS[:4], 1)[0] for seed in range(1500))
    assert first == {0: 100, 1: 200, 2: 400, 3: 800}
    used = Counter(server for seed in range(15000) for server in spread(2, seed, RACKS[:4], 2))
    assert used[0] < used[1] < used[2] < used[3]


def test_servers_that_are_alike_get_the_same():
    used = Counter(server for seed in range(400) for server in spread(2, seed, ALIKE, 2, 2))
    assert used == dict.fromkeys(range(4), 200)


@pytest.mark.parametrize(
    ("free", "weight"), [(100, 8), (50, 8), (49, 4), (25, 4), (24, 2), (13, 2), (12, 1), (0, 1)]
)
def test_weights_change_by_large_steps(free, weight):
    assert weight_of(free, 100) == weight


def test_a_spread_needs_servers():
    with pytest.raises(ValueError, match="5 columns do not fit on 4"):
        spread(2, 0, ALIKE, 5)


@given(
    seed=st.integers(0, 2**64 - 1),
    servers=st.sets(st.integers(0, 0xFFFF), min_size=1, max_size=20).map(
        lambda ids: tuple(sorted(ids))
    ),
    count=st.integers(0, 25),
)
def test_a_place_is_distinct_registered_servers(seed, servers, count):
    chosen = place(1, seed, servers, count)
    assert len(chosen) == min(count or len(servers), len(servers))
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= set(servers)


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_load_is_even_in_each_block_of_files(count):
    for block in range(5):
        places = [place(1, seed, TEN, count) for seed in range(10 * block, 10 * block + 10)]
        assert Counter(chosen[0] for chosen in places) == Counter(TEN)
        assert Counter(server for chosen in places for server in chosen) == Counter(
            {n: count or 10 for n in TEN}
        )


def test_every_other_file_still_meets_all_servers_evenly():
    starts = Counter(place(1, seed, (0, 1, 2, 3), 0)[0] for seed in range(0, 8000, 2))
    assert set(starts) == {0, 1, 2, 3}
    assert max(starts.values()) < 1.15 * min(starts.values())


def test_subsets_vary():
    assert len({frozenset(place(1, seed, TEN, 3)) for seed in range(2000)}) == 120  # all there are


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("unit=4MiB,count=2", Policy(4 << 20, 2, ())),
        ("kind=striped", Policy(kind="striped")),
        ("kind=interleaved,unit=4096", Policy(4096, kind="interleaved")),
        ("compress=zstd:7", Policy(compress=7)),
        ("compress=none", Policy(compress=0)),
        ("compress=zstd", Policy(compress=3)),
        (" count = 3 , servers = 4:0:2 ", Policy(0, 3, (0, 2, 4))),
        ("count=0,unit=1GiB", Policy(1 << 30)),
        ("replicas=2,count=1", Policy(count=1, replicas=2)),
        ("ec=4+2,unit=1MiB", Policy(1 << 20, data=4, parity=2)),
        ("ec=none", Policy(replicas=1)),
        ("ec=none,replicas=3", Policy(replicas=3)),
    ],
)
def test_hints_are_read(text, policy):
    assert parse_layout_hint(text) == policy


@given(
    unit=st.integers(0, 1 << 18).map(lambda pages: pages * 4096),
    count=st.integers(0, 255),
    servers=st.sets(st.integers(0, 0x7FFF), max_size=5).map(lambda ids: tuple(sorted(ids))),
    kind=st.sampled_from(KINDS),
    compress=st.none() | st.integers(0, 19),
    redundancy=st.sampled_from([(0, 0, 0), (1, 0, 0), (2, 0, 0), (0, 4, 2)]),
)
def test_hints_are_written_as_they_are_read(unit, count, servers, kind, compress, redundancy):
    assume(not servers or len(servers) >= redundancy[0])
    if redundancy[2]:
        unit, count, servers = 65536, 0, ()
    policy = Policy(
        unit,
        min(count, len(servers)) if servers else count,
        servers,
        kind,
        compress,
        "",
        0,
        *redundancy,
    )
    assert parse_layout_hint(format_layout_hint(policy)) == policy


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not key=value"),
        ("4MiB", "'4MiB' is not key=value"),
        ("unit=4MiB,", "is not key=value"),
        ("unot=4MiB", "did you mean 'unit'"),
        ("xyz=1", "there are kind, unit, count, servers, compress, replicas, ec"),
        ("unit=4MiB,unit=4MiB", "given twice"),
        ("unit=5000", "multiple of 4096 bytes from 4KiB to 1GiB"),
        ("unit=0", "multiple of 4096"),
        ("unit=2GiB", "multiple of 4096 bytes from 4KiB to 1GiB"),
        ("unit=big", "'big' is not a size"),
        ("count=-1", "'-1' is not a whole number from 0 to 255"),
        ("count=256", "from 0 to 255"),
        ("count=\u0662", "whole number"),
        ("compress=lz4", "neither 'none' nor 'zstd:LEVEL'"),
        ("compress=zstd:20", "from 1 to 19"),
        ("servers=32768", "from 0 to 32767"),
        ("servers=", "'' is not a whole number"),
        ("servers=0:1:0", "names a server twice"),
        ("servers=0:1,count=3", "more than the 2 servers"),
        ("replicas=0", "would keep nothing"),
        ("replicas=9", "from 0 to 8"),
        ("ec=4", "neither 'none' nor DATA"),
        ("ec=4+\u0662", "neither 'none' nor DATA"),
        ("ec=1+1", "2 to 16 data and 1 to 8 parity"),
        ("ec=4+0", "2 to 16 data and 1 to 8 parity"),
        ("ec=4+2,replicas=2", "do not go with it"),
        ("ec=4+2,count=6", "do not go with it"),
        ("ec=4+2,unit=2MiB", "unit=2MiB: with 4 data columns it may be 1MiB at most"),
        ("ec=4+2,unit=12KiB", "power of two"),
        ("ec=4+2,servers=0:1:2:3:4", "6 servers are needed, but 5 are listed"),
        ("replicas=2,servers=0", "2 servers are needed, but 1 are listed"),
        ("kind=mirrored", "there are striped and interleaved"),
    ],
)
def test_wrong_hints_are_refused_with_the_reason(text, complaint):
    with pytest.raises(Invalid, match=complaint):
        parse_layout_hint(text)
