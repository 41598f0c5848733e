"""Clones of files and trees on the filesystem in process: what they hold, that nothing is copied,
that no change of one reaches the other, in all forms that bytes have.
"""

import os
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from aifs.check.fsck import check
from aifs.core.errors import (
    AccessDenied,
    Busy,
    Exists,
    Invalid,
    NoAttribute,
    NotADirectory,
    NotFound,
    ReadOnly,
)
from aifs.data.naming import list_all
from aifs.data.storage import StoredObject
from aifs.files.services import ServeOptions
from aifs.files.types import ROOT as ROOT_USER
from aifs.meta import keys, shared
from aifs.meta.kv import ReadTransaction
from aifs.vfs import Caller, Filesystem, SetAttr, open_filesystem
from tests.support import modes
from tests.support.stores import ask

ROOT, OWNER, OTHER = 1, Caller(uid=1000, gid=1000), Caller(uid=2000, gid=2000)
SIZE = 20_000
FORMS = {
    "inline": modes.WAITING | {"layout.inline_limit": "32768"},
    "striped": modes.WAITING | modes.STRIPED,
    "one object": modes.WAITING | modes.STRIPED | {"layout.count": "1"},
    "interleaved": modes.WAITING | modes.INTERLEAVED,
    "replicas": modes.WAITING | modes.STRIPED | modes.REPLICAS,
    "coded": modes.WAITING | modes.STRIPED | modes.CODED,
    "no burst tier": modes.OFF | modes.STRIPED,
}


@pytest.fixture
def form() -> str:
    """How the bytes of files lie, where a test does not say it."""
    return "striped"


@pytest.fixture
def directory(form: str) -> Iterator[Path]:
    """An empty store; afterwards fsck finds nothing wrong with it."""
    directory = Path(tempfile.mkdtemp(prefix="aifs-clones-", dir="/dev/shm"))
    small = {"layout.unit": "4KiB", "layout.inline_limit": "100"}
    modes.make_store(directory / "store", small | FORMS[form])
    yield directory / "store"
    findings = check(modes.config_of(directory / "store"), repair=False).findings
    shutil.rmtree(directory)
    assert not findings


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[Filesystem]:
    async with open_filesystem(modes.config_of(directory)) as fs:
        with trio.fail_after(60):
            yield fs


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with opened(directory) as fs:
        yield fs


async def make(
    fs: Filesystem, parent: int, name: bytes, data: bytes = b"", caller: Caller = OWNER
) -> int:
    (handle, *_), inode = await fs.create(parent, name, 0o644, os.O_RDWR, caller)
    await write(fs, handle, 0, data)
    await fs.release(handle)
    return inode.ino


async def write(fs: Filesystem, handle: int, offset: int, data: bytes) -> None:
    if data:
        await fs.write(handle, offset, data)


async def change(fs: Filesystem, ino: int, offset: int, data: bytes, flags: int = 0) -> None:
    opened = await fs.open(ino, os.O_RDWR | flags)
    await write(fs, opened.handle, offset, data)
    await fs.release(opened.handle)


async def read(fs: Filesystem, ino: int) -> bytes:
    opened = await fs.open(ino, os.O_RDONLY)
    data = bytes(await fs.read(opened.handle, 0, SIZE * 2))
    await fs.release(opened.handle)
    return data


async def find(fs: Filesystem, *names: bytes, top: int = ROOT) -> int:
    for name in names:
        top = (await fs.lookup(top, name)).ino
    return top


async def emptied(fs: Filesystem) -> None:
    """All that was removed is deleted."""
    await fs.doomed.empty()
    await fs.collector.drain()


async def inodes(fs: Filesystem) -> int:
    return await fs.store.engine.view(ReadTransaction.counter, keys.COUNTER_INODES)


async def users(fs: Filesystem, oid: int) -> list[int]:
    return await fs.store.engine.view(shared.users, oid)


