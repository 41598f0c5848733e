"""A data server that does not answer, below a real mount: a directory of another AIFS mount, whose
daemon is stopped.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.core.config import DIRECTORY_FILE
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs, mounted_store

EXPECTED = [r"data server \d .*(is failing|has not ended|has not answered)", "has to wait"]


class Pair:
    """A mounted store, one of whose servers lies in ``inner``, another mount."""

    def __init__(self, inner: Mounted, outer: Mounted) -> None:
        self.inner, self.outer = inner, outer

    def stop(self) -> None:
        self.inner.signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self.inner.signal(signal.SIGCONT)


@pytest.fixture
def pair(scratch: Path) -> Iterator[Pair]:
    for name in ("inner", "outer"):
        (scratch / name).mkdir()
    with mounted_store(scratch / "inner") as inner:
        server = inner.path / "server"
        server.mkdir()
        source = scratch / "outer" / "store"
        source.mkdir()
        text = (
            f"servers: [data/0, {server}]\nlayout: {{inline_limit: 0}}\nburst: {{directories: "
            f"[]}}\n"
        )
        (source / DIRECTORY_FILE).write_text(text)
        with mounted_store(scratch / "outer", ("data.timeout=2s",)) as outer:
            outer.expected += EXPECTED
            inner.expected += [".*"]
            pair = Pair(inner, outer)
            try:
                yield pair
            finally:
                pair.go_on()


@pytest.mark.sweep
def test_a_forced_umount_ends_at_once_and_loses_nothing(pair: Pair) -> None:
    outer = pair.outer
    content = os.urandom(3 << 20)
    (outer.path / "kept").write_bytes(content)
    (outer.path / "file").write_bytes(content)
    subprocess.run(["sync", "-f", outer.path], check=True, timeout=TIMEOUT_S)
    pair.stop()
    with open(outer.path / "file", "r+b", buffering=0) as file:
        command = ["dd", "of=/dev/stdout", "if=/dev/zero", "bs=1M", "count=3", "conv=notrunc"]
        with subprocess.Popen(command, stdout=file, stderr=subprocess.PIPE) as program:
            busy = aifs("umount", outer.path, check=False)
            assert busy.returncode == 6 and "is in use by" in busy.stderr
            aifs("umount", "--force", outer.path)
            assert program.wait(TIMEOUT_S) != 0
    outer.wait_for_end()
    pair.go_on()
    outer.mount()
    assert (outer.path / "kept").read_bytes() == content
    assert len((outer.path / "file").read_bytes()) == len(content)


def _look_why(outer: Mounted, program: subprocess.Popen) -> None:
    until_s = time.monotonic() + TIMEOUT_S
    while "data/workers.py" not in outer.log.read_text():
        assert program.poll() is None and time.monotonic() < until_s, outer.log.read_text()
    assert "and waits for data server 1\n" in outer.log.read_text()
    for words in ([outer.path / "file"], [str(program.pid)], [str(program.pid), outer.path]):
        told = json.loads(aifs("why", *words, "--json").stdout)
        if "mounts" in told:
            told = told["mounts"][str(outer.path)]
        (one,) = [each for each in told["now"] if each["operation"] == "write"]
        assert one["pid"] == program.pid and one["path"] == "/file"
        assert one["waits_for"] == ["data server 1"] and told["waited_s"]["data server 1"] > 0.5
    assert f"{program.pid} dd" in aifs("why", outer.path).stdout


def test_why_it_hangs(pair: Pair) -> None:
    """`aifs why` names the server, for the file, the process and all; the log has the stack."""
    outer = pair.outer
    (outer.path / "file").write_bytes(bytes(3 << 20))
    outer.unmount()
    outer.options += ("kernel.slow_request=500ms",)
    outer.mount()
    outer.expected.append("of /file .* has not been answered")
    pair.stop()
    command = [
        "dd",
        f"of={outer.path / 'file'}",
        "if=/dev/zero",
        "bs=1M",
        "count=3",
        "conv=notrunc",
    ]
    with subprocess.Popen([*command, "oflag=direct"], stderr=subprocess.DEVNULL) as program:
        try:
            _look_why(outer, program)
        finally:
            pair.go_on()
        assert program.wait(TIMEOUT_S) == 0
    lines = aifs("why", outer.path / "file").stdout
    assert "nothing is being asked for now" in lines
    assert re.search(r" s +\d+% +data server 1\b", lines), lines
    nobody = aifs("why", "4194304", outer.path, check=False)
    assert (nobody.returncode, nobody.stderr) == (1, "aifs: there is no process 4194304\n")


STAGES = """
import os, sys
from aifs.client import startup
print("AIFS-STAGE begin marked", flush=True)
with startup.stage("noted"):
    print("ready", flush=True)
    sys.stdin.readline()
    with open(sys.argv[1], "r+b", buffering=0) as file:
        file.write(bytes(3 << 20))
        os.fsync(file)
print("AIFS-STAGE end marked", flush=True)
sys.stdin.readline()
"""


@pytest.mark.sweep
def test_a_report_of_stages_says_which_server_it_was(pair: Pair) -> None:
    outer = pair.outer
    (outer.path / "file").write_bytes(bytes(3 << 20))
    top = outer.path / "start"
    words = ("start", "run", "--job", "job", "--run", "1", "--dir", top, "--marks", "--")
    command = [sys.executable, "-m", "aifs.cli.main", *words, sys.executable, "-c", STAGES]
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*command, outer.path / "file"], cwd=ROOT, stdin=pipe, stdout=pipe, bufsize=0
    ) as program:
        assert program.stdin is not None and program.stdout is not None
        assert program.stdout.readline() == b"AIFS-STAGE begin marked\n"
        assert program.stdout.readline() == b"ready\n"
        pair.stop()
        try:
            program.stdin.write(b"\n")
            waited: dict[str, float] = {}
            while waited.get("data server 1", 0) < 0.5:
                assert program.poll() is None
                waited = json.loads(os.getxattr(outer.path, "user.aifs.why"))["waited_s"]
        finally:
            pair.go_on()
        assert program.stdout.readline() == b"AIFS-STAGE end marked\n"
        notes = top / "job" / "1" / f"{socket.gethostname()}.jsonl"
        while '"end", "stage": "marked"' not in notes.read_text():
            assert program.poll() is None
        program.stdin.write(b"\n")
        assert program.wait(TIMEOUT_S) == 0
    told = json.loads(aifs("start", "report", "job", "--dir", top, "--json").stdout)
    for stage in told["stages"]:
        assert 0.3 < stage["spent_s"]["data server 1"] < stage["max_s"]
    assert {stage["stage"] for stage in told["stages"]} == {"marked", "noted"}
    assert "data server 1 " in aifs("start", "report", "job", "--dir", top).stdout


@pytest.mark.sweep
def test_a_mount_beside_a_server_that_hangs_is_refused_in_time(pair: Pair) -> None:
    """It may have bytes of unprotected files; without them it is mounted, and says so."""
    outer = pair.outer
    (outer.path / "file").write_bytes(bytes(3 << 20))
    outer.unmount()
    pair.stop()
    refused = aifs("mount", *["-o", "data.timeout=2s"], outer.source, outer.path, check=False)
    assert refused.returncode != 0
    assert "data server 1" in refused.stderr and "has not ended within 2 s" in refused.stderr
    outer.options += ("data.missing=allow",)
    outer.mount()
    states = [
        server["state"]
        for server in json.loads(os.getxattr(outer.path, "user.aifs.status"))["servers"]
    ]
    assert states[0] == "ok" != states[1]
    aifs("umount", outer.path)
    outer.wait_for_end()
    pair.go_on()
