"""Readers of the same bytes at once: how much longer they take than one alone, and what is read
from the servers.

N processes read one file; or 4 read a file each, which share their chunks. Of files on the data
servers alone, with a cold page cache: on servers in memory, and on such that take 1 ms more per
request, as across a network.

    python scripts/benchmarks/grouped_read.py [DIRECTORY] [MIB] [ROUNDS]
"""

import json
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from load import together
from protection import ServersAifs
from report import Row, rate, show
from systems import HERE, medium

MIB = 1 << 20
READERS = (1, 2, 4, 8)
MEMBERS = 4
TIME_TARGET, BYTES_TARGET = 1.3, 1.05
LAYOUTS = {
    "striped": "count=4",
    "interleaved": "kind=interleaved",
    "replicated": "count=4,replicas=2",
}
SHARED_LAYOUTS = {"one copy": "replicas=1", "replicas": "replicas=2", "coded": "ec=4+2"}
WAYS = ("buffered", "apart", "direct", "mapped")
"""``apart``: each reader begins somewhere else, and comes round."""
TIMED = ("buffered", "mapped")
"""Past the page cache as many bytes go through the kernel as there are readers."""


class Reading(NamedTuple):
    """Seconds until the last reader is done; bytes read from servers; of which the cache had asked
    another server, too, because the first one took long (a hedge, which reads about as much more).
    """

    seconds: float
    fetched: int
    hedged: int


class ReadAifs(ServersAifs):
    """``distant``: each request to a server takes 1 ms more."""

    def __init__(self, name: str, base: Path, distant: bool) -> None:
        super().__init__(name, base)
        if distant:
            self.command = [sys.executable, HERE / "delayed.py", *self.command[len(self._aifs) :]]

    def write(self, directory: str, layout: str, mib: int) -> None:
        """A file, on the data servers alone."""
        self.make(directory, layout)
        _fill(self.path / directory / "file", mib)
        self.settle(directory)

    def write_grouped(self, directory: str, layout: str, mib: int) -> list[Path]:
        """Files of the same bytes that share their chunks, on the data servers alone."""
        self.make(directory, layout)
        path = self.path / directory
        os.setxattr(path, "user.aifs.group", f"name=read,ranks={MEMBERS}".encode())
        for member in range(MEMBERS):
            _fill(path / f"rank{member}", mib)
        while (group := json.loads(os.getxattr(path, "user.aifs.group")))["state"] != "durable":
            if group["error"]:
                raise RuntimeError(group["error"])
            time.sleep(0.05)
        for file in self.files(directory):
            self.ask(file, "evict")
        return self.files(directory)

    def read(self, paths: Sequence[Path], way: str) -> Reading:
        """By as many processes, each of which reads a path."""
        for path in set(paths):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        fetched, hedged = self.read_bytes()
        seconds = together(
            [
                lambda path=path, at=at: WORK[way](path, at / len(paths))
                for at, path in enumerate(paths)
            ]
        )
        fetched_then, hedged_then = self.read_bytes()
        return Reading(seconds, fetched_then - fetched, hedged_then - hedged)

    def read_bytes(self) -> tuple[int, int]:
        """From all servers since the mount; and those that were hedged."""
        status = self.status()
        return sum(server["read_bytes"] for server in status["servers"]), status["cache"][
            "hedged_bytes"
        ]


def _fill(path: Path, mib: int) -> None:
    source = random.Random(mib)
    with path.open("wb", buffering=0) as file:
        for _ in range(mib):
            file.write(source.randbytes(MIB))


def _read(path: Path, first: float, direct: int = 0) -> None:
    fd = os.open(path, os.O_RDONLY | direct)
    size, buffer = os.fstat(fd).st_size, mmap.mmap(-1, MIB)
    start = int(first * size) // MIB * MIB
    for offset in (*range(start, size, MIB), *range(0, start, MIB)):
        if os.preadv(fd, [buffer], offset) != min(MIB, size - offset):
            raise RuntimeError(f"{path} ends before byte {offset + MIB}")
    os.close(fd)


