"""Interleaved files that are protected, in a whole filesystem: drained, read with servers lost,
compacted, checked.
"""

import errno
import os
import random
import shutil
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core.errors import NoSpace
from aifs.files.draining import Draining
from aifs.layout.interleaved import Interleaved
from aifs.layout.placement import DRAINING
from aifs.meta import chunks, keys, servers
from aifs.meta.keys import ROOT_INO
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.stores import drained, numbers, read_file, write_file

SERVERS = 4
SETTINGS = {
    "layout.kind": "interleaved",
    "layout.compact_above": "0.3",
    "burst.drain_delay": "1h",
    "burst.throttle_max": "0s",
    "meta.backup_interval": 0,
}
REDUNDANT = {"replicas": {"layout.replicas": 2}, "ec": {"layout.ec": "2+1"}}
SIZES = [3000, 100_000, 1 << 20, (3 << 20) + 5000]

redundant = pytest.mark.parametrize("kind", REDUNDANT)


def mounted(
    directory: Path, kind: str, sound: bool = True
) -> AbstractAsyncContextManager[Filesystem]:
    return stores.opened(
        directory, REDUNDANT.get(kind, {}), base=SETTINGS, servers=SERVERS, sound=sound
    )


async def findings(directory: Path, repair: bool = False) -> list[str]:
    report = await trio.to_thread.run_sync(check, modes.config_of(directory), repair)
    return sorted(finding.kind for finding in report.findings if not finding.repaired)


async def write_files(fs: Filesystem, contents: dict[bytes, bytes]) -> dict[int, bytes]:
    """Written and drained; bytes by inode."""
    files = {}
    for name, data in contents.items():
        files[await write_file(fs, name, data)] = data
    await drained(fs, *files)
    for ino in files:
        assert isinstance((await fs.getattr(ino)).layout, Interleaved)
        assert await fs.evictor.evict(ino)
    return files


async def expect(fs: Filesystem, files: dict[int, bytes]) -> None:
    for ino, data in files.items():
        assert await read_file(fs, ino) == data, f"inode {ino}"
        await fs.evictor.evict(ino)


def some(seed: int, count: int = 12) -> dict[bytes, bytes]:
    rng = random.Random(seed)
    return {
        f"{seed}.{number}".encode(): rng.randbytes(rng.choice(SIZES)) for number in range(count)
    }


async def table(fs: Filesystem) -> dict[int, chunks.Container]:
    view = fs.store.engine.view
    return await view(
        lambda tx: {
            keys.number(k): chunks.decode_container(v) for k, v in tx.range(*keys.all_of(b"t"))
        }
    )


@pytest.mark.sweep
@redundant
async def test_a_lost_server_is_not_noticed(directory, kind):
    async with mounted(directory, kind) as fs:
        files = await write_files(fs, some(1))
        for record in (await table(fs)).values():
            assert record.layout.is_protected
        await expect(fs, files)
    for lost in range(SERVERS):
        copy = directory.parent / str(lost)
        shutil.copytree(directory, copy)
        shutil.rmtree(copy / "data" / str(lost) / "objects")
        async with mounted(copy, kind, sound=False) as fs:
            await expect(fs, files)


@pytest.mark.sweep
@redundant
async def test_fsck_knows_what_lacks(directory, kind):
    async with mounted(directory, kind) as fs:
        files = await write_files(fs, some(1))
    objects = sorted((directory / "data" / "1" / "objects").rglob("*.0"))
    assert objects
    objects[0].unlink()
    for path in objects[1:2]:
        os.truncate(path, path.stat().st_size - 1)
    kinds = ["degraded"] * len(objects[:2])
    assert await findings(directory) == kinds
    assert await findings(directory, repair=True) == []
    async with mounted(directory, kind) as fs:
        await expect(fs, files)


@pytest.mark.sweep
@redundant
async def test_fsck_names_what_is_lost(directory, kind):
    async with mounted(directory, kind) as fs:
        await write_files(fs, some(1))
    for server in range(3):
        for path in (directory / "data" / str(server) / "objects").rglob("*.0"):
            path.unlink()
    kinds = await findings(directory)
    assert (
        {"missing-container", "lost-chunk"}
        <= set(kinds)
        <= {"missing-container", "lost-chunk", "degraded"}
    )


@pytest.mark.sweep
@redundant
async def test_a_server_that_fails_while_files_are_drained(directory, kind):
    with hooked():
        async with mounted(directory, kind) as fs:
            before = await write_files(fs, some(1))
            with failing("write_at", f"{directory}/data/1", errno.ENOSPC) as failed:
                during = await write_files(fs, some(2))
            if failed:
                assert await numbers(fs, b"q")
            after = await write_files(fs, some(3))
            await expect(fs, before | during | after)


@redundant
async def test_files_stay_in_the_burst_tier_where_too_few_servers_work(directory, kind):
    with hooked():
        async with mounted(directory, kind) as fs:
            with failing("write_at", f"{directory}/data/", errno.ENOSPC):
                ino = await write_file(fs, b"file", bytes(range(256)) * 400)
                draining = Draining(ino)
                await fs.drain.drainer.drain([draining])
                assert isinstance(draining.outcome, NoSpace)
            assert (await fs.getattr(ino)).in_burst
            await drained(fs, ino)
            await expect(fs, {ino: bytes(range(256)) * 400})


