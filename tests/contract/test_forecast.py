"""New files that are likely to be tiny get no burst copy: who is one, and what if it is not."""

import os

from aifs.files.forecast import Forecast, kin_of
from aifs.vfs import Filesystem
from tests.support.stores import OWNER, drained, read_file, write_file
from tests.support.stores import fs as fs

ROOT = 1


async def begin(fs: Filesystem, name: bytes) -> tuple[int, int]:
    """Handle and inode number of a new file."""
    (handle, *_), inode = await fs.create(ROOT, name, 0o644, os.O_RDWR, OWNER)
    return handle, inode.ino


async def gets_copy(fs: Filesystem, name: bytes) -> bool:
    """Whether a new file of this name has a burst copy."""
    handle, ino = await begin(fs, name)
    try:
        return has_copy(fs, ino)
    finally:
        await fs.release(handle)


async def some_tiny(fs: Filesystem, ending: bytes = b".json", count: int = 8) -> None:
    for number in range(count):
        await write_file(fs, b"%d" % number + ending, b"tiny")


def has_copy(fs: Filesystem, ino: int) -> bool:
    return fs.io.table.open[ino].copy is not None


async def test_after_some_tiny_ones_the_next_of_their_kind_gets_no_copy(fs: Filesystem) -> None:
    await some_tiny(fs, count=7)
    assert await gets_copy(fs, b"eighth.json"), "it is too soon to tell"
    handle, ino = await begin(fs, b"next.json")
    assert not has_copy(fs, ino)
    for offset in (0, 600, 1200):
        await fs.write(handle, offset, bytes([offset % 251]) * 600)
    assert not has_copy(fs, ino)
    await fs.fsync(handle)
    await fs.release(handle)
    inode = await fs.getattr(ino)
    assert (inode.size, inode.copy, inode.layout) == (1800, None, None)
    assert await gets_copy(fs, b"another.json"), "three writes cost more than a copy"
    assert await gets_copy(fs, b"weights.safetensors"), "another ending"


async def test_one_that_grows_all_the_same_gets_a_copy_then(fs: Filesystem) -> None:
    await some_tiny(fs)
    handle, ino = await begin(fs, b"large.json")
    data = os.urandom(100_000)
    for offset in range(0, len(data), 1000):
        await fs.write(handle, offset, data[offset : offset + 1000])
    assert has_copy(fs, ino)
    await fs.release(handle)
    assert await read_file(fs, ino) == data
    await drained(fs, ino)
    assert await read_file(fs, ino) == data
    assert await gets_copy(fs, b"next.json"), "it was wrong"


async def test_a_size_that_is_expected_counts_more(fs: Filesystem) -> None:
    await some_tiny(fs)
    await fs.setxattr(ROOT, b"user.aifs.expected_size", b"1GiB", 0)
    assert await gets_copy(fs, b"next.json")


def test_one_that_is_not_tiny_outweighs_many_that_are() -> None:
    forecast, kin = Forecast(2048), kin_of(1, b"a.py")
    for _ in range(1000):
        forecast.closed(kin, 0, 1)
    for _ in range(4):
        assert forecast.is_tiny(kin, 0)
        forecast.closed(kin, 2049, 1)
    assert not forecast.is_tiny(kin, 0)
    for _ in range(7):
        forecast.closed(kin, 2048, 1)
    assert not forecast.is_tiny(kin, 0)
    forecast.closed(kin, 2048, 1)
    assert forecast.is_tiny(kin, 2048) and not forecast.is_tiny(kin, 2049)
    assert not forecast.is_tiny(kin_of(2, b"a.py"), 0)
