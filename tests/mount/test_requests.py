"""How many requests an operation costs, as the table in docs/measured/speed.md says; and what the
bridge tells of directories by itself is what is on record.
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

from tests.support import caches
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
    caches.drop()
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
    text = (ROOT / "docs" / "measured" / "speed.md").read_text()
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
        self.are_counted = bool(self._status()["bridge"]["in_use"])
        """The bridge counts them, if there is one."""

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
        with caches.kept():
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


def _looked_up(requests: Requests, path: Path) -> tuple[int, int]:
    """How often the kernel asks for a name that it does not know any more, and how often Python."""
    _cold(path.parent)
    everything, of_python = requests.of(lambda: os.path.lexists(path))
    return everything["LOOKUP"], of_python["LOOKUP"]


@pytest.mark.sweep
def test_the_bridge_knows_what_a_new_directory_does_not_have(
    requests: Requests, here: Path
) -> None:
    new, old = here / "new", here / "old"
    new.mkdir()
    assert not (new / "a").exists()
    ways = {
        "made": lambda path: path.touch(),
        "linked": lambda path: os.link(new / "made", path),
        "moved": lambda path: os.rename(old, path),
        "symlink": lambda path: os.symlink("x", path),
        "directory": lambda path: os.mkdir(path),
    }
    old.touch()
    for name, make in ways.items():
        assert not (new / name).exists()
        make(new / name)
        _cold(new)
        assert os.path.lexists(new / name)
    os.rename(new, here / "moved")
    assert sorted(os.listdir(here / "moved")) == sorted(ways)
    seen = [_looked_up(requests, here / "moved" / f"nothing{turn}") for turn in range(TRIES)]
    counted = (1, 0) if requests.are_counted else (0, 0)
    assert counted in seen, seen


@pytest.mark.sweep
def test_what_was_there_before_the_mount_is_found(module_mount: Mounted, here: Path) -> None:
    (here / "before").mkdir()
    (here / "before" / "file").touch()
    os.chdir("/")
    module_mount.remount()
    assert (here / "before" / "file").exists()
    assert not (here / "before" / "other").exists()
    (here / "before" / "other").touch()
    assert (here / "before" / "other").exists()
    os.chdir(here)


def test_a_name_that_is_added_behind_the_end_of_a_listing_is_listed(here: Path) -> None:
    def names() -> list[str]:
        return os.listdir(here)

    (here / "d").mkdir()
    assert names() == ["d"]
    for number in range(5):
        (here / f"e{number}").touch()
        _cold(here)
        assert len(names()) == number + 2
        _cold(here)
        assert len(names()) == number + 2
    for number in range(5):
        (here / f"e{number}").unlink()
        _cold(here)
        assert len(names()) == 5 - number


@pytest.mark.sweep
def test_names_that_come_and_go_while_a_directory_is_listed(here: Path) -> None:
    """What stays is listed once; what was read ahead is not told when it has changed since."""
    for number in range(3000):
        (here / f"{number:05}").touch()
    _cold(here)
    seen, size = [], 0
    with os.scandir(here) as entries:
        for entry in entries:
            seen.append(entry.name)
            if len(seen) % 300 == 0:
                late = here / f"{2999 - len(seen) // 300:05}"
                late.write_bytes(b"x" * len(seen))
                (here / f"late{len(seen)}").touch()
                (here / f"{2900 - len(seen) // 300:05}").unlink()
                size = len(seen)
    assert len(seen) == len(set(seen)) and size
    assert {f"{number:05}" for number in range(2800)} <= set(seen)
    for entry in os.scandir(here):
        assert entry.stat().st_size == os.stat(entry.path).st_size
    assert not set(os.listdir(here)) & {f"{2900 - turn:05}" for turn in range(1, 10)}
