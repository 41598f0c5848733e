"""Removing whole trees as transaction functions (see kv.py): the name goes at once, what lies below
in slices.

A doomed directory has no name and no links, keeps its entries, and has a record:

    z ino       u8 format=1, u64 tree, i64 since (ns), u32 uid (of its remover), [u16 maker];
                little-endian
                ``tree``: the directory whose name was removed, ``ino`` itself or one that it lay in

With a maker it is not doomed yet: it is the top of a tree that this host makes, and which is doomed
unless it gets a name (meta/clones.py).

Emptying a directory dooms its subdirectories, each with a record of its own, so the work is flat
however deep the tree is, and every state in between is one that the next mount goes on from.
The record goes with the inode.
"""

import struct
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from aifs.core.errors import NotADirectory, NotPermitted, Unavailable
from aifs.meta import keys, namespace, trash
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import SNAPSHOT, Inode, decode_entry
from aifs.meta.trash import Remover

FORMAT = 1

LOOKED_AT_MAX = 10_000
"""Names below a tree that are searched for one that must stay: some 100 ms."""

_RECORD = struct.Struct("<BQqI")
_MAKER = struct.Struct("<H")


class DamagedTree(Unavailable):
    """A record in the tree cannot be read; fsck names it."""


class Doomed(NamedTuple):
    """The top of a doomed directory's tree, when (ns) and by which user it was removed; the host
    that makes it, if it is not to be removed yet."""

    tree: int
    since_ns: int
    uid: int
    maker: int | None = None

    def encode(self) -> bytes:
        record = _RECORD.pack(FORMAT, self.tree, self.since_ns, self.uid)
        return record if self.maker is None else record + _MAKER.pack(self.maker)


def decode_doomed(record: bytes) -> Doomed:
    """Raises Unavailable for a damaged record."""
    try:
        version, *fields = _RECORD.unpack_from(record)
        if len(record) > _RECORD.size:
            fields += _MAKER.unpack(record[_RECORD.size :])
    except struct.error:
        raise Unavailable("the record of a doomed directory is damaged") from None
    if version != FORMAT:
        raise Unavailable(
            f"the record of a doomed directory has format {version}; this version reads {FORMAT}"
        )
    return Doomed(*fields)


def doom(
    tx: Transaction, parent: int, name: bytes, now: int, uid: int, by: Remover | None = None
) -> Inode:
    """Remove the name of a directory, and doom it with its tree, or put it in its trash; returns
    the inode. Snapshots go to no trash: they are removed only by name.

    The cost does not depend on the tree, except in a store that has had immutable or append-only
    files: then up to LOOKED_AT_MAX names are looked at. Raises NotFound, NotADirectory,
    NameTooLong, NotPermitted.
    """
    dentry = namespace.get_dentry(tx, parent, name)
    inode = namespace.get_inode(tx, dentry.ino)
    if not inode.is_dir:
        raise NotADirectory()
    directory = namespace.get_directory_loosely(tx, parent)
    if inode.flags & SNAPSHOT and not directory.flags & SNAPSHOT:
        directory.require_unguarded()  # a snapshot, which goes as a whole
        by = None
    else:
        _require_removable(tx, directory, inode)
    namespace.remove_name(tx, parent, name, dentry)
    namespace.touch(tx, directory, now, links=-1)
    if by and trash.put(tx, inode, parent, name, now, by, is_dead=False):
        namespace.put_inode(tx, inode)
        return inode
    return put_doomed(tx, inode, now, uid)


def _require_removable(tx: Transaction, directory: Inode, inode: Inode) -> None:
    namespace.require_removable(directory, inode)
    if tx.counter(keys.COUNTER_GUARDED):
        _require_removable_below(tx, inode.ino)


def _require_removable_below(tx: ReadTransaction, ino: int) -> None:
    pending, count = [ino], 0
    while pending:
        for _, value in tx.range(*keys.entries_after(pending.pop(), 0), LOOKED_AT_MAX - count + 1):
            count += 1
            if count > LOOKED_AT_MAX:
                raise NotPermitted("too large to be searched for immutable files: use rm -r")
            inode = namespace.find_inode(tx, decode_entry(value)[0])
            if inode is not None:
                inode.require_unguarded()
                if inode.is_dir:
                    pending.append(inode.ino)


def put_doomed(tx: Transaction, inode: Inode, now: int, uid: int) -> Inode:
    """Doom a directory, which has just lost its name; the inode as it is now."""
    return _put(tx, inode, Doomed(inode.ino, now, uid), now)


