"""Compaction: live chunks of a mostly dead container move to another one, to free its space.

Chunks are copied as stored, durably; one transaction points chunk lists, or records of shared
chunks, from the old places to the new. With its last live chunk the old container is garbage. After
a crash lists name durable bytes; a later pass deals with the container.
"""

from collections.abc import Sequence
from contextlib import suppress

from aifs.burst.pool import Movers
from aifs.core import faults
from aifs.core.errors import FsError, NoSpace, QuotaExceeded, Unavailable
from aifs.core.log import logger
from aifs.core.loop_share import LoopShare
from aifs.data.containers.pieces import StoredPiece
from aifs.data.containers.scan import ScannedChunk
from aifs.data.servers import Servers
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.layout.interleaved import Extent, Location, padded, redundancy_of
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys
from aifs.meta.chunks import CHUNKS_PER_RECORD, Container, Move, decode_list
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.shared import find_shared
from aifs.meta.slices import Walk, read_slice

_log = logger(__name__)

INTERVAL_S = 60.0
_BATCH = 512
_BATCH_BYTES = 64 << 20
_MOVED_AT_ONCE = 32
"""In one transaction, for which requests wait."""

_COPIED = faults.declare(
    "vfs.compact.copied", "live chunks are durable in another container, no list names it"
)
_MOVED = faults.declare(
    "vfs.compact.moved", "lists name the new places, garbage is not collected yet"
)


