"""Giving up calls that do not end: how long background work waits for a data server, and then.

A call to a server that hangs (NFS without an answer, a lost disk) cannot be ended, only left alone:
its thread is stuck, and may act at any later time. Four rules prevent harm:

* The call's memory and descriptors are nobody else's until it has ended (``on_end``, ``gather``).
* Until all given-up calls have ended, the server *hangs*: the background asks nothing of it. So
  late effects come before whatever is done there next: an object made anew, deleted, or cut.
* Programs wait: their changes follow when the server has answered, after all late effects.
* After ``Hanging``, callers must assume that the call may still take effect at any time: a
  container is never appended to again, a column is not read, objects are garbage.

docs/design/servers.md has each kind of call. Programs get there what a hard NFS mount gives.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import trio

from aifs.core.errors import Unavailable
from aifs.core.waiting import waits_for
from aifs.data import naming
from aifs.data.health import Health

if TYPE_CHECKING:
    from aifs.data.workers import Workers

FOR_EVER = float("inf")

_FACTOR_MAX = 16
_FORGIVEN_S = 3600.0
_LEAST_S = 0.001

_giving_up: ContextVar[bool] = ContextVar("giving_up", default=False)


class _Here(threading.local):
    """The work of a worker thread."""

    call: "Call | None" = None


here = _Here()


class Hanging(Unavailable):
    """A data server has not answered in time, or not yet others. The request may act later."""


@contextmanager
def giving_up() -> Iterator[None]:
    """In the block, and tasks started there, waits for data servers are limited."""
    token = _giving_up.set(True)
    try:
        yield
    finally:
        _giving_up.reset(token)


def gives_up() -> bool:
    """Whether the current task gives up calls."""
    return _giving_up.get()


@contextmanager
def in_time(patience: "Patience") -> Iterator[None]:
    """Calls awaited in the block may be cancelled: in the background, if too slow. Raises
    Hanging."""
    if not gives_up() or not patience.is_limited:
        yield
        return
    if patience.hangs:
        raise patience.error()
    with trio.move_on_after(patience.limit_s) as scope:
        yield
    if scope.cancelled_caught:
        raise Hanging(f"what others have asked for has not come within {patience.limit_s:g} s")


class Call:
    """A function that a thread runs, unless it has been given up before."""

    __slots__ = (
        "_args",
        "_function",
        "asks_since_s",
        "given_up",
        "has_begun",
        "has_ended",
        "patience",
        "queued_s",
        "what",
    )

    def __init__(self, patience: "Patience", function: Callable[..., Any], args: tuple) -> None:
        self.patience, self._function, self._args = patience, function, args
        self.queued_s = time.monotonic()
        """When it was handed to its thread, by time.monotonic()."""
        self.asks_since_s: float | None = None  # None while it computes
        self.has_begun = False
        """The thread has come to it."""
        self.given_up = False
        """Nobody waits for it any more."""
        self.has_ended = False
        """It has returned or raised."""
        self.what: tuple[str, str | tuple[int, int]] = "use", ""
        """Kind of operation, and path or object, for messages."""

    def __call__(self) -> Any:
        if not self.patience.begin(self):
            return None
        here.call = self
        try:
            return self._function(*self._args)
        finally:
            here.call = None
            self.patience.end(self)


def _nothing() -> None:
    pass


class Patience:
    """With one server. Used from any thread.

    A slow server would cause attempts alone: so after each late answer it gets twice as long, up to
    16 times, until it has behaved for an hour.
    """

    def __init__(self, limit_s: float = FOR_EVER) -> None:
        self.health: Health | None = None
        """The listener for when the server hangs and answers; None before there is one."""
        self.answered = trio.Event()
        """Set when the server does not hang any more."""
        self.configured_s = limit_s
        self._factor = 1
        """How many times as long as configured is waited, from 1 to 16."""
        self._answered_s = -FOR_EVER  # after it hung
        self._left: set[Call] = set()  # given up, and not ended
        self._error = ""
        """The error of calls that meet a server that hangs."""
        self.given_up = "", ""
        """Of the call that was given up last: the kind of operation, and what has not ended."""
        self._lock = threading.Lock()
        """Held while any of this changes."""

    @property
    def is_limited(self) -> bool:
        return self.configured_s < FOR_EVER

    @property
    def limit_s(self) -> float:
        """How long one operation of the server may take."""
        if time.monotonic() > self._answered_s + _FORGIVEN_S:
            self._factor = 1
        return self.configured_s * self._factor

    @property
    def hangs(self) -> bool:
        """Whether calls that have been given up have not ended."""
        return bool(self._left)

    @property
    def stuck(self) -> int:
        """How many threads run such calls."""
        return sum(call.has_begun for call in tuple(self._left))

    def error(self) -> Hanging:
        """The answer to requests while the server hangs."""
        return Hanging(self._error)

    # --- in worker threads ---

    def enter(self, op: str, where: str | tuple[int, int]) -> bool:
        """The thread is going to ask for a path, or an object's key. Whether ``leave`` has to be
        called: not on the trio thread."""
        call = here.call
        if call is None or call.patience is not self:
            return False
        call.what, call.asks_since_s = (op, where), time.monotonic()
        return True

    def leave(self) -> None:
        """It has the answer."""
        call = here.call
        if call is not None and call.patience is self:
            call.asks_since_s = None

    @contextmanager
    def asking(self, op: str, where: str | tuple[int, int]) -> Iterator[None]:
        """The two around what is done within it."""
        self.enter(op, where)
        try:
            yield
        finally:
            self.leave()

    def holding(self, lock: threading.Lock, op: str, where: str) -> "_Holding":
        """A lock of the server's: waiting for it counts as asking, because its holder may hang."""
        return _Holding(self, lock, op, where)

    def begin(self, call: Call) -> bool:
        with self._lock:
            if not call.given_up:
                call.has_begun = True
                return True
        self.end(call)
        return False

    def end(self, call: Call) -> None:
        with self._lock:
            call.has_ended = True
            if not call.given_up:
                return
            self._left.discard(call)
            if self._left:
                return
            self._answered_s = time.monotonic()
            self._factor = min(2 * self._factor, _FACTOR_MAX)
            if self.health is not None:
                self.health.answers()

    # --- on the trio thread ---

    def due_s(self, call: Call, answered_s: float) -> float:
        """When to give the call up (time.monotonic()); ``answered_s``: the threads' last
        progress."""
        if not call.has_begun:
            return max(call.queued_s, answered_s) + self.limit_s
        since_s = call.asks_since_s
        return (time.monotonic() if since_s is None else since_s) + self.limit_s

    def give_up(self, call: Call, limit_s: float | None = None) -> bool:
        """Unless it has just ended. ``limit_s``: the wait, if unusual."""
        op, where = call.what
        path = where if isinstance(where, str) else naming.name_of(*where)
        limit_s = self.limit_s if limit_s is None else limit_s
        detail = f"{op} {path}".rstrip() + f" has not ended within {limit_s:g} s"
        return self._leave(call, op, detail)

    def _leave(self, call: Call, op: str, detail: str) -> bool:
        with self._lock:  # with the health, so that both say the same
            if call.has_ended:
                return False
            call.given_up = True
            self._left.add(call)
            self.given_up = op, detail
            self._error = detail if self.health is None else self.health.hangs(op, detail)
        if self.answered.is_set():
            self.answered = trio.Event()
        return True

    # --- calls of other processes of ours ---

    def lost(self, op: str, detail: str) -> Call:
        """One was given up: the server hangs for us until ``found`` gets the returned call."""
        call = Call(self, _nothing, ())
        self._leave(call, op, detail)
        return call

    def found(self, call: Call) -> None:
        """It has ended."""
        self.end(call)
        if not self.hangs:
            self.answered.set()


