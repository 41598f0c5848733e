"""What 1, 10, 100 and 1,000 hosts would do together, each on a machine of its own: a model of
service times that are measured here, on hosts in network namespaces and their real database.

Processor time is what is measured: it does not depend on how many share the processors. All is
counted per create, with its part of the commit that carries it (its *row* of the feed): how many
share a row depends on the load, and programs that create files in directories of their own wait for
no commit (docs/design/replicated.md, Delegations), so a row of one create is rare. Each host
applies every row of every other one, when many come at once at less than when each comes by itself.
Who commits pushes the row to all others. Hosts beat each second, and keep up a connection to each
other one.

What the model leaves out: conflicts, programs' own time, waiting that is no work (disks, the
network's latency), and all that would speed things up or slow them down with numbers that no
machine here has.

    python scripts/benchmarks/model.py [FILES]
"""

import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psycopg
from load import create, open_, together
from report import Row, show
from systems import HERE, medium

sys.path.insert(0, str(HERE.parent))

from machines import Cluster, Host, cluster, until

JOBS = 16
"""Programs that create files on a host at the same time, each in a directory of its own: they share
commits."""
HOSTS = (1, 10, 100, 1000)
IDLE_S, SETTLE_S = 10.0, 1.0
_CPUCLOCK_SCHED = 2
"""Makes the number of a process that of its clock (clock_getcpuclockid(3))."""
STOPS, STOPPED_S = 5, 1.5
SETTINGS = {"burst": {"drain_delay": "1h"}, "scrub": {"bandwidth": 0}}
"""Nothing but what is measured happens."""
CONNECTIONS = 400
"""That the database of aifs meta serve takes (max_connections)."""


@dataclass(frozen=True)
class Times:
    """Processor seconds, and bytes on the wire. A row is a commit."""

    alone: float
    """The daemon's, for a create of one program."""
    create: float
    """The daemon's, for a create of ``JOBS`` programs."""
    apply: float
    """The daemon's, for a create of ``JOBS`` programs of another host."""
    apply_behind: float
    """The same, when hundreds wait: its kernel is told of many at a time."""
    push: float
    """The daemon's, to tell one other host of a create."""
    open: float
    """The daemon's, for an open and close of a file that its kernel knows."""
    shown: float
    """The daemon's, for a rename and one other host, which it waits for."""
    beat: float
    """The daemon's per second, when nothing happens, on one host."""
    peer: float
    """The daemon's per second and other host, when nothing happens."""
    database_alone: float
    """The database's, for a create of one program."""
    database: float
    """The database's, for a create of ``JOBS`` programs."""
    database_beat: float
    """The database's per second and host, when nothing happens."""
    batch: float
    """Creates in a row, of ``JOBS`` programs."""
    bytes: float
    """On the wire, to one other host, for a create in such rows."""
    connections: float
    """To the database, per host."""


@dataclass(frozen=True)
class Load:
    """Of a cluster of ``hosts`` that make as many files as they can. Shares are of one processor;
    bytes per second and host."""

    hosts: int
    creates: float
    limit: str
    """What is saturated."""
    database: float
    apply: float
    """Of a host, for changes of others."""
    own: float
    """Of a host, for what its programs do."""
    push: float
    beat: float
    sent_bytes: float
    received_bytes: float
    opens: float
    """Of all hosts, when nobody creates anything."""
    rows: float
    """Of the feed, per second."""


def load_of(times: Times, hosts: int) -> Load:
    """The most creates that the database and the daemons of all hosts have processors for: the
    commits of all take turns, and a daemon is one thread."""
    others = hosts - 1
    own = times.create / hosts
    apply = times.apply_behind * others / hosts
    push = times.push * others / hosts
    beat = times.beat + times.peer * others
    beats = times.database_beat * hosts
    bounds = {
        "database": max(0.0, 1 - beats) / times.database,
        "daemons": max(0.0, 1 - beat) / (own + apply + push),
    }
    limit = min(bounds, key=lambda name: bounds[name])
    creates = bounds[limit]
    return Load(
        hosts,
        creates,
        limit,
        database=creates * times.database + beats,
        apply=creates * apply,
        own=creates * own,
        push=creates * push,
        beat=beat,
        sent_bytes=creates / hosts * others * times.bytes,
        received_bytes=creates / hosts * others * times.bytes,
        opens=hosts * max(0.0, 1 - beat) / times.open,
        rows=creates / times.batch,
    )


