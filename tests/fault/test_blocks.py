"""Clean blocks in the burst tier: what is read comes from there the next time, and never what it is
not.
"""

import errno
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.burst import block_cache
from aifs.burst.block_cache import BlockCache
from aifs.check import fsck
from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.upkeep import Work
from aifs.data.containers.files import STRIPE_BLOCK
from aifs.data.objects.recovery import Recovery
from aifs.meta import moves
from aifs.meta.degraded import state_of_blocks
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem, open_filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.modes import config_of
from tests.support.spoil import flip
from tests.support.stores import ROOT, ask, moved_out, overwrite, put, read_file, write_file

ALWAYS = modes.WAITING | modes.BY_DAEMON | {"burst.blocks": "always", "layout.inline_limit": "0"}
IN_PLACE = ALWAYS | {"burst.stage_for_write": "0"} | modes.STRIPED
KINDS = {
    "striped": modes.STRIPED,
    "one server": {"layout.count": "1"} | modes.STRIPED,
    "interleaved": {"layout.kind": "interleaved"},
    "compressed": {"layout.kind": "interleaved", "layout.compress": "zstd:3"},
    "replicated": {"layout.replicas": "2"} | modes.STRIPED,
    "coded": {"layout.ec": "2+1"} | modes.STRIPED,
    "coded containers": {"layout.ec": "2+1", "layout.kind": "interleaved"},
    "verified": {"data.verify": "read"} | modes.STRIPED,
}
SIZE = (3 << 20) + 4321
FLOOR = 16 << 20  # of memory, which the read cache keeps
opened = partial(stores.opened, base=ALWAYS)


