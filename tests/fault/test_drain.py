"""Draining, staging, eviction, without a mount: what counts when, and what others may do
meanwhile.
"""

import logging
import mmap
import os
import random
import shutil
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import NoSpace, NotFound
from aifs.files.types import ROOT, SetAttr
from aifs.layout.interleaved import Interleaved
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import Copy
from aifs.vfs.filesystem import Filesystem
from tests.support import modes
from tests.support.data_servers import failing, hooked
from tests.support.points import crash, once
from tests.support.powercut import PowerCut, is_crash, make_copies_one_disk
from tests.support.stores import (
    assert_sound,
    drained,
    moved_out,
    numbers,
    overwrite,
    put,
    read_file,
    write_pieces,
)
from tests.support.stores import fs as fs
from tests.support.stores import opened as mounted

SIZES = [0, 1, 2048, 2049, 1 << 20, (1 << 20) + 1, (4 << 20) - 1, (9 << 20) + 12345]
KINDS = [modes.STRIPED, modes.INTERLEAVED]
WAITING = modes.WAITING


async def write_file(
    fs: Filesystem, name: bytes, data: bytes, close: bool = True
) -> tuple[int, int]:
    """Inode number and handle."""
    opened, inode = await fs.create(ROOT_INO, name, 0o600, os.O_RDWR, ROOT)
    await write_pieces(fs, opened.handle, data)
    if close:
        await fs.release(opened.handle)
    return inode.ino, opened.handle


def path_of(fs: Filesystem, copy: Copy) -> str:
    return fs.store.servers[copy.server].where((0, copy.id))


def objects_in(fs: Filesystem) -> list[str]:
    """Paths of the objects on the data servers, containers apart."""
    return sorted(
        path
        for server in fs.store.servers.capacity()
        for top, _, names in os.walk(os.path.join(server.address, "objects"))
        for name in names
        if not (path := os.path.join(top, name)).endswith(".0")
    )


# --- drain ----------------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=["striped", "interleaved"])
async def test_a_drained_file_is_the_same_from_either_tier_and_after_a_remount(directory, kind):
    rng = random.Random(7)
    contents = {f"{size}".encode(): rng.randbytes(size) for size in SIZES}
    async with mounted(directory, modes.ON | kind) as fs:
        inos = {name: (await write_file(fs, name, data))[0] for name, data in contents.items()}
        before = {name: await fs.getattr(ino) for name, ino in inos.items()}
        await drained(fs, *inos.values())
        assert fs.drain.status()["files"] == 0 and not await numbers(fs, b"w")
        for name, data in contents.items():
            inode = await fs.getattr(inos[name])
            assert (
                not inode.in_burst
                and inode.size == len(data)
                and inode.mtime_ns == before[name].mtime_ns
            )
            large = len(data) > 2048
            expected = Interleaved if kind is modes.INTERLEAVED else Striped
            assert isinstance(inode.layout, expected) if large else inode.layout is None
            assert (inode.copy is not None) == large
            assert await read_file(fs, inos[name]) == data
        for ino in inos.values():
            assert await fs.evictor.evict(ino)
        assert not await numbers(fs, b"b")
        for name, data in contents.items():
            assert (await fs.getattr(inos[name])).copy is None
            assert await read_file(fs, inos[name]) == data
    async with mounted(directory) as fs:
        assert str(fs.recovered) == "nothing to recover"
        for name, data in contents.items():
            assert await read_file(fs, inos[name]) == data


@pytest.mark.store(modes.WAITING | {"burst.drain_deadline": "1s"})
async def test_what_is_beyond_the_deadline_is_urgent_though_no_drain_begins(fs: Filesystem) -> None:
    is_urgent = fs.drain.movers.tools.mover.is_urgent
    ino, _ = await write_file(fs, b"f", bytes(1 << 20))
    while not is_urgent():
        await trio.sleep(0.01)
    assert fs.drain.status()["late"]
    await drained(fs, ino)
    assert not is_urgent()


async def test_checksums_are_recorded(directory):
    from blake3 import blake3

    data = random.Random(3).randbytes((5 << 20) + 77)
    async with mounted(directory) as fs:
        ino, _ = await write_file(fs, b"f", data)
        await drained(fs, ino)
        oid = (await fs.getattr(ino)).oid
        records = await fs.store.engine.view(lambda tx: dict(tx.range(*keys.all_checksums(oid))))
        parts = [data[start : start + (1 << 20)] for start in range(0, len(data), 1 << 20)]
        assert records == {
            keys.checksums(oid, 0): b"".join(blake3(part).digest() for part in parts)
        }


