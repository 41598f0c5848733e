"""Files that are passed through to their blocks in a burst directory: programs read them by
themselves, whatever others change meanwhile, and what is evicted is never seen as zeros.
"""

import mmap
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import trio

from aifs.burst import block_cache
from aifs.burst.copy import BurstCopy
from aifs.core import faults
from aifs.core.errors import Busy, Unavailable
from aifs.core.upkeep import Work
from aifs.files.types import SetAttr
from aifs.layout.placement import ACTIVE
from aifs.vfs import Caller
from tests.support import modes
from tests.support.data_servers import failing
from tests.support.hanging import hanging, until
from tests.support.kernel import Kernel, all_of
from tests.support.stores import ROOT as AS_ROOT
from tests.support.stores import drained, opened, put

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 1200
SETTINGS = modes.STRIPED | {
    "layout.unit": "4KiB",
    "layout.count": "3",
    "layout.inline_limit": "0",
    "burst.stage_for_write": "0",
    "burst.blocks": "always",
    "data.movers": "0",
}
KINDS = {
    "plain": {},
    "one object": {"layout.count": "0", "layout.stripe_above": "1MiB"},
    "mirrored": {"layout.count": "2", "layout.replicas": "2"},
    "coded": {"layout.ec": "2+1"},
    "verified": {"data.verify": "read"},
}


@asynccontextmanager
async def mounted(directory: Path, settings: dict[str, str] | None = None) -> AsyncIterator[Kernel]:
    base = modes.WAITING
    async with opened(directory, SETTINGS | (settings or {}), base=base, servers=4) as fs:
        async with Kernel(fs) as kernel:
            await kernel.tier.look()
            yield kernel


async def passed(kernel: Kernel, handle: int, expected: bytes) -> bool:
    """Whether the kernel reads it by itself."""
    before = kernel.direct_bytes
    assert await all_of(kernel, handle) == expected
    return kernel.direct_bytes == before + len(expected)


async def read_once(kernel: Kernel, ino: int, expected: bytes = CONTENT) -> None:
    """All blocks of the file are here, and checked."""
    handle = await kernel.open(ino, os.O_RDONLY)
    assert not await passed(kernel, handle, expected)
    await kernel.release(handle)
    while kernel.blocks.status()["waiting_bytes"]:
        await kernel.upkeep.have_done(Work.BLOCKS)


async def make(kernel: Kernel, name: bytes = b"f") -> int:
    """A clean file, with all blocks here."""
    handle, inode = await kernel.create(ROOT, name, 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, CONTENT)
    await kernel.release(handle)
    await drained(kernel, inode.ino)
    while not await kernel.evictor.evict(inode.ino):  # the drain closes it after it has told
        await trio.sleep(0.001)
    await read_once(kernel, inode.ino)
    return inode.ino


async def crowded(kernel: Kernel) -> None:
    """Something else takes all the room."""
    for device in kernel.tier.devices.values():
        device.room_for_blocks = lambda: 0
    for device in kernel.blocks.devices.values():
        device.asks_at_s = 0
    await kernel.tier.look()
    await kernel.upkeep.have_done(Work.BLOCKS)


@pytest.mark.parametrize("kind", KINDS)
async def test_all_blocks_are_one_local_file(directory: Path, kind: str) -> None:
    async with mounted(directory, KINDS[kind]) as kernel:
        ino = await make(kernel)
        for _ in range(2):  # the second open is the bridge's
            handle = await kernel.open(ino, os.O_RDONLY)
            assert await passed(kernel, handle, CONTENT)
            await kernel.release(handle)
        assert kernel.answered
        await kernel.blocks.save()
    async with mounted(directory, KINDS[kind]) as kernel:
        await read_once(kernel, ino)  # what an earlier process has kept is compared first
        handle = await kernel.open(ino, os.O_RDONLY)
        assert await passed(kernel, handle, CONTENT)
        await kernel.release(handle)


async def test_a_file_that_is_open_while_its_blocks_come_stays_as_it_was_opened(
    directory: Path,
) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        await put(kernel, ino, "evict", "", AS_ROOT)
        first = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, first, CONTENT)
        while kernel.blocks.status()["waiting_bytes"]:
            await kernel.upkeep.have_done(Work.BLOCKS)
        second = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, second, CONTENT)
        await kernel.release(first)
        await kernel.release(second)
        third = await kernel.open(ino, os.O_RDONLY)
        assert await passed(kernel, third, CONTENT)
        await kernel.release(third)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_lent", [False, True])
