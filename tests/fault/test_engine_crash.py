"""The durable engine after kill -9, power cuts at every fault point, full and failing disks.

Transaction n of a *history* is a pure function of n, so what a store must hold after the first n
transactions can be computed, and what recovery finds must be exactly that for some n: a prefix of
the history.
"""

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import lmdb
import pytest
import trio

from aifs.core import faults, files
from aifs.core.errors import NoSpace, StoreError, Unavailable
from aifs.meta import journal, lmdb_database, lmdb_engine
from aifs.meta.kv import grows
from aifs.meta.lmdb_engine import LmdbEngine
from tests.support.powercut import PowerCut

ROOT = Path(__file__).resolve().parents[2]
POINTS = sorted(
    name for name in faults.POINTS if name.startswith(("meta.journal.", "meta.commit."))
)
OPENING_POINTS = [lmdb_engine.REPLAYED, lmdb_database.BEFORE_COMMIT, lmdb_database.AFTER_LMDB]


def shrink():
    journal.SEGMENT_BYTES = 12 << 10
    lmdb_engine.CHUNK_KEYS = 5
    lmdb_database.INITIAL_MAP_BYTES = 128 << 10


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    for module, name in (
        (journal, "SEGMENT_BYTES"),
        (lmdb_engine, "CHUNK_KEYS"),
        (lmdb_database, "INITIAL_MAP_BYTES"),
    ):
        monkeypatch.setattr(module, name, getattr(module, name))
    shrink()


def change(tx, number):
    """Transaction ``number`` of the history; ``tx`` is a Transaction or a Model."""
    rng = random.Random(number)
    for _ in range(rng.randint(1, 4)):
        tx.put(
            b"k%02d" % rng.randrange(60),
            b"%d." % number + bytes([number % 256]) * rng.randrange(150),
        )
    if rng.random() < 0.5:
        tx.delete(b"k%02d" % rng.randrange(60))
    tx.put(b"n", b"%d" % number)


class Model(dict):
    def put(self, key, value):
        self[key] = value

    def delete(self, key):
        self.pop(key, None)


def after(count):
    """Content of the store after transactions 1 to count."""
    model = Model()
    for number in range(1, count + 1):
        change(model, number)
    return sorted(model.items())


def content(engine):
    return trio.run(engine.view, lambda tx: list(tx.range(b"\0", b"\xff")))


@contextmanager
def opened(path):
    engine = LmdbEngine(str(path))
    try:
        yield engine
    finally:
        engine.close()


def prefix_in(path):
    """How many transactions of the history a store holds, which has to be all that it holds."""
    with opened(path) as engine:
        pairs = content(engine)
    count = int(dict(pairs).get(b"n", b"0"))
    assert pairs == after(count), "not a prefix of the history"
    return count


class Run:
    """A history on one engine until a simulated crash; what was promised by then."""

    def __init__(self, engine, begin, barrier_every):
        self.engine = engine
        self.barrier_every = barrier_every
        self.attempted = self.done = self.durable = begin

    async def play(self, cut, limit):
        async with trio.open_nursery() as nursery:

            async def guarded(function, *args):
                try:
                    await function(*args)
                except trio.Cancelled:
                    raise
                except BaseException:  # SimulatedCrash, or a group around it
                    if not cut.crashed:
                        raise
                    nursery.cancel_scope.cancel()

            nursery.start_soon(guarded, self.engine.run)
            nursery.start_soon(guarded, self._history, cut, limit, nursery.cancel_scope)

    async def _history(self, cut, limit, scope):
        while self.attempted < limit:
            if cut.crashed:  # in the background
                return
            self.attempted += 1
            await self.engine.transact(change, self.attempted)
            if cut.crashed:
                return
            self.done = self.attempted
            if self.done % self.barrier_every == 0:
                await self.engine.barrier()
                if not cut.crashed:
                    self.durable = self.done
            await trio.lowlevel.checkpoint()
        scope.cancel()


