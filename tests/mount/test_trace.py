"""``aifs trace`` on a mount: what programs do shows, for root, while somebody looks."""

import errno
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.cli import door
from tests.support.mounts import Mounted
from tests.support.users import errno_of, in_process

NOBODY = 65534


class Trace:
    """A reader of the log from the time when it was made."""

    def __init__(self, mount: Mounted) -> None:
        self._path = mount.path
        self._next = door.read(mount.path, "trace")["next"]

    def records(self) -> list[dict]:
        """What has been answered since the last time."""
        found = []
        while True:
            told = door.read(self._path, f"trace.{self._next}")
            assert told["lost"] == 0
            found += told["records"]
            self._next = told["next"]
            if not told["records"]:
                return found


def test_requests_are_shown_with_their_outcome(module_mount: Mounted, here: Path) -> None:
    trace = Trace(module_mount)
    (here / "d").mkdir()
    assert errno_of(os.rmdir, here) == errno.ENOTEMPTY
    assert errno_of(os.stat, here / "none") == errno.ENOENT
    os.setxattr(here / "d", "user.x", b"1")
    os.stat(here)
    found = {(one["operation"], one["path"], one["attribute"]): one for one in trace.records()}
    top = f"/{here.relative_to(module_mount.path)}"
    made = found["mkdir", f"{top}/d", ""]
    assert (made["uid"], made["pid"], made["errno"]) == (0, os.getpid(), 0)
    assert made["duration_us"] > 0 and made["inode"] == os.stat(here).st_ino
    assert found["rmdir", top, ""]["errno"] == errno.ENOTEMPTY
    assert found["getattr", top, ""]["errno"] == 0
    assert found["lookup", f"{top}/none", ""]["errno"] == errno.ENOENT
    assert found["setxattr", f"{top}/d", "user.x"]["errno"] == 0
    assert not any(one["attribute"].startswith("user.aifs.trace") for one in found.values())


def test_reads_and_writes_by_way_of_the_daemon(module_mount: Mounted, here: Path) -> None:
    os.setxattr(here, "user.aifs.tier", b"capacity")
    trace = Trace(module_mount)
    with open(here / "x", "wb") as file:
        file.write(b"content")
        file.flush()
        os.fsync(file.fileno())
    found = {one["operation"]: one for one in trace.records()}
    assert found["write"]["bytes"] == 7
    assert {"create", "write", "fsync", "release"} <= found.keys()
    status = json.loads(os.getxattr(module_mount.path, "user.aifs.status"))
    if status["bridge"]["in_use"]:
        assert found["fsync"]["path"].endswith("/x") and found["fsync"]["pid"] == os.getpid()
    else:
        assert found["fsync"]["inode"] is None and found["fsync"]["pid"] is None


def test_it_is_for_root_and_who_has_mounted(module_mount: Mounted) -> None:
    def read() -> int:
        return errno_of(os.getxattr, module_mount.path, "user.aifs.trace")

    assert in_process(read, uid=NOBODY) == errno.EACCES
    assert read() == 0
    assert errno_of(os.getxattr, module_mount.path, f"user.aifs.trace.{1 << 40}") == errno.EINVAL
    (module_mount.path / "somewhere").mkdir(exist_ok=True)
    assert (
        errno_of(os.getxattr, module_mount.path / "somewhere", "user.aifs.trace") == errno.ENODATA
    )


@contextmanager
def command(mount: Mounted, *options: str) -> Iterator["subprocess.Popen[str]"]:
    words = [sys.executable, "-u", "-m", "aifs.cli.main", "trace", str(mount.path), *options]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()


def test_the_command_prints_lines(module_mount: Mounted, here: Path) -> None:
    with command(module_mount, "--op", "mkdir", "--path", str(here)) as process:
        assert process.stdout is not None
        assert process.stdout.readline().split()[:3] == ["time", "us", "operation"]
        (here / "x").touch()
        (here / "0").mkdir()
        line = process.stdout.readline()
    assert re.match(r"\d\d:\d\d:\d\d\.\d{6} +\d+  mkdir +ok +- +0 +\d+  /.*/0$", line), line


@pytest.mark.sweep
def test_the_command_stops_and_prints_json(module_mount: Mounted, here: Path) -> None:
    with command(module_mount, "--for", "1s", "--json", "--pid", str(os.getpid())) as process:
        assert process.stdout is not None
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(process.stdout))
        reader.start()
        number = 0
        while process.poll() is None:
            (here / str(number)).touch()
            number += 1
        reader.join()
    records = [json.loads(line) for line in lines]
    assert process.returncode == 0 and records
    assert {one["pid"] for one in records} == {os.getpid()}
