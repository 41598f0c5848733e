"""Checksums of striped files: BLAKE3-256 of each MiB of the file's bytes, the last one of what is
left.
"""

from collections.abc import Mapping
from functools import cache

from blake3 import blake3

HASHED = 1 << 20
"""Bytes of a file that one checksum covers; the last one covers fewer."""

DIGEST_BYTES = 32
DIGESTS_AT_ONCE = 256
"""Checksums that are on record together."""

_SPARSE_HASHED = 16 << 30


def digests_of(data: bytes | memoryview) -> bytes:
    """The checksums of ``data``, one after the other. Lets other threads run meanwhile."""
    return b"".join(
        blake3(data[start : start + HASHED]).digest() for start in range(0, len(data), HASHED)
    )


@cache
def _digest_of_zeros() -> bytes:
    return digests_of(bytes(HASHED))


def join_digests(digests: Mapping[int, bytes], size: int, piece: int, is_protected: bool) -> bytes:
    """The checksums of a file of ``size`` bytes, from those of its pieces of ``piece`` bytes, by
    offset; what lacks is a hole.

    A file that is mostly holes gets none, unless it is protected and not too large: they would take
    more space than it does.
    """
    if 2 * len(digests) * piece < size and not (is_protected and size <= _SPARSE_HASHED):
        return b""
    hole = _digest_of_zeros() * (piece // HASHED)
    parts = [digests.get(offset, hole) for offset in range(0, size, piece)]
    if parts and parts[-1] is hole:
        parts[-1] = digests_of(bytes(size - piece * (len(parts) - 1)))
    return b"".join(parts)
