"""fsck: each kind of damage is found and named, alone; what can be mended is, and then nothing is
found.
"""

import os
from pathlib import Path

import pytest

from aifs.check import fsck
from aifs.check.findings import KINDS
from aifs.check.fsck import check
from aifs.core import config as configuration
from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.core.faults import SimulatedCrash
from aifs.layout.striped import Striped
from aifs.meta import keys, slices
from aifs.meta.records import Inode
from aifs.store.owner import OwnerLock
from aifs.store.store import format_store
from aifs.vfs.filesystem import Filesystem
from tests.support import damages_of_data, damages_of_names
from tests.support.damaged import NOBODY, ROOT, UNIT, DamagedStore
from tests.support.damages import Damage, fill, kinds_of
from tests.support.damages import store as store
from tests.support.damages import template as template
from tests.support.damages_that_stay import STAYS

MENDED = damages_of_names.MENDED | damages_of_data.MENDED


# --- what is mended -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def before(template: DamagedStore) -> dict[str, int]:
    return template.tree()


@pytest.mark.sweep("damage")
@pytest.mark.parametrize("damage", MENDED.values(), ids=MENDED)
def test_damage_is_named_and_mended(
    store: DamagedStore, before: dict[str, int], damage: Damage
) -> None:
    damage.do(store)
    expected = damage.expected(store)
    assert store.found() == expected
    report = store.check(repair=True)
    assert kinds_of(report) == expected
    assert report.ok and all(finding.repaired for finding in report.findings)
    assert store.found() == []
    after = store.tree()
    lost_and_found = after.pop("/lost+found", None)
    assert after == _moved(store, before, damage.moves)
    assert (lost_and_found is not None) == any(path.startswith("/lost+found") for path in after)


def _moved(
    store: DamagedStore, tree: dict[str, int], moves: dict[str, str | None]
) -> dict[str, int]:
    moved = {}
    for path, ino in tree.items():
        for old, new in moves.items():
            if path == old or path.startswith(f"{old}/"):
                path = "" if new is None else fill(store, new) + path.removeprefix(old)
        if path:
            moved[path] = ino
    return moved


# --- what stays -----------------------------------------------------------------------------------


@pytest.mark.sweep
@pytest.mark.parametrize("damage", STAYS.values(), ids=STAYS)
def test_what_cannot_be_mended_is_named_and_left_alone(store: DamagedStore, damage: Damage) -> None:
    damage.do(store)
    before, objects = store.records(), store.stored()
    for repair in (False, True):
        report = store.check(repair)
        assert kinds_of(report) == damage.expected(store)
        assert not report.ok and not any(finding.repaired for finding in report.findings)
    assert store.records() == before
    assert store.stored() == objects


# --- the whole ------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_a_healthy_store_has_no_findings_and_is_counted(store: DamagedStore) -> None:
    report = store.check()
    assert report.findings == [] and report.ok
    assert report.counts["inodes"] == len(set(store.ino.values()))
    assert report.counts["directories"] == 7
    assert report.counts["files"] == 14
    assert report.counts["undrained"] == 1
    stripes = sum(bool(length) for path in store.ino for length in _lengths(store.inode(path)))
    copies, containers = 3, 2
    assert report.counts["objects"] == stripes + copies + containers
    assert report.counts["bytes"] > 10 * UNIT
    records, objects = store.records(), store.stored()
    assert store.found(repair=True) == []
    assert store.records() == records and store.stored() == objects


def _lengths(inode: Inode) -> list[int]:
    layout = inode.layout if isinstance(inode.layout, Striped) else None
    return (
        [layout.object_length(index, inode.size) for index in range(len(layout.servers))]
        if layout
        else []
    )


def test_a_store_whose_daemon_was_killed_is_recovered_first(store: DamagedStore) -> None:
    async def work(fs: Filesystem) -> None:
        await store.write(fs, "/late", b"z" * 9 * UNIT)
        for path in ("/open", "/deleted"):
            (handle, *_), inode = await fs.create(ROOT, path[1:].encode(), 0o644, os.O_RDWR, NOBODY)
            await fs.write(handle, 0, b"w" * 5 * UNIT)
            store.ino[path] = inode.ino
        await fs.unlink(ROOT, b"deleted")
        await fs.unlink(ROOT, b"inline")
        raise SimulatedCrash

    with pytest.raises(BaseException) as caught:
        store.use(work)
    assert "SimulatedCrash" in repr(caught.value)
    report = store.check()
    assert report.findings == []
    assert report.counts["recovered_unsynced_files"] >= 2
    assert report.counts["recovered_orphans"] == 2
    report = store.check()
    assert report.findings == [] and not any(name.startswith("recovered") for name in report.counts)
    assert store.tree().keys() >= {"/late"} and "/deleted" not in store.tree()


