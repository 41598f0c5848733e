"""The engine of a host in a cluster: its replica of the map, and commits to the database. The
design and its proofs are in docs/design/replicated.md.

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
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import NoSpace, Unavailable
from aifs.core.waiting import HOST, JOURNAL, waits_for
from aifs.meta import keys
from aifs.meta.delegations import Delegate, decode_delegate, find_covered
from aifs.meta.kv import Engine, Follower, Result, Tap, Transaction, answered_by
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import Writes
from aifs.meta.replicated import database as db
from aifs.meta.replicated.ahead import Ahead, Changes, ChangeSet, changes_of, told
from aifs.meta.replicated.database import AnswerLost, MapDatabase, Row
from aifs.meta.replicated.exchange import Exchange
from aifs.meta.replicated.held import Held
from aifs.meta.replicated.replica import CURSOR_KEY, Attempt, Cursor, View, cursor_of, look_up
from aifs.meta.replicated.sessions import (
    BEAT_S,
    LEASE_S,
    REOPEN_S,
    STOP_S,
    Session,
    clock_s,
    reopen,
)

log = logging.getLogger(__name__)

MAX_BATCH = 64
"""Transactions that go in one commit."""

FETCH_ROWS = 512
"""Rows of the feed that are asked for at a time."""

TOLD_AGAIN = 1000
"""How many rows before what a daemon has shown are told to the kernel again after its death: of
these it may still keep pages (Following), and beats say what was shown only each second."""

KEEP_ROWS = 100_000
"""Rows of the feed that are kept for hosts that come back."""

TRIM_S = 60.0

GAP_S = 0.005
"""How long rows that are missing between others are waited for before the database is asked."""

MISSES = 8
"""After so many transactions in a row that cannot be put ahead, as many are not tried: trying runs
each twice."""

SHIP_S = 0.01
"""Pause between ships, unless a task waits: a commit a change would cost all hosts more."""

ASK_AGAIN_S = 0.1
"""Between two questions to a host that has a directory and does not answer."""

_OLD = "changes that this host has are missing in the database; was it restored from an old copy?"

_NUMBER_GAP = 1 << 24
"""Numbers skipped by a commit: more than others' rows applied while it is under way."""

BEFORE_COMMIT = faults.declare("hosts.commit.before", "a commit is about to be sent")
COMMITTED = faults.declare(
    "hosts.commit.done", "the database has committed; the replica has not heard of it"
)
APPLIED = faults.declare(
    "hosts.commit.applied", "the replica has its own change; nobody has been told"
)
AHEAD = faults.declare(
    "hosts.ahead.applied", "a change is in the replica alone; nobody has been told"
)
GIVEN_UP = faults.declare(
    "hosts.recall.given",
    "a delegation is given up; the host that needs the directory has not been told",
)


class _Call:
    """A transaction that somebody waits for."""

    __slots__ = (
        "args",
        "changes",
        "error",
        "foreign",
        "function",
        "is_done",
        "result",
        "turn",
        "unique",
    )

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.function = function
        self.args = args
        self.unique = answered_by(function)
        """The kernel's number of the request that it does all of, if it does; else 0."""
        self.result: Any = None
        """Of the function, or ``error``."""
        self.changes = False
        """Whether it has changed something."""
        self.error: BaseException | None = None
        """The error that it has raised, or because of which it was not done."""
        self.foreign: dict[bytes, bytes] = {}
        """Delegations of other hosts that it needs, and their records: it has not run."""
        self.is_done = False
        """Whether its waiter has one of both."""
        self.turn = trio.Event()
        """Set when it is done, or when it is its waiter's turn to commit what waits."""

    def run(self, tx: "Attempt") -> None:
        tx.mark()
        self.error = None
        try:
            self.result = self.function(tx, *self.args)
        except Exception as error:
            tx.undo()
            self.error = error
        self.changes = bool(tx.changed)

    def end(self, error: BaseException | None = None) -> None:
        self.error = error or self.error
        self.is_done = True
        self.turn.set()


