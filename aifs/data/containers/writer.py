"""Appending to containers: many chunks become a few large writes on each server.

A container is an object set (inode number 0, its id as oid). One task appends *stripes*
(appending.py), and keeps it until they are durable: so after failure or cancellation there are only
bytes behind the end, which the next append overwrites.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import trio

from aifs.core import faults
from aifs.core.errors import FsError, NoSpace, QuotaExceeded
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.data.containers.appending import Appended, Appending
from aifs.data.containers.files import ContainerEntry
from aifs.data.containers.open_containers import ContainerFails, DamagedContainer
from aifs.data.containers.pieces import Piece, StoredPiece
from aifs.layout.interleaved import Location, Stripe, deal
from aifs.layout.striped import Striped

_log = logger(__name__)

_SYNCED = faults.declare(
    "data.append.synced", "containers hold all chunks durably, no chunk list names them"
)

_LANES_MIN = 4
"""With few servers, several tasks and containers each, so hashing does not wait for writing."""

_IDLE_MAX = 64
"""Open layouts of protected containers; the least recently used are sealed."""


class Catalogue(Protocol):
    """The keeper of the table of containers."""

    async def find(self, container: int) -> ContainerEntry | None:
        """Its entry in the table; None if it has none (any more)."""

    async def new(self, layout: Striped) -> int:
        """The id of a new container, on record. Raises NoSpace, Unavailable."""

    async def seal(self, container: int) -> None:
        """Nothing will be appended any more, and no chunk in it waits to be recorded."""

    def grows(self, layout: Striped) -> bool:
        """Whether containers laid out so take more than one append; else they are written once,
        and sealed."""

    def changed(self, container: int, layout: Striped) -> None:
        """Reads behind the container's table entry may differ from now on."""


class Stored(NamedTuple):
    """Places of chunks, and masks of columns that are not durable, by container; recorded
    together."""

    places: list[Location]
    lost: dict[int, int]


@dataclass(eq=False, slots=True)
class Room:
    """A container that may be appended to, by one task at a time."""

    id: int
    """Its id."""
    layout: Striped
    """How it lies."""
    end: int = 0
    """Of what has been appended."""
    pins: int = 0
    """Users whose chunks in it are not recorded yet."""
    full: bool = False
    """Nothing more is appended."""
    unread: int = 0
    """Mask of the columns that have failed."""


CarryOut = Callable[[Appending, Callable[[], bool]], Awaitable[Appended | None]]
"""See appending.append, here or in another process."""


