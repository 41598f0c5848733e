"""One data server or burst directory: a storage that is marked as the store's, and its health.

All access to the storage blocks: in ``workers``, or on the trio thread if ``may_inline``. The
system's errors become FsErrors here, noted in ``health``.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from aifs.core.errors import FsError, StoreError, Unavailable
from aifs.data import claim
from aifs.data.claim import Claim
from aifs.data.health import Health, Latency
from aifs.data.marker import Identity
from aifs.data.source_storage import SourceStorage
from aifs.data.storage import (
    NEAR,
    ForeignFile,
    Key,
    Space,
    Status,
    Storage,
    StoredObject,
)
from aifs.data.workers import Workers
from aifs.layout.imported import SOURCE, Pin
from aifs.layout.placement import ACTIVE, BURST_FIRST

_log = logging.getLogger(__name__)

_OF_BYTES = frozenset(("open", "read", "write", "sync"))
"""Operations whose errors may belong to an object; in a worker, or where nothing waits."""


class MissingObject(Unavailable):
    """An object is not there, though its server's storage is."""


class Moved(NamedTuple):
    """Bytes that a process has moved from and to a server."""

    read_bytes: int = 0
    written_bytes: int = 0
    writing_s: float = 0.0
    """Seconds in which it was written to."""
    given_bytes: int = 0
    """Read of a burst directory for grouped writes."""
    giving_s: float = 0.0

    def since(self, before: "Moved") -> "Moved":
        return Moved(
            self.read_bytes - before.read_bytes,
            self.written_bytes - before.written_bytes,
            self.writing_s - before.writing_s,
            self.given_bytes - before.given_bytes,
            self.giving_s - before.giving_s,
        )


NOTHING_MOVED = Moved()


def role_of(server_id: int) -> str:
    """'data' or 'burst'."""
    return "burst" if server_id >= BURST_FIRST else "data"


def name_of(server_id: int) -> str:
    """For messages."""
    if server_id == SOURCE:
        return "the bucket of an imported file"
    return (
        f"burst directory {server_id - BURST_FIRST}"
        if server_id >= BURST_FIRST
        else f"data server {server_id}"
    )


_WINDOW = 32 << 20  # bytes after which a new rate is known
_FIRST = 4 << 20
_WEIGHT = 0.2  # of the newest window; the others fade


