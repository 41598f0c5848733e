"""Protected objects: what is written in whole rows comes back, whatever columns are lost, in
whatever way; nothing waits for a server that hangs; a drain gets by with what works."""

import errno
import itertools
import math
import os
import random
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from aifs.core.errors import FsError, NoSpace, Unavailable
from aifs.data.health import Hedging
from aifs.data.objects.columns import Columns
from aifs.data.objects.object_set import ObjectSet, Reading
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from tests.support.data_servers import data_servers, failing, hooked
from tests.support.memory import in_memory

INO, OID = 0x1235, 0x20305

LAYOUTS = {
    "2+1": Striped(4096, (4, 0, 2), parity=1),
    "3+2": Striped(4096, (1, 0, 2, 5, 3), parity=2),
    "4+2": Striped(8192, (5, 4, 3, 0, 1, 2), parity=2),
    "2x2": Striped(4096, (3, 1, 2, 0), replicas=2),
    "1x3": Striped(4096, (4, 0, 5), replicas=3),
}
SIZE = 8 * 4096 * 5 + 777

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())


@pytest.fixture
async def servers(place: Path) -> AsyncIterator[Servers]:
    with data_servers(place, 6) as servers:
        yield servers
        await servers.cache.settle()  # what is read ahead holds descriptors
        await quiet(servers)  # and what was asked of a late server, too


oids = itertools.count(OID)


