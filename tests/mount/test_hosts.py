"""Hosts that share a store, as real mounts in network namespaces: names, and hosts that die, hang,
are cut off, and come back."""

import fcntl
import json
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aifs.core import files
from tests.support.hosts import Both, Cluster, until
from tests.support.mounts import aifs, mounted_store

ROUNDS = 100
CONTENT = b"what was synced" * 100_000


def rounds(request: pytest.FixtureRequest) -> int:
    return 40 * ROUNDS if request.config.getoption("--long") else ROUNDS


@contextmanager
def working(directory: Path) -> Iterator[Callable[[], int]]:
    """Somebody makes, renames and removes files in a directory all the time. How many rounds that
    were; no operation may fail."""
    count, ended, failed = 0, threading.Event(), []

    def work() -> None:
        nonlocal count
        try:
            while not ended.is_set():
                (directory / "new").write_bytes(b"%d" % count)
                (directory / "new").rename(directory / "named")
                (directory / "named").unlink()
                count += 1
        except BaseException as error:  # noqa: BLE001 (raised below)
            failed.append(error)

    directory.mkdir(exist_ok=True)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield lambda: count
    finally:
        ended.set()
        thread.join()
    if failed:
        raise failed[0]


def goes_on(count: Callable[[], int], host: str) -> None:
    before = count()
    until(lambda: count() > before + 3, f"host {host} goes on")


def test_names_made_on_one_host_are_on_the_other(both: Both) -> None:
    for number in range(2):
        one, other = both[number], both[1 - number]
        made = one / f"{number}"
        made.mkdir(mode=0o750)
        (made / "file").write_bytes(b"content")
        os.symlink("file", made / "link")
        os.setxattr(made / "file", "user.key", b"value")
        there = other / f"{number}"
        assert sorted(os.listdir(there)) == ["file", "link"]
        assert there.stat().st_mode & 0o777 == 0o750
        assert (there / "link").read_bytes() == b"content"
        assert os.getxattr(there / "file", "user.key") == b"value"


def test_hosts_are_shown(two: Cluster) -> None:
    a, b = two
    until(lambda: two.live(a) == two.live(b) == {"a", "b"}, "they know of each other")
    told = json.loads(aifs("host", "ls", a.path, "--json").stdout)["hosts"]
    assert [one["name"] for one in told] == ["a", "b"]
    assert [one["has_role"] for one in told] == [True, False]
    assert [one["is_this"] for one in told] == [True, False]
    assert told[0]["address"] == f"{a.namespace.address}:7947"
    lines = aifs("host", "ls", b.path).stdout.splitlines()
    assert lines[0].startswith("host") and lines[2].startswith("b (this one)")
    assert "2 hosts" in aifs("status", a.path).stdout
    with two.another("guest") as guest:
        guest.mount()
        until(lambda: two.live(a) == {"a", "b", "guest"}, "it has come")
    until(lambda: two.live(a) == {"a", "b"}, "it has left")


@pytest.mark.sweep
def test_nothing_is_seen_in_the_state_before(both: Both, request: pytest.FixtureRequest) -> None:
    """What rename, unlink, chmod, mkdir and rmdir have done is there on the other host when they
    have returned, whatever its kernel had in mind."""
    (both[0] / "old").write_bytes(b"")
    until((both[1] / "old").exists, "what is made is seen")
    stale = []
    for number in range(rounds(request)):
        here, there = both[number % 2], both[1 - number % 2]
        names = set(os.listdir(there)), (there / "old").exists(), (there / "new").exists()
        assert names == ({"old"}, True, False)
        (here / "old").rename(here / "new")
        if (there / "old").exists() or not (there / "new").exists():
            stale.append((number, "rename"))
        (here / "new").chmod(0o600 + number % 8)
        if (there / "new").stat().st_mode & 0o777 != 0o600 + number % 8:
            stale.append((number, "chmod"))
        (here / "new").unlink()
        if (there / "new").exists() or os.listdir(there):
            stale.append((number, "unlink"))
        (here / "old").write_bytes(b"%d" % number)
        until((there / "old").exists, "what is made is seen")
    assert not stale


