"""Power cuts while a file is passed through to its blocks, and these become its copy."""

import os
import random
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.upkeep import Work
from aifs.vfs import Caller
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.powercut import PowerCut, is_crash
from tests.support.stores import drained, opened

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 1200
NEW = b"new" + CONTENT[3:]
SETTINGS = modes.STRIPED | {
    "layout.unit": "4KiB",
    "layout.count": "3",
    "layout.inline_limit": "0",
    "burst.stage_for_write": "0",
    "burst.blocks": "always",
    "data.movers": "0",
}
CUTS = 8


async def all_of(kernel: Kernel, ino: int) -> bytes:
    handle = await kernel.open(ino, os.O_RDONLY)
    found = bytes(await kernel.read(handle, 0, 1 << 20))
    await kernel.release(handle)
    return found


async def keep(kernel: Kernel, ino: int) -> bytes:
    """The file, all blocks of which are here then."""
    await kernel.tier.look()
    found = await all_of(kernel, ino)
    while kernel.blocks.status()["waiting_bytes"]:
        await kernel.upkeep.have_done(Work.BLOCKS)
    return found


async def make(directory: Path) -> int:
    """A clean file, all blocks of which are here, also by the map on disk."""
    async with opened(directory, SETTINGS, base=modes.WAITING, servers=3) as fs:
        async with Kernel(fs) as kernel:
            handle, inode = await kernel.create(ROOT, b"f", 0o644, os.O_RDWR, ME)
            await kernel.write(handle, 0, CONTENT)
            await kernel.release(handle)
            await drained(kernel, inode.ino)
            while not await kernel.evictor.evict(inode.ino):
                await trio.sleep(0.001)
            assert await keep(kernel, inode.ino) == CONTENT
            return inode.ino


async def change(directory: Path, cut: PowerCut, ino: int, point: str, scratch: Path) -> None:
    """Up to a point, or until the change is written, or on stable storage."""
    async with opened(directory, sound=False) as fs, Kernel(fs) as kernel:
        assert await keep(kernel, ino) == CONTENT
        reader = await kernel.open(ino, os.O_RDONLY)
        before = kernel.direct_bytes
        assert bytes(await kernel.read(reader, 0, 1 << 20)) == CONTENT
        assert kernel.direct_bytes == before + len(CONTENT)
        if point in faults.POINTS:
            cut.crash_at(point)
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 0, NEW[:3])
        if point == "synced":
            await kernel.fsync(writer)
        for number in range(CUTS):
            cut.materialise(scratch / f"{number}", random.Random(number))
        await kernel.release(writer)
        await kernel.release(reader)


@pytest.mark.parametrize("point", ["burst.source.given", "vfs.burst.entered", "written", "synced"])
def test_a_power_cut(scratch: Path, point: str) -> None:
    ino = trio.run(make, scratch / "store")
    with PowerCut(scratch / "store") as cut:
        try:
            trio.run(change, scratch / "store", cut, ino, point, scratch)
        except BaseException as error:
            if not (cut.crashed and is_crash(error)):
                raise
            for number in range(CUTS):
                cut.materialise(scratch / f"{number}", random.Random(number))
        assert cut.crashed == (point in faults.POINTS)
    allowed = {"written": (CONTENT, NEW), "synced": (NEW,)}.get(point, (CONTENT,))

    async def look(after: Path) -> None:
        async with opened(after) as fs, Kernel(fs) as kernel:
            found = await keep(kernel, ino)
            assert found in allowed
            assert await keep(kernel, ino) == await all_of(kernel, ino) == found
            assert not kernel.blocks.status()["wrong_blocks"] or point != "synced"

    for number in range(CUTS):
        trio.run(look, scratch / f"{number}")
