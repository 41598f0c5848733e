"""Files that one host after the other changes, and what may be read of them meanwhile.

Close-to-open: who opens a file sees what its own host had closed before, and what others had closed
and then shown (by a rename or an unlink, say), or something newer. While others change it, each
block is of one of the versions from that one on.
"""

import random
import threading
from collections.abc import Sequence

BLOCK = 8
"""Bytes; all changes begin and end at multiples, so that no block is of two versions."""


class Register:
    """What one file holds: its versions, each begun by the one who holds ``lock``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.versions: list[bytes] = [b""]
        self.is_lost = False
        """A change has failed, which may have been done, or not."""
        self._shown = 0
        """Number of the version that all must know of."""
        self._closed: dict[int, int] = {}
        """The same of each host that has closed the file."""

    def known(self, host: int) -> int:
        """The oldest version that the host may read from now on."""
        return max(self._shown, self._closed.get(host, 0))

    def close(self, host: int) -> int:
        """The newest version is there, and closed at its host. Its number."""
        self._closed[host] = len(self.versions) - 1
        return self._closed[host]

    def show(self, version: int) -> None:
        self._shown = max(self._shown, version)

    def check(self, known: int, found: bytes) -> None:
        """What an open that began when ``known`` was the oldest version has read is allowed."""
        allowed = self.versions[known:]
        assert _fits(found, allowed), (
            f"{self.name}: read {_told(found)}; allowed are versions {known} to "
            f"{len(self.versions) - 1}: {', '.join(map(_told, allowed[:4]))}"
        )


def _fits(found: bytes, allowed: Sequence[bytes]) -> bool:
    if found in allowed:
        return True
    if len(allowed) == 1 or len(found) > max(map(len, allowed)):
        return False
    least = min(map(len, allowed))  # behind it a kernel may show zeros up to the size it knows
    return all(
        any(one[at : at + BLOCK] == found[at : at + BLOCK] for one in allowed)
        or (at >= least and not any(found[at : at + BLOCK]))
        for at in range(0, len(found), BLOCK)
    )


def _told(content: bytes) -> str:
    """Runs of equal blocks."""
    runs: list[tuple[bytes, int]] = []
    for at in range(0, len(content), BLOCK):
        block = content[at : at + BLOCK]
        if runs and runs[-1][0] == block:
            runs[-1] = block, runs[-1][1] + 1
        else:
            runs.append((block, 1))
    return f"{len(content)} bytes " + " ".join(f"{block!r}*{count}" for block, count in runs[:9])


class Change:
    """A change of a file that was drawn. ``after``: what it makes of it."""

    def __init__(self, chance: random.Random, before: bytes, number: int) -> None:
        self.kind = chance.choice(["rewrite", "rewrite", "append", "patch", "truncate"])
        length = chance.choice([40, 3000, 5000, 70_000, 300_000]) // BLOCK * BLOCK
        self.data = b"%08d" % number * (length // BLOCK)
        self.offset = chance.randrange(len(before) // BLOCK + 1) * BLOCK
        if self.kind == "rewrite":
            self.offset, self.after = 0, self.data
        elif self.kind == "append":
            self.offset, self.after = len(before), before + self.data
        elif self.kind == "patch":
            end = self.offset + len(self.data)
            self.after = before[: self.offset] + self.data + before[end:]
        else:
            self.after = before[: self.offset]
        if len(self.after) > 1_000_000:
            self.kind, self.offset, self.after = "rewrite", 0, self.data
