"""The burst tier: devices for new files, waiting for room, eviction.

A background task looks at free space, the more often the fuller a device; known additions are
counted in between; so ``admit`` costs microseconds.

``throttle`` works as Linux's balance_dirty_pages does: with pressure p, from 0 to 1 as undrained
bytes go from the low to the high mark, each new file waits p / (1 - p) times as long as draining a
file of mean size takes, so at p = 1/2 as much comes as goes; at most ``throttle_max``.
"""

import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.ledger import Device, Ledger
from aifs.core import files
from aifs.core.config import Config
from aifs.core.errors import FsError, NoSpace, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import Upkeep, Work
from aifs.core.waiting import ROOM, waits_for
from aifs.data.server import DataServer
from aifs.data.servers import Servers, space_or_none
from aifs.data.workers import gather
from aifs.layout.placement import ACTIVE
from aifs.meta.kv import Engine
from aifs.meta.records import Copy

_log = logger(__name__)


_LOOK_MIN_S, _LOOK_MAX_S, _LOOK_IDLE_S = 0.02, 1.0, 10.0
_FILL_RATE = 4e9
"""Assumed highest bytes per second that fill a device between two looks."""

_LOOKED_AT = 256
"""Copies measured in one go, in less than 1 ms: near the high mark that is 50 times a second, and
20,000 open files would occupy the daemon."""

_ROOM_S = 60.0
"""Longest wait for room of a file for the burst tier alone, without drain or eviction."""

_RATE_MEMORY_S = 5.0
"""How far back the measured rate of draining looks."""


