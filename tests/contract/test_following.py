"""What another host changes reaches all that this one keeps in core, and the kernel; and what this
one changes waits until others show it. The test is the other host, and the kernel."""

import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import trio
import trio.testing

from aifs.core.errors import Exists, NotFound, Stale
from aifs.files.kernel import Kernel as KernelCache
from aifs.files.types import ROOT, Caller
from aifs.layout.hint import Policy
from aifs.meta import keys, namespace, servers
from aifs.meta.askers import Asker
from aifs.meta.dooming import Doomed
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.meta.publishing import Kept, Publication
from aifs.meta.records import IMMUTABLE
from aifs.peers.peers import Alone
from aifs.store import store
from aifs.upkeep.scrub_state import KEY as SCRUB
from aifs.vfs import Filesystem, SetAttr, open_files, open_filesystem
from aifs.vfs.following import AT_ONCE
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.other_host import OtherHost, SharedEngine
from tests.support.stores import LIMIT_S, moved_out, read_file, require_sound, write_file

SHAPE = modes.WAITING | modes.INTERLEAVED | {"layout.inline_limit": "64"}
TEXT, OTHER = b"0123456789" * 100, b"abcdef" * 300


class Forgetting(KernelCache):
    """The kernel's caches: what it was told to forget. ``gate``: it waits for that. ``read``: so
    does whoever drops pages of files."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[tuple[int, bytes]] = []
        self.inodes: list[int] = []
        self.pages: list[int] = []
        self.calls = 0
        self.gate: trio.Event | None = None
        self.read: trio.Event | None = None

    async def forget(
        self, names: Mapping[tuple[int, bytes], int], inodes: Sequence[int], pages: Sequence[int]
    ) -> Collection[int]:
        self.calls += 1
        if self.gate is not None:
            await self.gate.wait()
        self.names += names
        self.inodes += inodes
        self.pages += pages
        return inodes

    async def drop_pages(self, inodes: Sequence[int]) -> None:
        if self.read is not None:
            await self.read.wait()
        self.pages += inodes

    def clear(self) -> None:
        self.names, self.inodes, self.pages = [], [], []


class Hosts(NamedTuple):
    """This host, its kernel's caches, and the other host."""

    fs: Filesystem
    cache: Forgetting
    other: OtherHost


@asynccontextmanager
async def hosts(
    directory: Path, settings: Mapping[str, object] = MappingProxyType({})
) -> AsyncIterator[Hosts]:
    await trio.to_thread.run_sync(modes.make_store, directory, {**SHAPE, **settings})
    config, cache = modes.config_of(directory), Forgetting()
    with trio.fail_after(LIMIT_S):
        async with open_filesystem(config, kernel=cache) as fs:
            yield Hosts(fs, cache, OtherHost(fs))
            await fs.collector.drain()
    await require_sound(config)


@pytest.fixture
async def both(directory: Path) -> AsyncIterator[Hosts]:
    async with hosts(directory) as both:
        yield both


@pytest.fixture
def fs(both: Hosts) -> Filesystem:
    return both.fs


@pytest.fixture
def cache(both: Hosts) -> Forgetting:
    return both.cache


@pytest.fixture
def other(both: Hosts) -> OtherHost:
    return both.other


@pytest.fixture(autouse=True)
def shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "LmdbEngine", SharedEngine)
    monkeypatch.setattr(Alone, "is_shared", True)
    monkeypatch.setattr(open_files, "NEW_S", float("inf"))  # however slow the machine is


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


# --- what is open here ---


async def test_an_open_file_has_the_attributes_that_another_host_gives_it(fs, cache, other):
    ino = await write_file(fs, b"file", TEXT)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    cache.clear()
    await other.change(ino, mode=stat.S_IFREG | 0o640, uid=7, gid=8, flags=IMMUTABLE)
    inode = await fs.getattr(ino)
    assert (inode.mode & 0o777, inode.uid, inode.gid, inode.flags) == (0o640, 7, 8, IMMUTABLE)
    assert cache.inodes == [ino] and not cache.names
    await other.change(ino, flags=0)
    await other.link(ino, ROOT_INO, b"second")
    assert (await fs.getattr(ino)).nlink == 2
    await fs.release(handle)
    # What core had of the bytes is saved, and nothing else.
    assert (await fs.getattr(ino)).uid == 7


