"""The metadata of a store move from one host into a database, and back: what is there afterwards,
what is refused, and that there is one store whatever dies on the way."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.cli.main import main
from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import StoreBusy, StoreError
from aifs.files.types import ROOT
from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped
from aifs.meta import crossing, groups, keys
from aifs.meta.askers import Asker
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import Copy, Garbage, Inode
from aifs.meta.shared import users
from aifs.store import copying
from aifs.store.copying import copy_metadata
from aifs.store.store import Store, format_store, open_store
from tests.support.places import Places
from tests.support.points import armed, crash
from tests.support.postgres import TestDatabase
from tests.support.stores import drained, read_file, served, write_file

DATA = bytes(range(256)) * 8192
"""On both servers."""

SMALL = b"packed" * 1000


@pytest.fixture
def places(scratch: Path, database: TestDatabase) -> Places:
    return Places(scratch, database)


def copied(old: Config, new: Config) -> copying.Copied:
    shown: list[tuple[int, int]] = []
    found = copy_metadata(old, new, lambda done, total: shown.append((done, total)))
    assert all(done <= total for done, total in shown)
    return found


def filled(config: Config, mark: bytes = b"") -> None:
    """Some files, all drained, with copies in the burst tier that are kept."""

    async def fill() -> None:
        async with served(config) as fs:
            directory = await fs.mkdir(ROOT_INO, mark + b"directory", 0o755, ROOT)
            large = await write_file(fs, mark + b"large", DATA)
            small = await write_file(fs, mark + b"small", SMALL, parent=directory.ino)
            await write_file(fs, mark + b"tiny", b"tiny")
            await fs.setxattr(large, b"user.key", b"value")
            await drained(fs, large, small)
            await fs.clone(ROOT_INO, mark + b"large", directory.ino, b"clone", ROOT)
            await fs.clone(ROOT_INO, mark + b"directory", ROOT_INO, mark + b"shelf", ROOT, True)
            removed = await write_file(fs, mark + b"removed", DATA)
            await drained(fs, removed)
            await fs.unlink(ROOT_INO, mark + b"removed")

    trio.run(fill)


def require_files(config: Config, mark: bytes = b"") -> None:
    async def look() -> None:
        async with served(config) as fs:

            async def find(parent: int, name: bytes) -> int:
                return (await fs.lookup(parent, mark + name)).ino

            large = await find(ROOT_INO, b"large")
            assert await read_file(fs, large) == DATA
            assert await fs.getxattr(large, b"user.key") == b"value"
            directory = await find(ROOT_INO, b"directory")
            clone = (await fs.lookup(directory, b"clone")).ino
            assert await read_file(fs, clone) == DATA
            oid = (await fs.getattr(large)).oid
            sharing = await fs.store.engine.view(users, oid)
            assert len(sharing) == 3 and {large, clone} < set(sharing)
            small = await find(directory, b"small")
            assert await read_file(fs, small) == SMALL
            assert await read_file(fs, await find(ROOT_INO, b"tiny")) == b"tiny"

    trio.run(look)


def looked_at(config: Config, look: Callable[[Store], object] = lambda store: None) -> object:
    """As a mount opens it. Raises what a mount is refused with."""

    async def run() -> object:
        store = await open_store(config)
        try:
            return look(store)
        finally:
            store.close()

    return trio.run(run)


def sound(config: Config) -> None:
    found = check(config, repair=False, deep=True).findings
    assert not found, found


def test_a_store_goes_into_a_database_and_back_and_in_again(
    places: Places, capsys: pytest.CaptureFixture[str]
) -> None:
    one, many = places.directory("one"), places.host()
    format_store(one, force=False)
    filled(one)
    assert main(["meta", "copy", one.source, many.source]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("copied ") and said[-1].startswith("0 findings; checked ")
    assert places.named() == {many.meta.url}
    sound(many)
    with pytest.raises(StoreError, match="are in postgresql://.* now"):
        looked_at(one)
    require_files(many)
    filled(many, b"2")
    # Back: to another directory. The first one is what it was, and does not come to life again.
    two = places.directory("two")
    found = copied(many, two)
    assert found.records > 20 and len(found.digest) == 64
    assert places.named() == {""}
    sound(two)
    with pytest.raises(StoreError, match="are in /.* now"):
        looked_at(many)
    with pytest.raises(StoreError, match="are in postgresql://.* now"):
        looked_at(one)
    require_files(two)
    require_files(two, b"2")
    filled(two, b"3")
    # In again, to the same database: sessions and change sets are numbered behind the old ones,
    # so that a replica of that time is not taken for one of this.
    copied(two, many)
    assert looked_at(many, lambda store: store.hosts and store.hosts.session > 5)
    for mark in (b"", b"2", b"3"):
        require_files(many, mark)
    sound(many)


_POINTS = [point for point in faults.POINTS if point.startswith("meta.copy.")]
_BESIDE_DECISION = (copying.FILLED, copying.MARKED, copying.DECIDED)


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, marks=() if point in _BESIDE_DECISION else pytest.mark.long)
        for point in _POINTS
    ],
)
@pytest.mark.parametrize("back", [False, True], ids=["there", "back"])
def test_there_is_one_store_wherever_it_dies(
    places: Places, scratch: Path, point: str, back: bool
) -> None:
    # With the burst directory of the old place the new one is mounted when all is tidied.
    own = {"directories": [str(scratch / "of-host")], "drain_delay": "0s"}
    old, new = places.directory(), places.host(burst=own)
    format_store(old, force=False)
    filled(old)
    if back:
        copied(old, new)
        old, new = new, places.directory("back")
    with armed(point, crash), pytest.raises(faults.SimulatedCrash):
        copied(old, new)
    usable = []
    for config in (old, new):
        try:
            looked_at(config)
            usable.append(config)
        except (StoreError, OSError):
            pass
    # Of two markers the first one decides on the way there, the last one on the way back.
    before = point in (copying.NOTED, copying.FILLED) or (point == copying.MARKED and back)
    assert usable == [old if before else new]
    copied(old, new)
    with pytest.raises(StoreError, match="now"):
        looked_at(old)
    require_files(new)
    sound(new)
    with pytest.raises(StoreError, match="now|already"):
        copied(old, new)


def test_what_is_refused_changes_nothing(places: Places, scratch: Path) -> None:
    one, many = places.directory(), places.host()

    def refused(match: str, old: Config, new: Config, kind: type[Exception] = StoreError) -> None:
        with pytest.raises(kind, match=match) as raised:
            copied(old, new)
        assert "\n" not in str(raised.value)
        assert places.named() <= {""}

    format_store(one, force=False)
    refused("are both|both are", one, places.directory("two"))
    refused("both are in a database", many, places.host("more"))
    same = places.host(
        "same",
        meta={**many.model_dump()["meta"]}
        and {
            "engine": "postgresql",
            "url": many.meta.url,
            "secret": many.meta.secret,
            "directory": one.meta.directory,
        },
    )
    refused("each needs a directory of its own", one, same)
    refused("is missing", one, places.host("fewer", servers=places.servers[:1]))
    other = places.directory(
        "other", servers=[str(scratch / "elsewhere")], burst={"directories": []}
    )
    format_store(other, force=False)
    refused(
        "are of different stores",
        one,
        places.host("mixed", servers=[*places.servers, str(scratch / "elsewhere")]),
    )
    refused(
        "must name the same servers",
        one,
        places.host("else", servers=[str(scratch / "elsewhere")], burst={"directories": []}),
    )
    looked_at(one)  # it can be used all the same

    async def left_undrained() -> None:
        waiting = one.model_copy(
            update={"burst": one.burst.model_copy(update={"drain_delay_s": 3600.0})}
        )
        async with served(waiting) as fs:
            await write_file(fs, b"file", DATA)
            with pytest.raises(StoreBusy, match="is in use by"):
                await trio.to_thread.run_sync(copied, one, many)

    trio.run(left_undrained)
    refused("files that are undrained: 1: aifs mount .*umount --drain", one, many, StoreBusy)

    async def killed() -> None:
        with pytest.raises(faults.SimulatedCrash):
            async with served(one):
                raise faults.SimulatedCrash

    trio.run(killed)
    refused("not closed in order: aifs mount", one, many, StoreBusy)
    assert not os.path.exists(many.meta.directory)


def test_what_belongs_to_hosts_stays_behind() -> None:
    file = Inode(7, 0o100644, 0, 0, 1, 0, 9, 8, 1, 2, 3, oid=8)
    file.layout, file.copy = Striped(4096, (0, 1)), Copy(BURST_FIRST, 9)
    begun = groups.GroupRecord(
        3, groups.GroupOptions(b"g", 2, 0, True, 0, 0, b""), Asker(0, (0,)), 1, host=4
    )
    member = groups.GroupMember(5).encode()
    on_both = Striped(4096, (0, BURST_FIRST))
    found = {
        keys.lock_home(7): bytes(8),
        keys.SUPERBLOCK: b"old",
        keys.open_container(6): keys.host_value(4),
        keys.burst_copy(9): b"copy",
        keys.COUNTER_IDS: b"99",
        keys.garbage(10): Garbage(7, on_both, 4).encode(),
        keys.garbage(11): Garbage(0, Striped(4096, (BURST_FIRST,)), 4).encode(),
        keys.inode(7): file.encode(),
        keys.job(b"scrub"): b"{}",
        keys.job(b"unlisted" + BURST_FIRST.to_bytes(2, "big") + bytes(16)): b"",
        keys.job(b"unlisted" + bytes(18)): b"",
        keys.stray(8, 1): b"1",
        keys.stray(8, BURST_FIRST): b"2",
        keys.group(5): begun.encode(),
        keys.group_member(5, 1): member,
        keys.orphan(7): b"",
        keys.hold(7, 4): b"",
        keys.host(4): b"host",
        keys.server(0): b"row",
        keys.windows(4): b"window",
        keys.loose(12): keys.host_value(4),
    }
    extra = {keys.SUPERBLOCK: b"new", keys.server(0): b"its row", keys.host(1): b"many"}
    crossed = list(crossing.Crossing(1, extra).pairs(sorted(found.items())))
    assert crossed == sorted(crossed)
    assert dict(crossed) == {
        **extra,
        keys.COUNTER_IDS: b"99",
        keys.garbage(10): Garbage(7, Striped(4096, (0,)), 0).encode(),
        keys.inode(7): file.but(copy=None).encode(),
        keys.job(b"scrub"): b"{}",
        keys.job(b"unlisted" + bytes(18)): b"",
        keys.stray(8, 1): b"1",
        keys.group(5): begun._replace(host=1).encode(),
        keys.group_member(5, 1): member,
        keys.orphan(7): b"",
        keys.loose(12): keys.host_value(0),
    }
    for broken in ({keys.inode(7): file.but(layout=None).encode()}, {b"?": b""}):
        with pytest.raises(StoreError, match="is not copied: "):
            list(crossing.Crossing(0, {}).pairs(broken.items()))


def test_every_kind_of_record_has_a_fate() -> None:
    kinds = {
        line.strip()[0]
        for line in (keys.__doc__ or "").splitlines()[4:]
        if line[4:5].isalpha() and line[5:6] in " "
    }
    functions = crossing.Crossing(0, {}).kinds
    known = {chr(kind) for kind in (*crossing.KEPT, *crossing.DROPPED, *functions)} | {"S", "s"}
    assert kinds == known
