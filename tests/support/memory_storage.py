"""A storage in memory that can do the least a storage must: objects are written once, and are there
when they have been synced. So much an object store can do, too.
"""

import errno
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from aifs.core.errors import NotSupported, StoreError
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Identity, Marker, check_identity, decode_marker, encode_marker
from aifs.data.storage import ANYTHING, ForeignFile, Key, Space, Status, Storage, StoredObject

_TOTAL = 1 << 40


@dataclass
class Bucket:
    """What lasts from one mount to the next."""

    objects: dict[Key, bytes] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    is_there: bool = True
    lock: threading.Lock = field(default_factory=threading.Lock)


BUCKETS: dict[str, Bucket] = {}
"""By address."""


@dataclass
class _Open:
    key: Key
    content: bytearray | bytes
    """Immutable once it is synced."""
    is_removed: bool = False


class MemoryStorage(Storage):
    """The bucket at ``address``, which is made when it is first used."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._bucket = BUCKETS.setdefault(address, Bucket())
        self._identity: Identity | None = None
        self._open: dict[int, _Open] = {}
        self._numbers = count(1)
        self._lock = threading.Lock()

    # --- identity ---

    def read_marker(self) -> Marker:
        content = self._bucket.blobs.get(MARKER) if self._bucket.is_there else None
        if content is None:
            raise StoreError(f"{self.address}: is not a bucket of a store")
        return decode_marker(content, self.address)

    def mark(self, marker: Marker) -> None:
        self._bucket.blobs[MARKER] = encode_marker(marker)

    def identify(self, identity: Identity, read_only: bool) -> None:
        self._identity = identity
        self._check_marker()

    def _check_marker(self) -> None:
        marker = self.read_marker()
        if self._identity is not None:
            check_identity(self.address, marker, self._identity)

    def reach(self) -> None:
        if not self._bucket.is_there:
            raise FileNotFoundError(errno.ENOENT, "there is no such bucket", self.address)
        self._check_marker()

    @property
    def place(self) -> str | None:
        return None if self._identity is None else self.address

    @property
    def pool(self) -> str:
        return self.address

    # --- objects ---

    def where(self, key: Key) -> str:
        return f"{self.address}/{key[1]:x}.{key[0]:x}"

    def create(self, key: Key, exclusive: bool) -> int:
        self.reach()
        with self._lock:
            if key in self._bucket.objects:
                if exclusive:
                    raise FileExistsError(errno.EEXIST, "there is such an object", self.where(key))
                return self._add(_Open(key, self._bucket.objects[key]))
            return self._add(_Open(key, bytearray()))

    def open(self, key: Key, write: bool) -> int | None:
        self.reach()
        with self._lock:
            content = self._bucket.objects.get(key)
            return None if content is None else self._add(_Open(key, content))

    def _add(self, opened: _Open) -> int:
        handle = next(self._numbers)
        self._open[handle] = opened
        return handle

    def close(self, handle: int) -> None:
        del self._open[handle]

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        self.reach()
        part = self._open[handle].content[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        with self._lock:
            content = self._writable(handle)
            content.extend(bytes(max(offset - len(content), 0)))
            content[offset : offset + len(data)] = data

    def truncate(self, handle: int, length: int) -> None:
        with self._lock:
            content = self._writable(handle)
            content.extend(bytes(max(length - len(content), 0)))
            del content[length:]

    def _writable(self, handle: int) -> bytearray:
        self.reach()
        opened = self._open[handle]
        if isinstance(opened.content, bytes):
            raise NotSupported(f"{self.where(opened.key)}: cannot be changed any more")
        return opened.content

    def stat(self, handle: int) -> Status:
        length = len(self._open[handle].content)
        return Status(length, -(-length // 512))

    def sync(self, handle: int) -> None:
        self.reach()
        with self._lock:
            opened = self._open[handle]
            if isinstance(opened.content, bytearray):
                opened.content = bytes(opened.content)
                if not opened.is_removed:
                    self._bucket.objects[opened.key] = opened.content

    def remove(self, key: Key) -> None:
        self.reach()
        with self._lock:
            self._bucket.objects.pop(key, None)
            for opened in self._open.values():
                opened.is_removed |= opened.key == key

    # --- what is there ---

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        self.reach()
        return [key for key in tuple(self._bucket.objects) if first_oid <= key[1] < end_oid]

    def list_all(self) -> Iterator[StoredObject | ForeignFile]:
        self.reach()
        for key, content in sorted(self._bucket.objects.items(), key=lambda item: item[0][1]):
            yield StoredObject(*key, len(content), len(content), self.where(key))

    def space(self) -> Space:
        self.reach()
        free = _TOTAL - sum(map(len, tuple(self._bucket.objects.values())))
        return Space(_TOTAL, free, free, 1 << 30, (1 << 30) - len(self._bucket.objects))

    # --- blobs ---

    def get_blob(self, name: str) -> bytes | None:
        self.reach()
        return self._bucket.blobs.get(name)

    def put_blob(
        self, name: str, data: bytes, durable: bool = True, expected: object = ANYTHING
    ) -> bool:
        self.reach()
        with self._bucket.lock:
            if expected is not ANYTHING and self._bucket.blobs.get(name) != expected:
                return False
            self._bucket.blobs[name] = bytes(data)
        return True

    def list_blobs(self, prefix: str) -> dict[str, int]:
        self.reach()
        return {
            name.removeprefix(f"{prefix}/"): len(content)
            for name, content in self._bucket.blobs.items()
            if name.startswith(f"{prefix}/")
        }

    def delete_blob(self, name: str) -> None:
        self.reach()
        self._bucket.blobs.pop(name, None)
