"""Every read, write, truncation and fsync of regular files.

A file's newest bytes lie in the burst tier (``burst_io``), or in its inode or on the data servers
(``capacity_io``), here or at another host (``by_home``): decided here, under the file's gate.
"""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Any

import trio

from aifs.burst.mirrors import Mirrors, NoMirrors
from aifs.burst.pool import Pool
from aifs.burst.remote import Homes, Operation
from aifs.burst.tier import BurstTier
from aifs.burst.transfer import Limiter, Mover
from aifs.core.errors import FileTooLarge, FsError, NoSpace, Stale, Unavailable
from aifs.core.log import logger
from aifs.core.upkeep import Work
from aifs.data.checks import HASHED
from aifs.files.burst_io import BurstIO
from aifs.files.by_home import ByHome, HomeHere
from aifs.files.capacity_io import CapacityIO
from aifs.files.containers import Containers
from aifs.files.damage import Damage, Needs
from aifs.files.handles import Handles
from aifs.files.object_sets import ObjectSets
from aifs.files.open_inode import OpenInode
from aifs.files.open_inodes import OpenInodes
from aifs.files.open_table import OpenTable
from aifs.files.services import Services
from aifs.files.settled import SettledReads
from aifs.files.stage import Stager
from aifs.files.together import Together
from aifs.files.transitions import Transitions
from aifs.files.types import SIZE_MAX
from aifs.meta import forms
from aifs.peers.transport import FilePart

_log = logger(__name__)

_PIECE = 1 << 20


def _always() -> bool:
    return True


