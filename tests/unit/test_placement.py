"""Placement and layout hints."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Invalid
from aifs.layout.hint import KINDS, Policy, format_layout_hint, parse_layout_hint
from aifs.layout.placement import ALGORITHM, place

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


def test_new_files_use_a_published_algorithm():
    assert place(ALGORITHM, 5, TEN, 3) == place(1, 5, TEN, 3)
    with pytest.raises(ValueError, match="no placement algorithm 99"):
        place(99, 0, TEN, 0)


@given(
    seed=st.integers(0, 2**64 - 1),
    servers=st.sets(st.integers(0, 0xFFFF), min_size=1, max_size=20).map(lambda ids: tuple(sorted(ids))),
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
        assert Counter(server for chosen in places for server in chosen) == Counter({n: count or 10 for n in TEN})


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
)
def test_hints_are_written_as_they_are_read(unit, count, servers, kind, compress):
    policy = Policy(unit, min(count, len(servers)) if servers else count, servers, kind, compress)
    assert parse_layout_hint(format_layout_hint(policy)) == policy


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not key=value"),
        ("4MiB", "'4MiB' is not key=value"),
        ("unit=4MiB,", "is not key=value"),
        ("unot=4MiB", "did you mean 'unit'"),
        ("xyz=1", "there are kind, unit, count, servers, compress"),
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
        ("kind=mirrored", "there are striped and interleaved"),
    ],
)
def test_wrong_hints_are_refused_with_the_reason(text, complaint):
    with pytest.raises(Invalid, match=complaint):
        parse_layout_hint(text)
