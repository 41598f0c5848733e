"""Pending directories on the filesystem in process: marks, commits, groups, and what is refused."""

import os
import subprocess
import time
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.core.errors import (
    AccessDenied,
    Busy,
    FsError,
    GroupCancelled,
    Invalid,
    NoAttribute,
    NotADirectory,
    NotPermitted,
)
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import groups, namespace
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support.publishing import (
    OTHER,
    ROOT,
    SIZE,
    ask,
    get,
    make,
    marks,
    names,
    opened,
    pending,
    tree,
)
from tests.support.publishing import fs as fs
from tests.support.stores import OWNER, put


async def test_a_pending_directory_tells_who_has_committed(fs: Filesystem) -> None:
    ino = await pending(fs, b"tmp", ranks=3)
    with pytest.raises(Busy):
        await fs.rename(ROOT, b"tmp", ROOT, b"step-100")
    await put(fs, ino, "commit", "2")
    told = await ask(fs, ino)
    assert (told["ranks"], told["step"], told["job"]) == (3, 100, "job 7")
    assert (told["members"], told["missing"]) == ([2], [0, 1])
    assert 0 <= told["age_s"] < 60 and abs(told["created_s"] - time.time()) < 60
    assert "3 of 3 ranks have not committed: 0, 1, 2" in told["refused"]
    await put(fs, ino, "commit", {"rank": 0})
    with pytest.raises(Busy):
        await fs.rename(ROOT, b"tmp", ROOT, b"step-100")
    await put(fs, ino, "commit", "1")
    assert (await ask(fs, ino))["missing"] == []
    await fs.rename(ROOT, b"tmp", ROOT, b"step-100")
    with pytest.raises(NoAttribute):
        await get(fs, ino, "pending")
    assert await names(fs) == {b"step-100"}


async def test_what_happens_twice_or_too_late_is_refused(fs: Filesystem) -> None:
    ino = await pending(fs, b"tmp", ranks=2)
    await put(fs, ino, "commit", "1")
    half = '{"rank": 0, "files": {"\\ud800": 1}}'  # half of a character
    for commit in ("1", "2", '{"rank": -1}', '{"rank": 2}', '{"rank": 1, "again": false}', half):
        with pytest.raises(Invalid):
            await put(fs, ino, "commit", commit)
    await put(fs, ino, "commit", {"rank": 1, "again": True})
    await put(fs, ino, "pending", "ranks=2,step=100,job=job 7")  # the same again
    for mark in ("ranks=3,step=100,job=job 7", "ranks=2,step=101,job=job 7", "ranks=2"):
        with pytest.raises(Invalid):
            await put(fs, ino, "pending", mark)
    assert (await ask(fs, ino))["members"] == [1]
    await put(fs, ino, "commit", "0")
    await put(fs, ino, "publish-as", {"final": "final"})
    with pytest.raises(Invalid):
        await put(fs, ino, "commit", {"rank": 0, "again": True})


@pytest.mark.parametrize("remove", [True, False])
async def test_abandoning_takes_the_mark_and_the_commits(fs: Filesystem, remove: bool) -> None:
    ino = await pending(fs, b"tmp", ranks=2)
    await put(fs, ino, "commit", "0")
    if remove:
        await fs.removexattr(ino, b"user.aifs.pending")
    else:
        await put(fs, ino, "pending", "")
    for again in (fs.removexattr, fs.getxattr):
        with pytest.raises(NoAttribute):
            await again(ino, b"user.aifs.pending")
    await put(fs, ino, "pending", "ranks=1")
    assert (await ask(fs, ino))["members"] == []
    await put(fs, ino, "pending", "")
    await fs.rename(ROOT, b"tmp", ROOT, b"step-100")


