"""Background work: what is due runs when it is due, and nothing else does."""

import pytest
import trio
import trio.testing

from aifs.core.errors import Unavailable
from aifs.core.upkeep import NEVER_S, Job, Upkeep, Work


class Steps:
    """Steps that note when they ran, and return ``again_s``."""

    def __init__(self, again_s: float = NEVER_S) -> None:
        self.again_s = again_s
        self.times: list[float] = []
        self.errors: list[Exception] = []
        self.blocked: trio.Event | None = None
        self.running = self.most = 0

    async def step(self) -> float:
        self.times.append(trio.current_time())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.blocked is not None:
                await self.blocked.wait()
        finally:
            self.running -= 1
        if self.errors:
            raise self.errors.pop()
        return self.again_s


async def served(upkeep: Upkeep, jobs: dict[Work, Job], for_s: float) -> None:
    with trio.move_on_after(for_s):
        await upkeep.run(jobs)


async def test_a_step_runs_at_first_and_when_it_says(autojump_clock: object) -> None:
    steps, late = Steps(again_s=3), Steps()
    await served(
        Upkeep(), {Work.COMPACT: Job(steps.step), Work.DOOMED: Job(late.step, first_s=5)}, 10
    )
    assert steps.times == [0, 3, 6, 9]
    assert late.times == [5]


async def test_who_waits_for_a_step_has_one_that_began_later(autojump_clock: object) -> None:
    upkeep, steps = Upkeep(), Steps()
    steps.blocked = trio.Event()
    waited: list[float] = []

    async def ask() -> None:
        await upkeep.have_done(Work.TRASH)  # nobody does it yet
        waited.append(trio.current_time())
        await trio.sleep(1)
        async with trio.open_nursery() as nursery:
            for _ in range(2):
                nursery.start_soon(upkeep.have_done, Work.TRASH)
            await trio.sleep(1)
            steps.errors = [Unavailable("such a step has ended, too")]
            steps.blocked.set()
        waited.append(trio.current_time())

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await trio.sleep(0.5)
        await served(upkeep, {Work.TRASH: Job(steps.step)}, 10)
    assert waited == [0, 2] and steps.times == [0.5, 2]


async def test_whoever_asks_is_heard_whenever_it_is(autojump_clock: object) -> None:
    """Before the work begins, while nothing runs, and while the step runs, which runs again."""
    upkeep, steps = Upkeep(), Steps()
    upkeep.wake(Work.COLLECT)

    async def ask() -> None:
        await trio.sleep(1)
        upkeep.wake(Work.COLLECT)
        upkeep.wake(Work.COLLECT)
        await trio.sleep(1)
        steps.blocked = trio.Event()
        upkeep.at(Work.COLLECT, 4)
        upkeep.at(Work.COLLECT, 3)
        upkeep.at(Work.COLLECT, 5)
        await trio.sleep(2)
        upkeep.wake(Work.COLLECT)
        steps.blocked.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await served(upkeep, {Work.COLLECT: Job(steps.step, first_s=NEVER_S)}, 10)
    assert steps.times == [0, 1, 3, 4]


async def test_no_kind_waits_for_another(autojump_clock: object) -> None:
    hanging, others = Steps(), Steps(again_s=1)
    hanging.blocked = trio.Event()
    jobs = {Work.REBUILD: Job(hanging.step), Work.EVICT: Job(others.step)}
    await served(Upkeep(), jobs, 4.5)
    assert len(hanging.times) == 1 and len(others.times) == 5


async def test_workers_begin_on_demand_up_to_their_number(autojump_clock: object) -> None:
    upkeep, steps = Upkeep(), Steps()
    steps.blocked = trio.Event()

    async def ask() -> None:
        for number in range(5):
            await trio.sleep(1)
            assert steps.running == min(number + 1, 3)
            upkeep.wake(Work.STAGE)
        steps.blocked.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(ask)
        await served(upkeep, {Work.STAGE: Job(steps.step, workers=3)}, 10)
    assert steps.most == 3 and len(steps.times) == 6  # three were asked for while all were busy


async def test_what_fails_is_tried_again_and_said_once(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    failing, others = Steps(), Steps(again_s=1)
    failing.errors = [Unavailable("the disk is gone")] * 3
    jobs = {
        Work.COLLECT: Job(failing.step, retry_s=2),
        Work.EVICT: Job(others.step),
    }
    await served(Upkeep(), jobs, 9.5)
    assert failing.times == [0, 2, 4, 6]
    assert len(others.times) == 10
    assert caplog.messages == [
        "removing deleted files has to wait: the disk is gone",
        "removing deleted files goes on",
    ]


async def test_a_fault_ends_nothing(
    autojump_clock: object, caplog: pytest.LogCaptureFixture
) -> None:
    steps = Steps()
    steps.errors = [ZeroDivisionError()]
    await served(Upkeep(), {Work.SCRUB: Job(steps.step)}, 15)
    assert steps.times == [0, 10]
    assert "the scrub failed" in caplog.text and "ZeroDivisionError" in caplog.text


async def test_idle_work_is_one_task_that_sleeps(autojump_clock: object) -> None:
    upkeep, steps = Upkeep(), Steps()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(upkeep.run, dict.fromkeys(Work, Job(steps.step)))
        await trio.testing.wait_all_tasks_blocked()
        assert len(steps.times) == len(Work)
        (task,) = nursery.child_tasks
        assert [len(inner.child_tasks) for inner in task.child_nurseries] == [0]
        assert trio.lowlevel.current_statistics().seconds_to_next_deadline == NEVER_S
        nursery.cancel_scope.cancel()
