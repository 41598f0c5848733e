"""Ranks' requests to groups: begin, join, commit, wait, cancel (docs/design/commit.md)."""

import math
import os
import stat
import time
from typing import NamedTuple

import trio

from aifs.burst.tier import BurstTier
from aifs.core import faults
from aifs.core.errors import Busy, Invalid, NoAttribute, NotPermitted, TimedOut
from aifs.core.upkeep import Role
from aifs.core.waiting import DRAIN, PUBLISH, RANK, waits_for
from aifs.files import permissions, rights
from aifs.files.drain import Drain, Ended
from aifs.files.file_io import FileIO
from aifs.files.services import Services
from aifs.files.types import ROOT, CallerLike
from aifs.files.writeback import WriteBack
from aifs.meta import groups, namespace, paths
from aifs.meta.askers import Asker
from aifs.meta.groups import ANY_SIZE, GroupMember, GroupOptions, GroupRecord, Pending
from aifs.meta.kv import Engine
from aifs.meta.records import Dentry
from aifs.saves.closing import Closing
from aifs.saves.course import Course
from aifs.saves.group import DirectoryGroup
from aifs.saves.group_drain import GroupDrain
from aifs.saves.group_text import Wanted, format_group
from aifs.saves.joint import Joint, PartHost
from aifs.saves.life import Life, Living, process_of
from aifs.saves.listed import find_file, first_wrong, look_up, path_below
from aifs.saves.members import Members
from aifs.saves.parts import Parts
from aifs.saves.ready import Barrier, Naming
from aifs.saves.table import GroupTable
from aifs.store.ids import IdAllocator

_RANK = faults.declare(
    "vfs.group.rank", "a rank's commit to a group is in the journal, which is not synced yet"
)

_DIRECTORY = stat.S_IFDIR >> 12

_NAMED_MAX = 8  # processes that a message names


class Commit(NamedTuple):
    """A rank has written its part."""

    rank: int
    files: tuple[tuple[bytes, int], ...] | None = None
    """Its files, (path below the directory, bytes). None: all unsynced below, none needed later."""
    listing: bytes = b""
    """Path of a file that says it, which has to be there."""
    again: bool = False
    """It may have committed before."""
    sized: bytes = b""
    """Path of a file whose size is compared if all files have to have one."""


