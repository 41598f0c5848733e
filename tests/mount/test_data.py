"""Datasets on a mount: each format gives the rows and the order that it gives elsewhere, also from
the data servers, and after the daemon was killed in the middle of an epoch."""

import errno
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from aifs.client import data
from aifs.datasets.formats import files as file_rows
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs

arrow = pytest.importorskip("pyarrow")
import pyarrow.parquet  # noqa: E402

from tests.support.datasets import (  # noqa: E402
    write_arrow,
    write_jsonl,
    write_records,
    write_tar,
)

ROWS = 500


def parquet(directory: Path, **columns: Any) -> None:
    table = arrow.table({"n": range(ROWS), **columns})
    for part in range(4):
        path = directory / f"{part}.parquet"
        pyarrow.parquet.write_table(table.slice(part * 125, 125), path, row_group_size=30)


def one_file(name: str, write: Callable[[Path, range], None], directory: Path) -> None:
    write(directory / name, range(ROWS))


def files(directory: Path) -> None:
    for row in range(ROWS):
        (directory / f"{row:04}").write_text(json.dumps({"n": row}))


def column(row: Any) -> int:
    return row["n"]


def member(row: Any) -> int:
    return json.loads(row["json"])


def content(row: Any) -> int:
    return json.loads(row["data"])["n"]


RECORDS = {"format": "records", "record_bytes": 8}

FORMATS: dict[str, tuple[Callable[[Path], None], Callable[[Any], int], dict[str, Any]]] = {
    "parquet": (parquet, column, {}),
    "arrow": (partial(one_file, "a.arrow", write_arrow), column, {}),
    "jsonl": (partial(one_file, "a.jsonl", write_jsonl), column, {}),
    "tar": (partial(one_file, "a.tar", write_tar), member, {}),
    "files": (files, content, {}),
    "records": (partial(one_file, "a.rec", write_records), int, RECORDS),
}


@pytest.mark.sweep
@pytest.mark.parametrize("name", FORMATS)
def test_a_format(on_mount: Path, scratch: Path, name: str):
    write, number, options = FORMATS[name]
    rows = []
    for directory in (on_mount / "set", scratch / "plain"):
        directory.mkdir()
        write(directory)
        if directory.is_relative_to(on_mount):
            aifs("drain", on_mount)
            aifs("evict", on_mount)
        dataset = data.open(directory, **options)
        assert dataset.format == name
        with data.reader(dataset, seed=3, buffer=128, transform=number) as reader:
            rows.append(list(reader))
    assert sorted(rows[0]) == sorted(rows[1]) == list(range(ROWS))
    if name != "files":  # their order on a mount is that in which they were made
        assert rows[0] == rows[1]


@pytest.mark.sweep
def test_an_epoch_goes_on_after_the_daemon_was_killed(mounted: Mounted):
    directory = mounted.path / "set"
    directory.mkdir()
    parquet(directory)
    os.sync()
    with data.reader(data.open(directory), seed=3, transform=column) as reader:
        first = [next(reader) for _ in range(100)]
        state = json.loads(json.dumps(reader.state()))
        mounted.kill()
    mounted.mount()
    with data.reader(data.open(directory), state=state, transform=column) as reader:
        assert sorted(first + list(reader)) == list(range(ROWS))


def test_the_order_of_small_files_stays_as_bytes_move(on_mount: Path):
    """A job that goes on when its files have been drained, in any order, reads those that it has
    not read."""
    directory = on_mount / "set"
    directory.mkdir()
    for row in reversed(range(20)):
        (directory / f"{row:04}").write_bytes(json.dumps({"n": row}).encode() + b" " * 5000)
    with data.reader(data.open(directory), seed=3, transform=content) as reader:
        first = [next(reader) for _ in range(7)]
        state = json.loads(json.dumps(reader.state()))
    aifs("drain", directory / "0003")
    (directory / "0011").read_bytes()
    aifs("drain", on_mount)
    with data.reader(data.open(directory), seed=3, transform=content) as reader:
        whole = list(reader)
    with data.reader(data.open(directory), state=state, transform=content) as reader:
        assert first + list(reader) == whole


