"""Places: where the bytes of settled files lie in local files, so that the bridge answers reads of
them without the interpreter (``fuse/places.h``).

A file has places only as long as nobody changes it: they are taken back before its dirty mark
counts, when its form changes, when an inode that was lent is lent no more, and when a server that
they are on begins to fail or to hang. Reads go to the daemon then, as do those of bytes that would
have to be waited for.
"""

import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import trio

from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.chunk_codec import PLAIN
from aifs.data.containers.files import ContainerFiles
from aifs.data.objects.object_set import ObjectSet
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.files.kernel import Kernel
from aifs.files.open_inode import OpenInode
from aifs.files.types import (
    COLUMNS_MAX,
    EVERY_SOURCE,
    PLACES_MAX,
    SOURCES_MAX,
    Passthrough,
    ReadPlace,
)
from aifs.layout.interleaved import HEADER_BYTES, Extent, Location
from aifs.meta import chunks
from aifs.meta.kv import Engine

_SHARE = 4
"""Sources have at most this part of the descriptors that a process may have."""

_PATIENCE_S = 0.1
"""Longest wait to open local files here: a program waits that needs none of them."""

LocalFile = tuple[DataServer, int]
"""A server, and a descriptor of a local file there; -1: there is none."""


class _Source(NamedTuple):
    """What the bridge reads from. The descriptors are ours, and nobody else's."""

    oid: int
    """Of its objects, or the container."""
    files: Sequence[LocalFile]


