"""Files whose bytes the bridges of two hosts read by themselves, while a third one changes, moves,
repairs and removes them.
"""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import pytest
import trio

from aifs.core.faults import SimulatedCrash
from aifs.core.upkeep import Work
from aifs.files.types import SetAttr
from aifs.meta import chunks, keys
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem
from tests.support import modes
from tests.support.cluster import Cluster, cluster_of
from tests.support.data_servers import open_below
from tests.support.kernel import Kernel
from tests.support.spoil import flip
from tests.support.stores import (
    ROOT,
    drained,
    moved_out,
    numbers,
    overwrite,
    put,
    read_file,
    write_file,
)

DATA = bytes(range(1, 251)) * 400
BASE = {
    "burst.stage_for_write": "0",
    "layout.inline_limit": "0",
    "layout.unit": "4KiB",
    "layout.compact_above": "0.1",
}
STRIPED = modes.STRIPED | BASE
PACKED = BASE | {"layout.kind": "interleaved"}
KINDS = {
    "striped": STRIPED,
    "mirrored": STRIPED | {"layout.count": "1", "layout.replicas": "2"},
    "packed": PACKED,
    "packed-mirrored": PACKED | {"layout.replicas": "2"},
    "blocks": STRIPED | {"burst.blocks": "always"},
    "packed-blocks": PACKED | {"burst.blocks": "always"},
    "checked-blocks": STRIPED | {"burst.blocks": "always", "data.verify": "read"},
}


class Host(NamedTuple):
    fs: Filesystem
    programs: Kernel


@asynccontextmanager
async def hosts(cluster: Cluster, *names: str) -> AsyncIterator[list[Host]]:
    """They are mounted, in this order, and programs use them."""
    async with AsyncExitStack() as stack:
        found = list[Host]()
        for name in names:
            fs = await stack.enter_async_context(cluster.mounted(name))
            found.append(Host(fs, await stack.enter_async_context(Kernel(fs))))
            watch(found[-1])
        yield found


def watch(host: Host) -> None:
    """When a record of another host is in the replica, before any task runs, no place is left that
    it might have changed."""
    fs, programs = host

    def followed(writes: Mapping[bytes, bytes | None]) -> None:
        assert not any(
            programs.has_places(keys.number(key)) for key in writes if key[:1] in (b"i", b"w")
        )

    fs.store.engine.followers.append(followed)  # type: ignore[attr-defined]


@asynccontextmanager
async def three(
    directory: Path, settings: Mapping[str, str]
) -> AsyncIterator[tuple[Filesystem, Host, Host]]:
    names = ("north", "south", "west")
    async with cluster_of(directory, settings, names) as cluster:
        async with hosts(cluster, *names) as (north, south, west):
            yield north.fs, south, west


async def made(fs: Filesystem, name: bytes = b"f", data: bytes = DATA) -> int:
    """A file that lies on the data servers alone."""
    ino = await write_file(fs, name, data)
    await moved_out(fs, ino)
    return ino


async def require(host: Host, ino: int, data: bytes, *handles: int, new: bool = True) -> None:
    """Programs read this, by handles that they have and by a ``new`` one, from the daemon and from
    places."""
    opened = [await host.programs.open(ino, os.O_RDONLY)] if new else []
    for handle in (*handles, *opened):
        for _ in range(3):
            assert bytes(await host.programs.read(handle, 0, 1 << 20)) == data
    for handle in opened:
        await host.programs.release(handle)


async def placed(host: Host, ino: int, data: bytes = DATA, is_open: bool = True) -> list[int]:
    """Programs have read the file from places, and so do the next; they have it open, or had."""
    fs, programs = host
    await fs.tier.look()
    handle = await programs.open(ino, os.O_RDONLY)
    assert bytes(await programs.read(handle, 0, 1 << 20)) == data
    while fs.blocks.status()["waiting_bytes"]:
        await fs.upkeep.have_done(Work.BLOCKS)
    if (file := fs.io.table.open.get(ino)) is not None:
        file.placed = None  # it is looked for in blocks
    assert bytes(await programs.read(handle, 0, 1 << 20)) == data
    before = programs.placed_bytes
    assert bytes(await programs.read(handle, 0, 1 << 20)) == data
    assert programs.placed_bytes == before + len(data)
    if is_open:
        return [handle]
    await programs.release(handle)
    return []


