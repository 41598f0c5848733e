"""Quotas as transaction functions: records, and counters that are the sums of inodes after each
step of whatever order of changes."""

import stat
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import FsError, Unavailable
from aifs.meta import forms, keys, namespace, quotas
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.quotas import FIRST_PROJECT, UNLIMITED, Quota
from aifs.meta.records import INODE, Inode, charge_of, decode_entry, decode_inode
from tests.support.memory_engine import MemoryEngine

U64 = st.integers(0, UNLIMITED)
U32 = st.integers(0, 2**32 - 1)


@given(st.builds(Quota, U64, U64, U64, U32, st.integers(0, 2)))
def test_records_are_what_they_were(quota: Quota) -> None:
    assert quotas.decode_quota(quota.encode()) == quota


def test_the_record_stays_what_it_is() -> None:
    record = Quota(0x0102, 1 << 40, UNLIMITED, FIRST_PROJECT + 9, quotas.SPREADING).encode()
    assert record.hex() == "01010900008002010000000000000000000000010000" + "ff" * 8


@pytest.mark.parametrize("record", [b"", Quota(1).encode()[:-1], b"\2" + Quota(1).encode()[1:]])
def test_damaged_records_are_told(record: bytes) -> None:
    with pytest.raises(Unavailable):
        quotas.decode_quota(record)


@given(st.sampled_from((stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK)), U64, st.integers(0, 2**32 - 1))
def test_what_a_record_charges(kind: int, size: int, project: int) -> None:
    inode = Inode(2, kind | 0o644, 0, 0, 1, 0, size, 0, 1, 2, 3)
    inode.project = project
    assert charge_of(inode.encode()) == (project, size if kind == stat.S_IFREG else 0)
    assert charge_of(inode.encode()[: INODE.size - 1]) == (0, 0)


# --- any order of changes -------------------------------------------------------------------------


def counted(tx: ReadTransaction) -> dict[bytes, int]:
    return {key: tx.counter(key) for key, _ in tx.range(*keys.all_of(b"P")) if tx.counter(key)}


def summed(tx: ReadTransaction) -> dict[bytes, int]:
    """What the counters should be."""
    found = Counter[bytes]()
    for _, record in tx.range(*keys.all_of(b"i")):
        project, size = charge_of(record)
        if project >= FIRST_PROJECT:
            found[keys.used_inodes(project)] += 1
            found[keys.used_bytes(project)] += size
    return {key: count for key, count in found.items() if count}


def spread_all(tx: Transaction) -> None:
    for project, quota in quotas.unfinished(tx):
        pending = [quota.directory]
        while pending:
            ino, done = pending.pop(), quotas.Spread()
            while not done.finished:
                done = quotas.spread_slice(tx, ino, done.after, 2)
                pending += done.directories
        quotas.conclude(tx, project, quota.state)
    quotas.drop_unused(tx)


def require_inherited(tx: ReadTransaction) -> None:
    """All that has had one name alone counts in the quota of its directory, or has one itself."""
    for key, entry in tx.range(*keys.all_of(b"e")):
        parent = namespace.get_inode(tx, keys.entry_numbers(key)[0])
        inode = namespace.get_inode(tx, decode_entry(entry)[0])
        if (
            parent.nlink
            and inode.parent != namespace.SEVERAL
            and quotas.find_own(tx, inode) is None
        ):
            assert inode.project == quotas.inherited(parent), (parent, inode)


def require_above(tx: ReadTransaction) -> None:
    """Each quota knows what it lies in."""
    found, sizes = quotas.read_counted(tx, [ROOT_INO, 10**9])
    assert sizes == {ROOT_INO: 0}
    for project, counted in found.items():
        directory = namespace.get_inode(tx, counted.quota.directory)
        above = 0
        if directory.ino != ROOT_INO and directory.nlink:
            above = quotas.inherited(namespace.get_inode(tx, directory.parent))
            assert counted.quota.above == above, project


