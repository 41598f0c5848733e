"""Quotas as transaction functions (see kv.py): a directory, and how much may lie below it.

A quota is a limit of a *project*, the number that inodes have for that purpose. The directory and
all below it have the quota's own project, which what is made there inherits; projects from
FIRST_PROJECT on are given to quotas alone, in turn, and never again. How much a project has is
counted in the very transactions that make, change and erase inodes (``replace``): at any instant
the counters are the sums of the records. Quotas may lie within each other: each counts what is its
own, and has to have room for what those within it have, too.

    Q project   u8 format=1, u8 state, u32 above, u64 directory, u64 limit of bytes, u64 limit of
                inodes (2^64 - 1: none); little-endian. state: 0 complete; 1: the project is still
                being given to what lies below; 2: the quota has been removed, and what lies below
                gets the project of what is above. above: the project of what the directory lies in

A regular file is charged its size, whatever its holes and copies in other places. Each inode is
charged as one file, from when it is made until it is erased. docs/design/quotas.md says why.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from aifs.core.errors import Invalid, NoAttribute, Unavailable
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import INHERITS_PROJECT, Inode, charge_of, decode_entry, decode_inode

FORMAT = 1
FIRST_PROJECT = 1 << 31
UNLIMITED = (1 << 64) - 1
COMPLETE, SPREADING, REMOVED = range(3)

_RECORD = struct.Struct("<BBIQQQ")


class Quota(NamedTuple):
    """The record of a quota."""

    directory: int
    """Its inode number."""
    bytes_max: int = UNLIMITED
    """How many the regular files in it may have."""
    inodes_max: int = UNLIMITED
    """How many may be in it, itself included."""
    above: int = 0
    """The project that its directory would have without it: another quota's, or 0."""
    state: int = COMPLETE
    """COMPLETE, SPREADING or REMOVED."""

    def encode(self) -> bytes:
        return _RECORD.pack(FORMAT, self.state, self.above, *self[:3])


def decode_quota(record: bytes) -> Quota:
    """Raises Unavailable for a damaged record."""
    try:
        version, state, above, directory, bytes_max, inodes_max = _RECORD.unpack(record)
    except struct.error:
        raise Unavailable("the record of a quota is damaged") from None
    if version != FORMAT or state > REMOVED:
        raise Unavailable(
            f"the record of a quota has format {version}, state {state}; this version reads format "
            f"{FORMAT}"
        )
    return Quota(directory, bytes_max, inodes_max, above, state)


# --- counting -------------------------------------------------------------------------------------


def replace(tx: Transaction, ino: int, before: bytes | None, after: bytes) -> None:
    """Put an inode's record, which was ``before``, and count what has changed."""
    count(tx, before, after)
    tx.put(keys.inode(ino), after)


def count(tx: Transaction, before: bytes | None, after: bytes | None) -> None:
    """Count what it means to quotas that an inode's record changes; None: it is not there."""
    old_project, old = (0, 0) if before is None else charge_of(before)
    project, new = (0, 0) if after is None else charge_of(after)
    if old_project != project:
        add(tx, old_project, -old, -1)
        add(tx, project, new, 1)
    elif project >= FIRST_PROJECT and old != new:
        tx.add(keys.used_bytes(project), new - old)


def add(tx: Transaction, project: int, bytes_: int, inodes: int) -> None:
    """A project has so much more; nobody counts those that are no quota's."""
    if project >= FIRST_PROJECT:
        tx.add(keys.used_inodes(project), inodes)
        if bytes_:
            tx.add(keys.used_bytes(project), bytes_)


def inherited(directory: Inode) -> int:
    """The project of what is made in a directory."""
    return directory.project if directory.flags & INHERITS_PROJECT else 0


def find_own(tx: ReadTransaction, inode: Inode) -> Quota | None:
    """The quota that a directory has itself."""
    if not inode.is_dir or inode.project < FIRST_PROJECT:
        return None
    record = tx.get(keys.quota(inode.project))
    quota = None if record is None else decode_quota(record)
    return quota if quota is not None and quota.directory == inode.ino else None


def is_left(tx: ReadTransaction, inode: Inode) -> bool:
    """Whether the quota of an inode, or of its own quota, is gone: nobody counts it any more."""
    own = find_own(tx, inode)
    project = inode.project if own is None else own.above
    return project >= FIRST_PROJECT and tx.get(keys.quota(project)) is None


# --- making and removing --------------------------------------------------------------------------
# Each directory gives its project to what is in it, from the top down, in slices: what is made in
# one meanwhile has it already, and nothing comes in from elsewhere (namespace.rename).


def put(tx: Transaction, directory: Inode, bytes_: int | None, inodes: int | None) -> Inode:
    """Limit a directory's tree (None: as before, or unlimited); returns its inode. A new quota has
    to be spread."""
    quota = find_own(tx, directory)
    if quota is None:
        above = directory.project if directory.project >= FIRST_PROJECT else 0
        quota = Quota(directory.ino, above=above, state=SPREADING)
        directory.project = FIRST_PROJECT + tx.counter(keys.COUNTER_QUOTAS)
        directory.flags |= INHERITS_PROJECT
        tx.add(keys.COUNTER_QUOTAS, 1)
        replace(tx, directory.ino, tx.get(keys.inode(directory.ino)), directory.encode())
    if bytes_ is not None:
        quota = quota._replace(bytes_max=bytes_)
    if inodes is not None:
        quota = quota._replace(inodes_max=inodes)
    if quota.bytes_max == quota.inodes_max == UNLIMITED:
        raise Invalid("a quota limits size, files or both: size=1TiB,files=1000000")
    tx.put(keys.quota(directory.project), quota.encode())
    return directory


