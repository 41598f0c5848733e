"""Clean burst copies as a source: what the data servers cannot tell any more comes back from them,
and they stay until then.
"""

import errno
import json
import logging
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from aifs.burst.copy import BurstCopy
from aifs.check.fsck import check
from aifs.core import faults
from aifs.core import files as core_files
from aifs.core.config import Config
from aifs.core.errors import Busy, Unavailable
from aifs.files.types import ROOT
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.upkeep import scrub as scrub_module
from aifs.vfs import Filesystem, open_filesystem
from tests.support import server_orders
from tests.support.modes import STRIPED, config_of, make_store
from tests.support.powercut import PowerCut, is_crash
from tests.support.server_orders import order
from tests.support.stores import require_sound

MIB = 1 << 20
SETTINGS = STRIPED | {
    "burst.drain_delay": "0s",
    "burst.throttle_max": "0s",
    "layout.unit": "64KiB",
    "scrub.bandwidth": "0",
}
POLICIES = {
    "plain": b"count=2",
    "mirror": b"count=1,replicas=2",
    "coded": b"ec=2+1",
    "chunks": b"kind=interleaved",
    "chunks-mirror": b"kind=interleaved,replicas=2",
    "chunks-coded": b"kind=interleaved,ec=2+1",
}
SIZES = (5000, 300_000, MIB + 70_001)
SERVERS = 6
LIMIT_S = 120


def long(*values: object) -> Any:
    """A case that a default run does without."""
    return pytest.param(*values, marks=pytest.mark.long)


every_policy = pytest.mark.parametrize("policy", POLICIES)
some_policies = pytest.mark.parametrize(
    "policy",
    [
        "plain",
        "coded",
        "chunks",
        *(long(name) for name in ("mirror", "chunks-mirror", "chunks-coded")),
    ],
)


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub_module, "_PAUSE_S", 0.01)


class Files:
    """The files of one store, by inode number, and what is done to them."""

    def __init__(self, directory: Path, policy: str) -> None:
        make_store(directory, SETTINGS, SERVERS)
        self.directory = directory
        self.policy = POLICIES[policy]
        self.tolerates = int("mirror" in policy or "coded" in policy)
        self.contents: dict[int, bytes] = {}

    def config(self) -> Config:
        config = config_of(self.directory)
        return config.model_copy(
            update={"data": config.data.model_copy(update={"missing": "allow"})}
        )

    def use(self, work: Callable[[Filesystem], Awaitable[Any]]) -> Any:
        async def run() -> Any:
            with trio.fail_after(LIMIT_S):
                async with open_filesystem(self.config()) as fs:
                    return await work(fs)

        return trio.run(run)

    async def write(self, fs: Filesystem, synced: bool = True) -> None:
        """Drained, synced, with their burst copies."""
        await fs.setxattr(keys.ROOT_INO, b"user.aifs.layout", self.policy)
        chance = random.Random(7)
        for number, size in enumerate(SIZES):
            data = chance.randbytes(size)
            (handle, *_), inode = await fs.create(
                keys.ROOT_INO, b"file-%d" % number, 0o644, os.O_RDWR, ROOT
            )
            await fs.write(handle, 0, data)
            if synced:
                await fs.fsync(handle)
            await fs.release(handle)
            self.contents[inode.ino] = data
        await fs.wait_drained(keys.ROOT_INO)

    async def compare(self, fs: Filesystem) -> None:
        for ino, data in self.contents.items():
            handle = (await fs.open(ino, os.O_RDONLY)).handle
            try:
                assert bytes(await fs.read(handle, 0, len(data) + 1)) == data
            finally:
                await fs.release(handle)

    async def layouts(self, fs: Filesystem) -> list[tuple[int, int, Striped]]:
        """(ino, oid, layout) of all object sets."""
        found: dict[int, tuple[int, int, Striped]] = {}
        for ino in self.contents:
            inode = await fs.store.engine.view(namespace.get_inode, ino)
            if inode.in_burst:
                continue
            if isinstance(inode.layout, Striped):
                found[inode.oid] = ino, inode.oid, inode.layout
                continue
            chunk = inode.layout.chunk
            _, extents = await fs.store.engine.view(chunks.get_extents, inode.oid, chunk, 0)
            for number in {extent.place.container for extent in extents}:
                record = await fs.store.engine.view(chunks.find_container, number)
                found[number] = 0, number, record.layout
        return list(found.values())

    async def objects_beyond_help(self, fs: Filesystem) -> list[Path]:
        """Of each object set, one object more than it can do without, the same bytes in all of
        them."""
        paths = []
        for ino, oid, layout in await self.layouts(fs):
            # A small file lacks the latter.
            columns = (
                0,
                *range(layout.width, len(layout.servers)),
                *range(1, layout.width),
            )
            found = [
                Path(fs.store.servers[layout.servers[column]].where((ino, oid)))
                for column in columns
            ]
            paths += [path for path in found if path.exists()][: self.tolerates + 1]
        return paths

    async def settled(self, fs: Filesystem) -> None:
        """Whole again, on the data servers alone."""
        await fs.wait_drained(keys.ROOT_INO)
        for ino in self.contents:
            inode = await fs.store.engine.view(namespace.get_inode, ino)
            assert not inode.in_burst
            while not await fs.evictor.evict(ino):  # somebody has just been at it
                await trio.lowlevel.checkpoint()
        await self.compare(fs)
        await fs.collector.drain()

    def sound(self, *works: Callable[[Filesystem], Awaitable[Any]]) -> None:
        """Use the store for each, and have it checked to the last byte."""
        for work in works:
            self.use(work)
        assert check(self.config(), repair=False, deep=True).findings == []


