"""The in-core state of a regular file while it is open, or while its size is being changed."""

from aifs.data.striped import StripedObjects
from aifs.meta.records import Inode
from aifs.vfs.gate import Gate


class OpenInode:
    """One per open inode, shared by all its handles.

    While it exists, ``inode`` is the truth about size, blocks, mtime, atime and the whereabouts of the bytes; the
    record in the store may lag behind (``unsaved``). Mode, owner, links and names are the store's; ``adopt`` takes
    them over after each transaction that changed them.

    ``dirty``: the dirty mark is in the store. ``trimmed``: no object holds bytes beyond the size, so the file may
    grow. ``changes`` counts modifications of the bytes, each before its first byte changes, so that a sync can tell
    whether another one has come since. ``shown_blocks``: the count of blocks that stat(2) showed since the last
    change, which may have been a guess; None if it was not asked for.
    """

    __slots__ = (
        "changes", "dirty", "forgotten", "gate", "handles", "inode", "objects", "shown_blocks", "trimmed", "unsaved",
    )  # fmt: skip

    def __init__(self, inode: Inode, objects: StripedObjects | None, dirty: bool) -> None:
        self.inode = inode
        self.objects = objects
        self.dirty = dirty
        self.trimmed = False
        self.unsaved = False
        self.forgotten = False
        self.changes = 0
        self.shown_blocks: int | None = None
        self.handles = 0
        self.gate = Gate()

    def adopt(self, stored: Inode) -> None:
        inode = self.inode
        inode.mode, inode.uid, inode.gid = stored.mode, stored.uid, stored.gid
        inode.nlink, inode.parent, inode.policy = stored.nlink, stored.parent, stored.policy
        inode.ctime_ns = max(inode.ctime_ns, stored.ctime_ns)

    def changed(self, now: int) -> None:
        """The bytes or the size have changed."""
        self.inode.mtime_ns = self.inode.ctime_ns = now
        self.shown_blocks = None
        self.unsaved = True
