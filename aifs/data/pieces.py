"""Chunks on their way into a container: those of a file's burst copy, and those of another container."""

import errno
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import Unavailable, from_oserror
from aifs.data import chunk_codec
from aifs.data.chunk_codec import FileRecord, Header
from aifs.layout.interleaved import HEADER_BYTES, RECORD_MAX, Interleaved, Location


class Source(NamedTuple):
    """A file to be stored as it is. Nobody changes it meanwhile.

    ``fd``: open for reading, of ``size`` bytes. ``level``: of zstd, 0 for no compression. ``record``: what is to be said of
    it in the container; its sizes and counts are filled in.
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
        target = memory[HEADER_BYTES : HEADER_BYTES + length]
        try:
            # A read and not a mapping, which would end the process where the device fails.
            done = files.read_into(fd, target, self.index * layout.chunk)
        except OSError as error:
            raise from_oserror(error, f"burst copy of inode {ino}") from error
        if done < length:
            raise Unavailable(f"burst copy of inode {ino}: has fewer bytes than the {size} to be stored")
        return chunk_codec.encode(memory, length, level, ino, oid, self.index, layout.chunk)


class StoredPiece(NamedTuple):
    """A chunk that lies in another container. ``read`` fills memory with it, header and all, and checks it."""

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
        """Make the beginning of ``memory`` the chunk as it is stored. Raises Unavailable if it is damaged."""
        await self.read(self.place, memory[: self.length])

    def fill(self, memory: memoryview) -> Header:
        """What is in memory since ``load`` is the chunk. Raises Unavailable if it is another one."""
        if memory[:HEADER_BYTES] != chunk_codec.pack_header(self.header):
            raise Unavailable(f"container {self.place.container}: chunk at {self.place.offset} is not what it was")
        return self.header


Piece = FilePiece | StoredPiece


def cut(source: Source) -> list[FilePiece | None]:
    """The chunks of a source in order; None for a hole. Blocks. Raises Unavailable."""
    indexes = _indexes(source)
    record = source.record
    if record is not None:
        record = record._replace(
            ino=source.ino, oid=source.oid, size=source.size, chunk=source.layout.chunk, count=len(indexes)
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
