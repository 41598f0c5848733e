"""Times of day: for stamps of files, and for old things."""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

_CALENDAR_S = 1 << 37


def kernel_ns(is_new: bool = False) -> int:
    """The present in ns as the kernel stamps files: after each stamp given yet, not after any later
    one. ``is_new``, at half the cost, may equal another file's last stamp: for inodes no program
    has seen.

    All times of inodes come from here or the kernel: its stamps, of burst copies and by touch(1),
    are up to 10 ms behind the time of day.
    """
    fd = stamped_fd()
    os.utime(fd)  # no clock of clock_gettime(2) shows the floor of fine-grained stamps
    first_ns = os.fstat(fd).st_mtime_ns
    if is_new:
        return first_ns
    os.utime(fd)  # the first may be the floor itself, a stamp that programs have seen
    return os.fstat(fd).st_mtime_ns


@cache
def stamped_fd() -> int:
    """The file in memory that is stamped for this, in this process."""
    return os.memfd_create("aifs-clock")


# Children close what they have inherited.
os.register_at_fork(after_in_child=stamped_fd.cache_clear)


def require_time(seconds: Any) -> float:
    """A foreign time since the epoch. Raises ValueError beyond calendars: localtime(3) fails for
    it."""
    if type(seconds) not in (int, float) or not 0 <= seconds < _CALENDAR_S:
        raise ValueError("no time since the epoch")
    return float(seconds)


def careful_clock() -> Callable[[], int]:
    """The time of day in ns that does not leap ahead: nothing grows old by that."""
    start_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return lambda: min(time.time_ns(), start_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME))
