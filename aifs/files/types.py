"""Small types of the filesystem's interface."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from aifs.files.open_inode import OpenInode

BLOCK_SIZE = 4096
SIZE_MAX = 1 << 62
"""Largest file size in bytes; servers may have smaller limits of their own (EFBIG)."""

AHEAD = os.O_NONBLOCK
"""A flag of open(2) to bring a file into memory for others; else unused on regular files.
``open_file`` has it as ``foreign``."""

ATIMES = ("noatime", "relatime", "strictatime")
"""When opening to read counts as access: never, once a day or after a change, or each time."""


class CallerLike(Protocol):
    """The process that asks: pyfuse3's RequestContext, or our own Caller."""

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


class Lent(NamedTuple):
    """An inode whose opens for reading are answered without us."""

    ino: int
    """Its number."""
    backing: int
    """The backing id that its handles are passed through to; 0: they are not."""
    copy_id: int
    """Of the burst copy behind that; 0: it is none."""
    opens: int
    """How many handles it has."""
    accessed_ns: int
    """When it was last opened as an access that we have not heard of, or 0."""


class ReadPlace(NamedTuple):
    """Bytes ``start`` to ``end`` - 1 of a file are those of a source from ``offset`` on."""

    start: int
    end: int
    offset: int
    source: int
    """Its number."""


EVERY_SOURCE = -1
"""In place of a source's number: see ``Passthrough.take_source``."""


class Passthrough(Protocol):
    """The kernel reads and writes a backing file by itself. No method blocks."""

    def attach(self, fd: int) -> int:
        """A backing id, above 0, for the file behind ``fd``. Raises OSError."""

    def detach(self, backing: int) -> None: ...

    def lend(self, ino: int, backing: int, copy_id: int, due_ns: int, asks: bool) -> Lent | None:
        """Have opens for reading answered without us, passed through to ``backing`` unless it is 0.

        An open at ``due_ns`` or later counts as access, then not for a day; 0: each does. ``asks``:
        not while opens are watched. Returns what is not lent any more, perhaps this inode. Lending
        again replaces ``due_ns`` and ``asks``.
        """

    def note_attributes(self, ino: int, record: bytes) -> None:
        """The record of a lent inode as it is now: its names may be looked up without us."""

    def note_entries(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Keys and records of entries of directories, as they are now: the same of their names."""

    def take_back(self, ino: int, idle: bool = False) -> Lent | None:
        """Take back a lent inode, as it was. Its handles are ours: ``LENT | ino``. ``idle``: only
        if it has none, else its next request comes to us."""

    def find_lent(self, ino: int) -> Lent | None:
        """The inode, if it is lent."""

    def open_lent(self, ino: int, flags: int, uid: int) -> bool:
        """Open a lent inode as this user. Whether it was answered without us: its handle is
        LENT_HERE."""

    def all_lent(self, which: Literal["open", "used", "all"]) -> list[Lent]:
        """Lent inodes: with handles; used since the last call, whose access is ours to record now;
        or all. Takes a millisecond."""

    def watch_opens(self, on: bool) -> None:
        """Whether opens of inodes that are lent are noted from now on, each anew."""

    def noted_opens(self) -> list[tuple[int, int]]:
        """Inode and uid of opens noted since the last call, the first of each user, in order;
        without opens that are ``AHEAD``."""

    def put_source(self, number: int, unit: int, in_memory: bool, fds: Sequence[int]) -> None:
        """Add a source, as long as it has places: bytes striped over ``fds`` (-1: missing) in units
        of ``unit`` bytes. ``in_memory``: reads never wait; else reads that would wait come to us.
        Raises ValueError beyond SOURCES_MAX and COLUMNS_MAX."""

    def put_places(
        self, ino: int, size: int, places: Sequence[ReadPlace]
    ) -> tuple[bool, Sequence[int]]:
        """Have reads of an unchanging inode of ``size`` bytes answered where it has ``places``, in
        order and disjoint. Returns whether that is so (not of more than PLACES_MAX), and the
        sources that are no more, without places: another file may have given way."""

    def take_places(self, ino: int) -> Sequence[int]:
        """Reads of the inode come to us from now on. Returns the sources that are no more."""

    def take_source(self, number: int) -> Sequence[int]:
        """Take the places of all inodes in this source; EVERY_SOURCE: of those not read since the
        last call. Takes a millisecond."""

    def read_units(self) -> list[tuple[int, int]]:
        """Sources read without us since the last call, each with a mask: bit ``u mod 64`` for unit
        ``u``. Takes a fraction of a millisecond."""


SOURCES_MAX, COLUMNS_MAX, PLACES_MAX = 1 << 14, 16, 64
"""How many sources there are at most; local files that one may have; places of an inode."""

WRITABLE = 1 << 32
"""A handle that can write has this bit."""

LENT = 1 << 63
"""A handle of an inode that was lent is this and the inode number."""

LENT_HERE = 0
"""The handle with which we answer an open of an inode that is lent: it becomes the inode's."""


class Opened(NamedTuple):
    """An open file: its handle, and its backing id (0: not passed through).

    ``direct``: reads and writes come to us, uncached; only mappings are passed through. ``stale``:
    another host has changed the bytes, of which the kernel may have old pages.
    """

    handle: int
    backing: int = 0
    direct: bool = False
    stale: bool = False


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

    __slots__ = (
        "appends",
        "direct",
        "file",
        "made_s",
        "maps",
        "opens",
        "readable",
        "shared",
        "synchronous",
        "writable",
    )

    def __init__(
        self, file: OpenInode, flags: int, opens: int = 1, made_s: float = -math.inf
    ) -> None:
        access = flags & os.O_ACCMODE
        self.file = file
        self.direct = False
        """Whether the kernel caches nothing that is read and written by it."""
        self.made_s = made_s
        """When the file was made with it, on trio's clock; -inf: it was not."""
        self.opens = opens
        """How many open files have this handle; more than one only if it was lent."""
        self.readable = access != os.O_WRONLY
        """Whether the file was opened to be read."""
        self.writable = access != os.O_RDONLY
        """Whether the file was opened to be written."""
        self.maps = access == os.O_RDWR
        """Whether the file can be mapped by it, and written so."""
        self.shared = False
        """Whether what is written by it is shown to other hosts, which may write to it, too."""
        self.appends = self.writable and bool(flags & os.O_APPEND)
        """Whether it was opened to append."""
        self.synchronous = self.writable and bool(flags & os.O_DSYNC)
        """Whether each write is on stable storage when it returns (O_SYNC, O_DSYNC)."""
