"""What redundancy costs and what it is worth: draining with replicas and parity against draining
without, per byte that goes to the servers; reading with a server lost, or slow; scrubbing and
rebuilding against plain reads and copies."""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from movement import PatientAifs
from report import Row, at_least
from systems import HERE, REPOSITORY, drop_caches

SERVERS = 6
FILES = 4
POLICIES = {
    "plain": ("count=0", 1.0, None),
    "replicas": ("replicas=2", 2.0, 0.8),
    "coded": ("ec=4+2", 1.5, 0.6),
}
"""Layout, bytes on servers per byte of a file, least ratio to the plain drain."""

DEGRADED_TARGET, HEDGED_TARGET, SCRUB_TARGET, REBUILD_TARGET = 0.5, 3.0, 0.7, 0.7


class ServersAifs(PatientAifs):
    """AIFS with six data servers."""

    def __init__(self, name: str, base: Path, options: str = "") -> None:
        super().__init__(name, base)
        self._source = self.base / "store"
        options = "burst.drain_delay=1h,meta.backup_interval=0,scrub.bandwidth=0" + options
        self.command = [
            *self._aifs,
            "mount",
            "--foreground",
            self._source,
            self.path,
            "-o",
            options,
        ]

    def __enter__(self) -> "ServersAifs":
        self.base.mkdir(parents=True)
        servers = "".join(f"  - {self.server(number)}\n" for number in range(SERVERS))
        self._source.write_text(
            f"meta:\n  directory: {self.base}/meta\nburst:\n  directories: "
            f"[{self.base}/burst]\nservers:\n{servers}"
        )
        return super().__enter__()

    def server(self, number: int) -> Path:
        return self.base / f"server{number}"

    def command_s(self, *words: str | Path) -> float:
        """Seconds that a command takes."""
        begin = time.perf_counter()
        subprocess.run([*self._aifs, *words], check=True, cwd=REPOSITORY, stdout=subprocess.DEVNULL)
        return time.perf_counter() - begin

    def make(self, directory: str, layout: str) -> None:
        (self.path / directory).mkdir()
        os.setxattr(self.path / directory, "user.aifs.layout", layout.encode())

    def settle(self, directory: str) -> None:
        """All below is on the data servers alone."""
        self.drain(directory)
        for file in self.files(directory):
            self.ask(file, "evict")

    def lose(self, number: int) -> None:
        """The server's directory vanishes, as a disk does that has died."""
        self.server(number).rename(self._aside(number))

    def find(self, number: int) -> None:
        self._aside(number).rename(self.server(number))

    def _aside(self, number: int) -> Path:
        return self.base / f"lost{number}"

    def objects(self, numbers: Iterable[int]) -> list[Path]:
        """The objects on some servers."""
        found = (
            path for number in numbers for path in (self.server(number) / "objects").rglob("*")
        )
        return sorted(path for path in found if path.is_file())


class SlowAifs(ServersAifs):
    """One of the servers can be made slow."""

    def __init__(self, name: str, base: Path, hedge: str) -> None:
        super().__init__(name, base, f",data.hedge={hedge}")
        self.flag = self.base / "slow"
        os.environ["SLOW_FLAG"] = str(self.flag)
        self.command = [sys.executable, HERE / "one_slow.py", *self.command[len(self._aifs) :]]


Note = Callable[[str, float], None]


