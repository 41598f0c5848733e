"""Appending to containers: many chunks become a few large writes on each server.

A container is an object set of its own (inode number 0, its id as oid): one object, or several that
protect each other. What is appended to it is a *stripe* at a time, by one task at a time, which
keeps the container to itself until the bytes are durable: so what fails or is cancelled leaves
nothing but bytes behind the end, which the next append overwrites.
"""

import mmap
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import NamedTuple, Protocol

import trio

from aifs.core import faults
from aifs.core.budget import Budget
from aifs.core.errors import FsError, NoSpace, QuotaExceeded
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.containers.open_containers import DamagedContainer, OpenContainer, open_container
from aifs.data.containers.pieces import Piece, StoredPiece
from aifs.data.patience import Hanging
from aifs.data.servers import Servers
from aifs.layout.interleaved import (
    CHUNK_MAX,
    HEADER_BYTES,
    STRIPE,
    UNIT,
    Location,
    Stripe,
    deal,
)
from aifs.layout.redundancy import DATA_MAX
from aifs.layout.striped import Striped

_log = logger(__name__)

_APPENDED = faults.declare("data.append.written", "a stripe is in its container, not synced")
_SYNCED = faults.declare(
    "data.append.synced", "containers hold all chunks durably, no chunk list names them"
)

_LANES_MIN = 4
"""Few servers get several tasks, each with a container of its own, so that hashing does not wait
for writing.
"""

_IDLE_MAX = 64
"""Layouts of protected containers that are kept open; those that were used least recently are
sealed.
"""

_ROW_MAX = DATA_MAX * UNIT
_BUFFER = max(STRIPE, HEADER_BYTES + CHUNK_MAX) + _ROW_MAX
"""Of a stripe, and of what the one before has left of a row."""


class Catalogue(Protocol):
    """Who keeps the table of containers."""

    async def new(self, layout: Striped) -> int:
        """The id of a new container, which is on record when this returns. Raises NoSpace,
        Unavailable.
        """

    async def seal(self, container: int) -> None:
        """Nothing will be appended any more, and no chunk in it waits to be recorded."""

    def changed(self, container: int, layout: Striped) -> None:
        """What has been read of a container may differ from now on, behind what its table entry
        covers.
        """


class Appended(NamedTuple):
    """Where chunks lie now, and masks of the columns that are not durable, by container; to be
    recorded together.
    """

    places: list[Location]
    lost: dict[int, int]


