"""Files that are nearly all hole, of any size: what each operation costs is bounded by the bytes
that exist.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest

from aifs.core import files
from aifs.core.errors import NoSuchAddress, NotSupported
from aifs.data.server import DataServer
from aifs.files import containers, transitions
from aifs.files.ranges import KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE
from aifs.files.types import ROOT, SetAttr
from aifs.layout.interleaved import Interleaved
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.keys import ROOT_INO
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.vfs.filesystem import Filesystem
from tests.support import modes
from tests.support.points import once
from tests.support.stores import (
    ask,
    drained,
    moved_out,
    numbers,
    opened,
    overwrite,
    put,
    require_sound,
    whole,
    write_file,
)
from tests.support.stores import fs as fs

HUGE = 15 << 40
SPOTS = {0: b"begin", (1 << 40) + 12345: b"middle", HUGE - 3: b"end"}
BOUND = 2000
"""Calls to servers, or requests of the metadata, of one operation: far fewer than pieces of the
file."""

WAITING = modes.WAITING
LAYOUTS = {
    "striped": modes.STRIPED,
    "replicated": modes.REPLICAS,
    "coded": modes.CODED,
    "interleaved": modes.INTERLEAVED,
    "interleaved-replicated": modes.INTERLEAVED | modes.REPLICAS,
    "interleaved-coded": modes.INTERLEAVED | modes.CODED,
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> dict[str, object]:
    return WAITING | request.param


class Counted:
    def __init__(self) -> None:
        self.calls = self.requests = 0


@pytest.fixture
def bounded(monkeypatch: pytest.MonkeyPatch):
    """A context in which no more than BOUND calls go to servers, and as many requests to the
    metadata."""
    counted = Counted()
    call, view, transact = DataServer.call, LmdbEngine.view, LmdbEngine.transact

    def counted_call(*args):
        counted.calls += 1
        return call(*args)

    async def counted_view(*args):
        counted.requests += 1
        return await view(*args)

    async def counted_transact(*args):
        counted.requests += 1
        return await transact(*args)

    monkeypatch.setattr(DataServer, "call", counted_call)
    monkeypatch.setattr(LmdbEngine, "view", counted_view)
    monkeypatch.setattr(LmdbEngine, "transact", counted_transact)

    @contextmanager
    def within(bound: int = BOUND) -> Iterator[None]:
        counted.calls = counted.requests = 0
        yield
        assert counted.calls <= bound and counted.requests <= bound

    return within


async def write_spots(fs: Filesystem, name: bytes) -> int:
    (handle, *_), inode = await fs.create(ROOT_INO, name, 0o644, os.O_RDWR, ROOT)
    for offset, data in SPOTS.items():
        await fs.write(handle, offset, data)
    await fs.release(handle)
    return inode.ino


async def require_spots(fs: Filesystem, ino: int, spots: dict[int, bytes] = SPOTS) -> None:
    """The file has these bytes, and elsewhere zeros."""
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    for offset, data in spots.items():
        assert bytes(await fs.read(handle, offset, len(data))) == data
        if offset:
            assert bytes(await fs.read(handle, offset - 100, 100)) == bytes(100)
    assert bytes(await fs.read(handle, 4 << 40, 5000)) == bytes(5000)
    await fs.release(handle)


async def data_of(fs: Filesystem, ino: int) -> list[tuple[int, int]]:
    """What SEEK_DATA and SEEK_HOLE tell."""
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    found, at = [], 0
    while True:
        try:
            start = await fs.lseek(handle, at, os.SEEK_DATA)
        except NoSuchAddress:
            break
        at = await fs.lseek(handle, start, os.SEEK_HOLE)
        found.append((start, at))
    await fs.release(handle)
    return found


def covers(ranges: list[tuple[int, int]], spots: dict[int, bytes] = SPOTS) -> bool:
    return all(
        any(start <= offset and offset + len(data) <= end for start, end in ranges)
        for offset, data in spots.items()
    )


async def test_what_each_operation_costs_is_bounded_by_the_bytes_there_are(
    directory, layout, bounded
):
    async with opened(directory, layout, servers=4, sound=False) as fs:
        with bounded():
            ino = await write_spots(fs, b"f")
        with bounded():
            await drained(fs, ino)
        with bounded():
            assert await fs.evictor.evict(ino)
        with bounded():
            await require_spots(fs, ino)
        with bounded():
            ranges = await data_of(fs, ino)
        assert covers(ranges) and sum(end - start for start, end in ranges) < 64 << 20
        with bounded():
            assert await fs.stager.stage(ino)
        await require_spots(fs, ino)
        assert (await fs.getattr(ino)).blocks < 1 << 17
        assert await fs.evictor.evict(ino)

        with bounded():
            await ask(fs, ino, "info")
        with bounded():
            fs.scrub.start()
            await fs.scrub.wait()
        assert fs.scrub.status()["flaws"] == 0

        copy = await write_file(fs, b"copy")
        with bounded():
            source, *_ = await fs.open(ino, os.O_RDONLY)
            target, *_ = await fs.open(copy, os.O_RDWR)
            done = 0
            while step := await fs.copy_file_range(source, done, target, done, 1 << 62):
                done += step
            await fs.release(source)
            await fs.release(target)
        assert done == HUGE
        await require_spots(fs, copy)
        assert (await fs.getattr(copy)).blocks < 1 << 17

        with bounded():
            await overwrite(fs, ino, HUGE // 2 + 7, b"x")
        with bounded():
            await fs.setattr(ino, SetAttr(size=HUGE + 12345), ROOT)
        with bounded():
            await fs.setattr(ino, SetAttr(size=HUGE), ROOT)
        await require_spots(fs, ino, SPOTS | {HUGE // 2 + 7: b"x"})
        with bounded():
            await moved_out(fs, ino)
        with bounded():
            await fs.setattr(ino, SetAttr(size=HUGE // 2), ROOT)
        with bounded():
            await fs.unlink(ROOT_INO, b"f")
            await fs.collector.drain()
        await moved_out(fs, await write_spots(fs, b"kept"))
        staged = await write_spots(fs, b"staged")
        await drained(fs, staged)
    with bounded():
        await require_sound(modes.config_of(directory))


@pytest.mark.parametrize("kind", ["replicated", "coded"])
async def test_a_protected_one_is_made_whole_and_written_in_place_it_is_protected_again(
    directory, bounded, kind
):
    async with opened(directory, WAITING | LAYOUTS[kind], servers=4) as fs:
        ino = await write_spots(fs, b"f")
        await moved_out(fs, ino)
        inode = await fs.getattr(ino)
        for column, number in enumerate(inode.layout.servers):
            os.unlink(fs.store.servers[number].where((ino, inode.oid)))
            with bounded():
                assert await fs.rebuild.request(inode.oid, ino, [column])
                await whole(fs)
            await require_spots(fs, ino)
        with bounded():
            fs.scrub.start()
            await fs.scrub.wait()
        assert fs.scrub.status()["flaws"] == 0

        await put(fs, ino, "tier", "capacity", ROOT)
        handle, *_ = await fs.open(ino, os.O_RDWR)
        await fs.write(handle, HUGE // 2, b"x")
        await fs.fsync(handle)
        await fs.release(handle)
        spots = SPOTS | {HUGE // 2: b"x"}
        with bounded():
            await whole(fs)
        if not (inode := await fs.getattr(ino)).in_burst:
            assert inode.layout.is_protected
        await require_spots(fs, ino, spots)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", [PUNCH_HOLE | KEEP_SIZE, ZERO_RANGE, ZERO_RANGE | KEEP_SIZE])
async def test_punching_frees_space_on_the_servers(directory, layout, bounded, mode):
    async with opened(directory, layout, servers=4) as fs:
        ino = await write_spots(fs, b"f")
        await put(fs, ino, "tier", "capacity", ROOT)
        await moved_out(fs, ino)
        await overwrite(fs, ino, 3 << 40, os.urandom(8 << 20))
        await moved_out(fs, ino)
        before = (await fs.getattr(ino)).blocks
        handle, *_ = await fs.open(ino, os.O_RDWR)
        with bounded():
            await fs.fallocate(handle, mode, 1 << 40, HUGE - (1 << 41))
        assert bytes(await fs.read(handle, 3 << 40, 1 << 20)) == bytes(1 << 20)
        await fs.fsync(handle)
        await fs.release(handle)
        left = {offset: data for offset, data in SPOTS.items() if offset != (1 << 40) + 12345}
        await require_spots(fs, ino, left)
        assert (await fs.getattr(ino)).blocks <= before - (8 << 20) // 512
        ranges = await data_of(fs, ino)
        assert covers(ranges, left) and all(
            end <= 1 << 40 or start >= HUGE - (1 << 41) for start, end in ranges
        )


async def test_where_servers_cannot_punch_zeros_are_written_where_data_is(
    directory, layout, bounded, monkeypatch
):
    import errno

    def cannot(*args):
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))

    async with opened(directory, layout, servers=4) as fs:
        ino = await write_spots(fs, b"f")
        await put(fs, ino, "tier", "capacity", ROOT)
        await moved_out(fs, ino)
        handle, *_ = await fs.open(ino, os.O_RDWR)
        await fs.write(handle, 2 << 40, b"y" * 100_000)
        monkeypatch.setattr(files, "change_allocation", cannot)
        with bounded():
            await fs.fallocate(handle, PUNCH_HOLE | KEEP_SIZE, 1 << 40, HUGE - (1 << 41))
        assert bytes(await fs.read(handle, 2 << 40, 100_000)) == bytes(100_000)
        await fs.release(handle)
        await require_spots(fs, ino, {0: b"begin", HUGE - 3: b"end"})


@pytest.mark.store({"burst.capacity": "1MiB", "burst.reserve": "0"})
async def test_space_that_cannot_be_reserved_is_not_promised(fs: Filesystem) -> None:
    """On data servers, by policy or because the burst tier is full."""
    await put(fs, ROOT_INO, "tier", "capacity", ROOT)
    handle, inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
    for mode in (0, KEEP_SIZE):
        with pytest.raises(NotSupported):
            await fs.fallocate(handle.handle, mode, 0, 10 << 30)
    assert (await fs.getattr(inode.ino)).size == 0
    await fs.write(handle.handle, 0, b"x" * 100_000)
    with pytest.raises(NotSupported):
        await fs.fallocate(handle.handle, 0, 0, 200_000)
    await fs.fallocate(handle.handle, ZERO_RANGE, 0, 200_000)
    await fs.fallocate(handle.handle, PUNCH_HOLE | KEEP_SIZE, 0, 200_000)
    assert (await fs.getattr(inode.ino)).size == 200_000
    await fs.release(handle.handle)
    await put(fs, ROOT_INO, "tier", "default", ROOT)
    handle, inode = await fs.create(ROOT_INO, b"g", 0o644, os.O_RDWR, ROOT)
    await fs.fallocate(handle.handle, 0, 0, 200_000)
    assert (await fs.getattr(inode.ino)).blocks * 512 >= 200_000
    await fs.release(handle.handle)
    with patch.object(fs.tier, "admit", lambda *_: None):  # it is full
        handle, inode = await fs.create(ROOT_INO, b"h", 0o644, os.O_RDWR, ROOT)
        with pytest.raises(NotSupported):
            await fs.fallocate(handle.handle, 0, 0, 200_000)
        await fs.release(handle.handle)


@pytest.mark.parametrize("changes", [False, True], ids=["unchanged", "changed"])
async def test_a_long_chunk_list_is_recorded_in_parts(directory, monkeypatch, changes):
    """No transaction takes long; a file that changes meanwhile gives up what is on record of its
    list."""
    for module in (containers, transitions):
        monkeypatch.setattr(module, "LISTED_AT_ONCE", CHUNKS_PER_RECORD)
    spots = {number * (40 << 20): b"%d" % number * 1000 for number in range(8)}
    async with opened(directory, WAITING | modes.INTERLEAVED, servers=2) as fs:
        (handle, *_), inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
        ino = inode.ino
        for offset, data in spots.items():
            await fs.write(handle, offset, data)
        await fs.release(handle)
        if changes:
            once("vfs.containers.listed", lambda: fs.io.table.open[ino].cancel_lease())
        await drained(fs, ino)
        assert await fs.evictor.evict(ino)
        inode = await fs.getattr(ino)
        assert isinstance(inode.layout, Interleaved)
        handle, *_ = await fs.open(ino, os.O_RDONLY)
        for offset, data in spots.items():
            assert bytes(await fs.read(handle, offset, len(data))) == data
        await fs.release(handle)
        await fs.collector.drain()
        assert not await numbers(fs, b"y")


async def test_holes_take_no_space_of_the_burst_tier(directory):
    """Else one file of 15 TiB has all others evicted, and new ones sent to the data servers."""
    async with opened(directory, WAITING | {"burst.capacity": "64MiB"}, servers=2) as fs:
        other = await write_file(fs, b"other", bytes(1 << 20))
        await drained(fs, other)
        sparse = await write_spots(fs, b"sparse")
        await fs.tier.look()
        assert fs.tier.admit("", 1 << 20) is not None and not fs.tier.needs_eviction()
        await drained(fs, sparse)
        await fs.tier.look()
        assert fs.tier.admit("", 1 << 20) is not None and not fs.tier.needs_eviction()
    async with opened(directory) as fs:
        await fs.tier.look()
        assert fs.tier.admit("", 1 << 20) is not None and not fs.tier.needs_eviction()
        await fs.evictor.evict(sparse)
        assert await fs.stager.stage(sparse)
        await fs.tier.look()
        assert fs.tier.admit("", 1 << 20) is not None and not fs.tier.needs_eviction()
