"""Quotas of directories, on the filesystem in process."""

import errno
import os
import random
import stat
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core.errors import CrossDevice, FsError, Invalid, NoAttribute, NotPermitted, QuotaExceeded
from aifs.files import quotas as rooms
from aifs.files.ranges import KEEP_SIZE, ZERO_RANGE
from aifs.meta import keys, namespace, quotas
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Transaction
from aifs.meta.quotas import FIRST_PROJECT
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support import modes, stores
from tests.support.stores import OWNER, ask, put, rewrite, write_file
from tests.support.stores import fs as fs

ROOT = Caller()
KIB = 1 << 10
SHAPES = {
    "burst": modes.WAITING | {"layout.inline_limit": 0},
    "tiny": modes.WAITING,
    "capacity": modes.OFF | {"layout.inline_limit": 0},
}

opened = partial(stores.opened, base=modes.WAITING)
pytestmark = pytest.mark.store(base=modes.WAITING)
every_shape = pytest.mark.parametrize("shape", SHAPES)


async def directory(fs: Filesystem, name: bytes = b"team", parent: int = ROOT_INO) -> int:
    return (await fs.mkdir(parent, name, 0o755, ROOT)).ino


async def used(fs: Filesystem, ino: int) -> tuple[int, int]:
    """Bytes and files of the innermost quota."""
    told = await ask(fs, ino, "quota")
    return told["used_bytes"], told["used_files"]


async def spread(fs: Filesystem) -> None:
    """All quotas are counted."""
    await fs.quota_trees.work()


async def refused(of: Awaitable[object]) -> None:
    with pytest.raises(QuotaExceeded) as raised:
        await of
    assert raised.value.errno == errno.EDQUOT


async def truncate(fs: Filesystem, ino: int, size: int) -> None:
    await fs.setattr(ino, SetAttr(size=size), ROOT)


# --- limits ---


@every_shape
async def test_bytes_are_limited_to_the_last_one(scratch: Path, shape: str) -> None:
    async with opened(scratch / "store", SHAPES[shape]) as fs:
        team = await directory(fs)
        await put(fs, team, "quota", "size=64KiB", ROOT)
        ino = await write_file(fs, b"file", bytes(40 * KIB), team)
        (handle, *_), other = await fs.create(team, b"other", 0o644, os.O_RDWR, ROOT)
        await fs.write(handle, 0, bytes(20 * KIB))
        assert await used(fs, team) == (60 * KIB, 3)
        await refused(fs.write(handle, 20 * KIB, bytes(4 * KIB + 1)))
        await fs.write(handle, 20 * KIB, bytes(4 * KIB))
        await refused(fs.write(handle, 24 * KIB, b"x"))
        await fs.write(handle, 0, b"what is there can be overwritten")
        await refused(truncate(fs, ino, 41 * KIB))
        if shape != "capacity":  # where nothing can be reserved
            await refused(fs.fallocate(handle, 0, 24 * KIB, 1))
            await fs.fallocate(handle, KEEP_SIZE, 24 * KIB, 1)
        await refused(fs.copy_file_range(handle, 0, handle, 24 * KIB, KIB))
        await fs.release(handle)
        assert await used(fs, team) == (64 * KIB, 3)
        await truncate(fs, ino, 10)
        await fs.setattr(other.ino, SetAttr(size=54 * KIB - 10 + 10 * KIB), ROOT)
        assert await used(fs, team) == (64 * KIB, 3)
        await fs.unlink(team, b"other")
        fs.forget([other.ino])
        await fs.collector.drain()
        assert await used(fs, team) == (10, 2)
        await rewrite(fs, ino, bytes(64 * KIB))
        await stores.drained(fs, ino)
        assert await used(fs, team) == (64 * KIB, 2)


