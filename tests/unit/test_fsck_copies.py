"""fsck of burst copies and containers: what is missing, short, or nobody's."""

import os
from pathlib import Path

import pytest

from aifs.core.errors import StoreError
from aifs.data import naming
from aifs.layout.interleaved import HEADER_BYTES
from aifs.meta import chunks, keys, shared
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.kv import Transaction
from tests.support.damaged import COPY_ID, UNIT, DamagedStore
from tests.support.damages import kinds_of
from tests.support.damages import store as store
from tests.support.damages import template as template


@pytest.mark.sweep
def test_a_missing_burst_copy_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    path = store.copy("/fast/new")
    path.unlink()
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where) == ("missing-object", "/fast/new")
        assert not finding.repaired
        assert (
            finding.detail
            == f"burst directory 0: {path} is missing; lost: bytes 0 to {3 * UNIT + 6}"
        )


def test_a_short_burst_copy_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    path = store.copy("/fast/new")
    os.truncate(path, UNIT)
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where) == ("short-object", "/fast/new")
        assert not finding.repaired
        lost = f"lost: bytes {UNIT} to {3 * UNIT + 6}"
        assert finding.detail.endswith(f"has {UNIT} of {3 * UNIT + 7} bytes; {lost}")
    assert path.stat().st_size == UNIT


def test_a_longer_burst_copy_counts(store: DamagedStore) -> None:
    with store.copy("/fast/new").open("ab") as file:
        file.write(b"appended")
    store.check(repair=True)
    assert store.inode("/fast/new").size == 3 * UNIT + 7 + 8
    contents = store.read("/fast/new")
    assert contents.endswith(b"appended") and len(contents) == 3 * UNIT + 15


def test_a_burst_copy_with_a_dirty_mark_may_have_any_length(store: DamagedStore) -> None:
    os.truncate(store.copy("/fast/new"), UNIT)
    store.put(keys.dirty(store.ino["/fast/new"]), b"")
    assert store.found() == []
    assert store.inode("/fast/new").size == UNIT


def test_a_file_without_its_cache_is_whole(store: DamagedStore) -> None:
    contents = {path: store.read(path) for path in ("/fast/cached", "/fast/tiny")}
    old = store.copy("/fast/tiny")
    store.copy("/fast/cached").unlink()
    old.write_bytes(b"something else")
    assert store.check(repair=True).ok
    for path, data in contents.items():
        assert store.inode(path).copy is None
        assert store.read(path) == data
    assert store.found() == [] and not old.exists()


@pytest.mark.sweep
@pytest.mark.parametrize("ino", [0, 4000, "inline"])
@pytest.mark.parametrize("where", ["burst", "data"])
def test_an_object_that_nothing_refers_to_is_moved_aside(
    store: DamagedStore, ino: int | str, where: str
) -> None:
    root = Path(store.config.burst.directories[0] if where == "burst" else store.config.servers[1])
    owner = store.ino["/inline"] if ino == "inline" else int(ino)
    path = Path(naming.object_path(str(root), owner, 4000))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"whose?")
    assert store.found() == [("orphan-object", str(path))]
    assert store.check(repair=True).ok
    assert (root / "lost+found" / path.name).read_bytes() == b"whose?"
    assert store.found() == []


def test_the_copy_of_a_record_that_nobody_refers_to_is_moved_aside(store: DamagedStore) -> None:
    path = store.copy("/fast/tiny")
    store.change("/fast/tiny", copy=None)
    store.put(keys.burst_copy(COPY_ID + 1), b"?")
    report = store.check(repair=True)
    unreadable = ("unreadable-record", f"record of burst copy {COPY_ID + 1}")
    assert kinds_of(report) == [("orphan-object", str(path)), unreadable]
    assert (
        report.ok and (Path(store.config.burst.directories[0]) / "lost+found" / path.name).exists()
    )
    assert store.found() == []


def test_a_burst_directory_that_is_missing_is_named_with_what_is_at_stake(
    store: DamagedStore,
) -> None:
    burst = Path(store.config.burst.directories[0])
    burst.rename(burst.with_name("away"))
    with pytest.raises(
        StoreError, match="burst directory 0.*1 files have their newest bytes there alone"
    ):
        store.check()


def test_a_missing_container_is_named_with_the_files_that_lost_bytes(store: DamagedStore) -> None:
    _, path = store.container()
    path.unlink()
    for repair in (False, True):
        report = store.check(repair)
        expected = [
            ("lost-chunk", "/a/chunks"),
            ("lost-chunk", "/z/chunk"),
            ("missing-container", str(path)),
        ]
        assert kinds_of(report) == expected and not any(
            finding.repaired for finding in report.findings
        )


def test_a_short_container_is_named_with_the_files_that_lost_bytes(store: DamagedStore) -> None:
    _, path = store.container()
    os.truncate(path, path.stat().st_size - 10)
    for repair in (False, True):
        assert store.found(repair) == [("lost-chunk", "/z/chunk"), ("short-container", str(path))]


@pytest.mark.parametrize("record", [None, b"?"])
def test_a_container_that_files_name_is_never_moved(
    store: DamagedStore, record: bytes | None
) -> None:
    number, path = store.container()
    if record is None:
        store.delete(keys.container(number), keys.open_container(number))
    else:
        store.put(keys.container(number), record)
    for repair in (False, True):
        kinds = {kind for kind, _ in store.found(repair)}
        assert kinds == ({"lost-chunk"} if record is None else {"unreadable-record"})
    assert path.exists()


def test_what_is_left_of_a_loose_list_counts_until_it_is_dropped(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its beginning has gone, and nothing of what is left is a stray."""
    oid, other = store.inode("/a/first").oid, 4000

    def loosen(tx: Transaction) -> None:
        first, last = (
            tx.get(keys.chunk_list(oid, number)) for number in (0, 2 * CHUNKS_PER_RECORD)
        )
        tx.put(keys.chunk_list(other, 0), first)
        tx.put(keys.chunk_list(other, 2 * CHUNKS_PER_RECORD), last)
        tx.put(keys.loose(other), b"")
        _, extents_of_first = chunks.decode_list(first)
        _, extents_of_last = chunks.decode_list(last)
        for extent in [*extents_of_first, *extents_of_last]:
            if extent.shared:
                known = shared.find_shared(tx, extent.digest)
                shared.put_shared(tx, known._replace(references=known.references + 1))
            elif extent.place is not None:
                chunks.adjust_live(tx, extent.place.container, HEADER_BYTES + extent.place.stored)
        chunks.drop_some(tx, other)

    monkeypatch.setattr(chunks, "DROPPED_AT_ONCE", 1)
    store.transact(loosen)
    assert [key[:1] for key in store.records()].count(b"y") == 1
    assert store.found() == []
    assert not any(key[:1] == b"y" for key in store.records())


def test_all_files_that_lost_a_shared_chunk_are_named(store: DamagedStore) -> None:
    _, path = store.shared_container()
    os.truncate(path, 0)
    for repair in (False, True):
        lost = [("lost-chunk", "/a/first"), ("lost-chunk", "/z/other")]
        assert store.found(repair) == [*lost, ("short-container", str(path))]
    assert store.check().findings[-1].detail.endswith(f" lay in {path}")
