"""A regular file in core, while it is open, its bytes are moved, or its size changes."""

from typing import NamedTuple

import trio

from aifs.burst.copy import BurstCopy
from aifs.core.waiting import LOCK, waits_for
from aifs.data.objects.object_set import Bytes, ObjectSet
from aifs.files.forecast import Kin
from aifs.meta.records import Inode


class Gate:
    """Guards the bytes of one file: reads and writes enter together, changes of its form alone.

    Waiting is fair. Both forms are entered with an await that suspends only if it must wait, and
    left synchronously.
    """

    __slots__ = ("_alone", "_inside", "_queue", "_waiting_alone")

    def __init__(self) -> None:
        self._inside = 0
        self._alone = False
        self._waiting_alone = 0
        self._queue: trio.lowlevel.ParkingLot | None = None

    @property
    def is_free(self) -> bool:
        """Whether nobody is inside."""
        return not self._alone and not self._inside

    async def enter_shared(self) -> None:
        while self._alone or self._waiting_alone:
            await self._park()
        self._inside += 1

    def leave_shared(self) -> None:
        self._inside -= 1
        if self._queue and not self._inside:
            self._queue.unpark_all()

    async def enter_alone(self) -> None:
        if self._alone or self._inside:
            await self._wait_alone()
        self._alone = True

    async def _wait_alone(self) -> None:
        self._waiting_alone += 1
        try:
            while self._alone or self._inside:
                await self._park()
        except BaseException:  # cancelled: those who stood behind us may go on
            if self._queue:
                self._queue.unpark_all()
            raise
        finally:
            self._waiting_alone -= 1

    def leave_alone(self) -> None:
        self._alone = False
        if self._queue:
            self._queue.unpark_all()

    async def _park(self) -> None:
        if self._queue is None:
            self._queue = trio.lowlevel.ParkingLot()
        with waits_for(LOCK):
            await self._queue.park()


class Lease:
    """The proof that the burst copy was not written since this was made, also by a mapping. It
    holds as long as it is ``OpenInode.lease``. A drain that is under way has one, and a sync."""

    def __init__(self, copy: BurstCopy) -> None:
        """``copy`` is leased."""
        self.copy = copy
        self.cancelled = False
        """Whether somebody is going to change the file, or has unlinked it."""

    @property
    def is_whole(self) -> bool:
        """Whether it has held until now."""
        return not self.cancelled and self.copy.is_leased

    def cancel(self) -> None:
        """End the proof; others may write when this returns. Does not block."""
        self.cancelled = True
        self.copy.unlease()


class LostBytes(NamedTuple):
    """Bytes that the system could not write back, and has forgotten: a later sync succeeds."""

    holder: int
    """The id of the burst copy, or of the objects, that they were written to."""
    reason: str
    """For messages; '' when a program has been told."""


