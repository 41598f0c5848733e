"""Faults of the database that hosts share: lost answers, other servers, restarts, lost commits."""

import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.meta.kv import Transaction
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated import sessions
from aifs.meta.replicated.database import AnswerLost, MapDatabase
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.sessions import end_session, holder_of
from tests.support import postgres
from tests.support.replicas import END_OTHERS, caught_up, delete, get, put, running
from tests.support.replicas import cluster as cluster


@pytest.mark.sweep
async def test_an_answer_that_is_lost_counts_once(cluster, monkeypatch):
    a, b = await cluster.join("a"), await cluster.join("b")
    ask, lost = db.Connection.ask, []

    async def lose(connection: Any, statement: Any, parameters: Any) -> Any:
        answer = await ask(connection, statement, parameters)
        is_own = parameters[0] == db.of_int(a.session.number)
        if statement is db.COMMIT and is_own and len(lost) < 2:
            lost.append(answer)
            await b.transact(lambda tx: tx.add(b"others", 1))
            raise AnswerLost("a test has lost it")
        return answer

    monkeypatch.setattr(db.Connection, "ask", lose)
    await a.transact(lambda tx: tx.add(b"n", 1))
    assert len(lost) == 2
    assert await a.view(lambda tx: tx.counter(b"n")) == 1
    await a.transact(lambda tx: tx.add(b"n", tx.counter(b"others")))
    assert await a.view(lambda tx: tx.counter(b"n")) == 3


@pytest.mark.sweep
async def test_an_answer_to_begin_that_is_lost_takes_no_name(cluster, monkeypatch):
    ask, lost = db.Connection.ask, []

    async def lose(connection: Any, statement: Any, parameters: Any) -> Any:
        answer = await ask(connection, statement, parameters)
        if statement is db.BEGIN and not lost:
            lost.append(answer)
            raise AnswerLost("a test has lost it")
        return answer

    monkeypatch.setattr(db.Connection, "ask", lose)
    a = await cluster.join("a")
    assert lost and [one.session for one in await a.session.live()] == [a.session.number]


async def test_a_database_that_takes_no_changes_is_connected_anew(cluster, database, monkeypatch):
    """A primary that was failed over is read-only, and is waited for as one that is away."""
    a = await cluster.join("a")
    connection = await cluster.database.connect()
    await connection.script("set default_transaction_read_only = on")
    with pytest.raises(AnswerLost, match="read-only"):
        await connection.script("insert into aifs.version values (1)")
    connection.close()
    primary = await cluster.database.connect()
    begin = f"alter database {database.name}"
    connect, refused = db.Connection.open, []

    async def watched(conninfo: str, limit_s: float) -> db.Connection:
        try:
            return await connect(conninfo, limit_s)
        except Unavailable as error:
            refused.append(str(error))
            await primary.script(f"{begin} reset default_transaction_read_only")
            raise

    await primary.script(f"{begin} set default_transaction_read_only = on")
    await primary.script(END_OTHERS)
    monkeypatch.setattr(db.Connection, "open", watched)
    await a.transact(put, b"k", b"1")
    assert "read-only" in refused[0]
    primary.close()


@pytest.mark.sweep
@pytest.mark.parametrize("servers", ["gone.invalid:1,{0}", "{0},gone.invalid:1"])
async def test_a_server_whose_name_is_not_known_is_passed_over(database, servers):
    good = database.conninfo.rpartition("@")[2].partition("/")[0]
    named = MapDatabase(database.conninfo.replace(good, servers.format(good)))
    connection = await named.connect()
    assert connection.place["host"] == "127.0.0.1"
    connection.close()


async def test_a_server_that_does_not_answer_is_left_for_the_next_one(database, monkeypatch):
    database.make_store()
    monkeypatch.setattr(db, "_CONNECT_MIN_S", 0.1)
    good = database.conninfo.rpartition("@")[2].partition("/")[0]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hole = f"127.0.0.1:{silent.getsockname()[1]}"
        named = MapDatabase(database.conninfo.replace(good, f"{hole},{good}"))
        assert await named.settles.repeat(db.LAST)
        silent.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                silent.accept()[0].close()
        connection = await named.connect()
        named.end_now(1, "by a test")
        with pytest.raises(BlockingIOError):  # nobody has come
            silent.accept()
    assert f"{connection.place['hostaddr']}:{connection.place['port']}" == good, "it is known now"
    connection.close()
    named.close()


