"""The metadata directory is lost: what comes back from the backups on the data servers, and what
deletions wait for.
"""

import os
import random
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
import trio
import trio.testing

from aifs.check.fsck import check
from aifs.core import faults, files
from aifs.core.config import load
from aifs.core.errors import FsError, NoSpace, NotFound, StoreError, Unavailable
from aifs.data.directory_storage import DirectoryStorage
from aifs.data.naming import list_all
from aifs.data.storage import BACKUP, StoredObject
from aifs.meta.backup import BASE, INCREMENT, parse_name
from aifs.store import backup as backups
from aifs.store import backup as vfs_backup
from aifs.store import restore as vfs_restore
from aifs.store.restore import FoundBackups, back_up, find, restore, states
from aifs.vfs import Caller, Filesystem, open_filesystem
from tests.support import modes
from tests.support.churn import UNIT, Churn, read_tree
from tests.support.data_servers import failing
from tests.support.kernel import Kernel
from tests.support.ledger import Ledger
from tests.support.powercut import PowerCut

ROOT, OWNER = 1, Caller()
Result = TypeVar("Result")
ON = modes.ON | {"meta.backup_interval": "1h", "layout.unit": str(UNIT)}
MODES = {
    "striped": ON | modes.STRIPED,
    "interleaved": ON | modes.INTERLEAVED | {"layout.inline_limit": "0"},
    "daemon": ON | modes.BY_DAEMON,
}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that bases have parts, and increments become too many."""
    monkeypatch.setattr(vfs_backup, "PART_BYTES", 1000)
    monkeypatch.setattr(vfs_backup, "_SLICE", 8)
    monkeypatch.setattr(vfs_backup, "_MIN_BASE_BYTES", 5000)


@pytest.fixture
def empty(scratch: Path) -> Path:
    """A store without files."""
    modes.make_store(scratch / "0", ON)
    return scratch / "0"


def lose_metadata(source: Path) -> None:
    shutil.rmtree(source / "meta")


def restored(source: Path, at: int | None = None) -> None:
    """The metadata comes back, and fsck finds nothing but what is unknown to it; that it moves
    aside."""
    restore(modes.config_of(source), "", at)
    unknown = {"orphan-object"}
    found = check(modes.config_of(source), repair=False).findings
    assert {finding.kind for finding in found} <= unknown, found
    check(modes.config_of(source), repair=True)
    assert not check(modes.config_of(source), repair=False).findings


def segments(source: Path) -> dict[str, list[Path]]:
    """Copies of each file of the backups, by name."""
    copies: dict[str, list[Path]] = {}
    for path in sorted(source.glob(f"data/*/{BACKUP}/*")):
        copies.setdefault(path.name, []).append(path)
    return copies


def use(source: Path, work: Callable[..., Awaitable[Result]], *args: object) -> Result:
    """Mount a store for ``work(fs, *args)``."""

    async def run() -> Result:
        async with open_filesystem(modes.config_of(source)) as fs:
            return await work(fs, *args)

    return trio.run(run)


def unavailable(*_: object) -> None:
    raise Unavailable("told to")


async def write(fs: Filesystem, name: bytes, content: bytes) -> int:
    (handle, *_), inode = await fs.create(ROOT, name, 0o644, os.O_RDWR, OWNER)
    await fs.write(handle, 0, content)
    await fs.release(handle)
    return inode.ino


async def read(fs: Filesystem, name: bytes) -> bytes:
    handle, *_ = await fs.open((await fs.lookup(ROOT, name)).ino, os.O_RDONLY)
    try:
        return bytes(await fs.read(handle, 0, 1 << 20))
    finally:
        await fs.release(handle)


async def test_a_backup_that_is_not_what_was_written_does_not_count(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await trio.to_thread.run_sync(modes.make_store, scratch / "s", ON, 2)
    async with open_filesystem(modes.config_of(scratch / "s")) as fs:
        await write(fs, b"file", b"bytes")
        with monkeypatch.context() as patch:
            read_file = files.read_file
            patch.setattr(files, "read_file", lambda path, **how: read_file(path, **how)[:-1])
            with pytest.raises(Unavailable, match="not what was written"):
                await fs.backup.ship()
        assert not segments(scratch / "s")
        await fs.backup.ship()
        assert segments(scratch / "s")


async def test_changes_are_collected_only_where_an_increment_can_follow(scratch: Path) -> None:
    await trio.to_thread.run_sync(modes.make_store, scratch / "s", ON, 2)
    async with open_filesystem(modes.config_of(scratch / "s")) as fs:
        await write(fs, b"before the first base", b"bytes")
        assert fs.backup.status()["changed_bytes"] == 0
        await fs.backup.ship()
        await write(fs, b"after it", b"bytes")
        assert fs.backup.status()["changed_bytes"] > 0


# --- any history ---


async def live(source: Path, ledger: Ledger, rng: random.Random, orderly: bool) -> None:
    """Work, with backups in between; ``ledger`` takes for durable what has been backed up."""
    async with open_filesystem(modes.config_of(source)) as fs, Kernel(fs) as kernel:
        churn = Churn(kernel, ledger, rng, lambda: None)
        for _ in range(rng.randint(20, 150)):
            await churn.step()
            ledger.durable, ledger.floors = 0, []  # renames and syncs are no backups
            if rng.random() < 0.05:
                await fs.backup.ship()
                note_backup(ledger)
        restore_notes(ledger)
        if not orderly:
            raise faults.SimulatedCrash("the machine is lost")
        await churn.close_all()
    ledger.all_durable()
    note_backup(ledger)


def note_backup(ledger: Ledger) -> None:
    ledger.backed_up = (ledger.acknowledged, dict(ledger.written))


def restore_notes(ledger: Ledger) -> None:
    state, written = getattr(ledger, "backed_up", (0, {}))
    ledger.durable, ledger.floors = state, []
    ledger.promise(state, written, written)


def sweep(scratch: Path, mode: str, seed: int) -> None:
    rng = random.Random(f"{mode} {seed}")
    source = scratch / str(seed)
    modes.make_store(source, MODES[mode])
    ledger = Ledger()
    trio.run(live, source, ledger, rng, True)  # there is a backup from here on
    for life in range(3):
        orderly = rng.random() < 0.3
        try:
            trio.run(live, source, ledger, rng, orderly)
        except faults.SimulatedCrash:
            assert not orderly
        restore_notes(ledger)
        left = scratch / f"{seed} {life}"  # without what this process still has open
        shutil.copytree(source, left, ignore=lambda path, names: {"meta"} & set(names))
        shutil.rmtree(source)
        source = left
        restored(source)
        tree = trio.run(look, source)
        ledger.check(tree, killed=False, any_size=True)
        ledger = Ledger.of(tree)
        note_backup(ledger)
    shutil.rmtree(source)


async def look(source: Path) -> dict:
    async with open_filesystem(modes.config_of(source)) as fs, Kernel(fs) as kernel:
        return await read_tree(kernel)


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_what_was_backed_up_comes_back(scratch: Path, mode: str) -> None:
    for seed in range(2):
        sweep(scratch, mode, seed)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
def test_many_losses(scratch: Path, mode: str) -> None:
    for seed in range(1000, 1300):
        sweep(scratch, mode, seed)


# --- while the store is in use ---


@pytest.mark.sweep
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_power_cut_while_backing_up(scratch: Path, part: int) -> None:
    """Whatever is left, the metadata goes on, and what comes back is a state that was there."""
    source, copy = scratch / "0", scratch / "1"
    modes.make_store(source, ON | {"meta.backup_interval": "20ms"})
    rng = random.Random(part)

    async def work(fs: Filesystem, cut: PowerCut) -> None:
        for number in range(200):
            await write(fs, b"%d" % number, b"x" * number)
            if cut.crashed:
                raise faults.SimulatedCrash("the power fails")
            await trio.sleep(0.001)

    with PowerCut(source) as cut:
        cut.crash_at(
            ("vfs.backup.base_part", "vfs.backup.shipped", "vfs.backup.base_part")[part],
            1 + 3 * part,
        )
        with pytest.raises(faults.SimulatedCrash):
            use(source, work, cut)
        cut.materialise(copy, rng)
    assert not check(modes.config_of(copy), repair=False).findings
    if list(states(find(modes.config_of(copy), "")[1])):
        shutil.rmtree(copy / "meta")
        restored(copy)
    else:
        assert part == 0


def test_deletions_wait_for_a_backup(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the newest backup refers to stays until the next one, in whichever tier it is; without
    backups nothing waits."""
    monkeypatch.setattr(vfs_backup, "HOLD_S", 3600.0)
    source = scratch / "0"
    modes.make_store(source, ON | {"layout.inline_limit": "0"})

    def stored() -> set[int]:
        config = modes.config_of(source)
        items = [
            item for root in (*config.servers, *config.burst.directories) for item in list_all(root)
        ]
        return {item.oid for item in items if isinstance(item, StoredObject) and item.length}

    async def run(fs: Filesystem) -> None:
        async with trio.open_nursery() as nursery:
            await write(fs, b"before", bytes(5000))
            await fs.unlink(ROOT, b"before")
            fs.forget([(await fs.ids.take()) - 1])
            await fs.collector.drain()
            assert fs.backup.status()["sequence"] is None
            ino = await write(fs, b"file", b"old" * 2000)
            await fs.wait_drained(ino)
            await fs.evictor.evict(ino)
            await fs.collector.drain()
            await fs.backup.ship()
            before = stored()
            await fs.unlink(ROOT, b"file")
            fs.forget([ino])
            nursery.start_soon(fs.collector.drain)
            await trio.testing.wait_all_tasks_blocked(0.05)
            assert stored() == before
            await fs.backup.ship()
            await fs.collector.drain()
            assert len(stored()) < len(before)

    use(source, run)


