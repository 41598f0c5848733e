"""Laying a striped file out anew as compressed chunks in containers.

It is what a drain of an interleaved file does, but that the bytes come from the file's objects. As
there, what has been appended counts only when one transaction has the file consist of it; a file
that changes meanwhile stays as it is. From then on it is a file like all others in containers.
"""

from collections.abc import Sequence

from aifs.core import faults
from aifs.core.errors import FsError
from aifs.data.containers.pieces import FileSource
from aifs.data.objects.settled import InObjects
from aifs.files.collector import Collector
from aifs.files.containers import LISTED_AT_ONCE, Containers, StoredFiles
from aifs.files.file_io import FileIO
from aifs.files.transitions import Flip, alone
from aifs.layout.interleaved import CHUNK, Interleaved
from aifs.layout.striped import Striped
from aifs.movers.movers import Movers
from aifs.store.ids import IdAllocator
from aifs.upkeep.relayout import Subject

_COPIED = faults.declare(
    "vfs.compress.copied", "containers hold all chunks durably, the file still has its objects"
)


class Compressing:
    """Used from one trio thread."""

    def __init__(
        self,
        io: FileIO,
        ids: IdAllocator,
        containers: Containers,
        collector: Collector,
        movers: Movers,
    ) -> None:
        self.files = 0
        self._io = io
        self._ids = ids
        self._containers = containers
        self._collector = collector
        self._movers = movers

    async def compress(self, subject: Subject, slots: Sequence[Striped], level: int) -> bool:
        """Whether the file lies in containers that are laid out like ``slots`` on return; not if it
        was changed meanwhile. ``level``: of zstd; chunks that it does not make smaller stay as they
        are.

        Raises Unavailable if bytes of it cannot be told, or are not those that were stored;
        NoSpace.
        """
        inode = subject.file.inode
        origin, oid = await self._io.capacity.describe(inode), await self._ids.take()
        if not subject.is_unchanged():
            return False
        assert isinstance(origin, InObjects)  # it is striped
        source = FileSource(inode.ino, oid, inode.size, origin, Interleaved(CHUNK), level)
        try:
            async with self._containers.append([source], slots, self._movers) as stored:
                faults.reach(_COPIED)
                done = await self._become(subject, source, stored)
        except FsError:
            if subject.is_unchanged():
                raise
            return False  # its bytes are others, or lie elsewhere
        if done:
            subject.see()
            self.files += 1
        return done

    async def _become(self, subject: Subject, source: FileSource, stored: StoredFiles) -> bool:
        """Have the file consist of what is stored, unless it has been changed."""
        [extents] = stored.lists
        is_long, done = len(extents) > LISTED_AT_ONCE, False
        try:
            if is_long:  # no transaction should take long
                await self._containers.list_extents(source.oid, extents, (), stored.lost)
            async with alone([subject.file]):
                if subject.is_unchanged():
                    form = {"layout": source.layout, "oid": source.oid}
                    flip = Flip(subject.file, form, {"extents": () if is_long else extents})
                    await self._io.transitions.flip([flip], stored.lost)
                    done = True
        finally:
            if is_long and not done:
                self._collector.add_garbage(source.oid)
        return done
