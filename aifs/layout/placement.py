"""Which data servers a new file gets, in which order. Pure: no state, no randomness but the seed's.

Algorithms are numbered and never changed once published, so that what a cluster does stays
explainable; a better one gets the next number. The result is recorded with each file.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from math import gcd
from typing import NamedTuple

ALGORITHM = 2
"""The algorithm that new files use."""

BURST_FIRST = 0x8000
"""Server numbers from here on are those of burst directories; lower ones those of data servers."""

ACTIVE, DRAINING, LOST = SERVER_STATES = ("active", "draining", "lost")
"""In use; no new objects, and others move away; gone for good with all objects."""

WEIGHTS = (1, 2, 4, 8)

_MASK = (1 << 64) - 1


class Candidate(NamedTuple):
    """A data server that new objects may go to."""

    id: int
    domain: str  # servers with the same may fail together
    weight: int = WEIGHTS[-1]  # one of WEIGHTS: twice as much, twice as many files


def weight_of(free: int, most: int) -> int:
    """A server's weight, with ``free`` bytes, ``most`` in the emptiest: largest from half of that,
    smallest below an eighth, so writes rarely change it."""
    return next(
        (w for w, share in zip(WEIGHTS[::-1], (2, 4, 8), strict=False) if free * share >= most),
        WEIGHTS[0],
    )


def place(algorithm: int, seed: int, servers: tuple[int, ...], count: int) -> tuple[int, ...]:
    """``count`` of ``servers`` (ascending ids; 0, or more than there are: all) in stripe order.

    ``seed`` is the file's inode number. Algorithm 1: seeds go in blocks of n = len(servers). Each
    block shuffles the servers anew; within a block, file i takes them in that order from place i
    on, wrapping around. So of each block's files every server is first exactly once and is used by
    exactly ``count``, and files that are created in a pattern (every other one large) still meet
    all servers.
    """
    if algorithm != 1:
        raise ValueError(f"there is no placement algorithm {algorithm}")
    block, start = divmod(seed, len(servers))
    ring = _shuffled(block, servers)
    return (ring[start:] + ring[:start])[: count or None]


def spread(
    algorithm: int, seed: int, candidates: Sequence[Candidate], columns: int, replicas: int = 1
) -> tuple[int, ...]:
    """Servers for ``columns`` columns (see striped), all different, of ``candidates`` (ascending
    ids, enough of them).

    Algorithm 2: as algorithm 1, but in the ring each server stands as often as its weight says (in
    lowest terms), and the next one in it waits while others there serve better: a column takes
    the first server of those whose domain has the fewest columns of the same bytes' replicas, then
    of the file. So as many domains as there are get a column before one gets a second, and the
    replicas of a column are in different domains: where that fails at the end, a replica is
    exchanged with one of another column.
    """
    if algorithm != 2:
        raise ValueError(f"there is no placement algorithm {algorithm}")
    if not 0 < columns <= len(candidates):
        raise ValueError(f"{columns} columns do not fit on {len(candidates)} servers")
    by_id = {candidate.id: candidate for candidate in candidates}
    unit = gcd(*(candidate.weight for candidate in candidates))
    tickets = tuple(c.id for c in candidates for _ in range(c.weight // unit))
    block, start = divmod(seed, len(tickets))
    ring = _shuffled(block, tickets)
    following = [by_id[number] for number in dict.fromkeys(ring[start:] + ring[:start])]
    in_file: Counter[str] = Counter()
    groups: list[list[Candidate]] = []
    size = replicas if replicas > 1 else columns
    for _ in range(columns // size):
        group: list[Candidate] = []
        for _ in range(size):
            near = Counter(other.domain for other in group)
            # The first of equals.
            best = min(following, key=lambda c: (near[c.domain], in_file[c.domain]))
            following.remove(best)
            group.append(best)
            in_file[best.domain] += 1
        groups.append(group)
    if replicas > 1:
        _part(groups)
    return (
        tuple(group[j].id for j in range(replicas) for group in groups)
        if replicas > 1
        else _ids(groups[0])
    )


def _ids(candidates: Iterable[Candidate]) -> tuple[int, ...]:
    return tuple(candidate.id for candidate in candidates)


def _part(groups: list[list[Candidate]]) -> None:
    """Exchange members of groups while fewer then share a domain."""
    for group in groups:
        for place, member in enumerate(group):
            if not _shares(group, place, member):
                continue
            exchanges = (
                (other, i) for other in groups if other is not group for i in range(len(other))
            )
            for other, i in exchanges:
                if not _shares(group, place, other[i]) and not _shares(other, i, member):
                    group[place], other[i] = other[i], member
                    break


def _shares(group: list[Candidate], place: int, candidate: Candidate) -> bool:
    """Whether ``candidate`` would share its domain with another member of the group."""
    return any(i != place and member.domain == candidate.domain for i, member in enumerate(group))


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


# --- hosts: rendezvous hashing --------------------------------------------------------------------

# Hosts agree on one of them for each thing without asking; when one goes, only its things move.


def weight(name: str, number: int) -> int:
    """Of a host, for the thing with this number: the largest one is chosen."""
    mixed = (_seed(name) + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ mixed >> 31


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