@pytest.fixture
def files(directory: Path, request: pytest.FixtureRequest) -> Files:
    called = getattr(request.node, "callspec", None)
    return Files(directory, called.params.get("policy", "plain") if called else "plain")


@pytest.fixture
async def fs(files: Files) -> AsyncIterator[Filesystem]:
    """Its filesystem; afterwards it is checked to the last byte."""
    with trio.fail_after(LIMIT_S):
        async with open_filesystem(files.config()) as fs:
            yield fs
    await require_sound(files.config())


def spoil(paths: list[Path], how: str) -> None:
    for path in paths:
        if how == "wrong":
            path.write_bytes(bytes(byte ^ 0x40 for byte in path.read_bytes()))
        else:
            path.unlink()


async def scrub(fs: Filesystem, repair: bool = True) -> dict[str, Any]:
    fs.scrub.start(repair)
    await fs.scrub.wait()
    return fs.scrub.status()


async def removed(fs: Filesystem, **fields: object) -> str:
    """Why a removal is refused, once it is not for a while only; '' if it is not."""
    while (outcome := await server_orders.removed(fs, **fields))["passing"]:
        pass
    return outcome["reason"]


def take_away(files: Files, numbers: list[int]) -> None:
    for number in numbers:
        os.rename(files.directory / "data" / str(number), files.directory / f"away-{number}")


def put_back(files: Files, numbers: list[int]) -> None:
    for number in numbers:
        os.rename(files.directory / f"away-{number}", files.directory / "data" / str(number))


async def victims(files: Files, fs: Filesystem) -> list[int]:
    """So many servers of a file that it cannot do without them."""
    _, _, layout = (await files.layouts(fs))[-1]
    return list(layout.servers[: files.tolerates + 1])


async def write_for_victims(files: Files, fs: Filesystem) -> list[int]:
    await files.write(fs)
    return await victims(files, fs)


async def needy(files: Files, fs: Filesystem) -> set[int]:
    """Files whose copies cannot be dropped at present."""
    return {ino for ino in files.contents if not await fs.evictor.evict(ino)}


# --- wrong bytes ----------------------------------------------------------------------------------


@pytest.mark.sweep
@every_policy
@pytest.mark.parametrize("how", ["wrong", long("missing")])
async def test_a_scrub_restores_what_nothing_else_tells(files, fs, policy, how):
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), how)
    await files.compare(fs)  # they are read from their copies
    times = [(await fs.getattr(ino)).mtime_ns for ino in files.contents]
    status = await scrub(fs)
    assert [(await fs.getattr(ino)).mtime_ns for ino in files.contents] == times
    assert (status["from_copies"], status["wrong"]) == (len(SIZES), [])
    told = json.loads(await fs.getxattr(keys.ROOT_INO, b"user.aifs.status"))
    assert told["evict"]["restored_files"] == len(SIZES)
    await files.settled(fs)
    status = await scrub(fs)
    # Nor is anything left in containers.
    assert (status["from_copies"], status["flaws"], status["wrong"]) == (
        0,
        0,
        [],
    )


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["plain", "chunks"])
async def test_without_leave_to_repair_the_copy_stays(files, fs, policy):
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "wrong")
    status = await scrub(fs, repair=False)
    assert {entry["inode"] for entry in status["wrong"]} == files.contents.keys()
    assert all(entry["reason"].endswith("but for its burst copy") for entry in status["wrong"])
    assert not any(entry["for_good"] for entry in status["wrong"])
    assert await needy(files, fs) == files.contents.keys()
    assert (await scrub(fs))["wrong"] == []
    await files.settled(fs)


