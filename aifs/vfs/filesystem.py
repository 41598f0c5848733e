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

from aifs.core.errors import Invalid, NameTooLong, NotPermitted, ReadOnly
from aifs.core.log import logger
from aifs.layout.hint import Policy
from aifs.meta import keys, namespace, xattrs
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import Copy, Inode
from aifs.vfs import attributes, burst_hints, hints, ranges
from aifs.vfs.open_inode import OpenInode
from aifs.vfs.parts import Parts
from aifs.vfs.publish import sync_below
from aifs.vfs.recovery import Recovered
from aifs.vfs.store import Store
from aifs.vfs.types import BLOCK_SIZE, ROOT, CallerLike, Opened, SetAttr, StatFs

_log = logger(__name__)

_READDIR_BATCH = 32  # of the about 180 entries of one reply; the last batch is read in part in vain
_POLICIES_MAX = 1024
_ATIME_INTERVAL_NS = 24 * 3600 * 10**9  # relatime, as in mount(8)


class Filesystem(Parts):
    """An open store as a POSIX filesystem. Made by ``open_filesystem``; used from one trio thread."""

    def __init__(self, store: Store, mountpoint: str, read_only: bool, atime: bool) -> None:
        super().__init__(store)
        self.mountpoint = mountpoint
        self.read_only = read_only
        self.started_s = time.monotonic()
        self.recovered = Recovered()
        self.on_attr_change: Callable[[int], None] = lambda ino: None
        """Called when an inode's attributes change without the kernel having asked for it."""
        self.edge_status: Callable[[], dict[str, Any]] = dict
        """What the edge says of itself, for ``aifs status``."""
        self._atime = atime and not read_only
        self._engine = store.engine
        self._policies: dict[int, Policy | None] = {}
        self._orphans: set[int] = set()

    # --- names ---

    async def lookup(self, parent: int, name: bytes) -> Inode:
        return self._current(await self._engine.view(namespace.lookup, parent, name))

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, caller: CallerLike
    ) -> tuple[Opened, Inode]:
        """A new regular file, opened with ``flags``."""
        copy = None
        if flags & os.O_ACCMODE:
            copy = await self.io.burst.new_copy(await self._policy_of(parent))
        try:
            place = None if copy is None else copy.place
            inode = await self._create(parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller, copy=place)
        except BaseException:
            if copy is not None:
                self.tier.discard(copy)
            raise
        file = self.io.adopt_new(inode, copy)
        return await self.handles.add(file, flags), inode

    async def _policy_of(self, directory: int) -> Policy | None:
        """What new files of a directory inherit. Raises NotFound."""
        try:
            return self._policies[directory]
        except KeyError:
            if len(self._policies) >= _POLICIES_MAX:
                self._policies.clear()
            policy = (await self._engine.view(namespace.get_inode, directory)).policy
            self._policies[directory] = policy
            return policy

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
        self, parent: int, name: bytes, mode: int, caller: CallerLike, rdev: int = 0, data: bytes | None = None,
        copy: Copy | None = None,
    ) -> Inode:  # fmt: skip
        now = time.time_ns()
        ino, size = await self.ids.take(), len(data or b"")
        new = Inode(ino, mode, caller.uid, caller.gid, 1, rdev, size, 0, now, now, now, data=data, copy=copy)
        return await self._engine.transact(namespace.create, parent, name, new)

    async def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        cookie = await self.ids.take()
        linked = await self._engine.transact(namespace.link, ino, new_parent, new_name, cookie, time.time_ns())
        return self._adopt(linked)

    async def unlink(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.unlink, parent, name, time.time_ns()))

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.rmdir, parent, name, time.time_ns()))

    async def rename(self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0) -> None:
        """rename(2). A publishing barrier: all below the name is durable first, the rename itself on return."""
        moving = await self._engine.view(namespace.get_dentry, parent, name)
        published = await sync_below(self._engine, self.io, self.writeback, moving)
        if flags == namespace.RENAME_EXCHANGE:
            other = await self._engine.view(namespace.get_dentry, new_parent, new_name)
            await sync_below(self._engine, self.io, self.writeback, other)
        cookies = (await self.ids.take(), await self.ids.take())
        inode, other = await self._engine.transact(
            namespace.rename, parent, name, new_parent, new_name, flags, cookies, time.time_ns()
        )
        self._adopt(inode)
        if other is not None:
            self._unlinked(other)
        await self._engine.barrier()
        self.drain.published(published)

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
            self.drain.gone(inode.ino)
            file = self.io.open.get(inode.ino)
            if file is not None:
                file.cancel_drain()

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
                await self.io.truncate(self.handles.writable(handle), changes.size)
            else:
                await self._truncate(ino, changes.size)
        inode = await self.change_inode(ino, attributes.apply_changes, changes)
        if changes.mtime_ns is not None and inode.in_burst:
            await self.io.set_mtime(ino, changes.mtime_ns)
        return inode

    async def _truncate(self, ino: int, size: int) -> None:
        self._require_writable_mount()
        file = await self.io.acquire(ino)
        try:
            await self.io.truncate(file, size)
        finally:
            await self.io.release(file)
        self._closed(file)

    async def change_inode(self, ino: int, change: Callable[[Inode, Any], None], argument: Any) -> Inode:
        """Apply ``change(inode, argument)``, which may raise and must be repeatable, and record the result."""
        self._policies.pop(ino, None)
        file = self.io.open.get(ino)
        if file is None:
            return await self._engine.transact(attributes.change_inode, ino, change, argument)
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

    async def open(self, ino: int, flags: int, kill_privileges: bool = False) -> Opened:
        """Opening for reading counts as access, since the kernel reads most pages without asking.

        Opening for writing ends file capabilities, since a write that is passed through could not.
        """
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        if writing or flags & os.O_TRUNC:
            self._require_writable_mount()
        file = await self.io.acquire(ino)
        try:
            if flags & os.O_TRUNC:
                await self.io.truncate(file, 0)
            if writing:
                await self.io.begin_writing(file)
                taken = kill_privileges and file.inode.is_privileged
                if taken or await self._engine.view(attributes.has_capabilities, ino):
                    await self._kill_privileges(file)
            if not flags & os.O_WRONLY and not flags & os.O_NOATIME and self._accessed(file.inode):
                file.unsaved = True
                self.on_attr_change(ino)
            return await self._add_handle(file, flags)
        except BaseException:
            with trio.CancelScope(shield=True):
                await self.io.release(file)
            self._closed(file)  # it may have got into the burst tier
            raise

    async def _add_handle(self, file: OpenInode, flags: int) -> Opened:
        if file.copy is not None:
            self.tier.touch(file.copy.id)
        return await self.handles.add(file, flags)

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes, fewer only at the end of the file; a view is valid until it is dropped."""
        return await self.io.read(self.handles.readable(handle), offset, length)

    async def write(
        self, handle: int, offset: int, data: bytes | memoryview, kill_privileges: bool = False
    ) -> int:
        """All of ``data`` is written at ``offset``.

        The kernel sees to O_APPEND, by the offset, and to O_SYNC, by an fsync after the write.
        """
        file = self.handles.writable(handle)
        await self.io.write(file, offset, data)
        if kill_privileges and file.inode.is_privileged:
            await self._kill_privileges(file)
        return len(data)

    async def _kill_privileges(self, file: OpenInode) -> None:
        file.adopt(await self._engine.transact(attributes.kill_privileges, file.inode.ino))
        file.unsaved = True
        self.on_attr_change(file.inode.ino)

    async def fallocate(self, handle: int, mode: int, offset: int, length: int) -> None:
        """fallocate(2): allocate, keep size, punch hole, zero range. Raises NotSupported, NoSpace."""
        await ranges.fallocate(self.io, self.handles.writable(handle), mode, offset, length)

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE of lseek(2). Raises NoSuchAddress beyond the end."""
        return await ranges.seek(self.io, self.handles[handle].file, offset, whence)

    async def copy_file_range(
        self, handle_in: int, offset_in: int, handle_out: int, offset_out: int, length: int
    ) -> int:
        """copy_file_range(2): how much has been copied; 0 at the end of the source."""
        source, target = self.handles.readable(handle_in), self.handles.writable(handle_out)
        return await ranges.copy(self.io, source, offset_in, target, offset_out, length)

    async def release(self, handle: int) -> None:
        """The last descriptor of ``handle`` is closed."""
        file = self.handles.remove(handle)
        await self.io.release(file)
        self._correct_attributes(file)
        self._closed(file)

    def _closed(self, file: OpenInode) -> None:
        """Somebody who may have changed the file has closed it."""
        inode = file.inode
        if not inode.in_burst:
            self.drain.gone(inode.ino)  # a tiny file that has become inline: nobody needs to wait for it
        elif inode.nlink and not file.writers:
            self.tier.dirty(inode.copy.id, inode.copy.server, inode.size)
            self.drain.closed(inode)

    async def fsync(self, handle: int, datasync: bool = False) -> None:
        """The file's bytes, size and name are on stable storage when this returns. Raises Unavailable, NoSpace."""
        file = self.handles[handle].file
        await self.io.sync(file)
        self._correct_attributes(file)
        if self.store.config.burst.drain_on_fsync and file.inode.in_burst:
            self.drain.request([file.inode.ino])

    def _correct_attributes(self, file: OpenInode) -> None:
        """Have the kernel ask again for attributes that were a guess, or that it could not see change."""
        if file.shown not in (None, (file.inode.mtime_ns, file.inode.blocks)):
            file.shown = None
            self.on_attr_change(file.inode.ino)

    async def sync(self) -> None:
        """Everything acknowledged is on stable storage when this returns."""
        await self.io.save_all()
        for ino in list(self.io.open):
            await self.writeback.sync_inode(ino)
        await self.writeback.sync_closed_files()
        await self._engine.barrier()

    # --- directories ---

    async def readdir(self, ino: int, cookie: int) -> list[tuple[bytes, Inode, int]]:
        """The next entries behind ``cookie`` (0: the first) as (name, inode, cookie); [] at the end.

        An entry that exists during the whole listing appears exactly once, whatever else changes. A directory that has
        been removed, which some process may still be in, has none.
        """
        entries = await self._engine.view(namespace.list_directory, ino, cookie, _READDIR_BATCH)
        if not self.io.open:
            return entries
        return [(name, self._current(inode), place) for name, inode, place in entries]

    async def fsyncdir(self, ino: int) -> None:
        """The directory's names are on stable storage when this returns."""
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

    async def wait_drained(self, ino: int, timeout_s: float | None = None) -> None:
        """What is undrained now of a file, or below a directory, is on the capacity tier on return. Raises TimedOut."""
        await burst_hints.wait_drained(self, ino, timeout_s)

    # --- the whole ---

    async def statfs(self) -> StatFs:
        """Space of the data servers, each device counted once; inodes are limited by space alone."""
        space = await self.store.servers.statfs()
        inodes = await self._engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        total, free, room = (size // BLOCK_SIZE for size in (space.total, space.free, space.available))
        return StatFs(BLOCK_SIZE, total, free, room, inodes + room, room, namespace.NAME_MAX)

    def _require_writable_mount(self) -> None:
        if self.read_only:
            raise ReadOnly()