def protection_rows(base: Path, mib: int, rounds: int) -> list[Row]:
    found: dict[str, list[float]] = {}

    def note(name: str, value: float) -> None:
        found.setdefault(name, []).append(value)

    with ServersAifs("protected", base) as aifs:
        for round_ in range(rounds):
            for policy, (layout, _, _) in POLICIES.items():
                _drain(aifs, policy, layout, mib, note)
        _read_degraded(aifs, mib, rounds, note)
        _scrub_and_rebuild(aifs, note)
    for hedge in ("auto", "off"):
        with SlowAifs(f"slow-{hedge}", base, hedge) as slow:
            _read_slow(slow, mib, hedge, note)
    middle = {name: statistics.median(values) for name, values in found.items()}
    drains = [
        at_least(
            f"drain {layout}, bytes on servers",
            "without",
            middle["plain"],
            middle[policy] * factor,
            target,
        )
        for policy, (layout, factor, target) in POLICIES.items()
        if target is not None
    ]
    times = {name: value * 1000 for name, value in middle.items()}
    return [
        *drains,
        at_least(
            "read ec=4+2, a server lost",
            "none lost",
            middle["healthy"],
            middle["degraded"],
            DEGRADED_TARGET,
        ),
        at_least("scrub", "reading the objects", middle["objects"], middle["scrub"], SCRUB_TARGET),
        at_least(
            "rebuild of a lost server",
            "cp + fsync",
            middle["cp"],
            middle["rebuild"],
            REBUILD_TARGET,
        ),
        Row(
            "p99 of 1 MiB reads, a server slow by 200 ms",
            f"none slow {times['p99-auto']:.1f} ms",
            None,
            None,
            None,
            f"{times['p99-slow-auto']:.1f} ms (not hedged: {times['p99-slow-off']:.1f} ms)",
            f"< {HEDGED_TARGET:.0f} x",
            middle["p99-slow-auto"] < HEDGED_TARGET * middle["p99-auto"],
        ),
    ]


def _drain(aifs: ServersAifs, policy: str, layout: str, mib: int, note: Note) -> None:
    aifs.make("drained", layout)
    aifs.run("write", "drained", jobs=FILES, mib=mib)
    note(policy, FILES * mib / aifs.drain("drained"))
    aifs.remove("drained")


def _read_degraded(aifs: ServersAifs, mib: int, rounds: int, note: Note) -> None:
    aifs.make("coded", "ec=4+2")
    aifs.run("write", "coded", jobs=FILES, mib=mib)
    aifs.settle("coded")
    for round_ in range(rounds):
        note("healthy", mib / aifs.run("read", "coded", jobs=1, mib=mib, cold=1))
        aifs.lose(round_ % SERVERS)
        note("degraded", mib / aifs.run("read", "coded", jobs=1, mib=mib, cold=1))
        aifs.find(round_ % SERVERS)


def _scrub_and_rebuild(aifs: ServersAifs, note: Note) -> None:
    """Of what ``_read_degraded`` has left."""
    objects = aifs.objects(range(SERVERS))
    total = sum(path.stat().st_size for path in objects) / 2**20
    begin = time.perf_counter()
    buffer = bytearray(4 << 20)
    for path in objects:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    note("objects", total / (time.perf_counter() - begin))
    note("scrub", total / aifs.command_s("scrub", "start", aifs.path, "--wait"))

    lost = aifs.objects([0])
    moved = sum(path.stat().st_size for path in lost) / 2**20
    begin = time.perf_counter()
    (aifs.base / "copy").mkdir()
    for number, path in enumerate(lost):
        with path.open("rb") as source, (aifs.base / "copy" / f"{number}").open("wb") as target:
            shutil.copyfileobj(source, target, 4 << 20)
            os.fsync(target.fileno())
    note("cp", moved / (time.perf_counter() - begin))
    shutil.rmtree(aifs.base / "copy")
    aifs.lose(0)
    note(
        "rebuild",
        moved / aifs.command_s("server", "replace", aifs.path, "0", aifs.base / "new", "--wait"),
    )


def _read_slow(aifs: SlowAifs, mib: int, hedge: str, note: Note) -> None:
    aifs.make("coded", "ec=4+2")
    aifs.run("write", "coded", jobs=FILES, mib=mib)
    aifs.settle("coded")
    file = aifs.files("coded")[0]
    note(f"p99-{hedge}", _p99(file, mib))
    info = json.loads(os.getxattr(file, "user.aifs.info"))
    aifs.flag.write_text(f"{aifs.server(info['layout']['servers'][0])}/")  # one that holds data
    note(f"p99-slow-{hedge}", _p99(file, mib))


def _p99(file: Path, mib: int) -> float:
    """Seconds; of single reads of 1 MiB, in random order, of a file that no cache holds."""
    drop_caches()
    fd = os.open(file, os.O_RDONLY)
    taken = []
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
        for number in random.Random(mib).sample(range(mib), min(mib, 300)):
            begin = time.perf_counter()
            os.pread(fd, 1 << 20, number << 20)
            taken.append(time.perf_counter() - begin)
    finally:
        os.close(fd)
    return sorted(taken)[len(taken) * 99 // 100]
