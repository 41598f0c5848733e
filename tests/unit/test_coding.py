"""The erasure code: what it makes of a row, and what any of its columns can be told from."""

import pytest
from hypothesis import given
from hypothesis import strategies as some

from aifs.data.objects import coding
from aifs.data.objects.coding import Code, Fragments, code_of

GOLDEN = ["a34ee594cf73dc14", "b6eff1a9154e8629"]
"""Parity of the units below: if a test of it fails, stores can no longer be decoded."""

KINDS = [code_of, Fragments] if coding.is_available() else [Fragments]
"""What is used, and what is used where ISA-L cannot be called directly: they must give the same
bytes."""

SHAPES = [(2, 1), (3, 2), (4, 2), (5, 3), (16, 8)]


def encoded(code: Code, units: list[bytes], parity: int) -> list[bytes]:
    targets = [memoryview(bytearray(b"\xaa" * len(units[0]))) for _ in range(parity)]
    code.encode([memoryview(unit) for unit in units], targets)
    return [bytes(target) for target in targets]


@some.composite
def rows(draw: some.DrawFn) -> tuple[int, int, list[bytes]]:
    """Data and parity columns, and the units of a row: whole ones, then one that is shorter or
    none, then empty ones."""
    data, parity = draw(some.sampled_from(SHAPES))
    unit = draw(some.sampled_from([1, 17, 512, 4096, 16 << 10, 40_000]))
    size = draw(some.integers(1, unit * data))
    seed = draw(some.binary(min_size=1, max_size=64))
    content = (seed * (size // len(seed) + 1))[:size]
    return data, parity, [content[start : start + unit] for start in range(0, unit * data, unit)]


@given(rows(), some.data())
def test_any_columns_as_many_as_there_are_of_data_tell_the_others(
    row: tuple, choice: some.DataObject
) -> None:
    data, parity, units = row
    code, length = choice.draw(some.sampled_from(KINDS))(data, parity), len(units[0])
    columns = units + encoded(code, units, parity)
    kept = choice.draw(some.sets(some.integers(0, data + parity - 1), min_size=data, max_size=data))
    known = {number: memoryview(columns[number]) for number in sorted(kept)}
    for wanted in set(range(data + parity)) - kept:
        target = memoryview(bytearray(b"\xaa" * length))
        code.reconstruct(known, wanted, target)
        assert bytes(target) == columns[wanted].ljust(length, b"\0")


@given(rows(), some.data())
def test_a_range_of_parity_is_that_of_the_range(row: tuple, choice: some.DataObject) -> None:
    data, parity, units = row
    length = len(units[0])
    start = choice.draw(some.integers(0, length - 1))
    stop = choice.draw(some.integers(start + 1, length))
    first, second = (choice.draw(some.sampled_from(KINDS))(data, parity) for _ in range(2))
    whole = encoded(first, units, parity)
    part = encoded(second, [unit[start:stop] for unit in units], parity)
    assert part == [unit[start:stop] for unit in whole]


@pytest.mark.parametrize(("data", "parity"), SHAPES)
def test_zeros_have_parity_of_zeros(data: int, parity: int) -> None:
    assert encoded(code_of(data, parity), [bytes(5000)] * data, parity) == [bytes(5000)] * parity


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_on_servers_never_changes(kind: type) -> None:
    units = [bytes((7 * column + index) % 256 for index in range(8)) for column in range(4)]
    assert [unit.hex() for unit in encoded(kind(4, 2), units, 2)] == GOLDEN


@pytest.mark.parametrize("length", [512, 4096, 16 << 10])
def test_what_the_library_adds_depends_on_place_and_length_alone(length: int) -> None:
    code = Fragments(4, 2)
    contents = [bytes(4 * length), b"\xff" * (4 * length), bytes(range(256)) * (length // 64)]
    heads = [[fragment[:80] for fragment in code.driver.encode(content)] for content in contents]
    assert heads == [code.headers(length)] * 3
    assert {len(fragment) for fragment in code.driver.encode(contents[2])} == {80 + length}