def test_every_point_of_the_metadata_is_swept():
    declared = {name for name in faults.POINTS if name.startswith("meta.")}
    copying = {name for name in declared if name.startswith("meta.copy.")}  # in test_meta_copy
    assert declared - copying == {*POINTS, *OPENING_POINTS}


def crash_and_recover(directory, copy, begin, point, rng):
    """One life of the store; checks what the next one finds, and returns how many transactions that
    are."""
    with PowerCut(directory) as cut:
        engine = LmdbEngine(str(directory), commit_interval_s=0.001)
        assert content(engine) == after(begin)
        cut.crash_at(point, rng.randint(1, 60))
        run = Run(engine, begin, barrier_every=rng.choice((2, 10, 100)))
        trio.run(run.play, cut, begin + 400)
        if not cut.crashed:
            cut.crash_at(point)
            trio.run(run.play, cut, begin + 3000)
        assert cut.crashed, f"{point} was not reached in 3000 transactions"
        cut.materialise(copy, rng)
        engine.close()
    found = prefix_in(copy)
    assert run.durable <= found <= run.attempted
    return found


@pytest.mark.sweep
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_leaves_a_prefix_with_all_that_was_durable(scratch, point, seed):
    rng = random.Random(f"{point} {seed}")
    begin = 0
    for life in range(3):
        begin = crash_and_recover(scratch / str(life), scratch / str(life + 1), begin, point, rng)


@pytest.fixture(autouse=True)
def first_directory(scratch):
    (scratch / "0").mkdir()


@pytest.mark.parametrize("point", OPENING_POINTS)
@pytest.mark.parametrize("seed", range(6))
def test_a_power_cut_while_the_next_process_recovers_after_kill_9(scratch, point, seed):
    rng = random.Random(f"recovery {point} {seed}")
    with PowerCut(scratch / "0") as cut:
        engine = LmdbEngine(str(scratch / "0"))
        trio.run(run_some, engine, 0, 20)
        trio.run(engine.barrier)
        trio.run(run_some, engine, 20, 30)
        engine.abandon()
        cut.crash_at(point, 1 if point == lmdb_engine.REPLAYED else rng.randint(1, 8))
        with pytest.raises(faults.SimulatedCrash):
            LmdbEngine(str(scratch / "0"))
        cut.materialise(scratch / "1", rng)
    assert 20 <= prefix_in(scratch / "1") <= 50


@pytest.mark.parametrize("seed", range(6))
def test_lmdb_never_holds_what_the_journal_could_lose(scratch, seed):
    """Nobody has synced the memtable; the cut comes between the LMDB transactions of its commit."""
    rng = random.Random(seed)
    with PowerCut(scratch / "0") as cut:
        engine = LmdbEngine(str(scratch / "0"))
        trio.run(run_some, engine, 0, 50)
        cut.crash_at(lmdb_database.BEFORE_COMMIT, rng.randint(2, 8))
        with pytest.raises(faults.SimulatedCrash):
            trio.run(engine.commit)
        assert cut.crashed
        cut.materialise(scratch / "1", rng)
        engine.close()
    prefix_in(scratch / "1")


async def run_some(engine, begin, count):
    for number in range(begin + 1, begin + count + 1):
        await engine.transact(change, number)


@pytest.mark.parametrize("point", OPENING_POINTS)
@pytest.mark.parametrize("seed", range(8))
def test_a_power_cut_while_the_store_is_made_leaves_one_that_can_be_made(scratch, point, seed):
    with PowerCut(scratch / "0") as cut:
        cut.crash_at(point)
        with pytest.raises(faults.SimulatedCrash):
            LmdbEngine(str(scratch / "0"))
        cut.materialise(scratch / "1", random.Random(seed))
    with opened(scratch / "1") as engine:
        trio.run(run_some, engine, 0, 5)
    assert prefix_in(scratch / "1") == 5


