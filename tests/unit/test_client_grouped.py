"""Files that ranks save together, in a plain directory; and what tensors become in them."""

import asyncio
import json
import math
import os
import shutil
import struct
import subprocess
import sys
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
    jobs,
    locks,
    plain_group,
    putfile,
    tensor_file,
)
from aifs.client.futures import Future
from aifs.client.jobs import job_of_environment
from aifs.client.tensor_file import ALIGNMENT, Damaged
from aifs.core import files
from tests.support.group_ranks import (
    SOON_S,
    WAIT_S,
    WORLD,
    GroupContract,
    await_buffered,
    join,
    outcomes,
    save,
    start,
)

DTYPES = [dtype for dtype, _ in tensor_file._KINDS.values()]


class TestPlainDirectory(GroupContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Path:
        return tmp_path


# --- the format -----------------------------------------------------------------------------------


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
        except Damaged:
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
    with pytest.raises(Damaged):
        tensor_file.decode(memoryview(struct.pack("<Q", len(text)) + text + bytes(8)))


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"__metadata__": 5}', "[]"]
)
def test_a_header_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Damaged, match="damaged"):
        tensor_file.decode(memoryview(struct.pack("<Q", len(text)) + text.encode()))


def test_a_type_that_is_not_known_is_named() -> None:
    text = json.dumps({"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}})
    with pytest.raises(Damaged, match="a has elements of a type that is not known: F4"):
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


def test_another_number_of_ranks(tmp_path: Path) -> None:
    rest = start([0, 1, 2], save, tmp_path, {})
    await_buffered(rest)
    group = Group("step", 3, WORLD + 1, directory=tmp_path / "new", timeout_s=WAIT_S)
    with pytest.raises(InvalidGroup, match="rank 3 is of a group of 5 ranks, rank 0 of one of 4"):
        group.durable.result(WAIT_S)
    assert [outcome[0] for outcome in outcomes(rest)] == ["InvalidGroup"] * 3


@pytest.mark.parametrize(
    ("variables", "everywhere", "on_a_host"),
    [
        ({}, "", ""),
        ({"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_RESTART_COUNT": "2"}, "x", "x/2"),
        ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1", "SLURM_STEP_ID": "0"}, "7/1", "7/1/0"),
    ],
)
def test_launchers_name_jobs(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], everywhere: str, on_a_host: str
) -> None:
    for name in (*jobs._EVERYWHERE, *jobs._ON_A_HOST):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (job_of_environment(False), job_of_environment(True)) == (everywhere, on_a_host)


@given(st.text(st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]), min_size=1))
def test_what_launchers_say_is_a_name(value: str) -> None:
    with mock.patch.dict(os.environ, {"PMIX_NAMESPACE": value}):
        assert jobs.NAME.fullmatch(job_of_environment(True))


def test_a_leader_on_another_host_may_be_of_a_killed_job(tmp_path: Path) -> None:
    """Nobody can tell from here whether its process lives."""

    def lead(rank: int, process: Any) -> None:
        files.boot_id = lambda: "elsewhere"
        group = Group("step", rank, 2, directory=tmp_path, job="old")
        group_putfile(str(rank), b"old", group).buffered.result(WAIT_S)
        process.reach("committed")

    (old,) = start([0], lead)
    old.await_phase("committed")
    old.kill()
    old.end()
    with pytest.raises(client.RanksMissing, match="rank 1 is of job 'new', rank 0 of job 'old'"):
        Group("step", 1, 2, directory=tmp_path, job="new", timeout_s=SOON_S).durable.result(WAIT_S)
    groups = [Group("step", rank, 2, directory=tmp_path, job="new") for rank in (1, 0)]
    for group, rank in zip(groups, (1, 0), strict=True):
        group_putfile(str(rank), b"new", group)
    groups[0].durable.result(WAIT_S)
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes() == b"new"


def test_a_rank_without_leader_expires(tmp_path: Path) -> None:
    with pytest.raises(client.RanksMissing, match="rank 0 has not begun"):
        join(1, tmp_path, timeout_s=SOON_S).durable.result(WAIT_S)


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


def test_a_published_group_is_a_checkpoint(tmp_path: Path) -> None:
    group = Group("step", 0, 1, directory=tmp_path / ".new", publish="step-7")
    group_putfile("x", b"content", group).durable.result(WAIT_S)
    assert group.directory == str(tmp_path / "step-7") == str(client.latest(tmp_path))
    assert bytes(group_getfile("x", group).to_buffer()) == b"content"


def test_what_a_killed_rank_left_is_not_published(tmp_path: Path) -> None:
    with client.checkpoint(tmp_path / "step-7") as directory:
        group = Group("step", 0, 1, directory=directory)
        group_putfile("x", b"content", group).durable.result(WAIT_S)
        (directory / ".aifs-group.step").mkdir()
        (directory / ".aifs-group.step" / "rank.3").touch()
    assert {entry.name for entry in (tmp_path / "step-7").iterdir()} == {"x", ".aifs-manifest.json"}
    assert client.verify(tmp_path / "step-7") == []


