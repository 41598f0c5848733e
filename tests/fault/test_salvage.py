"""The metadata directory is lost, and there is no backup: what the servers can tell alone."""

import json
import os
import random
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path

import pytest
import trio
import yaml

from aifs.check.fsck import check
from aifs.check.salvage.merge import merge
from aifs.check.salvage.rebuild import Result, rebuild
from aifs.cli.main import main
from aifs.core import faults, files
from aifs.core.config import DIRECTORY_FILE
from aifs.core.errors import StoreError
from aifs.core.tasks import first_error
from aifs.data.containers.chunk_codec import digest_of
from aifs.data.naming import StoredObject, list_all
from aifs.data.objects import object_label
from aifs.layout.interleaved import Interleaved
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.meta.keys import ROOT_INO
from aifs.store.restore import restore
from aifs.store.store import format_store
from aifs.vfs import Caller, Filesystem, open_filesystem
from tests.support import modes, shared

SERVERS = 5
UNIT = 4096
OWNER = Caller()
SETTINGS = modes.ON | {
    "layout.unit": UNIT,
    "layout.inline_limit": 0,
    "burst.drain_delay": "1h",
    "meta.backup_interval": 0,
    "burst.stage_on_read": 0,
    "layout.compact_above": 0.99,
}
KINDS = {
    "plain": {},
    "replicas": {"layout.replicas": 2, "layout.count": 2},
    "coded": {"layout.ec": "2+1"},
    "interleaved": {"layout.kind": "interleaved"},
    "interleaved replicas": {"layout.kind": "interleaved", "layout.replicas": 2},
    "interleaved coded": {"layout.kind": "interleaved", "layout.ec": "2+1"},
    "in place": {"burst.directories": []},
}
PROTECTED = [kind for kind in KINDS if "replicas" in kind or "coded" in kind]


def mostly_long(kinds: Iterable[str], *by_default: str) -> pytest.MarkDecorator:
    """These kinds, most of them in long runs alone."""
    marked = [
        pytest.param(kind, marks=[] if kind in by_default else pytest.mark.long) for kind in kinds
    ]
    return pytest.mark.parametrize("kind", marked)


Tree = dict[bytes, tuple[bytes, int, int, int]]
"""Bytes, mode, owner and mtime of files, by path."""


@pytest.fixture
def source() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="aifs-salvage-", dir="/dev/shm"))
    yield parent / "store"
    shutil.rmtree(parent)


def make(source: Path, settings: dict[str, object]) -> None:
    source.mkdir()
    tree: dict = {"servers": [f"data/{number}" for number in range(SERVERS)]}
    for key, value in (SETTINGS | settings).items():
        section, _, name = key.partition(".")
        tree.setdefault(section, {})[name] = value
    (source / DIRECTORY_FILE).write_text(yaml.safe_dump(tree))
    format_store(modes.config_of(source), force=False)


def use(source: Path, work: Callable[[Filesystem], Awaitable]) -> object:
    async def run() -> object:
        with trio.fail_after(60):
            async with open_filesystem(modes.config_of(source)) as fs:
                result = await work(fs)
                await fs.collector.drain()
                return result

    return trio.run(run)


async def write(fs: Filesystem, directory: int, name: bytes, data: bytes, mode: int = 0o640) -> int:
    opened, inode = await fs.create(directory, name, mode, os.O_RDWR, OWNER)
    for start in range(0, len(data), 1 << 20):
        await fs.write(opened.handle, start, data[start : start + (1 << 20)])
    await fs.release(opened.handle)
    return inode.ino


async def settle(fs: Filesystem, inos: list[int]) -> None:
    """All of these files are drained, or durable in place."""
    if fs.store.config.burst.directories:
        fs.drain.request(inos)
        await fs.drain.wait(inos)
        for ino in inos:
            await fs.evictor.evict(ino)
    else:
        await fs.writeback.sync_all()


