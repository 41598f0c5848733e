"""Admission, throttling and the choice of victims: whatever happens, by the tier's own
accounting.
"""

import logging
from collections import Counter
from functools import partial
from types import SimpleNamespace

import pytest
import trio
import trio.testing
from hypothesis import example, given
from hypothesis import strategies as st

from aifs.burst import tier as tier_module
from aifs.burst.ledger import Ledger
from aifs.burst.tier import BurstTier
from aifs.cli.status import refusal_of
from aifs.core.config import load
from aifs.core.upkeep import NEVER_S, Job, Upkeep, Work
from aifs.data.health import Health
from aifs.data.reading.blocks import NoBlocks
from aifs.data.storage import Space
from aifs.layout.placement import ACTIVE, BURST_FIRST
from aifs.meta.records import Copy
from tests.support.memory_engine import MemoryEngine

MIB = 1 << 20
GIB = 1 << 30


class FakeServer:
    """A device of which only the space is ever asked for."""

    def __init__(self, number: int, size: int, used: int = 0) -> None:
        self.id, self.number, self.address = BURST_FIRST + number, number, f"/burst/{number}"
        self.name = f"burst directory {number}"
        self.health = Health(self.name)
        self.standing, self.absent = ACTIVE, ""
        self.size, self.used = size, used

    state = property(lambda self: self.health.state)
    last_error = property(lambda self: self.health.last_error)

    def space(self) -> Space:
        free = max(0, self.size - self.used)
        return Space(self.size, free, free, 0, 0)


class FakeServers:
    def __init__(self, *devices: FakeServer) -> None:
        self.devices, self.buffers, self.blocks = devices, None, NoBlocks()

    def burst(self) -> tuple[FakeServer, ...]:
        return self.devices

    async def spaces(self, servers) -> list[Space]:
        return [server.space() for server in servers]


async def no_id() -> int:
    raise AssertionError


def make_tier(*devices: FakeServer, upkeep: Upkeep | None = None, **options: object) -> BurstTier:
    overrides = {f"burst.{key}": str(value) for key, value in ({"reserve": 0} | options).items()}
    return BurstTier(
        load("/nowhere", overrides),
        FakeServers(*devices),
        MemoryEngine(),
        no_id,
        upkeep or Upkeep(),
    )


def make_one(
    size: int = 10 * GIB, used: int = 0, **options: object
) -> tuple[FakeServer, BurstTier]:
    """A device, and the tier that has it alone."""
    server = FakeServer(0, size, used)
    return server, make_tier(server, **options)


def a_copy(server: FakeServer, copy_id: int) -> SimpleNamespace:
    return SimpleNamespace(id=copy_id, server=server.id)


def promise(tier: BurstTier, server: FakeServer, copy_id: int, expected: int) -> None:
    """What ``create`` does besides making the file."""
    tier.devices[server.id].promise(copy_id, expected)


# --- admission ------------------------------------------------------------------------------------


def test_policy_and_room_decide():
    server, tier = make_one()
    assert tier.admit("capacity") is None
    for policy in ("", "burst", "pinned"):
        assert tier.admit(policy) is server
    assert tier.admit("", 9 * GIB) is server
    assert tier.admit("", 11 * GIB) is None


def test_without_devices_all_goes_to_the_data_servers():
    tier = make_tier()
    assert not tier.has_devices
    assert tier.admit("burst") is None
    assert tier.pressure == 0
    assert tier.needs_eviction() == {}


