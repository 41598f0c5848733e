"""Whose chunks lie in a container. Takes a walk through all chunk lists, and the records of shared
chunks, so it is for what is rare: bytes that are lost."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.core.errors import FsError
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.meta import keys
from aifs.meta.chunk_lists import decode_list, decode_shares
from aifs.meta.kv import Engine
from aifs.meta.records import decode_inode
from aifs.meta.shared import decode_shared
from aifs.meta.slices import read_slice


class User(NamedTuple):
    """A chunk that a file has in a container."""

    start: int
    """Where in the container it begins, with its header."""
    end: int
    """Where it ends."""
    ino: int
    """The file."""
    oid: int
    """Its chunk list."""
    first: int
    """The first byte of the file that it holds."""
    last: int
    """The last one."""


class _Use(NamedTuple):
    """A chunk at ``start`` to ``end`` that a list names, as ``length`` bytes from ``first`` on."""

    start: int
    end: int
    oid: int
    first: int
    length: int


async def users_of(engine: Engine, container: int) -> list[User]:
    """By place in the container; a shared chunk has several. Records that are damaged are passed
    over.
    """
    uses: list[_Use] = []
    shared: dict[bytes, Location] = {}
    await _walk(engine, b"h", _find_shared, container, shared)
    await _walk(engine, b"l", _find_chunks, container, shared, uses)
    oids = {use.oid for use in uses}
    owners: dict[int, list[tuple[int, int]]] = {}  # oid: ino, size
    if oids:
        await _walk(engine, b"i", _find_owners, oids, owners)
    users = []
    for start, end, oid, first, length in uses:
        for ino, size in owners.get(oid, ()):
            users.append(User(start, end, ino, oid, first, min(first + length, size) - 1))
    return sorted(users)


async def _walk(engine: Engine, kind: bytes, function: Callable[..., None], *args: Any) -> None:
    """Call ``function`` for each record of a kind; outside of views, as it takes note of them."""
    start, end = keys.all_of(kind)
    while start:
        records, start = await engine.view(read_slice, start, end)
        for key, value in records:
            with suppress(FsError):
                function(key, value, *args)
        await trio.lowlevel.checkpoint()


def _find_shared(key: bytes, value: bytes, container: int, shared: dict[bytes, Location]) -> None:
    digest = keys.shared_digest(key)
    place = decode_shared(digest, value).place
    if place.container == container:
        shared[digest] = place


def _find_chunks(
    key: bytes, value: bytes, container: int, shared: dict[bytes, Location], uses: list[_Use]
) -> None:
    if not shared and all(share[0] != container for share in decode_shares(value)):
        return
    oid, _ = keys.chunk_list_parts(key)
    first, extents = decode_list(value)
    for extent in extents:
        place = shared.get(extent.digest) if extent.shared else extent.place
        if place is not None and place.container == container:
            end = place.offset + HEADER_BYTES + place.stored
            uses.append(_Use(place.offset, end, oid, first, extent.length))
        first += extent.length


def _find_owners(
    key: bytes, value: bytes, oids: set[int], owners: dict[int, list[tuple[int, int]]]
) -> None:
    inode = decode_inode(keys.number(key), value)
    if inode.oid in oids and inode.chunks is not None:
        owners.setdefault(inode.oid, []).append((inode.ino, inode.size))
