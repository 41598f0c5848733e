"""``files.tar``: a directory's tree as an archive, in the order of containers: each is read
once."""

import re
import stat
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate, groupby
from typing import NamedTuple

import trio

from aifs.core.errors import Invalid
from aifs.datasets.archive import Archive, ArchiveMember, is_member
from aifs.datasets.formats.files import catalogue_of, is_hidden, joined_name
from aifs.datasets.virtual import Buffer, Piece, SourceRange, cut
from aifs.files.file_io import FileIO
from aifs.files.settled import Source
from aifs.meta import namespace
from aifs.meta.askers import Asker
from aifs.meta.kv import Engine
from aifs.reads.virtual.sources import VirtualContent, require_all, right_to
from aifs.reads.virtual.walking import Found, SourceWatch, walk

_HASHES = (1 << 64) - 1


async def list_tree(
    engine: Engine, io: FileIO, top: int, watch: SourceWatch, known: VirtualContent | None
) -> VirtualContent:
    """The content of ``files.tar`` of directory ``top``; ``known`` if unchanged. Raises NotFound,
    and errors of ``walk``."""
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
    """In columns: as objects a million members are hundreds of megabytes."""
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


# ``files=DIGEST.bin``: the files of a dataset of small files one after another, as its catalogue
# has them (aifs/datasets/formats/files.py). The digest is that of the catalogue, so who has
# computed where a file begins finds it there, or finds no such file. Paths and sizes are the
# catalogue's, times are not: a file that changes after this one was looked up makes it tell ESTALE.

_NAME = re.compile(rb"files=[0-9a-f]{32}\.bin")


def is_joined(name: bytes) -> bool:
    """Whether it is the name of such a file."""
    return _NAME.fullmatch(name) is not None


async def join_files(
    engine: Engine,
    io: FileIO,
    name: bytes,
    asker: Asker,
    top: int,
    watch: SourceWatch,
    known: VirtualContent | None,
) -> VirtualContent:
    """The content of file ``name`` of directory ``top``; ``known`` if unchanged. Raises NotFound;
    AccessDenied, without details, for unreadable sources; Invalid for another catalogue; errors of
    ``walk``."""
    directory = await engine.view(namespace.get_directory, top)
    rows: list[_Row] = []

    def visit(found: Found) -> bool:
        inode = found.inode
        if is_hidden(found.path) or not (inode.is_file or inode.is_dir):
            return False
        if inode.is_file:
            rows.append(_Row(inode.ino, found.path, inode.size, inode.mtime_ns))
        return True

    rights = await walk(engine, io, top, watch, visit)
    rights.add(right_to(directory))
    require_all(rights, asker)
    fingerprint = await trio.to_thread.run_sync(_sort, rows)
    if known is None or known.fingerprint != fingerprint:
        joined = await trio.to_thread.run_sync(_join, rows, name)
        newest_ns = max((row.mtime_ns for row in rows), default=directory.mtime_ns)
        return VirtualContent(
            joined, joined.source, joined.memory, frozenset(rights), newest_ns, fingerprint
        )
    return VirtualContent(
        known.bytes, known.source, known.memory, frozenset(rights), known.mtime_ns, fingerprint
    )


class _Row(NamedTuple):
    ino: int
    path: bytes
    size: int
    mtime_ns: int


class _Joined:
    """The ``VirtualBytes`` of files one after another: 40 bytes and the name are kept of each."""

    def __init__(self, rows: list[_Row]) -> None:
        self._inos = array("Q", (row.ino for row in rows))
        self._mtimes = array("q", (row.mtime_ns for row in rows))
        self._names = b"".join(row.path for row in rows)
        self._name_ends = array("Q", accumulate(len(row.path) for row in rows))
        self._starts = array("Q", [0])
        for row in rows:
            self._starts.append(self._starts[-1] + row.size)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._starts[-1]

    @property
    def memory(self) -> int:
        """As VirtualBytes."""
        return 40 * len(self._inos) + len(self._names)

    def source(self, number: int) -> Source:
        size = self._starts[number + 1] - self._starts[number]
        start = self._name_ends[number - 1] if number else 0
        name = self._names[start : self._name_ends[number]]
        return Source(self._inos[number], size, self._mtimes[number], name)

    def pieces(self, offset: int, length: int) -> Iterator[Piece]:
        """As VirtualBytes."""
        number = bisect_right(self._starts, offset) - 1
        return cut(self._from(number), offset - self._starts[number], length)

    def columns(self) -> Iterable[Buffer]:
        """As VirtualBytes."""
        return self._inos, self._mtimes, self._starts, self._name_ends, self._names

    def _from(self, first: int) -> Iterator[Piece]:
        for number in range(first, len(self._inos)):
            if size := self._starts[number + 1] - self._starts[number]:
                yield SourceRange(number, 0, size)


def _sort(rows: list[_Row]) -> int:
    """By place in the catalogue; returns their fingerprint."""
    rows.sort()
    return hash(tuple(rows))


def _join(rows: list[_Row], name: bytes) -> _Joined:
    catalogue, _ = catalogue_of((row.ino, row.path, row.size) for row in rows)
    if joined_name(catalogue) != name:
        raise Invalid("the directory holds other files than the catalogue, or of other sizes")
    return _Joined(rows)