async def test_readers_see_what_a_writer_changes(directory: Path, kind: str, is_lent: bool) -> None:
    async with mounted(directory, KINDS[kind]) as kernel:
        ino = await make(kernel)
        for _ in range(1 + is_lent):
            reader = await kernel.open(ino, os.O_RDONLY)
            await kernel.release(reader)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await passed(kernel, reader, CONTENT)
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 3, b"over")
        await kernel.write(writer, len(CONTENT), b"appended")
        expected = CONTENT[:3] + b"over" + CONTENT[7:] + b"appended"
        late = await kernel.open(ino, os.O_RDONLY)
        for handle in (reader, writer, late):
            assert await passed(kernel, handle, expected)
        assert (await kernel.getattr(ino)).in_burst
        await kernel.fsync(writer)
        for handle in (writer, late):
            await kernel.release(handle)
        assert await passed(kernel, reader, expected)
        await kernel.release(reader)
        await drained(kernel, ino)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == expected
        await kernel.release(reader)
    async with mounted(directory, KINDS[kind]) as kernel:
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == expected
        await kernel.release(reader)


@pytest.mark.parametrize("size", [0, 5000, len(CONTENT) + 5000])
async def test_readers_see_a_truncation(directory: Path, size: int) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await passed(kernel, reader, CONTENT)
        await kernel.setattr(ino, SetAttr(size=size), ME)
        expected = CONTENT[:size].ljust(size, b"\0")
        assert await all_of(kernel, reader) == expected
        await kernel.release(reader)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == expected
        await kernel.release(reader)


async def test_a_mapping_outlives_its_handle(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        mapped = kernel.map(reader, len(CONTENT), os.O_RDONLY)
        assert mapped is not None
        await kernel.release(reader)
        with pytest.raises(Busy):
            await put(kernel, ino, "evict", "", AS_ROOT)
        await crowded(kernel)
        assert mapped[:] == CONTENT and kernel.blocks.status()["cached_bytes"]
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 10, b"other")
        await kernel.release(writer)
        assert mapped[:] == CONTENT[:10] + b"other" + CONTENT[15:]
        mapped.close()


async def test_what_is_open_stays_and_goes_when_it_is_closed(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        with pytest.raises(Busy):
            await put(kernel, ino, "evict", "", AS_ROOT)
        [device] = kernel.blocks.devices
        assert kernel.blocks.bytes_on(device) == 0  # it is no free space
        await crowded(kernel)
        assert await passed(kernel, reader, CONTENT)
        await kernel.release(reader)  # it is lent now
        await crowded(kernel)
        await crowded(kernel)
        assert not kernel.blocks.status()["cached_bytes"]
        assert not list(directory.glob("burst/blocks/*[0-9a-f]"))
        reader = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, reader, CONTENT)
        await kernel.release(reader)


async def test_a_file_that_is_removed_stays_readable(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        await kernel.unlink(ROOT, b"f")
        kernel.forget([ino])
        await kernel.collector.drain()
        assert await passed(kernel, reader, CONTENT)
        await kernel.release(reader)
        await kernel.collector.drain()
        await kernel.upkeep.have_done(Work.BLOCKS)
        assert not list(directory.glob("burst/blocks/*[0-9a-f]"))


async def test_what_was_found_wrong_is_changed_when_its_readers_have_closed_it(
    directory: Path,
) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        kernel.blocks.correct((await kernel.getattr(ino)).oid)
        late = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, late, CONTENT)
        assert await passed(kernel, reader, CONTENT)
        with pytest.raises(Busy):
            await kernel.open(ino, os.O_RDWR)
        for handle in (reader, late):
            await kernel.release(handle)
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 0, b"new")
        assert await all_of(kernel, writer) == b"new" + CONTENT[3:]
        await kernel.release(writer)


@pytest.mark.parametrize("point", ["burst.source.given", "vfs.burst.entered"])
async def test_a_crash_while_blocks_become_a_copy(directory: Path, point: str) -> None:
    def crash() -> None:
        raise faults.SimulatedCrash

    with pytest.raises(faults.SimulatedCrash):
        async with mounted(directory) as kernel:
            ino = await make(kernel)
            reader = await kernel.open(ino, os.O_RDONLY)
            await kernel.blocks.save()
            faults.arm(point, crash)
            await kernel.open(ino, os.O_RDWR)
    faults.disarm_all()
    async with mounted(directory) as kernel:
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == CONTENT
        await kernel.release(reader)