@pytest.mark.sweep
async def test_holes_stay_holes(fs: Filesystem) -> None:
    ino, handle = await write_file(fs, b"f", b"begin", close=False)
    await fs.write(handle, 64 << 20, b"end")
    await fs.release(handle)
    await drained(fs, ino)
    inode = await fs.getattr(ino)
    assert inode.size == (64 << 20) + 3 and inode.blocks * 512 <= 128 << 10
    assert await fs.evictor.evict(ino)
    data = await read_file(fs, ino)
    assert data == b"begin".ljust(64 << 20, b"\0") + b"end"
    assert await fs.stager.stage(ino)
    assert os.stat(path_of(fs, (await fs.getattr(ino)).copy)).st_blocks * 512 <= 2 << 20


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=["striped", "interleaved"])
async def test_many_small_files(directory, kind):
    async with mounted(directory, WAITING | kind) as fs:
        contents = [random.Random(n).randbytes(n * 37) for n in range(200)]
        inos = [(await write_file(fs, b"%d" % n, data))[0] for n, data in enumerate(contents)]
        await drained(fs, *inos)
        for ino, data in zip(inos, contents, strict=True):
            assert not (await fs.getattr(ino)).in_burst
            assert await read_file(fs, ino) == data


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=["striped", "interleaved"])
@pytest.mark.parametrize("change", ["write", "truncate", "unlink", "open"])
async def test_a_change_cancels_the_drain_without_a_trace(directory, kind, change):
    data = random.Random(1).randbytes(3 << 20)
    point = "data.append.synced" if kind is modes.INTERLEAVED else "vfs.drain.copied"
    async with mounted(directory, WAITING | kind) as fs:
        ino, handle = await write_file(fs, b"f", data)
        async with trio.open_nursery() as nursery:
            done = trio.Event()

            async def act() -> None:
                match change:
                    case "write" | "open":
                        opened = await fs.open(ino, os.O_RDWR)
                        if change == "write":
                            await fs.write(opened.handle, 5, b"other")
                        await fs.release(opened.handle)
                    case "truncate":
                        await fs.setattr(ino, SetAttr(size=7), ROOT)
                    case "unlink":
                        await fs.unlink(ROOT_INO, b"f")
                        fs.forget([ino])
                done.set()

            calls = once(point, lambda: nursery.start_soon(act))
            # The flip waits for the gate, so the change, which has been started, may overtake it or
            # not.
            fs.drain.request([ino])
            await done.wait()
            await drained(fs, ino)
        assert calls
        if change == "unlink":
            while ino in fs.io.table.open:  # the drain, which nobody waits for any more, has it
                await trio.lowlevel.checkpoint()
            await fs.collector.drain()
            with pytest.raises(NotFound):
                await fs.getattr(ino)
            assert objects_in(fs) == await numbers(fs, b"b") == await numbers(fs, b"g") == []
            return
        expected = {"write": data[:5] + b"other" + data[10:], "truncate": data[:7], "open": data}[
            change
        ]
        inode = await fs.getattr(ino)
        assert not inode.in_burst and await read_file(fs, ino) == expected
        await fs.collector.drain()
        assert not await numbers(fs, b"g")
        layout = inode.layout
        assert len(objects_in(fs)) == (
            sum(layout.object_length(n, inode.size) > 0 for n in range(4))
            if isinstance(layout, Striped)
            else 0
        )


@pytest.mark.store(WAITING | {"burst.drain_bandwidth": "4MiB"})
async def test_cancelled_between_pieces(fs: Filesystem) -> None:
    """A drain that is cancelled while it copies stops there, and the writer does not wait for
    it."""
    data = random.Random(2).randbytes(16 << 20)
    ino, _ = await write_file(fs, b"f", data)
    fs.drain.request([ino])
    while (file := fs.io.table.open.get(ino)) is None or file.lease is None:
        await trio.lowlevel.checkpoint()
    opened = await fs.open(ino, os.O_RDWR)
    await fs.write(opened.handle, 0, b"new")
    assert file.lease is None
    assert (await fs.getattr(ino)).in_burst
    assert await fs.read(opened.handle, 0, 5) == b"new" + data[3:5]
    await fs.release(opened.handle)
    assert await read_file(fs, ino) == b"new" + data[3:]


