"""Small types of the filesystem's interface."""

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aifs.files.open_inode import OpenInode

BLOCK_SIZE = 4096
SIZE_MAX = 1 << 62
"""Largest file size in bytes; servers may have smaller limits of their own (EFBIG)."""

ATIMES = ("noatime", "relatime", "strictatime")
"""When opening a file for reading counts as access: never, once a day or after a change, or each
time.
"""


class CallerLike(Protocol):
    """Who asks: pyfuse3's RequestContext, or our own Caller."""

    @property
    def uid(self) -> int: ...

    @property
    def gid(self) -> int: ...

    @property
    def pid(self) -> int: ...

    @property
    def umask(self) -> int: ...


class Caller(NamedTuple):
    uid: int = 0
    gid: int = 0
    pid: int = 0
    umask: int = 0


ROOT = Caller()


@dataclass(slots=True)
class SetAttr:
    """Attributes to change; None leaves one as it is. Times in nanoseconds since the epoch."""

    mode: int | None = None
    """Permission bits."""
    uid: int | None = None
    """The owner."""
    gid: int | None = None
    """The group."""
    size: int | None = None
    """In bytes."""
    atime_ns: int | None = None
    """Of the last access."""
    mtime_ns: int | None = None
    """Of the last change of the bytes."""
    ctime_ns: int | None = None
    """Of the last change of anything."""
    kill_privileges: bool = False
    """Clear setuid and setgid, as a truncation by someone without CAP_FSETID must."""


class Passthrough(Protocol):
    """The kernel reads and writes a backing file by itself. Neither method blocks."""

    def attach(self, fd: int) -> int:
        """A backing id, above 0, for the file behind ``fd``. Raises OSError."""

    def detach(self, backing: int) -> None: ...


class Opened(NamedTuple):
    """An open file: its handle, and the backing id that it is passed through to (0: it is not).

    ``direct``: all the same its reads and writes come to us, uncached; only its mappings are passed
    through.
    """

    handle: int
    backing: int = 0
    direct: bool = False


class StatFs(NamedTuple):
    """Sizes in blocks."""

    block_size: int
    """Bytes of a block."""
    blocks: int
    """All there are."""
    free: int
    """Those that are free."""
    available: int
    """Those of them that users may have."""
    files: int
    """How many inodes there are, and can be."""
    files_free: int
    """How many can be made."""
    name_max: int
    """Bytes of the longest name."""


class FileHandle:
    """What one open file may be used for."""

    __slots__ = ("file", "readable", "synchronous", "writable")

    def __init__(self, file: OpenInode, flags: int) -> None:
        access = flags & os.O_ACCMODE
        self.file = file
        self.readable = access != os.O_WRONLY
        self.writable = access != os.O_RDONLY
        self.synchronous = self.writable and bool(flags & os.O_DSYNC)
        """Whether each write is on stable storage when it returns (O_SYNC, O_DSYNC)."""
