"""Objects as files below a directory that is marked as a store's: a disk, NFS, any filesystem.

See naming for the places. Directories are made when needed, and removed when empty.
"""

import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from aifs.core import files, mountinfo
from aifs.core.errors import NotSupported, StoreError
from aifs.data import naming
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Identity, Marker, check_identity, read_marker, write_marker
from aifs.data.storage import (
    ANYTHING,
    ASIDE,
    BACKUP,
    CLAIM,
    ForeignFile,
    Key,
    Space,
    Status,
    Storage,
    StoredObject,
    Unsynced,
)

_KNOWN_DIRECTORIES = 1024


class DirectoryStorage(Storage):
    """``address`` is the path of the directory. Handles are descriptors."""

    in_place = append = holes = descriptor = can_read_cached = True

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._identity: Identity | None = None
        """Whose it must be, once it has been identified."""
        self._writable = False
        """Whether it may be changed: it was identified, and not as read-only."""
        self._inode: tuple[int, int] | None = None
        """(st_dev, st_ino) of the directory, as last identified."""
        self._known: dict[str, None] = {}
        """Object directories that exist, oldest first."""
        self._thinned: set[str] = set()
        """Object directories from which names were taken, which may be empty now."""
        self._directories_lock = threading.Lock()
        """Held while object directories are made and removed."""
        self._is_shared = False
        """See ``share``."""
        self._unsynced_names = Unsynced[str]()
        """Directories in which names have changed that may not be durable."""
        self._sure_names: dict[str, None] = {}
        """Directories synced, oldest first, so earlier processes' names there are durable; not all
        of movers, which may die at any time."""
        self._names_lock = threading.Lock()
        """Held while syncing directories, so that calls meanwhile share the next sync."""

    @property
    def may_inline(self) -> bool:
        return self.in_memory and not files.is_hooked()

    def share(self) -> None:
        self._is_shared = True

    # --- identity ---

    def read_marker(self) -> Marker:
        return read_marker(self.address)

    def mark(self, marker: Marker) -> None:
        files.make_dirs(self.address)
        write_marker(self.address, marker)

    def erase(self) -> None:
        erase_directory(self.address, (naming.OBJECTS, naming.BLOCKS, BACKUP, CLAIM, MARKER))

    def give_up(self) -> None:
        """Empty directories go, too."""
        for directory, _, names in os.walk(
            os.path.join(self.address, naming.OBJECTS), topdown=False
        ):
            if not names and not os.listdir(directory):
                files.remove_dir(directory)
        super().give_up()
        if os.path.isdir(backups := os.path.join(self.address, BACKUP)):
            files.remove_dir(backups)
        files.sync_dir(self.address)

    def identify(self, identity: Identity, read_only: bool) -> None:
        with suppress(OSError):  # the marker cannot be read then, either, and that says more
            status = os.stat(self.address)
            self._inode = status.st_dev, status.st_ino
        self._identity = identity
        self._check_marker()
        try:
            self.in_memory = mountinfo.is_in_memory(self.address)
            self.is_local = mountinfo.is_local(self.address)
        except OSError as error:
            raise StoreError(f"{self.address}: {error.strerror}") from error
        if not read_only and not os.access(self.address, os.W_OK):
            raise StoreError(
                f"{self.address}: cannot be written to; make it writable, or mount with -o ro"
            )
        self._writable = not read_only

    def _check_marker(self) -> None:
        marker = read_marker(self.address)
        if self._identity is not None:
            check_identity(self.address, marker, self._identity)

    def reach(self) -> None:
        status = os.stat(self.address)
        if (status.st_dev, status.st_ino) != self._inode:
            self._check_marker()

    @property
    def place(self) -> tuple[int, int] | None:
        return self._inode

    @property
    def pool(self) -> int:
        """st_dev of the filesystem."""
        assert self._inode is not None
        return self._inode[0]

    def works(self) -> bool:
        return super().works() and naming.works(self.address, self._writable)

    # --- objects ---

    def where(self, key: Key) -> str:
        return naming.object_path(self.address, *key)

    def create(self, key: Key, exclusive: bool) -> int:
        directory = naming.directory_of(self.address, key[1])
        path = f"{directory}/{naming.name_of(*key)}"
        while True:
            if directory not in self._known:
                self._make_directory(directory)
            if not exclusive:
                with suppress(FileNotFoundError):
                    fd = files.open_file(path)
                    self._mark_name(directory)  # a mover that died may have made it
                    return fd
            try:
                fd = files.open_file(path, create=True, exclusive=exclusive, write=not exclusive)
            except FileNotFoundError:
                # The last other object in it has just been removed, and the directory with it.
                with self._directories_lock:
                    self._known.pop(directory, None)
                continue
            self._mark_name(directory)
            return fd

    def _mark_name(self, directory: str) -> None:
        self._unsynced_names.mark(directory)
        if self._is_shared:  # others may have removed the directory that we know, and made it
            self._unsynced_names.mark(os.path.dirname(directory))

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
            self._unsynced_names.mark(self.address, objects, upper, directory)
            if len(self._known) >= _KNOWN_DIRECTORIES:
                del self._known[next(iter(self._known))]
            self._known[directory] = None

    def open(self, key: Key, write: bool) -> int | None:
        path = self.where(key)
        try:
            return files.open_file(path, write=write and self._writable)
        except FileNotFoundError:
            self.reach()
            return None
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            # Its disk has become read-only: what is there can be rescued.
            return files.open_file(path, write=False)

    def close(self, handle: int) -> None:
        files.close_file(handle)

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        return files.read_into(handle, buffer, offset)

    def read_cached(self, handle: int, buffer: memoryview, offset: int) -> bool:
        """The part that the page cache has."""
        if not self.can_read_cached:
            return False
        try:
            return files.read_cached(handle, buffer, offset) == len(buffer)
        except OSError as error:
            # A read in a worker will meet any other error again, and report it.
            self.can_read_cached = error.errno != errno.EOPNOTSUPP
            return False

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        files.write_at(handle, data, offset)

    def start_writing(self, handle: int, offset: int, length: int) -> None:
        files.start_writing(handle, offset, length)

    def truncate(self, handle: int, length: int) -> None:
        files.truncate(handle, length)

    def punch(self, handle: int, offset: int, length: int) -> None:
        try:
            files.change_allocation(handle, files.PUNCH_HOLE | files.KEEP_SIZE, offset, length)
        except OSError as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            raise NotSupported from None  # an answer about the filesystem, no failure of the device

    def next_data(self, handle: int, offset: int, end: int) -> tuple[int, int] | None:
        return files.next_data(handle, offset, end)

    def stat(self, handle: int) -> Status:
        status = os.fstat(handle)
        return Status(status.st_size, status.st_blocks)

    def sync(self, handle: int) -> None:
        files.sync_file(handle)

    def remove(self, key: Key) -> None:
        directory = naming.directory_of(self.address, key[1])
        try:
            files.unlink(f"{directory}/{naming.name_of(*key)}")
        except FileNotFoundError:
            self.reach()
        self._unsynced_names.mark(directory)
        self._thinned.add(directory)

    def set_aside(self, keys: Sequence[Key]) -> None:
        aside = os.path.join(self.address, ASIDE)
        files.make_dirs(aside)
        for key in keys:
            path, name, suffix = self.where(key), naming.name_of(*key), 0
            while os.path.lexists(
                target := os.path.join(aside, f"{name}.{suffix}" if suffix else name)
            ):
                suffix += 1
            files.rename(path, target)
        for directory in sorted({aside, *(os.path.dirname(self.where(key)) for key in keys)}):
            files.sync_dir(directory)
        files.sync_dir(self.address)

    # --- durability of names ---

    def sync_names(self, oid: int) -> None:
        directories = self._directories_of(oid)
        if directories[0] in self._thinned:
            self._remove_if_empty(directories[0])
        if all(self._unsynced_names.get(directory) is None for directory in directories):
            return
        with self._names_lock:
            for directory in directories:
                generation = self._unsynced_names.get(directory)
                if generation is not None:
                    try:
                        if not self.may_inline:  # else there is nothing that could be durable
                            files.sync_dir(directory)
                    except FileNotFoundError:
                        self.reach()  # removed when it had become empty; its parent is marked
                    else:
                        self._note_sure(directory)
                    self._unsynced_names.done(directory, generation)

    def _note_sure(self, directory: str) -> None:
        if len(self._sure_names) >= _KNOWN_DIRECTORIES:
            del self._sure_names[next(iter(self._sure_names))]
        self._sure_names[directory] = None

    def doubt_names(self, oid: int, alone: bool) -> None:
        sure = self._sure_names if alone else ()
        # What this process has changed is marked already.
        self._unsynced_names.mark(*[p for p in self._directories_of(oid) if p not in sure])

    def _directories_of(self, oid: int) -> tuple[str, ...]:
        directory = naming.directory_of(self.address, oid)
        upper = os.path.dirname(directory)
        return directory, upper, os.path.dirname(upper), self.address

    def _remove_if_empty(self, directory: str) -> None:
        with self._directories_lock:
            self._thinned.discard(directory)
            if self._is_shared or directory == next(reversed(self._known), None):
                return  # new objects are being made in it
            try:
                files.remove_dir(directory)
            except OSError:
                return  # not empty, as a rule
            self._known.pop(directory, None)
        self._unsynced_names.mark(os.path.dirname(directory))

    def sync_all(self) -> None:
        """Everything on the filesystem."""
        names = self._unsynced_names.snapshot()
        self.reach()
        files.sync_filesystem(self.address)
        for directory, generation in names.items():
            self._unsynced_names.done(directory, generation)

    # --- what is there ---

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        self.reach()
        return naming.list_range(self.address, first_oid, end_oid)

    def id_bound(self) -> int:
        return naming.id_bound(self.address)

    def list_all(self) -> Iterator[StoredObject | ForeignFile]:
        self.reach()
        yield from naming.list_all(self.address)

    def space(self) -> Space:
        """Of the filesystem."""
        status = os.statvfs(self.address)
        unit = status.f_frsize
        return Space(
            status.f_blocks * unit,
            status.f_bfree * unit,
            status.f_bavail * unit,
            status.f_files,
            status.f_ffree,
        )

    # --- blobs ---

    def get_blob(self, name: str) -> bytes | None:
        path = os.path.join(self.address, name)
        content = read_slots(path) if name == CLAIM else files.read_file(path)
        if content is None:
            self.reach()
        return content

    def put_blob(
        self, name: str, data: bytes, durable: bool = True, expected: object = ANYTHING
    ) -> bool:
        self.reach()
        path = os.path.join(self.address, name)
        if name == CLAIM:
            return write_slots(path, data, durable, expected)
        directory = os.path.dirname(path)
        if not os.path.isdir(directory):
            files.make_dir(directory)
            files.sync_dir(self.address)
        put_file(path, data)
        return True

    def list_blobs(self, prefix: str) -> dict[str, int]:
        try:
            with os.scandir(os.path.join(self.address, prefix)) as entries:
                return {
                    entry.name: entry.stat().st_size
                    for entry in entries
                    if entry.is_file(follow_symlinks=False)
                }
        except FileNotFoundError:
            self.reach()
            return {}

    def delete_blob(self, name: str) -> None:
        try:
            files.unlink(os.path.join(self.address, name))
        except FileNotFoundError:
            self.reach()


