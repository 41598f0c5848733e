"""The order of an epoch: permutations and windows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.datasets import sequence

KEYS = st.integers(0, (1 << 64) - 1)


@pytest.mark.sweep
@given(st.integers(0, 5000), KEYS)
def test_a_permutation_takes_each_index_somewhere_else(size: int, key: int) -> None:
    assert sorted(sequence.permuted(index, size, key) for index in range(size)) == list(range(size))


@given(st.integers(1, 1 << 40), KEYS, st.data())
def test_a_large_permutation_stays_in_its_range(size: int, key: int, data: st.DataObject) -> None:
    indices = data.draw(st.lists(st.integers(0, size - 1), max_size=20, unique=True))
    taken = [sequence.permuted(index, size, key) for index in indices]
    assert len(set(taken)) == len(indices) and all(0 <= index < size for index in taken)


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(0, 300), KEYS)
def test_windows_hold_each_file_once(sizes: list[int], window: int, key: int) -> None:
    windows = sequence.file_windows(sizes, window, key)
    assert sorted(number for files in windows for number in files) == list(range(len(sizes)))
    for files in windows[:-1]:
        assert sum(sizes[number] for number in files) >= window
        assert sum(sizes[number] for number in files[:-1]) < window


GOLDEN = {
    (10, sequence.key_of(7, 0, 2)): [1, 8, 5, 2, 7, 0, 9, 6, 3, 4],
    (386_000_000, sequence.key_of(7, 1, 3, 5)): [
        *(5357807, 379660469, 366601625, 236438622, 222815822, 91155374)
    ],
}
"""Where each permutation takes 0, 1, 2, ...: states that jobs have saved rely on it."""


@pytest.mark.parametrize("size,key", GOLDEN)
def test_the_algorithm_does_not_change(size: int, key: int) -> None:
    golden = GOLDEN[size, key]
    assert [sequence.permuted(index, size, key) for index in range(len(golden))] == golden
