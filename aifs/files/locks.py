"""flock(2) and fcntl(2) over hosts: who grants the locks of an inode, and how it changes.

The locks of an inode have a *home*: the host that was the first to lock it. It grants them from its
memory, and ``L ino`` in the map names its session, so that all find it. What others are granted
they keep in mind; when the home has died, another host takes the record over and asks all for what
they hold, before it grants anything. docs/hosts.md (Locks) says why nobody has a lock twice.
"""

import itertools
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import trio

from aifs.core.errors import Deadlock, FsError, Unavailable, WouldBlock
from aifs.core.log import logger
from aifs.files.lock_table import LAST, Lock, LockOwner, LockTable, Wait
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer

_log = logger(__name__)

FCNTL, FLOCK = 0, 1
"""The two spaces of locks, which know nothing of each other."""

SERVICE = "locks"
"""What hosts ask each other for, by this name: see ``Locks.serve``."""

Packed = list[Any]
"""A lock on its way between hosts: its fields, those of its owner first."""

IDLE_S = 30.0
"""A home gives an inode up when it has had no lock for so long."""

_NOT_HOME = "not home"
_TICK_S = 0.5  # how often it is looked who is alive
_RETRY_S = 0.02
_SUSPECT_S = 0.02  # a wait that takes longer may be one in a circle
_SUSPECT_AGAIN_S = 1.0
_LOOK_S = 2.0  # how long a look for a circle may take
_CIRCLE_MAX = 256  # of owners that are looked at for one


class LockHosts(Protocol):
    """The other hosts, as far as locks need them."""

    @property
    def session(self) -> int:
        """Our own."""

    def live(self) -> Set[int]:
        """The sessions that are not known to be over, ours among them, as they were at one
        moment. One that is missing was over then, or began later."""

    async def ask(self, session: int, request: Sequence[Any]) -> Any:
        """What ``Locks.serve`` of another host answers, in JSON. Raises Unavailable if it is not
        known whether it has been carried out, and what it raises. A request that is cancelled here
        is cancelled there, and so are all when the connection ends, before another one begins."""


class PeerHosts:
    """The hosts of a cluster."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers

    @property
    def session(self) -> int:
        return self._peers.session

    def live(self) -> Set[int]:
        return self._peers.sessions.keys()

    async def ask(self, session: int, request: Sequence[Any]) -> Any:
        name = self._peers.sessions.get(session)
        if name is None:
            raise Unavailable(f"session {session} is over")
        # Locks are waited for. Who hangs loses its connection.
        endless = math.inf
        answer = await self._peers.call(name, SERVICE, request, session=session, timeout_s=endless)
        return answer.value


class Alone:
    """There is no other host."""

    session = 1

    def live(self) -> Set[int]:
        return {self.session}

    async def ask(self, session: int, request: Sequence[Any]) -> Any:
        raise Unavailable(f"there is no session {session}")


class _Inode:
    """What is known of the locks of one inode."""

    def __init__(self) -> None:
        self.tables = (LockTable(False), LockTable(True))
        """All locks of either space if we are their home, else those of our own session."""
        self.is_home = False
        """We are their home, and know all of them."""
        self.changing: trio.Event | None = None
        """We are becoming, or ceasing to be, their home; set when that is over."""
        self.asked = 0
        """How often a new home has asked what we hold: what an older one answers afterwards does
        not count."""
        self.users = 0
        """Requests that are under way."""
        self.used_s = 0.0
        """When the last one was, of trio's clock."""
        self.closing = 0
        """Files of this host that are being closed, which may end locks."""
        self.closed = trio.Event()
        """Set when none is being closed any more."""
        self.by_handle: dict[int, set[LockOwner]] = {}
        """Owners of fcntl(2) locks by the handle that they were taken by, until a close(2) releases
        them. Those who are left when the handle is gone are open file descriptions."""


class _Waiting:
    """A program that waits for an fcntl(2) lock."""

    def __init__(self, ino: int, owner: LockOwner) -> None:
        self.ino = ino
        self.owner = owner
        self.scope = trio.CancelScope()
        """Ends the wait, which would never end by itself."""
        self.look_s = trio.current_time() + _SUSPECT_S
        """When it is looked whether it is in a circle."""


