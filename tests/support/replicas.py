"""Hosts that share a map in PostgreSQL, all in this process."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.meta import keys, namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.records import Inode
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.joining import join

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


END_OTHERS = (
    "select pg_terminate_backend(pid) from pg_stat_activity"
    " where datname = current_database() and pid <> pg_backend_pid()"
)


def has(engine: ReplicatedEngine, ino: int) -> bool:
    return keys.delegation(ino) in engine.held.keys
