"""Eviction: a crowded burst tier drops clean copies, least recently used first, except needed ones
(files/damage.py)."""

import math
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.core.upkeep import NEVER_S
from aifs.files.damage import Needs
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.meta import forms

_EVICTED = faults.declare(
    "vfs.evict.recorded", "files have given up their copies, which are not deleted yet"
)

_BATCH = 256
PAUSE_S = 1.0


class Evictor:
    """Never takes a copy with newest bytes, pinned, in use, or *needed* (``Needs``). Used from one
    trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        needs: Needs,
    ) -> None:
        self._engine = services.engine
        self._tier = tier
        self._io = io
        self._collector = services.collector
        self._needs = needs
        self._evicted = 0
        self._paused_until_s = -math.inf  # by trio's clock

    async def work(self) -> float:
        """Make the room that the tier needs."""
        if (left_s := self._paused_until_s - trio.current_time()) > 0:
            return left_s
        while self._tier.needs_eviction():
            if not await self.make_room():  # all there is is in use; time will change that
                self._paused_until_s = trio.current_time() + PAUSE_S
                return PAUSE_S
        return NEVER_S

    async def make_room(self) -> bool:
        done = False
        for server, wanted in self._tier.needs_eviction().items():
            self._io.inodes.hear_of_uses()
            done |= await self._evict_all(self._tier.victims(server, wanted))
        return done

    async def _evict_all(self, copy_ids: Sequence[int]) -> bool:
        """Whether any of them was dropped."""
        done = False
        for start in range(0, len(copy_ids), _BATCH):
            done |= bool(await self.evict_copies(copy_ids[start : start + _BATCH]))
            await trio.lowlevel.checkpoint()
        return done

    async def evict(self, ino: int) -> bool:
        """Drop the clean copy of a file that is not open; whether it has none on return."""
        file = self._io.table.open.get(ino)
        if file is not None:
            return file.inode.copy is None
        inode, _, _ = await self._engine.view(forms.load, ino)
        return inode.copy is None or bool(await self.evict_copies([inode.copy.id]))

    async def give_up(self, copy_ids: Sequence[int]) -> list[int]:
        """Drop these clean copies, also pinned, of closed files: their device is left. Returns
        inode numbers of files that need theirs."""
        needing: list[int] = []
        for start in range(0, len(copy_ids), _BATCH):
            batch = copy_ids[start : start + _BATCH]
            await self.evict_copies(batch, mapped=True)
            needed = [copy_id for copy_id in batch if self._needs.is_needed(copy_id)]
            needing += (await self._engine.view(forms.find_copy_owners, needed)).values()
        return needing

    async def evict_copies(self, copy_ids: Iterable[int], mapped: bool = False) -> Collection[int]:
        """Drop these copies if possible; returns which. ``mapped``: also mapped ones."""
        owners = await self._engine.view(forms.find_copy_owners, copy_ids)
        closed = {copy_id: ino for copy_id, ino in owners.items() if not self._io.table.recall(ino)}
        needed = await self._needs.find(closed)
        asked = {copy_id: ino for copy_id, ino in closed.items() if copy_id not in needed}
        # From here on nobody opens them: one that was opened and closed may be mapped now.
        with self._io.table.opening(*asked.values()) as claimed:
            asked = {copy_id: ino for copy_id, ino in asked.items() if ino in claimed}
            used = set() if mapped else await self._find_mapped(asked)
            victims = {copy_id: ino for copy_id, ino in asked.items() if copy_id not in used}
            garbage = await self._engine.transact(forms.put_evicted, victims)
            faults.reach(_EVICTED)
            for copy_id in garbage:
                self._tier.evicted(copy_id)
                self._collector.add_garbage(copy_id)
        for copy_id in (owners.keys() - closed.keys()) | needed | used:
            self._tier.touch(copy_id)  # others are looked at first the next time
        self._needs.note(closed.keys(), needed)
        self._evicted += len(garbage)
        return garbage

    async def _find_mapped(self, copy_ids: Iterable[int]) -> set[int]:
        """Mapped copies of closed files: without its copy a mapping would show old bytes for
        ever."""
        found = set()
        for place in await self._engine.view(forms.find_places, copy_ids):
            copy = self._tier.open(place)
            try:
                if await copy.is_used():
                    found.add(copy.id)
            except FsError:
                pass  # it does not work, so nobody can use it
            finally:
                copy.close()
        return found

    def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``. ``needed_files``: copies kept by ``Needs``."""
        return {
            "evicted_files": self._evicted,
            "needed_files": sum(map(self._tier.is_clean, self._needs.copies)),
        }
