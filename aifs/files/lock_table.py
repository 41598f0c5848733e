"""The locks of one file: ranges of fcntl(2), or flock(2). Pure: no I/O, no tasks.

As on Linux with a local file, a flock(2) lock that becomes one of the other kind is given up first,
and lost if it cannot be had; a request that does not wait gets a free lock, even if others wait.
Waiters get freed locks in order of arrival. A stream of readers can keep a writer waiting: letting
them wait behind it could make a circle of waiters that is none, because owners are not processes.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

LAST = (1 << 63) - 1
"""The last byte that a lock can cover: a range without an end ends here."""

_REMEMBERED = 256


class LockOwner(NamedTuple):
    """Whose a lock is: a session of a host, and what its kernel calls the owner."""

    session: int
    number: int


class Lock(NamedTuple):
    owner: LockOwner
    start: int
    """The first byte."""
    end: int
    """The last byte, itself locked."""
    exclusive: bool
    """F_WRLCK or LOCK_EX; else F_RDLCK or LOCK_SH."""
    pid: int
    """Of the process that has asked, on its host."""

    def overlaps(self, start: int, end: int) -> bool:
        return self.start <= end and start <= self.end


class Wait:
    """A request that waits for a lock. ``ticket`` is the owner session's, used once. ``wake`` is
    called when the wait is over; ``granted`` then tells how."""

    def __init__(self, lock: Lock, ticket: int, wake: Callable[[], None]) -> None:
        self.lock = lock
        self.ticket = ticket
        self.granted = False
        self._wake = wake

    def end(self, granted: bool) -> None:
        self.granted = granted
        self._wake()


class LockTable:
    """Locks that are held, and requests that wait. ``flock``: all locks are of the whole file."""

    def __init__(self, flock: bool) -> None:
        self._flock = flock
        self._held: dict[LockOwner, list[Lock]] = {}
        """Of each owner in order; no two overlap, and none could be one with its neighbour."""
        self._waiting: list[Wait] = []
        """In the order of coming."""
        self._granted: deque[tuple[int, int]] = deque(maxlen=_REMEMBERED)
        """Session and ticket of those who have got their lock lately."""

    def __bool__(self) -> bool:
        """Whether anybody holds a lock, or waits for one."""
        return bool(self._held or self._waiting)

    def held(self, session: int) -> list[Lock]:
        """The locks of a session."""
        return [
            lock
            for owner, locks in self._held.items()
            if owner.session == session
            for lock in locks
        ]

    def of(self, owner: LockOwner) -> list[Lock]:
        return self._held.get(owner, [])

    def holds(self, owner: LockOwner) -> bool:
        return owner in self._held

    def conflicts(self, lock: Lock) -> Iterator[Lock]:
        """What others hold that ``lock`` cannot be held with."""
        for owner, locks in self._held.items():
            for other in locks if owner != lock.owner else ():
                if other.overlaps(lock.start, lock.end) and (lock.exclusive or other.exclusive):
                    yield other

    def lock(self, lock: Lock) -> bool:
        """Whether the owner has it now, in place of what it held there."""
        self.leave_other_kind(lock)
        if any(True for _ in self.conflicts(lock)):
            return False
        self.put(lock)
        return True

    def leave_other_kind(self, lock: Lock) -> None:
        """Before ``lock`` of flock(2), give up the owner's lock of the other kind."""
        held = self._held.get(lock.owner) if self._flock else None
        if held and held[0].exclusive != lock.exclusive:
            self.unlock(lock.owner, 0, LAST)

    def put(self, lock: Lock) -> None:
        """The owner has it: that others hold nothing against it is known."""
        was = self._held.get(lock.owner, [])
        weaker = any(held.exclusive and held.overlaps(lock.start, lock.end) for held in was)
        locks = [*_without(was, lock.start, lock.end), lock]
        locks.sort(key=lambda each: each.start)
        self._held[lock.owner] = _merged(locks)
        if weaker and not lock.exclusive:
            self._grant()

    def unlock(self, owner: LockOwner, start: int, end: int) -> bool:
        """The owner gives up what it holds of a range; whether it held some."""
        was = self._held.get(owner, [])
        if not any(lock.overlaps(start, end) for lock in was):
            return False
        left = list(_without(was, start, end))
        if left:
            self._held[owner] = left
        else:
            del self._held[owner]
        self._grant()
        return True

    def wait(self, wait: Wait) -> None:
        """It is woken when it has the lock. What it waits for cannot be had now."""
        self._waiting.append(wait)

    def cancel(self, session: int, ticket: int) -> bool:
        """End the wait of this ticket. Returns whether it already has its lock, which stays."""
        for wait in [*self._waiting]:
            if (wait.lock.owner.session, wait.ticket) == (session, ticket):
                self._waiting.remove(wait)
                wait.end(False)
        return (session, ticket) in self._granted

    def note_granted(self, session: int, ticket: int) -> None:
        """The ticket has got its lock: so says ``cancel``, should the answer be lost."""
        self._granted.append((session, ticket))

    def blockers(self, session: int, ticket: int) -> list[LockOwner]:
        """The owners of the locks that a ticket waits for; none if it does not wait."""
        return [
            held.owner
            for wait in self._waiting
            if (wait.lock.owner.session, wait.ticket) == (session, ticket)
            for held in self.conflicts(wait.lock)
        ]

    def sessions(self) -> set[int]:
        """Of all owners that hold something, or wait."""
        waiting = {wait.lock.owner.session for wait in self._waiting}
        return waiting | {owner.session for owner in self._held}

    def restate(self, session: int, locks: Iterable[Lock] = ()) -> None:
        """The session holds these, and waits for nothing. Without any: it is over."""
        for wait in [wait for wait in self._waiting if wait.lock.owner.session == session]:
            self._waiting.remove(wait)
            wait.end(False)
        for owner in [owner for owner in self._held if owner.session == session]:
            del self._held[owner]
        for lock in locks:
            self.put(lock)
        self._grant()

    def _grant(self) -> None:
        found: Wait | None
        while found := next((w for w in self._waiting if not any(self.conflicts(w.lock))), None):
            self._waiting.remove(found)
            self.note_granted(found.lock.owner.session, found.ticket)
            self.put(found.lock)
            found.end(True)


def _without(locks: list[Lock], start: int, end: int) -> Iterator[Lock]:
    """What is left of ``locks`` when their owner gives a range up."""
    for lock in locks:
        if not lock.overlaps(start, end):
            yield lock
            continue
        if lock.start < start:
            yield lock._replace(end=start - 1)
        if lock.end > end:
            yield lock._replace(start=end + 1)


def _merged(locks: list[Lock]) -> list[Lock]:
    merged = locks[:1]
    for lock in locks[1:]:
        last = merged[-1]
        if last.end + 1 == lock.start and last.exclusive == lock.exclusive:
            merged[-1] = last._replace(end=lock.end, pid=lock.pid)
        else:
            merged.append(lock)
    return merged
