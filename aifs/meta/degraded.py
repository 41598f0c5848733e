"""Columns that must not be read (``q`` records), as transaction functions (see kv.py)."""

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Degraded, decode_degraded


def find_unread(tx: ReadTransaction, oid: int) -> int:
    """The mask of columns that must not be read. Raises Unavailable for a damaged record."""
    record = tx.get(keys.degraded(oid))
    return 0 if record is None else decode_degraded(record).unread


@grows
def put_unread(tx: Transaction, oid: int, ino: int, mask: int) -> None:
    """Add columns that must not be read; mask 0: see Degraded."""
    tx.put(keys.degraded(oid), Degraded(ino, mask | find_unread(tx, oid)).encode())


def note_repair(tx: Transaction, oid: int) -> None:
    """Note that wrong bytes of protected objects were repaired in place (moves.begin_repair), so
    that other hosts drop what they keep of them; absent hosts notice by the counter."""
    tx.add(keys.COUNTER_REPAIRS, 1)
    record = tx.get(keys.degraded(oid))
    if record is not None and decode_degraded(record).unread:
        tx.put(keys.degraded(oid), record)
    else:
        tx.delete(keys.degraded(oid))  # the change set names it, also if there is none


def state_of_blocks(tx: ReadTransaction, is_checked: bool) -> int:
    """A number that changes when blocks kept by a host become invalid: bytes were found wrong, or
    ``is_checked`` (reads are compared with checksums) has changed."""
    return 2 * tx.counter(keys.COUNTER_REPAIRS) + is_checked


def drop_degraded(tx: Transaction, oid: int) -> None:
    """The objects are about to go, or are whole."""
    if tx.get(keys.degraded(oid)) is not None:
        tx.delete(keys.degraded(oid))


def any_degraded(tx: ReadTransaction) -> bool:
    """Whether something is due of any objects."""
    return any(True for _ in tx.range(*keys.all_of(b"q"), 1))


def is_marked(tx: ReadTransaction, oid: int) -> bool:
    """Whether something is due of these objects: columns, or, of a plain file, its protection."""
    return tx.get(keys.degraded(oid)) is not None
