"""Files whose newest bytes are one local file in the burst tier, and how files get there.

While such a file is open, programs may write to its copy without our knowing (passthrough), so the
copy says what size, blocks and mtime are; the dirty mark says so in the store. What a crash leaves
at each step: docs/burst.md.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

from aifs.burst.copy import BurstCopy
from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.files.collector import Collector
from aifs.files.needs import Needs
from aifs.files.open_inode import Drain, OpenInode
from aifs.layout.hint import DEFAULT_POLICY, Policy
from aifs.meta import forms
from aifs.meta.kv import Engine

_log = logger(__name__)

_ENTERED = faults.declare(
    "vfs.burst.entered", "the burst copy is the file now, what it replaces is garbage"
)
_SYNCED = faults.declare(
    "vfs.burst.synced", "a burst copy is synced, the dirty mark is not removed yet"
)

_UNKNOWN = 0  # OpenInode.copy_mtime_ns of a copy that has not been looked at


class Stager(Protocol):
    """What this module needs of staging."""

    async def stage(self, ino: int) -> bool:
        """Copy a file from the capacity tier into the burst tier; whether it has a copy now."""

    def read(self, file: OpenInode) -> None:
        """Somebody begins to read a file that has no copy: the policy may be to stage it in the
        background.
        """


class BurstIO:
    """Changes of files in the burst tier. Callers hold the file's gate where the method says so."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tier: BurstTier,
        collector: Collector,
        needs: Needs,
        save: Callable[[OpenInode], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._collector = collector
        self._inline_limit = config.layout.inline_limit
        self._stage_for_write = config.burst.stage_for_write
        self._save = save
        self.stager: Stager | None = None
        self._needs = needs

    # --- how a file gets here ---

    async def new_copy(self, policy: Policy | None) -> BurstCopy | None:
        """An empty copy for a file that begins now; None if it has to go straight to the data
        servers.
        """
        if not self._tier.has_devices:
            return None
        await self._tier.throttle()
        policy = policy or DEFAULT_POLICY
        device = self._tier.admit(policy.tier, policy.expected)
        if device is None:
            return None
        try:
            return await self._tier.create(device, policy.expected)
        except FsError as error:
            _log.info("a new file goes to the data servers: %s", error)
            return None

    async def enter(self, file: OpenInode, end: int) -> None:
        """Someone is going to write, up to ``end``: have the file in the burst tier if it can be,
        and marked.

        An empty file gets a new copy, a small one and one with a clean copy becomes that copy. What
        is left where it is will be changed in place; so are inline bytes that stay few. The gate is
        held alone.
        """
        inode = file.inode
        if file.on_object:  # programs read that, so it stays the file, and is changed
            if file.copy is not None:
                await self._drop_copy(file)
            return
        if inode.in_burst:
            if not file.dirty:
                await self._engine.transact(forms.put_changing, inode)
                file.dirty, file.unsaved, file.marked_seq = True, False, self._engine.seq
            return
        if file.copy is not None:
            try:
                await self._prepare_cached(file)
            except FsError as error:
                if file.backing or await self._needs.find({file.copy.id: inode.ino}):
                    raise
                _log.warning("inode %d: its cached copy is dropped: %s", inode.ino, error)
                await self._drop_copy(file)
        if file.copy is not None or await self._make_copy(file, end):
            await self._become_copy(file)

    async def leave_capacity(self, file: OpenInode) -> None:
        """A clean file whose copy is known to be right is that copy alone from now on. The gate is
        held alone.

        Raises NoSpace, Unavailable, and nothing is changed then.
        """
        await self._prepare_cached(file)
        await self._become_copy(file)

    async def _prepare_cached(self, file: OpenInode) -> None:
        """A cached copy is going to be the file: what it replaces is durable, and will be
        deleted.
        """
        await file.copy.set_mtime(file.inode.mtime_ns)  # opening is no change yet
        await file.copy.sync()

    async def _drop_copy(self, file: OpenInode) -> None:
        """The capacity tier has the file; its copy does not work."""
        copy_id = await self._engine.transact(forms.put_without_copy, file.inode.ino, file.copy.id)
        file.inode.copy = None
        self._let_go(file, copy_id)

    async def _make_copy(self, file: OpenInode, end: int) -> bool:
        inode = file.inode
        if inode.layout is None:
            if inode.data and end <= self._inline_limit:
                return False
            copy = await self.new_copy(inode.policy)
            if copy is None:
                return False
            try:
                if inode.data:
                    await copy.write(0, inode.data)
                if inode.size:
                    await copy.truncate(inode.size)
                await copy.set_mtime(inode.mtime_ns)
                if inode.size:
                    await copy.sync()  # what it replaces is durable, and will be deleted
            except BaseException as error:
                self._tier.discard(copy)
                if not isinstance(error, FsError):
                    raise
                _log.info("inode %d stays on the capacity tier: %s", inode.ino, error)
                return False
            self.attach(file, copy)
            return True
        # Else it would lose its protection, or could not be changed at all.
        objects = inode.objects
        must = objects is not None and (objects.is_protected or self._tier.is_needed_for(objects))
        if (inode.size <= self._stage_for_write or must) and self.stager is not None:
            if await self.stager.stage(inode.ino) and file.copy is not None:
                await self._prepare_cached(file)
                return True
        return False

    async def _become_copy(self, file: OpenInode) -> None:
        """The copy holds all that the file holds; from here on it is the file."""
        inode, copy = file.inode, file.copy
        assert copy is not None
        now, place, was_cached = time.time_ns(), copy.place, inode.copy is not None
        try:
            garbage = await self._engine.transact(
                forms.put_in_burst, inode, place, inode.size > 0, now
            )
        except BaseException:
            if inode.copy is None:
                file.copy = None
                self._tier.discard(copy)
            raise
        for oid in garbage:
            self._collector.add_garbage(oid)
        if file.objects is not None:
            file.objects.close()
        inode.layout, inode.data, inode.copy, file.objects = None, None, place, None
        file.dirty, file.unsaved, file.marked_seq = True, False, self._engine.seq
        file.copy_mtime_ns = inode.mtime_ns
        self.look(file)
        self._tier.dirty(copy.id, copy.server, inode.space)
        faults.reach(_ENTERED)
        if was_cached:
            await (
                self._engine.barrier()
            )  # or a power cut may bring back a record that takes it for a cache (B6)

    def adopt_new(self, file: OpenInode, copy: BurstCopy) -> None:
        """The file has just been created with its copy."""
        file.copy, file.dirty = copy, True
        # That we ask makes the kernel give the next change another time, however soon it comes.
        file.copy_mtime_ns = copy.stat().st_mtime_ns
        self._tier.begun(copy)
        self._pin(file)

    def attach(self, file: OpenInode, copy: BurstCopy) -> None:
        """The open file has this copy; also in the middle of its being open."""
        file.copy = copy
        self._tier.opened(copy)
        self._pin(file)

    def _pin(self, file: OpenInode) -> None:
        policy = file.inode.policy
        if policy is not None and policy.tier == "pinned":
            self._tier.pinned(file.copy.id, True)

    def detach(self, file: OpenInode) -> None:
        """The file is not open any more. Does not block."""
        copy, file.copy = file.copy, None
        if copy is not None:
            self._tier.closed(copy)
            copy.close()

    async def become_inline(self, file: OpenInode) -> None:
        """A tiny file has been closed: its bytes go to its record, unless a mapping may still
        change them.

        That is its drain, for less than what waiting for one costs. The gate is held alone.
        """
        inode, copy = file.inode, file.copy
        await copy.release_writers()
        if inode.size and not copy.lease():  # of an empty file a mapping can change nothing
            return
        try:
            data = bytes(await copy.read(0, inode.size)) if inode.size else None
            if file.handles:
                return  # it is being opened again
            after = replace(inode, data=data, copy=None, blocks=(inode.size + 511) // 512)
            copy_id = await self._engine.transact(forms.put_inline, after, copy.place)
        finally:
            copy.unlease()  # or the next writer would wait for it
        inode.data, inode.copy, inode.blocks = data, None, after.blocks
        file.dirty = file.unsaved = False
        self._let_go(file, copy_id)

    def _let_go(self, file: OpenInode, copy_id: int) -> None:
        """The record of the file has given up its copy."""
        self.detach(file)
        self._tier.evicted(copy_id)
        self._collector.add_garbage(copy_id)

    async def settle(self, file: OpenInode) -> bool:
        """Whether nobody can write to the copy of a closed file at present. The gate is held alone.

        If a program has synced it after its last change, the dirty mark goes, too: so a rename need
        not look at it.
        """
        copy = file.copy
        await copy.release_writers()
        if not copy.lease():
            return False
        synced = file.synced_mtime_ns == file.copy_mtime_ns
        try:
            if synced:
                await copy.sync()  # next to nothing: what was written in the same tick of the clock
        finally:
            quiet = copy.unlease()
        if quiet and synced:
            if file.unsaved:
                await self._save(file)
            await self._engine.transact(forms.remove_dirty, (file.inode.ino,))
            file.dirty = False
        return quiet

    # --- attributes ---

    def look(self, file: OpenInode) -> None:
        """Take size, blocks and mtime over from the copy, which may have been written past us."""
        inode, status = file.inode, file.copy.stat()
        if status.st_mtime_ns != file.copy_mtime_ns:
            told_ns, file.copy_mtime_ns = (
                self._told_mtime(file, status.st_mtime_ns),
                status.st_mtime_ns,
            )
            if told_ns != inode.mtime_ns:
                inode.mtime_ns, inode.ctime_ns = told_ns, max(inode.ctime_ns + 1, told_ns)
                file.unsaved = True
                if file.backing and inode.is_privileged:
                    # Nobody can tell who has written, so this is done to everybody.
                    inode.mode, inode.stripped = inode.unprivileged_mode, True
        if status.st_size != inode.size or status.st_blocks != inode.blocks:
            inode.size, inode.blocks = status.st_size, status.st_blocks
            file.unsaved = True

    def _told_mtime(self, file: OpenInode, found_ns: int) -> int:
        """The file's mtime, now that the copy has another one.

        The clock of file times lags behind ours, so a later change may seem to be earlier than one
        that we have noted.
        """
        noted_ns = file.inode.mtime_ns
        if file.copy_mtime_ns == noted_ns:
            return found_ns
        return max(found_ns, noted_ns + (file.copy_mtime_ns != _UNKNOWN))

    async def set_mtime(self, file: OpenInode, mtime_ns: int) -> None:
        """Have the copy tell this mtime."""
        await file.copy.set_mtime(mtime_ns)
        file.copy_mtime_ns = file.inode.mtime_ns = mtime_ns

    # --- bytes (by way of the daemon) ---

    async def read(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """``length`` bytes, which lie below the size. A cached copy that fails is passed over.
        Raises Unavailable.
        """
        copy, inode = file.copy, file.inode
        try:
            data = await copy.read(offset, length)
            if len(data) == length or file.dirty:
                return data
            raise Unavailable(
                f"inode {inode.ino}: its burst copy ends at byte {offset + len(data)} of {inode.size}"
            )
        except Unavailable as error:
            if inode.in_burst or file.copy is not copy:
                raise
            _log.info("inode %d is read from the capacity tier: %s", inode.ino, error)
        if file.objects is None:
            return inode.data[offset : offset + length]
        return await file.objects.read(offset, length, inode.size, True)

    async def write(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        """All of ``data``; it is in the page cache on return. The gate is held, shared, and
        ``enter`` has been called.
        """
        await file.copy.write(offset, data)
        file.inode.size = max(file.inode.size, offset + len(data))
        file.changed(time.time_ns())

    async def truncate(self, file: OpenInode, size: int) -> None:
        """The gate is held alone, and ``enter`` has been called."""
        if size < file.inode.size:
            await self._engine.barrier(
                file.marked_seq
            )  # the record must not promise more bytes than there are (I6)
        await file.copy.truncate(size)
        file.changed(time.time_ns())
        file.inode.size = size
        self.look(file)

    # --- durability ---

    async def sync(self, file: OpenInode) -> None:
        """Bytes, size and name are on stable storage when this returns. Raises NoSpace,
        Unavailable.

        The dirty mark goes if it is proved that nobody has written meanwhile, be it through a
        mapping.
        """
        copy, changes = file.copy, file.changes
        await copy.ensure_open()
        guard = None if file.writers or not file.dirty else await self._guard(file)
        try:
            self.look(file)
            if file.unsaved:
                await self._save(file)
            seen_mtime_ns = file.copy_mtime_ns
            await run_all(copy.sync, self._engine.barrier)
            file.synced_mtime_ns = seen_mtime_ns
            faults.reach(_SYNCED)
            if file.copy is not copy or not file.inode.in_burst:
                return
            if guard is not None and file.drain is guard and file.changes == changes:
                await self._engine.transact(forms.remove_dirty, (file.inode.ino,))
                file.dirty = False
            elif file.dirty and not file.copy_is_durable:
                await self._engine.transact(forms.put_durable, copy.id)
                file.copy_is_durable = True
        finally:
            if isinstance(guard, Guard) and file.drain is guard:
                file.cancel_drain()

    async def _guard(self, file: OpenInode) -> Drain | None:
        """The proof that nobody writes, as long as it is ``file.drain``; a drain that is under way
        is one.
        """
        if (
            file.drain is None and file.gate.is_free
        ):  # else a truncation may be using our writing descriptor
            await file.copy.release_writers()
            if file.drain is None and file.gate.is_free and not file.writers and file.copy.lease():
                file.drain = Guard(file.copy)
        return file.drain


class Guard:
    """A lease on a burst copy while it is being synced."""

    def __init__(self, copy: BurstCopy) -> None:
        self._copy = copy

    def cancel(self) -> None:
        """See Drain."""
        self._copy.unlease()