def test_what_a_cut_left_behind_a_torn_record_never_comes_back(scratch):
    """Records 1 and 3 reached the disk, 2 did not; after recovery a new record ends just where 3
    begins."""
    with opened(scratch / "0") as engine:
        for number in (b"1", b"2", b"3"):
            trio.run(engine.transact, lambda tx, number=number: tx.put(b"key", number))
        shutil.copytree(scratch / "0", scratch / "1")
    length = len(journal.encode(1, {b"key": b"1"}, 0))
    with open(scratch / "1" / "journal.0", "r+b") as file:
        file.seek(journal.FIRST_RECORD + length)
        file.write(bytes(length))
    with opened(scratch / "1") as engine:
        assert engine.recovered == 1
        trio.run(engine.transact, lambda tx: tx.put(b"key", b"4" * (length + 1)))
        assert engine.journal_bytes == 2 * length
        shutil.copytree(scratch / "1", scratch / "2")
    with opened(scratch / "2") as engine:
        assert engine.recovered == 1
        assert content(engine) == [(b"key", b"4" * (length + 1))]


@pytest.mark.sweep("life")
@pytest.mark.parametrize("life", range(3))
def test_kill_9_loses_nothing_acknowledged(scratch, life):
    rng = random.Random(life)
    begin = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, __file__, str(scratch / "0"), str(begin)],
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        acknowledgements = [child.stdout.readline() for _ in range(rng.randint(100, 1500))]
        child.kill()
        acknowledgements += child.stdout.readlines()
        child.stdout.close()
        assert child.wait() == -signal.SIGKILL
        acknowledged = int(acknowledgements[-1])
        assert acknowledged == begin + len(acknowledgements)
        begin = prefix_in(scratch / "0")
        assert acknowledged <= begin <= acknowledged + 1


def child_main(directory, begin):
    """Commit transactions for ever, and write the number of each to standard output when it has
    returned."""
    shrink()
    engine = LmdbEngine(directory, commit_interval_s=0.001)

    async def main():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            number = begin
            while True:
                number += 1
                await engine.transact(change, number)
                os.write(1, b"%d\n" % number)
                if number % 10 == 0:
                    await trio.lowlevel.checkpoint()

    trio.run(main)


class Failing:
    """While ``error`` is set, operations named ``op`` fail, before or after they were done."""

    def __init__(self, op, late=False):
        self.op, self.late, self.error = op, late, None

    def before(self, op, path):
        if op == self.op and self.error and not self.late:
            raise OSError(self.error, os.strerror(self.error))

    def after(self, op, path, *args):
        if op == self.op and self.error and self.late:
            raise OSError(self.error, os.strerror(self.error))

    def __enter__(self):
        files.set_hook(self)
        return self

    def __exit__(self, *_):
        files.set_hook(None)


@pytest.mark.parametrize(("number", "kind"), [(errno.ENOSPC, NoSpace), (errno.EIO, Unavailable)])
@pytest.mark.parametrize("late", [False, True])
def test_an_append_that_fails_changes_nothing(scratch, number, kind, late):
    with Failing("write_at", late) as failing:
        engine = LmdbEngine(str(scratch / "0"))
        trio.run(engine.transact, change, 1)
        failing.error = number
        with pytest.raises(kind, match="metadata journal"):
            trio.run(engine.transact, lambda tx: tx.put(b"lost", b"x" * 500))
        failing.error = None
        assert content(engine) == after(1)
        trio.run(engine.transact, change, 2)
        shutil.copytree(scratch / "0", scratch / "1")
        engine.close()
    with opened(scratch / "1") as engine:
        assert engine.recovered == 2 and content(engine) == after(2)


def test_after_a_failed_sync_nothing_is_promised_any_more(scratch, caplog):
    with Failing("sync_file") as failing:
        engine = LmdbEngine(str(scratch / "0"))
        trio.run(engine.transact, change, 1)
        failing.error = errno.EIO
        with pytest.raises(Unavailable, match="cannot be synced"):
            trio.run(engine.barrier)
        failing.error = None
        with pytest.raises(Unavailable):
            trio.run(engine.barrier)
        with pytest.raises(Unavailable):
            trio.run(engine.transact, change, 2)
        assert content(engine) == after(1)
        with pytest.raises(Unavailable):
            engine.close()
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert prefix_in(scratch / "0") == 1  # the journal was good after all


