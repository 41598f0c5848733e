"""Imported layout: all bytes of a file are one object of a bucket that AIFS does not write to.

The file is pinned to the content that the bucket had when it was imported: its ETag is on record,
and each read asks for it. A file that changes gets another layout.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from aifs.layout.placement import BURST_FIRST
from aifs.layout.striped import Striped

SOURCE = BURST_FIRST - 1
"""The number in place of a data server's: of all buckets together."""

_UNIT = 1 << 20  # nothing depends on it


class Pin(NamedTuple):
    """A content of an object."""

    bucket: str
    """The URL of the bucket and the prefix, with its parameters."""
    key: str
    """Of the object, below the prefix."""
    etag: str
    """Of the content."""
    size: int
    """In bytes."""

    @property
    def url(self) -> str:
        """Of the object, without parameters."""
        return f"{self.bucket.partition('?')[0].rstrip('/')}/{self.key}"


@dataclass(frozen=True, slots=True)
class Imported(Striped):
    """A file's layout: it is read like one object on one data server, and has none of its own."""

    unit: int = _UNIT
    servers: tuple[int, ...] = (SOURCE,)
    source: Pin = Pin("", "", "", 0)

    kind: ClassVar[str] = "imported"

    @property
    def objects(self) -> None:
        """See Layout."""
        return None

    @property
    def read_as(self) -> Striped:
        """See Layout."""
        return self

    @property
    def pin(self) -> Pin:
        """See Layout."""
        return self.source

    @property
    def is_possible(self) -> bool:
        """See Layout."""
        return bool(self.source.bucket and self.source.key and self.source.etag)
