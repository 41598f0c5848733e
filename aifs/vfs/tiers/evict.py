"""Eviction: clean copies are dropped from the burst tier when it is crowded, least recently used ones first."""

from collections.abc import Iterable, Sequence
from typing import Any

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.meta import forms
from aifs.meta.kv import Engine
from aifs.vfs.collector import Collector
from aifs.vfs.io.file_io import FileIO

_log = logger(__name__)

_EVICTED = faults.declare("vfs.evict.recorded", "files have given up their copies, which are not deleted yet")

_BATCH = 256
_PAUSE_S = 1.0


class Evictor:
    """Never takes a copy that holds a file's newest bytes, is pinned, or is in use. Used from one trio thread."""

    def __init__(self, engine: Engine, tier: BurstTier, io: FileIO, collector: Collector) -> None:
        self._engine = engine
        self._tier = tier
        self._io = io
        self._collector = collector
        self._evicted = 0

    async def run(self) -> None:
        """Evict when the tier needs it, until cancelled."""
        while True:
            await self._tier.crowded()
            try:
                if not await self._make_room():
                    await trio.sleep(_PAUSE_S)  # all there is is in use; time will change that
            except FsError as error:
                _log.warning("dropping cached copies has to wait: %s", error)
                await trio.sleep(_PAUSE_S)

    async def _make_room(self) -> bool:
        done = False
        for server, wanted in self._tier.needs_eviction().items():
            victims = self._tier.victims(server, wanted)
            for start in range(0, len(victims), _BATCH):
                done |= await self._evict(victims[start : start + _BATCH]) > 0
                await trio.lowlevel.checkpoint()
        return done

    async def evict(self, ino: int) -> bool:
        """Drop the clean copy of a file that is not open; whether it has none on return."""
        file = self._io.open.get(ino)
        if file is not None:
            return file.inode.copy is None
        inode, _, _ = await self._engine.view(forms.load, ino)
        return inode.copy is None or await self._evict([inode.copy.id]) > 0

    async def give_up(self, copy_ids: Sequence[int]) -> None:
        """Drop these clean copies, pinned ones too, of files that are not open: their device is to be left."""
        for start in range(0, len(copy_ids), _BATCH):
            await self._evict(copy_ids[start : start + _BATCH])

    async def _evict(self, copy_ids: Iterable[int]) -> int:
        owners = await self._engine.view(forms.find_copy_owners, copy_ids)
        victims = {copy_id: ino for copy_id, ino in owners.items() if ino not in self._io.open}
        garbage = await self._engine.transact(forms.put_evicted, victims)
        faults.reach(_EVICTED)
        for copy_id in garbage:
            self._tier.evicted(copy_id)
            self._collector.add_garbage(copy_id)
        self._evicted += len(garbage)
        return len(garbage)

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows."""
        return {"evicted_files": self._evicted}
