"""Hosts that share a store, as real mounts in network namespaces: names, and hosts that die, hang,
are cut off, and come back."""

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.hosts import Cluster, Host, many_hosts, until
from tests.support.mounts import aifs, mounted_store
from tests.support.postgres import Postgres


@pytest.fixture
def two(scratch: Path, a_postgres: Postgres) -> Iterator[Cluster]:
    with many_hosts(scratch, a_postgres) as cluster:
        yield cluster


ROUNDS = 200


def rounds(request: pytest.FixtureRequest) -> int:
    return 20 * ROUNDS if request.config.getoption("--long") else ROUNDS


@contextmanager
def working(host: Host, name: str) -> Iterator[Callable[[], int]]:
    """Somebody makes, renames and removes files in a directory of a host all the time. How many
    rounds that were; no operation may fail."""
    directory, count, ended, failed = host.path / name, 0, threading.Event(), []

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


def test_names_made_on_one_host_are_on_the_other(two: Cluster) -> None:
    a, b = two
    for one, other in ((a, b), (b, a)):
        made = one.path / one.name
        made.mkdir(mode=0o750)
        (made / "file").write_bytes(b"content")
        os.symlink("file", made / "link")
        os.setxattr(made / "file", "user.key", b"value")
        there = other.path / one.name
        assert sorted(os.listdir(there)) == ["file", "link"]
        assert there.stat().st_mode & 0o777 == 0o750
        assert (there / "link").read_bytes() == b"content"
        assert os.getxattr(there / "file", "user.key") == b"value"


def test_hosts_are_shown(two: Cluster) -> None:
    a, b = two
    until(lambda: two.live(a) == two.live(b) == {"a", "b"}, "they know of each other")
    told = json.loads(aifs("hosts", a.path, "--json").stdout)["hosts"]
    assert [one["name"] for one in told] == ["a", "b"]
    assert [one["has_role"] for one in told] == [True, False]
    assert [one["is_this"] for one in told] == [True, False]
    assert told[0]["address"] == f"{a.namespace.address}:7947"
    lines = aifs("hosts", b.path).stdout.splitlines()
    assert lines[0].startswith("host") and lines[2].startswith("b (this one)")
    assert "2 hosts" in aifs("status", a.path).stdout
    b.unmount()
    until(lambda: two.live(a) == {"a"}, "b has left")


def test_nothing_is_seen_in_the_state_before(two: Cluster, request: pytest.FixtureRequest) -> None:
    """What rename, unlink, chmod, mkdir and rmdir have done is there on the other host when they
    have returned, whatever its kernel had in mind."""
    a, b = two
    (a.path / "d").mkdir()
    (a.path / "d" / "old").write_bytes(b"")
    until((b.path / "d" / "old").exists, "what is made is seen")
    stale = []
    for number in range(rounds(request)):
        one, other = ((a, b), (b, a))[number % 2]
        here, there = one.path / "d", other.path / "d"
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


def test_both_hosts_work_in_one_directory(two: Cluster) -> None:
    a, b = two
    with working(a, "a"), working(b, "b"):
        for number in range(50):
            for host in two:
                (host.path / f"{host.name}{number}").write_bytes(b"x")
                (host.path / f"{host.name}{number}").rename(host.path / f"{host.name}.{number}")
    wanted = {f"{name}.{number}" for name in "ab" for number in range(50)} | {"a", "b"}
    assert set(os.listdir(a.path)) == set(os.listdir(b.path)) == wanted


def test_an_exclusive_create_is_of_one_host(two: Cluster) -> None:
    a, b = two
    made: dict[str, set[int]] = {"a": set(), "b": set()}

    def make(host: Host) -> None:
        for number in range(100):
            try:
                os.close(os.open(host.path / str(number), os.O_CREAT | os.O_EXCL))
                made[host.name].add(number)
            except FileExistsError:
                pass

    threads = [threading.Thread(target=make, args=(host,)) for host in two]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made["a"] | made["b"] == set(range(100)) and not made["a"] & made["b"]
    assert set(os.listdir(b.path)) == set(map(str, range(100)))


