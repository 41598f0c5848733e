"""Grouped writes: four ranks of a data-parallel job save the same tensors, in ways that differ by
one thing each, as in the factor analyses of AITurbo (Figures 14 and 15); and what planning and
coordination of 64 ranks cost.

Once with servers in memory, once with such as across a network, one of them slower than the others.
*In the buffer*: until all ranks may go on. *Durable*: until all is on the servers.

    python scripts/benchmarks/grouped.py [DIRECTORY] [MIB] [ROUNDS] [--json]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from grouped_read import READERS, ReadAifs, Reading
from planning import CASES, pattern
from report import Row, show
from systems import HERE, Aifs, System, medium, touch_memory

from aifs.core.config import DIRECTORY_FILE

RANKS, SERVERS = 4, 4
DURABLE_TARGET, BUFFER_TARGET, COORDINATION_TARGET_S = 0.4, 1.0, 0.045
PLANNED_RANKS = 64
SERVERS_MIB_S = (300, 300, 300, 75)
"""Of the servers across a network; one is in need of repair."""
OPTIONS = "burst.drain_delay=0s,meta.backup_interval=0,scrub.bandwidth=0"


class Way(NamedTuple):
    """``name`` adds one thing to the way before. ``system``: where it is done. ``fast``: with the
    client's save. ``group``: text of the hint, None: no group. ``tier``: as the hint of that name.
    """

    name: str
    system: str
    fast: bool = False
    group: str | None = None
    tier: str = ""


WAYS = (
    Way("plain directory", "plain"),
    Way("straight to servers", "blind", tier="capacity"),
    Way("+ buffer", "blind"),
    Way("+ fast save", "blind", fast=True),
    Way("+ dedup", "blind", fast=True, group=""),
    Way("+ plan", "measuring", fast=True, group=""),
)


class Ranks:
    """The processes of the job."""

    def __init__(self, mib: int) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, HERE / "rank.py", str(mib)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for _ in range(RANKS)
        ]
        self.mib = mib
        self._step = 0
        self._answers()

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
            process.wait()
            process.stdout.close()

    def train(self) -> None:
        """New values in all tensors, the same in all ranks."""
        self._step += 1
        self._order([{"train": self._step}] * RANKS)

    def save(self, directory: Path, fast: bool) -> tuple[float, int]:
        """Seconds until the last has saved, and bytes of all files."""
        begin = time.perf_counter()
        answers = self._order(
            [{"save": str(directory / f"rank{rank}.pt"), "fast": fast} for rank in range(RANKS)]
        )
        return time.perf_counter() - begin, sum(answer["bytes"] for answer in answers)

    def _order(self, orders: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for process, order in zip(self._processes, orders, strict=True):
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict[str, Any]]:
        lines = [process.stdout.readline() for process in self._processes]
        if not all(lines):
            raise RuntimeError("a rank has died")
        return [json.loads(line) for line in lines]


class GroupAifs(Aifs):
    """AIFS that drains at once. ``bandwidths``: of its servers, in MiB/s. ``blind``: it is told
    that they are all alike.
    """

    def __init__(
        self, name: str, base: Path, bandwidths: Sequence[float] = (), blind: bool = False
    ) -> None:
        super().__init__(name, base)
        self._bandwidths = ",".join(map(str, bandwidths))
        self._blind = blind
        if bandwidths:
            self.command = [
                sys.executable,
                HERE / "slow_servers.py",
                *self.command[len(self._aifs) :],
            ]
        self.command = [*self.command, "-o", OPTIONS]

    def __enter__(self) -> "System":
        if self._blind:
            store = self.base / "store"
            store.mkdir(parents=True)
            servers = (
                f"  - {{path: {store}/data/{number}, bandwidth: 1GiB}}\n"
                for number in range(SERVERS)
            )
            (store / DIRECTORY_FILE).write_text("servers:\n" + "".join(servers))
        with _environment("SERVER_BANDWIDTHS", self._bandwidths):
            return super().__enter__()

    def stored_bytes(self) -> int:
        return sum(
            path.stat().st_size for path in (self.base / "store/data").rglob("*") if path.is_file()
        )

    def await_durable(self, directory: Path, grouped: bool) -> None:
        if grouped:
            await_group(directory)
            return
        os.setxattr(directory, "user.aifs.drain", b"")
        while json.loads(os.getxattr(directory, "user.aifs.drain"))["files"]:
            time.sleep(0.002)


def group_of(directory: Path) -> dict[str, Any]:
    """What the mount says of the directory's group."""
    return json.loads(os.getxattr(directory, "user.aifs.group"))


