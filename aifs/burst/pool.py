"""Mover processes: they read, hash, code, write and sync, to spare the daemon's interpreter.

A process starts for work, and ends when idle for a while. If it is killed, another one repeats its
work once the system has confirmed its end. It knows no metadata. The daemon keeps shared state:
limits on each piece, health of servers, and memory, reserved as long as the process lives.

They run when nobody else wants the processor (SCHED_IDLE), except while starting with work, and
while somebody waits. To leave that class takes CAP_SYS_NICE, or RLIMIT_NICE: without these,
processes are like all others.

A plain value and a module's function say what is done (``Movers``), here or in a mover; the daemon
decides, and records.
"""

import logging
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from typing import Any, ClassVar, TypeVar

import trio

from aifs.burst.child import Channel, Order, Start
from aifs.burst.making import MakingTools, never
from aifs.core.budget import OverBudget
from aifs.core.errors import Unavailable
from aifs.core.log import logger
from aifs.core.waiting import MOVER, waits_for
from aifs.data.patience import Call, gives_up
from aifs.data.server import Moved
from aifs.data.servers import Servers
from aifs.layout.striped import Striped

_log = logger(__name__)

_FEW = 4
"""Pieces of work of a process that do not keep it busy: with more, another one is started."""
_DEATHS_MAX = 3
"""Processes that may end while they do one piece of work."""
_IDLE_S = 10.0
_LOOK_S = 0.5
_MEMORY_MIN, _MEMORY_MAX = 16 << 20, 64 << 20
_MEMORY_SHARE = 2  # of the budget: what all of them together have at most
_RETRY_S = 60.0
"""After one could not be started, none is for so long."""
_END_S = 30.0
"""The end of the mount waits so long for one that the system does not end, at least."""


class NoProcess(Exception):
    """None can be started now."""


@dataclass(slots=True)
class _Job:
    """A piece of work that a process has."""

    work: bytes
    """The function and the value, pickled."""
    tools: MakingTools
    """Of the daemon: its limits."""
    cancelled: Callable[[], bool]
    """Whether it is not wanted any more."""
    begun: int = 0
    """Pieces that the process may move, and has not said to have ended."""
    is_stopped: bool = False
    """The task that has asked for it is cancelled, and waits for its end."""
    ended: trio.Event = field(default_factory=trio.Event)
    """Set when the process has no more to do with it."""
    outcome: tuple[bytes, bool, str] | None = None
    """What it returned or raised, pickled, whether it raised, and the traceback; None: it died."""


