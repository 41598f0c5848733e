"""The engine of a host in a cluster: its replica of the map, and commits to the database. The
design and its proofs are in docs/hosts.md.

Views read the replica. A transaction's function runs on the replica and is recorded; what it has
done is sent to the database with what it has read, and is applied to the replica when it has been
committed there. Transactions that come while a commit is under way go together in the next one.

The order of things, which all methods keep:

* The replica has the rows of the feed up to ``session.cursor``, whole and in their order, and
  nothing else (H2). The cursor is recorded in it in the transaction that applies the row.
* Between the application of a row, the calls of taps and followers, and the new ``seq`` no task
  runs.
* Rows that are not known to be durable in the database are kept, to put them back after a crash of
  the database (``_recover``).
"""

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from typing import Any, NamedTuple

import trio

from aifs.core import faults
from aifs.core.errors import NoSpace, Unavailable
from aifs.meta import journal
from aifs.meta.kv import Engine, Follower, ReadTransaction, Result, Tap, patched
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledView, Writes
from aifs.meta.recording import Recording
from aifs.meta.replicated import database as db
from aifs.meta.replicated.database import ANSWER_S, AnswerLost, Connection, MapDatabase, Row
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.sessions import REOPEN_S, STOP_S, Session, clock_s, reopen

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Transactions that go in one commit."""

COPY_PAIRS = 2000
"""Of the map that a host which joins writes to its replica at a time."""

FETCH_ROWS = 512
"""Rows of the feed that are asked for at a time."""

KEEP_ROWS = 100_000
"""Rows of the feed that are kept for hosts that come back."""

TRIM_S = 60.0

GAP_S = 0.005
"""How long rows that are missing between others are waited for before the database is asked."""

_OLD = "the database lacks changes that this host has; was it restored from an old copy?"

_NUMBER_GAP = 1 << 24
"""More than the rows of others that are applied while one commit is under way: what it makes is
numbered behind all that is read meanwhile.
"""

_CURSOR_KEY = b"\0cursor"
_FIRST_KEY = _CURSOR_KEY + b"\0"
"""No key of the map is below: so ranges leave the cursor out."""
_CURSOR = struct.Struct("<QIQI")

BEFORE_COMMIT = faults.declare("hosts.commit.before", "a commit is about to be sent")
COMMITTED = faults.declare(
    "hosts.commit.done", "the database has committed; the replica has not heard of it"
)
APPLIED = faults.declare(
    "hosts.commit.applied", "the replica has its own change; nobody has been told"
)
COPYING = faults.declare("hosts.copy.part", "part of the map has been copied")


_END = (
    "select coalesce((select concat_ws(' ', h.seq, coalesce(f.session, 0), coalesce(f.number, 0))"
    " from aifs.head h left join aifs.feed f on f.seq = h.seq), '')"
)
"""The last row of the feed: its number, session and number of its commit; empty: after a crash."""


class Cursor(NamedTuple):
    """Up to where a replica has the feed: the record of ``_CURSOR_KEY``, which no other store has.

    Little-endian: u64 number of the row, u32 session and u64 number of its commit (both 0: the feed
    was empty), u32 session of the host.
    """

    seq: int
    session: int
    number: int
    own: int

    def encode(self) -> bytes:
        return _CURSOR.pack(*self)


class _Call:
    """A transaction that somebody waits for."""

    __slots__ = ("args", "error", "function", "is_done", "result", "turn")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.result: Any = None
        self.error: BaseException | None = None
        self.is_done = False
        self.turn = trio.Event()
        """Set when it is done, or when it is its waiter's turn to commit what waits."""

    def run(self, tx: "_Attempt") -> None:
        tx.mark()
        self.error = None
        try:
            self.result = self.function(tx, *self.args)
        except Exception as error:
            tx.undo()
            self.error = error

    def end(self, error: BaseException | None = None) -> None:
        self.error = error or self.error
        self.is_done = True
        self.turn.set()


class _View(LeveledView):
    __slots__ = ()

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        return super().range(max(start, _FIRST_KEY), end, limit)


class _Attempt(Recording):
    __slots__ = ()

    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        return super().range(max(start, _FIRST_KEY), end, limit)


