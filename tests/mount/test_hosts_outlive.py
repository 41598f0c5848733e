"""The mount of a host of several outlives its daemon: the next one goes on with its session, and
other hosts see a pause."""

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.mount.test_outlive import REQUESTS, TREES
from tests.support import postgres
from tests.support.hosts import Cluster, Host, many_hosts, until
from tests.support.mounts import TIMEOUT_S, aifs, keepers

KEPT = ("kernel.restarts=1000", "host.restarts=1000")


@pytest.fixture
def kept(scratch: Path, postgres_servers: postgres.Servers) -> Iterator[Cluster]:
    with many_hosts(scratch, postgres_servers.get("wheel"), mounted=False) as cluster:
        for host in cluster:
            host.options = KEPT
            host.mount()
        yield cluster


NAMES = [
    name
    for name in REQUESTS
    # It holds the directory's lock, for which a thread of the daemon waits: that dies later.
    if name not in ("removal of a tree by attribute", "emptying the trash")
]


def kill(host: Host) -> None:
    """kill -9 of its daemon, and wait for the next one to serve."""
    host.kill_only()
    host.adopt()


def session_of(host: Host) -> int:
    told = json.loads(os.getxattr(host.path, "user.aifs.hosts"))["hosts"]
    (session,) = [one["session"] for one in told if one["is_this"]]
    return int(session)


def is_locked(path: Path, space: str) -> bool:
    """For a program that asks there."""
    lock = fcntl.flock if space == "flock" else fcntl.lockf
    with open(path, "r+b") as file:
        try:
            lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False


