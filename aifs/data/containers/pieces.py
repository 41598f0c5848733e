"""Chunks on their way into a container, from files or other containers: plain values that hold
nothing open."""

import errno
import os
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import Unavailable, from_oserror
from aifs.data import chunk_codec
from aifs.data.chunk_codec import ChunkHeader
from aifs.data.objects.holes import InObjects, Source
from aifs.data.servers import Servers
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location

CopyPlace = tuple[int, int]
"""A burst copy: the number of its burst directory, and its id."""


class OpenCopies:
    """Reads burst copies, in a worker thread; the last one stays open until ``close``."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers
        self._place: CopyPlace | None = None
        self._fd = -1

    def open(self, place: CopyPlace, ino: int) -> int:
        """Its descriptor, for reading. Raises Unavailable."""
        if place != self._place:
            self.close()
            device = self._servers[place[0]]
            fd = device.open_object((0, place[1]), create=False, write=False)
            if fd is None:
                where = device.where((0, place[1]))
                raise Unavailable(f"burst copy of inode {ino}: {where} is missing")
            self._place, self._fd = place, fd
        return self._fd

    def read(self, place: CopyPlace, ino: int, target: memoryview, offset: int) -> None:
        """Fill ``target``. Raises Unavailable."""
        fd = self.open(place, ino)
        try:
            # A read and not a mapping, which would end the process where the device fails.
            done = files.read_into(fd, target, offset)
        except OSError as error:
            raise from_oserror(error, f"burst copy of inode {ino}") from error
        if done < len(target):
            end = offset + len(target)
            raise Unavailable(
                f"burst copy of inode {ino}: has fewer bytes than the {end} to be stored"
            )

    def close(self) -> None:
        if self._place is not None:
            self._servers[self._place[0]].storage.close(self._fd)
            self._place = None


class FileSource(NamedTuple):
    """A file to be stored as it is. Nobody changes it meanwhile."""

    ino: int
    """Of the file, for errors."""
    oid: int
    """Of its new chunk list."""
    size: int
    """Bytes of the file."""
    origin: CopyPlace | InObjects
    """The holder of its bytes."""
    layout: Interleaved
    """How it is cut into chunks."""
    level: int
    """Of zstd; 0 for no compression."""
    sparse: bool = False
    """There are holes in a burst copy, which are to be found."""


class FilePiece(NamedTuple):
    """A chunk of a source."""

    source: FileSource
    number: int

    @property
    def objects(self) -> InObjects | None:
        """Objects to ``load`` its bytes from before ``fill``; None: ``fill`` reads them."""
        origin = self.source.origin
        return origin if isinstance(origin, InObjects) else None

    @property
    def space(self) -> int:
        """Bytes of a container that it takes at most."""
        return HEADER_BYTES + self.source.layout.length(self.number, self.source.size)

    def fill(self, memory: memoryview, copies: OpenCopies) -> ChunkHeader:
        """Make the beginning of ``memory`` the chunk. Blocks. Raises Unavailable."""
        ino, oid, size, origin, layout, level, _ = self.source
        length = layout.length(self.number, size)
        if not isinstance(origin, InObjects):
            target = memory[HEADER_BYTES : HEADER_BYTES + length]
            copies.read(origin, ino, target, self.number * layout.chunk)
        return chunk_codec.encode(memory, length, level, oid, self.number)

    async def load(self, memory: memoryview, objects: Source) -> None:
        """Put its bytes, which are in objects, where ``fill`` expects them. Raises Unavailable."""
        _, _, size, _, layout, _, _ = self.source
        offset, length = self.number * layout.chunk, layout.length(self.number, size)
        await objects.read_into(offset, memory[HEADER_BYTES : HEADER_BYTES + length], size)


class HashedPiece(NamedTuple):
    """A range of an unchanged file with a known digest, which is not hashed again."""

    copy: CopyPlace
    """The burst copy that has the bytes of the file."""
    ino: int
    """Of the file, for errors."""
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

    def fill(self, memory: memoryview, copies: OpenCopies) -> ChunkHeader:
        """As that of a FilePiece."""
        copy, ino, offset, length, digest, level, oid, number = self
        copies.read(copy, ino, memory[HEADER_BYTES : HEADER_BYTES + length], offset)
        return chunk_codec.encode(memory, length, level, oid, number, digest)


class StoredPiece(NamedTuple):
    """A chunk that lies in another container."""

    header: ChunkHeader
    place: Location

    @property
    def length(self) -> int:
        """Of header and stored bytes."""
        return HEADER_BYTES + self.place.stored

    @property
    def space(self) -> int:
        return self.length

    def fill(self, memory: memoryview, _: OpenCopies) -> ChunkHeader:
        """Check that ``memory`` begins with this stored chunk. Raises Unavailable otherwise."""
        if memory[:HEADER_BYTES] != chunk_codec.pack_header(self.header):
            raise Unavailable(
                f"container {self.place.container}: chunk at {self.place.offset} is not what it was"
            )
        return self.header


Piece = FilePiece | HashedPiece | StoredPiece


def cut(source: FileSource, copies: OpenCopies) -> list[FilePiece | None]:
    """The chunks of a source in order; None for a hole. Blocks if sparse. Raises Unavailable."""
    count = source.layout.count(source.size)
    numbers = _with_data(source, count, copies) if source.sparse else range(count)
    pieces: list[FilePiece | None] = [None] * count
    for number in numbers:
        pieces[number] = FilePiece(source, number)
    return pieces


def _with_data(source: FileSource, count: int, copies: OpenCopies) -> list[int]:
    """Numbers of chunks that are no holes."""
    assert not isinstance(source.origin, InObjects)
    fd = copies.open(source.origin, source.ino)
    numbers: list[int] = []
    offset = 0
    try:
        while offset < source.size:
            offset = _next_data(fd, offset)
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
