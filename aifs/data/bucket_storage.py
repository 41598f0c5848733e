"""The storage of a data server that is a bucket of an object store (bucket.py).

Keys below the PREFIX of the URL: ``.aifs`` (marker), ``owner`` (claim), ``backup/NAME``, and
``objects/<oid, sixteen digits>.<ino>``, in hexadecimal, so that listings come in order of oid.

An object is uploaded by parts while it is written, and is there when it is synced. Removed objects
are deleted together, by ``sync_names``. A process that dies leaves uploads that nobody sees, which
a lifecycle rule of the bucket should abort.
"""

import errno
import math
import re
import threading
import time
from collections.abc import Hashable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count

from aifs.core.errors import NotSupported, StoreError
from aifs.core.units import format_size
from aifs.data.bucket import PACK, PART, Bucket, ObjectInfo, Upload
from aifs.data.marker import NAME as MARKER
from aifs.data.marker import Identity, Marker, check_identity, decode_marker, encode_marker
from aifs.data.naming import PROBE
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
)

OBJECTS = "objects"

FRESH_S = 1.0
"""For so long after the marker was right, a missing object is taken to be missing."""

PIECE = 4 << 20
"""Bytes that are handed to the upload at once; movers write so many."""

_AHEAD = 16
"""Pieces in memory before those that are missing are sent as zeros: holes."""

_TOTAL = 1 << 50
"""Bytes that a bucket without a limit is said to have room for."""

_LISTED_S = 60.0
"""Between two requests that list what a bucket with a limit holds, on average."""

_OTHERS = (f"{BACKUP}/", f"{ASIDE}/")

_OBJECT = re.compile(rf"{OBJECTS}/([0-9a-f]{{16}})\.(0|[1-9a-f][0-9a-f]*)")


def _key_of(key: Key) -> str:
    return f"{OBJECTS}/{key[1]:016x}.{key[0]:x}"


def _parse(key: str) -> Key | None:
    match = _OBJECT.fullmatch(key)
    return None if match is None else (int(match[2], 16), int(match[1], 16))


class _Making:
    """An object that is being written. Pieces are sent in turn, once they are whole, so bytes
    should come about in order; those of a piece that was sent cannot be written again."""

    def __init__(self, bucket: Bucket, key: Key) -> None:
        self.length = 0
        """Of what has been written, holes included."""
        self.is_unwanted = False
        """It was removed meanwhile."""
        self._bucket = bucket
        self._key = _key_of(key)
        """In the bucket."""
        self._upload: Upload | None = bucket.upload(self._key, PART if key[0] else PACK)
        """None: it has ended."""
        self._lock = threading.Lock()
        """Held while pieces change or are sent: others who write wait for the store, too."""
        self._pieces: dict[int, bytearray] = {}
        """By number, those in memory."""
        self._filled: dict[int, int] = {}
        """How many bytes of them have been written."""
        self._sent = 0
        """How many have been sent."""

    def write(self, data: memoryview, offset: int) -> None:
        with self._lock:
            self._require_unsent(offset)
            self.length = max(self.length, offset + len(data))
            while data:
                number, at = divmod(offset, PIECE)
                part = data[: PIECE - at]
                if len(part) == PIECE and number == self._sent:
                    self._pieces.pop(number, None)
                    self._send(part)
                else:
                    self._keep(number, at, part)
                data, offset = data[len(part) :], offset + len(part)
            while self._filled.get(self._sent, 0) >= PIECE or len(self._pieces) > _AHEAD:
                self._send_kept(PIECE)

    def _keep(self, number: int, at: int, part: memoryview) -> None:
        piece = self._pieces.setdefault(number, bytearray())
        piece.extend(bytes(max(at - len(piece), 0)))
        piece[at : at + len(part)] = part
        self._filled[number] = self._filled.get(number, 0) + len(part)

    def truncate(self, length: int) -> None:
        with self._lock:
            self._require_unsent(length)
            self.length = length
            for number, piece in self._pieces.items():
                del piece[max(length - number * PIECE, 0) :]
                self._filled[number] = min(self._filled[number], len(piece))

    def finish(self) -> None:
        """The object is in the store on return, unless it is unwanted."""
        with self._lock:
            if self.is_unwanted:
                self._end(NotSupported())
                return
            self._require_unsent(self._sent * PIECE)
            while (left := self.length - self._sent * PIECE) > 0:
                self._send_kept(min(left, PIECE))
            self._end(None)

    def abort(self) -> None:
        with self._lock:
            self._end(NotSupported())

    def _require_unsent(self, offset: int) -> None:
        if self._upload is None:
            raise OSError(errno.EIO, "its upload has failed", self._bucket.where(self._key))
        if offset < self._sent * PIECE:
            where = self._bucket.where(self._key)
            raise OSError(errno.EIO, f"bytes from {offset} on have been sent already", where)

    def _send_kept(self, length: int) -> None:
        piece = self._pieces.pop(self._sent, bytearray())
        piece.extend(bytes(length - len(piece)))
        self._send(memoryview(piece))

    def _send(self, piece: memoryview) -> None:
        self._filled.pop(self._sent, None)
        assert self._upload is not None
        try:
            self._upload.write(piece)
        except OSError as error:
            self._end(error)
            raise
        self._sent += 1

    def _end(self, error: Exception | None) -> None:
        """Complete the upload; with an error, abort it."""
        upload, self._upload = self._upload, None
        self._pieces.clear()
        if upload is not None and error is not None:
            upload.abort(error)
        elif upload is not None:
            upload.complete()


