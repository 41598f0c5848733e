"""Small types of the filesystem's interface."""

import os
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from aifs.vfs.open_inode import OpenInode

BLOCK_SIZE = 4096
SIZE_MAX = 1 << 62
"""Largest file size in bytes; servers may have smaller limits of their own (EFBIG)."""


class CallerLike(Protocol):
    """Who asks: pyfuse3's RequestContext, or our own Caller."""

    uid: int
    gid: int
    pid: int
    umask: int


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
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    ctime_ns: int | None = None


class StatFs(NamedTuple):
    """Sizes in blocks of ``block_size`` bytes. ``files`` counts inodes."""

    block_size: int
    blocks: int
    free: int
    available: int
    files: int
    files_free: int
    name_max: int


@dataclass(slots=True)
class FileHandle:
    file: OpenInode
    flags: int

    @property
    def readable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_WRONLY

    @property
    def writable(self) -> bool:
        return self.flags & os.O_ACCMODE != os.O_RDONLY


@dataclass(slots=True)
class DirectoryHandle:
    ino: int
