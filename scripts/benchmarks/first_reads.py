"""Reads of files that lie on the data servers alone, first and again, beside a plain directory and
libfuse's examples in C where these are found in PATH: ``passthrough_hp``, which has the kernel pass
files through, and ``passthrough_ll``, which reads them itself.

The kernel's caches are dropped before each read, and the daemon is started anew before a first one.
"""

import mmap
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from environments import Passthrough
from load import MIB, SMALL, small_read, small_write, together
from movement import PatientAifs
from report import Row, at_most, rate, told
from systems import HERE, System, drop_caches

KIB = 1 << 10
TINY_BYTES, SAMPLE_BYTES = 4 * KIB, 20_000
FOLDER_FILES = 1000
READERS = 4
REQUEST_BYTES = 256 * KIB
BUDGET_MIB, SHARDS_OF_BUDGET, SHARD_MIB = 64, 4, 4
DISK_MIB, WRITTEN_MIB = 1024, 128
FROM_SERVERS = {"second epoch": 0.0, "epoch after a restart": 0.02}
"""The largest parts of a dataset's bytes."""
WRITER_TARGET = 0.95


class Amount(NamedTuple):
    """``files``: of 4 KiB, and of 100 KB; ``samples``: of an epoch; ``mib``: of a stream, and of
    each set of shards."""

    files: int
    samples: int
    mib: int


QUICK = Amount(files=300, samples=1000, mib=64)
NORMAL = Amount(files=1500, samples=10_000, mib=256)


class Goal(NamedTuple):
    """The least ratio of AIFS's rate to that of a system: "plain", or one in C by its name."""

    beside: str
    least: float


class Work(NamedTuple):
    """``write`` makes what ``read`` reads, below a directory. ``read`` returns the seconds that the
    ``amount``, in ``unit``, takes; it gets the number of reads before. ``goals``: one for each read
    that follows the other. ``striped``: past the burst tier."""

    name: str
    unit: str
    amount: float
    write: Callable[[Path], object]
    read: Callable[[Path, int], float]
    goals: tuple[Goal, ...]
    striped: bool = False


class InC(Passthrough):
    """libfuse's example that reads files itself."""

    def __init__(self, name: str, base: Path, program: str) -> None:
        super().__init__(name, base, program)
        self.command = [program, "-f", "-o", f"source={self.source}", self.path]


class FirstReads(PatientAifs):
    def settle(self, directory: str) -> None:
        """Return when all below is on the data servers alone."""
        self.drain(directory)
        self.evict()
        self.rest()

    def forget(self) -> None:
        """Nothing that was read is in the daemon's memory any more; its blocks stay."""
        subprocess.run(["umount", self.path], check=True)
        self.daemon.wait()
        self.mount_again()

    def read_bytes(self) -> int:
        """That data servers were asked for since the mount."""
        return sum(server["read_bytes"] for server in self.status()["servers"])


def first_read_rows(base: Path, amount: Amount, rounds: int) -> list[Row]:
    """The rows of the table; that of an epoch only with torch."""
    systems: dict[str, System] = {"plain": System("plain-first", base)}
    for program, kind in (("passthrough_hp", Passthrough), ("passthrough_ll", InC)):
        found = shutil.which(program)
        if found is not None:
            systems[program] = kind(f"{program}-first", base, found)
    systems["aifs"] = aifs = FirstReads("aifs-first", base)
    works = [work for work in _works(amount) if work.read is not _epoch or find_spec("torch")]
    found_s: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        for system in systems.values():
            stack.enter_context(system)
        for number, work in enumerate(works):
            directory = f"first{number}"
            if work.striped:
                aifs.use_capacity_tier(directory)
            for system in systems.values():
                (system.path / directory).mkdir(exist_ok=True)
                work.write(system.path / directory)
            for _ in range(rounds):
                aifs.settle(directory)
                for name, system in systems.items():
                    system.forget()
                    for before in range(len(work.goals)):
                        drop_caches()
                        took_s = work.read(system.path / directory, before)
                        found_s[work.name, before, name].append(took_s)
            for system in systems.values():
                system.remove(directory)
    rows = []
    for work in works:
        for before, goal in enumerate(work.goals):
            rates = {
                name: work.amount / statistics.median(found_s[work.name, before, name])
                for name in systems
            }
            rows.append(_row(work, before, goal, rates))
    return rows + _tier_rows(base, rounds)


