"""Delegations: a host changes a directory ahead of the database, until another host needs it."""

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import Exists, NotEmpty, NotFound, Unavailable
from aifs.meta import forms, keys, namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.meta.records import Inode
from aifs.meta.replicated import ahead, held, sessions
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.sessions import end_session
from tests.support.points import armed, crash
from tests.support.replicas import (
    Cluster,
    caught_up,
    create,
    get,
    has,
    new,
    put,
    running,
    two_with_root,
)
from tests.support.replicas import cluster as cluster


async def in_database(cluster: Cluster, key: bytes) -> bool:
    return key in await cluster.everything()


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
@pytest.mark.parametrize("point", [replicated.BEFORE_COMMIT, replicated.APPLIED])
async def test_a_replica_that_has_what_is_lost_is_never_gone_on_with(cluster, point):
    await dead_and_taken(cluster)
    with armed(point, crash), pytest.raises(faults.SimulatedCrash):
        await cluster.join("a")
    a = await cluster.join("a")
    with pytest.raises(NotFound):
        await a.view(namespace.lookup, ROOT_INO, b"lost")
    assert await a.view(lambda tx: tx.counter(b"n")) == 1


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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
