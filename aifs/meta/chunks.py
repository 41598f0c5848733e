"""Chunk lists of interleaved files, and the table of containers, as transaction functions (see kv.py).

A container is *open* while chunks may still be appended to it, then *sealed*. Its *live* bytes are those of the
chunks, headers included, that some file's list names. A sealed container without live bytes becomes garbage in the
transaction that takes the last of them. ``length`` covers all chunks that a list has ever named; behind it may lie
what a drain that failed has left. That of a coded container is a number of whole rows.

The table alone says where a container is: it may have been moved since a chunk list named its server.

Records, little-endian:

chunk list (of one file, from chunk ``first`` on)
    u8 format=1, u8 number of chunks (1 to CHUNKS_PER_RECORD), u8 number of containers, u64 chunks that are stored
    (bit i: chunk first + i; the others are holes), then for each container: u64 id, u16 server, u64 bytes of these
    chunks in it, headers included; then for each stored chunk: u8 container (its place above), u8 codec,
    u32 stored length, u32 raw length, u64 offset, 32 bytes digest
container
    u8 format=2, u64 length, u64 live bytes, u64 bytes of records of files, u32 stripe unit, u8 replicas, u8 parity columns,
    u8 number of columns, servers (u16 each, in the order of columns)
    Format 1, which is still read, is u8 format=1, u16 server, u64 length, u64 live bytes: a plain one.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Growth, Location, container_layout, padded
from aifs.layout.striped import Striped
from aifs.meta import keys, servers
from aifs.meta.degraded import drop_degraded, find_degraded, put_degraded
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Garbage

FORMAT = 1
CONTAINER_FORMAT = 2
CHUNKS_PER_RECORD = 64

_LIST = struct.Struct("<BBBQ")
_SHARE = struct.Struct("<QHQ")
_CHUNK = struct.Struct("<BBIIQ32s")
_CONTAINER = struct.Struct("<BQQQIBBB")
_CONTAINER_1 = struct.Struct("<BHQQ")

Chunks = Sequence[Location | None]
"""Chunks of a file in order; None is a hole."""


class Container(NamedTuple):
    """``records``: how many of its bytes say something of files; they are part of ``length``, and nobody's live bytes."""

    layout: Striped
    length: int
    live: int
    records: int = 0

    def encode(self) -> bytes:
        layout, count = self.layout, len(self.layout.servers)
        head = _CONTAINER.pack(
            CONTAINER_FORMAT, self.length, self.live, self.records, layout.unit, layout.replicas, layout.parity, count
        )
        return head + struct.pack(f"<{count}H", *layout.servers)


def decode_container(record: bytes) -> Container:
    """Raises Unavailable for a damaged record, as the other decoders do."""
    try:
        if record[0] == FORMAT:
            _, server, length, live = _CONTAINER_1.unpack(record)
            return Container(container_layout((server,)), length, live)
        version, length, live, records, unit, replicas, parity, count = _CONTAINER.unpack_from(record)
        layout = Striped(unit, struct.unpack(f"<{count}H", record[_CONTAINER.size :]), replicas, parity)
        if version == CONTAINER_FORMAT and unit and replicas and layout.width > 0:
            return Container(layout, length, live, records)
    except (struct.error, IndexError):
        pass
    raise Unavailable("the record of a container is damaged")


def encode_chunks(chunks: Chunks) -> bytes:
    """The record of up to CHUNKS_PER_RECORD chunks."""
    if not any(chunks):
        return _LIST.pack(FORMAT, len(chunks), 0, 0)  # of which large sparse files have many
    stored, places, shares, rows = 0, {}, [], []
    for number, location in enumerate(chunks):
        if location is not None:
            server, container, offset, length, raw, codec, digest = location
            stored |= 1 << number
            place = places.setdefault(container, len(places))
            if place == len(shares):
                shares.append([container, server, 0])
            shares[place][2] += HEADER_BYTES + length
            rows.append(_CHUNK.pack(place, codec, length, raw, offset, digest))
    head = _LIST.pack(FORMAT, len(chunks), len(shares), stored)
    return b"".join((head, *(_SHARE.pack(*share) for share in shares), *rows))


