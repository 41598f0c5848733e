"""Segments of metadata backups: their bytes and names, and which of them make a state."""

import random
import struct
from uuid import UUID

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import Unavailable
from aifs.meta import journal
from aifs.meta.backup import (
    BASE,
    INCREMENT,
    Name,
    Segment,
    chains,
    decode_segment,
    newest,
    parse_name,
)

STORE, OTHER = "6a3d5f0e-0000-4000-8000-0123456789ab", "6a3d5f0e-0000-4000-8000-0123456789ac"
NUMBERS = st.integers(0, (1 << 64) - 1)
NAMES = st.one_of(
    st.builds(Name, st.just(BASE), NUMBERS, st.integers(0, (1 << 32) - 1), st.none() | NUMBERS),
    st.builds(Name, st.just(INCREMENT), NUMBERS, st.just(0), NUMBERS),
)
WRITES = st.dictionaries(
    st.binary(min_size=1, max_size=20), st.none() | st.binary(max_size=100), max_size=20
)


@given(NAMES, WRITES)
def test_what_is_written_is_read(name: Name, writes: dict) -> None:
    assert parse_name(str(name)) == name
    data = Segment(name, STORE, 5, journal.encode_changes(writes)).encode()
    segment = decode_segment(name, STORE, data)
    assert segment.writes() == writes and segment.created_ns == 5


def test_the_format_is_what_the_table_says() -> None:
    name = Name(BASE, 3, 2, 9)
    data = Segment(
        name, STORE, 5, journal.encode_changes({b"key": b"value", b"gone": None})
    ).encode()
    head = (
        b"AIFSbkup"
        + struct.pack("<IBBH", 1, 1, 1, 0)
        + UUID(STORE).bytes
        + struct.pack("<QQIqQ", 3, 9, 2, 5, 24)
    )
    assert data[:68] == head and data[68:100] == blake3(head + data[100:]).digest()
    assert str(name) == "base-0000000000000003-00000002-0000000000000009"
    assert str(Name(BASE, 3, 2, None)) == "base-0000000000000003-00000002"
    assert str(Name(INCREMENT, 3, 0, 9)) == "increment-0000000000000003-0000000000000009"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "base",
        "base-3-2",
        "increment-3-9",
        f"{Name(BASE, 1, 1, 1)}.new",
        f"x{Name(BASE, 1, 1, 1)}",
    ],
)
def test_other_names_are_none(text: str) -> None:
    assert parse_name(text) is None


@given(st.data())
def test_damage_is_noticed(data: st.DataObject) -> None:
    name = Name(INCREMENT, 3, 0, 9)
    good = Segment(name, STORE, 5, journal.encode_changes({b"key": b"value" * 100})).encode()
    place = data.draw(st.integers(0, len(good) - 1))
    bad = bytearray(good)
    bad[place] ^= 1 << data.draw(st.integers(0, 7))
    for broken in (bytes(bad), good[:place], good + b"\0"):
        with pytest.raises(Unavailable):
            decode_segment(name, STORE, broken)
    for other, store in ((name, OTHER), (name._replace(seq=10), STORE)):
        with pytest.raises(Unavailable):
            decode_segment(other, store, good)


def make_history(rng: random.Random) -> tuple[list[dict], dict[Name, dict]]:
    """The map after each transaction, and all segments of it: bases that are taken in slices,
    increments that overlap."""
    states: list[dict] = [{}]
    segments: dict[Name, dict] = {}
    increments: list[list] = [[0, {}]]
    base: list | None = None
    for seq in range(1, 40):
        writes = {rng.randrange(10): rng.choice((None, seq)) for _ in range(rng.randint(1, 3))}
        after = states[-1] | writes
        states.append({key: value for key, value in after.items() if value is not None})
        for increment in increments:
            increment[1] |= writes
        if rng.random() < 0.3:  # from any state that an increment was begun at
            begun, changes = rng.choice(increments)
            segments[Name(INCREMENT, begun, 0, seq)] = dict(changes)
            increments.append([seq, {}])
        if base is None and rng.random() < 0.2:
            base = [seq, 0, 0, {}]
        elif base is not None:
            base[3] |= writes
            end = base[2] + rng.randint(1, 5)
            read = {key: value for key, value in states[-1].items() if base[2] <= key < end}
            last = end >= 10
            segments[Name(BASE, base[0], base[1], seq if last else None)] = read | base[3]
            base = None if last else [base[0], base[1] + 1, end, {}]
    return states, segments


@given(st.integers(), st.floats(0, 0.5), st.none() | st.integers(0, 40))
def test_any_chain_makes_the_state_that_it_says(seed: int, lost: float, at: int | None) -> None:
    rng = random.Random(seed)
    states, segments = make_history(rng)
    left = {name: changes for name, changes in segments.items() if rng.random() >= lost}
    for chain in chains(left):
        made: dict = {}
        for name in chain.segments:
            made |= left[name]
        assert {key: value for key, value in made.items() if value is not None} == states[chain.seq]
    best = newest(left, at)
    if best is not None:
        assert at is None or best.seq <= at
        assert at is not None or best.seq == max(chain.seq for chain in chains(left))


def test_the_newest_needs_all_its_parts() -> None:
    parts = [Name(BASE, 5, 0, None), Name(BASE, 5, 1, None), Name(BASE, 5, 2, 8)]
    older = [Name(BASE, 1, 0, 2), Name(INCREMENT, 2, 0, 4)]
    assert newest([*parts, *older]).seq == 8
    assert newest([parts[0], parts[2], *older]).seq == 4
    assert newest([*parts, Name(INCREMENT, 9, 0, 12)]).seq == 8, "a gap"
    assert newest([*parts, Name(INCREMENT, 4, 0, 12)]).segments[-1] == Name(INCREMENT, 4, 0, 12)
    assert newest([*parts, *older], at=7).seq == 4
    assert newest([], None) is None
