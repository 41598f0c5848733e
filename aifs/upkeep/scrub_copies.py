"""Verifying clean burst copies: of a file that the data servers have, too, but that programs read
there.

A copy that is wrong is dropped, since the file is whole without it. Where the data servers have
lost bytes that the copy has, the file is made whole from it (``from_copies``).
"""

from collections.abc import Awaitable, Callable, Sequence

from aifs.core.errors import FsError
from aifs.meta import namespace
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode
from aifs.movers.movers import Movers
from aifs.upkeep.evict import Evictor
from aifs.upkeep.judging import CopyRange, Judgement, compare, find_parts, judge_copy
from aifs.upkeep.scrubbing import Lost, ScrubResult

_SEEN_AT_ONCE = 16  # records of files
_SMALL = 1 << 20  # bytes of a file that is compared together with others


class CopyScrubber:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        movers: Movers,
        evictor: Evictor,
        throttle: Callable[[int], Awaitable[None]],
        piece: Callable[[], int],
        give_way: Callable[[], Awaitable[None]],
    ) -> None:
        """``throttle``, ``piece``, ``give_way``: as of Scrubber."""
        self._engine = engine
        self._movers = movers
        self._evictor = evictor
        self._throttle = throttle
        self._piece = piece
        self._give_way = give_way

    async def find_right(self, inos: Sequence[int]) -> set[int]:
        """Those of many files whose copies need no more: they are right, as far as that can be
        told, or there are none. The others are left to ``scrub``."""
        right = set[int]()
        for first in range(0, len(inos), _SEEN_AT_ONCE):
            some = inos[first : first + _SEEN_AT_ONCE]
            asked = dict[int, CopyRange]()
            seen = await self._engine.view(_see_small, some, min(self._piece(), _SMALL))
            for ino, copy in zip(some, seen, strict=True):
                if isinstance(copy, CopyRange):
                    asked[ino] = copy
                elif copy:
                    right.add(ino)
            if asked:
                answers = await self._movers.carry_out(compare, list(asked.values()))
                assert answers is not None  # nothing cancels it
                right.update(
                    ino
                    for ino, answer in zip(asked, answers, strict=True)
                    if answer is not Judgement.WRONG
                )
                await self._throttle(sum(copy.size for copy in asked.values()))
            await self._give_way()
        return right

    async def scrub(self, ino: int, found: ScrubResult, repair: bool) -> bool:
        """Verify the copy of a file, if it has a clean one and checksums; whether a wrong one has
        been dropped.
        """
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is None or inode.copy is None or not _is_cached(inode):
            return False
        judgement = await judge_copy(
            self._engine, self._movers, inode, self._throttle, self._piece()
        )
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


def _is_cached(inode: Inode) -> bool:
    """Whether the file has a clean copy."""
    return inode.copy is not None and not inode.in_burst and inode.layout is not None


def _see_small(tx: ReadTransaction, inos: Sequence[int], limit: int) -> list[CopyRange | bool]:
    """What has to be compared of each file; True: nothing, as it has no clean copy; False: it has
    more than ``limit`` bytes, or damaged records, or no checksums."""
    found: list[CopyRange | bool] = []
    for ino in inos:
        try:
            inode = namespace.find_inode(tx, ino)
            if inode is None or inode.copy is None or not _is_cached(inode):
                found.append(True)
                continue
            parts = find_parts(tx, inode, 0) if inode.size <= limit else ()
            found.append(CopyRange(inode.copy, inode.size, parts) if parts else False)
        except FsError:
            found.append(False)
    return found
