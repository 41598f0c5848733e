"""Files that are one object of a local server, passed through to it for reading: who else may do
what meanwhile.
"""

import errno
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from aifs.core import mountinfo
from aifs.files.types import SetAttr
from aifs.vfs import Caller
from tests.support import modes
from tests.support.data_servers import hooked
from tests.support.kernel import Kernel, all_of
from tests.support.stores import opened

ROOT, ME = 1, Caller()
CONTENT = bytes(range(1, 251)) * 100
WHOLE = {"layout.unit": "4KiB", "layout.count": "1"}


@asynccontextmanager
async def mounted(directory: Path, settings: dict[str, str] = WHOLE) -> AsyncIterator[Kernel]:
    async with opened(directory, settings, base=modes.WAITING) as fs, Kernel(fs) as kernel:
        yield kernel


@pytest.fixture
async def kernel(directory: Path) -> AsyncIterator[Kernel]:
    async with mounted(directory) as kernel:
        yield kernel


async def make(kernel: Kernel, name: bytes = b"f", content: bytes = CONTENT) -> int:
    """A file that lies on the capacity tier alone."""
    handle, inode = await kernel.create(ROOT, name, 0o644, os.O_RDWR, ME)
    await kernel.write(handle, 0, content)
    await kernel.release(handle)
    kernel.drain.request([inode.ino])
    await kernel.drain.wait([inode.ino])
    while not await kernel.evictor.evict(inode.ino):  # the drain closes it after it has told
        await trio.sleep(0.001)
    kernel.direct_bytes = 0
    return inode.ino


def is_on_object(kernel: Kernel, ino: int) -> bool:
    file = kernel.io.table.open[ino]
    return file.backing > 0 and file.on_object


async def test_a_reader_is_passed_through_and_sees_at_once_what_a_writer_does_in_place(kernel):
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert is_on_object(kernel, ino) and await all_of(kernel, reader) == CONTENT
    assert kernel.direct_bytes == len(CONTENT)
    writer = await kernel.open(ino, os.O_RDWR)
    other = await kernel.open(ino, os.O_RDONLY)
    assert kernel.io.table.open[ino].inode.copy is None and kernel.io.table.open[ino].marked
    await kernel.write(writer, len(CONTENT), b"appended")
    await kernel.write(writer, 3, b"over")
    expected = CONTENT[:3] + b"over" + CONTENT[7:] + b"appended"
    for handle in (reader, writer, other):
        assert await all_of(kernel, handle) == expected
    assert (await kernel.getattr(ino)).size == len(expected)
    await kernel.fsync(writer)
    assert kernel.io.table.open[ino].marked  # a mapping may change it without our knowing
    await kernel.release(writer)
    await kernel.fsync(reader)
    assert kernel.io.table.open[ino].marked  # for a mapping outlives its handle
    await kernel.setattr(ino, SetAttr(size=5), ME)
    assert await all_of(kernel, reader) == expected[:5]
    await kernel.setattr(ino, SetAttr(size=9), ME)
    assert await all_of(kernel, reader) == expected[:5] + bytes(4)
    await kernel.release(reader)
    await kernel.release(other)
    assert ino not in kernel.io.table.open


@pytest.mark.parametrize("way", ["O_TRUNC", "truncate"])
async def test_a_file_that_is_emptied_keeps_its_object_as_long_as_it_is_read(kernel, way):
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    if way == "O_TRUNC":
        writer = await kernel.open(ino, os.O_WRONLY | os.O_TRUNC)
    else:
        await kernel.setattr(ino, SetAttr(size=0), ME)
        writer = await kernel.open(ino, os.O_WRONLY)
    assert await all_of(kernel, reader) == b""
    await kernel.fsync(writer)
    await kernel.release(writer)
    await kernel.fsync(reader)
    writer = await kernel.open(ino, os.O_WRONLY)
    await kernel.write(writer, 2, b"new")
    assert await all_of(kernel, reader) == b"\0\0new"
    await kernel.setattr(ino, SetAttr(size=0), ME)
    await kernel.release(reader)
    await kernel.release(writer)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert not is_on_object(kernel, ino) and await all_of(kernel, reader) == b""
    await kernel.release(reader)