async def test_blocks_that_survivors_of_a_mount_use_are_not_cut(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        await kernel.blocks.save()
    [path] = [it for it in directory.glob("burst/blocks/*[0-9a-f]") if it.name != "map"]
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        async with mounted(directory) as kernel:
            await crowded(kernel)
            await read_once(kernel, ino)
            assert mapped[:] == file.read() == CONTENT
    mapped.close()


async def test_blocks_that_come_after_others_were_found_wrong(directory: Path) -> None:
    """While programs have those open; nobody reads these once he opens the file anew."""
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        [path] = directory.glob("burst/blocks/*[0-9a-f]")
        with path.open("r+b") as file:
            file.write(b"wrong")
        kernel.blocks.correct((await kernel.getattr(ino)).oid)
        await read_once(kernel, ino)
        late = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, late, CONTENT)
        for handle in (reader, late):
            await kernel.release(handle)
        for _ in range(2):  # the second open is the bridge's
            reader = await kernel.open(ino, os.O_RDONLY)
            assert await passed(kernel, reader, CONTENT)
            await kernel.release(reader)
        reader = await kernel.open(ino, os.O_RDONLY)
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 0, b"new")
        assert await passed(kernel, reader, b"new" + CONTENT[3:])
        for handle in (reader, writer):
            await kernel.release(handle)


