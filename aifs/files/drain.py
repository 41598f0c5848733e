"""Draining in the background: the queue, tasks that wait for files or trees on any host, status."""

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import trio

from aifs.burst.queue import Queue, Rank
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.errors import Busy, FsError, NoSpace
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import Work
from aifs.core.waiting import DRAIN, Ended, doing, waits_for
from aifs.files.draining import Drainer, Draining, DrainOutcome
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.services import Services
from aifs.meta import keys, namespace
from aifs.meta.kv import ReadTransaction
from aifs.meta.paths import is_below
from aifs.meta.records import Inode, decode_burst
from aifs.meta.slices import read_slice

_log = logger(__name__)

_QUIET_S = 0.1  # after the last file was opened for writing
_REST = 3
"""How long a worker rests while a program writes, as a multiple of the time that it has worked."""

_REST_MAX_S = 1.0
"""How long it rests at most."""

_LARGE = 8 << 20
_ASSUMED_RATE = 100e6
"""Bytes per second of drains, before so many bytes were drained in one batch."""

GRACE_S = 5.0
"""Time that ``strict`` waits give an open or mapped file: its close(2) may reach us late."""


_RECORDS = 64  # looked at in one transaction: about 0.3 ms
_REQUESTED_AT_ONCE = 100


class Undrained(NamedTuple):
    """A file that has to be drained."""

    ino: int
    since_ns: int
    size: int
    writers: int = 0
    home: int = 0
    """The host in whose burst tier it is; 0: this one."""


class Waiter:
    """A task that waits for some files, by inode number. ``strict``: the wait ends with the error
    of a failing drain, and with Busy for a file that may be written to."""

    def __init__(self, inos: set[int], strict: bool) -> None:
        self._inos = inos
        self._strict = strict
        self._blocked: dict[int, float] = {}  # since when
        self._error: FsError | None = None
        self._event = trio.Event()

    async def wait(self) -> None:
        """Until all are drained, or gone."""
        while self._inos:
            ino, since = min(self._blocked.items(), key=lambda item: item[1], default=(0, math.inf))
            with trio.move_on_at(since + GRACE_S) as scope:
                await self._event.wait()
            if self._error is not None:
                raise self._error
            if scope.cancelled_caught:
                raise Busy(f"inode {ino} is open for writing, so it cannot be drained")
            self._event = trio.Event()

    def done(self, ino: int) -> None:
        self._blocked.pop(ino, None)
        self._inos.discard(ino)
        if not self._inos:
            self._event.set()

    def failed(self, ino: int, error: FsError) -> None:
        """A drain of the file has failed; it will be tried again."""
        if self._strict and ino in self._inos:
            self._error = error
            self._event.set()

    def blocked(self, ino: int) -> None:
        """The file cannot be drained before somebody closes it."""
        if self._strict and ino in self._inos and ino not in self._blocked:
            self._blocked[ino] = trio.current_time()
            self._event.set()


