"""The copies in the burst tier: dirty and clean bytes on each device, candidates for eviction; and
the room on a device. Arithmetic alone."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from aifs.core.config import BurstConfig
from aifs.core.log import logger
from aifs.core.units import describe_size
from aifs.data.server import DataServer
from aifs.data.storage import Space
from aifs.layout.placement import ACTIVE

_log = logger(__name__)


@dataclass(slots=True)
class Totals:
    """Of one device, in bytes."""

    server: int
    """Its number."""
    dirty: int = 0
    """Of copies that hold the newest bytes."""
    dirty_copies: int = 0
    """How many these are."""
    writers: int = 0  # copies that are dirty and open
    clean: int = 0
    """Of clean copies, too."""
    pinned: int = 0
    """Of copies that must not be evicted; they count in ``dirty`` or ``clean``, too."""
    evictable: int = 0
    """Of clean copies that are neither open nor pinned."""
    # Id to bytes of what may be evicted.
    oldest_first: OrderedDict[int, int] = field(default_factory=OrderedDict)

    @property
    def used(self) -> int:
        return self.dirty + self.clean


@dataclass(slots=True)
class _Copy:
    totals: Totals | None = None
    """Those of its device; None before it is said to be dirty or clean."""
    bytes: int = 0
    """That it takes."""
    dirty: bool = False
    """Whether it has the newest bytes."""
    opens: int = 0
    """How many have it open."""
    pinned: bool = False
    """See ``Ledger.pin``."""


class Ledger:
    """The state of each copy, by id, in constant time (``victims``: by its answer). Open or pinned
    may come before dirty or clean, and stays; ``gone`` forgets all."""

    def __init__(self) -> None:
        self.drained_bytes = 0
        """Of all copies that were dirty and became clean."""
        self.grown_bytes = 0
        """By which copies have grown since they were first seen, by any writer."""
        self._copies: dict[int, _Copy] = {}
        self._open: dict[int, _Copy] = {}  # those of them that are
        self._devices: dict[int, Totals] = {}

    def of(self, server: int) -> Totals:
        totals = self._devices.get(server)
        if totals is None:
            totals = self._devices[server] = Totals(server)
        return totals

    def bytes_of(self, copy_id: int) -> int:
        copy = self._copies.get(copy_id)
        return copy.bytes if copy else 0

    def is_clean(self, copy_id: int) -> bool:
        """Whether it is known as a copy of bytes on the data servers."""
        copy = self._copies.get(copy_id)
        return copy is not None and copy.totals is not None and not copy.dirty

    def open_copies(self) -> list[int]:
        """Their ids."""
        return list(self._open)

    def writer_on(self, copy_id: int) -> int | None:
        """The device of a copy that is dirty and open; None: it is not."""
        copy = self._open.get(copy_id)
        return copy.totals.server if copy and copy.dirty and copy.totals is not None else None

    def begun(self, copy_id: int, server: int) -> None:
        """A new copy, which is empty: dirty and opened."""
        totals = self.of(server)
        totals.dirty_copies += 1
        totals.writers += 1
        self._copies[copy_id] = self._open[copy_id] = _Copy(totals, 0, True, 1)

    def dirty(self, copy_id: int, server: int, length: int) -> None:
        """The copy holds the newest bytes; also called when its length is found to have changed."""
        copy, totals = self._known(copy_id), self.of(server)
        if not copy.dirty or copy.bytes != length or copy.totals is not totals:
            if copy.totals is not None:
                self.grown_bytes += max(0, length - copy.bytes)
            self._leave(copy_id, copy)
            copy.totals, copy.bytes, copy.dirty = totals, length, True
            self._enter(copy_id, copy)

    def clean(self, copy_id: int, server: int, length: int) -> None:
        """All its bytes lie on the data servers, too. It is the most recently used one."""
        copy = self._known(copy_id)
        if copy.dirty:
            self.drained_bytes += length
        self._leave(copy_id, copy)
        copy.totals, copy.bytes, copy.dirty = self.of(server), length, False
        self._enter(copy_id, copy)

    def gone(self, copy_id: int) -> tuple[int, int] | None:
        """The copy is no file's any more. Returns its device and bytes, if known."""
        copy = self._copies.pop(copy_id, None)
        if copy is None:
            return None
        self._open.pop(copy_id, None)
        if copy.totals is None:
            return None
        self._leave(copy_id, copy)
        return copy.totals.server, copy.bytes

    def opened(self, copy_id: int) -> None:
        copy = self._known(copy_id)
        if copy.opens == 0:
            self._leave(copy_id, copy)
            copy.opens = 1
            self._open[copy_id] = copy
            self._enter(copy_id, copy)
        else:
            copy.opens += 1

    def closed(self, copy_id: int) -> bool:
        """Returns whether nobody has it open any more. It is the most recently used one."""
        copy = self._open.get(copy_id)
        if copy is None:
            return True  # gone meanwhile
        if copy.opens > 1:
            copy.opens -= 1
            return False
        del self._open[copy_id]
        self._leave(copy_id, copy)
        copy.opens = 0
        self._enter(copy_id, copy)
        return True

    def pin(self, copy_id: int, pinned: bool) -> None:
        """Repeating its state leaves its place in the order of eviction."""
        known = self._copies.get(copy_id)
        if pinned != (known is not None and known.pinned):
            copy = self._known(copy_id)
            self._leave(copy_id, copy)
            copy.pinned = pinned
            self._enter(copy_id, copy)

    def touch(self, copy_id: int) -> None:
        """It is the most recently used one."""
        copy = self._copies.get(copy_id)
        if copy is not None and copy.totals is not None:
            if copy_id in copy.totals.oldest_first:
                copy.totals.oldest_first.move_to_end(copy_id)

    def victims(self, server: int, wanted: int) -> list[int]:
        """Ids of least recently used copies of ``wanted`` bytes together, or all."""
        chosen = []
        for copy_id, length in self.of(server).oldest_first.items():
            if wanted <= 0:
                break
            chosen.append(copy_id)
            wanted -= length
        return chosen

    def _known(self, copy_id: int) -> _Copy:
        copy = self._copies.get(copy_id)
        if copy is None:
            copy = self._copies[copy_id] = _Copy()
        return copy

    # The copy is taken out of the figures, changed, and put in again.

    def _leave(self, copy_id: int, copy: _Copy) -> None:
        totals = copy.totals
        if totals is None:
            return
        if copy.pinned:
            totals.pinned -= copy.bytes
        if copy.dirty:
            totals.dirty -= copy.bytes
            totals.dirty_copies -= 1
            totals.writers -= copy.opens > 0
            return
        totals.clean -= copy.bytes
        if not copy.opens and not copy.pinned:
            totals.evictable -= copy.bytes
            del totals.oldest_first[copy_id]

    def _enter(self, copy_id: int, copy: _Copy) -> None:
        totals = copy.totals
        if totals is None:
            return
        if copy.pinned:
            totals.pinned += copy.bytes
        if copy.dirty:
            totals.dirty += copy.bytes
            totals.dirty_copies += 1
            totals.writers += copy.opens > 0
            return
        totals.clean += copy.bytes
        if not copy.opens and not copy.pinned:
            totals.evictable += copy.bytes
            totals.oldest_first[copy_id] = copy.bytes


