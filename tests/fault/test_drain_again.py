"""A file that changes again and again is drained less often, unless somebody needs it drained."""

import os

import trio

from aifs.burst import queue
from aifs.burst.tier import BurstTier
from aifs.core.upkeep import Work
from aifs.files.types import ROOT
from aifs.meta.keys import ROOT_INO
from aifs.vfs.filesystem import Filesystem
from tests.support.stores import ask, drained, opened, overwrite, put

NAME = b"log"


async def changed_again(fs: Filesystem) -> int:
    """A file that was drained a moment ago, and has changed since."""
    handle, inode = await fs.create(ROOT_INO, NAME, 0o600, os.O_RDWR, ROOT)
    await fs.write(handle.handle, 0, bytes(range(256)) * 512)
    await fs.release(handle.handle)
    await drained(fs, inode.ino)
    await append(fs, inode.ino)
    return inode.ino


async def append(fs: Filesystem, ino: int) -> None:
    await overwrite(fs, ino, 131_072, b"one more")


async def until_drained(fs: Filesystem, ino: int) -> None:
    """The file's drain comes by itself."""
    while (await ask(fs, ino, "state"))["state"] != "cached":
        await trio.sleep(0.01)


async def test_it_waits_and_says_how_long(directory, monkeypatch):
    monkeypatch.setattr(queue, "_COST", 10**6)
    async with opened(directory) as fs:
        ino = await changed_again(fs)
        told = await ask(fs, ROOT_INO, "drain")
        assert (told["files"], told["again_files"]) == (1, 1)
        assert 200 < told["again_in_s"] <= 270, "of the deadline of 5 min"
        assert (await ask(fs, ino, "drain"))["again_files"] == 1
        await fs.rename(ROOT_INO, NAME, ROOT_INO, b"log.1", 0, ROOT)  # it gets its final name
        await until_drained(fs, ino)
        await append(fs, ino)
        while not (await ask(fs, ino, "drain"))["again_files"]:  # the drain is ending
            await trio.sleep(0.01)
        await put(fs, ino, "drain", caller=ROOT)
        await until_drained(fs, ino)
        await append(fs, ino)
        await fs.wait_drained(ino)
        await append(fs, ino)
    async with opened(directory) as fs:
        await until_drained(fs, ino)  # what a mount has left is drained after the next one


async def test_where_room_is_short_it_does_not_wait(directory, monkeypatch):
    monkeypatch.setattr(queue, "_COST", 10**6)
    async with opened(directory) as fs:
        ino = await changed_again(fs)
        assert (await ask(fs, ino, "drain"))["again_files"] == 1
        with monkeypatch.context() as patch:
            patch.setattr(BurstTier, "pressure", 0.5)
            fs.upkeep.wake(Work.LOOK_AT_BURST)
            await until_drained(fs, ino)


async def test_after_fsync_it_does_not_wait_where_that_drains(directory, monkeypatch):
    monkeypatch.setattr(queue, "_COST", 10**6)
    async with opened(directory, {"burst.drain_on_fsync": "true"}) as fs:
        ino = await changed_again(fs)
        handle, *_ = await fs.open(ino, os.O_RDWR)
        await fs.write(handle, 0, b"new")
        await fs.fsync(handle, False)
        await fs.release(handle)
        await until_drained(fs, ino)
