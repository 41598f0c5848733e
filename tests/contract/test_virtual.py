"""Virtual files on the filesystem in process: what a mount does not get to."""

import errno
import os
from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing

from aifs.core.budget import Budget
from aifs.core.errors import (
    AccessDenied,
    Invalid,
    NameTooLong,
    NotFound,
    OutOfMemory,
    ReadOnly,
    Stale,
)
from aifs.core.names import VIRTUAL
from aifs.datasets.formats import files
from aifs.files.virtual import FIRST, ORDERS
from aifs.meta.publishing import Publication
from aifs.reads.virtual import sources, walking
from aifs.vfs import Caller, Filesystem, SetAttr
from aifs.vfs.trash_requests import Restoring
from tests.support.stores import fs as fs
from tests.support.stores import read_file, rewrite, write_file

ROOT = 1


async def test_a_name_on_record_comes_first(fs, monkeypatch):
    """Such as one of a store of an earlier version."""
    ino = await write_file(fs, b"file", b"content")
    virtual = await fs.lookup(ROOT, VIRTUAL)
    assert virtual.ino == FIRST | ROOT
    monkeypatch.setattr("aifs.meta.namespace.VIRTUAL", b"elsewhere")
    await fs.rename(ROOT, b"file", ROOT, VIRTUAL)
    monkeypatch.undo()
    assert (await fs.lookup(ROOT, VIRTUAL)).ino == ino
    await fs.rename(ROOT, VIRTUAL, ROOT, b"file")
    assert (await fs.lookup(ROOT, VIRTUAL)).ino == virtual.ino
    with pytest.raises(ReadOnly):
        await fs.rename(ROOT, b"file", ROOT, VIRTUAL)
    with pytest.raises(ReadOnly):
        await fs.unlink(ROOT, VIRTUAL)


async def test_no_request_makes_a_name_that_cannot_be(fs: Filesystem) -> None:
    """Whichever request it is: some come past the kernel, which knows what a name is."""
    user = Caller()
    top = (await fs.mkdir(ROOT, b"top", 0o755, user)).ino
    ino = await write_file(fs, b"file", b"content", top)
    await fs.setxattr(ROOT, b"user.aifs.trash", b"7d")
    await write_file(fs, b"removed", b"content", top)
    await fs.unlink(top, b"removed", user)
    requests: dict[str, Callable[[bytes], Awaitable[object]]] = {
        "create": lambda name: fs.create(top, name, 0o644, os.O_RDWR, user),
        "mkdir": lambda name: fs.mkdir(top, name, 0o755, user),
        "mknod": lambda name: fs.mknod(top, name, 0o644, 0, user),
        "symlink": lambda name: fs.symlink(top, name, b"file", user),
        "link": lambda name: fs.link(ino, top, name),
        "rename": lambda name: fs.rename(top, b"file", top, name),
        "restore": lambda name: fs.restore(Restoring(top, b"removed", 0, top, name), user),
        "clone": lambda name: fs.clone(top, b"file", top, name, user),
        "clone a tree": lambda name: fs.clone(ROOT, b"top", top, name, user),
        "publish": lambda name: fs.publish(Publication(top, ROOT, name), user),
    }
    names = (b".", b"..", b"a/b", b"../x", b"/", b"a\0b", VIRTUAL, b"n" * 256)
    made = [
        (request, name)
        for request, ask in requests.items()
        for name in names
        if not await is_refused(ask(name))
    ]
    assert not made
    assert [name for name, _, _ in await fs.readdir(top, 0)] == [b"file"]


async def is_refused(request: Awaitable[object]) -> bool:
    try:
        await request
    except (Invalid, NameTooLong, ReadOnly):
        return True
    return False