class ContainerWriter:
    """All appending to containers of one store. Used from one trio thread."""

    def __init__(
        self, servers: Servers, catalogue: Catalogue, budget: Budget, size: int, spare: int = 0
    ) -> None:
        """``size``: when a container has reached it, the next one is begun. ``spare``: how many
        columns more than their bytes need protected ones must have, if others fail; see
        ObjectSet.sync."""
        self._servers = servers
        self._catalogue = catalogue
        self._buffers = _Buffers(budget)
        self.size = size
        self.spare = spare
        self._idle: dict[Striped, list[OpenContainer]] = {}  # least recently used first
        self._unsealed: list[OpenContainer] = []  # full, but the metadata did not take it
        self._turn = 0

    def adopt(self, layout: Striped, container: int, length: int) -> None:
        """Go on with a plain container of an earlier mount. Does no I/O."""
        self._idle.setdefault(layout, []).append(
            open_container(self._servers, layout, container, length)
        )

    @asynccontextmanager
    async def append(
        self, pieces: Sequence[Piece], slots: Sequence[Striped]
    ) -> AsyncIterator[Appended]:
        """Put all chunks into containers that are laid out like ``slots``, in turn; within the
        block they are durable, and to be recorded.

        The places are in the order of ``pieces``. Cancellable between stripes. Raises NoSpace,
        QuotaExceeded, Unavailable: then, as where the block does not record them, nothing is left
        of them that counts. A protected container of which a column fails is still good if enough
        others are durable; nothing more is appended to it.
        """
        work = _Append(pieces)
        stripes = deal([piece.space for piece in pieces], len(slots), self._turn)
        self._turn += len(stripes)
        lanes: dict[tuple[int, int], list[Stripe]] = {}
        width = max(1, _LANES_MIN // len(slots))
        for number, stripe in enumerate(stripes):
            lanes.setdefault((stripe.slot, number // len(slots) % width), []).append(stripe)
        try:
            try:
                await run_all(
                    *(
                        partial(self._fill, work, slots[slot], lane)
                        for (slot, _), lane in lanes.items()
                    )
                )
            except BaseException as error:
                work.undo()
                if isinstance(
                    error, NoSpace | QuotaExceeded
                ):  # others could use what room there is
                    for container in work.starts:
                        await container.cut()
                raise
            finally:
                for container in work.starts:
                    self._catalogue.changed(container.id, container.layout)
                    if not container.full:
                        self._put_back(container)
            faults.reach(_SYNCED)
            yield work.result()
        finally:
            for container in work.starts:
                container.pins -= 1
                await self._seal_if_done(container)
            await self._seal_some()

    async def _fill(self, work: "_Append", layout: Striped, stripes: list[Stripe]) -> None:
        """Append stripes of one slot, one after the other, and make them durable."""
        used: list[OpenContainer] = []
        try:
            async with self._buffers.one() as memory:
                for stripe in stripes:
                    await trio.lowlevel.checkpoint()
                    if work.failed:
                        return
                    space = work.space(stripe)
                    if used and not self._fits(used[-1], space):
                        await used[-1].finish(memory)
                        used[-1].full = True
                    if not used or used[-1].full:
                        container = await self._take(layout, space)
                        work.starts[container] = container.end
                        container.pins += 1
                        used.append(container)
                    await work.append(used[-1], stripe, memory)
                    faults.reach(_APPENDED)
                await used[-1].finish(memory)
            for container in used:
                await container.sync(self.spare)
        except BaseException:
            work.failed = True
            raise

    def _fits(self, container: OpenContainer, space: int) -> bool:
        return container.end + space <= self.size or container.end == 0

    async def _take(self, layout: Striped, space: int) -> OpenContainer:
        """A container with room, for one task alone."""
        idle = self._idle.get(layout, [])
        while idle:
            container = idle.pop()
            try:
                if self._fits(container, space):
                    await container.open()
                    return container
                container.full = True
            except DamagedContainer as error:
                _log.warning("%s; nothing is appended to it any more", error)
                container.full = True
            except BaseException:
                await self._leave(container)
                raise
            await self._seal_if_done(container)
        container = open_container(self._servers, layout, await self._catalogue.new(layout), 0)
        try:
            await container.open()
        except BaseException:
            await self._leave(container)
            raise
        return container

    async def _leave(self, container: OpenContainer) -> None:
        if container.full:
            await self._seal_if_done(container)
        else:
            self._put_back(container)

    def _put_back(self, container: OpenContainer) -> None:
        idle = self._idle.pop(container.layout, [])
        idle.append(container)
        self._idle[container.layout] = idle

    # --- sealing ---

    @property
    def idle(self) -> set[int]:
        """Ids of the open containers that nobody appends to."""
        return {container.id for idle in self._idle.values() for container in idle}

    async def retire(self, unwanted: Callable[[int, Striped], bool]) -> None:
        """Seal the open containers of which ``unwanted`` says so, by id and layout, unless they are
        in use.
        """
        await self._seal_unsealed()
        retired: list[OpenContainer] = []
        for layout, idle in self._idle.items():
            chosen = [container for container in idle if unwanted(container.id, layout)]
            idle[:] = [container for container in idle if container not in chosen]
            retired += chosen
        for container in retired:
            container.full = True
            await self._seal_if_done(container)

    async def _seal_some(self) -> None:
        await self._seal_unsealed()
        protected = [layout for layout in self._idle if layout.is_protected]
        surplus = set(protected[: len(protected) - _IDLE_MAX])
        if surplus:
            await self.retire(lambda _, layout: layout in surplus)
        for layout in [layout for layout, idle in self._idle.items() if not idle]:
            del self._idle[layout]

    async def _seal_if_done(self, container: OpenContainer) -> None:
        if container.full and not container.pins:
            container.close()
            with trio.CancelScope(shield=True):
                try:
                    await self._catalogue.seal(container.id)
                except (
                    FsError
                ) as error:  # no reason for those to fail who have recorded their chunks
                    self._unsealed.append(container)
                    _log.info("container %d is to be sealed later: %s", container.id, error)

    async def _seal_unsealed(self) -> None:
        unsealed, self._unsealed = self._unsealed, []
        for container in unsealed:
            await self._seal_if_done(container)

    def close(self) -> None:
        """Let go of all containers; the next mount goes on with them. Nobody appends any more. Does
        not block.
        """
        for idle in self._idle.values():
            for container in idle:
                container.close()
        self._idle.clear()


class _Buffers:
    """Memory for stripes. Fresh memory costs as much as filling it, so buffers are kept while
    nobody wants theirs.
    """

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._idle: list[memoryview] = []
        budget.add_cache(self._give_back)

    @asynccontextmanager
    async def one(self) -> AsyncIterator[memoryview]:
        if self._idle:
            memory = self._idle.pop()
        else:
            await self._budget.acquire(_BUFFER)
            memory = memoryview(mmap.mmap(-1, _BUFFER))
        try:
            yield memory
        except Hanging:
            self._budget.release(
                _BUFFER
            )  # as good as free, though a thread that is stuck may still use it
            raise
        except BaseException:
            self._keep(memory)
            raise
        self._keep(memory)

    def _keep(self, memory: memoryview) -> None:
        self._idle.append(memory)
        self._budget.retry()

    def _give_back(self, size: int) -> None:
        while self._idle and size > 0:
            self._idle.pop()
            self._budget.release(_BUFFER)
            size -= _BUFFER


class _Append:
    """One call of ``append``. ``starts``: the containers it uses, and where each ended before."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = pieces
        self.places: list[Location] = [None] * len(pieces)  # type: ignore[list-item]
        self.starts: dict[OpenContainer, int] = {}
        self.failed = False

    def space(self, stripe: Stripe) -> int:
        return sum(piece.space for piece in self.pieces[stripe.first : stripe.end])

    async def append(self, container: OpenContainer, stripe: Stripe, memory: memoryview) -> None:
        """Build the stripe in a worker thread, and append it."""
        pieces = self.pieces[stripe.first : stripe.end]
        start = container.carried
        for piece in pieces:
            if isinstance(piece, StoredPiece):
                await piece.load(memory[start:])
                start += piece.length

        def build(memory: memoryview) -> int:
            filled = 0
            for number, piece in enumerate(pieces, stripe.first):
                header = piece.fill(memory[filled:])
                self.places[number] = Location(
                    container.layout.servers[0],
                    container.id,
                    container.end + filled,
                    header.stored,
                    header.raw,
                    header.codec,
                    header.digest,
                )
                filled += HEADER_BYTES + header.stored
            return filled

        await container.append(build, memory)

    def undo(self) -> None:
        for container, start in self.starts.items():
            container.rewind(start)

    def result(self) -> Appended:
        lost = {container.id: container.unread for container in self.starts if container.unread}
        return Appended(self.places, lost)
