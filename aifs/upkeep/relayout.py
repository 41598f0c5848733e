"""Laying a striped file out anew: new objects, on other servers or with another redundancy, replace
the ones it has.

So a plain file gets the protection that its policy asks for (it was written in place, or stored
while there were too few servers), and a file leaves a server though it lies on all there are. As in
a drain, what is made is garbage on record until one transaction has the file consist of it; a file
that changes meanwhile stays as it is.
"""

from typing import Protocol

from aifs.burst.transfer import Limiter, Mover
from aifs.core import faults
from aifs.data.checking.checked_reads import LoadDigests
from aifs.data.objects.object_set import ObjectSet
from aifs.data.servers import Servers
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.transitions import Flip
from aifs.layout.striped import Striped
from aifs.meta.moves import SetRecord
from aifs.store.ids import IdAllocator

_COPIED = faults.declare(
    "vfs.relayout.copied", "new objects hold the bytes durably, they are on record as garbage"
)


class Subject(Protocol):
    """See mending.FileSubject."""

    file: OpenInode
    load: LoadDigests

    def is_unchanged(self) -> bool: ...

    def see(self) -> None: ...


class Relayout:
    """Used from one trio thread."""

    def __init__(
        self,
        servers: Servers,
        io: FileIO,
        ids: IdAllocator,
        limiter: Limiter,
        io_priority: str,
        spare: int,
    ) -> None:
        """``spare``: see ObjectSet.sync."""
        self.files = 0
        self._servers = servers
        self._io = io
        self._ids = ids
        self._mover = Mover(servers.budget, limiter, io_priority)
        self._io_priority = io_priority
        self._spare = spare

    async def lay_out(
        self, subject: Subject, before: SetRecord, unread: int, layout: Striped
    ) -> bool:
        """Whether the file is laid out so on return; not if it was changed meanwhile.

        ``unread``: mask of columns that must not be read. Raises Unavailable if bytes of it cannot
        be told, or are not those that were stored; NoSpace.
        """
        after = SetRecord(before.ino, await self._ids.take(), layout, before.size)
        file = subject.file

        async def make() -> Flip | None:
            new = ObjectSet(
                self._servers, layout, after.ino, after.oid, new=True, background=self._io_priority
            )
            old = self._source(subject, before, unread)
            try:
                digests = await self._mover.store_anew(
                    old,
                    before.size,
                    new,
                    self._servers[layout.servers[0]].workers,
                    lambda: not subject.is_unchanged(),
                    self._spare,
                    sparse=file.inode.blocks * 512 < before.size,
                )
                if digests is None:
                    return None
                lacking, blocks = new.unread, new.blocks() or 0
            finally:
                old.close()
                new.close()
            faults.reach(_COPIED)
            wanted = self._io.capacity.redundancy(file.inode)
            form = {"layout": layout, "oid": after.oid, "blocks": blocks}
            due = not layout.is_protected and wanted.is_protected
            return Flip(file, form, {"digests": digests, "lacking": lacking, "due": due})

        done = await self._io.transitions.change_form(file, after, make, subject.is_unchanged)
        if done:
            subject.see()
            self.files += 1
        return done

    def _source(self, subject: Subject, before: SetRecord, unread: int) -> ObjectSet:
        ino, oid, layout, _ = before
        return ObjectSet(
            self._servers,
            layout,
            ino,
            oid,
            background=self._io_priority,
            unread=unread,
            on_damage=self._io.damage.report,
            digests=subject.load,
        )