@pytest.mark.sweep
async def test_a_copy_that_is_wrong_itself_is_no_source(files: Files, fs: Filesystem) -> None:
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "missing")
    ino = max(files.contents)
    copy = (await fs.getattr(ino)).copy
    spoil([Path(fs.store.servers[copy.server].where((0, copy.id)))], "wrong")
    status = await scrub(fs)
    assert {entry["inode"] for entry in status["wrong"]} == {ino}
    assert status["from_copies"] == len(SIZES) - 1
    await fs.wait_drained(keys.ROOT_INO)
    assert await needy(files, fs) == {ino}  # what is left of it, nobody else has
    del files.contents[ino]
    await files.settled(fs)
    await fs.unlink(keys.ROOT_INO, b"file-%d" % (len(SIZES) - 1))
    fs.forget([ino])
    await fs.collector.drain()


@pytest.mark.parametrize("size", [None, 10])
async def test_without_checksums_a_copy_as_long_as_the_file_is_trusted(files, fs, size, caplog):
    caplog.set_level(logging.INFO)
    await files.write(fs)
    for ino in files.contents:
        inode = await fs.getattr(ino)
        await fs.store.engine.transact(namespace.drop_checksums, inode.oid)
        if size is not None:
            os.truncate(fs.store.servers[inode.copy.server].where((0, inode.copy.id)), size)
    paths = await files.objects_beyond_help(fs)
    hidden = {path: path.read_bytes() for path in paths}
    spoil(paths, "missing")
    status = await scrub(fs)
    if size is None:
        assert (status["from_copies"], status["wrong"]) == (len(SIZES), [])
        assert sum("trusted: there are no checksums" in line for line in caplog.messages) == len(
            SIZES
        )
    else:
        assert (status["from_copies"], len(status["wrong"])) == (0, len(SIZES))
        for path, data in hidden.items():
            path.write_bytes(data)
        assert (await scrub(fs))["wrong"] == []
    await files.settled(fs)


@pytest.mark.sweep
@pytest.mark.parametrize("call", ["open_object", "read"])
async def test_a_copy_that_cannot_be_read_now_is_a_source_later(files, fs, call, monkeypatch):
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "missing")

    def fail(*args: object) -> None:
        raise Unavailable("not now")

    with monkeypatch.context() as broken:
        broken.setattr(fs.store.servers.burst()[0], call, fail)
        status = await scrub(fs)
    assert {entry["inode"] for entry in status["wrong"]} == files.contents.keys()
    assert not any(entry["for_good"] for entry in status["wrong"]) or call == "read"
    assert await needy(files, fs) == files.contents.keys()
    assert (await scrub(fs))["wrong"] == []
    await files.settled(fs)


@pytest.mark.sweep
def test_what_a_scrub_has_found_is_known_until_it_is_verified(files: Files) -> None:
    """Whatever becomes of the pass that was to see to it, and of the mount."""

    async def find(fs: Filesystem) -> None:
        await files.write(fs)
        spoil(await files.objects_beyond_help(fs), "wrong")
        await scrub(fs, repair=False)

    async def stop(fs: Filesystem) -> None:
        assert fs.findings.wrong_objects()  # before anybody could evict them
        fs.scrub.start(repair=False)
        fs.scrub.stop()
        await fs.scrub.wait()

    async def mend(fs: Filesystem) -> None:
        assert await needy(files, fs) == files.contents.keys()
        # Of a container that nobody needs.
        assert not await fs.from_copies.restore_users(0, 1 << 40)
        assert (await scrub(fs))["wrong"] == []
        await files.settled(fs)

    files.sound(find, stop, mend)


