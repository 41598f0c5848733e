"""``aifs bench``: how fast a directory is, beside a plain one, and what limits it."""

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import click

from aifs.cli.command import PATH, SIZE, Column, Report, Table, command, number
from aifs.core import files, trees

_ROUNDS = 3
_BUFFER = 4 << 20
_SHARDS = 4
_SMALL = bytes(4096)
_WAITED = "the storage or AIFS"
_AS_PLAIN = 0.8  # of the rate of a plain directory, and AIFS adds little
_BUSY = 0.8  # of the time, and it is a processor that limits
_TELLING_S = 0.05  # processors are told of in steps of 10 ms


@command(
    "bench",
    short_help="Measure how fast a directory is, and say what limits it.",
    examples="aifs bench /mnt/store\naifs bench /mnt/store --against /nvme/plain --size 4GiB",
)
@click.argument("directory", type=PATH)
@click.option("--against", type=PATH, help="A plain directory to compare with, on the same disk.")
@click.option("--size", type=SIZE, default="256MiB", help="Of what is written at a time.  [256MiB]")
@click.option("--files", "count", type=click.IntRange(1), default=500, help="Small files.  [500]")
def bench_command(directory: str, against: str | None, size: int, count: int) -> Report:
    """Measure a large file, small files, names and a checkpoint in DIRECTORY, on a mount or
    anywhere.

    It writes into a new directory below, which it removes in the end. --against does the same in
    turns in a second directory: the ratio holds on a busy machine, too, if that one is on the disk
    of the burst tier. "Limited by" names the process that kept a processor busy nearly all the
    time. If none did, it is the storage, or AIFS itself: the journal, the database, other hosts
    (aifs why DIRECTORY shows which); --against tells these two apart. It says nothing of what took
    too little time. Rates are medians of 3 rounds.
    """
    rows = _measure(directory, against, max(size, _SHARDS), count)
    columns = _COLUMNS if against else _COLUMNS[:-2]
    return Report([asdict(row) for row in rows], Table(columns, rows))


_COLUMNS = (
    Column("work"),
    Column("rate", lambda row: f"{row.rate:,.0f}", number),
    Column("", lambda row: f"{row.unit}/s"),
    Column("limited by", "limited_by"),
    Column("plain", lambda row: f"{row.plain:,.0f}", number),
    Column("ratio", lambda row: f"{row.ratio:.2f}", number),
)


@dataclass(frozen=True)
class _Row:
    """The result of one kind of work."""

    work: str
    """In words."""
    unit: str
    """Of ``rate`` and ``plain``, each second."""
    rate: float
    """The median of the rounds."""
    limited_by: str
    """'this process' or 'the daemon', whose processor was busy; or what was waited for: 'the
    storage', 'AIFS', or either; '': unknown."""
    plain: float | None
    """The rate in the plain directory; None: there is none."""
    ratio: float | None
    """Of ``rate`` to ``plain``."""


