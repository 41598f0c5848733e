"""The bytes of regular files: open inodes, and every read, write, truncation and fsync of them.

A file's newest bytes lie in the burst tier (``burst_io``), or in its inode or on the data servers
(``capacity_io``); which of them is asked is decided here, under the file's gate. Only these
modules, ``writeback``, ``drain``, ``stage`` and ``evict`` change a file's form.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.making import MakingTools
from aifs.burst.mirrors import Mirrors
from aifs.burst.remote import Homes, Operation
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.config import Config
from aifs.core.errors import FileTooLarge, FsError, NoSpace, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import Upkeep, Work
from aifs.data.checking.digests import HASHED
from aifs.data.checking.together import Sharing
from aifs.data.objects.object_set import Bytes, Followed, ObjectSet
from aifs.data.objects.recovery import forget_columns
from aifs.data.patience import giving_up
from aifs.data.servers import Servers
from aifs.files.burst_io import BurstIO
from aifs.files.capacity_io import CapacityIO, count_blocks
from aifs.files.collector import Collector
from aifs.files.containers import Containers
from aifs.files.damage import Damage
from aifs.files.forecast import Forecast, Kin
from aifs.files.handles import Handles
from aifs.files.needs import Needs
from aifs.files.open_inode import LostBytes, OpenInode
from aifs.files.stage import Stager
from aifs.files.together import Together
from aifs.files.transitions import Transitions, alone
from aifs.files.types import SIZE_MAX
from aifs.layout.striped import Striped
from aifs.meta import forms, moves, namespace
from aifs.meta.degraded import find_unread
from aifs.meta.kv import Engine
from aifs.meta.records import Inode
from aifs.movers.movers import Movers
from aifs.movers.pool import Pool
from aifs.peers.transport import Answer, FilePart
from aifs.store.ids import IdAllocator

_log = logger(__name__)

ACCESSES_S = 10.0
"""How often accesses are recorded of files that were opened without us."""

_ACCESSES = 256  # in one transaction

_CHANGES = (Operation.WRITE, Operation.APPEND, Operation.TRUNCATE, Operation.ALLOCATE)
"""What is lost with its home, unless it has been synced there."""


def _always() -> bool:
    return True


class FileIO:
    """The table of open inodes, and everything that touches file bytes."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        servers: Servers,
        tier: BurstTier,
        containers: Containers,
        ids: IdAllocator,
        collector: Collector,
        damage: Damage,
        needs: Needs,
        handles: Handles,
        upkeep: Upkeep,
        pool: Pool,
        homes: Homes,
        mirrors: Mirrors,
        together: Together | None,
    ) -> None:
        """``together``: None where the store has one host."""
        self._engine = engine
        self._handles = handles
        self._forgotten: set[int] = set()
        """Inodes that nobody can find any more, and that are open though they are not in core."""
        self._servers = servers
        self._tier = tier
        self._containers = containers
        self._inline_limit = config.layout.inline_limit
        self._verify = config.data.verify == "read"
        """Whether what is read through the caches is compared with checksums."""
        self._collector = collector
        self._pool = pool
        self._homes = homes
        self.mirrors = mirrors
        """The copies of undrained files on other hosts."""
        self._join = None if together is None else together.join
        """Tells other hosts what large files are read here; None: there are none."""
        self.transitions = Transitions(engine, tier, collector, damage, self.objects_of, homes)
        movers = self.movers(Mover(servers.budget, Limiter(0), "none", is_urgent=_always))
        self.capacity = CapacityIO(
            config, engine, servers, ids, containers, self.transitions, movers
        )
        self.stager = Stager(
            config,
            servers,
            tier,
            self.transitions,
            self.capacity,
            self.movers(Mover(servers.budget, Limiter(0), config.burst.ioprio, is_urgent=_always)),
            upkeep,
            self.acquire,
            self.release,
        )
        self.burst = BurstIO(config, engine, tier, self.transitions, needs, self.stager)
        self.damage = damage
        self._upkeep = upkeep
        self.commit_interval_s = config.meta.commit_interval_s
        """How often in-core attributes are saved while files are open."""
        self.forecast = Forecast(self._inline_limit)
        """Which new files need no burst copy."""
        self.open: dict[int, OpenInode] = {}
        """By inode number, the files that are open."""
        self.is_resting = True
        """Write-back has found no open file, and none has been opened since."""
        self.find_room = servers.descriptors.find_room
        servers.descriptors.add_users(self.open.values)
        servers.tell_of_burst(handles.recall_all)  # files there are read elsewhere, or not any more
        self.overtaken: dict[int, object] = {}
        """Files that may be open here, and have been changed or moved by another host: whoever
        needs the bytes looks first where they are (``follow_bytes``). With a token of the last
        time."""
        self.stale: dict[int, int] = {}
        """Files that another host has changed, until the kernel has none of the pages from before:
        who opens one has it drop them. With the ``seq`` of the last change."""
        self._opening: dict[int, _Opening] = {}
        """By inode number, those whose in-core state is being made."""
        self._lost: dict[int, LostBytes] = {}
        """By inode number, what closed files have lost."""
        self.unsynced: dict[int, object | None] = {}
        """Files with a dirty mark that were closed since it was made: a token of that close, None
        if the objects could not be settled."""

    # --- open inodes ---

    async def acquire(self, ino: int) -> OpenInode:
        """The open inode of a regular file, with one more handle. Raises NotFound, Stale,
        Unavailable.
        """
        await self.find_room()
        while (file := self.open.get(ino)) is None:
            if ino in self._opening:
                await self._opening[ino].wait()
                continue
            self.begin_opening(ino)
            try:
                inode, changer, unread = await self._engine.view(forms.load, ino)
                if not inode.is_file:
                    raise Stale(f"inode {ino} is not a regular file")
                self._note_open()
                file = self.open[ino] = self._opened(inode, changer, unread)
                self._handles.take_back(file)
                if ino in self._forgotten:
                    self._forgotten.discard(ino)
                    file.forgotten = True
            finally:
                self.end_opening(ino)
        file.handles += 1
        file.used = True
        return file

    def opening(self, *inos: int, lent: bool = False) -> "_Claims":
        """Those of these inodes that are not open, nor being opened, are ours: whoever wants to
        open one waits until this ends. What he finds then is in ``open``, or on record. ``lent``:
        also those that are lent, open or not, which stays so; else they are no more.
        """
        return _Claims(self, inos, lent)

    def begin_opening(self, ino: int) -> None:
        """As ``opening``, of one inode that is not open, nor being opened, and is not lent or stays
        lent.
        """
        self._opening[ino] = _Opening()

    def end_opening(self, ino: int) -> None:
        """Its end."""
        claim, file = self._opening.pop(ino), self.open.get(ino)
        if claim.stored is not None and file is not None:
            file.adopt(claim.stored)
        if claim.forgotten:
            self.forget(ino)
        claim.end()

    def is_open(self, ino: int) -> bool:
        """Whether it is in core, or is being opened."""
        return ino in self.open or ino in self._opening

    def recall(self, ino: int) -> bool:
        """As ``is_open``, also of an inode that is lent. If it is not open, it is lent no more."""
        return self.is_open(ino) or self._handles.recall(ino)

    def close_unseen(self, ino: int) -> None:
        """A handle of an inode that is lent is closed, which cannot be brought into core."""
        if not self._handles.close_unseen(ino) and ino in self._forgotten:
            self._forgotten.discard(ino)
            self._collector.add_orphan(ino)

    def adopt(self, stored: Inode) -> OpenInode | None:
        """A transaction has made this of an inode's record. The open inode, which has taken it
        over, if there is one."""
        file = self.open.get(stored.ino)
        if file is not None:
            file.adopt(stored)
        elif stored.ino in self._opening:
            claim = self._opening[stored.ino]
            if claim.stored is None or claim.stored.seq < stored.seq:
                claim.stored = stored
        return file

    def follow(self, stored: Inode) -> bool:
        """Another host has made this of an inode's record. Whether programs have it open here. Does
        not block."""
        file, ino = self.adopt(stored), stored.ino
        objects = stored.objects
        if objects is not None and not objects.is_protected:  # those are written in place
            forget_columns(self._servers.cache, objects, (ino, stored.oid))
        if file is None:
            if ino in self._opening:
                self.overtake(ino)
            return self.recall(ino)
        if file.marked:  # by us; or we have given it up just now, and core does not say so yet
            is_overtaken = not namespace.has_form_of(stored, file.inode)
        else:
            is_overtaken = self.transitions.follow(file, stored)
        if is_overtaken:
            self.overtake(ino)
        return True

    def overtake(self, ino: int) -> None:
        """Another host has begun to change a file, or has ended. Does not block."""
        if self.is_open(ino):
            self.overtaken[ino] = object()
        file = self.open.get(ino)
        if file is not None:
            file.changes += 1  # what is being made of the bytes here must not count

    def overtake_objects(self, oid: int) -> None:
        """Another host knows that columns of these objects must not be read. Does not block."""
        for ino in [ino for ino, file in self.open.items() if file.inode.oid == oid]:
            self.overtake(ino)

    def proof_of_rest(self, ino: int) -> object | None:
        """What says of a file with a dirty mark that is not open that at its last close nobody had
        it mapped for writing; it holds as long as it is in ``unsynced``, and the file closed.
        """
        return None if self.is_open(ino) else self.unsynced.get(ino)

    def recall_all(self) -> None:
        """What is lent was lent by rules that have changed."""
        self._handles.recall_all()

    def forget(self, ino: int) -> None:
        """Nobody can find this inode any more: it is removed when it is closed."""
        file = self.open.get(ino)
        if file is not None:
            file.forgotten = True
        elif ino in self._opening:
            self._opening[ino].forgotten = True
        elif self._handles.recall(ino):
            self._forgotten.add(ino)
        else:
            self._lost.pop(ino, None)
            self._collector.add_orphan(ino)

    def _opened(self, inode: Inode, changer: int | None, unread: int) -> OpenInode:
        file = OpenInode(inode, self.objects_of(inode, unread), marked=False)
        file.lost = self._lost.pop(inode.ino, None)
        self.transitions.find_copy(file, changer)
        return file

    def _note_open(self) -> None:
        """A file is about to be opened: work that sleeps while none is looks after it."""
        if self.is_resting:
            self.is_resting = False
            now_s = trio.current_time()
            self._upkeep.at(Work.WRITE_BACK, now_s + self.commit_interval_s)
            self._upkeep.at(Work.WATCH_SERVERS, now_s + self._servers.watch_again_s(is_busy=True))

    def objects_of(self, inode: Inode, unread: int = 0) -> Bytes | None:
        """What holds the bytes of a file on the capacity tier; None if nothing does. ``unread``:
        mask of columns that must not be read.
        """
        layout = inode.layout
        if layout is None:
            return None
        chunks = layout.chunks
        if chunks is not None:
            return self._containers.objects_of(chunks, inode.oid)
        objects = layout.objects
        assert objects is not None  # what has a layout has objects, or chunks
        return self.set_of(objects, inode.ino, inode.oid, unread, self._verify, is_shared=True)

    async def _to_be_copied(self, inode: Inode) -> Bytes | Followed:
        """The bytes of a settled file, checked, by way of the caches of those who read it."""
        ino, oid, layout, unread = inode.ino, inode.oid, inode.objects, 0
        if inode.chunks is not None:
            return self._containers.objects_of(inode.chunks, oid, copied=True)
        assert layout is not None  # what has a layout has objects, or chunks
        if layout.is_protected:
            unread = await self._engine.view(find_unread, oid)
        return Followed(self.set_of(layout, ino, oid, unread, checked=True))

    def movers(self, mover: Mover) -> Movers:
        """Who carries out work under the limits of ``mover``."""
        containers = self._containers.files
        tools = MakingTools(
            self._servers, mover, containers, self._verify, self._damaged, self._join
        )
        return Movers(tools, self._pool)

    def set_of(
        self,
        layout: Striped,
        ino: int,
        oid: int,
        unread: int = 0,
        checked: bool = False,
        is_shared: bool = False,
    ) -> ObjectSet:
        """The objects of a striped file. ``checked``: what is read past the caches is compared with
        checksums. ``is_shared``: other hosts that read them, too, are told.
        """
        load = partial(self._engine.view, forms.get_checksums, oid)
        join = self._join if is_shared else None
        return ObjectSet(
            self._servers,
            layout,
            ino,
            oid,
            unread=unread,
            on_damage=partial(self._damaged, layout),
            digests=load if checked else None,
            verify=self._verify,
            shared=None if join is None else Sharing(load, join),
        )

    def _damaged(self, layout: Striped, oid: int, ino: int, column: int) -> None:
        """Found by somebody who read by this layout: if the column has moved meanwhile, its old
        object may be gone.
        """
        file = self.open.get(ino)
        now = file.inode.objects if file is not None and file.inode.oid == oid else None
        if now is not None and now.servers[column] == layout.servers[column]:
            self.damage.report(oid, ino, column)

    def adopt_new(self, inode: Inode, copy: BurstCopy | None, kin: Kin | None) -> OpenInode:
        """The open inode of a file that has just been created, with one handle; ``opening`` counts
        it until the caller has given it a handle of the kernel."""
        self._note_open()
        file = self.open[inode.ino] = OpenInode(inode, None, marked=False)
        file.handles = file.opening = 1
        file.kin = kin
        if copy is not None:
            self.transitions.adopt_new(file, copy)
        return file

    async def release(self, file: OpenInode) -> None:
        """Give one handle back; the last one brings the objects to their lengths and forgets the
        in-core state.
        """
        file.handles -= 1
        if file.joined and not file.may_be_written:
            await self._leave_home(file)
        if file.handles:
            return
        ino = file.inode.ino
        await file.gate.enter_alone()
        try:
            if file.handles or self.open.get(ino) is not file:
                return
            token = None
            if file.inode.nlink and file.marked:
                token = await self._settle_at_close(file)
            if file.handles:
                return
            if file.unsaved:
                try:
                    await self.transitions.save(file)
                except FsError as error:
                    _log.info(
                        "inode %d stays open until its attributes can be recorded: %s", ino, error
                    )
                    return
            if file.handles:
                return
            file.note_lost()
            if file.inode.nlink and file.lost and (file.lost.reason or file.has_lost):
                self._lost[ino] = file.lost
            del self.open[ino]
            if ino not in self.stale:
                self._handles.lend(file)
            if file.objects is not None:
                file.objects.close()
            self.transitions.detach(file)
        finally:
            file.gate.leave_alone()
        if file.kin is not None and file.inode.nlink:
            self.forecast.closed(file.kin, file.inode.size, file.changes)
        if file.inode.nlink == 0:
            if file.forgotten:
                self._collector.add_orphan(ino)
        elif file.marked:
            self.unsynced[ino] = None if ino in self._lost else token
        else:
            self.unsynced.pop(ino, None)

    async def _settle_at_close(self, file: OpenInode) -> object | None:
        try:
            if file.inode.in_burst:
                assert file.copy is not None  # it is the file
                await file.copy.ensure_open()
                self.burst.look(file)
                if file.inode.size <= self._inline_limit:
                    await self.burst.become_inline(file)
                if file.inode.in_burst and not await self.burst.settle(file):
                    return None  # a mapping outlives its handle, so the mark is not removed unseen
            else:
                with giving_up():  # nobody waits for that, but an unmount
                    await self.capacity.settle(file)
            return None if file.inode.ino in self.capacity.perhaps_mapped else object()
        except FsError as error:
            # The dirty mark stays, so write-back, which says that it has to wait, or the next mount
            # will try again.
            _log.info("inode %d could not be settled at close: %s", file.inode.ino, error)
            return None

    async def change(
        self,
        ino: int,
        change: Callable[[Inode, Any], None],
        argument: Any,
        mtime_ns: int | None = None,
    ) -> Inode:
        """Apply ``change(inode, argument)`` to the attributes of any inode, on record and in core,
        or to neither. The inode as it is then. ``mtime_ns``: that it sets, which the burst copy of
        a file that lies there is to tell, too. Raises NotFound, and what ``change`` raises.
        """
        while True:
            file = self.open.get(ino)
            stays_lent = self._handles.stays_lent(ino)
            if file is not None:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
            elif ino not in self._opening and not stays_lent:
                if self._handles.recall(ino) or self._handles.was_accessed(ino):
                    file = await self.acquire(ino)
            if file is not None:
                try:
                    if file.home:  # whose copy is none of ours
                        mtime_ns = None
                    if mtime_ns is not None and file.inode.in_burst:
                        await self.burst.know_mtime(file)
                    await self.transitions.change_attributes(file, change, argument)
                    if mtime_ns is not None and file.inode.in_burst:
                        await self.burst.set_mtime(file, mtime_ns)
                    return self.attributes(file)
                finally:
                    await self.release(file)
            if ino in self._opening:
                await self._opening[ino].wait()
                continue
            self.begin_opening(ino)
            try:
                inode = await self._engine.transact(forms.change_attributes, ino, change, argument)
                if stays_lent:
                    self._handles.lend_still(inode)
                place = inode.copy if inode.in_burst else None
                if mtime_ns is not None and place is not None and not self._homes.of(place.server):
                    copy = self._tier.open(place)
                    try:
                        await copy.set_mtime(mtime_ns)
                    finally:
                        copy.close()
                return inode
            finally:
                self.end_opening(ino)

    async def lose_columns(self, ino: int, oid: int, mask: int) -> bool:
        """Columns of a file's objects were found to be wrong: from now on nobody reads them.
        Whether that is on record (see moves.put_damaged). No gate is waited for: who reads a column
        that turns out to be wrong may hold it.
        """
        while True:
            file = self.open.get(ino)
            if file is not None:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
                try:
                    return await self.transitions.lose_columns(file, oid, mask)
                finally:
                    await self.release(file)
            if ino in self._opening:
                await self._opening[ino].wait()
                continue
            with self.opening(ino, lent=True):
                return await self._engine.transact(moves.put_damaged, oid, ino, mask) != 0

    # --- uses that we hear of later ---

    def hear_of_uses(self) -> None:
        """Of copies of files that were opened without us. Does not block."""
        for copy_id in self._handles.used_copies():
            self._tier.touch(copy_id)

    async def record_accesses(self) -> float:
        """Record when files were accessed that were opened without us; in how many seconds to do it
        again."""
        self.hear_of_uses()
        inos = self._handles.accessed_inos
        for start in range(0, len(inos), _ACCESSES):
            with self.opening(*inos[start : start + _ACCESSES], lent=True) as claimed:
                times = self._handles.find_accessed(claimed)
                await self._engine.transact(forms.put_access_times, times)
                self._handles.forget_accessed(times)
        return ACCESSES_S

    async def show(self, file: OpenInode, is_new: bool = False) -> None:
        """Somebody who has written closes the file: what core knows of it is shown to other hosts
        on return. If it ``is_new``, it is only on record, as its name is. Without space for it,
        that is so later.
        """
        inode = file.inode
        try:
            if file.is_joined and await self.at_home(file, Operation.SHOW):
                return
            if inode.in_burst and file.own_copy.is_open:
                self.burst.look(file)
            if file.unsaved:
                await self.transitions.save(file)
            closed_as = inode.size, inode.mtime_ns
            if inode.nlink and not is_new and file.shown_as != closed_as:
                await self._engine.shown()
                file.shown_as = closed_as
        except FsError as error:
            _log.info("inode %d is not on record as it is: %s", inode.ino, error)

    async def save_all(self) -> None:
        """Record the in-core attributes of every open file. Files whose close has failed, or was
        cancelled, are closed."""
        if self._engine.host:  # others see what was written past us when it is on record
            for file in self.open.values():
                if file.backing and file.writers and file.inode.in_burst and file.own_copy.is_open:
                    self.burst.look(file)
        for file in [f for f in self.open.values() if f.unsaved or not f.handles]:
            if file.unsaved and file.handles:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
                try:
                    await self.transitions.save(file)
                finally:
                    await self.release(file)
            if not file.handles and file.gate.is_free:
                file.handles = 1
                await self.release(file)

    def current(self, inode: Inode) -> Inode:
        """An inode of which this is on record, as stat(2) should show it now. Does not block."""
        file = self.open.get(inode.ino)
        return self._handles.accessed(inode) if file is None else self.attributes(file)

    def programs_have_open(self) -> list[int]:
        """The numbers of the inodes that programs have open. Takes some milliseconds."""
        return [ino for ino, file in self.open.items() if file.users] + self._handles.lent_open()

    def attributes(self, file: OpenInode) -> Inode:
        """The inode as stat(2) should show it now. Does not block: what an open file is made of is
        local knowledge.
        """
        inode = file.inode
        if file.marked:
            if not inode.in_burst:
                count_blocks(file)
            else:
                assert file.copy is not None  # it is the file
                if file.copy.is_open:
                    self.burst.look(file)
            file.shown = (inode.mtime_ns, inode.blocks)
        return inode

    # --- reads and writes ---

    async def read(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes; fewer only at the end of the file. Raises Unavailable for lost
        bytes (I2).
        """
        inode = file.inode
        file.used = True
        await self.find_room()
        while True:
            if file.is_joined:
                if answer := await self.at_home(file, Operation.READ, offset, length):
                    assert not isinstance(answer.body, FilePart)  # it has arrived
                    return memoryview(answer.body)
                continue
            while inode.ino in self.overtaken:
                await self.follow_bytes(inode.ino)
            if inode.in_burst and file.backing:
                self.burst.look(file)  # others write past us
            wanted = min(length, inode.size - offset)
            if wanted <= 0:
                return b""
            if inode.layout is None and inode.copy is None:
                assert inode.data is not None  # it has bytes
                return inode.data[offset : offset + wanted]
            copy, objects, strict = file.copy, file.objects, not (file.marked or file.home)
            try:
                if copy is None:
                    if offset == 0:
                        self.stager.read(file)
                    assert objects is not None  # it has a layout
                    data = await objects.read(offset, wanted, inode.size, strict)
                    if file.objects is objects or file.objects is None:
                        return data
                    continue  # it may have come from a column that is being made anew since then
                return await self.burst.read(file, offset, wanted)
            except Stale:
                await self.follow_bytes(inode.ino)
                if file.copy is copy:
                    raise
            except Unavailable:
                overtaken = (
                    copy is not file.copy
                    or objects is not file.objects
                    or (strict and file.marked)
                    or inode.ino in self.overtaken
                )
                if (
                    not overtaken
                ):  # else a truncation went on meanwhile, and the bytes may rightly be gone
                    raise

    async def read_to_copy(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """As ``read``, of bytes that are going to be another file's: those that come from servers
        are compared with their checksums. Raises Untold."""
        size, objects, changes = file.inode.size, file.objects, file.changes
        if file.copy is not None or objects is None or file.marked or file.home:
            return await self.read(file, offset, length)
        start = offset - offset % HASHED
        end = min(size, offset + length + -(offset + length) % HASHED)
        data = memoryview(bytearray(max(0, end - start)))
        source = await self._to_be_copied(file.inode)
        try:
            await source.read_into(start, data, size)
        except Unavailable:
            if file.objects is objects and file.changes == changes:
                raise
        finally:
            source.close()
        if file.objects is objects and file.changes == changes:
            return data[offset - start :][:length]
        return await self.read(file, offset, length)  # it has been changed meanwhile

    async def write(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        """All of ``data``, or an error: then none of it counts.

        The bytes are in a page cache when this returns, and a new size is in the journal or told by
        the burst copy, so both survive the daemon's death, and close(2) has nothing left to do.
        """
        end = offset + len(data)
        self._require_room(file, end)
        while data:
            if not await self.enter_to_change(file, end):
                if await self.at_home(file, Operation.WRITE, offset, body=data):
                    return
                continue
            try:
                if file.inode.in_burst:
                    await self.burst.write(file, offset, data)
                elif file.inode.layout is None:
                    await self.capacity.write_inline(file, offset, data)
                else:
                    await self.capacity.write_objects(file, offset, data)
                return
            except forms.ChangedElsewhere:
                pass
            finally:
                file.gate.leave_shared()
            await self.follow_bytes(file.inode.ino)

    async def append(self, file: OpenInode, data: bytes | memoryview) -> None:
        """As ``write``, at the end of the file, wherever that is: nobody else's bytes get there
        meanwhile. Where the store has one host, the kernel sees to that.
        """
        while data:
            end = file.inode.size + len(data)
            self._require_room(file, end)
            if not await self.enter_to_change(file, end):
                if await self.at_home(file, Operation.APPEND, body=data):
                    return
                continue
            file.gate.leave_shared()
            await file.gate.enter_alone()
            try:
                end = file.inode.size + len(data)
                if not self._ready(file, end):
                    continue
                file.changes += 1
                if file.inode.in_burst:
                    await self.burst.append(file, data)
                elif file.inode.layout is None:
                    await self.capacity.append_inline(file, data)
                else:
                    await self.capacity.write_objects(file, end - len(data), data)
                return
            except forms.ChangedElsewhere:
                pass
            finally:
                file.gate.leave_alone()
            await self.follow_bytes(file.inode.ino)

    def _require_room(self, file: OpenInode, end: int) -> None:
        """Raises FileTooLarge, NoSpace if the file cannot get so large."""
        if end > SIZE_MAX:
            raise FileTooLarge()
        if self._engine.short_of_space and end > file.inode.size and not file.inode.in_burst:
            raise NoSpace("the metadata store's filesystem is full")

    async def enter_to_change(self, file: OpenInode, end: int) -> bool:
        """Enter the gate, shared, of a file that is in a form whose bytes may be changed up to
        ``end``. False: it is not entered, as the file is changed by way of its home (``at_home``).
        """
        gate = file.gate
        file.used = True
        await self.find_room()
        await gate.enter_shared()
        while not self._ready(file, end):
            # Asked each time that we had to wait: others change the form, too.
            gate.leave_shared()
            if await self.take_from_home(file):
                return False
            try:
                await self._bring(file, end)
                await gate.enter_alone()
                try:
                    await self._prepare(file, end)
                finally:
                    gate.leave_alone()
            except forms.ChangedElsewhere:
                await self.follow_bytes(file.inode.ino)
            await gate.enter_shared()
        file.changes += 1
        return True

    # --- files whose home is another host ---

    async def take_from_home(self, file: OpenInode, is_emptied: bool = False) -> bool:
        """If the newest bytes of the file are on another host, or it is being changed there, it is
        given up there. Whether that cannot be, as it is open for writing there: then we have joined
        those who write to it, and it is read and changed by way of its home (``at_home``).
        ``is_emptied``: its bytes are not needed any more. Raises Unavailable, which names the host.
        """
        ino = file.inode.ino
        while home := file.home:
            if file.is_joined:
                return True
            try:
                if not await self._homes.give_up(home, ino, is_emptied, file.inode.copy):
                    file.joined = home
                    continue
            except Stale:
                pass  # it is not its home any more
            await self.follow_bytes(ino)
        return False

    async def at_home(
        self, file: OpenInode, operation: Operation, *args: int, body: bytes | memoryview = b""
    ) -> Answer | None:
        """Have its home do this with a file that we have joined. What it answers; None: it is not
        its home any more, or does not know of us, and nothing has been done. Raises Unavailable,
        which names the host, and what the operation raises there.
        """
        home, inode = file.joined, file.inode
        try:
            answer = await self._homes.carry_out(home, inode.ino, operation, args, body, inode.copy)
        except Stale:
            if file.joined == home:
                file.joined = 0
            await self.follow_bytes(inode.ino)
            return None
        if file.joined == home:  # else it may be ours by now, and have been changed since
            inode.size, inode.blocks, inode.mtime_ns, inode.ctime_ns = answer.value
        if operation == Operation.SYNC:
            file.unsynced_there = False
        elif operation in _CHANGES and file.joined == home:
            file.unsynced_there = True
        return answer

    async def look_at_home(self, file: OpenInode) -> None:
        """Core has the attributes of a file that we have joined on return, as far as its home
        tells."""
        file.handles += 1
        try:
            if file.is_joined:
                await self.at_home(file, Operation.LOOK)
        except Unavailable as error:
            _log.info("what is known of inode %d may be old: %s", file.inode.ino, error)
        finally:
            await self.release(file)

    def is_joined(self, ino: int) -> bool:
        """Whether it is open here, and changed by way of its home, which is another host."""
        file = self.open.get(ino)
        return file is not None and file.is_joined

    async def _leave_home(self, file: OpenInode) -> None:
        home, file.joined, file.unsynced_there = file.joined, 0, False
        try:
            await self._homes.leave(home, file.inode.ino)
        except Stale:
            pass  # it has ended since
        except FsError as error:
            _log.info(
                "inode %d may stay undrained until this mount ends: %s", file.inode.ino, error
            )

    async def set_mtime_at_home(self, ino: int, mtime_ns: int) -> None:
        """The mtime of any inode is going to be set: its home, if that is another host, gives it up
        before, or sets it, too."""
        inode, changer, _ = await self._engine.view(forms.load, ino)
        is_here = inode.copy is None or not self._homes.of(inode.copy.server)
        if inode.is_file and not (is_here and changer in (None, self._engine.host)):
            file = await self.acquire(ino)
            try:
                while await self.take_from_home(file):
                    if await self.at_home(file, Operation.SET_MTIME, mtime_ns):
                        break
            finally:
                await self.release(file)

    async def follow_bytes(self, ino: int) -> None:
        """Another host has moved or changed the bytes of a file that may be open here: those who
        read it go on with what it is now.
        """
        while ino in self._opening:
            await self._opening[ino].wait()
        token, file = self.overtaken.get(ino), self.open.get(ino)
        if file is not None:
            file.handles += 1  # or it might be closed meanwhile, and opened anew
            try:
                async with alone([file]):
                    await self.transitions.look_again(file)
                if file.unsynced_there and not file.is_joined:
                    file.unsynced_there = False
                    why = f"inode {ino}: its home has begun a new session, or has ended"
                    file.lost = LostBytes(0, why)
            finally:
                await self.release(file)
        if self.overtaken.get(ino) is token:
            self.overtaken.pop(ino, None)

    def _ready(self, file: OpenInode, end: int) -> bool:
        if file.copy is not None:
            return file.inode.in_burst and file.marked and file.lease is None
        return self.capacity.ready(file, end)

    async def _prepare(self, file: OpenInode, end: int) -> None:
        file.cancel_lease()
        must = self._must_be_in_burst(file, end)
        if file.copy is not None or (file.inode.layout is None and end > self._inline_limit):
            if not await self.burst.enter(file, end, must):
                return
        if not (file.inode.in_burst or must):
            await self.capacity.prepare(file, end)

    async def _bring(self, file: OpenInode, end: int) -> bool:
        """See BurstIO.bring; waits for room if there has to be some. Returns whether the file can
        be changed in the burst tier alone."""
        must = self._must_be_in_burst(file, end)
        if must:
            await self._tier.make_room(file.inode.space, self._held)
        await self.burst.bring(file, must)
        return must

    def _held(self, server: int) -> int:
        """Bytes of the copies on a burst device that cannot be evicted, drained or not, as programs
        have them open; without pinned ones.
        """
        return sum(
            self._tier.bytes_of(file.copy.id)
            for file in self.open.values()
            if file.copy is not None
            and file.copy.server == server
            and (file.users or file.opening)
            and not (file.inode.policy is not None and file.inode.policy.tier == "pinned")
        )

    def _must_be_in_burst(self, file: OpenInode, end: int) -> bool:
        """Whether a change of the file, up to ``end``, needs a burst copy, which it has not. Where
        there is no room for one, who wants to change it waits.
        """
        if file.copy is not None or file.on_object:
            return False
        return not self.capacity.may_change(file.inode, end)

    async def begin_writing(self, file: OpenInode) -> None:
        """A handle that can write is about to be made: the file goes to the burst tier if that
        admits it. Until the caller has made the handle, or not, ``opening`` counts it.
        """
        while True:
            if await self.take_from_home(file):
                file.opening += 1
                return
            try:
                if await self._begin_writing(file):
                    return
            except forms.ChangedElsewhere:
                await self.follow_bytes(file.inode.ino)

    async def _begin_writing(self, file: OpenInode) -> bool:
        """Whether it could be done; else it is to be tried once more."""
        end = file.inode.size
        await self.burst.bring(file, self._must_be_in_burst(file, end), opened=True)
        await file.gate.enter_alone()
        try:
            file.cancel_lease()
            file.changes += 1
            if not await self.burst.enter(file, 0):
                return False
            if file.on_object:
                # Mappings are written to without our knowing.
                self.capacity.perhaps_mapped.add(file.inode.ino)
                await self.capacity.prepare(file, file.inode.size)
            elif self._engine.host and self.capacity.is_changed_in_place(file):
                await self.capacity.prepare(file, file.inode.size)  # this host is its home now
            if file.inode.in_burst:
                assert file.copy is not None  # it is the file
                await file.copy.ensure_open()
                # What the copy tells from now on is a change: by the clock of file times, which
                # lags behind ours, it may seem to be earlier than the mtime on record.
                self.burst.look(file)
            file.opening += 1
            return True
        finally:
            file.gate.leave_alone()

    # --- size ---

    async def truncate(self, file: OpenInode, size: int) -> None:
        """ftruncate(2)."""
        if size > SIZE_MAX:
            raise FileTooLarge()
        done = False
        while not done:
            if await self.take_from_home(file, is_emptied=size == 0):
                done = bool(await self.at_home(file, Operation.TRUNCATE, size))
                continue
            try:
                done = await self._truncate(file, size)
            except forms.ChangedElsewhere:
                await self.follow_bytes(file.inode.ino)
        if file.unsaved:
            await self.transitions.save(file)

    async def _truncate(self, file: OpenInode, size: int) -> bool:
        """Whether it could be done; else it is to be tried once more."""
        must = size > 0 and await self._bring(file, size)
        await file.gate.enter_alone()
        try:
            file.cancel_lease()
            file.changes += 1
            if size or file.copy is not None:
                if not await self.burst.enter(file, size, must):
                    return False
            if file.inode.in_burst:
                await self.burst.truncate(file, size)
            elif size and self._must_be_in_burst(file, size):
                return False
            else:
                await self.capacity.truncate(file, size)
            return True
        finally:
            file.gate.leave_alone()

    # --- durability ---

    async def sync(self, file: OpenInode) -> None:
        """Bytes and attributes are on stable storage when this returns. Raises NoSpace,
        Unavailable, also where bytes are lost and no program has been told so.
        """
        if file.is_joined:
            await self.at_home(file, Operation.SYNC)
        try:
            if file.home:
                pass  # what was read here is not ours to sync
            elif file.inode.in_burst:
                await self.burst.sync(file)
                if file.inode.in_burst:
                    await self.mirrors.keep(file.inode, file.own_copy)
            else:
                await self.capacity.sync(file)
        except FsError:
            file.note_lost()
            raise
        if file.lost is not None and file.lost.reason:
            raise Unavailable(f"bytes were lost earlier: {file.lost.reason}")

    async def fsync(self, file: OpenInode) -> None:
        """As ``sync``, for a program. What could not be written back it is told, even if the file
        has been closed since; no other program that opens the file later is.
        """
        try:
            await self.sync(file)
        except FsError:
            if file.lost is not None:
                file.lost = file.lost._replace(reason="")
            raise

    def note_lost(self, ino: int, lost: LostBytes) -> None:
        """Bytes of a file could not be made durable, which was not open when that was tried."""
        file = self.open.get(ino)
        if file is not None:
            file.lost = lost
        elif ino in self.unsynced:
            self.unsynced[ino], self._lost[ino] = None, lost

    def has_lost(self, ino: int) -> bool:
        """Whether bytes of a closed file are lost: another sync changes nothing."""
        return ino in self._lost

    def is_unsynced(self, ino: int) -> bool:
        """Whether a regular file may have bytes or attributes that are not on stable storage."""
        file = self.open.get(ino)
        return ino in self.unsynced if file is None else file.marked or file.unsaved

    async def forget_marks(self, synced: Mapping[int, object | None]) -> None:
        """Remove the dirty marks of closed files; see ``forgetting``."""
        with self.forgetting(synced) as inos:
            if inos:
                await self._engine.transact(forms.remove_marks, inos)

    @contextmanager
    def forgetting(self, synced: Mapping[int, object | None]) -> Iterator[Collection[int]]:
        """Files that have been synced: by inode number, the token that each had in ``unsynced``
        before. Which of them nobody has opened since; a transaction within the block is to remove
        their dirty marks. It must wait for nobody who opens files.
        """
        quiet = [
            ino
            for ino, token in synced.items()
            if token is not None and self.unsynced.get(ino) is token
        ]
        with self.opening(*quiet, lent=True) as inos:
            yield inos
            for ino in inos:
                self.unsynced.pop(ino, None)


class _Claims:
    """A context manager: of some inodes those that could be claimed."""

    __slots__ = ("_inos", "_io", "_lent")

    def __init__(self, io: FileIO, inos: Iterable[int], lent: bool) -> None:
        self._io, self._inos, self._lent = io, inos, lent

    def __enter__(self) -> Collection[int]:
        is_open = self._io.is_open if self._lent else self._io.recall
        self._inos = {ino for ino in self._inos if not is_open(ino)}
        for ino in self._inos:
            self._io.begin_opening(ino)
        return self._inos

    def __exit__(self, *_: object) -> None:
        for ino in self._inos:
            self._io.end_opening(ino)


class _Opening:
    """A claim on an inode that is not open.

    ``stored``: what the newest transaction meanwhile has made of its record; ``forgotten``: see
    OpenInode.
    """

    __slots__ = ("_ended", "forgotten", "stored")

    def __init__(self) -> None:
        self.stored: Inode | None = None
        self.forgotten = False
        self._ended: trio.Event | None = None  # made by who waits, as seldom anybody does

    async def wait(self) -> None:
        """Wait for its end."""
        if self._ended is None:
            self._ended = trio.Event()
        await self._ended.wait()

    def end(self) -> None:
        if self._ended is not None:
            self._ended.set()
