"""Records of chunk lists (``l``), little-endian. Pure.

A chunk list says where the bytes of an interleaved file are: extent after extent, without gaps. A
file that is cut into chunks of one size has an extent for each, also where it has a hole. Each
record but the last one has CHUNKS_PER_RECORD extents.

record of the extents from number ``first`` on
    u8 format=1, u8 number of extents (1 to CHUNKS_PER_RECORD), u8 number of containers, u64 byte of
    the file where the first extent begins; then for each container that has chunks of the file's
    own: u64 id, u16 server, u64 bytes of these chunks in it, headers included; then for each extent
    one of
    a chunk of the file's own: u8 container (its place above), u8 codec, u32 stored length, u32 raw
    length, u64 offset, 32 bytes digest
    a shared chunk (meta/shared.py): u8 254, u32 length, 32 bytes digest
    zeros: u8 255, u64 length
"""

import struct
from collections.abc import Sequence

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location, named

FORMAT = 1
CHUNKS_PER_RECORD = 64

_LIST = struct.Struct("<BBBQ")
_SHARE = struct.Struct("<QHQ")
_CHUNK = struct.Struct("<BBIIQ32s")
_SHARED = struct.Struct("<BI32s")
_ZEROS = struct.Struct("<BQ")
_IS_SHARED, _IS_ZEROS = 254, 255

_new = tuple.__new__


def encode_list(start: int, extents: Sequence[Extent]) -> bytes:
    """The record of up to CHUNKS_PER_RECORD extents. The first begins at byte ``start``."""
    shares: dict[int, list[int]] = {}
    rows = []
    for length, place, shared in extents:
        if place is None:
            rows.append(_ZEROS.pack(_IS_ZEROS, length))
        elif shared:
            rows.append(_SHARED.pack(_IS_SHARED, length, place.digest))
        else:
            server, container, offset, stored, raw, codec, digest = place
            share = shares.setdefault(container, [len(shares), server, 0])
            share[2] += HEADER_BYTES + stored
            rows.append(_CHUNK.pack(share[0], codec, stored, raw, offset, digest))
    named_here = (_SHARE.pack(number, *share[1:]) for number, share in shares.items())
    return b"".join((_LIST.pack(FORMAT, len(extents), len(shares), start), *named_here, *rows))


def decode_list(record: bytes | None) -> tuple[int, list[Extent]]:
    """Where the first extent begins, and the extents. Of shared chunks only the digest is known
    (see ``named``). Raises Unavailable for a damaged record, or none, as the others do.
    """
    try:
        version, count, _, start = _LIST.unpack_from(record or b"")
        if version != FORMAT or not 0 < count <= CHUNKS_PER_RECORD:
            raise _damaged()
        assert record is not None
        shares, at = decode_shares(record), _rows_at(record)
        if _is_own(record):
            rows = _CHUNK.iter_unpack(memoryview(record)[at:])
            return start, [_own(shares, *row) for row in rows]
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
                extents.append(_own(shares, *_CHUNK.unpack_from(record, at)))
                at += _CHUNK.size
    except (struct.error, IndexError):
        raise _damaged() from None
    if at != len(record):
        raise _damaged()
    return start, extents


def _own(
    shares: Sequence[tuple[int, int, int]],
    share: int,
    codec: int,
    stored: int,
    raw: int,
    offset: int,
    digest: bytes,
) -> Extent:
    container, server, _ = shares[share]
    # As the constructors do, in half the time: each read of a long file decodes many of them.
    place = _new(Location, (server, container, offset, stored, raw, codec, digest))
    return _new(Extent, (raw, place, False))


def _damaged() -> Unavailable:
    return Unavailable("a record of a chunk list is damaged")


def _rows_at(record: bytes) -> int:
    return _LIST.size + record[2] * _SHARE.size


def _is_own(record: bytes) -> bool:
    """Whether all extents are chunks of the file's own, whose rows are the longest."""
    return len(record) == _rows_at(record) + record[1] * _CHUNK.size


def start_of(record: bytes) -> int:
    """Where the first extent of a record begins."""
    try:
        version, _, _, start = _LIST.unpack_from(record)
    except struct.error:
        version = 0
    if version != FORMAT:
        raise _damaged()
    return start


def is_last(record: bytes) -> bool:
    """Whether no record of the same list follows this one."""
    return len(record) > 1 and record[1] < CHUNKS_PER_RECORD


def decode_shares(record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, live bytes) of the containers that have chunks of the file's own."""
    try:
        return list(_SHARE.iter_unpack(memoryview(record)[_LIST.size : _rows_at(record)]))
    except (struct.error, IndexError):
        raise _damaged() from None


def shared_digests(record: bytes) -> list[bytes]:
    """The digests of the shared chunks that a record names, each as often as it does."""
    if len(record) >= _LIST.size and _is_own(record):
        return []  # as of most files: nothing is decoded
    return [extent.digest for extent in decode_list(record)[1] if extent.shared]
