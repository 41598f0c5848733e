"""Whether the clean burst copy of a file has the bytes that the checksums of what is on the data
servers say.
"""

from collections.abc import Awaitable, Callable, Sequence
from enum import Enum, auto

from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.checking.checks import CheckedPart, differ
from aifs.data.checking.digests import DIGEST_BYTES, HASHED
from aifs.data.servers import Servers
from aifs.meta import chunks, extents, forms
from aifs.meta.kv import Engine
from aifs.meta.records import Inode

COPY_PIECE = 4 << 20


class Judgement(Enum):
    """On a clean burst copy: its bytes are those that the checksums say; no; there are no checksums
    of all of them, but it is as long as the file; it cannot be read now."""

    RIGHT = auto()
    WRONG = auto()
    UNTOLD = auto()
    UNREADABLE = auto()


async def judge_copy(
    engine: Engine,
    servers: Servers,
    inode: Inode,
    memory: memoryview,
    throttle: Callable[[int], Awaitable[None]] | None = None,
) -> Judgement:
    """Compare the clean burst copy of a file with the checksums of what is on the data servers. One
    that is missing is wrong. ``memory``: of COPY_PIECE bytes; ``throttle`` is awaited with the
    bytes of each piece."""
    assert inode.copy is not None
    server, key = servers.find(inode.copy.server), (0, inode.copy.id)
    if server is None:
        return Judgement.UNREADABLE
    fd = None
    try:
        fd = await servers.run(server, server.open_object, key, False, False)
        if fd is None or (await servers.run(server, server.stat, key, fd)).length != inode.size:
            return Judgement.WRONG
        for start in range(0, inode.size, COPY_PIECE):
            try:
                parts = await _parts(engine, inode, start)
            except FsError:
                return (
                    Judgement.UNTOLD
                )  # a damaged list: fsck names it, and the copy may be all that is whole
            if not parts:
                return Judgement.UNTOLD
            if await servers.run(server, differ, server, key, fd, parts, memory):
                return Judgement.WRONG
            if throttle is not None:
                await throttle(min(COPY_PIECE, inode.size - start))
    except FsError:
        return Judgement.UNREADABLE  # which says nothing of its bytes
    finally:
        if fd is not None:
            files.close_file(fd)
    return Judgement.RIGHT


async def _parts(engine: Engine, inode: Inode, start: int) -> Sequence[CheckedPart]:
    """Those of what is read together, from ``start`` on; none if nobody has checksums."""
    end = min(start + COPY_PIECE, inode.size)
    if inode.chunks is not None:
        read = _extents if inode.lists_extents else _chunks
        return await read(engine, inode, start, end)
    number = start // HASHED
    first, digests = await engine.view(forms.get_checksums, inode.oid, number)
    digests = digests[
        (number - first) * DIGEST_BYTES :
    ]  # the record has all of the piece: its length is a multiple of that
    return [
        CheckedPart(offset, min(HASHED, inode.size - offset), digests[place : place + DIGEST_BYTES])
        for offset, place in zip(
            range(start, end, HASHED), range(0, len(digests), DIGEST_BYTES), strict=False
        )
    ]


async def _chunks(engine: Engine, inode: Inode, start: int, end: int) -> Sequence[CheckedPart]:
    parts: list[CheckedPart] = []
    layout = inode.chunks
    assert layout is not None
    while (number := start // layout.chunk + len(parts)) * layout.chunk < end:
        first, places = await engine.view(chunks.get_chunks, inode.oid, number)
        if not first <= number < first + len(places):
            return []  # the list is damaged: fsck names it
        last = min(-(-end // layout.chunk), first + len(places))
        parts += [
            CheckedPart(
                n * layout.chunk,
                layout.length(n, inode.size),
                place.digest if (place := places[n - first]) else None,
            )
            for n in range(number, last)
        ]
    return parts


async def _extents(engine: Engine, inode: Inode, start: int, end: int) -> Sequence[CheckedPart]:
    """Of the chunks that begin in this range, and of the zeros in it."""
    parts: list[CheckedPart] = []
    at = start
    while at < end:
        offset, _, found = await engine.view(extents.get_extents, inode.oid, at)
        for length, place, _ in found:
            at = offset + length
            if place is not None and length and start <= offset < end:
                parts.append(CheckedPart(offset, length, place.digest))
            elif place is None and (first := max(offset, start)) < (stop := min(at, end)):
                parts.append(CheckedPart(first, stop - first, None))
            offset = at
    return parts
