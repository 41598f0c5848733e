"""Who may read and set which hint (vfs/hints.py), and who may call which ioctl: one table.

The kernel checks extended attributes before it asks, by mode alone, and ioctls not at all. So all
is decided here, by the inode that the request names. Where a request concerns names besides, the
transaction that changes them checks those as well (files/permissions.py); the table says so.
What the daemon removes later because somebody has asked for it, it removes with that one's rights
at that time (``askers.Asker``), never with its own.
"""

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from aifs.core import ioctl
from aifs.core.errors import AccessDenied, NoAttribute, NotPermitted
from aifs.core.ioctl import Command
from aifs.files.permissions import READ, SEARCH, WRITE, require_may, require_owner
from aifs.files.types import CallerLike
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import Inode

Rule = Callable[[Inode, CallerLike], None]
"""Raises AccessDenied, NotPermitted or NoAttribute for who may not."""


def sees_all(caller: CallerLike) -> bool:
    """Root, and who has mounted: they may be told about everybody's files."""
    return caller.uid in (0, os.geteuid())


def anybody(inode: Inode, caller: CallerLike) -> None:
    """Who has it open, for whatever."""


def reader(inode: Inode, caller: CallerLike) -> None:
    require_may(inode, caller, READ)


def lister(inode: Inode, caller: CallerLike) -> None:
    """Who may list a directory, and look at what is in it; it is there alone."""
    if not inode.is_dir:
        raise NoAttribute()
    require_may(inode, caller, READ | SEARCH)


def writer(inode: Inode, caller: CallerLike) -> None:
    """As xattr(7) has it: write permission, and of a sticky directory its owner alone."""
    require_may(inode, caller, WRITE)
    if inode.is_dir and inode.mode & stat.S_ISVTX:
        require_owner(inode, caller)


def owner(inode: Inode, caller: CallerLike) -> None:
    """The owner, or root: of what decides about other people's files, now or later."""
    require_owner(inode, caller)


def administrator(inode: Inode, caller: CallerLike) -> None:
    """The root user, on whatever: of what limits owners."""
    if caller.uid != 0:
        raise NotPermitted("it is for the root user")


def root(inode: Inode, caller: CallerLike) -> None:
    """The root user, on the mount's root."""
    if inode.ino != ROOT_INO or caller.uid != 0:
        raise NotPermitted("it is for the root user, on the mount's root directory")


def server(inode: Inode, caller: CallerLike) -> None:
    """Of what is about everybody's files."""
    if inode.ino != ROOT_INO:
        raise NoAttribute()
    if not sees_all(caller):
        raise AccessDenied("it is for the root user, and for who has mounted")


def mounter(inode: Inode, caller: CallerLike) -> None:
    """The root user, and who has mounted: of what changes the mount."""
    if inode.ino != ROOT_INO or not sees_all(caller):
        raise NotPermitted(
            "it is for the root user and who has mounted, on the mount's root directory"
        )


def top(inode: Inode, caller: CallerLike) -> None:
    """Readers of the mount's root; it is there alone."""
    if inode.ino != ROOT_INO:
        raise NoAttribute()
    reader(inode, caller)


def unreadable(inode: Inode, caller: CallerLike) -> None:
    raise NoAttribute()


def unchangeable(inode: Inode, caller: CallerLike) -> None:
    raise NotPermitted("this hint cannot be set")


class Right(NamedTuple):
    """Who may read a hint; who may set and remove it."""

    read: Rule
    change: Rule


