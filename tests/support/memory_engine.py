"""The metadata engine in memory: the reference for the contract of ``kv.py``, and the engine of
fast tests.

Holds nothing on disk, so its barrier has nothing to do. Imports ``kv`` alone.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import trio
from sortedcontainers import SortedDict

from aifs.meta.kv import Engine, ReadTransaction, Result, Tap, Transaction, check_key, check_pair


class _View(ReadTransaction):
    def __init__(self, pairs: SortedDict, seq: int) -> None:
        self._pairs = pairs
        self.seq = seq

    def get(self, key: bytes) -> bytes | None:
        return self._pairs.get(key)

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        pairs = self._pairs
        found = ((key, pairs[key]) for key in pairs.irange(start, end, (True, False)))
        return islice(found, limit) if limit else found


class _Transaction(_View, Transaction):
    """Changes the map in place and remembers what was there before."""

    def __init__(self, pairs: SortedDict, seq: int) -> None:
        super().__init__(pairs, seq)
        self.before: dict[bytes, bytes | None] = {}

    def put(self, key: bytes, value: bytes) -> None:
        check_pair(key, value)
        self.before.setdefault(key, self._pairs.get(key))
        self._pairs[key] = value

    def delete(self, key: bytes) -> None:
        check_key(key)
        self.before.setdefault(key, self._pairs.pop(key, None))

    def undo(self) -> None:
        for key, value in self.before.items():
            if value is None:
                self._pairs.pop(key, None)
            else:
                self._pairs[key] = value


class MemoryEngine(Engine):
    recovered = found_seq = opened_seq = 0
    short_of_space = False

    def __init__(self) -> None:
        self._pairs = SortedDict()
        self.seq = self.durable_seq = 0

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        transaction = _Transaction(self._pairs, self.seq + 1)
        try:
            result = function(transaction, *args)
        except BaseException:
            transaction.undo()
            raise
        if transaction.before:
            self.seq = self.durable_seq = self.seq + 1
        return result

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        return function(_View(self._pairs, self.seq), *args)

    async def barrier(self, seq: int | None = None) -> None:
        pass

    def listen(self, tap: Tap) -> None:
        raise NotImplementedError

    def read_damaged_as(self, value: bytes | None) -> None:
        pass

    async def run(self) -> None:
        await trio.sleep_forever()

    def close(self) -> None:
        self._pairs = SortedDict()

    def abandon(self) -> None:
        self.close()
