"""A bucket with a tree of files in it: keys are paths, objects have the mtime of their files."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from aifs.data.bucket import Bucket

MTIME = "mtime"
"""The name of a file's mtime in an object's metadata, as of rclone: seconds, with a fraction."""


class Tree(Bucket):
    """Paths of directories end in a slash; that of the top is ''."""

    @contextmanager
    def named(self, key: str) -> Iterator[None]:
        try:
            with super().named(key):
                yield
        except ValueError:
            reason = "its name cannot be the key of an object"
            raise OSError(errno.EINVAL, reason, self.where(key)) from None

    def list_one(self, directory: str) -> tuple[dict[str, int], set[str]]:
        """The sizes of the objects of a directory, by path, and the directories in it."""
        with self.named(directory):
            found = self._obstore.list_with_delimiter(self._store, directory or None)
        sizes = {one["path"]: one["size"] for one in found["objects"]}
        return sizes, {f"{prefix.rstrip('/')}/" for prefix in found["common_prefixes"]}

    def mtime(self, path: str) -> str:
        """The mtime in the metadata of an object, or ''."""
        with self.named(path):
            found = self._obstore.get(self._store, path, options={"head": True})
        return {name.lower(): text for name, text in found.attributes.items()}.get(MTIME, "")

    def put_file(self, path: str, data: bytes, mtime: str) -> None:
        """By one request."""
        with self.named(path):
            self._obstore.put(
                self._store, path, data, attributes={MTIME: mtime}, use_multipart=False
            )

    def put_parts(
        self, path: str, parts: Iterator[bytes], part: int, at_once: int, mtime: str
    ) -> None:
        """By several requests. An error of ``parts`` passes, and there is no object then.
        ``part``: the bytes of each but the last. ``at_once``: requests."""
        with self.named(path):
            self._obstore.put(
                self._store,
                path,
                parts,
                attributes={MTIME: mtime},
                chunk_size=part,
                max_concurrency=at_once,
            )