# --- changes ---


async def rewrite(fs: Filesystem, ino: int) -> bytes:
    writer = (await fs.open(ino, os.O_WRONLY | os.O_TRUNC)).handle
    await fs.write(writer, 0, b"all new")
    await fs.release(writer)
    return b"all new"


async def rewrite_and_drain(fs: Filesystem, ino: int) -> bytes:
    data = await rewrite(fs, ino)
    await drained(fs, ino)
    return data


async def change_a_part(fs: Filesystem, ino: int) -> bytes:
    await overwrite(fs, ino, 100, b"other")
    return DATA[:100] + b"other" + DATA[105:]


async def change_and_sync(fs: Filesystem, ino: int) -> bytes:
    writer = (await fs.open(ino, os.O_RDWR)).handle
    await fs.write(writer, 0, b"other")
    await fs.fsync(writer)
    await fs.release(writer)
    return b"other" + DATA[5:]


async def append(fs: Filesystem, ino: int) -> bytes:
    await overwrite(fs, ino, len(DATA), b"more")
    return DATA + b"more"


async def shorten(fs: Filesystem, ino: int) -> bytes:
    await fs.setattr(ino, SetAttr(size=5000), ROOT)
    return DATA[:5000]


async def shorten_and_grow(fs: Filesystem, ino: int) -> bytes:
    await fs.setattr(ino, SetAttr(size=5000), ROOT)
    await fs.setattr(ino, SetAttr(size=len(DATA)), ROOT)
    return DATA[:5000] + bytes(len(DATA) - 5000)


async def stage(fs: Filesystem, ino: int) -> bytes:
    assert await fs.io.stager.stage(ino)
    return DATA


async def stage_and_change(fs: Filesystem, ino: int) -> bytes:
    assert await fs.io.stager.stage(ino)
    return await change_a_part(fs, ino)


async def change_mode(fs: Filesystem, ino: int) -> bytes:
    await fs.setattr(ino, SetAttr(mode=0o600), ROOT)
    return DATA


async def compact(fs: Filesystem, ino: int) -> bytes:
    for container in await numbers(fs, b"t"):
        await fs.compaction.evacuate(container)
    await fs.collector.drain()
    return DATA


async def lay_out_anew(fs: Filesystem, ino: int) -> bytes:
    await fs.setattr(ino, SetAttr(atime_ns=1, mtime_ns=1), ROOT)
    await put(fs, ROOT_INO, "age", "1d:compress=zstd", ROOT)
    before = (await fs.getattr(ino)).oid
    for _ in range(3):
        await fs.aging.work()
    inode = await fs.getattr(ino)
    assert inode.chunks is not None and (inode.oid != before)
    await fs.collector.drain()
    return DATA


