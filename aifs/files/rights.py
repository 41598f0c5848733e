"""The rules of hints: which callers may read, change or call one (files/asks.py).

The kernel checks extended attributes by mode alone, and ioctls not at all. So each request is
decided here, by its inode; names that it changes are checked in its transaction
(files/permissions.py), as the hint's row says. If a user has asked for a later removal, the daemon
acts with that user's rights then (``askers.Asker``), never with its own.
"""

import os
import stat
from collections.abc import Callable
from typing import Any

from aifs.core.errors import AccessDenied, NoAttribute, NotPermitted
from aifs.files.permissions import READ, SEARCH, WRITE, require_may, require_owner
from aifs.files.types import CallerLike
from aifs.files.views import has_all
from aifs.meta.records import Inode

Rule = Callable[[Inode, CallerLike], None]
"""Raises AccessDenied, NotPermitted or NoAttribute unless the caller may."""

_REASONS = {"error", "last_error", "reason"}


def sees_all(caller: CallerLike) -> bool:
    """Whether the caller may see everybody's files: root, and the user of the daemon, unless in a
    container that has a part of the mount."""
    return caller.uid in (0, os.geteuid()) and has_all(caller)


def anybody(inode: Inode, caller: CallerLike) -> None:
    """Each caller that could open it; files and names that are changed besides are checked."""


def reader(inode: Inode, caller: CallerLike) -> None:
    """Callers with read permission."""
    require_may(inode, caller, READ)


def lister(inode: Inode, caller: CallerLike) -> None:
    """Callers that may list the directory, and look at the files in it."""
    require_may(inode, caller, READ | SEARCH)


def writer(inode: Inode, caller: CallerLike) -> None:
    """Callers with write permission; in a sticky directory its owner alone, as in xattr(7)."""
    require_may(inode, caller, WRITE)
    if inode.is_dir and inode.mode & stat.S_ISVTX:
        require_owner(inode, caller)


def owner(inode: Inode, caller: CallerLike) -> None:
    """The owner and root: for hints that decide about other people's files, now or later."""
    require_owner(inode, caller)


def root(inode: Inode, caller: CallerLike) -> None:
    """The root user, except in a container that has a part of the mount: for hints that limit
    owners, or concern all files."""
    if caller.uid != 0 or not has_all(caller):
        raise NotPermitted("it is for the root user, where the whole store is mounted")


def overseer(inode: Inode, caller: CallerLike) -> None:
    """The root user and the user of the daemon: for reports about everybody's files."""
    if not sees_all(caller):
        raise AccessDenied("it is for the root user, and for the user that has mounted")


def mounter(inode: Inode, caller: CallerLike) -> None:
    """The root user and the user of the daemon: for hints that change the mount."""
    if not sees_all(caller):
        raise NotPermitted("it is for the root user, and for the user that has mounted")


def unreadable(inode: Inode, caller: CallerLike) -> None:
    """Nobody."""
    raise NoAttribute()


def unchangeable(inode: Inode, caller: CallerLike) -> None:
    """Nobody."""
    raise NotPermitted("this hint cannot be set")


def without_paths(state: dict[str, Any], caller: CallerLike) -> dict[str, Any]:
    """The status of a scrub or rebuild for this caller: only root sees paths, others inode
    numbers."""
    for entry in state.get("failed", ()):
        without_reason(entry, caller)
    if caller.uid != 0:
        for entry in state.get("wrong", ()):
            entry["paths"] = [f"inode {entry['inode']}"]
        for entry in state.get("failed", ()):
            entry["path"] = f"inode {entry['ino']}" if entry["ino"] else entry["path"]
    return state


def without_reason(part: dict[str, Any], caller: CallerLike) -> dict[str, Any]:
    """The status of a part for this caller. Users do not see why it fails: a file on a server may
    be named."""
    for key in _REASONS & part.keys():
        if part[key] and not sees_all(caller):
            part[key] = "only root may see why"
    return part
