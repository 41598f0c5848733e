"""What renames wait for, counted: syncs of copies, of directories and of the journal."""

import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from aifs.core.errors import Unavailable
from aifs.files.kernel import Kernel
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import keys
from aifs.meta.kv import Transaction
from aifs.meta.namespace import RENAME_EXCHANGE
from aifs.meta.records import APPEND_ONLY, Inode
from aifs.vfs import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import hooked
from tests.support.stores import is_marked

ROOT, SIZE, MANY = 1, 20_000, 40


LONG = {"meta.commit_interval": "1h"}
"""The journal is synced for those who wait for it alone."""

durable = pytest.mark.store({"meta.renames": "durable"})


@asynccontextmanager
async def opened(directory: Path, settings: Mapping[str, str]) -> AsyncIterator[Filesystem]:
    with hooked():  # from the beginning, so that the paths of all descriptors are known
        async with stores.opened(directory, settings, base=modes.WAITING | LONG) as fs:
            yield fs


@pytest.fixture
async def fs(directory: Path, request: pytest.FixtureRequest) -> AsyncIterator[Filesystem]:
    marks = [mark.args[0] for mark in request.node.iter_markers("store")]
    async with opened(directory, *marks or [{}]) as fs:
        yield fs


async def make(fs: Filesystem, name: bytes, parent: int = ROOT, size: int = SIZE) -> int:
    """A closed file that nobody has synced."""
    return await stores.write_file(fs, name, b"x" * size, parent)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often what is synced inside: copies, directories, the journal."""
    syncs: Counter[str] = Counter()

    def note(op: str, path: str) -> None:
        if op == "sync_dir":
            syncs["directory"] += 1
        elif op in ("sync_file", "sync_filesystem"):
            syncs["journal" if "journal." in os.path.basename(path) else "copy"] += 1

    with hooked(note):
        yield syncs


async def test_a_file_that_was_just_written_waits_for_its_copy(fs: Filesystem) -> None:
    await make(fs, b"earlier")
    await fs.sync()
    ino = await make(fs, b"new")
    before = fs.store.engine.seq
    with counted() as syncs:
        await fs.rename(ROOT, b"new", ROOT, b"final")
    assert syncs["copy"] == 1 and syncs["journal"] == 0
    assert syncs["directory"] <= 1
    assert fs.store.engine.seq == before + 1  # one transaction: the name and the mark
    assert not await is_marked(fs, ino) and ino not in fs.io.table.unsynced


@pytest.mark.sweep
@pytest.mark.parametrize("size", [0, 100, SIZE])
async def test_a_file_that_is_in_order_waits_for_nothing(fs: Filesystem, size: int) -> None:
    await make(fs, b"file", size=size)
    await fs.sync()
    with counted() as syncs:
        await fs.rename(ROOT, b"file", ROOT, b"final")
    assert not syncs


@durable
@pytest.mark.sweep
@pytest.mark.parametrize("size", [0, 100, SIZE])
async def test_a_durable_rename_waits_for_the_journal(fs: Filesystem, size: int) -> None:
    await make(fs, b"file", size=size)
    await fs.sync()
    with counted() as syncs:
        await fs.rename(ROOT, b"file", ROOT, b"final")
    assert syncs == {"journal": 1}


async def test_an_exchange_waits_for_the_journal(fs: Filesystem) -> None:
    """One of the two may be a directory."""
    await make(fs, b"file")
    await fs.mkdir(ROOT, b"directory", 0o755, ROOT_USER)
    await fs.sync()
    with counted() as syncs:
        await fs.rename(ROOT, b"file", ROOT, b"directory", RENAME_EXCHANGE)
    assert syncs == {"journal": 1}


async def test_names_of_copies_are_synced_once_for_many(fs: Filesystem) -> None:
    for number in range(MANY):
        await make(fs, b"%d" % number)
    with counted() as syncs:
        for number in range(MANY):
            await fs.rename(ROOT, b"%d" % number, ROOT, b"final%d" % number)
    assert syncs["copy"] == MANY and syncs["journal"] == 0
    assert syncs["directory"] < 10


async def test_all_below_a_directory_is_synced_together(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"new", 0o755, ROOT_USER)).ino
    inos = [await make(fs, b"%d" % number, top) for number in range(MANY)]
    before = fs.store.engine.seq
    with counted() as syncs:
        await fs.rename(ROOT, b"new", ROOT, b"final")
    assert syncs["copy"] == MANY and syncs["journal"] == 1
    assert fs.store.engine.seq == before + 1
    assert not fs.io.table.unsynced
    for ino in inos:
        assert not await is_marked(fs, ino)


@durable
async def test_renames_that_arrive_during_a_barrier_share_the_next_one(fs: Filesystem) -> None:
    for number in range(MANY):
        await make(fs, b"%d" % number, size=0)
    await fs.sync()
    first, go_on, syncs = threading.Event(), threading.Event(), []

    def wait(op: str, path: str) -> None:
        if op == "sync_file":
            syncs.append(path)
            first.set()
            go_on.wait(stores.LIMIT_S)

    async def rename(number: int) -> None:
        await fs.rename(ROOT, b"%d" % number, ROOT, b"final%d" % number)

    def all_renamed(tx: Transaction) -> bool:
        return all(tx.get(keys.dentry(ROOT, b"final%d" % number)) for number in range(1, MANY))

    with hooked(wait):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(rename, 0)
            await trio.to_thread.run_sync(first.wait)
            for number in range(1, MANY):
                nursery.start_soon(rename, number)
            while not await fs.store.engine.view(all_renamed):
                await trio.lowlevel.checkpoint()
            go_on.set()
    assert len(syncs) == 2


async def test_who_opens_a_file_while_it_is_synced_keeps_its_mark(fs: Filesystem) -> None:
    ino = await make(fs, b"file")
    syncing, go_on = threading.Event(), threading.Event()

    def wait(op: str, path: str) -> None:
        if op == "sync_file" and "journal." not in path:
            syncing.set()
            go_on.wait(stores.LIMIT_S)

    with hooked(wait):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fs.rename, ROOT, b"file", ROOT, b"final")
            await trio.to_thread.run_sync(syncing.wait)
            handle, *_ = await fs.open(ino, os.O_RDWR)
            await fs.write(handle, 0, b"y" * SIZE)
            go_on.set()
    assert await is_marked(fs, ino)
    await fs.release(handle)
    assert ino in fs.io.table.unsynced
    assert await stores.read_file(fs, ino) == b"y" * SIZE


async def test_a_sync_that_fails_fails_the_rename(fs: Filesystem) -> None:
    ino = await make(fs, b"file")

    def fail(op: str, path: str) -> None:
        if op == "sync_file" and "journal." not in path:
            raise OSError(5, "no")

    with hooked(fail), pytest.raises(Unavailable):
        await fs.rename(ROOT, b"file", ROOT, b"final")
    assert await is_marked(fs, ino)
    assert (await fs.lookup(ROOT, b"file")).ino == ino
    # The kernel takes what it could not write for written: another sync would prove nothing.
    with pytest.raises(Unavailable, match="lost"):
        await fs.rename(ROOT, b"file", ROOT, b"final")
    handle = (await fs.open(ino, os.O_RDWR)).handle
    with pytest.raises(Unavailable, match="lost"):
        await fs.fsync(handle)
    await fs.release(handle)
    await fs.rename(ROOT, b"file", ROOT, b"final")  # a program has been told
    assert await is_marked(fs, ino)


async def test_a_file_whose_copy_cannot_be_opened_is_shown_as_it_is_known(fs: Filesystem) -> None:
    """It takes no other names of the directory with it, also if it may be mapped."""

    def fail(op: str, path: str) -> None:
        if op in ("sync_file", "open_file") and "journal." not in path:
            raise OSError(5, "no")

    ino = await make(fs, b"file")
    with hooked(fail):
        with pytest.raises(Unavailable):
            await fs.rename(ROOT, b"file", ROOT, b"final")
        for mapped in (set(), {ino}):
            fs.io.table.mapped |= mapped
            assert (await fs.getattr(ino)).size == SIZE
            assert [name for name, *_ in await fs.readdir(ROOT, 0)] == [b"file"]


async def test_a_name_that_is_made_while_a_directory_is_listed_is_not_behind_its_end(
    fs, monkeypatch
):
    """Who is told that a listing has ended is not asked for what is behind it."""
    ino = await make(fs, b"file")
    fs.io.table.mapped.add(ino)
    look = fs.io.inodes.look

    async def look_slowly(ino: int) -> Inode:
        await make(fs, b"new")
        return await look(ino)

    monkeypatch.setattr(fs.io.inodes, "look", look_slowly)
    listing = await fs.readdir(ROOT, 0)
    assert len(listing) == 1 and not listing.is_last


async def test_the_kernel_keeps_no_page_of_what_could_be_written_but_not_synced(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would show zeros there, where the file ended before."""
    dropped: list[int] = []

    async def drop_pages(_: Kernel, inodes: list[int]) -> None:
        dropped.extend(inodes)

    def fail(op: str, path: str) -> None:
        if op == "sync_file" and "journal." not in path:
            raise OSError(5, "no")

    monkeypatch.setattr(Kernel, "drop_pages", drop_pages)
    async with opened(directory, {}) as fs:
        ino = await make(fs, b"file")
        reader = (await fs.open(ino, os.O_RDONLY)).handle
        await fs.set_flags(ino, APPEND_ONLY, 0)
        writer = (await fs.open(ino, os.O_WRONLY | os.O_APPEND | os.O_SYNC)).handle
        with hooked(fail), pytest.raises(Unavailable):
            await fs.write(writer, SIZE, b"more", appends=True)
        assert dropped == [ino]
        await fs.release(writer)
        await fs.release(reader)