def erase_directory(path: str, names: Iterable[str]) -> None:
    """Delete these of what is in a directory, with all below. Durable on return. Raises OSError."""
    for name in names:
        own = os.path.join(path, name)
        for directory, _, inner in os.walk(own, topdown=False):
            for file in inner:
                files.unlink(os.path.join(directory, file))
            files.remove_dir(directory)
        if os.path.lexists(own):
            files.unlink(own)
    files.sync_dir(path)


# --- whole files of any directory -----------------------------------------------------------------


def put_file(path: str, data: bytes) -> None:
    """Make ``path`` hold ``data``, durably. Raises OSError, with nothing left, without room or if
    it reads back differently."""
    try:
        files.replace_file(path, data)
        if files.read_file(path, anew=True) != data:
            raise OSError(errno.EIO, "what is read back is not what was written")
    except OSError:
        for name in (f"{path}.new", path):
            with suppress(OSError):
                files.unlink(name)
        raise


# A small file that is written again and again, in place: two slots, of which the newer counts.
#
# Format: two slots, at 0 and 65536, each an 8-digit hexadecimal CRC-32 of what follows up to the
# end of the content, a space, the slot's generation and the content's length in bytes (16 and 8
# digits, hexadecimal, each with a space behind it), and the content. Bytes behind that mean
# nothing. The slot with the larger generation counts, and the other one is written next: a torn
# write leaves the older content, and a full disk is no obstacle. A slot that is not whole counts as
# empty.

