"""The FUSE edge: each handler turns one request into one call of the filesystem, and back.

Nothing is decided here. Errors pass one choke point (``answers``): an exception in pyfuse3 would
end the mount. The kernel checks permissions (default_permissions).
"""

import errno
import functools
import inspect
import logging
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    ReaddirToken,
    RequestContext,
    SetattrFields,
)

from aifs.core import waiting
from aifs.core.config import KernelConfig
from aifs.core.errors import FsError, NoAttribute, NotFound
from aifs.core.waiting import Activity
from aifs.files.kept import Done
from aifs.files.types import LENT, LENT_HERE, Opened, SetAttr
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.fuse.bridge import HANDLE_BITS, PREFERRED_IO
from aifs.fuse.kept import RESENT, KeptMount
from aifs.fuse.requests import Scheduler
from aifs.meta import acl
from aifs.meta.records import Inode
from aifs.vfs import operation_log
from aifs.vfs.filesystem import Filesystem
from aifs.vfs.operation_log import Request

log = logging.getLogger(__name__)

NAMELESS = b"/"
"""The name that the bridge has the kernel create for O_TMPFILE; no file can be called so."""

LAST_DOT = 2
"""The place of ``..``. ``.`` is at 1, and the entry with ``cookie`` at ``cookie + 1``."""

LONG_NS = round(operation_log.LONG_S * 1e9)

Handler = TypeVar("Handler", bound=Callable[..., Awaitable[Any]])


def answers(handler: Handler) -> Handler:
    """Answer an FsError with its errno; log another exception, and answer EIO. Also count requests
    in progress, for background work to yield, and record times. Each request is an activity with
    waits (core/waiting.py); the operation log keeps it if read, or if it is long."""
    operation = handler.__name__
    parameters = [*inspect.signature(handler).parameters][1:]
    names_caller = "ctx" in parameters or "caller" in parameters
    moves_bytes = operation in ("read", "write")
    describe = functools.partial(asked, operation, parameters if names_caller else None)
    begin, clock_ns = waiting.begin, time.perf_counter_ns

    @functools.wraps(handler)
    async def answer(self: Any, *args: Any) -> Any:
        scheduler, noted = self._scheduler, self._fs.operation_log
        scheduler.waiting_requests += 1
        begin_ns = clock_ns()
        told = args if names_caller else (self.last_request(), *args)  # before anything is awaited
        activity = Activity(describe, told, begin_ns)
        again = None
        if self.kept is not None:
            activity.unique = unique = self.unique()
            again = self.kept.done(unique) if unique & RESENT else None
        begin(activity)
        number, missing, moved = errno.EINTR, 0, 0  # unless it ends in another way
        try:
            if again is None:
                answered = await handler(self, *args)
            else:
                answered = await self.answer_again(operation, handler, args, again)
            number = 0
            if moves_bytes or noted.is_on:
                missing, moved = outcome(operation, answered)
            return answered
        except FsError as error:
            number = error.errno
            raise FUSEError(number) from None
        except Exception:
            number = errno.EIO
            log.exception("%s failed; answered with EIO", operation)
            raise FUSEError(number) from None
        finally:
            scheduler.waiting_requests -= 1
            duration_ns = clock_ns() - begin_ns
            self._fs.served[operation].add(duration_ns, number, moved)
            if activity.has_waited or noted.is_on or duration_ns >= LONG_NS:
                noted.ended(activity, duration_ns, number or missing, moved)
            activity.args = None

    return answer  # type: ignore[return-value]


def asked(operation: str, parameters: Sequence[str] | None, *args: Any) -> Request | None:
    """A request for the operation log, by its arguments' names and values. Without names the first
    is inode, uid and pid. None if it reads the log."""
    if parameters is None:
        ino, uid, pid = args[0]
        return Request(operation, ino, uid=uid, pid=pid)
    arguments = dict(zip(parameters, args, strict=True))
    name: bytes = arguments.get("name", b"")
    caller: Any = arguments.get("ctx", arguments.get("caller"))
    ino = next((arguments[key] for key in ("ino", "parent", "nodeid") if key in arguments), 0)
    uid, pid = caller.uid, caller.pid
    if "parent" in arguments:
        return Request(operation, ino, name, b"", uid, pid)
    if name.startswith((b"user.aifs.trace", b"user.aifs.why")):
        return None
    return Request(operation, ino, b"", name, uid, pid)


