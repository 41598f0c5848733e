"""The redo journal: transactions on disk before they are visible. Touches its two files, by
``core.files``.

On-disk format, version 1. This comment is its only definition; all numbers are little-endian.

    segment file (journal.0, journal.1):

        offset  bytes
        0       8      magic "AIFSjrnl"
        8       4      format version, 1
        12      4      salt, random, fixed when the file is made
        16      4      CRC-32 (the one of zlib) of the 16 bytes before
        4096    ...    records, one behind the other

    record:

        0       4      length of the payload
        4       4      CRC-32 of length, seq and payload, started with the salt
        8       8      seq: one more than that of the record before
        16      ...    payload: changes, one behind the other

    change:

        0       2      length of the key
        2       4      length of the value, or 0xFFFFFFFF: the key is deleted
        6       ...    key, then value

The segments are filled in turn and never erased, so older records stand behind the last one of a
segment. They are not taken for new ones because a record counts only if its seq follows that of the
record before; the engine leaves a gap in the numbers at every recovery, so that this also holds for
what a power cut left behind a torn record. The salt keeps users from forging records inside the
values that they store.
"""

import os
import struct
from collections.abc import Iterator
from itertools import chain
from operator import itemgetter
from zlib import crc32

from aifs.core import faults, files
from aifs.core.errors import StoreError
from aifs.meta.memtable import Writes

SEGMENT_BYTES = 8 << 20
"""Disk space that each segment holds in advance; it may grow beyond."""
_FIRST_LOOK = 128 << 10

FIRST_RECORD = 4096  # the header has a block of its own: appends never rewrite it

_MAGIC = b"AIFSjrnl"
_VERSION = 1
_HEADER = struct.Struct("<8sII")
_CRC = struct.Struct("<I")
_RECORD = struct.Struct("<IIQ")
_SUMMED = struct.Struct("<IQ")
_CHANGE = struct.Struct("<HI")
_DELETED = 0xFFFFFFFF

BEFORE_APPEND = faults.declare(
    "meta.journal.before_append", "a transaction has run; nothing is recorded"
)
AFTER_APPEND = faults.declare(
    "meta.journal.after_append", "its record is written, not synced, not visible"
)


def encode(seq: int, writes: Writes, salt: int) -> bytes:
    """One record."""
    payload = encode_changes(writes)
    length = len(payload)
    return (
        _RECORD.pack(length, crc32(payload, crc32(_SUMMED.pack(length, seq), salt)), seq) + payload
    )


def encode_changes(writes: Writes) -> bytes:
    """The payload of a record."""
    parts = [b""]
    for key, value in writes.items():
        if value is None:
            parts += (_CHANGE.pack(len(key), _DELETED), key)
        else:
            parts += (_CHANGE.pack(len(key), len(value)), key, value)
    return b"".join(parts)


def decode(data: bytes, salt: int) -> Iterator[tuple[int, bytes]]:
    """(seq, payload) of each record of a segment's content, up to the first that does not belong
    there."""
    offset, last = FIRST_RECORD, None
    while offset + _RECORD.size <= len(data):
        length, crc, seq = _RECORD.unpack_from(data, offset)
        payload = data[offset + _RECORD.size : offset + _RECORD.size + length]
        if len(payload) < length or crc != crc32(payload, crc32(_SUMMED.pack(length, seq), salt)):
            return
        if last is not None and seq != last + 1:
            return
        yield seq, payload
        last = seq
        offset += _RECORD.size + length


def changes(payload: bytes) -> Writes:
    """The changes that ``encode_changes`` was given."""
    writes: Writes = {}
    offset = 0
    while offset < len(payload):
        key_length, value_length = _CHANGE.unpack_from(payload, offset)
        offset += _CHANGE.size
        key = payload[offset : offset + key_length]
        offset += key_length
        if value_length == _DELETED:
            writes[key] = None
        else:
            writes[key] = payload[offset : offset + value_length]
            offset += value_length
    return writes


