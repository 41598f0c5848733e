"""What virtual files are made of, and who may read that."""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from aifs.core.errors import AccessDenied, NotFound, Stale
from aifs.datasets.virtual import VirtualBytes
from aifs.files.file_io import FileIO
from aifs.files.permissions import READ, SEARCH
from aifs.files.settled import Source
from aifs.meta import acl
from aifs.meta.askers import Asker
from aifs.meta.records import Inode


async def read_source(io: FileIO, source: Source, offset: int, length: int) -> bytes | memoryview:
    """All of these bytes. Raises Stale, with the name, if it is not that file any more."""
    ino, size, mtime_ns, name = source
    try:
        file = await io.inodes.acquire(ino)
    except NotFound:
        raise Stale(f"{os.fsdecode(name)} has been removed") from None
    try:
        data = await io.read(file, offset, length)
        now = io.inodes.attributes(file)
        if (now.size, now.mtime_ns) != (size, mtime_ns) or len(data) != length:
            raise Stale(f"{os.fsdecode(name)} has changed")
        return data
    finally:
        await io.inodes.release(file)


class ReadRight(NamedTuple):
    """What of an inode decides who may read it."""

    acl: bytes
    mode: int
    uid: int
    gid: int


def right_to(inode: Inode) -> ReadRight:
    return ReadRight(inode.acl, inode.mode, inode.uid, inode.gid)


def require_all(rights: Collection[ReadRight], asker: Asker) -> None:
    """Raises AccessDenied unless ``asker`` may read all of these, and search what are
    directories."""
    if asker.uid == 0:
        return
    for right in rights:
        wanted = READ | SEARCH if right.mode >> 12 == 4 else READ
        if not acl.granted(*right, asker.uid, set(asker.gids), wanted):
            raise AccessDenied("the caller may not read all that the file is made of")


@dataclass(frozen=True, slots=True)
class VirtualContent:
    """What a virtual file was made to hold. It never changes."""

    bytes: VirtualBytes
    """In terms of the numbers of sources."""
    source: Callable[[int], Source]
    """The source of a number."""
    memory: int
    """About how many bytes are kept for it."""
    rights: frozenset[ReadRight]
    """To all of them, and to the directories above."""
    mtime_ns: int
    """When the newest of them changed."""
    fingerprint: int
    """The same as long as sources and their order are."""
