"""Bytes of a store that two hosts have mounted: who reads what, who gives up what, who deletes
what.
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import Busy, Stale, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.data.reading.blocks import FilledSource
from aifs.layout.interleaved import container_layout
from aifs.layout.striped import Striped
from aifs.meta import forms, namespace
from aifs.meta.keys import ROOT_INO
from aifs.vfs import SetAttr, recovery
from tests.support import modes, stores
from tests.support.cluster import Cluster, cluster_of, two_hosts
from tests.support.stores import (
    OWNER,
    ask,
    drained,
    moved_out,
    overwrite,
    read_file,
    rewrite,
    write_file,
)

DATA = bytes(range(256)) * 1000
AT_ONCE = {"host.home_wait": "0s"}


async def numbers_of(fs, kind: bytes) -> list[int]:
    return await stores.numbers(fs, kind)


async def test_a_file_in_the_burst_tier_of_another_host_is_read_there(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        assert (await south.lookup(ROOT_INO, b"f")).size == len(DATA)
        assert await read_file(south, ino) == DATA
        assert (await south.getattr(ino)).in_burst
        told = (await ask(south, ino, "info"))["copy"]
        assert told == {"device": 0, "state": "dirty", "host": "north"}
        assert south.tier.status()["devices"][0]["dirty_bytes"] == 0


async def test_a_host_sees_what_was_written_when_it_opens_the_file(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        await overwrite(north, ino, len(DATA), b"more")
        assert await read_file(south, ino) == DATA + b"more"
        assert bytes(await south.read(reader, 0, 10)) == DATA[:10]
        await south.release(reader)


async def test_what_was_written_is_seen_when_close_returns(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        (handle, *_), inode = await north.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OWNER)
        await north.write(handle, 0, DATA)
        await north.flush(handle)
        assert (await south.lookup(ROOT_INO, b"f")).size == len(DATA)
        assert await read_file(south, inode.ino) == DATA
        await north.write(handle, len(DATA), b"more")
        await north.io.save_all()  # as it happens each commit interval
        assert await read_file(south, inode.ino) == DATA + b"more"
        await north.release(handle)


async def test_a_reader_that_asks_for_more_than_its_home_has_gets_what_there_is(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        south.io.open[ino].inode.size += 1000  # it has not heard of a truncation
        assert bytes(await south.read(reader, 0, len(DATA) + 1000)) == DATA
        await south.release(reader)


async def test_a_file_of_another_host_is_copied_and_has_no_holes(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        source, *_ = await south.open(ino, os.O_RDONLY)
        (target, *_), inode = await south.create(ROOT_INO, b"copy", 0o644, os.O_RDWR, OWNER)
        done = 0
        while more := await south.copy_file_range(source, done, target, done, len(DATA)):
            done += more
        assert await south.lseek(source, 7, os.SEEK_DATA) == 7
        assert await south.lseek(source, 7, os.SEEK_HOLE) == len(DATA)
        await south.release(source)
        await south.release(target)
        assert await read_file(north, inode.ino) == DATA


async def test_a_file_that_another_host_has_just_removed_is_not_opened_any_more(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        nameless, inode = await south.create(ROOT_INO, None, 0o600, os.O_RDWR, OWNER)
        await north.unlink(ROOT_INO, b"f")
        with pytest.raises(Stale):  # so the kernel looks the name up anew
            await south.open(ino, os.O_RDONLY)
        north.forget([ino])
        again, *_ = await south.open(inode.ino, os.O_RDONLY)
        await south.release(nameless.handle)
        await south.release(again)
        again, *_ = await south.open(inode.ino, os.O_RDONLY)  # the kernel knows it still
        await south.release(again)
        south.forget([inode.ino])


async def test_blocks_of_what_another_host_changes_in_place_are_read_anew(scratch: Path):
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await moved_out(north, ino)
        inode = await south.getattr(ino)
        assert inode.objects is not None
        cache, name = south.store.servers.cache, (inode.objects.servers[0], ino, inode.oid)

        async def fill(buffer: memoryview, offset: int) -> int:
            return len(buffer)

        source = FilledSource(name, 1 << 20, fill, lambda change: None)
        block = cache.start(source, 0, 1 << 20)
        assert block is not None
        await block.bytes()
        assert cache.peek(name, 0) is block
        await north.setattr(ino, SetAttr(mtime_ns=5), OWNER)
        assert cache.peek(name, 0) is None


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


async def test_a_home_that_does_not_answer_is_named(scratch: Path):
    async with two_hosts(scratch / "s", AT_ONCE) as (north, south, cluster):
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
        copy = (await north.getattr(ino)).copy
        assert copy is not None
        assert await read_file(south, ino) == DATA
        await rewrite(south, ino, b"new" * 2000)
        assert await read_file(north, ino) == b"new" * 2000
        await north.collector.drain()
        assert copy.id not in await numbers_of(north, b"g")


async def test_a_dead_host_is_named_and_comes_back_to_what_it_had(scratch: Path):
    async with cluster_of(scratch / "s", AT_ONCE) as cluster, cluster.mounted("north") as north:
        with pytest.raises(SimulatedCrash):
            async with cluster.mounted("south") as south:
                ino = await write_file(south, b"f", DATA)
                writer, *_ = await south.open(ino, os.O_RDWR)
                await south.write(writer, len(DATA), b"last")
                raise SimulatedCrash
        with pytest.raises(Unavailable, match=f"inode {ino}: .* host south"):
            await read_file(north, ino)
        assert await numbers_of(north, b"w") == [ino]
        async with cluster.mounted("south") as south:
            assert south.recovered.unsynced_files == 1
            assert await numbers_of(north, b"w") == []
            assert await read_file(north, ino) == DATA + b"last"
            assert await read_file(south, ino) == DATA + b"last"


async def test_what_a_dead_host_was_making_is_nobodys(scratch: Path):
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
        with pytest.raises(SimulatedCrash):
            async with cluster.mounted("south") as south:
                ino = await write_file(south, b"f", DATA)
                oid = await south.ids.take()
                await south.store.engine.transact(
                    forms.put_garbage, [(ino, oid, Striped(4096, (0,)))]
                )
                await south.containers.new(container_layout((1,)))
                await south.unlink(ROOT_INO, b"f")
                await north.collector.drain()
                assert oid in await numbers_of(north, b"g"), "it may still be being made"
                assert ino in await numbers_of(north, b"o")
                raise SimulatedCrash
        while await numbers_of(north, b"a"):
            await trio.sleep(0.01)
        await recovery.take_over(north.store, north.role, north.collector)
        await north.collector.drain()
        assert await numbers_of(north, b"o") == []
        left = await numbers_of(north, b"g")
        assert len(left) == 1, "the burst copy, which waits for its home"
        async with cluster.mounted("south") as south:
            await south.collector.drain()
            assert await numbers_of(north, b"g") == []


async def test_what_is_made_again_meanwhile_is_left_alone(scratch: Path):
    """A host begins a new session while the holder of the role looks at what its last one left."""
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
        async with cluster.mounted("south") as south:
            ino = await write_file(south, b"f", DATA)
            oid = await south.ids.take()
            await south.store.engine.transact(forms.put_garbage, [(ino, oid, Striped(4096, (0,)))])
            north.role.tell(True, frozenset({1}))  # as it was a moment ago
            await recovery.take_over(north.store, north.role, north.collector)
            await north.collector.drain()
            assert await numbers_of(north, b"g") == [oid]
            south.collector.add_garbage(oid)
            await south.collector.drain()
            assert await numbers_of(north, b"g") == []


async def test_the_role_comes_with_the_death_of_its_holder(scratch: Path):
    lives, dies = trio.Event(), trio.Event()

    async def live(cluster: Cluster) -> None:
        with suppress(SimulatedCrash):
            async with cluster.mounted("north") as north:
                assert north.role.held
                lives.set()
                await dies.wait()
                raise SimulatedCrash

    async with cluster_of(scratch / "s") as cluster, trio.open_nursery() as nursery:
        nursery.start_soon(live, cluster)
        await lives.wait()
        async with cluster.mounted("south") as south:
            assert not south.role.held
            tree = (await south.mkdir(ROOT_INO, b"tree", 0o755, OWNER)).ino
            await write_file(south, b"f", DATA, tree)
            dies.set()
            while not south.role.held:
                await trio.sleep(0.01)
            await south.remove_tree(ROOT_INO, b"tree")
            while await numbers_of(south, b"z"):
                await trio.sleep(0.01)


@pytest.mark.parametrize("point", ["vfs.collect.erased", "vfs.collect.deleted"])
async def test_a_home_that_dies_while_it_collects_goes_on(scratch: Path, point: str):
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
        with pytest.raises(SimulatedCrash):
            async with cluster.mounted("south") as south:
                ino = await write_file(south, b"f", DATA)
                await south.unlink(ROOT_INO, b"f")
                south.forget([ino])
                faults.arm(point, crash)
                await south.collector.drain()
        faults.disarm_all()
        async with cluster.mounted("south") as south:
            await south.collector.drain()
            assert await numbers_of(north, b"g") == []
            assert await numbers_of(north, b"i") == [ROOT_INO]


@pytest.mark.parametrize("point", ["vfs.burst.entered", "vfs.stage.copied"])
async def test_a_host_that_dies_while_it_takes_a_file_leaves_it_whole(scratch: Path, point: str):
    """What north had is given up, and south dies on the way to change it."""
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
        ino = await write_file(north, b"f", DATA)
        with suppress(SimulatedCrash):
            async with cluster.mounted("south") as south:
                faults.arm(point, crash)
                await overwrite(south, ino, 0, DATA[:5])
        faults.disarm_all()
        async with cluster.mounted("south") as south:
            assert await read_file(north, ino) == DATA
            assert await read_file(south, ino) == DATA


def crash() -> None:
    raise SimulatedCrash


async def test_what_another_host_has_to_look_for_in_its_burst_directory_stays_on_record(
    scratch: Path,
):
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
        async with cluster.mounted("south") as south:
            (burst,) = [server.id for server in south.store.servers.burst()]
        window = recovery.Unlisted(burst, 1, 2)
        await north.store.engine.transact(lambda tx: tx.put(window.key, b""))
        await recovery.delete_unknown_objects(north.store)
        assert await north.store.engine.view(recovery.read_unlisted) == [window]
        async with cluster.mounted("south"):
            assert await north.store.engine.view(recovery.read_unlisted) == []