class Groups:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        barrier: Barrier,
        ids: IdAllocator,
        table: GroupTable,
        parts: Parts,
        course: Course,
        living: Living,
    ) -> None:
        self._engine = engine
        self._io = io
        self._barrier = barrier
        self._ids = ids
        self._table = table
        self._parts = parts
        self._course = course
        self._living = living

    # --- to begin ---

    async def begin(self, ino: int, wanted: Wanted, caller: CallerLike) -> DirectoryGroup:
        """Have the directory's group do what is wanted, on stable storage with the next commit.

        The present one is used if asked for the same, or pending, or to be pending with files; its
        commits count. Else a new one begins, after another job's rest, or, to begin anew, any, was
        cancelled. Raises Invalid: another is open, or of a job with live ranks; Busy: not durable
        yet; NotPermitted: only owners mark directories, except to begin anew after the processes'
        death; NotFound, NotADirectory.
        """
        asker = permissions.asker_of(caller)
        while True:
            number = await self._ids.take()
            async with self._table.recording:
                if wanted.mark is not None:
                    await self._require_may_mark(ino, wanted.anew, caller)
                there = self._table.by_directory.get(ino)
                reason = self._left_behind(there, wanted)
                if not reason:
                    try:
                        group = await self._begin_or_join(ino, there, wanted, asker, number)
                        break
                    except namespace.Overtaken:
                        continue  # the engine has told us of it
            assert there is not None
            await self._course.cancel(there, reason)
        if wanted.mark is not None:
            self._living.take_note(group, caller)
        return group

    async def _begin_or_join(
        self, ino: int, there: DirectoryGroup | None, wanted: Wanted, asker: Asker, number: int
    ) -> DirectoryGroup:
        now_ns, options = time.time_ns(), wanted.options
        pending = (
            None if wanted.mark is None else Pending(wanted.mark[0], now_ns, wanted.mark[1], asker)
        )
        if there is None or not there.is_held or wanted.anew:
            host = self._table.host
            record = GroupRecord(number, options, asker, now_ns, pending=pending, host=host)
            return await self._table.begin(ino, record, there)
        if pending is not None and there.pending is not None:
            _require_same_mark(there, options, pending)
        if there.is_live and there.shares:
            if options.shares:
                _require_same(there, options)
            if pending is None or there.pending is not None:
                return there
            _require_same_ranks(there, options)
            return await self._table.change(there, pending=pending)
        if not options.shares:
            return there
        _require_same_ranks(there, options)
        if there.is_open:
            return await self._table.change(there, options=options, asker=asker, created_ns=now_ns)
        host = self._table.host
        record = GroupRecord(number, options, asker, now_ns, pending=there.pending, host=host)
        return await self._table.begin(ino, record, there)

    def _left_behind(self, there: DirectoryGroup | None, wanted: Wanted) -> str:
        """Why the present group has to be cancelled before; ''. Raises Invalid: its ranks live."""
        if there is None or not there.is_live or not there.shares:
            return ""
        if wanted.anew:
            return "its directory is pending anew"
        job = wanted.options.job
        if not there.is_open or not wanted.options.shares or job in (b"", there.record.options.job):
            return ""
        self._living.look_at(there)
        there.require_left_to(job)
        return f"it was left behind: nobody of it lives, and job {job.decode()} has begun anew"

    async def _require_may_mark(self, ino: int, anew: bool, caller: CallerLike) -> None:
        """Require the owner, or, to begin anew, write permission if no process lives that marked it
        or joined its group. Raises NotPermitted, AccessDenied."""
        inode = await self._engine.view(namespace.get_directory, ino)
        there = self._table.by_directory.get(ino)
        if not anew or there is None or there.pending is None:
            rights.owner(inode, caller)
            return
        try:
            rights.owner(inode, caller)
        except NotPermitted:
            rights.writer(inode, caller)
            self._living.look_at(there)
            living = sorted({*there.processes.values(), *there.markers})
            whose = ", ".join(map(str, living[:_NAMED_MAX]))
            if not living and there.joined_elsewhere:
                whose = "of other hosts"
            if whose:
                raise NotPermitted(
                    "only its owner and root may begin anew while others save here: processes "
                    f"{whose}"
                ) from None

    async def join(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        """Make the asking process this rank. Raises Invalid, NotSupported, and the group's
        error."""
        group = await self._table.find(ino, group_id)
        group.require_rank(rank)
        process = process_of(caller.pid)
        if group.processes.get(rank) != process:
            group.require_free(rank)
            await self._parts.take(group, frozenset([rank]))
            try:
                group.join(rank, process)
            except Invalid:
                await self._parts.left(group, rank)
                raise
            self._living.watch(group, rank, process)
        group.wake()
        self._table.look()

    # --- to commit ---

    async def commit(self, ino: int, group_id: int, what: Commit) -> None:
        """Commit a rank: its files, or all unsynced below the directory, are durable in the burst
        tier on return, like the commit. The last one waits for the publish, and raises its error.
        Raises Invalid, and the group's error."""
        group = await self._table.find(ino, group_id)
        group.require_success()
        await self._commit(group, what)
        await self._settled(group)

    async def commit_pending(self, ino: int, what: Commit) -> None:
        """``commit`` for a pending directory's name, whatever its group's state; waits for no
        publish. Raises Invalid: not pending, no such rank, committed before, or a file missing in
        that size."""
        group = self._table.by_directory.get(ino)
        if group is None or group.pending is None:
            raise Invalid(
                "the directory is not pending: it has not been marked, or is published already"
            )
        await self._commit(group, what)

    async def _commit(self, group: DirectoryGroup, what: Commit) -> None:
        rank, ino = what.rank, group.ino
        group.require_may_commit(rank, what.again)
        if what.sized and group.record.options.same_size:
            group.sizes[rank] = await self._right_size(group, what)
        group.committing.add(rank)
        try:
            wanted = (*(what.files or ()), *([(what.listing, ANY_SIZE)] if what.listing else []))
            if what.files is None:
                dentry = Dentry(ino, 0, _DIRECTORY)
                synced = await self._barrier.sync_below(dentry)
                await self._io.table.forget_marks(synced)
            else:
                found = await look_up(self._engine, self._io, ino, wanted)
                inos = [inode.ino for _, _, inode in found if inode is not None]
                await self._barrier.sync_files(inos)
            wrong = await first_wrong(self._engine, self._io, ino, wanted)
            if wrong:
                raise Invalid(f"commit: rank {rank}: {wrong}")
            _require_going_on(group)
            size, is_sized = group.sizes.get(rank, 0), rank in group.sizes
            member = GroupMember(time.time_ns(), size, is_sized, wanted)
            await self._engine.transact(
                groups.commit, ino, group.record.id, rank, member, what.again
            )
            faults.reach(_RANK)
            await self._engine.barrier()
            _require_going_on(group)
            group.commit(rank)
        finally:
            group.committing.discard(rank)
            if rank not in group.committed:
                group.sizes.pop(rank, None)
            group.wake()
            self._table.look()
        self._course.complete(group)

    async def _right_size(self, group: DirectoryGroup, what: Commit) -> int:
        """The size of a committing rank's file. Raises Invalid if it differs from the first
        rank's."""
        rank = what.rank
        inode = await self._engine.view(find_file, group.ino, path_below(what.sized))
        if inode is None:
            raise Invalid(
                f"rank {rank}: {os.fsdecode(what.sized)} is no file in the group's directory"
            )
        opened = self._io.table.open.get(inode.ino)
        path = await self._engine.view(paths.describe, inode.ino)
        group.require_may_commit(rank, what.again)
        size = (inode if opened is None else self._io.inodes.attributes(opened)).size
        for first, expected in group.sizes.items():
            if size != expected and first != rank:
                raise Invalid(
                    f"rank {rank}: {path} has {size} bytes, not the {expected} of rank {first}"
                )
        return size

    async def _settled(self, group: DirectoryGroup) -> None:
        """Wait until a complete group is buffered, and published if wanted. Raises their errors."""
        while group.is_complete and not group.is_buffered:
            group.require_success()
            with waits_for(PUBLISH):
                await group.event.wait()
        if group.is_complete:
            group.require_success()
            if group.publish_failure is not None:
                raise group.publish_failure

    async def wait(self, ino: int, group_id: int, durable: bool, timeout_s: float | None) -> None:
        """Wait until all have committed and are in the burst tier, published if wanted;
        ``durable``: on the capacity tier. Raises the group's error, Stale, TimedOut."""
        group = await self._table.find(ino, group_id)
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s) as scope:
            group.require_success()
            if durable and not group.shares:
                raise Invalid("the directory is pending, and its files are drained as usual")
            while not (group.state == "durable" or (group.is_buffered and not durable)):
                with waits_for(DRAIN) if group.is_complete else waits_for(RANK, group.lacking):
                    await group.event.wait()
                group.require_success()
        if scope.cancelled_caught:
            raise TimedOut(f"the group is {group.state} after {timeout_s} s")

    # --- to end it ---

    async def cancel(
        self, ino: int, group_id: int = 0, reason: str = "", caller: CallerLike = ROOT
    ) -> None:
        """End a group, if not ended. Its files are drained as usual; a pending directory stays so,
        unless the group was for that alone. Raises NoAttribute, Stale, NotPermitted."""
        group = await self._table.find(ino, group_id)
        if group.shares:
            await self._course.cancel(group, reason or "it was cancelled")
        elif group.pending is not None:
            await self.abandon(ino, caller)

    async def abandon(self, ino: int, caller: CallerLike) -> None:
        """End a directory's pending state, and its commits; its files stay. An open group is
        cancelled. Raises NoAttribute, NotPermitted."""
        rights.owner(await self._engine.view(namespace.get_inode, ino), caller)
        async with self._table.recording:
            group = self._table.by_directory.get(ino)
            if group is None or group.pending is None:
                raise NoAttribute("the directory is not pending")
            await self._engine.transact(groups.abandon, ino, group.record.id)
            if group.shares:
                group.record = group.record._replace(pending=None)  # it may have ended meanwhile
            else:
                self._table.drop(group, "the directory is pending no more")
        if group.shares and group.is_open:
            await self._course.cancel(group, "its directory is pending no more")


