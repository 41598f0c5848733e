"""SIGKILL of a process that saves a checkpoint, at every operation on files that it does.

Whatever was there stays whole, what is found is the old or the new checkpoint, and the next save
succeeds, with nothing of the crashed one in it or beside it.
"""

import os
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from aifs import client
from aifs.client.checkpoints import manifest
from aifs.core import files

OPERATIONS_MAX = 400


class Killer:
    """A hook that ends the process at its n-th operation on files: before it is done, or when it
    has been done."""

    def __init__(self, at: int) -> None:
        self._left = at

    def before(self, op: str, path: str) -> None:
        self._count()

    def after(self, op: str, path: str, *args: object) -> None:
        self._count()

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            os.kill(os.getpid(), signal.SIGKILL)


def crash(function: Callable[[], None], at: int) -> bool:
    """Run ``function`` in a process that is killed at its operation ``at``; whether it was, or has
    ended before."""
    pid = os.fork()
    if pid == 0:
        files.set_hook(Killer(at))
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"it failed at operation {at}"
    return os.WIFSIGNALED(status)


def save(path: Path, content: str, parts: int = 3, **options: object) -> None:
    with client.checkpoint(path, tracker="tracker", **options) as tmp:
        (tmp / "sub").mkdir()
        for part in range(parts):
            (tmp / "sub" / f"part-{part}").write_text(content)


def read(path: Path) -> str:
    """The content that a whole checkpoint was saved with."""
    assert client.verify(path) == []
    parts = {part.name: part.read_text() for part in (path / "sub").iterdir()}
    assert parts.keys() == {"part-0", "part-1", "part-2"}
    assert len(set(parts.values())) == 1
    return parts["part-0"]


def check(run: Path) -> list[str]:
    """The names of the published checkpoints, all whole; the pointers lead to one of them, in the
    order of the publish."""
    found = client.list_checkpoints(run)
    assert {one.state for one in found} == {"complete"}
    for one in found:
        read(one.path)
    assert client.latest(run) == found[-1].path
    assert client.verify(run / "latest") == []
    told = os.readlink(run / "latest"), f"step-{(run / 'tracker').read_text()}"
    names = [one.path.name for one in found]
    assert names.index(told[0]) >= names.index(told[1])
    return names


def sweep(
    tmp_path: Path, function: Callable[[Path], None], prepare: Callable[[Path], None], stride: int
) -> list[tuple[int, Path]]:
    """For every operation of ``function``, or one in ``stride``: a directory that was prepared, and
    in which it was killed there."""
    found = []
    for at in range(0, OPERATIONS_MAX, stride):
        run = tmp_path / str(at)
        run.mkdir()
        prepare(run)
        killed = crash(lambda run=run: function(run), at)
        found.append((at, run))
        if not killed:
            return found
    raise AssertionError(f"more than {OPERATIONS_MAX} operations")


STRIDES = pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.long)])


@STRIDES
def test_a_save(tmp_path: Path, stride: int) -> None:
    outcomes = set()
    runs = sweep(
        tmp_path,
        lambda run: save(run / "step-2", "new"),
        lambda run: save(run / "step-1", "old"),
        stride,
    )
    for _, run in runs:
        names = check(run)
        outcomes.add((*names, os.readlink(run / "latest"), (run / "tracker").read_text()))
        assert read(run / "step-1") == "old"
        if "step-2" in names:
            assert read(run / "step-2") == "new"
        else:
            save(run / "step-2", "again")
            assert read(run / "step-2") == "again"
        save(run / "step-3", "third")
        left = {entry.name for entry in run.iterdir() if not entry.name.endswith(".tmp")}
        assert left == {"step-1", "step-2", "step-3", "latest", "tracker"}
        assert os.readlink(run / "latest") == "step-3" and (run / "tracker").read_text() == "3"
    possible = {
        ("step-1", "step-1", "1"),
        ("step-1", "step-2", "step-1", "1"),
        ("step-1", "step-2", "step-2", "1"),
        ("step-1", "step-2", "step-2", "2"),
    }
    assert outcomes == possible if stride == 1 else outcomes <= possible


@pytest.mark.sweep
@STRIDES
def test_a_replacement(tmp_path: Path, stride: int) -> None:
    outcomes = set()
    runs = sweep(
        tmp_path,
        lambda run: save(run / "step-1", "new", replace=True),
        lambda run: save(run / "step-1", "old"),
        stride,
    )
    for _, run in runs:
        assert check(run) == ["step-1"]
        outcomes.add(read(run / "step-1"))
        save(run / "step-1", "again", replace=True)
        assert read(run / "step-1") == "again"
        assert {entry.name for entry in run.iterdir() if not entry.name.endswith(".tmp")} == {
            "step-1",
            "latest",
            "tracker",
        }
    assert outcomes == {"old", "new"}


@pytest.mark.sweep
@STRIDES
def test_a_removal(tmp_path: Path, stride: int) -> None:
    def prepare(run: Path) -> None:
        save(run / "step-1", "old")
        save(run / "step-2", "new")

    outcomes = set()
    for _, run in sweep(tmp_path, lambda run: client.remove(run / "step-1"), prepare, stride):
        outcomes.add(tuple(check(run)))
        if (run / "step-1").exists():
            client.remove(run / "step-1")
        client.keep(run, "last=1")
        client.remove(run / "step-2")
        assert {entry.name for entry in run.iterdir()} == {"latest", "tracker"}
    assert outcomes == {("step-1", "step-2"), ("step-2",)}


def _rank(run: Path, rank: int, timeout_s: float) -> None:
    with client.checkpoint(
        run / "step-2", ranks=2, rank=rank, tracker="tracker", timeout_s=timeout_s
    ) as tmp:
        os.makedirs(tmp / "sub", exist_ok=True)
        for part in (0, 1) if rank == 0 else (2,):
            (tmp / "sub" / f"part-{part}").write_text("new")


@STRIDES
@pytest.mark.sweep("victim")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_save_of_two_ranks(tmp_path: Path, victim: int, stride: int) -> None:
    """One is killed at each of its operations, is started anew, and both end with the checkpoint;
    or it was published."""
    for at in range(0, OPERATIONS_MAX, stride * 2 - 1):
        run = tmp_path / str(at)
        run.mkdir()
        save(run / "step-1", "old")
        other = os.fork()
        if other == 0:
            try:
                _rank(run, 1 - victim, 20.0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        killed = crash(lambda run=run: _rank(run, victim, 20.0), at)
        if killed:
            assert read(run / "step-1") == "old"
            assert not (run / "step-2").exists() or read(run / "step-2") == "new"
            with suppress(FileExistsError):
                _rank(run, victim, 20.0)
        _, status = os.waitpid(other, 0)
        assert status == 0, f"the rank that lived failed at {at}"
        assert check(run) == ["step-1", "step-2"] and read(run / "step-2") == "new"
        left = {entry.name for entry in run.iterdir() if not entry.name.endswith(".tmp")}
        assert left - ({".step-2.ranks"} if victim == 0 else set()) == {
            "step-1",
            "step-2",
            "latest",
            "tracker",
        }
        if not killed:
            break
    else:
        raise AssertionError
    assert manifest.read(str(run / "step-2")).ranks == 2
