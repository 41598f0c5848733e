"""Which new files will be tiny, so that their records hold their bytes from the first write on.

The kernel passes a file through to a burst copy from its first open on, or not at all until its
last close, so a copy has to be there before anything of the file is known. For a tiny one that is
waste: to make, attach, read and delete a copy costs more than all else. So what became of new files
of the same directory and with the same ending tells: where nearly all were tiny, the next one gets
no copy. If it grows all the same it gets one then, and is written by way of the daemon until it is
closed.
"""

import os

Kin = tuple[int, bytes]
"""What new files have in common that are likely to be alike: directory, and ending of their
names."""

_SURE = 8
"""From this score on the next one is taken for tiny: each tiny one has given a point."""
_WRONG = 16
"""What one that was not tiny costs."""
_WRITES_MAX = 2
"""Each write that the daemon carries out is a request and a transaction: where a file takes more of
them, a copy would have cost less."""
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
        """A new file was closed for the first time, and has this size; so many writes came to the
        daemon."""
        is_tiny = size <= self._inline_limit and writes <= _WRITES_MAX
        score = self._scores.get(kin, 0) + (1 if is_tiny else -_WRONG)
        if kin not in self._scores and len(self._scores) >= _KINS_MAX:
            del self._scores[next(iter(self._scores))]
        self._scores[kin] = min(max(score, -_SCORE_MAX), _SCORE_MAX)
