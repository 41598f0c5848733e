"""The durable metadata engine: LMDB under a memtable, with a redo journal in front of both.

docs/design/metadata.md says how the levels fit together. Touches the metadata directory alone. Its
rules:

* The journal is written before memory, and synced before LMDB: LMDB never holds a change that the
  journal could lose. So a memtable may be committed in several LMDB transactions (which bounds
  LMDB's dirty pages, memory that it never gives back); only the last one moves ``applied``, and
  replay mends what a crash leaves between.
* Reads, and everything that moves LMDB's map, happen on the scheduler thread; worker threads write
  and sync.
"""

import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import trio

from aifs.core import faults, files, mountinfo
from aifs.core.errors import NoSpace, StoreError, Unavailable, from_oserror
from aifs.core.waiting import JOURNAL, waits_for
from aifs.meta import journal
from aifs.meta.kv import Engine, Result, Tap, answered_by
from aifs.meta.lmdb_database import CHECK_PAGES, BrokenDatabase, Database, DatabaseError, MapFull
from aifs.meta.memtable import LeveledTransaction, LeveledView, Memtable, Writes

log = logging.getLogger(__name__)

COMMIT_AGE_S = 10.0
"""The longest that a change waits for its way into LMDB; it bounds what the next mount replays."""

CHUNK_KEYS = 2048
"""Keys per LMDB transaction: at most as many dirty pages, 8 MiB, reused two transactions later."""

SLICE_KEYS = 128
"""Keys that are given to LMDB before other tasks have their turn: some 200 us."""

RESERVE_SEGMENTS = 4
"""Room for LMDB, in journal segments: both segments, twice because B-tree pages are not full."""

CHECK_PAUSE_S = 0.01
"""Pause between checks of unchecked LMDB pages: 3 s, and little processor, per million records."""

_TRIM_EVERY = 256  # operations; each may map a few times 64 KiB, the kernel's fault-around
_RECOVERY_GAP = 1 << 32  # more transactions than a journal can hold; see journal.py

BEFORE_SYNC = faults.declare("meta.journal.before_sync", "a barrier is about to sync the journal")
AFTER_SYNC = faults.declare(
    "meta.journal.after_sync", "the journal is synced; nobody has been told"
)
FROZEN = faults.declare(
    "meta.commit.frozen", "the memtable is frozen, new records go to the other segment"
)
AFTER_CUT = faults.declare(
    "meta.commit.after_cut", "the frozen memtable is in LMDB and its segment is free"
)
REPLAYED = faults.declare(
    "meta.recovery.replayed", "the journal has been read, LMDB is as it was found"
)