def test_above_the_high_mark_nothing_is_admitted():
    server, tier = make_one(used=int(7.9 * GIB))
    assert tier.admit("") is server
    tier.dirty(1, server.id, GIB // 5)
    assert tier.admit("") is None
    assert tier.status()["devices"][0]["refuses"] == "it is above the high-water mark, 80%"


def test_the_reserve_is_at_most_a_twentieth():
    server, tier = make_one(GIB, reserve="1GiB", high_water=1)
    assert tier.admit("", 970 * MIB) is server
    assert tier.admit("", 980 * MIB) is None


def test_a_device_that_fails_is_left_out():
    first, second = FakeServer(0, 10 * GIB), FakeServer(1, 5 * GIB)
    tier = make_tier(first, second)
    first.health.failed("write", OSError(5, "broken"), "/x")
    assert [tier.admit("") for _ in range(3)] == [second] * 3
    (told, other) = tier.status()["devices"]
    assert told["refuses"] == "it fails" and "broken" in told["last_error"]
    assert refusal_of(told) == f"it fails: {told['last_error']}"
    assert refusal_of(other) == other["last_error"] == ""


def test_equal_devices_take_turns_and_the_emptier_takes_more():
    equal = [FakeServer(number, 10 * GIB) for number in range(4)]
    tier = make_tier(*equal)
    assert sorted(tier.admit("").number for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    large, small = FakeServer(0, 40 * GIB), FakeServer(1, 10 * GIB)
    tier = make_tier(large, small)
    chosen = [tier.admit("").number for _ in range(10)]
    assert (chosen.count(0), chosen.count(1)) == (8, 2)


@pytest.mark.sweep
@given(
    st.integers(1, 3),
    st.sampled_from([0, 64, 200]),
    st.sampled_from([0.5, 0.8, 1.0]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 60)), max_size=60),
)
def test_expected_sizes_never_exceed_what_may_be_used(count, capacity, high, events):
    servers = {number: FakeServer(number, 100 * MIB) for number in range(count)}
    tier = make_tier(
        *servers.values(), capacity=f"{capacity}MiB", high_water=high, low_water=0.1, reserve="4MiB"
    )
    room = min(96 * MIB, capacity * MIB // count or 96 * MIB)
    held: dict[int, tuple[int, int]] = {}
    for copy_id, (what, amount) in enumerate(events):
        if what < 3:
            expected = amount * MIB
            server = tier.admit("", expected)
            if server is not None:
                held[copy_id] = (server.id, expected)
                promise(tier, server, copy_id, expected)
                tier.opened(a_copy(server, copy_id))
                tier.dirty(copy_id, server.id, expected if what == 0 else expected // 2)
        elif held:
            gone = sorted(held)[amount % len(held)]
            del held[gone]
            tier.gone(gone)
        for number, server in servers.items():
            used = sum(length for where, length in held.values() if where == server.id)
            assert used <= room, number


def test_room_that_was_promised_is_free_again_when_the_file_is_closed():
    server, tier = make_one()
    tier.admit("", 6 * GIB)
    promise(tier, server, 1, 6 * GIB)
    tier.opened(a_copy(server, 1))
    tier.dirty(1, server.id, GIB)
    assert tier.admit("", 5 * GIB) is None
    tier.closed(a_copy(server, 1))
    assert tier.admit("", 5 * GIB) is server


async def test_a_device_that_becomes_full_is_said_so_once(caplog):
    caplog.set_level(logging.INFO)
    server, tier = make_one(reserve="100MiB")
    for used in (GIB, 10 * GIB, 10 * GIB, 10 * GIB - 50 * MIB, GIB):
        server.used = used
        await tier.look()
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["WARNING", "INFO"]
    assert said[0][1].startswith(
        "burst directory 0 (/burst/0) is full: writers of files that are open there get ENOSPC"
    )
    assert said[1][1] == "burst directory 0 (/burst/0) is no longer full"


async def test_the_length_of_what_is_written_behind_our_back_is_looked_at():
    server, tier = make_one(capacity="1GiB")
    copy = SimpleNamespace(
        id=1, server=server.id, is_open=True, stat=lambda: SimpleNamespace(st_blocks=GIB // 512)
    )
    tier.begun(copy)
    assert tier.admit("") is server
    await tier.look()
    assert tier.admit("") is None


async def test_what_a_look_costs_does_not_grow_with_the_files_that_are_open():
    """All are looked at in turns."""
    server = FakeServer(0, 10 * GIB)
    tier, looked_at = make_tier(server), Counter[int]()

    def stat(number: int) -> SimpleNamespace:
        looked_at[number] += 1
        return SimpleNamespace(st_blocks=8)

    for number in range(700):
        tier.begun(
            SimpleNamespace(id=number, server=server.id, is_open=True, stat=partial(stat, number))
        )
    for _ in range(3):
        before = looked_at.total()
        await tier.look()
        assert looked_at.total() <= before + 256
    assert looked_at == Counter(range(700))
    assert tier.status()["devices"][0]["dirty_bytes"] == 700 * 4096


async def test_a_copy_that_is_drained_or_gone_before_its_turn_is_not_looked_at():
    server, tier = make_one()
    copies = [
        SimpleNamespace(
            id=number, server=server.id, is_open=True, stat=lambda: SimpleNamespace(st_blocks=8)
        )
        for number in range(300)
    ]
    for copy in copies:
        tier.begun(copy)
    await tier.look()  # at the last ones
    tier.clean(0, server.id, 5)
    tier.gone(1)
    await tier.look()
    told = tier.status()["devices"][0]
    assert (told["dirty_bytes"], told["clean_bytes"]) == (298 * 4096, 5)


# --- throttle -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 100), min_size=2, max_size=30), st.sampled_from([0.0, 1e6, 1e9]))
def test_the_pause_grows_with_what_is_not_drained(steps, rate):
    server, tier = make_one(1000 * MIB, throttle_max="200ms")
    tier.rate = rate
    last = -1.0
    for copy_id, step in enumerate(steps):
        tier.dirty(copy_id, server.id, 0)
    for total in sorted(steps):
        tier.dirty(0, server.id, total * 10 * MIB)
        pause = tier.pause_s if tier.pressure else 0.0
        assert last <= pause <= 0.2
        assert (pause == 0) == (total <= 60)
        assert total < 80 or pause == pytest.approx(0.2)
        last = pause


async def test_throttling_is_free_where_there_is_room():
    server, tier = make_one()
    tier.dirty(1, server.id, 6 * GIB)
    with trio.CancelScope() as scope:
        scope.cancel()
        await tier.throttle()
    assert not scope.cancelled_caught


async def test_a_writer_waits_as_long_as_told_or_until_there_is_room(autojump_clock):
    server, tier = make_one(throttle_max="10s")
    tier.dirty(1, server.id, 8 * GIB)
    start = trio.current_time()
    await tier.throttle()
    assert trio.current_time() - start == pytest.approx(10)
    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(tier.throttle)
        await trio.sleep(1)
        tier.gone(2)  # which leaves as little room
        await trio.testing.wait_all_tasks_blocked()
        assert tier.status()["throttled_writers"] == 3
        tier.clean(1, server.id, 8 * GIB)
    assert trio.current_time() - start == pytest.approx(11)
    assert tier.status()["throttled_writers"] == 0


async def test_a_writer_waits_as_long_as_it_takes_to_drain_a_file(autojump_clock, monkeypatch):
    now = 0.0
    monkeypatch.setattr(tier_module.time, "monotonic", lambda: now)
    server, tier = make_one(throttle_max="10s")
    for copy_id in range(80):
        tier.dirty(copy_id, server.id, 100 * MIB)
    assert tier.pause_s == pytest.approx(10 * tier.pressure), "nothing has been drained yet"
    for copy_id in range(10):
        tier.clean(copy_id, server.id, 100 * MIB)
    now = 100.0
    await tier.look()
    assert tier.status()["drain_bytes_per_s"] == 10 * MIB
    start, pressure = trio.current_time(), tier.pressure
    await tier.throttle()
    assert trio.current_time() - start == pytest.approx(10 * pressure / (1 - pressure))


def test_a_mirror_that_becomes_the_copy_of_a_file_is_a_mirror_no_more():
    server, tier = make_one()
    tier.mirrors(1, server.id, 5 * MIB)
    tier.mirrors(2, server.id, 3 * MIB)
    assert tier.status()["mirror_bytes"] == 8 * MIB
    tier.dirty(1, server.id, 5 * MIB)
    assert tier.status()["mirror_bytes"] == 3 * MIB


def test_what_others_store_there_moves_the_marks():
    server, tier = make_one(1000 * MIB, used=500 * MIB)
    tier.dirty(1, server.id, 200 * MIB)
    assert tier.pressure == 0
    tier.dirty(1, server.id, 270 * MIB)
    assert 0 < tier.pressure < 1
    tier.dirty(1, server.id, 300 * MIB)
    assert tier.pressure == pytest.approx(1)


# --- eviction -------------------------------------------------------------------------------------


def test_eviction_goes_down_to_the_low_mark_and_spares_what_is_dirty():
    server, tier = make_one(1000 * MIB)
    tier.dirty(1, server.id, 200 * MIB)
    tier.clean(2, server.id, 500 * MIB)
    assert tier.needs_eviction() == {}
    tier.clean(3, server.id, 60 * MIB)
    assert tier.needs_eviction() == {server.id: 160 * MIB}
    tier.pinned(2, True)
    assert tier.needs_eviction() == {server.id: 60 * MIB}
    tier.pinned(2, False)
    tier.gone(2)
    assert tier.needs_eviction() == {}


def test_space_of_evicted_copies_is_not_asked_for_twice():
    server, tier = make_one(1000 * MIB, used=900 * MIB)
    for copy_id in range(9):
        tier.clean(copy_id, server.id, 100 * MIB)
        tier.devices[server.id].look(server.space())
    assert tier.needs_eviction() == {server.id: 300 * MIB}
    victims = tier.victims(server.id, 300 * MIB)
    assert victims == [0, 1, 2]
    for copy_id in victims:
        tier.evicted(copy_id)
        assert tier.victims(server.id, 1) == [copy_id + 1]
    assert tier.admit("") is None
    for _ in range(2):
        assert tier.needs_eviction() == {}
        tier.devices[server.id].look(server.space())  # the collector has not come to it yet
    for copy_id in victims:
        tier.gone(copy_id)
    assert tier.admit("") is server
    server.used = 600 * MIB
    tier.devices[server.id].look(server.space())
    assert tier.needs_eviction() == {}
    assert tier.status()["devices"][0]["used_bytes"] == 600 * MIB


async def test_the_evictor_is_woken(autojump_clock):
    server = FakeServer(0, 1000 * MIB)
    upkeep, evictions = Upkeep(), []
    tier = make_tier(server, upkeep=upkeep)

    async def evict() -> float:
        evictions.append(tier.needs_eviction())
        return NEVER_S

    async with trio.open_nursery() as nursery:
        nursery.start_soon(upkeep.run, {Work.EVICT: Job(evict, first_s=NEVER_S)})
        await trio.sleep(1)
        tier.opened(a_copy(server, 1))
        tier.clean(1, server.id, 900 * MIB)
        await trio.sleep(1)
        assert evictions == []
        tier.closed(a_copy(server, 1))
        await trio.testing.wait_all_tasks_blocked()
        assert len(evictions) == 1 and server.id in evictions[0]
        nursery.cancel_scope.cancel()


async def test_a_tier_that_nobody_uses_is_looked_at_now_and_then_until_a_copy_is_made() -> None:
    server = FakeServer(0, 1000 * MIB)
    upkeep, looks = Upkeep(), []
    tier = make_tier(server, upkeep=upkeep)

    async def look() -> float:
        looks.append(await tier.work())
        return looks[-1]

    async with trio.open_nursery() as nursery:
        nursery.start_soon(upkeep.run, {Work.LOOK_AT_BURST: Job(look)})
        await trio.testing.wait_all_tasks_blocked()
        assert len(looks) == 1 and looks[0] > 1
        tier.admit("")
        await trio.testing.wait_all_tasks_blocked()
        assert len(looks) == 2
        nursery.cancel_scope.cancel()
    tier.stop()
    await tier.close()


# --- the ledger -----------------------------------------------------------------------------------


def test_growth_is_counted_whoever_writes() -> None:
    ledger = Ledger()
    ledger.dirty(1, 0, 700)  # which an earlier mount has left
    ledger.begun(2, 0)
    for length in (300, 500, 400, 600):
        ledger.dirty(2, 0, length)
    assert ledger.grown_bytes == 300 + 200 + 200
    ledger.clean(2, 0, 600)
    ledger.dirty(2, 0, 650)
    assert ledger.grown_bytes == 750


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["begun", "dirty", "clean", "gone", "opened", "closed", "touch", "pin", "unpin"]
        ),
        st.integers(0, 7),
        st.integers(0, 1),
        st.integers(0, 100),
    ),
    max_size=80,
)


