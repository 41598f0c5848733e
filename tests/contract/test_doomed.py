"""Removing whole trees on the filesystem in process: what is seen at once, what goes later, what
may not be removed.
"""

import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.check import repair
from aifs.check.fsck import check
from aifs.core.errors import AccessDenied, NotADirectory, NotFound, NotPermitted, ReadOnly
from aifs.core.upkeep import NEVER_S
from aifs.data.naming import list_all
from aifs.data.storage import StoredObject
from aifs.files import collector as vfs_collector
from aifs.files.services import ServeOptions
from aifs.meta import keys
from aifs.meta.dooming import Doomed
from aifs.meta.kv import ReadTransaction
from aifs.meta.namespace import put_inode
from aifs.upkeep import doomed as vfs_doomed
from aifs.vfs import Caller, Filesystem, SetAttr, open_filesystem
from tests.support import modes

ROOT, OWNER, OTHER = 1, Caller(uid=1000, gid=1000), Caller(uid=2000, gid=2000)
SHAPE = modes.WAITING | {"layout.unit": "4KiB", "layout.inline_limit": "100"}


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees are taken apart when a test says so."""

    async def rest(self: vfs_doomed.DoomedTrees) -> float:
        return NEVER_S

    monkeypatch.setattr(vfs_doomed.DoomedTrees, "work", rest)


@pytest.fixture
def source() -> Iterator[Path]:
    """An empty store; afterwards fsck finds nothing wrong with it."""
    directory = Path(tempfile.mkdtemp(prefix="aifs-doomed-", dir="/dev/shm"))
    modes.make_store(directory / "store", SHAPE)
    yield directory / "store"
    findings = check(modes.config_of(directory / "store"), repair=False).findings
    shutil.rmtree(directory)
    assert not findings


@asynccontextmanager
async def opened(source: Path, read_only: bool = False) -> AsyncIterator[Filesystem]:
    async with open_filesystem(modes.config_of(source), ServeOptions(read_only=read_only)) as fs:
        with trio.fail_after(60):
            yield fs


async def make(
    fs: Filesystem, parent: int, name: bytes, size: int = 0, caller: Caller = OWNER
) -> int:
    (handle, *_), inode = await fs.create(parent, name, 0o644, os.O_RDWR, caller)
    if size:
        await fs.write(handle, 0, b"x" * size)
    await fs.release(handle)
    return inode.ino


async def make_dir(
    fs: Filesystem, parent: int, name: bytes, mode: int = 0o755, caller: Caller = OWNER
) -> int:
    return (await fs.mkdir(parent, name, mode, caller)).ino


async def make_tree(fs: Filesystem, parent: int, width: int, depth: int) -> None:
    """``width`` directories and files of each kind, ``depth`` levels deep."""
    for number in range(width):
        await make(fs, parent, b"empty%d" % number)
        await make(fs, parent, b"inline%d" % number, 50)
        await fs.symlink(parent, b"link%d" % number, b"nowhere", OWNER)
        await fs.setxattr(await make(fs, parent, b"burst%d" % number, 5000), b"user.x", b"y")
        if depth:
            await make_tree(fs, await make_dir(fs, parent, b"dir%d" % number), width, depth - 1)


async def names(fs: Filesystem, directory: int) -> list[bytes]:
    return [name for name, _, _ in await fs.readdir(directory, 0)]


async def emptied(fs: Filesystem) -> None:
    """All trees are taken apart, and what they left is collected."""
    await fs.doomed.empty()
    await fs.collector.drain()
    assert fs.doomed.status() | {"removed_inodes": 0} == {
        "trees": 0,
        "directories": 0,
        "removed_inodes": 0,
    }


async def inodes(fs: Filesystem) -> int:
    return await fs.store.engine.view(ReadTransaction.counter, keys.COUNTER_INODES)


def stored(source: Path) -> list[str]:
    """Where objects and burst copies lie, but for what is made ahead."""
    config = modes.config_of(source)
    roots = [*config.servers, *config.burst.directories]
    return [
        item.where
        for root in roots
        for item in list_all(root)
        if isinstance(item, StoredObject) and item.length
    ]


@pytest.mark.engines
async def test_a_tree_goes_at_once_and_its_space_later(source: Path) -> None:
    async with opened(source) as fs:
        before = await inodes(fs), (await fs.getattr(ROOT)).nlink
        top = await make_dir(fs, ROOT, b"top")
        await make_tree(fs, top, 3, 2)
        kept = await make(fs, ROOT, b"kept", 5000)
        await fs.wait_drained(await fs_ino(fs, top, b"dir0"))
        filled = await inodes(fs)
        changed = []

        async def forget_names(names: list[tuple[int, bytes]]) -> None:
            changed.extend(names)

        fs.kernel.forget_names = forget_names
        await fs.remove_tree(ROOT, b"top")
        assert changed == [(ROOT, b"top")]
        assert await names(fs, ROOT) == [b"kept"]
        assert (await fs.getattr(ROOT)).nlink == before[1]
        assert await inodes(fs) == filled, "statfs counts it until it is gone"
        assert fs.doomed.status()["trees"] == 1
        await emptied(fs)
        assert await inodes(fs) == before[0] + 1
        assert fs.doomed.status()["removed_inodes"] == filled - before[0] - 1
        assert json.loads(await fs.getxattr(ROOT, b"user.aifs.status"))["doomed"]["trees"] == 0
    assert [int(Path(path).name.split(".")[0], 16) for path in stored(source)] != []
    assert len(stored(source)) == 1, f"only inode {kept} has bytes"


async def fs_ino(fs: Filesystem, parent: int, name: bytes) -> int:
    return (await fs.lookup(parent, name)).ino


@pytest.mark.sweep
@pytest.mark.engines
async def test_the_next_mount_goes_on(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vfs_doomed, "NAMES", 2)
    async with opened(source) as fs:
        before = await inodes(fs)
        top = await make_dir(fs, ROOT, b"top")
        await make_tree(fs, top, 2, 2)
        await fs.remove_tree(ROOT, b"top")
        for _ in range(5):
            await fs.doomed.remove_slice(next(reversed(fs.doomed.directories)))
        left = await inodes(fs)
    assert not (await trio.to_thread.run_sync(check, modes.config_of(source), False)).findings
    async with opened(source, read_only=True) as fs:
        assert await inodes(fs) == left
        assert await names(fs, top) == []
    async with opened(source) as fs:
        assert fs.doomed.status()["trees"] == 1
        await fs.drain.wait(range(1, 1000))  # which lets go of the files that it has begun with
        await emptied(fs)
        assert await inodes(fs) == before
    assert stored(source) == []


@pytest.mark.engines
async def test_who_is_still_in_the_tree(source: Path) -> None:
    """As in a removed directory, at the top; what is made further down goes with the rest."""
    async with opened(source) as fs:
        before = await inodes(fs)
        top = await make_dir(fs, ROOT, b"top")
        below = await make_dir(fs, top, b"below")
        saved = await make(fs, below, b"saved", 5000)
        await make(fs, top, b"file")
        await fs.remove_tree(ROOT, b"top")
        assert await names(fs, top) == []
        assert (await fs.getattr(top)).nlink == 0
        for attempt in (
            lambda: fs.lookup(top, b"file"),
            lambda: make(fs, top, b"new"),
            lambda: make_dir(fs, top, b"new"),
            lambda: fs.link(saved, top, b"new"),
            lambda: fs.unlink(top, b"file"),
            lambda: fs.rmdir(ROOT, b"top"),
            lambda: fs.rename(top, b"file", ROOT, b"new"),
            lambda: fs.remove_tree(ROOT, b"top"),
        ):
            with pytest.raises(NotFound):
                await attempt()
        await make(fs, below, b"late", 5000)
        await make_dir(fs, await make_dir(fs, below, b"late.d"), b"later")
        await fs.rename(below, b"saved", ROOT, b"saved")
        await emptied(fs)
        assert await names(fs, ROOT) == [b"saved"]
        assert await inodes(fs) == before + 1
        for ino in (top, below):
            with pytest.raises(NotFound):
                await fs.getattr(ino)


@pytest.mark.engines
async def test_open_files_and_other_names_live_on(source: Path) -> None:
    async with opened(source) as fs:
        before = await inodes(fs)
        top = await make_dir(fs, ROOT, b"top")
        kept = await make(fs, top, b"one of two names", 5000)
        await fs.link(kept, ROOT, b"other")
        twice = await make(fs, top, b"both names", 5000)
        await fs.link(twice, top, b"both names below")
        unlinked = await make(fs, top, b"open", 5000)
        handle, *_ = await fs.open(unlinked, os.O_RDWR)
        other, *_ = await fs.open(kept, os.O_RDONLY)
        await fs.remove_tree(ROOT, b"top")
        await emptied(fs)
        assert (await fs.getattr(unlinked)).nlink == 0
        await fs.write(handle, 5000, b"more")
        await fs.fsync(handle)
        assert bytes(await fs.read(handle, 4998, 100)) == b"xxmore"
        assert (await fs.getattr(kept)).nlink == 1
        await fs.release(handle)
        await fs.release(other)
        await fs.collector.drain()
        assert await inodes(fs) == before + 1
        with pytest.raises(NotFound):
            await fs.getattr(twice)
        assert await names(fs, ROOT) == [b"other"]


async def test_who_may_remove_what(source: Path) -> None:
    async with opened(source) as fs:
        shared = await make_dir(fs, ROOT, b"shared", 0o777)
        await fs.setattr(shared, SetAttr(mode=0o777), OWNER)
        await make_dir(fs, shared, b"owners")
        await make(fs, shared, b"file")
        with pytest.raises(NotADirectory):
            await fs.remove_tree(shared, b"file", OWNER)
        with pytest.raises(NotPermitted):
            await fs.remove_tree(shared, b"owners", OTHER)  # could not if it held something
        theirs = await make_dir(fs, shared, b"others", caller=OTHER)
        await make(fs, theirs, b"of root", caller=Caller())
        await fs.setattr(shared, SetAttr(mode=0o1777), OWNER)
        await fs.remove_tree(shared, b"others", OTHER)
        await make_dir(fs, shared, b"others", caller=OTHER)
        await fs.setattr(shared, SetAttr(mode=0o755), OWNER)
        with pytest.raises(AccessDenied):
            await fs.remove_tree(shared, b"others", OTHER)
        await fs.remove_tree(shared, b"others")
        await fs.remove_tree(shared, b"owners", OWNER)
        assert await names(fs, shared) == [b"file"]
    async with opened(source, read_only=True) as fs:
        with pytest.raises(ReadOnly):
            await fs.remove_tree(ROOT, b"shared")


async def test_a_barrier_above_does_not_look_at_what_is_doomed(source: Path) -> None:
    async with opened(source) as fs:
        outer = await make_dir(fs, ROOT, b"outer")
        top = await make_dir(fs, outer, b"top")
        handle, *_ = await fs.open(await make(fs, top, b"file", 5000), os.O_RDWR)
        await fs.remove_tree(outer, b"top")
        assert json.loads(await fs.getxattr(outer, b"user.aifs.drain"))["files"] == 0
        await fs.rename(ROOT, b"outer", ROOT, b"renamed")
        await fs.wait_drained(ROOT)
        await fs.release(handle)


async def test_a_damaged_entry_holds_up_its_directory_alone(
    source: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(source) as fs:
        top = await make_dir(fs, ROOT, b"top")
        await make(fs, top, b"file")
        await make(fs, await make_dir(fs, ROOT, b"other"), b"file")
        inode = await make(fs, top, b"damaged")
        record = await fs.store.engine.view(lambda tx: tx.get(keys.inode(inode)))
        await fs.store.engine.transact(repair.put, keys.inode(inode), b"damage")
        await fs.remove_tree(ROOT, b"top")
        await fs.remove_tree(ROOT, b"other")
        await fs.doomed.empty()
        assert fs.doomed.status()["directories"] == 1
        assert "cannot be emptied until fsck" in caplog.text
        await fs.store.engine.transact(repair.put, keys.inode(inode), record)
    async with opened(source) as fs:
        await emptied(fs)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        ("record", "unreadable-record"),
        ("name", "stray-record"),
        ("links", "stray-record"),
        ("missing", "stray-record"),
        ("file", "stray-record"),
    ],
)
async def test_fsck_mends_what_is_doomed(source: Path, damage: str, kind: str) -> None:
    """What is doomed for certain goes on; what is not is kept."""
    async with opened(source) as fs:
        top = await make_dir(fs, ROOT, b"top")
        file = await make(fs, top, b"file", 50)
        if damage == "name":
            await fs.store.engine.transact(repair.put, keys.doomed(top), Doomed(top, 1, 0).encode())
        elif damage in ("missing", "file"):
            ino = top + 100 if damage == "missing" else file
            await fs.store.engine.transact(repair.put, keys.doomed(ino), Doomed(ino, 1, 0).encode())
        else:
            await fs.remove_tree(ROOT, b"top")
        if damage == "record":
            await fs.store.engine.transact(repair.put, keys.doomed(top), b"damage")
        elif damage == "links":
            inode = await fs.getattr(top)
            inode.nlink = 2
            await fs.store.engine.transact(put_inode, inode)
    found = (await trio.to_thread.run_sync(check, modes.config_of(source), True)).findings
    assert kind in {finding.kind for finding in found} and all(
        finding.repaired for finding in found
    )
    async with opened(source) as fs:
        await emptied(fs)
        assert await names(fs, ROOT) == {"record": [], "links": [b"lost+found"]}.get(
            damage, [b"top"]
        )
        if damage == "links":
            assert await names(fs, top) == [b"file"]


async def test_what_cannot_be_deleted_does_not_hold_up_what_can(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Objects on a server that is away are tried again; other trees do not wait for that, nor make
    backups of their own."""
    monkeypatch.setattr(vfs_doomed, "_BACKLOG_MAX", 3)
    monkeypatch.setattr(vfs_collector, "_BACKLOG_MAX", 3)
    async with opened(source) as fs:
        fs.collector.retry = [vfs_collector.DoomedObject(1 << 40, 0, 0)] * 10
        assert (fs.collector.backlog, fs.collector.due) == (10, 0)
        asked = []

        async def covered(seq: int, urgent: bool) -> bool:
            asked.append(urgent)
            return True

        monkeypatch.setattr(fs.backup, "is_without", lambda since, until: bool(asked))
        monkeypatch.setattr(fs.backup, "covered", covered)
        ino = await make(fs, ROOT, b"file", 5000)
        await fs.wait_drained(ROOT)
        await fs.unlink(ROOT, b"file")
        fs.forget([ino])
        while fs.collector.due or not asked:
            await trio.testing.wait_all_tasks_blocked(0.01)
        assert asked == [False]
        assert fs.collector.backlog == 10
        fs.collector.retry = []
