"""A host's session: its lease, and what it hears of others (functions: schema.sql).

A host renews its lease each second, and stops ``STOP_S`` after it *began* its last successful beat,
by a steady clock: long before its lease of ``LEASE_S`` ends by the database's. So when a lease has
ended its host answers nothing.
"""

import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

import trio

from aifs.core.errors import StoreBusy, StoreError, Unavailable
from aifs.meta.replicated import database as db
from aifs.meta.replicated.database import AnswerLost, MapDatabase
from aifs.meta.replicated.exchange import Exchange

log = logging.getLogger(__name__)

LEASE_S = 10.0
STOP_S = 5.0
BEAT_S = 1.0
PATIENCE_S = 10.0
"""How long a database that has crashed waits for the sessions that it knows."""

REOPEN_S = 0.02
"""Between two questions whether it goes on."""

_LOOK_MIN_S, _LOOK_MAX_S = 0.02, 0.5
"""Between two looks at which hosts have shown something, if none reports: doubled each time."""


def clock_s() -> float:
    """A clock that does not jump, and goes on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Member(NamedTuple):
    """A session that has not ended."""

    session: int
    """Its number."""
    host: int
    """The number of the host's name."""
    name: str
    """Of the host."""
    address: str
    """Where other hosts reach it."""
    age_s: float
    """Since it began."""
    lease_left_s: float
    """Below 0: the lease is over."""
    cursor: int
    """Its replica has the feed up to here, as its last beat said."""
    shown: int
    """So has its kernel."""
    joined: int
    """Ascends with joining; 0: it copies the map, and answers nobody yet."""

    @property
    def state(self) -> str:
        """As users are told."""
        if self.lease_left_s <= 0:
            return "silent"
        return "live" if self.joined else "joining"


def holder_of(members: Iterable[Member]) -> int:
    """The session with the role: the first that joined, never displaced; 0: none."""
    joined = [(one.joined, one.session) for one in members if one.joined]
    return min(joined, default=(0, 0))[1]