def _read_mapped(path: Path, first: float) -> None:
    block = bytearray(MIB)
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping,
        memoryview(mapping) as view,
    ):
        for offset in range(0, len(view), MIB):
            part = view[offset : offset + MIB]
            block[: len(part)] = part
            part.release()


WORK: dict[str, Callable[[Path, float], None]] = {
    "buffered": lambda path, at: _read(path, 0),
    "apart": _read,
    "direct": lambda path, at: _read(path, 0, os.O_DIRECT),
    "mapped": _read_mapped,
}


def grouped_read_rows(
    base: Path,
    mib: int,
    rounds: int,
    ways: Sequence[str] = WAYS[:1],
    distances: Sequence[bool] = (True,),
) -> Iterator[Row]:
    for distant in distances:
        where = "1 ms away" if distant else "in memory"
        with ReadAifs("reading", base, distant) as aifs:
            for layout, text in LAYOUTS.items():
                aifs.write(layout, text, mib)
                for way in ways:
                    # Memory is its own cache.
                    counts = distant or way != "direct"
                    yield from _one_file(
                        aifs, layout, mib, rounds, way, f"{layout}, {where}", counts
                    )
                aifs.remove(layout)
        for layout, text in SHARED_LAYOUTS.items():
            for way in ways:
                yield _members(base, distant, text, mib, rounds, way, f"{layout}, {where}")


def _one_file(
    aifs: ReadAifs, directory: str, mib: int, rounds: int, way: str, what: str, counts: bool
) -> Iterator[Row]:
    path, found = aifs.path / directory / "file", {readers: [] for readers in READERS}
    for _ in range(rounds):
        for readers in READERS:
            found[readers].append(aifs.read([path] * readers, way))
    alone = statistics.median(one.seconds for one in found[1])
    for readers in READERS:
        yield _row(
            f"{readers} read one file ({what}), {way}",
            mib,
            found[readers],
            alone,
            way in TIMED,
            counts,
        )


def _members(
    base: Path, distant: bool, layout: str, mib: int, rounds: int, way: str, what: str
) -> Row:
    """As many times one reader's bytes go through the kernel, so their time has no target."""
    found: dict[int, list[Reading]] = {1: [], MEMBERS: []}
    for _ in range(rounds):
        for readers, results in found.items():  # each with a daemon that has read nothing yet
            with ReadAifs("reading", base, distant) as aifs:
                results.append(aifs.read(aifs.write_grouped("shared", layout, mib)[:readers], way))
    alone = statistics.median(one.seconds for one in found[1])
    what = f"{MEMBERS} read files that share chunks ({what}), {way}"
    return _row(what, mib, found[MEMBERS], alone, False, distant)


def _row(
    work: str, mib: int, found: Sequence[Reading], alone: float, timed: bool, counts: bool
) -> Row:
    """``alone``: seconds of one reader. ``timed``, ``counts``: whether time, or what is fetched,
    has a target.
    """
    seconds, most = (
        statistics.median(one.seconds for one in found),
        max(found, key=lambda one: one.fetched),
    )
    fetched = most.fetched / (mib * MIB)
    hedged = f", {most.hedged / (mib * MIB):.2f} x hedged" if most.hedged else ""
    targets = [f"<= {TIME_TARGET} x"] * timed + [f"<= {BYTES_TARGET} x the bytes"] * counts
    passed = not (timed and seconds > TIME_TARGET * alone) and not (
        counts and fetched > BYTES_TARGET
    )
    return Row(
        work,
        f"one reader {rate(mib / alone, 'MiB/s')}",
        None,
        None,
        None,
        f"{seconds / alone:.2f} x its time, {fetched:.2f} x the bytes{hedged}",
        ", ".join(targets),
        passed,
    )


if __name__ == "__main__":
    chosen, size, times = (sys.argv[1:] + [None, "1024", "3"][len(sys.argv) - 1 :])[:3]
    with medium(chosen or None) as place:
        show(
            list(grouped_read_rows(place, int(size), int(times), WAYS, (False, True))),
            as_json=False,
        )
