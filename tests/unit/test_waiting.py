"""What an activity waits for, and how its seconds are divided among the causes."""

import threading
import time
from collections.abc import Callable
from math import inf

import pytest
import trio

from aifs.core import waiting
from aifs.core.waiting import (
    JOURNAL,
    LOCK,
    MEMORY,
    Activity,
    Request,
    begin,
    doing,
    under_way,
    waits_for,
)
from aifs.vfs.why import tell_if_stuck

REQUEST = Request("fsync", 7)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    now = [1000]
    monkeypatch.setattr(waiting.time, "perf_counter_ns", lambda: now[0])

    def pass_by(ns: int) -> None:
        now[0] += ns

    return pass_by


def activity() -> Activity:
    made = Activity(lambda: REQUEST, (), 1000)
    begin(made)
    return made


async def test_seconds_go_to_the_newest_wait(clock: Callable[[int], None]) -> None:
    asked = activity()
    assert asked.waits == [] and asked.spent_ns() == {}
    clock(1)
    with waits_for(LOCK):
        clock(10)
        with waits_for(JOURNAL, "of all"):
            clock(100)
            assert asked.waits == ["journal of all", "lock"]
            assert asked.spent_ns() == {LOCK: 10, JOURNAL: 100}
            clock(100)
        clock(1000)
    clock(10000)  # its own work
    with waits_for(LOCK):
        clock(20000)
    assert asked.waits == [] and asked.spent_ns() == {LOCK: 21010, JOURNAL: 200}


async def test_waits_of_several_tasks_do_not_count_twice(
    clock: Callable[[int], None], autojump_clock: trio.testing.MockClock
) -> None:
    asked = activity()

    async def wait(cause: str, begin_s: int, end_s: int) -> None:
        await trio.sleep(begin_s)
        with waits_for(cause):
            await trio.sleep(end_s - begin_s)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, "data server 1", 1, 9)
        nursery.start_soon(wait, "data server 2", 3, 5)
        for _ in range(10):
            await trio.sleep(1)
            await trio.testing.wait_all_tasks_blocked()
            clock(1)
    assert sum(asked.spent_ns().values()) <= 10
    assert asked.spent_ns()["data server 1"] > asked.spent_ns()["data server 2"] > 0


async def test_a_cause_that_is_found_out_later(clock: Callable[[int], None]) -> None:
    asked, cause = activity(), ["data server 1"]
    with waits_for(lambda: cause[0]):
        assert asked.waits == ["data server 1"]
        clock(5)
        cause[0] = "data server 2"
    assert asked.spent_ns() == {"data server 2": 5}


async def test_what_is_under_way_is_found_by_its_tasks(clock: Callable[[int], None]) -> None:
    asked = activity()
    ended: list[tuple[Request | None, int]] = []

    async def drain() -> None:
        with doing(lambda one, ns: ended.append((one.about, ns)), "drain", [3, 4]):
            clock(7)
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever)  # it works for the request, too
        nursery.start_soon(drain)
        await trio.testing.wait_all_tasks_blocked()
        found = {one.about: len(tasks) for one, tasks in under_way()}
        assert found == {REQUEST: 2, Request("drain", 3, others=(4,)): 1}
        nursery.cancel_scope.cancel()
    assert ended == [(Request("drain", 3, others=(4,)), 7)]
    asked.args = None
    assert not list(under_way())


async def test_what_goes_on_after_the_end_counts_no_more(clock: Callable[[int], None]) -> None:
    asked = activity()
    with waits_for(MEMORY):
        clock(3)
        asked.args = None
        with waits_for(LOCK):
            clock(5)
    assert LOCK not in asked.spent_ns()


@pytest.mark.sweep
async def test_without_an_activity_nothing_is_noted() -> None:
    async def wait() -> None:
        with waits_for(LOCK):
            await trio.sleep(0)

    await wait()


async def test_a_thread_tells_what_waits_when_the_loop_does_not_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_stuck = threading.Event()
    root = trio.lowlevel.current_root_task()
    assert root is not None

    def alive_s() -> float:
        return -inf if is_stuck.is_set() else time.monotonic()

    threading.Thread(target=tell_if_stuck, args=(root, alive_s, 1000.0), daemon=True).start()
    activity()
    assert not caplog.records
    is_stuck.set()
    while not caplog.records:  # the loop does not run
        time.sleep(0.01)
    is_stuck.clear()
    (record,) = caplog.records
    assert "fsync of inode 7" in record.message and "the daemon itself" in record.message
    caplog.clear()
