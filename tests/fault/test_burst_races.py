"""Operations on files of the burst tier that meet in the middle, and what outlives what it was made
for.
"""

import errno
import os
import random
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core import files
from aifs.core.errors import NoSpace, Unavailable
from aifs.files.types import ROOT, SetAttr
from aifs.meta import chunks, forms, journal, keys, paths
from aifs.meta.keys import ROOT_INO
from aifs.store.store import open_store
from aifs.vfs.filesystem import Filesystem
from tests.fault.test_drain import path_of, write_file
from tests.fault.test_file_races import holding
from tests.support import modes
from tests.support.data_servers import failing, hooked
from tests.support.kernel import Kernel
from tests.support.powercut import PowerCut, make_copies_one_disk
from tests.support.stores import drained, is_marked, overwrite, read_file
from tests.support.stores import fs as fs
from tests.support.stores import opened as mounted

WAITING = modes.WAITING | {"data.writeback_interval": "1h", "meta.commit_interval": "1h"}


@pytest.mark.store(WAITING)
async def test_who_waits_for_a_drain_goes_on_when_the_file_becomes_inline_at_its_close(fs):
    ino, handle = await write_file(fs, b"f", b"tiny", close=False)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fs.wait_drained, ino, 10)
        while not fs.drain.status()["held_files"]:
            await trio.testing.wait_all_tasks_blocked()
            await trio.sleep(0.01)
        await fs.release(handle)
        assert not (await fs.getattr(ino)).in_burst
    assert fs.drain.status()["files"] == 0


async def test_a_writer_whose_open_meets_a_sync_leaves_a_mark(directory: Path) -> None:
    with hooked():  # all calls go to threads, and descriptors have paths
        async with mounted(directory, WAITING) as fs, Kernel(fs) as kernel:
            ino, _ = await write_file(fs, b"f", b"x" * 10_000)
            await drained(fs, ino)
            handles: list[int] = []

            async def open_it() -> None:
                handles.append(await kernel.open(ino, os.O_RDWR))

            async with trio.open_nursery() as nursery:
                with holding("sync_file", lambda path: "/meta/" in path) as syncing:
                    nursery.start_soon(open_it)
                    # The copy is the file again, and this is not durable yet.
                    await syncing.arrived.wait()
                    nursery.start_soon(fs.writeback.sync_inode, ino)
                    await trio.testing.wait_all_tasks_blocked(0.05)
            assert await is_marked(fs, ino)
            await kernel.write(handles[0], 10_000, b"y" * 10_000)
            assert (await fs.getattr(ino)).size == 20_000
            await kernel.release(handles[0])


async def test_sync_covers_a_file_that_is_opened_meanwhile(directory: Path) -> None:
    with hooked():
        async with mounted(directory, WAITING) as fs:
            closed, _ = await write_file(fs, b"closed", b"x" * 10_000)
            _, handle = await write_file(fs, b"open", b"x" * 10_000, close=False)
            async with trio.open_nursery() as nursery:
                with holding("sync_file", lambda path: "/burst/" in path) as syncing:
                    nursery.start_soon(fs.sync)
                    await syncing.arrived.wait()
                    reader = await fs.open(closed, os.O_RDONLY)
            assert not await is_marked(fs, closed)
            await fs.release(reader.handle)
            await fs.release(handle)


async def test_a_mapping_that_outlives_its_handle_keeps_the_mark_of_one_file_among_many(
    directory: Path,
) -> None:
    async with mounted(directory, WAITING) as fs, Kernel(fs) as kernel:
        handle, inode = await kernel.create(ROOT_INO, b"mapped", 0o600, os.O_RDWR, ROOT)
        await kernel.write(handle, 0, b"x" * 8192)
        memory = kernel.map(handle, 8192)
        await kernel.release(handle)
        others = [(await write_file(fs, b"%d" % number, b"x" * 5000))[0] for number in range(70)]
        await fs.writeback.sync_closed_files()  # so many are synced together
        assert not await is_marked(fs, others[0])
        assert await is_marked(fs, inode.ino)
        memory.close()
        await fs.writeback.sync_closed_files()
        assert not await is_marked(fs, inode.ino)


