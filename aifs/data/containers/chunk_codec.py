"""What lies in containers, format 1: chunks and records of files; for each a header of 76 bytes,
then the stored bytes, without gaps.

header (all numbers little-endian)
    4 bytes magic "AIFC", u8 format=1, u8 codec (0 as they are, 1 zstd, 2 records of files, 3
    recipe), u16 zero, u64 ino, u64 oid (the generation of the file's bytes), u32 index of the chunk
    in the file, u32 chunk size of the file, u32 stored length, u32 raw length, 32 bytes BLAKE3-256
    of the raw bytes, u32 crc32 of all before
records of files (ino, index and chunk size are 0, oid is the id of the container)
    u8 format=1, u8 replicas, u8 parity columns, u8 number of columns, u32 stripe unit, then of each
    column u16 server: the layout of the container when this was written; then for each file: u64
    ino, u64 oid, u64 size, u32 mode, u32 uid, u32 gid, i64 mtime (ns), u32 chunk size, u32 number
    of chunks that are stored (holes have none), u16 length of the path hint, the path hint

recipe (of a file that is an extent list; index is that of the extent which names it, behind all
others; raw length is 0; the digest is that of the stored bytes)
    u8 format=1, u64 number of the first extent that it tells, u64 number of extents of the file
    without recipes, then for each extent: u64 length, plus 2**63 where it is zeros; if it is not,
    32 bytes digest
A shared chunk has ino, oid, index and chunk size 0: it is of whoever names its digest.

A stripe begins with the records of the files that its chunks are of, if it has such; the first one
of a container with at least the layout. So a container can be read without the metadata: the
chunk's place in its file is index * chunk size. The path hint is the file's path when it was
stored, as far as it could be told cheaply: the end of it, "?" for a name that was not known,
nothing for a file with several names. What counts is the first part of a container, as long as the
metadata says; what a crash has left behind it is cut before the next append. In a coded container
zeros fill the last row of each append.
"""

import struct
import threading
import zlib
from collections.abc import Iterable
from typing import NamedTuple

import zstandard
from blake3 import blake3

from aifs.layout.interleaved import HEADER_BYTES, RECORD_MAX
from aifs.layout.striped import Striped

PLAIN, ZSTD, RECORDS, RECIPE = range(4)

RECIPE_EXTENTS = 1 << 16
"""How many extents one recipe tells, at most; a file with more has several."""

_MAGIC = b"AIFC"
_FORMAT = 1
_HEADER = struct.Struct("<4sBBHQQIIII32s")
_CRC = struct.Struct("<I")
assert _HEADER.size + _CRC.size == HEADER_BYTES

_LAYOUT = struct.Struct("<BBBBI")
_FILE = struct.Struct("<QQQIIIqIIH")
HINT_MAX = 255
assert _FILE.size + HINT_MAX <= RECORD_MAX

DIGEST_BYTES = 32
_RECIPE = struct.Struct("<BQQ")
_EXTENT = struct.Struct("<Q")
_IS_ZEROS = 1 << 63

_local = threading.local()


class Header(NamedTuple):
    ino: int
    oid: int
    index: int
    chunk: int
    codec: int
    stored: int
    raw: int
    digest: bytes


class FileRecord(NamedTuple):
    """What is said of a file beside its chunks. ``count``: of the chunks that are stored. ``path``:
    a hint, may be empty.
    """

    ino: int
    oid: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    chunk: int
    count: int
    path: bytes

    @property
    def space(self) -> int:
        """Bytes of a container that it takes."""
        return _FILE.size + len(self.path)


def pack_header(header: Header) -> bytes:
    ino, oid, index, chunk, codec, stored, raw, digest = header
    packed = _HEADER.pack(_MAGIC, _FORMAT, codec, 0, ino, oid, index, chunk, stored, raw, digest)
    return packed + _CRC.pack(zlib.crc32(packed))


def unpack_header(packed: bytes | memoryview) -> Header:
    """Raises ValueError for what is not a header, or a damaged one."""
    view = memoryview(packed)
    if (
        len(view) < HEADER_BYTES
        or zlib.crc32(view[: _HEADER.size]) != _CRC.unpack_from(view, _HEADER.size)[0]
    ):
        raise ValueError("not the header of a chunk")
    magic, version, codec, _, ino, oid, index, chunk, stored, raw, digest = _HEADER.unpack_from(
        view
    )
    if magic != _MAGIC or version != _FORMAT or codec not in (PLAIN, ZSTD, RECORDS, RECIPE):
        raise ValueError("not the header of a chunk of a known format")
    return Header(ino, oid, index, chunk, codec, stored, raw, digest)


def is_padding(data: bytes | memoryview) -> bool:
    """Whether what lies where a header may be is zeros that fill a row."""
    return bytes(data[:1]) == b"\0"


