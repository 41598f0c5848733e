"""Columns that move, are rebuilt, or have lost bytes, while programs use the file."""

import os
import random
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.data.inspecting.column_source import ColumnSource
from aifs.data.objects.cached_reads import ObjectSource, object_name
from aifs.data.objects.recovery import Recovery
from aifs.layout.placement import DRAINING
from aifs.meta import degraded
from aifs.store import store
from aifs.upkeep.moves import ColumnMover
from tests.fault.test_rebuild import (
    REDUNDANT,
    UNIT,
    Files,
    change,
    left,
    mounted,
    object_path,
    whole,
    write_file,
)
from tests.support import engines, points
from tests.support.stores import drained, numbers, overwrite, read_file, rewrite

WHOLE = {"layout.count": 1}
MIB = 1 << 20


async def leave(fs, ino: int) -> None:
    """Have the server of the file's first column drained."""
    await change(fs, (await fs.getattr(ino)).layout.servers[0], DRAINING)


@pytest.mark.sweep
async def test_a_file_that_was_passed_through_for_a_moment_while_it_moved_is_moved_whole(directory):
    """A worker that saw it busy gave up its piece; the others went on, and the flip saw nothing of
    that."""
    files = Files()
    async with mounted(directory, WHOLE) as fs:
        await files.write(fs, [30 * MIB])
        [ino] = files.contents
        pieces = 0

        async def make_way() -> None:
            nonlocal pieces
            await trio.lowlevel.checkpoint()
            pieces += 1
            # As a program does that opens it and closes it again.
            fs.io.table.open[ino].on_object = pieces == 5

        fs.rebuild.mover.make_way = make_way
        number = (await fs.getattr(ino)).layout.servers[0]
        await leave(fs, ino)
        await left(fs, number)
        await files.check(fs)


def stage_nothing(fs) -> None:
    """As when there is no room."""

    async def refuse(ino: int, must: bool = False) -> bool:
        return False

    fs.stager.stage = refuse


@pytest.mark.parametrize("kind", ["1x3", "2+1"])
async def test_an_object_that_has_been_cut_is_not_taken_for_a_hole_when_its_file_is_restriped(
    directory, kind
):
    async with mounted(directory, REDUNDANT[kind] | {"layout.count": 1}) as fs:
        data = random.Random(1).randbytes(UNIT if kind == "2+1" else 40 * UNIT)
        ino = await write_file(fs, b"f", data)
        stage_nothing(fs)
        layout = (await fs.getattr(ino)).layout
        assert layout.is_protected
        os.truncate(await object_path(fs, ino, 0), 0)
        opened = await fs.open(ino, os.O_RDWR)
        await fs.write(opened.handle, 0, b"x")
        assert not (await fs.getattr(ino)).layout.is_protected
        await fs.release(opened.handle)
        assert await read_file(fs, ino) == b"x" + data[1:]


async def test_a_read_that_the_move_of_a_column_has_overtaken_reports_no_damage(directory):
    """The old object is deleted; the column is whole elsewhere, and must not be taken for a lost
    one."""
    files = Files()
    async with mounted(directory, REDUNDANT["2+1"]) as fs:
        await files.write(fs, [40 * UNIT])
        [ino] = files.contents
        opened = await fs.open(ino, os.O_RDONLY)
        inode = fs.io.table.open[ino].inode
        stale = fs.io.sets.set_of(inode.layout, ino, inode.oid)  # as staging has them
        number = (await fs.getattr(ino)).layout.servers[0]
        await leave(fs, ino)
        await left(fs, number)
        oid, moved = (await fs.getattr(ino)).oid, fs.rebuild.status()["moved_columns"]
        assert bytes(await stale.read(0, 40 * UNIT, 40 * UNIT)) == files.contents[ino]
        stale.close()
        assert fs.damage.first() is None
        await whole(fs)
        assert fs.rebuild.status()["moved_columns"] == moved
        assert not await fs.store.engine.view(degraded.is_marked, oid)
        await fs.release(opened.handle)


