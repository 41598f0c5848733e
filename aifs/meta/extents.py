"""Extent lists of interleaved files whose chunks have different lengths and may be shared, as
transaction functions.

Records: meta/chunk_lists.py, format 2. An extent list covers its file without gaps. Extent lists
are dropped, and their own chunks moved, as chunk lists are (meta/chunks.py).
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from aifs.core.errors import Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location
from aifs.meta import chunks, keys, shared
from aifs.meta.chunk_lists import (
    CHUNKS_PER_RECORD,
    decode_extents,
    decode_shares,
    encode_extents,
    is_extents,
    start_of,
)
from aifs.meta.kv import ReadTransaction, Transaction, grows

RESOLVED = 16
"""Extents that are told at once: a record each has to be read."""


def get_extents(tx: ReadTransaction, oid: int, offset: int) -> tuple[int, int, list[Extent]]:
    """The extent with byte ``offset`` of a file, and some that follow it: where it begins, its
    number, and they.

    Shared chunks have their places. Takes time that grows with the logarithm of the list's length.
    Raises Unavailable if the list does not reach that far, or the shared chunk there lacks.
    """
    first = _find_record(tx, oid, offset)
    start, extents = decode_extents(tx.get(keys.chunk_list(oid, first)) or b"")
    for number, extent in enumerate(extents):
        if offset < start + extent.length:
            found = [resolve(tx, extent)]
            with suppress(Unavailable):
                found += map(partial(resolve, tx), extents[number + 1 : number + RESOLVED])
            return start, first + number, found
        start += extent.length
    raise Unavailable(f"the list of extents {oid} has none for byte {offset}")


def _find_record(tx: ReadTransaction, oid: int, offset: int) -> int:
    """The number of the first extent of the last record that begins at or before ``offset``."""

    def is_before(record: int) -> bool:
        value = tx.get(keys.chunk_list(oid, record * CHUNKS_PER_RECORD))
        return value is not None and start_of(value) <= offset

    low, step = 0, 1
    if not is_before(0):
        raise Unavailable(f"the list of extents {oid} lacks its beginning")
    while is_before(low + step):
        low += step
        step *= 2
    high = low + step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_before(middle) else (low, middle)
    return low * CHUNKS_PER_RECORD


def shares_of(tx: ReadTransaction, record: bytes) -> list[tuple[int, int, int]]:
    """(container, server, bytes with headers) of all chunks that a record of a chunk list or an
    extent list names, shared ones included. Raises Unavailable."""
    shares = decode_shares(record)
    if not is_extents(record):
        return shares
    known = {container: server for container, server, _ in shares}
    for extent in decode_extents(record)[1]:
        if extent.shared:
            place = resolve(tx, extent).place
            assert place is not None  # zeros are not shared
            if place.container not in known:
                found = chunks.find_container(tx, place.container)
                known[place.container] = 0 if found is None else found.layout.servers[0]
            shares.append((place.container, known[place.container], HEADER_BYTES + place.stored))
    return shares


def resolve(tx: ReadTransaction, extent: Extent) -> Extent:
    """The extent with the place of its shared chunk. Raises Unavailable if that is not known."""
    if not extent.is_named:
        return extent
    found = shared.find_shared(tx, extent.digest)
    if found is None or found.place.raw != extent.length:
        raise Unavailable(f"shared chunk {extent.digest.hex()[:16]} is not in the store")
    return extent._replace(place=found.place)


@grows
def put_extents(
    tx: Transaction, lists: Mapping[int, Sequence[Extent]], new: Collection[bytes] = ()
) -> None:
    """Record all extents of some files, by oid; chunks are durable in containers that the table
    has. Grows the store.

    ``new``: digests of the shared chunks that have been appended for this (see shared.take). The
    caller points the inodes to the oids in the same transaction. Raises Stale if a chunk that was
    found earlier has gone, Unavailable for an unknown container.
    """
    every = [extent for extents in lists.values() for extent in extents]
    alive, dead = shared.take(tx, every, new)
    alive += _own(every)
    for oid, extents in lists.items():
        put_list(tx, oid, extents)
    chunks.count_in(tx, alive, dead)


@grows
def put_loose(
    tx: Transaction,
    oid: int,
    first: int,
    start: int,
    extents: Sequence[Extent],
    new: Collection[bytes] = (),
    lost: Mapping[int, int] = chunks.NOTHING_LOST,
) -> None:
    """Record the next part of an extent list that no file names yet: extents from number ``first``
    on, a multiple of CHUNKS_PER_RECORD, which begin at byte ``start``. See put_extents for the
    rest. ``lost``: see chunks.put_lost.

    The list is *loose*: it is dropped again unless a file gets it (put_named). For long lists,
    since no transaction should take long.
    """
    alive, dead = shared.take(tx, extents, new)
    alive += _own(extents)
    tx.put(keys.loose(oid), keys.host_value(tx.host))
    put_list(tx, oid, extents, first, start)
    chunks.count_in(tx, alive, dead)
    chunks.put_lost(tx, lost)


def put_named(tx: Transaction, oid: int) -> None:
    """A loose list that is complete is that of a file from now on."""
    tx.delete(keys.loose(oid))


def _own(extents: Sequence[Extent]) -> list[Location]:
    return [place for _, place, is_shared in extents if place is not None and not is_shared]


def put_list(
    tx: Transaction, oid: int, extents: Sequence[Extent], first: int = 0, start: int = 0
) -> None:
    """The records of an extent list alone, or those from extent ``first`` on, which begins at byte
    ``start``; nothing is counted."""
    for number in range(0, len(extents), CHUNKS_PER_RECORD):
        part = extents[number : number + CHUNKS_PER_RECORD]
        tx.put(keys.chunk_list(oid, first + number), encode_extents(start, part))
        start += sum(extent.length for extent in part)


def replace_shared(
    tx: Transaction, places: Sequence[Location], lost: Mapping[int, int] = chunks.NOTHING_LOST
) -> list[int]:
    """Good copies of shared chunks that turned out to be bad have been appended: whoever names them
    gets these; ids of containers that are garbage now. One that nobody names any more is left
    alone."""
    alive, before = [], []
    for place in places:
        old = shared.replace(tx, place)
        if old is not None:
            alive.append(place)
            before.append(old)
    chunks.count_in(tx, alive, [place for place in places if place not in alive])
    chunks.put_lost(tx, lost)
    return chunks.count_out(tx, before)
