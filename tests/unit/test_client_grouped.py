"""Files that ranks save together, in a plain directory; and what tensors become in them."""

import asyncio
import json
import math
import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from aifs import client
from aifs.client import (
    CheckpointError,
    Group,
    GroupError,
    InvalidGroup,
    getfile,
    group_getfile,
    group_putfile,
    putfile,
)
from aifs.client.checkpoints import locks, tensor_file
from aifs.client.checkpoints.tensor_file import ALIGNMENT, DamagedTensors
from aifs.client.coordination import JOB_NAME, JOB_VARIABLES, job_of_environment
from aifs.client.mounted_group import duration
from aifs.client.putting import Future
from aifs.core import files
from aifs.core.units import parse_duration
from tests.support.group_ranks import (
    WAIT_S,
    WORLD,
    join,
)

DTYPES = [dtype for dtype, _ in tensor_file.KINDS.values()]


# --- the format -----------------------------------------------------------------------------------


@pytest.mark.sweep
@given(
    st.dictionaries(
        st.text(max_size=6).filter(lambda name: name != "__metadata__"),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)),
    ),
    st.dictionaries(st.text(max_size=3), st.text(max_size=3)),
)
def test_a_header_says_where_each_tensor_lies(
    tensors: dict[str, tuple[str, list[int]]], metadata: dict[str, str]
) -> None:
    header = tensor_file.encode(tensors, metadata)
    assert len(header.data) % ALIGNMENT == 0
    entries, told = tensor_file.decode(
        memoryview(header.data + bytes(header.size - len(header.data)))
    )
    assert {name: (entry.dtype, list(entry.shape)) for name, entry in entries.items()} == tensors
    assert told == metadata
    position = len(header.data)
    for name in header.names:
        assert entries[name].begin == position
        assert position % tensor_file.itemsize(name, entries[name].dtype) == 0
        position = entries[name].end
    assert position == header.size


@given(st.binary(max_size=64))
def test_what_is_no_file_of_tensors_is_refused(data: bytes) -> None:
    for damaged in (data, struct.pack("<Q", len(data)) + data):
        try:
            entries, _ = tensor_file.decode(memoryview(damaged))
        except DamagedTensors:
            continue
        assert all(0 <= entry.begin <= entry.end <= len(damaged) for entry in entries.values())


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
        {"dtype": "F31", "shape": [2], "data_offsets": [0, 8]},
        {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "F32", "shape": [2]},
        [],
    ],
)
def test_a_damaged_header_is_refused(entry: Any) -> None:
    text = json.dumps({"a": entry}).encode()
    with pytest.raises(DamagedTensors):
        tensor_file.decode(memoryview(struct.pack("<Q", len(text)) + text + bytes(8)))


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"__metadata__": 5}', "[]"]
)
def test_a_header_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DamagedTensors, match="damaged"):
        tensor_file.decode(memoryview(struct.pack("<Q", len(text)) + text.encode()))


def test_a_type_that_is_not_known_is_named() -> None:
    text = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}})
    with pytest.raises(DamagedTensors, match="a has elements of a type that is not known: F4"):
        tensor_file.decode(memoryview(struct.pack("<Q", len(text)) + text.encode() + b"x"))


# --- putfile, getfile -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"content",
        b"",
        bytearray(b"content"),
        memoryview(b"content")[2:],
        memoryview(bytearray(8)).cast("I"),
        memoryview(bytes(0)).cast("I"),
    ],
)
def test_a_buffer_is_the_file(tmp_path: Path, data: Any) -> None:
    saved = putfile(tmp_path / "sub" / "x", data)
    saved.durable.result(WAIT_S)
    assert saved.buffered.done() and saved.path == str(tmp_path / "sub" / "x")
    assert (tmp_path / "sub" / "x").read_bytes() == bytes(data)
    assert bytes(getfile(tmp_path / "sub" / "x").to_buffer()) == bytes(data)


