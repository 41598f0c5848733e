"""A store in a database: a format that dies, and what fsck says of hosts and does with them."""

import time
from pathlib import Path

import psycopg
import pytest
import trio

from aifs.check.fsck import check
from aifs.core import faults
from aifs.core.errors import StoreBusy, StoreError
from aifs.data.marker import FORMAT
from aifs.layout.striped import Striped
from aifs.meta import groups, keys
from aifs.meta.askers import Asker
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.meta.records import Garbage
from aifs.meta.replicated import blocking, sessions
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.sessions import Session
from aifs.store import cluster
from aifs.store.store import format_store, open_store
from tests.support.places import Places
from tests.support.points import armed, crash
from tests.support.postgres import TestDatabase


@pytest.fixture
def places(scratch: Path, database: TestDatabase) -> Places:
    return Places(scratch, database)


@pytest.mark.sweep
@pytest.mark.parametrize("many", [False, True], ids=["one host", "many hosts"])
def test_a_format_that_dies_is_made_good_by_force(places: Places, many: bool) -> None:
    config = places.host() if many else places.directory()
    with armed("store.format.made", crash), pytest.raises(faults.SimulatedCrash):
        format_store(config, force=False)
    with pytest.raises(StoreError, match="--force erases it"):
        format_store(config, force=False)
    format_store(config, force=True)
    assert not check(config, repair=False).findings


@pytest.mark.sweep
def test_a_store_of_an_earlier_format_is_refused_before_anything_is_written(
    places: Places, database: TestDatabase
) -> None:
    format_store(places.host(), force=False)
    for marker in (Path(server, ".aifs") for server in places.servers):
        marker.write_text(marker.read_text().replace(FORMAT, "aifs 1"))
    with psycopg.connect(database.conninfo) as connection:
        change = "update aifs.map set value = convert_to(replace(convert_from(value, 'utf8'), %s, "
        change += "'aifs 1'), 'utf8') where key = %s"
        assert connection.execute(change, (FORMAT, keys.SUPERBLOCK)).rowcount == 1

    def rows() -> list[tuple]:
        with psycopg.connect(database.conninfo) as connection:
            found = connection.execute("select key, value from aifs.map order by key").fetchall()
            return found + connection.execute("select id from aifs.session").fetchall()

    before, other = rows(), places.host("other", burst={"directories": []})
    with pytest.raises(StoreError, match="has format 'aifs 1'; this version knows"):
        trio.run(open_store, other)
    assert rows() == before and not Path(other.meta.directory).exists()


@pytest.mark.sweep
def test_hosts_that_fsck_knows(places: Places) -> None:
    many = places.host()
    format_store(many, force=False)

    def leave(tx: Transaction) -> None:
        left = Garbage(0, Striped(4096, (0,)), tx.host).encode()
        tx.put(keys.garbage(1 << 20), left)
        tx.add(keys.COUNTER_IDS, 1 << 21)

    async def administer() -> None:
        """What a command of another host leaves is a host's that the store has."""
        store = await open_store(places.host("admin", burst={"directories": []}))
        await store.engine.transact(leave)
        store.close()

    trio.run(administer)
    assert not check(many, repair=False).findings
    begun = groups.GroupRecord(
        3, groups.GroupOptions(b"g", 2, 0, True, 0, 0, b""), Asker(0, (0,)), 1, host=99
    )

    async def begin() -> None:
        store = await open_store(many)
        await store.engine.transact(lambda tx: tx.put(keys.group(ROOT_INO), begun.encode()))
        store.close()

    trio.run(begin)
    for repair in (False, True):
        (found,) = check(many, repair=repair).findings
        assert (found.kind, found.repaired) == ("unknown-host", repair)
        assert "host 99" in found.detail
    assert not check(many, repair=False).findings


@pytest.mark.sweep
@pytest.mark.parametrize("lives", [False, True])
def test_fsck_ends_the_sessions_of_silent_hosts(
    places: Places, database: TestDatabase, monkeypatch: pytest.MonkeyPatch, lives: bool
) -> None:
    """A host whose lease is over must not come back while the store is checked; one that lives
    has time to say so."""
    many = places.host()
    format_store(many, force=False)

    async def begin() -> int:
        map_database = MapDatabase(database.conninfo)
        session = await Session.begin(map_database, Exchange(None), "silent", "x:1", 0, None)
        map_database.close()
        return session.number

    number = trio.run(begin)

    def let_lease_end_in(seconds: int) -> None:
        with psycopg.connect(database.conninfo) as connection:
            connection.execute(
                "update aifs.session set lease_end = now() + make_interval(secs => %s)"
                " where id = %s",
                (seconds, number),
            )

    sleep, looks = trio.sleep, 0

    async def slept(seconds: float) -> None:
        nonlocal looks
        if seconds == cluster.BEAT_S:
            looks += 1
            if lives and looks == 2:
                let_lease_end_in(10)
        await sleep(seconds)

    let_lease_end_in(-1)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "BEAT_S", 0.125)
        patch.setattr(sessions, "LEASE_S", 1.0)
        patch.setattr(trio, "sleep", slept)
        if lives:
            with pytest.raises(StoreBusy, match="in use by silent"):
                check(many, repair=False)
        else:
            assert not check(many, repair=False).findings
            assert looks > 1, "all through a lease"
    with psycopg.connect(database.conninfo) as connection:
        row = connection.execute("select ended from aifs.session where id = %s", (number,))
        assert row.fetchone() == (None if lives else "its lease was over",)


def test_a_store_whose_hosts_are_silent_because_the_database_was_away_is_not_erased(
    places: Places, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
) -> None:
    many = places.host()
    format_store(many, force=False)

    async def begin() -> None:
        map_database = MapDatabase(database.conninfo)
        await Session.begin(map_database, Exchange(None), "silent", "x:1", 0, None)
        map_database.close()

    trio.run(begin)
    sleep, slept = time.sleep, []

    def let_lease_end_in(seconds: int) -> None:
        with psycopg.connect(database.conninfo) as connection:
            change = "update aifs.session set lease_end = now() + make_interval(secs => %s)"
            connection.execute(change, (seconds,))

    def beat(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 2:
            let_lease_end_in(10)
        sleep(0)

    let_lease_end_in(-1)
    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", beat)
        with pytest.raises(StoreBusy, match="in use by silent"):
            format_store(many, force=True)
    assert len(slept) == 2
    let_lease_end_in(-1)
    with monkeypatch.context() as patch:
        patch.setattr(blocking, "LEASE_S", 0.25)
        format_store(many, force=True)
