"""Rebuild, in the background: missing or wrong columns, left or lost servers, unprotected files.

A *round* counts due object sets, then walks the same records again, with a worker for each; what
cannot be mended now (the file is being changed, a server fails) waits for a later round. All
results are on record in the object sets, so after a crash a round begins anew at little cost.
"""

import time
from collections.abc import Awaitable, Callable, Iterable, Set
from enum import Enum, auto
from functools import partial
from typing import Any, NamedTuple

import trio

from aifs.burst.transfer import Limiter, Mover
from aifs.core.errors import FsError, NotFound, Stale, Unavailable
from aifs.core.log import logger
from aifs.data.checks import Untold
from aifs.data.objects.recovery import forget_columns
from aifs.data.servers import Servers
from aifs.files.containers import Containers
from aifs.files.damage import Damage, missing
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.services import Services
from aifs.layout.placement import ACTIVE, LOST
from aifs.meta import degraded, moves
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.moves import Due, SetRecord
from aifs.meta.server_uses import users_of
from aifs.meta.slices import Walk
from aifs.store.backup import Backup
from aifs.upkeep.compaction import Compaction
from aifs.upkeep.from_copies import FromCopies
from aifs.upkeep.moves import ColumnMover, NoTarget, Result, Strays
from aifs.upkeep.passes import Results
from aifs.upkeep.relayout import FileSubject, Relayout

_log = logger(__name__)


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
        """Servers in use but given up, for which unprotected files wait."""
        return frozenset(server.id for server in self._servers.capacity() if server.given_up)

    async def mend(self, ino: int, oid: int) -> Outcome:
        """Do all that is due. Raises NoSpace, Unavailable if some cannot be done; Untold for
        unknown bytes."""
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
        """Whether a plain file has its policy's protection now; not if changed meanwhile."""
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
        """Spread a file on all servers over those where columns may stay, if it has to leave one
        without loss of safety."""
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
            if seen.is_marked and not seen.unread:
                await self._end_repair(seen.objects)
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
        is_whole = outcome is Outcome.DONE and seen.is_marked and not seen.unread
        if is_whole and (objects.layout.is_protected or not ino):
            await self._end_repair(objects)
        return outcome

    async def _end_repair(self, objects: SetRecord) -> None:
        """End a mark that is void, or of a scrub that ended while repairing: bytes may be others
        now."""
        ino, oid, layout, _ = objects
        forget_columns(self._servers.cache, layout, (ino, oid))
        self._servers.blocks.correct(oid)
        await self._engine.transact(degraded.note_repair, oid)


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


_SLICE = 128
_LOOK_S = 30.0  # records that nobody has told us of are found within this time
_RETRY_S, _RETRY_MAX_S = 2.0, 120.0
# servers that have nothing left are looked through again after so many times as long as that takes
_SCAN_SHARE = 100
_QUIET_S = 0.1  # after the last file was opened for writing
_REST_S = 0.03  # of a worker after each piece, while somebody writes


class _Left:
    """Columns and bytes that are due, altogether and by the server that they have to leave."""

    def __init__(self, servers: Iterable[int] = ()) -> None:
        self.objects = self.length = 0
        self.servers = {number: [0, 0] for number in servers}

    def moved(self, server: int, length: int) -> None:
        self.length = max(self.length - length, 0)
        if server in self.servers:
            columns, size = self.servers[server]
            self.servers[server] = [max(columns - 1, 0), max(size - length, 0)]


