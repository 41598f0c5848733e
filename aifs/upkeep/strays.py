"""Objects that may lie on servers where no layout names them: deleting them, and what a mount does
about them.

The record of a stray is durable before its object is made, and goes only when the object is durably
deleted.
"""

from collections.abc import Callable

import trio

from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, RETRY_S, Upkeep, Work
from aifs.data.objects.object_set import delete_batch
from aifs.data.servers import Servers
from aifs.layout.striped import Striped
from aifs.meta import moves
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import Stray
from aifs.store.backup import Backup

_log = logger(__name__)

_DELETED = faults.declare("vfs.move.deleted", "stray objects are deleted, their records are not")

_BATCH = 256


class Strays:
    """Those that wait to be deleted. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        backup: Backup,
        upkeep: Upkeep,
        on_swept: Callable[[], None],
    ) -> None:
        """``on_swept``: called when some have been deleted."""
        self._engine = engine
        self._backup = backup
        self._upkeep = upkeep
        self._on_swept = on_swept
        self._servers = servers
        self._waiting: dict[tuple[int, int], Stray] = {}  # by oid and server
        self._failed: dict[
            int, int
        ] = {}  # how many could not be deleted, by server, when that was last tried
        self._sweeping = trio.Lock()

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Whether an object of this oid may lie on this server still: then it is no place for a new
        one.
        """
        return place in self._waiting

    def on(self, server: int) -> int:
        """How many wait to be deleted from a server."""
        return sum(number == server for _, number in self._waiting)

    def add(self, stray: Stray) -> None:
        """Nobody needs it any more; its record is there."""
        self._waiting[stray.oid, stray.server] = stray
        self._upkeep.wake(Work.STRAYS)

    async def work(self) -> float:
        """Delete them; in how many seconds to try again what was left."""
        return RETRY_S if await self.sweep() else NEVER_S

    async def load(self) -> int:
        """Take over what an earlier mount has left on record; how many that are."""
        found, stale = await self._engine.view(_read_strays)
        if stale:
            await self._engine.transact(moves.forget_strays, stale)
        for stray in found:
            self.add(stray)
        return len(found)

    async def sweep(self, urgent: bool = False) -> int:
        """Delete them, where that is possible; how many are left. What a lost server held is
        nobody's concern.

        Raises NoSpace or Unavailable if the metadata store cannot be changed.
        """
        async with self._sweeping:
            waiting = list(self._waiting.values())
            if not waiting:
                return 0
            seq = self._engine.seq
            await self._engine.barrier(seq)  # they are strays for good
            if not await self._backup.covered(seq, urgent):
                return len(waiting)
            by_server: dict[int, list[Stray]] = {}
            for stray in waiting:
                by_server.setdefault(stray.server, []).append(stray)
            for server, strays in by_server.items():
                for start in range(0, len(strays), _BATCH):
                    await self._delete(server, strays[start : start + _BATCH])
            return len(self._waiting)

    async def _delete(self, server: int, strays: list[Stray]) -> None:
        doomed = {stray.oid: (stray.ino, Striped(1, (server,))) for stray in strays}
        failed = await delete_batch(self._servers, doomed)
        faults.reach(_DELETED)
        deleted = [stray for stray in strays if stray.oid not in failed]
        await self._engine.transact(moves.forget_strays, deleted)
        for stray in deleted:
            del self._waiting[stray.oid, stray.server]
        if deleted:
            self._on_swept()
        if failed and len(failed) != self._failed.get(server):
            _log.info(
                "%d objects that have moved elsewhere stay for now: %s",
                len(failed),
                next(iter(failed.values())),
            )
        self._failed[server] = len(failed)


def _read_strays(tx: ReadTransaction) -> tuple[list[Stray], list[Stray]]:
    """Those to be deleted, and records that are none: the layout names the server."""
    found: list[Stray] = []
    stale: list[Stray] = []
    for stray in moves.load_strays(tx):
        try:
            objects = moves.find_objects(tx, stray.ino, stray.oid)
        except Unavailable:
            continue  # nobody can tell, so nothing is deleted
        named = objects is not None and stray.server in objects.layout.servers
        (stale if named else found).append(stray)
    return found, stale
