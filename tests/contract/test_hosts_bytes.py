"""Bytes of a store that two hosts have mounted: who reads what, who gives up what, who deletes
what.
"""

import os
from pathlib import Path

import pytest

from aifs.core.errors import Busy, Unavailable
from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.vfs import filesystem
from tests.support import stores
from tests.support.cluster import two_hosts
from tests.support.stores import drained, overwrite, read_file, rewrite, write_file

DATA = bytes(range(256)) * 1000


async def numbers_of(fs, kind: bytes) -> list[int]:
    return await stores.numbers(fs, kind)


async def test_a_file_in_the_burst_tier_of_another_host_is_read_there(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        assert (await south.lookup(ROOT_INO, b"f")).size == len(DATA)
        assert await read_file(south, ino) == DATA
        assert (await south.getattr(ino)).in_burst
        assert south.tier.status()["devices"][0]["dirty_bytes"] == 0


async def test_a_host_sees_what_was_written_when_it_opens_the_file(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        await overwrite(north, ino, len(DATA), b"more")
        assert await read_file(south, ino) == DATA + b"more"
        assert bytes(await south.read(reader, 0, 10)) == DATA[:10]
        await south.release(reader)


async def test_a_reader_goes_on_when_the_home_has_drained_the_file(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        assert bytes(await south.read(reader, 0, 100)) == DATA[:100]
        await drained(north, ino)
        await north.evictor.evict(ino)
        await north.collector.drain()
        assert bytes(await south.read(reader, 100, 1000)) == DATA[100:1100]
        await south.release(reader)


async def test_who_wants_to_write_gets_the_file_from_its_home(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await overwrite(south, ino, 0, b"south")
        assert await read_file(south, ino) == b"south" + DATA[5:]
        assert await read_file(north, ino) == b"south" + DATA[5:]
        await overwrite(north, ino, 0, b"north")
        assert await read_file(south, ino) == b"north" + DATA[5:]


async def test_a_file_that_is_open_for_writing_is_not_given_up(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        writer, *_ = await north.open(ino, os.O_RDWR)
        with pytest.raises(Busy, match="north"):
            await south.open(ino, os.O_RDWR)
        with pytest.raises(Busy, match="north"):
            await south.open(ino, os.O_WRONLY | os.O_TRUNC)
        await north.write(writer, 0, b"x")
        await north.release(writer)
        assert await read_file(south, ino) == b"x" + DATA[1:]


async def test_a_home_that_does_not_answer_is_named(scratch: Path, monkeypatch):
    monkeypatch.setattr(filesystem, "HOME_WAIT_S", 0.0)
    async with two_hosts(scratch / "s") as (north, south, cluster):
        ino = await write_file(north, b"f", DATA)
        cluster.silent.add("north")
        with pytest.raises(Unavailable, match=f"inode {ino}: .* host north"):
            await read_file(south, ino)
        with pytest.raises(Unavailable, match=f"inode {ino}: .* host north"):
            await overwrite(south, ino, 0, b"x")
        cluster.silent.clear()
        assert await read_file(south, ino) == DATA


async def test_an_unlinked_copy_is_deleted_by_its_home(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await south.unlink(ROOT_INO, b"f")
        south.forget([ino])
        await south.collector.drain()
        assert await numbers_of(north, b"o") == []
        await north.collector.drain()
        assert await numbers_of(north, b"g") == []
        assert not list((scratch / "s").glob("burst/*/objects/**/*-*"))


async def test_what_a_host_makes_is_not_taken_for_garbage_by_another(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(south, b"f", DATA)
        target = await north.store.engine.view(namespace.get_inode, ino)
        assert target.in_burst
        await drained(south, ino)
        await north.collector.drain()
        assert await read_file(north, ino) == DATA


async def test_an_orphan_stays_as_long_as_a_host_holds_it(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        await north.unlink(ROOT_INO, b"f")
        await south.store.engine.transact(namespace.put_holds, [ino])
        north.forget([ino])
        await north.collector.drain()
        assert bytes(await south.read(reader, 0, 100)) == DATA[:100]
        await south.release(reader)
        south.collector.add_orphan(ino)
        await south.collector.drain()
        await north.collector.drain()
        assert await numbers_of(north, b"i") == [ROOT_INO]
        assert await numbers_of(north, b"g") == []


async def test_a_clean_copy_elsewhere_is_given_up_by_who_writes(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await drained(north, ino)
        assert (await north.getattr(ino)).copy is not None
        assert await read_file(south, ino) == DATA
        await rewrite(south, ino, b"new" * 2000)
        assert await read_file(north, ino) == b"new" * 2000
        await north.collector.drain()
        assert await numbers_of(north, b"g") == []