def test_arrays(tmp_path: Path) -> None:
    arrays = {
        "plain": numpy.arange(12.0).reshape(3, 4),
        "strided": numpy.arange(40, dtype="i2")[::3],
        "transposed": numpy.arange(6, dtype="u1").reshape(2, 3).T,
        "big": numpy.arange(5, dtype=">f4"),
        "flag": numpy.array([True, False]),
        "scalar": numpy.float32(2.5),
        "rank 0": numpy.array(7),
        "empty": numpy.empty((0, 3)),
        "complex": numpy.ones(3, "c8"),
    }
    putfile(tmp_path / "x", arrays, {"step": "7"}).durable.result(WAIT_S)
    found = getfile(tmp_path / "x")
    assert found.metadata == {"step": "7"}
    for name, array in found.to_arrays().items():
        assert array.shape == arrays[name].shape and array.dtype == arrays[name].dtype.newbyteorder(
            "<"
        )
        assert numpy.array_equal(array, arrays[name])
    found.to_array("plain")[0, 0] = 99  # a private mapping
    assert getfile(tmp_path / "x").to_array("plain")[0, 0] == 0
    putfile(tmp_path / "one", numpy.arange(3)).durable.result(WAIT_S)
    assert list(getfile(tmp_path / "one").to_array()) == [0, 1, 2]
    with pytest.raises(CheckpointError, match="one: holds no tensor 'b', but: tensor"):
        getfile(tmp_path / "one").to_array("b")


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        ("text", TypeError, "str: is neither"),
        (None, TypeError, "NoneType: is neither"),
        ({"a": 1.5}, TypeError, "a: float is no tensor"),
        ({"a": {}}, TypeError, "a: dict is no tensor"),
        ({1: numpy.ones(1)}, TypeError, "1: names"),
        ({"a": numpy.array(["x"])}, TypeError, "a: "),
        ({"\ud800": numpy.ones(1)}, ValueError, "UTF-8"),
        ({"a": numpy.ones(1, "c16")}, TypeError, "a: .*complex128"),
        ({"__metadata__": numpy.ones(1)}, ValueError, "__metadata__"),
        (memoryview(bytes(8))[::2], ValueError, "one after the other"),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    tmp_path: Path, data: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        putfile(tmp_path / "x", data)
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_file_of_tensors_has_none(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"content")
    with pytest.raises(CheckpointError, match="x: is no file of tensors"):
        getfile(tmp_path / "x").to_arrays()