def await_group(directory: Path) -> None:
    """Until the group is durable. Raises RuntimeError if it will not be."""
    while (state := (group := group_of(directory))["state"]) != "durable":
        if state in ("failed", "cancelled", "expired"):
            raise RuntimeError(group["error"])
        time.sleep(0.002)


def measure(base: Path, mib: int, rounds: int) -> dict[str, Any]:
    """All numbers, as JSON: times in seconds, medians of ``rounds``."""
    ranks = Ranks(mib)
    try:
        return {
            "ranks": RANKS,
            "mib": mib,
            "rounds": rounds,
            "memory": _factors(base, ranks, rounds, ()),
            "network": _factors(base, ranks, rounds, SERVERS_MIB_S),
            "coordination": _coordination(base, rounds),
            "reads": _reads(base, mib, rounds),
        }
    finally:
        ranks.close()


def _factors(
    base: Path, ranks: Ranks, rounds: int, bandwidths: Sequence[float]
) -> list[dict[str, Any]]:
    taken: dict[str, list[dict[str, Any]]] = {way.name: [] for way in WAYS}
    with (
        System("plain", base) as plain,
        GroupAifs("blind", base, bandwidths, blind=True) as blind,
        GroupAifs("measuring", base, bandwidths) as measuring,
    ):
        systems = {system.name: system for system in (plain, blind, measuring)}
        for round_ in range(rounds + 1):
            for way in (*WAYS[round_ % len(WAYS) :], *WAYS[: round_ % len(WAYS)]):
                ranks.train()
                touch_memory(
                    base, 2 * RANKS * ranks.mib + ranks.mib
                )  # or who comes first pays for all
                taken[way.name].append(_save(ranks, systems[way.system], way, round_))
    return [
        {"way": way, **_medians(found[1:])} for way, found in taken.items()
    ]  # the first round warms up


def _save(ranks: Ranks, system: System, way: Way, round_: int) -> dict[str, Any]:
    directory = system.path / f"{WAYS.index(way)}-{round_}"
    directory.mkdir()
    found: dict[str, Any] = {}
    if way.tier:
        os.setxattr(directory, "user.aifs.tier", way.tier.encode())
    if way.group is not None:
        os.setxattr(directory, "user.aifs.group", f"name=step,ranks={RANKS}{way.group}".encode())
    before = system.stored_bytes() if isinstance(system, GroupAifs) else 0
    cpu_s = system.cpu_s() if isinstance(system, GroupAifs) else 0.0
    begin = time.perf_counter()
    found["buffer_s"], found["bytes"] = ranks.save(directory, way.fast)
    if isinstance(system, GroupAifs):
        system.await_durable(directory, way.group is not None)
    found["durable_s"] = time.perf_counter() - begin
    found["cpu_s"] = system.cpu_s() - cpu_s if isinstance(system, GroupAifs) else 0.0
    found["stored_bytes"] = (
        system.stored_bytes() - before if isinstance(system, GroupAifs) else found["bytes"]
    )
    if way.group is not None:
        report = group_of(directory)["plan"]
        found |= {
            key: report[key]
            for key in ("hash_s", "plan_s", "store_s", "hashed_bytes", "compared_bytes")
        }
    system.remove(directory.name)
    return found