async def test_who_reads_a_file_goes_on_with_bytes_that_another_host_has_put_inline(fs, other):
    ino = await write_file(fs, b"tiny", b"old")
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    await other.change(ino, data=b"newer", size=5, mtime_ns=10**18)
    assert bytes(await fs.read(handle, 0, 100)) == b"newer"
    inode = await fs.getattr(ino)
    assert (inode.size, inode.mtime_ns) == (5, 10**18)
    await fs.release(handle)
    assert await read_file(fs, ino) == b"newer"


async def test_who_reads_a_file_goes_on_with_objects_that_another_host_has_made(fs, other):
    ino = await write_file(fs, b"file", TEXT)
    model = await write_file(fs, b"model", OTHER)
    await moved_out(fs, ino, model)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    assert bytes(await fs.read(handle, 0, 100)) == TEXT[:100]
    await other.run(_exchange_bytes, ino, model)
    assert bytes(await fs.read(handle, 0, len(OTHER))) == OTHER
    assert (await fs.getattr(ino)).size == len(OTHER)
    await fs.release(handle)
    assert (await fs.getattr(ino)).size == len(OTHER)
    await other.run(_exchange_bytes, ino, model)
    assert await read_file(fs, ino) == TEXT


def _exchange_bytes(tx: Transaction, *inos: int) -> None:
    """The chunk lists of two files, which are named by no inode."""
    one, two = (namespace.get_inode(tx, ino) for ino in inos)
    before = one.but()
    namespace.take_bytes(one, two)
    namespace.take_bytes(two, before)
    namespace.put_inode(tx, one)
    namespace.put_inode(tx, two)


async def test_what_a_reader_saves_does_not_undo_what_another_host_has_written(fs, other):
    """The access time is saved at the close, with a size that core has to know by then."""
    ino, model = await write_file(fs, b"file", TEXT), await write_file(fs, b"model", OTHER)
    await moved_out(fs, ino, model)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    fs.io.table.open[ino].unsaved = True
    await other.run(_exchange_bytes, ino, model)
    await fs.release(handle)
    assert (await fs.getattr(ino)).size == len(OTHER)
    assert await read_file(fs, ino) == OTHER
    await other.run(_exchange_bytes, ino, model)


async def test_a_file_whose_record_is_being_written_takes_bytes_over_afterwards(fs, other):
    ino, model = await write_file(fs, b"file", TEXT), await write_file(fs, b"model", OTHER)
    await moved_out(fs, ino, model)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    file = fs.io.table.open[ino]
    await file.recording.enter_alone()
    await other.run(_exchange_bytes, ino, model)
    found: list[bytes] = []

    async def read() -> None:
        found.append(bytes(await fs.read(handle, 0, len(OTHER))))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        assert not found
        file.recording.leave_alone()
    assert found == [OTHER]
    await fs.release(handle)
    await other.run(_exchange_bytes, ino, model)


async def test_pages_that_are_being_read_keep_no_other_host_waiting(fs, cache, other):
    """Who reads them may wait, by way of the file's home, for what is shown here. Who opens the
    file meanwhile does without them."""
    ino = await write_file(fs, b"file", TEXT)
    cache.read = trio.Event()
    for mode in (0o600, 0o644):
        await other.change(ino, mode=stat.S_IFREG | mode)
    opened = await fs.open(ino, os.O_RDONLY)
    assert opened.stale and not cache.pages
    cache.read.set()
    await trio.testing.wait_all_tasks_blocked()
    assert set(cache.pages) == {ino} and not fs.io.table.stale
    await fs.release(opened.handle)