@pytest.mark.sweep
async def test_a_scrub_that_is_stopped_leaves_no_file_half_restored(files, fs, monkeypatch):
    """Nobody writes to a copy before it is durable that it is the file (B6)."""
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "missing")
    changed = max(files.contents)
    barrier, may_go = fs.store.engine.barrier, trio.Event()
    written = False

    async def slow(seq: int | None = None) -> None:
        await may_go.wait()
        await barrier(seq)

    async def write() -> None:
        nonlocal written
        handle = (await fs.open(changed, os.O_RDWR)).handle
        await fs.write(handle, 0, b"new")
        written = True
        await fs.release(handle)

    monkeypatch.setattr(fs.store.engine, "barrier", slow)
    fs.scrub.start()
    while changed not in fs.io.table.open or not fs.io.table.open[changed].inode.in_burst:
        await trio.lowlevel.checkpoint()
    fs.scrub.stop()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked()
        too_early = written
        may_go.set()
    assert not too_early
    await fs.scrub.wait()
    files.contents[changed] = b"new" + files.contents[changed][3:]
    assert (await scrub(fs))["wrong"] == []
    await files.settled(fs)


async def test_who_reads_or_writes_it_meanwhile_notices_nothing(files, fs):
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "missing")
    readers = {ino: (await fs.open(ino, os.O_RDONLY)).handle for ino in files.contents}
    changed = max(files.contents)
    writer = (await fs.open(changed, os.O_RDWR)).handle  # so it has left the data servers already
    await fs.write(writer, 3, b"new")
    files.contents[changed] = files.contents[changed][:3] + b"new" + files.contents[changed][6:]
    assert (await scrub(fs))["wrong"] == []
    for ino, handle in readers.items():
        assert bytes(await fs.read(handle, 0, MIB * 2)) == files.contents[ino]
    for handle in (writer, *readers.values()):
        await fs.release(handle)
    await files.settled(fs)


# --- lost servers ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ("plain", "remove"),
        ("coded", "remove"),
        ("chunks", "remove"),
        ("plain", "replace"),
        ("chunks-coded", "replace"),
    ]
    + [long(name, "remove") for name in ("mirror", "chunks-mirror", "chunks-coded")]
    + [long(name, "replace") for name in ("mirror", "coded", "chunks", "chunks-mirror")],
)
def test_files_survive_more_lost_servers_than_are_tolerated(
    files: Files, policy: str, how: str
) -> None:
    async def lose(fs: Filesystem) -> None:
        await files.compare(fs)  # from their copies
        for number in gone:
            if how == "remove":
                assert await removed(fs, id=number, lost=True) == ""
            else:
                await order(fs, "replace", id=number, path=str(files.directory / f"new-{number}"))
        for number in gone:
            if how == "replace":
                assert await removed(fs, id=number, lost=True) == ""
            assert number not in fs.store.servers
        await files.compare(fs)
        await files.settled(fs)

    gone = files.use(partial(write_for_victims, files))
    take_away(files, gone)
    files.sound(lose)


@pytest.mark.sweep
@some_policies
def test_a_server_that_is_away_when_it_is_to_be_left_is_done_without(
    files: Files, policy: str
) -> None:
    """``aifs server drain``: what only it has comes from copies, and when it is back it is removed
    like any other."""

    async def leave(fs: Filesystem) -> None:
        for number in gone:
            await order(fs, "drain", id=number)
        while any(set(layout.servers) & set(gone) for _, _, layout in await files.layouts(fs)):
            await trio.sleep(0.01)
        await fs.wait_drained(keys.ROOT_INO)
        assert all(set(layout.servers).isdisjoint(gone) for _, _, layout in await files.layouts(fs))
        await files.compare(fs)

    async def remove(fs: Filesystem) -> None:
        await fs.collector.drain()
        for number in gone:
            assert await removed(fs, id=number) == ""
        await files.settled(fs)

    gone = files.use(partial(write_for_victims, files))
    take_away(files, gone)
    files.use(leave)
    put_back(files, gone)
    files.sound(remove)


@some_policies
async def test_a_server_with_wrong_bytes_is_left_all_the_same(files, fs, policy):
    """The rebuild finds them when it is to move them."""
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "wrong")
    number = (await victims(files, fs))[0]
    await order(fs, "drain", id=number)
    assert await removed(fs, id=number) == ""
    assert (await scrub(fs))["wrong"] == []
    await files.settled(fs)


