"""The files whose chunks lie in a container. It walks all chunk lists: for lost bytes only."""

from collections.abc import Callable, Collection
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import FsError
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.meta import keys
from aifs.meta.chunks import decode_list, decode_shares
from aifs.meta.kv import Engine
from aifs.meta.records import decode_inode
from aifs.meta.shared import decode_shared
from aifs.meta.slices import Walk


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
    container: int
    """The container."""


async def users_of(
    engine: Engine,
    containers: Collection[int],
    is_meant: Callable[[Location], bool] = lambda place: True,
) -> list[User]:
    """The users of all chunks in ``containers`` whose places are meant, by place (a shared chunk
    has several). Damaged records are passed over."""

    def is_there(place: Location) -> bool:
        return place.container in containers and is_meant(place)

    def find_shared(key: bytes, value: bytes) -> None:
        digest = keys.shared_digest(key)
        place = decode_shared(digest, value).place
        if is_there(place):
            shared[digest] = place

    def find_chunks(key: bytes, value: bytes) -> None:
        if not shared and all(share[0] not in containers for share in decode_shares(value)):
            return
        oid, _ = keys.chunk_list_parts(key)
        first, extents = decode_list(value)
        for extent in extents:
            place = shared.get(extent.digest) if extent.shared else extent.place
            if place is not None and is_there(place):
                uses.append((place, oid, first, extent.length))
            first += extent.length

    def find_owners(key: bytes, value: bytes) -> None:
        inode = decode_inode(keys.number(key), value)
        if inode.oid in oids and inode.chunks is not None:
            owners.setdefault(inode.oid, []).append((inode.ino, inode.size))

    uses: list[tuple[Location, int, int, int]] = []
    shared: dict[bytes, Location] = {}
    await _walk(engine, b"h", find_shared)
    await _walk(engine, b"l", find_chunks)
    oids = {oid for _, oid, _, _ in uses}
    owners: dict[int, list[tuple[int, int]]] = {}  # oid: ino, size
    if oids:
        await _walk(engine, b"i", find_owners)
    users = []
    for place, oid, first, length in uses:
        end = place.offset + HEADER_BYTES + place.stored
        for ino, size in owners.get(oid, ()):
            last = min(first + length, size) - 1
            users.append(User(place.offset, end, ino, oid, first, last, place.container))
    return sorted(users)


async def _walk(engine: Engine, kind: bytes, function: Callable[[bytes, bytes], None]) -> None:
    async for key, value in Walk(engine, kind):
        with suppress(FsError):
            function(key, value)
