"""The guard of a connection, with a pipe in its place that gets a byte when it is ended."""

import os
import select
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.core import connections, mountinfo
from aifs.fuse import guard
from aifs.fuse.guard import Guard


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A descriptor that becomes readable when the connection has been ended."""
    ended, abort = os.pipe()
    mount = mountinfo.Mount(1, "/mnt", "fuse.aifs", "/src")
    monkeypatch.setattr(mountinfo, "mounted_at", lambda path: mount)
    monkeypatch.setattr(connections, "open_abort", lambda device: abort)
    yield ended
    os.close(ended)


def has(pid: int, field: str, number: int) -> bool:
    """Whether a set of signals in /proc/PID/status has this one."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    found = next((line for line in lines if line.startswith(field)), f"{field}:\t0")
    return bool(int(found.split()[1], 16) >> number - 1 & 1)


def test_signals_of_others_do_not_end_the_connection(ended: int) -> None:
    with Guard("/mnt") as guarding:
        process = guarding.process
        while not has(process.pid, "SigBlk", signal.SIGTERM):
            assert process.poll() is None
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGRTMIN):
            subprocess.run(["kill", f"-{int(number)}", str(process.pid)], check=True)
        while process.poll() is None and has(process.pid, "ShdPnd", signal.SIGRTMIN):
            pass
        assert process.poll() is None and not select.select([ended], [], [], 0)[0]
    assert os.read(ended, 1) == b"1"


def test_a_mount_goes_on_without_a_guard_where_no_process_can_be_started(
    ended: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise BlockingIOError

    monkeypatch.setattr(guard.subprocess, "Popen", refuse)
    with Guard("/mnt"):
        assert not select.select([ended], [], [], 0)[0]
    assert os.read(ended, 1) == b"1"