def test_blocks_of_small_files_are_read_whole(mounted: Mounted, monkeypatch: pytest.MonkeyPatch):
    """None of the files is opened; if that cannot be done, each is, and says what is wrong."""
    directory = mounted.path / "set"
    for number in range(40):
        folder = directory / str(number % 2)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}").write_bytes(b"%02d" % number * 20_000)
    (directory / ".hidden").write_bytes(b"no row")
    aifs("drain", mounted.path)
    aifs("evict", directory / "0")
    expected = {
        f"{number % 2}/{number:02}": (b"%02d" % number * 20_000, number % 2) for number in range(40)
    }

    def rows_of(dataset: data.Dataset) -> dict[str, Any]:
        with data.reader(dataset, seed=3) as reader:
            return {row["path"]: (row["data"], row["label"]) for row in reader}

    dataset, other = data.open(directory), data.open(directory)
    with monkeypatch.context() as patch:
        patch.setattr(file_rows, "read_each", None)
        assert rows_of(dataset) == expected
    mounted.kill()
    mounted.mount()
    assert rows_of(dataset) == expected  # its descriptor is of no use any more
    (directory / "0" / "00").write_bytes(b"changed")
    with pytest.raises(OSError, match=r"0/00") as caught:
        rows_of(other)
    assert caught.value.errno == errno.ESTALE
    (directory / "0" / "00").write_bytes(expected["0/00"][0])
    (directory / "1" / "link").symlink_to("01")
    assert rows_of(data.open(directory)) == expected | {"1/link": expected["1/01"]}


@pytest.fixture
def keeping(mount_store: Callable[..., Mounted]) -> Mounted:
    """Blocks are kept though the servers are as near, of small files, too."""
    return mount_store("burst.blocks=always", "layout.kind=striped", "layout.pack_below=0")


def told(directory: Path) -> dict[str, Any]:
    """Of the one epoch that is read there; {}: there is none."""
    try:
        (epoch,) = json.loads(os.getxattr(directory, "user.aifs.order"))["epochs"]
    except OSError:
        return {}
    return epoch


def until_told(directory: Path, condition: Callable[[dict[str, Any]], bool]) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while not condition(epoch := told(directory)):
        assert time.monotonic() < until_s, epoch
        time.sleep(0.01)


def cold(mounted: Mounted, write: Callable[[Path], None], **options: Any) -> Path:
    """The directory of a dataset that is on the data servers alone, and too large to be inline."""
    directory = mounted.path / "set"
    directory.mkdir()
    write(directory)
    data.open(directory, **options)  # makes the index
    aifs("drain", mounted.path)
    aifs("evict", mounted.path)
    return directory


def cold_parquet(mounted: Mounted) -> Path:
    noise = [os.urandom(100) for _ in range(ROWS)]
    return cold(mounted, lambda directory: parquet(directory, noise=noise))


def padded_records(directory: Path) -> None:
    for part in range(4):
        rows = range(part * 125, (part + 1) * 125)
        (directory / f"{part}.rec").write_bytes(b"".join(b"%0120d" % row for row in rows))


@pytest.mark.sweep
def test_records_are_there_before_the_reader_comes_to_them(keeping: Mounted):
    options = {"format": "records", "record_bytes": 120}
    directory = cold(keeping, padded_records, **options)
    dataset = data.open(directory, **options)
    with data.reader(dataset, seed=3, buffer=128, transform=int) as reader:
        rows = [next(reader)]
        until_told(directory, lambda epoch: epoch.get("kept_files") == 4)
        rows += list(reader)
    assert sorted(rows) == list(range(ROWS))


@pytest.mark.sweep
def test_files_are_there_before_the_reader_comes_to_them(keeping: Mounted):
    directory = cold_parquet(keeping)
    with data.reader(data.open(directory), seed=3, buffer=128, transform=column) as reader:
        rows = [next(reader)]
        until_told(directory, lambda epoch: epoch.get("kept_files") == 4)
        epoch = told(directory)
        assert (epoch["rows"], epoch["readers"], epoch["error"]) == (ROWS, [0], "")
        assert "1 being read, 4 files" in aifs("status", keeping.path).stdout
        if find_spec("matplotlib"):  # the figures extra
            aifs("dataset", "show", directory, "--plot", keeping.path / "order.svg")
            drawn = (keeping.path / "order.svg").read_text()
            for label in ("of seed 3 reads", "in the burst tier: 4 of 4", "readers are here"):
                assert label in drawn
        rows += list(reader)
        assert told(directory) == {}, "the reader has said that the epoch is over"
    assert sorted(rows) == list(range(ROWS))


def many_records(directory: Path) -> None:
    noise = os.urandom(4088)
    for part in range(50):
        rows = range(part * 10, (part + 1) * 10)
        (directory / f"{part:02}.rec").write_bytes(b"".join(b"%08d" % row + noise for row in rows))