class Pool:
    """Used from one trio thread. Nothing is started before ``run``."""

    def __init__(
        self,
        limit: int,
        servers: Servers,
        store: str,
        threads: int,
        hedge_s: float,
        kept: Iterable[int] = (),
    ) -> None:
        """``limit``: of processes, 0 for none. ``store``, ``threads``, ``hedge_s``: see Servers.
        ``kept``: descriptors that each holds."""
        budget = servers.budget
        self.limit = min(limit, budget.total // _MEMORY_SHARE // _MEMORY_MIN)
        """How many processes there are at most."""
        # Bytes of the budget that each of them has.
        self._memory = min(_MEMORY_MAX, budget.total // _MEMORY_SHARE // max(self.limit, 1))
        self._servers = servers
        self._store = store
        self._threads = threads
        self._hedge_s = hedge_s
        self._kept = tuple(kept)  # as given
        self._may_idle = may_leave_idle()
        """Whether processes can be told to have the processor only when nobody wants it."""
        self.ready = trio.Event()
        """Set when it can be given work."""
        self._nursery: trio.Nursery | None = None
        """In which the processes are looked after; None while they are not."""
        self._children: list[_Child] = []
        """Processes that take work."""
        self._retry_at_s = -math.inf
        """When the next one may be started, by trio's clock."""
        self._running = 0
        """How many there are, also those that take none any more."""
        self._awake = trio.Event()
        """Set when there is a process."""
        self._done = 0
        """Pieces of work that have been done since the mount."""
        self._moved_bytes = 0
        """What was moved for them."""
        self._deaths = 0
        """Processes that have ended though they had work."""
        budget.add_cache(self._give_back)

    @property
    def is_open(self) -> bool:
        """Whether the current task may have work done here: not one that waits for hung servers."""
        if not self.is_running or trio.current_time() < self._retry_at_s:
            return False
        return gives_up() or not any(server.hangs for server in self._servers.values())

    @property
    def is_running(self) -> bool:
        return self._nursery is not None and self.limit > 0

    async def run(self, over: trio.Event) -> None:
        """Look after the processes until cancelled, or ``over``; then all of them are gone."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._watch)
            self.ready.set()
            try:
                await over.wait()
            finally:
                self._nursery = None  # nothing is started any more
            nursery.cancel_scope.cancel()

    def status(self) -> dict[str, int]:
        """What ``aifs status`` shows. ``restarts``: processes that died though they had work."""
        return {
            "limit": self.limit,
            "running": self._running,
            "busy": sum(1 for child in self._children if child.jobs),
            "jobs": self._done,
            "moved_bytes": self._moved_bytes,
            "restarts": self._deaths,
        }

    # --- work ---

    async def carry_out(
        self,
        function: Callable[..., Any],
        value: object,
        tools: MakingTools,
        cancelled: Callable[[], bool],
    ) -> Any:
        """See Movers. Raises OverBudget for more memory than a process has, NoProcess."""
        work = pickle.dumps((function, value), pickle.HIGHEST_PROTOCOL)
        for _ in range(_DEATHS_MAX):
            if not self.is_running:
                raise Unavailable("the store is being closed")
            job = _Job(work, tools, cancelled)
            child = self._choose()
            await child.carry_out(job)
            if job.outcome is not None:
                self._done += 1
                return _result_of(*job.outcome)
            if self.is_running and not child.has_begun:
                raise NoProcess
        what = f"{function.__qualname__} of {value!r:.200}"
        _log.warning("%d movers have died of one piece of work: %s", _DEATHS_MAX, what)
        raise Unavailable(f"{_DEATHS_MAX} mover processes have died of it")

    def _choose(self) -> "_Child":
        table = self._table()
        for child in [each for each in self._children if each.table != table]:
            child.retire()
        best = min(self._children, key=lambda child: len(child.jobs), default=None)
        is_busy = best is None or len(best.jobs) >= _FEW
        if is_busy and len(self._children) < self.limit:
            assert self._nursery is not None  # it is running
            best = _Child(self, table)
            self._children.append(best)
            self._nursery.start_soon(best.run)
            self._awake.set()
        assert best is not None
        return best

    def _table(self) -> tuple[tuple[int, str, str], ...]:
        return tuple(
            (
                server.id,
                server.address,
                server.absent or server.missing or (server.last_error if server.hangs else ""),
            )
            for server in self._servers.values()
        )

    def died(self, had_work: bool) -> None:
        self._deaths += had_work

    def failed(self, reason: str) -> None:
        """One could not be started. What they have to do the daemon does for a while."""
        self._retry_at_s = trio.current_time() + _RETRY_S
        _log.warning("no mover process can be started, the daemon does their work: %s", reason)

    def moved(self, tools: MakingTools, moved_bytes: int) -> None:
        tools.mover.moved_bytes += moved_bytes
        self._moved_bytes += moved_bytes

    # --- processes ---

    async def _watch(self) -> None:
        while True:
            await self._awake.wait()
            await trio.sleep(_LOOK_S)
            for child in list(self._children):
                child.look()
            if not self._children:
                self._awake = trio.Event()

    def _give_back(self, size: int) -> None:
        """Work waits for memory: end idle processes, and busy ones after their work if memory would
        never suffice beside them."""
        budget = self._servers.budget
        if not budget.short:
            return
        all_needed = size + budget.free > budget.total - self._running * self._memory
        for child in list(self._children):
            if all_needed or not child.jobs:
                child.retire()

    def _start(
        self, table: tuple[tuple[int, str, str], ...]
    ) -> tuple[subprocess.Popen, int, Channel]:
        """The process, its pidfd, and our end of its socket. Raises OSError."""
        with ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            with theirs:
                command = [sys.executable, "-m", "aifs.burst.child"]
                process = subprocess.Popen(
                    [*command, str(theirs.fileno()), str(os.getpid())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), *self._kept),
                    env=os.environ
                    | {
                        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
                        "PYTHONSAFEPATH": "1",  # nothing comes from the directory that we are in
                    },
                )
            try:
                pidfd = os.pidfd_open(process.pid)
            except OSError:
                process.kill()
                process.wait()
                raise
            stack.pop_all()
        channel = Channel(ours)
        start = Start(
            self._store,
            table,
            self._threads,
            self._servers.patience_s,
            self._hedge_s,
            self._memory,
            logging.getLogger().getEffectiveLevel(),
        )
        channel.send("start", start)
        return process, pidfd, channel


class _Child:
    """One process, as the daemon sees it."""

    def __init__(self, pool: Pool, table: tuple[tuple[int, str, str], ...]) -> None:
        self.table = table
        """Of the servers, when it was started."""
        self.jobs: dict[int, _Job] = {}
        """What it does, by number."""
        self.has_begun = False
        """It has come so far that it can work."""
        self._pool = pool
        self._is_urgent = True
        """Whether it has the processor like others."""
        self._numbers = count()
        self._process: subprocess.Popen | None = None
        """None before it is started, and after the end."""
        self._pidfd = -1
        """Of the process."""
        self._channel: Channel | None = None
        """None before it is started."""
        self._ready = trio.Event()
        """Set when it has been started, or is gone."""
        self._idle_since_s = trio.current_time()
        self._hanging: dict[int, Call] = {}
        """Of servers that do not answer it, what says so to all others."""
        self._nursery: trio.Nursery | None = None
        """For answers to its questions."""

    async def run(self) -> None:
        """From its start to its end."""
        pool = self._pool
        budget = pool._servers.budget
        try:
            async with budget.reserve(pool._memory):
                if self not in pool._children and not self.jobs:
                    return
                pool._running += 1
                try:
                    self._process, self._pidfd, self._channel = pool._start(self.table)
                    self._ready.set()
                    self.look()
                    await self._listen(self._channel)
                    if not self.has_begun and self in pool._children:
                        pool.failed("it has ended before it began")
                except OSError as error:
                    pool.failed(str(error))
                finally:
                    try:
                        await self._end()
                    finally:
                        pool._running -= 1
        finally:
            self.retire()
            self._ready.set()
            for job in list(self.jobs.values()):
                job.ended.set()

    async def _listen(self, channel: Channel) -> None:
        async with trio.open_nursery() as self._nursery:
            self._nursery.start_soon(channel.run)
            while messages := await channel.receive():
                for kind, *args in messages:
                    self._take[kind](self, *args)
            self._nursery.cancel_scope.cancel()

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        self._kill()
        try:
            await trio.lowlevel.wait_readable(self._pidfd)
        except trio.Cancelled:  # the pool is being closed
            with trio.move_on_after(max(self._pool._servers.patience_s, _END_S)) as scope:
                scope.shield = True
                await trio.lowlevel.wait_readable(self._pidfd)
            raise
        finally:
            os.close(self._pidfd)
            assert self._channel is not None
            self._channel.close()
            self._pool.died(bool(self.jobs))
            for number in list(self._hanging):
                self._answers(number)
            if process.poll() is None:  # it has the lock of the store: nobody else opens that
                _log.warning("mover process %d cannot be ended", process.pid)
                process.returncode = -signal.SIGKILL  # as it will end

    def retire(self) -> None:
        """It gets no more work, and ends when it has none. Does not block."""
        if self in self._pool._children:
            self._pool._children.remove(self)
        if not self.jobs and self._process is not None:
            self._kill()

    def _kill(self) -> None:
        self._is_urgent = True  # a task that needs its memory waits for its end
        self._schedule()
        # Not by Popen, which would have the system forget a process that has ended.
        signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def look(self) -> None:
        """Called now and then."""
        is_urgent = any(
            not self.has_begun or job.is_stopped or job.tools.mover.is_urgent()
            for job in self.jobs.values()
        )
        if is_urgent != self._is_urgent:
            self._is_urgent = is_urgent
            self._schedule()
        if not self.jobs and trio.current_time() > self._idle_since_s + _IDLE_S:
            self.retire()

    def _schedule(self) -> None:
        if not self._pool._may_idle or self._process is None:
            return
        policy = os.SCHED_OTHER if self._is_urgent else os.SCHED_IDLE
        with suppress(OSError):  # it has ended
            for thread in os.listdir(f"/proc/{self._process.pid}/task"):
                os.sched_setscheduler(int(thread), policy, os.sched_param(0))

    # --- work ---

    async def carry_out(self, job: _Job) -> None:
        """The job has an outcome on return, unless the process has died."""
        number = next(self._numbers)
        self.jobs[number] = job
        mover = job.tools.mover
        try:
            await self._ready.wait()
            if self._process is None or self._channel is None:
                return
            is_free = mover.is_free
            if is_free:
                await mover.begin(0)
                job.begun = 1
            order = Order(
                mover.io_priority,
                job.tools.verify,
                gives_up(),
                mover.is_limited,
                is_free,
            )
            self._channel.send("work", number, job.work, order)
            self.look()
            try:
                with waits_for(MOVER):
                    await job.ended.wait()
            except trio.Cancelled:
                job.is_stopped = True
                self.look()
                self._channel.send("stop", number)
                with trio.CancelScope(shield=True):
                    await job.ended.wait()
                raise
        finally:
            del self.jobs[number]
            for _ in range(job.begun):
                mover.end(0)
            self._idle_since_s = trio.current_time()
            if self not in self._pool._children:
                self.retire()

    # --- what it says ---

    def _leave(
        self, number: int, question: int, length: int, is_piece: bool, ended: int, moved: int
    ) -> None:
        job = self.jobs.get(number)
        if job is not None and self._nursery is not None:
            self._note(job, ended, moved)
            self._nursery.start_soon(self._let_go_on, job, question, length, is_piece)

    def _ended(self, number: int, ended: int, moved: int) -> None:
        if (job := self.jobs.get(number)) is not None:
            self._note(job, ended, moved)

    async def _let_go_on(self, job: _Job, question: int, length: int, is_piece: bool) -> None:
        mover = job.tools.mover
        if is_piece:
            await mover.begin(length)
            if job.ended.is_set():
                mover.end(0)
            else:
                job.begun += 1
        else:
            await mover.take(length)
        assert self._channel is not None
        self._channel.send("go", question, not job.cancelled())

    def _note(self, job: _Job, ended: int, moved: int) -> None:
        for _ in range(min(ended, job.begun)):
            job.begun -= 1
            job.tools.mover.end(0)
        self._pool.moved(job.tools, moved)

    def _damage(self, number: int, layout: Striped, oid: int, ino: int, column: int) -> None:
        if (job := self.jobs.get(number)) is not None:
            job.tools.on_damage(layout, oid, ino, column)

    def _finished(
        self,
        number: int,
        answer: bytes,
        is_error: bool,
        trace: str,
        ended: int,
        moved: int,
        by_server: dict[int, Moved],
    ) -> None:
        for server_id, its in by_server.items():
            if (server := self._pool._servers.find(server_id)) is not None:
                server.told(its)
        if (job := self.jobs.get(number)) is not None:
            self._note(job, ended, moved)
            job.outcome = answer, is_error, trace
            job.ended.set()

    def _health(
        self, number: int, failing: tuple[str, ...], error: str, hanging: tuple[str, str] | None
    ) -> None:
        server = self._pool._servers.find(number)
        if server is None:
            return
        if hanging is None:
            self._answers(number)
            server.health.told(failing, error)
        elif number not in self._hanging:
            self._hanging[number] = server.workers.patience.lost(*hanging)

    def _answers(self, number: int) -> None:
        call = self._hanging.pop(number, None)
        if call is not None:
            call.patience.found(call)

    def _said(self, name: str, level: int, text: str) -> None:
        logger(name).log(level, "%s", text)

    def _begins(self) -> None:
        self.has_begun = True
        self.look()

    _take: ClassVar[dict[str, Callable[..., None]]] = {
        "damage": _damage,
        "done": _finished,
        "ended": _ended,
        "health": _health,
        "leave": _leave,
        "log": _said,
        "ready": _begins,
        "retire": retire,
    }


class _InMover(Exception):
    """Where in a mover process an error was raised."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _result_of(answer: bytes, is_error: bool, trace: str) -> Any:
    result = pickle.loads(answer)
    if is_error:
        raise result from _InMover(trace)
    return result


def may_leave_idle() -> bool:
    """Whether our threads can leave the idle class of scheduling again."""
    answer = []

    def ask() -> None:
        try:
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
            answer.append(True)
        except OSError:
            answer.append(False)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    return answer[0]


# --- work, in a process or here -------------------------------------------------------------------


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