def test_a_put_that_fails_says_so_twice(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    saved = putfile(tmp_path / "x", b"content")
    for future in (saved.buffered, saved.durable):
        with pytest.raises(IsADirectoryError):
            future.result(WAIT_S)
    assert list((tmp_path / "x").iterdir()) == [] and [
        entry.name for entry in tmp_path.iterdir()
    ] == ["x"]


def test_what_a_killed_put_has_left_goes(tmp_path: Path) -> None:
    (tmp_path / ".x.0123abcd.tmp").write_bytes(b"half")
    (tmp_path / ".xy.0123abcd.tmp").write_bytes(b"another's")
    putfile(tmp_path / "x", b"content").durable.result(WAIT_S)
    assert {entry.name for entry in tmp_path.iterdir()} == {"x", ".xy.0123abcd.tmp"}


def test_a_put_leaves_alone_what_others_are_writing(tmp_path: Path) -> None:
    path, fd = locks.create_beside(str(tmp_path / "x"))
    putfile(tmp_path / "x", b"content").durable.result(WAIT_S)
    assert os.path.exists(path)
    files.close_file(fd)
    putfile(tmp_path / "x", b"content").durable.result(WAIT_S)
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


@pytest.mark.sweep
def test_puts_of_one_path_follow_each_other(tmp_path: Path) -> None:
    for turn in range(20):
        saved = [
            putfile(tmp_path / "x", bytes([turn, size]) * size * 10_000) for size in (100, 1, 20, 2)
        ]
        for one in saved:
            one.durable.result(WAIT_S)
        assert (tmp_path / "x").read_bytes() == bytes([turn, 2]) * 20_000
    assert [entry.name for entry in tmp_path.iterdir()] == ["x"]


class Synced:
    """A hook that notes of which directories the names have been synced."""

    def __init__(self) -> None:
        self.directories: list[str] = []

    def before(self, op: str, path: str) -> None:
        pass

    def after(self, op: str, path: str, *args: object) -> None:
        if op == "sync_dir":
            self.directories.append(path)


def test_directories_that_are_made_are_durable(tmp_path: Path) -> None:
    synced = Synced()
    files.set_hook(synced)
    try:
        putfile(tmp_path / "a" / "b" / "x", b"content").durable.result(WAIT_S)
        assert synced.directories == [str(tmp_path / part) for part in ("", "a", "a/b")]
        synced.directories.clear()
        group = Group("step", 0, 1, directory=tmp_path / "c" / "d")
        group_putfile("x", b"content", group).durable.result(WAIT_S)
    finally:
        files.set_hook(None)
    assert synced.directories == [str(tmp_path / part) for part in ("", "c", "c/d")]


# --- futures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [asyncio.run, lambda coroutine: trio.run(lambda: coroutine)])
@pytest.mark.parametrize("comes", ["before", "after"])
def test_futures_are_awaited(run: Any, comes: str) -> None:
    async def wait(future: Future[int]) -> int:
        return await future

    good: Future[int] = Future()
    bad: Future[int] = Future()

    def settle() -> None:
        good.settle(lambda: 7)
        bad.settle(lambda: 1 // 0)

    thread = threading.Thread(target=settle)
    if comes == "before":
        settle()
        thread = threading.Thread()
    thread.start()
    assert run(wait(good)) == 7
    with pytest.raises(ZeroDivisionError):
        run(wait(bad))
    thread.join()
    assert good.result() == 7 and isinstance(bad.exception(), ZeroDivisionError)


def test_a_future_cannot_be_cancelled() -> None:
    future: Future[int] = Future()

    async def wait() -> int:
        return await future

    async def give_up() -> None:
        task = asyncio.ensure_future(wait())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(give_up())
    assert not future.cancel() and not future.done()
    future.settle(lambda: 7)
    assert future.result() == 7


# --- groups ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 4}, "rank 4 of 4"),
        ({"rank": -1}, "rank -1 of 4"),
        ({"world": 0}, "rank 0 of 0"),
        ({"name": ""}, "name"),
        ({"name": "a/b"}, "name"),
        ({"name": "a,b"}, "name"),
        ({"dedup": "4 apples"}, "not a size"),
        ({"dedup": "1KiB"}, "64KiB"),
        ({"publish": "../x"}, "no name"),
        ({"publish": ".."}, "no name"),
        ({"files_per_rank": 0}, "one file"),
        ({"timeout_s": 0}, "positive"),
        ({"job": "a,b"}, "no comma"),
        ({"job": 64 * "a"}, "63"),
        ({"grace_s": -1}, "positive"),
        ({"timeout_s": math.nan}, "positive"),
        ({"timeout_s": math.inf}, "positive"),
    ],
)
def test_bad_groups(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    given = {"name": "step", "rank": 0, "world": WORLD, "directory": tmp_path / "new", **options}
    with pytest.raises(InvalidGroup, match=message):
        Group(given.pop("name"), given.pop("rank"), given.pop("world"), **given)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", ["../x", "/etc/x", ".", ""])
def test_files_lie_in_the_group(tmp_path: Path, path: str) -> None:
    group = Group("step", 0, 1, directory=tmp_path)
    with pytest.raises(InvalidGroup, match="lies not in"):
        group_putfile(path, b"", group)
    group_putfile(tmp_path / "sub" / "x", b"content", group).durable.result(WAIT_S)
    assert bytes(group_getfile("sub/x", group).to_buffer()) == b"content"


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, "x/2"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"}, "7/1/0"),
    ],
)
def test_launchers_name_jobs(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], job: str
) -> None:
    for name in JOB_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert job_of_environment() == job


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1))
def test_what_launchers_say_is_a_name(value: str) -> None:
    with mock.patch.dict(os.environ, {"PMIX_NAMESPACE": value}):
        assert JOB_NAME.fullmatch(job_of_environment())