CHANGES: dict[str, Callable[[Filesystem, int], Awaitable[bytes]]] = {
    each.__name__: each
    for each in (
        rewrite,
        rewrite_and_drain,
        change_a_part,
        change_and_sync,
        append,
        shorten,
        shorten_and_grow,
        stage,
        stage_and_change,
        change_mode,
        compact,
        lay_out_anew,
    )
}


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "lent"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_another_host_changes(scratch: Path, kind: str, is_open: bool) -> None:
    async with three(scratch / "s", KINDS[kind]) as (north, south, west):
        for change in CHANGES.values():
            if change is lay_out_anew and "packed" in kind:
                continue
            ino = await made(north, change.__name__.encode())
            open_at = {host: await placed(host, ino, is_open=is_open) for host in (south, west)}
            data = await change(north, ino)
            for host, handles in open_at.items():
                await require(host, ino, data, *handles)
                for handle in handles:
                    await host.programs.release(handle)
                await require(host, ino, data)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_another_host_removes_and_makes_anew(scratch: Path, kind: str) -> None:
    async with three(scratch / "s", KINDS[kind]) as (north, south, west):
        ino = await made(north)
        handles = {host: await placed(host, ino) for host in (south, west)}
        gone = await made(north, b"gone")
        for host in (south, west):
            await placed(host, gone, is_open=False)
        for name in (b"f", b"gone"):
            await north.unlink(ROOT_INO, name, ROOT)
        again = await made(north, b"f", DATA[::-1])
        for host in (south, west):
            await require(host, ino, DATA, *handles[host], new=False)
            await require(host, again, DATA[::-1])
            for handle in handles[host]:
                await host.programs.release(handle)
            host.programs.forget([ino, gone])
        for fs in (south.fs, west.fs, north):
            await fs.collector.drain()
        await north.collector.drain()
        assert not await numbers(north, b"g")
        with trio.fail_after(10):  # workers close them
            while [path for path in open_below(scratch) if path.endswith("(deleted)")]:
                await trio.sleep(0.001)


async def test_a_file_that_is_closed_while_pages_are_stale_has_no_places(scratch: Path) -> None:
    """It is neither in core nor lent then, so nobody would take them back."""
    async with three(scratch / "s", STRIPED) as (north, south, _):
        ino = await made(north)
        [handle] = await placed(south, ino)
        await change_mode(north, ino)
        assert ino in south.fs.io.table.stale
        assert bytes(await south.programs.read(handle, 0, 1 << 20)) == DATA
        assert south.programs.has_places(ino)
        await south.programs.release(handle)
        assert ino not in south.fs.io.table.open and not south.fs.handles.is_lent(ino)
        assert not south.programs.has_places(ino)
        data = await change_a_part(north, ino)
        await require(south, ino, data)


async def first_object(fs: Filesystem, ino: int) -> tuple[int, int, str]:
    """What the objects are named by, their id, and the local file of the first column."""
    inode = await fs.getattr(ino)
    named_by, oid, objects = inode.named_by, inode.oid, inode.objects
    if objects is None:
        assert inode.chunks is not None
        args = inode.oid, inode.chunks.chunk, 0
        _, [extent, *_] = await fs.store.engine.view(chunks.get_extents, *args)
        named_by, oid = 0, extent.place.container
        entry = await fs.containers.find(oid)
        assert entry is not None
        objects = entry.layout
    return named_by, oid, fs.store.servers[objects.servers[0]].where((named_by, oid))


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "lent"])
@pytest.mark.parametrize("kind", ["mirrored", "packed-mirrored"])
async def test_what_another_host_repairs(scratch: Path, kind: str, is_open: bool) -> None:
    async with three(scratch / "s", KINDS[kind]) as (north, south, west):
        ino = await made(north)
        if kind == "mirrored" and ino % 2:
            pytest.skip("of a file with an odd number the second copy is read first")
        named_by, oid, path = await first_object(north, ino)
        flip(path, 1000)
        with open(path, "rb") as file:
            wrong = file.read()
        at = wrong.find(DATA[:900])  # the chunk, behind its header
        seen = wrong[at : at + len(DATA)]
        assert seen != DATA
        handles = {host: await placed(host, ino, seen, is_open) for host in (south, west)}
        north.scrub.start(bandwidth=0)
        await north.scrub.wait()
        assert north.scrub.state.counts["repaired"] == 1
        for host, opened in handles.items():
            await require(host, ino, DATA, *opened)
            for handle in opened:
                await host.programs.release(handle)


