"""Which files share objects, or a chunk list: clones, as transaction functions (see kv.py).

The bytes of a file on the capacity tier have one id, ``oid``. Where several files have them, each
says so in its inode (``Inode.named``: by which number the objects are named, whatever became of the
file that they were made for), and has a record

    C oid ino       empty

which are the references: the objects are garbage with the last of them. A file that shares changes
its bytes nowhere but elsewhere, in the burst tier or in new objects, as one does whose columns
protect each other; giving its old form up it leaves the others. So nothing is counted, and what
moves or mends objects finds all files whose records say where these lie.
"""

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Inode


def users(tx: ReadTransaction, oid: int, limit: int = 0) -> list[int]:
    """The inode numbers of the files that share ``oid``, in order; ``limit`` of them, unless it is
    0. None where it is one file's own.
    """
    return [keys.clone_parts(key)[1] for key, _ in tx.range(*keys.clones(oid), limit)]


def share(tx: Transaction, source: Inode, clone: Inode) -> None:
    """``clone`` has the bytes of ``source`` from now on, which is settled and has a layout. The
    records of both inodes are the caller's to put.
    """
    if not source.named:
        source.named = source.ino
        tx.put(keys.clone(source.oid, source.ino), b"")
    clone.oid, clone.layout, clone.named = source.oid, source.layout, source.named
    tx.put(keys.clone(source.oid, clone.ino), b"")


def leave(tx: Transaction, oid: int, ino: int) -> bool:
    """The file does not share ``oid`` any more; whether others do."""
    tx.delete(keys.clone(oid, ino))
    return bool(users(tx, oid, 1))