async def test_a_file_that_is_open_for_writing_waits_for_its_last_close(fs: Filesystem) -> None:
    ino, handle = await write_file(fs, b"f", b"x" * 100_000, close=False)
    fs.drain.request([ino])
    while fs.drain.status()["held_files"] != 1:
        await trio.lowlevel.checkpoint()
    assert (await fs.getattr(ino)).in_burst
    await fs.release(handle)
    await fs.drain.wait([ino])
    assert not (await fs.getattr(ino)).in_burst


async def test_a_truncation_that_fails_leaves_nothing_that_is_never_drained(fs, monkeypatch):
    """It has brought the file to the burst tier before."""
    data = os.urandom(300_000)
    ino, _ = await write_file(fs, b"file", data)
    await moved_out(fs, ino)

    async def refused(*_: object) -> None:
        raise NoSpace()

    with monkeypatch.context() as patched:
        patched.setattr(fs.io.burst, "truncate", refused)
        with pytest.raises(NoSpace):
            await fs.setattr(ino, SetAttr(size=1), ROOT)
    assert (await fs.getattr(ino)).in_burst
    await fs.drain.wait([ino])
    assert not (await fs.getattr(ino)).in_burst
    assert await read_file(fs, ino) == data


@pytest.mark.store(WAITING)
async def test_a_mapping_that_outlives_its_handle_holds_the_drain_up(fs: Filesystem) -> None:
    ino, handle = await write_file(fs, b"f", b"x" * 100_000, close=False)
    with open(path_of(fs, (await fs.getattr(ino)).copy), "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    await fs.release(handle)
    fs.drain.request([ino])
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert (await fs.getattr(ino)).in_burst and fs.drain.status()["failing_files"] == 0
    mapping[:3] = b"new"
    mapping.close()
    await drained(fs, ino)
    assert await read_file(fs, ino) == b"new" + b"x" * 99_997
    assert await fs.evictor.evict(ino)
    assert await read_file(fs, ino) == b"new" + b"x" * 99_997


@pytest.mark.store(WAITING)
async def test_what_a_program_has_mapped_for_reading_is_not_evicted(fs: Filesystem) -> None:
    """Its mapping outlives its descriptor, and shows what is written later."""
    ino, _ = await write_file(fs, b"f", b"x" * 100_000)
    with open(path_of(fs, (await fs.getattr(ino)).copy), "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    await drained(fs, ino)
    assert not await fs.evictor.evict(ino)
    opened = await fs.open(ino, os.O_WRONLY)
    await fs.write(opened.handle, 0, b"new")
    await fs.release(opened.handle)
    assert mapping[:4] == b"newx"
    await drained(fs, ino)
    mapping.close()
    assert await fs.evictor.evict(ino)


@pytest.mark.store(WAITING)
async def test_a_reader_keeps_its_copy(fs: Filesystem) -> None:
    for size in (2049, 100_000):
        data = bytes(size)
        ino, _ = await write_file(fs, b"%d" % size, data)
        opened = await fs.open(ino, os.O_RDONLY)
        await drained(fs, ino)
        inode = await fs.getattr(ino)
        assert inode.copy is not None and not inode.in_burst
        assert not await fs.evictor.evict(ino)
        assert await fs.read(opened.handle, 0, 200_000) == data
        await fs.release(opened.handle)
        assert await fs.evictor.evict(ino)
        assert await read_file(fs, ino) == data


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=["striped", "interleaved"])
@pytest.mark.parametrize("op", ["write_at", "sync_file", "open_file"])
async def test_a_failing_server_loses_nothing_and_is_told_once(directory, kind, op, caplog):
    caplog.set_level(logging.INFO)
    data = random.Random(4).randbytes(6 << 20)
    settings = WAITING | kind | {"layout.count": "4"}
    async with mounted(directory, settings) as fs:
        with hooked():
            inos = [(await write_file(fs, b"%d" % n, data))[0] for n in range(3)]
            with failing(op, str(directory / "data")) as failed:
                fs.drain.request(inos)
                while fs.drain.status()["failing_files"] < 3:
                    await trio.sleep(0.01)
            assert failed
            assert all([(await fs.getattr(ino)).in_burst for ino in inos])
            assert fs.drain.status()["last_error"]
            assert sum("draining has to wait" in line for line in caplog.messages) == 1
            for ino in inos:
                assert await read_file(fs, ino) == data
            await drained(fs, *inos)
        assert fs.drain.status()["failing_files"] == 0
        assert sum("draining goes on" in line for line in caplog.messages) == 1
        await fs.collector.drain()
        assert not await numbers(fs, b"g")
        for ino in inos:
            assert await fs.evictor.evict(ino)
            assert await read_file(fs, ino) == data
    caplog.clear()


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["burst.drain.written", "vfs.drain.copied", "vfs.drain.flipped"])
async def test_a_crash_leaves_the_old_form_or_the_new_one(directory, point):
    data = random.Random(5).randbytes((3 << 20) + 5)
    ino = 0

    with pytest.raises(faults.SimulatedCrash):
        async with mounted(directory, WAITING) as fs:
            ino, _ = await write_file(fs, b"f", data)
            faults.arm(point, crash)
            fs.drain.request([ino])
            await trio.sleep_forever()
    faults.disarm_all()
    async with mounted(directory) as fs:
        inode = await fs.getattr(ino)
        assert inode.in_burst == (point != "vfs.drain.flipped")
        assert fs.recovered.undrained == inode.in_burst
        assert await read_file(fs, ino) == data
        await drained(fs, ino)
        assert await fs.evictor.evict(ino)
        assert await read_file(fs, ino) == data
        await fs.collector.drain()
        assert not await numbers(fs, b"g") and len(objects_in(fs)) == 1


