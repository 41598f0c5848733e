"""The changes of a host: merged for a commit, and as it waits, told already, for one
(docs/design/replicated.md, Delegations).

A replica is the feed up to its cursor, and then what is ahead of it, in the order of its numbers.
Each change set that is ahead is kept in the replica, too, in the transaction that applies it.
"""

import struct
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from aifs.meta import keys
from aifs.meta.kv import ReadTransaction, patched
from aifs.meta.memtable import Writes
from aifs.meta.recording import Patches, Recording
from aifs.meta.replicated import database as db
from aifs.meta.replicated.database import Row

MAX_SETS = 1024
"""Change sets that may be ahead."""

MAX_BYTES = 1 << 20
"""Bytes that their records may take together; more waits for the database."""

MAX_TOLD = 10
"""How many names the log tells of what is lost."""

_KEY = b"\0ahead"
"""Keys of change sets that are ahead, in replicas alone: then u16, their number modulo MAX_SETS.
Numbers up to ``Cursor.shipped`` are old."""
FIRST_KEY, END_KEY = _KEY, _KEY + b"\xff\xff\xff"

_HEAD = struct.Struct("<QQHII")
"""Of a record, which is an array of bytea as the database's: the head (number, session, how many
delegations, keys, and keys of what is added or patched), delegations, keys, values (null: deleted),
keys of what is added or patched, and for each of these what ``_packed`` says of it.
"""
_ADDED = struct.Struct("<q")
_PATCH = struct.Struct("<II")


class Changes:
    """The changes of a transaction, or of several ones."""

    __slots__ = ("relative", "writes")

    def __init__(self, writes: Writes, relative: dict[bytes, int | Patches]) -> None:
        self.writes = writes
        """What they make of the map as they have read it."""
        self.relative = relative
        """Of these keys, what was added or patched; the others are put or deleted."""

    def merge(self, later: "Changes") -> None:
        """Those of a later transaction, too, which has seen these."""
        for key, value in later.writes.items():
            change, before = later.relative.get(key), self.relative.get(key)
            if change is None or (before is None and key in self.writes):
                self.relative.pop(key, None)
            elif before is None:
                self.relative[key] = change if isinstance(change, int) else list(change)
            elif isinstance(change, int) and isinstance(before, int):
                self.relative[key] = before + change
            elif isinstance(change, list) and isinstance(before, list):
                last = [(at, len(part)) for at, part in change]
                kept = [one for one in before if (one[0], len(one[1])) not in last]
                self.relative[key] = kept + change
            else:
                del self.relative[key]
            self.writes[key] = value

    def over(self, key: bytes, value: bytes | None) -> bytes | None:
        """What they make of ``key`` where it has this value."""
        change = self.relative.get(key)
        if change is None:
            return self.writes[key]
        if isinstance(change, int):
            return _counter(int.from_bytes(value or b"", "little", signed=True) + change)
        for offset, part in change:
            value = patched(value, offset, part)
        return value

    def _hard(self) -> tuple[list[bytes], list[bytes | None], int]:
        """Keys put, then keys deleted; their values; how many are put."""
        pairs = [pair for pair in self.writes.items() if pair[0] not in self.relative]
        puts = [pair for pair in pairs if pair[1] is not None]
        pairs = puts + [pair for pair in pairs if pair[1] is None]
        return [key for key, _ in pairs], [value for _, value in pairs], len(puts)

    def encode(self) -> tuple[bytes, ...]:
        """The parameters of ``commit`` from ``puts`` on."""
        keys, values, puts = self._hard()
        adds = [(key, one) for key, one in self.relative.items() if isinstance(one, int)]
        patches = [
            (key, *patch)
            for key, one in self.relative.items()
            if not isinstance(one, int)
            for patch in one
        ]
        return (
            db.of_int(puts),
            db.of_keys(keys),
            db.of_keys(values),
            db.of_keys([key for key, _ in adds]),
            db.of_bigints([delta for _, delta in adds]),
            db.of_keys([key for key, _, _ in patches]),
            db.of_ints([offset for _, offset, _ in patches]),
            db.of_keys([part for _, _, part in patches]),
        )

    def row(self, seq: int, session: int, number: int, before: Writes) -> Row:
        """The database's row of it. ``before``: the map's added or patched records."""
        keys, values, _ = self._hard()
        count = len(keys)
        for key in self.relative:
            keys.append(key)
            values.append(self.over(key, before[key]))
        return Row(seq, session, number, count, list(keys), values)


def changes_of(tx: Recording) -> Changes:
    return Changes(tx.writes, tx.relative)


class ChangeSet:
    """The changes of a transaction that are in the replica, and not in the database."""

    __slots__ = ("changes", "delegations", "length", "number", "seq", "session")

    def __init__(
        self, number: int, session: int, seq: int, delegations: Sequence[bytes], changes: Changes
    ) -> None:
        self.number = number
        """Ascending, in all sessions of the replica, with those of commits."""
        self.session = session
        """Which has made it."""
        self.seq = seq
        """Of the transaction."""
        self.delegations = delegations
        """Keys of the delegations that it relies on."""
        self.changes = changes
        self.length = 0
        """Of its record."""

    def encode(self) -> tuple[bytes, bytes]:
        """Key and value of its record."""
        writes, relative = self.changes.writes, self.changes.relative
        head = _HEAD.pack(
            self.number, self.session, len(self.delegations), len(writes), len(relative)
        )
        packed = [_packed(change) for change in relative.values()]
        record = db.of_keys(
            [head, *self.delegations, *writes, *writes.values(), *relative, *packed]
        )
        self.length = len(record)
        return _KEY + (self.number % MAX_SETS).to_bytes(2, "big"), record


