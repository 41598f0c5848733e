"""The table of record kinds, and the part that is common to all checks of the metadata."""

from collections.abc import Awaitable, Callable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

from aifs.check import repair
from aifs.check.findings import RECORDS, RECOVERY, Fix, Problem, Subject, printable
from aifs.check.table import NONE, UNREADABLE, InodeTable
from aifs.core.aging import parse_age_rule
from aifs.core.errors import FsError, Unavailable
from aifs.core.retention import parse_keep
from aifs.layout.striped import Striped
from aifs.meta import groups, keys, moves, publishing, trash
from aifs.meta.degraded import find_unread, put_unread
from aifs.meta.delegations import DELEGATE_BYTES
from aifs.meta.dooming import Doomed, decode_doomed
from aifs.meta.hosts import HostRecord, decode_host
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.quotas import decode_quota
from aifs.meta.records import decode_degraded, decode_garbage
from aifs.meta.slices import read_slice
from aifs.store.ids import decode_windows

_ID_MAX = 1 << 62


Decoder = Callable[[bytes, bytes], Any]


class Belongs(Enum):
    """To which inode a record belongs, by the number at the beginning of its key."""

    NOBODY = auto()
    INODE = auto()
    READABLE = auto()
    """An inode whose own record can be decoded."""
    DIRECTORY = auto()


class RecordKind(NamedTuple):
    """How a kind's records are judged: key, owner, decoder. A failing record is removed, unless
    another column says otherwise."""

    letter: bytes
    """The first byte of the keys."""
    what: str = ""
    """The record, for people; ``{}`` stands for the number in its key."""
    lengths: tuple[int, ...] = (9,)
    """Lengths that a key may have; (): any from 9 bytes on."""
    owner: Belongs = Belongs.NOBODY
    decode: Decoder | None = None
    """Takes key and value. Raises FsError or ValueError; None: the check of the kind decodes."""
    mend: Callable[[bytes], bytes] | None = None
    """The value that replaces one that cannot be decoded, by the key."""
    stage: int = RECOVERY
    """When a record that fails is mended: see findings."""
    holds_bytes: bool = False
    """A key of another length is left alone: the record may hold something."""
    is_mark: bool = False
    """The key says all, or nearly: a damaged value is replaced by an empty one."""


def _of_value(decode: Callable[[bytes], Any]) -> Decoder:
    return lambda key, value: decode(value)


def _rule_of_directory(
    letter: bytes, what: str, decode: Callable[[bytes], Any], holds_bytes: bool = True
) -> RecordKind:
    decoder, owner = _of_value(decode), Belongs.DIRECTORY
    return RecordKind(letter, what, (9,), owner, decoder, None, RECORDS, holds_bytes)


def _parse_kept(value: bytes) -> object:
    return parse_keep(publishing.decode_kept(value).policy)


def _decode_group(key: bytes, value: bytes) -> Any:
    if keys.is_group(key):
        return groups.decode_group(value)
    return groups.decode_member(value) if keys.part_host(key) is None else groups.decode_part(value)


def _decode_session(key: bytes, value: bytes) -> None:
    if len(value) != (DELEGATE_BYTES if key[:1] == b"D" else 8):
        raise Unavailable("it names no session")


def _clean_host(key: bytes) -> bytes:
    """A host with an unreadable record gets its name at its next mount."""
    return HostRecord(f"number {keys.host_number(key)}", clean=False).encode()


def _just_doomed(key: bytes) -> bytes:
    """A doomed directory has no name: no more is known."""
    return Doomed(keys.number(key), 0, 0).encode()


