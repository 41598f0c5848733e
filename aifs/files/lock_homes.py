"""The host that grants the locks of an inode, and how that changes (docs/design/homes.md, Locks).

The *home* of an inode's locks is the first host to lock it. It grants them from its memory; ``L
ino`` in the map names its session. If it dies, another host takes the record over, and asks all
others which locks they hold, before it grants any.
"""

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

import trio

from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.waiting import HOST, waits_for
from aifs.files.lock_table import Lock, LockOwner, LockTable
from aifs.meta import keys
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.peers.peers import Peers

_log = logger(__name__)

FCNTL, FLOCK = 0, 1
"""The two spaces of locks, which know nothing of each other."""

SERVICE = "locks"
"""What hosts ask each other for, by this name: see ``Locks.serve``."""

NOT_HOME = "not home"
"""What a host answers that is not the home of the locks it is asked for."""

Packed = list[Any]
"""A lock on its way between hosts: its fields, those of its owner first."""

IDLE_S = 30.0
"""A home gives an inode up when it has had no lock for so long."""

_TICK_S = 0.5  # between two looks at which hosts are alive
_RETRY_S = 0.02


class LockHosts(Protocol):
    """The other hosts, as far as locks need them."""

    @property
    def session(self) -> int:
        """Our own."""

    def live(self) -> Set[int]:
        """The sessions that are not known to be over, ours among them, at one moment. A missing one
        was over then, or began later."""

    async def ask(self, session: int, request: Sequence[Any]) -> Any:
        """Have ``Locks.serve`` of another host answer, in JSON. Raises its errors, and Unavailable
        if it is unknown whether it was done. Cancelled here, the request is cancelled there, like
        all when the connection ends, before another one begins."""


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
        # Locks are waited for. A host that hangs loses its connection.
        endless = math.inf
        answer = await self._peers.call(name, SERVICE, request, session=session, timeout_s=endless)
        return answer.value


class InodeLocks:
    """What is known of the locks of one inode."""

    def __init__(self) -> None:
        self.tables = (LockTable(False), LockTable(True))
        """All locks of either space if we are their home, else those of our own session."""
        self.is_home = False
        """We are their home, and know all of them."""
        self.changing: trio.Event | None = None
        """We are becoming, or ceasing to be, their home; set when that is over."""
        self.asked = 0
        """How often a new home has asked for our locks: later answers of older homes do not
        count."""
        self.users = 0
        """Requests that are under way."""
        self.used_s = 0.0
        """When the last one was, of trio's clock."""
        self.closing = 0
        """Files of this host that are being closed, which may end locks."""
        self.closed = trio.Event()
        """Set when none is being closed any more."""
        self.last_handle: dict[LockOwner, int] = {}
        """By owner of fcntl(2) locks, the last handle by which it asked, until a close(2) releases
        them. An owner left without that handle has closed it unseen: it holds nothing."""

    def note_taken(self, handle: int, space: int, owner: LockOwner) -> None:
        """An owner of this host takes a lock by an open file."""
        if space == FCNTL:
            self.last_handle[owner] = handle

    def owners_left_by(self, handle: int) -> list[LockOwner]:
        """A handle is gone: whose fcntl(2) locks end by that. They are noted no more."""
        left = [owner for owner, by in self.last_handle.items() if by == handle]
        for owner in left:
            del self.last_handle[owner]
        return left