@pytest.mark.parametrize("kind", ["mirrored", "packed-mirrored"])
async def test_a_column_is_made_anew_when_all_hosts_know_it(
    scratch: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else their bridges would read it half made."""
    async with three(scratch / "s", KINDS[kind]) as (north, south, west):
        await north.containers.retire(lambda *_: True)
        ino = await made(north)
        await north.containers.retire(lambda *_: True)
        named_by, oid, path = await first_object(north, ino)
        handles = {host: await placed(host, ino) for host in (south, west)}
        with open(path, "rb") as file:
            before = file.read()
        waited, shown = 0, north.store.engine.shown

        async def watched(of_all: bool = False) -> None:
            nonlocal waited
            if of_all and oid in await numbers(north, b"q"):
                waited += 1
                with open(path, "rb") as file:
                    assert file.read() == before, "it is being made"
                os.truncate(path, 0)  # so nobody can be reading it
            await shown(of_all)

        monkeypatch.setattr(north.store.engine, "shown", watched)
        assert await north.rebuild.request(oid, named_by, [0])
        for host, [handle] in handles.items():
            assert not host.programs.has_places(ino)
            assert bytes(await host.programs.read(handle, 0, 1 << 20)) == DATA
        await north.upkeep.have_done(Work.REBUILD)
        assert waited and not await numbers(north, b"q")
        with open(path, "rb") as file:
            assert file.read() == before
        for host, opened in handles.items():
            await require(host, ino, DATA, *opened)
            await host.programs.release(opened[0])


async def test_a_home_dies_that_has_changed_what_others_read(scratch: Path) -> None:
    async with cluster_of(scratch / "s", STRIPED, ("north", "south", "west")) as cluster:
        async with hosts(cluster, "south", "west") as readers:
            with suppress(SimulatedCrash):
                async with cluster.mounted("north") as north:
                    ino = await made(north)
                    opened = {host: await placed(host, ino) for host in readers}
                    writer = (await north.open(ino, os.O_RDWR)).handle
                    await north.write(writer, 0, b"other")
                    await north.fsync(writer)
                    raise SimulatedCrash
            data = b"other" + DATA[5:]
            for host, handles in opened.items():
                await require(host, ino, data, *handles)
                assert not host.programs.has_places(ino)
            async with cluster.mounted("north") as north:
                assert await read_file(north, ino) == data
                data = await rewrite(north, ino)
                await moved_out(north, ino)
                for host, handles in opened.items():
                    await require(host, ino, data, *handles)
                    await host.programs.release(handles[0])


async def test_a_file_that_is_closed_while_pages_are_stale_is_not_kept_by_the_kernel(
    scratch: Path,
) -> None:
    """What was passed through to its copy is lent no more, and nobody else would give it up."""
    async with three(scratch / "s", BASE | {"burst.stage_for_write": "1MiB"}) as (north, south, _):
        handle, inode = await south.programs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
        await south.programs.write(handle, 0, DATA)
        await south.programs.release(handle)
        ino = inode.ino
        assert not south.fs.io.table.recall(ino)
        handle = await south.programs.open(ino, os.O_RDONLY)
        await change_mode(north, ino)
        assert ino in south.fs.io.table.stale
        await south.programs.release(handle)
        assert not south.fs.handles.is_lent(ino)
        assert not south.programs.backed
        await require(south, ino, DATA)


async def test_a_file_that_is_closed_before_core_has_looked_again_is_not_lent(
    scratch: Path,
) -> None:
    """Its pages have gone already. It would be passed through to a copy that is not the file."""
    settings = BASE | {"burst.stage_for_write": "1MiB"}
    async with cluster_of(scratch / "s", settings) as cluster:
        async with hosts(cluster, "north", "south") as (north, south):
            handle, inode = await south.programs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
            await south.programs.write(handle, 0, DATA)
            await south.programs.release(handle)
            ino = inode.ino
            await drained(south.fs, ino)
            assert not south.fs.io.table.recall(ino)
            handle = await south.programs.open(ino, os.O_RDONLY)
            cluster.silent.add("south")  # it is not asked to give up its copy
            data = await change_a_part(north.fs, ino)
            cluster.silent.clear()
            table = south.fs.io.table
            assert ino in table.overtaken
            del table.stale[ino]
            await south.programs.release(handle)
            await require(south, ino, data)
