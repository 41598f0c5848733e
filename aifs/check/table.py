"""The memory of the check: columns of a few numbers an inode, about 60 bytes each. No I/O."""

import stat
from array import array
from bisect import bisect_left

from aifs.check.findings import Subject, printable
from aifs.core.errors import FsError
from aifs.meta import keys
from aifs.meta.kv import MAX_KEY_BYTES, ReadTransaction
from aifs.meta.records import Dentry, decode_dentry, decode_entry, decode_inode

DIRECTORY = stat.S_IFDIR >> 12

UNREADABLE, MISSING, ORPHAN, HAS_NAMES, LOSES_NAME, OWN_OID, DOOMED = 1, 2, 4, 8, 16, 32, 64
TRASHED, KEPT = 128, 256
"""Flags of a row: the record is undecodable; missing; there is an orphan record; it is a dentry's
parent; a name of it will go; its object id is its inode number; it is doomed; it says that it is
trashed; it has an entry there."""

NONE = -1

_LONGEST_NAME = MAX_KEY_BYTES - len(keys.dentry(0, b""))


class InodeTable:
    """Rows in order of inode number; a row is an index into all columns."""

    def __init__(self) -> None:
        self.ino = array("Q")
        """Inode number."""
        self.type = array("B")
        """Type bits of the mode, as in a dentry; 0 if nobody knows them."""
        self.flags = array("H")
        """Those above, from UNREADABLE on."""
        self.links = array("I")
        """The link count on record."""
        self.names = array("I")
        """Its names that will be left when all problems are mended."""
        self.subdirs = array("I")
        """Of a directory, the subdirectories that will be left then."""
        self.removed = array("i")
        """Names, or subdirectories, that are there and will go, less those to come."""
        self.parent = array("Q")
        """The parent on record; 0: a file that has or had several."""
        self.at = array("Q")
        """The directory that one of its names is in; 0: none has been found."""
        self.cookie = array("Q")
        """The cookie of that name there."""
        self.objects = array("H")
        """Objects that the file must have and that have not been found yet."""
        self._columns = [column for column in vars(self).values() if isinstance(column, array)]
        """All of the above."""

    def __len__(self) -> int:
        return len(self.ino)

    def add(self, ino: int, type_: int = 0, flags: int = 0, links: int = 0, parent: int = 0) -> int:
        """A new row, in its place (fast at the end). Moves the rows behind it."""
        row = bisect_left(self.ino, ino)
        for column in self._columns:
            column.insert(row, 0)
        self.ino[row], self.type[row], self.flags[row], self.links[row] = ino, type_, flags, links
        self.parent[row] = parent
        return row

    def find(self, ino: int) -> int:
        """The row, or NONE."""
        row = bisect_left(self.ino, ino)
        return row if row < len(self.ino) and self.ino[row] == ino else NONE

    def may_hold_names(self, row: int) -> bool:
        return self.type[row] == DIRECTORY or bool(self.flags[row] & UNREADABLE)

    # --- paths ---

    def where(self, tx: ReadTransaction, subject: Subject) -> str:
        """A subject as text, with the path as far as there is one."""
        if isinstance(subject, str):
            return subject
        if isinstance(subject, int):
            return self.path(tx, subject)
        parent, name = subject
        return f"{self.path(tx, parent).rstrip('/')}/{printable(name)}"

    def path(self, tx: ReadTransaction, ino: int) -> str:
        """One path of the inode, from ``<inode N>`` where the way up is broken."""
        parts: list[str] = []
        seen: set[int] = set()
        while ino != keys.ROOT_INO:
            place = self.place(tx, ino) if ino not in seen else None
            if place is None:
                return "/".join([f"<inode {ino}>", *reversed(parts)])
            seen.add(ino)
            ino, name = place
            parts.append(printable(name))
        return "/" + "/".join(reversed(parts))

    def place(self, tx: ReadTransaction, ino: int) -> tuple[int, bytes] | None:
        """Directory and name of the inode: as checked, or as repaired."""
        row = self.find(ino)
        if row != NONE and self.at[row]:
            parent, cookie = self.at[row], self.cookie[row]
            likely = find_entry_name(tx, parent, cookie)
        else:
            parent, cookie = _recorded_parent(tx, ino), 0
            likely = lost_name(ino)
        if likely is not None:
            dentry = find_dentry(tx, parent, likely)
            if dentry is not None and dentry.ino == ino:
                return parent, likely
        # The index is damaged: look through the names themselves.
        first = keys.dentry(parent, b"")
        for key, _ in tx.range(first, first + b"\xff" * 256):
            name = keys.dentry_parts(key)[1]
            dentry = find_dentry(tx, parent, name)
            if dentry is not None and dentry.ino == ino and cookie in (0, dentry.cookie):
                return parent, name
        return None


def lost_name(ino: int) -> bytes:
    """The name that a repair gives to an inode that has none."""
    return b"#%d" % ino


def _recorded_parent(tx: ReadTransaction, ino: int) -> int:
    record = tx.get(keys.inode(ino))
    try:
        return 0 if record is None else decode_inode(ino, record).parent
    except FsError:
        return 0


def find_dentry(tx: ReadTransaction, parent: int, name: bytes) -> Dentry | None:
    """The dentry, unless there is none or it cannot be decoded; ``name`` may be any bytes."""
    record = tx.get(keys.dentry(parent, name)) if len(name) <= _LONGEST_NAME else None
    try:
        return None if record is None else decode_dentry(record)
    except FsError:
        return None


def find_entry_name(tx: ReadTransaction, parent: int, cookie: int) -> bytes | None:
    """The name in an entry, unless there is none or it cannot be decoded."""
    record = tx.get(keys.entry(parent, cookie))
    try:
        return None if record is None else decode_entry(record)[2]
    except FsError:
        return None
