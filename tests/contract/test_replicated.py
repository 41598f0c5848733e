"""Hosts that share a map in PostgreSQL: what each of their engines sees, and that all see the same.

The contract of ``meta/kv.py`` is tested on this engine, too, in test_kv.py.
"""

import logging
import random
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psycopg
import pytest
import trio

from aifs.core import faults
from aifs.core.errors import Exists, NoSpace, NotEmpty, NotFound, StoreBusy, StoreError, Unavailable
from aifs.meta import forms, keys, namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import MTIME_AT, Inode
from aifs.meta.replicated import ahead, held, joining, sessions
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated.database import AnswerLost, MapDatabase, Row
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.joining import join
from aifs.meta.replicated.sessions import end_session, holder_of
from tests.support import postgres
from tests.support.memory_engine import MemoryEngine
from tests.support.points import armed, crash

LOW, HIGH = b"\0", b"\xff" * 9


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


def delete(tx: Transaction, key: bytes) -> None:
    tx.delete(key)


def get(tx: ReadTransaction, key: bytes) -> bytes | None:
    return tx.get(key)


class Near(Exchange):
    """Hosts of this process, which answer each other's recalls, and hear nothing else."""

    def __init__(self, hosts: dict[str, ReplicatedEngine]) -> None:
        super().__init__(None)
        self.hosts = hosts
        self.recalls: list[list[bytes]] = []
        """What was asked for."""
        self.serving: list[int] = []
        """Sessions that are being asked."""

    async def recall(self, session: int, delegations: Iterable[bytes]) -> int:
        self.recalls.append(list(delegations))
        await trio.lowlevel.checkpoint()
        for engine in self.hosts.values():
            if engine.session.number == session:
                self.serving.append(session)
                try:
                    return await engine.give_up(list(delegations))
                finally:
                    self.serving.remove(session)
        raise Unavailable("a test says that it is not there")


class Cluster:
    """Hosts of one database, all in this process."""

    def __init__(self, conninfo: str, directory: Path) -> None:
        self.conninfo = conninfo
        self._directory = directory
        self.hosts: dict[str, ReplicatedEngine] = {}
        self.exchange = Near(self.hosts)
        self.database = MapDatabase(conninfo)
        """A connection of the tests' own."""

    async def join(self, name: str, **options: Any) -> ReplicatedEngine:
        directory = self._directory / name
        directory.mkdir(exist_ok=True)
        local = LmdbEngine(str(directory))
        options = {"exchange": self.exchange, **options}
        try:
            engine = await join(local, MapDatabase(self.conninfo), name, f"{name}:7947", **options)
        except BaseException:
            local.abandon()
            raise
        self.hosts[name] = engine
        return engine

    def kill(self, name: str) -> None:
        self.hosts.pop(name).abandon()

    async def script(self, commands: str) -> None:
        """Behind the hosts' backs."""
        connection = await self.database.connect()
        await connection.script(commands)
        connection.close()

    async def value(self, query: str) -> str:
        connection = await self.database.connect()
        found = await connection.value(query)
        connection.close()
        return found

    async def everything(self) -> dict[bytes, bytes]:
        """The map as the database has it."""
        connection = await MapDatabase(self.conninfo).connect()
        try:
            query = "select key, value from aifs.map"
            return {key: value async for key, value in connection.copy_pairs(query)}
        finally:
            connection.close()

    async def check(self) -> None:
        """All replicas end equal to the database's map."""
        for engine in self.hosts.values():
            await engine.barrier()
        async with trio.open_nursery() as nursery:
            for engine in self.hosts.values():
                nursery.start_soon(caught_up, engine)
        expected = await self.everything()
        for engine in self.hosts.values():
            await caught_up(engine)
            assert await everything(engine) == expected


async def caught_up(engine: ReplicatedEngine) -> None:
    """It has all that was committed before."""
    engine.session.sure_until_s = 0.0
    await engine.view(lambda tx: None)


async def everything(engine: ReplicatedEngine) -> dict[bytes, bytes]:
    return await engine.view(lambda tx: dict(tx.range(LOW, HIGH)))


@asynccontextmanager
async def running(*engines: ReplicatedEngine) -> AsyncIterator[trio.Nursery]:
    async with trio.open_nursery() as nursery:
        for engine in engines:
            nursery.start_soon(engine.run)
        yield nursery
        nursery.cancel_scope.cancel()


@pytest.fixture
async def cluster(database, tmp_path):
    database.make_store()
    cluster = Cluster(database.conninfo, tmp_path)
    yield cluster
    await cluster.check()
    for engine in cluster.hosts.values():
        engine.close()
    cluster.database.close()