class ReplicatedEngine(Engine):
    """Made by ``join``. ``local`` is the replica, which this engine owns."""

    def __init__(
        self,
        local: LmdbEngine,
        database: MapDatabase,
        session: Session,
        exchange: Exchange,
    ) -> None:
        """``exchange``: is told our rows, and what we have shown, and tells others'."""
        self.local = local
        """The replica."""
        self.session = session
        """The host's; it knows the cursor."""
        self.host = session.host
        self.recovered = local.recovered
        self.seq = 1
        """Ascends with each row, and behind what is under way."""
        self.durable_seq = 1
        """What a beat has made durable."""
        self._database = database
        """The truth."""
        self._exchange = exchange
        self._own_row = 0
        """Number of the last row of the feed that is ours and applied."""
        self._commits = 0
        """Number of the last commit that was asked for."""
        self._waiting: deque[_Call] = deque()
        """Transactions that no commit has taken yet."""
        self._is_led = False
        """Whether somebody commits what waits, or is about to."""
        self._in_flight = 0
        """The number of the last transaction of the commit that is under way."""
        self._settling: trio.Event | None = None
        """Set at the end of a barrier's beat; None: none is under way."""
        self._follower: Follower | None = None
        """Is told the rows of others."""
        self._tell_sure: Callable[[float], None] | None = None
        """Is told ``session.sure_until_s``."""
        self._unshown: deque[tuple[int, int]] = deque()
        """Of changes that the follower has not shown yet, their ``seq`` and their rows."""
        self._unsettled: deque[Row] = deque()
        """Applied rows that the database may lose in a crash."""
        self._early: dict[int, Row] = {}
        """Rows that were pushed before others that come before them."""
        self._gap = trio.Event()
        """Set when there are early rows."""
        self._recovering = trio.Lock()
        """Of who puts back what the database has lost."""
        self._renewing = trio.Lock()
        """Of who renews the lease."""
        self._failure = ""
        """Why nothing goes on."""
        exchange.begin(session.number, self.hear, session.hear_shown)

    @property
    def short_of_space(self) -> bool:  # type: ignore[override]
        return self.local.short_of_space

    def listen(self, tap: Tap) -> None:
        """As LmdbEngine's, of all changes of the replica."""
        self.local.listen(tap)

    def read_damaged_as(self, value: bytes | None) -> None:
        self.local.read_damaged_as(value)

    def follow(self, follower: Follower) -> None:
        self._follower = follower

    async def sure(self) -> None:
        if clock_s() >= self.session.sure_until_s:
            await self.renew()
        self._check()

    @property
    def is_sure(self) -> bool:
        return not self._failure and self.session.is_sure

    def tell_sure(self, tell: Callable[[float], None]) -> None:
        self._tell_sure = tell
        tell(self.session.sure_until_s)

    def _be_sure_until(self, until_s: float) -> None:
        self.session.sure_until_s = until_s
        if self._tell_sure is not None:
            self._tell_sure(until_s)

    def note_shown(self, seq: int) -> None:
        while self._unshown and self._unshown[0][0] <= seq:
            self.session.note_shown(self._unshown.popleft()[1])
        if not self._unshown:
            self.session.note_shown(self.session.cursor)

    # --- transactions -----------------------------------------------------------------------------

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        await self.sure()
        return function(_View(*self.local.begin(), self.seq), *args)

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        self._check()
        if self.local.short_of_space and getattr(function, "grows", False):
            raise NoSpace("the filesystem of the metadata replica is full")
        call = _Call(function, args)
        self._waiting.append(call)
        if self._is_led:
            try:
                await call.turn.wait()
            except trio.Cancelled:
                if call in self._waiting:  # nothing of it has been sent
                    self._waiting.remove(call)
                    if call.turn.is_set():
                        self._hand_over()
                    raise
                with trio.CancelScope(shield=True):
                    await call.turn.wait()
        if not call.is_done:
            self._is_led = True
            try:
                if clock_s() >= self.session.sure_until_s:
                    await self.renew()
                with trio.CancelScope(shield=True):
                    await self._commit_waiting()
            finally:
                if not call.is_done:
                    self._waiting.remove(call)
                self._hand_over()
        if call.error is not None:
            raise call.error
        return call.result

    def _hand_over(self) -> None:
        """Whoever waits longest commits next."""
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._is_led = False

    async def _commit_waiting(self) -> None:
        """Run and commit the first of the transactions that wait, as one."""
        taken: list[_Call] = []
        fault: BaseException | None = None
        conflicts = 0
        try:
            while True:
                # Who was refused twice goes alone: much of a large batch may be what others change.
                count = 1 if conflicts > 1 else MAX_BATCH
                while self._waiting and len(taken) < count:
                    taken.append(self._waiting.popleft())
                while len(taken) > count:
                    self._waiting.appendleft(taken.pop())
                self._check()  # not before: somebody has to be told
                attempt = self._run_all(taken)
                if not attempt.writes:
                    self._run_as_views(taken)
                    break
                if await self._commit(attempt):
                    break
                conflicts += 1
        except BaseException as error:
            fault = error
        for call in taken:
            call.end(fault)
        if fault is not None and not isinstance(fault, Exception):
            raise fault

    def _run_all(self, calls: Iterable[_Call]) -> _Attempt:
        """Each sees what those before it have done. Does not suspend."""
        attempt = _Attempt(*self.local.begin(), self.seq + _NUMBER_GAP, host=self.host)
        for call in calls:
            attempt.seq += 1
            call.run(attempt)
        self._in_flight = attempt.seq
        return attempt

    def _run_as_views(self, calls: Iterable[_Call]) -> None:
        """They have changed nothing, so nothing is numbered behind what they have read: run again
        they tell it with the number that views have now. Does not suspend.
        """
        attempt = _Attempt(*self.local.begin(), self.seq, host=self.host)
        for call in calls:
            call.run(attempt)

    async def _commit(self, attempt: _Attempt) -> bool:
        """Have the database commit it, and apply it; False if it is refused, as others have changed
        what it has read: their changes are applied then. Raises Unavailable.
        """
        self._commits += 1
        number, changes = self._commits, _Changes(attempt)
        parameters = (
            db.of_int(self.session.number),
            db.of_bigint(number),
            db.of_bigint(self.session.cursor),
            db.of_keys(list(attempt.reads)),
            db.of_keys(list(attempt.loose - attempt.reads)),
            db.of_keys([start for start, _ in attempt.ranges]),
            db.of_keys([end for _, end in attempt.ranges]),
            *changes.encode(),
        )
        while True:
            self._check()
            faults.reach(BEFORE_COMMIT)
            try:
                head, *rows = await self._database.commits.ask(db.COMMIT, *parameters)
            except AnswerLost:  # perhaps it is done: it is asked for again, and counts once
                continue
            match db.to_int(head[0]):
                case db.LAPSED:
                    self._be_sure_until(0.0)
                    await self.renew()
                case db.RECOVERING:
                    await self._recover()
                case db.TRIMMED:
                    self._fail(_OLD)
                case db.ENDED:
                    await self._hear_end()
                case status:
                    faults.reach(COMMITTED)
                    self.hear([db.to_row(row) for row in rows])
                    seq = db.to_int(head[1])
                    if status == db.CONFLICT or self.session.cursor >= seq - 1:
                        break
                    # The answer left rows out. A crash may take the commit while they are fetched:
                    # so it is asked for again then.
                    await self.catch_up(seq - 1)
        if status == db.CONFLICT:
            return False
        if self.session.cursor < seq:
            row = changes.row(seq, self.session.number, number, _View(*self.local.begin(), 0))
            self.hear([row])
            faults.reach(APPLIED)
            self._exchange.announce(row)
        return True

    # --- the feed ---------------------------------------------------------------------------------

    def hear(self, rows: Iterable[Row]) -> None:
        """Rows of the feed, from the database, or pushed by a host whose session lives; in any
        order. Those that are next are applied. Does not block.
        """
        if self._failure:
            return
        for row in rows:
            if row.seq > self.session.cursor:
                self._early[row.seq] = row
        while (next_row := self._early.pop(self.session.cursor + 1, None)) is not None:
            self._apply(next_row)
        if self._early:
            cursor = self.session.cursor
            self._early = {seq: row for seq, row in self._early.items() if seq > cursor}
            self._gap.set()

    def _apply(self, row: Row) -> None:
        session = self.session
        writes: Writes = dict(zip(row.keys, row.values, strict=True))  # type: ignore[arg-type]
        writes[_CURSOR_KEY] = Cursor(row.seq, row.session, row.number, session.number).encode()
        try:
            self.local.apply(writes)
        except (NoSpace, Unavailable) as error:
            self._fail(f"the replica takes no changes: {error}")
            return
        session.cursor = row.seq
        self._unsettled.append(row)
        if row.session == session.number:
            # Views from now on are numbered behind what these transactions have been told.
            self.seq = max(self.seq + 1, self._in_flight)
            self._own_row = row.seq
        else:
            self.seq += 1
            if self._follower is not None:
                del writes[_CURSOR_KEY]
                self._unshown.append((self.seq, row.seq))
                self._follower(writes)
        if not self._unshown:
            session.note_shown(row.seq)

    async def catch_up(self, seq: int | None = None) -> None:
        """Ask the database for the feed up to there, or to its end, and apply it. It may have lost
        its end meanwhile: then up to where it ends now. Raises Unavailable.
        """
        while seq is None or self.session.cursor < seq:
            self._check()
            head, *rows = await self._database.settles.repeat(
                db.FETCH, db.of_bigint(self.session.cursor), db.of_int(FETCH_ROWS)
            )
            match db.to_int(head[0]):
                case db.RECOVERING:
                    await self._recover()
                case db.TRIMMED:
                    self._fail("this host has missed changes that nobody has any more")
                case _:
                    self.hear([db.to_row(row) for row in rows])
                    end = db.to_int(head[1])
                    seq = end if seq is None else min(seq, end)

    async def _fill_gaps(self) -> None:
        while True:
            await self._gap.wait()
            self._gap = trio.Event()
            await trio.sleep(GAP_S)
            if self._early:
                with suppress(Unavailable):  # whoever uses the engine hears of it
                    missing = min(self._early) - 1
                    await self.catch_up(missing)
                    self.hear(())
                    if self.session.cursor < missing:
                        self._early.clear()  # the feed has no such rows (any more)

    # --- the session ------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises Unavailable if nothing goes on."""
        if self._failure:
            raise Unavailable(self._failure)
        self.session.check()

    def _fail(self, reason: str) -> None:
        if not self._failure:
            self._failure = f"metadata: {reason}; unmount, and mount again"
            log.error("%s", self._failure)

    async def _hear_end(self) -> None:
        """The database says that the session has ended: why. Raises Unavailable."""
        with suppress(AnswerLost):
            await self.session.beat()
        self._check()

    async def renew(self) -> None:
        """Wait until the lease is sure. Raises Unavailable."""
        while clock_s() >= self.session.sure_until_s:
            self._check()
            async with self._renewing:
                if clock_s() >= self.session.sure_until_s:
                    with suppress(AnswerLost):
                        await self._beat()

    async def _keep_renewed(self) -> None:
        if self._failure:  # nobody may wait for a host that hears no more
            await trio.sleep(STOP_S)  # its kernel forgets by itself until then
            await self.session.end(self._failure)
            return
        async with self._renewing:
            await self._beat()

    async def _beat(self) -> None:
        """Renew the lease, and hear what is new. What has been applied before is durable then.
        Raises AnswerLost, Unavailable.
        """
        began_s, seq, cursor = clock_s(), self.seq, self.session.cursor
        if await self.session.beat() == db.RECOVERING:
            await self._recover()
            return
        if self.session.head < cursor:
            self._fail(_OLD)
            self._check()
        while self._unsettled and self._unsettled[0].seq <= cursor:
            self._unsettled.popleft()
        self.durable_seq = max(self.durable_seq, seq)
        # Who was silent for long may have missed what others have shown to all but this host: until
        # the beat counted, which is after it has looked at the head. So that is asked for again.
        is_late = clock_s() >= self.session.sure_until_s
        await self.catch_up(None if is_late else self.session.head)
        self._be_sure_until(began_s + STOP_S)

    async def barrier(self, seq: int | None = None) -> None:
        target = self.seq if seq is None else seq
        while self.durable_seq < target:
            self._check()
            if self._settling is not None:
                await self._settling.wait()  # perhaps begun too early for us
            else:
                self._settling = trio.Event()
                try:
                    with suppress(AnswerLost):
                        await self._beat()
                finally:
                    self._settling.set()
                    self._settling = None

    async def shown(self, of_all: bool = False) -> None:
        self._check()
        await self.session.wait_shown(self.session.cursor if of_all else self._own_row)

    async def _recover(self) -> None:
        """The database has crashed, and may have lost its last commits: put back those that we
        have, and wait until all have. Raises Unavailable.
        """
        link = self._database.settles
        async with self._recovering:
            while True:
                self._check()
                try:
                    ((last,),) = await link.ask(db.LAST)
                    for row in list(self._unsettled):
                        if row.seq > db.to_int(last):
                            await link.ask(
                                db.RESTORE,
                                db.of_int(self.session.number),
                                db.of_bigint(row.seq),
                                db.of_int(row.session),
                                db.of_bigint(row.number),
                                db.of_int(row.absolute),
                                db.of_keys(row.keys),
                                db.of_keys(row.values),
                            )
                except AnswerLost:
                    continue
                if not await reopen(self._database, self.session.number):
                    await trio.sleep(REOPEN_S)
                    continue
                self._early.clear()  # of what the database has lost nothing may come later
                cursor = await _cursor_of(self.local)
                assert cursor is not None
                match await _look_up(self._database, cursor):
                    case db.DONE:
                        return
                    case db.RECOVERING:  # it has crashed again
                        continue
                    case _:  # what this host has nobody could put back: a standby was behind
                        self._fail(_OLD)

    # --- life -------------------------------------------------------------------------------------

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.local.run)
            nursery.start_soon(self.session.keep, self._keep_renewed)
            nursery.start_soon(self._fill_gaps)
            nursery.start_soon(self._keep_trimmed)

    async def _keep_trimmed(self) -> None:
        """The host whose session is the oldest one trims the feed."""
        while True:
            await trio.sleep(TRIM_S)
            with suppress(Unavailable):
                if (await self.session.live())[0].session == self.session.number:
                    await self._database.settles.repeat(db.TRIM, db.of_int(KEEP_ROWS))

    def close(self) -> None:
        """Ends the session, too. Raises Unavailable if something that was answered as done is not
        on stable storage.
        """
        self._database.close()
        try:
            if not self.session.ended:
                self._database.end_now(self.session.number, "unmounted")
                self.session.ended = "unmounted"
        except Unavailable as error:
            if self._unsettled:
                raise
            log.warning("metadata: %s; this host's lease ends by itself", error)
        finally:
            self.local.close()

    def abandon(self) -> None:
        """Let go of everything, as the death of the process would."""
        self._database.close()
        self.local.abandon()


