"""Clones in a store that two hosts have mounted: one clones while the other one has the files open,
reads, writes, moves or removes them. No change of one of the files reaches the other, on either
host.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio

from aifs.core.errors import Busy
from aifs.layout.placement import DRAINING
from aifs.meta import namespace, shared
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, SetAttr
from tests.support import modes
from tests.support.cluster import two_hosts
from tests.support.stores import (
    OWNER,
    ROOT,
    drained,
    moved_out,
    overwrite,
    read_file,
    rewrite,
    write_file,
)

DATA = bytes(range(256)) * 160
SMALL = {"layout.unit": "4KiB", "layout.inline_limit": "100", "host.home_wait": "0s"}
FORMS: Mapping[str, Mapping[str, object]] = {
    "inline": {"layout.inline_limit": "64KiB"},
    "striped": modes.STRIPED,
    "in place": modes.STRIPED | {"burst.stage_for_write": "0"},
    "one object": modes.STRIPED | {"layout.count": "1", "burst.stage_for_write": "0"},
    "interleaved": modes.INTERLEAVED,
    "coded": modes.STRIPED | modes.CODED,
}
LONG = pytest.mark.long
every_form = pytest.mark.parametrize(
    "form", ["in place", *(pytest.param(form, marks=LONG) for form in FORMS if form != "in place")]
)
either_clones = pytest.mark.parametrize("cloner", ["north", pytest.param("south", marks=LONG)])


async def clone(fs: Filesystem, name: bytes = b"clone") -> int:
    """The inode number of a clone of the file."""
    await fs.clone(ROOT_INO, b"file", ROOT_INO, name, ROOT)
    return (await fs.lookup(ROOT_INO, name)).ino


async def opened_drained(writer: Filesystem, reader: Filesystem) -> tuple[int, int]:
    """A file that one host has written, and moved to the data servers: its inode number, and the
    handle by which the other one reads it."""
    ino = await write_file(writer, b"file", DATA)
    await moved_out(writer, ino)
    return ino, (await reader.open(ino, os.O_RDONLY)).handle


async def require(data: Mapping[int, bytes], *hosts: Filesystem) -> None:
    """All files are the same on all hosts."""
    for fs in hosts:
        for ino, expected in data.items():
            assert await read_file(fs, ino) == expected, (fs.store.config.host.name, ino)


@every_form
@either_clones
async def test_what_the_other_host_has_not_drained(scratch: Path, form: str, cloner: str) -> None:
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        one, other = (north, south) if cloner == "north" else (south, north)
        ino = await write_file(other, b"file", DATA)
        copy = await clone(one)
        await require({ino: DATA, copy: DATA}, north, south)
        await overwrite(other, ino, 5, b"new")
        changed = DATA[:5] + b"new" + DATA[8:]
        await require({ino: changed, copy: DATA}, north, south)
        await overwrite(one, copy, len(DATA), b"more")
        await require({ino: changed, copy: DATA + b"more"}, north, south)
        await drained(other, ino)
        await drained(one, copy)
        await require({ino: changed, copy: DATA + b"more"}, north, south)


@every_form
@either_clones
async def test_what_the_other_host_has_open_for_reading(
    scratch: Path, form: str, cloner: str
) -> None:
    """It has not heard of the clone when it goes on to write."""
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        one, other = (north, south) if cloner == "north" else (south, north)
        ino, reader = await opened_drained(north, other)
        assert await other.read(reader, 0, 100) == DATA[:100]
        copy = await clone(one)
        assert await other.read(reader, 0, 100) == DATA[:100]
        await overwrite(other, ino, 5, b"new")
        changed = DATA[:5] + b"new" + DATA[8:]
        assert await other.read(reader, 0, 100) == changed[:100]
        await require({ino: changed, copy: DATA}, north, south)
        await other.release(reader)
        again = (await one.open(copy, os.O_RDONLY)).handle
        await other.setattr(copy, SetAttr(size=1000), ROOT)
        assert await one.read(again, 0, 2000) == DATA[:1000]
        await one.release(again)
        await require({ino: changed, copy: DATA[:1000]}, north, south)


@every_form
async def test_what_the_other_host_has_open_for_writing(scratch: Path, form: str) -> None:
    """A tree is cloned as readers see it; a single file is refused, as on one host."""
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        top = (await north.mkdir(ROOT_INO, b"top", 0o755, OWNER)).ino
        ino = await write_file(north, b"log", DATA, top)
        await moved_out(north, ino)
        writer = (await south.open(ino, os.O_RDWR)).handle
        await south.write(writer, 5, b"new")
        changed = DATA[:5] + b"new" + DATA[8:]
        with pytest.raises(Busy):
            await north.clone(top, b"log", ROOT_INO, b"log", ROOT)
        await north.clone(ROOT_INO, b"top", ROOT_INO, b"clone", ROOT)
        copy = (await north.lookup((await north.lookup(ROOT_INO, b"clone")).ino, b"log")).ino
        await south.write(writer, 5, b"old")
        await south.release(writer)
        await require({copy: changed, ino: changed[:5] + b"old" + DATA[8:]}, north, south)


@every_form
async def test_both_change_what_they_share_at_the_same_time(scratch: Path, form: str) -> None:
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        ino = await write_file(north, b"file", DATA)
        await drained(north, ino)
        copy, third = await clone(south), await clone(north, b"third")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(overwrite, north, ino, 5, b"north")
            nursery.start_soon(overwrite, south, copy, 5, b"south")
        changed = {ino: DATA[:5] + b"north" + DATA[10:], copy: DATA[:5] + b"south" + DATA[10:]}
        await require(changed | {third: DATA}, north, south)


@every_form
@pytest.mark.parametrize("remover", ["north", pytest.param("south", marks=LONG)])
async def test_the_original_goes_on_either_host(scratch: Path, form: str, remover: str) -> None:
    """Who has it open goes on; its bytes go with the last who has them."""
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        ino = await write_file(north, b"file", DATA)
        await drained(north, ino)
        oid = (await north.getattr(ino)).oid
        copy = await clone(south)
        reader = (await south.open(ino, os.O_RDONLY)).handle
        fs = north if remover == "north" else south
        await fs.unlink(ROOT_INO, b"file")
        await south.store.engine.transact(namespace.put_holds, [ino])  # the feed sees to that
        north.forget([ino])
        await north.collector.drain()
        assert await south.read(reader, 0, len(DATA)) == DATA
        await south.release(reader)
        south.forget([ino])
        for each in (south, north):
            await each.collector.drain()
        await require({copy: DATA}, north, south)
        await rewrite(north, copy, b"new")
        await drained(north, copy)
        assert not await north.store.engine.view(shared.users, oid)


@pytest.mark.sweep
@pytest.mark.parametrize("form", ["in place", pytest.param("coded", marks=LONG)])
@either_clones
async def test_columns_move_while_the_other_host_clones(
    scratch: Path, form: str, cloner: str
) -> None:
    async with two_hosts(scratch / "s", SMALL | FORMS[form]) as (north, south, _):
        one, other = (north, south) if cloner == "north" else (south, north)
        ino, reader = await opened_drained(north, other)
        [number, *_] = (await north.getattr(ino)).layout.servers
        await north.store.table.change(number, DRAINING)
        copies: list[int] = []

        async def clone_on() -> None:
            for count in range(5):
                copies.append(await clone(one, b"%d" % count))
                await overwrite(one, copies[-1], count, b"x") if count % 2 else None

        async with trio.open_nursery() as nursery:
            nursery.start_soon(clone_on)
            north.rebuild.look()
            while north.rebuild.left(number) != (0, 0):
                await north.rebuild.news()
        north.rebuild.look()
        while north.rebuild.left(number) != (0, 0):
            await north.rebuild.news()
        assert await other.read(reader, 0, len(DATA)) == DATA
        await other.release(reader)
        expected = {
            copy: DATA[:count] + b"x" + DATA[count + 1 :] if count % 2 else DATA
            for count, copy in enumerate(copies)
        }
        await require({ino: DATA} | expected, north, south)
        for each in (ino, *copies):
            layout = (await north.getattr(each)).layout
            assert layout is None or number not in layout.servers