@postgres.BOTH
async def test_what_one_host_commits_another_one_finds(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    assert (a.host, b.host) == (1, 2)
    await a.transact(put, b"k", b"1")
    await a.transact(put, b"gone", b"1")
    await a.transact(delete, b"gone")
    assert await b.view(get, b"k") is None
    await caught_up(b)
    assert await everything(b) == {b"k": b"1"}


async def test_a_conflict_runs_the_function_again_on_what_others_have_done(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")

    def count(tx: Transaction) -> int:
        value = tx.counter(b"n") + 1
        tx.put(b"n", value.to_bytes(8, "little"))
        return value

    found = [await engine.transact(count) for engine in (a, b, a, a, b, b)]
    assert found == [1, 2, 3, 4, 5, 6]


async def test_adds_and_patches_of_two_hosts_do_not_conflict(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    await a.transact(put, b"k", b"0123456789")
    await caught_up(b)
    runs: list[bytes | None] = []

    def change(tx: Transaction, offset: int, part: bytes) -> None:
        runs.append(tx.get_loosely(b"k"))
        tx.patch(b"k", offset, part)
        tx.add(b"n", offset)

    await a.transact(change, 1, b"A")
    await b.transact(change, 2, b"BB")
    await a.transact(change, 5, b"AAA")
    await b.transact(change, 6, b"B")
    assert len(runs) == 4
    await caught_up(a)
    for engine in (a, b):
        assert await engine.view(get, b"k") == b"0ABB4ABA89"
        assert await engine.view(ReadTransaction.counter, b"n") == 14
    await a.transact(put, b"k", b"changed 89")
    await b.transact(change, 0, b"C")
    assert len(runs) == 6, "what was put is not patched unseen"
    assert await b.view(get, b"k") == b"Changed 89"


async def test_a_range_conflicts_as_far_as_it_was_read(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    for number in range(0, 10, 2):
        await a.transact(put, b"k%d" % number, b"")
    await caught_up(b)
    runs = []

    def first_two(tx: Transaction) -> list[bytes]:
        found = [key for key, _ in tx.range(b"k", b"l", 2)]
        runs.append(found)
        tx.put(b"found", b"".join(found))
        return found

    await a.transact(put, b"k5", b"")
    assert await b.transact(first_two) == [b"k0", b"k2"]
    assert len(runs) == 1
    await a.transact(put, b"k1", b"")
    assert await b.transact(first_two) == [b"k0", b"k1"]
    assert len(runs) == 3
    await a.transact(delete, b"k0")
    assert await b.transact(first_two) == [b"k1", b"k2"]
    assert len(runs) == 5


# --- names ----------------------------------------------------------------------------------------


def new(ino: int, mode: int = 0o100644) -> Inode:
    return Inode(ino, mode, 0, 0, 1, 0, 0, 0, 5, 5, 5)


async def two_with_root(cluster: Cluster) -> tuple[ReplicatedEngine, ReplicatedEngine]:
    a, b = await cluster.join("a"), await cluster.join("b")
    root = new(ROOT_INO, 0o040755)
    root.parent, root.nlink = ROOT_INO, 2
    await a.transact(namespace.put_inode, root)
    await caught_up(b)
    return a, b


async def create(engine: ReplicatedEngine, name: bytes, ino: int, parent: int = ROOT_INO) -> Inode:
    return await engine.transact(namespace.create, parent, name, new(ino))


async def test_one_name_is_made_once(cluster):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    with pytest.raises(Exists):
        await create(b, b"f", 11)
    assert (await b.view(namespace.lookup, ROOT_INO, b"f")).ino == 10


async def test_names_in_one_directory_do_not_conflict(cluster):
    a, b = await two_with_root(cluster)
    runs = []

    def change(tx: Transaction, function: Callable, *args: Any) -> None:
        runs.append(args)
        function(tx, *args)

    for number in range(20):
        inode = new(10 + number)
        engine = (a, b)[number % 2]
        await engine.transact(change, namespace.create, ROOT_INO, b"%d" % number, inode)
    for number in range(0, 20, 2):
        await a.transact(change, namespace.unlink, ROOT_INO, b"%d" % number, 6)
    assert len(runs) == 30 + len(cluster.exchange.recalls)
    await caught_up(b)
    assert await b.view(lambda tx: tx.counter(keys.COUNTER_INODES)) == 20


async def test_a_directory_is_removed_or_gets_a_name_but_not_both(cluster):
    a, b = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await a.transact(namespace.create, ROOT_INO, b"e", new(11, 0o040755))
    await caught_up(b)
    await a.transact(namespace.rmdir, ROOT_INO, b"d", 6)
    with pytest.raises(NotFound):
        await create(b, b"f", 20, parent=10)
    await create(a, b"f", 21, parent=11)
    with pytest.raises(NotEmpty):
        await b.transact(namespace.rmdir, ROOT_INO, b"e", 6)


async def test_a_rename_and_an_unlink_of_one_name_count_one_after_the_other(cluster):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await caught_up(b)
    moved = (ROOT_INO, b"f", ROOT_INO, b"g", 0, (30, 31), 6, {10})
    await a.transact(namespace.rename, *moved)
    with pytest.raises(NotFound):
        await b.transact(namespace.unlink, ROOT_INO, b"f", 6)
    await b.transact(namespace.unlink, ROOT_INO, b"g", 6)
    with pytest.raises(NotFound):
        await a.view(namespace.lookup, ROOT_INO, b"f")
    await caught_up(a)
    with pytest.raises(NotFound):
        await a.view(namespace.lookup, ROOT_INO, b"g")


# --- batches --------------------------------------------------------------------------------------


async def test_transactions_that_wait_go_together_and_see_those_before(cluster):
    a = await cluster.join("a")
    found: list[int] = []

    def count(tx: Transaction) -> int:
        before = tx.counter(b"n")
        tx.add(b"n", 1)
        if before % 5 == 2:
            tx.put(b"undone", b"")
            raise LookupError("mine")
        tx.add(b"sum", before)
        return before

    async def work() -> None:
        try:
            found.append(await a.transact(count))
        except LookupError:
            await a.transact(lambda tx: tx.add(b"n", 1))

    async with trio.open_nursery() as nursery:
        for _ in range(40):
            nursery.start_soon(work)
    assert await a.view(lambda tx: tx.counter(b"n")) == 40
    assert await a.view(get, b"undone") is None
    assert a.session.cursor < 20


async def test_a_transaction_is_cancelled_before_it_is_sent_or_not_at_all(cluster):
    a = await cluster.join("a")
    done, cancelled = [], []

    async def work(number: int, scope: trio.CancelScope) -> None:
        with scope:
            await a.transact(put, b"k%d" % number, b"")
            done.append(number)
        if scope.cancelled_caught:
            cancelled.append(number)

    for lap in range(10):
        async with trio.open_nursery() as nursery:
            scopes = [trio.CancelScope() for _ in range(8)]
            for number, scope in enumerate(scopes):
                nursery.start_soon(work, 8 * lap + number, scope)
            for number in range(lap):
                await trio.lowlevel.checkpoint()
            for number in (0, 3, 7):
                scopes[number].cancel()
    assert sorted(await everything(a)) == sorted(b"k%d" % number for number in done)
    assert len(done) + len(cancelled) == 80 and cancelled


async def test_who_waits_behind_a_commit_that_fails_is_told(cluster):
    a = await cluster.join("a")
    told: list[int] = []

    async def work(number: int) -> None:
        with pytest.raises(Unavailable, match="fenced by a test"):
            await a.transact(put, b"k%d" % number, b"")
        told.append(number)

    await end_session(cluster.database, a.session.number, "fenced by a test")
    async with trio.open_nursery() as nursery:
        for number in range(2 * replicated.MAX_BATCH + 3):
            nursery.start_soon(work, number)
    assert len(told) == 2 * replicated.MAX_BATCH + 3
    cluster.kill("a")


async def test_what_a_transaction_without_changes_has_read_is_older_than_what_is_read_later(
    cluster,
):
    a, b = await cluster.join("a"), await cluster.join("b")
    await a.transact(put, b"k", b"1")
    assert await a.transact(get, b"k") == b"1"
    before = await a.transact(lambda tx: tx.seq)
    await b.transact(put, b"k", b"2")
    await caught_up(a)
    assert await a.view(lambda tx: (tx.get(b"k"), tx.seq > before)) == (b"2", True)
    assert await a.transact(lambda tx: (tx.get(b"k"), tx.seq > before)) == (b"2", True)
    await a.barrier()


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
async def test_the_isolation_that_a_database_has_by_default_does_not_matter(
    cluster, database, level
):
    set_level = f"alter database {database.name} set default_transaction_isolation"
    await cluster.script(f"{set_level} = '{level}'")
    a, b = await cluster.join("a"), await cluster.join("b")
    connection = await MapDatabase(cluster.conninfo).connect()
    assert await connection.value("show transaction_isolation") == "read committed"
    connection.close()
    async with trio.open_nursery() as nursery:
        for engine in (a, b) * 3:
            nursery.start_soon(engine.transact, lambda tx: tx.add(b"n", 1))
    assert await a.view(lambda tx: tx.counter(b"n")) >= 3


async def test_who_has_to_ask_again_because_of_others_keeps_its_connection(cluster):
    await cluster.script(
        "create function t() returns int language plpgsql as $$ begin"
        " raise 'not now' using errcode = '40001'; end $$"
    )
    link, pid = cluster.database.settles, db.Statement(b"pid", b"select pg_backend_pid()", (), ())
    before = await link.ask(pid)
    with pytest.raises(AnswerLost, match="not now"):
        await link.ask(db.Statement(b"t", b"select t()", (), ()))
    assert await link.ask(pid) == before
    with pytest.raises(AnswerLost):
        await link.ask(db.Statement(b"x", b"select pg_terminate_backend(pg_backend_pid())", (), ()))
    assert await link.ask(pid) != before


# --- sessions -------------------------------------------------------------------------------------


async def test_of_sessions_that_have_ended_one_is_kept_for_each_name(cluster):
    hosts = []
    for _ in range(4):
        for name in "ab":
            hosts.append((await cluster.join(name)).host)
            cluster.kill(name)
    assert hosts == [1, 2] * 4
    kept = "select string_agg(id::text, ' ' order by id) from aifs.session"
    assert await cluster.value(kept) == "5 6 7 8"


async def test_looks_at_sessions_do_not_see_those_that_have_ended(cluster):
    await cluster.script(
        "insert into aifs.session (asking, name, host, address, lease_end, cursor, ended)"
        " select '', 'n' || n, n, '', now(), 0, 'gone' from generate_series(1, 20000) n;"
        " analyze aifs.session"
    )
    a = await cluster.join("a")
    assert a.host == 20001
    for function in ("members", "behind"):
        query = await cluster.value(f"select prosrc from pg_proc where proname = '{function}'")
        plan = await cluster.value(f"explain (format json) {query.replace('upto', '1')}")
        assert "session_live" in plan, plan


async def test_who_has_lost_its_session_changes_nothing(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    assert await end_session(cluster.database, a.session.number, "fenced by a test")
    with pytest.raises(Unavailable, match="fenced by a test"):
        await a.transact(put, b"k", b"2")
    with pytest.raises(Unavailable, match="fenced by a test"):
        await a.view(get, b"k")
    cluster.kill("a")
    a = await cluster.join("a")
    assert await a.view(get, b"k") == b"1"
    assert (a.host, a.session.number) == (1, 2)


async def test_who_is_silent_for_too_long_waits_until_it_is_sure_again(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    await a.transact(put, b"k", b"1")
    b.session.sure_until_s = 0.0
    assert await b.view(get, b"k") == b"1", "what it has missed comes first"
    connection = await cluster.database.connect()
    await connection.script("update aifs.session set lease_end = '-infinity'")
    connection.close()
    await b.transact(put, b"k", b"2")
    await b.shown()
    await caught_up(a)


async def test_who_beats_late_hears_of_what_was_committed_until_the_beat_counts(
    cluster, monkeypatch
):
    a, b = await cluster.join("a"), await cluster.join("b")
    await a.transact(put, b"k", b"1")
    await caught_up(b)
    ask, late = db.Connection.ask, []

    async def lag(connection: Any, statement: Any, parameters: Any) -> Any:
        answer = await ask(connection, statement, parameters)
        if statement is db.BEAT and parameters[0] == db.of_int(b.session.number) and not late:
            late.append(answer)
            await a.transact(put, b"k", b"2")  # whose host waits for nobody whose lease is over
        return answer

    monkeypatch.setattr(db.Connection, "ask", lag)
    b.session.sure_until_s = 0.0
    assert await b.view(get, b"k") == b"2" and late


async def test_a_session_whose_lease_is_over_is_ended_by_another_host(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    await cluster.script("update aifs.session set steady = '-infinity'")
    assert not await a.session.end_silent()
    await cluster.script("update aifs.session set lease_end = '-infinity' where name = 'b'")
    assert await a.session.end_silent()
    with pytest.raises(Unavailable, match="its lease was over"):
        await b.transact(put, b"k", b"")
    cluster.kill("b")


@pytest.mark.parametrize(
    "state",
    [
        "steady = '-infinity', lease_end = '-infinity'",
        # Away for a little less than a lease: that of one host is over, that of the other not yet.
        "steady = '-infinity', lease_end = clock_timestamp() + interval '1 s' * (id - 1.5)",
        # One host has beaten since, the other one not yet.
        "lease_end = clock_timestamp() + interval '20 s' * (id - 1.5)",
    ],
)
async def test_nobodys_session_ends_because_the_database_was_away(cluster, state):
    """The question is from before, and is carried out first when the database is back."""
    a, b = await cluster.join("a"), await cluster.join("b")
    await cluster.script(f"update aifs.session set {state}")
    assert not await b.session.end_silent()
    await b.session.beat()
    assert not await b.session.end_silent(), "it has not had its lease for long enough"
    assert len(await a.session.live()) == 2


async def test_a_host_is_steady_while_its_beats_are_less_than_half_a_lease_apart(cluster):
    a = await cluster.join("a")
    for seconds, keeps in ((4, True), (6, False)):
        ago = f"interval '{seconds} s'"
        await cluster.script(
            f"update aifs.session set steady = steady - {ago}, lease_end = lease_end - {ago}"
        )
        before = await cluster.value("select steady from aifs.session")
        await a.session.beat()
        assert (await cluster.value("select steady from aifs.session") == before) is keeps


async def test_who_is_silent_is_not_asked_twice_nor_while_the_database_recovers(
    cluster, monkeypatch
):
    a, b = await cluster.join("a"), await cluster.join("b")
    silent = (
        "update aifs.session set steady = '-infinity';"
        "update aifs.session set lease_end = '-infinity' where name = 'b';"
    )
    await cluster.script(silent + "create table h as table aifs.head; truncate aifs.head")
    assert not await a.session.end_silent()
    await cluster.script("insert into aifs.head table h; drop table h")
    ask, lost = db.Connection.ask, []

    async def lose(connection: Any, statement: Any, parameters: Any) -> Any:
        if statement is db.END_SILENT:
            lost.append(statement)
            raise AnswerLost("a test has lost it")
        return await ask(connection, statement, parameters)

    with monkeypatch.context() as patch:
        patch.setattr(db.Connection, "ask", lose)
        assert not await a.session.end_silent()
    assert len(lost) == 1 and len(await a.session.live()) == 2
    await b.session.beat()


async def test_a_name_is_taken_over_when_its_host_was_silent_all_through_a_lease(
    cluster, monkeypatch, tmp_path
):
    """After the database was away the lease of a host that lives is over, too."""
    a = await cluster.join("a")
    (tmp_path / "other").mkdir()
    local = LmdbEngine(str(tmp_path / "other"))
    lapse = "update aifs.session set lease_end = '-infinity'"
    sleep, slept = trio.sleep, []

    async def beat_meanwhile(seconds: float) -> None:
        slept.append(seconds)
        await a.session.beat()

    await cluster.script(lapse)
    with monkeypatch.context() as patch:
        patch.setattr(trio, "sleep", beat_meanwhile)
        with pytest.raises(StoreBusy, match="a host named a has the store mounted"):
            await join(local, cluster.database, "a", "b:7947")
    assert slept == [sessions.BEAT_S]
    watched = "sought_since = '-infinity', sought = clock_timestamp()"

    async def look_on(seconds: float) -> None:
        slept.append(seconds)
        earlier = " - interval '6 s'" if len(slept) == 2 else ""
        await cluster.script(f"update aifs.session set {watched}{earlier} where name = 'a'")
        await sleep(0)

    await cluster.script(lapse)
    with monkeypatch.context() as patch:
        patch.setattr(trio, "sleep", look_on)
        other = await join(local, MapDatabase(cluster.conninfo), "a", "b:7947")
    assert len(slept) == 3, "a break begins it anew"
    cluster.kill("a")
    cluster.hosts["a"] = other


async def test_nobody_waits_for_a_host_whose_replica_takes_no_changes(cluster, monkeypatch, caplog):
    a, b = await cluster.join("a"), await cluster.join("b")

    def refuse(writes: Any) -> None:
        raise NoSpace("a test says so")

    async with running(a, b):
        with monkeypatch.context() as patch:
            patch.setattr(b.local, "apply", refuse)
            patch.setattr(replicated, "STOP_S", 1.0)
            await a.transact(put, b"k", b"1")
            with pytest.raises(Unavailable, match="a test says so"):
                await caught_up(b)
            await a.shown()
            while not b.session.ended:
                await trio.testing.wait_all_tasks_blocked(0.01)
    assert [one.name for one in await a.session.live()] == ["a"]
    cluster.kill("b")
    await cluster.join("b")
    caplog.clear()


async def test_it_is_told_until_when_a_host_is_sure(cluster):
    a = await cluster.join("a")
    told: list[float] = []
    a.tell_sure(told.append)
    assert told == [a.session.sure_until_s]
    connection = await cluster.database.connect()
    await connection.script("update aifs.session set lease_end = '-infinity'")
    connection.close()
    await a.transact(put, b"k", b"1")  # refused, until it has renewed its lease
    assert told[1] == 0.0 and told[-1] == a.session.sure_until_s > told[0]
    a.session.sure_until_s = 0.0
    await a.sure()
    assert a.session.sure_until_s == told[-1] > 0.0


async def test_two_hosts_of_one_name_are_refused_but_not_one_that_comes_back(cluster, tmp_path):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    (tmp_path / "other").mkdir()
    local = LmdbEngine(str(tmp_path / "other"))
    with pytest.raises(StoreBusy, match=r"a host named a has the store mounted \(a:7947\)"):
        await join(local, cluster.database, "a", "b:7947")
    local.abandon()
    cluster.kill("a")
    a = await cluster.join("a")
    assert await a.view(get, b"k") == b"1"


async def test_shown_waits_for_the_followers_of_others(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    told: list[tuple[int, dict]] = []
    b.follow(lambda writes: told.append((b.seq, dict(writes))))
    async with running(a, b) as nursery:
        await a.transact(put, b"k", b"1")
        done = trio.Event()

        async def show() -> None:
            await a.shown()
            done.set()

        nursery.start_soon(show)
        await caught_up(b)
        assert [writes for _, writes in told] == [{b"k": b"1"}]
        await trio.sleep(2 * sessions.BEAT_S)
        assert not done.is_set()
        b.note_shown(told[-1][0])
        await done.wait()
        assert a.session.shown == b.session.shown == 1


class Written(Exchange):
    """Keeps what should be pushed."""

    def __init__(self, rows: list[Row]) -> None:
        super().__init__(None)
        self.rows = rows

    def announce(self, row: Row) -> None:
        self.rows.append(row)


async def test_rows_that_are_pushed_out_of_order_are_applied_in_order(cluster):
    rows = []
    a, b = await cluster.join("a", exchange=Written(rows)), await cluster.join("b")
    for number in range(6):
        await a.transact(put, b"k", b"%d" % number)
    b.hear([rows[1], rows[2]])
    assert await b.view(get, b"k") is None
    b.hear([rows[0]])
    assert await b.view(get, b"k") == b"2" and b.session.cursor == 3
    b.hear([rows[1], rows[5]])
    async with running(b):
        while b.session.cursor < 6:
            await trio.testing.wait_all_tasks_blocked(0.01)
    assert await b.view(get, b"k") == b"5"


# --- joining --------------------------------------------------------------------------------------


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
                connection.execute(_END_OTHERS)

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
    "point",
    [replicated.BEFORE_COMMIT, replicated.COMMITTED, replicated.APPLIED, joining.COPYING],
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


# --- faults of the database -----------------------------------------------------------------------


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


_END_OTHERS = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


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
    await primary.script(_END_OTHERS)
    monkeypatch.setattr(db.Connection, "open", watched)
    await a.transact(put, b"k", b"1")
    assert "read-only" in refused[0]
    primary.close()


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
        await killer.value(_END_OTHERS)
    killer.close()
    assert used == ["127.0.0.1", "127.0.0.2", "127.0.0.1"]
    named.close()


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
    with pytest.raises(Unavailable, match="lacks changes that this host has"):
        await a.transact(put, b"other", b"1")
    cluster.kill("a")
    caplog.clear()
    a = await cluster.join("a")
    assert await a.view(get, b"k4") is None


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


async def test_catching_up_ends_where_the_feed_ends(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    await a.catch_up(100)
    assert a.session.cursor == 1


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


# --- delegations ----------------------------------------------------------------------------------


def has(engine: ReplicatedEngine, ino: int) -> bool:
    return keys.delegation(ino) in engine.held.keys


async def in_database(cluster: Cluster, key: bytes) -> bool:
    return key in await cluster.everything()


async def test_names_in_a_directory_of_ones_own_wait_for_no_commit(cluster):
    a, b = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    rows = a.session.cursor
    for number in range(20):
        await create(a, b"%d" % number, 100 + number, parent=10)
        inode = await a.view(namespace.lookup, 10, b"%d" % number)
        assert inode.seq >= inode.ino - 100
    await a.transact(namespace.create, 10, b"sub", new(11, 0o040755))
    await create(a, b"f", 200, parent=11)
    with pytest.raises(Exists):
        await create(a, b"f", 201, parent=11)
    assert a.session.cursor == rows and has(a, 10) and has(a, 11)
    await a.barrier()
    assert a.session.cursor == rows + 1, "all that waited is one commit"
    await caught_up(b)
    assert (await b.view(namespace.lookup, 11, b"f")).ino == 200
    assert await b.view(lambda tx: tx.counter(keys.COUNTER_INODES)) == 23
    assert not cluster.exchange.recalls, "views recall nothing"


async def test_what_is_ahead_is_shipped_soon_and_shown_when_that_is_waited_for(cluster):
    a, b = await two_with_root(cluster)
    b.follow(lambda writes: b.note_shown(b.seq))
    async with running(a, b):
        await create(a, b"f", 10)
        while not await in_database(cluster, keys.inode(10)):
            await trio.testing.wait_all_tasks_blocked(0.001)
        await a.transact(namespace.unlink, ROOT_INO, b"f", 6)
        await a.shown()
        with pytest.raises(NotFound):
            await b.view(namespace.lookup, ROOT_INO, b"f")


async def test_who_changes_names_in_anothers_directory_has_it_given_up(cluster, monkeypatch):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    with pytest.raises(Exists):
        await create(b, b"f", 11)
    assert len(cluster.exchange.recalls) == 1 and not has(a, ROOT_INO)
    for number in range(2 * held.GRANT_AFTER):
        await create(b, b"%d" % number, 20 + number)
    assert not has(b, ROOT_INO), "several hosts have needed it"
    monkeypatch.setattr(held, "clock_s", lambda: sessions.clock_s() + held.REST_S)
    for engine in (a, b):  # who is alone for some time gets it
        engine.session.sure_until_s += 2 * held.REST_S
    for number in range(held.GRANT_AFTER):
        await create(b, b"b%d" % number, 30 + number)
    assert has(b, ROOT_INO)
    await create(a, b"a", 40)
    assert not has(b, ROOT_INO) and len(cluster.exchange.recalls) == 2


async def test_a_directory_is_removed_or_gets_a_name_that_is_ahead_but_not_both(cluster):
    a, b = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await a.barrier()
    await caught_up(b)
    await create(a, b"f", 20, parent=10)
    with pytest.raises(NotEmpty):
        await b.transact(namespace.rmdir, ROOT_INO, b"d", 6)
    await caught_up(a)
    await a.transact(namespace.create, 10, b"sub", new(11, 0o040755))
    await a.transact(namespace.rmdir, 10, b"sub", 6)
    await a.barrier()
    assert not has(a, 11) and not await in_database(cluster, keys.delegation(11))


async def test_attributes_of_a_file_that_is_ahead_are_changed_by_one_host(cluster):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await a.barrier()
    await caught_up(b)

    def set_mode(inode: Inode, mode: int) -> None:
        inode.mode = mode

    rows = a.session.cursor
    await a.transact(forms.change_attributes, 10, set_mode, 0o100600)
    assert a.session.cursor == rows
    changed = await b.transact(forms.change_attributes, 10, lambda inode, _: None, None)
    assert changed.mode == 0o100600


async def test_adds_ahead_count_over_those_of_others(cluster):
    a, b = await two_with_root(cluster)
    told: list[int] = []
    count = keys.COUNTER_INODES
    a.follow(lambda writes: told.append(int.from_bytes(writes.get(count) or b"", "little")))
    await create(a, b"f", 10)
    await b.transact(lambda tx: tx.add(count, 5))
    await create(a, b"g", 11)
    await caught_up(a)
    assert await a.view(lambda tx: tx.counter(count)) == 7 and told[-1] == 7
    await a.transact(lambda tx: tx.add(count, 1))
    await a.barrier()
    await caught_up(b)
    assert await b.view(lambda tx: tx.counter(count)) == 8


async def test_a_host_has_so_many_delegations_and_so_much_ahead(cluster, monkeypatch):
    monkeypatch.setattr(held, "MAX_DELEGATIONS", 4)
    a, _ = await two_with_root(cluster)
    for number in range(10):
        await a.transact(namespace.create, ROOT_INO, b"%d" % number, new(10 + number, 0o040755))
    assert len(a.held.keys) == 4 and has(a, 19)
    await a.barrier()
    found = [key for key in await cluster.everything() if key[:1] == b"D"]
    assert sorted(found) == sorted(a.held.keys)
    monkeypatch.setattr(ahead, "MAX_SETS", 8)
    rows = a.session.cursor
    for number in range(30):
        await create(a, b"%d" % number, 100 + number, parent=19)
    assert a.session.cursor >= rows + 3


@pytest.mark.parametrize(
    "point", [replicated.AHEAD, replicated.BEFORE_COMMIT, replicated.COMMITTED]
)
async def test_a_host_that_dies_with_changes_ahead_ships_them_when_it_is_back(
    cluster, monkeypatch, point
):
    monkeypatch.setattr(held, "REST_S", 0.0)
    a, b = await two_with_root(cluster)
    for number in range(5):
        await create(b, b"%d" % number, 100 + number)
    assert has(b, ROOT_INO)
    with armed(point, crash), pytest.raises(faults.SimulatedCrash):
        await create(b, b"f", 10)
        await b.barrier()
    cluster.kill("b")
    b = await cluster.join("b")
    assert (await b.view(namespace.lookup, ROOT_INO, b"f")).ino == 10
    assert not has(b, ROOT_INO) and not await in_database(cluster, keys.delegation(ROOT_INO))
    await create(a, b"g", 11)
    assert await a.view(lambda tx: tx.counter(keys.COUNTER_INODES)) == 7


async def test_a_replica_that_a_power_cut_sets_back_ships_nothing_twice(cluster, tmp_path):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    copy = shutil.copytree(tmp_path / "a", tmp_path / "copy")
    await create(a, b"g", 11)
    await a.barrier()
    await create(b, b"h", 12)
    cluster.kill("a")
    shutil.rmtree(tmp_path / "a")
    copy.rename(tmp_path / "a")
    a = await cluster.join("a")
    assert await a.view(lambda tx: tx.counter(keys.COUNTER_INODES)) == 3
    await create(a, b"i", 13)
    await a.barrier()
    cluster.kill("a")
    await cluster.join("a")


async def test_a_directory_of_a_host_that_has_died_is_taken_and_what_is_lost_is_told(
    cluster, caplog
):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await a.barrier()
    await create(a, b"lost", 11)
    number = a.session.number
    cluster.kill("a")

    async def end() -> None:
        while not cluster.exchange.recalls:
            await trio.lowlevel.checkpoint()
        assert await end_session(cluster.database, number, "dead")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(end)
        await create(b, b"g", 12)
    a = await cluster.join("a")
    assert "lost" in caplog.text and "of these names: d 1 'lost'" in caplog.text
    caplog.clear()
    with pytest.raises(NotFound):
        await a.view(namespace.lookup, ROOT_INO, b"lost")
    await create(a, b"lost", 13)


async def test_what_changes_something_once_others_have_is_not_lost(cluster):
    """What is ahead is shipped first, by which rows of others are applied."""
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await b.transact(put, b"k", b"1")

    def take(tx: Transaction) -> bytes | None:
        found = tx.get(b"k")
        if found is not None:
            tx.delete(b"k")
        return found

    assert await a.transact(take) == b"1"
    await caught_up(b)
    assert await b.view(get, b"k") is None


async def test_a_directory_that_was_made_and_removed_ahead_loses_nothing(cluster):
    a, _ = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await create(a, b"f", 20, parent=10)
    await a.transact(namespace.unlink, 10, b"f", 6)
    await a.transact(namespace.rmdir, ROOT_INO, b"d", 6)
    await create(a, b"g", 21)
    cluster.kill("a")
    a = await cluster.join("a")
    assert (await a.view(namespace.lookup, ROOT_INO, b"g")).ino == 21


async def test_who_comes_back_leaves_the_delegations_of_others(cluster, monkeypatch):
    """It had given one up before it died, for another one."""
    monkeypatch.setattr(held, "MAX_DELEGATIONS", 2)
    monkeypatch.setattr(held, "REST_S", 0.0)
    a, b = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await a.barrier()
    await a.transact(namespace.create, 10, b"sub", new(11, 0o040755))
    assert not has(a, ROOT_INO) and has(a, 11)
    number = a.session.number
    cluster.kill("a")
    assert await end_session(cluster.database, number, "dead")
    for name in range(5):
        await create(b, b"%d" % name, 20 + name)
    assert has(b, ROOT_INO)
    await cluster.join("a")
    await create(b, b"last", 30)
    await b.barrier()
    assert await in_database(cluster, keys.inode(11))


async def dead_and_taken(cluster: Cluster) -> ReplicatedEngine:
    """A host that had made the file ``lost`` in a directory that another one, which is returned,
    has taken since; and another directory, which is still its own."""
    a, b = await two_with_root(cluster)
    await a.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await a.barrier()
    await a.transact(lambda tx: tx.add(b"n", 1))
    await create(a, b"lost", 11)
    number = a.session.number
    cluster.kill("a")
    assert await end_session(cluster.database, number, "dead")
    await create(b, b"g", 12)
    return b


@pytest.mark.parametrize("point", [replicated.BEFORE_COMMIT, replicated.APPLIED])
async def test_a_replica_that_has_what_is_lost_is_never_gone_on_with(cluster, point):
    await dead_and_taken(cluster)
    with armed(point, crash), pytest.raises(faults.SimulatedCrash):
        await cluster.join("a")
    a = await cluster.join("a")
    with pytest.raises(NotFound):
        await a.view(namespace.lookup, ROOT_INO, b"lost")
    assert await a.view(lambda tx: tx.counter(b"n")) == 1


async def test_who_comes_back_ships_what_it_has_only_added_to(cluster):
    a, b = await two_with_root(cluster)
    await a.barrier()
    await a.transact(lambda tx: tx.add(b"n", 1))
    number = a.session.number
    cluster.kill("a")
    assert await end_session(cluster.database, number, "dead")
    await create(b, b"g", 12)
    a = await cluster.join("a")
    assert await in_database(cluster, b"n"), "under the session that has it"
    with armed(replicated.COMMITTED, crash), pytest.raises(faults.SimulatedCrash):
        await a.transact(put, b"k", b"")
    cluster.kill("a")
    a = await cluster.join("a")
    await a.barrier()
    assert await a.view(lambda tx: tx.counter(b"n")) == 1


async def test_who_comes_back_does_not_conflict_with_what_others_are_granted(cluster, monkeypatch):
    a, b = await two_with_root(cluster)
    await b.transact(namespace.create, ROOT_INO, b"d", new(10, 0o040755))
    await create(b, b"f", 11, parent=10)
    cluster.kill("b")
    ask = db.Link.ask
    made: list[int] = []

    async def late(link: db.Link, statement: db.Statement, *parameters: Any) -> list[db.Fields]:
        if statement is db.COMMIT and db.to_int(parameters[0]) != a.session.number:
            made.append(20 + len(made))
            name = b"%d" % made[-1]
            await a.transact(namespace.create, ROOT_INO, name, new(made[-1], 0o040755))
            await a.barrier()
        return await ask(link, statement, *parameters)

    with monkeypatch.context() as patch:
        patch.setattr(db.Link, "ask", late)
        b = await cluster.join("b")
    assert made == [20] and has(a, 20)
    assert (await b.view(namespace.lookup, 10, b"f")).ino == 11


async def test_nobody_waits_for_the_delegations_of_who_copies_the_map(
    cluster, monkeypatch, tmp_path
):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await a.barrier()
    number = a.session.number
    cluster.kill("a")
    shutil.rmtree(tmp_path / "a")
    assert await end_session(cluster.database, number, "dead")
    copy_pairs = db.Connection.copy_pairs

    async def unhurried(connection: db.Connection, query: str) -> AsyncIterator:
        monkeypatch.setattr(replicated, "LEASE_S", 0.0)  # that is over
        await create(b, b"g", 11)
        async for pair in copy_pairs(connection, query):
            yield pair

    with monkeypatch.context() as patch:
        patch.setattr(db.Connection, "copy_pairs", unhurried)
        await cluster.join("a")


async def test_a_host_that_dies_when_it_has_given_a_directory_up_holds_up_nobody(
    cluster, monkeypatch
):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    give_up = a.give_up

    async def die(delegations: list[bytes]) -> int:
        with armed(replicated.GIVEN_UP, crash), pytest.raises(faults.SimulatedCrash):
            await give_up(delegations)
        cluster.kill("a")
        raise Unavailable("a test has killed it")

    monkeypatch.setattr(a, "give_up", die)
    await create(b, b"g", 11)
    assert (await b.view(namespace.lookup, ROOT_INO, b"f")).ino == 10


async def test_who_is_fenced_tells_what_is_not_in_the_database(cluster, caplog):
    a, _ = await two_with_root(cluster)
    await create(a, b"f", 10)
    assert await end_session(cluster.database, a.session.number, "fenced by a test")
    with pytest.raises(Unavailable, match="fenced by a test"):
        await a.barrier()
    cluster.hosts.pop("a").close()
    assert "not in the database yet are 1 changes, of these names: d 1 'f'" in caplog.text
    caplog.clear()
    a = await cluster.join("a")
    assert (await a.view(namespace.lookup, ROOT_INO, b"f")).ino == 10


async def test_a_recall_that_fails_is_asked_for_again(cluster, monkeypatch):
    monkeypatch.setattr(replicated, "ASK_AGAIN_S", 0.0)
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    give_up = a.give_up
    asked: list[int] = []

    async def refuse(delegations: list[bytes]) -> int:
        asked.append(len(delegations))
        if len(asked) < 3:
            raise Unavailable("a test cuts it off")
        return await give_up(delegations)

    monkeypatch.setattr(a, "give_up", refuse)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(create, b, b"g", 11)
        await b.transact(put, b"other", b"1")  # which waits for nobody
        await trio.lowlevel.checkpoint()
    assert len(asked) == 3


# --- histories ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
async def test_histories_of_three_hosts_are_serializable(cluster, seed):
    """All transactions, in the order of the feed, give the same results one after the other."""
    draw = random.Random(seed)
    engines = [await cluster.join(name) for name in "abc"]
    history: dict[bytes, tuple[list[tuple], list[Any]]] = {}

    async def work(engine: ReplicatedEngine, mark: bytes, chance: random.Random) -> None:
        for step in range(25):
            own = mark + b"%d" % step
            operations = [drawn(chance) for _ in range(chance.randint(1, 4))]
            history[own] = operations, await engine.transact(play, own, operations)
            if chance.random() < 0.3:
                await caught_up(engine)

    async with trio.open_nursery() as nursery:
        for engine in engines:
            for number in range(3):
                mark = b"t%d.%d." % (engine.host, number)
                nursery.start_soon(work, engine, mark, random.Random(draw.random()))
    model = MemoryEngine()
    for row in await feed(cluster.database):
        for key in row.keys:
            if key in history:
                operations, found = history.pop(key)
                assert await model.transact(play, key, operations) == found
    assert not history
    await cluster.check()
    assert await model.view(lambda tx: dict(tx.range(LOW, HIGH))) == await cluster.everything()


@pytest.mark.parametrize("seed", range(4))
async def test_histories_of_hosts_with_delegations_are_serializable(cluster, seed):
    """As above, mostly with what is delegated, while hosts are killed and come back: what they have
    told stays."""
    draw = random.Random(seed)
    engines = {name: await cluster.join(name) for name in "abc"}
    history: dict[bytes, tuple[list[tuple], list[Any] | None]] = {}
    first: dict[bytes, bytes] = {}
    for number, engine in enumerate(engines.values()):
        inode = new(_DIRECTORIES[number], 0o040755)
        first[keys.inode(inode.ino)] = inode.encode()
        await engine.transact(put, keys.inode(inode.ino), inode.encode())
        assert has(engine, inode.ino)
    is_shipping = seed % 2 == 1

    async def work(name: str, mark: bytes, chance: random.Random) -> None:
        own = _DIRECTORIES["abc".index(name)]
        for step in range(15):
            near = own if chance.random() < 0.8 else chance.choice(_DIRECTORIES)
            key = keys.dentry(near, mark + b"%d" % step)
            operations = [
                drawn_name(chance, near if chance.random() < 0.9 else chance.choice(_DIRECTORIES))
                for _ in range(chance.randint(1, 4))
            ]
            history[key] = operations, None
            history[key] = operations, await engines[name].transact(play, key, operations)
            if chance.random() < 0.3:
                await trio.lowlevel.checkpoint()
            elif chance.random() < 0.1:
                await caught_up(engines[name])

    async def live(name: str, chance: random.Random) -> None:
        for life in range(3):
            async with trio.open_nursery() as nursery:
                if is_shipping:
                    nursery.start_soon(engines[name].run)
                async with trio.open_nursery() as working:
                    for number in range(2):
                        mark = b"%s%d.%d." % (name.encode(), life, number)
                        working.start_soon(work, name, mark, random.Random(chance.random()))
                nursery.cancel_scope.cancel()
            if chance.random() < 0.7:
                while engines[name].session.number in cluster.exchange.serving:
                    await trio.lowlevel.checkpoint()
                cluster.kill(name)
                engines[name] = await cluster.join(name)

    with resting_shortly():
        async with trio.open_nursery() as nursery:
            for name in engines:
                nursery.start_soon(live, name, random.Random(draw.random()))
    await cluster.check()
    model = MemoryEngine()
    for key, value in first.items():
        await model.transact(put, key, value)
    for row in await feed(cluster.database):
        for key in row.keys:
            if key in history:
                operations, found = history.pop(key)
                played = await model.transact(play, key, operations)
                assert found in (None, played)
    assert all(found is None for _, found in history.values())
    expected = await model.view(lambda tx: dict(tx.range(LOW, HIGH)))
    held = await cluster.everything()
    assert expected == {key: value for key, value in held.items() if key[:1] != b"D"}


_DIRECTORIES = [100, 101, 102]


@contextmanager
def resting_shortly() -> Iterator[None]:
    """A directory that was needed is delegated again soon."""
    with patch.object(held, "REST_S", 0.0):
        yield


def drawn_name(chance: random.Random, directory: int) -> tuple:
    kind = chance.choice(["get", "put", "delete", "add", "patch", "patch", "range", "loosely"])
    key = keys.dentry(directory, b"%d" % chance.randrange(4))
    if kind in ("patch", "loosely"):
        return kind, keys.inode(directory), b"", MTIME_AT + chance.randint(1, 7)
    if kind == "add":
        return kind, b"c", b"", 2 * chance.randint(1, 4)
    if kind == "range":
        return kind, keys.dentry(directory, b""), keys.dentry(directory, b"\xff"), 0
    return kind, key, b"", chance.randint(1, 9)


async def feed(database: MapDatabase) -> list[Row]:
    """All of it."""
    fetched: list[Row] = []
    while True:
        _, *rows = await database.settles.repeat(
            db.FETCH, db.of_bigint(len(fetched)), db.of_int(1000)
        )
        if not rows:
            return fetched
        fetched += [db.to_row(row) for row in rows]


KEYS = [b"a%d" % number for number in range(6)]


def drawn(chance: random.Random) -> tuple:
    key = chance.choice(KEYS)
    kind = chance.choice(["get", "loosely", "put", "delete", "add", "patch", "range"])
    return kind, key, chance.choice(KEYS), chance.randint(1, 9)


def play(tx: Transaction, mark: bytes, operations: list[tuple]) -> list[Any]:
    """What each operation finds. The ``mark`` tells where the transaction is in the feed."""
    found: list[Any] = []
    tx.put(mark, b"")
    for kind, key, other, number in operations:
        if kind == "get":
            found.append(tx.get(key))
        elif kind == "put":
            tx.put(key, b"%08d" % number)
        elif kind == "delete":
            tx.delete(key)
        elif kind == "add":
            tx.add(b"n" + key, number)
            if number % 2:
                found.append(tx.counter(b"n" + key))
        elif kind == "range":
            found.append(list(tx.range(key, other, number % 3)))
        elif (value := tx.get_loosely(key)) is not None:
            found.append(len(value))
            if kind == "patch":
                tx.patch(key, number if number > 9 else number % 8, b"%d" % (number % 10))
    return found
