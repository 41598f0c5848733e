"""Draining files: their bytes go to the capacity tier, then one transaction makes them files of it.

A drain *begins* with a lease on the burst copy, makes the new objects, *flips* the file, and
*ends*. A file that is changed or deleted before the flip keeps its burst copy, and what was made is
garbage. The lease proves that nobody writes to a copy: a mapping can outlive its handle.

``Drainer.drain`` does all for a batch. Groups (saves/group_drain.py) make shared chunks, and take
the other steps from here.
"""

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.making import Making, NewObjects, carry_out
from aifs.burst.pool import Movers
from aifs.core import faults
from aifs.core.errors import (
    FsError,
    NoSpace,
    NotFound,
    QuotaExceeded,
    Stale,
    without_frames,
)
from aifs.core.tasks import run_all
from aifs.data.containers.pieces import FileSource
from aifs.files.file_io import FileIO
from aifs.files.open_inode import Lease, OpenInode
from aifs.files.services import Services
from aifs.files.transitions import Flip, alone
from aifs.layout.hint import DEFAULT_POLICY, Policy
from aifs.layout.interleaved import CHUNK, Extent, Interleaved, may_list
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta.chunks import NOTHING_LOST

_COPIED = faults.declare(
    "vfs.drain.copied", "new objects hold the bytes durably, they are on record as garbage"
)
_FLIPPED = faults.declare(
    "vfs.drain.flipped", "files are on the capacity tier, their burst copies are clean"
)

_AT_ONCE = 16  # files of one batch

_BEGUN_AT_ONCE = 32
"""On record as garbage by one transaction."""

_FLIPPED_AT_ONCE = 16
"""In one transaction, which takes some 0.4 ms of the event loop."""


class DrainOutcome(Enum):
    DRAINED = auto()
    GONE = auto()  # deleted, or not in the burst tier
    OPEN = auto()  # for writing
    CHANGED = auto()  # meanwhile
    BUSY = auto()  # about to be opened, or mapped for writing still, or to be kept while it is open
    UNFIT = auto()  # for a group: too many chunks


class Draining(Lease):
    """One file whose drain is under way, the lease on its copy, and its form from the flip on."""

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
        self.size = 0
        """In bytes, from ``begin`` on."""
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
        """Its last close has proved that it is not mapped: a writer has to open it first, so no
        lease of the kernel is needed."""

    @property
    def is_whole(self) -> bool:
        return not self.cancelled if self.is_at_rest else super().is_whole

    @property
    def bytes(self) -> int:
        """How many it has, without holes; 0: it has not begun."""
        return min(self.size, 512 * self.blocks)

    @property
    def is_sparse(self) -> bool:
        """Whether it has holes."""
        return self.blocks * 512 < self.size

    def fail(self, error: FsError) -> None:
        """It cannot be drained now; nothing if it has an outcome."""
        self.outcome = self.outcome or (DrainOutcome.CHANGED if self.cancelled else error)

    def begin(self, file: OpenInode, copy: BurstCopy) -> None:
        """The lease on the copy is ours."""
        super().__init__(copy)
        inode = file.inode
        self.size, self.policy = inode.size, inode.policy or DEFAULT_POLICY
        self.blocks = inode.blocks
        file.take_lease(self)

    def holds(self) -> bool:
        """Whether the file is as at ``begin``; without its gate, until the next suspension."""
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
        """The flip of the file. Tiny files give up a copy that nobody uses, and all files one that
        is not durable."""
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
    """Whether an open file keeps a copy that is no cache: after a failed sync, disk and page cache
    may differ."""
    return file.has_lost and file.handles > 1


