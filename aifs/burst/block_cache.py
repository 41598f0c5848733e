"""Clean bytes of the data servers in the burst tier: the second level below the read cache.

A source (block_map.py) is a sparse file in ``blocks`` of a burst directory, at the source's own
offsets. Only the host's own map says which blocks are there: no record names a block, and reading
makes no transaction.

* A source's bytes never change: a container's below the length on record, or an object set's with
  its first checksums. A change in place drops these first, durably (``Transitions.mark``), which
  ends the source (``end``), at other hosts when they are shown it. A block is filled if the source
  stands after its last byte was read.
* A fill makes a checksum of each block, compared before a later process serves the block: so the
  map on disk may be older than the files, also after a power cut. The map is written when all that
  names its sources is durable.
* Blocks take what is below the low mark and otherwise free (``Device.room_for_blocks``). They count
  as free space, and give way at each look at the device, before a writer waits.
* Blocks that meet an error are given up: the servers have them.
"""

import os
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, islice
from threading import Lock
from typing import Any, NamedTuple

import trio

from aifs.burst.block_map import (
    BLOCK_MIN,
    BLOCKS,
    SUM_BYTES,
    BlockMap,
    BlockSegment,
    block_size,
    decode,
    encode,
)
from aifs.burst.copy import is_used
from aifs.core import faults, files
from aifs.core.errors import Busy, FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.upkeep import NEVER_S, Upkeep, Work
from aifs.data import naming
from aifs.data.chunk_codec import digest_of
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.layout.striped import Striped

_log = logger(__name__)

_FILLED = faults.declare("burst.blocks.filled", "a block is in its file, the map does not have it")
_LEFT = faults.declare("burst.blocks.left", "the map has a block no more, its file still has it")
_GIVEN = faults.declare("burst.source.given", "blocks are a burst copy that no record knows")
_SAVED = faults.declare("burst.blocks.saved", "the map on disk is as the one in memory was")

_MAP = "map"
_PENDING_MAX = 32 << 20
_PENDING_SHARE = 4
"""Above that, what waits to be written takes this part of the budget, of what nobody has."""
_BATCH = 16
_BATCH_BYTES = 4 << 20
"""What is written in one go ends with the first fill that is not below."""
_SAVE_S = 60.0
_SAVE_SOON_S, _SAVE_REST = 1.0, 20
"""The map is written so soon, or after so many times as long as that takes, for programs that wait
to use a source by themselves."""
_REST_S = 60.0
"""How long a device that has failed keeps nothing new."""
_REFUSED_MAX = 1 << 16
_HELD_SHARE = 4
"""Sources that stay may take so many times what others may take."""
_ASK_S = 1.0
"""How often it is asked which of them are used."""
_ASKED = 512
"""So many are asked for at most: it takes 0.2 ms each, and evictions wait meanwhile."""

_ERRORS = (OSError, FsError)
"""Of a device, and of a server that hangs."""

Standing = Callable[[Sequence[int]], Awaitable[dict[int, int]]]
"""Those of these ids whose bytes never change as the records say, and up to which byte."""

State = Callable[[], Awaitable[int]]
"""A map on disk counts as long as this number is the same: see degraded.state_of_blocks. Sources
that ended when it changed are gone on return."""


class _Fill(NamedTuple):
    """Blocks in a row that are to be kept; the last one may be the source's end."""

    source: int
    numbers: range
    data: memoryview
    file: "_File"


class _File:
    """The sparse file of a source."""

    __slots__ = ("_busy", "_gone", "device", "fd", "outlives", "path", "source", "used")

    def __init__(self, device: "_Device", source: int) -> None:
        self.device = device
        self.source = source
        self.path = f"{device.path}/{source:016x}"  # it may be that of a later one
        self.fd: int | None = None
        """Of this process; None while it is not open."""
        self._busy = 0  # calls in worker threads
        self._gone = False  # it has been removed, or renamed
        self.outlives = False
        """Programs may use it when it has been removed."""
        self.used = True
        """See DescriptorUser, as ``close_idle``."""

    def descriptor(self) -> int:
        """Opened when it is first needed. For worker threads that have it ``in_use``."""
        with self.device.opening:
            if self.fd is None:
                files.make_dirs(self.device.path)
                self.fd = files.open_file(self.path, create=True)
            return self.fd

    def in_use(self, change: int) -> None:
        """As long as the sum of changes is more than 0, its descriptor is kept."""
        self._busy += change
        if self._gone:
            self.close_idle()

    def gone(self) -> None:
        """It has been removed."""
        self._gone = True
        self.close_idle()

    def close_idle(self) -> int:
        if self._busy or self.fd is None:
            return 0
        files.close_file(self.fd)
        self.fd = None
        return 1


