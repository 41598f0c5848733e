"""Metadata engines that use every freedom that kv.py leaves them, to find callers that rely on
more.

LMDB's engine never suspends, runs each function once and commits at once. One behind a socket does
none of that:

* ``suspending`` lets other tasks run before and after a transaction or a view, and between the run
  of a function and its commit, which is refused if somebody has changed what the function had read;
* ``repeating`` runs each function, views too, once or twice on state that it throws away, and then
  again; a function that has changed what it was given fails the test;
* ``conflicting`` is a suspending one beside which another host writes: now and then it changes an
  inode that the function has read, and takes ids, so that the commit is refused.

When and for how long they suspend is drawn from a seed that pytest prints (``--engine-seed``).
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import trio

from aifs.core.errors import NoSpace, Unavailable
from aifs.meta import keys
from aifs.meta.kv import DamagedRecord, Result, Transaction, grows
from aifs.meta.lmdb_engine import LmdbEngine
from aifs.meta.memtable import LeveledTransaction, LeveledView, Run, Writes
from aifs.meta.recording import Recording
from aifs.meta.records import MTIME_AT, decode_inode

_PAUSES = (0, 1, 1, 2, 3, 8)
"""How often one suspension lets all other tasks run."""

_FOREIGN = 0.2
"""How many of the commits another host comes before."""

draws = random.Random(0)


def seed(number: int) -> None:
    """Suspensions, and the order of the tasks that are ready at the same time, are drawn anew."""
    draws.seed(number)
    trio._core._run._ALLOW_DETERMINISTIC_SCHEDULING = True
    trio._core._run._r.seed(number)


async def _pause() -> None:
    for _ in range(draws.choice(_PAUSES)):
        await trio.lowlevel.checkpoint()


async def _pause_after_commit() -> None:
    """An engine that has committed must not say that it was cancelled."""
    for _ in range(draws.choice(_PAUSES)):
        await trio.lowlevel.cancel_shielded_checkpoint()


class _Recording(Recording):
    """Remembers what was found, too."""

    __slots__ = ("found", "runs")

    def __init__(self, *levels: Any) -> None:
        super().__init__(*levels)
        self.found: dict[bytes, bytes | None] = {}
        self.runs: list[tuple[bytes, bytes, list[Any]]] = []

    def get(self, key: bytes) -> bytes | None:
        value = super().get(key)
        if key not in self.writes:
            self.found[key] = value
        return value

    def _run(self, start: bytes, end: bytes) -> Run:
        found: list[Any] = []
        self.runs.append((start, end, found))
        for item in super()._run(start, end):
            found.append(item)
            yield item
        found.append(None)

    def holds(self, now: LeveledView) -> bool:
        """Whether the function would read the same again, but for what was read loosely."""
        return all(now.get(key) == value for key, value in self.found.items()) and all(
            _same_run(now, *run) for run in self.runs
        )


def _same_run(now: LeveledView, start: bytes, end: bytes, found: list[Any]) -> bool:
    run = now._run(start, end)
    return all(_same(next(run, None), item) for item in found)


def _same(now: Any, before: Any) -> bool:
    damaged = [item is not None and isinstance(item[1], DamagedRecord) for item in (now, before)]
    return all(damaged) or now == before


class Suspending(LmdbEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._put_seq: dict[bytes, int] = {}
        """Of keys that were put or deleted, the number of the last transaction that did."""

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        await _pause()
        try:
            while True:
                if self._failure:
                    raise Unavailable(self._failure)
                if self.short_of_space and getattr(function, "grows", False):
                    raise NoSpace("the metadata store's filesystem is full")
                attempt = _Recording(*self.begin(), self.seq + 1)
                result = function(attempt, *args)
                await self._before_commit(attempt)
                if attempt.holds(LeveledView(*self.begin(), self.seq)) and all(
                    self._put_seq.get(key, 0) < attempt.seq for key in attempt.loose
                ):
                    if attempt.writes:
                        change = _change_growing if getattr(function, "grows", False) else _change
                        await self._commit(change, attempt)
                    return result
        finally:
            await _pause_after_commit()

    async def _before_commit(self, attempt: _Recording) -> None:
        await _pause()

    async def _commit(self, change: Callable[..., None], changes: Recording) -> None:
        await LmdbEngine.transact(self, change, changes)
        for key in changes.writes.keys() - changes.relative.keys():
            self._put_seq[key] = self.seq

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        await _pause()
        result = await super().view(function, *args)
        await _pause()
        return result


def _change(tx: Transaction, changes: Recording) -> None:
    for key, value in changes.writes.items():
        relative = changes.relative.get(key)
        if isinstance(relative, int):
            tx.add(key, relative)
        elif relative is not None:
            for offset, part in relative:
                tx.patch(key, offset, part)
        elif value is None:
            tx.delete(key)
        else:
            tx.put(key, value)


@grows
def _change_growing(tx: Transaction, changes: Recording) -> None:
    _change(tx, changes)


class Repeating(LmdbEngine):
    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        self._try(LeveledTransaction, 1, function, *args)
        return await super().transact(function, *args)

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        self._try(LeveledView, 0, function, *args)
        return await super().view(function, *args)

    def _try(self, kind: type, ahead: int, function: Callable[..., Any], *args: Any) -> None:
        before = _picture(args)
        for _ in range(draws.randint(1, 2)):
            with suppress(Exception):
                state = kind(self._memtable, self._frozen, self.database, self.seq + ahead)
                function(state, *args)
        assert _picture(args) == before, f"{function} has changed what it was given"


def _picture(value: Any) -> Any:
    """What a value is now: equal to what it is later if nobody has changed it."""
    if isinstance(value, list | tuple | set | frozenset):
        return type(value), [_picture(item) for item in value]
    if isinstance(value, dict):
        return [(_picture(key), _picture(item)) for key, item in value.items()]
    if is_dataclass(value):
        return [_picture(getattr(value, field.name, None)) for field in fields(value)]
    return value


class Conflicting(Suspending):
    async def _before_commit(self, attempt: _Recording) -> None:
        await _pause()
        if attempt.writes and draws.random() < _FOREIGN:
            inodes = [
                key
                for key in attempt.reads | attempt.loose
                if key[:1] == b"i" and key in attempt.writes
            ]
            foreign = _Recording(*self.begin(), self.seq + 1)
            _write_as_another_host(foreign, sorted(inodes))
            await self._commit(_change, foreign)


def _write_as_another_host(tx: Transaction, inodes: list[bytes]) -> None:
    """What any host may do to an inode at any time without harm: its ctime is a bit later. A
    directory's is patched, as by who makes a name there."""
    tx.add(keys.COUNTER_IDS, 1)
    for key in inodes:
        record = tx.get(key)
        if record is not None:
            inode = decode_inode(keys.number(key), record)
            later = replace(inode, ctime_ns=inode.ctime_ns + 1).encode()
            if inode.is_dir:
                tx.patch(key, MTIME_AT, later[MTIME_AT : MTIME_AT + 16])
            else:
                tx.put(key, later)


class Stopping(LmdbEngine):
    """Suspends one call where a test says: before or after the transaction or the view of a
    function, by its name, until ``go`` is set. ``stopped`` is set when it has got there."""

    _place: tuple[str, str] | None = None

    def stop(self, when: str, function: str) -> None:
        """``when``: "before" it runs, or "after" its commit."""
        self._place, self.stopped, self.go = (when, function), trio.Event(), trio.Event()

    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        await self._reach("before", function)
        result = await super().transact(function, *args)
        await self._reach("after", function)
        return result

    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        await self._reach("before", function)
        result = await super().view(function, *args)
        await self._reach("after", function)
        return result

    async def _reach(self, when: str, function: Callable[..., Any]) -> None:
        if self._place == (when, getattr(function, "__name__", None)):
            self._place = None
            self.stopped.set()
            await self.go.wait()


ENGINES: dict[str, type[LmdbEngine]] = {
    "lmdb": LmdbEngine,
    "suspending": Suspending,
    "repeating": Repeating,
    "conflicting": Conflicting,
}


def put_all(tx: Transaction, writes: Writes) -> None:
    """For transact: all the writes; of None the record goes."""
    for key, value in writes.items():
        if value is None:
            tx.delete(key)
        else:
            tx.put(key, value)