def outcome(operation: str, answered: Any) -> tuple[int, int]:
    """The errno that an answer means, and how many bytes of a file."""
    if operation == "read":
        return 0, len(answered)
    if operation == "write":
        return 0, answered
    is_missing = operation == "lookup" and answered.st_ino == 0  # which the kernel keeps
    return errno.ENOENT if is_missing else 0, 0


def fill(entry: EntryAttributes, inode: Inode) -> EntryAttributes:
    """Copy the attributes of ``inode`` to ``entry``, and return it."""
    entry.st_ino = inode.ino
    entry.st_mode = inode.mode
    entry.st_nlink = inode.links
    entry.st_uid = inode.uid
    entry.st_gid = inode.gid
    entry.st_rdev = inode.rdev
    entry.st_size = inode.size
    entry.st_blocks = inode.blocks
    entry.st_atime_ns = inode.atime_ns
    entry.st_mtime_ns = inode.mtime_ns
    entry.st_ctime_ns = inode.ctime_ns
    return entry


def file_info(opened: Opened) -> FileInfo:
    """The reply to an open; keeps the kernel's pages, unless another host has changed the file."""
    return FileInfo(
        opened.backing << HANDLE_BITS | opened.handle,
        direct_io=opened.direct,
        keep_cache=not opened.stale,
    )


def _kept_time(time_ns: int) -> int:
    """The nearest time for an inode: years 1677 to 2262; ext4 cuts times, too."""
    return max(-(1 << 63), min(time_ns, (1 << 63) - 1))


def changes(attr: EntryAttributes, fields: SetattrFields, kill_privileges: bool) -> SetAttr:
    """The changes of a SETATTR request."""
    return SetAttr(
        mode=attr.st_mode if fields.update_mode else None,
        uid=attr.st_uid if fields.update_uid else None,
        gid=attr.st_gid if fields.update_gid else None,
        size=attr.st_size if fields.update_size else None,
        atime_ns=_kept_time(attr.st_atime_ns) if fields.update_atime else None,
        mtime_ns=_kept_time(attr.st_mtime_ns) if fields.update_mtime else None,
        ctime_ns=_kept_time(attr.st_ctime_ns) if fields.update_ctime else None,
        kill_privileges=kill_privileges,
    )


