"""The trash, on the filesystem in process: what goes there, who finds it, how it comes back, and
when it goes.
"""

import errno
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest
import trio

from aifs.check import repair
from aifs.check.fsck import check
from aifs.core.errors import (
    AccessDenied,
    Busy,
    CrossDevice,
    Exists,
    FsError,
    Invalid,
    NoAttribute,
    NotFound,
    ReadOnly,
)
from aifs.core.upkeep import NEVER_S
from aifs.data.storage import Space
from aifs.files.types import ROOT
from aifs.meta import keys, namespace, restoring, trash
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.publishing import Publication
from aifs.meta.trash import Entry
from aifs.upkeep.trash import SPARE, Trash
from aifs.vfs import Caller, Filesystem, SetAttr
from aifs.vfs.trash_requests import TOGETHER_S, Restoring
from tests.support import modes, stores
from tests.support.stores import OWNER, drained, numbers, put, read_file, write_file

OTHER = Caller(uid=2000, gid=2000)
DATA = b"what was removed" * 1000
DAY_NS = 86_400 * 10**9
SHAPE = modes.WAITING | {"layout.unit": "4KiB"}

opened = partial(stores.opened, base=SHAPE)


@pytest.fixture(autouse=True)
def at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trash is emptied when a test says so."""

    async def rest(self: Trash) -> float:
        return NEVER_S

    monkeypatch.setattr(Trash, "work", rest)


@asynccontextmanager
async def with_trash(directory: Path, **options: object) -> AsyncIterator[Filesystem]:
    """A store in which all that is removed is kept for a week, and anybody may make names in the
    root."""
    async with opened(directory, {"trash.keep": "7d"}, **options) as fs:
        await fs.setattr(ROOT_INO, SetAttr(mode=0o777), ROOT)
        yield fs


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with with_trash(directory) as fs:
        yield fs


async def kept(fs: Filesystem, caller: Caller = ROOT) -> list[str | None]:
    """The paths of what is in the trash, in the order in which it goes."""
    found, cursor = [], 0
    while True:
        page = await fs.trash_requests.tell(caller, cursor)
        found += [one["path"] for one in page["entries"]]
        if page["next"] is None:
            return found
        cursor = int(page["next"])


async def names(fs: Filesystem, directory: int) -> list[bytes]:
    return sorted(name for name, _, _ in await fs.readdir(directory, 0, 1000))


async def remove_by_shell(fs: Filesystem, parent: int, name: bytes, caller: Caller = OWNER) -> None:
    """What rm -r does."""
    inode = await fs.lookup(parent, name)
    if not inode.is_dir:
        await fs.unlink(parent, name, caller)
        return
    for child in await names(fs, inode.ino):
        await remove_by_shell(fs, inode.ino, child, caller)
    await fs.rmdir(parent, name, caller)


async def make_tree(fs: Filesystem, place: int = ROOT_INO, caller: Caller = OWNER) -> int:
    """The directory top/ with a/f, a/b/g and h."""
    top = (await fs.mkdir(place, b"top", 0o755, caller)).ino
    a = (await fs.mkdir(top, b"a", 0o755, caller)).ino
    b = (await fs.mkdir(a, b"b", 0o755, caller)).ino
    for parent, name in ((a, b"f"), (b, b"g"), (top, b"h")):
        await write_file(fs, name, DATA + name, parent, caller)
    return top


async def require_tree(fs: Filesystem, top: int, links: int = 3) -> None:
    assert await names(fs, top) == [b"a", b"h"]
    a = await fs.lookup(top, b"a")
    b = await fs.lookup(a.ino, b"b")
    assert await names(fs, a.ino) == [b"b", b"f"] and await names(fs, b.ino) == [b"g"]
    assert ((await fs.getattr(top)).nlink, a.nlink, b.nlink) == (links, 3, 2)
    for parent, name in ((a.ino, b"f"), (b.ino, b"g"), (top, b"h")):
        inode = await fs.lookup(parent, name)
        assert inode.nlink == 1 and await read_file(fs, inode.ino) == DATA + name


# --- what goes there ------------------------------------------------------------------------------


async def test_a_removed_file_is_found_by_nobody_and_comes_back(directory: Path) -> None:
    async with with_trash(directory) as fs:
        ino = await write_file(fs, b"f", DATA, caller=OWNER)
        await fs.unlink(ROOT_INO, b"f", OWNER)
        assert await names(fs, ROOT_INO) == [] and await kept(fs) == ["/f"]
        with pytest.raises(NotFound):
            await fs.lookup(ROOT_INO, b"f")
        with pytest.raises(NotFound):
            await fs.lookup(ino, b".")
        with pytest.raises(NotFound):
            await fs.link(ino, ROOT_INO, b"g")
        assert await fs.trash.status() | {"bytes": 0} == {
            "entries": 1,
            "bytes": 0,
            "given_entries": 0,
            "given_bytes": 0,
        }
    async with opened(directory) as fs:
        inode = await fs.restore(Restoring(ROOT_INO, b"f"), OWNER)
        assert (inode.ino, inode.nlink) == (ino, 1) and await read_file(fs, ino) == DATA
        assert await kept(fs) == [] and (await fs.trash.status())["bytes"] == 0
        with pytest.raises(NotFound):
            await fs.restore(Restoring(ROOT_INO, b"f"), OWNER)


async def test_renaming_over_a_file_keeps_what_was_there(fs: Filesystem) -> None:
    for number in range(3):
        await write_file(fs, b"new", b"%d" % number, caller=OWNER)
        await fs.rename(ROOT_INO, b"new", ROOT_INO, b"f", 0, OWNER)
    assert await kept(fs) == ["/f", "/f"]
    with pytest.raises(Exists):
        await fs.restore(Restoring(ROOT_INO, b"f"), OWNER)
    inode = await fs.restore(Restoring(ROOT_INO, b"f", name=b"old"), OWNER)
    assert await read_file(fs, inode.ino) == b"1"  # the last one that had the name
    (first,) = (await fs.trash_requests.tell(OWNER))["entries"]
    inode = await fs.restore(Restoring(ROOT_INO, b"", first["id"], name=b"older"), OWNER)
    assert await read_file(fs, inode.ino) == b"0"
    await fs.mkdir(ROOT_INO, b"empty", 0o755, OWNER)
    await fs.mkdir(ROOT_INO, b"other", 0o755, OWNER)
    await fs.rename(ROOT_INO, b"other", ROOT_INO, b"empty", 0, OWNER)
    assert await kept(fs) == ["/empty"]


async def test_the_nearest_rule_counts(directory: Path) -> None:
    async with opened(directory) as fs:
        top = (await fs.mkdir(ROOT_INO, b"top", 0o755, OWNER)).ino
        below = (await fs.mkdir(top, b"below", 0o755, OWNER)).ino
        scratch = (await fs.mkdir(top, b"scratch", 0o755, OWNER)).ino
        await write_file(fs, b"outside", caller=OWNER)
        for number in range(2):
            await write_file(fs, b"f%d" % number, parent=below, caller=OWNER)
            await write_file(fs, b"t%d" % number, parent=scratch, caller=OWNER)
        with pytest.raises(NoAttribute):
            await fs.getxattr(top, b"user.aifs.trash", OWNER)
        await put(fs, top, "trash", "7d")
        await put(fs, scratch, "trash", "off")
        assert await stores.get(fs, scratch, "trash") == "off"
        await fs.unlink(ROOT_INO, b"outside", OWNER)
        await fs.unlink(below, b"f0", OWNER)
        await fs.unlink(scratch, b"t0", OWNER)
        assert await kept(fs) == ["/top/below/f0"]
        await fs.removexattr(scratch, b"user.aifs.trash", OWNER)
        await fs.unlink(scratch, b"t1", OWNER)
        assert await kept(fs) == ["/top/below/f0", "/top/scratch/t1"]
        await put(fs, top, "trash", "off")
        await fs.unlink(below, b"f1", OWNER)
        assert len(await kept(fs)) == 2
        with pytest.raises(FsError) as refused:
            await put(fs, (await fs.lookup(ROOT_INO, b"top")).ino, "trash", "for ever")
        assert refused.value.errno == errno.EINVAL
    async with opened(directory) as fs:
        assert await stores.get(fs, top, "trash") == "off"
        await put(fs, top, "trash", "1d")
        await remove_by_shell(fs, ROOT_INO, b"top")  # the directory with the rule, too
        await fs.restore(Restoring(ROOT_INO, b"top"), ROOT)
        assert await stores.get(fs, top, "trash") == "1d"


async def test_what_is_not_lost_and_what_had_no_name_does_not_go_there(fs: Filesystem) -> None:
    ino = await write_file(fs, b"one", DATA, caller=OWNER)
    await fs.link(ino, ROOT_INO, b"two")
    await fs.unlink(ROOT_INO, b"one", OWNER)
    (handle, *_), nameless = await fs.create(ROOT_INO, None, 0o600, os.O_RDWR, OWNER)
    await fs.release(handle)
    fs.forget([nameless.ino])
    assert await kept(fs) == []
    await fs.unlink(ROOT_INO, b"two", OWNER)
    assert await kept(fs) == ["/two"]
    await fs.restore(Restoring(ROOT_INO, b"two"), OWNER)
    assert (await fs.getattr(ino)).parent == ROOT_INO
    await fs.unlink(ROOT_INO, b"two")  # the daemon itself
    fs.forget([ino])
    assert await kept(fs) == []


async def test_a_publication_keeps_the_tree_that_it_replaces_and_no_pointers(fs):
    for number in range(2):
        pending = (await fs.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
        await write_file(fs, b"f", b"%d" % number, pending, OWNER)
        what = Publication(pending, ROOT_INO, b"step", replace=True, latest=b"latest", tracker=b"t")
        await fs.publish(what, OWNER)
    assert await kept(fs) == ["/step"]
    old = await fs.restore(Restoring(ROOT_INO, b"step", name=b"before"), OWNER)
    assert await read_file(fs, (await fs.lookup(old.ino, b"f")).ino) == b"0"


async def test_what_retention_removes_can_be_restored(fs: Filesystem) -> None:
    for step in range(3):
        ino = (await fs.mkdir(ROOT_INO, b"tmp", 0o755, OWNER)).ino
        await write_file(fs, b"f", DATA, ino, OWNER)
        await fs.rename(ROOT_INO, b"tmp", ROOT_INO, b"step-%d" % step, 0, OWNER)
    await fs.setattr(ROOT_INO, SetAttr(uid=OWNER.uid), ROOT)
    await put(fs, ROOT_INO, "keep", "last=1")
    await fs.retention.enforce(ROOT_INO)
    assert await names(fs, ROOT_INO) == [b"step-2"]
    assert sorted(await kept(fs)) == ["/step-0", "/step-1"]


async def test_who_has_a_file_open_goes_on_with_it(fs: Filesystem) -> None:
    (handle, *_), inode = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, DATA)
    await fs.unlink(ROOT_INO, b"f", OWNER)
    fs.forget([inode.ino])
    assert (await fs.getattr(inode.ino)).links == 0
    await fs.write(handle, len(DATA), b"more")
    restored = await fs.restore(Restoring(ROOT_INO, b"f"), OWNER)
    assert (await fs.getattr(restored.ino)).links == 1
    await fs.unlink(ROOT_INO, b"f", OWNER)
    await fs.empty_trash([inode.ino], OWNER)
    assert bytes(await fs.read(handle, len(DATA), 9)) == b"more"
    await fs.release(handle)
    await fs.collector.drain()
    assert await numbers(fs, b"i") == [ROOT_INO]


async def test_files_are_drained_in_the_trash_as_elsewhere(fs: Filesystem) -> None:
    ino = await write_file(fs, b"f", DATA, caller=OWNER)
    await fs.unlink(ROOT_INO, b"f", OWNER)
    await drained(fs, ino)
    assert not (await fs.getattr(ino)).in_burst
    await fs.restore(Restoring(ROOT_INO, b"f"), OWNER)
    assert await read_file(fs, ino) == DATA


# --- trees ----------------------------------------------------------------------------------------


async def test_a_tree_that_is_removed_at_one_stroke_is_one_entry(directory: Path) -> None:
    async with with_trash(directory) as fs:
        top = await make_tree(fs)
        await fs.remove_tree(ROOT_INO, b"top", OWNER)
        assert await names(fs, ROOT_INO) == [] and await kept(fs) == ["/top"]
        with pytest.raises(NotFound):
            await fs.mkdir(top, b"new", 0o755, OWNER)
        await fs.trash.add_up()
        assert (await fs.trash.status())["bytes"] == 3 * len(DATA) + 3
        assert not fs.doomed.directories
    async with opened(directory) as fs:
        await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
        await require_tree(fs, top)
        assert (await fs.trash.status())["bytes"] == 0


async def test_a_snapshot_that_is_removed_is_gone(fs: Filesystem) -> None:
    """Somebody has named it, as rm -r does not remove it; what it was made of has its trash."""
    top = await make_tree(fs)
    shelf = (await fs.mkdir(top, b".snapshots", 0o755, OWNER)).ino
    await fs.clone(ROOT_INO, b"top", shelf, b"one", OWNER, True)
    await fs.unlink(top, b"h", OWNER)
    await fs.remove_tree(shelf, b"one", OWNER)
    await fs.doomed.empty()
    assert await kept(fs, OWNER) == ["/top/h"]
    await fs.remove_tree(ROOT_INO, b"top", OWNER)
    assert await kept(fs, OWNER) == ["/top/h", "/top"]


async def test_a_tree_that_rm_has_removed_comes_back_whole(directory: Path) -> None:
    async with with_trash(directory) as fs:
        top = await make_tree(fs)
        await remove_by_shell(fs, ROOT_INO, b"top")
        assert len(await kept(fs)) == 6
    async with opened(directory) as fs:
        await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
        await require_tree(fs, top)
        assert await kept(fs) == []
        await fs.remove_tree(ROOT_INO, b"top", OWNER)
        await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
        await require_tree(fs, top)


async def test_what_was_removed_long_before_the_tree_stays_in_the_trash(fs, monkeypatch):
    top = await make_tree(fs)
    now_ns = 10**18
    monkeypatch.setattr("aifs.core.clock.kernel_ns", lambda is_new=False: now_ns)
    await write_file(fs, b"old", parent=top, caller=OWNER)
    await fs.unlink(top, b"old", OWNER)
    for content in (b"first", b"second"):  # of one name the last one comes back
        now_ns += TOGETHER_S * 10**9
        await write_file(fs, b"twice", content, parent=top, caller=OWNER)
        await fs.unlink(top, b"twice", OWNER)
    await remove_by_shell(fs, ROOT_INO, b"top")
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
    assert await names(fs, top) == [b"a", b"h", b"twice"]
    assert await read_file(fs, (await fs.lookup(top, b"twice")).ino) == b"second"
    assert await kept(fs) == ["/top/old", "/top/twice"]


async def test_part_of_a_removed_tree_goes_to_what_is_left_above(fs: Filesystem) -> None:
    await make_tree(fs)
    await remove_by_shell(fs, ROOT_INO, b"top")
    inode = await fs.restore(Restoring(ROOT_INO, b"top/a/b"), OWNER)
    assert inode.parent == ROOT_INO and await names(fs, inode.ino) == [b"g"]
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
    a = await fs.lookup((await fs.lookup(ROOT_INO, b"top")).ino, b"a")
    assert await names(fs, a.ino) == [b"f"] and a.nlink == 2


async def test_who_has_a_file_open_sees_that_it_came_back_with_its_directory(fs):
    top = await make_tree(fs)
    ino = (await fs.lookup(top, b"h")).ino
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    await remove_by_shell(fs, ROOT_INO, b"top")
    assert (await fs.getattr(ino)).links == 0
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
    assert (await fs.getattr(ino)).links == 1
    await fs.release(handle)
    await require_tree(fs, top)


async def test_what_lay_in_a_directory_that_is_gone_for_good_needs_a_place(directory: Path) -> None:
    async with opened(directory) as fs:
        top = (await fs.mkdir(ROOT_INO, b"top", 0o755, OWNER)).ino
        await put(fs, top, "trash", "7d")
        await write_file(fs, b"f", DATA, top, OWNER)
        await fs.unlink(top, b"f", OWNER)
        await fs.removexattr(top, b"user.aifs.trash", OWNER)
        await fs.rmdir(ROOT_INO, b"top", OWNER)
        fs.forget([top])
        await fs.collector.drain()
        (entry,) = (await fs.trash_requests.tell(OWNER))["entries"]
        assert (entry["path"], entry["name"]) == (None, "f")
        with pytest.raises(NotFound, match="--to"):
            await fs.restore(Restoring(ROOT_INO, b"", entry["id"]), ROOT)
        inode = await fs.restore(Restoring(ROOT_INO, b"", entry["id"], parent=ROOT_INO), ROOT)
        assert await read_file(fs, inode.ino) == DATA


async def test_a_tree_cannot_go_below_itself_or_into_another_project(fs: Filesystem) -> None:
    top = await make_tree(fs)
    below = (await fs.lookup(top, b"a")).ino
    project = (await fs.mkdir(ROOT_INO, b"project", 0o777, OWNER)).ino
    await fs.set_flags(project, 0x20000000, 7)
    await fs.remove_tree(ROOT_INO, b"top", OWNER)
    with pytest.raises(NotFound):
        await fs.restore(Restoring(ROOT_INO, b"top", parent=below), OWNER)
    with pytest.raises(CrossDevice):
        await fs.restore(Restoring(ROOT_INO, b"top", parent=project), OWNER)
    for path in (b"", b"..", b"top/", b"/top"):
        with pytest.raises(Invalid):
            await fs.restore(Restoring(ROOT_INO, path), OWNER)
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
    await require_tree(fs, top)


async def remove_at_one_stroke(fs: Filesystem, parent: int, name: bytes) -> None:
    await fs.remove_tree(parent, name, OWNER)


@pytest.mark.parametrize("remove", [remove_by_shell, remove_at_one_stroke])
async def test_what_comes_back_counts_for_the_quotas_that_there_are_then(fs, remove):
    """It is where it was, so no quota refuses it, as none refuses what is there when it is set."""
    home = (await fs.mkdir(ROOT_INO, b"home", 0o777, OWNER)).ino
    top = await make_tree(fs, home)
    size = 3 * (len(DATA) + 1)
    await remove(fs, home, b"top")
    await put(fs, home, "quota", "size=1,files=1", ROOT)
    await fs.quota_trees.work()
    await fs.restore(Restoring(home, b"top"), OWNER)
    await require_tree(fs, top)
    told = await stores.ask(fs, home, "quota")
    assert (told["used_bytes"], told["used_files"]) == (size, 7)
    await put(fs, top, "quota", "size=1TiB", ROOT)
    await fs.quota_trees.work()
    await remove(fs, home, b"top")
    await fs.removexattr(home, b"user.aifs.quota", ROOT)
    await fs.quota_trees.work()
    await fs.restore(Restoring(home, b"top"), OWNER)
    told = await stores.ask(fs, top, "quota")
    assert (told["used_bytes"], told["used_files"], told["within"]) == (size, 6, [])
    await fs.rename(home, b"top", ROOT_INO, b"top", 0)


async def test_what_counted_in_a_quota_that_is_gone_goes_anywhere(fs: Filesystem) -> None:
    team = (await fs.mkdir(ROOT_INO, b"team", 0o777, OWNER)).ino
    other = (await fs.mkdir(ROOT_INO, b"other", 0o777, OWNER)).ino
    await put(fs, team, "quota", "files=100", ROOT)
    await put(fs, other, "quota", "files=100", ROOT)
    await fs.quota_trees.work()
    top = await make_tree(fs, team)
    await fs.remove_tree(team, b"top", OWNER)
    with pytest.raises(CrossDevice):
        await fs.restore(Restoring(team, b"top", parent=other), OWNER)
    await put(fs, team, "trash", "off", ROOT)
    await fs.rmdir(ROOT_INO, b"team", OWNER)
    fs.forget([team])
    await fs.collector.drain()
    await fs.restore(Restoring(ROOT_INO, b"", top, parent=other), OWNER)
    await require_tree(fs, top)
    assert (await stores.ask(fs, other, "quota"))["used_files"] == 7
    await fs.rename(other, b"top", other, b"renamed", 0)


async def test_what_was_removed_from_a_directory_counts_where_that_comes_back(fs):
    top = await make_tree(fs)
    await fs.unlink(top, b"h", OWNER)
    await put(fs, top, "quota", "size=1TiB", ROOT)
    await fs.quota_trees.work()
    await remove_by_shell(fs, ROOT_INO, b"top")
    await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
    await require_tree(fs, top)
    told = await stores.ask(fs, top, "quota")
    assert (told["used_bytes"], told["used_files"]) == (3 * (len(DATA) + 1), 6)
    await fs.rename(top, b"h", top, b"h2", 0)
    await fs.rename(top, b"h2", (await fs.lookup(top, b"a")).ino, b"h", 0)


async def test_restoring_tells_the_size_of_what_is_being_written(directory: Path) -> None:
    async with opened(directory, {"trash.keep": "7d", "burst.passthrough": "false"}) as fs:
        (handle, *_), _ = await fs.create(ROOT_INO, b"f", 0o644, os.O_RDWR, OWNER)
        await fs.unlink(ROOT_INO, b"f", OWNER)
        await fs.write(handle, 0, DATA)
        assert (await fs.restore(Restoring(ROOT_INO, b"f"), ROOT)).size == len(DATA)
        await fs.release(handle)


async def test_a_directory_that_programs_are_in_waits(fs, monkeypatch):
    """The kernel lets nobody make names there any more, as long as it knows the inode."""
    await fs.mkdir(ROOT_INO, b"d", 0o755, OWNER)
    await fs.rmdir(ROOT_INO, b"d", OWNER)

    async def is_known(ino: int) -> bool:
        return True

    with monkeypatch.context() as patch:
        patch.setattr(fs.kernel, "is_known", is_known)
        with pytest.raises(Busy):
            await fs.restore(Restoring(ROOT_INO, b"d"), OWNER)
    await fs.restore(Restoring(ROOT_INO, b"d"), OWNER)


# --- who may --------------------------------------------------------------------------------------


async def test_users_see_and_restore_their_own(fs: Filesystem) -> None:
    await write_file(fs, b"mine", DATA, caller=OWNER)
    await write_file(fs, b"theirs", DATA, caller=OTHER)
    private = (await fs.mkdir(ROOT_INO, b"private", 0o700, OTHER)).ino
    await write_file(fs, b"secret", DATA, private, OTHER)
    hidden = await write_file(fs, b"hidden", DATA, private, OWNER)  # it was moved there
    shared = await write_file(fs, b"shared", DATA, caller=OTHER)
    await fs.unlink(ROOT_INO, b"mine", OWNER)
    await fs.unlink(ROOT_INO, b"theirs", OTHER)
    for name in (b"secret", b"hidden"):
        await fs.unlink(private, name, OTHER)
    await fs.unlink(ROOT_INO, b"shared", OWNER)  # of another's, but removed by this one
    assert await kept(fs, OWNER) == ["/mine", None, "/shared"]
    told = await fs.trash_requests.tell(OWNER)
    assert {one["id"] for one in told["entries"]} >= {hidden, shared}
    assert "secret" not in str(told) and "theirs" not in str(told)
    assert await kept(fs, OTHER) == ["/theirs", "/private/secret", "/private/hidden", "/shared"]
    assert len(await kept(fs)) == 5
    there = (await fs.trash_requests.tell(OTHER))["entries"][1]["id"]
    told = set()
    for path, ino in (
        *((path, 0) for path in (b"theirs", b"private/secret", b"private/x", b"x/y", b"x")),
        *((b"", ino) for ino in (there, ROOT_INO, private, 1 << 40)),
    ):
        with pytest.raises(NotFound) as refused:
            await fs.restore(Restoring(ROOT_INO, path, ino), OWNER)
        told.add(str(refused.value))
        if ino:
            with pytest.raises(NotFound) as refused:
                await fs.empty_trash([ino], OWNER)
            told.add(str(refused.value))
    assert len(told) == 1, "what there is of others' nobody is told"
    with pytest.raises(AccessDenied):  # it is his, but the directory is not
        await fs.restore(Restoring(ROOT_INO, b"", hidden), OWNER)
    await fs.restore(Restoring(ROOT_INO, b"", hidden, parent=ROOT_INO), OWNER)
    await fs.setattr(ROOT_INO, SetAttr(mode=0o755), ROOT)
    with pytest.raises(AccessDenied):
        await fs.restore(Restoring(ROOT_INO, b"mine"), OWNER)
    await fs.restore(Restoring(ROOT_INO, b"mine"), ROOT)


async def test_users_empty_their_own(directory: Path) -> None:
    async with with_trash(directory) as fs:
        for caller, name in ((OWNER, b"mine"), (OTHER, b"theirs")):
            await write_file(fs, name, DATA, caller=caller)
            await fs.unlink(ROOT_INO, name, caller)
        (theirs,) = (await fs.trash_requests.tell(OTHER))["entries"]
        with pytest.raises(NotFound):
            await fs.empty_trash([theirs["id"]], OWNER)
        await fs.empty_trash([], OWNER)
        assert await kept(fs) == ["/theirs"]
        with pytest.raises(NotFound):  # one of many, and so none is erased
            await fs.empty_trash([*[theirs["id"]] * 40, 1 << 40], ROOT)
        assert await kept(fs) == ["/theirs"]
        await fs.empty_trash([theirs["id"]] * 40, ROOT)
        await fs.collector.drain()
        assert await numbers(fs, b"i") == [ROOT_INO]
    async with opened(directory, {}, base={}) as fs:
        pass
    async with stores.served(modes.config_of(directory), read_only=True) as fs:
        with pytest.raises(ReadOnly):
            await fs.empty_trash([], ROOT)
        with pytest.raises(ReadOnly):
            await fs.restore(Restoring(ROOT_INO, b"f"), ROOT)


async def test_a_long_list_comes_in_pages(fs: Filesystem) -> None:
    expected = []
    for number in range(250):
        name = b"%03d" % number + b"x" * 200
        await write_file(fs, name, caller=OWNER)
        await fs.unlink(ROOT_INO, name, OWNER)
        expected.append("/" + name.decode())
    assert len(await fs.getxattr(ROOT_INO, b"user.aifs.trashed", OWNER)) < 64 << 10
    assert await kept(fs, OWNER) == expected
    assert await kept(fs, OTHER) == []


# --- when it goes ---------------------------------------------------------------------------------


async def test_what_is_too_old_goes(fs: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    week = (await fs.mkdir(ROOT_INO, b"week", 0o755, OWNER)).ino
    await put(fs, week, "trash", "8d")
    await make_tree(fs)
    await fs.remove_tree(ROOT_INO, b"top", OWNER)
    for parent, name in ((week, b"a"), (ROOT_INO, b"b")):
        await write_file(fs, name, DATA, parent, OWNER)
        await fs.unlink(parent, name, OWNER)
    now_ns = fs.trash.now_ns()
    for days, left in ((6, ["/top", "/b", "/week/a"]), (7.5, ["/week/a"]), (9, [])):
        monkeypatch.setattr(fs.trash, "now_ns", lambda days=days: now_ns + int(days * DAY_NS))
        await fs.trash.expire()
        assert await kept(fs) == left
    await fs.doomed.empty()
    await fs.collector.drain()
    assert await numbers(fs, b"i") == [ROOT_INO, week]


async def test_a_file_that_came_back_and_was_removed_anew_does_not_go_for_what_it_was_before(fs):
    ino = await write_file(fs, b"f", DATA, ROOT_INO, OWNER)
    await fs.unlink(ROOT_INO, b"f", OWNER)
    before = await fs.store.engine.view(restoring.entry_of, ino)
    await fs.restore(Restoring(ROOT_INO, b"f", name=b"g"), OWNER)
    await fs.unlink(ROOT_INO, b"g", OWNER)
    assert await fs.trash.empty([before]) == 0
    assert await kept(fs) == ["/g"]


async def test_the_oldest_goes_first_when_there_is_no_room(fs, monkeypatch, caplog):
    for number in range(4):
        await write_file(fs, b"%d" % number, DATA, caller=OWNER)
        await fs.unlink(ROOT_INO, b"%d" % number, OWNER)
    assert (await fs.trash.status())["bytes"] == 4 * len(DATA)
    await fs.trash.give_way()
    assert len(await kept(fs)) == 4  # there is room
    total = 100 * len(DATA)

    async def spaces(servers: object) -> list[Space]:
        inodes = await fs.store.engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        free = 5 * len(DATA) - len(DATA) * (inodes - 3)  # all but two files have to go
        return [Space(total, free, free, 0, 0)] * 4

    monkeypatch.setattr(fs.store.servers, "spaces", spaces)
    await fs.trash.give_way()
    assert await kept(fs) == ["/2", "/3"]
    status = await fs.trash.status()
    assert (status["given_entries"], status["given_bytes"]) == (2, 2 * len(DATA))
    assert "the trash gives way, as there is no room for new files: 2 entries" in caplog.text
    caplog.clear()


@pytest.mark.parametrize("moves", [False, True])
async def test_no_more_goes_than_makes_room(fs, monkeypatch, caplog, moves):
    """Somebody else fills the servers' filesystems."""
    for number in range(9):
        await write_file(fs, b"%d" % number, DATA, caller=OWNER)
        await fs.unlink(ROOT_INO, b"%d" % number, OWNER)
    total, used = 1000 * len(DATA), [0]

    async def spaces(servers: Sequence[object]) -> list[Space]:
        used[0] += moves
        available = int(total * SPARE) - len(DATA) // 4 - used[0]
        return [Space(total, 0, available, 0, 0)] * len(servers)

    monkeypatch.setattr(fs.store.servers, "spaces", spaces)
    await fs.trash.give_way()
    assert 7 <= len(left := await kept(fs)) < 9
    await fs.trash.give_way()
    assert len(await kept(fs)) >= len(left) - 2 * moves and (moves or await kept(fs) == left)
    caplog.clear()