LONG = pytest.mark.long


@pytest.mark.parametrize(
    "how", ["killed", pytest.param("stopped", marks=LONG), pytest.param("cut off", marks=LONG)]
)
def test_others_go_on_without_a_host(two: Cluster, how: str) -> None:
    """Who waits for what it has shown waits for its lease at most. Who wakes up after that changes
    nothing any more, and says so."""
    a, b = two
    (a.path / "shared").mkdir()
    with working(b, "shared") as count:
        goes_on(count, "b")
        if how == "killed":
            a.kill()
        elif how == "stopped":
            a.signal(signal.SIGSTOP)
        else:
            a.namespace.cut()
        until(lambda: two.live(b) == {"b"}, "the session of a is over")
        goes_on(count, "b")
    (b.path / "after").write_bytes(b"by b")
    (b.path / "shared").rmdir()
    if how == "killed":
        a.mount()
        until(lambda: two.live(b) == {"a", "b"}, "a is back")
        assert (a.path / "after").read_bytes() == b"by b" and not (a.path / "shared").exists()
        return
    if how == "stopped":
        a.signal(signal.SIGCONT)
    else:
        a.namespace.mend()
    a.wait_for_log(r"session .*has ended")
    a.wait_for_end()
    a.expected.append("")  # what it was doing has failed
    assert os.listdir(b.path) == ["after"] and not a.is_mounted()
    a.mount()
    assert os.listdir(a.path) == ["after"]


def test_a_host_that_is_away_for_less_than_its_lease_goes_on(two: Cluster) -> None:
    a, b = two
    (a.path / "seen").write_bytes(b"")
    until((b.path / "seen").exists, "what is made is seen")
    b.signal(signal.SIGSTOP)
    renaming = threading.Thread(target=(a.path / "seen").rename, args=(a.path / "renamed",))
    renaming.start()
    b.signal(signal.SIGCONT)
    renaming.join()
    assert os.listdir(b.path) == ["renamed"]
    assert two.live(a) == {"a", "b"}


def test_a_host_is_fenced(two: Cluster) -> None:
    a, b = two
    until(lambda: two.live(b) == {"a", "b"}, "they know of each other")
    assert aifs("hosts", b.path, "--fence", "a").stdout == "the session of host a has ended\n"
    a.wait_for_log(r"session .*has ended \(fenced by order, on host b\)")
    assert two.live(b) == {"b"}
    refused = aifs("hosts", b.path, "--fence", "nobody", check=False)
    assert refused.returncode == 1
    assert "host nobody does not have the store mounted" in refused.stderr
    b.expected.append("the session .* of host a is ended: fenced")
    a.expected.append("")
    a.abandon()


def test_a_name_is_of_one_host(two: Cluster, scratch: Path) -> None:
    third = two.add("a2")
    text = third.source.read_text().replace("name: a2", "name: a")
    third.source.write_text(text)
    refused = aifs("mount", third.source, third.path, inside=third.inside, check=False)
    assert refused.returncode == 5, refused.stderr
    assert "a host named a has the store mounted" in refused.stderr


@pytest.mark.parametrize("kill", [False, pytest.param(True, marks=LONG)], ids=["stopped", "killed"])
def test_the_database_is_restarted(two: Cluster, kill: bool) -> None:
    """Operations wait for it; none fails."""
    a, b = two
    with working(a, "a") as in_a, working(b, "b") as in_b:
        goes_on(in_a, "a")
        goes_on(in_b, "b")
        two.postgres.restart(kill=kill)
        goes_on(in_a, "a")
        goes_on(in_b, "b")
    assert sorted(os.listdir(a.path)) == sorted(os.listdir(b.path)) == ["a", "b"]
    for host in two:
        host.expected.append(r"metadata: ")


def test_one_host_alone_has_no_hosts(scratch: Path) -> None:
    with mounted_store(scratch) as store:
        refused = aifs("hosts", store.path, check=False)
        assert refused.returncode == 4 and "its store has one host" in refused.stderr