async def test_files_of_all_kinds_are_limited(fs: Filesystem) -> None:
    team = await directory(fs)
    await put(fs, team, "quota", "files=5", ROOT)
    ino = await write_file(fs, b"file", b"x", team)
    sub = await directory(fs, b"sub", team)
    await fs.symlink(sub, b"link", b"target", ROOT)
    await fs.mknod(sub, b"fifo", stat.S_IFIFO | 0o644, 0, ROOT)
    assert await used(fs, sub) == (1, 5)
    await refused(fs.create(sub, b"one", 0o644, os.O_RDWR, ROOT))
    await refused(fs.create(sub, None, 0o644, os.O_RDWR, ROOT))
    await refused(fs.mkdir(team, b"one", 0o755, ROOT))
    await refused(fs.symlink(team, b"one", b"target", ROOT))
    await fs.link(ino, sub, b"second name")
    await fs.unlink(team, b"file")
    assert await used(fs, sub) == (1, 5), "it has a name still"
    await fs.unlink(sub, b"fifo")
    await fs.unlink(sub, b"second name")
    fs.names.forget_all()
    await fs.collector.drain()
    await directory(fs, b"one", team)
    await directory(fs, b"two", team)
    await refused(fs.mkdir(team, b"three", 0o755, ROOT))


async def test_who_is_refused_is_told_what_is_used_up(fs: Filesystem) -> None:
    team = await directory(fs)
    for limits, said in (("size=9", "0 of 9 bytes"), ("files=1", "0 of 9 bytes, 1 of 1 files")):
        await put(fs, team, "quota", limits, ROOT)
        with pytest.raises(QuotaExceeded, match=f"{team} is used up: {said}$"):
            async with fs.quotas.granted((await fs.getattr(team)).project, 10, inodes=1):
                pytest.fail("there is no room")


async def test_what_is_removed_counts_until_it_is_erased(fs: Filesystem) -> None:
    team = await directory(fs)
    sub = await directory(fs, b"sub", team)
    await put(fs, team, "quota", "size=1MiB", ROOT)
    await spread(fs)
    await write_file(fs, b"file", bytes(10), sub)
    (handle, *_), inode = await fs.create(sub, b"open", 0o644, os.O_RDWR, ROOT)
    await fs.write(handle, 0, bytes(100))
    await fs.remove_tree(team, b"sub", ROOT)
    while await used(fs, team) != (100, 2):
        await trio.sleep(0.01)
    await fs.release(handle)
    fs.forget([inode.ino])
    await fs.collector.drain()
    assert await used(fs, team) == (0, 1)


# --- trees ---


async def tree(fs: Filesystem, top: int, rng: random.Random, depth: int = 3) -> tuple[int, int]:
    """Make one; its bytes, and files without the top."""
    bytes_, files = 0, 0
    for number in range(3):
        size = rng.randrange(3 * KIB)
        await write_file(fs, b"file%d" % number, bytes(size), top)
        bytes_, files = bytes_ + size, files + 1
    if depth:
        for number in range(2):
            sub = await directory(fs, b"sub%d" % number, top)
            more, others = await tree(fs, sub, rng, depth - 1)
            bytes_, files = bytes_ + more, files + others + 1
    return bytes_, files