def test_a_group_is_not_taken_for_the_one_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is in the next group of this name and directory before rank 1 has seen how the last
    one ended.
    """
    may_look, is_waiting = threading.Event(), threading.Event()
    may_look.set()
    look = plain_group.PlainGroup._poll

    def look_when_told(self: Any) -> Any:
        for is_late in look(self):
            if self._options.rank == 1 and not may_look.is_set():
                is_waiting.set()
                may_look.wait()
            yield is_late

    monkeypatch.setattr(plain_group.PlainGroup, "_poll", look_when_told)
    first = [Group("step", rank, 2, directory=tmp_path, timeout_s=WAIT_S) for rank in range(2)]
    group_putfile("1", b"first", first[1]).buffered.result(WAIT_S)
    may_look.clear()
    assert is_waiting.wait(WAIT_S)
    group_putfile("0", b"first", first[0]).durable.result(WAIT_S)
    second = Group("step", 0, 2, directory=tmp_path, timeout_s=WAIT_S)
    group_putfile("0", b"second", second).buffered.result(WAIT_S)
    may_look.set()
    first[1].durable.result(WAIT_S)
    assert not second.durable.done()
    late = Group("step", 1, 2, directory=tmp_path, timeout_s=WAIT_S)
    group_putfile("1", b"second", late).durable.result(WAIT_S)
    second.durable.result(WAIT_S)
    assert {entry.read_bytes() for entry in tmp_path.iterdir() if entry.is_file()} == {b"second"}


def test_a_leader_that_is_about_to_begin_is_not_taken_for_that_of_the_last_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has locked the file that was left, but rank 1 has read that before."""

    def leave(rank: int, process: Any) -> None:
        Group("step", rank, 2, directory=tmp_path, job="old")
        os._exit(0)

    start([0], leave)[0].end()
    has_read, may_go_on, read = (
        threading.Event(),
        threading.Event(),
        plain_group.PlainGroup._read_marks,
    )

    def read_and_wait(self: Any) -> Any:
        marks = read(self)
        if self._options.rank == 1 and not has_read.is_set():
            assert marks[0]["job"] == "old"
            has_read.set()
            may_go_on.wait(WAIT_S)
        return marks

    monkeypatch.setattr(plain_group.PlainGroup, "_read_marks", read_and_wait)
    one = Group("step", 1, 2, directory=tmp_path, job="new", timeout_s=WAIT_S)
    assert has_read.wait(WAIT_S)
    zero = Group("step", 0, 2, directory=tmp_path, job="new", timeout_s=WAIT_S)
    may_go_on.set()
    for rank, group in enumerate((zero, one)):
        group_putfile(str(rank), b"new", group)
    zero.durable.result(WAIT_S)
    one.durable.result(WAIT_S)


def test_published_groups_overlap(tmp_path: Path) -> None:
    """The next step begins before the last one is durable."""
    groups = [
        [
            Group("step", rank, 2, directory=tmp_path / f"{step}.tmp", publish=str(step))
            for rank in range(2)
        ]
        for step in range(2)
    ]
    for rank in range(2):
        for step in range(2):
            group_putfile(str(rank), b"content", groups[step][rank])
    for group in groups[0] + groups[1]:
        group.durable.result(WAIT_S)
    assert {entry.name for entry in tmp_path.iterdir()} == {"0", "1"}


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


def test_a_directory_that_is_removed_as_the_group_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def close(self: Any) -> None:
        self._file.let_go()
        shutil.rmtree(self._place)
        raise FileNotFoundError(self._place)

    monkeypatch.setattr(plain_group.PlainGroup, "close", close)
    group = Group("step", 0, 1, directory=tmp_path)
    group_putfile("x", b"content", group).durable.result(WAIT_S)


def test_ranks_that_end_when_they_have_committed(tmp_path: Path) -> None:
    """Nobody is left to wait for the others: the last one publishes."""

    def commit(rank: int, process: Any) -> None:
        group = Group(
            "step", rank, 2, directory=tmp_path / "new", publish="final", timeout_s=WAIT_S
        )
        while not group.identity:
            pass
        process.reach("joined")
        group_putfile(str(rank), b"content", group).buffered.result(WAIT_S)

    ranks = start(range(2), commit)
    for process in ranks:
        process.await_phase("joined")
    for process in ranks:
        process.go_on()
        process.outcome()
    assert {entry.name for entry in (tmp_path / "final").iterdir()} == {
        "0",
        "1",
        ".aifs-manifest.json",
    }


ENDS = """
import sys, threading
from aifs.client import Group, group_putfile

group = Group("step", 0, 2, directory=sys.argv[1])
saved = group_putfile("0", b"content", group)

def wait():
    threading.main_thread().join()
    print("ended", flush=True)
    saved.durable.result()
    print("durable", flush=True)

threading.Thread(target=wait).start()
"""


def test_who_waits_while_the_process_ends_is_told(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ENDS, str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ended\n"
            group_putfile("1", b"content", Group("step", 1, 2, directory=tmp_path)).durable.result(
                WAIT_S
            )
            assert process.communicate(timeout=WAIT_S)[0] == "durable\n"
        finally:
            process.kill()
