"""Groups as transaction functions (see kv.py): what the ranks of a job write below one directory,
as one grouped write.

    n ino          group of the directory: _GROUP, then, each with its length in two bytes: name, publish, error,
                   publish error, report (JSON), and, if flags say so, job, and the other groups of
                   who began it (u32 each)
    n ino number   member. number: rank that has committed, or inode number of a file that has been closed. _MEMBER: what the
                   file was then; for a rank the size of its files and 1 if all have to have one
                   size, else zeros

All little-endian; ``number`` in the key is 8 bytes, big-endian. A directory has the record of its
last group until the next one begins. docs/grouped.md has the protocol.
"""

import struct
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.publishing import RANKS_MAX, Asker

FORMAT = 1
STATES = ("open", "committed", "draining", "durable", "failed", "cancelled", "expired")
"""Numbered from 1 in records; draining, which only a mount can be at, is recorded as committed."""

LIVE = ("open", "committed", "draining")
"""States that lead to others."""

# format, state, flags; ranks; dead rank; uid, gid; id, chunk, timeout_ms, grace_ms; created,
# committed, buffered, durable (ns)
_GROUP = struct.Struct("<BBHIiIIQQQQqqqq")
_TEXTS = 5
_LENGTH = struct.Struct("<H")
_TEXT_MAX = 0xFFFF
_EXPLICIT, _PUBLISHED, _SAME_SIZE, _UNEQUAL, _JOB, _GROUPS = 1, 2, 4, 8, 16, 32
_FLAGS = 63
_MEMBER = struct.Struct("<BqQq")  # format, when (ns), size, mtime (ns)


class Options(NamedTuple):
    """What a group is asked to be. ``chunk``: the largest piece that is stored once, in bytes;
    ``explicit``: each rank commits, where else it is the closing of as many files as there are
    ranks; ``timeout_ms``: from the beginning until all have committed; ``grace_ms``: how long a
    rank whose process has ended may stay away; ``publish``: final name, b"": none; ``same_size``:
    all files have to have one size; ``job``: whose ranks these are, b"": nobody knows."""

    name: bytes
    ranks: int
    chunk: int
    explicit: bool
    timeout_ms: int
    grace_ms: int
    publish: bytes
    same_size: bool = False
    job: bytes = b""


class GroupRecord(NamedTuple):
    """A group. Times in ns since the epoch, 0: not yet. ``dead``: the rank whose death has ended
    it, or -1. ``report``: what its drain has said, as JSON. ``unequal``: it has failed because its
    files have sizes that differ. ``groups``: what ``uid`` is a member of besides ``gid``."""

    id: int
    options: Options
    uid: int
    gid: int
    created_ns: int
    state: str = "open"
    committed_ns: int = 0
    buffered_ns: int = 0
    durable_ns: int = 0
    published: bool = False
    dead: int = -1
    error: str = ""
    publish_error: str = ""
    report: bytes = b""
    unequal: bool = False
    groups: tuple[int, ...] = ()

    @property
    def asker(self) -> Asker:
        """Who has begun the group, and publishes it."""
        return Asker(self.uid, (self.gid, *self.groups))

    def encode(self) -> bytes:
        options = self.options
        flags = _EXPLICIT * options.explicit | _PUBLISHED * self.published
        flags |= _SAME_SIZE * options.same_size | _UNEQUAL * self.unequal | _JOB * bool(options.job)
        flags |= _GROUPS * bool(self.groups)
        state = "committed" if self.state == "draining" else self.state
        head = _GROUP.pack(
            FORMAT,
            1 + STATES.index(state),
            flags,
            options.ranks,
            self.dead,
            self.uid,
            self.gid,
            self.id,
            options.chunk,
            options.timeout_ms,
            options.grace_ms,
            self.created_ns,
            self.committed_ns,
            self.buffered_ns,
            self.durable_ns,
        )
        errors = (self.error.encode()[:_TEXT_MAX], self.publish_error.encode()[:_TEXT_MAX])
        report = self.report if len(self.report) <= _TEXT_MAX else b""
        texts = [
            options.name,
            options.publish,
            *errors,
            report,
            *([options.job] if options.job else []),
            *([_pack_groups(self.groups)] if self.groups else []),
        ]
        return head + b"".join(_LENGTH.pack(len(text)) + text for text in texts)


