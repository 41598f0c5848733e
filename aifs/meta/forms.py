"""The form of a regular file, and its dirty mark, as transaction functions (see kv.py).

Which step must come before which is said in docs/metadata.md; the order is ``vfs``'s business.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from aifs.layout.interleaved import Extent
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunk_lists import Chunks
from aifs.meta.degraded import find_degraded, put_degraded
from aifs.meta.extents import put_extents, put_named
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Copy, Garbage, Inode, decode_burst
from aifs.meta.servers import mark_unprotected


def load(tx: ReadTransaction, ino: int) -> tuple[Inode, bool, int]:
    """The inode, whether it has a dirty mark, and the mask of columns that must not be read. Raises
    NotFound.
    """
    inode = namespace.get_inode(tx, ino)
    protected = inode.layout is not None and inode.layout.is_protected
    return (
        inode,
        tx.get(keys.dirty(ino)) is not None,
        find_degraded(tx, inode.oid) if protected else 0,
    )


def put_dirty(tx: Transaction, inode: Inode) -> bool:
    """Record the inode with a dirty mark (I3), without checksums; whether it had some."""
    namespace.put_bytes(tx, inode)
    tx.put(keys.dirty(inode.ino), b"")
    return inode.layout is not None and namespace.drop_checksums(tx, inode.oid)


@grows
def put_garbage(tx: Transaction, oid: int, ino: int, layout: Striped) -> None:
    """Record that there may be objects of ``oid``, which nothing refers to (I8)."""
    tx.put(keys.garbage(oid), Garbage(ino, layout).encode())


@grows
def put_spilled(tx: Transaction, inode: Inode, due: bool) -> None:
    """Record the inode with its first objects, which are unprotected, and garbage no more. ``due``:
    they should not be.
    """
    tx.delete(keys.garbage(inode.oid))
    _put_plain(tx, inode, due)
    put_dirty(tx, inode)


def _put_plain(tx: Transaction, inode: Inode, due: bool) -> None:
    mark_unprotected(tx, inode.layout.servers)
    if due:
        put_degraded(tx, inode.oid, inode.ino, 0)


def put_emptied(tx: Transaction, inode: Inode) -> list[int]:
    """Record the inode without its objects or chunks; the ids of what is garbage now."""
    garbage = namespace.discard_layout(tx, inode)
    tx.delete(keys.dirty(inode.ino))
    namespace.put_bytes(tx, replace(inode, size=0, blocks=0, layout=None))
    return garbage


def put_restriped(tx: Transaction, inode: Inode, oid: int, layout: Striped, due: bool) -> list[int]:
    """The durable objects of ``oid``, which are unprotected, replace what the file had; the ids of
    what is garbage now. ``due``: they should not be."""
    garbage = namespace.discard_layout(tx, inode)
    tx.delete(keys.garbage(oid))
    restriped = replace(inode, oid=oid, layout=layout)
    _put_plain(tx, restriped, due)
    put_dirty(tx, restriped)
    return garbage


@grows
def put_in_burst(tx: Transaction, inode: Inode, copy: Copy, durable: bool, now: int) -> list[int]:
    """Record that ``copy`` holds the newest bytes of the file from now on; the ids of what is
    garbage now.

    The copy holds all that the file holds, durably if ``durable``; without that the file must have
    been empty.
    """
    garbage = namespace.discard_layout(tx, inode)
    moved = replace(inode, layout=None, data=None, copy=copy)
    namespace.put_bytes(tx, moved)
    namespace.put_undrained(tx, moved, durable, now)
    return garbage


@grows
def put_inline(tx: Transaction, inode: Inode, copy: Copy) -> int:
    """Record a tiny file, with its bytes, that gives up its burst copy; the id of what is garbage
    now.
    """
    tx.delete(keys.dirty(inode.ino))
    namespace.put_bytes(tx, inode)
    return namespace.discard_copy(tx, copy)


def put_without_copy(tx: Transaction, ino: int, copy_id: int) -> int:
    """The file gives up its cached copy; the id of what is garbage now, which is the copy's."""
    inode = namespace.get_inode(tx, ino)
    assert inode.copy is not None and inode.copy.id == copy_id and not inode.in_burst
    namespace.discard_copy(tx, inode.copy)
    namespace.put_inode(tx, replace(inode, copy=None))
    return copy_id


def put_durable(tx: Transaction, copy_id: int) -> None:
    """The copy has been synced since it was made, so it cannot vanish in a power cut any more."""
    key = keys.burst_copy(copy_id)
    tx.put(key, decode_burst(tx.get(key) or b"")._replace(durable=True).encode())


def put_changing(tx: Transaction, inode: Inode) -> None:
    """A file in the burst tier that was in order is going to change again: a dirty mark, and what
    it is now.
    """
    namespace.put_bytes(tx, inode)
    record = decode_burst(tx.get(keys.burst_copy(inode.copy.id)) or b"")
    namespace.put_copy(tx, inode.ino, inode.copy, undrained=True, durable=True, now=record.since_ns)
    tx.put(keys.dirty(inode.ino), b"")