_RESERVE_PART = 0.05
_EVICT_AT = 0.75
"""Where eviction begins between the marks, so that clean copies keep no new file out."""

_FULL = 1 << 20
"""Bytes left with which a device is called full."""


class Device:
    """One device: its filesystem as last seen, and all known changes since.

    The marks are fractions of the filesystem, and of a configured ``share`` of the device in bytes;
    the fuller one counts. Others' use counts as used, clean blocks, which give way, as free.
    """

    def __init__(
        self,
        server: DataServer,
        config: BurstConfig,
        ledger: Ledger,
        block_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.block_bytes = block_bytes
        """Bytes that clean blocks take on it."""
        self.server = server
        self.totals = ledger.of(server.id)
        """The space that copies on it take, kept up to date by the ledger."""
        self.share = 0
        """Bytes that copies on this device may take; 0: all there is."""
        self.admitted = 0
        """New files since the last look."""
        self._config = config
        self._ledger = ledger
        self._size = 0
        """Bytes of the filesystem, without those that it keeps for root, as last seen."""
        self._available = 0
        """Bytes that were free there then, with those of clean blocks."""
        self._seen_used = 0
        """Bytes that copies were known to take there then."""
        self._promised: dict[int, int] = {}
        """By id, the bytes that a new copy is expected to take."""
        self._leaving: dict[int, int] = {}
        """By id, the bytes of copies that belong to no file any more and are still there."""
        self._leaving_bytes = 0
        """All of these together."""
        self._calm_used = -1
        """Bytes of copies up to which no mark can have been passed. -1: unknown."""
        self._full = False
        """Nothing was free above the reserve at the last look, as logged."""

    # --- what happens ---

    def look(self, space: Space | None) -> None:
        """Take over the figures of the filesystem; None: they cannot be had."""
        self.admitted = 0
        if space is not None:
            self._size = space.total - space.free + space.available
            self._available = space.available + self.block_bytes()
            self._seen_used = self.used
            self._calm_used = self.used + min(self._up_to(self._config.low_water), self._room() - 1)
            self._say_whether_full()

    def promise(self, copy_id: int, expected: int) -> None:
        """Keep room for a copy that is going to have so many bytes; 0: no longer."""
        if expected:
            self._promised[copy_id] = expected
        else:
            self._promised.pop(copy_id, None)

    def leaving(self, copy_id: int, length: int) -> None:
        """A copy that the ledger knows no more takes its space until ``left``."""
        self._leaving[copy_id] = length
        self._leaving_bytes += length

    def left(self, copy_id: int) -> None:
        """The copy has been deleted."""
        self._leaving_bytes -= self._leaving.pop(copy_id, 0)
        self._promised.pop(copy_id, None)

    def _say_whether_full(self) -> None:
        if not self._full and self._available <= _FULL:
            self._full = True
            _log.warning(
                "%s (%s) is full: writers of files that are open there get ENOSPC, new files go to "
                "the data servers",
                self.server.name,
                self.server.address,
            )
        elif self._full and self._available > self.reserve:
            self._full = False
            _log.info("%s (%s) is no longer full", self.server.name, self.server.address)

    # --- how it stands ---

    @property
    def usable(self) -> bool:
        server = self.server
        return (
            self._size > 0
            and server.standing == ACTIVE
            and not server.absent
            and server.health.usable
        )

    @property
    def writers(self) -> int:
        """About how many files are being written."""
        return self.totals.writers + self.admitted

    @property
    def used(self) -> int:
        """Bytes of copies, also of those that are still to be deleted."""
        return self.totals.used + self._leaving_bytes

    @property
    def reserve(self) -> int:
        """Free bytes that new files leave to those being written."""
        return min(self._config.reserve, int(self._size * _RESERVE_PART))

    def _available_now(self) -> int:
        return self._available - self.used + self._seen_used

    def _promised_bytes(self) -> int:
        if not self._promised:
            return 0
        return sum(
            max(0, length - self._ledger.bytes_of(copy_id))
            for copy_id, length in self._promised.items()
        )

    @property
    def calm(self) -> bool:
        """Whether copies are below the low mark by the last look: the rest need not be computed."""
        totals = self.totals
        return (
            totals.dirty + totals.clean + self._leaving_bytes <= self._calm_used
            and not self._promised
        )

    def _up_to(self, mark: float) -> int:
        """Bytes missing to a mark; negative above it."""
        room = self._available_now() - int((1 - mark) * self._size)
        if self.share:
            room = min(room, int(mark * self.share) - self.used)
        return room

    def _room(self) -> int:
        room = self._available_now() - self.reserve
        return min(room, self.share - self.used) if self.share else room

    def room(self) -> int:
        """Bytes that new files may take, up to the reserve and the share."""
        return self._room() - self._promised_bytes()

    def room_to_high(self) -> int:
        """Bytes to the mark above which no new file is admitted; negative above it."""
        return self._up_to(self._config.high_water) - self._promised_bytes()

    def room_for_blocks(self) -> int:
        """Bytes for clean blocks: those free below the low mark, or their share if larger, up to
        where eviction begins."""
        below = self._up_to(self._config.low_water)
        room = max(below, min(self._block_share(), self._up_to(self._evict_mark)))
        return max(0, min(room, self._room()) - self._promised_bytes())

    def _block_share(self) -> int:
        """Half of clean copies and blocks together; copies give way for it."""
        return max(0, self._up_to(self._config.low_water) + self.totals.evictable) // 2

    def admits(self, expected: int, must: bool = False) -> bool:
        """Whether a new file of this size may go here; ``must``: nowhere else, so above the high
        mark."""
        if self.calm and not expected:
            return self.usable
        return self.room_for(expected, must) > 0

    def room_for(self, expected: int, must: bool = False) -> int:
        """``room`` if a new file of that size may go here, else 0."""
        room = self.room()
        is_admitted = room > expected and (must or self.room_to_high() > 0)
        return room if is_admitted and self.usable else 0

    @property
    def _evict_mark(self) -> float:
        """Where eviction begins."""
        low, high = self._config.low_water, self._config.high_water
        return low + _EVICT_AT * (high - low)

    def lacks(self, size: int) -> int:
        """Bytes of clean copies to evict for a new file of this size, if there are as many."""
        missing = size + 1 - self.room() - self._leaving_bytes
        return max(0, min(missing, self.totals.evictable))

    def may_come_to_admit(self, size: int, held: int) -> bool:
        """Whether a new file of this size will have room after all drains and evictions, except
        pinned copies, and ``held`` bytes. Files open in drains count as room."""
        coming = self.used - self.totals.pinned - held
        return self.usable and self.room() + coming > size

    def refusal(self) -> str:
        """Why no new file goes here, not even a small one; '' if they do."""
        if self.admits(0):
            return ""
        if self.server.standing != ACTIVE:
            return f"it is {self.server.standing}"
        if not self.usable:
            return "it fails" if self.server.last_error else "its space is not known"
        if self._full:
            return "it is full"
        if self.room_to_high() <= 0:
            return f"it is above the high-water mark, {self._config.high_water:.0%}"
        return f"nothing is free above the reserve, {describe_size(self.reserve)}"

    def pressure(self) -> float:
        """From 0 to 1 while undrained bytes go from the low mark to the high one."""
        if self.calm:
            return 0.0
        dirty = self.totals.dirty
        high = dirty + max(0, self.room_to_high() + self.totals.evictable + self._leaving_bytes)
        low = high * self._config.low_water / self._config.high_water
        return 0.0 if dirty <= low else (dirty - low) / (high - low)

    def excess(self) -> int:
        """Bytes of clean copies to evict down to the low mark; 0 until it is time."""
        if not self.totals.evictable or self.calm:
            return 0
        leaving = self._leaving_bytes - min(self.block_bytes(), self._block_share())
        if self._up_to(self._evict_mark) + leaving >= 0:
            return 0
        excess = -self._up_to(self._config.low_water) - leaving
        return max(0, min(excess, self.totals.evictable))

    def status(self) -> dict[str, Any]:
        """For ``aifs status``; bytes, why new files are not admitted, and its fault, or ''."""
        limit = min(self._size, self.share) if self.share else self._size
        return {
            "id": self.server.number,
            "path": self.server.address,
            "state": "full" if self._full else self.server.state,
            "used_bytes": self.used,
            "free_bytes": max(0, self._available_now()),
            "dirty_bytes": self.totals.dirty,
            "clean_bytes": self.totals.clean,
            "pinned_bytes": self.totals.pinned,
            "block_bytes": self.block_bytes(),
            "high_water_bytes": int(self._config.high_water * limit),
            "low_water_bytes": int(self._config.low_water * limit),
            "refuses": self.refusal(),
            "last_error": "" if self.usable else self.server.last_error,
        }
