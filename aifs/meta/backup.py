"""Backups of the metadata store: what is in their files, how the files are called, which of them
make a state. Pure.

A *base* is the whole store, an *increment* what has changed between two transactions. Both are
*segments*, files of one format (version 1; all numbers little-endian):

    offset  bytes
    0       8      magic "AIFSbkup"
    8       4      format version, 1
    12      1      kind: 1 base, 2 increment
    13      1      1: the last part of its base; 0: one before; increments have 1
    14      2      zero
    16      16     uuid of the store
    32      8      after: an increment holds what transactions above this number have changed; of a
                   base, the number of the last one before it was begun
    40      8      seq: ... and up to this one. With the last part, a base is the state after this
                   one
    48      4      part: of a base, from 0 on
    52      8      when it was made (ns since the epoch)
    60      8      length of the changes before compression
    68      32     BLAKE3-256 of all before and of all behind
    100     ...    changes as in the journal (meta/journal.py), compressed by zstd

    name of a segment:  base-AFTER-PART, and of the last part base-AFTER-PART-SEQ;
    increment-AFTER-SEQ
                        (numbers hexadecimal: PART eight digits, the others sixteen)

A base is taken from a store in use: its parts hold slices of the map, read one after the other, and
what has changed meanwhile. So its parts, applied in order, make the state at SEQ. An increment may
be applied to any state from AFTER on to just below SEQ, because changes are whole values and
deletions.
"""

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

import zstandard
from blake3 import blake3

from aifs.core.errors import Unavailable
from aifs.meta import journal
from aifs.meta.memtable import Writes

BASE, INCREMENT = 1, 2

_MAGIC = b"AIFSbkup"
_VERSION = 1
_HEAD = struct.Struct("<8sIBBH16sQQIqQ")
_DIGEST_BYTES = 32
_LEVEL = 3
_NAME = re.compile(
    r"(?:base-(?P<begin>[0-9a-f]{16})-(?P<part>[0-9a-f]{8})(?:-(?P<end>[0-9a-f]{16}))?"
    r"|increment-(?P<after>[0-9a-f]{16})-(?P<seq>[0-9a-f]{16}))"
)


class Name(NamedTuple):
    """The parts of a segment's name. ``seq`` is None of a base's parts but the last."""

    kind: int
    after: int
    part: int
    seq: int | None

    @property
    def end(self) -> int:
        """``seq`` of an increment, or of the last part of a base."""
        assert self.seq is not None
        return self.seq

    def __str__(self) -> str:
        if self.kind == INCREMENT:
            return f"increment-{self.after:016x}-{self.seq:016x}"
        end = "" if self.seq is None else f"-{self.seq:016x}"
        return f"base-{self.after:016x}-{self.part:08x}{end}"


def parse_name(text: str) -> Name | None:
    """None if no segment is called so."""
    match = _NAME.fullmatch(text)
    if match is None:
        return None
    if match["begin"] is None:
        return Name(INCREMENT, int(match["after"], 16), 0, int(match["seq"], 16))
    end = None if match["end"] is None else int(match["end"], 16)
    return Name(BASE, int(match["begin"], 16), int(match["part"], 16), end)


@dataclass(frozen=True, slots=True)
class Segment:
    """``store``: uuid; ``changes``: in the journal's format."""

    name: Name
    store: str
    created_ns: int
    changes: bytes

    def encode(self) -> bytes:
        """Takes some 10 ms per MiB."""
        name = self.name
        head = _HEAD.pack(
            _MAGIC,
            _VERSION,
            name.kind,
            name.seq is not None,
            0,
            UUID(self.store).bytes,
            name.after,
            name.seq or 0,
            name.part,
            self.created_ns,
            len(self.changes),
        )
        body = zstandard.ZstdCompressor(_LEVEL).compress(self.changes)
        return b"".join((head, blake3(head + body).digest(), body))

    def writes(self) -> Writes:
        return journal.changes(self.changes)


def decode_segment(name: Name, store: str, data: bytes) -> Segment:
    """Raises Unavailable, with the reason, unless ``data`` is that segment of that store."""
    start = _HEAD.size + _DIGEST_BYTES
    head, digest, body = data[: _HEAD.size], data[_HEAD.size : start], data[start:]
    if len(digest) < _DIGEST_BYTES or not head.startswith(_MAGIC):
        raise Unavailable(f"{name}: not a backup of metadata")
    (_, version, kind, is_last, _, owner, after, seq, part, created_ns, length) = _HEAD.unpack(head)
    if version != _VERSION:
        raise Unavailable(f"{name}: format {version}; this version reads format {_VERSION}")
    if blake3(head + body).digest() != digest:
        raise Unavailable(f"{name}: damaged")
    if UUID(store).bytes != owner:
        raise Unavailable(f"{name}: a backup of another store, {UUID(bytes=owner)}")
    if Name(kind, after, part, seq if is_last else None) != name:
        raise Unavailable(f"{name}: another segment, that was renamed")
    return Segment(
        name,
        store,
        created_ns,
        zstandard.ZstdDecompressor().decompress(body, max_output_size=length),
    )


def said_ns(data: bytes) -> int:
    """When a segment says that it was made, which nothing vouches for; 0 if it has no head."""
    if len(data) < _HEAD.size or not data.startswith(_MAGIC):
        return 0
    return _HEAD.unpack(data[: _HEAD.size])[9]


class Chain(NamedTuple):
    """Segments that make a state, in order of application, and the number of its last
    transaction."""

    segments: tuple[Name, ...]
    seq: int


def chains(names: Iterable[Name]) -> list[Chain]:
    """The newest state from each complete base, the newest first."""
    names = set(names)
    increments = sorted(name for name in names if name.kind == INCREMENT)
    found = []
    for last in (name for name in names if name.kind == BASE and name.seq is not None):
        parts = [Name(BASE, last.after, part, None) for part in range(last.part)]
        if names.issuperset(parts):
            found.append(_extend([*parts, last], last.end, increments))
    return sorted(found, key=lambda chain: (chain.seq, chain.segments[0].after), reverse=True)


def _extend(segments: list[Name], seq: int, increments: list[Name]) -> Chain:
    while True:
        fitting = [name for name in increments if name.after <= seq < name.end]
        if not fitting:
            return Chain(tuple(segments), seq)
        longest = max(fitting, key=lambda name: name.end)
        segments.append(longest)
        seq = longest.end


def newest(names: Iterable[Name], at: int | None = None) -> Chain | None:
    """The newest state that can be made; with ``at`` none beyond that transaction."""
    usable = [name for name in names if at is None or name.seq is None or name.seq <= at]
    return next(iter(chains(usable)), None)
