"""fsck of objects on data servers: what is missing, short, too long, or nobody's."""

import errno
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.check.objects import lost_bytes
from aifs.core.errors import Unavailable
from aifs.data import naming
from aifs.layout.striped import Striped
from aifs.meta import keys
from aifs.meta.records import Inode
from aifs.vfs.filesystem import Filesystem
from tests.support.damaged import UNIT, DamagedStore
from tests.support.damages import (
    kinds_of,
)
from tests.support.damages import store as store
from tests.support.damages import template as template


@pytest.mark.sweep
def test_a_missing_object_is_named_with_the_lost_bytes_and_stays_missing(
    store: DamagedStore,
) -> None:
    server, path = store.object("/a/striped", 2)
    path.unlink()
    for repair in (False, True, False):
        report = store.check(repair)
        (finding,) = report.findings
        assert (finding.kind, finding.where) == ("missing-object", "/a/striped")
        assert not finding.repaired and not report.ok
        assert f"data server {server}:" in finding.detail and str(path) in finding.detail
        assert finding.detail.endswith(
            f"lost: {2 * UNIT + 5} bytes between {2 * UNIT} and {10 * UNIT + 4}"
        )
    assert not path.exists()

    async def read(fs: Filesystem) -> None:
        handle = (await fs.open(store.ino["/a/striped"], os.O_RDONLY)).handle
        assert len(await fs.read(handle, 0, 2 * UNIT)) == 2 * UNIT
        with pytest.raises(Unavailable):
            await fs.read(handle, 0, 3 * UNIT)
        await fs.release(handle)

    store.use(read)


def test_a_short_object_is_named_with_the_lost_bytes(store: DamagedStore) -> None:
    server, path = store.object("/a/striped", 3)
    os.truncate(path, UNIT + 10)
    for repair in (False, True):
        (finding,) = store.check(repair).findings
        assert (finding.kind, finding.where) == ("short-object", "/a/striped")
        assert not finding.repaired
        assert f"data server {server}: {path} has {UNIT + 10} of {2 * UNIT} bytes" in finding.detail
        assert finding.detail.endswith(f"lost: bytes {7 * UNIT + 10} to {8 * UNIT - 1}")
    assert path.stat().st_size == UNIT + 10


@pytest.mark.sweep
def test_every_file_of_a_lost_server_is_named(store: DamagedStore) -> None:
    shutil.rmtree(Path(store.config.servers[0], "objects"))
    report = store.check()
    kinds = {"missing-object", "missing-container", "lost-chunk"}
    assert {finding.kind for finding in report.findings} == kinds
    here = {path for path, ino in store.ino.items() if _lies_on(store.inode(path), 0)}
    here |= {"/a/chunks", "/z/chunk", str(store.container()[1])}
    assert {finding.where for finding in report.findings} == here and len(here) >= 6


def _lies_on(inode: Inode, server: int) -> bool:
    layout = inode.layout
    return isinstance(layout, Striped) and bool(
        server in layout.servers and layout.object_length(layout.servers.index(server), inode.size)
    )


def test_a_longer_object_is_no_damage(store: DamagedStore) -> None:
    _, path = store.object("/a/b/short", 0)
    os.truncate(path, 3 * UNIT)
    beyond = store.inode("/a/b/short").layout.servers[1]
    other = Path(
        store.config.servers[beyond], path.relative_to(store.config.servers[_owner(store, path)])
    )
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(b"an append that a power cut undid")
    assert store.found(repair=True) == []
    assert other.exists()


def _owner(store: DamagedStore, path: Path) -> int:
    return next(
        number for number, root in enumerate(store.config.servers) if path.is_relative_to(root)
    )


def test_a_file_with_a_dirty_mark_may_lack_objects_until_recovery_has_settled_it(
    store: DamagedStore,
) -> None:
    _, path = store.object("/a/striped", 1)
    os.truncate(path, 7)
    store.put(keys.dirty(store.ino["/a/striped"]), b"")
    report = store.check()
    assert report.findings == [] and report.counts["recovered_unsynced_files"] == 1
    assert path.stat().st_size == 3 * UNIT


@pytest.mark.sweep
@pytest.mark.parametrize("ino", [4000, "inline", "other oid", "other server"])
def test_an_orphan_object_is_moved_aside(store: DamagedStore, ino: int | str) -> None:
    root = Path(store.config.servers[2])
    name = (
        f"{4000:016x}.{ino if isinstance(ino, str) else 4000:x}"
        if ino == 4000
        else {
            "inline": f"{4000:016x}.{store.ino['/inline']:x}",
            "other oid": f"{4000:016x}.{store.ino['/a/striped']:x}",
            "other server": f"{4000:016x}.{store.ino['/z/moved']:x}",
        }[str(ino)]
    )
    if ino == "other server":
        store.change("/z/moved", oid=store.ino["/z/moved"])
        layout = store.inode("/z/moved").layout
        root = Path(store.config.servers[min(set(range(4)) - set(layout.servers))])
        name = f"{store.ino['/z/moved']:016x}.{store.ino['/z/moved']:x}"
    oid = int(name[:16], 16)
    path = root / f"objects/{oid >> 16:x}/{oid >> 8 & 255:02x}/{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"whose?")
    assert store.found() == [("orphan-object", str(path))]
    (root / "lost+found").mkdir()
    (root / "lost+found" / name).write_bytes(b"an earlier one")
    report = store.check(repair=True)
    assert kinds_of(report) == [("orphan-object", str(path))] and report.ok
    assert not path.exists()
    assert (root / "lost+found" / name).read_bytes() == b"an earlier one"
    assert (root / "lost+found" / f"{name}.1").read_bytes() == b"whose?"
    assert store.found(repair=True) == []


def test_objects_of_an_unreadable_inode_are_not_orphans(store: DamagedStore) -> None:
    store.put(keys.inode(store.ino["/a/striped"]), b"?")
    objects = store.stored()
    assert store.found(repair=True) == [("unreadable-record", "/a/striped")]
    assert store.stored() == objects


def test_a_server_that_cannot_be_listed_is_named_and_its_objects_are_not_called_missing(
    store: DamagedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = store.config.servers[1]
    list_all = naming.list_all

    def fail(root: str) -> Iterator:
        yield from itertools.islice(list_all(root), 1 if root == broken else None)
        if root == broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO), root)

    monkeypatch.setattr(naming, "list_all", fail)
    (finding,) = store.check(repair=True).findings
    assert (finding.kind, finding.where, finding.repaired) == ("unlistable-server", broken, False)


@pytest.mark.parametrize(
    ("index", "length", "text"),
    [
        (0, 0, "10 bytes between 0 and 25"),
        (0, 7, "3 bytes between 15 and 25"),
        (0, 8, "bytes 24 to 25"),
        (1, 0, "8 bytes between 4 and 19"),
        (1, 4, "bytes 16 to 19"),
        (2, 5, "bytes 21 to 23"),
    ],
)
def test_lost_bytes_are_told_as_ranges_of_the_file(index: int, length: int, text: str) -> None:
    assert lost_bytes(Striped(4, (0, 1, 2)), index, length, 26) == text
