"""Publishing on the filesystem in process: names and pointers change together; races, permissions,
drains, fsck.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.check.fsck import check
from aifs.core import files
from aifs.core.errors import (
    AccessDenied,
    Busy,
    Exists,
    FsError,
    Invalid,
    IsADirectory,
    NoAttribute,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Unavailable,
)
from aifs.files import drain as drain_module
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import keys
from aifs.meta.kv import Transaction
from aifs.meta.publishing import Publication
from aifs.vfs import Caller, Filesystem
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.publishing import (
    OTHER,
    ROOT,
    SIZE,
    TRACKER,
    ask,
    chmod,
    get,
    make,
    marks,
    names,
    opened,
    pending,
    tree,
)
from tests.support.publishing import fs as fs
from tests.support.stores import OWNER, call, put, read_file

# --- publishing -----------------------------------------------------------------------------------


@pytest.mark.engines
async def test_name_and_pointers_change_together(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    gone = []
    fs.kernel.forget_names = fs.kernel.look_up_anew = lambda names: note(gone, names)

    async def note(into: list, names: object) -> None:
        final = b"step-%d" % step
        assert not fs.keeps_name(runs, final)
        if not isinstance(names, set):
            into.extend(names)
            return
        assert (runs, final) in names and not any(fs.keeps_name(*name) for name in names)
        with pytest.raises(NotFound):  # before anything has changed
            await fs.lookup(runs, final)

    for step in (100, 200):
        ino = await pending(fs, b".step.tmp", parent=runs)
        await make(fs, ino, b"manifest", 10)
        await put(fs, ino, "commit", "0")
        wanted = {
            "final": f"step-{step}",
            "latest": "latest",
            "tracker": TRACKER,
            "content": str(step),
            "manifest": "manifest",
        }
        await put(fs, ino, "publish-as", wanted)
        assert gone == [
            (runs, name) for name in (b".step.tmp", b"step-%d" % step, b"latest", TRACKER.encode())
        ]
        gone.clear()
        assert fs.keeps_name(runs, b"step-%d" % step)
        assert not (fs.keeps_name(runs, b"latest") or fs.keeps_name(runs, TRACKER.encode()))
        assert await fs.readlink((await fs.lookup(runs, b"latest")).ino) == b"step-%d" % step
        tracker = await fs.lookup(runs, TRACKER.encode())
        assert await read_file(fs, tracker.ino) == b"%d" % step and tracker.size == 3
        assert (tracker.uid, tracker.gid, tracker.mode) == (1000, 1000, 0o100644)
    assert await names(fs, runs) == {b"step-100", b"step-200", b"latest", TRACKER.encode()}
    assert await marks(fs) == set()


async def test_an_open_tracker_keeps_its_content(fs: Filesystem) -> None:
    for step in (1, 2):
        ino = await tree(fs, b"tmp")
        if step == 2:
            old = (await fs.lookup(ROOT, b"tracker")).ino
            handle, *_ = await fs.open(old, os.O_RDONLY)
        await put(
            fs, ino, "publish-as", {"final": f"{step}", "tracker": "tracker", "content": f"{step}"}
        )
    assert bytes(await fs.read(handle, 0, 10)) == b"1"
    await fs.release(handle)
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(old)


async def test_the_kernel_is_told_that_an_old_tracker_has_lost_a_name(fs: Filesystem) -> None:
    """It may know the link count by another name of the file, which nothing else changes."""
    told: list[int] = []
    fs.kernel.drop_attributes_soon = lambda inos: told.extend(inos)
    for step in (1, 2, 3):
        ino = await tree(fs, b"tmp")
        wanted = {"final": f"{step}", "tracker": "tracker", "content": f"{step}"}
        await put(fs, ino, "publish-as", wanted)
        if step == 1:
            old = (await fs.lookup(ROOT, b"tracker")).ino
            await fs.link(old, ROOT, b"kept")
    assert told == [old] and (await fs.getattr(old)).nlink == 1


async def test_a_tracker_that_is_opened_while_it_is_replaced_is_removed_later(fs):
    """Until the kernel is told, it opens the old one by the name that it knows; that was erased
    already, and was made again when it was closed, for its access time."""
    opened_late: list[int] = []
    old = 0

    async def forget_names(_: object) -> None:
        await fs.collector.drain()
        if old:
            handle, *_ = await fs.open(old, os.O_RDONLY)
            assert await fs.read(handle, 0, 10) == b"1"
            opened_late.append(handle)

    fs.kernel.forget_names = forget_names
    for step in (1, 2):
        ino = await tree(fs, b"tmp")
        await put(
            fs,
            ino,
            "publish-as",
            {"final": f"step-{step}", "tracker": TRACKER, "content": f"{step}"},
        )
        old = old or (await fs.lookup(ROOT, TRACKER.encode())).ino
    await fs.collector.drain()
    assert await fs.read(opened_late[0], 0, 10) == b"1"
    await fs.release(opened_late[0])
    await fs.collector.drain()
    with pytest.raises(NotFound):
        await fs.getattr(old)


async def test_a_file_that_was_erased_is_not_made_again_at_its_close(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file", size=0)
    file = await fs.io.inodes.acquire(ino)  # from what it read before the name went
    del fs.io.table.open[ino]
    await fs.unlink(ROOT, b"file")
    fs.forget([ino])
    await fs.collector.drain()
    fs.io.table.open[ino] = file
    file.unsaved = True
    await fs.io.inodes.release(file)
    with pytest.raises(NotFound):
        await fs.getattr(ino)


async def test_where_the_final_name_may_be(fs: Filesystem) -> None:
    runs, other = await tree(fs, b"runs", files=0), await tree(fs, b"other", files=0)
    await fs.symlink(ROOT, b"link", b"other", OWNER)
    for final, place in (
        ("a", runs),
        ("./b", runs),
        ("../c", ROOT),
        ("../other/d", other),
        ("/other/./e", other),
    ):
        ino = await tree(fs, b"tmp", parent=runs)
        await put(fs, ino, "publish-as", {"final": final}, ROOT_USER)
        assert (await fs.lookup(place, final[-1].encode())).ino == ino
    ino = await tree(fs, b"tmp", parent=runs)
    for final, error in (
        ("/link/x", NotADirectory),
        ("none/x", NotFound),
        ("tmp/x", Invalid),
        ("../other/d/0.pt/x", NotADirectory),
    ):
        with pytest.raises(error):
            await put(fs, ino, "publish-as", {"final": final}, ROOT_USER)
    # Shown already; the pointer moves.
    await put(fs, ino, "publish-as", {"final": "tmp", "latest": "latest"}, ROOT_USER)
    assert await fs.readlink((await fs.lookup(runs, b"latest")).ino) == b"tmp"


async def test_a_name_that_is_taken(fs: Filesystem) -> None:
    old, new = await tree(fs, b"final"), await tree(fs, b"tmp")
    with pytest.raises(NotEmpty):
        await put(fs, new, "publish-as", {"final": "final"})
    with pytest.raises(Exists):
        await put(fs, new, "publish-as", {"final": "final", "exclusive": True})
    await make(fs, ROOT, b"file")
    for wanted in ({"final": "file"}, {"final": "file", "replace": True}):
        with pytest.raises(NotADirectory):
            await put(fs, new, "publish-as", wanted)
    with pytest.raises(IsADirectory):
        await put(fs, new, "publish-as", {"final": "x", "latest": "final"})
    assert await names(fs) == {b"final", b"tmp", b"file"}
    await put(fs, new, "publish-as", {"final": "final", "replace": True, "latest": "file"})
    assert (await fs.lookup(ROOT, b"final")).ino == new and await names(fs) == {b"final", b"file"}
    await fs.doomed.empty()
    with pytest.raises(NotFound):
        await fs.getattr(old)
    await fs.mkdir(ROOT, b"empty", 0o755, OWNER)
    await put(fs, new, "publish-as", {"final": "empty"})
    assert await names(fs) == {b"empty", b"file"}


@pytest.mark.engines
async def test_two_publishers_race_for_a_name(fs: Filesystem) -> None:
    inos = [await tree(fs, b"tmp%d" % number) for number in range(4)]
    errors: list[FsError] = []

    async def publish(ino: int, **how: object) -> None:
        try:
            await put(fs, ino, "publish-as", {"final": "final", "latest": "latest", **how})
        except FsError as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        for ino in inos[:2]:
            nursery.start_soon(publish, ino)
    assert [type(error) for error in errors] == [NotEmpty]
    winner = (await fs.lookup(ROOT, b"final")).ino
    loser = next(ino for ino in inos[:2] if ino != winner)
    assert len(await names(fs, loser)) == 2 and len(await names(fs)) == 5
    errors.clear()
    async with trio.open_nursery() as nursery:
        for ino in (loser, *inos[2:]):
            nursery.start_soon(lambda ino=ino: publish(ino, replace=True))
    assert errors == []
    assert (await fs.lookup(ROOT, b"final")).ino in (loser, *inos[2:])
    assert await names(fs) == {b"final", b"latest"}


@pytest.mark.engines
async def test_everything_below_is_durable_before_it_shows(fs: Filesystem) -> None:
    ino = await tree(fs, b"tmp", files=5)
    sub = await tree(fs, b"sub", parent=ino, files=5)
    unsynced = await marks(fs)
    assert len(unsynced) == 10 and sub
    elsewhere = await make(fs, ROOT, b"elsewhere")
    before = fs.store.engine.durable_seq
    await put(fs, ino, "publish-as", {"final": "final"})
    assert await marks(fs) == {elsewhere}
    assert fs.store.engine.durable_seq == fs.store.engine.seq > before


async def test_a_cancelled_publish_changes_nothing(fs: Filesystem) -> None:
    ino = await tree(fs, b"tmp")
    with trio.CancelScope() as scope:
        scope.cancel()
        await put(fs, ino, "publish-as", {"final": "final"})
    assert await names(fs) in ({b"tmp"}, {b"final"})
    await put(fs, ino, "publish-as", {"final": "other"})
    assert await names(fs) == {b"other"}


# --- permissions ----------------------------------------------------------------------------------


async def test_publishing_needs_what_rename_needs(fs: Filesystem) -> None:
    above = (await fs.mkdir(ROOT, b"above", 0o755, OWNER)).ino
    here, there = [(await fs.mkdir(above, name, 0o755, OWNER)).ino for name in (b"here", b"there")]
    ino = await tree(fs, b"tmp", parent=here)
    old = await tree(fs, b"old", parent=there, caller=OTHER)
    await fs.symlink(there, b"latest", b"x", OTHER)

    async def refused(error: type[FsError], caller: Caller = OWNER, **wanted: object) -> None:
        with pytest.raises(error):
            await fs.publish(Publication(ino, there, b"final", **wanted), caller)
        assert (await fs.lookup(here, b"tmp")).ino == ino

    await refused(AccessDenied, OTHER)
    for one, mode in (
        (here, 0o555),
        (there, 0o555),
        (here, 0o666),
        (there, 0o666),
        (ino, 0o555),
        (above, 0o666),
    ):
        before = (await fs.getattr(one)).mode
        await chmod(fs, one, mode)
        await refused(AccessDenied)
        await chmod(fs, one, before & 0o7777)
    await chmod(fs, there, 0o1777, Caller(uid=3000, gid=3000))
    await refused(NotPermitted, latest=b"latest")
    with pytest.raises(NotPermitted):
        await fs.publish(Publication(ino, there, b"old", replace=True), OWNER)
    await chmod(fs, there, 0o777, Caller(uid=3000, gid=3000))
    with pytest.raises(NotPermitted):  # what lies below goes with it, so it takes its owner
        await fs.publish(Publication(ino, there, b"old", replace=True), OWNER)
    await fs.publish(Publication(ino, there, b"final", latest=b"latest"), OWNER)
    await fs.publish(Publication(ino, there, b"old", replace=True), ROOT_USER)
    assert (await fs.lookup(there, b"old")).ino == ino != old


async def test_supplementary_groups_count(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aifs.files import permissions

    monkeypatch.setattr(permissions, "_groups", lambda pid: {77} if pid == 5 else set())
    async with opened(directory) as fs:
        place = (await fs.mkdir(ROOT, b"place", 0o755, OWNER)).ino
        ino = await tree(fs, b"tmp", parent=place)
        await chmod(fs, place, 0o775, Caller(uid=1, gid=77))
        with pytest.raises(AccessDenied):
            await fs.publish(Publication(ino, place, b"final"), Caller(1000, 1000, 4))
        await fs.publish(Publication(ino, place, b"final"), Caller(1000, 1000, 5))


async def test_a_commit_by_ioctl_needs_write_permission(fs: Filesystem) -> None:
    ino = await pending(fs, b"tmp")
    with pytest.raises(AccessDenied):
        await call(fs, ino, "commit", OTHER, rank=0)
    with pytest.raises(Invalid):
        await call(fs, ino, "commit", rank=0, list="../x")
    await call(fs, ino, "commit", rank=0, list="0.pt")
    with pytest.raises(Invalid):
        await call(fs, ino, "commit", OWNER, rank=0)
    await call(fs, ino, "commit", rank=0, again=True)


async def test_a_final_name_tells_nothing_of_where_one_may_not_search(fs: Filesystem) -> None:
    secret = (await fs.mkdir(ROOT, b"secret", 0o700, OTHER)).ino
    await fs.mkdir(secret, b"there", 0o755, OTHER)
    ino = await tree(fs, b"tmp")
    for name in ("there", "not"):
        with pytest.raises(AccessDenied):
            await put(fs, ino, "publish-as", {"final": f"secret/{name}/final"})


async def test_nor_does_a_directory_by_number_that_one_cannot_reach(directory: Path) -> None:
    async with opened(directory) as fs:
        secret = (await fs.mkdir(ROOT, b"secret", 0o700, OTHER)).ino
        open_to_all = (await fs.mkdir(secret, b"open", 0o777, OTHER)).ino
        await fs.mkdir(open_to_all, b"there", 0o755, OTHER)
        ino = await tree(fs, b"tmp")
        for name in ("there", "not"):
            with pytest.raises(AccessDenied):
                await call(fs, ino, "publish-as", parent=open_to_all, final=f"{name}/final")


# --- from the capacity tier -----------------------------------------------------------------------


async def test_publishing_from_the_capacity_tier_waits_for_the_drain(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    assert await get(fs, runs, "publish") == "burst"
    await put(fs, runs, "publish", "capacity")
    assert await get(fs, runs, "publish") == "capacity"
    with pytest.raises(NoAttribute):
        await get(fs, runs, "layout")
    by_name, by_call = await tree(fs, b"one", files=3), await tree(fs, b"two", files=3)
    await fs.rename(ROOT, b"one", ROOT, b"uno")
    assert json.loads(await get(fs, by_name, "state"))["state"] == "dirty"
    await fs.rename(ROOT, b"uno", runs, b"one")
    await put(fs, by_call, "publish-as", {"final": "runs/two"}, ROOT_USER)
    for ino in (by_name, by_call):
        assert json.loads(await get(fs, ino, "state"))["files"]["dirty"] == 0
    below = (await fs.mkdir(runs, b"below", 0o755, OWNER)).ino
    assert await get(fs, below, "publish") == "capacity"
    file = await make(fs, ROOT, b"file")
    await fs.rename(ROOT, b"file", below, b"file")
    assert not (await fs.getattr(file)).in_burst
    await put(fs, runs, "publish", "burst")
    assert (await fs.getattr(runs)).policy is None


class Failing:
    """A hook that fails writes to the data servers."""

    def before(self, op: str, path: str) -> None:
        if op == "write_at" and "/data/" in path:
            raise OSError(5, "Input/output error", path)

    def after(self, op: str, path: str, *args: object) -> None:
        """Nothing to record."""


@pytest.mark.parametrize("how", ["rename", "publish"])
async def test_a_drain_that_fails_fails_the_publish(fs, how, caplog):
    await put(fs, ROOT, "publish", "capacity", ROOT_USER)
    ino = await tree(fs, b"tmp", files=2)
    publish: Callable = (
        (lambda: fs.rename(ROOT, b"tmp", ROOT, b"final"))
        if how == "rename"
        else lambda: put(fs, ino, "publish-as", {"final": "final"}, ROOT_USER)
    )
    files.set_hook(Failing())
    try:
        with pytest.raises(Unavailable):
            await publish()
    finally:
        files.set_hook(None)
    assert await names(fs) == {b"tmp"}
    for server in fs.store.servers.capacity():
        await trio.to_thread.run_sync(server.look, False)
    await publish()
    assert await names(fs) == {b"final"}


async def test_a_file_that_stays_open_fails_the_publish(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drain_module, "GRACE_S", 0.05)
    async with opened(directory) as fs:
        await put(fs, ROOT, "publish", "capacity", ROOT_USER)
        ino = await tree(fs, b"tmp", files=2)
        handle, *_ = await fs.open((await fs.lookup(ino, b"1.pt")).ino, os.O_RDWR)
        with pytest.raises(Busy):
            await fs.rename(ROOT, b"tmp", ROOT, b"final")
        assert await names(fs) == {b"tmp"}
        monkeypatch.setattr(drain_module, "GRACE_S", 20)
        async with trio.open_nursery() as nursery:  # a close that comes late
            nursery.start_soon(fs.rename, ROOT, b"tmp", ROOT, b"final")
            await trio.testing.wait_all_tasks_blocked()
            await fs.release(handle)
        assert await names(fs) == {b"final"}


# --- what has been synced by programs -------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("later", ["nothing", "write", "mapping"])
async def test_a_file_that_was_synced_before_it_was_closed_is_in_order(
    directory: Path, later: str
) -> None:
    async with opened(directory) as fs, Kernel(fs) as kernel:
        handle, inode = await kernel.create(ROOT, b"file", 0o644, os.O_RDWR, OWNER)
        await kernel.write(handle, 0, b"x" * SIZE)
        await kernel.fsync(handle)
        assert await marks(fs) == {inode.ino}
        memory = kernel.map(handle, SIZE) if later == "mapping" else None
        if later == "write":
            await kernel.write(handle, SIZE, b"y")
        await kernel.release(handle)
        if later == "nothing":
            assert await marks(fs) == set() and inode.ino not in fs.io.table.unsynced
        else:
            assert await marks(fs) == {inode.ino} == set(fs.io.table.unsynced)
            if memory is not None:
                memory.close()
            await fs.rename(ROOT, b"file", ROOT, b"new")
            assert await marks(fs) == set()


# --- fsck -----------------------------------------------------------------------------------------


async def test_fsck_takes_marks_away_that_cannot_be_true(directory: Path) -> None:
    planted = {
        keys.group(99): "stray-record",
        keys.group_member(99, 0): "stray-record",
        keys.retention(99): "stray-record",
        keys.group(5)[:5]: "stray-record",
    }
    async with opened(directory, sound=False) as fs:
        good, damaged, file = (
            await pending(fs, b"good", ranks=2),
            await pending(fs, b"damaged"),
            await make(fs, ROOT, b"file"),
        )
        await put(fs, good, "commit", "1")
        await put(fs, good, "keep", "last=1")
        planted |= {
            keys.group(file): "stray-record",
            keys.retention(file): "stray-record",
            keys.group(damaged): "unreadable-record",
            keys.group_member(good, 0): "unreadable-record",
            keys.retention(damaged): "unreadable-record",
            keys.group_member(ROOT, 3): "unreadable-record",
        }

        def plant(tx: Transaction) -> None:
            for key in planted:
                tx.put(key, b"?")

        await fs.store.engine.transact(plant)
        fs.retention.kept.clear()
    report = await trio.to_thread.run_sync(check, modes.config_of(directory), True)
    assert sorted(finding.kind for finding in report.findings) == sorted(planted.values())
    assert report.ok
    async with opened(directory) as fs:
        assert (await ask(fs, good))["members"] == [1] and await get(fs, good, "keep") == "last=1"
