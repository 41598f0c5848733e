"""One data server or burst directory: a directory, marked as the store's, that holds objects.

Everything that touches the directory blocks: it runs in ``workers``, or on the trio thread where
``may_inline`` says that nothing there can wait. The system's errors become FsErrors here, and are
noted in ``health``.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any, NamedTuple

from aifs.core import files, filesystems
from aifs.core.errors import FsError, NotSupported, StoreError, Unavailable
from aifs.data import claim, naming, probe
from aifs.data.claim import Claim
from aifs.data.health import Health
from aifs.data.latency import Latency
from aifs.data.marker import read_marker
from aifs.data.naming import ForeignFile, StoredObject
from aifs.data.throughput import Throughput
from aifs.data.unsynced import Unsynced
from aifs.data.workers import Workers
from aifs.layout.placement import ACTIVE, BURST_FIRST

_log = logging.getLogger(__name__)

_KNOWN_DIRECTORIES = 1024

_OF_BYTES = frozenset(("open", "read", "write", "sync"))
"""Operations whose errors may belong to the object alone. They run in a worker, or where nothing
waits for a device.
"""

Key = tuple[int, int]
"""Names an object on a server: (ino, oid)."""


def _change_allocation(fd: int, mode: int, offset: int, length: int) -> None:
    try:
        files.change_allocation(fd, mode, offset, length)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        raise NotSupported from None  # an answer about the filesystem, no failure of the device


class Missing(Unavailable):
    """An object is not there, though its server's directory is."""


class Space(NamedTuple):
    """Space of filesystems, in bytes and inodes. ``available`` is ``free`` less what is reserved
    for root.
    """

    total: int
    free: int
    available: int
    files: int
    files_free: int

    def without_free(self) -> "Space":
        """As if the filesystem were full, and as large as what is in use."""
        return Space(self.total - self.free, 0, 0, self.files - self.files_free, 0)


def role_of(server_id: int) -> str:
    """'data' or 'burst'."""
    return "burst" if server_id >= BURST_FIRST else "data"


def name_of(server_id: int) -> str:
    """For messages."""
    return (
        f"burst directory {server_id - BURST_FIRST}"
        if server_id >= BURST_FIRST
        else f"data server {server_id}"
    )


