"""Burst copies against a bytes oracle, on a memory filesystem and on a disk; who may lease them,
and when.
"""

import errno
import mmap
import os
import random

import pytest
import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.tier import BATCH, KEEP_S, Spares
from aifs.core import files
from aifs.core.errors import NoSpace, NoSuchAddress, Unavailable
from aifs.data.objects.object_set import delete_batch
from aifs.data.servers import Servers
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from tests.support.data_servers import STORE, failing, hooked, list_window, make_server, open_below


@pytest.fixture
async def device(place):
    servers = Servers({BURST_FIRST: make_server(place / "burst", 0, role="burst")}, STORE)
    servers.check_identity()
    server = servers[BURST_FIRST]
    server.pool = servers.buffers
    yield server
    servers.close()
    assert open_below(place) == []


def make(device, copy_id: int = 1) -> BurstCopy:
    return BurstCopy(device, copy_id, device.pool, device.create_object((0, copy_id)))


def reopen(device, copy_id: int = 1) -> BurstCopy:
    return BurstCopy(device, copy_id, device.pool)


def path_of(copy: BurstCopy) -> str:
    return copy.device.where((0, copy.id))


@pytest.mark.parametrize("seed", range(4))
async def test_it_holds_what_was_written(device, seed):
    rng = random.Random(seed)
    copy, oracle = make(device), bytearray()
    for _ in range(150):
        offset, length = rng.randrange(200_000), rng.randrange(1, 70_000)
        match rng.randrange(6):
            case 0 | 1:
                data = rng.randbytes(length)
                await copy.write(offset, data)
                oracle.extend(bytes(max(0, offset + length - len(oracle))))
                oracle[offset : offset + length] = data
            case 2:
                await copy.truncate(offset)
                del oracle[offset:]
                oracle.extend(bytes(offset - len(oracle)))
            case 3:
                await copy.allocate(files.PUNCH_HOLE | files.KEEP_SIZE, offset, length)
                gone = oracle[offset : offset + length]
                oracle[offset : offset + length] = bytes(len(gone))
            case 4:
                await copy.allocate(0, offset, length)
                oracle.extend(bytes(max(0, offset + length - len(oracle))))
            case 5:
                if rng.random() < 0.3:
                    await copy.sync()
                    copy.close()
                    copy = reopen(device)
        assert bytes(await copy.read(offset, length)) == oracle[offset : offset + length]
        assert copy.stat().st_size == len(oracle)
    copy.close()


async def test_reading_at_and_behind_the_end(device):
    copy = make(device)
    await copy.write(0, b"abc")
    assert [bytes(await copy.read(offset, 10)) for offset in (0, 2, 3, 99)] == [
        b"abc",
        b"c",
        b"",
        b"",
    ]
    copy.close()


async def test_holes_are_found(device):
    copy = make(device)
    await copy.truncate(1 << 20)
    await copy.write(512 << 10, bytes(4096))
    assert await copy.seek(0, os.SEEK_DATA) == 512 << 10
    assert await copy.seek(512 << 10, os.SEEK_HOLE) == (512 << 10) + 4096
    for offset in ((512 << 10) + 4096, 2 << 20):
        with pytest.raises(NoSuchAddress):
            await copy.seek(offset, os.SEEK_DATA)
    assert device.state == "ok"
    copy.close()


async def test_ranges_are_copied_up_to_the_end_of_the_source(device):
    source, target = make(device, 1), make(device, 2)
    data = random.Random(0).randbytes(300_000)
    await source.write(0, data)
    assert await target.copy_range(source, 100_000, 5, 1 << 30) == 200_000
    assert bytes(await target.read(0, 1 << 20)) == bytes(5) + data[100_000:]
    with hooked():
        assert await target.copy_range(source, 299_999, 0, 10) == 1
    source.close()
    target.close()


async def test_the_mtime_stays_until_the_next_write(device):
    copy = make(device)
    await copy.write(0, b"x")
    await copy.set_mtime(123_456_789_012_345_678)
    assert copy.stat().st_mtime_ns == 123_456_789_012_345_678
    await copy.write(0, b"y")
    assert copy.stat().st_mtime_ns > 123_456_789_012_345_678
    copy.close()


async def test_a_missing_copy_is_named(device):
    copy = reopen(device, 77)
    for call in (copy.ensure_open, copy.sync, lambda: copy.read(0, 1), lambda: copy.write(0, b"x")):
        with pytest.raises(Unavailable, match=f"^burst directory 0: {path_of(copy)} is missing"):
            await call()
    assert not copy.is_open
    copy.close()


async def test_opening_does_no_io_and_closing_twice_is_closing(device):
    copy = reopen(device, 5)
    assert (copy.server, copy.id, copy.is_open, tuple(copy.place)) == (
        BURST_FIRST,
        5,
        False,
        (BURST_FIRST, 5),
    )
    copy.close()
    copy.close()


async def test_a_full_device_says_so_and_goes_on(device, place):
    copy = make(device)
    with failing("write_at", str(place), errno.ENOSPC), pytest.raises(NoSpace):
        await copy.write(0, b"x")
    assert device.state == "ok"
    copy.close()


async def test_a_failed_sync_fails_for_good(device, place):
    with hooked():
        copy = make(device)
        await copy.write(0, b"x")
        with failing("sync_file", str(place)), pytest.raises(Unavailable):
            await copy.sync()
        with pytest.raises(Unavailable, match="bytes were lost earlier"):
            await copy.sync()
        copy.close()


