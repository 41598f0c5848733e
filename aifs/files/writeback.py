"""Background write-back: files closed without fsync become durable after a while, or on request."""

from collections.abc import Iterable, Sequence
from itertools import islice

import trio

from aifs.burst.copy import sync_copies
from aifs.burst.tier import BurstTier
from aifs.core.errors import FsError, NotFound
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import NEVER_S
from aifs.data.health import ObjectFails
from aifs.data.server import MissingObject
from aifs.files.file_io import FileIO
from aifs.files.open_inode import LostBytes
from aifs.files.services import Services
from aifs.meta import forms

_log = logger(__name__)

_SYNC_WHOLE_SERVERS_ABOVE = 64
_AT_ONCE = 64
"""Files that are being synced: each holds descriptors."""


class WriteBack:
    """Saves attributes of open files every ``commit_interval_s``; syncs closed dirty files every
    ``writeback_interval_s``."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
    ) -> None:
        self._engine = services.engine
        self._tier = tier
        self._io = io
        self._servers = services.servers
        self._interval_s = services.config.data.writeback_interval_s
        self._next_sync_s = 0.0  # by trio's clock
        self._is_idle = True

    async def work(self) -> float:
        """Write back; in how many seconds to do it again."""
        now_s = trio.current_time()
        if self._is_idle:
            self._is_idle, self._next_sync_s = False, now_s + self._interval_s
        await self._io.inodes.save_all()
        if now_s >= self._next_sync_s:
            await self.sync_closed_files()
            self._next_sync_s = now_s + self._interval_s
        if self._io.table.open:
            return self._io.inodes.commit_interval_s
        self._io.inodes.is_resting = True
        if self._io.table.unsynced:
            return max(self._next_sync_s - now_s, self._io.inodes.commit_interval_s)
        self._is_idle = True
        return NEVER_S  # the next file that is opened asks for it

    async def sync_all(self) -> None:
        """Bring all files to stable storage. Raises NoSpace, Unavailable."""
        # Before anything waits: a file that is closed or opened meanwhile belongs to one.
        opened = list(self._io.table.open)
        await self.sync_closed_files()
        for ino in opened:
            await self.sync_inode(ino)

    async def sync_closed_files(self) -> None:
        """Bring all closed files to stable storage; many by syncing the servers' filesystems.

        Raises NoSpace or Unavailable; files on working servers are synced all the same. A file that
        cannot be synced though its server works is logged, and keeps its dirty mark: it is not
        tried again, because the system has forgotten what it failed to write.
        """
        io = self._io
        batch = {
            ino: token
            for ino, token in io.table.unsynced.items()
            if ino not in io.table.open and not io.table.has_lost(ino)
        }
        if len(batch) > _SYNC_WHOLE_SERVERS_ABOVE:
            await self._servers.sync_all()
            await io.table.forget_marks(batch)
            batch = {ino: token for ino, token in batch.items() if token is None}
        await run_all(*(lambda ino=ino: self._sync_closed(ino) for ino in batch))

    async def _sync_closed(self, ino: int) -> None:
        try:
            await self.sync_inode(ino)
        except ObjectFails as error:
            _log.warning("inode %d: what was written to it last may be lost: %s", ino, error)

    async def sync_files(self, inos: Iterable[int]) -> None:
        """Bring these files, open or not, to stable storage. Raises as ``sync_bytes``."""
        synced = await self.sync_bytes(inos)
        if synced:
            await self._io.table.forget_marks(synced)
            await self._engine.barrier()

    async def sync_bytes(self, inos: Iterable[int]) -> dict[int, object | None]:
        """Bring the bytes of these files, open or not, to stable storage, and record their
        attributes, which are durable before later records.

        Returns those that were unsynced, for ``OpenTable.forgetting``. Others are synced despite an
        error; the first one is raised: NoSpace or Unavailable.
        """
        io = self._io
        synced = {
            ino: None if ino in io.table.open else io.table.unsynced[ino]
            for ino in inos
            if io.table.is_unsynced(ino)
        }
        errors: list[FsError] = []
        quiet = iter([ino for ino, token in synced.items() if token is not None])
        rest = [ino for ino, token in synced.items() if token is None]
        while batch := list(islice(quiet, _AT_ONCE)):
            rest += await self._sync_copies(batch, errors)
        left = iter(rest)

        async def sync_some() -> None:
            for ino in left:
                try:
                    await self.sync_inode(ino)
                except FsError as error:
                    errors.append(error)
                await trio.lowlevel.checkpoint()

        await run_all(*[sync_some] * min(_AT_ONCE, len(rest)))
        if errors:
            raise errors[0]
        return synced

    async def _sync_copies(self, inos: Sequence[int], errors: list[FsError]) -> list[int]:
        """Sync closed, unchangeable files in the burst tier together, without bringing them into
        core. Returns the others."""
        io = self._io
        await io.inodes.find_room()
        places = await self._engine.view(forms.find_burst_files, inos)
        copies = {}
        for ino, place in places.items():
            try:
                copies[ino] = self._tier.open(place)
            except FsError as error:
                errors.append(error)
        try:
            outcomes = await sync_copies(list(copies.values()))
            done = zip(copies, outcomes, strict=True)
            synced = {ino: copies[ino] for ino, outcome in done if outcome is None}
            await io.mirrors.keep_closed(synced)
        finally:
            for copy in copies.values():
                copy.close()
        left = [ino for ino in inos if ino not in places]
        for ino, outcome in zip(copies, outcomes, strict=True):
            if isinstance(outcome, MissingObject):
                left.append(ino)  # unless it is lost, it has been drained, or replaced, meanwhile
            elif isinstance(outcome, FsError):
                if copies[ino].lost:
                    io.table.note_lost(ino, LostBytes(copies[ino].id, copies[ino].lost))
                errors.append(outcome)
            elif outcome is not None:
                raise outcome
        return left

    async def sync_inode(self, ino: int) -> None:
        """Bring one file, open or not, to stable storage, unless it is deleted."""
        try:
            file = await self._io.inodes.acquire(ino)
        except NotFound:
            self._io.table.unsynced.pop(ino, None)
            return
        try:
            if file.inode.nlink == 0:
                # The collector may be erasing it: its record must not be written again.
                self._io.table.unsynced.pop(ino, None)
                return
            await self._io.sync(file)
            if not file.marked:
                self._io.table.unsynced.pop(ino, None)
        finally:
            await self._io.inodes.release(file)
