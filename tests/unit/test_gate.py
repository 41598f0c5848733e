"""The gate: many together or one alone, fair, and whole after a cancellation."""

import trio
import trio.testing

from aifs.files.gate import Gate


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

    async def alone() -> None:
        await gate.enter_alone()
        events.append("alone")

    async def shared() -> None:
        await gate.enter_shared()
        events.append("shared")

    nursery.start_soon(alone)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(shared)  # behind the one that waits, although others are inside
    await trio.testing.wait_all_tasks_blocked()
    assert events == []
    gate.leave_shared()
    await trio.testing.wait_all_tasks_blocked()
    assert events == []
    gate.leave_shared()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["alone"]
    gate.leave_alone()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["alone", "shared"]


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

    async def alone() -> None:
        with scope:
            await gate.enter_alone()
            events.append("alone")

    async def shared() -> None:
        await gate.enter_shared()
        events.append("shared")

    nursery.start_soon(alone)
    await trio.testing.wait_all_tasks_blocked()
    nursery.start_soon(shared)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    assert events == ["shared"]
    gate.leave_shared()
    gate.leave_shared()
    with trio.testing.assert_no_checkpoints():
        await gate.enter_alone()


async def test_who_gives_up_while_waiting_to_share_leaves_nothing_behind(
    nursery: trio.Nursery,
) -> None:
    gate, scope = Gate(), trio.CancelScope()
    await gate.enter_alone()

    async def shared() -> None:
        with scope:
            await gate.enter_shared()

    nursery.start_soon(shared)
    await trio.testing.wait_all_tasks_blocked()
    scope.cancel()
    await trio.testing.wait_all_tasks_blocked()
    gate.leave_alone()
    with trio.testing.assert_no_checkpoints():
        await gate.enter_alone()
    assert scope.cancelled_caught
