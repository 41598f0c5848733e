"""Random operations through the mounts of two and three hosts at once: one namespace explains what
they have seen, also if a host dies, hangs, is cut off, or the database does.
"""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.histories import History, require_explained
from tests.support.hosts import Both, Cluster, Host, Settings, many_hosts, require_same, until
from tests.support.players import Going, players, playing, writers
from tests.support.postgres import Postgres
from tests.support.registers import Register

pytestmark = pytest.mark.sweep

LONG = pytest.mark.long


def goes_on(going: Going, history: History, host: int, count: int = 40) -> None:
    """The host does so many operations more."""
    before = history.count(host)
    going(lambda: history.count(host) >= before + count, f"host {host} goes on")


def steps(request: pytest.FixtureRequest) -> int:
    return 1000 if request.config.getoption("--long") else 150


SEEDS = [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 8))]


@pytest.mark.parametrize("seed", SEEDS)
def test_one_namespace_explains_what_mounts_see(
    two: Cluster, both: Both, seed: int, request: pytest.FixtureRequest
) -> None:
    history = History()
    with playing(players(both, history, seed)) as going:
        for number in (1, 2):
            goes_on(going, history, number, steps(request))
    require_explained(history.events, has_kernel=True)
    require_same(both)


@LONG
@pytest.mark.parametrize("seed", range(4))
def test_one_namespace_explains_what_three_mounts_see(
    scratch: Path, a_postgres: Postgres, seed: int
) -> None:
    with many_hosts(scratch, a_postgres, 3) as hosts:
        history = History()
        with playing(players(hosts.paths, history, seed)) as going:
            for number in (1, 2, 3):
                goes_on(going, history, number, 1000)
        require_explained(history.events, has_kernel=True)
        require_same(hosts.paths)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_opens_a_file_sees_what_was_closed(
    two: Cluster, both: Both, seed: int, request: pytest.FixtureRequest
) -> None:
    registers = [Register(f"r{number}") for number in range(3)]
    history = History()
    with playing(writers(both, registers, history, seed, 2)) as going:
        for one in registers:
            going(lambda one=one: len(one.versions) > steps(request) / 6, "files are changed")  # type: ignore[misc]
    require_same(both)
    for path in both:
        for one in registers:
            one.check(len(one.versions) - 1, (path / one.name).read_bytes())


IMPATIENT: Settings = {"host": {"home_wait": "1s"}, "burst": {"drain_delay": "100ms"}}
"""Bytes that a lost host alone has are soon told to be lost, and few are."""


def killed(host: Host) -> None:
    host.kill()


def stopped(host: Host) -> None:
    host.signal(signal.SIGSTOP)


def cut_off(host: Host) -> None:
    host.namespace.cut()


@LONG
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("fault", [killed, stopped, cut_off])
def test_others_go_on_when_a_host_is_lost(
    scratch: Path, a_postgres: Postgres, fault: Callable[[Host], None], seed: int
) -> None:
    """A host that wakes up harms nothing, and tells nothing old."""
    with many_hosts(scratch, a_postgres, 3, settings=IMPATIENT) as hosts:
        a, b, c = hosts
        history = History()
        with playing(players(hosts.paths, history, seed)) as going:
            for number in (1, 2, 3):
                goes_on(going, history, number)
            history.dead.add(1)
            fault(a)
            until(lambda: hosts.live(b) == {"b", "c"}, "the session of a is over")
            goes_on(going, history, 2)
            goes_on(going, history, 3)
            if fault is not killed:
                a.signal(signal.SIGCONT)
                a.namespace.mend()
                a.wait_for_log(r"session .*has ended")
                a.wait_for_end()
            goes_on(going, history, 2)
        require_explained(history.events, has_kernel=True)
        a.expected.append("")  # what it was doing has failed
        a.abandon()
        a.mount()
        require_same(hosts.paths)


@LONG
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("how", ["killed", "restarted", "paused"])
def test_nothing_fails_while_the_database_is_away(
    scratch: Path, a_postgres: Postgres, how: str, seed: int
) -> None:
    with many_hosts(scratch, a_postgres) as hosts:
        history = History()
        with playing(players(hosts.paths, history, seed)) as going:
            for _ in range(3):
                goes_on(going, history, 1)
                goes_on(going, history, 2)
                if how == "paused":
                    a_postgres.pause()
                    threading.Event().wait(1)
                    a_postgres.go_on()
                else:
                    a_postgres.restart(kill=how == "killed")
            goes_on(going, history, 1)
            goes_on(going, history, 2)
        require_explained(history.events, has_kernel=True)
        require_same(hosts.paths)
        for host in hosts:
            host.expected.append("metadata: ")


STRIPED: Settings = {"layout": {"pack_below": 0}}
"""Files of all sizes have objects of their own."""

POINTS: dict[str, Settings] = {
    "hosts.commit.before": {},
    "hosts.commit.done": {},
    "hosts.commit.applied": {},
    "vfs.burst.entered": {},
    "vfs.burst.synced": {},
    "vfs.drain.copied": STRIPED,
    "vfs.drain.flipped": {},
    "vfs.collect.erased": {},
    "vfs.collect.deleted": {},
    "vfs.publish.durable": {},
    "vfs.publish.shown": {},
    "vfs.stage.copied": {},
}
IN_PLACE = ["vfs.fsync.synced", "vfs.truncate.recorded"]
"""Where files are that are changed on the data servers."""
UNSTAGED: Settings = {
    **STRIPED,
    "burst": {"drain_delay": "100ms", "stage_for_write": "100KiB"},
}


@LONG
@pytest.mark.parametrize("point", [*POINTS, *IN_PLACE])
def test_a_host_dies_at_a_crash_point(scratch: Path, a_postgres: Postgres, point: str) -> None:
    """While all change names, and the same files in place. What was acknowledged is there when it
    is back."""
    settings = {**IMPATIENT, **POINTS.get(point, UNSTAGED)}
    with many_hosts(scratch, a_postgres, 2, mounted=False, settings=settings) as hosts:
        a, b = hosts
        armed = scratch / "armed"
        plain = a.inside
        a.inside = (*plain, "env", f"DIE_AT={point}:{armed}")
        a.module = "tests.support.dying_mount"
        for host in hosts:
            host.mount()
        if point in IN_PLACE:
            os.setxattr(a.path, "user.aifs.tier", b"capacity")
        history, registers = History(), [Register(f"r{number}") for number in range(3)]
        making = [
            *players(hosts.paths, history, point),
            *writers(hosts.paths, registers, history, point),
        ]
        with playing(making) as going:
            goes_on(going, history, 1)
            goes_on(going, history, 2)
            history.dead.add(1)
            armed.touch()
            going(lambda: not a.is_alive(), f"{a.name} reaches {point}")
            a.abandon()
            a.inside, a.module = plain, "aifs.cli.main"
            goes_on(going, history, 2)
            a.mount()
            goes_on(going, history, 2)
        require_explained(history.events, has_kernel=True)
        require_same(hosts.paths)
        for one in registers:
            if not one.is_lost and one.versions[-1]:
                for host in hosts:
                    one.check(len(one.versions) - 1, (host.path / one.name).read_bytes())
        for host in hosts:
            host.expected.append("its newest bytes are on host")
