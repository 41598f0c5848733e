"""Shared chunks: found by digest, counted by those who name them, as transaction functions (see
kv.py).

A shared chunk lies in one place. ``references`` is the number of extents, of all files, that name
its digest; there is no record with none. Its container counts it as live once. These functions
change ``h`` records alone; what that does to containers is returned to the caller, which counts it
in the same transaction (meta/chunks.py).

Record, little-endian
    u8 format=1, u64 container, u64 offset, u32 stored length, u32 raw length, u8 codec, u64
    references
"""

import struct
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from aifs.core.errors import Stale, Unavailable
from aifs.layout.interleaved import Extent, Location
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Inode

FORMAT = 1

_SHARED = struct.Struct("<BQQIIBQ")
_REFERENCES = struct.Struct("<Q")  # at the end
_PLACE_BYTES = _SHARED.size - _REFERENCES.size


class Shared(NamedTuple):
    """Where a shared chunk lies (``server`` 0: see the containers' table), and its references."""

    place: Location
    references: int

    def encode(self) -> bytes:
        _, container, offset, stored, raw, codec, _ = self.place
        return _SHARED.pack(FORMAT, container, offset, stored, raw, codec, self.references)


def decode_shared(digest: bytes, record: bytes) -> Shared:
    """Raises Unavailable for a damaged record."""
    try:
        version, container, offset, stored, raw, codec, references = _SHARED.unpack(record)
    except struct.error:
        version = references = 0
    if version != FORMAT or not references:
        raise Unavailable("the record of a shared chunk is damaged")
    return Shared(Location(0, container, offset, stored, raw, codec, digest), references)


def find_shared(tx: ReadTransaction, digest: bytes) -> Shared | None:
    record = tx.get(keys.shared(digest))
    return None if record is None else decode_shared(digest, record)


def find_all_shared(tx: ReadTransaction, digests: Iterable[bytes]) -> dict[bytes, Shared]:
    """Shared chunks among these digests, without damaged records, which fsck names."""
    found = {}
    for digest in digests:
        record = tx.get(keys.shared(digest))
        if record is not None:
            try:
                found[digest] = decode_shared(digest, record)
            except Unavailable:
                continue
    return found


def put_shared(tx: Transaction, shared: Shared) -> None:
    tx.put(keys.shared(shared.place.digest), shared.encode())


def take(
    tx: Transaction, extents: Iterable[Extent], new: Collection[bytes]
) -> tuple[list[Location], list[Location]]:
    """Count one more reference for each extent with a shared chunk.

    ``new``: digests of durable chunks appended for this, where the extents say; others were found
    earlier; a recorded place wins. Returns places now alive, and those appended in vain. Raises
    Stale if a found chunk is unknown now.
    """
    counts: dict[bytes, int] = {}
    places: dict[bytes, Location] = {}
    for _, place, is_shared in extents:
        if is_shared and place is not None:
            digest = place.digest
            counts[digest] = counts.get(digest, 0) + 1
            if place.container and digest in new:
                places[digest] = place
    alive, dead = [], []
    for digest, count in counts.items():
        key, place = keys.shared(digest), places.get(digest)
        record = tx.get(key)
        if record is not None:
            tx.put(key, _with_references(record, _references(record) + count))
            if place is not None and not is_same(decode_shared(digest, record).place, place):
                dead.append(place)
        elif place is not None:
            tx.put(key, Shared(place, count).encode())
            alive.append(place)
        else:
            raise Stale("a chunk that was found in the store is not there any more")
    return alive, dead


def release(tx: Transaction, counts: Mapping[bytes, int]) -> list[Location]:
    """Take references away, by digest; returns dead places. Missing records are passed over, fsck
    names them. Raises Unavailable for a damaged one."""
    dead = []
    for digest, count in counts.items():
        key = keys.shared(digest)
        record = tx.get(key)
        if record is None:
            continue
        references = _references(record)
        if references > count:
            tx.put(key, _with_references(record, references - count))
        else:
            tx.delete(key)
            dead.append(decode_shared(digest, record).place)
    return dead


def move(tx: Transaction, old: Location, new: Location) -> bool:
    """Point a copied chunk's record from its old place to the new; whether it did."""
    known = find_shared(tx, old.digest)
    if known is None or not is_same(known.place, old):
        return False
    put_shared(tx, known._replace(place=new))
    return True


def replace(tx: Transaction, place: Location) -> Location | None:
    """Have a chunk lie here for all files; returns its old place, None if no file names it."""
    known = find_shared(tx, place.digest)
    if known is None:
        return None
    put_shared(tx, known._replace(place=place))
    return known.place


# Of records as bytes: there may be very many at once.


def _references(record: bytes) -> int:
    if len(record) != _SHARED.size or record[0] != FORMAT:
        raise Unavailable("the record of a shared chunk is damaged")
    return _REFERENCES.unpack_from(record, _PLACE_BYTES)[0]


def _with_references(record: bytes, references: int) -> bytes:
    return record[:_PLACE_BYTES] + _REFERENCES.pack(references)


def is_same(a: Location, b: Location) -> bool:
    """Whether these are one place."""
    return (a.container, a.offset) == (b.container, b.offset)


# Which files share objects, or a chunk list: clones, as transaction functions (see kv.py).
#
# The bytes of a file on the capacity tier have one id, ``oid``. Where several files have them, each
# says so in its inode (``Inode.named``: by which number the objects are named, whatever became of
# the file that they were made for), and has a record
#
#     C oid ino       empty
#
# which are the references: the objects are garbage with the last of them. A file that shares
# changes its bytes nowhere but elsewhere, in the burst tier or in new objects, as one does whose
# columns protect each other; giving its old form up it leaves the others. So nothing is counted,
# and what moves or mends objects finds all files whose records say where these lie.


def users(tx: ReadTransaction, oid: int, limit: int = 0) -> list[int]:
    """Inodes that share ``oid``, in order, up to ``limit`` unless 0. None: one file's own."""
    return [keys.clone_parts(key)[1] for key, _ in tx.range(*keys.clones(oid), limit)]


def share(tx: Transaction, source: Inode, clone: Inode) -> None:
    """Give ``clone`` the bytes of the settled ``source``, which has a layout. Callers put both
    inodes."""
    if not source.named:
        source.named = source.ino
        tx.put(keys.clone(source.oid, source.ino), b"")
    clone.oid, clone.layout, clone.named = source.oid, source.layout, source.named
    tx.put(keys.clone(source.oid, clone.ino), b"")


def leave(tx: Transaction, oid: int, ino: int) -> bool:
    """The file does not share ``oid`` any more; whether others do."""
    tx.delete(keys.clone(oid, ino))
    return bool(users(tx, oid, 1))
