"""The memory budget: hard, first come first served, and caches give way."""

import gc
import threading
import weakref

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.budget import Budget
from aifs.data.reading.buffers import BudgetedBuffers


async def test_what_fits_does_not_wait():
    budget = Budget(100)
    async with budget.reserve(60):
        assert budget.try_reserve(40)
        assert not budget.try_reserve(1)
        assert budget.used == budget.peak == 100
        budget.release(40)
    assert budget.used == 0
    assert budget.status() == {
        "total_bytes": 100,
        "used_bytes": 0,
        "peak_bytes": 100,
        "waiting": 0,
        "waits": 0,
    }


async def test_more_than_all_is_refused():
    budget = Budget(100)
    assert not budget.try_reserve(101)
    with pytest.raises(ValueError, match="101 bytes at once of a budget of 100"):
        await budget.acquire(101)


async def test_nobody_overtakes():
    budget = Budget(100)
    await budget.acquire(50)
    order = []

    async def want(size: int) -> None:
        await budget.acquire(size)
        order.append(size)

    async with trio.open_nursery() as nursery:
        for size in (80, 10, 20):
            nursery.start_soon(want, size)
            await trio.testing.wait_all_tasks_blocked()
        assert order == [] and budget.short
        assert not budget.try_reserve(1)
        budget.release(50)
        await trio.testing.wait_all_tasks_blocked()
        assert sorted(order) == [10, 80]  # which of the two runs first is trio's choice
        budget.release(80)
    assert order[2:] == [20]
    assert budget.used == 30


async def test_a_cancelled_wait_leaves_no_trace():
    budget = Budget(100)
    await budget.acquire(100)
    got = trio.Event()

    async def want() -> None:
        await budget.acquire(30)
        got.set()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(budget.acquire, 20)
            await trio.testing.wait_all_tasks_blocked()
            scope.cancel()
            await budget.acquire(90)
        nursery.start_soon(want)
        budget.release(50)
        await got.wait()
        assert budget.used == 100
        with trio.CancelScope() as scope:
            budget.release(40)
            scope.cancel()
            await budget.acquire(41)  # granted or cancelled, but never both
        await trio.testing.wait_all_tasks_blocked()
    assert budget.used == 60


async def test_a_wait_that_is_granted_and_cancelled_at_once_gives_back():
    budget = Budget(100)
    await budget.acquire(100)

    async def want(scope: trio.CancelScope) -> None:
        with scope:
            await budget.acquire(10)

    async with trio.open_nursery() as nursery:
        scope = trio.CancelScope()
        nursery.start_soon(want, scope)
        await trio.testing.wait_all_tasks_blocked()
        scope.cancel()
        budget.release(10)
        with trio.move_on_after(0):
            await budget.acquire(50)  # which looks at once who can go on
    assert scope.cancelled_caught
    assert budget.used == 90 and not budget.short


async def test_threads_may_release():
    budget = Budget(100)
    await budget.acquire(100)
    thread = threading.Thread(target=budget.release, args=(100,))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, 70)
        await trio.testing.wait_all_tasks_blocked()
        thread.start()
    thread.join()
    assert budget.used == 70


async def test_caches_give_way():
    budget = Budget(100)
    kept = [10] * 10
    assert budget.try_reserve(100)

    def give_back(size: int) -> None:
        while size > 0 and kept:
            budget.release(kept.pop())
            size -= 10

    budget.add_cache(give_back)
    assert budget.try_reserve(25)
    assert len(kept) == 7
    await budget.acquire(70)
    assert not kept and budget.used == 95
    assert not budget.try_reserve(6)


async def test_a_buffer_counts_until_its_last_view_has_gone():
    budget = Budget(4096 * 2)
    buffers = BudgetedBuffers(budget)
    view = buffers.try_take(4096)
    view[:5] = b"bytes"
    part = view[:5].toreadonly()
    del view
    other = buffers.try_take(4096)
    assert other is not None and buffers.try_take(4096) is None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(budget.acquire, 4096)
        await trio.testing.wait_all_tasks_blocked()
        assert budget.short and part == b"bytes" and buffers.free_bytes == 0
        del part
    assert budget.used == 8192
    del other
    assert buffers.free_bytes == 4096
    assert buffers.try_take(4096) is not None  # used again
    assert budget.peak == 8192


# As of ``use`` below.
uses = st.tuples(st.integers(0, 20), st.integers(1, 100), st.integers(0, 20), st.booleans())


@pytest.mark.sweep
@given(st.lists(uses, max_size=30))
def test_never_more_than_the_total(plan):
    budget = Budget(100)
    held = 0
    order: list[int] = []
    cached: list[int] = []

    def give_back(size: int) -> None:
        while cached and size > 0:
            size -= cached[-1]
            budget.release(cached.pop())

    budget.add_cache(give_back)

    async def use(number: int, start: int, size: int, seconds: int, cancel: bool) -> None:
        nonlocal held
        await trio.sleep(start)
        with trio.move_on_after(3 if cancel else 10**6):
            async with budget.reserve(size):
                held += size
                order.append(number)
                try:
                    assert held + sum(cached) <= budget.used <= 100
                    await trio.sleep(seconds)
                finally:
                    held -= size
                return
        if size in (1, 2, 3) and budget.try_reserve(size):
            cached.append(size)

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number, step in enumerate(plan):
                nursery.start_soon(use, number, *step)

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert budget.used == sum(cached) and not budget.short
    assert {number for number, step in enumerate(plan) if not step[3]} <= set(order)


async def test_what_nobody_uses_goes_back_in_time(autojump_clock):
    budget = Budget(1 << 20)
    buffers = BudgetedBuffers(budget)
    held = buffers.try_take(64 << 10)
    for view in [buffers.try_take(64 << 10) for _ in range(15)]:
        view.release()
    del view
    assert budget.used == 1 << 20
    used = []
    for _ in range(20):
        await budget.relax()
        used.append(budget.used)
    assert used == sorted(used, reverse=True) and used[0] >= 512 << 10
    assert budget.used == len(held)


def test_a_cache_of_views_is_collected_with_what_lent_them() -> None:
    """Also where nobody has emptied it, as after a crash."""
    budget = Budget(1 << 20)
    buffers = BudgetedBuffers(budget)
    views = [buffers.try_take(4096)]
    budget.add_cache(lambda size, views=views: views.clear())
    lender = weakref.ref(buffers)
    del budget, buffers, views
    gc.collect()
    assert lender() is None
