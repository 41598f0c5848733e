"""Datasets: rows in shuffled order beside rows in file order and rows at random, from the burst
tier and from data servers that take 1 ms more for each request; how soon a reader is ready.

Rows are records of 4 KiB, so that it is the reading that is measured, and no decoding. Orders take
turns in each round; before each one the kernel and, by a new mount, the daemon have forgotten all.
"""

import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from report import Row, rate
from systems import HERE, REPOSITORY, Aifs, DelayedAifs, System, drop_caches

from aifs.client import data

ROW = 4096
OPTIONS: dict[str, Any] = {"format": "records", "record_bytes": ROW}


class Extent(NamedTuple):
    """MiB of rows; rows that are read at random; files of a dataset of many; thousands of rows of
    each; small files."""

    mib: int
    random_rows: int
    files: int
    thousands: int
    small: int

    @property
    def rows(self) -> str:
        """What the dataset of many files is."""
        return f"{self.files:,} files, {self.files * self.thousands / 1000:.3g} million rows"

    @property
    def part(self) -> "Extent":
        """With as many of the many files as an order file is made of."""
        return self._replace(files=self.files // 8)


QUICK = Extent(mib=32, random_rows=64, files=200, thousands=10, small=200)
NORMAL = Extent(mib=512, random_rows=1000, files=4000, thousands=97, small=1500)
"""386 million rows, as in C4."""

Rates = dict[tuple[str, str], list[float]]


def data_rows(base: Path, extent: Extent, rounds: int) -> list[Row]:
    """The rows of the table; needs pyarrow."""
    found: Rates = defaultdict(list)
    with ExitStack() as stack:
        plain = stack.enter_context(System("data-plain", base))
        burst = stack.enter_context(Aifs("data-burst", base))
        far = stack.enter_context(DelayedAifs("data-far", base))
        far.use_capacity_tier("rows")
        for system in (plain, burst, far):
            _write(system.path / "rows", extent.mib)
            system.rest()
        for _ in range(rounds):
            for name, system in (("plain", plain), ("burst", burst), ("far", far)):
                for shuffle in ("none", "blocks"):
                    found[name, shuffle].append(_rate(system, shuffle, extent.mib << 8))
            found["far", "rows"].append(_rate(far, "rows", extent.random_rows))
            found["far", "resume"].append(_resume_s(far, extent))
        ready = _ready(burst, extent)
        small = {
            where: [_archive(far, where, extent.small) for _ in range(rounds)]
            for where in ("objects", "containers")
        }
    rates = {key: statistics.median(values) for key, values in found.items()}
    return [
        _row("shuffled / in file order, burst copies", rates, "burst", ("burst", "none"), 0.92),
        _row("shuffled / in file order, servers with 1 ms", rates, "far", ("far", "none"), 0.92),
        _row("shuffled / row by row, servers with 1 ms", rates, "far", ("far", "rows"), 20),
        _row("shuffled, burst copies / plain, cached", rates, "burst", ("plain", "blocks"), 0.90),
        _row("shuffled, servers with 1 ms / plain", rates, "far", ("plain", "blocks"), 0.35),
        _seconds(f"ready, {extent.rows}, without an index", ready.cold_s, 7.0),
        _seconds(f"ready, {extent.rows}, with its index", ready.indexed_s, 0.3),
        _seconds(f"order file of a rank of 8, {extent.part.rows}", ready.order_s, 10.0),
        _mib(f"memory of who reads it, {extent.rows}", ready.reader_mib, 128),
        _seconds("first row of a resume in mid-epoch, 1 ms", rates["far", "resume"], 0.2),
        *(
            _times(
                f"files.tar / open, read, close of each, in {where}, 1 ms",
                statistics.median(found),
                5.0,
            )
            for where, found in small.items()
        ),
    ]


def _write(directory: Path, mib: int) -> None:
    directory.mkdir(exist_ok=True)
    for number in range(8):
        with open(directory / f"{number}.rec", "wb", buffering=0) as file:
            for _ in range(mib // 8):
                file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())


def _rate(system: System, shuffle: str, rows: int) -> float:
    """MiB per second of an epoch, or of its first rows."""
    system.forget()
    dataset = data.open(system.path / "rows", **OPTIONS)
    buffer = 64 if shuffle == "rows" else data.BUFFER  # each of these rows costs a block
    begun = time.perf_counter()
    with data.reader(dataset, shuffle=shuffle, buffer=buffer) as reader:
        given = sum(1 for _ in islice(reader, rows))
    return given * ROW / (1 << 20) / (time.perf_counter() - begun)


def _resume_s(system: System, extent: Extent) -> float:
    """Until the first row, the half of an epoch being done."""
    with data.reader(data.open(system.path / "rows", **OPTIONS)) as reader:
        state = reader.state() | {"done": extent.mib << 7}
    system.forget()
    dataset = data.open(system.path / "rows", **OPTIONS)
    begun = time.perf_counter()
    with data.reader(dataset, state=state) as reader:
        next(reader)
        return time.perf_counter() - begun


class Ready(NamedTuple):
    """A dataset of many files."""

    cold_s: float  # until it is open, without its index
    indexed_s: float  # with it
    order_s: float  # until an order file of a part of it is found
    reader_mib: float  # of the memory of a process that has read its first row


def _ready(system: System, extent: Extent) -> Ready:
    """Footers are real: of row groups of 1,000 rows. Their bytes are few: one value for all."""
    import pyarrow
    from pyarrow import parquet

    directory, part = system.path / "many", system.path / "part"
    table = pyarrow.table({"text": pyarrow.repeat("", extent.thousands * 1000)})
    content = pyarrow.BufferOutputStream()
    parquet.write_table(table, content, row_group_size=1000)
    directory.mkdir()
    for number in range(extent.files):
        (directory / f"{number}.parquet").write_bytes(content.getvalue())
    part.mkdir()
    for number in range(extent.part.files):  # rows of one byte
        (part / f"{number}.data").write_bytes(bytes(extent.thousands * 1000))
    system.rest()
    drop_caches()
    cold_s = _timed(lambda: data.open(directory))
    indexed_s = _timed(lambda: data.open(directory))
    order = part / ".aifs-data" / "order" / "seed=1,rank=3-of-8,record_bytes=1.rec"
    order_s = _timed(order.stat)
    command = [sys.executable, HERE / "opened_dataset.py", directory]
    told = subprocess.run(command, check=True, stdout=subprocess.PIPE, cwd=REPOSITORY).stdout
    return Ready(cold_s, indexed_s, order_s, int(told) / (1 << 20))


def _archive(system: DelayedAifs, where: str, files: int) -> float:
    """How many times as long opening and reading each of many small files takes as the archive.
    They lie in ``objects`` of their own, or in ``containers`` alone."""
    directory = system.path / f"small-{where}"
    if not directory.exists():
        directory.mkdir()
        if where == "objects":
            system.use_capacity_tier(directory.name)
        for number in range(files):
            (directory / f"{number:05}").write_bytes(os.urandom(100_000))
        system.rest()

    def timed(work: Callable[[], Any]) -> float:
        system.evict()
        system.forget()
        return _timed(work)

    each = timed(lambda: [path.read_bytes() for path in sorted(directory.iterdir())])
    return each / timed(lambda: _read(directory / ".aifs-data" / "files.tar"))


def _read(path: Path) -> None:
    buffer = bytearray(4 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _timed(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _row(name: str, rates: dict, system: str, anchor: tuple[str, str], target: float) -> Row:
    ours, theirs = rates[system, "blocks"], rates[anchor]
    found = ours / theirs
    told = rate(ours, "MiB/s")
    return Row(
        name, rate(theirs, "MiB/s"), None, found, None, told, f">= {target}", found >= target
    )


def _seconds(name: str, found: float, most: float) -> Row:
    return Row(name, "", None, None, None, f"{found:.3f} s", f"<= {most} s", found <= most)


def _mib(name: str, found: float, most: float) -> Row:
    return Row(name, "", None, None, None, f"{found:.0f} MiB", f"<= {most} MiB", found <= most)


def _times(name: str, found: float, least: float) -> Row:
    return Row(name, "", None, found, None, f"{found:.1f} times", f">= {least}", found >= least)