def remove_dirty(tx: Transaction, inos: Iterable[int]) -> None:
    for ino in inos:
        tx.delete(keys.dirty(ino))


# --- between the tiers ----------------------------------------------------------------------------


class Drained(NamedTuple):
    """A file as it is from now on, with a copy in the burst tier or without, and the copy that held
    its bytes.

    ``durable``: the copy is on stable storage. ``digests``: those of a striped file. ``chunks``: of
    an interleaved one, or, if that is variable, its ``extents``; neither if they are
    on record as a loose list. ``lacking``: mask of the columns of a protected file that could not
    be written. ``due``: the file should be protected and is not.
    """

    inode: Inode
    copy: Copy
    durable: bool
    digests: bytes = b""
    chunks: Chunks = ()
    lacking: int = 0
    due: bool = False
    extents: Sequence[Extent] = ()


@grows
def put_drained(
    tx: Transaction,
    drained: Sequence[Drained],
    lost: Mapping[int, int] = chunks.NOTHING_LOST,
    new: Collection[bytes] = (),
) -> list[int]:
    """The durable objects or chunks of ``inode.oid``, or inline bytes, are the files now; the ids
    of copies that are garbage now.

    ``lost``: see chunks.put_lost. ``new``: digests of the shared chunks that have been appended for
    these files and are not on record yet; extents that name them have their places. Raises Stale,
    and changes nothing, if a shared chunk that an extent names is neither new nor on record (any
    more).
    """
    lists = {d.inode.oid: d.extents for d in drained if d.inode.lists_extents}
    if lists:
        put_extents(tx, {oid: extents for oid, extents in lists.items() if extents}, new)
        for oid in lists:
            put_named(tx, oid)
    garbage = []
    for inode, copy, durable, digests, placed, lacking, due, _ in drained:
        if inode.objects is not None:
            tx.delete(keys.garbage(inode.oid))
            if not inode.layout.is_protected:
                _put_plain(tx, inode, due)
            elif lacking:
                put_degraded(tx, inode.oid, inode.ino, lacking)
            namespace.put_checksums(tx, inode.oid, digests)
        elif inode.layout is not None and not inode.layout.variable:
            if placed:
                chunks.put_chunks(tx, inode.oid, placed)
            else:
                put_named(tx, inode.oid)
        namespace.put_bytes(tx, inode)
        tx.delete(keys.dirty(inode.ino))
        if inode.copy is None:
            garbage.append(namespace.discard_copy(tx, copy))
        else:
            namespace.put_copy(tx, inode.ino, copy, undrained=False, durable=durable, now=0)
    chunks.put_lost(tx, lost)
    return garbage


def get_checksums(tx: ReadTransaction, oid: int, number: int) -> tuple[int, bytes]:
    """The record of checksums that MiB ``number`` of a file belongs to: number of its first MiB,
    and the checksums from that on; b"" where the file has none."""
    first = number - number % keys.DIGESTS_PER_RECORD
    return first, tx.get(keys.checksums(oid, first)) or b""


@grows
def put_staged(tx: Transaction, inode: Inode) -> None:
    """The file has a clean copy from now on, which was on record as garbage and is not synced."""
    assert inode.copy is not None
    tx.delete(keys.garbage(inode.copy.id))
    namespace.put_bytes(tx, inode)
    namespace.put_copy(tx, inode.ino, inode.copy, undrained=False, durable=False, now=0)


def find_copy_owners(tx: ReadTransaction, copy_ids: Iterable[int]) -> dict[int, int]:
    """Inode numbers of the files that have these copies, by id of the copy."""
    records = {copy_id: tx.get(keys.burst_copy(copy_id)) for copy_id in copy_ids}
    return {
        copy_id: decode_burst(record).ino
        for copy_id, record in records.items()
        if record is not None
    }


def find_places(tx: ReadTransaction, copy_ids: Iterable[int]) -> list[Copy]:
    """Where these copies lie, of those that are on record."""
    records = ((copy_id, tx.get(keys.burst_copy(copy_id))) for copy_id in copy_ids)
    return [
        Copy(decode_burst(record).server, copy_id)
        for copy_id, record in records
        if record is not None
    ]


def put_evicted(tx: Transaction, victims: Mapping[int, int]) -> list[int]:
    """Files (id of the copy to inode number) give up their cached copies, where they have them
    still; the ids of those that are garbage now."""
    garbage = []
    for copy_id, ino in victims.items():
        inode = namespace.find_inode(tx, ino)
        if (
            inode is not None
            and inode.copy is not None
            and inode.copy.id == copy_id
            and not inode.in_burst
        ):
            garbage.append(put_without_copy(tx, ino, copy_id))
    return garbage
