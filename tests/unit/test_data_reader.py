"""The reader of datasets against a plain oracle: each row once, wherever it goes on, and with
whatever world and workers."""

import errno
import gc
import json
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.client import data
from aifs.client.data.reader import filled
from aifs.core.errors import DatasetError
from aifs.datasets.arrays import ArrayArithmetic, all_permuted
from aifs.datasets.index import INDEX_NAME
from aifs.datasets.sequence import SHUFFLES, Epoch, EpochOrder, PlainArithmetic, permuted


def written(directory: Path, files: list[int]) -> Path:
    """Text files with so many rows each: ``file:row``."""
    directory.mkdir(exist_ok=True)
    for number, rows in enumerate(files):
        lines = "".join(f"{number}:{row}\n" for row in range(rows))
        (directory / f"{number:03}.txt").write_text(lines)
    return directory


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> data.Dataset:
    """333 rows in five files, of which one is empty."""
    return data.open(written(tmp_path_factory.mktemp("small") / "d", [100, 0, 33, 1, 199]))


def sequence(dataset: data.Dataset, **order: Any) -> list[str]:
    """The global sequence, by one reader."""
    with data.reader(dataset, **order) as rows:
        return list(rows)


def taken(dataset: data.Dataset, world: int, workers: int, rows: int, **how: Any) -> Any:
    """What all readers of a world hand out when each gives ``rows`` (-1: all), in the order of the
    global sequence if they began at a prefix; and the state that each tells."""
    found, states = [], []
    for rank in range(world):
        for worker in range(workers):
            place = {"rank": rank, "world": world, "worker": worker, "workers": workers}
            with data.reader(dataset, **place, **how) as one:
                mine = [next(one) for _ in range(rows)] if rows >= 0 else list(one)
                found.append(mine)
                states.append(one.state())
    return found, states


@pytest.mark.sweep
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_each_row_once(small: data.Dataset, shuffle: str):
    rows = sequence(small, shuffle=shuffle, seed=3, buffer=128)
    assert sorted(rows) == sorted(small[row] for row in range(len(small)))
    in_order = [small[row] for row in range(len(small))]
    assert (rows == in_order) == (shuffle == "none")
    assert rows == sequence(small, shuffle=shuffle, seed=3, buffer=128)
    if shuffle != "none":
        assert rows != sequence(small, shuffle=shuffle, seed=3, epoch=1, buffer=128)


@pytest.mark.sweep
@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize(("world", "workers"), [(2, 1), (4, 2), (1, 4), (8, 8)])
def test_readers_divide_one_sequence(small, shuffle: str, world: int, workers: int):
    how = {"shuffle": shuffle, "seed": 3, "buffer": 128, "shares": 64}
    whole = sequence(small, **how)
    readers = world * workers
    found, states = taken(small, world, workers, -1, **how)
    for rank in range(world):
        for worker in range(workers):
            number = rank + world * worker
            assert found[rank * workers + worker] == whole[number::readers]
    assert all(state["done"] == len(whole) for state in states)


@pytest.mark.sweep
def test_a_resume_in_another_world(small: data.Dataset):
    """The rows that were given are not divided by the readers that go on."""
    whole = sequence(small, seed=3, buffer=128)
    first, states = taken(small, 4, 2, 5, seed=3, buffer=128)
    assert all(state == states[0] for state in states)
    assert states[0]["done"] == 40 and "counts" not in states[0]
    with data.reader(small, state=states[0]) as one:
        second = [next(one) for _ in range(13)]
        state = one.state()
    assert second == whole[40:53]
    third, states = taken(small, 4, 2, 3, state=state)
    assert all(state == states[0] for state in states)
    assert sorted(sum(third, [])) == sorted(whole[53 : 53 + 24])
    rest, states = taken(small, 2, 4, -1, state=states[0])
    assert sorted(sum(rest, [])) == sorted(whole[77:])
    assert all(state["done"] == 333 for state in states)


