"""How background work shares the event loop with requests."""

from types import SimpleNamespace

import pytest
import trio
from trio.testing import MockClock, assert_checkpoints, assert_no_checkpoints

from aifs.core import loop_share
from aifs.core.loop_share import LoopShare, background


class Clock:
    """Stands still unless somebody works."""

    now_s = 1000.0

    def work(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    fake = SimpleNamespace(perf_counter=lambda: clock.now_s)
    monkeypatch.setattr(loop_share, "time", fake)
    return clock


async def test_others_have_a_turn_after_a_stretch(clock: Clock) -> None:
    share = LoopShare()
    with assert_no_checkpoints():
        await share.give_way()
    clock.work(1e-4)
    with assert_no_checkpoints():
        await share.give_way()
    clock.work(2e-4)
    with assert_checkpoints():
        await share.give_way()
    clock.work(1e-4)
    with assert_no_checkpoints():
        await share.give_way()


async def test_it_rests_while_requests_keep_coming(clock: Clock, autojump_clock: MockClock) -> None:
    share, begin_s = LoopShare(), trio.current_time()
    clock.work(1e-3)
    share.requested_s = clock.now_s
    await share.give_way()
    assert trio.current_time() - begin_s == pytest.approx(9e-3)
    clock.work(1.0)
    share.requested_s = clock.now_s
    begin_s = trio.current_time()
    await share.give_way()
    assert trio.current_time() - begin_s == pytest.approx(0.05), "but not for long"


async def test_not_where_somebody_waits_for_it_or_nobody_asks(
    clock: Clock, autojump_clock: MockClock
) -> None:
    share, begin_s = LoopShare(), trio.current_time()
    for is_urgent, idle_s in ((True, 0.0), (False, 1.0)):
        clock.work(1e-3)
        share.requested_s = clock.now_s - idle_s
        with assert_checkpoints():
            await share.give_way(is_urgent)
    assert trio.current_time() == begin_s


async def test_what_background_tasks_take_is_measured(clock: Clock) -> None:
    share = LoopShare()

    async def work() -> None:
        for _ in range(3):
            clock.work(1.0)
            await trio.lowlevel.checkpoint()

    async def in_background() -> None:
        with background():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(work)

    with share.measured():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            nursery.start_soon(in_background)
        assert share.background_s == 3.0
        assert share.status() == {"seconds": 3.0, "share": 0.5}
        clock.work(7.0)
        assert share.status() == {"seconds": 3.0, "share": 0.0}
    await work()
    assert share.background_s == 3.0
