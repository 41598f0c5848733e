"""Make files of a mount of the objects of a bucket; their bytes stay there (layout/imported.py).

The bucket is listed in a thread of its own. The daemon makes the files of a directory, some at a
time, unless they are there: so an import that was killed goes on where it was. Objects that have
changed since are taken over on demand: the new file is made aside and renamed over the old one.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Queue
from threading import Thread

from aifs.core import files, ioctl, trees
from aifs.core.names import VIRTUAL, is_name
from aifs.data.bucket import Bucket, ObjectInfo

_BATCH = 256  # files of one call
_CALL_BYTES = max(ioctl.SIZES) - 1024  # of their JSON, and the other fields'
_PAGES = 8  # that are listed ahead
_ASIDE = ".aifs-import-"
_ASIDE_S = 3600.0  # the age at which what a killed import has left is removed

_Entry = tuple[str, int, int, str]
"""Name, bytes, mtime in ns, ETag."""

Show = Callable[[int, int], None]
"""Called with the objects that are done, and with those that are listed."""


@dataclass
class ImportResult:
    """The outcome. Counts are of objects, if they do not say bytes."""

    objects: int = 0
    """How many there are."""
    bytes: int = 0
    """Of these."""
    made: int = 0
    """New files."""
    same: int = 0
    """Files that were there."""
    changed: int = 0
    """Files that are there, pinned to what the bucket does not have any more."""
    refreshed: int = 0
    """Files that were so, and have what the bucket has now."""
    kept: int = 0
    """Files, or directories, of these names that are no imported ones: they stay."""
    failed: list[str] = field(default_factory=list)
    """A line for each object that has no file."""
    took_s: float = 0.0
    """Seconds."""

    @property
    def done(self) -> int:
        """How many have been looked at."""
        there = self.same + self.changed + self.refreshed + self.kept
        return self.made + there + len(self.failed)


def import_objects(
    url: str,
    directory: str,
    *,
    refresh: bool = False,
    show: Show = lambda done, total: None,
) -> ImportResult:
    """Make a file below ``directory``, in a mount, for each object of the bucket. Raises OSError,
    StoreError. ``refresh``: also files whose objects have changed become what is there now."""
    began_s = time.monotonic()
    importing = _Importing(url, directory, refresh, show)
    importing.run()
    importing.told.took_s = time.monotonic() - began_s
    return importing.told


class _Importing:
    def __init__(self, url: str, directory: str, refresh: bool, show: Show) -> None:
        self._url = url
        self._bucket = Bucket(url)
        self._top = directory
        self._refresh = refresh
        self._show = show
        self._aside = os.path.join(directory, _ASIDE + os.urandom(4).hex())
        """The directory in which files are made that replace others; there while needed."""
        self._batch: list[_Entry] = []
        """Of one directory, to be made."""
        self._bytes = 0
        """Of the JSON of the batch."""
        self._below = ""
        """Which directory: '', or a path that ends in a slash."""
        self.told = ImportResult()
        """What has been done."""

    def run(self) -> None:
        trees.make_dir(self._top)
        self._remove_leftovers()
        marker: ObjectInfo | None = None
        for found in _listed(self._bucket):
            if marker is not None and not found.key.startswith(f"{marker.key}/"):
                self._add(marker)  # else it only says that there is a directory
            marker = None if found.size else found
            if found.size:
                self._add(found)
        if marker is not None:
            self._add(marker)
        self._make()

    def _remove_leftovers(self) -> None:
        with os.scandir(self._top) as entries:
            for entry in entries:
                if entry.name.startswith(_ASIDE) and entry.is_dir(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        if time.time() - entry.stat().st_mtime > _ASIDE_S:
                            trees.remove_tree(entry.path)

    def _add(self, found: ObjectInfo) -> None:
        self.told.objects += 1
        self.told.bytes += found.size
        directory, slash, name = found.key.rpartition("/")
        parts = os.fsencode(found.key).split(b"/")
        if VIRTUAL in parts or not all(is_name(part) and b"\n" not in part for part in parts):
            self.told.failed.append(f"{found.key}: its key cannot be the path of a file")
            return
        if not found.etag:
            self.told.failed.append(f"{found.key}: the store says no ETag of it")
            return
        entry = name, found.size, int(found.modified_s * 1e9), found.etag
        length = len(json.dumps(entry)) + len(", ")
        room = _CALL_BYTES - len(json.dumps([self._url, directory]))
        is_full = len(self._batch) == _BATCH or self._bytes + length > room
        if directory + slash != self._below or is_full:
            self._make()
            self._below = directory + slash
        self._batch.append(entry)
        self._bytes += length

    def _make(self) -> None:
        """Make the files of the batch."""
        batch, self._batch, self._bytes = self._batch, [], 0
        if not batch:
            return
        told, path = self.told, os.path.join(self._top, self._below)
        try:
            trees.make_dir(path)
            states = self._call(path, batch)
        except (FileExistsError, NotADirectoryError):
            reason = "a file has the name of its directory"
            told.failed += [f"{self._below}{name}: {reason}" for name, *_ in batch]
            return
        changed = [each for each, state in zip(batch, states, strict=True) if state == "changed"]
        told.made += states.count("made")
        told.same += states.count("same")
        told.kept += states.count("other")
        if changed and self._refresh:
            self._replace(path, changed)
            told.refreshed += len(changed)
        else:
            told.changed += len(changed)
        self._show(told.done, told.objects)

    def _replace(self, path: str, changed: list[_Entry]) -> None:
        trees.make_dir(self._aside)
        self._call(self._aside, changed)
        for name, *_ in changed:
            files.rename(os.path.join(self._aside, name), os.path.join(path, name))
        files.remove_dir(self._aside)

    def _call(self, path: str, entries: list[_Entry]) -> list[str]:
        names, sizes, mtimes, etags = zip(*entries, strict=True)
        fd = files.open_file(path, write=False)
        try:
            answer = ioctl.call(
                fd,
                "import",
                path,
                bucket=self._url,
                below=self._below,
                names="\n".join(names),
                etags="\n".join(etags),
                sizes=sizes,
                mtimes=mtimes,
            )
        finally:
            files.close_file(fd)
        return str(answer["states"]).split("\n")


def _listed(bucket: Bucket) -> Iterator[ObjectInfo]:
    """All objects, listed ahead. Raises OSError."""
    pages: Queue[list[ObjectInfo] | BaseException | None] = Queue(_PAGES)

    def fetch() -> None:
        end: BaseException | None = None
        try:
            for page in bucket.pages(""):
                pages.put(page)
        except BaseException as error:
            end = error
        pages.put(end)

    Thread(target=fetch, daemon=True).start()
    while (page := pages.get()) is not None:
        if isinstance(page, BaseException):
            raise page
        yield from page
