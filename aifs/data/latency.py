"""Latencies of a data server: a decaying distribution, and hedges.

A protected file need not wait for a server that hangs or is overloaded: a read longer than nearly
all others lately is *hedged*, that is, other servers are asked, and the first answer counts (J.
Dean, L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013). A server that lost such a race is
*late*: for a while it is read only if nothing else is left.
"""

import math
import time
from collections.abc import Iterable

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
