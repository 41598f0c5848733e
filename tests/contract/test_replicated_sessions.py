"""Sessions of hosts that share a map in PostgreSQL: leases, beats, takeovers, fencing."""

from typing import Any

import pytest
import trio

from aifs.core.errors import NoSpace, StoreBusy, Unavailable
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated import database as db
from aifs.meta.replicated import engine as replicated
from aifs.meta.replicated import sessions
from aifs.meta.replicated.database import AnswerLost, MapDatabase, Row
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.joining import join
from aifs.meta.replicated.sessions import end_session
from tests.support.replicas import caught_up, get, put, running
from tests.support.replicas import cluster as cluster


@pytest.mark.sweep
async def test_of_sessions_that_have_ended_one_is_kept_for_each_name(cluster):
    hosts = []
    for _ in range(4):
        for name in "ab":
            hosts.append((await cluster.join(name)).host)
            cluster.kill(name)
    assert hosts == [1, 2] * 4
    kept = "select string_agg(id::text, ' ' order by id) from aifs.session"
    assert await cluster.value(kept) == "5 6 7 8"


@pytest.mark.sweep
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


@pytest.mark.sweep
async def test_who_has_lost_its_session_changes_nothing(cluster):
    a = await cluster.join("a")
    await a.transact(put, b"k", b"1")
    told: list[float] = []
    a.tell_sure(told.append)
    assert await end_session(cluster.database, a.session.number, "fenced by a test")
    with pytest.raises(Unavailable, match="fenced by a test"):
        await a.transact(put, b"k", b"2")
    assert told[-1] == 0.0, "the bridge answers nothing, either"
    with pytest.raises(Unavailable, match="fenced by a test"):
        await a.view(get, b"k")
    cluster.kill("a")
    a = await cluster.join("a")
    assert await a.view(get, b"k") == b"1"
    assert (a.host, a.session.number) == (1, 2)


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
async def test_a_session_whose_lease_is_over_is_ended_by_another_host(cluster):
    a, b = await cluster.join("a"), await cluster.join("b")
    await cluster.script("update aifs.session set steady = '-infinity'")
    assert not await a.session.end_silent()
    await cluster.script("update aifs.session set lease_end = '-infinity' where name = 'b'")
    assert await a.session.end_silent()
    with pytest.raises(Unavailable, match="its lease was over"):
        await b.transact(put, b"k", b"")
    cluster.kill("b")


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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
