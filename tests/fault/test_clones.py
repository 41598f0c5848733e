"""What clones share is looked after as the bytes of one file are: columns move and are made anew
for all of them, whoever is gone; what is lost is named for all; fsck finds references that are
wrong.
"""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from aifs.check import repair
from aifs.check.findings import Finding
from aifs.check.fsck import check
from aifs.core import faults
from aifs.core.errors import NoSpace, NotFound
from aifs.files.types import ROOT
from aifs.layout.placement import DRAINING
from aifs.meta import keys, namespace, shared
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.vfs import Filesystem
from tests.support import modes, stores
from tests.support.data_servers import failing, hooked
from tests.support.points import armed, crash
from tests.support.spoil import flip
from tests.support.stores import moved_out, numbers, opened, overwrite, read_file, whole, write_file

SIZE = 40 * 4096 + 17
SETTINGS = modes.STRIPED | {
    "layout.unit": 4096,
    "layout.count": 2,
    "burst.drain_delay": "0s",
    "burst.stage_for_write": 0,
    "scrub.bandwidth": 0,
}
KINDS = {"plain": {}, "coded": {"layout.ec": "2+1"}, "replicas": {"layout.replicas": 2}}
every_kind = pytest.mark.parametrize("kind", KINDS)
protected = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "plain"])


def mounted(directory: Path, kind: str = "plain", sound: bool = True):
    return opened(directory, KINDS[kind], base=SETTINGS, servers=6, sound=sound)


class Files:
    """A file and two clones, on the data servers alone; the original may be gone."""

    def __init__(self) -> None:
        self.data = os.urandom(SIZE)
        self.inos: list[int] = []

    async def make(self, fs: Filesystem, keep: bool = True) -> None:
        ino = await write_file(fs, b"file", self.data)
        await moved_out(fs, ino)
        await whole(fs)  # else each file gets the protection that it lacks for itself
        for name in (b"one", b"two"):
            await fs.clone(ROOT_INO, b"file", ROOT_INO, name, ROOT)
            self.inos.append((await fs.lookup(ROOT_INO, name)).ino)
        if keep:
            self.inos.append(ino)
        else:
            await fs.unlink(ROOT_INO, b"file")
            fs.forget([ino])
            await fs.collector.drain()

    async def check(self, fs: Filesystem) -> None:
        inodes = [await fs.getattr(ino) for ino in self.inos]
        assert len({(inode.oid, inode.layout, inode.named) for inode in inodes}) == 1
        for ino in self.inos:
            assert await read_file(fs, ino) == self.data

    async def path(self, fs: Filesystem, column: int = 0) -> Path:
        inode = await fs.getattr(self.inos[0])
        server = fs.store.servers[inode.layout.servers[column]]
        return Path(server.where((inode.named, inode.oid)))


async def checked(directory: Path, deep: bool = False) -> list[Finding]:
    config = modes.config_of(directory)
    return await trio.to_thread.run_sync(lambda: check(config, repair=False, deep=deep).findings)


# --- columns --------------------------------------------------------------------------------------


@pytest.mark.sweep
@protected
@pytest.mark.parametrize("keep", [True, False])
async def test_a_missing_column_is_made_anew_once(directory: Path, kind: str, keep: bool) -> None:
    files = Files()
    async with mounted(directory, kind) as fs:
        await files.make(fs, keep)
        handles = [(await fs.open(ino, os.O_RDONLY)).handle for ino in files.inos]
        before = (await files.path(fs)).read_bytes()
        (await files.path(fs)).unlink()
        await files.check(fs)  # who reads it notices
        await whole(fs)
        assert (await files.path(fs)).read_bytes() == before
        assert not await numbers(fs, b"q")
        for handle in handles:
            assert bytes(await fs.read(handle, 0, SIZE)) == files.data
            await fs.release(handle)
        await files.check(fs)