async def grow(fs: Filesystem, rng: random.Random, count: int = 12) -> list[int]:
    """A random tree of files, some of them sparse, renamed, or rewritten after a drain."""
    directories, inos = [(ROOT_INO, b"")], []
    for number in range(count):
        if rng.random() < 0.2:
            parent, path = rng.choice(directories)
            name = b"dir-%d" % number
            directories.append(
                ((await fs.mkdir(parent, name, 0o755, OWNER)).ino, path + b"/" + name)
            )
        parent, path = rng.choice(directories)
        size = rng.choice(
            [1, 100, UNIT, UNIT + 1, 5 * UNIT + 17, 12 * UNIT, rng.randrange(1, 300_000)]
        )
        ino = await write(
            fs, parent, b"file-%d" % number, rng.randbytes(size), rng.choice([0o600, 0o644, 0o755])
        )
        inos.append(ino)
    await write_big(fs, rng, inos)
    await settle(fs, inos)
    for ino in rng.sample(inos, 3):  # so there are older generations
        opened = await fs.open(ino, os.O_RDWR)
        await fs.write(opened.handle, 0, rng.randbytes(2 * UNIT))
        await fs.release(opened.handle)
    await settle(fs, inos)
    return inos


async def write_big(fs: Filesystem, rng: random.Random, inos: list[int]) -> None:
    inos.append(await write(fs, ROOT_INO, b"big", rng.randbytes((2 << 20) + 4321)))
    sparse = await write(fs, ROOT_INO, b"sparse", b"")
    opened = await fs.open(sparse, os.O_RDWR)
    await fs.write(opened.handle, 3 << 20, b"end")
    await fs.release(opened.handle)
    inos.append(sparse)


async def read_all(fs: Filesystem) -> Tree:
    tree: Tree = {}

    async def walk(directory: int, path: bytes) -> None:
        cookie = 0
        while batch := await fs.readdir(directory, cookie):
            for name, inode, cookie in batch:
                if inode.is_dir:
                    await walk(inode.ino, path + b"/" + name)
                    continue
                opened = await fs.open(inode.ino, os.O_RDONLY)
                steps = range(0, inode.size, 1 << 20)
                data = b"".join([bytes(await fs.read(opened.handle, at, 1 << 20)) for at in steps])
                await fs.release(opened.handle)
                tree[path + b"/" + name] = (data, inode.mode, inode.uid, inode.mtime_ns)

    await walk(ROOT_INO, b"")
    return tree


def fill(source: Path, settings: dict[str, object], seed: int = 0) -> Tree:
    make(source, settings)

    async def work(fs: Filesystem) -> Tree:
        await grow(fs, random.Random(seed))
        return await read_all(fs)

    return use(source, work)


def lose_metadata(source: Path) -> None:
    shutil.rmtree(source / "meta")


def salvaged(source: Path, **options: object) -> Result:
    """The store is rebuilt; fsck then finds nothing but objects that nothing is made of."""
    result = rebuild(modes.config_of(source), **options)
    unused = result.counts["unused_objects"] + result.counts["unused_copies"]
    found = check(modes.config_of(source), repair=False, deep=True).findings
    assert [
        finding for finding in found if finding.kind not in ("orphan-object", "foreign-file")
    ] == []
    assert sum(finding.kind == "orphan-object" for finding in found) == unused
    return result


def objects_of(source: Path, server: int) -> list[StoredObject]:
    return [
        found
        for found in list_all(str(source / f"data/{server}"))
        if isinstance(found, StoredObject)
    ]


# --- any tree ---


@mostly_long(KINDS, *(kind for kind in KINDS if kind != "interleaved replicas"))
def test_a_tree_comes_back_without_its_metadata(source: Path, kind: str) -> None:
    before = fill(source, KINDS[kind])
    lose_metadata(source)
    result = salvaged(source)
    assert result.ok, result.rows
    assert use(source, read_all) == before
    assert not [
        finding
        for finding in check(modes.config_of(source), repair=False).findings
        if finding.repaired
    ]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("kind", KINDS)
def test_many_trees_come_back(source: Path, kind: str, seed: int) -> None:
    before = fill(source, KINDS[kind], seed)
    lose_metadata(source)
    if kind in PROTECTED:
        shutil.rmtree(source / f"data/{seed % SERVERS}")
    salvaged(source)
    assert use(source, read_all) == before


