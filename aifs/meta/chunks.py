"""Chunk lists of interleaved files, and the table of containers, as transaction functions (see
kv.py).

A container is *open* while chunks may still be appended to it, then *sealed*. Its *live* bytes are
those of the chunks, headers included, that some file's list names. A sealed container without live
bytes becomes garbage in the transaction that takes the last of them. ``length`` covers all chunks
that a list has ever named; behind it may lie what a drain that failed has left. That of a coded
container is a number of whole rows.

The table alone says where a container is: it may have been moved since a chunk list named its
server.

Chunk lists: meta/chunk_lists.py; those whose chunks have different lengths: meta/extents.py.
Record, little-endian:

container
    u8 format=1, u64 length, u64 live bytes, u32 stripe unit, u8 replicas, u8 parity columns, u8
    number of columns, servers (u16 each, in the order of columns)
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Location, padded
from aifs.layout.striped import Striped
from aifs.meta import keys, servers, shared
from aifs.meta.chunk_lists import (
    CHUNKS_PER_RECORD,
    Chunks,
    decode_chunks,
    decode_extents,
    decode_shares,
    encode_chunks,
    encode_extents,
    is_extents,
    is_last,
    shared_digests,
)
from aifs.meta.degraded import drop_degraded, find_unread, put_unread
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Garbage

CONTAINER_FORMAT = 1
DROPPED_AT_ONCE = 32
"""Records of a chunk list that one transaction drops."""

NOTHING_LOST: Mapping[int, int] = MappingProxyType({})

_CONTAINER = struct.Struct("<BQQIBBB")


class Container(NamedTuple):
    layout: Striped
    length: int
    live: int

    def encode(self) -> bytes:
        layout, count = self.layout, len(self.layout.servers)
        head = _CONTAINER.pack(
            CONTAINER_FORMAT,
            self.length,
            self.live,
            layout.unit,
            layout.replicas,
            layout.parity,
            count,
        )
        return head + struct.pack(f"<{count}H", *layout.servers)


def decode_container(record: bytes) -> Container:
    """Raises Unavailable for a damaged record, as the other decoders do."""
    try:
        version, length, live, unit, replicas, parity, count = _CONTAINER.unpack_from(record)
        layout = Striped(
            unit, struct.unpack(f"<{count}H", record[_CONTAINER.size :]), replicas, parity
        )
        if version == CONTAINER_FORMAT and unit and replicas and layout.width > 0:
            return Container(layout, length, live)
    except (struct.error, IndexError):
        pass
    raise Unavailable("the record of a container is damaged")


# --- chunk lists ----------------------------------------------------------------------------------


def get_chunks(tx: ReadTransaction, oid: int, index: int) -> tuple[int, list[Location | None]]:
    """The chunks of the record that holds chunk ``index``, and the number of the first. Raises
    Unavailable.
    """
    first = index - index % CHUNKS_PER_RECORD
    record = tx.get(keys.chunk_list(oid, first))
    if record is None:
        raise Unavailable(f"the list of chunks {oid} has no record for chunk {index}")
    return first, decode_chunks(record)


def put_chunks(tx: Transaction, oid: int, chunks: Chunks) -> None:
    """Record all chunks of a file, which are durable in containers that the table has. Grows the
    store.

    The caller points the inode to ``oid`` in the same transaction. Raises Unavailable for an
    unknown container.
    """
    _put_list(tx, oid, 0, chunks)


@grows
def put_loose(
    tx: Transaction, oid: int, first: int, chunks: Chunks, lost: Mapping[int, int] = NOTHING_LOST
) -> None:
    """Record the next part of a chunk list that no file names yet: chunks from number ``first`` on,
    a multiple of CHUNKS_PER_RECORD. As extents.put_loose, which says the rest."""
    tx.put(keys.loose(oid), keys.host_value(tx.host))
    _put_list(tx, oid, first, chunks)
    put_lost(tx, lost)


def _put_list(tx: Transaction, oid: int, first: int, chunks: Chunks) -> None:
    for start in range(0, len(chunks), CHUNKS_PER_RECORD):
        part = chunks[start : start + CHUNKS_PER_RECORD]
        tx.put(keys.chunk_list(oid, first + start), encode_chunks(part))
    count_in(tx, [place for place in chunks if place is not None])


def put_lost(tx: Transaction, lost: Mapping[int, int]) -> None:
    """Record which columns of containers an append has not made durable (a mask by container), in
    the transaction that records its chunks: after these.
    """
    for container, columns in lost.items():
        if find_container(tx, container) is not None:
            put_unread(tx, container, 0, columns)


def put_dead(tx: Transaction, dead: Iterable[Location], lost: Mapping[int, int]) -> None:
    """Record an append of which no chunk is named: it counts as dead. Raises Unavailable for an
    unknown container.
    """
    count_in(tx, (), dead)
    put_lost(tx, lost)


def drop_chunks(tx: Transaction, oid: int) -> list[int]:
    """Forget the chunk list, or extent list; ids of what is garbage now: containers.

    A very long list is *loose* from now on, and garbage itself: to be dropped piece by piece
    (``drop_some``), since no transaction should take long.
    """
    first = keys.chunk_list(oid, 0)
    record = tx.get(first)
    if record is not None and is_last(record) and DROPPED_AT_ONCE:
        return _drop(tx, [(first, record)])  # a range costs many times as much
    if tx.get(keys.chunk_list(oid, DROPPED_AT_ONCE * CHUNKS_PER_RECORD)) is not None:
        tx.put(keys.loose(oid), b"")
        return [oid]
    return _drop(tx, list(tx.range(*keys.chunk_lists(oid))))


def drop_some(tx: Transaction, oid: int) -> tuple[list[int], bool]:
    """Forget some of a loose list; ids of the containers that are garbage now, and whether that was
    all.
    """
    records = list(tx.range(*keys.chunk_lists(oid), DROPPED_AT_ONCE))
    is_all = not records or len(records) < DROPPED_AT_ONCE
    if is_all:
        tx.delete(keys.loose(oid))
    return _drop(tx, records), is_all


def _drop(tx: Transaction, records: Sequence[tuple[bytes, bytes]]) -> list[int]:
    lost: dict[int, int] = {}
    references: dict[bytes, int] = {}
    for key, record in records:
        for container, _, length in decode_shares(record):
            lost[container] = lost.get(container, 0) + length
        for digest in shared_digests(record):
            references[digest] = references.get(digest, 0) + 1
        tx.delete(key)
    for place in shared.release(tx, references):
        lost[place.container] = lost.get(place.container, 0) + HEADER_BYTES + place.stored
    return _count_out(tx, lost)


class Move(NamedTuple):
    """A chunk of a file, by its number, or a shared chunk (``oid`` is 0), that has been copied to
    another place.
    """

    oid: int
    number: int
    old: Location
    new: Location


def move_chunks(
    tx: Transaction, moves: Sequence[Move], lost: Mapping[int, int] = NOTHING_LOST
) -> list[int]:
    """Point lists, and records of shared chunks, to the copies where they still name the old
    places; ids of containers that are garbage now.

    ``lost``: see put_lost.
    """
    done = [move for move in moves if not move.oid and shared.move(tx, move.old, move.new)]
    by_record: dict[tuple[int, int], list[Move]] = {}
    for move in moves:
        if move.oid:
            by_record.setdefault(
                (move.oid, move.number - move.number % CHUNKS_PER_RECORD), []
            ).append(move)
    for (oid, first), group in by_record.items():
        record = tx.get(keys.chunk_list(oid, first))
        if record is None:
            continue
        places = decode_chunks(record)
        current = [move for move in group if is_at(places, move.number - first, move.old)]
        if current:
            copied = {move.number - first: move.new for move in current}
            tx.put(keys.chunk_list(oid, first), _with_places(record, copied))
            done += current
    count_in(tx, [move.new for move in done])
    if done:
        put_lost(tx, lost)
    return count_out(tx, [move.old for move in done])


def _with_places(record: bytes, places: Mapping[int, Location]) -> bytes:
    """The record of a list with other places for some chunks of the file's own."""
    if is_extents(record):
        start, extents = decode_extents(record)
        for number, place in places.items():
            extents[number] = extents[number]._replace(place=place)
        return encode_extents(start, extents)
    chunks = decode_chunks(record)
    for number, place in places.items():
        chunks[number] = place
    return encode_chunks(chunks)


