"""Whether a data server works, how fast it answers, and what its errors mean to callers."""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

from aifs.core.errors import FsError, StoreError, Unavailable, from_oserror

_log = logging.getLogger(__name__)

LOG_INTERVAL_S = 60.0
RETRY_S = 30.0

_PROVEN = frozenset(
    (
        "claim",
        "open",
        "probe",
        "reach",
        "read",
        "remove",
        "stat",
        "statvfs",
        "sync",
        "truncate",
        "write",
    )
)
"""Kinds of operation that a probe does, too."""


class ObjectFails(Unavailable):
    """This one object fails, though its server works, as a probe has shown."""


class Health:
    """State of a data server: 'failing' from an error until that kind of operation succeeds. Errors
    of single objects do not count. Used from any thread. At most one change a minute is logged."""

    def __init__(self, name: str, tell: Callable[[], None] = lambda: None) -> None:
        """``tell`` is called, in any thread, when it begins to fail, and when it works again."""
        self.last_error = ""
        """The message of the last operation that failed; '' if none has."""
        self.failing: set[str] = set()
        """Kinds of operation that failed when they were last tried."""
        self.noted = 0
        """How often something has failed."""
        self._hanging: set[str] = set()
        """Kinds of operation that have not been answered in time."""
        self._name = name
        self._tell = tell
        self._retry_s = time.monotonic()
        """When what fails is tried again, by time.monotonic()."""
        self._log_again_s = time.monotonic()
        """When a change of state is logged again, by the same clock."""
        self._lock = threading.Lock()
        """Held while the state changes."""

    @property
    def state(self) -> str:
        """'ok' or 'failing'."""
        return "failing" if self.failing or self._hanging else "ok"

    @property
    def usable(self) -> bool:
        """Whether new work should go to the server: not while it fails, except as a test."""
        return not self._hanging and (not self.failing or time.monotonic() >= self._retry_s)

    def failed(
        self,
        op: str,
        error: OSError | StoreError,
        where: str,
        works: Callable[[], bool] | None = None,
    ) -> FsError:
        """Note a failure; returns the error to raise. ``works`` tests the server: the failure may
        belong to one object."""
        answer: FsError
        if isinstance(error, StoreError):
            answer = Unavailable(str(error))
            if isinstance(error.__cause__, OSError):  # the marker may be right, but cannot be read
                answer = from_oserror(error.__cause__, f"{self._name}: {op} {where}")
        else:
            answer = from_oserror(error, f"{self._name}: {op} {where}")
        if not isinstance(answer, Unavailable):
            return answer  # full, over quota or a want of ours: it is not broken
        if works is not None and works():
            return ObjectFails(str(answer))
        with self._lock:
            self._note(op, answer)
        return answer

    def told(self, ops: Iterable[str], error: str) -> None:
        """Operations of these kinds have failed in another process of ours."""
        with self._lock:
            for op in ops:
                self._note(op, error)

    def hangs(self, op: str, detail: str) -> str:
        """A call does not end: the server is unusable until ``answers``. Returns the message."""
        with self._lock:
            self._hanging.add(op)
            self._note(op, f"{self._name}: {detail}")
            return self.last_error

    def answers(self) -> None:
        """All calls have ended."""
        with self._lock:
            hanging, self._hanging = self._hanging, set()
        for op in hanging:
            self.succeeded(op)

    def _note(self, op: str, answer: FsError | str) -> None:
        now = time.monotonic()
        first = not self.failing
        self.failing.add(op)
        self.noted += 1
        self.last_error = str(answer)
        self._retry_s = now + RETRY_S
        if first:
            self._tell()
        if first and now >= self._log_again_s:
            self._log_again_s = now + LOG_INTERVAL_S
            _log.warning("%s is failing: %s", self._name, answer)

    def works(self) -> None:
        """A probe has done what its operations need."""
        for op in _PROVEN & self.failing:
            self.succeeded(op)

    def succeeded(self, op: str) -> None:
        """Called while something fails, after each success."""
        with self._lock:
            if op in self.failing and op not in self._hanging:
                self.failing.remove(op)
                if not self.failing:
                    self._tell()
                    _log.info("%s works again", self._name)


