"""Processes for work on the bytes of the store: reading, hashing, coding, writing, syncing them.

What is to be done is a plain value, and a function of a module that does it: so it can be done
anywhere, in the daemon or in a mover process (pool.py). The daemon decides what has to be done, and
puts on record what has been.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from aifs.burst.making import MakingTools, never
from aifs.burst.pool import NoProcess, Pool
from aifs.core.budget import OverBudget

Value = TypeVar("Value")
Result = TypeVar("Result")
Function = Callable[[Value, MakingTools, Callable[[], bool]], Awaitable[Result]]
"""Does what a value says. It is defined in a module, and uses nothing but the tools. Values,
results and errors can be pickled. What it does may be done twice, or half and then again. The last
argument says whether the work is not wanted any more, and is asked now and then; Mover.begin is
what asks the daemon for that, and for leave to go on."""


class Movers:
    """Carries out one kind of work: under the limits of its tools. Used from one trio thread."""

    def __init__(self, tools: MakingTools, pool: Pool | None = None) -> None:
        """``pool``: processes that do it; None: this one."""
        self.tools = tools
        """Of this process."""
        self._pool = pool

    async def call(self, function: Callable[[Value], Result], value: Value) -> Result:
        """``function(value)``, which takes the processor, such as to look into what users have
        written. It is in a thread if there is no process for it. Raises as ``carry_out``."""
        return await self.carry_out(_call, (function, value))

    async def carry_out(
        self,
        function: Function[Value, Result],
        value: Value,
        cancelled: Callable[[], bool] = never,
        here: bool = False,
    ) -> Result:
        """What ``function`` makes of ``value``. ``here``: in this process, whose caches it needs.

        When this is cancelled, the work has ended on return. Raises what the function raises;
        Unavailable.
        """
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