def content(size: int = SIZE) -> bytes:
    return bytes((7 * index + index // 251) % 256 for index in range(4096)) * (
        size // 4096
    ) + b"end" * (size % 4096 // 3 + 1)


DATA = content()[:SIZE]


async def stored(servers: Servers, layout: Striped, data: bytes = DATA, rows: int = 3) -> int:
    """The oid of new objects that hold ``data``."""
    oid = next(oids)
    objects = ObjectSet(servers, layout, INO, oid, new=True)
    step = layout.row * rows
    for start in range(0, len(data), step):
        await objects.write(start, data[start : start + step])
    await objects.settle(len(data))
    assert await objects.sync(1) == objects.unread == 0
    objects.close()
    return oid


async def quiet(servers: Servers) -> None:
    """Wait until the servers have ended all that was asked of them, and nobody waits for any
    more."""
    while any(server.workers.outstanding for server in servers.values()):
        await trio.lowlevel.checkpoint()


@contextmanager
def opened(
    servers: Servers, layout: Striped, oid: int, new: bool = False, **reading: object
) -> Iterator[ObjectSet]:
    objects = ObjectSet(servers, layout, INO, oid, new=new, reading=Reading(**reading))
    try:
        yield objects
    finally:
        objects.close()


async def require_all(objects: ObjectSet, data: bytes = DATA) -> None:
    assert await objects.read(0, len(data), len(data)) == data
    for offset, length in [
        (0, 1),
        (4000, 5000),
        (8192, 4096),
        (len(data) - 5, 5),
        (30_000, 70_000),
    ]:
        assert await objects.read(offset, length, len(data)) == data[offset : offset + length]
    buffer = bytearray(50_001)
    await objects.read_into(20_000, memoryview(buffer), len(data))
    assert buffer == data[20_000:70_001]


def path_of(servers: Servers, layout: Striped, oid: int, column: int) -> Path:
    return Path(servers[layout.servers[column]].where((INO, oid)))


# --- reading --------------------------------------------------------------------------------------


@layouts
async def test_what_is_written_comes_back(servers: Servers, layout: Striped) -> None:
    oid = await stored(servers, layout)
    for column in range(len(layout.servers)):
        assert path_of(servers, layout, oid, column).stat().st_size == layout.object_length(
            column, SIZE
        )
    with opened(servers, layout, oid) as objects:
        await require_all(objects)
        assert objects.blocks() is None and await objects.backing(SIZE) is None


def losses(layout: Striped) -> list[tuple[int, ...]]:
    columns = range(len(layout.servers))
    return [
        lost
        for count in range(1, layout.tolerates + 1)
        for lost in itertools.combinations(columns, count)
    ]


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "deleted": os.unlink,
    "emptied": partial(os.truncate, length=0),
    "truncated": truncate,
}


@pytest.mark.sweep
@layouts
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
async def test_objects_that_lack_bytes_are_read_around_and_told_of(servers, layout, damage) -> None:
    for lost in losses(layout):
        oid = await stored(servers, layout)
        for column in lost:
            damage(path_of(servers, layout, oid, column))
        damaged = []
        with opened(servers, layout, oid, on_damage=lambda *args: damaged.append(args)) as objects:
            await require_all(objects)
        assert len(set(damaged)) == len(damaged)
        assert {column for _, _, column in damaged} <= set(lost)
        assert {args[:2] for args in damaged} <= {(oid, INO)}


@layouts
async def test_columns_that_must_not_be_read_are_not(servers: Servers, layout: Striped) -> None:
    oid = await stored(servers, layout)
    for lost in losses(layout):
        paths = {str(path_of(servers, layout, oid, column)) for column in lost}

        def refuse(op: str, path: str, paths=paths) -> None:
            assert op not in ("open_file", "read_into") or path not in paths

        with (
            hooked(refuse),
            opened(servers, layout, oid, unread=sum(1 << column for column in lost)) as objects,
        ):
            await require_all(objects)


@pytest.mark.sweep
@layouts
async def test_servers_that_fail_are_read_around(servers: Servers, layout: Striped) -> None:
    for lost in losses(layout):
        oid = await stored(servers, layout)
        below = tuple(str(path_of(servers, layout, oid, column)) for column in lost)

        def fail(op: str, path: str, below=below) -> None:
            if path in below:
                raise OSError(errno.EIO, "")

        with hooked(fail), opened(servers, layout, oid) as objects:
            await require_all(objects)
        for column in lost:
            servers[layout.servers[column]].health.failing.clear()


@layouts
async def test_too_many_lost_columns_are_an_error(servers: Servers, layout: Striped) -> None:
    oid = await stored(servers, layout)
    gone = layout.copies(0) if layout.replicas > 1 else range(layout.tolerates + 1)
    for column in gone:
        os.unlink(path_of(servers, layout, oid, column))
    with opened(servers, layout, oid) as objects:
        for _ in range(2):
            with pytest.raises(Unavailable, match="data server|lost"):
                await objects.read(0, SIZE, SIZE)
        with pytest.raises(Unavailable):
            await objects.read_into(0, memoryview(bytearray(100)), SIZE)
    await quiet(servers)


@pytest.mark.sweep
@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(LAYOUTS.values())), st.integers(1, 200_000), st.data())
def test_random_reads_with_random_losses(layout: Striped, size: int, choice: st.DataObject) -> None:
    lost = choice.draw(st.sampled_from([(), *losses(layout)]))
    ranges = choice.draw(
        st.lists(st.tuples(st.integers(0, size - 1), st.integers(1, size)), min_size=1, max_size=4)
    )
    data = content(size)[:size]

    rows = choice.draw(st.integers(1, 3))

    async def use(servers: Servers) -> None:
        oid = await stored(servers, layout, data, rows)
        with opened(servers, layout, oid, unread=sum(1 << column for column in lost)) as objects:
            for offset, length in ranges:
                length = min(length, size - offset)
                assert await objects.read(offset, length, size) == data[offset : offset + length]

    with in_memory() as memory, data_servers(memory, 6) as servers:
        trio.run(use, servers)


@layouts
async def test_each_column_is_made_again_from_others(servers: Servers, layout: Striped) -> None:
    oid = await stored(servers, layout)
    columns = Columns(servers, layout, INO, oid)
    try:
        for column in range(len(layout.servers)):
            found = path_of(servers, layout, oid, column).read_bytes()
            assert await columns.reconstruct(column, 0, SIZE, SIZE) == found
            assert await columns.reconstruct(column, 4099, 5000, SIZE) == found[4099:9099]
            assert await columns.reconstruct(column, len(found), 10, SIZE) == b""
            others = (1 << len(layout.servers)) - 1 & ~(1 << column)
            with pytest.raises(Unavailable, match=f"column {column} .* 0 of"):
                await columns.reconstruct(column, 0, 10, SIZE, others)
            buffer = bytearray(len(found) + 10)
            assert await columns.read(column, 0, memoryview(buffer)) == len(found)
    finally:
        columns.close()