def test_only_files_without_copies_are_lost_with_a_server(files: Files) -> None:
    async def write(fs: Filesystem) -> int:
        await files.write(fs)
        _, _, layout = (await files.layouts(fs))[-1]
        assert await fs.evictor.evict(max(files.contents))
        return layout.servers[0]

    async def lose(fs: Filesystem) -> None:
        ino = max(files.contents)
        assert (
            await removed(fs, id=gone, lost=True) == f"1 file would be lost with data server {gone}"
        )
        assert (await removed(fs, id=gone, lost=True, lose_files=True)).startswith(
            "1 file cannot be read without"
        )
        status = await scrub(fs)
        # A lost server says that nothing is there.
        assert {entry["inode"] for entry in status["wrong"]} == {ino}
        await fs.unlink(keys.ROOT_INO, b"file-%d" % (len(SIZES) - 1))
        fs.forget([ino])
        del files.contents[ino]
        await fs.collector.drain()
        assert await removed(fs, id=gone, lost=True) == ""
        await files.settled(fs)

    gone = files.use(write)
    take_away(files, [gone])
    files.sound(lose)


# --- eviction -------------------------------------------------------------------------------------


@pytest.mark.sweep
@some_policies
def test_copies_stay_while_servers_that_files_need_are_away(files: Files, policy: str) -> None:
    async def look(fs: Filesystem) -> None:
        kept = await needy(files, fs)
        assert max(kept) == max(files.contents)
        status = json.loads(await fs.getxattr(keys.ROOT_INO, b"user.aifs.status"))
        assert status["evict"]["needed_files"] == len(kept)
        for ino in kept:
            with pytest.raises(Busy, match="bytes of it are missing on the data servers"):
                await fs.setxattr(ino, b"user.aifs.evict", b"")
            assert json.loads(await fs.getxattr(ino, b"user.aifs.state"))["needed"]
        await files.compare(fs)

    async def drop(fs: Filesystem) -> None:
        await files.settled(fs)
        assert fs.evictor.status()["needed_files"] == 0

    gone = files.use(partial(write_for_victims, files))
    take_away(files, gone)
    files.use(look)
    put_back(files, gone)
    files.sound(drop)


async def test_a_file_that_is_opened_while_others_are_looked_at_keeps_its_copy(
    files, fs, monkeypatch
):
    await files.write(fs)
    looking = trio.Event()

    def wrong_objects() -> set[int]:
        looking.set()
        return {1 << 40}

    monkeypatch.setattr(fs.needs, "_wrong_objects", wrong_objects)
    copies = [(await fs.getattr(ino)).copy.id for ino in files.contents]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fs.evictor.evict_copies, copies)
        await looking.wait()
        opened = max(files.contents)
        reader = (await fs.open(opened, os.O_RDONLY)).handle
    assert fs.evictor.status()["evicted_files"] == len(copies) - 1
    writer = (await fs.open(opened, os.O_RDWR)).handle
    await fs.write(writer, 0, b"new")
    files.contents[opened] = b"new" + files.contents[opened][3:]
    await fs.collector.drain()
    for handle in (reader, writer):
        await fs.release(handle)
    await files.compare(fs)
    await fs.wait_drained(keys.ROOT_INO)


async def test_a_copy_that_cannot_be_synced_is_not_given_up_if_it_is_needed(files, fs, monkeypatch):
    await files.write(fs)
    needed, other = max(files.contents), min(files.contents)
    fs.scrub.state.untold = [(await fs.getattr(needed)).oid]

    broken_ids, sync = (
        {(await fs.getattr(ino)).copy.id for ino in (needed, other)},
        BurstCopy.sync,
    )

    async def fail(copy: BurstCopy) -> None:
        if copy.id in broken_ids:
            raise Unavailable("not now")
        await sync(copy)

    with monkeypatch.context() as broken:
        broken.setattr(BurstCopy, "sync", fail)
        with pytest.raises(Unavailable):
            await fs.open(needed, os.O_RDWR)
        await fs.release((await fs.open(other, os.O_RDWR)).handle)
    assert (await fs.getattr(needed)).copy.id in broken_ids
    assert (await fs.getattr(other)).copy.id not in broken_ids  # another one has been staged
    fs.scrub.state.untold = []
    await files.settled(fs)


@pytest.mark.parametrize("policy", ["plain", "coded"])
async def test_copies_stay_while_servers_fail(files: Files, fs: Filesystem, policy: str) -> None:
    await files.write(fs)
    server = fs.store.servers[(await files.layouts(fs))[-1][2].servers[0]]
    server.health.failed("read", OSError(errno.EIO, "broken"), "an object")
    assert (max(files.contents) in await needy(files, fs)) == (policy == "plain")
    server.health.succeeded("read")
    await files.settled(fs)


