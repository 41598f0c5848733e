"""Engines of several hosts, with a database and connections between them: what one commits the
others have, and have shown."""

import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.core.errors import NotFound, Unavailable
from aifs.core.secret import read_secret
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated import sessions
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.engine import ReplicatedEngine
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.joining import join
from aifs.peers.peers import Peers
from aifs.store.hosts import Hosts
from tests.support.meddler import Meddler
from tests.support.postgres import Postgres, TestDatabase

pytestmark = pytest.mark.sweep

PATIENT_S = 60.0


class Host:
    """An engine, and what it knows of others."""

    def __init__(self, engine: ReplicatedEngine, hosts: Hosts) -> None:
        self.engine = engine
        self.hosts = hosts
        self.told: list[dict[bytes, Any]] = []
        self.shows = True
        """Whether its kernel forgets what others change, at once."""
        engine.follow(self._follow)

    def _follow(self, writes: Any) -> None:
        self.told.append(dict(writes))
        if self.shows:
            self.engine.note_shown(self.engine.seq)

    async def put(self, key: bytes, value: bytes) -> None:
        await self.engine.transact(lambda tx: tx.put(key, value))

    async def get(self, key: bytes) -> bytes | None:
        return await self.engine.view(lambda tx: tx.get(key))


@asynccontextmanager
async def host(
    name: str, place: Path, database: TestDatabase, relay: Meddler | None = None
) -> AsyncIterator[Host]:
    """A host that has joined. With ``relay`` others reach it by that."""
    peers = Peers("store", name, b"secret", ("127.0.0.1", 0))
    address = f"127.0.0.1:{peers.port}"
    exchange = Exchange(peers)
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        if relay is not None:
            relay.target = peers.port
            await nursery.start(relay.run)
            address = relay.address
        (place / name).mkdir(exist_ok=True)
        url = MapDatabase(database.url, read_secret(database.secret_file))
        local = LmdbEngine(str(place / name))
        engine = await join(local, url, name, address, exchange)
        hosts = Hosts(engine.session, engine.held, url, peers, exchange)
        made = Host(engine, hosts)
        await hosts.look()
        nursery.start_soon(engine.run)
        nursery.start_soon(hosts.run)
        try:
            yield made
        finally:
            nursery.cancel_scope.cancel()
            await stack.aclose()
            engine.close()


@pytest.fixture
async def database(a_postgres: Postgres) -> AsyncIterator[TestDatabase]:
    with a_postgres.new_database() as made:
        made.make_store()
        yield made


@asynccontextmanager
async def connected(
    place: Path, database: TestDatabase, count: int = 2, relay: Meddler | None = None
) -> AsyncIterator[list[Host]]:
    async with AsyncExitStack() as stack:
        hosts = [
            await stack.enter_async_context(
                host("abcd"[number], place, database, relay if number == 0 else None)
            )
            for number in range(count)
        ]
        await until(lambda: all(len(one.hosts.peers.connected) == count - 1 for one in hosts))
        yield hosts


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(PATIENT_S):
        while not condition():
            await trio.sleep(0.005)


async def test_what_one_commits_others_have_and_have_shown(
    scratch: Path, database: TestDatabase
) -> None:
    async with connected(scratch, database, 3) as hosts:
        for number, one in enumerate(hosts * 5):
            await one.put(b"k%d" % number, b"v")
            await one.engine.shown()
            assert {await other.get(b"k%d" % number) for other in hosts} == {b"v"}
        assert all(len(one.told) == 10 for one in hosts)


async def test_shown_waits_for_who_has_not_shown(scratch: Path, database: TestDatabase) -> None:
    async with connected(scratch, database) as (a, b):
        b.shows = False
        await a.put(b"k", b"v")
        done = trio.Event()

        async def wait() -> None:
            await a.engine.shown()
            done.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await until(lambda: b.told)
            await trio.sleep(0.3)
            assert not done.is_set()
            b.engine.note_shown(b.engine.seq)
            await done.wait()


async def test_it_is_right_when_all_that_is_pushed_is_lost(
    scratch: Path, database: TestDatabase
) -> None:
    relay = Meddler(0, lambda frame: [])
    async with host("a", scratch, database, relay) as a, host("b", scratch, database) as b:
        for number in range(3):
            await a.put(b"k%d" % number, b"v")
            await a.engine.shown()
            assert await b.get(b"k%d" % number) == b"v"
            await b.put(b"k%d" % number, b"w")
            await b.engine.shown()
            assert await a.get(b"k%d" % number) == b"w"


async def test_it_is_shown_in_two_milliseconds(
    scratch: Path, database: TestDatabase, record_property: Callable[[str, object], None]
) -> None:
    """What it takes is recorded, not asserted."""
    async with connected(scratch, database) as (a, b):
        times = []
        for number in range(200):
            begin = trio.current_time()
            await a.put(b"k%d" % number, b"v")
            await a.engine.shown()
            times.append(trio.current_time() - begin)
            assert await b.get(b"k%d" % number) == b"v"
        record_property("p50_ms", round(statistics.median(times) * 1000, 2))


async def test_who_has_not_beaten_for_its_lease_is_ended(
    scratch: Path, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "LEASE_S", 2.0)
    async with connected(scratch, database) as (a, b):

        async def silent(*_: Any) -> None:
            await trio.sleep_forever()

        monkeypatch.setattr(b.engine.session, "beat", silent)
        await a.put(b"k", b"v")
        await until(lambda: a.hosts.live() == {a.hosts.session})
        await a.engine.shown()
    assert not a.told


async def test_the_role_moves_when_its_holder_ends(scratch: Path, database: TestDatabase) -> None:
    async with host("b", scratch, database) as b:
        async with host("a", scratch, database) as a:
            assert b.hosts.role.held and not a.hosts.role.held
            with pytest.raises(NotFound, match="host c does not have the store mounted"):
                await a.hosts.fence("c", "a test")
            await a.hosts.fence("b", "a test")
            assert a.hosts.role.held
            await until(lambda: b.engine.session.ended)
            with pytest.raises(Unavailable, match="a test"):
                await b.put(b"k", b"v")
