"""The time of day for what happens to old things by itself."""

import time
from collections.abc import Callable


def careful_clock() -> Callable[[], int]:
    """The time of day in ns, but not more after the present than time has passed: when the clock
    leaps ahead, nothing is older for that."""
    start_ns = time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)
    return lambda: min(time.time_ns(), start_ns + time.clock_gettime_ns(time.CLOCK_BOOTTIME))
