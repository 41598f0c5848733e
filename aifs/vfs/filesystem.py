"""The filesystem's operations: names in ``names`` and ``publish``, attributes here, file bytes
through ``file_io``.

All methods raise FsError subclasses. A change has happened when its method returns: everybody sees
it, it survives the daemon's death, and a power cut within the commit interval or after the next
fsync, fsyncdir or sync. A rename is durable when it returns, with all that lies below the new name.
"""

import os
import time
from collections.abc import Callable
from typing import Any

import trio

from aifs.core import ioctl
from aifs.core.errors import NoAttribute, NotPermitted
from aifs.core.log import logger
from aifs.files import permissions, ranges
from aifs.files.kernel import Kernel
from aifs.files.open_inode import OpenInode
from aifs.files.types import BLOCK_SIZE, ROOT, CallerLike, Opened, SetAttr, StatFs
from aifs.meta import acl, keys, namespace, xattrs
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.records import APPEND_ONLY, IMMUTABLE, Inode
from aifs.store.store import Store
from aifs.vfs import attributes, burst_hints, hints
from aifs.vfs.groups.grouping import Grouping
from aifs.vfs.recovery import Recovered

_log = logger(__name__)

_ATIME_INTERVAL_NS = 24 * 3600 * 10**9  # relatime, as in mount(8)


def _require_may_open(inode: Inode, flags: int) -> None:
    """To write. Raises NotPermitted."""
    if inode.flags & APPEND_ONLY and (not flags & os.O_APPEND or flags & os.O_TRUNC):
        raise NotPermitted("the file is append-only (chattr)")
    if inode.flags & IMMUTABLE:
        raise NotPermitted("the file is immutable (chattr)")