@pytest.mark.sweep
@pytest.mark.parametrize("lost", ["clone after it", "changed after it", "removed after it"])
@pytest.mark.parametrize("mode", ["striped", pytest.param("interleaved", marks=pytest.mark.long)])
def test_clones_come_back_with_the_bytes_that_they_share(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, mode: str, lost: str
) -> None:
    """The metadata is lost some time after the last backup. What that knows of has its bytes, also
    if all who shared them have gone since, or if it does not know that they are shared."""
    monkeypatch.setattr(vfs_backup, "PART_BYTES", 1 << 20)  # nothing is shipped unasked
    monkeypatch.setattr(vfs_backup, "HOLD_S", 0.0)
    source, data = scratch / "0", os.urandom(20_000)
    modes.make_store(source, MODES[mode] | {"layout.inline_limit": "0"})

    async def live(fs: Filesystem) -> None:
        ino = await write(fs, b"file", data)
        await fs.wait_drained(ino)
        await fs.evictor.evict(ino)
        if lost == "clone after it":
            await fs.backup.ship()
            patch.setattr(backups, "put", unavailable)
        await fs.clone(ROOT, b"file", ROOT, b"clone", OWNER)
        clone = (await fs.lookup(ROOT, b"clone")).ino
        if lost != "clone after it":
            await fs.backup.ship()
            patch.setattr(backups, "put", unavailable)
        if lost == "changed after it":
            for number in (ino, clone):
                handle, *_ = await fs.open(number, os.O_RDWR | os.O_TRUNC)
                await fs.write(handle, 0, b"other bytes" * 900)
                await fs.release(handle)
                await fs.wait_drained(number)
        else:
            await fs.unlink(ROOT, b"file")
            await fs.unlink(ROOT, b"clone")
            fs.forget([ino, clone])
        await fs.collector.drain()
        raise faults.SimulatedCrash("the metadata is lost")

    with monkeypatch.context() as patch, pytest.raises(faults.SimulatedCrash):
        use(source, live)
    lose_metadata(source)
    restored(source)

    async def look(fs: Filesystem) -> None:
        assert await read(fs, b"file") == data
        if lost != "clone after it":
            assert await read(fs, b"clone") == data
            handle, *_ = await fs.open((await fs.lookup(ROOT, b"clone")).ino, os.O_RDWR)
            await fs.write(handle, 0, b"new")
            await fs.release(handle)
            assert await read(fs, b"file") == data

    use(source, look)
    assert not check(modes.config_of(source), repair=False, deep=True).findings


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["drained before", "made after", "undrained in it"])
def test_the_copy_of_an_evicted_file_waits_for_no_backup_but_of_its_only_bytes(
    scratch: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """No backup can be made after the first one. A copy that is a cache there, or is not in it, is
    deleted at once; one that is all there is of the file there stays. The metadata is lost then,
    and what the backup has comes back with its bytes."""
    monkeypatch.setattr(vfs_backup, "PART_BYTES", 1 << 20)  # nothing is shipped unasked
    monkeypatch.setattr(vfs_backup, "HOLD_S", 0.0)
    source = scratch / "0"
    modes.make_store(source, ON | modes.WAITING | {"layout.inline_limit": "0"})
    config, data = modes.config_of(source), b"bytes" * 2000

    def copies() -> set[int]:
        (burst,) = config.burst.directories
        return {
            item.oid for item in list_all(burst) if isinstance(item, StoredObject) and item.length
        }

    async def evict(fs: Filesystem) -> None:
        await write(fs, b"first", data)
        if when != "made after":
            ino = await write(fs, b"file", data)
        if when == "drained before":
            await fs.wait_drained(ino)
        await fs.backup.ship()
        if when == "made after":
            ino = await write(fs, b"file", data)
        await fs.wait_drained(ino)
        copy = (await fs.getattr(ino)).copy.id
        with monkeypatch.context() as patch:
            patch.setattr(backups, "put", unavailable)
            assert await fs.evictor.evict(ino)
            await fs.collector.drain()
            assert (copy in copies()) == (when == "undrained in it")
            raise faults.SimulatedCrash("the metadata is lost")

    async def look(fs: Filesystem) -> None:
        assert await read(fs, b"first") == data
        if when == "made after":
            with pytest.raises(NotFound):
                await fs.lookup(ROOT, b"file")
        else:
            assert await read(fs, b"file") == data

    with pytest.raises(faults.SimulatedCrash):
        use(source, evict)
    shutil.rmtree(source / "meta")
    restored(source)
    use(source, look)


@pytest.mark.parametrize(("error", "goes_on"), [(NoSpace, True), (Unavailable, False)])
def test_deletions_where_no_backup_can_be_made(
    empty: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type,
    goes_on: bool,
) -> None:
    monkeypatch.setattr(vfs_backup, "HOLD_S", 0.0)

    async def run(fs: Filesystem) -> None:
        await fs.backup.ship()
        with monkeypatch.context() as patch:
            patch.setattr(backups, "put", fail)
            await write(fs, b"file", b"x")
            assert await fs.backup.covered(fs.store.engine.seq) == goes_on
            assert fs.backup.status()["last_error"]
            assert ("no longer wait" in caplog.text) == goes_on
        await fs.backup.ship()
        assert fs.backup.status()["last_error"] == ""

    def fail(server: object, name: str, data: bytes) -> None:
        raise error("told to")

    use(empty, run)
    assert len(list(states(find(modes.config_of(empty), "")[1]))) == 1


@pytest.mark.sweep
def test_bases_take_the_place_of_increments(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The servers hold two bases, what came after them, and nothing that a crash has left; each on
    two servers."""

    async def run(fs: Filesystem) -> None:
        for number in range(100):
            await write(fs, b"%d" % number, os.urandom(200))
            await fs.backup.ship()
        while fs.backup.status()["increment_bytes"]:  # so that no base is due soon
            await write(fs, b"more", b"x")
            await fs.unlink(ROOT, b"more")
            await fs.backup.ship()

    use(empty, run)
    names = segments(empty)
    assert all(len(copies) == 2 for copies in names.values())
    assert len({parse_name(name).after for name in names if parse_name(name).kind == BASE}) == 2
    assert sum(path.stat().st_size for copies in names.values() for path in copies[:1]) < 6 * 20000
    (empty / "data" / "0" / BACKUP / "increment-left.new").touch()
    before = set(names)
    trio.run(look, empty)
    assert set(segments(empty)) > before, "an increment, since the store was closed in order"
    monkeypatch.setattr(vfs_backup, "BASE_AGE_S", -1.0)
    back_up(modes.config_of(empty), "")
    check(modes.config_of(empty), repair=False)
    back_up(modes.config_of(empty), "")
    assert not before & set(segments(empty)) and "increment-left.new" not in segments(empty), (
        "a new base"
    )


# --- restore ---


@pytest.fixture
def source(scratch: Path) -> Path:
    """A store with three states in its backups: files a; a and b; a, b and c."""
    source = scratch / "store"
    modes.make_store(source, ON)

    async def fill(fs: Filesystem) -> None:
        for name in (b"a", b"b", b"c"):
            await write(fs, name, name * 3000)
            await fs.wait_drained(ROOT)
            await fs.backup.ship()

    use(source, fill)
    return source


async def names_of(fs: Filesystem) -> list[bytes]:
    names = [name for name, _, _ in await fs.readdir(ROOT, 0)]
    for name in names:
        assert await read(fs, name) == name * 3000
    return names


def numbers(source: Path) -> list[int]:
    """Sequence numbers of the states that increments make, and first that of the base."""
    found = [parse_name(name) for name in segments(source)]
    return sorted(name.seq for name in found if name.seq is not None)


@pytest.mark.sweep
def test_a_damaged_copy_is_passed_over(source: Path, caplog: pytest.LogCaptureFixture) -> None:
    lose_metadata(source)
    for copies in segments(source).values():
        copies[0].write_bytes(b"damage")
    restored(source)
    assert use(source, names_of) == [b"a", b"b", b"c"]
    assert "is not used" in caplog.text


@pytest.fixture
def generations(source: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same store with a second generation of backups, and a state with file d behind it."""

    async def add(fs: Filesystem) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(vfs_backup, "BASE_AGE_S", -1.0)
            await fs.backup.ship()
            await write(fs, b"c2", b"c2" * 3000)
            await fs.wait_drained(ROOT)
            await fs.backup.ship()
        await write(fs, b"d", b"d" * 3000)
        await fs.wait_drained(ROOT)
        await fs.backup.ship()

    use(source, add)
    assert len({name.after for name in map(parse_name, segments(source)) if name.kind == BASE}) == 2
    lose_metadata(source)
    return source


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "flipped": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "empty": lambda path: os.truncate(path, 0),
    "missing": lambda path: path.unlink(),
}


@pytest.mark.sweep
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_newest_base_falls_back_to_the_generation_before(
    generations: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Increments go on beside bases, so nothing is lost by that."""
    names = {name: parse_name(name) for name in segments(generations)}
    newest = max(name.after for name in names.values() if name.kind == BASE)
    last = max(numbers(generations))
    for text, name in names.items():
        if (name.kind, name.after) == (BASE, newest):
            for path in segments(generations)[text]:
                DAMAGE[damage](path)
    state = restore(modes.config_of(generations), "", None)
    assert (state.seq, state.generation) == (last, 1 if damage == "missing" else 2)
    if damage != "missing":
        assert "is damaged: restored is generation 2" in caplog.text
    assert use(generations, names_of) == [b"a", b"b", b"c", b"c2", b"d"]


@pytest.mark.parametrize("damage", [damage for damage in DAMAGE if damage != "missing"])
def test_a_damaged_newest_increment_leaves_the_state_before(
    generations: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    last = max(numbers(generations))
    for text, copies in segments(generations).items():
        if parse_name(text).seq == last:
            for path in copies:
                DAMAGE[damage](path)
    found = find(modes.config_of(generations), "")[1]
    assert [state.damaged != "" for state in states(found)] == [True, True]
    state = restore(modes.config_of(generations), "", None)
    assert state.seq < last and state.generation == 1
    assert f"of sequence {last}, is damaged" in caplog.text
    assert b"c2" in use(generations, names_of)


@pytest.mark.sweep
def test_one_server_with_whole_copies_is_enough(
    generations: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = max(numbers(generations))
    for number, copies in enumerate(segments(generations).values()):
        list(DAMAGE.values())[number % len(DAMAGE)](copies[number % 2])
    state = restore(modes.config_of(generations), "", None)
    assert (state.seq, state.generation) == (last, 1)
    assert "is damaged: restored" not in caplog.text
    assert b"d" in use(generations, names_of)


@pytest.mark.sweep
def test_a_lost_increment_ends_the_chain(source: Path) -> None:
    lose_metadata(source)
    newest = sorted(
        path
        for name, copies in segments(source).items()
        if name.startswith("increment")
        for path in copies
    )
    for path in newest:
        if parse_name(path.name).seq == numbers(source)[2]:
            path.unlink()
    restored(source)
    assert use(source, names_of) == [b"a", b"b"]


@pytest.mark.sweep
def test_an_older_state_and_a_directory(source: Path, scratch: Path) -> None:
    first, second, *_ = numbers(source)
    back_up(modes.config_of(source), str(scratch / "copy"))
    lose_metadata(source)
    with pytest.raises(StoreError, match="no backup of the state"):
        restore(modes.config_of(source), "", first - 1)
    assert not (source / "meta").exists()
    state = restore(modes.config_of(source), str(scratch / "copy"), None)
    assert state.seq > second and (state.segments, state.created_ns > 0) == (
        len(os.listdir(scratch / "copy")),
        True,
    )
    lose_metadata(source)
    restored(source, at=second)
    assert use(source, names_of) == [b"a", b"b"]


@pytest.mark.sweep
def test_backups_go_on_after_a_restore(source: Path) -> None:
    """Their numbers are beyond all that were used, so the newest is the newest; and so are ids."""
    base, old = min(numbers(source)), max(numbers(source))

    async def highest(fs: Filesystem) -> int:
        return await fs.ids.take()

    first = use(source, highest)
    lose_metadata(source)
    restored(source, at=numbers(source)[0])
    assert use(source, highest) > first
    kept, *made = numbers(source)
    assert kept == base and min(made) > old, "what came after the restored state is of no use"
    lose_metadata(source)
    restored(source)
    assert use(source, names_of) == [b"a", b"lost+found"] or use(source, names_of) == [b"a"]


def test_a_restore_that_failed_can_be_tried_again(source: Path, scratch: Path) -> None:
    servers = ", ".join(
        str(source / "data" / str(number))
        for number in range(4)
        if (source / f"data/{number}").exists()
    )
    (scratch / "c.yaml").write_text(f"meta: {{directory: {source}/meta}}\nservers: [{servers}]\n")
    lose_metadata(source)
    with pytest.raises(StoreError, match="was made with a directory as SOURCE"):
        restore(load(str(scratch / "c.yaml"), {}), "", None)
    restored(source)


def test_what_is_refused(source: Path, scratch: Path) -> None:
    config = modes.config_of(source)
    with pytest.raises(StoreError, match="is not empty; move what is there away"):
        restore(config, "", None)
    lose_metadata(source)
    (source / "meta").mkdir()
    (source / "meta" / "file").touch()
    with pytest.raises(StoreError, match="is not empty"):
        restore(config, "", None)
    lose_metadata(source)
    with pytest.raises(StoreError, match="there is no such directory"):
        restore(config, str(scratch / "missing"), None)
    other = scratch / "other"
    modes.make_store(other, ON)
    back_up(modes.config_of(other), str(scratch / "of other"))
    with pytest.raises(StoreError, match="no backup of the metadata of store"):
        restore(config, str(scratch / "of other"), None)
    shutil.copytree(source / "data" / "0", source / "kept")
    shutil.rmtree(source / "data" / "0")
    shutil.copytree(other / "data" / "0", source / "data" / "0")
    with pytest.raises(StoreError, match="are of different stores"):
        restore(config, "", None)
    shutil.rmtree(source / "data" / "0")
    restored_config = (
        config  # a server that is not there does not stand in the way of reading the others
    )
    restore(restored_config, "", None)
    shutil.move(source / "kept", source / "data" / "0")
    assert use(source, names_of) == [b"a", b"b", b"c"]


def test_a_restore_that_fails_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_metadata(source)

    class Full:
        def before(self, op: str, path: str) -> None:
            if op == "sync_file" and path.endswith("journal.0") and os.path.getsize(path) > 0:
                self.left -= 1
                if self.left == 0:
                    raise OSError(28, "No space left on device", path)

        def after(self, op: str, path: str, *args: object) -> None:
            """Nothing to record."""

        left = 3

    files.set_hook(Full())
    try:
        with pytest.raises((StoreError, Unavailable, NoSpace, OSError)):
            restore(modes.config_of(source), "", None)
    finally:
        files.set_hook(None)
    assert set(os.listdir(source / "meta")) <= {"owner"}
    shutil.rmtree(source / "meta")
    restored(source)


def test_the_format_of_the_store_is_checked(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lose_metadata(source)
    monkeypatch.setattr("aifs.store.restore.FORMAT", "aifs 99")
    with pytest.raises(StoreError, match="this version knows 'aifs 99'"):
        restore(modes.config_of(source), "", None)


def test_only_whole_copies_count(source: Path) -> None:
    found = find(modes.config_of(source), "")[1]
    assert isinstance(found, FoundBackups)
    base = next(name for name in found.sizes if name.kind == BASE)
    for path in segments(source)[str(base)]:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Unavailable, match="damaged"):
        found.read(base)


@pytest.mark.sweep
def test_too_many_changes_call_for_a_base(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no server takes a backup, memory stays bounded; what comes then is whole."""
    monkeypatch.setattr(vfs_backup, "CHANGES_MAX", 20000)

    async def run(fs: Filesystem) -> None:
        await write(fs, b"a", b"a" * 3000)
        await fs.backup.ship()
        with monkeypatch.context() as patch:
            patch.setattr(backups, "put", unavailable)
            for number in range(200):
                await write(fs, b"%d" % number, b"")
                assert fs.backup.status()["changed_bytes"] <= 20000
            with pytest.raises(Unavailable):
                await fs.backup.ship()
        for number in range(200):
            await fs.unlink(ROOT, b"%d" % number)

    use(empty, run)
    lose_metadata(empty)
    restored(empty)
    assert use(empty, names_of) == [b"a"]


def test_a_server_on_its_way_out_is_not_relied_on(empty: Path) -> None:
    """The next backup is a base, which goes to the others; the generation before stays there."""

    async def run(fs: Filesystem) -> None:
        await write(fs, b"a", b"a")
        await fs.backup.ship()
        await fs.store.table.change(0, "draining")
        fs.store.servers[0].standing = "draining"
        await fs.backup.ship()

    use(empty, run)
    names = {text: parse_name(text) for text in segments(empty)}
    newest = max(name.after for name in names.values() if name.kind == BASE)
    parts = [text for text, name in names.items() if (name.kind, name.after) == (BASE, newest)]
    assert {path.parent.parent.name for text in parts for path in segments(empty)[text]} == {
        "1",
        "2",
    }


def test_a_server_that_is_removed_leaves_a_backup_behind(scratch: Path) -> None:
    """What lies in its directory goes with it, also where that is all that there is, long before
    the next backup is due."""
    source = scratch / "0"
    modes.make_store(source, ON | {"meta.backup_copies": "1"})

    async def run(fs: Filesystem) -> None:
        await write(fs, b"a", b"inline")  # no object has to be moved first
        await fs.backup.ship()
        path, *_ = next(iter(segments(source).values()))  # the mount may have shipped one, too
        server = int(path.parent.parent.name)
        await fs.server_admin.drain(server)
        await fs.server_admin.remove(server)
        with trio.fail_after(60):
            while server in fs.store.servers:
                await trio.sleep(0.01)
        assert segments(source)
        raise faults.SimulatedCrash("the machine is lost")

    with pytest.raises(faults.SimulatedCrash):
        use(source, run)
    left = scratch / "left"
    shutil.copytree(source, left, ignore=lambda path, names: {"meta"} & set(names))
    restore(modes.config_of(left), "", None)  # from before the server went

    async def look(fs: Filesystem) -> bytes:
        return await read(fs, b"a")

    assert use(left, look) == b"inline"


@pytest.mark.sweep
def test_backups_that_were_made_after_the_one_that_is_restored_are_done_with(
    empty: Path, scratch: Path
) -> None:
    """What a directory has may be older than what lies on the servers by then: that is of another
    history."""

    async def live(name: bytes) -> int:
        async with open_filesystem(modes.config_of(empty)) as fs:
            await write(fs, name, name * 3000)
        return fs.store.engine.seq

    trio.run(live, b"a")
    back_up(modes.config_of(empty), str(scratch / "copy"))
    last = max(trio.run(live, name) for name in (b"b", b"c", b"d"))
    lose_metadata(empty)
    restore(modes.config_of(empty), str(scratch / "copy"), None)
    assert trio.run(live, b"e") > last
    lose_metadata(empty)
    restored(empty)
    assert [name for name in use(empty, names_of) if name != b"lost+found"] == [b"a", b"e"]


def test_what_there_is_no_room_for_leaves_nothing(
    empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every attempt would take some of the room that lacks."""
    put = backups.put

    def full(server: object, name: str, data: bytes) -> None:
        if parse_name(name).part:
            raise NoSpace("told to")
        put(server, name, data)

    async def run(fs: Filesystem) -> None:
        for number in range(50):
            await write(fs, b"%d" % number, b"x")
        await fs.backup.ship()
        before = segments(empty)
        fs.backup.base_at_s = -float("inf")  # the next one is a base
        await write(fs, b"more", b"x")
        with monkeypatch.context() as patch:
            patch.setattr(backups, "put", full)
            with pytest.raises(NoSpace):
                await fs.backup.ship()
        (increment,) = segments(empty).keys() - before.keys()  # which comes before a base
        assert parse_name(increment).kind == INCREMENT
        before = segments(empty)
        fs.backup.base_at_s = trio.current_time()
        await write(fs, b"still more", b"x")
        with failing("sync_file", f"{empty}/data"), pytest.raises(FsError):
            await fs.backup.ship()
        assert segments(empty) == before
        await fs.backup.ship()

    use(empty, run)
    assert len(list(states(find(modes.config_of(empty), "")[1]))) == 1


def test_numbers_of_servers_are_not_given_out_again(empty: Path, scratch: Path) -> None:
    """One was added after the backup was made: its directory is no other server's."""
    back_up(modes.config_of(empty), str(scratch / "copy"))

    async def add(fs: Filesystem, name: str) -> int:
        return await fs.store.table.add(str(scratch / name))

    known = use(empty, add, "new")
    lose_metadata(empty)
    config = modes.config_of(empty)
    places = (*config.places, config.places[0]._replace(path=str(scratch / "new")))
    restore(config.model_copy(update={"places": places}), str(scratch / "copy"), None)
    assert use(empty, add, "newer") == known + 1


@pytest.mark.sweep
def test_a_server_that_does_not_answer_is_done_without(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = modes.config_of(source)
    read = DirectoryStorage.read_marker
    monkeypatch.setattr(vfs_restore, "_ANSWER_S", 1.0)
    monkeypatch.setattr(
        DirectoryStorage,
        "read_marker",
        lambda it: read(it) if it.address != config.servers[1] else time.sleep(3600),
    )
    found = vfs_restore.answering(config)
    assert found.servers == (*config.servers[:1], *config.servers[2:])
    assert found.burst == config.burst
    assert f"{config.servers[1]} is done without: no answer within 1 s" in caplog.text
    lose_metadata(source)
    restore(found, "", None)
    monkeypatch.undo()
    assert use(source, names_of) == [b"a", b"b", b"c"]