@pytest.mark.sweep
async def test_who_has_lost_a_server_tries_the_next_one_first(database):
    database.make_store()
    good = database.conninfo.rpartition("@")[2].partition("/")[0]
    other = good.replace("127.0.0.1", "127.0.0.2")
    named = MapDatabase(database.conninfo.replace(good, f"{good},{other}"))
    used = []
    killer = await MapDatabase(database.conninfo).connect()
    for _ in range(3):
        assert await named.commits.repeat(db.LAST) and await named.settles.repeat(db.LAST)
        connection = await named.connect()
        used.append(connection.place["host"])
        connection.close()
        await killer.value(END_OTHERS)
    killer.close()
    assert used == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    named.close()


@pytest.mark.sweep
async def test_who_gives_a_connection_up_leaves_nobody_in_the_database(cluster):
    given_up, other = [await cluster.database.connect() for _ in range(2)]
    pid = await given_up.value("select pg_backend_pid()")
    state = f"select coalesce((select state from pg_stat_activity where pid = {pid}), 'gone')"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(given_up.script, "set statement_timeout = 0; select pg_sleep(600)")
        while await other.value(state) != "active":
            await trio.sleep(0.01)
        nursery.cancel_scope.cancel()
    given_up.close()
    with trio.fail_after(60):
        while await other.value(state) != "gone":
            await trio.sleep(0.01)
    other.close()


@pytest.mark.sweep
async def test_who_copies_the_map_does_not_have_the_role(cluster, monkeypatch):
    copy_pairs, begun, gate = db.Connection.copy_pairs, trio.Event(), trio.Event()

    async def held_up(connection: db.Connection, query: str) -> AsyncIterator:
        if not begun.is_set():
            begun.set()
            await gate.wait()
        async for pair in copy_pairs(connection, query):
            yield pair

    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    with monkeypatch.context() as patch:
        patch.setattr(db.Connection, "copy_pairs", held_up)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.join, "early")
            await begun.wait()
            b = await cluster.join("b")
            members = await b.session.live()
            assert [one.name for one in members] == ["a", "early", "b"]
            assert holder_of(members) == a.session.number
            cluster.kill("a")
            await end_session(cluster.database, a.session.number, "by a test")
            assert holder_of(await b.session.live()) == b.session.number
            gate.set()
    members = await b.session.live()
    assert all(one.joined for one in members) and len(members) == 2
    assert holder_of(members) == b.session.number, "nobody loses it to an older session"


@pytest.mark.sweep
@pytest.mark.parametrize("kill", [False, True])
async def test_the_database_is_restarted_while_hosts_write(cluster, a_postgres, kill):
    a, b, c = [await cluster.join(name) for name in "abc"]
    told: list[bytes] = []
    reached = {count: trio.Event() for count in (30, 90)}

    async def write(engine: ReplicatedEngine, number: int) -> None:
        for step in range(60):
            key = b"k%d.%d" % (number, step)
            await engine.transact(put, key, b"")
            await engine.transact(lambda tx: tx.add(b"n", 1))
            told.append(key)
            if len(told) in reached:
                reached[len(told)].set()
            if step == 40:
                await engine.barrier()

    async with running(a, b, c), trio.open_nursery() as writing:
        for number, engine in enumerate((a, b, c)):
            writing.start_soon(write, engine, number)
        for event in reached.values():
            await event.wait()
            a_postgres.restart(kill)  # not in a thread, with which it would end
    await cluster.check()
    found = await cluster.everything()
    assert len(told) == 180 and set(told) < set(found)
    assert int.from_bytes(found[b"n"], "little") == 180


@pytest.mark.sweep
async def test_a_database_that_is_older_than_a_replica_is_not_followed(cluster, caplog):
    a, b = await cluster.join("a"), await cluster.join("b")
    for number in range(5):
        await a.transact(put, b"k%d" % number, b"1")
    await caught_up(b)
    connection = await cluster.database.connect()
    await connection.script(
        "begin; update aifs.head set seq = 2; delete from aifs.feed where seq > 2; "
        "delete from aifs.map where key > 'k1'; commit"
    )
    connection.close()
    with pytest.raises(Unavailable, match="restored from an old copy"):
        await a.transact(put, b"other", b"1")
    with pytest.raises(Unavailable, match="restored from an old copy"):
        await b.barrier(b.seq + 1)
    caplog.clear()
    for name in "ab":
        cluster.kill(name)
        await cluster.join(name)


@pytest.mark.sweep
async def test_nothing_is_trimmed_before_hosts_have_put_back_what_is_lost(cluster):
    a = await cluster.join("a")
    for number in range(5):
        await a.transact(put, b"k%d" % number, b"1")
    await a.barrier()
    await a.session.beat()
    connection = await cluster.database.connect()
    await connection.script("truncate aifs.head")
    connection.close()
    ((removed,),) = await cluster.database.settles.repeat(db.TRIM, db.of_int(1))
    assert db.to_int(removed) == 0
    await a.transact(put, b"k5", b"1")
    assert a.session.cursor == 6