async def test_what_is_there_is_counted(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aifs.vfs.quotas.NAMES", 2)
    async with opened(scratch / "store") as fs:
        team = await directory(fs)
        bytes_, files = await tree(fs, team, random.Random(0))
        await put(fs, team, "quota", "size=1KiB", ROOT)
        await spread(fs)
        assert await used(fs, team) == (bytes_, files + 1) and bytes_ > KIB
        assert (await ask(fs, team, "quota"))["state"] == "counted"
        ino = await write_file(fs, b"empty", b"", team)
        await refused(truncate(fs, ino, 1))
        await put(fs, team, "quota", f"size={bytes_ + 1}", ROOT)
        await truncate(fs, ino, 1)
        await refused(truncate(fs, ino, 2))
        await fs.removexattr(team, b"user.aifs.quota", ROOT)
        await truncate(fs, ino, 2)
        with pytest.raises(NoAttribute):
            await ask(fs, team, "quota")
        await spread(fs)
        assert not await stores.numbers(fs, b"Q") + await stores.numbers(fs, b"P")
        assert (await fs.getattr(ino)).project == 0
        await fs.rename(team, b"empty", ROOT_INO, b"elsewhere", 0)


async def test_quotas_lie_within_each_other(fs: Filesystem) -> None:
    outer = await directory(fs, b"outer")
    inner = await directory(fs, b"inner", outer)
    deep = await directory(fs, b"deep", inner)
    await put(fs, inner, "quota", "size=100", ROOT)
    await put(fs, outer, "quota", "size=150,files=7", ROOT)
    await spread(fs)
    await write_file(fs, b"one", bytes(100), deep)
    told = await ask(fs, deep, "quota")
    assert (told["directory"], told["bytes"], told["used_bytes"]) == (inner, 100, 100)
    (above,) = told["within"]
    assert (above["directory"], above["used_bytes"], above["used_files"]) == (outer, 100, 4)
    two = await write_file(fs, b"two", bytes(50), outer)
    await refused(truncate(fs, two, 51))
    three = await write_file(fs, b"three", b"", deep)
    await refused(truncate(fs, three, 1))
    await put(fs, inner, "quota", "size=none,files=4", ROOT)
    await refused(truncate(fs, three, 1))
    await fs.removexattr(inner, b"user.aifs.quota", ROOT)
    await spread(fs)
    told = await ask(fs, deep, "quota")
    assert (told["directory"], told["used_bytes"], told["used_files"]) == (outer, 150, 6)
    assert told["within"] == []
    await put(fs, inner, "quota", "size=1KiB", ROOT)
    await spread(fs)
    assert await used(fs, outer) == (150, 6) and await used(fs, inner) == (100, 4)


async def test_who_moves_between_quotas_copies(fs: Filesystem) -> None:
    one, two = await directory(fs, b"one"), await directory(fs, b"two")
    inside, plain = await directory(fs, b"inside", one), await directory(fs, b"plain")
    for ino in (one, two, inside):
        await put(fs, ino, "quota", "size=1KiB", ROOT)
    await spread(fs)
    file = await write_file(fs, b"file", b"x", one)
    other = await write_file(fs, b"other", b"x")
    sub = await directory(fs, b"sub", one)
    for target in (two, inside, plain, ROOT_INO):
        with pytest.raises(CrossDevice):
            await fs.rename(one, b"file", target, b"new", 0)
        with pytest.raises(CrossDevice):
            await fs.link(file, target, b"new")
        with pytest.raises(CrossDevice):
            await fs.rename(one, b"sub", target, b"new", 0)
    with pytest.raises(CrossDevice):
        await fs.rename(ROOT_INO, b"other", one, b"other", 0)
    with pytest.raises(CrossDevice):
        await fs.link(other, one, b"other")
    await fs.rename(one, b"file", sub, b"file", 0)
    await fs.link(file, one, b"file")
    # The directory of a quota takes that along, to where it is counted by the same ones.
    await fs.rename(one, b"inside", sub, b"moved", 0)
    with pytest.raises(CrossDevice):
        await fs.rename(sub, b"moved", plain, b"inside", 0)
    await fs.rename(ROOT_INO, b"one", plain, b"renamed", 0)
    with pytest.raises(CrossDevice):
        await fs.rename(plain, b"renamed", two, b"one", 0)
    assert await used(fs, one) == (1, 4)


async def test_a_file_with_names_in_two_quotas(fs: Filesystem) -> None:
    """One of them counts it; within a directory it can be renamed all the same, and what the other
    one counted it goes on counting when that is removed."""
    one, two = await directory(fs, b"one"), await directory(fs, b"two")
    ino = await write_file(fs, b"file", bytes(100), one)
    await fs.link(ino, two, b"file")
    for team in (one, two):
        await put(fs, team, "quota", "size=1KiB", ROOT)
        await spread(fs)
    assert (await used(fs, one), await used(fs, two)) == ((0, 1), (100, 2))
    await fs.rename(one, b"file", one, b"renamed", 0)
    await write_file(fs, b"other", b"", one)
    await fs.rename(one, b"renamed", one, b"other", namespace.RENAME_EXCHANGE)
    await fs.removexattr(one, b"user.aifs.quota", ROOT)
    await spread(fs)
    assert await used(fs, two) == (100, 2)


@every_shape
async def test_zeroing_a_range_is_refused_as_a_whole(scratch: Path, shape: str) -> None:
    async with opened(scratch / "store", SHAPES[shape]) as fs:
        team = await directory(fs)
        await put(fs, team, "quota", "size=64KiB", ROOT)
        ino = await write_file(fs, b"file", b"x" * 40 * KIB, team)
        handle = (await fs.open(ino, os.O_RDWR)).handle
        await refused(fs.fallocate(handle, ZERO_RANGE, 0, 65 * KIB))
        assert await fs.read(handle, 0, 65 * KIB) == b"x" * 40 * KIB
        await fs.fallocate(handle, ZERO_RANGE, KIB, 63 * KIB)
        assert await fs.read(handle, 0, 65 * KIB) == b"x" * KIB + bytes(63 * KIB)
        await fs.release(handle)


async def test_the_directory_of_a_quota_is_removed(fs: Filesystem) -> None:
    for remove in ("rmdir", "remove_tree"):
        team = await directory(fs)
        await put(fs, team, "quota", "size=1KiB", ROOT)
        await (
            fs.rmdir(ROOT_INO, b"team")
            if remove == "rmdir"
            else fs.remove_tree(ROOT_INO, b"team", ROOT)
        )
        fs.names.forget_all()
        await fs.collector.drain()
        while await stores.numbers(fs, b"Q") + await stores.numbers(fs, b"P"):
            await spread(fs)
            await trio.sleep(0.01)


async def test_a_mount_goes_on_with_what_is_not_counted(scratch: Path) -> None:
    async with opened(scratch / "store") as fs:
        team = await directory(fs)
        bytes_, files = await tree(fs, team, random.Random(1))
        await fs.store.engine.transact(_put_only, team)
    async with opened(scratch / "store") as fs:
        with trio.fail_after(30):
            while (await ask(fs, team, "quota"))["state"] != "counted":
                await trio.sleep(0.01)
        assert await used(fs, team) == (bytes_, files + 1)


def _put_only(tx: Transaction, ino: int) -> None:
    quotas.put(tx, namespace.get_inode(tx, ino), 1 << 30, None)


@pytest.mark.store({"layout.inline_limit": 0})
async def test_clones_count_as_what_they_are_made_of(fs: Filesystem) -> None:
    source, team = await directory(fs, b"source"), await directory(fs)
    bytes_, files = await tree(fs, source, random.Random(2))
    await write_file(fs, b"large", bytes(40 * KIB), source)
    await put(fs, source, "quota", "size=1MiB", ROOT)
    await put(fs, team, "quota", "size=50KiB", ROOT)
    await fs.clone(source, b"large", team, b"one", ROOT)
    assert await used(fs, team) == (40 * KIB, 2)
    await refused(fs.clone(source, b"large", team, b"two", ROOT))
    await put(fs, team, "quota", f"size={bytes_ + 50 * KIB},files={files + 4}", ROOT)
    await refused(fs.clone(ROOT_INO, b"source", team, b"tree", ROOT))
    while await used(fs, team) != (40 * KIB, 2):
        await trio.sleep(0.01)
    await fs.unlink(team, b"one")
    fs.names.forget_all()
    await fs.collector.drain()
    await fs.clone(ROOT_INO, b"source", team, b"tree", ROOT)
    assert await used(fs, team) == (bytes_ + 40 * KIB, files + 3)
    below = (await fs.lookup(team, b"tree")).ino
    assert (await ask(fs, below, "quota"))["directory"] == team


# --- several at a time ---


@pytest.mark.store({"layout.inline_limit": 0})
async def test_four_writers_never_get_more_than_there_is(fs: Filesystem) -> None:
    team = await directory(fs)
    await put(fs, team, "quota", "size=100KiB,files=41", ROOT)
    written = []

    async def write(number: int) -> None:
        rng = random.Random(number)
        for turn in range(30):
            name = b"%d-%d" % (number, turn)
            try:
                (handle, *_), _ = await fs.create(team, name, 0o644, os.O_RDWR, ROOT)
            except QuotaExceeded:
                continue
            size = 0
            try:
                for _ in range(4):
                    length = rng.randrange(1, 3 * KIB)
                    await fs.write(handle, size, bytes(length))
                    size += length
            except QuotaExceeded:
                pass
            await fs.release(handle)
            written.append(size)

    async with trio.open_nursery() as nursery:
        for number in range(4):
            nursery.start_soon(write, number)
    assert await used(fs, team) == (sum(written), len(written) + 1)
    assert sum(written) <= 100 * KIB and len(written) == 40


# --- who may ---


async def test_root_sets_and_readers_see(fs: Filesystem) -> None:
    team = await directory(fs)
    hidden = await directory(fs, b"hidden")
    below = await directory(fs, b"below", hidden)
    await fs.setattr(team, SetAttr(uid=OWNER.uid, gid=OWNER.gid), ROOT)
    await fs.setattr(hidden, SetAttr(mode=0o700), ROOT)
    with pytest.raises(NotPermitted):
        await put(fs, team, "quota", "size=1KiB", OWNER)
    for ino in (team, hidden, below):
        await put(fs, ino, "quota", "size=1KiB", ROOT)
    with pytest.raises(NotPermitted):
        await fs.removexattr(team, b"user.aifs.quota", OWNER)
    with pytest.raises(NotPermitted):
        await fs.set_flags(team, 0, 0)
    file = await write_file(fs, b"file", b"x", team)
    with pytest.raises(NotPermitted):
        await fs.set_flags(file, 0, 0)
    with pytest.raises(NotPermitted):
        await fs.set_flags(file, 0, FIRST_PROJECT + 1)
    assert (await ask(fs, team, "quota", OWNER))["used_bytes"] == 1
    seen = await ask(fs, ROOT_INO, "quotas", OWNER)
    assert [quota["path"] for quota in seen["quotas"]] == ["/team"]
    seen = await ask(fs, ROOT_INO, "quotas.0", ROOT)
    assert [quota["path"] for quota in seen["quotas"]] == ["/team", "/hidden", "/hidden/below"]
    with pytest.raises(FsError):
        await fs.getxattr(hidden, b"user.aifs.quota", OWNER)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "text", ["", "size", "size=1XB", "files=-1", "files=1.5", "room=1", "size=none"]
)
async def test_wrong_limits_are_refused(fs: Filesystem, text: str) -> None:
    team = await directory(fs)
    with pytest.raises(Invalid):
        await put(fs, team, "quota", text, ROOT)
    with pytest.raises(NoAttribute):
        await ask(fs, team, "quota")
    file = await write_file(fs, b"file", b"x", team)
    with pytest.raises(FsError):
        await put(fs, file, "quota", "size=1KiB", ROOT)
    assert (await fs.getattr(team)).project == 0