def model_rows(made: Cluster, files: int) -> Iterator[Row]:
    """``made``: hosts that are not mounted, in a database that nobody else uses."""
    times = measure(made, files)
    told = {
        "a create of one program": (times.alone, times.database_alone),
        f"a create of {JOBS} programs, {times.batch:.1f} in a row": (times.create, times.database),
        "a create of another host, applied": (times.apply, 0.0),
        "the same, when hundreds wait": (times.apply_behind, 0.0),
        "a create, told to one host": (times.push, 0.0),
        "a rename, for one host that shows it": (times.shown, 0.0),
        "an open": (times.open, 0.0),
        "a second without work": (times.beat, times.database_beat),
        "a second, for each other host": (times.peer, 0.0),
    }
    for what, (daemon, database) in told.items():
        found = f"daemon {1e6 * daemon:.0f} us, database {1e6 * database:.0f} us"
        yield Row(f"processor time: {what}", "", None, None, None, found, "", True)
    for hosts in HOSTS:
        one = load_of(times, hosts)
        found = (
            f"{one.creates:,.0f} creates/s in {one.rows:,.0f} rows/s, {one.opens:,.0f} opens/s; "
            f"database {one.database:.0%}; a daemon: own {one.own:.0%}, applies {one.apply:.0%}, "
            f"pushes {one.push:.0%}, beats {one.beat:.1%}; {one.sent_bytes / 1e6:.1f} MB/s out and "
            f"in per host; saturated: {one.limit}"
        )
        yield Row(f"model: {hosts:,} hosts", "", None, None, None, found, "stated", True)
    most = CONNECTIONS / times.connections
    silent = (1 - times.beat) / times.peer if times.peer else float("inf")
    beaten = 1 / times.database_beat if times.database_beat else float("inf")
    found = (
        f"{times.connections:.1f} connections per host: {most:.0f} hosts with the database's "
        f"max_connections of {CONNECTIONS}; beats fill its processor at {beaten:,.0f} hosts, "
        f"connections between hosts that of a daemon at {silent:,.0f}"
    )
    yield Row("model: where it ends", "", None, None, None, found, "stated", True)


class _Used:
    """What the hosts, the database and the wires use inside ``with``, without ``idle``, which they
    use per second when nothing happens."""

    def __init__(self, made: Cluster, hosts: Sequence[Host], idle: "_Used | None" = None) -> None:
        self._made = made
        self._hosts = hosts
        self._idle = idle
        self.seconds = 0.0
        self.database = 0.0
        """Processor seconds of all its processes."""
        self.daemons: list[float] = []
        self.received: list[float] = []
        """Bytes, by host."""
        self.rows = 0.0
        """Of the feed."""

    def __enter__(self) -> "_Used":
        self._before = self._look()
        return self

    def __exit__(self, *exception: object) -> None:
        at, database, daemons, received, head = self._look()
        at0, database0, daemons0, received0, head0 = self._before
        self.seconds = at - at0
        self.database = sum(s - database0[pid] for pid, s in database.items() if pid in database0)
        self.daemons = [one - other for one, other in zip(daemons, daemons0, strict=True)]
        self.received = [one - other for one, other in zip(received, received0, strict=True)]
        self.rows = head - head0
        if self._idle is not None:
            past = self.seconds / self._idle.seconds
            self.database -= past * self._idle.database
            for mine, rest in (
                (self.daemons, self._idle.daemons),
                (self.received, self._idle.received),
            ):
                mine[:] = [one - past * other for one, other in zip(mine, rest, strict=True)]

    def _look(self) -> tuple[float, dict[int, float], list[float], list[float], int]:
        database = {pid: s for pid in self._made.database.processes() if (s := _cpu_s(pid))}
        daemons = [_cpu_s(host.pid) for host in self._hosts]
        received = [float(host.namespace.received_bytes()) for host in self._hosts]
        head = _ask(self._made, "select seq from aifs.head")
        return time.perf_counter(), database, daemons, received, head

    @property
    def others(self) -> float:
        """Processor seconds of a daemon but the first one's, on average."""
        return statistics.mean(self.daemons[1:])


def _cpu_s(pid: int) -> float:
    """Processor time of a process, with threads that have ended; 0 if it does not live."""
    with suppress(OSError):
        return time.clock_gettime((~pid << 3) | _CPUCLOCK_SCHED)
    return 0.0