@pytest.mark.parametrize("is_lent", [False, True])
async def test_a_larger_size_is_told_when_the_pages_with_the_old_end_are_gone(
    directory: Path, is_lent: bool
) -> None:
    """The kernel has filled the last one up with zeros, which programs would read."""
    async with hosts(directory) as (fs, cache, other), Kernel(fs) as kernel:
        ino, told = await write_file(fs, b"file", b"short"), []
        if not is_lent:
            fs.io.table.recall_all()
        handle = await kernel.open(ino, os.O_RDONLY)
        assert is_lent == bool(kernel.answered)

        async def sizes() -> tuple[int, int]:
            inode = await fs.lookup(ROOT_INO, b"file")
            listing = await fs.readdir(ROOT_INO, 0)
            return fs.told_size(inode), next(each.size for _, each, _ in listing if each.ino == ino)

        async def stat() -> None:
            told.append((await fs.getattr(ino)).size)

        cache.read = trio.Event()
        async with trio.open_nursery() as nursery:
            for data, size in ((b"longer", 5), (b"abc", 3), (b"longest", 3)):
                await other.change(ino, data=data, size=len(data))
                assert await sizes() == (size, size)
            nursery.start_soon(stat)
            await trio.testing.wait_all_tasks_blocked()
            assert not told
            cache.read.set()
        assert told == [7] and await sizes() == (7, 7)
        await kernel.release(handle)


async def test_what_goes_past_the_page_cache_is_not_told_before_the_pages_are_gone(
    directory: Path,
) -> None:
    async with hosts(directory) as (fs, cache, _):
        ino, source = (
            await write_file(fs, b"log", b"one\n"),
            await write_file(fs, b"source", b"x" * 9),
        )
        reader, *_ = await fs.open(ino, os.O_RDONLY)
        appender, *_ = await fs.open(ino, os.O_WRONLY | os.O_APPEND)
        copied, *_ = await fs.open(source, os.O_RDONLY)
        told = []

        async def drop_pages(inos: Sequence[int]) -> None:
            told.append((list(inos), fs.told_size(await fs.lookup(ROOT_INO, b"log"))))

        cache.drop_pages = drop_pages  # type: ignore[method-assign]
        await fs.write(appender, 4, b"two\n", appends=True)
        await fs.copy_file_range(copied, 0, appender, 8, 9)
        assert told == [([ino], 4), ([ino], 8)]
        assert (await fs.getattr(ino)).size == 17
        for handle in (reader, appender, copied):
            await fs.release(handle)


async def test_close_waits_until_what_was_written_is_shown(fs, other, monkeypatch):
    """But for a new file, as a program that makes many would wait for each."""

    async def require_shown(handle: int, text: bytes) -> None:
        await fs.write(handle, 0, text)
        other.engine.hold_back()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fs.flush, handle)
            while not other.engine.waiting:
                await trio.sleep(0)
            other.engine.let_go()
        other.engine.hold_back()
        await fs.flush(handle)  # nothing has been written since, such as by a child that ends
        other.engine.let_go()

    (made, *_), inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
    await fs.write(made, 0, b"new")
    other.engine.hold_back()
    await fs.flush(made)
    other.engine.let_go()
    opened = await fs.open(inode.ino, os.O_RDWR)
    await require_shown(opened.handle, b"rewritten")
    await fs.release(opened.handle)
    monkeypatch.setattr(open_files, "NEW_S", 0.0)
    await require_shown(made, b"written for long")
    await fs.release(made)