async def test_what_was_cached_of_a_column_that_was_wrong_is_not_read_once_it_is_mended(directory):
    files = Files()
    async with mounted(directory, REDUNDANT["1x3"]) as fs:
        await files.write(fs, [3 * MIB])
        [ino] = files.contents
        inode = await fs.getattr(ino)
        source = fs.store.servers[inode.layout.servers[0]]
        name = object_name(source, (ino, inode.oid))
        cache = fs.store.servers.cache
        block = cache.start(
            ObjectSource(source, (ino, inode.oid), lambda buffer, offset: len(buffer)), 0, MIB
        )
        await block.bytes()
        assert cache.peek(name, 0) is block
        assert await fs.rebuild.request(inode.oid, ino, [0])
        await whole(fs)
        assert cache.peek(name, 0) is None
        await files.check(fs)


@pytest.mark.sweep
async def test_reports_that_keep_coming_while_a_round_hands_out_do_not_pile_up(directory):
    """Each was a level of recursion, until Python gave up and the daemon died."""
    async with mounted(directory, REDUNDANT["2+1"] | {"layout.unit": UNIT}) as fs:
        inos = [await write_file(fs, b"%d" % number, b"x" * UNIT) for number in range(40)]
        oids = {ino: (await fs.getattr(ino)).oid for ino in inos}
        depth = most = 0
        hand_out = fs.rebuild._hand_out

        async def counted(*args) -> None:
            nonlocal depth, most
            depth += 1
            most = max(most, depth)
            fs.damage.due()  # somebody asks for something
            try:
                await hand_out(*args)
            finally:
                depth -= 1

        fs.rebuild._hand_out = counted
        for ino, oid in oids.items():
            assert await fs.rebuild.request(oid, ino, [0])
        while await numbers(fs, b"q"):
            await fs.rebuild.news()
        assert most <= 2


async def test_a_move_whose_record_could_not_be_made_durable_is_tried_again(directory):
    files = Files()
    async with mounted(directory, WHOLE) as fs:
        await files.write(fs, [4 * UNIT])
        [ino] = files.contents
        number = (await fs.getattr(ino)).layout.servers[0]
        barrier, failed = fs.store.engine.barrier, 0

        async def failing(seq: int | None = None) -> None:
            nonlocal failed
            if not failed and await numbers(fs, b"m"):
                failed += 1
                raise Unavailable("the metadata store cannot be synced just now")
            await barrier(seq)

        fs.store.engine.barrier = failing
        await leave(fs, ino)
        await left(fs, number)
        assert failed
        await files.check(fs)


async def test_who_holds_the_gate_of_a_file_alone_finds_its_objects_where_they_were(directory):
    """Such as an open that is about to pass the file through to the descriptor that it has just
    been told."""
    files = Files()
    async with mounted(directory, WHOLE) as fs:
        await files.write(fs, [4 * UNIT])
        [ino] = files.contents
        number = (await fs.getattr(ino)).layout.servers[0]
        file = await fs.io.inodes.acquire(ino)
        await file.gate.enter_alone()
        objects, made = file.objects, trio.Event()
        faults.arm("vfs.move.made", made.set)
        await leave(fs, ino)
        await made.wait()
        for _ in range(50):
            await trio.lowlevel.checkpoint()
        found = file.objects, file.inode.layout.servers
        file.gate.leave_alone()
        await fs.io.inodes.release(file)
        assert found == (objects, (number,))
        await left(fs, number)
        await files.check(fs)


