"""Laying a striped file out anew: new objects, on other servers or with another redundancy, replace
the ones it has.

So a plain file gets the protection that its policy asks for (it was written in place, or stored
while there were too few servers), and a file leaves a server though it lies on all there are. As in
a drain, what is made is garbage on record until one transaction has the file consist of it; a file
that changes meanwhile stays as it is.
"""

from typing import Protocol

from aifs.burst.making import Made, Making, NewObjects
from aifs.core import faults
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.transitions import Flip
from aifs.layout.striped import Striped
from aifs.movers.movers import Movers
from aifs.store.ids import IdAllocator

_COPIED = faults.declare(
    "vfs.relayout.copied", "new objects hold the bytes durably, they are on record as garbage"
)


class Subject(Protocol):
    """See mending.FileSubject."""

    file: OpenInode

    def is_unchanged(self) -> bool: ...

    def see(self) -> None: ...


class Relayout:
    """Used from one trio thread."""

    def __init__(self, io: FileIO, ids: IdAllocator, movers: Movers, spare: int) -> None:
        """``spare``: see ObjectSet.sync."""
        self.files = 0
        self._io = io
        self._ids = ids
        self._movers = movers
        self._spare = spare

    async def lay_out(self, subject: Subject, layout: Striped) -> bool:
        """Whether the file is laid out so on return; not if it was changed meanwhile.

        Raises Unavailable if bytes of it cannot be told, or are not those that were stored;
        NoSpace.
        """
        file, inode = subject.file, subject.file.inode
        target = NewObjects(inode.ino, await self._ids.take(), layout)

        async def describe() -> Making:
            origin = await self._io.capacity.describe(inode)
            sparse = inode.blocks * 512 < inode.size
            return Making(origin, target, inode.size, sparse, spare=self._spare)

        def becomes(made: Made) -> Flip:
            faults.reach(_COPIED)
            wanted = self._io.capacity.redundancy(inode)
            form = {"layout": layout, "oid": target.oid, "blocks": made.blocks}
            due = not layout.is_protected and wanted.is_protected
            record = {"digests": made.digests, "unread": made.unread, "due": due}
            return Flip(file, form, record)

        done = await self._io.transitions.change_form(
            file, describe, self._movers, becomes, subject.is_unchanged
        )
        if done:
            subject.see()
            self.files += 1
        return done
