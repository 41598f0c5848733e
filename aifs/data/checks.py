"""Whether bytes are right, by checksums of files or chunks of containers, in worker threads; and
columns to leave out when they are wrong."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations, islice
from typing import NamedTuple

from blake3 import blake3

from aifs.core.errors import FsError, Unavailable
from aifs.data.chunk_codec import decode, digest_of, is_padding, unpack_header
from aifs.data.server import DataServer
from aifs.data.storage import Key
from aifs.layout.interleaved import CHUNK_MAX, HEADER_BYTES
from aifs.layout.striped import Striped


class Untold(Unavailable):
    """More columns are lost or wrong than the others can replace."""


class FileCheck:
    """A striped file of ``size`` bytes, and checksums of the MiBs looked at, from ``first``; b"":
    none."""

    def __init__(self, size: int, first: int, digests: bytes) -> None:
        self._size = size
        self._first = first
        self._digests = digests

    def at(self, data: memoryview, offset: int, is_last: bool) -> tuple[int, bool | None] | None:
        length = min(HASHED, self._size - offset)
        if len(data) < length:
            return None
        place = (offset // HASHED - self._first) * DIGEST_BYTES
        expected = self._digests[place : place + DIGEST_BYTES]
        return length, digest_of(data[:length]) == expected if expected else None


class ContainerCheck:
    """A container; ``row``: appends end with whole rows, filled with zeros (1: they do not)."""

    def __init__(self, row: int = 1) -> None:
        self._row = row

    def at(self, data: memoryview, offset: int, is_last: bool) -> tuple[int, bool | None] | None:
        rest = min(-offset % self._row, len(data))
        if rest and is_padding(data):
            return rest, bytes(data[:rest]) == bytes(rest)
        if len(data) < HEADER_BYTES and not is_last:
            return None
        try:
            header = unpack_header(data[:HEADER_BYTES])
        except ValueError:
            return 0, False
        end = HEADER_BYTES + header.stored
        if header.stored > CHUNK_MAX or (len(data) < end and is_last):
            return 0, False
        if len(data) < end:
            return None
        try:
            raw = decode(data[HEADER_BYTES:end], header.codec, header.raw)
            return end, digest_of(raw) == header.digest
        except ValueError:
            return end, False


_SETS_MAX = 256


def suspect_sets(layout: Striped, columns: Iterable[int], unread: int = 0) -> Iterator[int]:
    """Masks of columns without which the data ``columns`` can still be read, small ones first.

    Each includes ``unread``; the first is that alone. At most 256: more is damage of many replicas.
    """
    needed = sorted(set(columns))
    if layout.parity:
        candidates: Iterable[int] = range(len(layout.servers))
    else:
        candidates = (copy for column in needed for copy in layout.copies(column))
    others = [column for column in candidates if not unread >> column & 1]

    def is_enough(mask: int) -> bool:
        if layout.parity:
            return mask.bit_count() <= layout.parity
        return all(source_of(layout, column, mask) is not None for column in needed)

    sizes = range(len(others) + 1) if layout.is_protected else range(1)
    masks = (
        unread | sum(1 << column for column in extra)
        for size in sizes
        for extra in combinations(others, size)
    )
    yield from islice(filter(is_enough, masks), _SETS_MAX)


def source_of(layout: Striped, column: int, unread: int) -> int | None:
    """The column to read the bytes of data ``column`` from; None: they have to be decoded."""
    return next((copy for copy in layout.copies(column) if not unread >> copy & 1), None)


# --- local copies of files ------------------------------------------------------------------------


class CheckedPart(NamedTuple):
    """Bytes of a file, and their checksum; None: they are a hole."""

    start: int
    length: int
    digest: bytes | None


def differ(
    server: DataServer, key: Key, fd: int, parts: Sequence[CheckedPart], memory: memoryview
) -> bool:
    """Whether a part of a local copy cannot be read, or is not what it should be. Blocks."""
    for start, length, digest in parts:
        data = memory[:length]
        try:
            done = server.read(key, fd, data, start)
        except FsError:
            return True
        if done < length or (
            bytes(data) != bytes(length) if digest is None else digest_of(data) != digest
        ):
            return True
    return False


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
    """The checksums of a file, from those of its pieces of ``piece`` bytes, by offset; a piece
    without is a hole. None for a file that is mostly holes, unless protected and not too large:
    they would take more space than it."""
    if 2 * len(digests) * piece < size and not (is_protected and size <= _SPARSE_HASHED):
        return b""
    hole = _digest_of_zeros() * (piece // HASHED)
    parts = [digests.get(offset, hole) for offset in range(0, size, piece)]
    if parts and parts[-1] is hole:
        parts[-1] = digests_of(bytes(size - piece * (len(parts) - 1)))
    return b"".join(parts)
