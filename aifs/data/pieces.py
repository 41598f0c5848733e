"""Chunks on their way into a container: those of a file's burst copy, and those of another container."""

import errno
import os
from typing import NamedTuple

from aifs.core import files
from aifs.core.errors import Unavailable, from_oserror
from aifs.data import chunk_codec
from aifs.data.chunk_codec import Header
from aifs.data.server import DataServer
from aifs.layout.interleaved import HEADER_BYTES, Interleaved, Location


class Source(NamedTuple):
    """A file to be stored as it is. Nobody changes it meanwhile.

    ``fd``: open for reading, of ``size`` bytes. ``level``: of zstd, 0 for no compression.
    """

    ino: int
    oid: int
    size: int
    fd: int
    layout: Interleaved
    level: int


class FilePiece(NamedTuple):
    """A chunk of a source."""

    source: Source
    index: int

    @property
    def space(self) -> int:
        """Bytes of a container that it takes at most."""
        return HEADER_BYTES + self.source.layout.length(self.index, self.source.size)

    def fill(self, memory: memoryview) -> Header:
        """Make the beginning of ``memory`` the chunk. Blocks. Raises Unavailable."""
        ino, oid, size, fd, layout, level = self.source
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
    """A chunk that lies in another container, open as ``fd`` on ``server``."""

    server: DataServer
    fd: int
    header: Header
    place: Location

    @property
    def space(self) -> int:
        return HEADER_BYTES + self.place.stored

    def fill(self, memory: memoryview) -> Header:
        """Make the beginning of ``memory`` the chunk as it is stored. Blocks. Raises Unavailable if it is damaged."""
        record = memory[: self.space]
        key = (0, self.place.container)
        done = self.server.read(key, self.fd, record, self.place.offset)
        stored = record[HEADER_BYTES:]
        try:
            if done < len(record) or chunk_codec.unpack_header(record) != self.header:
                raise ValueError("its header is not what it was")
            raw = chunk_codec.decode(stored, self.header.codec, self.header.raw)
            if chunk_codec.digest_of(raw) != self.place.digest:
                raise ValueError("its checksum is wrong")
        except ValueError as error:
            where = f"{self.server.name}: {self.server.object_path(*key)}"
            raise Unavailable(f"{where}: chunk at {self.place.offset}: {error}") from None
        return self.header


Piece = FilePiece | StoredPiece


def cut(source: Source) -> list[FilePiece | None]:
    """The chunks of a source in order; None for a hole. Blocks. Raises Unavailable."""
    count = source.layout.count(source.size)
    try:
        if os.fstat(source.fd).st_blocks * 512 >= source.size:
            return [FilePiece(source, index) for index in range(count)]
        pieces: list[FilePiece | None] = [None] * count
        offset = 0
        while offset < source.size:
            offset = _next_data(source.fd, offset)
            index = offset // source.layout.chunk
            if index < count:
                pieces[index] = FilePiece(source, index)
            offset = (index + 1) * source.layout.chunk
        return pieces
    except OSError as error:
        raise from_oserror(error, f"burst copy of inode {source.ino}") from error


def _next_data(fd: int, offset: int) -> int:
    try:
        return os.lseek(fd, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a hole up to the end
            return 1 << 63
        raise
