"""Containers of one store: table in the metadata, writer and descriptors for reading."""

from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import NamedTuple

import trio

from aifs.burst.making import InChunks
from aifs.burst.pool import Movers
from aifs.core import faults
from aifs.core.errors import Unavailable
from aifs.data.containers import pieces
from aifs.data.containers.appending import Appended, Appending, append
from aifs.data.containers.chunked import ChunkedObjects
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.data.containers.pieces import FilePiece, FileSource, OpenCopies, Piece
from aifs.data.containers.scan import Scanned, Scanning, scan
from aifs.data.containers.writer import ContainerWriter, Stored
from aifs.data.objects.object_set import OnDamage
from aifs.data.server import MissingObject
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.files.collector import Collector
from aifs.layout.interleaved import Extent, Interleaved, container_layout
from aifs.layout.placement import ACTIVE, ALGORITHM, Candidate, spread
from aifs.layout.redundancy import Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks
from aifs.meta.chunks import CHUNKS_PER_RECORD
from aifs.meta.kv import Engine, ReadTransaction
from aifs.store.ids import IdAllocator

_LISTED = faults.declare(
    "vfs.containers.listed", "a part of a long list is on record, no file has it"
)

LISTED_AT_ONCE = 32 * CHUNKS_PER_RECORD
"""Extents that one transaction records where there are many."""


class StoredFiles(NamedTuple):
    """Files in containers: their chunk lists, and further records (see Stored)."""

    lists: Sequence[Sequence[Extent]]
    lost: dict[int, int]


