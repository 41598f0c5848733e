"""Extended attributes as transaction functions (see kv.py)."""

from aifs.core.errors import (
    ArgumentTooBig,
    Exists,
    Invalid,
    NoAttribute,
    NoSpace,
    NotSupported,
    ResultTooLarge,
)
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, Transaction, answers, grows
from aifs.meta.namespace import get_inode, put_inode
from aifs.meta.records import Inode

NAME_MAX = 255
VALUE_MAX = 64 * 1024
LIST_MAX = 64 * 1024  # what listxattr(2) can return

XATTR_CREATE = 1
XATTR_REPLACE = 2

NAMESPACES = (b"user.", b"trusted.", b"security.")


def get(tx: ReadTransaction, ino: int, name: bytes) -> bytes:
    """Raises NoAttribute, NotSupported, ResultTooLarge."""
    _check_name(name)
    value = tx.get(keys.xattr(ino, name))
    if value is None:
        raise NoAttribute()
    return value


def names(tx: ReadTransaction, ino: int) -> list[bytes]:
    return [keys.xattr_parts(key)[1] for key, _ in tx.range(*keys.xattrs(ino))]


@answers
@grows
def put(tx: Transaction, ino: int, name: bytes, value: bytes, flags: int, now: int) -> Inode:
    """setxattr(2); returns the inode. Raises Exists or NoAttribute by ``flags``, ArgumentTooBig,
    NoSpace (too many names), NotSupported."""
    _check_name(name)
    get_inode(tx, ino).require_unguarded()
    if len(value) > VALUE_MAX:
        raise ArgumentTooBig()
    key = keys.xattr(ino, name)
    present = tx.get(key) is not None
    if flags & ~(XATTR_CREATE | XATTR_REPLACE):
        raise Invalid()
    if flags & XATTR_CREATE and present:
        raise Exists()
    if flags & XATTR_REPLACE and not present:
        raise NoAttribute()
    if not present and sum(len(n) + 1 for n in names(tx, ino)) + len(name) + 1 > LIST_MAX:
        raise NoSpace("too many extended attributes on one inode")
    tx.put(key, value)
    return _touch(tx, ino, now)


@answers
def remove(tx: Transaction, ino: int, name: bytes, now: int) -> Inode:
    """removexattr(2); returns the inode as it is now. Raises as get."""
    get_inode(tx, ino).require_unguarded()
    get(tx, ino, name)
    tx.delete(keys.xattr(ino, name))
    return _touch(tx, ino, now)


def _check_name(name: bytes) -> None:
    if not name.startswith(NAMESPACES):
        raise NotSupported()
    if len(name) > NAME_MAX:
        raise ResultTooLarge("name of an extended attribute is too long")


def _touch(tx: Transaction, ino: int, now: int) -> Inode:
    inode = get_inode(tx, ino)
    inode.ctime_ns = now
    put_inode(tx, inode)
    return inode
