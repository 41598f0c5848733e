"""Fresh numbers for inodes, directory cookies and object ids."""

import trio

from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction

WINDOW = 8192
"""Ids that are reserved at a time: one journal sync per so many."""


class IdAllocator:
    """Hands out numbers of one ascending sequence, each once in the life of the store.

    They come from a window whose end is durable before its first number is used. A new window is
    reserved with a barrier, which also makes all older transactions durable: so after a power cut
    every id that the recovered metadata does not know of lies in the last window.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0
        self._end = 0
        self._lock = trio.Lock()

    async def take(self) -> int:
        """A number never given before. Raises NoSpace or Unavailable if a new window cannot be
        reserved.
        """
        while self._next == self._end:
            await self._reserve()
        number = self._next
        self._next += 1
        return number

    def is_recent(self, number: int) -> bool:
        """Whether ``number`` lies in the current window, where recovery looks for what a power cut
        left.
        """
        return self._end - WINDOW <= number < self._end

    async def _reserve(self) -> None:
        async with self._lock:
            if self._next == self._end:
                end = await self._engine.transact(take_ids, WINDOW)
                await self._engine.barrier()
                self._next, self._end = end - WINDOW, end


def take_ids(tx: Transaction, count: int) -> int:
    """The next ``count`` ids are the caller's; the one behind them."""
    end = tx.counter(keys.COUNTER_IDS) + count
    tx.add(keys.COUNTER_IDS, count)
    return end


async def last_windows(engine: Engine) -> tuple[int, int]:
    """Where unknown ids may be: first id, and the one behind the last.

    It is the window that was in use when the store was last open, and the one before, from which
    files may have been made ahead that nobody has used.
    """
    end = await engine.view(ReadTransaction.counter, keys.COUNTER_IDS)
    return max(end - 2 * WINDOW, keys.FIRST_FREE_ID), end