@pytest.mark.sweep
@every_kind
@pytest.mark.parametrize("keep", [True, False])
async def test_columns_move_for_all_who_share_them(directory: Path, kind: str, keep: bool) -> None:
    files = Files()
    async with mounted(directory, kind) as fs:
        await files.make(fs, keep)
        handles = [(await fs.open(ino, os.O_RDONLY)).handle for ino in files.inos]
        [number, *_] = (await fs.getattr(files.inos[0])).layout.servers
        await fs.store.table.change(number, DRAINING)
        fs.rebuild.look()
        while fs.rebuild.left(number) != (0, 0):
            await fs.rebuild.news()
        for handle in handles:
            assert bytes(await fs.read(handle, 0, SIZE)) == files.data
            await fs.release(handle)
        await files.check(fs)
        assert number not in (await fs.getattr(files.inos[0])).layout.servers
        await overwrite(fs, files.inos.pop(), 0, b"new")
        await files.check(fs)
    async with mounted(directory, kind) as fs:
        await files.check(fs)


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.move.recorded", "vfs.move.made", "vfs.move.flipped"])
async def test_a_crash_in_a_move_leaves_all_of_them_whole(directory: Path, point: str) -> None:
    files = Files()
    async with mounted(directory, "coded") as fs:
        await files.make(fs, keep=False)
        [number, *_] = (await fs.getattr(files.inos[0])).layout.servers
    with pytest.raises(faults.SimulatedCrash):
        async with stores.served(modes.config_of(directory)) as fs:
            with armed(point, crash):
                await fs.store.table.change(number, DRAINING)
                fs.rebuild.look()
                await trio.sleep_forever()
    async with mounted(directory, "coded") as fs:
        await files.check(fs)
        while fs.rebuild.left(number) != (0, 0):
            await fs.rebuild.news()
        await files.check(fs)


# --- scrub ----------------------------------------------------------------------------------------


async def scrubbed(fs: Filesystem) -> dict:
    fs.scrub.start(bandwidth=0)
    await fs.scrub.wait()
    return fs.scrub.status()


@protected
async def test_scrub_reads_once_and_repairs_for_all(directory: Path, kind: str) -> None:
    files = Files()
    async with mounted(directory, kind) as fs:
        await files.make(fs, keep=False)
        alone = (await scrubbed(fs))["read_bytes"]
        await fs.unlink(ROOT_INO, b"two")
        fs.forget([files.inos.pop()])
        assert (await scrubbed(fs))["read_bytes"] == alone
        flip(await files.path(fs), 3)
        status = await scrubbed(fs)
        assert status["flaws"] and not status["wrong"]
        await whole(fs)
        await files.check(fs)


async def test_scrub_names_all_who_have_lost_bytes(directory: Path) -> None:
    files = Files()
    async with mounted(directory, sound=False) as fs:
        await files.make(fs)
        flip(await files.path(fs), 3)
        wrong = (await scrubbed(fs))["wrong"]
        assert {path for entry in wrong for path in entry["paths"]} == {"/file", "/one", "/two"}
    found = await checked(directory, deep=True)
    assert {finding.where for finding in found} == {"/file", "/one", "/two"}


# --- fsck -----------------------------------------------------------------------------------------


def without_reference(tx: Transaction, oid: int, inos: list[int]) -> None:
    tx.delete(keys.clone(oid, inos[0]))


def without_any(tx: Transaction, oid: int, inos: list[int]) -> None:
    for ino in inos:
        tx.delete(keys.clone(oid, ino))


def reference_of_nobody(tx: Transaction, oid: int, inos: list[int]) -> None:
    tx.put(keys.clone(oid, 1 << 40), b"")


def reference_to_nothing(tx: Transaction, oid: int, inos: list[int]) -> None:
    tx.put(keys.clone(1 << 40, inos[0]), b"")


def owner_that_does_not_know(tx: Transaction, oid: int, inos: list[int]) -> None:
    repair.change_inode(tx, inos[0], {"named": 0})


def owner_that_does_not_know_nor_is_known(tx: Transaction, oid: int, inos: list[int]) -> None:
    owner_that_does_not_know(tx, oid, inos)
    without_reference(tx, oid, inos)