async def test_an_inode_that_is_lent_is_taken_back(directory: Path) -> None:
    async with hosts(directory) as (fs, cache, other), Kernel(fs) as kernel:
        ino = await write_file(fs, b"file", TEXT)
        for _ in range(2):
            await kernel.release(await kernel.open(ino, os.O_RDONLY))
        assert kernel.find_lent(ino) is not None
        cache.clear()
        await other.change(ino, mode=stat.S_IFREG | 0o600)
        assert kernel.find_lent(ino) is None
        handles = [await kernel.open(ino, os.O_RDONLY)]
        await kernel.release(handles.pop())
        handles = [await kernel.open(ino, os.O_RDONLY)]
        assert kernel.answered
        await other.change(ino, mode=stat.S_IFREG | 0o644)
        answered = kernel.answered
        handles.append(await kernel.open(ino, os.O_RDONLY))
        assert kernel.answered == answered and ino in fs.io.table.open
        for handle in handles:
            await kernel.release(handle)


async def test_a_file_that_another_host_unlinks_goes_on_where_it_is_open(fs, cache, other):
    ino = await write_file(fs, b"file", TEXT)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    cache.clear()
    await other.unlink(ROOT_INO, b"file")
    assert cache.names == [(ROOT_INO, b"file")] and set(cache.inodes) == {ROOT_INO, ino}
    with pytest.raises(NotFound):
        await fs.lookup(ROOT_INO, b"file")
    assert bytes(await fs.read(handle, 0, 10)) == TEXT[:10]
    assert (await fs.getattr(ino)).nlink == 0
    await fs.release(handle)
    assert await fs.store.engine.view(namespace.find_inode, ino) is not None
    fs.forget([ino])
    await fs.collector.drain()
    assert await fs.store.engine.view(namespace.find_inode, ino) is None


async def test_what_another_host_erases_is_nobody_s_concern(fs, other):
    ino = await write_file(fs, b"file", b"x")
    await other.unlink(ROOT_INO, b"file")
    await other.run(namespace.remove_orphan, ino, [])
    assert ino not in fs.io.table.unsynced
    await fs.drain.wait([ino])  # it waits for nothing


async def test_what_is_removed_while_others_are_shown_is_erased_when_it_is_shown_too(fs, other):
    """Another host that has it open puts its hold before that."""
    engine = fs.store.engine
    inos = [await write_file(fs, name, b"x") for name in (b"first", b"second")]

    async def are_on_record() -> list[bool]:
        return [bool(await engine.view(namespace.find_inode, ino)) for ino in inos]

    await fs.unlink(ROOT_INO, b"first")
    other.engine.hold_back()
    async with trio.open_nursery() as nursery:
        fs.forget([inos[0]])
        nursery.start_soon(fs.collector.drain)
        await trio.testing.wait_all_tasks_blocked()
        await engine.transact(namespace.unlink, ROOT_INO, b"second", 1)
        fs.collector.add_orphan(inos[1])
        other.engine.let_go()
        other.engine.hold_back()
        await trio.testing.wait_all_tasks_blocked()
        assert await are_on_record() == [False, True]
        other.engine.let_go()
    assert await are_on_record() == [False, False]


# --- names ---


async def test_the_kernel_forgets_names_that_another_host_makes_moves_and_removes(fs, cache, other):
    one = await other.make(ROOT_INO, b"one", stat.S_IFDIR | 0o755)
    assert cache.names == [(ROOT_INO, b"one")]  # which it may know not to be there
    assert ROOT_INO in cache.pages  # its listing
    two = await other.make(ROOT_INO, b"two", stat.S_IFDIR | 0o755)
    file = await other.make(one.ino, b"file", stat.S_IFREG | 0o644, b"tiny")
    link = await other.make(one.ino, b"link", stat.S_IFLNK | 0o777, b"file")
    assert await fs.readlink(link.ino) == b"file"
    assert await read_file(fs, file.ino) == b"tiny"
    cache.clear()
    await other.rename(ROOT_INO, b"one", two.ino, b"first")
    assert set(cache.names) == {(ROOT_INO, b"one"), (two.ino, b"first")}
    assert {ROOT_INO, one.ino, two.ino} == set(cache.inodes)
    assert set(cache.pages) == {ROOT_INO, two.ino}
    assert (await fs.lookup(one.ino, b"..")).ino == two.ino
    names = [name for name, _, _ in await fs.readdir(one.ino, 0)]
    assert names == [b"file", b"link"]


