"""What a change of form makes is a plain value: it can be pickled, and carried out where there is
nothing but the servers.
"""

import os
import pickle
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.making import ColumnMaking, InChunks, Made, Making, NewObjects, Origin, carry_out
from aifs.core.errors import Unavailable
from aifs.data.checks import Untold, digests_of
from aifs.data.containers.files import ContainerEntry
from aifs.data.objects.holes import InObjects
from aifs.data.objects.object_set import ObjectSet, Reading
from aifs.layout.interleaved import Extent, Interleaved, Location, container_layout
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.chunks import encode_list
from aifs.meta.forms import describe_objects
from aifs.meta.kv import Transaction
from aifs.meta.records import Copy, Inode
from aifs.vfs import Filesystem
from tests.support.maker import make_elsewhere
from tests.support.stores import drained, moved_out, opened, write_file
from tests.support.stores import fs as fs

MIB = 1 << 20
DATA = os.urandom(5 * MIB) + bytes(4 * MIB) + os.urandom(3 * MIB + 4321)
KINDS = {
    "striped": {},
    "replicated": {"layout.replicas": "2"},
    "coded": {"layout.ec": "2+1"},
    "interleaved": {"layout.kind": "interleaved"},
}
PLAIN = Striped(65_536, (0, 1, 2))
TARGETS = (PLAIN, Striped(MIB, (2, 0), 2), Striped(65_536, (1, 2, 0), 1, 1))
PLACE = Location(1, 70, 4096, 900, 1000, 1, b"d" * 32)
ORIGINS: list[Origin] = [
    Copy(0x8000, 30),
    InObjects(7, 70, Striped(4096, (1, 2, 3), 1, 1), 0b10, b"d" * 64),
    InChunks(
        (Extent(MIB), Extent(1000, PLACE)),
        ((70, ContainerEntry(container_layout((1,)), 5000, 0b1)),),
    ),
    InChunks((Extent(5), Extent(1000, PLACE, True))),
]


@pytest.mark.parametrize("target", [None, Copy(0x8000, 31), NewObjects(7, 71, PLAIN)], ids=str)
@pytest.mark.parametrize("origin", ORIGINS, ids=lambda origin: type(origin).__name__)
def test_it_can_be_pickled(origin, target):
    making = Making(origin, target, 1234, sparse=True, spare=1)
    assert pickle.loads(pickle.dumps(making)) == making


def test_a_column_and_what_is_made_can_be_pickled():
    making = ColumnMaking(InObjects(0, 70, PLAIN, 0b10), 1234, 1, 5, ((0, 100), (200, 300)))
    assert pickle.loads(pickle.dumps(making)) == making
    made = Made(8, b"d" * 32, 0b10, b"bytes", frozenset({1}))
    assert pickle.loads(pickle.dumps(made)) == made


async def origins_of(fs: Filesystem, ino: int) -> list[Origin]:
    """The burst copy of a cached file, and where it lies on the capacity tier."""
    inode = await fs.getattr(ino)
    return [inode.copy, await fs.io.capacity.describe(inode)]


async def read_objects(fs: Filesystem, target: NewObjects, digests: bytes) -> bytes:
    async def load(number: int) -> tuple[int, bytes]:
        return 0, digests

    objects = ObjectSet(
        fs.store.servers, target.layout, target.ino, target.oid, reading=Reading(digests=load)
    )
    data = memoryview(bytearray(len(DATA)))
    await objects.read_into(0, data, len(DATA))
    objects.close()
    return bytes(data)


@asynccontextmanager
async def new_copy(fs: Filesystem) -> AsyncIterator[BurstCopy]:
    copy = await fs.tier.create(fs.tier.admit("", 0), 0)
    async with fs.io.transitions.making(copy.place):
        yield copy
        fs.tier.discard(copy)


async def make(fs: Filesystem, where: str, *makings: Making | ColumnMaking) -> list[Made | None]:
    if where == "elsewhere":
        return await make_elsewhere(makings, fs.store.servers)
    return [await carry_out(making, fs.drain.movers.tools) for making in makings]


HERE_AND_ELSEWHERE = pytest.mark.parametrize("where", ["here", "elsewhere"])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS)
@HERE_AND_ELSEWHERE
async def test_new_objects_and_copies(directory: Path, kind: str, where: str) -> None:
    async with opened(directory, KINDS[kind], servers=3) as fs, AsyncExitStack() as stack:
        ino = await write_file(fs, b"file", DATA)
        await drained(fs, ino)
        origins = await origins_of(fs, ino)
        makings = [
            Making(origin, NewObjects(ino, await fs.ids.take(), layout), len(DATA), sparse=True)
            for origin in origins
            for layout in TARGETS
        ]
        for making in makings:
            await stack.enter_async_context(fs.io.transitions.making(making.target))
        copy = await stack.enter_async_context(new_copy(fs))
        in_copy = Making(origins[1], copy.place, len(DATA), sparse=True)
        *of_objects, of_copy = await make(fs, where, *makings, in_copy)
        assert of_copy == Made()
        assert await copy.read(0, len(DATA) + 1) == DATA
        for making, made in zip(makings, of_objects, strict=True):
            assert (made.digests, made.unread) == (digests_of(DATA), 0)
            assert len(DATA) - 4 * MIB <= made.blocks * 512 <= len(DATA) + MIB
            assert await read_objects(fs, making.target, made.digests) == DATA