async def test_renaming_a_file_does_not_look_at_what_else_is_unsynced(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "those_below", None)  # which walks from each of them to the root
    async with mounted(directory, WAITING) as fs:
        inos = [(await write_file(fs, b"%d" % number, b"x" * 5000))[0] for number in range(20)]
        await fs.rename(ROOT_INO, b"0", ROOT_INO, b"new")
        assert [await is_marked(fs, ino) for ino in inos] == [False] + [True] * 19


@pytest.mark.store(WAITING)
async def test_a_file_that_is_deleted_after_its_drain_failed_does_not_count_as_failing(
    fs, directory, caplog
):
    ino, _ = await write_file(fs, b"f", b"x" * 10_000)
    with failing("write_at", str(directory / "data")):
        fs.drain.request([ino])
        with trio.fail_after(60):
            while not fs.drain.status()["failing_files"]:
                await trio.sleep(0.01)
    await fs.unlink(ROOT_INO, b"f")
    assert fs.drain.status()["failing_files"] == 0


async def test_a_damaged_record_of_a_container_does_not_keep_the_store_from_being_mounted(
    directory: Path,
) -> None:
    settings = WAITING | modes.INTERLEAVED
    async with mounted(directory, settings, sound=False) as fs:
        ino, _ = await write_file(fs, b"f", b"x" * 10_000)
        await drained(fs, ino)
        [container] = await fs.store.engine.view(chunks.open_containers)
        await fs.store.engine.transact(lambda tx: tx.put(keys.container(container), b"?"))
    async with mounted(directory, settings, sound=False) as fs:
        await fs.compaction.compact()
        assert await fs.store.engine.view(chunks.open_containers) == {}


async def test_an_open_that_fails_at_its_end_leaves_a_file_that_is_drained(fs: Filesystem) -> None:
    ino, _ = await write_file(fs, b"f", b"x" * 10_000)
    await drained(fs, ino)
    add = fs.files.add_handle

    async def failing_add(*args: object) -> None:
        raise Unavailable("the device is gone")

    fs.files.add_handle = failing_add
    with pytest.raises(Unavailable):
        await fs.open(ino, os.O_RDWR)
    fs.files.add_handle = add
    assert (await fs.getattr(ino)).in_burst
    with trio.fail_after(60):
        while (await fs.getattr(ino)).in_burst:
            await trio.sleep(0.01)


@pytest.mark.store(WAITING)
async def test_a_tiny_file_that_the_full_metadata_store_cannot_take_stays_in_the_burst_tier(fs):
    ino, handle = await write_file(fs, b"f", b"tiny", close=False)
    fs.store.engine.short_of_space = True
    await fs.release(handle)
    assert (await fs.getattr(ino)).in_burst
    path = path_of(fs, (await fs.getattr(ino)).copy)
    os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))  # nobody has kept a lease
    fs.store.engine.short_of_space = False
    await drained(fs, ino)
    assert await read_file(fs, ino) == b"tiny"


async def test_a_chmod_of_an_open_file_that_is_refused_is_neither_seen_nor_saved_later(
    directory: Path,
) -> None:
    with hooked():  # descriptors have paths
        async with mounted(directory, WAITING) as fs:
            ino, handle = await write_file(fs, b"f", b"x" * 10_000, close=False)
            mode = (await fs.getattr(ino)).mode
            with failing("write_at", str(directory / "meta"), errno.ENOSPC), pytest.raises(NoSpace):
                await fs.setattr(ino, SetAttr(mode=mode ^ 0o040), ROOT)
            assert (await fs.getattr(ino)).mode == mode
            await fs.fsync(handle)
            await fs.release(handle)
    async with mounted(directory, WAITING) as fs:
        assert (await fs.getattr(ino)).mode == mode


async def test_setuid_that_a_write_took_stays_away_though_that_cannot_be_recorded(
    directory: Path,
) -> None:
    with hooked():
        async with mounted(directory, WAITING) as fs, Kernel(fs) as kernel:
            handle, inode = await kernel.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
            await kernel.setattr(inode.ino, SetAttr(mode=0o4755), ROOT)
            await kernel.write(handle, 0, b"x" * 10_000)  # the daemon is not told
            with failing("write_at", str(directory / "meta"), errno.ENOSPC), pytest.raises(NoSpace):
                await kernel.fsync(handle)
            await kernel.setxattr(inode.ino, b"user.x", b"1")
            assert (await kernel.getattr(inode.ino)).mode & 0o7777 == 0o755
            await kernel.release(handle)
            assert (await kernel.getattr(inode.ino)).mode & 0o7777 == 0o755