class _Holding:
    """A context manager; each open of an object is one."""

    __slots__ = ("_lock", "_op", "_patience", "_where")

    def __init__(self, patience: Patience, lock: threading.Lock, op: str, where: str) -> None:
        self._patience, self._lock, self._op, self._where = patience, lock, op, where

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            with self._patience.asking(self._op, self._where):
                self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


async def until_answered(servers: "Iterable[Workers]") -> None:
    """Wait until none of them hangs; not in the background, where that is an error of each call."""
    asked = [(workers.name, workers.patience) for workers in servers]
    while not gives_up() and (hanging := [each for each in asked if each[1].hangs]):
        name, patience = hanging[0]
        with waits_for(name):
            await patience.answered.wait()


def ask_all(
    calls: "Sequence[tuple[Patience, Callable[..., Any], tuple]]", limit_s: float
) -> list[Any]:
    """Run all calls at once, before a scheduler does: results or errors; Hanging for those given up
    after ``limit_s``. Blocks."""
    ended: SimpleQueue[tuple[int, Any]] = SimpleQueue()

    def run(place: int, call: Call) -> None:
        try:
            result = call()
        except Exception as error:  # noqa: BLE001 (among the results)
            result = error
        ended.put((place, result))

    results: list[Any] = [None] * len(calls)
    waiting: dict[int, Call] = {}
    for place, (patience, function, args) in enumerate(calls):
        waiting[place] = Call(patience, function, args)
        threading.Thread(target=run, args=(place, waiting[place]), daemon=True).start()
    until_s = time.monotonic() + limit_s
    while waiting:
        left_s = None if until_s == FOR_EVER else max(until_s - time.monotonic(), 0)
        try:
            place, result = ended.get(timeout=left_s)
        except Empty:
            until_s = FOR_EVER  # for what has ended just now
            for place, call in list(waiting.items()):
                if call.patience.give_up(call, limit_s):
                    del waiting[place]
                    results[place] = call.patience.error()
        else:
            del waiting[place]
            results[place] = result
    return results