def test_programs_go_on_with_their_files(kept: Cluster) -> None:
    a, b = kept
    session = session_of(a)
    top, there = a.path / "top", b.path / "top"
    top.mkdir()
    until(there.is_dir, "it is seen")
    (top / "read").write_bytes(b"r" * 100_000)
    (there / "far").write_bytes(b"f" * 50_000)
    reading, far = os.open(top / "read", os.O_RDONLY), os.open(top / "far", os.O_RDONLY)
    appending = os.open(top / "appended", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    gone = os.open(top / "gone", os.O_CREAT | os.O_RDWR)
    os.write(gone, b"g" * 70_000)
    os.unlink(top / "gone")
    open_there = os.open(there / "theirs", os.O_CREAT | os.O_RDWR)
    os.write(open_there, b"t" * 1000)
    until((top / "theirs").exists, "it is seen")
    by_home = os.open(top / "theirs", os.O_RDWR)
    for number in range(3):
        os.write(appending, b"+")
        os.pwrite(by_home, b"A", number)
        kill((a, b, a)[number])
        assert os.pread(reading, 1 << 20, 0) == b"r" * 100_000
        assert os.pread(far, 1 << 20, 0) == b"f" * 50_000
        assert os.pread(gone, 1 << 20, 0) == b"g" * 70_000
        os.pwrite(gone, b"g", number)
        assert os.fstat(gone).st_nlink == 0
        (top / f"{number}").write_bytes(b"new")
        os.rename(top / f"{number}", top / f"{number}.renamed")
        assert (there / f"{number}.renamed").read_bytes() == b"new"
        os.pwrite(open_there, b"B", 999 - number)
        os.fsync(by_home)
        os.fsync(open_there)
        assert os.pread(by_home, 1000, 0) == os.pread(open_there, 1000, 0)
    for fd in (reading, far, appending, gone, open_there, by_home):
        os.close(fd)
    assert (there / "appended").read_bytes() == b"+++"
    assert (top / "theirs").read_bytes() == b"AAA" + b"t" * 994 + b"BBB"
    assert session_of(a) == session


@pytest.mark.parametrize("space", ["fcntl", pytest.param("flock", marks=pytest.mark.sweep)])
def test_locks_stay(kept: Cluster, space: str) -> None:
    a, b = kept
    lock = fcntl.flock if space == "flock" else fcntl.lockf
    for name in ("here", "far"):
        (a.path / name).write_bytes(b"x")
        until((b.path / name).exists, "it is seen")
    with open(b.path / "far", "r+b") as file:  # b is the home of its locks
        lock(file, fcntl.LOCK_EX)
    here, far = open(a.path / "here", "r+b"), open(a.path / "far", "r+b")
    for file in (here, far):
        lock(file, fcntl.LOCK_EX)
    got = threading.Event()
    waiting = open(b.path / "here", "r+b")

    def wait() -> None:
        lock(waiting, fcntl.LOCK_EX)
        got.set()

    thread = threading.Thread(target=wait)
    thread.start()
    for host in (a, b, a):
        assert is_locked(b.path / "far", space) and not got.is_set()
        kill(host)
        assert is_locked(b.path / "far", space) and not got.is_set()
    lock(here, fcntl.LOCK_UN)
    assert got.wait(30)
    thread.join()
    kill(b)
    assert is_locked(a.path / "here", space)
    waiting.close()
    far.close()
    until(lambda: not is_locked(b.path / "far", space), "it is free")
    here.close()
    assert not is_locked(a.path / "here", space)


@pytest.mark.sweep
@pytest.mark.parametrize("maker", ["a", "b"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", NAMES)
def test_a_request_is_done_once(
    name: str,
    when: str,
    maker: str,
    scratch: Path,
    postgres_servers: postgres.Servers,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``maker``: of the directory, in which it need not ask the database."""
    operation, program = REQUESTS[name]
    now = scratch / "now"
    monkeypatch.setenv("KILL_AT", f"{when}:{operation}:{now}")
    with many_hosts(scratch, postgres_servers.get("wheel"), mounted=False) as cluster:
        a, b = cluster
        for host in cluster:
            host.options = KEPT
        if name in ("write", "read"):
            a.options = (*KEPT, "burst.passthrough=false")
        a.module = "tests.support.killed_mount"
        for host in cluster:
            host.mount()
        top = a.path / "top"
        (top if maker == "a" else b.path / "top").mkdir()
        until(top.is_dir, "it is seen")
        (top / "old").write_bytes(b"old")
        os.setxattr(top / "old", "user.a", b"1")
        (top / "other").write_bytes(b"other")
        (top / "directory").mkdir()
        if name in TREES:
            (top / "directory" / "inside").write_bytes(b"inside")
        if name == "restore":
            (top / "removed").mkdir()
            (top / "removed" / "file").write_bytes(b"file")
            os.setxattr(top, "user.aifs.trash", b"1h")
        if name == "setattr":
            os.stat(top / "old")
        now.touch()
        program(top)
        if not a.is_alive():
            a.follow()
        (top / "last").write_bytes(b"")
        os.rename(top / "last", top / "last.renamed")
        assert sorted(os.listdir(b.path / "top")) == sorted(os.listdir(top))


COUNTER = """
import errno, fcntl, os, sys, time
top, me, stop = sys.argv[1:]
count = added = 0
while not os.path.exists(stop) or not count:
    with open(f"{top}/counter", "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        number = int(file.read() or b"0")
        file.seek(0)
        file.write(b"%d" % (number + 1))
        fcntl.lockf(file, fcntl.LOCK_UN)
    count += 1
    try:
        os.close(os.open(f"{top}/won-{count}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        with open(f"{top}/log-{me}", "ab", buffering=0) as log:
            log.write(b"%d\\n" % count)
    except FileExistsError:
        pass
    except OSError as error:  # a directory that several hosts change all the time
        if error.errno != errno.ESTALE:
            raise
        count -= 1
        added += 1
print(count + added, count)
"""
"""Adds to one counter under a lock, and makes files that only one host can make."""


@pytest.mark.parametrize(
    "kills", [pytest.param(8, marks=pytest.mark.sweep), pytest.param(60, marks=pytest.mark.long)]
)
def test_programs_of_two_hosts_in_a_storm_of_kills(
    kills: int, kept: Cluster, scratch: Path
) -> None:
    stop, rng = scratch / "stop", random.Random(kills)
    shared = kept[0].path / "shared"
    shared.mkdir()
    (shared / "counter").write_bytes(b"0")
    until((kept[1].path / "shared" / "counter").exists, "it is seen")
    commands = [
        [
            sys.executable,
            "-m",
            "tests.support.outcomes",
            name,
            str(host.path / f"{name}-{host.name}"),
        ]
        for host in kept
        for name in ("mixed", "sqlite", "git", "torch")
    ]
    commands += [
        [sys.executable, "-c", COUNTER, str(host.path / "shared"), host.name] for host in kept
    ]
    programs = [
        subprocess.Popen([*command, str(stop)], stdout=subprocess.PIPE, text=True)
        for command in commands
    ]
    try:
        for number in range(kills):
            time.sleep(rng.uniform(0.2, 2))  # a moment that nothing else decides
            kill(kept[number % 2])
            assert not [program.args for program in programs if program.poll() is not None]
        stop.touch()
        said = [program.communicate(timeout=600)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
            program.wait()
    assert all(not program.returncode for program in programs)
    counts = [[*map(int, text.split())] for text in said[-2:]]
    assert int((shared / "counter").read_bytes()) == sum(added for added, _ in counts)
    logs = [set((shared / f"log-{host.name}").read_text().split()) for host in kept]
    assert not logs[0] & logs[1] and len(logs[0] | logs[1]) == max(made for _, made in counts)


def test_it_ends_when_its_session_has_ended(
    scratch: Path, postgres_servers: postgres.Servers
) -> None:
    """Another host has ended it meanwhile."""
    with many_hosts(scratch, postgres_servers.get("wheel"), mounted=False) as cluster:
        a, b = cluster
        a.options = ("kernel.restarts=2", "host.restarts=2")
        a.expected += [
            r"the mount ends",
            r"the daemon stops: the session \d+ of this host has ended",
        ]
        b.expected += [r"of host a is ended"]
        for host in cluster:
            host.mount()
        file = os.open(a.path / "file", os.O_CREAT | os.O_RDWR)
        (keeper,) = keepers(a)
        os.kill(keeper, signal.SIGSTOP)
        a.kill_only()
        aifs("host", "fence", b.path, "a")
        os.kill(keeper, signal.SIGCONT)
        with pytest.raises(OSError) as raised:
            os.fstat(file)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        with suppress(OSError):
            os.close(file)
        subprocess.run(["umount", "-l", a.path], check=True, timeout=TIMEOUT_S)
        a.mount()
        assert (a.path / "file").read_bytes() == b""
