"""What a host tells of the hosts of its store."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from aifs.meta.keys import ROOT_INO
from aifs.meta.replicated import sessions
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.sessions import Session
from aifs.store.cluster import SessionRight
from tests.support.joined import joined
from tests.support.postgres import TestDatabase
from tests.support.stores import OWNER, ask


@pytest.mark.sweep
async def test_delegations_are_those_of_each_host(scratch: Path, database: TestDatabase):
    async with joined(scratch, database) as hosts:
        for fs, count in zip(hosts, (3, 2), strict=True):
            for number in range(count):
                await fs.mkdir(ROOT_INO, b"%d-%d" % (count, number), 0o755, OWNER)
            await fs.store.engine.shown()
        for fs in hosts:
            told = (await ask(fs, ROOT_INO, "hosts"))["hosts"]
            assert [one["delegations"] for one in told] == [3, 2]
            assert [one["state"] for one in told] == ["live", "live"]


@pytest.mark.sweep
async def test_a_host_counts_what_is_delegated_to_it_and_what_others_take(
    scratch: Path, database: TestDatabase
):
    async with joined(scratch, database) as (one, two):
        inos = [(await one.mkdir(ROOT_INO, b"%d" % n, 0o755, OWNER)).ino for n in range(2)]
        await one.store.engine.shown()
        own = one.store.hosts.own_status
        before = own()
        assert (before["delegations"], before["granted_delegations"]) == (2, 2)
        assert before["recalled_delegations"] == 0 and before["delegation_age_s"] >= 0
        await two.mkdir(inos[0], b"below", 0o755, OWNER)
        assert (own()["delegations"], own()["recalled_delegations"]) == (1, 1)
        await one.rmdir(ROOT_INO, b"1")
        await one.store.engine.shown()
        after = own()
        assert (after["delegations"], after["recalled_delegations"]) == (0, 1), "it went by itself"
        assert (after["granted_delegations"], after["delegation_age_s"]) == (2, 0.0)


@pytest.mark.sweep
async def test_a_host_that_copies_the_map_is_joining(scratch: Path, database: TestDatabase):
    async with joined(scratch, database) as (one, _):
        await one.mkdir(ROOT_INO, b"d", 0o755, OWNER)
        map_database = MapDatabase(database.conninfo)
        session = await Session.begin(map_database, Exchange(None), "guest", "x:1", 0, None)
        told = {host["name"]: host for host in (await ask(one, ROOT_INO, "hosts"))["hosts"]}
        assert told["guest"]["state"] == "joining"
        assert told["guest"]["delegations"] == 0
        assert not told["guest"]["has_role"]
        await session.end("the test is over")
        map_database.close()


@pytest.mark.sweep
async def test_a_host_tells_how_old_its_lease_is_and_how_far_behind_it_is(
    scratch: Path, database: TestDatabase, monkeypatch: pytest.MonkeyPatch
):
    async with joined(scratch, database) as (one, two):
        for fs in (one, two):
            told = (await ask(fs, ROOT_INO, "status"))["cluster"]
            assert (told["lag"], told["unshown"]) == (0, 0)
            assert 0 <= told["lease_age_s"] < sessions.STOP_S
        later_s = sessions.clock_s() + 60
        monkeypatch.setattr(sessions, "clock_s", lambda: later_s)
        assert 50 < one.store.hosts.own_status()["lease_age_s"] <= 61
        monkeypatch.undo()


def test_a_lease_in_doubt_is_in_the_log_once_and_again_when_it_is_sure(
    caplog: pytest.LogCaptureFixture,
) -> None:
    session: Any = SimpleNamespace(is_sure=True, fault="")
    nothing: Any = SimpleNamespace(tell=lambda doubt: None)
    right = SessionRight(session, nothing, nothing, nothing, "postgresql://x/aifs")
    looks = [(True, ""), (False, ""), (False, "refused"), (True, ""), (True, "")]
    counts = []
    for session.is_sure, session.fault in looks:
        right.look()
        counts.append(len(caplog.records))
    assert counts == [0, 1, 1, 2, 2]
    assert all(one.levelno == logging.WARNING for one in caplog.records)
    assert "postgresql://x/aifs does not answer since" in caplog.messages[0]
    assert "without doubt again" in caplog.messages[1]
    caplog.clear()