async def test_many_quotas_are_listed_in_pages(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aifs.vfs.quotas.PAGE", 3)
    async with opened(scratch / "store") as fs:
        for number in range(7):
            await put(fs, await directory(fs, b"%d" % number), "quota", "files=9", ROOT)
        found, after = [], 0
        while True:
            page = await fs.quota_trees.list_all(ROOT, after)
            found += [quota["path"] for quota in page["quotas"]]
            if not (after := page["next"]):
                break
        assert found == [f"/{number}" for number in range(7)]


# --- statfs ---


async def test_statfs_shows_the_tightest_quota(fs: Filesystem) -> None:
    plain = await fs.statfs(ROOT_INO)
    outer = await directory(fs, b"outer")
    inner = await directory(fs, b"inner", outer)
    await put(fs, outer, "quota", "size=1MiB,files=100", ROOT)
    await put(fs, inner, "quota", "size=2MiB", ROOT)
    await spread(fs)
    await write_file(fs, b"file", bytes(256 * KIB), inner)
    found = await fs.statfs(inner)
    assert found.blocks * found.block_size == 1 << 20
    assert found.free * found.block_size == 768 * KIB >= found.available * found.block_size
    assert (found.files, found.files_free) == (100, 97)
    assert (await fs.statfs(ROOT_INO)).blocks == plain.blocks


# --- what is written past the daemon ---


@pytest.mark.store({"layout.inline_limit": 0})
async def test_what_is_written_past_us_is_seen(fs, monkeypatch):
    """As the kernel passes it through: to the copy itself."""
    team = await directory(fs)
    await put(fs, team, "quota", "size=64KiB", ROOT)
    (handle, *_), inode = await fs.create(team, b"file", 0o644, os.O_RDWR, ROOT)
    file = fs.io.table.open[inode.ino]
    assert not fs.quotas.may_pass_through(file), "there is too little room"
    monkeypatch.setattr(rooms, "PASSED_THROUGH", 32 * KIB)
    assert fs.quotas.may_pass_through(file)
    file.backing = 7
    fs.quotas.watch(file)
    path = fs.store.servers[file.copy.server].where((0, file.copy.id))
    os.truncate(path, 40 * KIB)
    assert await used(fs, team) == (40 * KIB, 2)
    (other, *_), second = await fs.create(team, b"other", 0o644, os.O_RDWR, ROOT)
    assert not fs.quotas.may_pass_through(fs.io.table.open[second.ino])
    await fs.fsync(handle)
    os.truncate(path, 64 * KIB + 1)
    await refused(fs.fsync(handle))
    await refused(fs.write(other, 0, b"x"))
    os.truncate(path, 64 * KIB)
    await fs.fsync(handle)
    file.backing = 0
    await fs.release(handle)
    await fs.release(other)
    assert await used(fs, team) == (64 * KIB, 3)


# --- fsck ---


async def test_fsck_counts_again(scratch: Path) -> None:
    async with opened(scratch / "store", sound=False) as fs:
        team = await directory(fs)
        await put(fs, team, "quota", "size=64KiB", ROOT)
        await spread(fs)
        await write_file(fs, b"file", b"twelve bytes", team)
        project = (await fs.getattr(team)).project
        config = fs.store.config

        def spoil(tx: Transaction) -> None:
            tx.add(keys.used_bytes(project), 5)
            tx.add(keys.used_inodes(project), -2)
            tx.add(keys.COUNTER_QUOTAS, -1)
            tx.put(keys.quota(project + 9), quotas.Quota(team, 5).encode())
            tx.put(keys.quota(project + 8), b"damaged")
            tx.put(b"P1234567 ", b"")

        await fs.store.engine.transact(spoil)
    found = await trio.to_thread.run_sync(lambda: check(config, repair=True).findings)
    kinds = sorted(finding.kind for finding in found)
    assert kinds == [
        "stray-record", "stray-record", "unreadable-record",
        "wrong-counter", "wrong-counter", "wrong-counter",
    ]  # fmt: skip
    await stores.require_sound(config)
    async with opened(scratch / "store") as fs:
        assert await used(fs, team) == (12, 2)
