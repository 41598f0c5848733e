"""Which data servers a new file gets, in which order. Pure: no state, no randomness but the seed's.

Algorithms are numbered and never changed once published, so that what a cluster does stays explainable; a
better one gets the next number. The result is recorded with each file.
"""

from functools import lru_cache

ALGORITHM = 1
"""The algorithm that new files use."""

BURST_FIRST = 0x8000
"""Server numbers from here on are those of burst directories; lower ones those of data servers."""

_MASK = (1 << 64) - 1


def place(algorithm: int, seed: int, servers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` of ``servers`` (ascending ids; 0, or more than there are: all) in stripe order.

    ``seed`` is the file's inode number. Algorithm 1: seeds go in blocks of n = len(servers). Each block shuffles
    the servers anew; within a block, file i takes them in that order from place i on, wrapping around. So of each
    block's files every server is first exactly once and is used by exactly ``count``, and files that are created
    in a pattern (every other one large) still meet all servers.
    """
    if algorithm != 1:
        raise ValueError(f"there is no placement algorithm {algorithm}")
    block, start = divmod(seed, len(servers))
    ring = _shuffled(block, servers)
    return (ring[start:] + ring[:start])[: count or None]


@lru_cache(maxsize=64)
def _shuffled(seed: int, servers: tuple[int, ...]) -> tuple[int, ...]:
    """Fisher-Yates, fed by splitmix64."""
    ring = list(servers)
    state = seed & _MASK
    for last in range(len(ring) - 1, 0, -1):
        state = (state + 0x9E3779B97F4A7C15) & _MASK
        word = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
        other = (word ^ (word >> 31)) % (last + 1)
        ring[last], ring[other] = ring[other], ring[last]
    return tuple(ring)
