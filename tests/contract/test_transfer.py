"""Moving whole files between the tiers, on memory and on a disk: bytes, checksums, holes,
failures.
"""

import errno
import os
import random
from pathlib import Path

import pytest
import trio
import trio.testing
from blake3 import blake3

from aifs.burst import transfer
from aifs.burst.copy import BurstCopy
from aifs.burst.transfer import Limiter, Mover
from aifs.core.budget import Budget
from aifs.core.errors import NoSpace, Unavailable
from aifs.data.objects.object_set import ObjectSet
from aifs.data.servers import Servers
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from tests.support.data_servers import STORE, failing, make_server, open_below

MIB = 1 << 20
PIECE = transfer.PIECE
SIZES = [
    0,
    1,
    4095,
    65_536,
    MIB - 1,
    MIB,
    MIB + 1,
    PIECE,
    PIECE + 1,
    3 * PIECE - 5,
    17 * MIB + 4097,
]
LAYOUTS = [
    Striped(4096, (0,)),
    Striped(65_536, (2, 0, 1)),
    Striped(MIB, (0, 1, 2)),
    Striped(5 * MIB, (1, 2)),
]


@pytest.fixture
async def servers(place):
    table = {number: make_server(place / f"server{number}", number) for number in range(3)}
    table[BURST_FIRST] = make_server(place / "burst", 0, role="burst")
    servers = Servers(table, STORE, 8)
    servers.check_identity()
    yield servers
    servers.close()
    assert open_below(place) == []


def make_mover(total: int = 64 * MIB, rate: int = 0) -> Mover:
    return Mover(Budget(total), Limiter(rate), "best-effort")


def make_copy(servers: Servers, copy_id: int = 1) -> BurstCopy:
    device = servers[BURST_FIRST]
    return BurstCopy(device, copy_id, servers.buffers, device.create_object((0, copy_id)))


def path_of(copy: BurstCopy) -> Path:
    return Path(copy.device.where((0, copy.id)))


def make_objects(servers: Servers, layout: Striped, **options) -> ObjectSet:
    return ObjectSet(servers, layout, 7, 70, background="best-effort", **options)


def never() -> bool:
    return False


def digests(data: bytes) -> bytes:
    return b"".join(
        blake3(data[start : start + MIB]).digest() for start in range(0, len(data), MIB)
    )


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
async def test_there_and_back(servers, layout):
    mover = make_mover()
    for number, size in enumerate(SIZES if layout.unit >= 65_536 else SIZES[:8]):
        data = random.Random(size).randbytes(size)
        copy, back = make_copy(servers, 2 * number + 1), make_copy(servers, 2 * number + 2)
        path_of(copy).write_bytes(data)
        objects = ObjectSet(servers, layout, 7, 100 + number, new=True, background="idle")
        assert await mover.drain_out(copy, size, objects, never) == digests(data)
        assert await objects.read(0, size, size, True) == data
        for index, server in enumerate(layout.servers):
            path = Path(servers[server].where((7, 100 + number)))
            length = path.stat().st_size if path.exists() else 0
            assert length == layout.object_length(index, size)
        assert await mover.stage_in(objects, size, back, never)
        assert path_of(back).read_bytes() == data
        for used in (objects, copy, back):
            used.close()


@pytest.mark.sweep
async def test_holes_stay_holes(servers):
    mover, size, layout = make_mover(), 40 * MIB + 5, Striped(MIB, (0, 1, 2))
    data = bytearray(size)
    copy, back = make_copy(servers), make_copy(servers, 2)
    with open(path_of(copy), "r+b") as file:
        file.truncate(size)
        for offset in (3 * MIB + 4096, 21 * MIB, 40 * MIB):
            file.seek(offset)
            file.write(b"data")
            data[offset : offset + 4] = b"data"
    objects = make_objects(servers, layout, new=True)
    assert await mover.drain_out(copy, size, objects, never, sparse=True) == b""
    assert mover.moved_bytes < 4 * PIECE
    assert objects.blocks() * 512 <= 64 << 10
    assert await objects.read(0, size, size, True) == data
    assert await mover.stage_in(objects, size, back, never)
    assert path_of(back).read_bytes() == data
    assert path_of(back).stat().st_blocks * 512 <= 4 * MIB
    for used in (objects, copy, back):
        used.close()


@pytest.mark.sweep
@pytest.mark.parametrize("after", range(5))
async def test_cancelled_between_pieces(servers, after):
    mover, copy = make_mover(), make_copy(servers)
    size = 4 * PIECE
    path_of(copy).write_bytes(bytes(size))
    asked = 0

    def cancelled() -> bool:
        nonlocal asked
        asked += 1
        return asked > after

    objects = make_objects(servers, Striped(MIB, (0, 1)), new=True)
    assert await mover.drain_out(copy, size, objects, cancelled) is None
    assert mover.moved_bytes <= after * PIECE
    back = make_copy(servers, 2)
    await objects.settle(size)
    asked = 0
    assert not await mover.stage_in(objects, size, back, cancelled)
    for used in (objects, copy, back):
        used.close()


