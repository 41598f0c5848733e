"""Giving up calls: who is told what, when; what is kept until a call ends; what a server that hangs
is asked for.
"""

import math
import threading
import time
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from aifs.data import patience
from aifs.data.health import Health
from aifs.data.patience import Call, Hanging, Patience
from aifs.data.workers import Completions, Workers, gather, outcomes

LIMIT_S = 0.05
WAIT_S = 60


class OnceBegun(Patience):
    """A call that no thread has come to yet is not due, however slow the machine is."""

    def due_s(self, call: Call, answered_s: float) -> float:
        if call.has_begun:
            return super().due_s(call, answered_s)
        return time.monotonic() + LIMIT_S


class Server:
    """Of ``threads`` threads; ``ask`` waits until ``go``."""

    def __init__(self, threads: int, limit_s: float = LIMIT_S) -> None:
        self.workers = Workers("test", threads, Completions(), limit_s)
        self.workers.patience = OnceBegun(limit_s)
        self.workers.patience.health = self.health = Health("server 7 (/seven)")
        self.go = threading.Event()
        self.asked: list[object] = []

    def ask(self, what: object) -> object:
        with self.workers.patience.asking("ask", f"/seven/{what}"):
            self.asked.append(what)
            assert self.go.wait(WAIT_S)
        return what

    def answer(self, what: object) -> object:
        with self.workers.patience.asking("answer", f"/seven/{what}"):
            self.asked.append(what)
        return what

    async def answers(self) -> None:
        """From now on, and in time."""
        self.go.set()
        await until(lambda: not self.workers.patience.hangs)
        self.workers.patience = Patience(WAIT_S)

    def call(self, function, what: object):
        return self.workers, function, (what,)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(2)
    yield server
    server.go.set()
    server.workers.close()


async def until(condition) -> None:
    with trio.fail_after(WAIT_S):
        while not condition():
            await trio.sleep(0.002)


async def test_a_call_is_given_up_and_others_count(server):
    other = Server(1, WAIT_S)
    with patience.giving_up():
        first, second = await outcomes([server.call(server.ask, 1), other.call(other.answer, 2)])
    assert isinstance(first, Hanging)
    assert (
        str(first)
        == "server 7 (/seven): ask /seven/1 has not ended within 0.05 s"
        == server.health.last_error
    )
    assert second == 2
    assert server.workers.patience.hangs
    assert not other.workers.patience.hangs
    assert not server.health.usable
    assert other.health.usable
    server.go.set()
    await until(lambda: not server.workers.patience.hangs)
    assert server.health.state == "ok"
    assert server.health.usable
    other.workers.close()


async def test_nothing_is_asked_in_the_background_of_a_server_that_hangs(server):
    with patience.giving_up():
        with pytest.raises(Hanging):
            await gather([server.call(server.ask, 1)])
        ended = []
        with pytest.raises(Hanging, match="ask /seven/1 has not ended"):
            await gather([server.call(server.answer, 2)], lambda: ended.append(1))
        assert server.asked == [1]
        assert ended == [1]
        await server.answers()
        assert await gather([server.call(server.answer, 3)]) == [3]


async def test_who_asks_in_person_waits(server):
    with patience.giving_up(), pytest.raises(Hanging):
        await gather([server.call(server.ask, 1)])
    assert await gather([server.call(server.answer, 2)]) == [2]  # a thread is left for it
    done = trio.Event()

    async def change() -> None:
        await patience.until_answered([server.workers])
        await gather([server.call(server.answer, 3)])
        done.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(change)
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        server.go.set()
        with trio.fail_after(WAIT_S):
            await done.wait()
    assert server.asked == [1, 2, 3]


