"""What making a checkpoint visible costs: a rename of a tree that is synced already, small and
large; a rename that has to sync it, against fdatasync of the same files in a plain directory; and
giving a huge tree up."""

import os
import shutil
import statistics
import time
from pathlib import Path

from report import Row, rate
from systems import Aifs, System

FILES, FEW, DOOMED = 1000, 10, 100_000
PUBLISH_TARGET_S, GROWTH_TARGET, UNSYNCED_TARGET, REMOVE_TARGET_S = 0.005, 2.0, 0.9, 0.05


def publishing_rows(base: Path, mib: int, rounds: int) -> list[Row]:
    with System("published", base) as plain, Aifs("publishing", base) as aifs:
        many = statistics.median(
            _publish_synced(aifs, FILES, 2 * mib, round_) for round_ in range(2 * rounds + 1)
        )
        few = statistics.median(
            _publish_synced(aifs, FEW, 2 * mib, round_) for round_ in range(2 * rounds + 1)
        )
        by_system = {system: [] for system in (plain, aifs)}
        for round_ in range(rounds):
            for system, rates in by_system.items():
                rates.append(mib / _publish_unsynced(system, mib, round_))
        synced, published = (statistics.median(rates) for rates in by_system.values())
        removed = _remove(aifs)
    return [
        Row(
            f"publish of {FILES} synced files",
            "",
            None,
            None,
            None,
            f"{many * 1000:.1f} ms",
            f"< {PUBLISH_TARGET_S * 1000:.0f} ms",
            many < PUBLISH_TARGET_S,
        ),
        Row(
            f"the same of {FEW} files",
            "",
            None,
            None,
            None,
            f"{few * 1000:.1f} ms",
            f"within {GROWTH_TARGET:.0f} x of each other",
            many < GROWTH_TARGET * few,
        ),
        Row(
            "publish of unsynced files",
            f"fdatasync each {rate(synced, 'MiB/s')}",
            None,
            published / synced,
            None,
            rate(published, "MiB/s"),
            f">= {UNSYNCED_TARGET}",
            published >= UNSYNCED_TARGET * synced,
        ),
        Row(
            f"removal (aifs rm -r) of {DOOMED:,} files",
            "",
            None,
            None,
            None,
            f"{removed * 1000:.0f} ms",
            f"< {REMOVE_TARGET_S * 1000:.0f} ms",
            removed < REMOVE_TARGET_S,
        ),
    ]


def _write_tree(directory: Path, files: int, mib: int) -> list[Path]:
    directory.mkdir(parents=True)
    data = os.urandom(1 << 20) * (mib // files + 1)
    paths = [directory / f"{number:04}.pt" for number in range(files)]
    for path in paths:
        path.write_bytes(memoryview(data)[: (mib << 20) // files])
    return paths


def _sync(paths: list[Path]) -> None:
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)


def _publish_synced(system: System, files: int, mib: int, round_: int) -> float:
    pending, final = system.path / "pending", system.path / f"final{round_}"
    _sync(_write_tree(pending, files, mib))
    begin = time.perf_counter()
    pending.rename(final)
    taken = time.perf_counter() - begin
    shutil.rmtree(final)
    return taken


def _publish_unsynced(system: System, mib: int, round_: int) -> float:
    """Seconds until the tree is durable under its name: the plain directory's files have to be
    synced one by one.
    """
    pending, final = system.path / "pending", system.path / f"unsynced{round_}"
    paths = _write_tree(pending, FILES, mib)
    begin = time.perf_counter()
    if not isinstance(system, Aifs):
        _sync(paths)
    pending.rename(final)
    taken = time.perf_counter() - begin
    shutil.rmtree(final)
    return taken


def _remove(aifs: Aifs) -> float:
    """Seconds of the one call that ``aifs rm -r`` makes."""
    tree = aifs.path / "doomed"
    for directory in range(100):
        (tree / f"{directory}").mkdir(parents=True)
        for number in range(DOOMED // 100):
            (tree / f"{directory}" / f"{number}").touch()
    begin = time.perf_counter()
    os.setxattr(aifs.path, "user.aifs.remove", b"doomed")
    return time.perf_counter() - begin