@dataclass(slots=True)
class _Device:
    """A burst directory, and what it holds."""

    server: DataServer
    map: BlockMap
    path: str
    """Of the directory of the sources' files."""
    files: dict[int, _File] = field(default_factory=dict)
    """By source."""
    leaving: deque[tuple[_File, BlockSegment | None]] = field(default_factory=deque)
    """Segments to be punched, and files to be removed (None), in order."""
    fills: deque[_Fill] = field(default_factory=deque)
    """Blocks that are to be written, in order."""
    filling: set[tuple[int, int]] = field(default_factory=set)
    """Sources and numbers of blocks that are going to be there."""
    asked: int = 0
    """How many fills there have been,"""
    ended: int = 0
    """and how many of them are written, or never will be."""
    changed: bool = False
    """The map is not as it is on disk."""
    unsaved: dict[int, int] = field(default_factory=dict)
    """Sources with blocks that the map on disk does not have: how many bytes had come into blocks
    with their last one."""
    rests_until_s: float = 0.0
    """Nothing is kept until then, on trio's clock, because it has failed."""
    can_read_cached: bool = True
    """Whether the filesystem reads from its page cache alone."""
    lent: set[int] = field(default_factory=set)
    """Sources that the kernel passes through."""
    asks_at_s: float = 0.0
    """Not before then, on trio's clock, it is asked which of those that were lent are used."""
    survivors: dict[int, list[_File]] = field(default_factory=dict)
    """By source, files that were found to be wrong, and removed, while programs used them."""
    opening: Lock = field(default_factory=Lock)
    """Held while a file is opened."""

    @property
    def has_work(self) -> bool:
        return bool(self.leaving or self.fills or self.map.excess > 0)

    @property
    def is_crowded(self) -> bool:
        """Whether sources that stay take too much, and it is time to ask whether they are used."""
        is_asked = bool(self.map.held_sources) and self.wanted > 0
        return (is_asked or bool(self.survivors)) and trio.current_time() >= self.asks_at_s

    @property
    def wanted(self) -> int:
        """Bytes of sources that stay which others should have."""
        return max(self.map.excess, self.map.held_bytes - self.map.limit * _HELD_SHARE)