def encode(
    memory: memoryview,
    raw: int,
    level: int,
    ino: int,
    oid: int,
    index: int,
    chunk: int,
    digest: bytes = b"",
) -> Header:
    """Make ``memory`` the stored form of a chunk whose ``raw`` bytes lie in it behind the place of
    the header.

    ``level``: of zstd, 0 for none; bytes that it does not make fewer stay as they are. ``digest``:
    of the bytes, if it is known. The header comes first, then as many bytes as it says.
    """
    data = memory[HEADER_BYTES : HEADER_BYTES + raw]
    digest = digest or digest_of(data)
    codec, stored = PLAIN, raw
    if level:
        packed = _compressor(level).compress(data)
        if len(packed) < raw:
            codec, stored = ZSTD, len(packed)
            data[:stored] = packed
    header = Header(ino, oid, index, chunk, codec, stored, raw, digest)
    memory[:HEADER_BYTES] = pack_header(header)
    return header


def decode(stored: memoryview, codec: int, raw: int) -> memoryview:
    """The raw bytes of a chunk, or the bytes of a recipe. Raises ValueError if they cannot be had,
    or are not ``raw`` in number."""
    if codec == RECIPE and not raw:
        return stored
    data = stored
    if codec == ZSTD:
        try:
            data = memoryview(_decompressor().decompress(stored, max_output_size=raw))
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None
    elif codec not in (PLAIN, RECORDS):
        raise ValueError(f"unknown codec {codec}")
    if len(data) != raw:
        raise ValueError(f"{len(data)} bytes instead of {raw}")
    return data


def pack_records(container: int, layout: Striped, records: Iterable[FileRecord]) -> bytes:
    """Records of files as they lie in a container, with their header."""
    parts = [
        _LAYOUT.pack(_FORMAT, layout.replicas, layout.parity, len(layout.servers), layout.unit)
    ]
    parts.append(struct.pack(f"<{len(layout.servers)}H", *layout.servers))
    for record in records:
        parts += _FILE.pack(*record[:-1], len(record.path)), record.path
    body = b"".join(parts)
    return (
        pack_header(Header(0, container, 0, 0, RECORDS, len(body), len(body), digest_of(body)))
        + body
    )


def records_space(layout: Striped, records: Iterable[FileRecord]) -> int:
    """How long that is."""
    return (
        HEADER_BYTES
        + _LAYOUT.size
        + 2 * len(layout.servers)
        + sum(record.space for record in records)
    )


def unpack_records(body: bytes | memoryview) -> tuple[Striped, list[FileRecord]]:
    """The layout that a container had, and the files, of what follows the header. Raises ValueError
    if it is damaged.
    """
    try:
        version, replicas, parity, columns, unit = _LAYOUT.unpack_from(body)
        if version != _FORMAT:
            raise ValueError(f"records of files of format {version}")
        layout = Striped(
            unit, struct.unpack_from(f"<{columns}H", body, _LAYOUT.size), replicas, parity
        )
        offset, records = _LAYOUT.size + 2 * columns, []
        while offset < len(body):
            *fields, length = _FILE.unpack_from(body, offset)
            offset += _FILE.size + length
            records.append(FileRecord(*fields, bytes(body[offset - length : offset])))
    except struct.error:
        offset = -1
    if offset != len(body):
        raise ValueError("records of files that are damaged")
    return layout, records


class Recipe(NamedTuple):
    """What extents ``first``, ``first`` + 1, ... of a file's ``count`` extents are: lengths, and
    digests (b"": zeros).
    """

    first: int
    count: int
    extents: list[tuple[int, bytes]]


def pack_recipe(first: int, count: int, extents: Iterable[tuple[int, bytes]]) -> bytes:
    """The stored bytes of a recipe, without header."""
    parts = [_RECIPE.pack(_FORMAT, first, count)]
    for length, digest in extents:
        parts += (_EXTENT.pack(length), digest) if digest else (_EXTENT.pack(length | _IS_ZEROS),)
    return b"".join(parts)


def unpack_recipe(body: bytes | memoryview) -> Recipe:
    """Raises ValueError if it is damaged."""
    try:
        version, first, count = _RECIPE.unpack_from(body)
        offset, extents = _RECIPE.size, []
        while offset < len(body):
            (length,) = _EXTENT.unpack_from(body, offset)
            offset += _EXTENT.size
            digest = b""
            if not length & _IS_ZEROS:
                digest, offset = bytes(body[offset : offset + DIGEST_BYTES]), offset + DIGEST_BYTES
            extents.append((length & ~_IS_ZEROS, digest))
    except struct.error:
        offset = -1
    if offset != len(body) or version != _FORMAT or len(extents) > RECIPE_EXTENTS:
        raise ValueError("a recipe that is damaged")
    return Recipe(first, count, extents)


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