@pytest.mark.sweep
@pytest.mark.parametrize("ends", ["fsync", "close"])
def test_what_is_written_to_a_mapped_page_twice_is_seen(both: Both, ends: str) -> None:
    """The kernel changes the file's mtime when a page becomes writable, and not when it is written
    to after that."""
    (both[0] / ends).write_bytes(bytes(8192))
    until((both[1] / ends).exists, "it is seen")
    fd = os.open(both[0] / ends, os.O_RDWR)  # of a new file close(2) does not wait

    def until_told() -> bytes:
        if ends == "fsync":
            os.fsync(fd)
            both[0].chmod(0o700 + count)  # returns when this, and what was before, is shown
        else:
            os.close(os.dup(fd))
        return (both[1] / ends).read_bytes()[:7]

    with mmap.mmap(fd, 8192) as mapped:
        for count in range(5):
            mapped[:7] = b"first %d" % count
            os.close(os.dup(fd))
            assert (both[1] / ends).read_bytes()[:7] == b"first %d" % count
            mtime_ns = os.fstat(fd).st_mtime_ns
            mapped[:7] = b"later %d" % count
            assert os.fstat(fd).st_mtime_ns == mtime_ns
            assert until_told() == b"later %d" % count
    os.close(fd)


@pytest.mark.sweep
@pytest.mark.parametrize("flag", ["open", "fcntl"])
def test_both_hosts_append_where_nothing_is_passed_through(both: Both, flag: str) -> None:
    """The kernel has a page locked while it waits for an append: who had it dropped before that was
    answered hung for ever, and so did the other host."""
    os.setxattr(both[0], "user.aifs.tier", b"capacity")
    (both[0] / "log").write_bytes(b"x" * 100)
    until((both[1] / "log").exists, "it is seen")
    asked = os.O_APPEND if flag == "open" else 0
    fds = [os.open(place / "log", os.O_RDWR | asked) for place in both]
    for fd in fds:
        fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)

    told = [[b"%d of %d\n" % (number, host) for number in range(40)] for host in range(2)]

    def append(fd: int, lines: list[bytes]) -> None:
        for line in lines:
            assert os.write(fd, line) == len(line)
        os.close(fd)

    threads = [
        threading.Thread(target=append, args=each, daemon=True)
        for each in zip(fds, told, strict=True)
    ]
    for thread in threads:
        thread.start()
    until(lambda: not any(thread.is_alive() for thread in threads), "both get on")
    for place in both:
        found = (place / "log").read_bytes()[100:].splitlines(keepends=True)
        assert len(found) == 80
        for host in range(2):
            assert [line for line in found if line.endswith(b"%d\n" % host)] == told[host]


def test_what_two_hosts_append_to_a_record_of_a_job_is_all_there(both: Both) -> None:
    """No request says that a write is to go to the end (RWF_APPEND): only how the file was opened
    is told."""
    fds = [files.open_file(str(place / "record"), create=True, append=True) for place in both]
    for number in range(20):
        for fd in fds:
            files.append(fd, b"%d\n" % number)
    for fd in fds:
        files.close_file(fd)
    for place in both:
        told = sorted(map(int, (place / "record").read_text().split()))
        assert told == sorted([*range(20), *range(20)])


