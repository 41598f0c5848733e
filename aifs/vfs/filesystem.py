"""The filesystem's operations: names and attributes here, file bytes through ``file_io``.

All methods raise FsError subclasses. A change has happened when its method returns: everybody sees it, it
survives the daemon's death, and a power cut within the commit interval or after the next fsync, fsyncdir or sync.
A rename is durable when it returns, with all that lies below the new name.
"""

import os
import stat
import time
from collections.abc import Callable
from typing import Any

import trio

from aifs.core.errors import BadHandle, Invalid, NameTooLong, NotADirectory, NotPermitted, ReadOnly
from aifs.core.log import logger
from aifs.meta import keys, namespace, xattrs
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Inode
from aifs.vfs import hints
from aifs.vfs.collector import Collector
from aifs.vfs.file_io import FileIO
from aifs.vfs.ids import IdAllocator
from aifs.vfs.open_inode import OpenInode
from aifs.vfs.publish import sync_below
from aifs.vfs.recovery import Recovered
from aifs.vfs.store import Store
from aifs.vfs.types import BLOCK_SIZE, ROOT, CallerLike, DirectoryHandle, FileHandle, SetAttr, StatFs
from aifs.vfs.writeback import WriteBack

_log = logger(__name__)

_READDIR_BATCH = 32  # of the about 180 entries of one reply; the last batch is read in part in vain
_ATIME_INTERVAL_NS = 24 * 3600 * 10**9  # relatime, as in mount(8)


