"""Names for people: the path of an inode, found from below, as far as that is cheap."""

from aifs.core.errors import Unavailable
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import decode_entry

_LISTED_MAX = (
    4096  # entries of a directory that are looked through for a name that is not the inode's first
)


def find_path(tx: ReadTransaction, ino: int) -> bytes | None:
    """A path from the root, as b"/a/b"; None for a file that has or had several names, or none, or
    where the name would have to be sought in a large directory, or a record is damaged."""
    parts: list[bytes] = []
    try:
        while ino != keys.ROOT_INO:
            inode = namespace.find_inode(tx, ino)
            if inode is None or not inode.parent:
                return None
            name = find_name(tx, inode.parent, ino)
            if name is None:
                return None
            parts.append(name)
            ino = inode.parent
    except Unavailable:
        return None
    return b"/" + b"/".join(reversed(parts))


def describe(tx: ReadTransaction, ino: int) -> str:
    """The path as text (surrogates for bytes that are none), or which inode it is."""
    path = find_path(tx, ino)
    return f"inode {ino}" if path is None else path.decode("utf-8", "surrogateescape")


def find_name(tx: ReadTransaction, parent: int, ino: int) -> bytes | None:
    """The name of an inode in this directory, which is its ``parent``; None as above."""
    first = tx.get(keys.entry(parent, ino))  # the first name of an inode has its number as cookie
    if first is not None and decode_entry(first)[0] == ino:
        return decode_entry(first)[2]
    for _, value in tx.range(*keys.entries_after(parent, 0), limit=_LISTED_MAX):
        child, _, name = decode_entry(value)
        if child == ino:
            return name
    return None