def decode_chunks(record: bytes) -> list[Location | None]:
    try:
        version, count, _, stored = _LIST.unpack_from(record)
        shares = decode_shares(record)
        chunks: list[Location | None] = [None] * count
        rows = _CHUNK.iter_unpack(memoryview(record)[_LIST.size + len(shares) * _SHARE.size :])
        for number in range(count):
            if stored >> number & 1:
                place, codec, length, raw, offset, digest = next(rows)
                container, server, _ = shares[place]
                chunks[number] = Location(server, container, offset, length, raw, codec, digest)
        whole = next(rows, None) is None and not stored >> count and version == FORMAT
    except (struct.error, StopIteration, IndexError):
        whole = False
    if not whole:
        raise Unavailable("a record of a chunk list is damaged")
    return chunks


def decode_shares(record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, live bytes) of the containers that a record of a chunk list names."""
    try:
        end = _LIST.size + record[2] * _SHARE.size
        return list(_SHARE.iter_unpack(memoryview(record)[_LIST.size : end]))
    except (struct.error, IndexError):
        raise Unavailable("a record of a chunk list is damaged") from None


# --- chunk lists -------------------------------------------------------------------------------------


def get_chunks(tx: ReadTransaction, oid: int, index: int) -> tuple[int, list[Location | None]]:
    """The chunks of the record that holds chunk ``index``, and the number of the first. Raises Unavailable."""
    first = index - index % CHUNKS_PER_RECORD
    record = tx.get(keys.chunk_list(oid, first))
    if record is None:
        raise Unavailable(f"the list of chunks {oid} has no record for chunk {index}")
    return first, decode_chunks(record)


def put_chunks(tx: Transaction, oid: int, chunks: Chunks) -> None:
    """Record all chunks of a file, which are durable in containers that the table has. Grows the store.

    The caller points the inode to ``oid`` in the same transaction. Raises Unavailable for an unknown container.
    """
    for first in range(0, len(chunks), CHUNKS_PER_RECORD):
        part = chunks[first : first + CHUNKS_PER_RECORD]
        tx.put(keys.chunk_list(oid, first), encode_chunks(part))
    _count_in(tx, chunks)


def put_growth(tx: Transaction, growth: Sequence[Growth]) -> None:
    """Record what else an append has done to containers, in the transaction that records its chunks: after these."""
    for container, records, lost in growth:
        record = find_container(tx, container)
        if record is not None:
            tx.put(keys.container(container), record._replace(records=record.records + records).encode())
            if lost:
                put_degraded(tx, container, 0, lost)


def drop_chunks(tx: Transaction, oid: int) -> list[int]:
    """Forget the chunk list; ids of the containers that are garbage now."""
    lost: dict[int, int] = {}
    records = list(tx.range(*keys.chunk_lists(oid)))
    for key, record in records:
        for container, _, length in decode_shares(record):
            lost[container] = lost.get(container, 0) + length
        tx.delete(key)
    return _count_out(tx, lost)


class Move(NamedTuple):
    """A chunk of a file that has been copied to another place."""

    oid: int
    index: int
    old: Location
    new: Location


def move_chunks(tx: Transaction, moves: Sequence[Move], growth: Sequence[Growth] = ()) -> list[int]:
    """Point chunk lists to the copies where they still name the old places; ids of containers that are garbage now.

    ``growth``: what copying them has done to their new containers.
    """
    done: list[Move] = []
    by_record: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        by_record.setdefault((move.oid, move.index - move.index % CHUNKS_PER_RECORD), []).append(move)
    for (oid, first), group in by_record.items():
        record = tx.get(keys.chunk_list(oid, first))
        if record is None:
            continue
        chunks = decode_chunks(record)
        current = [move for move in group if is_at(chunks, move.index - first, move.old)]
        for move in current:
            chunks[move.index - first] = move.new
        if current:
            tx.put(keys.chunk_list(oid, first), encode_chunks(chunks))
            done += current
    _count_in(tx, [move.new for move in done])
    if done:
        put_growth(tx, growth)
    lost: dict[int, int] = {}
    for move in done:
        lost[move.old.container] = lost.get(move.old.container, 0) + HEADER_BYTES + move.old.stored
    return _count_out(tx, lost)


def is_at(chunks: Chunks, number: int, place: Location) -> bool:
    """Whether the list's chunk ``number`` lies at this place."""
    known = chunks[number] if number < len(chunks) else None
    return known is not None and (known.container, known.offset) == (place.container, place.offset)


