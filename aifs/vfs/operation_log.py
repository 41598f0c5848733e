"""The last requests that the kernel has sent, for who asks for them (``user.aifs.trace``): one ring
of records in memory, which any number of readers follow.

Records are kept while somebody reads; else a request costs the look at ``is_on``. What the kernel
does by itself is no request: cached lookups and pages, reads and writes that are passed through.
"""

import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from aifs.core.errors import Invalid
from aifs.meta import paths
from aifs.meta.kv import Engine, ReadTransaction

ATTRIBUTE = b"user.aifs.trace"

_RECORDS = 1 << 16
_KEPT_S = 5.0
"""How long after the last reader records are kept."""

_READ_AT_ONCE = 256
_LENGTH_MAX = 60_000  # an extended attribute has up to 64 KiB


class Request(NamedTuple):
    """What is asked for."""

    operation: str
    """Its name, as in FUSE."""
    ino: int
    """The inode; 0 if that is not known."""
    name: bytes
    """An entry of the directory ``ino``, or b""."""
    attribute: bytes
    """An extended attribute, or b""."""
    uid: int
    """-1, as ``pid``, if it is not known."""
    pid: int
    """The process; -1 if that is not known."""


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


class OperationLog:
    """Used from one trio thread. Records have numbers, which go up by one."""

    def __init__(self, switched: Callable[[bool], None]) -> None:
        """``switched`` is told whether requests are wanted."""
        self._switched = switched
        self.is_on = False
        """Whether what is answered is to be put here."""
        self._ring: list[Record | None] = []
        self._next = 0
        """The number that the next record gets."""
        self._first = 0
        """That of the first record since the log was switched on."""
        self._until_s = 0.0
        """When the log is switched off if nobody reads any more, on the monotonic clock."""

    def put(self, request: Request, begin_ns: int, errno: int, moved: int) -> None:
        """A request has been answered that came at ``begin_ns`` (``time.perf_counter_ns``)."""
        if time.monotonic() > self._until_s:
            self.is_on, self._ring = False, []
            self._switched(False)
        if not self.is_on:
            return
        duration_ns = time.perf_counter_ns() - begin_ns
        record = Record(request, time.time_ns() - duration_ns, duration_ns // 1000, errno, moved)
        self._ring[self._next % _RECORDS] = record
        self._next += 1

    def follow(self) -> None:
        """Somebody reads, and will come again."""
        self._until_s = time.monotonic() + _KEPT_S
        if not self.is_on:
            self.is_on, self._ring, self._first = True, [None] * _RECORDS, self._next
            self._switched(True)

    def records(self, start: int) -> tuple[int, list[Record]]:
        """The first records from the number ``start`` on that are still here, and the number of the
        first one."""
        first = max(start, self._first, self._next - _RECORDS)
        numbers = range(first, min(first + _READ_AT_ONCE, self._next))
        return first, [record for n in numbers if (record := self._ring[n % _RECORDS])]

    @property
    def next(self) -> int:
        """The number of the next record."""
        return self._next


async def tell(log: OperationLog, engine: Engine, start: int | None = None) -> bytes:
    """What ``user.aifs.trace`` says, JSON: {"next": N, "lost": K, "records": [...]}; with ``start``
    what ``user.aifs.trace.START`` says: the records from that number on, some at a time, and how
    many of them are not here any more. ``next`` is where to go on. Raises Invalid."""
    log.follow()
    if start is None:
        return json.dumps({"next": log.next, "lost": 0, "records": []}).encode()
    if start > log.next:
        raise Invalid(f"the next record is number {log.next}")
    first, records = log.records(start)
    names = await engine.view(_paths, {record.request.ino for record in records})
    told: list[str] = []
    length = 0
    for record in records:
        text = json.dumps(_describe(record, names))
        length += len(text) + 2
        if length > _LENGTH_MAX:
            break
        told.append(text)
    head = json.dumps({"next": first + len(told), "lost": first - start})
    return f'{head[:-1]}, "records": [{", ".join(told)}]}}'.encode()


def _paths(tx: ReadTransaction, inos: set[int]) -> dict[int, bytes | None]:
    return {ino: paths.find_path(tx, ino) if ino else None for ino in inos}


def _describe(record: Record, names: dict[int, bytes | None]) -> dict[str, Any]:
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