def _measure(directory: str, against: str | None, size: int, count: int) -> list[_Row]:
    with ExitStack() as stack:
        place = stack.enter_context(_Place(directory))
        plain = stack.enter_context(_Place(against)) if against is not None else None
        rounds = []
        for _ in range(_ROUNDS):
            ours = list(place.round(size, count))
            theirs = list(plain.round(size, count)) if plain else [None] * len(ours)
            rounds.append(list(zip(ours, theirs, strict=True)))
    rows = []
    for (name, unit, _), *timed in zip(_WORKS, *rounds, strict=True):
        ours = sorted((one for one, _ in timed), key=lambda one: one.rate)
        median = ours[len(ours) // 2]
        other = statistics.median(one.rate for _, one in timed if one) if plain else None
        ratio = median.rate / other if other else None
        limit = _waited_for(ratio) if median.limited_by == _WAITED else median.limited_by
        rows.append(_Row(name, unit, median.rate, limit, other, ratio))
    return rows


def _waited_for(ratio: float | None) -> str:
    """By what a plain directory does in the same time: its storage can do that, too."""
    if ratio is None:
        return _WAITED
    return "the storage" if ratio > _AS_PLAIN else "AIFS"


@dataclass(frozen=True)
class _Timed:
    """One work in one round."""

    rate: float
    limited_by: str


class _Place:
    """A directory of our own below another one, gone afterwards."""

    def __init__(self, above: str) -> None:
        self._above = above

    def __enter__(self) -> "_Place":
        self._path = os.path.join(self._above, f".aifs-bench-{os.urandom(4).hex()}")
        files.make_dir(self._path)
        self._daemon = _daemon_of(self._path)
        return self

    def __exit__(self, *_: object) -> None:
        trees.remove_tree(self._path)

    def round(self, size: int, count: int) -> Iterator[_Timed]:
        """All works, in the order of _WORKS; nothing is left."""
        for _, _, work in _WORKS:
            own_s, daemon_s, start_s = time.process_time(), self._daemon_s(), time.monotonic()
            amount = work(self._path, size, count)
            taken_s = max(time.monotonic() - start_s, 1e-6)
            own_s, daemon_s = time.process_time() - own_s, self._daemon_s() - daemon_s
            limit = _WAITED if self._daemon else "the storage"
            if own_s + daemon_s > _BUSY * taken_s:
                limit = "this process" if own_s > daemon_s else "the daemon"
            yield _Timed(amount / taken_s, limit if taken_s > _TELLING_S else "")

    def _daemon_s(self) -> float:
        """Seconds of processors that the mount's daemon has used; 0 elsewhere, and if not
        visible."""
        try:
            with open(f"/proc/{self._daemon}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _daemon_of(path: str) -> int:
    """Its pid, or 0 if the path lies in no mount of ours."""
    from aifs.cli import door
    from aifs.core.mountinfo import first_aifs

    mount, _ = first_aifs(path)
    return door.read(mount.mountpoint, "status")["pid"] if mount is not None else 0


# --- the works: each gets its directory, bytes, index of files; returns how much it has done ---


def _write(path: str, size: int, count: int) -> float:
    return _write_file(f"{path}/large", size)


def _write_file(path: str, size: int) -> float:
    """Its bytes are durable. Returns MiB."""
    buffer = memoryview(os.urandom(min(size, _BUFFER)))
    fd = files.open_file(path, create=True)
    try:
        for start in range(0, size, _BUFFER):
            files.write_at(fd, buffer[: size - start], start)
        files.sync_file(fd)
    finally:
        files.close_file(fd)
    return size / (1 << 20)


def _read(path: str, size: int, count: int) -> float:
    buffer = bytearray(_BUFFER)
    with open(f"{path}/large", "rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
    files.unlink(f"{path}/large")
    return size / (1 << 20)


def _save(path: str, size: int, count: int) -> float:
    from aifs.client import checkpoint, remove

    with checkpoint(f"{path}/step-1", latest=None) as pending:
        for shard in range(_SHARDS):
            _write_file(os.fspath(pending / f"shard-{shard}"), size // _SHARDS)
    remove(f"{path}/step-1")
    return size / (1 << 20)


def _create(path: str, size: int, count: int) -> float:
    files.make_dir(f"{path}/small")
    for index in range(count):
        fd = files.open_file(f"{path}/small/{index}", create=True)
        try:
            files.write_at(fd, _SMALL, 0)
        finally:
            files.close_file(fd)
    return count


def _stat(path: str, size: int, count: int) -> float:
    for index in range(count):
        os.stat(f"{path}/small/{index}")
    return count


def _read_small(path: str, size: int, count: int) -> float:
    for index in range(count):
        with open(f"{path}/small/{index}", "rb", buffering=0) as file:
            file.read()
    return count


def _list(path: str, size: int, count: int) -> float:
    return len(os.listdir(f"{path}/small"))


def _remove(path: str, size: int, count: int) -> float:
    for index in range(count):
        files.unlink(f"{path}/small/{index}")
    files.remove_dir(f"{path}/small")
    return count


_WORKS: tuple[tuple[str, str, Callable[[str, int, int], float]], ...] = (
    ("write a large file and fsync it", "MiB", _write),
    ("read it again", "MiB", _read),
    ("save a checkpoint of 4 files", "MiB", _save),
    ("create small files (4 KiB)", "files", _create),
    ("stat them", "files", _stat),
    ("open and read them", "files", _read_small),
    ("list them", "names", _list),
    ("remove them", "files", _remove),
)
"""Name, unit, and what is done; a work finds what the ones before have left."""
