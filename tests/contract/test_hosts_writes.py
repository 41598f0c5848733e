"""Two hosts write to one file of their store, by way of its home, also while it is away."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.burst.copy import BurstCopy
from aifs.burst.remote import CARRY_OUT
from aifs.core.errors import Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.data.objects.object_set import ObjectSet
from aifs.meta import forms
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, SetAttr
from tests.support import modes
from tests.support.cluster import cluster as cluster
from tests.support.cluster import cluster_of
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.stores import (
    OWNER,
    drained,
    moved_out,
    overwrite,
    read_file,
    rewrite,
    write_file,
)
from tests.support.stores import numbers as numbers_of

DATA = bytes(range(256)) * 1000
AT_ONCE = {"host.home_wait": "0s"}


APPEND = os.O_RDWR | os.O_APPEND


async def append(fs: Filesystem, handle: int, data: bytes) -> None:
    """As programs do whose kernel takes the file for empty."""
    assert await fs.write(handle, 0, data, False, True) == len(data)


async def test_a_file_that_is_open_for_writing_is_changed_at_its_home(north, south):
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    opened = await south.open(ino, os.O_RDWR)
    there, size = opened.handle, len(DATA)
    assert opened.direct and not opened.backing

    await south.write(there, 1, b"south")
    assert bytes(await north.read(here, 0, 8)) == DATA[:1] + b"south" + DATA[6:8]
    await north.write(here, 2, b"north")
    assert bytes(await south.read(there, 0, 8)) == DATA[:1] + b"snorth" + DATA[7:8]
    for number in range(10):  # of either, in turn
        await append(south, there, b"%03d" % (2 * number))
        await append(north, here, b"%03d" % (2 * number + 1))
    size += 60
    numbers = b"".join(b"%03d" % number for number in range(20))
    assert bytes(await south.read(there, size - 60, 100)) == numbers
    assert [(await fs.getattr(ino)).size for fs in (north, south)] == [size, size]
    assert await south.lseek(there, 0, os.SEEK_HOLE) == size

    await south.fallocate(there, 0, size, 100)
    await north.fallocate(here, 0, size, 200)
    assert (await south.getattr(ino)).size == size + 200
    await south.setattr(ino, SetAttr(size=7), OWNER, there)
    assert bytes(await north.read(here, 0, 100)) == DATA[:1] + b"snorth"
    await south.setattr(ino, SetAttr(size=5), OWNER)
    await south.setattr(ino, SetAttr(mtime_ns=5_000_000_000), OWNER)
    told = [await fs.getattr(ino) for fs in (north, south)]
    assert [(inode.size, inode.mtime_ns) for inode in told] == [(5, 5_000_000_000)] * 2
    await south.fallocate(there, 3, 1, 2)  # a hole
    source, *_ = await south.open(await write_file(south, b"g", DATA), os.O_RDONLY)
    assert await south.copy_file_range(source, 10, there, 4, 10) == 10
    await south.release(source)
    whole = DATA[:1] + bytes(2) + b"o" + DATA[10:20]
    assert await read_file(south, ino) == whole
    await south.fsync(there)

    await north.release(here)  # it stays the home
    await append(south, there, b"more")
    assert north.io.table.open[ino].may_be_written
    await south.flush(there)
    assert await read_file(north, ino) == whole + b"more"
    await south.release(there)
    assert ino not in north.io.table.open
    await rewrite(south, ino, DATA)
    assert await read_file(north, ino) == DATA


@pytest.mark.store(modes.STRIPED)
async def test_a_file_on_data_servers_has_a_home_while_it_is_open_for_writing(north, south):
    ino = await write_file(north, b"f", DATA)
    await moved_out(north, ino)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    await north.fsync(here)  # which does not end that
    for _ in range(5):
        await append(south, there, b"south")
        await append(north, here, b"north")
    await south.write(there, 0, b"written")
    assert bytes(await north.read(here, 0, 10)) == b"written" + DATA[7:10]
    await south.fsync(there)
    await north.release(here)
    await south.release(there)
    for fs in (north, south):
        assert await read_file(fs, ino) == b"written" + DATA[7:] + b"southnorth" * 5


@pytest.mark.sweep
async def test_what_two_hosts_write_to_a_tiny_file_is_all_there(north, south, monkeypatch):
    ino = await write_file(north, b"log", b"begin ")
    assert (await north.getattr(ino)).data == b"begin "
    here, *_ = await north.open(ino, APPEND)
    there, *_ = await south.open(ino, APPEND)
    await append(north, here, b"north ")
    await append(south, there, b"south ")
    await north.release(here)
    await south.release(there)
    assert await read_file(south, ino) == b"begin north south "

    # Neither has a burst copy: there is no room for it.
    for fs in (north, south):
        monkeypatch.setattr(fs.io.burst, "new_copy", no_copy)
    here, *_ = await north.open(ino, APPEND)
    there, *_ = await south.open(ino, APPEND)
    for number in range(5):
        await append(north, here, b"n%d " % number)
        await south.write(there, number, b"B")
        await append(south, there, b"s%d " % number)
    await south.setattr(ino, SetAttr(size=40), OWNER, there)
    await north.write(here, 39, b"N")
    expected = b"BBBBB north south " + b"".join(b"n%d s%d " % (n, n) for n in range(5))
    assert await read_file(north, ino) == expected[:39] + b"N"
    await south.setattr(ino, SetAttr(size=0), OWNER)
    for _ in range(1000):  # until it is too large for a record
        await append(north, here, b"north\n")
        await append(south, there, b"south\n")
    await north.release(here)
    await south.release(there)
    assert await read_file(north, ino) == b"north\nsouth\n" * 1000


async def test_a_tiny_file_that_grows_without_a_copy_gets_a_home(north, south, monkeypatch):
    monkeypatch.setattr(north.io.inodes.forecast, "is_tiny", lambda *_: True)
    (here, *_), inode = await north.create(ROOT_INO, b"f", 0o644, os.O_WRONLY, OWNER)
    await append(north, here, b"one ")
    assert (await south.getattr(inode.ino)).data == b"one "
    there, *_ = await south.open(inode.ino, APPEND)
    await append(south, there, b"two ")
    await append(north, here, b"three ")
    assert south.io.table.open[inode.ino].own_copy.is_open, "it is the home"
    await south.release(there)
    await north.release(here)
    assert await read_file(north, inode.ino) == b"one two three "
    (here, *_), inode = await north.create(ROOT_INO, b"g", 0o644, os.O_RDWR, OWNER)
    assert inode.in_burst, "who can read it may map it, or rely on what he reads"
    await north.release(here)


class Meanwhile:
    """The next time that ``south`` gets somewhere, ``north`` appends to a file, and closes it."""

    def __init__(self, north: Filesystem, ino: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.north, self.ino, self.patch = north, ino, monkeypatch
        self.data = b""
        self.reader: int | None = None

    async def due(self) -> None:
        data, self.data = self.data, b""
        if data:
            handle, *_ = await self.north.open(self.ino, APPEND)
            await append(self.north, handle, data)
            await self.north.release(handle)

    def after(self, kind: Any, name: str) -> None:
        """A method of this class has returned."""
        real = getattr(kind, name)

        async def method(*args: Any, **others: Any) -> Any:
            result = await real(*args, **others)
            await self.due()
            return result

        self.patch.setattr(kind, name, method)

    def after_commit(self, south: Filesystem, puts: Any) -> None:
        """A transaction function is on record everywhere, and who waits for it is not told yet;
        somebody has opened the file to read it."""
        engine = south.store.engine
        real = engine.transact

        async def transact(function: Any, *args: Any) -> Any:
            result = await real(function, *args)
            if function.__name__ == puts.__name__ and self.data:
                self.reader, *_ = await south.open(self.ino, os.O_RDONLY)
                await self.due()
            return result

        self.patch.setattr(engine, "transact", transact)


async def no_copy(*_: object, **__: object) -> None:
    """There is no room for one."""


@pytest.mark.store(modes.STRIPED)
@pytest.mark.parametrize("becomes", ["copy", "objects"])
async def test_what_is_made_of_a_tiny_file_counts_only_if_nobody_has_changed_it_meanwhile(
    north, south, monkeypatch, becomes
):
    """The other host takes the file and gives it back, all between a read of its bytes and the flip
    to what is made of them: so it is in the same form as before."""
    ino = await write_file(north, b"log", b"begin ")
    meanwhile = Meanwhile(north, ino, monkeypatch)
    if becomes == "copy":
        meanwhile.after(BurstCopy, "sync")
    else:
        monkeypatch.setattr(south.io.burst, "new_copy", no_copy)
        meanwhile.after(ObjectSet, "sync")
        there, *_ = await south.open(ino, APPEND)
    meanwhile.data = b"north "
    if becomes == "copy":
        there, *_ = await south.open(ino, APPEND)
    await append(south, there, DATA)
    assert not meanwhile.data
    await south.release(there)
    for fs in (north, south):
        assert await read_file(fs, ino) == b"begin north " + DATA


@pytest.mark.parametrize("puts", [forms.put_inline, forms.grow_forms])
async def test_core_has_no_older_bytes_than_the_record(north, south, monkeypatch, puts):
    """The other host changes the record between a commit of ours and the time when we hear that it
    was done."""
    ino = await write_file(north, b"log", b"begin ")
    meanwhile = Meanwhile(north, ino, monkeypatch)
    meanwhile.after_commit(south, puts)
    has_none = south if puts is forms.put_inline else north
    monkeypatch.setattr(has_none.io.burst, "new_copy", no_copy)
    there, *_ = await south.open(ino, APPEND)
    if puts is forms.put_inline:
        meanwhile.data = b"north "
    await append(south, there, b"south ")
    meanwhile.data = b"" if meanwhile.reader else b"north "
    await south.release(there)
    assert meanwhile.reader is not None
    await south.setattr(ino, SetAttr(mode=0o600), OWNER)  # which writes the record
    assert bytes(await south.read(meanwhile.reader, 0, 100)) == b"begin south north "
    await south.release(meanwhile.reader)
    for fs in (north, south):
        assert await read_file(fs, ino) == b"begin south north "


@pytest.mark.store(modes.STRIPED)
async def test_what_another_host_does_until_the_commit_counts(north, south, monkeypatch):
    """It writes in place, and syncs that: so the file is in the same form, and at rest. It records
    the file while it is truncated."""
    ino = await write_file(north, b"f", DATA)
    await moved_out(north, ino)
    engine = south.store.engine
    real = engine.transact
    due: dict[str, Any] = {}

    async def transact(function: Any, *args: Any) -> Any:
        if meanwhile := due.pop(function.__name__, None):
            await meanwhile()
        return await real(function, *args)

    async def write() -> None:
        await overwrite(north, ino, 0, b"new")
        await north.writeback.sync_files([ino])

    async def change_mode() -> None:
        await north.setattr(ino, SetAttr(mode=0o600), OWNER)

    monkeypatch.setattr(engine, "transact", transact)
    for fs in (north, south):
        monkeypatch.setattr(fs.io.stager, "bring", no_copy)  # it is changed where it is
    due["grow_forms"] = write
    assert not await south.io.stager.stage(ino)
    assert not due
    assert (await north.getattr(ino)).copy is None
    for fs in (north, south):
        assert await read_file(fs, ino) == b"new" + DATA[3:]
    due["put"] = change_mode
    await south.setattr(ino, SetAttr(size=1000), OWNER)
    assert not due
    for fs in (north, south):
        assert await read_file(fs, ino) == (b"new" + DATA[3:])[:1000]


async def test_what_is_truncated_is_not_drained_before(north, south):
    ino = await write_file(north, b"f", DATA)
    await rewrite(south, ino, b"new" * 2000)
    assert north.drain.status()["drained_bytes"] == 0
    assert await read_file(north, ino) == b"new" * 2000


@pytest.mark.store(AT_ONCE)
async def test_writes_through_a_home_that_is_not_there(cluster, north, south):
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    cluster.silent.add("north")
    for change in (
        lambda: append(south, there, b"x"),
        lambda: south.write(there, 0, b"x"),
        lambda: south.read(there, 0, 1),
        lambda: south.fsync(there),
        lambda: south.setattr(ino, SetAttr(size=1), OWNER, there),
    ):
        with pytest.raises(Unavailable, match=f"inode {ino}: .* host north"):
            await change()
    assert (await south.getattr(ino)).size == len(DATA)
    cluster.silent.clear()
    await append(south, there, b"x")
    await north.release(here)
    cluster.silent.add("north")
    await south.release(there)  # which north does not hear of
    cluster.silent.clear()
    assert await read_file(north, ino) == DATA + b"x"


async def test_an_append_is_carried_out_at_most_once(cluster, north, south):
    """The connection breaks when the home has done it, and before it has answered."""
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    carry_out = cluster.calls["north"].services[CARRY_OUT]
    broken = 0

    async def break_once(*args: Any) -> Any:
        nonlocal broken
        answer = await carry_out(*args)
        if broken < 1:
            broken += 1
            raise Unavailable("the connection has ended")
        return answer

    cluster.calls["north"].services[CARRY_OUT] = break_once
    with pytest.raises(Unavailable, match="host north"):
        await append(south, there, b"append")
    broken = 0
    await south.write(there, 0, b"write")  # what can be done twice is
    assert await read_file(north, ino) == b"write" + DATA[5:] + b"append"
    await north.release(here)
    await south.release(there)


async def test_a_home_that_begins_anew_has_forgotten_who_has_joined(scratch: Path):
    async with cluster_of(scratch / "s", AT_ONCE) as cluster, cluster.mounted("south") as south:
        with suppress(SimulatedCrash):
            async with cluster.mounted("north") as north:
                ino = await write_file(north, b"f", DATA)
                await north.open(ino, os.O_RDWR)
                there, *_ = await south.open(ino, APPEND)
                await append(south, there, b"first")
                raise SimulatedCrash
        async with cluster.mounted("north") as north:
            with pytest.raises(Unavailable, match="new session"):
                await south.fsync(there)  # it may be lost
            await south.fsync(there)
            here, *_ = await north.open(ino, os.O_RDWR)
            await append(south, there, b"second")
            await south.release(there)
            await north.release(here)
            assert await read_file(north, ino) == DATA + b"firstsecond"


async def test_a_home_that_has_forgotten_who_joined_has_lost_only_what_was_written(
    cluster, north, south
):
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    await cluster.calls["south"].call("north", CARRY_OUT, [ino, "leave", 1])
    await append(south, there, b"more")  # refused, and done when it has joined once more
    await south.fsync(there)
    await south.release(there)
    await north.release(here)
    assert await read_file(north, ino) == DATA + b"more"


async def test_who_has_joined_once_more_is_not_dropped_by_a_late_leave(cluster, north, south):
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    await south.release(there)
    assert north.io.table.open[ino].writers == 1
    there, *_ = await south.open(ino, APPEND)
    await cluster.calls["south"].call("north", CARRY_OUT, [ino, "leave", 1])
    assert north.io.table.open[ino].writers == 2
    await append(south, there, b"more")
    await south.fsync(there)
    await south.release(there)
    assert north.io.table.open[ino].writers == 1
    await north.release(here)
    assert await read_file(north, ino) == DATA + b"more"


async def test_a_leave_counts_also_if_nobody_waits_for_it_any_more(
    cluster, north, south, monkeypatch
):
    """Its connection ends, or its time, while what was written is shown: a third host hangs."""
    ino = await write_file(north, b"f", DATA)
    here, *_ = await north.open(ino, os.O_RDWR)
    there, *_ = await south.open(ino, APPEND)
    await append(south, there, b"more")
    hangs = trio.Event()

    async def shown(*_: Any) -> None:
        await hangs.wait()

    with monkeypatch.context() as patched, trio.CancelScope() as connection:
        patched.setattr(north.io, "show", shown)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cluster.calls["south"].call, "north", CARRY_OUT, [ino, "leave", 9])
            await trio.testing.wait_all_tasks_blocked()
            connection.cancel()
    assert north.io.table.open[ino].writers == 1
    await south.release(there)
    await north.release(here)
    await drained(north)
    assert ino not in north.io.table.open


async def test_what_is_written_while_a_sync_is_under_way_may_be_lost(scratch: Path):
    async with cluster_of(scratch / "s", AT_ONCE) as cluster, cluster.mounted("south") as south:
        with suppress(SimulatedCrash):
            async with cluster.mounted("north") as north:
                ino = await write_file(north, b"f", DATA)
                await north.open(ino, os.O_RDWR)
                there, *_ = await south.open(ino, APPEND)
                services = cluster.calls["north"].services
                carry_out, synced, written = services[CARRY_OUT], trio.Event(), trio.Event()

                async def held(asker: Any, arguments: Any, body: Any) -> Any:
                    answer = await carry_out(asker, arguments, body)
                    if arguments[1] == "sync":
                        synced.set()
                        await written.wait()
                    return answer

                services[CARRY_OUT] = held
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(south.fsync, there)
                    await synced.wait()
                    await append(south, there, b"late")
                    written.set()
                raise SimulatedCrash
        async with cluster.mounted("north"):
            with pytest.raises(Unavailable, match="new session"):
                await south.fsync(there)
            await south.release(there)


@pytest.mark.sweep
@pytest.mark.store(modes.STRIPED)
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
async def test_a_file_that_may_be_mapped_stays_with_its_home(north, south, flags):
    ino = await write_file(north, b"f", DATA)
    await moved_out(north, ino)
    north.io.capacity.perhaps_mapped[ino] = 0
    north.io.stager.bring = no_copy  # type: ignore[method-assign]
    await overwrite(north, ino, 0, b"mapped")
    with trio.fail_after(60):
        there, *_ = await south.open(ino, flags)
    await south.write(there, 0, b"SOUTH")
    await south.fsync(there)
    await south.release(there)
    left = b"" if flags & os.O_TRUNC else b"d" + DATA[6:]
    for fs in (north, south):
        assert await read_file(fs, ino) == b"SOUTH" + left


async def test_a_host_that_has_gone_is_no_writer_any_more(cluster, north):
    with suppress(SimulatedCrash):
        async with cluster.mounted("south") as south:
            ino = await write_file(north, b"f", DATA)
            here, *_ = await north.open(ino, os.O_RDWR)
            there, *_ = await south.open(ino, APPEND)
            await append(south, there, b"last")
            raise SimulatedCrash
    await north.release(here)
    while ino in north.io.table.open:
        await trio.sleep(0.01)
    async with cluster.mounted("south") as south:
        assert await read_file(south, ino) == DATA + b"last"


async def test_a_clean_copy_elsewhere_is_given_up_by_who_writes(north, south):
    ino = await write_file(north, b"f", DATA)
    await drained(north, ino)
    copy = (await north.getattr(ino)).copy
    assert copy is not None
    assert await read_file(south, ino) == DATA
    await rewrite(south, ino, b"new" * 2000)
    assert await read_file(north, ino) == b"new" * 2000
    await north.collector.drain()
    assert copy.id not in await numbers_of(north, b"g")


async def test_an_empty_copy_elsewhere_is_given_up_by_who_writes_a_few_bytes(north, south):
    ino = await write_file(north, b"f", DATA)
    reader, *_ = await north.open(ino, os.O_RDONLY)  # so it has its copy as long as it is open
    await rewrite(north, ino, b"")
    await drained(north, ino)
    assert (await south.getattr(ino)).copy is not None
    await rewrite(south, ino, b"few")
    await north.release(reader)
    assert await read_file(north, ino) == b"few"  # and fsck finds no record that is left
