"""A POSIX filesystem in memory, naive and obviously right, with the methods of the real one.

It answers what a correct filesystem answers below a kernel that checks permissions (it has no
permission checks of its own). Times are ``Stamp`` intervals: the caller sets ``clock`` to a new one
before each call, and narrows it down afterwards. Contents may be sparse.
"""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from aifs.core import errors
from aifs.files import ranges

NOREPLACE, EXCHANGE = 1, 2
PAGE = 4096
ROOT = 1


@dataclass
class Stamp:
    """A time between ``low`` and ``high`` nanoseconds since the epoch."""

    low: int
    high: int

    def __contains__(self, time_ns: int) -> bool:
        return self.low <= time_ns <= self.high

    def or_at(self, other: "Stamp") -> "Stamp":
        return Stamp(min(self.low, other.low), max(self.high, other.high))


class Content:
    """The bytes of a file; pages that were never written are holes."""

    def __init__(self) -> None:
        self.size = 0
        self.pages: dict[int, bytes] = {}

    def read(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self.size)
        found = bytearray()
        while offset < end:
            page, start = divmod(offset, PAGE)
            stop = min(PAGE, start + end - offset)
            found += self.pages.get(page, bytes(PAGE))[start:stop]
            offset += stop - start
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        self.size = max(self.size, offset + len(data))
        while data:
            page, start = divmod(offset, PAGE)
            part, data = data[: PAGE - start], data[PAGE - start :]
            old = self.pages.get(page, bytes(PAGE))
            self.pages[page] = old[:start] + part + old[start + len(part) :]
            offset += len(part)

    def any_data(self, offset: int, end: int) -> bool:
        """Whether a byte of the range is not zero."""
        end = min(end, self.size)
        return any(
            self.pages[page][max(0, offset - page * PAGE) : max(0, end - page * PAGE)].strip(b"\0")
            for page in self.pages
            if offset // PAGE <= page <= end // PAGE
        )

    def allocate(self, offset: int, end: int) -> None:
        """Give every page of the range a place."""
        for page in range(offset // PAGE, (end + PAGE - 1) // PAGE):
            self.pages.setdefault(page, bytes(PAGE))

    def truncate(self, size: int) -> None:
        last, keep = divmod(size, PAGE)
        self.pages = {page: data for page, data in self.pages.items() if page * PAGE < size}
        if last in self.pages:
            self.pages[last] = self.pages[last][:keep] + bytes(PAGE - keep)
        self.size = size


@dataclass(eq=False)
class Quota:
    """How much may lie below a directory."""

    bytes_max: float
    files_max: float
    above: "Quota | None"
    """The one that its directory lies in."""
    is_gone: bool = False
    """Its directory has been erased, and nobody counts what has it still."""

    @property
    def chain(self) -> list["Quota"]:
        """It and all in which it lies."""
        if self.is_gone:
            return []
        return [self, *(self.above.chain if self.above else [])]


@dataclass
class OracleInode:
    ino: int
    mode: int
    uid: int
    gid: int
    rdev: int
    atime: Stamp
    mtime: Stamp
    ctime: Stamp
    nlink: int = 1
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    names: dict[bytes, "OracleInode"] = field(default_factory=dict)  # of a directory
    parent: "OracleInode | None" = None  # of a directory
    target: bytes = b""  # of a symlink
    content: Content = field(default_factory=Content)  # of a regular file
    allocated: bool = False
    """Space may be reserved beyond the end."""
    times_at_save: tuple[Stamp, Stamp] | None = None
    """mtime and ctime before the first change whose times need not be safe from kill -9 yet: a
    write, or a chmod and the like to what was there already."""
    handles: int = 0
    counted: Quota | None = None
    """The innermost quota that counts it; and, of a directory, what is made in it."""
    quota: Quota | None = None
    """Of a directory: its own."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def size(self) -> int:
        return len(self.target) if stat.S_ISLNK(self.mode) else self.content.size


@dataclass
class DirHandle:
    """What an open directory must and may still list."""

    directory: OracleInode
    always: set[bytes]
    ever: set[bytes]


class Oracle:
    """The filesystem. Inode numbers are its own; the root is 1."""

    def __init__(self, keeps: bool = False) -> None:
        """``keeps``: what loses its last name goes to the trash."""
        self.keeps = keeps
        self._trash: list[tuple[OracleInode, bytes, OracleInode]] = []  # directory, name, inode
        self.clock = Stamp(0, 0)
        self.inodes: dict[int, OracleInode] = {}
        self._next_ino = ROOT
        self._next_handle = 1
        self.handles: dict[int, OracleInode] = {}
        self._access: dict[int, int] = {}  # handle -> O_RDONLY, O_WRONLY or O_RDWR
        self.dir_handles: dict[int, DirHandle] = {}
        root = self._new(stat.S_IFDIR | 0o755, 0, 0)
        root.parent = root

    def _new(self, mode: int, uid: int, gid: int, rdev: int = 0) -> OracleInode:
        inode = OracleInode(
            self._next_ino, mode, uid, gid, rdev, self.clock, self.clock, self.clock
        )
        inode.nlink = 2 if inode.is_dir else 1
        self.inodes[inode.ino] = inode
        self._next_ino += 1
        return inode

    # Names

    def _directory(self, ino: int) -> OracleInode:
        directory = self.inodes[ino]
        if not directory.is_dir:
            raise errors.NotADirectory
        return directory

    def _find(self, parent: int, name: bytes) -> OracleInode:
        directory = self._directory(parent)
        if len(name) > 255:
            raise errors.NameTooLong
        if name not in directory.names:
            raise errors.NotFound
        return directory.names[name]

    def _free(self, parent: int, name: bytes) -> OracleInode:
        """The directory, if the name can be made in it."""
        try:
            self._find(parent, name)
        except errors.NotFound:
            if self.inodes[parent].nlink == 0:
                raise
            return self.inodes[parent]
        raise errors.Exists

    def _attach(self, directory: OracleInode, name: bytes, inode: OracleInode) -> None:
        directory.names[name] = inode
        directory.mtime = directory.ctime = self.clock
        if inode.is_dir:
            inode.parent = directory
            directory.nlink += 1
        for handle in self.dir_handles.values():
            if handle.directory is directory:
                handle.ever.add(name)

    def _detach(self, directory: OracleInode, name: bytes) -> OracleInode:
        inode = directory.names.pop(name)
        directory.mtime = directory.ctime = self.clock
        if inode.is_dir:
            directory.nlink -= 1
        for handle in self.dir_handles.values():
            if handle.directory is directory:
                handle.always.discard(name)
        return inode

    def _unlinked(self, inode: OracleInode, directory: OracleInode, name: bytes) -> None:
        inode.nlink = 0 if inode.is_dir else inode.nlink - 1
        inode.ctime = self.clock
        if self.keeps and not inode.nlink:
            self._trash.append((directory, name, inode))

    def restore(self, parent: int, name: bytes) -> OracleInode:
        """Give back the last name that was lost there, to a directory all that was in it."""
        directory = self._directory(parent)
        inode = next(
            (
                inode
                for place, known, inode in reversed(self._trash)
                if place is directory and known == name
            ),
            None,
        )
        if inode is None:
            raise errors.NotFound
        if name in directory.names:
            raise errors.Exists
        self._gather(inode)
        self._take_back(inode)
        self._attach(directory, name, inode)
        self._count_for(inode, directory.counted)
        inode.ctime = self.clock
        return inode

    def _gather(self, directory: OracleInode) -> None:
        for place, name, inode in reversed(self._trash[:]):
            if place is directory and name not in directory.names:
                self._gather(inode)
                self._take_back(inode)
                self._attach(directory, name, inode)

    def _take_back(self, inode: OracleInode) -> None:
        self._trash = [one for one in self._trash if one[2] is not inode]
        inode.nlink = 2 + sum(one.is_dir for one in inode.names.values()) if inode.is_dir else 1

    def _make(self, parent: int, name: bytes, mode: int, caller, rdev: int = 0) -> OracleInode:
        if self.inodes[parent].is_dir:  # the kernel asks for names that are free alone
            self._require_room(self.inodes[parent].counted, 0, 1)
        directory = self._free(parent, name)
        gid = caller.gid
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            if stat.S_ISDIR(mode):
                mode |= stat.S_ISGID
        inode = self._new(mode, caller.uid, gid, rdev)
        inode.counted = directory.counted
        self._attach(directory, name, inode)
        return inode

    def lookup(self, parent: int, name: bytes) -> OracleInode:
        return self._find(parent, name)

    def mkdir(self, parent: int, name: bytes, mode: int, caller) -> OracleInode:
        return self._make(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller)

    def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller) -> OracleInode:
        return self._make(parent, name, mode, caller, rdev)

    def symlink(self, parent: int, name: bytes, target: bytes, caller) -> OracleInode:
        inode = self._make(parent, name, stat.S_IFLNK | 0o777, caller)
        inode.target = target
        return inode

    def readlink(self, ino: int) -> bytes:
        return self.inodes[ino].target

    def link(self, ino: int, parent: int, name: bytes) -> OracleInode:
        inode = self.inodes[ino]
        directory = self._free(parent, name)
        if inode.is_dir:
            raise errors.NotPermitted
        self._require_same_quotas(directory, inode)
        if inode.nlink == 0:
            raise errors.NotFound
        inode.nlink += 1
        inode.ctime = self.clock
        self._attach(directory, name, inode)
        return inode

    def unlink(self, parent: int, name: bytes) -> None:
        if self._find(parent, name).is_dir:
            raise errors.IsADirectory
        directory = self.inodes[parent]
        self._unlinked(self._detach(directory, name), directory, name)

    def rmdir(self, parent: int, name: bytes) -> None:
        inode = self._find(parent, name)
        if not inode.is_dir:
            raise errors.NotADirectory
        if inode.names:
            raise errors.NotEmpty
        directory = self.inodes[parent]
        self._unlinked(self._detach(directory, name), directory, name)

    def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> None:
        moved = self._find(parent, name)
        if flags not in (0, NOREPLACE, EXCHANGE):
            raise errors.Invalid
        source, target = self.inodes[parent], self._directory(new_parent)
        try:
            replaced = self._find(new_parent, new_name)
        except errors.NotFound:
            if flags == EXCHANGE or target.nlink == 0:
                raise
            replaced = None
        if flags == NOREPLACE and replaced:
            raise errors.Exists
        if moved is replaced:
            return
        if source is not target:
            self._require_same_quotas(target, moved)
            if flags == EXCHANGE:
                self._require_same_quotas(source, replaced)
        if self._inside(moved, target) or (flags == EXCHANGE and self._inside(replaced, source)):
            raise errors.Invalid
        if flags == EXCHANGE:
            self._detach(source, name)
            self._detach(target, new_name)
            self._attach(source, name, replaced)
            self._attach(target, new_name, moved)
            moved.ctime = replaced.ctime = self.clock
            return
        if replaced:
            if moved.is_dir and not replaced.is_dir:
                raise errors.NotADirectory
            if replaced.is_dir and not moved.is_dir:
                raise errors.IsADirectory
            if replaced.names:
                raise errors.NotEmpty
            self._unlinked(self._detach(target, new_name), target, new_name)
        self._detach(source, name)
        self._attach(target, new_name, moved)
        moved.ctime = self.clock

    def clone(self, parent: int, name: bytes, new_parent: int, new_name: bytes, caller) -> None:
        """By root, who keeps all owners."""
        if len(new_name) > 255:
            raise errors.NameTooLong
        source = self._find(parent, name)
        self._free(new_parent, new_name)
        made: dict[int, OracleInode] = {}

        def copy(inode: OracleInode) -> OracleInode:
            if inode.ino in made:
                made[inode.ino].nlink += 1
                return made[inode.ino]
            new = made[inode.ino] = self._new(inode.mode, inode.uid, inode.gid, inode.rdev)
            new.atime, new.mtime = inode.atime, inode.mtime
            new.counted = self.inodes[new_parent].counted
            new.xattrs, new.target = dict(inode.xattrs), inode.target
            new.content.size, new.content.pages = inode.content.size, dict(inode.content.pages)
            # What is open is copied as a reader sees it, who may not be told of its holes; what is
            # shared is by its first change, in pieces that are larger than a page.
            new.allocated = inode.allocated = True
            for below, child in inode.names.items():
                new.names[below] = copy(child)
                if child.is_dir:
                    new.names[below].parent, new.nlink = new, new.nlink + 1
            return new

        below = {inode.ino: inode for inode in self._tree(source)}
        size = sum(inode.content.size for inode in below.values())
        # A tree is looked at when it is there: it is too much also if there was too much before.
        self._require_room(self.inodes[new_parent].counted, size, len(below), source.is_dir)
        self._attach(self.inodes[new_parent], new_name, copy(source))

    def _inside(self, ancestor: OracleInode, directory: OracleInode) -> bool:
        while directory is not ancestor and directory.parent is not directory:
            directory = directory.parent
        return directory is ancestor

    def _tree(self, top: OracleInode) -> Iterator[OracleInode]:
        """It and all below, what has several names for each of them."""
        yield top
        for inode in top.names.values():
            yield from self._tree(inode)

    # Quotas

    def set_quota(self, ino: int, bytes_max: float, files_max: float) -> None:
        directory = self._directory(ino)
        if directory.quota is None:
            directory.quota = directory.counted = Quota(0, 0, directory.counted)
            for inode in directory.names.values():
                self._count_for(inode, directory.quota)
        directory.quota.bytes_max, directory.quota.files_max = bytes_max, files_max

    def remove_quota(self, ino: int) -> None:
        directory = self._directory(ino)
        removed, directory.quota = directory.quota, None
        if removed is None:
            raise errors.NoAttribute
        directory.counted = removed.above
        for inode in directory.names.values():
            self._count_for(inode, removed.above, removed)
        removed.is_gone = True

    def _count_for(
        self, inode: OracleInode, quota: Quota | None, only_of: Quota | None = None
    ) -> None:
        """What lies in an inode is counted by this quota; ``only_of``: what was by that one."""
        if inode.quota is not None:
            inode.quota.above = quota
            return
        if only_of is None or inode.counted is only_of:
            inode.counted = quota
        for child in inode.names.values():
            self._count_for(child, quota, only_of)

    def used(self, quota: Quota) -> tuple[int, int]:
        """Bytes and files that a quota counts."""
        counted = [
            inode
            for inode in self.inodes.values()
            if inode.counted is not None and quota in inode.counted.chain
        ]
        return sum(inode.content.size for inode in counted), len(counted)

    def _require_room(
        self, quota: Quota | None, size: int, files: int, exceeds: bool = False
    ) -> None:
        """``exceeds``: there must not be too much of what does not grow, either."""
        for each in quota.chain if quota else []:
            used_bytes, used_files = self.used(each)
            if (size > 0 or exceeds) and used_bytes + size > each.bytes_max:
                raise errors.QuotaExceeded
            if (files > 0 or exceeds) and used_files + files > each.files_max:
                raise errors.QuotaExceeded

    def _require_same_quotas(self, directory: OracleInode, inode: OracleInode) -> None:
        own = inode.quota
        if inode.counted is not directory.counted and not (own and own.above is directory.counted):
            raise errors.CrossDevice

    # Attributes

    def getattr(self, ino: int) -> OracleInode:
        return self.inodes[ino]

    def setattr(self, ino: int, changes, caller, handle: int | None = None) -> OracleInode:
        inode = self.inodes[ino]
        before = inode.mode, inode.uid, inode.gid, inode.atime, inode.mtime
        if changes.size is not None:
            if handle is not None and self._access[handle] == os.O_RDONLY:
                raise errors.BadHandle
            self._truncate(inode, changes.size)
        if changes.mode is not None:
            inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode)
        elif not stat.S_ISDIR(inode.mode) and (changes.uid is not None or changes.gid is not None):
            inode.mode &= ~stat.S_ISUID
            if inode.mode & stat.S_IXGRP:
                inode.mode &= ~stat.S_ISGID
        if changes.uid is not None:
            inode.uid = changes.uid
        if changes.gid is not None:
            inode.gid = changes.gid
        if changes.atime_ns is not None:
            inode.atime = Stamp(changes.atime_ns, changes.atime_ns)
        if changes.mtime_ns is not None:
            inode.mtime = Stamp(changes.mtime_ns, changes.mtime_ns)
        others = (changes.mode, changes.uid, changes.gid, changes.atime_ns, changes.mtime_ns)
        if any(value is not None for value in others) or changes.size is None:
            if before == (inode.mode, inode.uid, inode.gid, inode.atime, inode.mtime):
                inode.times_at_save = inode.times_at_save or (inode.mtime, inode.ctime)
            inode.ctime = self.clock
        return inode

    def _truncate(self, inode: OracleInode, size: int) -> None:
        self._require_room(inode.counted, size - inode.size, 0)
        if size == inode.content.size:
            return self._perhaps_changed(inode)
        inode.content.truncate(size)
        inode.mtime = inode.ctime = self.clock

    def _perhaps_changed(self, inode: OracleInode) -> None:
        """Filesystems differ in what counts as a change."""
        inode.mtime, inode.ctime = inode.mtime.or_at(self.clock), inode.ctime.or_at(self.clock)

    def getxattr(self, ino: int, name: bytes) -> bytes:
        if name not in self.inodes[ino].xattrs:
            raise errors.NoAttribute
        return self.inodes[ino].xattrs[name]

    def setxattr(self, ino: int, name: bytes, value: bytes, flags: int = 0) -> None:
        inode = self.inodes[ino]
        if flags == os.XATTR_CREATE and name in inode.xattrs:
            raise errors.Exists
        if flags == os.XATTR_REPLACE and name not in inode.xattrs:
            raise errors.NoAttribute
        inode.xattrs[name] = value
        inode.ctime = self.clock

    def listxattr(self, ino: int) -> list[bytes]:
        return list(self.inodes[ino].xattrs)

    def removexattr(self, ino: int, name: bytes) -> None:
        self.getxattr(ino, name)
        del self.inodes[ino].xattrs[name]
        self.inodes[ino].ctime = self.clock

    # Files

    def _handle(self, inode: OracleInode, flags: int) -> int:
        self._next_handle += 1
        self.handles[self._next_handle] = inode
        self._access[self._next_handle] = flags & os.O_ACCMODE
        inode.handles += 1
        return self._next_handle

    def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller
    ) -> tuple[int, OracleInode]:
        inode = self._make(parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller)
        return self._handle(inode, flags), inode

    def open(self, ino: int, flags: int) -> int:
        inode = self.inodes[ino]
        if flags & os.O_TRUNC:
            self._truncate(inode, 0)
        self.touch_atime(inode)
        return self._handle(inode, flags)

    def has_writers(self, inode: OracleInode) -> bool:
        """Whether a handle can write to it."""
        return any(i is inode and self._access[h] != os.O_RDONLY for h, i in self.handles.items())

    def touch_atime(self, inode: OracleInode) -> None:
        """Reading may set the access time, if the mount keeps it."""
        inode.atime = Stamp(inode.atime.low, max(inode.atime.high, self.clock.high))

    def read(self, handle: int, offset: int, length: int) -> bytes:
        if self._access[handle] == os.O_WRONLY:
            raise errors.BadHandle
        self.touch_atime(self.handles[handle])
        return self.handles[handle].content.read(offset, length)

    def write(self, handle: int, offset: int, data: bytes) -> int:
        inode = self.handles[handle]
        if self._access[handle] == os.O_RDONLY:
            raise errors.BadHandle
        if data:
            self._require_room(inode.counted, offset + len(data) - inode.size, 0)
            inode.times_at_save = inode.times_at_save or (inode.mtime, inode.ctime)
            inode.content.write(offset, data)
            inode.mtime = inode.ctime = self.clock
        return len(data)

    def fallocate(self, handle: int, mode: int, offset: int, length: int) -> None:
        inode, end = self.handles[handle], offset + length
        if self._access[handle] == os.O_RDONLY:
            raise errors.BadHandle
        content, size = inode.content, inode.size
        if not mode & ranges.KEEP_SIZE:
            self._require_room(inode.counted, end - size, 0)
        if mode & (ranges.PUNCH_HOLE | ranges.ZERO_RANGE) and offset < size:
            content.write(offset, bytes(min(end, size) - offset))
        content.allocate(offset, end)
        content.size = size if mode & ranges.KEEP_SIZE else max(size, end)
        inode.allocated |= end > content.size
        inode.times_at_save = inode.times_at_save or (inode.mtime, inode.ctime)
        self._perhaps_changed(inode)

    def copy_file_range(self, source: int, offset: int, target: int, to: int, length: int) -> int:
        if self._access[source] == os.O_WRONLY or self._access[target] == os.O_RDONLY:
            raise errors.BadHandle
        data = self.read(source, offset, length)
        if (
            self.handles[source] is self.handles[target]
            and offset < to + len(data)
            and to < offset + len(data)
        ):
            raise errors.Invalid
        return self.write(target, to, data)

    def map_write(self, inode: OracleInode, offset: int, data: bytes) -> None:
        """Write to a mapping: the times may change at once, later, or not at all."""
        inode.content.write(offset, data)
        self._perhaps_changed(inode)

    def fsync(self, handle: int, datasync: bool) -> None:
        self.handles[handle].times_at_save = None

    def sync(self) -> None:
        for inode in self.inodes.values():
            inode.times_at_save = None

    def release(self, handle: int) -> None:
        inode = self.handles.pop(handle)
        del self._access[handle]
        inode.handles -= 1
        if not inode.handles:
            inode.times_at_save = None

    # Directories

    def opendir(self, ino: int) -> int:
        directory = self._directory(ino)
        self._next_handle += 1
        self.dir_handles[self._next_handle] = DirHandle(
            directory, set(directory.names), set(directory.names)
        )
        directory.handles += 1
        return self._next_handle

    def releasedir(self, handle: int) -> None:
        self.dir_handles.pop(handle).directory.handles -= 1

    # Life

    def forgettable(self) -> list[int]:
        """Inodes that have neither a name nor a handle, and are not in the trash."""
        kept = {inode.ino for _, _, inode in self._trash}
        return [
            inode.ino
            for inode in self.inodes.values()
            if inode.nlink == 0 and not inode.handles and inode.ino not in kept
        ]

    def forget(self, inos: list[int]) -> None:
        for ino in inos:
            if self.inodes[ino].nlink == 0 and not self.inodes[ino].handles:
                erased = self.inodes.pop(ino)
                if erased.quota is not None:
                    erased.quota.is_gone = True

    def end(self, crashed: bool) -> None:
        """The filesystem ends, with open files. A crash loses no byte, but may set times of writes
        back."""
        self.handles.clear()
        self._access.clear()
        self.dir_handles.clear()
        for inode in self.inodes.values():
            inode.handles = 0
            if crashed and inode.times_at_save:
                mtime, ctime = inode.times_at_save
                inode.mtime, inode.ctime = inode.mtime.or_at(mtime), inode.ctime.or_at(ctime)
            inode.times_at_save = None
        self.forget(self.forgettable())

    def walk(self) -> dict[bytes, OracleInode]:
        """Every path (b"" is the root) and its inode."""
        found = {b"": self.inodes[ROOT]}
        pending = [b""]
        while pending:
            path = pending.pop()
            for name, inode in found[path].names.items():
                found[path + b"/" + name] = inode
                if inode.is_dir:
                    pending.append(path + b"/" + name)
        return found