def test_all_who_wait_for_a_sync_that_fails_hear_of_it(scratch, caplog):
    async def main(engine):
        refused = []

        async def wait():
            with pytest.raises(Unavailable):
                await engine.barrier()
            refused.append(1)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.run)
            for _ in range(5):
                nursery.start_soon(wait)
            while len(refused) < 5:
                await trio.lowlevel.checkpoint()
            nursery.cancel_scope.cancel()
        return len(refused)

    with Failing("sync_file") as failing:
        engine = LmdbEngine(str(scratch / "0"))
        trio.run(engine.transact, change, 1)
        failing.error = errno.EIO
        assert trio.run(main, engine) == 5
        with pytest.raises(Unavailable):
            engine.close()
    assert len(caplog.records) == 1


@pytest.fixture
def small_disk(scratch):
    """A filesystem of 1 MiB."""
    path = scratch / "disk"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", path], check=True)
    yield path
    subprocess.run(["umount", "--lazy", path], check=True)  # a failed test may have files open


def fill(path):
    """Take all space of the filesystem of ``path``."""
    with open(path, "wb", buffering=0) as ballast, pytest.raises(OSError, match="No space"):
        while True:
            ballast.write(bytes(4096))


@pytest.mark.sweep
def test_a_full_disk(small_disk, caplog, monkeypatch):
    """The journal's reserve takes changes while LMDB cannot; then they are refused; nothing is
    lost."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 64 << 10)
    store = small_disk / "meta"
    store.mkdir()
    engine = LmdbEngine(str(store))

    def add(tx, number):
        tx.put(b"%05d" % number, bytes(900))

    def fill_store():
        number = count
        with pytest.raises(NoSpace):
            while True:
                trio.run(engine.transact, add, number)
                number += 1
        return number

    count = 0
    fill(small_disk / "ballast")
    while not engine.commit_error:
        trio.run(engine.transact, add, count)
        count += 1
        if count % 40 == 0:
            trio.run(engine.commit)
    warned = count
    assert warned >= 40
    count = fill_store()
    assert count - warned >= 40, "the journal's reserve took nothing"
    trio.run(engine.commit)
    assert len(content(engine)) == count

    (small_disk / "ballast").unlink()
    trio.run(engine.commit)
    assert not engine.commit_error
    trio.run(engine.commit)
    count += 1
    trio.run(engine.transact, add, count - 1)
    engine.close()
    assert [record.levelname for record in caplog.records if record.levelno > 20] == [
        "WARNING",
        "WARNING",
    ]
    assert "changes that need space are refused" in caplog.text
    assert "takes no changes" in caplog.text

    with opened(store) as engine:
        assert engine.recovered == 0
        assert [key for key, _ in content(engine)] == [b"%05d" % number for number in range(count)]


def test_without_its_directory_the_engine_goes_on_and_commits_when_it_is_back(
    scratch, caplog, monkeypatch
):
    """Commits fail meanwhile, and the database cannot be opened anew: reads go on all the same."""
    store, away = scratch / "meta", scratch / "away"
    store.mkdir()
    engine = LmdbEngine(str(store))

    def add(tx, number):
        tx.put(b"%05d" % number, b"value")

    def fail(applied):
        raise lmdb_database.DatabaseError("a commit fails")

    trio.run(engine.transact, add, 0)
    trio.run(engine.commit)
    store.rename(away)
    trio.run(engine.transact, add, 1)
    with monkeypatch.context() as patch:
        patch.setattr(engine.database, "commit", fail)
        trio.run(engine.commit)
    trio.run(engine.commit)
    assert engine.commit_error
    assert content(engine) == [(b"00000", b"value"), (b"00001", b"value")]

    away.rename(store)
    trio.run(engine.commit)
    assert not engine.commit_error
    engine.close()
    assert "takes no changes" in caplog.text
    with opened(store) as engine:
        assert len(content(engine)) == 2


@grows
def add(tx, number):
    tx.put(b"%05d" % number, bytes(900))


def remove(tx, number):
    tx.delete(b"%05d" % number)


def work(engine, function, numbers):
    """A transaction for each number, now and then committed to LMDB."""
    for number in numbers:
        trio.run(engine.transact, function, number)
        if number % 16 == 0:
            trio.run(engine.commit)


def test_on_a_full_disk_what_frees_space_still_works(small_disk, caplog, monkeypatch):
    """Also after a restart: what makes the store larger is refused while LMDB still has room in its
    own file."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 32 << 10)
    store = small_disk / "meta"
    store.mkdir()
    engine = LmdbEngine(str(store))
    fill(small_disk / "ballast")
    with pytest.raises(NoSpace):
        work(engine, add, range(10_000))
    assert engine.short_of_space
    engine.close()

    engine = LmdbEngine(str(store))
    assert engine.short_of_space
    count = len(content(engine))
    assert count > 16
    work(engine, remove, range(count))
    engine.abandon()

    engine = LmdbEngine(str(store))
    assert content(engine) == []
    (small_disk / "ballast").unlink()
    trio.run(engine.commit)
    work(engine, add, range(10))
    engine.close()
    assert "No space" not in caplog.text


