"""Fresh numbers for inodes, directory cookies and object ids."""

import struct

import trio

from aifs.core.errors import Unavailable
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction

WINDOW = 8192
"""Ids that are reserved at a time: one journal sync per so many."""

_TAKEN = struct.Struct("<QQ")
"""A ``v`` record: first ids of the last two windows, older first; equal for one."""


class IdAllocator:
    """Numbers of one ascending sequence, each once in the store's life.

    A window's end is durable before its first number is used. The barrier of a new window makes
    older transactions durable, too: so after a power cut all ids unknown to the metadata are in the
    host's last windows.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._next = 0
        self._end = 0
        self._lock = trio.Lock()

    async def take(self) -> int:
        """A new number. Raises NoSpace or Unavailable if no new window can be reserved."""
        while self._next == self._end:
            await self._reserve()
        number = self._next
        self._next += 1
        return number

    def is_recent(self, number: int) -> bool:
        """Whether ``number`` is in the current window, where recovery looks."""
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
    """First ids of the windows in a ``v`` record. Raises Unavailable if damaged."""
    try:
        return () if record is None else _TAKEN.unpack(record)
    except struct.error:
        raise Unavailable("the record of a host's windows of ids is damaged") from None


async def last_windows(engine: Engine) -> list[tuple[int, int]]:
    """Where unknown ids of this host may be: first id, and the one behind the last: the last window
    in use, and the one before, from which files may have been made ahead."""
    taken = await engine.view(_find_windows, engine.host)
    if len(taken) == 2 and taken[0] + WINDOW == taken[1]:
        return [(taken[0], taken[1] + WINDOW)]
    return [(first, first + WINDOW) for first in dict.fromkeys(taken)]


def _find_windows(tx: ReadTransaction, host: int) -> tuple[int, ...]:
    return decode_windows(tx.get(keys.windows(host)))
