"""Processes for work on bytes: reading, hashing, coding, writing, syncing. A plain value and a
module's function say what is done, in the daemon or a mover (pool.py); the daemon decides, and
records."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from aifs.burst.making import MakingTools, never
from aifs.burst.pool import NoProcess, Pool
from aifs.core.budget import OverBudget

Value = TypeVar("Value")
Result = TypeVar("Result")
Function = Callable[[Value, MakingTools, Callable[[], bool]], Awaitable[Result]]
"""A module's function that does what a value says, with the tools alone. Values, results and errors
can be pickled. It may run twice, or half and then again. The last argument, asked now and then,
says whether the work is unwanted; Mover.begin asks the daemon, also for leave to go on."""


class Movers:
    """Carries out one kind of work: under the limits of its tools. Used from one trio thread."""

    def __init__(self, tools: MakingTools, pool: Pool | None = None) -> None:
        """``pool``: processes that do it; None: this one."""
        self.tools = tools
        """Of this process."""
        self._pool = pool

    async def call(self, function: Callable[[Value], Result], value: Value) -> Result:
        """``function(value)``, which takes processor time, in a process, or else a thread. Raises
        as ``carry_out``."""
        return await self.carry_out(_call, (function, value))

    async def carry_out(
        self,
        function: Function[Value, Result],
        value: Value,
        cancelled: Callable[[], bool] = never,
        here: bool = False,
    ) -> Result:
        """What ``function`` makes of ``value``. ``here``: in this process, for its caches.
        Cancelled, the work has ended on return. Raises errors of the function; Unavailable."""
        if not here and self._pool is not None and self._pool.is_open:
            try:
                return await self._pool.carry_out(function, value, self.tools, cancelled)
            except (OverBudget, NoProcess):
                pass  # it needs more memory at once than a process has, or there is none
        return await function(value, self.tools, cancelled)


async def _call(
    asked: tuple[Callable[[Value], Result], Value],
    tools: MakingTools,
    cancelled: Callable[[], bool],
) -> Result:
    function, value = asked
    return await trio.to_thread.run_sync(function, value)
