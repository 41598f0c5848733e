"""How a host joins its cluster: a session, and a replica, updated by the feed or copied anew
(docs/design/replicated.md)."""

import logging
from collections.abc import Collection
from contextlib import aclosing, suppress

import trio

from aifs.core import faults
from aifs.core.errors import StoreError, Unavailable
from aifs.meta import journal
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import Writes
from aifs.meta.replicated import database as db
from aifs.meta.replicated.ahead import END_KEY, FIRST_KEY, Ahead, ChangeSet, decode_change_set, told
from aifs.meta.replicated.database import ANSWER_S, AnswerLost, Connection, MapDatabase
from aifs.meta.replicated.engine import FETCH_ROWS, ReplicatedEngine
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.replica import CURSOR_KEY, Cursor, cursor_of, look_up
from aifs.meta.replicated.sessions import REOPEN_S, Session, reopen

log = logging.getLogger(__name__)

COPY_PAIRS = 2000
"""Of the map that a host which joins writes to its replica at a time."""

COPYING = faults.declare("hosts.copy.part", "part of the map has been copied")

_END = (
    "select coalesce((select concat_ws(' ', h.seq, coalesce(f.session, 0), coalesce(f.number, 0))"
    " from aifs.head h left join aifs.feed f on f.seq = h.seq), '')"
)
"""The last row of the feed: its number, session and number of its commit; empty: after a crash."""


async def join(
    local: LmdbEngine,
    database: MapDatabase,
    name: str,
    address: str,
    exchange: Exchange | None = None,
    goes_on: bool = False,
) -> ReplicatedEngine:
    """Begin a session for the host ``name``, and update its replica by the feed, or by a copy of
    the map. ``local`` is the engine's to close then. Without an ``exchange`` hosts hear of each
    other by the database alone. ``goes_on``: with the session of a daemon that has died.

    Raises StoreBusy if another host has the name; StoreError if the database is none of ours, or
    the session has ended; Unavailable.
    """
    await database.require_schema()
    found = await cursor_of(local)
    exchange = exchange or Exchange(None)
    former, base = (found.own, found.seq) if found else (0, None)
    if goes_on:
        session = await Session.resume(database, exchange, name, former)
    else:
        session = await Session.begin(database, exchange, name, address, former, base)
    engine = ReplicatedEngine(local, database, session, exchange)
    try:
        ahead = await _load_ahead(local, found.shipped) if found else Ahead(0)
        if found is not None and await look_up(database, found) != db.DONE:
            if goes_on:
                raise StoreError("the database is older than the replica of this host")
            _lose([*ahead])
            found, ahead = None, Ahead(0)
        lost = await engine.go_on(found or await _copy_map(local, database, session), ahead)
        if lost:
            local.apply({CURSOR_KEY: None})
            await session.end("its replica is made anew")
    except BaseException:
        if goes_on:  # another daemon may
            raise
        with trio.CancelScope(shield=True), trio.move_on_after(ANSWER_S), suppress(Unavailable):
            await session.end("it could not join")
        raise
    if lost:  # the replica has it
        _lose(lost)
        if goes_on:
            raise StoreError("another host has gone on without changes of this one")
        return await join(local, database, name, address, exchange)
    return engine


async def _load_ahead(local: LmdbEngine, shipped: int) -> Ahead:
    """The replica's sets that the feed had not, as far as known."""
    records = await local.view(lambda tx: [value for _, value in tx.range(FIRST_KEY, END_KEY)])
    sets = sorted(map(decode_change_set, records), key=lambda one: one.number)
    return Ahead(shipped, [one for one in sets if one.number > shipped])


def _lose(sets: Collection[ChangeSet]) -> None:
    if sets:
        log.warning("metadata: %s: another host has gone on without them", told("lost", sets))


async def _copy_map(local: LmdbEngine, database: MapDatabase, session: Session) -> Cursor:
    """Replace the replica by the database's map.

    A snapshot would slow all commits of the cluster. So the map is read in slices, then the feed
    from before the first slice to behind the last: rows say what keys are, whenever these were
    read. A crash of the database, which may take back a slice, ends the connection; copying begins
    anew.
    """
    while True:
        log.info("metadata: copying the map from the database")
        await _clear(local, session)
        connection = None
        try:
            connection = await database.connect()
            await connection.script("set statement_timeout = 0")
            if before := (await connection.value(_END)).split():
                await _copy_pairs(local, connection, session)
                seq, author, number = map(int, (await connection.value(_END)).split())
                await _copy_rows(local, connection, session, int(before[0]), seq)
                return Cursor(seq, author, number, session.number, 0)
        except AnswerLost as error:
            log.info("metadata: copying is begun anew: %s", error)
        finally:
            if connection is not None:
                connection.close()
        await reopen(database, session.number)
        await trio.sleep(REOPEN_S)


async def _copy_pairs(local: LmdbEngine, connection: Connection, session: Session) -> None:
    last = b""
    while True:
        writes: Writes = {}
        part = f"where key > '\\x{last.hex()}' order by key limit {COPY_PAIRS}"
        query = f"select key, value from aifs.map {part}"
        async with aclosing(connection.copy_pairs(query)) as pairs:
            async for last, value in pairs:
                writes[last] = value
        await _write(local, writes, session)
        if len(writes) < COPY_PAIRS:
            return
        faults.reach(COPYING)


async def _copy_rows(
    local: LmdbEngine, connection: Connection, session: Session, seq: int, end: int
) -> None:
    while seq < end:
        count = min(FETCH_ROWS, end - seq)
        (status, *_), *rows = await connection.ask(db.FETCH, (db.of_bigint(seq), db.of_int(count)))
        if db.to_int(status) != db.DONE:
            raise AnswerLost("the feed has been cut meanwhile")
        writes: Writes = {}
        for row in map(db.to_row, rows):
            writes.update(zip(row.keys, row.values, strict=True))  # type: ignore[arg-type]
            seq = row.seq
        await _write(local, writes, session)


async def _clear(local: LmdbEngine, session: Session) -> None:
    local.apply({CURSOR_KEY: None})
    while True:
        pairs = await local.view(lambda tx: list(tx.range(b"\0", b"\xff" * 8, COPY_PAIRS)))
        if not pairs:
            return
        await _write(local, {key: None for key, _ in pairs}, session)


async def _write(local: LmdbEngine, writes: Writes, session: Session) -> None:
    await session.keep_joining()
    if writes:
        local.apply(writes)
    if local.journal_bytes > journal.SEGMENT_BYTES >> 1:
        await local.commit()
