"""Mirrors of burst copies on other hosts, as transaction functions (see kv.py)."""

from collections.abc import Iterable
from typing import NamedTuple

from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import BurstRecord, Copy, Inode, MirrorOf, decode_burst

_SLICE = 256


@grows
def put_mirror(
    tx: Transaction, ino: int, copy: Copy, mirror: Copy, of: MirrorOf
) -> list[int] | None:
    """Give the burst copy that is the file this one mirror; returns the ids of garbage. None: it is
    not the file any more."""
    inode, record = namespace.find_inode(tx, ino), tx.get(keys.burst_copy(copy.id))
    if inode is None or record is None or not inode.in_burst or inode.copy != copy:
        return None
    garbage = namespace.drop_mirror(tx, copy.id)
    tx.put(keys.burst_copy(copy.id), decode_burst(record)._replace(mirror=mirror).encode())
    its = BurstRecord(ino, mirror.server, undrained=False, durable=True, since_ns=0, of=of)
    tx.put(keys.burst_copy(mirror.id), its.encode())
    return garbage


def find_mirror(tx: ReadTransaction, copy_id: int) -> tuple[Copy, MirrorOf] | None:
    """The mirror that a burst copy has, and what that is of; None: it has none."""
    record = tx.get(keys.burst_copy(copy_id))
    mirror = None if record is None else decode_burst(record).mirror
    found = None if mirror is None else tx.get(keys.burst_copy(mirror.id))
    of = None if found is None else decode_burst(found).of
    return None if mirror is None or of is None else (mirror, of)


class Mirrored(NamedTuple):
    """A file with a mirror, and all that says where its bytes are."""

    inode: Inode
    copy: Copy
    mirror: Copy
    of: MirrorOf
    since_ns: int
    """Since when the copy is undrained."""
    mark: bytes | None
    """The file's dirty mark."""


def find_mirrored(
    tx: ReadTransaction, after: int, servers: Iterable[int]
) -> tuple[list[Mirrored], int | None]:
    """Files with copies or mirrors on these burst directories, among the next records of copies
    behind id ``after``; the last id looked at, or None at the end."""
    _, end = keys.all_of(b"b")
    found, last, wanted = [], None, set(servers)
    for key, value in tx.range(keys.burst_copy(after + 1), end, _SLICE):
        last, record = keys.number(key), decode_burst(value)
        if record.mirror is not None and {record.server, record.mirror.server} & wanted:
            mirrored = look_up(tx, record.ino)
            if mirrored is not None:
                found.append(mirrored)
    return found, last


def look_up(tx: ReadTransaction, ino: int) -> Mirrored | None:
    """A file that has a mirror."""
    inode = namespace.find_inode(tx, ino)
    if inode is None or inode.copy is None or not inode.in_burst:
        return None
    found = find_mirror(tx, inode.copy.id)
    if found is None:
        return None
    record = decode_burst(tx.get(keys.burst_copy(inode.copy.id)) or b"")
    mark = tx.get(keys.dirty(ino))
    return Mirrored(inode, inode.copy, *found, record.since_ns, mark)


def take_over(tx: Transaction, seen: Mirrored) -> Inode | None:
    """Make the mirror the file, and its home's copy garbage; returns the inode. None: something has
    changed since it was seen, so the home lives again."""
    now = look_up(tx, seen.inode.ino)
    if now is None or (now.inode.encode(), now[1:]) != (seen.inode.encode(), seen[1:]):
        return None
    mirror, of = seen.mirror, seen.of
    tx.put(
        keys.burst_copy(seen.copy.id),
        BurstRecord(seen.inode.ino, seen.copy.server, True, True, seen.since_ns).encode(),
    )
    namespace.discard_copy(tx, seen.copy)
    inode = seen.inode.but(
        copy=mirror, size=of.size, blocks=(of.size + 511) // 512, mtime_ns=of.mtime_ns
    )
    namespace.put_inode(tx, inode)
    namespace.put_copy(tx, inode.ino, mirror, undrained=True, durable=True, now=seen.since_ns)
    tx.delete(keys.dirty(inode.ino))
    return inode