class Session:
    """The session of this host, from ``begin`` to ``end``. Used from one trio thread."""

    def __init__(
        self,
        database: MapDatabase,
        exchange: Exchange,
        name: str,
        number: int,
        host: int,
        head: int,
    ) -> None:
        self.name = name
        self.number = number
        self.host = host
        """The number of the host's name."""
        self.head = head
        """The last number of the feed that it has heard of."""
        self.cursor = 0
        """The replica has the feed up to here. The engine says so, as of ``shown``."""
        self.shown: int | None = None
        """So has the kernel; None: the host joins, and nobody waits for it."""
        self.members = 0
        """How often sessions had begun or ended, as it was heard last."""
        self.sure_until_s = 0.0
        """By ``clock_s``: until then views and transactions may go on. Not before a beat."""
        self.ended = ""
        """Why it has ended; empty: it goes on."""
        self._database = database
        self._exchange = exchange
        """The other hosts."""
        self._renewed_s = clock_s()
        """When the beat began that renewed the lease last."""
        self._beat_due_s = 0.0
        """When a joining host beats again, by ``clock_s``."""
        self._told: dict[int, int] = {}
        """What other sessions have said that they have shown."""
        self._news = trio.Event()
        """Set when that changes."""

    @classmethod
    async def begin(
        cls,
        database: MapDatabase,
        exchange: Exchange,
        name: str,
        address: str,
        former: int,
        cursor: int | None,
    ) -> "Session":
        """A new session for the host ``name``. ``former``: the number of its last one here, or 0.
        ``cursor``: its replica's place in the feed; None: it copies the map. Raises StoreBusy,
        within a lease's time, if another host has the name; Unavailable."""
        asking = secrets.token_hex(8)
        while True:
            base = db.NULL if cursor is None else db.of_bigint(cursor)
            ((status, number, host, head, other, left_s),) = await database.settles.repeat(
                db.BEGIN,
                asking.encode(),
                name.encode(),
                address.encode(),
                db.of_int(former),
                base,
                db.of_float(LEASE_S),
            )
            match db.to_int(status):
                case db.DONE:
                    numbers = map(db.to_int, (number, host, head))
                    return cls(database, exchange, name, *numbers)
                case db.TAKEN if (lease_left_s := db.to_float(left_s)) > 0:
                    raise StoreBusy(taken(name, (other or b"").decode(), lease_left_s))
                case db.TAKEN:  # it ends when it has been silent for a lease more, as we look on
                    await trio.sleep(BEAT_S)
                case db.RECOVERING:
                    await reopen(database, 0)
                    await trio.sleep(REOPEN_S)

    @classmethod
    async def resume(
        cls, database: MapDatabase, exchange: Exchange, name: str, number: int
    ) -> "Session":
        """The session of a daemon of this host that has died. Raises StoreError if it has ended;
        Unavailable."""
        session = cls(database, exchange, name, number, 0, 0)
        for one in await session.live():
            if (one.session, one.name) == (number, name) and one.joined:
                session.host, session.shown = one.host, one.shown
                return session
        raise StoreError(f"the session {number} of this host has ended meanwhile")

    def check(self) -> None:
        """Raises Unavailable if it has ended."""
        if self.ended:
            raise Unavailable(
                f"this host's session has ended ({self.ended}); unmount, and mount again"
            )

    async def beat(self) -> int:
        """Renew the lease; earlier commits are durable. DONE, or RECOVERING. Waits for the database
        as long as needed. Raises AnswerLost, Unavailable. The caller sets ``sure_until_s``, after
        it has heard of changes."""
        began_s = clock_s()
        ((status, head, members, reason),) = await self._database.settles.ask(
            db.BEAT,
            db.of_int(self.number),
            db.of_bigint(self.cursor),
            db.NULL if self.shown is None else db.of_bigint(self.shown),
            db.of_float(LEASE_S),
        )
        if db.to_int(status) == db.ENDED:
            self.ended = (reason or b"the database does not know it").decode()
            self.check()
        if db.to_int(status) == db.DONE:
            self.head, self._renewed_s = db.to_int(head), began_s
        self.members = db.to_int(members)
        return db.to_int(status)

    async def keep_joining(self) -> None:
        """Beat if due: for a host that joins, which takes long. Raises Unavailable."""
        if clock_s() >= self._beat_due_s:
            self._beat_due_s = clock_s() + BEAT_S
            with suppress(AnswerLost):
                await self.beat()

    async def keep(self, beat: Callable[[], Awaitable[None]]) -> None:
        """Call ``beat`` each second, until the session ends."""
        while not self.ended:
            next_s = trio.current_time() + BEAT_S
            try:
                await beat()
            except AnswerLost:
                continue
            except Unavailable as error:
                if not self.ended:
                    log.warning("metadata: %s", error)
            await trio.sleep_until(next_s)

    async def live(self) -> list[Member]:
        """All sessions that have not ended, with the smallest number first. Raises Unavailable."""
        return [
            Member(
                db.to_int(session),
                db.to_int(host),
                (name or b"").decode(),
                (address or b"").decode(),
                db.to_float(age_s),
                db.to_float(left_s),
                db.to_int(cursor),
                db.to_int(shown),
                db.to_int(joined),
            )
            for session, host, name, address, age_s, left_s, cursor, shown, joined in (
                await self._database.settles.repeat(db.MEMBERS)
            )
        ]

    @property
    def is_sure(self) -> bool:
        """Whether this host has its lease without doubt."""
        return not self.ended and clock_s() < self.sure_until_s

    def status(self) -> dict[str, Any]:
        """``lease_age_s``: since the start of the last renewing beat; ``lag`` and ``unshown``:
        changes told, not in the replica or not shown by the kernel."""
        shown = self.cursor if self.shown is None else self.shown
        return {
            "lease_age_s": round(clock_s() - self._renewed_s, 3),
            "lag": max(0, self.head - self.cursor),
            "unshown": max(0, self.head - shown),
        }

    @property
    def fault(self) -> str:
        """Why the database is not reached, as it was seen last; empty: it is."""
        return self._database.settles.fault

    async def end_silent(self) -> bool:
        """End sessions with ended leases, if ours had no break of a lease; whether there was one. A
        lost answer is not asked for again. Raises Unavailable."""
        with suppress(AnswerLost):
            ((count,),) = await self._database.settles.ask(
                db.END_SILENT, db.of_int(self.number), db.of_float(LEASE_S)
            )
            return db.to_int(count) > 0
        return False

    def note_shown(self, seq: int) -> None:
        """This host has shown the feed up to ``seq``. Does not block."""
        self.shown = seq
        self._exchange.note_shown(seq)

    def hear_shown(self, session: int, seq: int) -> None:
        """Another session has shown the feed up to ``seq``."""
        if seq > self._told.get(session, 0):
            self._told[session] = seq
            self._news.set()
            self._news = trio.Event()

    async def wait_shown(self, seq: int) -> None:
        """Wait until all other sessions have shown ``seq``, or their lease is over. Raises
        Unavailable."""
        waiting: set[int] | None = None
        look_s = _LOOK_MIN_S
        while True:
            self.check()
            if waiting is not None:
                waiting = {one for one in waiting if self._told.get(one, 0) < seq}
            if not waiting:
                self._exchange.ask(seq)
                rows = await self._database.commits.repeat(db.BEHIND, db.of_bigint(seq))
                waiting = {db.to_int(session) for (session,) in rows} - {self.number}
                waiting = {one for one in waiting if self._told.get(one, 0) < seq}
                if not waiting:
                    return
            with trio.move_on_after(look_s):
                await self._news.wait()
                continue
            waiting, look_s = None, min(2 * look_s, _LOOK_MAX_S)

    async def end(self, reason: str = "unmounted") -> None:
        """Nothing is asked for in its name any more. Raises Unavailable."""
        if not self.ended:
            await end_session(self._database, self.number, reason)
            self.ended = reason


def taken(name: str, address: str, lease_left_s: float) -> str:
    """The message for a second host of that name."""
    return (
        f"a host named {name} has the store mounted ({address}). If it is dead, try again in "
        f"{max(0.0, lease_left_s):.0f} s, when its lease is over; if it is another host, give one "
        "of them another host.name"
    )


async def reopen(database: MapDatabase, session: int) -> bool:
    """After a crash of the database: the session (0: none yet) has put its commits back. Whether
    the database goes on. Raises Unavailable."""
    ((is_open,),) = await database.settles.repeat(
        db.REOPEN, db.of_int(session), db.of_float(PATIENCE_S)
    )
    return is_open == b"\1"


async def end_session(database: MapDatabase, number: int, reason: str) -> bool:
    """End any session; whether it had not ended. Raises Unavailable."""
    ((done,),) = await database.settles.repeat(db.END, db.of_int(number), reason.encode())
    return done == b"\1"
