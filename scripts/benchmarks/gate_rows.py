"""The rows of the gate, and how each is measured. Rows that build on each other are measured in one
go, a *course*, as those of works.py are.
"""

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from hosts import mounted
from load import forked, together
from machines import cluster, until
from model import SETTINGS
from systems import System, drop_names
from trees import Tree, TreeMount, processor_s

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES, SMALL_BYTES = 4 * KIB, 20_000
SHARDS = 4
"""Files of a grouped write."""


@dataclass(frozen=True)
class Amount:
    """What one visit of a course does. ``files``: names, and small files; ``entries``: of a
    directory that is listed; ``mib``: of a stream."""

    files: int
    entries: int
    mib: int


WARM = Amount(files=20, entries=100, mib=4)
"""Before anything is counted: what a mount does once."""
NORMAL = Amount(files=200, entries=4000, mib=80)


class Cost(NamedTuple):
    """Seconds per operation: by the clock, and of all processors of the daemon, its movers and its
    database. What the load itself uses is not in it."""

    wall_s: float
    processor_s: float


class Row(NamedTuple):
    """``unit``: what is counted. ``quick``: whether ``--quick`` measures it."""

    name: str
    unit: str
    quick: bool = False


Found = Iterator[tuple[str, Cost]]


class Plain(System):
    """The plain directory, with what stands there for an order to a mount."""

    def run(self, work: str, directory: str, **settings: int) -> float:
        return forked(work, self.path / directory, settings)

    def processor_s(self) -> float:
        return 0.0

    def drain(self, directory: str) -> None:
        """cp and fsync."""
        copies = self.base / "drained"
        copies.mkdir()
        for file in (self.path / directory).iterdir():
            with file.open("rb") as source, (copies / file.name).open("wb") as target:
                shutil.copyfileobj(source, target, MIB)
                os.fsync(target.fileno())
        shutil.rmtree(copies)

    def evict(self, directory: str) -> None:
        pass

    def hint(self, directory: str, attribute: str, text: str) -> None:
        (self.path / directory).mkdir(exist_ok=True)

    def await_group(self, directory: str) -> None:
        pass


Mount = Plain | TreeMount


def _cost(system: Mount, count: float, act: Callable[[], float | None]) -> Cost:
    """Of ``count`` operations that ``act`` does. It returns the seconds that count, or None if all
    do."""
    processor, begin_s = system.processor_s(), time.perf_counter()
    taken_s = act()
    wall_s = time.perf_counter() - begin_s if taken_s is None else taken_s
    return Cost(wall_s / count, (system.processor_s() - processor) / count)


def _run(system: Mount, work: str, directory: str, each: float, **settings: int) -> Cost:
    return _cost(system, each, lambda: system.run(work, directory, **settings))


# --- names ---


def names(system: Mount, amount: Amount) -> Found:
    count = amount.files
    yield "create", _run(system, "create", "names", count, count=count)
    page = {"count": count, "bytes": PAGE_BYTES}
    yield "create + 4 KiB", _run(system, "small-write", "pages", count, **page)
    drop_names()
    yield "stat cold", _run(system, "stat", "names", count, count=count)
    drop_names()
    yield "open + read cold", _run(system, "small-read", "pages", count, **page)
    yield "rename", _run(system, "rename", "names", count, count=count)
    yield "unlink", _run(system, "unlink", "names", count, count=count)
    system.remove("names")
    system.remove("pages")


def directories(system: Mount, amount: Amount) -> Found:
    for work in ("mkdir", "rmdir"):
        yield work, _run(system, work, "directories", amount.files, count=amount.files)


def listings(system: Mount, amount: Amount) -> Found:
    directory, count = f"listed{amount.entries}", amount.entries
    if not (system.path / directory).exists():
        system.run("create", directory, count=count)
    for jobs in (1, 4):
        drop_names()
        cost = _run(system, "listing", directory, jobs * count, count=count, jobs=jobs)
        yield f"readdir, {jobs} process{'es' if jobs > 1 else ''}", cost


# --- files ---