class Containers:
    """How interleaved files are stored and read. ``recover`` comes before the first ``append``."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        ids: IdAllocator,
        collector: Collector,
        container_size: int,
        verify: bool,
        on_damage: OnDamage,
        spare: int = 0,
    ) -> None:
        """``verify``: all reads of programs. ``on_damage``: see ContainerFiles; ``spare``:
        ContainerWriter."""
        self.files = ContainerFiles(servers, self.find, on_damage)
        self._verify = verify
        self._engine = engine
        self._servers = servers
        self._ids = ids
        self._collector = collector
        self.writer = ContainerWriter(self, container_size, spare)
        self._placed: dict[tuple[Redundancy, tuple[int, ...], str], _Placed] = {}

    async def recover(self) -> None:
        """Go on with plain containers that earlier mounts of this host have not filled; seal the
        others, and with several hosts all, because the holder of the role may be about to."""
        host = self._engine.host
        for container, record in (await self._engine.view(chunks.open_containers, host)).items():
            if record.layout.is_protected or host or not self.grows(record.layout):
                await self.seal(container)
            elif record.layout.servers[0] in self._servers:
                self.writer.adopt(record.layout, container, record.length)

    def close(self) -> None:
        """Let go of all descriptors. Does not block."""
        self.files.close()

    # --- reading ---

    def objects_of(self, layout: Interleaved, oid: int, copied: bool = False) -> ChunkedObjects:
        """The bytes of an interleaved file; ``copied``: checked. Does no I/O."""
        load = partial(self._engine.view, chunks.get_extents, oid, layout.chunk)
        return ChunkedObjects(self.files, load, copied or self._verify)

    async def describe(self, layout: Interleaved, oid: int, size: int) -> InChunks:
        """Where the chunks of an interleaved file lie. Raises Unavailable for a damaged list."""
        extents, at = list[Extent](), 0
        while at < size:
            start, found = await self._engine.view(chunks.get_extents, oid, layout.chunk, at)
            if start != at:
                raise Unavailable(f"the chunk list {oid} has two extents for byte {at}")
            extents += found
            at += sum(extent.length for extent in found)
            await trio.lowlevel.checkpoint()  # lists may be long
        named = sorted({e.place.container for e in extents if e.place is not None})
        entries = [(container, await self.find(container)) for container in named]
        return InChunks(
            tuple(extents),
            tuple((container, entry) for container, entry in entries if entry is not None),
        )

    def moved(self, container: int) -> None:
        """The container's record, or what is known of its columns, has changed."""
        self.files.moved(container)

    async def scan(self, container: int, offset: int, end: int, movers: Movers) -> Scanned:
        """Have ``movers`` find chunks of a container from one at ``offset`` on, before ``end``.
        Raises MissingObject, Unavailable."""
        entry = await self.find(container)
        if entry is None:
            raise MissingObject(f"container {container} does not exist")
        asked = Scanning(container, entry._replace(length=end), offset)
        found = await movers.carry_out(scan, asked)
        assert found is not None  # nothing cancels it
        return found

    # --- placement ---

    def has_place(
        self, allowed: Sequence[int], redundancy: Redundancy, storage_class: str = ""
    ) -> bool:
        """Whether there are servers for containers of this redundancy, as ``slots`` says."""
        try:
            return bool(self.slots(redundancy, allowed, storage_class))
        except Unavailable:
            return False

    def slots(
        self, redundancy: Redundancy, allowed: Sequence[int] = (), storage_class: str = ""
    ) -> tuple[Striped, ...]:
        """Layouts of containers for new files, on usable servers ``allowed`` (none: any) of a class
        ("": those for new files).

        The layouts change only with the servers, else ever more containers would be begun. If too
        few work, the others get columns, which are rebuilt elsewhere. Raises Unavailable if even so
        there are too few.
        """
        candidates = self._servers.candidates(storage_class)
        growing = tuple(c for c in candidates if self._servers[c.id].storage.append)
        candidates = growing or candidates  # objects that do not grow are packs, of one append each
        if not candidates:
            raise Unavailable(f"no data server of the class {storage_class!r} can be used")
        chosen = tuple(c for c in candidates if c.id in allowed) or candidates
        if not redundancy.is_protected:
            return tuple(container_layout((candidate.id,)) for candidate in chosen)
        needed = redundancy.least_servers
        others = self._others(chosen, allowed, storage_class)
        chosen = (*chosen, *others[: max(needed - len(chosen), 0)])
        if len(chosen) < needed:
            raise Unavailable(
                f"the policy of files asks for {needed} data servers; there are {len(chosen)}"
            )
        chosen = tuple(sorted(chosen))
        names = frozenset((candidate.id, candidate.domain) for candidate in chosen)
        asked = redundancy, tuple(allowed), storage_class
        placed = self._placed.get(asked)
        if placed is None or placed.names != names:
            placed = self._placed[asked] = _Placed(names, _place(redundancy, chosen))
        return placed.slots

    def servers_of(self, redundancy: Redundancy, allowed: Sequence[int]) -> frozenset[int]:
        """All servers that ``slots`` names."""
        return frozenset(
            server for layout in self.slots(redundancy, allowed) for server in layout.servers
        )

    def _others(
        self, chosen: Sequence[Candidate], allowed: Sequence[int], storage_class: str
    ) -> list[Candidate]:
        known = {candidate.id for candidate in chosen}
        return [
            Candidate(server.id, server.domain or f"server {server.id}")
            for server in self._servers.of_class(storage_class)
            if server.id not in known and (not allowed or server.id in allowed)
        ]

    def is_usable(self, layout: Striped) -> bool:
        """Whether new containers may be laid out so."""
        servers = self._servers
        return all(n in servers.usable(servers.class_of((n,))) for n in layout.servers)

    # --- writing ---

    @asynccontextmanager
    async def append(
        self,
        sources: Sequence[FileSource],
        slots: Sequence[Striped],
        movers: Movers,
    ) -> AsyncIterator[StoredFiles]:
        """Have ``movers`` store files in containers laid out like ``slots``; cancellable.

        Within the block they are durable, and their chunk lists, yielded in the order of
        ``sources``, are to be recorded with ``put_lists``; all else leaves no trace. Raises
        NoSpace, QuotaExceeded, Unavailable.
        """
        cut = await self._cut(sources)
        whole = [piece for file in cut for piece in file if piece is not None]
        async with self.append_pieces(whole, slots, movers) as appended:
            following = iter(appended.places)
            lists = [
                [
                    Extent(source.layout.length(number, source.size), piece and next(following))
                    for number, piece in enumerate(file)
                ]
                for source, file in zip(sources, cut, strict=True)
            ]
            yield StoredFiles(lists, appended.lost)

    async def _cut(self, sources: Sequence[FileSource]) -> list[list[FilePiece | None]]:
        if not any(source.sparse for source in sources):
            return _cut_all(sources, self._servers)
        device = self._servers[sources[0].origin[0]]
        return (await gather([(device.workers, _cut_all, (sources, self._servers))]))[0]

    @asynccontextmanager
    async def append_pieces(
        self, stored: Sequence[Piece], slots: Sequence[Striped], movers: Movers
    ) -> AsyncIterator[Stored]:
        """The same for single chunks, to containers that are laid out like ``slots``."""

        async def carry_out(appending: Appending, cancelled: Callable[[], bool]) -> Appended | None:
            return await movers.carry_out(append, appending, cancelled)

        async with self.writer.append(stored, slots, carry_out) as appended:
            yield appended

    async def list_extents(
        self, oid: int, extents: Sequence[Extent], new: Collection[bytes], lost: Mapping[int, int]
    ) -> None:
        """Record a long chunk list beforehand, so that the flip is short: ``FormChange`` has no
        extents then. ``new`` and ``lost``: see ``put_loose``. Callers keep the appended pinned.

        Until the flip the list is garbage: callers give ``oid`` to the collector if there is no
        flip, also if this fails. Raises Stale, NoSpace, Unavailable.
        """
        start = 0
        for first in range(0, len(extents), LISTED_AT_ONCE):
            part = extents[first : first + LISTED_AT_ONCE]
            await self._engine.transact(chunks.put_loose, oid, first, start, part, new, lost)
            start += sum(extent.length for extent in part)
            faults.reach(_LISTED)
            await trio.lowlevel.checkpoint()

    async def retire(self, unwanted: Callable[[int, Striped], bool]) -> None:
        """Seal the unwanted open containers, by id and layout, unless an append uses them."""
        await self.writer.retire(unwanted)

    async def leave_servers(self) -> None:
        """Seal the open containers of servers that are being emptied, or given up."""
        gone = {server.id for server in self._servers.capacity() if server.standing != ACTIVE}
        if gone:
            await self.retire(lambda _, layout: not gone.isdisjoint(layout.servers))

    # --- the table, for the writer ---

    async def find(self, container: int) -> ContainerEntry | None:
        return await self._engine.view(_find_entry, container)

    async def new(self, layout: Striped) -> int:
        container = await self._ids.take()
        await self._engine.transact(chunks.put_container, container, layout)
        return container

    async def seal(self, container: int) -> None:
        self.files.moved(container)  # columns may have failed
        for garbage in await self._engine.transact(chunks.seal_container, container):
            self._collector.add_garbage(garbage)

    def grows(self, layout: Striped) -> bool:
        return self._servers.append(layout.servers)

    def changed(self, container: int, layout: Striped) -> None:
        self.files.changed(container, layout)


def _find_entry(tx: ReadTransaction, container: int) -> ContainerEntry | None:
    found = chunks.find_readable(tx, container)
    if found is None:
        return None
    record, unread = found
    return ContainerEntry(record.layout, record.length, unread, chunks.is_sealed(tx, container))


class _Placed(NamedTuple):
    """Slots, and the servers (with domains) that they were chosen from."""

    names: frozenset[tuple[int, str]]
    slots: tuple[Striped, ...]


def _place(redundancy: Redundancy, candidates: tuple[Candidate, ...]) -> tuple[Striped, ...]:
    """As many sets of servers as there are servers, so that all get their share."""
    columns = redundancy.least_servers
    chosen = [
        spread(ALGORITHM, seed, candidates, columns, redundancy.replicas)
        for seed in range(len(candidates))
    ]
    return tuple(dict.fromkeys(container_layout(servers, redundancy) for servers in chosen))


def _cut_all(sources: Sequence[FileSource], servers: Servers) -> list[list[FilePiece | None]]:
    with closing(OpenCopies(servers)) as copies:
        return [pieces.cut(source, copies) for source in sources]
