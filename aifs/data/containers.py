"""Appending to containers: many chunks become a few large writes on each server.

A container is one object (inode number 0, its id as oid). What is appended to it is a *stripe* at a time, by one task
at a time, which keeps the container to itself until the bytes are durable: so what fails or is cancelled leaves
nothing but bytes behind the end, which the next append overwrites.
"""

import mmap
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

import trio

from aifs.core import faults, files
from aifs.core.budget import Budget
from aifs.core.errors import FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.pieces import Piece
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.interleaved import CHUNK_MAX, HEADER_BYTES, STRIPE, Location, Stripe, deal

_log = logger(__name__)

_APPENDED = faults.declare("data.append.written", "a stripe is in its container, not synced")
_SYNCED = faults.declare("data.append.synced", "containers hold all chunks durably, no chunk list names them")

_LANES_MIN = 4
"""Few servers get several tasks, each with a container of its own, so that hashing does not wait for writing."""

_STRIPE_MAX = max(STRIPE, CHUNK_MAX + HEADER_BYTES)


class Catalogue(Protocol):
    """Who keeps the table of containers."""

    async def new(self, server: int) -> int:
        """The id of a new container, which is on record when this returns. Raises NoSpace, Unavailable."""

    async def seal(self, container: int) -> None:
        """Nothing will be appended any more, and no chunk in it waits to be recorded."""

    def changed(self, server: int, container: int) -> None:
        """What has been read of a container may differ from now on, behind what its table entry covers."""


class _Open:
    """A container that may be appended to. ``pins``: users whose chunks in it are not recorded yet."""

    def __init__(self, server: DataServer, container: int, end: int) -> None:
        self.server = server
        self.key = (0, container)
        self.end = end
        self.fd: int | None = None
        self.full = False
        self.pins = 0