def stored(directory: Path) -> dict[str, int]:
    """Objects on data servers, and their lengths."""
    return {
        item.where: item.length
        for root in modes.config_of(directory).servers
        for item in list_all(root)
        if isinstance(item, StoredObject) and item.length
    }


# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.engines
@pytest.mark.parametrize("form", FORMS)
async def test_a_clone_has_the_bytes_and_none_are_copied(fs, directory, form):
    data = os.urandom(SIZE)
    ino = await make(fs, ROOT, b"file", data)
    await fs.wait_drained(ino)
    before = stored(directory)
    await fs.clone(ROOT, b"file", ROOT, b"clone", ROOT_USER)
    clone = await find(fs, b"clone")
    assert await read(fs, clone) == data
    assert stored(directory) == before
    first, second = await fs.getattr(ino), await fs.getattr(clone)
    same = ("mode", "uid", "gid", "size", "blocks", "mtime_ns", "oid", "layout", "data")
    assert all(getattr(first, name) == getattr(second, name) for name in same if name != "oid")
    if form != "inline":
        assert first.oid == second.oid
        assert await users(fs, first.oid) == sorted((ino, clone))


CHANGES = {
    "write": lambda fs, ino: change(fs, ino, 100, b"new"),
    "append": lambda fs, ino: change(fs, ino, SIZE, b"new"),
    "truncate": lambda fs, ino: fs.setattr(ino, SetAttr(size=777), ROOT_USER),
    "empty": lambda fs, ino: change(fs, ino, 0, b"new", os.O_TRUNC),
    "grow": lambda fs, ino: fs.setattr(ino, SetAttr(size=SIZE + 5000), ROOT_USER),
}


def changed(data: bytes, how: str) -> bytes:
    return {
        "write": data[:100] + b"new" + data[103:],
        "append": data + b"new",
        "truncate": data[:777],
        "empty": b"new",
        "grow": data + bytes(5000),
    }[how]


@pytest.mark.sweep
@pytest.mark.engines
@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("form", FORMS)
async def test_no_change_of_one_reaches_the_other(directory: Path, form: str, how: str) -> None:
    data = os.urandom(SIZE)
    async with opened(directory) as fs:
        ino = await make(fs, ROOT, b"file", data)
        await fs.wait_drained(ino)
        await fs.clone(ROOT, b"file", ROOT, b"one", ROOT_USER)
        await fs.clone(ROOT, b"one", ROOT, b"two", ROOT_USER)
        one, two = await find(fs, b"one"), await find(fs, b"two")
        await CHANGES[how](fs, ino)
        assert await read(fs, ino) == changed(data, how)
        assert await read(fs, one) == await read(fs, two) == data
        await CHANGES[how](fs, two)
        assert await read(fs, two) == changed(data, how)
        assert await read(fs, one) == data
        await fs.wait_drained(ROOT)
        await emptied(fs)
    async with opened(directory) as fs:
        assert await read(fs, await find(fs, b"file")) == changed(data, how)
        assert await read(fs, await find(fs, b"one")) == data
        assert await read(fs, await find(fs, b"two")) == changed(data, how)


@pytest.mark.engines
@pytest.mark.parametrize("form", [form for form in FORMS if form != "inline"])
async def test_bytes_go_with_the_last_who_shares_them(fs, directory, form):
    data = os.urandom(SIZE)
    ino = await make(fs, ROOT, b"file", data)
    await fs.wait_drained(ino)
    oid = (await fs.getattr(ino)).oid
    for name in (b"one", b"two"):
        await fs.clone(ROOT, b"file", ROOT, name, ROOT_USER)
    await fs.unlink(ROOT, b"file")
    fs.forget([ino])
    await emptied(fs)
    one, two = await find(fs, b"one"), await find(fs, b"two")
    assert await users(fs, oid) == [one, two]
    assert await read(fs, one) == data
    await fs.unlink(ROOT, b"two")
    fs.forget([two])
    await emptied(fs)
    assert await read(fs, one) == data
    await fs.unlink(ROOT, b"one")
    fs.forget([one])
    await emptied(fs)
    assert await users(fs, oid) == []
    if form != "interleaved":  # which leaves a container open
        assert stored(directory) == {}