def _put(tx: Transaction, inode: Inode, doomed: Doomed, now: int) -> Inode:
    inode.nlink, inode.ctime_ns = 0, now
    namespace.put_inode(tx, inode)
    tx.put(keys.doomed(inode.ino), doomed.encode())
    return inode


def all_doomed(tx: ReadTransaction) -> list[tuple[int, Doomed]]:
    """The doomed directories by inode number, without damaged records, which fsck names."""
    return [(ino, doomed) for ino, doomed in _all(tx) if doomed.maker is None]


def find_doomed(tx: ReadTransaction, ino: int) -> Doomed | None:
    """The record of this directory, if it has one."""
    record = tx.get(keys.doomed(ino))
    return None if record is None else decode_doomed(record)


def _all(tx: ReadTransaction) -> Iterator[tuple[int, Doomed]]:
    for key, value in tx.range(*keys.all_of(b"z")):
        with suppress(Unavailable):
            yield keys.number(key), decode_doomed(value)


def all_makers(tx: ReadTransaction) -> dict[int, int]:
    """By the number of its top, the maker of a tree that has no name yet."""
    return {ino: doomed.maker for ino, doomed in _all(tx) if doomed.maker is not None}


def put_abandoned(tx: Transaction, inos: Iterable[int]) -> None:
    """Doom the tops of trees that nobody goes on to make, unless they have their names."""
    for ino in inos:
        doomed = find_doomed(tx, ino)
        if doomed is not None:
            tx.put(keys.doomed(ino), doomed._replace(maker=None).encode())


@dataclass(slots=True)
class Slice:
    """The result of a step of emptying a directory."""

    erased: list[int] = field(default_factory=list)
    """Inodes that are gone."""
    garbage: list[int] = field(default_factory=list)
    """The ids of what they leave."""
    kept: list[Inode] = field(default_factory=list)
    """Files that are open, or have other names, as they are now."""
    directories: list[int] = field(default_factory=list)
    """Subdirectories that are doomed themselves now."""
    after: int = 0
    """The cookie of the last name that has been removed."""
    finished: bool = False
    """The directory was empty, and is gone, too."""


def find_slice(tx: ReadTransaction, ino: int, after: int, limit: int) -> list[int]:
    """The first ``limit`` inodes behind a cookie, which ``remove_slice`` removes first. Raises
    DamagedTree."""
    try:
        entries = tx.range(*keys.entries_after(ino, after), limit)
        return [decode_entry(value)[0] for _, value in entries]
    except Unavailable as error:
        raise DamagedTree(str(error)) from error


def remove_slice(
    tx: Transaction, ino: int, closed: Container[int], after: int, limit: int, now: int
) -> Slice:
    """Remove up to ``limit`` names of a doomed directory, behind cookie ``after``: looking through
    removed ones again would take ever longer. An empty directory goes itself.

    Files without other names are erased if they are ``closed`` and no other host can have them
    open; others become orphans. Raises DamagedTree, with nothing changed.
    """
    done = Slice(after=after)
    record = tx.get(keys.doomed(ino))
    if record is None:
        done.finished = True
        return done
    try:
        doomed = decode_doomed(record)
        entries = list(tx.range(*keys.entries_after(ino, after), limit))
        for key, value in entries:
            _, done.after = keys.entry_numbers(key)
            child, _, name = decode_entry(value)
            tx.delete(key)
            tx.delete(keys.dentry(ino, name))
            inode = namespace.find_inode(tx, child)
            if inode is not None:
                _remove(tx, inode, doomed, closed, now, done)
        if len(entries) < limit:
            done.finished = True
            _erase(tx, namespace.get_inode(tx, ino), done)
            tx.delete(keys.doomed(ino))
    except Unavailable as error:
        raise DamagedTree(str(error)) from error
    return done


def _remove(
    tx: Transaction, inode: Inode, doomed: Doomed, closed: Container[int], now: int, done: Slice
) -> None:
    if inode.is_dir:
        _put(tx, inode, doomed, now)
        done.directories.append(inode.ino)
    elif inode.nlink <= 1 and inode.ino in closed and not tx.host:
        _erase(tx, inode, done)
    else:
        done.kept.append(namespace.drop_link(tx, inode, now))


def _erase(tx: Transaction, inode: Inode, done: Slice) -> None:
    done.garbage += namespace.erase(tx, inode, namespace.find_xattrs(tx, inode.ino))
    done.erased.append(inode.ino)
