"""The contract of ``meta/kv.py``, kept by every engine; where an engine has inner states, in each
of them.
"""

import itertools
import os
import shutil
import tempfile
from contextlib import ExitStack

import pytest
import trio
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aifs.meta import journal, lmdb_database, lmdb_engine
from aifs.meta.kv import MAX_KEY_BYTES, MAX_VALUE_BYTES
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.replicated.database import MapDatabase
from aifs.meta.replicated.joining import join
from tests.support.memory_engine import MemoryEngine

LOW, HIGH = b"\0", b"\xff" * MAX_KEY_BYTES
ENGINES = ["memory", "lmdb", "replicated"]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    shrink(monkeypatch)


def shrink(patch):
    patch.setattr(journal, "SEGMENT_BYTES", 64 << 10)
    patch.setattr(lmdb_database, "INITIAL_MAP_BYTES", 128 << 10)
    patch.setattr(lmdb_engine, "CHUNK_KEYS", 7)


@pytest.fixture(params=ENGINES)
async def engine(request, tmp_path):
    with ExitStack() as stack:
        if request.param == "memory":
            engine = MemoryEngine()
        elif request.param == "lmdb":
            engine = LmdbEngine(str(tmp_path))
        else:
            servers = request.getfixturevalue("postgres_servers")
            database = stack.enter_context(servers.get("wheel").new_database())
            engine = await first_host(str(tmp_path), database)
        yield engine
        engine.close()


async def first_host(directory, database):
    """The engine of the first host of a new cluster."""
    database.make_store()
    map_database = MapDatabase(database.conninfo)
    return await join(LmdbEngine(directory), map_database, "host", "host:7947")


def everything(tx, start=LOW, end=HIGH, limit=0):
    return list(tx.range(start, end, limit))


async def put(engine, *pairs):
    await engine.transact(lambda tx: [tx.put(key, value) for key, value in pairs])


async def test_a_new_store_is_empty(engine):
    assert await engine.view(everything) == []
    assert await engine.view(lambda tx: tx.get(b"k")) is None
    assert engine.recovered == 0


async def test_arguments_and_result_are_passed_on(engine):
    assert await engine.transact(lambda tx, a, b: (a, b), 1, 2) == (1, 2)
    assert await engine.view(lambda tx, a: a, 3) == 3


async def test_a_transaction_reads_its_own_writes(engine):
    await put(engine, (b"a", b"1"), (b"b", b"2"), (b"c", b"3"))

    def change(tx):
        tx.delete(b"a")
        tx.put(b"b", b"new")
        tx.put(b"bb", b"between")
        tx.put(b"d", b"gone")
        tx.delete(b"d")
        tx.delete(b"never there")
        assert tx.get(b"a") is None and tx.get(b"d") is None and tx.get(b"b") == b"new"
        assert everything(tx) == [(b"b", b"new"), (b"bb", b"between"), (b"c", b"3")]
        assert everything(tx, limit=2) == [(b"b", b"new"), (b"bb", b"between")]
        return everything(tx, b"bb", b"c")

    assert await engine.transact(change) == [(b"bb", b"between")]
    assert await engine.view(everything) == [(b"b", b"new"), (b"bb", b"between"), (b"c", b"3")]


async def test_an_exception_rolls_back_and_reaches_the_caller(engine):
    await put(engine, (b"a", b"1"), (b"b", b"2"))
    seq = engine.seq

    def fail(tx):
        tx.put(b"a", b"changed")
        tx.put(b"a", b"again")
        tx.delete(b"b")
        tx.put(b"new", b"x")
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await engine.transact(fail)
    assert await engine.view(everything) == [(b"a", b"1"), (b"b", b"2")]
    assert engine.seq == seq


async def test_add_counts_from_zero_through_negative_numbers(engine):
    def count(tx, *deltas):
        counts = []
        for delta in deltas:
            tx.add(b"n", delta)
            counts.append(tx.counter(b"n"))
        return counts

    assert await engine.transact(count, 5, -8) == [5, -3]
    assert await engine.transact(count, 1 << 40) == [(1 << 40) - 3]


async def test_a_patch_overwrites_part_of_a_value(engine):
    await put(engine, (b"a", b"0123456789"))

    def change(tx):
        tx.patch(b"a", 2, b"xy")
        assert tx.get_loosely(b"a") == b"01xy456789"
        tx.patch(b"a", 3, b"z")
        tx.patch(b"a", 9, b"!")
        assert tx.get(b"a") == b"01xz45678!"
        tx.put(b"new", b"abc")
        tx.patch(b"new", 0, b"")
        tx.patch(b"new", 0, b"ABC")

    await engine.transact(change)
    assert await engine.view(everything) == [(b"a", b"01xz45678!"), (b"new", b"ABC")]


