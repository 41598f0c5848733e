"""Repairs of the metadata, as transaction functions (see meta/kv.py) on records alone.

Each may be repeated, after interruption, too. A nameless inode gets a name in /lost+found; nothing
with bytes is removed.
"""

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from aifs.check.table import find_dentry, find_entry_name, lost_name
from aifs.core import clock
from aifs.core.errors import FsError
from aifs.meta import chunks, forms, keys, namespace, restoring, shared, trash
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import (
    TRASHED,
    BurstRecord,
    Dentry,
    Inode,
    decode_burst,
    encode_entry,
)
from aifs.vfs.recovery import fresh_id, lost_and_found


def delete(tx: Transaction, key: bytes) -> None:
    tx.delete(key)


def put(tx: Transaction, key: bytes, value: bytes) -> None:
    tx.put(key, value)


def shift_counter(tx: Transaction, key: bytes, delta: int) -> None:
    tx.add(key, delta)


def change_inode(tx: Transaction, ino: int, changes: dict[str, Any]) -> None:
    inode = namespace.get_inode(tx, ino)
    for name, value in changes.items():
        setattr(inode, name, value)
    namespace.put_inode(tx, inode)


def share(tx: Transaction, oid: int, inos: Iterable[int], named: int) -> None:
    """These files share the objects, or the chunk list, ``oid``."""
    for ino in inos:
        change_inode(tx, ino, {"named": named})
        tx.put(keys.clone(oid, ino), b"")


def clear_trashed(tx: Transaction, ino: int) -> None:
    """It has a name, so it is not in the trash; its entry goes, and is not counted any more."""
    inode = namespace.get_inode(tx, ino)
    with suppress(FsError):
        trash.drop(tx, restoring.entry_of(tx, ino))
    inode.flags &= ~TRASHED
    namespace.put_inode(tx, inode)


# --- shared chunks --------------------------------------------------------------------------------


def shift_references(tx: Transaction, digest: bytes, change: int) -> None:
    """Correct the count of references of a shared chunk; one that nobody names goes."""
    known = shared.find_shared(tx, digest)
    if known is None:
        return  # recovery has taken the last ones
    if known.references + change > 0:
        shared.put_shared(tx, known._replace(references=known.references + change))
    else:
        tx.delete(keys.shared(digest))
        chunks.count_out(tx, [known.place])


# --- burst copies ---------------------------------------------------------------------------------


def record_copy(tx: Transaction, ino: int) -> None:
    """The record of the inode's burst copy, as the inode says."""
    inode = namespace.get_inode(tx, ino)
    if inode.copy is None:
        return
    try:
        record = decode_burst(tx.get(keys.burst_copy(inode.copy.id)) or b"")
    except FsError:
        record = BurstRecord(0, 0, False, False, inode.mtime_ns)
    durable = inode.in_burst or record.durable  # a lost cache is no loss
    namespace.put_copy(tx, ino, inode.copy, inode.in_burst, durable, record.since_ns)


def drop_copy(tx: Transaction, ino: int) -> None:
    """The file does without its cached copy, which is deleted."""
    inode = namespace.get_inode(tx, ino)
    if inode.copy is not None and not inode.in_burst:
        forms.put_without_copy(tx, ino, inode.copy.id)


def forget_copy(tx: Transaction, ino: int) -> None:
    """The same for a copy that is nowhere; an empty file needs none either."""
    inode = namespace.get_inode(tx, ino)
    if inode.copy is not None and (not inode.in_burst or inode.size == 0):
        tx.delete(keys.burst_copy(inode.copy.id))
        namespace.put_inode(tx, replace(inode, copy=None))


# --- names ----------------------------------------------------------------------------------------


def rewrite_name(tx: Transaction, parent: int, name: bytes, type_: int) -> None:
    """Give a dentry the right type, and its entry; the entry moves only if its place is taken."""
    dentry = namespace.get_dentry(tx, parent, name)
    _put_name(
        tx, parent, name, Dentry(dentry.ino, _usable_cookie(tx, parent, name, dentry.cookie), type_)
    )


def restore_name(tx: Transaction, parent: int, name: bytes, dentry: Dentry) -> None:
    """The dentry of an entry that has none."""
    cookie = _usable_cookie(tx, parent, name, dentry.cookie)
    _put_name(tx, parent, name, dentry._replace(cookie=cookie))


def remove_name(tx: Transaction, parent: int, name: bytes) -> None:
    """A name and its entry; link counts are mended by themselves."""
    dentry = find_dentry(tx, parent, name)
    if dentry is not None:
        tx.delete(keys.dentry(parent, name))
        if not is_taken(tx, parent, dentry.cookie, name):
            tx.delete(keys.entry(parent, dentry.cookie))


def _put_name(tx: Transaction, parent: int, name: bytes, dentry: Dentry) -> None:
    tx.put(keys.dentry(parent, name), dentry.encode())
    tx.put(keys.entry(parent, dentry.cookie), encode_entry(dentry.ino, dentry.type, name))


def is_taken(tx: ReadTransaction, parent: int, cookie: int, name: bytes) -> bool:
    """Whether the place of ``name`` in the listing is that of another name."""
    other = find_entry_name(tx, parent, cookie)
    if other is None or other == name:
        return False
    dentry = find_dentry(tx, parent, other)
    return dentry is not None and dentry.cookie == cookie


def _usable_cookie(tx: Transaction, parent: int, name: bytes, cookie: int) -> int:
    """``cookie``; or a fresh one if it is another name's, or was never given (that entry goes)."""
    if is_taken(tx, parent, cookie, name):
        return fresh_id(tx)
    if 0 < cookie < tx.counter(keys.COUNTER_IDS):
        return cookie
    tx.delete(keys.entry(parent, cookie))
    return fresh_id(tx)


# --- lost names and inodes ------------------------------------------------------------------------


def restore_directory(tx: Transaction, ino: int, parent: int, links: int) -> None:
    """Give a missing directory an inode, for root; ``parent`` 0: in /lost+found."""
    now = clock.kernel_ns()
    mode = stat.S_IFDIR | (0o755 if ino == keys.ROOT_INO else 0o700)
    inode = Inode(ino, mode, os.getuid(), os.getgid(), links, 0, 0, 0, now, now, now, parent=parent)
    if tx.get(keys.inode(ino)) is None:
        tx.add(keys.COUNTER_INODES, 1)
    namespace.put_inode(tx, inode)
    if parent == 0:
        attach(tx, ino, links)


def attach(tx: Transaction, ino: int, links: int) -> None:
    """Name the inode #INO in /lost+found, with ``links`` as its link count."""
    now = clock.kernel_ns()
    inode = namespace.get_inode(tx, ino)
    lost = lost_and_found(tx, now)
    name, suffix = lost_name(ino), 0
    while tx.get(keys.dentry(lost.ino, name)) is not None:
        suffix += 1
        name = b"%s.%d" % (lost_name(ino), suffix)
    _put_name(tx, lost.ino, name, Dentry(ino, fresh_id(tx), inode.mode >> 12))
    tx.delete(keys.orphan(ino))
    inode.parent, inode.nlink, inode.ctime_ns = lost.ino, links, now
    inode.flags &= ~TRASHED
    namespace.put_inode(tx, inode)
    lost.nlink += inode.is_dir
    lost.mtime_ns = lost.ctime_ns = now
    namespace.put_inode(tx, lost)