class Rebuild:
    """``work`` does it; all else may be called at any time. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        containers: Containers,
        compaction: Compaction,
        handles: Handles,
        backup: Backup,
        from_copies: FromCopies,
        damage: Damage,
    ) -> None:
        config, upkeep = services.config, services.upkeep
        self._engine = engine = services.engine
        self._servers = servers = services.servers
        self._io = io
        self._containers = containers
        self._handles = handles
        self._workers = config.rebuild.workers
        self.limiter = Limiter(config.rebuild.bandwidth)
        self.strays = Strays(engine, servers, backup, upkeep, self._swept)
        priority = config.burst.ioprio
        self.mover = Mover(
            servers.budget,
            self.limiter,
            priority,
            make_way=self._make_way,
            is_urgent=lambda: True,  # missing protection should not wait for an idle processor
        )
        movers = io.sets.movers(self.mover)
        columns = ColumnMover(engine, servers, self.strays, movers, self._moved)
        self._relayout = Relayout(io, services.ids, movers, config.data.min_spare)
        self._mender = Mender(
            engine, servers, io, containers, compaction, columns, self._relayout, damage.report
        )
        self._from_copies = from_copies
        self._damage = damage
        self._share = upkeep.share
        self._retry_s = _RETRY_S
        """Seconds until failed object sets are tried again; doubled each time."""
        self._handed_out = 0
        """The count ``damage.asked`` when degraded object sets were last handed out."""
        self._settled = -1
        """The same when a round that found nothing began."""
        self._left: _Left | None = None
        """The work that was left at the last count; None: nobody has counted."""
        self._standing: dict[int, str] = {}  # of the servers, when ``_left`` was counted
        self._scan_at_s = 0.0
        """When files on servers that have to be left are looked for again, by trio's clock."""
        self._active: dict[int, int] = {}  # oid to ino
        self._news = trio.Event()
        """Set, and replaced, at the end of each round."""
        self._last = self._now = Results("some columns cannot be rebuilt or moved for now")
        """Of the last round; and of the one that is under way."""
        self._columns = 0
        """How many columns have been made since the mount."""
        self._began_s = time.monotonic()
        """When the rate began to be measured, by time.monotonic()."""
        self._began_bytes = 0
        """The bytes that had been moved then."""

    # --- requests ---

    def look(self) -> None:
        """A server's standing has changed."""
        self._scan_at_s = 0.0
        self._damage.due()

    async def request(self, oid: int, ino: int, columns: Iterable[int]) -> bool:
        """Have these columns made anew, unread until then. ``ino`` 0: a container. Whether that is
        on record: not if unprotected, or too many are wrong."""
        mask = sum(1 << column for column in set(columns))
        noted = await self._note(oid, ino, mask)
        if noted:
            self._damage.due()
        return noted

    async def _note(self, oid: int, ino: int, mask: int) -> bool:
        if ino:
            return await self._io.inodes.lose_columns(ino, oid, mask)
        with self._servers.blocks.finding():
            noted = await self._engine.transact(moves.put_damaged, oid, ino, mask)
            if noted:
                self._servers.blocks.correct(oid)  # they may have been read when it was wrong
                self._containers.moved(oid)
        return noted != 0

    # --- in the background ---

    async def work(self) -> float:
        """Rebuild, round by round; in how many seconds to look again."""
        while True:
            asked = self._damage.asked
            try:
                progress = await self._round()
            except FsError as error:
                _log.info("rebuilding has to wait: %s", error)
                progress = False
            if self._damage.asked == asked and not progress:
                break
            self._retry_s = _RETRY_S
            await trio.lowlevel.checkpoint()
        if not (self._now.busy or self._now.failing):
            self._retry_s = _RETRY_S
            return _LOOK_S
        retry_s, self._retry_s = self._retry_s, min(2 * self._retry_s, _RETRY_MAX_S)
        return retry_s

    async def _round(self) -> bool:
        """One round; whether anything was done, so that another is due."""
        asked, self._settled = self._damage.asked, -1
        self._handed_out = asked
        await self._take_reports()
        await self._from_copies.rescue()
        self._now = self._last.following()
        left = await self._count()
        if left.objects:
            failure: FsError | None = None
            send, receive = trio.open_memory_channel[tuple[int, int]](0)
            self._active.clear()
            async with trio.open_nursery() as nursery, send:
                for _ in range(self._workers):
                    nursery.start_soon(self._work, receive, left)
                try:
                    await self._walk(partial(self._hand_out, send))
                except FsError as error:  # which the nursery would wrap
                    failure = error
            if failure is not None:
                raise failure
        else:
            self._settled = asked
            for server in self._servers.capacity():
                server.is_back = server.is_back and self.strays.on(server.id) > 0
        self._last = self._now
        self._tell()
        return self._now.done > 0

    async def _take_reports(self) -> None:
        while (report := self._damage.first()) is not None:
            await self._note(*report)
            self._damage.seen_to(report)

    def _tell(self) -> None:
        self._news.set()
        self._news = trio.Event()

    def _swept(self) -> None:
        self._tell()
        # Columns that had no place may have one, and a server that is back may be in order.
        if self._now.busy or any(server.is_back for server in self._servers.capacity()):
            self._damage.due()

    async def _hand_out(self, send: trio.MemorySendChannel, due: Due) -> None:
        if self._damage.asked != self._handed_out:  # wrong columns come before those that only move
            self._handed_out = self._damage.asked
            await self._take_reports()
            await self._show(partial(self._give, send), b"q", moves.scan_degraded)
        await self._give(send, due)

    async def _give(self, send: trio.MemorySendChannel, due: Due) -> None:
        if due.oid not in self._active:
            self._active[due.oid] = due.ino
            await send.send((due.ino, due.oid))

    async def _count(self) -> "_Left":
        standing = self._standing_now()
        leaving = [number for number, state in standing.items() if state != ACTIVE]
        left = _Left(leaving)

        async def add(due: Due) -> None:
            left.objects += 1
            left.length += due.length
            for number, length in due.columns:
                if number in left.servers:
                    left.servers[number][0] += 1
                    left.servers[number][1] += length

        await self._walk(add)
        self._left, self._standing = left, standing
        self._began_s, self._began_bytes = time.monotonic(), self.mover.moved_bytes
        return left

    async def _walk(self, see: Callable[[Due], Awaitable[None]]) -> None:
        """Show due object sets by the records: degraded ones, then those on servers to be left."""
        await self._show(see, b"q", moves.scan_degraded)
        staying = self._mender.staying()
        if len(staying) == len(self._servers.capacity()) or trio.current_time() < self._scan_at_s:
            return
        began, asked = trio.current_time(), self._damage.asked
        waiting = self._mender.waiting()
        found = await self._show(see, b"i", moves.scan_files, staying, waiting)
        found += await self._show(see, b"t", moves.scan_containers, staying, waiting)
        if not found and asked == self._damage.asked:
            now = trio.current_time()
            self._scan_at_s = now + max(_LOOK_S, _SCAN_SHARE * (now - began))

    async def _show(
        self,
        see: Callable[[Due], Awaitable[None]],
        kind: bytes,
        scan: Callable[..., tuple[list[Due], bytes]],
        *args: Any,
    ) -> int:
        count = 0
        async for due in Walk(self._engine, kind, scan, _SLICE, *args):
            count += 1
            await see(due)
            await self._share.give_way()
        return count

    async def _work(self, receive: trio.MemoryReceiveChannel, left: "_Left") -> None:
        async for ino, oid in receive:
            try:
                outcome = await self._mend(ino, oid)
            except FsError as error:
                await self._now.fail(self._engine, ino, oid, str(error))
            else:
                if outcome is Outcome.BUSY:
                    self._now.busy += 1
                else:
                    self._now.done += 1
                    left.objects -= 1
            finally:
                del self._active[oid]
            await self._share.give_way()

    async def _mend(self, ino: int, oid: int) -> Outcome:
        try:
            return await self._mender.mend(ino, oid)
        except Untold:
            if await self._from_copies.restore_users(ino, oid):
                return Outcome.GONE
            raise

    async def _make_way(self) -> None:
        if (
            self._handles.writers > 0
            or self._handles.last_writer_s > trio.current_time() - _QUIET_S
        ):
            await trio.sleep(_REST_S)

    def _moved(self, before: SetRecord, column: int) -> None:
        self._columns += 1
        self._damage.seen_to((before.oid, before.ino, 1 << column))
        if self._left is not None:
            self._left.moved(
                before.layout.servers[column], before.layout.object_length(column, before.size)
            )

    # --- figures ---

    async def news(self) -> None:
        """Wait until ``idle`` or ``left`` may change: after a round, or deletions."""
        await self._news.wait()

    @property
    def idle(self) -> bool:
        """Whether nothing was due at the last look, and nothing was asked for since."""
        return self._settled == self._damage.asked and self._standing == self._standing_now()

    def _standing_now(self) -> dict[int, str]:
        return {
            server.id: "given up" if server.given_up else server.standing
            for server in self._servers.capacity()
        }

    def left(self, server: int) -> tuple[int, int] | None:
        """Objects, and bytes of columns, on a server to be left; None if unknown yet."""
        left = {} if self._left is None else self._left.servers
        if server not in left or self._standing != self._standing_now():
            return None
        columns, length = left[server]
        found = self._servers.find(server)
        if found is not None and found.is_gone and found.standing != LOST:
            return columns, length  # leftovers there can only be deleted when it is back
        return columns + self.strays.on(server), length

    def status(self) -> dict[str, Any]:
        """Figures for ``aifs status``. ``left_objects``: files and containers that are due."""
        left = self._left or _Left()
        elapsed = max(time.monotonic() - self._began_s, 0.001)
        rate = (self.mover.moved_bytes - self._began_bytes) / elapsed if left.objects else 0
        return {
            "workers": self._workers,
            "bandwidth": self.limiter.rate,
            "left_objects": left.objects,
            "left_bytes": left.length,
            "active_objects": len(self._active),
            "moved_columns": self._columns,
            "moved_bytes": self.mover.moved_bytes,
            "relaid_files": self._relayout.files,
            "rate": round(rate),
            "estimate_s": round(left.length / rate, 1) if rate and left.length else None,
            "failing_objects": self._last.failing,
            "failed": [failed._asdict() for failed in self._last.failed],
            "servers": {number: self.left(number) for number in left.servers},
        }
