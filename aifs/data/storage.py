"""The storage of a data server: the one interface through which bytes are kept.

``DirectoryStorage`` keeps objects as files; ``MemoryStorage`` is the smallest one, and can do the
least. ``server.DataServer`` has the parts of all servers: workers, timing, health, errors.

An *object* has a key (ino, oid) and is used through a *handle*, a number of the storage's. A *blob*
is a small named file of the server: marker, claim, backups of the metadata. The contract is
tests/contract/test_storage.py. It depends on what a storage can do (``Storage``):

* Without ``in_place`` an object is written once: at any offset, in any order, by the handle that
  made it, until that is synced. Each byte should come once, and the bytes about in order: a storage
  that sends them on may refuse others with an OSError. Then the object is immutable, and nobody
  else sees it before. So changes in a drained file become new objects under a new oid; changes in
  place raise NotSupported.
* Without ``append`` a synced object does not grow: a container there is written by one append,
  and sealed.
* Without ``holes`` all of an object counts as data, and nothing can be punched.
* Without ``descriptor`` a handle means nothing to the kernel: no passthrough, lease, fallocate. A
  burst directory must have it.
"""

import threading
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator, Sequence
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from aifs.core.errors import NotSupported, StoreError
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Identity, Marker

Key = tuple[int, int]
"""Names an object on a server: (ino, oid)."""

NEAR = 256
"""Ids whose names become durable together: oids equal when divided by this."""

CLAIM = "owner"
"""Name of the blob that says who has the store; it is put every few seconds."""

ASIDE = "lost+found"
"""Where objects of no file are put. Some filesystems have such a directory, too."""

BACKUP = "backup"
"""The prefix of the names of blobs that are backups of the metadata: ``backup/NAME``."""

ANYTHING = object()
"""A blob may be replaced whatever it is, or where there is none."""


class Space(NamedTuple):
    """Space in bytes and inodes. ``available``: ``free`` less root's reserve."""

    total: int
    free: int
    available: int
    files: int
    files_free: int

    def without_free(self) -> "Space":
        """As if the storage were full, and as large as what is in use."""
        return Space(self.total - self.free, 0, 0, self.files - self.files_free, 0)


class Status(NamedTuple):
    """Of an object that is open."""

    length: int
    blocks: int
    """Of 512 bytes: what it takes, as far as known."""


class StoredObject(NamedTuple):
    """An object as it lies on a server. ``where`` it is, for people."""

    ino: int
    oid: int
    length: int
    allocated: int  # bytes
    where: str


class ForeignFile(NamedTuple):
    """Something in the storage that is not of AIFS. ``where`` it is, for people."""

    where: str