class DataServer:
    """A registered data server, or burst directory. ``identify`` must have succeeded before objects
    are used.

    ``role`` is 'data' or 'burst', and ``number`` the id within it, as in the marker; ``name`` is
    for messages. ``standing`` (one of SERVER_STATES) and ``domain`` are what the store's table says
    of it.
    """

    def __init__(self, server_id: int, path: str, store: str, workers: Workers) -> None:
        self.id = server_id
        self.path = path
        self.workers = workers
        self.role = role_of(server_id)
        self.number = server_id - (BURST_FIRST if self.role == "burst" else 0)
        self.name = name_of(server_id)
        self.standing = ACTIVE
        self.domain = ""
        self.absent = ""
        """Why the directory is not used: then all calls are answered with Unavailable, and the path
        is left alone.
        """
        self.missing = ""
        """Why the directory is not this server's just now, if it was when the store was opened:
        calls to it fail.
        """
        self.down_since_s: float | None = None
        """Since when it has not worked, of time.monotonic()."""
        self.given_up = False
        """It has not worked for so long that what is protected is made anew elsewhere."""
        self.is_back = False
        """It was gone, and it has not been seen to what lies there yet."""
        self.seen: Space | None = None
        """The space of its filesystem, as last seen."""
        self.health = workers.patience.health = Health(f"{self.name} ({path})")
        self.latency = Latency()
        self.writing, self.giving = Throughput(), Throughput()
        """What writes and syncs come to; what is read of a burst directory for grouped writes."""
        self.read_bytes = 0
        """What requests to it have read since the mount; what the page cache had at once does not
        count.
        """
        self.in_memory = self.is_local = False
        self.store = store
        self._can_read_cached = True
        self._writable = False
        self.inode: tuple[int, int] | None = None
        """(st_dev, st_ino) of the directory, as last identified."""
        self._known: dict[str, None] = {}  # object directories that exist, oldest first
        self._directories_lock = threading.Lock()
        self._probe_lock = threading.Lock()
        self._claim_lock = threading.Lock()
        self._unsynced_names = Unsynced()
        self._locks = [threading.Lock() for _ in range(16)]

    # --- identity and state ---

    def identify(self, read_only: bool) -> None:
        """Check that the directory is this server's, and learn what it is.

        Blocks. Raises StoreError, which says what is wrong and what to do.
        """
        with self.workers.patience.asking("reach", self.path):
            self._identify(read_only)

    def _identify(self, read_only: bool) -> None:
        with suppress(OSError):  # the marker cannot be read then, either, and that says more
            status = os.stat(self.path)
            self.inode = status.st_dev, status.st_ino
        self._check_marker()
        try:
            self.in_memory, self.is_local = (
                filesystems.is_in_memory(self.path),
                filesystems.is_local(self.path),
            )
        except OSError as error:
            raise StoreError(f"{self.name}: {self.path}: {error.strerror}") from error
        if not read_only and not os.access(self.path, os.W_OK):
            raise StoreError(
                f"{self.name}: {self.path}: cannot be written to; make it writable, or mount with -o ro"
            )
        self._writable = not read_only

    def look(self, read_only: bool) -> None:
        """See how much is free, whether the directory is there, and whether what has failed works
        again. Blocks.
        """
        try:
            if self.absent:
                self.identify(read_only)
                self.absent = ""
                _log.info("%s (%s) is there again", self.name, self.path)
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
            with self.workers.patience.asking("reach", self.path):
                self._check_present()
        except FileNotFoundError:
            return (
                f"{self.name}: {self.path}: there is no such directory; is its filesystem mounted?"
            )
        except StoreError as error:
            return "" if isinstance(error.__cause__, OSError) else str(error)
        except OSError:
            return ""  # it is there, and fails
        return ""

    def _check_marker(self) -> None:
        try:
            marker = read_marker(self.path)
        except StoreError as error:
            raise StoreError(f"{self.name}: {error}") from error.__cause__
        if (marker.store, marker.role, marker.id) != (self.store, self.role, self.number):
            raise StoreError(
                f"{self.name}: {self.path}: its marker says {marker.role} {marker.id} of store "
                f"{marker.store}, not {self.role} {self.number} of store {self.store}; put the right directory there"
            )

    def _check_present(self) -> None:
        """What is missing is missing only where the directory itself is not. Raises OSError,
        StoreError.
        """
        status = os.stat(self.path)
        if (status.st_dev, status.st_ino) != self.inode:
            self._check_marker()

    def read_claim(self) -> Claim | None:
        """Who has the store, as the directory says. Blocks. Raises Unavailable."""
        return self.call("read", self.path, claim.read_claim, self.path)

    def put_claim(self, mine: Claim, durable: bool) -> Claim | None:
        """Say there that we have the store, where it can be written; returns a claim that has ended
        ours. Blocks. Raises FsError."""
        return self.call("claim", self.path, self._put_claim, mine, durable)

    def _put_claim(self, mine: Claim, durable: bool) -> Claim | None:
        self._check_present()
        if self._writable:
            patience = self.workers.patience
            with (
                patience.holding(self._claim_lock, "claim", self.path),
                patience.asking("claim", self.path),
            ):
                return claim.put_claim(self.path, mine, durable)
        theirs = claim.read_claim(self.path)
        return theirs if theirs is not None and theirs.ends(mine) else None

    def reach(self) -> None:
        """The directory is there, and is this server's. Blocks. Raises Unavailable."""
        self.call("reach", self.path, self._check_present)

    @property
    def state(self) -> str:
        """'ok', 'failing', 'gone' or 'back' (see docs/servers.md)."""
        if self.is_gone:
            return "gone"
        return "back" if self.is_back and self.health.state == "ok" else self.health.state

    @property
    def is_gone(self) -> bool:
        """Whether its directory is not there, or it has not worked for as long as it is waited
        for.
        """
        return bool(self.absent or self.missing or self.given_up)

    @property
    def last_error(self) -> str:
        return self.absent or self.missing or self.health.last_error

    @property
    def hangs(self) -> bool:
        """Whether calls that were given up have not ended: until then nothing is asked of it in the
        background.
        """
        return self.workers.patience.hangs

    @property
    def may_inline(self) -> bool:
        """Whether short operations may run on the trio thread: they never wait for a device."""
        return self.in_memory and not files.is_hooked()

    def call(self, op: str, where: str | Key, function: Callable[..., Any], *args: Any) -> Any:
        """``function(*args)``, with its errors mapped and the outcome noted."""
        if self.absent:
            raise Unavailable(f"{self.name} ({self.path}) is absent: {self.absent}")
        self.workers.patience.enter(op, where)
        try:
            result = function(*args)
        except (OSError, StoreError) as error:
            path = where if isinstance(where, str) else self.object_path(*where)
            of_object = where is not path and op in _OF_BYTES and isinstance(error, OSError)
            works = self._works if of_object else None
            raise self.health.failed(op, error, path, works) from error
        finally:
            self.workers.patience.leave()
        if self.health.failing:
            self.health.succeeded(op)
        return result

    def _works(self) -> bool:
        patience = self.workers.patience
        with (
            patience.holding(self._probe_lock, "probe", self.path),
            patience.asking("probe", self.path),
        ):
            try:
                self._check_present()
            except (OSError, StoreError):
                return False
            return probe.works(self.path, self._writable)

    # --- objects ---

    def object_path(self, ino: int, oid: int) -> str:
        return naming.object_path(self.path, ino, oid)

    def lock_of(self, oid: int) -> AbstractContextManager[None]:
        """To be held while a descriptor of the object is obtained or the object removed."""
        return self.workers.patience.holding(self._locks[oid & 15], "open", self.path)

    def open_object(self, key: Key, create: bool, write: bool = True) -> int | None:
        """A descriptor, or None if there is no such object and it is not to be made."""
        if create:
            return self.call("open", key, self._create, key, False)
        return self.call("open", key, self._open, key, write)

    def create_object(self, key: Key) -> int:
        """A new object, of which there is none; the descriptor is for reading alone."""
        return self.call("open", key, self._create, key, True)

    def _open(self, key: Key, write: bool) -> int | None:
        path = self.object_path(*key)
        try:
            return files.open_file(path, write=write and self._writable)
        except FileNotFoundError:
            self._check_present()
            return None
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return files.open_file(
                path, write=False
            )  # its disk has become read-only: what is there can be rescued

    def _create(self, key: Key, new: bool) -> int:
        directory = naming.directory_of(self.path, key[1])
        path = f"{directory}/{naming.name_of(*key)}"
        while True:
            if directory not in self._known:
                self._make_directory(directory)
            if not new:
                try:
                    return files.open_file(path)
                except FileNotFoundError:
                    pass
            try:
                fd = files.open_file(path, create=True, exclusive=new, write=not new)
            except FileNotFoundError:
                # The last other object in it has just been removed, and the directory with it.
                with self._directories_lock:
                    self._known.pop(directory, None)
                continue
            self._unsynced_names.mark(directory)
            return fd

    def _make_directory(self, directory: str) -> None:
        with self._directories_lock:
            if directory in self._known:
                return
            # Never make the root: where its filesystem is not mounted, another one would be written
            # to.
            self._check_marker()
            upper = os.path.dirname(directory)
            objects = os.path.dirname(upper)
            for path in (objects, upper, directory):
                files.make_dir(path)
            # Also where they existed: that may be the work of a process that died before it synced
            # them.
            self._unsynced_names.mark(self.path, objects, upper, directory)
            if len(self._known) >= _KNOWN_DIRECTORIES:
                del self._known[next(iter(self._known))]
            self._known[directory] = None

    def remove_object(self, key: Key) -> None:
        """Remove the object if it exists; durable after ``sync_names_near``."""
        self.call("remove", key, self._unlink, key)
        self.call("remove", key, self._after_removals, naming.directory_of(self.path, key[1]))

    def remove_objects(self, keys: Sequence[Key]) -> dict[int, FsError]:
        """Remove those that exist, durably. Returns the errors, by oid, of those that may still be
        there.
        """
        failed: dict[int, FsError] = {}
        by_directory: dict[str, list[int]] = {}
        for key in keys:
            by_directory.setdefault(naming.directory_of(self.path, key[1]), []).append(key[1])
            try:
                self.call("remove", key, self._unlink, key)
            except FsError as error:
                failed[key[1]] = error
        for directory, oids in by_directory.items():
            try:
                self.call("remove", directory, self._after_removals, directory)
                self.sync_names_near(oids[0])
            except FsError as error:
                failed.update(dict.fromkeys(oids, error))
        return failed

    def _unlink(self, key: Key) -> None:
        with suppress(
            FileNotFoundError
        ):  # no matter, if the server's directory is there: see _after_removals
            files.unlink(self.object_path(*key))

    def _after_removals(self, directory: str) -> None:
        self._check_present()
        self._unsynced_names.mark(directory)
        with self._directories_lock:
            if directory == next(reversed(self._known), None):
                return  # new objects are being made in it
            try:
                files.remove_dir(directory)
            except OSError:
                return  # not empty, as a rule
            self._known.pop(directory, None)
        self._unsynced_names.mark(os.path.dirname(directory))

    def read(self, key: Key, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill ``buffer``; returns the bytes read, fewer only at the object's end."""
        begin = time.monotonic()
        count = self.call("read", key, files.read_into, fd, buffer, offset)
        self.latency.observe("read", len(buffer), time.monotonic() - begin)
        self.read_bytes += (
            count  # whole: threads take turns only where functions are called or loops repeated
        )
        return count

    def read_cached(self, fd: int, buffer: memoryview, offset: int) -> bool:
        """Fill ``buffer`` if that can be done without waiting, wholly or not at all. For the trio
        thread.
        """
        if not self._can_read_cached or self.absent or files.is_hooked():
            return False
        try:
            return files.read_cached(fd, buffer, offset) == len(buffer)
        except OSError as error:
            # A read in a worker will meet any other error again, and report it.
            self._can_read_cached = error.errno != errno.EOPNOTSUPP
            return False

    def write(self, key: Key, fd: int, data: bytes | memoryview, offset: int) -> None:
        self.writing.measure(len(data), self.call, "write", key, files.write_at, fd, data, offset)

    def truncate(self, key: Key, fd: int, length: int) -> None:
        self.call("write", key, files.truncate, fd, length)

    def punch(self, key: Key, fd: int, offset: int, length: int) -> None:
        """What is there of the range reads as zeros on return, and takes no space. Raises
        NotSupported.
        """
        self.allocate(key, fd, files.PUNCH_HOLE | files.KEEP_SIZE, offset, length)

    def allocate(self, key: Key, fd: int, mode: int, offset: int, length: int) -> None:
        """fallocate(2), modes as in core.files. Raises NoSpace; NotSupported where the filesystem
        cannot.
        """
        self.call("write", key, _change_allocation, fd, mode, offset, length)

    def stat(self, key: Key, fd: int) -> os.stat_result:
        return self.call("stat", key, os.fstat, fd)

    def sync_object(self, key: Key, fd: int) -> None:
        """The object's bytes and length are durable on return; its name after
        ``sync_names_near``.
        """
        self.writing.measure(0, self.call, "sync", key, files.sync_file, fd)

    def close_object(self, fd: int, removed: bool = False) -> None:
        """Does not block: a worker closes the descriptor where that may take long, as it does for a
        removed object.
        """
        if self.in_memory and not removed:
            files.close_file(fd)
        else:
            self.workers.post(files.close_file, fd)

    def close_idle(
        self,
        key: Key,
        fd: int,
        unsynced: AbstractContextManager | None,
        lost: Callable[[str], None],
    ) -> None:
        """A worker closes a descriptor that will be opened again. If something was written it is
        synced first, and ``lost`` is told if that fails: a later descriptor might not. ``unsynced``
        is held meanwhile, and by whoever syncs it then. Does not block."""
        if unsynced is None and self.is_local:
            files.close_file(fd)  # it keeps its name, so there is nothing to be freed
        elif unsynced is None:
            self.workers.post(files.close_file, fd)
        elif self.may_inline:
            self._sync_and_close(key, fd, unsynced, lost)
        else:
            self.workers.post(self._sync_and_close, key, fd, unsynced, lost)

    def _sync_and_close(
        self, key: Key, fd: int, unsynced: AbstractContextManager, lost: Callable[[str], None]
    ) -> None:
        try:
            with unsynced:
                try:
                    self.sync_object(key, fd)
                except FsError as error:
                    lost(str(error))
        finally:
            files.close_file(fd)

    # --- durability of names ---

    def sync_names_near(self, oid: int) -> None:
        """Which objects exist in the directory of ``oid`` is durable on return."""
        for path in self._directories_of(oid):
            self._sync_directory(path)

    def doubt_names_near(self, oid: int) -> None:
        """Names there may be the work of a process that died before it synced them."""
        self._unsynced_names.mark(*self._directories_of(oid))

    def _directories_of(self, oid: int) -> tuple[str, ...]:
        directory = naming.directory_of(self.path, oid)
        upper = os.path.dirname(directory)
        return directory, upper, os.path.dirname(upper), self.path

    def _sync_directory(self, directory: str) -> None:
        generation = self._unsynced_names.get(directory)
        if generation is not None:
            self.call("sync", directory, self._sync_dir_if_there, directory)
            self._unsynced_names.done(directory, generation)

    def _sync_dir_if_there(self, directory: str) -> None:
        try:
            files.sync_dir(directory)
        except FileNotFoundError:
            self._check_present()  # removed when it had become empty; its parent is marked

    def sync_all(self) -> None:
        """Everything on the server's filesystem is durable on return."""
        names = self._unsynced_names.snapshot()
        self.call("reach", self.path, self._check_present)
        self.call("sync", self.path, files.sync_filesystem, self.path)
        for directory, generation in names.items():
            self._unsynced_names.done(directory, generation)

    # --- what is there ---

    def space(self) -> Space:
        """Of the filesystem that the server lies on."""
        status = self.call("statvfs", self.path, os.statvfs, self.path)
        unit = status.f_frsize
        return Space(
            status.f_blocks * unit,
            status.f_bfree * unit,
            status.f_bavail * unit,
            status.f_files,
            status.f_ffree,
        )

    @property
    def device(self) -> int:
        """st_dev of the filesystem that the server lies on, as it was at mount."""
        return self.inode[0]

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        """The objects with first_oid <= oid < end_oid."""
        self.call("reach", self.path, self._check_present)
        return self.call("list", self.path, naming.list_range, self.path, first_oid, end_oid)

    def list_objects(self) -> Iterator[StoredObject | ForeignFile]:
        """All that lies in the directory, marker and claim apart, in order of path. Objects may
        come and go meanwhile.
        """
        self.call("reach", self.path, self._check_present)
        walk = naming.list_all(self.path)
        while (item := self.call("list", self.path, next, walk, None)) is not None:
            yield item
