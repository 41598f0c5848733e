"""Does anybody feel background work? How long stat takes of files that the kernel does not know,
while files are drained, scrubbed and deleted; writes while gigabytes drain; reads of what has just
been written.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from report import Row, rate
from systems import HERE, Aifs, System, drop_names

P99_MS, WRITE_TARGET, READ_TARGET = 2.0, 0.8, 0.85
JOBS = 4
SIZES = (4096, 20_000, 100_000)
"""Bytes of files that are read right after they were written."""

_PROBED = 200
"""Calls of stat after which it is asked whether the work still goes on."""


class Extent(NamedTuple):
    """Files to drain, scrub and read; files to delete; MiB that drain while others write; files
    that stat is called of."""

    files: int
    deleted: int
    mib: int
    probed: int


def background_rows(base: Path, extent: Extent, rounds: int) -> list[Row]:
    latencies: dict[str, list[float]] = {}
    rates: dict[str, list[float]] = {}
    with System("plain-beside", base) as plain, Aifs("aifs-beside", base) as aifs:
        aifs.run("create", "probed", count=extent.probed)
        for _ in range(rounds):
            for name, found in _latencies(aifs, extent):
                latencies.setdefault(name, []).extend(found)
            for name, value in (*_reads(aifs, extent), *_writes(plain, aifs, extent)):
                rates.setdefault(name, []).append(value)
    middle = {name: statistics.median(values) for name, values in rates.items()}
    rows = [_latency_row(name, found) for name, found in latencies.items()]
    for size in SIZES:
        what = f"read of {size / 1000:.0f} KB files"
        of = middle[f"at once {size}"], middle[f"later {size}"]
        rows.append(_row(f"{what}, right after writing", "idle", "files/s", *of, READ_TARGET))
    of = middle["write beside"], middle["write"]
    name = f"write-{JOBS} while {extent.mib // 1024 or extent.mib / 1024:.3g} GiB drain"
    rows.append(_row(name, "plain", "MiB/s", *of, WRITE_TARGET))
    return rows


def _row(work: str, against: str, unit: str, reached: float, baseline: float, target: float) -> Row:
    ratio = reached / baseline
    told = f"{against} {rate(baseline, unit)}"
    return Row(work, told, None, ratio, None, rate(reached, unit), f">= {target}", ratio >= target)


def _latency_row(name: str, found: list[float]) -> Row:
    p99_ms = 1000 * statistics.quantiles(found, n=100)[98]
    middle_ms = 1000 * statistics.median(found)
    told = f"p99 {p99_ms:.2f} ms, median {middle_ms:.2f} ms, {len(found)} calls"
    passed = name == "stat" or p99_ms < P99_MS
    return Row(name, "", None, None, None, told, f"p99 < {P99_MS:.0f} ms", passed)


# --- stat meanwhile ---


def _latencies(aifs: Aifs, extent: Extent) -> Iterator[tuple[str, list[float]]]:
    prober = _Prober(aifs.path / "probed", extent.probed)
    aifs.rest()
    yield "stat", prober.during(iter([True] * 4 + [False]).__next__)
    aifs.run("small-write", "moved", count=extent.files)
    aifs.begin_background()
    yield (
        f"stat while {extent.files} files drain",
        prober.during(lambda: aifs.status()["drain"]["files"] > 0),
    )
    aifs.rest()
    os.setxattr(aifs.path, "user.aifs.scrub", b"start")
    yield (
        "stat while a scrub reads them",
        prober.during(lambda: aifs.status()["scrub"]["running"]),
    )
    aifs.remove("moved")
    aifs.run("create", "doomed", count=extent.deleted)
    aifs.rest()
    with _removing(aifs.path / "doomed") as goes_on:
        yield (
            f"stat while {extent.deleted} files are deleted",
            prober.during(lambda: goes_on() or aifs.status()["collector_backlog"] > 0),
        )


class _Prober:
    """Calls stat of files in turn, of each when the kernel has forgotten it."""

    def __init__(self, directory: Path, count: int) -> None:
        self._directory = directory
        self._count = count
        self._next = count

    def during(self, goes_on: Callable[[], bool]) -> list[float]:
        """Seconds that each call has taken while something ``goes_on``, but at least once for some
        files."""
        found: list[float] = []
        while True:
            if self._next + _PROBED > self._count:
                drop_names()
                self._next = 0
            words = [f"first={self._next}", f"count={_PROBED}"]
            command = [sys.executable, HERE / "load.py", "probe", self._directory, *words]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            self._next += _PROBED
            found += json.loads(done.stdout)
            if not goes_on():
                return found


@contextmanager
def _removing(directory: Path) -> Iterator[Callable[[], bool]]:
    """A process removes a tree; yields what says whether it goes on."""
    remover = subprocess.Popen(["rm", "-rf", directory])
    try:
        yield lambda: remover.poll() is None
    finally:
        remover.wait()


# --- reads and writes meanwhile ---


def _reads(aifs: Aifs, extent: Extent) -> Iterator[tuple[str, float]]:
    for size in SIZES:
        settings = {"count": extent.files, "bytes": size}
        aifs.run("small-write", "fresh", **settings)
        aifs.begin_background()
        drop_names()
        yield f"at once {size}", extent.files / aifs.run("small-read", "fresh", **settings)
        aifs.rest()
        drop_names()
        yield f"later {size}", extent.files / aifs.run("small-read", "fresh", **settings)
        aifs.remove("fresh")
        aifs.rest()


def _writes(plain: System, aifs: Aifs, extent: Extent) -> Iterator[tuple[str, float]]:
    settings = {"jobs": JOBS, "mib": max(extent.mib // (2 * JOBS), 1)}
    total = settings["jobs"] * settings["mib"]
    plain.run("write", "warm", **settings)  # the memory that it will take
    plain.remove("warm")
    yield "write", total / plain.run("write", "beside", **settings)
    plain.remove("beside")
    aifs.run("write", "draining", jobs=JOBS, mib=extent.mib // JOBS)
    aifs.begin_background()
    yield "write beside", total / aifs.run("write", "beside", **settings)
    if not aifs.status()["drain"]["files"]:
        raise RuntimeError("all had been drained before the writers ended")
    aifs.rest()
    for directory in ("draining", "beside"):
        aifs.remove(directory)
