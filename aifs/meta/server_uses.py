"""Records that refer to a server, as transaction functions that only look (see kv.py). Each returns
finds of its slice of keys, and where the next starts (b"": nowhere)."""

from collections.abc import Sequence, Set
from contextlib import suppress
from typing import NamedTuple

from aifs.core.errors import Unavailable
from aifs.layout.striped import Striped
from aifs.meta import chunks, keys, namespace
from aifs.meta.chunks import shares_of
from aifs.meta.degraded import find_unread
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode, decode_burst, decode_inode
from aifs.meta.slices import read_slice

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