class BlockCache:
    """Of all burst directories of a host, in one trio thread; only ``work``, in the background,
    changes files."""

    def __init__(
        self,
        servers: Servers,
        upkeep: Upkeep,
        standing: Standing,
        state: State,
        barrier: Callable[[], Awaitable[None]],
        mode: str,
        outlives: bool = False,
    ) -> None:
        """``mode``: see burst.blocks in the reference of the configuration. ``outlives``: programs
        go on with what they use by themselves when another daemon follows this one."""
        self._servers = servers
        self._upkeep = upkeep
        self.standing = standing
        """See Standing."""
        self._state = state
        self._barrier = barrier
        self._mode = mode
        self._outlives = outlives
        self.block = BLOCK_MIN
        """Bytes of a block."""
        self.corrections = 0
        """See Blocks."""
        self._findings = 0
        """How many are being put on record, see ``finding``."""
        self.devices: dict[int, _Device] = {}
        """By number."""
        self._known: set[int] = set()
        """Numbers of burst directories that were loaded, or could not be."""
        self._new: list[int] = []
        """Those that have been added since the mount."""
        self._ended: set[int] | None = None
        """Ids that were ended since a map began to be loaded; None: none is."""
        self._where: dict[int, _Device] = {}
        """By source, the device that has it, or is going to."""
        self._refused: set[int] = set()
        """Sources that do not stand. An object set that was written in place never stands again."""
        self._moving: set[int] = set()
        """Sources of which a file is being given away: a new one must not be opened by its name."""
        self._has_room = False
        """Whether any device takes blocks."""
        self._pending = 0
        """Bytes that wait to be written."""
        self._reserved = 0
        """Bytes of the budget that these have."""
        self._fills_ended = trio.Event()
        """Set, and replaced, when some have."""
        self._save_took_s = 0.0
        """How long that took last."""
        self._save_at_s = 0.0
        """When the maps are written next, on trio's clock; 0: when something has changed."""
        self._tells: list[Callable[[int], None]] = []
        """Called with a source before some of it goes."""
        self._asks: list[Callable[[], Iterable[tuple[int, int]]]] = []
        """See Blocks.ask."""
        self._hit_bytes = 0
        """Bytes that were read from blocks since the mount."""
        self._filled_bytes = 0
        """Bytes that have come into blocks."""
        self._dropped_bytes = 0
        """Bytes that did not fit into what may wait."""
        self._evicted_bytes = 0
        """Bytes of blocks that gave way."""
        self._wrong = 0
        """Blocks that were not what their checksums say."""
        servers.descriptors.add_users(self._users)

    def _users(self) -> Iterable[_File]:
        return [file for device in self.devices.values() for file in device.files.values()]

    # --- devices ---

    async def load(self, used: Collection[int] = ()) -> None:
        """Take over what earlier mounts have kept, and remove what nobody knows. ``used``: ids of
        sources, among others, that programs are passed through to."""
        if self._servers.read_only:
            return
        if self._mode == "off":
            for server in self._servers.burst():
                server.workers.post(_remove_all, os.path.join(server.address, naming.BLOCKS))
            return
        burst = [server for server in self._servers.burst() if not server.absent]
        spaces = await self._servers.spaces(burst)
        self.block = block_size(sum(space.total for space in spaces if space is not None))
        for server in burst:
            await self.load_device(server, used)

    async def load_device(self, server: DataServer, used: Collection[int] = ()) -> None:
        """The same of one burst directory."""
        self._known.add(server.id)
        self._ended = ended = set[int]()
        try:
            await self._take_over(server, ended, {*used})
        finally:
            self._ended = None

    async def _take_over(self, server: DataServer, ended: set[int], used: set[int]) -> None:
        path = os.path.join(server.address, naming.BLOCKS)
        device = _Device(server, BlockMap(self.block), path)
        work = (_read_map, (path, self.block, await self._state(), used))
        try:
            segments, names, sizes = (await gather([(server.workers, *work)]))[0]
        except _ERRORS as error:
            _log.info("%s keeps no blocks: %s", server.name, error)
            return
        ids = sorted({segment.source for segment in segments} - self._where.keys())
        ends = await self.standing(ids)
        device.map.restore(
            segment
            for segment in segments
            if segment.source in names
            and (segment.number * BLOCKS + segment.have.bit_length()) * self.block
            <= ends.get(segment.source, 0)
        )
        device.map.limit = device.map.bytes  # until somebody has looked at the device
        device.files = {source: _File(device, source) for source in device.map.sources}
        masks = {
            source: {number: segment.have for number, segment in segments_of.items()}
            for source, segments_of in device.map.sources.items()
        }
        for source, size in sizes.items():
            if size and device.map.held(source, 0, size) == size:
                device.map.hold(source, True)
                device.lent.add(source)
                del masks[source]
            else:  # it has ended
                device.map.end(source)
                masks.pop(source, None)
                file = device.files.pop(source, None) or _File(device, source)
                self._survives(file)
                device.leaving.append((file, None))
        unknown = names - masks.keys() - sizes.keys()
        try:
            call = (server.workers, _tidy, (device, unknown, masks, self.block))
            ended |= (await gather([call]))[0]
        except _ERRORS as error:
            _log.info("%s keeps no blocks: %s", server.name, error)
            return
        # Other tasks ran meanwhile: the sources that they ended, or keep elsewhere, are left out.
        for source in device.files.keys() & (ended | self._where.keys()):
            device.map.end(source)
            device.leaving.append((device.files.pop(source), None))
        self._where |= dict.fromkeys(device.files, device)
        self.devices[server.id] = device

    def bytes_on(self, server: int) -> int:
        """See Blocks."""
        device = self.devices.get(server)
        return 0 if device is None else device.map.bytes - device.map.held_bytes

    def give_room(self, server: int, limit: int) -> None:
        """See Blocks."""
        device = self.devices.get(server)
        if device is None:
            if self._mode != "off" and server not in self._known:
                self._known.add(server)
                self._new.append(server)
                self._upkeep.wake(Work.BLOCKS)
            return
        device.map.limit = limit
        self._has_room = any(it.map.limit for it in self.devices.values())
        if device.has_work or device.is_crowded:
            self._upkeep.wake(Work.BLOCKS)

    async def leave(self, server: int) -> None:
        """See Blocks."""
        device = self.devices.pop(server, None)
        if device is not None:
            for source in list(device.files):
                self._forget(device, source)
            for file, _ in device.leaving:
                file.gone()
            for file in chain.from_iterable(device.survivors.values()):
                file.in_use(-1)
            self._wait_no_more(device, device.fills)
            device.fills.clear()
            await gather([(device.server.workers, _remove_all, (device.path,))])

    # --- reading ---

    def serves(self, layout: Striped) -> bool:
        """See Blocks. Servers in memory, or on a burst directory's own filesystem, do not."""
        if self._mode != "auto":
            return self._mode == "always"
        own = {server.storage.pool for server in self._servers.burst() if not server.absent}
        servers = map(self._servers.find, layout.servers)
        return any(
            not (server.absent or server.storage.in_memory or server.storage.pool in own)
            for server in servers
            if server is not None
        )

    def takes(self, source: int) -> bool:
        """See Blocks."""
        if source in self._where:
            return True
        return self._has_room and source not in self._refused

    def held(self, source: int, offset: int, length: int) -> int:
        """See Blocks."""
        device = self._where.get(source)
        return 0 if device is None else device.map.held(source, offset, length)

    def read_now(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        """See Blocks."""
        spans = self._spans(source, offset, len(buffer), size)
        if not spans or any(mask & ~segment.checked for segment, mask in spans):
            return False
        return self._read_now(self._where[source].files[source], buffer, offset, spans)

    def _spans(
        self, source: int, offset: int, length: int, size: int
    ) -> list[tuple[BlockSegment, int]]:
        """BlockMap.span; also empty beyond the source's end."""
        device = self._where.get(source)
        if device is None or not length or offset + length > size:
            return []
        return device.map.span(source, offset, length) or []

    def _read_now(
        self, file: _File, buffer: memoryview, offset: int, spans: list[tuple[BlockSegment, int]]
    ) -> bool:
        device = file.device
        if file.fd is None:
            return False
        try:
            if device.server.may_inline:
                done = files.read_into(file.fd, buffer, offset)
            elif device.can_read_cached:
                done = files.read_cached(file.fd, buffer, offset)
            else:
                return False
        except OSError:  # a read in a worker meets any other error again
            device.can_read_cached = False
            return False
        if done < len(buffer):
            return False
        self._used(device, spans, len(buffer), file)
        return True

    async def read(self, source: int, offset: int, buffer: memoryview, size: int) -> bool:
        """See Blocks."""
        spans = self._spans(source, offset, len(buffer), size)
        if not spans:
            return False
        device = self._where[source]
        file = device.files[source]
        unchecked = [
            (segment.number * BLOCKS + bit, segment.sum_of(bit))
            for segment, mask in spans
            for bit in range(BLOCKS)
            if mask & ~segment.checked & 1 << bit
        ]
        if not unchecked and self._read_now(file, buffer, offset, spans):
            return True
        call = (device.server.workers, _read, (file, buffer, offset, unchecked, self.block, size))
        file.in_use(1)
        try:
            # The buffer is the thread's until it ends, also where the reader is cancelled.
            [(done, wrong)] = await gather([call], partial(file.in_use, -1), abandonable=True)
        except _ERRORS as error:
            self._fails(device, error)
            self._end_wrong(source)
            return False
        # After the read: a segment leaves the map before its blocks are punched.
        if not all(device.map.is_current(segment) for segment, _ in spans):
            return False
        for index in wrong:
            self._wrong += 1
            _log.info("%s: block %d is not what it was", file.path, index)
            if source not in device.map.held_sources:
                self._drop(device, file, index)
        if wrong and source in device.map.held_sources:
            self._end_wrong(source)
        if wrong or done < len(buffer):
            return False
        for segment, mask in spans:
            segment.checked |= mask & segment.have
        self._used(device, spans, len(buffer), file)
        return True

    def _used(
        self, device: _Device, spans: list[tuple[BlockSegment, int]], length: int, file: _File
    ) -> None:
        self._hit_bytes += length
        file.used = True
        for segment, _ in spans:
            device.map.use(segment, length // len(spans))

    def file_of(self, source: int, offset: int, length: int) -> tuple[DataServer, int] | None:
        """See Blocks."""
        device = self._where.get(source)
        spans = None if device is None else device.map.span(source, offset, length)
        if device is None or spans is None or any(mask & ~it.checked for it, mask in spans):
            return None
        fd = device.files[source].fd
        return None if fd is None else (device.server, fd)

    def bytes_of(self, source: int) -> int:
        """See Blocks."""
        device = self._where.get(source)
        return 0 if device is None else device.map.bytes_of(source)

    def bytes_in(self, source: int, offset: int, length: int) -> int:
        """See Blocks."""
        device = self._where.get(source)
        return 0 if device is None else device.map.bytes_in(source, offset, length)

    @property
    def is_empty(self) -> bool:
        """See Blocks."""
        return not self._where

    @property
    def segment(self) -> int:
        """See Blocks."""
        return BLOCKS * self.block

    def ask(self, read: Callable[[], Iterable[tuple[int, int]]]) -> None:
        """See Blocks."""
        self._asks.append(read)

    def _note_read(self) -> None:
        for read in self._asks:
            for source, segments in read():
                if (device := self._where.get(source)) is not None:
                    device.files[source].used = True
                    device.map.use_segments(source, segments)

    # --- sources that programs use by themselves ---

    def place_of(self, source: int, size: int) -> int | None:
        """See Blocks."""
        device = self._where.get(source)
        if device is None or not size or not device.server.is_at_hand:
            return None
        if self._outlives and source in device.unsaved:
            soon_s = trio.current_time() + max(_SAVE_SOON_S, _SAVE_REST * self._save_took_s)
            self._save_at_s = min(self._save_at_s or soon_s, soon_s)
            self._upkeep.wake(Work.BLOCKS)
            return None
        if source not in device.map.held_sources:
            spans = self.held(source, size - 1, 1) and self._spans(source, 0, size, size)
            if not spans or any(mask & ~segment.checked for segment, mask in spans):
                return None
        return device.server.id

    async def backing(self, source: int, size: int) -> int | None:
        """See Blocks."""
        device = self._where.get(source)
        file = None if device is None else device.files.get(source)
        if device is None or file is None:
            return None
        fd = await self._ask(device, file, _open_whole, size)
        if fd is not None and device.files.get(source) is not file:
            files.close_file(fd)  # the blocks that are there now came after these had ended
            return None
        return fd

    def lend(self, source: int, is_lent: bool) -> None:
        """See Blocks."""
        device = self._where.get(source)
        if device is None:
            return
        if is_lent:
            device.lent.add(source)
            device.map.hold(source, True)
        else:
            device.lent.discard(source)  # it may be mapped: ``_ask_back``

    def is_lent(self, source: int) -> bool:
        """See Blocks."""
        device = self._where.get(source)
        return device is not None and source in device.lent

    async def is_used(self, source: int) -> bool:
        """See Blocks."""
        if await self._has_survivors(source):
            return True
        device = self._where.get(source)
        if device is None or source not in device.map.held_sources:
            return False
        self._tell(source)  # duplicates of its descriptor are no program's
        return source in device.lent or await self._ask(device, device.files[source], _is_used)

    async def _has_survivors(self, source: int) -> bool:
        """Whether programs use former files of this source. Raises Unavailable."""
        for device in list(self.devices.values()):
            for file in list(device.survivors.get(source, ())):
                if not await self._ask(device, file, _is_used):
                    self._let_go(file)
        return any(source in device.survivors for device in self.devices.values())

    def _let_go(self, file: _File) -> None:
        """No program uses it any more."""
        survivors = file.device.survivors.get(file.source, [])
        if file in survivors:
            survivors.remove(file)
            if not survivors:
                del file.device.survivors[file.source]
            file.in_use(-1)

    async def give(self, source: int, copy_id: int) -> DataServer:
        """See Blocks."""
        has_survivors = await self._has_survivors(source)
        device = self._where.get(source)
        if device is None or has_survivors or source not in device.map.held_sources:
            raise Busy(
                f"programs have had the objects {source} open since before their blocks were given "
                "up; until they close them, they can be read alone"
            )
        size, file = device.map.bytes_of(source), device.files.pop(source)
        self._tell(source)
        device.map.end(source)
        device.map.limit = max(0, device.map.limit - size)
        device.lent.discard(source)
        self._where.pop(source)
        device.changed = True
        self._moving.add(source)
        try:
            await self._ask(device, file, _move, device.server.where((0, copy_id)))
        except BaseException:
            device.leaving.append((file, None))
            self._upkeep.wake(Work.BLOCKS)
            raise
        finally:
            self._moving.discard(source)
        file.gone()
        faults.reach(_GIVEN)
        return device.server

    async def _ask(
        self, device: _Device, file: _File, function: Callable[..., Any], *args: Any
    ) -> Any:
        """In a worker. Raises Unavailable."""
        work = "open", file.path, function, file, *args
        return await self._carry_out(device, [file], device.server.call, *work)

    async def _ask_back(self, device: _Device) -> None:
        """Let sources go that no program uses."""
        device.asks_at_s = trio.current_time() + _ASK_S
        for source in list(device.survivors):
            with suppress(*_ERRORS):
                await self._has_survivors(source)
        wanted = device.wanted
        held = device.map.held_sources
        for source in list(islice(held, _ASKED)):
            if wanted <= 0:
                break  # the others stay lent
            with suppress(*_ERRORS):
                if not await self.is_used(source) and source not in device.lent:
                    wanted -= device.map.bytes_of(source)
                    device.map.hold(source, False)
            if source in held:
                held[source] = held.pop(source)  # the others come first the next time

    # --- filling ---

    def fill(self, source: int, offset: int, data: memoryview, end: int) -> None:
        """See Blocks."""
        device = self._where.get(source) or self._place_of(source)
        if device is None or not device.map.limit or trio.current_time() < device.rests_until_s:
            return
        block, stop = self.block, offset + len(data)
        missing = [
            index
            for index in range(-(-offset // block), -(-stop // block))
            if index * block < min((index + 1) * block, end) <= stop
            and (source, index) not in device.filling
            and not device.map.has(source, index)
        ]
        for numbers in _runs(missing):
            start, last = numbers.start * block, min(numbers.stop * block, end)
            if not self._has_memory(last - start):
                self._dropped_bytes += last - start
                continue
            file = device.files.get(source)
            if file is None:
                file = device.files[source] = _File(device, source)
                self._where[source] = device
            self._pending += last - start
            device.filling.update((source, index) for index in numbers)
            part = data[start - offset : last - offset]
            if memoryview(part.obj).nbytes > 2 * len(part):
                part = memoryview(bytes(part))  # or all of a stripe stays in memory for a part
            device.fills.append(_Fill(source, numbers, part, file))
            device.asked += 1
        if device.fills:
            self._upkeep.wake(Work.BLOCKS)

    async def filled(self) -> None:
        """See Blocks."""
        asked = [(device, device.asked) for device in self.devices.values()]
        while any(device.ended < count for device, count in asked):
            await self._fills_ended.wait()

    def want(self, source: int, offset: int, length: int, is_wanted: bool) -> None:
        """See Blocks."""
        if length and (device := self._where.get(source)) is not None:
            device.map.want(source, offset, length, is_wanted)

    @property
    def room(self) -> int:
        """See Blocks."""
        return sum(device.map.limit for device in self.devices.values())

    def _has_memory(self, size: int) -> bool:
        budget = self._servers.budget
        wanted = self._pending + size - _PENDING_MAX - self._reserved
        if wanted <= 0:
            return True
        is_free = wanted <= budget.free  # caches of what is read keep theirs
        is_small = self._reserved + wanted <= budget.total // _PENDING_SHARE
        if not (is_free and is_small and budget.try_reserve(wanted)):
            return False
        self._reserved += wanted
        return True

    def _wait_no_more(self, device: _Device, fills: Collection[_Fill]) -> None:
        """These fills are written, or never will be."""
        device.ended += len(fills)
        self._fills_ended.set()
        self._fills_ended = trio.Event()
        self._pending -= sum(len(fill.data) for fill in fills)
        too_much = min(self._reserved, self._reserved - (self._pending - _PENDING_MAX))
        if too_much > 0:
            self._reserved -= too_much
            self._servers.budget.release(too_much)

    def _place_of(self, source: int) -> _Device | None:
        """The device with the most room for a new source."""
        if source in self._refused or source in self._moving:
            return None
        usable = [device for device in self.devices.values() if device.map.limit]
        return max(usable, key=lambda it: it.map.limit - it.map.bytes, default=None)

    async def work(self) -> float:
        """Do what is due: each device by itself, because one may hang."""
        while self._new:
            if (server := self._servers.find(self._new.pop())) is not None:
                await self.load_device(server)
        await run_all(*(partial(self._work_on, device) for device in self.devices.values()))
        now_s = trio.current_time()
        if not any(device.changed for device in self.devices.values()):
            return NEVER_S
        self._save_at_s = self._save_at_s or now_s + _SAVE_S
        if now_s < self._save_at_s:
            return self._save_at_s - now_s
        await self.save()
        return _SAVE_S if any(device.changed for device in self.devices.values()) else NEVER_S

    async def _work_on(self, device: _Device) -> None:
        if device.is_crowded:
            await self._ask_back(device)
        while device.has_work and device.server.id in self.devices:
            if device.map.is_round_over():
                self._note_read()
            self._evict(device)
            try:
                await self._leave(device)
                await self._fill(device)
            except _ERRORS as error:
                self._fails(device, error)
                return  # what is to go is tried again when somebody has looked at the device

    async def _fill(self, device: _Device) -> None:
        taken: list[_Fill] = []
        while device.fills and sum(len(fill.data) for fill in taken) < _BATCH_BYTES:
            taken.append(device.fills.popleft())
        try:
            # Their bytes were read before this: a source that stands now has stood since then.
            await self._refuse_fallen(device, {fill.source for fill in taken})
            batch = [fill for fill in taken if device.files.get(fill.source) is fill.file]
            if not batch:
                return
            used = [fill.file for fill in batch]
            try:
                sums = await self._carry_out(device, used, _write_all, batch, self.block)
            except _ERRORS:  # what there is of them takes room that the map knows nothing of
                for fill in batch:
                    if device.files.get(fill.source) is fill.file:
                        self._forget(device, fill.source)
                raise
            faults.reach(_FILLED)
        finally:
            self._wait_no_more(device, taken)
            for fill in taken:
                device.filling.difference_update((fill.source, it) for it in fill.numbers)
        for fill, checksums in zip(batch, sums, strict=True):
            if device.files.get(fill.source) is fill.file:
                for number, checksum in zip(fill.numbers, checksums, strict=True):
                    device.map.put(fill.source, number, checksum)
                self._filled_bytes += len(fill.data)
                device.changed = True
                device.unsaved[fill.source] = self._filled_bytes

    async def _refuse_fallen(self, device: _Device, sources: set[int]) -> None:
        """Forget new ones of these that do not stand."""
        new = sorted(sources - device.map.sources.keys())
        standing = await self.standing(new) if new else {}
        for source in new:
            if source not in standing and source in device.files:
                if len(self._refused) >= _REFUSED_MAX:
                    self._refused.clear()
                self._refused.add(source)
                self._forget(device, source)

    # --- what goes ---

    def end(self, source: int) -> bool:
        """See Blocks."""
        if self._ended is not None:
            self._ended.add(source)
        device = self._where.get(source)
        if device is None:
            return False
        self._forget(device, source)
        self._upkeep.wake(Work.BLOCKS)
        return True

    @contextmanager
    def finding(self) -> Iterator[None]:
        """See Blocks."""
        self._findings += 1
        try:
            yield
        finally:
            self._findings -= 1

    def correct(self, source: int) -> bool:
        """See Blocks."""
        self.corrections += 1
        for device in self.devices.values():
            device.changed = True  # maps from before it count no more
        self._upkeep.wake(Work.BLOCKS)
        return self._end_wrong(source)

    def _end_wrong(self, source: int) -> bool:
        """``end``, also of a file that programs use by themselves."""
        device = self._where.get(source)
        if device is not None and source in device.map.held_sources:
            self._survives(device.files[source])
        return self.end(source)

    def _survives(self, file: _File) -> None:
        """It is going to be removed, and programs may use it on."""
        file.outlives = True
        file.in_use(1)
        file.device.survivors.setdefault(file.source, []).append(file)

    def _forget(self, device: _Device, source: int) -> None:
        self._tell(source)
        device.map.end(source)
        device.lent.discard(source)
        self._where.pop(source, None)
        device.leaving.append((device.files.pop(source), None))
        device.changed = True

    def _drop(self, device: _Device, file: _File, index: int) -> None:
        """Drop one block, which is rewritten before it counts, and not punched."""
        number, bit = divmod(index, BLOCKS)
        self._tell(file.source)
        device.map.drop(device.map.sources[file.source][number], 1 << bit)
        device.changed = True

    def tell(self, leaving: Callable[[int], None]) -> None:
        """See Blocks."""
        self._tells.append(leaving)

    def _tell(self, source: int) -> None:
        for tell in self._tells:
            tell(source)

    def _evict(self, device: _Device) -> None:
        while device.map.excess > 0 and len(device.leaving) < _BATCH:
            segment = device.map.evict()
            assert segment is not None  # it takes the bytes that are too many
            self._tell(segment.source)
            self._evicted_bytes += segment.have.bit_count() * self.block
            file = device.files[segment.source]
            device.leaving.append((file, segment))
            if segment.source not in device.map.sources:
                del device.files[segment.source], self._where[segment.source]
                device.leaving.append((file, None))
            device.changed = True

    async def _leave(self, device: _Device) -> None:
        while device.leaving:
            some = list(islice(device.leaving, _BATCH))
            faults.reach(_LEFT)
            used = [file for file, _ in some]
            unused = await self._carry_out(device, used, _give_up, some, self.block)
            for file, segment in some:
                device.leaving.popleft()
                if segment is None:
                    file.gone()
            for file in unused:
                self._let_go(file)

    async def _carry_out(
        self, device: _Device, used: Sequence[_File], function: Callable[..., Any], *args: Any
    ) -> Any:
        """Run it in a worker that uses these files."""
        for file in used:
            file.in_use(1)

        def ended() -> None:
            for file in used:
                file.in_use(-1)

        return (await gather([(device.server.workers, function, args)], ended))[0]

    def _fails(self, device: _Device, error: Exception) -> None:
        device.rests_until_s = trio.current_time() + _REST_S
        fills, device.fills = device.fills, deque()
        self._wait_no_more(device, fills)
        for fill in fills:
            device.filling.difference_update((fill.source, it) for it in fill.numbers)
            if fill.source in device.files and fill.source not in device.map.sources:
                self._forget(device, fill.source)
        _log.info("%s keeps no more blocks for a while: %s", device.path, error)

    # --- the map on disk ---

    async def save(self) -> None:
        """Bring the maps to disk, except while something is found wrong. Raises FsError."""
        self._save_at_s, begin_s = 0.0, trio.current_time()
        state = await self._state()
        if self._findings:
            return  # the state may count them already, and the blocks are there still
        found = [
            (device, device.map.snapshot()) for device in self.devices.values() if device.changed
        ]
        filled = self._filled_bytes
        await self._barrier()  # what names these sources is durable, and so are the lengths
        for device, segments in found:
            device.changed = False
            work = (_write_map, (device.path, segments, self.block, state))
            try:
                await gather([(device.server.workers, *work)])
                device.unsaved = {it: at for it, at in device.unsaved.items() if at > filled}
            except _ERRORS as error:
                self._fails(device, error)
            faults.reach(_SAVED)
        self._save_took_s = trio.current_time() - begin_s

    async def close(self) -> None:
        """At an orderly end. Raises FsError."""
        if any(device.changed for device in self.devices.values()):
            await self.save()
        for file in self._users():
            file.close_idle()
        for device in self.devices.values():
            for file in list(chain.from_iterable(device.survivors.values())):
                self._let_go(file)
            for file, _ in device.leaving:
                file.close_idle()

    def status(self) -> dict[str, Any]:
        """For ``aifs status``; bytes since the mount, except ``cached_bytes``, ``limit_bytes`` and
        ``staying_bytes`` (of sources that programs use). ``wrong_blocks``: with wrong checksums."""
        maps = [device.map for device in self.devices.values()]
        return {
            "block_bytes": self.block,
            "cached_bytes": sum(it.bytes for it in maps),
            "limit_bytes": sum(it.limit for it in maps),
            "sources": sum(len(it.sources) for it in maps),
            "hit_bytes": self._hit_bytes,
            "filled_bytes": self._filled_bytes,
            "evicted_bytes": self._evicted_bytes,
            "staying_bytes": sum(it.held_bytes for it in maps),
            "waiting_bytes": self._pending,
            "dropped_bytes": self._dropped_bytes,
            "wrong_blocks": self._wrong,
        }


def _sum_of(data: memoryview) -> bytes:
    return digest_of(data)[:SUM_BYTES]


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Ascending numbers, as ranges without gaps."""
    start = 0
    for at, number in enumerate(numbers):
        if at + 1 == len(numbers) or numbers[at + 1] != number + 1:
            yield range(numbers[start], number + 1)
            start = at + 1


# --- in worker threads ---


def _read(
    file: _File,
    buffer: memoryview,
    offset: int,
    unchecked: list[tuple[int, bytes]],
    block: int,
    size: int,
) -> tuple[int, list[int]]:
    """Fill ``buffer``; returns the bytes read, and wrong blocks."""
    fd, wrong = file.descriptor(), []
    for index, checksum in unchecked:
        start = index * block
        part = memoryview(bytearray(min(block, size - start)))
        if files.read_into(fd, part, start) < len(part) or _sum_of(part) != checksum:
            wrong.append(index)
    return (0 if wrong else files.read_into(fd, buffer, offset)), wrong


def _write_all(fills: Sequence[_Fill], block: int) -> list[list[bytes]]:
    """The checksums of the blocks of each."""
    for fill in fills:
        fd = fill.file.descriptor()
        if len(fill.data) % block:  # the last one counts whole: so much is free when it goes
            files.change_allocation(fd, files.KEEP_SIZE, fill.numbers[-1] * block, block)
        files.write_at(fd, fill.data, fill.numbers.start * block)
    return [
        [_sum_of(fill.data[at : at + block]) for at in range(0, len(fill.data), block)]
        for fill in fills
    ]


def _give_up(some: list[tuple[_File, BlockSegment | None]], block: int) -> list[_File]:
    """Those of the files that outlive this which no program uses."""
    span, unused = BLOCKS * block, []
    for file, segment in some:
        if segment is not None:
            _punch(file.descriptor(), segment.number * span, span)
            continue
        if file.outlives and not _is_used(file):  # its name may be another file's after this
            unused.append(file)
        with suppress(FileNotFoundError):
            files.unlink(file.path)
    return unused


def _read_map(
    path: str, block: int, state: int, used: set[int]
) -> tuple[list[BlockSegment], set[int], dict[int, int]]:
    """The segments of the map on disk, the sources that have files, and of those among ``used`` the
    sizes of these."""
    if not os.path.isdir(path):
        return [], set(), {}
    names = {int(name, 16) for name in os.listdir(path) if len(name) == 16}
    sizes = {source: os.stat(f"{path}/{source:016x}").st_size for source in used & names}
    record = files.read_file(os.path.join(path, _MAP)) or b""
    head, body = record[:SUM_BYTES], memoryview(record)[SUM_BYTES:]
    with suppress(ValueError):
        if _sum_of(body) == head:
            return decode(block, state, bytes(body)), names, sizes
    return [], names, sizes


def _open_whole(file: _File, size: int) -> int | None:
    """Read-only: a writer of the kernel's would keep drains from proving that there is none."""
    fd = files.open_file(file.path, write=False)
    if os.fstat(fd).st_size == size:
        return fd
    files.close_file(fd)
    return None


def _is_used(file: _File) -> bool:
    return is_used(file.descriptor())


def _move(file: _File, path: str) -> None:
    files.make_dirs(os.path.dirname(path))
    files.rename(file.path, path)


def _write_map(path: str, segments: list[tuple[BlockSegment, int]], block: int, state: int) -> None:
    record = encode(block, state, segments)
    files.replace_file(os.path.join(path, _MAP), _sum_of(memoryview(record)) + record)


def _tidy(
    device: _Device, unknown: Iterable[int], masks: dict[int, dict[int, int]], block: int
) -> set[int]:
    """Remove files and blocks that the map does not name. Returns sources that programs of an
    earlier mount still use: their blocks must stay."""
    used = set[int]()
    for source in unknown:
        files.unlink(f"{device.path}/{source:016x}")
    for source, have in masks.items():
        file = device.files[source]
        status = os.stat(file.path)
        if _is_used(file):
            used.add(source)
            continue
        if status.st_blocks * 512 > sum(mask.bit_count() for mask in have.values()) * block:
            index, fd = 0, file.descriptor()
            while data := files.next_data(fd, index * block, status.st_size):  # it may be sparse
                index = data[0] // block
                if not have.get(index // BLOCKS, 0) >> index % BLOCKS & 1:
                    _punch(fd, index * block, block)
                index += 1
        file.close_idle()
    return used


def _punch(fd: int, offset: int, length: int) -> None:
    files.change_allocation(fd, files.PUNCH_HOLE | files.KEEP_SIZE, offset, length)


def _remove_all(path: str) -> None:
    with suppress(FileNotFoundError):
        for name in os.listdir(path):
            files.unlink(os.path.join(path, name))
        files.remove_dir(path)