def is_at(chunks: Chunks, number: int, place: Location) -> bool:
    """Whether the list's chunk ``number`` lies at this place."""
    known = chunks[number] if number < len(chunks) else None
    return known is not None and (known.container, known.offset) == (place.container, place.offset)


# --- containers -----------------------------------------------------------------------------------


def find_container(tx: ReadTransaction, container: int) -> Container | None:
    record = tx.get(keys.container(container))
    return None if record is None else decode_container(record)


def find_readable(tx: ReadTransaction, container: int) -> tuple[Container, int] | None:
    """The container, and the mask of its columns that must not be read."""
    record = find_container(tx, container)
    return None if record is None else (record, find_unread(tx, container))


def open_containers(tx: ReadTransaction, host: int | None = None) -> dict[int, Container]:
    """Those that are not sealed, to which ``host`` appends (None: any). One whose record is missing
    or damaged is left out: fsck names it.
    """
    found = {}
    marks = list(tx.range(*keys.all_of(b"a")))
    for container in [keys.number(k) for k, v in marks if host in (None, keys.host_of(v))]:
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
    tx.put(keys.open_container(container), keys.host_value(tx.host))


def seal_container(tx: Transaction, container: int) -> list[int]:
    """Nothing will be appended any more; [container] if it is garbage now. No chunk in it may wait
    to be recorded.
    """
    tx.delete(keys.open_container(container))
    return _count_out(tx, {container: 0})


def adjust_live(tx: Transaction, container: int, change: int) -> list[int]:
    """Correct the count of live bytes (fsck); [container] if it is garbage now."""
    record = find_container(tx, container)
    if record is not None:
        tx.put(
            keys.container(container), record._replace(live=max(record.live + change, 0)).encode()
        )
    return _count_out(tx, {container: 0})


def count_in(tx: Transaction, alive: Iterable[Location], dead: Iterable[Location] = ()) -> None:
    """Chunks lie in containers now, which therefore reach at least so far: some that somebody
    names, and some that were appended in vain. Raises Unavailable for an unknown container."""
    grown: dict[int, tuple[int, int]] = {}
    for places, counts in ((alive, 1), (dead, 0)):
        for place in places:
            size = HEADER_BYTES + place.stored
            length, live = grown.get(place.container, (0, 0))
            grown[place.container] = max(length, place.offset + size), live + counts * size
    for container, (length, live) in grown.items():
        record = find_container(tx, container)
        if record is None:
            raise Unavailable(f"container {container} is not in the table")
        grown_record = record._replace(
            length=max(record.length, padded(record.layout, length)), live=record.live + live
        )
        tx.put(keys.container(container), grown_record.encode())


def count_out(tx: Transaction, dead: Iterable[Location]) -> list[int]:
    """Nobody names the chunks in these places any more; ids of containers that are garbage now."""
    lost: dict[int, int] = {}
    for place in dead:
        lost[place.container] = lost.get(place.container, 0) + HEADER_BYTES + place.stored
    return _count_out(tx, lost)


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
