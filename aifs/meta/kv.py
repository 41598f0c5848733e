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
from aifs.core.waiting import current_unique

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
"""Gets a transaction's changes (None: deleted), and its length in the journal."""

Function = TypeVar("Function", bound=Callable[..., Any])

Follower = Callable[[Mapping[bytes, bytes | None]], None]
"""Is told what another host has changed: the new values by key, None for a deleted one."""


def grows(function: Function) -> Function:
    """Mark a transaction function that enlarges the store. An engine short of space refuses it with
    NoSpace, so that freeing space can always be recorded."""
    function.grows = True  # type: ignore[attr-defined]
    return function


def answers(function: Function) -> Function:
    """Mark a transaction function that does all of a program's request: a repeated request must not
    repeat it once committed."""
    function.answers = True  # type: ignore[attr-defined]
    return function


def answered_by(function: Function) -> int:
    """The kernel's number of the current task's request, if the function does all of it; else
    0."""
    return current_unique() if getattr(function, "answers", False) else 0


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
    """When this is: of two states of one record, the one with the larger number is newer. A
    transaction's record is newer than any read, or made, with a smaller number."""

    @abstractmethod
    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""

    def get_loosely(self, key: bytes) -> bytes | None:
        """The value, or None, for a caller that uses nothing that ``add`` and ``patch`` change:
        other hosts may do these to the key until the commit. It may put the value anew if it
        overwrites all that is patched."""
        return self.get(key)

    def get_many(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The values that ``get`` returns for each key; at once, where an engine can."""
        return [self.get(key) for key in keys]

    @abstractmethod
    def range(self, start: bytes, end: bytes, limit: int = 0) -> Iterator[tuple[bytes, bytes]]:
        """Ascending pairs with start <= key < end, at most ``limit`` unless 0. The map must not be
        changed through this transaction while the iterator is in use."""

    def counter(self, key: bytes) -> int:
        """The value of a counter (8 bytes, little-endian, signed; missing is 0)."""
        return int.from_bytes(self.get(key) or b"", "little", signed=True)


class Transaction(ReadTransaction):
    """A view that sees its own changes. A function that puts a record has read it before, or does
    not depend on it."""

    @abstractmethod
    def put(self, key: bytes, value: bytes) -> None: ...

    @abstractmethod
    def delete(self, key: bytes) -> None:
        """Remove the key; no error if it is missing."""

    def add(self, key: bytes, delta: int) -> None:
        """Add to a counter. This reads nothing: of two hosts that add, both count."""
        self.put(key, (self.counter(key) + delta).to_bytes(8, "little", signed=True))

    def patch(self, key: bytes, offset: int, part: bytes) -> None:
        """Overwrite bytes of a value from ``offset`` on; the last host counts. Refused only if the
        value was put or deleted meanwhile. Raises ValueError if there is no value, or too short a
        one."""
        self.put(key, patched(self.get(key), offset, part))


class Engine(ABC):
    """One open store, used from one task-scheduler thread (trio's); blocking is done in threads."""

    host: int = 0
    """As ``host`` of the transactions. It is that of the host's name, and stays."""

    seq: int
    """Number of the last transaction known to have changed something; ascends, with gaps. At least
    that of every returned transaction, others may have committed since."""

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
        """Run ``function(tx, *args)``; on return its changes are visible to all and survive kill
        -9; a power cut, after the next ``barrier`` or the commit interval.

        Raises the function's errors; NoSpace if the change cannot be recorded (nothing is changed);
        Unavailable if the engine has failed.
        """

    @abstractmethod
    async def view(self, function: Callable[..., Result], *args: Any) -> Result:
        """Run ``function(tx, *args)`` with a ReadTransaction; its errors are raised."""

    def view_at_once(self, function: Callable[..., Result], *args: Any) -> Result | None:
        """As ``view``, without suspending. None if that may have to wait."""
        return None

    async def sure(self) -> None:
        """Wait until this host may answer from views and ``follow``: others wait until it has heard
        of their changes. At once with one host; ``view`` does it itself. Raises Unavailable."""
        return

    @property
    def is_sure(self) -> bool:
        """Whether ``sure`` returns at once."""
        return True

    def tell_sure(self, tell: Callable[[float], None]) -> None:
        """Call ``tell`` now, and at changes, with the time (s, CLOCK_BOOTTIME) until which ``sure``
        returns at once. Never with one host. Does not block."""
        return

    @abstractmethod
    async def barrier(self, seq: int | None = None) -> None:
        """Bring all returned transactions, or those up to ``seq``, to stable storage; at once if
        they are. A power cut leaves all transactions up to some number, and none after it. Raises
        Unavailable if the engine fails before."""

    async def shown(self, of_all: bool = False) -> None:
        """Wait until all returned transactions are *shown*: every live host has them in its
        replica, and its kernel has forgotten the state before. At once with one host. ``of_all``:
        so are others' changes that this replica has.

        Raises Unavailable if the engine has failed. Cancelled leaves the changes as they are. Call
        it outside of locks: other hosts may wait for theirs.
        """
        return

    def follow(self, follower: Follower) -> None:
        """Call ``follower`` with each change set of another host, in order, once it is in the
        replica and before any task can read it; ``seq`` is that of views that see it. Never with
        one host. There is one follower, from before ``run`` on; it owes ``note_shown``.

        It does not block, does not raise, and must not keep the mapping.
        """
        return

    def note_shown(self, seq: int) -> None:
        """This host shows nothing older than the follower's changes up to ``seq``. The numbers
        ascend. Does not block."""
        return

    def status(self) -> dict[str, int]:
        """Writes to this host's journal since the opening: ``transactions``, ``bytes``,
        ``syncs``."""
        return {}

    def tell_commits(self, tell: Callable[[int, int], None]) -> None:
        """Call ``tell`` with the kernel's number of the request and the number of each transaction
        marked with ``answers`` before it is recorded; with 0 if it is not after all."""
        return

    def has_found(self, number: int) -> bool:
        """Whether opening the store found the transaction of which ``tell_commits`` has told so, to
        the last process that had the store open."""
        return number <= self.found_seq

    async def tell_again(self) -> None:
        """Tell the follower what other hosts have changed lately: the process that had the store
        open before may not have shown it to the kernel, which is there still. Raises
        Unavailable."""
        return

    @abstractmethod
    def listen(self, tap: Tap) -> None:
        """Call ``tap`` with the changes of each transaction. It must not keep the mapping."""

    @abstractmethod
    def read_damaged_as(self, value: bytes | None) -> None:
        """Read damaged records as this value; None (the default): reading one raises
        DamagedRecord."""

    @abstractmethod
    async def run(self) -> None:
        """The engine's background work (periodic sync and commit); runs until cancelled."""

    @abstractmethod
    def close(self) -> None:
        """Make everything durable, and close the store. Blocks; no task uses the engine."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the store without writing anything, as the death of the process would."""