# --- fsck -----------------------------------------------------------------------------------------


async def _drop(fs: Filesystem, key: bytes) -> None:
    await fs.store.engine.transact(repair.delete, key)


async def _put(fs: Filesystem, key: bytes, value: bytes) -> None:
    await fs.store.engine.transact(repair.put, key, value)


async def no_entry(fs: Filesystem, entry: Entry) -> None:
    await _drop(fs, entry.key)


async def unreadable_entry(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, entry.key, b"?")


async def entry_of_another_directory(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, entry._replace(parent=99).key, entry.encode())


async def no_turn(fs: Filesystem, entry: Entry) -> None:
    await _drop(fs, keys.turn(entry.until_ns, entry.ino))


async def turn_at_another_time(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, keys.turn(5, entry.ino), trash.encode_turn(entry.parent))


async def turn_of_nothing(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, keys.turn(5, 4000), trash.encode_turn(1))


async def no_mark(fs: Filesystem, entry: Entry) -> None:
    def clear(tx: Transaction) -> None:
        inode = namespace.get_inode(tx, entry.ino)
        inode.flags = 0
        namespace.put_inode(tx, inode)

    await fs.store.engine.transact(clear)


async def a_name(fs: Filesystem, entry: Entry) -> None:
    def name(tx: Transaction) -> None:
        inode = namespace.get_inode(tx, entry.ino)
        namespace.put_name(tx, ROOT_INO, b"again", inode, inode.ino)

    await fs.store.engine.transact(name)


