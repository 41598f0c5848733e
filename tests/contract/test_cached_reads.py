"""Striped files whose servers have to be waited for: read through the cache, and ahead."""

import random
import threading
import time
from collections import Counter

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.data.objects.object_set import ObjectSet, delete_objects
from aifs.data.reading.read_cache import BLOCK
from aifs.layout.striped import Striped
from tests.support.data_servers import data_servers, failing, hooked, open_below

KIB, MIB = 1 << 10, 1 << 20
INO, OID = 0x77, 0x30301

LAYOUTS = [
    Striped(64 * KIB, (0, 1, 2, 3)),
    Striped(MIB, (2, 0, 1)),
    Striped(3 * MIB // 2, (1, 0)),
    Striped(MIB, (3,)),
]


@pytest.fixture
def servers(tmp_path):
    with data_servers(tmp_path) as servers:
        yield servers


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.unit >> 10}KiBx{len(layout.servers)}")
def layout(request):
    return request.param


async def written(servers, layout, size: int) -> tuple[ObjectSet, bytes]:
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    data = random.Random(size).randbytes(size)
    await objects.write(0, data)
    await objects.settle(size)
    return objects, data


class Requests:
    """Counts the reads that servers are asked for, and delays each."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.count: Counter[str] = Counter()
        self._delay_s = delay_s
        self._lock = threading.Lock()

    def __call__(self, op: str, path: str) -> None:
        if op == "read_into":
            with self._lock:
                self.count[path] += 1
            time.sleep(self._delay_s)

    @property
    def total(self) -> int:
        return sum(self.count.values())


@pytest.mark.sweep("request_size")
@pytest.mark.parametrize("request_size", [128 * KIB, 4 * KIB, MIB, 700_001])
async def test_a_sequential_reader_costs_one_request_per_block(servers, layout, request_size):
    size = 9 * MIB + 12_345 if request_size > 4 * KIB else 2 * MIB + 5
    objects, data = await written(servers, layout, size)
    seen = Requests()
    with hooked(seen):
        for offset in range(0, size, request_size):
            length = min(request_size, size - offset)
            assert await objects.read(offset, length, size, True) == data[offset : offset + length]
        await servers.cache.settle()
    blocks = sum(
        -(-layout.object_length(index, size) // BLOCK) for index in range(len(layout.servers))
    )
    assert seen.total <= blocks + 1  # the first small request fetches itself alone
    objects.close()


async def test_many_readers_cost_no_more_than_one(servers, layout):
    size = 5 * MIB
    objects, data = await written(servers, layout, size)
    seen = Requests(0.001)

    async def read(start: int) -> None:
        for offset in range(start, size, 256 * KIB):
            length = min(256 * KIB, size - offset)
            assert await objects.read(offset, length, size, True) == data[offset : offset + length]

    with hooked(seen):
        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(read, number * 1000)
        await servers.cache.settle()
    blocks = sum(
        -(-layout.object_length(index, size) // BLOCK) for index in range(len(layout.servers))
    )
    assert seen.total == blocks
    objects.close()


@pytest.mark.sweep
async def test_random_small_reads_fetch_what_they_ask_for(servers):
    layout, size = Striped(MIB, (0, 1, 2, 3)), 32 * MIB
    objects, data = await written(servers, layout, size)
    chance = random.Random(5)
    with hooked():
        for _ in range(50):
            offset = chance.randrange(size >> 12) << 12
            assert await objects.read(offset, 4096, size, True) == data[offset : offset + 4096]
        await servers.cache.settle()
    assert servers.cache.status()["fetched_bytes"] <= size // 4
    objects.close()


async def test_reads_in_memory_pass_the_cache_by(servers, layout):
    objects, data = await written(servers, layout, 3 * MIB)
    for offset in range(0, 3 * MIB, 128 * KIB):
        assert (
            await objects.read(offset, 128 * KIB, 3 * MIB, True)
            == data[offset : offset + 128 * KIB]
        )
    if any(
        servers[number].may_inline or servers[number].storage.can_read_cached
        for number in layout.servers
    ):
        assert servers.cache.status()["misses"] <= 1
    objects.close()


@pytest.mark.sweep
async def test_readers_and_writers(servers, layout):
    """A strict read while nobody writes shows all that was written before it, whatever is loaded
    meanwhile."""
    size = 4 * MIB
    objects, data = await written(servers, layout, size)
    model, chance = bytearray(data), random.Random(9)
    writing, lock = False, trio.Lock()
    compared = 0

    def delay(op: str, path: str) -> None:
        if op in ("read_into", "write_at"):
            time.sleep(chance.random() * 0.002)

    async def write() -> None:
        nonlocal writing
        for _ in range(25):
            offset, length = chance.randrange(size), chance.choice([100, 5000, 300_000])
            part = chance.randbytes(min(length, size - offset))
            async with lock:
                writing = True
                await objects.write(offset, part)
                model[offset : offset + len(part)] = part
                writing = False
            await trio.sleep(chance.random() * 0.005)

    async def read(start: int) -> None:
        nonlocal compared
        offset = start
        for _ in range(60):
            offset = (
                (offset + 128 * KIB) % size if chance.random() < 0.8 else chance.randrange(size)
            )
            length = min(128 * KIB, size - offset)
            expected, strict = bytes(model[offset : offset + length]), not writing
            seen = await objects.read(offset, length, size, strict)
            if strict and not writing and model[offset : offset + length] == expected:
                assert seen == expected
                compared += 1

    with hooked(delay):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for number in range(4):
                nursery.start_soon(read, number * MIB)
        await servers.cache.settle()
        for offset in range(0, size, 100_000):
            length = min(100_000, size - offset)
            assert await objects.read(offset, length, size, True) == model[offset : offset + length]
    assert compared > 50
    objects.close()


async def test_truncation_and_deletion_forget(servers, layout):
    size = 3 * MIB
    objects, data = await written(servers, layout, size)
    with hooked():
        assert await objects.read(0, MIB, size, True) == data[:MIB]
        await objects.trim(MIB // 2)
        await objects.settle(size)
        assert await objects.read(0, MIB, size, True) == data[: MIB // 2] + bytes(MIB // 2)
        objects.close()
        await delete_objects(servers, layout, INO, OID)
        await servers.cache.settle()
    assert servers.cache.status()["cached_bytes"] == 0


async def test_damage_is_told_and_healed(servers):
    layout, size = Striped(MIB, (0, 1)), 4 * MIB
    objects, data = await written(servers, layout, size)
    objects.close()
    path = servers[1].where((INO, OID))
    with hooked():
        objects = ObjectSet(servers, layout, INO, OID)
        with open(path, "r+b") as file:
            file.truncate(MIB + 5)
        with pytest.raises(Unavailable, match=f"^data server 1: {path} ends before byte"):
            await objects.read(3 * MIB, MIB, size, True)
        assert await objects.read(2 * MIB, MIB, size, True) == data[2 * MIB : 3 * MIB]
        with open(path, "r+b") as file:
            file.seek(MIB)
            file.write(data[3 * MIB :])
        assert await objects.read(3 * MIB, MIB, size, True) == data[3 * MIB :]
        servers.cache.invalidate((1, INO, OID))
        with failing("read_into", path):
            with pytest.raises(Unavailable):
                await objects.read(3 * MIB, MIB, size, True)
        assert await objects.read(3 * MIB, MIB, size, True) == data[3 * MIB :]
    objects.close()


async def test_a_closed_file_keeps_its_descriptors_until_loads_end(servers, tmp_path):
    layout, size = Striped(MIB, (0, 1, 2, 3)), 16 * MIB
    objects, data = await written(servers, layout, size)
    objects.close()
    token, all_stalled = trio.lowlevel.current_trio_token(), trio.Event()
    go, stalled = threading.Event(), set()

    def stall(op: str, path: str) -> None:
        if op == "read_into":
            stalled.add(path)
            if len(stalled) == 4:
                token.run_sync_soon(all_stalled.set)
            go.wait(60)

    with hooked(stall):
        objects = ObjectSet(servers, layout, INO, OID)
        async with trio.open_nursery() as nursery:
            for number in range(4):
                nursery.start_soon(objects.read, number * MIB, MIB, size, True)
            await all_stalled.wait()
            nursery.cancel_scope.cancel()
        objects.close()
        assert set(open_below(tmp_path)) == stalled
        go.set()
        await servers.cache.settle()
        # That they are closed now is seen when the servers have ended: workers do it.
        seen = Requests()
        with hooked(seen):
            objects = ObjectSet(servers, layout, INO, OID)
            assert await objects.read(0, MIB, size, True) == data[:MIB]
        assert not seen.total
        objects.close()


async def test_what_somebody_else_has_read_into_the_cache_is_forgotten_before_a_change(
    servers, layout
):
    """Staging and copy_file_range read a file by objects of their own."""
    size = 3 * MIB
    objects, data = await written(servers, layout, size)
    other = ObjectSet(servers, layout, INO, OID)
    with hooked():
        assert await other.read(0, size, size, True) == data
        await servers.cache.settle()
        await objects.write(MIB, b"new" * 1000)
        await objects.settle(size)
        expected = data[:MIB] + b"new" * 1000 + data[MIB + 3000 :]
        assert await objects.read(0, size, size, True) == expected
    other.close()
    objects.close()
