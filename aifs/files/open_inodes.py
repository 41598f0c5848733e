"""Inodes in core: the first need brings one in, the last settles it and records what core knows.
Attributes of what is in core are read and changed here, too."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import trio

from aifs.burst.copy import BurstCopy
from aifs.burst.remote import Homes
from aifs.burst.tier import BurstTier
from aifs.core.errors import FsError, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import Work
from aifs.data.objects.recovery import forget_columns
from aifs.data.patience import giving_up
from aifs.files.burst_io import BurstIO
from aifs.files.capacity_io import CapacityIO, count_blocks
from aifs.files.forecast import Forecast, Kin
from aifs.files.object_sets import ObjectSets
from aifs.files.open_inode import OpenInode
from aifs.files.open_table import OpenTable
from aifs.files.services import Services
from aifs.files.transitions import Transitions
from aifs.meta import forms, moves, namespace
from aifs.meta.records import Inode

_log = logger(__name__)

ACCESSES_S = 10.0
"""How often accesses are recorded of files that were opened without us."""

_ACCESSES = 256  # in one transaction


class OpenInodes:
    """Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        table: OpenTable,
        sets: ObjectSets,
        transitions: Transitions,
        capacity: CapacityIO,
        burst: BurstIO,
        homes: Homes,
    ) -> None:
        self._engine = services.engine
        self._servers = services.servers
        self._tier = tier
        self._table = table
        self._sets = sets
        self._transitions = transitions
        self._capacity = capacity
        self._burst = burst
        self._handles = table.handles
        self._collector = services.collector
        self._homes = homes
        self._upkeep = services.upkeep
        self._inline_limit = services.config.layout.inline_limit
        self.commit_interval_s = services.config.meta.commit_interval_s
        """How often in-core attributes are saved while files are open."""
        self.forecast = Forecast(self._inline_limit)
        """Which new files need no burst copy."""
        self.is_resting = True
        """Write-back has found no open file, and none has been opened since."""
        self.find_room = services.servers.descriptors.find_room
        """Waits, before something is opened, until there are descriptors for it."""
        services.servers.descriptors.add_users(table.open.values)
        # Files there are read elsewhere, or not any more.
        services.servers.tell_of("burst", table.handles.recall_all)

    # --- into core, and out of it ---

    async def acquire(self, ino: int) -> OpenInode:
        """The open inode of a file, with one more handle. Raises NotFound, Stale, Unavailable."""
        await self.find_room()
        while (file := self._table.open.get(ino)) is None:
            if ino in self._table.claims:
                await self._table.claims[ino].wait()
                continue
            self._table.begin_opening(ino)
            try:
                inode, changer, unread = await self._engine.view(forms.load, ino)
                if not inode.is_file:
                    raise Stale(f"inode {ino} is not a regular file")
                self._note_open()
                file = self._table.open[ino] = self._opened(inode, changer, unread)
                self._handles.take_back(file)
                if ino in self._table.forgotten:
                    self._table.forgotten.discard(ino)
                    file.forgotten = True
            finally:
                self._table.end_opening(ino)
        file.handles += 1
        file.used = True
        return file

    @asynccontextmanager
    async def held(self, ino: int) -> AsyncIterator[OpenInode]:
        """The same, for as long as the block lasts."""
        file = await self.acquire(ino)
        try:
            yield file
        finally:
            with trio.CancelScope(shield=True):
                await self.release(file)

    def _opened(self, inode: Inode, changer: int | None, unread: int) -> OpenInode:
        file = OpenInode(inode, self._sets.objects_of(inode, unread), marked=False)
        file.lost = self._table.lost.pop(inode.ino, None)
        file.outlived = inode.ino in self._table.mapped
        self._transitions.find_copy(file, changer)
        return file

    def wake(self) -> None:
        """There may be something to write back, though nothing is opened."""
        self._note_open()

    def _note_open(self) -> None:
        if self.is_resting:
            self.is_resting = False
            now_s = trio.current_time()
            self._upkeep.at(Work.WRITE_BACK, now_s + self.commit_interval_s)
            self._upkeep.at(Work.WATCH_SERVERS, now_s + self._servers.watch_again_s(is_busy=True))

    def adopt_new(self, inode: Inode, copy: BurstCopy | None, kin: Kin | None) -> OpenInode:
        """The open inode of a new file, with one handle; ``opening`` counts it until the kernel has
        its handle."""
        self._note_open()
        file = self._table.open[inode.ino] = OpenInode(inode, None, marked=False)
        file.handles = file.opening = 1
        file.kin = kin
        if copy is not None:
            self._transitions.adopt_new(file, copy)
        return file

    async def release(self, file: OpenInode) -> None:
        """Give one handle back; the last one settles the objects' lengths, and forgets the
        state."""
        file.handles -= 1
        if file.joined and not file.may_be_written:
            await self._leave_home(file)
        if file.handles:
            return
        ino = file.inode.ino
        await file.gate.enter_alone()
        try:
            if file.handles or self._table.open.get(ino) is not file:
                return
            token = None
            if file.inode.nlink and file.marked:
                token = await self._settle_at_close(file)
            if file.handles:
                return
            if file.unsaved:
                try:
                    await self._transitions.save(file)
                except FsError as error:
                    _log.info(
                        "inode %d stays open until its attributes can be recorded: %s", ino, error
                    )
                    return
            if file.handles:
                return
            file.note_lost()
            if file.inode.nlink and file.lost and (file.lost.reason or file.has_lost):
                self._table.lost[ino] = file.lost
            del self._table.open[ino]
            if ino in self._table.stale or ino in self._table.overtaken:
                self._handles.leave(file)
            else:
                self._handles.lend(file)
            if file.objects is not None:
                file.objects.close()
            self._transitions.detach(file)
        finally:
            file.gate.leave_alone()
        if file.kin is not None and file.inode.nlink:
            self.forecast.closed(file.kin, file.inode.size, file.changes)
        if file.inode.nlink == 0:
            if file.forgotten:
                self._collector.add_orphan(ino)
        elif file.marked and not self._is_missing(file.inode):
            self._table.unsynced[ino] = None if ino in self._table.lost else token
            if file.outlived or ino in self._capacity.perhaps_mapped:
                self._table.mapped.add(ino)
                return
        else:
            self._table.unsynced.pop(ino, None)
        self._table.mapped.discard(ino)

    def _is_missing(self, inode: Inode) -> bool:
        """Whether the store was mounted without its bytes: there is nothing to sync."""
        copy = inode.copy if inode.in_burst else None
        server = copy and self._servers.find(copy.server)
        return bool(server and server.absent)

    async def _settle_at_close(self, file: OpenInode) -> object | None:
        try:
            if file.inode.in_burst:
                assert file.copy is not None  # it is the file
                await file.copy.ensure_open()
                self._burst.look(file)
                if file.inode.size <= self._inline_limit:
                    await self._burst.become_inline(file)
                file.outlived = file.inode.in_burst and not await self._burst.settle(file)
                if file.outlived:
                    return None  # a mapping outlives its handle, so the mark is not removed unseen
            else:
                with giving_up():  # nobody waits for that, but an unmount
                    await self._capacity.look(file)
                    await self._capacity.settle(file)
            return None if file.inode.ino in self._capacity.perhaps_mapped else object()
        except FsError as error:
            # The dirty mark stays, so write-back, which says that it has to wait, or the next mount
            # will try again.
            _log.info("inode %d could not be settled at close: %s", file.inode.ino, error)
            return None

    def drop_kept(self, file: OpenInode) -> None:
        """See Handles."""
        self._handles.drop_kept(file)

    async def is_used(self, file: OpenInode) -> bool:
        """See Handles."""
        return await self._handles.is_used(file)

    async def _leave_home(self, file: OpenInode) -> None:
        home, number = file.joined, file.joined_as
        file.joined = file.joined_as = 0
        file.unsynced_there = None
        try:
            await self._homes.leave(home, file.inode.ino, number)
        except Stale:
            pass  # it has ended since
        except FsError as error:
            _log.info(
                "inode %d may stay undrained until this mount ends: %s", file.inode.ino, error
            )

    # --- attributes ---

    def attributes(self, file: OpenInode) -> Inode:
        """The inode as stat(2) shows it. Does not block."""
        inode = file.inode
        if file.marked:
            if not inode.in_burst:
                count_blocks(file)
            else:
                assert file.copy is not None  # it is the file
                if file.copy.is_open:
                    self._burst.look(file)
            file.shown = (inode.mtime_ns, inode.blocks)
        return inode

    async def look(self, ino: int) -> Inode:
        """The inode as stat(2) shows it, of a file that is perhaps mapped but not open; as known if
        its copy cannot be looked at. Raises as ``acquire``."""
        async with self.held(ino) as file:
            if file.marked and file.inode.in_burst and not file.own_copy.is_open:
                with suppress(Unavailable):
                    await file.own_copy.ensure_open()
            await self._capacity.look(file)
            return self.attributes(file)

    def is_on_record(self, ino: int) -> bool:
        """Whether its record is what stat(2) should show, and the kernel may keep that."""
        table = self._table
        is_ours = ino in table.open or ino in table.mapped or ino in table.told.inos
        return not is_ours and not self._handles.was_accessed(ino)

    def current(self, inode: Inode) -> Inode:
        """An inode of which this is on record, as stat(2) should show it now. Does not block."""
        file = self._table.open.get(inode.ino)
        return self._handles.accessed(inode) if file is None else self.attributes(file)

    async def change(
        self,
        ino: int,
        change: Callable[[Inode, Any], None],
        argument: Any,
        mtime_ns: int | None = None,
    ) -> Inode:
        """Apply ``change(inode, argument)`` to any inode, on record and in core, or to neither.
        Returns the inode. ``mtime_ns``: also for its burst copy. Raises NotFound, and what
        ``change`` raises."""
        while True:
            file = self._table.open.get(ino)
            stays_lent = self._handles.stays_lent(ino)
            if file is not None:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
            elif ino not in self._table.claims and not stays_lent:
                if ino in self._capacity.perhaps_mapped:
                    file = await self.acquire(ino)
                elif self._handles.recall(ino) or self._handles.was_accessed(ino):
                    file = await self.acquire(ino)
            if file is not None:
                try:
                    if file.home:  # whose copy is none of ours
                        mtime_ns = None
                    if mtime_ns is not None and file.inode.in_burst:
                        await self._burst.know_mtime(file)
                    await self._capacity.look(file)
                    await self._transitions.change_attributes(file, change, argument)
                    if mtime_ns is not None and file.inode.in_burst:
                        await self._burst.set_mtime(file, mtime_ns)
                    return self.attributes(file)
                finally:
                    await self.release(file)
            if ino in self._table.claims:
                await self._table.claims[ino].wait()
                continue
            self._table.begin_opening(ino)
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
                self._table.end_opening(ino)

    async def save_all(self) -> None:
        """Record the attributes of every open file; close files whose close failed or was
        cancelled."""
        if self._engine.host:  # others see what was written past us when it is on record
            for file in self._table.open.values():
                if file.backing and file.writers and file.inode.in_burst and file.own_copy.is_open:
                    self._burst.look(file)
        for file in [f for f in self._table.open.values() if f.unsaved or not f.handles]:
            if file.unsaved and file.handles:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
                try:
                    await self._transitions.save(file)
                finally:
                    await self.release(file)
            if not file.handles and file.gate.is_free:
                file.handles = 1
                await self.release(file)

    def follow(self, stored: Inode) -> bool:
        """Take over another host's record of an inode. Whether it is open here. Does not block."""
        file, ino = self._table.adopt(stored), stored.ino
        objects = stored.objects
        if objects is not None and not objects.is_protected:  # those are written in place
            forget_columns(self._servers.cache, objects, (stored.named_by, stored.oid))
        if file is None:
            if ino in self._table.claims:
                self._table.overtake(ino)
            return self._table.recall(ino)
        if file.marked:  # by us; or we have given it up just now, and core does not say so yet
            is_overtaken = not namespace.has_form_of(stored, file.inode)
        else:
            is_overtaken = self._transitions.follow(file, stored)
        if is_overtaken:
            self._table.overtake(ino)
        return True

    async def lose_columns(self, ino: int, oid: int, mask: int) -> bool:
        """Read damaged columns no more. Whether that is on record (see moves.put_damaged). Does not
        wait for the gate, which the reader of a column found wrong may hold."""
        ino = await self._engine.view(moves.find_user, ino, oid)
        while True:
            file = self._table.open.get(ino)
            if file is not None:
                file.handles += 1  # or it might be closed meanwhile, and opened anew
                try:
                    with self._servers.blocks.finding():
                        done = await self._transitions.lose_columns(file, oid, mask)
                        if done:
                            self._table.overtake_objects(oid, but=file)
                            self._servers.blocks.correct(oid)  # they were read when it was wrong
                    return done
                finally:
                    await self.release(file)
            if ino in self._table.claims:
                await self._table.claims[ino].wait()
                continue
            with self._table.opening(ino, lent=True), self._servers.blocks.finding():
                done = await self._engine.transact(moves.put_damaged, oid, ino, mask) != 0
                if done:
                    self._table.overtake_objects(oid)
                    self._handles.places.take_objects(oid)
                    self._servers.blocks.correct(oid)
                return done

    # --- uses that we hear of later ---

    def hear_of_uses(self) -> None:
        """Of copies of files that were opened without us. Does not block."""
        for copy_id in self._handles.used_copies():
            self._tier.touch(copy_id)

    async def record_accesses(self) -> float:
        """Record accesses of files opened by the bridge; returns seconds until the next time."""
        self.hear_of_uses()
        inos = self._handles.accessed_inos
        for start in range(0, len(inos), _ACCESSES):
            with self._table.opening(*inos[start : start + _ACCESSES], lent=True) as claimed:
                times = self._handles.find_accessed(claimed)
                await self._engine.transact(forms.put_access_times, times)
                self._handles.forget_accessed(times)
        return ACCESSES_S