class Operations(pyfuse3.Operations):
    """pyfuse3's handlers over one open Filesystem.

    Called before a handler awaits: ``kill_privileges()``, whether the request has to clear set-id
    bits; ``appends()``, whether it is a write with O_APPEND, or setxattr with XATTR_CREATE;
    ``last_request()``, its inode, uid and pid. ``note_acl(ino)`` comes before the kernel hears of
    an inode with an ACL. ``synchronous``: a mount with the option sync.
    """

    enable_acl = True
    supports_dot_lookup = True  # the kernel finds what a file handle names (open_by_handle_at(2))

    def __init__(
        self,
        fs: Filesystem,
        kernel: KernelConfig,
        scheduler: Scheduler,
        kill_privileges: Callable[[], bool],
        note_acl: Callable[[int], None],
        last_request: Callable[[], tuple[int, int, int]],
        appends: Callable[[], bool],
        synchronous: bool = False,
    ) -> None:
        super().__init__()
        self._flags = os.O_SYNC if synchronous else 0
        self._fs = fs
        kept = fs.kernel.kept
        self.kept = kept if isinstance(kept, KeptMount) else None
        """What outlives this daemon, if anything does."""
        self._kernel = kernel
        self._scheduler = scheduler
        self._kill_privileges = kill_privileges
        self._note_acl = note_acl
        self.last_request = last_request
        self._appends = appends
        self._negative = EntryAttributes()
        self._negative.entry_timeout = kernel.negative_timeout_s
        self._unkept = EntryAttributes()
        self._unkept.entry_timeout = 0

    def unique(self) -> int:
        """The kernel's number of the request that is about to be answered."""
        return 0 if self.kept is None else self.kept.unique()

    async def answer_again(self, operation: str, handler: Any, args: Any, done: Done) -> Any:
        """The answer to a request that an earlier daemon did, repeated by the kernel without that
        answer."""
        assert self.kept is not None
        match operation, args:
            case (("unlink" | "rmdir" | "removexattr"), _):
                await self._fs.store.engine.shown()
                return None
            case "getxattr", _ if self._appends():  # pyfuse3 asks: the attribute is not to be there
                raise NoAttribute
            case "rename", _:
                await self._fs.store.engine.barrier()
                await self._fs.store.engine.shown()
                return None
            case (("mknod" | "mkdir" | "symlink"), (parent, name, *_, ctx)):
                return self._entry(await self._fs.lookup(parent, name, ctx), parent, name)
            case "link", (_, parent, name, ctx):
                return self._entry(await self._fs.lookup(parent, name, ctx), parent, name)
            case "open", _ if self._fs.handles.has(done.handle):
                return file_info(self._opened(done.handle))
            case "create", (parent, name, _, flags, ctx):
                opened = self._fs.handles.find(done.handle)
                if opened is not None:
                    inode = self._fs.io.inodes.attributes(opened.file)
                    return file_info(self._opened(done.handle)), self._entry(inode, parent, name)
                if name != NAMELESS:
                    inode = await self._fs.lookup(parent, name, ctx)
                    flags &= ~(os.O_CREAT | os.O_EXCL | os.O_TRUNC)
                    reopened = await self._fs.open(inode.ino, flags | self._flags, False, ctx)
                    return file_info(reopened), self._entry(inode, parent, name)
            case "release", (handle,) if self.kept.was_closed(self.kept.unique(), handle):
                return None
        return await handler(self, *args)

    def _opened(self, handle: int) -> Opened:
        """A handle that programs are to get."""
        kept = self._fs.handles[handle]
        if handle >= LENT:
            return Opened(LENT_HERE)
        return Opened(handle, kept.file.backing, kept.direct)

    def _blank(self) -> EntryAttributes:
        entry = EntryAttributes()
        entry.entry_timeout = self._kernel.entry_timeout_s
        entry.attr_timeout = self._kernel.attr_timeout_s
        entry.st_blksize = PREFERRED_IO
        return entry

    def _attributes(self, inode: Inode) -> EntryAttributes:
        return self._fill(self._blank(), inode)

    def _entry(self, inode: Inode, parent: int, name: bytes) -> EntryAttributes:
        entry = self._attributes(inode)
        if inode.ino >= FIRST_VIRTUAL or not self._fs.keeps_name(parent, name):
            entry.entry_timeout = 0
        return entry

    def _fill(self, entry: EntryAttributes, inode: Inode) -> EntryAttributes:
        if inode.acl or inode.default_acl:
            self._note_acl(inode.ino)
        fill(entry, inode).st_size = self._fs.told_size(inode)
        is_kept = entry.st_size == inode.size and not self._fs.changes_unseen(inode.ino)
        entry.attr_timeout = self._kernel.attr_timeout_s if is_kept else 0
        return entry

    # names

    @answers
    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        try:
            inode = await self._fs.lookup(parent, name, ctx)
        except NotFound:
            is_kept = self._fs.keeps_name(parent, name) and parent < FIRST_VIRTUAL
            return self._negative if is_kept else self._unkept
        return self._entry(inode, parent, name)

    @answers
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        what = None if name == NAMELESS else name
        opened, inode = await self._fs.create(parent, what, mode, flags | self._flags, ctx)
        return file_info(opened), self._entry(inode, parent, name)

    @answers
    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        inode = await self._fs.mknod(parent, name, mode, rdev, ctx)
        return self._entry(inode, parent, name)

    @answers
    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._fs.mkdir(parent, name, mode, ctx), parent, name)

    @answers
    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._fs.symlink(parent, name, target, ctx), parent, name)

    @answers
    async def readlink(self, ino: int, ctx: RequestContext) -> bytes:
        return await self._fs.readlink(ino)

    @answers
    async def link(
        self, ino: int, new_parent: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        inode = await self._fs.link(ino, new_parent, new_name)
        return self._entry(inode, new_parent, new_name)

    @answers
    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        await self._fs.unlink(parent, name, ctx)

    @answers
    async def rmdir(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        await self._fs.rmdir(parent, name, ctx)

    @answers
    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        await self._fs.rename(parent, name, new_parent, new_name, flags, ctx)

    @answers
    async def forget(self, inodes: Sequence[tuple[int, int]]) -> None:
        self._fs.forget([ino for ino, _ in inodes])

    # attributes

    @answers
    async def getattr(self, ino: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(await self._fs.getattr(ino))

    @answers
    async def setattr(
        self,
        ino: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        handle: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        asked = changes(attr, fields, self._kill_privileges())
        return self._attributes(await self._fs.setattr(ino, asked, ctx, handle))

    @answers
    async def getxattr(self, ino: int, name: bytes, ctx: RequestContext) -> bytes:
        return await self._fs.getxattr(ino, name, ctx)

    @answers
    async def setxattr(self, ino: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        if name in (acl.ACCESS, acl.DEFAULT):
            self._note_acl(ino)
        await self._fs.setxattr(ino, name, value, caller=ctx)  # pyfuse3 has seen to the flags

    @answers
    async def listxattr(self, ino: int, ctx: RequestContext) -> Sequence[bytes]:
        return await self._fs.listxattr(ino, ctx)

    @answers
    async def removexattr(self, ino: int, name: bytes, ctx: RequestContext) -> None:
        await self._fs.removexattr(ino, name, ctx)

    @answers
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        stats, reply = await self._fs.statfs(), pyfuse3.StatvfsData()
        reply.f_bsize = reply.f_frsize = stats.block_size
        reply.f_blocks, reply.f_bfree, reply.f_bavail = stats.blocks, stats.free, stats.available
        reply.f_files = stats.files
        reply.f_ffree = stats.files_free
        reply.f_favail = stats.files_free
        reply.f_namemax = stats.name_max
        return reply

    # files

    @answers
    async def open(self, ino: int, flags: int, ctx: RequestContext) -> FileInfo:
        owed = self._kill_privileges()
        return file_info(await self._fs.open(ino, flags | self._flags, owed, ctx))

    @answers
    async def read(self, handle: int, offset: int, length: int) -> Any:
        return await self._fs.read(handle, offset, length)

    @answers
    async def write(self, handle: int, offset: int, data: bytes) -> int:
        owed, appends = self._kill_privileges(), self._appends()
        return await self._fs.write(handle, offset, data, owed, appends)

    # No flush: a write leaves nothing to do for close(2). The bridge says so for each open file;
    # without it the kernel asks once, is told ENOSYS, and saves a round trip per close from then
    # on.

    @answers
    async def release(self, handle: int) -> None:
        await self._fs.release(handle)

    @answers
    async def fsync(self, handle: int, datasync: bool) -> None:
        await self._fs.fsync(handle, datasync)

    # directories: the handle is the inode number, also when the kernel does not ask for one

    @answers
    async def opendir(self, ino: int, ctx: RequestContext) -> int:
        return ino

    @answers
    async def readdir(self, handle: int, cookie: int, token: ReaddirToken) -> None:
        # The rest of a batch is not kept for the next request when the reply is full: the kernel
        # caches the names and attributes of a reply as those of the time when it asked.
        entry = self._blank()
        if cookie < LAST_DOT:
            directory = await self._fs.getattr(handle)
            for place, name in enumerate((b".", b".."), 1):
                fill(entry, directory)
                if name == b"..":
                    entry.st_ino = directory.parent or directory.ino
                if place > cookie and not pyfuse3.readdir_reply(token, name, entry, place):
                    return
            cookie = LAST_DOT
        while batch := await self._fs.readdir(handle, cookie - 1):
            for name, inode, next_cookie in batch:
                cookie = next_cookie + 1
                kept = self._fs.keeps_name(handle, name)
                entry.entry_timeout = self._kernel.entry_timeout_s if kept else 0
                if not pyfuse3.readdir_reply(token, name, self._fill(entry, inode), cookie):
                    return

    @answers
    async def releasedir(self, handle: int) -> None:
        pass

    @answers
    async def fsyncdir(self, handle: int, datasync: bool) -> None:
        await self._fs.fsyncdir(handle)
