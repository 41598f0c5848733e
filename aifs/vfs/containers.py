"""Containers of one store: the table in the metadata, the writer, and the descriptors for reading, put together."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from aifs.core.budget import Budget
from aifs.data import pieces
from aifs.data.chunked import ChunkedObjects, ContainerFiles
from aifs.data.containers import ContainerWriter
from aifs.data.pieces import Piece, Source
from aifs.data.servers import Servers
from aifs.data.workers import gather
from aifs.layout.interleaved import Location
from aifs.meta import chunks
from aifs.meta.chunks import Chunks
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.vfs.collector import Collector
from aifs.vfs.ids import IdAllocator


class Containers:
    """How interleaved files are stored and read. ``recover`` comes before the first ``append``."""

    def __init__(
        self, engine: Engine, servers: Servers, ids: IdAllocator, collector: Collector, budget: Budget,
        container_size: int, verify: bool,
    ) -> None:  # fmt: skip
        self.files = ContainerFiles(servers, verify)
        self._engine = engine
        self._servers = servers
        self._ids = ids
        self._collector = collector
        self._writer = ContainerWriter(servers, self, budget, container_size)

    async def recover(self) -> None:
        """Go on with the containers that earlier mounts have not filled."""
        for container, record in (await self._engine.view(chunks.open_containers)).items():
            if record.server in self._servers:
                self._writer.adopt(record.server, container, record.length)

    def close(self) -> None:
        """Let go of all descriptors. Does not block."""
        self._writer.close()
        self.files.close_idle()

    # --- reading ---

    def objects_of(self, inode: Inode) -> ChunkedObjects:
        """The bytes of an interleaved file. Does no I/O."""
        load = partial(self._engine.view, chunks.get_chunks, inode.oid)
        return ChunkedObjects(self.files, inode.layout, load)

    # --- writing ---

    @asynccontextmanager
    async def append(self, sources: Sequence[Source], servers: Sequence[int]) -> AsyncIterator[list[Chunks]]:
        """Store files in containers on ``servers``. Within the block they are durable, and their chunk lists, which
        it yields in the order of ``sources``, are to be recorded with ``put_chunks``.

        Cancellable. Raises NoSpace, QuotaExceeded, Unavailable. What the block has not recorded leaves no trace.
        """
        lists = await gather([(self._servers[servers[0]].workers, _cut_all, (sources,))])
        cut = lists[0]
        whole = [piece for file in cut for piece in file if piece is not None]
        async with self._writer.append(whole, servers) as places:
            following = iter(places)
            yield [[None if piece is None else next(following) for piece in file] for file in cut]

    @asynccontextmanager
    async def append_pieces(self, stored: Sequence[Piece], server: int) -> AsyncIterator[list[Location]]:
        """The same for single chunks, all to one server."""
        async with self._writer.append(stored, (server,)) as places:
            yield places

    # --- the table, for the writer ---

    async def new(self, server: int) -> int:
        container = await self._ids.take()
        await self._engine.transact(chunks.put_container, container, server)
        return container

    async def seal(self, container: int) -> None:
        for garbage in await self._engine.transact(chunks.seal_container, container):
            self._collector.add_garbage(garbage)

    def changed(self, server: int, container: int) -> None:
        self.files.changed(server, container)


def _cut_all(sources: Sequence[Source]) -> list[list[Piece | None]]:
    return [pieces.cut(source) for source in sources]
