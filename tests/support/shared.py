"""Files that are extent lists, stored without a group: shared chunks, chunks of their own,
zeros.
"""

import os
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from aifs.core.errors import Stale
from aifs.data.chunk_codec import digest_of
from aifs.data.containers.pieces import HashedPiece
from aifs.layout.interleaved import Extent, Interleaved, Location, named
from aifs.layout.redundancy import PLAIN, Redundancy
from aifs.layout.striped import Striped
from aifs.meta import chunks, namespace, shared
from aifs.meta.kv import Transaction
from aifs.vfs import Caller, Filesystem
from tests.support.copies import Copies

ME = Caller()


class Segment(NamedTuple):
    """A range of a file, which becomes one extent: zeros (of ``data``, the length counts), or a
    chunk of these bytes."""

    data: bytes
    is_shared: bool = True

    @property
    def is_zeros(self) -> bool:
        return not self.data.strip(b"\0")


def bytes_of(segments: Sequence[Segment]) -> bytes:
    return b"".join(segment.data for segment in segments)


def random_segments(rng: random.Random, pool: Sequence[bytes], count: int) -> list[Segment]:
    """Mostly chunks of the ``pool``, which others have, too."""
    segments = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.65:
            segments.append(Segment(rng.choice(pool)))
        elif kind < 0.8:
            segments.append(Segment(bytes(rng.randrange(1, 100_000))))
        else:
            segments.append(
                Segment(rng.randbytes(rng.randrange(1, 20_000)), is_shared=rng.random() < 0.3)
            )
    return segments


async def save(
    fs: Filesystem,
    directory: int,
    files: Mapping[bytes, Sequence[Segment]],
    redundancy: Redundancy = PLAIN,
    level: int = 0,
) -> dict[bytes, int]:
    """Make these files, by name; their inode numbers."""
    inos = {name: (await fs.mknod(directory, name, 0o100644, 0, ME)).ino for name in files}
    await store(fs, {inos[name]: segments for name, segments in files.items()}, redundancy, level)
    return inos


async def store(
    fs: Filesystem,
    contents: Mapping[int, Sequence[Segment]],
    redundancy: Redundancy = PLAIN,
    level: int = 0,
    servers: Sequence[int] = (),
) -> None:
    """Give files, which nobody has open and which have no burst copy, these bytes, as a grouped
    drain of them all does. ``servers``: where new chunks may go (none: anywhere)."""
    copies = Copies(fs.store.servers)
    try:
        copy = copies(b"".join(bytes_of(segments) for segments in contents.values()))
        while not await _store(fs, contents, copy, fs.containers.slots(redundancy, servers), level):
            pass  # a chunk that was found has gone meanwhile
    finally:
        copies.close()


async def _store(
    fs: Filesystem,
    contents: Mapping[int, Sequence[Segment]],
    copy: tuple[int, int],
    slots: Sequence[Striped],
    level: int,
) -> bool:
    engine = fs.store.engine
    digests = {
        digest_of(s.data) for segments in contents.values() for s in segments if not s.is_zeros
    }
    found = await engine.view(shared.find_all_shared, digests)
    oids = {ino: await fs.ids.take() for ino in contents}
    chunk = max(
        (len(s.data) for segments in contents.values() for s in segments if not s.is_zeros),
        default=1,
    )
    to_store: list[HashedPiece] = []
    lists: dict[int, list[Extent | int]] = {}  # a number: of the piece
    new: dict[bytes, int] = {}
    at = 0
    for ino, segments in contents.items():
        rows = lists[ino] = []
        for segment in segments:
            length, digest = len(segment.data), digest_of(segment.data)
            if segment.is_zeros:
                rows.append(Extent(length))
            elif segment.is_shared and digest in found:
                rows.append(named(length, digest))
            elif segment.is_shared and digest in new:
                rows.append(new[digest])
            else:
                own = {} if segment.is_shared else {"oid": oids[ino], "number": len(rows)}
                if segment.is_shared:
                    new[digest] = len(to_store)
                rows.append(len(to_store))
                to_store.append(HashedPiece(copy, ino, at, length, digest, level, **own))
            at += length
    async with fs.containers.append_pieces(to_store, slots, fs.drain.movers) as (places, lost):
        whole = {
            ino: [_extent(row, to_store, places) for row in rows] for ino, rows in lists.items()
        }
        inodes = [replace(await fs.getattr(ino), mtime_ns=time.time_ns()) for ino in contents]
        layout = Interleaved(chunk)
        mtimes = {inode.ino: inode.mtime_ns for inode in inodes}
        args = layout, oids, mtimes, whole, frozenset(new), lost
        try:
            garbage = await engine.transact(_record, *args)
        except Stale:
            return False
        for oid in garbage:
            fs.collector.add_garbage(oid)
        return True


def _extent(
    row: Extent | int, to_store: Sequence[HashedPiece], places: Sequence[Location]
) -> Extent:
    if isinstance(row, Extent):
        return row
    return Extent(to_store[row].length, places[row], shared=not to_store[row].oid)


def _record(
    tx: Transaction,
    layout: Interleaved,
    oids: Mapping[int, int],
    mtimes: Mapping[int, int],
    lists: Mapping[int, Sequence[Extent]],
    new: frozenset[bytes],
    lost: Mapping[int, int],
) -> list[int]:
    garbage: list[int] = []
    chunks.put_lists(tx, {oids[ino]: rows for ino, rows in lists.items()}, new)
    for ino, rows in lists.items():
        inode = namespace.get_inode(tx, ino)
        garbage += namespace.discard_layout(tx, inode)
        inode.mtime_ns = mtimes[ino]
        inode.layout = layout
        inode.oid = oids[ino]
        inode.size = sum(extent.length for extent in rows)
        namespace.put_inode(tx, inode)
    chunks.put_lost(tx, lost)
    return garbage


async def read(fs: Filesystem, ino: int) -> bytes:
    handle = (await fs.open(ino, os.O_RDONLY)).handle
    try:
        return bytes(await fs.read(handle, 0, 1 << 30))
    finally:
        await fs.release(handle)
