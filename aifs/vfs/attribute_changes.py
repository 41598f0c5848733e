"""What setattr(2) and its kind change in an inode, as functions that may be repeated."""

import stat
from typing import NamedTuple

from aifs.core import clock
from aifs.core.errors import AccessDenied, NotPermitted, NotSupported
from aifs.files.types import SetAttr
from aifs.meta import acl, keys, namespace
from aifs.meta.kv import Transaction
from aifs.meta.quotas import FIRST_PROJECT
from aifs.meta.records import (
    APPEND_ONLY,
    IMMUTABLE,
    INHERITS_PROJECT,
    SNAPSHOT,
    TRASHED,
    Inode,
)

CAPABILITIES = b"security.capability"


class AclChange(NamedTuple):
    """An ACL by the name of its attribute, and its new value, empty to remove it. ``kill_setgid``:
    the caller could not set that bit, so it must not remain."""

    name: bytes
    value: bytes
    kill_setgid: bool = False


def apply_changes(inode: Inode, changes: SetAttr) -> None:
    """Apply all ``changes`` except the size. As on Linux, a change of owner takes privileges
    away."""
    inode.require_unguarded()
    if changes.mode is not None:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode)
        if inode.acl:
            inode.acl = acl.after_chmod(inode.acl, inode.mode)
    elif changes.kill_privileges or changes.uid is not None or changes.gid is not None:
        inode.mode = inode.unprivileged_mode
    if changes.uid is not None:
        inode.uid = changes.uid
    if changes.gid is not None:
        inode.gid = changes.gid
    if changes.atime_ns is not None:
        inode.atime_ns = changes.atime_ns
    if changes.mtime_ns is not None:
        inode.mtime_ns = changes.mtime_ns
    inode.ctime_ns = changes.ctime_ns if changes.ctime_ns is not None else clock.kernel_ns()


def apply_acl(inode: Inode, change: AclChange) -> None:
    """What setfacl(1) and its kind do to mode and ACLs."""
    inode.require_unguarded()
    before = inode.mode, inode.acl, inode.default_acl
    if change.name == acl.DEFAULT:
        if change.value and not inode.is_dir:
            raise AccessDenied("only a directory has a default ACL")
        if change.value:
            acl.decode(change.value)
        inode.default_acl = change.value
    elif not change.value:
        inode.acl = b""
    else:
        inode.mode, inode.acl = acl.applied(change.value, inode.mode)
        if change.kill_setgid:
            inode.mode &= ~stat.S_ISGID
    if before != (inode.mode, inode.acl, inode.default_acl):
        inode.ctime_ns = clock.kernel_ns()


def apply_flags(inode: Inode, change: tuple[int, int]) -> None:
    """What chattr(1) does: flags, and project. Raises NotSupported, NotPermitted, ReadOnly."""
    flags, project = change
    if inode.flags & SNAPSHOT:
        inode.require_unguarded()
    known = IMMUTABLE | APPEND_ONLY | (INHERITS_PROJECT if inode.is_dir else 0)
    if flags & ~known:
        raise NotSupported("there are the flags i, a and, of directories, P")
    before = inode.project, inode.flags & INHERITS_PROJECT
    if before != (project, flags & INHERITS_PROJECT) and max(project, before[0]) >= FIRST_PROJECT:
        raise NotPermitted("its project is that of a quota, which root sets and removes")
    inode.flags, inode.project = inode.flags & TRASHED | flags, project
    inode.ctime_ns = clock.kernel_ns()


def has_capabilities(tx: Transaction, ino: int) -> bool:
    return tx.get(keys.xattr(ino, CAPABILITIES)) is not None


def kill_privileges(tx: Transaction, ino: int) -> Inode:
    """What a write must do to setuid, setgid and file capabilities."""
    inode = namespace.get_inode(tx, ino)
    tx.delete(keys.xattr(ino, CAPABILITIES))
    inode.mode = inode.unprivileged_mode
    inode.ctime_ns = clock.kernel_ns()
    namespace.put_inode(tx, inode)
    return inode
