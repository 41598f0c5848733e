"""Clean blocks of a file that another host changes or repairs where it is."""

import os
from pathlib import Path
from typing import Any

import pytest

from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.upkeep import Work
from aifs.data.objects.columns import Columns
from aifs.data.objects.recovery import Recovery
from aifs.meta import chunks
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.cluster import cluster_of, two_hosts
from tests.support.joined import joined
from tests.support.postgres import TestDatabase
from tests.support.spoil import flip
from tests.support.stores import moved_out, numbers, overwrite, read_file, write_file

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


MIRRORED = SHAPE | {"layout.count": "1", "layout.replicas": "2"}
PACKED = MIRRORED | {"layout.kind": "interleaved"}


async def rotten(fs: Filesystem, data: bytes) -> tuple[int, int]:
    """A file that every read shows with a wrong byte, and the id of its object set or container;
    the other copy of its bytes is right."""
    ino = await write_file(fs, b"file", data)
    await moved_out(fs, ino)
    inode = await fs.getattr(ino)
    objects = inode.objects
    if objects is not None:
        named_by, oid, offset = inode.named_by, inode.oid, 1000
    else:
        assert inode.chunks is not None
        _, [extent, *_] = await fs.store.engine.view(
            chunks.get_extents, inode.oid, inode.chunks.chunk, 0
        )
        named_by, oid, offset = 0, extent.place.container, extent.place.offset + 1000
        entry = await fs.containers.find(oid)
        assert entry is not None
        objects = entry.layout
    server = fs.store.servers[objects.servers[named_by % 2]]  # as Recovery chooses
    flip(server.where((named_by, oid)), offset)
    return ino, oid


async def forget(fs: Filesystem) -> None:
    """The read cache gives back its memory."""
    budget = fs.store.servers.budget
    size = budget.total - (16 << 20)
    await budget.acquire(size)
    budget.release(size)


async def scrubbed(fs: Filesystem) -> None:
    fs.scrub.start(bandwidth=0)
    await fs.scrub.wait()
    assert fs.scrub.state.counts["repaired"] == 1


@pytest.mark.parametrize("settings", [MIRRORED, PACKED], ids=["objects", "containers"])
@pytest.mark.parametrize("near", ["blocks", "memory", "open"])
async def test_what_another_host_has_repaired_in_place(
    scratch: Path, settings: dict[str, str], near: str
) -> None:
    """South has read the wrong bytes: it serves them neither from its blocks nor from memory."""
    data = os.urandom(300_000)
    blocks = {"burst.blocks": "off"} if near == "memory" else {}
    async with two_hosts(scratch / "s", settings | blocks) as (north, south, _):
        ino, oid = await rotten(north, data)
        await south.tier.look()
        handle = (await south.open(ino, os.O_RDONLY)).handle
        assert bytes(await south.read(handle, 0, len(data))) != data
        if near != "open":
            await south.release(handle)
        while south.blocks.status()["waiting_bytes"]:
            await south.upkeep.have_done(Work.BLOCKS)
        assert bool(south.blocks.bytes_of(oid)) == (near != "memory")
        if near == "blocks":
            await forget(south)
        assert await read_file(south, ino) != data
        await scrubbed(north)
        assert not south.blocks.bytes_of(oid)
        assert await read_file(south, ino) == data
        if near == "open":
            assert bytes(await south.read(handle, 0, len(data))) == data
            await south.release(handle)
        assert not await numbers(north, b"q")


