"""Background write-back: what was closed without fsync becomes durable after a while."""

import trio

from aifs.core.errors import NotFound
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import NEVER_S
from aifs.data.health import ObjectFails
from aifs.data.servers import Servers
from aifs.files.file_io import FileIO

_log = logger(__name__)

_SYNC_WHOLE_SERVERS_ABOVE = 64


class WriteBack:
    """While files are open, saves in-core attributes every ``commit_interval_s``; syncs closed
    dirty files every ``writeback_interval_s``.
    """

    def __init__(
        self,
        io: FileIO,
        servers: Servers,
        interval_s: float,
    ) -> None:
        self._io = io
        self._servers = servers
        self._interval_s = interval_s
        self._next_sync_s = 0.0  # by trio's clock
        self._is_idle = True

    async def work(self) -> float:
        """Write back; in how many seconds to do it again."""
        now_s = trio.current_time()
        if self._is_idle:
            self._is_idle, self._next_sync_s = False, now_s + self._interval_s
        await self._io.save_all()
        if now_s >= self._next_sync_s:
            await self.sync_closed_files()
            self._next_sync_s = now_s + self._interval_s
        if self._io.open:
            return self._io.commit_interval_s
        self._io.is_resting = True
        if self._io.unsynced:
            return max(self._next_sync_s - now_s, self._io.commit_interval_s)
        self._is_idle = True
        return NEVER_S  # the next file that is opened asks for it

    async def sync_all(self) -> None:
        """The bytes of all files are on stable storage when this returns. Raises NoSpace,
        Unavailable.
        """
        opened = list(
            self._io.open
        )  # before anything waits: a file that is closed or opened meanwhile belongs to one
        await self.sync_closed_files()
        for ino in opened:
            await self.sync_inode(ino)

    async def sync_closed_files(self) -> None:
        """The bytes of all files that are closed now are on stable storage when this returns.

        Few files are synced one by one; for many it is cheaper to sync the servers' filesystems as
        a whole. Raises NoSpace or Unavailable; files on servers that work are synced all the same.
        A file that cannot be synced though its server works is logged, and keeps its dirty mark:
        nobody waits for it, and others must not either.
        """
        io = self._io
        batch = {ino: token for ino, token in io.unsynced.items() if ino not in io.open}
        if len(batch) > _SYNC_WHOLE_SERVERS_ABOVE:
            await self._servers.sync_all()
            untouched = [
                ino
                for ino, token in batch.items()
                if token is not None and io.unsynced.get(ino) is token and ino not in io.open
            ]
            await io.forget_marks(untouched)
            batch = {ino: token for ino, token in batch.items() if token is None}
        await run_all(*(lambda ino=ino: self._sync_closed(ino) for ino in batch))

    async def _sync_closed(self, ino: int) -> None:
        try:
            await self.sync_inode(ino)
        except ObjectFails as error:
            _log.warning("inode %d: what was written to it last may be lost: %s", ino, error)

    async def sync_inode(self, ino: int) -> None:
        """One file, open or not, is on stable storage when this returns; nothing happens if it is
        deleted.
        """
        try:
            file = await self._io.acquire(ino)
        except NotFound:
            self._io.unsynced.pop(ino, None)
            return
        try:
            if (
                file.inode.nlink == 0
            ):  # the collector may be erasing it: its record must not be written again
                self._io.unsynced.pop(ino, None)
                return
            await self._io.sync(file)
            if not file.marked:
                self._io.unsynced.pop(ino, None)
        finally:
            await self._io.release(file)
