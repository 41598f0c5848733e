"""Who carries out work on the bytes of the store: reading, hashing, coding, writing, syncing them.

What is to be done is a plain value, and a function of a module that does it: so it can be done
anywhere. The daemon decides what has to be done, and puts on record what has been.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from aifs.burst.making import MakingTools, never

Value = TypeVar("Value")
Result = TypeVar("Result")
Function = Callable[[Value, MakingTools, Callable[[], bool]], Awaitable[Result]]
"""Does what a value says. It is defined in a module, and uses nothing but the tools. Values,
results and errors can be pickled. The last argument says whether the work is not wanted any more,
and is asked now and then."""


class Movers:
    """Carries out one kind of work: under the limits of its tools. Used from one trio thread."""

    def __init__(self, tools: MakingTools) -> None:
        self.tools = tools
        """Of this process."""

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
        return await function(value, self.tools, cancelled)