# --- latency --------------------------------------------------------------------------------------

# A decaying distribution, and hedges. A protected file need not wait for a server that hangs or is
# overloaded: a read longer than nearly all others lately is *hedged*, that is, other servers are
# asked, and the first answer counts (J. Dean, L. A. Barroso, "The Tail at Scale", CACM 56(2),
# 2013). A server that lost such a race is *late*: for a while it is read only if nothing else is
# left.


_BUCKETS = 32  # by powers of two of microseconds
_KEPT = 512  # observations that count; older ones fade
_FEW = 16

_QUANTILE, _FACTOR = 0.99, 2.0
_UNKNOWN_S = 0.1
_LEAST_S, _MOST_S = 0.01, 1.0
_LATE_S = 5.0
_HEDGES_PER_READ, _HEDGES_MAX = 0.05, 16.0


class Latency:
    """Of one server. Used from any thread; a lost update does not matter."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, bool], list[float]] = {}
        self._late_until_s = -math.inf

    def observe(self, op: str, length: int, seconds: float) -> None:
        """Note the seconds that a request of kind ``op`` ('read', ...) took."""
        counts = self._counts.get((op, length > 128 << 10))
        if counts is None:
            counts = self._counts.setdefault((op, length > 128 << 10), [0.0] * _BUCKETS)
        counts[min(int(seconds * 1e6).bit_length(), _BUCKETS - 1)] += 1
        if sum(counts) > _KEPT:
            for bucket in range(_BUCKETS):
                counts[bucket] /= 2

    def quantile(self, op: str, length: int, fraction: float) -> float | None:
        """Seconds within which this fraction of such requests was answered; None: too few seen."""
        counts = self._counts.get((op, length > 128 << 10))
        slower = total = sum(counts or ())
        if counts is None or total < _FEW:
            return None
        for bucket, count in enumerate(counts):
            slower -= count
            if slower <= (1 - fraction) * total:
                break
        return (1 << bucket) / 1e6

    def was_late(self) -> None:
        """Others have answered in its place."""
        self._late_until_s = time.monotonic() + _LATE_S

    @property
    def is_late(self) -> bool:
        return time.monotonic() < self._late_until_s


def _usual_s(latency: Latency, length: int) -> float:
    quantile = latency.quantile("read", length, _QUANTILE)
    return _UNKNOWN_S if quantile is None else _FACTOR * quantile


class Hedging:
    """When to ask others, for all reads of a mount. Used from one thread."""

    def __init__(self, delay_s: float = 0.0) -> None:
        """``delay_s``: fixed; 0: by what is usual for a server; infinite: never."""
        self._delay_s = delay_s
        self._hedges = _HEDGES_MAX
        self.count = 0
        """How often others were asked."""

    def delay_s(
        self,
        latencies: Iterable[Latency],
        length: int,
        others: Iterable[Latency] = (),
        enough: int = 1,
    ) -> float:
        """How long to wait for servers with these latencies, each delivering ``length`` bytes, and
        no longer than ``enough`` of the ``others`` take.

        Long waits for all mean load, which hedges would raise: few reads in a hundred are hedged
        early.
        """
        self._hedges = min(self._hedges + _HEDGES_PER_READ, _HEDGES_MAX)
        if self._hedges < 1 and not self._delay_s:
            return _MOST_S
        return self.usual_s(latencies, length, others, enough)

    def usual_s(
        self,
        latencies: Iterable[Latency],
        length: int,
        others: Iterable[Latency] = (),
        enough: int = 1,
    ) -> float:
        """The same, however many reads have been hedged."""
        if self._delay_s:
            return self._delay_s
        slowest = max((_usual_s(latency, length) for latency in latencies), default=_UNKNOWN_S)
        if slowest > _LEAST_S:
            fastest = sorted(_usual_s(latency, length) for latency in others)[:enough]
            if len(fastest) == enough:
                slowest = min(slowest, fastest[-1])
        return min(max(slowest, _LEAST_S), _MOST_S)

    def hedged(self) -> None:
        self.count += 1
        self._hedges = max(self._hedges - 1, 0)