async def test_a_call_is_repeated_once_where_the_kernel_may_know_a_file_by_its_old_name(
    fs, cache, other
):
    """Of many names that are new a program is told no ESTALE."""
    known: set[int] = set()
    cache.may_know = known.__contains__  # type: ignore[method-assign]
    one, another = Caller(pid=1), Caller(pid=2)
    for name in (b"a", b"b", b"c"):
        known.add((await other.make(ROOT_INO, name, stat.S_IFREG | 0o644, b"x")).ino)
        await fs.lookup(ROOT_INO, name, one)
    for old, new in ((b"a", b"d"), (b"b", b"e")):
        await other.rename(ROOT_INO, old, ROOT_INO, new)
    for caller in (one, another):
        with pytest.raises(Stale):
            await fs.lookup(ROOT_INO, b"d", caller)
        for name in (b"d", b"e", b"c"):
            await fs.lookup(ROOT_INO, name, caller)


async def test_the_kernel_keeps_no_names_of_a_directory_that_several_hosts_change(fs, cache, other):
    """It could not forget them while it holds the directory's lock for a request of this host."""
    unkept: list[int] = []
    cache.keep_no_names = unkept.append  # type: ignore[method-assign]
    changes: dict[str, Callable[[int], Awaitable[Any]]] = {
        "create": lambda ino: fs.create(ino, b"own", 0o644, os.O_RDONLY, ROOT),
        "mkdir": lambda ino: fs.mkdir(ino, b"own", 0o755, ROOT),
        "rename": lambda ino: fs.rename(ROOT_INO, b"moved", ino, b"own"),
        "unlink": lambda ino: fs.unlink(ino, b"theirs"),
    }
    for name, change in changes.items():
        top = await other.make(ROOT_INO, name.encode(), stat.S_IFDIR | 0o755)
        await write_file(fs, b"moved", b"x")
        await other.make(top.ino, b"theirs", stat.S_IFREG | 0o644, b"x")
        assert fs.keeps_names(top.ino) and fs.keeps_name(top.ino, b"any")
        made = await change(top.ino)
        assert not (fs.keeps_names(top.ino) or fs.keeps_name(top.ino, b"any"))
        assert unkept[-1] == top.ino
        if name == "create":
            await fs.release(made[0].handle)
        await fs.unlink(ROOT_INO, b"moved") if name != "rename" else None


async def test_a_directory_that_another_host_removes_is_empty_for_who_is_in_it(fs, other):
    top = await fs.mkdir(ROOT_INO, b"top", 0o755, ROOT)
    await write_file(fs, b"file", TEXT, top.ino)
    async with fs.doomed.emptying:  # nothing is taken apart yet
        await other.remove_tree(ROOT_INO, b"top")
        assert fs.doomed.holds(top.ino)
        with pytest.raises(NotFound):
            await fs.lookup(top.ino, b"file")
        assert not len(await fs.readdir(top.ino, 0))
    await fs.doomed.empty()
    await other.put(keys.doomed(12345), Doomed(12345, 1, 0).encode())
    assert fs.doomed.holds(12345)
    await other.put(keys.doomed(12345), None)
    assert not fs.doomed.holds(12345)


async def test_a_listing_in_progress_has_what_stays_once(fs: Filesystem, other: OtherHost) -> None:
    names = [f"{number:02}".encode() for number in range(20)]
    for name in names:
        await write_file(fs, name, b"x")
    found, cookie = [], 0
    while len(listing := await fs.readdir(ROOT_INO, cookie, 3)):
        for name, _, cookie in listing:
            found.append(name)
        if found[-1] in names:
            await other.make(ROOT_INO, b"new" + found[-1], stat.S_IFREG | 0o644, b"y")
            await other.unlink(ROOT_INO, found[-1])
    assert sorted(name for name in found if name in names) == names
    assert len(set(found)) == len(found)