class _Changes:
    """What a commit changes, in the order of the feed."""

    def __init__(self, attempt: _Attempt) -> None:
        relative = attempt.relative
        absolute = [item for item in attempt.writes.items() if item[0] not in relative]
        self._puts = [item for item in absolute if item[1] is not None]
        self._keys = [key for key, _ in self._puts]
        self._keys += [key for key, value in absolute if value is None]
        self._values = [value for _, value in self._puts]
        self._values += [None] * (len(self._keys) - len(self._values))
        self._adds = [(key, one) for key, one in relative.items() if isinstance(one, int)]
        self._patches = [
            (key, *patch)
            for key, patches in relative.items()
            if not isinstance(patches, int)
            for patch in patches
        ]

    def encode(self) -> tuple[bytes, ...]:
        """The parameters of ``commit`` from ``puts`` on."""
        return (
            db.of_int(len(self._puts)),
            db.of_keys(self._keys),
            db.of_keys(self._values),
            db.of_keys([key for key, _ in self._adds]),
            db.of_bigints([delta for _, delta in self._adds]),
            db.of_keys([key for key, _, _ in self._patches]),
            db.of_ints([offset for _, offset, _ in self._patches]),
            db.of_keys([part for _, _, part in self._patches]),
        )

    def row(self, seq: int, session: int, number: int, now: ReadTransaction) -> Row:
        """The row that the database has made of it, from what the map was before: ``now``."""
        made: dict[bytes, bytes] = {}
        keys: list[bytes | None] = [*self._keys]
        values: list[bytes | None] = [*self._values]
        for key, delta in self._adds:
            keys.append(key)
            values.append((now.counter(key) + delta).to_bytes(8, "little", signed=True))
        for key, offset, part in self._patches:
            made[key] = patched(made.get(key) or now.get(key), offset, part)
            keys.append(key)
            values.append(made[key])
        return Row(seq, session, number, len(self._keys), keys, values)