async def test_a_part_that_is_not_there_is_not_patched(engine):
    await put(engine, (b"a", b"01"), (b"gone", b"01"))

    def beyond(tx, offset):
        tx.put(b"other", b"x")
        tx.patch(b"a", offset, b"xy")

    def deleted(tx):
        tx.delete(b"gone")
        tx.patch(b"gone", 0, b"x")

    for function, *args in ((beyond, 1), (beyond, 9), (deleted,)):
        with pytest.raises(ValueError, match="must be there"):
            await engine.transact(function, *args)
    assert await engine.view(everything) == [(b"a", b"01"), (b"gone", b"01")]


async def test_on_one_host_all_is_shown_at_once_and_nobody_is_followed(engine):
    told = []
    engine.follow(told.append)
    await put(engine, (b"a", b"1"))
    await engine.shown()
    assert told == []


async def test_the_largest_key_and_value(engine):
    await put(engine, (b"k" * MAX_KEY_BYTES, b"v" * MAX_VALUE_BYTES), (b"empty", b""))
    assert await engine.view(lambda tx: tx.get(b"k" * MAX_KEY_BYTES)) == b"v" * MAX_VALUE_BYTES
    assert await engine.view(lambda tx: tx.get(b"empty")) == b""


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"", b"v"), (b"k" * (MAX_KEY_BYTES + 1), b"v"), (b"k", b"v" * (MAX_VALUE_BYTES + 1))],
    ids=["empty key", "long key", "long value"],
)
async def test_what_no_engine_can_store_is_refused(engine, key, value):
    with pytest.raises(ValueError, match="allowed"):
        await engine.transact(lambda tx: (tx.put(b"other", b"x"), tx.put(key, value)))
    if len(value) == 1:
        with pytest.raises(ValueError, match="allowed"):
            await engine.transact(lambda tx: tx.delete(key))
    assert await engine.view(everything) == []


async def test_barrier_makes_what_has_returned_durable(engine):
    await put(engine, (b"a", b"1"))
    first = engine.seq
    await engine.barrier(first)
    assert engine.durable_seq >= first
    await put(engine, (b"a", b"2"))
    assert engine.seq > first
    await engine.barrier()
    assert engine.durable_seq == engine.seq


async def test_a_transaction_without_changes_has_no_number(engine):
    await put(engine, (b"a", b"1"))
    seq = engine.seq
    await engine.transact(lambda tx: tx.get(b"a"))
    assert engine.seq == seq


async def test_barriers_at_the_same_time_all_return(engine):
    async with trio.open_nursery() as nursery:
        for number in range(20):
            await put(engine, (b"k%d" % number, b"v"))
            nursery.start_soon(engine.barrier)
            await trio.lowlevel.checkpoint()
    assert engine.durable_seq == engine.seq


async def test_a_cancelled_barrier_leaves_the_next_one_working(engine):
    with trio.CancelScope() as scope:
        scope.cancel()
        await put(engine, (b"a", b"1"))
        await engine.barrier()
    await engine.barrier()
    assert engine.durable_seq == engine.seq


async def test_run_works_in_the_background_while_the_store_changes(engine):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(engine.run)
        for number in range(400):
            await put(engine, (b"k%03d" % (number % 250), os.urandom(200)), (b"n", b"%d" % number))
            if number % 3 == 0:
                await engine.transact(lambda tx, number=number: tx.delete(b"k%03d" % (number % 90)))
            if number % 40 == 0:
                await engine.barrier()
        expected = await engine.view(everything)
        assert dict(expected)[b"n"] == b"399"
        await engine.barrier()
        assert await engine.view(everything) == expected
        nursery.cancel_scope.cancel()
    assert await engine.view(everything) == expected


@pytest.mark.sweep
async def test_reads_are_right_between_the_lmdb_transactions_of_one_commit(tmp_path):
    """LMDB reuses pages that only snapshots before the newest hold, so nobody may read through such
    a one."""
    engine = LmdbEngine(str(tmp_path))
    expected = {b"k%04d" % number: bytes([number % 256]) * 900 for number in range(300)}
    await put(engine, *expected.items())
    await engine.commit()
    reads_during_commit = 0
    for lap in range(3):
        changed = {b"k%04d" % number: b"%d" % lap * 900 for number in range(lap, 300, 3)}
        expected |= changed
        await put(engine, *changed.items())
        engine.freeze()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(engine.commit)
            while engine.is_committing:
                assert await engine.view(everything) == sorted(expected.items())
                reads_during_commit += 1
                await trio.lowlevel.checkpoint()
        assert await engine.view(everything) == sorted(expected.items())
    assert reads_during_commit > 10
    engine.close()


