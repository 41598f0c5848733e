"""Metadata engines that use every freedom that kv.py leaves them, to find callers that rely on
more.

LMDB's engine never suspends, runs each function once and commits at once. One behind a socket does
none of that:

* ``suspending`` lets other tasks run before and after a transaction or a view;
* ``repeating`` runs each function on state that is thrown away, and then again;
* ``conflicting`` runs each function on state that is thrown away, lets others commit, and runs it
  on what they left.

How often they suspend is drawn from a seed that pytest prints (``--engine-seed``).
"""

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import trio

from aifs.meta.kv import Result
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledTransaction, LeveledView

_PAUSES_MAX = 3

draws = random.Random(0)


async def _pause() -> None:
    for _ in range(draws.randint(0, _PAUSES_MAX)):
        await trio.lowlevel.checkpoint()


async def _pause_after_commit() -> None:
    """An engine that has committed must not say that it was cancelled."""
    for _ in range(draws.randint(0, _PAUSES_MAX)):
        await trio.lowlevel.cancel_shielded_checkpoint()


class Suspending(LmdbEngine):
    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        await _pause()
        try:
            return await super().transact(function, *args)
        finally:
            await _pause_after_commit()

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        await _pause()
        result = await super().view(function, *args)
        await _pause()
        return result


class Repeating(LmdbEngine):
    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        self._try(function, *args)
        return await super().transact(function, *args)

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        with suppress(Exception):
            function(LeveledView(self._memtable, self._frozen, self._database), *args)
        return await super().view(function, *args)

    def _try(self, function: Callable[..., Any], *args: Any) -> None:
        with suppress(Exception):
            function(LeveledTransaction(self._memtable, self._frozen, self._database), *args)


class Conflicting(Repeating):
    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        self._try(function, *args)
        await _pause()
        try:
            return await super().transact(function, *args)
        finally:
            await _pause_after_commit()


ENGINES: dict[str, type[LmdbEngine]] = {
    "lmdb": LmdbEngine,
    "suspending": Suspending,
    "repeating": Repeating,
    "conflicting": Conflicting,
}