class Drain:
    """Brings files to the capacity tier. Several tasks run ``work``; the rest may be called at any
    time.

    Until its drain has flipped it, a file's bytes stay in the burst tier: a failed drain is
    repeated.
    """

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        handles: Handles,
        ended: Ended,
    ) -> None:
        """``ended`` is told of drains."""
        burst = services.config.burst
        self._servers = services.servers
        self._engine = services.engine
        self._io = io
        self._ended = ended
        self._tier = tier
        self._handles = handles
        self._upkeep = services.upkeep
        self.workers = burst.drain_workers
        """How many tasks drain at a time."""
        self.limiter = Limiter(burst.drain_bandwidth, self._is_late)
        """Of all drains."""
        self.movers = io.sets.movers(
            Mover(
                services.servers.budget,
                self.limiter,
                burst.ioprio,
                self._is_in_the_way,
                is_urgent=self._is_waited_for,
            )
        )
        """Processes that carry drains out."""
        self.drainer = Drainer(services, io, self.movers, self._give_way)
        self._wanted: list[int] = []
        """Withheld files that somebody waits for, until ``take_wanted``."""
        self._queue = Queue(burst.drain_delay_s, burst.drain_deadline_s)
        self._requested: set[int] = set()
        """Inodes of files that somebody has asked for, and that are not drained."""
        self._waiters: list[Waiter] = []
        """Tasks that wait for files to be drained."""
        self._failing: dict[int, str] = {}
        """By inode, why the last drain of files has failed that are tried again."""
        self._last_error = ""
        """The newest of these; '' if there was none."""
        self._active = 0
        """How many files are being drained."""
        self._drained_files = 0
        """How many have been since the mount."""
        self._drained_bytes = 0
        """And how many bytes these had."""
        self._best_rate = 0.0
        """Bytes per second of the fastest batch that was large; 0: there was none."""

    def _is_late(self) -> bool:
        return self._queue.late(trio.current_time())

    def _is_in_the_way(self) -> bool:
        """Whether programs write to the burst tier, and so need processor and memory first."""
        return not self._is_urgent() and (
            self._handles.writers > 0
            or self._handles.last_writer_s > trio.current_time() - _QUIET_S
        )

    def _is_urgent(self) -> bool:
        """Whether somebody waits for drains, or will have to, or a file is beyond the deadline."""
        return bool(
            self._waiters or self._tier.pressure or self._tier.is_lacking or self._is_late()
        )

    async def _give_way(self) -> None:
        await self._upkeep.share.give_way(self._is_urgent())

    def _is_waited_for(self) -> bool:
        """``_is_urgent``, or somebody has asked for a drain and comes back to see."""
        return bool(self._requested) or self._is_urgent()

    # --- what is to be done ---

    def set_delay(self, delay_s: float) -> None:
        """How long files that are closed from now on wait to be drained."""
        self._queue.delay_s = delay_s

    def load(self, undrained: Sequence[Undrained]) -> None:
        """What an earlier mount has left."""
        now, now_ns = trio.current_time(), time.time_ns()
        for file in sorted(undrained, key=lambda file: file.since_ns):
            self._queue.add(file.ino, file.size, now - (now_ns - file.since_ns) / 1e9, now)
        self._upkeep.wake(Work.DRAIN)

    def closed(self, inode: Inode) -> None:
        """Nobody has this file of the burst tier open for writing any more."""
        ready_at_s = self._queue.closed(inode.ino, inode.size, trio.current_time())
        self._upkeep.at(Work.DRAIN, ready_at_s)

    def gone(self, ino: int) -> None:
        """The file has no name any more, or has left the burst tier: nobody waits for it."""
        if self._queue.unlinked(ino):
            self._failing.pop(ino, None)
            self._tell(ino)

    def published(self, inos: Iterable[int]) -> None:
        """These have got their final names: drain them before others."""
        self._upkeep.at(Work.DRAIN, self._queue.prefer(inos, Rank.PUBLISHED, trio.current_time()))

    def try_again(self) -> None:
        """There is room on the data servers again."""
        self._queue.try_again(trio.current_time())
        self._upkeep.wake(Work.DRAIN)

    def request(self, inos: Iterable[int]) -> None:
        """Drain these before all others, and as soon as nobody has them open for writing."""
        self._request(inos)
        self._upkeep.wake(Work.DRAIN)

    def _request(self, inos: Iterable[int]) -> None:
        inos = list(inos)
        self._queue.prefer(inos, Rank.REQUESTED, trio.current_time())
        self._requested.update(ino for ino in inos if ino in self._queue)
        withheld = [ino for ino in inos if self._queue.withholds(ino)]
        if withheld:
            self._wanted += withheld
            self._upkeep.wake(Work.GROUPS)

    def due_in(self) -> dict[int, float]:
        """Seconds until each file is drained that was drained not long ago, and has changed
        again."""
        now = trio.current_time()
        return {ino: at - now for ino, at in self._queue.paused(now).items()}

    # --- files that somebody else drains ---

    def withhold(self, inode: Inode) -> bool:
        """``closed``, but the caller drains the file, or gives it back. False: we drain it now."""
        return self._queue.withhold(inode.ino, inode.size, trio.current_time())

    def take_wanted(self) -> list[int]:
        """The withheld files that somebody has begun to wait for since this was last asked."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def give_back(self, inos: Iterable[int]) -> None:
        """These are withheld no more."""
        now = trio.current_time()
        for ino in inos:
            self._upkeep.at(Work.DRAIN, self._queue.give_back(ino, now))

    def drained(self, ino: int, size: int) -> None:
        """The group that has withheld it has drained it."""
        self._drained_files += 1
        self._drained_bytes += size
        if self._queue.drained(ino):
            self._tell(ino)

    def failed(self, ino: int, error: FsError) -> None:
        """A drain of a withheld file has failed; it will be tried again."""
        for waiter in self._waiters:
            waiter.failed(ino, error)

    async def wait(self, inos: Iterable[int], strict: bool = False) -> None:
        """Wait until each of these is on the capacity tier, or gone; open ones if requested.

        ``strict``: raises the error of a failing drain, and Busy for a file that stays open for
        writing.
        """
        wanted = {ino for ino in inos if ino in self._queue}
        self.published(wanted)  # none of them waits because it was drained not long ago
        waiter = Waiter(wanted, strict)
        self._waiters.append(waiter)
        try:
            with waits_for(DRAIN):
                await waiter.wait()
        finally:
            self._waiters.remove(waiter)

    # --- files of a tree, on all hosts ---

    async def undrained_below(self, top: Inode) -> list[Undrained]:
        """Files with names whose newest bytes are in the burst tier alone: ``top``, or all below
        it. The cost is that of all files that have burst copies, not of the tree."""
        if not top.is_dir:
            if not top.in_burst or not top.nlink:
                return []
            return [self._undrained(top, await self._engine.view(_since_ns, top))]
        found: list[Undrained] = []
        start, end = keys.all_of(b"b")
        while start:
            some, start = await self._engine.view(_read_undrained, start, end, top.ino)
            for inode, since_ns in some:
                found.append(self._undrained(self._io.inodes.current(inode), since_ns))
            await trio.lowlevel.checkpoint()
        return found

    def _undrained(self, inode: Inode, since_ns: int) -> Undrained:
        file = self._io.table.open.get(inode.ino)
        assert inode.copy is not None  # it is the file
        home, writers = self._io.homes.of(inode.copy.server), 0 if file is None else file.writers
        return Undrained(inode.ino, since_ns, inode.size, writers, home)

    async def request_below(self, top: Inode) -> dict[int, list[int]]:
        """Drain what is undrained of ``top`` or below first. Returns the inode numbers by host, 0
        for this one."""
        found: dict[int, list[int]] = {0: []}
        for file in await self.undrained_below(top):
            found.setdefault(file.home, []).append(file.ino)
        for host, inos in found.items():
            if host:
                await self._io.homes.request_drain(host, inos)
                continue
            for first in range(0, len(inos), _REQUESTED_AT_ONCE):
                self._request(inos[first : first + _REQUESTED_AT_ONCE])
                await trio.lowlevel.checkpoint()
        self._upkeep.wake(Work.DRAIN)  # only now, so that batches are large
        return found

    async def wait_below(self, top: Inode, strict: bool) -> None:
        """Wait until what is undrained now of ``top`` or below is on the capacity tier, or gone.
        ``strict``: see ``wait``. Ending the wait does not end the drain."""

        async def wait(host: int, inos: list[int]) -> None:
            if host:
                await self._io.homes.drain(host, inos, strict)
            else:
                await self.wait(inos, strict)

        found = await self.request_below(top)
        await run_all(*(partial(wait, host, inos) for host, inos in found.items()))

    # --- in the background ---

    async def work(self) -> float:
        """Drain what is ready; in how many seconds something will be."""
        while True:
            now = trio.current_time()
            self._queue.packs = not any(
                server.storage.append for server in self._servers.of_class()
            )
            if self._tier.is_lacking:
                self._queue.hurry(now)
            batch = [Draining(entry.ino) for entry in self._queue.take(now)]
            if not batch and self._tier.pressure:
                self._queue.hurry(now, self._queue.delay_s)
            ready_in_s = self._queue.ready_in(now)
            if not batch:
                return ready_in_s
            if not ready_in_s:
                self._upkeep.wake(Work.DRAIN)  # another worker
            self._active += len(batch)
            try:
                with doing(self._ended, "drain", [draining.ino for draining in batch]):
                    await self.drainer.drain(batch)
            finally:
                self._active -= len(batch)
                self._measure(batch, trio.current_time() - now)
                with trio.CancelScope(shield=True):
                    for draining in batch:
                        self._note(draining)
                        await self._give_way()
            if self._is_in_the_way():
                # Small files cost the daemon more than the devices: leave it to the writers.
                await trio.sleep(min(_REST_MAX_S, _REST * (trio.current_time() - now)))

    def _measure(self, batch: Sequence[Draining], took_s: float) -> None:
        drained = sum(each.bytes for each in batch if each.outcome is DrainOutcome.DRAINED)
        if drained >= _LARGE and took_s > 0:  # else the time is that of something else
            self._best_rate = max(self._best_rate, drained / took_s)

    def _cost_s(self, draining: Draining) -> float:
        return draining.bytes / min(self._best_rate or _ASSUMED_RATE, self.limiter.rate or math.inf)

    def _note(self, draining: Draining) -> None:
        ino, outcome, now = draining.ino, draining.outcome, trio.current_time()
        if isinstance(outcome, FsError):
            self._failed(ino, outcome)
            self._queue.retry(ino, now)
            return
        if outcome is DrainOutcome.BUSY:
            self._queue.retry(ino, now)
            self._block(ino)
        elif outcome is DrainOutcome.OPEN:
            self._queue.hold(ino, now)
            self._block(ino)
        elif outcome in (DrainOutcome.DRAINED, DrainOutcome.GONE):
            if outcome is DrainOutcome.DRAINED:
                self._drained_files += 1
                self._drained_bytes += draining.size
                self._queue.wrote(ino, self._cost_s(draining), now)
            if self._queue.done(ino, now):
                self._tell(ino)
        else:
            self._queue.wrote(ino, self._cost_s(draining), now)
            self._queue.again(ino, now)
        if self._failing.pop(ino, None) and not self._failing:
            _log.info("draining goes on")

    def _failed(self, ino: int, error: FsError) -> None:
        if not self._failing:  # what follows until all is well again would say much the same
            _log.warning("draining has to wait, the bytes stay in the burst tier: %s", error)
        self._failing[ino] = self._last_error = str(error)
        if isinstance(error, NoSpace):
            self._servers.is_refused_room = True
            self._upkeep.wake(Work.TRASH)
        for waiter in self._waiters:
            waiter.failed(ino, error)

    def _block(self, ino: int) -> None:
        for waiter in self._waiters:
            waiter.blocked(ino)

    def _tell(self, ino: int) -> None:
        self._requested.discard(ino)
        for waiter in self._waiters:
            waiter.done(ino)

    @property
    def obstacle(self) -> str:
        """Why draining has to wait at present; '' where it does not."""
        return self._last_error if self._failing else ""

    def status(self) -> dict[str, Any]:
        """The status. ``held_files``: open for writing; ``withheld_files``: drained by a group;
        ``late``: beyond the deadline."""
        queue, now = self._queue, trio.current_time()
        withheld = queue.withheld
        return {
            "workers": self.workers,
            "bandwidth": self.limiter.rate,
            "files": len(queue),
            "bytes": queue.size,
            "active_files": self._active,
            "held_files": queue.held - withheld,
            "withheld_files": withheld,
            "failing_files": len(self._failing),
            "oldest_age_s": round(queue.oldest_age(now), 3),
            "late": queue.late(now),
            "drained_files": self._drained_files,
            "drained_bytes": self._drained_bytes,
            "last_error": self._last_error,
        }


def _since_ns(tx: ReadTransaction, inode: Inode) -> int:
    assert inode.copy is not None
    record = tx.get(keys.burst_copy(inode.copy.id))
    return 0 if record is None else decode_burst(record).since_ns


def _read_undrained(
    tx: ReadTransaction, start: bytes, end: bytes, top: int
) -> tuple[list[tuple[Inode, int]], bytes]:
    """The undrained files in one slice of the burst records, each with its time, and where the next
    slice starts (b"": nowhere)."""
    records, following = read_slice(tx, start, end, _RECORDS)
    found = []
    known: dict[int, bool] = {}
    for key, value in records:
        record = decode_burst(value)
        if not record.undrained:
            continue
        inode = namespace.find_inode(tx, record.ino)
        if inode is None or not inode.nlink or not inode.in_burst or inode.copy is None:
            continue
        if inode.copy.id == keys.number(key) and is_below(tx, inode.ino, top, known):
            found.append((inode, record.since_ns))
    return found, following
