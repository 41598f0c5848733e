"""The last requests of the kernel, for programs that follow them (``user.aifs.trace``): a ring in
memory, for any number of readers.

Records are kept while somebody reads; else a request costs a look at ``is_on``. Long requests are
always kept for a while (why.py). The kernel's own work (caches, passed-through reads and writes) is
no request.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from aifs.core.errors import Invalid
from aifs.core.processes import process_of
from aifs.core.served import AllServed
from aifs.core.waiting import Activity, Request
from aifs.meta import paths
from aifs.meta.kv import Engine, ReadTransaction

_RECORDS = 1 << 16
_KEPT_S = 5.0
"""How long after the last reader records are kept."""

LONG_S = 0.01
"""A request that takes so long has waited for something, or for very many others."""

LONG_KEPT = 8192  # some 4 MiB
LONG_KEPT_S = 600.0
"""How long those are kept, at most."""

_READ_AT_ONCE = 256
_LENGTH_MAX = 60_000  # an extended attribute has up to 64 KiB


class Record(NamedTuple):
    """A request that has been answered."""

    request: Request
    at_ns: int
    """When it came, since the epoch."""
    duration_us: int
    errno: int
    """0: it succeeded."""
    bytes: int
    """That were read or written."""
    waited_us: dict[str, int]
    """Its waits (core/waiting.py) and their lengths; the rest of its time is the daemon's."""


class OperationLog:
    """Used from one trio thread. Records have numbers, which go up by one."""

    def __init__(self, switched: Callable[[bool], None]) -> None:
        """``switched`` is told whether requests are wanted."""
        self._switched = switched
        self.is_on = False
        """Whether answered requests are to be put here."""
        self._ring: list[Record | None] = []
        """The newest, each at its number modulo its length; empty while nobody reads."""
        self._next = 0
        """The number that the next record gets."""
        self._first = 0
        """That of the first record since the log was switched on."""
        self._until_s = 0.0
        """When the log is switched off if nobody reads any more, on the monotonic clock."""
        self.waited = AllServed()
        """By cause (core/waiting.py), how long those have waited for it that have."""
        self._long: deque[Record] = deque(maxlen=LONG_KEPT)
        """Those that took ``LONG_S``, in the order of their ends."""
        self._began_s = time.time()
        """Since when these are kept."""

    def ended(self, activity: Activity, duration_ns: int, errno: int = 0, moved: int = 0) -> None:
        """Record an activity that has waited, took ``LONG_S``, or while the log is on."""
        spent_ns = activity.spent_ns()
        for cause, ns in spent_ns.items():
            self.waited[cause].add(ns)
        if self.is_on and time.monotonic() > self._until_s:
            self.is_on, self._ring = False, []
            self._switched(False)
        is_long = duration_ns >= LONG_S * 1e9
        if not (self.is_on or is_long):
            return
        request = activity.about
        if request is None:
            return
        waited_us = {cause: ns // 1000 for cause, ns in spent_ns.items()}
        at_ns, duration_us = time.time_ns() - duration_ns, duration_ns // 1000
        record = Record(request, at_ns, duration_us, errno, moved, waited_us)
        if is_long:  # its thread may be gone when somebody asks
            whose = request._replace(pid=process_of(request.pid))
            self._long.append(record._replace(request=whose))
        if self.is_on:
            self._ring[self._next % _RECORDS] = record
            self._next += 1

    def long(self) -> tuple[float, list[Record]]:
        """Records of ``LONG_S`` or longer that ended since a time (epoch), at most ``LONG_KEPT_S``
        ago."""
        since_s = max(self._began_s, time.time() - LONG_KEPT_S)
        if len(self._long) == LONG_KEPT:
            since_s = max(since_s, _end_s(self._long[0]))
        return since_s, [record for record in self._long if _end_s(record) >= since_s]

    def follow(self) -> None:
        """Somebody reads, and will come again."""
        self._until_s = time.monotonic() + _KEPT_S
        if not self.is_on:
            self.is_on, self._ring, self._first = True, [None] * _RECORDS, self._next
            self._switched(True)

    def records(self, start: int) -> tuple[int, list[Record]]:
        """The first records left from number ``start`` on, and the first one's number."""
        first = max(start, self._first, self._next - _RECORDS)
        numbers = range(first, min(first + _READ_AT_ONCE, self._next))
        return first, [record for n in numbers if (record := self._ring[n % _RECORDS])]

    @property
    def next(self) -> int:
        """The number of the next record."""
        return self._next


async def follow(
    log: OperationLog, engine: Engine, start: int | None = None
) -> tuple[int, list[dict[str, Any]]]:
    """Some records from number ``start`` on, and the first one's number, for a reader that comes
    again within ``_KEPT_S``; None: none yet, and the next number. Raises Invalid for a future
    number."""
    log.follow()
    if start is None:
        return log.next, []
    if start > log.next:
        raise Invalid(f"the next record is number {log.next}")
    first, records = log.records(start)
    names = await engine.view(paths_of, {record.request.ino for record in records})
    return first, [described(record, names) for record in records]


async def tell(log: OperationLog, engine: Engine, start: int | None = None) -> bytes:
    """Answer ``user.aifs.trace``, JSON: {"next": N, "lost": K, "records": [...]}; with ``start``
    ``user.aifs.trace.START``: some records from that number on, and how many of them are lost.
    ``next``: where to go on. Raises Invalid."""
    first, records = await follow(log, engine, start)
    told: list[str] = []
    length = 0
    for record in records:
        text = json.dumps(record)
        length += len(text) + 2
        if length > _LENGTH_MAX:
            break
        told.append(text)
    lost = 0 if start is None else first - start
    head = json.dumps({"next": first + len(told), "lost": lost})
    return f'{head[:-1]}, "records": [{", ".join(told)}]}}'.encode()


def paths_of(tx: ReadTransaction, inos: set[int]) -> dict[int, bytes | None]:
    """The path of each inode, or None."""
    return {ino: paths.find_path(tx, ino) if ino else None for ino in inos}


def described(record: Record, names: Mapping[int, bytes | None]) -> dict[str, Any]:
    """A record for JSON. ``names``: paths by inode number."""
    return dict(_fields(record, names.get(record.request.ino)))


def _fields(record: Record, path: bytes | None) -> Iterator[tuple[str, Any]]:
    request = record.request
    if path is not None and request.name:
        path = path.rstrip(b"/") + b"/" + request.name
    yield "at_s", record.at_ns / 1e9
    yield "operation", request.operation
    yield "inode", request.ino or None
    yield "path", None if path is None else path.decode("utf-8", "surrogateescape")
    yield "name", request.name.decode("utf-8", "surrogateescape")
    yield "attribute", request.attribute.decode("utf-8", "surrogateescape")
    yield "uid", None if request.uid < 0 else request.uid
    yield "pid", None if request.pid < 0 else request.pid
    yield "bytes", record.bytes
    yield "errno", record.errno
    yield "duration_us", record.duration_us
    yield "waited_us", record.waited_us


def _end_s(record: Record) -> float:
    return record.at_ns / 1e9 + record.duration_us / 1e6
