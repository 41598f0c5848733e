"""Records of chunk lists (``l``), both formats, little-endian. Pure.

format 1: chunks of one size (the last one may be smaller), from chunk ``first`` on
    u8 format=1, u8 number of chunks (1 to CHUNKS_PER_RECORD), u8 number of containers, u64 chunks
    that are stored (bit i: chunk first + i; the others are holes), then for each container: u64 id,
    u16 server, u64 bytes of these chunks in it, headers included; then for each stored chunk: u8
    container (its place above), u8 codec, u32 stored length, u32 raw length, u64 offset, 32 bytes
    digest
format 2: extents, from extent ``first`` on, which begins at byte ``start`` of the file
    u8 format=2, u8 number of extents (1 to CHUNKS_PER_RECORD), u8 number of containers, u64 start,
    then the containers as above, of chunks of the file's own alone; then for each extent one of a
    chunk as above: it is the file's own u8 254, u32 length, 32 bytes digest: a shared chunk
    (meta/shared.py) u8 255, u64 length: zeros
"""

import struct
from collections.abc import Sequence

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location, named

FORMAT = 1
EXTENTS_FORMAT = 2
CHUNKS_PER_RECORD = 64

_LIST = struct.Struct("<BBBQ")
_SHARE = struct.Struct("<QHQ")
_CHUNK = struct.Struct("<BBIIQ32s")
_SHARED = struct.Struct("<BI32s")
_ZEROS = struct.Struct("<BQ")
_IS_SHARED, _IS_ZEROS = 254, 255

Chunks = Sequence[Location | None]
"""Chunks of a file in order; None is a hole."""


class _Shares:
    """The containers of one record, in the making."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self.shares: list[list[int]] = []

    def pack(self, location: Location) -> bytes:
        server, container, offset, length, raw, codec, digest = location
        place = self._places.setdefault(container, len(self._places))
        if place == len(self.shares):
            self.shares.append([container, server, 0])
        self.shares[place][2] += HEADER_BYTES + length
        return _CHUNK.pack(place, codec, length, raw, offset, digest)


def encode_chunks(chunks: Chunks) -> bytes:
    """The record of up to CHUNKS_PER_RECORD chunks."""
    if not any(chunks):
        return _LIST.pack(FORMAT, len(chunks), 0, 0)  # of which large sparse files have many
    stored, shares, rows = 0, _Shares(), []
    for number, location in enumerate(chunks):
        if location is not None:
            stored |= 1 << number
            rows.append(shares.pack(location))
    head = _LIST.pack(FORMAT, len(chunks), len(shares.shares), stored)
    return b"".join((head, *(_SHARE.pack(*share) for share in shares.shares), *rows))


def encode_extents(start: int, extents: Sequence[Extent]) -> bytes:
    """The record of up to CHUNKS_PER_RECORD extents, of which the first begins at byte
    ``start``.
    """
    shares, rows = _Shares(), []
    for length, place, shared in extents:
        if place is None:
            rows.append(_ZEROS.pack(_IS_ZEROS, length))
        elif shared:
            rows.append(_SHARED.pack(_IS_SHARED, length, place.digest))
        else:
            rows.append(shares.pack(place))
    head = _LIST.pack(EXTENTS_FORMAT, len(extents), len(shares.shares), start)
    return b"".join((head, *(_SHARE.pack(*share) for share in shares.shares), *rows))


def is_last(record: bytes) -> bool:
    """Whether no record of the same list follows this one, of either format."""
    return len(record) > 1 and record[1] < CHUNKS_PER_RECORD


def decode_chunks(record: bytes) -> list[Location | None]:
    """The chunks that are the file's own, by number, of a record of either format. Raises
    Unavailable for a damaged record, as the others do."""
    if record[:1] == bytes((EXTENTS_FORMAT,)):
        return [None if extent.shared else extent.place for extent in decode_extents(record)[1]]
    try:
        version, count, _, stored = _LIST.unpack_from(record)
        shares = decode_shares(record)
        chunks: list[Location | None] = [None] * count
        rows = _CHUNK.iter_unpack(memoryview(record)[_LIST.size + len(shares) * _SHARE.size :])
        for number in range(count):
            if stored >> number & 1:
                place, codec, length, raw, offset, digest = next(rows)
                container, server, _ = shares[place]
                chunks[number] = Location(server, container, offset, length, raw, codec, digest)
        whole = next(rows, None) is None and not stored >> count and version == FORMAT
    except (struct.error, StopIteration, IndexError):
        whole = False
    if not whole:
        raise Unavailable("a record of a chunk list is damaged")
    return chunks


def decode_extents(record: bytes) -> tuple[int, list[Extent]]:
    """Where the first begins, and the extents; of shared chunks only the digest is known (see
    ``named``).
    """
    try:
        version, count, _, start = _LIST.unpack_from(record)
        shares = decode_shares(record)
        at = _LIST.size + len(shares) * _SHARE.size
        extents = []
        for _ in range(count):
            kind = record[at]
            if kind == _IS_ZEROS:
                extents.append(Extent(_ZEROS.unpack_from(record, at)[1]))
                at += _ZEROS.size
            elif kind == _IS_SHARED:
                extents.append(named(*_SHARED.unpack_from(record, at)[1:]))
                at += _SHARED.size
            else:
                place, codec, length, raw, offset, digest = _CHUNK.unpack_from(record, at)
                container, server, _ = shares[place]
                extents.append(
                    Extent(raw, Location(server, container, offset, length, raw, codec, digest))
                )
                at += _CHUNK.size
        whole = at == len(record) and version == EXTENTS_FORMAT and 0 < count <= CHUNKS_PER_RECORD
    except (struct.error, IndexError):
        whole = False
    if not whole:
        raise Unavailable("a record of an extent list is damaged")
    return start, extents


def start_of(record: bytes) -> int:
    """Where the first extent of a record begins."""
    try:
        version, _, _, start = _LIST.unpack_from(record)
    except struct.error:
        version = 0
    if version != EXTENTS_FORMAT:
        raise Unavailable("a record of an extent list is damaged")
    return start


def shared_digests(record: bytes) -> list[bytes]:
    """Those of the shared chunks that a record of either format names, each as often as it does."""
    if not is_extents(record):
        return []
    return [extent.digest for extent in decode_extents(record)[1] if extent.shared]


def is_extents(record: bytes) -> bool:
    """Whether a record is one of an extent list."""
    return record[:1] == bytes((EXTENTS_FORMAT,))


def decode_shares(record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, live bytes) of the containers that a record of either format names: by
    chunks of the file's own."""
    try:
        end = _LIST.size + record[2] * _SHARE.size
        return list(_SHARE.iter_unpack(memoryview(record)[_LIST.size : end]))
    except (struct.error, IndexError):
        raise Unavailable("a record of a chunk list is damaged") from None
