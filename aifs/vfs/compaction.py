"""Compaction: what is alive in a container that is mostly dead moves to another one, so that its space comes back.

For each batch of chunks: they are copied as they are stored, and made durable; one transaction points the chunk lists
that still name the old places to the new ones. With its last live chunk the old container becomes garbage. A crash at
any step leaves lists that name durable bytes, and a container that a later pass deals with.
"""

from contextlib import suppress
from typing import NamedTuple

import trio

from aifs.core import faults
from aifs.core.errors import FsError, NoSpace, QuotaExceeded, Unavailable
from aifs.core.log import logger
from aifs.data import chunk_codec
from aifs.data.chunk_codec import Header
from aifs.data.pieces import StoredPiece
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.meta import chunks, keys
from aifs.meta.chunks import Container, Move
from aifs.meta.kv import Engine, ReadTransaction
from aifs.vfs.collector import Collector
from aifs.vfs.containers import Containers

_log = logger(__name__)

_INTERVAL_S = 60.0
_SLICE = 2048
_BATCH = 256
_BATCH_BYTES = 64 << 20

_COPIED = faults.declare("vfs.compact.copied", "live chunks are durable in another container, no list names it")
_MOVED = faults.declare("vfs.compact.moved", "lists name the new places, garbage is not collected yet")


class Found(NamedTuple):
    """A chunk in a container, by its header."""

    offset: int
    header: Header


class Compaction:
    """Looks for containers of which more than ``above`` (a fraction) is dead, and rewrites them."""

    def __init__(
        self, engine: Engine, servers: Servers, containers: Containers, collector: Collector, above: float
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._containers = containers
        self._collector = collector
        self._above = above
        self._left: set[int] = set()
        """Containers that this mount does not try again: damaged, or alive by a count that is wrong."""

    async def run(self) -> None:
        """Compact now and then, until cancelled."""
        while True:
            await trio.sleep(_INTERVAL_S)
            await self.compact()

    async def compact(self) -> None:
        """One pass over all containers. What cannot be moved stays, with a line in the log."""
        self._containers.files.close_idle()
        start, end = keys.all_of(b"t")
        while start:
            candidates, start = await self._engine.view(_mostly_dead, start, end, self._above)
            for container, record in candidates.items():
                if container not in self._left:
                    await self._try(container, record)

    async def _try(self, container: int, record: Container) -> None:
        try:
            server = self._servers[record.server]
            if server.health.usable:
                await self._rewrite(container, record, server)
        except (NoSpace, QuotaExceeded) as error:
            _log.info("compaction has to wait: %s", error)
        except FsError as error:
            if record.server in self._servers and server.health.failing:
                return  # the log says so; the next pass tries again
            self._left.add(container)
            _log.warning("container %d is not compacted: %s", container, error)

    async def _rewrite(self, container: int, record: Container, server: DataServer) -> None:
        fd = await self._servers.run(server, server.open_object, (0, container), False)
        if fd is None:
            raise Unavailable(f"{server.name}: {server.object_path(0, container)} is missing")
        try:
            offset = 0
            while offset < record.length:
                found, offset = await self._servers.run(server, _scan, server, container, fd, offset, record.length)
                live = await self._engine.view(_live, container, found)
                if live:
                    await self._move(live, server, fd)
        finally:
            server.close_object(fd)
        if await self._engine.view(chunks.find_container, container) is not None:
            raise Unavailable("bytes in it count as alive, but no file names them; fsck corrects the count")

    async def _move(self, live: list[tuple[Header, Location]], server: DataServer, fd: int) -> None:
        pieces = [StoredPiece(server, fd, header, place) for header, place in live]
        async with self._containers.append_pieces(pieces, server.id) as places:
            faults.reach(_COPIED)
            moves = [
                Move(header.oid, header.index, old, new)
                for (header, old), new in zip(live, places, strict=True)
            ]
            garbage = await self._engine.transact(chunks.move_chunks, moves)
        faults.reach(_MOVED)
        for container in garbage:
            self._collector.add_garbage(container)


def _mostly_dead(
    tx: ReadTransaction, start: bytes, end: bytes, above: float
) -> tuple[dict[int, Container], bytes]:
    """Containers of one slice of the table that are worth it, and where the next slice starts (empty: none)."""
    found, count, key = {}, 0, b""
    for key, value in tx.range(start, end, _SLICE):
        count += 1
        with suppress(Unavailable):  # damaged: fsck names it
            record = chunks.decode_container(value)
            if record.length - record.live > above * record.length:
                found[keys.number(key)] = record
    sealed = {number: record for number, record in found.items() if tx.get(keys.open_container(number)) is None}
    return sealed, key + b"\0" if count == _SLICE else b""


def _live(tx: ReadTransaction, container: int, found: list[Found]) -> list[tuple[Header, Location]]:
    """Those chunks that a list names at just this place."""
    lists: dict[tuple[int, int], chunks.Chunks] = {}
    live = []
    for offset, header in found:
        first = header.index - header.index % chunks.CHUNKS_PER_RECORD
        if (header.oid, first) not in lists:
            record = tx.get(keys.chunk_list(header.oid, first))
            lists[header.oid, first] = [] if record is None else chunks.decode_chunks(record)
        known = lists[header.oid, first][header.index - first : header.index - first + 1]
        if known and known[0] is not None and (known[0].container, known[0].offset) == (container, offset):
            live.append((header, known[0]))
    return live


def _scan(server: DataServer, container: int, fd: int, offset: int, end: int) -> tuple[list[Found], int]:
    """The next chunks of a container, and the offset behind them; in a worker thread."""
    found: list[Found] = []
    limit = min(end, offset + _BATCH_BYTES)
    buffer = memoryview(bytearray(HEADER_BYTES))
    while offset < limit and len(found) < _BATCH:
        try:
            if server.read((0, container), fd, buffer, offset) < HEADER_BYTES:
                raise ValueError("it ends too early")
            header = chunk_codec.unpack_header(buffer)
        except ValueError as error:
            path = server.object_path(0, container)
            raise Unavailable(f"{server.name}: {path} at {offset}: {error}") from None
        found.append(Found(offset, header))
        offset += HEADER_BYTES + header.stored
    return found, offset