class Locks:
    """The locks of all files. Used from one trio thread."""

    def __init__(self, engine: Engine, hosts: LockHosts) -> None:
        self._engine = engine
        self._hosts = hosts
        self._inodes: dict[int, _Inode] = {}
        """By number, while there is something to know of it."""
        self._tickets = itertools.count(1)
        """Each names one request of ours."""
        self._waiting: dict[int, _Waiting] = {}
        """By ticket, what programs wait for."""
        self._suspects = trio.Event()
        """Set when one more waits."""
        self._live: Set[int] = frozenset()
        """The sessions that were live when that was last looked at."""
        self._operations: dict[str, Callable[..., Awaitable[Any]]] = {
            "lock": self._grant,
            "cancel": self._cancel,
            "unlock": self._unlock,
            "test": self._test,
            "blockers": self._blockers,
            "waits": self._waits,
            "held": self._held,
        }
        """What hosts may ask for, by name."""

    @property
    def _me(self) -> int:
        """Our session."""
        return self._hosts.session

    @contextmanager
    def _using(self, ino: int) -> Iterator[_Inode]:
        inode = self._inodes.setdefault(ino, _Inode())
        inode.users += 1
        try:
            yield inode
        finally:
            inode.users -= 1
            inode.used_s = trio.current_time()
            if not (inode.users or inode.is_home or any(inode.tables)):
                del self._inodes[ino]

    # --- what programs ask for ---

    def owner(self, number: int) -> LockOwner:
        """An owner as our kernel calls it."""
        return LockOwner(self._me, number)

    async def lock(self, ino: int, handle: int, space: int, lock: Lock, wait: bool) -> None:
        """The owner holds the lock on return. Raises WouldBlock, or with ``wait`` Deadlock.

        Cancelled means that nothing has changed, but for a lock of flock(2) that was given up for
        one of the other kind.
        """
        with self._using(ino) as inode:
            while inode.closing:  # the kernel may call an owner as one that is on its way out
                await inode.closed.wait()
            request = _Request(space, lock, next(self._tickets))
            with trio.CancelScope(shield=True):
                is_granted = await self._obtain(ino, inode, request, False)
                while not is_granted and inode.closing:
                    await inode.closed.wait()
                    is_granted = await self._obtain(ino, inode, request, False)
            if not is_granted and not wait:
                raise WouldBlock()
            if not is_granted:
                await self._wait(ino, inode, request)
            if space == FCNTL:
                inode.by_handle.setdefault(handle, set()).add(lock.owner)

    async def unlock(self, ino: int, space: int, owner: LockOwner, start: int, end: int) -> None:
        """The owner holds nothing of the range on return."""
        with trio.CancelScope(shield=True), self._using(ino) as inode:
            if inode.tables[space].unlock(owner, start, end) and not inode.is_home:
                await self._ask_home(ino, inode, "unlock", space, owner.number, start, end)

    async def test(self, ino: int, space: int, lock: Lock) -> Lock | None:
        """A lock of another owner, because of which this one cannot be had now."""
        with self._using(ino) as inode:
            found, _ = await self._ask_home(ino, inode, "test", space, _packed(lock))
            return None if found is None else _unpacked(found)

    async def flush(self, ino: int, owner: LockOwner) -> None:
        """A process has closed one of its descriptors of the file: its fcntl(2) locks end."""
        for owners in self._inodes[ino].by_handle.values() if ino in self._inodes else ():
            owners.discard(owner)
        await self.unlock(ino, FCNTL, owner, 0, LAST)

    def begin_close(self, ino: int) -> None:
        """The last descriptor of an open file is closed, and ``end_close`` follows. Who asks from
        now on on this host finds its locks released. Does not suspend."""
        inode = self._inodes.setdefault(ino, _Inode())
        if not inode.closing:
            inode.closed = trio.Event()
        inode.closing += 1
        inode.users += 1

    async def end_close(
        self, ino: int, handle: int, flocker: LockOwner | None, is_gone: bool
    ) -> None:
        """``flocker``: the open file, if it may have a lock of flock(2). ``is_gone``: no open file
        has the handle any more."""
        with self._using(ino) as inode:
            inode.users -= 1
            try:
                if flocker is not None:
                    await self.unlock(ino, FLOCK, flocker, 0, LAST)
                for owner in inode.by_handle.pop(handle, ()) if is_gone else ():
                    await self.unlock(ino, FCNTL, owner, 0, LAST)
            finally:
                inode.closing -= 1
                if not inode.closing:
                    inode.closed.set()

    async def _obtain(self, ino: int, inode: _Inode, request: "_Request", wait: bool) -> bool:
        """Whether it is granted; with ``wait`` it is, on return."""
        while True:
            # Should its home die while it gives the old one up, then it has given it up.
            inode.tables[request.space].leave_other_kind(request.lock)
            answer, home = await self._ask_home(ino, inode, "lock", *request.packed, wait)
            if answer and home != self._me:
                inode.tables[request.space].put(request.lock)
            if answer or not wait:
                return bool(answer)

    async def _wait(self, ino: int, inode: _Inode, request: "_Request") -> None:
        """Until the lock is granted. Raises Deadlock."""
        waiting = _Waiting(ino, request.lock.owner)
        if request.space == FCNTL:
            self._waiting[request.ticket] = waiting
            self._suspects.set()
        is_granted = False
        try:
            with waiting.scope:
                is_granted = await self._obtain(ino, inode, request, True)
        except trio.Cancelled:
            if not await self._settle(ino, inode, request):
                raise
            return  # which leaves the scope that was cancelled with what it has asked for
        finally:
            self._waiting.pop(request.ticket, None)
        if not is_granted and not await self._settle(ino, inode, request):
            raise Deadlock()

    async def _settle(self, ino: int, inode: _Inode, request: "_Request") -> bool:
        """We wait no more. Whether the lock had been granted before the home heard of it: then it
        is ours."""
        with trio.CancelScope(shield=True):
            answer, home = await self._ask_home(ino, inode, "cancel", request.space, request.ticket)
            if answer and home != self._me:
                inode.tables[request.space].put(request.lock)
        return bool(answer)

    # --- who is the home ---

    async def _ask_home(
        self, ino: int, inode: _Inode, operation: str, *arguments: Any
    ) -> tuple[Any, int]:
        """What the home of the inode's locks answers, and its session: whoever that is, and however
        long it takes to know.

        When this returns, no later home has asked what we hold; so a caller that has to note the
        answer does it before it awaits anything.
        """
        while True:
            asked, request = inode.asked, [operation, ino, *arguments]
            home = self._me if inode.is_home else await self._find_home(ino, inode)
            if home == self._me:
                answer = await self.serve(self._me, request)
            else:
                try:
                    answer = await self._hosts.ask(home, request)
                except FsError as error:  # it has died, or hangs, or has too much to do
                    _log.debug("locks: inode %d at session %d: %s", ino, home, error)
                    answer = _NOT_HOME
                if inode.asked != asked:
                    answer = _NOT_HOME  # any more
            if answer != _NOT_HOME:
                return answer, home
            await trio.sleep(_RETRY_S)

    async def _find_home(self, ino: int, inode: _Inode) -> int:
        """Its session; if it is ours, nothing has been awaited since that was so."""
        while True:
            # A view waits while it is not certain that our session goes on.
            recorded = await self._engine.view(_recorded_home, ino)
            if inode.changing is not None:
                await inode.changing.wait()
            elif inode.is_home:
                return self._me
            elif recorded and recorded != self._me and self._is_live(recorded):
                return recorded
            else:
                await self._become_home(ino, inode, recorded)

    async def _become_home(self, ino: int, inode: _Inode, before: int) -> None:
        """Unless another host is. ``before``: the session of the home before, which is over; 0:
        there was none; our own: we were interrupted."""
        inode.changing = trio.Event()
        try:
            is_ours, is_new = await self._engine.transact(_take_over, ino, before, self._me)
            if is_ours and not is_new:
                await self._learn(ino, inode)
            inode.is_home = is_ours
        finally:
            inode.changing.set()
            inode.changing = None

    async def _learn(self, ino: int, inode: _Inode) -> None:
        """What others hold. All that are live and could hold something are asked, until they
        answer, or are over."""
        inode.asked += 1
        for session in self._hosts.live() - {self._me}:
            held = None
            while held is None and self._is_live(session):
                try:
                    held = await self._hosts.ask(session, ["held", ino])
                except FsError as error:
                    _log.debug("locks: what session %d holds of %d: %s", session, ino, error)
                    await trio.sleep(_RETRY_S)
            for table, locks in zip(inode.tables, held or ((), ()), strict=True):
                table.release_session(session)
                for lock in locks if self._is_live(session) else ():
                    table.put(_unpacked(lock))

    async def _give_up(self, inos: list[int]) -> None:
        """We are their home no more. Nobody has a lock of them, and nobody asks for one."""
        if not inos:
            return
        for ino in inos:
            self._inodes[ino].changing, self._inodes[ino].is_home = trio.Event(), False
        try:
            await self._engine.transact(_give_up, inos, self._me)
        finally:
            for ino in inos:
                with self._using(ino) as inode:
                    assert inode.changing is not None
                    inode.changing.set()
                    inode.changing = None

    def _is_live(self, session: int) -> bool:
        """Whether it is not known to be over."""
        live = self._hosts.live()
        return session in live or session > max(live, default=0)

    # --- what hosts ask of us, we ourselves among them ---

    async def serve(self, session: int, request: Sequence[Any]) -> Any:
        """The answer to a host, whose session this is: the name of an operation, and its arguments.
        Raises Unavailable if the session is over."""
        operation, *arguments = request
        return await self._operations[operation](session, *arguments)

    async def answer(self, asker: Peer, request: Any, body: Body) -> Answer:
        """``serve`` as a service of Peers."""
        return Answer(await self.serve(asker.session, request))

    async def _grant(
        self, session: int, ino: int, space: int, ticket: int, packed: Packed, wait: bool
    ) -> bool | str:
        """Whether the lock is granted."""
        with self._using(ino) as inode:
            if await self._find_home(ino, inode) != self._me:
                return _NOT_HOME
            if not self._is_live(session):
                raise Unavailable("the session is over")
            table, lock = inode.tables[space], _unpacked(packed)
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
                if not waiting.granted:  # else who asks is told that it has been
                    raise
            return waiting.granted

    async def _cancel(self, session: int, ino: int, space: int, ticket: int) -> bool | str:
        """Nobody waits with this ticket any more. Whether it has got its lock."""
        with self._using(ino) as inode:
            if await self._find_home(ino, inode) != self._me:
                return _NOT_HOME
            return inode.tables[space].cancel(session, ticket)

    async def _unlock(
        self, session: int, ino: int, space: int, number: int, start: int, end: int
    ) -> bool | str:
        """Whether the owner held something of the range."""
        with self._using(ino) as inode:
            if await self._find_home(ino, inode) != self._me:
                return _NOT_HOME
            return inode.tables[space].unlock(LockOwner(session, number), start, end)

    async def _test(
        self, session: int, ino: int, space: int, packed: Packed
    ) -> Packed | str | None:
        """A lock that is in the way."""
        with self._using(ino) as inode:
            if await self._find_home(ino, inode) != self._me:
                return _NOT_HOME
            found = next(inode.tables[space].conflicts(_unpacked(packed)), None)
            return None if found is None else _packed(found)

    async def _held(self, session: int, ino: int) -> list[list[Packed]]:
        """To a new home: what our programs hold. From now on we ask no other."""
        with self._using(ino) as inode:
            while await self._engine.view(_recorded_home, ino) != session:
                if not self._is_live(session):
                    raise Unavailable("the session is over")
                await trio.sleep(_RETRY_S)  # our replica is behind
            inode.asked += 1
            return [[_packed(lock) for lock in table.held(self._me)] for table in inode.tables]

    async def _waits(self, session: int, number: int) -> list[tuple[int, int]]:
        """The inodes and tickets that one of our owners waits with, for fcntl(2) locks."""
        return [
            (waiting.ino, ticket)
            for ticket, waiting in self._waiting.items()
            if waiting.owner.number == number
        ]

    async def _blockers(self, session: int, ino: int, of: int, ticket: int) -> list[LockOwner]:
        """Who holds what a ticket of the session ``of`` waits for."""
        inode = self._inodes.get(ino)
        return inode.tables[FCNTL].blockers(of, ticket) if inode and inode.is_home else []

    # --- circles of waiters ---

    async def _look_for_circles(self) -> None:
        """End waits for fcntl(2) locks that never end by themselves."""
        while True:
            while not self._waiting:
                self._suspects = trio.Event()
                await self._suspects.wait()
            await trio.sleep_until(min(waiting.look_s for waiting in self._waiting.values()))
            for ticket, waiting in list(self._waiting.items()):
                if waiting.look_s <= trio.current_time():
                    waiting.look_s = trio.current_time() + _SUSPECT_AGAIN_S
                    with trio.move_on_after(_LOOK_S):
                        if await self._is_in_circle(ticket, waiting):
                            waiting.scope.cancel()

    async def _is_in_circle(self, ticket: int, waiting: _Waiting) -> bool:
        """Whether all in a circle wait for the next one at one moment. Each has been seen to wait
        before any of them is seen to do so again, with the same ticket: so all did in between."""
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

    async def _still_waits(self, path: list["_Edge"]) -> bool:
        for edge in path:
            if edge.blocker not in await self._blockers_of(edge.ino, edge.session, edge.ticket):
                return False
        return True

    async def _waits_of(self, owner: LockOwner) -> list[tuple[int, int]]:
        return await self._ask(owner.session, ["waits", owner.number]) or []

    async def _blockers_of(self, ino: int, session: int, ticket: int) -> list[LockOwner]:
        home = await self._engine.view(_recorded_home, ino)
        if not home:
            return []  # who waited there has been told so, and asks anew
        found = await self._ask(home, ["blockers", ino, session, ticket]) or []
        return [LockOwner(*owner) for owner in found]

    async def _ask(self, session: int, request: list[Any]) -> Any:
        """What a host answers; None if it does not."""
        if session == self._me:
            return await self.serve(session, request)
        try:
            return await self._hosts.ask(session, request)
        except FsError:
            return None

    # --- in the background ---

    async def run(self) -> None:
        """Look after locks until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look_for_circles)
            while True:
                await self._look_who_is_live(nursery)
                await self._give_up(self._idle(trio.current_time() - IDLE_S))
                await trio.sleep(_TICK_S)

    async def close(self) -> None:
        """No program is there any more: we are the home of nothing that others have not locked."""
        await self._give_up(self._idle(trio.current_time()))

    def status(self) -> dict[str, int]:
        """For ``aifs status``."""
        return {
            "homes": sum(inode.is_home for inode in self._inodes.values()),
            "locked": sum(any(inode.tables) for inode in self._inodes.values()),
            "waiting": len(self._waiting),
        }

    async def _look_who_is_live(self, nursery: trio.Nursery) -> None:
        """What sessions held that are over is free."""
        live = self._hosts.live()
        if live == self._live:
            return
        self._live = live
        for inode in self._inodes.values():
            for table in inode.tables:
                for session in table.sessions():
                    if not self._is_live(session):
                        table.release_session(session)
        if self._me == min(live):
            nursery.start_soon(self._inherit)

    async def _inherit(self) -> None:
        """Be the home of what sessions that are over were the home of, so that it is given up when
        nobody uses it."""
        for ino, session in await self._engine.view(_all_homes):
            if not self._is_live(session):
                with self._using(ino) as inode:
                    await self._find_home(ino, inode)

    def _idle(self, until_s: float) -> list[int]:
        """Of what we are the home though nobody has used it since then."""
        return [
            ino
            for ino, inode in self._inodes.items()
            if inode.is_home and inode.used_s <= until_s
            if not (inode.users or any(inode.tables))
        ]


class _Request(NamedTuple):
    """What a program asks for."""

    space: int
    lock: Lock
    ticket: int

    @property
    def packed(self) -> tuple[int, int, Packed]:
        """For the way to its home."""
        return self.space, self.ticket, _packed(self.lock)


class _Edge(NamedTuple):
    """Somebody waits for a lock that ``blocker`` holds."""

    ino: int
    session: int
    """Who waits, with the ticket."""
    ticket: int
    blocker: LockOwner


def _packed(lock: Lock) -> Packed:
    (session, number), *others = lock
    return [session, number, *others]


def _unpacked(packed: Packed) -> Lock:
    session, number, start, end, exclusive, pid = packed
    return Lock(LockOwner(session, number), start, end, bool(exclusive), pid)


# --- transactions ---


def _recorded_home(tx: ReadTransaction, ino: int) -> int:
    """0: nobody's."""
    return int.from_bytes(tx.get(keys.lock_home(ino)) or b"", "big")


def _all_homes(tx: ReadTransaction) -> list[tuple[int, int]]:
    return [
        (keys.number(key), int.from_bytes(value, "big"))
        for key, value in tx.range(*keys.all_of(b"L"))
    ]


def _take_over(tx: Transaction, ino: int, before: int, me: int) -> tuple[bool, bool]:
    """Whether we are the home now, and whether there was none before, so that nobody holds a
    lock."""
    home = _recorded_home(tx, ino)
    if home in (0, before):
        tx.put(keys.lock_home(ino), me.to_bytes(8, "big"))
    return home in (0, before), home == 0


def _give_up(tx: Transaction, inos: Iterable[int], me: int) -> None:
    for ino in inos:
        if _recorded_home(tx, ino) == me:
            tx.delete(keys.lock_home(ino))
