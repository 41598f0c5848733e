"""No program waits for a daemon that is dead or stuck: requests end when it dies, and commands of ours in any case."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core import connections
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs
from tests.support.stalled import NAME

LOCK = "fuse_reverse_inval"
"""Where a thread waits that sends an invalidation."""

CREATE = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)"


def wait_for_lock(pid: int) -> None:
    """Until the kernel keeps a thread of the process waiting for a lock."""
    threads = Path(f"/proc/{pid}/task")
    while not any(LOCK in path.read_text() for path in threads.glob("*/wchan")):
        assert threads.exists()


def wait_until_stalled(pid: int) -> None:
    """Until the process waits for an answer of its daemon."""
    while "request_wait_answer" not in Path(f"/proc/{pid}/wchan").read_text():
        assert Path(f"/proc/{pid}").exists()


@contextmanager
def blocked(mounted: Mounted) -> Iterator[subprocess.Popen]:
    """A program that holds a directory's lock and waits for the daemon, which wants to invalidate a name there."""
    directory = mounted.path / "directory"
    (directory / "tree").mkdir(parents=True)
    abort = connections.open_abort(os.stat(mounted.path).st_dev)
    program = subprocess.Popen([sys.executable, "-c", CREATE, directory / os.fsdecode(NAME)])
    try:
        wait_until_stalled(program.pid)
        aifs("rm", "-r", directory / "tree")
        wait_for_lock(mounted.pid)
        yield program
    finally:
        program.kill()
        connections.abort(abort)
        os.close(abort)
        program.wait(TIMEOUT_S)


@pytest.fixture
def stalling(mounted: Mounted) -> Mounted:
    mounted.unmount()
    command = [sys.executable, "-m", "tests.support.stalled", "mount"]
    subprocess.run([*command, mounted.source, mounted.path], cwd=ROOT, check=True)
    mounted.adopt()
    return mounted


def test_a_killed_daemon_ends_though_the_kernel_holds_one_of_its_threads(
    stalling: Mounted,
) -> None:
    with blocked(stalling) as program:
        stalling.kill_only()
        assert program.wait(TIMEOUT_S) != 0
    stalling.mount()
