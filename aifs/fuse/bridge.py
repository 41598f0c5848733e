"""The bridge (bridge.c) as the daemon uses it: features of the kernel, passthrough, and which parts
are missing and why.

If it is switched off, or libfuse is too old for it, everything works except ioctl, fallocate,
SEEK_DATA and SEEK_HOLE, copies inside the filesystem, O_TMPFILE, and the speed of passthrough.
If it has not been built, a mount has to say that it wants none.
"""

import ctypes
import errno
import fcntl
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from aifs.core import clock, ioctl
from aifs.core.config import KernelConfig
from aifs.core.errors import MountError
from aifs.core.log import logger
from aifs.files.types import Lent, ReadPlace
from aifs.fuse import extension, extension_error
from aifs.fuse.kept import KeptMount
from aifs.meta.keys import ROOT_INO
from aifs.meta.listing import Listing
from aifs.meta.memtable import Writes

_log = logger(__name__)

HANDLE_BITS = 33
"""An open file's reply is ``backing << HANDLE_BITS | handle``; the kernel returns the handle."""

PREFERRED_IO = 64 << 10
"""st_blksize: the buffers of stdio and Python's open(). A write is a round trip: more than a
page."""

# Features of the kernel (flags of INIT in <linux/fuse.h>) that pyfuse3 does not ask for.
# The umask comes with the request: it does not count where a default ACL is inherited.
DONT_MASK = 1 << 6
PARALLEL_DIROPS = 1 << 18
CACHE_SYMLINKS = 1 << 23  # a symlink's target never changes
NO_OPENDIR_SUPPORT = 1 << 24  # the kernel opens directories by itself, and caches listings
EXPLICIT_INVAL_DATA = 1 << 25  # a new mtime leaves cached pages alone: nobody else changes files
HANDLE_KILLPRIV_V2 = 1 << 28  # no GETXATTR before each write; vfs clears the set-id bits
PASSTHROUGH = 1 << 37
HAS_RESEND = 1 << 39

WANTED = (
    DONT_MASK
    | PARALLEL_DIROPS
    | CACHE_SYMLINKS
    | NO_OPENDIR_SUPPORT
    | EXPLICIT_INVAL_DATA
    | HANDLE_KILLPRIV_V2
    | PASSTHROUGH
)
"""Not DIRECT_IO_ALLOW_MMAP: then uncached files cannot be mapped with MAP_SHARED. Another host
changes such a file, so a mapping, as of a WAL of SQLite, would show an older state; or it is
append-only."""

LOCKS = 1 << 1 | 1 << 10
"""fcntl(2) and flock(2) locks come to us; else the kernel has them, on this host alone."""

_CAP_SYS_ADMIN = 21

# ioctls of /dev/fuse: struct fuse_backing_map to an id, and the end of an id.
_BACKING_OPEN, _BACKING_CLOSE = 0x4010E501, 0x4004E502
_BACKING_MAP, _BACKING_ID = struct.Struct("=i12x"), struct.Struct("=I")

_LENT = struct.Struct("=QQ8xQIi8x")  # struct lent (opens.h): ino, copy, accessed, opens, backing
_NOTED = struct.Struct("=QI4x")  # struct noted: ino, uid
_PLACE = struct.Struct("=QQQI4x")  # struct place (places.h): start, end, offset, source
_READ = struct.Struct("=QI4x")  # struct read_units
_OPCODES, _FRESH, _ACLS, _TOLD, _SHARED = 64, 4096, 1 << 20, 1 << 23, 1024

_EXPIRE_ENTRY = struct.Struct("=IiQQII")
"""FUSE_NOTIFY_INVAL_ENTRY (3) with FUSE_EXPIRE_ONLY (1; kernel 6.2): length, code, 0, directory,
length of the name, flag; then the name and a zero."""

ALL_COST = (
    "files are not passed through to the burst tier; "
    "no ioctl, fallocate, SEEK_HOLE, copy_file_range, O_TMPFILE, birth times"
)
LOCKS_COST = "flock and fcntl locks hold on this host alone"
SPEED_COST = "files of the burst tier are read and written through the daemon"