@pytest.mark.sweep
@HERE_AND_ELSEWHERE
@pytest.mark.parametrize("kind", ["coded", "replicated", "container"])
async def test_columns(directory: Path, kind: str, where: str) -> None:
    """Where it is copied from, and where others have to tell it."""
    settings = KINDS.get(kind, KINDS["interleaved"] | KINDS["replicated"]) | {"layout.count": "3"}
    async with opened(directory, settings, servers=9) as fs:
        servers = fs.store.servers
        ino = await write_file(fs, b"file", DATA)
        await drained(fs, ino)
        _, origin = await origins_of(fs, ino)
        size = len(DATA)
        if isinstance(origin, InChunks):
            container, entry = origin.containers[0]
            origin, size = InObjects(0, container, entry.layout, entry.unread), entry.length
        used = origin.layout.servers
        number = next(server.id for server in servers.capacity() if server.id not in used)
        for unread in (0, 1):
            making = ColumnMaking(origin._replace(unread=unread), size, 0, number)
            assert await make(fs, where, making) == [Made()]
            whole, made = (
                Path(servers[server].where((origin.ino, origin.oid)))
                for server in (used[0], number)
            )
            assert made.read_bytes() == whole.read_bytes()
            made.unlink()


@pytest.mark.sweep
@pytest.mark.store({"layout.inline_limit": "0"})
@HERE_AND_ELSEWHERE
async def test_few_bytes(fs: Filesystem, where: str) -> None:
    ino = await write_file(fs, b"file", b"few bytes")
    await drained(fs, ino)
    origin, _ = await origins_of(fs, ino)
    assert await make(fs, where, Making(origin, None, 9)) == [Made(data=b"few bytes")]


async def test_wrong_bytes_are_refused_by_the_checksums_that_it_brings(fs: Filesystem) -> None:
    ino = await write_file(fs, b"file", DATA)
    await moved_out(fs, ino)
    origin = await fs.io.capacity.describe(await fs.getattr(ino))
    wrong = origin._replace(digests=digests_of(bytes(len(DATA))))
    async with new_copy(fs) as copy:
        with pytest.raises(Untold, match="do not have their checksum"):
            await carry_out(Making(wrong, copy.place, len(DATA)), fs.drain.movers.tools)


@pytest.fixture
def long_list() -> Inode:
    """An interleaved file of many chunks, all of which are holes."""
    inode = Inode(7, 0o100644, 0, 0, 1, 0, 1000 * MIB, 0, 0, 0, 0, oid=70)
    inode.layout = Interleaved(MIB)
    return inode


def put_list(tx: Transaction, first: int, record: bytes) -> None:
    tx.put(keys.chunk_list(70, first), record)


async def test_others_have_their_turn_while_a_long_list_is_described(
    directory: Path, long_list: Inode
) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await trio.sleep(0)

    async with opened(directory, sound=False) as fs:
        await fs.store.engine.transact(chunks.put_records, 70, [Extent(MIB)] * 1000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(count)
            assert (await fs.io.capacity.describe(long_list)).extents == (Extent(MIB),) * 1000
            nursery.cancel_scope.cancel()
    assert turns >= 1000 // chunks.CHUNKS_PER_RECORD


def test_all_checksums_of_a_file_are_put_together_at_once() -> None:
    """One after the other, those of a TiB would be copied for a minute and a half."""

    class Record(bytes):
        def __radd__(self, others: bytes) -> bytes:
            raise AssertionError(f"{len(others)} bytes are copied once more")

    whole = [os.urandom(keys.DIGESTS_PER_RECORD * keys.DIGEST_BYTES) for _ in range(3)]
    for records in ([], whole, [*whole, b"d" * keys.DIGEST_BYTES]):
        stored = {
            keys.checksums(70, number * keys.DIGESTS_PER_RECORD): Record(record)
            for number, record in enumerate(records)
        }
        assert describe_objects(SimpleNamespace(get=stored.get), 70) == (0, b"".join(records))


@pytest.mark.store(sound=False)
@pytest.mark.parametrize("count", [500, 512])
async def test_a_list_that_lacks_chunks_is_not_described(fs, long_list, count):
    """Its last record says too little, or nothing."""
    await fs.store.engine.transact(chunks.put_records, 70, [Extent(MIB)] * count)
    await fs.store.engine.transact(put_list, 512, encode_list(512 * MIB, []))
    with pytest.raises(Unavailable, match="damaged|has nothing for byte"):
        await fs.io.capacity.describe(long_list)


@pytest.mark.store(sound=False)
async def test_a_list_whose_extents_overlap_is_not_described(fs, long_list):
    long_list.size = 100 * MIB
    records = [encode_list(start, [Extent(MIB)] * 64) for start in (0, 64 * MIB - 1)]
    for number, record in enumerate(records):
        await fs.store.engine.transact(put_list, 64 * number, record)
    with pytest.raises(Unavailable, match="has two extents for byte"):
        await fs.io.capacity.describe(long_list)


@pytest.mark.sweep
@pytest.mark.store(KINDS["interleaved"])
async def test_chunks_that_have_been_moved_are_described_anew(fs, monkeypatch):
    ino = await write_file(fs, b"file", DATA)
    await moved_out(fs, ino)
    capacity, told = fs.io.capacity, list[Origin]()
    right = await capacity.describe(await fs.getattr(ino))
    gone = [e._replace(place=e.place._replace(container=1 << 40)) for e in right.extents]
    outdated = right._replace(extents=tuple(gone))
    answers = iter([outdated, right])

    async def describe(inode: Inode) -> Origin:
        told.append(next(answers, outdated))
        return told[-1]

    monkeypatch.setattr(capacity, "describe", describe)
    assert await fs.stager.stage(ino)
    assert told == [outdated, right]
    await fs.evictor.evict(ino)
    assert not await fs.stager.stage(ino)
    assert told == [outdated, right, outdated, outdated]