def _require_going_on(group: DirectoryGroup) -> None:
    """Raises an ended group's error, unless its directory is pending."""
    if group.pending is None:
        group.require_success()


def _require_same(there: DirectoryGroup, options: GroupOptions) -> None:
    """Raises Invalid unless the group has these options, Busy if all have committed."""
    present = there.record.options
    if not there.is_open:
        raise Busy(f"the group is {there.state}; wait until it is durable, or cancel it")
    if options._replace(job=present.job) != present:
        raise Invalid(f"another group is open: {format_group(present)}")


def _require_same_mark(there: DirectoryGroup, options: GroupOptions, pending: Pending) -> None:
    present, ranks = there.pending, there.record.options.ranks
    assert present is not None
    if (ranks, present.step, present.job) != (options.ranks, pending.step, pending.job):
        raise Invalid(
            f"the directory is pending already, with {ranks} ranks and step {present.step}"
        )


def _require_same_ranks(there: DirectoryGroup, options: GroupOptions) -> None:
    """Raises Invalid unless a pending directory has its group's ranks."""
    present = there.record.options
    if (True, options.ranks) != (options.explicit and present.explicit, present.ranks):
        raise Invalid(
            "the ranks of a pending directory and of its group are the same, and commit: there "
            f"are {present.ranks}, and the group needs commit=explicit"
        )