async def test_blocks_that_end_while_they_are_opened_back_nothing(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        oid = (await kernel.getattr(ino)).oid
        [device] = kernel.blocks.devices.values()
        call, token = device.server.call, trio.lowlevel.current_trio_token()

        def ended(*args: Any) -> object:
            answer = call(*args)
            trio.from_thread.run_sync(kernel.blocks.correct, oid, trio_token=token)
            return answer

        with patch.object(device.server, "call", ended):
            assert await kernel.blocks.backing(oid, len(CONTENT)) is None


async def mapped_of(kernel: Kernel, ino: int) -> mmap.mmap:
    """Of a file that is not open any more."""
    reader = await kernel.open(ino, os.O_RDONLY)
    mapped = kernel.map(reader, len(CONTENT), os.O_RDONLY)
    assert mapped is not None
    await kernel.release(reader)
    return mapped


async def overwrite(kernel: Kernel, ino: int, data: bytes) -> None:
    writer = await kernel.open(ino, os.O_RDWR)
    await kernel.write(writer, 0, data)
    assert await all_of(kernel, writer) == data + CONTENT[len(data) :]
    await kernel.release(writer)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_tree", [False, True])
async def test_what_is_mapped_is_of_one_of_both_clones(
    directory: Path, kind: str, is_tree: bool
) -> None:
    async with mounted(directory, KINDS[kind]) as kernel:
        ino = await make(kernel)
        parent = (await kernel.mkdir(ROOT, b"tree", 0o755, AS_ROOT)).ino
        await kernel.rename(ROOT, b"f", parent, b"f")
        with await mapped_of(kernel, ino) as mapped:
            if is_tree:
                await kernel.clone(ROOT, b"tree", ROOT, b"clone", AS_ROOT)
                clone = await kernel.lookup((await kernel.lookup(ROOT, b"clone")).ino, b"f")
            else:
                await kernel.clone(parent, b"f", ROOT, b"clone", AS_ROOT)
                clone = await kernel.lookup(ROOT, b"clone")
            await overwrite(kernel, clone.ino, b"clone")
            assert mapped[:] == CONTENT
            await overwrite(kernel, ino, b"other")
            assert mapped[:] == b"other" + CONTENT[5:]


@pytest.mark.parametrize("rule", ["1d:compress=zstd", "1d:cold"])
async def test_what_is_mapped_is_not_laid_out_anew(directory: Path, rule: str) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        await kernel.setattr(ino, SetAttr(atime_ns=1, mtime_ns=1), AS_ROOT)
        for server in list(kernel.store.servers.capacity())[1:]:
            kernel.store.servers.classify(server.id, ACTIVE, "", None, "cold")
        await put(kernel, ROOT, "age", rule, AS_ROOT)
        before = (await kernel.getattr(ino)).oid
        with await mapped_of(kernel, ino) as mapped:
            await kernel.aging.work()
            assert (await kernel.getattr(ino)).oid == before
            await overwrite(kernel, ino, b"other")
            assert mapped[:] == b"other" + CONTENT[5:]


async def test_a_file_that_is_only_lent_is_staged_and_laid_out_anew(directory: Path) -> None:
    async with mounted(directory) as kernel:
        staged, old = await make(kernel), await make(kernel, b"old")
        for ino in (staged, old):
            (await mapped_of(kernel, ino)).close()
        assert await kernel.stager.stage(staged)
        assert (await kernel.getattr(staged)).copy is not None
        await kernel.setattr(old, SetAttr(atime_ns=1, mtime_ns=1), AS_ROOT)
        await put(kernel, ROOT, "age", "1d:compress=zstd", AS_ROOT)
        before = (await kernel.getattr(old)).oid
        for _ in range(3):
            await kernel.aging.work()
        assert (await kernel.getattr(old)).oid != before
        for ino in (staged, old):
            reader = await kernel.open(ino, os.O_RDONLY)
            assert await all_of(kernel, reader) == CONTENT
            await kernel.release(reader)


async def test_a_file_that_is_mapped_while_it_is_staged_gets_no_copy(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reached, go = trio.Event(), trio.Event()
        create = kernel.tier.create

        async def slowly(*args: Any) -> BurstCopy:
            reached.set()
            await go.wait()
            return await create(*args)

        kernel.tier.create = slowly
        async with trio.open_nursery() as nursery:
            nursery.start_soon(kernel.stager.stage, ino)
            await reached.wait()
            mapped = await mapped_of(kernel, ino)
            go.set()
        with mapped:
            await overwrite(kernel, ino, b"other")
            assert mapped[:] == b"other" + CONTENT[5:]


async def test_room_comes_back_when_blocks_cannot_become_a_copy(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        with failing("rename", str(directory / "burst/blocks")):
            with pytest.raises(Unavailable):
                await kernel.open(ino, os.O_RDWR)
        assert await passed(kernel, reader, CONTENT)
        await kernel.upkeep.have_done(Work.BLOCKS)
        assert not list(directory.glob("burst/blocks/*[0-9a-f]"))
        await kernel.release(reader)
        writer = await kernel.open(ino, os.O_RDWR)
        await kernel.write(writer, 0, b"other")
        assert await all_of(kernel, writer) == b"other" + CONTENT[5:]
        await kernel.release(writer)


async def test_wrong_blocks_of_what_programs_use_are_removed(directory: Path) -> None:
    """Those that open the file from now on read it from the servers."""
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        oid = (await kernel.getattr(ino)).oid
        reader = await kernel.open(ino, os.O_RDONLY)
        [path] = directory.glob("burst/blocks/*[0-9a-f]")
        with path.open("r+b") as file:
            file.write(b"wrong")
        [device] = kernel.blocks.devices.values()
        for segment in device.map.sources[oid].values():
            segment.checked = 0  # a device that gave other bytes when they were compared before
        assert not await kernel.blocks.read(oid, 0, memoryview(bytearray(10)), len(CONTENT))
        late = await kernel.open(ino, os.O_RDONLY)
        assert not await passed(kernel, late, CONTENT)
        with pytest.raises(Busy):
            await kernel.open(ino, os.O_RDWR)
        for handle in (reader, late):
            await kernel.release(handle)
        await overwrite(kernel, ino, b"other")


@pytest.mark.parametrize("comes_again", [False, True])
async def test_what_is_mapped_and_was_found_wrong_is_not_changed_elsewhere(
    directory: Path, comes_again: bool
) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        mapped = await mapped_of(kernel, ino)
        kernel.blocks.correct((await kernel.getattr(ino)).oid)
        await kernel.upkeep.have_done(Work.BLOCKS)
        if comes_again:
            await read_once(kernel, ino)
            reader = await kernel.open(ino, os.O_RDONLY)
            assert await passed(kernel, reader, CONTENT)
        with pytest.raises(Busy):
            await kernel.open(ino, os.O_RDWR)
        assert mapped[:] == CONTENT
        mapped.close()
        await overwrite(kernel, ino, b"other")
        if comes_again:
            assert await passed(kernel, reader, b"other" + CONTENT[5:])
            await kernel.release(reader)


async def test_what_was_found_wrong_is_given_up_when_nobody_uses_it(directory: Path) -> None:
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        oid = (await kernel.getattr(ino)).oid
        mapped = await mapped_of(kernel, ino)
        before = len(os.listdir("/proc/self/fd"))
        kernel.blocks.correct(oid)
        await kernel.upkeep.have_done(Work.BLOCKS)
        assert await kernel.blocks.is_used(oid)
        mapped.close()
        await crowded(kernel)
        assert not await kernel.blocks.is_used(oid)
        assert len(os.listdir("/proc/self/fd")) <= before


async def test_a_descriptor_that_reads_are_answered_from_is_no_program(directory: Path) -> None:
    """Of a clone that is open, when the original is not mapped any more."""
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        with await mapped_of(kernel, ino):
            await kernel.clone(ROOT, b"f", ROOT, b"clone", AS_ROOT)
            clone = await kernel.lookup(ROOT, b"clone")
            reader = await kernel.open(clone.ino, os.O_RDONLY)
            assert await all_of(kernel, reader) == CONTENT
            assert kernel.has_places(clone.ino)
        [device] = kernel.blocks.devices.values()
        assert device.files[clone.oid].close_idle()  # the duplicate is of another open file now
        assert not await kernel.blocks.is_used(clone.oid)
        assert await all_of(kernel, reader) == CONTENT
        await kernel.release(reader)


async def test_blocks_that_come_while_their_file_becomes_a_copy(directory: Path) -> None:
    """Of a clone: its file has the name that the copy has still, and must not be the copy."""
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        with await mapped_of(kernel, ino) as mapped:
            await kernel.clone(ROOT, b"f", ROOT, b"clone", AS_ROOT)
            clone = await kernel.lookup(ROOT, b"clone")
            with hanging(str(directory / "burst/blocks"), ["rename"]) as hang:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(overwrite, kernel, ino, b"other")
                    await until(lambda: not kernel.blocks.bytes_of(clone.oid))
                    await read_once(kernel, clone.ino)
                    hang.release()
            for _ in range(2):
                await read_once(kernel, clone.ino)
            assert mapped[:] == b"other" + CONTENT[5:]
        await crowded(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == b"other" + CONTENT[5:]
        await kernel.release(reader)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("first", ["original", "clone"])
async def test_a_file_that_is_passed_through_is_cloned(
    directory: Path, kind: str, first: str
) -> None:
    """The clone shares its objects; what one of them writes the other one's readers do not see."""
    async with mounted(directory, KINDS[kind]) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        await kernel.clone(ROOT, b"f", ROOT, b"clone", AS_ROOT)
        clone = await kernel.lookup(ROOT, b"clone")
        assert clone.oid == (await kernel.getattr(ino)).oid
        assert await passed(kernel, reader, CONTENT)
        late = await kernel.open(ino, os.O_RDONLY)
        of_clone = await kernel.open(clone.ino, os.O_RDONLY)
        inos = {"original": ino, "clone": clone.ino}
        expected = dict.fromkeys(inos, CONTENT)
        for name in sorted(inos, key=lambda each: each != first):
            data = name.encode()
            writer = await kernel.open(inos[name], os.O_RDWR)
            await kernel.write(writer, 0, data)
            await kernel.release(writer)
            expected[name] = data + CONTENT[len(data) :]
            for handle in (reader, late):
                assert await all_of(kernel, handle) == expected["original"]
            assert await all_of(kernel, of_clone) == expected["clone"]
        for handle in (reader, late, of_clone):
            await kernel.release(handle)
        await drained(kernel, *inos.values())
        for name in inos:
            reader = await kernel.open(inos[name], os.O_RDONLY)
            assert await all_of(kernel, reader) == expected[name]
            await kernel.release(reader)


async def test_of_many_that_stay_only_as_many_go_as_are_needed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that programs use are passed over, and not asked for again before all others."""
    monkeypatch.setattr(block_cache, "_ASKED", 2)
    async with mounted(directory) as kernel:
        inos = [await make(kernel, b"%d" % number) for number in range(6)]
        oids = [(await kernel.getattr(ino)).oid for ino in inos]
        with await mapped_of(kernel, inos[0]), await mapped_of(kernel, inos[1]):
            for ino in inos[2:]:
                (await mapped_of(kernel, ino)).close()
            [device] = kernel.blocks.devices.values()
            monkeypatch.setattr(type(device), "wanted", 1)
            left = []
            for _ in range(4):
                device.asks_at_s = 0
                kernel.upkeep.wake(Work.BLOCKS)
                await kernel.upkeep.have_done(Work.BLOCKS)
                left.append([oids.index(oid) for oid in device.map.held_sources])
        assert left == [[2, 3, 4, 5, 0, 1], [3, 4, 5, 0, 1], [4, 5, 0, 1], [5, 0, 1]]