class LockHomes:
    """Of all inodes whose locks this host knows something of. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        hosts: LockHosts,
        serve: Callable[[int, Sequence[Any]], Awaitable[Any]],
    ) -> None:
        """``serve``: how we answer a session, our own, too."""
        self._engine = engine
        self._hosts = hosts
        self._serve = serve
        self._inodes: dict[int, InodeLocks] = {}
        """By number, while there is something to know of it."""
        self._live: Set[int] = frozenset()
        """The sessions that were live when that was last looked at."""

    @property
    def me(self) -> int:
        """Our session."""
        return self._hosts.session

    def begin_use(self, ino: int) -> InodeLocks:
        """What is known of the locks of an inode, which is kept until ``end_use``."""
        inode = self._inodes.setdefault(ino, InodeLocks())
        inode.users += 1
        return inode

    def end_use(self, ino: int) -> None:
        inode = self._inodes[ino]
        inode.users -= 1
        inode.used_s = trio.current_time()
        if not (inode.users or inode.is_home or any(inode.tables)):
            del self._inodes[ino]

    @contextmanager
    def using(self, ino: int) -> Iterator[InodeLocks]:
        """A request about the locks of an inode is under way."""
        try:
            yield self.begin_use(ino)
        finally:
            self.end_use(ino)

    def known(self, ino: int) -> InodeLocks | None:
        """What is known of an inode's locks, if anything is."""
        return self._inodes.get(ino)

    # --- asking hosts ---

    async def ask_home(
        self, ino: int, inode: InodeLocks, operation: str, *arguments: Any
    ) -> tuple[Any, int]:
        """The answer of the home of the inode's locks, and its session; waits until it is found.

        When this returns, no later home has asked what we hold: callers note the answer before they
        await anything.
        """
        while True:
            asked, request = inode.asked, [operation, ino, *arguments]
            home = self.me if inode.is_home else await self.find_home(ino, inode)
            if home == self.me:
                answer = await self._serve(self.me, request)
            else:
                try:
                    answer = await self._hosts.ask(home, request)
                except FsError as error:  # it has died, or hangs, or has too much to do
                    _log.debug("locks: inode %d at session %d: %s", ino, home, error)
                    answer = NOT_HOME
                if inode.asked != asked:
                    answer = NOT_HOME  # any more
            if answer != NOT_HOME:
                return answer, home
            with waits_for(HOST, "that has the locks of the file"):
                await trio.sleep(_RETRY_S)

    async def ask(self, session: int, request: list[Any]) -> Any:
        """What a host answers; None if it does not."""
        if session == self.me:
            return await self._serve(session, request)
        try:
            return await self._hosts.ask(session, request)
        except FsError:
            return None

    # --- which host is the home ---

    def at_home(self, ino: int) -> InodeLocks | None:
        """The lock table of the inode, if we are its home and our session certainly goes on. Does
        not suspend."""
        inode = self._inodes.get(ino)
        return inode if inode and inode.is_home and self._engine.is_sure else None

    async def recorded(self, ino: int) -> int:
        """The session of the home on record, or 0. Waits until our own session certainly goes
        on."""
        return await self._engine.view(_recorded_home, ino)

    async def find_home(self, ino: int, inode: InodeLocks) -> int:
        """Its session; if it is ours, nothing has been awaited since that was so."""
        while True:
            recorded = await self.recorded(ino)
            if inode.changing is not None:
                await inode.changing.wait()
            elif inode.is_home:
                return self.me
            elif recorded and recorded != self.me and self.is_live(recorded):
                return recorded
            else:
                await self._become_home(ino, inode, recorded)

    async def _become_home(self, ino: int, inode: InodeLocks, before: int) -> None:
        """Become the home unless another host is. ``before``: the ended session of the home before;
        0: there was none; our own: we were interrupted."""
        inode.changing = trio.Event()
        try:
            is_ours, is_new = await self._engine.transact(_take_over, ino, before, self.me)
            if is_ours and not is_new:
                await self._learn(ino, inode)
            inode.is_home = is_ours
        finally:
            inode.changing.set()
            inode.changing = None

    async def _learn(self, ino: int, inode: InodeLocks) -> None:
        """Ask all live hosts that could hold locks for them, until they answer, or are over."""
        inode.asked += 1
        for session in self._hosts.live() - {self.me}:
            held = await self._ask_surely(session, ["held", ino]) or ((), ())
            for table, locks in zip(inode.tables, held, strict=True):
                table.restate(session, map(unpacked, locks if self.is_live(session) else ()))

    async def _ask_surely(self, session: int, request: list[Any]) -> Any:
        """The answer of a host, asked until it comes; None if the session has ended."""
        while self.is_live(session):
            try:
                return await self._hosts.ask(session, request)
            except FsError as error:
                _log.debug("locks: %s of session %d: %s", request[0], session, error)
                await trio.sleep(_RETRY_S)
        return None

    async def restate(self) -> None:
        """Tell all homes what our programs hold, and that they wait for nothing: grants to a daemon
        that has died may not have been heard."""
        held = [(ino, self._held_of(inode)) for ino, inode in self._inodes.items()]
        for session in self._hosts.live() - {self.me}:
            await self._ask_surely(session, ["restated", held])

    async def restated(self, session: int, held: Sequence[Sequence[Any]]) -> bool:
        """As a home, hear of ``restate``."""
        named = {ino: tables for ino, tables in held}
        for ino, inode in self._inodes.items():
            for table, locks in zip(inode.tables, named.get(ino, ((), ())), strict=True):
                if inode.is_home:
                    table.restate(session, map(unpacked, locks))
        return True

    def _held_of(self, inode: InodeLocks) -> list[list[Packed]]:
        """The locks that programs of this host hold, by table."""
        return [[packed(lock) for lock in table.held(self.me)] for table in inode.tables]

    async def _give_up(self, inos: list[int]) -> None:
        """Cease to be the home of inodes without locks or requests."""
        if not inos:
            return
        for ino in inos:
            self._inodes[ino].changing, self._inodes[ino].is_home = trio.Event(), False
        try:
            await self._engine.transact(_give_up, inos, self.me)
        finally:
            for ino in inos:
                with self.using(ino) as inode:
                    assert inode.changing is not None
                    inode.changing.set()
                    inode.changing = None

    def is_live(self, session: int) -> bool:
        """Whether it is not known to be over."""
        live = self._hosts.live()
        return session in live or session > max(live, default=0)

    async def held(self, session: int, ino: int) -> list[list[Packed]]:
        """To a new home: what our programs hold. From now on we ask no other."""
        with self.using(ino) as inode:
            while await self.recorded(ino) != session:
                if not self.is_live(session):
                    raise Unavailable("the session is over")
                await trio.sleep(_RETRY_S)  # our replica is behind
            inode.asked += 1
            return self._held_of(inode)

    # --- in the background ---

    async def run(self) -> None:
        """Look after them until cancelled."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._look_who_is_live(nursery)
                await self.give_up_idle(trio.current_time() - IDLE_S)
                await trio.sleep(_TICK_S)

    def status(self) -> dict[str, int]:
        """Of how many inodes we are the home, and how many have locks or waiters here."""
        return {
            "homes": sum(inode.is_home for inode in self._inodes.values()),
            "locked": sum(any(inode.tables) for inode in self._inodes.values()),
        }

    async def _look_who_is_live(self, nursery: trio.Nursery) -> None:
        """Free the locks of sessions that are over."""
        live = self._hosts.live()
        if live == self._live:
            return
        self._live = live
        for inode in self._inodes.values():
            for table in inode.tables:
                for session in table.sessions():
                    if not self.is_live(session):
                        table.restate(session)
        if self.me == min(live):
            nursery.start_soon(self._inherit)

    async def give_up_idle(self, until_s: float) -> None:
        """Be the home no more of what has no lock, and had no request since then."""
        await self._give_up(
            [
                ino
                for ino, inode in self._inodes.items()
                if inode.is_home and inode.used_s <= until_s
                if not (inode.users or any(inode.tables))
            ]
        )

    async def _inherit(self) -> None:
        """Become the home after sessions that are over, so that unused records are given up."""
        for ino, session in await self._engine.view(_all_homes):
            if not self.is_live(session):
                with self.using(ino) as inode:
                    await self.find_home(ino, inode)


def packed(lock: Lock) -> Packed:
    (session, number), *others = lock
    return [session, number, *others]


def unpacked(fields: Packed) -> Lock:
    session, number, start, end, exclusive, pid = fields
    return Lock(LockOwner(session, number), start, end, bool(exclusive), pid)


# --- transactions ---


def _recorded_home(tx: ReadTransaction, ino: int) -> int:
    return int.from_bytes(tx.get(keys.lock_home(ino)) or b"", "big")


def _all_homes(tx: ReadTransaction) -> list[tuple[int, int]]:
    return [
        (keys.number(key), int.from_bytes(value, "big"))
        for key, value in tx.range(*keys.all_of(b"L"))
    ]


def _take_over(tx: Transaction, ino: int, before: int, me: int) -> tuple[bool, bool]:
    """Whether we are the home now, and whether nobody was before, so that no locks are held."""
    home = _recorded_home(tx, ino)
    if home in (0, before):
        tx.put(keys.lock_home(ino), me.to_bytes(8, "big"))
    return home in (0, before), home == 0


def _give_up(tx: Transaction, inos: Iterable[int], me: int) -> None:
    for ino in inos:
        if _recorded_home(tx, ino) == me:
            tx.delete(keys.lock_home(ino))
