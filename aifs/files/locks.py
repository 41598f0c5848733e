"""flock(2) and fcntl(2) over hosts: requests of programs, answers of an inode's home, and circles.

A wait in a circle never ends. So a long one is followed from the lock's owner to the lock that it
waits for, and so on, from host to host.
"""

import itertools
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import inf
from typing import Any, NamedTuple

import trio

from aifs.core.errors import Deadlock, Unavailable, WouldBlock
from aifs.core.waiting import LOCK, waits_for
from aifs.files.kept import KeptState
from aifs.files.lock_homes import (
    FCNTL,
    FLOCK,
    NOT_HOME,
    InodeLocks,
    LockHomes,
    LockHosts,
    Packed,
    packed,
    unpacked,
)
from aifs.files.lock_table import LAST, Lock, LockOwner, Wait
from aifs.meta.kv import Engine
from aifs.peers.transport import Answer, Body, Peer

_SUSPECT_S = 0.02  # a wait that takes longer may be one in a circle
_SUSPECT_AGAIN_S = 1.0
_LOOK_S = 2.0  # how long a look for a circle may take
_CIRCLE_MAX = 256  # of owners that are looked at for one

_KEPT, _KEPT_KEY = b"lock", struct.Struct("=QBQI")  # inode, space, owner, which part
_KEPT_HANDLE, _KEPT_LOCK = struct.Struct("=Q"), struct.Struct("=QQ?I")
"""Of a note: the handle by which the owner has asked last; of each lock, as Lock."""
_KEPT_AT_ONCE = 20
"""Locks of a note."""


class _Waiting:
    """A program that waits for an fcntl(2) lock."""

    def __init__(self, ino: int, owner: LockOwner) -> None:
        self.ino = ino
        self.owner = owner
        self.scope = trio.CancelScope()
        """Ends the wait, which would never end by itself."""
        self.look_s = trio.current_time() + _SUSPECT_S
        """When it is looked whether it is in a circle."""


class _Edge(NamedTuple):
    """Somebody waits for a lock that ``blocker`` holds."""

    ino: int
    session: int
    """The owners that wait, each with its ticket."""
    ticket: int
    blocker: LockOwner