class Compaction:
    """Looks for containers of which more than ``above`` (a fraction) is dead, and rewrites them."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        containers: Containers,
        collector: Collector,
        movers: Movers,
        share: LoopShare,
        above: float,
        seal_above: int,
    ) -> None:
        """``movers`` read and write. ``seal_above``: dead bytes for which a container is sealed
        unfilled."""
        self._engine = engine
        self._servers = servers
        self._containers = containers
        self._collector = collector
        self._movers = movers
        self._share = share
        self._above = above
        self._seal_above = seal_above
        self._left: set[int] = set()
        """Containers that this mount gave up: damaged, or with a wrong count of live bytes."""

    async def work(self) -> float:
        """Compact; in how many seconds to do it again."""
        await self.compact()
        return INTERVAL_S

    async def compact(self) -> None:
        """One pass over all containers. One that cannot be moved stays, and is logged."""
        self._containers.files.forget()
        await self._containers.leave_servers()
        asked = self._above, self._seal_above
        async for item in Walk(self._engine, b"t", _mostly_dead, *asked, share=self._share):
            if item[0] not in self._left:
                await self._try(*item)

    async def evacuate(self, container: int) -> bool:
        """Move all live chunks to containers on servers in use; then it is garbage. False if it is
        being appended to: try later. Raises NoSpace, QuotaExceeded, Unavailable."""
        await self._containers.retire(lambda other, _: other == container)
        record, is_open = await self._engine.view(_state_of, container)
        if record is not None and not is_open:
            await self._rewrite(container, record)
        return not is_open

    async def _try(self, container: int, record: Container) -> None:
        try:
            await self.evacuate(container)
        except (NoSpace, QuotaExceeded) as error:
            _log.info("compaction has to wait: %s", error)
        except FsError as error:
            if self._has_failing_servers(record.layout):
                return  # the log says so; the next pass tries again
            self._left.add(container)
            _log.warning("container %d is not compacted: %s", container, error)

    def _has_failing_servers(self, layout: Striped) -> bool:
        known = [self._servers.find(number) for number in layout.servers]
        return any(server is not None and server.state != "ok" for server in known)

    async def _rewrite(self, container: int, record: Container) -> None:
        try:
            await self._move_all(container, record)
        except FsError:
            if await self._is_there(container):
                raise  # else the last file that needed it has gone meanwhile
        else:
            if await self._is_there(container):
                raise Unavailable(
                    "bytes in it count as alive, but no file names them; fsck corrects the count"
                )

    async def _is_there(self, container: int) -> bool:
        return await self._engine.view(chunks.find_container, container) is not None

    async def _move_all(self, container: int, record: Container) -> None:
        slots = self._slots_for(record.layout)
        batch: list[tuple[ScannedChunk, Location]] = []
        offset = 0
        while offset < record.length:
            at = offset, record.length
            found, offset = await self._containers.scan(container, *at, self._movers)
            await self._share.give_way()
            batch += await self._engine.view(_live, container, found)
            if len(batch) >= _BATCH or sum(place.stored for _, place in batch) >= _BATCH_BYTES:
                await self._move(batch, slots)
                batch = []
        if batch:
            await self._move(batch, slots)

    def _slots_for(self, layout: Striped) -> tuple[Striped, ...]:
        """The same servers, perhaps asked for, else any, of their class if possible."""
        if self._containers.is_usable(layout):
            return (layout,)
        redundancy, storage_class = redundancy_of(layout), self._servers.class_of(layout.servers)
        if not self._containers.has_place((), redundancy, storage_class):
            storage_class = ""
        return self._containers.slots(redundancy, (), storage_class)

    async def _move(
        self, live: list[tuple[ScannedChunk, Location]], slots: tuple[Striped, ...]
    ) -> None:
        pieces = [StoredPiece(found.header, place) for found, place in live]
        async with self._containers.append_pieces(pieces, slots, self._movers) as (places, lost):
            faults.reach(_COPIED)
            moves = [
                Move(found.header.oid, found.header.number, old, new)
                for (found, old), new in zip(live, places, strict=True)
            ]
            for first in range(0, len(moves), _MOVED_AT_ONCE):
                part = moves[first : first + _MOVED_AT_ONCE]
                garbage = await self._engine.transact(chunks.move_chunks, part, lost)
                faults.reach(_MOVED)
                for container in garbage:
                    self._containers.moved(container)  # an open object keeps its space
                    self._collector.add_garbage(container)
                await self._share.give_way()


def _mostly_dead(
    tx: ReadTransaction, start: bytes, end: bytes, above: float, seal_above: int
) -> tuple[list[tuple[int, Container]], bytes]:
    """Containers worth it in one slice, with records, and where the next slice starts (empty:
    none)."""
    found = []
    records, following = read_slice(tx, start, end)
    for key, value in records:
        with suppress(Unavailable):  # damaged: fsck names it
            record = chunks.decode_container(value)
            number, has_room = keys.number(key), record.length - record.live <= seal_above
            if _is_worth_it(record, above) and not (has_room and _is_open(tx, number)):
                found.append((number, record))
    return found, following


def _is_worth_it(record: Container, above: float) -> bool:
    dead = record.length - record.live
    return dead > above * record.length and padded(record.layout, record.live) < record.length


def _is_open(tx: ReadTransaction, container: int) -> bool:
    return tx.get(keys.open_container(container)) is not None


def _state_of(tx: ReadTransaction, container: int) -> tuple[Container | None, bool]:
    return chunks.find_container(tx, container), _is_open(tx, container)


def _live(
    tx: ReadTransaction, container: int, found: Sequence[ScannedChunk]
) -> list[tuple[ScannedChunk, Location]]:
    """Chunks that a list, or a shared chunk's record, names at this place."""
    lists: dict[tuple[int, int], Sequence[Extent]] = {}
    live = []
    for chunk in found:
        header = chunk.header
        if header.oid:
            number = header.number % CHUNKS_PER_RECORD
            first = header.number - number
            if (header.oid, first) not in lists:
                record = tx.get(keys.chunk_list(header.oid, first))
                lists[header.oid, first] = [] if record is None else decode_list(record)[1]
            known = lists[header.oid, first]
            extent = known[number] if number < len(known) else Extent(0)
            place = None if extent.shared else extent.place
        else:
            shared = find_shared(tx, header.digest)
            place = None if shared is None else shared.place
        if place is not None and (place.container, place.offset) == (container, chunk.offset):
            live.append((chunk, place))
    return live
