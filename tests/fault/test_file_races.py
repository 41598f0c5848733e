"""Operations on one file that meet in the middle: where one waits for a server, another comes."""

import errno
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
import trio.lowlevel
import trio.testing

from aifs.core.errors import NoSpace
from aifs.core.upkeep import Work
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support import stores
from tests.support.data_servers import failing, hooked
from tests.support.stores import is_marked

ROOT, ME, UNIT = 1, Caller(), 4096
SETTINGS = {
    "layout.unit": "4KiB",
    "burst.directories": "",
    "meta.commit_interval": "1h",
    "data.writeback_interval": "1h",
}


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Filesystem]:
    with hooked():  # calls go to threads, and descriptors have paths
        async with stores.opened(directory, base=SETTINGS) as fs:
            yield fs


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with opened(directory) as fs:
        yield fs


class Held:
    """Operations that wait in their worker threads until ``release``; ``seen`` are the paths of all
    that came."""

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.seen: list[str] = []
        self._token = trio.lowlevel.current_trio_token()
        self._go = threading.Event()

    def wait(self, path: str) -> None:
        self.seen.append(path)
        self._token.run_sync_soon(self.arrived.set)
        assert self._go.wait(300)

    def release(self) -> None:
        self._go.set()


@contextmanager
def holding(op: str, wanted: Callable[[str], bool]) -> Iterator[Held]:
    held = Held()

    def action(name: str, path: str) -> None:
        if name == op and wanted(path):
            held.wait(path)

    with hooked(action):
        try:
            yield held
        finally:
            held.release()


def is_object(path: str) -> bool:
    return "/objects/" in path


async def make(fs: Filesystem, name: bytes, size: int) -> tuple[int, int]:
    (handle, *_), inode = await fs.create(ROOT, name, 0o644, os.O_RDWR, ME)
    if size:
        await fs.write(handle, 0, b"a" * size)
    return handle, inode.ino


async def test_fsync_does_not_take_the_mark_of_a_write_that_is_under_way(fs: Filesystem) -> None:
    handle, ino = await make(fs, b"f", 2 * UNIT)
    async with trio.open_nursery() as nursery:
        with holding("sync_file", is_object) as syncing:
            nursery.start_soon(fs.fsync, handle)
            await syncing.arrived.wait()
            with holding("write_at", is_object) as writing:
                nursery.start_soon(fs.write, handle, 0, b"b" * UNIT)
                await writing.arrived.wait()
                syncing.release()
                # The fsync ends while the write still waits for its server.
                while len(nursery.child_tasks) > 1:
                    await trio.lowlevel.checkpoint()
                assert await is_marked(fs, ino)
    synced: list[str] = []
    with hooked(
        lambda op, path: synced.append(path) if op == "sync_file" and is_object(path) else None
    ):
        await fs.fsync(handle)
    assert synced, "the bytes of the second write were never synced"
    assert not await is_marked(fs, ino)
    await fs.release(handle)


async def test_fsync_does_not_take_the_mark_of_a_truncation_that_is_under_way(fs):
    handle, ino = await make(fs, b"f", 2 * UNIT)
    async with trio.open_nursery() as nursery:
        with holding("sync_file", is_object) as syncing:
            nursery.start_soon(fs.fsync, handle)
            await syncing.arrived.wait()
            with holding("truncate", is_object) as growing:
                nursery.start_soon(fs.setattr, ino, SetAttr(size=9 * UNIT), ME, handle)
                await growing.arrived.wait()
                syncing.release()
                while len(nursery.child_tasks) > 1:
                    await trio.lowlevel.checkpoint()
                assert await is_marked(fs, ino)
    assert await is_marked(fs, ino)
    await fs.release(handle)


async def test_a_write_that_had_to_wait_looks_again_at_what_it_waited_for(fs: Filesystem) -> None:
    handle, ino = await make(fs, b"f", 2 * UNIT)
    await fs.fsync(handle)
    await fs.write(handle, 0, b"b" * UNIT)
    async with trio.open_nursery() as nursery:
        gate = fs.io.table.open[ino].gate
        await gate.enter_alone()
        nursery.start_soon(fs.write, handle, 0, b"c" * UNIT)
        await trio.testing.wait_all_tasks_blocked()
        # What a truncation to zero does behind the gate.
        await fs.io.capacity._discard(fs.io.table.open[ino])
        gate.leave_alone()
    assert bytes(await fs.read(handle, 0, 3 * UNIT)) == b"c" * UNIT
    assert await is_marked(fs, ino)
    await fs.release(handle)


