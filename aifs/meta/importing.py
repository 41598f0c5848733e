"""Files whose bytes are objects of a bucket that is there already, as transaction functions."""

from collections.abc import Sequence
from typing import NamedTuple

from aifs.layout.imported import Imported, Pin
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Inode, decode_dentry

MADE, SAME, CHANGED, OTHER = "made", "same", "changed", "other"
"""The file is new; it is there; it is there, pinned to another content of the object, or with other
parameters of the bucket; another file, or a directory, has the name."""


class NewFile(NamedTuple):
    """A file to be made."""

    name: bytes
    mtime_ns: int
    """When the object was made, since the epoch."""
    pin: Pin


@grows
def import_files(
    tx: Transaction, directory: int, entries: Sequence[NewFile], new: Sequence[Inode], umask: int
) -> list[str]:
    """Make the files whose names are free. Returns MADE, SAME, CHANGED or OTHER of each.

    ``new``: an inode for each entry, with its number, owner, mode and ctime. Raises as
    namespace.create, except Exists.
    """
    namespace.get_directory(tx, directory)
    return [
        _import_file(tx, directory, entry, inode, umask)
        for entry, inode in zip(entries, new, strict=True)
    ]


def _import_file(tx: Transaction, directory: int, entry: NewFile, new: Inode, umask: int) -> str:
    namespace.require_name(entry.name)
    record = tx.get(keys.dentry(directory, entry.name))
    if record is not None:
        return _state(tx, decode_dentry(record).ino, entry.pin)
    inode = namespace.create(tx, directory, entry.name, new, umask)
    inode.size, inode.mtime_ns = entry.pin.size, entry.mtime_ns
    if entry.pin.size:
        inode.layout, inode.oid = Imported(source=entry.pin), inode.ino
        inode.blocks = -(-entry.pin.size // 512)
    namespace.put_inode(tx, inode)
    return MADE


def _state(tx: ReadTransaction, ino: int, pin: Pin) -> str:
    found = namespace.find_inode(tx, ino)
    if found is None or not found.is_file or found.in_burst:
        return OTHER
    if not found.size and not pin.size:
        return SAME
    known = found.layout.pin if found.layout is not None else None
    if known is None or known.url != pin.url:
        return OTHER
    return SAME if known == pin else CHANGED
