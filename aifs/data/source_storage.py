"""The buckets of imported files: read by pins, never written.

It stands in place of a data server, but in no table: there is no marker, and nothing to list. A
removed file leaves its object where it is.
"""

import errno
import threading
from collections.abc import Hashable, Iterator
from itertools import count
from typing import NoReturn

from aifs.core.errors import NotSupported, StoreError, Unavailable
from aifs.core.log import logger
from aifs.data.bucket import Bucket
from aifs.data.marker import Identity, Marker
from aifs.data.storage import (
    ANYTHING,
    ForeignFile,
    Key,
    Space,
    Status,
    Storage,
    StoredObject,
)
from aifs.layout.imported import Pin

_log = logger(__name__)

_GONE = (errno.ESTALE, errno.ENOENT)


class Replaced(Unavailable):
    """The object of an imported file has another content now, or is gone: EIO."""


class SourceStorage(Storage):
    """All buckets together. Errors of reads are FsErrors: one bucket's are no other's."""

    def __init__(self) -> None:
        super().__init__("buckets")
        self._lock = threading.Lock()
        """Held while a bucket is opened."""
        self._buckets: dict[str, Bucket] = {}
        """By URL."""
        self._pins: dict[int, Pin] = {}
        """By handle."""
        self._numbers = count(1)
        self._logged: set[Pin] = set()
        """Those whose replacement is in the log."""

    def open_pinned(self, pin: Pin) -> int:
        """A handle to read by. No request."""
        handle = next(self._numbers)
        self._pins[handle] = pin
        return handle

    def close(self, handle: int) -> None:
        self._pins.pop(handle, None)

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        pin = self._pins[handle]
        wanted = buffer[: max(0, pin.size - offset)]
        if not wanted:
            return 0
        try:
            return self._bucket(pin.bucket).read_into(pin.key, wanted, offset, pin.etag)
        except StoreError as error:
            raise Unavailable(str(error)) from None
        except OSError as error:
            if error.errno not in _GONE:
                raise Unavailable(f"{error.filename}: {error.strerror}") from None
            reason = (
                f"{error.filename}: is not what was imported any more, it was replaced or deleted; "
                "aifs import --refresh takes over what is there now"
            )
            if pin not in self._logged:
                self._logged.add(pin)
                _log.warning("%s", reason)
            raise Replaced(reason) from None

    def _bucket(self, url: str) -> Bucket:
        with self._lock:
            bucket = self._buckets.get(url)
            if bucket is None:
                bucket = self._buckets[url] = Bucket(url)
            return bucket

    def stat(self, handle: int) -> Status:
        size = self._pins[handle].size
        return Status(size, -(-size // 512))

    def remove(self, key: Key) -> None:
        """The object is not ours."""

    # --- no server ---

    def _refuse(self, *_: object) -> NoReturn:
        raise NotSupported("buckets of imported files are only read")

    def read_marker(self) -> Marker:
        self._refuse()

    def mark(self, marker: Marker) -> None:
        self._refuse()

    def identify(self, identity: Identity, read_only: bool) -> None:
        self._refuse()

    def reach(self) -> None:
        """Each request finds out."""

    @property
    def place(self) -> None:
        return None

    @property
    def pool(self) -> Hashable:
        return self.address

    def where(self, key: Key) -> str:
        return f"the bucket of inode {key[0]}"

    def create(self, key: Key, exclusive: bool) -> int:
        self._refuse()

    def open(self, key: Key, write: bool) -> int | None:
        self._refuse()

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        self._refuse()

    def truncate(self, handle: int, length: int) -> None:
        self._refuse()

    def sync(self, handle: int) -> None:
        self._refuse()

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        return []

    def list_all(self) -> Iterator[StoredObject | ForeignFile]:
        return iter(())

    def space(self) -> Space:
        return Space(0, 0, 0, 0, 0)

    def get_blob(self, name: str) -> bytes | None:
        return None

    def put_blob(
        self, name: str, data: bytes, durable: bool = True, expected: object = ANYTHING
    ) -> bool:
        self._refuse()

    def list_blobs(self, prefix: str) -> dict[str, int]:
        return {}

    def delete_blob(self, name: str) -> None:
        self._refuse()
