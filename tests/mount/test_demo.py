"""scripts/demo with several hosts, or of starts: what it shows holds, and it leaves nothing
behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.machines import TIMEOUT_S, Network

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def demo(scratch: Path) -> "subprocess.Popen[str]":
    """With three hosts. It runs in ``scratch``."""
    pytest.importorskip("torch")
    try:
        Network().close()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces can be made here: {error}")
    os.chmod(scratch, 0o711)
    words = ("--hosts", "3", "--size", "160MB", "--dir", scratch)
    return subprocess.Popen(
        [sys.executable, ROOT / "scripts/demo.py", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def nothing_is_left_of(demo: "subprocess.Popen[str]", scratch: Path) -> None:
    assert not list(scratch.iterdir())
    assert str(scratch) not in Path("/proc/mounts").read_text()
    spaces = subprocess.run(["ip", "netns"], check=True, capture_output=True, text=True).stdout
    assert f"aifs{demo.pid % 100_000}" not in spaces
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            assert os.fsencode(scratch) not in process.read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            pass


@pytest.mark.long
def test_a_job_starts_twice(scratch: Path) -> None:
    """How much sooner depends on the machine; that each stage of both is told does not."""
    pytest.importorskip("torch")
    words = ("--start", "--size", "210MB", "--dir", scratch)
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/demo.py", *words],
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in ("imports", "checkpoint", "first step"):
        assert stage in done.stdout
    assert "fsck: 0 findings" in done.stdout
    assert not list(scratch.iterdir())


@pytest.mark.long
def test_a_job_trains_while_daemons_are_killed(scratch: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/demo.py", "--kill", "--dir", scratch],
        check=False,
        capture_output=True,
        text=True,
        timeout=5 * TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The training has seen no error" in done.stdout
    assert "fsck: 0 findings" in done.stdout
    assert not list(scratch.iterdir())


@pytest.mark.long
def test_hosts_save_and_load_and_one_of_them_dies(
    demo: "subprocess.Popen[str]", scratch: Path
) -> None:
    said, _ = demo.communicate(timeout=5 * TIMEOUT_S)
    assert demo.returncode == 0, said
    assert "host-3 is killed (kill -9) while it writes" in said
    assert "All that it had synced is there" in said
    assert "fsck says: 0 findings" in said
    nothing_is_left_of(demo, scratch)


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_interrupted_leaves_nothing(
    demo: "subprocess.Popen[str]", scratch: Path, number: int
) -> None:
    assert demo.stdout is not None
    while "host-2 at" not in (line := demo.stdout.readline()):
        assert line, "it ends too soon"
    demo.send_signal(number)
    demo.communicate(timeout=TIMEOUT_S)
    assert demo.returncode == 128 + number
    nothing_is_left_of(demo, scratch)