async def test_what_is_undrained_is_drained_first(fs: Filesystem) -> None:
    ino = await make(fs, ROOT, b"file", b"x" * SIZE)
    assert (await fs.getattr(ino)).in_burst
    await fs.clone(ROOT, b"file", ROOT, b"clone", ROOT_USER)
    assert await read(fs, await find(fs, b"clone")) == b"x" * SIZE
    inode = await fs.getattr(ino)
    assert inode.named == ino
    assert inode.copy is not None, "the original keeps its cached copy"


async def test_a_file_that_is_open_for_writing(fs: Filesystem) -> None:
    """Alone it is refused; in a tree it is copied, as a reader sees it."""
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    (handle, *_), inode = await fs.create(top, b"log", 0o600, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"so far")
    await fs.setxattr(inode.ino, b"user.x", b"y")
    with pytest.raises(Busy):
        await fs.clone(top, b"log", ROOT, b"log", ROOT_USER)
    await fs.clone(ROOT, b"top", ROOT, b"clone", ROOT_USER)
    await fs.write(handle, 6, b", so good")
    clone = await find(fs, b"clone", b"log")
    assert await read(fs, clone) == b"so far"
    assert await fs.getxattr(clone, b"user.x") == b"y"
    assert stat.S_IMODE((await fs.getattr(clone)).mode) == 0o600
    await fs.release(handle)
    assert await read(fs, inode.ino) == b"so far, so good"


@pytest.mark.parametrize("form", ["striped", "one object", "interleaved"])
async def test_a_file_that_is_open_for_reading_is_shared(fs: Filesystem) -> None:
    data = os.urandom(SIZE)
    ino = await make(fs, ROOT, b"file", data)
    await fs.wait_drained(ino)
    handle = (await fs.open(ino, os.O_RDONLY)).handle
    await fs.clone(ROOT, b"file", ROOT, b"clone", ROOT_USER)
    clone = await find(fs, b"clone")
    await change(fs, ino, 0, b"new")
    assert bytes(await fs.read(handle, 0, SIZE)) == b"new" + data[3:]
    assert await read(fs, clone) == data
    await fs.release(handle)


# --- trees ----------------------------------------------------------------------------------------


async def listing(fs: Filesystem, directory: int) -> dict[bytes, object]:
    """Everything below, by name; what has several names by the first of them."""
    seen: dict[int, bytes] = {}

    async def look(ino: int, path: bytes) -> dict[bytes, object]:
        found: dict[bytes, object] = {}
        cookie = 0
        while entries := list(await fs.readdir(ino, cookie)):
            for name, inode, cookie in entries:
                below = path + b"/" + name
                told: object = inode.data
                if inode.is_dir:
                    told = await look(inode.ino, below)
                elif inode.is_file:
                    told = await read(fs, inode.ino)
                xattrs = {n: await fs.getxattr(inode.ino, n) for n in await fs.listxattr(inode.ino)}
                found[name] = (
                    *(inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.mtime_ns),
                    *(told, xattrs, inode.acl, seen.setdefault(inode.ino, below)),
                )
        return found

    return await look(directory, b"")


async def make_tree(fs: Filesystem, parent: int, width: int, depth: int) -> None:
    for number in range(width):
        ino = await make(fs, parent, b"empty%d" % number)
        await fs.setattr(ino, SetAttr(mode=0o4711, uid=number, mtime_ns=10**18 + number), ROOT_USER)
        await make(fs, parent, b"inline%d" % number, b"x" * 50)
        await fs.symlink(parent, b"link%d" % number, b"nowhere", OWNER)
        ino = await make(fs, parent, b"burst%d" % number, os.urandom(5000))
        await fs.setxattr(ino, b"user.x", b"%d" % number)
        await fs.link(ino, parent, b"second%d" % number)
        await fs.mknod(parent, b"fifo%d" % number, stat.S_IFIFO | 0o600, 0, OWNER)
        if depth:
            made = await fs.mkdir(parent, b"dir%d" % number, 0o2755, OWNER)
            await make_tree(fs, made.ino, width, depth - 1)


