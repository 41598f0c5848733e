"""Chunks on their way into a container: those of a file's burst copy, and those of another
container.
"""

import errno
import os
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import Unavailable, from_oserror
from aifs.data.containers import chunk_codec
from aifs.data.containers.chunk_codec import ChunkHeader
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location


class FileSource(NamedTuple):
    """A file to be stored as it is. Nobody changes it meanwhile."""

    ino: int
    """Of the file, for errors."""
    oid: int
    """Of its new chunk list."""
    size: int
    """Bytes of the file."""
    fd: int
    """It is open for reading there."""
    layout: Interleaved
    """How it is cut into chunks."""
    level: int
    """Of zstd; 0 for no compression."""


class FilePiece(NamedTuple):
    """A chunk of a source."""

    source: FileSource
    number: int

    @property
    def space(self) -> int:
        """Bytes of a container that it takes at most."""
        return HEADER_BYTES + self.source.layout.length(self.number, self.source.size)

    def fill(self, memory: memoryview) -> ChunkHeader:
        """Make the beginning of ``memory`` the chunk. Blocks. Raises Unavailable."""
        ino, oid, size, fd, layout, level = self.source
        length = layout.length(self.number, size)
        _read(fd, ino, memory[HEADER_BYTES : HEADER_BYTES + length], self.number * layout.chunk)
        return chunk_codec.encode(memory, length, level, oid, self.number)


class HashedPiece(NamedTuple):
    """A range of a file whose digest is known: it is not hashed again, so nobody may have changed
    the file since.
    """

    fd: int
    """The file is open for reading there."""
    ino: int
    """Of whose burst copy that is, for errors."""
    offset: int
    """Where in the file the range begins."""
    length: int
    """Its bytes."""
    digest: bytes
    """BLAKE3 of these."""
    level: int
    """Of zstd; 0 for no compression."""
    oid: int = 0
    """The file that it becomes an extent of; 0: it becomes a shared chunk."""
    number: int = 0
    """Which extent."""

    @property
    def space(self) -> int:
        return HEADER_BYTES + self.length

    def fill(self, memory: memoryview) -> ChunkHeader:
        """As that of a FilePiece."""
        fd, ino, offset, length, digest, level, oid, number = self
        _read(fd, ino, memory[HEADER_BYTES : HEADER_BYTES + length], offset)
        return chunk_codec.encode(memory, length, level, oid, number, digest)


class StoredPiece(NamedTuple):
    """A chunk that lies in another container. ``read`` fills memory with it, header and all, and
    checks it.
    """

    header: ChunkHeader
    place: Location
    read: Callable[[Location, memoryview], Awaitable[None]]

    @property
    def length(self) -> int:
        """Of header and stored bytes."""
        return HEADER_BYTES + self.place.stored

    @property
    def space(self) -> int:
        return self.length

    async def load(self, memory: memoryview) -> None:
        """Make the beginning of ``memory`` the chunk as it is stored. Raises Unavailable if it is
        damaged.
        """
        await self.read(self.place, memory[: self.length])

    def fill(self, memory: memoryview) -> ChunkHeader:
        """What is in memory since ``load`` is the chunk. Raises Unavailable if it is another
        one.
        """
        if memory[:HEADER_BYTES] != chunk_codec.pack_header(self.header):
            raise Unavailable(
                f"container {self.place.container}: chunk at {self.place.offset} is not what it was"
            )
        return self.header


Piece = FilePiece | HashedPiece | StoredPiece


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


def cut(source: FileSource) -> list[FilePiece | None]:
    """The chunks of a source in order; None for a hole. Blocks. Raises Unavailable."""
    numbers = _numbers(source)
    pieces: list[FilePiece | None] = [None] * source.layout.count(source.size)
    for number in numbers:
        pieces[number] = FilePiece(source, number)
    return pieces


def _numbers(source: FileSource) -> list[int]:
    """Of the chunks that are no holes."""
    count = source.layout.count(source.size)
    try:
        if os.fstat(source.fd).st_blocks * 512 >= source.size:
            return list(range(count))
        numbers: list[int] = []
        offset = 0
        while offset < source.size:
            offset = _next_data(source.fd, offset)
            number = offset // source.layout.chunk
            if number < count:
                numbers.append(number)
            offset = (number + 1) * source.layout.chunk
        return numbers
    except OSError as error:
        raise from_oserror(error, f"burst copy of inode {source.ino}") from error


def _next_data(fd: int, offset: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return 1 << 63
        raise