async def test_who_may_write_begins_anew_what_nobody_goes_on_with(fs: Filesystem) -> None:
    """In a team's directory, what one user's crash has left is another one's to do again."""
    ino = await tree(fs, b"tmp")
    await fs.setattr(ino, SetAttr(mode=0o777), OWNER)
    anew = "ranks=2,step=100,anew=yes"
    with pytest.raises(NotPermitted):  # nobody has said that it is a checkpoint
        await put(fs, ino, "pending", anew, OTHER)
    with subprocess.Popen(["sleep", "1000"]) as process:
        rank = Caller(OWNER.uid, OWNER.gid, process.pid)
        await put(fs, ino, "pending", "ranks=1,step=100", rank)
        await put(fs, ino, "commit", "0")
        with pytest.raises(NotPermitted, match=f"processes {process.pid}"):
            await put(fs, ino, "pending", anew, OTHER)
        process.kill()
    for wrong, error in (("ranks=2,step=100", NotPermitted), ("", NotPermitted)):
        with pytest.raises(error):
            await put(fs, ino, "pending", wrong, OTHER)
    for mode, error in ((0o1777, NotPermitted), (0o755, AccessDenied)):
        await fs.setattr(ino, SetAttr(mode=mode), OWNER)
        with pytest.raises(error):
            await put(fs, ino, "pending", anew, OTHER)
    assert (await ask(fs, ino))["members"] == [0]
    await fs.setattr(ino, SetAttr(mode=0o777), OWNER)
    await put(fs, ino, "group", "name=step,ranks=1,commit=explicit,timeout=1h")
    left = (await ask(fs, ino, name="group"))["id"]
    await put(fs, ino, "pending", anew, OTHER)
    with pytest.raises(GroupCancelled, match="pending anew"):
        await fs.groups.wait(ino, left, False, None)
    assert (await ask(fs, ino))["missing"] == [0, 1]
    for rank in ("0", "1"):
        await put(fs, ino, "commit", rank, OTHER)
    await put(fs, ino, "publish-as", {"final": "final"}, OTHER)
    assert (await fs.lookup(ROOT, b"final")).ino == ino


async def test_a_mark_is_short_for_a_group(fs: Filesystem) -> None:
    """What one attribute says, the other one takes, and both tell."""
    ino = await pending(fs, b"tmp", ranks=2)
    told = await ask(fs, ino, name="group")
    assert (told["state"], told["pending"], told["missing"]) == ("open", True, [0, 1])
    long = "ranks=2,commit=explicit,dedup=no,pending=yes,step=100,job=job 7"
    await put(fs, ino, "group", long)
    assert (await ask(fs, ino, name="group"))["id"] == told["id"], "the same again"
    for other in (long.replace("100", "101"), long.replace("ranks=2", "ranks=3")):
        with pytest.raises(Invalid, match="pending already"):
            await put(fs, ino, "group", other)
    await put(fs, ino, "group.commit", {"rank": 1, "files": {"0.pt": SIZE}})
    assert (await ask(fs, ino))["members"] == [1]
    with pytest.raises(Invalid, match="rank 1 has committed"):
        await put(fs, ino, "group.commit", "1")
    await put(fs, ino, "group.commit", {"rank": 1, "again": True})
    await put(fs, ino, "commit", "0")
    await fs.groups.wait(ino, 0, False, None)
    with pytest.raises(Invalid, match="drained as usual"):
        await fs.groups.wait(ino, 0, True, None)
    await fs.setattr(ino, SetAttr(mode=0o777), OWNER)
    with pytest.raises(NotPermitted):
        await put(fs, ino, "group", "", OTHER)
    await fs.rename(ROOT, b"tmp", ROOT, b"final")
    for name in ("pending", "group"):
        with pytest.raises(NoAttribute):
            await get(fs, ino, name)
    await put(fs, ino, "group", long)
    await put(fs, ino, "group", "")
    with pytest.raises(NoAttribute):
        await get(fs, ino, "pending")


async def test_who_waits_for_the_ranks_is_told_of_the_name_and_of_the_end(fs: Filesystem) -> None:
    one, two = await pending(fs, b"one"), await pending(fs, b"two")
    ends: list[object] = []

    async def wait(ino: int) -> None:
        try:
            ends.append(await fs.groups.wait(ino, 0, False, None))
        except FsError as error:
            ends.append(str(error))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, one)
        await trio.testing.wait_all_tasks_blocked()
        await put(fs, one, "commit", "0")
        await fs.rename(ROOT, b"one", ROOT, b"final")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, two)
        await trio.testing.wait_all_tasks_blocked()
        await put(fs, two, "pending", "")
    assert ends == [None, "the directory is pending no more"]


