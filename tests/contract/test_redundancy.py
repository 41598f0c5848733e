"""Files of directories that ask for redundancy, on the filesystem in process: how they come to be,
are read, changed, and told of; what happens while servers fail or are too few."""

import errno
import json
from functools import partial
from pathlib import Path

import pytest
import trio

from aifs.core.errors import Busy, Invalid
from aifs.layout.striped import Striped
from aifs.meta.degraded import find_unread, is_marked
from aifs.meta.records import Inode
from aifs.vfs import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.stores import OWNER, overwrite, put, read_file
from tests.support.stores import fs as fs

ROOT = 1
SHAPE = modes.WAITING | {
    "layout.unit": "4KiB",
    "layout.inline_limit": "0",
}
DATA = bytes(range(256)) * 300


opened = partial(stores.opened, base=SHAPE)
pytestmark = pytest.mark.store(base=SHAPE)


async def evicted(fs: Filesystem, ino: int) -> None:
    """Its burst copy goes as soon as no rebuild has the file open."""
    while True:
        try:
            return await put(fs, ino, "evict")
        except Busy as error:
            if "have it open" not in str(error):
                raise
            await trio.sleep(0.01)


async def tree(fs: Filesystem, name: bytes, layout: str) -> int:
    ino = (await fs.mkdir(ROOT, name, 0o755, OWNER)).ino
    await put(fs, ino, "layout", layout)
    return ino


async def make(fs: Filesystem, parent: int, name: bytes = b"file", data: bytes = DATA) -> int:
    return await stores.write_file(fs, name, data, parent, OWNER)


async def drained(fs: Filesystem, ino: int) -> Inode:
    await stores.drained(fs, ino)
    return await fs.getattr(ino)


LAYOUTS = {
    "replicas=2": (4, 2, 0),
    "replicas=2,count=1": (2, 2, 0),
    "ec=2+1": (3, 1, 1),
    "ec=2+2": (4, 1, 2),
}


@pytest.mark.sweep
@pytest.mark.parametrize(("text", "expected"), LAYOUTS.items())
async def test_a_policy_is_what_drained_files_get(
    directory: Path, text: str, expected: tuple
) -> None:
    async with opened(directory) as fs:
        ino = await make(fs, await tree(fs, b"d", text))
        layout = (await drained(fs, ino)).layout
        assert isinstance(layout, Striped)
        assert (len(layout.servers), layout.replicas, layout.parity) == expected
        await evicted(fs, ino)
        assert await read_file(fs, ino) == DATA
        told = (await fs.getxattr(ino, b"user.aifs.layout")).decode()
        assert ("ec=" in told) == ("ec=" in text) and ("replicas=" in told) == ("replicas=" in text)
        assert (
            json.loads(await fs.getxattr(ino, b"user.aifs.info"))["layout"]["parity"]
            == layout.parity
        )
    async with opened(directory) as fs:
        assert await read_file(fs, ino) == DATA


@pytest.mark.store({"layout.ec": "2+1"})
async def test_the_configuration_asks_for_all(fs: Filesystem) -> None:
    assert (await drained(fs, await make(fs, ROOT))).layout.parity == 1
    plain = await make(fs, await tree(fs, b"plain", "ec=none"))
    assert not (await drained(fs, plain)).layout.is_protected


async def test_too_few_servers_are_refused(fs: Filesystem) -> None:
    for text in ("ec=4+2", "replicas=5"):
        with pytest.raises(Invalid, match="data servers are needed; the store has 4"):
            await tree(fs, text.encode(), text)


@pytest.mark.engines
@pytest.mark.parametrize("text", ["replicas=2", "ec=2+2"])
async def test_a_column_that_fails_in_the_drain_is_on_record_and_not_read(fs, text):
    ino = await make(fs, await tree(fs, b"d", text))
    broken = fs.store.servers[1]
    with failing("write_at", f"{broken.address}/", errno.ENOSPC):
        inode = await drained(fs, ino)
        column = inode.layout.servers.index(1)
        mask = await fs.store.engine.view(find_unread, inode.oid)
    assert mask in (0, 1 << column), "0: the rebuild has been faster"
    await evicted(fs, ino)
    assert await read_file(fs, ino) == DATA
    await wait_whole(fs, inode.oid)


async def wait_whole(fs: Filesystem, oid: int) -> None:
    """The rebuild has nothing left to do for these objects."""
    while await fs.store.engine.view(is_marked, oid):
        await trio.sleep(0.01)


@pytest.mark.sweep
@pytest.mark.store({"burst.stage_for_write": "4KiB"})
@pytest.mark.parametrize("text", ["replicas=2", "ec=2+1"])
async def test_a_protected_file_is_changed_in_the_burst_tier_whatever_its_size(fs, text):
    ino = await make(fs, await tree(fs, b"d", text))
    await drained(fs, ino)
    await evicted(fs, ino)
    await overwrite(fs, ino, 70_000, b"new")
    assert (await fs.getattr(ino)).in_burst
    assert (await drained(fs, ino)).layout.is_protected
    await evicted(fs, ino)
    assert await read_file(fs, ino) == DATA[:70_000] + b"new" + DATA[70_003:]


@pytest.mark.sweep
@pytest.mark.parametrize("text", ["replicas=2", "ec=2+1"])
async def test_without_room_there_it_is_restriped_and_protected_again(fs, text):
    parent = await tree(fs, b"d", text)
    ino = await make(fs, parent)
    before = await drained(fs, ino)
    old = before.layout
    await evicted(fs, ino)
    await fs.setxattr(ino, b"user.aifs.tier", b"capacity", caller=OWNER)
    await overwrite(fs, ino, 100, b"new")
    expected = DATA[:100] + b"new" + DATA[103:]
    assert await read_file(fs, ino) == expected
    while not (inode := await fs.getattr(ino)).layout.is_protected:
        await fs.sync()
        await trio.sleep(0.01)
    assert inode.layout.tolerates == old.tolerates and inode.oid != before.oid
    assert await read_file(fs, ino) == expected


async def test_truncation_of_protected_files(fs: Filesystem) -> None:
    ino = await make(fs, await tree(fs, b"d", "ec=2+1"))
    for size in (50_000, 60_000, 0):
        await drained(fs, ino)
        await fs.io.truncate(file := await fs.io.inodes.acquire(ino), size)
        await fs.io.inodes.release(file)
        data = DATA[: min(size, 50_000)].ljust(size, b"\0")
        assert await read_file(fs, ino) == data
        if size:
            await drained(fs, ino)
            await evicted(fs, ino)
            assert await read_file(fs, ino) == data


async def test_a_file_is_read_while_a_server_is_gone(fs: Filesystem) -> None:
    ino = await make(fs, await tree(fs, b"d", "ec=2+1"))
    await drained(fs, ino)
    await evicted(fs, ino)

    def gone(op: str, path: str) -> None:
        if path.startswith(f"{fs.store.servers[2].address}/"):
            raise OSError(errno.ESTALE, "")

    with hooked(gone):
        assert await read_file(fs, ino) == DATA
