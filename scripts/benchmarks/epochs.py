"""Datasets that lie on data servers with 1 ms more for each request, and are larger or smaller than
the burst tier: epochs whose files are read ahead beside epochs that say nothing of themselves, the
second epoch, and directories of small files.

All read the same rows, in turns in each round. Before a cold epoch nothing is in the burst tier,
and the kernel and, by a new mount, the daemon have forgotten all.
"""

import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import patch

from dataset_rates import Extent
from report import Row
from systems import Aifs, DelayedAifs

from aifs.client import data
from aifs.client.data.reader import Announcer

_Kind = tuple[str, str, str]
"""What is read; in which way; which epoch."""

_ROW, _BLOCK_ROWS = 4096, 256
_FILES = 64
_STEP_S = 0.002
"""What a training step takes per block of 1 MiB."""


def epoch_rows(base: Path, extent: Extent, rounds: int) -> list[Row]:
    """The rows of the table; needs pyarrow."""
    size = extent.mib << 20
    seconds: dict[_Kind, list[float]] = defaultdict(list)
    for name, capacity in (("half", 2 * size), ("twice", size // 2)):
        # Its servers are as near as the burst tier; blocks of containers are not evicted.
        far_away = "burst.blocks=always", "layout.kind=striped", "layout.pack_below=0"
        with DelayedAifs(f"data-{name}", base, f"burst.capacity={capacity}", *far_away) as far:
            _write(far.path / "rows", extent.mib)
            far.rest()
            window = 0 if name == "half" else size // 8
            for number in range(rounds):
                for kind in ("said", "unsaid", "before"):
                    far.evict()
                    far.forget()
                    seconds[name, kind, "cold"].append(_epoch(far, kind, 2 * number, window))
                    if kind == "said":
                        second = _epoch(far, kind, 2 * number + 1, window)
                        seconds[name, kind, "second"].append(second)
    with DelayedAifs("data-small", base) as far:
        paths = _write_small(far.path / "small", extent.small)
        far.rest()
        for _ in range(rounds):
            for kind in ("none", "blocks", "each"):
                far.evict()
                far.forget()
                seconds["small", kind, ""].append(_small(far.path / "small", paths, kind))
    took = {key: statistics.median(values) for key, values in seconds.items()}

    def row(work: str, ours: _Kind, theirs: _Kind, target: float) -> Row:
        found = took[theirs] / took[ours]
        told = f"{took[ours]:.2f} s"
        return Row(
            work, f"{took[theirs]:.2f} s", None, found, None, told, f">= {target}", found >= target
        )

    half, twice = "dataset of half the burst tier's size", "dataset of twice the burst tier's size"
    return [
        row(
            f"cold epoch, {half}: read ahead while it is read / not",
            ("half", "said", "cold"),
            ("half", "unsaid", "cold"),
            0.92,
        ),
        row(
            f"cold epoch, {twice}: read ahead while it is read / not",
            ("twice", "said", "cold"),
            ("twice", "unsaid", "cold"),
            0.92,
        ),
        row(
            f"cold epoch, {half}: read ahead before it is read / not",
            ("half", "before", "cold"),
            ("half", "unsaid", "cold"),
            1.5,
        ),
        row(
            f"second epoch, {twice} / of half",
            ("twice", "said", "second"),
            ("half", "said", "second"),
            0.6,
        ),
        row(
            "small files, shuffled / in file order",
            ("small", "blocks", ""),
            ("small", "none", ""),
            0.92,
        ),
        row(
            "small files, shuffled by blocks / each at random",
            ("small", "blocks", ""),
            ("small", "each", ""),
            1.0,
        ),
    ]


def _write(directory: Path, mib: int) -> None:
    import pyarrow

    directory.mkdir()
    blocks = max(1, mib // _FILES)
    for number in range(mib // blocks):
        rows = [os.urandom(_ROW) for _ in range(_BLOCK_ROWS)]
        batch = pyarrow.record_batch([pyarrow.array(rows)], names=["row"])
        with pyarrow.ipc.new_file(directory / f"{number:03}.arrow", batch.schema) as file:
            for _ in range(blocks):
                file.write_batch(batch)
    data.open(directory)  # makes the index


def _write_small(directory: Path, files: int) -> list[Path]:
    directory.mkdir()
    paths = [directory / f"{number:05}" for number in range(files)]
    for path in paths:
        path.write_bytes(os.urandom(100_000))
    return paths


def _epoch(system: Aifs, kind: str, epoch: int, window: int) -> float:
    """Seconds of an epoch with a step after each group. ``kind``: the reader says what it reads, or
    it does not, or it was made some time before, as by a job that loads its model meanwhile."""
    dataset = data.open(system.path / "rows")
    order = {"epoch": epoch, "shares": 4, "buffer": 4 * _BLOCK_ROWS, "window": window}
    begun = time.perf_counter()
    with _saying_nothing() if kind == "unsaid" else nullcontext():
        with data.reader(dataset, **order) as reader:
            if kind == "before":
                _settle(system)
                begun = time.perf_counter()
            for _ in reader.batches():
                time.sleep(_STEP_S)
    return time.perf_counter() - begun


def _settle(system: Aifs) -> None:
    """Wait until some files were brought, and no more are."""
    before = now = 0
    while before != now or not now:
        before, now = now, system.status()["epochs"]["brought_files"]
        time.sleep(1)


def _small(directory: Path, paths: list[Path], kind: str) -> float:
    begun = time.perf_counter()
    if kind == "each":
        shuffled = random.Random(7).sample(paths, len(paths))
        found = sum(len(path.read_bytes()) for path in shuffled) // 100_000
    else:
        with data.reader(data.open(directory), shuffle=kind, buffer=1000) as reader:
            found = sum(1 for _ in reader)
    assert found == len(paths)
    return time.perf_counter() - begun


@contextmanager
def _saying_nothing() -> Iterator[None]:
    with patch.object(Announcer, "_tell", lambda self, row: None):
        yield
