"""The part of a mount that a process reaches: all of it, or directories that are bound into its
container.

By names the kernel keeps a process there. Hints name directories by number, and calls of the ioctl
pass a read-only mount: these are kept there by what stands here. A process of the daemon's own
mount namespace has all; so has one of another PID namespace, which the daemon cannot see.
"""

import os
from collections.abc import Mapping
from typing import NamedTuple

from aifs.core import mountinfo
from aifs.core.errors import NotFound
from aifs.files.types import CallerLike
from aifs.meta import namespace
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode

_NAMESPACE = "/proc/{}/ns/mnt"


class Confined(NamedTuple):
    """A caller that has a part of the mount."""

    uid: int
    gid: int
    pid: int
    umask: int
    tops: Mapping[int, bool]
    """The directories that are bound into its container, by number: whether it may write there."""


class Views:
    """Finds the part of each caller. Not in force without a mount (''), and where a user has
    mounted: that user's daemon may not look at the processes of others."""

    def __init__(self, mountpoint: str) -> None:
        self._mountpoint = mountpoint if os.geteuid() == 0 else ""
        self._namespace = os.readlink(_NAMESPACE.format("self"))
        self._device = -1

    def of(self, caller: CallerLike) -> dict[str, bool] | None:
        """The paths from the root of the mount at which it is mounted for the caller, and whether
        writable; None: the caller has all. Does not block."""
        if not self._mountpoint or not caller.pid:
            return None
        device = self._own_device()  # while the mount is there: later there may be views alone
        found = dict[str, bool]()
        try:
            if os.readlink(_NAMESPACE.format(caller.pid)) == self._namespace:
                return None
            with open(f"/proc/{caller.pid}/mountinfo", "rb") as file:
                mounts = [mountinfo.parse_line(line) for line in file]
        except OSError:  # the daemon may not look
            return found
        for mount in mounts:
            if mount.device == device:
                found[mount.root] = found.get(mount.root, False) or "rw" in mount.options
        return None if found.get("/") else found

    def _own_device(self) -> int:
        if self._device < 0 and (own := mountinfo.mounted_at(self._mountpoint)) is not None:
            self._device = own.device
        return self._device


def confine(tx: ReadTransaction, caller: CallerLike, views: Mapping[str, bool]) -> Confined:
    """The caller with these of its views that are there."""
    tops = dict[int, bool]()
    for path, may_write in views.items():
        ino = ROOT_INO
        try:
            for name in filter(None, os.fsencode(path).split(b"/")):
                ino = namespace.get_dentry(tx, ino, name).ino
        except NotFound:
            continue
        tops[ino] = may_write
    return Confined(caller.uid, caller.gid, caller.pid, caller.umask, tops)


def has_all(caller: CallerLike) -> bool:
    return not isinstance(caller, Confined)


def reaches(tx: ReadTransaction, inode: Inode, caller: CallerLike) -> bool:
    """Whether an inode is in the caller's part. False for a file with several names."""
    return not isinstance(caller, Confined) or bool(_above(tx, inode, caller))


def may_write(tx: ReadTransaction, inode: Inode, caller: CallerLike) -> bool:
    """False if the caller has the inode by a read-only mount alone."""
    if not isinstance(caller, Confined) or all(caller.tops.values()):
        return True
    found = _above(tx, inode, caller)
    return not found or any(found)


def _above(tx: ReadTransaction, inode: Inode | None, caller: Confined) -> list[bool]:
    """Of the caller's directories those that are the inode or above: whether they are writable."""
    found = []
    while inode is not None:
        if inode.ino in caller.tops:
            found.append(caller.tops[inode.ino])
        at_root = inode.ino == ROOT_INO
        inode = None if at_root else namespace.find_inode(tx, inode.parent)
    return found
