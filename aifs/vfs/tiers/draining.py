"""Draining some files together: their bytes go to the capacity tier, then one transaction flips them.

Until the flip nothing counts: a file that is changed or deleted meanwhile keeps its burst copy as if nothing
had happened, and what had been made for it is garbage. The proof that nobody writes to a copy is a lease on it:
handles that can write are known, but a mapping can outlive its handle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Mover
from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError, NotFound, Stale
from aifs.core.tasks import run_all
from aifs.data.chunk_codec import FileRecord
from aifs.data.pieces import Source
from aifs.data.protected import ProtectedObjects
from aifs.data.servers import Servers
from aifs.data.striped import StripedObjects
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import CHUNK, Growth, Interleaved
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.chunks import Chunks
from aifs.meta.forms import Drained
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.vfs.collector import Collector
from aifs.vfs.ids import IdAllocator
from aifs.vfs.io.file_io import FileIO
from aifs.vfs.io.open_inode import OpenInode
from aifs.vfs.tiers import path_hints
from aifs.vfs.tiers.containers import Containers

_COPIED = faults.declare("vfs.drain.copied", "new objects hold the bytes durably, they are on record as garbage")
_FLIPPED = faults.declare("vfs.drain.flipped", "files are on the capacity tier, their burst copies are clean")

_AT_ONCE = 16  # files of one batch


class Outcome(Enum):
    DRAINED = auto()
    GONE = auto()  # deleted, or not in the burst tier
    OPEN = auto()  # for writing
    CHANGED = auto()  # meanwhile
    BUSY = auto()  # somebody is about to open it, or has it mapped for writing still


class Draining:
    """One file whose drain is under way: what ``OpenInode.drain`` is.

    ``outcome`` is None until it is known. ``layout`` to ``due`` (see Drained) say what the file is from the flip on;
    ``garbage``: the oid of objects that have been made, until the file has them.
    """

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.outcome: Outcome | FsError | None = None
        self.cancelled = False
        self.file: OpenInode | None = None
        self.layout: Striped | Interleaved | None = None
        self.oid = 0
        self.data: bytes | None = None
        self.blocks = 0
        self.digests = b""
        self.chunks: Chunks = ()
        self.lacking = 0
        self.due = False
        self.garbage = 0

    def begin(self, file: OpenInode, copy: BurstCopy) -> None:
        """The lease on the copy is ours."""
        self.copy, self.size, self.policy = copy, file.inode.size, file.inode.policy or DEFAULT_POLICY
        self.blocks = file.inode.blocks
        file.drain = self

    def cancel(self) -> None:
        """See OpenInode: others may write to the copy when this returns."""
        self.cancelled = True
        self.copy.unlease()

    def holds(self) -> bool:
        """Whether the file is what it was at ``begin``. It may change from the next suspension on."""
        file = self.file
        return not self.cancelled and file.drain is self and file.inode.nlink > 0 and self.copy.unlease()

    def inode(self) -> Inode:
        """As it is after the flip. Tiny files give up their copy, if nobody uses it."""
        inode = self.file.inode
        dropped = self.layout is None and self.file.handles == 1
        data = (self.data or None) if dropped else self.data
        return replace(
            inode, layout=self.layout, oid=self.oid or inode.oid, data=data, blocks=self.blocks,
            copy=None if dropped else inode.copy,
        )  # fmt: skip


class Drainer:
    """Drains batches of files. Used from one trio thread."""

    def __init__(
        self, config: Config, engine: Engine, servers: Servers, tier: BurstTier, io: FileIO, ids: IdAllocator,
        collector: Collector, containers: Containers, mover: Mover,
    ) -> None:  # fmt: skip
        self._layout = config.layout
        self._redundancy = Redundancy(config.layout.replicas, *config.layout.ec)
        self._io_priority = config.burst.ioprio
        self._spare = config.data.min_spare
        self._engine = engine
        self._servers = servers
        self._tier = tier
        self._io = io
        self._ids = ids
        self._collector = collector
        self._containers = containers
        self._mover = mover
        self._labels = path_hints.Labels(engine)

    async def drain(self, files: Sequence[Draining]) -> None:
        """Drain these; each then has its outcome. Cancellation leaves what is not flipped as it was."""
        try:
            for file in files:
                await self._begin(file)
            begun = [file for file in files if file.outcome is None]
            chunked = [file for file in begun if self._is_interleaved(file)]
            whole = [file for file in begun if file not in chunked]
            following = iter(whole)

            async def copy_some() -> None:
                for file in following:
                    await self._copy(file)

            await run_all(*[copy_some] * min(_AT_ONCE, len(whole)))
            await self._flip([file for file in whole if file.outcome is None])
            groups: dict[tuple[tuple[int, ...], Redundancy], list[Draining]] = {}
            for file in chunked:
                redundancy = file.policy.redundancy(self._redundancy)
                groups.setdefault((file.policy.servers, redundancy), []).append(file)
            for (servers, redundancy), group in groups.items():
                await self._append(group, servers, redundancy)
        finally:
            with trio.CancelScope(shield=True):
                for file in files:
                    await self._end(file)

    # --- begin and end ---

    async def _begin(self, draining: Draining) -> None:
        with _errors_of(draining):
            try:
                file = draining.file = await self._io.acquire(draining.ino)
            except (NotFound, Stale):
                draining.outcome = Outcome.GONE
                return
            await file.gate.enter_alone()
            try:
                draining.outcome = await self._prepare(draining, file)
            finally:
                file.gate.leave_alone()

    async def _prepare(self, draining: Draining, file: OpenInode) -> Outcome | None:
        if not file.inode.in_burst or file.inode.nlink == 0:
            return Outcome.GONE
        if file.writers:
            return Outcome.OPEN
        if file.handles > file.users + 1 or file.drain is not None:
            return Outcome.BUSY  # whoever is opening it for writing has perhaps passed the gate
        copy = file.copy
        await copy.ensure_open()
        await copy.release_writers()
        if not copy.lease():
            return Outcome.BUSY
        self._io.burst.look(file)
        draining.begin(file, copy)
        return None

    async def _end(self, draining: Draining) -> None:
        file = draining.file
        if file is None:
            return
        if file.drain is draining:
            file.cancel_drain()
        if draining.garbage:
            self._collector.add_garbage(draining.garbage)
        if draining.outcome is None:
            draining.outcome = Outcome.CHANGED
        if file.inode.nlink == 0:
            draining.outcome = Outcome.GONE
        with _errors_of(draining):
            await self._io.release(file)

    # --- bytes ---

    def _is_interleaved(self, draining: Draining) -> bool:
        kind = draining.policy.kind or self._layout.kind
        return kind == "interleaved" and draining.size > self._layout.inline_limit

    async def _copy(self, draining: Draining) -> None:
        try:
            if draining.size <= self._layout.inline_limit:
                draining.data = await self._mover.read_whole(draining.copy, draining.size)
                draining.blocks = (draining.size + 511) // 512
            else:
                await self._copy_striped(draining)
        except FsError as error:
            draining.outcome = Outcome.CHANGED if draining.cancelled else error

    async def _copy_striped(self, draining: Draining) -> None:
        ino, oid = draining.ino, await self._ids.take()
        inode = draining.file.inode
        layout = self._io.capacity.place(inode)
        kind = ProtectedObjects if layout.is_protected else StripedObjects
        objects = kind(self._servers, layout, ino, oid, new=True, background=self._io_priority)
        await self._engine.transact(forms.put_garbage, oid, ino, layout)
        draining.garbage = oid
        try:
            label = await self._labels.of(inode, oid, layout)
            digests = await self._mover.drain_out(
                draining.copy, draining.size, objects, lambda: draining.cancelled, self._spare, label
            )
            if digests is None:
                draining.outcome = Outcome.CHANGED
                return
            draining.layout, draining.oid, draining.digests = layout, oid, digests
            draining.blocks = objects.blocks() or 0
            if isinstance(objects, ProtectedObjects):
                draining.lacking = objects.failed
            else:
                draining.due = self._io.capacity.redundancy(inode).is_protected
            faults.reach(_COPIED)
        finally:
            objects.close()

    async def _append(self, files: list[Draining], servers: tuple[int, ...], redundancy: Redundancy) -> None:
        try:
            records = await self._engine.view(path_hints.describe, [file.file.inode for file in files])
            sources = [await self._source(file, record) for file, record in zip(files, records, strict=True)]
            await self._mover.admit(sum(file.size for file in files))
            async with self._containers.append(sources, servers, redundancy) as stored:
                for file, source, chunks in zip(files, sources, stored.lists, strict=True):
                    file.layout, file.oid, file.chunks = source.layout, source.oid, chunks
                await self._flip(files, stored.growth)
        except FsError as error:
            # One that is cut or deleted meanwhile spoils it for the others.
            spoilt = any(file.cancelled for file in files)
            for file in files:
                file.outcome = file.outcome or (Outcome.CHANGED if spoilt else error)

    async def _source(self, draining: Draining, record: FileRecord) -> Source:
        asked = draining.policy.compress
        level = self._layout.compress if asked is None else asked
        oid = await self._ids.take()
        return Source(draining.ino, oid, draining.size, draining.copy.fd, Interleaved(CHUNK), level, record)

    # --- the flip ---

    async def _flip(self, files: list[Draining], growth: Sequence[Growth] = ()) -> None:
        """Make what has been copied count, of those that have not changed.

        Needs no gate: who changes a file cancels its drain first, and a transaction does not suspend.
        """
        unchanged = [draining for draining in files if draining.holds()]
        if not unchanged:
            return
        with _errors_of(*unchanged):
            after = [
                Drained(d.inode(), d.copy.place, not d.file.dirty, d.digests, d.chunks, d.lacking, d.due)
                for d in unchanged
            ]
            for copy_id in await self._engine.transact(forms.put_drained, after, growth):
                self._collector.add_garbage(copy_id)
            for draining, drained in zip(unchanged, after, strict=True):
                self._adopt(draining, drained.inode)
            if any(drained.lacking or drained.due for drained in after):
                self._io.capacity.on_due()
            faults.reach(_FLIPPED)

    def _adopt(self, draining: Draining, after: Inode) -> None:
        file, copy = draining.file, draining.copy
        inode = file.inode
        inode.layout, inode.oid, inode.data = after.layout, after.oid, after.data
        inode.blocks, inode.copy = after.blocks, after.copy
        file.objects = self._io.objects_of(inode, draining.lacking)
        file.dirty = file.unsaved = file.trimmed = False
        file.drain = None
        self._io.unsynced.pop(inode.ino, None)
        self._tier.clean(copy.id, copy.server, inode.size)
        if inode.copy is None:
            self._io.burst.detach(file)
            self._tier.evicted(copy.id)
        draining.garbage = 0
        draining.outcome = Outcome.DRAINED


@contextmanager
def _errors_of(*files: Draining) -> Iterator[None]:
    """What fails inside is the outcome of these, unless they have one."""
    try:
        yield
    except FsError as error:
        for file in files:
            file.outcome = file.outcome or error