@pytest.mark.parametrize("settings", [MIRRORED, PACKED], ids=["objects", "containers"])
async def test_what_was_read_before_another_host_has_repaired_it_is_not_kept(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    data = os.urandom(300_000)
    async with two_hosts(scratch / "s", settings) as (north, south, _):
        ino, _ = await rotten(north, data)
        await south.tier.look()
        below = Recovery.read

        async def read(*args: Any) -> memoryview:
            found = bytes(await below(*args))
            monkeypatch.undo()
            await scrubbed(north)
            return memoryview(found)

        monkeypatch.setattr(Recovery, "read", read)
        await read_file(south, ino)
        assert north.scrub.state.counts["repaired"]
        while south.blocks.status()["waiting_bytes"]:
            await south.upkeep.have_done(Work.BLOCKS)
        await forget(south)
        assert await read_file(south, ino) == data


async def test_what_was_repaired_while_a_host_was_away(scratch: Path) -> None:
    """Its map on disk has the blocks, and neither the record of the file nor that of its column
    says that they were filled before the repair."""
    data = os.urandom(300_000)
    async with cluster_of(scratch / "s", MIRRORED) as cluster:
        async with cluster.mounted("north") as north:
            ino, oid = await rotten(north, data)
            async with cluster.mounted("south") as south:
                await south.tier.look()
                assert await read_file(south, ino) != data
                while south.blocks.status()["waiting_bytes"]:
                    await south.upkeep.have_done(Work.BLOCKS)
                assert south.blocks.bytes_of(oid)
            await scrubbed(north)
            for kept in (False, True):  # what is read from now on it finds again
                async with cluster.mounted("south") as south:
                    await south.tier.look()
                    assert bool(south.blocks.bytes_of(oid)) == kept
                    assert await read_file(south, ino) == data
                    while south.blocks.status()["waiting_bytes"]:
                        await south.upkeep.have_done(Work.BLOCKS)


async def test_hosts_with_a_database_hear_of_a_repair(
    scratch: Path, database: TestDatabase
) -> None:
    data = os.urandom(300_000)
    async with joined(scratch, database, 2, MIRRORED) as (north, south):
        ino, oid = await rotten(north, data)
        await north.store.engine.shown()
        await south.tier.look()
        assert await read_file(south, ino) != data
        while south.blocks.status()["waiting_bytes"]:
            await south.upkeep.have_done(Work.BLOCKS)
        assert south.blocks.bytes_of(oid)
        await scrubbed(north)
        await north.store.engine.shown()
        assert not south.blocks.bytes_of(oid)
        assert await read_file(south, ino) == data


def die() -> None:
    raise Unavailable("the host dies")


@pytest.mark.parametrize("settings", [MIRRORED, PACKED], ids=["objects", "containers"])
async def test_a_repair_that_is_cut_off_before_other_hosts_hear_of_it(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    """South has kept the wrong bytes, and no scrub finds any more: so the rebuild tells it."""
    data = os.urandom(300_000)
    async with two_hosts(scratch / "s", settings) as (north, south, _):
        ino, oid = await rotten(north, data)
        await south.tier.look()
        write = Columns.write

        async def just_before(*args: Any) -> None:
            assert await read_file(south, ino) != data
            while south.blocks.status()["waiting_bytes"]:
                await south.upkeep.have_done(Work.BLOCKS)
            await write(*args)

        monkeypatch.setattr(Columns, "write", just_before)
        faults.arm("vfs.repair.patched", die)
        north.scrub.start(bandwidth=0)
        await north.upkeep.have_done(Work.SCRUB)
        faults.disarm_all()
        assert await numbers(north, b"q") and south.blocks.bytes_of(oid)
        await north.upkeep.have_done(Work.REBUILD)
        assert not await numbers(north, b"q")
        await forget(south)
        assert await read_file(south, ino) == data
        assert not south.blocks.status()["wrong_blocks"]


@pytest.mark.parametrize("settings", [MIRRORED, PACKED], ids=["objects", "containers"])
async def test_a_host_that_dies_while_it_repairs(scratch: Path, settings: dict[str, str]) -> None:
    """Its map on disk has the wrong bytes, which are right on the server when it comes back."""
    data = os.urandom(300_000)
    async with cluster_of(scratch / "s", settings) as cluster:
        async with cluster.mounted("north") as north:
            ino, _ = await rotten(north, data)
            await north.tier.look()
            assert await read_file(north, ino) != data
            while north.blocks.status()["waiting_bytes"]:
                await north.upkeep.have_done(Work.BLOCKS)
            await north.blocks.save()
            faults.arm("vfs.repair.patched", die)
            north.scrub.start(bandwidth=0)
            await north.upkeep.have_done(Work.SCRUB)
            faults.disarm_all()
        async with cluster.mounted("north") as north:
            await north.tier.look()
            assert await read_file(north, ino) == data
