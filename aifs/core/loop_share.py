"""How background work shares the event loop with requests.

Its bookkeeping, all it does on the loop, comes in short stretches; between them it gives way, and
rests while requests keep coming, so that all background tasks' steps together take a tenth.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import trio

_STRETCH_S = 250e-6
"""Bookkeeping without a turn for others. About what two requests take."""

_QUIET_S = 2e-3
"""Without a request for so long, nobody is waiting to send the next one."""

_REST = 9
"""How much longer it rests than it has worked, while requests keep coming."""

_REST_MAX_S = 0.05

_is_background: ContextVar[bool] = ContextVar("is_background", default=False)


@contextmanager
def background() -> Iterator[None]:
    """The work within it, and of the tasks that are started there, is background work."""
    token = _is_background.set(True)
    try:
        yield
    finally:
        _is_background.reset(token)


class LoopShare(trio.abc.Instrument):
    """Used from one trio thread."""

    def __init__(self) -> None:
        self.requested_s = -math.inf
        """When the newest request was read or answered, of time.perf_counter()."""
        self.background_s = 0.0
        """Time of the loop that background tasks have taken, except the step that is under way."""
        self._began_s = time.perf_counter()  # when that one has begun
        self._free_at_s = 0.0
        """When the next stretch may begin, while requests keep coming."""
        self._worked_s = 0.0
        """The time taken when a task last gave way."""
        self._told = (self._began_s, 0.0)
        """When ``status`` was last asked, and what had been taken then."""

    @contextmanager
    def measured(self) -> Iterator[None]:
        """It is known within it what background work takes."""
        trio.lowlevel.add_instrument(self)
        try:
            yield
        finally:
            trio.lowlevel.remove_instrument(self)

    async def give_way(self, is_urgent: bool = False) -> None:
        """Called between short pieces of bookkeeping. Suspends after a stretch, longer while
        requests keep coming, unless it ``is_urgent``."""
        now_s = time.perf_counter()
        worked_s = self.background_s + now_s - self._began_s - self._worked_s
        is_busy = now_s < self.requested_s + _QUIET_S and not is_urgent
        if worked_s >= _STRETCH_S:
            self._worked_s += worked_s
            free_at_s = max(self._free_at_s, now_s) + _REST * worked_s
            self._free_at_s = min(free_at_s, now_s + _REST_MAX_S)
            if not is_busy:
                await trio.lowlevel.checkpoint()
        if is_busy and now_s < self._free_at_s:
            await trio.sleep(self._free_at_s - now_s)

    def status(self) -> dict[str, Any]:
        """``seconds`` of background work on the loop since the mount, and its ``share`` since the
        last call."""
        now_s = time.perf_counter()
        (then_s, before_s), self._told = self._told, (now_s, self.background_s)
        share = (self.background_s - before_s) / max(now_s - then_s, 1e-9)
        return {"seconds": round(self.background_s, 3), "share": round(share, 4)}

    # --- what trio tells ---

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self._began_s = time.perf_counter()

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if _is_background in task.context:
            self.background_s += time.perf_counter() - self._began_s
