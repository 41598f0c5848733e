"""Groups as transaction functions (see kv.py): what the ranks of a job write below one directory,
which of them have committed, and whether the directory may get a new name.

    n ino          group of the directory: _GROUP, asker, then, each with its length in two bytes:
                   name, publish, error, publish error, report (JSON), job, and, if it is pending,
                   _PENDING, asker, job to the end, else nothing
    n ino number   member. number: rank that has committed, or inode number of a file that has been
                   closed. _MEMBER: what the file was then; for a rank the size of its files and 1
                   if all have to have one size, else zeros; then for each file that has to be there
                   when the directory gets its name: u64 size (2^64-1: any), u16 length of its path,
                   path below the directory
    n ino 2^63+host
                   what a host has of the group, in a cluster: _PART, then each rank, u16

All little-endian; ``number`` in the key is 8 bytes, big-endian; asker: see askers.py. A directory
has the record of its last group until the next one begins, or, if nothing of it was stored
together, until it has its name. docs/design/commit.md has the protocol.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from aifs.core.errors import Busy, Invalid, Unavailable
from aifs.meta import keys, namespace
from aifs.meta.askers import Asker, decode_asker
from aifs.meta.kv import ReadTransaction, Transaction, grows

FORMAT = 1
RANKS_MAX = 1 << 13
ANY_SIZE = (1 << 64) - 1
STATES = ("open", "committed", "draining", "durable", "failed", "cancelled", "expired")
"""Numbered from 1 in records; draining, which only a mount can be at, is recorded as committed."""

LIVE = ("open", "committed", "draining")
"""States that lead to others."""

# format, state, flags; ranks; dead rank; id, chunk, timeout_ms, grace_ms; created, committed,
# buffered, durable (ns); host
_GROUP = struct.Struct("<BBHIiQQQQqqqqH")
_TEXTS = 7
_LENGTH = struct.Struct("<H")
_TEXT_MAX = 0xFFFF
_EXPLICIT, _PUBLISHED, _SAME_SIZE, _UNEQUAL = 1, 2, 4, 8
_FLAGS = 15
_PENDING = struct.Struct("<qq")  # step (-1: unknown), marked (ns)
_NO_STEP = -1
_MEMBER = struct.Struct("<BqQq")  # format, when (ns), size, mtime (ns)
_FILE = struct.Struct("<QH")
_PART = struct.Struct("<BB")  # format, whether files were closed there
_RANK_BYTES = 2
_NAMED_MAX = 8  # ranks that a message names


class GroupOptions(NamedTuple):
    """The options of a group, as asked for."""

    name: bytes
    """The name by which people know it. b"": none, where nothing is shared."""
    ranks: int
    """How many there are."""
    chunk: int
    """The largest piece that is stored once, in bytes. 0: files are left to the usual drain."""
    explicit: bool
    """Each rank commits, where else it is the closing of as many files as there are ranks."""
    timeout_ms: int
    """From the beginning until all have committed. 0: any time."""
    grace_ms: int
    """How long a rank whose process has ended may stay away."""
    publish: bytes
    """The final name. b"": none."""
    same_size: bool = False
    """All files have to have one size."""
    job: bytes = b""
    """Whose ranks these are. b"": nobody knows."""

    @property
    def shares(self) -> bool:
        """Whether the group's files are stored together, and what is equal in them once."""
        return self.chunk > 0


class Pending(NamedTuple):
    """The directory gets no new name before all ranks have committed."""

    step: int | None
    created_ns: int
    """When it was marked, since the epoch."""
    job: bytes
    asker: Asker
    """The user that has marked it, with whose rights it is removed when nobody goes on with it."""

    def encode(self) -> bytes:
        step = _NO_STEP if self.step is None else self.step
        return _PENDING.pack(step, self.created_ns) + self.asker.encode() + self.job


def _decode_pending(record: bytes) -> Pending | None:
    """Raises struct.error."""
    if not record:
        return None
    step, created_ns = _PENDING.unpack_from(record)
    asker, end = decode_asker(record, _PENDING.size)
    return Pending(None if step == _NO_STEP else step, created_ns, record[end:], asker)