@pytest.mark.sweep
@given(st.data())
def test_any_way_through_an_epoch(small: data.Dataset, draw: st.DataObject):
    """Worlds and workers change at any place; each row comes once."""
    whole = sequence(small, seed=5, buffer=64, shares=16)
    state: dict[str, Any] | None = None
    seen: list[str] = []
    how: dict[str, Any] = {"seed": 5, "buffer": 64, "shares": 16}
    while len(seen) < len(whole):
        world, workers = draw.draw(
            st.sampled_from([(1, 1), (2, 1), (1, 4), (4, 2), (4, 4), (16, 1)])
        )
        readers = world * workers
        left = (len(whole) - len(seen)) // readers
        rows = draw.draw(st.integers(0, left)) if draw.draw(st.integers(0, 3)) else -1
        found, states = taken(
            small, world, workers, rows, **({"state": state} if state is not None else how)
        )
        state = states[0]
        assert all(one == state for one in states)
        seen += sum(found, [])
        assert state["done"] == len(seen)
        assert sorted(seen) == sorted(whole[: len(seen)])
        if rows == 0:
            break
    assert len(set(seen)) == len(seen)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=8),
    st.integers(0, 60),
)
def test_who_has_given_fewest_gives_next(shares: list[tuple[int, int]], more: int):
    counts = [min(one) for one in shares]
    limits = [max(one) for one in shares]
    more = min(more, sum(limits) - sum(counts))
    expected = list(counts)
    for _ in range(more):
        open_ones = [n for n, limit in enumerate(limits) if expected[n] < limit]
        expected[min(open_ones, key=lambda n: (expected[n], n))] += 1
    assert filled(counts, limits, more) == expected


