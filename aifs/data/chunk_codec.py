"""Containers, format 1: they hold chunks; for each a header of 64 bytes, then the stored bytes,
without gaps.

header (all numbers little-endian)
    4 bytes magic "AIFC", u8 format=1, u8 codec (0 as they are, 1 zstd), u16 zero, u64 oid (the
    generation of the file's bytes), u32 number of the chunk in the file, u32 stored length, u32 raw
    length, 32 bytes BLAKE3-256 of the raw bytes, u32 crc32 of all before

A shared chunk has oid and number 0: it belongs to all files that name its digest. What counts is
the first part of a container, as long as the metadata says; what a crash has left behind it is cut
before the next append. In a coded container zeros fill the last row of each append.
"""

import struct
import threading
import zlib
from typing import NamedTuple

import zstandard
from blake3 import blake3

from aifs.layout.interleaved import HEADER_BYTES

PLAIN, ZSTD = range(2)

_MAGIC = b"AIFC"
_FORMAT = 1
_HEADER = struct.Struct("<4sBBHQIII32s")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES

_local = threading.local()


class ChunkHeader(NamedTuple):
    """The header of a chunk in its container, except magic, format and check value."""

    oid: int
    """Whose chunk it is; 0: a shared one."""
    number: int
    """Of the chunk in that file; of a shared one 0."""
    codec: int
    """PLAIN or ZSTD."""
    stored: int
    """Bytes that follow the header."""
    raw: int
    """Bytes of the file."""
    digest: bytes
    """BLAKE3 of the file's bytes."""


def pack_header(header: ChunkHeader) -> bytes:
    oid, number, codec, stored, raw, digest = header
    packed = _HEADER.pack(_MAGIC, _FORMAT, codec, 0, oid, number, stored, raw, digest)
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_header(packed: bytes | memoryview) -> ChunkHeader:
    """Raises ValueError for what is not a header, or a damaged one."""
    view = memoryview(packed)
    if (
        len(view) < HEADER_BYTES
        or zlib.crc32(view[: _HEADER.size]) != _CRC.unpack_from(view, _HEADER.size)[0]
    ):
        raise ValueError("not the header of a chunk")
    magic, version, codec, _, oid, number, stored, raw, digest = _HEADER.unpack_from(view)
    if magic != _MAGIC or version != _FORMAT or codec not in (PLAIN, ZSTD):
        raise ValueError("not the header of a chunk of a known format")
    return ChunkHeader(oid, number, codec, stored, raw, digest)


def is_padding(data: bytes | memoryview) -> bool:
    """Whether what lies where a header may be is zeros that fill a row."""
    return bytes(data[:1]) == b"\0"


def encode(
    memory: memoryview, raw: int, level: int, oid: int, number: int, digest: bytes = b""
) -> ChunkHeader:
    """Make ``memory`` a stored chunk, header first, from ``raw`` bytes behind the header's place.

    ``level``: of zstd, 0 for none; incompressible bytes stay as they are. ``digest``: if known.
    """
    data = memory[HEADER_BYTES : HEADER_BYTES + raw]
    digest = digest or digest_of(data)
    codec, stored = PLAIN, raw
    if level:
        packed = _compressor(level).compress(data)
        if len(packed) < raw:
            codec, stored = ZSTD, len(packed)
            data[:stored] = packed
    header = ChunkHeader(oid, number, codec, stored, raw, digest)
    memory[:HEADER_BYTES] = pack_header(header)
    return header


def decode(stored: memoryview, codec: int, raw: int) -> memoryview:
    """The raw bytes of a chunk. Raises ValueError unless there are ``raw`` of them."""
    data = stored
    if codec == ZSTD:
        try:
            data = memoryview(_decompressor().decompress(stored, max_output_size=raw))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
    elif codec != PLAIN:
        raise ValueError(f"unknown codec {codec}")
    if len(data) != raw:
        raise ValueError(f"{len(data)} bytes instead of {raw}")
    return data


def digest_of(data: bytes | memoryview) -> bytes:
    """BLAKE3-256. Lets other threads run meanwhile."""
    return blake3(data).digest()


# Contexts of zstd are large and not to be shared by threads.


def _compressor(level: int) -> zstandard.ZstdCompressor:
    if getattr(_local, "level", 0) != level:
        _local.level, _local.compressor = level, zstandard.ZstdCompressor(level=level)
    return _local.compressor


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_local, "decompressor"):
        _local.decompressor = zstandard.ZstdDecompressor()
    return _local.decompressor
