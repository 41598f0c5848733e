"""Records that refer to a server, as transaction functions that only look (see kv.py). Each returns
finds of its slice of keys, and where the next starts (b"": nowhere).

And the files whose chunks lie in a container, by a walk over all chunk lists: for lost bytes only.
"""

from collections.abc import Callable, Collection, Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import FsError, Unavailable
from aifs.layout.interleaved import HEADER_BYTES, Location
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunks import decode_list, decode_shares, shares_of
from aifs.meta.degraded import find_unread
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode, decode_burst, decode_inode
from aifs.meta.shared import decode_shared
from aifs.meta.slices import Walk, read_slice

_FILES_SLICE = 16  # of files that are looked at as a whole


class Uses(NamedTuple):
    """``objects``: files' or containers' columns there; ``length``: their bytes; ``lost``: oids
    that need it; ``unreadable``: records nobody can read."""

    objects: int = 0
    length: int = 0
    lost: tuple[int, ...] = ()
    unreadable: int = 0


def total(parts: Sequence[Uses]) -> Uses:
    """Of all parts together."""
    return Uses(
        sum(part.objects for part in parts),
        sum(part.length for part in parts),
        tuple(oid for part in parts for oid in part.lost),
        sum(part.unreadable for part in parts),
    )


def scan_files(
    tx: ReadTransaction, start: bytes, end: bytes, server: int, gone: Set[int]
) -> tuple[Uses, bytes]:
    """Striped files in a slice of inodes. ``gone``: all servers to do without."""
    return _scan(tx, start, end, server, gone)


def scan_containers(
    tx: ReadTransaction, start: bytes, end: bytes, server: int, gone: Set[int]
) -> tuple[Uses, bytes]:
    """Of a slice of the table of containers."""
    return _scan(tx, start, end, server, gone)


def _scan(
    tx: ReadTransaction, start: bytes, end: bytes, server: int, gone: Set[int]
) -> tuple[Uses, bytes]:
    records, following = read_slice(tx, start, end)
    return total([_uses_of(tx, key, value, server, gone) for key, value in records]), following


def _uses_of(tx: ReadTransaction, key: bytes, value: bytes, server: int, gone: Set[int]) -> Uses:
    number = keys.number(key)
    layout: Striped | None
    try:
        if key[:1] == b"t":
            container = chunks.decode_container(value)
            oid, layout, size = number, container.layout, container.length
        else:
            inode = decode_inode(number, value)
            oid, layout, size = inode.oid, inode.objects, inode.size
        if layout is None or server not in layout.servers:
            return Uses()
        survives = _survives(tx, oid, layout, size, gone)
    except Unavailable:
        return Uses(unreadable=1)
    length = layout.object_length(layout.servers.index(server), size)
    return Uses(1, length, () if survives else (oid,))


def is_whole(tx: ReadTransaction, inode: Inode, gone: Set[int]) -> bool:
    """Whether a file's bytes on the capacity tier can be read without servers ``gone``, by records;
    not with a damaged one."""
    try:
        if inode.objects is not None:
            return _survives(tx, inode.oid, inode.objects, inode.size, gone)
        if inode.chunks is None:
            return True
        records = tx.range(*keys.chunk_lists(inode.oid))
        containers = {container for _, record in records for container, *_ in shares_of(tx, record)}
        return all(_is_container_whole(tx, container, gone) for container in containers)
    except Unavailable:
        return False


def is_file_whole(tx: ReadTransaction, ino: int, gone: Set[int], wrong: Set[int]) -> bool:
    """``is_whole`` by number, True for a file that is gone. ``wrong``: oids known not to be."""
    inode = _find_readable(tx, ino)
    return inode is None or (inode.oid not in wrong and is_whole(tx, inode, gone))


def _is_container_whole(tx: ReadTransaction, number: int, gone: Set[int]) -> bool:
    found = chunks.find_container(tx, number)
    return found is not None and _survives(tx, number, found.layout, found.length, gone)


def _survives(tx: ReadTransaction, oid: int, layout: Striped, size: int, gone: Set[int]) -> bool:
    missing = find_unread(tx, oid)
    for column, number in enumerate(layout.servers):
        if number in gone and layout.object_length(column, size):
            missing |= 1 << column
    return layout.survives(missing)


def scan_endangered(
    tx: ReadTransaction, start: bytes, end: bytes, gone: Set[int]
) -> tuple[list[int], bytes]:
    """Inodes of clean burst copies, in a slice of them, that are not ``is_whole``, and where the
    next slice starts."""
    found = []
    records, following = read_slice(tx, start, end, _FILES_SLICE)
    for _, value in records:
        with suppress(Unavailable):  # damaged: fsck names it
            record = decode_burst(value)
            inode = None if record.undrained else namespace.find_inode(tx, record.ino)
            if inode is not None and inode.nlink and not is_whole(tx, inode, gone):
                found.append(inode.ino)
    return found, following


def _find_readable(tx: ReadTransaction, ino: int) -> Inode | None:
    with suppress(Unavailable):
        return namespace.find_inode(tx, ino)
    return None


def scan_chunk_lists(
    tx: ReadTransaction, start: bytes, end: bytes, containers: Set[int]
) -> tuple[set[int], bytes]:
    """Oids with chunks in these containers, in a slice of the chunk lists."""
    oids = set()
    records, following = read_slice(tx, start, end)
    for key, value in records:
        if any(container in containers for container, *_ in shares_of(tx, value)):
            oids.add(keys.chunk_list_parts(key)[0])
    return oids, following


class Copies(NamedTuple):
    """Burst copies: ids of clean ones, inode numbers of files in dirty ones."""

    clean: tuple[int, ...] = ()
    dirty: tuple[int, ...] = ()


def scan_copies(tx: ReadTransaction, start: bytes, end: bytes, server: int) -> tuple[Copies, bytes]:
    """Of a slice of the burst copies: those on ``server``."""
    clean, dirty = [], []
    records, following = read_slice(tx, start, end)
    for key, value in records:
        record = decode_burst(value)
        if record.server == server:
            if record.undrained:
                dirty.append(record.ino)
            else:
                clean.append(keys.number(key))
    return Copies(tuple(clean), tuple(dirty)), following


# --- chunks in containers -------------------------------------------------------------------------


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