class Store:
    """Names are numbers; what an operation cannot do it does not do."""

    def __init__(self) -> None:
        self.engine = MemoryEngine()
        self.last = ROOT_INO

    async def begin(self) -> None:
        root = Inode(ROOT_INO, stat.S_IFDIR | 0o755, 0, 0, 2, 0, 0, 0, 1, 1, 1, parent=ROOT_INO)
        await self.engine.transact(namespace.put_inode, root)

    def fresh(self) -> int:
        self.last += 1
        return self.last

    def apply(self, tx: Transaction, kind: str, one: int, two: int, number: int) -> None:
        inos = [keys.number(key) for key, _ in tx.range(*keys.all_of(b"i"))]
        directories = [ino for ino in inos if namespace.get_inode(tx, ino).is_dir]
        files = [ino for ino in inos if namespace.get_inode(tx, ino).is_file] or [0]
        parent, other = directories[one % len(directories)], directories[two % len(directories)]
        file, name, target = files[one % len(files)], b"%d" % (one % 5), b"%d" % (two % 5)
        if kind in ("file", "directory"):
            mode = (stat.S_IFREG if kind == "file" else stat.S_IFDIR) | 0o755
            new = Inode(self.fresh(), mode, 0, 0, 1, 0, 0, 0, 1, 1, 1)
            namespace.create(tx, parent, name, new)
        elif kind == "write":
            opened = namespace.get_inode(tx, file).but(size=number, data=None)
            forms.put_attributes(tx, opened, False)
        elif kind == "inline":
            forms.put_inline(tx, namespace.get_inode(tx, file), lambda old: bytes(number % 100))
        elif kind == "link":
            namespace.link(tx, file, parent, name, self.fresh(), 1)
        elif kind == "unlink":
            inode = namespace.unlink(tx, parent, name, 1)
            if not inode.nlink and number % 2:
                namespace.remove_orphan(tx, inode.ino, ())
        elif kind == "rmdir":
            namespace.remove_orphan(tx, namespace.rmdir(tx, parent, name, 1).ino, ())
        elif kind == "rename":
            flags = namespace.RENAME_EXCHANGE if number % 3 == 0 else 0
            cookies = self.fresh(), self.fresh()
            namespace.rename(tx, (parent, name), (other, target), flags, cookies, 1, inos)
        elif kind == "set":
            quotas.put(tx, namespace.get_directory(tx, parent), number, None)
        elif kind == "remove":
            quotas.remove(tx, namespace.get_directory(tx, parent))
        elif kind == "spread":
            quotas.spread_slice(tx, parent, 0, number % 3 + 1)
        else:
            spread_all(tx)


KINDS = (
    "file", "directory", "write", "inline", "link", "unlink", "rmdir", "rename",
    "set", "remove", "spread", "finish",
)  # fmt: skip
SMALL = st.integers(0, 40)
STEPS = st.lists(
    st.tuples(st.sampled_from(KINDS), SMALL, SMALL, st.integers(0, 2**40)), min_size=40, max_size=80
)


@pytest.mark.sweep
@given(STEPS)
async def test_counters_are_the_sums_of_inodes(steps: list[tuple[str, int, int, int]]) -> None:
    store = Store()
    await store.begin()
    for step in steps:
        with suppress(FsError):
            await store.engine.transact(store.apply, *step)
        assert await store.engine.view(counted) == await store.engine.view(summed), step
    await store.engine.transact(spread_all)
    assert await store.engine.view(counted) == await store.engine.view(summed)
    await store.engine.view(require_inherited)
    assert not await store.engine.view(quotas.unfinished)
    await store.engine.view(require_above)


def test_ids_of_projects_fit_an_inode() -> None:
    assert decode_inode(2, _file(FIRST_PROJECT + 5).encode()).project == FIRST_PROJECT + 5


def _file(project: int) -> Inode:
    inode = Inode(2, stat.S_IFREG | 0o644, 0, 0, 1, 0, 7, 0, 1, 2, 3)
    inode.project = project
    return inode