class ContainerWriter:
    """All appending to containers of one store. Used from one trio thread."""

    def __init__(self, catalogue: Catalogue, size: int, spare: int = 0) -> None:
        """``size``: from which the next container is begun. ``spare``: columns to be durable beyond
        necessity if others fail; see ObjectSet.sync."""
        self._catalogue = catalogue
        self.size = size
        self.spare = spare
        self._idle: dict[Striped, list[Room]] = {}  # least recently used first
        self._unsealed: list[Room] = []  # full, but the metadata did not take it
        self._turn = 0

    def adopt(self, layout: Striped, container: int, length: int) -> None:
        """Go on with a plain container of an earlier mount."""
        self._idle.setdefault(layout, []).append(Room(container, layout, length))

    @asynccontextmanager
    async def append(
        self, pieces: Sequence[Piece], slots: Sequence[Striped], carry_out: CarryOut
    ) -> AsyncIterator[Stored]:
        """Put all chunks into containers laid out like ``slots``, in turn; within the block they
        are durable, and to be recorded.

        The places are in the order of ``pieces``. Cancellable between stripes. Raises NoSpace,
        QuotaExceeded, Unavailable: then, as when unrecorded, nothing of them counts. A protected
        container with enough durable columns is good, but takes no more appends after a failure.
        """
        work = _Append(pieces, carry_out)
        stripes = deal([piece.space for piece in pieces], len(slots), self._turn)
        self._turn += len(stripes)
        lanes: dict[tuple[int, int], list[Stripe]] = {}
        lanes_of = {
            slot: max(1, _LANES_MIN // len(slots)) if self._catalogue.grows(layout) else 1
            for slot, layout in enumerate(slots)
        }
        for number, stripe in enumerate(stripes):
            width = lanes_of[stripe.slot]
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
                for room in work.starts:
                    room.full = room.full or not self._catalogue.grows(room.layout)
                if isinstance(error, NoSpace | QuotaExceeded):  # others could use what room it has
                    for room in (room for room in work.starts if not room.full):
                        with suppress(FsError):  # the next append tries again
                            await self._append(work, room, [])
                raise
            finally:
                for room in work.starts:
                    self._catalogue.changed(room.id, room.layout)
                    if not room.full:
                        self._put_back(room)
            faults.reach(_SYNCED)
            yield work.result()
        finally:
            for room in work.starts:
                room.pins -= 1
                await self._seal_if_done(room)
            await self._seal_some()

    async def _fill(self, work: "_Append", layout: Striped, stripes: list[Stripe]) -> None:
        """Append stripes of one slot, one container after the other."""
        room: Room | None = None
        try:
            while stripes and not work.failed:
                await trio.lowlevel.checkpoint()
                if room is not None and not self._fits(room, work.space(stripes[0])):
                    room.full = True
                if room is None or room.full:
                    room = await self._take(layout, work.space(stripes[0]))
                    work.starts[room] = room.end
                    room.pins += 1
                count, space = 1, work.space(stripes[0])
                for stripe in stripes[1:]:
                    space += work.space(stripe)
                    if not self._fits(room, space):
                        break
                    count += 1
                if await self._append(work, room, stripes[:count]):
                    del stripes[:count]
        except BaseException:
            work.failed = True
            raise

    async def _append(self, work: "_Append", room: Room, stripes: list[Stripe]) -> bool:
        """Whether it was done; else the container is full. Without stripes it is cut to its end."""
        numbers = [number for stripe in stripes for number in range(stripe.first, stripe.end)]
        chosen = tuple(work.pieces[number] for number in numbers)
        named = {piece.place.container for piece in chosen if isinstance(piece, StoredPiece)}
        table = [(container, await self._catalogue.find(container)) for container in named]
        appending = Appending(
            room.id,
            room.layout,
            room.end,
            chosen,
            self.spare,
            tuple((container, entry) for container, entry in table if entry is not None),
        )
        try:
            appended = await work.carry_out(appending, lambda: work.failed)
        except DamagedContainer as error:
            _log.warning("%s; nothing is appended to it any more", error)
            room.full = True
            return False
        except ContainerFails as fails:
            room.full = True
            raise fails.error from None
        if appended is not None:
            for number, place in zip(numbers, appended.places, strict=True):
                work.places[number] = place
            room.end, room.unread = appended.end, room.unread | appended.unread
            room.full = room.unread > 0 or not self._catalogue.grows(room.layout)
        return True

    def _fits(self, room: Room, space: int) -> bool:
        return room.end + space <= self.size or room.end == 0

    async def _take(self, layout: Striped, space: int) -> Room:
        """A container with room, for one task."""
        idle = self._idle.get(layout, [])
        while idle:
            room = idle.pop()
            if self._fits(room, space) and self._catalogue.grows(layout):
                return room
            room.full = True
            await self._seal_if_done(room)
        return Room(await self._catalogue.new(layout), layout)

    def _put_back(self, room: Room) -> None:
        idle = self._idle.pop(room.layout, [])
        idle.append(room)
        self._idle[room.layout] = idle

    # --- sealing ---

    @property
    def idle(self) -> set[int]:
        """Ids of the open containers that nobody appends to."""
        return {room.id for idle in self._idle.values() for room in idle}

    async def retire(self, unwanted: Callable[[int, Striped], bool]) -> None:
        """Seal unwanted open containers, by id and layout, unless in use."""
        await self._seal_unsealed()
        retired: list[Room] = []
        for layout, idle in self._idle.items():
            chosen = [room for room in idle if unwanted(room.id, layout)]
            idle[:] = [room for room in idle if room not in chosen]
            retired += chosen
        for room in retired:
            room.full = True
            await self._seal_if_done(room)

    async def _seal_some(self) -> None:
        await self._seal_unsealed()
        protected = [layout for layout in self._idle if layout.is_protected]
        surplus = set(protected[: len(protected) - _IDLE_MAX])
        if surplus:
            await self.retire(lambda _, layout: layout in surplus)
        for layout in [layout for layout, idle in self._idle.items() if not idle]:
            del self._idle[layout]

    async def _seal_if_done(self, room: Room) -> None:
        if room.full and not room.pins:
            with trio.CancelScope(shield=True):
                try:
                    await self._catalogue.seal(room.id)
                except (
                    FsError
                ) as error:  # no reason for those to fail who have recorded their chunks
                    self._unsealed.append(room)
                    _log.info("container %d is to be sealed later: %s", room.id, error)

    async def _seal_unsealed(self) -> None:
        unsealed, self._unsealed = self._unsealed, []
        for room in unsealed:
            await self._seal_if_done(room)


class _Append:
    """One call of ``append``."""

    def __init__(self, pieces: Sequence[Piece], carry_out: CarryOut) -> None:
        self.pieces = pieces
        self.carry_out = carry_out
        self.places: list[Location] = [None] * len(pieces)  # type: ignore[list-item]
        self.starts: dict[Room, int] = {}
        """The containers that it uses, and where each ended before."""
        self.failed = False
        """One of its tasks has failed: the others need not go on."""

    def space(self, stripe: Stripe) -> int:
        return sum(piece.space for piece in self.pieces[stripe.first : stripe.end])

    def undo(self) -> None:
        for room, start in self.starts.items():
            room.end = start

    def result(self) -> Stored:
        lost = {room.id: room.unread for room in self.starts if room.unread}
        return Stored(self.places, lost)
