"""Datasets in torch's DataLoader: workers and ranks divide one sequence, and states go on in it."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from aifs.client import data

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning")

ROWS = 333
ORDER = {"seed": 4, "buffer": 128, "shares": 64}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> data.Dataset:
    directory = tmp_path_factory.mktemp("rows")
    for number in range(3):
        lines = "".join(f"{number * 111 + row}\n" for row in range(111))
        (directory / f"{number}.txt").write_text(lines)
    return data.open(directory)


def whole(dataset: data.Dataset, **order: Any) -> list[int]:
    with data.reader(dataset, transform=int, **(ORDER | order)) as rows:
        return list(rows)


def loader(dataset: data.Dataset, **options: Any) -> data.Loader:
    how: dict[str, Any] = {"batch_size": 8, "transform": int, "order": ORDER} | options
    return data.Loader(dataset, **how)


def numbers(batches: Any) -> list[int]:
    return [number for batch in batches for number in batch.tolist()]


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2, 4])
def test_workers_divide_an_epoch(dataset: data.Dataset, workers: int):
    batches = list(loader(dataset, num_workers=workers))
    assert sorted(numbers(batches)) == list(range(ROWS))
    assert len(batches) == len(loader(dataset, num_workers=workers))
    sequence = whole(dataset)
    steps = max(workers, 1)
    for first in range(0, 5 * steps, steps):  # of each so many batches the rows are a run of it
        run = numbers(batches[first : first + steps])
        assert sorted(run) == sorted(sequence[8 * first : 8 * (first + steps)])


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_dataloader_takes_the_rows(dataset: data.Dataset, workers: int):
    rows = data.TorchRows(dataset, transform=int, workers=workers, **ORDER)
    found = torch.utils.data.DataLoader(rows, batch_size=8, num_workers=workers)
    assert sorted(numbers(found)) == list(range(ROWS))


def test_rows_by_number(dataset: data.Dataset):
    found = torch.utils.data.DataLoader(dataset, batch_size=100, shuffle=False)
    assert [int(row) for batch in found for row in batch] == list(range(ROWS))


@pytest.mark.sweep
@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "persistent_workers": True}])
def test_each_iteration_is_an_epoch(dataset: data.Dataset, options: dict[str, Any]):
    one = loader(dataset, **options)
    epochs = [numbers(one) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert one.state_dict()["epoch"] == 2
    for number, rows in enumerate(epochs):
        assert sorted(rows) == list(range(ROWS))
        if not options:
            assert rows == whole(dataset, epoch=number)


@pytest.mark.sweep
@pytest.mark.parametrize("batches", [0, 1, 3, 10, 40])
@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 0), (0, 2)])
def test_a_state_goes_on_with_other_workers(dataset, batches: int, before: int, after: int):
    """Batches that workers have fetched ahead do not count."""
    one = loader(dataset, num_workers=before)
    coming = iter(one)
    first = numbers(next(coming) for _ in range(batches))
    state = one.state_dict()
    assert state["done"] == len(first)
    other = loader(dataset, num_workers=after, order=None)
    other.load_state_dict(state)
    rest = numbers(other)
    assert sorted(first + rest) == list(range(ROWS))
    assert numbers(other) != rest and other.state_dict()["epoch"] == 2
    del coming


def test_an_iteration_that_was_left_goes_on(dataset: data.Dataset):
    one = loader(dataset, num_workers=2)
    first = numbers(batch for batch, _ in zip(one, range(5), strict=False))
    assert one.state_dict()["done"] == len(first) + 8  # zip has taken one more
    rest = numbers(one)
    assert len(rest) == ROWS - len(first) - 8


@pytest.mark.sweep
@pytest.mark.parametrize("drop_last", [False, True])
def test_ranks_have_one_state(dataset: data.Dataset, drop_last: bool):
    def of_rank(rank: int, world: int, workers: int, state: Any = None) -> data.Loader:
        made = loader(dataset, rank=rank, world=world, num_workers=workers, drop_last=drop_last)
        if state is not None:
            made.load_state_dict(state)
        return made

    loaders = [of_rank(rank, 4, 2) for rank in range(4)]
    seen: list[int] = []
    running = [iter(one) for one in loaders]
    for _ in range(3):
        for one in running:
            seen += next(one).tolist()
    states = [one.state_dict() for one in loaders]
    assert all(state == states[0] for state in states)
    del running
    rest = [numbers(of_rank(rank, 2, 0, states[0])) for rank in range(2)]
    seen += rest[0] + rest[1]
    assert len(seen) == len(set(seen))
    if drop_last:
        assert len(rest[0]) == len(rest[1]) and len(rest[0]) % 8 == 0
    else:
        assert sorted(seen) == list(range(ROWS))


def test_the_place_is_that_of_the_job(dataset: data.Dataset, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert numbers(loader(dataset)) == whole(dataset)[3::4]


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_workers_however_they_begin(dataset, method: str, persistent: bool, workers: int):
    options = {"multiprocessing_context": method, "persistent_workers": persistent}
    one = loader(dataset, num_workers=workers, **options)
    epochs = [numbers(one) for _ in range(2)]
    assert epochs[0] != epochs[1]
    assert [sorted(epoch) for epoch in epochs] == [list(range(ROWS))] * 2
    assert epochs[0] == numbers(loader(dataset, num_workers=workers))


def run_rank(rank: int, world: int, place: str, dataset: data.Dataset) -> None:
    """A job's rank: three steps, a state, which all ranks have alike, and the rest."""
    torch.distributed.init_process_group("gloo", f"file://{place}", rank=rank, world_size=world)
    first = loader(dataset, drop_last=True, num_workers=2)
    begun = iter(first)
    rows = [batch.tolist() for batch in islice(begun, 3)]
    state = first.state_dict()
    again = loader(dataset, drop_last=True)
    again.load_state_dict(state)
    for batch in again:
        torch.distributed.barrier()  # as a step of training has one: nobody has fewer
        rows.append(batch.tolist())
    found: list[Any] = [None] * world
    torch.distributed.all_gather_object(found, (rows, state))
    torch.distributed.destroy_process_group()
    assert all(of == state for _, of in found)
    seen = [row for rows, _ in found for batch in rows for row in batch]
    assert len(seen) == len(set(seen)) > ROWS - 8 * world * 2


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_of_torch_distributed(dataset: data.Dataset, tmp_path: Path, world: int):
    arguments = (world, str(tmp_path / "meet"), dataset)
    torch.multiprocessing.spawn(run_rank, arguments, nprocs=world)


def test_an_error_in_a_worker_names_the_file(tmp_path: Path):
    (tmp_path / "a.txt").write_text("1\n2\n")
    one = data.open(tmp_path)
    (tmp_path / "a.txt").write_text("1\n2\n3\n")
    with pytest.raises(OSError, match=r"a\.txt"):
        list(data.Loader(one, 2, num_workers=2))