KINDS = (
    RecordKind(b"p", "host {}", (3,), decode=_of_value(decode_host), mend=_clean_host),
    RecordKind(b"i", holds_bytes=True),
    RecordKind(b"C", lengths=(17,)),
    RecordKind(b"b"),
    RecordKind(b"g", "garbage record {}", decode=_of_value(decode_garbage)),
    RecordKind(b"k", lengths=(17,), holds_bytes=True),
    RecordKind(b"o", lengths=(9, 11), is_mark=True),
    RecordKind(b"w", "dirty mark", owner=Belongs.READABLE, is_mark=True),
    RecordKind(
        b"z", "record of the doomed", (9,), Belongs.READABLE, _of_value(decode_doomed), _just_doomed
    ),
    _rule_of_directory(b"R", "rule of the trash", trash.decode_rule, holds_bytes=False),
    RecordKind(b"T", lengths=(17,)),
    RecordKind(b"U", lengths=(17,)),
    RecordKind(b"n", "group", (9, 17), Belongs.DIRECTORY, _decode_group, stage=RECORDS),
    _rule_of_directory(b"r", "policy of retention", _parse_kept),
    _rule_of_directory(b"f", "rule of age", lambda value: parse_age_rule(value.decode())),
    RecordKind(b"x", "extended attribute", (), Belongs.INODE, stage=RECORDS, holds_bytes=True),
    RecordKind(b"t", holds_bytes=True),
    RecordKind(b"a", is_mark=True),
    RecordKind(b"y", is_mark=True),
    RecordKind(b"h", lengths=(33,), holds_bytes=True),
    RecordKind(b"l", lengths=(17,), holds_bytes=True),
    RecordKind(b"q", "degraded objects {}", decode=_of_value(decode_degraded)),
    RecordKind(b"m", "stray of {}", (11,), decode=moves.decode_stray),
    RecordKind(b"u", lengths=(3,), is_mark=True),
    RecordKind(b"v", "windows of ids", (3,), decode=_of_value(decode_windows)),
    RecordKind(b"Q", "quota {}", decode=_of_value(decode_quota), stage=RECORDS),
    RecordKind(b"P", lengths=(10,)),
    RecordKind(b"d", lengths=(), holds_bytes=True),
    RecordKind(b"e", lengths=(17,), holds_bytes=True),
    RecordKind(b"D", "delegation of {}", decode=_decode_session, stage=RECORDS),
    RecordKind(b"L", "home of the locks of {}", decode=_decode_session, stage=RECORDS),
    RecordKind(b"s", lengths=(3,), holds_bytes=True),  # read when the store was opened
)
"""All kinds that are checked record by record, in the order in which they are."""

UNCHECKED = b"Scj"
"""Kinds that are not: the superblock, counters, and records of background jobs."""

Judge = Callable[[bytes, Any], Awaitable[None] | None]
"""Called with the key, and the decoded record, or its value if its kind has no decoder."""