async def test_the_task_is_cancelled(servers):
    mover, copy = make_mover(rate=MIB), make_copy(servers)
    path_of(copy).write_bytes(bytes(4 * PIECE))
    objects = make_objects(servers, Striped(MIB, (0, 1)), new=True)
    with trio.move_on_after(0.05) as scope:
        await mover.drain_out(copy, 4 * PIECE, objects, never)
    assert scope.cancelled_caught
    objects.close()
    copy.close()


@pytest.mark.sweep
@pytest.mark.parametrize("op", ["write_at", "sync_file", "open_file", "truncate"])
async def test_a_server_that_fails(servers, op):
    mover, copy = make_mover(), make_copy(servers)
    size = 3 * PIECE + 1
    path_of(copy).write_bytes(bytes(range(256)) * (size // 256) + b"x")
    for error, expected in ((errno.EIO, Unavailable), (errno.ENOSPC, NoSpace)):
        with failing(op, servers[1].address, error) as failed:
            objects = make_objects(servers, Striped(MIB, (0, 1, 2)), new=True)
            if op == "truncate":  # an object that ends in a hole is extended
                size += 9 * MIB
                os.truncate(path_of(copy), size)
            with pytest.raises(expected, match="data server 1"):
                await mover.drain_out(copy, size, objects, never, sparse=op == "truncate")
            objects.close()
        assert failed
        objects = ObjectSet(servers, Striped(MIB, (0, 1, 2)), 7, 71 + error, new=True)
        assert await mover.drain_out(
            copy, size, objects, never, sparse=op == "truncate"
        ) == digests(path_of(copy).read_bytes())
        objects.close()
    copy.close()


async def test_a_file_with_some_holes_has_all_checksums(servers):
    mover, copy, size = make_mover(), make_copy(servers), 4 * PIECE + MIB // 2
    with open(path_of(copy), "r+b") as file:
        for piece in (0, 2, 3):
            file.seek(piece * PIECE + 8192)
            file.write(b"data")
        file.truncate(size)
    objects = make_objects(servers, Striped(MIB, (0, 1)), new=True)
    assert await mover.drain_out(copy, size, objects, never, sparse=True) == digests(
        path_of(copy).read_bytes()
    )
    objects.close()
    copy.close()


async def test_a_copy_that_is_shorter_than_it_was(servers):
    mover, copy = make_mover(), make_copy(servers)
    path_of(copy).write_bytes(bytes(range(256)) * 100)
    objects = make_objects(servers, Striped(MIB, (0, 1)), new=True)
    with pytest.raises(Unavailable, match="burst directory 0: .* ends before byte"):
        await mover.drain_out(copy, 25_601, objects, never)
    objects.close()
    copy.close()


@pytest.mark.sweep
async def test_memory_stays_within_the_budget(servers):
    budget = Budget(2 * PIECE)
    mover = Mover(budget, Limiter(0), "best-effort")
    async with trio.open_nursery() as nursery:
        for number in range(4):
            copy = make_copy(servers, number + 1)
            path_of(copy).write_bytes(bytes([number]) * (5 * PIECE))
            objects = ObjectSet(
                servers, Striped(MIB, (0, 1, 2)), 7, number, new=True, background="none"
            )

            async def drain(copy=copy, objects=objects) -> None:
                assert await mover.drain_out(copy, 5 * PIECE, objects, never)
                copy.close()
                objects.close()

            nursery.start_soon(drain)
    assert 0 < budget.peak <= 2 * PIECE


async def test_the_limit_holds_for_all_together(autojump_clock):
    is_lifted = False
    limiter = Limiter(1000, lambda: is_lifted)

    async def move(count: int) -> None:
        for _ in range(count):
            await limiter.take(500)

    start = trio.current_time()
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(move, 10)
    assert trio.current_time() - start == pytest.approx(19.5)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(move, 10)
        await trio.sleep(1)
        is_lifted = True
    assert trio.current_time() - start <= 19.5 + 1 + 0.5  # who waits already goes on soon
    now = trio.current_time()
    await move(100)
    assert trio.current_time() == now


async def test_who_waits_for_writers_goes_on_when_they_have_gone(autojump_clock):
    """Though the piece that is under way never ends: it may wait for memory that others hold."""
    are_writing = True
    mover = Mover(Budget(1 << 20), Limiter(0), "none", lambda: are_writing)
    await mover.begin(1)
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(mover.begin, 1)
            await trio.testing.wait_all_tasks_blocked()
            are_writing = False


async def test_what_was_cancelled_for_a_moment_is_not_staged(servers):
    """As when a file of O_TMPFILE, which is not staged, gets its name meanwhile."""
    mover, size = make_mover(), 3 * PIECE
    data, back = random.Random(size).randbytes(size), make_copy(servers)
    objects = make_objects(servers, Striped(MIB, (0, 1, 2)), new=True)
    await objects.write(0, data)
    answers = iter([True])
    assert not await mover.stage_in(objects, size, back, lambda: next(answers, False))
    for used in (objects, back):
        used.close()
