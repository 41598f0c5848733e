"""Draining some files together: their bytes go to the capacity tier, then one transaction flips
them (flips.py).
"""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence

import trio

from aifs.burst.making import Making, NewObjects, carry_out
from aifs.burst.movers import Movers
from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError, NoSpace, QuotaExceeded, without_frames
from aifs.core.tasks import run_all
from aifs.data.containers.pieces import FileSource
from aifs.files.collector import Collector
from aifs.files.containers import LISTED_AT_ONCE, Containers
from aifs.files.file_io import FileIO
from aifs.files.flips import Draining, DrainOutcome, Flips, errors_of
from aifs.layout.hint import Policy
from aifs.layout.interleaved import CHUNK, Interleaved, may_list
from aifs.layout.redundancy import Redundancy
from aifs.meta.chunks import NOTHING_LOST
from aifs.store.ids import IdAllocator

_COPIED = faults.declare(
    "vfs.drain.copied", "new objects hold the bytes durably, they are on record as garbage"
)

_AT_ONCE = 16  # files of one batch

_BEGUN_AT_ONCE = 32
"""On record as garbage by one transaction."""

_FLIPPED_AT_ONCE = 16
"""In one transaction, which takes some 0.4 ms of the event loop."""


class Drainer:
    """Drains batches of files. Used from one trio thread."""

    def __init__(
        self,
        config: Config,
        io: FileIO,
        ids: IdAllocator,
        collector: Collector,
        containers: Containers,
        movers: Movers,
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        """``give_way`` is awaited between short pieces of bookkeeping; see LoopShare."""
        self._give_way = give_way
        self._layout = config.layout
        self._redundancy = Redundancy(config.layout.replicas, *config.layout.ec)
        self._spare = config.data.min_spare
        self._io = io
        self._ids = ids
        self._containers = containers
        self._movers = movers
        self._flips = Flips(io, collector)

    async def drain(self, files: Sequence[Draining]) -> None:
        """Drain these; each then has its outcome. Cancellation leaves what is not flipped as it
        was.
        """
        try:
            for file in files:
                await self._flips.begin(file, is_opened=False)
                await self._give_way()
            groups: dict[tuple[tuple[int, ...], Redundancy], list[Draining]] = {}
            whole = []
            for file in files:
                if file.outcome is None:
                    place = file.policy.servers, file.policy.redundancy(self._redundancy)
                    if not self._is_interleaved(file):
                        whole.append(file)
                    elif place in groups or self._containers.has_place(*place):
                        groups.setdefault(place, []).append(file)
                    else:  # it gets objects of its own, without protection until there can be
                        whole.append(file)
            await self._copy_all(whole)
            for (servers, redundancy), group in groups.items():
                await self._append(group, servers, redundancy)
        finally:
            with trio.CancelScope(shield=True):
                for file in files:
                    await self._flips.end(file)
                    await self._give_way()

    # --- bytes ---

    def _is_interleaved(self, draining: Draining) -> bool:
        """Whether the file goes into containers."""
        policy = draining.policy
        if draining.size <= self._layout.inline_limit:
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
        """Give each of these objects of its own, or bytes in its record. ``beside``: see
        CapacityIO.place."""
        targets = await self._begin_making(files, beside)
        following = iter([file for file in files if file.outcome is None])

        async def copy_some() -> None:
            for file in following:
                await self._copy(file, targets.get(file.ino))

        await run_all(*[copy_some] * min(_AT_ONCE, len(files)))
        await self._flip([file for file in files if file.outcome is None])

    async def _begin_making(
        self, files: Sequence[Draining], beside: Collection[int]
    ) -> dict[int, NewObjects]:
        """Where the bytes of these go, by inode number, but of tiny ones: that is on record as
        garbage."""
        striped = [file for file in files if file.size > self._layout.inline_limit]
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
                making = Making(draining.copy.place, None, draining.size)
                made = await self._movers.carry_out(carry_out, making)
                assert made is not None  # nothing cancels it
                draining.data = made.data
                draining.blocks = (draining.size + 511) // 512
            else:
                await self._copy_striped(draining, target)
        except FsError as error:
            # It is kept until all are done, who may wait for the memory that its frames hold.
            draining.outcome = DrainOutcome.CHANGED if draining.cancelled else without_frames(error)

    async def _copy_striped(self, draining: Draining, target: NewObjects) -> None:
        assert draining.file is not None  # it has begun, and ends after this
        inode, layout = draining.file.inode, target.layout
        place, size = draining.copy.place, draining.size
        making = Making(place, target, size, draining.is_sparse, spare=self._spare)
        made = await self._movers.carry_out(carry_out, making, lambda: draining.cancelled)
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
                    full = self._containers.servers_of(redundancy, servers)
                    left = [file for file in files if file.outcome is None]
                    for file in left:  # they may have lists of their chunks
                        self._flips.drop_made(file)
                        file.extents = ()
                    await self._copy_all(left, full)
                    return
                for file in spoilt or files:
                    file.outcome = file.outcome or (DrainOutcome.CHANGED if spoilt else error)
                files = [file for file in files if file.outcome is None]
            else:
                return

    async def _append_all(
        self, files: list[Draining], servers: tuple[int, ...], redundancy: Redundancy
    ) -> None:
        slots = self._containers.slots(redundancy, servers)
        sources = []
        for file in files:
            sources.append(await self._source(file))
            await self._give_way()
        async with self._containers.append(sources, slots, self._movers) as stored:
            for file, source, extents in zip(files, sources, stored.lists, strict=True):
                self._flips.drop_made(file)  # the list of the last time, if there is one
                file.layout, file.oid, file.extents = source.layout, source.oid, extents
                if len(extents) > LISTED_AT_ONCE:  # no transaction should take long
                    file.loose = True
                    await self._containers.list_extents(file.oid, extents, (), stored.lost)
                    file.extents = ()
            await self._flip(files, stored.lost)

    async def _flip(
        self, files: Sequence[Draining], lost: Mapping[int, int] = NOTHING_LOST
    ) -> None:
        """In transactions that are short enough for requests to wait for them."""
        for first in range(0, len(files), _FLIPPED_AT_ONCE):
            await self._flips.flip(files[first : first + _FLIPPED_AT_ONCE], lost)
            await self._give_way()

    async def _source(self, draining: Draining) -> FileSource:
        asked = draining.policy.compress
        level = self._layout.compress if asked is None else asked
        oid, size = await self._ids.take(), draining.size
        layout, copy = Interleaved(CHUNK), draining.copy.place
        return FileSource(draining.ino, oid, size, copy, layout, level, draining.is_sparse)
