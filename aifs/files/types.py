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
"""Among the flags of open(2): not for what a program wants of the file, but to have it in memory
for others. On regular files it means nothing else. What ``open_file`` opens as ``foreign`` has it.
"""

ATIMES = ("noatime", "relatime", "strictatime")
"""When opening a file for reading counts as access: never, once a day or after a change, or each
time.
"""


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
    """When it was last opened so that this counts as access and we have not heard of it; 0: it was
    not.
    """


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
        """From now on an open of the inode for reading is answered without us: it is passed through
        to ``backing`` (0: not passed through). It counts as access, but not again for a day, if it
        comes at ``due_ns`` or later; 0: each one counts. ``asks``: not while opens are watched.
        Returns what is not lent any more for that, perhaps this inode itself. What is lent already,
        as the same, has another ``due_ns`` and ``asks``.
        """

    def note_attributes(self, ino: int, record: bytes) -> None:
        """The record of an inode that is lent, as it is now: names that lead to it may be looked up
        without us."""

    def note_entries(self, entries: list[tuple[bytes, bytes]]) -> None:
        """Keys and records of entries of directories, as they are now: the same of their names."""

    def take_back(self, ino: int, idle: bool = False) -> Lent | None:
        """An inode that was lent, as it was. Its handles are ours from now on: they are ``LENT |
        ino``. ``idle``: only if it has none, else the next request about it will come to us.
        """

    def find_lent(self, ino: int) -> Lent | None:
        """The inode, if it is lent."""

    def open_lent(self, ino: int, flags: int, uid: int) -> bool:
        """As if the open of the inode by this user came first when it is lent. Whether it was
        answered without us: then the answer to it is the handle LENT_HERE."""

    def all_lent(self, which: Literal["open", "used", "all"]) -> list[Lent]:
        """The inodes that are lent: those that have handles, or that were used since that was asked
        last, whose access is ours to record now, or all of them. Takes a millisecond.
        """

    def watch_opens(self, on: bool) -> None:
        """Whether opens of inodes that are lent are noted from now on, each anew."""

    def noted_opens(self) -> list[tuple[int, int]]:
        """Inode and uid of each open that was noted since this was asked last, the first one alone
        of those by the same user; in order, without opens that are ``AHEAD``."""

    def put_source(self, number: int, unit: int, in_memory: bool, fds: Sequence[int]) -> None:
        """From its first place on, and as long as it has one, this is a source: bytes that are
        striped over the files behind ``fds`` in units of ``unit`` bytes; -1 for one that does not
        exist. ``in_memory``: reads there never wait. Else only those are answered without us that
        need not wait. Raises ValueError beyond SOURCES_MAX and COLUMNS_MAX.
        """

    def put_places(
        self, ino: int, size: int, places: Sequence[ReadPlace]
    ) -> tuple[bool, Sequence[int]]:
        """Reads of an inode of ``size`` bytes are answered without us from now on, where it has
        ``places``, which are in order and do not overlap; nobody changes it. Returns whether that
        is so: not of more than PLACES_MAX. And the sources that have lost their last place by it,
        and are no more: another file may have given way.
        """

    def take_places(self, ino: int) -> Sequence[int]:
        """Reads of the inode come to us from now on. Returns the sources that are no more."""

    def take_source(self, number: int) -> Sequence[int]:
        """The same of all inodes that have a place in this source; EVERY_SOURCE: of those that were
        not read since that was asked last. Takes a millisecond."""

    def read_units(self) -> list[tuple[int, int]]:
        """The sources that were read without us since this was asked last, and of each a mask: bit
        ``u mod 64`` for unit ``u``. Takes a fraction of a millisecond."""


SOURCES_MAX, COLUMNS_MAX, PLACES_MAX = 1 << 14, 16, 64
"""How many sources there are at most; local files that one may have; places of an inode."""

WRITABLE = 1 << 32
"""A handle that can write has this bit."""

LENT = 1 << 63
"""A handle of an inode that was lent is this and the inode number."""

LENT_HERE = 0
"""The handle with which we answer an open of an inode that is lent: it becomes the inode's."""


class Opened(NamedTuple):
    """An open file: its handle, and the backing id that it is passed through to (0: it is not).

    ``direct``: its reads and writes come to us, uncached; if there is a backing id, too, only its
    mappings are passed through. ``stale``: another host has changed the bytes, of which the kernel
    may have old pages.
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
