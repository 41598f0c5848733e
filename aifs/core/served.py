"""Answered requests of each kind, and their time. Pure. A request costs a third of a microsecond,
so it is always on."""

import errno
from collections import defaultdict
from typing import Any

ANSWERS = frozenset(
    (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP)
)
"""Errnos that answer questions of programs: no such name or attribute, or there is one. ``ls -l``
asks each file for a security context. No failures."""

UNIT_NS = 8000
BUCKETS = 24
"""Bucket i counts requests below ``2**i`` units and in no earlier one: below 8 us, 16 us, ... 33 s;
the last, all longer."""


class Served:
    """The requests of one kind. Used from one thread."""

    __slots__ = ("buckets", "bytes", "errors", "nanoseconds")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.bytes = 0
        self.errors: dict[int, int] = {}
        self.nanoseconds = 0

    def add(self, duration_ns: int, number: int = 0, moved: int = 0) -> None:
        """Count one with ``moved`` bytes of a file. ``number``: the errno; 0, and ANSWERS, are no
        errors."""
        bucket = (duration_ns // UNIT_NS).bit_length()
        self.buckets[bucket if bucket < BUCKETS else -1] += 1
        self.nanoseconds += duration_ns
        self.bytes += moved
        if number and number not in ANSWERS:
            self.errors[number] = self.errors.get(number, 0) + 1

    def status(self) -> dict[str, Any]:
        """``count``, ``seconds``, ``bytes``, ``buckets`` without final zeros, ``errors`` by
        name."""
        last = max((number for number, count in enumerate(self.buckets) if count), default=-1)
        return {
            "count": sum(self.buckets),
            "seconds": round(self.nanoseconds / 1e9, 6),
            "bytes": self.bytes,
            "buckets": self.buckets[: last + 1],
            "errors": {errno.errorcode.get(key, str(key)): n for key, n in self.errors.items()},
        }


class AllServed(defaultdict[str, Served]):
    """By operation, as FUSE names them."""

    def __init__(self) -> None:
        super().__init__(Served)

    def status(self) -> dict[str, Any]:
        return {operation: served.status() for operation, served in sorted(self.items())}


def quantile(buckets: list[int], fraction: float) -> float | None:
    """Seconds for this part of the requests: a bucket's upper end. None: no requests."""
    left = fraction * sum(buckets)
    if not left:
        return None
    for bucket, count in enumerate(buckets):
        left -= count
        if left <= 0:
            break
    return (UNIT_NS << bucket) / 1e9