def _row(work: Work, before: int, goal: Goal, rates: dict[str, float]) -> Row:
    plain, aifs, in_c = rates["plain"], rates["aifs"], rates.get(goal.beside)
    return Row(
        f"{work.name}, {('first', 'second', 'third')[before]} read",
        rate(plain, work.unit),
        None,
        aifs / plain,
        None,
        rate(aifs, work.unit),
        f">= {goal.least} of {goal.beside}",
        in_c is None or aifs / in_c >= goal.least,
        None if goal.beside == "plain" or in_c is None else in_c / plain,
    )


# --- what is read ---


def _works(amount: Amount) -> list[Work]:
    hp, ll = "passthrough_hp", "passthrough_ll"
    files, samples, mib = amount
    works = [
        _small("files of 4 KiB", files, TINY_BYTES, 1, (Goal(hp, 1.0), Goal(hp, 1.5))),
        _small("files of 100 KB", files, SMALL, 1, (Goal(hp, 1.3), Goal(hp, 2.0))),
        _small("files of 4 KiB, 4 processes", files, TINY_BYTES, READERS, (Goal(hp, 0.8),)),
        _striped("random 4 KiB", mib // 8, 1, _read_randomly, Goal(ll, 1.0)),
        _striped("random 4 KiB, 16 jobs", mib // 32, 16, _read_randomly, Goal("plain", 0.25)),
        _striped("striped stream", mib, 1, _read, Goal("plain", 0.9)),
        _striped("4 striped streams", mib, READERS, _read, Goal("plain", 0.8)),
        Work(
            "epoch at random",
            "files/s",
            samples,
            partial(_write_samples, count=samples),
            _epoch,
            (Goal("plain", 0.4), Goal("plain", 0.6), Goal("plain", 0.6)),
        ),
    ]
    for shard_mib, least in zip((1, 4, 32), (0.3, 0.5, 0.6), strict=True):
        count = max(mib // shard_mib, 1)
        works.append(
            Work(
                f"files of {shard_mib} MiB, 4 processes",
                "MiB/s",
                count * shard_mib,
                partial(_write, count=count, mib=shard_mib),
                partial(_shards, count=count),
                (Goal("plain", least), Goal("plain", 0.8)),
            )
        )
    return works


def _small(name: str, count: int, size: int, jobs: int, goals: tuple[Goal, ...]) -> Work:
    def names(path: Path) -> list[str]:
        return [str(path / f"f{number}") for number in range(count)]

    def read(path: Path, before: int) -> float:
        return together([partial(small_read, names(path)[n::jobs], size) for n in range(jobs)])

    return Work(name, "files/s", count, lambda path: small_write(names(path), size), read, goals)


def _striped(name: str, mib: int, jobs: int, read: Callable[[Path], None], goal: Goal) -> Work:
    """A file for each job, read by one."""
    per_mib, unit = (MIB // TINY_BYTES, "requests/s") if read is _read_randomly else (1, "MiB/s")
    return Work(
        name,
        unit,
        mib * jobs * per_mib,
        partial(_write, count=jobs, mib=mib),
        lambda path, before: together([partial(read, path / f"{n}") for n in range(jobs)]),
        (goal,),
        striped=True,
    )


def _write(path: Path, count: int, mib: int) -> None:
    block = os.urandom(MIB)
    for number in range(count):
        with (path / f"{number}").open("wb") as file:
            for _ in range(mib):
                file.write(block)


def _read(path: Path) -> None:
    block = [bytearray(REQUEST_BYTES)]
    fd = os.open(path, os.O_RDONLY)
    while os.readv(fd, block):
        pass
    os.close(fd)


def _read_randomly(path: Path) -> None:
    """As many requests as the file has pages, none by the page cache."""
    pages = path.stat().st_size // TINY_BYTES
    block = [mmap.mmap(-1, TINY_BYTES)]  # begins at a page
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    rng = random.Random(pages)
    for _ in range(pages):
        assert os.preadv(fd, block, rng.randrange(pages) * TINY_BYTES) == TINY_BYTES
    os.close(fd)


def _shards(path: Path, before: int, count: int) -> float:
    def read(reader: int) -> None:
        for number in range(reader, count, READERS):
            _read(path / f"{number}")

    return together([partial(read, reader) for reader in range(READERS)])


def _write_samples(path: Path, count: int) -> None:
    for first in range(0, count, FOLDER_FILES):
        folder = path / f"{first}"
        folder.mkdir()
        numbers = range(first, min(first + FOLDER_FILES, count))
        small_write([str(folder / f"f{number}") for number in numbers], SAMPLE_BYTES)


def _epoch(path: Path, before: int) -> float:
    command = [sys.executable, HERE / "loader_epoch.py", path, str(before)]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


# --- a burst directory on a disk ---


class FullTier(FirstReads):
    """Of a burst directory on a filesystem of its own, and few bytes of memory."""

    def __init__(self, name: str, base: Path, burst: Path) -> None:
        super().__init__(name, base)
        self._burst = burst
        self.command = [*self.command, "-o", f"memory.budget={BUDGET_MIB}MiB"]

    def __enter__(self) -> "System":
        (self.base / "store").mkdir(parents=True)
        settings = f"burst:\n  directories: [{self._burst}]\n"
        (self.base / "store" / "aifs.yaml").write_text(settings)
        return super().__enter__()


def _tier_rows(base: Path, rounds: int) -> list[Row]:
    """Bytes that servers are asked for, of all bytes, in further epochs over shards of four times
    the memory's budget; a writer into a tier that is full of blocks, beside an empty one."""
    mib = SHARDS_OF_BUDGET * BUDGET_MIB
    count = mib // SHARD_MIB
    with (
        _disk(base / "servers") as servers,
        _disk(base / "nearer") as nearer,
        FullTier("aifs-tier", servers, nearer / "burst") as aifs,
    ):
        shards = aifs.path / "shards"
        shards.mkdir()
        _write(shards, count, SHARD_MIB)
        aifs.settle("shards")
        parts = {}
        for epoch in ("first epoch", "second epoch", "epoch after a restart"):
            if epoch == "epoch after a restart":
                aifs.forget()
            drop_caches()
            before = aifs.read_bytes()
            _shards(shards, 0, count)
            parts[epoch] = (aifs.read_bytes() - before) / (mib * MIB)
        aifs.command = [*aifs.command, "-o", f"burst.capacity={mib}MiB"]
        aifs.forget()
        written: dict[str, list[float]] = {"empty": [], "full": []}
        for _ in range(rounds + 1):
            for tier, found in written.items():
                aifs.settle("shards")
                if tier == "full":
                    _shards(shards, 0, count)
                os.sync()
                found.append(aifs.run("write-sync", tier, jobs=1, mib=WRITTEN_MIB))
                aifs.remove(tier)
    rates = {tier: WRITTEN_MIB / statistics.median(found[1:]) for tier, found in written.items()}
    of_empty = rates["full"] / rates["empty"]
    return [
        told("bytes from servers, first epoch", f"{parts['first epoch']:.3f}"),
        *(
            at_most(f"bytes from servers, {epoch}", parts[epoch], most)
            for epoch, most in FROM_SERVERS.items()
        ),
        Row(
            "write into a tier full of blocks",
            f"empty {rate(rates['empty'], 'MiB/s')}",
            None,
            of_empty,
            None,
            rate(rates["full"], "MiB/s"),
            f">= {WRITER_TARGET}",
            of_empty >= WRITER_TARGET,
        ),
    ]


@contextmanager
def _disk(path: Path) -> Iterator[Path]:
    """An ext4 of a loop device."""
    image = path.with_suffix(".ext4")
    with image.open("wb") as file:
        file.truncate(DISK_MIB * MIB)
    path.mkdir()
    try:
        subprocess.run(["mkfs.ext4", "-q", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, path], check=True)
        try:
            yield path
        finally:
            subprocess.run(["umount", path], check=True)
    finally:
        path.rmdir()
        image.unlink()
