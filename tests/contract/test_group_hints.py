"""Groups on the filesystem in process: what the hints begin, refuse and tell; which files belong;
who dies; what is left.
"""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
import trio.testing
from blake3 import blake3

from aifs.burst.tier import BurstTier
from aifs.client.checkpoints import manifest
from aifs.core.errors import (
    AccessDenied,
    Busy,
    FsError,
    GroupCancelled,
    GroupTimeout,
    Invalid,
    MemberDied,
    NoAttribute,
    NotADirectory,
    NotFound,
    NotPermitted,
    NotSupported,
    ReadOnly,
    Stale,
    TimedOut,
    Unavailable,
)
from aifs.files.kernel import Kernel
from aifs.meta import keys
from aifs.meta.askers import Asker
from aifs.meta.kv import Transaction
from aifs.saves.group_drain import GroupDrain
from aifs.saves.group_text import parse_group
from aifs.vfs import Caller, Filesystem
from tests.support import modes, stores
from tests.support.stores import LIMIT_S, OWNER, call, opened, put, read_file, served
from tests.support.stores import fs as fs

ROOT, ADMIN = 1, Caller()
MEMBER = Asker(OWNER.uid, (OWNER.gid, 4242))
SIZE = 100 << 10


@pytest.fixture
def process() -> Iterator[subprocess.Popen]:
    """A process that may be a rank."""
    with subprocess.Popen(["sleep", "1000"]) as started:
        yield started
        started.kill()


async def make(fs: Filesystem, parent: int, name: bytes, data: bytes) -> int:
    """A closed file of OWNER's."""
    return await stores.write_file(fs, name, data, parent, OWNER)


async def tree(fs: Filesystem, name: bytes, parent: int = ROOT) -> int:
    return (await fs.mkdir(parent, name, 0o755, OWNER)).ino


async def group_in(fs: Filesystem, text: str, name: bytes = b"step", caller: Caller = OWNER) -> int:
    """A directory with a group."""
    ino = await tree(fs, name)
    await put(fs, ino, "group", "name=step," + text, caller)
    return ino


async def ask(fs: Filesystem, ino: int, name: str = "group") -> dict:
    return await stores.ask(fs, ino, name)


async def state(fs: Filesystem, ino: int) -> str:
    """Where a file's bytes are."""
    return (await ask(fs, ino, "state"))["state"]


async def until(
    fs: Filesystem, ino: int, holds: Callable[[dict], bool], hint: str = "group"
) -> dict:
    """Wait for what happens in the background: until this holds of what a hint tells."""
    while not holds(told := await ask(fs, ino, hint)):
        await trio.sleep(0.002)
    return told


async def durable(fs: Filesystem, ino: int) -> dict:
    """What is told of a group once it is durable."""
    await fs.groups.wait(ino, 0, True, LIMIT_S)
    return await ask(fs, ino)


async def drained(fs: Filesystem, ino: int) -> None:
    await until(fs, ino, lambda told: told["state"] in ("clean", "cached"), "state")


async def in_state(fs: Filesystem, ino: int, wanted: str) -> dict:
    return await until(fs, ino, lambda told: told["state"] == wanted)


# --- committing -----------------------------------------------------------------------------------


