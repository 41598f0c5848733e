"""Hosts that join a map in PostgreSQL: the copy of the map, and its repetition after a crash."""

import logging
from collections.abc import AsyncIterator

import psycopg
import pytest

from aifs.core import faults
from aifs.core.errors import StoreError, Unavailable
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated import joining, sessions
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.joining import join
from aifs.meta.replicated.sessions import end_session
from tests.support.points import armed, crash
from tests.support.replicas import END_OTHERS, caught_up, delete, everything, get, put
from tests.support.replicas import cluster as cluster

pytestmark = pytest.mark.sweep


async def test_who_joins_late_copies_the_map_and_who_comes_back_goes_on(cluster, monkeypatch):
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    a, b = await cluster.join("a"), await cluster.join("b")
    for number in range(30):
        await a.transact(put, b"k%d" % number, b"x" * number)
    cluster.kill("b")
    copies: set[int] = set()

    def reach(point: str) -> None:
        if point == joining.COPYING:
            copies.add(len(cluster.hosts))

    monkeypatch.setattr(replicated.faults, "reach", reach)
    for number in range(10):
        await a.transact(delete, b"k%d" % (2 * number))
    b = await cluster.join("b")
    assert not copies and len(await everything(b)) == 20
    await cluster.join("c")
    assert copies == {2}
    copies.clear()
    cluster.kill("b")
    for number in range(5):
        await a.transact(delete, b"k%d" % (2 * number + 1))
    await a.session.beat()
    await end_session(cluster.database, b.session.number, "dead")
    await caught_up(cluster.hosts["c"])
    await cluster.hosts["c"].session.beat()
    ((removed,),) = await cluster.database.settles.repeat(db.TRIM, db.of_int(1))
    assert db.to_int(removed) == 44
    await cluster.join("b")
    assert copies == {2}, "the feed does not go back so far"


async def test_who_copies_the_map_keeps_its_lease_and_holds_up_nobody(cluster, monkeypatch):
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    monkeypatch.setattr(sessions, "BEAT_S", 0.0)
    a = await cluster.join("a")
    for number in range(30):
        await a.transact(put, b"k%d" % number, b"")
    beat, copy_pairs = sessions.Session.beat, db.Connection.copy_pairs
    beats: list[list[int]] = []

    async def watched(session: sessions.Session) -> int:
        status = await beat(session)
        if session.name == "c" and session.shown is None:
            rows = await cluster.database.settles.repeat(db.BEHIND, db.of_bigint(1 << 40))
            beats.append([db.to_int(row[0]) for row in rows])
        return status

    async def unhurried(connection: db.Connection, query: str) -> AsyncIterator:
        assert await connection.value("show statement_timeout") == "0"
        async for pair in copy_pairs(connection, query):
            yield pair

    with monkeypatch.context() as patch:
        patch.setattr(sessions.Session, "beat", watched)
        patch.setattr(db.Connection, "copy_pairs", unhurried)
        await cluster.join("c")
    assert len(beats) >= 5 and all(behind == [a.session.number] for behind in beats)


async def test_who_copies_the_map_holds_no_snapshot_and_hears_what_changes_meanwhile(
    cluster, monkeypatch
):
    """A snapshot of the whole map slows all commits, more with each of them."""
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    monkeypatch.setattr(joining, "FETCH_ROWS", 3)
    a = await cluster.join("a")
    for number in range(30):
        await a.transact(put, b"k%02d" % number, b"old")
    copy_pairs, slices = db.Connection.copy_pairs, 0

    async def changing(connection: db.Connection, query: str) -> AsyncIterator:
        nonlocal slices
        slices += 1
        at = 7 * slices
        await a.transact(put, b"k%02d" % at, b"ahead %d" % slices)
        await a.transact(put, b"k00", b"behind %d" % slices)
        await a.transact(delete, b"k%02d" % (at - 3))
        await a.transact(delete, b"k%02d" % (at + 1))
        await a.transact(lambda tx: tx.add(b"n", 1))
        async for pair in copy_pairs(connection, query):
            yield pair
        assert (
            await cluster.value(
                "select count(*) from pg_stat_activity where backend_xmin is not null"
                " and datname = current_database() and pid <> pg_backend_pid()"
            )
            == "0"
        )

    with monkeypatch.context() as patch:
        patch.setattr(db.Connection, "copy_pairs", changing)
        b = await cluster.join("b")
    assert slices >= 4
    assert await b.view(get, b"k00") == b"behind %d" % slices


