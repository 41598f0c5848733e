"""Send a tree to a bucket: each file becomes one object under its own name.

An object has the mtime of its file in its metadata, as rclone writes it. If the bucket has an
object of the same size and mtime, the file is not sent: an export that was killed goes on where it
was. An object appears when it is complete.

A directory with a manifest is a checkpoint. Its manifest is sent when all below is there, and a
different manifest in the bucket is deleted before anything is sent: readers that find a manifest
find the files that it lists. If the bucket has the same manifest, the files that it lists are there
if their sizes are right, and are not asked for one by one. The files of a directory are sent after
the checkpoints in it, because they may name these.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from aifs.client.checkpoints import attributes, manifest
from aifs.client.checkpoints.catalog import is_pending_name
from aifs.client.checkpoints.hashing import is_reserved
from aifs.client.checkpoints.manifest import CheckpointError, Files
from aifs.client.checkpoints.publishing import step_of
from aifs.core.files import close_file, open_file, read_at
from aifs.core.names import VIRTUAL
from aifs.data.bucket import PART, PARTS_AT_ONCE
from aifs.transfer.bucket import Tree

_PARTS_MAX = 9000  # of one object; S3 takes 10,000
_LEFT_OUT = frozenset((os.fsdecode(VIRTUAL), ".snapshots"))

Show = Callable[[int, int], None]
"""Called with the bytes that are in the bucket, and with those that have been found."""


class NotSent(Exception):
    """A file or a checkpoint is not sent, for this reason: one line."""


@dataclass
class Sent:
    """The outcome of an export."""

    files: int = 0
    """How many there are to send."""
    bytes: int = 0
    """Of these."""
    sent: int = 0
    """The files that were sent."""
    sent_bytes: int = 0
    """Of these."""
    present_bytes: int = 0
    """Of files that were there."""
    checkpoints: int = 0
    """The checkpoints that are whole in the bucket."""
    left_out: int = 0
    """Symlinks and special files, and directories that are not published."""
    failed: list[str] = field(default_factory=list)
    """A line for each file, directory or checkpoint that is not there."""
    took_s: float = 0.0
    """Seconds."""


class _Checkpoint:
    """A directory with a manifest, while what lies below is sent."""

    def __init__(self, below: str, text: bytes, files: Files, is_there: bool) -> None:
        self.below = below
        """Its path below the top: '', or one that ends in a slash."""
        self.text = text
        """Of its manifest."""
        self.files = files
        """As the manifest lists them."""
        self.is_there = is_there
        """Whether the bucket has had this manifest from the beginning."""
        self.under_way = 0
        self.failed = False
        self.changed = threading.Condition()


def export(
    directory: str,
    bucket: Tree,
    *,
    parallel: int = 16,
    since: int | None = None,
    show: Show = lambda done, total: None,
) -> Sent:
    """Send all below ``directory``. What is sent is in the bucket on return, ``failed`` has the
    rest.

    ``parallel``: requests at a time. ``since``: directories in ``directory`` whose names end in
    this step, or in an earlier one, are left out. Raises OSError if the directory or the bucket
    cannot be listed.
    """
    began_s = time.monotonic()
    sending = _Sending(directory, bucket, parallel, since, show)
    sending.run()
    sending.sent.took_s = time.monotonic() - began_s
    return sending.sent


class _Sending:
    """One export: the caller's thread walks, others send."""

    def __init__(
        self, top: str, bucket: Tree, parallel: int, since: int | None, show: Show
    ) -> None:
        self._top = top
        self._bucket = bucket
        self._since = since
        self._show = show
        self._pool = ThreadPoolExecutor(parallel)
        """The threads that send."""
        self._room = threading.BoundedSemaphore(2 * parallel)
        """Of files that the pool has: it never has all of a tree."""
        self._large = threading.BoundedSemaphore(max(1, parallel // PARTS_AT_ONCE))
        """Of files that are sent in parts."""
        self._lock = threading.Lock()
        """Held while ``sent`` changes."""
        self._stopped = False
        """Whether the caller gives up: what has not begun is not sent."""
        self._unforeseen: BaseException | None = None
        """An error that is no fault of a file, for the caller."""
        self.sent = Sent()

    def run(self) -> None:
        with self._pool:
            try:
                self._send_directory("", None, is_there=True)
            except BaseException:
                self._stopped = True
                raise
        if self._unforeseen is not None:
            raise self._unforeseen

    # --- directories: in the caller's thread ---

    def _send_directory(self, below: str, within: _Checkpoint | None, is_there: bool) -> None:
        """Begin to send what lies in ``below``; wait for it if it is a checkpoint. ``is_there``:
        whether the bucket may have any of it."""
        with os.scandir(os.path.join(self._top, below)) as found:
            entries = sorted(found, key=lambda entry: entry.name)
        sizes, prefixes = self._bucket.list_one(below) if is_there else ({}, set[str]())
        if within is None and any(entry.name == manifest.NAME for entry in entries):
            self._send_checkpoint(below, entries, sizes, prefixes)
        else:
            self._send_entries(below, entries, within, sizes, prefixes)

    def _send_checkpoint(
        self, below: str, entries: list[os.DirEntry[str]], sizes: dict[str, int], prefixes: set[str]
    ) -> None:
        key = below + manifest.NAME
        try:
            text, files = self._read_manifest(key)
            found = self._bucket.get(key) if key in sizes else None
            is_there = found is not None and found[0] == text
            if not is_there:
                self._bucket.delete([key] if found else [])
        except (NotSent, OSError) as error:
            self._fail(key, error)
            return
        one = _Checkpoint(below, text, files, is_there)
        self._send_entries(below, entries, one, sizes, prefixes)
        with one.changed:
            one.changed.wait_for(lambda: not one.under_way)
        try:
            self._finish(one, key)
        except (NotSent, OSError) as error:
            self._fail(key, error)

    def _read_manifest(self, key: str) -> tuple[bytes, Files]:
        """Raises NotSent, OSError."""
        path = os.path.join(self._top, key)
        try:
            text = manifest.read_document(path)
            if text is None:
                raise NotSent("was removed while it was sent")
            return text, manifest.decode(text).files
        except CheckpointError as error:
            raise NotSent(str(error)) from None

    def _finish(self, one: _Checkpoint, key: str) -> None:
        """Send the manifest. Raises NotSent, OSError."""
        if one.failed:
            raise NotSent("the checkpoint is not whole in the bucket, so its manifest is not sent")
        if one.files:
            raise NotSent(f"the checkpoint has no {min(one.files)}, which its manifest lists")
        if self._read_manifest(key)[0] != one.text:
            raise NotSent("the checkpoint was replaced while it was sent; export it again")
        if not one.is_there:
            self._bucket.put(key, one.text)
        self.sent.checkpoints += 1

    def _send_entries(
        self,
        below: str,
        entries: list[os.DirEntry[str]],
        within: _Checkpoint | None,
        sizes: dict[str, int],
        prefixes: set[str],
    ) -> None:
        files = []
        for entry in entries:
            path = below + entry.name
            if entry.is_dir(follow_symlinks=False):
                if self._is_left_out(entry, below):
                    self.sent.left_out += 1
                    continue
                try:
                    self._send_directory(f"{path}/", within, f"{path}/" in prefixes)
                except OSError as error:
                    self._fail(f"{path}/", error, within)
            elif not entry.is_file(follow_symlinks=False):
                self.sent.left_out += 1
            elif not (is_reserved(entry.name) and (within is None or within.below == below)):
                files.append(path)
        for path in files:
            self._submit(path, sizes.get(path), within)

    def _is_left_out(self, entry: os.DirEntry[str], below: str) -> bool:
        if entry.name in _LEFT_OUT or is_pending_name(entry.name):
            return True
        if attributes.get(entry.path, attributes.PENDING):
            return True
        step = step_of(entry.name) if self._since is not None and not below else None
        return step is not None and self._since is not None and step <= self._since

    def _submit(self, path: str, there: int | None, within: _Checkpoint | None) -> None:
        """Have a file sent. ``there``: the size of its object, if there is one."""
        if within is not None:
            with within.changed:
                within.under_way += 1
        self._room.acquire()
        self._pool.submit(self._send_file, path, there, within).add_done_callback(self._done)

    def _done(self, future: Future[None]) -> None:
        self._room.release()
        self._unforeseen = self._unforeseen or future.exception()

    # --- files: in threads of the pool ---

    def _send_file(self, path: str, there: int | None, within: _Checkpoint | None) -> None:
        try:
            if not self._stopped:
                self._send(path, there, within)
        except (NotSent, OSError) as error:
            self._fail(path, error, within)
        except BaseException:
            if within is not None:
                within.failed = True
            raise
        finally:
            if within is not None:
                with within.changed:
                    within.under_way -= 1
                    within.changed.notify()

    def _send(self, path: str, there: int | None, within: _Checkpoint | None) -> None:
        """Raises NotSent, OSError."""
        fd = open_file(os.path.join(self._top, path), write=False)
        try:
            status = os.fstat(fd)
            with self._lock:
                self.sent.files += 1
                self.sent.bytes += status.st_size
            listed = None
            if within is not None:
                listed = within.files.pop(path.removeprefix(within.below), None)
            if listed and listed.size != status.st_size:
                raise NotSent(f"has {status.st_size} bytes, its manifest says {listed.size}")
            mtime = f"{status.st_mtime_ns // 10**9}.{status.st_mtime_ns % 10**9:09d}"
            if there == status.st_size and (
                (listed and within and within.is_there) or self._bucket.mtime(path) == mtime
            ):
                self._count(present=status.st_size)
                return
            self._put(path, fd, status.st_size, mtime)
            now = os.fstat(fd)
            if (now.st_size, now.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
                raise NotSent("was changed while it was sent; export it again")
            with self._lock:
                self.sent.sent += 1
        finally:
            close_file(fd)

    def _put(self, path: str, fd: int, size: int, mtime: str) -> None:
        """Raises NotSent, OSError."""
        try:
            path.encode()
        except UnicodeEncodeError:
            raise NotSent("its name is not UTF-8, and so no key of an object") from None
        if size <= PART:
            self._bucket.put_file(path, self._read(fd, size, 0), mtime)
            self._count(sent=size)
            return
        part = max(PART, -(-size // _PARTS_MAX))
        with self._large:
            at_once = max(1, PARTS_AT_ONCE * PART // part)
            self._bucket.put_parts(path, self._parts(fd, size, part), part, at_once, mtime)

    def _parts(self, fd: int, size: int, part: int) -> Iterator[bytes]:
        for offset in range(0, size, part):
            if self._stopped:
                raise NotSent("the export was ended")
            data = self._read(fd, min(part, size - offset), offset)
            yield data
            self._count(sent=len(data))

    def _read(self, fd: int, length: int, offset: int) -> bytes:
        """Raises NotSent, OSError."""
        data = read_at(fd, length, offset)
        if len(data) != length:
            raise NotSent("was cut while it was sent; export it again")
        return data

    def _count(self, sent: int = 0, present: int = 0) -> None:
        """Bytes."""
        with self._lock:
            self.sent.sent_bytes += sent
            self.sent.present_bytes += present
            self._show(self.sent.sent_bytes + self.sent.present_bytes, self.sent.bytes)

    def _fail(self, path: str, error: Exception, within: _Checkpoint | None = None) -> None:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        with self._lock:
            self.sent.failed.append(f"{path}: {reason}")
        if within is not None:
            within.failed = True