class MissingPart(NamedTuple):
    """A part that would help and is not in use: why, the cost, and the remedy."""

    what: str
    why: str
    cost: str
    fix: str


UNKNOWN = 2**64 - 1
"""In place of an inode: it may be any."""


class KeptName(NamedTuple):
    """A name's inode (0: none) that the kernel may keep, and until when on the monotonic clock (0:
    not)."""

    ino: int
    until_ns: int


NOT_BUILT = (
    "install gcc and python3-dev, then build it, in a checkout of AIFS: "
    "pip install --force-reinstall --no-cache-dir --no-deps ."
)
OLD_LIBFUSE = "install libfuse 3.14 or later and build pyfuse3 with it"
OLD_KERNEL = "run a kernel of 6.9 or later that is built with CONFIG_FUSE_PASSTHROUGH"
NO_CAPABILITY = "mount as root, or give the daemon CAP_SYS_ADMIN"


class _Keeping(ctypes.Structure):
    """struct keeping of records.h."""

    _fields_ = [
        ("entry_ns", ctypes.c_uint64),
        ("absent_ns", ctypes.c_uint64),
        ("attr_ns", ctypes.c_uint64),
        ("block_size", ctypes.c_uint32),
    ]


class BridgeState(ctypes.Structure):
    """struct state of messages.h, where its fields are explained."""

    _fields_ = [
        ("wanted", ctypes.c_uint64),
        ("keeping", _Keeping),
        ("max_background", ctypes.c_uint16),
        ("ioctl_type", ctypes.c_uint8),
        ("busy_polls", ctypes.c_bool),
        ("device", ctypes.c_int32),
        ("clock", ctypes.c_int32),
        ("sees_all", ctypes.c_bool),
        ("sure_until_ns", ctypes.c_uint64),
        ("kill_privileges", ctypes.c_bool),
        ("appends", ctypes.c_bool),
        ("uid", ctypes.c_uint32),
        ("pid", ctypes.c_uint32),
        ("nodeid", ctypes.c_uint64),
        ("unique", ctypes.c_uint64),
        ("offered", ctypes.c_uint64),
        ("granted", ctypes.c_uint64),
        ("counts", (ctypes.c_uint64 * 2) * _OPCODES),
        ("read_bytes", ctypes.c_uint64),
        ("fresh", ctypes.c_uint64 * _FRESH),
        ("acls", ctypes.c_uint8 * (_ACLS // 8)),
        ("told", ctypes.c_uint8 * (_TOLD // 8)),
        ("shared", ctypes.c_uint64 * _SHARED),
    ]


def reply(unique: int, number: int, data: bytes) -> None:
    """Answer a request that was handed over."""
    try:
        extension.reply(unique, number, data)
    except OSError as error:
        if error.errno not in (
            errno.ENOENT,
            errno.ENODEV,
            errno.EBADF,
        ):
            # Nobody waits for it any more.
            _log.error("the kernel refuses an answer: %s", error)  # raised, it would end the mount


def reply_entry(unique: int, ino: int, record: bytes) -> bool:
    """Answer a LOOKUP that was handed over by the record of the inode. False if that cannot be
    read."""
    return bool(extension.reply_entry(unique, ino, record))


def listing_reply(listing: Listing, size: int, are_kept: bool) -> tuple[bytes, int]:
    """The answer to READDIRPLUS with the entries that fit into ``size``, and their number.
    ``are_kept``: the kernel may keep names, else attributes alone. After the last ones it asks
    again only if a name is added."""
    return extension.listing(
        listing.entries, listing.inodes, listing.unkept, size, are_kept, listing.is_last
    )


class Bridge:
    """The bridge of the next mount, if usable and wanted; ``in_use`` is known once mounted.

    It is the ``Passthrough`` of vfs, made before pyfuse3 mounts. Raises MountError if it cannot be
    loaded and is not switched off.
    """

    def __init__(
        self,
        kernel: KernelConfig,
        on_request: Callable[..., bool],
        busy_polls: bool,
        locks: bool = False,
    ) -> None:
        """``busy_polls``: clients have another processor than we. ``locks``: they come to us."""
        self._kernel = kernel
        self._kept_s = max(kernel.entry_timeout_s, kernel.negative_timeout_s)
        """How long the kernel keeps a name."""
        self._unknown_until_ns = 0
        """By the monotonic clock: until then it may have some that an earlier daemon told it of."""
        self._locks = locks
        wanted = kernel.bridge != "off"
        if extension is not None:
            extension.configure(on_request if wanted else None)
            self._state = BridgeState.from_buffer(extension.state)
            self._state.wanted = WANTED | LOCKS if locks else WANTED
            self._state.keeping.entry_ns = int(kernel.entry_timeout_s * 10**9)
            self._state.keeping.absent_ns = int(kernel.negative_timeout_s * 10**9)
            self._state.keeping.attr_ns = int(kernel.attr_timeout_s * 10**9)
            self._state.keeping.block_size = PREFERRED_IO
            self._state.max_background = kernel.max_background
            self._state.ioctl_type = ioctl.TYPE
            self._state.busy_polls = busy_polls
            self._state.clock = clock.stamped_fd()
        elif wanted:
            raise MountError(
                f"the bridge, the C part of AIFS, cannot be loaded: {extension_error}; "
                f"{NOT_BUILT}; or mount with -o kernel.bridge=off. The cost of that: {ALL_COST}"
            )
        else:
            self._state = BridgeState(device=-1)

    @property
    def in_use(self) -> bool:
        return self._state.device >= 0

    @property
    def passes_through(self) -> bool:
        """Whether the kernel passes files through; known after the mount's first answer."""
        return self.in_use and bool(self._state.granted & PASSTHROUGH) and may_pass_through()

    def keep(self, kept: KeptMount) -> None:
        """Put the next mount's state where it outlives this daemon, or go on with that of an
        earlier one."""
        kept.begin(self.unique)
        if kept.is_taken:
            self._unknown_until_ns = time.monotonic_ns() + round(self._kept_s * 1e9)
        extension.keep(kept.table, kept.device if kept.is_taken else -1)

    @property
    def device(self) -> int:
        """The mount's descriptor; -1: the bridge is not in use."""
        return self._state.device

    @property
    def can_be_kept(self) -> bool:
        """Whether the kernel repeats unanswered requests of a daemon; known after the first
        answer."""
        return self.in_use and bool(self._state.offered & HAS_RESEND)

    def unique(self) -> int:
        """The kernel's number of the request read last. Ask before anything is awaited."""
        return self._state.unique

    def check(self) -> None:
        """After mounting: raise MountError if a bridge that is required is not in use."""
        if self._kernel.bridge == "require" and not self.in_use:
            why = self._reason()
            raise MountError(
                f"kernel.bridge is require, but the bridge cannot be used: {why}; {OLD_LIBFUSE}"
            )

    def disconnect(self) -> None:
        """The mount ends. Backing files are the kernel's to close then."""
        self._state.device = -1

    def attach(self, fd: int) -> int:
        """A backing id for an open file. Raises OSError: EPERM, ELOOP (a stacked filesystem),
        ..."""
        return self._ioctl(_BACKING_OPEN, _BACKING_MAP.pack(fd))

    def detach(self, backing: int) -> None:
        """Give the id back; handles that were opened with it keep their file."""
        if self.in_use:
            try:
                self._ioctl(_BACKING_CLOSE, _BACKING_ID.pack(backing))
            except OSError as error:
                _log.warning("the kernel keeps a backing file: %s", error)

    def lend(self, ino: int, backing: int, copy_id: int, due_ns: int, asks: bool) -> Lent | None:
        if not self.in_use:
            return Lent(ino, backing, copy_id, 0, 0)
        return _first(extension.lend(ino, backing, copy_id, due_ns, asks))

    def note_attributes(self, ino: int, record: bytes) -> None:
        extension.note_attributes(ino, record)

    def note_entries(self, entries: list[tuple[bytes, bytes]]) -> None:
        extension.note_entries(entries)

    def take_back(self, ino: int, idle: bool = False) -> Lent | None:
        return _first(extension.take_back(ino, idle))

    def find_lent(self, ino: int) -> Lent | None:
        return _first(extension.find_lent(ino))

    def open_lent(self, ino: int, flags: int, uid: int) -> bool:
        return bool(extension.open_lent(ino, flags, uid))

    def all_lent(self, which: Literal["open", "used", "all"]) -> list[Lent]:
        return _lent(extension.all_lent(which.encode()))

    def watch_opens(self, on: bool) -> None:
        extension.watch_opens(on)

    def noted_opens(self) -> list[tuple[int, int]]:
        return list(_NOTED.iter_unpack(extension.noted_opens()))

    def put_source(self, number: int, unit: int, in_memory: bool, fds: Sequence[int]) -> None:
        extension.put_source(number, unit, in_memory, struct.pack(f"={len(fds)}i", *fds))

    def put_places(
        self, ino: int, size: int, places: Sequence[ReadPlace]
    ) -> tuple[bool, Sequence[int]]:
        packed = b"".join([_PLACE.pack(*place) for place in places])
        is_put, idle = extension.put_places(ino, size, packed)
        return is_put, _numbers(idle)

    def take_places(self, ino: int) -> Sequence[int]:
        return _numbers(extension.take_places(ino))

    def take_source(self, number: int) -> Sequence[int]:
        return _numbers(extension.take_source(number))

    def read_units(self) -> list[tuple[int, int]]:
        found = _READ.iter_unpack(extension.read_units())
        return [(number, units) for units, number in found]

    def see_all(self, on: bool) -> None:
        """Whether requests come to Python that need not."""
        self._state.sees_all = on

    def be_sure_until(self, until_s: float) -> None:
        """From then on (s, CLOCK_BOOTTIME) records here may be old: Python answers what it can, by
        the database. Never before the first call."""
        self._state.sure_until_ns = max(1, int(until_s * 10**9))

    def expire_name(self, parent: int, name: bytes) -> None:
        """Have the kernel look the name up anew; programs and mounts notice only changes. Blocks
        while a program holds the directory's lock. Raises OSError, FileNotFoundError if the kernel
        does not know it."""
        length = _EXPIRE_ENTRY.size + len(name) + 1
        head = _EXPIRE_ENTRY.pack(length, 3, 0, parent, len(name), 1)
        os.write(self._state.device, head + name + b"\0")

    def kept_name(self, parent: int, name: bytes) -> KeptName:
        """Look up what the kernel may keep of a name, where there are other hosts."""
        if not self.keeps_account or time.monotonic_ns() < self._unknown_until_ns:
            return KeptName(UNKNOWN, time.monotonic_ns() + round(self._kept_s * 1e9))
        return KeptName(*extension.kept_name(parent, name))

    @property
    def keeps_account(self) -> bool:
        """Whether the bridge records names kept by the kernel: only with other hosts."""
        return self.in_use and self._state.granted & LOCKS == LOCKS

    def drop_name(self, parent: int, name: bytes, kept: KeptName) -> None:
        """Record that the kernel has forgotten a name."""
        if self.keeps_account:
            extension.drop_name(parent, name, kept.until_ns)

    def keep_no_names(self, ino: int) -> None:
        """The kernel keeps no names of a directory from now on, nor that there is none."""
        self._state.shared[ino % _SHARED] = ino

    def kill_privileges(self) -> bool:
        """Whether the last request read has to clear set-id bits. Ask before any await."""
        return bool(self._state.kill_privileges)

    def appends(self) -> bool:
        """Whether the last WRITE read has O_APPEND: its offset is the end for the kernel; or the
        last SETXATTR has XATTR_CREATE. Ask before any await."""
        return bool(self._state.appends)

    def last_request(self) -> tuple[int, int, int]:
        """Inode, uid and pid of the last request read; 0, -1 and -1 if unknown. Ask before any
        await."""
        state = self._state
        return (state.nodeid, state.uid, state.pid) if self.in_use else (0, -1, -1)

    def note_acl(self, ino: int) -> None:
        """Note an inode with an ACL, before the kernel hears of it or an ACL is set: it may ask."""
        byte, bit = divmod(ino % _ACLS, 8)
        self._state.acls[byte] |= 1 << bit

    def was_told(self, ino: int) -> bool:
        """Whether the kernel may know the inode, its names, or its listing. Not recorded with one
        host."""
        if self._state.granted & LOCKS != LOCKS or ino == ROOT_INO:
            return True
        byte, bit = divmod(ino % _TOLD, 8)
        return bool(self._state.told[byte] & 1 << bit)

    def begin_directory(self, ino: int) -> None:
        """A new inode may become a directory, whose names all pass ``note_records``."""
        self._state.fresh[ino % _FRESH] = ino

    def note_records(self, writes: Writes, _: int) -> None:
        """A transaction has changed these records; the bridge answers the kernel's next requests
        for directories' attributes."""
        if extension is not None:
            extension.note_records(writes)

    def status(self) -> dict[str, object]:
        """For ``aifs status``: whether it is in use, the kernel's requests by opcode, those that
        the bridge has answered, and bytes of files in these."""
        requests, answered = (
            {
                str(opcode): told[place]
                for opcode, told in enumerate(self._state.counts)
                if told[place]
            }
            for place in (0, 1)
        )
        return {
            "in_use": self.in_use,
            "requests": requests,
            "answered": answered,
            "read_bytes": self._state.read_bytes,
        }

    def missing(self) -> list[MissingPart]:
        """Unused parts of an answering mount, without switched-off ones, except locks over
        hosts."""
        if self._kernel.bridge == "off":
            fix = "set kernel.bridge to auto"
            part = MissingPart("locking over hosts", "kernel.bridge is off", LOCKS_COST, fix)
            return [part] if self._locks else []
        if not self.in_use:
            cost = f"{ALL_COST}; {LOCKS_COST}" if self._locks else ALL_COST
            return [MissingPart("the bridge", self._reason(), cost, OLD_LIBFUSE)]
        if not self._state.granted & PASSTHROUGH:
            return [
                MissingPart("passthrough", "the kernel does not offer it", SPEED_COST, OLD_KERNEL)
            ]
        if not may_pass_through():
            return [
                MissingPart(
                    "passthrough", "the daemon has no CAP_SYS_ADMIN", SPEED_COST, NO_CAPABILITY
                )
            ]
        return []

    def _reason(self) -> str:
        return extension_error or "this libfuse has no usable fuse_session_custom_io"

    def _ioctl(self, request: int, argument: bytes) -> int:
        """Call an ioctl of the mount's descriptor; its result. Raises OSError."""
        if not self.in_use:
            raise OSError(errno.EBADF, "the mount has ended")
        return fcntl.ioctl(self._state.device, request, bytearray(argument))


def _lent(found: bytes) -> list[Lent]:
    return [
        Lent(ino, backing, copy_id, opens, accessed_ns)
        for ino, copy_id, accessed_ns, opens, backing in _LENT.iter_unpack(found)
    ]


def _numbers(found: bytes) -> Sequence[int]:
    return memoryview(found).cast("I") if found else ()


def _first(found: bytes) -> Lent | None:
    return _lent(found)[0] if found else None


def may_pass_through(status: str | None = None) -> bool:
    """Whether this process has CAP_SYS_ADMIN effective (``status``: of a /proc/PID/status)."""
    lines = (Path("/proc/self/status").read_text() if status is None else status).splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_ADMIN & 1)