# --- stage and evict ------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("kind", KINDS, ids=["striped", "interleaved"])
async def test_staged_files_are_the_same(directory, kind):
    async with mounted(directory, modes.ON | kind) as fs:
        for size in SIZES[3:]:
            data = random.Random(size).randbytes(size)
            ino, _ = await write_file(fs, b"%d" % size, data)
            await drained(fs, ino)
            assert await fs.evictor.evict(ino)
            assert await fs.stager.stage(ino) and await fs.stager.stage(ino)
            inode = await fs.getattr(ino)
            assert inode.copy is not None and not inode.in_burst
            assert Path(path_of(fs, inode.copy)).read_bytes() == data == await read_file(fs, ino)
        await fs.collector.drain()
        assert not await numbers(fs, b"g")
        assert fs.stager.status()["staged_files"] == len(SIZES[3:])


async def test_staged_at_once_by_many_only_once(fs: Filesystem) -> None:
    ino, _ = await write_file(fs, b"f", bytes(range(256)) * 40_000)
    await drained(fs, ino)
    await fs.evictor.evict(ino)
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(fs.stager.stage, ino)
    assert fs.stager.status()["staged_files"] == 1


@pytest.mark.sweep
@pytest.mark.store(WAITING | {"burst.stage_for_write": "0"})
@pytest.mark.parametrize("change", ["write", "truncate", "unlink"])
async def test_what_changes_while_it_is_staged_is_not(fs: Filesystem, change) -> None:
    data = random.Random(6).randbytes(5 << 20)
    ino, _ = await write_file(fs, b"f", data)
    await drained(fs, ino)
    await fs.evictor.evict(ino)
    async with trio.open_nursery() as nursery:

        async def act() -> None:
            while not (file := fs.io.table.open.get(ino)) or file.handles < 1:
                await trio.lowlevel.checkpoint()
            match change:
                case "write":
                    await overwrite(fs, ino, 5, b"other")
                case "truncate":
                    await fs.setattr(ino, SetAttr(size=7), ROOT)
                case "unlink":
                    await fs.unlink(ROOT_INO, b"f")

        nursery.start_soon(act)
        staged = await fs.stager.stage(ino)
    assert not staged
    await fs.collector.drain()
    assert not await numbers(fs, b"g")
    if change == "unlink":
        return
    expected = {"write": data[:5] + b"other" + data[10:], "truncate": data[:7]}[change]
    assert (await fs.getattr(ino)).copy is None
    assert await read_file(fs, ino) == expected