@given(EVENTS, st.integers(0, 300))
@example(
    events=[("clean", 1, 0, 0), ("clean", 0, 0, 0), ("unpin", 1, 0, 0)], wanted=0
)  # one that was not pinned
def test_the_ledger_agrees_with_a_naive_one(events, wanted):
    ledger = Ledger()
    copies: dict[int, tuple[int, int, bool]] = {}
    opens: dict[int, int] = {}
    pinned: set[int] = set()
    order: list[int] = []  # least recently used first

    def used(copy_id: int) -> None:
        if copy_id in order:
            order.remove(copy_id)
        order.append(copy_id)

    def evictable(copy_id: int) -> bool:
        return (
            copy_id in copies
            and not copies[copy_id][2]
            and not opens.get(copy_id)
            and copy_id not in pinned
        )

    for what, copy_id, server, length in events:
        before = evictable(copy_id)
        match what:
            case "begun":
                if copy_id in copies or opens.get(copy_id) or copy_id in pinned:
                    continue  # ids are new
                ledger.begun(copy_id, server)
                copies[copy_id], opens[copy_id] = (server, 0, True), 1
            case "dirty" | "clean":
                getattr(ledger, what)(copy_id, server, length)
                copies[copy_id] = (server, length, what == "dirty")
            case "gone":
                ledger.gone(copy_id)
                for known in (copies, opens):
                    known.pop(copy_id, None)
                pinned.discard(copy_id)
            case "opened":
                ledger.opened(copy_id)
                opens[copy_id] = opens.get(copy_id, 0) + 1
            case "closed":
                last = opens.get(copy_id, 0) <= 1
                assert ledger.closed(copy_id) == last
                opens[copy_id] = max(0, opens.get(copy_id, 0) - 1)
            case "touch":
                ledger.touch(copy_id)
            case "pin" | "unpin":
                ledger.pin(copy_id, what == "pin")
                (pinned.add if what == "pin" else pinned.discard)(copy_id)
        if evictable(copy_id) and (what in ("clean", "touch") or not before):
            used(copy_id)

    for server in (0, 1):
        totals = ledger.of(server)
        mine = {copy_id: copy for copy_id, copy in copies.items() if copy[0] == server}
        assert totals.dirty == sum(length for _, length, dirty in mine.values() if dirty)
        assert totals.dirty_copies == sum(dirty for _, _, dirty in mine.values())
        assert totals.clean == sum(length for _, length, dirty in mine.values() if not dirty)
        assert totals.pinned == sum(
            length for copy_id, (_, length, _) in mine.items() if copy_id in pinned
        )
        assert totals.writers == sum(
            dirty and bool(opens.get(copy_id)) for copy_id, (_, _, dirty) in mine.items()
        )
        candidates = [copy_id for copy_id in order if copy_id in mine and evictable(copy_id)]
        assert list(totals.oldest_first) == candidates
        assert totals.evictable == sum(mine[copy_id][1] for copy_id in candidates)
        victims = ledger.victims(server, wanted)
        assert victims == candidates[: len(victims)]
        freed = [mine[copy_id][1] for copy_id in victims]
        assert sum(freed) >= wanted or victims == candidates
        assert sum(freed[:-1]) < wanted or not victims


