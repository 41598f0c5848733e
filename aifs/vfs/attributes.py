"""The attributes of inodes: stat(2), setattr(2), chattr's flags, statfs(2)."""

import stat
from collections.abc import Callable
from typing import Any, NamedTuple

from aifs.core import clock
from aifs.core.errors import AccessDenied, NotPermitted, NotSupported
from aifs.core.names import NAME_MAX
from aifs.core.upkeep import Work
from aifs.files import rights
from aifs.files.asks import DIRECTORY, Hint
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.types import BLOCK_SIZE, CallerLike, SetAttr, StatFs
from aifs.files.virtual import FIRST as FIRST_VIRTUAL
from aifs.files.virtual import require_on_record
from aifs.meta import acl, keys, namespace
from aifs.meta.kv import ReadTransaction, Transaction
from aifs.meta.quotas import FIRST_PROJECT
from aifs.meta.records import (
    APPEND_ONLY,
    IMMUTABLE,
    INHERITS_PROJECT,
    SNAPSHOT,
    TRASHED,
    Inode,
)
from aifs.vfs.open_files import OpenFiles


class Attributes:
    """All inodes of a mount."""

    def __init__(
        self,
        services: Services,
        io: FileIO,
        files: OpenFiles,
    ) -> None:
        self._engine = services.engine
        self._upkeep = services.upkeep
        self._quotas = services.quotas
        self._virtual = files.virtual
        self._servers = services.servers
        self._io = io
        self._files = files
        self._heirlooms = services.heirlooms

    async def getattr(self, ino: int) -> Inode:
        """The inode as it is now: in core, if it is open, else on record. Raises NotFound."""
        await self._engine.sure()
        if ino >= FIRST_VIRTUAL:
            return await self._virtual.getattr(ino)
        await self._io.table.told.settled(ino)
        if self._io.table.is_mapped(ino):
            return await self._io.inodes.look(ino)
        file = self._io.table.open.get(ino)
        if file is not None:
            if file.is_joined:
                await self._io.by_home.look_at_home(file)
                await self._io.table.told.settled(ino)
            return self._io.inodes.attributes(file)
        return self._io.inodes.current(await self._engine.view(namespace.get_inode, ino))

    HINTS = (
        Hint(
            "shown",
            DIRECTORY,
            "when a publish or a rename has shown it as a whole: seconds since 1970",
            rights.reader,
            get=lambda attributes, ask: attributes.shown(ask.ino),
        ),
    )

    async def shown(self, ino: int) -> str:
        """When a directory was shown as a whole, in seconds since the epoch; ''."""
        shown_ns = (await self.getattr(ino)).shown_ns
        seconds, rest = divmod(shown_ns, 10**9)
        return f"{seconds}.{rest:09}" if shown_ns else ""

    async def setattr(
        self, ino: int, changes: SetAttr, caller: CallerLike, handle: int | None = None
    ) -> Inode:
        """Change attributes; ``size`` truncates or extends. The kernel checks rights. Raises
        ReadOnly for virtual files."""
        require_on_record(ino)
        if changes.size is not None:
            (await self.getattr(ino)).require_unguarded()
            await self._files.truncate(ino, changes.size, handle)
        if changes.mtime_ns is not None:
            await self._io.by_home.set_mtime_at_home(ino, changes.mtime_ns)
        inode = await self.change(ino, apply_changes, changes, mtime_ns=changes.mtime_ns)
        if (changes.mode, changes.uid, changes.gid) != (None, None, None):
            await self._engine.shown()
        return inode

    async def set_flags(self, ino: int, flags: int, project: int) -> None:
        """chattr(1): ``flags`` as in records.py. The kernel checks rights. Raises NotSupported,
        ReadOnly."""
        require_on_record(ino)
        if flags & (IMMUTABLE | APPEND_ONLY):
            await self._engine.transact(Transaction.add, keys.COUNTER_GUARDED, 1)
        await self.change(ino, apply_flags, (flags, project))
        await self._engine.shown()

    async def change(
        self,
        ino: int,
        change: Callable[[Inode, Any], None],
        argument: Any,
        mtime_ns: int | None = None,
    ) -> Inode:
        """Apply and record a repeatable ``change(inode, argument)``, which may raise. ``mtime_ns``:
        the mtime that it sets."""
        inode = await self._io.inodes.change(ino, change, argument, mtime_ns)
        self._heirlooms.changed(ino)
        return inode

    async def statfs(self, ino: int = keys.ROOT_INO) -> StatFs:
        """Space of the data servers, each device once; inodes are limited by space alone. Below a
        quota, the tightest one counts, as with XFS. As last seen: at most 10 s ago, 1 s if asked
        lately."""
        if self._servers.look_soon():
            self._upkeep.wake(Work.WATCH_SERVERS)
        space = self._servers.statfs()
        inodes = await self._engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        total, free, room = (
            size // BLOCK_SIZE for size in (space.total, space.free, space.available)
        )
        all_inodes, free_inodes = inodes + room, room
        project = 0 if ino >= FIRST_VIRTUAL else (await self.getattr(ino)).project
        of_bytes, of_inodes = await self._quotas.tightest(project)
        if of_bytes is not None:
            total = of_bytes.quota.bytes_max // BLOCK_SIZE
            free = max(0, of_bytes.bytes) // BLOCK_SIZE
            room = min(room, free)
        if of_inodes is not None:
            all_inodes, free_inodes = of_inodes.quota.inodes_max, max(0, of_inodes.inodes)
        return StatFs(BLOCK_SIZE, total, free, room, all_inodes, free_inodes, NAME_MAX)


