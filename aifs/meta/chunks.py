"""Chunk lists of interleaved files, and the table of containers, as transaction functions (see
kv.py).

A container is *open* while chunks may still be appended to it, then *sealed*. Its *live* bytes are
those of the chunks, headers included, that some file's list names. A sealed container without live
bytes becomes garbage in the transaction that takes the last of them. ``length`` covers all chunks
that a list has ever named; behind it may lie what a drain that failed has left. That of a coded
container is a number of whole rows.

The table alone says where a container is: it may have been moved since a chunk list named its
server.

Records of chunk lists: meta/chunks.py. Record of a container, little-endian:

container
    u8 format=1, u64 length, u64 live bytes, u32 stripe unit, u8 replicas, u8 parity columns, u8
    number of columns, servers (u16 each, in the order of columns)
"""

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location, named, padded
from aifs.layout.striped import Striped
from aifs.meta import keys, servers, shared
from aifs.meta.degraded import drop_degraded, find_unread, put_unread
from aifs.meta.kv import ReadTransaction, Transaction, grows
from aifs.meta.records import Garbage

CONTAINER_FORMAT = 1
RESOLVED = 16
"""Extents that are found at once in a list with shared chunks: a record each has to be read."""
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


def get_extents(
    tx: ReadTransaction, oid: int, chunk: int, offset: int
) -> tuple[int, Sequence[Extent]]:
    """Neighbouring extents of a list, among them the one with byte ``offset``, and the first one's
    start. Shared chunks have their places.

    ``chunk``: the largest size of the file's chunks. If all have it, this reads one record, else
    logarithmically many. Raises Unavailable for a list that ends before, or a missing shared chunk.
    """
    guess = tx.get(keys.chunk_list(oid, offset // chunk // CHUNKS_PER_RECORD * CHUNKS_PER_RECORD))
    start, extents = decode_list(guess) if guess is not None else (0, [])
    if not start <= offset < start + _length(extents):
        start, extents = decode_list(_find_record(tx, oid, offset))
        if offset >= start + _length(extents):
            raise Unavailable(f"the chunk list {oid} has nothing for byte {offset}")
    if not any(extent.shared for extent in extents):
        return start, extents
    number = 0
    while offset >= start + extents[number].length:
        start += extents[number].length
        number += 1
    found = [resolve(tx, extents[number])]
    with suppress(Unavailable):
        found += map(partial(resolve, tx), extents[number + 1 : number + RESOLVED])
    return start, found


def _length(extents: Sequence[Extent]) -> int:
    return sum([extent.length for extent in extents])


def _find_record(tx: ReadTransaction, oid: int, offset: int) -> bytes | None:
    def is_before(record: int) -> bool:
        value = tx.get(keys.chunk_list(oid, record * CHUNKS_PER_RECORD))
        return value is not None and start_of(value) <= offset

    low, step = 0, 1
    if not is_before(0):
        raise Unavailable(f"the beginning of the chunk list {oid} is missing")
    while is_before(low + step):
        low += step
        step *= 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_before(middle) else (low, middle)
    return tx.get(keys.chunk_list(oid, low * CHUNKS_PER_RECORD))


def shares_of(tx: ReadTransaction, record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, bytes with headers) of all chunks in a record of a chunk list, also
    shared ones. Raises Unavailable."""
    shares = decode_shares(record)
    known = {container: server for container, server, _ in shares}
    for digest in shared_digests(record):
        place = _find_place(tx, digest)
        if place.container not in known:
            found = find_container(tx, place.container)
            known[place.container] = 0 if found is None else found.layout.servers[0]
        shares.append((place.container, known[place.container], HEADER_BYTES + place.stored))
    return shares


def resolve(tx: ReadTransaction, extent: Extent) -> Extent:
    """The extent with the place of its shared chunk. Raises Unavailable if that is not known."""
    if not extent.is_named:
        return extent
    place = _find_place(tx, extent.digest)
    if place.raw != extent.length:
        raise _unknown(extent.digest)
    return extent._replace(place=place)


def _find_place(tx: ReadTransaction, digest: bytes) -> Location:
    found = shared.find_shared(tx, digest)
    if found is None:
        raise _unknown(digest)
    return found.place


def _unknown(digest: bytes) -> Unavailable:
    return Unavailable(f"shared chunk {digest.hex()[:16]} is not in the store")


@grows
def put_lists(
    tx: Transaction, lists: Mapping[int, Sequence[Extent]], new: Collection[bytes] = ()
) -> None:
    """Record the chunk lists of some files, by oid; the chunks are durable. Grows the store.

    ``new``: digests of shared chunks appended for this (see shared.take). Callers point the inodes
    to the oids in the same transaction. Raises Stale if a shared chunk found earlier has gone,
    Unavailable for an unknown container.
    """
    every = [extent for extents in lists.values() for extent in extents]
    _count_named(tx, every, new)
    for oid, extents in lists.items():
        put_records(tx, oid, extents)


@grows
def put_loose(
    tx: Transaction,
    oid: int,
    first: int,
    start: int,
    extents: Sequence[Extent],
    new: Collection[bytes] = (),
    lost: Mapping[int, int] = NOTHING_LOST,
) -> None:
    """Record the next part of a long chunk list that no file names yet: extents from ``first``, a
    multiple of CHUNKS_PER_RECORD, which begin at byte ``start``. Else as put_lists; ``lost``: see
    put_lost. The list is *loose*: it is dropped again unless a file gets it (put_named)."""
    _count_named(tx, extents, new)
    tx.put(keys.loose(oid), keys.host_value(tx.host))
    put_records(tx, oid, extents, first, start)
    put_lost(tx, lost)


def put_named(tx: Transaction, oid: int) -> None:
    """A loose list that is complete is that of a file from now on."""
    tx.delete(keys.loose(oid))


def _count_named(tx: Transaction, extents: Sequence[Extent], new: Collection[bytes]) -> None:
    alive, dead = shared.take(tx, extents, new)
    alive += [place for _, place, is_shared in extents if place is not None and not is_shared]
    count_in(tx, alive, dead)


def put_records(
    tx: Transaction, oid: int, extents: Sequence[Extent], first: int = 0, start: int = 0
) -> None:
    """The records of a list from extent ``first`` on, at byte ``start``; nothing is counted."""
    for number in range(0, len(extents), CHUNKS_PER_RECORD):
        part = extents[number : number + CHUNKS_PER_RECORD]
        tx.put(keys.chunk_list(oid, first + number), encode_list(start, part))
        start += _length(part)


def replace_shared(
    tx: Transaction, places: Sequence[Location], lost: Mapping[int, int] = NOTHING_LOST
) -> list[int]:
    """Have all lists name good copies of bad shared chunks. Returns the containers that are garbage
    now. A copy of a chunk that no list names any more counts as dead."""
    alive, before = [], []
    for place in places:
        old = shared.replace(tx, place)
        if old is not None:
            alive.append(place)
            before.append(old)
    count_in(tx, alive, [place for place in places if place not in alive])
    put_lost(tx, lost)
    return count_out(tx, before)


def put_lost(tx: Transaction, lost: Mapping[int, int]) -> None:
    """Record which columns of containers (masks) an append has not made durable; called after the
    records of its chunks, in their transaction."""
    for container, columns in lost.items():
        if find_container(tx, container) is not None:
            put_unread(tx, container, 0, columns)


def put_dead(tx: Transaction, dead: Iterable[Location], lost: Mapping[int, int]) -> None:
    """Count an append that nothing names as dead. Raises Unavailable for an unknown container."""
    count_in(tx, (), dead)
    put_lost(tx, lost)


def drop_chunks(tx: Transaction, oid: int) -> list[int]:
    """Forget the chunk list. Returns the containers that are garbage now. A very long list is
    *loose* from now on, and garbage itself, to be dropped by ``drop_some``."""
    first = keys.chunk_list(oid, 0)
    record = tx.get(first)
    if record is not None and is_last(record) and DROPPED_AT_ONCE:
        return _drop(tx, [(first, record)])  # a range costs many times as much
    if tx.get(keys.chunk_list(oid, DROPPED_AT_ONCE * CHUNKS_PER_RECORD)) is not None:
        tx.put(keys.loose(oid), b"")
        return [oid]
    return _drop(tx, list(tx.range(*keys.chunk_lists(oid))))


def drop_some(tx: Transaction, oid: int) -> tuple[list[int], bool]:
    """Forget some of a loose list. Returns the containers that are garbage now, and whether it is
    done."""
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
    """A copied chunk of a file, by its number, or shared chunk (``oid`` is 0)."""

    oid: int
    number: int
    old: Location
    new: Location


def move_chunks(
    tx: Transaction, moves: Sequence[Move], lost: Mapping[int, int] = NOTHING_LOST
) -> list[int]:
    """Point lists and records of shared chunks from old places, if they still name them, to the
    copies. Returns the containers that are garbage now. ``lost``: see put_lost."""
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
        start, extents = decode_list(record)
        current = [move for move in group if is_at(extents, move.number - first, move.old)]
        if current:
            for move in current:
                number = move.number - first
                extents[number] = extents[number]._replace(place=move.new)
            tx.put(keys.chunk_list(oid, first), encode_list(start, extents))
            done += current
    count_in(tx, [move.new for move in done])
    if done:
        put_lost(tx, lost)
    return count_out(tx, [move.old for move in done])


def is_at(extents: Sequence[Extent], number: int, place: Location) -> bool:
    """Whether the list's extent ``number`` is a chunk of the file's own at this place."""
    known = extents[number] if number < len(extents) else Extent(0)
    return known.place is not None and not known.shared and shared.is_same(known.place, place)


# --- containers -----------------------------------------------------------------------------------


def find_container(tx: ReadTransaction, container: int) -> Container | None:
    record = tx.get(keys.container(container))
    return None if record is None else decode_container(record)


def find_readable(tx: ReadTransaction, container: int) -> tuple[Container, int] | None:
    """The container, and the mask of its columns that must not be read."""
    record = find_container(tx, container)
    return None if record is None else (record, find_unread(tx, container))


def is_sealed(tx: ReadTransaction, container: int) -> bool:
    """Whether nothing will be appended to it any more."""
    return tx.get(keys.open_container(container)) is None


def open_containers(tx: ReadTransaction, host: int | None = None) -> dict[int, Container]:
    """Unsealed containers to which ``host`` appends (None: any), without damaged or missing
    records, which fsck names."""
    found = {}
    marks = list(tx.range(*keys.all_of(b"a")))
    for container in [keys.number(k) for k, v in marks if host in (None, keys.host_of(v))]:
        with suppress(Unavailable):
            if (record := find_container(tx, container)) is not None:
                found[container] = record
    return found


@grows
def put_container(tx: Transaction, container: int, layout: Striped) -> None:
    """Record an empty, open container, before any of its objects exists. Raises Unavailable if one
    of its servers has been removed from the store."""
    if not layout.is_protected:
        servers.mark_unprotected(tx, layout.servers)
    tx.put(keys.container(container), Container(layout, 0, 0).encode())
    tx.put(keys.open_container(container), keys.host_value(tx.host))


def seal_container(tx: Transaction, container: int) -> list[int]:
    """Seal a container without pending chunks; [container] if it is garbage now."""
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
    """Count named and dead chunks in containers, which reach so far. Raises Unavailable for an
    unknown container."""
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


FORMAT = 1
"""Records of chunk lists (``l``), little-endian. Pure.

A chunk list says where the bytes of an interleaved file are: extent after extent, without gaps. A
file that is cut into chunks of one size has an extent for each, also where it has a hole. Each
record but the last one has CHUNKS_PER_RECORD extents.

record of the extents from number ``first`` on
    u8 format=1, u8 number of extents (1 to CHUNKS_PER_RECORD), u8 number of containers, u64 byte of
    the file where the first extent begins; then for each container that has chunks of the file's
    own: u64 id, u16 server, u64 bytes of these chunks in it, headers included; then for each extent
    one of
    a chunk of the file's own: u8 container (its place above), u8 codec, u32 stored length, u32 raw
    length, u64 offset, 32 bytes digest
    a shared chunk (meta/shared.py): u8 254, u32 length, 32 bytes digest
    zeros: u8 255, u64 length
"""
CHUNKS_PER_RECORD = 64

_LIST = struct.Struct("<BBBQ")
_SHARE = struct.Struct("<QHQ")
_CHUNK = struct.Struct("<BBIIQ32s")
_SHARED = struct.Struct("<BI32s")
_ZEROS = struct.Struct("<BQ")
_IS_SHARED, _IS_ZEROS = 254, 255

_new = tuple.__new__


def encode_list(start: int, extents: Sequence[Extent]) -> bytes:
    """The record of up to CHUNKS_PER_RECORD extents. The first begins at byte ``start``."""
    shares: dict[int, list[int]] = {}
    rows = []
    for length, place, is_shared in extents:
        if place is None:
            rows.append(_ZEROS.pack(_IS_ZEROS, length))
        elif is_shared:
            rows.append(_SHARED.pack(_IS_SHARED, length, place.digest))
        else:
            server, container, offset, stored, raw, codec, digest = place
            share = shares.setdefault(container, [len(shares), server, 0])
            share[2] += HEADER_BYTES + stored
            rows.append(_CHUNK.pack(share[0], codec, stored, raw, offset, digest))
    named_here = (_SHARE.pack(number, *share[1:]) for number, share in shares.items())
    return b"".join((_LIST.pack(FORMAT, len(extents), len(shares), start), *named_here, *rows))


def decode_list(record: bytes | None) -> tuple[int, list[Extent]]:
    """The first extent's start, and the extents; shared chunks by digest alone (see ``named``).
    Raises Unavailable for a damaged or missing record, as the others do."""
    try:
        version, count, _, start = _LIST.unpack_from(record or b"")
        if version != FORMAT or not 0 < count <= CHUNKS_PER_RECORD:
            raise _damaged()
        assert record is not None
        shares, at = decode_shares(record), _rows_at(record)
        if _is_own(record):
            rows = _CHUNK.iter_unpack(memoryview(record)[at:])
            return start, [_own(shares, *row) for row in rows]
        extents = []
        for _ in range(count):
            kind = record[at]
            if kind == _IS_ZEROS:
                extents.append(Extent(_ZEROS.unpack_from(record, at)[1]))
                at += _ZEROS.size
            elif kind == _IS_SHARED:
                extents.append(named(*_SHARED.unpack_from(record, at)[1:]))
                at += _SHARED.size
            else:
                extents.append(_own(shares, *_CHUNK.unpack_from(record, at)))
                at += _CHUNK.size
    except (struct.error, IndexError):
        raise _damaged() from None
    if at != len(record):
        raise _damaged()
    return start, extents


def _own(
    shares: Sequence[tuple[int, int, int]],
    share: int,
    codec: int,
    stored: int,
    raw: int,
    offset: int,
    digest: bytes,
) -> Extent:
    container, server, _ = shares[share]
    # As the constructors do, in half the time: each read of a long file decodes many of them.
    place = _new(Location, (server, container, offset, stored, raw, codec, digest))
    return _new(Extent, (raw, place, False))


def _damaged() -> Unavailable:
    return Unavailable("a record of a chunk list is damaged")


def _rows_at(record: bytes) -> int:
    return _LIST.size + record[2] * _SHARE.size


def _is_own(record: bytes) -> bool:
    """Whether all extents are chunks of the file's own, whose rows are the longest."""
    return len(record) == _rows_at(record) + record[1] * _CHUNK.size


def start_of(record: bytes) -> int:
    """Where the first extent of a record begins."""
    try:
        version, _, _, start = _LIST.unpack_from(record)
    except struct.error:
        version = 0
    if version != FORMAT:
        raise _damaged()
    return start


def is_last(record: bytes) -> bool:
    """Whether no record of the same list follows this one."""
    return len(record) > 1 and record[1] < CHUNKS_PER_RECORD


def decode_shares(record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, live bytes) of the containers that have chunks of the file's own."""
    try:
        return list(_SHARE.iter_unpack(memoryview(record)[_LIST.size : _rows_at(record)]))
    except (struct.error, IndexError):
        raise _damaged() from None


def shared_digests(record: bytes) -> list[bytes]:
    """The digests of the shared chunks that a record names, each as often as it does."""
    if len(record) >= _LIST.size and _is_own(record):
        return []  # as of most files: nothing is decoded
    return [extent.digest for extent in decode_list(record)[1] if extent.shared]