class BurstTier:
    """All burst directories of a store, in one trio thread; ``work`` is its background work.

    Parts that change files report copies' states (see Ledger): ``begun``, ``dirty``, ``clean``,
    ``gone``, ``opened``, ``closed``, ``touch``, ``pinned``, ``evicted``.
    """

    def __init__(
        self,
        config: Config,
        servers: Servers,
        engine: Engine,
        take_id: Callable[[], Awaitable[int]],
        upkeep: Upkeep,
    ) -> None:
        """``take_id`` gives an id that was never used. Blocks for a moment."""
        self.blocks = servers.blocks
        """Clean blocks, in the room that copies leave."""
        self._config = config.burst
        self._servers = servers
        self._engine = engine
        self._sole: dict[int, tuple[int, int | None]] = {}  # by id, see ``sole_span``
        self._new: dict[object, int] = {}  # devices of copies that are not on record yet
        self._take_id = take_id
        self._upkeep = upkeep
        self._ledger = Ledger()
        self.devices: dict[int, Device] = {}
        """By number, the burst directories that are in use."""
        self._spares: dict[int, Spares] = {}
        """By number, the empty files made ahead there, where that pays."""
        self._unseen: list[int] = []
        """Ids of the copies whose lengths are looked at next."""
        self._open: dict[int, BurstCopy] = {}
        """By id, the copies that somebody has a BurstCopy of."""
        self._turn = 0
        """Counts new copies, so that devices that are equally good take turns."""
        self._is_idle = False  # for some seconds nobody looks, unless a file is made
        self._relief = trio.Event()
        """Set, and replaced, when writers that wait for room may go on."""
        self._lacking: list[int] = []
        """Sizes of the files that wait for room, as they can change nowhere else."""
        self._change = trio.Event()
        """Set, and replaced, when there may be room for one of them."""
        self._mirrors: set[int] = set()
        """Ids of copies that are mirrors of other hosts' copies."""
        self._waiting = 0
        """How many writers wait for room."""
        self.rate = 0.0
        """Bytes per second that drains have come to lately; 0: not known."""
        self._rate_seen = (time.monotonic(), 0)
        """The time.monotonic() of the last measurement, and bytes drained by then."""
        for server in servers.burst():
            self._add(server)
        for device in self.devices.values():
            device.look(space_or_none(device.server))

    def _add(self, server: DataServer) -> None:
        block_bytes = partial(self.blocks.bytes_on, server.id)
        self.devices[server.id] = Device(server, self._config, self._ledger, block_bytes)
        self._spares[server.id] = Spares(server, self._take_id)
        self._share_out()

    def _share_out(self) -> None:
        for device in self.devices.values():
            device.share = self._config.capacity // len(self.devices)

    async def remove(self, server_id: int) -> None:
        """Do without a device that holds no copies and is not ``usable``."""
        if self.devices.pop(server_id, None) is not None:
            spares = self._spares.pop(server_id)
            spares.stop()
            self._share_out()
            await self.blocks.leave(server_id)
            await spares.close()

    def used(self, server_id: int) -> int:
        """Bytes of the copies on a device."""
        return self._ledger.of(server_id).used

    @property
    def has_devices(self) -> bool:
        return bool(self.devices)

    # --- new files ---

    def admit(self, policy_tier: str, expected: int = 0, must: bool = False) -> DataServer | None:
        """The device for a new file, or one brought in; None: the data servers.

        ``expected``: known size, also for ``create``. ``must``: it can be changed nowhere else, and
        is admitted up to the reserve. Of devices with room, the one with most a file being written;
        equal ones in turn.
        """
        if policy_tier == "capacity" and not must:
            return None
        self._look_again()
        devices = [device for device in self.devices.values() if device.admits(expected, must)]
        if not devices:
            return None
        best = devices[0]
        if len(devices) > 1:
            self._turn += 1
            first = self._turn % len(devices)
            best = max(
                devices[first:] + devices[:first],
                key=lambda device: device.room_for(expected, must) / (1 + device.writers),
            )
        best.admitted += 1
        return best.server

    def _look_again(self) -> None:
        """Something may be made: somebody looks at the free space."""
        if self._is_idle:
            self._is_idle = False
            self._upkeep.wake(Work.LOOK_AT_BURST)

    # --- writers that wait ---

    async def throttle(self) -> None:
        """Wait before a new file, if draining does not keep up. Does not suspend with room."""
        if self.pressure == 0:
            return
        self._waiting += 1
        try:
            with waits_for(ROOM), trio.move_on_after(self.pause_s):
                await self._relief.wait()
        finally:
            self._waiting -= 1

    async def make_room(self, size: int, held: Callable[[int], int]) -> None:
        """Admit a file of this size that can be changed nowhere else, unless others are faster.
        Waits while drains and evictions go on. ``held``: bytes that programs have open on a device,
        except pinned ones; not waited for. Raises NoSpace, Unavailable."""
        until_s, most = 0.0, (-1, 0)
        while not any(device.admits(size, must=True) for device in self.devices.values()):
            usable = [device for device in self.devices.values() if device.usable]
            if not usable:
                raise Unavailable(
                    "no burst directory works, and what data servers have cannot be changed there"
                )
            now = self._ledger.drained_bytes, max(device.room() for device in usable)
            if now > most:
                until_s, most = trio.current_time() + _ROOM_S, now
            is_hopeless = not any(d.may_come_to_admit(size, held(d.server.id)) for d in usable)
            if is_hopeless or trio.current_time() >= until_s:
                raise NoSpace(
                    "the burst tier is full, and what data servers have cannot be changed there: "
                    "close files that are being written, unpin some, or add a burst directory"
                )
            self._lacking.append(size)
            try:
                self._upkeep.wake(Work.DRAIN)
                self._look_for_a_crowd()
                with waits_for(ROOM), trio.move_on_at(until_s):
                    await self._change.wait()
            finally:
                self._lacking.remove(size)

    @property
    def is_lacking(self) -> bool:
        """Whether writers wait for room, with nowhere else to go: drains must not wait."""
        return bool(self._lacking)

    def _tell_lacking(self) -> None:
        if self._lacking:
            self._change.set()
            self._change = trio.Event()

    @property
    def is_pressed(self) -> bool:
        """Whether new files wait for room, or soon will."""
        return self.pressure > 0 or bool(self.needs_eviction())

    @property
    def pressure(self) -> float:
        """0 below the low mark of some device, 1 at the high mark of all, by undrained bytes."""
        return min(
            [device.pressure() for device in self.devices.values() if device.usable], default=0.0
        )

    @property
    def pause_s(self) -> float:
        """How long a new file waits now."""
        pressure, longest = self.pressure, self._config.throttle_max_s
        totals = [device.totals for device in self.devices.values()]
        count = sum(total.dirty_copies for total in totals)
        if self.rate <= 0 or count == 0 or pressure >= 1:
            return pressure * longest
        a_file_s = sum(total.dirty for total in totals) / count / self.rate * max(1, self._waiting)
        return min(longest, a_file_s * pressure / (1 - pressure))

    async def create(self, device: DataServer, expected: int = 0) -> BurstCopy:
        """A new, empty copy, open, that no record knows yet. Raises NoSpace, Unavailable."""
        self._new[token := object()] = device.id
        try:
            if device.may_inline:
                copy_id = await self._take_id()
                fd = device.create_object((0, copy_id))
            else:
                copy_id, fd = await self._spares[device.id].take()
        finally:
            del self._new[token]
        self._new[copy_id] = device.id
        self._sole[copy_id] = self._engine.seq, None
        if expected:
            self.devices[device.id].promise(copy_id, expected)
        return BurstCopy(device, copy_id, self._servers.buffers, fd)

    async def take_source(self, source: int) -> BurstCopy:
        """The used file with all blocks of an object set, as a copy in no record, unsynced. Raises
        Busy, Unavailable."""
        copy_id = await self._take_id()
        device = await self.blocks.give(source, copy_id)
        self._new[copy_id] = device.id
        self._sole[copy_id] = self._engine.seq, None
        copy = BurstCopy(device, copy_id, self._servers.buffers)
        copy.source = source
        return copy

    def is_entered(self, server_id: int) -> bool:
        """Whether a copy is being made on a device that is not on record yet."""
        return server_id in self._new.values()

    def open(self, place: Copy) -> BurstCopy:
        """An existing copy. Does no I/O. Raises Unavailable if its device is not registered."""
        return BurstCopy(self._servers[place.server], place.id, self._servers.buffers)

    def discard(self, copy: BurstCopy) -> None:
        """Remove a copy that no record came to know, in the background. Does not block."""
        copy.close(removed=True)
        self.gone(copy.id)
        copy.device.workers.post(remove_copies, copy.device, [copy.id])

    # --- what becomes of copies ---

    def dirty(self, copy_id: int, server: int, length: int) -> None:
        """It has the newest bytes of a file, ``length`` of them, or as many as it has now."""
        self._new.pop(copy_id, None)
        self._mirrors.discard(copy_id)
        self._sole[copy_id] = self.sole_span(copy_id)[0], None
        self._ledger.dirty(copy_id, server, length)

    def mirrors(self, copy_id: int, server: int, length: int) -> None:
        """Note a mirror of another host's copy, which stays until that is drained."""
        self.dirty(copy_id, server, length)
        self._mirrors.add(copy_id)

    @property
    def mirror_bytes(self) -> int:
        """Of mirrors of other hosts' copies."""
        return sum(map(self.bytes_of, self._mirrors))

    def clean(self, copy_id: int, server: int, length: int) -> None:
        """It is a copy of bytes on the data servers, by transactions that have returned."""
        self._new.pop(copy_id, None)
        self._sole[copy_id] = self.sole_span(copy_id)[0], self._engine.seq
        self._ledger.clean(copy_id, server, length)
        self._relieve()
        self._tell_lacking()
        self._look_for_a_crowd()

    def sole_span(self, copy_id: int) -> tuple[int, int | None]:
        """States of the metadata in which it may be a file's only copy: after one transaction, up
        to another that made it a cache (None: none). The worst is assumed of earlier mounts; also
        for other ids."""
        return self._sole.get(copy_id, (0, None))

    def bytes_of(self, copy_id: int) -> int:
        """The space that the copy takes, as last seen."""
        return self._ledger.bytes_of(copy_id)

    def is_clean(self, copy_id: int) -> bool:
        """Whether it is there, and clean."""
        return self._ledger.is_clean(copy_id)

    def evicted(self, copy_id: int) -> None:
        """No file has it any more; it is going to be deleted."""
        known = self._ledger.gone(copy_id)
        if known is not None and known[0] in self.devices:
            self.devices[known[0]].leaving(copy_id, known[1])

    def gone(self, copy_id: int) -> None:
        """It has been deleted, and its space is free. Other ids are allowed, too."""
        self._ledger.gone(copy_id)
        self._open.pop(copy_id, None)
        self._sole.pop(copy_id, None)
        self._new.pop(copy_id, None)
        self._mirrors.discard(copy_id)
        for device in self.devices.values():
            device.left(copy_id)
        self._relieve()
        self._tell_lacking()

    def deleted(self, ids: Iterable[int]) -> None:
        """These have been deleted; ids of other things may be among them."""
        for copy_id in ids:
            self.gone(copy_id)

    def begun(self, copy: BurstCopy) -> None:
        """A new file has it, which is empty: ``dirty`` and ``opened``."""
        self._new.pop(copy.id, None)
        self._ledger.begun(copy.id, copy.server)
        self._open[copy.id] = copy

    def opened(self, copy: BurstCopy) -> None:
        self._ledger.opened(copy.id)
        self._open[copy.id] = copy

    def closed(self, copy: BurstCopy) -> None:
        if self._ledger.closed(copy.id):
            self._open.pop(copy.id, None)
            device = self.devices.get(copy.server)
            if device is not None:
                device.promise(copy.id, 0)
                if self._lacking or device.excess():
                    self._upkeep.wake(Work.EVICT)

    def touch(self, copy_id: int) -> None:
        """It has been used."""
        self._ledger.touch(copy_id)

    def pinned(self, copy_id: int, pinned: bool) -> None:
        """Whether it must not be evicted."""
        self._ledger.pin(copy_id, pinned)

    # --- eviction ---

    def needs_eviction(self) -> dict[int, int]:
        """Bytes of clean copies to evict by device, for its low mark or waiting files."""
        found: dict[int, int] = {}
        for number, device in self.devices.items():
            count = max(device.excess(), *map(device.lacks, self._lacking), 0)
            if count > 0:
                found[number] = count
        return found

    def victims(self, server: int, wanted: int) -> list[int]:
        """Ids to evict for ``wanted`` bytes: least recently used; never dirty, open or pinned."""
        return self._ledger.victims(server, wanted)

    def _look_for_a_crowd(self) -> None:
        if self.needs_eviction():
            self._upkeep.wake(Work.EVICT)

    def _relieve(self) -> None:
        if self._waiting and self.pressure == 0:
            self._relief.set()
            self._relief = trio.Event()

    # --- in the background ---

    async def work(self) -> float:
        """Keep the figures fresh; in how many seconds to look again, if no file is made before."""
        await self.look()
        self._is_idle = not self._is_active()
        return _LOOK_IDLE_S if self._is_idle else self._interval_s()

    def stop(self) -> None:
        """Make no more files ahead. Does not block."""
        for spares in self._spares.values():
            spares.stop()

    async def look(self) -> None:
        """Look at all devices' free space, and at growing copies, in turns if many."""
        for server in self._servers.burst():
            if server.id not in self.devices and server.standing == ACTIVE:
                self._add(server)
        devices = list(self.devices.values())
        if not devices:
            return
        if not self._unseen:
            self._unseen = self._ledger.open_copies()
        some = self._unseen[-_LOOKED_AT:]
        del self._unseen[-_LOOKED_AT:]
        for copy_id in some:
            copy, number = self._open.get(copy_id), self._ledger.writer_on(copy_id)
            if copy is not None and copy.is_open and number is not None:
                self._ledger.dirty(copy_id, number, copy.stat().st_blocks * 512)
        for device, space in zip(
            devices, await self._servers.spaces([d.server for d in devices]), strict=True
        ):
            device.look(space)
            if space is not None and device.usable:
                self.blocks.give_room(device.server.id, device.room_for_blocks())
        self._measure()
        for spares in self._spares.values():
            spares.expire()
        self._relieve()
        self._tell_lacking()
        self._look_for_a_crowd()
        if self.pressure:  # files that would be drained later are drained now
            self._upkeep.wake(Work.DRAIN)

    def _measure(self) -> None:
        now, drained = time.monotonic(), self._ledger.drained_bytes
        before_s, before = self._rate_seen
        elapsed = now - before_s
        if elapsed >= _LOOK_MIN_S:
            weight = min(1.0, elapsed / _RATE_MEMORY_S)
            self.rate += weight * ((drained - before) / elapsed - self.rate)
            self._rate_seen = (now, drained)

    def _is_active(self) -> bool:
        spares = any(not spares.empty for spares in self._spares.values())
        return spares or any(device.writers for device in self.devices.values())

    def _interval_s(self) -> float:
        room = min(device.room_to_high() - device.block_bytes() for device in self.devices.values())
        return min(_LOOK_MAX_S, max(_LOOK_MIN_S, room / _FILL_RATE))

    async def close(self) -> None:
        """Remove copies that were made ahead; to be called at an orderly end, after ``stop``."""
        for spares in self._spares.values():
            await spares.close()

    def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``."""
        return {
            "devices": [device.status() for device in self.devices.values()],
            "throttled_writers": self._waiting + len(self._lacking),
            "pause_s": self.pause_s if self.pressure else 0.0,
            "drain_bytes_per_s": round(self.rate),
            "mirror_bytes": self.mirror_bytes,
            "grown_bytes": self._ledger.grown_bytes,
        }


# Empty files made ahead, for devices on which making one may wait for the disk.
#
# Making one file in a worker costs the caller 80 to 160 us, a batch about 20 us a file, and taking
# a spare one nothing.


BATCH = 64
KEEP_S = 2.0
"""Unused spares are removed soon: after a crash they are sought in the newest ids alone."""
_END_S = 30.0
"""How long the end of a mount waits for a device to remove them."""


class _Spare(NamedTuple):
    id: int
    fd: int


class Spares:
    """The spare files of one device. After a crash, they are unknown objects with recent ids."""

    def __init__(self, device: DataServer, take_id: Callable[[], Awaitable[int]]) -> None:
        self._device = device
        self._take_id = take_id
        self._files: deque[_Spare] = deque()
        self._made_s = 0.0
        self._done: trio.Event | None = None  # while more are being made
        self._stopped = False
        self._left: list[int] = []  # ids of those that ``close`` has to remove

    @property
    def empty(self) -> bool:
        return not self._files

    async def take(self) -> tuple[int, int]:
        """Id of an empty file, and a read-only descriptor. Raises NoSpace, Unavailable."""
        if len(self._files) <= BATCH // 2 and self._done is None and not self._stopped:
            await self._refill()
        if self._files:
            return self._files.popleft()
        copy_id = await self._take_id()
        return copy_id, (
            await gather([(self._device.workers, self._device.create_object, ((0, copy_id),))])
        )[0]

    async def _refill(self) -> None:
        """Begin to make more."""
        self._done = done = trio.Event()
        refilled = partial(self._refilled, done)
        try:
            ids = [await self._take_id() for _ in range(BATCH)]
            self._device.workers.start(refilled, _make, self._device, ids)
        except BaseException:  # also if no thread can be started: ``close`` waits for this
            refilled([])
            raise

    def _refilled(self, done: trio.Event, made: list[_Spare] | BaseException) -> None:
        if isinstance(made, list):
            self._files.extend(made)
            self._made_s = trio.current_time()
        done.set()
        self._done = None
        if self._stopped:
            self.stop()

    async def refilled(self) -> None:
        """No files are being made on return."""
        if self._done is not None:
            await self._done.wait()

    def expire(self) -> None:
        """Remove old ones in the background. Does not block."""
        if self._files and self._done is None and trio.current_time() - self._made_s > KEEP_S:
            ids = self._close_all()
            self._device.workers.post(remove_copies, self._device, ids)

    def stop(self) -> None:
        """Make no more, and give up the descriptors. Does not block."""
        self._stopped = True
        self._left += self._close_all()

    async def close(self) -> None:
        """Remove all spare files, unless the device fails, or is late. Called after ``stop``."""
        with trio.move_on_after(_END_S):
            await self.refilled()
            if self._left:
                work = self._device.workers, remove_copies, (self._device, self._left)
                await gather([work], abandonable=True)
                self._left = []

    def _close_all(self) -> list[int]:
        ids = []
        while self._files:
            spare = self._files.popleft()
            files.close_file(spare.fd)
            ids.append(spare.id)
        return ids


def _make(device: DataServer, ids: Sequence[int]) -> list[_Spare]:
    made = []
    try:
        for copy_id in ids:
            made.append(_Spare(copy_id, device.create_object((0, copy_id))))
    except FsError:
        pass  # the next one is made while its caller waits, and gets the error
    return made


def remove_copies(device: DataServer, ids: Sequence[int]) -> None:
    """Remove files in no record, durably: recovery looks only among the newest ids. Blocks. Those
    that fail twice are left to recovery and fsck."""
    failed = device.remove_objects([(0, copy_id) for copy_id in ids])
    if failed:
        failed = device.remove_objects([(0, copy_id) for copy_id in failed])
    for error in failed.values():
        _log.info("an unused burst copy is left behind: %s", error)