def remove(tx: Transaction, directory: Inode) -> Inode:
    """Remove a directory's quota; returns its inode, with the project above, to be spread. Raises
    NoAttribute for none."""
    quota = find_own(tx, directory)
    if quota is None:
        raise NoAttribute()
    tx.put(keys.quota(directory.project), quota._replace(state=REMOVED).encode())
    before = directory.encode()
    _give(directory, quota.above)
    replace(tx, directory.ino, before, directory.encode())
    return directory


def _give(inode: Inode, project: int) -> None:
    inode.project = project
    if inode.is_dir:
        inode.flags &= ~INHERITS_PROJECT
        if project:
            inode.flags |= INHERITS_PROJECT


@dataclass(slots=True)
class Spread:
    """The result of a step of giving a directory's project to all that is in it."""

    changed: list[Inode] = field(default_factory=list)
    """As they are now."""
    directories: list[int] = field(default_factory=list)
    """Those that have the project, whose turn comes."""
    after: int = 0
    """The cookie of the last name that has been looked at."""
    finished: bool = False
    """It was the last one."""


def spread_slice(tx: Transaction, ino: int, after: int, limit: int, of: int = 0) -> Spread:
    """Give the directory's project, or none, to up to ``limit`` entries behind cookie ``after``,
    except directories with quotas. ``of``: only to those of this removed project. Raises
    Unavailable for a damaged record."""
    done = Spread(after=after)
    record = tx.get_loosely(keys.inode(ino))
    entries = [] if record is None else list(tx.range(*keys.entries_after(ino, after), limit))
    project = 0 if record is None else inherited(decode_inode(ino, record))
    for key, value in entries:
        done.after = keys.entry_numbers(key)[1]
        _take(tx, decode_entry(value)[0], project, of, done)
    done.finished = len(entries) < limit
    return done


def take_in(tx: Transaction, ino: int, directory: Inode) -> Spread:
    """Give a nameless inode the project of its future directory, unless it has a quota; its tree by
    ``spread_slice``. Raises Unavailable for a damaged record."""
    done = Spread(finished=True)
    _take(tx, ino, inherited(directory), 0, done)
    done.directories = [ino]
    return done


def _take(tx: Transaction, ino: int, project: int, of: int, done: Spread) -> None:
    """Give an inode this project; a quota of its own then lies in that."""
    before = tx.get(keys.inode(ino))
    if before is None:
        return
    inode = decode_inode(ino, before)
    own = find_own(tx, inode)
    if own is not None:
        above = project if project >= FIRST_PROJECT else 0
        if own.above != above:
            tx.put(keys.quota(inode.project), own._replace(above=above).encode())
        return
    has_it = inode.project == project and (not inode.is_dir or inherited(inode) == project)
    if not has_it and of in (0, inode.project):
        _give(inode, project)
        inode.seq = tx.seq
        replace(tx, ino, before, inode.encode())
        done.changed.append(inode)
    if inode.is_dir:
        done.directories.append(ino)


def unfinished(tx: ReadTransaction) -> list[tuple[int, Quota]]:
    """Incomplete quotas by project, oldest first, without damaged records, which fsck names."""
    return [each for each in _all(tx) if each[1].state != COMPLETE]


def conclude(tx: Transaction, project: int, state: int) -> None:
    """The quota, which was in this ``state``, has been spread: it is complete, or is gone."""
    key = keys.quota(project)
    record = tx.get(key)
    quota = None if record is None else decode_quota(record)
    if quota is None or quota.state != state:
        return
    if state == REMOVED:
        tx.delete(key)
    else:
        tx.put(key, quota._replace(state=COMPLETE).encode())


def drop_unused(tx: Transaction) -> None:
    """Drop counters of removed quotas once nothing has their projects: open, trashed or otherwise
    named inodes may."""
    projects = {keys.use_project(key) for key, _ in tx.range(*keys.all_of(b"P"))}
    for project in projects:
        names = keys.used_bytes(project), keys.used_inodes(project)
        if tx.get(keys.quota(project)) is None and not any(map(tx.counter, names)):
            for name in names:
                tx.delete(name)


def drop(tx: Transaction, inode: Inode) -> None:
    """A directory is erased, and its quota with it."""
    if find_own(tx, inode) is not None:
        tx.delete(keys.quota(inode.project))


# --- reading --------------------------------------------------------------------------------------


class Counted(NamedTuple):
    """A quota, and what its project has, without those of quotas within it."""

    quota: Quota
    bytes: int
    inodes: int


def read_counted(
    tx: ReadTransaction, inos: Collection[int]
) -> tuple[dict[int, Counted], Mapping[int, int]]:
    """All quotas that are not removed, by project; and recorded bytes of existing ``inos``."""
    counts = {
        key: int.from_bytes(value, "little", signed=True)
        for key, value in tx.range(*keys.all_of(b"P"))
    }
    found = {
        project: Counted(
            quota,
            counts.get(keys.used_bytes(project), 0),
            counts.get(keys.used_inodes(project), 0),
        )
        for project, quota in _all(tx)
        if quota.state != REMOVED
    }
    records = zip(inos, tx.get_many([keys.inode(ino) for ino in inos]), strict=True)
    return found, {ino: charge_of(record)[1] for ino, record in records if record is not None}


def _all(tx: ReadTransaction) -> Iterator[tuple[int, Quota]]:
    for key, value in tx.range(*keys.all_of(b"Q")):
        with suppress(Unavailable):
            yield keys.number(key), decode_quota(value)
