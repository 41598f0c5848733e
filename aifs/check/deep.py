"""The check of bytes: everything that has a checksum is read from its data servers and compared.

Striped files have a checksum per MiB unless they were written in place or are mostly holes, interleaved files one
per chunk. Cached burst copies of them, which are what programs read, must have the same. Files that the other
checks have found to lack bytes are passed over.
"""

from array import array
from collections.abc import Collection, Iterator
from functools import partial
from typing import NamedTuple

import trio

from aifs.burst.transfer import HASHED
from aifs.check import repair
from aifs.check.findings import Problem, Progress, Subject
from aifs.check.scan import for_each
from aifs.check.table import NONE, UNREADABLE, InodeTable
from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.chunk_codec import Header, decode, digest_of, unpack_header
from aifs.data.server import DataServer
from aifs.data.striped import StripedObjects
from aifs.layout.interleaved import CHUNK_MAX, HEADER_BYTES, Interleaved, Location
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.keys import DIGEST_BYTES, DIGESTS_PER_RECORD
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode, decode_inode
from aifs.vfs.store import Store

_AT_ONCE = 4
"""Files that are read at the same time."""

_PIECE = 8 * HASHED
_TOLD_MAX = 8
"""Ranges of one file that are told one by one."""


class _Bad(NamedTuple):
    """Bytes of a file that are not what they should be, and the numbers of the servers that they lie on."""

    kind: str
    start: int
    end: int
    servers: tuple[int, ...]


class _Part(NamedTuple):
    """Bytes of a file, and their checksum; None: they are a hole."""

    start: int
    length: int
    digest: bytes | None


class _Cache:
    """The cached burst copy of a file, open; ``bad``: some of its bytes are not what the checksums say."""

    def __init__(self, server: DataServer, copy_id: int, fd: int) -> None:
        self.server = server
        self.key = (0, copy_id)
        self.fd = fd
        self.bad = False


