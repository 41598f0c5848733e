"""What ranks ask of groups: to begin, join, commit, wait for and cancel them; and which files
belong to them. docs/grouped.md has the protocol.
"""

import math
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager

import trio

from aifs.core import faults
from aifs.core.errors import Busy, Invalid, TimedOut
from aifs.core.log import logger
from aifs.files import permissions
from aifs.files.drain import Drain
from aifs.files.file_io import FileIO
from aifs.files.types import CallerLike
from aifs.files.writeback import WriteBack
from aifs.meta import groups, paths
from aifs.meta.groups import GroupMember, GroupRecord, Options
from aifs.meta.kv import Engine
from aifs.meta.records import Dentry, Inode
from aifs.store.ids import IdAllocator
from aifs.vfs.groups import processes
from aifs.vfs.groups.course import Course
from aifs.vfs.groups.group_text import format_group
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.state import Group
from aifs.vfs.publishing import pending
from aifs.vfs.publishing.barrier import sync_below

_log = logger(__name__)

_RANK = faults.declare(
    "vfs.group.rank", "a rank's commit to a group is in the journal, which is not synced yet"
)

_DIRECTORY = stat.S_IFDIR >> 12

CommitPending = Callable[[int, int], Awaitable[bool]]


class Groups:
    """The groups of a mount, as ranks and their files meet them. Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        writeback: WriteBack,
        ids: IdAllocator,
        drain: Drain,
        members: Members,
        course: Course,
    ) -> None:
        self.commit_pending: CommitPending = _is_not_pending
        """Commits a rank (inode number of the directory, rank) if the directory is pending, and
        says whether it is; the filesystem's."""
        self.course = course
        self._engine = engine
        self._io = io
        self._writeback = writeback
        self._ids = ids
        self._drain = drain
        self._members = members
        drain.on_wanted = self._wanted

    # --- what ranks ask for -----------------------------------------------------------------------

    async def begin(self, ino: int, options: Options, caller: CallerLike) -> Group:
        """A group of the directory; the one that is open, if it has been asked for in the same
        words. What another job has left is cancelled before. Raises Invalid: another one is open,
        or of a job whose ranks live; Busy: it is not durable yet; NotFound, NotADirectory."""
        while True:
            there = self.course.groups.get(ino)
            if there is None or not there.is_live:
                number = await self._ids.take()
                asker = permissions.asker_of(caller)
                record = GroupRecord(
                    number, options, asker.uid, asker.gid, time.time_ns(), groups=asker.gids[1:]
                )
                group = await self.course.begin(ino, record, there)
                if group is not None:
                    return group
                continue
            with _refusals(there):
                if not there.is_open:
                    raise Busy(
                        f"the group is {there.state}; wait until it is durable, or cancel it"
                    )
                if options.job not in (b"", there.record.options.job):
                    self._look_who_lives(there)
                if not there.is_left_to(options.job):
                    present = there.record.options
                    if options._replace(job=present.job) != present:
                        raise Invalid(f"another group is open: {format_group(present)}")
                    return there
            job = options.job.decode()
            await self.course.cancel(
                there, f"it was left behind: nobody of it lives, and job {job} has begun anew"
            )

    def _look_who_lives(self, group: Group) -> None:
        """A process that was killed just now may not have been heard of."""
        for rank, process in list(group.processes.items()):
            if not processes.lives(process):
                group.left(rank, process, trio.current_time())
        self.course.look()

    async def join(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        """The process that asks is this rank. Raises Invalid, NotSupported, and what the group has
        ended with.
        """
        group = await self.course.find(ino, group_id)
        with _refusals(group):
            group.require_rank(rank)
            process = processes.process_of(caller.pid)
            if group.processes.get(rank) != process:
                group.join(rank, process)
                self.course.start(self.course.watch, group, rank, process)
            group.wake()
            self.course.look()

    async def commit(self, ino: int, group_id: int, rank: int, file: bytes = b"") -> None:
        """All that is unsynced below the directory is durable in the burst tier on return, and so
        is the rank's commit. The last one also waits for the publish, and raises what that fails
        with. ``file``: path below the directory of one that the rank has written, whose size is
        compared if all files have to have one. Raises Invalid, and what the group has ended with.
        """
        group = await self.course.find(ino, group_id)
        with _refusals(group):
            group.require_rank(rank)
            if file and group.record.options.same_size:
                group.sizes[rank] = await self._right_size(group, rank, file)
            try:
                if not await self.commit_pending(ino, rank):
                    await self._commit(group, rank, sync=True)
                elif (
                    rank not in group.committed
                ):  # the pending directory has another number of ranks
                    await self._commit(group, rank, sync=False)
            finally:
                if rank not in group.committed | group.committing:
                    group.sizes.pop(rank, None)
        await self._settled(group)

    async def committed_pending(self, ino: int, rank: int, ranks: int) -> None:
        """A rank has committed to a directory that is pending: also to its group, if that has as
        many and waits for it.
        """
        group = self.course.groups.get(ino)
        if group is None or not group.is_open or not group.record.options.explicit:
            return
        if ranks == group.record.options.ranks and rank not in group.committed | group.committing:
            await self._commit(group, rank, sync=False)

    async def _right_size(self, group: Group, rank: int, file: bytes) -> int:
        """The size of a file of a rank that is about to commit. Raises Invalid if it has another
        one than that of the first rank.
        """
        inode = await self._engine.view(pending.find_file, group.ino, pending.path_below(file))
        if inode is None:
            raise Invalid(f"rank {rank}: {os.fsdecode(file)} is no file in the group's directory")
        opened = self._io.open.get(inode.ino)
        path = await self._engine.view(paths.describe, inode.ino)
        group.require_rank(rank)
        size = (inode if opened is None else self._io.attributes(opened)).size
        for first, expected in group.sizes.items():
            if size != expected:
                raise Invalid(
                    f"rank {rank}: {path} has {size} bytes, not the {expected} of rank {first}"
                )
        return size

    async def _commit(self, group: Group, rank: int, sync: bool) -> None:
        group.require_rank(rank)
        group.committing.add(rank)
        try:
            if sync:
                await sync_below(
                    self._engine, self._io, self._writeback, Dentry(group.ino, 0, _DIRECTORY)
                )
            group.require_success()
            member = GroupMember(time.time_ns(), group.sizes.get(rank, 0), rank in group.sizes)
            await self._engine.transact(groups.put_member, group.ino, group.record.id, rank, member)
            faults.reach(_RANK)
            await self._engine.barrier()
            group.require_success()
            group.commit(rank)
        finally:
            group.committing.discard(rank)
            group.wake()
            self.course.look()
        self.course.complete(group)

    async def commit_file(self, inode: Inode) -> None:
        """A file counts as closed, though the caller has it open: it is durable in the burst tier
        on return. Raises NoAttribute, Busy if others write to it, Invalid if the group's ranks
        commit."""
        group = await self.course.find_above(inode.ino)
        with _refusals(group):
            if group.record.options.explicit:
                raise Invalid("the group's ranks commit, on its directory; files do not")
            group.require_open()
            opened = self._io.open.get(inode.ino)
            if opened is not None and opened.writers > 1:
                raise Busy("others have the file open for writing")
            await self._writeback.sync_inode(inode.ino)
            group.require_open()
            if opened is not None and opened.writers:
                self._members.committed_open(group, inode)
            elif not self._members.closed(group, inode) and inode.in_burst:
                self._drain.closed(inode)
            self.course.complete(group)

    async def _settled(self, group: Group) -> None:
        """If the group is complete: it is buffered, and published if that is wanted. Raises what
        either has failed with.
        """
        while group.is_complete and not group.is_settled:
            group.require_success()
            await group.event.wait()
        if group.is_complete:
            group.require_success()
            if group.publish_failure is not None:
                raise group.publish_failure

    async def wait(self, ino: int, group_id: int, durable: bool, timeout_s: float | None) -> None:
        """Until all ranks have committed and all is in the burst tier, published if that is wanted;
        ``durable``: until it is on the capacity tier. Raises what the group has ended with, Stale,
        TimedOut."""
        group = await self.course.find(ino, group_id)
        with trio.move_on_after(math.inf if timeout_s is None else timeout_s) as scope:
            group.require_success()
            while not (group.state == "durable" or (group.is_settled and not durable)):
                await group.event.wait()
                group.require_success()
        if scope.cancelled_caught:
            raise TimedOut(f"the group is {group.state} after {timeout_s} s")

    async def cancel(self, ino: int, group_id: int = 0, reason: str = "") -> None:
        """End a group; nothing happens to one that has ended. Its files are drained as usual.
        Raises NoAttribute, Stale.
        """
        group = await self.course.find(ino, group_id)
        await self.course.cancel(group, reason or "it was cancelled")

    # --- what happens to files --------------------------------------------------------------------

    async def closed(self, inode: Inode) -> bool:
        """The last writer has closed this file. Whether the usual drain must not have it."""
        group = self._members.group_of.get(inode.ino)
        top = None
        if (group is None or group.is_open) and self.course.open:
            top = await self._engine.view(groups.directory_of, inode.ino, self.course.open)
            group = self._members.group_of.get(inode.ino)
        if group is not None and not group.is_open:
            return self._members.closed_late(inode)
        opened = self._io.open.get(inode.ino)
        if (opened is not None and opened.writers) or not inode.nlink:
            return False
        if group is not None and group.ino != top:
            self._members.moved(group, inode.ino)
        group = self.course.groups.get(top)
        if group is None or not group.is_open:
            return False
        withheld = self._members.closed(group, inode)
        if withheld and not self._members.is_watched:
            self.course.look()
        self.course.complete(group)
        return withheld

    def opened(self, ino: int) -> None:
        """Somebody has opened it for writing."""
        self._members.opened(ino)

    def gone(self, ino: int) -> None:
        """An inode has lost its last name."""
        self._members.gone(ino)
        group = self.course.groups.get(ino)
        if group is not None and group.is_live:
            self.course.start(self.course.cancel, group, "its directory was removed")

    def _wanted(self, inos: list[int]) -> None:
        """Somebody waits for these on the capacity tier: a group that is still open cannot be
        waited for.
        """
        for ino in inos:
            group = self._members.group_of.get(ino)
            if group is None:
                self._drain.give_back([ino])
            elif group.is_open and not group.settling:
                self._members.give_back(group, [group.files[ino]])


@contextmanager
def _refusals(group: Group) -> Iterator[None]:
    """What is refused inside is told, too, by the group."""
    try:
        yield
    except (Invalid, Busy) as error:
        group.refused = str(error)
        _log.info("group %d: refused: %s", group.record.id, error)
        raise


async def _is_not_pending(ino: int, rank: int) -> bool:
    return False
