"""The two ends of a drain: the lease on a burst copy, and the transaction that makes a file one of
the capacity tier.

Until the flip nothing counts: a file that is changed or deleted meanwhile keeps its burst copy as
if nothing had happened, and what had been made for it is garbage. The proof that nobody writes to a
copy is a lease on it: handles that can write are known, but a mapping can outlive its handle.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto

from aifs.burst.copy import BurstCopy
from aifs.core import faults
from aifs.core.errors import FsError, NotFound, Stale
from aifs.files.collector import Collector
from aifs.files.file_io import FileIO
from aifs.files.open_inode import Lease, OpenInode
from aifs.files.transitions import Flip, alone
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import Extent, Interleaved
from aifs.layout.striped import Striped
from aifs.meta.chunks import NOTHING_LOST

_FLIPPED = faults.declare(
    "vfs.drain.flipped", "files are on the capacity tier, their burst copies are clean"
)


class DrainOutcome(Enum):
    DRAINED = auto()
    GONE = auto()  # deleted, or not in the burst tier
    OPEN = auto()  # for writing
    CHANGED = auto()  # meanwhile
    BUSY = auto()  # about to be opened, or mapped for writing still, or to be kept while it is open
    UNFIT = auto()  # for a group: too many chunks


class Draining(Lease):
    """One file whose drain is under way, and the lease on its copy; what it is from the flip on, as
    far as that is known.
    """

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.outcome: DrainOutcome | FsError | None = None
        """None until it is known."""
        self.cancelled = False
        """Somebody is going to change the file, or has unlinked it."""
        self.file: OpenInode | None = None
        """None before ``begin``, and after the end."""
        self.layout: Striped | Interleaved | None = None
        """None of a tiny file, which has ``data``."""
        self.oid = 0
        """Of new objects or chunks."""
        self.data: bytes | None = None
        """All bytes of a tiny file."""
        self.blocks = 0
        """What it takes there, in blocks of 512 bytes."""
        self.digests = b""
        """This and what follows: see forms.FormChange."""
        self.extents: Sequence[Extent] = ()
        """Of an interleaved file."""
        self.unread = 0
        """Mask of the columns that could not be written."""
        self.due = False
        """It should be protected and is not."""
        self.is_at_rest = False
        """Its last close has proved that nobody has the copy mapped; so there is no lease of the
        kernel, since whoever writes to it has to open it first."""
        self.loose = False
        """A list of its chunks is on record, which is garbage unless the file is flipped."""

    @property
    def is_whole(self) -> bool:
        return not self.cancelled if self.is_at_rest else super().is_whole

    @property
    def is_sparse(self) -> bool:
        """Whether it has holes."""
        return self.blocks * 512 < self.size

    def begin(self, file: OpenInode, copy: BurstCopy) -> None:
        """The lease on the copy is ours."""
        super().__init__(copy)
        inode = file.inode
        self.size, self.policy = inode.size, inode.policy or DEFAULT_POLICY
        self.blocks = inode.blocks
        file.take_lease(self)

    def holds(self) -> bool:
        """Whether the file is what it was at ``begin``. It may change from the next suspension on,
        unless its gate is held.
        """
        file = self.file
        return (
            file is not None
            and not self.cancelled
            and file.lease is self
            and file.inode.nlink > 0
            and not keeps_lost_copy(file)
            and self.is_whole
        )

    def flip(self) -> Flip:
        """What becomes of the file. Tiny files give up their copy, if nobody uses it, and so do
        those whose copy is known not to be durable."""
        file = self.file
        assert file is not None
        dropped = (self.layout is None or file.has_lost) and file.handles == 1
        form = {
            "layout": self.layout,
            "oid": self.oid or file.inode.oid,
            "data": (self.data or None) if dropped else self.data,
            "blocks": self.blocks,
            "copy": None if dropped else file.inode.copy,
        }
        record = {
            "durable": not file.marked,
            "digests": self.digests,
            "extents": self.extents,
            "unread": self.unread,
            "due": self.due,
        }
        return Flip(file, form, record)


def keeps_lost_copy(file: OpenInode) -> bool:
    """Whether the file could not give up a copy that is no cache, as somebody has it open: what the
    page cache has of a copy that could not be synced may not be what is on its disk.
    """
    return file.has_lost and file.handles > 1


class Flips:
    """Begins and ends drains of single files. Used from one trio thread."""

    def __init__(self, io: FileIO, collector: Collector) -> None:
        self._io = io
        self._collector = collector

    async def begin(self, draining: Draining, is_opened: bool = True) -> None:
        """Take the lease; the drain has an outcome already on return if that cannot be. The copy
        is open then, unless it need not be ``is_opened``.
        """
        with errors_of(draining):
            proof = None if is_opened else self._io.table.proof_of_rest(draining.ino)
            try:
                file = draining.file = await self._io.inodes.acquire(draining.ino)
            except (NotFound, Stale):
                draining.outcome = DrainOutcome.GONE
                return
            await file.gate.enter_alone()
            try:
                draining.outcome = await self._prepare(draining, file, proof)
            finally:
                file.gate.leave_alone()

    async def _prepare(
        self, draining: Draining, file: OpenInode, proof: object
    ) -> DrainOutcome | None:
        if not file.inode.in_burst or file.inode.nlink == 0 or file.home:
            return DrainOutcome.GONE  # with ``home``: another host has taken it over meanwhile
        if file.writers:
            return DrainOutcome.OPEN
        if file.opening or file.lease is not None or keeps_lost_copy(file):
            return DrainOutcome.BUSY
        copy = file.own_copy
        is_ours = file.handles == 1 and not file.changes  # nobody had it open for writing since
        draining.is_at_rest = (
            is_ours and proof is not None and self._io.table.unsynced.get(draining.ino) is proof
        )
        if not draining.is_at_rest:
            await copy.ensure_open()
            await copy.release_writers()
            if not copy.lease():
                return DrainOutcome.BUSY
            self._io.burst.look(file)
        draining.begin(file, copy)
        return None

    async def end(self, draining: Draining) -> None:
        """Let go of the file; the drain has an outcome on return. May be called again."""
        file, draining.file = draining.file, None
        if file is None:
            return
        if file.lease is draining:
            file.cancel_lease()
        self.drop_made(draining)
        if draining.outcome is None:
            draining.outcome = DrainOutcome.CHANGED
        if file.inode.nlink == 0:
            draining.outcome = DrainOutcome.GONE
        with errors_of(draining):
            await self._io.inodes.release(file)

    def drop_made(self, draining: Draining) -> None:
        """What has been made for it is garbage, unless it has been flipped."""
        if draining.loose:
            self._collector.add_garbage(draining.oid)
            draining.loose = False
        self._io.transitions.end_making(draining.oid)

    async def flip(
        self,
        files: Sequence[Draining],
        lost: Mapping[int, int] = NOTHING_LOST,
        new: Collection[bytes] = (),
    ) -> None:
        """Make what has been copied count, of those that have not changed. ``lost`` and ``new``:
        see forms.change_forms.

        Raises Stale, with nothing changed and all leases kept, if a shared chunk that one of them
        names has gone.
        """
        async with alone([d.file for d in files if d.file is not None and d.holds()]):
            unchanged = [draining for draining in files if draining.holds()]
            if not unchanged:
                return
            try:
                flips = [draining.flip() for draining in unchanged]
                await self._io.transitions.flip(flips, lost, new)
            except Stale:
                raise
            except FsError as error:
                for draining in unchanged:
                    draining.outcome = draining.outcome or error
                return
            for draining in unchanged:
                draining.loose = False
                draining.outcome = DrainOutcome.DRAINED
                if draining.file is not None and draining.file.lease is draining:
                    draining.file.end_lease()
        faults.reach(_FLIPPED)


@contextmanager
def errors_of(*files: Draining) -> Iterator[None]:
    """What fails inside is the outcome of these, unless they have one."""
    try:
        yield
    except FsError as error:
        for file in files:
            file.outcome = file.outcome or error