@pytest.mark.sweep
def test_what_is_written_by_a_mapping_is_not_lost_when_the_other_host_has_written(
    both: Both,
) -> None:
    """The host passes programs through to a copy as long as one of them has it open: the other
    host's bytes must get there, too."""
    here, there = both
    (here / "file").write_bytes(b"older" * 100_000)
    aifs("drain", here / "file")
    with open(here / "file", "rb"):
        with open(there / "file", "r+b") as writer:
            writer.write(b"newer")
        with open(here / "file", "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
            assert mapped[:10] == b"newerolder"
            mapped[5:10] = b"again"
            mapped.flush()
        assert (there / "file").read_bytes()[:15] == b"neweragainolder"


@pytest.mark.sweep
def test_both_hosts_work_in_one_directory(both: Both) -> None:
    here, there = both
    with working(here / "a"), working(there / "b"):
        for number in range(20):
            for name, path in zip("ab", both, strict=True):
                (path / f"{name}{number}").write_bytes(b"x")
                (path / f"{name}{number}").rename(path / f"{name}.{number}")
    wanted = {f"{name}.{number}" for name in "ab" for number in range(20)} | {"a", "b"}
    assert set(os.listdir(here)) == set(os.listdir(there)) == wanted


@pytest.mark.sweep
def test_an_exclusive_create_is_of_one_host(both: Both) -> None:
    made: dict[Path, set[int]] = {path: set() for path in both}

    def make(path: Path) -> None:
        for number in range(100):
            try:
                os.close(os.open(path / str(number), os.O_CREAT | os.O_EXCL))
                made[path].add(number)
            except FileExistsError:
                pass

    threads = [threading.Thread(target=make, args=(path,)) for path in both]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    of_one, of_other = made.values()
    assert of_one | of_other == set(range(100)) and not of_one & of_other
    assert set(os.listdir(both[1])) == set(map(str, range(100)))


LONG = pytest.mark.long


@pytest.mark.sweep
@pytest.mark.parametrize(
    "how", ["killed", pytest.param("stopped", marks=LONG), pytest.param("cut off", marks=LONG)]
)
def test_others_go_on_without_a_host(two: Cluster, both: Both, how: str) -> None:
    """Who waits for what it has shown waits for its lease at most. Who wakes up after that changes
    nothing any more, and says so."""
    here, there = both
    (here / "shared").mkdir()
    name = how.split()[0]
    with two.another(name) as c:
        c.mount()
        of_c = c.path / here.name
        until((of_c / "shared").exists, "what is made is seen")
        with working(there / "shared") as count:
            goes_on(count, "b")
            if how == "killed":
                file = os.open(of_c / "synced", os.O_WRONLY | os.O_CREAT)
                os.setxattr(of_c / "synced", "user.aifs.mirror", b"1")
                os.write(file, CONTENT)
                os.fsync(file)
                c.kill()
                with suppress(OSError):  # its mount has gone
                    os.close(file)
            elif how == "stopped":
                c.signal(signal.SIGSTOP)
            else:
                c.namespace.cut()
            until(lambda: two.live(two[1]) == {"a", "b"}, "the session of c is over")
            goes_on(count, "b")
        if how == "killed":
            assert (there / "synced").read_bytes() == CONTENT  # it has a mirror
        (there / "after").write_bytes(b"by b")
        (there / "shared").rmdir()
        if how == "killed":
            c.mount()
            until(lambda: two.live(two[1]) == {"a", "b", name}, "it is back")
            assert (of_c / "after").read_bytes() == b"by b" and not (of_c / "shared").exists()
            return
        if how == "stopped":
            c.signal(signal.SIGCONT)
        else:
            c.namespace.mend()
        c.wait_for_log(r"session .*has ended")
        c.wait_for_end()
        c.expected.append("")  # what it was doing has failed
        assert os.listdir(there) == ["after"] and not c.is_mounted()
        c.mount()
        assert os.listdir(of_c) == ["after"]


def test_a_host_that_is_away_for_less_than_its_lease_goes_on(two: Cluster, both: Both) -> None:
    here, there = both
    (here / "seen").write_bytes(b"")
    until((there / "seen").exists, "what is made is seen")
    two[1].signal(signal.SIGSTOP)
    renaming = threading.Thread(target=(here / "seen").rename, args=(here / "renamed",))
    renaming.start()
    two[1].signal(signal.SIGCONT)
    renaming.join()
    assert os.listdir(there) == ["renamed"]
    assert two.live(two[0]) == {"a", "b"}


def test_a_host_is_fenced(two: Cluster) -> None:
    b = two[1]
    with two.another("hanging") as host:
        host.mount()
        until(lambda: two.live(b) == {"a", "b", "hanging"}, "they know of each other")
        said = aifs("host", "fence", b.path, "hanging").stdout
        assert said == "the session of host hanging has ended\n"
        b.expected.append("the session .* of host hanging is ended: fenced")
        host.wait_for_log(r"session .*has ended \(fenced by order, on host b\)")
        assert two.live(b) == {"a", "b"}
        host.expected.append("")
        host.wait_for_end()
    refused = aifs("host", "fence", b.path, "nobody", check=False)
    assert refused.returncode == 1
    assert "host nobody does not have the store mounted" in refused.stderr


def test_a_name_is_of_one_host(two: Cluster) -> None:
    with two.another("a2") as third:
        text = third.source.read_text().replace("name: a2", "name: a")
        third.source.write_text(text)
        refused = aifs("mount", third.source, third.path, inside=third.inside, check=False)
    assert refused.returncode == 5, refused.stderr
    assert "a host named a has the store mounted" in refused.stderr


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=LONG)], ids=["stopped", "killed"])
def test_the_database_is_restarted(two: Cluster, both: Both, kill: bool) -> None:
    """Operations wait for it; none fails."""
    here, there = both
    with working(here / "a") as in_a, working(there / "b") as in_b:
        goes_on(in_a, "a")
        goes_on(in_b, "b")
        two.postgres.restart(kill=kill)
        goes_on(in_a, "a")
        goes_on(in_b, "b")
    assert sorted(os.listdir(here)) == sorted(os.listdir(there)) == ["a", "b"]
    for host in two:
        host.expected.append(r"metadata: ")


@pytest.mark.sweep
def test_one_host_alone_has_no_hosts(scratch: Path) -> None:
    with mounted_store(scratch) as store:
        refused = aifs("host", "ls", store.path, check=False)
        assert refused.returncode == 4 and "its store has one host" in refused.stderr
