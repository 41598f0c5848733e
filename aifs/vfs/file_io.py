"""The bytes of regular files: open inodes, reads, writes, truncation, fsync.

The forms of a file and the order of steps that keep each change safe are those of docs/metadata.md (I1 to
I9 below are its invariants). Only this module and ``writeback`` change a file's form.
"""

import time
from dataclasses import replace

from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FileTooLarge, FsError, NoSpace, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.servers import Servers
from aifs.data.striped import StripedObjects
from aifs.layout.hint import Policy
from aifs.layout.placement import ALGORITHM, place
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.kv import Engine
from aifs.meta.namespace import put_inode
from aifs.meta.records import Inode
from aifs.vfs.collector import Collector
from aifs.vfs.ids import IdAllocator
from aifs.vfs.open_inode import OpenInode
from aifs.vfs.types import SIZE_MAX

_log = logger(__name__)

_MARKED = faults.declare("vfs.write.marked", "the dirty mark is in the journal, no byte has changed")
_WRITTEN = faults.declare("vfs.write.written", "objects have changed, the new size is not recorded")
_SPILLING = faults.declare("vfs.spill.copied", "inline bytes are copied to objects, the inode still holds them")
_SHRUNK = faults.declare("vfs.truncate.recorded", "the smaller size is durable, objects are not cut yet")
_DISCARDED = faults.declare("vfs.truncate.discarded", "the file is empty, its old objects are garbage")
_SYNCED = faults.declare("vfs.fsync.synced", "objects are synced, the dirty mark is not removed yet")


