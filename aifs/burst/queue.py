"""Which undrained files are drained next, and when. Pure: callers give times of one clock (s)."""

import math
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from aifs.layout.interleaved import CHUNK

BATCH_FILES = 256
BATCH_BYTES = 64 << 20

PACK_FILES = 8192
PACK_S = 10.0
"""With ``packs``, small files become ready together, once in so many seconds."""

_BACK_OFF_MIN_S = 1.0
_BACK_OFF_MAX_S = 60.0
_NEVER = float("inf")
_LEFT_MAX = 1000
_COST = 20
"""A redrained file waits so many times its drain's time at the best rate seen."""

_GROWTH, _GROWN_MAX = 4, 3
"""Each further drain waits so many times longer, at most so often."""

_PAUSED_MAX = 0.9
"""It waits at most this part of the deadline, so that it is drained before that."""

_DRAINS_KEPT = 4096
"""Drains that are remembered."""


class _Drained(NamedTuple):
    """The last drain of a file."""

    ended: float
    pause_s: float
    """How long after that the next one may begin."""
    times: int
    """How many drains it has followed, each soon after the one before; at most _GROWN_MAX."""


class Rank(IntEnum):
    """What goes first."""

    REQUESTED = 0  # somebody waits
    PUBLISHED = 1  # part of a checkpoint that has got its name
    USUAL = 2


@dataclass(slots=True)
class QueueEntry:
    """An undrained file: *ready* if ``due``, *held* while ``withheld``."""

    ino: int
    """Its inode number."""
    size: int
    """In bytes, as far as is known."""
    since: float
    """The time from which its oldest undrained byte counts."""
    ready_at: float
    """When it may be drained; never, while somebody has it open for writing."""
    rank: Rank = Rank.USUAL
    """Its place in the order."""
    failures: int = 0
    """How often its drain has failed, one time after the other."""
    due: bool = False
    """It is ready."""
    taken: bool = False
    """It is being drained."""
    again: bool = False
    """It has been closed since it was taken."""
    left: bool = False
    """It has lost its name, or has left the burst tier, since it was taken."""
    withheld: bool = False
    """Somebody else drains it."""
    placed: int = 0
    """The number of its entry in one of the heaps; other entries of it there do not count."""