class GroupRecord(NamedTuple):
    """A group. Times in ns since the epoch, 0: not yet."""

    id: int
    """Different for each group of the store."""
    options: GroupOptions
    """The options that were asked for."""
    asker: Asker
    """The user that has begun the group, and publishes it."""
    created_ns: int
    """When it was begun."""
    state: str = "open"
    """One of STATES."""
    committed_ns: int = 0
    """When the last rank has committed."""
    buffered_ns: int = 0
    """When all was durable in the burst tier."""
    durable_ns: int = 0
    """When all was on the capacity tier."""
    published: bool = False
    """The directory has got its name."""
    dead: int = -1
    """The rank whose death has ended it."""
    error: str = ""
    """Why it has ended without success; '' if it has not."""
    publish_error: str = ""
    """Why it could not be published; '' if it could."""
    report: bytes = b""
    """The report of its drain, as JSON."""
    unequal: bool = False
    """It has failed because its files have sizes that differ."""
    pending: Pending | None = None
    """Stays when the group ends without success, and with it the commits."""
    host: int = 0
    """The host that sees to it, as in kv.Engine.host: where it was begun."""

    @property
    def seals(self) -> bool:
        """Whether the directory gets no new name before all ranks have committed."""
        is_to_be_named = self.options.explicit and self.options.publish and not self.published
        return self.pending is not None or (self.state in LIVE and bool(is_to_be_named))

    def encode(self) -> bytes:
        options = self.options
        flags = _EXPLICIT * options.explicit | _PUBLISHED * self.published
        flags |= _SAME_SIZE * options.same_size | _UNEQUAL * self.unequal
        state = "committed" if self.state == "draining" else self.state
        head = _GROUP.pack(
            FORMAT,
            1 + STATES.index(state),
            flags,
            options.ranks,
            self.dead,
            self.id,
            options.chunk,
            options.timeout_ms,
            options.grace_ms,
            self.created_ns,
            self.committed_ns,
            self.buffered_ns,
            self.durable_ns,
            self.host,
        )
        texts = (
            options.name,
            options.publish,
            self.error.encode()[:_TEXT_MAX],
            self.publish_error.encode()[:_TEXT_MAX],
            self.report if len(self.report) <= _TEXT_MAX else b"",
            options.job,
            b"" if self.pending is None else self.pending.encode(),
        )
        return (
            head + self.asker.encode() + b"".join(_LENGTH.pack(len(text)) + text for text in texts)
        )


def decode_group(record: bytes) -> GroupRecord:
    """Raises Unavailable for a damaged record."""
    try:
        (
            version,
            state,
            flags,
            ranks,
            dead,
            number,
            chunk,
            timeout_ms,
            grace_ms,
            created_ns,
            committed_ns,
            buffered_ns,
            durable_ns,
            host,
        ) = _GROUP.unpack_from(record)
        asker, offset = decode_asker(record, _GROUP.size)
        texts = []
        for _ in range(_TEXTS):
            (length,) = _LENGTH.unpack_from(record, offset)
            offset += _LENGTH.size + length
            texts.append(record[offset - length : offset])
        name, publish, error, publish_error, report, job, mark = texts
        pending = _decode_pending(mark)
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
    options = GroupOptions(
        name,
        ranks,
        chunk,
        bool(flags & _EXPLICIT),
        timeout_ms,
        grace_ms,
        publish,
        bool(flags & _SAME_SIZE),
        job,
    )
    return GroupRecord(
        number,
        options,
        asker,
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
        pending,
        host,
    )


class GroupMember(NamedTuple):
    """A rank that has committed, or a closed file, as it was then; counts while unchanged."""

    when_ns: int
    size: int = 0
    mtime_ns: int = 0
    files: tuple[tuple[bytes, int], ...] = ()
    """Files (path below the directory, size or ANY_SIZE) that must exist when it gets its name."""

    def encode(self) -> bytes:
        files = b"".join(_FILE.pack(size, len(path)) + path for path, size in self.files)
        return _MEMBER.pack(FORMAT, self.when_ns, self.size, self.mtime_ns) + files


def decode_member(record: bytes) -> GroupMember:
    """Raises Unavailable for a damaged record."""
    try:
        version, when_ns, size, mtime_ns = _MEMBER.unpack_from(record)
        files, offset = [], _MEMBER.size
        while offset < len(record):
            wanted, length = _FILE.unpack_from(record, offset)
            offset += _FILE.size + length
            files.append((record[offset - length : offset], wanted))
    except struct.error:
        raise Unavailable("the record of a member of a group is damaged") from None
    if version != FORMAT or offset != len(record):
        raise Unavailable("the record of a member of a group is damaged, or of a later version")
    return GroupMember(when_ns, size, mtime_ns, tuple(files))


class GroupPart(NamedTuple):
    """The part of a group that a host has."""

    ranks: tuple[int, ...] = ()
    """Those that have joined by processes that live there."""
    has_files: bool = False
    """Files of the group were closed there, so their newest bytes may be there alone."""

    def encode(self) -> bytes:
        ranks = struct.pack(f"<{len(self.ranks)}H", *self.ranks)
        return _PART.pack(FORMAT, self.has_files) + ranks


