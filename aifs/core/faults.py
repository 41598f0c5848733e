"""Named fault points, where a test may stop the program, fail it, or copy its state.

Unarmed, a point costs one dictionary test. Names, ``layer.operation.moment``, are declared here
once, so that a crash sweep reaches each.
"""

from collections.abc import Callable

POINTS: dict[str, str] = {}
"""Every declared name, with what has happened and what has not at that moment."""

_armed: dict[str, Callable[[], None]] = {}


class SimulatedCrash(BaseException):
    """Raised by tests at a fault point; not an Exception, so that no handler swallows it."""


def declare(name: str, meaning: str) -> str:
    """Register a fault point; modules call it at import time and keep the returned name."""
    if name in POINTS:
        raise ValueError(f"fault point {name!r} is declared twice")
    POINTS[name] = meaning
    return name


def reach(name: str) -> None:
    """Mark that execution is at ``name``; runs the armed action, which may raise."""
    if _armed and name in _armed:
        _armed[name]()


def arm(name: str, action: Callable[[], None]) -> None:
    """Run ``action`` whenever ``name`` is reached, until ``disarm``."""
    if name not in POINTS:
        raise KeyError(f"no fault point is called {name!r}")
    _armed[name] = action


def disarm_all() -> None:
    _armed.clear()