class Records:
    """The records of an unchanging store, shared by all checks of the metadata: table of inodes,
    servers, hosts, and problems found."""

    def __init__(self, engine: Engine, servers: Iterable[int]) -> None:
        self.engine = engine
        self.view: Callable[..., Awaitable[Any]] = engine.view
        self.servers = frozenset(servers)
        """The numbers of the store's servers, burst directories among them."""
        self.hosts = {engine.host}
        """The numbers of the hosts that may have left something; {0} where the store has one."""
        self.table = InodeTable()
        self.problems: list[Problem] = []
        self.highest_id = 0
        """The largest id that is in use."""

    # --- reading ---

    async def get(self, key: bytes) -> bytes | None:
        return await self.view(lambda tx: tx.get(key))

    async def for_each(
        self,
        start: bytes,
        end: bytes,
        handle: Callable[[bytes, bytes], Awaitable[None] | None],
        seen: Callable[[int], None] = lambda count: None,
    ) -> None:
        """Call ``handle`` for each record with start <= key < end, and ``seen`` with each batch's
        length. Handlers keep notes, so they do not run in a view, and read other records in their
        own views."""
        while start:
            records, start = await self.view(read_slice, start, end)
            for key, value in records:
                if (waiting := handle(key, value)) is not None:
                    await waiting
            seen(len(records))

    async def unread(self, oid: int) -> int:
        """Mask of wrong columns; none for an unreadable record, which is named itself."""
        return await self.view(unread_of, oid)

    # --- numbers ---

    def in_use(self, number: int) -> None:
        if number < _ID_MAX:  # else the record is damaged
            self.highest_id = max(self.highest_id, number)

    def is_readable(self, ino: int) -> bool:
        row = self.table.find(ino)
        return row != NONE and not self.table.flags[row] & UNREADABLE

    def is_unreadable(self, ino: int) -> bool:
        row = self.table.find(ino)
        return row != NONE and bool(self.table.flags[row] & UNREADABLE)

    def of_inode(self, ino: int) -> Subject:
        return ino if self.table.find(ino) != NONE else f"inode {ino}"

    # --- problems ---

    def problem(
        self, kind: str, subject: Subject, detail: str, fix: Fix | None = None, stage: int = RECORDS
    ) -> Problem:
        problem = Problem(kind, subject, detail, fix, stage)
        self.problems.append(problem)
        return problem

    def drop(
        self, kind: str, subject: Subject, detail: str, key: bytes, stage: int = RECORDS
    ) -> None:
        """A problem that is mended by removing the record."""
        self.problem(kind, subject, detail, partial(repair.delete, key=key), stage)

    def unknown(self, key: bytes, value: bytes) -> None:
        self.problem("unknown-record", f"record {key.hex()}", f"{len(value)} bytes; left as it is")

    def require_host(
        self, subject: Subject, what: str, key: bytes, value: bytes, nobody: bool = False
    ) -> None:
        """Check a record whose value is a host, or ``nobody``: an unknown host's work falls to this
        one."""
        host = keys.host_of(value)
        if host not in self.hosts and not (nobody and not host):
            detail = f"{what}: host {host}, which is none"
            fix = partial(repair.put, key=key, value=keys.host_value(self.engine.host))
            self.problem("unknown-host", subject, detail, fix, RECOVERY)

    async def require_counter(self, key: bytes, right: int, subject: str, kind: str = "") -> None:
        """Check a counter of so many ``kind``."""
        told = await self.view(ReadTransaction.counter, key)
        if told != right:
            fix = partial(repair.shift_counter, key=key, delta=right - told)
            detail = f"{told}{kind}, but there are {right}"
            self.problem("wrong-counter", subject, detail, fix)

    async def require_servers(self, ino: int, oid: int, layout: Striped) -> None:
        """Check that the store has the servers of a file's objects, or of a container (0)."""
        unknown = [c for c, server in enumerate(layout.servers) if server not in self.servers]
        known = await self.unread(oid) if unknown else 0
        mask = sum(1 << column for column in unknown) & ~known
        if mask:
            survives = layout.survives(mask | known)
            fix = partial(put_unread, oid=oid, ino=ino, mask=mask) if survives else None
            numbers = ", ".join(str(layout.servers[column]) for column in unknown)
            detail = f"inode {ino}: its" if ino else "its"
            detail += f" layout names data server {numbers}"
            self.problem("unknown-server", ino or f"container {oid}", detail, fix)

    # --- the table ---

    async def judge(
        self, kind: RecordKind, key: bytes, value: bytes, further: Judge | None
    ) -> None:
        """Judge a record as its kind says; one that passes goes to ``further``."""
        is_known = len(key) in kind.lengths if kind.lengths else len(key) >= len(keys.inode(0))
        if not is_known and kind.holds_bytes:
            self.unknown(key, value)
        elif not is_known:
            # Recovery would trip over it, and it holds nothing that could be lost.
            detail = "its key is not that of a record"
            self.drop("stray-record", f"record {key.hex()}", detail, key, RECOVERY)
        elif (lacking := self._owner_lacks(kind, key)) is not None:
            self.drop("stray-record", *lacking, key, kind.stage)
        else:
            record: Any = value
            if kind.decode is not None:
                try:
                    record = kind.decode(key, value)
                except (FsError, ValueError) as error:
                    self._mend(kind, key, str(error))
                    if kind.mend is None:
                        return
                    record = kind.decode(key, kind.mend(key))
            if further is not None and (waiting := further(key, record)) is not None:
                await waiting

    def _owner_lacks(self, kind: RecordKind, key: bytes) -> tuple[Subject, str] | None:
        """Subject and text of a problem with the owner, or None."""
        ino = int.from_bytes(key[1:9], "big")
        row = NONE if kind.owner is Belongs.NOBODY else self.table.find(ino)
        if kind.owner is Belongs.DIRECTORY and (row == NONE or not self.table.may_hold_names(row)):
            return self.of_inode(ino), f"inode {ino}: {kind.what}, on what is no directory"
        if kind.owner is Belongs.READABLE and not self.is_readable(ino):
            return f"inode {ino}", f"{kind.what} of an inode that cannot be read"
        if kind.owner is Belongs.INODE and row == NONE:
            return (
                f"inode {ino}",
                f"{kind.what} {printable(key[9:])} of an inode that does not exist",
            )
        return None

    def _mend(self, kind: RecordKind, key: bytes, reason: str) -> None:
        number = int.from_bytes(key[1:9], "big")
        subject: Subject = kind.what.format(number)
        if kind.owner is not Belongs.NOBODY:
            subject, reason = self.of_inode(number), f"inode {number}: {kind.what}: {reason}"
        fix: Fix = partial(repair.delete, key=key)
        if kind.mend is not None:
            fix = partial(repair.put, key=key, value=kind.mend(key))
        self.problem("unreadable-record", subject, reason, fix, kind.stage)


def unread_of(tx: ReadTransaction, oid: int) -> int:
    """As ``Records.unread``."""
    try:
        return find_unread(tx, oid)
    except FsError:
        return 0