def content_of(size: int, seed: int = 1) -> bytes:
    """Of which a half can be compressed."""
    rng = random.Random(seed)
    return b"".join(rng.randbytes(512) + bytes(512) for _ in range(-(-size // 1024)))[:size]


async def room(fs: Filesystem) -> None:
    """It is known how much room there is."""
    await fs.tier.look()


async def no_room(fs: Filesystem) -> None:
    """Copies take all of it."""
    for device in fs.tier.devices.values():
        device.room_for_blocks = lambda: 0
    await fs.tier.look()


async def kept(fs: Filesystem) -> None:
    """What was read so far is in its blocks."""
    while fs.blocks.status()["waiting_bytes"]:
        await fs.upkeep.have_done(Work.BLOCKS)


def from_servers(fs: Filesystem) -> int:
    return sum(server.read_bytes for server in fs.store.servers.capacity())


async def forget(fs: Filesystem) -> None:
    """All that is read has to come from the servers, or from blocks: caches give their memory."""
    budget = fs.store.servers.budget
    size = budget.total - FLOOR
    await budget.acquire(size)
    budget.release(size)


async def cached(fs: Filesystem, data: bytes, name: bytes = b"file") -> int:
    """A clean file, the blocks of which are here."""
    ino = await write_file(fs, name, data)
    await moved_out(fs, ino)
    await room(fs)
    assert await read_file(fs, ino) == data
    await kept(fs)
    await forget(fs)
    return ino


def files_of(directory: Path) -> list[Path]:
    return sorted(directory.glob("burst/blocks/*[0-9a-f]"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", ["memory", "disk"])
async def test_what_was_read_comes_from_blocks(directory: Path, kind: str, place: str) -> None:
    data = content_of(SIZE)
    with nullcontext() if place == "memory" else hooked():
        async with opened(directory, KINDS[kind]) as fs:
            ino = await cached(fs, data)
            before = from_servers(fs)
            assert await read_file(fs, ino) == data
            # The end of a container to which more may be appended is not kept: its stripe is read.
            tail = STRIPE_BLOCK if "interleaved" in KINDS[kind].values() else 0
            assert from_servers(fs) - before <= tail
            assert fs.blocks.status()["hit_bytes"] >= len(data) // 4
        async with opened(directory) as fs:
            await room(fs)
            assert await read_file(fs, ino) == data
            assert from_servers(fs) <= tail + (64 << 10)
            assert fs.blocks.status()["wrong_blocks"] == 0


async def test_the_neighbours_of_a_small_file_come_with_it(directory: Path) -> None:
    data = [os.urandom(5000) for _ in range(60)]
    async with opened(directory, modes.INTERLEAVED | {"layout.inline_limit": "0"}) as fs:
        inos = [await write_file(fs, b"%d" % n, each) for n, each in enumerate(data)]
        await moved_out(fs, *inos)
        await room(fs)
        for _ in range(2):
            for ino, each in zip(inos, data, strict=True):
                assert await read_file(fs, ino) == each
                await kept(fs)
            await forget(fs)
        containers = {server.id for server in fs.store.servers.capacity()}
        assert from_servers(fs) <= 2 * sum(map(len, data)) + len(containers) * 8 * fs.blocks.block


async def test_a_container_goes_on_to_grow(directory: Path) -> None:
    data = [os.urandom(100_000) for _ in range(12)]
    async with opened(directory, modes.INTERLEAVED) as fs:
        inos: list[int] = []
        for number, each in enumerate(data):
            inos.append(await write_file(fs, b"%d" % number, each))
            await moved_out(fs, inos[-1])
            await room(fs)
            for ino, expected in zip(inos, data, strict=False):
                assert await read_file(fs, ino) == expected
            await kept(fs)
        assert fs.blocks.status()["hit_bytes"]


@pytest.mark.parametrize("change", ["write", "truncate", "grow", "punch"])
async def test_a_change_in_place_ends_the_source(directory: Path, change: str) -> None:
    data = content_of(SIZE)
    async with opened(directory, IN_PLACE) as fs:
        ino = await cached(fs, data)
        inode = await fs.getattr(ino)
        assert fs.blocks.bytes_of(inode.oid) >= SIZE
        handle = (await fs.open(ino, os.O_RDWR)).handle
        if change == "write":
            await fs.write(handle, 100_000, b"other")
            data = data[:100_000] + b"other" + data[100_005:]
        elif change == "punch":
            await fs.fallocate(handle, 3, 0, 70_000)
            data = bytes(70_000) + data[70_000:]
        else:
            size = 70_000 if change == "truncate" else SIZE + 70_000
            await fs.io.truncate(fs.io.table.open[ino], size)
            data = data[:size].ljust(size, b"\0")
        assert not fs.blocks.bytes_of(inode.oid)
        await fs.fsync(handle)
        await fs.release(handle)
        for _ in range(2):
            assert await read_file(fs, ino) == data
            await kept(fs)
        assert not fs.blocks.bytes_of((await fs.getattr(ino)).oid)
    async with opened(directory) as fs:
        assert await read_file(fs, ino) == data


@pytest.mark.parametrize("moment", ["written", "asked"])
async def test_a_change_while_a_block_is_filled(
    directory: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Before it is asked whether the source stands, and when that has been answered."""
    data = content_of(SIZE)
    async with opened(directory, IN_PLACE) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        await room(fs)
        standing, changed = fs.blocks.standing, []

        async def changing(ids: list[int]) -> dict[int, int]:
            found = await standing(ids) if moment == "asked" else {}
            if not changed:
                changed.append(ids)
                await overwrite(fs, ino, 0, b"other")
            return found or await standing(ids)

        monkeypatch.setattr(fs.blocks, "standing", changing)
        assert await read_file(fs, ino) == data
        await kept(fs)
        assert changed
        for _ in range(2):
            assert await read_file(fs, ino) == b"other" + data[5:]
            await kept(fs)


@pytest.mark.parametrize("fault", ["byte", "short", "empty", "gone", "map", "no map", "stray"])
async def test_what_is_not_what_it_was_is_not_served(directory: Path, fault: str) -> None:
    data = content_of(SIZE)
    async with opened(directory) as fs:
        ino = await cached(fs, data)
    path = max(files_of(directory), key=lambda path: path.stat().st_size)
    table = directory / "burst/blocks/map"
    if fault == "byte":
        with path.open("r+b") as file:
            file.seek(100_000)
            file.write(b"wrong")
    elif fault in ("short", "empty"):
        os.truncate(path, 1000 if fault == "short" else 0)
    elif fault == "gone":
        path.unlink()
    elif fault == "map":
        table.write_bytes(table.read_bytes()[:-3])
    elif fault == "no map":
        table.unlink()
    else:
        (path.parent / f"{1 << 40:016x}").write_bytes(data)
    async with opened(directory) as fs:
        await room(fs)
        assert not (path.parent / f"{1 << 40:016x}").exists()
        assert await read_file(fs, ino) == data
        assert bool(fs.blocks.status()["wrong_blocks"]) == (fault in ("byte", "short", "empty"))
        await kept(fs)
        await forget(fs)
        assert await read_file(fs, ino) == data


async def test_wrong_bytes_of_a_container_that_were_kept_are_read_once_more(
    directory: Path,
) -> None:
    """A server has given wrong bytes once: those who compare ask it again."""
    data = content_of(200_000)
    async with opened(directory, modes.INTERLEAVED) as fs:
        ino = await cached(fs, data)
        device = next(iter(fs.blocks.devices.values()))
        for file in device.files.values():
            size = os.path.getsize(file.path)
            for at in range(0, size, 4096):
                os.pwrite(file.descriptor(), b"wrong", at)
        async with fs.io.inodes.held(ino) as held:
            assert bytes(await fs.io.read_to_copy(held, 0, len(data))) == data


async def test_what_was_read_before_it_was_repaired_is_not_kept(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content_of(SIZE)
    async with opened(directory, KINDS["replicated"]) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        await room(fs)
        inode = await fs.getattr(ino)
        server = fs.store.servers[inode.objects.servers[0]]
        flip(server.where((ino, inode.oid)), 1000)
        below = Recovery.read

        async def read(*args: Any) -> memoryview:
            found = bytes(await below(*args))
            fs.scrub.start(bandwidth=0)
            await fs.scrub.wait()
            return memoryview(found)

        monkeypatch.setattr(Recovery, "read", read)
        assert await read_file(fs, ino) != data
        monkeypatch.undo()
        await kept(fs)
        await forget(fs)
        assert await read_file(fs, ino) == data


async def test_no_map_is_written_while_bytes_are_put_on_record_as_wrong(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would count with that record, and have the blocks that are wrong. If the host dies then,
    and another one rebuilds the objects, nothing says later that they were."""
    table, seen = directory / "burst/blocks/map", []
    async with opened(directory, KINDS["replicated"]) as fs:
        ino = await cached(fs, content_of(SIZE))
        transact = fs.store.engine.transact

        async def and_saved(function: Any, *args: Any) -> Any:
            answer = await transact(function, *args)
            if function is moves.put_damaged:
                await fs.blocks.save()
                seen.append(table.exists())
            return answer

        monkeypatch.setattr(fs.store.engine, "transact", and_saved)
        await fs.io.inodes.lose_columns(ino, (await fs.getattr(ino)).oid, 1)
        assert seen == [False]
        await fs.blocks.save()
        assert table.exists()


async def test_blocks_give_way(directory: Path) -> None:
    data = content_of(SIZE)
    async with opened(directory, modes.STRIPED) as fs:
        ino = await cached(fs, data)
        [device] = fs.blocks.devices
        left: list[int] = []
        oid = (await fs.getattr(ino)).oid
        fs.blocks.tell(left.append)
        assert sum(path.stat().st_blocks for path in files_of(directory)) * 512 >= SIZE // 2
        found = fs.blocks.file_of(oid, 0, SIZE)
        assert found is not None and os.pread(found[1], SIZE, 0) == data and found[0].id == device
        await no_room(fs)
        await fs.upkeep.have_done(Work.BLOCKS)
        assert fs.blocks.file_of(oid, 0, SIZE) is None
        assert left[0] == oid and not fs.blocks.status()["cached_bytes"] and not files_of(directory)
        assert await read_file(fs, ino) == data


async def test_a_reader_of_what_is_punched_meanwhile(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content_of(SIZE)
    async with opened(directory) as fs:
        ino = await cached(fs, data)
        [device] = fs.blocks.devices
        monkeypatch.setattr(BlockCache, "_read_now", lambda *_: False)
        gather, punched = block_cache.gather, []

        async def slow(*args: Any, **options: Any) -> list[Any]:
            """All is punched before the thread reads."""
            if not punched:
                punched.append(1)
                await no_room(fs)
                await fs.upkeep.have_done(Work.BLOCKS)
            return await gather(*args, **options)

        monkeypatch.setattr(block_cache, "gather", slow)
        async with fs.io.inodes.held(ino) as held:
            assert bytes(await fs.io.read(held, 0, 100_000)) == data[:100_000]
        assert punched and not fs.blocks.status()["hit_bytes"]


@pytest.mark.parametrize("kind", ["striped", "interleaved"])
@pytest.mark.parametrize("point", sorted(p for p in faults.POINTS if p.startswith("burst.blocks.")))
async def test_a_crash(directory: Path, kind: str, point: str) -> None:
    data = content_of(SIZE)
    settings = IN_PLACE | KINDS[kind]
    reached: list[str] = []

    def crash() -> None:
        reached.append(point)
        raise faults.SimulatedCrash

    with pytest.raises(faults.SimulatedCrash):
        async with mounted(directory, settings) as fs:
            ino = await write_file(fs, b"file", data)
            await moved_out(fs, ino)
            await room(fs)
            if point != "burst.blocks.filled":
                await read_file(fs, ino)
                await kept(fs)
                await fs.blocks.save()
            if point == "burst.blocks.saved":
                await overwrite(fs, ino, 0, b"other")
                data = b"other" + data[5:]
            faults.arm(point, crash)
            await read_file(fs, ino)
            if point == "burst.blocks.left":
                await no_room(fs)
            await fs.upkeep.have_done(Work.BLOCKS)
            for device in fs.blocks.devices.values():
                device.changed = True
            await fs.blocks.save()
    faults.disarm_all()
    assert reached
    for _ in range(2):
        async with opened(directory) as fs:
            await room(fs)
            assert await read_file(fs, ino) == data
            await kept(fs)


@asynccontextmanager
async def mounted(directory: Path, settings: dict) -> AsyncIterator[Filesystem]:
    await trio.to_thread.run_sync(modes.make_store, directory, settings, 0)
    async with stores.served(config_of(directory)) as fs:
        yield fs


async def test_reading_makes_no_record(directory: Path) -> None:
    data = content_of(SIZE)
    async with opened(directory, modes.STRIPED) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        await room(fs)
        await fs.collector.drain()
        await fs.sync()
        before = fs.store.engine.seq
        handle = (await fs.open(ino, os.O_RDONLY | os.O_NOATIME)).handle
        for at in range(0, SIZE, 1 << 17):
            await fs.read(handle, at, 1 << 17)
        await fs.release(handle)
        await kept(fs)
        await fs.blocks.save()
        assert fs.blocks.status()["cached_bytes"] and fs.store.engine.seq == before


async def test_nothing_is_kept_of_what_lies_in_memory(directory: Path) -> None:
    async with opened(directory, {"burst.blocks": "auto"} | modes.STRIPED) as fs:
        await cached(fs, content_of(SIZE))
        assert not fs.blocks.status()["cached_bytes"]


async def test_a_file_that_was_written_in_place_is_not_kept(directory: Path) -> None:
    data = content_of(SIZE)
    async with opened(directory, IN_PLACE) as fs:
        ino = await cached(fs, data)
        await overwrite(fs, ino, 0, b"other")
        for _ in range(2):
            assert await read_file(fs, ino) == b"other" + data[5:]
            await kept(fs)
        assert not fs.blocks.status()["cached_bytes"] and not files_of(directory)


async def test_a_removed_file_leaves_nothing(directory: Path) -> None:
    async with opened(directory, modes.STRIPED) as fs:
        ino = await cached(fs, content_of(SIZE))
        assert fs.blocks.bytes_of((await fs.getattr(ino)).oid)
        await fs.unlink(ROOT_INO, b"file")
        fs.forget([ino])
        await fs.collector.drain()
        await fs.upkeep.have_done(Work.BLOCKS)
        assert not fs.blocks.status()["cached_bytes"] and not files_of(directory)


async def test_evict_drops_the_blocks_of_a_file(directory: Path) -> None:
    async with opened(directory, modes.STRIPED) as fs:
        ino = await cached(fs, content_of(SIZE))
        for asked in (ino, ROOT_INO):
            assert (await ask(fs, asked, "state"))["block_bytes"] == SIZE
        assert (await ask(fs, ino, "info"))["block_bytes"] == SIZE
        await put(fs, ino, "evict", "", ROOT)
        assert (await ask(fs, ino, "state"))["block_bytes"] == 0


@pytest.mark.parametrize("kind", ["interleaved", "compressed"])
async def test_blocks_of_packed_files_are_told(directory: Path, kind: str) -> None:
    """They lie in the blocks of a container, whose last one is there when it is sealed."""
    async with opened(directory, KINDS[kind]) as fs:
        inos = [await cached(fs, content_of(SIZE, seed), b"%d" % seed) for seed in (1, 2)]
        told = [(await ask(fs, ino, "state"))["block_bytes"] for ino in (*inos, ROOT_INO)]
        assert all(SIZE - fs.blocks.block * 8 <= it <= SIZE for it in told[:2])
        assert told[2] == sum(told[:2])
        assert [(await ask(fs, ino, "info"))["block_bytes"] for ino in inos] == told[:2]
        await put(fs, inos[0], "evict", "", ROOT)
        assert (await ask(fs, inos[0], "state"))["block_bytes"] == told[0], "it is shared"


async def test_without_blocks_the_directory_goes(directory: Path) -> None:
    async with opened(directory, modes.STRIPED) as fs:
        await cached(fs, content_of(SIZE))
    assert files_of(directory)
    config = config_of(directory)
    off = config.model_copy(update={"burst": config.burst.model_copy(update={"blocks": "off"})})
    async with stores.served(off):
        pass
    assert not (directory / "burst/blocks").exists()


async def test_a_stripe_is_kept_as_a_whole(directory: Path) -> None:
    """One file has brought it into memory, with its neighbours."""
    data = [os.urandom(50_000) for _ in range(20)]
    with hooked():
        async with opened(directory, modes.INTERLEAVED, servers=1) as fs:
            inos = [await write_file(fs, b"%d" % n, each) for n, each in enumerate(data)]
            await moved_out(fs, *inos)
            await room(fs)
            assert await read_file(fs, inos[0]) == data[0]
            await kept(fs)
            assert fs.blocks.status()["cached_bytes"] >= sum(map(len, data[:10]))
            await forget(fs)
            before = from_servers(fs)
            assert await read_file(fs, inos[1]) == data[1]
            assert from_servers(fs) == before


async def test_a_block_that_is_not_whole_takes_what_it_counts(directory: Path) -> None:
    """Else a tier of small files seems to have room that it has not when they give way."""
    async with opened(directory, modes.STRIPED | {"layout.pack_below": "0"}) as fs:
        for number in range(8):
            await cached(fs, content_of(5000, number), b"%d" % number)
        taken = sum(path.stat().st_blocks * 512 for path in files_of(directory))
        counted = fs.blocks.status()["cached_bytes"]
        assert counted == 8 * fs.blocks.block and taken >= counted


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
async def test_what_cannot_be_kept_takes_no_room(directory: Path, number: int) -> None:
    data = content_of(SIZE)
    with hooked():
        async with opened(directory, modes.STRIPED) as fs:
            ino = await write_file(fs, b"file", data)
            await moved_out(fs, ino)
            await room(fs)
            below, written = str(directory / "burst/blocks"), list[str]()

            def full(op: str, path: str) -> None:
                if op == "write_at" and path.startswith(below):
                    written.append(path)
                    if len(written) == 3:
                        raise OSError(number, os.strerror(number))

            with hooked(full):
                assert await read_file(fs, ino) == data
                await kept(fs)
            assert len(written) >= 3
            await fs.upkeep.have_done(Work.BLOCKS)
            taken = sum(path.stat().st_blocks * 512 for path in files_of(directory))
            assert taken <= fs.blocks.status()["cached_bytes"]
            assert await read_file(fs, ino) == data


async def test_what_could_not_be_punched_is_punched_later(directory: Path) -> None:
    async with opened(directory, modes.STRIPED) as fs:
        await cached(fs, content_of(SIZE))
        [device] = fs.blocks.devices
        with failing("unlink", str(directory / "burst/blocks")) as failed:
            fs.blocks.give_room(device, 0)
            await fs.upkeep.have_done(Work.BLOCKS)
        assert failed and files_of(directory)
        await room(fs)
        await fs.upkeep.have_done(Work.BLOCKS)
        assert not files_of(directory)


async def test_nothing_waits_for_a_device_that_fails(directory: Path) -> None:
    data = content_of(SIZE)
    async with opened(directory, modes.STRIPED) as fs:
        await cached(fs, data)
        [device] = fs.blocks.devices
        ino = await write_file(fs, b"other", data)
        await moved_out(fs, ino)
        oid = (await fs.getattr(ino)).oid
        with failing("unlink", str(directory / "burst/blocks")) as failed:
            fs.blocks.give_room(device, 1 << 20)
            fs.blocks.fill(oid, 0, memoryview(data), len(data))
            await fs.upkeep.have_done(Work.BLOCKS)
            assert failed and not fs.blocks.status()["waiting_bytes"]
        await room(fs)
        await fs.upkeep.have_done(Work.BLOCKS)
        assert await read_file(fs, ino) == data


async def test_a_block_that_is_missing_keeps_no_more_than_itself(directory: Path) -> None:
    data = content_of(SIZE)
    async with opened(directory, modes.STRIPED) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        await room(fs)
        oid, block = (await fs.getattr(ino)).oid, fs.blocks.block
        fs.blocks.fill(oid, 0, memoryview(data)[:-block], len(data))
        await kept(fs)
        buffer = bytearray(data)
        fs.blocks.fill(oid, 0, memoryview(buffer), len(data))
        assert 0 < fs.blocks.status()["waiting_bytes"] <= 2 * block
        buffer.clear()  # nobody has it
        await kept(fs)
        assert await read_file(fs, ino) == data
        assert fs.blocks.status()["hit_bytes"] == len(data)


async def test_what_ends_while_a_map_is_loaded_is_not_taken_over(directory: Path) -> None:
    """A burst directory that comes while files are changed."""
    async with opened(directory, IN_PLACE) as fs:
        ino = await cached(fs, content_of(SIZE))
        oid = (await fs.getattr(ino)).oid
        await fs.blocks.save()
        [device] = fs.blocks.devices.values()

        async def changing(ids: list[int]) -> dict[int, int]:
            found = await fs.blocks.standing(ids)
            assert oid in found
            late.end(oid)
            return found

        engine = fs.store.engine
        state = partial(engine.view, state_of_blocks, False)
        late = BlockCache(fs.store.servers, fs.upkeep, changing, state, engine.barrier, "always")
        await late.load_device(device.server)
        assert late.devices and not late.bytes_of(oid)


async def test_the_length_of_a_file_of_blocks_costs_nothing(directory: Path) -> None:
    """At the start blocks are looked for that the map does not know: not in holes."""
    data = content_of(SIZE)
    async with opened(directory, modes.STRIPED) as fs:
        ino = await cached(fs, data)
    path = max(files_of(directory), key=lambda path: path.stat().st_blocks)
    far = 1 << 43
    with path.open("r+b") as file:
        file.seek(far)
        file.write(bytes(1 << 20))
    async with opened(directory) as fs:
        await room(fs)
        assert path.stat().st_blocks * 512 <= fs.blocks.status()["cached_bytes"]
        assert await read_file(fs, ino) == data


async def test_what_fsck_has_found_wrong_is_not_kept(directory: Path) -> None:
    """Blocks may have it, which were filled from the wrong column."""
    data = content_of(SIZE)
    async with mounted(directory, ALWAYS | KINDS["replicated"]) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        inode = await fs.getattr(ino)
        assert inode.objects is not None
        server = fs.store.servers[inode.objects.servers[0]]
        path = server.where((inode.named_by, inode.oid))
        with open(path, "r+b") as file:
            file.write(b"wrong")
        await room(fs)
        assert (await read_file(fs, ino))[:5] == b"wrong"
        await kept(fs)
    report = await trio.to_thread.run_sync(
        partial(fsck.check, repair=True, deep=True), config_of(directory)
    )
    assert report.findings
    async with opened(directory) as fs:
        await room(fs)
        assert await read_file(fs, ino) == data
        await fs.upkeep.have_done(Work.REBUILD)


async def test_what_lies_beside_and_is_away_fails_no_read(directory: Path) -> None:
    """A read is widened to whole blocks, of which one server that is not asked for has a part."""
    settings = {"layout.unit": "16KiB", "layout.count": "4"} | modes.STRIPED
    data = content_of(1 << 20)
    async with opened(directory, settings, sound=False) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        inode = await fs.getattr(ino)
        assert inode.objects is not None
        server = fs.store.servers[inode.objects.servers[1]]
        os.unlink(server.where((inode.named_by, inode.oid)))
        await room(fs)
        handle, *_ = await fs.open(ino, os.O_RDONLY)
        assert await fs.read(handle, 0, 4096) == data[:4096]
        with pytest.raises(Unavailable):
            await fs.read(handle, 16 << 10, 4096)
        await fs.release(handle)


async def test_what_waits_takes_memory_that_nobody_has(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = content_of(SIZE)
    monkeypatch.setattr(block_cache, "_PENDING_MAX", 1 << 20)
    async with opened(directory, modes.STRIPED) as fs:
        budget = fs.store.servers.budget
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        await room(fs)
        standing, seen = fs.blocks.standing, []

        async def slow(ids: list[int]) -> dict[int, int]:
            seen.append((budget.used, fs.blocks.status()["waiting_bytes"]))
            return await standing(ids)

        monkeypatch.setattr(fs.blocks, "standing", slow)
        assert await read_file(fs, ino) == data
        await kept(fs)
        assert seen and max(waiting for _, waiting in seen) > 1 << 20
        assert all(used >= waiting - (1 << 20) for used, waiting in seen)
        await forget(fs)
        assert budget.used <= FLOOR and not fs.blocks.status()["dropped_bytes"]
        share = budget.total
        await budget.acquire(share - budget.used)  # somebody else has it
        await put(fs, ino, "evict", "", ROOT)
        fs.blocks.fill((await fs.getattr(ino)).oid, 0, memoryview(data), SIZE)
        assert fs.blocks.status()["dropped_bytes"] == SIZE
        budget.release(budget.used - FLOOR)


async def test_blocks_that_were_not_checked_are_not_read_where_reads_are(directory: Path) -> None:
    data = content_of(SIZE)
    async with mounted(directory, ALWAYS | KINDS["replicated"]) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        inode = await fs.getattr(ino)
        assert inode.objects is not None
        server = fs.store.servers[inode.objects.servers[ino % 2]]
        flip(server.where((ino, inode.oid)), 1000)
        await room(fs)
        read = await read_file(fs, ino)
        await kept(fs)
    config = config_of(directory)
    checked = config.data.model_copy(update={"verify": "read"})
    async with open_filesystem(config.model_copy(update={"data": checked})) as fs:
        await room(fs)
        assert not fs.blocks.bytes_of(inode.oid)
        assert await read_file(fs, ino) == data
        await fs.upkeep.have_done(Work.REBUILD)
    await stores.require_sound(config)
    assert read != data
