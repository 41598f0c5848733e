"""Readers beside everything that moves a file or changes it: they see whole versions, and never
stale ones.
"""

import os
import random
import time
from pathlib import Path

import pytest
import trio

from aifs.vfs import Caller, open_filesystem
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.modes import config_of, make_store

ROOT, ME = 1, Caller()
FILES, SIZE, PIECE = 4, 40_000, 4_096
MODES = {
    "striped": modes.TINY,
    "interleaved": modes.TINY | modes.INTERLEAVED,
    "daemon": modes.TINY | modes.BY_DAEMON,
    "verified": modes.TINY
    | modes.BY_DAEMON
    | modes.INTERLEAVED
    | {"data.verify": "read", "layout.compress": "zstd:1"},
}


class Story:
    """Some files that are rewritten, drained, evicted and staged while others read them.

    Each byte of a version is its number, so a piece that is read must be all of one number, which
    is at least that of the last version whose writing had ended before the read began, and at most
    that of the last one begun.
    """

    def __init__(self, kernel: Kernel, seed: int, seconds: float) -> None:
        self.kernel = kernel
        self.rng = random.Random(seed)
        self.inos: list[int] = []
        self.begun = [0] * FILES
        self.written = [0] * FILES
        self.reads = self.moves = 0
        self.until = time.monotonic() + seconds

    async def make(self) -> None:
        for number in range(FILES):
            handle, inode = await self.kernel.create(ROOT, b"f%d" % number, 0o644, os.O_RDWR, ME)
            await self.kernel.write(handle, 0, bytes(SIZE))
            await self.kernel.release(handle)
            self.inos.append(inode.ino)

    @property
    def goes_on(self) -> bool:
        return time.monotonic() < self.until or not self.has_told_enough

    @property
    def has_told_enough(self) -> bool:
        return self.reads > 100 and self.moves > 5 and sum(self.written) > 2

    async def write(self) -> None:
        """A new version, piece by piece, in place. Readers may meet two numbers in a file, but not
        in a piece."""
        while self.goes_on:
            number = self.rng.randrange(FILES)
            version = self.begun[number] + 1
            if version > 255:
                return
            handle = await self.kernel.open(self.inos[number], os.O_RDWR)
            self.begun[number] = version
            for offset in range(0, SIZE, PIECE):
                await self.kernel.write(
                    handle, offset, bytes([version]) * min(PIECE, SIZE - offset)
                )
                await trio.lowlevel.checkpoint()
            self.written[number] = version
            await self.kernel.release(handle)
            for _ in range(self.rng.choice((1, 30, 300))):
                await trio.lowlevel.checkpoint()

    async def read(self) -> None:
        while self.goes_on:
            number = self.rng.randrange(FILES)
            handle = await self.kernel.open(self.inos[number], os.O_RDONLY)
            for _ in range(self.rng.randint(1, 8)):
                offset = self.rng.randrange(0, SIZE, PIECE)
                least = self.written[number]
                data = bytes(await self.kernel.read(handle, offset, PIECE))
                assert len(data) == min(PIECE, SIZE - offset)
                assert len(set(data)) == 1, (
                    f"file {number} at {offset} is torn: {sorted(set(data))}"
                )
                assert least <= data[0] <= self.begun[number], (
                    f"file {number} at {offset} is of version {data[0]}; {least} had been written"
                )
                self.reads += 1
                await trio.lowlevel.checkpoint()
            await self.kernel.release(handle)

    async def move(self) -> None:
        while self.goes_on:
            ino = self.rng.choice(self.inos)
            match self.rng.randrange(4):
                case 0:
                    self.kernel.drain.request([ino])
                case 1:
                    self.moves += await self.kernel.evictor.evict(ino)
                case 2:
                    self.moves += await self.kernel.stager.stage(ino)
                case 3:
                    await self.kernel.compaction.compact()
            await trio.lowlevel.checkpoint()


async def tell(directory: Path, mode: str, seed: int, seconds: float = 1.0) -> Story:
    settings = MODES[mode] | {"layout.unit": "4KiB", "layout.inline_limit": "0"}
    await trio.to_thread.run_sync(make_store, directory, settings)
    async with open_filesystem(config_of(directory)) as fs, Kernel(fs) as kernel:
        story = Story(kernel, seed, seconds)
        await story.make()
        async with trio.open_nursery() as nursery:
            for task in (story.write, story.read, story.read, story.read, story.move):
                nursery.start_soon(task)
    return story


@pytest.mark.sweep("mode")
@pytest.mark.parametrize("mode", MODES)
async def test_no_reader_sees_torn_or_stale_bytes(directory: Path, mode: str) -> None:
    await tell(directory, mode, seed=1)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 12))
@pytest.mark.parametrize("mode", MODES)
async def test_no_reader_ever_sees_torn_or_stale_bytes(
    directory: Path, mode: str, seed: int
) -> None:
    await tell(directory, mode, seed, seconds=10.0)
