"""Scrub: it finds every flip that was planted and only those, repairs what can be, and names the
rest.
"""

import json
import os
import random
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import trio

from aifs.check.fsck import check
from aifs.core.config import Config
from aifs.core.errors import Unavailable
from aifs.data.objects.columns import Columns
from aifs.files.types import Caller
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.kv import Transaction
from aifs.meta.records import Inode
from aifs.upkeep import scrub as scrub_module
from aifs.upkeep import scrub_state
from aifs.vfs import Filesystem, open_filesystem
from tests.support.data_servers import failing
from tests.support.memory_engine import MemoryEngine
from tests.support.modes import STRIPED, config_of, make_store
from tests.support.spoil import flip
from tests.support.stores import assert_sound, overwrite, read_file, require_sound, write_file

KIB, MIB = 1 << 10, 1 << 20
ROOT = keys.ROOT_INO
ME = Caller()

BASE = STRIPED | {
    "burst.drain_delay": "0s",
    "burst.throttle_max": "0s",
    "layout.unit": "64KiB",
    "scrub.bandwidth": "0",
    "rebuild.workers": "1",
}
POLICIES = {
    b"plain": b"count=2",
    b"mirror": b"count=1,replicas=2",
    b"three": b"count=1,replicas=3",
    b"coded": b"ec=2+1",
    b"chunks": b"kind=interleaved",
    b"chunks-mirror": b"kind=interleaved,replicas=2",
    b"chunks-coded": b"kind=interleaved,ec=2+1",
}
PROTECTED = [name for name in POLICIES if name not in (b"plain", b"chunks")]
SIZES = (3000, 70_000, 300_000, MIB + 5, 2 * MIB + 70_001)