def small_files(system: Mount, amount: Amount) -> Found:
    """They are read when they are on the data servers alone; what the first read stages is in the
    burst tier for the second."""
    settings = {"count": amount.files, "bytes": SMALL_BYTES}
    system.run("small-write", "small", **settings)
    yield "drain of small files", _cost(system, amount.files, lambda: system.drain("small"))
    system.evict("small")
    for which in ("first", "second"):
        system.rest()
        drop_names()
        cost = _run(system, "small-read", "small", amount.files, **settings)
        yield f"small files, {which} read", cost
    system.remove("small")


def stream(system: Mount, amount: Amount) -> Found:
    mib = amount.mib
    for work, row, each in (
        ("write", "stream write", mib),
        ("read", "stream read", mib),
        ("random-write", "random writes, burst copy", 256 * mib),
        ("random-read", "random reads, burst copy", 256 * mib),
    ):
        yield row, _run(system, work, "stream", each, jobs=1, mib=mib)
    system.remove("stream")


def streams(system: Mount, amount: Amount) -> Found:
    mib = amount.mib // 2
    for work in ("write", "read"):
        yield f"4 streams {work}", _run(system, work, "streams", 4 * mib, jobs=4, mib=mib)
    system.remove("streams")


def moved(system: Mount, amount: Amount) -> Found:
    system.run("write", "moved", jobs=2, mib=amount.mib)
    yield "drain", _cost(system, 2 * amount.mib, lambda: system.drain("moved"))
    system.evict("moved")
    cost = _run(system, "read", "moved", amount.mib, jobs=1, mib=amount.mib, cold=1)
    yield "first striped read", cost
    system.remove("moved")


def striped(system: Mount, amount: Amount) -> Found:
    mib = amount.mib // 8 or 1
    system.hint("striped", "tier", "capacity")
    system.run("write", "striped", jobs=1, mib=mib)
    for kind in ("write", "read"):
        settings = {"jobs": 1, "mib": mib, "cold": 1}
        cost = _run(system, f"random-{kind}", "striped", 256 * mib, **settings)
        yield f"random {kind}s, striped", cost
    system.remove("striped")


# --- checkpoints ---


