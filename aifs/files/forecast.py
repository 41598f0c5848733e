"""Which new files will be tiny, so that their records hold their bytes from the first write on.

Making, attaching, reading and deleting a copy costs a tiny file more than all else, and a copy has
to be there at the first open (passthrough). So if nearly all new files of the same directory and
ending were tiny, the next one gets no copy. If it grows it gets one then, and is written by way of
the daemon until it is closed.
"""

import os

Kin = tuple[int, bytes]
"""Directory, and ending of the name: new files with both in common are likely to be alike."""

_SURE = 8
"""From this score on the next one is taken for tiny: each tiny one has given a point."""
_WRONG = 16
"""What one that was not tiny costs."""
_WRITES_MAX = 2
"""Writes through the daemon, each a request and a transaction, that cost as much as a copy."""
_SCORE_MAX = 64
_KINS_MAX = 4096
"""How many are remembered; the one that was seen first makes room."""


def kin_of(parent: int, name: bytes) -> Kin:
    return parent, os.path.splitext(name)[1]


class Forecast:
    """Used from one trio thread. Nothing here blocks."""

    def __init__(self, inline_limit: int) -> None:
        self._inline_limit = inline_limit
        self._scores: dict[Kin, int] = {}

    def is_tiny(self, kin: Kin, expected: int) -> bool:
        """Whether a new file is likely to be; ``expected``: the size that its policy names, or
        0."""
        return expected <= self._inline_limit and self._scores.get(kin, 0) >= _SURE

    def closed(self, kin: Kin, size: int, writes: int) -> None:
        """A new file was closed first, with this size, after so many writes by the daemon."""
        is_tiny = size <= self._inline_limit and writes <= _WRITES_MAX
        score = self._scores.get(kin, 0) + (1 if is_tiny else -_WRONG)
        if kin not in self._scores and len(self._scores) >= _KINS_MAX:
            del self._scores[next(iter(self._scores))]
        self._scores[kin] = min(max(score, -_SCORE_MAX), _SCORE_MAX)
