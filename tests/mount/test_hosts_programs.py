"""What people do on two hosts of one store: shell tools, git, SQLite, checkpoints, logs that
somebody follows, trees that move or go while the other host is in them, locks, grouped
saves."""

import errno
import fcntl
import json
import mmap
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from aifs.client import Group, getfile, group_putfile, latest, verify
from tests.support.group_ranks import Rank
from tests.support.hosts import Both, Cluster, Host, until
from tests.support.mounts import TIMEOUT_S, aifs

ROUNDS = 14


def run(*command: object, **others: object) -> str:
    done = subprocess.run(
        [*map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        **others,  # type: ignore[call-overload]
    )
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def shown(host: Host) -> None:
    """All that the host has changed until now is there on the other one."""
    marker = host.path / f"shown-{host.name}"
    marker.touch()
    marker.unlink()


def test_a_file_that_is_closed_is_whole_on_the_other_host(two: Cluster, both: Both) -> None:
    """Large and small, new, written over, appended to."""
    for number in range(ROUNDS):
        here, there, host = both[number % 2], both[1 - number % 2], two[number % 2]
        for name, size in (("small", 100), ("large", 300_000)):
            content = b"%6d" % number * (size // 6)
            path = f"{name}{number % 7}"
            (here / path).write_bytes(content)
            shown(host)
            assert (there / path).stat().st_size == len(content), (number, name)
            assert (there / path).read_bytes() == content
            with (here / path).open("ab") as file:
                file.write(b"more")
            shown(host)
            assert (there / path).read_bytes() == content + b"more"


@pytest.mark.sweep
def test_shell_tools(two: Cluster, both: Both, tmp_path: Path) -> None:
    here, there = both
    source = tmp_path / "source"
    for number in range(30):
        (source / f"{number % 5}").mkdir(parents=True, exist_ok=True)
        (source / f"{number % 5}" / f"{number}").write_bytes(os.urandom(number * 1000))
    run("tar", "-C", source, "-cf", here / "all.tar", ".")
    (there / "unpacked").mkdir()
    run("tar", "-C", there / "unpacked", "-xf", there / "all.tar")
    shown(two[1])
    run("diff", "-r", source, here / "unpacked")
    run("cp", "-a", here / "unpacked", here / "copied")
    shown(two[0])
    run("diff", "-r", source, there / "copied")
    run("rsync", "-a", "--delete", f"{source}/", f"{there / 'synced'}/")
    shown(two[1])
    run("diff", "-r", source, here / "synced")
    (source / "1" / "1").write_bytes(b"changed")
    (source / "2" / "2").unlink()
    run("rsync", "-a", "--delete", f"{source}/", f"{here / 'synced'}/")
    shown(two[0])
    run("diff", "-r", source, there / "synced")
    run("sed", "-i", "s/changed/again/", there / "synced" / "1" / "1")
    assert (here / "synced" / "1" / "1").read_bytes() == b"again"
    run("find", there, "-type", "f", "-exec", "chmod", "600", "{}", "+")
    assert {path.stat().st_mode & 0o777 for path in here.rglob("*") if path.is_file()} == {0o600}
    run("rm", "-rf", there / "synced", there / "copied")
    assert sorted(os.listdir(here)) == ["all.tar", "unpacked"]


@pytest.mark.sweep
def test_git(two: Cluster, both: Both) -> None:
    here, there = both
    environment = {
        **os.environ,
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "safe.directory",
        "GIT_CONFIG_VALUE_0": "*",
        "GIT_CONFIG_KEY_1": "user.name",
        "GIT_CONFIG_VALUE_1": "somebody",
        "GIT_CONFIG_KEY_2": "user.email",
        "GIT_CONFIG_VALUE_2": "somebody@example.org",
    }

    def git(where: Path, *command: str) -> str:
        return run("git", "-C", where, *command, env=environment)

    git(here, "init", "-q")
    for number in range(6):
        where = (here, there)[number % 2]
        (where / f"file{number}").write_text(f"{number}\n" * 100)
        git(where, "add", ".")
        git(where, "commit", "-q", "-m", f"commit {number}")
        shown(two[number % 2])
    for where in (here, there):
        assert len(git(where, "log", "--oneline").splitlines()) == 6
        assert git(where, "status", "--porcelain") == ""
        git(where, "fsck", "--strict")
    git(there, "checkout", "-q", "-b", "other", "HEAD~3")
    shown(two[1])
    assert git(here, "branch", "--show-current").strip() == "other"
    assert sorted(path.name for path in here.glob("file*")) == ["file0", "file1", "file2"]
    git(here, "gc", "-q")
    shown(two[0])
    git(there, "fsck", "--strict")


@pytest.mark.sweep
def test_sqlite_one_host_after_the_other(two: Cluster, both: Both) -> None:
    here, there = both
    for number in range(6):
        where = (here, there)[number % 2]
        database = sqlite3.connect(where / "data.sqlite", timeout=60)
        with database:
            database.execute("create table if not exists t (n integer)")
            database.execute("insert into t values (?)", (number,))
        assert database.execute("select n from t order by n").fetchall() == [
            (n,) for n in range(number + 1)
        ]
        assert database.execute("pragma integrity_check").fetchone() == ("ok",)
        database.close()
        shown(two[number % 2])


def save(torch: Any, path: Path, step: int) -> None:
    weights = torch.arange(1 << 18, dtype=torch.float32)
    torch.save({"weights": weights, "step": step}, path.with_suffix(".new"))
    path.with_suffix(".new").rename(path)


def load(torch: Any, path: Path, step: int, mmap: bool) -> None:
    state = torch.load(path, weights_only=True, mmap=mmap)
    assert state["step"] == step
    assert torch.equal(state["weights"], torch.arange(1 << 18, dtype=torch.float32))


@pytest.mark.sweep
def test_a_checkpoint_is_saved_on_one_host_and_loaded_on_the_other(both: Both) -> None:
    torch = pytest.importorskip("torch")
    here, there = [path / "last.pt" for path in both]
    for step in range(3):
        save(torch, here, step)
        load(torch, there, step, mmap=False)
        load(torch, there, step, mmap=True)
    save(torch, there, 7)
    load(torch, here, 7, mmap=True)


def test_a_log_is_followed(both: Both) -> None:
    here, there = both
    with (here / "log").open("w") as log:
        print("line 0", file=log, flush=True)
        os.fsync(log.fileno())
        until((there / "log").exists, "the log is there")
        with subprocess.Popen(
            ["tail", "-n", "+1", "-s", "0.05", "-f", there / "log"],
            stdout=subprocess.PIPE,
            text=True,
        ) as tail:
            try:
                assert tail.stdout is not None
                for number in range(1, 4):
                    assert tail.stdout.readline() == f"line {number - 1}\n"
                    print(f"line {number}", file=log, flush=True)
            finally:
                tail.kill()


@pytest.mark.sweep
def test_a_file_that_is_read_while_the_other_host_begins_it_anew(two: Cluster, both: Both) -> None:
    """No read fails; bytes are those of some time."""
    here, there = both
    (here / "f").write_bytes(b"x" * 200_000)
    shown(two[0])
    ended, failed = threading.Event(), []

    def read() -> None:
        try:
            while not ended.is_set():
                assert not (there / "f").read_bytes().strip(b"xy\0")
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for number in range(ROUNDS):
            (here / "f").write_bytes((b"x" if number % 2 else b"y") * (1000 + number * 2000))
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def test_a_tree_moves_that_the_other_host_is_in(two: Cluster, both: Both) -> None:
    here, there = both
    (here / "a" / "b").mkdir(parents=True)
    (here / "a" / "b" / "file").write_bytes(b"content")
    shown(two[0])
    with (
        subprocess.Popen(
            ["sh", "-c", "read line; cat file; ls; read line; cat file; echo x > new; ls; ls .."],
            cwd=there / "a" / "b",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as inside,
        (there / "a" / "b" / "file").open("rb") as file,
    ):
        assert inside.stdin is not None
        inside.stdin.write(b"\n")
        inside.stdin.flush()
        (here / "a").rename(here / "moved")
        inside.stdin.write(b"\n")
        inside.stdin.close()
        assert inside.stdout is not None
        assert inside.stdout.read() == b"contentfile\ncontentfile\nnew\nb\n"
        assert file.read() == b"content"
    assert sorted(os.listdir(there / "moved" / "b")) == ["file", "new"]
    shown(two[1])
    assert (here / "moved" / "b" / "new").read_bytes() == b"x\n"
    assert not (there / "a").exists()


@pytest.mark.sweep
def test_a_tree_goes_while_the_other_host_lists_it(two: Cluster, both: Both) -> None:
    here, there = both
    for number in range(5):
        directory = here / "tree" / f"{number}"
        directory.mkdir(parents=True)
        for count in range(40):
            (directory / f"{count}").write_bytes(b"x")
    shown(two[0])
    kept = (there / "tree" / "0" / "0").open("rb")
    ended = threading.Event()
    seen = []

    def look() -> None:
        while not ended.is_set():
            done = subprocess.run(["find", there / "tree", "-ls"], capture_output=True, check=False)
            seen.append(done.stderr.replace(b"No such file or directory", b""))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        run("rm", "-rf", here / "tree")
    finally:
        ended.set()
        thread.join()
    assert os.listdir(there) == []
    assert b"rror" not in b"".join(seen) and b"tale" not in b"".join(seen)
    assert kept.read() == b"x"
    kept.close()


@pytest.mark.sweep
def test_a_file_that_is_read_while_the_other_host_removes_it(two: Cluster, both: Both) -> None:
    """Whoever has it open reads it to its end; who comes later finds nothing."""
    here, there = both
    for number in range(ROUNDS):
        content = b"%d" % number * 40_000
        (here / "f").write_bytes(content)
        shown(two[0])
        remover = threading.Thread(target=(here / "f").unlink)
        with (there / "f").open("rb") as file:
            remover.start()
            assert file.read(10) == content[:10]
            remover.join()
            assert file.read() == content[10:]
            with pytest.raises(FileNotFoundError):
                (there / "f").open("rb")


@pytest.mark.sweep
def test_a_file_that_is_opened_while_the_other_host_removes_it(two: Cluster, both: Both) -> None:
    here, there = both
    for number in range(ROUNDS):
        content = b"%d" % number * 40_000
        (here / "f").write_bytes(content)
        shown(two[0])
        remover = threading.Thread(target=(here / "f").unlink)
        remover.start()
        while True:
            try:
                assert (there / "f").read_bytes() == content
            except FileNotFoundError:
                break
        remover.join()


APPEND = """
import os, sys
path, host, reopens = sys.argv[1], sys.argv[2], sys.argv[3] == "reopens"
fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
for number in range(20 if reopens else 200):
    os.write(fd, f"{host} {number}\\n".encode())
    if reopens:
        os.close(fd)
        fd = os.open(path, os.O_WRONLY | os.O_APPEND)
os.fsync(fd)
"""
COUNT = """
import sqlite3, sys
database = sqlite3.connect(sys.argv[1], timeout=60)
for _ in range(15):
    with database:
        database.execute("update t set n = n + 1")
        database.execute("insert into log values (?, randomblob(3000))", (sys.argv[2],))
"""


def at_once(places: Both, code: str, name: str, *arguments: str) -> None:
    """Both hosts run this with a file."""
    running = [
        subprocess.Popen([sys.executable, "-c", code, place / name, host, *arguments])
        for host, place in zip("ab", places, strict=True)
    ]
    assert [process.wait(TIMEOUT_S) for process in running] == [0, 0]


@pytest.mark.sweep
def test_both_hosts_write_to_one_file_at_once(two: Cluster, both: Both) -> None:
    """A log without locks, a database with a rollback journal, and what is open on both."""
    here, there = both
    for name, lines in (("stays", 200), ("reopens", 20)):
        at_once(both, APPEND, name, name)
        for host in two:
            shown(host)
        for place in both:
            log = (place / name).read_text().splitlines()
            for who in "ab":
                numbers = [line.split()[1] for line in log if line.startswith(f"{who} ")]
                assert numbers == [str(number) for number in range(lines)], (name, who)
            assert len(log) == 2 * lines

    with sqlite3.connect(here / "data.sqlite") as database:
        database.execute("create table t (n integer)")
        database.execute("insert into t values (0)")
        database.execute("create table log (host text, what blob)")
    database.close()
    shown(two[0])
    at_once(both, COUNT, "data.sqlite")
    shown(two[0])
    database = sqlite3.connect(there / "data.sqlite")
    assert database.execute("select n from t").fetchone() == (30,)
    counts = "select host, count(*) from log group by host order by host"
    assert database.execute(counts).fetchall() == [("a", 15), ("b", 15)]
    assert database.execute("pragma integrity_check").fetchone() == ("ok",)
    database.close()

    with (here / "f").open("w+b", buffering=0) as one:
        one.write(b"0123456789" * 1000)
        shown(two[0])
        with (there / "f").open("r+b", buffering=0) as other:
            other.seek(5000)
            other.write(b"there")
            one.seek(5000)
            assert one.read(10) == b"there56789"
            os.truncate(there / "f", 6000)
            assert os.fstat(one.fileno()).st_size == os.fstat(other.fileno()).st_size == 6000
            one.seek(0, os.SEEK_END)
            one.write(b"here")
            assert os.fstat(other.fileno()).st_size == 6004
            assert other.seek(-4, os.SEEK_END) == 6000
            assert other.read(10) == b"here"
            with pytest.raises(OSError, match=os.strerror(errno.ENODEV)):
                mmap.mmap(other.fileno(), 0)  # nobody keeps such mappings alike
            with mmap.mmap(other.fileno(), 0, mmap.MAP_PRIVATE, mmap.PROT_READ) as mapping:
                assert mapping[5000:5005] == b"there"
            os.fsync(other.fileno())


def test_flock_guards_a_counter_between_hosts(two: Cluster, both: Both) -> None:
    """Who holds the lock sees what was written by the one who held it before."""
    here, there = both
    (here / "counter").write_text("0")
    (here / "lock").touch()
    shown(two[0])
    code = (
        "import fcntl, os, sys\n"
        "top = sys.argv[1]\n"
        "for _ in range(20):\n"
        "    with open(top + '/lock') as lock:\n"
        "        fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "        os.close(os.open(top + '/held', os.O_CREAT | os.O_EXCL))\n"
        "        with open(top + '/counter') as file: count = int(file.read())\n"
        "        with open(top + '/new', 'w') as file: file.write(str(count + 1))\n"
        "        os.rename(top + '/new', top + '/counter')\n"
        "        os.unlink(top + '/held')\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, path]) for path in (here, there)]
    assert [process.wait(TIMEOUT_S) for process in running] == [0, 0]
    assert (here / "counter").read_text() == (there / "counter").read_text() == "40"


def test_a_lock_is_of_one_host(two: Cluster, both: Both) -> None:
    here, there = both
    (here / "f").touch()
    shown(two[0])
    with (here / "f").open() as one, (there / "f").open() as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(one, fcntl.LOCK_UN)
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.long
def test_a_host_that_wakes_up_after_its_lease_tells_nothing_old(two: Cluster) -> None:
    """Requests wait for it: names that the bridge knows not to exist, and attributes."""
    with two.another("sleeping") as b:
        b.mount()
        _tells_nothing_old(two[0], b)


def _tells_nothing_old(a: Host, b: Host) -> None:
    (b.path / "d").mkdir()  # of its own, so the bridge knows all its names
    (b.path / "d" / "old").write_bytes(b"")
    shown(b)
    names = [b.path / "d" / "new", b.path / "d" / "old"]
    assert [path.exists() for path in names] == [False, True]
    mode = (b.path / "d").stat().st_mode
    b.signal(signal.SIGSTOP)
    stopped_s = time.monotonic()
    found = []

    def look() -> None:
        try:
            found.append([path.exists() for path in names])
            found.append((b.path / "d").stat().st_mode)
        except OSError as error:  # its session may have ended
            found.append(error)

    try:
        (a.path / "d" / "old").rename(a.path / "d" / "new")  # waits for the lease of b
        (a.path / "d").chmod(0o700)
        until(lambda: time.monotonic() > stopped_s + 6, "what the kernel of b knew is too old")
        thread = threading.Thread(target=look)
        thread.start()
        thread.join(0.5)  # it has asked, and waits
    finally:
        b.signal(signal.SIGCONT)
    thread.join()
    told = [one for one in found if not isinstance(one, OSError)]
    assert told == [[True, False], mode & ~0o777 | 0o700][: len(told)]
    b.expected.append("")
    if len(told) < len(found):
        b.wait_for_end()


@pytest.mark.sweep
def test_a_large_file_that_both_hosts_read_is_passed_on(two: Cluster, both: Both) -> None:
    data = os.urandom(24 << 20)
    (both[0] / "large").write_bytes(data)
    aifs("drain", both[0] / "large")
    aifs("evict", both[0] / "large")
    with (both[0] / "large").open("rb") as one, (both[1] / "large").open("rb") as other:
        read = [file.read(1 << 20) for file in (one, other)]
        for number, file in ((1, other), (0, one)):
            read[number] += file.read()
    assert read == [data, data]
    told = [json.loads(os.getxattr(host.path, "user.aifs.status"))["together"] for host in two]
    assert sum(each["received_bytes"] for each in told) > 0


# --- grouped saves ---

WORLD = 4
SAME = np.arange(1 << 20, dtype=np.float32)


def shard(rank: int) -> np.ndarray:
    return np.full(1 << 16, rank + 1, dtype=np.float32) + np.arange(1 << 16, dtype=np.float32)


def save_in_group(rank: int, process: Rank, directory: Path) -> None:
    group = Group("step", rank, WORLD, directory=directory, publish="step-1")
    state = {"same": SAME, "own": shard(rank)}
    group_putfile(f"rank{rank}.safetensors", state, group).durable.result(60)


@pytest.mark.sweep
def test_ranks_of_two_hosts_save_publish_and_load(two: Cluster, both: Both) -> None:
    """Each with a part of its own, and what is equal in all: that is stored once."""
    ranks = [Rank(rank, save_in_group, both[rank % 2] / "tmp") for rank in range(WORLD)]
    assert [rank.outcome() for rank in ranks] == [None] * WORLD
    for directory in both:
        assert sorted(os.listdir(directory)) == ["latest", "step-1"]
        assert latest(directory) == directory / "step-1" and verify(directory / "step-1") == []
        for rank in range(WORLD):
            loaded = getfile(directory / "step-1" / f"rank{rank}.safetensors").to_arrays()
            assert (loaded["same"] == SAME).all() and (loaded["own"] == shard(rank)).all()
        told = json.loads(aifs("group", "show", directory / "step-1", "--json").stdout)
        assert (told["state"], told["published"]) == ("durable", True)
        assert told["distinct_bytes"] < 1.02 * (SAME.nbytes + WORLD * shard(0).nbytes)
        assert told["stored_bytes"] < 1.02 * (SAME.nbytes + WORLD * shard(0).nbytes)
        assert sum(told["plan"]["servers"].values()) == told["stored_bytes"]


def test_a_rank_that_dies_is_named_on_the_other_host(two: Cluster, both: Both) -> None:
    def wait(rank: int, process: Rank) -> None:
        group = Group("step", rank, 2, directory=both[rank] / "tmp", publish="final")
        if rank == 1:
            process.reach("joined")
        group_putfile("file", {"same": SAME}, group).durable.result(60)

    dying = Rank(1, wait)
    dying.await_phase("joined")
    other = Rank(0, wait)
    shown = aifs("group", "show", both[0] / "tmp").stdout
    assert "b (ranks 1; sees to it)" in shown
    dying.kill()
    name, said, rank = other.outcome()
    assert (name, rank) == ("RankDied", 1), said
    dying.end()
    assert not (both[0] / "final").exists()


@pytest.mark.long
@pytest.mark.parametrize("how", ["killed", "cut off"])
def test_who_appends_by_way_of_a_host_that_fails(two: Cluster, both: Both, how: str) -> None:
    """What write(2) has told is there, once; what it has not is there at most once."""
    here = both[0]
    told, untold, ended = [], [], threading.Event()

    def append(fd: int) -> None:
        for number in range(10**9):
            try:
                os.write(fd, b"%d\n" % number)
                told.append(number)
                if how == "killed":  # else it would wait for longer than the lease of c
                    os.fsync(fd)
            except OSError as error:
                assert error.errno == errno.EIO
                if told[-1:] != [number]:
                    untold.append(number)
            if ended.is_set():
                return

    with two.another(how.split()[0]) as c:
        c.mount()
        there = c.path / here.name
        until(there.is_dir, "what is made is seen")
        holding = "import sys; file = open(sys.argv[1], 'ab'); sys.stdin.read()"
        home = subprocess.Popen(
            [sys.executable, "-c", holding, there / "log"], stdin=subprocess.PIPE
        )
        until((here / "log").exists, "what is made is seen")
        log = os.open(here / "log", os.O_WRONLY | os.O_APPEND)
        appending = threading.Thread(target=append, args=(log,))
        appending.start()
        until(lambda: len(told) > 20, "it appends")
        if how == "killed":
            c.kill()
        else:
            c.namespace.cut()
        until(lambda: untold, "it is told that the home does not answer")
        if how == "killed":
            home.kill()
            home.wait()
            c.mount()
        else:
            c.namespace.mend()
        before = len(told)
        until(lambda: len(told) > before + 20, "it goes on")
        ended.set()
        appending.join()
        os.close(log)
        home.communicate()
        lines = list(map(int, (here / "log").read_text().split()))
        assert len(lines) == len(set(lines)) and lines == sorted(lines)
        assert set(told) <= set(lines) <= {*told, *untold}
        c.expected.append("")
