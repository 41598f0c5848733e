"""Much at a time on the hosts of a store: random system calls on one while the other one looks; a
storm of creates, renames and removes in one directory; all that, while frames between the hosts are
late, lost, and come twice, and connections break; git, pip and SQLite.
"""

import os
import random
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from aifs.peers.transport import FRAME, PUSH, REQUEST
from scripts.machines import PEER_PORT
from tests.support.agreement import require_agreement
from tests.support.histories import History, require_explained
from tests.support.hosts import Both, Cluster, Host, many_hosts, require_same
from tests.support.meddler import Meddler, in_thread
from tests.support.mounts import TIMEOUT_S
from tests.support.players import players, playing, writers
from tests.support.posix_ops import generate
from tests.support.postgres import Postgres, Servers
from tests.support.registers import Register
from tests.support.storms import Stormer, prepare, require_manifests

pytestmark = pytest.mark.sweep

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def relayed(postgres_servers: Servers) -> Iterator[tuple[Cluster, Meddler]]:
    """Two hosts with a relay between them, which passes everything on until a test says else."""
    with (
        tempfile.TemporaryDirectory(prefix="aifs-hosts-") as place,
        many_hosts(Path(place), postgres_servers.get("wheel"), mounted=False) as hosts,
    ):
        first = hosts[0]  # the younger one dials
        relay = Meddler(PEER_PORT, host=first.namespace.address, at=hosts.network.address)
        with in_thread(relay):
            first.configure("host", "address", relay.address)
            for host in hosts:
                host.mount()
            yield hosts, relay
            hosts.finish()


@pytest.fixture
def two(relayed: tuple[Cluster, Meddler]) -> Cluster:
    hosts, _ = relayed
    assert all(host.is_alive() for host in hosts), "an earlier test has lost a host"
    return hosts


@pytest.fixture
def relay(relayed: tuple[Cluster, Meddler]) -> Iterator[Meddler]:
    """Between the two. Afterwards it passes everything on again."""
    _, relay = relayed
    meddle, delay_s = relay.meddle, relay.delay_s
    yield relay
    relay.meddle, relay.delay_s = meddle, delay_s


# --- random system calls ---

SHAPES = {
    "defaults": {},
    "drained": {
        "layout": {"unit": "4KiB", "inline_limit": 0},
        "burst": {"drain_delay": "0s"},
    },
    "tiny": {
        "layout": {"unit": "4KiB"},
        "burst": {
            "capacity": "256KiB",
            "high_water": 0.5,
            "low_water": 0.2,
            "reserve": 0,
            "drain_delay": "0s",
            "throttle_max": "1ms",
        },
        "meta": {"commit_interval": "10ms"},
        "data": {"writeback_interval": "100ms"},
    },
    "no-bridge": {"kernel": {"bridge": "off"}, "burst": {"drain_delay": "0s"}},
}


@pytest.mark.parametrize("number", [0, 1])
def test_random_system_calls_while_the_other_host_looks(
    two: Cluster, both: Both, reference: Path, number: int
) -> None:
    both[0].chmod(0o777)
    ops = generate(2000 + number, 500, bridged=True)
    require_agreement(both[number], reference, ops, both[1 - number])


@LONG
@pytest.mark.parametrize("shape", SHAPES)
def test_many_random_system_calls_while_the_other_host_looks(
    scratch: Path, a_postgres: Postgres, reference: Path, shape: str
) -> None:
    with many_hosts(scratch, a_postgres, settings=SHAPES[shape]) as hosts:
        for host in hosts:
            host.expected.append("is full: writers of files")
        for seed in range(20):
            ops = generate(3000 + seed, 1000, bridged=shape != "no-bridge")
            here, there = hosts.paths[seed % 2], hosts.paths[1 - seed % 2]
            require_agreement(here, reference, ops, there)


# --- storms ---


