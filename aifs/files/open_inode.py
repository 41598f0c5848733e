"""The in-core state of a regular file while it is open, or while its bytes are being moved or its
size changed.
"""

from typing import Protocol

from aifs.burst.copy import BurstCopy
from aifs.data.objects.object_set import Bytes
from aifs.files.gate import Gate
from aifs.meta.records import Inode


class Drain(Protocol):
    """A drain of the file that is under way, or a sync; both hold a lease on the burst copy."""

    def cancel(self) -> None:
        """It must not count any more. Does not block; others may write to the burst copy when this
        returns.
        """


class OpenInode:
    """One per open inode, shared by all its handles.

    While it exists, ``inode`` is the truth about size, blocks, mtime, atime and the whereabouts of
    the bytes; the record in the store may lag behind (``unsaved``). Mode, ACL, owner, flags, links
    and names are the store's; ``adopt`` takes them over after each transaction that changed them.

    ``objects`` are those of a striped file, or the chunks of an interleaved one; ``copy`` is the
    burst copy. ``dirty``: the dirty mark is in the store. ``trimmed``: no object holds bytes beyond
    the size, so the file may grow. ``changes`` counts modifications of the bytes, each before its
    first byte changes, so that a sync or a drain can tell whether another one has come since.
    ``shown``: mtime and blocks that stat(2) showed since the last change, which may have been a
    guess; None if it was not asked for.

    ``handles`` counts all who need the in-core state, ``users`` the open handles of programs among
    them, ``writers`` those that can write. ``backing`` is the kernel's id of the local file that
    the users' handles are passed through to; 0 while they are not, and then none of them is. That
    is the burst copy, or, with ``on_object``, the one object of a striped file, which the file then
    has to stay. ``copy_mtime_ns`` is the copy's mtime when it was last looked at; 0: it was not.
    ``copy_is_durable``: it is on record as such, as far as we know. ``marked_seq``: the transaction
    that put the dirty mark on a file that was in order. ``synced_mtime_ns``: the copy's mtime when
    the file was last synced. ``used``: somebody has used the bytes since descriptors were last closed for want
    of them.
    """

    __slots__ = (
        "backing",
        "changes",
        "copy",
        "copy_is_durable",
        "copy_mtime_ns",
        "dirty",
        "drain",
        "forgotten",
        "gate",
        "handles",
        "inode",
        "marked_seq",
        "objects",
        "on_object",
        "shown",
        "synced_mtime_ns",
        "trimmed",
        "unsaved",
        "used",
        "users",
        "writers",
    )

    def __init__(self, inode: Inode, objects: Bytes | None, dirty: bool) -> None:
        self.inode = inode
        self.objects = objects
        self.copy: BurstCopy | None = None
        self.dirty = dirty
        self.trimmed = False
        self.unsaved = False
        self.forgotten = False
        self.changes = 0
        self.shown: tuple[int, int] | None = None
        self.handles = self.users = self.writers = 0
        self.backing = 0
        self.on_object = False
        self.copy_mtime_ns = 0
        self.copy_is_durable = False
        self.synced_mtime_ns = 0
        self.marked_seq = 0
        self.drain: Drain | None = None
        self.used = True
        self.gate = Gate()

    def adopt(self, stored: Inode) -> None:
        """Transactions may come here in another order than that in which they count: what is older
        than what has been taken over changes nothing."""
        inode = self.inode
        if stored.seq < inode.seq:
            return
        inode.seq = stored.seq
        inode.mode = stored.unprivileged_mode if inode.stripped else stored.mode
        inode.uid, inode.gid = stored.uid, stored.gid
        inode.nlink, inode.parent, inode.policy = stored.nlink, stored.parent, stored.policy
        inode.acl, inode.default_acl = stored.acl, stored.default_acl
        inode.flags, inode.project = stored.flags, stored.project
        inode.ctime_ns = max(inode.ctime_ns, stored.ctime_ns)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """As Bytes.data_range, of whatever holds the bytes, which may be replaced
        meanwhile.
        """
        while True:
            objects = self.objects
            if self.inode.in_burst:
                return await self.copy.data_range(offset, size)
            if objects is None:
                return offset, size
            found = await objects.data_range(offset, size, strict)
            if self.objects is objects:
                return found

    def close_idle(self) -> int:
        """Close descriptors, which are opened again when they are needed, if only handles of
        programs need the file and no call uses it; how many. Does not block."""
        if self.handles > self.users or not self.gate.is_free or self.drain is not None:
            return 0
        closed = 0 if self.objects is None else self.objects.close_idle()
        return closed if self.copy is None else closed + self.copy.close_idle()

    def changed(self, now: int) -> None:
        """The bytes or the size have changed."""
        self.inode.mtime_ns = self.inode.ctime_ns = now
        self.shown = None
        self.unsaved = True

    def cancel_drain(self) -> None:
        """The bytes are about to change, or to go: what a drain has copied must not count."""
        if self.drain is not None:
            self.drain.cancel()
            self.drain = None