@pytest.mark.sweep
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_column_that_is_remade_when_its_file_has_just_been_emptied_does_not_stay(
    directory, monkeypatch, cancelled
):
    """The collector had deleted the objects already, and nobody else knew of the one that was made
    again. The rebuild may be cancelled just then, and an engine may give way to that."""
    waiting, go_on = trio.Event(), trio.Event()
    following = ColumnSource.following

    async def slow(self):
        found = await following(self)
        if found is not None:  # what others ask for meanwhile is past the end, and there at once
            waiting.set()
        await go_on.wait()
        return found

    async with mounted(directory, REDUNDANT["2+1"]) as fs:
        ino = await write_file(fs, b"f", random.Random(1).randbytes(2 * UNIT))
        inode, path = await fs.getattr(ino), await object_path(fs, ino, 0)
        path.unlink()
        transact = fs.store.engine.transact

        async def suspending(function, *args):
            await trio.lowlevel.checkpoint()
            return await transact(function, *args)

        def cancel() -> None:
            trio.lowlevel.current_task().parent_nursery.cancel_scope.cancel()

        monkeypatch.setattr(fs.store.engine, "transact", suspending)
        monkeypatch.setattr(ColumnSource, "following", slow)
        made = points.once("vfs.move.made", cancel if cancelled else lambda: None)
        assert await fs.rebuild.request(inode.oid, ino, [0])
        await waiting.wait()
        await rewrite(fs, ino, b"")
        await fs.collector.drain()
        assert not object_path_of(fs, inode, 1).exists()
        go_on.set()
        await whole(fs)
        await fs.rebuild.strays.sweep()
        assert made and not path.exists() and not await numbers(fs, b"m")


async def test_a_column_is_not_made_anew_before_those_who_read_the_open_file_are_told(
    directory, monkeypatch
):
    """A metadata engine may let the rebuild see a record before its transaction returns to us."""
    monkeypatch.setattr(store, "LmdbEngine", engines.Stopping)
    began, move = [], ColumnMover.move
    async with mounted(directory, REDUNDANT["1x3"]) as fs:
        ino = await write_file(fs, b"f", random.Random(1).randbytes(40 * UNIT))
        await drained(fs, ino)
        handle, *_ = await fs.open(ino, os.O_RDONLY)
        file = fs.handles[handle].file
        inode, objects = await fs.getattr(ino), file.objects

        async def noted(self, *args):
            began.append(file.objects)
            return await move(self, *args)

        monkeypatch.setattr(ColumnMover, "move", noted)
        async with trio.open_nursery() as nursery:
            fs.store.engine.stop("after", "put_damaged")
            nursery.start_soon(fs.rebuild.request, inode.oid, ino, [1])
            await fs.store.engine.stopped.wait()
            fs.damage.due()  # others have told the rebuild to look
            for _ in range(50):
                await trio.lowlevel.checkpoint()
            fs.store.engine.go.set()
        await whole(fs)
        await fs.release(handle)
    assert began and objects not in began


def object_path_of(fs, inode, column: int) -> Path:
    return Path(fs.store.servers[inode.layout.servers[column]].where((inode.ino, inode.oid)))


@pytest.mark.sweep
@pytest.mark.parametrize("who", ["reader", "writer"])
async def test_bytes_that_were_read_while_the_column_was_found_to_be_wrong_do_not_count(
    directory, monkeypatch, who
):
    """The rebuild in its place may have begun: what is there is neither the old nor the new."""
    files = Files()
    async with mounted(directory, REDUNDANT["1x3"]) as fs:
        await files.write(fs, [40 * UNIT])
        [ino] = files.contents
        stage_nothing(fs)
        inode, wrong = await fs.getattr(ino), []
        read, read_past = Recovery.read, Recovery.read_past

        async def overtaken(self, offset, length, size, strict=True):
            data = await read(self, offset, length, size, strict)
            if fs.io.table.is_open(ino) and not wrong:
                wrong.append(1)
                assert await fs.rebuild.request(inode.oid, ino, [1])
                return memoryview(bytes(length))  # holes of the new object
            return data

        async def overtaken_copy(self, offset, buffer, size):
            await read_past(self, offset, buffer, size)
            if not wrong:
                wrong.append(1)
                assert await fs.rebuild.request(inode.oid, ino, [1])
                buffer[:] = bytes(len(buffer))

        if who == "reader":
            monkeypatch.setattr(Recovery, "read", overtaken)
        else:
            monkeypatch.setattr(Recovery, "read_past", overtaken_copy)
            await overwrite(fs, ino, 0, b"x")
            files.contents[ino] = b"x" + files.contents[ino][1:]
        await files.check(fs)
        assert wrong
