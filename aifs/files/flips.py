"""The two ends of a drain: the lease on a burst copy, and the transaction that makes a file one of
the capacity tier.

Until the flip nothing counts: a file that is changed or deleted meanwhile keeps its burst copy as
if nothing had happened, and what had been made for it is garbage. The proof that nobody writes to a
copy is a lease on it: handles that can write are known, but a mapping can outlive its handle.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum, auto

from aifs.burst.copy import BurstCopy
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError, NotFound, Stale
from aifs.files.collector import Collector
from aifs.files.file_io import FileIO
from aifs.files.open_inode import OpenInode
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import Extent, Interleaved
from aifs.layout.striped import Striped
from aifs.meta import forms
from aifs.meta.chunk_lists import Chunks
from aifs.meta.chunks import NOTHING_LOST
from aifs.meta.forms import Drained
from aifs.meta.kv import Engine
from aifs.meta.records import Inode

_FLIPPED = faults.declare(
    "vfs.drain.flipped", "files are on the capacity tier, their burst copies are clean"
)


class Outcome(Enum):
    DRAINED = auto()
    GONE = auto()  # deleted, or not in the burst tier
    OPEN = auto()  # for writing
    CHANGED = auto()  # meanwhile
    BUSY = auto()  # somebody is about to open it, or has it mapped for writing still
    UNFIT = auto()  # for a group: too many chunks


class Draining:
    """One file whose drain is under way: what ``OpenInode.drain`` is.

    ``outcome`` is None until it is known. ``file``: None before ``begin``, and after the end.
    ``layout`` to ``extents`` (see Drained) say what the file is from the flip on; ``garbage``: the
    oid of objects that have been made, until the file has them.
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
        self.extents: Sequence[Extent] = ()
        self.garbage = 0

    def begin(self, file: OpenInode, copy: BurstCopy) -> None:
        """The lease on the copy is ours."""
        self.copy, self.size, self.policy = (
            copy,
            file.inode.size,
            file.inode.policy or DEFAULT_POLICY,
        )
        self.blocks, self.space = file.inode.blocks, file.inode.space
        file.drain = self

    def cancel(self) -> None:
        """See OpenInode: others may write to the copy when this returns."""
        self.cancelled = True
        self.copy.unlease()

    def holds(self) -> bool:
        """Whether the file is what it was at ``begin``. It may change from the next suspension
        on.
        """
        file = self.file
        return (
            not self.cancelled
            and file.drain is self
            and file.inode.nlink > 0
            and self.copy.is_leased
        )

    def inode(self) -> Inode:
        """As it is after the flip. Tiny files give up their copy, if nobody uses it."""
        inode = self.file.inode
        dropped = self.layout is None and self.file.handles == 1
        data = (self.data or None) if dropped else self.data
        return replace(
            inode,
            layout=self.layout,
            oid=self.oid or inode.oid,
            data=data,
            blocks=self.blocks,
            copy=None if dropped else inode.copy,
        )


class Flips:
    """Begins and ends drains of single files. Used from one trio thread."""

    def __init__(self, engine: Engine, tier: BurstTier, io: FileIO, collector: Collector) -> None:
        self._engine = engine
        self._tier = tier
        self._io = io
        self._collector = collector

    async def begin(self, draining: Draining) -> None:
        """Take the lease; the drain has an outcome already on return if that cannot be."""
        with errors_of(draining):
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

    async def end(self, draining: Draining) -> None:
        """Let go of the file; the drain has an outcome on return. May be called again."""
        file, draining.file = draining.file, None
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
        with errors_of(draining):
            await self._io.release(file)

    async def flip(
        self,
        files: Sequence[Draining],
        lost: Mapping[int, int] = NOTHING_LOST,
        new: Collection[bytes] = (),
    ) -> None:
        """Make what has been copied count, of those that have not changed. ``lost`` and ``new``:
        see forms.put_drained.

        Needs no gate: who changes a file cancels its drain first, and a transaction does not
        suspend. Raises Stale, with nothing changed and all leases kept, if a shared chunk that one
        of them names has gone.
        """
        unchanged = [draining for draining in files if draining.holds()]
        if not unchanged:
            return
        after = [
            Drained(
                d.inode(),
                d.copy.place,
                not d.file.dirty,
                d.digests,
                d.chunks,
                d.lacking,
                d.due,
                d.extents,
            )
            for d in unchanged
        ]
        try:
            garbage = await self._engine.transact(forms.put_drained, after, lost, new)
        except Stale:
            raise
        except FsError as error:
            for draining in unchanged:
                draining.outcome = draining.outcome or error
            return
        for copy_id in garbage:
            self._collector.add_garbage(copy_id)
        for draining, drained in zip(unchanged, after, strict=True):
            self._adopt(draining, drained.inode)
        if any(drained.lacking or drained.due for drained in after):
            self._io.damage.due()
        faults.reach(_FLIPPED)

    def _adopt(self, draining: Draining, after: Inode) -> None:
        file, copy = draining.file, draining.copy
        inode = file.inode
        inode.layout, inode.oid, inode.data = after.layout, after.oid, after.data
        inode.blocks, inode.copy = after.blocks, after.copy
        file.objects = self._io.objects_of(inode, draining.lacking)
        file.dirty = file.unsaved = file.trimmed = False
        file.drain = None
        copy.unlease()
        self._io.unsynced.pop(inode.ino, None)
        self._tier.clean(copy.id, copy.server, draining.space)
        if inode.copy is None:
            self._io.burst.detach(file)
            self._tier.evicted(copy.id)
        draining.garbage = 0
        draining.outcome = Outcome.DRAINED


@contextmanager
def errors_of(*files: Draining) -> Iterator[None]:
    """What fails inside is the outcome of these, unless they have one."""
    try:
        yield
    except FsError as error:
        for file in files:
            file.outcome = file.outcome or error
