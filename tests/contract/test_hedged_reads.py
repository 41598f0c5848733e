"""Readers of one protected file: what they read is asked of the servers once, also where one of
these is slow. Bytes are counted, not time."""

import errno
import math
import random
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.data import health
from aifs.data.health import Hedging, Latency
from aifs.data.objects.object_set import ObjectSet
from aifs.data.objects.recovery import forget_columns
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from tests.support.data_servers import data_servers, hooked

MIB = 1 << 20
SIZE = 12 * MIB - 4321
DATA = random.Random(8).randbytes(SIZE)
SLOW = 3
MORE = 5 * MIB
INO, OID = 0x1235, 0x20305

LAYOUTS = {
    "4+2": Striped(MIB, (5, 4, SLOW, 0, 1, 2), parity=2),
    "4+2, small units": Striped(64 << 10, (5, SLOW, 4, 0, 1, 2), parity=2),
    "2x2": Striped(MIB, (2, 1, SLOW, 0), replicas=2),
}
LAGS = {"together": [0] * 8, "apart": [0, 0, 1, 2, 3, 5, 7, 9]}
"""How many requests readers are behind the first one."""

layouts = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
lags = pytest.mark.parametrize("behind", LAGS.values(), ids=LAGS)


class Impatient(Hedging):
    """Waits long for all servers but one."""

    def __init__(self, slow: Latency) -> None:
        super().__init__()
        self._slow = slow

    def delay_s(self, latencies: Iterable[Latency], length: int, *_: object) -> float:
        return self.usual_s(latencies, length)

    def usual_s(self, latencies: Iterable[Latency], length: int, *_: object) -> float:
        """Also how long the slow one may still answer when others have: meanwhile it is asked, too,
        and the faster the machine is, the more often."""
        return 0.01 if self._slow in list(latencies) else math.inf


@pytest.fixture
async def servers(tmp_path) -> AsyncIterator[Servers]:
    """Six, of which nothing is in a page cache."""
    with data_servers(tmp_path, 6) as servers, hooked():
        servers.hedging = Hedging(math.inf)
        yield servers
        await quiet(servers)


async def quiet(servers: Servers) -> None:
    await servers.cache.settle()
    while any(server.workers.outstanding for server in servers.values()):
        await trio.lowlevel.checkpoint()


async def stored(servers: Servers, layout: Striped) -> None:
    objects = ObjectSet(servers, layout, INO, OID, new=True)
    for start in range(0, SIZE, 8 * layout.row):
        await objects.write(start, DATA[start : start + 8 * layout.row])
    await objects.settle(SIZE)
    await objects.sync()
    objects.close()


