"""Publishing on the filesystem in process: pending directories, commits, pointers, permissions,
races, retention.
"""

import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
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
    GroupCancelled,
    Invalid,
    IsADirectory,
    NoAttribute,
    NotADirectory,
    NotEmpty,
    NotFound,
    NotPermitted,
    Unavailable,
)
from aifs.files import waiter
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import groups, keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.publishing import Publication
from aifs.meta.records import IMMUTABLE, Inode
from aifs.vfs import Caller, Filesystem, SetAttr
from aifs.vfs.publishing import manifests
from aifs.vfs.trash_requests import Restoring
from tests.support import modes, stores
from tests.support.kernel import Kernel
from tests.support.stores import OWNER, put, read_file

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
SIZE = 20_000
TRACKER = "latest_checkpointed_iteration.txt"


ask = partial(stores.ask, name="pending")


@asynccontextmanager
async def opened(directory: Path, sound: bool = True) -> AsyncIterator[Filesystem]:
    """The store of the test, in whose root all may write; without ``sound`` the test sees to fsck
    itself.
    """
    async with stores.opened(
        directory, base=modes.WAITING | {"layout.unit": "4KiB"}, sound=sound
    ) as fs:
        await fs.setattr(ROOT, SetAttr(mode=0o777), ROOT_USER)
        yield fs


async def make(
    fs: Filesystem, parent: int, name: bytes, size: int = SIZE, caller: Caller = OWNER
) -> int:
    """A closed file."""
    return await stores.write_file(fs, name, bytes([name[0]]) * size, parent, caller)


async def tree(
    fs: Filesystem, name: bytes, parent: int = ROOT, files: int = 2, caller: Caller = OWNER
) -> int:
    ino = (await fs.mkdir(parent, name, 0o755, caller)).ino
    for number in range(files):
        await make(fs, ino, b"%d.pt" % number, caller=caller)
    return ino


async def shown(
    fs: Filesystem, name: bytes, parent: int, files: int = 2, caller: Caller = OWNER
) -> int:
    """A tree that is renamed into place."""
    ino = await tree(fs, b"tmp", parent, files, caller)
    await fs.rename(parent, b"tmp", parent, name, 0, caller)
    return ino


async def pending(
    fs: Filesystem, name: bytes, ranks: int = 1, parent: int = ROOT, files: int = 2
) -> int:
    ino = await tree(fs, name, parent, files)
    await put(fs, ino, "pending", f"ranks={ranks},step=100,job=job 7")
    return ino


async def get(fs: Filesystem, ino: int, name: str) -> str:
    return (await stores.get(fs, ino, name)).strip()


async def names(fs: Filesystem, ino: int = ROOT) -> set[bytes]:
    return {name for name, _, _ in await fs.readdir(ino, 0)}


async def marks(fs: Filesystem) -> set[int]:
    """Inodes with a dirty mark."""
    return set(
        await fs.store.engine.view(
            lambda tx: [int.from_bytes(key[1:], "big") for key, _ in tx.range(b"w", b"x")]
        )
    )


# --- pending directories --------------------------------------------------------------------------