@pytest.fixture
def store(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setattr(scrub_module, "_PAUSE_S", 0.01)
    make_store(directory, BASE)
    return config_of(directory)


def use(config: Config, work: Callable[[Filesystem], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with open_filesystem(config) as fs:
            return await work(fs)

    return trio.run(run)


@pytest.fixture
async def fs(store: Config) -> AsyncIterator[Filesystem]:
    async with open_filesystem(store) as fs:
        yield fs
    await require_sound(store)


class Files:
    """What was written: content by directory and name, and where the parts lie."""

    def __init__(self, seed: int = 1) -> None:
        self.contents: dict[tuple[bytes, bytes], bytes] = {}
        self.inos: dict[tuple[bytes, bytes], int] = {}
        self._random = random.Random(seed)

    async def write(self, fs: Filesystem, directories: Iterable[bytes] = tuple(POLICIES)) -> None:
        """Files of many sizes in each directory, drained, without burst copies."""
        for directory in directories:
            parent = await fs.mkdir(ROOT, directory, 0o755, ME)
            await fs.setxattr(parent.ino, b"user.aifs.layout", POLICIES[directory])
            for number, size in enumerate(SIZES):
                name = b"file-%d" % number
                data = self._random.randbytes(size)
                self.contents[directory, name] = data
                self.inos[directory, name] = await write_file(fs, name, data, parent.ino)
        await fs.wait_drained(ROOT)
        for ino in self.inos.values():
            assert await fs.evictor.evict(ino)
        await fs.collector.drain()

    async def compare(self, fs: Filesystem) -> None:
        for place, ino in self.inos.items():
            assert await read_file(fs, ino) == self.contents[place], place

    def objects(self, fs: Filesystem) -> Any:
        """(directory, path, length that counts) of all objects and containers."""

        async def find() -> list[tuple[bytes, str, int]]:
            found: dict[str, tuple[bytes, str, int]] = {}
            for (directory, _), ino in self.inos.items():
                inode = await fs.getattr(ino)
                if isinstance(inode.layout, Striped):
                    for column, server in enumerate(inode.layout.servers):
                        path = fs.store.servers[server].where((ino, inode.oid))
                        found[path] = (
                            directory,
                            path,
                            inode.layout.object_length(column, inode.size),
                        )
                elif inode.layout is not None:
                    for first in range(0, inode.size, 64 * inode.layout.chunk):
                        _, extents = await fs.store.engine.view(
                            chunks.get_extents, inode.oid, inode.layout.chunk, first
                        )
                        for place in [extent.place for extent in extents]:
                            record = await fs.store.engine.view(
                                chunks.find_container, place.container
                            )
                            for column, server in enumerate(record.layout.servers):
                                path = fs.store.servers[server].where((0, place.container))
                                length = record.layout.object_length(column, record.length)
                                found[path] = directory, path, length
            return [item for item in found.values() if item[2]]

        return find()


@pytest.fixture
def files() -> Files:
    return Files()


async def staged(fs: Filesystem, ino: int) -> None:
    """The file has a copy in the burst tier."""
    assert await fs.stager.stage(ino)


async def scrub(fs: Filesystem, repair: bool = True) -> dict[str, Any]:
    fs.scrub.start(repair)
    with trio.fail_after(60):
        await fs.scrub.wait()
        while repair and not fs.rebuild.idle:
            await trio.sleep(0.01)
    return fs.scrub.status()


@pytest.mark.sweep
async def test_nothing_is_found_where_nothing_is_wrong(fs: Filesystem, files: Files) -> None:
    await files.write(fs)
    status = await scrub(fs)
    assert (status["flaws"], status["wrong"], status["unverified"]) == (0, [], 0)
    lengths = sum(length for _, _, length in await files.objects(fs))
    assert lengths <= status["read_bytes"] <= 2 * lengths


@pytest.mark.sweep
async def test_what_is_wrong_only_once_is_not_wrong(fs, files, monkeypatch):
    """Bytes, or lengths, that were read while something changed, which looks afterwards as it did
    before."""
    spoilt = set()
    read_now = Columns.read_now

    def spoil(columns: Columns, column: int, buffer: memoryview, offset: int) -> int:
        done = read_now(columns, column, buffer, offset)
        place = columns.key, column, offset
        if done and place not in spoilt:
            spoilt.add(place)
            if len(spoilt) % 2:
                buffer[done // 2] ^= 1
            else:
                done -= 1
        return done

    await files.write(fs)
    with monkeypatch.context() as patch:
        patch.setattr(Columns, "read_now", spoil)
        status = await scrub(fs)
    assert spoilt and (status["flaws"], status["repaired"], status["wrong"]) == (0, 0, [])


@pytest.mark.sweep
async def test_every_flip_is_found_and_repaired(fs: Filesystem, files: Files) -> None:
    """Data, replicas, parity, chunks, headers: whatever is hit, the bytes are what they were
    afterwards."""
    chance = random.Random(3)
    await files.write(fs, PROTECTED)
    objects = await files.objects(fs)
    before = {path: Path(path).read_bytes()[:length] for _, path, length in objects}
    for _ in range(3):
        one_each = {}
        for item in objects:  # one object of each file or container, so that the others can tell
            one_each.setdefault(os.path.basename(item[1]), []).append(item)
        planted = 0
        for candidates in one_each.values():
            _, path, length = chance.choice(candidates)
            for offset in {0, chance.randrange(length), length - 1}:
                flip(path, offset)
                planted += 1
        status = await scrub(fs)
        assert status["wrong"] == []
        assert status["rebuilding"] == 0
        assert len(one_each) <= status["flaws"] == status["repaired"] <= planted
        assert {path: Path(path).read_bytes()[:length] for _, path, length in objects} == before
    assert (await scrub(fs))["flaws"] == 0
    await files.compare(fs)


@pytest.mark.sweep
async def test_without_leave_to_repair_files_are_named_and_left(fs, files):
    await files.write(fs, [b"mirror", b"coded"])
    objects = await files.objects(fs)
    hit = [
        next(path for found, path, _ in objects if found == directory)
        for directory in (b"mirror", b"coded")
    ]
    for path in hit:
        flip(path, 100)
    before = [Path(path).read_bytes() for path in hit]
    status = await scrub(fs, repair=False)
    assert (status["flaws"], status["repaired"]) == (2, 0)
    assert sorted(item["paths"] for item in status["wrong"]) == [
        ["/coded/file-0"],
        ["/mirror/file-0"],
    ]
    assert not any(item["for_good"] for item in status["wrong"])
    assert [Path(path).read_bytes() for path in hit] == before
    assert (await scrub(fs))["repaired"] == 2


@pytest.mark.sweep
async def test_objects_that_are_missing_short_or_long_are_mended(fs, files):
    await files.write(fs, PROTECTED)
    objects = await files.objects(fs)
    one_each = {
        os.path.basename(path): (directory, path, length) for directory, path, length in objects
    }
    for number, (_, path, length) in enumerate(one_each.values()):
        if number % 3 == 0:
            os.unlink(path)
        elif number % 3 == 1:
            os.truncate(path, length // 2)
        elif not os.path.basename(path).endswith(".0"):
            os.truncate(path, length + 100)
    status = await scrub(fs)
    assert status["wrong"] == []
    assert status["rebuilding"] >= len(one_each) // 3
    assert (await scrub(fs))["flaws"] == 0
    await files.compare(fs)


def test_what_is_lost_is_named_with_all_its_names(
    store: Config, files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    async def work(fs: Filesystem) -> None:
        await files.write(fs, [b"plain", b"chunks"])
        await fs.link(files.inos[b"plain", b"file-4"], ROOT, b"second-\xff")
        inode = await fs.getattr(files.inos[b"plain", b"file-4"])
        flip(fs.store.servers[inode.layout.servers[1]].where((inode.ino, inode.oid)), 3)
        ino = files.inos[b"chunks", b"file-3"]
        oid = (await fs.getattr(ino)).oid
        place = (await fs.store.engine.view(chunks.get_extents, oid, MIB, 0))[1][0].place
        # Its header.
        flip(fs.store.servers[place.server].where((0, place.container)), place.offset + 20)
        status = await scrub(fs)
        assert status["flaws"] == 0
        told = {frozenset(item["paths"]): item for item in status["wrong"]}
        striped = told[frozenset(("/plain/file-4", "/second-\udcff"))]
        chunk = told[frozenset(("/chunks/file-3",))]
        assert (striped["start"], striped["end"], striped["servers"]) == (
            0,
            MIB,
            sorted(inode.layout.servers),
        )
        assert (chunk["start"], chunk["end"], chunk["servers"]) == (0, MIB, [place.server])
        assert all(item["for_good"] for item in told.values())
        assert len(told) == 2
        again = await fs.getxattr(ROOT, b"user.aifs.scrub")
        assert json.loads(again)["wrong_ranges"] == 2

    use(store, work)
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 2
    kinds = {finding.kind for finding in check(store, repair=False, deep=True).findings}
    assert kinds == {"wrong-checksum"}


@pytest.mark.sweep
async def test_a_flip_in_a_file_that_is_deleted_is_no_error(fs: Filesystem, files: Files) -> None:
    await files.write(fs, [b"plain", b"chunks"])
    ino = files.inos[b"chunks", b"file-3"]
    oid = (await fs.getattr(ino)).oid
    place = (await fs.store.engine.view(chunks.get_extents, oid, MIB, 0))[1][0].place
    flip(fs.store.servers[place.server].where((0, place.container)), place.offset + 2000)
    parent = await fs.lookup(ROOT, b"chunks")
    await fs.unlink(parent.ino, b"file-3")
    fs.forget([ino])
    await fs.collector.drain()
    assert (await scrub(fs))["wrong"] == []


@pytest.mark.sweep
async def test_a_wrong_burst_copy_is_dropped_and_only_that(fs: Filesystem, files: Files) -> None:
    await files.write(fs, [b"plain", b"chunks"])
    copies = []
    for place in ((b"plain", b"file-4"), (b"chunks", b"file-4"), (b"plain", b"file-3")):
        ino = files.inos[place]
        await staged(fs, ino)
        copies.append((await fs.getattr(ino)).copy)
    for copy in copies[:2]:
        flip(fs.store.servers[copy.server].where((0, copy.id)), MIB + 9)
    status = await scrub(fs)
    assert (status["dropped_copies"], status["flaws"], status["wrong"]) == (2, 2, [])
    assert (await fs.getattr(files.inos[b"plain", b"file-3"])).copy == copies[2]
    await files.compare(fs)


@pytest.mark.sweep
def test_a_pass_that_is_interrupted_goes_on_after_a_restart(store: Config, files: Files) -> None:
    async def begin(fs: Filesystem) -> None:
        await files.write(fs)
        for _, path, _ in (await files.objects(fs))[-1:]:
            flip(path, 0)
        fs.scrub.start(bandwidth=1)  # it will not get far
        while fs.scrub.status()["read_bytes"] == 0:
            await trio.sleep(0.01)
        assert fs.scrub.status()["running"]
        await scrub_state.save(fs.store.engine, fs.scrub.state)

    async def go_on(fs: Filesystem) -> dict[str, Any]:
        with trio.fail_after(60):
            while not fs.scrub.status()["begun_s"] or not fs.scrub.loaded:
                await trio.sleep(0.01)
        status = fs.scrub.status()
        assert status["running"], status
        fs.scrub.start(bandwidth=0)
        with trio.fail_after(60):
            await fs.scrub.wait()
        return fs.scrub.status()

    use(store, begin)
    status = use(store, go_on)
    assert not status["running"] and status["flaws"] == status["repaired"] == 1
    assert_sound(store)


async def test_no_file_is_passed_over_for_a_clone_whose_objects_a_later_file_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hosts take their numbers from windows of ids, so a clone may have a lower one."""
    monkeypatch.setattr(scrub_module, "_SLICE", 1)
    engine = MemoryEngine()

    def fill(tx: Transaction) -> None:
        for ino in (5, 900):
            inode = Inode(ino, stat.S_IFREG, 0, 0, 1, 0, 0, 0, 0, 0, 0, parent=1)
            inode.layout, inode.oid, inode.named = Striped(4096, (0,)), 77, 900
            tx.put(keys.inode(ino), inode.encode())
            tx.put(keys.clone(77, ino), b"")

    await engine.transact(fill)
    found, _ = await engine.view(scrub_module.find_files, *keys.all_of(b"i"))
    assert found == [([(900, 77)], 5)]


async def test_scrubs_while_files_are_written_find_nothing(fs: Filesystem) -> None:
    """Written, rewritten, drained, deleted, compacted meanwhile."""
    chance = random.Random(9)
    parents = []
    for directory, policy in POLICIES.items():
        parent = await fs.mkdir(ROOT, directory, 0o755, ME)
        await fs.setxattr(parent.ino, b"user.aifs.layout", policy)
        parents.append(parent.ino)
    at_once = await fs.mkdir(ROOT, b"in-place", 0o755, ME)
    await fs.setxattr(at_once.ino, b"user.aifs.tier", b"capacity")
    parents.append(at_once.ino)
    done = False

    async def write() -> None:
        nonlocal done
        names: dict[tuple[int, bytes], int] = {}
        for _ in range(100):
            place = chance.choice(parents), b"%d" % chance.randrange(4)
            kind = chance.random()
            if place in names and kind < 0.3:
                await fs.unlink(*place)
                fs.forget([names.pop(place)])
            elif place in names:
                offset = chance.randrange(200_000)
                data = chance.randbytes(chance.randrange(1, 150_000))
                await overwrite(fs, names[place], offset, data)
            else:
                parent, name = place
                data = chance.randbytes(chance.randrange(1, 400_000))
                names[place] = await write_file(fs, name, data, parent)
            if kind > 0.8:
                fs.drain.request(names.values())
            if kind > 0.95:
                await fs.compaction.compact()
            await trio.sleep(0.002)
        done = True

    passes = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        while not done or passes < 2:
            fs.scrub.start()
            with trio.move_on_after(0.2):
                await fs.scrub.wait()
            status = fs.scrub.status()
            assert (status["flaws"], status["wrong"], status["dropped_copies"]) == (0, [], 0)
            passes += 1
            fs.scrub.stop()
            await fs.scrub.wait()
    await fs.wait_drained(ROOT)
    assert (await scrub(fs))["flaws"] == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_with_verify_nobody_reads_wrong_bytes(store: Config, files: Files, policy: bytes) -> None:
    verifying = store.model_copy(update={"data": store.data.model_copy(update={"verify": "read"})})

    async def work(fs: Filesystem) -> None:
        await files.write(fs, [policy])
        objects = await files.objects(fs)
        last = max(objects, key=lambda item: item[2])
        for offset in (100, last[2] // 2, last[2] - 1):
            flip(last[1], offset)
        wrong = 0
        for place, ino in files.inos.items():
            try:
                assert await read_file(fs, ino) == files.contents[place]
            except Unavailable:
                wrong += 1
        assert (wrong > 0) == (policy in (b"plain", b"chunks"))
        if wrong:
            for offset in (100, last[2] // 2, last[2] - 1):
                flip(last[1], offset)
            return
        assert (await scrub(fs))["wrong"] == []
        assert (await scrub(fs))["flaws"] == 0

    use(verifying, work)
    assert_sound(store)


async def test_an_object_that_cannot_be_read_is_made_anew(fs: Filesystem, files: Files) -> None:
    await files.write(fs, [b"coded"])
    inode = await fs.getattr(files.inos[b"coded", b"file-4"])
    path = fs.store.servers[inode.layout.servers[1]].where((inode.ino, inode.oid))
    with failing("read_into", path):
        fs.scrub.start()
        await fs.scrub.wait()
    status = fs.scrub.status()
    assert (status["rebuilding"], status["wrong"]) == (1, [])
    assert (await scrub(fs))["flaws"] == 0
    await files.compare(fs)


@pytest.mark.sweep
async def test_a_server_that_does_not_answer_says_nothing_about_files(fs, files):
    await files.write(fs, [b"plain", b"chunks", b"mirror"])
    root = fs.store.servers[0].address
    os.rename(root, root + ".away")
    try:
        fs.scrub.start()
        await fs.scrub.wait()
    finally:
        os.rename(root + ".away", root)
    status = fs.scrub.status()
    assert (status["wrong"], status["rebuilding"]) == ([], 0)
    assert status["unverified"]
    with trio.fail_after(60):
        while any(server.absent for server in fs.store.servers.values()):
            await trio.sleep(0.05)
    status = await scrub(fs)
    assert (status["flaws"], status["wrong"], status["unverified"]) == (0, [], 0)


def test_what_is_lost_below_long_paths_fits_the_record(store: Config) -> None:
    """A scrub that cannot be recorded would never end."""

    async def work(fs: Filesystem) -> None:
        lost = {
            "paths": ["/" + "n" * 1500] * 2,
            "inode": 5,
            "object": 5,
            "start": 0,
            "end": 1,
            "servers": [0],
            "reason": "r",
        }
        state = scrub_state.ScrubState(wrong=[lost | {"for_good": True}] * scrub_state.WRONG_MAX)
        await scrub_state.save(fs.store.engine, state)
        assert len(state.wrong) == scrub_state.WRONG_MAX
        assert 50 < len((await scrub_state.load(fs.store.engine)).wrong) < scrub_state.WRONG_MAX

    use(store, work)


async def test_a_copy_is_kept_where_nobody_can_tell_whether_it_is_right(fs, files):
    """The list of the file's chunks is damaged: the copy may be all that is whole."""
    await files.write(fs, [b"chunks"])
    ino = files.inos[b"chunks", b"file-4"]
    await staged(fs, ino)
    inode = await fs.getattr(ino)
    key = keys.chunk_list(inode.oid, 0)
    record = await fs.store.engine.view(lambda tx: tx.get(key))
    await fs.store.engine.transact(lambda tx: tx.put(key, record[:-1]))
    assert (await scrub(fs))["dropped_copies"] == 0
    assert (await fs.getattr(ino)).copy == inode.copy
    await files.compare(fs)
    await fs.store.engine.transact(lambda tx: tx.put(key, record))