class _Used:
    """The bytes below the prefix: as last listed, and what this process has put since. Other
    processes' and deleted objects count with the next listing, which takes a request for 1,000."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._bytes = 0
        self._again_s = 0.0
        """When it is listed again, by time.monotonic()."""
        self._lock = threading.Lock()
        """Held while ``_bytes`` changes."""

    def add(self, length: int) -> None:
        with self._lock:
            self._bytes += length

    def look(self) -> int:
        """Have it listed, if it is time; the bytes as known now. Does not block."""
        with self._lock:
            is_time = time.monotonic() >= self._again_s
            self._again_s = math.inf if is_time else self._again_s
        if is_time:
            threading.Thread(target=self._list, daemon=True).start()
        return self._bytes

    def _list(self) -> None:
        before, total, pages = self._bytes, 0, 0
        try:
            for page in self._bucket.pages(""):
                total, pages = total + sum(info.size for info in page), pages + 1
            self.add(total - before)
        except OSError:
            pass  # other requests tell
        finally:
            self._again_s = time.monotonic() + _LISTED_S * max(pages, 1)


@dataclass
class _Open:
    key: Key
    length: int
    """Once it is immutable."""
    making: _Making | None = None
    """None: it is in the store."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held while it is synced."""


class BucketStorage(Storage):
    """Objects are written once; an upload is one PUT, or several parts (see bucket.PART)."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._bucket = Bucket(address)
        self._used = _Used(self._bucket)
        self._identity: Identity | None = None
        """Whose it is, once it has been identified."""
        self._read_only = True
        """As said when it was identified: then nothing is put."""
        self._marked_s = 0.0
        """When the marker was right, by time.monotonic(); 0: not yet."""
        self._open: dict[int, _Open] = {}
        """By handle."""
        self._numbers = count(1)
        """Of handles."""
        self._lock = threading.Lock()
        """Held while what is open, or to be deleted, changes."""
        self._doomed: set[str] = set()
        """Keys of removed objects that have not been deleted yet."""
        self._deleting = threading.Lock()
        """Held while they are deleted."""

    # --- identity ---

    def read_marker(self) -> Marker:
        try:
            found = self._bucket.get(MARKER)
        except OSError as error:
            if error.errno == errno.ENOENT:
                raise StoreError(f"{self.address}: {error.strerror}") from None
            raise StoreError(f"{self.address}: {error}") from error
        if found is None:
            raise StoreError(f"{self.address}: is not a data server of a store (it has no marker)")
        return decode_marker(found[0], self._bucket.where(MARKER))

    def mark(self, marker: Marker) -> None:
        if self._bucket.get(MARKER) is None:
            self._require_empty()
            require_conditions(self._bucket)
        self._bucket.put(MARKER, encode_marker(marker))

    def _require_empty(self) -> None:
        for page in self._bucket.pages("", size=10):
            for found in page:
                if found.key != PROBE:
                    where = self._bucket.where(found.key)
                    raise StoreError(f"{where}: is not of this store; name an unused prefix")

    def erase(self) -> None:
        try:
            self.read_marker()
        except StoreError:
            return
        for page in self._bucket.pages(OBJECTS):
            self._bucket.delete([found.key for found in page if _parse(found.key)])
        self.give_up()

    def identify(self, identity: Identity, read_only: bool) -> None:
        self._identity, self._read_only = identity, read_only
        self.reach()

    def reach(self) -> None:
        marker = self.read_marker()
        if self._identity is not None:
            check_identity(self.address, marker, self._identity)
        self._marked_s = time.monotonic()

    def _require(self) -> None:
        """The marker was right a moment ago."""
        if time.monotonic() >= self._marked_s + FRESH_S:
            self.reach()

    @property
    def place(self) -> Hashable | None:
        return self._bucket.place if self._marked_s else None

    @property
    def pool(self) -> Hashable:
        return self._bucket.place

    def works(self) -> bool:
        try:
            self.reach()
            if not self._read_only:
                self._bucket.put(PROBE, b"x")
                self._bucket.delete([PROBE])
        except (OSError, StoreError):
            return False
        return True

    # --- objects ---

    def where(self, key: Key) -> str:
        return self._bucket.where(_key_of(key))

    def create(self, key: Key, exclusive: bool) -> int:
        found = self._find(key)
        if found is None:
            return self._add(_Open(key, 0, _Making(self._bucket, key)))
        if exclusive:
            raise FileExistsError(errno.EEXIST, "there is such an object", self.where(key))
        return self._add(_Open(key, found.size))

    def open(self, key: Key, write: bool) -> int | None:
        found = self._find(key)
        return None if found is None else self._add(_Open(key, found.size))

    def _find(self, key: Key) -> ObjectInfo | None:
        name = _key_of(key)
        if name in self._doomed:
            self._delete_doomed()
        found = self._bucket.head(name)
        if found is None or self._marked_s == 0:
            self._require()
        return found

    def _add(self, opened: _Open) -> int:
        with self._lock:
            handle = next(self._numbers)
            self._open[handle] = opened
        return handle

    def close(self, handle: int) -> None:
        with self._lock:
            opened = self._open.pop(handle)
        if opened.making is not None:
            opened.making.abort()

    def read(self, handle: int, buffer: memoryview, offset: int) -> int:
        opened = self._open[handle]
        length = min(len(buffer), self.stat(handle).length - offset)
        if length <= 0:
            return 0
        if opened.making is not None:
            raise NotSupported(f"{self.where(opened.key)}: cannot be read before it is synced")
        return self._bucket.read_into(_key_of(opened.key), buffer[:length], offset)

    def write(self, handle: int, data: bytes | memoryview, offset: int) -> None:
        making, limit = self._making(handle), self._bucket.limit
        if limit and self._used.look() + offset + len(data) > limit:
            reason = f"its limit of {format_size(limit)} is reached; raise it, or delete files"
            raise OSError(errno.ENOSPC, reason, self._bucket.url)
        making.write(memoryview(data), offset)

    def truncate(self, handle: int, length: int) -> None:
        self._making(handle).truncate(length)

    def _making(self, handle: int) -> _Making:
        opened = self._open[handle]
        if opened.making is None:
            raise NotSupported(f"{self.where(opened.key)}: cannot be changed any more")
        return opened.making

    def stat(self, handle: int) -> Status:
        opened = self._open[handle]
        making = opened.making
        length = opened.length if making is None else making.length
        return Status(length, -(-length // 512))

    def sync(self, handle: int) -> None:
        opened = self._open[handle]
        with opened.lock:
            if opened.making is not None:
                opened.making.finish()
                opened.length = opened.making.length
                self._used.add(opened.length)
                opened.making = None

    def remove(self, key: Key) -> None:
        self._require()
        with self._lock:
            self._doomed.add(_key_of(key))
            others = [opened for opened in self._open.values() if opened.key == key]
        for opened in others:
            if (making := opened.making) is not None:
                making.is_unwanted = True
                with opened.lock:
                    pass  # what is being synced will be there, to be deleted

    def set_aside(self, keys: Sequence[Key]) -> None:
        self._require()
        for key in map(_key_of, keys):
            self._bucket.move(key, f"{ASIDE}/{key.removeprefix(f'{OBJECTS}/')}")

    def sync_names(self, oid: int) -> None:
        self._delete_doomed()

    def sync_all(self) -> None:
        self._delete_doomed()

    def _delete_doomed(self) -> None:
        with self._deleting:
            with self._lock:
                doomed, self._doomed = self._doomed, set()
            try:
                self._bucket.delete(sorted(doomed))
            except BaseException:
                with self._lock:
                    self._doomed |= doomed
                raise

    # --- what is there ---

    def list_range(self, first_oid: int, end_oid: int) -> list[Key]:
        self.reach()
        self._delete_doomed()
        keys: list[Key] = []
        for page in self._bucket.pages(OBJECTS, after=f"{OBJECTS}/{first_oid:016x}"):
            found = [key for key in map(_parse, (info.key for info in page)) if key is not None]
            keys += [key for key in found if key[1] < end_oid]
            if found and found[-1][1] >= end_oid:
                break
        return keys

    def list_all(self) -> Iterator[StoredObject | ForeignFile]:
        self.reach()
        self._delete_doomed()
        for page in self._bucket.pages(""):
            for info in page:
                key = _parse(info.key)
                if key is not None:
                    yield StoredObject(*key, info.size, info.size, self.where(key))
                elif info.key not in (MARKER, CLAIM, PROBE) and not info.key.startswith(_OTHERS):
                    yield ForeignFile(self._bucket.where(info.key))

    def space(self) -> Space:
        total = free = self._bucket.limit or _TOTAL
        if self._bucket.limit:
            free = max(total - self._used.look(), 0)
        return Space(total, free, free, 1 << 40, 1 << 40)

    # --- blobs ---

    def get_blob(self, name: str) -> bytes | None:
        found = self._bucket.get(name)
        if found is None:
            self._require()
            return None
        return found[0]

    def put_blob(
        self, name: str, data: bytes, durable: bool = True, expected: object = ANYTHING
    ) -> bool:
        self._require()
        if expected is ANYTHING:
            self._bucket.put(name, data)
            return True
        found = self._bucket.get(name)
        content, etag = (None, None) if found is None else found
        return content == expected and self._bucket.put(name, data, etag) is not None

    def list_blobs(self, prefix: str) -> dict[str, int]:
        self._require()
        return {
            info.key.removeprefix(f"{prefix}/"): info.size
            for page in self._bucket.pages(prefix)
            for info in page
        }

    def delete_blob(self, name: str) -> None:
        self._require()
        self._bucket.delete([name])


def require_conditions(bucket: Bucket) -> None:
    """The store does what claims need. Raises OSError, StoreError."""
    first = bucket.put(PROBE, b"1")
    is_safe = bucket.put(PROBE, b"2", None) is None
    is_safe = is_safe and bucket.put(PROBE, b"3", '"none"') is None
    is_safe = is_safe and bucket.put(PROBE, b"4", first) is not None
    with nullcontext() if is_safe else suppress(OSError):
        bucket.delete([PROBE])
    if not is_safe:
        raise StoreError(
            f"{bucket.url}: ignores conditions of a PUT (If-None-Match, If-Match), so two "
            "hosts could use it at once; use a store, or a version of it, that knows them"
        )