@pytest.mark.sweep
@pytest.mark.parametrize("remount", [False, True])
def test_what_was_deleted_on_a_full_disk_makes_room(small_disk, caplog, monkeypatch, remount):
    """LMDB's file does not shrink: its free pages are the room, though the disk stays full."""
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 32 << 10)
    store = small_disk / "meta"
    store.mkdir()
    engine = LmdbEngine(str(store))
    work(engine, add, range(400))
    fill(small_disk / "ballast")
    with pytest.raises(NoSpace):
        work(engine, add, range(400, 10_000))
    count = len(content(engine))
    work(engine, remove, range(count))
    if remount:
        engine.close()
        engine = LmdbEngine(str(store))
    else:
        trio.run(engine.commit)
    assert not engine.short_of_space
    work(engine, add, range(count // 2))
    assert len(content(engine)) == count // 2
    engine.close()
    assert "takes no changes" not in caplog.text


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (os.unlink, "journal holds changes"),
        (lambda path: os.truncate(path, 3 * 4096), "the metadata database is broken"),
        (
            lambda path: path.write_bytes(b"something else" * 1000),
            "the metadata database is broken",
        ),
    ],
    ids=["lost", "truncated", "something else"],
)
def test_a_damaged_database_is_refused(scratch, damage, match):
    with opened(scratch / "0") as engine:
        trio.run(run_some, engine, 0, 50)
    damage(scratch / "0" / "data.mdb")
    with pytest.raises(StoreError, match=match):
        LmdbEngine(str(scratch / "0"))


def test_a_database_without_its_unwritten_last_pages_is_whole(scratch):
    # LMDB does not write pages that one transaction takes and frees, so the file may end before its
    # "last page".
    directory = str(scratch / "0")
    with opened(directory) as engine:
        trio.run(run_some, engine, 0, 50)
    with lmdb.open(directory, lock=False, max_dbs=2) as environment:
        records = environment.open_db(b"checked")
        for change in (lambda tx, key: tx.put(key, bytes(500)), lambda tx, key: tx.delete(key)):
            with environment.begin(write=True, db=records) as transaction:
                for number in range(2000):
                    change(transaction, b"q%d" % number)
        length = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    assert (scratch / "0" / "data.mdb").stat().st_size < length
    with opened(directory) as engine:
        assert content(engine)


if __name__ == "__main__":
    child_main(sys.argv[1], int(sys.argv[2]))
