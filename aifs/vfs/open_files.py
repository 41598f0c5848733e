"""Open files: open, read, write, sync and close. Besides their bytes (``FileIO``): handles, times,
set-id bits, chattr's flags, and parts that hear of closes."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import trio

from aifs.burst.tier import BurstTier
from aifs.core import clock
from aifs.core.errors import Invalid, NotFound, NotPermitted, NotSupported, Stale
from aifs.files import ranges, rights
from aifs.files.asks import ROOT as AT_ROOT
from aifs.files.asks import Hint
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.handles import Handles
from aifs.files.lent_opens import LentOpens
from aifs.files.open_inode import OpenInode
from aifs.files.services import Services
from aifs.files.types import (
    AHEAD,
    ATIMES,
    LENT,
    LENT_HERE,
    ROOT,
    CallerLike,
    FileHandle,
    Opened,
)
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.files.writeback import WriteBack
from aifs.meta import keys, namespace
from aifs.meta.kv import Transaction
from aifs.meta.records import APPEND_ONLY, IMMUTABLE, Inode
from aifs.reads.recording import StartRecordings
from aifs.reads.virtual.files import VirtualFiles
from aifs.saves.closing import Closing

_REMOVED = "another host has removed the file just before"

_ATIME = b"atime"
"""The key of a note."""

_LOOKED_AT_MAX = 64 << 20
"""Bytes among which an append of a daemon before is looked for."""

NEW_S = 0.1
"""close(2) of a file younger than this does not wait until other hosts see its contents, because
they may not know its name yet. So creating many small files never waits."""


class OpenFiles:
    """The operations on files that are open, or that open them."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        handles: Handles,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        closing: Closing,
        virtual: VirtualFiles,
    ) -> None:
        self._engine = services.engine
        self._quotas = services.quotas
        self.virtual = virtual
        self.recordings = StartRecordings(handles)
        """Starts of jobs that are being recorded."""
        self._tier = tier
        self._handles = handles
        self._io = io
        self._writeback = writeback
        self._drain = drain
        self.lent_opens = LentOpens(services.engine, io.table, io.capacity)
        """Opens of packed files that are not in core."""
        self.drain_on_fsync = services.config.burst.drain_on_fsync
        self._closing = closing
        self._kernel = services.kernel
        self._looked_up = services.looked_up
        self._options = services.options

    # --- open and close ---

    async def open(
        self, ino: int, flags: int, kill_privileges: bool = False, caller: CallerLike = ROOT
    ) -> Opened:
        """Opening for reading counts as access, since the kernel reads most pages without asking.
        Opening for writing ends file capabilities, since a passed-through write could not."""
        if ino >= FIRST_VIRTUAL:
            return await self.virtual.open(ino, flags, caller)
        writing = flags & os.O_ACCMODE != os.O_RDONLY
        if writing or flags & os.O_TRUNC:
            self._options.require_writable()
        elif not self.recordings.is_on and await self.lent_opens.open(ino, flags, caller.uid):
            return Opened(LENT_HERE)
        try:
            file = await self._io.inodes.acquire(ino)
        except NotFound as error:
            raise self._looked_up.outdated(error, _REMOVED) from None
        opening = 0
        try:
            if not (file.inode.nlink or file.users):
                await self._hold(ino)
            if file.home and not (writing or file.is_joined):
                await self._io.by_home.have_shown(file)
            if file.home or ino in self._io.table.overtaken:
                # It may have been closed there meanwhile.
                await self._io.by_home.follow_bytes(ino)
            if writing or flags & os.O_TRUNC:
                _require_may_open(file.inode, flags)
            if flags & os.O_TRUNC:
                await self._io.truncate(file, 0)
            if writing:
                await self._io.begin_writing(file)
                opening = 1
                taken = kill_privileges and file.inode.is_privileged
                if taken or await self._engine.view(_has_capabilities, ino):
                    await self._kill_privileges(file)
                self._closing.opened(ino)
            reads = not flags & os.O_WRONLY and not flags & os.O_NOATIME and not file.home
            if reads and self._accessed(file.inode):
                file.unsaved = True
                self._kernel.drop_attributes(ino)
            if self.recordings.is_on and not writing:
                await self.recordings.opened(file, caller.uid, ahead=bool(flags & AHEAD))
            opened = await self.add_handle(file, flags)
            file.opening -= opening
            return opened
        except BaseException:
            file.opening -= opening
            await self.give_up(file, written=writing)
            raise

    def set_atime(self, text: str) -> None:
        """Choose the rule by which opening a file is an access. Raises Invalid."""
        if text not in ATIMES:
            raise Invalid(f"{text!r} is none of {', '.join(ATIMES)}")
        self._options.atime = text
        self._kernel.kept.note(_ATIME, text.encode())
        self._io.table.recall_all()

    def set_again(self) -> None:
        """What was set while another daemon served the mount. Does not block."""
        if text := self._kernel.kept.notes.get(_ATIME):
            self.set_atime(text.decode())

    HINTS = (
        Hint(
            "atime",
            AT_ROOT,
            "noatime, relatime or strictatime: when opening for reading is an access",
            change=rights.root,
            set=lambda files, ask: files.set_atime(ask.text),
        ),
    )

    async def _hold(self, ino: int) -> None:
        """Hold a nameless file, which another host may have unlinked. Raises Stale if it erased it,
        too."""
        if not await self._engine.view(namespace.is_held, ino):
            self._io.table.orphans.add(ino)
            if not await self._engine.transact(namespace.put_holds, [ino]):
                raise Stale(_REMOVED)

    def _accessed(self, inode: Inode) -> bool:
        """Update atime by the mount's rule; whether it changed."""
        if time.time_ns() < self._options.access_due_ns(inode):  # it is cheap, and never behind
            return False
        inode.atime_ns = clock.kernel_ns(is_new=True)
        return True

    async def give_up(self, file: OpenInode, written: bool) -> None:
        """The last user without a kernel handle is done with the file, perhaps by an error: the
        file may be in the burst tier all the same."""
        with trio.CancelScope(shield=True):
            await self._io.inodes.release(file)
            await self._closed(file, written)

    async def add_handle(self, file: OpenInode, flags: int, is_new: bool = False) -> Opened:
        """Add a handle; ``is_new``: made with the file. The kernel syncs passed-through O_SYNC
        writes, not our records: so the file's name and mark are on stable storage before."""
        if file.copy is not None:
            self._tier.touch(file.copy.id)
        opened = await self._handles.add(file, flags, is_new)
        if file.inode.ino in self._io.table.stale:
            opened = opened._replace(stale=True)
        if opened.backing and self._handles[opened.handle].synchronous:
            try:
                await self._io.fsync(file)
            except BaseException:
                self._handles.remove(opened.handle)
                self._handles.removed(opened.handle)
                raise
        return opened

    async def flush(self, handle: int) -> None:
        """A descriptor of ``handle`` is being closed: with several hosts, the writes are where
        others find them on return."""
        opened = self._handles.find(handle)
        if opened is not None and opened.shared:
            await self._io.show(opened.file, _is_new(opened), opened.maps)

    def is_flushed(self, handle: int) -> bool:
        """Whether ``flush`` has nothing to do. Does not block."""
        opened = self._handles.find(handle)
        if opened is None or not opened.shared:
            return True
        return self._io.is_shown(opened.file, _is_new(opened), opened.maps)

    async def release(self, handle: int) -> None:
        """The last descriptor of ``handle`` is closed."""
        if self.virtual.has(handle):
            self.virtual.release(handle)
            return
        try:
            await self._take_back(handle)
        except BaseException:
            self._io.table.close_unseen(handle - LENT)  # nobody closes it once more
            raise
        opened = self._handles.remove(handle)
        self._kernel.kept.closing(handle, opened.opens)
        try:
            if opened.shared and not opened.file.is_joined:
                await self._io.show(opened.file, _is_new(opened))
            await self._io.inodes.release(opened.file)
            self._correct_attributes(opened.file)
            await self._closed(opened.file, opened.writable)
        finally:
            self._handles.removed(handle)

    async def _take_back(self, handle: int) -> None:
        """Bring the lent inode of this handle into core."""
        if handle >= LENT and not self._handles.has(handle):
            await self._io.inodes.release(await self._io.inodes.acquire(handle - LENT))

    async def _closed(self, file: OpenInode, written: bool) -> None:
        """The file was closed; ``written``: it may have been changed."""
        inode = file.inode
        copy = inode.copy
        if file.home:
            return
        if copy is not None and inode.in_burst and inode.nlink and not file.writers:
            self._tier.dirty(copy.id, copy.server, inode.space)
        if not inode.in_burst:
            # A tiny file that has become inline: nobody needs to wait for it.
            self._drain.gone(inode.ino)
        withheld = written and not file.writers and await self._closing.closed(inode)
        if inode.in_burst and inode.nlink and not file.writers and not withheld:
            self._drain.closed(inode)

    # --- bytes ---

    async def read(self, handle: int, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes, fewer only at the end of the file."""
        if self.virtual.has(handle):
            return await self.virtual.read(handle, offset, length)
        await self._take_back(handle)
        file = self._handles.readable(handle)
        if self.recordings.is_on:
            self.recordings.read(file.inode.ino, offset, length)
        return await self._io.read(file, offset, length)

    async def write(
        self,
        handle: int,
        offset: int,
        data: bytes | memoryview,
        kill_privileges: bool = False,
        appends: bool = False,
    ) -> int:
        """Write all of ``data`` at ``offset``.

        The kernel sees to O_APPEND, by the offset, and to O_SYNC, by a later fsync, except past its
        cache. ``appends``: with O_APPEND; with several hosts the kernel may mistake the end.
        """
        file = self._handles.writable(handle)
        if not appends:
            self._require_may_overwrite(file, offset)
        opened = self._handles[handle]
        appends = appends and opened.shared
        await self._before_change(file, kill_privileges)
        told, ino, size = self._io.table.told, file.inode.ino, file.inode.size
        is_direct = opened.direct
        with told.held(ino, size) if is_direct else nullcontext():
            try:
                if appends:
                    await self._append(file, data)
                else:
                    await self._io.write(file, offset, data)
                if file.on_object or file.uncached:
                    await self._sync_written(handle)
            finally:  # what fails may have written some of it
                is_misplaced = appends and offset + len(data) != file.inode.size
                if is_direct and (is_misplaced or file.cached):
                    await self._kernel.drop_pages([ino])
        if is_misplaced and not is_direct:
            # O_APPEND came by fcntl(2), and a page is locked until we answer.
            told.drop_pages_soon(ino, size)
        return len(data)

    async def _append(self, file: OpenInode, data: bytes | memoryview) -> None:
        """Unless a daemon before has done it, which what lies behind the end of then tells."""
        kept = self._kernel.kept
        if (begun := kept.repeated()) is not None:
            behind = await self._io.read(file, begun.handle, _LOOKED_AT_MAX)
            if bytes(data) in bytes(behind):
                return
        kept.appends(self._io.inodes.attributes(file).size)
        await self._io.append(file, data)

    def _require_may_overwrite(self, file: OpenInode, offset: int) -> None:
        """Raises NotPermitted for existing bytes of an append-only file, or maybe existing: its
        home knows the end. Programs that opened it before may write past us."""
        if file.inode.flags & APPEND_ONLY and (
            file.home or offset < self._io.inodes.attributes(file).size
        ):
            raise NotPermitted("the file is append-only (chattr)")

    async def _before_change(self, file: OpenInode, kill_privileges: bool) -> None:
        """Take privileges before bytes change: they never run with the owner's rights."""
        if file.inode.flags & IMMUTABLE:
            file.inode.require_unguarded()
        if kill_privileges and file.inode.is_privileged:
            await self._kill_privileges(file)

    async def _kill_privileges(self, file: OpenInode) -> None:
        file.adopt(await self._engine.transact(_kill_privileges, file.inode.ino))
        file.unsaved = True
        self._kernel.drop_attributes(file.inode.ino)

    async def fallocate(
        self, handle: int, mode: int, offset: int, length: int, caller: CallerLike = ROOT
    ) -> None:
        """fallocate(2): allocate, keep size, punch hole, zero range. Raises NotSupported, NoSpace.

        The kernel leaves set-id bits to us without the caller's rights: only root keeps them.
        """
        file = self._handles.writable(handle)
        if file.inode.flags & APPEND_ONLY and mode & ~ranges.KEEP_SIZE:
            raise NotPermitted("the file is append-only (chattr)")
        await self._before_change(file, caller.uid != 0)
        await ranges.fallocate(self._io, file, mode, offset, length)
        await self._sync_written(handle)

    async def lseek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE of lseek(2). Raises NoSuchAddress beyond the end."""
        if self.virtual.has(handle):
            return await self.virtual.seek(handle, offset, whence)
        await self._take_back(handle)
        return await ranges.seek(self._io, self._handles[handle].file, offset, whence)

    async def copy_file_range(
        self,
        handle_in: int,
        offset_in: int,
        handle_out: int,
        offset_out: int,
        length: int,
        caller: CallerLike = ROOT,
    ) -> int:
        """copy_file_range(2): the bytes copied; 0 at the end of the source. Set-id bits: as
        ``fallocate``. Raises NotSupported for a virtual source, which the kernel then reads."""
        if self.virtual.has(handle_in):
            raise NotSupported("it is no file on record")
        await self._take_back(handle_in)
        source, target = self._handles.readable(handle_in), self._handles.writable(handle_out)
        self._require_may_overwrite(target, offset_out)
        await self._before_change(target, caller.uid != 0)
        ino, size = target.inode.ino, target.inode.size
        with self._io.table.told.held(ino, size):
            try:
                copied = await ranges.copy(self._io, source, offset_in, target, offset_out, length)
            finally:
                if target.cached and target.inode.size > size:
                    await self._kernel.drop_pages([ino])
        await self._sync_written(handle_out)
        return copied

    async def _sync_written(self, handle: int) -> None:
        """The kernel syncs O_SYNC writes, except by these calls."""
        opened = self._handles[handle]
        if opened.synchronous:
            await self._io.fsync(opened.file)

    async def truncate(self, ino: int, size: int, handle: int | None = None) -> None:
        """truncate(2), or ftruncate(2) of the file that is open as ``handle``."""
        if handle is not None:
            await self._io.truncate(self._handles.writable(handle), size)
            return
        self._options.require_writable()
        async with self.changing(ino) as file:
            await self._io.truncate(file, size)

    @asynccontextmanager
    async def changing(self, ino: int) -> AsyncIterator[OpenInode]:
        """Change a file without a handle of the kernel; the end of the block is its close by a
        writer."""
        file = await self._io.inodes.acquire(ino)
        try:
            yield file
        finally:
            await self.give_up(file, written=True)

    # --- durability ---

    async def fsync(self, handle: int, datasync: bool = False) -> None:
        """Bring the file's bytes, size and name to stable storage. Raises Unavailable, NoSpace;
        QuotaExceeded, though it is done, if too much was written past us."""
        if self.virtual.has(handle):
            return
        await self._take_back(handle)
        file = self._handles[handle].file
        await self._io.fsync(file)
        self._correct_attributes(file)
        lacks_mirror = file.inode.ino in self._io.mirrors.lacking
        if (self.drain_on_fsync or lacks_mirror) and file.inode.in_burst and not file.home:
            self._drain.request([file.inode.ino])
        await self._quotas.require_within(file)

    def _correct_attributes(self, file: OpenInode) -> None:
        """Have the kernel ask anew for guessed attributes, or for changes it could not see."""
        if file.shown not in (None, (file.inode.mtime_ns, file.inode.blocks)):
            file.shown = None
            self._kernel.drop_attributes(file.inode.ino)

    async def sync(self) -> None:
        """Everything acknowledged is on stable storage when this returns."""
        await self._io.inodes.record_accesses()
        await self._io.inodes.save_all()
        await self._writeback.sync_all()
        await self._engine.barrier()


def _is_new(opened: FileHandle) -> bool:
    return trio.current_time() < opened.made_s + NEW_S


def _require_may_open(inode: Inode, flags: int) -> None:
    """Raises NotPermitted for opening to write."""
    if inode.flags & APPEND_ONLY and (not flags & os.O_APPEND or flags & os.O_TRUNC):
        raise NotPermitted("the file is append-only (chattr)")
    if inode.flags & IMMUTABLE:
        inode.require_unguarded()


_CAPABILITIES = b"security.capability"


def _has_capabilities(tx: Transaction, ino: int) -> bool:
    return tx.get(keys.xattr(ino, _CAPABILITIES)) is not None


def _kill_privileges(tx: Transaction, ino: int) -> Inode:
    """Clear setuid, setgid and file capabilities, as a write has to."""
    inode = namespace.get_inode(tx, ino)
    tx.delete(keys.xattr(ino, _CAPABILITIES))
    inode.mode = inode.unprivileged_mode
    inode.ctime_ns = clock.kernel_ns()
    namespace.put_inode(tx, inode)
    return inode
