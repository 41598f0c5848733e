"""The trash in the background: entries go for good in time, or earlier for room (meta/trash.py).

An entry that goes becomes an orphan, or a doomed tree, in one transaction, and is removed like
others. While less than SPARE of a data server is free, or the metadata are short of space, the
trash *gives way*: first entries go now. They are deleted before the next look, so it never gives
much more than needed. If that made no room (others fill the servers, or bytes are not free yet), it
stops until the figures change; last figures of silent servers do not count.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import trio

from aifs.core import clock, faults
from aifs.core.clock import careful_clock
from aifs.core.errors import NotFound
from aifs.core.log import logger
from aifs.core.units import describe_size
from aifs.core.upkeep import NEVER_S
from aifs.files.drain import Drain
from aifs.files.services import Services
from aifs.layout.placement import ACTIVE
from aifs.meta import keys, restoring
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import entries_of
from aifs.meta.slices import Walk
from aifs.meta.trash import UNKNOWN, Entry
from aifs.upkeep.doomed import DoomedTrees
from aifs.upkeep.trash_rules import TrashRules

_log = logger(__name__)

SPARE = 0.05
"""The part of each data server that the trash leaves free."""

INTERVAL_S = 10.0
"""Between two passes, where there is a trash."""

AT_ONCE = 32
"""Entries that one transaction empties: a millisecond in which no request is answered."""

_GIVEN_AT_ONCE = 1024  # entries, before their effect is looked at
_LOG_INTERVAL_S = 60.0

_EMPTIED = faults.declare(
    "vfs.trash.emptied", "entries of the trash are orphans and doomed trees now"
)


class Trash:
    """Used from one trio thread; ``work`` runs on the host that has the role."""

    def __init__(
        self,
        services: Services,
        drain: Drain,
        doomed: DoomedTrees,
        rules: TrashRules,
    ) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._drain = drain
        self._collector = services.collector
        self._doomed = doomed
        self._rules = rules
        self._upkeep = services.upkeep
        self.now_ns = careful_clock()
        """The time of day by which entries are old."""
        self._is_loaded = False
        """Whether trees that earlier mounts have left are among those to be added up."""
        self._given_entries = self._given_bytes = 0
        """Entries that have gone before their time, since the mount."""
        self._log_again_s = -math.inf  # by trio's clock
        self._in_vain = 0
        """Bytes that were lacking as before when some had been emptied."""

    async def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``: the trash, and what went early since the mount."""
        entries, size = await self._engine.view(_count)
        return {
            "entries": entries,
            "bytes": size,
            "given_entries": self._given_entries,
            "given_bytes": self._given_bytes,
        }

    # --- in the background ---

    async def work(self) -> float:
        """Empty entries that are due; in how many seconds to look again."""
        await self.expire()
        await self.add_up()
        await self.give_way()
        entries, _ = await self._engine.view(_count)
        return INTERVAL_S if entries or self._rules.are_some else NEVER_S

    async def expire(self) -> None:
        """Empty entries that are older than their directory keeps them."""
        due = list[Entry]()
        async for entry, _ in self._turns():
            if entry.until_ns > self.now_ns():
                break
            due.append(entry)
            if len(due) == AT_ONCE:
                await self.empty(due)
                due = []
        await self.empty(due)

    def _turns(self) -> Walk:
        share = self._upkeep.share
        return Walk(self._engine, b"U", restoring.read_turns, AT_ONCE, share=share)

    async def add_up(self) -> None:
        """Trees in the trash get their sizes."""
        if not self._is_loaded:
            async for entry, _ in self._turns():
                if entry.size == UNKNOWN:
                    self._doomed.kept[entry.ino] = None
            self._is_loaded = True
        while self._doomed.kept:
            ino = next(iter(self._doomed.kept))
            with suppress(NotFound):
                entry = await self._engine.view(restoring.entry_of, ino)
                if entry.size == UNKNOWN:
                    size = await tree_size(self._engine, ino)
                    await self._engine.transact(restoring.put_size, entry, size)
            self._doomed.kept.pop(ino, None)

    async def give_way(self) -> None:
        """Empty entries while room is short and that makes some: unchanged figures mean that others
        take it, or it is not free yet; unless a writer or drain found none since."""
        is_refused, lacking = self._servers.is_refused_room, await self._lacking()
        while lacking and (is_refused or lacking != self._in_vain):
            some = await self._first(lacking)
            if not some:
                return
            size = await self.empty(some)
            self._given_entries += len(some)
            self._given_bytes += size
            if trio.current_time() >= self._log_again_s:
                self._log_again_s = trio.current_time() + _LOG_INTERVAL_S
                _log.warning(
                    "the trash gives way, as there is no room for new files: %d entries, %s, have "
                    "gone before their time since the mount",
                    self._given_entries,
                    describe_size(self._given_bytes),
                )
            await self._doomed.empty()
            await self._collector.drain(urgent=True)
            self._drain.try_again()
            before, is_refused = lacking, self._servers.is_refused_room
            lacking = await self._lacking()
            is_in_vain = lacking >= before and not (is_refused or self._engine.short_of_space)
            self._in_vain = lacking if is_in_vain else 0

    async def _lacking(self) -> int:
        """Bytes missing to SPARE free on all data servers; 0: there is room. Where a large file
        found none, as much more."""
        refused, self._servers.is_refused_room = self._servers.is_refused_room, False
        # Of one that does not answer it is not known how full it is.
        all_of = self._servers.capacity()
        servers = [one for one in all_of if one.standing == ACTIVE and not one.hangs]
        spaces = await self._servers.spaces(servers)
        lacking = {
            server.storage.pool: int(SPARE * space.total) - (0 if refused else space.available)
            for server, space in zip(servers, spaces, strict=True)
            if space is not None
        }
        # Space comes back on all of them.
        worst = max(lacking.values(), default=0) * len(lacking)
        return max(worst, int(self._engine.short_of_space))

    async def _first(self, wanted: int) -> list[Entry]:
        """The entries that expire first, enough of them to free ``wanted`` bytes."""
        chosen: list[Entry] = []
        async for entry, _ in self._turns():
            if wanted <= 0 or len(chosen) == _GIVEN_AT_ONCE:
                break
            chosen.append(entry)
            wanted -= entry.size
        return chosen

    async def empty(self, entries: Sequence[Entry]) -> int:
        """Delete these for good; returns the bytes that come back soon. Open files stay until
        closed. Raises NoSpace or Unavailable if the metadata cannot be changed."""
        size = 0
        for first in range(0, len(entries), AT_ONCE):
            some = entries[first : first + AT_ONCE]
            done = await self._engine.transact(restoring.empty, some, clock.kernel_ns())
            for inode in done.files:
                self._doomed.lose(inode)
            for inode in done.directories:
                self._doomed.take(inode)
            faults.reach(_EMPTIED)
            size += done.size
            await self._upkeep.share.give_way()
        return size


def _count(tx: ReadTransaction) -> tuple[int, int]:
    return tx.counter(keys.COUNTER_TRASHED), tx.counter(keys.COUNTER_TRASHED_BYTES)


async def tree_size(engine: Engine, top: int) -> int:
    """The sizes of all files below, for each of their names. Other tasks run between slices."""
    total, directories = 0, [top]
    while directories:
        async for _, inode in entries_of(engine, directories.pop()):
            if inode.is_dir:
                directories.append(inode.ino)
            total += inode.size
    return total