class ReplicatedEngine(Engine):
    """Made by ``joining.join``. ``local`` is the replica, which this engine owns."""

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
        self.held = Held(Delegate(session.number, session.host))
        """What is delegated to it."""
        self._ahead = Ahead(0)
        """What the replica has, and the feed has not yet."""
        self._lost: list[ChangeSet] = []
        """What the replica has, and the feed will never have: the replica is of no use."""
        self._pure = 0
        """The number of the commit that is under way, if it has nothing but what is ahead."""
        self._misses = 0
        """How many transactions before could not be put ahead."""
        self._shippable = trio.Event()
        """Set when something has been put ahead."""
        self._behind = 0
        """Transactions that wait for the database: nothing is put ahead past them."""
        self._own_row = 0
        """Number of the last row of the feed that is ours and applied."""
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
        """Of the task that puts back what the database has lost."""
        self._renewing = trio.Lock()
        """Of the task that renews the lease."""
        self._failure = ""
        """Why nothing goes on."""
        self._tell_commit: Callable[[int, int], None] = lambda unique, number: None
        """See ``tell_commits``."""
        self._found: set[int] = set()
        """Numbers of commits and change sets that a daemon before has made, and this one has heard
        of since."""
        self._found_shipped = 0
        """All that the feed has up to this number has been made, too."""
        exchange.begin(session.number, self.hear, session.hear_shown, self.give_up)

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

    def tell_commits(self, tell: Callable[[int, int], None]) -> None:
        self._tell_commit = tell

    def has_found(self, number: int) -> bool:
        return number <= self._found_shipped or number in self._found

    async def tell_again(self) -> None:
        seq, end = max(0, (self.session.shown or 0) - TOLD_AGAIN), self.session.cursor
        keys_told: set[bytes] = set()
        while seq < end:
            head, *rows = await self._database.settles.repeat(
                db.FETCH, db.of_bigint(seq), db.of_int(FETCH_ROWS)
            )
            if db.to_int(head[0]) != db.DONE:
                raise Unavailable("the changes of other hosts are not in the feed any more")
            for row in map(db.to_row, rows):
                seq = row.seq
                if row.session != self.session.number:
                    keys_told.update(row.keys)  # type: ignore[arg-type]
        if self._follower is not None:
            view = View(*self.local.begin(), self.seq)
            self._unshown.append((self.seq, self.session.cursor))
            self._follower({key: view.get(key) for key in keys_told})

    async def sure(self) -> None:
        if clock_s() >= self.session.sure_until_s:
            await self.renew()
        self._check()

    @property
    def is_sure(self) -> bool:
        return not self._failure and self.session.is_sure

    def status(self) -> dict[str, int]:
        return self.local.status()

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
        return function(View(*self.local.begin(), self.seq, host=self.host), *args)

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        self._check()
        if self.local.short_of_space and getattr(function, "grows", False):
            raise NoSpace("the filesystem of the metadata replica is full")
        while True:
            call = _Call(function, args)
            if self.held.keys and self._put_ahead(call):
                break
            self._behind += 1
            try:
                with waits_for(JOURNAL):
                    await self._take_turn(call)
            finally:
                self._behind -= 1
            if not call.foreign:
                break
            with waits_for(HOST, "that has a directory for itself"):
                await self._recall(call.foreign)
        if call.error is not None:
            raise call.error
        return call.result

    async def _take_turn(self, call: _Call) -> None:
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

    def _hand_over(self) -> None:
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._is_led = False

    async def _commit_waiting(self) -> None:
        """Run and commit the first waiting transactions as one."""
        taken: list[_Call] = []
        fault: BaseException | None = None
        conflicts = 0
        try:
            while True:
                # After two refusals one goes alone: others may change much of a large batch.
                count = 1 if conflicts > 1 else MAX_BATCH
                while self._waiting and len(taken) < count:
                    taken.append(self._waiting.popleft())
                while len(taken) > count:
                    self._waiting.appendleft(taken.pop())
                self._check()  # not before: somebody has to be told
                attempt = self._run_all(taken)
                for call in taken:
                    if call.foreign:
                        call.end()
                taken = [call for call in taken if not call.foreign]
                if (attempt.writes or self._ahead) and not await self._commit(attempt, taken):
                    conflicts += 1
                    continue
                if attempt.writes or self._run_as_views(taken):
                    break
        except BaseException as error:
            fault = error
        for call in taken:
            call.end(fault)
        if fault is not None and not isinstance(fault, Exception):
            raise fault

    def _run_all(self, calls: Iterable[_Call]) -> Attempt:
        """Run each on the changes of those before. Does not suspend."""
        attempt = Attempt(*self.local.begin(), self.seq + _NUMBER_GAP, host=self.host)
        reads: set[bytes] = set()
        loose: set[bytes] = set()
        ranges: list[list[bytes]] = []
        for call in calls:
            attempt.seq += 1
            attempt.begin()
            call.run(attempt)
            if attempt.changed or call.error is not None:
                self._respect(attempt, call)
            if not call.foreign:
                reads |= attempt.reads
                loose |= attempt.loose
                ranges += attempt.ranges
        attempt.reads, attempt.loose, attempt.ranges = reads, loose, ranges
        self._in_flight = attempt.seq
        return attempt

    def _run_as_views(self, calls: Iterable[_Call]) -> bool:
        """Run calls without changes again as views, numbered as views now. False if one would
        change something now, after rows of others. Does not suspend."""
        attempt = Attempt(*self.local.begin(), self.seq, host=self.host)
        for call in calls:
            call.run(attempt)
        return not attempt.writes

    async def _commit(self, attempt: Attempt, calls: Iterable[_Call] = ()) -> bool:
        """Commit it, which ``calls`` have made, to the database, and apply it; False if refused
        because others have changed what it has read: their changes are applied then. Raises
        Unavailable."""
        number, changes = self._ahead.next_number(), self._ahead.merged()
        # Nobody else can have changed what is ahead: but that is the database's to say.
        reads, loose, ranges = self._ahead.delegations(), attempt.loose, attempt.ranges
        if attempt.writes:
            changes.merge(changes_of(attempt))
            reads |= attempt.reads
            self._pure = 0
        else:
            loose, ranges = set(), []
            self._pure = number
        parameters = (
            db.of_int(self.session.number),
            db.of_bigint(number),
            db.of_bigint(self.session.cursor),
            db.of_keys(list(reads)),
            db.of_keys(list(loose - reads)),
            db.of_keys([start for start, _ in ranges]),
            db.of_keys([end for _, end in ranges]),
            *changes.encode(),
        )
        answered = [call.unique for call in calls if call.unique and call.changes]
        for unique in answered:
            self._tell_commit(unique, number)
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
            for unique in answered:
                self._tell_commit(unique, 0)
            if self._pure:
                self._fail("another host has changed what is delegated to this one")
            return False
        if self.session.cursor < seq:
            before = self._before(changes)
            row = changes.row(seq, self.session.number, number, before)
            self.hear([row])
            faults.reach(APPLIED)
            self._exchange.announce(row)
        return True

    def _before(self, changes: Changes) -> Writes:
        now = View(*self.local.begin(), 0)
        before: Writes = {}
        for key, change in changes.relative.items():
            if self._pure and not isinstance(change, int):
                before[key] = changes.writes[key]  # patched again it is the same
            else:
                before[key] = self._ahead.feed_value(key, now)
        return before

    # --- delegations ------------------------------------------------------------------------------

    def _put_ahead(self, call: _Call) -> bool:
        """Run it, and apply it to the replica alone, if only this host can change its records and
        nothing is before it. Whether that is done. Does not suspend."""
        if self._behind or not self._ahead.has_room or clock_s() >= self.session.sure_until_s:
            return False
        self._misses += 1
        if self._misses > MISSES and self._misses % MISSES:
            return False
        attempt = Attempt(*self.local.begin(), self.seq + 1, host=self.host)
        call.run(attempt)
        covered = find_covered(attempt, loosely=True)
        needed = covered.delegations.difference(covered.made)
        if not covered.is_all or not needed <= self.held.keys.keys():
            return False
        # What is ahead deletes no delegation: so the replica has those of the feed (_take_up).
        if covered.ended or not self.held.has_room(len(covered.made)):
            return False
        self._misses = 0
        if call.error is not None:
            return True
        if not attempt.writes:
            return False
        for made in covered.made:
            attempt.put(made, self.held.me)
        number = self._ahead.next_number()
        changes = changes_of(attempt)
        one = ChangeSet(number, self.session.number, attempt.seq, [*needed], changes)
        key, record = one.encode()
        if call.unique:
            self._tell_commit(call.unique, number)
        self.local.apply({**attempt.writes, key: record})
        faults.reach(AHEAD)
        self.seq = attempt.seq
        self._ahead.append(one)
        self.held.note_own(attempt.writes)
        self._shippable.set()
        return True

    def _respect(self, attempt: Attempt, call: _Call) -> None:
        """Raise if it touches directories delegated to others, in ``call.foreign``. The records are
        read, so a new delegation is a conflict."""
        try:
            covered = find_covered(attempt, loosely=False)
            vacant: list[bytes] = []
            for key in covered.delegations:
                record = attempt.get(key)
                if record is None:
                    vacant.append(key)
                elif record != self.held.me:
                    call.foreign[key] = record
        except Unavailable as error:  # a damaged record
            attempt.undo()
            call.error = call.error or error
            return
        if call.foreign:
            attempt.undo()
        elif call.error is None:
            self.held.grant(attempt, covered, vacant)

    async def give_up(self, delegations: list[bytes]) -> int:
        """End delegations that another host needs. On return all changes below are in the feed, up
        to the returned number."""
        self.held.recall(delegations)
        await self.transact(_give_up, delegations, self.held.me)
        faults.reach(GIVEN_UP)
        return self.session.cursor

    async def _recall(self, foreign: dict[bytes, bytes]) -> None:
        """Have hosts give delegations up; take those of dead ones. Errors come to the caller
        later."""
        self.held.rest(foreign)
        for record in set(foreign.values()):
            delegations = [key for key, value in foreign.items() if value == record]
            owner = decode_delegate(record)
            try:
                await self.catch_up(await self._exchange.recall(owner.session, delegations))
            except Unavailable:
                self._check()
                # A host that has come back gives up itself what its last session had, as soon as it
                # has joined. One that copies the map joins late, and has nothing ahead any more.
                live = [one for one in await self.session.live() if one.host == owner.host]
                if any(one.joined or one.age_s < LEASE_S for one in live):
                    await trio.sleep(ASK_AGAIN_S)
                    await self.catch_up()
                else:
                    await self.transact(_give_up, delegations, record)

    async def _ship(self) -> None:
        """Bring all that is ahead to the database. Raises Unavailable."""
        call = _Call(_change_nothing, ())
        await self._take_turn(call)
        if call.error is not None:
            raise call.error

    async def _keep_shipped(self) -> None:
        while True:
            await self._shippable.wait()
            self._shippable = trio.Event()
            try:
                await self._ship()
                await trio.sleep(SHIP_S)
            except Unavailable as error:
                if not self._failure and not self.session.ended:
                    log.warning("metadata: %s", error)
                    await trio.sleep(BEAT_S)
                    self._shippable.set()

    async def _take_up(self, is_same: bool) -> list[ChangeSet]:
        """Ship what this host's last session left ahead in directories still delegated to it, and
        give them up. Returns the lost sets. Nobody uses the engine yet. ``is_same``: that session
        goes on, and what a daemon before has asked for last comes no more. Raises Unavailable."""
        while True:
            attempt = Attempt(*self.local.begin(), self.seq + 1, host=self.host)
            for one in self._ahead:
                owner = Delegate(one.session, self.host).encode()
                if any(attempt.get(key) != owner for key in one.delegations):
                    self._lost = self._ahead.cut(one.number) + self._lost
                    break
            # A view: what others are granted meanwhile is no conflict.
            view = View(*self.local.begin(), self.seq)
            for key, record in view.range(*keys.all_of(b"D")):
                if decode_delegate(record).host == self.host and attempt.get(key) == record:
                    attempt.delete(key)
            if not (attempt.writes or self._ahead or is_same) or await self._commit(attempt):
                return self._lost

    # --- the feed ---------------------------------------------------------------------------------

    def hear(self, rows: Iterable[Row]) -> None:
        """Apply the next rows of the feed, from the database or a live host; in any order. Does not
        block."""
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
        is_own = row.session == session.number
        if is_own and self._follower is None:
            self._found.add(row.number)
        self._ahead.hear(row.session, row.number, is_own)
        writes: Writes = {}
        if not is_own or row.number != self._pure:  # else the replica has it already
            writes = dict(zip(row.keys, row.values, strict=True))  # type: ignore[arg-type]
            self._ahead.put_over(writes)
        cursor = Cursor(row.seq, row.session, row.number, session.number, self._ahead.shipped)
        # A row of ours says that all before it is shipped, also what is lost: so a host that
        # dies now must not go on from here.
        writes[CURSOR_KEY] = None if is_own and self._lost else cursor.encode()
        try:
            self.local.apply(writes)
        except (NoSpace, Unavailable) as error:
            self._fail(f"the replica takes no changes: {error}")
            return
        session.cursor = row.seq
        self._unsettled.append(row)
        del writes[CURSOR_KEY]
        if is_own:
            if writes:
                # Views from now on are numbered behind what these transactions have been told.
                self.seq = max(self.seq + 1, self._in_flight)
                self.held.note_own(writes)
            self._own_row = row.seq
        else:
            self.seq += 1
            self.held.note_others(writes)
            if self._follower is not None:
                self._unshown.append((self.seq, row.seq))
                self._follower(writes)
        if not self._unshown:
            session.note_shown(row.seq)

    async def catch_up(self, seq: int | None = None) -> None:
        """Ask for the feed up to there, or to its end, and apply it; its end may have been lost
        meanwhile. Raises Unavailable."""
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
                with suppress(Unavailable):  # a caller of the engine hears of it
                    missing = min(self._early) - 1
                    await self.catch_up(missing)
                    self.hear(())
                    if self.session.cursor < missing:
                        self._early.clear()  # the feed has no such rows (any more)

    # --- the session ------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raises Unavailable if the engine has failed."""
        if self._failure:
            raise Unavailable(self._failure)
        self.session.check()

    def _fail(self, reason: str) -> None:
        if not self._failure:
            self._failure = f"metadata: {reason}; unmount, and mount again"
            log.error("%s", self._failure)

    async def _hear_end(self) -> None:
        """Raise Unavailable, with the reason of the session's end."""
        with suppress(AnswerLost):
            await self._ask_beat()
        self._check()

    async def _ask_beat(self) -> int:
        """Session.beat. After the session's end nothing is sure: nobody waits for this host."""
        try:
            return await self.session.beat()
        finally:
            if self.session.ended:
                self._be_sure_until(0.0)

    async def renew(self) -> None:
        """Wait until the lease is sure. Raises Unavailable."""
        while clock_s() >= self.session.sure_until_s:
            self._check()
            with waits_for(JOURNAL):
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
        """Renew the lease, and hear news; what was applied before is durable. Raises AnswerLost,
        Unavailable."""
        began_s, cursor = clock_s(), self.session.cursor
        seq = self._ahead.first_seq - 1 if self._ahead else self.seq
        if await self._ask_beat() == db.RECOVERING:
            await self._recover()
            return
        if self.session.head < cursor:
            self._fail(_OLD)
            self._check()
        while self._unsettled and self._unsettled[0].seq <= cursor:
            self._unsettled.popleft()
        self.durable_seq = max(self.durable_seq, seq)
        # A host that was silent for long may have missed what others have shown to all but this
        # host: until the beat counted, which is after it has looked at the head. So that is asked
        # for again.
        is_late = clock_s() >= self.session.sure_until_s
        await self.catch_up(None if is_late else self.session.head)
        self._be_sure_until(began_s + STOP_S)

    async def barrier(self, seq: int | None = None) -> None:
        target = self.seq if seq is None else seq
        if self.durable_seq < target:
            with waits_for(JOURNAL):
                await self._reach(target)

    async def _reach(self, target: int) -> None:
        while self.durable_seq < target:
            self._check()
            if self._ahead and self._ahead.first_seq <= target:
                await self._ship()
            elif self._settling is not None:
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
        if self._ahead:
            await self._ship()
        with waits_for(HOST, "until it has heard of a change"):
            await self.session.wait_shown(self.session.cursor if of_all else self._own_row)

    async def _recover(self) -> None:
        """Put back commits that a crash of the database may have lost, and wait for all hosts.
        Raises Unavailable."""
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
                cursor = await cursor_of(self.local)
                assert cursor is not None
                match await look_up(self._database, cursor):
                    case db.DONE:
                        return
                    case db.RECOVERING:  # it has crashed again
                        continue
                    case _:  # what this host has nobody could put back: a standby was behind
                        self._fail(_OLD)

    # --- life -------------------------------------------------------------------------------------

    async def go_on(self, cursor: Cursor, ahead: Ahead) -> list[ChangeSet]:
        """Begin at the replica's cursor and sets ahead; returns the lost sets. Raises
        Unavailable."""
        session, is_same = self.session, self.session.shown is not None
        if is_same:
            # The kernel was shown so much; the rest waits for ``tell_again``.
            self._unshown.append((self.seq, session.shown or 0))
            self._found = {one.number for one in ahead}
            self._found_shipped = ahead.shipped
            ahead.number += _NUMBER_GAP  # beyond what the daemon before may have asked for
        else:
            session.shown = cursor.seq
        self.local.apply({CURSOR_KEY: cursor._replace(own=session.number).encode()})
        session.cursor = cursor.seq
        self._ahead = ahead
        await self.renew()
        lost = await self._take_up(is_same)
        if is_same:
            self._own_row = session.cursor
        return lost

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.local.run)
            nursery.start_soon(self.session.keep, self._keep_renewed)
            nursery.start_soon(self._keep_shipped)
            nursery.start_soon(self._fill_gaps)
            nursery.start_soon(self._keep_trimmed)

    async def _keep_trimmed(self) -> None:
        """Trim the feed, on the host of the oldest session."""
        while True:
            await trio.sleep(TRIM_S)
            with suppress(Unavailable):
                if (await self.session.live())[0].session == self.session.number:
                    await self._database.settles.repeat(db.TRIM, db.of_int(KEEP_ROWS))

    def close(self) -> None:
        """End the session, too. Raises Unavailable if an answered change is not on stable
        storage."""
        self._database.close()
        if self._ahead:
            log.warning(
                "metadata: %s; the next mount puts into the database what was done in directories "
                "that no other host has needed since",
                told("not in the database yet", self._ahead),
            )
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


def _change_nothing(tx: Transaction) -> None:
    """What is ahead goes with it."""


def _give_up(tx: Transaction, delegations: Iterable[bytes], owner: bytes) -> None:
    for key in delegations:
        if tx.get(key) == owner:
            tx.delete(key)
