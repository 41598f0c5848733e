"""Which records a directory's *delegation* covers, in a store of many hosts:
docs/design/replicated.md (Delegations).

``D ino`` names the session that has the directory; no other host changes what it covers:

    d, e parent ...     the directory ``parent``
    i ino               of a directory that directory itself; of a file that has had one name only
                        the directory of that name
    w, x, o ino ...     what covers ``i ino``
    b id                what covers ``i ino`` of the file whose copy it is

All else is covered by none.
"""

import struct
from collections import Counter
from typing import NamedTuple

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction
from aifs.meta.memtable import LeveledTransaction, LeveledView
from aifs.meta.recording import Recording
from aifs.meta.records import place_of

_DELEGATE = struct.Struct(">QH")
DELEGATE_BYTES = _DELEGATE.size
_NAMES, _OF_INODE = b"de", b"wxo"
_INODE, _COPY = b"ib"


class Delegate(NamedTuple):
    """The host that has a directory: its record's session (u64) and host (u16), big-endian."""

    session: int
    host: int

    def encode(self) -> bytes:
        return _DELEGATE.pack(*self)


def decode_delegate(record: bytes) -> Delegate:
    return Delegate._make(_DELEGATE.unpack(record))


def count(tx: ReadTransaction) -> Counter[int]:
    """How many directories are delegated to each session."""
    return Counter(decode_delegate(record).session for _, record in tx.range(b"D", b"E"))


class Covered(NamedTuple):
    """Delegations, by record key, that cover the transaction's accesses since its mark."""

    delegations: set[bytes]
    is_all: bool
    """Whether all is covered that it has touched, but for what it has added to."""
    made: list[bytes]
    """Those of directories that it has made."""
    ended: list[bytes]
    """Those of directories that it has removed."""


def find_covered(tx: Recording, loosely: bool) -> Covered:
    """``loosely``: of what was only read loosely, too."""
    found: set[bytes] = set()
    made: list[bytes] = []
    ended: list[bytes] = []
    is_all = True
    relative, writes, changed = tx.relative, tx.writes, tx.changed
    touched = tx.reads.union(changed)
    if loosely:
        touched |= tx.loose
    for key in touched:
        kind = key[0]
        if kind in _NAMES:
            found.add(b"D" + key[1:9])
        elif kind == _INODE:
            before, after = LeveledView.get(tx, key), writes.get(key)
            covers = [_cover(key, record) for record in (before, after) if record is not None]
            if key not in tx.reads:
                tx.loose.add(key)
            found.update(covers)
            own = b"D" + key[1:]
            if own in covers and key in changed:
                is_there = after is not None and place_of(after).nlink > 0
                if before is None and is_there:
                    made.append(own)
                elif not is_there:
                    ended.append(own)
            is_all = is_all and bool(covers)
        elif kind in _OF_INODE:
            found.add(_cover_of_inode(tx, key[1:9]))
        elif kind == _COPY:
            record = writes.get(key) or LeveledView.get(tx, key)
            if record is None:
                is_all = False
                continue
            if key not in tx.reads:
                tx.loose.add(key)
            found.add(_cover_of_inode(tx, record[7::-1]))
        elif not isinstance(relative.get(key), int) or key in tx.reads:
            is_all = False
    for start, end in tx.ranges:
        if start[0] in _NAMES and (end[:9] == start[:9] or end == _behind(start)):
            found.add(b"D" + start[1:9])
        elif start[0] in _OF_INODE and (end[:9] == start[:9] or end == _behind(start)):
            found.add(_cover_of_inode(tx, start[1:9]))
        else:
            is_all = False
    if b"" in found:
        found.discard(b"")
        is_all = False
    return Covered(found, is_all, made, ended)


def _behind(start: bytes) -> bytes:
    return start[:1] + (int.from_bytes(start[1:9], "big") + 1).to_bytes(9, "big")[1:]


def _cover_of_inode(tx: Recording, number: bytes) -> bytes:
    """The delegation of an inode, read so that its place cannot change unseen; b"" for none."""
    key = b"i" + number
    record = LeveledTransaction.get(tx, key) or LeveledView.get(tx, key)
    if key not in tx.reads:
        tx.loose.add(key)
    return b"" if record is None else _cover(key, record)


def _cover(key: bytes, record: bytes) -> bytes:
    place = place_of(record)
    if place.is_dir:
        return b"D" + key[1:]
    return keys.delegation(place.parent) if place.parent else b""