def decode_part(record: bytes) -> GroupPart:
    """Raises Unavailable for a damaged record."""
    try:
        version, has_files = _PART.unpack_from(record)
        count = (len(record) - _PART.size) // _RANK_BYTES
        ranks = struct.unpack(f"<{count}H", record[_PART.size :])
    except struct.error:
        version = has_files = 0
    if version != FORMAT or has_files > 1:
        raise Unavailable("the record of a host's part of a group is damaged")
    return GroupPart(ranks, bool(has_files))


# --- a group and its state ------------------------------------------------------------------------


@grows
def begin(
    tx: Transaction, ino: int, group: GroupRecord, known: int | None = None
) -> GroupRecord | None:
    """Begin a group in a directory; returns the readable record of the one before, whose commits
    end. ``known``: its id, for the caller. Raises NotFound, NotADirectory, Invalid for the root;
    Overtaken if another one lives."""
    namespace.get_directory(tx, ino)
    if ino == keys.ROOT_INO and group.pending is not None:
        raise Invalid("the root cannot be published")
    before = None
    with suppress(Unavailable):
        before = find(tx, ino)
    is_held = before is not None and (before.state in LIVE or before.pending is not None)
    if tx.host and before is not None and is_held and before.id != known:
        raise namespace.Overtaken()
    namespace.drop_group(tx, ino)
    tx.put(keys.group(ino), group.encode())
    return before


@grows
def change(tx: Transaction, ino: int, group_id: int, changes: Mapping[str, Any]) -> None:
    """Change fields of the group's record; its commits stay. Raises NotFound, NotADirectory,
    Invalid if it is not the directory's group any more."""
    namespace.get_directory(tx, ino)
    there = find(tx, ino)
    if there is None or there.id != group_id:
        raise Invalid("the directory has got its name meanwhile")
    tx.put(keys.group(ino), there._replace(**changes).encode())


@grows
def update(tx: Transaction, ino: int, group: GroupRecord) -> None:
    """Record a group's state; commits of an ended one are forgotten, unless the directory is
    pending. No effect if the directory is gone, or another group has followed."""
    there = find(tx, ino)
    if there is not None and there.id == group.id:
        if group.state not in LIVE and group.pending is None:
            namespace.drop_group(tx, ino)
        tx.put(keys.group(ino), group.encode())


@grows
def alter(
    tx: Transaction, ino: int, group_id: int, was: str, changes: Mapping[str, Any]
) -> tuple[bool, GroupRecord | None]:
    """``update`` among hosts: change fields if the state is still ``was``, and, to be committed, if
    it is complete. Whether it was done, and the record."""
    there = find(tx, ino)
    if there is None or there.id != group_id or there.state != was:
        return False, there
    if was == "open" and changes.get("state") == "committed":
        members = committed(tx, ino)
        if len(members) < there.options.ranks:
            return False, there
    after = there._replace(**changes)
    update(tx, ino, after)
    return True, after


def abandon(tx: Transaction, ino: int, group_id: int) -> None:
    """End a directory's pending state, and forget a group that was for that alone. No effect if
    another has followed."""
    there = find(tx, ino)
    if there is None or there.id != group_id:
        return
    if there.options.shares:
        update(tx, ino, there._replace(pending=None))
    else:
        namespace.drop_group(tx, ino)


def find(tx: ReadTransaction, ino: int) -> GroupRecord | None:
    record = tx.get(keys.group(ino))
    return None if record is None else decode_group(record)


def is_pending(tx: ReadTransaction, ino: int) -> bool:
    """Whether the directory is pending; also if nobody can tell."""
    try:
        record = find(tx, ino)
    except Unavailable:
        return True
    return record is not None and record.pending is not None


# --- commits --------------------------------------------------------------------------------------


@grows
def commit(
    tx: Transaction, ino: int, group_id: int, rank: int, member: GroupMember, again: bool
) -> None:
    """Record a rank's commit. Raises Invalid: another group has followed, the directory has its
    name, or the rank has committed and this is not ``again``."""
    there = find(tx, ino)
    if there is None or there.id != group_id:
        raise Invalid("the directory has got its name meanwhile, or another group has begun")
    if there.state not in LIVE and there.pending is None:
        raise Invalid("the group has ended meanwhile")
    if not again and tx.get(keys.group_member(ino, rank)) is not None:
        raise Invalid(f"rank {rank} has committed already")
    tx.put(keys.group_member(ino, rank), member.encode())


