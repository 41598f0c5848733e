"""How many bytes per second a data server takes, or a burst device gives, lately: for plans of
grouped writes.

Only the time counts in which a request is under way, and that once however many are: so what is
measured is the server, not how much is asked of it.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

_WINDOW = 32 << 20  # bytes after which a new rate is known
_FIRST = 4 << 20
_WEIGHT = 0.2  # of the newest window; the others fade


class Throughput:
    """Of one server. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while any of this changes."""
        self._under_way = 0
        """How many operations are."""
        self._since_s = 0.0
        """Since when they have been measured, by time.monotonic()."""
        self._bytes = 0
        """Moved since the rate was last looked at."""
        self._busy_s = 0.0
        """Seconds in which anything was under way since then."""
        self._rate = 0.0
        """Bytes per second lately; 0: not known yet."""
        self._counted_until_s = 0.0
        """Up to when time has been counted, by time.monotonic()."""
        self.total = (0, 0.0)
        """All bytes and seconds that have been measured."""

    @property
    def rate(self) -> int:
        """Bytes per second; 0: too few have been seen."""
        if not self._rate and self._bytes >= _FIRST and self._busy_s:
            return int(self._bytes / self._busy_s)
        return int(self._rate)

    def measure(self, count: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which moves ``count`` bytes."""
        with self._lock:
            if not self._under_way:
                self._since_s = time.monotonic()
            self._under_way += 1
        try:
            return function(*args)
        finally:
            self._done(count)

    def told(self, count: int, busy_s: float) -> None:
        """Another process has moved so many bytes in the last ``busy_s`` seconds."""
        with self._lock:
            now_s = time.monotonic()
            self._add(count, now_s - busy_s, now_s)

    def _done(self, count: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._under_way -= 1
            self._add(count, self._since_s, now_s)
            self._since_s = now_s

    def _add(self, count: int, since_s: float, until_s: float) -> None:
        busy_s = max(until_s - max(since_s, self._counted_until_s), 0.0)
        self._counted_until_s = max(until_s, self._counted_until_s)
        self._bytes += count
        self._busy_s += busy_s
        self.total = self.total[0] + count, self.total[1] + busy_s
        if self._bytes >= _WINDOW and self._busy_s:
            newest = self._bytes / self._busy_s
            self._rate += (newest - self._rate) * (_WEIGHT if self._rate else 1)
            self._bytes, self._busy_s = 0, 0.0
