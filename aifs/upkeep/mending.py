"""Bringing one object set to the servers and the form that it should have: moves of its columns, or
laying it out anew.

All that is due is looked up when its turn comes, so that callers need to know no more than its
name.
"""

from collections.abc import Callable, Set
from enum import Enum, auto
from typing import NamedTuple

import trio

from aifs.core.errors import FsError, NotFound, Stale, Unavailable
from aifs.data.checking.checks import Untold
from aifs.data.servers import Servers
from aifs.files.chunk_users import users_of
from aifs.files.containers import Containers
from aifs.files.file_io import FileIO
from aifs.files.needs import missing
from aifs.layout.placement import ACTIVE
from aifs.meta import degraded, moves
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import SetRecord
from aifs.upkeep.compaction import Compaction
from aifs.upkeep.moves import ColumnMover, NoTarget, Result
from aifs.upkeep.relayout import FileSubject, Relayout


class Outcome(Enum):
    DONE = auto()  # nothing is due of it any more
    GONE = auto()  # the objects are nobody's any more
    BUSY = auto()
    """It is being changed, or read by programs past us, or a server is not ready for it."""


class ContainerSubject:
    """A container that nothing is appended to."""

    def __init__(self, containers: Containers, engine: Engine, container: int) -> None:
        self._containers = containers
        self._engine = engine
        self._container = container

    async def digests(self) -> bytes:
        return b""

    async def live(self) -> tuple[tuple[int, int], ...]:
        users = await users_of(self._engine, {self._container})
        return tuple((user.start, user.end) for user in users)

    def is_unchanged(self) -> bool:
        return True

    async def flip(self, before: SetRecord, column: int, server: int, unread: int) -> bool:
        after = await self._engine.transact(moves.flip, before, column, server, unread)
        if after is not None:
            self._containers.moved(self._container)
        return after is not None


