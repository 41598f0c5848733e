"""Checksums of striped files: BLAKE3-256 of each MiB of the file's bytes, the last one of what is left."""

from blake3 import blake3

HASHED = 1 << 20
"""Bytes of a file that one checksum covers; the last one covers fewer."""

DIGEST_BYTES = 32
DIGESTS_AT_ONCE = 256
"""Checksums that are on record together."""


def digests_of(data: bytes | memoryview) -> bytes:
    """The checksums of ``data``, one after the other. Lets other threads run meanwhile."""
    return b"".join(
        blake3(data[start : start + HASHED]).digest() for start in range(0, len(data), HASHED)
    )


def hashed_range(number: int, size: int) -> tuple[int, int]:
    """Start and end of what checksum ``number`` of a file of ``size`` bytes covers."""
    return number * HASHED, min((number + 1) * HASHED, size)