async def test_o_creat_opens_what_another_host_has_just_made(fs, other):
    await other.make(ROOT_INO, b"file", stat.S_IFREG | 0o644, b"x")
    with pytest.raises(Stale):  # the kernel looks it up anew
        await fs.create(ROOT_INO, b"file", 0o644, os.O_RDWR | os.O_CREAT, ROOT)
    with pytest.raises(Exists):
        await fs.create(ROOT_INO, b"file", 0o644, os.O_RDWR | os.O_CREAT | os.O_EXCL, ROOT)


# --- what is kept of records ---


async def test_policies_of_directories(fs: Filesystem, other: OtherHost) -> None:
    assert (await fs.heirlooms.of(ROOT_INO)).policy is None
    await other.change(ROOT_INO, policy=Policy(tier="pinned"))
    policy = (await fs.heirlooms.of(ROOT_INO)).policy
    assert policy is not None and policy.tier == "pinned"
    await other.change(ROOT_INO, policy=None)


async def test_retention_and_what_is_published(fs: Filesystem, other: OtherHost) -> None:
    top = await other.make(ROOT_INO, b"top", stat.S_IFDIR | 0o755)
    kept = Kept("last=1", Asker(0, (0,)))
    await other.put(keys.retention(top.ino), kept.encode())
    assert top.ino in fs.retention.kept
    for step in (b"step-1", b"step-2"):
        whole = await other.make(top.ino, b"tmp", stat.S_IFDIR | 0o755)
        await other.make(whole.ino, b"shard", stat.S_IFREG | 0o644, b"bytes")
        await other.rename(top.ino, b"tmp", top.ino, step)
    while (await fs.getattr(top.ino)).nlink > 3:
        await trio.sleep(0.01)
    assert [name for name, *_ in await fs.readdir(top.ino, 0)] == [b"step-2"]


async def test_servers(fs: Filesystem, other: OtherHost, directory: Path) -> None:
    number = await fs.store.table.add(str(directory / "new"), "data")
    record = await fs.store.table.find(number)
    fs.store.servers.drop(number)
    await other.run(servers.put_server, number, record)
    while fs.store.servers.find(number) is None:
        await trio.sleep(0.01)
    await other.run(servers.put_server, number, replace(record, state="draining"))
    while fs.store.servers[number].standing != "draining":
        await trio.sleep(0.01)
    await other.run(servers.put_server, number, record)
    while fs.store.servers[number].standing == "draining":
        await trio.sleep(0.01)


async def test_findings_of_scrubs(fs: Filesystem, other: OtherHost) -> None:
    await other.put(SCRUB, b'{"untold": [4711]}')
    assert fs.findings.wrong_objects() == {4711}
    await other.put(SCRUB, b"{}")


async def test_records_that_cannot_be_read(cache: Forgetting, other: OtherHost, caplog) -> None:
    inode = await other.make(ROOT_INO, b"file", stat.S_IFREG | 0o644, b"x")
    cache.clear()
    await other.put(keys.inode(inode.ino), b"?")
    assert cache.inodes == [inode.ino]
    assert "another host has made a record that cannot be read" in caplog.text
    caplog.clear()
    await other.put(keys.inode(inode.ino), inode.encode())


# --- the kernel is told ---


async def test_the_kernel_is_told_in_order_and_many_at_once(fs, cache, other):
    cache.gate, before, calls = trio.Event(), other.engine.shown_seq, cache.calls
    for number in range(AT_ONCE + 9):
        await other.engine.elsewhere(_touch, ROOT_INO, number)
    await trio.testing.wait_all_tasks_blocked()
    assert cache.calls == calls + 1 and other.engine.shown_seq == before
    assert (await fs.getattr(ROOT_INO)).mtime_ns == AT_ONCE + 8  # core does not wait for it
    cache.gate.set()
    cache.gate = None
    await other.engine.until_shown()
    assert cache.calls <= calls + 3


