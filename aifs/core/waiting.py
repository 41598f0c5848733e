"""The causes of waiting, of requests and drains.

An *activity* is one request, or background work that people wait for, in the context of its task
and those started there. Places that wait for something outside of the daemon name a cause; hot
paths enter none.

The newest unended wait counts at each moment, also with several tasks. So causes never add up to
more than the time passed; the rest is the daemon's work, and its queue.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import trio

from aifs.core.log import running_tasks

JOURNAL = "journal"
"""The metadata's, until it is synced; of a cluster, its database."""
LOCK = "lock"
"""Somebody else has the file, its form, or its flock or fcntl lock."""
ROOM = "room in the burst tier"
DRAIN = "drain"
"""Until files are on the data servers."""
MOVER = "mover"
"""A process that reads and writes data servers on behalf of the daemon."""
PUBLISH = "publish"
"""By another task: of a group that is complete."""
RANK = "other rank"
HOST = "host"
"""Another one, by its name where it is one."""
MEMORY = "memory"
"""For buffers."""
# Besides: ``data server N`` and ``burst directory N``, as their workers are called.


class Request(NamedTuple):
    """A request."""

    operation: str
    """Its name, as in FUSE; or ``drain``, which nobody asks for."""
    ino: int
    """The inode; 0 if that is not known."""
    name: bytes = b""
    """An entry of the directory ``ino``, or b""."""
    attribute: bytes = b""
    """An extended attribute, or b""."""
    uid: int = -1
    """-1, as ``pid``, if it is not known."""
    pid: int = -1
    """The process, or a thread of it; -1 if that is not known."""
    others: tuple[int, ...] = ()
    """Further inodes that it is about: files that are drained together."""


Cause = str | Callable[[], str]
"""One of the above; a function where it is found out when somebody asks."""


class Activity:
    """Used from one trio thread. Made for each request: it does nothing unless there are waits."""

    __slots__ = ("_mark_ns", "_spent_ns", "_waits", "args", "began_ns", "describe", "unique")

    def __init__(self, describe: Callable[..., Request | None], args: tuple, began_ns: int) -> None:
        """``describe(*args)`` tells what it is; None: not shown. ``began_ns``:
        ``time.perf_counter_ns``."""
        self.describe = describe
        self.args: tuple | None = args
        """None: it is over. Tasks it started may still run, without it."""
        self.began_ns = began_ns
        self.unique = 0
        """The kernel's number of the request, where somebody wants to know it; 0: it has none."""
        self._waits: list[waits_for] | None = None  # those that have not ended, the newest last

    def enter(self, wait: "waits_for") -> None:
        if self._waits is None:
            self._waits = []
            self._spent_ns: dict[str, int] = {}
            self._mark_ns = 0  # when the newest wait was last charged with what has passed
        self._charge()
        self._waits.append(wait)

    def leave(self, wait: "waits_for") -> None:
        assert self._waits is not None
        if self._waits[-1] is wait:
            self._charge()
        self._waits.remove(wait)

    def _charge(self) -> None:
        """Charge the time since the last call to the newest wait."""
        now_ns = time.perf_counter_ns()
        if self._waits:
            cause = self._waits[-1].cause
            self._spent_ns[cause] = self._spent_ns.get(cause, 0) + now_ns - self._mark_ns
        self._mark_ns = now_ns

    @property
    def about(self) -> Request | None:
        """The request. It is not over."""
        assert self.args is not None
        return self.describe(*self.args)

    @property
    def waits(self) -> list[str]:
        """The causes that it waits for now, the newest first; none: it is being worked on."""
        return [f"{wait.cause} {wait.detail}".rstrip() for wait in reversed(self._waits or [])]

    @property
    def has_waited(self) -> bool:
        return self._waits is not None

    def spent_ns(self) -> dict[str, int]:
        """How long it has waited so far, by cause."""
        if self._waits is None:
            return {}
        self._charge()
        return dict(self._spent_ns)


_current: ContextVar[Activity | None] = ContextVar("activity", default=None)

begin = _current.set
"""The current task works for this activity from now on. Its end drops its ``args``, maybe large."""


def current_unique() -> int:
    """The kernel's number of the request that the current task works for; 0: none is known."""
    activity = _current.get()
    return 0 if activity is None or activity.args is None else activity.unique


Ended = Callable[[Activity, int], None]
"""Is told of an activity that has ended, before its ``args`` are gone, and its nanoseconds."""


@contextmanager
def doing(ended: Ended, operation: str, inos: Sequence[int]) -> Iterator[None]:
    """In the block, and tasks started there, background work is done about these inodes, at least
    one."""
    first, *others = inos
    request = Request(operation, first, others=tuple(others))
    activity = Activity(lambda: request, (), time.perf_counter_ns())
    token = begin(activity)
    try:
        yield
    finally:
        ended(activity, time.perf_counter_ns() - activity.began_ns)
        activity.args = None
        _current.reset(token)


class waits_for:  # noqa: N801 (it is read as a statement)
    """``with waits_for(LOCK):`` the current activity, if there is one, waits for that inside."""

    __slots__ = ("_activity", "_cause", "_detail")

    def __init__(self, cause: Cause, detail: Cause = "") -> None:
        """``detail``: words for people besides."""
        self._cause = cause
        self._detail = detail

    @property
    def cause(self) -> str:
        return self._cause if isinstance(self._cause, str) else self._cause()

    @property
    def detail(self) -> str:
        return self._detail if isinstance(self._detail, str) else self._detail()

    def __enter__(self) -> None:
        activity = _current.get()
        self._activity = None if activity is None or activity.args is None else activity
        if self._activity is not None:
            self._activity.enter(self)

    def __exit__(self, *_: object) -> None:
        if self._activity is not None:
            self._activity.leave(self)


def under_way(
    root: trio.lowlevel.Task | None = None,
) -> Iterator[tuple[Activity, list[trio.lowlevel.Task]]]:
    """All activities that are not over, with their tasks, from the scheduler (``running_tasks``).
    Some 2 us a task."""
    found: dict[Activity, list[trio.lowlevel.Task]] = {}
    for task, _ in running_tasks(root):
        activity = task.context.get(_current)
        if activity is not None and activity.args is not None:
            found.setdefault(activity, []).append(task)
    yield from found.items()
