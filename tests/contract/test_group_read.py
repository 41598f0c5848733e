"""Readers of the same bytes: what files share is fetched once from the servers, however many files
and readers ask.

Files are extent lists whose chunks are shared; what is read by requests to servers, and not from a
page cache, is counted.
"""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import trio
import trio.testing

from aifs.core.budget import Budget
from aifs.data.containers.chunked import ChunkedObjects
from aifs.data.health import Hedging
from aifs.data.reading.read_cache import BLOCK_MAX, FilledSource, ReadCache
from aifs.data.servers import Servers
from aifs.layout.interleaved import Extent
from tests.support.data_servers import data_servers, hooked
from tests.support.shelf import KINDS, Shelf, shelf

MIB = 1 << 20
READERS = 4
MOST = READERS - 1
"""Bytes fetched to bytes stored: which of them are fetched by the block depends on who comes first.
"""

CHUNK = 4 * MIB


def random_bytes(length: int) -> bytes:
    return random.Random(length).randbytes(length)


def compressible(length: int) -> bytes:
    """By half."""
    return (random.Random(length).randbytes(length // 2) + bytes(length))[:length]


@pytest.fixture
async def servers(tmp_path):
    """Four, of which nothing is in a page cache."""
    with data_servers(tmp_path, 4) as servers, hooked():
        # A machine that is held up has bytes read twice, rightly.
        servers.hedging = Hedging(math.inf)
        yield servers
        await servers.cache.settle()  # what is read ahead holds descriptors


async def share(made: Shelf, chunks: Sequence[bytes], level: int = 0) -> list[Extent]:
    """Stored chunks, as extents of whichever files."""
    contents = dict(enumerate(chunks, start=1))
    await made.store(contents, chunk=CHUNK, level=level)
    return [Extent(len(data), made.lists[oid][0], shared=True) for oid, data in contents.items()]


class File:
    """A file that consists of these extents."""

    def __init__(self, made: Shelf, extents: Sequence[Extent]) -> None:
        self.size = sum(extent.length for extent in extents)
        self._extents = extents
        self._objects = ChunkedObjects(made.files, self._load)

    async def _load(self, offset: int) -> tuple[int, Sequence[Extent]]:
        await trio.lowlevel.checkpoint()
        return 0, self._extents

    async def read(self, offset: int, length: int) -> bytes:
        return bytes(
            await self._objects.read(offset, min(length, self.size - offset), self.size, True)
        )

    async def read_all(self, request: int, step: Callable = trio.lowlevel.checkpoint) -> bytes:
        parts = []
        for offset in range(0, self.size, request):
            parts.append(await self.read(offset, request))
            await step()
        return b"".join(parts)


def fetched(servers: Servers) -> int:
    return sum(server.read_bytes for server in servers.values())


def stored(extents: Sequence[Extent]) -> int:
    return sum(
        {
            extent.place.offset + extent.place.container: extent.place.stored for extent in extents
        }.values()
    )


@pytest.mark.sweep
@pytest.mark.parametrize("redundancy", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize(
    ("make", "level"), [(random_bytes, 0), (compressible, 3)], ids=["plain", "packed"]
)
@pytest.mark.parametrize("verify", [False, True], ids=["", "verified"])
async def test_what_files_share_is_fetched_once(servers, tmp_path, redundancy, make, level, verify):
    with shelf(servers, tmp_path, verify, redundancy) as made:
        chunks = [make(length) for length in (4 * MIB, 200_001, MIB, 100, 700_077)]
        extents = await share(made, chunks, level)
        files = [File(made, extents) for _ in range(READERS)]
        before, contents = fetched(servers), {}

        async def read(number: int) -> None:
            contents[number] = await files[number].read_all(300_000)

        async with trio.open_nursery() as readers:
            for number in range(len(files)):
                readers.start_soon(read, number)
        await servers.cache.settle()
        assert all(content == b"".join(chunks) for content in contents.values())
        # Headers, and records of files, and what is read by the block beside a range that was read
        # by itself before.
        assert stored(extents) <= fetched(servers) - before <= MOST * stored(extents)


async def test_in_any_order_and_beside_chunks_of_their_own(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        extents = await share(made, [random_bytes(500_000 + number) for number in range(12)])
        orders = [random.Random(seed).sample(extents, 9) for seed in range(READERS)]
        before = fetched(servers)
        async with trio.open_nursery() as readers:
            for order in orders:
                readers.start_soon(File(made, order).read_all, 131_072)
        await servers.cache.settle()
        assert fetched(servers) - before <= MOST * stored(extents)


async def test_who_comes_later_finds_it_in_memory(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        extents = await share(made, [random_bytes(MIB - number) for number in range(8)])
        first = await File(made, extents).read_all(MIB)
        before = fetched(servers)
        assert await File(made, extents).read_all(MIB) == first
        assert fetched(servers) == before


async def test_a_small_read_does_not_fetch_a_whole_chunk(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        extents = await share(made, [random_bytes(4 * MIB)])
        place = extents[0].place
        for offset in (3000, 1_000_000, 50_000, 2_000_000, 700_000):  # nothing in common
            await made.files.read(place.container, offset, memoryview(bytearray(1)))
            await servers.cache.settle()
            servers.cache.invalidate((place.server, 0, place.container))
        for server in servers.values():
            server.read_bytes = 0
        assert (
            await File(made, extents).read(3 * MIB, 4096)
            == random_bytes(4 * MIB)[3 * MIB : 3 * MIB + 4096]
        )
        assert fetched(servers) == 4096


async def test_a_reader_that_is_cancelled_leaves_the_others(servers, tmp_path):
    with shelf(servers, tmp_path) as made:
        data = random_bytes(2 * MIB)
        extents = await share(made, [data])
        began, go_on = trio.Event(), trio.Event()
        read_from = made.files.read

        async def slowly(container: int, offset: int, target: memoryview) -> None:
            began.set()
            await go_on.wait()
            await read_from(container, offset, target)

        made.files.read_now, made.files.read = lambda *_: False, slowly
        contents = []

        async def read() -> None:
            contents.append(await File(made, extents).read_all(MIB))

        async with trio.open_nursery() as readers:
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as cancelled:
                    cancelled.start_soon(read)
                    await began.wait()
                    for _ in range(2):
                        readers.start_soon(read)
                    await trio.testing.wait_all_tasks_blocked()
                    scope.cancel()
            go_on.set()
        assert contents == [data, data]


# --- chunks in the read cache ---

UNIT = 64 << 10
"""The smallest buffer, and what a chunk is long here."""


class Chunks:
    """Chunks of 64 KiB, one in each container. ``asked``: what was fetched, by number."""

    def __init__(self, budget: Budget) -> None:
        self.cache = ReadCache(budget)
        self.asked: list[int] = []

    async def get(self, number: int) -> memoryview:
        source = FilledSource(number, UNIT, partial(self._load, number))
        found = self.cache.find(number, 4096, UNIT)
        return await (found or self.cache.start_whole(source, 4096, UNIT)).bytes()

    async def _load(self, number: int, memory: memoryview, offset: int) -> int:
        self.asked.append(number)
        await trio.lowlevel.checkpoint()
        memory[:] = bytes([number % 256]) * len(memory)
        return len(memory)

    def has(self, number: int) -> bool:
        return self.cache.peek(number, 4096) is not None


@pytest.mark.sweep
@pytest.mark.parametrize(("lag", "most"), [(60, 1.0), (120, 1.0), (200, 2.0)])
async def test_readers_who_drift_apart_have_chunks_fetched_once(lag, most):
    """An eighth of the budget is 32 chunks, a half 128."""
    chunks, follower = Chunks(Budget(16 * MIB)), 0
    for leader in range(600):
        await chunks.get(leader)
        if leader % 3 or leader - follower >= lag:  # falls behind, until it is that far
            assert (await chunks.get(follower))[0] == follower % 256
            follower += 1
    for number in range(follower, 600):
        await chunks.get(number)
    assert len(chunks.asked) <= most * 600


async def test_fewer_chunks_are_kept_where_nobody_follows():
    chunks = Chunks(Budget(16 * MIB))
    for leader in range(300):
        await chunks.get(leader)
        await chunks.get(max(leader - 50, 0))
    assert chunks.cache.status()["cached_bytes"] == 8 * MIB
    for number in range(300, 700):
        await chunks.get(number)
    assert sum(map(chunks.has, range(700))) == 32


async def test_chunks_give_way_to_who_needs_memory():
    budget = Budget(16 * MIB)
    chunks = Chunks(budget)
    own = budget.used
    for number in range(1, 5):
        assert (await chunks.get(number))[0] == number
    assert budget.used == own + 4 * UNIT
    assert budget.try_reserve(budget.total - own)
    assert not any(map(chunks.has, range(1, 5)))
    view = await chunks.get(1)  # there is no memory for it: it is handed out all the same
    assert view[0] == 1 and not chunks.has(1)
    budget.release(budget.total - own)


async def test_a_chunk_that_reads_by_way_of_the_cache_takes_none_of_its_own_memory():
    """Else many would hold what each of them is waiting for."""
    budget, read = Budget(16 * MIB), []
    cache = ReadCache(budget)
    assert budget.try_reserve(budget.free)

    async def load(memory: memoryview, offset: int) -> int:
        piece = await cache.fetch(Object(), 0, UNIT, UNIT)
        memory[:] = piece
        return len(memory)

    async def get(number: int) -> None:
        read.append(len(await cache.start_whole(FilledSource(number, UNIT, load), 0, UNIT).bytes()))

    async with trio.open_nursery() as readers:
        for number in range(200):  # in the 4 MiB of its own there are 64
            readers.start_soon(get, number)
    assert read == [UNIT] * 200


# --- those who follow the first reader past the page cache ---


class Object:
    """An object that is there at once."""

    name, cause, block, busy = "object", "data server 0", 64 << 10, False

    def __init__(self) -> None:
        self.requests: list[int] = []

    def start(
        self, tell: Callable[[int | BaseException], None], buffer: memoryview, offset: int
    ) -> None:
        self.requests.append(offset // self.block)
        tell(len(buffer))


@pytest.mark.parametrize(("lag", "most"), [(15, 1.0), (60, 1.3), (300, 2.0)])
async def test_readers_some_way_apart_have_blocks_fetched_once(lag, most):
    """An eighth of the budget is 32 blocks, a half 128. In front of the second reader is what was
    dropped before it came, and what it has fetched again takes half of the room."""
    cache, source, count = ReadCache(Budget(4 * BLOCK_MAX)), Object(), 600
    end = count * Object.block
    for number in range(count + lag):
        for index in (number, number - lag):
            if 0 <= index < count:
                await cache.fetch(source, index * Object.block, Object.block, end)
    assert len(source.requests) / count <= most


@pytest.mark.parametrize("lag", [60, 90, 120])
async def test_readers_who_drift_apart_have_blocks_fetched_once(lag):
    cache, source, count = ReadCache(Budget(4 * BLOCK_MAX)), Object(), 600
    follower, end = 0, count * Object.block
    for leader in range(count):
        await cache.fetch(source, leader * Object.block, Object.block, end)
        if leader % 3 or leader - follower >= lag:
            await cache.fetch(source, follower * Object.block, Object.block, end)
            follower += 1
    for number in range(follower, count):
        await cache.fetch(source, number * Object.block, Object.block, end)
    assert len(source.requests) == count


async def test_little_is_kept_where_nobody_follows():
    cache, source = ReadCache(Budget(4 * BLOCK_MAX)), Object()
    for number in range(600):
        await cache.fetch(source, number * Object.block, Object.block, 600 * Object.block)
    assert cache.status()["cached_bytes"] == 2 * MIB
    for number in range(600, 800):
        await cache.fetch(source, number * Object.block, Object.block, 800 * Object.block)
        await cache.fetch(source, (number - 50) * Object.block, Object.block, 800 * Object.block)
    assert cache.status()["cached_bytes"] == 8 * MIB
    for number in range(1000, 1600):
        await cache.fetch(source, number * Object.block, Object.block, 1600 * Object.block)
    assert cache.status()["cached_bytes"] == 2 * MIB
