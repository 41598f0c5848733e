"""Looking again and again, where nobody tells what has changed."""

import time
from collections.abc import Iterator

_DELAY_MIN_S, _DELAY_MAX_S = 0.0005, 0.1


def delays() -> Iterator[None]:
    """At once, then ever more slowly."""
    delay = _DELAY_MIN_S
    while True:
        yield
        time.sleep(delay)
        delay = min(delay * 1.5, _DELAY_MAX_S)