def decode_change_set(record: bytes) -> ChangeSet:
    """Its ``seq`` is 0."""
    items: list[bytes] = db.to_keys(record)  # type: ignore[assignment]
    number, session, delegations, count, relative = _HEAD.unpack(items[0])
    parts: list[list[bytes]] = []
    at = 1
    for length in (delegations, count, count, relative, relative):
        parts.append(items[at : at + length])
        at += length
    changes = Changes(
        dict(zip(parts[1], parts[2], strict=True)),
        {key: _unpacked(packed) for key, packed in zip(parts[3], parts[4], strict=True)},
    )
    found = ChangeSet(number, session, 0, parts[0], changes)
    found.length = len(record)
    return found


def _packed(change: int | Patches) -> bytes:
    """The added number (i64) behind a byte 0; patches (u32 offset, u32 length, bytes) behind a
    1."""
    if isinstance(change, int):
        return b"\0" + _ADDED.pack(change)
    return b"\1" + b"".join([_PATCH.pack(at, len(part)) + part for at, part in change])


def _unpacked(packed: bytes) -> int | Patches:
    if packed[:1] == b"\0":
        return int(_ADDED.unpack_from(packed, 1)[0])
    patches: Patches = []
    at = 1
    while at < len(packed):
        offset, length = _PATCH.unpack_from(packed, at)
        at += _PATCH.size
        patches.append((offset, packed[at : at + length]))
        at += length
    return patches


def _counter(number: int) -> bytes:
    return number.to_bytes(8, "little", signed=True)


class Ahead:
    """The change sets that are ahead, the oldest first."""

    def __init__(self, shipped: int, sets: Sequence[ChangeSet] = ()) -> None:
        self.shipped = shipped
        """The feed has, as far as the replica knows, what has a number up to this one."""
        self.number = shipped
        """The last one that was given, to a change set or a commit."""
        self._sets: deque[ChangeSet] = deque()
        self._uses: dict[bytes, int] = {}
        """How many of them change a key."""
        self._bytes = 0
        """Bytes that their records take."""
        for one in sets:
            self.append(one)

    def __bool__(self) -> bool:
        return bool(self._sets)

    def __iter__(self) -> Iterator[ChangeSet]:
        return iter(self._sets)

    def next_number(self) -> int:
        self.number += 1
        return self.number

    @property
    def has_room(self) -> bool:
        """Whether one more may be made."""
        return not self._sets or (
            self.number + 1 - self._sets[0].number < MAX_SETS and self._bytes < MAX_BYTES
        )

    @property
    def first_seq(self) -> int:
        """Of the oldest one."""
        return self._sets[0].seq

    def append(self, one: ChangeSet) -> None:
        self.number = max(self.number, one.number)
        self._sets.append(one)
        self._bytes += one.length
        for key in one.changes.writes:
            self._uses[key] = self._uses.get(key, 0) + 1

    def hear(self, session: int, number: int, is_own: bool) -> None:
        """The feed has a session's changes up to this number. ``is_own``: of this host's present
        one."""
        while self._sets and self._sets[0].number <= number:
            if not is_own and self._sets[0].session != session:
                break
            self._remove(self._sets.popleft())
            is_own = True
        if is_own:
            self.shipped = number
            self.number = max(self.number, number)

    def cut(self, number: int) -> list[ChangeSet]:
        """Give up those from this number on; they are the caller's."""
        lost: list[ChangeSet] = []
        while self._sets and self._sets[-1].number >= number:
            lost.append(self._sets.pop())
            self._remove(lost[-1])
        return lost[::-1]

    def _remove(self, one: ChangeSet) -> None:
        self._bytes -= one.length
        for key in one.changes.writes:
            uses = self._uses.pop(key) - 1
            if uses:
                self._uses[key] = uses

    def merged(self) -> Changes:
        changes = Changes({}, {})
        for one in self._sets:
            changes.merge(one.changes)
        return changes

    def delegations(self) -> set[bytes]:
        """What they rely on."""
        return {key for one in self._sets for key in one.delegations}

    def put_over(self, writes: Writes) -> None:
        """What a row of the feed says, as it is with what is ahead of it."""
        for key in self._uses.keys() & writes.keys():
            for one in self._sets:
                if key in one.changes.writes:
                    writes[key] = one.changes.over(key, writes[key])

    def feed_value(self, key: bytes, now: ReadTransaction) -> bytes | None:
        """A counter, or patched record, without what is ahead: only this host may change it."""
        value = now.get(key)
        if key not in self._uses:
            return value
        changes = [one.changes.relative.get(key) for one in self._sets]
        added = sum(change for change in changes if isinstance(change, int))
        return (
            _counter(int.from_bytes(value or b"", "little", signed=True) - added)
            if added
            else value
        )


def told(what: str, sets: Iterable[ChangeSet]) -> str:
    """For the log: which names they change."""
    names = {key for one in sets for key in one.changes.writes if key[:1] == b"d"}
    first = ", ".join(keys.describe(key) for key in sorted(names)[:MAX_TOLD])
    return f"{what} are {len(list(sets))} changes, of these names: {first}"
