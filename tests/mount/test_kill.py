"""kill -9 of the daemon of a real mount, under load, again and again, with manifests of what was
acknowledged.
"""

import errno
import hashlib
import os
import random
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs, mounted_store

CLIENTS = 3
LINES_MIN = 60
"""Acknowledged operations of each client in a round before the daemon may be killed."""


def content(name: str, part: int) -> bytes:
    """What a client writes; a function of the name it first had, so that anybody can check it.
    Never zero."""
    rng = random.Random(f"{name} {part}")
    length = rng.choice((rng.randint(1, 3000), rng.randint(1, 200_000)))
    return bytes([rng.randint(1, 255)]) * length


class Manifest:
    """One client's acknowledged operations, in a file on another filesystem: a line each, written
    after it.

    ``#`` lines say what is about to be done, so that what was in flight at the kill is known too.
    """

    def __init__(self) -> None:
        self.directories: set[str] = set()
        self.files: dict[str, tuple[str, int]] = {}  # name -> first name, parts
        self.count = 0
        self.in_flight: tuple[str, ...] = ()

    def read(self, path: Path) -> None:
        for line in path.read_text().splitlines():
            kind, *words = line.split()
            if kind == "#":
                self.in_flight = tuple(words)
                continue
            self.count += 1
            self.in_flight = ()
            self.apply(kind, *words)

    def apply(self, kind: str, *words: str) -> None:
        if kind == "mkdir":
            self.directories.add(words[0])
        elif kind == "rmdir":
            self.directories.remove(words[0])
        elif kind == "create":
            self.files[words[0]] = (words[0], 0)
        elif kind == "append":
            first, parts = self.files[words[0]]
            self.files[words[0]] = (first, parts + 1)
        elif kind == "rename":
            self.files[words[1]] = self.files.pop(words[0])
        elif kind == "unlink":
            del self.files[words[0]]
        else:
            assert kind == "fsync", kind

    def check(self, top: Path) -> None:
        """Everything acknowledged is there, and nothing else but what was in flight."""
        possible = [self]
        if self.in_flight:
            other = Manifest()
            other.directories, other.files = set(self.directories), dict(self.files)
            other.apply(*self.in_flight)
            possible.append(other)
        found_directories, found_files = _walk(top)
        matching = [
            one
            for one in possible
            if one.directories == found_directories and one.files.keys() == found_files.keys()
        ]
        assert matching, (
            f"{found_directories}, {sorted(found_files)} for {self.directories}, "
            f"{sorted(self.files)}"
        )
        for name, path in found_files.items():
            data = path.read_bytes()
            wanted = [
                b"".join(content(first, n) for n in range(parts))
                for first, parts in (one.files[name] for one in matching)
            ]
            if self.in_flight[:2] == ("append", name):
                first, parts = self.files[name]
                whole = wanted[0] + content(first, parts)
                assert data == whole[: len(data)] and len(data) >= len(wanted[0]), (
                    f"{name}: a torn append"
                )
            else:
                assert hashlib.sha256(data).digest() in {
                    hashlib.sha256(one).digest() for one in wanted
                }, name


def _walk(top: Path) -> tuple[set[str], dict[str, Path]]:
    directories, found = set(), {}
    for root, names, files in os.walk(top):
        where = Path(root).relative_to(top)
        directories |= {str(where / name) for name in names}
        found |= {str(where / name): Path(root, name) for name in files}
    return directories, found


def client(top: str, manifest: str, seed: str) -> None:
    """Runs in a process of its own, until the daemon is gone: that is the one error that may
    come."""
    rng = random.Random(seed)
    known = Manifest()
    known.read(Path(manifest))
    if known.in_flight:  # the parent has checked that it either happened or not
        happened = {
            "create": lambda name: os.path.exists(f"{top}/{name}"),
            "mkdir": lambda name: os.path.exists(f"{top}/{name}"),
            "rename": lambda old, new: not os.path.exists(f"{top}/{old}"),
            "unlink": lambda name: not os.path.exists(f"{top}/{name}"),
            "rmdir": lambda name: not os.path.exists(f"{top}/{name}"),
            "append": lambda name: _mend_append(f"{top}/{name}", *known.files[name]),
            "fsync": lambda name: False,
        }
        kind, *words = known.in_flight
        if happened[kind](*words):
            known.apply(kind, *words)
            with open(manifest, "a") as lines:
                lines.write(" ".join((kind, *words)) + "\n")
    lines = open(manifest, "a", buffering=1)  # noqa: SIM115 (until the end of the process)

    def do(kind: str, *words: str) -> None:
        lines.write(" ".join(("#", kind, *words)) + "\n")
        first, part = known.files.get(words[0], (words[0], 0))
        try:
            _perform(kind, [f"{top}/{word}" for word in words], lambda: content(first, part))
        except OSError as error:
            if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):  # the daemon is dead
                os._exit(0)
            raise
        known.apply(kind, *words)
        lines.write(" ".join((kind, *words)) + "\n")

    number, life = 0, seed.split()[0]
    while True:
        number += 1
        names = sorted(known.files)
        empty = sorted(known.directories - {os.path.dirname(n) for n in known.files})
        kind = rng.choice(
            ("create", "create", "append", "append", "fsync", "rename", "mkdir", "unlink", "rmdir")
        )
        new = "/".join(
            filter(None, (rng.choice(["", *sorted(known.directories)]), f"n{life}-{number}"))
        )
        if kind == "mkdir" and len(known.directories) < 6:
            do(kind, f"d{life}-{number}")
        elif kind == "rmdir" and empty:
            do(kind, rng.choice(empty))
        elif kind == "create" and len(names) < 40:
            do(kind, new)
        elif kind == "rename" and names:
            do(kind, rng.choice(names), new)
        elif kind in ("append", "fsync", "unlink") and names:
            do(kind, rng.choice(names))