class Filesystem(Grouping):
    """An open store as a POSIX filesystem. Made by ``open_filesystem``; used from one trio
    thread.
    """

    def __init__(
        self, store: Store, kernel: Kernel, mountpoint: str, read_only: bool, atime: str
    ) -> None:
        super().__init__(store, kernel)
        self.mountpoint = mountpoint
        self.read_only = read_only
        self.started_s = time.monotonic()
        self.recovered = Recovered()
        self.atime = "noatime" if read_only else atime
        """One of ATIMES."""

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
            (await self.getattr(ino)).require_unguarded()
            if handle is not None:
                await self.io.truncate(self.handles.writable(handle), changes.size)
            else:
                await self._truncate(ino, changes.size)
        inode = await self.change_inode(ino, attributes.apply_changes, changes)
        if changes.mtime_ns is not None and inode.in_burst:
            await self.io.set_mtime(ino, changes.mtime_ns)
        return inode

    async def _truncate(self, ino: int, size: int) -> None:
        self.require_writable()
        file = await self.io.acquire(ino)
        try:
            await self.io.truncate(file, size)
        finally:
            await self.io.release(file)
        await self._closed(file, written=True)

    async def set_flags(self, ino: int, flags: int, project: int) -> None:
        """chattr(1): ``flags`` as in records.py. Who may is the kernel's decision. Raises
        NotSupported.
        """
        if flags & (IMMUTABLE | APPEND_ONLY):
            await self._engine.transact(Transaction.add, keys.COUNTER_GUARDED, 1)
        await self.change_inode(ino, attributes.apply_flags, (flags, project))

    async def change_inode(
        self, ino: int, change: Callable[[Inode, Any], None], argument: Any
    ) -> Inode:
        """Apply ``change(inode, argument)``, which may raise and must be repeatable, and record the
        result.
        """
        inode = await self.io.change(ino, change, argument)
        self._policies.pop(ino, None)
        self._policy_changes += 1
        return inode

    def _accessed(self, inode: Inode) -> bool:
        """Update atime by the mount's rule; whether it changed."""
        now = time.time_ns()
        recent = self.atime == "relatime" and (
            inode.atime_ns > max(inode.mtime_ns, inode.ctime_ns)
            and now - inode.atime_ns < _ATIME_INTERVAL_NS
        )
        if recent or self.atime == "noatime":
            return False
        inode.atime_ns = now
        return True

    # --- files ---

    async def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        """Another name for a file, or the first one of a file that was created without."""
        inode = await super().link(ino, new_parent, new_name)
        if inode.nlink == 1:  # it may have been closed, as what nobody would see again
            file = await self.io.acquire(ino)
            await self.io.release(file)
            await self._closed(file, written=True)
        return inode

    async def open(self, ino: int, flags: int, kill_privileges: bool = False) -> Opened:
        """Opening for reading counts as access, since the kernel reads most pages without asking.

        Opening for writing ends file capabilities, since a write that is passed through could not.
        """
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        if writing or flags & os.O_TRUNC:
            self.require_writable()
        file = await self.io.acquire(ino)
        opening = 0
        try:
            if writing or flags & os.O_TRUNC:
                _require_may_open(file.inode, flags)
            if flags & os.O_TRUNC:
                await self.io.truncate(file, 0)
            if writing:
                await self.io.begin_writing(file)
                opening = 1
                taken = kill_privileges and file.inode.is_privileged
                if taken or await self._engine.view(attributes.has_capabilities, ino):
                    await self._kill_privileges(file)
                self.groups.opened(ino)
            if not flags & os.O_WRONLY and not flags & os.O_NOATIME and self._accessed(file.inode):
                file.unsaved = True
                self.kernel.drop_attributes(ino)
            opened = await self._add_handle(file, flags)
            file.opening -= opening
            return opened
        except BaseException:
            file.opening -= opening
            await self._give_up(file, written=writing)
            raise

    async def _give_up(self, file: OpenInode, written: bool) -> None:
        """An open has failed, or was interrupted. The file may have got into the burst tier all the
        same.
        """
        with trio.CancelScope(shield=True):
            await self.io.release(file)
            await self._closed(file, written)

    async def _add_handle(self, file: OpenInode, flags: int) -> Opened:
        """A handle. The kernel syncs what is written with O_SYNC to a file that it passes through,
        but knows nothing of our records: so the file's name and its mark are on stable storage
        before that can begin."""
        if file.copy is not None:
            self.tier.touch(file.copy.id)
        opened = await self.handles.add(file, flags)
        if opened.backing and self.handles[opened.handle].synchronous:
            try:
                await self.io.sync(file)
            except BaseException:
                self.handles.remove(opened.handle)
                raise
        return opened

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes, fewer only at the end of the file; a view is valid until it is
        dropped.
        """
        return await self.io.read(self.handles.readable(handle), offset, length)

    async def write(
        self, handle: int, offset: int, data: bytes | memoryview, kill_privileges: bool = False
    ) -> int:
        """All of ``data`` is written at ``offset``.

        The kernel sees to O_APPEND, by the offset, and to O_SYNC, by an fsync after the write; not
        so where it bypasses its cache.
        """
        file = self.handles.writable(handle)
        if file.inode.flags & APPEND_ONLY and offset < file.inode.size:
            raise NotPermitted("the file is append-only (chattr)")
        await self._before_change(file, kill_privileges)
        await self.io.write(file, offset, data)
        if file.on_object:
            await self._sync_written(handle)
        return len(data)

    async def _before_change(self, file: OpenInode, kill_privileges: bool) -> None:
        """The bytes are about to change. First, so that at no time they run with the owner's rights
        as others made them.
        """
        if file.inode.flags & IMMUTABLE:
            raise NotPermitted("the file is immutable (chattr)")
        if kill_privileges and file.inode.is_privileged:
            await self._kill_privileges(file)

    async def _kill_privileges(self, file: OpenInode) -> None:
        file.adopt(await self._engine.transact(attributes.kill_privileges, file.inode.ino))
        file.unsaved = True
        self.kernel.drop_attributes(file.inode.ino)

    async def fallocate(
        self, handle: int, mode: int, offset: int, length: int, caller: CallerLike = ROOT
    ) -> None:
        """fallocate(2): allocate, keep size, punch hole, zero range. Raises NotSupported, NoSpace.

        The kernel leaves set-id bits to us, and does not say whether the caller may keep them: only
        root may.
        """
        file = self.handles.writable(handle)
        if file.inode.flags & APPEND_ONLY and mode & ~ranges.KEEP_SIZE:
            raise NotPermitted("the file is append-only (chattr)")
        await self._before_change(file, caller.uid != 0)
        await ranges.fallocate(self.io, file, mode, offset, length)
        await self._sync_written(handle)

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE of lseek(2). Raises NoSuchAddress beyond the end."""
        return await ranges.seek(self.io, self.handles[handle].file, offset, whence)

    async def copy_file_range(
        self,
        handle_in: int,
        offset_in: int,
        handle_out: int,
        offset_out: int,
        length: int,
        caller: CallerLike = ROOT,
    ) -> int:
        """copy_file_range(2): how much has been copied; 0 at the end of the source. Set-id bits: as
        ``fallocate``.
        """
        source, target = self.handles.readable(handle_in), self.handles.writable(handle_out)
        await self._before_change(target, caller.uid != 0)
        copied = await ranges.copy(self.io, source, offset_in, target, offset_out, length)
        await self._sync_written(handle_out)
        return copied

    async def _sync_written(self, handle: int) -> None:
        """The kernel syncs what is written with O_SYNC, except by these calls."""
        opened = self.handles[handle]
        if opened.synchronous:
            await self.io.sync(opened.file)

    async def release(self, handle: int) -> None:
        """The last descriptor of ``handle`` is closed."""
        written = self.handles[handle].writable
        file = self.handles.remove(handle)
        await self.io.release(file)
        self._correct_attributes(file)
        await self._closed(file, written)

    async def _closed(self, file: OpenInode, written: bool) -> None:
        """Somebody has closed the file; ``written``: who may have changed it."""
        inode = file.inode
        if inode.in_burst and inode.nlink and not file.writers:
            self.tier.dirty(inode.copy.id, inode.copy.server, inode.space)
        if not inode.in_burst:
            # A tiny file that has become inline: nobody needs to wait for it.
            self.drain.gone(inode.ino)
        withheld = written and not file.writers and await self.groups.closed(inode)
        if inode.in_burst and inode.nlink and not file.writers and not withheld:
            self.drain.closed(inode)

    async def fsync(self, handle: int, datasync: bool = False) -> None:
        """The file's bytes, size and name are on stable storage when this returns. Raises
        Unavailable, NoSpace.
        """
        file = self.handles[handle].file
        await self.io.sync(file)
        self._correct_attributes(file)
        if self.store.config.burst.drain_on_fsync and file.inode.in_burst:
            self.drain.request([file.inode.ino])

    def _correct_attributes(self, file: OpenInode) -> None:
        """Have the kernel ask again for attributes that were a guess, or that it could not see
        change.
        """
        if file.shown not in (None, (file.inode.mtime_ns, file.inode.blocks)):
            file.shown = None
            self.kernel.drop_attributes(file.inode.ino)

    async def sync(self) -> None:
        """Everything acknowledged is on stable storage when this returns."""
        await self.io.save_all()
        await self.writeback.sync_all()
        await self._engine.barrier()

    # --- extended attributes ---

    async def getxattr(self, ino: int, name: bytes, caller: CallerLike = ROOT) -> bytes:
        if name.startswith(hints.PREFIX):
            return await hints.get(self, ino, name, caller)
        if name in (acl.ACCESS, acl.DEFAULT):
            inode = await self.getattr(ino)
            value = inode.acl if name == acl.ACCESS else inode.default_acl
            if not value:
                raise NoAttribute()
            return value
        return await self._engine.view(xattrs.get, ino, name)

    async def setxattr(
        self, ino: int, name: bytes, value: bytes, flags: int = 0, caller: CallerLike = ROOT
    ) -> None:
        if name.startswith(hints.PREFIX):
            await hints.put(self, ino, name, value, caller)
            return
        if name in (acl.ACCESS, acl.DEFAULT):
            await self._set_acl(ino, name, value, caller)
            return
        now = time.time_ns()
        self._adopt(await self._engine.transact(xattrs.put, ino, name, value, flags, now))

    async def listxattr(self, ino: int, caller: CallerLike = ROOT) -> list[bytes]:
        """Names; those of the trusted namespace are for root alone, as xattr(7) says."""
        inode = await self.getattr(ino)
        names = await self._engine.view(xattrs.names, ino)
        names += [acl.ACCESS] * bool(inode.acl) + [acl.DEFAULT] * bool(inode.default_acl)
        return (
            names
            if caller.uid == 0
            else [name for name in names if not name.startswith(b"trusted.")]
        )

    async def removexattr(self, ino: int, name: bytes, caller: CallerLike = ROOT) -> None:
        if name.startswith(hints.PREFIX):
            await hints.remove(self, ino, name, caller)
            return
        if name in (acl.ACCESS, acl.DEFAULT):
            await self._set_acl(ino, name, b"", caller)
            return
        self._adopt(await self._engine.transact(xattrs.remove, ino, name, time.time_ns()))

    async def _set_acl(self, ino: int, name: bytes, value: bytes, caller: CallerLike) -> None:
        inode = await self.getattr(ino)
        member = permissions.is_member(inode.gid, caller)
        change = attributes.AclChange(name, value, kill_setgid=not member)
        await self.change_inode(ino, attributes.apply_acl, change)

    async def wait_drained(
        self, ino: int, timeout_s: float | None = None, caller: CallerLike = ROOT
    ) -> None:
        """What is undrained now of a file, or below a directory, is on the capacity tier on return.
        Raises TimedOut, AccessDenied, NotPermitted."""
        await self.require_may(ioctl.AIFS_IOC_DRAIN, ino, caller)
        await burst_hints.wait_drained(self, ino, timeout_s)

    async def remove_tree(
        self, parent: int, name: bytes, caller: CallerLike = ROOT, locked: bool = False
    ) -> None:
        """Remove a directory with all that lies below it, at a cost that does not depend on how
        much it is (upkeep/trash.py).

        The kernel neither does nor checks it, so who may is decided here: who may remove the name,
        and owns the directory. It sees the name no more when this returns; soon, if it holds the
        parent's lock for this request (``locked``). Raises NotFound, NotADirectory, AccessDenied,
        NotPermitted, ReadOnly.
        """
        self.require_writable()
        await self.trash.doom(parent, name, caller)
        if locked:
            self.kernel.drop_name_soon(parent, name)
        else:
            await self.kernel.forget_names([(parent, name)])

    # --- the whole ---

    async def statfs(self) -> StatFs:
        """Space of the data servers, each device counted once; inodes are limited by space
        alone.
        """
        space = await self.store.servers.statfs()
        inodes = await self._engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        total, free, room = (
            size // BLOCK_SIZE for size in (space.total, space.free, space.available)
        )
        return StatFs(BLOCK_SIZE, total, free, room, inodes + room, room, namespace.NAME_MAX)
