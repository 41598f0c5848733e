"""What the filesystem may rely on of a metadata engine (see kv.py), and nothing more: each test
stops a call where an engine may suspend it, and lets others go on."""

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.check.fsck import check
from aifs.core.errors import NotFound
from aifs.files.types import ROOT
from aifs.meta import groups, keys
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.namespace import RENAME_EXCHANGE
from aifs.meta.recording import Recording
from aifs.meta.server_uses import users_of
from aifs.store import store
from aifs.upkeep.scrub_state import names_of
from aifs.vfs import Filesystem, SetAttr
from tests.support import engines, modes
from tests.support.stores import drained, moved_out, numbers, opened, put, read_file, write_file

SHAPE = modes.WAITING | {
    "layout.unit": "4KiB",
    "layout.inline_limit": "0",
    "layout.stripe_above": "0",
}
TEXT = b"0123456789" * 1000


@asynccontextmanager
async def stopping(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: Mapping[str, object] = {},
    servers: int = 0,
) -> AsyncIterator[Filesystem]:
    monkeypatch.setattr(store, "LmdbEngine", engines.Stopping)
    async with opened(directory, SHAPE | settings, servers=servers) as fs:
        yield fs


@pytest.fixture
async def fs(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Filesystem]:
    async with stopping(directory, monkeypatch) as fs:
        yield fs


@asynccontextmanager
async def stopped(
    fs: Filesystem, function: str, call: Callable[[], Awaitable], when: str = "after"
) -> AsyncIterator[list]:
    """``call`` is suspended before or after its transaction or view of ``function``, and goes on to
    its end when this is left. Yields a list that has what it returned then."""
    engine, found = fs.store.engine, []

    async def work() -> None:
        found.append(await call())

    async with trio.open_nursery() as nursery:
        engine.stop(when, function)
        nursery.start_soon(work)
        await engine.stopped.wait()
        try:
            yield found
        finally:
            engine.go.set()


async def test_others_open_a_file_before_its_creator_hears_of_it(fs: Filesystem) -> None:

    def create():
        return fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)

    async with trio.open_nursery() as nursery:
        async with stopped(fs, "create", create) as created:
            ino = (await fs.lookup(ROOT_INO, b"f")).ino
            other = []

            async def use() -> None:
                handle, *_ = await fs.open(ino, os.O_RDWR)
                other.append(handle)

            nursery.start_soon(use)
            await trio.testing.wait_all_tasks_blocked()
    (first, *_), _ = created[0]
    (second,) = other
    assert fs.handles[first].file is fs.handles[second].file
    await fs.write(second, 0, TEXT)
    assert await fs.read(first, 0, len(TEXT)) == TEXT
    await fs.release(first)
    await fs.release(second)
    assert await read_file(fs, ino) == TEXT


async def test_a_file_is_removed_before_its_creator_hears_of_it(fs: Filesystem) -> None:

    def create():
        return fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)

    async with stopped(fs, "create", create) as created:
        ino = (await fs.lookup(ROOT_INO, b"f")).ino
        await fs.unlink(ROOT_INO, b"f")
    (handle, *_), _ = created[0]
    assert (await fs.getattr(ino)).nlink == 0
    await fs.write(handle, 0, TEXT)
    fs.forget([ino])
    await fs.release(handle)
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(ino)


@pytest.mark.parametrize("is_open", [True, False])
async def test_a_save_in_between_does_not_undo_a_change_of_attributes(fs, is_open):
    ino = await write_file(fs, b"f", TEXT)
    handle, *_ = await fs.open(ino, os.O_RDWR) if is_open else (None,)
    change = SetAttr(mode=0o600, mtime_ns=12345)

    async with trio.open_nursery() as nursery:
        async with stopped(fs, "change_attributes", lambda: fs.setattr(ino, change, ROOT)):
            if is_open:
                nursery.start_soon(fs.io.transitions.save, fs.handles[handle].file)
            else:
                nursery.start_soon(fs.set_flags, ino, 0, 0)
            await trio.testing.wait_all_tasks_blocked()
    assert ((await fs.getattr(ino)).mode & 0o777, (await fs.getattr(ino)).mtime_ns) == (
        0o600,
        12345,
    )
    if is_open:
        await fs.release(handle)
    after = await fs.getattr(ino)
    assert (after.mode & 0o777, after.mtime_ns) == (0o600, 12345)