@pytest.mark.engines
async def test_files_are_one_write_when_all_have_been_closed(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=3")
    below = await tree(fs, b"below", top)
    data = os.urandom(SIZE)
    inos = [await make(fs, top, b"a", data), await make(fs, below, b"b", data)]
    told = await ask(fs, top)
    assert (told["state"], told["missing_files"], told["file_count"], told["bytes"]) == (
        "open",
        1,
        2,
        2 * SIZE,
    )
    assert {file["name"] for file in told["files"]} == {"/step/a", "/step/below/b"}
    assert [await state(fs, ino) for ino in inos] != ["cached", "cached"]
    assert fs.drain.status()["withheld_files"] == 2
    assert (await ask(fs, inos[1]))["id"] == told["id"] == (await ask(fs, below))["id"]
    inos.append(await make(fs, top, b"c", bytes(SIZE)))
    told = await durable(fs, top)
    assert (told["bytes"], told["duplicate_bytes"], told["zero_bytes"]) == (3 * SIZE, SIZE, SIZE)
    assert (
        told["times"]["durable"]
        >= told["times"]["buffered"]
        >= told["times"]["committed"]
        >= told["times"]["open"]
    )
    assert {file["state"] for file in told["files"]} == {"durable"}
    assert [await state(fs, ino) for ino in inos] == ["cached"] * 3
    assert [await read_file(fs, ino) for ino in inos] == [data, data, bytes(SIZE)]
    status = (await ask(fs, ROOT, "status"))["groups"]
    assert (status["open"], status["committed"], status["durable"]) == (0, 0, 1)
    assert status["saved_bytes"] == 2 * SIZE and status["last"]["bytes"] == 3 * SIZE
    assert fs.drain.status()["files"] == 0


@pytest.mark.engines
async def test_ranks_commit_one_after_the_other(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2,commit=explicit")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    (handle, *_), late = await fs.create(top, b"late", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"l" * SIZE)
    await put(fs, top, "group.commit", "1")
    told = await ask(fs, top)
    assert told["missing"] == [0] and [rank["state"] for rank in told["members"]] == [
        "missing",
        "committed",
    ]
    assert ino not in fs.io.table.unsynced
    for wrong, named in (
        ("1", "committed already"),
        ("2", "0 to 1"),
        ("-1", "not a rank"),
        ("", "not a rank"),
    ):
        with pytest.raises(Invalid, match=named):
            await put(fs, top, "group.commit", wrong)
    await put(fs, top, "group.commit", "0")
    assert (await ask(fs, top))["state"] in ("draining", "durable")
    told = await durable(fs, top)
    assert told["file_count"] == 1, "what is being written belongs to nobody"
    assert await state(fs, late.ino) == "dirty"
    await fs.release(handle)
    await drained(fs, late.ino)


async def test_a_file_may_count_while_it_is_open(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    (handle, *_), inode = await fs.create(top, b"a", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"a" * SIZE)
    other = await fs.open(inode.ino, os.O_WRONLY)
    with pytest.raises(Busy):
        await put(fs, inode.ino, "group.commit")
    await fs.release(other.handle)
    await put(fs, inode.ino, "group.commit")
    assert (await ask(fs, top))["missing_files"] == 1
    ino = await make(fs, top, b"b", b"a" * SIZE)
    await fs.groups.wait(top, 0, False, LIMIT_S)
    await drained(fs, ino)
    assert (await ask(fs, top))["state"] == "draining"
    with pytest.raises(TimedOut):
        await fs.groups.wait(top, 0, True, 0.01)
    with pytest.raises(Busy, match="draining"):
        await put(fs, top, "group", "name=next,ranks=2")
    await fs.release(handle)
    told = await durable(fs, top)
    assert told["found_bytes"] + told["duplicate_bytes"] >= SIZE


async def test_tiny_and_empty_files_count(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=3")
    inos = [
        await make(fs, top, name, data)
        for name, data in ((b"a", b""), (b"b", b"tiny"), (b"c", b"c" * SIZE))
    ]
    await durable(fs, top)
    assert [await read_file(fs, ino) for ino in inos] == [b"", b"tiny", b"c" * SIZE]


@pytest.mark.store({"burst.directories": ""})
async def test_a_store_without_a_burst_tier_has_groups(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    inos = [await make(fs, top, name, b"x" * SIZE) for name in (b"a", b"b")]
    assert (await durable(fs, top))["file_count"] == 2
    assert [await read_file(fs, ino) for ino in inos] == [b"x" * SIZE] * 2


# --- beginning and ending -------------------------------------------------------------------------


async def test_all_ranks_may_begin_the_same_group(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2,commit=explicit")
    number = (await ask(fs, top))["id"]
    async with trio.open_nursery() as nursery:
        for _ in range(8):
            nursery.start_soon(put, fs, top, "group", "ranks=2,name=step,commit=explicit")
    assert (await ask(fs, top))["id"] == number
    with pytest.raises(Invalid, match="another group is open: name=step,ranks=2"):
        await put(fs, top, "group", "name=step,ranks=3,commit=explicit")
    assert "another group is open" in (await ask(fs, top))["refused"]
    for rank in "01":
        await put(fs, top, "group.commit", rank)
    await durable(fs, top)
    await put(fs, top, "group", "name=step,ranks=3,commit=explicit")
    told = await ask(fs, top)
    assert told["id"] > number and told["state"] == "open" and told["missing"] == [0, 1, 2]
    await fs.groups.wait(top, number, True, 1)
    with pytest.raises(Stale):
        await fs.groups.wait(top, told["id"] + 1, True, 1)


@pytest.mark.engines
async def test_many_may_begin_at_the_same_time(fs: Filesystem) -> None:
    top, found = await tree(fs, b"step"), set()

    async def begin() -> None:
        found.add((await fs.groups.begin(top, parse_group("name=a,ranks=9"), OWNER)).record.id)

    async with trio.open_nursery() as nursery:
        for _ in range(9):
            nursery.start_soon(begin)
    assert len(found) == 1


async def test_where_there_is_no_group(fs: Filesystem) -> None:
    top = await tree(fs, b"top")
    ino = await make(fs, top, b"a", b"a")
    for request in (
        ask(fs, top),
        ask(fs, ino),
        put(fs, top, "group.commit", "0"),
        put(fs, ino, "group.commit"),
        fs.removexattr(top, b"user.aifs.group"),
        fs.groups.wait(top, 0, True, 1),
    ):
        with pytest.raises(NoAttribute):
            await request
    with pytest.raises(Invalid, match="directory"):
        await put(fs, ino, "group", "name=a,ranks=1")
    with pytest.raises(NotADirectory):
        await call(fs, ino, "group", name="a", ranks=1)
    assert await fs.listxattr(top) == []


@pytest.mark.sweep
@pytest.mark.parametrize("by", ["remove", "empty"])
async def test_a_cancelled_group_leaves_its_files_to_the_usual_drain(fs, by):
    top = await group_in(fs, "ranks=2")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    failed = trio.Event()

    async def wait() -> None:
        with pytest.raises(GroupCancelled, match="it was cancelled"):
            await fs.groups.wait(top, 0, True, None)
        failed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.testing.wait_all_tasks_blocked()
        if by == "remove":
            await fs.removexattr(top, b"user.aifs.group")
        else:
            await put(fs, top, "group", "")
        await failed.wait()
    await drained(fs, ino)
    assert (await ask(fs, top))["state"] == "cancelled" and await read_file(fs, ino) == b"a" * SIZE
    await fs.groups.cancel(top)
    await put(fs, top, "group", "name=step,ranks=1")
    assert (await ask(fs, top))["error"] == ""


async def test_an_expired_group_names_who_is_missing(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=3,commit=explicit,timeout=300ms")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    with pytest.raises(GroupTimeout, match="of 3 ranks have not committed: 0, "):
        await put(fs, top, "group.commit", "1")  # which may come too late on a slow machine
        await fs.groups.wait(top, 0, False, None)
    told = await in_state(fs, top, "expired")
    assert told["error"].startswith("after 0.3 s")
    await drained(fs, ino)
    with pytest.raises(GroupTimeout):
        await put(fs, top, "group.commit", "0")


async def test_a_directory_that_is_removed_takes_its_group_with_it(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=1,commit=explicit")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await fs.unlink(top, b"a")
    assert (await ask(fs, top))["file_count"] == 0
    await fs.rmdir(ROOT, b"step")
    fs.forget([ino, top])
    with pytest.raises(GroupCancelled):
        await fs.groups.wait(top, 0, True, None)


async def test_a_tree_that_is_removed_takes_its_groups_with_it(fs: Filesystem) -> None:
    """In one stroke, with directories and files in it, of which one is open."""
    outer = await group_in(fs, "ranks=9")
    top = await tree(fs, b"below", outer)
    inner = await group_in(fs, "ranks=9", b"inner")
    await fs.rename(ROOT, b"inner", outer, b"inner")
    await make(fs, top, b"a", b"a" * SIZE)
    ino = await make(fs, inner, b"b", b"b" * SIZE)
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    await fs.remove_tree(ROOT, b"step")
    for directory_ino in (outer, inner):
        with pytest.raises(GroupCancelled):
            await fs.groups.wait(directory_ino, 0, True, None)

    while fs.doomed.status()["trees"]:
        await trio.sleep(0.002)
    assert fs.group_life.status()["files"] == 0
    await fs.release(handle)


async def test_nobody_waits_for_a_group_in_a_read_only_mount(directory: Path) -> None:
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2")
        ended = await group_in(fs, "ranks=1", b"ended")
        await make(fs, ended, b"a", b"a" * SIZE)
        await durable(fs, ended)
    async with served(modes.config_of(directory), read_only=True) as fs:
        with pytest.raises(ReadOnly):
            await call(fs, top, "group.wait", **{"for": "buffered"})
        await call(fs, ended, "group.wait")


async def test_in_a_sticky_directory_its_owner_alone_has_groups(fs: Filesystem) -> None:
    """As for extended attributes, by which others cannot set one either."""
    top = (await fs.mkdir(ROOT, b"tmp", 0o1777, OWNER)).ino
    options = {"name": "a", "ranks": 1, "commit": "explicit"}
    with pytest.raises(NotPermitted):
        await call(fs, top, "group", Caller(uid=2000), **options)
    await call(fs, top, "group", OWNER, **options)
    with pytest.raises(NotPermitted):
        await call(fs, top, "group.cancel", Caller(uid=2000))
    await call(fs, top, "group.cancel", OWNER)


async def test_a_read_only_mount_tells_and_changes_nothing(directory: Path) -> None:
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2")
        await make(fs, top, b"a", b"a" * SIZE)
        await fs.sync()
    async with served(modes.config_of(directory), read_only=True) as fs:
        assert (await ask(fs, top))["file_count"] == 1
        with pytest.raises(ReadOnly):
            await call(fs, top, "group", name="a", ranks=1)
        for text in ("", "seed=7"):
            with pytest.raises(ReadOnly):
                await put(fs, top, "order", text)


# --- which files belong ---------------------------------------------------------------------------


@pytest.mark.store({"burst.drain_delay": "1h"})
async def test_files_belong_by_where_they_are_when_they_are_closed(fs: Filesystem) -> None:
    top = await tree(fs, b"step")
    old = await make(fs, top, b"old", b"o" * SIZE)
    outside = await make(fs, ROOT, b"outside", b"x" * SIZE)
    await put(fs, top, "group", "name=step,ranks=9")
    inner = await tree(fs, b"inner", top)
    await put(fs, inner, "group", "name=inner,ranks=9")
    assert (await ask(fs, top))["file_count"] == 0, "what was closed before does not belong"
    handle, *_ = await fs.open(old, os.O_RDWR)
    await fs.write(handle, 0, b"new")
    await fs.release(handle)
    await make(fs, inner, b"deep", b"d" * SIZE)
    (handle, *_), moved = await fs.create(ROOT, b"tmp", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"m" * SIZE)
    await fs.rename(ROOT, b"tmp", top, b"moved")
    await fs.release(handle)
    (handle, *_), linked = await fs.create(top, b"linked", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"l" * SIZE)
    await fs.link(linked.ino, ROOT, b"link")
    await fs.release(handle)
    handle, *_ = await fs.open(outside, os.O_RDONLY)
    await fs.release(handle)
    names = {file["name"] for file in (await ask(fs, top))["files"]}
    assert names == {"/step/old", "/step/moved"}
    assert [file["name"] for file in (await ask(fs, inner))["files"]] == ["/step/inner/deep"]
    assert (await ask(fs, moved.ino))["name"] == "step" and (await ask(fs, inner))[
        "name"
    ] == "inner"
    with pytest.raises(NoAttribute):
        await ask(fs, outside)
    for ino in (top, inner):
        await fs.groups.cancel(ino)


@pytest.mark.store({"burst.drain_delay": "1h"})
async def test_a_file_that_is_written_again_elsewhere_belongs_there(fs: Filesystem) -> None:
    top, other = await group_in(fs, "ranks=9"), await group_in(fs, "ranks=2", b"other")
    inos = [await make(fs, top, name, name * SIZE) for name in (b"a", b"c")]
    for ino, name, target in ((inos[0], b"a", other), (inos[1], b"c", ROOT)):
        await fs.rename(top, name, target, name)
        assert ino in {file["ino"] for file in (await ask(fs, top))["files"]}
        handle, *_ = await fs.open(ino, os.O_RDWR)
        await fs.write(handle, 0, b"new")
        await fs.release(handle)
    assert (await ask(fs, top))["file_count"] == 0
    assert {file["ino"] for file in (await ask(fs, other))["files"]} == {inos[0]}
    await make(fs, other, b"d", b"d" * SIZE)
    assert (await durable(fs, other))["file_count"] == 2
    assert await state(fs, inos[0]) == "cached" and await state(fs, inos[1]) == "dirty"
    await fs.wait_drained(ROOT, LIMIT_S)
    assert await read_file(fs, inos[1]) == b"new" + b"c" * (SIZE - 3)
    await fs.groups.cancel(top)


async def test_a_reader_changes_nothing(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    for _ in range(3):
        assert await read_file(fs, ino) == b"a" * SIZE
    told = await ask(fs, top)
    assert told["missing_files"] == 1 and told["file_count"] == 1
    assert fs.drain.status()["withheld_files"] == 1
    await make(fs, top, b"b", b"a" * SIZE)
    await durable(fs, top)


async def test_a_file_that_is_opened_again_counts_when_it_is_closed(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await until(fs, top, lambda told: told["files"][0]["state"] == "prepared")
    handle, *_ = await fs.open(ino, os.O_RDWR)
    told = await ask(fs, top)
    assert told["missing_files"] == 2 and told["files"][0]["state"] == "writing"
    await make(fs, top, b"b", b"b" * SIZE)
    await fs.write(handle, SIZE, b"c" * SIZE)
    assert (await ask(fs, top))["state"] == "open"
    await fs.release(handle)
    told = await durable(fs, top)
    assert told["bytes"] == 3 * SIZE and await read_file(fs, ino) == b"a" * SIZE + b"c" * SIZE


@pytest.mark.parametrize("prepared", [False, True])
async def test_a_truncated_file_is_stored_as_it_is_then(directory: Path, prepared: bool) -> None:
    from aifs.files.types import SetAttr

    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,commit=explicit")
        ino = await make(fs, top, b"a", b"a" * SIZE)
        if prepared:
            await until(fs, top, lambda told: told["files"][0]["state"] == "prepared")
        await fs.setattr(ino, SetAttr(size=SIZE // 2), OWNER)
        for rank in "01":
            await put(fs, top, "group.commit", rank)
        assert (await durable(fs, top))["bytes"] == SIZE // 2
        assert await read_file(fs, ino) == b"a" * (SIZE // 2)


@pytest.mark.engines
async def test_a_file_that_is_written_after_the_commit_is_drained_as_usual(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, store = trio.Event(), GroupDrain.store

    async def held(self: GroupDrain, *args: object) -> None:
        await go.wait()
        await store(self, *args)

    monkeypatch.setattr(GroupDrain, "store", held)
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2")
        inos = [await make(fs, top, name, b"a" * SIZE) for name in (b"a", b"b")]
        await fs.groups.wait(top, 0, False, LIMIT_S)
        handle, *_ = await fs.open(inos[0], os.O_RDWR)
        await fs.write(handle, 0, b"changed")
        go.set()
        told = await durable(fs, top)
        assert [file["name"] for file in told["files"]] == ["/step/b"]
        assert await state(fs, inos[0]) == "dirty"
        await fs.release(handle)
        await drained(fs, inos[0])
        assert (await read_file(fs, inos[0]))[:8] == b"changeda"


async def test_a_file_that_is_unlinked_belongs_no_more(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await fs.unlink(top, b"a")
    fs.forget([ino])
    assert (await ask(fs, top))["missing_files"] == 2
    for name in (b"b", b"c"):
        await make(fs, top, name, b"a" * SIZE)
    assert (await durable(fs, top))["file_count"] == 2


# --- the usual drain ------------------------------------------------------------------------------


async def test_a_drain_that_is_asked_for_does_not_wait_for_the_group(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await fs.wait_drained(ROOT, LIMIT_S)
    assert await state(fs, ino) == "cached" and (await ask(fs, top))["files"][0]["state"] == "usual"
    await make(fs, top, b"b", b"b" * SIZE)
    assert (await durable(fs, top))["bytes"] == SIZE, "of what the group has stored"


async def test_pressure_does_not_wait_for_the_group(fs, monkeypatch):
    top = await group_in(fs, "ranks=3")
    first = await make(fs, top, b"a", b"a" * SIZE)
    monkeypatch.setattr(BurstTier, "pressure", 1.0)
    second = await make(fs, top, b"b", b"b" * SIZE)
    for ino in (first, second):
        await drained(fs, ino)
    monkeypatch.undo()
    await make(fs, top, b"c", b"c" * SIZE)
    assert (await durable(fs, top))["file_count"] == 3


async def test_pressure_is_looked_for_again(fs, monkeypatch):
    """Though at some time there was nothing that it could have taken."""
    top = await group_in(fs, "ranks=9")
    for name in (b"a", b"b"):
        ino = await make(fs, top, name, name * SIZE)
        with monkeypatch.context() as patch:
            patch.setattr(BurstTier, "pressure", 1.0)
            await drained(fs, ino)
    await fs.groups.cancel(top)


async def test_an_unmount_takes_nothing_from_who_is_storing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads read from descriptors that would be closed, or others' by then."""
    held: list[bool] = []
    storing = trio.Event()

    async def store(self: GroupDrain, members: list, *rest: object) -> None:
        try:
            storing.set()
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.testing.wait_all_tasks_blocked(0.05)
                held.extend(member.file is not None for member in members)
                for member in members:
                    await self.release(member)

    monkeypatch.setattr(GroupDrain, "store", store)
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2")
        for name in (b"a", b"b"):
            await make(fs, top, name, name * SIZE)
        await storing.wait()
    assert held == [True, True]
    monkeypatch.undo()
    async with opened(directory) as fs:
        await durable(fs, top)


@pytest.mark.sweep
@pytest.mark.store({"burst.drain_deadline": "1s"})
async def test_the_deadline_does_not_wait_for_the_group(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=2")
    await drained(fs, await make(fs, top, b"a", b"a" * SIZE))
    assert (await ask(fs, top))["state"] == "open"


async def test_what_cannot_be_stored_is_tried_again_and_then_left_to_the_usual_drain(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.saves.members._BACK_OFF_S", 0.001)

    async def fail(self: GroupDrain, members: list, *_: object) -> None:
        for member in members:
            member.outcome = Unavailable("no such luck")
            await self.release(member)

    monkeypatch.setattr(GroupDrain, "store", fail)
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=1")
        ino = await make(fs, top, b"a", b"a" * SIZE)
        told = await durable(fs, top)
        assert told["files"][0]["state"] == "usual" and await state(fs, ino) == "cached"


# --- ranks that die -------------------------------------------------------------------------------


async def test_a_rank_that_dies_is_told_to_all_at_once(fs, process):
    top = await group_in(fs, "ranks=3,commit=explicit")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await call(fs, top, "group.join", Caller(pid=process.pid), rank=2)
    await call(fs, top, "group.join", Caller(pid=process.pid), rank=2)
    with pytest.raises(Invalid, match=f"rank 2 has been joined by process {process.pid}"):
        await call(fs, top, "group.join", Caller(pid=os.getpid()), rank=2)
    with pytest.raises(NotSupported):
        await call(fs, top, "group.join", Caller(pid=0), rank=1)
    await put(fs, top, "group.commit", "0")
    assert [rank["state"] for rank in (await ask(fs, top))["members"]] == [
        "committed",
        "missing",
        "joined",
    ]
    process.kill()
    with pytest.raises(MemberDied, match="rank 2 ended before it committed"):
        await fs.groups.wait(top, 0, True, None)
    told = await ask(fs, top)
    assert (told["state"], told["dead"], told["error"]) == (
        "failed",
        2,
        "rank 2 ended before it committed",
    )
    with pytest.raises(MemberDied):
        await put(fs, top, "group.commit", "1")
    await drained(fs, ino)
    await put(fs, top, "group", "name=step,ranks=1,commit=explicit")
    assert (await ask(fs, top))["dead"] is None


async def test_a_rank_comes_back_within_its_grace(fs, process):
    top = await group_in(fs, "ranks=2,commit=explicit,grace=1h")
    await call(fs, top, "group.join", Caller(pid=process.pid), rank=1)
    process.kill()
    await until(fs, top, lambda told: told["members"][1]["state"] == "away")
    await call(fs, top, "group.join", Caller(pid=os.getpid()), rank=1)
    for rank in "01":
        await put(fs, top, "group.commit", rank)
    await durable(fs, top)


async def test_a_rank_that_has_committed_may_end(fs: Filesystem, process: subprocess.Popen) -> None:
    top = await group_in(fs, "ranks=2,commit=explicit")
    await call(fs, top, "group.join", Caller(pid=process.pid), rank=1)
    await put(fs, top, "group.commit", "1")
    process.kill()
    await until(fs, top, lambda told: told["members"][1]["pid"] is None)
    await put(fs, top, "group.commit", "0")
    await durable(fs, top)


# --- pending directories --------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["commit", "group.commit"])
async def test_the_last_commit_publishes_a_pending_directory(fs: Filesystem, by: str) -> None:
    top = await group_in(fs, "ranks=2,commit=explicit,publish=final", b"final.pending", ADMIN)
    await put(fs, top, "pending", "ranks=2,step=1")
    ino = await make(fs, top, b"a", b"a" * SIZE)
    await put(fs, top, by, "0")
    assert (await ask(fs, top, "pending"))["missing"] == (await ask(fs, top))["missing"] == [1]
    await put(fs, top, by, "1")
    if by == "commit":
        await fs.groups.wait(top, 0, False, LIMIT_S)
    assert (await fs.lookup(ROOT, b"final")).ino == top and (await ask(fs, top))["published"]
    with pytest.raises(NoAttribute):
        await ask(fs, top, "pending")
    assert (await durable(fs, top))["publish_error"] == "" and await read_file(
        fs, ino
    ) == b"a" * SIZE


async def test_closing_files_does_not_publish_a_pending_directory(fs: Filesystem) -> None:
    """Its ranks have to commit, so who asks for both is told at once, and not when all have
    written."""
    top = await tree(fs, b"final.pending")
    await put(fs, top, "pending", "ranks=2,step=1")
    with pytest.raises(Invalid, match="commit=explicit"):
        await put(fs, top, "group", "name=step,ranks=2,publish=final")
    await put(fs, top, "group", "name=step,ranks=2,commit=explicit,publish=final")


async def test_closing_may_publish_from_the_capacity_tier(fs: Filesystem) -> None:
    await put(fs, ROOT, "publish", "capacity", ADMIN)
    top = await group_in(fs, "ranks=2,publish=final", b"tmp", ADMIN)
    inos = [await make(fs, top, name, b"a" * SIZE) for name in (b"a", b"b")]
    await fs.groups.wait(top, 0, False, LIMIT_S)
    assert (await fs.lookup(ROOT, b"final")).ino == top
    assert [await state(fs, ino) for ino in inos] == ["cached"] * 2
    assert (await durable(fs, top))["duplicate_bytes"] >= SIZE, "as a group all the same"


async def test_a_publish_that_fails_is_told(fs: Filesystem) -> None:
    await make(fs, await tree(fs, b"final"), b"in the way", b"x")
    top = await group_in(fs, "ranks=1,commit=explicit,publish=final", b"tmp", ADMIN)
    await make(fs, top, b"a", b"a" * SIZE)
    with pytest.raises(FsError) as caught:
        await put(fs, top, "group.commit", "0")
    assert caught.value.errno == errno.ENOTEMPTY
    told = await durable(fs, top)
    assert not told["published"] and told["publish_error"]
    assert (await fs.lookup(ROOT, b"tmp")).ino == top
    with pytest.raises(NotFound):
        await fs.lookup(top, manifest.NAME.encode())


async def test_a_publish_that_fails_after_it_is_shown_leaves_the_manifest(fs, monkeypatch):

    async def fail(_: Kernel, names: list[tuple[int, bytes]]) -> None:
        if (ROOT, b"latest") in names:
            raise Unavailable("the database is away")

    top = await group_in(fs, "ranks=1,commit=explicit,publish=step-7", b"tmp", ADMIN)
    await make(fs, top, b"a", b"a" * SIZE)
    monkeypatch.setattr(Kernel, "forget_names", fail)
    with pytest.raises(Unavailable):
        await put(fs, top, "group.commit", "0")
    assert (await fs.lookup(ROOT, b"step-7")).ino == top
    assert manifest.decode(
        await read_file(fs, (await fs.lookup(top, manifest.NAME.encode())).ino)
    ).files


async def test_a_group_is_published_as_a_checkpoint(fs: Filesystem) -> None:
    """By its hint it had no manifest, and ``latest`` stayed where it was."""
    await fs.symlink(ROOT, b"latest", b"step-1", ADMIN)
    top = await group_in(fs, "ranks=2,publish=step-7", b"tmp", ADMIN)
    deep = (await fs.mkdir(top, b"deep", 0o755, ADMIN)).ino
    await make(fs, top, b"a", b"a" * SIZE)
    await make(fs, deep, b"b", b"b" * 100)
    await fs.groups.wait(top, 0, False, LIMIT_S)
    assert (await fs.lookup(ROOT, b"step-7")).ino == top
    assert await fs.readlink((await fs.lookup(ROOT, b"latest")).ino) == b"step-7"
    written = await read_file(fs, (await fs.lookup(top, manifest.NAME.encode())).ino)
    found = manifest.decode(written)
    assert (found.step, found.ranks) == (7, 2)
    assert found.files == {
        "a": (SIZE, blake3(b"a" * SIZE).hexdigest()),
        "deep/b": (100, blake3(b"b" * 100).hexdigest()),
    }
    names = [entry[0] for entry in await fs.readdir(top, 0)]
    assert sorted(names) == sorted([b"a", b"deep", manifest.NAME.encode()])


async def test_who_begins_a_group_must_be_allowed_to_publish(fs: Filesystem) -> None:
    top = await group_in(fs, "ranks=1,commit=explicit,publish=final")
    with pytest.raises(AccessDenied):
        await put(fs, top, "group.commit", "0", ADMIN)
    with pytest.raises(AccessDenied):
        await call(fs, top, "group.commit", Caller(uid=2000), rank=0)
    assert (await durable(fs, top))["published"] is False


@pytest.mark.sweep
@pytest.mark.parametrize("restarted", [False, True])
async def test_all_groups_of_who_begins_a_group_count_when_it_is_published(
    directory: Path, restarted: bool
) -> None:
    """In a directory of a team that is one of the supplementary groups of its members."""
    async with opened(directory) as fs:
        team = (await fs.mkdir(ROOT, b"team", 0o770, Caller(gid=4242))).ino
        top = (await fs.mkdir(team, b"step", 0o755, OWNER)).ino
        await put(fs, top, "group", "name=step,ranks=1,commit=explicit,publish=final", MEMBER)
        if not restarted:
            await put(fs, top, "group.commit", "0")
    async with opened(directory) as fs:
        if restarted:
            await put(fs, top, "group.commit", "0")
        assert (await fs.lookup(team, b"final")).ino == top


@pytest.mark.parametrize("first", ["group", "pending"])
async def test_a_group_and_a_pending_directory_have_the_same_ranks(fs, first):
    """They are one: who asks for another number is told at once."""
    for number, text in enumerate(("ranks=1,commit=explicit", "ranks=2")):
        top = await tree(fs, b"%d" % number)
        wanted = [("pending", "ranks=2,step=1"), ("group", f"name=step,{text}")]
        if first == "group":
            wanted.reverse()
        await put(fs, top, *wanted[0])
        with pytest.raises(Invalid, match="needs commit=explicit"):
            await put(fs, top, *wanted[1])


async def test_a_group_that_is_to_be_published_keeps_its_directory_pending(fs: Filesystem) -> None:
    """P4 and P5 of docs/design/commit.md."""
    top = await group_in(fs, "ranks=2,commit=explicit,publish=final", b"tmp", ADMIN)
    await make(fs, top, b"a", b"a" * SIZE)
    await put(fs, top, "group.commit", {"rank": 0, "files": {"a": SIZE}})
    with pytest.raises(Busy, match="1 of 2 ranks have not committed: 1"):
        await fs.rename(ROOT, b"tmp", ROOT, b"other")
    await fs.unlink(top, b"a")
    with pytest.raises(FsError, match="'a' is missing"):
        await put(fs, top, "group.commit", "1")
    assert "'a' is missing" in (await durable(fs, top))["publish_error"]
    await fs.rename(ROOT, b"tmp", ROOT, b"other")


async def test_a_directory_stays_pending_when_its_group_fails(directory: Path) -> None:
    async with opened(directory) as fs:
        top = await tree(fs, b"tmp")
        await put(fs, top, "pending", "ranks=2")
        await put(fs, top, "commit", "0")
        await put(fs, top, "group", "name=step,ranks=2,commit=explicit,timeout=10ms")
        assert (await in_state(fs, top, "expired"))["pending"]
    async with opened(directory) as fs:
        with pytest.raises(Busy, match="1 of 2 ranks have not committed: 1"):
            await fs.rename(ROOT, b"tmp", ROOT, b"final")
        with pytest.raises(FsError, match="after 0.01 s, 1 of 2 ranks"):
            await put(fs, top, "group.commit", "1")
        await put(fs, top, "commit", "1")
        await fs.rename(ROOT, b"tmp", ROOT, b"final")
        assert (await ask(fs, top))["state"] == "expired", "as it ended"


# --- from mount to mount --------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("commit", ["close", "explicit"])
async def test_an_open_group_goes_on_after_a_mount(directory: Path, commit: str) -> None:
    data = os.urandom(SIZE)
    async with opened(directory) as fs:
        top = await group_in(fs, f"ranks=2,commit={commit},timeout=1h")
        first = await make(fs, top, b"a", data)
        if commit == "explicit":
            await put(fs, top, "group.commit", "1")
        else:
            await until(fs, top, lambda told: told["files"][0]["state"] == "prepared")
        before = await ask(fs, top)
    async with opened(directory) as fs:
        told = await ask(fs, top)
        assert told["id"] == before["id"] and told["state"] == "open" and told["file_count"] == 1
        assert (
            told["times"]["open"] == before["times"]["open"]
            and told["missing"] == before["missing"]
        )
        assert told["missing_files"] == before["missing_files"]
        second = await make(fs, top, b"b", data)
        if commit == "explicit":
            await put(fs, top, "group.commit", "0")
        told = await durable(fs, top)
        assert (
            told["duplicate_bytes"] == SIZE
            and [await read_file(fs, ino) for ino in (first, second)] == [data] * 2
        )
        again = await ask(fs, top)
    async with opened(directory) as fs:
        told = await ask(fs, top)
        assert (
            told["state"] == "durable"
            and told["duplicate_bytes"] == SIZE
            and told["times"] == again["times"]
        )
        await put(fs, top, "group", "name=step,ranks=2")


async def test_a_committed_group_is_drained_by_the_next_mount(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(*_: object) -> None:
        await trio.sleep_forever()

    monkeypatch.setattr(GroupDrain, "store", wait)
    async with opened(directory) as fs:
        top = await group_in(fs, "ranks=2,commit=explicit")
        for name, rank in ((b"a", "0"), (b"b", "1")):
            await make(fs, top, name, b"a" * SIZE)
            await put(fs, top, "group.commit", rank)
        await in_state(fs, top, "draining")
    monkeypatch.undo()
    async with opened(directory) as fs:
        assert (await durable(fs, top))["duplicate_bytes"] >= SIZE


async def test_groups_that_ended_long_ago_are_on_record(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.saves.table._ENDED_MAX", 2)
    async with opened(directory) as fs:
        tops = [await group_in(fs, "ranks=1", b"%d" % number) for number in range(6)]
        for top in tops:
            await make(fs, top, b"a", b"a" * SIZE)
            await durable(fs, top)
        assert [(await ask(fs, top))["state"] for top in tops] == ["durable"] * 6
        assert len(fs.group_table.by_directory) <= 3


async def test_a_damaged_record_is_told_and_keeps_nothing_from_being_drained(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(directory, sound=False) as fs:
        top = await group_in(fs, "ranks=2")
        ino = await make(fs, top, b"a", b"a" * SIZE)

        def damage(tx: Transaction) -> None:
            tx.put(keys.group(top), b"\x07")

        await fs.store.engine.transact(damage)
    async with opened(directory) as fs:
        assert f"the group of directory {top} is damaged" in caplog.text
        caplog.clear()
        await drained(fs, ino)
        with pytest.raises(Unavailable):
            await ask(fs, top)
        await put(fs, top, "group", "name=step,ranks=2")
        assert (await ask(fs, top))["state"] == "open"