async def test_objects_of_a_file_that_failed_to_outgrow_its_record_are_not_used_again(
    fs, directory
):
    handle, ino = await make(fs, b"f", 100)
    with failing("write_at", f"{directory}/data", errno.ENOSPC), pytest.raises(NoSpace):
        await fs.write(handle, 100, b"b" * 2 * UNIT)
    with holding("unlink", is_object) as collecting:
        await collecting.arrived.wait()  # the collector deletes what the attempt has left
        await fs.write(handle, 100, b"b" * 2 * UNIT)
        await fs.fsync(handle)
        collecting.release()
        while fs.collector.backlog:
            await trio.lowlevel.checkpoint()
    await fs.release(handle)
    handle, *_ = await fs.open(ino, os.O_RDONLY)  # with descriptors of its own
    assert bytes(await fs.read(handle, 0, 3 * UNIT)) == b"a" * 100 + b"b" * 2 * UNIT
    await fs.release(handle)


async def test_a_rename_makes_files_durable_that_have_several_names(fs: Filesystem) -> None:
    top = await fs.mkdir(ROOT, b"new", 0o755, ME)
    handle, ino = await make(fs, b"temporary", 2 * UNIT)
    await fs.release(handle)
    await fs.link(ino, top.ino, b"shard")
    await fs.unlink(ROOT, b"temporary")
    await fs.rename(ROOT, b"new", ROOT, b"checkpoint")
    assert not await is_marked(fs, ino)


async def test_an_exchange_makes_both_sides_durable(fs: Filesystem) -> None:
    inos = []
    for name in (b"old", b"new"):
        handle, ino = await make(fs, name, 2 * UNIT)
        await fs.release(handle)
        inos.append(ino)
    await fs.rename(ROOT, b"old", ROOT, b"new", 2)
    assert [await is_marked(fs, ino) for ino in inos] == [False, False]


async def test_two_servers_that_are_added_at_once_get_numbers_of_their_own(directory: Path) -> None:
    async with opened(directory) as fs:
        count = len(fs.store.servers.capacity())
        paths = [directory.parent / "extra1", directory.parent / "extra2"]
        async with trio.open_nursery() as nursery:
            for path in paths:
                nursery.start_soon(fs.setxattr, ROOT, b"user.aifs.server-add", os.fsencode(path))
        assert {fs.store.servers[count + place].address for place in (0, 1)} == {
            str(path) for path in paths
        }
    async with opened(directory) as fs:
        assert len(fs.store.servers.capacity()) == count + 2


async def test_the_kernel_is_told_when_the_count_of_blocks_becomes_exact(fs: Filesystem) -> None:
    told: list[int] = []
    fs.kernel.drop_attributes = told.append
    handle, ino = await make(fs, b"f", UNIT)
    await fs.write(handle, 400 * UNIT, b"b" * UNIT)
    for finish in (fs.fsync, fs.release):
        for _ in range(50):
            await fs.write(handle, 0, b"c" * UNIT)
        guess = (await fs.getattr(ino)).blocks
        told.clear()
        await finish(handle)
        assert (await fs.getattr(ino)).blocks < guess
        assert told == [ino]


@pytest.mark.sweep
@pytest.mark.parametrize("synced", [True, False])
@pytest.mark.parametrize(
    ("size", "refused"),
    [
        (100, 0),
        (100, 50),
        (100, 200),
        (0, 100),
        (2 * UNIT, UNIT),
        (2 * UNIT, 3 * UNIT),
        (2 * UNIT, 0),
    ],
)
async def test_a_truncation_that_is_refused_is_neither_seen_nor_saved_later(
    directory: Path, size: int, refused: int, synced: bool
) -> None:
    async with opened(directory) as fs:
        handle, ino = await make(fs, b"f", size)
        if synced:
            await fs.fsync(handle)
        with failing("write_at", str(directory / "meta"), errno.ENOSPC), pytest.raises(NoSpace):
            await fs.setattr(ino, SetAttr(size=refused), ME, handle)
        assert (await fs.getattr(ino)).size == size
        assert bytes(await fs.read(handle, 0, 4 * UNIT)) == b"a" * size
        await fs.write(handle, size + 100, b"b")  # what lies between is a hole
        await fs.fsync(handle)
        await fs.release(handle)
    async with opened(directory) as fs:
        handle, *_ = await fs.open(ino, os.O_RDONLY)
        assert bytes(await fs.read(handle, 0, 4 * UNIT)) == b"a" * size + bytes(100) + b"b"
        await fs.release(handle)


async def test_background_work_that_a_full_disk_stops_says_so_in_a_line_and_goes_on(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(directory) as fs:
        with failing("write_at", str(directory / "meta"), errno.ENOSPC), trio.fail_after(300):
            fs.scrub.start()
            while "the scrub has to wait" not in caplog.text:
                await trio.sleep(0.01)
        fs.upkeep.wake(Work.SCRUB)
        with trio.fail_after(300):
            await fs.scrub.wait()
    assert "No space left on device" in caplog.text and "Traceback" not in caplog.text