async def test_a_row_that_patches_a_key_twice_is_put_back(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"0123")
    await a.barrier()

    def patch(tx: Transaction) -> None:
        tx.patch(b"k", 0, b"a")
        tx.patch(b"k", 2, b"c")

    await a.transact(patch)
    connection = await cluster.database.connect()
    await connection.script(
        "begin; truncate aifs.head; delete from aifs.feed where seq > 1; "
        "update aifs.map set value = '0123'; commit"
    )
    connection.close()
    await a.barrier()
    assert await cluster.everything() == {b"k": b"a1c3"}


async def test_a_host_that_has_what_nobody_can_put_back_does_not_go_on(
    cluster, monkeypatch, caplog
):
    """As after a standby has taken over that was behind."""
    a = await cluster.join("a")
    for number in range(5):
        await a.transact(put, b"k%d" % number, b"1")
    await a.barrier()  # what is before it is not put back
    connection = await cluster.database.connect()
    await connection.script(
        "begin; truncate aifs.head; delete from aifs.feed where seq > 2; "
        "delete from aifs.map where key > 'k1'; commit"
    )
    connection.close()
    reopen = replicated.reopen

    async def others_go_on(*args: Any) -> bool:
        done = await reopen(*args)
        if done and "c" not in cluster.hosts:
            c = await cluster.join("c")
            for number in range(5):
                await c.transact(put, b"c%d" % number, b"1")
        return done

    monkeypatch.setattr(replicated, "reopen", others_go_on)
    with pytest.raises(Unavailable, match="changes that this host has are missing"):
        await a.transact(put, b"other", b"1")
    cluster.kill("a")
    caplog.clear()
    a = await cluster.join("a")
    assert await a.view(get, b"k4") is None


@pytest.mark.sweep
async def test_a_commit_that_a_crash_takes_while_rows_before_it_are_fetched_is_made_anew(
    cluster, monkeypatch
):
    a, b = await cluster.join("a"), await cluster.join("b")
    b.session.sure_until_s = float("inf")  # so it is behind when it commits
    for number in range(520):  # more than an answer has
        await a.transact(put, b"k", b"%d" % number)
    ask, crashes = db.Connection.ask, []

    async def lose(connection: Any, statement: Any, parameters: Any) -> Any:
        if statement is db.FETCH and not crashes:
            crashes.append(statement)
            other = await cluster.database.connect()
            await other.script(
                "begin; truncate aifs.head; delete from aifs.feed where seq > 520; "
                "delete from aifs.map where key = 'mine'; "
                "update aifs.session set number = 0 where name = 'b'; commit"
            )
            other.close()
        return await ask(connection, statement, parameters)

    async with running(a):
        monkeypatch.setattr(db.Connection, "ask", lose)
        await b.transact(put, b"mine", b"1")
    assert crashes
    assert (await cluster.everything())[b"mine"] == b"1"


@pytest.mark.sweep
async def test_catching_up_ends_where_the_feed_ends(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    await a.catch_up(100)
    assert a.session.cursor == 1


@pytest.mark.sweep
async def test_a_database_that_is_away_while_it_recovers_ends_no_session(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    await cluster.script("truncate aifs.head")
    assert not await sessions.reopen(cluster.database, a.session.number)
    long_ago = (
        "update aifs.report set since = '-infinity', at = clock_timestamp() - interval '{} s'"
    )
    await cluster.script(long_ago.format(3))
    assert not await sessions.reopen(cluster.database, a.session.number)
    assert len(await a.session.live()) == 2
    await cluster.script(long_ago.format(0))
    assert await sessions.reopen(cluster.database, a.session.number)
    with pytest.raises(Unavailable, match="did not come back after a crash"):
        await caught_up(b)
    cluster.kill("b")
    await cluster.join("b")


@pytest.mark.sweep
@postgres.BOTH
async def test_what_a_crash_takes_from_the_database_hosts_put_back(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    for number in range(10):
        await a.transact(put, b"k%d" % number, b"1")
        await b.transact(lambda tx: tx.add(b"n", 1))
    await a.transact(delete, b"k3")
    lost = a.session.cursor - 5
    connection = await cluster.database.connect()
    await connection.script(
        f"begin; truncate aifs.head; delete from aifs.feed where seq > {lost}; "
        "delete from aifs.map where key in ('k9', 'k8'); "
        "update aifs.map set value = 'old' where key = 'n'; "
        "insert into aifs.map values ('k3', 'old'); commit"
    )
    connection.close()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(caught_up, b)
        nursery.start_soon(b.barrier)
        await a.transact(put, b"k10", b"1")
    found = await cluster.everything()
    assert b"k3" not in found and found[b"k9"] == found[b"k10"] == b"1"
    assert int.from_bytes(found[b"n"], "little") == 10