async def test_a_save_in_between_does_not_bring_a_name_back(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", TEXT)
    handle, *_ = await fs.open(ino, os.O_RDWR)
    async with stopped(fs, "unlink", lambda: fs.unlink(ROOT_INO, b"f")):
        await fs.io.transitions.save(fs.handles[handle].file)
    assert (await fs.getattr(ino)).nlink == 0
    fs.forget([ino])
    await fs.release(handle)
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(ino)


async def test_what_transactions_tell_is_taken_over_in_their_order(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", TEXT)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    async with stopped(fs, "link", lambda: fs.link(ino, ROOT_INO, b"g")):
        await fs.link(ino, ROOT_INO, b"h")
    assert (await fs.getattr(ino)).nlink == 3
    await fs.release(handle)


async def test_a_file_is_opened_after_what_was_read_of_it_has_changed(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", TEXT)
    async with stopped(fs, "load", lambda: fs.open(ino, os.O_RDONLY)) as found:
        await fs.link(ino, ROOT_INO, b"g")
    assert (await fs.getattr(ino)).nlink == 2
    await fs.release(found[0].handle)


async def test_a_policy_that_is_just_changed_is_not_remembered_as_it_was(fs: Filesystem) -> None:

    def create():
        return fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)

    async with stopped(fs, "get_inode", create) as created:
        await put(fs, ROOT_INO, "tier", "capacity", ROOT)
    (handle, *_), _ = created[0]
    await fs.release(handle)
    ino = await write_file(fs, b"g", TEXT)
    assert (await fs.getattr(ino)).copy is None


async def test_a_cached_copy_that_goes_is_used_by_nobody_who_opens_the_file(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", TEXT)
    fs.drain.request([ino])
    await fs.drain.wait([ino])
    found = []

    async def read() -> None:
        found.append(await read_file(fs, ino))

    async with trio.open_nursery() as nursery:
        async with stopped(fs, "put_evicted", lambda: fs.evictor.evict(ino)):
            nursery.start_soon(read)
            await trio.testing.wait_all_tasks_blocked()
    assert found == [TEXT]
    assert (await fs.getattr(ino)).copy is None


async def test_two_tasks_may_empty_what_is_doomed(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    for number in range(5):
        await write_file(fs, b"%d" % number, TEXT, top)
    async with trio.open_nursery() as nursery:
        await fs.remove_tree(ROOT_INO, b"d")
        fs.store.engine.stop("after", "remove_slice")
        nursery.start_soon(fs.doomed.empty)
        await fs.store.engine.stopped.wait()
        nursery.start_soon(fs.doomed.empty)
        await trio.testing.wait_all_tasks_blocked()
        fs.store.engine.go.set()
    assert fs.doomed.status()["trees"] == 0


async def test_a_file_stays_readable_for_who_opens_it_while_its_tree_goes(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    ino = await write_file(fs, b"f", TEXT, top)
    await moved_out(fs, ino)
    async with stopped(fs, "load", lambda: fs.open(ino, os.O_RDONLY)) as found:
        await fs.remove_tree(ROOT_INO, b"d")
        await fs.doomed.empty()
    assert await fs.read(found[0].handle, 0, len(TEXT)) == TEXT
    await fs.release(found[0].handle)
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(ino)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [b"f", b"g"])
@pytest.mark.parametrize("flags", [0, RENAME_EXCHANGE])
async def test_what_gets_a_name_is_durable_though_the_old_name_leads_elsewhere_meanwhile(
    fs, name, flags
):
    for other in (b"f", b"g"):
        await write_file(fs, other, TEXT)

    def rename():
        return fs.rename(ROOT_INO, b"f", ROOT_INO, b"g", flags)

    async with stopped(fs, "if_looked_up", rename, "before"):
        await fs.unlink(ROOT_INO, name)
        ino = await write_file(fs, name, TEXT)
        assert ino in fs.io.table.unsynced
    is_moved = flags == RENAME_EXCHANGE or name == b"f"
    assert (ino in fs.io.table.unsynced) == (not is_moved)


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_group_that_ends_while_more_is_asked_of_it_has_ended(fs: Filesystem, when) -> None:
    top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    await put(fs, top, "group", "name=a,ranks=1,commit=explicit", ROOT)

    async def mark() -> None:
        await put(fs, top, "pending", "ranks=1", ROOT)

    async with trio.open_nursery() as nursery:
        async with stopped(fs, "change", mark, when):
            nursery.start_soon(fs.groups.cancel, top)
            await trio.testing.wait_all_tasks_blocked()
    assert (await fs.group_table.find(top)).state == "cancelled"
    assert (await fs.store.engine.view(groups.find, top)).state == "cancelled"
    await put(fs, top, "pending", "", ROOT)


async def test_who_asks_for_a_group_that_begins_just_now_gets_that_group(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    found = []

    async def find() -> None:
        found.append(await fs.group_table.find(top))

    def begin():
        return put(fs, top, "group", "name=a,ranks=1,commit=explicit", ROOT)

    async with trio.open_nursery() as nursery:
        async with stopped(fs, "begin", begin):
            nursery.start_soon(find)
            await trio.testing.wait_all_tasks_blocked()
    assert found == [fs.group_table.by_directory[top]]


async def test_a_file_of_a_group_is_what_it_was_when_it_was_closed_last(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    await put(fs, top, "group", "name=a,ranks=2", ROOT)
    (handle, *_), inode = await fs.create(top, b"f", 0o644, os.O_RDWR, ROOT)
    await fs.write(handle, 0, TEXT)
    async with stopped(fs, "directory_of", lambda: fs.release(handle)):
        again, *_ = await fs.open(inode.ino, os.O_RDWR)
        await fs.write(again, len(TEXT), b"more")
        await fs.release(again)
    (file,) = fs.group_table.by_directory[top].files.values()
    assert file.size == len(TEXT) + 4 and file.counted


async def test_a_tiny_file_that_has_grown_since_it_was_closed_is_drained(directory, monkeypatch):
    async with stopping(directory, monkeypatch, {"layout.inline_limit": "1000"}) as fs:
        top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
        await put(fs, top, "group", "name=a,ranks=2", ROOT)
        (handle, *_), inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)
        await fs.write(handle, 0, b"tiny")
        async with stopped(fs, "directory_of", lambda: fs.release(handle)):
            again, *_ = await fs.open(inode.ino, os.O_RDWR)
            await fs.write(again, 0, TEXT)
            await fs.release(again)
        assert (await fs.getattr(inode.ino)).in_burst and fs.drain.status()["files"] == 1


async def test_a_policy_that_was_replaced_meanwhile_removes_nothing(fs: Filesystem) -> None:
    runs = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
    for step in (1, 2, 3):
        whole = (await fs.mkdir(runs, b"tmp", 0o755, ROOT)).ino
        await write_file(fs, b"shard", TEXT, whole)
        await fs.rename(runs, b"tmp", runs, b"step-%d" % step, 0, ROOT)

    async def enforce(policy: str) -> None:
        await fs.retention.set_policy(runs, policy, ROOT)

    async with stopped(fs, "_doom_old", lambda: enforce("last=1"), "before"):
        await fs.retention.set_policy(runs, "last=2", ROOT)
    await trio.testing.wait_all_tasks_blocked()
    await fs.retention.enforce(runs)
    assert [name for name, *_ in await fs.readdir(runs, 0)] == [b"step-2", b"step-3"]


async def test_a_container_that_goes_while_it_is_compacted_is_no_fault(
    directory, monkeypatch, caplog
):
    async with stopping(directory, monkeypatch, modes.INTERLEAVED) as fs:
        kept = [await write_file(fs, b"%d" % number, os.urandom(5000)) for number in range(4)]
        await moved_out(fs, *kept)
        await fs.containers.retire(lambda *_: True)
        for name in (b"0", b"1"):
            await fs.unlink(ROOT_INO, name)
        fs.forget(kept[:2])
        await fs.collector.drain()
        async with stopped(fs, "_mostly_dead", fs.compaction.compact):
            for name in (b"2", b"3"):
                await fs.unlink(ROOT_INO, name)
            fs.forget(kept[2:])
            await fs.collector.drain()
        assert not await numbers(fs, b"t") and "not compacted" not in caplog.text


async def test_a_file_that_is_unlinked_before_its_first_name_is_told_of_is_removed(fs):
    (handle, *_), inode = await fs.create(ROOT_INO, None, 0o644, os.O_RDWR, ROOT)
    async with stopped(fs, "link", lambda: fs.link(inode.ino, ROOT_INO, b"f")):
        await fs.unlink(ROOT_INO, b"f")
    fs.forget([inode.ino])
    await fs.release(handle)
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(inode.ino)


async def removed(fs: Filesystem, server: int) -> dict:
    """What has become of the removal of a server."""
    await fs.server_admin.remove(server)
    while True:
        (removal,) = (await fs.server_admin.describe())["removals"]
        if removal["outcome"] is not None:
            return removal["outcome"]
        await trio.sleep(0.001)


async def test_a_server_on_which_a_drain_ends_while_it_is_looked_through_is_not_removed(
    directory, monkeypatch
):
    async with stopping(directory, monkeypatch, servers=2) as fs:
        ino = await write_file(fs, b"f", TEXT)
        made, go = trio.Event(), trio.Event()
        flip = fs.io.transitions.flip

        async def held(*args):
            made.set()
            await go.wait()
            await flip(*args)

        monkeypatch.setattr(fs.io.transitions, "flip", held)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(drained, fs, ino)
            await made.wait()
            await fs.server_admin.drain(1)
            async with stopped(fs, "scan_containers", lambda: removed(fs, 1)) as found:
                go.set()
                await fs.drain.wait([ino])
        assert found[0]["passing"] and 1 in fs.store.servers
        assert await read_file(fs, ino) == TEXT


async def test_a_burst_directory_in_which_a_file_is_being_made_is_not_removed(fs, directory):
    (device,) = fs.store.servers.burst()
    other = await fs.server_admin.add(str(directory.parent / "other"), "burst", "")
    await fs.server_admin.drain(other)

    def create():
        return fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, ROOT)

    async with stopped(fs, "create", create, "before") as created:
        await fs.server_admin.drain(device.id)
        outcome = await removed(fs, device.id)
    (handle, *_), inode = created[0]
    assert outcome["passing"] and inode.copy.server == device.id
    await fs.write(handle, 0, TEXT)
    await fs.release(handle)
    await moved_out(fs, inode.ino)
    await fs.collector.drain()
    assert not (await removed(fs, device.id))["reason"]
    assert await read_file(fs, inode.ino) == TEXT


async def test_fsck_finds_the_same_where_views_are_run_again(directory, monkeypatch):
    async with opened(directory, SHAPE, sound=False) as fs:
        top = (await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)).ino
        for number in range(4):
            await write_file(fs, b"%d" % number, TEXT, top)
        lost = (await fs.lookup(top, b"0")).ino
        await fs.store.engine.transact(_damage, top, lost)
    config = modes.config_of(directory)

    async def findings() -> list[str]:
        return sorted(map(str, (await trio.to_thread.run_sync(check, config, False)).findings))

    found = await findings()
    assert len(found) >= 3
    monkeypatch.setattr(store, "LmdbEngine", engines.Repeating)
    assert await findings() == found


async def test_what_is_sought_in_all_records_is_found_once_where_views_are_run_again(
    directory, monkeypatch
):
    monkeypatch.setattr(store, "LmdbEngine", engines.Repeating)
    async with opened(directory, SHAPE | modes.INTERLEAVED) as fs:
        ino = await write_file(fs, b"f", TEXT)
        await fs.link(ino, ROOT_INO, b"g")
        await moved_out(fs, ino)
        engine = fs.store.engine
        assert await names_of(engine, ino) == ["/f", "/g"]
        (container,) = await numbers(fs, b"t")
        assert [user.ino for user in await users_of(engine, {container})] == [ino]


def _damage(tx: Transaction, directory: int, lost: int) -> None:
    tx.delete(keys.dentry(directory, b"1"))
    tx.delete(keys.inode(lost))
    tx.put(keys.dirty(999), b"")
    tx.add(keys.COUNTER_INODES, 7)


# --- the engines themselves -----------------------------------------------------------------------


def counting(runs: list[int]) -> Callable[[Transaction], int]:
    def count(tx: Transaction) -> int:
        runs.append(tx.counter(b"cx"))
        tx.add(b"cx", 1)
        return tx.counter(b"cx")

    return count


async def test_a_repeating_engine_runs_all_functions_again(tmp_path):
    engine = engines.Repeating(str(tmp_path))
    changes, looks = [], []

    def look(tx: ReadTransaction) -> int:
        looks.append(tx.counter(b"cx"))
        return tx.counter(b"cx")

    for number in range(1, 11):
        assert await engine.transact(counting(changes)) == number
        assert await engine.view(look) == number
    assert len(changes) >= 20 and len(looks) >= 20
    engine.close()


async def test_a_repeating_engine_finds_functions_that_change_what_they_are_given(tmp_path):
    engine = engines.Repeating(str(tmp_path))
    for given in ([], {}, set(), [{}]):
        with pytest.raises(AssertionError, match="has changed what it was given"):
            await engine.view(_change, given)
    engine.close()


def _change(tx: ReadTransaction, given: Any) -> None:
    if isinstance(given, set):
        given.add(1)
    elif given:
        given[0][1] = 1
    elif isinstance(given, list):
        given.append(1)
    else:
        given[1] = 1


async def test_others_run_before_and_after_a_suspended_commit(tmp_path):
    engines.seed(1)
    engine = engines.Suspending(str(tmp_path))
    runs, found = [], []

    async def count() -> None:
        found.append(await engine.transact(counting(runs)))

    async with trio.open_nursery() as nursery:
        for _ in range(50):
            nursery.start_soon(count)
    assert sorted(found) == list(range(1, 51)), "transactions are serializable all the same"
    assert found != sorted(found), "who commits first need not be told first"
    assert len(runs) > 50, "what others have changed meanwhile is read again"
    engine.close()


async def test_a_conflicting_engine_has_another_host_change_what_was_read(tmp_path):
    engines.seed(1)
    engine = engines.Conflicting(str(tmp_path))
    ids, runs = [], []

    def take(tx: Transaction) -> None:
        runs.append(tx.counter(b"cids"))
        tx.add(b"cids", 1)

    for _ in range(50):
        await engine.transact(take)
        ids.append(await engine.view(lambda tx: tx.counter(b"cids")))
    assert len(runs) > 50 and len(set(runs)) == len(runs)
    assert ids[-1] > 50
    engine.close()


class Held(engines.Suspending):
    """Holds one transaction between its first run and its commit."""

    is_to_hold = False

    def hold(self) -> None:
        self.is_to_hold, self.held, self.go = True, trio.Event(), trio.Event()

    async def _before_commit(self, attempt: Recording) -> None:
        if self.is_to_hold:
            self.is_to_hold = False
            self.held.set()
            await self.go.wait()


async def test_what_is_read_loosely_may_be_patched_but_not_put_by_others(tmp_path):
    engine = Held(str(tmp_path))
    await engine.transact(lambda tx: tx.put(b"k", b"time and links"))

    async def while_held(function: Callable[[Transaction], None]) -> int:
        """How often it runs while another host changes the key once."""
        runs = []

        def look(tx: Transaction) -> None:
            runs.append(tx.get_loosely(b"k"))
            tx.patch(b"k", 0, b"TIME")
            tx.add(b"n", 1)

        async with trio.open_nursery() as nursery:
            engine.hold()
            nursery.start_soon(engine.transact, look)
            await engine.held.wait()
            await engine.transact(function)
            engine.go.set()
        return len(runs)

    def value(tx: ReadTransaction) -> bytes | None:
        return tx.get(b"k")

    assert await while_held(lambda tx: tx.patch(b"k", 0, b"Time")) == 1
    assert await engine.view(value) == b"TIME and links"
    assert await while_held(lambda tx: tx.add(b"n", 5)) == 1
    assert await engine.view(lambda tx: tx.counter(b"n")) == 7
    assert await while_held(lambda tx: tx.put(b"k", b"time and LINKS")) == 2
    assert await engine.view(value) == b"TIME and LINKS"
    engine.close()


async def test_what_cannot_be_read_ahead_is_told_who_asks(directory, monkeypatch):
    """It is read by a task of the mount, whose errors would end it."""
    async with opened(directory) as fs:
        await fs.mkdir(ROOT_INO, b"d", 0o755, ROOT)

        async def fail(*args: Any) -> None:
            raise RuntimeError("the database is out of order")

        with monkeypatch.context() as broken:
            broken.setattr(fs.store.engine, "view", fail)
            await fs.read_ahead(ROOT_INO, 0, 10)
            with pytest.raises(RuntimeError):
                await fs.readdir(ROOT_INO, 0, 10)
        await fs.read_ahead(ROOT_INO, 0, 10)
        listing = await fs.readdir(ROOT_INO, 0, 10)
        assert [name for name, *_ in listing] == [b"d"] and listing.is_last