class Queue:
    """All closed undrained files.

    Each is *ready* (by rank, then age), *later*, *held* (open for writing, until ``closed``, or
    withheld, until ``give_back``) or *taken*. Methods take O(log n) a file.
    """

    def __init__(self, delay_s: float, deadline_s: float) -> None:
        """``delay_s``: from the last close; not for those that are older than ``deadline_s``."""
        self.size = 0
        """Bytes of all files in it."""
        self.held = 0
        """How many files are held."""
        self.delay_s = delay_s
        self.packs = False
        """Small files that are drained together become one object, which never grows: so batches
        have up to PACK_FILES, and small files wait for each other."""
        self._deadline_s = deadline_s
        self._placements = 0
        """Counts the entries of the heaps."""
        self._left = 0
        """At most so many things in the heaps do not count any more."""
        self._entries: OrderedDict[int, QueueEntry] = OrderedDict()  # by ino, the oldest first
        self._ready: list[tuple[Any, ...]] = []
        """A heap of (rank, since, ino, ``placed``)."""
        self._later: list[tuple[Any, ...]] = []
        """A heap of (ready at, ino, ``placed``)."""
        self._drains: OrderedDict[int, _Drained] = OrderedDict()  # by ino, the oldest first

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ino: int) -> bool:
        return ino in self._entries

    def oldest_age(self, now: float) -> float:
        """Seconds since when the oldest file is undrained; 0 if there is none."""
        return max(now - next(iter(self._entries.values())).since, 0.0) if self._entries else 0.0

    def late(self, now: float) -> bool:
        """Whether the oldest file is beyond the deadline."""
        return self.oldest_age(now) > self._deadline_s

    def ready_in(self, now: float) -> float:
        """Seconds until a file may be drained: 0, or perhaps infinite."""
        for heap in (self._ready, self._later):
            while heap and self._placed(heap[0]) is None:
                heappop(heap)
        if self._ready:
            return 0.0
        return max(self._later[0][0] - now, 0.0) if self._later else _NEVER

    # --- what comes in ---

    def add(self, ino: int, size: int, since: float, now: float) -> None:
        """Add a file that an earlier mount left, before all others, the oldest first."""
        if ino not in self._entries:
            self._insert(QueueEntry(ino, size, since, now))

    def closed(self, ino: int, size: int, now: float) -> float:
        """Nobody has the file open for writing any more. Returns when it may be drained."""
        entry = self._entries.get(ino)
        if entry is None:
            entry = QueueEntry(ino, size, now, _NEVER)
            entry.ready_at = self._ready_at(entry, now)
            self._insert(entry)
            return entry.ready_at
        self.size += size - entry.size
        entry.size = size
        if entry.taken:
            entry.again = True
        elif entry.ready_at == _NEVER and not entry.withheld:
            self._move(entry, self._ready_at(entry, now), entry.rank)
        return entry.ready_at

    def withhold(self, ino: int, size: int, now: float) -> bool:
        """``closed``, but drained by the caller. False, with no change, if somebody waits for
        it."""
        entry = self._entries.get(ino)
        if entry is None:
            entry = QueueEntry(ino, size, now, _NEVER, withheld=True)
            self._insert(entry)
            return True
        if entry.rank is Rank.REQUESTED and not entry.withheld:
            return False
        self.size += size - entry.size
        entry.size, entry.withheld, entry.again = size, True, entry.taken
        self._move(entry, _NEVER, entry.rank)
        return True

    @property
    def withheld(self) -> int:
        """How many files are withheld. Takes O(n)."""
        return sum(entry.withheld and not entry.taken for entry in self._entries.values())

    def withholds(self, ino: int) -> bool:
        entry = self._entries.get(ino)
        return entry is not None and entry.withheld

    def give_back(self, ino: int, now: float) -> float:
        """It is withheld no more. Returns when it may be drained."""
        entry = self._entries.get(ino)
        if entry is None or not entry.withheld:
            return _NEVER
        entry.withheld = False
        if not entry.taken:
            self._move(entry, self._ready_at(entry, now), entry.rank)
        return entry.ready_at

    def drained(self, ino: int) -> bool:
        """The caller that has withheld it has drained it; whether it is out of the queue now."""
        entry = self._entries.get(ino)
        if entry is None or not entry.withheld:
            return False
        entry.withheld = False
        return self.unlinked(ino)

    def prefer(self, inos: Iterable[int], rank: Rank, now: float) -> float:
        """Drain these earlier: requested ones at once, published ones after ``delay_s``. Returns
        when the first of those that had to wait longer may be drained. Unknown ones count as
        requested, and may be open."""
        first = _NEVER
        for ino in inos:
            entry = self._entries.get(ino)
            if entry is None:
                if rank is Rank.REQUESTED:
                    self._insert(QueueEntry(ino, 0, now, now, rank))
                    first = now
            elif rank < entry.rank or (rank is Rank.REQUESTED and not entry.taken):
                at = entry.ready_at
                if rank is Rank.REQUESTED and not entry.withheld:
                    at = now
                elif at != _NEVER and not entry.failures:
                    at = min(at, now + self.delay_s)
                if at < entry.ready_at:
                    first = min(first, at)
                self._move(entry, at, min(rank, entry.rank))
        return first

    def unlinked(self, ino: int) -> bool:
        """It has no name any more; whether it is out of the queue with that."""
        entry = self._entries.get(ino)
        if entry is None:
            return False
        if entry.taken:
            entry.left = True
            return False
        self._forget(entry)
        return True

    def hurry(self, now: float, wait_s: float = 0.0) -> None:
        """Let files that wait after a close or drain be drained within ``wait_s``."""
        for item in list(self._later):
            entry = self._placed(item)
            if entry is not None and item[0] > now + wait_s and not entry.failures:
                self._move(entry, now + wait_s, entry.rank)

    def try_again(self, now: float) -> None:
        """All that wait because they could not be drained may be."""
        for item in list(self._later):
            entry = self._placed(item)
            if entry is not None and item[0] > now and entry.failures:
                self._move(entry, now, entry.rank)

    # --- what goes out ---

    def take(self, now: float) -> list[QueueEntry]:
        """The next files in order: many small ones, or one large one; empty if none is ready."""
        later, ready = self._later, self._ready
        files = PACK_FILES if self.packs else BATCH_FILES
        moved = 0  # many may become ready at the same moment
        while later and later[0][0] <= now and moved < 2 * files:
            entry = self._placed(heappop(later))
            moved += 1
            if entry is not None:
                entry.due = True
                heappush(ready, (entry.rank, entry.since, entry.ino, entry.placed))
        batch: list[QueueEntry] = []
        total = 0
        while ready and len(batch) < files:
            entry = self._placed(ready[0])
            if entry is not None:
                total += entry.size
                if batch and total > BATCH_BYTES:
                    break
            heappop(ready)
            if entry is None:
                continue
            entry.taken, entry.due, entry.again, entry.left = True, False, False, False
            batch.append(entry)
        return batch

    def done(self, ino: int, now: float) -> bool:
        """It is drained, or gone; False if it was closed meanwhile, and is looked at again."""
        entry = self._entries[ino]
        if entry.again:
            self.again(ino, now)
            return False
        self._forget(entry)
        return True

    def retry(self, ino: int, now: float) -> float:
        """Retry it after a while, longer each time; returns seconds."""
        entry = self._entries[ino]
        pause_s = min(_BACK_OFF_MIN_S * 2**entry.failures, _BACK_OFF_MAX_S)
        self._give_back(entry, now + pause_s, min(entry.failures + 1, 16))
        return pause_s

    def again(self, ino: int, now: float) -> None:
        """It has been changed meanwhile, and closed."""
        entry = self._entries[ino]
        self._give_back(entry, self._ready_at(entry, now), 0)

    def hold(self, ino: int, now: float) -> None:
        """Somebody may write to it until ``closed``."""
        if self._entries[ino].again or self._entries[ino].left:
            self.again(ino, now)
        else:
            self._give_back(self._entries[ino], _NEVER, 0)

    # --- files that change again and again ---

    def wrote(self, ino: int, seconds: float, now: float) -> None:
        """A drain has ended, maybe in vain, before ``done`` or ``again``. Its bytes are worth
        ``seconds`` of the rate that drains can have.

        The next may begin after 20 times as many seconds: at most a twentieth of that rate.
        Repeated drains wait 80, 320 and 1,280 times as long, but always less than the deadline.
        """
        entry, last = self._entries[ino], self._drains.pop(ino, None)
        times = 0
        if last is not None and entry.since - last.ended < self._deadline_s:
            times = min(last.times + 1, _GROWN_MAX)
        if _COST * seconds * _GROWTH**_GROWN_MAX <= self.delay_s:
            return  # it never waits for that
        pause_s = min(_COST * seconds * _GROWTH**times, _PAUSED_MAX * self._deadline_s)
        self._drains[ino] = _Drained(now, pause_s, times)
        if len(self._drains) > _DRAINS_KEPT:
            self._drains.popitem(last=False)

    def paused(self, now: float) -> dict[int, float]:
        """By inode number, when files that wait after a recent drain may be drained."""
        found = {}
        for ino in self._drains:
            entry = self._entries.get(ino)
            if entry is not None and not entry.failures and not entry.taken:
                if now + self.delay_s < entry.ready_at < _NEVER:
                    found[ino] = entry.ready_at
        return found

    # --- inside ---

    def _ready_at(self, entry: QueueEntry, now: float) -> float:
        if entry.rank is Rank.REQUESTED:
            return now
        last = self._drains.get(entry.ino)
        paused_to = now if last is None else last.ended + last.pause_s
        if now - entry.since > self._deadline_s:
            return max(paused_to, now)
        at = max(paused_to, now + self.delay_s)
        waits = self.packs and entry.size < CHUNK and entry.rank is Rank.USUAL
        return math.ceil(at / PACK_S) * PACK_S if waits else at

    def _insert(self, entry: QueueEntry) -> None:
        self._entries[entry.ino] = entry
        self.size += entry.size
        self._place(entry)

    def _forget(self, entry: QueueEntry) -> None:
        self._remove(entry)
        del self._entries[entry.ino]
        self.size -= entry.size

    def _give_back(self, entry: QueueEntry, at: float, failures: int) -> None:
        assert entry.taken
        entry.taken = False
        entry.ready_at = _NEVER if entry.withheld else at
        entry.failures = failures
        self._place(entry)

    def _move(self, entry: QueueEntry, at: float, rank: Rank) -> None:
        self._remove(entry)
        entry.rank, entry.ready_at = rank, at
        self._place(entry)

    def _place(self, entry: QueueEntry) -> None:
        if entry.taken:
            return
        self._placements += 1
        entry.placed = self._placements
        if entry.ready_at == _NEVER:
            self.held += 1
        else:
            entry.due = False
            heappush(self._later, (entry.ready_at, entry.ino, entry.placed))

    def _remove(self, entry: QueueEntry) -> None:
        if entry.taken:
            return
        entry.placed = 0
        if entry.ready_at == _NEVER:
            self.held -= 1
        self._left += 1
        if self._left > _LEFT_MAX + len(self._entries):
            self._left = 0
            for heap in (self._ready, self._later):
                heap[:] = [item for item in heap if self._placed(item) is not None]
                heapify(heap)

    def _placed(self, item: tuple[Any, ...]) -> QueueEntry | None:
        entry = self._entries.get(item[-2])
        return entry if entry is not None and entry.placed == item[-1] else None