class _Segment:
    """One open segment file."""

    def __init__(self, path: str, fd: int, salt: int) -> None:
        self.path = path
        self.fd = fd
        self.salt = salt

    @classmethod
    def create(cls, path: str) -> "_Segment":
        """Make the file, or make it anew; durable on return, but for its name."""
        fd = files.open_file(path, create=True)
        salt = int.from_bytes(os.urandom(4), "little")
        header = _HEADER.pack(_MAGIC, _VERSION, salt)
        try:
            files.truncate(fd, 0)
            files.allocate(fd, SEGMENT_BYTES)
            files.write_at(fd, header + _CRC.pack(crc32(header)), 0)
            files.sync_file(fd)
        except BaseException:
            files.close_file(fd)
            raise
        return cls(path, fd, salt)

    @classmethod
    def open(cls, path: str) -> "_Segment":
        """Raises StoreError if this is not a segment that this version can read."""
        try:
            fd = files.open_file(path)
        except FileNotFoundError:
            raise StoreError(
                f"{path}: the metadata journal is missing; restore the directory"
            ) from None
        try:
            head = files.read_at(fd, _HEADER.size + _CRC.size, 0)
            if len(head) < _HEADER.size + _CRC.size or _CRC.pack(crc32(head[:-4])) != head[-4:]:
                raise StoreError(f"{path}: not a metadata journal, or its header is damaged")
            magic, version, salt = _HEADER.unpack(head[:-4])
            if magic != _MAGIC or version != _VERSION:
                raise StoreError(
                    f"{path}: journal format {version}; this AIFS reads format {_VERSION}"
                )
        except BaseException:
            files.close_file(fd)
            raise
        return cls(path, fd, salt)

    def records(self) -> Iterator[tuple[int, bytes]]:
        """Reads the rest of a segment only if records may go on there; most hold little."""
        head = files.read_at(self.fd, _FIRST_LOOK, 0)
        found = list(decode(head, self.salt))
        end = FIRST_RECORD + sum(_RECORD.size + len(payload) for _, payload in found)
        if end + _RECORD.size <= len(head):
            length, _, _ = _RECORD.unpack_from(head, end)
            if end + _RECORD.size + length <= len(head):  # it is whole, and no record
                return iter(found)
        return decode(files.read_at(self.fd, os.fstat(self.fd).st_size, 0), self.salt)

    def cut(self) -> None:
        """Give back the file's growth beyond its reserve. Its records are no longer needed."""
        if os.fstat(self.fd).st_size > SEGMENT_BYTES:
            files.truncate(self.fd, SEGMENT_BYTES)


class Journal:
    """Both segments. All methods block, ``append`` only for a write to the page cache."""

    def __init__(self, segments: list[_Segment]) -> None:
        self._active, self._other = segments
        self._active_since = 0  # records with a larger seq are in the active segment
        self.used_bytes = 0
        """Bytes of records in the active segment."""
        self.last_bytes = 0
        """Bytes of the last record."""

    @classmethod
    def create(cls, directory: str) -> "Journal":
        """Make an empty journal in place of any; durable, with its names, on return."""
        segments = []
        try:
            for path in _paths(directory):
                segments.append(_Segment.create(path))
            files.sync_dir(directory)
        except BaseException:
            _close(segments)
            raise
        return cls(segments)

    @classmethod
    def open(cls, directory: str) -> "Journal":
        """Raises StoreError if a segment is missing or not one."""
        segments = []
        try:
            for path in _paths(directory):
                segments.append(_Segment.open(path))
        except BaseException:
            _close(segments)
            raise
        return cls(segments)

    @staticmethod
    def holds_records(directory: str) -> bool:
        """Whether a readable segment with at least one record is there."""
        for path in _paths(directory):
            try:
                segment = _Segment.open(path)
            except StoreError:
                continue
            try:
                if next(segment.records(), None) is not None:
                    return True
            finally:
                files.close_file(segment.fd)
        return False

    def replay(self, applied: int) -> Iterator[tuple[int, Writes]]:
        """(seq, changes) of transactions after ``applied``, in order, up to the first missing; all
        are on stable storage. To be read to its end before the first ``append``."""
        runs = []
        for segment in (self._active, self._other):
            files.sync_file(segment.fd)
            records = segment.records()
            first = next(records, None)
            if first is not None:
                runs.append((first[0], chain((first,), records)))
        for seq, payload in chain.from_iterable(run for _, run in sorted(runs, key=itemgetter(0))):
            if seq > applied + 1:
                return
            if seq == applied + 1:
                yield seq, changes(payload)
                applied = seq

    def append(self, seq: int, writes: Writes) -> None:
        """Record transaction ``seq``, which follows the last, with one write. It survives kill -9
        on return, a power cut after a sync. Raises OSError: nothing is recorded, the next append
        takes the place."""
        faults.reach(BEFORE_APPEND)
        segment = self._active
        record = encode(seq, writes, segment.salt)
        files.write_at(segment.fd, record, FIRST_RECORD + self.used_bytes)
        self.last_bytes = len(record)
        self.used_bytes += self.last_bytes
        faults.reach(AFTER_APPEND)

    def switch(self, seq: int) -> None:
        """Append to the other segment, no longer needed; ``seq`` is of the last record in this
        one."""
        self._active, self._other = self._other, self._active
        self._active_since = seq
        self.used_bytes = 0

    def unsynced(self, durable: int) -> list[int]:
        """Descriptors to sync for all records, if those up to ``durable`` are durable."""
        segments = [self._active] if durable >= self._active_since else [self._other, self._active]
        return [segment.fd for segment in segments]

    def cut(self) -> None:
        """The records of the inactive segment are no longer needed."""
        self._other.cut()

    def close(self) -> None:
        """Syncs nothing."""
        _close([self._active, self._other])


def _paths(directory: str) -> list[str]:
    return [os.path.join(directory, f"journal.{number}") for number in (0, 1)]


def _close(segments: list[_Segment]) -> None:
    for segment in segments:
        files.close_file(segment.fd)
