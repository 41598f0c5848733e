"""Marks in the output of a command (client/startup/marks), and that the output is as it was."""

import fcntl
import json
import os
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.client.startup.marks import Marks
from tests.support.mounts import ROOT, aifs

MARKED = (
    b"AIFS-STAGE begin a b\nx AIFS-STAGE begin no\n\x00\xff\nAIFS-STAGE end a b\r\n"
    b"AIFS-STAGE begin " + b"n" * 600 + b"\nAIFS-STAGE begin \xff\nAIFS-STAGE begin\n"
    b"AIFS-STAGE  begin no\nAIFS-STAGE stop no\nAIFS-STAGE begin \xc3\xa9\nAIFS-STAGE end half"
)
BACKGROUND = "(while kill -0 $$ 2>/dev/null; do :; done; echo late) & echo soon"
FOUND = [("begin", "a b"), ("end", "a b"), ("begin", "é")]


@given(st.lists(st.integers(0, len(MARKED)), max_size=20))
def test_marks_are_found_however_the_output_is_cut(cuts: list[int]) -> None:
    marks, found = Marks(), []
    places = [0, *sorted(cuts), len(MARKED)]
    for start, end in zip(places, places[1:], strict=False):
        found += marks.found_in(MARKED[start:end])
    assert found == FOUND
    assert [*marks.found_in(b"\n")] == [("end", "half")]


def test_a_line_without_end_takes_no_memory() -> None:
    marks = Marks()
    for _ in range(100):
        assert not [*marks.found_in(b"AIFS-STAGE begin x" * 100)]
    assert len(marks.line) < 1000


def started(top: Path, *command: str) -> list[str]:
    words = ["start", "run", "--job", "job", "--run", "1", "--dir", str(top), "--marks", "--"]
    return [sys.executable, "-m", "aifs.cli.main", *words, *command]


def stages(top: Path) -> list[tuple[str, int]]:
    told = json.loads(aifs("start", "report", "job", "--dir", top, "--json").stdout)
    return [(stage["stage"], stage["ranks"]) for stage in told["stages"]]


def test_marks_of_the_command_and_its_children_are_stages(tmp_path: Path) -> None:
    busy = f"{sys.executable} -c 'import time\nwhile time.process_time() < 0.2: pass'"
    script = f"echo AIFS-STAGE begin data; {busy}; sh -c 'echo AIFS-STAGE end data'; exit 3"
    done = aifs(*started(tmp_path, "sh", "-c", script)[3:], check=False)
    assert done.returncode == 3
    assert done.stdout == "AIFS-STAGE begin data\nAIFS-STAGE end data\n"
    assert stages(tmp_path) == [("data", 1)]
    begin, end = next((tmp_path / "job" / "1").iterdir()).read_text().splitlines()
    assert json.loads(begin)["event"] == "begin"
    assert 0.1 < json.loads(end)["spent_s"]["processor"] < 10


@pytest.mark.sweep
def test_the_output_comes_at_once_and_as_it_is(tmp_path: Path) -> None:
    """The command waits for an answer to what it has printed, without end of line."""
    script = (
        "import os, sys; os.write(1, b'\\xff\\x00\\r?'); sys.stdin.readline();"
        "os.write(1, MARKED * 2000)"
    ).replace("MARKED", repr(MARKED))
    command = started(tmp_path, sys.executable, "-c", script)
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    ) as running:
        assert running.stdout is not None and running.stdin is not None
        assert running.stdout.read(4) == b"\xff\x00\r?"
        running.stdin.write(b"\n")
        left = b""
        while piece := running.stdout.read(1 << 16):
            left += piece
    assert running.returncode == 0 and left == MARKED * 2000


def test_on_a_terminal_the_command_has_one_too(tmp_path: Path) -> None:
    script = "import os; print(os.isatty(1), *os.get_terminal_size(1)); input(); print(end='\\t!')"
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 31, 97, 0, 0))
    with subprocess.Popen(
        started(tmp_path, sys.executable, "-c", script),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=theirs,
        stderr=subprocess.DEVNULL,
    ) as running:
        os.close(theirs)
        assert running.stdin is not None
        said = b""
        while b"\n" not in said:
            said += os.read(ours, 100)
        running.stdin.write(b"\n")
        running.stdin.close()
        with suppress(OSError):  # EIO: its end
            while piece := os.read(ours, 100):
                said += piece
    os.close(ours)
    assert running.returncode == 0 and said == b"True 97 31\r\n\t!"


def test_a_reader_that_has_enough_ends_the_command(tmp_path: Path) -> None:
    command = started(tmp_path, "yes")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.read(2) == b"y\n"
        running.stdout.close()
    assert running.returncode == 128 + 13  # SIGPIPE


@pytest.mark.sweep
def test_output_that_is_lost_is_an_error(tmp_path: Path) -> None:
    command = started(tmp_path, "echo")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1 and b"No space left" in done.stderr
    command = ["sh", "-c", 'exec "$@" >&-', "sh", *command]
    done = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 2 and b"output is closed" in done.stderr


def test_what_runs_on_in_the_background_loses_no_output(tmp_path: Path) -> None:
    done = aifs(*started(tmp_path, "sh", "-c", BACKGROUND)[3:])
    assert done.stdout.split() == ["soon", "late"]
