"""Bytes that no file of a store with two hosts refers to: which host deletes them, and when."""

import os

import pytest
import trio
import trio.testing

from aifs.core import faults
from aifs.core.faults import SimulatedCrash
from aifs.layout.interleaved import container_layout
from aifs.layout.striped import Striped
from aifs.meta import forms, namespace
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, recovery
from tests.support import modes
from tests.support.cluster import NAMES, Cluster
from tests.support.cluster import cluster as cluster
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.points import crash
from tests.support.stores import drained, moved_out, read_file, rewrite, write_file
from tests.support.stores import numbers as numbers_of

DATA = bytes(range(256)) * 1000


@pytest.mark.parametrize("with_role", NAMES)
async def test_an_unlinked_copy_is_deleted_by_its_home(cluster, scratch, with_role):
    first, second = NAMES if with_role == NAMES[0] else reversed(NAMES)
    async with cluster.mounted(first) as one, cluster.mounted(second) as other:
        north, south = (one, other) if with_role == NAMES[0] else (other, one)
        ino = await write_file(north, b"f", DATA)
        await south.unlink(ROOT_INO, b"f")
        south.forget([ino])
        await south.collector.drain()
        assert await numbers_of(north, b"o") == []
        assert len(await numbers_of(north, b"g")) == 1
        await north.collector.drain()
        assert await numbers_of(north, b"g") == []
        assert not list((scratch / "s").glob("burst/*/objects/**/*-*"))


async def test_what_a_host_makes_is_not_taken_for_garbage_by_another(north, south):
    ino = await write_file(south, b"f", DATA)
    target = await north.store.engine.view(namespace.get_inode, ino)
    assert target.in_burst
    await drained(south, ino)
    await north.collector.drain()
    assert await read_file(north, ino) == DATA


async def test_an_orphan_stays_as_long_as_a_host_holds_it(north, south):
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


@pytest.mark.store(modes.STRIPED)
async def test_nothing_is_deleted_that_a_host_may_still_look_for(north, south, monkeypatch):
    ino = await write_file(south, b"f", DATA)
    await moved_out(south, ino)
    oid = (await south.getattr(ino)).oid
    asked: list[list[int]] = []

    async def shown(of_all: bool = False) -> None:
        if of_all:
            asked.append(await numbers_of(north, b"g"))

    monkeypatch.setattr(north.store.engine, "shown", shown)
    await rewrite(south, ino, b"")
    await north.collector.drain()
    assert oid in asked[0]
    assert oid not in await numbers_of(north, b"g")


async def test_what_a_dead_host_was_making_is_nobodys(cluster: Cluster, north: Filesystem) -> None:
    with pytest.raises(SimulatedCrash):
        async with cluster.mounted("south") as south:
            ino = await write_file(south, b"f", DATA)
            oid = await south.ids.take()
            await south.store.engine.transact(forms.put_garbage, [(ino, oid, Striped(4096, (0,)))])
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


async def test_what_is_made_again_meanwhile_is_left_alone(cluster, north):
    """A host begins a new session while the holder of the role looks at what its last one left."""
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


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.collect.erased", "vfs.collect.deleted"])
async def test_a_home_that_dies_while_it_collects_goes_on(cluster, north, point):
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


async def test_what_another_host_has_to_look_for_in_its_burst_directory_stays_on_record(
    cluster, north
):
    async with cluster.mounted("south") as south:
        (burst,) = [server.id for server in south.store.servers.burst()]
    window = recovery.Unlisted(burst, 1, 2)
    await north.store.engine.transact(lambda tx: tx.put(window.key, b""))
    await recovery.delete_unknown_objects(north.store)
    assert await north.store.engine.view(recovery.read_unlisted) == [window]
    async with cluster.mounted("south"):
        assert await north.store.engine.view(recovery.read_unlisted) == []
