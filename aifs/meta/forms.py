"""The form of a regular file, and its dirty mark, as transaction functions (see kv.py).

Each function reads the record and replaces what it owns, so that what others have changed
meanwhile stays. Which step must come before which is the business of files/transitions.py.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aifs.core.errors import Stale, Unavailable
from aifs.layout.interleaved import Extent
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace, quotas
from aifs.meta.degraded import find_unread, put_unread
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import (
    Copy,
    Garbage,
    Inode,
    decode_burst,
    decode_inode,
    with_attributes,
    with_data,
)
from aifs.meta.servers import mark_unprotected

_ALL = 1 << 62  # bytes of a file, and more


def load(tx: ReadTransaction, ino: int) -> tuple[Inode, int | None, int]:
    """The inode; the other host of its dirty mark (0: this host, None: no mark); the mask of
    columns not to read. Raises NotFound."""
    inode = namespace.get_inode(tx, ino)
    protected = inode.layout is not None and inode.layout.is_protected
    mark = tx.get(keys.dirty(ino))
    changer = None if mark is None else keys.host_of(mark)
    return (
        inode,
        0 if changer == tx.host else changer,
        find_unread(tx, inode.oid) if protected else 0,
    )


def find_burst_files(tx: ReadTransaction, inos: Iterable[int]) -> dict[int, Copy]:
    """By inode number, the copies of those of these files that lie in the burst tier alone."""
    found = {}
    for ino in inos:
        inode = namespace.find_inode(tx, ino)
        if inode is not None and inode.nlink and inode.in_burst and inode.copy is not None:
            found[ino] = inode.copy
    return found


def put_attributes(tx: Transaction, opened: Inode, stripped: bool) -> None:
    """Record what core knows better of an open file (see namespace.take_attributes), except inline
    bytes, unless it has been erased while it was being opened. ``stripped``: a write has taken
    setuid and setgid."""
    record = _find_record(tx, opened, stripped)
    if (
        record is not None
        and tx.host
        and not namespace.has_form_of(decode_inode(opened.ino, record), opened)
    ):
        put_access_times(tx, {opened.ino: opened.atime_ns})
    elif record is not None:
        changed = with_attributes(record, opened, opened.size, opened.blocks)
        quotas.replace(tx, opened.ino, record, changed)


def put_size(tx: Transaction, opened: Inode, size: int) -> None:
    """As ``put_attributes``, of a file that has at least this size."""
    record = _find_record(tx, opened)
    if record is not None:
        changed = with_attributes(record, opened, max(size, opened.size), opened.blocks)
        quotas.replace(tx, opened.ino, record, changed)


def put_inline(
    tx: Transaction, opened: Inode, change: Callable[[bytes], bytes]
) -> tuple[bytes, int]:
    """``put_attributes`` of an empty or inline file whose bytes ``change`` replaces. Returns these,
    and their blocks. Raises ChangedElsewhere."""
    data, record = change(opened.data or b""), _find_record(tx, opened)
    if record is not None and tx.host:
        _require_before(tx, stored := decode_inode(opened.ino, record), opened)
        _discard_cache(tx, stored, opened)
    # Never 0 blocks for a file with bytes: archivers take that for a file that is one hole.
    blocks = (len(data) + 511) // 512
    if record is not None:
        changed = with_attributes(record, opened, len(data), blocks)
        quotas.replace(tx, opened.ino, record, with_data(changed, data))
    return data, blocks


def _find_record(tx: Transaction, opened: Inode, stripped: bool = False) -> bytes | None:
    """The record of an open file, or None; ``stripped``: without setuid and setgid."""
    record = tx.get(keys.inode(opened.ino))
    if record is None or not (stripped or opened.stripped):
        return record
    inode = decode_inode(opened.ino, record)
    inode.mode = inode.unprivileged_mode
    return inode.encode()


def change_attributes(
    tx: Transaction,
    ino: int,
    change: Callable[[Inode, Any], None],
    argument: Any,
    opened: Inode | None = None,
) -> Inode:
    """Apply ``change(inode, argument)``, which may raise, to a record and to what core knows better
    if ``opened``. Returns the recorded inode. Raises NotFound."""
    inode = namespace.get_inode(tx, ino)
    if opened is not None:
        namespace.take_attributes(inode, opened)
    change(inode, argument)
    namespace.put_inode(tx, inode)
    return inode


def put_access_times(tx: Transaction, times: Mapping[int, int]) -> None:
    """Record when these inodes were accessed last, in ns by their numbers; some may be gone."""
    for ino, accessed_ns in times.items():
        record = tx.get(keys.inode(ino))
        if record is not None:
            inode = decode_inode(ino, record)
            inode.atime_ns = max(inode.atime_ns, accessed_ns)
            namespace.put_inode(tx, inode)


@grows
def put_garbage(tx: Transaction, garbage: Iterable[tuple[int, int, Striped]]) -> None:
    """Record objects (inode number, oid, layout) that may exist unreferenced (I8)."""
    for ino, oid, layout in garbage:
        tx.put(keys.garbage(oid), Garbage(ino, layout, tx.host).encode())


# --- marks ----------------------------------------------------------------------------------------


def put_mark(tx: Transaction, inode: Inode) -> bool:
    """Record a file as it is, and that its bytes may change without notice from now on (I3).
    Whether it had checksums, now dropped. Raises ChangedElsewhere."""
    if tx.host:
        stored = namespace.get_inode(tx, inode.ino)
        _require_before(tx, stored, inode)
        _discard_cache(tx, stored, inode)
    stored = namespace.put_bytes(tx, inode)
    namespace.put_mark(tx, inode.ino)
    if inode.copy is not None and inode.in_burst:  # it was in order, so the copy has been synced
        _put_burst(tx, stored.ino, inode.copy, durable=True, now=0)
    return inode.layout is not None and namespace.drop_checksums(tx, inode.oid)


def remove_marks(tx: Transaction, inos: Iterable[int]) -> None:
    """The bytes of these files are on stable storage, and nobody changes them."""
    for ino in inos:
        tx.delete(keys.dirty(ino))


def put_durable(tx: Transaction, copy_id: int) -> None:
    """The copy has been synced since it was made, so it cannot vanish in a power cut any more."""
    record = tx.get(keys.burst_copy(copy_id))
    if record is not None:
        tx.put(keys.burst_copy(copy_id), decode_burst(record)._replace(durable=True).encode())


# --- changes of form ------------------------------------------------------------------------------


class FormChange(NamedTuple):
    """A file as it is from now on. Whatever its new form refers to is durable."""

    inode: Inode
    """Of it counts what ``namespace.take_bytes`` takes."""
    marked: bool = False
    """Whether its bytes may change without notice."""
    durable: bool = False
    """Whether its burst copy, if it has one, is on stable storage."""
    digests: bytes = b""
    """Checksums of new objects (see namespace.put_checksums)."""
    extents: Sequence[Extent] = ()
    """Of an interleaved file; () if they are on record as a loose list."""
    unread: int = 0
    """Mask of the columns of a protected file that could not be written."""
    due: bool = False
    """The file should be protected and is not."""
    before: Inode | None = None
    """The file as core has it; None with one host, where core is right."""


class ChangedElsewhere(Stale):
    """Another host has changed what bytes a file has, which is on record here."""


def _require_before(tx: Transaction, stored: Inode, before: Inode | None) -> None:
    """Raises ChangedElsewhere if core has another state of the file. A clean copy on another host
    does not count: it goes with the next change of form."""
    if before is None:
        return
    mark = tx.get(keys.dirty(stored.ino))
    as_before = (stored.oid, stored.layout, stored.data) == (before.oid, before.layout, before.data)
    as_before = as_before and (stored.named != 0) == (before.named != 0)
    if before.copy is not None or stored.in_burst:
        as_before = as_before and stored.copy == before.copy
    if not as_before or (mark is not None and keys.host_of(mark) != tx.host):
        raise ChangedElsewhere(f"inode {stored.ino} has been changed by another host")


def _discard_cache(tx: Transaction, stored: Inode, opened: Inode) -> None:
    """Drop a clean copy on another host before the bytes change."""
    if stored.copy is not None and stored.copy != opened.copy:
        namespace.discard_copy(tx, stored.copy)


def change_forms(
    tx: Transaction,
    changes: Sequence[FormChange],
    lost: Mapping[int, int] = chunks.NOTHING_LOST,
    new: Collection[bytes] = (),
    now: int = 0,
) -> list[int]:
    """Give files new forms. Returns ids of garbage, all that they have no more; new parts are no
    longer garbage.

    ``lost``: see chunks.put_lost. ``new``: digests of shared chunks appended for these files, not
    yet on record; extents that name them have places. ``now``: from when on a copy is undrained.

    Raises NotFound for an erased file; Stale if an extent's shared chunk is neither new nor on
    record; ChangedElsewhere. Nothing is changed then.
    """
    if lists := {c.inode.oid: c.extents for c in changes if c.extents}:
        chunks.put_lists(tx, lists, new)
    garbage: list[int] = []
    for change in changes:
        stored = namespace.get_inode(tx, change.inode.ino)
        _require_before(tx, stored, change.before)
        garbage += _give_up(tx, stored, change.inode)
        if change.inode.layout is not None and (change.inode.oid, change.inode.layout) != (
            stored.oid,
            stored.layout,
        ):
            _put_placed(tx, change)
        had, was_in_burst = stored.copy, stored.in_burst
        namespace.take_bytes(stored, change.inode)
        namespace.put_inode(tx, stored)
        copy = stored.copy
        if copy is not None and stored.in_burst:
            _put_burst(tx, stored.ino, copy, change.durable, now)
        elif copy is not None and (was_in_burst or had != copy):
            if had != copy:
                tx.delete(keys.garbage(copy.id))
            elif tx.host:
                namespace.drop_mirror(tx, copy.id)
            namespace.put_copy(tx, stored.ino, copy, undrained=False, durable=change.durable, now=0)
        if change.marked:
            namespace.put_mark(tx, stored.ino)
        else:
            tx.delete(keys.dirty(stored.ino))
    chunks.put_lost(tx, lost)
    return garbage


@grows
def grow_forms(tx: Transaction, *args: Any) -> list[int]:
    """As ``change_forms``, where the records may get larger."""
    return change_forms(tx, *args)


def _give_up(tx: Transaction, stored: Inode, after: Inode) -> list[int]:
    garbage: list[int] = []
    if stored.layout is not None and (after.layout is None or after.oid != stored.oid):
        garbage += namespace.discard_layout(tx, stored)
    if stored.copy is not None and stored.copy != after.copy:
        garbage.append(namespace.discard_copy(tx, stored.copy))
    return garbage


def _put_placed(tx: Transaction, change: FormChange) -> None:
    inode, objects = change.inode, change.inode.objects
    if objects is not None:
        tx.delete(keys.garbage(inode.oid))
        if not objects.is_protected:
            mark_unprotected(tx, objects.servers)
        if change.unread or change.due:
            put_unread(tx, inode.oid, inode.ino, change.unread)
        namespace.put_checksums(tx, inode.oid, change.digests)
    elif not change.extents:
        chunks.put_named(tx, inode.oid)


def _put_burst(tx: Transaction, ino: int, copy: Copy, durable: bool, now: int) -> None:
    """Make the copy the file; its age and durability on record stay."""
    found = tx.get(keys.burst_copy(copy.id))
    since_ns, mirror = now, None
    if found is not None and (record := decode_burst(found)).undrained:
        since_ns, durable, mirror = record.since_ns, durable or record.durable, record.mirror
    namespace.put_copy(tx, ino, copy, undrained=True, durable=durable, now=since_ns, mirror=mirror)


def put_without_copy(tx: Transaction, ino: int, copy_id: int) -> int:
    """Take its cached copy from a closed file; returns the id of the garbage, the copy's."""
    inode = namespace.get_inode(tx, ino)
    assert inode.copy is not None and inode.copy.id == copy_id and not inode.in_burst
    namespace.discard_copy(tx, inode.copy)
    namespace.put_inode(tx, inode.but(copy=None))
    return copy_id


