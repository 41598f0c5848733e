"""Files whose bytes the bridge reads by itself, because they lie on local servers as they are:
others
change them meanwhile, move them, and remove them; servers fail.
"""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core import files
from aifs.core.upkeep import Work
from aifs.data.chunk_codec import PLAIN as UNCODED
from aifs.files.types import SetAttr
from aifs.layout.interleaved import Extent, Location
from aifs.meta import chunks
from aifs.meta.publishing import Publication
from aifs.vfs import Caller
from tests.support import modes
from tests.support.data_servers import open_below
from tests.support.kernel import Kernel, all_of
from tests.support.stores import drained, opened

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 400
SETTINGS = modes.STRIPED | {
    "layout.unit": "4KiB",
    "layout.inline_limit": "0",
    "burst.stage_for_write": "0",
    "data.movers": "0",
}
PLAIN = {"layout.count": "3"}
MIRRORED = {"layout.count": "2", "layout.replicas": "2"}
CODED = {"layout.ec": "2+1"}


@asynccontextmanager
async def mounted(directory: Path, settings: dict[str, str]) -> AsyncIterator[Kernel]:
    async with opened(directory, SETTINGS | settings, base=modes.WAITING, servers=4) as fs:
        async with Kernel(fs) as kernel:
            yield kernel


@pytest.fixture
async def kernel(directory: Path) -> AsyncIterator[Kernel]:
    async with mounted(directory, PLAIN) as kernel:
        yield kernel


async def make(kernel: Kernel, name: bytes = b"f", content: bytes = CONTENT) -> int:
    """A file that lies on the capacity tier alone."""
    handle, inode = await kernel.create(ROOT, name, 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, content)
    await kernel.release(handle)
    await drained(kernel, inode.ino)
    while not await kernel.evictor.evict(inode.ino):  # the drain closes it after it has told
        await trio.sleep(0.001)
    return inode.ino


async def placed(kernel: Kernel, handle: int, expected: bytes) -> bool:
    """Whether the next read, after one by the daemon, is the bridge's."""
    assert await all_of(kernel, handle) == expected
    before = kernel.placed_bytes
    assert await all_of(kernel, handle) == expected
    return kernel.placed_bytes == before + len(expected)


@pytest.mark.parametrize("settings", [PLAIN, MIRRORED, CODED], ids=["plain", "mirrored", "coded"])
async def test_the_second_read_is_the_bridges_and_so_are_those_of_later_opens(
    directory: Path, settings: dict[str, str]
) -> None:
    async with mounted(directory, settings) as kernel:
        ino = await make(kernel)
        handle = await kernel.open(ino, os.O_RDONLY)
        assert await placed(kernel, handle, CONTENT)
        for start in range(0, len(CONTENT) + 5000, 3777):
            assert bytes(await kernel.read(handle, start, 9000)) == CONTENT[start : start + 9000]
        await kernel.release(handle)
        answered, before = kernel.answered, kernel.placed_bytes
        handle = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, handle) == CONTENT
        assert (kernel.answered, kernel.placed_bytes) == (answered + 1, before + len(CONTENT))
        await kernel.release(handle)


