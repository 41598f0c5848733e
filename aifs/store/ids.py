"""Fresh numbers for inodes, directory cookies and object ids."""

import struct

import trio

from aifs.core.errors import Unavailable
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction

WINDOW = 8192
"""Ids that are reserved at a time: one journal sync per so many."""

_TAKEN = struct.Struct("<QQ")
"""Value of a ``v`` record: the first ids of the last two windows, the older one first; equal if
there is one.
"""


class IdAllocator:
    """Hands out numbers of one ascending sequence, each once in the life of the store.

    They come from a window whose end is durable before its first number is used. A new window is
    reserved with a barrier, which also makes all older transactions durable: so after a power cut
    every id that the recovered metadata does not know of lies in the host's last windows.
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
                end = await self._engine.transact(_take_window)
                await self._engine.barrier()
                self._next, self._end = end - WINDOW, end


def take_ids(tx: Transaction, count: int) -> int:
    """The next ``count`` ids are the caller's; the one behind them."""
    end = tx.counter(keys.COUNTER_IDS) + count
    tx.add(keys.COUNTER_IDS, count)
    return end


def _take_window(tx: Transaction) -> int:
    end = take_ids(tx, WINDOW)
    taken = _find_windows(tx, tx.host)
    tx.put(keys.windows(tx.host), _TAKEN.pack(taken[-1] if taken else end - WINDOW, end - WINDOW))
    return end


def decode_windows(record: bytes | None) -> tuple[int, ...]:
    """The first ids of the windows that a ``v`` record names. Raises Unavailable if it is
    damaged.
    """
    try:
        return () if record is None else _TAKEN.unpack(record)
    except struct.error:
        raise Unavailable("the record of a host's windows of ids is damaged") from None


async def last_windows(engine: Engine) -> list[tuple[int, int]]:
    """Where ids of this host may be that nobody knows: first id, and the one behind the last.

    They are the window that was in use when the host had the store last, and the one before, from
    which files may have been made ahead that nobody has used.
    """
    taken = await engine.view(_find_windows, engine.host)
    if len(taken) == 2 and taken[0] + WINDOW == taken[1]:
        return [(taken[0], taken[1] + WINDOW)]
    return [(first, first + WINDOW) for first in dict.fromkeys(taken)]


def _find_windows(tx: ReadTransaction, host: int) -> tuple[int, ...]:
    return decode_windows(tx.get(keys.windows(host)))