class Throughput:
    """Bytes per second that a data server takes, or a burst device gives, lately: for plans of
    grouped writes. Only time with requests under way counts, once. Used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while any of this changes."""
        self._under_way = 0
        """How many operations are."""
        self._since_s = 0.0
        """Since when they have been measured, by time.monotonic()."""
        self._bytes = 0
        """Moved since the rate was last looked at."""
        self._busy_s = 0.0
        """Seconds in which anything was under way since then."""
        self._rate = 0.0
        """Bytes per second lately; 0: not known yet."""
        self._counted_until_s = 0.0
        """Up to when time has been counted, by time.monotonic()."""
        self.total = (0, 0.0)
        """All bytes and seconds that have been measured."""

    @property
    def rate(self) -> int:
        """Bytes per second; 0: too few have been seen."""
        if not self._rate and self._bytes >= _FIRST and self._busy_s:
            return int(self._bytes / self._busy_s)
        return int(self._rate)

    def measure(self, count: int, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, which moves ``count`` bytes."""
        with self._lock:
            if not self._under_way:
                self._since_s = time.monotonic()
            self._under_way += 1
        try:
            return function(*args)
        finally:
            self._done(count)

    def told(self, count: int, busy_s: float) -> None:
        """Another process has moved so many bytes in the last ``busy_s`` seconds."""
        with self._lock:
            now_s = time.monotonic()
            self._add(count, now_s - busy_s, now_s)

    def _done(self, count: int) -> None:
        with self._lock:
            now_s = time.monotonic()
            self._under_way -= 1
            self._add(count, self._since_s, now_s)
            self._since_s = now_s

    def _add(self, count: int, since_s: float, until_s: float) -> None:
        busy_s = max(until_s - max(since_s, self._counted_until_s), 0.0)
        self._counted_until_s = max(until_s, self._counted_until_s)
        self._bytes += count
        self._busy_s += busy_s
        self.total = self.total[0] + count, self.total[1] + busy_s
        if self._bytes >= _WINDOW and self._busy_s:
            newest = self._bytes / self._busy_s
            self._rate += (newest - self._rate) * (_WEIGHT if self._rate else 1)
            self._bytes, self._busy_s = 0, 0.0


class DataServer:
    """A registered data server, or burst directory. ``identify`` comes before use of objects."""

    def __init__(
        self,
        server_id: int,
        storage: Storage,
        store: str,
        workers: Workers,
        tell: Callable[[], None] = lambda: None,
    ) -> None:
        """``tell``: see Health."""
        self.id = server_id
        self.storage = storage
        self.workers = workers
        self.role = role_of(server_id)
        """'data' or 'burst'."""
        self.number = server_id - (BURST_FIRST if self.role == "burst" else 0)
        """The id within the role, as in the marker."""
        self.name = name_of(server_id)
        """For messages."""
        self.standing = ACTIVE
        """One of SERVER_STATES, as the store's table has it."""
        self.domain = ""
        """The domain that fails together with it, as the store's table has it; '': itself alone."""
        self.storage_class = ""
        """'': new files go there; others are for files that have aged."""
        self.absent = ""
        """Why the storage is not used: all calls get Unavailable."""
        self.missing = ""
        """Why the storage is not this server's now, though it was: calls fail."""
        self.down_since_s: float | None = None
        """Since when it has not worked, of time.monotonic()."""
        self.given_up = False
        """It has not worked for so long that what is protected is made anew elsewhere."""
        self.is_back = False
        """It was gone, and it has not been seen to what lies there yet."""
        self.seen: Space | None = None
        """Its space, as last seen."""
        self.health = workers.patience.health = Health(f"{self.name} ({self.address})", tell)
        self.latency = Latency()
        self.writing, self.giving = Throughput(), Throughput()
        """The rates of writes and syncs, and of reads of a burst directory for grouped writes."""
        self.read_bytes = 0
        """Bytes read by requests since the mount, without the page cache's."""
        self.store = store
        self.database = ""
        """The url of the store's metadata database, by its last marker; or ""."""
        self._writable = False
        """Whether it was identified, and not as read-only."""
        self._probe_lock = threading.Lock()
        """Held while the server is tried out."""
        self._claim_lock = threading.Lock()
        """Held while the claim on it is read or written."""
        self._locks = [threading.Lock() for _ in range(16)]
        """Held while objects are opened: which one, the object's id decides."""

    @property
    def address(self) -> str:
        """Where its storage is, as in the store's table."""
        return self.storage.address

    # --- identity and state ---

    def identify(self, read_only: bool) -> None:
        """Check that the storage is this server's. Blocks. Raises StoreError, with the fault and
        advice."""
        with self.workers.patience.asking("reach", self.address):
            try:
                self.storage.identify(Identity(self.store, self.role, self.number), read_only)
                self.database = self.storage.read_marker().database
            except StoreError as error:
                raise self._named(error) from error.__cause__
        if self.role == "burst" and not self.storage.descriptor:
            raise StoreError(f"{self.name}: {self.address}: must be a directory of this machine")
        self._writable = not read_only

    def _named(self, error: StoreError) -> StoreError:
        return StoreError(f"{self.name}: {error}")

    def look(self, read_only: bool) -> None:
        """Look at free space, presence, and whether failures are over. Blocks."""
        try:
            if self.absent:
                self.identify(read_only)
                self.absent = ""
                _log.info("%s (%s) is there again", self.name, self.address)
            self.missing = self._why_missing()
            if self.health.failing and not self.missing and self._works():
                self.health.works()
            self.seen = self.space()
        except StoreError as error:
            self.absent = str(error)
        except FsError:
            self.seen = None

    def _why_missing(self) -> str:
        try:
            with self.workers.patience.asking("reach", self.address):
                self.storage.reach()
        except FileNotFoundError:
            return (
                f"{self.name}: {self.address}: there is no such directory; is its filesystem "
                "mounted?"
            )
        except StoreError as error:
            return "" if isinstance(error.__cause__, OSError) else str(self._named(error))
        except OSError:
            return ""  # it is there, and fails
        return ""

    def read_claim(self) -> Claim | None:
        """The host that has the store, as the storage says. Blocks. Raises Unavailable."""
        return self.call("read", self.address, claim.read_claim, self.storage)

    def put_claim(self, mine: Claim, durable: bool) -> Claim | None:
        """Claim the storage if writable; returns a claim that has ended ours. Blocks. Raises
        FsError."""
        return self.call("claim", self.address, self._put_claim, mine, durable)

    def _put_claim(self, mine: Claim, durable: bool) -> Claim | None:
        self.storage.reach()
        if self._writable:
            patience = self.workers.patience
            with (
                patience.holding(self._claim_lock, "claim", self.address),
                patience.asking("claim", self.address),
            ):
                return claim.put_claim(self.storage, mine, durable)
        theirs = claim.read_claim(self.storage)
        return theirs if theirs is not None and theirs.ends(mine) else None

    def reach(self) -> None:
        """The storage is there, and is this server's. Blocks. Raises Unavailable."""
        self.call("reach", self.address, self.storage.reach)

    @property
    def state(self) -> str:
        """'ok', 'failing', 'gone' or 'back' (see docs/design/servers.md)."""
        if self.is_gone:
            return "gone"
        return "back" if self.is_back and self.health.state == "ok" else self.health.state

    @property
    def is_gone(self) -> bool:
        """Whether its storage is missing, or has failed for too long."""
        return bool(self.absent or self.missing or self.given_up)

    @property
    def last_error(self) -> str:
        return self.absent or self.missing or self.health.last_error

    @property
    def hangs(self) -> bool:
        """Whether given-up calls have not ended: the background asks nothing meanwhile."""
        return self.workers.patience.hangs

    @property
    def may_inline(self) -> bool:
        """Whether short operations may run on the trio thread: they never wait for a device."""
        return self.storage.may_inline

    @property
    def is_at_hand(self) -> bool:
        """Whether it works with local files: cached bytes may be read without its workers."""
        is_local = self.storage.is_local and self.storage.descriptor
        return is_local and self.state == "ok" and not self.hangs

    @property
    def moved(self) -> Moved:
        """By this process."""
        return Moved(self.read_bytes, *self.writing.total, *self.giving.total)

    def told(self, moved: Moved) -> None:
        """Another process of ours has just moved so much."""
        self.read_bytes += moved.read_bytes
        self.writing.told(moved.written_bytes, moved.writing_s)
        self.giving.told(moved.given_bytes, moved.giving_s)

    def call(self, op: str, where: str | Key, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, with its errors mapped and the outcome noted."""
        if self.absent:
            raise Unavailable(f"{self.name} ({self.address}) is absent: {self.absent}")
        is_watched = self.workers.patience.enter(op, where)
        try:
            result = function(*args)
        except (OSError, StoreError) as error:
            path = where if isinstance(where, str) else self.storage.where(where)
            if isinstance(error, StoreError):
                cause = error.__cause__
                error = self._named(error)
                error.__cause__ = cause
            of_object = where is not path and op in _OF_BYTES and isinstance(error, OSError)
            works = self._works if of_object else None
            raise self.health.failed(op, error, path, works) from error
        finally:
            if is_watched:
                self.workers.patience.leave()
        if self.health.failing:
            self.health.succeeded(op)
        return result

    def _works(self) -> bool:
        patience = self.workers.patience
        with (
            patience.holding(self._probe_lock, "probe", self.address),
            patience.asking("probe", self.address),
        ):
            return self.storage.works()

    # --- objects ---

    def where(self, key: Key) -> str:
        """Where an object is, for people."""
        return self.storage.where(key)

    def lock_of(self, oid: int) -> AbstractContextManager[None]:
        """To be held while a handle of the object is obtained or the object removed."""
        return self.workers.patience.holding(self._locks[oid & 15], "open", self.address)

    def open_object(self, key: Key, create: bool, write: bool = True) -> int | None:
        """A handle, or None if there is no such object and it is not to be made."""
        if create:
            return self.call("open", key, self.storage.create, key, False)
        return self.call("open", key, self.storage.open, key, write)

    def open_pinned(self, key: Key, pin: Pin) -> int:
        """A handle to read an imported file by; only of the server SOURCE."""
        assert isinstance(self.storage, SourceStorage)
        return self.call("open", key, self.storage.open_pinned, pin)

    def create_object(self, key: Key) -> int:
        """A new object, of which there is none; the handle is for reading alone."""
        return self.call("open", key, self.storage.create, key, True)

    def remove_object(self, key: Key) -> None:
        """Remove the object if it exists; durable after ``sync_names_near``."""
        self.call("remove", key, self.storage.remove, key)

    def remove_objects(self, keys: Sequence[Key]) -> dict[int, FsError]:
        """Remove objects, durably. Returns errors, by oid, of those perhaps left."""
        failed: dict[int, FsError] = {}
        near: dict[int, list[int]] = {}
        for key in keys:
            near.setdefault(key[1] // NEAR, []).append(key[1])
            try:
                self.remove_object(key)
            except FsError as error:
                failed[key[1]] = error
        for oids in near.values():
            try:
                self.sync_names_near(oids[0])
            except FsError as error:
                failed.update(dict.fromkeys(oids, error))
        return failed

    def set_aside(self, keys: Sequence[Key]) -> None:
        """Move objects aside, for people; durable. Raises NotSupported."""
        self.call("remove", self.address, self.storage.set_aside, keys)

    def read(self, key: Key, handle: int, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer``; returns the bytes read, fewer only at the object's end."""
        begin = time.monotonic()
        count = self.call("read", key, self.storage.read, handle, buffer, offset)
        self.latency.observe("read", len(buffer), time.monotonic() - begin)
        self.read_bytes += (
            count  # whole: threads take turns only where functions are called or loops repeated
        )
        return count

    def read_object(self, key: Key, buffer: memoryview, offset: int) -> int:
        """As ``read``, of an object that is opened for it alone; 0 if there is no such object."""
        handle = self.open_object(key, create=False, write=False)
        if handle is None:
            return 0
        try:
            return self.read(key, handle, buffer, offset)
        finally:
            self.storage.close(handle)

    def read_cached(self, handle: int, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` without waiting, wholly or not at all. For the trio thread."""
        return not self.absent and self.storage.read_cached(handle, buffer, offset)

    def write(self, key: Key, handle: int, data: bytes | memoryview, offset: int) -> None:
        self.writing.measure(
            len(data), self.call, "write", key, self.storage.write, handle, data, offset
        )

    def truncate(self, key: Key, handle: int, length: int) -> None:
        self.call("write", key, self.storage.truncate, handle, length)

    def punch(self, key: Key, handle: int, offset: int, length: int) -> None:
        """Zero the existing range, and free its space. Raises NotSupported."""
        self.call("write", key, self.storage.punch, handle, offset, length)

    def next_data(self, key: Key, handle: int, offset: int, end: int) -> tuple[int, int] | None:
        """The first part, (start, end), of a range that may be no hole; or None."""
        return self.call("read", key, self.storage.next_data, handle, offset, end)

    def stat(self, key: Key, handle: int) -> Status:
        return self.call("stat", key, self.storage.stat, handle)

    def sync_object(self, key: Key, handle: int) -> None:
        """Make bytes and length durable; the name after ``sync_names_near``."""
        self.writing.measure(0, self.call, "sync", key, self.storage.sync, handle)

    def close_object(self, handle: int, removed: bool = False) -> None:
        """Close a handle, in a worker if that may take long (removed objects, remote ones). Does
        not block."""
        if self.storage.is_local and not removed:
            self.storage.close(handle)
        else:
            self.workers.post(self.storage.close, handle)

    def close_idle(
        self,
        key: Key,
        handle: int,
        unsynced: AbstractContextManager | None,
        lost: Callable[[str], None],
    ) -> None:
        """Close a handle in a worker, until it is opened again; written ones are synced first, and
        ``lost`` hears of failures, which later handles might not. ``unsynced`` is held meanwhile.
        Does not block."""
        if unsynced is None and self.storage.is_local:
            self.storage.close(handle)  # it keeps its name, so there is nothing to be freed
        elif unsynced is None:
            self.workers.post(self.storage.close, handle)
        elif self.may_inline:
            self._sync_and_close(key, handle, unsynced, lost)
        else:
            self.workers.post(self._sync_and_close, key, handle, unsynced, lost)

    def _sync_and_close(
        self, key: Key, handle: int, unsynced: AbstractContextManager, lost: Callable[[str], None]
    ) -> None:
        try:
            with unsynced:
                try:
                    self.sync_object(key, handle)
                except FsError as error:
                    lost(str(error))
        finally:
            self.storage.close(handle)

    # --- durability of names ---

    def sync_names_near(self, oid: int) -> None:
        """Which objects of this oid, and of those near it, exist is durable on return."""
        self.call("sync", self.address, self.storage.sync_names, oid)

    def doubt_names_near(self, oid: int, alone: bool = False) -> None:
        """Names there may be a dead process's: see Storage.doubt_names."""
        self.storage.doubt_names(oid, alone)

    def sync_all(self) -> None:
        """Everything in the server's storage is durable on return."""
        self.call("sync", self.address, self.storage.sync_all)

    # --- what is there ---

    def space(self) -> Space:
        return self.call("statvfs", self.address, self.storage.space)

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        """The objects with first_oid <= oid < end_oid."""
        return self.call("list", self.address, self.storage.list_range, first_oid, end_oid)

    def list_objects(self) -> Iterator[StoredObject | ForeignFile]:
        """All objects, and what is not of AIFS, in order. Objects may come and go meanwhile."""
        walk = self.storage.list_all()
        while (item := self.call("list", self.address, next, walk, None)) is not None:
            yield item

    # --- blobs; see Storage ---

    def get_blob(self, name: str) -> bytes | None:
        return self.call("read", self._blob(name), self.storage.get_blob, name)

    def put_blob(self, name: str, data: bytes) -> None:
        """Durable on return."""
        self.call("write", self._blob(name), self.storage.put_blob, name, data)

    def list_blobs(self, prefix: str) -> dict[str, int]:
        return self.call("list", self._blob(prefix), self.storage.list_blobs, prefix)

    def delete_blob(self, name: str) -> None:
        self.call("delete", self._blob(name), self.storage.delete_blob, name)

    def _blob(self, name: str) -> str:
        return f"{self.address}/{name}"