async def test_when_room_is_needed_others_are_dropped_first(files: Files, fs: Filesystem) -> None:
    """The automatic eviction passes over copies that are needed, wherever they are in the order."""
    await files.write(fs)
    needed = min(files.contents)
    _, oid, _ = next(item for item in await files.layouts(fs) if item[0] == needed)
    fs.scrub.state.untold = [oid]
    for ino in files.contents.keys() - {needed}:
        fs.tier.touch((await fs.getattr(ino)).copy.id)
    fs.tier.needs_eviction = lambda: {fs.store.servers.burst()[0].id: 1}
    assert not await fs.evictor.make_room()  # the one that is needed was first
    assert await fs.evictor.make_room()
    assert await needy(files, fs) == {needed}
    fs.scrub.state.untold = []
    await files.settled(fs)


async def test_a_burst_directory_is_left_by_draining_what_is_needed(files, fs, directory):
    await files.write(fs)
    spoil(await files.objects_beyond_help(fs), "missing")
    await scrub(fs, repair=False)
    await order(fs, "add", path=str(directory / "burst-1"), role="burst")
    await order(fs, "drain", id=0, role="burst")
    assert await removed(fs, id=0, role="burst") == ""
    await files.settled(fs)


# --- crashes --------------------------------------------------------------------------------------


def test_a_copy_that_was_never_synced_is_judged_after_a_power_cut_if_it_is_needed(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def write(fs: Filesystem) -> list[int]:
        await files.write(fs, synced=False)
        _, whole, spoilt = sorted(files.contents)
        paths = {
            ino: Path(fs.store.servers[layout.servers[0]].where((ino, oid)))
            for ino, oid, layout in await files.layouts(fs)
        }
        del paths[whole]
        copy = (await fs.getattr(spoilt)).copy
        spoil([*paths.values(), Path(fs.store.servers[copy.server].where((0, copy.id)))], "wrong")
        await scrub(fs, repair=False)
        return sorted(files.contents)

    async def look(fs: Filesystem) -> None:
        assert [(await fs.getattr(ino)).copy is not None for ino in inos] == [True, False, False]
        await fs.unlink(keys.ROOT_INO, b"file-2")
        fs.forget([inos[2]])
        del files.contents[inos[2]]
        await files.compare(fs)

    async def mend(fs: Filesystem) -> None:
        # Known by now.
        assert [(await fs.getattr(ino)).copy is not None for ino in files.contents] == [
            True,
            False,
        ]
        assert (await scrub(fs))["wrong"] == []
        await files.settled(fs)

    inos = files.use(write)
    for boot, work in [("a boot", look), ("another boot", mend)]:
        monkeypatch.setattr(core_files, "boot_id", lambda boot=boot: boot)
        files.use(work)
    files.sound()


@pytest.mark.sweep
@pytest.mark.parametrize("policy", ["plain", long("chunks-coded")])
@pytest.mark.parametrize(
    "point",
    ["vfs.burst.entered", "vfs.burst.synced", long("vfs.drain.copied"), "vfs.drain.flipped"],
)
@pytest.mark.parametrize("power", [long(False), True], ids=["killed", "power"])
def test_a_crash_while_files_are_restored_loses_none(
    files: Files, policy: str, point: str, power: bool
) -> None:
    if point == "vfs.drain.copied" and policy == "chunks-coded":
        point = "data.append.synced"

    async def damage(fs: Filesystem) -> None:
        await files.write(fs)
        spoil(await files.objects_beyond_help(fs), "wrong")

    async def restore(fs: Filesystem) -> None:
        await scrub(fs)
        await fs.wait_drained(keys.ROOT_INO)

    async def recover(fs: Filesystem) -> None:
        await files.compare(fs)
        assert (await scrub(fs))["wrong"] == []
        await files.settled(fs)

    files.use(damage)
    cut = PowerCut(files.directory)
    with pytest.raises(BaseException) as caught, cut:
        cut.crash_at(point)
        files.use(restore)
    assert is_crash(caught.value)
    faults.disarm_all()
    if power:
        after = files.directory.with_name("after")
        cut.materialise(after, random.Random(1))
        files.directory = after
    files.sound(recover)
