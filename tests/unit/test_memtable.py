"""Memtable and run arithmetic, against plain dictionaries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.meta.memtable import Memtable, overlay, sorted_range, visible

KEYS = st.binary(min_size=1, max_size=2)
TABLES = st.dictionaries(KEYS, st.none() | st.binary(max_size=2), max_size=12)


def within(table: dict, start: bytes, end: bytes) -> list:
    return sorted((key, value) for key, value in table.items() if start <= key < end)


@pytest.mark.sweep
@given(st.lists(TABLES, max_size=6), KEYS, KEYS)
def test_a_memtable_is_the_dictionary_of_its_transactions_in_key_order(batches, start, end):
    table, model = Memtable(), {}
    for batch in batches:
        table.apply(batch)
        model.update(batch)
        assert table.entries == model
        assert list(table.range(start, end)) == within(model, start, end)


@given(TABLES, KEYS, KEYS)
def test_sorted_range(table, start, end):
    assert list(sorted_range(table, start, end)) == within(table, start, end)


@pytest.mark.sweep
@given(TABLES, TABLES)
def test_the_upper_run_wins(upper, lower):
    merged = overlay(iter(sorted(upper.items())), iter(sorted(lower.items())))
    assert list(merged) == sorted((lower | upper).items())


@given(TABLES, st.integers(0, 5))
def test_visible_drops_tombstones_before_it_counts(table, limit):
    expected = [(key, value) for key, value in sorted(table.items()) if value is not None]
    assert list(visible(iter(sorted(table.items())), limit)) == (
        expected[:limit] if limit else expected
    )