# --- joining --------------------------------------------------------------------------------------


async def join(
    local: LmdbEngine,
    database: MapDatabase,
    name: str,
    address: str,
    exchange: Exchange | None = None,
) -> ReplicatedEngine:
    """Begin a session for the host ``name``, and bring its replica up to date: by the feed, if it
    goes back so far, else by a copy of the whole map. ``local`` is the engine's to close then.
    Without an ``exchange`` hosts hear of each other by the database alone.

    Raises StoreBusy if another host has the name; StoreError if the database is none of ours;
    Unavailable.
    """
    await database.require_schema()
    found = await _cursor_of(local)
    exchange = exchange or Exchange(None)
    former, base = (found.own, found.seq) if found else (0, None)
    session = await Session.begin(database, exchange, name, address, former, base)
    engine = ReplicatedEngine(local, database, session, exchange)
    try:
        if found is None or await _look_up(database, found) != db.DONE:
            found = await _copy_map(local, database, session)
        local.apply({_CURSOR_KEY: found._replace(own=session.number).encode()})
        session.cursor = session.shown = found.seq
        await engine.renew()
    except BaseException:
        with trio.CancelScope(shield=True), trio.move_on_after(ANSWER_S), suppress(Unavailable):
            await session.end("it could not join")
        raise
    return engine