class FileIO:
    """The table of open inodes, and everything that touches file bytes."""

    def __init__(
        self, config: Config, engine: Engine, servers: Servers, ids: IdAllocator, collector: Collector
    ) -> None:
        self._unit = config.layout.unit
        self._count = config.layout.count
        self._inline_limit = config.layout.inline_limit
        self._engine = engine
        self._servers = servers
        self._ids = ids
        self._collector = collector
        self.open: dict[int, OpenInode] = {}
        self.unsynced: dict[int, object | None] = {}
        """Files with a dirty mark that were closed since it was made: a token of that close, None if the
        objects could not be settled."""

    # --- open inodes ---

    async def acquire(self, ino: int) -> OpenInode:
        """The open inode of a regular file, with one more handle. Raises NotFound, Stale."""
        file = self.open.get(ino)
        if file is None:
            inode, dirty = await self._engine.view(forms.load, ino)
            if not inode.is_file:
                raise Stale(f"inode {ino} is not a regular file")
            file = self.open.get(ino)
            if file is None:
                file = self.open[ino] = OpenInode(inode, self._objects_of(inode), dirty)
        file.handles += 1
        return file

    def adopt_new(self, inode: Inode) -> OpenInode:
        """The open inode of a file that has just been created, with one handle."""
        file = self.open[inode.ino] = OpenInode(inode, None, dirty=False)
        file.handles = 1
        return file

    async def release(self, file: OpenInode) -> None:
        """Give one handle back; the last one brings the objects to their lengths and forgets the in-core state."""
        file.handles -= 1
        if file.handles:
            return
        ino = file.inode.ino
        await file.gate.enter_alone()
        try:
            if file.handles or self.open.get(ino) is not file:
                return
            token = None
            if file.inode.nlink and file.dirty:
                token = await self._settle_at_close(file)
            if file.handles:
                return
            if file.unsaved:
                await self.save(file)
            if file.handles:
                return
            del self.open[ino]
            if file.objects is not None:
                file.objects.close()
        finally:
            file.gate.leave_alone()
        if file.inode.nlink == 0:
            if file.forgotten:
                self._collector.add_orphan(ino)
        elif file.dirty:
            self.unsynced[ino] = token

    async def _settle_at_close(self, file: OpenInode) -> object | None:
        try:
            await file.objects.settle(file.inode.size)
            _count_blocks(file)
            file.unsaved = True
            return object()
        except FsError as error:
            # The dirty mark stays, so write-back, which says that it has to wait, or the next mount will try again.
            _log.info("inode %d could not be settled at close: %s", file.inode.ino, error)
            return None

    async def save(self, file: OpenInode) -> None:
        """Record the in-core attributes."""
        file.unsaved = False
        try:
            await self._engine.transact(put_inode, file.inode)
        except BaseException:
            file.unsaved = True
            raise

    async def save_all(self) -> None:
        """Record the in-core attributes of every open file."""
        for file in [f for f in self.open.values() if f.unsaved]:
            await self.save(file)

    def attributes(self, file: OpenInode) -> Inode:
        """The inode as stat(2) should show it now. Does not block: objects of an open file are local knowledge."""
        if file.dirty:
            _count_blocks(file)
            file.shown_blocks = file.inode.blocks
        return file.inode

    # --- reads and writes ---

    async def read(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes; fewer only at the end of the file. Raises Unavailable for lost bytes (I2)."""
        inode = file.inode
        while True:
            wanted = min(length, inode.size - offset)
            if wanted <= 0:
                return b""
            if inode.layout is None:
                return inode.data[offset : offset + wanted]
            objects, strict = file.objects, not file.dirty
            try:
                return await objects.read(offset, wanted, inode.size, strict)
            except Unavailable:
                overtaken = file.objects is not objects or (strict and file.dirty)
                if not overtaken:  # else a truncation went on meanwhile, and the bytes may rightly be gone
                    raise

    async def write(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        """All of ``data``, or an error: then none of it counts.

        The bytes are in the servers' page caches and a new size in the journal when this returns, so both survive
        the daemon's death, and close(2) has nothing left to do.
        """
        end = offset + len(data)
        if not data:
            return
        if end > SIZE_MAX:
            raise FileTooLarge()
        if self._engine.short_of_space and end > file.inode.size:
            raise NoSpace("the metadata store's filesystem is full")
        gate, inode = file.gate, file.inode
        await gate.enter_shared()
        while not self._ready(file, end):  # asked each time that we had to wait: others change the form too
            gate.leave_shared()
            await gate.enter_alone()
            try:
                await self._prepare(file, end)
            finally:
                gate.leave_alone()
            await gate.enter_shared()
        file.changes += 1
        try:
            if inode.layout is None:
                await self._write_inline(file, offset, data)
            else:
                await self._write_objects(file, offset, data)
        finally:
            gate.leave_shared()

    async def _write_inline(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        inode = file.inode
        old, end = inode.data or b"", offset + len(data)
        before = inode.data, inode.size, inode.blocks
        inode.data = b"".join((old[:offset].ljust(offset, b"\0"), data, old[end:]))
        inode.size = len(inode.data)
        inode.blocks = _inline_blocks(inode.data)
        file.changed(time.time_ns())
        try:
            await self.save(file)
        except BaseException:
            inode.data, inode.size, inode.blocks = before
            raise

    async def _write_objects(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        inode = file.inode
        try:
            await file.objects.write(offset, data)
            faults.reach(_WRITTEN)
            file.changed(time.time_ns())
            before, end = inode.size, offset + len(data)
            if end > before:
                inode.size = end
                _count_blocks(file)
                try:
                    await self.save(file)
                except BaseException:
                    inode.size = before
                    raise
        except BaseException:
            file.trimmed = False  # part of it may lie beyond the size (I4)
            raise

    def _ready(self, file: OpenInode, end: int) -> bool:
        if file.inode.layout is None:
            return end <= self._inline_limit
        return file.dirty and file.trimmed

    async def _prepare(self, file: OpenInode, end: int) -> None:
        """Bring the file into a form that can be written up to ``end``. The gate is held alone."""
        if file.inode.layout is None and end > self._inline_limit:
            await self._spill(file)
        if file.inode.layout is not None:
            await self._mark_dirty(file)
            await self._trim(file)

    async def _mark_dirty(self, file: OpenInode) -> None:
        if not file.dirty:
            await self._engine.transact(forms.put_dirty, file.inode)
            file.dirty = True
            file.unsaved = False
            faults.reach(_MARKED)

    async def _trim(self, file: OpenInode) -> None:
        if not file.trimmed:
            await file.objects.trim(file.inode.size)
            file.trimmed = True

    async def _spill(self, file: OpenInode) -> None:
        """From empty or inline to striped."""
        inode = file.inode
        # A copy of inline bytes may fail and leave objects behind, so it takes an id that no later attempt will use.
        own = inode.oid == 0 and not inode.data and self._ids.is_recent(inode.ino)
        oid = inode.ino if own else await self._ids.take()
        layout = self._place(inode)
        objects = StripedObjects(self._servers, layout, inode.ino, oid, new=True)
        if inode.data:
            # The inline bytes may be durable already: they stay in the record until the objects hold them
            # durably. Until then the objects are on record as garbage, so that no crash can leak them.
            await self._engine.transact(forms.put_garbage, oid, inode.ino, layout)
            try:
                await objects.write(0, inode.data)
                await objects.sync()
            except BaseException:
                objects.close()
                self._collector.add_garbage(oid)
                raise
            faults.reach(_SPILLING)
        spilled = replace(inode, oid=oid, layout=layout, data=None)
        try:
            await self._engine.transact(forms.put_spilled, spilled)
        except BaseException:
            objects.close()
            if inode.data:
                self._collector.add_garbage(oid)
            raise
        inode.oid, inode.layout, inode.data = oid, layout, None
        file.objects, file.dirty, file.trimmed, file.unsaved = objects, True, True, False
        faults.reach(_MARKED)

    def _place(self, inode: Inode) -> Striped:
        policy = inode.policy or Policy(self._unit, self._count, ())
        servers = policy.servers or self._servers.usable()
        return Striped(policy.unit or self._unit, place(ALGORITHM, inode.ino, servers, policy.count))

    # --- size ---

    async def truncate(self, file: OpenInode, size: int) -> None:
        """ftruncate(2). A shrink in place waits for the journal (I6); a cut to zero only leaves garbage behind."""
        if size > SIZE_MAX:
            raise FileTooLarge()
        inode = file.inode
        await file.gate.enter_alone()
        file.changes += 1
        try:
            if size == 0 and inode.layout is not None:
                await self._discard(file)
            elif inode.layout is None and size <= self._inline_limit:
                inode.data = (inode.data or b"")[:size].ljust(size, b"\0") or None
                inode.blocks = _inline_blocks(inode.data)
            elif size < inode.size:
                await self._shrink(file, size)
            elif size > inode.size:
                await self._grow(file, size)
            inode.size = size
            file.changed(time.time_ns())
        finally:
            file.gate.leave_alone()
        await self.save(file)

    async def _grow(self, file: OpenInode, size: int) -> None:
        await self._prepare(file, size)
        file.trimmed = False  # until the new size counts, the objects are longer than it calls for
        await file.objects.settle(size)
        file.trimmed = True

    async def _discard(self, file: OpenInode) -> None:
        inode = file.inode
        await self._engine.transact(forms.put_emptied, inode)
        self._collector.add_garbage(inode.oid)
        file.objects.close()
        inode.layout, inode.size, inode.blocks = None, 0, 0
        file.objects, file.dirty = None, False
        faults.reach(_DISCARDED)

    async def _shrink(self, file: OpenInode, size: int) -> None:
        old, file.inode.size = file.inode.size, size
        try:
            await self._engine.transact(forms.put_dirty, file.inode)
        except BaseException:
            file.inode.size = old
            raise
        file.dirty, file.trimmed, file.unsaved = True, False, False
        await self._engine.barrier()
        faults.reach(_SHRUNK)
        try:
            await self._trim(file)
        except FsError as error:
            # The file has its new size all the same (I4); it is trimmed before it grows, or settled later.
            _log.info("inode %d keeps bytes beyond its size for now: %s", file.inode.ino, error)

    # --- durability ---

    async def sync(self, file: OpenInode) -> None:
        """Bytes and attributes are on stable storage when this returns. Raises NoSpace, Unavailable."""
        changes = file.changes
        if file.dirty:
            await file.gate.enter_alone()
            try:
                if file.objects is not None:
                    changes = file.changes
                    await file.objects.settle(file.inode.size)
                    _count_blocks(file)
                    file.unsaved = True
            finally:
                file.gate.leave_alone()
        if file.unsaved:
            await self.save(file)
        objects = file.objects
        if objects is None or not file.dirty:
            await self._engine.barrier()
            return
        await run_all(objects.sync, self._engine.barrier)
        faults.reach(_SYNCED)
        if file.dirty and file.changes == changes and file.objects is objects:
            await self._engine.transact(forms.remove_dirty, (file.inode.ino,))
            file.dirty = False

    async def forget_marks(self, inos: list[int]) -> None:
        """Remove the dirty marks of closed files whose objects are settled and synced."""
        await self._engine.transact(forms.remove_dirty, inos)
        for ino in inos:
            self.unsynced.pop(ino, None)

    def _objects_of(self, inode: Inode) -> StripedObjects | None:
        if inode.layout is None:
            return None
        return StripedObjects(self._servers, inode.layout, inode.ino, inode.oid)


def _count_blocks(file: OpenInode) -> None:
    blocks = file.objects.blocks() if file.objects is not None else None
    if blocks is not None:
        file.inode.blocks = blocks


def _inline_blocks(data: bytes | None) -> int:
    # Never 0 for a file with bytes: archivers take that for a file that is one hole.
    return (len(data or b"") + 511) // 512
