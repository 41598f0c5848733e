"""Rendezvous hashing: hosts agree on one of them for each thing without asking; when one goes, only
its things move."""

from functools import lru_cache
from hashlib import blake2b

_MASK = (1 << 64) - 1


def weight(name: str, number: int) -> int:
    """Of a host, for the thing with this number: the largest one is chosen."""
    mixed = (_seed(name) + number * 0x9E3779B97F4A7C15) & _MASK
    mixed = ((mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    return mixed ^ mixed >> 31


@lru_cache(maxsize=4096)
def _seed(name: str) -> int:
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little")