def _ask(made: Cluster, question: str) -> int:
    meta = made.settings["meta"]
    password = Path(meta["secret"]).read_text().strip()
    with psycopg.connect(meta["url"], password=password) as connection:
        return connection.execute(question).fetchone()[0]


def measure(made: Cluster, files: int) -> Times:
    """On one host alone, then with all the others, which do nothing themselves."""
    first = made.hosts[0]
    first.aifs("format", first.source)
    first.mount()
    alone = _measure(made, [first], files)
    for host in made.hosts[1:]:
        host.mount()
    until(lambda: len(made.live()) == len(made.hosts), "they know of each other")
    many = _measure(made, made.hosts, files)
    others = len(made.hosts) - 1
    behind, created = _catch_up(made.hosts, made, many["idle"])
    ways = ("singly", "jointly")
    pushed = sum(many[way].daemons[0] - alone[way].daemons[0] for way in ways)
    shown = many["renamed"].daemons[0] - alone["renamed"].daemons[0]
    connections = _ask(
        made,
        "select count(*) from pg_stat_activity where usename = 'aifs' and pid <> pg_backend_pid()",
    )
    idle = many["idle"]
    return Times(
        alone=alone["singly"].daemons[0] / files,
        create=alone["jointly"].daemons[0] / files,
        apply=many["jointly"].others / files,
        apply_behind=behind.daemons[1] / created,
        push=max(0.0, pushed) / (len(ways) * files) / others,
        open=alone["opened"].daemons[0] / files,
        shown=max(0.0, shown) / files / others,
        beat=alone["idle"].daemons[0] / alone["idle"].seconds,
        peer=max(0.0, (statistics.mean(idle.daemons) - alone["idle"].daemons[0]))
        / idle.seconds
        / others,
        database_alone=alone["singly"].database / files,
        database=alone["jointly"].database / files,
        database_beat=idle.database / idle.seconds / (others + 1),
        batch=files / many["jointly"].rows,
        bytes=statistics.mean(many["jointly"].received[1:]) / files,
        connections=connections / (others + 1),
    )


def _measure(made: Cluster, hosts: Sequence[Host], files: int) -> dict[str, _Used]:
    """On the first of these hosts, which are all that are mounted."""
    work = hosts[0].path / f"{len(hosts)}"
    work.mkdir()
    time.sleep(SETTLE_S)
    with _Used(made, hosts) as idle:
        time.sleep(IDLE_S)
    found = {"idle": idle}

    def use(name: str, *works: Callable[[], None]) -> None:
        with _Used(made, hosts, idle) as used:
            together(works)
            time.sleep(SETTLE_S)  # others have heard of it
        found[name] = used

    names = [f"{work}/f{number}" for number in range(files)]
    use("singly", partial(create, names))
    use("opened", partial(open_, names))
    use("renamed", partial(_rename, names))
    parts = []
    for job in range(JOBS):
        (work / str(job)).mkdir()
        parts.append([f"{work}/{job}/f{number}" for number in range(files // JOBS)])
    time.sleep(SETTLE_S)
    use("jointly", *(partial(create, part) for part in parts))
    return found


def _catch_up(hosts: Sequence[Host], made: Cluster, idle: _Used) -> tuple[_Used, int]:
    """The second host is stopped, for much less than its lease, while the first one creates files,
    and goes on. Also how many files."""
    work = hosts[0].path / "behind"
    work.mkdir()
    created = 0
    with _Used(made, hosts, idle) as used:
        for _ in range(STOPS):
            os.kill(hosts[1].pid, signal.SIGSTOP)
            end_s = time.monotonic() + STOPPED_S
            while time.monotonic() < end_s:
                (work / f"{created}").touch()
                created += 1
            os.kill(hosts[1].pid, signal.SIGCONT)
            time.sleep(SETTLE_S)
    return used, created


def _rename(names: Sequence[str]) -> None:
    for name in names:
        os.rename(name, f"{name}.r")


def main(words: Sequence[str]) -> None:
    with medium(None) as base:
        os.chmod(base, 0o711)  # PostgreSQL runs as an ordinary user
        with cluster(base / "many", "abcd", SETTINGS) as made:
            show(list(model_rows(made, int(words[0]) if words else 1600)), as_json=False)


if __name__ == "__main__":
    main(sys.argv[1:])