class Circles:
    """The waits of this host's programs, and whether they are in circles."""

    def __init__(self, homes: LockHomes) -> None:
        self._homes = homes
        self._waiting: dict[int, _Waiting] = {}
        """By ticket."""
        self._changed = trio.Event()
        """Set when one more waits."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @contextmanager
    def watched(self, ino: int, owner: LockOwner, ticket: int) -> Iterator[None]:
        """Leave the block, as if the wait in it had returned, if that is in a circle."""
        waiting = self._waiting[ticket] = _Waiting(ino, owner)
        self._changed.set()
        try:
            with waiting.scope:
                yield
        finally:
            del self._waiting[ticket]

    # --- what hosts ask of each other ---

    async def waits(self, session: int, number: int) -> list[tuple[int, int]]:
        """The inodes and tickets that one of our owners waits with."""
        return [
            (waiting.ino, ticket)
            for ticket, waiting in self._waiting.items()
            if waiting.owner.number == number
        ]

    async def blockers(self, session: int, ino: int, of: int, ticket: int) -> list[LockOwner]:
        """The owners of the locks that a ticket of the session ``of`` waits for."""
        inode = self._homes.known(ino)
        return inode.tables[FCNTL].blockers(of, ticket) if inode and inode.is_home else []

    # --- looking for them ---

    async def run(self) -> None:
        """End waits that never end by themselves, until cancelled."""
        while True:
            self._changed = trio.Event()
            with trio.move_on_at(min((one.look_s for one in self._waiting.values()), default=inf)):
                await self._changed.wait()
            for ticket, waiting in list(self._waiting.items()):
                if waiting.look_s <= trio.current_time():
                    waiting.look_s = trio.current_time() + _SUSPECT_AGAIN_S
                    with trio.move_on_after(_LOOK_S):
                        if await self._is_in_circle(ticket, waiting):
                            waiting.scope.cancel()

    async def _is_in_circle(self, ticket: int, waiting: _Waiting) -> bool:
        """Whether all in a circle wait at one moment: each has been seen to wait, with the same
        ticket, before and after all others."""
        start = waiting.owner
        seen: dict[LockOwner, list[_Edge]] = {start: []}
        for owner in (queue := [start]):
            waits = [(waiting.ino, ticket)] if owner == start else await self._waits_of(owner)
            for ino, number in waits:
                for blocker in await self._blockers_of(ino, owner.session, number):
                    path = [*seen[owner], _Edge(ino, owner.session, number, blocker)]
                    if blocker == start:
                        return await self._still_waits(path)
                    if blocker not in seen and len(seen) < _CIRCLE_MAX:
                        seen[blocker] = path
                        queue.append(blocker)
        return False

    async def _still_waits(self, path: list[_Edge]) -> bool:
        for edge in path:
            if edge.blocker not in await self._blockers_of(edge.ino, edge.session, edge.ticket):
                return False
        return True

    async def _waits_of(self, owner: LockOwner) -> list[tuple[int, int]]:
        return await self._homes.ask(owner.session, ["waits", owner.number]) or []

    async def _blockers_of(self, ino: int, session: int, ticket: int) -> list[LockOwner]:
        home = await self._homes.recorded(ino)
        if not home:
            return []  # the waiting host knows, and asks anew
        found = await self._homes.ask(home, ["blockers", ino, session, ticket]) or []
        return [LockOwner(*owner) for owner in found]


class _Request(NamedTuple):
    """What a program asks for."""

    space: int
    lock: Lock
    ticket: int

    @property
    def packed(self) -> tuple[int, int, Packed]:
        """For the way to its home."""
        return self.space, self.ticket, packed(self.lock)


class Locks:
    """The locks of all files. Used from one trio thread."""

    def __init__(self, engine: Engine, hosts: LockHosts, kept: KeptState | None = None) -> None:
        """``kept``: where the next daemon finds what programs of this host hold."""
        self._kept = kept or KeptState()
        self._homes = LockHomes(engine, hosts, self.serve)
        self._circles = Circles(self._homes)
        self._tickets = itertools.count(1)
        """Each names one request of ours."""
        self._operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "lock": self._grant,
            "cancel": self._cancel,
            "unlock": self._unlock,
            "test": self._test,
            "blockers": self._circles.blockers,
            "waits": self._circles.waits,
            "held": self._homes.held,
            "restated": self._homes.restated,
        }
        """What hosts may ask for, by name."""
        for key, note in self._kept.notes.items():
            if key.startswith(_KEPT):
                self._take_up(key, note)

    # --- after the death of another daemon ---

    def _keep(self, ino: int, inode: InodeLocks, space: int, owner: LockOwner) -> None:
        """Note what a program of this host holds, before it hears of that."""
        locks, by = inode.tables[space].of(owner), inode.last_handle.get(owner, 0)
        for part in itertools.count():
            key = _KEPT + _KEPT_KEY.pack(ino, space, owner.number, part)
            some = locks[part * _KEPT_AT_ONCE :][:_KEPT_AT_ONCE]
            if not some and key not in self._kept.notes:
                return
            note = [_KEPT_LOCK.pack(*lock[1:]) for lock in some]
            self._kept.note(key, _KEPT_HANDLE.pack(by) + b"".join(note) if some else b"")

    def _take_up(self, key: bytes, note: bytes) -> None:
        ino, space, number, _ = _KEPT_KEY.unpack(key[len(_KEPT) :])
        owner, (by,) = self.owner(number), _KEPT_HANDLE.unpack_from(note)
        with self._homes.using(ino) as inode:
            for lock in _KEPT_LOCK.iter_unpack(note[_KEPT_HANDLE.size :]):
                inode.tables[space].put(Lock(owner, *lock))
            inode.note_taken(by, space, owner)

    async def restate(self) -> None:
        """Go on with the locks that programs of this host hold. Returns when no home has others of
        theirs."""
        await self._homes.restate()

    # --- what programs ask for ---

    def owner(self, number: int) -> LockOwner:
        """An owner as our kernel calls it."""
        return LockOwner(self._homes.me, number)

    def lock_at_once(self, ino: int, handle: int, space: int, lock: Lock, wait: bool) -> bool:
        """``lock``, if it neither suspends nor asks another host; else False. Raises WouldBlock."""
        inode = self._homes.at_home(ino)
        if inode is None or inode.closing:
            return False
        inode.used_s = trio.current_time()
        if not inode.tables[space].lock(lock):
            if wait:
                return False
            raise WouldBlock()
        inode.note_taken(handle, space, lock.owner)
        if self._kept.is_on:
            self._keep(ino, inode, space, lock.owner)
        return True

    def unlock_at_once(self, ino: int, space: int, owner: LockOwner, start: int, end: int) -> bool:
        """As ``unlock``, in the same way."""
        inode = self._homes.known(ino)
        if inode is None:
            return True
        if not inode.is_home and inode.tables[space].holds(owner):
            return False
        if inode.tables[space].unlock(owner, start, end) and self._kept.is_on:
            self._keep(ino, inode, space, owner)
        inode.used_s = trio.current_time()
        return True

    async def lock(self, ino: int, handle: int, space: int, lock: Lock, wait: bool) -> None:
        """Hold the lock on return. Raises WouldBlock, or with ``wait`` Deadlock.

        Cancelled, nothing has changed, except a flock(2) lock given up for one of the other kind.
        """
        with self._homes.using(ino) as inode:
            while inode.closing:  # the kernel may call an owner as one that is on its way out
                await inode.closed.wait()
            request = _Request(space, lock, next(self._tickets))
            inode.note_taken(handle, space, lock.owner)  # or another close might end it at once
            with trio.CancelScope(shield=True):
                is_granted = await self._obtain(ino, inode, request, False)
                while not is_granted and inode.closing:
                    await inode.closed.wait()
                    is_granted = await self._obtain(ino, inode, request, False)
            if not is_granted and not wait:
                raise WouldBlock()
            if not is_granted:
                await self._wait(ino, inode, request)
            inode.note_taken(handle, space, lock.owner)  # it may have closed a file meanwhile
            if self._kept.is_on:
                self._keep(ino, inode, space, lock.owner)

    async def unlock(self, ino: int, space: int, owner: LockOwner, start: int, end: int) -> None:
        """The owner holds nothing of the range on return."""
        with trio.CancelScope(shield=True), self._homes.using(ino) as inode:
            if inode.tables[space].unlock(owner, start, end) and not inode.is_home:
                await self._homes.ask_home(ino, inode, "unlock", space, owner.number, start, end)
            if self._kept.is_on:
                self._keep(ino, inode, space, owner)

    async def test(self, ino: int, space: int, lock: Lock) -> Lock | None:
        """A lock of another owner, because of which this one cannot be had now."""
        with self._homes.using(ino) as inode:
            found, _ = await self._homes.ask_home(ino, inode, "test", space, packed(lock))
            return None if found is None else unpacked(found)

    async def flush(self, ino: int, owner: LockOwner) -> None:
        """A process has closed one of its descriptors of the file: its fcntl(2) locks end."""
        if not self.flush_at_once(ino, owner):
            await self.unlock(ino, FCNTL, owner, 0, LAST)

    def flush_at_once(self, ino: int, owner: LockOwner) -> bool:
        """As ``flush``, if that need neither suspend nor ask another host; else False."""
        inode = self._homes.known(ino)
        if inode is not None:
            inode.last_handle.pop(owner, None)
        return self.unlock_at_once(ino, FCNTL, owner, 0, LAST)

    def begin_close(self, ino: int) -> None:
        """The last descriptor of an open file is closed; ``end_close`` follows. Later requests of
        this host find its locks released. Does not suspend."""
        inode = self._homes.begin_use(ino)
        if not inode.closing:
            inode.closed = trio.Event()
        inode.closing += 1

    async def end_close(
        self, ino: int, handle: int, flocker: LockOwner | None, is_gone: bool
    ) -> None:
        """``flocker``: the open file, if it may have a flock(2) lock. ``is_gone``: its handle is
        unused."""
        inode = self._homes.known(ino)
        assert inode is not None  # it is in use since ``begin_close``
        try:
            if flocker is not None:
                await self.unlock(ino, FLOCK, flocker, 0, LAST)
            for owner in inode.owners_left_by(handle) if is_gone else ():
                await self.unlock(ino, FCNTL, owner, 0, LAST)
        finally:
            inode.closing -= 1
            if not inode.closing:
                inode.closed.set()
            self._homes.end_use(ino)

    async def _obtain(self, ino: int, inode: InodeLocks, request: _Request, wait: bool) -> bool:
        """Whether it is granted; with ``wait`` it is, on return."""
        while True:
            # Should its home die while it gives the old one up, then it has given it up.
            inode.tables[request.space].leave_other_kind(request.lock)
            answer, home = await self._homes.ask_home(ino, inode, "lock", *request.packed, wait)
            if answer and home != self._homes.me:
                inode.tables[request.space].put(request.lock)
            if answer or not wait:
                return bool(answer)

    async def _wait(self, ino: int, inode: InodeLocks, request: _Request) -> None:
        """Wait until the lock is granted. Raises Deadlock."""
        of_fcntl = request.space == FCNTL
        owner, is_granted = request.lock.owner, False
        try:
            circles = self._circles.watched(ino, owner, request.ticket)
            with waits_for(LOCK), circles if of_fcntl else nullcontext():
                is_granted = await self._obtain(ino, inode, request, True)
        except trio.Cancelled:
            if not await self._settle(ino, inode, request):
                raise
            return  # which leaves the scope that was cancelled with what it has asked for
        if not is_granted and not await self._settle(ino, inode, request):
            raise Deadlock()

    async def _settle(self, ino: int, inode: InodeLocks, request: _Request) -> bool:
        """End our wait. Whether the lock was granted before the home heard of that: it is ours."""
        with trio.CancelScope(shield=True):
            answer, home = await self._homes.ask_home(
                ino, inode, "cancel", request.space, request.ticket
            )
            if answer and home != self._homes.me:
                inode.tables[request.space].put(request.lock)
        return bool(answer)

    # --- what hosts ask of us, we ourselves among them ---

    async def serve(self, session: int, request: Sequence[Any]) -> Any:
        """Answer a host with this session: an operation, and arguments. Raises Unavailable if the
        session is over."""
        operation, *arguments = request
        return await self._operations[operation](session, *arguments)

    async def answer(self, asker: Peer, request: Any, body: Body) -> Answer:
        """``serve`` as a service of Peers."""
        return Answer(await self.serve(asker.session, request))

    async def _grant(
        self, session: int, ino: int, space: int, ticket: int, wanted: Packed, wait: bool
    ) -> bool | str:
        with self._homes.using(ino) as inode:
            if await self._homes.find_home(ino, inode) != self._homes.me:
                return NOT_HOME
            if not self._homes.is_live(session):
                raise Unavailable("the session is over")
            table, lock = inode.tables[space], unpacked(wanted)
            if table.lock(lock):
                table.note_granted(session, ticket)
                return True
            if not wait:
                return False
            woken = trio.Event()
            waiting = Wait(lock, ticket, woken.set)
            table.wait(waiting)
            try:
                await woken.wait()
            except trio.Cancelled:
                table.cancel(session, ticket)
                if not waiting.granted:  # else the asking host hears that it was
                    raise
            return waiting.granted

    async def _cancel(self, session: int, ino: int, space: int, ticket: int) -> bool | str:
        """End the wait of this ticket. Whether it has its lock."""
        with self._homes.using(ino) as inode:
            if await self._homes.find_home(ino, inode) != self._homes.me:
                return NOT_HOME
            return inode.tables[space].cancel(session, ticket)

    async def _unlock(
        self, session: int, ino: int, space: int, number: int, start: int, end: int
    ) -> bool | str:
        """Whether the owner held something of the range."""
        with self._homes.using(ino) as inode:
            if await self._homes.find_home(ino, inode) != self._homes.me:
                return NOT_HOME
            return inode.tables[space].unlock(LockOwner(session, number), start, end)

    async def _test(
        self, session: int, ino: int, space: int, wanted: Packed
    ) -> Packed | str | None:
        """A lock that is in the way."""
        with self._homes.using(ino) as inode:
            if await self._homes.find_home(ino, inode) != self._homes.me:
                return NOT_HOME
            found = next(inode.tables[space].conflicts(unpacked(wanted)), None)
            return None if found is None else packed(found)

    # --- in the background ---

    async def run(self) -> None:
        """Look after locks until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._circles.run)
            await self._homes.run()

    async def close(self) -> None:
        """No program is there any more: we are the home of nothing that others have not locked."""
        await self._homes.give_up_idle(trio.current_time())

    def status(self) -> dict[str, int]:
        """For ``aifs status``."""
        return {**self._homes.status(), "waiting": len(self._circles)}