def test_a_copy_on_a_device_that_is_not_registered_cannot_be_opened(tmp_path):
    from aifs.core.errors import Unavailable
    from aifs.data.servers import Servers

    servers = Servers({}, "store")
    with pytest.raises(Unavailable, match="^burst directory 3 is not registered"):
        BurstTier(load(str(tmp_path), {}), servers, MemoryEngine(), no_id, Upkeep()).open(
            Copy(BURST_FIRST + 3, 1)
        )


# --- blocks ---------------------------------------------------------------------------------------


async def test_blocks_take_what_copies_leave():
    server, tier = make_one()
    device = tier.devices[server.id]
    assert device.room_for_blocks() == int(0.6 * server.size)
    tier.dirty(1, server.id, 2 * GIB)
    assert abs(device.room_for_blocks() - 4 * GIB) < GIB // 20
    tier.dirty(1, server.id, 8 * GIB)
    assert device.room_for_blocks() == 0


async def test_blocks_count_as_free():
    server, tier = make_one()
    device = tier.devices[server.id]
    device.block_bytes = lambda: 5 * GIB
    server.used = 5 * GIB
    await tier.look()
    assert tier.admit("", 7 * GIB) is server and not tier.pressure
    assert device.room_for_blocks() == int(0.6 * server.size)


async def test_clean_copies_give_blocks_their_share():
    server, tier = make_one()
    device = tier.devices[server.id]
    for copy_id in range(70):
        tier.dirty(copy_id, server.id, GIB // 10)
        tier.clean(copy_id, server.id, GIB // 10)
    server.used = 7 * GIB
    await tier.look()
    assert 0 < device.room_for_blocks() <= GIB // 2
    assert not tier.needs_eviction()
    device.block_bytes = lambda: GIB
    server.used = 8 * GIB
    await tier.look()
    (wanted,) = tier.needs_eviction().values()
    assert abs(wanted - 2 * GIB) < GIB // 20