async def test_a_reader_sees_at_once_what_a_writer_changes_in_place(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    writer = await kernel.open(ino, os.O_RDWR)
    await kernel.write(writer, 3, b"over")
    await kernel.write(writer, len(CONTENT), b"appended")
    expected = CONTENT[:3] + b"over" + CONTENT[7:] + b"appended"
    for handle in (reader, writer):
        assert not await placed(kernel, handle, expected)
    await kernel.fsync(writer)
    await kernel.release(writer)
    await kernel.fsync(reader)
    assert await placed(kernel, reader, expected)  # it is settled again
    await kernel.setattr(ino, SetAttr(size=10_000), ME)
    expected = expected[:10_000]
    assert await all_of(kernel, reader) == expected
    await kernel.fsync(reader)
    assert await placed(kernel, reader, expected)
    await kernel.setattr(ino, SetAttr(size=20_000), ME)
    assert await all_of(kernel, reader) == expected + bytes(10_000)
    await kernel.setattr(ino, SetAttr(size=0), ME)
    assert await all_of(kernel, reader) == b""
    await kernel.release(reader)


async def test_a_file_that_is_lent_is_written_and_replaced(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    await kernel.release(reader)
    assert ino not in kernel.io.table.open
    writer = await kernel.open(ino, os.O_WRONLY | os.O_TRUNC)
    await kernel.write(writer, 0, b"new")
    await kernel.release(writer)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await all_of(kernel, reader) == b"new"
    other = await make(kernel, b"other", CONTENT[::-1])
    await kernel.rename(ROOT, b"other", ROOT, b"f", 0, ME)
    assert await all_of(kernel, reader) == b"new"
    await kernel.release(reader)
    reader = await kernel.open(other, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT[::-1])
    await kernel.release(reader)


async def test_removed_files_leave_no_descriptor_behind(kernel: Kernel) -> None:
    before = files.descriptors()
    for name in (b"lent", b"open"):
        ino = await make(kernel, name)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await placed(kernel, reader, CONTENT)
        if name == b"lent":
            await kernel.release(reader)
        await kernel.unlink(ROOT, name, ME)
        if name == b"open":
            assert await all_of(kernel, reader) == CONTENT
            await kernel.release(reader)
        kernel.forget([ino])
    await kernel.collector.drain()
    with trio.fail_after(10):
        while files.descriptors() > before:  # workers close them
            await trio.sleep(0.001)


async def test_a_staged_file_and_one_that_is_laid_out_anew(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    assert await kernel.stager.stage(ino)
    assert not await placed(kernel, reader, CONTENT)
    await kernel.release(reader)
    while not await kernel.evictor.evict(ino):
        await trio.sleep(0.001)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    await kernel.release(reader)


async def test_a_server_that_fails_or_hangs_takes_its_places_back(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    server = kernel.store.servers[kernel.io.table.open[ino].inode.objects.servers[1]]
    server.health.hangs("read", "a read has not ended")
    await trio.testing.wait_all_tasks_blocked()
    await trio.sleep(0)
    assert not await placed(kernel, reader, CONTENT)
    server.health.answers()
    kernel.io.table.open[ino].placed = None
    assert await placed(kernel, reader, CONTENT)
    await kernel.release(reader)


async def test_a_moved_column_is_read_where_it_is(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    objects = kernel.io.table.open[ino].inode.objects
    number = objects.servers[0]
    await kernel.server_admin.drain(number)
    with trio.fail_after(30):
        while number in kernel.io.table.open[ino].inode.objects.servers:
            await trio.sleep(0.01)
    assert await placed(kernel, reader, CONTENT)
    await kernel.release(reader)


async def test_a_clone_is_read_and_its_original_written(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await placed(kernel, reader, CONTENT)
    await kernel.clone(ROOT, b"f", ROOT, b"clone", ME)
    clone = (await kernel.lookup(ROOT, b"clone", ME)).ino
    other = await kernel.open(clone, os.O_RDONLY)
    assert await placed(kernel, other, CONTENT)
    writer = await kernel.open(ino, os.O_WRONLY)
    await kernel.write(writer, 0, b"new")
    assert await all_of(kernel, reader) == b"new" + CONTENT[3:]
    assert await placed(kernel, other, CONTENT)
    for handle in (reader, writer, other):
        await kernel.release(handle)


async def test_verified_reads_have_no_places(directory: Path) -> None:
    async with mounted(directory, PLAIN | {"data.verify": "read"}) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert not await placed(kernel, reader, CONTENT)
        await kernel.release(reader)


# --- packed files, which are lent ahead ---

PACKED = modes.WAITING | {
    "layout.inline_limit": "0",
    "data.movers": "0",
    "layout.compact_above": "0.1",
}
KINDS = {"plain": {}, "mirrored": {"layout.replicas": "2"}, "coded": {"layout.ec": "2+1"}}


def content_of(number: int) -> bytes:
    return b"%d " % number * (1000 + number)


@asynccontextmanager
async def with_packed(
    directory: Path, kind: dict[str, str], count: int = 4
) -> AsyncIterator[tuple[Kernel, list[int]]]:
    """Files in containers, of which nothing is in core: fewer than the double lends."""
    async with opened(directory, PACKED | kind, servers=4) as fs, Kernel(fs) as kernel:
        inos = [await make(kernel, b"%d" % n, content_of(n)) for n in range(count)]
        assert not kernel.io.table.open
        yield kernel, inos


@pytest.mark.parametrize("kind", KINDS)
async def test_who_opens_a_packed_file_has_the_next_ones_lent(directory: Path, kind: str) -> None:
    async with with_packed(directory, KINDS[kind]) as (kernel, inos):
        for ino in inos:
            kernel.io.table.recall(ino)  # the drain has had them in core
        kernel.answered = 0
        for number, ino in enumerate(inos):
            handle = await kernel.open(ino, os.O_RDONLY)
            assert await all_of(kernel, handle) == content_of(number)
            assert bytes(await kernel.read(handle, 5, 100)) == content_of(number)[5:105]
            assert ino not in kernel.io.table.open
            await kernel.release(handle)
        assert kernel.answered == len(inos) - 1
        assert kernel.placed_bytes == sum(len(content_of(n)) + 100 for n in range(len(inos)))


async def test_names_that_publishing_changes_are_not_told_ahead(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with with_packed(directory, {}) as (kernel, inos):
        told: list[tuple[bytes, bytes]] = []
        monkeypatch.setattr(kernel, "note_entries", told.extend)
        for is_published in (False, True):
            if is_published:
                new = await kernel.mkdir(ROOT, b"tmp", 0o755, ME)
                what = Publication(new.ino, ROOT, b"final", tracker=b"tracker", content=b"1")
                await kernel.publish(what, ME)
                await kernel.unlink(ROOT, b"tracker", ME)
                await kernel.link(inos[3], ROOT, b"tracker")
            told.clear()
            for ino in inos:
                kernel.io.table.recall(ino)
            await kernel.lookup(ROOT, b"0", ME)
            await kernel.release(await kernel.open(inos[0], os.O_RDONLY))
            assert bool(told) != is_published


async def test_packed_files_that_are_lent_ahead_are_changed_and_removed(directory: Path) -> None:
    async with with_packed(directory, {}) as (kernel, inos):
        for ino in inos:
            kernel.io.table.recall(ino)
        handles = [await kernel.open(inos[0], os.O_RDONLY), await kernel.open(inos[1], os.O_RDONLY)]
        await kernel.setattr(inos[2], SetAttr(size=3), ME)
        writer = await kernel.open(inos[1], os.O_RDWR)
        await kernel.write(writer, 0, b"new")
        assert await all_of(kernel, handles[1]) == b"new" + content_of(1)[3:]
        await kernel.unlink(ROOT, b"0", ME)
        assert await all_of(kernel, handles[0]) == content_of(0)
        for handle in (*handles, writer):
            await kernel.release(handle)
        kernel.forget([inos[0]])
        reader = await kernel.open(inos[2], os.O_RDONLY)
        assert await all_of(kernel, reader) == content_of(2)[:3]
        await kernel.release(reader)
        reader = await kernel.open(inos[3], os.O_RDONLY)
        assert await kernel.stager.stage(inos[3])
        assert await all_of(kernel, reader) == content_of(3)
        await kernel.release(reader)


async def test_compaction_moves_what_is_lent(directory: Path) -> None:
    async with with_packed(directory, {}) as (kernel, inos):
        for ino in inos:
            kernel.io.table.recall(ino)
        reader = await kernel.open(inos[3], os.O_RDONLY)
        for number in range(3):
            await kernel.unlink(ROOT, b"%d" % number, ME)
        kernel.forget(inos[:3])
        await kernel.collector.drain()
        await kernel.containers.retire(lambda container, layout: True)
        await kernel.compaction.compact()
        await kernel.collector.drain()
        assert await all_of(kernel, reader) == content_of(3)
        await kernel.release(reader)
        assert not [
            link
            for fd in os.listdir("/proc/self/fd")
            if (link := _link_of(fd)).endswith("(deleted)") and str(directory) in link
        ]


def _link_of(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


async def test_a_failing_server_takes_packed_files_back(directory: Path) -> None:
    async with with_packed(directory, {}) as (kernel, inos):
        for ino in inos:
            kernel.io.table.recall(ino)
        reader = await kernel.open(inos[0], os.O_RDONLY)
        assert await all_of(kernel, reader) == content_of(0)
        before = kernel.placed_bytes
        for server in kernel.store.servers.capacity():
            server.health.hangs("read", "a read has not ended")
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0)
        assert await all_of(kernel, reader) == content_of(0)
        assert kernel.placed_bytes == before
        for server in kernel.store.servers.capacity():
            server.health.answers()
        await kernel.release(reader)


@pytest.mark.parametrize("change", ["write", "evict"])
@pytest.mark.parametrize("kind", ["striped", "interleaved"])
async def test_the_bridge_reads_blocks_as_long_as_they_are_there(
    directory: Path, kind: str, change: str
) -> None:
    """Those of an earlier mount, which the daemon has compared when it read them first."""
    settings = PLAIN | {"burst.blocks": "always", "layout.kind": kind}
    settings |= {"layout.pack_below": "0"} if kind == "striped" else {}
    async with mounted(directory, settings) as kernel:
        ino = await make(kernel)
        await kernel.tier.look()
        handle = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, handle) == CONTENT
        await kernel.release(handle)
        while kernel.blocks.status()["waiting_bytes"]:
            await kernel.upkeep.have_done(Work.BLOCKS)
        await kernel.containers.retire(lambda *_: True)  # its last block is kept, too
        kernel.containers.files.forget()
    async with mounted(directory, settings) as kernel:
        await kernel.tier.look()
        handle = await kernel.open(ino, os.O_RDONLY)
        assert await placed(kernel, handle, CONTENT)
        of_blocks = [path for path in open_below(directory) if "/blocks/" in path]
        if kind == "striped":
            assert len(of_blocks) == 2, "ours, and the bridge's"
        expected = CONTENT
        if change == "evict":
            for device in kernel.tier.devices.values():
                device.room_for_blocks = lambda: 0
            await kernel.tier.look()
            await kernel.upkeep.have_done(Work.BLOCKS)
            assert not [path for path in open_below(directory) if "/blocks/" in path]
        else:
            writer = await kernel.open(ino, os.O_RDWR)
            await kernel.write(writer, 10, b"other")
            await kernel.release(writer)
            expected = CONTENT[:10] + b"other" + CONTENT[15:]
        for _ in range(2):
            assert await all_of(kernel, handle) == expected
        await kernel.release(handle)


async def test_what_the_bridge_reads_stays(directory: Path) -> None:
    """The daemon hears of no such read, and evicts what was not used."""
    settings = PLAIN | {"burst.blocks": "always", "layout.pack_below": "0"}
    async with mounted(directory, settings) as kernel:
        [device] = kernel.tier.devices.values()
        inos = [await make(kernel, name) for name in (b"read", b"not", b"new")]
        oids = [(await kernel.getattr(ino)).oid for ino in inos]
        await kernel.tier.look()
        reader = await kernel.open(inos[0], os.O_RDONLY)  # before it could be passed through
        for ino in inos:
            if ino == inos[-1]:
                device.room_for_blocks = lambda: 2 * kernel.blocks.bytes_of(oids[0])
                await kernel.tier.look()
            handle = await kernel.open(ino, os.O_RDONLY)
            assert await all_of(kernel, handle) == CONTENT
            while kernel.blocks.status()["waiting_bytes"]:
                await kernel.upkeep.have_done(Work.BLOCKS)
            await kernel.release(handle)
            if ino == inos[0]:  # once by the daemon, then by the bridge
                assert await placed(kernel, reader, CONTENT)
            before = kernel.placed_bytes
            assert await all_of(kernel, reader) == CONTENT
            assert kernel.placed_bytes == before + len(CONTENT)
        await kernel.release(reader)
        assert [bool(kernel.blocks.bytes_of(oid)) for oid in oids] == [True, False, True]


async def test_what_is_going_to_be_blocks_is_not_read_from_servers_by_the_bridge(
    directory: Path,
) -> None:
    """Else it never gets there, and each pass over a dataset asks the servers again."""
    async with mounted(directory, PLAIN | {"burst.blocks": "always"}) as kernel:
        ino = await make(kernel)
        await kernel.tier.look()
        handle = await kernel.open(ino, os.O_RDONLY)
        for start in range(0, len(CONTENT), 9000):
            expected = CONTENT[start : start + 9000]
            assert bytes(await kernel.read(handle, start, 9000)) == expected
        assert not kernel.placed_bytes
        while kernel.blocks.status()["waiting_bytes"]:
            await kernel.upkeep.have_done(Work.BLOCKS)
        before = sum(server.read_bytes for server in kernel.store.servers.capacity())
        assert await placed(kernel, handle, CONTENT)
        after = sum(server.read_bytes for server in kernel.store.servers.capacity())
        assert after == before and not kernel.blocks.status()["dropped_bytes"]
        await kernel.release(handle)


@contextmanager
def in_two_containers(
    kernel: Kernel, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[Extent]]:
    """The extents of a file with 100 bytes "0" and 100 bytes "1", which lie in two containers, and
    in blocks of these."""
    [server], fds = kernel.store.servers.burst(), list[int]()
    for number in range(2):
        (directory / f"{number}").write_bytes(b"%d" % number * 1000)
        fds.append(os.open(directory / f"{number}", os.O_RDONLY))
    monkeypatch.setattr(kernel.blocks, "file_of", lambda oid, *_: (server, fds[oid % 10]))
    yield [
        Extent(100, Location(0, 1000 + number, 0, 100, 100, UNCODED, bytes(32)))
        for number in range(2)
    ]
    for fd in fds:
        os.close(fd)


async def test_a_source_gives_way_to_another_one_of_the_same_file(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That gets its number: the first bytes of the file would be read from it, too."""
    places = kernel.handles.places
    monkeypatch.setattr(places, "_most", 1)  # descriptors
    with in_two_containers(kernel, tmp_path, monkeypatch) as extents:
        assert places.put_chunks(50, 100, extents[:1])
        assert places.put_chunks(51, 200, extents)
        assert kernel.read_placed(51, 0, 100) in (None, b"0" * 100)
        assert kernel.read_placed(51, 100, 100) in (None, b"1" * 100)


async def test_sources_of_one_file_go_together_when_one_was_removed(
    kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with in_two_containers(kernel, tmp_path, monkeypatch) as extents:
        assert kernel.handles.places.put_chunks(50, 200, extents)
        (tmp_path / "0").unlink()
        kernel.containers.files.forget()
        assert not kernel.has_places(50)


async def test_sources_that_got_no_place_are_closed(directory: Path) -> None:
    """Of files that have changed while their container was opened."""
    async with mounted(directory, {"layout.kind": "interleaved"}) as kernel:
        inode = await kernel.getattr(await make(kernel))
        args = inode.oid, inode.chunks.chunk, 0
        _, extents = await kernel.store.engine.view(chunks.get_extents, *args)
        places = kernel.handles.places
        await places.open_containers(extents)
        opened = len(open_below(directory))
        assert places.close_idle() == 1
        assert len(open_below(directory)) == opened - 1
        assert places.close_idle() == 0
        await places.open_containers(extents)
        assert places.put_chunks(inode.ino, inode.size, extents)
        assert kernel.read_placed(inode.ino, 0, inode.size) == CONTENT
