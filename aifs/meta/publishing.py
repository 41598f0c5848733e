"""Publishing as transaction functions (see kv.py): the one transaction that shows a tree under its
final name together with the pointers to it; and which checkpoints a directory keeps.

    r ino   u8 format=1, asker (askers.py), what is kept, as text (core/retention.py)

All little-endian.
"""

import struct
from collections.abc import Collection
from typing import NamedTuple

from aifs.core.errors import Exists, Invalid, NotADirectory, NotFound, Unavailable
from aifs.core.names import is_name
from aifs.meta import dooming, forms, groups, keys, namespace
from aifs.meta.askers import Asker, decode_asker
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.namespace import Name
from aifs.meta.records import Inode, decode_entry
from aifs.meta.trash import Remover

FORMAT = 1


class Kept(NamedTuple):
    """Which checkpoints of a directory are kept, as text, and the user that has set it."""

    policy: str
    asker: Asker

    def encode(self) -> bytes:
        return bytes((FORMAT,)) + self.asker.encode() + self.policy.encode()


def decode_kept(record: bytes) -> Kept:
    """Raises Unavailable for a damaged record."""
    try:
        asker, start = decode_asker(record, 1)
        policy = record[start:].decode()
    except (struct.error, UnicodeDecodeError):
        raise Unavailable("the record of which checkpoints are kept is damaged") from None
    if record[0] != FORMAT:
        raise Unavailable("the record of which checkpoints are kept is of a later version")
    return Kept(policy, asker)


# --- publishing -----------------------------------------------------------------------------------


def rename(
    tx: Transaction,
    old: Name,
    new: Name,
    flags: int,
    cookies: tuple[int, int],
    now: int,
    durable: Collection[int],
    quiet: Collection[int],
    by: Remover | None,
) -> tuple[Inode, Inode | None]:
    """namespace.rename of ``durable`` inode numbers; also publishes a pending directory. ``quiet``:
    synced files below, whose dirty marks go with it. Raises Busy if members are missing, and as
    that."""
    inode, other = namespace.rename(tx, old, new, flags, cookies, now, durable, by)
    if inode.is_dir:
        groups.conclude(tx, inode.ino)
    if flags & namespace.RENAME_EXCHANGE and other is not None and other.is_dir:
        groups.conclude(tx, other.ino)
    forms.remove_marks(tx, quiet)
    return inode, other


class Publication(NamedTuple):
    """What is to be shown, and pointers beside it; b"" stands for none."""

    ino: int
    """The directory that is shown."""
    parent: int
    """The directory that it is shown in."""
    name: bytes
    """Its name there."""
    replace: bool = False
    """A tree that has the name is removed."""
    exclusive: bool = False
    """Nothing may have the name. With neither of these an empty directory may, as in rename(2)."""
    latest: bytes = b""
    """Name of a symlink to ``name``."""
    tracker: bytes = b""
    """Name of a file with ``content``."""
    content: bytes = b""
    """What that says."""
    manifest: bytes = b""
    """Name of a file that has to be in the directory."""

    def check(self) -> None:
        """Raises Invalid for names that cannot be."""
        pointers = [name for name in (self.latest, self.tracker) if name]
        names = [self.name, *pointers, *([self.manifest] if self.manifest else [])]
        for name in names:
            if not is_name(name):
                raise Invalid(f"publish: {name!r} cannot be the name of a file")
        if len({self.name, *pointers}) != 1 + len(pointers):
            raise Invalid("publish: the final name and those of the pointers must differ")
        if self.replace and self.exclusive:
            raise Invalid(
                "publish: to replace what is there, and to refuse if something is, exclude each "
                "other"
            )
        if self.content and not self.tracker:
            raise Invalid("publish: there is content for a tracker file, but no name")


class Published(NamedTuple):
    """A publication: the directory now, its old name, files that lost a name, the doomed tree."""

    inode: Inode
    old: Name
    unlinked: list[Inode]
    doomed: Inode | None


def name_of(tx: ReadTransaction, directory: Inode) -> bytes:
    """A directory's name in its parent: one read for its first name, else a listing. Raises
    NotFound."""
    if directory.links and directory.ino != keys.ROOT_INO:
        first = tx.get(keys.entry(directory.parent, directory.ino))
        if first is not None:
            return decode_entry(first)[2]
        for _, value in tx.range(*keys.entries_after(directory.parent, 0)):
            ino, _, name = decode_entry(value)
            if ino == directory.ino:
                return name
    raise NotFound("the directory has no name")


@grows
def publish(
    tx: Transaction,
    what: Publication,
    owner: tuple[int, int],
    ids: tuple[int, int, int, int],
    now: int,
    by: Remover | None = None,
) -> Published:
    """Show ``what``, all at once. ``owner``: uid and gid of new inodes; ``ids``: fresh numbers. A
    replaced tree may go to the trash, pointers do not.

    Raises Busy (members are missing), Exists, NotEmpty, NotADirectory, NotFound (directory, parent
    or manifest), Invalid.
    """
    inode = namespace.get_directory(tx, what.ino)
    old, final = (inode.parent, name_of(tx, inode)), (what.parent, what.name)
    if what.manifest and not namespace.lookup(tx, inode.ino, what.manifest).is_file:
        raise Invalid(f"publish: {what.manifest!r} is not a regular file")
    doomed, unlinked = None, []
    there = find(tx, *final)
    if there is not None and there.ino != inode.ino:
        if what.exclusive:
            raise Exists()
        if not there.is_dir:
            raise NotADirectory()
        if what.replace:
            doomed = dooming.doom(tx, *final, now, owner[0], by)
    inode, replaced = namespace.rename(tx, old, final, 0, (ids[0], ids[1]), now, (inode.ino,))
    if replaced is not None:
        unlinked.append(replaced)
    inode.shown_ns = now
    namespace.put_inode(tx, inode)
    groups.conclude(tx, inode.ino)
    uid, gid = owner
    if what.latest:
        link = Inode.new(ids[2], _SYMLINK, uid, gid, now, size=len(what.name), data=what.name)
        unlinked += _put_pointer(tx, what.parent, what.latest, link, now)
    if what.tracker:
        file = Inode.new(ids[3], _FILE_MODE, uid, gid, now, size=len(what.content))
        file.blocks, file.data = bool(what.content), what.content or None
        unlinked += _put_pointer(tx, what.parent, what.tracker, file, now)
    return Published(inode, old, unlinked, doomed)


_SYMLINK = 0o120777
_FILE_MODE = 0o100644


def _put_pointer(tx: Transaction, parent: int, name: bytes, new: Inode, now: int) -> list[Inode]:
    """Put ``new`` under ``name`` in place of any other. Raises IsADirectory."""
    unlinked = [] if find(tx, parent, name) is None else [namespace.unlink(tx, parent, name, now)]
    namespace.create(tx, parent, name, new)
    return unlinked


def find(tx: ReadTransaction, parent: int, name: bytes) -> Inode | None:
    """The inode of the name, or None. Raises NotADirectory; NotFound for the directory."""
    try:
        return namespace.lookup(tx, parent, name)
    except NotFound:
        namespace.get_directory(tx, parent)
        return None
