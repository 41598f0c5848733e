"""A replica's records beside the map: its *cursor*, up to where it has the feed; hidden from views
and transactions."""

import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledView
from aifs.meta.recording import Recording
from aifs.meta.replicated import database as db
from aifs.meta.replicated.database import MapDatabase

CURSOR_KEY = b"\0cursor"
_FIRST_KEY = CURSOR_KEY + b"\0"
"""No key of the map is below: so ranges leave the cursor out."""
_CURSOR = struct.Struct("<QIQIQ")


class Cursor(NamedTuple):
    """Up to where a replica has the feed: the record of ``CURSOR_KEY``, which no other store has.

    Little-endian: u64 number of the row, u32 session and u64 number of its commit (both 0: the feed
    was empty), u32 session of the host, u64 number up to which the feed has what was ahead
    (ahead.py).
    """

    seq: int
    session: int
    number: int
    own: int
    shipped: int

    def encode(self) -> bytes:
        return _CURSOR.pack(*self)


class View(LeveledView):
    """Of the map."""

    __slots__ = ("host",)

    def __init__(self, *levels: Any, host: int = 0) -> None:
        super().__init__(*levels)
        self.host = host

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        return super().range(max(start, _FIRST_KEY), end, limit)


class Attempt(Recording):
    """Transactions on the map that run one after the other, recorded as one."""

    __slots__ = ()

    def begin(self) -> None:
        """What is read from now on is that of another function."""
        self.reads, self.loose, self.ranges = set(), set(), []

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        return super().range(max(start, _FIRST_KEY), end, limit)


async def cursor_of(local: LmdbEngine) -> Cursor | None:
    """None: it is not the replica of anything."""
    record = await local.view(lambda tx: tx.get(CURSOR_KEY))
    return Cursor._make(_CURSOR.unpack(record)) if record else None


async def look_up(database: MapDatabase, cursor: Cursor) -> int:
    """DONE if the cursor's row is in the feed; TRIMMED if not; RECOVERING if that is unknown
    yet."""
    base = cursor.seq - 1 if cursor.session else cursor.seq
    head, *rows = await database.settles.repeat(db.FETCH, db.of_bigint(base), db.of_int(1))
    status = db.to_int(head[0])
    if status == db.DONE:
        if cursor.seq > db.to_int(head[1]):
            return db.TRIMMED
        if cursor.session:
            row = db.to_row(rows[0])
            if (row.session, row.number) != (cursor.session, cursor.number):
                return db.TRIMMED
    return status