def put_evicted(tx: Transaction, victims: Mapping[int, int]) -> list[int]:
    """Take cached copies (inode number by id) from closed files that have them still; returns the
    ids."""
    garbage = []
    for copy_id, ino in victims.items():
        inode = namespace.find_inode(tx, ino)
        if inode is not None and not inode.in_burst and inode.copy and inode.copy.id == copy_id:
            garbage.append(put_without_copy(tx, ino, copy_id))
    return garbage


# --- what is on record ----------------------------------------------------------------------------


def get_checksums(tx: ReadTransaction, oid: int, number: int) -> tuple[int, bytes]:
    """The checksum record of MiB ``number``: its first MiB, and the checksums; b"" for none."""
    first = number - number % keys.DIGESTS_PER_RECORD
    return first, tx.get(keys.checksums(oid, first)) or b""


def find_standing(tx: ReadTransaction, ids: Sequence[int]) -> dict[int, int]:
    """Object sets and containers among these whose bytes never change, and up to which byte: a
    container to its length, a sealed one wholly; an object set while it has its first checksums,
    which a change in place drops (``put_mark``); what is imported, as its number is its inode's.
    None with wrong columns."""
    first = tx.get_many([keys.checksums(oid, 0) for oid in ids])
    found = {oid: _ALL for oid, record in zip(ids, first, strict=True) if record}
    for oid in ids:
        if oid not in found:
            with suppress(Unavailable):  # fsck names it
                inode = namespace.find_inode(tx, oid)
                if inode is not None and inode.oid == oid and inode.layout and inode.layout.pin:
                    found[oid] = _ALL
                elif (container := chunks.find_container(tx, oid)) is not None:
                    found[oid] = _ALL if chunks.is_sealed(tx, oid) else container.length
    degraded = tx.get_many([keys.degraded(oid) for oid in found])
    return {
        oid: end if record is None else 0
        for (oid, end), record in zip(found.items(), degraded, strict=True)
    }


def describe_objects(tx: ReadTransaction, oid: int) -> tuple[int, bytes]:
    """Facts to read all of a file's objects: the mask of columns not to read, and all checksums;
    b"" for none."""
    records: list[bytes] = []
    whole = keys.DIGESTS_PER_RECORD * keys.DIGEST_BYTES
    while not records or len(records[-1]) == whole:
        record = tx.get(keys.checksums(oid, len(records) * keys.DIGESTS_PER_RECORD))
        if not record:
            break
        records.append(record)
    return find_unread(tx, oid), b"".join(records)


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