def test_recovery_that_fails_is_named(store: DamagedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*args: object) -> None:
        raise Unavailable("the disk is on fire")

    monkeypatch.setattr(fsck, "recover", fail)
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    _, path = store.object("/a/striped", 1)
    path.unlink()
    (finding,) = store.check(repair=True).findings
    assert (finding.kind, finding.detail, finding.repaired) == (
        "unrecovered",
        "the disk is on fire",
        False,
    )


def test_a_new_store_has_no_findings(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    config = configuration.load(str(source), {})
    format_store(config, force=False)
    report = check(config, repair=True)
    assert report.findings == []
    counts = {"inodes": 1, "directories": 1, "files": 0, "objects": 0, "bytes": 0, "undrained": 0}
    assert report.counts == counts


def test_progress_never_goes_back(store: DamagedStore) -> None:
    calls: list[tuple[str, int, int]] = []
    check(store.config, False, lambda *call: calls.append(call))
    assert {what for what, _, _ in calls} == {"metadata", "objects"}
    for kind in ("metadata", "objects"):
        done = [number for what, number, _ in calls if what == kind]
        assert done == sorted(done) and done[-1] > 0
    assert all(number <= total for _, number, total in calls)


def test_records_are_read_in_batches(store: DamagedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "SLICE", 3)
    assert store.found() == []
    MENDED["orphan_directory"].do(store)
    assert store.found() == MENDED["orphan_directory"].expected(store)


def test_damage_upon_damage_is_mended_in_one_go(store: DamagedStore) -> None:
    parts = "orphan_directory too_many_links wrong_size wrong_id_counter"
    for name in (*parts.split(), "orphan_record_without_inode"):
        MENDED[name].do(store)
    report = store.check(repair=True)
    assert len(report.findings) == 6 and report.ok
    assert store.found() == []
    assert store.tree()[f"/lost+found/#{store.ino['/a']}/striped"] == store.ino["/a/striped"]


@pytest.mark.sweep
def test_lost_and_found_may_be_taken_by_a_file(store: DamagedStore) -> None:
    store.use(lambda fs: store.write(fs, "/lost+found", b"a file"))
    store.remove_name("/inline")
    store.remove_name("/fifo")
    assert store.check(repair=True).ok
    tree = store.tree()
    assert tree["/lost+found"] == store.ino["/lost+found"]
    assert tree[f"/lost+found.1/#{store.ino['/inline']}"] == store.ino["/inline"]
    assert tree[f"/lost+found.1/#{store.ino['/fifo']}"] == store.ino["/fifo"]


def test_a_name_in_lost_and_found_may_be_taken(store: DamagedStore) -> None:
    async def make(fs: Filesystem) -> None:
        store.ino["/lost+found"] = (await fs.mkdir(ROOT, b"lost+found", 0o700, NOBODY)).ino
        await store.write(fs, f"/lost+found/#{store.ino['/inline']}", b"")

    store.use(make)
    store.remove_name("/inline")
    assert store.check(repair=True).ok
    assert store.tree()[f"/lost+found/#{store.ino['/inline']}.1"] == store.ino["/inline"]
    assert store.found() == []


def test_paths_are_printable(store: DamagedStore) -> None:
    async def make(fs: Filesystem) -> None:
        store.ino["/odd"] = (await fs.mkdir(ROOT, b"new\nline \xff \xc3\xa9", 0o700, NOBODY)).ino

    store.use(make)
    store.change("/odd", nlink=5)
    (finding,) = store.check().findings
    assert finding.where == "/new\\nline \\xff é"


@pytest.mark.sweep
def test_a_store_that_recovery_would_damage_is_not_recovered_without_repair(
    store: DamagedStore,
) -> None:
    """The orphan record would have the collector erase a file that has a name."""
    store.put(keys.orphan(store.ino["/inline"]), b"")
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    report = store.check()
    assert "recovered_unsynced_files" not in report.counts
    assert keys.dirty(store.ino["/a/striped"]) in store.records()
    report = store.check(repair=True)
    assert report.counts["recovered_unsynced_files"] == 1
    assert store.tree()["/inline"] == store.ino["/inline"]


def test_a_mounted_store_is_refused(store: DamagedStore) -> None:
    owner = OwnerLock(store.config.meta.directory, "/mnt/somewhere")
    try:
        with pytest.raises(StoreBusy, match="/mnt/somewhere"):
            store.check()
    finally:
        owner.release(orderly=True)


def test_a_wrong_server_directory_is_refused(store: DamagedStore) -> None:
    Path(store.config.servers[3], ".aifs").unlink()
    with pytest.raises(StoreError, match=store.config.servers[3]):
        store.check()


def test_every_kind_of_finding_is_tested() -> None:
    tested = {kind for damage in (*MENDED.values(), *STAYS.values()) for kind, _ in damage.found}
    by_themselves = (
        "damaged-record missing-object short-object orphan-object unlistable-server unrecovered "
        "degraded lost-chunk missing-container short-container no-turn unreadable-bytes "
        "wrong-checksum wrong-references"
    )
    assert tested.union(by_themselves.split()) == set(KINDS)
