"""Bytes of a store that two hosts have mounted: what each of them reads, drains and evicts."""

import os
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.core import clock
from aifs.core.errors import Busy, Stale, Unavailable
from aifs.data.reading.read_cache import FilledSource
from aifs.files import drain as drain_module
from aifs.files.draining import Draining, DrainOutcome
from aifs.meta import forms
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, SetAttr
from tests.support import modes
from tests.support.cluster import cluster as cluster
from tests.support.cluster import north as north
from tests.support.cluster import south as south
from tests.support.cluster import two_hosts
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
    write_file,
)

DATA = bytes(range(256)) * 1000


async def test_a_file_in_the_burst_tier_of_another_host_is_read_there(north, south):
    ino = await write_file(north, b"f", DATA)
    assert (await south.lookup(ROOT_INO, b"f")).size == len(DATA)
    assert await read_file(south, ino) == DATA
    assert (await south.getattr(ino)).in_burst
    told = (await ask(south, ino, "info"))["copy"]
    assert told == {"device": 0, "state": "dirty", "host": "north"}
    assert south.tier.status()["devices"][0]["dirty_bytes"] == 0


async def test_a_host_sees_what_was_written_when_it_opens_the_file(north, south):
    ino = await write_file(north, b"f", DATA)
    reader, *_ = await south.open(ino, os.O_RDONLY)
    await overwrite(north, ino, len(DATA), b"more")
    assert await read_file(south, ino) == DATA + b"more"
    assert bytes(await south.read(reader, 0, 10)) == DATA[:10]
    await south.release(reader)


async def test_who_opens_a_file_sees_what_its_home_has_written_before(north, south):
    """So who copies a log and empties it (copytruncate) loses nothing of it."""
    (log, *_), inode = await north.create(ROOT_INO, b"log", 0o644, os.O_WRONLY, OWNER)
    await north.write(log, 0, DATA)
    assert await read_file(south, inode.ino) == DATA
    await north.write(log, len(DATA), b"more")
    assert await read_file(south, inode.ino) == DATA + b"more"
    await south.setattr(inode.ino, SetAttr(size=0), ROOT)
    await north.write(log, 0, b"later")
    assert await read_file(south, inode.ino) == b"later"
    await north.release(log)


async def test_what_was_written_is_seen_when_close_returns(north, south):
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
    monkeypatch.setattr(clock, "kernel_ns", lambda is_new=False: kernel_ns() + offset_ns)
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


async def test_a_close_waits_for_a_save_that_is_under_way(north, south, monkeypatch):
    """Meanwhile the file counts as saved, and no other host knows of it."""
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


async def test_a_reader_that_asks_for_more_than_its_home_has_gets_what_there_is(north, south):
    ino = await write_file(north, b"f", DATA)
    reader, *_ = await south.open(ino, os.O_RDONLY)
    south.io.table.open[ino].inode.size += 1000  # it has not heard of a truncation
    assert bytes(await south.read(reader, 0, len(DATA) + 1000)) == DATA
    await south.release(reader)


async def test_a_file_of_another_host_is_copied_and_has_no_holes(north, south):
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


async def test_a_file_that_another_host_has_just_removed_is_opened_until_it_is_erased(north, south):
    """The kernel has looked its name up before. Else programs would be told ESTALE where a name is
    replaced again and again."""
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


@pytest.mark.store(modes.STRIPED)
async def test_blocks_of_what_another_host_changes_in_place_are_read_anew(north, south):
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


@pytest.mark.sweep
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


@pytest.mark.sweep
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


async def test_a_reader_goes_on_when_the_home_has_drained_the_file(north, south):
    ino = await write_file(north, b"f", DATA)
    reader, *_ = await south.open(ino, os.O_RDONLY)
    assert bytes(await south.read(reader, 0, 100)) == DATA[:100]
    await drained(north, ino)
    await north.evictor.evict(ino)
    await north.collector.drain()
    assert bytes(await south.read(reader, 100, 1000)) == DATA[100:1100]
    await south.release(reader)


async def test_a_cached_copy_is_evicted_on_the_host_that_has_it(cluster, north, south):
    ino = await write_file(north, b"f", DATA)
    with pytest.raises(Busy, match="drain it first"):
        await put(south, ino, "evict", caller=ROOT)
    await drained(north, ino)
    reader, *_ = await north.open(ino, os.O_RDONLY)
    with pytest.raises(Busy, match="have it open"):
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
    monkeypatch.setattr(drain_module, "GRACE_S", 0.0)
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


async def test_an_access_time_that_is_set_back_stays_so(north, south):
    """Also on a host that has the file in core, which records what core knows of it some day."""
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


async def test_who_wants_to_write_gets_the_file_from_its_home(north, south):
    ino = await write_file(north, b"f", DATA)
    await overwrite(south, ino, 0, b"south")
    assert await read_file(south, ino) == b"south" + DATA[5:]
    assert await read_file(north, ino) == b"south" + DATA[5:]
    await overwrite(north, ino, 0, b"north")
    assert await read_file(south, ino) == b"north" + DATA[5:]


async def test_what_another_host_has_taken_over_is_not_drained(north, south):
    ino = await write_file(north, b"f", DATA)
    await south.drain.drainer.drain([one := Draining(ino)])  # which it has queued before
    assert one.outcome is DrainOutcome.GONE
    assert await read_file(south, ino) == DATA


async def test_a_drain_is_asked_of_the_hosts_that_have_the_files(north, south):
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
