"""``files.tar``: all that lies below a directory as one archive, in the order in which containers
hold it. So reading it reads each container once, from its beginning on.
"""

import math
import stat
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import trio

from aifs.core.errors import Invalid, NotFound, Unavailable
from aifs.datasets.archive import Archive, ArchiveMember, is_member
from aifs.files.file_io import FileIO
from aifs.meta import chunks, namespace
from aifs.meta.extents import get_extents
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.listing import list_directory
from aifs.meta.records import Inode
from aifs.vfs.virtual.sources import ReadRight, Source, VirtualContent, right_to
from aifs.vfs.virtual.watching import SourceWatch

MEMBERS_MAX = 1 << 20
"""Of one archive: some 150 bytes are kept of each, and twice that while it is made."""

TEXT_MAX = 256 << 20
"""Bytes of their paths, and of targets of symlinks, altogether: a chain of directories with long
names would cost much more than its members."""

RIGHTS_MAX = 4096
"""Different ones (owner, mode, ACL) of what lies in one archive: who opens it is checked against
each."""

_SLICE = 64
"""Entries that are looked at before others get a turn: less than a millisecond."""

_HASHES = (1 << 64) - 1

Place = tuple[float, int]
"""Where the bytes of a file lie: container and offset; what lies in none comes last, in the order
in which it was made."""

_FIRST: Place = (-1.0, 0)


class _Entry(NamedTuple):
    name: bytes
    inode: Inode
    cookie: int
    place: Place


async def list_tree(
    engine: Engine, io: FileIO, top: int, watch: SourceWatch, known: VirtualContent | None
) -> VirtualContent:
    """What ``files.tar`` of the directory ``top`` holds; what ``known`` does if that is still it.
    Raises NotFound; Invalid for too many files, too long paths, too many different rights."""
    directory = await engine.view(namespace.get_directory, top)
    found: list[tuple[Place, ArchiveMember]] = []
    rights: set[ReadRight] = {right_to(directory)}
    fingerprint, newest_ns, text = 0, directory.mtime_ns, 0
    waiting = [(top, b"")]
    while waiting:
        ino, path = waiting.pop()
        watch.directories.add(ino)
        cookie = 0
        while entries := await _list(engine, ino, cookie):
            for name, recorded, cookie, place in entries:
                inode = io.inodes.current(recorded)
                if not is_member(inode.mode):
                    continue
                member = _member(path + name, inode)
                text += len(member.name) + len(member.target)
                found.append((place, member))
                fingerprint = (fingerprint + hash(member)) & _HASHES
                newest_ns = max(newest_ns, inode.mtime_ns)
                if inode.is_dir:
                    waiting.append((inode.ino, path + name + b"/"))
                if inode.is_dir or inode.is_file:
                    rights.add(right_to(inode))
            for count, most, what in (
                (len(found), MEMBERS_MAX, "files"),
                (text, TEXT_MAX, "bytes of paths"),
                (len(rights), RIGHTS_MAX, "different owners, modes and ACLs"),
            ):
                if count > most:
                    raise Invalid(
                        f"more than {most:,} {what} are below the directory; read files.tar of "
                        "directories below it"
                    )
            await trio.lowlevel.checkpoint()
    archive = None if known is None or known.fingerprint != fingerprint else known.bytes
    if not isinstance(archive, Archive):
        archive = await trio.to_thread.run_sync(_make, found)
    source = partial(_source, archive)
    return VirtualContent(archive, source, len(archive), frozenset(rights), newest_ns, fingerprint)


def _source(archive: Archive, number: int) -> Source:
    ino, size = archive.sources[number], archive.sizes[number]
    return Source(ino, size, archive.mtimes[number], archive.name(number))


def _make(found: list[tuple[Place, ArchiveMember]]) -> Archive:
    found.sort()
    archive = Archive()
    for _, member in found:
        archive.add(member)
    return archive


async def _list(engine: Engine, ino: int, cookie: int) -> Sequence[_Entry]:
    with suppress(NotFound):  # removed meanwhile
        return await engine.view(_read_slice, ino, cookie)
    return ()


def _read_slice(tx: ReadTransaction, ino: int, cookie: int) -> list[_Entry]:
    return [
        _Entry(name, inode, place, _place_of(tx, inode))
        for name, inode, place in list_directory(tx, ino, cookie, _SLICE)
    ]


def _place_of(tx: ReadTransaction, inode: Inode) -> Place:
    layout = inode.chunks
    if inode.is_dir:
        return _FIRST  # what lies in them follows; by name among themselves
    if layout is None:
        return math.inf, inode.ino
    with suppress(Unavailable):  # who reads it is told
        if layout.variable:
            places = [extent.place for extent in get_extents(tx, inode.oid, 0)[2]]
        else:
            places = chunks.get_chunks(tx, inode.oid, 0)[1]
        for place in places:
            if place is not None:
                return place.container, place.offset
    return math.inf, inode.ino


def _member(name: bytes, inode: Inode) -> ArchiveMember:
    target = (inode.data or b"") if stat.S_ISLNK(inode.mode) else b""
    size = inode.size if inode.is_file else 0
    return ArchiveMember(
        name, inode.ino, inode.mode, inode.uid, inode.gid, size, inode.mtime_ns, target
    )