class Drainer:
    """Drains batches of files; groups use its steps. One a mount, in one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        movers: Movers,
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        """``give_way`` is awaited between short pieces of bookkeeping; see LoopShare."""
        config = services.config
        self._give_way = give_way
        self._layout = config.layout
        self._redundancy = Redundancy(config.layout.replicas, *config.layout.ec)
        self._spare = config.data.min_spare
        self._io = io
        self._ids = services.ids
        self.containers = io.containers
        self.movers = movers
        """Processes that carry drains out."""

    async def drain(self, files: Sequence[Draining]) -> None:
        """Drain these; each then has its outcome. Cancelled, unflipped files stay as they were."""
        try:
            for file in files:
                await self.begin(file, is_opened=False)
                await self._give_way()
            groups: dict[tuple[tuple[int, ...], Redundancy], list[Draining]] = {}
            whole = []
            for file in files:
                if file.outcome is None:
                    place = self.place_of(file)
                    if not self._is_interleaved(file):
                        whole.append(file)
                    elif place in groups or self.containers.has_place(*place):
                        groups.setdefault(place, []).append(file)
                    else:  # it gets objects of its own, without protection until there can be
                        whole.append(file)
            await self._copy_all(whole)
            for (servers, redundancy), group in groups.items():
                await self._append(group, servers, redundancy)
        finally:
            with trio.CancelScope(shield=True):
                for file in files:
                    await self.end(file)
                    await self._give_way()

    # --- the steps of a drain ---

    async def begin(self, draining: Draining, is_opened: bool = True) -> None:
        """Take the lease; if that fails the drain has its outcome on return. ``is_opened``: open
        the copy, too."""
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
        self._io.transitions.end_making(draining.oid)

    async def flip(
        self,
        files: Sequence[Draining],
        lost: Mapping[int, int] = NOTHING_LOST,
        new: Collection[bytes] = (),
    ) -> None:
        """Flip the files that have not changed. ``lost`` and ``new``: see forms.change_forms.

        Raises Stale, with nothing changed and all leases kept, if a shared chunk has gone.
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
                draining.outcome = DrainOutcome.DRAINED
                if draining.file is not None and draining.file.lease is draining:
                    draining.file.end_lease()
        faults.reach(_FLIPPED)

    # --- bytes ---

    def is_tiny(self, draining: Draining) -> bool:
        """Whether the file goes into its record."""
        return draining.size <= self._layout.inline_limit

    def place_of(self, draining: Draining) -> tuple[tuple[int, ...], Redundancy]:
        """The servers (none: any) and the redundancy that the file asks for."""
        return draining.policy.servers, draining.policy.redundancy(self._redundancy)

    def level_of(self, draining: Draining) -> int:
        """How far zstd compresses chunks of the file; 0: not at all."""
        asked = draining.policy.compress
        return self._layout.compress if asked is None else asked

    def _is_interleaved(self, draining: Draining) -> bool:
        policy = draining.policy
        if self.is_tiny(draining):
            return False
        kind = policy.kind or self._layout.kind
        if kind != "interleaved" and draining.size >= self._pack_below(policy):
            return False
        return may_list(draining.size, draining.blocks * 512)

    def _pack_below(self, policy: Policy) -> int:
        """Files that are smaller go into containers, whatever their policy's kind."""
        if self._layout.pack_below is None:
            return min(policy.unit or self._layout.unit, CHUNK)
        return self._layout.pack_below

    async def _copy_all(self, files: Sequence[Draining], beside: Collection[int] = ()) -> None:
        """Give each objects of its own, or bytes in its record. ``beside``: see
        CapacityIO.place."""
        targets = await self._begin_making(files, beside)
        following = iter([file for file in files if file.outcome is None])

        async def copy_some() -> None:
            for file in following:
                await self._copy(file, targets.get(file.ino))

        await run_all(*[copy_some] * min(_AT_ONCE, len(files)))
        await self._flip_all([file for file in files if file.outcome is None])

    async def _begin_making(
        self, files: Sequence[Draining], beside: Collection[int]
    ) -> dict[int, NewObjects]:
        """Places for the bytes of these, except tiny ones, by inode number; on record as
        garbage."""
        striped = [file for file in files if not self.is_tiny(file)]
        targets: dict[int, NewObjects] = {}
        for first in range(0, len(striped), _BEGUN_AT_ONCE):
            some = striped[first : first + _BEGUN_AT_ONCE]
            with errors_of(*some):
                for draining in some:
                    assert draining.file is not None  # it has begun, and ends after this
                    layout = self._io.capacity.place(draining.file.inode, beside)
                    oid = draining.oid = await self._ids.take()
                    targets[draining.ino] = NewObjects(draining.ino, oid, layout)
                await self._io.transitions.begin_making([targets[file.ino] for file in some])
            await self._give_way()
        return targets

    async def _copy(self, draining: Draining, target: NewObjects | None) -> None:
        try:
            if target is None:
                await self.take_bytes(draining)
            else:
                await self._copy_striped(draining, target)
        except FsError as error:
            # It is kept until all are done, and these may wait for the memory that its frames hold.
            draining.fail(without_frames(error))

    async def take_bytes(self, draining: Draining) -> None:
        """Read the bytes of a tiny file, for its record. Raises Unavailable."""
        making = Making(draining.copy.place, None, draining.size)
        made = await self.movers.carry_out(carry_out, making)
        assert made is not None  # nothing cancels it
        draining.data = made.data
        draining.blocks = (draining.size + 511) // 512

    async def _copy_striped(self, draining: Draining, target: NewObjects) -> None:
        assert draining.file is not None  # it has begun, and ends after this
        inode, layout = draining.file.inode, target.layout
        place, size = draining.copy.place, draining.size
        making = Making(place, target, size, draining.is_sparse, spare=self._spare)
        made = await self.movers.carry_out(carry_out, making, lambda: draining.cancelled)
        if made is None:
            draining.outcome = DrainOutcome.CHANGED
            return
        draining.layout, draining.digests = layout, made.digests
        draining.blocks, draining.unread = made.blocks, made.unread
        is_asked = self._io.capacity.redundancy(inode).is_protected
        draining.due = is_asked and not layout.is_protected
        faults.reach(_COPIED)

    async def _append(
        self, files: list[Draining], servers: tuple[int, ...], redundancy: Redundancy
    ) -> None:
        while files:
            try:
                await self._append_all(files, servers, redundancy)
            except FsError as error:
                # What is cut or deleted meanwhile spoils it for the others, which begin again.
                spoilt = [f for f in files if f.cancelled and f.outcome is None]
                if isinstance(error, NoSpace | QuotaExceeded) and not spoilt:
                    # Others may have room, though their objects cannot grow.
                    full = self.containers.servers_of(redundancy, servers)
                    left = [file for file in files if file.outcome is None]
                    for file in left:  # they may have lists of their chunks
                        self.drop_made(file)
                        file.extents = ()
                    await self._copy_all(left, full)
                    return
                for file in spoilt or files:
                    file.fail(error)
                files = [file for file in files if file.outcome is None]
            else:
                return

    async def _append_all(
        self, files: list[Draining], servers: tuple[int, ...], redundancy: Redundancy
    ) -> None:
        slots = self.containers.slots(redundancy, servers)
        sources = []
        for file in files:
            sources.append(await self._source(file))
            await self._give_way()
        async with self.containers.append(sources, slots, self.movers) as stored:
            for file, source, extents in zip(files, sources, stored.lists, strict=True):
                self.drop_made(file)  # the list of the last time, if there is one
                file.layout, file.oid, file.extents = source.layout, source.oid, extents
                await self.list_extents(file, (), stored.lost)
            await self._flip_all(files, stored.lost)

    async def list_extents(
        self, draining: Draining, new: Collection[bytes], lost: Mapping[int, int]
    ) -> None:
        """Before the flip: see Transitions.list_extents."""
        oid, extents = draining.oid, draining.extents
        draining.extents = await self._io.transitions.list_extents(oid, extents, new, lost)

    async def _flip_all(
        self, files: Sequence[Draining], lost: Mapping[int, int] = NOTHING_LOST
    ) -> None:
        for first in range(0, len(files), _FLIPPED_AT_ONCE):
            await self.flip(files[first : first + _FLIPPED_AT_ONCE], lost)
            await self._give_way()

    async def _source(self, draining: Draining) -> FileSource:
        oid, size = await self._ids.take(), draining.size
        layout, copy = Interleaved(CHUNK), draining.copy.place
        return FileSource(
            draining.ino, oid, size, copy, layout, self.level_of(draining), draining.is_sparse
        )


@contextmanager
def errors_of(*files: Draining) -> Iterator[None]:
    """What fails inside is the outcome of these, unless they have one."""
    try:
        yield
    except FsError as error:
        for file in files:
            file.outcome = file.outcome or error
