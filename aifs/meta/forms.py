"""The form of a regular file, and its dirty mark, as transaction functions (see kv.py).

Which step must come before which is said in docs/metadata.md; the order is ``vfs``'s business.
"""

from collections.abc import Iterable
from dataclasses import replace

from aifs.layout.striped import Striped
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Garbage, Inode


def load(tx: ReadTransaction, ino: int) -> tuple[Inode, bool]:
    """The inode, and whether it has a dirty mark. Raises NotFound."""
    return namespace.get_inode(tx, ino), tx.get(keys.dirty(ino)) is not None


def put_dirty(tx: Transaction, inode: Inode) -> None:
    """Record the inode with a dirty mark (I3)."""
    namespace.put_inode(tx, inode)
    tx.put(keys.dirty(inode.ino), b"")


@grows
def put_garbage(tx: Transaction, oid: int, ino: int, layout: Striped) -> None:
    """Record that there may be objects of ``oid``, which nothing refers to (I8)."""
    tx.put(keys.garbage(oid), Garbage(ino, layout).encode())


@grows
def put_spilled(tx: Transaction, inode: Inode) -> None:
    """Record the inode with its first objects, which are garbage no more."""
    tx.delete(keys.garbage(inode.oid))
    put_dirty(tx, inode)


def put_emptied(tx: Transaction, inode: Inode) -> None:
    """Record the inode without its objects, which become garbage."""
    namespace.discard_objects(tx, inode)
    namespace.put_inode(tx, replace(inode, size=0, blocks=0, layout=None))


def remove_dirty(tx: Transaction, inos: Iterable[int]) -> None:
    for ino in inos:
        tx.delete(keys.dirty(ino))
