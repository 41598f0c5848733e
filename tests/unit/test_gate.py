"""The gate: many together or one alone, fair, and whole after a cancellation."""

from collections.abc import Awaitable, Callable

import trio
import trio.testing

from aifs.files.open_inode import Gate


async def begun(
    nursery: trio.Nursery,
    enter: Callable[[], Awaitable[None]],
    events: list[str],
    scope: trio.CancelScope | None = None,
) -> None:
    """A task that enters, and has if it is among the events, waits now or is inside."""

    async def task() -> None:
        with scope or trio.CancelScope():
            await enter()
            events.append(enter.__name__)

    nursery.start_soon(task)
    await trio.testing.wait_all_tasks_blocked()


async def test_many_enter_together() -> None:
    gate = Gate()
    with trio.testing.assert_no_checkpoints():
        await gate.enter_shared()
        await gate.enter_shared()
    gate.leave_shared()
    gate.leave_shared()


async def test_one_alone_waits_for_those_inside_and_keeps_out_the_rest(
    nursery: trio.Nursery,
) -> None:
    gate, events = Gate(), []
    await gate.enter_shared()
    await gate.enter_shared()

    await begun(nursery, gate.enter_alone, events)
    # Behind the one that waits, although others are inside.
    await begun(nursery, gate.enter_shared, events)
    assert events == []
    gate.leave_shared()
    await trio.testing.wait_all_tasks_blocked()
    assert events == []
    gate.leave_shared()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["enter_alone"]
    gate.leave_alone()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["enter_alone", "enter_shared"]


async def test_only_one_is_alone(nursery: trio.Nursery) -> None:
    gate, inside, entered = Gate(), 0, 0

    async def alone() -> None:
        nonlocal inside, entered
        await gate.enter_alone()
        inside += 1
        entered += 1
        assert inside == 1
        await trio.lowlevel.checkpoint()
        inside -= 1
        gate.leave_alone()

    for _ in range(10):
        nursery.start_soon(alone)
    await trio.testing.wait_all_tasks_blocked()
    assert entered == 10


async def test_who_gives_up_lets_the_others_in(nursery: trio.Nursery) -> None:
    gate, events = Gate(), []
    await gate.enter_shared()
    scope = trio.CancelScope()
    await begun(nursery, gate.enter_alone, events, scope)
    await begun(nursery, gate.enter_shared, events)
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["enter_shared"]
    gate.leave_shared()
    gate.leave_shared()
    with trio.testing.assert_no_checkpoints():
        await gate.enter_alone()


async def test_who_gives_up_while_waiting_to_share_leaves_nothing_behind(
    nursery: trio.Nursery,
) -> None:
    gate, scope = Gate(), trio.CancelScope()
    await gate.enter_alone()
    await begun(nursery, gate.enter_shared, [], scope)
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    gate.leave_alone()
    with trio.testing.assert_no_checkpoints():
        await gate.enter_alone()
    assert scope.cancelled_caught