@pytest.mark.sweep
def test_a_reader_goes_on_after_the_daemon_was_killed_while_it_read_ahead(keeping: Mounted):
    options = {"format": "records", "record_bytes": 4096}
    directory = cold(keeping, many_records, **options)

    def number(row: bytes) -> int:
        return int(row[:8])

    with data.reader(data.open(directory, **options), seed=3, transform=number) as reader:
        until_told(directory, lambda epoch: epoch.get("kept_files", 0) > 0)
        keeping.kill()
        state = reader.state()
    keeping.mount()
    with data.reader(data.open(directory, **options), state=state, transform=number) as reader:
        until_told(directory, lambda epoch: epoch.get("kept_files") == 50)
        assert sorted(reader) == list(range(ROWS))


@pytest.mark.sweep
def test_workers_say_what_they_read_and_others_go_on(keeping: Mounted):
    """Each worker for itself, in the order of the whole job."""
    pytest.importorskip("torch")
    directory = cold_parquet(keeping)
    options: dict[str, Any] = {"order": {"seed": 3, "buffer": 128}, "transform": column}
    loader = data.Loader(data.open(directory), 5, num_workers=2, **options)
    batches = iter(loader)
    rows = [row for _ in range(20) for row in next(batches).tolist()]
    until_told(directory, lambda epoch: epoch.get("readers") == [0, 1])
    state = json.loads(json.dumps(loader.state_dict()))
    del batches, loader
    loader = data.Loader(data.open(directory), 5, num_workers=1, **options)
    loader.load_state_dict(state)
    rows += [row for batch in loader for row in batch.tolist()]
    assert sorted(rows) == list(range(ROWS))


RANK = """
import json, os, sys
from aifs.client import data

path, world, workers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loader = data.Loader(
    data.open(path), 5, num_workers=workers, order={"seed": 3, "shares": 64, "buffer": 128},
    world=world, rank=0, transform=lambda row: row["n"],
)
for batch in loader:
    print(json.dumps([batch.tolist(), loader.state_dict()]), flush=True)
"""
"""Rank 0 of a world: a line for each batch that it was given, with the state after it."""


def following(whole: list[int], state: dict[str, Any]) -> list[int]:
    """The rows that follow a state, by the letter of the guide: row g of the global sequence is of
    share g mod K, and the share that has given fewest gives the next, the lowest number first."""
    count = state["shares"]
    shares = [whole[share::count] for share in range(count)]
    given = state.get("counts") or [len(range(k, state["done"], count)) for k in range(count)]
    rows = []
    while open_ones := [k for k in range(count) if given[k] < len(shares[k])]:
        share = min(open_ones, key=lambda k: (given[k], k))
        rows.append(shares[share][given[share]])
        given[share] += 1
    return rows


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("world", "workers", "killed"),
    [(1, 0, "rank"), (2, 0, "rank"), (1, 2, "rank"), (2, 2, "rank"), (2, 2, "worker")],
)
def test_an_epoch_goes_on_after_one_was_killed(
    on_mount: Path, world: int, workers: int, killed: str
):
    """All ranks have had as many batches; a job of another size goes on."""
    pytest.importorskip("torch")
    directory = on_mount / "set"
    directory.mkdir()
    parquet(directory)
    with data.reader(data.open(directory), seed=3, shares=64, buffer=128) as reader:
        whole = [column(row) for row in reader]
    words = [sys.executable, "-c", RANK, str(directory), str(world), str(workers)]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT) as rank:
        assert rank.stdout is not None and rank.stderr is not None
        lines = [json.loads(rank.stdout.readline()) for _ in range(7)]
        children = Path(f"/proc/{rank.pid}/task/{rank.pid}/children").read_text().split()
        ends = [os.pidfd_open(int(child)) for child in children]
        if killed == "rank":
            rank.kill()
        else:
            signal.pidfd_send_signal(ends[0], signal.SIGKILL)
            lines += map(json.loads, rank.stdout)
            said = rank.stderr.read()
            # The second where a batch was on the way, whose memory nobody hands over any more.
            assert "is killed by signal" in said or "ConnectionResetError" in said
    for end in ends:  # workers look every few seconds whether their rank lives
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(end, signal.SIGKILL)
        assert select.select([end], [], [], TIMEOUT_S)[0]
        os.close(end)
    assert rank.returncode == (-signal.SIGKILL if killed == "rank" else 1)
    rows, state = [row for batch, _ in lines for row in batch], lines[-1][1]
    assert state["done"] == len(rows) * world
    with data.reader(data.open(directory), state=state, transform=column) as reader:
        rest = list(reader)
    assert not set(rows) & set(rest)
    assert rest == following(whole, state)
