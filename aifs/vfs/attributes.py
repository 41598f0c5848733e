"""The attributes of inodes: what stat(2) tells and setattr(2) changes, chattr's flags, the policy
that new files of a directory inherit, and what statfs(2) tells of the whole."""

from collections.abc import Callable
from typing import Any

from aifs.data.servers import Servers
from aifs.files.file_io import FileIO
from aifs.files.types import BLOCK_SIZE, CallerLike, SetAttr, StatFs
from aifs.layout.hint import Policy
from aifs.meta import keys, namespace
from aifs.meta.kv import Engine, ReadTransaction, Transaction
from aifs.meta.records import APPEND_ONLY, IMMUTABLE, Inode
from aifs.vfs import attribute_changes
from aifs.vfs.open_files import OpenFiles
from aifs.vfs.virtual.files import VirtualFiles
from aifs.vfs.virtual.numbers import FIRST as FIRST_VIRTUAL
from aifs.vfs.virtual.numbers import require_on_record

_POLICIES_MAX = 1024


class Attributes:
    """All inodes of a mount."""

    def __init__(
        self,
        engine: Engine,
        servers: Servers,
        io: FileIO,
        files: OpenFiles,
        virtual: VirtualFiles,
    ) -> None:
        self._engine = engine
        self._virtual = virtual
        self._servers = servers
        self._io = io
        self._files = files
        self._policies: dict[int, Policy | None] = {}
        self._policy_changes = 0  # so that what was read before a change is not kept after it

    async def getattr(self, ino: int) -> Inode:
        """The inode as it is now: in core, if it is open, else on record. Raises NotFound."""
        await self._engine.sure()
        if ino >= FIRST_VIRTUAL:
            return await self._virtual.getattr(ino)
        file = self._io.table.open.get(ino)
        if file is not None:
            if file.is_joined:
                await self._io.by_home.look_at_home(file)
            return self._io.inodes.attributes(file)
        return self._io.inodes.current(await self._engine.view(namespace.get_inode, ino))

    async def setattr(
        self, ino: int, changes: SetAttr, caller: CallerLike, handle: int | None = None
    ) -> Inode:
        """Change attributes; ``size`` truncates or extends. Who may is the kernel's decision.
        Raises ReadOnly for what is virtual.
        """
        require_on_record(ino)
        if changes.size is not None:
            (await self.getattr(ino)).require_unguarded()
            await self._files.truncate(ino, changes.size, handle)
        if changes.mtime_ns is not None and self._engine.host:
            await self._io.by_home.set_mtime_at_home(ino, changes.mtime_ns)
        inode = await self.change(
            ino, attribute_changes.apply_changes, changes, mtime_ns=changes.mtime_ns
        )
        if (changes.mode, changes.uid, changes.gid) != (None, None, None):
            await self._engine.shown()
        return inode

    async def set_flags(self, ino: int, flags: int, project: int) -> None:
        """chattr(1): ``flags`` as in records.py. Who may is the kernel's decision. Raises
        NotSupported, ReadOnly for what is virtual.
        """
        require_on_record(ino)
        if flags & (IMMUTABLE | APPEND_ONLY):
            await self._engine.transact(Transaction.add, keys.COUNTER_GUARDED, 1)
        await self.change(ino, attribute_changes.apply_flags, (flags, project))
        await self._engine.shown()

    async def change(
        self,
        ino: int,
        change: Callable[[Inode, Any], None],
        argument: Any,
        mtime_ns: int | None = None,
    ) -> Inode:
        """Apply ``change(inode, argument)``, which may raise and must be repeatable, and record the
        result. ``mtime_ns``: that it sets, if it does.
        """
        inode = await self._io.inodes.change(ino, change, argument, mtime_ns)
        self.policy_changed(ino)
        return inode

    def policy_changed(self, ino: int) -> None:
        """The record of ``ino`` is another one now."""
        self._policies.pop(ino, None)
        self._policy_changes += 1

    async def policy_of(self, directory: int) -> Policy | None:
        """What new files of a directory inherit. Raises NotFound."""
        try:
            return self._policies[directory]
        except KeyError:
            if len(self._policies) >= _POLICIES_MAX:
                self._policies.clear()
            changes = self._policy_changes
            policy = (await self._engine.view(namespace.get_inode, directory)).policy
            if changes == self._policy_changes:
                self._policies[directory] = policy
            return policy

    async def statfs(self) -> StatFs:
        """Space of the data servers, each device counted once; inodes are limited by space
        alone.
        """
        space = await self._servers.statfs()
        inodes = await self._engine.view(ReadTransaction.counter, keys.COUNTER_INODES)
        total, free, room = (
            size // BLOCK_SIZE for size in (space.total, space.free, space.available)
        )
        return StatFs(BLOCK_SIZE, total, free, room, inodes + room, room, namespace.NAME_MAX)
