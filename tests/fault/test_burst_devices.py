"""Burst devices that are full, fail, vanish, are missing at mount; and servers that fail under a
drain.
"""

import errno
import logging
import mmap
import os
import re
import shutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.burst.copy import BurstCopy
from aifs.check.fsck import check
from aifs.core.errors import NoSpace, NotFound, StoreBusy, StoreError, Unavailable
from aifs.data.health import ObjectFails
from aifs.files.draining import Draining, DrainOutcome
from aifs.layout.placement import BURST_FIRST
from aifs.meta import forms, keys, namespace
from aifs.vfs import Caller, Filesystem, SetAttr, open_filesystem
from tests.support import modes
from tests.support.data_servers import FaultHook, failing, hooked
from tests.support.hanging import WAIT_S, hanging
from tests.support.kernel import Kernel
from tests.support.modes import config_of
from tests.support.stores import drained, opened, require_sound, served
from tests.support.stores import fs as fs

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 100
WAITING = modes.WAITING | {"layout.unit": "4KiB"}
BY_DAEMON = WAITING | modes.BY_DAEMON
DRAINING = modes.ON | {"layout.unit": "4KiB"}


pytestmark = pytest.mark.store(WAITING)


@pytest.fixture(autouse=True)
def hook() -> Iterator[None]:
    """Everything is done by workers."""
    with hooked():
        yield


@pytest.fixture
async def kernel(fs: Filesystem) -> AsyncIterator[Kernel]:
    async with Kernel(fs) as kernel:
        yield kernel


@asynccontextmanager
async def mounted(directory: Path, settings: dict[str, str] = WAITING) -> AsyncIterator[Kernel]:
    """One of several mounts; the test itself sees to fsck."""
    async with opened(directory, settings, sound=False) as fs, Kernel(fs) as kernel:
        yield kernel


async def make(kernel: Kernel, name: bytes, content: bytes = CONTENT) -> int:
    handle, inode = await kernel.create(ROOT, name, 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, content)
    await kernel.release(handle)
    return inode.ino


async def path_of(kernel: Kernel, ino: int) -> str:
    """Where the burst copy of a file lies."""
    (device,) = kernel.store.servers.burst()
    return device.where((0, (await kernel.getattr(ino)).copy.id))


async def content_of(kernel: Kernel, ino: int) -> bytes:
    handle = await kernel.open(ino, os.O_RDONLY)
    try:
        return bytes(await kernel.read(handle, 0, 1 << 20))
    finally:
        await kernel.release(handle)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# --- full -----------------------------------------------------------------------------------------


async def test_new_files_go_to_the_servers_when_the_device_is_full(kernel, directory):
    first = await make(kernel, b"first")
    assert (await kernel.getattr(first)).in_burst
    refused = []

    def refuse(op: str, path: str) -> None:
        if op == "open_file" and path.startswith(f"{directory}/burst") and not os.path.exists(path):
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with hooked(refuse):
        for number in range(80):  # more than were made ahead
            # Of different kinds, for after several tiny ones of one kind the next gets no copy.
            name = b"new.%d" % number
            ino = await make(kernel, name, CONTENT if number == 79 else b"")
    assert refused
    assert not (await kernel.getattr(ino)).in_burst
    assert await content_of(kernel, ino) == CONTENT
    assert await content_of(kernel, first) == CONTENT
    await drained(kernel, first)


@pytest.mark.store(BY_DAEMON)
async def test_a_writer_is_told_that_the_device_is_full_and_loses_nothing(kernel, directory):
    handle, inode = await kernel.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, CONTENT)
    with failing("write_at", f"{directory}/burst", errno.ENOSPC), pytest.raises(NoSpace):
        await kernel.write(handle, len(CONTENT), CONTENT)
    assert await content_of(kernel, inode.ino) == CONTENT
    await kernel.write(handle, len(CONTENT), CONTENT)
    await kernel.release(handle)
    await drained(kernel, inode.ino)
    assert await content_of(kernel, inode.ino) == 2 * CONTENT