class Storage(ABC):
    """Keeps objects and blobs. Used from any thread, after ``identify``.

    All block, unless stated. Errors are OSErrors with the system's numbers (ENOSPC, EDQUOT, EIO,
    ETIMEDOUT ...), NotSupported, and StoreError if the storage is missing, or not the server's.
    """

    in_place = False
    """Objects may be changed after they have been synced: written, cut, extended."""

    append = False
    """Objects may be written behind their ends after they have been synced."""

    holes = False
    """It knows where an object has holes, and can make them."""

    descriptor = False
    """Handles are descriptors of open files, which the kernel knows, too."""

    in_memory = False
    """Nothing waits for a device: calls take microseconds, and may run on the trio thread."""

    can_read_cached = False
    """Whether ``read_cached`` may have an answer: there is a cache."""

    is_local = False
    """It belongs to this machine alone: opening and closing are cheap, nobody else changes it."""

    def __init__(self, address: str) -> None:
        """Does no I/O. ``address``: where it is, as in the table of servers and for people."""
        self.address = address

    @property
    def may_inline(self) -> bool:
        """Whether short operations may run on the trio thread just now. Does not block."""
        return self.in_memory

    def share(self) -> None:
        """The process that has the store uses it, too, and alone removes what has become empty."""

    # --- identity ---

    @abstractmethod
    def read_marker(self) -> Marker:
        """Its marker, identified or not. Raises StoreError if it is missing."""

    @abstractmethod
    def mark(self, marker: Marker) -> None:
        """Make it that of a store, and make the place if there is none. Durable on return."""

    def erase(self) -> None:
        """Delete all that a store has there, if it is marked as that. Durable on return."""
        try:
            self.read_marker()
        except StoreError:
            return
        for found in list(self.list_all()):
            if isinstance(found, StoredObject):
                self.remove((found.ino, found.oid))
                self.sync_names(found.oid)
        self._delete_blobs()

    def give_up(self) -> None:
        """Delete marker, claim and backups of the metadata. Durable on return."""
        self._delete_blobs()

    def _delete_blobs(self) -> None:
        for name in self.list_blobs(BACKUP):
            self.delete_blob(f"{BACKUP}/{name}")
        self.delete_blob(CLAIM)
        self.delete_blob(MARKER)

    @abstractmethod
    def identify(self, identity: Identity, read_only: bool) -> None:
        """Check that the storage is that of ``identity``, and writable unless ``read_only``. Raises
        StoreError, with fault and advice."""

    @abstractmethod
    def reach(self) -> None:
        """It is there, and still the one that was identified. Raises OSError, StoreError. Cheap."""

    @property
    @abstractmethod
    def place(self) -> Hashable | None:
        """An identity that differs between any two storages, as last identified. Does not block."""

    @property
    @abstractmethod
    def pool(self) -> Hashable:
        """Storages of which this is equal share their ``space``. Does not block."""

    def works(self) -> bool:
        """Whether it can be read and, unless it is read-only, written: a probe past all caches."""
        try:
            self.reach()
        except OSError:
            return False
        return True

    # --- objects ---

    @abstractmethod
    def where(self, key: Key) -> str:
        """Where an object is, or would be, for people. Does not block."""

    @abstractmethod
    def create(self, key: Key, exclusive: bool) -> int:
        """A handle to write a new, empty object; an existing one is opened for writing instead.
        ``exclusive``: FileExistsError if it exists; the handle is for reading. Only with
        ``in_place``."""

    @abstractmethod
    def open(self, key: Key, write: bool) -> int | None:
        """A handle of an object, or None. One for writing may fail only when used."""

    @abstractmethod
    def close(self, handle: int) -> None:
        """An object that was made by this handle, and never synced, may be gone."""

    @abstractmethod
    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer``; the bytes read, fewer only at the end. A removed object may be read, or
        fails."""

    def read_cached(self, handle: int, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` without waiting, wholly or not at all. For the trio thread: does not
        block, and raises nothing."""
        return False

    @abstractmethod
    def write(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        """All of ``data``; what lies between the end and ``offset`` reads as zeros."""

    def start_writing(self, handle: int, offset: int, length: int) -> None:
        """Begin to make bytes durable, to help ``sync``. Does not wait, promises nothing."""

    @abstractmethod
    def truncate(self, handle: int, length: int) -> None:
        """Cut, or extend with zeros."""

    def punch(self, handle: int, offset: int, length: int) -> None:
        """All of the range that exists reads as zeros, and takes no space. With ``holes``."""
        raise NotSupported(f"{self.address}: has no holes")

    def next_data(self, handle: int, offset: int, end: int) -> tuple[int, int] | None:
        """The first part, (start, end), of a range that may be no hole; or None."""
        end = min(end, self.stat(handle).length)
        return (offset, end) if offset < end else None

    @abstractmethod
    def stat(self, handle: int) -> Status: ...

    @abstractmethod
    def sync(self, handle: int) -> None:
        """Make bytes and length durable; the name after ``sync_names``. A failure may have lost
        writes: a later sync may succeed without them."""

    @abstractmethod
    def remove(self, key: Key) -> None:
        """Remove any such object; durable after ``sync_names``. Raises if the storage is not
        there."""

    def set_aside(self, keys: Sequence[Key]) -> None:
        """Move objects to where nobody looks for them but people (ASIDE), durably on return."""
        raise NotSupported(f"{self.address}: nothing can be moved aside there")

    def sync_names(self, oid: int) -> None:
        """Make names near this oid durable. Nothing to do if ``sync`` and ``remove`` do it."""

    def doubt_names(self, oid: int, alone: bool) -> None:
        """Names near ``oid`` may be a dead process's, not synced; ``alone``: no other lives that
        makes any there. Does not block."""

    def sync_all(self) -> None:
        """Everything that was written is durable on return."""

    # --- what is there ---

    @abstractmethod
    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        """The objects with first_oid <= oid < end_oid, in no order."""

    @abstractmethod
    def list_all(self) -> Iterator[StoredObject | ForeignFile]:
        """All that is there but blobs, in order. Objects may come and go meanwhile."""

    def id_bound(self) -> int:
        """No object there has this oid or a larger one, whether it has been identified or not."""
        return max(
            (found.oid + 1 for found in self.list_all() if isinstance(found, StoredObject)),
            default=0,
        )

    @abstractmethod
    def space(self) -> Space: ...

    # --- blobs ---

    @abstractmethod
    def get_blob(self, name: str) -> bytes | None:
        """As it was last put, whole; None if there is none."""

    @abstractmethod
    def put_blob(
        self, name: str, data: bytes, durable: bool = True, expected: object = ANYTHING
    ) -> bool:
        """Replace the blob, all or nothing, also in a crash. ``durable``: on return. Whether it was
        done.

        CLAIM can be replaced without space, and has up to 64 KiB; only if its content is
        ``expected`` (None: no claim), unless ANYTHING; of several calls with one expectation, one
        succeeds.
        """

    @abstractmethod
    def list_blobs(self, prefix: str) -> dict[str, int]:
        """Lengths of the blobs ``prefix/NAME``, by NAME."""

    @abstractmethod
    def delete_blob(self, name: str) -> None:
        """There is none on return, whether there was one or not."""


Thing = TypeVar("Thing", bound=Hashable)


class Unsynced(Generic[Thing]):
    """Keys of objects or directories that are not durable yet. Used from any thread.

    A sync takes the generation, syncs, and reports that generation done: changes meanwhile are not
    forgotten, and other callers do not return before.
    """

    __slots__ = ("_generations", "_lock", "_marks")

    def __init__(self) -> None:
        self._marks: dict[Thing, int] = {}
        self._generations = count()
        self._lock = threading.Lock()

    def mark(self, *things: Thing) -> None:
        """They have changed: called after the change, also after one that failed half-way."""
        with self._lock:
            for thing in things:
                self._marks[thing] = next(self._generations)

    def get(self, thing: Thing) -> int | None:
        """The generation of an unsynced thing."""
        return self._marks.get(thing)

    def snapshot(self) -> dict[Thing, int]:
        """All that is unsynced now, with generations."""
        with self._lock:
            return dict(self._marks)

    def done(self, thing: Thing, generation: int) -> None:
        """``thing`` has been synced since it had ``generation``."""
        with self._lock:
            if self._marks.get(thing) == generation:
                del self._marks[thing]