async def read_by_all(servers: Servers, layout: Striped, behind: Sequence[int]) -> None:
    objects = ObjectSet(servers, layout, INO, OID)

    async def read(offset: int) -> None:
        length = min(MIB, SIZE - offset)
        assert await objects.read(offset, length, SIZE) == DATA[offset : offset + length]

    with trio.fail_after(100):
        for step in range(SIZE // MIB + 1 + max(behind)):
            async with trio.open_nursery() as readers:
                for lag in behind:
                    if 0 <= (step - lag) * MIB < SIZE:
                        readers.start_soon(read, (step - lag) * MIB)
    objects.close()


async def until_late(latency: Latency) -> None:
    with trio.fail_after(100):
        while not latency.is_late:
            await trio.sleep(0.001)


def fetched(servers: Servers) -> int:
    return sum(server.read_bytes for server in servers.values())


@pytest.mark.sweep
@layouts
@lags
async def test_each_byte_of_a_healthy_file_is_asked_for_once(servers, layout, behind):
    await stored(servers, layout)
    await read_by_all(servers, layout, behind)
    await quiet(servers)
    assert fetched(servers) == SIZE


@pytest.mark.sweep
@layouts
@lags
@pytest.mark.parametrize("hangs", [1, 1000], ids=["once", "always"])
async def test_what_a_slow_server_holds_is_told_once_for_all(
    servers, layout, behind, hangs, monkeypatch
):
    """Beside the file, some blocks are read: parity, and what the slow server gives in the end
    after all."""
    monkeypatch.setattr(health, "_LATE_S", math.inf)
    await stored(servers, layout)
    servers.hedging = Impatient(servers[SLOW].latency)
    go_on, hung = threading.Event(), []

    def hang(op: str, path: str) -> None:
        if op == "read_into" and path.startswith(f"{servers[SLOW].address}/") and len(hung) < hangs:
            hung.append(path)
            go_on.wait()

    try:
        with hooked(hang):
            await read_by_all(servers, layout, behind)
            assert hung and servers.hedging.count
            await until_late(servers[SLOW].latency)
    finally:
        go_on.set()
        await quiet(servers)
    assert fetched(servers) <= SIZE + MORE


@pytest.mark.sweep
@pytest.mark.parametrize("behind", [[0], [0] * 8], ids=["one", "all"])
async def test_hedges_that_wait_for_one_another_end_with_the_servers_they_wait_for(servers, behind):
    """Each of two columns would be needed to tell the other one."""
    layout = Striped(MIB, (0, 1, 2, 3, 4), parity=1)
    await stored(servers, layout)
    servers.hedging = Hedging(0.01)
    go_on, is_hedged = threading.Event(), threading.Event()
    errors = []

    def fail(op: str, path: str) -> None:
        if op == "read_into" and path.startswith(
            (f"{servers[0].address}/", f"{servers[1].address}/")
        ):
            go_on.wait()
            raise OSError(errno.EIO, "")
        if op == "read_into" and path.startswith(f"{servers[4].address}/"):
            is_hedged.set()

    async def read() -> None:
        try:
            await objects.read(0, 2 * MIB, SIZE)
        except Unavailable as error:
            errors.append(error)

    objects = ObjectSet(servers, layout, INO, OID)
    try:
        with hooked(fail), trio.fail_after(100):
            async with trio.open_nursery() as readers:
                for _ in behind:
                    readers.start_soon(read)
                while not is_hedged.is_set():
                    await trio.sleep(0.001)
                go_on.set()
            await quiet(servers)
    finally:
        go_on.set()
        objects.close()
    assert len(errors) == len(behind)


async def test_what_a_wrong_column_has_told_is_forgotten_with_it(servers, monkeypatch):
    """As when a scrub has put parity right."""
    monkeypatch.setattr(health, "_LATE_S", 0.0)
    layout, slow, parity = Striped(MIB, (0, 1, 2), parity=1), 0, 2
    await stored(servers, layout)
    servers.hedging = Impatient(servers[slow].latency)
    [object_] = [
        path for path in Path(servers[parity].address, "objects").rglob("*") if path.is_file()
    ]
    right = object_.read_bytes()
    object_.write_bytes(bytes(len(right)))
    go_on = threading.Event()

    def hang(op: str, path: str) -> None:
        if op == "read_into" and path.startswith(f"{servers[slow].address}/"):
            go_on.wait()

    objects = ObjectSet(servers, layout, INO, OID)
    try:
        with hooked(hang), trio.fail_after(100):
            assert await objects.read(0, MIB, SIZE) != DATA[:MIB]
    finally:
        go_on.set()
        await quiet(servers)
    assert await objects.read(0, MIB, SIZE) != DATA[:MIB]
    object_.write_bytes(right)
    forget_columns(servers.cache, layout, (INO, OID))
    assert await objects.read(0, MIB, SIZE) == DATA[:MIB]
    objects.close()


async def test_a_hedge_outlives_the_reader_who_began_it(servers):
    layout = LAYOUTS["4+2"]
    await stored(servers, layout)
    servers.hedging = Impatient(servers[SLOW].latency)
    go_on = threading.Event()

    def hang(op: str, path: str) -> None:
        if op == "read_into" and path.startswith(f"{servers[SLOW].address}/"):
            go_on.wait()

    objects = ObjectSet(servers, layout, INO, OID)
    try:
        with hooked(hang), trio.fail_after(100):
            async with trio.open_nursery() as readers:
                readers.start_soon(objects.read, 2 * MIB, MIB, SIZE)
                while not servers.cache.status()["hedged_bytes"]:
                    await trio.lowlevel.checkpoint()
                readers.cancel_scope.cancel()
            assert await objects.read(2 * MIB, MIB, SIZE) == DATA[2 * MIB : 3 * MIB]
            assert servers.cache.status()["hedged_bytes"] == MIB
    finally:
        objects.close()
        go_on.set()
        await quiet(servers)