async def test_a_pending_directory_tells_who_has_committed(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_what_happens_twice_or_too_late_is_refused(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await pending(fs, b"tmp", ranks=2)
        await put(fs, ino, "commit", "1")
        half = '{"rank": 0, "files": {"\\ud800": 1}}'  # half of a character
        for commit in (
            "1",
            "2",
            '{"rank": -1}',
            '{"rank": 2}',
            '{"rank": 1, "again": false}',
            half,
        ):
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
async def test_abandoning_takes_the_mark_and_the_commits(directory: Path, remove: bool) -> None:
    async with opened(directory) as fs:
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


async def test_who_may_write_begins_anew_what_nobody_goes_on_with(directory: Path) -> None:
    """In a team's directory, what one user's crash has left is another one's to do again."""
    async with opened(directory) as fs:
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


async def test_a_mark_is_short_for_a_group(directory: Path) -> None:
    """What one attribute says, the other one takes, and both tell."""
    async with opened(directory) as fs:
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


async def test_who_waits_for_the_ranks_is_told_of_the_name_and_of_the_end(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_nonsense_is_refused_and_changes_nothing(directory: Path) -> None:
    async with opened(directory) as fs:
        fresh, marked, complete = (
            await tree(fs, b"fresh"),
            await pending(fs, b"marked"),
            await pending(fs, b"complete"),
        )
        await put(fs, complete, "commit", "0")
        before = await names(fs)
        inos = {
            "pending": fresh,
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
        assert (await ask(fs, marked))["members"] == [] and (await ask(fs, complete))[
            "members"
        ] == [0]
        with pytest.raises(NoAttribute):
            await get(fs, fresh, "pending")


async def test_only_directories_can_be_pending(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await make(fs, ROOT, b"file")
        with pytest.raises(NotADirectory):
            await put(fs, ino, "pending", "ranks=1")
        with pytest.raises(Invalid):
            await put(fs, ROOT, "pending", "ranks=1", ROOT_USER)
        with pytest.raises(Invalid):
            await put(fs, ino, "publish", "capacity")
        with pytest.raises(NotADirectory):
            await put(fs, ino, "keep", "last=1")


async def test_a_commit_makes_its_files_durable(directory: Path) -> None:
    async with opened(directory) as fs:
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


@pytest.mark.parametrize("wrong", ["missing", "short", "directory"])
async def test_a_file_that_is_not_what_was_committed_holds_up_the_publish(
    directory: Path, wrong: str
) -> None:
    async with opened(directory) as fs:
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


async def test_a_list_of_files_has_to_be_there(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_exchanging_publishes_both_sides(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_what_is_above_a_pending_directory_can_be_moved_and_removed(directory: Path) -> None:
    async with opened(directory) as fs:
        above = await tree(fs, b"above", files=0)
        ino = await pending(fs, b"tmp", parent=above)
        await put(fs, ino, "commit", "0")
        await fs.rename(ROOT, b"above", ROOT, b"moved")
        assert (await ask(fs, ino))["members"] == [0]
        await put(fs, above, "keep", "last=1")
        await fs.remove_tree(ROOT, b"moved")
        await fs.doomed.empty()
        assert (
            await fs.store.engine.view(lambda tx: [*tx.range(b"n", b"o"), *tx.range(b"r", b"s")])
            == []
        )


# --- publishing -----------------------------------------------------------------------------------


@pytest.mark.engines
async def test_name_and_pointers_change_together(directory: Path) -> None:
    async with opened(directory) as fs:
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
                (runs, name)
                for name in (b".step.tmp", b"step-%d" % step, b"latest", TRACKER.encode())
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


async def test_an_open_tracker_keeps_its_content(directory: Path) -> None:
    async with opened(directory) as fs:
        for step in (1, 2):
            ino = await tree(fs, b"tmp")
            if step == 2:
                old = (await fs.lookup(ROOT, b"tracker")).ino
                handle, *_ = await fs.open(old, os.O_RDONLY)
            await put(
                fs,
                ino,
                "publish-as",
                {"final": f"{step}", "tracker": "tracker", "content": f"{step}"},
            )
        assert bytes(await fs.read(handle, 0, 10)) == b"1"
        await fs.release(handle)
        await fs.collector.drain()
        with pytest.raises(NotFound):
            await fs.getattr(old)


async def test_the_kernel_is_told_that_an_old_tracker_has_lost_a_name(directory: Path) -> None:
    """It may know the link count by another name of the file, which nothing else changes."""
    async with opened(directory) as fs:
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


async def test_a_tracker_that_is_opened_while_it_is_replaced_is_removed_later(
    directory: Path,
) -> None:
    """Until the kernel is told, it opens the old one by the name that it knows; that was erased
    already, and was made again when it was closed, for its access time."""
    async with opened(directory) as fs:
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


async def test_a_file_that_was_erased_is_not_made_again_at_its_close(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_where_the_final_name_may_be(directory: Path) -> None:
    async with opened(directory) as fs:
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
        await put(
            fs, ino, "publish-as", {"final": "tmp", "latest": "latest"}, ROOT_USER
        )  # shown already; the pointer moves
        assert await fs.readlink((await fs.lookup(runs, b"latest")).ino) == b"tmp"


async def test_a_name_that_is_taken(directory: Path) -> None:
    async with opened(directory) as fs:
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
        assert (await fs.lookup(ROOT, b"final")).ino == new and await names(fs) == {
            b"final",
            b"file",
        }
        await fs.doomed.empty()
        with pytest.raises(NotFound):
            await fs.getattr(old)
        await fs.mkdir(ROOT, b"empty", 0o755, OWNER)
        await put(fs, new, "publish-as", {"final": "empty"})
        assert await names(fs) == {b"empty", b"file"}


@pytest.mark.engines
async def test_two_publishers_race_for_a_name(directory: Path) -> None:
    async with opened(directory) as fs:
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
async def test_everything_below_is_durable_before_it_shows(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await tree(fs, b"tmp", files=5)
        sub = await tree(fs, b"sub", parent=ino, files=5)
        unsynced = await marks(fs)
        assert len(unsynced) == 10 and sub
        elsewhere = await make(fs, ROOT, b"elsewhere")
        before = fs.store.engine.durable_seq
        await put(fs, ino, "publish-as", {"final": "final"})
        assert await marks(fs) == {elsewhere}
        assert fs.store.engine.durable_seq == fs.store.engine.seq > before


# --- permissions ----------------------------------------------------------------------------------


async def chmod(fs: Filesystem, ino: int, mode: int, caller: Caller = OWNER) -> None:
    await fs.setattr(ino, SetAttr(mode=mode, uid=caller.uid, gid=caller.gid), ROOT_USER)


async def test_publishing_needs_what_rename_needs(directory: Path) -> None:
    async with opened(directory) as fs:
        above = (await fs.mkdir(ROOT, b"above", 0o755, OWNER)).ino
        here, there = [
            (await fs.mkdir(above, name, 0o755, OWNER)).ino for name in (b"here", b"there")
        ]
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


async def test_a_commit_by_ioctl_needs_write_permission(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await pending(fs, b"tmp")
        with pytest.raises(AccessDenied):
            await fs.commit(ino, 0, b"", False, OTHER)
        with pytest.raises(Invalid):
            await fs.commit(ino, 0, b"../x", False, OWNER)
        await fs.commit(ino, 0, b"0.pt", False, OWNER)
        with pytest.raises(Invalid):
            await fs.commit(ino, 0, b"", False, OWNER)
        await fs.commit(ino, 0, b"", True, OWNER)


# --- from the capacity tier -----------------------------------------------------------------------


async def test_publishing_from_the_capacity_tier_waits_for_the_drain(directory: Path) -> None:
    async with opened(directory) as fs:
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
async def test_a_drain_that_fails_fails_the_publish(
    directory: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(directory) as fs:
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
    monkeypatch.setattr(waiter, "GRACE_S", 0.05)
    async with opened(directory) as fs:
        await put(fs, ROOT, "publish", "capacity", ROOT_USER)
        ino = await tree(fs, b"tmp", files=2)
        handle, *_ = await fs.open((await fs.lookup(ino, b"1.pt")).ino, os.O_RDWR)
        with pytest.raises(Busy):
            await fs.rename(ROOT, b"tmp", ROOT, b"final")
        assert await names(fs) == {b"tmp"}
        monkeypatch.setattr(waiter, "GRACE_S", 20)
        async with trio.open_nursery() as nursery:  # a close that comes late
            nursery.start_soon(fs.rename, ROOT, b"tmp", ROOT, b"final")
            await trio.testing.wait_all_tasks_blocked()
            await fs.release(handle)
        assert await names(fs) == {b"final"}


# --- retention ------------------------------------------------------------------------------------


async def settle(fs: Filesystem, ino: int, expected: set[bytes]) -> None:
    """Wait until the directory holds these names."""
    while await names(fs, ino) != expected:
        await trio.sleep(0.001)


@pytest.mark.engines
async def test_old_checkpoints_go_after_a_publish(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_a_policy_counts_from_when_it_is_set(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3):
            await shown(fs, b"%d" % step, runs)
        await put(fs, runs, "keep", "last=1")
        await settle(fs, runs, {b"3"})


async def test_what_was_not_shown_as_a_whole_neither_counts_nor_goes(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3):
            await saved(fs, runs, f"step-{step}", step)
        await tree(fs, b"step-90", parent=runs)  # half of a save
        copy = await tree(fs, b"step-91", parent=runs, files=1)
        await stores.write_file(
            fs, manifests.NAME, b'{"step": 91, "files": {"0.pt": [20000, ""]}}', copy, OWNER
        )
        await fs.mkdir(runs, b"step-92", 0o755, OWNER)
        await shown(fs, b"step-93", runs, files=0)
        await fs.mkdir((await shown(fs, b"step-94", runs, files=0)), b"sub", 0o755, OWNER)
        unpublished = {b"step-%d" % step for step in range(90, 95)}
        for _ in range(2):
            assert await kept(fs, runs, "last=2") == {b"step-2", b"step-3"} | unpublished
        assert await kept(fs, runs, "bytes=1") == {b"step-3"} | unpublished


@pytest.mark.parametrize("steps", [(700, 1000, 900), (1000, 2, 30)])
async def test_nothing_goes_where_steps_and_times_disagree(
    directory: Path, steps: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A run was taken back to an earlier step; checkpoints were moved in the order of names."""
    async with opened(directory) as fs:
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


async def test_runs_in_one_directory_are_in_the_order_of_publishing(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for name in (b"a-100", b"b-1", b"a-200", b"b-2"):
            await shown(fs, name, runs)
        assert await kept(fs, runs, "last=2") == {b"a-200", b"b-2"}


async def test_what_retention_removes_goes_to_the_trash_and_comes_back_as_it_was(
    directory: Path,
) -> None:
    async with opened(directory) as fs:
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


async def test_what_is_open_or_pointed_at_stays(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_what_is_above_many_open_files_is_not_looked_at_for_each(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    depth, count, seen = 10, 20, []
    async with opened(directory) as fs:
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


async def test_bytes_are_those_of_the_whole_tree(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        await put(fs, runs, "keep", f"bytes={5 * SIZE}")
        for step in (1, 2, 3):
            ino = await tree(fs, b"tmp", parent=runs, files=1)
            await tree(fs, b"sub", parent=ino, files=1)
            await put(fs, ino, "publish-as", {"final": f"{step}"})
        await settle(fs, runs, {b"2", b"3"})


async def test_the_policy_is_the_owners(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_abandoned_pending_directories_are_removed(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory) as fs:
        dead, alive, open_ = [
            await pending(fs, name, ranks=2) for name in (b"dead", b"alive", b"open")
        ]
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


async def test_nobody_has_a_directory_of_others_removed_by_marking_it(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory) as fs:
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


async def test_a_policy_removes_only_what_who_set_it_could_remove(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_an_immutable_checkpoint_stays_and_holds_up_no_other(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3, 4):
            ino = await shown(fs, b"%d" % step, runs)
            if step in (1, 3):
                inside = (await fs.lookup(ino, b"0.pt")).ino
                await fs.set_flags(inside if step == 1 else ino, IMMUTABLE, 0)
        await put(fs, runs, "keep", "last=1")
        await settle(fs, runs, {b"1", b"3", b"4"})
        await fs.retention.enforce(runs)


async def test_a_final_name_tells_nothing_of_where_one_may_not_search(directory: Path) -> None:
    async with opened(directory) as fs:
        secret = (await fs.mkdir(ROOT, b"secret", 0o700, OTHER)).ino
        await fs.mkdir(secret, b"there", 0o755, OTHER)
        ino = await tree(fs, b"tmp")
        for name in ("there", "not"):
            with pytest.raises(AccessDenied):
                await put(fs, ino, "publish-as", {"final": f"secret/{name}/final"})


async def test_a_cancelled_publish_changes_nothing(directory: Path) -> None:
    async with opened(directory) as fs:
        ino = await tree(fs, b"tmp")
        with trio.CancelScope() as scope:
            scope.cancel()
            await put(fs, ino, "publish-as", {"final": "final"})
        assert await names(fs) in ({b"tmp"}, {b"final"})
        await put(fs, ino, "publish-as", {"final": "other"})
        assert await names(fs) == {b"other"}


async def saved(fs: Filesystem, parent: int, name: str, step: int | None, mtime_ns: int = 0) -> int:
    """A checkpoint with a manifest."""
    ino = await tree(fs, b"tmp", parent=parent, files=1)
    text = json.dumps({"step": step, "files": {"0.pt": [SIZE, ""]}}).encode()
    (handle, *_), _ = await fs.create(ino, manifests.NAME, 0o644, os.O_RDWR, OWNER)
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


async def test_the_newest_is_the_one_that_was_published_last(directory: Path) -> None:
    """Not the one that has the newest mtime: of a clock that has gone back, or because a file was
    added.
    """
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        first = await saved(fs, runs, "step-1", 1, time.time_ns() + 10**18)
        await saved(fs, runs, "step-2", 2)
        await make(fs, first, b"evaluation.json")
        assert await kept(fs, runs, "last=1") == {b"step-2"}


async def test_a_damaged_checkpoint_neither_goes_nor_lets_others_go(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3, 4, 5):
            ino = await saved(fs, runs, f"step-{step}", step)
            if step == 1:
                await fs.unlink(ino, b"0.pt")
            if step == 4:
                await fs.setattr((await fs.lookup(ino, b"0.pt")).ino, SetAttr(size=5), ROOT_USER)
            if step == 5:
                handle, *_ = await fs.open((await fs.lookup(ino, manifests.NAME)).ino, os.O_RDWR)
                await fs.write(handle, 0, b"[" * SIZE)
                await fs.release(handle)
        assert await kept(fs, runs, "last=1") == {b"step-1", b"step-3", b"step-4", b"step-5"}


async def test_the_step_is_that_of_the_manifest(directory: Path) -> None:
    async with opened(directory) as fs:
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


async def test_hidden_directories_are_no_checkpoints(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        await tree(fs, b".cache-1", parent=runs)
        for step in (1, 2):
            await saved(fs, runs, f"step-{step}", step)
        assert await kept(fs, runs, "last=1") == {b".cache-1", b"step-2"}


async def test_what_a_symlink_into_it_leads_to_stays(directory: Path) -> None:
    async with opened(directory) as fs:
        runs = await tree(fs, b"runs", files=0)
        for step in (1, 2, 3):
            await saved(fs, runs, f"step-{step}", step)
        await fs.symlink(runs, b"best.pt", b"step-1/0.pt", OWNER)
        assert await kept(fs, runs, "last=1") == {b"step-1", b"step-3", b"best.pt"}


async def test_a_clock_that_leaps_ahead_makes_nothing_old(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(directory) as fs:
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


# --- what has been synced by programs -------------------------------------------------------------


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
            keys.group_member(ROOT, 3): "stray-record",
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