async def test_a_copy_is_begun_anew_when_the_database_crashes(cluster, monkeypatch, caplog):
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    a = await cluster.join("a")
    for number in range(30):
        await a.transact(put, b"k%02d" % number, b"")
    killed: list[str] = []
    caplog.set_level(logging.INFO)

    def kill(point: str) -> None:
        if point == joining.COPYING and not killed:
            killed.append(point)
            with psycopg.connect(cluster.conninfo) as connection:
                connection.execute(END_OTHERS)

    with monkeypatch.context() as patch:
        patch.setattr(joining.faults, "reach", kill)
        await cluster.join("b")
    assert sum("copying the map" in message for message in caplog.messages) == 2


async def test_a_copy_of_a_history_that_is_gone_is_not_gone_on_with(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"lost")
    await cluster.join("c")
    cluster.kill("c")
    cluster.kill("a")
    connection = await cluster.database.connect()
    await connection.script(
        "begin; update aifs.feed set number = number + 1, vals = '{new}';"
        "update aifs.map set value = 'new'; commit"
    )
    connection.close()
    c = await cluster.join("c")
    assert await c.view(get, b"k") == b"new"


async def test_a_copy_that_was_cut_short_is_made_anew(cluster, monkeypatch):
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    a = await cluster.join("a")
    for number in range(30):
        await a.transact(put, b"k%d" % number, b"")

    class Cut(Exception):
        pass

    def cut(point: str) -> None:
        if point == joining.COPYING:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(replicated.faults, "reach", cut)
        with pytest.raises(Cut):
            await cluster.join("b")
    await a.transact(delete, b"k3")
    await cluster.join("b")


@pytest.mark.parametrize(
    "point", [replicated.BEFORE_COMMIT, replicated.COMMITTED, replicated.APPLIED, joining.COPYING]
)
async def test_a_host_that_dies_anywhere_comes_back_whole(cluster, monkeypatch, point):
    monkeypatch.setattr(joining, "COPY_PAIRS", 7)
    a, b = await cluster.join("a"), await cluster.join("b")
    for number in range(20):
        await a.transact(put, b"k%d" % number, b"")
    with armed(point, crash), pytest.raises(faults.SimulatedCrash):
        await b.transact(lambda tx: tx.add(b"n", 1))
        await cluster.join("c")
    if point != joining.COPYING:
        cluster.kill("b")
        b = await cluster.join("b")
    await cluster.join("c")
    expected = 0 if point == replicated.BEFORE_COMMIT else 1
    assert await b.view(lambda tx: tx.counter(b"n")) == expected


async def test_a_database_that_is_not_a_stores_is_refused(database, tmp_path):
    local = LmdbEngine(str(tmp_path))
    with pytest.raises(StoreError, match="holds no store"):
        await join(local, MapDatabase(database.conninfo), "a", "a:7947")
    database.make_store()
    with pytest.raises(StoreError, match="already"):
        database.make_store()
    with pytest.raises(Unavailable, match="cannot be reached"):
        await join(local, MapDatabase(database.url), "a", "a:7947")
    nowhere = database.conninfo.replace("127.0.0.1", "no-such-host.invalid")
    with pytest.raises(Unavailable, match=r"no-such-host.invalid is not known"):
        await join(local, MapDatabase(nowhere), "a", "a:7947")
    named = MapDatabase(database.conninfo.replace("127.0.0.1", "localhost"))
    await named.require_schema()
    local.abandon()