def test_not_on_aifs_both_futures_mean_the_file_alone(tmp_path: Path) -> None:
    """Of two ranks the second never comes."""
    group = Group("step", 0, 2, directory=tmp_path, files_per_rank=2)
    first = group_putfile("a", b"content", group)
    first.durable.result(WAIT_S)
    assert first.buffered.done() and not group.durable.done()
    group_putfile("b", b"content", group)
    group.durable.result(WAIT_S)
    assert {entry.name for entry in tmp_path.iterdir()} == {"a", "b"}


def test_not_on_aifs_nothing_is_published_by_a_group(tmp_path: Path) -> None:
    with pytest.raises(InvalidGroup, match="publish='final': .* not on AIFS.*client.checkpoint"):
        join(0, tmp_path, publish="final")


def test_a_rank_that_does_not_commit_in_time_is_named(tmp_path: Path) -> None:
    group = join(2, tmp_path, timeout_s=0.001)
    with pytest.raises(client.RanksMissing, match="rank 2 has not committed"):
        group.durable.result(WAIT_S)
    with pytest.raises(client.GroupExpired):
        group_putfile("a", b"", group)


def test_a_put_that_fails_ends_the_group_of_its_rank(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    group = Group("step", 0, 2, directory=tmp_path, files_per_rank=2)
    failed = group_putfile("taken", b"content", group)
    for future in (failed.buffered, failed.durable):
        with pytest.raises(IsADirectoryError):
            future.result(WAIT_S)
    with pytest.raises(GroupError, match="rank 0: IsADirectoryError"):
        group.durable.result(WAIT_S)


def test_a_block_that_raises_cancels(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), join(0, tmp_path) as group:
        raise ZeroDivisionError
    with pytest.raises(GroupError, match="rank 0: ZeroDivisionError"):
        group.durable.result(WAIT_S)


def test_ranks_may_be_threads(tmp_path: Path) -> None:
    def run(rank: int) -> None:
        with join(rank, tmp_path, files_per_rank=3) as group:
            for part in range(3):
                group_putfile(f"{rank}.{part}", b"content", group)

    with ThreadPoolExecutor(WORLD) as pool:
        list(pool.map(run, range(WORLD)))
    assert len(list((tmp_path / "new").iterdir())) == 3 * WORLD


def test_more_files_than_were_said(tmp_path: Path) -> None:
    group = join(0, tmp_path, files_per_rank=2)
    for name in ("a", "b"):
        group_putfile(name, b"", group)
    with pytest.raises(GroupError, match="rank 0 has committed already"):
        group_putfile("c", b"", group)
    group.cancel()
    with pytest.raises(GroupError, match="was cancelled"):
        group.durable.result(WAIT_S)


def test_a_failed_group_is_tried_again_at_once(tmp_path: Path) -> None:
    for _ in range(20):
        group = Group("step", 0, 1, directory=tmp_path, files_per_rank=2)
        group_putfile("x", bytes(1_000_000), group)
        group.cancel()
    group = Group("step", 0, 1, directory=tmp_path)
    group_putfile("x", b"content", group).durable.result(WAIT_S)


def test_what_a_rank_has_put_it_reads(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    group = Group("step", 0, 1, directory=tmp_path)
    group_putfile("x", b"new" * 100_000, group)
    assert bytes(group_getfile("x", group).to_buffer()) == b"new" * 100_000
    group.durable.result(WAIT_S)


@pytest.mark.parametrize("seconds", [0.0001, 0.25, 600.0, 30 * 86400.0, 1234567.891])
def test_the_mount_understands_all_times(seconds: float) -> None:
    assert parse_duration(duration(seconds)) == int(seconds * 1000) / 1000
