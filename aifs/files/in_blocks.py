"""The bytes of a file that are in blocks on this host, and those that could be."""

from collections.abc import Iterator
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.data.reading.blocks import Blocks
from aifs.layout.interleaved import HEADER_BYTES
from aifs.meta import chunks
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode


class SourcePart(NamedTuple):
    """Bytes of a file that follow each other, and where they lie in a source (see Blocks)."""

    start: int
    length: int
    source: int
    offset: int
    stored: int
    """How many bytes they have there."""


class InBlocks(NamedTuple):
    """Of one file."""

    here: int
    """Bytes that are in blocks here; of a compressed chunk as many as of its stored bytes."""
    is_whole: bool
    """Whether no more can follow: bytes behind these in a container may be appended to."""


def parts_of(tx: ReadTransaction, inode: Inode) -> Iterator[SourcePart]:
    """All of a file but its holes. Raises Unavailable where it cannot be read."""
    if inode.read_as is not None and inode.size:
        yield SourcePart(0, inode.size, inode.oid, 0, inode.size)
    at = 0
    while inode.chunks is not None and at < inode.size:
        at, extents = chunks.get_extents(tx, inode.oid, inode.chunks.chunk, at)
        for length, place, _ in extents:
            if place is not None:
                offset = place.offset + HEADER_BYTES
                yield SourcePart(at, length, place.container, offset, place.stored)
            at += length


def find_in_blocks(tx: ReadTransaction, inode: Inode, blocks: Blocks) -> InBlocks:
    here, is_whole = 0, inode.layout is not None and not blocks.is_empty
    if not blocks.is_empty:
        try:
            for part in parts_of(tx, inode):
                held = blocks.bytes_in(part.source, part.offset, part.stored)
                here += part.length * held // part.stored
                is_whole &= held == part.stored or held == _settled(tx, part, blocks.block)
        except Unavailable:  # what is read there fails
            is_whole = False
    return InBlocks(here, is_whole)


def _settled(tx: ReadTransaction, part: SourcePart, block: int) -> int:
    container = None
    with suppress(Unavailable):  # fsck names it
        container = chunks.find_container(tx, part.source)
    if container is None or chunks.is_sealed(tx, part.source):
        return part.stored
    end = container.length - container.length % block
    return min(max(0, end - part.offset), part.stored)