class Mender:
    """Used from one trio thread, for an object set by one task at a time."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        io: FileIO,
        containers: Containers,
        compaction: Compaction,
        mover: ColumnMover,
        relayout: Relayout,
        on_damage: Callable[[int, int, int], None],
    ) -> None:
        """``on_damage`` is called with columns that are found to be wrong: oid, ino, column."""
        self._engine = engine
        self._servers = servers
        self._io = io
        self._containers = containers
        self._compaction = compaction
        self._mover = mover
        self._relayout = relayout
        self._on_damage = on_damage

    def staying(self) -> frozenset[int]:
        """Servers where columns may stay: those in use that are not given up for gone."""
        return frozenset(
            server.id
            for server in self._servers.capacity()
            if server.standing == ACTIVE and not server.given_up
        )

    def waiting(self) -> frozenset[int]:
        """Servers that are in use and given up: files that are not protected there can only wait
        for them."""
        return frozenset(server.id for server in self._servers.capacity() if server.given_up)

    async def mend(self, ino: int, oid: int) -> Outcome:
        """Do all that is due of the object set. Raises NoSpace, Unavailable if some of it cannot be
        done; Untold if that is because nobody knows its bytes."""
        if ino == 0:
            return await self._mend_container(oid)
        try:
            file = await self._io.inodes.acquire(await self._engine.view(moves.find_user, ino, oid))
        except (NotFound, Stale):
            await self._forget(oid)
            return Outcome.GONE
        try:
            return await self._mend_file(FileSubject(self._io, self._engine, file), oid)
        finally:
            with trio.CancelScope(shield=True):
                await self._io.inodes.release(file)

    async def _forget(self, oid: int) -> None:
        await self._engine.transact(degraded.drop_degraded, oid)

    async def _look(self, ino: int, oid: int) -> "_Seen":
        file = self._io.table.open.get(ino)
        if file is None:
            return await self._engine.view(_see, ino, oid, self.staying())
        # A column must not be made anew before the readers of the open file know.
        return await self._io.transitions.view(file, _see, ino, oid, self.staying())

    async def _mend_file(self, subject: FileSubject, oid: int) -> Outcome:
        seen = await self._look(subject.file.inode.ino, oid)
        if seen.objects is None or subject.file.inode.oid != oid:
            await self._forget(oid)
            return Outcome.GONE
        if not seen.due and not seen.is_marked:
            return Outcome.DONE
        if subject.is_busy:
            return Outcome.BUSY
        failure = None
        if seen.is_marked and not seen.objects.layout.is_protected:
            try:
                if await self._protect(subject, seen.objects):
                    return Outcome.DONE
            except FsError as error:
                failure = error  # its columns may have to move all the same
        try:
            outcome = await self._move_all(subject, seen, seen.objects)
        except NoTarget:
            if not await self._leave(subject, oid):
                raise
            return Outcome.DONE
        if failure is not None:
            raise failure
        return outcome if seen.due else Outcome.BUSY

    async def _protect(self, subject: FileSubject, objects: SetRecord) -> bool:
        """Return whether a plain file has the protection of its policy now; not if it was changed
        meanwhile."""
        capacity, inode = self._io.capacity, subject.file.inode
        if not capacity.redundancy(inode).is_protected:
            await self._forget(objects.oid)
            return not moves.due_columns(objects.layout, 0, self.staying())
        layout = capacity.place(inode)
        if not layout.is_protected:
            raise Unavailable(
                "there are too few servers for the protection that its policy asks for"
            )
        return await self._relayout.lay_out(subject, layout)

    async def _leave(self, subject: FileSubject, oid: int) -> bool:
        """Lay a file that lies on all servers there are out over those where columns may stay, if
        it has to leave one and that costs no safety."""
        seen = await self._look(subject.file.inode.ino, oid)
        if seen.objects is None:
            return False
        if self.staying().issuperset(seen.objects.layout.servers):
            return False  # a server that does not work now may do so later
        storage_class = self._servers.class_of(seen.objects.layout.servers)
        layout = self._io.capacity.place(subject.file.inode, storage_class=storage_class)
        if layout.tolerates < seen.objects.layout.tolerates:
            return False
        if not self.staying().issuperset(layout.servers):
            return False
        return await self._relayout.lay_out(subject, layout)

    async def _mend_container(self, container: int) -> Outcome:
        seen = await self._look(0, container)
        if seen.objects is not None and seen.due:
            if not seen.objects.layout.is_protected:
                try:
                    return (
                        Outcome.DONE if await self._compaction.evacuate(container) else Outcome.BUSY
                    )
                except Unavailable as error:
                    if missing(self._servers).isdisjoint(seen.objects.layout.servers):
                        raise Untold(str(error)) from error
                    raise  # it may be told later
            await self._containers.retire(lambda other, _: other == container)
            seen = await self._look(0, container)
        if seen.objects is None:
            await self._forget(container)
            return Outcome.GONE
        if seen.is_changing:
            return Outcome.BUSY if seen.due else Outcome.DONE
        subject = ContainerSubject(self._containers, self._engine, container)
        return await self._move_all(subject, seen, seen.objects)

    async def _move_all(
        self, subject: FileSubject | ContainerSubject, seen: "_Seen", objects: SetRecord
    ) -> Outcome:
        ino, oid = objects.ino, objects.oid
        user = subject.file.inode.ino if isinstance(subject, FileSubject) else 0
        failure: FsError | None = None
        outcome = Outcome.DONE
        for column in seen.due:
            try:
                result, wrong = await self._mover.move(subject, objects, seen.unread, column)
            except FsError as error:
                failure = failure or error
            else:
                for other in wrong:
                    self._on_damage(oid, ino, other)
                if result is not Result.MOVED:
                    outcome = Outcome.BUSY
            seen = await self._look(user, oid)
            if seen.objects is None:
                return Outcome.GONE
            objects = seen.objects
            if not subject.is_unchanged():
                return Outcome.BUSY
        if failure is not None:
            raise failure
        if outcome is Outcome.DONE and not seen.unread and (objects.layout.is_protected or not ino):
            await self._forget(oid)  # a mark that says nothing
        return outcome


class _Seen(NamedTuple):
    """The records of an object set; ``due``: columns that have to be made anew, or to move."""

    objects: SetRecord | None
    unread: int = 0
    is_marked: bool = False
    is_changing: bool = False
    due: tuple[int, ...] = ()


def _see(tx: ReadTransaction, ino: int, oid: int, staying: Set[int]) -> _Seen:
    objects = moves.find_objects(tx, ino, oid)
    if objects is None:
        return _Seen(None)
    unread = degraded.find_unread(tx, oid)
    due = moves.due_columns(objects.layout, unread, staying)
    return _Seen(objects, unread, degraded.is_marked(tx, oid), moves.is_changing(tx, ino, oid), due)
