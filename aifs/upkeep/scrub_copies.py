"""Verifying clean burst copies: of a file that the data servers have, too, but that programs read
there.

A copy that is wrong is dropped, since the file is whole without it. Where the data servers have
lost bytes that the copy has, the file is made whole from it (``from_copies``).
"""

from collections.abc import Awaitable, Callable

from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.upkeep.evict import Evictor
from aifs.upkeep.judging import COPY_PIECE, Judgement, judge_copy
from aifs.upkeep.scrubbing import Lost, ScrubResult


class CopyScrubber:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        evictor: Evictor,
        throttle: Callable[[int], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._evictor = evictor
        self._throttle = throttle
        self._buffers = BudgetedBuffers(servers.budget)

    async def scrub(self, ino: int, found: ScrubResult, repair: bool) -> bool:
        """Verify the copy of a file, if it has a clean one and checksums; whether a wrong one has
        been dropped.
        """
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is None or inode.copy is None or inode.in_burst or inode.layout is None:
            return False

        async def throttle(count: int) -> None:
            found.read_bytes += count
            await self._throttle(count)

        memory = await self._buffers.take(COPY_PIECE)
        judgement = await judge_copy(self._engine, self._servers, inode, memory, throttle)
        if judgement is not Judgement.WRONG or not await self._is_same(inode):
            return False
        found.flaws += 1
        if any(lost.ino == ino for lost in found.lost):
            return False  # neither is whole
        if repair and await self._evictor.evict(ino):
            found.repaired += 1
            return True
        reason = (
            f"its burst copy has other bytes, and is {'in use' if repair else 'left'}; the "
            "data servers have the right ones"
        )
        found.lost.append(
            Lost(ino, inode.oid, 0, inode.size, (inode.copy.server,), reason, for_good=False)
        )
        return False

    async def _is_same(self, before: Inode) -> bool:
        """Whether the copy has been a clean one all the time: who changes it makes it the file
        first.
        """
        inode = await self._engine.view(namespace.find_inode, before.ino)
        return inode is not None and (inode.copy, inode.oid, inode.layout) == (
            before.copy,
            before.oid,
            before.layout,
        )