class ContainerWriter:
    """All appending to containers of one store. Used from one trio thread."""

    def __init__(self, servers: Servers, catalogue: Catalogue, budget: Budget, size: int) -> None:
        """``size``: when a container has reached it, the next one is begun."""
        self._servers = servers
        self._catalogue = catalogue
        self._buffers = _Buffers(budget)
        self._size = size
        self._idle: dict[int, list[_Open]] = {}
        self._turn = 0

    def adopt(self, server: int, container: int, length: int) -> None:
        """Go on with a container of an earlier mount. Does no I/O."""
        self._idle.setdefault(server, []).append(_Open(self._servers[server], container, length))

    @asynccontextmanager
    async def append(self, pieces: Sequence[Piece], servers: Sequence[int]) -> AsyncIterator[list[Location]]:
        """Put all chunks into containers on ``servers``; within the block they are durable, and to be recorded.

        Yields their places, in order. Cancellable between stripes. Raises NoSpace, QuotaExceeded, Unavailable: then,
        as where the block does not record them, nothing is left of them that counts.
        """
        work = _Append(pieces)
        stripes = deal([piece.space for piece in pieces], servers, self._turn)
        self._turn += len(stripes)
        lanes: dict[tuple[int, int], list[Stripe]] = {}
        width = max(1, _LANES_MIN // len(servers))
        for number, stripe in enumerate(stripes):
            lanes.setdefault((stripe.server, number // len(servers) % width), []).append(stripe)
        try:
            try:
                await run_all(*(lambda lane=lane: self._fill(work, lane) for lane in lanes.values()))
            except BaseException:
                work.undo()
                raise
            finally:
                for container in work.starts:
                    self._catalogue.changed(container.server.id, container.key[1])
                    if not container.full:
                        self._idle.setdefault(container.server.id, []).append(container)
            faults.reach(_SYNCED)
            yield work.places
        finally:
            for container in work.starts:
                container.pins -= 1
                await self._seal_if_done(container)

    async def _fill(self, work: "_Append", stripes: list[Stripe]) -> None:
        """Append stripes of one server, one after the other, and make them durable."""
        server = self._servers[stripes[0].server]
        used: list[_Open] = []
        try:
            async with self._buffers.one() as memory:
                for stripe in stripes:
                    await trio.lowlevel.checkpoint()
                    if work.failed:
                        return
                    container = await self._container(work, used, work.space(stripe), server)
                    await self._servers.run(server, work.write, container, stripe, memory)
                    faults.reach(_APPENDED)
            for container in used:
                await self._servers.run(server, _sync, container)
        except BaseException:
            work.failed = True
            raise

    async def _container(self, work: "_Append", used: list[_Open], space: int, server: DataServer) -> _Open:
        """The container that this lane uses last, or the next one if ``space`` bytes do not fit."""
        if used and (used[-1].end + space <= self._size or used[-1].end == 0):
            return used[-1]
        if used:
            used[-1].full = True
        container = await self._take(server, space)
        work.starts[container] = container.end
        container.pins += 1
        used.append(container)
        return container

    async def _take(self, server: DataServer, space: int) -> _Open:
        idle = self._idle.setdefault(server.id, [])
        while idle:
            container = idle.pop()
            try:
                if container.end + space <= self._size or container.end == 0:
                    await self._servers.run(server, _open, container)
                    return container
                container.full = True
            except _Damaged as error:
                _log.warning("%s; nothing is appended to it any more", error)
                container.full = True
            except BaseException:
                idle.append(container)
                raise
            await self._seal_if_done(container)
        container = _Open(server, await self._catalogue.new(server.id), 0)
        try:
            await self._servers.run(server, _open, container)
        except BaseException:
            idle.append(container)
            raise
        return container

    async def _seal_if_done(self, container: _Open) -> None:
        if container.full and not container.pins:
            self._close(container)
            with trio.CancelScope(shield=True):
                await self._catalogue.seal(container.key[1])

    def _close(self, container: _Open) -> None:
        if container.fd is not None:
            container.server.close_object(container.fd)
            container.fd = None

    def close(self) -> None:
        """Let go of all containers; the next mount goes on with them. Nobody appends any more. Does not block."""
        for idle in self._idle.values():
            for container in idle:
                self._close(container)
        self._idle.clear()


class _Buffers:
    """Memory for stripes. Fresh memory costs as much as filling it, so buffers are kept while nobody wants theirs."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._idle: list[memoryview] = []
        budget.add_cache(self._give_back)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[memoryview]:
        if self._idle:
            memory = self._idle.pop()
        else:
            await self._budget.acquire(_STRIPE_MAX)
            memory = memoryview(mmap.mmap(-1, _STRIPE_MAX))
        try:
            yield memory
        finally:
            self._idle.append(memory)
            self._budget.retry()

    def _give_back(self, size: int) -> None:
        while self._idle and size > 0:
            self._idle.pop()
            self._budget.release(_STRIPE_MAX)
            size -= _STRIPE_MAX


class _Append:
    """One call of ``append``. ``starts``: the containers it uses, and where each ended before."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.places: list[Location] = [None] * len(pieces)  # type: ignore[list-item]
        self.starts: dict[_Open, int] = {}
        self.failed = False

    def space(self, stripe: Stripe) -> int:
        return sum(piece.space for piece in self.pieces[stripe.first : stripe.end])

    def write(self, container: _Open, stripe: Stripe, memory: memoryview) -> None:
        """Build the stripe and append it, in a worker thread."""
        server, key, filled = container.server, container.key, 0
        for number in range(stripe.first, stripe.end):
            header = self.pieces[number].fill(memory[filled:])
            self.places[number] = Location(
                server.id, key[1], container.end + filled, header.stored, header.raw, header.codec, header.digest
            )
            filled += HEADER_BYTES + header.stored
        server.write(key, container.fd, memory[:filled], container.end)
        files.start_writing(container.fd, container.end, filled)  # while the next stripe is read and hashed
        container.end += filled

    def undo(self) -> None:
        for container, start in self.starts.items():
            container.end = start


class _Damaged(Exception):
    """A container is not what the metadata says."""


# --- in worker threads ---


def _open(container: _Open) -> None:
    """Open the container's object, cut to its end; it is made if nothing has been appended yet."""
    if container.fd is not None:
        return
    server, key = container.server, container.key
    with server.lock_of(key[1]):
        fd = server.open_object(key, create=container.end == 0)
    if fd is None:
        raise _Damaged(f"{server.name}: {server.object_path(*key)} is missing")
    try:
        length = server.stat(key, fd).st_size
        if length < container.end:
            path = server.object_path(*key)
            raise _Damaged(f"{server.name}: {path} has {length} of {container.end} bytes")
        if length > container.end:
            server.truncate(key, fd, container.end)
    except BaseException:
        files.close_file(fd)
        raise
    container.fd = fd


def _sync(container: _Open) -> None:
    """Bytes, length and name of the container are durable on return."""
    server = container.server
    try:
        server.sync_object(container.key, container.fd)
    except FsError:
        container.full = True  # the system forgets what it could not write; a later sync would not fail
        raise
    server.sync_names_near(container.key[1])