async def test_a_file_is_written_in_place_where_it_cannot_be_staged(kernel, directory):
    ino = await make(kernel, b"f")
    await drained(kernel, ino)
    assert await kernel.evictor.evict(ino)
    with failing(("open_file", "write_at", "truncate"), f"{directory}/burst", errno.ENOSPC):
        handle = await kernel.open(ino, os.O_RDWR)
        await kernel.write(handle, 5, b"new")
        await kernel.release(handle)
    assert (await kernel.getattr(ino)).copy is None
    assert await content_of(kernel, ino) == CONTENT[:5] + b"new" + CONTENT[8:]


# --- failing, vanished ----------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [WAITING, BY_DAEMON], ids=["passed through", "by daemon"])
async def test_clean_files_are_read_from_the_servers_while_the_device_is_away(
    directory: Path, settings: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(directory, settings) as kernel:
        clean, dirty = await make(kernel, b"clean"), await make(kernel, b"dirty")
        await drained(kernel, clean)
        away = directory / "away"
        (directory / "burst").rename(away)
        await noticed(kernel)
        assert await content_of(kernel, clean) == CONTENT
        with pytest.raises(Unavailable, match=f"burst.*{directory}/burst"):
            await content_of(kernel, dirty)
        new = await make(kernel, b"new")
        assert await content_of(kernel, new) == CONTENT
        assert not (await kernel.getattr(new)).in_burst
        assert list(directory.glob("burst")) == []  # it is not made anew
        away.rename(directory / "burst")
        assert await content_of(kernel, dirty) == CONTENT
        await drained(kernel, dirty)
        assert await content_of(kernel, dirty) == CONTENT
    await require_sound(config_of(directory))
    assert [line for line in warnings(caplog) if "burst directory 0" in line]


async def noticed(kernel: Kernel) -> None:
    """That the device fails, or works again; what follows from it has been done."""
    await kernel.tier.look()
    await trio.testing.wait_all_tasks_blocked()


async def test_lent_files_are_taken_back_when_their_device_begins_to_fail(kernel, directory):
    idle, used = await make(kernel, b"idle"), await make(kernel, b"used")
    await drained(kernel, idle, used)
    handle = await kernel.open(used, os.O_RDONLY)
    assert kernel.answered == 1 and kernel.find_lent(idle) and kernel.find_lent(used)
    (directory / "burst").rename(directory / "away")
    await noticed(kernel)
    for _ in range(3):
        assert await content_of(kernel, idle) == CONTENT
    assert not kernel.find_lent(idle).backing
    await kernel.release(handle)
    assert await content_of(kernel, used) == CONTENT
    (directory / "away").rename(directory / "burst")
    await noticed(kernel)
    assert await content_of(kernel, idle) == CONTENT  # by the daemon, which sees that it works
    await noticed(kernel)
    before = kernel.direct_bytes
    for ino in (idle, used):
        assert await content_of(kernel, ino) == CONTENT
    assert kernel.direct_bytes == before + 2 * len(CONTENT)


async def test_a_lent_handle_whose_inode_cannot_be_read_is_closed_all_the_same(kernel, monkeypatch):
    ino = await make(kernel, b"f")
    await drained(kernel, ino)
    handles = [await kernel.open(ino, os.O_RDONLY) for _ in range(3)]
    assert kernel.answered == 3
    kernel.io.table.recall_all()

    async def fail() -> None:
        raise Unavailable("no metadata just now")

    with monkeypatch.context() as patch:
        patch.setattr(kernel.io.inodes, "find_room", fail)
        with pytest.raises(Unavailable):
            await kernel.release(handles[0])
    assert await content_of(kernel, ino) == CONTENT  # it is in core, and has two handles
    await kernel.release(handles[1])
    await kernel.release(handles[2])
    assert not kernel.io.table.programs_have_open()
    handle = await kernel.open(ino, os.O_RDONLY)
    kernel.io.table.recall_all()
    with monkeypatch.context() as patch:
        patch.setattr(kernel.io.inodes, "find_room", fail)
        with pytest.raises(Unavailable):
            await kernel.release(handle)
    assert not kernel.io.table.programs_have_open() and kernel.find_lent(ino) is None
    assert await kernel.evictor.evict(ino)
    await kernel.unlink(ROOT, b"f")
    await kernel.collector.drain()


async def test_times_of_access_are_recorded_though_a_transaction_fails(kernel, monkeypatch):
    ino = await make(kernel, b"f")
    before_ns = (await kernel.getattr(ino)).atime_ns
    await kernel.release(await kernel.open(ino, os.O_RDONLY))
    assert kernel.answered == 1
    accessed_ns = (await kernel.getattr(ino)).atime_ns
    assert accessed_ns > before_ns
    transact = kernel.store.engine.transact

    async def fail(function, *args):
        if function is forms.put_access_times:
            raise NoSpace("the metadata store is full")
        return await transact(function, *args)

    with monkeypatch.context() as patch:
        patch.setattr(kernel.store.engine, "transact", fail)
        with pytest.raises(NoSpace):
            await kernel.io.inodes.record_accesses()
    assert (await kernel.getattr(ino)).atime_ns == accessed_ns
    await kernel.io.inodes.record_accesses()
    stored = await kernel.store.engine.view(namespace.get_inode, ino)
    assert stored.atime_ns == accessed_ns


async def test_a_copy_that_is_mapped_while_it_is_looked_at_is_not_evicted(kernel, monkeypatch):
    maps: list[mmap.mmap] = []
    async with trio.open_nursery() as nursery:
        ino = await make(kernel, b"f")
        await drained(kernel, ino)
        looked = BurstCopy.is_used

        async def map_it() -> None:
            handle = await kernel.open(ino, os.O_RDONLY)
            memory = kernel.map(handle, len(CONTENT), os.O_RDONLY)
            if memory is not None:
                maps.append(memory)
            await kernel.release(handle)

        async def is_used(copy: BurstCopy) -> bool:
            found = await looked(copy)
            monkeypatch.setattr(BurstCopy, "is_used", looked)
            nursery.start_soon(map_it)
            await trio.testing.wait_all_tasks_blocked(0.05)
            return found

        monkeypatch.setattr(BurstCopy, "is_used", is_used)
        await kernel.evictor.evict(ino)
        await trio.testing.wait_all_tasks_blocked()
        handle = await kernel.open(ino, os.O_RDWR)
        await kernel.write(handle, 0, b"NEW")
        await kernel.release(handle)
        for memory in maps:
            assert memory[:3] == b"NEW"
            memory.close()


# --- what cannot be written back ---


async def test_an_error_of_write_back_after_close_reaches_the_next_fsync_once(kernel, caplog):
    ino = await make(kernel, b"f")
    path = await path_of(kernel, ino)
    with failing("sync_file", path) as failed:
        await kernel.writeback.sync_closed_files()
        assert len(failed) == 1
    await kernel.writeback.sync_closed_files()  # it works now, but the bytes are lost
    assert await is_marked(kernel, ino)
    assert await content_of(kernel, ino) == CONTENT
    first, second = [await kernel.open(ino, os.O_RDONLY) for _ in range(2)]
    with pytest.raises(Unavailable, match=re.escape(path)):
        await kernel.fsync(first)
    await kernel.release(first)
    await kernel.fsync(second)
    await kernel.release(second)
    assert await is_marked(kernel, ino)  # nobody takes its copy for durable
    await drained(kernel, ino)
    assert (await kernel.getattr(ino)).copy is None
    assert await content_of(kernel, ino) == CONTENT
    assert not await is_marked(kernel, ino)
    told = [line for line in warnings(caplog) if path in line]
    assert len(told) == 1 and f"inode {ino}: what was written to it last may be lost" in told[0]


async def test_a_copy_that_has_lost_bytes_never_becomes_a_cache(kernel, caplog):
    """Its disk may have other bytes than the page cache, from which the file is drained."""
    ino = await make(kernel, b"f")
    path = await path_of(kernel, ino)
    with failing("sync_file", path):
        await kernel.writeback.sync_closed_files()
    handle = await kernel.open(ino, os.O_RDONLY)
    draining = Draining(ino)
    await kernel.drain.drainer.drain([draining])
    assert draining.outcome is DrainOutcome.BUSY
    await kernel.release(handle)
    await drained(kernel, ino)
    assert (await kernel.getattr(ino)).copy is None
    assert await content_of(kernel, ino) == CONTENT
    assert any(path in line for line in warnings(caplog))


@pytest.mark.sweep
@pytest.mark.parametrize("how", ["drained", "renamed", "truncated", "unlinked"])
async def test_an_error_of_write_back_outlives_the_copy(kernel, how, caplog):
    ino = await make(kernel, b"f")
    path = await path_of(kernel, ino)
    with failing("sync_file", path):
        await kernel.writeback.sync_closed_files()
    if how == "drained":
        await drained(kernel, ino)
        handle = await kernel.open(ino, os.O_RDWR)
        with pytest.raises(Unavailable, match=re.escape(path)):
            await kernel.fsync(handle)
        await kernel.release(handle)
        handle = await kernel.open(ino, os.O_RDWR)
        await kernel.fsync(handle)
        await kernel.release(handle)
        assert not await is_marked(kernel, ino)
    elif how == "renamed":
        with pytest.raises(Unavailable, match=re.escape(path)):
            await kernel.rename(ROOT, b"f", ROOT, b"g", 0, ME)
        assert (await kernel.lookup(ROOT, b"f")).ino == ino
    elif how == "truncated":
        handle = await kernel.open(ino, os.O_RDWR | os.O_TRUNC)
        await kernel.write(handle, 0, CONTENT)
        with pytest.raises(Unavailable, match=re.escape(path)):
            await kernel.fsync(handle)
        await kernel.release(handle)
    else:
        await kernel.unlink(ROOT, b"f")
        kernel.forget([ino])
        await kernel.collector.drain()
        assert not kernel.io.table.has_lost(ino)
    assert any(path in line for line in warnings(caplog))


async def test_a_rename_that_syncs_many_files_remembers_what_was_lost(kernel, caplog):
    parent = (await kernel.mkdir(ROOT, b"d", 0o755, ME)).ino
    handle, inode = await kernel.create(parent, b"f", 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, CONTENT)
    await kernel.release(handle)
    path = await path_of(kernel, inode.ino)
    with failing("sync_file", path), pytest.raises(Unavailable, match=re.escape(path)):
        await kernel.rename(ROOT, b"d", ROOT, b"e", 0, ME)
    with pytest.raises(Unavailable, match=re.escape(path)):
        await kernel.rename(ROOT, b"d", ROOT, b"e", 0, ME)
    handle = await kernel.open(inode.ino, os.O_RDWR)
    with pytest.raises(Unavailable, match=re.escape(path)):
        await kernel.fsync(handle)
    await kernel.release(handle)
    await kernel.rename(ROOT, b"d", ROOT, b"e", 0, ME)  # somebody knows


async def is_marked(kernel: Kernel, ino: int) -> bool:
    return await kernel.store.engine.view(lambda tx: tx.get(keys.dirty(ino)) is not None)


async def test_a_clean_file_can_be_written_while_the_device_is_away(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel, b"clean")
        await drained(kernel, ino)
        (directory / "burst").rename(directory / "away")
        handle = await kernel.open(ino, os.O_RDWR)
        await kernel.write(handle, 0, b"new")
        await kernel.release(handle)
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
        (directory / "away").rename(directory / "burst")
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
    async with mounted(directory) as kernel:
        assert await content_of(kernel, ino) == b"new" + CONTENT[3:]
    await require_sound(config_of(directory))


@pytest.mark.store(BY_DAEMON)
@pytest.mark.parametrize("op", ["sync_file", "write_at", "read_into"])
async def test_what_fails_for_one_file_alone_is_no_failure_of_the_device(kernel, op):
    (device,) = kernel.store.servers.burst()
    bad, good = await make(kernel, b"bad"), await make(kernel, b"good")
    path = await path_of(kernel, bad)
    handle = await kernel.open(bad, os.O_RDWR)
    with failing(op, path) as failed, pytest.raises(ObjectFails, match=re.escape(path)):
        await kernel.read(handle, 0, 10)
        await kernel.write(handle, 0, b"x")
        await kernel.fsync(handle)
    assert failed and device.state == "ok" and device.health.usable
    handle = await kernel.open(good, os.O_RDWR)
    await kernel.fsync(handle)
    assert (await kernel.getattr(await make(kernel, b"new"))).in_burst
    # The probe meets what fails for all files.
    with failing(op, device.address), pytest.raises(Unavailable):
        await kernel.read(handle, 0, 10)
        await kernel.write(handle, 0, b"x")
        await kernel.fsync(handle)
    assert device.state == "failing"
    assert list(Path(device.address).glob(".aifs-*")) == []


async def test_a_file_that_cannot_be_synced_does_not_keep_the_store_from_being_closed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with hooked():
        async with opened(directory, BY_DAEMON, sound=False) as fs, Kernel(fs) as kernel:
            (device,) = fs.store.servers.burst()
            bad, good = await make(kernel, b"bad"), await make(kernel, b"good")
            path = await path_of(kernel, bad)

            def refuse(op: str, where: str) -> None:
                if op == "sync_file" and where == path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))

            FaultHook.installed.action = refuse
    told = [line for line in warnings(caplog) if path in line]
    assert len(told) == 1 and f"inode {bad}: what was written to it last may be lost" in told[0]
    async with mounted(directory, BY_DAEMON) as kernel:
        assert kernel.store.clean
        assert kernel.recovered.unsynced_files == 1  # its mark has stayed
        assert await content_of(kernel, bad) == await content_of(kernel, good) == CONTENT
    await require_sound(config_of(directory))