KEYS = st.integers(0, 40).map(lambda number: b"k%02d" % number)
VALUES = st.binary(max_size=300)
OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), KEYS, VALUES),
        st.tuples(st.just("delete"), KEYS),
        st.tuples(st.just("add"), st.sampled_from([b"count1", b"count2"]), st.integers(-9, 9)),
        st.tuples(st.just("patch"), KEYS, st.integers(0, 9), st.binary(max_size=9)),
        st.tuples(st.just("get"), KEYS),
        st.tuples(st.just("get_loosely"), KEYS),
        st.tuples(st.just("get_many"), st.lists(KEYS, max_size=9)),
        st.tuples(st.just("range"), KEYS, KEYS, st.integers(0, 4)),
    ),
    max_size=8,
)


class ModelTransaction:
    """What a transaction should do, done to a dictionary."""

    def __init__(self, pairs):
        self.pairs = pairs

    def put(self, key, value):
        self.pairs[key] = value

    def delete(self, key):
        self.pairs.pop(key, None)

    def get(self, key):
        return self.pairs.get(key)

    def get_many(self, keys):
        return [self.pairs.get(key) for key in keys]

    def add(self, key, delta):
        new = int.from_bytes(self.pairs.get(key, b""), "little", signed=True) + delta
        self.pairs[key] = new.to_bytes(8, "little", signed=True)

    def patch(self, key, offset, part):
        value = self.pairs.get(key)
        if value is not None and len(value) >= offset + len(part):
            self.pairs[key] = value[:offset] + part + value[offset + len(part) :]

    get_loosely = get

    def range(self, start, end, limit):
        found = sorted(pair for pair in self.pairs.items() if start <= pair[0] < end)
        return found[:limit] if limit else found


def play(tx, operations):
    results = []
    for operation, *args in operations:
        try:
            result = getattr(tx, operation)(*args)
        except ValueError:  # a patch of what is not there changes nothing
            assert operation == "patch"
            continue
        if operation != "patch":
            results.append(list(result) if operation == "range" else result)
    return results


class EngineMachine(RuleBasedStateMachine):
    """Random transactions against a dictionary."""

    def __init__(self):
        super().__init__()
        self.model = {}

    def make(self):
        return MemoryEngine()

    @initialize()
    def open(self):
        self.engine = self.make()

    @rule(operations=OPERATIONS)
    def transact(self, operations):
        expected = play(ModelTransaction(self.model), operations)
        assert trio.run(self.engine.transact, play, operations) == expected

    @rule(operations=OPERATIONS)
    def transact_that_raises(self, operations):
        def function(tx):
            play(tx, operations)
            raise LookupError

        with pytest.raises(LookupError):
            trio.run(self.engine.transact, function)

    @rule(start=KEYS, end=KEYS, limit=st.integers(0, 9))
    def view(self, start, end, limit):
        expected = ModelTransaction(self.model).range(start, end, limit)
        assert trio.run(self.engine.view, everything, start, end, limit) == expected

    @rule()
    def barrier(self):
        trio.run(self.engine.barrier)
        assert self.engine.durable_seq == self.engine.seq

    @invariant()
    def same_content(self):
        if hasattr(self, "engine"):
            assert trio.run(self.engine.view, everything) == sorted(self.model.items())

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.close()


class LmdbMachine(EngineMachine):
    """The same, with changes in the memtable, in the frozen one and in LMDB, and with restarts."""

    def make(self):
        self.patch = pytest.MonkeyPatch()
        shrink(self.patch)
        self.directory = tempfile.mkdtemp(prefix="aifs-kv-", dir="/dev/shm")
        return LmdbEngine(self.directory)

    @precondition(lambda self: not self.engine.is_committing)
    @rule()
    def freeze(self):
        self.engine.freeze()

    @rule()
    def commit(self):
        trio.run(self.engine.commit)
        assert not self.engine.is_committing

    @rule()
    def trim(self):
        self.engine.database.remap()

    @rule()
    def reopen(self):
        self.engine.close()
        self.engine = LmdbEngine(self.directory)
        assert self.engine.recovered == 0

    copies = itertools.count()

    @rule()
    def recover_a_copy(self):
        """A copy of the files is what kill -9 leaves: no commit is running."""
        copy = f"{self.directory}/copy{next(self.copies)}"
        shutil.copytree(self.directory, copy, ignore=shutil.ignore_patterns("copy*"))
        recovered = LmdbEngine(copy)
        try:
            assert trio.run(recovered.view, everything) == sorted(self.model.items())
        finally:
            recovered.close()
            shutil.rmtree(copy)

    def teardown(self):
        super().teardown()
        if hasattr(self, "directory"):
            shutil.rmtree(self.directory)
            self.patch.undo()


TestMemoryMachine = EngineMachine.TestCase
TestMemoryMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestLmdbMachine = LmdbMachine.TestCase
TestLmdbMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
