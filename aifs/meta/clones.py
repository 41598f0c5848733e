"""Cloning files and trees, as transaction functions (see kv.py): records are copied, and the bytes
on the capacity tier shared (meta/shared.py).

A tree is cloned in slices, below a directory that nobody can find: it has no name, and the record
of a doomed one, which says who makes it (meta/dooming.py). So a tree that is not finished is
removed as any other once its maker is gone. One transaction gives it its name.
"""

import stat
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from aifs.core.errors import Stale
from aifs.meta import dooming, keys, namespace, shared
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import IMMUTABLE, INHERITS_PROJECT, SNAPSHOT, Inode, decode_entry

SNAPSHOTS = b".snapshots"
"""The directory that holds the snapshots of the one that it lies in. Clones have none."""

_FROZEN = SNAPSHOT | IMMUTABLE

Xattrs = Mapping[int, Sequence[tuple[bytes, bytes]]]
"""By inode number, keys and values of extended attributes."""


class Terms(NamedTuple):
    """Shared by all clones that one request makes."""

    now: int
    """Their ctime and time of birth, in ns."""
    uid: int
    """Whose they are; 0: each has the owner of its original."""
    gids: Sequence[int]
    """The groups of this user: those that a clone may have, the usual one first."""
    require_readable: Callable[[Inode], None]
    """Raises AccessDenied for what may not be read."""
    flags: int = 0
    """INHERITS_PROJECT, if the directory of the new name has it."""
    project: int = 0
    """The project of that directory, if new names inherit it."""
    is_snapshot: bool = False
    """Nothing of the clones can be changed: the tree can only be removed as a whole."""

    def below(self, directory: Inode) -> "Terms":
        """These, for clones in this directory."""
        flags = directory.flags & INHERITS_PROJECT
        return self._replace(flags=flags, project=directory.project if flags else 0)

    def may_copy(self, attribute: bytes) -> bool:
        """Whether clones get this attribute: root's may grant privileges, and stay with the
        owner."""
        return not self.uid or attribute.startswith(b"user.")

    def copy(self, source: Inode, ino: int, parent: int) -> Inode:
        """A clone's inode without bytes. Set-id bits stay with the owner, chattr's flags with the
        original."""
        new = source.but(
            ino=ino,
            parent=parent,
            nlink=2 if source.is_dir else 1,
            ctime_ns=self.now,
            birth_ns=self.now,
            oid=0,
            layout=None,
            copy=None,
            named=0,
            flags=(self.flags if source.is_dir else 0) | self.is_snapshot * _FROZEN,
            project=self.project,
        )
        if self.uid:
            if source.uid != self.uid and not source.is_dir:
                new.mode &= ~(stat.S_ISUID | stat.S_ISGID)
            new.uid = self.uid
            new.gid = source.gid if source.gid in self.gids else self.gids[0]
        return new


def can_be_shared(tx: ReadTransaction, inode: Inode) -> bool:
    """Whether the bytes of a file are at rest, where a clone may have them, too."""
    return not inode.in_burst and tx.get(keys.dirty(inode.ino)) is None


@grows
def clone_file(
    tx: Transaction,
    source: int,
    parent: int,
    name: bytes,
    ino: int,
    terms: Terms,
    with_bytes: bool = True,
) -> Inode | None:
    """Clone whatever is no directory to a free ``name``; returns the clone's inode.

    None, with nothing changed, if its bytes cannot be shared now. Else callers note in core that
    they are. Without ``with_bytes`` the clone is empty. Raises NotFound for a file without names,
    and the errors of ``terms``.
    """
    original = namespace.get_inode(tx, source)
    terms.require_readable(original)
    if with_bytes and not can_be_shared(tx, original):
        return None
    xattrs = {source: list(tx.range(*keys.xattrs(source)))}
    tx.add(keys.COUNTER_INODES, 1)
    return _clone(tx, original, parent, name, ino, terms, xattrs, with_bytes)


@grows
def clone_named(
    tx: Transaction, source: int, parent: int, name: bytes, ino: int, terms: Terms
) -> Inode | None:
    """As ``clone_file``, in a directory that others see. Raises as namespace.create, too."""
    directory = namespace.require_free(tx, parent, name)
    clone = clone_file(tx, source, parent, name, ino, terms)
    if clone is not None:
        namespace.require_same_project(tx, directory, clone)  # it may have another one by now
        namespace.touch(tx, directory, terms.now)
    return clone


def _clone(
    tx: Transaction,
    source: Inode,
    parent: int,
    name: bytes,
    ino: int,
    terms: Terms,
    xattrs: Xattrs,
    with_bytes: bool = True,
) -> Inode:
    new = terms.copy(source, ino, parent)
    if source.is_file and not with_bytes:
        new.size, new.blocks, new.data = 0, 0, None
    elif source.layout is not None and source.layout.pin:
        new.oid, new.layout = ino, source.layout
    elif source.layout is not None:
        was_shared = source.named
        shared.share(tx, source, new)
        if not was_shared:
            namespace.put_inode(tx, source)
    namespace.put_inode(tx, new)
    _copy_xattrs(tx, xattrs.get(source.ino, ()), ino, terms)
    namespace.put_name(tx, parent, name, new, ino)
    return new


def _copy_xattrs(
    tx: Transaction, xattrs: Sequence[tuple[bytes, bytes]], ino: int, terms: Terms
) -> None:
    for key, value in xattrs:
        _, attribute = keys.xattr_parts(key)
        if terms.may_copy(attribute):
            tx.put(keys.xattr(ino, attribute), value)