def _pack_groups(gids: tuple[int, ...]) -> bytes:
    gids = gids[: _TEXT_MAX // 4]
    return struct.pack(f"<{len(gids)}I", *gids)


def decode_group(record: bytes) -> GroupRecord:
    """Raises Unavailable for a damaged record."""
    try:
        (
            version,
            state,
            flags,
            ranks,
            dead,
            uid,
            gid,
            number,
            chunk,
            timeout_ms,
            grace_ms,
            created_ns,
            committed_ns,
            buffered_ns,
            durable_ns,
        ) = _GROUP.unpack_from(record)
        texts, offset = [], _GROUP.size
        for _ in range(_TEXTS + bool(flags & _JOB) + bool(flags & _GROUPS)):
            (length,) = _LENGTH.unpack_from(record, offset)
            offset += _LENGTH.size + length
            texts.append(record[offset - length : offset])
        groups = [
            gid for (gid,) in struct.iter_unpack("<I", texts.pop() if flags & _GROUPS else b"")
        ]
    except struct.error:
        raise Unavailable("the record of a group is damaged") from None
    known = (
        version == FORMAT
        and 1 <= state <= len(STATES)
        and 0 < ranks <= RANKS_MAX
        and -1 <= dead < ranks
    )
    if not known or offset != len(record) or flags & ~_FLAGS:
        raise Unavailable("the record of a group is damaged, or of a later version")
    name, publish, error, publish_error, report, *job = texts
    options = Options(
        name,
        ranks,
        chunk,
        bool(flags & _EXPLICIT),
        timeout_ms,
        grace_ms,
        publish,
        bool(flags & _SAME_SIZE),
        *job,
    )
    return GroupRecord(
        number,
        options,
        uid,
        gid,
        created_ns,
        STATES[state - 1],
        committed_ns,
        buffered_ns,
        durable_ns,
        bool(flags & _PUBLISHED),
        dead,
        error.decode(errors="replace"),
        publish_error.decode(errors="replace"),
        report,
        bool(flags & _UNEQUAL),
        tuple(groups),
    )


class GroupMember(NamedTuple):
    """A rank that has committed, or a file that has been closed, as it was then: it counts while it
    is the same.
    """

    when_ns: int
    size: int = 0
    mtime_ns: int = 0

    def encode(self) -> bytes:
        return _MEMBER.pack(FORMAT, *self)


def decode_member(record: bytes) -> GroupMember:
    """Raises Unavailable for a damaged record."""
    if len(record) != _MEMBER.size or record[0] != FORMAT:
        raise Unavailable("the record of a member of a group is damaged, or of a later version")
    return GroupMember(*_MEMBER.unpack(record)[1:])


# --- transactions ---------------------------------------------------------------------------------


@grows
def begin(tx: Transaction, ino: int, group: GroupRecord) -> GroupRecord | None:
    """The directory's group from now on; what is on record of the one before, if that can be read.
    Raises NotFound, NotADirectory."""
    namespace.get_directory(tx, ino)
    before = None
    with suppress(Unavailable):
        before = find(tx, ino)
    namespace.drop_group(tx, ino)
    tx.put(keys.group(ino), group.encode())
    return before


@grows
def update(tx: Transaction, ino: int, group: GroupRecord) -> None:
    """Record what has become of a group; members of one that has ended are forgotten. Nothing
    happens if its directory is gone, or another has followed."""
    there = find(tx, ino)
    if there is not None and there.id == group.id:
        if group.state not in LIVE:
            namespace.drop_group(tx, ino)
        tx.put(keys.group(ino), group.encode())


@grows
def put_member(tx: Transaction, ino: int, group_id: int, number: int, member: GroupMember) -> None:
    """As ``update``, for a member."""
    there = find(tx, ino)
    if there is not None and there.id == group_id:
        tx.put(keys.group_member(ino, number), member.encode())


@grows
def put_closed(
    tx: Transaction, ino: int, group_id: int, numbers: Sequence[int], now_ns: int
) -> None:
    """Files have been closed, and are durable as they are on record."""
    for number in numbers:
        inode = namespace.find_inode(tx, number)
        if inode is not None:
            put_member(tx, ino, group_id, number, GroupMember(now_ns, inode.size, inode.mtime_ns))


def find(tx: ReadTransaction, ino: int) -> GroupRecord | None:
    record = tx.get(keys.group(ino))
    return None if record is None else decode_group(record)


def members(tx: ReadTransaction, ino: int) -> dict[int, GroupMember]:
    """By number."""
    return {
        keys.group_number(key): decode_member(value)
        for key, value in tx.range(*keys.group_members(ino))
    }


def load_live(
    tx: ReadTransaction,
) -> tuple[dict[int, tuple[GroupRecord, dict[int, GroupMember]]], list[int]]:
    """All groups that have not ended, by directory, with their members by number; and the
    directories whose records are damaged."""
    found: dict[int, tuple[GroupRecord, dict[int, GroupMember]]] = {}
    damaged: list[int] = []
    for ino in [
        keys.number(key)
        for key, _ in tx.range(*keys.all_of(b"n"))
        if keys.group_number(key) is None
    ]:
        try:
            record = find(tx, ino)
            if record is not None and record.state in LIVE:
                found[ino] = record, members(tx, ino)
        except Unavailable:
            damaged.append(ino)
    return found, damaged


def directory_of(tx: ReadTransaction, ino: int, tops: frozenset[int]) -> int | None:
    """Which of the directories ``tops`` the file lies in, or else below: the nearest. None also for
    a file that has or had several names."""
    return next((above for above in _way_up(tx, ino) if above in tops), None)


def directory_with_group(tx: ReadTransaction, ino: int) -> int | None:
    """As ``directory_of``, among all directories that have or had a group."""
    return next(
        (above for above in _way_up(tx, ino) if tx.get(keys.group(above)) is not None), None
    )


def _way_up(tx: ReadTransaction, ino: int) -> Iterator[int]:
    while ino:
        try:
            inode = namespace.find_inode(tx, ino)
        except Unavailable:
            return  # nobody can tell where it lies
        if inode is None or not inode.nlink:
            return
        yield ino
        ino = 0 if ino == keys.ROOT_INO else inode.parent
