"""What lies on the servers of a store whose metadata is lost: objects and burst copies, with their
labels.

Everything is held in memory, some 500 bytes for each object.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from aifs.check.findings import Progress
from aifs.core import files
from aifs.core.errors import FsError
from aifs.data.naming import ForeignFile, StoredObject
from aifs.data.objects import object_label
from aifs.data.objects.object_label import Label
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import Extent, Location
from aifs.layout.striped import Striped
from aifs.meta.chunk_lists import Chunks
from aifs.meta.records import Copy

_BATCH = 1024


class Part(NamedTuple):
    """An object, or a burst copy. ``column`` is what its label says; -1 if it has none."""

    server: int
    length: int
    blocks: int
    mtime_ns: int
    column: int
    label: Label | None


@dataclass(slots=True)
class Saved:
    """A regular file as it can be told without the metadata; ``path`` is a hint.

    ``layout`` is that of the objects, ``chunks`` or ``extents`` of ``oid``, or None: it is in its
    burst ``copy`` alone. ``lost``: mask of the columns that must not be read. ``digests``: of all
    its MiBs, if they are known. ``note``: what is doubtful about it.
    """

    ino: int
    oid: int
    size: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    path: bytes
    layout: object = None
    lost: int = 0
    blocks: int = 0
    digests: bytes = b""
    root: bytes = b""  # the checksum of the checksums that its label tells
    chunks: Chunks = ()
    extents: Sequence[Extent] = ()
    copy: Copy | None = None
    dirty: bool = False
    note: str = ""

    @property
    def checksum(self) -> bytes:
        """Of the checksums, b"" if it has none."""
        return self.root or (object_label.digest_of(self.digests) if self.digests else b"")

    @property
    def places(self) -> list[Location]:
        """Of all chunks that it has in containers."""
        every = [*self.chunks, *(extent.place for extent in self.extents)]
        return [place for place in every if place is not None]


@dataclass(slots=True)
class Inventory:
    """Parts of object sets by (ino, oid), where ino 0 means a container; burst copies by server and
    id.
    """

    sets: dict[tuple[int, int], list[Part]] = field(default_factory=dict)
    copies: dict[Copy, Part] = field(default_factory=dict)
    foreign: int = 0
    unlabelled: int = 0
    objects: int = 0

    async def take(self, servers: Servers, progress: Progress, tell: Callable[[str], None]) -> None:
        """Look at everything on the servers that are there; ``tell`` what cannot be."""
        for server in servers.values():
            if server.absent:
                continue
            walk = self._walk(server)
            try:
                while batch := await servers.run(server, _some, walk):
                    for ino, oid, part in batch:
                        self._add(server, ino, oid, part)
                    progress("objects", self.objects, self.objects)
            except FsError as error:
                tell(f"{server.name}: not all of it can be looked at: {error}")

    def _add(self, server: DataServer, ino: int, oid: int, part: Part) -> None:
        self.objects += 1
        if server.role == "burst":
            self.copies[Copy(server.id, oid)] = part
        else:
            self.unlabelled += part.label is None
            self.sets.setdefault((ino, oid), []).append(part)

    def _walk(self, server: DataServer) -> Iterator[tuple[int, int, Part]]:
        for found in server.list_objects():
            if isinstance(found, ForeignFile):
                self.foreign += 1
                continue
            label, column = _label_of(server, found)
            mtime_ns = (
                server.call("stat", found.path, os.stat, found.path).st_mtime_ns
                if server.role == "burst"
                else 0
            )
            part = Part(server.id, found.length, found.allocated // 512, mtime_ns, column, label)
            yield found.ino, found.oid, part


def _label_of(server: DataServer, found: StoredObject) -> tuple[Label | None, int]:
    """The label and the column that it tells; (None, -1) if there is none that is this object's."""
    value = server.call("open", found.path, files.get_label, found.path, object_label.NAME)
    try:
        if value is None:
            return None, -1
        if server.role == "burst":
            return object_label.decode_copy(value, server.store, found.oid), 0
        label, store, column = object_label.decode(value)
    except ValueError:
        return None, -1
    ours = (label.ino, label.oid, store) == (found.ino, found.oid, server.store)
    return (label, column) if ours else (None, -1)


def _some(walk: Iterator[tuple[int, int, Part]]) -> list[tuple[int, int, Part]]:
    return list(islice(walk, _BATCH))


# --- which column is where ---


class Placed(NamedTuple):
    """An object set: ``parts`` by column, and its layout, in which columns that were not found are
    where labels say.
    """

    layout: Striped
    parts: dict[int, Part]


def place(parts: Iterable[Part], layout: Striped, known: Iterable[int]) -> Placed:
    """``layout``: what a label says, perhaps before columns were moved; ``known``: numbers of all
    servers.
    """
    found: dict[int, Part] = {}
    unlabelled, numbers = [], set(known)
    for part in sorted(parts, key=lambda part: part.server):
        if part.label is None or part.column >= len(layout.servers):
            unlabelled.append(part)
        elif part.column not in found or part.length > found[part.column].length:
            found[part.column] = part
    for part in unlabelled:
        if part.server in layout.servers:
            found.setdefault(layout.servers.index(part.server), part)
    used = {part.server for part in found.values()}
    spare = iter(
        [
            number
            for number in sorted(numbers)
            if number not in used and number not in layout.servers
        ]
    )
    servers: list[int] = []
    for column, number in enumerate(layout.servers):
        if column in found:
            number = found[column].server
        elif number in used or number not in numbers:
            number = next(spare, number)
        used.add(number)
        servers.append(number)
    return Placed(Striped(layout.unit, tuple(servers), layout.replicas, layout.parity), found)
