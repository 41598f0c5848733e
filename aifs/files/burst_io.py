"""Files whose newest bytes are one local file in the burst tier, and how files get there.

While such a file is open, programs may write to its copy without our knowing (passthrough), so its
size, blocks and mtime come from the copy. Crash points: docs/design/burst.md.
"""

from aifs.burst.copy import BurstCopy
from aifs.burst.tier import BurstTier
from aifs.core import clock, faults
from aifs.core.config import Config
from aifs.core.errors import FsError, Unavailable
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.files.damage import Needs
from aifs.files.open_inode import Lease, OpenInode
from aifs.files.transitions import Flip, Transitions, alone
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


class BurstIO:
    """Changes of files in the burst tier. Callers hold the file's gate where the method says so."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        tier: BurstTier,
        transitions: Transitions,
        needs: Needs,
    ) -> None:
        self._engine = engine
        self._tier = tier
        self._transitions = transitions
        self._inline_limit = config.layout.inline_limit
        self.keeps_inline = not engine.host
        """Whether a tiny file stays in its record: not with several hosts, where one is its
        home."""
        self._needs = needs

    # --- how a file gets here ---

    async def new_copy(self, policy: Policy | None, must: bool = False) -> BurstCopy | None:
        """An empty copy for a file that begins now; None if it has to go straight to the data
        servers. ``must``: it cannot, so an error is raised, and None means that there is no room.
        """
        if not self._tier.has_devices:
            return None
        await self._tier.throttle()
        policy = policy or DEFAULT_POLICY
        expected = 0 if must else policy.expected
        device = self._tier.admit(policy.tier, expected, must)
        if device is None:
            return None
        try:
            return await self._tier.create(device, expected)
        except FsError as error:
            if must:
                raise
            _log.info("a new file goes to the data servers: %s", error)
            return None

    async def enter(self, file: OpenInode, end: int, must: bool = False) -> bool:
        """Bring the file to the burst tier for a write up to ``end``, if it can be, with its mark.

        An empty file gets a new copy; a clean copy becomes the file. Other files are changed in
        place; so are inline bytes that stay few. ``must``: they are changed nowhere else. The gate
        is held alone. False: its clean copy did not work and is dropped, so the file has to be
        brought again.
        """
        inode = file.inode
        if file.on_object:  # programs read that, so it stays the file, and is changed
            return True
        if inode.in_burst:
            if not file.marked:
                await file.own_copy.ensure_open()  # no mark on what cannot be changed
                await self._transitions.mark(file)
            return True
        if file.copy is not None:
            try:
                await self._prepare_cached(file)
            except FsError as error:
                if file.backing or await self._needs.find({file.copy.id: inode.ino}):
                    raise
                _log.warning("inode %d: its cached copy is dropped: %s", inode.ino, error)
                await self._drop_copy(file)
                return False
            await self._become_copy(file, None)
        elif inode.layout is None and not (
            inode.data and end <= self._inline_limit and self.keeps_inline
        ):
            await self._take_copy(file, must)
        return True

    async def take_source(self, file: OpenInode) -> None:
        """Make the blocks that programs are passed through to, or have mapped, the file, so that
        all see the change. Other files stay as they are. The gate is held alone. Raises Busy,
        NoSpace, Unavailable."""
        inode = file.inode
        is_used = self._tier.blocks.is_used
        if not (file.on_source or (file.copy is None and await is_used(file.own_source))):
            return
        copy = await self._tier.take_source(inode.oid)
        try:
            await copy.ensure_open()
            copy.written()
            await copy.set_mtime(inode.mtime_ns)  # opening is no change yet
            await copy.sync()  # what it replaces is durable, and will be deleted
            await self._become_copy(file, copy)
        except BaseException:
            if file.copy is not copy:
                self._tier.discard(copy)
            raise

    async def leave_capacity(self, file: OpenInode) -> None:
        """Make a right clean copy all of the file, durably. The gate is held alone. Raises NoSpace,
        Unavailable."""
        await self._prepare_cached(file)
        await self._become_copy(file, None)

    async def _prepare_cached(self, file: OpenInode) -> None:
        await file.own_copy.set_mtime(file.inode.mtime_ns)  # opening is no change yet
        await file.own_copy.sync()

    async def drop_clean(self, file: OpenInode) -> bool:
        """Drop the clean copy, if no program uses it and it is not needed; whether none is left.
        The gate is held alone. Raises NoSpace, Unavailable."""
        if file.copy is None or file.home or file.inode.in_burst:
            return True
        if file.backing or await self._needs.find({file.copy.id: file.inode.ino}):
            return False
        await self._drop_copy(file)
        return True

    async def _drop_copy(self, file: OpenInode) -> None:
        await self._transitions.reduce(Flip(file, {"copy": None}, {"marked": file.marked}))

    async def _take_copy(self, file: OpenInode, must: bool) -> None:
        """Give an empty or inline file a new copy, if there is room. Until the flip the copy needs
        no garbage record: its id is in the newest window (I7)."""
        inode, data = file.inode, file.inode.data
        copy = await self.new_copy(inode.policy, must)
        if copy is None:
            return
        try:
            if data:
                await copy.write(0, data)
            await copy.set_mtime(inode.mtime_ns)
            if data:
                await copy.sync()  # what it replaces is durable, and will be deleted
        except BaseException as error:
            self._tier.discard(copy)
            if must or not isinstance(error, FsError):
                raise
            _log.info("inode %d stays on the capacity tier: %s", inode.ino, error)
            return
        try:
            await self._become_copy(file, copy)
        except BaseException:
            if file.copy is not copy:
                self._tier.discard(copy)
            raise

    async def _become_copy(self, file: OpenInode, new: BurstCopy | None) -> None:
        inode, copy = file.inode, new or file.own_copy
        form = {"layout": None, "data": None, "copy": copy.place}
        flip = Flip(file, form, {"marked": True, "durable": inode.size > 0}, copy=new)
        await self._transitions.flip([flip])
        file.copy_mtime_ns = inode.mtime_ns
        self.look(file)
        faults.reach(_ENTERED)
        if new is None:
            # Or a power cut may bring back a record that takes it for a cache (B6).
            await self._engine.barrier()

    async def become_inline(self, file: OpenInode) -> None:
        """Move a closed tiny file into its record, unless a mapping may still change it.

        This is its drain, for less than waiting for one costs. The gate is held alone.
        """
        inode, copy = file.inode, file.own_copy
        await copy.release_writers()
        if inode.size and not copy.lease():  # of an empty file a mapping can change nothing
            return
        try:
            data = bytes(await copy.read(0, inode.size)) if inode.size else None
            if file.handles:
                return  # it is being opened again
            form = {"data": data, "copy": None, "blocks": (inode.size + 511) // 512}
            await self._transitions.flip([Flip(file, form)])
        finally:
            copy.unlease()  # or the next writer would wait for it

    async def settle(self, file: OpenInode) -> bool:
        """Whether nobody can write to the copy of a closed file. The gate is held alone.

        If a program has synced it after its last change, the dirty mark goes, too.
        """
        copy = file.own_copy
        await copy.release_writers()
        if not copy.lease():
            return False
        synced = file.synced_mtime_ns == file.copy_mtime_ns and not file.has_lost
        try:
            if synced:
                await copy.sync()  # next to nothing: what was written in the same tick of the clock
        finally:
            quiet = copy.unlease()
        if quiet and synced:
            if file.unsaved:
                await self._transitions.save(file)
            await self._transitions.unmark(file)
        return quiet

    # --- attributes ---

    def look(self, file: OpenInode, mapped: bool = False) -> None:
        """Take size, blocks and mtime over from the copy, which may have been written past us.

        ``mapped``: show the file to other hosts again, if a mapping could have written to it since.
        """
        inode, status = file.inode, file.own_copy.stat()
        if status.st_mtime_ns != file.copy_mtime_ns:
            told_ns = self._told_mtime(file, status.st_mtime_ns)
            file.copy_mtime_ns = status.st_mtime_ns
            if told_ns != inode.mtime_ns:
                inode.mtime_ns, inode.ctime_ns = told_ns, max(inode.ctime_ns + 1, told_ns)
                file.unsaved = True
                if file.backing and inode.is_privileged:
                    # It is unknown which user has written, so this is done for all, root too.
                    inode.mode, inode.stripped = inode.unprivileged_mode, True
        if status.st_size != inode.size or status.st_blocks != inode.blocks:
            inode.size, inode.blocks = status.st_size, status.st_blocks
            file.unsaved = True
        if mapped and file.backing:
            if file.unseen:
                file.unsaved, file.shown_as = True, None
            file.unseen = file.own_copy.may_be_written_unseen()

    def changed(self, file: OpenInode) -> None:
        """The daemon has changed the copy: the file has the time that the kernel gave it then."""
        before_ns = file.inode.mtime_ns
        self.look(file)
        if file.inode.mtime_ns == before_ns:
            file.changed(clock.kernel_ns())
        file.shown = None

    def _told_mtime(self, file: OpenInode, found_ns: int) -> int:
        """The file's mtime; later than any noted before, even if the clock was set back."""
        noted_ns = file.inode.mtime_ns
        if file.copy_mtime_ns == noted_ns:
            return found_ns
        return max(found_ns, noted_ns + (file.copy_mtime_ns != _UNKNOWN))

    async def know_mtime(self, file: OpenInode) -> None:
        """Take the copy's mtime into core before it is set, so that it is not seen as a change."""
        if file.copy_mtime_ns == _UNKNOWN:
            await file.own_copy.ensure_open()
            self.look(file)

    async def set_mtime(self, file: OpenInode, mtime_ns: int) -> None:
        """Have the copy tell this mtime."""
        await file.own_copy.set_mtime(mtime_ns)
        file.copy_mtime_ns = file.inode.mtime_ns = mtime_ns

    # --- bytes (by way of the daemon) ---

    async def read(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """``length`` bytes below the size. A cached copy that fails is passed over. Raises
        Unavailable."""
        copy, inode = file.own_copy, file.inode
        try:
            data = await copy.read(offset, length)
            if len(data) == length or file.marked or file.home:  # its home may be truncating it
                return data
            raise Unavailable(
                f"inode {inode.ino}: its burst copy ends at byte {offset + len(data)} of "
                f"{inode.size}"
            )
        except Unavailable as error:
            if inode.in_burst or file.copy is not copy:
                raise
            _log.info("inode %d is read from the capacity tier: %s", inode.ino, error)
        if file.objects is None:
            return (inode.data or b"")[offset : offset + length]
        return await file.objects.read(offset, length, inode.size, True)

    async def write(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data`` to the page cache. The gate is held, shared, after ``enter``."""
        await file.own_copy.write(offset, data)
        self.changed(file)

    async def append(self, file: OpenInode, data: bytes | memoryview) -> None:
        """``write`` behind all that is there, also from programs. The gate is held alone."""
        await file.own_copy.append(data)
        self.changed(file)

    async def truncate(self, file: OpenInode, size: int) -> None:
        """The gate is held alone, and ``enter`` has been called."""
        if size < file.inode.size:
            # The record must not promise more bytes than there are (I6).
            await self._engine.barrier(file.marked_seq)
        await file.own_copy.truncate(size)
        self.changed(file)

    # --- durability ---

    async def sync(self, file: OpenInode) -> None:
        """Bring bytes, size and name to stable storage. Raises NoSpace, Unavailable. Callers do not
        hold the gate. The dirty mark goes if provably nobody has written meanwhile."""
        copy, changes = file.own_copy, file.changes
        await copy.ensure_open()
        proof, own = await self._prove(file)
        try:
            if file.copy is copy and file.inode.in_burst:  # else it has been drained meanwhile
                self.look(file, mapped=True)
            if file.unsaved:
                await self._transitions.save(file)
            seen_mtime_ns = file.copy_mtime_ns
            await run_all(copy.sync, self._engine.barrier)
            file.synced_mtime_ns = seen_mtime_ns
            faults.reach(_SYNCED)
            if file.has_lost:
                return  # the mark stays, and the copy is never taken for durable
            if proof is not None and file.lease is proof:
                async with alone([file]):
                    if file.lease is proof and file.changes == changes and file.marked:
                        await self._transitions.unmark(file)
            is_it = file.copy is copy and file.inode.in_burst
            if is_it and file.marked and not file.copy_is_durable:
                await self._engine.transact(forms.put_durable, copy.id)
                file.copy_is_durable = file.copy is copy
        finally:
            if own and file.lease is proof:
                file.end_lease()

    async def _prove(self, file: OpenInode) -> tuple[Lease | None, bool]:
        """The proof that nobody writes, and whether it is ours: a drain has its own. None if
        somebody may write."""
        if not file.marked or file.may_be_written:
            return None, False
        if file.lease is not None:
            return file.lease, False
        if file.gate.is_free:  # else a truncation may be using our writing descriptor
            await file.own_copy.release_writers()
            if file.lease is not None:
                return file.lease, False
            free = file.gate.is_free and not file.may_be_written and file.inode.in_burst
            if free and file.own_copy.lease():
                file.take_lease(Lease(file.own_copy))
                return file.lease, True
        return None, False
