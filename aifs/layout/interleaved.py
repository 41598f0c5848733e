"""Interleaved layout: a file is cut into chunks, which lie in *containers* that many files share. Pure.

The chunks of all files that are stored together, in the order of the files, fill *stripes* of 4 MiB and their headers;
each stripe is appended as a whole to a container of the next server. So few large writes go to every server whatever
the sizes of the files, one large file is spread over all servers, and files that lie side by side are read together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

CHUNK = 1 << 20
"""Chunk size of new files."""

CHUNK_MAX = 4 << 20

HEADER_BYTES = 76
"""Of the header before each chunk in a container (see data/chunk_codec.py)."""

STRIPE = 4 * (CHUNK + HEADER_BYTES)
"""Bytes, headers included, that are appended to one container at a time; more only where one chunk takes more."""


class Location(NamedTuple):
    """Where a chunk lies: ``offset`` in its container is that of its header."""

    server: int
    container: int
    offset: int
    stored: int  # bytes behind the header
    raw: int  # bytes of the file
    codec: int
    digest: bytes  # BLAKE3-256 of the file's bytes


class Stripe(NamedTuple):
    """Chunks ``first`` to ``end`` - 1 of those that are dealt out, and the server that they go to."""

    server: int
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class Interleaved:
    """The layout of one file: the size of its chunks in bytes; where they lie is the chunk list's to say."""

    chunk: int

    def count(self, size: int) -> int:
        """How many chunks a file of ``size`` bytes has."""
        return -(-size // self.chunk)

    def length(self, index: int, size: int) -> int:
        """Bytes of chunk ``index`` of a file of ``size`` bytes: all are whole but the last."""
        return min(self.chunk, size - index * self.chunk)


def deal(sizes: Sequence[int], servers: Sequence[int], start: int) -> list[Stripe]:
    """Chunks as stripes, in order: each as full as it gets, on the server behind the last one's.

    ``sizes`` include the headers. ``start``: place in ``servers`` of the first stripe, taken modulo their number.
    """
    stripes: list[Stripe] = []
    first = filled = 0
    for index, size in enumerate(sizes):
        if filled + size > STRIPE and index > first:
            stripes.append(Stripe(servers[(start + len(stripes)) % len(servers)], first, index))
            first, filled = index, 0
        filled += size
    if len(sizes) > first:
        stripes.append(Stripe(servers[(start + len(stripes)) % len(servers)], first, len(sizes)))
    return stripes