async def test_who_waits_for_several_waits_until_none_of_them_hangs(server):
    other, done = Server(2), trio.Event()

    async def wait() -> None:
        await patience.until_answered([server.workers, other.workers])
        done.set()

    with patience.giving_up(), pytest.raises(Hanging):
        await gather([other.call(other.ask, 1)])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        with (
            patience.giving_up(),
            pytest.raises(Hanging),
        ):
            # The one that has been looked at already.
            await gather([server.call(server.ask, 1)])
        await other.answers()
        await trio.testing.wait_all_tasks_blocked()
        assert not done.is_set()
        await server.answers()
        with trio.fail_after(WAIT_S):
            await done.wait()
    other.workers.close()


async def test_a_server_that_hangs_is_failing_whatever_else_works(server):
    with patience.giving_up(), pytest.raises(Hanging):
        await gather([server.call(server.ask, 1)])
    server.health.succeeded("ask")  # of another object
    assert server.health.state == "failing"
    await server.answers()
    assert server.health.state == "ok"


async def test_all_threads_may_be_stuck(server):
    with patience.giving_up():
        answers = await outcomes([server.call(server.ask, number) for number in range(5)])
        assert all(isinstance(answer, Hanging) for answer in answers)
    assert sorted(server.asked) == [0, 1]
    with trio.fail_after(WAIT_S):
        assert await gather([server.call(server.answer, "late")]) == ["late"]
    server.go.set()
    await until(lambda: not server.workers.patience.hangs)
    assert sorted(map(str, server.asked)) == ["0", "1", "late"]  # what had not begun is never done


async def test_what_a_call_uses_is_kept_until_it_ends(server):
    ended = []
    with patience.giving_up(), pytest.raises(Hanging):
        await gather([server.call(server.ask, 1)], lambda: ended.append(True))
    assert not ended
    server.go.set()
    await until(lambda: ended)


def test_when_a_call_is_due(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    its = Patience(30)
    call = Call(its, lambda: None, ())
    assert its.due_s(call, 0.0) == 1030
    # It waits for a thread, and the server does something meanwhile.
    assert its.due_s(call, 1020.0) == 1050
    assert its.begin(call)
    now = 1100.0
    assert its.due_s(call, 0.0) == 1130  # it computes
    patience.here.call = call
    its.enter("write", "/seven/1")
    now = 1120.0
    assert its.due_s(call, 1119.0) == 1130
    its.leave()
    assert its.due_s(call, 0.0) == 1150
    patience.here.call = None


async def test_errors_and_cancellation(server):
    def fail(_) -> None:
        raise KeyError("as it was raised")

    ended = []
    server.workers.patience = Patience(WAIT_S)
    with patience.giving_up():
        with pytest.raises(KeyError, match="as it was"):
            await gather([server.call(fail, 0)])
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                lambda: gather([server.call(server.ask, 1)], lambda: ended.append(1), True)
            )
            await until(lambda: server.asked)
            nursery.cancel_scope.cancel()
        assert not ended
        assert not server.workers.patience.hangs
        with trio.CancelScope() as scope:
            scope.cancel()
            assert await gather([server.call(server.answer, 2)]) == [2]  # not abandonable
    server.go.set()
    await until(lambda: ended)


async def test_without_a_limit_everybody_waits():
    patient = Server(1, math.inf)
    done = []

    async def ask() -> None:
        with patience.giving_up():
            done.extend(await gather([patient.call(patient.ask, 1)]))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await until(lambda: patient.asked)
        patient.go.set()
    assert done == [1]
    patient.workers.close()


def test_a_slow_server_is_given_more_time(monkeypatch):
    now = 1000.0
    monkeypatch.setattr(patience.time, "monotonic", lambda: now)
    its = Patience(30)
    limits = []
    for _ in range(6):
        call = Call(its, lambda: None, ())
        assert its.begin(call)
        assert its.give_up(call)
        its.end(call)
        limits.append(its.limit_s)
    assert limits == [60, 120, 240, 480, 480, 480]
    now += 4000
    assert its.limit_s == 30
    call = Call(its, lambda: None, ())
    assert its.begin(call)
    its.end(call)
    assert not its.give_up(call)
    assert not its.hangs
