"""The trash: what a directory's rule keeps of removed names, and how a name gets there. How it
comes back, or goes for good, is ``restoring``'s business.

    R ino           u8 format=1, u64 period (ns; 0: what is removed below is gone at once)
    T parent ino    u8 format=1, u8 flags (1: rmdir(2) has removed it), i64 since, i64 until (ns),
                    u32 uid of who removed it, i64 bytes (-1: not known yet), name
    U until ino     u64 parent

Values are little-endian. A *rule* holds for the directory itself and all that lies below, up to the
next directory that has one. Where one holds, the last name of an inode becomes an *entry* (T), with
its turn to go for good (U), and the inode is marked (``TRASHED``). It keeps its bytes, its number,
its parent and its link count, a directory all that lies below; so whatever looks after bytes goes
on with it. For everybody else it has no name.

``until`` is told by the rule of the time of removal. An entry outlives its directory, if that goes
for good before.
"""

import struct
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import TRASHED, Inode, place_of

FORMAT = 1

UNKNOWN = -1
"""Bytes of a tree that nobody has added up yet."""

_RULE = struct.Struct("<BQ")
_ENTRY = struct.Struct("<BBqqIq")
_DEAD = 1
_PARENT = struct.Struct("<Q")


class Entry(NamedTuple):
    """An inode that is in the trash."""

    parent: int
    """The directory that it lay in."""
    ino: int
    """Its inode number."""
    name: bytes
    """Its last name in that directory."""
    since_ns: int
    """When it was removed."""
    until_ns: int
    """When it goes for good."""
    uid: int
    """The user that has removed it."""
    size: int
    """Bytes that it, and all below it, took when it was removed, or UNKNOWN."""
    is_dead: bool
    """Removed by rmdir(2): where programs still are in it, a kernel refuses new names."""

    @property
    def key(self) -> bytes:
        return keys.trashed(self.parent, self.ino)

    def encode(self) -> bytes:
        """The value; the key has the rest."""
        return (
            _ENTRY.pack(
                FORMAT, self.is_dead * _DEAD, self.since_ns, self.until_ns, self.uid, self.size
            )
            + self.name
        )


def decode_entry(key: bytes, record: bytes) -> Entry:
    """Raises Unavailable for a damaged record, as the decoders below do."""
    try:
        version, flags, since_ns, until_ns, uid, size = _ENTRY.unpack_from(record)
    except struct.error:
        raise Unavailable("an entry of the trash is damaged") from None
    _require_format(version)
    parent, ino = keys.entry_numbers(key)
    name = record[_ENTRY.size :]
    return Entry(parent, ino, name, since_ns, until_ns, uid, size, bool(flags & _DEAD))


def encode_rule(period_ns: int) -> bytes:
    return _RULE.pack(FORMAT, period_ns)


def decode_rule(record: bytes) -> int:
    """The period, in ns."""
    try:
        version, period_ns = _RULE.unpack(record)
    except struct.error:
        raise Unavailable("the rule of a directory's trash is damaged") from None
    _require_format(version)
    return int(period_ns)


def _require_format(version: int) -> None:
    if version != FORMAT:
        raise Unavailable(
            f"a record of the trash has format {version}; this version reads {FORMAT}"
        )


def encode_turn(parent: int) -> bytes:
    """The value of a ``U`` record."""
    return _PARENT.pack(parent)


def decode_turn(key: bytes, record: bytes) -> bytes:
    """The key of the entry whose ``U`` record this is."""
    try:
        (parent,) = _PARENT.unpack(record)
    except struct.error:
        raise Unavailable("the turn of an entry of the trash is damaged") from None
    return keys.trashed(parent, keys.entry_numbers(key)[1])


# --- how a name gets there ------------------------------------------------------------------------


class Remover(NamedTuple):
    """The remover of a name, which leaves it to the trash where a rule says so."""

    rules: Mapping[int, int]
    """By directory, for how long (ns) what is removed below is kept; 0: not at all."""
    uid: int
    """Of a user."""

    def period_at(self, tx: ReadTransaction, directory: int) -> int:
        """The period of the nearest rule from this directory up, or 0. Reads a record a
        directory."""
        while (period_ns := self.rules.get(directory)) is None:
            record = tx.get_loosely(keys.inode(directory))
            if directory == keys.ROOT_INO or record is None:
                return 0
            directory = place_of(record).parent
        return period_ns


def put(
    tx: Transaction, inode: Inode, parent: int, name: bytes, now: int, by: Remover, is_dead: bool
) -> bool:
    """Make an entry of an inode that loses its last name, if a rule holds; whether it did. Callers
    record the inode."""
    period_ns = by.period_at(tx, inode.ino if inode.is_dir else parent)
    if not period_ns:
        return False
    size = UNKNOWN if inode.is_dir and not is_dead else inode.space
    add(tx, Entry(parent, inode.ino, name, now, now + period_ns, by.uid, size, is_dead))
    inode.flags |= TRASHED
    inode.parent, inode.ctime_ns = parent, now
    return True


def add(tx: Transaction, entry: Entry) -> None:
    """Record an entry, and count it."""
    tx.put(entry.key, entry.encode())
    tx.put(keys.turn(entry.until_ns, entry.ino), encode_turn(entry.parent))
    tx.add(keys.COUNTER_TRASHED, 1)
    tx.add(keys.COUNTER_TRASHED_BYTES, max(entry.size, 0))


def drop(tx: Transaction, entry: Entry) -> None:
    """The reverse."""
    tx.delete(entry.key)
    tx.delete(keys.turn(entry.until_ns, entry.ino))
    tx.add(keys.COUNTER_TRASHED, -1)
    tx.add(keys.COUNTER_TRASHED_BYTES, -max(entry.size, 0))


# --- rules ----------------------------------------------------------------------------------------


@grows
def put_rule(tx: Transaction, ino: int, period_ns: int | None) -> None:
    """Set the rule of a directory; None: it has none of its own."""
    if period_ns is None:
        tx.delete(keys.trash_rule(ino))
    else:
        tx.put(keys.trash_rule(ino), encode_rule(period_ns))


def read_rules(tx: ReadTransaction) -> dict[int, int]:
    """By directory, the period in ns. Damaged ones are fsck's to name."""
    rules = {}
    for key, value in tx.range(*keys.all_of(b"R")):
        with suppress(Unavailable):
            rules[keys.number(key)] = decode_rule(value)
    return rules