# --- containers --------------------------------------------------------------------------------------


def find_container(tx: ReadTransaction, container: int) -> Container | None:
    record = tx.get(keys.container(container))
    return None if record is None else decode_container(record)


def find_readable(tx: ReadTransaction, container: int) -> tuple[Container, int] | None:
    """The container, and the mask of its columns that must not be read."""
    record = find_container(tx, container)
    return None if record is None else (record, find_degraded(tx, container))


def open_containers(tx: ReadTransaction) -> dict[int, Container]:
    """Those that are not sealed. One whose record is missing or damaged is left out: fsck names it."""
    found = {}
    for container in [keys.number(key) for key, _ in tx.range(*keys.all_of(b"a"))]:
        with suppress(Unavailable):
            if (record := find_container(tx, container)) is not None:
                found[container] = record
    return found


@grows
def put_container(tx: Transaction, container: int, layout: Striped) -> None:
    """An empty, open container. None of its objects must exist before this is recorded.

    Raises Unavailable if one of its servers has been removed from the store.
    """
    if not layout.is_protected:
        servers.mark_unprotected(tx, layout.servers)
    tx.put(keys.container(container), Container(layout, 0, 0).encode())
    tx.put(keys.open_container(container), b"")


def seal_container(tx: Transaction, container: int) -> list[int]:
    """Nothing will be appended any more; [container] if it is garbage now. No chunk in it may wait to be recorded."""
    tx.delete(keys.open_container(container))
    return _count_out(tx, {container: 0})


def adjust_live(tx: Transaction, container: int, change: int) -> list[int]:
    """Correct the count of live bytes (fsck); [container] if it is garbage now."""
    record = find_container(tx, container)
    if record is not None:
        tx.put(keys.container(container), record._replace(live=max(record.live + change, 0)).encode())
    return _count_out(tx, {container: 0})


def _count_in(tx: Transaction, chunks: Chunks) -> None:
    grown: dict[int, tuple[int, int]] = {}
    for location in filter(None, chunks):
        size = HEADER_BYTES + location.stored
        length, live = grown.get(location.container, (0, 0))
        grown[location.container] = max(length, location.offset + size), live + size
    for container, (length, live) in grown.items():
        record = find_container(tx, container)
        if record is None:
            raise Unavailable(f"container {container} is not in the table")
        grown_record = record._replace(
            length=max(record.length, padded(record.layout, length)), live=record.live + live
        )
        tx.put(keys.container(container), grown_record.encode())


def _count_out(tx: Transaction, lost: dict[int, int]) -> list[int]:
    garbage = []
    for container, length in lost.items():
        record = find_container(tx, container)
        if record is None:
            continue  # damage, which fsck names
        live = max(record.live - length, 0)
        if live or tx.get(keys.open_container(container)) is not None:
            tx.put(keys.container(container), record._replace(live=live).encode())
            continue
        tx.delete(keys.container(container))
        drop_degraded(tx, container)
        tx.put(keys.garbage(container), Garbage(0, record.layout).encode())
        garbage.append(container)
    return garbage
