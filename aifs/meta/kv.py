"""The interface of metadata engines: an ordered map of bytes to bytes, changed by transactions.

The model is that of FoundationDB's bindings: all logic is in *transaction functions*, plain
functions of a ``Transaction``. An engine may run one several times (a conflict with another host, a
map that had to grow) and commits the effects of the last run alone, so a function, also one that is
given to ``view``,

* touches the store through its transaction only, and changes nothing else: not its arguments, no
  attribute, no log. What it has found out is what it returns;
* does not block, and does not await;
* may raise: then nothing is changed, and the exception reaches the caller of ``transact``.

Transactions are serializable. Keys are 1 to 511 bytes, values up to 1 MiB.

What callers may rely on, of every engine:

* ``transact`` and ``view`` may suspend the calling task, any number of times, before the function
  runs, between its run and the commit, and after the commit. So what a task has read in core before
  either may have changed when it returns, and what a function returns may be out of date: others
  may have committed since. A caller that needs more holds a lock of its own across the call (a
  file's gate).
* When ``transact`` returns, every ``transact`` and ``view`` that is called from then on sees its
  changes. So the transactions of one task, one after the other, count in that order.
* Two transactions of two tasks that overlap in time count in either order, whichever was called or
  returned first. ``ReadTransaction.seq`` tells which of two states of a record is the newer one.
* ``transact`` is cancelled before its commit or not at all: a Cancelled means that nothing has
  changed.

The LMDB engine happens to do none of it; the hostile engines of the tests do all.

Hosts that share a store have a *replica* of the map each (meta/replicated). There a transaction is
refused, and its function run again, if another host has changed meanwhile what it has read. Three
operations keep hosts that work in one directory from refusing each other's changes all the time:
``add`` and ``patch``, which change part of what a value says and do not depend on the rest, and
``get_loosely``, for callers that do not depend on those changes.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from aifs.core.errors import Unavailable

Result = TypeVar("Result")

MAX_KEY_BYTES = 511
MAX_VALUE_BYTES = 1 << 20


def check_key(key: bytes) -> None:
    """Raises ValueError if no engine may store the key."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise ValueError(f"a key of {len(key)} bytes; 1 to {MAX_KEY_BYTES} are allowed")


def check_pair(key: bytes, value: bytes) -> None:
    """Raises ValueError if no engine may store the pair."""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        check_key(key)
    if len(value) > MAX_VALUE_BYTES:
        raise ValueError(f"a value of {len(value)} bytes; at most {MAX_VALUE_BYTES} are allowed")


Tap = Callable[[dict[bytes, bytes | None], int], None]
"""Is told the changes of a transaction (None: deleted), and how long its record in the journal
is.
"""

Function = TypeVar("Function", bound=Callable[..., Any])

Follower = Callable[[Mapping[bytes, bytes | None]], None]
"""Is told what another host has changed: the new values by key, None for a deleted one."""


def grows(function: Function) -> Function:
    """Mark a transaction function that makes the store larger.

    An engine that is short of space refuses it with NoSpace, so that what frees space can always be
    recorded.
    """
    function.grows = True  # type: ignore[attr-defined]
    return function


def answers(function: Function) -> Function:
    """Mark a transaction function that does all that a request of a program is about: one that is
    repeated must not do it once more, if this has been committed.
    """
    function.answers = True  # type: ignore[attr-defined]
    return function


def patched(value: bytes | None, offset: int, part: bytes) -> bytes:
    """The value after ``Transaction.patch``."""
    end = offset + len(part)
    if value is None or end > len(value):
        raise ValueError("a part that is overwritten must be there")
    return value[:offset] + part + value[end:]


class DamagedRecord(Unavailable):
    """The record of ``key`` is not as it was stored. What is behind it in order can be read."""

    def __init__(self, key: bytes, detail: str) -> None:
        super().__init__(detail)
        self.key = key


class ReadTransaction(ABC):
    """A consistent view of the whole map. Reading raises DamagedRecord."""

    host: int = 0
    """The number of the host whose transaction or view this is; 0 where the store has one host."""

    seq: int
    """When this is: of two transactions or views that have read one record, and found it different,
    the one with the larger number has the newer state. What a transaction has made of a record is
    newer than what a view with a smaller number has read of it, and than what any other transaction
    with a smaller number has made of it.
    """

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def get_loosely(self, key: bytes) -> bytes | None:
        """The value, or None, for a caller that uses nothing of it that ``add`` and ``patch``
        change: other hosts may do these to the key before the transaction is committed.

        It may put the value anew if it overwrites all that is patched.
        """
        return self.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values that ``get`` returns for each key; at once, where an engine can."""
        return [self.get(key) for key in keys]

    @abstractmethod
    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Pairs with start <= key < end in ascending order, at most ``limit`` of them unless it is
        0.

        The map must not be changed through this transaction while the iterator is in use.
        """

    def counter(self, key: bytes) -> int:
        """The value of a counter (8 bytes, little-endian, signed; missing is 0)."""
        return int.from_bytes(self.get(key) or b"", "little", signed=True)


