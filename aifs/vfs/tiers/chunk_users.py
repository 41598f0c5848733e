"""Whose chunks lie in a container. Takes a walk through all chunk lists, so it is for what is rare: bytes that are lost."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from aifs.core.errors import FsError
from aifs.layout.interleaved import HEADER_BYTES, Interleaved
from aifs.meta import chunks, keys
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import decode_inode

_SLICE = 512


class User(NamedTuple):
    """A chunk that a file has in the container at ``start`` to ``end``: its bytes ``first`` to ``last``."""

    start: int
    end: int
    ino: int
    oid: int
    first: int
    last: int


async def users_of(engine: Engine, container: int) -> list[User]:
    """By place in the container. Records that are damaged are passed over."""
    places: list[tuple[int, int, int, int]] = []  # oid, index, start, end
    await _walk(engine, b"l", _find_chunks, container, places)
    oids = {oid for oid, *_ in places}
    owners: dict[int, tuple[int, int, int]] = {}  # oid: ino, chunk, size
    if oids:
        await _walk(engine, b"i", _find_owners, oids, owners)
    users = []
    for oid, index, start, end in places:
        if oid in owners:
            ino, chunk, size = owners[oid]
            users.append(User(start, end, ino, oid, index * chunk, min((index + 1) * chunk, size) - 1))
    return sorted(users)


async def _walk(engine: Engine, kind: bytes, function: Callable[..., None], *args: Any) -> None:
    def walk_slice(tx: ReadTransaction, start: bytes) -> bytes:
        count, key = 0, b""
        for key, value in tx.range(start, end, _SLICE):
            count += 1
            with suppress(FsError):
                function(key, value, *args)
        return key + b"\0" if count == _SLICE else b""

    start, end = keys.all_of(kind)
    while start:
        start = await engine.view(walk_slice, start)


def _find_chunks(key: bytes, value: bytes, container: int, places: list[tuple[int, int, int, int]]) -> None:
    if all(share[0] != container for share in chunks.decode_shares(value)):
        return
    oid, first = keys.chunk_list_parts(key)
    for index, place in enumerate(chunks.decode_chunks(value), first):
        if place is not None and place.container == container:
            places.append((oid, index, place.offset, place.offset + HEADER_BYTES + place.stored))


def _find_owners(key: bytes, value: bytes, oids: set[int], owners: dict[int, tuple[int, int, int]]) -> None:
    inode = decode_inode(keys.number(key), value)
    if inode.oid in oids and isinstance(inode.layout, Interleaved):
        owners[inode.oid] = inode.ino, inode.layout.chunk, inode.size
