"""Several hosts of one store, in network namespaces of this machine, against one host on the
embedded engine: what they may cost, and what they see of one another.

All run on the processors of this machine: hosts, their programs, and the database. So what is said
of several hosts at once is what they share these for, not what they reach on machines of their own;
processor times tell more, and model.py makes of them what many machines would do.

    python scripts/benchmarks/hosts.py [--quick] [--looks=N] [PART]...

``--looks``: how often it is looked whether a host sees something old. Without a PART all are done.
"""

import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from grouped import group_of
from model import SETTINGS, model_rows
from report import Row, rate
from systems import HERE, Aifs, System, medium

sys.path.insert(0, str(HERE.parent))

from machines import Cluster, Failed, Host, cluster, until, working

MIB = 1 << 20
OWN, SHARED, CACHED, COPIES, REMOTE, TOGETHER, BYTES, GROUPED = (
    0.9,
    0.5,
    0.95,
    0.98,
    0.7,
    1.5,
    1.02,
    0.4,
)
SEEN_P50_S, SEEN_P99_S, LOCK_S, HANDED_S = 0.002, 0.020, 0.0004, 0.002
LEASE_S = 10.0
CHECKS = 9
"""Of one round of names that are changed and looked at."""
QUIET = "burst.drain_delay=1h,meta.backup_interval=0,scrub.bandwidth=0"
"""So that nothing but what is measured happens."""
_WAITING_S = 0.005
"""Until who asks for a lock certainly waits for it."""
LINK_MIB_S = 20
"""Of each host to each server, where they save together: slower than this machine's processors."""


class Amount(NamedTuple):
    """Files per round; MiB of a file that one host writes or reads; checks whether something old is
    seen; locks."""

    files: int
    mib: int
    checks: int
    locks: int


QUICK = Amount(files=512, mib=128, checks=3000, locks=400), 1
NORMAL = Amount(files=3200, mib=1024, checks=100_000, locks=4000), 3
"""And how many rounds."""

Part = Callable[[Path, Amount, int], Iterator[Row]]