DAMAGES = {
    without_reference: {"wrong-references"},
    without_any: {"wrong-references"},
    reference_of_nobody: {"stray-record"},
    reference_to_nothing: {"stray-record"},
    owner_that_does_not_know: {"wrong-references", "shared-objects"},
    owner_that_does_not_know_nor_is_known: {"shared-objects"},
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_fsck_mends_references(
    directory: Path, damage: Callable[[Transaction, int, list[int]], None]
) -> None:
    files = Files()
    async with mounted(directory, sound=False) as fs:
        await files.make(fs)
        oid = (await fs.getattr(files.inos[0])).oid
        await fs.store.engine.transact(damage, oid, files.inos)
    config = modes.config_of(directory)
    report = await trio.to_thread.run_sync(lambda: check(config, repair=True))
    assert {finding.kind for finding in report.findings} == DAMAGES[damage]
    assert all(finding.repaired for finding in report.findings)
    async with mounted(directory) as fs:
        await files.check(fs)
        oid = (await fs.getattr(files.inos[0])).oid
        assert await fs.store.engine.view(shared.users, oid) == sorted(files.inos)


async def test_fsck_names_all_who_lack_an_object(directory: Path) -> None:
    files = Files()
    async with mounted(directory, sound=False) as fs:
        await files.make(fs, keep=False)
        (await files.path(fs)).unlink()
    found = await checked(directory)
    assert {(finding.kind, finding.where) for finding in found} == {
        ("missing-object", "/one"),
        ("missing-object", "/two"),
    }


# --- full disks -----------------------------------------------------------------------------------


async def inodes(fs: Filesystem) -> int:
    return await fs.store.engine.view(lambda tx: tx.counter(keys.COUNTER_INODES))


@pytest.mark.sweep
@pytest.mark.parametrize("full", ["data", "meta"])
async def test_what_there_is_no_room_to_clone_leaves_nothing(directory: Path, full: str) -> None:
    """Data servers have no room for what has to be drained first, or the metadata for the names."""
    with hooked():
        async with opened(directory, {"burst.drain_delay": "1h"}, base=SETTINGS, servers=6) as fs:
            top = (await fs.mkdir(ROOT_INO, b"top", 0o755, ROOT)).ino
            ino = await write_file(fs, b"file", os.urandom(SIZE), top)
            if full == "meta":
                await moved_out(fs, ino)
            count = await inodes(fs)
            with failing("write_at", f"{directory}/{full}", errno.ENOSPC):
                for parent, name in ((top, b"file"), (ROOT_INO, b"top")):
                    with pytest.raises(NoSpace):
                        await fs.clone(parent, name, ROOT_INO, b"clone", ROOT)
            with pytest.raises(NotFound):
                await fs.lookup(ROOT_INO, b"clone")
    async with opened(directory) as fs:
        await fs.doomed.empty()
        await fs.collector.drain()
        assert await inodes(fs) == count and not await numbers(fs, b"z")
        await fs.clone(ROOT_INO, b"top", ROOT_INO, b"clone", ROOT)
        clone = (await fs.lookup(ROOT_INO, b"clone")).ino
        copy = (await fs.lookup(clone, b"file")).ino
        assert await read_file(fs, copy) == await read_file(fs, ino)


@pytest.mark.sweep
@pytest.mark.parametrize("settings", [{}, {"burst.directories": ""}], ids=["staged", "restriped"])
@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_shared_and_cannot_be_changed_stays_as_it_is(
    directory: Path, kind: str, settings: dict[str, str]
) -> None:
    """The first change copies the file: nothing has room for that."""
    files = Files()
    async with opened(directory, KINDS[kind] | settings, base=SETTINGS, servers=6) as fs:
        await files.make(fs)
        [ino, *_] = files.inos
        places = tuple(f"{directory}/{name}" for name in ("data", "burst"))
        operations = ("write_at", "truncate", "allocate")
        with failing(operations, places, errno.ENOSPC) as failed:
            handle = None
            with pytest.raises(NoSpace):
                handle = (await fs.open(ino, os.O_RDWR)).handle
                await fs.write(handle, 5, b"new")
                await fs.fsync(handle)
        if handle is not None:
            await fs.release(handle)
        assert failed
        await files.check(fs)
        await overwrite(fs, ino, 5, b"new")
        assert await read_file(fs, ino) == files.data[:5] + b"new" + files.data[8:]
        files.inos.remove(ino)
        await files.check(fs)


# --- a host that dies -----------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["vfs.clone.begun", "vfs.clone.sliced", "vfs.clone.filled"])
async def test_a_tree_that_is_not_finished_is_removed_by_the_next_mount(
    directory: Path, point: str
) -> None:
    files = Files()
    async with mounted(directory) as fs:
        await files.make(fs)
        count = await inodes(fs)
    with pytest.raises(faults.SimulatedCrash):
        async with stores.served(modes.config_of(directory)) as fs:
            with armed(point, crash):
                await fs.clone(ROOT_INO, b".", ROOT_INO, b"all", ROOT)
    async with mounted(directory) as fs:
        await fs.doomed.empty()
        await fs.collector.drain()
        assert not await numbers(fs, b"z")
        assert await inodes(fs) == count
        await files.check(fs)
        await fs.clone(ROOT_INO, b".", ROOT_INO, b"all", ROOT)
        all_ = (await fs.lookup(ROOT_INO, b"all")).ino
        assert await read_file(fs, (await fs.lookup(all_, b"one")).ino) == files.data
        assert (await fs.store.engine.view(namespace.get_inode, all_)).nlink == 2