async def test_a_pinned_file_gets_a_copy_when_it_is_read(fs: Filesystem) -> None:
    data = random.Random(6).randbytes(300_000)
    ino, _ = await write_file(fs, b"f", data)
    await drained(fs, ino)
    await fs.evictor.evict(ino)
    await fs.setxattr(ino, b"user.aifs.tier", b"pinned")
    assert await read_file(fs, ino) == data
    assert fs.stager.is_staging(ino)
    while fs.stager.is_staging(ino):
        await trio.sleep(0.01)
    assert (await fs.getattr(ino)).copy is not None
    await overwrite(fs, ino, 0, b"other")
    await drained(fs, ino)
    assert await read_file(fs, ino) == b"other" + data[5:]


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.stage.copied", "vfs.evict.recorded"])
async def test_a_crash_while_staging_or_evicting_leaks_nothing(directory, point):
    data = random.Random(5).randbytes((3 << 20) + 5)
    ino = 0

    with pytest.raises(faults.SimulatedCrash):
        async with mounted(directory, WAITING) as fs:
            ino, _ = await write_file(fs, b"f", data)
            await drained(fs, ino)
            if point == "vfs.stage.copied":
                await fs.evictor.evict(ino)
            faults.arm(point, crash)
            await fs.evictor.evict(ino)
            await fs.stager.stage(ino)
    faults.disarm_all()
    async with mounted(directory) as fs:
        assert (await fs.getattr(ino)).copy is None
        assert await read_file(fs, ino) == data
        await fs.collector.drain()
        assert not await numbers(fs, b"g")


@pytest.mark.sweep
async def test_a_crowded_tier_evicts_the_least_recently_used(directory):
    settings = modes.ON | {
        "burst.capacity": "5MiB",
        "burst.high_water": "0.9",
        "burst.low_water": "0.5",
        "burst.reserve": "0",
    }
    async with mounted(directory, settings) as fs:
        inos, entered = [], []
        for n in range(12):
            ino, _ = await write_file(fs, b"%d" % n, bytes([n]) * (1 << 20))
            inos.append(ino)
            if (await fs.getattr(ino)).in_burst:  # else there was no room yet
                entered.append(n)
            await drained(fs, ino)
            while fs.tier.needs_eviction():
                await trio.sleep(0.01)
        cached = [n for n, ino in enumerate(inos) if (await fs.getattr(ino)).copy is not None]
        assert cached and cached == entered[-len(cached) :]
        assert fs.evictor.status()["evicted_files"] > 0
        for n, ino in enumerate(inos):
            assert await read_file(fs, ino) == bytes([n]) * (1 << 20)


@pytest.mark.sweep
def test_a_power_cut_does_not_bring_checksums_back_that_a_write_in_place_has_made_wrong(
    scratch, monkeypatch
):
    """The mark that drops them has to be durable before the first byte changes."""
    directory = scratch / "0"
    make_copies_one_disk(monkeypatch)

    async def make() -> int:
        async with mounted(directory, WAITING | {"burst.stage_for_write": "0"}) as fs:
            ino, _ = await write_file(fs, b"f", bytes(3 << 20))
            await moved_out(fs, ino)
            await put(fs, ino, "tier", "capacity", ROOT)
            return ino

    async def change(ino: int) -> None:
        async with mounted(directory, sound=False) as fs:
            await overwrite(fs, ino, 1 << 20, b"new")

    for seed in range(6):
        ino = trio.run(make)
        with PowerCut(directory) as cut:
            cut.crash_at("vfs.write.written")
            with pytest.raises(BaseException) as raised:
                trio.run(change, ino)
            assert is_crash(raised.value)
            cut.materialise(scratch / "left", random.Random(seed))
        shutil.rmtree(directory)
        (scratch / "left").rename(directory)
        assert_sound(modes.config_of(directory))
        shutil.rmtree(directory)


@pytest.mark.store(WAITING)
async def test_an_mtime_that_is_set_while_a_drain_opens_the_copy_stays(fs: Filesystem) -> None:
    """The drain of a file that is at rest does not look at its copy before it opens it, and may
    flip the file before the copy is told of the new mtime."""
    ino, _ = await write_file(fs, b"file", b"x" * 10_000)
    file = await fs.io.inodes.acquire(ino)  # as a drain does
    await file.own_copy.ensure_open()
    told: list[int] = []

    async def flipped_before(_: object, mtime_ns: int) -> None:
        told.append(mtime_ns)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fs.io.burst, "set_mtime", flipped_before)
        inode = await fs.setattr(ino, SetAttr(mtime_ns=10**18), ROOT)
    assert told == [10**18]
    assert inode.mtime_ns == 10**18
    await fs.io.inodes.release(file)
    assert (await fs.getattr(ino)).mtime_ns == 10**18
    await fs.setattr(ino, SetAttr(mtime_ns=2 * 10**18), ROOT)
    assert os.stat(path_of(fs, (await fs.getattr(ino)).copy)).st_mtime_ns == 2 * 10**18
