"""The copies in the burst tier: how many bytes are dirty and clean on each device, and which copies
may be evicted.
"""

from collections import OrderedDict
from dataclasses import dataclass, field


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
    oldest_first: OrderedDict[int, int] = field(
        default_factory=OrderedDict
    )  # id to bytes of what may be evicted

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
    made_ahead: bool = False
    """See ``Ledger.made_ahead``."""
    used_up: bool = False
    """See ``Ledger.used_up``."""


class Ledger:
    """The state of each copy, by id. All operations take constant time, ``victims`` as long as its
    answer.

    A copy may be said to be open or pinned before it is said to be dirty or clean, and stays so
    after that; ``gone`` forgets it all.
    """

    def __init__(self) -> None:
        self.drained_bytes = 0
        """Of all copies that were dirty and became clean."""
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
        """The copy belongs to no file any more. Returns its device and bytes, if they were
        known.
        """
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
            copy.opens, copy.used_up = 1, False
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
            copy.used_up = False
            if copy_id in copy.totals.oldest_first:
                copy.totals.oldest_first.move_to_end(copy_id)

    def made_ahead(self, copy_id: int) -> None:
        """It was made before somebody needed it, by whom will say when it is ``used_up``."""
        self._known(copy_id).made_ahead = True

    def used_up(self, copy_id: int) -> None:
        """Nobody needs it soon, if it was ``made_ahead``: it is the first to be evicted, as soon as
        it is closed, until it is used again. Any other copy keeps its place."""
        copy = self._copies.get(copy_id)
        if copy is not None and copy.made_ahead and copy.totals is not None:
            copy.used_up = True
            if copy_id in copy.totals.oldest_first:
                copy.totals.oldest_first.move_to_end(copy_id, last=False)

    def victims(self, server: int, wanted: int) -> list[int]:
        """Ids of copies of together at least ``wanted`` bytes, or all there are; least recently
        used first.
        """
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
            if copy.used_up:
                totals.oldest_first.move_to_end(copy_id, last=False)
