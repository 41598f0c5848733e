"""Fault points that something happens at."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aifs.core import faults


def crash() -> None:
    """The daemon dies, as far as a test in process can tell."""
    raise faults.SimulatedCrash


@contextmanager
def armed(point: str, act: Callable[[], object]) -> Iterator[None]:
    """Have ``act`` called whenever the point is reached."""
    faults.arm(point, act)
    try:
        yield
    finally:
        faults.disarm_all()


def once(point: str, act: Callable[[], object]) -> list[int]:
    """Have ``act`` called when the point is reached for the first time. Returns a list that then
    has an element."""
    calls: list[int] = []

    def reached() -> None:
        if not calls:
            calls.append(1)
            act()

    faults.arm(point, reached)
    return calls
