"""Random histories of hosts that share a map in PostgreSQL are serializable."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import trio

from aifs.meta import keys
from aifs.meta.kv import Transaction
from aifs.meta.records import MTIME_AT
from aifs.meta.replicated import database as db
from aifs.meta.replicated import held
from aifs.meta.replicated.database import MapDatabase, Row
from aifs.meta.replicated.engine import ReplicatedEngine
from tests.support.memory_engine import MemoryEngine
from tests.support.replicas import HIGH, LOW, caught_up, has, new, put
from tests.support.replicas import cluster as cluster

pytestmark = pytest.mark.sweep


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