# --- changes, as functions that may be repeated ---------------------------------------------------


class AclChange(NamedTuple):
    """An ACL by the name of its attribute, and its new value, empty to remove it. ``kill_setgid``:
    the caller could not set that bit, so it must not remain."""

    name: bytes
    value: bytes
    kill_setgid: bool = False


def apply_changes(inode: Inode, changes: SetAttr) -> None:
    """Apply all ``changes`` except the size. As on Linux, a change of owner takes privileges
    away."""
    inode.require_unguarded()
    if changes.mode is not None:
        inode.mode = stat.S_IFMT(inode.mode) | stat.S_IMODE(changes.mode)
        if inode.acl:
            inode.acl = acl.after_chmod(inode.acl, inode.mode)
    elif changes.kill_privileges or changes.uid is not None or changes.gid is not None:
        inode.mode = inode.unprivileged_mode
    if changes.uid is not None:
        inode.uid = changes.uid
    if changes.gid is not None:
        inode.gid = changes.gid
    if changes.atime_ns is not None:
        inode.atime_ns = changes.atime_ns
    if changes.mtime_ns is not None:
        inode.mtime_ns = changes.mtime_ns
    inode.ctime_ns = changes.ctime_ns if changes.ctime_ns is not None else clock.kernel_ns()


def apply_acl(inode: Inode, change: AclChange) -> None:
    """Change mode and ACLs, as setfacl(1) does."""
    inode.require_unguarded()
    before = inode.mode, inode.acl, inode.default_acl
    if change.name == acl.DEFAULT:
        if change.value and not inode.is_dir:
            raise AccessDenied("only a directory has a default ACL")
        if change.value:
            acl.decode(change.value)
        inode.default_acl = change.value
    elif not change.value:
        inode.acl = b""
    else:
        inode.mode, inode.acl = acl.applied(change.value, inode.mode)
        if change.kill_setgid:
            inode.mode &= ~stat.S_ISGID
    if before != (inode.mode, inode.acl, inode.default_acl):
        inode.ctime_ns = clock.kernel_ns()


def apply_flags(inode: Inode, change: tuple[int, int]) -> None:
    """Change flags and project, as chattr(1) does. Raises NotSupported, NotPermitted, ReadOnly."""
    flags, project = change
    if inode.flags & SNAPSHOT:
        inode.require_unguarded()
    known = IMMUTABLE | APPEND_ONLY | (INHERITS_PROJECT if inode.is_dir else 0)
    if flags & ~known:
        raise NotSupported("there are the flags i, a and, of directories, P")
    before = inode.project, inode.flags & INHERITS_PROJECT
    if before != (project, flags & INHERITS_PROJECT) and max(project, before[0]) >= FIRST_PROJECT:
        raise NotPermitted("its project is that of a quota, which root sets and removes")
    inode.flags, inode.project = inode.flags & TRASHED | flags, project
    inode.ctime_ns = clock.kernel_ns()
