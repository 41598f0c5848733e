"""Chunks on their way into a container: those of a file's burst copy, and those of another
container.
"""

import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import Unavailable, from_oserror
from aifs.data.containers import chunk_codec
from aifs.data.containers.chunk_codec import RECIPE, RECIPE_EXTENTS, FileRecord, Header
from aifs.layout.interleaved import HEADER_BYTES, RECORD_MAX, Extent, Interleaved, Location


class Source(NamedTuple):
    """A file to be stored as it is. Nobody changes it meanwhile.

    ``fd``: open for reading, of ``size`` bytes. ``level``: of zstd, 0 for no compression.
    ``record``: what is to be said of it in the container; its sizes and counts are filled in.
    """

    ino: int
    oid: int
    size: int
    fd: int
    layout: Interleaved
    level: int
    record: FileRecord | None = None


class FilePiece(NamedTuple):
    """A chunk of a source."""

    source: Source
    index: int
    record: FileRecord | None = None

    @property
    def space(self) -> int:
        """Bytes of a container that it takes at most, with the record of its file."""
        return HEADER_BYTES + RECORD_MAX + self.source.layout.length(self.index, self.source.size)

    def fill(self, memory: memoryview) -> Header:
        """Make the beginning of ``memory`` the chunk. Blocks. Raises Unavailable."""
        ino, oid, size, fd, layout, level, _ = self.source
        length = layout.length(self.index, size)
        _read(fd, ino, memory[HEADER_BYTES : HEADER_BYTES + length], self.index * layout.chunk)
        return chunk_codec.encode(memory, length, level, ino, oid, self.index, layout.chunk)


class HashedPiece(NamedTuple):
    """A range of a file whose digest is known: it is not hashed again, so nobody may have changed
    the file since.

    ``fd``: open for reading. ``ino``: of whose burst copy that is, for errors. ``level``: of zstd,
    0 for no compression. It becomes a shared chunk, or, with ``oid``, extent ``index`` of that
    file, whose largest chunk is ``chunk``.
    """

    fd: int
    ino: int
    offset: int
    length: int
    digest: bytes
    level: int
    oid: int = 0
    index: int = 0
    chunk: int = 0
    record: FileRecord | None = None

    @property
    def space(self) -> int:
        return HEADER_BYTES + RECORD_MAX + self.length

    def fill(self, memory: memoryview) -> Header:
        """As that of a FilePiece."""
        fd, ino, offset, length, digest, level, oid, index, chunk, _ = self
        _read(fd, ino, memory[HEADER_BYTES : HEADER_BYTES + length], offset)
        return chunk_codec.encode(
            memory, length, level, ino if oid else 0, oid, index, chunk, digest
        )


class RecipePiece(NamedTuple):
    """What the extents of a file are, or some of them (see ``recipes``)."""

    ino: int
    oid: int
    index: int
    chunk: int
    body: bytes
    record: FileRecord | None = None

    @property
    def space(self) -> int:
        return HEADER_BYTES + RECORD_MAX + len(self.body)

    def fill(self, memory: memoryview) -> Header:
        ino, oid, index, chunk, body, _ = self
        header = Header(ino, oid, index, chunk, RECIPE, len(body), 0, chunk_codec.digest_of(body))
        memory[:HEADER_BYTES] = chunk_codec.pack_header(header)
        memory[HEADER_BYTES : HEADER_BYTES + len(body)] = body
        return header


class StoredPiece(NamedTuple):
    """A chunk that lies in another container. ``read`` fills memory with it, header and all, and
    checks it.
    """

    header: Header
    place: Location
    read: Callable[[Location, memoryview], Awaitable[None]]
    record: FileRecord | None = None

    @property
    def length(self) -> int:
        """Of header and stored bytes."""
        return HEADER_BYTES + self.place.stored

    @property
    def space(self) -> int:
        return RECORD_MAX + self.length

    async def load(self, memory: memoryview) -> None:
        """Make the beginning of ``memory`` the chunk as it is stored. Raises Unavailable if it is
        damaged.
        """
        await self.read(self.place, memory[: self.length])

    def fill(self, memory: memoryview) -> Header:
        """What is in memory since ``load`` is the chunk. Raises Unavailable if it is another
        one.
        """
        if memory[:HEADER_BYTES] != chunk_codec.pack_header(self.header):
            raise Unavailable(
                f"container {self.place.container}: chunk at {self.place.offset} is not what it was"
            )
        return self.header


Piece = FilePiece | HashedPiece | RecipePiece | StoredPiece


def _read(fd: int, ino: int, target: memoryview, offset: int) -> None:
    """Fill ``target`` from a burst copy. Raises Unavailable."""
    try:
        # A read and not a mapping, which would end the process where the device fails.
        done = files.read_into(fd, target, offset)
    except OSError as error:
        raise from_oserror(error, f"burst copy of inode {ino}") from error
    if done < len(target):
        end = offset + len(target)
        raise Unavailable(f"burst copy of inode {ino}: has fewer bytes than the {end} to be stored")


def recipes(
    ino: int,
    oid: int,
    layout: Interleaved,
    extents: Sequence[Extent],
    record: FileRecord | None = None,
) -> list[RecipePiece]:
    """Those of a file that is an extent list, to be appended when its other chunks have been.

    Where they lie are more extents, of length 0, behind the others, in this order
    (``with_recipes``). Blocks for long lists.
    """
    count = len(extents)
    starts = range(0, count, RECIPE_EXTENTS)
    if record is not None:
        size = sum(extent.length for extent in extents)
        own = sum(1 for extent in extents if extent.place is not None and not extent.shared) + len(
            starts
        )
        record = record._replace(ino=ino, oid=oid, size=size, chunk=layout.chunk, count=own)
    return [
        RecipePiece(
            ino,
            oid,
            count + number,
            layout.chunk,
            chunk_codec.pack_recipe(
                first,
                count,
                [(e.length, e.digest) for e in extents[first : first + RECIPE_EXTENTS]],
            ),
            record,
        )
        for number, first in enumerate(starts)
    ]


def with_recipes(extents: Sequence[Extent], places: Sequence[Location]) -> list[Extent]:
    """The whole extent list of a file whose recipes lie there."""
    return [*extents, *(Extent(0, place) for place in places)]


def cut(source: Source) -> list[FilePiece | None]:
    """The chunks of a source in order; None for a hole. Blocks. Raises Unavailable."""
    indexes = _indexes(source)
    record = source.record
    if record is not None:
        record = record._replace(
            ino=source.ino,
            oid=source.oid,
            size=source.size,
            chunk=source.layout.chunk,
            count=len(indexes),
        )
    pieces: list[FilePiece | None] = [None] * source.layout.count(source.size)
    for index in indexes:
        pieces[index] = FilePiece(source, index, record)
    return pieces


def _indexes(source: Source) -> list[int]:
    """Of the chunks that are no holes."""
    count = source.layout.count(source.size)
    try:
        if os.fstat(source.fd).st_blocks * 512 >= source.size:
            return list(range(count))
        indexes: list[int] = []
        offset = 0
        while offset < source.size:
            offset = _next_data(source.fd, offset)
            index = offset // source.layout.chunk
            if index < count:
                indexes.append(index)
            offset = (index + 1) * source.layout.chunk
        return indexes
    except OSError as error:
        raise from_oserror(error, f"burst copy of inode {source.ino}") from error


def _next_data(fd: int, offset: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return 1 << 63
        raise
