"""``files.tar``: all that lies below a directory as one archive, in the order in which containers
hold it. So reading it reads each container once, from its beginning on.
"""

import stat
from array import array
from collections.abc import Sequence
from functools import partial
from itertools import groupby

import trio

from aifs.datasets.archive import Archive, ArchiveMember, is_member
from aifs.files.file_io import FileIO
from aifs.files.settled import Source
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.reads.virtual.sources import VirtualContent, right_to
from aifs.reads.virtual.walking import Found, walk
from aifs.reads.virtual.watching import SourceWatch

_HASHES = (1 << 64) - 1


async def list_tree(
    engine: Engine, io: FileIO, top: int, watch: SourceWatch, known: VirtualContent | None
) -> VirtualContent:
    """What ``files.tar`` of the directory ``top`` holds; what ``known`` does if that is still it.
    Raises NotFound, and what ``walk`` raises."""
    directory = await engine.view(namespace.get_directory, top)
    found_in_order = Archive()
    containers, offsets = array("d"), array("Q")  # places of its members
    fingerprint, newest_ns = 0, directory.mtime_ns

    def visit(found: Found) -> bool:
        nonlocal fingerprint, newest_ns
        if not is_member(found.inode.mode):
            return False
        member = member_of(found)
        found_in_order.add(member)
        containers.append(found.place[0])
        offsets.append(found.place[1])
        fingerprint = (fingerprint + hash(member)) & _HASHES
        newest_ns = max(newest_ns, member.mtime_ns)
        return True

    rights = await walk(engine, io, top, watch, visit, with_places=True)
    rights.add(right_to(directory))
    archive = None if known is None or known.fingerprint != fingerprint else known.bytes
    if not isinstance(archive, Archive):
        archive = await trio.to_thread.run_sync(_by_place, found_in_order, containers, offsets)
    source = partial(source_of, archive)
    return VirtualContent(
        archive, source, archive.memory, frozenset(rights), newest_ns, fingerprint
    )


def source_of(archive: Archive, number: int) -> Source:
    ino, size = archive.sources[number], archive.sizes[number]
    return Source(ino, size, archive.mtimes[number], archive.name(number))


def _by_place(archive: Archive, containers: Sequence[float], offsets: Sequence[int]) -> Archive:
    """In columns all along: as objects a million members are hundreds of megabytes."""
    order = sorted(range(len(archive)), key=offsets.__getitem__)
    order.sort(key=containers.__getitem__)
    sorted_ = Archive()
    for _, at_one in groupby(order, lambda number: (containers[number], offsets[number])):
        for number in sorted(at_one, key=archive.name):
            sorted_.add(archive.member(number))
    return sorted_


def member_of(found: Found) -> ArchiveMember:
    """What was found, as an archive holds it."""
    inode = found.inode
    target = (inode.data or b"") if stat.S_ISLNK(inode.mode) else b""
    size = inode.size if inode.is_file else 0
    return ArchiveMember(
        found.path, inode.ino, inode.mode, inode.uid, inode.gid, size, inode.mtime_ns, target
    )