async def test_a_dirty_or_striped_file_is_not_passed_through_nor_one_that_is_written_first(
    directory: Path,
) -> None:
    async with mounted(directory, WHOLE | {"burst.stage_for_write": "0"}) as kernel:
        ino = await make(kernel)
        writer = await kernel.open(ino, os.O_RDWR)
        reader = await kernel.open(ino, os.O_RDONLY)
        await kernel.write(writer, 0, b"new")
        await kernel.release(writer)
        await kernel.release(reader)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert await all_of(kernel, reader) == b"new" + CONTENT[3:]
        assert kernel.direct_bytes == 0
        await kernel.fsync(reader)
        await kernel.release(reader)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert is_on_object(kernel, ino)
        await kernel.release(reader)
        await kernel.setxattr(ROOT, b"user.aifs.layout", b"count=2", caller=ME)
        wide = await make(kernel, b"wide")
        reader = await kernel.open(wide, os.O_RDONLY)
        assert not is_on_object(kernel, wide) and await all_of(kernel, reader) == CONTENT
        await kernel.release(reader)


async def test_an_object_that_is_not_what_the_record_says_is_read_by_the_daemon(kernel, directory):
    ino = await make(kernel)
    [path] = (directory / "data").glob("*/objects/*/*/*")
    content = path.read_bytes()
    os.truncate(path, 100)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert not is_on_object(kernel, ino)
    await kernel.release(reader)
    path.write_bytes(content)


async def test_files_up_to_a_size_are_one_object_and_larger_ones_are_striped(
    directory: Path,
) -> None:
    size = 20 << 10
    async with mounted(
        directory, {"layout.unit": "4KiB", "layout.stripe_above": "20KiB"}
    ) as kernel:
        small = await make(kernel, b"small", CONTENT[:size])
        large = await make(kernel, b"large", CONTENT[: size + 1])
        directory_ino = (await kernel.mkdir(ROOT, b"d", 0o755, ME)).ino
        await kernel.setxattr(directory_ino, b"user.aifs.tier", b"capacity", caller=ME)
        handle, growing = await kernel.create(directory_ino, b"f", 0o644, os.O_RDWR, ME)
        await kernel.write(handle, 0, CONTENT[:size])
        await kernel.release(handle)
        await kernel.setxattr(ROOT, b"user.aifs.layout", b"count=2", caller=ME)
        asked = await make(kernel, b"asked", CONTENT[:size])
        await kernel.setxattr(ROOT, b"user.aifs.layout", b"replicas=2", caller=ME)
        mirrored = await make(kernel, b"mirrored", CONTENT[:size])
        columns = {}
        for ino in (small, large, asked, mirrored, growing.ino):
            objects = (await kernel.getattr(ino)).objects
            assert objects is not None
            columns[ino] = len(objects.servers)
        assert list(columns.values()) == [1, 4, 2, 4, 4]


async def test_small_files_are_striped_too_over_a_network(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountinfo, "is_local", lambda path: False)
    async with mounted(directory, {"layout.unit": "4KiB"}) as kernel:
        objects = (await kernel.getattr(await make(kernel))).objects
        assert objects is not None and len(objects.servers) == 4


async def test_a_file_whose_object_programs_use_is_not_staged(kernel: Kernel) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert is_on_object(kernel, ino) and not await kernel.stager.stage(ino)
    mapped = os.open(kernel.backed[0], os.O_RDONLY)
    await kernel.release(reader)
    assert not await kernel.stager.stage(ino)
    os.close(mapped)
    assert await kernel.stager.stage(ino)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert kernel.io.table.open[ino].backing and not is_on_object(kernel, ino)
    await kernel.release(reader)


