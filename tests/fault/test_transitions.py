"""What others do while a transaction that changes a file's form, or its record, is under way: each
test holds one transaction function, before it runs or after its commit, as an engine may.
"""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.files.types import SetAttr
from aifs.meta import namespace
from aifs.store import store
from aifs.vfs.filesystem import Filesystem
from tests.support import engines, modes
from tests.support.stores import OWNER, drained, moved_out, opened, overwrite, read_file, write_file
from tests.support.stores import fs as fs

WAITING = modes.WAITING
SIZE = 300_000
KINDS = pytest.mark.parametrize(
    "kind", [modes.STRIPED, modes.INTERLEAVED], ids=["striped", "interleaved"]
)
WHEN = pytest.mark.parametrize("when", ["before", "after"])


class Held:
    """One transaction that does not go on."""

    def __init__(self) -> None:
        self.arrived = trio.Event()
        self.release = trio.Event()


@asynccontextmanager
async def held(fs: Filesystem, name: str, when: str) -> AsyncIterator[Held]:
    """The first transaction of this function stops ``before`` it runs, or ``after`` its commit."""
    engine, hold = fs.store.engine, Held()
    transact = engine.transact

    async def stop(function, at: str) -> None:
        if function.__name__ == name and when == at and not hold.arrived.is_set():
            hold.arrived.set()
            with trio.CancelScope(shield=True):
                await hold.release.wait()

    async def holding(function, *args):
        await stop(function, "before")
        result = await transact(function, *args)
        await stop(function, "after")
        return result

    engine.transact = holding
    try:
        yield hold
    finally:
        hold.release.set()
        engine.transact = transact


