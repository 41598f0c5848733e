"""``files.tar``: all that lies below a directory as one archive, in the order in which containers
hold it. So reading it reads each container once, from its beginning on.
"""

import stat
from functools import partial

import trio

from aifs.datasets.archive import Archive, ArchiveMember, is_member
from aifs.files.file_io import FileIO
from aifs.files.settled import Source
from aifs.meta import namespace
from aifs.meta.kv import Engine
from aifs.vfs.virtual.sources import VirtualContent, right_to
from aifs.vfs.virtual.walking import Found, Place, walk
from aifs.vfs.virtual.watching import SourceWatch

_HASHES = (1 << 64) - 1


async def list_tree(
    engine: Engine, io: FileIO, top: int, watch: SourceWatch, known: VirtualContent | None
) -> VirtualContent:
    """What ``files.tar`` of the directory ``top`` holds; what ``known`` does if that is still it.
    Raises NotFound, and what ``walk`` raises."""
    directory = await engine.view(namespace.get_directory, top)
    members: list[tuple[Place, ArchiveMember]] = []
    fingerprint, newest_ns = 0, directory.mtime_ns

    def visit(found: Found) -> bool:
        nonlocal fingerprint, newest_ns
        if not is_member(found.inode.mode):
            return False
        member = member_of(found)
        members.append((found.place, member))
        fingerprint = (fingerprint + hash(member)) & _HASHES
        newest_ns = max(newest_ns, member.mtime_ns)
        return True

    rights = await walk(engine, io, top, watch, visit, with_places=True)
    rights.add(right_to(directory))
    archive = None if known is None or known.fingerprint != fingerprint else known.bytes
    if not isinstance(archive, Archive):
        archive = await trio.to_thread.run_sync(_make, members)
    source = partial(source_of, archive)
    return VirtualContent(archive, source, len(archive), frozenset(rights), newest_ns, fingerprint)


def source_of(archive: Archive, number: int) -> Source:
    ino, size = archive.sources[number], archive.sizes[number]
    return Source(ino, size, archive.mtimes[number], archive.name(number))


def _make(found: list[tuple[Place, ArchiveMember]]) -> Archive:
    found.sort()
    archive = Archive()
    for _, member in found:
        archive.add(member)
    return archive


def member_of(found: Found) -> ArchiveMember:
    """What was found, as an archive holds it."""
    inode = found.inode
    target = (inode.data or b"") if stat.S_ISLNK(inode.mode) else b""
    size = inode.size if inode.is_file else 0
    return ArchiveMember(
        found.path, inode.ino, inode.mode, inode.uid, inode.gid, size, inode.mtime_ns, target
    )
