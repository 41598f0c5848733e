"""fsck under stress: a repair that is killed anywhere is completed by the next; no damage makes it
stumble.
"""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from aifs.core import faults, files
from aifs.core.faults import SimulatedCrash
from aifs.meta import journal, keys
from aifs.meta.journal import AFTER_APPEND
from aifs.meta.kv import Transaction
from tests.support.damaged import DamagedStore

pytestmark = pytest.mark.sweep

CRASHES = 20
RANDOM_STORES = 30


@pytest.fixture
def new_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], DamagedStore]]:
    monkeypatch.setattr(journal, "SEGMENT_BYTES", 256 << 10)
    with tempfile.TemporaryDirectory(prefix="aifs-fsck-", dir="/dev/shm") as directory:
        template = DamagedStore(Path(directory, "template"))
        stores = 0

        def make() -> DamagedStore:
            nonlocal stores
            stores += 1
            shutil.rmtree(Path(directory, str(stores - 1)), ignore_errors=True)
            return template.copied_to(Path(directory, str(stores)))

        yield make
    faults.disarm_all()
    files.set_hook(None)


# --- crashes --------------------------------------------------------------------------------------


class Crash:
    """Crashes when something happens for the ``occurrence``-th time; ``happened``: it came to
    that."""

    def __init__(self, occurrence: int) -> None:
        self._left = occurrence
        self.happened = False

    def step(self) -> None:
        self._left -= 1
        if self._left == 0:
            self.happened = True
            raise SimulatedCrash

    # A files.Hook: every change of a data server's names is a step.

    def before(self, op: str, path: str) -> None:
        if op in ("rename", "make_dir", "sync_dir") and "/data/" in path:
            self.step()

    def after(self, op: str, path: str, *args: object) -> None:
        pass


def _damage(store: DamagedStore) -> None:
    """Something of everything that takes several steps to mend."""
    store.remove_name("/a")
    store.remove_name("/inline")
    store.delete(keys.inode(store.ino["/z"]), store.entry_key("/link"))
    store.change("/a/striped", nlink=9)
    store.put(keys.COUNTER_IDS, (3).to_bytes(8, "little"))
    store.put(keys.orphan(store.ino["/fifo"]), b"")
    store.put(keys.dirty(store.ino["/a/rewritten"]), b"")
    store.copy("/fast/cached").unlink()
    store.copy("/fast/tiny").write_bytes(b"")
    store.put(keys.burst_copy(store.inode("/fast/new").copy.id), b"?")
    store.put(keys.checksums(4000, 0), b"")


def _lose_objects(store: DamagedStore) -> None:
    """Objects that belong to nobody, beyond the last window of ids, where recovery does not
    look."""
    for number, root in enumerate(store.config.servers):
        directory = Path(root, "objects/f/00")
        directory.mkdir(parents=True)
        for oid in (0xF0000, 0xF0001):
            (directory / f"{oid:016x}.f0f").write_bytes(b"whose? %d" % number)


def _tree_after_repair(store: DamagedStore) -> dict[str, int]:
    assert store.check(repair=True).ok
    assert store.check().findings == []
    tree = store.tree()
    del tree["/lost+found"]  # its number depends on how often it was begun
    return tree


def _crash_repair(store: DamagedStore, crash: Crash) -> None:
    try:
        store.check(repair=True)
    except BaseException:
        if not crash.happened:  # else it is a SimulatedCrash, perhaps in a group
            raise
    faults.disarm_all()
    files.set_hook(None)


def test_a_repair_that_crashes_at_any_transaction_is_completed_by_the_next(
    new_store: Callable[[], DamagedStore],
) -> None:
    undisturbed = new_store()
    _damage(undisturbed)
    expected = _tree_after_repair(undisturbed)
    assert f"/lost+found/#{undisturbed.ino['/a']}/b/c" in expected
    crashes = 0
    while crashes < CRASHES:
        store = new_store()
        _damage(store)
        crash = Crash(crashes + 1)
        faults.arm(AFTER_APPEND, crash.step)
        _crash_repair(store, crash)
        assert _tree_after_repair(store) == expected
        if not crash.happened:
            break
        crashes += 1
    assert 8 < crashes < CRASHES


def test_a_repair_that_crashes_while_it_moves_objects_loses_none(
    new_store: Callable[[], DamagedStore],
) -> None:
    crashes = 0
    while crashes < 2 * CRASHES:
        store = new_store()
        _lose_objects(store)
        crash = Crash(crashes + 1)
        files.set_hook(crash)
        _crash_repair(store, crash)
        assert store.check(repair=True).ok
        assert store.check().findings == []
        for number, root in enumerate(store.config.servers):
            moved = sorted(Path(root, "lost+found").iterdir())
            assert [path.read_bytes() for path in moved] == [b"whose? %d" % number] * 2
        if not crash.happened:
            break
        crashes += 1
    assert 8 < crashes < 2 * CRASHES


# --- any damage -----------------------------------------------------------------------------------


def _random_damage(rng: random.Random, tx: Transaction) -> None:
    """Remove, change, double or exchange a few records; identity and server table stay: the store
    opens."""
    records = [(key, value) for key, value in tx.range(b"T", b"\xff") if key[:1] != b"s"]
    for _ in range(rng.randint(1, 4)):
        key, value = rng.choice(records)
        other_key, other_value = rng.choice([pair for pair in records if pair[0][:1] == key[:1]])
        match rng.randrange(7):
            case 0:
                tx.delete(key)
            case 1:
                tx.put(key, other_value)
            case 2:
                tx.put(other_key, value)
                tx.put(key, other_value)
            case 3:
                tx.put(key, _flip(rng, value))
            case 4:
                changed = _flip(rng, key)
                if changed[:1] not in (b"S", b"s"):
                    tx.put(changed, value)
            case 5:
                tx.put(key, value[: rng.randrange(len(value) + 1)])
            case 6:
                kind = rng.choice(b"abdgklotw")
                tx.put(bytes((kind,)) + rng.choice(records)[0][1:9], rng.choice((b"", value)))


def _flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    if changed:
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _inodes(store: DamagedStore) -> set[int]:
    return {keys.number(key) for key in store.records() if key[:1] == b"i" and len(key) == 9}


def _damage_and_repair(store: DamagedStore, seed: int) -> bool:
    """Whether all was mended. Damage of names and attributes must not cost a single inode, then."""
    store.transact(lambda tx: _random_damage(random.Random(seed), tx))
    checked = store.check()
    inodes = _inodes(store)
    first = store.check(repair=True)
    assert bool(checked.findings) == bool(first.findings)
    stays = sorted(item.kind for item in first.findings if not item.repaired)
    second = store.check(repair=True)
    assert [item for item in second.findings if item.repaired] == []
    assert sorted(item.kind for item in second.findings) == stays
    if stays:
        return False
    reachable = {keys.ROOT_INO, *store.tree().values()}
    assert inodes <= reachable == _inodes(store)
    assert store.check().findings == []
    return True


def test_after_any_damage_a_second_repair_finds_nothing_to_mend(
    new_store: Callable[[], DamagedStore],
) -> None:
    mended = sum(_damage_and_repair(new_store(), seed) for seed in range(RANDOM_STORES))
    assert mended > RANDOM_STORES // 3


@pytest.mark.long
def test_after_much_damage_a_second_repair_finds_nothing_to_mend(
    new_store: Callable[[], DamagedStore],
) -> None:
    for seed in range(RANDOM_STORES, RANDOM_STORES + 2000):
        _damage_and_repair(new_store(), seed)
