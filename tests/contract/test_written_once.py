"""A filesystem whose data servers can do the least that a storage must: objects are written once,
and neither change nor grow (tests/support/memory_storage.py). So it will be on object stores.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from aifs.core.errors import NotSupported, StoreError
from aifs.data import storages
from aifs.layout.redundancy import Redundancy
from aifs.store.restore import restore
from tests.support import modes
from tests.support.memory_storage import BUCKETS, MemoryStorage
from tests.support.stores import (
    drained,
    moved_out,
    opened,
    overwrite,
    read_file,
    require_sound,
    rewrite,
    served,
    write_file,
)

MIB = 1 << 20
ADDRESSES = [f"memory://bucket{number}" for number in range(4)]
STRIPED = {**modes.WAITING, "layout.kind": "striped", "meta.backup_interval": "1h"}


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(storages.KINDS, "memory", MemoryStorage)
    yield
    BUCKETS.clear()


def objects() -> int:
    return sum(len(bucket.objects) for bucket in BUCKETS.values())


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


async def test_small_files_get_objects_of_their_own(directory: Path) -> None:
    """Elsewhere they would share containers, which grow."""
    settings = STRIPED | {"layout.kind": "interleaved"}
    async with opened(directory, settings, servers=ADDRESSES) as fs:
        inos = [await write_file(fs, b"%d" % n, bytes([n]) * 9000) for n in range(5)]
        await moved_out(fs, *inos)
        assert objects() == 5
        for number, ino in enumerate(inos):
            assert await read_file(fs, ino) == bytes([number]) * 9000
        with pytest.raises(NotSupported, match="objects there do not grow"):
            fs.containers.slots(Redundancy())


async def test_what_changes_in_a_file_becomes_new_objects(directory: Path) -> None:
    """Also in one that is too large to be staged where servers can change objects."""
    data = bytearray(os.urandom(3 * MIB))
    settings = STRIPED | {"burst.stage_for_write": "16KiB"}
    async with opened(directory, settings, servers=ADDRESSES) as fs:
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


@pytest.mark.parametrize("spoil", ["missing", "short", "wrong"])
@pytest.mark.parametrize(
    ("protected", "count"),
    [(modes.REPLICAS, 2), (modes.CODED, 3)],
    ids=["replicas", "coded"],
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
    with pytest.raises(StoreError, match="s3://bucket: there are no data servers of kind 's3'"):
        async with opened(directory, STRIPED, servers=["s3://bucket"]):
            pass
