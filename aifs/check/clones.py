"""The check of what clones share: the inodes that say so, and the ``C`` records, which are the
references. Part of the metadata scan.

An inode without its record would lose its bytes with the last of the others; a record without its
inode would keep them for ever. Both are mended before the store is recovered, which deletes what
nobody refers to.
"""

from collections.abc import Callable
from functools import partial

from aifs.check import repair
from aifs.check.findings import RECOVERY, Fix, Subject, View
from aifs.meta import keys, namespace
from aifs.meta.records import Inode

Report = Callable[[str, Subject, str, Fix | None, int], None]


class CloneCheck:
    """To be called in order: ``inode`` for all that share, ``record`` for all, ``conclude``."""

    def __init__(self, view: View, report: Report, is_readable: Callable[[int], bool]) -> None:
        self._view = view
        self._report = report
        self._is_readable = is_readable
        self.named: dict[int, int] = {}
        """By the id of what is shared, the inode number that its objects are named by."""
        self._first: dict[int, Inode] = {}  # by id, the first file that was met
        self._unrecorded: set[tuple[int, int]] = set()  # id and inode, records not met yet

    def inode(self, inode: Inode) -> None:
        """A file that shares its bytes."""
        oid = inode.oid
        self._unrecorded.add((oid, inode.ino))
        first = self._first.setdefault(oid, inode)
        self.named.setdefault(oid, inode.named)
        form = first.named, first.layout, first.size
        if form != (inode.named, inode.layout, inode.size):
            detail = f"inode {inode.ino}: it shares the bytes {oid} of inode {first.ino}, "
            self._report("shared-objects", inode.ino, detail + "and is not like it", None, RECOVERY)

    def shares(self, oid: int, ino: int) -> bool:
        """Whether this inode says that it shares ``oid``. Before the records."""
        return (oid, ino) in self._unrecorded

    async def record(self, key: bytes, value: bytes) -> None:
        reference = oid, ino = keys.clone_parts(key)
        if reference in self._unrecorded:
            self._unrecorded.discard(reference)
            return
        inode = await self._view(namespace.get_inode, ino) if self._is_readable(ino) else None
        if inode is not None and inode.oid == oid and inode.layout is not None:
            named = self.named.get(oid, ino)
            fix: Fix = partial(repair.share, oid=oid, inos=[ino], named=named)
            detail = f"inode {ino}: it would change the bytes {oid}, which others share"
            self._report("wrong-references", ino, detail, fix, RECOVERY)
        else:
            fix, detail = partial(repair.delete, key=key), f"inode {ino} does not have them"
            self._report("stray-record", f"shared bytes {oid}", detail, fix, RECOVERY)

    def conclude(self) -> None:
        for oid, ino in sorted(self._unrecorded):
            fix = partial(repair.share, oid=oid, inos=[ino], named=self.named[oid])
            detail = f"inode {ino}: nothing says that it shares the bytes {oid}"
            self._report("wrong-references", ino, detail, fix, RECOVERY)