def storm(
    hosts: Cluster, places: list[Path], seed: int, count: int, victim: Host | None = None
) -> None:
    """Two at each host do so many operations each. ``victim``: is killed in the middle, and comes
    back."""
    dead: set[int] = set()
    prepare(places[0])
    require_same(places)
    stormers = [
        Stormer(number, host, place, dead, seed)
        for number, (host, place) in enumerate([*enumerate(places)] * 2)
    ]

    def have_done(number: int) -> bool:
        return all(one.count >= number for one in stormers if one.host not in dead)

    with playing(stormers) as going:
        if victim is not None:
            going(lambda: have_done(count // 2), "all go on")
            dead.add([*hosts].index(victim))
            victim.kill()
            victim.mount()
        going(lambda: have_done(count), "all go on")
    require_same(places)
    require_manifests(stormers, places)


def test_a_storm_in_one_directory(two: Cluster, both: Both) -> None:
    storm(two, list(both), 1, 40)


@LONG
@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_storm_of_four_hosts(scratch: Path, a_postgres: Postgres, seed: int, dies: bool) -> None:
    with many_hosts(scratch, a_postgres, 4) as hosts:
        (hosts[0].path / "storm").mkdir()
        require_same(hosts.paths)
        places = [path / "storm" for path in hosts.paths]
        storm(hosts, places, seed, 1000, hosts[seed] if dies else None)


# --- what a network does ---


def make_bad(relay: Meddler, seed: object, breaks: float) -> Counter[str]:
    """Frames are late; what is pushed is lost and comes twice, requests come twice, and now and
    then the connection ends. How often each has happened."""
    chance, fates = random.Random(f"{seed}"), Counter[str]()

    def meddle(frame: bytes) -> list[bytes]:
        kind, drawn = FRAME.unpack_from(frame)[0], chance.random()
        if chance.random() < breaks:
            fates["breaks"] += 1
            raise EOFError
        if kind == PUSH and drawn < 0.3:
            fates["lost"] += 1
            return []
        if kind in (PUSH, REQUEST) and drawn < 0.5:
            fates["twice"] += 1
            return [frame, frame]
        return [frame]

    relay.meddle = meddle
    relay.delay_s = lambda: chance.choice((0, 0, 0.001, 0.005))
    return fates


@pytest.mark.parametrize("breaks", [0, 0.01])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=LONG) for seed in range(1, 6))])
def test_names_and_bytes_through_a_bad_network(
    two: Cluster,
    both: Both,
    relay: Meddler,
    breaks: float,
    seed: int,
    request: pytest.FixtureRequest,
) -> None:
    steps = 800 if request.config.getoption("--long") else 60
    fates = make_bad(relay, seed, breaks)
    history, registers = History(), [Register(f"r{number}") for number in range(2)]
    playing_now = players(both, history, seed)
    if not breaks:  # else what is written by way of the other host may fail
        playing_now += writers(both, registers, history, seed)
    with playing(playing_now) as going:
        for number in (1, 2):
            going(lambda number=number: history.count(number) >= steps, f"{number} goes on")  # type: ignore[misc]
    assert fates["lost"] and fates["twice"] and bool(fates["breaks"]) == bool(breaks)
    require_explained(history.events, has_kernel=True)
    require_same(both)
    for path in both:
        for one in registers:
            if one.versions[-1]:
                one.check(len(one.versions) - 1, (path / one.name).read_bytes())


def test_a_storm_through_a_bad_network(two: Cluster, both: Both, relay: Meddler) -> None:
    fates = make_bad(relay, 1, 0.02)
    storm(two, list(both), 2, 30)
    assert fates["lost"] and fates["twice"] and fates["breaks"]


# --- programs on both hosts at a time ---