@pytest.mark.parametrize("change", ["open", "truncate", "empty"])
async def test_what_is_mapped_and_closed_sees_changes(kernel: Kernel, change: str) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    mapped = os.open(kernel.backed[0], os.O_RDONLY)
    await kernel.release(reader)
    if change != "open":
        await kernel.setattr(ino, SetAttr(size=10 if change == "truncate" else 0), ME)
    before = os.pread(mapped, len(CONTENT), 0)
    assert before == {"open": CONTENT, "truncate": CONTENT[:10], "empty": b""}[change]
    writer = await kernel.open(ino, os.O_RDWR)
    await kernel.write(writer, 0, b"new")
    if change != "empty":
        assert os.pread(mapped, len(CONTENT), 0) == b"new" + before[3:]
    os.close(mapped)
    await kernel.fsync(writer)
    assert await all_of(kernel, writer) == b"new" + before[3:]
    await kernel.release(writer)
    reader = await kernel.open(ino, os.O_RDONLY)
    assert await all_of(kernel, reader) == b"new" + before[3:]
    await kernel.release(reader)


async def test_readers_that_come_together_are_all_passed_through(kernel: Kernel) -> None:
    with hooked():  # nothing runs on the trio thread that might block
        ino = await make(kernel)
        handles: list[int] = []

        async def read() -> None:
            handles.append(await kernel.open(ino, os.O_RDONLY))

        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(read)
        assert is_on_object(kernel, ino) and kernel.io.table.open[ino].users == 5
        for handle in handles:
            await kernel.release(handle)


async def test_a_writer_that_comes_before_the_reader_has_been_passed_through(kernel):
    with hooked():
        ino = await make(kernel)
        handles: list[int] = []

        async def open_as(flags: int) -> None:
            handles.append(await kernel.open(ino, flags))

        async with trio.open_nursery() as nursery:
            for flags in (os.O_RDONLY, os.O_RDWR | os.O_TRUNC, os.O_RDONLY, os.O_RDWR):
                nursery.start_soon(open_as, flags)
        for handle in handles:
            assert await all_of(kernel, handle) == b""
        for handle in handles:
            await kernel.release(handle)


async def test_a_server_that_the_kernel_refuses_is_not_tried_again(
    directory: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def refuse(fd: int) -> int:
        asked.append(fd)
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))

    async with mounted(directory) as kernel:
        ino = await make(kernel)
        with monkeypatch.context() as patch:
            patch.setattr(kernel, "attach", refuse)
            for _ in range(2):
                reader = await kernel.open(ino, os.O_RDONLY)
                assert await all_of(kernel, reader) == CONTENT
                await kernel.release(reader)
        assert len(asked) == 1 and kernel.direct_bytes == 0
        handle, inode = await kernel.create(ROOT, b"burst", 0o644, os.O_RDWR, ME)
        assert kernel.io.table.open[inode.ino].backing
        await kernel.release(handle)
    [warning] = [
        record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING
    ]
    assert "data server" in warning


async def test_nothing_is_passed_through_to_a_server_of_the_network(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mountinfo, "is_local", lambda path: False)
    async with mounted(directory) as kernel:
        ino = await make(kernel)
        reader = await kernel.open(ino, os.O_RDONLY)
        assert not kernel.io.table.open[ino].backing and await all_of(kernel, reader) == CONTENT
        await kernel.release(reader)


async def test_a_deleted_file_is_read_to_the_end(kernel: Kernel, directory: Path) -> None:
    ino = await make(kernel)
    reader = await kernel.open(ino, os.O_RDONLY)
    await kernel.unlink(ROOT, b"f")
    kernel.forget([ino])
    await kernel.collector.drain()
    assert await all_of(kernel, reader) == CONTENT
    await kernel.release(reader)
    await kernel.collector.drain()
    assert not list((directory / "data").glob("*/objects/*/*/*"))