class Member(System):
    """A host of the cluster, as a system."""

    def __init__(self, host: Host) -> None:
        self.name = host.name
        self.path = host.path
        self.host = host

    def run(self, work: str, directory: str, **settings: int) -> float:
        processors = os.sched_getaffinity(0)
        away = processors - {min(processors)} or processors  # as MountedSystem does it
        for task in Path(f"/proc/{self.host.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), away)
        return super().run(work, directory, **settings)


class LoneAifs(Aifs):
    """One host on the embedded engine."""

    def __init__(self, base: Path) -> None:
        super().__init__("alone", base)
        self.command = [*self.command, "-o", QUIET]


def cpu_s(pids: Sequence[int]) -> float:
    """Processor time of processes, and of those that they have waited for."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Spent:
    """Processor seconds that the database and the daemons of hosts use inside ``with``."""

    def __init__(self, made: Cluster, hosts: Sequence[Host]) -> None:
        self._of = [lambda: cpu_s(made.database.processes())]
        self._of += [lambda host=host: cpu_s([host.pid]) for host in hosts]
        self.seconds = [0.0] * len(self._of)

    def __enter__(self) -> "Spent":
        self._before = [one() for one in self._of]
        return self

    def __exit__(self, *exception: object) -> None:
        if exception[0] is None:
            for number, one in enumerate(self._of):
                self.seconds[number] += one() - self._before[number]

    def per(self, count: int) -> str:
        names = ["database", *(f"host {number}" for number in range(1, len(self._of)))]
        parts = (
            f"{name} {1e6 * seconds / count:.0f}"
            for name, seconds in zip(names, self.seconds, strict=True)
        )
        return f"processor us each: {', '.join(parts)}"


def at_once(*works: Callable[[], float]) -> list[float]:
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result() for future in [pool.submit(work) for work in works]]


def hosts_rows(base: Path, amount: Amount, rounds: int, parts: Sequence[str] = ()) -> Iterator[Row]:
    """Those of ``parts`` (``PARTS``), or all."""
    os.chmod(base, 0o711)  # PostgreSQL runs as an ordinary user
    for name, measure in PARTS.items():
        if parts and name not in parts:
            continue
        place = base / name.replace(" ", "-")
        place.mkdir(mode=0o711)
        try:
            yield from measure(place, amount, rounds)
        except (Failed, OSError, RuntimeError, subprocess.CalledProcessError) as error:
            said = (getattr(error, "stderr", None) or b"").decode().strip() or error
            yield Row(name, "", None, None, None, "", f"not measured: {said}", False)
        finally:
            shutil.rmtree(place)


def _on_two(work: Callable[["_Bench"], Iterator[Row]]) -> Part:
    """Beside one host on the embedded engine."""

    def measure(base: Path, amount: Amount, rounds: int) -> Iterator[Row]:
        with LoneAifs(base) as alone, cluster(base / "many", "ab", SETTINGS) as made:
            yield from work(_Bench(alone, made, mounted(made), amount, rounds))

    return measure


def _model(base: Path, amount: Amount, rounds: int) -> Iterator[Row]:
    with cluster(base / "many", "abcd", SETTINGS) as made:
        yield from model_rows(made, amount.files)


class _Bench:
    """``alone``: one host on the embedded engine; ``made``: a cluster of two."""

    def __init__(
        self,
        alone: LoneAifs,
        made: Cluster,
        members: Sequence[Member],
        amount: Amount,
        rounds: int,
    ) -> None:
        self._alone = alone
        self._made = made
        self._a, self._b = members
        self._amount = amount
        self._rounds = rounds

    def creates(self) -> Iterator[Row]:
        count, rates = self._amount.files, {"alone": [], "own": [], "both": []}
        hosts = (self._a.host, self._b.host)
        own, both = Spent(self._made, hosts), Spent(self._made, hosts)
        for round_ in range(self._rounds):
            mine, shared = f"own{round_}", f"shared{round_}"
            rates["alone"].append(count / self._alone.run("create", mine, count=count))
            with own:
                rates["own"].append(count / self._a.run("create", mine, count=count))
            (self._a.path / shared).mkdir()
            until((self._b.path / shared).exists, "what is made is seen")
            with both:
                seconds = at_once(
                    lambda: self._a.run("create", shared, count=count),
                    lambda: self._b.run("create", shared, count=count, first=count),
                )
            rates["both"].append(sum(count / one for one in seconds))
        alone, mine, sum_ = (statistics.median(found) for found in rates.values())
        files = count * self._rounds
        yield _ratio("create, 1 of 2 hosts", alone, mine, "files/s", OWN, own.per(files))
        yield _ratio(
            "create, 2 hosts, one directory", alone, sum_, "files/s", SHARED, both.per(2 * files)
        )

    def cached(self) -> Iterator[Row]:
        count = self._amount.files
        for system in (self._alone, self._a):
            system.run("create", "cached", count=count)
        for work in ("stat", "open"):
            rates: dict[System, list[float]] = {self._alone: [], self._a: []}
            for _ in range(self._rounds):
                for system, found in rates.items():
                    found.append(count / system.run(work, "cached", count=count, warm=1))
            alone, mine = (statistics.median(found) for found in rates.values())
            yield _ratio(f"{work} of cached names", alone, mine, "files/s", CACHED)

    def seen(self) -> Iterator[Row]:
        """One process does it on A, and looks on B at once."""
        a, b = self._a.path / "seen", self._b.path / "seen"
        a.mkdir()
        until(b.exists, "what is made is seen")
        looks = {
            "stat": lambda name: (b / name).exists(),
            "open": lambda name: _can_open(b / name),
            "readdir": lambda name: name in os.listdir(b),
        }
        late: dict[str, list[float]] = {work: [] for work in looks}
        took: list[float] = []
        stale = {"rename, unlink": 0, "close": 0}
        rounds = self._amount.checks // CHECKS
        for number in range(rounds):
            work = ("stat", "open", "readdir")[number % 3]
            (a / "old").write_bytes(b"")
            begin = time.perf_counter()
            while not looks[work]("old"):
                pass
            late[work].append(time.perf_counter() - begin)
            until((b / "old").exists, "what is made is seen")
            begin = time.perf_counter()
            (a / "old").rename(a / "new")
            took.append(time.perf_counter() - begin)
            found = (
                (b / "old").exists(),
                (b / "new").exists(),
                _can_open(b / "new"),
                os.listdir(b),
            )
            stale["rename, unlink"] += sum(
                one != wanted
                for one, wanted in zip(found, (False, True, True, ["new"]), strict=True)
            )
            (a / "new").write_bytes(b"%d" % number)
            stale["close"] += (b / "new").read_bytes() != b"%d" % number
            stale["close"] += (b / "new").stat().st_size != len(str(number))
            (a / "new").unlink()
            found = ((b / "new").exists(), _can_open(b / "new"), os.listdir(b))
            stale["rename, unlink"] += sum(
                one != wanted for one, wanted in zip(found, (False, False, []), strict=True)
            )
        for work, found in late.items():
            p50_s, p99_s = _quantiles(found)
            yield Row(
                f"a create on A, seen on B by {work}",
                "JuiceFS 1 s",
                None,
                None,
                None,
                f"p50 {1000 * p50_s:.2f} ms, p99 {1000 * p99_s:.2f} ms",
                "p50 <= 2 ms, p99 <= 20 ms",
                p50_s <= SEEN_P50_S and p99_s <= SEEN_P99_S,
            )
        p50_s, p99_s = _quantiles(took)
        told = ", ".join(f"{count} after {what}" for what, count in stale.items())
        yield Row(
            f"something old on B, of {rounds * CHECKS:,} looks",
            "",
            None,
            None,
            None,
            f"{told}; a rename takes p50 {1000 * p50_s:.2f} ms, p99 {1000 * p99_s:.2f} ms",
            "0",
            not any(stale.values()),
        )

    def copies(self) -> Iterator[Row]:
        mib, rates = self._amount.mib, {}
        for _ in range(self._rounds):
            for system in (self._alone, self._a):
                system.remove("copies")
                for work in ("write", "read"):
                    seconds = system.run(work, "copies", jobs=1, mib=mib)
                    rates.setdefault((work, system.name), []).append(mib / seconds)
        for work in ("write", "read"):
            alone, mine = (
                statistics.median(rates[work, system.name]) for system in (self._alone, self._a)
            )
            yield _ratio(f"{work} of an own burst copy", alone, mine, "MiB/s", COPIES)

    def remote_copy(self) -> Iterator[Row]:
        mib, rates = self._amount.mib, {"stream": [], "read": []}
        hosts = (self._a.host, self._b.host)
        self._a.run("write", "remote", jobs=1, mib=mib)
        for _ in range(self._rounds):
            seconds = _stream(*hosts, self._a.path / "remote" / "stream0", mib)
            rates["stream"].append(mib / seconds)
            with Spent(self._made, hosts) as spent:
                seconds = self._b.run("read", "remote", jobs=1, mib=mib, cold=1)
            rates["read"].append(mib / seconds)
        stream, read = (statistics.median(found) for found in rates.values())
        used = f"processor s per GiB: A {1024 / mib * spent.seconds[1]:.2f}, "
        used += f"B {1024 / mib * spent.seconds[2]:.2f}"
        work = f"B reads A's burst copy of {mib} MiB"
        yield _ratio(work, stream, read, "MiB/s", REMOTE, used, "one TCP stream")
        self._a.remove("remote")

    def locks(self) -> Iterator[Row]:
        count = self._amount.locks
        pairs = {}
        for system in (self._alone, self._a):
            (system.path / "lock").touch()
            pairs[system.name] = _lock_s(system.path / "lock", count)
        until((self._b.path / "lock").exists, "what is made is seen")
        mine_s = pairs[self._a.name]
        yield Row(
            "lock+unlock, one user",
            f"kernel {1e6 * pairs['alone']:.1f} us",
            None,
            None,
            None,
            f"{1000 * mine_s:.3f} ms",
            f"<= {1000 * LOCK_S} ms",
            mine_s <= LOCK_S,
        )
        handed = _handed_s((self._a.path / "lock", self._b.path / "lock"), count // 4)
        p50_s, p99_s = _quantiles(handed)
        yield Row(
            "a lock handed over between two hosts",
            "NFS",
            None,
            None,
            None,
            f"p50 {1000 * p50_s:.2f} ms, p99 {1000 * p99_s:.2f} ms",
            f"p50 <= {1000 * HANDED_S:.0f} ms",
            p50_s <= HANDED_S,
        )

    def restart(self) -> Iterator[Row]:
        with ExitStack() as stack:
            told = [
                stack.enter_context(working(member.path, member.name))
                for member in (self._a, self._b)
            ]
            for one in told:
                until(lambda one=one: one.rounds > 10, "they work")
            self._made.database.stop()
            self._made.database.start()
            for one in told:
                until(lambda one=one, now=one.rounds: one.rounds > now + 10, "they go on")
        failed = [error for one in told for error in one.failed]
        longest_s = max(one.longest_s for one in told)
        yield Row(
            "database restarted: operations that fail",
            "",
            None,
            None,
            None,
            f"{len(failed)} of {3 * sum(one.rounds for one in told)}"
            + f"; the longest waited {longest_s:.1f} s",
            "0",
            not failed,
        )

    def kill(self) -> Iterator[Row]:
        """A is killed while both work in a directory that A has made."""
        (self._a.path / "of-a").mkdir()
        until((self._b.path / "of-a").exists, "what is made is seen")
        with working(self._b.path / "of-a", "b") as told:
            with working(self._a.path / "of-a", "a") as by_a:
                until(lambda: told.rounds > 10 and by_a.rounds > 10, "they work")
                told.longest_s = 0.0
                self._a.host.kill()
            until(lambda: self._a.name not in self._made.live(), "its session is over")
            until(lambda now=told.rounds: told.rounds > now + 10, "B goes on")
        yield Row(
            "a host killed: the longest wait of another one",
            "NFS 90 s",
            None,
            None,
            None,
            f"{told.longest_s:.1f} s, {len(told.failed)} operations failed",
            f"<= lease + 2 s ({LEASE_S + 2:.0f} s)",
            told.longest_s <= LEASE_S + 2 and not told.failed,
        )


def _ratio(
    work: str,
    anchor: float,
    reached: float,
    unit: str,
    target: float,
    used: str = "",
    against: str = "one host",
) -> Row:
    told = f"{rate(reached, unit)}{'; ' if used else ''}{used}"
    ratio = reached / anchor
    return Row(
        work,
        f"{against} {rate(anchor, unit)}",
        None,
        ratio,
        None,
        told,
        f">= {target}",
        ratio >= target,
    )


def _can_open(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY))
    except FileNotFoundError:
        return False
    return True


def _quantiles(found: Sequence[float]) -> tuple[float, float]:
    """The median, and what 99 of 100 do not exceed."""
    return statistics.median(found), statistics.quantiles(found, n=100)[98]


def _stream(sender: Host, receiver: Host, path: Path, mib: int) -> float:
    """Seconds that one TCP stream takes with the same bytes."""
    program, where = HERE / "stream.py", f"{sender.namespace.address}:7000"
    command = [*sender.namespace.enter, sys.executable, program, "send", path, where]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as sending:
        sending.stdout.readline()
        command = [*receiver.namespace.enter, sys.executable, program, "receive"]
        done = subprocess.run(
            [*command, str(mib * MIB), where], check=True, stdout=subprocess.PIPE, text=True
        )
    return json.loads(done.stdout)


def _lock_s(path: Path, count: int) -> float:
    """Of one lock and its release."""
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_UN)
        begin = time.perf_counter()
        for _ in range(count):
            fcntl.lockf(file, fcntl.LOCK_EX)
            fcntl.lockf(file, fcntl.LOCK_UN)
        return (time.perf_counter() - begin) / count


def _handed_s(paths: Sequence[Path], count: int) -> list[float]:
    """From the release by one host to the lock of the other, which waits for it."""
    found = []
    with ThreadPoolExecutor(1) as pool, paths[0].open("rb") as one, paths[1].open("rb") as other:
        holder, waiter = one, other
        fcntl.flock(holder, fcntl.LOCK_EX)
        for _ in range(count):
            locked = pool.submit(_locked_at, waiter.fileno())
            time.sleep(_WAITING_S)
            begin = time.perf_counter()
            fcntl.flock(holder, fcntl.LOCK_UN)
            found.append(locked.result() - begin)
            holder, waiter = waiter, holder
    return found


def _locked_at(fd: int) -> float:
    fcntl.flock(fd, fcntl.LOCK_EX)
    return time.perf_counter()


# --- clusters of their own ---


def mounted(made: Cluster) -> list[Member]:
    first = made.hosts[0]
    first.aifs("format", first.source)
    for host in made.hosts:
        host.mount()
    return [Member(host) for host in made.hosts]


def _reads(base: Path, amount: Amount, rounds: int) -> Iterator[Row]:
    """Of files on the data servers alone, which are 1 ms away."""
    found: dict[int, list[tuple[float, float]]] = {1: [], 4: []}
    program = (sys.executable, str(HERE / "delayed.py"))
    with cluster(base / "many", "abcd", SETTINGS, program) as made:
        members = mounted(made)
        first = members[0]
        for round_ in range(rounds):
            for readers, results in found.items():
                name = f"{readers}-{round_}"
                first.run("write", name, jobs=1, mib=amount.mib)
                for order in ("drain", "evict"):
                    first.host.aifs(order, first.path / name)
                for one in members:
                    until((one.path / name / "stream0").exists, "what is made is seen")
                before = sum(map(_read_bytes, members))
                seconds = at_once(
                    *(
                        lambda one=one: one.run("read", name, jobs=1, mib=amount.mib, cold=1)
                        for one in members[:readers]
                    )
                )
                fetched = sum(map(_read_bytes, members)) - before
                results.append((max(seconds), fetched / (amount.mib * MIB)))
                first.remove(name)
    alone_s, all_s = (statistics.median(one for one, _ in results) for results in found.values())
    fetched = max(one for _, one in found[4])
    yield Row(
        f"4 hosts read one {amount.mib} MiB file, servers 1 ms away",
        f"one host {rate(amount.mib / alone_s, 'MiB/s')}",
        None,
        None,
        None,
        f"{all_s / alone_s:.2f} x its time, {fetched:.2f} x the bytes",
        f"<= {TOGETHER} x, <= {BYTES} x the bytes",
        all_s <= TOGETHER * alone_s and fetched <= BYTES,
    )


def _read_bytes(member: Member) -> int:
    return sum(server["read_bytes"] for server in member.host.status()["servers"])


def _saves(base: Path, amount: Amount, rounds: int) -> Iterator[Row]:
    """Each host the same parameters. Each has links of its own to the servers, of the same speed
    (slow_servers.py)."""
    os.environ["SERVER_BANDWIDTHS"] = ",".join([str(LINK_MIB_S)] * 4)
    settings = {**SETTINGS, "burst": {"drain_delay": "0s"}}
    taken: dict[str, list[float]] = {"ungrouped": [], "grouped": []}
    block = os.urandom(MIB)
    with cluster(
        base / "many", "abcd", settings, (sys.executable, str(HERE / "slow_servers.py"))
    ) as made:
        members = mounted(made)
        first = members[0]
        for round_ in range(rounds):
            for way, found in taken.items():
                directory = f"{way}{round_}"
                (first.path / directory).mkdir()
                if way == "grouped":
                    text = f"name=save,ranks={len(members)}".encode()
                    os.setxattr(first.path / directory, "user.aifs.group", text)
                for one in members:
                    until((one.path / directory).exists, "what is made is seen")
                begin = time.perf_counter()
                at_once(
                    *(
                        lambda one=one: _save(
                            one.path / directory / one.name, block, amount.mib // 4
                        )
                        for one in members
                    )
                )
                if way == "grouped":
                    _await_group(first.path / directory)
                else:
                    at_once(*(lambda one=one: _drain(one.path / directory) for one in members))
                found.append(time.perf_counter() - begin)
    ungrouped_s, grouped_s = (statistics.median(found) for found in taken.values())
    yield Row(
        f"grouped save of 4 hosts, {amount.mib // 4} MiB each, the same: durable",
        f"ungrouped {ungrouped_s:.2f} s",
        None,
        None,
        None,
        f"{grouped_s:.2f} s, {grouped_s / ungrouped_s:.2f} x",
        f"<= {GROUPED} x",
        grouped_s <= GROUPED * ungrouped_s,
    )


def _save(path: Path, block: bytes, mib: int) -> float:
    """``mib`` MiB, none of which is as another one."""
    with path.open("wb", buffering=0) as file:
        for number in range(mib):
            file.write(number.to_bytes(8, "little") + block[8:])
        os.fsync(file.fileno())
    return 0.0


def _drain(directory: Path) -> float:
    os.setxattr(directory, "user.aifs.drain", b"")

    def is_done() -> bool:
        return not json.loads(os.getxattr(directory, "user.aifs.drain"))["files"]

    until(is_done, "the files are drained")
    return 0.0


def _await_group(directory: Path) -> None:
    def is_over() -> bool:
        return group_of(directory)["state"] in ("durable", "failed", "cancelled", "expired")

    until(is_over, "the group of ranks on several hosts is durable")
    if (group := group_of(directory))["state"] != "durable":
        raise RuntimeError(group["error"])


PARTS: dict[str, Part] = {
    "create": _on_two(_Bench.creates),
    "cached names": _on_two(_Bench.cached),
    "seen": _on_two(_Bench.seen),
    "own copies": _on_two(_Bench.copies),
    "remote copy": _on_two(_Bench.remote_copy),
    "locks": _on_two(_Bench.locks),
    "database restarted": _on_two(_Bench.restart),
    "a host killed": _on_two(_Bench.kill),
    "one file on 4 hosts": _reads,
    "grouped save of 4 hosts": _saves,
    "model": _model,
}


def main(words: Sequence[str]) -> None:
    """Rows as they come."""
    amount, rounds = QUICK if "--quick" in words else NORMAL
    parts = []
    for word in words:
        if word.startswith("--looks="):
            amount = amount._replace(checks=int(word.removeprefix("--looks=")))
        elif word in PARTS:
            parts.append(word)
        elif word != "--quick":
            sys.exit(f"there is no part {word}; there are: {', '.join(PARTS)}")
    with medium(None) as place:
        for row in hosts_rows(place, amount, rounds, parts):
            ratio = "" if row.aifs_to_plain is None else f"{row.aifs_to_plain:.2f}"
            print(row.work, row.plain, ratio, row.aifs, row.target, sep=" | ", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