def group(system: Mount, amount: Amount) -> Found:
    """Half of each shard is in the others, too."""
    mib = amount.mib // 4 or 1
    system.hint("group", "group", f"name=step,ranks={SHARDS}")
    shared = os.urandom(mib * MIB // 2)

    def save(number: int, own: bytes) -> None:
        fd = os.open(system.path / "group" / f"shard{number}", os.O_CREAT | os.O_WRONLY, 0o644)
        for part in (shared, own):
            view = memoryview(part)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
        os.close(fd)

    parts = [os.urandom(mib * MIB // 2) for _ in range(SHARDS)]

    def act() -> None:
        together([lambda n=n, own=own: save(n, own) for n, own in enumerate(parts)])
        system.await_group("group")

    yield "group save to durable", _cost(system, SHARDS * mib, act)
    system.remove("group")


def publish(system: Mount, amount: Amount) -> Found:
    """A rename that syncs what lies below; in the plain directory a program has to do that."""
    count = 5 * amount.files
    page = {"count": count, "bytes": PAGE_BYTES}
    system.run("small-write", "pending", **page)
    pending = system.path / "pending"

    def act() -> None:
        if isinstance(system, Plain):
            for file in pending.iterdir():
                fd = os.open(file, os.O_RDONLY)
                os.fdatasync(fd)
                os.close(fd)
        pending.rename(system.path / "published")

    yield "publish of 1,000 files", _cost(system, count, act)
    system.remove("published")


# --- what keeps bytes right ---


def scrub(system: Mount, amount: Amount) -> Found:
    _protect(system, amount)
    yield "scrub", _cost(system, amount.mib, system.scrub)


def rebuild(system: Mount, amount: Amount) -> Found:
    _protect(system, amount)
    yield "rebuild", _cost(system, amount.mib, system.replace)


def _protect(system: TreeMount, amount: Amount) -> None:
    """There are files with replicas, half of them small."""
    directory = f"protected{amount.mib}"
    if not (system.path / directory).exists():
        system.hint(directory, "layout", "replicas=2")
        system.run("write", directory, jobs=1, mib=amount.mib)
        system.run("small-write", directory, count=amount.files, bytes=SMALL_BYTES)
        system.drain(directory)
        system.evict(directory)


# --- a start, hosts ---


class Started(TreeMount):
    """A mount whose store has nothing but what ``start`` puts there."""


def start(system: Started, amount: Amount) -> Found:
    """Until the mount serves, of a store with files."""
    if not (system.path / "there").exists():
        system.run("small-write", "there", count=amount.files, bytes=PAGE_BYTES)
    system.umount()
    begin_s = time.perf_counter()
    system.mount_again()
    yield "start of a mount", Cost(time.perf_counter() - begin_s, system.processor_s())


class TwoHosts:
    """Two hosts of a tree on one database."""

    def __init__(self, name: str, tree: Tree, base: Path) -> None:
        self.name = name
        self.path = base / name
        self._tree = tree
        self._stack = ExitStack()

    def __enter__(self) -> "TwoHosts":
        self.path.mkdir(mode=0o711)
        made = cluster(self.path, "ab", SETTINGS, (str(self._tree.program),))
        try:
            self._made = self._stack.enter_context(made)
            self.a, self.b = mounted(self._made)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()
        shutil.rmtree(self.path)

    def processor_s(self) -> float:
        database = self._made.database.processes()[0]
        return processor_s([database, self.a.host.pid, self.b.host.pid])


def two_hosts(system: TwoHosts, amount: Amount) -> Found:
    count = amount.files
    page = {"count": count, "bytes": PAGE_BYTES}

    yield (
        "two hosts: create",
        _cost(system, count, lambda: system.a.run("create", "made", count=count)),
    )
    system.a.run("small-write", "written", **page)
    until((system.b.path / "written").exists, "what is made is seen")
    drop_names()
    yield (
        "two hosts: read of the other's file",
        _cost(system, count, lambda: system.b.run("small-read", "written", **page)),
    )
    for directory in ("made", "written"):
        system.a.remove(directory)


Place = Callable[[str, Tree, Path], AbstractContextManager]
"""What a course works on, of a tree: entered anew in each round."""


class Course(NamedTuple):
    """``turns``: how often each tree is visited twice in a round. ``has_plain``: whether there is
    such a thing in a plain directory."""

    act: Callable[..., Found]
    rows: Sequence[Row]
    turns: int = 2
    has_plain: bool = True
    place: Place = TreeMount


COURSES = (
    Course(
        names,
        (
            Row("create", "files", quick=True),
            Row("create + 4 KiB", "files", quick=True),
            Row("stat cold", "files", quick=True),
            Row("open + read cold", "files", quick=True),
            Row("rename", "files", quick=True),
            Row("unlink", "files", quick=True),
        ),
        turns=4,
    ),
    Course(directories, (Row("mkdir", "dirs"), Row("rmdir", "dirs")), turns=4),
    Course(
        listings,
        (Row("readdir, 1 process", "entries"), Row("readdir, 4 processes", "entries")),
    ),
    Course(
        small_files,
        (
            Row("drain of small files", "files", quick=True),
            Row("small files, first read", "files", quick=True),
            Row("small files, second read", "files"),
        ),
    ),
    Course(
        stream,
        (
            Row("stream write", "MiB", quick=True),
            Row("stream read", "MiB"),
            Row("random writes, burst copy", "requests"),
            Row("random reads, burst copy", "requests"),
        ),
    ),
    Course(streams, (Row("4 streams write", "MiB"), Row("4 streams read", "MiB"))),
    Course(moved, (Row("drain", "MiB", quick=True), Row("first striped read", "MiB", quick=True))),
    Course(
        striped,
        (Row("random writes, striped", "requests"), Row("random reads, striped", "requests")),
    ),
    Course(group, (Row("group save to durable", "MiB"),)),
    Course(publish, (Row("publish of 1,000 files", "files"),)),
    Course(scrub, (Row("scrub", "MiB"),), has_plain=False),
    Course(rebuild, (Row("rebuild", "MiB"),), has_plain=False),
    Course(
        start,
        (Row("start of a mount", "starts", quick=True),),
        turns=1,
        has_plain=False,
        place=Started,
    ),
    Course(
        two_hosts,
        (
            Row("two hosts: create", "files"),
            Row("two hosts: read of the other's file", "files"),
        ),
        turns=1,
        has_plain=False,
        place=TwoHosts,
    ),
)
ROWS = {row.name: row for course in COURSES for row in course.rows}
