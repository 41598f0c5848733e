"""The check of redundancy: records of degraded columns and of strays, marks of servers, columns of
protected files.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import NamedTuple

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY, Fix, Subject, View
from aifs.core.errors import FsError
from aifs.layout.striped import Striped
from aifs.meta import keys, moves
from aifs.meta.degraded import find_unread, put_unread
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode, decode_degraded

Report = Callable[[str, Subject, str, Fix | None, int], None]
"""Kind, subject, detail, what mends it, and when."""


class ColumnRecords:
    """``layout`` is called for all striped files and containers, then the others for all ``q``,
    ``m`` and ``u`` records; then ``conclude``."""

    def __init__(self, view: View, servers: Collection[int], report: Report) -> None:
        self._view = view
        self._servers = servers
        self._report = report
        self._unprotected: set[int] = set()

    async def layout(self, ino: int, oid: int, layout: Striped) -> None:
        """A file (or container: 0) is laid out so. Names servers that it should not name."""
        if not layout.is_protected:
            self._unprotected.update(layout.servers)
        unknown = [
            column for column, server in enumerate(layout.servers) if server not in self._servers
        ]
        if not unknown or not ino:
            return
        known = await self._view(lost_columns, oid)
        mask = sum(1 << column for column in unknown) & ~known
        if mask:
            fix = (
                partial(put_unread, oid=oid, ino=ino, mask=mask)
                if layout.survives(mask | known)
                else None
            )
            numbers = ", ".join(str(layout.servers[column]) for column in unknown)
            self._report(
                "unknown-server",
                ino,
                f"inode {ino}: its layout names data server {numbers}",
                fix,
                RECORDS,
            )

    async def degraded(self, key: bytes, value: bytes) -> None:
        oid = keys.number(key)
        where, forget = f"degraded objects {oid}", partial(repair.delete, key=key)
        try:
            ino, mask = decode_degraded(value)
        except FsError as error:
            self._report("unreadable-record", where, str(error), forget, RECOVERY)
            return
        try:
            objects = await self._view(moves.find_objects, ino, oid)
        except FsError:
            return  # the record that it is about is named
        if (
            objects is None
            or mask >> len(objects.layout.servers)
            or (mask and not objects.layout.is_protected)
        ):
            self._report(
                "stray-record",
                where,
                f"it is about objects of inode {ino} that there are not",
                forget,
                RECOVERY,
            )
        elif not objects.layout.survives(mask):
            subject: Subject = ino or f"container {oid}"
            lacking = f"columns {_numbers(mask)}"
            self._report(
                "missing-object",
                subject,
                f"{lacking} lack, more than its bytes survive",
                None,
                RECORDS,
            )

    async def stray(self, key: bytes, value: bytes) -> None:
        try:
            moves.decode_stray(key, value)
        except FsError as error:
            oid = keys.stray_parts(key)[0]
            self._report(
                "unreadable-record",
                f"stray of {oid}",
                str(error),
                partial(repair.delete, key=key),
                RECOVERY,
            )

    async def mark(self, key: bytes, value: bytes) -> None:
        number = int.from_bytes(key[1:], "big")
        if number in self._servers:
            self._unprotected.discard(number)
        else:
            fix = partial(repair.delete, key=key)
            self._report(
                "stray-record",
                f"data server {number}",
                "a mark of a server that there is not",
                fix,
                RECORDS,
            )

    def conclude(self) -> None:
        for number in sorted(self._unprotected.intersection(self._servers)):
            fix = partial(repair.put, key=keys.unprotected(number), value=b"")
            detail = "unprotected bytes lie there, and nothing says so"
            self._report("server-mark", f"data server {number}", detail, fix, RECORDS)


def lost_columns(tx: ReadTransaction, oid: int) -> int:
    """The mask of columns that nobody reads; 0 also where the record is damaged, which is named
    elsewhere.
    """
    try:
        return find_unread(tx, oid)
    except FsError:
        return 0


class Lack(NamedTuple):
    """A column of a protected file that is missing or too short."""

    column: int
    kind: str
    what: str
    length: int


def expected_columns(layout: Striped, size: int, unread: int) -> Iterator[tuple[int, int]]:
    """Column and server of each object that a striped file must have."""
    for column, number in enumerate(layout.servers):
        if layout.object_length(column, size) and not unread >> column & 1:
            yield column, number


def lost_bytes(layout: Striped, column: int, length: int, size: int) -> str:
    """The bytes of a file that are lost when the object of a data column ends after ``length``
    bytes, as text.
    """
    expected = layout.object_length(column, size)
    first, last = layout.file_offset(column, length), layout.file_offset(column, expected - 1)
    if last - first == expected - length - 1:
        return f"bytes {first} to {last}"
    return f"{expected - length} bytes between {first} and {last}"


def judge(
    inode: Inode, unread: int, lacks: list[Lack]
) -> Iterator[tuple[Lack, str, str, Fix | None]]:
    """What each lack means for a protected file: kind of finding, detail, what mends it."""
    layout = inode.objects
    assert layout is not None
    mask = sum(1 << lack.column for lack in lacks)
    for lack in sorted(lacks):
        if layout.survives(unread | mask):
            fix = partial(put_unread, oid=inode.oid, ino=inode.ino, mask=1 << lack.column)
            yield lack, "degraded", lack.what, fix
        elif layout.data_column(lack.column) is None:
            yield lack, lack.kind, f"{lack.what}; it was parity", None
        else:
            bytes_ = lost_bytes(layout, lack.column, lack.length, inode.size)
            yield lack, lack.kind, f"{lack.what}; lost: {bytes_}", None


def _numbers(mask: int) -> str:
    return ", ".join(str(number) for number in range(mask.bit_length()) if mask >> number & 1)
