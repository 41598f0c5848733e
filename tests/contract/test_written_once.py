"""A filesystem whose data servers can do the least that a storage must: objects are written once,
and neither change nor grow (tests/support/memory_storage.py). So it will be on object stores.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from aifs.core.errors import NoSpace, StoreError
from aifs.data import storages
from aifs.files.types import ROOT, SetAttr
from aifs.meta.keys import ROOT_INO
from aifs.store.restore import restore
from aifs.vfs.filesystem import Filesystem
from tests.support import modes
from tests.support.memory_storage import BUCKETS, MemoryStorage
from tests.support.stores import (
    drained,
    moved_out,
    opened,
    overwrite,
    put,
    read_file,
    require_sound,
    rewrite,
    served,
    write_file,
)
from tests.support.stores import fs as fs

MIB = 1 << 20
ADDRESSES = [f"memory://bucket{number}" for number in range(4)]
STRIPED = {**modes.WAITING, **modes.STRIPED, "meta.backup_interval": "1h"}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(storages.KINDS, "memory", MemoryStorage)
    yield
    BUCKETS.clear()


def objects() -> int:
    return sum(len(bucket.objects) for bucket in BUCKETS.values())


@pytest.mark.sweep
@pytest.mark.parametrize(
    "protected", [{}, modes.REPLICAS, modes.CODED], ids=["plain", "replicas", "coded"]
)
async def test_files_are_drained_read_and_deleted(directory: Path, protected: dict) -> None:
    data = {b"large": os.urandom(9 * MIB + 5), b"small": os.urandom(5000)}
    async with opened(directory, STRIPED | protected, servers=ADDRESSES) as fs:
        inos = {name: await write_file(fs, name, content) for name, content in data.items()}
        await moved_out(fs, *inos.values())
        assert objects() >= 5
        for name, ino in inos.items():
            assert await read_file(fs, ino) == data[name]
    config = modes.config_of(directory)
    async with served(config) as fs:
        for name, ino in inos.items():
            assert await read_file(fs, ino) == data[name]
        for name in inos:
            await fs.unlink(1, name)
        await fs.collector.drain()
    assert objects() == 0
    await require_sound(config)


@pytest.mark.store(STRIPED | {"layout.kind": "interleaved"}, servers=ADDRESSES[:1])
async def test_small_files_share_objects_that_are_written_once(fs: Filesystem) -> None:
    contents = {b"%d" % number: bytes([number]) * 9000 for number in range(30)}
    inos = {name: await write_file(fs, name, content) for name, content in contents.items()}
    await moved_out(fs, *inos.values())
    packs = objects()
    assert packs < len(contents) / 2
    for name, ino in inos.items():
        assert await read_file(fs, ino) == contents[name]
    for name in (b"25", b"26"):
        contents[name] = name * 5000
        await rewrite(fs, inos[name], contents[name])
        await drained(fs, inos[name])
        assert await read_file(fs, inos[name]) == contents[name]
    assert packs < objects() <= packs + 2


@pytest.mark.store(STRIPED | {"burst.stage_for_write": "16KiB"}, servers=ADDRESSES)
async def test_what_changes_in_a_file_becomes_new_objects(fs: Filesystem) -> None:
    """Also in one that is too large to be staged where servers can change objects."""
    data = bytearray(os.urandom(3 * MIB))
    ino = await write_file(fs, b"file", data)
    await moved_out(fs, ino)
    before = {key for bucket in BUCKETS.values() for key in bucket.objects}
    await overwrite(fs, ino, MIB, b"changed")
    data[MIB : MIB + 7] = b"changed"
    await moved_out(fs, ino)
    await fs.collector.drain()
    assert before.isdisjoint(key for bucket in BUCKETS.values() for key in bucket.objects)
    assert await read_file(fs, ino) == data
    await rewrite(fs, ino, b"short")
    await drained(fs, ino)
    assert await read_file(fs, ino) == b"short"


# --- a burst tier that is full ---

KIB = 1 << 10
TINY = STRIPED | modes.TINY | {"burst.passthrough": "false"}
"""Room for 256 KiB."""


async def opened_file(fs: Filesystem, name: bytes) -> tuple[int, int]:
    """Inode number, and a handle, of a new file."""
    (handle, *_), inode = await fs.create(ROOT_INO, name, 0o644, os.O_RDWR, ROOT)
    return inode.ino, handle


@pytest.mark.store(TINY, servers=ADDRESSES)
async def test_writers_wait_for_the_drain(fs: Filesystem) -> None:
    data = [os.urandom(60 * KIB + number) for number in range(20)]
    inos = [await write_file(fs, b"%d" % number, data[number]) for number in range(20)]
    for ino, content in zip(inos, data, strict=True):
        assert await read_file(fs, ino) == content
    await moved_out(fs, *inos)
    assert objects() >= 20


@pytest.mark.sweep
@pytest.mark.parametrize("delay", ["0s", "1h"])
async def test_who_changes_a_file_waits_for_room_for_it(directory: Path, delay: str) -> None:
    """Also where drains are to wait for long."""
    async with opened(directory, TINY | {"burst.drain_delay": delay}, servers=ADDRESSES) as fs:
        data = bytearray(os.urandom(100 * KIB))
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        for number in range(4):
            await write_file(fs, b"other%d" % number, bytes(60 * KIB))
            await overwrite(fs, ino, 5000 * number, b"changed")
            data[5000 * number : 5000 * number + 7] = b"changed"
            await moved_out(fs, ino)
        assert await read_file(fs, ino) == data
        await write_file(fs, b"last", bytes(200 * KIB))
        await fs.setattr(ino, SetAttr(size=50 * KIB), ROOT)
        assert await read_file(fs, ino) == data[: 50 * KIB]


@pytest.mark.store(TINY, servers=ADDRESSES)
async def test_without_a_prospect_of_room_there_is_an_error(fs: Filesystem) -> None:
    _, large = await opened_file(fs, b"large")
    for offset in range(0, 300 * KIB, 60 * KIB):
        await fs.write(large, offset, bytes(60 * KIB))
    await fs.tier.look()
    ino, small = await opened_file(fs, b"small")
    await fs.write(small, 0, b"inline")
    with pytest.raises(NoSpace, match="burst tier is full"):
        await fs.write(small, 0, bytes(60 * KIB))
    assert await read_file(fs, ino) == b"inline"
    await fs.release(large)
    await fs.write(small, 0, b"x" * 60 * KIB)
    assert await read_file(fs, ino) == b"x" * 60 * KIB
    await fs.release(small)


@pytest.mark.store(STRIPED, servers=ADDRESSES)
async def test_a_policy_cannot_keep_files_out_of_the_burst_tier(fs: Filesystem) -> None:
    await put(fs, ROOT_INO, "tier", "capacity", ROOT)
    ino = await write_file(fs, b"file", b"x" * 90000)
    await moved_out(fs, ino)
    assert await read_file(fs, ino) == b"x" * 90000


@pytest.mark.store(STRIPED, servers=[ADDRESSES[0], "data/1", ADDRESSES[1]])
async def test_what_changes_outside_of_it_goes_where_objects_can_change(fs: Filesystem) -> None:
    data = bytearray(os.urandom(3 * MIB))
    ino = await write_file(fs, b"file", data)
    await moved_out(fs, ino)
    assert {0, 1, 2} == set((await fs.getattr(ino)).layout.servers)
    await put(fs, ROOT_INO, "tier", "capacity", ROOT)
    await put(fs, ino, "tier", "capacity", ROOT)
    for _ in range(2):
        await overwrite(fs, ino, MIB, b"changed")
    data[MIB : MIB + 7] = b"changed"
    assert (await fs.getattr(ino)).layout.servers == (1,)
    assert await read_file(fs, ino) == data
    other = await write_file(fs, b"other", data)
    assert (await fs.getattr(other)).layout.servers == (1,)
    assert await read_file(fs, other) == data


@pytest.mark.sweep
@pytest.mark.parametrize("spoil", ["missing", "short", "wrong"])
@pytest.mark.parametrize(
    ("protected", "count"), [(modes.REPLICAS, 2), (modes.CODED, 3)], ids=["replicas", "coded"]
)
async def test_a_column_is_made_anew_where_it_was(
    directory: Path, protected: dict, count: int, spoil: str
) -> None:
    """There is no other server for it."""
    data = os.urandom(3 * MIB + 100)
    settings = STRIPED | protected | {"data.verify": "read"}
    async with opened(directory, settings, servers=ADDRESSES[:count]) as fs:
        ino = await write_file(fs, b"file", data)
        await moved_out(fs, ino)
        held = BUCKETS[ADDRESSES[(await fs.getattr(ino)).layout.servers[0]]].objects
        before = dict(held)
        (key,) = before
        if spoil == "missing":
            del held[key]
        else:
            held[key] = before[key][:-1] if spoil == "short" else b"wrong" + before[key][5:]
        assert await read_file(fs, ino) == data
        fs.rebuild.look()
        while not fs.rebuild.idle:
            await fs.rebuild.news()
        assert fs.rebuild.status()["moved_columns"] == 1
        assert held == before
        assert await read_file(fs, ino) == data


async def test_metadata_that_are_lost_come_back_from_there(directory: Path) -> None:
    async with opened(directory, STRIPED, servers=ADDRESSES) as fs:
        ino = await write_file(fs, b"file", b"x" * 50000)
        await moved_out(fs, ino)
        await fs.backup.ship()
    config = modes.config_of(directory)
    shutil.rmtree(config.meta.directory)
    await trio.to_thread.run_sync(restore, config, "", None)
    async with served(config) as fs:
        assert await read_file(fs, ino) == b"x" * 50000
    await require_sound(config)


async def test_without_a_burst_directory_they_are_refused(directory: Path) -> None:
    with pytest.raises(StoreError, match="memory://bucket0: objects there are written once"):
        async with opened(directory, STRIPED | modes.OFF, servers=ADDRESSES):
            pass


async def test_a_kind_that_nobody_knows_is_refused(directory: Path) -> None:
    with pytest.raises(StoreError, match="hdfs://name: there are no data servers of kind 'hdfs'"):
        async with opened(directory, STRIPED, servers=["hdfs://name"]):
            pass