async def meanwhile(fs: Filesystem, hold: Held, first, *others) -> None:
    """Run ``others`` while ``first`` is held; all of them have ended on return."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(first)
        await hold.arrived.wait()
        for other in others:
            nursery.start_soon(other)
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        hold.release.set()


@pytest.mark.sweep
@KINDS
@WHEN
@pytest.mark.parametrize("change", ["write", "cut", "unlink"])
async def test_a_change_while_a_drain_flips_is_not_lost(
    directory: Path, kind: dict, when: str, change: str
) -> None:
    data = os.urandom(SIZE)
    async with opened(directory, kind, base=WAITING) as fs:
        ino = await write_file(fs, b"f", data)
        expected = {"write": b"new" + data[3:], "cut": data[:7], "unlink": data}[change]

        async def act() -> None:
            if change == "write":
                await overwrite(fs, ino, 0, b"new")
            elif change == "cut":
                await fs.setattr(ino, SetAttr(size=7), OWNER)
            else:
                await fs.unlink(1, b"f")
                fs.forget([ino])

        async with held(fs, "grow_forms", when) as hold:
            await meanwhile(fs, hold, lambda: drained(fs, ino), act)
        if change != "unlink":
            assert await read_file(fs, ino) == expected
            await moved_out(fs, ino)
            assert await read_file(fs, ino) == expected


@pytest.mark.sweep
@KINDS
@WHEN
async def test_a_write_while_a_copy_is_evicted_or_staged_is_not_lost(
    directory: Path, kind: dict, when: str
) -> None:
    data = os.urandom(SIZE)
    async with opened(directory, kind, base=WAITING) as fs:
        ino = await write_file(fs, b"f", data)
        await drained(fs, ino)
        async with held(fs, "put_evicted", when) as hold:
            await meanwhile(
                fs, hold, lambda: fs.evictor.evict(ino), lambda: overwrite(fs, ino, 0, b"one")
            )
        assert await read_file(fs, ino) == b"one" + data[3:]
        await moved_out(fs, ino)
        async with held(fs, "grow_forms", when) as hold:
            await meanwhile(
                fs, hold, lambda: fs.stager.stage(ino), lambda: overwrite(fs, ino, 1, b"two")
            )
        assert await read_file(fs, ino) == b"otwo" + data[4:]
        await moved_out(fs, ino)
        assert await read_file(fs, ino) == b"otwo" + data[4:]


@pytest.mark.sweep
@KINDS
@WHEN
async def test_attributes_that_are_set_while_a_file_flips_stay(
    directory: Path, kind: dict, when: str
) -> None:
    async with opened(directory, kind, base=WAITING) as fs:
        ino = await write_file(fs, b"f", bytes(SIZE))

        async def act() -> None:
            await fs.setattr(ino, SetAttr(mode=0o600, mtime_ns=10**18), OWNER)
            await fs.link(ino, 1, b"g")

        async with held(fs, "grow_forms", when) as hold:
            await meanwhile(fs, hold, lambda: drained(fs, ino), act)
        inode = await fs.getattr(ino)
        assert (inode.mode & 0o777, inode.mtime_ns, inode.nlink) == (0o600, 10**18, 2)
    async with opened(directory) as fs:
        inode = await fs.getattr(ino)
        assert (inode.mode & 0o777, inode.mtime_ns, inode.nlink) == (0o600, 10**18, 2)


@pytest.mark.store(base=WAITING)
@WHEN
async def test_a_close_that_puts_bytes_into_the_record_loses_no_write(fs, when):
    (handle, *_), inode = await fs.create(1, b"f", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"some bytes")
    async with held(fs, "grow_forms", when) as hold:
        await meanwhile(
            fs, hold, lambda: fs.release(handle), lambda: overwrite(fs, inode.ino, 5, b"BYTES")
        )
    assert await read_file(fs, inode.ino) == b"some BYTES"


@pytest.mark.store(base=modes.OFF)
@WHEN
async def test_writes_of_inline_bytes_at_a_time_both_count(fs: Filesystem, when: str) -> None:
    (handle, *_), inode = await fs.create(1, b"f", 0o644, os.O_RDWR, OWNER)
    async with held(fs, "put_inline", when) as hold:
        await meanwhile(
            fs, hold, lambda: fs.write(handle, 0, b"ab"), lambda: fs.write(handle, 2, b"cd")
        )
    assert await read_file(fs, inode.ino) == b"abcd"
    await fs.release(handle)


@pytest.mark.store(base=modes.OFF)
async def test_a_write_below_a_size_that_is_not_on_record_waits_for_that(fs: Filesystem) -> None:
    (handle, *_), inode = await fs.create(1, b"f", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, bytes(SIZE))
    done: list[int] = []

    async def write(offset: int) -> None:
        await fs.write(handle, offset, b"x" * 10)
        done.append(offset)

    async with held(fs, "put_size", "before") as hold, trio.open_nursery() as nursery:
        nursery.start_soon(write, SIZE + 100)
        await hold.arrived.wait()
        nursery.start_soon(write, SIZE + 50)
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        assert not done
        hold.release.set()
    assert len(done) == 2 and (await fs.getattr(inode.ino)).size == SIZE + 110
    await fs.release(handle)


@pytest.mark.store(base=modes.OFF)
async def test_the_time_of_a_write_below_a_size_that_is_being_recorded_is_recorded(fs):
    (handle, *_), inode = await fs.create(1, b"f", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, bytes(SIZE))
    file = fs.io.table.open[inode.ino]
    async with held(fs, "put_size", "after") as hold, trio.open_nursery() as nursery:
        nursery.start_soon(fs.write, handle, SIZE + 100, b"x" * 10)
        await hold.arrived.wait()
        nursery.start_soon(fs.write, handle, SIZE + 50, b"x" * 10)
        while not file.unsaved:  # until it has been written
            await trio.lowlevel.checkpoint()
        hold.release.set()
    await fs.io.inodes.save_all()
    recorded = await fs.store.engine.view(namespace.get_inode, inode.ino)
    assert (recorded.mtime_ns, recorded.size) == (file.inode.mtime_ns, SIZE + 110)
    await fs.release(handle)


@pytest.mark.store(base=WAITING)
@WHEN
async def test_a_mark_that_goes_while_the_file_is_opened_for_writing_comes_again(fs, when):
    ino = await write_file(fs, b"f", bytes(SIZE))
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    async with held(fs, "remove_marks", when) as hold:
        await meanwhile(fs, hold, lambda: fs.fsync(handle), lambda: overwrite(fs, ino, 0, b"new"))
    file = fs.io.table.open[ino]
    assert file.marked and not file.opening
    await fs.release(handle)
    assert (await read_file(fs, ino))[:4] == b"new\0"


@pytest.mark.store(base=WAITING)
async def test_a_close_that_was_cancelled_is_done_later(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", bytes(SIZE))
    file = await fs.io.inodes.acquire(ino)
    await file.gate.enter_alone()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fs.io.inodes.release, file)
        await trio.testing.wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    file.gate.leave_alone()
    assert ino in fs.io.table.open
    await fs.io.inodes.save_all()
    assert ino not in fs.io.table.open


@pytest.mark.sweep
@WHEN
@pytest.mark.parametrize("function", ["put_garbage", "describe_objects"])
async def test_a_file_that_is_emptied_before_a_staging_reads_it_is_not_staged(
    directory: Path, monkeypatch: pytest.MonkeyPatch, when: str, function: str
) -> None:
    monkeypatch.setattr(store, "LmdbEngine", engines.Stopping)
    async with opened(directory, modes.REPLICAS | modes.STRIPED, base=WAITING) as fs:
        ino = await write_file(fs, b"f", os.urandom(SIZE))
        await moved_out(fs, ino)
        staged = []

        async def stage() -> None:
            staged.append(await fs.stager.stage(ino))

        async with trio.open_nursery() as nursery:
            fs.store.engine.stop(when, function)
            nursery.start_soon(stage)
            await fs.store.engine.stopped.wait()
            await fs.setattr(ino, SetAttr(size=0), OWNER)
            fs.store.engine.go.set()
        assert staged == [False]
        assert await read_file(fs, ino) == b""