def _mend_append(path: str, first: str, parts: int) -> bool:
    """Finish an append that a kill has cut: it may have been part of several requests to the
    daemon."""
    with open(path, "r+b") as file:
        data = content(first, parts)
        file.seek(sum(len(content(first, n)) for n in range(parts)))
        file.write(data)
    return True


def _perform(kind: str, paths: list[str], data) -> None:
    if kind == "create":
        os.close(os.open(paths[0], os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    elif kind == "append":
        with open(paths[0], "ab", buffering=0) as file:
            left = memoryview(data())
            while left:
                left = left[file.write(left) :]
    elif kind == "fsync":
        descriptor = os.open(paths[0], os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    else:
        getattr(os, kind)(*paths)


class Load:
    """The clients of one round, each in a directory of its own, and their manifests."""

    def __init__(self, store: Mounted, manifests: Path) -> None:
        self._store = store
        self._manifests = [manifests / str(number) for number in range(CLIENTS)]
        for number, manifest in enumerate(self._manifests):
            manifest.touch()
            (store.path / str(number)).mkdir()

    def run_and_kill(self, seed: int) -> int:
        """Returns how many operations were acknowledged before the daemon died."""
        before = [self._read(number).count for number in range(CLIENTS)]
        goals = [
            count + random.Random(f"{seed} {n}").randint(LINES_MIN, 200)
            for n, count in enumerate(before)
        ]
        clients = [self._start(number, f"{seed} {number}") for number in range(CLIENTS)]
        try:
            for number, goal in enumerate(goals):
                self._await_lines(clients[number], number, goal)
            self._store.kill_only()
            for process in clients:
                assert process.wait(TIMEOUT_S) == 0, (
                    "a client met an error while the daemon was alive"
                )
        finally:
            for process in clients:
                process.kill()
                process.wait()
        after = [self._read(number).count for number in range(CLIENTS)]
        assert all(count >= goal for count, goal in zip(after, goals, strict=True))
        return sum(after) - sum(before)

    def check(self) -> None:
        for number in range(CLIENTS):
            self._read(number).check(self._store.path / str(number))

    def _read(self, number: int) -> Manifest:
        manifest = Manifest()
        manifest.read(self._manifests[number])
        return manifest

    def _start(self, number: int, seed: str) -> subprocess.Popen:
        code = "import sys; from tests.mount import test_kill; test_kill.client(*sys.argv[1:])"
        words = [str(self._store.path / str(number)), str(self._manifests[number]), seed]
        return subprocess.Popen([sys.executable, "-c", code, *words], cwd=ROOT)

    def _await_lines(self, process: subprocess.Popen, number: int, goal: int) -> None:
        """Until the client has written so many lines; it is the client that is waited for, not the
        clock."""
        watch = os.pidfd_open(process.pid)
        try:
            while self._read(number).count < goal:
                assert not select.select([watch], [], [], 0.01)[0], "a client has ended"
        finally:
            os.close(watch)


@pytest.fixture
def store(scratch: Path) -> Iterator[Mounted]:
    with mounted_store(scratch, ("data.movers=1",)) as made:
        yield made


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _kill_again_and_again(store: Mounted, scratch: Path, rounds: int) -> None:
    manifests = scratch / "manifests"
    manifests.mkdir()
    load = Load(store, manifests)
    for seed in range(rounds):
        pid = store.pid
        acknowledged = load.run_and_kill(seed)
        assert acknowledged >= CLIENTS * LINES_MIN
        assert not _is_running(pid), "the daemon was not killed"
        store.mount()
        assert store.pid != pid
        load.check()
    text = store.log.read_text()
    assert text.count("was not closed in order") == rounds


def test_everything_acknowledged_survives_kills(store: Mounted, scratch: Path) -> None:
    _kill_again_and_again(store, scratch, rounds=2)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_everything_acknowledged_survives_many_kills(store: Mounted, scratch: Path) -> None:
    _kill_again_and_again(store, scratch, rounds=200)


@pytest.mark.sweep
def test_no_mover_is_left(scratch: Path) -> None:
    """They die with the daemon, whatever they are doing, and the next mount does it again."""
    with mounted_store(scratch, ["burst.drain_delay=0s", "data.movers=2"]) as store:
        data = random.Random(0).randbytes(4 << 20)
        for number in range(8):
            (store.path / str(number)).write_bytes(data)
        while not (movers := _movers_of(store.pid)):
            assert _is_running(store.pid)
        watches = [os.pidfd_open(pid) for pid in movers]
        store.kill()
        for watch in watches:
            assert select.select([watch], [], [], TIMEOUT_S)[0], "a mover is left"
            os.close(watch)
        store.mount()
        aifs("drain", store.path)
        for number in range(8):
            assert (store.path / str(number)).read_bytes() == data


def _movers_of(pid: int) -> list[int]:
    children = (path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children"))
    return [int(child) for text in children for child in text.split()]
