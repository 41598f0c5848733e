"""Hosts that share a map in PostgreSQL: what each of their engines sees, and that all see the same.

The contract of ``meta/kv.py`` is tested on this engine, too, in test_kv.py.
"""

from collections.abc import Callable
from typing import Any

import pytest
import trio

from aifs.core.errors import Exists, NotEmpty, NotFound, Unavailable
from aifs.meta import keys, namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated.database import AnswerLost, MapDatabase
from aifs.meta.replicated.sessions import end_session
from tests.support import postgres
from tests.support.replicas import (
    caught_up,
    create,
    delete,
    everything,
    get,
    new,
    put,
    two_with_root,
)
from tests.support.replicas import cluster as cluster


@pytest.mark.sweep
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


@pytest.mark.sweep
async def test_a_conflict_runs_the_function_again_on_what_others_have_done(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")

    def count(tx: Transaction) -> int:
        value = tx.counter(b"n") + 1
        tx.put(b"n", value.to_bytes(8, "little"))
        return value

    found = [await engine.transact(count) for engine in (a, b, a, a, b, b)]
    assert found == [1, 2, 3, 4, 5, 6]


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
async def test_one_name_is_made_once(cluster):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    with pytest.raises(Exists):
        await create(b, b"f", 11)
    assert (await b.view(namespace.lookup, ROOT_INO, b"f")).ino == 10


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
async def test_a_rename_and_an_unlink_of_one_name_count_one_after_the_other(cluster):
    a, b = await two_with_root(cluster)
    await create(a, b"f", 10)
    await caught_up(b)
    moved = ((ROOT_INO, b"f"), (ROOT_INO, b"g"), 0, (30, 31), 6, {10})
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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
