"""Retention on the filesystem in process: the checkpoints that a policy removes or keeps."""

import json
import os
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core.errors import NoAttribute, NotFound, NotPermitted
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import IMMUTABLE, Inode
from aifs.saves.listed import MANIFEST
from aifs.vfs import Caller, Filesystem, SetAttr
from aifs.vfs.trash_requests import Restoring
from tests.support import stores
from tests.support.publishing import (
    OTHER,
    ROOT,
    SIZE,
    ask,
    chmod,
    get,
    make,
    names,
    opened,
    pending,
    tree,
)
from tests.support.publishing import fs as fs
from tests.support.stores import OWNER, put


async def shown(
    fs: Filesystem, name: bytes, parent: int, files: int = 2, caller: Caller = OWNER
) -> int:
    """A tree that is renamed into place."""
    ino = await tree(fs, b"tmp", parent, files, caller)
    await fs.rename(parent, b"tmp", parent, name, 0, caller)
    return ino


async def settle(fs: Filesystem, ino: int, expected: set[bytes]) -> None:
    """Wait until the directory holds these names."""
    while await names(fs, ino) != expected:
        await trio.sleep(0.001)


@pytest.mark.engines
async def test_old_checkpoints_go_after_a_publish(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    await put(fs, runs, "keep", "last=2,every=300")
    assert await get(fs, runs, "keep") == "last=2,every=300"
    assert await fs.listxattr(runs) == []
    told: list[tuple[int, bytes]] = []
    fs.kernel.drop_name_soon = lambda parent, name: told.append((parent, name))
    await tree(fs, b"notes", parent=runs)
    busy = await pending(fs, b"step-50", ranks=2, parent=runs)
    for step in range(100, 700, 100):
        ino = await tree(fs, b"tmp", parent=runs)
        await put(fs, ino, "publish-as", {"final": f"step-{step}", "latest": "latest"})
    kept = {b"notes", b"step-50", b"latest", b"step-300", b"step-500", b"step-600"}
    await settle(fs, runs, kept)
    while len(told) < 3:  # the kernel is told when the transaction has returned
        await trio.sleep(0.001)
    assert set(told) == {(runs, b"step-%d" % step) for step in (100, 200, 400)}
    await fs.doomed.empty()
    assert (await ask(fs, busy))["ranks"] == 2
    await fs.removexattr(runs, b"user.aifs.keep")
    for again in (fs.removexattr, fs.getxattr):
        with pytest.raises(NoAttribute):
            await again(runs, b"user.aifs.keep")


async def test_a_policy_counts_from_when_it_is_set(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3):
        await shown(fs, b"%d" % step, runs)
    await put(fs, runs, "keep", "last=1")
    await settle(fs, runs, {b"3"})


async def test_what_was_not_shown_as_a_whole_neither_counts_nor_goes(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3):
        await saved(fs, runs, f"step-{step}", step)
    await tree(fs, b"step-90", parent=runs)  # half of a save
    copy = await tree(fs, b"step-91", parent=runs, files=1)
    await stores.write_file(
        fs, MANIFEST, b'{"step": 91, "files": {"0.pt": [20000, ""]}}', copy, OWNER
    )
    await fs.mkdir(runs, b"step-92", 0o755, OWNER)
    await shown(fs, b"step-93", runs, files=0)
    await fs.mkdir((await shown(fs, b"step-94", runs, files=0)), b"sub", 0o755, OWNER)
    unpublished = {b"step-%d" % step for step in range(90, 95)}
    for _ in range(2):
        assert await kept(fs, runs, "last=2") == {b"step-2", b"step-3"} | unpublished
    assert await kept(fs, runs, "bytes=1") == {b"step-3"} | unpublished


@pytest.mark.parametrize("steps", [(700, 1000, 900), (1000, 2, 30)])
async def test_nothing_goes_where_steps_and_times_disagree(fs, steps, caplog):
    """A run was taken back to an earlier step; checkpoints were moved in the order of names."""
    runs = await tree(fs, b"runs", files=0)
    names_ = {b"checkpoint-%d" % step for step in steps}
    for step in steps:
        await shown(fs, b"checkpoint-%d" % step, runs)
    assert await kept(fs, runs, "last=1") == names_
    assert "all checkpoints stay" in caplog.text and "/runs" in caplog.text
    await fs.rename(runs, b"checkpoint-1000", ROOT, b"elsewhere")
    if steps[0] == 700:
        assert await kept(fs, runs, "last=1") == {b"checkpoint-900"}
    caplog.clear()


async def test_runs_in_one_directory_are_in_the_order_of_publishing(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for name in (b"a-100", b"b-1", b"a-200", b"b-2"):
        await shown(fs, name, runs)
    assert await kept(fs, runs, "last=2") == {b"a-200", b"b-2"}


async def test_what_retention_removes_goes_to_the_trash_and_comes_back_as_it_was(fs):
    runs = await tree(fs, b"runs", files=0)
    await put(fs, runs, "trash", "7d")
    first = await saved(fs, runs, "step-1", 1)
    when = await get(fs, first, "shown")
    await saved(fs, runs, "step-2", 2)
    assert await kept(fs, runs, "last=1") == {b"step-2"}
    assert (await fs.getattr(first)).is_trashed
    await fs.removexattr(runs, b"user.aifs.keep")
    await fs.restore(Restoring(ROOT, b"runs/step-1"), OWNER)
    assert await names(fs, runs) == {b"step-1", b"step-2"}
    assert when == await get(fs, first, "shown")


async def test_only_a_publish_or_a_rename_marks_a_directory(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await tree(fs, b"step-1")
        await fs.rename((await fs.lookup(ROOT, b"step-1")).ino, b"0.pt", ino, b"renamed")
        with pytest.raises(NoAttribute):
            await get(fs, ino, "shown")
        with pytest.raises(NotPermitted):
            await put(fs, ino, "shown", "1", ROOT_USER)
        await fs.set_flags(ino, 0, 0)
        await put(fs, ino, "publish-as", {"final": "step-1"})  # under the name that it has
        when = await get(fs, ino, "shown")
        assert abs(float(when) - time.time()) < 60
        await fs.rename(ROOT, b"step-1", ROOT, b"kept-1")
        await fs.set_flags(ino, 0, 0)
    async with opened(directory) as fs:
        assert await get(fs, ino, "shown") == when


async def test_what_is_open_or_pointed_at_stays(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3, 4):
        ino = await tree(fs, b"tmp", parent=runs)
        await put(fs, ino, "publish-as", {"final": f"{step}"})
    await fs.symlink(runs, b"best", b"../runs/2/", OWNER)
    first = (await fs.lookup((await fs.lookup(runs, b"1")).ino, b"0.pt")).ino
    handle, *_ = await fs.open(first, os.O_RDONLY)
    await put(fs, runs, "keep", "bytes=1")
    await fs.retention.enforce(runs)
    assert await names(fs, runs) == {b"1", b"2", b"4", b"best"}
    await fs.release(handle)
    await fs.unlink(runs, b"best")
    await fs.retention.enforce(runs)
    assert await names(fs, runs) == {b"4"}


async def test_what_is_above_many_open_files_is_not_looked_at_for_each(fs, monkeypatch):
    depth, count, seen = 10, 20, []
    runs = parent = await tree(fs, b"runs", files=0)
    for _ in range(depth):
        parent = await tree(fs, b"1", parent=parent, files=0)
    inos = [await make(fs, parent, b"%d" % number) for number in range(count)]
    handles = [(await fs.open(ino, os.O_RDONLY)).handle for ino in inos]
    await put(fs, runs, "keep", "last=1")
    await trio.testing.wait_all_tasks_blocked()
    find = namespace.find_inode

    def finding(tx: ReadTransaction, ino: int) -> Inode | None:
        seen.append(ino)
        return find(tx, ino)

    monkeypatch.setattr(namespace, "find_inode", finding)
    await fs.retention.enforce(runs)
    assert 0 < seen.count(runs) < count  # an engine may run a view several times
    for handle in handles:
        await fs.release(handle)


async def test_bytes_are_those_of_the_whole_tree(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    await put(fs, runs, "keep", f"bytes={5 * SIZE}")
    for step in (1, 2, 3):
        ino = await tree(fs, b"tmp", parent=runs, files=1)
        await tree(fs, b"sub", parent=ino, files=1)
        await put(fs, ino, "publish-as", {"final": f"{step}"})
    await settle(fs, runs, {b"2", b"3"})


async def test_the_policy_is_the_owners(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    await chmod(fs, runs, 0o777)
    with pytest.raises(NotPermitted):
        await put(fs, runs, "keep", "last=1", OTHER)


async def test_the_policy_survives_a_remount(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3):
            await fs.rename(ROOT, b"tmp", runs, b"%d" % step) if await tree(fs, b"tmp") else None
        await put(fs, runs, "keep", "last=1")
    async with opened(directory) as fs:
        await settle(fs, runs, {b"3"})
        await tree(fs, b"tmp")
        await fs.rename(ROOT, b"tmp", runs, b"4")
        await settle(fs, runs, {b"4"})


async def test_abandoned_pending_directories_are_removed(fs, monkeypatch):
    dead, alive, open_ = [await pending(fs, name, ranks=2) for name in (b"dead", b"alive", b"open")]
    plain = await tree(fs, b"plain")
    handle, *_ = await fs.open((await fs.lookup(open_, b"0.pt")).ino, os.O_RDONLY)
    await trio.testing.wait_all_tasks_blocked()  # the look at the beginning of a mount is over
    now = time.time_ns() + 8 * 86400 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now)
        patch.setattr(fs.retention, "now_ns", lambda: now)
        await put(fs, alive, "commit", "0")
        await fs.retention.remove_abandoned()
    assert await names(fs) == {b"alive", b"open", b"plain"} and plain
    await fs.release(handle)
    await fs.doomed.empty()
    with pytest.raises(NotFound):
        await fs.getattr(dead)


async def remove_abandoned(fs: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if 8 days had passed."""
    await trio.testing.wait_all_tasks_blocked()  # the look at the beginning of a mount is over
    now = time.time_ns() + 8 * 86400 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(fs.retention, "now_ns", lambda: now)
        await fs.retention.remove_abandoned()


async def test_nobody_has_a_directory_of_others_removed_by_marking_it(fs, monkeypatch):
    theirs = (await fs.mkdir(ROOT, b"theirs", 0o777, ROOT_USER)).ino
    await make(fs, theirs, b"precious", caller=OWNER)
    with pytest.raises(NotPermitted):
        await put(fs, theirs, "pending", "ranks=1", OTHER)
    await put(fs, theirs, "pending", "ranks=1", ROOT_USER)
    for text in ("ranks=1", ""):
        with pytest.raises(NotPermitted):
            await put(fs, theirs, "pending", text, OTHER)
    with pytest.raises(NotPermitted):
        await fs.removexattr(theirs, b"user.aifs.pending", OTHER)
    await put(fs, theirs, "pending", "", ROOT_USER)
    # Who marked it could not remove it now: it was given away, its parent was closed, or is not
    # to be reached.
    kept = {b"theirs"}
    for name in (b"given", b"closed", b"hidden"):
        above = (await fs.mkdir(ROOT, b"above " + name, 0o755, OWNER)).ino
        parent = (await fs.mkdir(above, b"parent", 0o755, OWNER)).ino
        ino = await pending(fs, name, parent=parent)
        if name == b"given":
            await chmod(fs, ino, 0o777, OTHER)
        elif name == b"closed":
            await chmod(fs, parent, 0o755, ROOT_USER)
        else:
            await chmod(fs, above, 0o700, ROOT_USER)
        kept.add(b"above " + name)
    await remove_abandoned(fs, monkeypatch)
    for name in (b"given", b"closed", b"hidden"):
        above = (await fs.lookup(ROOT, b"above " + name)).ino
        assert await names(fs, (await fs.lookup(above, b"parent")).ino) == {name}
    assert await names(fs) == kept


async def test_a_mark_counts_with_the_groups_of_who_set_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from aifs.files import permissions

    monkeypatch.setattr(permissions, "_groups", lambda pid: {77} if pid == 5 else set())
    async with opened(directory) as fs:
        for name, gid in ((b"team", 77), (b"others", 78)):
            place = (await fs.mkdir(ROOT, name, 0o755, OWNER)).ino
            ino = await tree(fs, b"tmp", parent=place)
            await put(fs, ino, "pending", "ranks=1", Caller(OWNER.uid, OWNER.gid, 5))
            await chmod(fs, place, 0o775, Caller(uid=1, gid=gid))
        await remove_abandoned(fs, monkeypatch)
        assert await names(fs, (await fs.lookup(ROOT, b"team")).ino) == set()
        assert await names(fs, (await fs.lookup(ROOT, b"others")).ino) == {b"tmp"}


async def test_a_policy_removes_only_what_who_set_it_could_remove(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    await chmod(fs, runs, 0o1777)
    for step, caller in ((1, OTHER), (2, OWNER), (3, OTHER), (4, OWNER), (5, OWNER)):
        await shown(fs, b"%d" % step, runs, caller=caller)
    await put(fs, runs, "keep", "last=1")
    await settle(fs, runs, {b"1", b"3", b"5"})
    await put(fs, runs, "keep", "bytes=1")  # what stays counts, and makes nobody else's go
    await shown(fs, b"6", runs)
    await fs.retention.enforce(runs)
    assert await names(fs, runs) == {b"1", b"3", b"6"}
    await chmod(fs, runs, 0o755, OTHER)  # the directory is given away, the policy stays
    await shown(fs, b"7", runs, caller=ROOT_USER)
    await fs.retention.enforce(runs)
    assert await names(fs, runs) == {b"1", b"3", b"6", b"7"}
    await put(fs, runs, "keep", "last=1", ROOT_USER)
    await settle(fs, runs, {b"7"})


async def test_an_immutable_checkpoint_stays_and_holds_up_no_other(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3, 4):
        ino = await shown(fs, b"%d" % step, runs)
        if step in (1, 3):
            inside = (await fs.lookup(ino, b"0.pt")).ino
            await fs.set_flags(inside if step == 1 else ino, IMMUTABLE, 0)
    await put(fs, runs, "keep", "last=1")
    await settle(fs, runs, {b"1", b"3", b"4"})
    await fs.retention.enforce(runs)


async def saved(fs: Filesystem, parent: int, name: str, step: int | None, mtime_ns: int = 0) -> int:
    """A checkpoint with a manifest."""
    ino = await tree(fs, b"tmp", parent=parent, files=1)
    text = json.dumps({"step": step, "files": {"0.pt": [SIZE, ""]}}).encode()
    (handle, *_), _ = await fs.create(ino, MANIFEST, 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, text)
    await fs.release(handle)
    await put(fs, ino, "publish-as", {"final": name})
    if mtime_ns:
        await fs.setattr(ino, SetAttr(mtime_ns=mtime_ns), ROOT_USER)
    return ino


async def kept(fs: Filesystem, parent: int, policy: str) -> set[bytes]:
    """What there is when the policy has been enforced."""
    await put(fs, parent, "keep", policy)
    await fs.retention.enforce(parent)
    return await names(fs, parent)


async def test_the_newest_is_the_one_that_was_published_last(fs: Filesystem) -> None:
    """Not the one that has the newest mtime: of a clock that has gone back, or because a file was
    added."""
    runs = await tree(fs, b"runs", files=0)
    first = await saved(fs, runs, "step-1", 1, time.time_ns() + 10**18)
    await saved(fs, runs, "step-2", 2)
    await make(fs, first, b"evaluation.json")
    assert await kept(fs, runs, "last=1") == {b"step-2"}


async def test_a_damaged_checkpoint_neither_goes_nor_lets_others_go(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3, 4, 5):
        ino = await saved(fs, runs, f"step-{step}", step)
        if step == 1:
            await fs.unlink(ino, b"0.pt")
        if step == 4:
            await fs.setattr((await fs.lookup(ino, b"0.pt")).ino, SetAttr(size=5), ROOT_USER)
        if step == 5:
            handle, *_ = await fs.open((await fs.lookup(ino, MANIFEST)).ino, os.O_RDWR)
            await fs.write(handle, 0, b"[" * SIZE)
            await fs.release(handle)
    assert await kept(fs, runs, "last=1") == {b"step-1", b"step-3", b"step-4", b"step-5"}


async def test_the_step_is_that_of_the_manifest(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for name, step in (
        ("epoch-1", 1000),
        ("best", 2000),
        ("epoch-3", 2500),
        ("epoch-4", 3000),
        ("epoch-5", 3500),
    ):
        await saved(fs, runs, name, step)
    assert await kept(fs, runs, "every=1000") == {b"epoch-1", b"best", b"epoch-4", b"epoch-5"}


async def test_hidden_directories_are_no_checkpoints(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    await tree(fs, b".cache-1", parent=runs)
    for step in (1, 2):
        await saved(fs, runs, f"step-{step}", step)
    assert await kept(fs, runs, "last=1") == {b".cache-1", b"step-2"}


async def test_what_a_symlink_into_it_leads_to_stays(fs: Filesystem) -> None:
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3):
        await saved(fs, runs, f"step-{step}", step)
    await fs.symlink(runs, b"best.pt", b"step-1/0.pt", OWNER)
    assert await kept(fs, runs, "last=1") == {b"step-1", b"step-3", b"best.pt"}


async def test_a_clock_that_leaps_ahead_makes_nothing_old(fs, monkeypatch):
    runs = await tree(fs, b"runs", files=0)
    for step in (1, 2, 3):
        await saved(fs, runs, f"step-{step}", step)
    await pending(fs, b"being saved", ranks=2)
    now = time.time_ns() + 365 * 86400 * 10**9
    with monkeypatch.context() as patch:
        patch.setattr(time, "time_ns", lambda: now)
        assert await kept(fs, runs, "age=7d") == {b"step-1", b"step-2", b"step-3"}
        await fs.retention.remove_abandoned()
    assert b"being saved" in await names(fs)