async def test_columns_are_written_one_by_one(servers: Servers) -> None:
    layout = LAYOUTS["2+1"]
    oid = next(oids)
    columns = Columns(servers, layout, INO, oid, background="idle")
    buffer = memoryview(bytearray(10))
    assert await columns.read(1, 0, buffer) == 0
    await columns.write(1, 3, b"abc")
    await columns.settle(1, 5)
    await columns.sync(1)
    assert await columns.read(1, 0, buffer) == 5 and buffer[:6] == b"\0\0\0ab\0"
    await columns.settle(1, 0)
    await columns.sync(1)
    assert not path_of(servers, layout, oid, 1).exists() and await columns.read(1, 0, buffer) == 0
    columns.close()


# --- slow servers ---------------------------------------------------------------------------------


@layouts
@pytest.mark.parametrize("into", [False, True], ids=["cached", "past caches"])
async def test_a_server_that_hangs_holds_up_nobody(
    servers: Servers, layout: Striped, into: bool
) -> None:
    oid = await stored(servers, layout)
    copies = layout.copies(0)
    hanging = copies[INO % len(copies)]
    path = str(path_of(servers, layout, oid, hanging))
    go_on, hung = threading.Event(), threading.Event()

    def hang(op: str, where: str) -> None:
        if op == "read_into" and where == path:
            hung.set()
            go_on.wait()

    servers.hedging = Hedging(0.02)
    servers.cache.invalidate((layout.servers[hanging], INO, oid))
    try:
        with hooked(hang), opened(servers, layout, oid) as objects, trio.fail_after(60):
            for _ in range(3):  # the later ones know that it is late
                if into:
                    buffer = bytearray(70_000)
                    await objects.read_into(0, memoryview(buffer), SIZE)
                    assert buffer == DATA[:70_000]
                else:
                    assert await objects.read(0, 70_000, SIZE) == DATA[:70_000]
            assert servers.hedging.count >= 1  # more if the machine has held up others
            # A thread may come to the read only after others have answered for it.
            while not (hung.is_set() and servers[layout.servers[hanging]].latency.is_late):
                await trio.sleep(0.001)
    finally:
        go_on.set()
        await quiet(servers)


# --- writing --------------------------------------------------------------------------------------