_SLOT_BYTES = 64 << 10
_HEAD_BYTES = 35


def read_slots(path: str) -> bytes | None:
    """The content that counts; None if there is none. Blocks. Raises OSError."""
    return _newest(files.read_file(path) or b"")[1]


def write_slots(path: str, content: bytes, durable: bool, expected: object) -> bool:
    """Replace the content, of up to 65,501 bytes; whether it was done. Blocks. Raises OSError.

    ``durable``: on stable storage on return. ``expected``: the content must be this (None: none),
    unless ANYTHING. If the filesystem has locks, one process at a time compares and writes.
    """
    assert len(content) <= _SLOT_BYTES - _HEAD_BYTES
    fd = files.open_file(path, create=True)
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)  # until it is closed
        generation, before = _newest(files.read_at(fd, 2 * _SLOT_BYTES, 0))
        if expected is not ANYTHING and before != expected:
            return False
        slot = _encode(generation + 1, content)
        files.write_at(fd, slot, (generation + 1) % 2 * _SLOT_BYTES)
        if before is None:
            _give_to_owner_of(os.path.dirname(path), fd)
            # The other one has its space from now on, too.
            files.write_at(fd, slot, generation % 2 * _SLOT_BYTES)
        if durable:
            files.sync_file(fd)
    finally:
        files.close_file(fd)
    if durable:
        files.sync_dir(os.path.dirname(path))
    return True


def _give_to_owner_of(directory: str, fd: int) -> None:
    """Give files that root made, perhaps by fsck, to the user of the store."""
    status = os.stat(directory)
    if status.st_uid != os.geteuid():
        with suppress(OSError):
            files.set_owner(fd, status.st_uid, status.st_gid)


def _encode(generation: int, content: bytes) -> bytes:
    text = b"%016x %08x %s" % (generation, len(content), content)
    return b"%08x %s" % (zlib.crc32(text), text)


def _newest(file: bytes) -> tuple[int, bytes | None]:
    """Generation and content that count, or 0 and None."""
    slots = [file[start : start + _SLOT_BYTES] for start in (0, _SLOT_BYTES)]
    found = [decoded for slot in slots if (decoded := _decode(slot)) is not None]
    return max(found, default=(0, None), key=lambda each: each[0])


def _decode(slot: bytes) -> tuple[int, bytes] | None:
    try:
        check, generation, length = (
            int(number, 16) for number in slot[:_HEAD_BYTES].split(b" ")[:3]
        )
    except ValueError:
        return None
    end = _HEAD_BYTES + length
    if zlib.crc32(slot[9:end]) != check or end > len(slot):
        return None
    return generation, slot[_HEAD_BYTES:end]
