"""Fault points that something happens at."""

from collections.abc import Callable

from aifs.core import faults


def once(point: str, act: Callable[[], object]) -> list[int]:
    """Have ``act`` called when the point is reached for the first time. Returns a list that then has an element."""
    calls: list[int] = []

    def reached() -> None:
        if not calls:
            calls.append(1)
            act()

    faults.arm(point, reached)
    return calls