async def outcomes_in_time(
    calls: "Sequence[tuple[Workers, Callable[..., Any], tuple]]",
    on_end: Callable[[], None],
    abandonable: bool,
) -> list[Any]:
    """``workers.outcomes``, with Hanging for calls that take too long."""
    results: list[Any] = [None] * len(calls)
    waiting: dict[int, tuple[Workers, Call]] = {}
    running, last = 0, ""
    answered = trio.Event()

    def slowest() -> str:
        return next((workers.name for workers, _ in waiting.values()), last)

    def told(place: int, name: str, patience: Patience, result: Any) -> None:
        nonlocal running, last
        running, last = running - 1, name
        if not patience.hangs:
            patience.answered.set()
        if waiting.pop(place, None) is not None:
            results[place] = result
            if not waiting:
                answered.set()
        if not running:
            on_end()

    for place, (workers, function, args) in enumerate(calls):
        if workers.patience.hangs:
            results[place] = workers.patience.error()
        else:
            call = Call(workers.patience, function, args)
            waiting[place] = workers, call
            running += 1
            workers.start(partial(told, place, workers.name, workers.patience), call)
    if not running:
        on_end()
        await trio.lowlevel.cancel_shielded_checkpoint()
    while waiting:
        due_s = min(
            workers.patience.due_s(call, workers.answered_s) for workers, call in waiting.values()
        )
        until = trio.current_time() + max(due_s - time.monotonic(), _LEAST_S)
        with waits_for(slowest), trio.CancelScope(deadline=until, shield=not abandonable):
            await answered.wait()
        now = time.monotonic()
        for place, (workers, call) in list(waiting.items()):
            patience = workers.patience
            is_due = now >= patience.due_s(call, workers.answered_s)
            if (is_due or (patience.hangs and not call.has_begun)) and patience.give_up(call):
                del waiting[place]
                results[place] = patience.error()
    return results