@mostly_long(PROTECTED, "coded", "interleaved coded")
def test_protected_files_come_back_without_one_server(source: Path, kind: str) -> None:
    before = fill(source, KINDS[kind])
    lose_metadata(source)
    shutil.rmtree(source / "data/2")
    result = salvaged(source)
    assert {row.state for row in result.rows} == {"server"}
    assert use(source, read_all) == before


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_unprotected_files_on_a_lost_server_are_named(source: Path, kind: str) -> None:
    before = fill(source, KINDS[kind] | {"layout.count": 1})
    lose_metadata(source)
    fullest = max(
        range(SERVERS), key=lambda number: sum(found.length for found in objects_of(source, number))
    )
    shutil.rmtree(source / f"data/{fullest}")
    result = salvaged(source)
    after = use(source, read_all)
    assert after.items() <= before.items()
    lost = {row.where.encode() for row in result.rows if row.state == "incomplete"}
    assert kind == "interleaved" or lost == set(), "nothing is left of files of one object"
    assert 0 < len(after) < len(before)


@mostly_long(PROTECTED, "replicas", "interleaved coded")
def test_wrong_bytes_are_not_believed(source: Path, kind: str) -> None:
    before = fill(source, KINDS[kind])
    lose_metadata(source)
    for found in objects_of(source, 1):
        with open(found.path, "r+b") as file:
            file.seek(found.length // 2)
            byte = file.read(1)
            file.seek(found.length // 2)
            file.write(bytes([byte[0] ^ 1]))
    result = rebuild(modes.config_of(source))
    assert result.ok, result.rows
    assert use(source, read_all) == before


def test_wrong_bytes_of_plain_files_are_named(source: Path) -> None:
    before = fill(source, KINDS["plain"])
    lose_metadata(source)
    victim = next(found for found in objects_of(source, 1) if found.length > UNIT)
    with open(victim.path, "r+b") as file:
        file.write(b"wrong")
    result = salvaged(source)
    assert [row.state for row in result.rows] == ["doubtful"]
    after = use(source, read_all)
    assert after.keys() == before.keys()
    assert [path for path in after if after[path][0] != before[path][0]] == [
        result.rows[0].where.encode()
    ]


def test_damaged_labels_are_told_by_those_of_other_objects(source: Path) -> None:
    before = fill(source, KINDS["coded"] | {"layout.count": 2})
    lose_metadata(source)
    for found in objects_of(source, 0):
        value = bytearray(os.getxattr(found.path, object_label.NAME))
        value[len(value) // 2] ^= 1
        os.setxattr(found.path, object_label.NAME, bytes(value))
    result = salvaged(source)
    assert result.counts["unlabelled_objects"] == len(objects_of(source, 0))
    assert result.ok, result.rows
    assert use(source, read_all) == before


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_garbage_in_the_directories_is_left_alone(source: Path, kind: str) -> None:
    before = fill(source, KINDS[kind])
    lose_metadata(source)
    (source / "data/0/notes.txt").write_text("mine")
    inside = Path(objects_of(source, 0)[0].path).parent
    (inside / "0000.tmp").write_text("?")
    (inside / f"{0xFFFFFF << 16:016x}.7").write_text("in the wrong directory")
    (
        inside / (inside.parent.name and Path(objects_of(source, 0)[0].path).name[:14] + "ff.0")
    ).write_bytes(b"\0" * 5000)
    result = salvaged(source)
    assert result.counts["foreign_files"] == 3
    assert use(source, read_all) == before


def test_columns_that_were_moved_are_found(source: Path) -> None:
    before = fill(source, KINDS["coded"])

    async def leave(fs: Filesystem) -> None:
        await fs.store.table.change(1, "draining")
        fs.rebuild.look()
        while objects_of(source, 1):
            await trio.sleep(0.01)

    use(source, leave)
    lose_metadata(source)
    assert salvaged(source).ok
    assert use(source, read_all) == before
    lose_metadata(source)
    shutil.rmtree(source / "data/3")
    salvaged(source)
    assert use(source, read_all) == before


# --- the burst tier ---


@pytest.mark.parametrize("kind", ["plain", "interleaved"])
def test_what_was_not_drained_stays_in_the_burst_tier(source: Path, kind: str) -> None:
    make(source, KINDS[kind])
    rng = random.Random(1)
    contents = [rng.randbytes(50_000) for _ in range(5)]

    async def work(fs: Filesystem) -> None:
        cached = await write(fs, ROOT_INO, b"cached", contents[0])
        rewritten = await write(fs, ROOT_INO, b"rewritten", contents[1])
        fs.drain.request([cached, rewritten])
        await fs.drain.wait([cached, rewritten])
        opened = await fs.open(rewritten, os.O_RDWR)
        await fs.write(opened.handle, 0, contents[2])
        await fs.fsync(opened.handle, False)
        await fs.release(opened.handle)
        opened, _ = await fs.create(ROOT_INO, b"synced", 0o604, os.O_RDWR, OWNER)
        await fs.write(opened.handle, 0, contents[3])
        await fs.fsync(opened.handle, False)
        await fs.release(opened.handle)
        await write(fs, ROOT_INO, b"closed", contents[4])
        raise faults.SimulatedCrash("the machine is lost")

    with pytest.raises(BaseException) as caught:
        use(source, work)
    assert isinstance(first_error(caught.value), faults.SimulatedCrash)
    lose_metadata(source)
    result = salvaged(source)
    after = {path: (data, mode & 0o777) for path, (data, mode, *_) in use(source, read_all).items()}
    [nameless] = [path for path in after if path.startswith(b"/lost+found/copy-")]
    assert after.pop(nameless) == (contents[4], 0o600)
    assert after == {
        b"/cached": (contents[0], 0o640),
        b"/rewritten": (contents[2], 0o640),
        b"/synced": (contents[3], 0o604),
    }
    assert result.counts["undrained"] == 3
    assert result.counts["unused_copies"] == 0, "what was cached is a cache again"


def test_files_in_place_come_back_though_nobody_synced_them(source: Path) -> None:
    make(source, KINDS["in place"])
    rng = random.Random(2)
    contents = {
        b"/file-%d" % number: rng.randbytes(rng.randrange(1, 100_000)) for number in range(80)
    }

    async def work(fs: Filesystem) -> None:
        for path, data in contents.items():
            await write(fs, ROOT_INO, path[1:], data)
        raise faults.SimulatedCrash("the machine is lost")

    with pytest.raises(BaseException) as caught:
        use(source, work)
    assert isinstance(first_error(caught.value), faults.SimulatedCrash)
    lose_metadata(source)
    assert salvaged(source).ok
    assert {path: data for path, (data, *_) in use(source, read_all).items()} == contents


# --- after the restore of an older backup ---


@mostly_long(KINDS, "plain", "interleaved coded")
def test_what_is_newer_than_the_backup_is_merged(source: Path, kind: str) -> None:
    make(source, KINDS[kind] | {"meta.backup_interval": "1h"})
    rng = random.Random(3)
    contents = {
        name: rng.randbytes(20_000)
        for name in (b"old", b"rewritten", b"new", b"undrained", b"taken")
    }

    async def work(fs: Filesystem) -> None:
        old = await write(fs, ROOT_INO, b"old", contents[b"old"])
        rewritten = await write(fs, ROOT_INO, b"rewritten", b"before" * 5000)
        taken = await write(fs, ROOT_INO, b"taken", contents[b"taken"])
        deleted = await write(fs, ROOT_INO, b"deleted", contents[b"taken"])
        fs.drain.request([old, rewritten, taken, deleted])
        await fs.drain.wait([old, rewritten, taken, deleted])
        await fs.unlink(ROOT_INO, b"deleted")
        if "interleaved" not in kind:
            await fs.collector.drain()
        await fs.backup.ship()
        opened = await fs.open(rewritten, os.O_RDWR)
        await fs.write(opened.handle, 0, contents[b"rewritten"])
        await fs.release(opened.handle)
        directory = (await fs.mkdir(ROOT_INO, b"dir", 0o755, OWNER)).ino
        new = await write(fs, directory, b"new", contents[b"new"])
        await fs.unlink(ROOT_INO, b"taken")
        again = await write(fs, ROOT_INO, b"taken", contents[b"undrained"])
        fs.drain.request([rewritten, new, again])
        await fs.drain.wait([rewritten, new, again])
        opened, _ = await fs.create(directory, b"undrained", 0o604, os.O_RDWR, OWNER)
        await fs.write(opened.handle, 0, contents[b"undrained"])
        await fs.fsync(opened.handle, False)
        raise faults.SimulatedCrash("the machine is lost")

    with pytest.raises(BaseException) as caught:
        use(source, work)
    assert isinstance(first_error(caught.value), faults.SimulatedCrash)
    lose_metadata(source)
    restore(modes.config_of(source), "", None)
    result = merge(modes.config_of(source), True, lambda what, done, total: None)
    assert result.ok, result.rows
    assert (result.counts["added"], result.counts["newer"]) == (3, kind != "in place")
    found = check(modes.config_of(source), repair=False, deep=True).findings
    assert {finding.kind for finding in found} <= {"orphan-object"}
    after = {path: data for path, (data, *_) in use(source, read_all).items()}
    [other] = [path for path in after if path.startswith(b"/taken.")]
    assert after.pop(other) == contents[b"undrained"]
    rewritten = after.pop(b"/rewritten")
    assert rewritten[:20_000] == contents[b"rewritten"]
    assert after == {
        b"/old": contents[b"old"],
        b"/taken": contents[b"taken"],
        b"/dir/new": contents[b"new"],
        b"/dir/undrained": contents[b"undrained"],
    }
    again = merge(modes.config_of(source), True, lambda what, done, total: None)
    assert (again.counts["added"], again.counts["newer"]) == (0, 0)


# --- files that share chunks ---


REDUNDANCIES = {"plain": PLAIN, "replicas": Redundancy(2), "coded": Redundancy(1, 2, 1)}


async def share(fs: Filesystem, redundancy: Redundancy, rng: random.Random) -> None:
    """Several saves with chunks in common, of which some are deleted; what is left is compacted."""
    pool = [rng.randbytes(rng.randrange(1, 40_000)) for _ in range(12)]
    for step in range(3):
        directory = (await fs.mkdir(ROOT_INO, b"step-%d" % step, 0o755, OWNER)).ino
        files = {
            b"rank-%d" % rank: shared.random_segments(rng, pool, rng.randrange(1, 90))
            for rank in range(3)
        }
        await shared.save(fs, directory, files, redundancy, level=3 * (step % 2))
        await settle(fs, [await write(fs, directory, b"plain", rng.randbytes(70_000))])
    await fs.remove_tree(ROOT_INO, b"step-0")
    await fs.unlink((await fs.lookup(ROOT_INO, b"step-1")).ino, b"rank-1")
    await fs.trash.empty()
    await fs.collector.drain()
    await fs.compaction.compact()
    await fs.collector.drain()


def fill_shared(source: Path, redundancy: Redundancy) -> Tree:
    protection: dict[str, object] = (
        {"layout.ec": "2+1"} if redundancy.parity else {"layout.replicas": redundancy.replicas}
    )
    make(source, protection | {"layout.compact_above": 0.05})

    async def work(fs: Filesystem) -> Tree:
        await share(fs, redundancy, random.Random(4))
        return await read_all(fs)

    return use(source, work)


@pytest.mark.parametrize("redundancy", REDUNDANCIES.values(), ids=REDUNDANCIES)
def test_files_that_share_chunks_come_back(source: Path, redundancy: Redundancy) -> None:
    before = fill_shared(source, redundancy)
    lose_metadata(source)
    if redundancy.is_protected:
        shutil.rmtree(source / "data/1")
    result = salvaged(source)
    assert use(source, read_all).items() >= before.items()
    missed = {row.where.encode() for row in result.rows if row.state != "server"}
    assert not missed & before.keys(), "only of what was deleted something lacks"


def test_a_file_without_a_shared_chunk_is_named_and_left_out(source: Path) -> None:
    rng = random.Random(5)
    lost, common = shared.Segment(rng.randbytes(9_000)), shared.Segment(rng.randbytes(9_000))
    files = {
        b"both": [common, lost],
        b"one": [lost, shared.Segment(bytes(50))],
        b"other": [common, common],
    }
    make(source, {})
    use(source, lambda fs: shared.save(fs, ROOT_INO, files))
    digest = digest_of(lost.data)
    for found in [found for server in range(SERVERS) for found in objects_of(source, server)]:
        data = Path(found.path).read_bytes()
        at = data.find(lost.data)
        if at >= 0:
            assert digest in data[:at]
            Path(found.path).write_bytes(data[:at] + b"x" + data[at + 1 :])
    lose_metadata(source)
    result = rebuild(modes.config_of(source))
    assert sorted(row.where for row in result.rows if row.state == "incomplete") == [
        "/both",
        "/one",
    ]
    assert {path: data for path, (data, *_) in use(source, read_all).items()} == {
        b"/other": 2 * common.data
    }


def test_a_copy_of_a_file_that_shares_chunks_is_its_cache_again(source: Path) -> None:
    content = random.Random(6).randbytes(3 << 20)
    rows = [shared.Segment(content[:UNIT]), shared.Segment(content[UNIT:])]
    make(source, {"layout.kind": "interleaved"})

    async def work(fs: Filesystem) -> None:
        ino = await write(fs, ROOT_INO, b"file", content)
        await settle(fs, [ino])
        await shared.store(fs, {ino: rows})
        assert await fs.stager.stage(ino)

    use(source, work)
    lose_metadata(source)
    assert salvaged(source).counts["unused_copies"] == 0
    assert use(source, lambda fs: fs.lookup(ROOT_INO, b"file")).copy is not None


@pytest.mark.parametrize("redundancy", REDUNDANCIES.values(), ids=REDUNDANCIES)
def test_newer_files_that_share_chunks_are_merged(source: Path, redundancy: Redundancy) -> None:
    rng = random.Random(7)
    common, old, new = (shared.Segment(rng.randbytes(30_000)) for _ in range(3))
    private = shared.Segment(rng.randbytes(5_000), is_shared=False)
    make(source, {"meta.backup_interval": "1h"})

    contents = {
        b"/rewritten": new.data + common.data,
        b"/kept": old.data + private.data,
        b"/added": common.data + new.data + private.data + common.data,
    }

    async def work(fs: Filesystem) -> None:
        files = {b"rewritten": [old, common], b"kept": [old, private]}
        inos = await shared.save(fs, ROOT_INO, files, redundancy)
        await fs.backup.ship()
        await shared.store(fs, {inos[b"rewritten"]: [new, common]}, redundancy)
        await shared.save(fs, ROOT_INO, {b"added": [common, new, private, common]}, redundancy)
        raise faults.SimulatedCrash("the machine is lost")

    with pytest.raises(BaseException) as caught:
        use(source, work)
    assert isinstance(first_error(caught.value), faults.SimulatedCrash)
    lose_metadata(source)
    restore(modes.config_of(source), "", None)
    result = merge(modes.config_of(source), True, lambda what, done, total: None)
    assert result.ok, result.rows
    assert (result.counts["added"], result.counts["newer"]) == (1, 1)
    assert check(modes.config_of(source), repair=False, deep=True).findings == []
    assert {path: data for path, (data, *_) in use(source, read_all).items()} == contents


# --- when it refuses ---


def test_metadata_that_can_be_used_is_only_moved_aside(source: Path) -> None:
    before = fill(source, KINDS["plain"])
    with pytest.raises(StoreError, match="can be used"):
        rebuild(modes.config_of(source))
    salvaged(source, force=True)
    assert (source / "meta.aside-1/data.mdb").exists()
    assert use(source, read_all) == before


def test_metadata_that_is_damaged_beyond_use_is_moved_aside(source: Path) -> None:
    before = fill(source, KINDS["plain"])
    for name in ("data.mdb", "journal.0", "journal.1"):
        (source / "meta" / name).write_bytes(b"\xff" * 8192)
    salvaged(source)
    assert (source / "meta.aside-1/data.mdb").exists()
    assert use(source, read_all) == before


def test_a_rebuild_that_was_interrupted_is_begun_anew(source: Path) -> None:
    before = fill(source, KINDS["interleaved"])
    lose_metadata(source)
    rebuild(modes.config_of(source))
    (source / "meta/.aifs").unlink()
    salvaged(source)
    assert use(source, read_all) == before


def test_a_backup_is_better(source: Path) -> None:
    fill(source, KINDS["plain"] | {"meta.backup_interval": "1h"})
    lose_metadata(source)
    with pytest.raises(StoreError, match="aifs meta restore"):
        rebuild(modes.config_of(source))
    assert not (source / "meta").exists()
    assert salvaged(source, force=True).ok


def test_it_can_be_put_elsewhere_and_without_looking_at_bytes(source: Path) -> None:
    before = fill(source, KINDS["plain"])
    lose_metadata(source)
    result = rebuild(modes.config_of(source), to=str(source / "other"), verify=False)
    assert result.counts["checked"] == 0
    (source / "other").rename(source / "meta")
    assert use(source, read_all) == before
    assert not check(modes.config_of(source), repair=False, deep=True).findings


def test_servers_without_labels_fail_nothing(source: Path) -> None:
    class NoLabels:
        def before(self, op: str, path: str) -> None:
            if op == "set_label":
                raise OSError(95, "Operation not supported")

        def after(self, op: str, path: str, *args: object) -> None:
            pass

    files.set_hook(NoLabels())
    try:
        before = fill(source, {"layout.count": 1})
    finally:
        files.set_hook(None)
    lose_metadata(source)
    result = salvaged(source)
    assert result.counts["unlabelled_objects"] == len(before)
    assert {row.state for row in result.rows} == {"doubtful"}
    after = use(source, read_all)
    assert all(path.startswith(b"/lost+found/") for path in after)
    assert sorted(data for data, *_ in after.values()) == sorted(
        data for data, *_ in before.values()
    )


def test_an_interleaved_file_knows_its_chunks(source: Path) -> None:
    fill(source, KINDS["interleaved"])
    lose_metadata(source)
    salvaged(source)

    async def look(fs: Filesystem) -> None:
        inode = await fs.lookup(ROOT_INO, b"big")
        assert isinstance(inode.layout, Interleaved)

    use(source, look)


# --- the command ---


def test_the_command_tells_what_came_of_it(
    source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fill(source, KINDS["plain"] | {"layout.count": 5})
    lose_metadata(source)
    victim = max(
        objects_of(source, 1), key=lambda found: found.length * (found.allocated > 1 << 18)
    )
    os.unlink(victim.path)
    assert main(["fsck", str(source), "--rebuild-from-servers", "--json"]) == 4
    said = json.loads(capsys.readouterr().out)
    assert [(row["state"], row["where"]) for row in said["rows"]] == [("incomplete", "/big")]
    assert said["counts"]["incomplete"] == 1 and said["counts"]["files"] > 5
    assert main(["fsck", str(source), "--rebuild-from-servers"]) == 8
    assert "can be used" in capsys.readouterr().err
    assert main(["fsck", str(source), "--rebuild-from-servers", "--force", "--no-verify"]) == 4
    out = capsys.readouterr().out
    assert "/big" in out and "lost with the metadata" in out
    assert main(["fsck", str(source), "--rebuild-from-servers", "--merge"]) == 4
    assert "0 added" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options",
    [
        ["--force"],
        ["--rebuild-from-servers", "--deep"],
        ["--rebuild-from-servers", "--merge", "--force"],
    ],
)
def test_options_that_make_no_sense(source: Path, options: list[str]) -> None:
    assert main(["fsck", str(source), *options]) == 2
