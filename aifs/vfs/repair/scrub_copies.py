"""Verifying clean burst copies: of a file that the data servers have, too, but that programs read there.

A copy that is wrong is dropped, since the file is whole without it. That a file has a copy keeps it from being changed
on the data servers; so where these have lost bytes that the copy has, it is left, and named.
"""

from collections.abc import Awaitable, Callable, Sequence

from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.checking.checks import Part, differ
from aifs.data.checking.digests import DIGEST_BYTES, HASHED
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import Interleaved
from aifs.meta import chunks, extents, forms, namespace
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.vfs.repair.scrubbing import Found, Lost
from aifs.vfs.tiers.evict import Evictor

COPY_PIECE = 4 << 20


async def copy_differs(
    engine: Engine,
    servers: Servers,
    inode: Inode,
    memory: memoryview,
    throttle: Callable[[int], Awaitable[None]],
) -> bool:
    """Whether the clean burst copy of a file is missing, or has not the bytes that the checksums of what is on the data
    servers say, as far as there are any. ``memory``: of COPY_PIECE bytes; ``throttle`` is awaited with the bytes of each
    piece."""
    server, key = servers.find(inode.copy.server), (0, inode.copy.id)
    if server is None:
        return False
    fd = None
    try:
        fd = await servers.run(server, server.open_object, key, False, False)
        for start in range(0, inode.size, COPY_PIECE):
            try:
                parts = await _parts(engine, inode, start)
            except FsError:
                return False  # a damaged list of chunks: fsck names it, and the copy may be all that is whole
            if not parts:
                return False
            if fd is None or await servers.run(server, differ, server, key, fd, parts, memory):
                return True
            await throttle(min(COPY_PIECE, inode.size - start))
    except FsError:
        return False  # it cannot be read at present, which says nothing of its bytes
    finally:
        if fd is not None:
            files.close_file(fd)
    return False


async def _parts(engine: Engine, inode: Inode, start: int) -> Sequence[Part]:
    """Those of what is read together, from ``start`` on; none if nobody has checksums."""
    end = min(start + COPY_PIECE, inode.size)
    if isinstance(inode.layout, Interleaved):
        read = _extents if inode.layout.variable else _chunks
        return await read(engine, inode, start, end)
    number = start // HASHED
    first, digests = await engine.view(forms.get_checksums, inode.oid, number)
    digests = digests[
        (number - first) * DIGEST_BYTES :
    ]  # the record has all of the piece: its length is a multiple of that
    return [
        Part(offset, min(HASHED, inode.size - offset), digests[place : place + DIGEST_BYTES])
        for offset, place in zip(
            range(start, end, HASHED), range(0, len(digests), DIGEST_BYTES), strict=False
        )
    ]


async def _chunks(engine: Engine, inode: Inode, start: int, end: int) -> Sequence[Part]:
    parts: list[Part] = []
    layout = inode.layout
    while (index := start // layout.chunk + len(parts)) * layout.chunk < end:
        first, places = await engine.view(chunks.get_chunks, inode.oid, index)
        if not first <= index < first + len(places):
            return []  # the list is damaged: fsck names it
        last = min(-(-end // layout.chunk), first + len(places))
        parts += [
            Part(
                n * layout.chunk,
                layout.length(n, inode.size),
                place.digest if (place := places[n - first]) else None,
            )
            for n in range(index, last)
        ]
    return parts


async def _extents(engine: Engine, inode: Inode, start: int, end: int) -> Sequence[Part]:
    """Of the chunks that begin in this range, and of the zeros in it."""
    parts: list[Part] = []
    at = start
    while at < end:
        offset, _, found = await engine.view(extents.get_extents, inode.oid, at)
        for length, place, _ in found:
            at = offset + length
            if place is not None and length and start <= offset < end:
                parts.append(Part(offset, length, place.digest))
            elif place is None and (first := max(offset, start)) < (stop := min(at, end)):
                parts.append(Part(first, stop - first, None))
            offset = at
    return parts


class CopyScrubber:
    """Used from one trio thread."""

    def __init__(
        self, engine: Engine, servers: Servers, evictor: Evictor, throttle: Callable[[int], Awaitable[None]]
    ) -> None:
        self._engine = engine
        self._servers = servers
        self._evictor = evictor
        self._throttle = throttle
        self._buffers = BudgetedBuffers(servers.budget)

    async def scrub(self, ino: int, found: Found, repair: bool) -> bool:
        """Verify the copy of a file, if it has a clean one and checksums; whether a wrong one has been dropped."""
        inode = await self._engine.view(namespace.find_inode, ino)
        if inode is None or inode.copy is None or inode.in_burst or inode.layout is None:
            return False

        async def throttle(count: int) -> None:
            found.read_bytes += count
            await self._throttle(count)

        memory = await self._buffers.take(COPY_PIECE)
        if not await copy_differs(
            self._engine, self._servers, inode, memory, throttle
        ) or not await self._is_same(inode):
            return False
        found.flaws += 1
        if any(lost.ino == ino for lost in found.lost):
            return False  # neither is whole
        if repair and await self._evictor.evict(ino):
            found.repaired += 1
            return True
        reason = f"its burst copy has other bytes, and is {'in use' if repair else 'left'}; the data servers have the right ones"
        found.lost.append(Lost(ino, inode.oid, 0, inode.size, (inode.copy.server,), reason, for_good=False))
        return False

    async def _is_same(self, before: Inode) -> bool:
        """Whether the copy has been a clean one all the time: who changes it makes it the file first."""
        inode = await self._engine.view(namespace.find_inode, before.ino)
        return inode is not None and (inode.copy, inode.oid, inode.layout) == (
            before.copy,
            before.oid,
            before.layout,
        )
