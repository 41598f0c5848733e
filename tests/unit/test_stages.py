"""Stages that ranks note, and the report on them (client/startup/stages)."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.client import startup
from aifs.client.startup import stages
from tests.support.mounts import aifs


def note(directory: Path, host: str, *events: tuple[str, str, float], rank: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / f"{host}.jsonl").open("a") as file:
        for event, stage, at_s in events:
            line = {"event": event, "stage": stage, "rank": rank, "at_s": at_s}
            file.write(json.dumps(line) + "\n")


def test_who_was_slowest(tmp_path: Path) -> None:
    run = tmp_path / "7"
    for number, took_s in enumerate((2.0, 2.0, 5.0)):
        events = [("begin", "import", 10.0), ("end", "import", 10.0 + took_s)]
        note(run, f"host{number}", *events)
    note(run, "host0", ("begin", "load", 20.0), ("end", "load", 21.0), rank=1)
    note(run, "host1", ("begin", "load", 20.0))
    (run / "host3.jsonl").write_text('{"event": "begin", "sta')
    name, found = startup.report(str(tmp_path))
    assert name == "7"
    assert found == [
        startup.StageReport("import", 3, 2.0, 5.0, "host2 rank 0", {}, ()),
        startup.StageReport("load", 1, 1.0, 1.0, "host0 rank 1", {}, ("host1 rank 0",)),
    ]
    assert found[0].ratio == 2.5


def test_what_others_have_written_is_left_out(tmp_path: Path) -> None:
    """The files may be anybody's: nothing in them fails a report, or changes a terminal."""
    event = {"event": "begin", "stage": "a\x1b[2Jb\ud800", "rank": "\n0", "at_s": 1}
    end = event | {"event": "end", "at_s": 2, "spent_s": {"data\x07": 1}}
    foreign: list[object] = [[], 1, None, {}, event | {"at_s": 1e300}, event | {"rank": {}}]
    foreign.append(event | {"at_s": float("nan")})
    foreign += [event | {"at_s": 10**400}, end | {"spent_s": {"x": "y"}}, end | {"spent_s": [1]}]
    lines = [*map(json.dumps, [*foreign[:-3], event, *foreign[-3:], end]), "[" * 100_000, "\xff"]
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "h.jsonl").write_text("\n".join(lines), encoding="latin-1")
    _, spans = startup.spans(str(tmp_path))
    name, who = "a\ufffd[2Jb\ufffd", "h rank \ufffd0"
    assert [span for span in spans if "{}" not in span.who] == [
        startup.StageSpan(name, who, 1.0, 2.0, {"data\ufffd": 1.0})
    ]


def test_how_the_seconds_were_spent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stages.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(stages.RUN, "a")
    with startup.stage("busy"):
        began_s = time.process_time()
        while time.process_time() < began_s + 0.1:
            pass
        subprocess.run([sys.executable, "-c", "sum(range(3_000_000))"], check=True)
    _, (found,) = startup.report(str(tmp_path))
    assert found.spent_s["processor"] > 0.1 and [*found.spent_s] == ["processor"]
    spent_s = {"journal": 0.01, "processor": 1.0, "data server 2": 2.5}
    assert (
        stages.describe_spent(4.0, spent_s) == "data server 2 2.50 s, processor 1.00 s, else 0.50 s"
    )
    assert stages.describe_spent(3.5, spent_s) == "data server 2 2.50 s, processor 1.00 s"
    assert stages.describe_spent(3.5, {}) == ""


def test_stages_are_noted_where_the_job_has_its_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with startup.stage("nowhere"):
        pass
    monkeypatch.setenv(stages.DIRECTORY, str(tmp_path))
    monkeypatch.setenv(stages.RUN, "a")
    monkeypatch.setenv("RANK", "3")
    with startup.stage("first"):
        pass
    with pytest.raises(ZeroDivisionError), startup.stage("second"):
        _ = 1 / 0
    run, found = startup.report(str(tmp_path))
    assert run == "a"
    assert [(each.stage, each.ranks, each.unfinished) for each in found] == [
        ("first", 1, ()),
        ("second", 1, ()),
    ]
    assert found[0].slowest.endswith(" rank 3")
    monkeypatch.setenv(stages.DIRECTORY, str(tmp_path / "a" / "none.jsonl" / "x"))
    (tmp_path / "a" / "none.jsonl").touch()
    with startup.stage("no place for it"):
        pass


@pytest.mark.sweep
def test_the_command_reports_what_its_job_has_noted(tmp_path: Path) -> None:
    script = "from aifs.client import startup\nwith startup.stage('import'): pass"
    words = ("start", "run", "--job", "job", "--run", "1", "--dir", tmp_path)
    done = aifs(*words, "--", sys.executable, "-c", script)
    assert "not on an AIFS" in done.stderr
    table = aifs("start", "report", "job", "--dir", tmp_path).stdout.splitlines()
    assert table[1].split()[:2] == ["import", "1"]
    told = json.loads(aifs("start", "report", "job", "--dir", tmp_path, "--json").stdout)
    assert told["run"] == "1" and told["stages"][0]["stage"] == "import"
    done = aifs("start", "report", "other", "--dir", tmp_path, check=False)
    assert done.returncode == 1 and "no start of this job has noted stages" in done.stderr


@pytest.mark.parametrize("planted", ["job", "run", "file", "link"])
def test_no_name_of_somebody_else_is_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Below a directory that all may write to, a symlink of another user was followed."""
    elsewhere, job = tmp_path / "elsewhere", tmp_path / "job"
    file = f"{os.uname().nodename}.jsonl"
    victim = elsewhere / file if planted == "run" else elsewhere / "a" / file
    victim.parent.mkdir(parents=True)
    victim.write_text("precious\n")
    if planted == "job":
        job.symlink_to(elsewhere)
    else:
        job.mkdir()
    if planted == "run":
        (job / "a").symlink_to(elsewhere)
    elif planted != "job":
        (job / "a").mkdir()
        plant = os.symlink if planted == "file" else os.link
        plant(victim, job / "a" / file)
    monkeypatch.setenv(stages.DIRECTORY, str(job))
    monkeypatch.setenv(stages.RUN, "a")
    with startup.stage("load"):
        pass
    assert victim.read_text() == "precious\n"


def test_a_start_that_goes_while_the_newest_is_sought_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note(tmp_path / "7", "host", ("begin", "load", 1.0), ("end", "load", 2.0))
    (tmp_path / "8").mkdir()

    @contextmanager
    def scandir(path: str) -> Iterator[list[os.DirEntry[str]]]:
        with scan(path) as entries:
            found = [*entries]
        (tmp_path / "8").rmdir()
        yield found

    scan = os.scandir
    monkeypatch.setattr(os, "scandir", scandir)
    assert startup.spans(str(tmp_path))[0] == "7"


def test_events_that_never_end_are_left_out(tmp_path: Path) -> None:
    note(tmp_path / "7", "host", ("begin", "load", 1.0), ("end", "load", 2.0))
    os.mkfifo(tmp_path / "7" / "fifo.jsonl")
    (tmp_path / "7" / "big.jsonl").touch()
    os.truncate(tmp_path / "7" / "big.jsonl", 1 << 40)
    assert [span.who for span in startup.spans(str(tmp_path))[1]] == ["host rank 0"]