class LmdbEngine(Engine):
    """The store in ``directory``, made if missing. Opening blocks (recovery), raises StoreError.
    The caller keeps others from opening it."""

    def __init__(
        self,
        directory: str,
        commit_interval_s: float = 1.0,
        first_seq: int = 0,
        thorough: bool = True,
    ) -> None:
        """``first_seq``: of a new store. ``thorough``: see Database; else ``run`` checks the other
        pages."""
        self._directory = directory
        self._commit_interval_s = commit_interval_s
        self._memtable = Memtable()
        self._frozen = Memtable()  # empty when nothing is on its way into LMDB
        self._frozen_seq = 0
        """Of the last transaction in the frozen memtable, or in LMDB if that is empty."""
        self._frozen_at_s = 0.0
        """When it was frozen, by trio's clock."""
        self._first_seq = first_seq
        self._commits: Callable[[int, int], None] | None = None
        """See ``tell_commits``."""
        self._taps: list[Tap] = []
        """The listeners for all changes."""
        self._operations = 0
        """Counts transactions and views, so that memory is given back now and then."""
        self._appended_bytes = self._syncs = 0  # since it was opened
        self._failure = ""  # why the engine takes no more changes
        self.commit_error = ""  # why LMDB takes no changes at present
        self.short_of_space = False
        """Whether functions that are marked with ``grows`` are refused."""
        self._syncing: trio.Event | None = None
        """Set at the end of the sync that is under way; None: none is."""
        self._changed = trio.Event()  # since the last sync was put off
        self._wake = trio.Event()  # there is something to commit, or so much that it is due
        self._threads = trio.CapacityLimiter(2)  # one to sync, one to commit
        self._lmdb = trio.Lock()  # of the task that commits, or looks at LMDB's pages
        self._in_memory = mountinfo.is_in_memory(directory)
        """Whether the directory lies in memory, where a sync does nothing."""
        self.database = Database(directory, thorough)
        try:
            self._journal = self._open_journal()
            try:
                self.recovered = self._recover()
            except BaseException:
                self._journal.close()
                raise
        except BaseException:
            self.database.close(orderly=False)
            raise
        self.durable_seq = self.seq = self.opened_seq = self._frozen_seq

    def _open_journal(self) -> journal.Journal:
        if self.database.applied() is not None:
            return journal.Journal.open(self._directory)
        if journal.Journal.holds_records(self._directory):
            raise StoreError(
                f"{self._directory}: data.mdb is missing or new, but the journal holds changes"
            )
        try:
            return journal.Journal.create(self._directory)
        except OSError as error:
            raise StoreError(
                f"{self._directory}: cannot make the metadata journal: {error}"
            ) from error

    def _recover(self) -> int:
        """Bring the journal into LMDB; returns the number of transactions."""
        seq = self.database.applied() or self._first_seq
        replayed = 0
        try:
            for _, writes in self._journal.replay(seq):
                self._frozen.apply(writes)
                replayed += 1
            self.found_seq = seq + replayed
            self._frozen_seq = self.found_seq + _RECOVERY_GAP
            faults.reach(REPLAYED)
            self._write_frozen_now()
        except (DatabaseError, OSError) as error:
            raise StoreError(
                f"{self._directory}: recovery of the metadata fails: {error}"
            ) from error
        self._drop_frozen()
        if replayed:
            log.info("metadata: %d transactions replayed from the journal", replayed)
        return replayed

    def status(self) -> dict[str, int]:
        return {
            "transactions": self.seq - self.opened_seq,
            "bytes": self._appended_bytes,
            "syncs": self._syncs,
        }

    def tell_commits(self, tell: Callable[[int, int], None]) -> None:
        self._commits = tell

    def listen(self, tap: Tap) -> None:
        self._taps.append(tap)

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        if self._failure:
            raise Unavailable(self._failure)
        if self.short_of_space and getattr(function, "grows", False):
            raise NoSpace("the metadata store's filesystem is full")
        self._count_operation()
        transaction = LeveledTransaction(self._memtable, self._frozen, self.database, self.seq + 1)
        result = function(transaction, *args)
        if not transaction.writes:
            return result
        if self._commits is None or not (unique := answered_by(function)):
            self.apply(transaction.writes)
            return result
        self._commits(unique, self.seq + 1)
        try:
            self.apply(transaction.writes)
        except BaseException:
            self._commits(unique, 0)
            raise
        return result

    def apply(self, writes: Writes) -> None:
        """Make these changes, as a transaction without a function. Raises NoSpace, Unavailable."""
        if self._failure:
            raise Unavailable(self._failure)
        seq = self.seq + 1
        try:
            self._journal.append(seq, writes)
        except OSError as error:
            raise from_oserror(error, "metadata journal") from error
        self.seq = seq
        self._appended_bytes += self._journal.last_bytes
        self._changed.set()
        if not self._memtable.entries:
            self._wake.set()
        self._memtable.apply(writes)
        for tap in self._taps:
            tap(writes, self._journal.last_bytes)
        if self._journal.used_bytes > journal.SEGMENT_BYTES >> 1 and not self._frozen.entries:
            self._wake.set()

    def begin(self) -> tuple[Memtable, Memtable, Database]:
        """The levels that a caller's own view or transaction reads, newest first. It ends before
        any other begins, and before the caller suspends."""
        self._count_operation()
        return self._memtable, self._frozen, self.database

    def read_damaged_as(self, value: bytes | None) -> None:
        self.database.damaged_as = value

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        return self.view_at_once(function, *args)

    def view_at_once(self, function: Callable[..., Result], *args: Any) -> Result:
        self._count_operation()
        view = LeveledView(self._memtable, self._frozen, self.database, self.seq)
        return function(view, *args)

    def _count_operation(self) -> None:
        self._operations += 1
        if self._operations % _TRIM_EVERY == 0 and not self._frozen.entries:
            # Else LMDB may be writing.
            self.database.trim()

    async def barrier(self, seq: int | None = None) -> None:
        target = self.seq if seq is None else seq
        while self.durable_seq < target:
            if self._failure:
                raise Unavailable(self._failure)
            with waits_for(JOURNAL):
                if self._syncing is not None:
                    # Perhaps begun too early for us; then the next one is shared.
                    await self._syncing.wait()
                else:
                    await self._sync()

    async def _sync(self) -> None:
        covered = self.seq
        descriptors = self._journal.unsynced(self.durable_seq)
        self._syncing = trio.Event()
        try:
            if self._in_memory and not files.is_hooked():
                _sync_files(descriptors)  # takes less than the hand-off to a thread
            else:
                await trio.to_thread.run_sync(_sync_files, descriptors, limiter=self._threads)
            self.durable_seq = covered
            self._syncs += 1
        except OSError as error:
            self._fail(error)
        finally:
            self._syncing.set()
            self._syncing = None

    def _fail(self, error: OSError) -> None:
        # After a failed sync the kernel may have dropped the pages and call the next sync a
        # success.
        self._failure = f"the metadata journal in {self._directory} cannot be synced: {error}"
        log.error("%s; no more changes are taken. Repair the disk and mount again", self._failure)

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._keep_synced)
            nursery.start_soon(self._keep_committed)
            if not self.database.is_checked:
                nursery.start_soon(self._check_pages)

    async def _check_pages(self) -> None:
        done = False
        while not done and not self._failure:
            await trio.sleep(CHECK_PAUSE_S)
            async with self._lmdb:
                try:
                    done = await trio.to_thread.run_sync(self.database.check_more, CHECK_PAGES)
                except (BrokenDatabase, OSError) as error:
                    with suppress(Unavailable):
                        await self.barrier()  # what the next mount, or a restore, can use
                    self._failure = str(error)
                    log.error(
                        "%s; no more changes are taken. Unmount: the next mount says what to do",
                        self._failure,
                    )

    async def _keep_synced(self) -> None:
        with suppress(Unavailable):  # logged where it was found
            while True:
                await self._changed.wait()
                self._changed = trio.Event()
                await trio.sleep(self._commit_interval_s)
                await self.barrier()

    async def _keep_committed(self) -> None:
        with suppress(Unavailable):
            while True:
                if not (self._memtable.entries or self._frozen.entries or self.short_of_space):
                    await self._wake.wait()
                    self._wake = trio.Event()
                with trio.move_on_after(self._commit_interval_s):
                    await self._wake.wait()
                self._wake = trio.Event()
                while self._commit_due():
                    async with self._lmdb:
                        await self.commit()
                    if self.commit_error:
                        break
                else:
                    self.database.trim()
                if self.short_of_space:
                    await self._in_thread(self._reserve, *self.database.usage())

    def _commit_due(self) -> bool:
        return bool(
            self._frozen.entries
            or self._journal.used_bytes > journal.SEGMENT_BYTES >> 1
            or (self._memtable.entries and trio.current_time() - self._frozen_at_s >= COMMIT_AGE_S)
        )

    async def commit(self) -> None:
        """Bring the frozen memtable, or the present one, into LMDB. Not once the engine has failed
        (Unavailable): LMDB may end the process at a broken page."""
        if self._failure:
            raise Unavailable(self._failure)
        if not self._frozen.entries:
            self.freeze()
            self._frozen_at_s = trio.current_time()
        await self.barrier(self._frozen_seq)
        try:
            await self._write_frozen(self._in_thread, trio.lowlevel.checkpoint)
        except (DatabaseError, OSError) as error:
            self._set_commit_error(str(error))
        else:
            self._set_commit_error("")
            self._drop_frozen()

    @property
    def is_committing(self) -> bool:
        """Whether there are changes on their way into LMDB."""
        return bool(self._frozen.entries)

    @property
    def journal_bytes(self) -> int:
        """How long the journal is."""
        return self._journal.used_bytes

    def freeze(self) -> None:
        """Freeze the memtable for the next ``commit``; none is on its way."""
        self._frozen, self._memtable = self._memtable, Memtable()
        self._frozen_seq = self.seq
        self._journal.switch(self.seq)
        faults.reach(FROZEN)

    async def _in_thread(self, function: Callable[..., None], *args: Any) -> None:
        await trio.to_thread.run_sync(function, *args, limiter=self._threads)

    async def _write_frozen(
        self, call: Callable[..., Awaitable[None]], give_way: Callable[[], Awaitable[None]]
    ) -> None:
        """Commit the frozen memtable and ``_frozen_seq``; the journal is synced that far. May be
        repeated after DatabaseError or OSError.

        ``call`` runs what blocks. LMDB's pages are filled here, between other tasks: a thread would
        contend for the interpreter at every key, which costs more than the work itself.
        """
        database = self.database
        if self.commit_error:
            # LMDB takes no more transactions after some errors, such as a failed sync
            database.reopen()
        missing = len(self._frozen.entries)
        for chunk in self._frozen.chunks(CHUNK_KEYS):
            missing -= len(chunk)
            while True:
                try:
                    database.begin()
                    for start in range(0, len(chunk), SLICE_KEYS):
                        database.fill(chunk[start : start + SLICE_KEYS])
                        await give_way()
                    await call(database.commit, None if missing else self._frozen_seq)
                    break
                except MapFull:
                    database.roll_back()
                    database.grow()
                finally:
                    database.roll_back()
        await call(self._journal.cut)
        await call(self._reserve, *self.database.usage())

    def _write_frozen_now(self) -> None:
        """``_write_frozen`` without a scheduler. Blocks."""
        with suppress(StopIteration):
            self._write_frozen(_directly, _directly).send(None)

    def _reserve(self, used: int, live: int) -> None:
        """Check whether LMDB, with this usage, has room for what may come. Blocks."""
        short = not self.database.reserve(RESERVE_SEGMENTS * journal.SEGMENT_BYTES, used, live)
        if short and not self.short_of_space:
            log.warning(
                "metadata: the filesystem of %s is full; changes that need space are refused",
                self._directory,
            )
        elif self.short_of_space and not short:
            log.info("metadata: the filesystem of %s has space again", self._directory)
        self.short_of_space = short

    def _drop_frozen(self) -> None:
        self.database.renew()
        self._frozen = Memtable()
        faults.reach(AFTER_CUT)

    def _set_commit_error(self, reason: str) -> None:
        if reason and reason != self.commit_error:
            log.warning(
                "metadata: %s takes no changes (%s); the journal keeps them",
                self._directory,
                reason,
            )
        elif self.commit_error and not reason:
            log.info("metadata: %s takes changes again", self._directory)
        self.commit_error = reason

    def close(self) -> None:
        """Raises Unavailable if something that was answered as done is not on stable storage."""
        try:
            if not self._failure and self.durable_seq < self.seq:
                try:
                    _sync_files(self._journal.unsynced(self.durable_seq))
                    self.durable_seq = self.seq
                except OSError as error:
                    self._fail(error)
            if self._failure:
                raise Unavailable(self._failure)
            self._commit_all()
        except BaseException:
            self.abandon()
            raise
        self._journal.close()
        self.database.close(orderly=True)

    def abandon(self) -> None:
        self._journal.close()
        self.database.close(orderly=False)

    def _commit_all(self) -> None:
        """Bring everything into LMDB, if it works; the rest stays in the journal for the next
        mount."""
        try:
            while self._frozen.entries or self._memtable.entries:
                if not self._frozen.entries:
                    self.freeze()
                self._write_frozen_now()
                self._drop_frozen()
        except (DatabaseError, OSError) as error:
            self._set_commit_error(str(error))


async def _directly(function: Callable[..., None] | None = None, *args: Any) -> None:
    if function is not None:
        function(*args)


def _sync_files(descriptors: list[int]) -> None:
    faults.reach(BEFORE_SYNC)
    for descriptor in descriptors:
        files.sync_file(descriptor)
    faults.reach(AFTER_SYNC)
