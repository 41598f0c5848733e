"""What the read cache owes: one request for many readers, never stale or torn bytes, memory within
the budget.
"""

import random
from collections.abc import Callable

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.budget import Budget
from aifs.core.errors import Unavailable
from aifs.data.reading.read_cache import BLOCK_MAX, ReadCache

UNIT = 64 << 10  # the smallest buffer
FLOOR = BLOCK_MAX


class Source:
    """An object in memory whose server takes its time. Copies at the start and at the end of a
    request, half each."""

    def __init__(
        self,
        nursery: trio.Nursery,
        name: str,
        data: bytes,
        delay: Callable[[], float] = lambda: 1.0,
    ) -> None:
        self.name = name
        self.cause = "data server 0"
        self.block = UNIT
        self.busy = False
        self.data = bytearray(data)
        self.requests: list[int] = []
        self.error: Exception | None = None
        self._nursery = nursery
        self._delay = delay

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        self.requests.append(offset // self.block)
        self._nursery.start_soon(self._serve, tell, buffer, offset)

    async def _serve(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        first = bytes(self.data[offset : offset + len(buffer) // 2])
        await trio.sleep(self._delay())
        if self.error is not None:
            tell(self.error)
            return
        second = bytes(self.data[offset + len(first) : offset + len(buffer)])
        buffer[: len(first) + len(second)] = first + second
        tell(len(first) + len(second))


def content(length: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(length)


def new_cache(blocks: int) -> tuple[ReadCache, Budget]:
    """A cache that has ``blocks`` units besides its floor."""
    budget = Budget(4 * FLOOR)
    cache = ReadCache(budget)
    assert budget.try_reserve(budget.free - blocks * UNIT)
    return cache, budget


async def test_one_request_for_many_readers(autojump_clock, nursery):
    cache, _ = new_cache(8)
    source = Source(nursery, "a", content(3 * UNIT + 100))
    views = []

    async def read(offset: int, length: int) -> None:
        view = await cache.fetch(source, offset, length, len(source.data))
        assert view == source.data[offset : offset + length]
        assert view.readonly
        views.append(view)

    async with trio.open_nursery() as readers:
        for number in range(20):
            readers.start_soon(read, number, UNIT)
            readers.start_soon(read, 2 * UNIT, 2 * UNIT)
    assert len(views) == 40 and trio.current_time() == 1
    assert sorted(source.requests) == [0, 1, 2, 3]
    await read(0, 4 * UNIT)
    assert len(views[-1]) == 3 * UNIT + 100
    assert len(source.requests) == 4
    assert await cache.fetch(source, len(source.data), 10, len(source.data)) == b""
    status = cache.status()
    assert status["misses"] == 4 and status["fetched_bytes"] == len(source.data)
    assert status["hits"] > 0 and status["joined"] > 0


async def test_a_range_in_one_block_is_not_copied(autojump_clock, nursery):
    cache, _ = new_cache(4)
    source = Source(nursery, "a", content(UNIT))
    one = await cache.fetch(source, 10, 100, UNIT)
    other = await cache.fetch(source, 10, 100, UNIT)
    assert one.obj is other.obj


async def test_a_cancelled_waiter_leaves_the_others(autojump_clock, nursery):
    cache, _ = new_cache(4)
    source = Source(nursery, "a", content(UNIT))
    ended = []

    async def read(patience_s: float) -> None:
        with trio.move_on_after(patience_s):
            assert await cache.fetch(source, 0, 9, UNIT) == source.data[:9]
            ended.append(patience_s)

    async with trio.open_nursery() as readers:
        for patience_s in (0.5, 10, 0.2, 20):
            readers.start_soon(read, patience_s)
    assert sorted(ended) == [10, 20]
    assert source.requests == [0]


async def test_a_failure_reaches_all_who_wait_and_is_not_kept(autojump_clock, nursery):
    cache, budget = new_cache(4)
    source = Source(nursery, "a", content(UNIT))
    source.error = Unavailable("it has gone")
    before = budget.used

    async def read() -> None:
        with pytest.raises(Unavailable, match="it has gone"):
            await cache.fetch(source, 0, 9, UNIT)

    async with trio.open_nursery() as readers:
        for _ in range(3):
            readers.start_soon(read)
    assert source.requests == [0]
    source.error = None
    assert await cache.fetch(source, 0, 9, UNIT) == source.data[:9]
    assert budget.used == before + UNIT and cache.status()["cached_bytes"] == UNIT


async def hedged(cache: ReadCache, slow: Source, other: Source) -> list[object]:
    """What three readers of a block get that is asked of another source, too, after half a
    second."""
    results = []

    async def read() -> None:
        try:
            results.append(bytes(await cache.fetch(slow, 0, UNIT, UNIT)))
        except Unavailable as error:
            results.append(str(error))

    async with trio.open_nursery() as readers:
        for _ in range(3):
            readers.start_soon(read)
        await trio.sleep(0.5)
        block = cache.peek(slow.name, 0)
        assert cache.hedge(block, other) and cache.hedge(block, other)
    await cache.settle()
    assert cache.hedge(block, other)  # it is loaded, or has failed
    assert slow.requests == other.requests == [0]
    return results


async def test_a_hedged_block_is_what_comes_first(autojump_clock, nursery):
    for slow_s, other_s, ended_s in [(10, 1, 1.5), (1, 10, 1.0)]:
        cache, budget = new_cache(4)
        before = budget.used
        slow = Source(nursery, "a", content(UNIT), lambda slow_s=slow_s: slow_s)
        other = Source(nursery, "a", content(UNIT), lambda other_s=other_s: other_s)
        begin_s = trio.current_time()
        block = None
        async with trio.open_nursery() as readers:
            readers.start_soon(hedged, cache, slow, other)
            await trio.sleep(0.6)
            block = cache.peek(slow.name, 0)
            assert (
                await block.bytes() == slow.data
                and trio.current_time() - begin_s == pytest.approx(ended_s)
            )
            assert await cache.fetch(slow, 0, UNIT, UNIT) == slow.data
        status = cache.status()
        assert (
            status["hedged_bytes"] == status["cached_bytes"] == UNIT
            and status["fetched_bytes"] == 2 * UNIT
        )
        del block
        cache.invalidate("a")
        budget.try_reserve(budget.total)  # what is free is given back
        assert budget.used == before


async def test_a_hedged_block_fails_where_its_own_source_does_first(autojump_clock, nursery):
    for slow_s, other_s in [(10, 1), (2, 5)]:
        for own_fails, other_fails in [(False, True), (True, False), (True, True)]:
            cache, _ = new_cache(4)
            slow = Source(nursery, "a", content(UNIT), lambda slow_s=slow_s: slow_s)
            other = Source(nursery, "a", content(UNIT), lambda other_s=other_s: other_s)
            slow.error = Unavailable("not there") if own_fails else None
            other.error = Unavailable("nor here") if other_fails else None
            is_told = not own_fails or (other_s < slow_s and not other_fails)
            assert await hedged(cache, slow, other) == [slow.data if is_told else "not there"] * 3
            assert cache.empty != is_told


async def test_no_memory_no_hedge(autojump_clock, nursery):
    cache, _ = new_cache(1)
    source = Source(nursery, "a", content(UNIT))
    async with trio.open_nursery() as readers:
        readers.start_soon(cache.fetch, source, 0, UNIT, UNIT)
        await trio.sleep(0.5)
        assert not cache.hedge(cache.peek(source.name, 0), source)
    assert source.requests == [0] and cache.status()["hedged_bytes"] == 0


async def test_what_is_invalidated_while_it_loads_is_for_earlier_readers_alone(
    autojump_clock, nursery
):
    cache, _ = new_cache(4)
    source = Source(nursery, "a", bytes(UNIT))
    early = []

    async def read_early() -> None:
        early.append(bytes(await cache.fetch(source, 0, UNIT, UNIT)))

    async with trio.open_nursery() as readers:
        readers.start_soon(read_early)
        await trio.sleep(0.5)
        cache.invalidate("a")
        source.data[:] = b"n" * UNIT
        assert await cache.fetch(source, 0, UNIT, UNIT) == source.data
        assert len(early) == 1
    assert await cache.fetch(source, 0, UNIT, UNIT) == source.data
    assert source.requests == [0, 0]


async def test_views_outlive_their_blocks(autojump_clock, nursery):
    cache, budget = new_cache(2)
    source = Source(nursery, "a", content(10 * UNIT))
    first = await cache.fetch(source, 0, UNIT, 10 * UNIT)
    kept = bytes(first)
    for index in range(1, 10):
        await cache.fetch(source, index * UNIT, UNIT, 10 * UNIT)
    assert first == kept
    cache.invalidate("a")
    assert first == kept
    source.data[:] = content(10 * UNIT, 1)
    assert await cache.fetch(source, 0, UNIT, 10 * UNIT) == source.data[:UNIT]
    assert first == kept
    assert budget.peak <= budget.total


async def test_an_object_that_has_grown_is_fetched_again(autojump_clock, nursery):
    cache, _ = new_cache(4)
    source = Source(nursery, "a", content(100))
    assert await cache.fetch(source, 0, 100, 100) == source.data
    source.data += content(200, 1)
    assert await cache.fetch(source, 50, 50, 300) == source.data[50:100]
    assert await cache.fetch(source, 50, 250, 300) == source.data[50:]
    assert source.requests == [0, 0]


async def test_memory_goes_to_those_who_wait_for_it(autojump_clock, nursery):
    cache, budget = new_cache(8)
    source = Source(nursery, "a", content(100 * UNIT))
    view = await cache.fetch(source, 0, UNIT, 100 * UNIT)
    for index in range(1, 8):
        await cache.fetch(source, index * UNIT, 1, 100 * UNIT)
    assert budget.free == 0
    with trio.fail_after(1):
        async with budget.reserve(7 * UNIT):
            assert cache.status()["cached_bytes"] <= UNIT
        async with trio.open_nursery() as others:
            others.start_soon(budget.acquire, 8 * UNIT)
            await trio.testing.wait_all_tasks_blocked()
            assert budget.short
            assert not cache.read_ahead(source, 50, 100 * UNIT)
            del view
    assert budget.used == budget.total and not budget.short


async def test_a_reader_never_waits_for_the_memory_of_others(autojump_clock, nursery):
    cache, budget = new_cache(0)
    source = Source(nursery, "a", content(300 * UNIT))
    async with trio.open_nursery() as others:
        others.start_soon(budget.acquire, UNIT)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(100):
            async with trio.open_nursery() as readers:
                for index in range(0, 300, 3):
                    readers.start_soon(cache.fetch, source, index * UNIT, 3 * UNIT, 300 * UNIT)
        assert len(source.requests) == 300
        assert cache.status()["cached_bytes"] == 0
        budget.release(UNIT)


async def test_reading_ahead_is_found_by_the_reader(autojump_clock, nursery):
    cache, _ = new_cache(8)
    source = Source(nursery, "a", content(8 * UNIT))
    for index in range(3):
        assert cache.read_ahead(source, index, 8 * UNIT)
    await trio.sleep(0.5)
    assert await cache.fetch(source, 0, UNIT, 8 * UNIT) == source.data[:UNIT]
    assert trio.current_time() == 1
    assert await cache.fetch(source, UNIT, UNIT, 8 * UNIT) == source.data[UNIT : 2 * UNIT]
    assert trio.current_time() == 1
    assert source.requests == [0, 1, 2]
    cache.invalidate("a")
    status = cache.status()
    assert status["read_ahead_bytes"] == 3 * UNIT
    assert (status["read_ahead_used_bytes"], status["read_ahead_unused_bytes"]) == (2 * UNIT, UNIT)
    source.busy = True
    assert not cache.read_ahead(source, 5, 8 * UNIT)


async def test_reading_ahead_takes_nothing_that_was_read_ahead(autojump_clock, nursery):
    cache, budget = new_cache(6)
    source = Source(nursery, "a", content(400 * UNIT))
    started = [index for index in range(20) if cache.read_ahead(source, index, 400 * UNIT)]
    await cache.settle()
    assert started == [0, 1, 2, 3, 4, 5]
    # Others read so much that whoever was to read that has probably stopped.
    other = Source(nursery, "b", content(400 * UNIT))
    for index in range(400):
        await cache.fetch(other, index * UNIT, UNIT, 400 * UNIT)
    assert cache.read_ahead(source, 100, 400 * UNIT)
    assert budget.peak <= budget.total


async def test_settle_waits_for_all_loads(autojump_clock, nursery):
    cache, _ = new_cache(8)
    source = Source(nursery, "a", content(8 * UNIT))
    assert cache.read_ahead(source, 0, 8 * UNIT) and cache.read_ahead(source, 1, 8 * UNIT)
    await cache.settle()
    assert trio.current_time() == 1
    await cache.settle()


# --- random use -----------------------------------------------------------------------------------

BLOCKS = 6
steps = st.lists(
    st.tuples(
        st.sampled_from(["read", "read", "read", "write", "ahead", "reserve", "hold"]),
        st.integers(0, BLOCKS * 4 - 1),  # quarter of a block
        st.integers(1, 9),  # quarters
        st.integers(0, 6),  # when
        st.integers(0, 4),  # patience
    ),
    max_size=40,
)


@settings(deadline=None, max_examples=150)
@given(plan=steps, blocks=st.integers(0, 8), seed=st.integers(0, 1000))
def test_like_the_object_itself(plan, blocks, seed):
    """Each byte read is one that was there at some moment of the read: its content counts the
    writes to it."""
    chance = random.Random(seed)
    cache, budget = new_cache(blocks)
    quarter, total = UNIT // 4, BLOCKS * UNIT
    completed = [0] * (BLOCKS * 4)
    begun = [0] * (BLOCKS * 4)
    writers = 0

    async def write(source: Source, place: int, count: int) -> None:
        # As file_io does it: while someone writes, readers do not use the cache.
        nonlocal writers
        writers += 1
        cache.invalidate("a")
        for number in range(place, min(place + count, len(begun))):
            begun[number] += 1
            await trio.sleep(chance.random())
            source.data[number * quarter : (number + 1) * quarter] = (
                bytes([begun[number] % 256]) * quarter
            )
        writers -= 1
        if not writers:
            completed[:] = begun

    async def read(source: Source, place: int, count: int, hold_s: float) -> None:
        if writers:
            return
        oldest = completed[place : place + count]
        # Objects that may change are loaded before the first wait, as cached_reads.py does
        # it.
        first, last = place // 4, (place + len(oldest) - 1) // 4
        blocks = [
            cache.find(source.name, index, UNIT) or cache.start(source, index, total)
            for index in range(first, last + 1)
        ]
        if None in blocks:
            return
        view = memoryview(b"".join([await block.bytes() for block in blocks]))
        view = view[(place - first * 4) * quarter :][: len(oldest) * quarter]
        if first == last:
            view = (await blocks[0].bytes())[(place - first * 4) * quarter :][
                : len(oldest) * quarter
            ]
        del blocks
        seen = bytes(view)
        assert len(seen) == len(oldest) * quarter
        for number, least in enumerate(oldest):
            part = seen[number * quarter : (number + 1) * quarter]
            assert all(least <= value <= begun[place + number] for value in set(part))
        await trio.sleep(hold_s)
        assert view == seen

    async def step(
        source: Source, kind: str, place: int, count: int, when: int, patience: int
    ) -> None:
        await trio.sleep(when + chance.random())
        with trio.move_on_after(patience or 1000):
            if kind == "write":
                with trio.CancelScope(shield=True):
                    await write(source, place, count)
            elif kind == "ahead":
                if not writers:
                    cache.read_ahead(source, place // 4, total)
            elif kind == "reserve":
                if blocks:
                    async with budget.reserve(min(count, blocks) * UNIT):
                        await trio.sleep(chance.random())
            else:
                await read(source, place, count, chance.random() if kind == "hold" else 0)
        assert budget.used <= budget.total

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            source = Source(nursery, "a", bytes(total), chance.random)
            async with trio.open_nursery() as users:
                for arguments in plan:
                    users.start_soon(step, source, *arguments)
            await cache.settle()
            assert not writers and not budget.short
            assert await cache.fetch(source, 0, total, total) == source.data
            cache.invalidate("a")
            assert cache.status()["cached_bytes"] == 0

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    assert budget.peak <= budget.total
    assert budget.try_reserve(blocks * UNIT)