async def wrong_links(fs: Filesystem, entry: Entry) -> None:
    def count(tx: Transaction) -> None:
        inode = namespace.get_inode(tx, entry.ino)
        inode.nlink = 9
        namespace.put_inode(tx, inode)

    await fs.store.engine.transact(count)


async def wrong_counters(fs: Filesystem, entry: Entry) -> None:
    await _drop(fs, keys.COUNTER_TRASHED)
    await fs.store.engine.transact(Transaction.add, keys.COUNTER_TRASHED_BYTES, 7)


async def rule_of_a_file(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, keys.trash_rule(entry.ino), trash.encode_rule(5))


async def unreadable_rule(fs: Filesystem, entry: Entry) -> None:
    await _put(fs, keys.trash_rule(ROOT_INO), b"\1")


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("damage", "kinds", "left"),
    [
        (no_entry, {"orphan-inode", "stray-record", "wrong-counter"}, "lost"),
        (
            unreadable_entry,
            {"unreadable-record", "orphan-inode", "stray-record", "wrong-counter"},
            "lost",
        ),
        (entry_of_another_directory, {"stray-record"}, "kept"),
        (no_turn, {"no-turn"}, "kept"),
        (turn_at_another_time, {"stray-record"}, "kept"),
        (turn_of_nothing, {"stray-record"}, "kept"),
        (no_mark, {"orphan-inode", "stray-record", "wrong-counter"}, "lost"),
        (a_name, {"stray-record"}, "again"),
        (wrong_links, {"wrong-link-count"}, "kept"),
        (wrong_counters, {"wrong-counter"}, "kept"),
        (rule_of_a_file, {"stray-record"}, "kept"),
        (unreadable_rule, {"unreadable-record"}, "kept"),
    ],
)
async def test_fsck_mends_the_trash(
    directory: Path,
    damage: Callable[[Filesystem, Entry], Awaitable[None]],
    kinds: set[str],
    left: str,
) -> None:
    """Nothing is lost by it: what it has no entry of gets a name."""
    async with with_trash(directory, sound=False) as fs:
        ino = await write_file(fs, b"f", DATA, caller=OWNER)
        await fs.unlink(ROOT_INO, b"f", OWNER)
        await damage(fs, await fs.store.engine.view(restoring.entry_of, ino))
    config = modes.config_of(directory)
    found = (await trio.to_thread.run_sync(check, config, True)).findings
    assert {finding.kind for finding in found} == kinds
    assert all(finding.repaired for finding in found)
    async with opened(directory) as fs:
        assert await read_file(fs, ino) == DATA
        expected = {"kept": [], "again": [b"again"], "lost": [b"lost+found"]}
        assert await names(fs, ROOT_INO) == expected[left]
        assert await kept(fs) == (["/f"] if left == "kept" else [])


async def test_fsck_counts_the_links_of_directories_in_the_trash(directory: Path) -> None:
    async with with_trash(directory, sound=False) as fs:
        top = await make_tree(fs)
        await fs.remove_tree(ROOT_INO, b"top", OWNER)
        await wrong_links(fs, await fs.store.engine.view(restoring.entry_of, top))
    found = (await trio.to_thread.run_sync(check, modes.config_of(directory), True)).findings
    assert [finding.kind for finding in found] == ["wrong-link-count"]
    async with opened(directory) as fs:
        await fs.restore(Restoring(ROOT_INO, b"top"), OWNER)
        await require_tree(fs, top)