HINTS: dict[bytes, Right] = {
    b"user.aifs.layout": Right(reader, owner),
    b"user.aifs.tier": Right(reader, owner),
    b"user.aifs.expected_size": Right(reader, owner),
    b"user.aifs.publish": Right(reader, owner),
    b"user.aifs.mirror": Right(reader, owner),
    b"user.aifs.state": Right(reader, unchangeable),
    b"user.aifs.sharing": Right(reader, unchangeable),
    b"user.aifs.drain": Right(reader, writer),
    b"user.aifs.stage": Right(unreadable, owner),
    b"user.aifs.evict": Right(unreadable, owner),
    b"user.aifs.remove": Right(unreadable, writer),  # and permissions.require_may_remove_tree
    b"user.aifs.pending": Right(reader, writer),  # and its owner, but to begin anew what nobody
    # goes on with (groups/protocol.py): who may write may remove what was left in it, too
    b"user.aifs.commit": Right(unreadable, writer),
    b"user.aifs.publish-as": Right(unreadable, anybody),  # but publish.require_may_publish
    b"user.aifs.keep": Right(reader, owner),
    b"user.aifs.shown": Right(reader, unchangeable),
    b"user.aifs.age": Right(reader, owner),
    b"user.aifs.trash": Right(reader, owner),
    b"user.aifs.trashed": Right(top, unchangeable),  # each is told his own
    b"user.aifs.trashed.N": Right(top, unchangeable),
    b"user.aifs.quota": Right(reader, administrator),
    b"user.aifs.quotas": Right(top, unchangeable),  # of directories that the caller may read
    b"user.aifs.quotas.N": Right(top, unchangeable),
    b"user.aifs.group": Right(reader, writer),  # pending=yes: as user.aifs.pending
    b"user.aifs.group.ID": Right(reader, unchangeable),
    b"user.aifs.group.commit": Right(unreadable, writer),
    b"user.aifs.refused": Right(anybody, unchangeable),  # each is told his own
    b"user.aifs.info": Right(reader, unchangeable),
    b"user.aifs.places.N": Right(lister, unchangeable),
    b"user.aifs.start": Right(lister, writer),
    b"user.aifs.order": Right(lister, lister),  # the kernel lets only who may write set it
    b"user.aifs.status": Right(top, unchangeable),
    b"user.aifs.servers": Right(top, unchangeable),
    b"user.aifs.hosts": Right(top, unchangeable),
    b"user.aifs.config": Right(server, mounter),
    b"user.aifs.fence": Right(unreadable, root),
    b"user.aifs.trace": Right(server, unchangeable),
    b"user.aifs.trace.N": Right(server, unchangeable),
    b"user.aifs.why": Right(reader, unchangeable),  # each is told his own, and drains
    b"user.aifs.why.PID": Right(reader, unchangeable),
    b"user.aifs.scrub": Right(top, root),
    b"user.aifs.atime": Right(unreadable, root),
    b"user.aifs.backup": Right(unreadable, root),
    b"user.aifs.server-add": Right(unreadable, root),
    b"user.aifs.burst-add": Right(unreadable, root),
    b"user.aifs.server-drain": Right(unreadable, root),
    b"user.aifs.server-replace": Right(unreadable, root),
    b"user.aifs.server-remove": Right(unreadable, root),
}

IOCTLS: dict[Command, Rule] = {
    ioctl.AIFS_IOC_VERSION: anybody,
    ioctl.AIFS_IOC_DRAIN: writer,
    ioctl.AIFS_IOC_REMOVE_TREE: anybody,  # but permissions.require_may_remove_tree
    ioctl.AIFS_IOC_PUBLISH: anybody,  # but publish.require_may_publish
    ioctl.AIFS_IOC_RESTORE: anybody,  # but his own alone, and to where he may make names
    ioctl.AIFS_IOC_EMPTY_TRASH: anybody,  # but his own alone
    ioctl.AIFS_IOC_COMMIT: writer,
    ioctl.AIFS_IOC_GROUP_CREATE: writer,
    ioctl.AIFS_IOC_GROUP_JOIN: writer,
    ioctl.AIFS_IOC_GROUP_COMMIT: writer,
    ioctl.AIFS_IOC_GROUP_WAIT: anybody,
    ioctl.AIFS_IOC_GROUP_CANCEL: writer,
    ioctl.AIFS_IOC_GROUP_QUERY: anybody,
    ioctl.AIFS_IOC_ORDER: lister,
    ioctl.AIFS_IOC_CLONE: anybody,  # but clones.Clones.clone, which asks of all below
}

_NONE = Right(unreadable, unchangeable)

_NUMBERED = {
    b"user.aifs.group": b"user.aifs.group.ID",
    b"user.aifs.trace": b"user.aifs.trace.N",
    b"user.aifs.trashed": b"user.aifs.trashed.N",
    b"user.aifs.places": b"user.aifs.places.N",
    b"user.aifs.quotas": b"user.aifs.quotas.N",
    b"user.aifs.why": b"user.aifs.why.PID",
}
"""Hints that may end with a number."""


def of_hint(name: bytes) -> Right:
    """That of a hint that does not exist lets nobody do anything."""
    stem, _, number = name.rpartition(b".")
    return HINTS.get(_NUMBERED.get(stem, name) if number.isdigit() else name, _NONE)