class Transaction(ReadTransaction):
    """A view that sees its own changes. A function that puts a record anew has read it before, or
    must not depend on what it was.
    """

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Remove the key; no error if it is missing."""

    def add(self, key: bytes, delta: int) -> None:
        """Add to a counter. This reads nothing: of two hosts that add, both count."""
        self.put(key, (self.counter(key) + delta).to_bytes(8, "little", signed=True))

    def patch(self, key: bytes, offset: int, part: bytes) -> None:
        """Overwrite the bytes of a value from ``offset`` on. Of two hosts that do, the last one
        counts; it is refused only if the value has been put or deleted meanwhile.

        Raises ValueError if there is no value, or it ends before ``part`` does.
        """
        self.put(key, patched(self.get(key), offset, part))


class Engine(ABC):
    """One open store. One task-scheduler thread (trio's) calls it; engines that block do so in
    threads.
    """

    host: int = 0
    """As ``host`` of the transactions. It is that of the host's name, and stays."""

    seq: int
    """Sequence number of the last transaction that is known to have changed something; they ascend,
    not always by one. It is at least that of every transaction that has returned, but seldom that
    of one's own: others may have committed since.
    """

    durable_seq: int
    """All transactions up to this number are on stable storage."""

    recovered: int
    """How many transactions opening the store found in the journal and replayed."""

    found_seq: int
    """The number of the last transaction that opening the store found."""

    opened_seq: int
    """The number from which it counts on since."""

    short_of_space: bool
    """Whether functions that are marked with ``grows`` are refused at present."""

    @abstractmethod
    async def transact(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run ``function(tx, *args)``; when this returns, its changes are visible to all and
        survive kill -9.

        They survive a power cut after the next ``barrier``, or within the commit interval.

        Raises what the function raises; NoSpace if the change cannot be recorded (nothing is
        changed); Unavailable if the engine has failed.
        """

    @abstractmethod
    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run ``function(tx, *args)`` with a ReadTransaction; what the function raises is
        raised.
        """

    async def sure(self) -> None:
        """On return this host may tell what it knows from views and ``follow``: others wait until
        it has heard of what they change. At once where there is one host; ``view`` does it itself.

        Raises Unavailable if the engine has failed.
        """
        return

    @property
    def is_sure(self) -> bool:
        """Whether ``sure`` returns at once."""
        return True

    def tell_sure(self, tell: Callable[[float], None]) -> None:
        """Now, and whenever it changes, ``tell`` is called with the time, in seconds of
        CLOCK_BOOTTIME, until which ``sure`` returns at once. Never where there is one host. It does
        not block.
        """
        return

    @abstractmethod
    async def barrier(self, seq: int | None = None) -> None:
        """All transactions that have returned are on stable storage when this returns.

        With ``seq`` those up to that sequence number; returns at once if they are already. What a
        power cut leaves is always all transactions up to some number, and none after it.
        Raises Unavailable if the engine has failed before it could make them so.
        """

    async def shown(self, of_all: bool = False) -> None:
        """All transactions that have returned are *shown* when this returns: every live host has
        their changes in its replica, and its kernel has forgotten what was there before. At once
        where there is one host. ``of_all``: so is what other hosts have changed, as far as it is in
        this one's replica.

        Raises Unavailable if the engine has failed. A Cancelled leaves what was changed as it is.
        Call it outside of locks, as other hosts may wait for theirs meanwhile.
        """
        return

    def follow(self, follower: Follower) -> None:
        """From now on ``follower`` is called with each change set of another host, in their order,
        once it is in the replica and before any task runs that could read it there: ``seq`` is that
        of views that see it. Never where there is one host. There is one follower, from before
        ``run`` on; it owes ``note_shown``.

        It does not block, does not raise, and must not keep the mapping.
        """
        return

    def note_shown(self, seq: int) -> None:
        """What the follower was told up to ``seq``, as it was then, is shown on this host: nobody
        sees the state before any more. The numbers ascend. Does not block.
        """
        return

    def status(self) -> dict[str, int]:
        """What has been written to the journal of this host since the store was opened:
        ``transactions``, ``bytes``, ``syncs``."""
        return {}

    def tell_commits(self, tell: Callable[[int], None]) -> None:
        """From now on ``tell`` is called before the transaction of a function that is marked with
        ``answers`` is recorded, with its number; with 0 if it is not recorded after all. Never
        where there are several hosts."""
        return

    @abstractmethod
    def listen(self, tap: Tap) -> None:
        """From now on ``tap`` is called with the changes of each transaction. It must not keep the
        mapping itself.
        """

    @abstractmethod
    def read_damaged_as(self, value: bytes | None) -> None:
        """From now on damaged records have this value; None, as in the beginning: reading one
        raises DamagedRecord.
        """

    @abstractmethod
    async def run(self) -> None:
        """The engine's background work (periodic sync and commit); runs until cancelled."""

    @abstractmethod
    def close(self) -> None:
        """Make everything durable and let go of the store. Blocks; called when no task uses the
        engine.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the store without writing anything, as the death of the process would."""