PUSH_FOUR = """
set -e
git clone -q "$1/origin.git" "$1/work-$2"
cd "$1/work-$2"
for n in 1 2 3 4; do
    echo "$2 $n" > "$2-$n"
    git add .
    git commit -q -m "$2 $n"
    tries=0
    until git pull -q --rebase && git push -q; do
        tries=$((tries + 1))
        test $tries -lt 50
    done
done
"""
INSTALL = """
set -e
cp -r "$1/package" "$1/package-$2"
"$3" -m pip install -q --no-index --no-build-isolation --no-deps --disable-pip-version-check \
    --cache-dir "$1/cache" --target "$1/site-$2" "$1/package-$2"
"""
INSERT = """
set -e
for n in $(seq 10); do
    "$3" -c "import sqlite3, sys; base = sqlite3.connect(sys.argv[1], timeout=60)
with base: base.execute('insert into t values (?, ?)', sys.argv[2:])" "$1/data.sqlite" "$2" $n
done
"""
GIT_ALONE = {
    "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_CONFIG_SYSTEM": "/dev/null",
    "GIT_AUTHOR_NAME": "A",
    "GIT_AUTHOR_EMAIL": "a@example.org",
    "GIT_COMMITTER_NAME": "A",
    "GIT_COMMITTER_EMAIL": "a@example.org",
}


def at_once(places: Both, *scripts: str) -> None:
    """Each script on both hosts, all at the same time, with the directory, the host and Python."""
    running = [
        subprocess.Popen(
            ["sh", "-c", script, "sh", place, host, sys.executable],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **GIT_ALONE},
        )
        for script in scripts
        for host, place in zip("ab", places, strict=True)
    ]
    said = [process.communicate(timeout=TIMEOUT_S)[0] for process in running]
    assert not any(process.returncode for process in running), said


def git(where: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", where, *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, **GIT_ALONE},
    )
    return done.stdout


def make_repository(here: Path) -> None:
    """Bare, with one commit."""
    git(here, "init", "-q", "--bare", "-b", "main", "origin.git")
    git(here, "clone", "-q", "origin.git", "first")
    git(here / "first", "checkout", "-q", "-b", "main")
    git(here / "first", "commit", "-q", "--allow-empty", "-m", "first")
    git(here / "first", "push", "-q", "-u", "origin", "main")


def require_pushed(both: Both) -> None:
    for place in both:
        git(place / "origin.git", "fsck", "--strict")
        said = git(place / "origin.git", "log", "--format=%s", "main").split("\n")[:-1]
        wanted = {f"{host} {number}" for host in "ab" for number in (1, 2, 3, 4)} | {"first"}
        assert len(said) == 9 and set(said) == wanted
        for host in "ab":
            own = [line for line in said if line.startswith(host)]
            assert own == [f"{host} {number}" for number in (4, 3, 2, 1)]
            git(place / f"work-{host}", "fsck", "--strict")


@LONG
def test_git_on_both_hosts_at_a_time(two: Cluster, both: Both) -> None:
    """Both push to one repository: who comes second fetches, rebases and tries again."""
    make_repository(both[0])
    require_same(both)
    at_once(both, PUSH_FOUR)
    require_pushed(both)


@LONG
def test_git_pip_and_sqlite_on_both_hosts_at_a_time(two: Cluster, both: Both) -> None:
    here = both[0]
    make_repository(here)
    (here / "package" / "tiny").mkdir(parents=True)
    (here / "package" / "tiny" / "__init__.py").write_text("WORD = 'installed'\n")
    (here / "package" / "setup.py").write_text(
        "from setuptools import setup\nsetup(name='tiny', version='1', packages=['tiny'])\n"
    )
    with closing(sqlite3.connect(here / "data.sqlite")) as base, base:
        base.execute("create table t (who, number)")
    require_same(both)
    at_once(both, PUSH_FOUR, INSTALL, INSERT)
    require_pushed(both)
    for place in both:
        for host in "ab":
            code = "import tiny; print(tiny.WORD)"
            said = subprocess.run(
                [sys.executable, "-c", code],
                check=True,
                capture_output=True,
                env={**os.environ, "PYTHONPATH": str(place / f"site-{host}")},
            )
            assert said.stdout == b"installed\n"
        with closing(sqlite3.connect(place / "data.sqlite", timeout=60)) as base:
            assert base.execute("pragma integrity_check").fetchone() == ("ok",)
            counts = "select who, count(distinct number) from t group by who order by who"
            assert base.execute(counts).fetchall() == [("a", 10), ("b", 10)]
