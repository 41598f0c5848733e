"""/lost+found, for root alone: inodes that have lost their names, and lists of files that have lost
their bytes.
"""

import os
import stat
from collections.abc import Iterable

from aifs.core import clock
from aifs.meta import keys, namespace
from aifs.meta.kv import Transaction
from aifs.meta.records import Inode
from aifs.store.ids import take_ids

NAME = b"lost+found"

_LIST_BYTES = 48 << 10


def fresh_id(tx: Transaction) -> int:
    # The counter is beyond all ids that were handed out.
    return take_ids(tx, 1) - 1


def lost_and_found(tx: Transaction, now_ns: int) -> Inode:
    """The directory, which is made if it is missing."""
    name, suffix = NAME, 0
    while tx.get(keys.dentry(keys.ROOT_INO, name)) is not None:
        inode = namespace.lookup(tx, keys.ROOT_INO, name)
        if inode.is_dir:
            return inode
        suffix += 1
        name = b"%s.%d" % (NAME, suffix)
    new = _new(fresh_id(tx), stat.S_IFDIR | 0o700, 2, now_ns)
    return namespace.create(tx, keys.ROOT_INO, name, new)


def put_list(tx: Transaction, title: str, paths: Iterable[str], count: int) -> str:
    """List files in a file of /lost+found, a new one unless the same was listed before; its path.
    ``paths``: of the first ones of ``count`` files, as many as have room.
    """
    now_ns = clock.kernel_ns()
    text, listed = bytearray(), 0
    for path in paths:
        line = path.encode("utf-8", "surrogateescape").replace(b"\n", rb"\n") + b"\n"
        if len(text) + len(line) > _LIST_BYTES:
            break
        text += line
        listed += 1
    if listed < count:
        text += b"and %d more; aifs fsck names all\n" % (count - listed)
    parent, stem = lost_and_found(tx, now_ns), title.replace(" ", "-")
    name, suffix = stem, 0
    while tx.get(keys.dentry(parent.ino, name.encode())) is not None:
        if namespace.lookup(tx, parent.ino, name.encode()).data == text:
            break
        suffix += 1
        name = f"{stem}.{suffix}"
    else:
        new = _new(fresh_id(tx), stat.S_IFREG | 0o400, 1, now_ns)
        new.size, new.data = len(text), bytes(text)
        namespace.create(tx, parent.ino, name.encode(), new)
    return f"/{NAME.decode()}/{name}"


def _new(ino: int, mode: int, links: int, now_ns: int) -> Inode:
    return Inode(ino, mode, os.getuid(), os.getgid(), links, 0, 0, 0, now_ns, now_ns, now_ns)