async def _cursor_of(local: LmdbEngine) -> Cursor | None:
    """None: it is not the replica of anything."""
    record = await local.view(lambda tx: tx.get(_CURSOR_KEY))
    return Cursor._make(_CURSOR.unpack(record)) if record else None


async def _look_up(database: MapDatabase, cursor: Cursor) -> int:
    """DONE if the feed goes on from there: the row of the cursor is there, and the same. TRIMMED if
    it does not; RECOVERING if that is not known yet.
    """
    base = cursor.seq - 1 if cursor.session else cursor.seq
    head, *rows = await database.settles.repeat(db.FETCH, db.of_bigint(base), db.of_int(1))
    status = db.to_int(head[0])
    if status == db.DONE:
        if cursor.seq > db.to_int(head[1]):
            return db.TRIMMED
        if cursor.session:
            row = db.to_row(rows[0])
            if (row.session, row.number) != (cursor.session, cursor.number):
                return db.TRIMMED
    return status


async def _copy_map(local: LmdbEngine, database: MapDatabase, session: Session) -> Cursor:
    """Replace what the replica holds by the map as it is in the database now."""
    while True:
        log.info("metadata: copying the map from the database")
        await _clear(local, session)
        connection = None
        try:
            connection = await database.connect()
            await connection.script(
                "begin isolation level repeatable read read only; set local statement_timeout = 0"
            )
            end = (await connection.value(_END)).split()
            if end:
                await _copy_pairs(local, connection, session)
                seq, author, number = map(int, end)
                return Cursor(seq, author, number, session.number)
        except AnswerLost as error:
            log.info("metadata: copying is begun anew: %s", error)
        finally:
            if connection is not None:
                connection.close()
        await reopen(database, session.number)
        await trio.sleep(REOPEN_S)


async def _copy_pairs(local: LmdbEngine, connection: Connection, session: Session) -> None:
    writes: Writes = {}
    async with aclosing(connection.copy_pairs("select key, value from aifs.map")) as pairs:
        async for key, value in pairs:
            writes[key] = value
            if len(writes) == COPY_PAIRS:
                await _write(local, writes, session)
                writes = {}
                faults.reach(COPYING)
    await _write(local, writes, session)


async def _clear(local: LmdbEngine, session: Session) -> None:
    local.apply({_CURSOR_KEY: None})
    while True:
        pairs = await local.view(lambda tx: list(tx.range(b"\0", b"\xff" * 8, COPY_PAIRS)))
        if not pairs:
            return
        await _write(local, {key: None for key, _ in pairs}, session)


async def _write(local: LmdbEngine, writes: Writes, session: Session) -> None:
    await session.keep_joining()
    if writes:
        local.apply(writes)
    if local.journal_bytes > journal.SEGMENT_BYTES >> 1:
        await local.commit()
