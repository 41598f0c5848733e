"""Changes in place of files whose bytes lie in their inode, or in objects on data servers.

The order of steps that keeps each change safe is that of docs/metadata.md (I1 to I9 below are its
invariants). Callers hold the file's gate: shared for ``write``, alone for everything else.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import trio

from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.objects.holes import pieces_with_data
from aifs.data.objects.object_set import ObjectSet
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.damage import Damage
from aifs.files.open_inode import OpenInode
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import CHUNK
from aifs.layout.placement import ACTIVE, ALGORITHM, WEIGHTS, Candidate, spread
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.store.ids import IdAllocator

_log = logger(__name__)

_MARKED = faults.declare(
    "vfs.write.marked", "the dirty mark is in the journal, no byte has changed"
)
_WRITTEN = faults.declare("vfs.write.written", "objects have changed, the new size is not recorded")
_SPILLING = faults.declare(
    "vfs.spill.copied", "inline bytes are copied to objects, the inode still holds them"
)
_SHRUNK = faults.declare(
    "vfs.truncate.recorded", "the smaller size is durable, objects are not cut yet"
)
_DISCARDED = faults.declare(
    "vfs.truncate.discarded", "the file is empty, its old objects are garbage"
)
_SYNCED = faults.declare(
    "vfs.fsync.synced", "objects are synced, the dirty mark is not removed yet"
)


class CapacityIO:
    """The in-place side of ``FileIO``."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        servers: Servers,
        ids: IdAllocator,
        collector: Collector,
        damage: Damage,
        save: Callable[[OpenInode], Awaitable[None]],
    ) -> None:
        self._unit = config.layout.unit
        self._default = Redundancy(config.layout.replicas, *config.layout.ec)
        self._count = config.layout.count
        self._inline_limit = config.layout.inline_limit
        self._engine = engine
        self._servers = servers
        self._ids = ids
        self._collector = collector
        self._save = save
        self._damage = damage
        self.perhaps_mapped: set[int] = set()
        """Files whose one object programs could write to by themselves: a mapping may outlive its
        handle, and nothing tells when it ends. So their dirty marks stay, which keeps them from
        being staged or cached, until the next mount."""

    # --- writes ---

    def ready(self, file: OpenInode, end: int) -> bool:
        if file.inode.layout is None:
            return end <= self._inline_limit
        return file.dirty and file.trimmed

    async def prepare(self, file: OpenInode, end: int) -> None:
        """Bring the file into a form that can be written up to ``end``. The gate is held alone."""
        if file.inode.layout is None and end > self._inline_limit:
            await self._spill(file)
        elif self._is_fixed(file.inode):
            await self._restripe(file)
        if file.inode.layout is not None:
            await self._mark_dirty(file)
            await self._trim(file)

    async def write_inline(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        old, end = file.inode.data or b"", offset + len(data)
        await self._put_inline(file, b"".join((old[:offset].ljust(offset, b"\0"), data, old[end:])))

    async def _put_inline(self, file: OpenInode, data: bytes) -> None:
        inode = file.inode
        before = inode.data, inode.size, inode.blocks
        inode.data, inode.size, inode.blocks = data or None, len(data), _inline_blocks(data)
        file.changed(time.time_ns())
        try:
            await self._save(file)
        except BaseException:
            inode.data, inode.size, inode.blocks = before
            raise

    async def write_objects(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        inode = file.inode
        try:
            await file.objects.write(offset, data)
            faults.reach(_WRITTEN)
            file.changed(time.time_ns())
            if offset + len(data) > inode.size:
                await self._put_size(file, offset + len(data))
        except BaseException:
            file.trimmed = False  # part of it may lie beyond the size (I4)
            raise

    async def punch(self, file: OpenInode, offset: int, length: int) -> None:
        """The range, which lies below the size, reads as zeros, and takes no space on the servers.
        Raises NotSupported.
        """
        await file.objects.punch(offset, length)
        faults.reach(_WRITTEN)
        file.changed(time.time_ns())

    async def _put_size(self, file: OpenInode, size: int) -> None:
        before, file.inode.size = file.inode.size, size
        count_blocks(file)
        try:
            await self._save(file)
        except BaseException:
            file.inode.size = before
            raise

    async def _mark_dirty(self, file: OpenInode) -> None:
        if not file.dirty:
            had_checksums = await self._engine.transact(forms.put_dirty, file.inode)
            file.dirty = True
            file.unsaved = False
            faults.reach(_MARKED)
            if had_checksums:
                with trio.CancelScope(shield=True):
                    await (
                        self._engine.barrier()
                    )  # or a power cut brings them back, beside new bytes

    async def _trim(self, file: OpenInode) -> None:
        if not file.trimmed:
            await file.objects.trim(file.inode.size)
            file.trimmed = True

    async def _spill(self, file: OpenInode) -> None:
        """From empty or inline to striped."""
        inode = file.inode
        # A copy of inline bytes may fail and leave objects behind, so it takes an id that no later
        # attempt will use.
        own = inode.oid == 0 and not inode.data and self._ids.is_recent(inode.ino)
        oid = inode.ino if own else await self._ids.take()
        layout, due = self.place_plain(inode), self.redundancy(inode).is_protected
        objects = ObjectSet(self._servers, layout, inode.ino, oid, new=True)
        if inode.data:
            # The inline bytes may be durable already: they stay in the record until the objects
            # hold them durably. Until then the objects are on record as garbage, so that no crash
            # can leak them.
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
            await self._engine.transact(forms.put_spilled, spilled, due)
        except BaseException:
            objects.close()
            if inode.data:
                self._collector.add_garbage(oid)
            raise
        inode.oid, inode.layout, inode.data = oid, layout, None
        file.objects, file.dirty, file.trimmed, file.unsaved = objects, True, True, False
        if due:
            self._damage.due()
        faults.reach(_MARKED)

    async def _restripe(self, file: OpenInode) -> None:
        """From a form that is never changed in place to striped, without protection."""
        inode = file.inode
        oid, layout, due = (
            await self._ids.take(),
            self.place_plain(inode),
            self.redundancy(inode).is_protected,
        )
        objects = ObjectSet(self._servers, layout, inode.ino, oid, new=True)
        await self._engine.transact(forms.put_garbage, oid, inode.ino, layout)
        try:
            async for offset in pieces_with_data(file, inode.size, CHUNK):
                length = min(CHUNK, inode.size - offset)
                await objects.write(offset, await _read_settled(file, offset, length))
            await objects.settle(inode.size)
            await objects.sync()
            garbage = await self._engine.transact(forms.put_restriped, inode, oid, layout, due)
        except BaseException:
            objects.close()
            self._collector.add_garbage(oid)
            raise
        for old in garbage:
            self._collector.add_garbage(old)
        file.objects.close()
        inode.oid, inode.layout = oid, layout
        file.objects, file.dirty, file.trimmed, file.unsaved = objects, True, True, False
        if due:
            self._damage.due()

    @staticmethod
    def _is_fixed(inode: Inode) -> bool:
        """Whether the file's bytes cannot be changed where they are."""
        return inode.layout is not None and not inode.layout.in_place

    # --- placement ---

    def redundancy(self, inode: Inode) -> Redundancy:
        """What the file's policy asks for."""
        return (inode.policy or DEFAULT_POLICY).redundancy(self._default)

    def place(self, inode: Inode) -> Striped:
        """Where new objects of the file go, protected as its policy asks. If not even counting
        servers that do not work there are enough for that, unprotected."""
        policy, redundancy = inode.policy or DEFAULT_POLICY, self.redundancy(inode)
        candidates = self._candidates(inode)
        columns = redundancy.columns(policy.count or self._count, len(candidates))
        if len(candidates) < columns:
            # Columns on those that do not work are made elsewhere once they are known to lack.
            known = {candidate.id for candidate in candidates}
            others = [server.id for server in self._servers.capacity() if server.standing == ACTIVE]
            idle = [
                Candidate(number, f"server {number}", WEIGHTS[0])
                for number in others
                if number not in known
            ]
            candidates = sorted((*candidates, *idle[: columns - len(candidates)]))
        if not redundancy.is_protected or len(candidates) < columns:
            return self.place_plain(inode)
        servers = spread(ALGORITHM, inode.ino, candidates, columns, redundancy.replicas)
        return Striped(
            redundancy.unit(policy.unit or self._unit),
            servers,
            redundancy.replicas,
            redundancy.parity,
        )

    def place_plain(self, inode: Inode) -> Striped:
        """Where objects of the file go that are changed in place."""
        policy, candidates = inode.policy or DEFAULT_POLICY, self._candidates(inode)
        columns = min(policy.count or self._count or len(candidates), len(candidates))
        return Striped(policy.unit or self._unit, spread(ALGORITHM, inode.ino, candidates, columns))

    def _candidates(self, inode: Inode) -> Sequence[Candidate]:
        candidates = self._servers.candidates()
        allowed = (inode.policy or DEFAULT_POLICY).servers
        return [candidate for candidate in candidates if candidate.id in allowed] or candidates

    # --- size ---

    async def truncate(self, file: OpenInode, size: int) -> None:
        """A shrink in place waits for the journal (I6); a cut to zero only leaves garbage behind.
        The size is on record.
        """
        inode = file.inode
        if size == 0 and inode.layout is not None and not file.on_object:
            await self._discard(file)
        elif inode.layout is None and size <= self._inline_limit:
            await self._put_inline(file, (inode.data or b"")[:size].ljust(size, b"\0"))
            return
        elif size < inode.size:
            if self._is_fixed(inode):
                await self._restripe(file)
            await self._shrink(file, size)
        elif size > inode.size:
            await self._grow(file, size)
            return
        file.changed(time.time_ns())

    async def _grow(self, file: OpenInode, size: int) -> None:
        await self.prepare(file, size)
        file.trimmed = False  # until the new size counts, the objects are longer than it calls for
        await file.objects.settle(size)
        file.changed(time.time_ns())
        await self._put_size(file, size)
        file.trimmed = True

    async def _discard(self, file: OpenInode) -> None:
        inode = file.inode
        for oid in await self._engine.transact(forms.put_emptied, inode):
            self._collector.add_garbage(oid)
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
            # The file has its new size all the same (I4); it is trimmed before it grows, or settled
            # later.
            _log.info("inode %d keeps bytes beyond its size for now: %s", file.inode.ino, error)

    # --- durability ---

    async def settle(self, file: OpenInode) -> None:
        """Bring the objects to their exact lengths. Raises NoSpace, Unavailable."""
        if file.on_object and not file.inode.size:
            await file.objects.trim(0)  # programs read it, so it is not removed
        else:
            await file.objects.settle(file.inode.size)
        count_blocks(file)
        file.unsaved = True

    async def sync(self, file: OpenInode) -> None:
        """Bytes and attributes are on stable storage when this returns; takes the gate itself."""
        changes = file.changes
        if file.dirty:
            await file.gate.enter_alone()
            try:
                if file.objects is not None:
                    changes = file.changes
                    await self.settle(file)
            finally:
                file.gate.leave_alone()
        if file.unsaved:
            await self._save(file)
        objects = file.objects
        if objects is None or not file.dirty:
            await self._engine.barrier()
            return
        await run_all(lambda: objects.sync(all_objects=file.on_object), self._engine.barrier)
        faults.reach(_SYNCED)
        if file.inode.ino in self.perhaps_mapped or (file.on_object and not file.inode.size):
            return  # it may be changed without our knowing; or is not settled
        if file.dirty and file.changes == changes and file.objects is objects:
            await self._engine.transact(forms.remove_dirty, (file.inode.ino,))
            file.dirty = False


async def _read_settled(file: OpenInode, offset: int, length: int) -> memoryview:
    """Bytes of a file whose gate is held. Which of its columns must not be read may change
    meanwhile, and one that is being made anew then has anything in it."""
    while True:
        objects = file.objects
        data = await objects.read(offset, length, file.inode.size, True)
        if file.objects is objects:
            return data


def count_blocks(file: OpenInode) -> None:
    """Take the count of blocks over from the objects, if they know it."""
    blocks = file.objects.blocks() if file.objects is not None else None
    if blocks is not None:
        file.inode.blocks = blocks


def _inline_blocks(data: bytes | None) -> int:
    # Never 0 for a file with bytes: archivers take that for a file that is one hole.
    return (len(data or b"") + 511) // 512