class Places:
    """Used from one trio thread."""

    def __init__(self, kernel: Kernel, servers: Servers, engine: Engine, is_checked: bool) -> None:
        """``is_checked``: only blocks of own objects, compared before they were kept, are
        places."""
        self._kernel = kernel
        self._blocks = servers.blocks
        self._engine = engine
        self._containers: ContainerFiles | None = None
        """Those of packed files; None before they are known."""
        self._is_checked = is_checked
        self._sources: dict[int, _Source] = {}
        """By number."""
        self._numbers: dict[int, int] = {}
        """By oid; by -oid of what is read from its blocks in a burst directory."""
        self._free: list[int] = []
        """Numbers that were a source's."""
        self._descriptors = 0
        """How many all sources have."""
        self._most = files.descriptors_max() // _SHARE
        """How many they may have."""
        self.used = False
        """See DescriptorUser, as ``close_idle``."""
        servers.tell_of("data", self._take_failing)
        servers.blocks.tell(lambda oid: self.take_objects(-oid))
        servers.blocks.ask(self._read_segments)
        servers.descriptors.add_users(lambda: [self])

    def read_containers(self, containers: ContainerFiles) -> None:
        """Files in these have places, too."""
        self._containers = containers
        containers.tell(self.take_objects, self._take_removed)

    # --- giving ---

    async def give(self, file: OpenInode) -> None:
        """Have the bridge answer reads of an open, settled file whose bytes lie as they are in
        local files. Opens these. Core is as the record is (``overtaken`` does not have the
        file)."""
        inode, objects, size = file.inode, file.objects, file.inode.size
        if not self._may_place(file):
            return
        if isinstance(objects, ObjectSet) and objects.is_kept_near:
            # What the bridge would read from page caches of servers would never get there.
            if not self._blocks.held(inode.oid, size - 1, 1):
                return
            if self._blocks.file_of(inode.oid, 0, size) is None:
                return
        file.placed = objects
        extents: Sequence[Extent] = ()
        found: Sequence[LocalFile] = ()
        try:
            if inode.chunks is not None:
                args = inode.oid, inode.chunks.chunk, 0
                _, extents = await self._engine.view(chunks.get_extents, *args)
                await self.open_containers(extents)
            elif inode.objects is not None and inode.objects.width <= COLUMNS_MAX:
                assert isinstance(objects, ObjectSet)  # its layout is striped
                if self._blocks.file_of(inode.oid, 0, size) is None:
                    with trio.move_on_after(_PATIENCE_S):
                        found = await objects.local_files(size)
        except FsError:
            return  # the reader is told
        is_same = file.objects is file.placed is objects and inode.size == size
        if not is_same or not self._may_place(file):
            return
        if inode.objects is not None:
            number = self._near(inode.oid, 0, size)
            if number is None:
                number = self._open(inode.oid, inode.objects.unit, found)
            self._put(inode.ino, size, [] if number is None else [ReadPlace(0, size, 0, number)])
        else:
            self.put_chunks(inode.ino, size, extents)

    async def open_containers(self, extents: Sequence[Extent]) -> None:
        """Make sources of containers with chunks that may have places. Raises Unavailable."""
        for _, place in _plain(extents):
            if place.container not in self._numbers and self._containers is not None and self.is_on:
                end = place.offset + HEADER_BYTES + place.stored
                with trio.move_on_after(_PATIENCE_S):
                    unit, found = await self._containers.local_files(place.container, end)
                    self._open(place.container, unit, found)

    def put_chunks(self, ino: int, size: int, extents: Sequence[Extent]) -> bool:
        """Have the bridge answer reads of an inode with these first extents; whether it does. The
        inode is in core and settled, or claimed and on record. Does not block."""
        found = [
            (start, at, number, self._sources[number])
            for start, at in _plain(extents)
            if (number := self._source_of(at)) is not None
        ]
        places = [
            ReadPlace(start, start + at.raw, at.offset + HEADER_BYTES, number)
            for start, at, number, source in found
            if self._sources.get(number) is source  # else it gave way to another one of these
        ]
        return self._put(ino, size, places)

    def _source_of(self, at: Location) -> int | None:
        near = self._near(at.container, at.offset + HEADER_BYTES, at.raw)
        return self._numbers.get(at.container) if near is None else near

    def _near(self, oid: int, offset: int, length: int) -> int | None:
        """The source of bytes in blocks: at the same offset, in one file."""
        found = self._blocks.file_of(oid, offset, length)
        return None if found is None else self._open(-oid, self._blocks.segment, [found])

    def _put(self, ino: int, size: int, places: Sequence[ReadPlace]) -> bool:
        passthrough = self._passthrough
        if passthrough is None or not places:
            return False
        is_put, idle = passthrough.put_places(ino, size, places)
        self._close(idle)
        return is_put

    @property
    def is_on(self) -> bool:
        """Whether packed files may have places."""
        return self._passthrough is not None and not self._is_checked

    @property
    def _passthrough(self) -> Passthrough | None:
        return None if files.is_hooked() else self._kernel.passthrough

    def _may_place(self, file: OpenInode) -> bool:
        is_settled = not (file.marked or file.home or file.joined or file.inode.in_burst)
        is_settled = is_settled and not (self._is_checked and file.inode.chunks is not None)
        return self._passthrough is not None and is_settled and file.copy is None

    def _open(self, oid: int, unit: int, found: Sequence[LocalFile]) -> int | None:
        """The source of these files, whose descriptors stay the caller's; None: no files, or no
        room."""
        passthrough, number = self._passthrough, self._numbers.get(oid)
        if number is not None or passthrough is None or not found:
            return number
        servers = [server for server, fd in found if fd >= 0]
        in_memory = {server.may_inline for server in servers}
        is_one_kind = len(in_memory) == 1 and len(found) <= COLUMNS_MAX
        if not is_one_kind or not all(server.is_at_hand for server in servers):
            return None
        if self._descriptors + len(found) > self._most or len(self._sources) == SOURCES_MAX:
            self.close_idle()
        if self._descriptors + len(found) > self._most or len(self._sources) == SOURCES_MAX:
            return None
        own = [(server, files.duplicate(fd) if fd >= 0 else fd) for server, fd in found]
        number = self._free.pop() if self._free else len(self._sources)
        passthrough.put_source(number, unit, in_memory.pop(), [fd for _, fd in own])
        self._sources[number], self._numbers[oid] = _Source(oid, own), number
        self._descriptors += len(own)
        return number

    # --- taking back ---

    def take(self, ino: int) -> None:
        """Reads of an inode come to us from now on. Does not block."""
        if self._sources and self._kernel.passthrough is not None:
            self._close(self._kernel.passthrough.take_places(ino))

    def take_objects(self, oid: int) -> None:
        """The same of all files that have bytes in these objects, or in this container."""
        number = self._numbers.get(oid)
        if number is not None and self._kernel.passthrough is not None:
            idle = self._kernel.passthrough.take_source(number)
            self._close({number, *idle})

    def _take_failing(self) -> None:
        """Take sources on servers that do not work."""
        for source in list(self._sources.values()):
            if not all(server.is_at_hand for server, fd in source.files if fd >= 0):
                self.take_objects(source.oid)

    def _take_removed(self) -> None:
        """Take sources of removed objects, which keep their space while open."""
        for number, source in list(self._sources.items()):
            if self._sources.get(number) is not source:
                continue  # it went with another one
            if any(fd >= 0 and os.fstat(fd).st_nlink == 0 for _, fd in source.files):
                self.take_objects(source.oid)

    def close_idle(self) -> int:
        """See DescriptorUser: of files that were not read since this was last called."""
        before = self._descriptors
        if self._kernel.passthrough is not None:
            self._close(self._kernel.passthrough.take_source(EVERY_SOURCE))
        return before - self._descriptors

    def _read_segments(self) -> Iterator[tuple[int, int]]:
        """See Blocks.ask."""
        if self._kernel.passthrough is not None:
            for number, units in self._kernel.passthrough.read_units():
                if self._sources[number].oid < 0:
                    yield -self._sources[number].oid, units

    def end(self) -> None:
        """The kernel has gone."""
        self._close(list(self._sources))

    def _close(self, numbers: Sequence[int] | set[int]) -> None:
        for number in numbers:
            source = self._sources.pop(number)
            del self._numbers[source.oid]
            self._free.append(number)
            self._descriptors -= len(source.files)
            for server, fd in source.files:
                if fd >= 0:  # the last descriptor of a removed object frees its space
                    server.close_object(fd, removed=os.fstat(fd).st_nlink == 0)


def _plain(extents: Sequence[Extent]) -> Iterator[tuple[int, Location]]:
    """The first extents of a file that lie in containers as they are: offset and location. Not
    shared ones: one that goes bad is read elsewhere from the next transaction on."""
    start = 0
    for length, place, is_shared in extents[:PLACES_MAX]:
        if place is not None and not is_shared and place.codec == PLAIN:
            if place.stored == place.raw == length:
                yield start, place
        start += length