async def leave_only(fs: Filesystem, files: dict[int, bytes], keep: set[int]) -> None:
    """Of ``some(1)``, in containers that get no more chunks."""
    await fs.containers.retire(lambda container, layout: True)
    for number, ino in enumerate(files):
        if ino not in keep:
            await fs.unlink(ROOT_INO, f"1.{number}".encode())
            fs.forget([ino])
    await fs.collector.drain()


@pytest.mark.sweep
@redundant
async def test_compaction_of_protected_containers(directory, kind):
    async with mounted(directory, kind) as fs:
        files = await write_files(fs, some(1, 40))
        keep = set(random.Random(2).sample(sorted(files), 8))
        await leave_only(fs, files, keep)
        before = await table(fs)
        await fs.compaction.compact()
        await fs.collector.drain()
        after = await table(fs)
        assert sum(record.length for record in after.values()) < 0.6 * sum(
            record.length for record in before.values()
        )
        assert all(record.layout.is_protected for record in after.values())
        await expect(fs, {ino: files[ino] for ino in keep})
        await fs.compaction.compact()
        assert (await table(fs)).keys() == after.keys(), "there is nothing left to do"


@pytest.mark.sweep
@redundant
async def test_compaction_reads_around_a_lost_server(directory, kind):
    async with mounted(directory, kind, sound=False) as fs:
        files = await write_files(fs, some(1, 30))
        keep = set(sorted(files)[::6])
        await leave_only(fs, files, keep)
        before = await table(fs)
        worth = {
            container for container, record in before.items() if record.live < 0.5 * record.length
        }
        shutil.rmtree(directory / "data" / "2" / "objects")
        fs.containers.files.forget()
        for container, record in before.items():
            fs.containers.changed(container, record.layout)
        await fs.compaction.compact()
        await fs.collector.drain()
        assert worth and not (await table(fs)).keys() & worth
        await expect(fs, {ino: files[ino] for ino in keep})


@pytest.mark.sweep
@redundant
async def test_a_container_is_evacuated(directory, kind):
    async with mounted(directory, kind) as fs:
        files = await write_files(fs, some(1))
        before = await table(fs)
        await fs.store.engine.transact(chunks.seal_container, 1 << 40)  # one that there is not
        for container in before:
            assert await fs.compaction.evacuate(container)
        await fs.collector.drain()
        assert not (await table(fs)).keys() & before.keys()
        await expect(fs, files)
        assert await fs.compaction.evacuate(min(before)), "it has gone"


@pytest.mark.sweep
async def test_draining_servers_get_nothing_and_keep_no_open_container(directory):
    async with mounted(directory, "ec") as fs:
        files = await write_files(fs, some(1))
        fs.store.servers[1].standing = DRAINING
        await fs.containers.leave_servers()
        opened = await fs.store.engine.view(chunks.open_containers)
        assert all(1 not in record.layout.servers for record in opened.values())
        known = await table(fs)
        files |= await write_files(fs, some(2))
        new = {
            container: record
            for container, record in (await table(fs)).items()
            if container not in known
        }
        assert all(1 not in record.layout.servers for record in new.values())
        fs.store.servers[1].standing = "active"
        await expect(fs, files)


@pytest.mark.sweep
async def test_a_plain_container_leaves_its_server(directory):
    async with mounted(directory, "plain") as fs:
        files = await write_files(fs, some(1))
        fs.store.servers[1].standing = DRAINING
        for container, record in (await table(fs)).items():
            if record.layout.servers == (1,):
                assert await fs.compaction.evacuate(container)
        await fs.collector.drain()
        assert all(record.layout.servers != (1,) for record in (await table(fs)).values())
        await expect(fs, files)
        fs.store.servers[1].standing = "active"


@pytest.mark.sweep
@redundant
async def test_unfilled_containers_of_an_earlier_mount_are_sealed(directory, kind):
    async with mounted(directory, kind) as fs:
        files = await write_files(fs, some(1))
        assert await fs.store.engine.view(chunks.open_containers)
    async with mounted(directory, kind) as fs:
        assert not await fs.store.engine.view(chunks.open_containers)
        files |= await write_files(fs, some(2))
        await expect(fs, files)


@pytest.mark.sweep
@redundant
async def test_fsck_marks_columns_on_a_server_that_is_no_more(directory, kind):
    async with mounted(directory, kind, sound=False) as fs:
        files = await write_files(fs, some(1))
        on_it = [
            container
            for container, record in (await table(fs)).items()
            if 1 in record.layout.servers
        ]
        await fs.store.engine.transact(servers.remove_server, 1)
    assert await findings(directory) == ["unknown-server"] * len(on_it)
    assert await findings(directory, repair=True) == []
    async with mounted(directory, kind) as fs:
        await expect(fs, files)