@pytest.mark.sweep
@pytest.mark.engines
async def test_a_tree_is_cloned_with_all_that_it_holds(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o750, OWNER)).ino
    await fs.setxattr(top, b"user.tree", b"yes")
    await make_tree(fs, top, 3, 2)
    await fs.link(await find(fs, b"dir0", b"burst0", top=top), top, b"from below")
    before, count = await listing(fs, top), await inodes(fs)
    links = (await fs.getattr(ROOT)).nlink
    await fs.clone(ROOT, b"top", ROOT, b"clone", ROOT_USER)
    clone = await find(fs, b"clone")
    assert await listing(fs, clone) == before
    original, copied = await fs.getattr(top), await fs.getattr(clone)
    assert copied.mode == original.mode
    assert copied.nlink == original.nlink
    assert copied.mtime_ns == original.mtime_ns
    assert await fs.getxattr(clone, b"user.tree") == b"yes"
    assert await inodes(fs) == count + (count - 1)  # all but the root
    assert (await fs.getattr(ROOT)).nlink == links + 1
    # And it is a tree as any other.
    await fs.clone(ROOT, b"clone", clone, b"inside", ROOT_USER)
    assert await listing(fs, await find(fs, b"clone", b"inside")) == before
    await fs.remove_tree(ROOT, b"top")
    await emptied(fs)
    assert await listing(fs, await find(fs, b"clone", b"inside")) == before


async def test_the_whole_filesystem_can_be_cloned_into_itself(fs: Filesystem) -> None:
    await make(fs, ROOT, b"file", b"x" * SIZE)
    await fs.clone(ROOT, b".", ROOT, b"all", ROOT_USER)
    assert await read(fs, await find(fs, b"all", b"file")) == b"x" * SIZE
    assert [name for name, _, _ in await fs.readdir(await find(fs, b"all"), 0)] == [b"file"]


# --- snapshots ------------------------------------------------------------------------------------


