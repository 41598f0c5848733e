"""Where the files of a directory lie, for many of them at once: ``user.aifs.places.N``.

A program that reads a directory of small files in an order of its own does so at the containers'
speed if its blocks are runs of files that lie beside each other. Sizes and times are in the answer,
so that no stat(2) of each file is needed; names come from readdir(3), with the same inode numbers.

Answer, little-endian: u64 cookie to go on with (the N of the next request; 0: there are no more),
then for each regular file u64 inode, u64 size, i64 mtime (ns since the epoch), u64 container (0: it
lies in none), u64 offset of its first byte there. A file without a name in the directory is not
told; one that is stored in several containers is told by its first chunk.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import trio

from aifs.core.errors import Unavailable
from aifs.files.file_io import FileIO
from aifs.meta import keys
from aifs.meta.chunk_lists import decode_list
from aifs.meta.chunks import resolve
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import list_directory
from aifs.meta.records import Inode

NEXT = struct.Struct("<Q")
FILE = struct.Struct("<QQqQQ")

_FILES_MAX = 1600  # an extended attribute has up to 64 KiB
_ENTRIES = 64  # looked at in one go: about 0.5 ms


class _Placed(NamedTuple):
    inode: Inode
    container: int
    offset: int


async def tell(engine: Engine, io: FileIO, directory: int, cookie: int) -> bytes:
    """What ``user.aifs.places.COOKIE`` says; 0: from the start. Raises Unavailable."""
    told: list[bytes] = []
    while len(told) <= _FILES_MAX - _ENTRIES:
        following, found = await engine.view(_read, directory, cookie)
        for inode, container, offset in found:
            file = io.table.open.get(inode.ino)
            now = inode if file is None else io.inodes.attributes(file)
            told.append(FILE.pack(now.ino, now.size, now.mtime_ns, container, offset))
        cookie = following
        if not cookie:
            break
        await trio.lowlevel.checkpoint()
    return NEXT.pack(cookie) + b"".join(told)


def _read(tx: ReadTransaction, directory: int, cookie: int) -> tuple[int, list[_Placed]]:
    """The files among some entries, and the cookie to go on with; 0: there are no more."""
    entries = list(list_directory(tx, directory, cookie, _ENTRIES))
    inodes = [inode for _, inode, _ in entries if inode.is_file]
    places = first_places(tx, inodes)
    found = [_Placed(inode, *places.get(inode.ino, (0, 0))) for inode in inodes]
    return entries[-1][2] if len(entries) == _ENTRIES else 0, found


def first_places(tx: ReadTransaction, inodes: Sequence[Inode]) -> dict[int, tuple[int, int]]:
    """By inode number, in which container, and where there, the first chunk lies of each of these
    files that has one; not of one whose list is damaged, which who reads it is told."""
    stored = [inode for inode in inodes if inode.chunks is not None]
    lists = tx.get_many([keys.chunk_list(inode.oid, 0) for inode in stored])
    places = {}
    for inode, record in zip(stored, lists, strict=True):
        with suppress(Unavailable):
            for extent in decode_list(record)[1]:
                if (place := resolve(tx, extent).place) is not None:
                    places[inode.ino] = place.container, place.offset
                    break
    return places