NONSENSE = [
    ("pending", "8"),
    ("pending", "ranks=0"),
    ("pending", "ranks=x"),
    ("pending", "ranks=8193"),
    ("pending", "step=1"),
    ("pending", "ranks=1,ranks=2"),
    ("pending", "ranks=1,size=2"),
    ("pending", "ranks=1,job=" + "j" * 256),
    ("group", "ranks=1,commit=explicit,dedup=no,pending=yes,job=" + "j" * 256),
    ("commit", ""),
    ("commit", "x"),
    ("commit", "{"),
    ("commit", "[]"),
    ("commit", "{}"),
    ("commit", {"rank": "0"}),
    ("commit", {"rank": True}),
    ("commit", {"rank": 0, "what": 1}),
    ("commit", {"rank": 0, "files": {"../x": 1}}),
    ("commit", {"rank": 0, "files": {"/x": 1}}),
    ("commit", {"rank": 0, "files": {"x": -1}}),
    ("commit", {"rank": 0, "files": {"x": "1"}}),
    ("commit", {"rank": 0, "files": {}, "list": "x"}),
    ("commit", {"rank": 0, "files": {"0.pt": SIZE + 1}}),
    ("commit", {"rank": 0, "files": {"none": 1}}),
    ("commit", {"rank": 0, "list": "none"}),
    ("publish-as", "final"),
    ("publish-as", {}),
    ("publish-as", {"final": ""}),
    ("publish-as", {"final": ".."}),
    ("publish-as", {"final": "a", "latest": "a"}),
    ("publish-as", {"final": 1}),
    ("publish-as", {"final": "a", "latest": "b/c"}),
    ("publish-as", {"final": "a", "content": "1"}),
    ("publish-as", {"final": "a", "replace": True, "exclusive": True}),
    ("publish-as", {"final": "a" * 256}),
    ("publish-as", {"final": "a", "manifest": "sub"}),
    ("keep", "last=0"),
    ("keep", "most=3"),
    ("publish", "now"),
]


async def test_nonsense_is_refused_and_changes_nothing(fs: Filesystem) -> None:
    fresh, marked, complete = (
        await tree(fs, b"fresh"),
        await pending(fs, b"marked"),
        await pending(fs, b"complete"),
    )
    await put(fs, complete, "commit", "0")
    before = await names(fs)
    inos = {
        "pending": fresh,
        "group": fresh,
        "commit": marked,
        "publish-as": complete,
        "keep": fresh,
        "publish": fresh,
    }
    for ino in inos.values():
        if b"sub" not in await names(fs, ino):
            await fs.mkdir(ino, b"sub", 0o755, OWNER)
    for name, value in NONSENSE:
        try:
            with pytest.raises(Invalid):
                await put(fs, inos[name], name, value)
        except BaseException as error:
            error.add_note(f"{name}={value!r}")
            raise
    assert await names(fs) == before
    assert (await ask(fs, marked))["members"] == [] and (await ask(fs, complete))["members"] == [0]
    with pytest.raises(NoAttribute):
        await get(fs, fresh, "pending")


