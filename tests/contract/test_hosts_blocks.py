"""Clean blocks of a file that another host changes where it is."""

import os
from pathlib import Path

import pytest

from aifs.core.upkeep import Work
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.cluster import two_hosts
from tests.support.stores import moved_out, overwrite, read_file, write_file

SHAPE = (
    modes.WAITING
    | modes.STRIPED
    | {"burst.blocks": "always", "burst.stage_for_write": "0", "layout.inline_limit": "0"}
)


async def cached(fs: Filesystem, ino: int, data: bytes) -> None:
    """The host has read the file, and keeps its blocks."""
    await fs.tier.look()
    assert await read_file(fs, ino) == data
    while fs.blocks.status()["waiting_bytes"]:
        await fs.upkeep.have_done(Work.BLOCKS)
    assert fs.blocks.bytes_of((await fs.getattr(ino)).oid)


@pytest.mark.parametrize("is_open", [False, True])
async def test_what_another_host_has_changed_in_place(scratch: Path, is_open: bool) -> None:
    data = os.urandom(300_000)
    async with two_hosts(scratch / "s", SHAPE) as (north, south, _):
        ino = await write_file(north, b"file", data)
        await moved_out(north, ino)
        oid = (await north.getattr(ino)).oid
        for fs in (north, south):
            await cached(fs, ino, data)
        handle = (await south.open(ino, os.O_RDONLY)).handle if is_open else 0
        await overwrite(north, ino, 0, b"other")
        for _ in range(2):
            for fs in (south, north):
                assert await read_file(fs, ino) == b"other" + data[5:]
        if is_open:
            assert await south.read(handle, 0, 10) == b"other" + data[5:10]
            await south.release(handle)
        for fs in (north, south):
            assert not fs.blocks.bytes_of(oid)


async def test_a_host_that_comes_back_asks_what_stands(scratch: Path) -> None:
    """It has kept blocks, and the file was changed while it was away."""
    data = os.urandom(300_000)
    async with two_hosts(scratch / "s", SHAPE) as (north, south, _):
        ino = await write_file(north, b"file", data)
        await moved_out(north, ino)
        await cached(south, ino, data)
        await south.blocks.save()
        await overwrite(north, ino, 0, b"other")
        for device in list(south.blocks.devices.values()):  # as it was before that
            await south.blocks.load_device(device.server)
        assert await read_file(south, ino) == b"other" + data[5:]
        assert not south.blocks.bytes_of((await north.getattr(ino)).oid)
