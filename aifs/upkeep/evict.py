"""Eviction: clean copies are dropped from the burst tier when it is crowded, least recently used
ones first.

A copy stays, though it is clean, if it may hold bytes that nobody else has: of a file that the data
servers cannot tell at present (a server is lost, absent or failing, columns are known to be wrong),
or that a scrub has found to be wrong there.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.file_io import FileIO
from aifs.meta import forms
from aifs.meta.degraded import any_degraded
from aifs.meta.kv import Engine
from aifs.meta.server_uses import is_file_whole

_log = logger(__name__)

_EVICTED = faults.declare(
    "vfs.evict.recorded", "files have given up their copies, which are not deleted yet"
)

_BATCH = 256
_PAUSE_S = 1.0


class Evictor:
    """Never takes a copy that holds a file's newest bytes, is pinned, in use, or *needed*: as said
    above. Used from one trio thread."""

    def __init__(
        self, engine: Engine, servers: Servers, tier: BurstTier, io: FileIO, collector: Collector
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._tier = tier
        self._io = io
        self._collector = collector
        self._evicted = 0
        self._needed: set[int] = (
            set()
        )  # ids of copies that were found to be when they were last looked at
        self.wrong_objects: Callable[[], Set[int]] = frozenset
        """The oids of files of which the data servers are known to have lost bytes."""
        self.restore: Callable[[int], Awaitable[object]] = _leave
        """Makes a file whose copy is needed one of the burst tier again."""

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
        """Drop these clean copies, pinned ones too, of files that are not open: their device is to
        be left. Files that need theirs are drained from them."""
        for start in range(0, len(copy_ids), _BATCH):
            batch = copy_ids[start : start + _BATCH]
            await self._evict(batch, mapped=True)
            needed = [copy_id for copy_id in batch if self.is_needed(copy_id)]
            for ino in (await self._engine.view(forms.find_copy_owners, needed)).values():
                await self.restore(ino)

    async def _evict(self, copy_ids: Iterable[int], mapped: bool = False) -> int:
        """Drop those of these copies that can be; how many. ``mapped``: also what programs have
        mapped.
        """
        owners = await self._engine.view(forms.find_copy_owners, copy_ids)
        closed = {copy_id: ino for copy_id, ino in owners.items() if ino not in self._io.open}
        needed = await self.find_needed(closed)
        used = set() if mapped else await self._find_mapped(closed.keys() - needed)
        victims = {copy_id: ino for copy_id, ino in closed.items() if copy_id not in needed | used}
        garbage = await self._engine.transact(  # some may have been opened meanwhile
            forms.put_evicted,
            {copy_id: ino for copy_id, ino in victims.items() if ino not in self._io.open},
        )
        faults.reach(_EVICTED)
        for copy_id in garbage:
            self._tier.evicted(copy_id)
            self._collector.add_garbage(copy_id)
        for copy_id in needed | used:
            self._tier.touch(copy_id)  # others are looked at first the next time
        self._needed = (self._needed - closed.keys()) | needed
        self._evicted += len(garbage)
        return len(garbage)

    async def _find_mapped(self, copy_ids: Iterable[int]) -> set[int]:
        """Which copies of closed files programs have mapped: a mapping outlives its descriptor.
        Without the copy it would show the old bytes for ever, while the file is rewritten
        elsewhere."""
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

    async def find_needed(self, owners: Mapping[int, int]) -> set[int]:
        """Which of these clean copies, with their files, are needed now."""
        gone, wrong, needed = missing(self._servers), self.wrong_objects(), set()
        if gone or wrong or await self._engine.view(any_degraded):
            for copy_id, ino in owners.items():
                if not await self._engine.view(is_file_whole, ino, gone, wrong):
                    needed.add(copy_id)
                await trio.lowlevel.checkpoint()
        return needed

    def is_needed(self, copy_id: int) -> bool:
        """Whether a copy stayed, when somebody last wanted to drop it, because the data servers
        lack bytes of it.
        """
        return copy_id in self._needed

    def released(self, copy_id: int) -> None:
        """The copy is no cache any more."""
        self._needed.discard(copy_id)

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows. ``needed_files``: whose copies stayed, as ``is_needed``
        says.
        """
        return {
            "evicted_files": self._evicted,
            "needed_files": sum(map(self._tier.is_clean, self._needed)),
        }


async def _leave(ino: int) -> None:
    """The file stays as it is."""


def missing(servers: Servers) -> frozenset[int]:
    """Data servers that cannot be relied on now: lost, absent or failing."""
    return frozenset(server.id for server in servers.capacity() if server.state != "ok")
