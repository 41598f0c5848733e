"""Bits and pages of the metadata database that are not what was written: all is named, nothing is
served, nothing dies.
"""

import errno
import logging
import random
import re
import shutil
from contextlib import suppress
from functools import partial
from pathlib import Path

import lmdb
import pytest
import trio

from aifs.check.fsck import check
from aifs.cli.main import main
from aifs.core.errors import StoreError, Unavailable
from aifs.meta import keys, lmdb_database, lmdb_engine
from aifs.meta.kv import DamagedRecord, Transaction
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.store.restore import back_up
from tests.support import modes
from tests.support.damaged import DamagedStore
from tests.support.data_servers import failing
from tests.support.stores import LIMIT_S, opened, read_file, write_file

PAGE = 4096
SMALL = b"what a small file holds, in its inode record"
INLINE = {"meta.backup_interval": "1h"}


def database(store: Path) -> Path:
    return store / "meta" / "data.mdb"


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


def flip_in(path: Path, needle: bytes, at: int = 0) -> None:
    """Turn over a bit of each place where ``needle`` stands."""
    data = path.read_bytes()
    found = [match.start() + at for match in re.finditer(re.escape(needle), data)]
    assert found
    for offset in found:
        overwrite(path, offset, bytes([data[offset] ^ 1]))


def used_pages(directory: Path) -> int:
    with lmdb.open(str(directory), lock=False, readonly=True, max_dbs=3) as environment:
        return environment.info()["last_pgno"] + 1


async def store_with_a_small_file(store: Path) -> int:
    async with opened(store, INLINE, sound=False) as fs:
        return await write_file(fs, b"small", SMALL)


# --- records ---


async def test_a_flipped_bit_of_an_inline_file_is_eio_and_named_once(scratch, caplog):
    ino = await store_with_a_small_file(scratch / "s")
    flip_in(database(scratch / "s"), SMALL, at=5)
    async with opened(scratch / "s", INLINE, sound=False) as fs:
        for _ in range(3):
            with pytest.raises(Unavailable, match=f"record i {ino} is damaged"):
                await read_file(fs, ino)
    errors = [entry for entry in caplog.records if entry.levelno == logging.ERROR]
    assert [f"record i {ino} is damaged" in entry.getMessage() for entry in errors] == [True]
    assert not any(entry.exc_info for entry in errors)


async def test_fsck_names_a_flipped_bit_and_goes_on(scratch):
    ino = await store_with_a_small_file(scratch / "s")
    flip_in(database(scratch / "s"), SMALL, at=5)
    report = await trio.to_thread.run_sync(check, modes.config_of(scratch / "s"), False)
    assert f"record i {ino}" in {finding.where for finding in report.findings}
    assert report.counts["inodes"] >= 1


async def test_no_backup_is_made_of_a_damaged_record_and_the_one_before_stays(scratch):
    await store_with_a_small_file(scratch / "s")
    before = sorted(path.name for path in scratch.glob("s/data/*/backup/*"))
    flip_in(database(scratch / "s"), SMALL, at=5)
    config = modes.config_of(scratch / "s")
    with pytest.raises(DamagedRecord):
        await trio.to_thread.run_sync(back_up, config, str(scratch / "copy"))
    assert before and sorted(path.name for path in scratch.glob("s/data/*/backup/*")) == before