async def test_only_directories_can_be_pending(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file")
    with pytest.raises(NotADirectory):
        await put(fs, ino, "pending", "ranks=1")
    with pytest.raises(Invalid):
        await put(fs, ROOT, "pending", "ranks=1", ROOT_USER)
    with pytest.raises(Invalid):
        await put(fs, ino, "publish", "capacity")
    with pytest.raises(NotADirectory):
        await put(fs, ino, "keep", "last=1")


async def test_a_commit_makes_its_files_durable(fs: Filesystem) -> None:
    ino = await pending(fs, b"tmp", ranks=3, files=0)
    sub = (await fs.mkdir(ino, b"sub", 0o755, OWNER)).ino
    mine, others, deep = (
        await make(fs, ino, b"mine"),
        await make(fs, ino, b"others"),
        await make(fs, sub, b"deep"),
    )
    elsewhere = await make(fs, ROOT, b"elsewhere")
    assert await marks(fs) == {mine, others, deep, elsewhere}
    await put(fs, ino, "commit", {"rank": 0, "files": {"mine": SIZE, "sub/deep": SIZE}})
    assert await marks(fs) == {others, elsewhere}
    await put(fs, ino, "commit", {"rank": 1, "files": {}})
    assert await marks(fs) == {others, elsewhere}
    await put(fs, ino, "commit", "2")
    assert await marks(fs) == {elsewhere}


@pytest.mark.sweep
@pytest.mark.parametrize("wrong", ["missing", "short", "directory"])
async def test_a_file_that_is_not_what_was_committed_holds_up_the_publish(fs, wrong):
    ino = await pending(fs, b"tmp")
    await put(fs, ino, "commit", {"rank": 0, "files": {"0.pt": SIZE, "1.pt": SIZE}})
    if wrong == "short":
        handle, *_ = await fs.open((await fs.lookup(ino, b"1.pt")).ino, os.O_RDWR)
        await fs.setattr((await fs.lookup(ino, b"1.pt")).ino, SetAttr(size=SIZE - 1), OWNER)
        await fs.release(handle)
    else:
        await fs.unlink(ino, b"1.pt")
    if wrong == "directory":
        await fs.mkdir(ino, b"1.pt", 0o755, OWNER)
    for publish in (
        fs.rename(ROOT, b"tmp", ROOT, b"final"),
        put(fs, ino, "publish-as", {"final": "final"}),
    ):
        with pytest.raises(Busy):
            await publish
        assert "rank 0: '1.pt'" in (await ask(fs, ino))["refused"]
        assert await names(fs) == {b"tmp"}


async def test_a_list_of_files_has_to_be_there(fs: Filesystem) -> None:
    ino = await pending(fs, b"tmp")
    await make(fs, ino, b".aifs-commit.0.json", 100)
    await put(fs, ino, "commit", {"rank": 0, "list": ".aifs-commit.0.json"})
    await fs.unlink(ino, b".aifs-commit.0.json")
    with pytest.raises(Busy):
        await put(fs, ino, "publish-as", {"final": "final"})


async def test_commits_survive_a_remount(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await pending(fs, b"tmp", ranks=2)
        await put(fs, ino, "commit", {"rank": 0, "files": {"0.pt": SIZE}})
    async with opened(directory) as fs:
        assert (await ask(fs, ino))["members"] == [0]
        member = await fs.store.engine.view(groups.get_member, ino, 0)
        assert member.files == ((b"0.pt", SIZE),)


async def test_exchanging_publishes_both_sides(fs: Filesystem) -> None:
    one, two = await pending(fs, b"one"), await pending(fs, b"two")
    for ino in (one, two):
        with pytest.raises(Busy):
            await fs.rename(ROOT, b"one", ROOT, b"two", namespace.RENAME_EXCHANGE)
        await put(fs, ino, "commit", "0")
    await fs.rename(ROOT, b"one", ROOT, b"two", namespace.RENAME_EXCHANGE)
    assert (await fs.lookup(ROOT, b"two")).ino == one
    for ino in (one, two):
        with pytest.raises(NoAttribute):
            await get(fs, ino, "pending")


async def test_what_is_above_a_pending_directory_can_be_moved_and_removed(fs: Filesystem) -> None:
    above = await tree(fs, b"above", files=0)
    ino = await pending(fs, b"tmp", parent=above)
    await put(fs, ino, "commit", "0")
    await fs.rename(ROOT, b"above", ROOT, b"moved")
    assert (await ask(fs, ino))["members"] == [0]
    await put(fs, above, "keep", "last=1")
    await fs.remove_tree(ROOT, b"moved")
    await fs.doomed.empty()
    assert (
        await fs.store.engine.view(lambda tx: [*tx.range(b"n", b"o"), *tx.range(b"r", b"s")]) == []
    )