def _medians(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {key: statistics.median(one[key] for one in found) for key in found[0]}


def _coordination(base: Path, rounds: int) -> dict[str, Any]:
    """64 ranks have written a file each and commit, and are planned."""
    from aifs.saves.planner import plan

    commits, plans = [], []
    with GroupAifs("coordinated", base) as aifs:
        for round_ in range(2 * rounds + 1):
            directory = aifs.path / str(round_)
            directory.mkdir()
            os.setxattr(
                directory,
                "user.aifs.group",
                f"name=step,ranks={PLANNED_RANKS},commit=explicit".encode(),
            )
            for rank in range(PLANNED_RANKS):
                with (directory / f"rank{rank}").open("wb", buffering=0) as file:
                    file.write(os.urandom(100_000))
                    os.fsync(file.fileno())
            begin = time.perf_counter()
            for rank in range(PLANNED_RANKS):
                os.setxattr(directory, "user.aifs.group.commit", str(rank).encode())
            commits.append(time.perf_counter() - begin)
            aifs.await_durable(directory, grouped=True)
            again = pattern(CASES[0])
            begin = time.perf_counter()
            plan(again)
            plans.append(time.perf_counter() - begin)
    return {
        "ranks": PLANNED_RANKS,
        "commits_s": statistics.median(commits),
        "plan_s": statistics.median(plans),
    }


def _reads(base: Path, mib: int, rounds: int) -> list[dict[str, Any]]:
    """Readers of one file, and of a file each that shares its chunks with the others; servers are 1
    ms away, and nothing is in any cache."""
    cases = [("one", readers) for readers in READERS] + [
        ("shared", readers) for readers in READERS if readers <= RANKS
    ]
    taken: dict[tuple[str, int], list[Reading]] = {case: [] for case in cases}
    with ReadAifs("reading", base, distant=True) as aifs:
        for _ in range(rounds):
            for what, readers in cases:
                files = _write_evicted(aifs, what, mib)
                touch_memory(base, (RANKS + 1) * mib)
                taken[what, readers].append(aifs.read((files * readers)[:readers], "buffered"))
                aifs.remove(what)
    return [
        {
            "files": what,
            "readers": readers,
            "bytes": mib << 20,
            "seconds": statistics.median(one.seconds for one in found),
            "fetched_bytes": statistics.median(one.fetched for one in found),
        }
        for (what, readers), found in taken.items()
    ]


def _write_evicted(aifs: ReadAifs, name: str, mib: int) -> list[Path]:
    """A file, or ("shared") the files of a grouped write with the same bytes, that are on the
    servers alone.
    """
    directory = aifs.path / name
    directory.mkdir()
    files = RANKS if name == "shared" else 1
    os.setxattr(directory, "user.aifs.group", f"name={name},ranks={files}".encode())
    data = os.urandom(mib << 20)
    for rank in range(files):
        (directory / f"rank{rank}").write_bytes(data)
    await_group(directory)
    found = aifs.files(name)
    for file in found:
        aifs.ask(file, "evict")
    return found


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def grouped_rows(base: Path, mib: int, rounds: int) -> list[Row]:
    return rows(measure(base, mib, rounds)) if find_spec("torch") else []


def rows(found: dict[str, Any]) -> list[Row]:
    """What ``measure`` has found, beside its targets."""
    by_way = {one["way"]: one for one in found["memory"]}
    alone, grouped = by_way["+ fast save"], by_way["+ dedup"]
    told = []
    for key, what, target in (
        ("durable_s", "durable", DURABLE_TARGET),
        ("buffer_s", "in the buffer", BUFFER_TARGET),
    ):
        ratio = grouped[key] / alone[key]
        told.append(
            Row(
                f"grouped save of {RANKS} x {found['mib']} MiB, the same in all: {what}",
                f"ungrouped {alone[key]:.2f} s",
                None,
                None,
                None,
                f"{grouped[key]:.2f} s: {ratio:.2f} x",
                f"<= {target} x",
                ratio <= target,
            )
        )
    coordination = found["coordination"]
    total_s = coordination["commits_s"] + coordination["plan_s"]
    told.append(
        Row(
            f"commits of {coordination['ranks']} ranks, and their plan",
            "",
            None,
            None,
            None,
            f"{total_s * 1000:.0f} ms",
            f"< {COORDINATION_TARGET_S * 1000:.0f} ms",
            total_s < COORDINATION_TARGET_S,
        )
    )
    return told


def main(words: Sequence[str]) -> None:
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    chosen, size, times = [*words, *(None, "256", "3")[len(words) :]]
    with medium(chosen or None) as place:
        touch_memory(place, 12 * int(size))
        found = measure(place, int(size), int(times))
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        show(rows(found), as_json=False)


if __name__ == "__main__":
    main(sys.argv[1:])
