"""Bytes of a store that two hosts have mounted: who reads what, who gives up what, who deletes
what.
"""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.burst.copy import BurstCopy
from aifs.burst.remote import CARRY_OUT
from aifs.core import clock, faults
from aifs.core.errors import Busy, Stale, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.data.objects.object_set import ObjectSet
from aifs.data.reading.blocks import FilledSource
from aifs.files import waiter
from aifs.files.flips import Draining, DrainOutcome
from aifs.layout.interleaved import container_layout
from aifs.layout.striped import Striped
from aifs.meta import forms, namespace
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, SetAttr, recovery
from tests.support import modes, stores
from tests.support.cluster import Cluster, cluster_of, two_hosts
from tests.support.kernel import Kernel
from tests.support.stores import (
    OWNER,
    ROOT,
    ask,
    drained,
    moved_out,
    overwrite,
    put,
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


async def test_who_opens_a_file_sees_what_its_home_has_written_before(scratch: Path):
    """So who copies a log and empties it (copytruncate) loses nothing of it."""
    async with two_hosts(scratch / "s") as (north, south, _):
        (log, *_), inode = await north.create(ROOT_INO, b"log", 0o644, os.O_WRONLY, OWNER)
        await north.write(log, 0, DATA)
        assert await read_file(south, inode.ino) == DATA
        await north.write(log, len(DATA), b"more")
        assert await read_file(south, inode.ino) == DATA + b"more"
        await south.setattr(inode.ino, SetAttr(size=0), ROOT)
        await north.write(log, 0, b"later")
        assert await read_file(south, inode.ino) == b"later"
        await north.release(log)


async def test_what_was_written_is_seen_when_close_returns(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        (handle, *_), inode = await north.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OWNER)
        await north.write(handle, 0, DATA)
        await north.flush(handle)
        assert (await south.lookup(ROOT_INO, b"f")).size == len(DATA)
        assert await read_file(south, inode.ino) == DATA
        await north.write(handle, len(DATA), b"more")
        await north.io.inodes.save_all()  # as it happens each commit interval
        assert await read_file(south, inode.ino) == DATA + b"more"
        await north.release(handle)


@pytest.mark.parametrize("kind", [{}, {"burst.drain_delay": "0s"}])
async def test_a_clock_that_jumps_shows_nothing_old(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, kind: dict[str, str]
):
    """By days and years, to and fro, on hosts that change one file in turns."""
    offset_ns, kernel_ns = 0, clock.kernel_ns
    monkeypatch.setattr(clock, "kernel_ns", lambda: kernel_ns() + offset_ns)
    async with two_hosts(scratch / "s", kind) as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        for number, days in enumerate((1, -1, 0, 3650, -3650, 0, -1, 1)):
            offset_ns = days * 86_400 * 10**9
            writer, reader = (north, south) if number % 2 else (south, north)
            for count in range(2):
                content = b"%d %d " % (number, count) * 3000
                handle, *_ = await writer.open(ino, os.O_RDWR | os.O_TRUNC)
                await writer.write(handle, 0, content)
                await writer.flush(handle)
                assert await read_file(reader, ino) == content
                await writer.release(handle)
                await writer.rename(ROOT_INO, b"f", ROOT_INO, b"f%d" % number)
                assert (await reader.lookup(ROOT_INO, b"f%d" % number)).ino == ino
                await reader.rename(ROOT_INO, b"f%d" % number, ROOT_INO, b"f")


async def test_a_close_waits_for_a_save_that_is_under_way(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    """Meanwhile the file counts as saved, and no other host knows of it."""
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        handle, *_ = await north.open(ino, os.O_RDWR)
        await north.write(handle, len(DATA), b"more")
        assert (await north.getattr(ino)).size == len(DATA) + 4  # all is in core
        engine, begun, goes_on = north.store.engine, trio.Event(), trio.Event()
        real, closed = engine.transact, trio.Event()

        async def transact(function: Any, *args: Any) -> Any:
            if function is forms.put_attributes:
                begun.set()
                await goes_on.wait()
            return await real(function, *args)

        async def close() -> None:
            await north.flush(handle)
            closed.set()

        monkeypatch.setattr(engine, "transact", transact)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(north.io.inodes.save_all)
            await begun.wait()
            nursery.start_soon(close)
            await trio.testing.wait_all_tasks_blocked()
            was_closed = closed.is_set()
            goes_on.set()
        assert not was_closed
        assert await read_file(south, ino) == DATA + b"more"
        await north.release(handle)


async def test_a_reader_that_asks_for_more_than_its_home_has_gets_what_there_is(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await south.open(ino, os.O_RDONLY)
        south.io.table.open[ino].inode.size += 1000  # it has not heard of a truncation
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


async def test_a_file_that_another_host_has_just_removed_is_opened_until_it_is_erased(
    scratch: Path,
):
    """The kernel has looked its name up before. Else programs would be told ESTALE where a name is
    replaced again and again."""
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        nameless, inode = await south.create(ROOT_INO, None, 0o600, os.O_RDWR, OWNER)
        await north.unlink(ROOT_INO, b"f")
        removed, *_ = await south.open(ino, os.O_RDONLY)
        north.forget([ino])
        await north.collector.drain()
        assert await south.read(removed, 0, len(DATA)) == DATA
        await south.release(removed)
        south.forget([ino])
        await south.collector.drain()
        with pytest.raises(Stale):  # so the kernel looks the name up anew
            await south.open(ino, os.O_RDONLY)
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


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("is_staged", [False, True])
async def test_what_another_host_changes_is_seen_while_programs_read_a_copy(
    scratch: Path, is_staged: bool, is_lent: bool
):
    """A program here keeps a file open that is passed through to a clean copy, so the kernel wants
    all later opens to be of that kind. The other host, which cannot ask for the copy, changes the
    objects, or a copy of its own. Mappings would be of the old copy: so nobody may write to one."""
    settings = modes.STRIPED | {"burst.stage_for_write": "1MiB" if is_staged else "0"}
    async with (
        two_hosts(scratch / "s", settings) as (north, south, cluster),
        Kernel(south) as there,
    ):
        ino, reader = await reading_past_us(south, there, is_clean=True, is_lent=is_lent)
        cluster.silent.add("south")
        writer, *_ = await north.open(ino, os.O_RDWR)
        cluster.silent.clear()
        await north.write(writer, 0, b"newer")
        assert (await north.getattr(ino)).in_burst == is_staged
        await north.fsync(writer)
        await require_read(there, ino, b"newer" + DATA[5:])
        await north.release(writer)
        await require_read(there, ino, b"newer" + DATA[5:])
        await drained(north, ino)
        await require_read(there, ino, b"newer" + DATA[5:])
        with pytest.raises(Busy):
            await there.open(ino, os.O_RDWR)
        await there.release(await there.open(ino, os.O_WRONLY))
        await there.release(reader)
        await require_read(there, ino, b"newer" + DATA[5:])
        await there.release(await there.open(ino, os.O_RDWR))


async def reading_past_us(
    fs: Filesystem, programs: Kernel, is_clean: bool, is_lent: bool
) -> tuple[int, int]:
    """A new file, and a handle that is passed through to its copy, which is ``is_clean`` or the
    file itself. ``is_lent``: the daemon was not asked for it."""
    ino = await write_file(fs, b"f", DATA)
    if is_clean:
        await drained(fs, ino)
    reader = await programs.open(ino, os.O_RDONLY)
    if is_lent:
        await programs.release(reader)
        reader = await programs.open(ino, os.O_RDONLY)
        assert programs.answered
    assert await programs.read(reader, 0, 10) == DATA[:10]
    assert programs.direct_bytes == 10
    return ino, reader


@pytest.mark.parametrize("is_lent", [False, True])
@pytest.mark.parametrize("is_clean", [False, True])
async def test_what_programs_read_past_their_host_is_changed_there(
    scratch: Path, is_clean: bool, is_lent: bool
):
    """Whatever has it mapped sees the change, and what is written by a mapping is not lost."""
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _), Kernel(south) as there:
        ino, reader = await reading_past_us(south, there, is_clean, is_lent)
        writer, *_ = await north.open(ino, os.O_RDWR)
        await north.write(writer, 0, b"newer")
        assert (await south.getattr(ino)).in_burst
        assert await there.read(reader, 0, 10) == b"newer" + DATA[5:10]
        assert there.direct_bytes == 20
        mapped = await there.open(ino, os.O_RDWR)
        await there.write(mapped, 5, b"there")
        await require_read(there, ino, b"newerthere" + DATA[10:])
        assert bytes(await north.read(writer, 0, 10)) == b"newerthere"
        for handle in (reader, mapped):
            await there.release(handle)
        await north.release(writer)
        await overwrite(north, ino, 0, b"taken")
        assert (await north.getattr(ino)).in_burst
        await require_read(there, ino, b"takenthere" + DATA[10:])


async def test_a_cache_that_programs_use_is_not_given_up_for_one_elsewhere(scratch: Path):
    settings = modes.STRIPED
    async with (
        two_hosts(scratch / "s", settings) as (north, south, cluster),
        Kernel(south) as there,
    ):
        ino, reader = await reading_past_us(south, there, is_clean=True, is_lent=False)
        assert not await north.io.stager.stage(ino)
        await there.release(reader)
        cluster.silent.add("south")
        assert not await north.io.stager.stage(ino)
        cluster.silent.clear()
        assert await north.io.stager.stage(ino)
        await require_read(there, ino, DATA)


async def require_read(programs: Kernel, ino: int, data: bytes) -> None:
    """A program that opens the file reads this."""
    handle = await programs.open(ino, os.O_RDONLY)
    assert bytes(await programs.read(handle, 0, len(data) + 1)) == data
    await programs.release(handle)


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


async def test_a_cached_copy_is_evicted_on_the_host_that_has_it(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, cluster):
        ino = await write_file(north, b"f", DATA)
        with pytest.raises(Busy, match="drain it first"):
            await put(south, ino, "evict", caller=ROOT)
        await drained(north, ino)
        reader, *_ = await north.open(ino, os.O_RDONLY)
        with pytest.raises(Busy, match="it is open"):
            await put(south, ino, "evict", caller=ROOT)
        await north.release(reader)
        cluster.silent.add("north")
        with pytest.raises(Unavailable, match="north"):
            await put(south, ino, "evict", caller=ROOT)
        cluster.silent.clear()
        await put(south, ino, "evict", caller=ROOT)
        for fs in (north, south):
            assert (await fs.getattr(ino)).copy is None
            assert await read_file(fs, ino) == DATA


async def test_who_waits_for_a_drain_is_told_that_another_host_writes(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(waiter, "GRACE_S", 0.0)
    async with two_hosts(scratch / "s") as (north, south, _):
        runs = (await north.mkdir(ROOT_INO, b"runs", 0o755, ROOT)).ino
        await put(north, runs, "publish", "capacity", ROOT)
        (writer, *_), inode = await north.create(ROOT_INO, b"f", 0o644, os.O_WRONLY, ROOT)
        await north.write(writer, 0, DATA)
        with trio.fail_after(60), pytest.raises(Busy, match="open for writing"):
            await south.rename(ROOT_INO, b"f", runs, b"f")
        await north.release(writer)
        await south.rename(ROOT_INO, b"f", runs, b"f")
        for fs in (north, south):
            assert not (await fs.getattr(inode.ino)).in_burst


async def test_an_access_time_that_is_set_back_stays_so(scratch: Path):
    """Also on a host that has the file in core, which records what core knows of it some day."""
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await moved_out(north, ino)
        reader, *_ = await south.open(ino, os.O_RDONLY | os.O_NOATIME)
        await read_file(north, ino)
        assert (await south.getattr(ino)).atime_ns > 10**9
        await north.setattr(ino, SetAttr(atime_ns=10**9), ROOT)
        assert (await south.getattr(ino)).atime_ns == 10**9
        await south.release(reader)
        for fs in (north, south):
            assert (await fs.getattr(ino)).atime_ns == 10**9


async def test_who_wants_to_write_gets_the_file_from_its_home(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await overwrite(south, ino, 0, b"south")
        assert await read_file(south, ino) == b"south" + DATA[5:]
        assert await read_file(north, ino) == b"south" + DATA[5:]
        await overwrite(north, ino, 0, b"north")
        assert await read_file(south, ino) == b"north" + DATA[5:]


APPEND = os.O_RDWR | os.O_APPEND


async def append(fs: Filesystem, handle: int, data: bytes) -> None:
    """As programs do whose kernel takes the file for empty."""
    assert await fs.write(handle, 0, data, False, True) == len(data)


async def test_a_file_that_is_open_for_writing_is_changed_at_its_home(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
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


async def test_a_file_on_data_servers_has_a_home_while_it_is_open_for_writing(scratch: Path):
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
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


async def test_what_two_hosts_write_to_a_tiny_file_is_all_there(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    async with two_hosts(scratch / "s") as (north, south, _):
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


async def test_a_tiny_file_that_grows_without_a_copy_gets_a_home(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    async with two_hosts(scratch / "s") as (north, south, _):
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


@pytest.mark.parametrize("becomes", ["copy", "objects"])
async def test_what_is_made_of_a_tiny_file_counts_only_if_nobody_has_changed_it_meanwhile(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, becomes: str
):
    """The other host takes the file and gives it back, all between a read of its bytes and the flip
    to what is made of them: so it is in the same form as before."""
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
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
async def test_core_has_no_older_bytes_than_the_record(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, puts: Any
):
    """The other host changes the record between a commit of ours and the time when we hear that it
    was done."""
    async with two_hosts(scratch / "s") as (north, south, _):
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


async def test_what_another_host_does_until_the_commit_counts(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    """It writes in place, and syncs that: so the file is in the same form, and at rest. It records
    the file while it is truncated."""
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
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


async def test_what_is_truncated_is_not_drained_before(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await rewrite(south, ino, b"new" * 2000)
        assert north.drain.status()["drained_bytes"] == 0
        assert await read_file(north, ino) == b"new" * 2000


async def test_writes_through_a_home_that_is_not_there(scratch: Path):
    async with two_hosts(scratch / "s", AT_ONCE) as (north, south, cluster):
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


async def test_an_append_is_carried_out_at_most_once(scratch: Path):
    """The connection breaks when the home has done it, and before it has answered."""
    async with two_hosts(scratch / "s") as (north, south, cluster):
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


async def test_a_home_that_has_forgotten_who_joined_has_lost_only_what_was_written(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, cluster):
        ino = await write_file(north, b"f", DATA)
        here, *_ = await north.open(ino, os.O_RDWR)
        there, *_ = await south.open(ino, APPEND)
        await cluster.calls["south"].call("north", CARRY_OUT, [ino, "leave", 1])
        await append(south, there, b"more")  # refused, and done when it has joined once more
        await south.fsync(there)
        await south.release(there)
        await north.release(here)
        assert await read_file(north, ino) == DATA + b"more"


async def test_who_has_joined_once_more_is_not_dropped_by_a_late_leave(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, cluster):
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
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its connection ends, or its time, while what was written is shown: a third host hangs."""
    async with two_hosts(scratch / "s") as (north, south, cluster):
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
                nursery.start_soon(
                    cluster.calls["south"].call, "north", CARRY_OUT, [ino, "leave", 9]
                )
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


@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_WRONLY | os.O_TRUNC])
async def test_a_file_that_may_be_mapped_stays_with_its_home(scratch: Path, flags: int):
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
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


async def test_a_host_that_has_gone_is_no_writer_any_more(scratch: Path):
    async with cluster_of(scratch / "s") as cluster, cluster.mounted("north") as north:
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


async def test_a_rename_waits_until_a_dead_host_has_no_session(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    """It does not answer any more, and its lease is not over yet."""
    async with two_hosts(scratch / "s", AT_ONCE) as (north, south, cluster):
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


async def test_what_another_host_has_taken_over_is_not_drained(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        await south.drain.drainer.drain([one := Draining(ino)])  # which it has queued before
        assert one.outcome is DrainOutcome.GONE
        assert await read_file(south, ino) == DATA


async def test_an_empty_copy_elsewhere_is_given_up_by_who_writes_a_few_bytes(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        ino = await write_file(north, b"f", DATA)
        reader, *_ = await north.open(ino, os.O_RDONLY)  # so it has its copy as long as it is open
        await rewrite(north, ino, b"")
        await drained(north, ino)
        assert (await south.getattr(ino)).copy is not None
        await rewrite(south, ino, b"few")
        await north.release(reader)
        assert await read_file(north, ino) == b"few"  # and fsck finds no record that is left


async def test_a_drain_is_asked_of_the_hosts_that_have_the_files(scratch: Path):
    async with two_hosts(scratch / "s") as (north, south, _):
        top = (await north.mkdir(ROOT_INO, b"top", 0o755, OWNER)).ino
        for fs, name in ((north, b"north"), (south, b"south"), (south, b"other")):
            await write_file(fs, name, DATA, top)
        beside = await write_file(south, b"beside", DATA)
        told = await ask(north, top, "drain")
        assert (told["files"], told["hosts"]) == (3, {"south": 2 * len(DATA)})
        await north.wait_drained(top, None)
        assert (await ask(north, top, "drain"))["files"] == 0
        assert [fs.drain.status()["drained_files"] for fs in (north, south)] == [1, 2]
        await put(north, beside, "drain", caller=ROOT)  # it does not wait
        while (await north.getattr(beside)).in_burst:
            await trio.sleep(0.01)


async def test_nothing_is_deleted_that_a_host_may_still_look_for(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
):
    async with two_hosts(scratch / "s", modes.STRIPED) as (north, south, _):
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


async def test_a_home_that_cannot_be_asked_is_waited_for_once_and_named(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The kernel asks twice for a page that it does not get; an error has no text for programs."""
    async with two_hosts(scratch / "s") as (north, south, cluster):
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
            one.getMessage().partition(":")[0]
            for one in caplog.records
            if one.levelname == "WARNING"
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