async def test_too_many_files_are_refused(fs: Filesystem, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(5):
        await write_file(fs, f"file{number}".encode(), b"content")
    monkeypatch.setattr(walking, "MEMBERS_MAX", 4)
    with pytest.raises(Invalid, match="more than 4 files"):
        await fs.lookup(FIRST | ROOT, b"files.tar")
    refused = fs.refusals.find(ROOT, Caller())
    assert refused is not None
    assert (refused["request"], refused["errno"]) == ("files.tar", errno.EINVAL)


async def test_paths_and_rights_that_would_cost_much_are_refused(fs, monkeypatch):
    top = ROOT
    for _ in range(20):
        top = (await fs.mkdir(top, b"d" * 250, 0o755, Caller())).ino
    with monkeypatch.context() as patch:
        patch.setattr(walking, "TEXT_MAX", 50_000)
        with pytest.raises(Invalid, match="bytes of paths"):
            await fs.lookup(FIRST | ROOT, b"files.tar")
    for number in range(3):
        ino = await write_file(fs, b"%d" % number, b"content")
        await fs.setattr(ino, SetAttr(mode=0o600 + number), Caller())
    with monkeypatch.context() as patch:
        patch.setattr(walking, "RIGHTS_MAX", 3)
        with pytest.raises(Invalid, match="different owners, modes and ACLs"):
            await fs.lookup(FIRST | ROOT, b"files.tar")
    assert (await fs.lookup(FIRST | ROOT, b"files.tar")).size


async def test_what_is_kept_of_virtual_files_counts_in_the_memory_budget(fs, monkeypatch):
    """Some 200 MiB of each that somebody had open of a million files did not."""
    budget = fs.store.servers.budget
    names = [b"name%04d" % number for number in range(200)]
    for name in names:
        await fs.mkdir(ROOT, name, 0o755, Caller())
    before = budget.used
    tar = (await fs.lookup(FIRST | ROOT, b"files.tar")).ino
    each = budget.used - before
    assert 200 * 60 < each < 200 * 400
    handles = [(await fs.open(tar, os.O_RDONLY)).handle for _ in range(2)]
    monkeypatch.setattr(sources, "_ALL", 1.5 * each / budget.total)
    with pytest.raises(OutOfMemory, match="those that are open"):
        await fs.lookup(FIRST | ROOT, b"order")
        await fs.lookup(ORDERS | ROOT, b"seed=1,epoch=0.tar")
    assert budget.used == before + each
    for handle in handles:
        await fs.release(handle)
    await fs.lookup(ORDERS | ROOT, b"seed=1,epoch=0.tar")
    assert budget.used < before + 1.5 * each  # the other one is forgotten
    monkeypatch.setattr(sources, "_IDLE", 0.0)
    await fs.mkdir(ROOT, b"d", 0o755, Caller())
    await fs.lookup(FIRST | (await fs.lookup(ROOT, b"d")).ino, b"files.tar")
    assert budget.used < before + each / 2


async def test_what_a_user_has_open_of_virtual_files_is_bounded(fs, monkeypatch):
    alice, bob = Caller(uid=1000), Caller(uid=1001)
    tops = [(await fs.mkdir(ROOT, b"%d" % one, 0o755, Caller())).ino for one in range(2)]
    inos = [(await fs.lookup(FIRST | top, b"files.tar", alice)).ino for top in tops]
    each = 3000
    monkeypatch.setattr(sources, "_OF_USER", 1.5 * each / fs.store.servers.budget.total)
    handles = [(await fs.open(inos[0], os.O_RDONLY, caller=alice)).handle for _ in range(3)]
    with pytest.raises(OutOfMemory, match="that a user has open"):
        await fs.open(inos[1], os.O_RDONLY, caller=alice)
    for caller in (bob, Caller()):
        handles.append((await fs.open(inos[1], os.O_RDONLY, caller=caller)).handle)
    for handle in handles:
        await fs.release(handle)
    await fs.release((await fs.open(inos[1], os.O_RDONLY, caller=alice)).handle)


async def test_what_virtual_files_are_made_of_counts_while_they_are_made() -> None:
    """Nobody waits for memory, or for others' large ones, who has some: users have turns."""
    budget = Budget(64 << 20)
    kept = sources.VirtualMemory(budget, lambda: False)
    made = list[str]()

    async def make(name: str, uid: int, names: int, end: trio.Event) -> None:
        async with kept.making(uid) as counted:
            await counted(names)
            made.append(name)
            await end.wait()

    ends = [trio.Event() for _ in range(5)]
    async with trio.open_nursery() as nursery:
        for number, (name, uid, names) in enumerate(
            (("large", 1, 1 << 30), ("large too", 2, 1 << 30), ("small", 1, 10), ("third", 1, 10))
        ):
            nursery.start_soon(make, name, uid, names, ends[number])
            await trio.testing.wait_all_tasks_blocked()
        assert made == ["large", "small"]
        assert budget.used == (16 << 20) + (1 << 20)
        nursery.start_soon(make, "of another user", 3, 3000, ends[4])
        await trio.testing.wait_all_tasks_blocked()
        assert budget.used == (16 << 20) + (1 << 20) + (4 << 20)
        for end in ends:
            end.set()
    assert sorted(made[2:]) == ["large too", "of another user", "third"] and not budget.used


async def test_what_is_made_again_has_another_number(fs: Filesystem) -> None:
    await write_file(fs, b"file", b"content")
    first = await fs.lookup(FIRST | ROOT, b"files.tar")
    assert (await fs.lookup(FIRST | ROOT, b"files.tar")).ino == first.ino
    handle = (await fs.open(first.ino, os.O_RDONLY)).handle
    await fs.unlink(ROOT, b"file")
    second = await fs.lookup(FIRST | ROOT, b"files.tar")
    assert second.ino != first.ino
    assert await fs.getattr(first.ino) == first
    await fs.release(handle)
    with pytest.raises(Stale):
        await fs.getattr(first.ino)
    with pytest.raises(NotFound):
        await fs.lookup(FIRST | ROOT, b"other.tar")
    await fs.mkdir(ROOT, b"gone", 0o755, Caller())
    gone = (await fs.lookup(ROOT, b"gone")).ino
    await fs.rmdir(ROOT, b"gone")
    with pytest.raises(NotFound):
        await fs.lookup(gone, VIRTUAL)
    with pytest.raises(NotFound):
        await fs.lookup(FIRST | gone, b"files.tar")


async def test_files_one_after_another(fs: Filesystem) -> None:
    """As their catalogue has them: there is no such file of another one."""
    contents = {b"2": b"two" * 30_000, b"1": b"", b".0": b"hidden", b"0": b"zero"}
    inos = {name: await write_file(fs, name, data) for name, data in contents.items()}
    top = (await fs.mkdir(ROOT, b"d", 0o755, Caller())).ino
    inos[b"d/3"] = await write_file(fs, b"3", b"three", top)
    rows = [(ino, name, (await fs.getattr(ino)).size) for name, ino in inos.items()]
    catalogue, _ = files.catalogue_of(row for row in rows if row[1] != b".0")
    assert [row.start for row in files.entries(catalogue)] == [0, 90_000, 90_000, 90_004]
    name = files.joined_name(catalogue)
    joined = await fs.lookup(FIRST | ROOT, name)
    expected = contents[b"2"] + b"zero" + b"three"
    assert await read_file(fs, joined.ino) == expected
    assert await fs.lookup(FIRST | ROOT, name) == joined
    handle, *_ = await fs.open(joined.ino, os.O_RDONLY)
    assert bytes(await fs.read(handle, 89_999, 7)) == expected[89_999:90_006]
    with pytest.raises(Invalid, match="other files"):
        await fs.lookup(FIRST | ROOT, files.joined_name(catalogue + b"x"))
    with pytest.raises(AccessDenied):
        await fs.setattr(inos[b"0"], SetAttr(mode=0o600), Caller())
        await fs.lookup(FIRST | ROOT, name, Caller(uid=5, gid=5))
    await rewrite(fs, inos[b"0"], b"ZERO")
    with pytest.raises(Stale, match="0 has changed"):
        await fs.read(handle, 90_000, 4)
    assert bytes(await fs.read(handle, 90_004, 5)) == b"three"
    await fs.release(handle)
    changed = await fs.lookup(FIRST | ROOT, name)
    assert (changed.ino, changed.size) != (joined.ino, joined.size)
    await rewrite(fs, inos[b"0"], b"larger")
    with pytest.raises(Invalid, match="of other sizes"):
        await fs.lookup(FIRST | ROOT, name)
    with pytest.raises(NotFound):
        await fs.lookup(FIRST | ROOT, b"files=.bin")