class OpenInode:
    """One per open inode, shared by all its handles.

    While it exists, ``inode`` is the truth about size, blocks, mtime, atime and the form of the
    file; the record in the store may lag behind (``unsaved``). Mode, ACL, owner, flags, links and
    names are the store's; ``adopt`` takes them over after each transaction that changed them.

    The form is ``inode.layout``, ``oid``, ``data`` and ``copy``, with ``objects``, ``copy`` and
    ``marked`` here: transitions.py alone assigns to these.
    """

    __slots__ = (
        "backing",
        "cached",
        "cached_at",
        "changes",
        "copy",
        "copy_is_durable",
        "copy_mtime_ns",
        "forgotten",
        "gate",
        "handles",
        "home",
        "inode",
        "joined",
        "joined_as",
        "kept",
        "kin",
        "lease",
        "lost",
        "mappers",
        "marked",
        "marked_seq",
        "objects",
        "on_object",
        "opening",
        "outlived",
        "placed",
        "recording",
        "shown",
        "shown_as",
        "source_backing",
        "synced_mtime_ns",
        "trimmed",
        "uncached",
        "unsaved",
        "unseen",
        "unsynced_there",
        "used",
        "users",
        "was_opened",
        "writers",
    )

    def __init__(self, inode: Inode, objects: Bytes | None, marked: bool) -> None:
        self.inode = inode
        """Its attributes and its form as they are now."""

        # Its users.
        self.handles = 0
        """How many need the in-core state: handles of programs, and calls that are under way."""
        self.users = 0
        """The open handles of programs among them."""
        self.writers = 0
        """Those of these handles that can write."""
        self.mappers = 0
        """Those of them by which the file can be mapped, and written so."""
        self.outlived = False
        """Such a handle was closed, of a file that was passed through: a mapping may go on."""
        self.opening = 0
        """Opens for writing that have passed the gate and have no handle yet."""
        self.forgotten = False
        """The kernel does not know the inode any more."""
        self.kin: Kin | None = None
        """Of a file that has been created, and not been closed yet."""
        self.used = True
        """Somebody has used the bytes since descriptors were last closed for want of them."""

        # Its form.
        self.objects = objects
        """The objects of a striped file, or the chunks of an interleaved one."""
        self.copy: BurstCopy | None = None
        """Its burst copy: the file itself, or a cache of it."""
        self.lease: Lease | None = None
        """The proof that nobody writes to the copy; None while nobody needs one."""
        self.home = 0
        """The other host that changes the file, or has its newest bytes in its burst directory, or
        0. Then none of its bytes change here."""
        self.cached_at = 0
        """The other host that had a clean copy when we looked, or 0."""
        self.joined = 0
        """The host through which we write to the file, because it is open for writing there; or
        0."""
        self.joined_as = 0
        """The number that it has given us for that, by which we leave."""
        self.unsynced_there: object | None = None
        """A token of what we have written last to it there, and have not synced since; or None."""
        self.marked = marked
        """The dirty mark is on record: the bytes may change without notice."""
        self.marked_seq = 0
        """The mark of a file that was in order was put by this transaction, or an earlier one."""
        self.copy_is_durable = False
        """The copy is on record as durable, as far as we know."""
        self.trimmed = False
        """No object holds bytes beyond the size, so the file may grow."""
        self.backing = 0
        """The kernel's id of the local file (copy, one object, or all blocks) to which all handles
        of users are passed through; 0: none is."""
        self.on_object = False
        """Programs use the one object by themselves, or may have left a mapping: it has to stay."""
        self.source_backing = 0
        """The last backing id that passes through to all blocks of the objects."""
        self.uncached = False
        """Handles go past the kernel's page cache until there are none: writes change no pages."""
        self.cached = False
        """A handle of users that uses the kernel's page cache was made since there were none."""
        self.kept = 0
        """The backing id of former users: the next ones get it if the local file is the same."""
        self.was_opened = False
        """Programs have had it open since it is in core, or it was lent before."""

        self.placed: Bytes | None = None
        """The objects for which the bridge was offered the places (``places``)."""

        # What of it has changed.
        self.changes = 0
        """Counts changes of the bytes, each before its first byte, so a sync or drain notices
        them."""
        self.unsaved = False
        """The record lags behind ``inode``."""
        self.unseen = False
        """When last shown on demand, a mapping could go on writing without a change of mtime."""
        self.shown: tuple[int, int] | None = None
        """Mtime and blocks, maybe a guess, that stat(2) showed since the last change; None:
        none."""
        self.shown_as: tuple[int, int] | None = None
        """Size and mtime that all hosts were shown at a close; None: not closed since it is in
        core."""
        self.copy_mtime_ns = 0
        """The copy's mtime when it was last looked at; 0: it was not."""
        self.synced_mtime_ns = 0
        """The copy's mtime when the file was last synced."""
        self.lost: LostBytes | None = None
        """Bytes that were written and could not be made durable; None where none are known."""

        self.gate = Gate()
        """Guards the bytes and the form."""
        self.recording = Gate()
        """Held alone by the task that writes the record, until core says the same."""

    @property
    def own_copy(self) -> BurstCopy:
        """``copy`` of a file that has one."""
        assert self.copy is not None
        return self.copy

    @property
    def own_objects(self) -> ObjectSet:
        """``objects`` of a striped file."""
        assert isinstance(self.objects, ObjectSet)
        return self.objects

    @property
    def is_joined(self) -> bool:
        """Whether it is read and changed by way of its home, which is another host."""
        return self.home != 0 and self.joined == self.home

    @property
    def on_source(self) -> bool:
        """Whether handles use the file with all blocks, which is its copy from the first change
        on."""
        return self.backing != 0 and self.backing == self.source_backing and self.copy is None

    @property
    def own_source(self) -> int:
        """The object set whose blocks programs may use as this file, or have mapped; or 0. Clones
        are not passed through to shared objects."""
        inode = self.inode
        is_own = inode.objects is not None and inode.named in (0, inode.ino)
        return inode.oid if is_own else 0

    @property
    def is_mapped(self) -> bool:
        """Whether programs may write by mappings, of which the kernel does not know."""
        return self.backing != 0 and self.mappers > 0 or self.outlived and self.inode.in_burst

    def adopt(self, stored: Inode) -> None:
        """Take a record over. Transactions come in any order: an older one changes nothing."""
        inode = self.inode
        if stored.seq < inode.seq:
            return
        inode.seq = stored.seq
        inode.mode = stored.unprivileged_mode if inode.stripped else stored.mode
        inode.uid, inode.gid = stored.uid, stored.gid
        inode.nlink, inode.parent, inode.policy = stored.nlink, stored.parent, stored.policy
        inode.acl, inode.default_acl = stored.acl, stored.default_acl
        inode.flags, inode.project = stored.flags, stored.project
        inode.ctime_ns = max(inode.ctime_ns, stored.ctime_ns)

    async def data_range(self, offset: int, size: int, strict: bool = True) -> tuple[int, int]:
        """Bytes.data_range of whatever holds the bytes, even if it is replaced meanwhile."""
        while True:
            objects = self.objects
            if self.inode.in_burst:
                return await self.own_copy.data_range(offset, size)
            if objects is None:
                return offset, size
            found = await objects.data_range(offset, size, strict)
            if self.objects is objects:
                return found

    def close_idle(self) -> int:
        """Close descriptors that only handles need and no call uses; they open again on demand.
        Returns how many. Does not block."""
        if self.handles > self.users or not self.gate.is_free or self.lease is not None:
            return 0
        closed = 0 if self.objects is None else self.objects.close_idle()
        return closed if self.copy is None else closed + self.copy.close_idle()

    def changed(self, now: int) -> None:
        """The bytes or the size have changed."""
        self.inode.mtime_ns = self.inode.ctime_ns = now
        self.shown = None
        self.unsaved = True

    def note_lost(self) -> None:
        """Take over whether bytes could not be made durable."""
        found = self.copy if self.inode.in_burst else self.objects
        if isinstance(found, BurstCopy | ObjectSet) and found.lost and not self.has_lost:
            self.lost = LostBytes(self._holder, found.lost)

    @property
    def has_lost(self) -> bool:
        """Whether what holds the bytes has lost some: no sync makes it durable."""
        return self.lost is not None and self.lost.holder == self._holder

    @property
    def _holder(self) -> int:
        """The id of the copy, or of the objects, that the file is."""
        copy = self.copy if self.inode.in_burst else None
        return self.inode.oid if copy is None else copy.id

    @property
    def may_be_written(self) -> bool:
        """Whether a handle can write, or is about to."""
        return self.writers > 0 or self.opening > 0

    def take_lease(self, lease: Lease) -> None:
        """The copy is leased. The gate is held, or free."""
        assert self.lease is None
        self.lease = lease

    def end_lease(self) -> None:
        """The lease is not needed any more."""
        if self.lease is not None:
            self.lease.copy.unlease()
            self.lease = None

    def cancel_lease(self) -> None:
        """The bytes are about to change, or to go: what a drain has copied must not count."""
        if self.lease is not None:
            self.lease.cancel()
            self.lease = None
