"""Moving one column of an object set to another server, or making it anew.

One mechanism serves drains and losses of servers, replacement, repair. In this order: a record says
that an object may lie on the new server (durably); the object is made there, whole, from where it
lay, or from the other columns, and checked where there are checksums; one transaction has the
layout name the new server instead of the old; then the old object is a stray and deleted. A column
that is wrong, on a server that works, is made anew in its place; nobody reads it until its mark is
gone, in the same one transaction. Whatever fails or is overtaken by a change before that
transaction leaves the object set as it was, and a stray.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

import trio

from aifs.burst.making import ColumnMaking, Made, carry_out
from aifs.burst.transfer import TargetFails
from aifs.core import faults
from aifs.core.errors import FsError, NoSpace
from aifs.data.checking.checks import Untold
from aifs.data.objects.cached_reads import object_name
from aifs.data.objects.recovery import forget_columns
from aifs.data.objects.settled import InObjects
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.placement import Candidate
from aifs.layout.striped import Striped
from aifs.meta import moves
from aifs.meta.kv import Engine
from aifs.meta.moves import SetRecord, Stray
from aifs.movers.movers import Movers
from aifs.upkeep.strays import Strays

_RECORDED = faults.declare(
    "vfs.move.recorded", "a stray is on record durably, its object has not been made"
)
_MADE = faults.declare(
    "vfs.move.made", "a column is whole and durable, the metadata does not know it"
)
_FLIPPED = faults.declare(
    "vfs.move.flipped", "a column is read from its new place, the old object is a stray"
)


class Subject(Protocol):
    """Whose objects they are, in core: a file, or a container."""

    async def digests(self) -> bytes:
        """The checksums of all MiBs of a file; b"" of what has none."""

    async def live(self) -> tuple[tuple[int, int], ...] | None:
        """Where in a container the chunks are that files need; None of a file."""

    def is_unchanged(self) -> bool:
        """Whether nobody has changed the bytes, or is about to, since this was made; False for good
        once it is. Does not suspend."""

    async def flip(self, before: SetRecord, column: int, server: int, unread: int) -> bool:
        """The object of the column is whole on ``server``: from now on it is read there, unless it
        is not what it was (see meta.moves.flip). Whether that is on record."""


class Result(Enum):
    MOVED = auto()
    CHANGED = auto()  # meanwhile, or is changing
    PENDING = auto()  # no server may take it before what an earlier move has left there is deleted


class NoTarget(NoSpace):
    """There is no server that could take the column."""


class ColumnMover:
    """Moves columns. Used from one trio thread, for an object set by one task at a time."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        strays: Strays,
        movers: Movers,
        on_moved: Callable[[SetRecord, int], None],
    ) -> None:
        """``on_moved`` is called when a column is whole, with where it lay until then."""
        self._on_moved = on_moved
        self._engine = engine
        self._servers = servers
        self._strays = strays
        self._movers = movers

    async def move(
        self, subject: Subject, objects: SetRecord, unread: int, column: int
    ) -> tuple[Result, frozenset[int]]:
        """Bring a column to a server where it may stay, whole; ``unread``: mask of columns that
        must not be read.

        Returns also other columns that turned out to have wrong bytes. Raises Unavailable if nobody
        can tell what belongs into it, NoTarget, NoSpace or Unavailable if no server takes it.
        """
        failed: dict[int, FsError] = {}
        while True:
            target = self._target(objects, column, unread, failed)
            if target is None:
                here = objects.layout.servers[column]
                if any((objects.oid, c.id) in self._strays for c in self._usable(here)):
                    return Result.PENDING, frozenset()
                raise next(
                    iter(failed.values()),
                    NoTarget("there is no other server that could take the column"),
                )
            try:
                return await self._move(subject, objects, unread, column, target)
            except TargetFails as failure:
                failed[target.id] = failure.error

    def _target(
        self, objects: SetRecord, column: int, unread: int, failed: Mapping[int, FsError]
    ) -> DataServer | None:
        here = objects.layout.servers[column]
        usable = self._usable(here)
        if (
            unread >> column & 1
            and here not in failed
            and any(candidate.id == here for candidate in usable)
        ):
            return self._servers[here]
        candidates = [
            c for c in usable if c.id not in failed and (objects.oid, c.id) not in self._strays
        ]
        domains = {
            server.id: server.domain or f"server {server.id}" for server in self._servers.capacity()
        }
        preferred = self._servers.prefer.get(here)
        storage_class = self._servers[here].storage_class
        alike = [c for c in candidates if self._servers[c.id].storage_class == storage_class]
        for some in (alike, candidates):  # a server of another class is better than none
            chosen = choose_target(objects.oid, objects.layout, column, some, domains, preferred)
            if chosen is not None:
                return self._servers[chosen]
        return None

    def _usable(self, here: int) -> list[Candidate]:
        """Servers that work and may have what is on ``here``: those of its class, and those for new
        files."""
        return [
            candidate
            for storage_class in dict.fromkeys((self._servers[here].storage_class, ""))
            for candidate in self._servers.candidates(storage_class)
            if not self._servers[candidate.id].absent
        ]

    async def _move(
        self, subject: Subject, objects: SetRecord, unread: int, column: int, target: DataServer
    ) -> tuple[Result, frozenset[int]]:
        ino, oid, layout, size = objects
        length, old = layout.object_length(column, size), layout.servers[column]
        new, wrong, flipped = Stray(ino, oid, target.id), frozenset[int](), False
        is_new = bool(length) and target.id != old
        if is_new and not await self._engine.transact(moves.put_stray, new):
            return Result.PENDING, wrong
        try:
            if is_new:
                await self._engine.barrier()
                faults.reach(_RECORDED)
            if length:
                wrong = await self._make(subject, objects, unread, column, target)
            faults.reach(_MADE)
            # It may have been wrong there.
            self._servers.cache.invalidate(object_name(target, (ino, oid)))
            forget_columns(self._servers.cache, layout, (ino, oid))
            flipped = await subject.flip(objects, column, target.id, unread)
            if flipped:
                self._on_moved(objects, column)
        finally:
            if target.id != old and (flipped or length):
                self._strays.add(Stray(ino, oid, old) if flipped else new)
            elif not flipped and length:
                # Deleted as garbage, and made again by us. That must be on record, also if we are
                # cancelled: else nobody would ever find it.
                with trio.CancelScope(shield=True):
                    if await self._engine.transact(moves.put_left_behind, new):
                        self._strays.add(new)
        if not flipped:
            return Result.CHANGED, wrong
        faults.reach(_FLIPPED)
        return Result.MOVED, wrong

    async def _make(
        self, subject: Subject, objects: SetRecord, unread: int, column: int, target: DataServer
    ) -> frozenset[int]:
        """Make the object of the column on ``target``, durably, unless the subject changes
        meanwhile; which other columns have wrong bytes.
        """
        ino, oid, layout, size = objects
        origin = InObjects(ino, oid, layout, unread, await subject.digests())
        making = ColumnMaking(origin, size, column, target.id)
        try:
            made = await self._carry_out(subject, making)
        except Untold:
            live = await subject.live()
            if live is None:
                raise
            made = await self._carry_out(subject, replace(making, live=live))
        return frozenset() if made is None else made.wrong

    async def _carry_out(self, subject: Subject, making: ColumnMaking) -> Made | None:
        return await self._movers.carry_out(carry_out, making, lambda: not subject.is_unchanged())


def choose_target(
    seed: int,
    layout: Striped,
    column: int,
    candidates: Sequence[Candidate],
    domains: Mapping[int, str],
    preferred: int | None = None,
) -> int | None:
    """Where a column moves to: a server that the layout does not name; None if there is none. Pure.

    The ``preferred`` one, if it may be. Else one whose domain has the fewest of the columns that
    hold the same bytes, then of all columns of the file; of these one with most free space; of
    these any, as ``seed`` says. ``domains``: of all servers.
    """
    free = [candidate for candidate in candidates if candidate.id not in layout.servers]
    if any(candidate.id == preferred for candidate in free):
        return preferred
    others = [number for number in range(len(layout.servers)) if number != column]
    in_file = Counter(domains.get(layout.servers[number]) for number in others)
    copies = Counter(
        domains.get(layout.servers[number]) for number in layout.copies(column) if number != column
    )

    def rank(candidate: Candidate) -> tuple[int, int, int, int]:
        spread = (seed ^ candidate.id * 0x9E3779B1) * 0xBF58476D1CE4E5B9 >> 16 & 0xFFFFFFFF
        return copies[candidate.domain], in_file[candidate.domain], -candidate.weight, spread

    return min(free, key=rank).id if free else None
