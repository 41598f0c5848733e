"""The works: how each is done, in what it is counted, and what AIFS must reach.

Works that build on each other are done in one go, a *course*: one directory's files are created,
looked at, renamed, removed. A course runs on one system after the other in every round.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from systems import System, drop_names


@dataclass(frozen=True)
class Size:
    """How much is done: files per course, entries of the listed directory, MiB per stream."""

    files: int
    entries: int
    mib: int


class Work(NamedTuple):
    """``of_nothing`` and ``of_plain``: the least ratio of AIFS's rate to the do-nothing
    filesystem's, the plain directory's. ``peer`` says whose mark ``of_plain`` is, where it is one.
    ``of_work``: another work of the same course, and the least ratio to AIFS's own rate at it.
    """

    name: str
    unit: str
    of_nothing: float | None = None
    of_plain: float | None = None
    peer: str = ""
    of_work: tuple[str, float] | None = None


WORKS = {
    work.name: work
    for work in (
        Work("create", "files/s", 0.6, 0.019, "S3QL, JuiceFS"),
        Work("stat", "files/s", 0.6, 0.017, "S3QL"),
        Work("stat-cached", "files/s", None, 0.7),
        Work("rename", "files/s", None, 0.024, "S3QL, JuiceFS"),
        Work("unlink", "files/s", 0.6, 0.022, "S3QL, JuiceFS"),
        Work("mkdir", "files/s", 0.6),
        Work("readdir", "entries/s", 0.6, 0.020, "S3QL"),
        Work("small-write", "files/s", 0.6),
        Work("small-read", "files/s", 0.6),
        Work("small-read-draining", "files/s", of_work=("small-read", 0.85)),
        Work("write-1", "MiB/s", None, 0.9),
        Work("write-sync-1", "MiB/s", None, 0.9),
        Work("read-1", "MiB/s", None, 0.9),
        Work("read-mmap-1", "MiB/s", None, 0.9),
        Work("random-write", "requests/s", None, 0.6),
        Work("random-read", "requests/s", None, 0.6),
        Work("write-4", "MiB/s", None, 0.9),
        Work("write-sync-4", "MiB/s", None, 0.9),
        Work("read-4", "MiB/s", None, 0.9),
        Work("checkpoint", "MiB/s", None, 0.9),
        Work("striped-write-1", "MiB/s", 0.8),
        Work("striped-read-1", "MiB/s", 0.8),
        Work("striped-write-4", "MiB/s", 0.8),
        Work("striped-read-4", "MiB/s", 0.8),
    )
}


def names(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    directory, count = f"names{round_}", size.files
    yield "create", count / system.run("create", directory, count=count)
    drop_names()
    yield "stat", count / system.run("stat", directory, count=count)
    yield "stat-cached", count / system.run("stat", directory, count=count, warm=1)
    yield "rename", count / system.run("rename", directory, count=count)
    yield "unlink", count / system.run("unlink", directory, count=count)
    yield "mkdir", count / system.run("mkdir", directory, count=count)


def listing(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    if round_ == 0:
        system.run("create", "listing", count=size.entries)
    drop_names()
    yield "readdir", size.entries / system.run("listing", "listing", count=size.entries)


def small_files(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    directory, count = f"small{round_}", size.files
    yield "small-write", count / system.run("small-write", directory, count=count)
    system.begin_background()
    yield "small-read-draining", count / system.run("small-read", directory, count=count)
    system.rest()
    yield "small-read", count / system.run("small-read", directory, count=count)
    system.remove(directory)


def streams(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    """New files each time, as checkpoints are."""
    directory = f"streams{round_}"
    for jobs in (1, 4):
        settings = {"jobs": jobs, "mib": size.mib}
        for kind in ("write", "write-sync"):
            system.remove(directory)
            yield f"{kind}-{jobs}", size.mib * jobs / system.run(kind, directory, **settings)
        yield f"read-{jobs}", size.mib * jobs / system.run("read", directory, **settings)
        if jobs == 1:
            yield "read-mmap-1", size.mib / system.run("read-mmap", directory, **settings)
            for kind in ("random-write", "random-read"):
                yield kind, size.mib * 256 / system.run(kind, directory, **settings)
    system.remove(directory)


def checkpoints(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    system.remove("checkpoints")
    yield "checkpoint", 4 * size.mib / system.run("checkpoint", "checkpoints", jobs=4, mib=size.mib)


def striped(system: System, size: Size, round_: int) -> Iterator[tuple[str, float]]:
    """Past the burst tier."""
    system.use_capacity_tier("striped")
    for jobs in (1, 4):
        total, settings = size.mib * jobs, {"jobs": jobs, "mib": size.mib}
        for kind in ("write", "read"):
            yield f"striped-{kind}-{jobs}", total / system.run(kind, "striped", cold=1, **settings)


Course = Callable[[System, Size, int], Iterator[tuple[str, float]]]

COURSES: dict[Course, tuple[str, ...]] = {
    names: ("create", "stat", "stat-cached", "rename", "unlink", "mkdir"),
    listing: ("readdir",),
    small_files: ("small-write", "small-read-draining", "small-read"),
    streams: tuple(name for name in WORKS if name.startswith(("write", "read-", "random"))),
    checkpoints: ("checkpoint",),
    striped: tuple(name for name in WORKS if name.startswith("striped")),
}
