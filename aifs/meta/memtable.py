"""The levels of the LMDB engine: changes in memory over what is stored, read as one map. Touches no
file.

A *run* is an iterator of (key, value) in ascending order of key; a value of None is a tombstone:
the key is deleted, whatever the levels below say. A DamagedRecord as value is raised, unless a
level above has the key.
"""

from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any, Protocol

from sortedcontainers import SortedSet

from aifs.meta.kv import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    DamagedRecord,
    ReadTransaction,
    Transaction,
    check_key,
    check_pair,
    patched,
)

Pair = tuple[bytes, bytes | DamagedRecord | None]
Run = Iterator[Pair]
Writes = dict[bytes, bytes | None]

_MISSING: Any = object()  # "this level does not know the key", where None is "the key is deleted"


class Memtable:
    """Key to newest value, or None for a deleted key.

    An update is one of a dictionary. Keys are sorted, by kind (first byte), when a range of that
    kind is first asked for: stores ask for few kinds, and change others.
    """

    __slots__ = ("_kinds", "_unsorted", "entries")

    def __init__(self) -> None:
        self.entries: Writes = {}
        self._unsorted: list[bytes] = []
        self._kinds: dict[int, _Kind] = {}

    def apply(self, writes: Writes) -> None:
        self.entries.update(writes)
        self._unsorted.extend(writes)

    def range(self, start: bytes, end: bytes) -> Run:
        """Entries with start <= key < end; the table must not change while the run is in use."""
        for key in self._unsorted:
            kind = self._kinds.get(key[0])
            if kind is None:
                kind = self._kinds[key[0]] = _Kind()
            kind.unsorted.append(key)
        self._unsorted.clear()
        entries = self.entries
        if start and end and start[0] == end[0]:
            kinds = [start[0]] if start[0] in self._kinds else []
        else:
            kinds = sorted(first for first in self._kinds if start[:1] <= bytes([first]) <= end[:1])
        for first in kinds:
            for key in self._kinds[first].range(start, end):
                yield key, entries[key]

    def chunks(self, size: int) -> Iterator[list[tuple[bytes, bytes | None]]]:
        """Lists of ``size`` entries in order of key, at least one, maybe empty. For a table that
        does not change, from any thread. Sorting holds the interpreter, so it is done by kind."""
        kinds: dict[int, list[bytes]] = {}
        for key in self.entries:
            kinds.setdefault(key[0], []).append(key)
        chunk: list[tuple[bytes, bytes | None]] = []
        for first in sorted(kinds):
            for key in sorted(kinds[first]):
                if len(chunk) == size:
                    yield chunk
                    chunk = []
                chunk.append((key, self.entries[key]))
        yield chunk


class _Kind:
    """The keys with one first byte."""

    __slots__ = ("_sorted", "unsorted")

    def __init__(self) -> None:
        self.unsorted: list[bytes] = []
        self._sorted = SortedSet()

    def range(self, start: bytes, end: bytes) -> Iterator[bytes]:
        if self.unsorted:
            self._sorted.update(self.unsorted)
            self.unsorted.clear()
        return self._sorted.irange(start, end, (True, False))


def sorted_range(writes: Writes, start: bytes, end: bytes) -> Run:
    """Entries with start <= key < end of a transaction's own, small, unsorted writes."""
    return iter(sorted(item for item in writes.items() if start <= item[0] < end))


def overlay(upper: Run, lower: Run) -> Run:
    """Both runs as one; where they have the same key, ``upper`` wins."""
    high, low = next(upper, None), next(lower, None)
    if high is None:  # as it mostly is, and then nothing more of this is paid for each pair
        return lower if low is None else chain((low,), lower)
    return chain((high,), upper) if low is None else _merged(high, upper, low, lower)


def _merged(first: Pair, upper: Run, low: Pair | None, lower: Run) -> Run:
    """Merge two runs that begin with these pairs."""
    for high in chain((first,), upper):
        while low is not None and low[0] < high[0]:
            yield low
            low = next(lower, None)
        if low is not None and low[0] == high[0]:
            low = next(lower, None)
        yield high
    if low is not None:
        yield low
        yield from lower