@pytest.mark.parametrize("settings", [WAITING, WAITING | modes.OFF], ids=["burst", "off"])
async def test_a_file_whose_attributes_cannot_be_recorded_at_its_close_is_closed_all_the_same(
    directory: Path, settings: dict[str, str]
) -> None:
    with hooked():
        async with mounted(directory, settings) as fs, Kernel(fs) as kernel:
            handle, inode = await kernel.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
            await kernel.write(handle, 0, b"x" * 10_000)
            await kernel.fsync(handle)
            await kernel.write(handle, 0, b"y" * 20_000)
            with failing("write_at", str(directory / "meta"), errno.ENOSPC):
                await kernel.release(handle)
            if fs.tier.has_devices:
                await drained(fs, inode.ino)
            await fs.sync()
            assert inode.ino not in fs.io.table.open
            assert await read_file(fs, inode.ino) == b"y" * 20_000


async def test_a_write_past_us_moves_the_mtime_however_far_the_clock_of_file_times_lags(
    directory: Path,
) -> None:
    with hooked():
        async with mounted(directory, WAITING) as fs, Kernel(fs) as kernel:
            ino, _ = await write_file(fs, b"f", b"x" * 10_000)  # by us, at a time of our clock
            before = replace(await kernel.getattr(ino))
            copy = path_of(fs, before.copy)
            lagging_ns = before.mtime_ns - 10**10
            os.utime(copy, ns=(lagging_ns, lagging_ns))
            handle = await kernel.open(ino, os.O_WRONLY)
            await kernel.write(handle, 0, b"y" * 20_000)
            os.utime(copy, ns=(lagging_ns + 1, lagging_ns + 1))
            await kernel.release(handle)
            after = await kernel.getattr(ino)
            assert kernel.direct_bytes == after.size == 20_000
            assert after.mtime_ns > before.mtime_ns and after.ctime_ns > before.ctime_ns


async def _append(fs: Filesystem, ino: int) -> None:
    await overwrite(fs, ino, 20_000, b"y" * 10_000)


async def _shrink(fs: Filesystem, ino: int) -> None:
    """Once the file has been opened for writing and closed: who cuts it finds its mark."""
    await fs.release((await fs.open(ino, os.O_RDWR)).handle)
    await fs.setattr(ino, SetAttr(size=5_000), ROOT)


@pytest.mark.parametrize("change", [_append, _shrink])
def test_a_file_whose_mark_a_power_cut_has_undone_has_the_length_of_its_copy(
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Filesystem, int], Awaitable[None]],
) -> None:
    """Else its size would change under those who read it, as soon as it is drained or opened."""
    directory = scratch / "store"
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 64 << 10)
    monkeypatch.setattr(files, "boot_id", lambda: f"boot {PowerCut.boots}")
    make_copies_one_disk(monkeypatch)
    modes.make_store(directory, WAITING)

    async def live() -> int:
        async with mounted(directory, sound=False) as fs:
            ino, handle = await write_file(fs, b"f", b"x" * 20_000, close=False)
            await fs.fsync(handle)
            await fs.release(handle)
            assert not await is_marked(fs, ino)
            await fs.sync()
            await change(fs, ino)
            power.crashed = True
            return ino

    async def is_undone(left: Path) -> bool:
        """Whether there is no mark, though the copy is not what the record says."""
        store = await open_store(modes.config_of(left))
        try:
            inode, marked, _ = await store.engine.view(forms.load, ino)
            path = store.servers[inode.copy.server].where((0, inode.copy.id))
            return marked is None and os.stat(path).st_size != inode.size
        finally:
            store.abandon()

    async def recovered(left: Path) -> None:
        async with mounted(left) as fs:
            inode = await fs.getattr(ino)
            assert inode.size == os.stat(path_of(fs, inode.copy)).st_size
            assert not await is_marked(fs, ino)
            assert len(await read_file(fs, ino)) == inode.size
            await drained(fs, ino)
            assert (await fs.getattr(ino)).size == inode.size

    with PowerCut(directory) as power:
        ino = trio.run(live)
    for seed in range(100):
        left = scratch / f"left{seed}"
        power.materialise(left, random.Random(seed))
        if trio.run(is_undone, left):
            trio.run(recovered, left)
            return
    pytest.fail("no cut undoes the mark alone")