@pytest.mark.sweep
def test_every_damage_is_named_and_nothing_dies(scratch):
    # A part of what there is; on a long run nothing else turned up.
    store = DamagedStore(scratch / "s")
    last = used_pages(scratch / "s" / "meta")
    rng = random.Random(10)
    for number in range(24):
        other = store.copied_to(scratch / "c")
        at = rng.randrange(2 * PAGE, last * PAGE)
        if number % 3 == 0:
            overwrite(database(scratch / "c"), at // PAGE * PAGE, bytes(PAGE))
        elif number % 3 == 1:
            overwrite(database(scratch / "c"), at // 512 * 512, rng.randbytes(512))
        else:
            byte = database(scratch / "c").read_bytes()[at]
            overwrite(database(scratch / "c"), at, bytes([byte ^ 1 << rng.randrange(8)]))
        try:
            found = check(other.config, repair=True).findings
        except StoreError as error:
            assert "aifs meta restore" in str(error)
        else:
            left = check(other.config, repair=False).findings
            assert bool(left) == any(not finding.repaired for finding in found), (found, left)
        shutil.rmtree(scratch / "c")


def test_a_changed_byte_is_never_served(scratch):
    engine = LmdbEngine(str(scratch))
    content = {keys.inode(number): b"%d" % number * 30 for number in range(1, 400)}

    def fill(tx):
        for key, value in content.items():
            tx.put(key, value)

    def never_wrong(tx):
        for key, value in content.items():
            with suppress(Unavailable):
                assert tx.get(key) == value

    trio.run(engine.transact, fill)
    engine.close()
    path = scratch / "data.mdb"
    whole = path.read_bytes()[: used_pages(scratch) * PAGE]
    rng = random.Random(7)
    for _ in range(60):
        at = rng.randrange(2 * PAGE, len(whole))
        overwrite(path, at, bytes([whole[at] ^ 1 << rng.randrange(8)]))
        try:
            engine = LmdbEngine(str(scratch))
        except StoreError:
            pass
        else:
            trio.run(engine.view, never_wrong)
            engine.abandon()
        overwrite(path, 0, whole)


def test_a_newer_value_hides_a_damaged_one(scratch):
    engine = LmdbEngine(str(scratch))
    trio.run(engine.transact, lambda tx: tx.put(b"kind", b"a value of some length"))
    engine.close()
    flip_in(scratch / "data.mdb", b"a value of some length")
    engine = LmdbEngine(str(scratch))
    with pytest.raises(DamagedRecord):
        trio.run(engine.view, lambda tx: list(tx.range(b"a", b"z")))
    with pytest.raises(DamagedRecord):
        trio.run(engine.view, lambda tx: tx.get_many([b"a", b"kind"]))
    trio.run(engine.transact, lambda tx: tx.put(b"kind", b"new"))
    for _ in range(2):
        assert trio.run(engine.view, lambda tx: tx.get_many([b"a", b"kind"])) == [None, b"new"]
        assert trio.run(engine.view, lambda tx: list(tx.range(b"a", b"z"))) == [(b"kind", b"new")]
        engine.close()
        engine = LmdbEngine(str(scratch))
    engine.close()


# --- pages ---


def zero_a_leaf(store: Path) -> None:
    """The page with the counter of inodes, and what is left of earlier versions of it."""
    data = database(store).read_bytes()
    for page in {match.start() // PAGE for match in re.finditer(keys.COUNTER_INODES, data)}:
        overwrite(database(store), page * PAGE, bytes(PAGE))


async def test_a_zeroed_page_is_refused_with_the_command_that_helps(scratch, capsys):
    ino = await store_with_a_small_file(scratch / "s")
    zero_a_leaf(scratch / "s")
    for command in (["fsck"], ["meta", "backup"]):
        code = await trio.to_thread.run_sync(main, [*command, str(scratch / "s")])
        printed = capsys.readouterr().err
        assert code in (4, 8) and "aifs meta restore" in printed and "Traceback" not in printed
    with pytest.raises(StoreError) as refused:
        async with opened(scratch / "s", INLINE, sound=False):
            pass
    move, restore = re.search(r"(mv .*) && aifs (meta restore .*)", str(refused.value)).groups()
    _, source, target = move.split()
    shutil.move(source, target)
    assert await trio.to_thread.run_sync(main, restore.split()) == 0
    async with opened(scratch / "s", INLINE) as fs:
        assert await read_file(fs, ino) == SMALL


# --- pages that are looked at later ---


@pytest.fixture
def slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mount begins when a few pages have been looked at, and then looks at ten at a time."""
    monkeypatch.setattr(lmdb_database, "FIRST_PAGES", 3)
    monkeypatch.setattr(lmdb_engine, "CHECK_PAGES", 10)
    monkeypatch.setattr(lmdb_engine, "CHECK_PAUSE_S", 0.001)


RECORDS = {keys.inode(number): b"%d " % number * 20 for number in range(1, 1500)}


def fill(tx: Transaction) -> None:
    for key, value in RECORDS.items():
        tx.put(key, value)


@pytest.fixture
def filled(scratch: Path) -> Path:
    engine = LmdbEngine(str(scratch))
    trio.run(engine.transact, fill)
    engine.close()
    return scratch


def zero_a_far_leaf(directory: Path) -> None:
    path = directory / "data.mdb"
    found = path.read_bytes().index(RECORDS[keys.inode(1000)])
    overwrite(path, found // PAGE * PAGE, bytes(PAGE))


async def run_until_an_error(engine: LmdbEngine, caplog: pytest.LogCaptureFixture) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        with trio.fail_after(LIMIT_S):
            while "ERROR" not in caplog.text:
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()


@pytest.mark.sweep
async def test_a_mount_looks_at_most_pages_later_while_others_change_them(filled, slowly):
    engine = LmdbEngine(str(filled), commit_interval_s=0.001, thorough=False)
    assert (filled / lmdb_database.UNCHECKED).exists()
    rng = random.Random(3)

    def change(tx: Transaction) -> None:
        for key in rng.sample(sorted(RECORDS), 100):
            tx.put(key, rng.randbytes(rng.randrange(3000)))
        for key in rng.sample(sorted(RECORDS), 100):
            tx.delete(key)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        with trio.fail_after(LIMIT_S):
            while (filled / lmdb_database.UNCHECKED).exists():
                await engine.transact(change)
                await trio.sleep(0.001)
        nursery.cancel_scope.cancel()
    await engine.transact(change)
    engine.close()
    LmdbEngine(str(filled)).close()


async def test_a_page_that_is_found_broken_later_ends_all_changes(filled, slowly, caplog):
    zero_a_far_leaf(filled)
    engine = LmdbEngine(str(filled), thorough=False)
    await engine.transact(lambda tx: tx.put(b"kind", b"before"))
    await run_until_an_error(engine, caplog)
    assert "is broken: page" in caplog.text and "no more changes are taken" in caplog.text
    assert await engine.view(lambda tx: tx.get(b"kind")) == b"before"
    with pytest.raises(Unavailable, match="is broken"):
        await engine.transact(lambda tx: tx.put(b"kind", b"after"))
    with pytest.raises(Unavailable, match="is broken"):
        engine.close()
    with pytest.raises(lmdb_database.BrokenDatabase):
        LmdbEngine(str(filled), thorough=False)


async def test_nothing_is_brought_into_a_database_whose_page_was_found_broken(
    filled, slowly, caplog
):
    zero_a_far_leaf(filled)
    engine = LmdbEngine(str(filled), thorough=False)
    await engine.transact(lambda tx: tx.put(keys.inode(1000), b"on the broken page"))
    await run_until_an_error(engine, caplog)
    with pytest.raises(Unavailable, match="is broken"):
        await engine.commit()
    engine.abandon()


def test_where_no_mark_can_be_left_all_pages_are_looked_at_first(filled, slowly):
    full = partial(failing, "open_file", str(filled / lmdb_database.UNCHECKED), errno.ENOSPC)
    with full():
        engine = LmdbEngine(str(filled), thorough=False)
        assert engine.database.is_checked
        engine.close()
    zero_a_far_leaf(filled)
    with full(), pytest.raises(lmdb_database.BrokenDatabase):
        LmdbEngine(str(filled), thorough=False)


def test_whoever_died_before_all_pages_were_looked_at_has_them_all_looked_at(filled, slowly):
    LmdbEngine(str(filled), thorough=False).abandon()
    zero_a_far_leaf(filled)
    for _ in range(2):
        with pytest.raises(lmdb_database.BrokenDatabase):
            LmdbEngine(str(filled), thorough=False)


def test_whoever_ended_in_order_before_has_not(filled, slowly):
    LmdbEngine(str(filled), thorough=False).close()
    zero_a_far_leaf(filled)
    LmdbEngine(str(filled), thorough=False).abandon()
