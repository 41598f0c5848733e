"""Names: what a directory holds, and making, linking and removing it. How a name moves is
``publish``'s business.
"""

import os
import stat
import time

from aifs.core.errors import Invalid, NameTooLong, NotFound
from aifs.files.kernel import Kernel
from aifs.files.types import CallerLike, Opened
from aifs.layout.hint import Policy
from aifs.meta import namespace
from aifs.meta.records import Copy, Inode
from aifs.store.store import Store
from aifs.vfs.parts import Parts

_READDIR_BATCH = 32  # of the about 180 entries of one reply; the last batch is read in part in vain
_POLICIES_MAX = 1024


class Names(Parts):
    """The part of ``Filesystem`` that concerns names."""

    def __init__(self, store: Store, kernel: Kernel) -> None:
        super().__init__(store, kernel)
        self._engine = store.engine
        self._policies: dict[int, Policy | None] = {}
        self._policy_changes = 0  # so that what was read before a change is not kept after it
        self._orphans: set[int] = set()
        self._nameless: set[int] = set()  # those orphans that may still get a name

    async def lookup(self, parent: int, name: bytes) -> Inode:
        if self.trash.holds(parent):
            raise NotFound("the directory has been removed")
        return self._current(await self._engine.view(namespace.lookup, parent, name))

    async def create(
        self, parent: int, name: bytes | None, mode: int, flags: int, caller: CallerLike
    ) -> tuple[Opened, Inode]:
        """A new regular file, opened with ``flags``; without a name it is gone when it is closed
        unless ``link`` names it.
        """
        await self.io.find_room()
        ino, copy = await self.ids.take(), None
        if flags & os.O_ACCMODE:
            copy = await self.io.burst.new_copy(await self._policy_of(parent))
        # Others may find the name, and open or remove the file, before we hear that it exists.
        with self.io.opening(ino):
            try:
                place = None if copy is None else copy.place
                inode = await self._create(
                    ino, parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller, copy=place
                )
            except BaseException:
                if copy is not None:
                    self.tier.discard(copy)
                raise
            file = self.io.adopt_new(inode, copy)
        if name is None:
            self._orphans.add(inode.ino)
            self._nameless.add(inode.ino)
        try:
            opened = await self._add_handle(file, flags)
            file.opening -= 1
            return opened, inode
        except BaseException:
            file.opening -= 1
            await self._give_up(file, written=True)
            raise

    async def _policy_of(self, directory: int) -> Policy | None:
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

    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, caller: CallerLike
    ) -> Inode:
        """A regular file, fifo, socket or device node."""
        if stat.S_IFMT(mode) in (stat.S_IFDIR, stat.S_IFLNK):
            raise Invalid("mknod makes neither directories nor symlinks")
        mode = mode if stat.S_IFMT(mode) else mode | stat.S_IFREG
        return await self._create(await self.ids.take(), parent, name, mode, caller, rdev)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: CallerLike) -> Inode:
        mode = stat.S_IFDIR | stat.S_IMODE(mode)
        return await self._create(await self.ids.take(), parent, name, mode, caller)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: CallerLike) -> Inode:
        if len(target) > namespace.SYMLINK_MAX:
            raise NameTooLong()
        mode = stat.S_IFLNK | 0o777
        return await self._create(await self.ids.take(), parent, name, mode, caller, data=target)

    async def _create(
        self,
        ino: int,
        parent: int,
        name: bytes | None,
        mode: int,
        caller: CallerLike,
        rdev: int = 0,
        data: bytes | None = None,
        copy: Copy | None = None,
    ) -> Inode:
        now, size = time.time_ns(), len(data or b"")
        new = Inode(
            ino, mode, caller.uid, caller.gid, 1, rdev, size, 0, now, now, now, data=data, copy=copy
        )
        if name is None:
            return await self._engine.transact(namespace.create_nameless, parent, new, caller.umask)
        return await self._engine.transact(namespace.create, parent, name, new, caller.umask)

    async def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        cookie = await self.ids.take()
        nameless = ino in self._nameless
        if nameless:  # it is no orphan from the commit on, unless somebody unlinks it again
            self._nameless.discard(ino)
            self._orphans.discard(ino)
        try:
            linked = await self._engine.transact(
                namespace.link, ino, new_parent, new_name, cookie, time.time_ns(), nameless
            )
        except BaseException:
            if nameless:
                self._nameless.add(ino)
                self._orphans.add(ino)
            raise
        return self._adopt(linked)

    async def unlink(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.unlink, parent, name, time.time_ns()))

    async def rmdir(self, parent: int, name: bytes) -> None:
        self._unlinked(await self._engine.transact(namespace.rmdir, parent, name, time.time_ns()))

    async def readlink(self, ino: int) -> bytes:
        inode = await self._engine.view(namespace.get_inode, ino)
        if not stat.S_ISLNK(inode.mode):
            raise Invalid("not a symlink")
        return inode.data or b""

    def forget(self, inos: list[int]) -> None:
        """The kernel has dropped these inodes; those without a name are removed once they are
        closed.
        """
        for ino in self._orphans.intersection(inos):
            self._orphans.discard(ino)
            self._nameless.discard(ino)
            self.io.forget(ino)

    def _unlinked(self, inode: Inode) -> None:
        self._adopt(inode)
        if inode.nlink == 0:
            self._orphans.add(inode.ino)
            self.drain.gone(inode.ino)
            self.groups.gone(inode.ino)
            file = self.io.open.get(inode.ino)
            if file is not None:
                file.cancel_lease()

    async def readdir(self, ino: int, cookie: int) -> list[tuple[bytes, Inode, int]]:
        """The next entries behind ``cookie`` (0: the first) as (name, inode, cookie); [] at the
        end.

        An entry that exists during the whole listing appears exactly once, whatever else changes. A
        directory that has been removed, which some process may still be in, has none.
        """
        if self.trash.holds(ino):
            return []
        entries = await self._engine.view(namespace.list_directory, ino, cookie, _READDIR_BATCH)
        if not self.io.open:
            return entries
        return [(name, self._current(inode), place) for name, inode, place in entries]

    async def fsyncdir(self, ino: int) -> None:
        """The directory's names are on stable storage when this returns."""
        await self._engine.barrier()

    # --- inodes as they are now ---

    def _current(self, inode: Inode) -> Inode:
        """The inode as it is in core, if it is open."""
        file = self.io.open.get(inode.ino)
        return inode if file is None else self.io.attributes(file)

    def _adopt(self, inode: Inode) -> Inode:
        """As ``_current``, after a transaction that changed the record."""
        file = self.io.adopt(inode)
        return inode if file is None else self.io.attributes(file)
