"""Names: what a directory holds, and making, linking and removing it (moving: ``publish``)."""

import os
import stat
from collections.abc import Collection, Sequence
from contextlib import suppress

from aifs.burst.tier import BurstTier
from aifs.core import clock
from aifs.core.errors import Exists, FsError, Invalid, NameTooLong, NotFound
from aifs.core.names import VIRTUAL
from aifs.files import rights, virtual
from aifs.files.asks import DIRECTORY, Hint, HintCall
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.forecast import kin_of
from aifs.files.looked_up import if_looked_up
from aifs.files.services import Services
from aifs.files.types import ROOT, CallerLike, Opened
from aifs.meta import namespace
from aifs.meta.listing import Listing, list_directory
from aifs.meta.records import Copy, Inode, decode_inode
from aifs.saves.closing import Closing
from aifs.upkeep.doomed import DoomedTrees
from aifs.vfs.open_files import OpenFiles

_READDIR_BATCH = 32  # where nobody says how many a reply holds
_AHEAD_MAX = 8  # listings that are read ahead


class Names:
    """The operations on names, but for rename."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        drain: Drain,
        closing: Closing,
        doomed: DoomedTrees,
        files: OpenFiles,
    ) -> None:
        self._engine = services.engine
        self._quotas = services.quotas
        self._virtual = files.virtual
        self._recordings = files.recordings
        self._ids = services.ids
        self._tier = tier
        self._io = io
        self._drain = drain
        self._closing = closing
        self._doomed = doomed
        self._rules = doomed.rules
        self._kernel = services.kernel
        self._files = files
        self._heirlooms = services.heirlooms
        self._options = services.options
        self._looked_up = services.looked_up
        self._nameless: set[int] = set()
        """Those orphans that may still get a name."""
        self._ahead: dict[tuple[int, int, int], Listing] = {}
        """Parts of directories that are likely to be asked for, by (ino, cookie, limit)."""

    async def lookup(self, parent: int, name: bytes, caller: CallerLike = ROOT) -> Inode:
        """The kernel checks rights, except of virtual files; names on record come first. With
        several hosts it raises Stale as ``LookedUp.require_shown`` does."""
        if self._doomed.holds(parent):
            raise NotFound("the directory has been removed")
        self._looked_up.asked((parent, name))
        try:
            inode = await self._engine.view(namespace.lookup, parent, name)
            self._looked_up.require_shown((parent, name), caller.pid)
            if self._recordings.is_on:
                self._recordings.found(parent, name, inode)
            self._files.lent_opens.found(parent, name, inode.ino)
            return self._io.inodes.current(inode)
        except NotFound:
            if parent < virtual.FIRST and name != VIRTUAL:
                raise
        return await self._virtual.lookup(parent, name, caller)

    def lookup_at_once(self, parent: int, name: bytes) -> tuple[int, bytes] | None:
        """As ``lookup``, without suspending: the inode number and the record. None if another host
        has to be asked, or the record alone does not answer it."""
        if self._doomed.holds(parent) or self._recordings.is_on or name in (b".", b".."):
            return None
        with suppress(FsError):
            found = self._engine.view_at_once(namespace.find_records, parent, name)
            if found is not None and self._io.inodes.is_on_record(found[0]):
                self._files.lent_opens.found(parent, name, found[0])
                return found
        return None

    async def create(
        self, parent: int, name: bytes | None, mode: int, flags: int, caller: CallerLike
    ) -> tuple[Opened, Inode]:
        """Create a regular file, opened with ``flags``; nameless, it is gone when closed unless
        ``link`` names it. Raises Exists; with several hosts, without O_EXCL, Stale if another one
        has just made the name: the kernel then looks it up anew, and opens the file. All that make
        or remove names raise ReadOnly for virtual ones."""
        virtual.require_on_record(parent)
        await self._io.inodes.find_room()
        ino, copy, kin = await self._ids.take(), None, None
        if flags & os.O_ACCMODE:
            policy = (await self._heirlooms.of(parent)).policy
            expected = 0 if policy is None else policy.expected
            kin = None if name is None else kin_of(parent, name)
            # Where there are several hosts, what can be read has a home from its beginning on.
            needs_home = flags & os.O_RDWR and not self._io.burst.keeps_inline
            if kin is None or needs_home or not self._io.inodes.forecast.is_tiny(kin, expected):
                copy = await self._io.burst.new_copy(policy)
        # Others may find the name, and open or remove the file, before we hear that it exists.
        self._io.table.begin_opening(ino)
        try:
            try:
                place = None if copy is None else copy.place
                inode = await self._create(
                    ino, parent, name, stat.S_IFREG | stat.S_IMODE(mode), caller, copy=place
                )
            except BaseException as error:
                if copy is not None:
                    self._tier.discard(copy)
                if isinstance(error, Exists) and not flags & os.O_EXCL:
                    why = "another host has made the file just before"
                    raise self._looked_up.outdated(error, why) from None
                raise
            file = self._io.inodes.adopt_new(inode, copy, kin)
        finally:
            self._io.table.end_opening(ino)
        if name is None:
            self._io.table.orphans.add(inode.ino)
            self._nameless.add(inode.ino)
        try:
            opened = await self._files.add_handle(file, flags, is_new=True)
            file.opening -= 1
            return opened, inode
        except BaseException:
            file.opening -= 1
            await self._files.give_up(file, written=True)
            raise

    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, caller: CallerLike
    ) -> Inode:
        """A regular file, fifo, socket or device node."""
        virtual.require_on_record(parent)
        if stat.S_IFMT(mode) in (stat.S_IFDIR, stat.S_IFLNK):
            raise Invalid("mknod makes neither directories nor symlinks")
        mode = mode if stat.S_IFMT(mode) else mode | stat.S_IFREG
        return await self._create(await self._ids.take(), parent, name, mode, caller, rdev)

    async def mkdir(self, parent: int, name: bytes, mode: int, caller: CallerLike) -> Inode:
        virtual.require_on_record(parent)
        ino, mode = await self._ids.take(), stat.S_IFDIR | stat.S_IMODE(mode)
        self._kernel.begin_directory(ino)
        return await self._create(ino, parent, name, mode, caller)

    async def symlink(self, parent: int, name: bytes, target: bytes, caller: CallerLike) -> Inode:
        virtual.require_on_record(parent)
        if len(target) > namespace.SYMLINK_MAX:
            raise NameTooLong()
        mode = stat.S_IFLNK | 0o777
        return await self._create(await self._ids.take(), parent, name, mode, caller, data=target)

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
        self._looked_up.changed_here(parent)
        now, size = clock.kernel_ns(is_new=True), len(data or b"")
        new = Inode(
            ino, mode, caller.uid, caller.gid, 1, rdev, size, 0, now, now, now, data=data, copy=copy
        )
        if not self._quotas.are_set:
            return await self._record(parent, name, new, caller)
        project = (await self._heirlooms.of(parent)).project
        if not project:
            return await self._record(parent, name, new, caller)
        async with self._quotas.granted(project, 0, inodes=1):
            return await self._record(parent, name, new, caller)

    async def _record(
        self, parent: int, name: bytes | None, new: Inode, caller: CallerLike
    ) -> Inode:
        if name is None:
            return await self._engine.transact(namespace.create_nameless, parent, new, caller.umask)
        return await self._engine.transact(namespace.create, parent, name, new, caller.umask)

    async def link(self, ino: int, new_parent: int, new_name: bytes) -> Inode:
        """Another name for a file, or the first one of a file that was created without."""
        virtual.require_on_record(ino)
        virtual.require_on_record(new_parent)
        self._looked_up.changed_here(new_parent)
        cookie = await self._ids.take()
        nameless = ino in self._nameless
        if nameless:  # it is no orphan from the commit on, unless somebody unlinks it again
            self._nameless.discard(ino)
            self._io.table.orphans.discard(ino)
        try:
            linked = await self._engine.transact(
                namespace.link, ino, new_parent, new_name, cookie, clock.kernel_ns(), nameless
            )
        except BaseException:
            if nameless:
                self._nameless.add(ino)
                self._io.table.orphans.add(ino)
            raise
        inode = self.adopt(linked)
        if inode.nlink == 1:  # it may have been closed, as what nobody would see again
            async with self._files.changing(ino):
                pass
        return inode

    async def unlink(self, parent: int, name: bytes, caller: CallerLike | None = None) -> None:
        """Remove a name, as ``caller``, to its trash if there is one."""
        self._looked_up.changed_here(parent)
        now, by = clock.kernel_ns(), self._rules.remover(caller)
        try:
            self.unlinked(await self._engine.transact(namespace.unlink, parent, name, now, by))
        except NotFound:
            virtual.require_missing(parent, name)
            raise
        await self._engine.shown()

    async def rmdir(self, parent: int, name: bytes, caller: CallerLike | None = None) -> None:
        """``unlink`` of a directory. With several hosts it raises Stale if another one has just
        changed the name: the kernel then looks it up anew, once."""
        self._looked_up.changed_here(parent)
        try:
            known = await self._looked_up.of((parent, name))
            now, by = clock.kernel_ns(), self._rules.remover(caller)
            self.unlinked(
                await self._engine.transact(
                    if_looked_up, known, namespace.rmdir, parent, name, now, by
                )
            )
        except NotFound:
            virtual.require_missing(parent, name)
            raise
        await self._engine.shown()

    async def remove_tree(
        self, parent: int, name: bytes, caller: CallerLike = ROOT, locked: bool = False
    ) -> None:
        """Remove a directory with its tree, or put it in its trash, at constant cost
        (upkeep/doomed.py).

        Not checked by the kernel: callers must be able to remove the name, and own the directory.
        The kernel forgets the name before the return; soon, if it holds the parent's lock
        (``locked``). Raises NotFound, NotADirectory, AccessDenied, NotPermitted, ReadOnly.
        """
        self._options.require_writable()
        if self._kernel.kept.repeated() is None:
            await self._doomed.doom(parent, name, caller)
        if locked:
            self._kernel.drop_name_soon(parent, name)
        else:
            await self._kernel.forget_names([(parent, name)])
        await self._engine.shown()

    HINTS = (
        Hint(
            "remove",
            DIRECTORY,
            "the name of a directory in it, to be removed with all that lies below",
            change=rights.writer,  # and permissions.require_may_remove_tree
            set=lambda names, ask: names.remove_tree(ask.ino, ask.value, ask.caller, locked=True),
            call=HintCall(
                rights.anybody,  # except for permissions.require_may_remove_tree
                lambda names, ask: names.remove_tree(ask.ino, ask.path("name"), ask.caller),
                {"name": str},
                "Removes that directory in it with all that lies below. Returns at once; space "
                "comes back in the background. ENOTDIR, ENOENT, EACCES, EPERM as rmdir(2); EPERM "
                "also unless the caller owns the directory that is removed.",
            ),
        ),
    )

    async def readlink(self, ino: int) -> bytes:
        inode = await self._engine.view(namespace.get_inode, ino)
        if not stat.S_ISLNK(inode.mode):
            raise Invalid("not a symlink")
        return inode.data or b""

    def forget(self, inos: list[int]) -> None:
        """The kernel has dropped these inodes: nameless ones are removed once closed."""
        for ino in self._io.table.orphans.intersection(inos):
            self._io.table.orphans.discard(ino)
            self._nameless.discard(ino)
            self._io.table.forget(ino)

    def keep(self, orphans: Collection[int]) -> None:
        """Keep nameless inodes that the kernel may know from a former daemon of the mount."""
        self._io.table.orphans.update(orphans)
        self._nameless.update(orphans)  # it lets nobody name those that must not be

    async def forget_unknown(self) -> None:
        """Those of them that the kernel does not know are forgotten."""
        for ino in list(self._io.table.orphans):
            if not self._io.table.is_open(ino) and not await self._kernel.is_known(ino):
                self.forget([ino])

    def forget_all(self) -> None:
        """The kernel has gone, and has dropped all inodes."""
        self.forget(list(self._io.table.orphans))

    def unlinked(self, inode: Inode) -> None:
        """A transaction has taken a name away, perhaps the last one."""
        self.adopt(inode)
        if inode.is_trashed:  # its bytes are looked after as before
            if inode.is_dir:
                self._closing.gone(inode.ino)
        elif inode.nlink == 0:
            self._io.table.orphans.add(inode.ino)
            self._gone(inode.ino)

    def _gone(self, ino: int) -> None:
        self._drain.gone(ino)
        self._closing.gone(ino)
        file = self._io.table.open.get(ino)
        if file is not None:
            file.cancel_lease()

    def unlinked_elsewhere(self, inode: Inode, is_open: bool) -> None:
        """Another host has removed an inode's last name. ``is_open``: here, so the kernel knows
        it."""
        if is_open:
            self._io.table.orphans.add(inode.ino)
        self._gone(inode.ino)

    def erased(self, ino: int) -> None:
        """Another host has erased an inode that nobody can find."""
        self._io.table.orphans.discard(ino)
        self._nameless.discard(ino)
        self._io.table.unsynced.pop(ino, None)
        self._gone(ino)

    async def readdir(self, ino: int, cookie: int, limit: int = _READDIR_BATCH) -> Listing:
        """The next entries behind ``cookie`` (0: the first), up to ``limit``; none at the end.

        An entry that exists during the whole listing appears exactly once. A removed directory has
        none.
        """
        await self._engine.sure()
        listing = self._ahead.pop((ino, cookie, limit), None)
        if self._doomed.holds(ino):
            return Listing([], [], self._engine.seq)
        if listing is None or listing.seq != self._engine.seq:
            listing = await self._engine.view(list_directory, ino, cookie, limit)
        inos, table = listing.inos, self._io.table
        opened, told = table.open, table.told
        for place, child in self._changing_unseen(inos):
            with suppress(FsError):
                if table.is_mapped(child):
                    listing.inodes[place] = (await self._io.inodes.look(child)).encode()
        # From here on nothing else runs until the kernel is told.
        listing.unkept = {place for place, _ in self._changing_unseen(inos)}
        listing.is_last = len(listing) < limit and listing.seq == self._engine.seq
        if opened and not opened.keys().isdisjoint(inos):
            for place, child in enumerate(inos):
                file = opened.get(child)
                if file is not None:
                    listing.inodes[place] = self._io.inodes.attributes(file).encode()
        if not told.inos.isdisjoint(inos):
            for place, child in enumerate(inos):
                if child in told.inos:
                    inode = decode_inode(child, listing.inodes[place])
                    size = told.size(inode, is_listed=True)
                    listing.inodes[place] = inode.but(size=size).encode()
        return listing

    def _changing_unseen(self, inos: Sequence[int]) -> list[tuple[int, int]]:
        """Of these inodes those that may change unseen by the kernel, with their places."""
        table = self._io.table
        if table.open.keys().isdisjoint(inos) and table.mapped.isdisjoint(inos):
            return []
        return [each for each in enumerate(inos) if table.changes_unseen(each[1])]

    async def read_ahead(self, ino: int, cookie: int, limit: int) -> None:
        """Read ahead for ``readdir`` while kernel and program are busy, unless the program has seen
        enough. After any change of records it is read again. The caller gets errors."""
        with suppress(Exception):
            listing = await self._engine.view(list_directory, ino, cookie, limit)
            self._ahead[ino, cookie, limit] = listing
            if len(self._ahead) > _AHEAD_MAX:
                del self._ahead[next(iter(self._ahead))]

    async def fsyncdir(self, ino: int) -> None:
        """The directory's names are on stable storage when this returns."""
        await self._engine.barrier()

    # --- inodes as they are now ---

    def adopt(self, inode: Inode) -> Inode:
        """As ``OpenInodes.current``, after a transaction that changed the record."""
        file = self._io.table.adopt(inode)
        return inode if file is None else self._io.inodes.attributes(file)
