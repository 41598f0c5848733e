"""Hosts of a store that die or do not answer: what the others wait for, and the return."""

import os
from contextlib import suppress
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.meta.keys import ROOT_INO
from tests.support.cluster import Cluster, cluster_of
from tests.support.cluster import cluster as cluster
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.points import crash
from tests.support.stores import OWNER, overwrite, read_file, write_file
from tests.support.stores import numbers as numbers_of

DATA = bytes(range(256)) * 1000
AT_ONCE = {"host.home_wait": "0s"}


@pytest.mark.store(AT_ONCE)
async def test_a_home_that_does_not_answer_is_named(cluster, north, south):
    ino = await write_file(north, b"f", DATA)
    cluster.silent.add("north")
    with pytest.raises(Unavailable, match=f"inode {ino}: .* host north"):
        await read_file(south, ino)
    with pytest.raises(Unavailable, match=f"inode {ino}: .* host north"):
        await overwrite(south, ino, 0, b"x")
    cluster.silent.clear()
    assert await read_file(south, ino) == DATA


@pytest.mark.store(AT_ONCE)
async def test_a_rename_waits_until_a_dead_host_has_no_session(cluster, north, south, monkeypatch):
    """It does not answer any more, and its lease is not over yet."""
    tree = (await south.mkdir(ROOT_INO, b"tree", 0o755, OWNER)).ino
    await write_file(south, b"f", DATA, tree)
    assert await numbers_of(north, b"w"), "it is not synced"
    cluster.silent.add("south")
    asked = 0

    async def ask_live() -> frozenset[int]:
        nonlocal asked
        asked += 1
        hosts = {one.store.engine.host for one in (north, south)}
        return frozenset(hosts if asked < 3 else {north.store.engine.host})

    with monkeypatch.context() as patch:
        patch.setattr(north.role, "ask_live", ask_live)
        await north.lookup(ROOT_INO, b"tree")
        await north.rename(ROOT_INO, b"tree", ROOT_INO, b"new")
    assert asked == 3
    cluster.silent.clear()


@pytest.mark.store(AT_ONCE)
async def test_a_dead_host_is_named_and_comes_back_to_what_it_had(cluster, north):
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


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.burst.entered", "vfs.stage.copied"])
async def test_a_host_that_dies_while_it_takes_a_file_leaves_it_whole(cluster, north, point):
    """What north had is given up, and south dies on the way to change it."""
    ino = await write_file(north, b"f", DATA)
    with suppress(SimulatedCrash):
        async with cluster.mounted("south") as south:
            faults.arm(point, crash)
            await overwrite(south, ino, 0, DATA[:5])
    faults.disarm_all()
    async with cluster.mounted("south") as south:
        assert await read_file(north, ino) == DATA
        assert await read_file(south, ino) == DATA


async def test_a_home_that_cannot_be_asked_is_waited_for_once_and_named(
    cluster, north, south, monkeypatch, caplog
):
    """The kernel asks twice for a page that it does not get; an error has no text for programs."""
    ino, other = [await write_file(north, name, DATA) for name in (b"f", b"g")]
    cluster.silent.add("north")
    slept, sleep, now = [], trio.sleep, trio.current_time

    async def pass_by(seconds: float) -> None:
        slept.append(seconds)
        await sleep(0)

    with monkeypatch.context() as patch:
        patch.setattr(trio, "sleep", pass_by)
        patch.setattr(trio, "current_time", lambda: now() + sum(slept))
        reader, *_ = await south.open(ino, os.O_RDONLY)
        for _ in range(2):
            with pytest.raises(
                Unavailable, match=f"inode {ino}: its newest bytes are on host north"
            ):
                await south.read(reader, 0, 10)
        assert 14 < sum(slept) < 25  # with what background tasks slept; twice would be 30
        with pytest.raises(Unavailable):
            await read_file(south, other)
        assert sum(slept) < 25
    said = [
        one.getMessage().partition(":")[0] for one in caplog.records if one.levelname == "WARNING"
    ]
    assert [name.strip("/") for name in said] == ["f", "g"]
    caplog.clear()
    cluster.silent.clear()
    assert bytes(await south.read(reader, 0, 10)) == DATA[:10]
    cluster.silent.add("north")
    with monkeypatch.context() as patch:
        patch.setattr(trio, "sleep", pass_by)
        patch.setattr(trio, "current_time", lambda: now() + sum(slept))
        with pytest.raises(Unavailable):
            await south.read(reader, 0, 10)
    assert sum(slept) > 29, "it was there meanwhile"
    cluster.silent.clear()
    await south.release(reader)
    caplog.clear()
