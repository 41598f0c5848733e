"""Laying a striped file out anew: other servers, redundancy, or compression.

So a plain file gets its policy's protection, a file on all servers leaves one, an old file moves to
another class or into containers. As in a drain, new objects are garbage on record until one
transaction; appended chunks count from then on; a file that changes meanwhile stays as it is.
"""

from collections.abc import Sequence

from aifs.burst.making import Made, Making, NewObjects
from aifs.burst.pool import Movers
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.data.containers.pieces import FileSource
from aifs.data.objects.holes import InObjects
from aifs.files.containers import StoredFiles
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.files.transitions import Flip, alone
from aifs.layout.interleaved import CHUNK, Interleaved
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.kv import Engine
from aifs.meta.moves import SetRecord
from aifs.store.ids import IdAllocator

_COPIED = faults.declare(
    "vfs.relayout.copied", "new objects hold the bytes durably, they are on record as garbage"
)
_COMPRESSED = faults.declare(
    "vfs.compress.copied", "containers hold all chunks durably, the file still has its objects"
)


class FileSubject:
    """A striped file, as it is while we hold a handle on its in-core state."""

    def __init__(self, io: FileIO, engine: Engine, file: OpenInode) -> None:
        self.file = file
        self._engine = engine
        self._io = io
        io.table.handles.drop_kept(file)
        self.see()

    async def digests(self) -> bytes:
        return (await self._engine.view(forms.describe_objects, self.file.inode.oid))[1]

    async def live(self) -> None:
        return None

    def see(self) -> None:
        """Changes are those from now on."""
        self._seen: tuple[object, ...] | None = self._now()

    def _now(self) -> tuple[object, ...]:
        file = self.file
        return file.changes, file.objects, file.inode.oid, file.inode.layout

    @property
    def is_busy(self) -> bool:
        """Whether programs may change it in place unseen, or read it in place, also by later
        mappings."""
        file = self.file
        may_be_mapped = file.copy is None and file.kept != 0
        return file.marked or file.on_object or file.on_source or may_be_mapped

    def is_unchanged(self) -> bool:
        if self.is_busy or self._seen != self._now():
            self._seen = None  # for good: a caller that has seen it has left out a part of the work
        return self._seen is not None

    async def flip(self, before: SetRecord, column: int, server: int, unread: int) -> bool:
        async with alone([self.file]):
            if not self.is_unchanged():
                return False
            done = await self._io.transitions.move_column(self.file, before, column, server, unread)
            if done:
                self.see()
                self._io.table.overtake_objects(before.oid, but=self.file)
            return done


class Relayout:
    """Lays files out anew: in other objects, or as compressed chunks. Used from one trio
    thread."""

    def __init__(self, io: FileIO, ids: IdAllocator, movers: Movers, spare: int) -> None:
        """``spare``: see ObjectSet.sync."""
        self.files = 0
        """How many have another layout, since the mount."""
        self.compressed = 0
        """How many of these are compressed."""
        self._io = io
        self._ids = ids
        self._movers = movers
        self._spare = spare

    async def lay_out(self, subject: FileSubject, layout: Striped) -> bool:
        """Whether the file has this layout now; not if changed meanwhile. Raises Unavailable if
        bytes are missing, or not as stored; NoSpace."""
        file, inode = subject.file, subject.file.inode
        if await self._io.table.handles.is_used(file):
            return False  # a mapping would not see what is changed later
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

    async def compress(self, subject: FileSubject, slots: Sequence[Striped], level: int) -> bool:
        """Whether the file is in containers of ``slots`` now; not if changed meanwhile. ``level``:
        of zstd; incompressible chunks stay. Raises Unavailable if bytes are missing, or not as
        stored; NoSpace."""
        inode = subject.file.inode
        if await self._io.table.handles.is_used(subject.file):
            return False  # as above
        origin, oid = await self._io.capacity.describe(inode), await self._ids.take()
        if not subject.is_unchanged():
            return False
        assert isinstance(origin, InObjects)  # it is striped
        source = FileSource(inode.ino, oid, inode.size, origin, Interleaved(CHUNK), level)
        try:
            async with self._io.containers.append([source], slots, self._movers) as stored:
                faults.reach(_COMPRESSED)
                done = await self._become(subject, source, stored)
        except FsError:
            if subject.is_unchanged():
                raise
            return False  # its bytes are others, or lie elsewhere
        if done:
            subject.see()
            self.files += 1
            self.compressed += 1
        return done

    async def _become(self, subject: FileSubject, source: FileSource, stored: StoredFiles) -> bool:
        [extents] = stored.lists
        transitions = self._io.transitions
        try:
            extents = await transitions.list_extents(source.oid, extents, (), stored.lost)
            async with alone([subject.file]):
                if not subject.is_unchanged():
                    return False
                form = {"layout": source.layout, "oid": source.oid}
                flip = Flip(subject.file, form, {"extents": extents})
                await transitions.flip([flip], stored.lost)
                return True
        finally:
            transitions.end_making(source.oid)
