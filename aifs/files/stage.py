"""Staging: bringing bytes of the capacity tier into the burst tier.

For readers blocks are filled. A file to be changed, or pinned, gets a clean copy, which counts from
one transaction on, if nothing has changed meanwhile.
"""

from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.burst.making import Made, Making
from aifs.burst.pool import Movers
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError, NotFound, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_each
from aifs.core.upkeep import NEVER_S, Work
from aifs.data.checks import Untold
from aifs.data.reading.blocks import Blocks
from aifs.files.by_home import ByHome
from aifs.files.capacity_io import CapacityIO
from aifs.files.open_inode import OpenInode
from aifs.files.open_inodes import OpenInodes
from aifs.files.services import Services
from aifs.files.transitions import Flip, Transitions
from aifs.layout.hint import DEFAULT_POLICY
from aifs.layout.interleaved import HEADER_BYTES
from aifs.meta import chunks
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode


class SourcePart(NamedTuple):
    """Bytes of a file that follow each other, and where they lie in a source (see Blocks)."""

    start: int
    length: int
    source: int
    offset: int
    stored: int
    """How many bytes they have there."""


class InBlocks(NamedTuple):
    """Of one file."""

    here: int
    """Bytes that are in blocks here; of a compressed chunk as many as of its stored bytes."""
    is_whole: bool
    """Whether no more can follow: bytes behind these in a container may be appended to."""


def parts_of(tx: ReadTransaction, inode: Inode) -> Iterator[SourcePart]:
    """All of a file but its holes. Raises Unavailable where it cannot be read."""
    if inode.read_as is not None and inode.size:
        yield SourcePart(0, inode.size, inode.oid, 0, inode.size)
    at = 0
    while inode.chunks is not None and at < inode.size:
        at, extents = chunks.get_extents(tx, inode.oid, inode.chunks.chunk, at)
        for length, place, _ in extents:
            if place is not None:
                offset = place.offset + HEADER_BYTES
                yield SourcePart(at, length, place.container, offset, place.stored)
            at += length


def find_in_blocks(tx: ReadTransaction, inode: Inode, blocks: Blocks) -> InBlocks:
    here, is_whole = 0, inode.layout is not None and not blocks.is_empty
    if not blocks.is_empty:
        try:
            for part in parts_of(tx, inode):
                held = blocks.bytes_in(part.source, part.offset, part.stored)
                here += part.length * held // part.stored
                is_whole &= held == part.stored or held == _settled(tx, part, blocks.block)
        except Unavailable:  # what is read there fails
            is_whole = False
    return InBlocks(here, is_whole)


def _settled(tx: ReadTransaction, part: SourcePart, block: int) -> int:
    container = None
    with suppress(Unavailable):  # fsck names it
        container = chunks.find_container(tx, part.source)
    if container is None or chunks.is_sealed(tx, part.source):
        return part.stored
    end = container.length - container.length % block
    return min(max(0, end - part.offset), part.stored)


_log = logger(__name__)

_COPIED = faults.declare(
    "vfs.stage.copied", "a new copy holds a file's bytes, it is on record as garbage"
)

WORKERS = 16
_PIECE = 1 << 20
"""Bytes read at a time, and in blocks before more are: BlockCache limits those that wait."""