# --- all parts ------------------------------------------------------------------------------------


class RankGroups:
    """How ranks save together. Used from one trio thread."""

    def __init__(
        self,
        services: Services,
        tier: BurstTier,
        io: FileIO,
        writeback: WriteBack,
        drain: Drain,
        barrier: Barrier,
        role: Role,
        ended: Ended,
    ) -> None:
        config, engine, servers = services.config, services.engine, services.servers
        peers = services.peers
        self.drain = GroupDrain(services, drain.drainer)
        """How the files of a group get to the data servers."""
        members = Members(engine, tier, io, writeback, drain, self.drain)
        parts = Parts(engine, barrier, role, servers, peers)
        joint = Joint(engine, parts, members, self.drain.storing, config.host.bandwidth)
        self.table = GroupTable(engine, services.upkeep)
        """All groups."""
        part_host = PartHost(engine, self.table, members, drain, parts, joint, peers)
        self.course = Course(engine, self.table, members, parts, joint, part_host, ended)
        """From one state of a group to the next."""
        self.closing = Closing(
            engine, io, writeback, drain, self.table, members, parts, self.course
        )
        """Files that a group withholds from the drain."""
        self.naming = Naming(engine, io, self.table)
        """Names that wait for a group."""
        living = Living(self.table, parts, self.course)
        self.groups = Groups(
            engine, io, barrier, services.ids, self.table, parts, self.course, living
        )
        """Requests of programs."""
        self.life = Life(services, drain, self.table, members, parts, self.course, living, role)
        """Loading, background work and closing."""