async def test_a_mount_ends_though_its_burst_directory_does_not_answer_any_more(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In order: all is safe but files that nobody has used. Nobody gets the store before the calls
    have ended."""
    monkeypatch.setattr("aifs.burst.tier._END_S", 0.1)
    monkeypatch.setattr("aifs.data.servers._END_S", 0.1)
    with hanging(str(directory / "burst"), {"unlink"}) as hang:
        hang.release()
        with trio.fail_after(WAIT_S / 2):
            async with opened(directory, WAITING, sound=False) as fs, Kernel(fs) as kernel:
                ino = await make(kernel, b"file")
                hang.again()
        assert hang.held
        assert re.search(r"burst directory 0 \(.*\) has not answered \d calls?", caplog.text)
        with pytest.raises(StoreBusy):
            async with open_filesystem(config_of(directory)):
                pass
    while True:
        try:
            async with mounted(directory) as kernel:
                assert kernel.store.clean and await content_of(kernel, ino) == CONTENT
                break
        except StoreBusy:
            await trio.sleep(0.01)
    await require_sound(config_of(directory))


# --- missing at mount -----------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("replacement", ["nothing", "empty directory"])
async def test_a_missing_device_is_named_with_what_is_at_stake(
    directory: Path, replacement: str
) -> None:
    async with mounted(directory) as kernel:
        await drained(kernel, await make(kernel, b"clean"))
        inos = [await make(kernel, b"f%d" % number) for number in range(3)]
    (directory / "burst").rename(directory / "away")
    if replacement == "empty directory":
        (directory / "burst").mkdir()
    with pytest.raises(StoreError, match=re.escape(f"{directory}/burst") + ".*3 files") as told:
        async with mounted(directory):
            pass
    assert "\n" not in str(told.value)
    if replacement == "empty directory":
        (directory / "burst").rmdir()
    (directory / "away").rename(directory / "burst")
    async with mounted(directory) as kernel:
        for ino in inos:
            assert await content_of(kernel, ino) == CONTENT
            await drained(kernel, ino)
    await require_sound(config_of(directory))


async def test_a_mount_without_a_device_names_what_is_lost_and_finds_it_again(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(directory) as kernel:
        clean = await make(kernel, b"clean")
        await drained(kernel, clean)
        inos = [await make(kernel, b"f%d\n" % number) for number in range(3)]
    (directory / "burst").rename(directory / "away")
    config = config_of(directory)
    burst = config.burst.model_copy(update={"missing": "allow"})
    without = config.model_copy(update={"burst": burst})
    async with served(without):
        pass
    async with served(without) as fs, Kernel(fs) as kernel:
        assert await content_of(kernel, clean) == CONTENT
        for ino in inos:
            with pytest.raises(Unavailable):
                await content_of(kernel, ino)
        place = await kernel.lookup(ROOT, b"lost+found")
        listed = await kernel.lookup(place.ino, b"burst-directory-0")
        with pytest.raises(NotFound):  # the same is not listed twice
            await kernel.lookup(place.ino, b"burst-directory-0.1")
        assert (place.mode & 0o777, listed.mode & 0o777) == (0o700, 0o400)
        with pytest.raises(Unavailable):
            await kernel.open(inos[1], os.O_RDWR)
        with pytest.raises(Unavailable):
            await kernel.setattr(inos[1], SetAttr(size=0), ME)
        assert await content_of(kernel, listed.ino) == b"/f0\\n\n/f1\\n\n/f2\\n\n"
        await kernel.unlink(ROOT, b"f0\n")
        new = await make(kernel, b"new")
        await kernel.rename(ROOT, b"new", ROOT, b"f1\n")
        assert await content_of(kernel, new) == CONTENT
    said = "3 files cannot be read without burst directory 0; /lost+found/burst-directory-0 names"
    assert any(said in one for one in warnings(caplog))
    report = await trio.to_thread.run_sync(check, without, False)
    assert ("missing-object", r"/f2\n") in [(one.kind, one.where) for one in report.findings]
    (directory / "away").rename(directory / "burst")
    async with mounted(directory) as kernel:
        assert await content_of(kernel, inos[2]) == CONTENT
        await drained(kernel, inos[2])
    await require_sound(config_of(directory))
    caplog.clear()


async def test_a_device_that_is_gone_is_taken_out_of_the_store_and_its_place_is_free(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel, b"lost")
    shutil.rmtree(directory / "burst")
    config = config_of(directory)
    burst = config.burst.model_copy(update={"missing": "allow"})
    async with served(config.model_copy(update={"burst": burst})) as fs, Kernel(fs) as kernel:
        await kernel.unlink(ROOT, b"lost")
        fs.forget([ino])
        await fs.collector.drain()
        admin = fs.server_admin
        await admin.drain(BURST_FIRST)
        await admin.remove(BURST_FIRST)
        await admin.work()
        assert [row["role"] for row in (await admin.describe())["servers"]] == ["data"] * 4
        assert await admin.add(str(directory / "burst"), "burst", "") == BURST_FIRST + 1
    async with mounted(directory) as kernel:
        await drained(kernel, await make(kernel, b"new"))
    await require_sound(config)
    caplog.clear()


# --- servers under a drain ------------------------------------------------------------------------

FAULTS = {"read-only": errno.EROFS, "full": errno.ENOSPC, "failing": errno.EIO}


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["striped", "interleaved"])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_drain_waits_for_servers_that_cannot_be_written(
    directory: Path, fault: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with mounted(
        directory, DRAINING | {"layout.kind": kind, "burst.drain_delay": "1h"}
    ) as kernel:
        inos = [await make(kernel, b"f%d" % number) for number in range(5)]
        with failing(
            ("open_file", "write_at", "truncate", "sync_file"), f"{directory}/data", FAULTS[fault]
        ):
            kernel.drain.request(inos)
            while not kernel.drain.status()["failing_files"]:
                await trio.sleep(0.01)
            for ino in inos:
                assert (await kernel.getattr(ino)).in_burst
                assert await content_of(kernel, ino) == CONTENT
            assert await content_of(kernel, await make(kernel, b"new")) == CONTENT
            assert kernel.drain.status()["last_error"]
        await kernel.drain.wait(inos)
        for ino in inos:
            assert not (await kernel.getattr(ino)).in_burst
            await kernel.evictor.evict(ino)
            assert await content_of(kernel, ino) == CONTENT
    await require_sound(config_of(directory))
    assert len([line for line in warnings(caplog) if "draining has to wait" in line]) == 1