def _touch(tx: Transaction, ino: int, now: int) -> None:
    namespace.touch(tx, namespace.get_inode(tx, ino), now)


# --- who waits for other hosts ---


async def _prepare(fs: Filesystem) -> dict[str, int]:
    inos = {
        name: await write_file(fs, name.encode(), b"x")
        for name in ("old", "gone", "mode", "xattr", "flags")
    }
    for name in ("empty", "tree", "pending"):
        inos[name] = (await fs.mkdir(ROOT_INO, name.encode(), 0o755, ROOT)).ino
    await fs.setxattr(inos["xattr"], b"user.old", b"1", caller=ROOT)
    return inos


Call = Callable[[Filesystem, dict[str, int]], Awaitable[Any]]

WAITING: dict[str, Call] = {
    "rename": lambda fs, inos: fs.rename(ROOT_INO, b"old", ROOT_INO, b"new"),
    "unlink": lambda fs, inos: fs.unlink(ROOT_INO, b"gone"),
    "rmdir": lambda fs, inos: fs.rmdir(ROOT_INO, b"empty"),
    "remove_tree": lambda fs, inos: fs.remove_tree(ROOT_INO, b"tree"),
    "chmod": lambda fs, inos: fs.setattr(inos["mode"], SetAttr(mode=0o600), ROOT),
    "chown": lambda fs, inos: fs.setattr(inos["mode"], SetAttr(uid=7), ROOT),
    "chattr": lambda fs, inos: fs.set_flags(inos["flags"], 0, 7),
    "setxattr": lambda fs, inos: fs.setxattr(inos["xattr"], b"user.new", b"1", caller=ROOT),
    "removexattr": lambda fs, inos: fs.removexattr(inos["xattr"], b"user.old", ROOT),
    "publish": lambda fs, inos: fs.publish(Publication(inos["pending"], ROOT_INO, b"final"), ROOT),
}


async def test_waits_until_it_is_shown_and_has_happened_before(fs, other):
    inos = await _prepare(fs)
    for name, call in WAITING.items():
        other.engine.hold_back()
        seq, answered = fs.store.engine.seq, trio.Event()

        async def ask(call: Call = call, answered: trio.Event = answered) -> None:
            await call(fs, inos)
            answered.set()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            try:
                while not other.engine.waiting:
                    assert not answered.is_set(), name
                    await trio.lowlevel.checkpoint()
                assert fs.store.engine.seq > seq, name
                # Nobody else is held up, and no lock is held.
                await write_file(fs, f"beside {name}".encode(), TEXT)
            finally:
                other.engine.let_go()
        assert not other.engine.waiting, name
    fs.forget(list(inos.values()))


@pytest.mark.sweep
@pytest.mark.parametrize("name", WAITING)
async def test_who_does_not_wait_any_longer_leaves_all_in_order(fs, other, name):
    inos = await _prepare(fs)
    other.engine.hold_back()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(WAITING[name], fs, inos)
        while not other.engine.waiting:
            await trio.lowlevel.checkpoint()
        nursery.cancel_scope.cancel()
    other.engine.let_go()
    fs.forget(list(inos.values()))
    await fs.doomed.empty()


async def test_what_is_new_is_not_waited_for(fs: Filesystem, other: OtherHost) -> None:
    other.engine.hold_back()
    ino = await write_file(fs, b"file", TEXT)
    await fs.mkdir(ROOT_INO, b"directory", 0o755, ROOT)
    await fs.symlink(ROOT_INO, b"symlink", b"file", ROOT)
    await fs.link(ino, ROOT_INO, b"link")
    await fs.setattr(ino, SetAttr(size=5), ROOT)
    await fs.setattr(ino, SetAttr(mtime_ns=5), ROOT)
    handle, *_ = await fs.open(ino, os.O_RDWR)
    await fs.write(handle, 0, b"y")
    await fs.fsync(handle)
    other.engine.let_go()
    await fs.release(handle)