async def test_the_first_sync_of_an_inherited_copy_covers_its_name(device, place):
    for copy_id in (1, 2):  # made by an earlier process
        path = device.where((0, copy_id))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        files.close_file(files.open_file(path, create=True))
    copy, neighbour, synced = reopen(device), reopen(device, 2), []
    with hooked(lambda op, path: synced.append(path) if op == "sync_dir" else None):
        await copy.sync()
        names, synced[:] = list(synced), []
        await copy.sync()
        await neighbour.sync()
        assert synced == []
        make(device, 3).close()
        await copy.sync()
    assert os.path.dirname(path_of(copy)) in names
    assert device.address in names
    assert os.path.dirname(path_of(copy)) in synced
    copy.close()
    neighbour.close()


# --- leases ---------------------------------------------------------------------------------------


async def test_nobody_writes_a_leased_copy(device):
    copy = make(device)
    await copy.write(0, b"x")
    assert not copy.lease()
    await copy.release_writers()
    assert copy.lease()
    assert copy.lease()
    assert copy.unlease()
    assert not copy.unlease()
    assert copy.lease()
    await copy.write(0, b"y")  # ends the lease, and waits for nobody
    assert not copy.unlease()
    copy.close()


async def test_a_reader_is_no_writer(device):
    copy = make(device)
    fd = os.open(path_of(copy), os.O_RDONLY)
    assert copy.lease()
    os.close(fd)
    copy.close()


async def test_a_writable_mapping_outlives_its_descriptor(device):
    copy = make(device)
    await copy.truncate(4096)
    await copy.release_writers()
    fd = os.open(path_of(copy), os.O_RDWR)
    mapping = mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
    os.close(fd)
    assert not copy.lease()
    mapping[0] = 7
    mapping.close()
    assert copy.lease()
    assert bytes(await copy.read(0, 1)) == b"\7"
    copy.close()


async def test_a_lease_that_was_broken_is_not_whole(device):
    """The signal that announces it does not kill us."""
    copy = make(device)
    assert copy.lease()
    with pytest.raises(BlockingIOError):
        os.open(path_of(copy), os.O_RDWR | os.O_NONBLOCK)
    assert not copy.unlease()
    os.close(os.open(path_of(copy), os.O_RDWR | os.O_NONBLOCK))
    copy.close()


async def test_closing_ends_the_lease_though_others_have_the_descriptor(device):
    copy = make(device)
    other = os.dup(await copy.backing())  # as passthrough does
    assert copy.lease()
    copy.close()
    os.close(os.open(path_of(copy), os.O_RDWR | os.O_NONBLOCK))
    os.close(other)


# --- what data servers and burst directories share ------------------------------------------------


async def test_copies_are_listed_and_deleted_as_objects_are(tmp_path):
    servers = Servers({BURST_FIRST: make_server(tmp_path / "burst", 0, role="burst")}, STORE)
    servers.check_identity()
    device = servers[BURST_FIRST]
    for copy_id in (5, 600):
        os.close(device.create_object((0, copy_id)))
    assert await list_window(servers, 0, 1000) == [(BURST_FIRST, 0, 5), (BURST_FIRST, 0, 600)]
    assert await delete_batch(servers, {5: (0, Striped(4096, (BURST_FIRST,)))}) == {}
    assert await list_window(servers, 0, 1000) == [(BURST_FIRST, 0, 600)]
    assert servers.capacity() == ()
    assert [(row["role"], row["id"]) for row in await servers.status()] == [("burst", 0)]
    servers.close()


async def test_spare_files_are_made_ahead_and_removed_again(device):
    ids = iter(range(1, 10_000))

    async def take_id() -> int:
        return next(ids)

    spares, taken = Spares(device, take_id), []
    for _ in range(3 * BATCH):
        copy_id, fd = await spares.take()
        os.close(fd)
        taken.append(copy_id)
    assert len(set(taken)) == 3 * BATCH
    spares.stop()
    await spares.close()
    assert sorted(oid for _, oid in device.list_range(0, 10_000)) == sorted(taken)


async def test_the_end_does_not_wait_for_spare_files_that_no_thread_could_make(device, monkeypatch):
    async def take_id() -> int:
        return 1

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    spares = Spares(device, take_id)
    with monkeypatch.context() as patch:
        patch.setattr(device.workers, "start", refuse)
        with pytest.raises(RuntimeError):
            await spares.take()
    spares.stop()
    with trio.fail_after(5):
        await spares.close()


async def test_spare_files_that_nobody_takes_are_removed(device, monkeypatch):
    ids = iter(range(1, 10_000))

    async def take_id() -> int:
        return next(ids)

    spares = Spares(device, take_id)
    copy_id, fd = await spares.take()
    os.close(fd)
    spares.expire()
    monkeypatch.setattr("aifs.burst.tier.KEEP_S", -KEEP_S)
    await spares.refilled()
    spares.expire()
    assert spares.empty
    device.workers.close()
    assert device.list_range(0, 10_000) == [(0, copy_id)]


async def test_spare_files_cannot_be_made_on_a_full_device(device, place):
    async def take_id() -> int:
        return 1

    spares = Spares(device, take_id)
    with (
        failing("open_file", str(place / "burst" / "objects"), errno.ENOSPC),
        pytest.raises(NoSpace),
    ):
        await spares.take()
    spares.stop()
    await spares.close()
    assert device.list_range(0, 10_000) == []