@grows
def put_closed(
    tx: Transaction, ino: int, group_id: int, numbers: Sequence[int], now_ns: int
) -> None:
    """Record closed files, which are durable as on record, unless another group has followed."""
    there = find(tx, ino)
    if there is None or there.id != group_id:
        return
    for number in numbers:
        inode = namespace.find_inode(tx, number)
        if inode is not None:
            member = GroupMember(now_ns, inode.size, inode.mtime_ns)
            tx.put(keys.group_member(ino, number), member.encode())


def remove_closed(tx: Transaction, ino: int, group_id: int, number: int, opened_ns: int) -> None:
    """A closed file was opened for writing. No effect if another group has followed, this one is
    complete, or the file has been closed since."""
    there, member = find(tx, ino), get_member(tx, ino, number)
    if there is not None and there.id == group_id and there.state == "open":
        if member is not None and member.when_ns <= opened_ns:
            tx.delete(keys.group_member(ino, number))


def committed(tx: ReadTransaction, ino: int) -> list[int]:
    """The ranks of a group that have committed, ascending."""
    return [keys.member_number(key) for key, _ in tx.range(*keys.group_members(ino))]


def get_member(tx: ReadTransaction, ino: int, number: int) -> GroupMember | None:
    record = tx.get(keys.group_member(ino, number))
    return None if record is None else decode_member(record)


def members(tx: ReadTransaction, ino: int) -> dict[int, GroupMember]:
    """By number."""
    return {
        keys.member_number(key): decode_member(value)
        for key, value in tx.range(*keys.group_members(ino))
    }


# --- the parts of hosts ---------------------------------------------------------------------------


@grows
def put_part(tx: Transaction, ino: int, group_id: int, part: GroupPart) -> bool:
    """Record this host's part of a group. False, with nothing done, if another has followed or all
    have committed. Raises Invalid if another host has a rank."""
    there = find(tx, ino)
    if there is None or there.id != group_id or there.state != "open":
        return False
    for host, other in parts(tx, ino).items():
        taken = set(part.ranks).intersection(other.ranks)
        if taken and host != tx.host:
            raise Invalid(f"rank {min(taken)} has been joined on another host, where it lives")
    tx.put(keys.group_part(ino, tx.host), part.encode())
    return True


def drop_part(tx: Transaction, ino: int, group_id: int, host: int) -> None:
    """A host that has died had no files of the group, whose ranks may join elsewhere."""
    there = find(tx, ino)
    if there is not None and there.id == group_id:
        tx.delete(keys.group_part(ino, host))


def parts(tx: ReadTransaction, ino: int) -> dict[int, GroupPart]:
    """By host."""
    return {
        keys.part_host(key) or 0: decode_part(value)
        for key, value in tx.range(*keys.group_parts(ino))
    }


def conclude(tx: Transaction, ino: int) -> None:
    """End a directory's pending state, in the transaction of its final name. Raises Busy if ranks
    have not committed."""
    record = find(tx, ino)
    if record is None or not record.seals:
        return
    require_complete(tx, ino, record)
    if not record.options.shares or record.state not in LIVE:
        namespace.drop_group(tx, ino)
    if record.options.shares:
        tx.put(keys.group(ino), record._replace(pending=None).encode())


def require_complete(tx: ReadTransaction, ino: int, record: GroupRecord) -> None:
    """Raises Busy if a sealing group misses commits, naming the ranks, or a file has another
    size."""
    lacking = sorted(set(range(record.options.ranks)).difference(committed(tx, ino)))
    if lacking:
        raise Busy(lacking_text(lacking, record.options.ranks))
    if record.unequal:
        raise Busy(record.error)


def lacking_text(lacking: Sequence[int], ranks: int) -> str:
    """The ranks that have not committed, for people."""
    names = ", ".join(map(str, lacking[:_NAMED_MAX])) + (
        "" if len(lacking) <= _NAMED_MAX else ", ..."
    )
    return f"{len(lacking)} of {ranks} ranks have not committed: {names}"


# --- which groups there are -----------------------------------------------------------------------


def load(
    tx: ReadTransaction,
) -> tuple[dict[int, tuple[GroupRecord, dict[int, GroupMember]]], list[int]]:
    """Live and pending groups by directory, with members by number; and directories with damaged
    records."""
    found: dict[int, tuple[GroupRecord, dict[int, GroupMember]]] = {}
    damaged: list[int] = []
    for ino in [keys.number(key) for key, _ in tx.range(*keys.all_of(b"n")) if keys.is_group(key)]:
        try:
            record = find(tx, ino)
            if record is not None and (record.state in LIVE or record.pending is not None):
                found[ino] = record, members(tx, ino)
        except Unavailable:
            damaged.append(ino)
    return found, damaged


def directory_of(tx: ReadTransaction, ino: int, tops: frozenset[int]) -> int | None:
    """The nearest of ``tops`` above the file; None also for one that has had several names."""
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