@grows
def begin_tree(tx: Transaction, source: int, ino: int, terms: Terms) -> None:
    """Make the nameless top of a directory's clone. Raises NotFound, NotADirectory."""
    directory = namespace.get_directory(tx, source)
    terms.require_readable(directory)
    top = terms.copy(directory, ino, keys.ROOT_INO)
    top.nlink = 0
    namespace.put_inode(tx, top)
    _copy_xattrs(tx, list(tx.range(*keys.xattrs(source))), ino, terms)
    tx.put(keys.doomed(ino), dooming.Doomed(ino, terms.now, terms.uid, tx.host).encode())
    tx.add(keys.COUNTER_INODES, 1)


class NamesToClone(NamedTuple):
    """Some names of a directory that is cloned."""

    inos: list[int]
    """The inodes that they lead to."""
    xattrs: Xattrs
    """Their extended attributes: a transaction looks for them the slower, the more it has
    changed."""


def find_slice(tx: ReadTransaction, directory: int, after: int, limit: int) -> NamesToClone:
    """The first ``limit`` names behind a cookie."""
    entries = tx.range(*keys.entries_after(directory, after), limit)
    inos = [decode_entry(value)[0] for _, value in entries]
    found = {ino: list(tx.range(*keys.xattrs(ino))) for ino in inos}
    return NamesToClone(inos, {ino: xattrs for ino, xattrs in found.items() if xattrs})


class Unshared(NamedTuple):
    """A file whose bytes could not be shared with the others of a slice."""

    source: int
    """Its inode number."""
    directory: int
    """That of the directory that its clone is to be in."""
    name: bytes
    """The name of the clone."""


@dataclass(slots=True)
class ClonedSlice:
    """The result of a step of cloning a directory."""

    directories: list[tuple[int, int]] = field(default_factory=list)
    """Subdirectories, each with its clone, which is empty as yet."""
    linked: dict[int, int] = field(default_factory=dict)
    """By inode number the clones of files with several names."""
    left: list[Unshared] = field(default_factory=list)
    """The rest, which is not cloned yet."""
    after: int = 0
    """The cookie of the last name that was looked at."""
    finished: bool = False
    """There are no more."""


@grows
def clone_slice(
    tx: Transaction,
    source: int,
    target: int,
    after: int,
    ids: Sequence[int],
    ready: Container[int],
    xattrs: Xattrs,
    linked: Mapping[int, int],
    terms: Terms,
) -> ClonedSlice:
    """Clone the first names of ``source`` behind cookie ``after`` into ``target``, one for each id.

    ``ready``: files that are not open, so that records say all. ``linked``: ``ClonedSlice.linked``
    of earlier slices. Raises the errors of ``terms``.
    """
    done, inodes = ClonedSlice(after=after), 0
    entries = list(tx.range(*keys.entries_after(source, after), len(ids)))
    for ino, (key, value) in zip(ids, entries, strict=False):
        done.after = keys.entry_numbers(key)[1]
        child, _, name = decode_entry(value)
        original = namespace.find_inode(tx, child)
        if original is None:
            continue  # damage, which fsck names
        if name == SNAPSHOTS and original.is_dir:
            continue
        terms.require_readable(original)
        known = linked.get(child) or done.linked.get(child)
        if known:
            add_link(tx, known, target, name, ino)
        elif original.is_file and not (child in ready and can_be_shared(tx, original)):
            done.left.append(Unshared(child, target, name))
            continue
        else:
            _clone(tx, original, target, name, ino, terms, xattrs)
            inodes += 1
            if original.is_dir:
                done.directories.append((child, ino))
            elif original.nlink > 1:
                done.linked[child] = ino
    tx.add(keys.COUNTER_INODES, inodes)
    if done.directories:
        directory = namespace.get_inode(tx, target)
        if directory.nlink:  # else it is the top, which gets its links with its name
            directory.nlink += len(done.directories)
            namespace.put_inode(tx, directory)
    done.finished = len(entries) < len(ids)
    return done


@grows
def add_link(tx: Transaction, ino: int, directory: int, name: bytes, cookie: int) -> None:
    """Another name of a clone: its original has several in the tree."""
    inode = namespace.get_inode(tx, ino)
    inode.nlink, inode.parent = inode.nlink + 1, namespace.SEVERAL
    namespace.put_inode(tx, inode)
    namespace.put_name(tx, directory, name, inode, cookie)


@grows
def show_tree(
    tx: Transaction, ino: int, subdirectories: int, parent: int, name: bytes, cookie: int, now: int
) -> Inode:
    """Give a complete clone its name. Raises as namespace.create; Stale if another host has taken
    it for abandoned."""
    directory = namespace.require_free(tx, parent, name)
    doomed = dooming.find_doomed(tx, ino)
    if doomed is None or doomed.maker != tx.host:
        raise Stale("another host has taken the tree for abandoned")
    tx.delete(keys.doomed(ino))
    inode = namespace.get_inode(tx, ino)
    namespace.require_same_project(tx, directory, inode)  # it may have another one by now
    inode.nlink, inode.parent, inode.ctime_ns = 2 + subdirectories, parent, now
    if inode.flags & SNAPSHOT:
        tx.add(keys.COUNTER_GUARDED, 1)
    namespace.put_inode(tx, inode)
    namespace.put_name(tx, parent, name, inode, cookie)
    namespace.touch(tx, directory, now, links=1)
    return inode