class Stager:
    """Brings files into the burst tier, each once at a time. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        transitions: Transitions,
        capacity: CapacityIO,
        movers: Movers,
        inodes: OpenInodes,
        by_home: ByHome,
    ) -> None:
        self.for_write = services.config.burst.stage_for_write
        self._engine = services.engine
        self._tier = tier
        self._transitions = transitions
        self._upkeep = services.upkeep
        self._inodes = inodes
        self._by_home = by_home
        self._capacity = capacity
        self._movers = movers
        """Processes that carry stagings out."""
        self._running: dict[tuple[int, bool], trio.Event] = {}
        """By inode, and whether it gets a copy, what is set when that has ended."""
        self._waiting: dict[int, bool] = {}
        """Inodes to be staged in the background, in order, and whether they get a copy."""
        self._wrong: set[int] = set()
        """Oids of files with wrong bytes on the servers: not tried at each read."""
        self._turns = trio.CapacityLimiter(WORKERS)
        """Of all callers that wait for many files."""
        self._files = 0
        """How many have been staged since the mount."""
        self._failed = 0
        """How many could not be."""
        self._warmed_bytes = 0
        """Bytes that were read to be in blocks."""

    # --- now ---

    async def stage(self, ino: int, must: bool = False) -> bool:
        """Copy a file into the burst tier; whether it has a copy on return.

        Not without room, while written in place, if changed meanwhile, or with wrong bytes on the
        servers. The copy is not synced. Callers do not hold the gate. ``must``: see
        BurstTier.admit.
        """
        return await self._once(ino, True, lambda file: self._stage(file, must))

    async def warm(self, ino: int) -> bool:
        """Bring a clean file into blocks, while there is room; whether all of it is. Not if it
        changes, was written in place, or its servers' bytes are not kept in blocks."""
        return await self._once(ino, False, self._warm)

    async def bring_all(self, inodes: Iterable[Inode]) -> None:
        """``stage`` those that are pinned, and ``warm`` the rest, several at a time."""

        async def bring(inode: Inode) -> None:
            async with self._turns:
                await (self.stage if is_pinned(inode) else self.warm)(inode.ino)

        await run_each(WORKERS, inodes, bring)

    async def _once(
        self, ino: int, is_copied: bool, bring: Callable[[OpenInode], Awaitable[bool]]
    ) -> bool:
        while (event := self._running.get((ino, is_copied))) is not None:
            await event.wait()
        event = self._running[ino, is_copied] = trio.Event()
        try:
            file = await self._inodes.acquire(ino)
            try:
                return file.copy is not None or await bring(file)
            finally:
                with trio.CancelScope(shield=True):
                    await self._inodes.release(file)
        except (NotFound, Stale):
            return False
        except Untold as error:
            self._failed += 1
            self._wrong.add(file.inode.oid)
            _log.warning("inode %d is not staged: %s", ino, error)
            return False
        except FsError as error:
            self._failed += 1
            _log.info("inode %d is not staged: %s", ino, error)
            return False
        finally:
            del self._running[ino, is_copied]
            event.set()

    async def bring(self, file: OpenInode, must: bool, opened: bool = False) -> None:
        """Before a write: stage a small file, and one that would lose its protection. Callers do
        not hold the gate. ``must``: it is changed in the burst tier alone. Raises Unavailable if it
        cannot be brought though there is room, unless only ``opened``."""
        inode, objects, changes = file.inode, file.inode.objects, file.changes
        if file.copy is not None or file.on_object:
            return
        if await self._inodes.is_used(file):
            return  # what programs use becomes the copy, or stays (FileIO._take_source)
        is_protected = objects is not None and objects.is_protected  # or it would not be any more
        if inode.layout is None or not (must or is_protected or inode.size <= self.for_write):
            return
        if await self.stage(inode.ino, must=must) or opened or not must:
            return
        is_as_before = (file.changes, inode.objects, file.copy) == (changes, objects, None)
        if is_as_before and self._tier.admit("", inode.space, must) is not None:
            raise Unavailable(
                f"inode {inode.ino} cannot be brought into the burst tier, where alone it can be "
                "changed"
            )

    async def _warm(self, file: OpenInode) -> bool:
        inode, objects, blocks = file.inode, file.objects, self._tier.blocks
        policy = inode.policy or DEFAULT_POLICY
        if objects is None or policy.tier == "capacity":
            return False
        is_whole = (await self._engine.view(find_in_blocks, inode, blocks)).is_whole
        for part in await self._engine.view(parts_kept, inode, blocks):
            for at in range(0, part.length, _PIECE):
                length = min(_PIECE, part.length - at)
                if not is_whole:
                    if file.objects is not objects or file.marked:
                        return False
                    await objects.read(part.start + at, length, inode.size)
                    await blocks.filled()
                    self._warmed_bytes += length
                blocks.want(part.source, part.offset + at, length, True)
                await trio.lowlevel.checkpoint()
        if not is_whole:
            is_whole = (await self._engine.view(find_in_blocks, inode, blocks)).is_whole
            self._files += is_whole
        return is_whole

    async def _stage(self, file: OpenInode, must: bool) -> bool:
        if not await self._by_home.take_cache(file):
            return False
        inode, objects, changes = file.inode, file.objects, file.changes
        policy = inode.policy or DEFAULT_POLICY
        if objects is None or file.marked or file.on_source or file.on_object:
            return False
        self._inodes.drop_kept(file)
        if await self._inodes.is_used(file):
            return False  # a mapping would not see what is written to the copy
        device = self._tier.admit(policy.tier, inode.space, must)
        if device is None:
            return False

        def holds() -> bool:
            return (
                file.changes == changes
                and file.objects is objects
                and file.copy is None
                and not (file.marked or file.on_source or file.on_object or file.kept)  # or mapped
                and inode.nlink > 0
            )

        async def describe() -> Making:
            sparse = inode.blocks * 512 < inode.size
            origin = await self._capacity.describe(inode)
            return Making(origin, copy.place, inode.size, sparse)

        def becomes(made: Made) -> Flip:
            faults.reach(_COPIED)
            copy.written()
            return Flip(file, {"copy": copy.place}, copy=copy)

        copy = await self._tier.create(device, inode.space)
        staged = False
        try:
            staged = await self._transitions.change_form(
                file, describe, self._movers, becomes, holds
            )
        finally:
            if not staged and file.copy is not copy:
                self._tier.discard(copy)  # it may be on record as garbage, or not yet
        self._files += staged
        return staged

    # --- in the background ---

    def is_staging(self, ino: int) -> bool:
        """Whether the file is being staged, or waits for it."""
        is_running = (ino, True) in self._running or (ino, False) in self._running
        return is_running or ino in self._waiting

    def request(self, inode: Inode) -> None:
        """Bring the file into the burst tier soon: a copy of it if it is pinned, else blocks."""
        self._waiting[inode.ino] = is_pinned(inode)
        self._upkeep.wake(Work.STAGE)

    def read(self, inode: Inode) -> None:
        """Stage a file without copy or mark, which begins to be read, if its policy wants that; a
        container's reads come into blocks anyway."""
        tier = DEFAULT_POLICY.tier if inode.policy is None else inode.policy.tier
        if tier not in ("burst", "pinned") or inode.oid in self._wrong:
            return
        if self.is_staging(inode.ino):
            return
        if tier == "burst":
            blocks, size = self._tier.blocks, inode.size
            if inode.read_as is None or blocks.held(inode.oid, 0, size) == size:
                return
        if self._tier.has_devices:
            self.request(inode)

    async def work(self) -> float:
        """Stage what is requested; each request has asked for a worker of its own."""
        while self._waiting:
            ino, is_copied = next(iter(self._waiting.items()))
            del self._waiting[ino]
            await (self.stage(ino) if is_copied else self.warm(ino))
        return NEVER_S

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows."""
        return {
            "active_files": len(self._running),
            "waiting_files": len(self._waiting),
            "staged_files": self._files,
            "staged_bytes": self._movers.tools.mover.moved_bytes + self._warmed_bytes,
            "failed_files": self._failed,
        }


def is_pinned(inode: Inode) -> bool:
    return inode.policy is not None and inode.policy.tier == "pinned"


def parts_kept(tx: ReadTransaction, inode: Inode, blocks: Blocks) -> list[SourcePart]:
    """The parts of a file that can be in blocks here. Raises Unavailable."""
    found = list(parts_of(tx, inode))
    layouts = {inode.oid: inode.read_as}
    for source in {part.source for part in found} - layouts.keys():
        container = chunks.find_container(tx, source)
        layouts[source] = None if container is None else container.layout
    kept = {source for source, layout in layouts.items() if layout and blocks.serves(layout)}
    return [part for part in found if part.source in kept]