class Filesystem:
    """An open store as a POSIX filesystem. Made by ``open_filesystem``; used from one trio thread."""

    def __init__(self, store: Store, mountpoint: str, read_only: bool, atime: bool) -> None:
        self.store = store
        self.mountpoint = mountpoint
        self.read_only = read_only
        self.started_s = time.monotonic()
        self.recovered = Recovered()
        self.on_attr_change: Callable[[int], None] = lambda ino: None
        """Called when an inode's attributes change without the kernel having asked for it."""
        config, engine, servers = store.config, store.engine, store.servers
        self._atime = atime and not read_only
        self._engine = engine
        self._ids = IdAllocator(engine)
        self.collector = Collector(engine, servers)
        self.io = FileIO(config, engine, servers, self._ids, self.collector)
        self.writeback = WriteBack(
            self.io, engine, servers, config.meta.commit_interval_s, config.data.writeback_interval_s
        )
        self._handles: dict[int, FileHandle | DirectoryHandle] = {}
        self._next_handle = 1
        self._orphans: set[int] = set()

    # --- names ---

    async def lookup(self, parent: int, name: bytes) -> Inode:
        return self._current(await self._engine.view(namespace.lookup, parent, name))

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: CallerLike
    ) -> tuple[int, Inode]:
        """A new regular file, opened with ``flags``: its handle and inode."""
        inode = await self._create(parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller)
        return self._add_handle(FileHandle(self.io.adopt_new(inode), flags)), inode

    async def mknod(self, parent: int, name: bytes, mode: int, rdev: int, caller: CallerLike) -> Inode:
        """A regular file, fifo, socket or device node."""
        if stat.S_IFMT(mode) in (stat.S_IFDIR, stat.S_IFLNK):
            raise Invalid("mknod makes neither directories nor symlinks")
        return await self._create(parent, name, mode if stat.S_IFMT(mode) else mode | stat.S_IFREG, caller, rdev)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: CallerLike) -> Inode:
        return await self._create(parent, name, stat.S_IFDIR | stat.S_IMODE(mode), caller)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: CallerLike) -> Inode:
        if len(target) > namespace.SYMLINK_MAX:
            raise NameTooLong()
        return await self._create(parent, name, stat.S_IFLNK | 0o777, caller, data=target)

    async def _create(
        self, parent: int, name: bytes, mode: int, caller: CallerLike, rdev: int = 0, data: bytes | None = None
    ) -> Inode:
        now = time.time_ns()
        ino = await self._ids.take()
        new = Inode(ino, mode, caller.uid, caller.gid, 1, rdev, len(data or b""), 0, now, now, now, data=data)
        return await self._engine.transact(namespace.create, parent, name, new)

    async def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        cookie = await self._ids.take()
        linked = await self._engine.transact(namespace.link, ino, new_parent, new_name, cookie, time.time_ns())
        return self._adopt(linked)

    async def unlink(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.unlink, parent, name, time.time_ns()))

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.rmdir, parent, name, time.time_ns()))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """rename(2). A publishing barrier: all below the name is durable first, the rename itself on return."""
        moving = await self._engine.view(namespace.get_dentry, parent, name)
        await sync_below(self._engine, self.io, self.writeback, moving.ino)
        if flags == namespace.RENAME_EXCHANGE:
            other = await self._engine.view(namespace.get_dentry, new_parent, new_name)
            await sync_below(self._engine, self.io, self.writeback, other.ino)
        cookies = (await self._ids.take(), await self._ids.take())
        inode, other = await self._engine.transact(
            namespace.rename, parent, name, new_parent, new_name, flags, cookies, time.time_ns()
        )
        self._adopt(inode)
        if other is not None:
            self._unlinked(other)
        await self._engine.barrier()

    async def readlink(self, ino: int) -> bytes:
        inode = await self._engine.view(namespace.get_inode, ino)
        if not stat.S_ISLNK(inode.mode):
            raise Invalid("not a symlink")
        return inode.data or b""

    def forget(self, inos: list[int]) -> None:
        """The kernel has dropped these inodes; those without a name are removed once they are closed."""
        for ino in self._orphans.intersection(inos):
            self._orphans.discard(ino)
            file = self.io.open.get(ino)
            if file is not None:
                file.forgotten = True
            else:
                self.collector.add_orphan(ino)

    def _unlinked(self, inode: Inode) -> None:
        self._adopt(inode)
        if inode.nlink == 0:
            self._orphans.add(inode.ino)

    # --- attributes ---

    async def getattr(self, ino: int) -> Inode:
        file = self.io.open.get(ino)
        if file is not None:
            return self.io.attributes(file)
        return await self._engine.view(namespace.get_inode, ino)

    async def setattr(
        self, ino: int, changes: SetAttr, caller: CallerLike, handle: int | None = None
    ) -> Inode:
        """Change attributes; ``size`` truncates or extends. Who may is the kernel's decision."""
        if changes.size is not None:
            if handle is not None:
                await self.io.truncate(self._writable(handle), changes.size)
            else:
                await self._truncate(ino, changes.size)
        return await self.change_inode(ino, _apply_changes, changes)

    async def _truncate(self, ino: int, size: int) -> None:
        self._require_writable_mount()
        file = await self.io.acquire(ino)
        try:
            await self.io.truncate(file, size)
        finally:
            await self.io.release(file)

    async def change_inode(self, ino: int, change: Callable[[Inode, Any], None], argument: Any) -> Inode:
        """Apply ``change(inode, argument)``, which may raise and must be repeatable, and record the result."""
        file = self.io.open.get(ino)
        if file is None:
            return await self._engine.transact(_change_inode, ino, change, argument)
        change(file.inode, argument)
        await self.io.save(file)
        return self.io.attributes(file)

    def _current(self, inode: Inode) -> Inode:
        """The inode as it is in core, if it is open."""
        file = self.io.open.get(inode.ino)
        return inode if file is None else self.io.attributes(file)

    def _adopt(self, inode: Inode) -> Inode:
        """As ``_current``, after a transaction that changed the record."""
        file = self.io.open.get(inode.ino)
        if file is None:
            return inode
        file.adopt(inode)
        return self.io.attributes(file)

    def _accessed(self, inode: Inode) -> bool:
        """Update atime by the rules of relatime; whether it changed."""
        now = time.time_ns()
        recent = inode.atime_ns > max(inode.mtime_ns, inode.ctime_ns) and now - inode.atime_ns < _ATIME_INTERVAL_NS
        if recent or not self._atime:
            return False
        inode.atime_ns = now
        return True

    # --- files ---

    async def open(self, ino: int, flags: int) -> int:
        """A handle. The kernel caches pages of files that are read, so opening for reading counts as access."""
        if flags & (os.O_ACCMODE | os.O_TRUNC):
            self._require_writable_mount()
        file = await self.io.acquire(ino)
        try:
            if flags & os.O_TRUNC:
                await self.io.truncate(file, 0)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.io.release(file)
            raise
        handle = FileHandle(file, flags)
        if handle.readable and not flags & os.O_NOATIME and self._accessed(file.inode):
            file.unsaved = True
            self.on_attr_change(ino)
        return self._add_handle(handle)

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes, fewer only at the end of the file; a view is valid until it is dropped."""
        opened = self._file_handle(handle)
        if not opened.readable:
            raise BadHandle("opened for writing only")
        return await self.io.read(opened.file, offset, length)

    async def write(self, handle: int, offset: int, data: bytes | memoryview) -> int:
        """All of ``data`` is written at ``offset``.

        The kernel sees to O_APPEND, by the offset, and to O_SYNC, by an fsync after the write.
        """
        await self.io.write(self._writable(handle), offset, data)
        return len(data)

    async def release(self, handle: int) -> None:
        """The last descriptor of ``handle`` is closed."""
        opened = self._handles.pop(handle, None)
        if not isinstance(opened, FileHandle):
            raise BadHandle()
        await self.io.release(opened.file)
        self._correct_blocks(opened.file)

    async def fsync(self, handle: int, datasync: bool = False) -> None:
        """The file's bytes, size and name are on stable storage when this returns. Raises Unavailable, NoSpace."""
        file = self._file_handle(handle).file
        await self.io.sync(file)
        self._correct_blocks(file)

    def _correct_blocks(self, file: OpenInode) -> None:
        """Have the kernel ask again for a count of blocks that was a guess when it asked."""
        if file.shown_blocks not in (None, file.inode.blocks):
            file.shown_blocks = None
            self.on_attr_change(file.inode.ino)

    async def sync(self) -> None:
        """Everything acknowledged is on stable storage when this returns."""
        await self.io.save_all()
        for ino in list(self.io.open):
            await self.writeback.sync_inode(ino)
        await self.writeback.sync_closed_files()
        await self._engine.barrier()

    # --- directories ---

    async def opendir(self, ino: int) -> int:
        """A handle; also of a directory that has been removed, which some process may still be in."""
        if not (await self._engine.view(namespace.get_inode, ino)).is_dir:
            raise NotADirectory()
        return self._add_handle(DirectoryHandle(ino))

    async def readdir(self, handle: int, cookie: int) -> list[tuple[bytes, Inode, int]]:
        """The next entries behind ``cookie`` (0: the first) as (name, inode, cookie); [] at the end.

        An entry that exists during the whole listing appears exactly once, whatever else changes.
        """
        ino = self._directory_handle(handle).ino
        entries = await self._engine.view(namespace.list_directory, ino, cookie, _READDIR_BATCH)
        if not self.io.open:
            return entries
        return [(name, self._current(inode), place) for name, inode, place in entries]

    async def releasedir(self, handle: int) -> None:
        self._directory_handle(handle)
        del self._handles[handle]

    async def fsyncdir(self, handle: int) -> None:
        """The directory's names are on stable storage when this returns."""
        self._directory_handle(handle)
        await self._engine.barrier()

    # --- extended attributes ---

    async def getxattr(self, ino: int, name: bytes) -> bytes:
        if name.startswith(hints.PREFIX):
            return await hints.get(self, ino, name)
        return await self._engine.view(xattrs.get, ino, name)

    async def setxattr(
        self, ino: int, name: bytes, value: bytes, flags: int = 0, caller: CallerLike = ROOT
    ) -> None:
        if name.startswith(hints.PREFIX):
            await hints.put(self, ino, name, value, caller)
            return
        now = time.time_ns()
        self._adopt(await self._engine.transact(xattrs.put, ino, name, value, flags, now))

    async def listxattr(self, ino: int, caller: CallerLike = ROOT) -> list[bytes]:
        """Names; those of the trusted namespace are for root alone, as xattr(7) says."""
        names = await self._engine.view(xattrs.names, ino)
        return names if caller.uid == 0 else [name for name in names if not name.startswith(b"trusted.")]

    async def removexattr(self, ino: int, name: bytes) -> None:
        if name.startswith(hints.PREFIX):
            raise NotPermitted("hints cannot be removed")
        self._adopt(await self._engine.transact(xattrs.remove, ino, name, time.time_ns()))

    # --- the whole ---

    async def statfs(self) -> StatFs:
        """Space of the data servers, each device counted once; inodes are limited by space alone."""
        space = await self.store.servers.statfs()
        inodes = await self._engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        total, free, room = (size // BLOCK_SIZE for size in (space.total, space.free, space.available))
        return StatFs(BLOCK_SIZE, total, free, room, inodes + room, room, namespace.NAME_MAX)

    # --- handles ---

    def _add_handle(self, opened: FileHandle | DirectoryHandle) -> int:
        handle = self._next_handle
        self._next_handle += 1
        self._handles[handle] = opened
        return handle

    def _file_handle(self, handle: int) -> FileHandle:
        opened = self._handles.get(handle)
        if not isinstance(opened, FileHandle):
            raise BadHandle()
        return opened

    def _directory_handle(self, handle: int) -> DirectoryHandle:
        opened = self._handles.get(handle)
        if not isinstance(opened, DirectoryHandle):
            raise BadHandle()
        return opened

    def _writable(self, handle: int) -> OpenInode:
        opened = self._file_handle(handle)
        if not opened.writable:
            raise BadHandle("opened for reading only")
        return opened.file

    def _require_writable_mount(self) -> None:
        if self.read_only:
            raise ReadOnly()


def _apply_changes(inode: Inode, changes: SetAttr) -> None:
    if changes.mode is not None:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode)
    if changes.uid is not None:
        inode.uid = changes.uid
    if changes.gid is not None:
        inode.gid = changes.gid
    if changes.atime_ns is not None:
        inode.atime_ns = changes.atime_ns
    if changes.mtime_ns is not None:
        inode.mtime_ns = changes.mtime_ns
    inode.ctime_ns = changes.ctime_ns if changes.ctime_ns is not None else time.time_ns()


def _change_inode(tx: Transaction, ino: int, change: Callable[[Inode, Any], None], argument: Any) -> Inode:
    inode = namespace.get_inode(tx, ino)
    change(inode, argument)
    namespace.put_inode(tx, inode)
    return inode