@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_arrays_are_permuted_as_numbers_are(size: int, key: int):
    some = range(0, size, max(1, size // 50))
    found = all_permuted(size, key)
    assert [int(found[number]) for number in some] == [
        permuted(number, size, key) for number in some
    ]


def test_both_arithmetics_give_one_order(small: data.Dataset):
    order = data.reader(small, seed=9).state()
    del order["done"]
    plain, arrays = (
        Epoch(small.index, EpochOrder(**order), arithmetic)
        for arithmetic in (PlainArithmetic(), ArrayArithmetic())
    )
    for share in range(64):
        assert list(plain.groups(share)) == list(arrays.groups(share))


def test_no_reader_gives_more_than_another(small: data.Dataset):
    found, states = taken(small, 4, 2, -1, seed=3, drop_last=True)
    assert {len(rows) for rows in found} == {333 // 8}
    assert all(state["done"] == 333 for state in states)


def test_rows_are_transformed_where_they_are_handed_out(small: data.Dataset):
    rows = sequence(small, transform=lambda row: row.partition(":")[0])
    assert sorted(set(rows)) == ["0", "2", "3", "4"]


def test_a_transform_that_fails_loses_no_row(small: data.Dataset):
    failed = []

    def once(row: str) -> str:
        if not failed:
            failed.append(row)
            raise KeyError(row)
        return row

    with data.reader(small, transform=once) as rows:
        with pytest.raises(KeyError):
            next(rows)
        assert rows.state()["done"] == 0
        assert next(rows) == failed[0]


@pytest.mark.sweep
@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_batches_hold_the_same_rows(tmp_path: Path, shuffle: str):
    lines = [json.dumps({"n": number}) for number in range(500)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    dataset = data.open(tmp_path)
    rows = sequence(dataset, shuffle=shuffle, buffer=64, seed=2)
    with data.reader(dataset, shuffle=shuffle, buffer=64, seed=2) as reader:
        batches = list(reader.batches())
        assert reader.state()["done"] == 500
    assert sum(batch.num_rows for batch in batches) == 500
    assert len({batch.schema for batch in batches}) == 1
    found = [json.loads(text) for batch in batches for text in batch.column(0).to_pylist()]
    assert sorted(row["n"] for row in found) == sorted(row["n"] for row in rows)


def test_the_next_batch_is_fetched_while_one_is_used(tmp_path: Path, monkeypatch):
    dataset = data.open(written(tmp_path, [10] * 4))
    opened = threading.Semaphore(0)
    open_block = data.Dataset.open_block

    def counted(self: data.Dataset, number: int) -> Any:
        opened.release()
        return open_block(self, number)

    monkeypatch.setattr(data.Dataset, "open_block", counted)
    with data.reader(dataset, shares=1, buffer=10) as reader:
        batches = reader.batches()
        next(batches)
        assert opened.acquire(timeout=60) and opened.acquire(timeout=60)
        assert sum(batch.num_rows for batch in batches) == 30


def test_rows_and_batches_are_not_mixed(small: data.Dataset):
    with data.reader(small) as one:
        next(one)
        with pytest.raises(ValueError, match="gives rows"):
            next(one.batches())
    with data.reader(small) as one:
        next(one.batches())
        with pytest.raises(ValueError, match="gives batches"):
            next(one)
        with pytest.raises(ValueError, match="a state only"):
            one.state()


def test_the_index_is_kept_while_the_files_are_the_same(tmp_path: Path):
    directory = written(tmp_path / "d", [10, 20])
    told: list[tuple[int, int]] = []

    def opened() -> data.Dataset:
        told.clear()
        return data.open(directory, on_file=lambda done, total: told.append((done, total)))

    assert len(opened()) == 30 and told == [(1, 2), (2, 2)]
    assert len(opened()) == 30 and not told
    (directory / "002.txt").write_text("more\n")
    assert len(opened()) == 31 and told
    (directory / INDEX_NAME).write_bytes(b"AIFSidx1 torn")
    assert len(opened()) == 31 and told
    (directory / "002.txt").unlink()
    assert len(opened()) == 30 and told
    one = data.open(directory / "001.txt")
    assert (len(one), one[19]) == (20, "1:19")


def test_a_dataset_travels_to_another_process(small: data.Dataset):
    again = pickle.loads(pickle.dumps(small))
    assert sequence(again, seed=1) == sequence(small, seed=1)


def test_a_file_that_changes_is_named(tmp_path: Path):
    directory = written(tmp_path / "d", [10, 10])
    dataset = data.open(directory)
    path = directory / "001.txt"
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="has changed") as raised:
        sequence(dataset)
    assert (raised.value.errno, raised.value.filename) == (errno.ESTALE, str(path))
    path.write_text("x\n")
    with pytest.raises(OSError, match="has changed"):
        sequence(dataset)


def test_an_error_is_raised_each_time_and_loses_no_row(tmp_path: Path):
    directory = written(tmp_path / "d", [10])
    dataset = data.open(directory)
    path = directory / "000.txt"
    was = path.stat().st_mtime_ns
    with data.reader(dataset, shuffle="none") as rows:
        os.utime(path, ns=(1, 1))
        for _ in range(2):
            with pytest.raises(OSError, match="has changed"):
                next(rows)
        os.utime(path, ns=(was, was))
        assert len(list(rows)) == 10


@pytest.mark.parametrize("files", [[], [0], [1], [0, 0, 1]])
def test_small_datasets(tmp_path: Path, files: list[int]):
    directory = written(tmp_path / "d", files)
    dataset = data.open(directory, format="text")
    found, states = taken(dataset, 2, 2, -1)
    assert len(sum(found, [])) == sum(files)
    assert all(state["done"] == sum(files) for state in states)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("aifs-data")}


@pytest.mark.parametrize("how", ["close", "forgotten", "ended"])
def test_threads_end_with_the_reader(small: data.Dataset, how: str):
    before = threads()
    one = data.reader(small)
    next(one)
    running = [t for t in threading.enumerate() if t.name.startswith("aifs-data")]
    assert threads() > before
    if how == "close":
        one.close()
    elif how == "ended":
        list(one)
    else:
        del one
        gc.collect()
    for thread in running:
        thread.join(30)
    assert not any(thread.is_alive() for thread in running)


@pytest.mark.parametrize(
    ("wrong", "error", "says"),
    [
        ({"rank": 2, "world": 2}, ValueError, "rank 2 of 2"),
        ({"world": 3, "shares": 64}, DatasetError, "say shares=66"),
        ({"shuffle": "all"}, DatasetError, "one of blocks"),
        ({"state": {"seed": 1}}, DatasetError, "no state"),
        ({"state": {}, "seed": 1}, ValueError, "cannot be given with it"),
    ],
)
def test_wrong_readers(small: data.Dataset, wrong: dict[str, Any], error: Any, says: str):
    with pytest.raises(error, match=says):
        data.reader(small, **wrong)


def test_a_state_of_another_dataset(small: data.Dataset, tmp_path: Path):
    with data.reader(small) as rows:
        list(rows)
        state = rows.state()
    with pytest.raises(DatasetError, match="another dataset"):
        data.reader(data.open(written(tmp_path / "d", [3])), state=state)


def test_wrong_datasets(tmp_path: Path):
    with pytest.raises(DatasetError, match=f"{tmp_path}: no files"):
        data.open(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"no parquet at all")
    with pytest.raises(DatasetError, match=r"a\.parquet: "):
        data.open(tmp_path)
    with pytest.raises(DatasetError, match="format 'csv' is unknown"):
        data.open(tmp_path, format="csv")
    with pytest.raises(DatasetError, match="no option 'colums'; it has columns"):
        data.open(tmp_path, colums=["a"])
    (tmp_path / "b.bin").write_bytes(bytes(10))
    with pytest.raises(DatasetError, match=r"b\.bin: 10 bytes are not a multiple"):
        data.open(tmp_path / "b.bin", format="records", record_bytes=4)
    with pytest.raises(FileNotFoundError):
        data.open(tmp_path / "none")
    assert len(data.open(tmp_path / "b.bin", format="records", record_bytes=5)) == 2


def test_an_index_of_records_counts_for_records_of_that_size(tmp_path: Path):
    """It is kept, so that they are read ahead on a mount."""
    (tmp_path / "a.bin").write_bytes(b"0123456789ab")
    (tmp_path / "b.bin").write_bytes(b"")
    for size, rows in ((4, 3), (6, 2), (6, 2), (4, 3)):
        opened = data.open(tmp_path, format="records", record_bytes=size)
        assert (len(opened), len(opened[rows - 1])) == (rows, size)
        assert opened.has_kept_index and (tmp_path / ".aifs-index").exists()
    for options in ({}, {"record_bytes": 5}, {"record_bytes": "4"}):
        with pytest.raises(DatasetError, match="record_bytes"):
            data.open(tmp_path, format="records", **options)


@pytest.mark.parametrize("shuffle", ["none", "window"])
def test_rows_that_are_dealt_out_are_taken_from_a_block_once(
    small: data.Dataset, shuffle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each share took its own: file order was up to three times slower than shuffled blocks."""
    taken: list[int] = []
    open_block = data.Dataset.open_block

    def counting(dataset: data.Dataset, number: int) -> Any:
        block = open_block(dataset, number)
        take = block.take
        block.take = lambda rows: taken.append(number) or take(rows)
        return block

    monkeypatch.setattr(data.Dataset, "open_block", counting)
    with data.reader(small, shuffle=shuffle, buffer=len(small)) as reader:
        assert sum(1 for _ in reader) == len(small)
    blocks = len(small.index.rows)
    # The shares have groups of whole rows, so the last rows are a group of their own.
    assert sorted(set(taken)) == [*range(blocks)] and len(taken) <= blocks + 2
