"""``aifs checkpoint`` in a plain directory."""

import json
import os
from pathlib import Path

import pytest

from aifs.cli.main import main


def checkpoint(*words: object) -> int:
    return main(["checkpoint", *map(str, words)])


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with checkpoints of step 1 and 2."""
    for step in (1, 2):
        write(tmp_path / "tmp")
        final = tmp_path / f"step-{step}"
        assert checkpoint("publish", tmp_path / "tmp", final, "--latest", "latest") == 0
    return tmp_path


def write(directory: Path) -> None:
    directory.mkdir()
    for rank in range(2):
        (directory / f"shard-{rank}").write_bytes(b"x" * 1024)


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    return (captured.out + captured.err).splitlines()


def test_publish_says_what_it_did_or_why_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tmp, final = str(tmp_path / "tmp"), str(tmp_path / "best")
    write(tmp_path / "tmp")
    assert checkpoint("publish", tmp, final, "--ranks", "2") == 8
    assert checkpoint("publish", tmp, final, "--tracker", "it") == 8
    assert checkpoint("publish", tmp, final, "--step", "7", "--tracker", "it", "--no-hash") == 0
    assert checkpoint("publish", tmp, final) == 8
    write(tmp_path / "tmp")
    assert checkpoint("publish", tmp, final) == 1
    assert checkpoint("publish", tmp, final, "--replace") == 0
    assert checkpoint("publish", "", final) == 2
    assert said(capsys) == [
        f"published {final}: 2 files, 2.00 KiB",
        f"published {final}: 2 files, 2.00 KiB",
        f"aifs: {tmp}: ranks 0, 1 did not commit",
        f"aifs: {final}: its step is not known, so the tracker file it cannot hold it",
        f"aifs: {tmp}: there is no such directory",
        f"aifs: {final}: a checkpoint of this name is there already",
        "aifs: Invalid value for 'TMP': it is empty; was a variable not set?",
    ]
    assert (tmp_path / "it").read_text() == "7"


def test_ls_as_a_table_and_as_json(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step-1/shard-0").unlink()
    (run / ".step-3.pending").mkdir()
    capsys.readouterr()
    assert checkpoint("ls", run) == 0
    head, *rows = said(capsys)
    assert head.split() == ["checkpoint", "step", "published", "size", "files", "state", "problem"]
    assert [(row.split()[0], row.split()[-4:]) for row in rows] == [
        ("step-1", ["damaged", "shard-0:", "is", "missing"]),
        ("step-2", ["2.00", "KiB", "2", "complete"]),
    ]
    assert checkpoint("ls", run, "--json", "--pending") == 0
    found = json.loads("\n".join(said(capsys)))
    assert [one["state"] for one in found] == ["damaged", "complete", "pending"]
    assert found[1] == {
        "path": str(run / "step-2"),
        "state": "complete",
        "step": 2,
        "time": found[1]["time"],
        "bytes": 2048,
        "files": 2,
        "problem": "",
        "shown": True,
    }


def test_latest(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "logs/step-7").mkdir(parents=True)
    (run / "logs/step-7/model.pt").touch()
    capsys.readouterr()
    assert checkpoint("latest", run) == 0
    assert checkpoint("latest", "--any", run / "logs") == 0
    assert checkpoint("latest", run / "step-1") == 1
    assert checkpoint("latest", run / "logs") == 1
    assert said(capsys) == [
        str(run / "step-2"),
        str(run / "logs/step-7"),
        f"aifs: {run}/step-1: there is no complete checkpoint here",
        f"aifs: {run}/logs: there is no complete checkpoint here"
        " (--any: also what may not be whole)",
    ]


def test_verify_names_the_bad_file(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "step-1/shard-1").write_bytes(b"y" * 1024)
    (run / "by-hand-3").mkdir()
    capsys.readouterr()
    assert checkpoint("verify", run / "latest") == 0
    assert said(capsys) == [f"{run}/latest: 2 files, 2.00 KiB, as they were saved"]
    assert checkpoint("verify", "--all", run) == 1
    assert said(capsys) == [
        f"{run}/step-2: 2 files, 2.00 KiB, as they were saved",
        f"aifs: {run}/step-1: shard-1: its bytes are not those that were saved",
        "aifs: not verified, since they have no manifest: 1",
    ]
    assert checkpoint("verify", run / "by-hand-3") == 8
    assert said(capsys) == [
        f"aifs: {run}/by-hand-3: has no manifest, so nothing says what belongs to it"
    ]


def test_rm_removes_checkpoints_alone_and_asks(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run / "logs").mkdir()
    assert checkpoint("rm", "--yes", run / "step-1", run / "logs") == 8
    assert (run / "step-1").exists()
    for answer, left in (("n", True), ("y", False)):
        monkeypatch.setattr("click.termui.visible_prompt_func", lambda _, answer=answer: answer)
        assert checkpoint("rm", f"{run}/step-1/") == (1 if left else 0)
        assert (run / "step-1").exists() == left
    assert os.listdir(run / "logs") == []
    assert checkpoint("rm", "--yes", run / "latest") == 8


def test_keep_prints_what_goes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    for words, left in ((["--dry-run"], 2), ([], 1)):
        assert checkpoint("keep", run, "--last", "1", *words) == 0
        assert said(capsys) == [str(run / "step-1")]
        assert len(list(run.glob("step-*"))) == left
    assert checkpoint("keep", run, "--bytes", "1TiB", "--age", "7d", "--every", "10") == 0
    assert said(capsys) == []
    assert checkpoint("keep", run) == 2
