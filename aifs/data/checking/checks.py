"""What says whether bytes are right: checksums of a file, chunks of a container. For worker
threads.
"""

from collections.abc import Sequence
from typing import NamedTuple

from aifs.core.errors import FsError, Unavailable
from aifs.data.checking.digests import DIGEST_BYTES, HASHED
from aifs.data.chunk_codec import decode, digest_of, is_padding, unpack_header
from aifs.data.server import DataServer
from aifs.data.storage import Key
from aifs.layout.interleaved import CHUNK_MAX, HEADER_BYTES


class Untold(Unavailable):
    """Nobody can tell what bytes were: more columns are lost or wrong than the others can
    replace.
    """


class FileCheck:
    """A striped file of ``size`` bytes; ``digests``: those of all MiBs from ``first`` on that are
    looked at, b"": none.
    """

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
    """A container; ``row``: what is appended ends with whole rows, filled with zeros (1: it is
    not).
    """

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