class FileIO:
    """Everything that touches file bytes; its parts are for those who look after files."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        containers: Containers,
        damage: Damage,
        needs: Needs,
        handles: Handles,
        pool: Pool,
    ) -> None:
        """Makes the parts that it uses, from the lowest to the highest."""
        config, engine, servers = services.config, services.engine, services.servers
        peers, is_shared = services.peers, services.peers.is_shared
        self._engine = engine
        self._servers = servers
        self._upkeep = services.upkeep
        self._tier = tier
        self._quotas = services.quotas
        self._inline_limit = config.layout.inline_limit
        self._find_room = servers.descriptors.find_room
        self._places = handles.places
        self._places.read_containers(containers.files)
        self.containers = containers
        self.homes = homes = Homes(engine, servers, peers, config.host.home_wait_s)
        """Other hosts, as homes of files."""
        self.mirrors = (Mirrors if is_shared else NoMirrors)(engine, peers)
        """The copies of undrained files on other hosts."""
        self.table = OpenTable(engine, handles, services.collector)
        """Which files are open."""
        self.together = Together(servers.cache, peers)
        """Reads that hosts share."""
        verify = config.data.verify == "read"
        self.sets = ObjectSets(
            engine, servers, containers, self.table, damage, pool, verify, self.together
        )
        """What holds bytes on the capacity tier."""
        self.transitions = Transitions(
            engine,
            tier,
            services.collector,
            damage,
            containers,
            self.sets.objects_of,
            homes,
            handles.places,
        )
        """Changes of forms."""
        urgent = Mover(servers.budget, Limiter(0), "none", is_urgent=_always)
        self.waited_for = self.sets.movers(urgent)
        """Processes that carry out work that a request waits for."""
        self.capacity = CapacityIO(
            config, engine, servers, services.ids, containers, self.transitions, self.waited_for
        )
        """Changes on the capacity tier."""
        self.burst = BurstIO(config, engine, tier, self.transitions, needs)
        """Changes in the burst tier."""
        self.inodes = OpenInodes(
            services,
            tier,
            self.table,
            self.sets,
            self.transitions,
            self.capacity,
            self.burst,
            homes,
        )
        """What is in core."""
        by_home = ByHome if is_shared else HomeHere
        self.by_home = by_home(engine, homes, self.transitions, self.table, self.inodes)
        """Files whose home is another host."""
        staging = Mover(servers.budget, Limiter(0), config.burst.ioprio, is_urgent=_always)
        self.stager = Stager(
            services,
            tier,
            self.transitions,
            self.capacity,
            self.sets.movers(staging),
            self.inodes,
            self.by_home,
        )
        """Copies of clean files into the burst tier."""
        self.settled = SettledReads(engine, servers, tier, containers.files, self.table, verify)
        """Reads of many small files."""

    # --- reads ---

    async def read(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """Up to ``length`` bytes; fewer only at the end of the file. Raises Unavailable for lost
        bytes (I2).
        """
        inode = file.inode
        file.used = True
        await self._find_room()
        while True:
            if file.is_joined:
                if answer := await self.by_home.at_home(file, Operation.READ, offset, length):
                    assert not isinstance(answer.body, FilePart)  # it has arrived
                    return memoryview(answer.body)
                continue
            while inode.ino in self.table.overtaken:
                await self.by_home.follow_bytes(inode.ino)
            if inode.in_burst and file.backing and not file.home:
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
                    if offset == 0 and not file.marked:
                        self.stager.read(inode)
                    assert objects is not None  # it has a layout
                    data = await objects.read(offset, wanted, inode.size, strict)
                    if file.objects is objects or file.objects is None:
                        if file.placed is not objects and inode.ino not in self.table.overtaken:
                            await self._places.give(file)
                        return data
                    continue  # it may have come from a column that is being made anew since then
                return await self.burst.read(file, offset, wanted)
            except Stale:
                await self.by_home.follow_bytes(inode.ino)
                if file.copy is copy:
                    raise
            except Unavailable:
                overtaken = (
                    copy is not file.copy
                    or objects is not file.objects
                    or (strict and file.marked)
                    or inode.ino in self.table.overtaken
                )
                if (
                    not overtaken
                ):  # else a truncation went on meanwhile, and the bytes may rightly be gone
                    raise

    async def read_whole(self, ino: int) -> bytes:
        """All of a small file. Others run meanwhile. Raises NotFound, Stale, Unavailable."""
        data = bytearray()
        async with self.inodes.held(ino) as file:
            while piece := await self.read(file, len(data), _PIECE):
                data += piece
                await trio.lowlevel.checkpoint()
        return bytes(data)

    async def read_to_copy(self, file: OpenInode, offset: int, length: int) -> bytes | memoryview:
        """``read`` for bytes of another file: those from servers are compared with checksums.
        Raises Untold."""
        size, objects, changes = file.inode.size, file.objects, file.changes
        if file.copy is not None or objects is None or file.marked or file.home:
            return await self.read(file, offset, length)
        start = offset - offset % HASHED
        end = min(size, offset + length + -(offset + length) % HASHED)
        data = memoryview(bytearray(max(0, end - start)))
        source = await self.sets.to_be_copied(file.inode)
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

    # --- writes ---

    async def write(self, file: OpenInode, offset: int, data: bytes | memoryview) -> None:
        """Write all of ``data``, or raise an error with nothing written.

        The bytes are in a page cache on return, and a new size is in the journal or in the burst
        copy: both survive the daemon's death.
        """
        end = offset + len(data)
        self._require_room(file, end)
        async with self.growing(file, end):
            if data:
                await self._until_done(file, self._write, offset, data)

    async def _write(
        self, file: OpenInode, offset: int, data: bytes | memoryview
    ) -> bool | NoSpace:
        if not await self.enter_to_change(file, offset + len(data)):
            return bool(await self.by_home.at_home(file, Operation.WRITE, offset, body=data))
        try:
            if file.inode.in_burst:
                await self.burst.write(file, offset, data)
            elif file.inode.layout is None:
                await self.capacity.write_inline(file, offset, data)
            else:
                await self.capacity.write_objects(file, offset, data)
            return True
        except NoSpace as error:
            return error
        finally:
            file.gate.leave_shared()

    async def append(self, file: OpenInode, data: bytes | memoryview) -> None:
        """``write`` at the end of the file, with nothing of others between. With one host, the
        kernel sees to that."""
        async with self.growing(file, file.inode.size + len(data)):
            if data:
                await self._until_done(file, self._append, data)

    async def _append(self, file: OpenInode, data: bytes | memoryview) -> bool | NoSpace:
        end = file.inode.size + len(data)
        self._require_room(file, end)
        if not await self.enter_to_change(file, end):
            return bool(await self.by_home.at_home(file, Operation.APPEND, body=data))
        file.gate.leave_shared()
        await file.gate.enter_alone()
        try:
            end = file.inode.size + len(data)
            if not self._ready(file, end):
                return False
            file.changes += 1
            if file.inode.in_burst:
                await self.burst.append(file, data)
            elif file.inode.layout is None:
                await self.capacity.append_inline(file, data)
            else:
                await self.capacity.write_objects(file, end - len(data), data)
            return True
        except NoSpace as error:
            return error
        finally:
            file.gate.leave_alone()

    async def _until_done(
        self, file: OpenInode, change: Callable[..., Awaitable[bool | NoSpace]], *args: Any
    ) -> None:
        """Repeat a change until it is done: if another host has changed the file meanwhile, and
        once if there was no room and the trash could give way."""
        done: bool | NoSpace = False
        was_full = False
        while done is not True:
            try:
                done = await change(file, *args)
            except forms.ChangedElsewhere:
                done = False
                await self.by_home.follow_bytes(file.inode.ino)
            if isinstance(done, NoSpace):
                if was_full:
                    raise done
                was_full = True
                self._servers.is_refused_room = True
                await self._upkeep.have_done(Work.TRASH)

    def _require_room(self, file: OpenInode, end: int) -> None:
        """Raises FileTooLarge, NoSpace if the file cannot get so large."""
        if end > SIZE_MAX:
            raise FileTooLarge()
        if self._engine.short_of_space and end > file.inode.size and not file.inode.in_burst:
            raise NoSpace("the metadata store's filesystem is full")

    def growing(self, file: OpenInode, end: int) -> AbstractAsyncContextManager[None]:
        """Let the file grow up to ``end`` within the block. Raises QuotaExceeded. A home that is
        another host asks for itself."""
        if not file.inode.project or file.is_joined:
            return nullcontext()
        return self._quotas.growing(file, end)

    async def enter_to_change(self, file: OpenInode, end: int) -> bool:
        """Enter the gate, shared, of a file that can be changed in its form up to ``end``. False:
        not entered, the file is changed by way of its home (``at_home``)."""
        gate = file.gate
        file.used = True
        await self._find_room()
        await gate.enter_shared()
        while not self._ready(file, end):
            # Asked each time that we had to wait: others change the form, too.
            gate.leave_shared()
            if await self.by_home.take_from_home(file):
                return False
            try:
                await self._bring(file, end)
                await gate.enter_alone()
                try:
                    await self._prepare(file, end)
                finally:
                    gate.leave_alone()
            except forms.ChangedElsewhere:
                await self.by_home.follow_bytes(file.inode.ino)
            await gate.enter_shared()
        file.changes += 1
        return True

    def _ready(self, file: OpenInode, end: int) -> bool:
        if file.copy is not None:
            return file.inode.in_burst and file.marked and file.lease is None
        return self.capacity.ready(file, end)

    async def _prepare(self, file: OpenInode, end: int) -> None:
        file.cancel_lease()
        await self._take_source(file)
        must = self._must_be_in_burst(file, end)
        if file.copy is not None or (file.inode.layout is None and end > self._inline_limit):
            if not await self.burst.enter(file, end, must):
                return
        if not (file.inode.in_burst or must):
            await self.capacity.prepare(file, end)

    async def _take_source(self, file: OpenInode) -> None:
        """See BurstIO.take_source; one object of a file stays."""
        handles = self.table.handles
        handles.drop_kept(file)
        await self.burst.take_source(file)
        await handles.keep_object(file)

    async def _bring(self, file: OpenInode, end: int) -> bool:
        """See Stager.bring; waits for room if needed. False: not to be changed in the burst tier
        alone."""
        self.table.handles.drop_kept(file)
        must = self._must_be_in_burst(file, end)
        if must:
            await self._tier.make_room(file.inode.space, self._held)
        await self.stager.bring(file, must)
        return must

    def _held(self, server: int) -> int:
        """Bytes of copies on a burst device that open files hold; without pinned ones."""
        return sum(
            self._tier.bytes_of(file.copy.id)
            for file in self.table.open.values()
            if file.copy is not None
            and file.copy.server == server
            and (file.users or file.opening)
            and not (file.inode.policy is not None and file.inode.policy.tier == "pinned")
        )

    def is_inline(self, file: OpenInode, end: int) -> bool:
        """Whether the file is in its record, also when it has ``end`` bytes."""
        inode = file.inode
        return inode.layout is None and inode.copy is None and end <= self._inline_limit

    def _must_be_in_burst(self, file: OpenInode, end: int) -> bool:
        """Whether a change up to ``end`` needs a burst copy that is not there; without room it
        waits."""
        if file.copy is not None or file.on_object or file.on_source:
            return False
        return not self.capacity.may_change(file.inode, end)

    async def begin_writing(self, file: OpenInode) -> None:
        """A handle that can write is about to be made: the file goes to the burst tier if that
        admits it. Until the caller has made the handle, or not, ``opening`` counts it.
        """
        await self._until_done(file, self._begin_writing)

    async def _begin_writing(self, file: OpenInode) -> bool:
        if await self.by_home.take_from_home(file):
            file.opening += 1
            return True
        end = file.inode.size
        self.table.handles.drop_kept(file)
        await self.stager.bring(file, self._must_be_in_burst(file, end), opened=True)
        await file.gate.enter_alone()
        try:
            file.cancel_lease()
            file.changes += 1
            await self._take_source(file)
            if not await self.burst.enter(file, 0):
                return False
            if file.on_object and file.backing:
                # Mappings are written to without our knowing.
                self.capacity.perhaps_mapped.setdefault(file.inode.ino, 0)
                await self.capacity.look(file)
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
        async with self.growing(file, size):
            await self._until_done(file, self._truncate, size)
        if file.unsaved:
            await self.transitions.save(file)

    async def _truncate(self, file: OpenInode, size: int) -> bool:
        if await self.by_home.take_from_home(file, is_emptied=size == 0):
            return bool(await self.by_home.at_home(file, Operation.TRUNCATE, size))
        must = size > 0 and await self._bring(file, size)
        await file.gate.enter_alone()
        try:
            file.cancel_lease()
            file.changes += 1
            await self._take_source(file)
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
        """Bring bytes and attributes to stable storage. Raises NoSpace, Unavailable, also for lost
        bytes of which no program has heard."""
        if file.is_joined:
            await self.by_home.at_home(file, Operation.SYNC)
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
        """``sync`` for a program: it hears of failed write-backs, also from before a close; no
        other program that opens the file later does."""
        try:
            await self.sync(file)
        except FsError:
            if file.lost is not None:
                file.lost = file.lost._replace(reason="")
            raise

    async def show(self, file: OpenInode, is_new: bool = False, mapped: bool = False) -> None:
        """Show what core knows of a file to other hosts, because a writer, perhaps by a mapping,
        closes it. On return they have seen it; a file that ``is_new`` is only on record, like its
        name. Without space, that happens later."""
        inode = file.inode
        try:
            if file.is_joined and await self.by_home.at_home(file, Operation.SHOW):
                return
            if inode.in_burst and file.own_copy.is_open:
                self.burst.look(file, mapped)
            if file.unsaved or not file.recording.is_free:  # what is under way is not shown yet
                await self.transitions.save(file)
            closed_as = inode.size, inode.mtime_ns
            if inode.nlink and not is_new and file.shown_as != closed_as:
                await self._engine.shown()
                file.shown_as = closed_as
        except FsError as error:
            _log.info("inode %d is not on record as it is: %s", inode.ino, error)

    def is_shown(self, file: OpenInode, is_new: bool, mapped: bool) -> bool:
        """Whether ``show`` has nothing to do, as for a new file. Does not block."""
        inode = file.inode
        if file.is_joined:
            return False
        if inode.in_burst and file.own_copy.is_open:
            self.burst.look(file, mapped)
        if file.unsaved or not file.recording.is_free:
            return False
        return not inode.nlink or is_new or file.shown_as == (inode.size, inode.mtime_ns)
