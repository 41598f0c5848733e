"""How many requests an operation costs, as the table in docs/speed.md says; and what the bridge
tells of directories by itself is what is on record.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mounts import ROOT, Mounted

OPCODES = {
    1: "LOOKUP",
    3: "GETATTR",
    4: "SETATTR",
    5: "READLINK",
    6: "SYMLINK",
    9: "MKDIR",
    10: "UNLINK",
    11: "RMDIR",
    12: "RENAME",
    13: "LINK",
    14: "OPEN",
    15: "READ",
    16: "WRITE",
    18: "RELEASE",
    20: "FSYNC",
    22: "GETXATTR",
    27: "OPENDIR",
    44: "READDIRPLUS",
    35: "CREATE",
    45: "RENAME",
    47: "COPY_FILE_RANGE",
    53: "COPY_FILE_RANGE",
}
FORGETS = {2, 42}  # they come when the kernel likes
TRIES = 20  # somebody else may drop the kernel's caches, or a RELEASE come late


def _write(path: Path, flags: int = os.O_CREAT, data: bytes = b"x" * 4096) -> None:
    fd = os.open(path, os.O_WRONLY | flags, 0o644)
    if data:
        os.write(fd, data)
    os.close(fd)


def _read(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.read(fd, 8192)
    os.close(fd)


def _cold(directory: Path) -> None:
    Path("/proc/sys/vm/drop_caches").write_text("2")
    os.stat(directory)


def _run(*command: str | Path) -> None:
    subprocess.run(command, check=True, capture_output=True)


Operation = Callable[[Path], Callable[[], object]]
"""Prepares a directory, in which a name was changed last, and returns what is to be counted."""


def _of(path: str, function: Callable[[Path], object], cold: bool = False) -> Operation:
    def prepare(directory: Path) -> Callable[[], object]:
        if cold:
            _cold(directory)
        return lambda: function(directory / path)

    return prepare


def _after_write(directory: Path) -> Callable[[], object]:
    _write(directory / "new")
    os.stat(directory)
    return lambda: os.stat(directory / "new")


OPERATIONS: dict[str, Operation] = {
    "create, close": _of("new", lambda path: _write(path, data=b"")),
    "create, write, close": _of("new", _write),
    "open, read, close, warm": _of("file", _read),
    "open, read, close, cold": _of("file", _read, cold=True),
    "`echo >> f`": _of("file", lambda path: _write(path, os.O_APPEND)),
    "rewrite (O_TRUNC)": _of("file", lambda path: _write(path, os.O_TRUNC)),
    "stat, warm": _of("file", os.stat),
    "stat, cold": _of("file", os.stat, cold=True),
    "stat after writing": _after_write,
    "rename": _of("file", lambda path: os.rename(path, path.with_name("new"))),
    "rename over a file": _of("file", lambda path: os.rename(path, path.with_name("other"))),
    "unlink": _of("file", os.unlink),
    "mkdir": _of("new", os.mkdir),
    "rmdir": _of("empty", os.rmdir),
    "symlink": _of("new", lambda path: os.symlink("file", path)),
    "readlink": _of("link", os.readlink),
    "link": _of("file", lambda path: os.link(path, path.with_name("new"))),
    "chmod": _of("file", lambda path: os.chmod(path, 0o600)),
    "`ls`, 6 names, cold": _of("", os.listdir, cold=True),
    "scandir and stat, 6 names, cold": _of(
        "", lambda path: [entry.stat() for entry in os.scandir(path)], cold=True
    ),
    "`mv`": _of("file", lambda path: _run("mv", path, path.with_name("new"))),
    "`cp`": _of("file", lambda path: _run("cp", path, path.with_name("new"))),
}


def _table() -> dict[str, tuple[Counter[str], Counter[str]]]:
    """What the table says of each operation: all requests, and those that reach Python."""
    text = (ROOT / "docs" / "speed.md").read_text()
    lines = text.split("## Requests")[1].split("\n## ")[0].splitlines()
    rows = [line.strip("|").split("|") for line in lines if line.startswith("|")]
    found = {}
    for operation, python, bridge in rows[2:]:
        answered = [Counter[str](), Counter[str]()]
        for requests, cell in zip(answered, (python, bridge), strict=True):
            for count, name in re.findall(r"(?:(\d+) )?([A-Z_]+)", cell):
                requests[name] += int(count or 1)
        found[operation.strip()] = answered[0] + answered[1], answered[0]
    return found


class Requests:
    """How many requests a mount has got."""

    def __init__(self, mount: Mounted) -> None:
        self._mount = mount
        self.in_burst = bool(self._status()["burst"]["devices"])
        """Whether files have burst copies, which the kernel reads by itself."""

    def _status(self) -> dict[str, Any]:
        return json.loads(os.getxattr(self._mount.path, "user.aifs.status"))

    def _now(self) -> tuple[Counter[str], Counter[str]]:
        bridge = self._status()["bridge"]
        counts = [Counter[str](), Counter[str]()]
        for counter, key in zip(counts, ("requests", "answered"), strict=True):
            for opcode, count in bridge[key].items():
                if int(opcode) not in FORGETS:
                    counter[OPCODES.get(int(opcode), opcode)] += count
        return counts[0], counts[1]

    def of(self, function: Callable[[], object]) -> tuple[Counter[str], Counter[str]]:
        """All requests, and those that Python has answered."""
        before, answered_before = self._now()
        function()
        after, answered = self._now()
        all_of_them = after - before - Counter(GETXATTR=2)  # the last question itself
        return all_of_them, all_of_them - (answered - answered_before)


@pytest.fixture(scope="module")
def requests(module_mount: Mounted) -> Requests:
    return Requests(module_mount)


def test_the_table_has_the_operations_that_are_counted() -> None:
    assert sorted(_table()) == sorted(OPERATIONS)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_sends_no_more_requests_than_the_table_says(
    operation: str, requests: Requests, here: Path
) -> None:
    most, most_of_python = _table()[operation]
    if not requests.in_burst:  # as the text below the table says
        most_of_python |= Counter(OPEN=most["OPEN"], RELEASE=most["RELEASE"])
        more = Counter(READ=1, WRITE=1)
        most, most_of_python = most + more, most_of_python + more
    seen = []
    for turn in range(TRIES):
        directory = here / str(turn)
        directory.mkdir()
        for name in ("file", "other"):
            _write(directory / name, os.O_CREAT)
            _read(directory / name)
            os.stat(directory / name)
        (directory / "empty").mkdir()
        (directory / "link").symlink_to("file")
        (directory / "last").touch()
        found, of_python = requests.of(OPERATIONS[operation](directory))
        seen.append((found, of_python))
        if found <= most and of_python <= most_of_python:
            return
    pytest.fail(f"{operation}: {most} of which Python {most_of_python}, but it was {seen}")


def _changes(directory: Path) -> Iterator[Callable[[], object]]:
    file, below = directory / "f", directory / "below"
    yield file.touch
    yield lambda: os.mkdir(below)
    yield lambda: os.mkdir(below / "deep")
    yield lambda: os.rename(file, below / "g")
    yield lambda: os.link(below / "g", file)
    yield lambda: os.chmod(directory, 0o2751)
    yield lambda: os.chown(below, 1234, 4321)
    yield lambda: os.utime(directory, ns=(5, 6 * 10**9 + 7))
    yield lambda: os.utime(below, ns=(-5, -(10**9) - 7))
    yield lambda: os.setxattr(directory, "user.x", b"1")
    yield lambda: os.rmdir(below / "deep")
    yield lambda: os.symlink("x", directory / "s")
    yield file.unlink


def test_what_is_told_of_a_directory_is_what_is_on_record(
    module_mount: Mounted, here: Path
) -> None:
    def told() -> list[tuple[int, ...]]:
        found = [os.stat(path) for path in (here, here / "below") if path.exists()]
        return [
            (*each[:2], *each[3:7], each.st_blocks, each.st_mtime_ns, each.st_ctime_ns)
            for each in found
        ]

    seen = [told()]
    for change in _changes(here):
        change()
        seen.append(told())
        assert seen[-1] != seen[-2]
    os.chdir("/")
    module_mount.remount()
    assert told() == seen[-1]
    os.chdir(here)


def test_a_directory_that_is_gone_is_told_no_more(here: Path) -> None:
    (here / "d").mkdir()
    fd = os.open(here / "d", os.O_RDONLY)
    try:
        (here / "d").rmdir()
        assert os.fstat(fd).st_nlink == 0
        shutil.rmtree(here / "d", ignore_errors=True)
    finally:
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        os.stat(here / "d")
