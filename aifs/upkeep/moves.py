"""Moving one column of an object set to another server, or making it anew: for drains and losses of
servers, replacement, repair.

A record says, durably, that an object may lie on the new server; the object is made there, whole,
from where it lay, or other columns, and checked by checksums; one transaction has the layout name
the new server; then the old object is a stray, and deleted. A wrong column on a working server is
made anew in place, unread until that transaction takes its mark. Failures and changes before it
leave the object set as it was, and a stray. A stray's record goes after its durable deletion.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum, auto
from typing import Protocol

import trio

from aifs.burst.making import ColumnMaking, Made, carry_out
from aifs.burst.pool import Movers
from aifs.burst.transfer import TargetFails
from aifs.core import faults
from aifs.core.errors import FsError, NoSpace, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import NEVER_S, RETRY_S, Upkeep, Work
from aifs.data.checks import Untold
from aifs.data.objects.cached_reads import object_name
from aifs.data.objects.holes import InObjects
from aifs.data.objects.object_set import delete_batch
from aifs.data.objects.recovery import forget_columns
from aifs.data.server import DataServer
from aifs.data.servers import Servers
from aifs.layout.placement import Candidate
from aifs.layout.striped import Striped
from aifs.meta import moves
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import SetRecord, Stray
from aifs.store.backup import Backup

_log = logger(__name__)

_BATCH = 256  # strays that are deleted together

_RECORDED = faults.declare(
    "vfs.move.recorded", "a stray is on record durably, its object has not been made"
)
_MADE = faults.declare(
    "vfs.move.made", "a column is whole and durable, the metadata does not know it"
)
_DELETED = faults.declare("vfs.move.deleted", "stray objects are deleted, their records are not")
_FLIPPED = faults.declare(
    "vfs.move.flipped", "a column is read from its new place, the old object is a stray"
)


class Strays:
    """Objects perhaps on servers that no layout names, to be deleted. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        backup: Backup,
        upkeep: Upkeep,
        on_swept: Callable[[], None],
    ) -> None:
        """``on_swept``: called when some have been deleted."""
        self._engine = engine
        self._backup = backup
        self._upkeep = upkeep
        self._on_swept = on_swept
        self._servers = servers
        self._waiting: dict[tuple[int, int], Stray] = {}  # by oid and server
        self._failed: dict[int, int] = {}
        """By server, how many could not be deleted at the last try."""
        self._sweeping = trio.Lock()

    def __contains__(self, place: tuple[int, int]) -> bool:
        """Whether an object of this oid may be on this server: no place for a new one."""
        return place in self._waiting

    def on(self, server: int) -> int:
        """How many wait to be deleted from a server."""
        return sum(number == server for _, number in self._waiting)

    def add(self, stray: Stray) -> None:
        """Nobody needs it any more; its record is there."""
        self._waiting[stray.oid, stray.server] = stray
        self._upkeep.wake(Work.STRAYS)

    async def work(self) -> float:
        """Delete them; in how many seconds to try the rest again."""
        return RETRY_S if await self.sweep() else NEVER_S

    async def load(self) -> int:
        """Take over the strays that an earlier mount has left on record; how many that are."""
        found, stale = await self._engine.view(_read_strays)
        if stale:
            await self._engine.transact(moves.forget_strays, stale)
        for stray in found:
            self.add(stray)
        return len(found)

    async def sweep(self, urgent: bool = False) -> int:
        """Delete them if possible; how many are left. A lost server's are dropped. Raises NoSpace
        or Unavailable if the metadata cannot be changed."""
        async with self._sweeping:
            waiting = list(self._waiting.values())
            if not waiting:
                return 0
            seq = self._engine.seq
            await self._engine.barrier(seq)  # they are strays for good
            if not await self._backup.covered(seq, urgent):
                return len(waiting)
            by_server: dict[int, list[Stray]] = {}
            for stray in waiting:
                by_server.setdefault(stray.server, []).append(stray)
            for server, strays in by_server.items():
                for start in range(0, len(strays), _BATCH):
                    await self._delete(server, strays[start : start + _BATCH])
            return len(self._waiting)

    async def _delete(self, server: int, strays: list[Stray]) -> None:
        doomed = {stray.oid: (stray.ino, Striped(1, (server,))) for stray in strays}
        failed = await delete_batch(self._servers, doomed)
        faults.reach(_DELETED)
        deleted = [stray for stray in strays if stray.oid not in failed]
        await self._engine.transact(moves.forget_strays, deleted)
        for stray in deleted:
            del self._waiting[stray.oid, stray.server]
        if deleted:
            self._on_swept()
        if failed and len(failed) != self._failed.get(server):
            _log.info(
                "%d objects that have moved elsewhere stay for now: %s",
                len(failed),
                next(iter(failed.values())),
            )
        self._failed[server] = len(failed)


def _read_strays(tx: ReadTransaction) -> tuple[list[Stray], list[Stray]]:
    """Strays to delete, and void records: the layout names the server."""
    found: list[Stray] = []
    stale: list[Stray] = []
    for stray in moves.load_strays(tx):
        try:
            objects = moves.find_objects(tx, stray.ino, stray.oid)
        except Unavailable:
            continue  # nobody can tell, so nothing is deleted
        named = objects is not None and stray.server in objects.layout.servers
        (stale if named else found).append(stray)
    return found, stale


class Subject(Protocol):
    """Whose objects they are, in core: a file, or a container."""

    async def digests(self) -> bytes:
        """The checksums of all MiBs of a file; b"" if it has none."""

    async def live(self) -> tuple[tuple[int, int], ...] | None:
        """Where in a container the live chunks are; None of a file."""

    def is_unchanged(self) -> bool:
        """Whether nobody has changed, or is about to change, the bytes since; False is final. Does
        not suspend."""

    async def flip(self, before: SetRecord, column: int, server: int, unread: int) -> bool:
        """Read the column, whole on ``server``, there, unless the object set has changed (see
        meta.moves.flip). Whether that is on record."""


class Result(Enum):
    MOVED = auto()
    CHANGED = auto()  # meanwhile, or is changing
    PENDING = auto()  # no server may take it before leftovers of an earlier move are deleted


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
        """Bring a column, whole, to a server where it may stay; ``unread``: mask of columns not to
        read. Returns also other, wrong columns. Raises Unavailable if its bytes are unknown,
        NoTarget, NoSpace or Unavailable if no server takes it."""
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
        """Working servers for columns of ``here``: of its class, and for new files."""
        classes = dict.fromkeys((self._servers[here].storage_class, ""))
        candidates = (c for name in classes for c in self._servers.candidates(name))
        return [c for c in candidates if not self._servers[c.id].absent]

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
            if length and not is_new:
                # Hosts that have not heard that it must not be read would see it half made.
                await self._engine.shown(of_all=True)
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
        """Make the column's object on ``target``, durably, unless the subject changes; returns
        other, wrong columns."""
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
    """A server for a column that the layout does not name, or None. Pure.

    The ``preferred`` one, if possible. Else the domain with fewest columns of the same bytes, then
    of the file; then most free space; then by ``seed``. ``domains``: of all servers.
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