async def test_nothing_of_a_snapshot_can_be_changed(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    await make_tree(fs, top, 1, 1)
    shelf = (await fs.mkdir(top, b".snapshots", 0o755, OWNER)).ino
    await fs.clone(ROOT, b"top", shelf, b"one", ROOT_USER, True)
    snapshot = await find(fs, b"one", top=shelf)
    before = await listing(fs, snapshot)
    assert b".snapshots" not in before
    file, below = await find(fs, b"burst0", top=snapshot), await find(fs, b"dir0", top=snapshot)
    attempts: list[Callable[[], Awaitable[object]]] = [
        lambda: fs.open(file, os.O_RDWR),
        lambda: fs.open(file, os.O_WRONLY | os.O_TRUNC),
        lambda: fs.setattr(file, SetAttr(size=1), ROOT_USER),
        lambda: fs.setattr(file, SetAttr(mode=0o600), ROOT_USER),
        lambda: fs.setattr(snapshot, SetAttr(uid=3), ROOT_USER),
        lambda: fs.setxattr(file, b"user.x", b"z"),
        lambda: fs.removexattr(file, b"user.x"),
        lambda: fs.set_flags(file, 0, 0),
        lambda: fs.link(file, ROOT, b"link"),
        lambda: fs.unlink(below, b"empty0"),
        lambda: fs.rmdir(snapshot, b"dir0"),
        lambda: fs.mkdir(snapshot, b"new", 0o755, ROOT_USER),
        lambda: fs.create(below, b"new", 0o644, os.O_RDWR, ROOT_USER),
        lambda: fs.rename(shelf, b"one", ROOT, b"two", 0),
        lambda: fs.rename(below, b"empty0", ROOT, b"two", 0),
        lambda: fs.remove_tree(snapshot, b"dir0"),
        lambda: fs.remove_tree(ROOT, b"top"),
    ]
    for number, attempt in enumerate(attempts):
        with pytest.raises(ReadOnly):
            await attempt()
            pytest.fail(f"attempt {number} was carried out")
    assert await listing(fs, snapshot) == before
    with pytest.raises(NotADirectory):
        await fs.clone(top, b"burst0", shelf, b"two", OWNER, True)


async def test_a_snapshot_outlives_changes_is_cloned_and_goes_as_a_whole(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    (handle, *_), log = await fs.create(top, b"log", 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"so far")
    await make(fs, top, b"file", b"x" * SIZE)
    shelf = (await fs.mkdir(top, b".snapshots", 0o755, OWNER)).ino
    await fs.clone(ROOT, b"top", shelf, b"one", OWNER, True)
    await fs.write(handle, 0, b"later ")
    await fs.release(handle)
    await fs.unlink(top, b"file")
    await fs.clone(shelf, b"one", ROOT, b"again", ROOT_USER)
    again = await find(fs, b"again")
    await change(fs, await find(fs, b"file", top=again), 0, b"new")
    await make(fs, again, b"more", b"x")
    snapshot = await find(fs, b"one", top=shelf)
    assert await read(fs, await find(fs, b"log", top=snapshot)) == b"so far"
    assert await read(fs, await find(fs, b"file", top=snapshot)) == b"x" * SIZE
    await fs.remove_tree(shelf, b"one", OWNER)
    await emptied(fs)
    assert await read(fs, await find(fs, b"file", top=again)) == b"new" + b"x" * (SIZE - 3)
    await fs.remove_tree(ROOT, b"top")
    await emptied(fs)
    assert await read(fs, await find(fs, b"log", top=again)) == b"so far"


async def test_what_a_tree_has_alone_is_told(directory: Path) -> None:
    async def told(ino: int) -> tuple[int, ...]:
        return tuple((await ask(fs, ino, "sharing")).values())

    async with opened(directory) as fs:
        top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
        file = await make(fs, top, b"file", os.urandom(SIZE))
        await make(fs, top, b"inline", b"x" * 50)
        await fs.link(await make(fs, top, b"other", os.urandom(SIZE)), top, b"second")
        assert await told(file) == (SIZE, 0)
        await fs.clone(top, b"file", top, b"again", ROOT_USER)
        total = 3 * SIZE + 50
        assert await told(top) == (4, total, 2 * SIZE + 50, 0), "what it shares lies in it"
        assert await told(file) == (0, SIZE)
        shelf = (await fs.mkdir(top, b".snapshots", 0o755, OWNER)).ino
        await fs.clone(ROOT, b"top", shelf, b"one", ROOT_USER, True)
        one = await find(fs, b"one", top=shelf)
        assert await told(one) == (4, total, 50, 2 * SIZE)
        assert await told(top) == (8, 2 * total, 2 * SIZE + 100, 0)
        await change(fs, file, 0, b"new")
        await fs.unlink(top, b"again")
        fs.names.forget_all()
        await emptied(fs)
        assert await told(one) == (4, total, SIZE + 50, SIZE), "one file has gone elsewhere"
        await fs.unlink(top, b"other")
        await fs.unlink(top, b"second")
        fs.names.forget_all()
        await emptied(fs)
        assert await told(one) == (4, total, 2 * SIZE + 50, 0)
        assert await told(file) == (SIZE, 0)
        with pytest.raises(NoAttribute):
            await ask(fs, (await fs.symlink(top, b"link", b"x", OWNER)).ino, "sharing")


# --- who may, and what is refused -----------------------------------------------------------------


async def test_who_clones_owns_the_clone_and_has_to_be_able_to_read_all(fs: Filesystem) -> None:
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    home = (await fs.mkdir(ROOT, b"home", 0o755, OTHER)).ino
    run = await make(fs, top, b"run", b"x" * SIZE)
    await fs.setattr(run, SetAttr(mode=0o4755), ROOT_USER)
    await fs.clone(ROOT, b"top", home, b"clone", OTHER)
    clone = await fs.getattr(await find(fs, b"home", b"clone", b"run"))
    assert (clone.uid, clone.gid, stat.S_IMODE(clone.mode)) == (2000, 2000, 0o755)
    with pytest.raises(AccessDenied):
        await fs.clone(ROOT, b"top", ROOT, b"clone", OTHER)
    with pytest.raises(AccessDenied):
        await fs.clone(ROOT, b"home", top, b"clone", OTHER)
    secret = await make(fs, top, b"secret", b"x")
    await fs.setattr(secret, SetAttr(mode=0o600), ROOT_USER)
    count = await inodes(fs)
    with pytest.raises(AccessDenied):
        await fs.clone(ROOT, b"top", home, b"more", OTHER)
    await emptied(fs)
    assert await inodes(fs) == count
    with pytest.raises(NotFound):
        await find(fs, b"home", b"more")


@pytest.mark.sweep
@pytest.mark.parametrize("is_snapshot", [False, True])
@pytest.mark.parametrize("caller", [OWNER, OTHER, ROOT_USER], ids=["owner", "other", "root"])
async def test_privileges_in_attributes_are_cloned_by_root_alone(fs, caller, is_snapshot):
    """A file may run with a capability that its clone must not have: that one is the cloner's, who
    may then hand it to everybody."""
    names = [b"security.capability", b"security.ima", b"trusted.x", b"user.x"]
    kept = names if caller is ROOT_USER else [b"user.x"]
    top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
    home = (await fs.mkdir(ROOT, b"home", 0o777, OWNER)).ino
    (handle, *_), being_written = await fs.create(top, b"open", 0o755, os.O_RDWR, OWNER)
    await fs.write(handle, 0, b"x" * SIZE)
    inos = [top, being_written.ino, await make(fs, top, b"run", b"x" * SIZE)]
    await fs.setattr(home, SetAttr(mode=0o777), ROOT_USER)
    for ino in inos:
        for name in names:
            await fs.setxattr(ino, name, b"value")
    await fs.clone(ROOT, b"top", home, b"tree", caller, is_snapshot)
    clones = [(b"tree",), (b"tree", b"open"), (b"tree", b"run")]
    if not is_snapshot:
        await fs.clone(top, b"run", home, b"file", caller)
        clones.append((b"file",))
    for path in clones:
        ino = await find(fs, *path, top=home)
        assert sorted(await fs.listxattr(ino, ROOT_USER)) == sorted(kept)
    await fs.release(handle)


async def test_what_cannot_be_is_refused(directory: Path) -> None:
    async with opened(directory) as fs:
        await make(fs, ROOT, b"file", b"x" * SIZE)
        top = (await fs.mkdir(ROOT, b"top", 0o755, OWNER)).ino
        for name in (b"", b".", b"..", b"a/b", b"a\0b"):
            with pytest.raises(Invalid):
                await fs.clone(ROOT, b"file", ROOT, name, ROOT_USER)
        for name in (b"file", b"top"):
            with pytest.raises(Exists):
                await fs.clone(ROOT, name, ROOT, b"top", ROOT_USER)
        with pytest.raises(NotFound):
            await fs.clone(ROOT, b"missing", ROOT, b"clone", ROOT_USER)
        with pytest.raises(ReadOnly):
            await fs.clone(ROOT, b"file", (1 << 62) | top, b"clone", ROOT_USER)
    async with open_filesystem(modes.config_of(directory), ServeOptions(read_only=True)) as fs:
        with pytest.raises(ReadOnly):
            await fs.clone(ROOT, b"file", ROOT, b"clone", ROOT_USER)
