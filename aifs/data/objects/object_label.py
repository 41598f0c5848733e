"""Labels of objects: what each says of the file that it is a part of, for whoever has lost the
metadata.

Objects hold nothing but bytes of files, so a label is an extended attribute, ``user.aifs.object``,
of the object's file. It says what was so when it was written: for drained files when they were
drained, for files that are written in place when they were last synced or just made (then ``size``
may be too small), for columns that were moved when the file was stored. Newer are the object's own
name and length, and the server that it lies on.

Format 1, all numbers little-endian:
    4 bytes magic "AIFL", u8 format=1, u8 replicas, u8 parity columns, u8 number of columns, u8
    column of this object, u8 number of checksum bytes (0 or 32), u16 length of the path hint, u32
    stripe unit, 16 bytes UUID of the store, u64 ino (0: a container), u64 oid (the generation of
    the file's bytes), u64 size, u32 mode, u32 uid, u32 gid, i64 mtime (ns); then of each column u16
    server, the checksum (BLAKE3-256 of the file's checksums, those of each MiB, one after the
    other), the path hint, u32 crc32 of all before
The path hint is as in containers (chunk_codec), but longer.

Burst copies get a shorter one, from their first fsync on, which fits into the inodes of most
filesystems: so it takes no block that stat(2) would show.
    u8 0xB1, u32 mode, u32 uid, u32 gid, u64 ino, the end of the path hint (35 bytes at most), u32
    crc32 of the UUID of the store, u64 id of the copy, and all before
"""

import struct
import uuid
import zlib
from typing import NamedTuple

from blake3 import blake3

from aifs.core import files
from aifs.core.log import logger
from aifs.data.containers.chunk_codec import FileRecord
from aifs.data.server import DataServer, Key
from aifs.layout.striped import Striped

NAME = "user.aifs.object"
HINT_MAX = 1024

_MAGIC = b"AIFL"
_FORMAT = 1
_HEAD = struct.Struct("<4sBBBBBBHI16sQQQIIIq")
_CRC = struct.Struct("<I")
_COPY_MARK = 0xB1
_COPY = struct.Struct("<BIIIQ")
_COPY_ID = struct.Struct("<Q")
_COPY_MAX = 60

_log = logger(__name__)


class Label(NamedTuple):
    """``layout``: None for a burst copy. ``digest``: b"" if the file has no checksums. The rest as
    in FileRecord.
    """

    ino: int
    oid: int
    layout: Striped | None
    size: int = 0
    mode: int = 0
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    digest: bytes = b""
    path: bytes = b""


def label_of(
    record: FileRecord, oid: int, layout: Striped | None, size: int, digests: bytes = b""
) -> Label:
    """Of a file of which ``record`` says the rest; ``digests``: the checksums of all its MiBs, if
    it has any.
    """
    digest = digest_of(digests) if digests else b""
    return Label(
        record.ino,
        oid,
        layout,
        size,
        record.mode,
        record.uid,
        record.gid,
        record.mtime_ns,
        digest,
        record.path,
    )


def digest_of(digests: bytes) -> bytes:
    """The checksum of a file's checksums."""
    return blake3(digests).digest()


def encode(label: Label, store: str, column: int) -> bytes:
    """``store``: its uuid."""
    layout = label.layout
    assert layout is not None
    head = _HEAD.pack(
        _MAGIC,
        _FORMAT,
        layout.replicas,
        layout.parity,
        len(layout.servers),
        column,
        len(label.digest),
        len(label.path),
        layout.unit,
        bytes.fromhex(store.replace("-", "")),
        label.ino,
        label.oid,
        label.size,
        label.mode,
        label.uid,
        label.gid,
        label.mtime_ns,
    )
    servers = struct.pack(f"<{len(layout.servers)}H", *layout.servers)
    packed = b"".join((head, servers, label.digest, label.path))
    return packed + _CRC.pack(zlib.crc32(packed))


def decode(value: bytes) -> tuple[Label, str, int]:
    """The label, the store's uuid, and the column. Raises ValueError for what is damaged, or of
    another format.
    """
    body, crc = value[: -_CRC.size], value[-_CRC.size :]
    if len(value) < _HEAD.size + _CRC.size or _CRC.pack(zlib.crc32(body)) != crc:
        raise ValueError("its label is damaged")
    (
        magic,
        version,
        replicas,
        parity,
        count,
        column,
        digest_bytes,
        path_bytes,
        unit,
        store,
        ino,
        oid,
        size,
        mode,
        uid,
        gid,
        mtime_ns,
    ) = _HEAD.unpack_from(body)
    end = _HEAD.size + 2 * count
    if magic != _MAGIC or version != _FORMAT or len(body) != end + digest_bytes + path_bytes:
        raise ValueError("its label is of another format")
    if (
        not unit
        or not replicas
        or count % replicas
        or column >= count
        or count // replicas <= parity
    ):
        raise ValueError("its label makes no sense")
    layout = Striped(unit, struct.unpack_from(f"<{count}H", body, _HEAD.size), replicas, parity)
    digest, path = body[end : end + digest_bytes], body[end + digest_bytes :]
    label = Label(ino, oid, layout, size, mode, uid, gid, mtime_ns, digest, path)
    return label, str(uuid.UUID(bytes=store)), column


def encode_copy(label: Label, store: str) -> bytes:
    """Of a burst copy."""
    packed = _COPY.pack(_COPY_MARK, label.mode, label.uid, label.gid, label.ino)
    room = _COPY_MAX - len(packed) - _CRC.size
    packed += label.path[-room:]
    return packed + _CRC.pack(_crc_of_copy(packed, store, label.oid))


def decode_copy(value: bytes, store: str, copy_id: int) -> Label:
    """Raises ValueError for what is not the label of this copy."""
    body, crc = value[: -_CRC.size], value[-_CRC.size :]
    if len(value) < _COPY.size + _CRC.size or _CRC.pack(_crc_of_copy(body, store, copy_id)) != crc:
        raise ValueError("its label is damaged")
    mark, mode, uid, gid, ino = _COPY.unpack_from(body)
    if mark != _COPY_MARK:
        raise ValueError("its label is of another format")
    return Label(ino, copy_id, None, mode=mode, uid=uid, gid=gid, path=body[_COPY.size :])


def _crc_of_copy(packed: bytes, store: str, copy_id: int) -> int:
    return zlib.crc32(
        _COPY_ID.pack(copy_id) + packed, zlib.crc32(bytes.fromhex(store.replace("-", "")))
    )


def put(server: DataServer, key: Key, fd: int, label: Label | None, column: int = 0) -> None:
    """Label an object, if there is something to say. Where that cannot be it is said once, and
    nothing else fails. Blocks.
    """
    if label is None or not server.labels:
        return
    try:
        value = (
            encode_copy(label, server.store)
            if label.layout is None
            else encode(label, server.store, column)
        )
        with server.workers.patience.asking("label", key):
            files.set_label(fd, NAME, value)
    except OSError as error:
        server.labels = False
        path = server.object_path(*key)
        _log.info(
            "%s: objects are not labelled, so they cannot be told without the metadata: %s",
            path,
            error.strerror,
        )


def find(server: DataServer, fd: int) -> Label | None:
    """The label of an object; None if it has none that can be read. Blocks."""
    try:
        with server.workers.patience.asking("label", server.path):
            value = files.get_label(fd, NAME)
        return None if value is None else decode(value)[0]
    except (OSError, ValueError):
        return None
