"""One budget for the memory of all buffers: hard, first come first served, given back by caches.

A task reserves a buffer's bytes before, and releases them after. Caches keep what they reserve
while it is useful: they register a function that gives memory back, called when it is wanted, and
now and then for a part, so that bursts are not remembered for ever.
"""

from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from aifs.core.waiting import MEMORY, waits_for

GiveBack = Callable[[int], None]
"""Release about so many bytes of what can be had again, at once, or when its users let go. Does not
block and reserves nothing."""


RELAX_EVERY_S, _RELAX_IDLE_S = 10.0, 60.0
_RELAX_SHARE = 2
"""Part of caches' memory asked for then: little for fast readers, nearly all in a minute."""


class OverBudget(ValueError):
    """More at once than a budget has altogether."""


class Budget:
    """``total`` bytes for all buffers. Used from one trio thread, ``release`` and ``retry`` from
    anywhere.

    A request that does not fit waits, and all later ones behind it. So nobody may wait for memory
    while holding some: reserve once, all that a piece of work needs. OverBudget refuses more than
    ``total``: cut such work into pieces.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self.peak = 0
        """The most bytes that were ever reserved at one time."""
        self.waits = 0
        """How many requests had to wait."""
        self._reserved = 0
        """Bytes that are reserved, with those of ``_released``."""
        # By other threads and finalizers too, so counted later.
        self._released: deque[int] = deque()
        self._waiting: deque[tuple[int, trio.Event]] = deque()
        """Requests that wait, in order: bytes, and what is set when they are reserved."""
        self._caches: list[GiveBack] = []
        """Caches that give back memory when others want it, asked in this order."""
        self._token: trio.lowlevel.TrioToken | None = None
        """Of the trio thread; None before somebody waits."""

    def add_cache(self, give_back: GiveBack) -> None:
        """Ask this one too when memory is short; in the order in which they were added."""
        self._caches.append(give_back)

    @property
    def used(self) -> int:
        """Bytes that are reserved now."""
        while self._released:
            self._reserved -= self._released.popleft()
        return self._reserved

    @property
    def free(self) -> int:
        return self.total - self.used

    @property
    def short(self) -> bool:
        """Whether someone waits: then caches keep nothing new."""
        return bool(self._waiting)

    def try_reserve(self, size: int) -> bool:
        """Reserve ``size`` bytes if free, or given back at once by caches, and nobody waits."""
        return not self._waiting and self._take(size)

    async def acquire(self, size: int) -> None:
        """Reserve ``size`` bytes; waits until they are there. Does not suspend if they are."""
        if size > self.total:
            raise OverBudget(f"{size} bytes at once of a budget of {self.total}")
        if self.try_reserve(size):
            return
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()
        self.waits += 1
        request = (size, trio.Event())
        self._waiting.append(request)
        try:
            self._admit()
            with waits_for(MEMORY):
                await request[1].wait()
        except BaseException:
            if request[1].is_set():
                self.release(size)
            else:
                self._waiting.remove(request)
                self._admit()
            raise

    def release(self, size: int) -> None:
        """Give ``size`` bytes back. Does not block; safe in any thread and in finalizers."""
        self._released.append(size)
        self.retry()

    def retry(self) -> None:
        """A cache can give back: let waiters look soon. As safe as ``release``."""
        # A waiter is in the queue before it looks at what was released, so one of the two sees the
        # other.
        if self._waiting and self._token is not None:
            try:
                self._token.run_sync_soon(self._admit, idempotent=True)
            except trio.RunFinishedError:
                pass  # and with it those who waited

    @asynccontextmanager
    async def reserve(self, size: int) -> AsyncIterator[None]:
        """``async with budget.reserve(size)``: acquired inside."""
        await self.acquire(size)
        try:
            yield
        finally:
            self.release(size)

    async def relax(self) -> float:
        """Have caches give back what has become too much; in how many seconds to do it again."""
        target = self.used - self.used // _RELAX_SHARE
        for give_back in reversed(self._caches):
            # Bytes that reads keep, which came first, are of most use.
            if self.used > target:
                give_back(self.used - target)
        return RELAX_EVERY_S if self.used else _RELAX_IDLE_S

    def status(self) -> dict[str, int]:
        """What ``aifs status`` shows: bytes, tasks that wait now, and how often any had to."""
        return {
            "total_bytes": self.total,
            "used_bytes": self.used,
            "peak_bytes": self.peak,
            "waiting": len(self._waiting),
            "waits": self.waits,
        }

    def _admit(self) -> None:
        while self._waiting and self._take(self._waiting[0][0]):
            self._waiting.popleft()[1].set()

    def _take(self, size: int) -> bool:
        for give_back in self._caches:
            if size <= self.free:
                break
            give_back(size - self.free)
        if size > self.free:
            return False
        self._reserved += size
        self.peak = max(self.peak, self._reserved)
        return True
