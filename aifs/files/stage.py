"""Staging: a file of the capacity tier gets a copy in the burst tier: its next open reads at the
device's speed.

The file stays what it is; the copy is a clean one that counts from one transaction on, and only if
nothing has changed while its bytes were on their way.
"""

from collections import deque
from typing import Any

import trio

from aifs.burst.making import Made, Making
from aifs.burst.movers import Movers
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError, NotFound, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, Work
from aifs.data.checking.checks import Untold
from aifs.files.by_home import ByHome
from aifs.files.capacity_io import CapacityIO
from aifs.files.open_inode import OpenInode
from aifs.files.open_inodes import OpenInodes
from aifs.files.services import Services
from aifs.files.transitions import Flip, Transitions
from aifs.layout.hint import DEFAULT_POLICY
from aifs.meta.records import Inode

_log = logger(__name__)

_COPIED = faults.declare(
    "vfs.stage.copied", "a new copy holds a file's bytes, it is on record as garbage"
)

WORKERS = 16
_REMEMBERED_SHARE = 8  # of the budget: what the read cache keeps of what was read
_JOINED_MAX = 16 << 20  # bytes of a file for which an open waits,
_JOINED_S = 0.1  # and for how long


class Stager:
    """Copies files into the burst tier, each once at a time. Used from one trio thread."""

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
        self._remembered = services.servers.budget.total // _REMEMBERED_SHARE
        """Bytes of a file that is followed at most."""
        self._tier = tier
        self._transitions = transitions
        self._upkeep = services.upkeep
        self._inodes = inodes
        self._by_home = by_home
        self._capacity = capacity
        self._movers = movers
        """Processes that carry stagings out."""
        self._running: dict[int, trio.Event] = {}
        """By inode, what is set when its copy has ended."""
        self._unread: set[int] = set()
        """Those of them that nobody had open when they began, past the caches of this process."""
        self._waiting: deque[int] = deque()
        """Inodes to be copied in the background, in order."""
        self._known: dict[int, bool] = {}
        """Those of ``_waiting``, and whether somebody reads them meanwhile."""
        self._wrong: set[int] = set()
        """Oids of files that turned out to have wrong bytes on the servers: not tried again each
        time that they are read.
        """
        self._files = 0
        """How many have been copied since the mount."""
        self._failed = 0
        """How many could not be."""

    # --- now ---

    async def stage(
        self, ino: int, followed: bool = False, must: bool = False, ahead: bool = False
    ) -> bool:
        """Have a file of the capacity tier copied into the burst tier; whether it has a copy on
        return.

        It does not if there is no room, if it is being written to in place, is changed meanwhile,
        or has wrong bytes on the servers. The copy is not synced. The file's gate must not be held.
        ``followed``: see Making; ``must``: see BurstTier.admit; ``ahead``: somebody is going to
        read it, see BurstTier.admit_ahead; if it is read already it is followed.
        """
        while (event := self._running.get(ino)) is not None:
            await event.wait()
        event = self._running[ino] = trio.Event()
        try:
            file = await self._inodes.acquire(ino)
            if ahead:
                # A process takes up to a second to start: a reader would be there before it.
                is_read = file.handles > 1 and file.inode.size <= self._remembered
                followed = is_read or not self._movers.warm()
                if not followed:
                    self._unread.add(ino)
            try:
                return file.copy is not None or await self._stage(file, followed, must, ahead)
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
            del self._running[ino]
            self._unread.discard(ino)
            event.set()

    async def join(self, file: OpenInode) -> None:
        """Somebody has opened a file to read it. If it is small, and is being staged ahead of him
        just then, wait a moment for its copy: with that it is read at the device's speed for as
        long as it is open, and nothing comes from the servers twice. Does not suspend else."""
        if file.inode.ino in self._unread and file.inode.size <= _JOINED_MAX:
            with trio.move_on_after(_JOINED_S):
                await self._running[file.inode.ino].wait()

    async def bring(self, file: OpenInode, must: bool, opened: bool = False) -> None:
        """Someone is going to write: have a small file of the capacity tier staged first, and one
        that would lose its protection. The gate must not be held: staging needs it.

        ``must``: it can be changed in the burst tier alone. Raises Unavailable if it cannot be
        brought there though there is room, unless it is only ``opened`` as yet.
        """
        inode, objects, changes = file.inode, file.inode.objects, file.changes
        if file.copy is not None or file.on_object:
            return
        if await self._tier.blocks.is_used(file.own_source):
            return  # what programs use becomes the copy (BurstIO.take_source)
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

    async def _stage(self, file: OpenInode, followed: bool, must: bool, ahead: bool) -> bool:
        if not await self._by_home.take_cache(file):
            return False
        inode, objects, changes = file.inode, file.objects, file.changes
        policy = inode.policy or DEFAULT_POLICY
        if objects is None or file.marked or file.on_source:
            return False
        self._inodes.drop_kept(file)
        if await self._tier.blocks.is_used(file.own_source):
            return False  # a mapping would not see what is written to the copy
        if ahead:
            device = self._tier.admit_ahead(policy.tier, inode.space)
        else:
            device = self._tier.admit(policy.tier, inode.space, must)
        if device is None:
            return False

        def holds() -> bool:
            return (
                file.changes == changes
                and file.objects is objects
                and file.copy is None
                and not (file.marked or file.on_source or file.kept)  # it may be mapped
                and inode.nlink > 0
            )

        async def describe() -> Making:
            sparse = inode.blocks * 512 < inode.size
            origin = await self._capacity.describe(inode)
            return Making(origin, copy.place, inode.size, sparse, followed)

        def becomes(made: Made) -> Flip:
            faults.reach(_COPIED)
            copy.written()
            return Flip(file, {"copy": copy.place}, copy=copy)

        copy = await self._tier.create(device, inode.space)
        if ahead:
            self._tier.made_ahead(copy.id)
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
        return ino in self._running or ino in self._known

    def request(self, ino: int, followed: bool = False) -> None:
        """Stage the file soon; ``followed``: see Making."""
        if not self.is_staging(ino):
            self._waiting.append(ino)
            self._known[ino] = followed
            self._upkeep.wake(Work.STAGE)

    def read(self, inode: Inode) -> None:
        """Somebody begins to read a file that has no copy, nor a dirty mark: if its policy wants it
        in the burst tier, it is staged."""
        tier = DEFAULT_POLICY.tier if inode.policy is None else inode.policy.tier
        if tier in ("burst", "pinned") and inode.oid not in self._wrong and self._tier.has_devices:
            self.request(inode.ino, followed=inode.size <= self._remembered)

    async def work(self) -> float:
        """Stage what is requested; each request has asked for a worker of its own."""
        while self._waiting:
            ino = self._waiting.popleft()
            await self.stage(ino, followed=self._known.pop(ino))
        return NEVER_S

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows."""
        return {
            "active_files": len(self._running),
            "waiting_files": len(self._waiting),
            "staged_files": self._files,
            "staged_bytes": self._movers.tools.mover.moved_bytes,
            "failed_files": self._failed,
        }
