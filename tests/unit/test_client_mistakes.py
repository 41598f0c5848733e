"""Checkpoints, where what is asked for, what is there or the clock is wrong: nothing is lost by
it.
"""

import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs import client
from aifs.client import CheckpointError
from aifs.client.checkpoints import manifest
from tests.support.users import in_process


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory that every user can reach and write to."""
    with tempfile.TemporaryDirectory(prefix="aifs-client-") as name:
        os.chmod(name, 0o777)
        yield Path(name)


def write(path: Path, content: str = "content") -> Path:
    path.mkdir(parents=True)
    (path / "model.pt").write_text(content)
    return path


def save(path: Path, **options: object) -> None:
    with client.checkpoint(path, **options) as tmp:
        (tmp / "model.pt").write_text(path.name)


@pytest.mark.parametrize("link", [False, True])
def test_a_checkpoint_that_replaces_itself_is_not_removed(tmp_path: Path, link: bool) -> None:
    run = tmp_path / "run"
    step = write(run / "step-1")
    (tmp_path / "other").symlink_to("run")
    tmp = tmp_path / "other" / "step-1" if link else step
    with pytest.raises(FileExistsError):
        client.publish(tmp, step)
    client.publish(tmp, step, replace=True, latest="latest")
    assert client.verify(run / "latest") == [] and client.latest(run) == step


def test_replacing_a_symlink_does_not_empty_what_it_leads_to(tmp_path: Path) -> None:
    step, tmp = write(tmp_path / "step-1"), write(tmp_path / "tmp")
    (tmp_path / "best").symlink_to("step-1")
    with pytest.raises(CheckpointError, match="best: is no directory"):
        client.publish(tmp, tmp_path / "best", replace=True)
    with pytest.raises(CheckpointError, match="best: is no directory"):
        save(tmp_path / "best", replace=True, latest=None)
    assert (step / "model.pt").read_text() == "content"
    assert sorted(os.listdir(tmp_path)) == ["best", "step-1", "tmp"]


def test_a_symlink_is_not_published_in_the_place_of_its_directory(tmp_path: Path) -> None:
    write(tmp_path / "elsewhere" / "tmp")
    (tmp_path / "link").symlink_to("elsewhere/tmp")
    with pytest.raises(CheckpointError, match="link: is not a directory"):
        client.publish(tmp_path / "link", tmp_path / "step-1")


def test_directories_that_lie_in_one_another_cannot_change_places(tmp_path: Path) -> None:
    tmp = write(tmp_path / "step-1" / "sub" / "tmp")
    for final in (tmp / "step-2", tmp / "sub" / "step-2"):
        with pytest.raises(CheckpointError, match="cannot be moved into itself"):
            client.publish(tmp, final)
    with pytest.raises(CheckpointError, match="cannot take its place"):
        client.publish(tmp, tmp_path / "step-1", replace=True)
    assert os.listdir(tmp) == ["model.pt"]


def test_a_directory_with_the_name_of_a_pointer_is_told_before_the_save(tmp_path: Path) -> None:
    write(tmp_path / "step-1")
    for pointers in ({"latest": "step-1"}, {"latest": None, "tracker": "step-1"}):
        with pytest.raises(CheckpointError, match="cannot be a pointer"):
            save(tmp_path / "step-2", **pointers)
    assert os.listdir(tmp_path) == ["step-1"]


def test_a_directory_that_may_not_be_read_does_not_hide_the_checkpoints(shared: Path) -> None:
    in_process(lambda: save(shared / "step-1"), uid=1000)
    for name in ("lost+found", "step-2"):
        (shared / name).mkdir(0o700)
    assert in_process(lambda: client.latest(shared), uid=1000) == shared / "step-1"
    found = in_process(lambda: client.list_checkpoints(shared), uid=1000)
    assert {one.path.name: one.state for one in found} == {
        "step-1": "complete",
        "step-2": "damaged",
    }


def test_what_cannot_be_removed_does_not_fail_the_save(
    shared: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(shared / "step-1")
    os.chmod(shared, 0o1777)  # sticky: root's directory is root's to remove
    with caplog.at_level(logging.WARNING):
        in_process(lambda: save(shared / "step-2", keep="last=1"), uid=1000)
    assert client.latest(shared) == shared / "step-2" and (shared / "step-1").exists()


@pytest.mark.sweep
def test_a_clock_that_goes_back_does_not_make_a_checkpoint_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    save(tmp_path / "step-1")
    for step, hours in ((2, 1), (3, 24)):
        monkeypatch.setattr(time, "time", lambda hours=hours: now - hours * 3600)
        save(tmp_path / f"step-{step}", keep="last=2")
    assert client.latest(tmp_path) == tmp_path / "step-3"
    assert [one.step for one in client.list_checkpoints(tmp_path)] == [2, 3]


def test_attributes_that_somebody_has_set_elsewhere_say_nothing(tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    tmp = write(tmp_path / "tmp")
    try:
        for path in (tmp_path / "step-1", tmp):
            os.setxattr(path, "user.aifs.pending", b"ranks=4")
    except OSError:
        pytest.skip("no extended attributes here")
    assert [one.state for one in client.list_checkpoints(tmp_path, pending=True)] == ["complete"]
    client.publish(tmp, tmp_path / "step-2")
    assert client.latest(tmp_path) == tmp_path / "step-2"


@pytest.mark.parametrize(
    "change",
    [
        {"time": "now"},
        {"time": None},
        {"time": 1e999},
        {"time": 1e300},
        {"step": "one"},
        {"step": [1]},
        {"files": []},
    ],
)
def test_a_manifest_of_nonsense_is_a_damaged_one(change: dict[str, object], tmp_path: Path) -> None:
    save(tmp_path / "step-1")
    save(tmp_path / "step-2")
    path = tmp_path / "step-2" / manifest.NAME
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert [one.state for one in client.list_checkpoints(tmp_path)].count("damaged") == 1
    assert client.latest(tmp_path) == tmp_path / "step-1"
    path.write_text("[" * 100_000)
    assert client.latest(tmp_path) == tmp_path / "step-1"


def test_a_directory_that_has_taken_the_place_of_ours_is_not_published(tmp_path: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="another process"),
        client.checkpoint(tmp_path / "step-1") as tmp,
    ):
        (tmp / "model.pt").write_text("ours")
        tmp.rename(tmp_path / "ours")
        write(tmp, "half of another's")
    assert client.latest(tmp_path) is None and (tmp / "model.pt").exists()


@pytest.mark.parametrize("kind", ["fifo", "symlink", "sparse"])
def test_a_manifest_that_never_ends_is_a_damaged_one(kind: str, tmp_path: Path) -> None:
    """It may be anybody's: a program that listed checkpoints waited for ever, or ran out of
    memory."""
    path = tmp_path / manifest.NAME
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "symlink":
        path.symlink_to("/dev/zero")
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    with pytest.raises(CheckpointError, match=manifest.NAME):
        manifest.read(str(tmp_path))


def test_an_address_is_no_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="s3://bucket/step-1: is not the path"):
        save("s3://bucket/step-1")
    assert list(tmp_path.iterdir()) == []
