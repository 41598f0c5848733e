"""``aifs stats``, ``top`` and ``profile`` on a mount that programs use."""

import json
import os
import pty
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import rich.console
import rich.live

from aifs.cli.main import main
from tests.support.mounts import Mounted, aifs
from tests.support.users import in_process

NOBODY = 65534


@pytest.fixture
def busy(remounted: Mounted) -> Iterator[Mounted]:
    """A mount with a program that makes files in a directory until the test ends."""
    directory = remounted.path / "job" / "files"
    directory.mkdir(parents=True, exist_ok=True)
    ended = threading.Event()

    def work() -> None:
        while not ended.is_set():
            (directory / "x").write_bytes(b"x")
            (directory / "x").unlink()

    worker = threading.Thread(target=work)
    worker.start()
    yield remounted
    ended.set()
    worker.join()


@pytest.mark.sweep
def test_stats_are_a_line_each_time(busy: Mounted) -> None:
    command = ("stats", busy.path, "--interval", "10ms")
    head, *lines = aifs(*command, "--count", "2").stdout.splitlines()
    assert head.split()[:4] == ["requests", "errors", "median", "99%"] and len(lines) == 2
    first, second = map(json.loads, aifs(*command, "--count", "2", "--json").stdout.splitlines())
    assert first["requests_per_s"] > 0 and second["seconds"] < first["seconds"]
    assert first["resident_bytes"] > 1 << 20


@pytest.mark.sweep
def test_top_shows_who_it_is(busy: Mounted) -> None:
    command = ("top", busy.path, "--interval", "100ms", "--for", "1s")
    lines = aifs(*command, "--json").stdout.splitlines()
    names = {one["process"] for line in lines for one in json.loads(line)["process"]}
    comm = Path("/proc/self/comm").read_text().strip()
    assert f"{os.getpid()} {comm}" in names  # not the thread which does it
    assert "/job/files" in aifs(*command, "--by", "path").stdout  # no terminal: tables


@pytest.mark.sweep
def test_top_on_a_terminal_ends_by_a_key(busy: Mounted) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        words = [sys.executable, "-m", "aifs.cli.main", "top", str(busy.path)]
        os.execve(
            sys.executable, words, os.environ | {"TERM": "xterm", "LINES": "30", "COLUMNS": "90"}
        )
    said = b""
    sent = 0
    try:
        while piece := os.read(terminal, 1 << 16):
            said += piece
            if sent == 0 and b"by process" in said:
                sent = os.write(terminal, b"or")
            _, ordered, shown = said.partition(b"by operation, the largest requests first")
            if sent == 2 and ordered and b"create" in shown:
                sent += os.write(terminal, b"q")
    except OSError:  # EIO: the other end was closed
        pass
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0 and sent == 3, said


@pytest.mark.sweep
def test_a_profile_of_a_mount(busy: Mounted) -> None:
    command = ("profile", busy.path, "--for", "200ms")
    (first, *_) = json.loads(aifs(*command, "--by", "path", "--json").stdout)["path"]
    assert first["path"] == "/job/files" and first["requests"] > 0
    assert aifs(*command, "--by", "user").stdout.split()[0] == "user"
    causes = json.loads(aifs(*command, "--by", "cause", "--json").stdout)["cause"]
    assert ("the daemon itself", "create") in {(one["cause"], one["operation"]) for one in causes}


def test_others_see_sums_alone(shared: Mounted, capfd: pytest.CaptureFixture[str]) -> None:
    assert rich.console and rich.live  # nobody could import them
    path = str(shared.path)
    assert in_process(lambda: main(["stats", path, "--count", "1"]), uid=NOBODY) == 0
    for command in ("top", "profile"):
        assert in_process(lambda: main([command, path, "--for", "10ms"]), uid=NOBODY) == 6
        assert "only root and the user who has mounted may trace" in capfd.readouterr().err
