"""How the daemon waits for the kernel's next request, by pyfuse3's scheduler hook and trio.

A client sends its next request some us after an answer. Sleeping in epoll costs two wake-ups and
two passes of the scheduler, several answers' time. So the reading task looks again for a while
(busy polling), if that pays: after a short wait, with no request in a worker thread (which needs
the interpreter), and with a second processor. ``install`` replaces pyfuse3's module attribute
``trio``, as its asyncio mode does, by ``Scheduler``: trio with another lock and another
wait_readable.
"""

import os
import select
import time
from collections import deque

import pyfuse3
import trio

from aifs.core.loop_share import LoopShare

BUSY_POLL_S = 100e-6
"""Polling before sleep: about twice the time between two requests of a client."""

PASS_INTERVAL_S = 2e-3
"""Other tasks get a turn at least this often while requests keep coming."""


class ReaderLock:
    """Decides which task reads the next request. Not handed over, unlike trio.Lock: the releasing
    task may take it again. So a task that answers without suspending goes on reading, and another
    takes over when it suspends."""

    def __init__(self) -> None:
        self._held = False
        self._waiting: deque[trio.lowlevel.Task] = deque()

    async def __aenter__(self) -> None:
        while self._held:
            task = trio.lowlevel.current_task()
            self._waiting.append(task)

            def abort(_: object, task: trio.lowlevel.Task = task) -> trio.lowlevel.Abort:
                self._waiting.remove(task)
                return trio.lowlevel.Abort.SUCCEEDED

            await trio.lowlevel.wait_task_rescheduled(abort)
        self._held = True

    async def __aexit__(self, *exception: object) -> None:
        self._held = False
        if self._waiting:
            trio.lowlevel.reschedule(self._waiting.popleft())


class Scheduler:
    """The part of trio that pyfuse3 uses. ``waiting_requests``: those whose answer waits."""

    Lock = ReaderLock
    ClosedResourceError = trio.ClosedResourceError
    open_nursery = staticmethod(trio.open_nursery)
    current_task = staticmethod(trio.lowlevel.current_task)
    current_trio_token = staticmethod(trio.lowlevel.current_trio_token)
    notify_closing = staticmethod(trio.lowlevel.notify_closing)

    def __init__(self, busy_poll_s: float) -> None:
        self.lowlevel = self  # pyfuse3 calls both trio.X and trio.lowlevel.X
        self.share = LoopShare()
        """Of the loop, between requests and background work."""
        self.waiting_requests = 0
        self._busy_poll_s = busy_poll_s
        self.busy_polls = busy_poll_s > 0
        self._poll: select.poll | None = None
        self._last_pass = 0.0
        self._last_wait_s = 0.0

    async def wait_readable(self, fd: int) -> None:
        """Return when ``fd`` is readable. Suspends only if that takes longer."""
        start = self.share.requested_s = time.perf_counter()
        worked_s = self.share.background_s
        if (
            self._last_wait_s < self._busy_poll_s
            and not self.waiting_requests
            and start < self._last_pass + PASS_INTERVAL_S
            and self._readable_soon(fd, start)
        ):
            return
        await trio.lowlevel.wait_readable(fd)
        self._last_pass = self.share.requested_s = time.perf_counter()
        # The time of background work meanwhile says nothing about when clients ask.
        self._last_wait_s = self._last_pass - start - (self.share.background_s - worked_s)

    def _readable_soon(self, fd: int, start: float) -> bool:
        if self._poll is None:
            self._poll = select.poll()
            self._poll.register(fd, select.POLLIN)
        poll, clock, end = self._poll.poll, time.perf_counter, start + self._busy_poll_s
        while not poll(0):
            if clock() > end:
                return False
        return True


def install() -> Scheduler:
    """Make pyfuse3 wait this way from now on; before ``pyfuse3.main``."""
    alone = len(os.sched_getaffinity(0)) == 1
    scheduler = Scheduler(0.0 if alone else BUSY_POLL_S)
    pyfuse3.trio = scheduler  # type: ignore[attr-defined]  # what it has is trio itself
    return scheduler
