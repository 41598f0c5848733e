"""What containers say of files: attributes, and a hint at the path."""

from collections.abc import Iterable

from aifs.data.containers.chunk_codec import HINT_MAX, FileRecord
from aifs.meta import keys
from aifs.meta.kv import ReadTransaction
from aifs.meta.namespace import SEVERAL, find_inode
from aifs.meta.records import Inode, decode_dentry, decode_entry

_DEPTH_MAX = 64
_ENTRIES_MAX = 4096
"""Directory entries that are looked through for the names of all files together, or within a
moment. A name that has never changed is found without that, by its cookie (see namespace.create).
"""


def describe(tx: ReadTransaction, inodes: Iterable[Inode]) -> list[FileRecord]:
    """A record of each regular file; sizes and counts are for the caller to fill in. Takes some
    microseconds a file.
    """
    paths = _Paths(HINT_MAX)
    return [_describe(tx, inode, paths) for inode in inodes]


def _describe(tx: ReadTransaction, inode: Inode, paths: "_Paths") -> FileRecord:
    hint = paths.hint(tx, inode)
    return FileRecord(inode.ino, 0, 0, inode.mode, inode.uid, inode.gid, inode.mtime_ns, 0, 0, hint)


class _Paths:
    def __init__(self, hint_max: int) -> None:
        self._max = hint_max
        self._directories = {keys.ROOT_INO: b""}
        self._names: dict[tuple[int, int], bytes] = {}
        self._seen: dict[int, int] = {}  # up to which cookie each directory has been looked through
        self._entries_left = _ENTRIES_MAX

    def hint(self, tx: ReadTransaction, inode: Inode) -> bytes:
        """The end of the path; b"" for a file with several names, or none."""
        if inode.parent == SEVERAL or not inode.nlink:
            return b""
        directory = self._directory(tx, inode.parent)
        return b"/".join((directory, self._name(tx, inode.parent, inode.ino)))[-self._max :]

    def _directory(self, tx: ReadTransaction, ino: int) -> bytes:
        above: list[tuple[int, bytes]] = []
        path = None
        while path is None:
            path = self._directories.get(ino)
            if path is None:
                inode = find_inode(tx, ino)
                if inode is None or len(above) == _DEPTH_MAX:
                    path = b"?"
                else:
                    above.append((ino, self._name(tx, inode.parent, ino)))
                    ino = inode.parent
        for number, name in reversed(above):
            path = self._directories[number] = b"/".join((path, name))[-self._max :]
        return path

    def _name(self, tx: ReadTransaction, parent: int, ino: int) -> bytes:
        value = tx.get(keys.entry(parent, ino))
        if value is not None and (found := decode_entry(value))[0] == ino:
            return found[2]
        if (name := self._names.get((parent, ino))) is not None:
            record = tx.get(keys.dentry(parent, name))
            if record is not None and decode_dentry(record).ino == ino:
                return name
        limit, start = self._entries_left, self._seen.get(parent, 0)
        for key, value in tx.range(*keys.entries_after(parent, start), limit) if limit else ():
            self._entries_left -= 1
            found = decode_entry(value)
            self._names[parent, found[0]] = found[2]
            self._seen[parent] = keys.entry_numbers(key)[1]
            if found[0] == ino:
                return found[2]
        return b"?"
