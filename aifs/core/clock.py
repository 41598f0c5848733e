"""The times of day: the one by which files are stamped, and one for what happens to old things by
itself.
"""

import os
import time
from collections.abc import Callable
from functools import cache
from typing import Any

_CALENDAR_S = 1 << 37


def kernel_ns(is_new: bool = False) -> int:
    """The present in ns, as the kernel stamps files: after each stamp that it has given yet, and
    not after any that it is going to give. With ``is_new``, which costs
    half, it may equal the last stamp of another file: callers use it for inodes that no program has
    seen yet.

    All times of inodes come from here or from the kernel. The time of day does not do: the kernel's
    own stamps, of burst copies and by touch(1), are up to 10 ms behind it.
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


os.register_at_fork(
    after_in_child=stamped_fd.cache_clear
)  # children close what they have inherited


def require_time(seconds: Any) -> float:
    """A time since the epoch that somebody else has written. Raises ValueError for what no calendar
    can show: localtime(3) fails for it."""
    if type(seconds) not in (int, float) or not 0 <= seconds < _CALENDAR_S:
        raise ValueError("no time since the epoch")
    return float(seconds)


def careful_clock() -> Callable[[], int]:
    """The time of day in ns, but not more after the present than time has passed: when the clock
    leaps ahead, nothing is older for that."""
    start_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return lambda: min(time.time_ns(), start_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME))
