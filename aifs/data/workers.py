"""Worker threads for calls that block, and the cheapest way to wait for them from trio.

A hand-off through ``trio.to_thread`` costs 30 to 100 us a call; this one 28 us alone, 4 to 8 us
with several, because one wake-up of the scheduler brings all results, and a task waits for many.

A call always runs to its end: so ``gather`` is not cancellable, unless the caller keeps a thread's
buffers and descriptors until then. The background gives calls up after a while (patience.py).
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

import trio

from aifs.core.waiting import waits_for
from aifs.data.patience import FOR_EVER, Patience, gives_up, outcomes_in_time

_log = logging.getLogger(__name__)


_PENDING = object()
"""In place of a result."""


class _Batch:
    """Calls that one task waits for; ``results`` holds what each returned or raised."""

    __slots__ = ("abandonable", "calls", "last", "on_end", "remaining", "results", "task")

    def __init__(
        self, calls: Sequence["Call"], on_end: Callable[[], None] | None, abandonable: bool
    ) -> None:
        self.task: trio.lowlevel.Task | None = trio.lowlevel.current_task()
        self.calls: Sequence[Call] = calls
        self.on_end = on_end
        self.abandonable = abandonable
        self.remaining = len(calls)
        self.results: list[Any] = [_PENDING] * len(calls)
        self.last: Workers | None = None  # of them, which has ended last; None before

    def cause(self) -> str:
        """The cause that the task waits for, or has waited for last."""
        if self.last is not None:
            return self.last.name
        pending = (workers for (workers, *_), it in zip(self.calls, self.results) if it is _PENDING)
        return next(pending, self.calls[0][0]).name

    def finished(self, last: "Workers") -> None:
        self.last = last
        if self.on_end is not None:
            self.on_end()
        if self.task is not None:
            trio.lowlevel.reschedule(self.task)

    def abort(self, _: Callable[[], None]) -> trio.lowlevel.Abort:
        if not self.abandonable:
            return trio.lowlevel.Abort.FAILED
        self.task = None
        return trio.lowlevel.Abort.SUCCEEDED


class _Notice:
    """A call that no task waits for; a function is told how it ended."""

    __slots__ = ("remaining", "results", "tell")

    def __init__(self, tell: Callable[[Any], None]) -> None:
        self.tell = tell
        self.remaining = 1
        self.results: list[Any] = [None]

    def finished(self, last: "Workers") -> None:
        self.tell(self.results[0])


class Completions:
    """The way back from all workers of one trio run to its scheduler."""

    def __init__(self) -> None:
        self._token: trio.lowlevel.TrioToken | None = None
        self._ready: deque[tuple[_Batch | _Notice | None, Workers]] = deque()
        self._awake = False

    def bind(self) -> None:
        if self._token is None:
            self._token = trio.lowlevel.current_trio_token()

    def put(self, batch: _Batch | _Notice | None, workers: "Workers") -> None:
        """Called by worker threads."""
        self._ready.append((batch, workers))
        # Two threads may both see False: one wake-up too many, never one too few, since ``_drain``
        # clears the flag before it looks.
        if not self._awake:
            self._awake = True
            assert self._token is not None  # bound before work was given to a thread
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                pass  # nobody is left to tell; only posted calls outlive their run

    def _drain(self) -> None:
        self._awake = False
        ready = self._ready
        while ready:
            batch, workers = ready.popleft()
            workers.outstanding -= 1
            if batch is not None:
                batch.remaining -= 1
                if batch.remaining == 0:
                    batch.finished(workers)


class Workers:
    """Up to ``limit`` threads, started when they are first needed. Used from the trio thread."""

    def __init__(
        self, name: str, limit: int, completions: Completions, patience_s: float = FOR_EVER
    ) -> None:
        """``name``: the owner; ``patience_s``: limit of a background call."""
        self.name = name
        self.outstanding = 0
        self.patience = Patience(patience_s)
        self.answered_s = 0.0
        """When a call has last ended, of time.monotonic()."""
        self._limit = limit
        self._completions = completions
        self._queue: SimpleQueue[Any] = SimpleQueue()
        self._threads: list[threading.Thread] = []

    def submit(
        self, batch: _Batch | _Notice | None, place: int, function: Callable[..., Any], args: tuple
    ) -> None:
        if len(self._threads) <= self.outstanding and len(self._threads) < self._allowed:
            self._completions.bind()
            thread = threading.Thread(
                target=self._work, name=f"{self.name}, {len(self._threads)}", daemon=True
            )
            thread.start()  # may fail: nothing has been handed over yet that would be told of later
            self._threads.append(thread)
        self.outstanding += 1
        self._queue.put((batch, place, function, args))

    def post(self, function: Callable[..., Any], *args: Any) -> None:
        """Call ``function(*args)`` before ``close`` returns; errors are logged."""
        self.submit(None, 0, function, args)

    def start(self, tell: Callable[[Any], None], function: Callable[..., Any], *args: Any) -> None:
        """Run ``function(*args)``, then ``tell`` its result or error on the trio thread. It must
        not raise."""
        self.submit(_Notice(tell), 0, function, args)

    @property
    def busy(self) -> bool:
        """Whether the next call would wait for a thread: no time for optional ones."""
        return self.outstanding >= self._limit

    @property
    def _allowed(self) -> int:
        """Threads, without stuck ones."""
        return self._limit + (min(self.patience.stuck, self._limit) if self.patience.hangs else 0)

    def end(self) -> None:
        """Have the threads end when they have finished what has been handed over."""
        for _ in self._threads:
            self._queue.put(None)

    def join(self, until_s: float = FOR_EVER) -> list[threading.Thread]:
        """Wait for threads until then (time.monotonic()), not for hung servers; returns those left.
        Blocks."""
        for thread in self._threads:
            if until_s == FOR_EVER:
                thread.join()
            else:
                thread.join(0 if self.patience.hangs else max(until_s - time.monotonic(), 0))
        left = [thread for thread in self._threads if thread.is_alive()]
        self._threads.clear()
        return left

    def close(self) -> None:
        """Finish what has been handed over, and end the threads. Blocks."""
        self.end()
        self.join()

    def _work(self) -> None:
        get, put = self._queue.get, self._completions.put
        while (job := get()) is not None:
            batch, place, function, args = job
            try:
                result = function(*args)
            except BaseException as error:  # noqa: BLE001 (raised again where the call is waited for)
                result = error
                if batch is None:
                    _log.error("%s: a call that nobody waits for failed", self.name, exc_info=error)
            if batch is not None:
                batch.results[place] = result
            self.answered_s = time.monotonic()
            put(batch, self)
            # An idle thread must not keep buffers and exceptions alive.
            del job, batch, function, args, result


Call = tuple[Workers, Callable[..., Any], tuple]


async def gather(
    calls: Sequence[Call], on_end: Callable[[], None] | None = None, abandonable: bool = False
) -> list[Any]:
    """As ``outcomes``, but raises the first exception, in the order of ``calls``."""
    results = await outcomes(calls, on_end, abandonable)
    for result in results:
        if isinstance(result, BaseException):
            try:
                raise result
            finally:
                del result, results  # they would tie a knot with the traceback
    return results


async def outcomes(
    calls: Sequence[Call], on_end: Callable[[], None] | None = None, abandonable: bool = False
) -> list[Any]:
    """Run all calls in their workers; results or errors in order.

    ``on_end`` is called on the trio thread when all have ended, also after cancellation (if
    ``abandonable``), or after a call was given up, which counts as ended, with Hanging
    (patience.py).
    """
    if gives_up() and any(workers.patience.is_limited for workers, _, _ in calls):
        return await outcomes_in_time(calls, on_end or _nothing, abandonable)
    batch = _Batch(calls, on_end, abandonable)
    for place, (workers, function, args) in enumerate(calls):
        workers.submit(batch, place, function, args)
    with waits_for(batch.cause):
        await trio.lowlevel.wait_task_rescheduled(batch.abort)
    return batch.results


def _nothing() -> None:
    pass
