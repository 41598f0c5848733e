"""Changes in place of files whose bytes lie in their inode, or in objects on data servers.

The order of steps, and the invariants I1 to I9 below, are in docs/design/metadata.md. Callers hold
the file's gate: shared for ``write``, alone for everything else.
"""

import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from aifs.burst.making import Made, Making, NewObjects, Origin
from aifs.burst.pool import Movers
from aifs.core import clock, faults
from aifs.core.config import Config
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.objects.holes import InObjects
from aifs.data.objects.object_set import ObjectSet
from aifs.data.servers import Servers
from aifs.files.containers import Containers
from aifs.files.open_inode import OpenInode
from aifs.files.transitions import Flip, Transitions, alone
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.placement import ALGORITHM, WEIGHTS, Candidate, spread
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
_COPIED = faults.declare(
    "vfs.spill.copied", "a file's bytes are in new objects, the inode still holds the old ones"
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
        containers: Containers,
        transitions: Transitions,
        movers: Movers,
    ) -> None:
        """``movers``: for changes that somebody waits for."""
        self._unit = config.layout.unit
        self._default = Redundancy(config.layout.replicas, *config.layout.ec)
        self._count = config.layout.count
        self._stripe_above = config.layout.stripe_above
        self._inline_limit = config.layout.inline_limit
        self._engine = engine
        self._servers = servers
        self._ids = ids
        self._containers = containers
        self._transitions = transitions
        self._movers = movers
        self.perhaps_mapped: dict[int, int] = {}
        """Files whose one object programs may have mapped: no call tells when a mapping ends. So
        their dirty marks stay until the next mount. With the object's mtime as last seen, or 0."""

    async def describe(self, inode: Inode) -> Origin:
        """Where the bytes of a settled file are on the capacity tier. Raises Unavailable."""
        if inode.chunks is not None:
            return await self._containers.describe(inode.chunks, inode.oid, inode.size)
        assert inode.read_as is not None  # what is not cut into chunks is read so
        of = InObjects(inode.named_by, inode.oid, inode.read_as)
        unread, digests = await self._engine.view(forms.describe_objects, of.oid)
        return of._replace(unread=unread, digests=digests)

    # --- writes ---

    def ready(self, file: OpenInode, end: int) -> bool:
        if file.inode.layout is None:
            return end <= self._inline_limit
        return file.marked and file.trimmed

    async def prepare(self, file: OpenInode, end: int) -> None:
        """Bring the file into a form that can be written up to ``end``. The gate is held alone."""
        if file.inode.layout is None and end > self._inline_limit:
            await self._spill(file)
        elif self._is_fixed(file.inode):
            await self._restripe(file)
        if file.inode.layout is not None:
            if not file.marked:
                await self._transitions.mark(file)
                faults.reach(_MARKED)
            await self._trim(file)

    async def write_inline(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        end = offset + len(data)

        def written(old: bytes) -> bytes:
            return b"".join((old[:offset].ljust(offset, b"\0"), data, old[end:]))

        await self._transitions.put_inline(file, written)

    async def append_inline(self, file: OpenInode, data: bytes | memoryview) -> None:
        """Raises ChangedElsewhere, also where another host has left no room for that."""

        def appended(old: bytes) -> bytes:
            if len(old) + len(data) > self._inline_limit:
                raise forms.ChangedElsewhere(f"inode {file.inode.ino} has grown on another host")
            return b"".join((old, data))

        await self._transitions.put_inline(file, appended)

    async def write_objects(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        inode = file.inode
        # What has been prepared is striped. To ask each time would slow writes down.
        objects: ObjectSet = file.objects  # type: ignore[assignment]
        try:
            await objects.write(offset, data)
            faults.reach(_WRITTEN)
            file.changed(clock.kernel_ns())
            if offset + len(data) > inode.size:
                count_blocks(file)
                await self._transitions.grow(file, offset + len(data))
        except BaseException:
            file.trimmed = False  # part of it may lie beyond the size (I4)
            raise

    async def punch(self, file: OpenInode, offset: int, length: int) -> None:
        """Zero a range below the size, and free its space on the servers. Raises NotSupported."""
        await file.own_objects.punch(offset, length)
        faults.reach(_WRITTEN)
        file.changed(clock.kernel_ns())

    async def _trim(self, file: OpenInode) -> None:
        if not file.trimmed:
            await file.own_objects.trim(file.inode.size)
            file.trimmed = True

    async def _spill(self, file: OpenInode) -> None:
        """Make an empty or inline file striped. Its few bytes are written here: handing a Making
        over would cost more."""
        inode = file.inode
        # A copy of inline bytes may fail and leave objects behind, so it takes an id that no later
        # attempt will use.
        own = inode.oid == 0 and not inode.data and self._ids.is_recent(inode.ino)
        oid = inode.ino if own else await self._ids.take()
        target = NewObjects(inode.ino, oid, self._place_to_change(inode))
        flip = self._in_objects(file, target)
        objects = ObjectSet(self._servers, target.layout, target.ino, target.oid, new=True)
        flip.objects = objects
        if not inode.data:  # nothing is made before the record names it
            await self._transitions.flip([flip])
            return
        try:
            async with self._transitions.making(target):
                # The inline bytes may be durable already: they stay in the record until the objects
                # hold them durably.
                await objects.write(0, inode.data)
                await objects.sync()
                faults.reach(_COPIED)
                await self._transitions.flip([flip])
        finally:
            if file.objects is not objects:
                objects.close()
        faults.reach(_MARKED)

    async def _restripe(self, file: OpenInode) -> None:
        # Which columns must not be read may change meanwhile, and one that is being made anew then
        # has anything in it.
        while not await self._restripe_once(file):
            pass

    async def _restripe_once(self, file: OpenInode) -> bool:
        """Whether it was done; not if its objects are read in another way now."""
        inode, objects = file.inode, file.objects
        oid = await self._ids.take()
        target = NewObjects(inode.ino, oid, self._place_to_change(inode))

        async def describe() -> Making:
            return Making(await self.describe(inode), target, inode.size, sparse=True)

        def becomes(made: Made) -> Flip:
            faults.reach(_COPIED)
            return self._in_objects(file, target, blocks=made.blocks)

        return await self._transitions.change_form(
            file, describe, self._movers, becomes, lambda: file.objects is objects, is_alone=True
        )

    def _in_objects(self, file: OpenInode, target: NewObjects, **form: Any) -> Flip:
        form |= {"oid": target.oid, "layout": target.layout, "data": None}
        due = self.redundancy(file.inode).is_protected
        return Flip(file, form, {"marked": True, "due": due})

    def is_changed_in_place(self, file: OpenInode) -> bool:
        """Whether its bytes are changed where they are, on data servers."""
        inode = file.inode
        return inode.layout is not None and not inode.in_burst and not self._is_fixed(inode)

    def _is_fixed(self, inode: Inode) -> bool:
        """Whether the file's bytes cannot be changed where they are."""
        if inode.layout is None:
            return False
        if inode.named:
            return True  # they are also what clones of it have
        objects = inode.layout.objects
        if objects is None or objects.is_protected:
            return True  # chunks, pins, and what protects each other: all are written once
        return not self._servers.in_place(objects.servers)

    def may_change(self, inode: Inode, end: int) -> bool:
        """Whether the file can be changed outside of the burst tier, up to ``end``: in place, or in
        new objects (not if all servers allowed write objects once)."""
        if self._servers.all_in_place or (inode.layout is None and end <= self._inline_limit):
            return True
        if inode.layout is not None and not self._is_fixed(inode):
            return True
        return bool(self._changeable(inode))

    # --- placement ---

    def redundancy(self, inode: Inode) -> Redundancy:
        """What the file's policy asks for."""
        return (inode.policy or DEFAULT_POLICY).redundancy(self._default)

    def place(self, inode: Inode, beside: Collection[int] = (), storage_class: str = "") -> Striped:
        """Choose servers for new objects of the file, with the protection of its policy.

        If too few servers exist for that, unprotected. Servers ``beside`` have no room and come
        last. A ``storage_class`` must have a candidate; its servers count, whatever the policy
        allows.
        """
        policy, redundancy = inode.policy or DEFAULT_POLICY, self.redundancy(inode)
        candidates = (
            self._servers.candidates(storage_class) if storage_class else self._candidates(inode)
        )
        candidates = [c for c in candidates if c.id not in beside] or candidates
        columns = redundancy.columns(policy.count or self._count, len(candidates))
        if len(candidates) < columns:
            # Columns on those that do not work are made elsewhere once they are known to be
            # missing.
            known = {candidate.id for candidate in candidates}
            others = [server.id for server in self._servers.of_class(storage_class)]
            idle = [
                Candidate(number, f"server {number}", WEIGHTS[0])
                for number in others
                if number not in known
            ]
            candidates = sorted((*candidates, *idle[: columns - len(candidates)]))
        if not redundancy.is_protected or len(candidates) < columns:
            return self._spread(inode, candidates, inode.size)
        servers = spread(ALGORITHM, inode.ino, candidates, columns, redundancy.replicas)
        return Striped(
            redundancy.unit(policy.unit or self._unit),
            servers,
            redundancy.replicas,
            redundancy.parity,
        )

    def _place_to_change(self, inode: Inode) -> Striped:
        """Where objects of the file go that are changed in place."""
        return self._spread(inode, self._changeable(inode))

    def _spread(
        self, inode: Inode, candidates: Sequence[Candidate], size: int | None = None
    ) -> Striped:
        """``size``: that the file has, unless it is going to grow there."""
        policy = inode.policy or DEFAULT_POLICY
        is_small = size is not None and size <= self._stripe_above
        # Over a network one reader is as fast as all servers together.
        is_one = is_small and all(self._servers[c.id].storage.is_local for c in candidates)
        count = policy.count or self._count or (1 if is_one else len(candidates))
        columns = min(count, len(candidates))
        return Striped(policy.unit or self._unit, spread(ALGORITHM, inode.ino, candidates, columns))

    def _changeable(self, inode: Inode) -> Sequence[Candidate]:
        return [c for c in self._candidates(inode) if self._servers[c.id].storage.in_place]

    def _candidates(self, inode: Inode) -> Sequence[Candidate]:
        candidates = self._servers.candidates()
        allowed = (inode.policy or DEFAULT_POLICY).servers
        return [candidate for candidate in candidates if candidate.id in allowed] or candidates

    # --- size ---

    async def truncate(self, file: OpenInode, size: int) -> None:
        """Cut or extend the file; the size is on record. A shrink in place waits for the journal
        (I6)."""
        inode = file.inode
        if size == 0 and inode.layout is not None and not file.on_object:
            await self._discard(file)
        elif inode.layout is None and size <= self._inline_limit:
            await self._transitions.put_inline(file, lambda old: old[:size].ljust(size, b"\0"))
            return
        elif size < inode.size:
            if self._is_fixed(inode):
                await self._restripe(file)
            await self._shrink(file, size)
        elif size > inode.size:
            await self._grow(file, size)
            return
        file.changed(clock.kernel_ns())

    async def _grow(self, file: OpenInode, size: int) -> None:
        await self.prepare(file, size)
        file.trimmed = False  # until the new size counts, the objects are longer than it calls for
        await file.own_objects.settle(size)
        file.changed(clock.kernel_ns())
        count_blocks(file)
        await self._transitions.grow(file, size)
        file.trimmed = True

    async def _discard(self, file: OpenInode) -> None:
        await self._transitions.reduce(Flip(file, {"layout": None, "size": 0, "blocks": 0}))
        faults.reach(_DISCARDED)

    async def _shrink(self, file: OpenInode, size: int) -> None:
        await self._transitions.shrink(file, size)
        faults.reach(_SHRUNK)
        try:
            await self._trim(file)
        except FsError as error:
            # The file has its new size all the same (I4); it is trimmed before it grows, or settled
            # later.
            _log.info("inode %d keeps bytes beyond its size for now: %s", file.inode.ino, error)

    # --- durability ---

    async def look(self, file: OpenInode) -> None:
        """Take the mtime of a mapped object over, if it can be looked at."""
        ino, inode = file.inode.ino, file.inode
        if ino not in self.perhaps_mapped or file.objects is None:
            return
        fd = None
        with suppress(Unavailable):
            fd = await file.objects.backing(inode.size)
        if fd is None:
            return
        before_ns, found_ns = self.perhaps_mapped[ino], os.fstat(fd).st_mtime_ns
        self.perhaps_mapped[ino] = found_ns
        if before_ns and found_ns != before_ns and found_ns > inode.mtime_ns:
            inode.mtime_ns, inode.ctime_ns = found_ns, max(inode.ctime_ns, found_ns)
            file.unsaved = True

    async def settle(self, file: OpenInode) -> None:
        """Bring the objects to their exact lengths. Raises NoSpace, Unavailable."""
        # What is marked, and not in the burst tier, is striped. To ask would slow closing down.
        objects: ObjectSet = file.objects  # type: ignore[assignment]
        if file.on_object and not file.inode.size:
            await objects.trim(0)  # programs read it, so it is not removed
        else:
            await objects.settle(file.inode.size)
        count_blocks(file)
        file.unsaved = True

    async def sync(self, file: OpenInode) -> None:
        """Bring bytes and attributes to stable storage. Callers do not hold the gate."""
        changes = file.changes
        if file.marked:
            async with alone([file]):
                if file.objects is not None:
                    changes = file.changes
                    await self.settle(file)
        if file.unsaved:
            await self._transitions.save(file)
        objects = file.objects
        if objects is None or not file.marked:
            await self._engine.barrier()
            return
        await run_all(lambda: objects.sync(all_objects=file.on_object), self._engine.barrier)
        faults.reach(_SYNCED)
        if file.inode.ino in self.perhaps_mapped or (file.on_object and not file.inode.size):
            return  # it may be changed without our knowing; or is not settled
        if self._engine.host and file.may_be_written:
            return  # this host is its home as long as it is open for writing
        if file.has_lost:
            return
        if file.changes == changes:  # else another change has begun, and need not be waited for
            async with alone([file]):
                if file.marked and file.changes == changes and file.objects is objects:
                    await self._transitions.unmark(file)


def count_blocks(file: OpenInode) -> None:
    """Take the count of blocks over from the objects, if they know it."""
    blocks = file.objects.blocks() if file.objects is not None else None
    if blocks is not None:
        file.inode.blocks = blocks
