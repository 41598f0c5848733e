"""The in-core state of a regular file while it is open, or while its bytes are being moved or its
size changed.
"""

from typing import NamedTuple

import trio

from aifs.burst.copy import BurstCopy
from aifs.core.waiting import LOCK, waits_for
from aifs.data.objects.object_set import Bytes, ObjectSet
from aifs.files.forecast import Kin
from aifs.meta.records import Inode


class Gate:
    """Guards the bytes of one file: reads and writes enter together, changes of its form enter
    alone.

    Waiting is fair: while someone waits to enter alone, nobody else enters. Both forms are entered
    with an await that does not suspend unless it must wait, and left synchronously.
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
    """The proof that nobody has written to the burst copy of a file, not through a mapping either,
    since this was made; it is ``OpenInode.lease`` as long as it holds. A drain that is under way
    has one, and a sync.
    """

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
        """It proves nothing any more. Does not block; others may write to the burst copy when this
        returns.
        """
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
        """The host that changes the file, or has its newest bytes in its burst directory, if that
        is not this one; 0: none. Then nothing of its bytes changes here."""
        self.cached_at = 0
        """The host that had a clean copy of it in its burst directory when we looked, if that is
        not this one; 0: none."""
        self.joined = 0
        """The host that has let us write to the file by way of it, while it has it open for writing
        itself, or others have by way of it; 0: none has."""
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
        """The kernel's id of the local file that the users' handles are passed through to: the
        copy, the one object, or the one with all blocks. 0 while they are not, and then none of
        them is."""
        self.on_object = False
        """Programs use the one object of a striped file by themselves, which it has to stay: users
        are passed through to it, or have left a mapping."""
        self.source_backing = 0
        """The last backing id that passes through to all blocks of the objects."""
        self.uncached = False
        """Handles of users were made that go past the kernel's page cache, as all do from then on
        until there are none: what is written there changes nobody's pages."""
        self.cached = False
        """A handle of users that uses the kernel's page cache was made since there were none."""
        self.kept = 0
        """The backing id that was the users', while there are none: the next ones get it, if they
        are passed through to the same local file."""
        self.was_opened = False
        """Programs have had it open since it is in core, or it was lent before."""

        self.placed: Bytes | None = None
        """The objects for which the bridge was offered the places (``places``)."""

        # What of it has changed.
        self.changes = 0
        """Counts modifications of the bytes, each before its first byte changes: so a sync or a
        drain can tell whether another one has come since."""
        self.unsaved = False
        """The record lags behind ``inode``."""
        self.unseen = False
        """When its record was last told to other hosts on demand, programs could go on to write to
        it by a mapping without its mtime changing."""
        self.shown: tuple[int, int] | None = None
        """Mtime and blocks that stat(2) showed since the last change, which may have been a guess;
        None if it was not asked for."""
        self.shown_as: tuple[int, int] | None = None
        """Size and mtime that all hosts had been shown when somebody had closed it; None: nobody
        has since it is in core."""
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
        """Whether handles are passed through to the file with all blocks of its objects, which
        becomes its copy before the first change."""
        return self.backing != 0 and self.backing == self.source_backing and self.copy is None

    @property
    def own_source(self) -> int:
        """The object set whose blocks programs may use by themselves, or have mapped, as this
        file; 0: there is none. Clones are not passed through to what they share."""
        inode = self.inode
        is_own = inode.objects is not None and inode.named in (0, inode.ino)
        return inode.oid if is_own else 0

    @property
    def is_mapped(self) -> bool:
        """Whether programs may write to a local file by mappings, of which the kernel hears
        nothing for this one."""
        return self.backing != 0 and self.mappers > 0 or self.outlived and self.inode.in_burst

    def adopt(self, stored: Inode) -> None:
        """Transactions may come here in another order than that in which they count: what is older
        than what has been taken over changes nothing."""
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
        """As Bytes.data_range, of whatever holds the bytes, which may be replaced
        meanwhile.
        """
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
        """Close descriptors, which are opened again when they are needed, if only handles of
        programs need the file and no call uses it; how many. Does not block."""
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
