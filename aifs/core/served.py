"""How many requests of each kind have been answered, and how long that took. Pure.

Counting costs a third of a microsecond for a request, so it is always done.
"""

import errno
from collections import defaultdict
from typing import Any

ANSWERS = frozenset(
    (errno.ENOENT, errno.EEXIST, errno.ENOTEMPTY, errno.ENODATA, errno.ENOTSUP, errno.EOPNOTSUPP)
)
"""Errno values that answer a question of a program: there is no such name or attribute, or there is
one already. ``ls -l`` asks for the security context of each file, for example. Nothing failed."""

UNIT_NS = 8000
BUCKETS = 24
"""Bucket i counts what took less than ``2**i`` units and no bucket before it has counted: below
8 us, 16 us, ... 33 s, and the last one all that took longer."""


class Served:
    """The requests of one kind. Used from one thread."""

    __slots__ = ("buckets", "bytes", "errors", "nanoseconds")

    def __init__(self) -> None:
        self.buckets = [0] * BUCKETS
        self.bytes = 0
        self.errors: dict[int, int] = {}
        self.nanoseconds = 0

    def add(self, duration_ns: int, number: int = 0, moved: int = 0) -> None:
        """One has been answered, with ``moved`` bytes of a file. ``number``: the errno; with 0, and
        those in ANSWERS, it is no error."""
        bucket = (duration_ns // UNIT_NS).bit_length()
        self.buckets[bucket if bucket < BUCKETS else -1] += 1
        self.nanoseconds += duration_ns
        self.bytes += moved
        if number and number not in ANSWERS:
            self.errors[number] = self.errors.get(number, 0) + 1

    def status(self) -> dict[str, Any]:
        """``count``, ``seconds``, ``bytes``, ``buckets`` without zeros at its end, and ``errors``
        by their names."""
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
    """Seconds within which this part of the requests in ``buckets`` was answered: the upper end of
    a bucket. None: there were none."""
    left = fraction * sum(buckets)
    if not left:
        return None
    for bucket, count in enumerate(buckets):
        left -= count
        if left <= 0:
            break
    return (UNIT_NS << bucket) / 1e9