@layouts
async def test_holes_stay_holes(servers: Servers, layout: Striped) -> None:
    oid = next(oids)
    row = layout.row
    size = 600 * row
    with opened(servers, layout, oid, new=True) as objects:
        data = memoryview(bytearray(size))
        ranges = [(100 * row + 10, 100 * row + 20), (300 * row, 301 * row + 1), (size - 10, size)]
        for start, end in ranges:
            data[start:end] = b"x" * (end - start)
        await objects.write(0, data, ranges)
        await objects.settle(size)
        assert await objects.sync() == 0
        assert objects.blocks() * 512 <= 16 * 4096
    for lost in losses(layout)[:: max(1, len(losses(layout)) // 4)]:
        with opened(servers, layout, oid, unread=sum(1 << column for column in lost)) as objects:
            for start, end in ranges:
                part = await objects.read(start - 5, end - start + 5, size)
                assert part == data[start - 5 : end]
            assert await objects.read(200 * row, row, size) == bytes(row)


@pytest.mark.parametrize(
    ("op", "number"),
    [("write_at", errno.ENOSPC), ("sync_file", errno.EIO), ("open_file", errno.EACCES)],
)
@layouts
async def test_a_drain_goes_on_without_a_column_that_fails(servers, layout, op, number) -> None:
    broken = len(layout.servers) - 1
    oid = next(oids)
    server = servers[layout.servers[broken]]
    with opened(servers, layout, oid, new=True) as objects:
        with failing(op, f"{server.address}/", number) as failed:
            for start in range(0, SIZE, layout.row):
                await objects.write(start, DATA[start : start + layout.row])
            await objects.settle(SIZE)
            assert await objects.sync(1) == 1 << broken == objects.unread
        assert failed.count(op) == 1, "it is left out from then on"
    server.health.failing.clear()
    with opened(servers, layout, oid, unread=1 << broken) as objects:
        await require_all(objects)


@layouts
async def test_a_drain_fails_where_too_few_columns_would_be_durable(servers, layout) -> None:
    """One may fail: of two that may be lost, one more is asked for."""
    broken = (0, 1) if layout.parity else layout.copies(0)[:2]
    names = [f"{servers[layout.servers[column]].address}/" for column in broken]

    def fail(op: str, path: str) -> None:
        if op == "sync_file" and path.startswith(tuple(names)):
            raise OSError(errno.ENOSPC, "")

    with hooked(fail), opened(servers, layout, next(oids), new=True) as objects:
        await objects.write(0, DATA)
        await objects.settle(SIZE)
        with pytest.raises(NoSpace):
            await objects.sync(1)


async def test_columns_that_hold_nothing_of_a_small_file_do_not_count(servers: Servers) -> None:
    layout = LAYOUTS["4+2"]
    oid = next(oids)

    def fail(op: str, path: str) -> None:
        if path.startswith(f"{servers[layout.servers[2]].address}/"):
            raise OSError(errno.EIO, "")

    with opened(servers, layout, oid, new=True) as objects:
        with hooked(fail):
            await objects.write(0, b"small")
            await objects.settle(5)
            assert await objects.sync(1) == 0
        assert await objects.read(0, 5, 5) == b"small"
    assert [path_of(servers, layout, oid, c).exists() for c in range(6)] == [
        True,
        False,
        False,
        False,
        True,
        True,
    ]


async def test_a_server_that_was_removed_is_a_lost_column(servers: Servers) -> None:
    for layout in (LAYOUTS["4+2"], LAYOUTS["2x2"]):
        oid = await stored(servers, layout)
        gone = Striped(layout.unit, (77, *layout.servers[1:]), layout.replicas, layout.parity)
        with opened(servers, gone, oid) as objects:
            await require_all(objects)
        with opened(servers, gone, next(oids), new=True) as objects:
            await objects.write(0, DATA)
            await objects.settle(SIZE)
            assert await objects.sync() == 1
            await require_all(objects)


def test_errors_are_those_of_the_filesystem() -> None:
    assert issubclass(NoSpace, FsError)


@pytest.mark.sweep
@pytest.mark.parametrize("layout", [LAYOUTS["3+2"], LAYOUTS["4+2"]], ids=["3+2", "4+2"])
@pytest.mark.parametrize("step", [64 << 10, 100_000, 1 << 20])
async def test_a_stream_reads_each_byte_of_a_degraded_file_once(servers, monkeypatch, layout, step):
    """What is read to tell lost bytes is what the stream needs next; nobody asks for lost columns,
    nor ahead."""
    servers.hedging = Hedging(math.inf)  # a machine that is held up has bytes read twice, rightly
    data = random.Random(3).randbytes((5 << 20) + 4321)
    oid = await stored(servers, layout, data, rows=20)
    counted: Counter[int] = Counter()
    read = DataServer.read

    def count(server: DataServer, key: object, fd: int, buffer: memoryview, offset: int) -> int:
        counted[server.id] += len(buffer)
        return read(server, key, fd, buffer, offset)

    monkeypatch.setattr(DataServer, "read", count)
    with opened(servers, layout, oid, unread=(1 << layout.parity) - 1) as objects:
        for start in range(0, len(data), step):
            length = min(step, len(data) - start)
            assert await objects.read(start, length, len(data)) == data[start : start + length]
        await servers.cache.settle()
        await quiet(servers)
    assert not any(counted[layout.servers[column]] for column in range(layout.parity))
    assert len(data) <= sum(counted.values()) < 1.2 * len(data)
