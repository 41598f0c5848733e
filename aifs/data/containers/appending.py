"""Appending chunks to one container: a plain value, and the function that carries it out.

An ``Appending`` names all: container, its end, and chunks by their burst copies, objects or
containers; so another process can do it. Bytes count from the transaction that puts them into chunk
lists; until then the asking task keeps the container for itself (writer.py).
"""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import trio

from aifs.core import faults
from aifs.core.tasks import run_all
from aifs.data.containers.files import ContainerEntry, ContainerFiles
from aifs.data.containers.open_containers import OpenContainer, open_container
from aifs.data.containers.pieces import FilePiece, OpenCopies, Piece, StoredPiece
from aifs.data.objects.holes import InObjects, Source
from aifs.data.reading.buffers import BudgetedBuffers
from aifs.data.servers import Servers
from aifs.layout.interleaved import CHUNK_MAX, HEADER_BYTES, STRIPE, UNIT, Location, deal
from aifs.layout.redundancy import DATA_MAX
from aifs.layout.striped import Striped

_APPENDED = faults.declare("data.append.written", "a stripe is in its container, not synced")

_ROW_MAX = DATA_MAX * UNIT
_BUFFER = max(STRIPE, HEADER_BYTES + CHUNK_MAX) + _ROW_MAX
"""Of a stripe, and of what the one before has left of a row."""

Containers = tuple[tuple[int, ContainerEntry], ...]
"""Entries of the table of containers, by id."""


@dataclass(frozen=True, slots=True)
class Appending:
    """Append chunks to a container in order, durably; a plain one is first cut to its end."""

    container: int
    """Its id."""
    layout: Striped
    """How it lies."""
    end: int
    """Where it ends: what lies behind that does not count, and is overwritten."""
    pieces: tuple[Piece, ...]
    """The chunks. The container has room for them."""
    spare: int = 0
    """How many columns more than the bytes need must be durable; see ObjectSet.sync."""
    containers: Containers = ()
    """Those that stored pieces lie in."""


class Appended(NamedTuple):
    """The appended chunks are durable, except in the columns that are ``unread``."""

    places: list[Location]
    """Where each chunk lies."""
    end: int
    """Where the container ends now: a coded one with a whole row."""
    unread: int = 0
    """Mask of the columns that have failed."""


class Leave(Protocol):
    """The limiter that lets each stripe be written; see Mover."""

    @property
    def io_priority(self) -> str: ...

    async def begin(self, length: int) -> None: ...

    def end(self, moved: int) -> None: ...


class Tools(Protocol):
    """The means to carry it out."""

    @property
    def servers(self) -> Servers: ...

    @property
    def mover(self) -> Leave: ...

    @property
    def buffers(self) -> BudgetedBuffers: ...

    def reading(self, table: Containers) -> AbstractContextManager[ContainerFiles]:
        """These containers, to be read."""

    def opened(self, origin: InObjects) -> AbstractContextManager[Source]:
        """The bytes of a file, to be read, and compared with their checksums."""


async def append(
    appending: Appending, tools: Tools, cancelled: Callable[[], bool]
) -> Appended | None:
    """Carry it out, each stripe when the mover lets it. None if ``cancelled``, asked before each.

    Raises NoSpace, QuotaExceeded, Unavailable; DamagedContainer if the container is not as stated;
    ContainerFails if it takes no more appends. Then, or cancelled, there may be anything behind the
    end.
    """
    servers, pieces, mover = tools.servers, appending.pieces, tools.mover
    places: list[Location] = []
    memory = await tools.buffers.take(_BUFFER)
    about = appending.layout, appending.container, appending.end
    container = open_container(servers, *about, mover.io_priority)
    with (
        closing(container),
        tools.reading(appending.containers) as files,
        _Objects(tools) as objects,
    ):
        await container.open()
        for stripe in _stripes(pieces):
            await trio.lowlevel.checkpoint()
            space = sum(piece.space for piece in stripe)
            moved = 0
            await mover.begin(space)
            try:
                if cancelled():
                    return None
                await _load(stripe, files, objects, memory[container.carried :])
                await container.append(_builder(container, stripe, places, servers), memory)
                moved = space
            finally:
                mover.end(moved)
            faults.reach(_APPENDED)
        await container.finish(memory)
        await container.sync(appending.spare)
    return Appended(places, container.end, container.unread)


def _stripes(pieces: tuple[Piece, ...]) -> Iterator[tuple[Piece, ...]]:
    for stripe in deal([piece.space for piece in pieces], 1, 0):
        yield pieces[stripe.first : stripe.end]


class _Objects(ExitStack):
    """The objects that chunks are read from, open from their first use on."""

    def __init__(self, tools: Tools) -> None:
        super().__init__()
        self._tools = tools
        self._sources: dict[int, Source] = {}

    def of(self, origin: InObjects) -> Source:
        source = self._sources.get(origin.oid)
        if source is None:
            opened = self._tools.opened(origin)
            source = self._sources[origin.oid] = self.enter_context(opened)
        return source


async def _load(
    stripe: tuple[Piece, ...], files: ContainerFiles, objects: _Objects, memory: memoryview
) -> None:
    """Load chunks as stored, or bytes of objects, from data servers."""
    start = 0
    loads = list[Callable[[], Awaitable[None]]]()
    for piece in stripe:
        part = memory[start : start + piece.space]
        if isinstance(piece, StoredPiece):
            await files.read_stored(piece.place, part)
        elif isinstance(piece, FilePiece) and piece.objects is not None:
            loads.append(partial(piece.load, part, objects.of(piece.objects)))
        start += piece.space
    await run_all(*loads)


def _is_loaded(piece: Piece) -> bool:
    is_in_objects = isinstance(piece, FilePiece) and piece.objects is not None
    return is_in_objects or isinstance(piece, StoredPiece)


def _builder(
    container: OpenContainer, stripe: tuple[Piece, ...], places: list[Location], servers: Servers
) -> Callable[[memoryview], int]:
    """See open_containers.Build. It tells ``places``."""
    end, number, first = container.end, container.id, container.layout.servers[0]

    def build(memory: memoryview) -> int:
        filled = start = 0
        with closing(OpenCopies(servers)) as copies:
            for piece in stripe:
                if start > filled and _is_loaded(piece):  # those before it are compressed
                    part = memory[start : start + piece.space]
                    memory[filled : filled + piece.space] = part
                start += piece.space
                _, _, codec, stored, raw, digest = piece.fill(memory[filled:], copies)
                places.append(Location(first, number, end + filled, stored, raw, codec, digest))
                filled += HEADER_BYTES + stored
        return filled

    return build