class DeepCheck:
    """Reads every file once, several at the same time. Changes nothing."""

    def __init__(self, store: Store, table: InodeTable, progress: Progress) -> None:
        self._engine = store.engine
        self._servers = store.servers
        self._table = table
        self._progress = progress
        self._waiting = array("Q")
        self._done = self._expected = 0
        self._problems: list[Problem] = []

    async def run(self, damaged: Collection[Subject]) -> list[Problem]:
        """What is found; ``damaged``: inode numbers of files that lack bytes."""
        await for_each(self._engine, *keys.all_of(b"i"), self._expect, lambda count: None)
        self._waiting = array("Q", (ino for ino in reversed(self._waiting) if ino not in damaged))
        async with trio.open_nursery() as nursery:
            for _ in range(_AT_ONCE):
                nursery.start_soon(self._read_files)
        return sorted(self._problems, key=lambda problem: (problem.where, problem.kind))

    def _expect(self, tx: ReadTransaction, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        row = self._table.find(ino)
        if len(key) != len(keys.inode(ino)) or row == NONE or self._table.flags[row] & UNREADABLE:
            return
        inode = decode_inode(ino, value)
        has_checksums = isinstance(inode.layout, Interleaved)
        if isinstance(inode.layout, Striped):
            has_checksums = tx.get(keys.checksums(inode.oid, 0)) is not None
        if has_checksums:
            self._waiting.append(ino)
            self._expected += inode.size

    async def _read_files(self) -> None:
        memory = memoryview(bytearray(max(_PIECE, HEADER_BYTES + CHUNK_MAX)))
        while self._waiting:
            inode = await self._engine.view(namespace.get_inode, self._waiting.pop())
            bad: list[_Bad] = []
            cache = await self._open_cache(inode)
            try:
                if isinstance(inode.layout, Striped):
                    await self._read_striped(inode, memory, bad, cache)
                else:
                    await self._read_chunks(inode, memory, bad, cache)
            finally:
                if cache is not None:
                    files.close_file(cache.fd)
            if bad or (cache is not None and cache.bad):
                await self._engine.view(self._tell, inode, bad, cache)

    def _count(self, length: int) -> None:
        self._done += length
        self._progress("bytes", self._done, self._expected)

    # --- cached copies ---

    async def _open_cache(self, inode: Inode) -> _Cache | None:
        if inode.copy is None or inode.copy.server not in self._servers:
            return None
        server, key = self._servers[inode.copy.server], (0, inode.copy.id)
        try:
            fd = await self._servers.run(server, server.open_object, key, False, False)
        except FsError:
            return None
        return None if fd is None else _Cache(server, inode.copy.id, fd)

    async def _compare_cache(self, cache: _Cache | None, parts: list[_Part], memory: memoryview) -> None:
        if cache is not None and not cache.bad:
            cache.bad = await self._servers.run(cache.server, _cache_differs, cache, parts, memory)

    # --- striped files ---

    async def _read_striped(
        self, inode: Inode, memory: memoryview, bad: list[_Bad], cache: _Cache | None
    ) -> None:
        layout, size = inode.layout, inode.size
        if not all(number in self._servers for number in layout.servers):
            return  # named already
        objects = StripedObjects(self._servers, layout, inode.ino, inode.oid)
        worker = self._servers[layout.servers[0]]
        try:
            for start in range(0, size, _PIECE):
                part = memory[: min(_PIECE, size - start)]
                expected = await self._engine.view(_read_digests, inode.oid, start // HASHED)
                try:
                    await objects.read_into(start, part, size)
                except FsError:
                    bad.append(_bad_stripes("unreadable-bytes", layout, start, len(part)))
                else:
                    for offset, length in await self._servers.run(worker, _differing, part, expected):
                        bad.append(_bad_stripes("wrong-checksum", layout, start + offset, length))
                await self._compare_cache(cache, _parts_of(start, len(part), expected), memory)
                self._count(len(part))
        finally:
            objects.close()

    # --- interleaved files ---

    async def _read_chunks(
        self, inode: Inode, memory: memoryview, bad: list[_Bad], cache: _Cache | None
    ) -> None:
        layout, size = inode.layout, inode.size
        for first in range(0, layout.count(size), chunks.CHUNKS_PER_RECORD):
            _, places = await self._engine.view(chunks.get_chunks, inode.oid, first)
            by_container: dict[tuple[int, int], list[tuple[int, Location]]] = {}
            for index, place in enumerate(places, first):
                if place is not None and place.server in self._servers:
                    by_container.setdefault((place.server, place.container), []).append((index, place))
            for (number, _), group in by_container.items():
                server = self._servers[number]
                found = await self._servers.run(server, _check_chunks, server, inode, group, memory)
                for kind, index in found:
                    start = index * layout.chunk
                    bad.append(_Bad(kind, start, start + layout.length(index, size), (number,)))
            parts = [
                _Part(index * layout.chunk, layout.length(index, size), place.digest if place else None)
                for index, place in enumerate(places, first)
            ]
            await self._compare_cache(cache, parts, memory)
            self._count(sum(part.length for part in parts))

    # --- what is found ---

    def _tell(self, tx: ReadTransaction, inode: Inode, bad: list[_Bad], cache: _Cache | None) -> None:
        where = self._table.path(tx, inode.ino)
        for kind in sorted({item.kind for item in bad}):
            ranges = _joined(item for item in bad if item.kind == kind)
            told = [self._describe(item) for item in ranges[:_TOLD_MAX]]
            if len(ranges) > _TOLD_MAX:
                told.append(f"and {len(ranges) - _TOLD_MAX} more ranges")
            if cache is not None and not cache.bad:
                told.append(f"its burst copy is whole: {cache.server.object_path(*cache.key)}")
            self._problems.append(Problem(kind, inode.ino, "; ".join(told), where=where))
        if cache is not None and cache.bad:
            # Where the data servers do not have all bytes either, each may have those that the other lacks.
            fix = None if bad else partial(repair.drop_copy, ino=inode.ino)
            path = cache.server.object_path(*cache.key)
            detail = f"{cache.server.name}: {path} has other bytes than the file"
            self._problems.append(Problem("bad-cache", inode.ino, detail, fix, where=where))

    def _describe(self, bad: _Bad) -> str:
        names = " or ".join(self._servers[number].name for number in bad.servers)
        return f"bytes {bad.start} to {bad.end - 1}, on {names}"


def _joined(ranges: Iterator[_Bad]) -> list[_Bad]:
    """Ranges that touch, on the same servers, as one."""
    joined: list[_Bad] = []
    for bad in sorted(ranges, key=lambda item: item.start):
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.servers) == (bad.start, bad.servers):
            joined[-1] = last._replace(end=bad.end)
        else:
            joined.append(bad)
    return joined


def _bad_stripes(kind: str, layout: Striped, offset: int, length: int) -> _Bad:
    servers = {layout.servers[extent.index] for extent in layout.extents(offset, length)}
    return _Bad(kind, offset, offset + length, tuple(sorted(servers)))


def _read_digests(tx: ReadTransaction, oid: int, first: int) -> bytes:
    """The checksums of one piece, which starts with MiB ``first`` of a file."""
    within = first % DIGESTS_PER_RECORD
    record = tx.get(keys.checksums(oid, first - within)) or b""
    return record[within * DIGEST_BYTES : (within + _PIECE // HASHED) * DIGEST_BYTES]


def _parts_of(start: int, length: int, digests: bytes) -> list[_Part]:
    return [
        _Part(start + offset, min(HASHED, length - offset), digests[place : place + DIGEST_BYTES])
        for offset, place in zip(range(0, length, HASHED), range(0, len(digests), DIGEST_BYTES), strict=False)
    ]


# --- in worker threads ---


def _cache_differs(cache: _Cache, parts: list[_Part], memory: memoryview) -> bool:
    """Whether a part of the copy cannot be read, or is not what it should be."""
    for start, length, digest in parts:
        data = memory[:length]
        try:
            done = cache.server.read(cache.key, cache.fd, data, start)
        except FsError:
            return True
        if done < length or (bytes(data) != bytes(length) if digest is None else digest_of(data) != digest):
            return True
    return False


def _differing(data: memoryview, expected: bytes) -> list[tuple[int, int]]:
    """Offset and length of each MiB whose checksum is another one."""
    found = []
    for number, offset in enumerate(range(0, len(data), HASHED)):
        part = data[offset : offset + HASHED]
        if digest_of(part) != expected[number * DIGEST_BYTES : (number + 1) * DIGEST_BYTES]:
            found.append((offset, len(part)))
    return found


def _check_chunks(
    server: DataServer, inode: Inode, group: list[tuple[int, Location]], memory: memoryview
) -> list[tuple[str, int]]:
    """Kind of finding and number of each chunk, of those in one container, that is not as it was stored."""
    key = (0, group[0][1].container)
    found: list[tuple[str, int]] = []
    try:
        fd = server.open_object(key, create=False, write=False)
    except FsError:
        fd = None
    if fd is None:
        return [("unreadable-bytes", index) for index, _ in group]
    try:
        for index, place in group:
            record = memory[: HEADER_BYTES + place.stored]
            header = Header(
                inode.ino, inode.oid, index, inode.layout.chunk,
                place.codec, place.stored, place.raw, place.digest,
            )  # fmt: skip
            try:
                done = server.read(key, fd, record, place.offset)
                if done < len(record) or unpack_header(record) != header:
                    raise ValueError
                if digest_of(decode(record[HEADER_BYTES:], place.codec, place.raw)) != place.digest:
                    raise ValueError
            except FsError:
                found.append(("unreadable-bytes", index))
            except ValueError:
                found.append(("wrong-checksum", index))
    finally:
        files.close_file(fd)
    return found