def visible(run: Run, limit: int) -> Iterator[tuple[bytes, bytes]]:
    """The run without tombstones, at most ``limit`` pairs unless 0. Raises DamagedRecord."""
    return islice(_values(run), limit) if limit else _values(run)


def _values(run: Run) -> Iterator[tuple[bytes, bytes]]:
    for key, value in run:
        if isinstance(value, DamagedRecord):
            raise value
        if value is not None:
            yield key, value


class StoredLevel(Protocol):
    """The lowest level."""

    def get(self, key: bytes) -> bytes | None: ...

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]: ...

    def run(self, start: bytes, end: bytes) -> Run: ...


class LeveledView(ReadTransaction):
    """Reads the memtable, then the frozen one, then what is stored."""

    __slots__ = ("_frozen", "_frozen_entries", "_memtable", "_memtable_entries", "_stored", "seq")

    def __init__(self, memtable: Memtable, frozen: Memtable, stored: StoredLevel, seq: int) -> None:
        self.seq = seq
        self._memtable = memtable
        self._memtable_entries = memtable.entries
        self._frozen = frozen
        self._frozen_entries = frozen.entries
        self._stored = stored

    def get(self, key: bytes) -> bytes | None:
        value = self._memtable_entries.get(key, _MISSING)
        if value is _MISSING:
            value = self._frozen_entries.get(key, _MISSING)
            if value is _MISSING:
                return self._stored.get(key)
        return value

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        newest, frozen = self._memtable_entries.get, self._frozen_entries.get
        found = [newest(key, _MISSING) for key in keys]
        if _MISSING in found:
            found = [
                frozen(key, _MISSING) if value is _MISSING else value
                for key, value in zip(keys, found, strict=True)
            ]
            missing = [at for at, value in enumerate(found) if value is _MISSING]
            stored = self._stored.get_many([keys[at] for at in missing])
            for at, value in zip(missing, stored, strict=True):
                found[at] = value
        return found

    def _run(self, start: bytes, end: bytes) -> Run:
        run = self._stored.run(start, end)
        if self._frozen_entries:
            run = overlay(self._frozen.range(start, end), run)
        return overlay(self._memtable.range(start, end), run)

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        return visible(self._run(start, end), limit)


class LeveledTransaction(LeveledView, Transaction):
    """A view with its own writes on top."""

    __slots__ = ("writes",)

    def __init__(self, memtable: Memtable, frozen: Memtable, stored: StoredLevel, seq: int) -> None:
        # What LeveledView does, without the call: there is one of these for each change of a name.
        self.seq = seq
        self._memtable = memtable
        self._memtable_entries = memtable.entries
        self._frozen = frozen
        self._frozen_entries = frozen.entries
        self._stored = stored
        self.writes: Writes = {}

    def get(self, key: bytes) -> bytes | None:
        # The levels of LeveledView.get once more: this is the most frequent call of a metadata
        # operation.
        value = self.writes.get(key, _MISSING)
        if value is _MISSING:
            value = self._memtable_entries.get(key, _MISSING)
            if value is _MISSING:
                value = self._frozen_entries.get(key, _MISSING)
                if value is _MISSING:
                    return self._stored.get(key)
        return value

    get_loosely = get  # without a call between

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self.get(key) for key in keys] if self.writes else super().get_many(keys)

    def put(self, key: bytes, value: bytes) -> None:
        if not 0 < len(key) <= MAX_KEY_BYTES or len(value) > MAX_VALUE_BYTES:
            check_pair(key, value)
        self.writes[key] = value

    def delete(self, key: bytes) -> None:
        check_key(key)
        self.writes[key] = None

    def add(self, key: bytes, delta: int) -> None:
        value = int.from_bytes(self.get(key) or b"", "little", signed=True) + delta
        self.writes[key] = value.to_bytes(8, "little", signed=True)

    def patch(self, key: bytes, offset: int, part: bytes) -> None:
        self.writes[key] = patched(self.get(key), offset, part)

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        run = self._run(start, end)
        return visible(
            overlay(sorted_range(self.writes, start, end), run) if self.writes else run, limit
        )
