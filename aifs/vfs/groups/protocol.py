"""What ranks ask of groups (to begin, join, commit, wait for and cancel them), which files belong to
them, and what becomes of groups by themselves: time-outs and deaths, and, after the last commit,
the publish and the drain; and what an earlier mount has left. docs/grouped.md has the protocol.
"""

import json
import math
import os
import stat
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import Busy, FsError, Invalid, NoAttribute, NotSupported, Stale, TimedOut
from aifs.core.log import logger
from aifs.core.upkeep import Upkeep, Work
from aifs.data.patience import background
from aifs.files import permissions
from aifs.files.drain import Drain, Undrained
from aifs.files.file_io import FileIO
from aifs.files.types import CallerLike
from aifs.files.writeback import WriteBack
from aifs.meta import groups, namespace, paths
from aifs.meta.groups import GroupMember, GroupRecord, Options
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Dentry, Inode
from aifs.store.ids import IdAllocator
from aifs.vfs.groups import processes
from aifs.vfs.groups.group import File, FileState, Group
from aifs.vfs.groups.group_text import format_group
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.report import Report
from aifs.vfs.publishing import pending
from aifs.vfs.publishing.barrier import sync_below

_log = logger(__name__)

_RANK = faults.declare(
    "vfs.group.rank", "a rank's commit to a group is in the journal, which is not synced yet"
)
_BUFFERED = faults.declare(
    "vfs.group.buffered", "all of a group is durable in the burst tier, it is not committed yet"
)
_COMMITTED = faults.declare(
    "vfs.group.committed", "a group is on record as committed, it is neither published nor drained"
)
_PUBLISHED = faults.declare(
    "vfs.group.published", "a group's directory is published, which is not on record of the group"
)

_SLICE = 256
_RESERVED = (".aifs-", "..aifs-")  # names of what ranks tell each other in a checkpoint's directory
_ENDED_MAX = 16  # groups that have ended and are remembered with their files
# groups of which it is known how they ended, though another one of the directory has followed
_FOLLOWED_MAX = 64
_LOOK_S = 1.0  # how often the burst tier's room is looked at while files are withheld

_DIRECTORY = stat.S_IFDIR >> 12

Publish = Callable[[int, bytes, CallerLike], Awaitable[None]]
CommitPending = Callable[[int, int], Awaitable[bool]]


class Groups:
    """The groups of a mount. ``run`` and ``work`` do what takes time; used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        writeback: WriteBack,
        ids: IdAllocator,
        drain: Drain,
        members: Members,
        upkeep: Upkeep,
        deadline_s: float,
    ) -> None:
        self.publish: Publish = _cannot_publish
        """Publishes a directory (inode number, final name, on whose behalf); the filesystem's."""
        self.commit_pending: CommitPending = _is_not_pending
        """Commits a rank (inode number of the directory, rank) if the directory is pending, and
        says whether it is; the filesystem's."""
        self.by_directory: dict[int, Group] = {}
        """All that are live, and some that have ended, the youngest last."""
        self._followed: dict[int, Group] = {}  # by id
        self._open: frozenset[int] = frozenset()  # the directories whose groups are open
        self._recording = trio.Lock()
        """Held while records of groups are written, so that they are in the order of what happens.
        """
        self._engine = engine
        self._io = io
        self._writeback = writeback
        self._ids = ids
        self._drain = drain
        self._members = members
        self._upkeep = upkeep
        self._deadline_s = deadline_s
        self._nursery: trio.Nursery | None = None
        self._durable = 0
        self._last: dict[str, Any] | None = None

    # --- which group ------------------------------------------------------------------------------

    async def find(self, ino: int, group_id: int = 0) -> Group:
        """The group of a directory, or one that it has followed, by its id (0: the present, or
        last, one). Raises NoAttribute; Stale: nothing is known of that one (any more)."""
        group = self.by_directory.get(ino)
        if group is None:
            record = await self._engine.view(groups.find, ino)
            if record is None:
                raise NoAttribute("the directory has no group")
            group = self._new(ino, record)  # it has ended long ago
        if group_id not in (0, group.record.id):
            followed = self._followed.get(group_id)
            if followed is not None and followed.ino == ino:
                return followed
            raise Stale(
                f"group {group_id} of the directory has been followed by group {group.record.id}"
            )
        return group

    async def find_above(self, ino: int) -> Group:
        """The group of a directory, or of the nearest one that ``ino`` lies below. Raises
        NoAttribute.
        """
        group = self._members.group_of.get(ino)
        if group is not None:
            return group
        top = await self._engine.view(groups.directory_with_group, ino)
        if top is None:
            raise NoAttribute()
        return await self.find(top)

    @property
    def _live(self) -> list[Group]:
        return [group for group in self.by_directory.values() if group.is_live]

    def _new(self, ino: int, record: GroupRecord) -> Group:
        return Group(ino, record, Report(), trio.current_time(), time.time_ns())

    async def _begin(self, ino: int, record: GroupRecord, before: Group | None) -> Group | None:
        """A new group of a directory, after ``before``, which has ended; None if another one has
        begun meanwhile. How the one before has ended is known to those who ask by its id. Raises
        NotFound, NotADirectory."""
        async with self._recording:
            if self.by_directory.get(ino) is not before:
                return None
            recorded = await self._engine.transact(groups.begin, ino, record)
            ended = before.record if before is not None else recorded
            if ended is not None and ended.state not in groups.LIVE:
                followed = self._followed[ended.id] = self._new(ino, ended)
                followed.publish_failure = None if before is None else before.publish_failure
            for group_id in list(self._followed)[:-_FOLLOWED_MAX]:
                del self._followed[group_id]
            self.by_directory.pop(ino, None)  # the youngest to the end
            group = self.by_directory[ino] = self._new(ino, record)
            self._look()
        return group

    def _look(self) -> None:
        """Something has changed that a time-out or the place of files depends on."""
        ended = [ino for ino, group in self.by_directory.items() if not group.is_live]
        for ino in ended[: max(0, len(ended) - _ENDED_MAX)]:
            del self.by_directory[ino]
        self._open = frozenset(ino for ino, group in self.by_directory.items() if group.is_open)
        self._upkeep.wake(Work.GROUPS)

    # --- what ranks ask for -----------------------------------------------------------------------

    async def begin(self, ino: int, options: Options, caller: CallerLike) -> Group:
        """A group of the directory; the one that is open, if it has been asked for in the same
        words. What another job has left is cancelled before. Raises Invalid: another one is open,
        or of a job whose ranks live; Busy: it is not durable yet; NotFound, NotADirectory."""
        while True:
            there = self.by_directory.get(ino)
            if there is None or not there.is_live:
                number = await self._ids.take()
                asker = permissions.asker_of(caller)
                record = GroupRecord(
                    number, options, asker.uid, asker.gid, time.time_ns(), groups=asker.gids[1:]
                )
                group = await self._begin(ino, record, there)
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
            await self._cancel(
                there, f"it was left behind: nobody of it lives, and job {job} has begun anew"
            )

    def _look_who_lives(self, group: Group) -> None:
        """A process that was killed just now may not have been heard of."""
        for rank, process in list(group.processes.items()):
            if not processes.lives(process):
                group.left(rank, process, trio.current_time())
        self._look()

    async def join(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        """The process that asks is this rank. Raises Invalid, NotSupported, and what the group has
        ended with.
        """
        group = await self.find(ino, group_id)
        with _refusals(group):
            group.require_rank(rank)
            process = processes.process_of(caller.pid)
            if group.processes.get(rank) != process:
                group.join(rank, process)
                self._start(self._watch, group, rank, process)
            group.wake()
            self._look()

    async def commit(self, ino: int, group_id: int, rank: int, file: bytes = b"") -> None:
        """All that is unsynced below the directory is durable in the burst tier on return, and so
        is the rank's commit. The last one also waits for the publish, and raises what that fails
        with. ``file``: path below the directory of one that the rank has written, whose size is
        compared if all files have to have one. Raises Invalid, and what the group has ended with.
        """
        group = await self.find(ino, group_id)
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
        group = self.by_directory.get(ino)
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
            self._look()
        self._complete(group)

    async def commit_file(self, inode: Inode) -> None:
        """A file counts as closed, though the caller has it open: it is durable in the burst tier
        on return. Raises NoAttribute, Busy if others write to it, Invalid if the group's ranks
        commit."""
        group = await self.find_above(inode.ino)
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
            self._complete(group)

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
        group = await self.find(ino, group_id)
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
        group = await self.find(ino, group_id)
        await self._cancel(group, reason or "it was cancelled")

    # --- what happens to files --------------------------------------------------------------------

    async def closed(self, inode: Inode) -> bool:
        """The last writer has closed this file. Whether the usual drain must not have it."""
        group = self._members.group_of.get(inode.ino)
        top = None
        if (group is None or group.is_open) and self._open:
            top = await self._engine.view(groups.directory_of, inode.ino, self._open)
            group = self._members.group_of.get(inode.ino)
        if group is not None and not group.is_open:
            return self._members.closed_late(inode)
        opened = self._io.open.get(inode.ino)
        if (opened is not None and opened.writers) or not inode.nlink:
            return False
        if group is not None and group.ino != top:
            self._members.moved(group, inode.ino)
        group = self.by_directory.get(top)
        if group is None or not group.is_open:
            return False
        withheld = self._members.closed(group, inode)
        if withheld and not self._members.is_watched:
            self._look()
        self._complete(group)
        return withheld

    def opened(self, ino: int) -> None:
        """Somebody has opened it for writing."""
        self._members.opened(ino)

    def gone(self, ino: int) -> None:
        """An inode has lost its last name."""
        self._members.gone(ino)
        group = self.by_directory.get(ino)
        if group is not None and group.is_live:
            self._start(self._cancel, group, "its directory was removed")

    def _give_back_wanted(self) -> None:
        """What somebody waits for on the capacity tier: a group that is still open cannot be waited
        for.
        """
        for ino in self._drain.take_wanted():
            group = self._members.group_of.get(ino)
            if group is None:
                self._drain.give_back([ino])
            elif group.is_open and not group.settling:
                self._members.give_back(group, [group.files[ino]])

    # --- after the last commit --------------------------------------------------------------------

    def _complete(self, group: Group) -> None:
        if group.is_open and group.is_complete and not group.settling:
            group.settling = True
            self._start(self._settle, group)

    async def _settle(self, group: Group) -> None:
        """All have committed: all is buffered, recorded, published, drained."""
        if group.is_open:
            try:
                await self._buffer(group)
            except FsError as error:
                what = f"not all could be written to the burst tier: {error}"
                await self._end(group, group.record._replace(state="failed", error=what))
                return
        if group.state != "committed":
            return
        self._start(self._store, group)
        if (
            group.record.options.publish
            and not group.record.published
            and not group.record.publish_error
        ):
            await self._publish(group)
        if group.state == "committed":
            group.record = group.record._replace(state="draining")
        group.wake()

    async def _buffer(self, group: Group) -> None:
        committed_ns = time.time_ns()
        try:
            if not group.record.options.explicit:
                await self._members.sync(
                    group, [file for file in group.files.values() if file.counted]
                )
            error = await self._unequal(group)
            faults.reach(_BUFFERED)
        finally:
            group.settling = False
        if not group.is_open or not group.is_complete:
            return  # it has been cancelled, or a file opened again
        if error:
            await self._end(group, group.record._replace(state="failed", error=error, unequal=True))
            return
        now_ns = time.time_ns()
        self._members.settle(group)
        group.record = group.record._replace(
            state="committed", committed_ns=committed_ns, buffered_ns=now_ns
        )
        self._look()
        await self._put(group)
        faults.reach(_COMMITTED)

    async def unequal(self, ino: int) -> str:
        """Which file of the directory's group has not the size that all have to have, or had when
        the group failed; ''.
        """
        try:
            group = await self.find(ino)
        except NoAttribute:
            return ""
        if group.is_open:
            return await self._unequal(group)
        return group.record.error if group.record.unequal else ""

    async def _unequal(self, group: Group) -> str:
        while group.differs:
            files, closes = [file for file in group.files.values() if file.counted], group.closes
            whose, size = next(
                ((f"rank {rank}", size) for rank, size in group.sizes.items()), ("", 0)
            )
            first: File | None = None  # whose size counts, and may change meanwhile
            for start in range(0, len(files), _SLICE):
                for file, path in await self._engine.view(_paths, files[start : start + _SLICE]):
                    if path.rpartition("/")[2].startswith(_RESERVED):
                        continue
                    if not whose:
                        whose, first = path, file
                    size = size if first is None else first.size
                    if file.size != size:
                        return f"{path} has {file.size} bytes, not the {size} of {whose}"
                await trio.lowlevel.checkpoint()
            if group.closes == closes:
                break
        return ""

    async def _publish(self, group: Group) -> None:
        try:
            await self.publish(group.ino, group.record.options.publish, group.record.asker)
            faults.reach(_PUBLISHED)
            group.record = group.record._replace(published=True)
        except FsError as error:
            _log.info("group %d is not published: %s", group.record.id, error)
            group.publish_failure = error
            group.record = group.record._replace(publish_error=str(error))
        await self._put(group)

    async def _store(self, group: Group) -> None:
        """Returns when it is durable."""
        await self._members.store(group)
        usual = [file.ino for file in group.in_states(FileState.USUAL)]
        await self._drain.wait(usual)
        while not group.is_settled:
            await group.event.wait()
        if group.is_live:
            self._members.leave(group)
            report = json.dumps(group.report.to_json()).encode()
            group.record = group.record._replace(
                state="durable", durable_ns=time.time_ns(), report=report
            )
            self._durable += 1
            self._last = {"name": group.record.options.name.decode(), **group.report.to_json()}
            group.drain_error = ""
            await self._put(group)
            group.wake()
            self._look()

    async def _end(self, group: Group, record: GroupRecord) -> None:
        """It ends without success: its files are drained as usual."""
        _log.info(
            "group %d of directory %d is %s: %s", record.id, group.ino, record.state, record.error
        )
        group.record = record
        self._members.leave(group)
        group.wake()
        self._look()
        await self._put(group)

    async def _cancel(self, group: Group, reason: str) -> None:
        """Nothing happens to one that has ended."""
        if group.is_live:
            await self._end(group, group.record._replace(state="cancelled", error=reason))

    async def _put(self, group: Group) -> None:
        """What has become of it is on stable storage on return. Where that cannot be written, it
        counts in this mount alone.
        """
        async with self._recording:
            try:
                await self._engine.transact(groups.update, group.ino, group.record)
                await self._engine.barrier()
            except FsError as error:
                _log.warning(
                    "group %d: its state %s is not on record: %s",
                    group.record.id,
                    group.state,
                    error,
                )

    # --- in the background ------------------------------------------------------------------------

    async def load(self, undrained: list[Undrained]) -> None:
        """What an earlier mount has left; the drain knows of the files already."""
        now, now_ns = trio.current_time(), time.time_ns()
        found, damaged = await self._engine.view(groups.load_live)
        for ino in damaged:
            _log.warning(
                "the record of the group of directory %d is damaged, its files are drained as usual; run aifs fsck",
                ino,
            )
        for ino, (record, members) in found.items():
            group = self.by_directory[ino] = self._new(ino, record)
            if record.options.explicit:
                group.committed.update(members)
                sized = sorted(
                    (member.when_ns, rank) for rank, member in members.items() if member.mtime_ns
                )
                group.sizes = {rank: members[rank].size for _, rank in sized}
            else:
                for inode in await self._engine.view(_unchanged, members):
                    self._members.restore(group, inode, now)
        self._look()
        explicit = frozenset(group.ino for group in self._live if group.record.options.explicit)
        for start in range(0, len(undrained) if explicit else 0, _SLICE):
            some = undrained[start : start + _SLICE]
            for top, inode, since_ns in await self._engine.view(_below, some, explicit):
                self._members.restore(
                    self.by_directory[top], inode, now - (now_ns - since_ns) / 1e9
                )
            await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """At an orderly end: what has been closed is on record as such, if that is possible."""
        for group in self._live:
            if group.is_open:
                try:
                    await self._members.sync(
                        group, [file for file in group.files.values() if file.counted]
                    )
                except FsError as error:
                    _log.info(
                        "files of group %d do not count after the next mount: %s",
                        group.record.id,
                        error,
                    )

    async def run(self) -> None:
        """Until cancelled."""
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._members.run)
                for group in self.by_directory.values():
                    self._resume(group)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def _resume(self, group: Group) -> None:
        group.settling = False
        for rank, process in group.processes.items():
            self._start(self._watch, group, rank, process)
        if group.is_open:
            self._complete(group)
        elif group.is_live:
            self._start(self._settle, group)

    def _start(self, work: Callable[..., Awaitable[None]], group: Group, *args: Any) -> None:
        """In the background; ``run`` begins what is due when it begins."""
        if self._nursery is not None:
            with background():  # also where somebody's commit is what begins it
                self._nursery.start_soon(work, group, *args)

    async def _watch(self, group: Group, rank: int, process: int) -> None:
        pidfd = processes.watch(process)
        if pidfd is not None:
            await processes.wait_for_end(pidfd)
        group.left(rank, process, trio.current_time())
        group.wake()
        self._look()

    async def work(self) -> float:
        """See to what is overdue, or waited for; in how many seconds something may be."""
        self._give_back_wanted()
        now = trio.current_time()
        for group in list(self.by_directory.values()):
            record = group.overdue(now)
            if record is not None:
                await self._end(group, record)
        until = min((group.deadline() for group in self.by_directory.values()), default=math.inf)
        if self._members.relieve(self._deadline_s):
            until = min(until, now + _LOOK_S)
        return until - trio.current_time()

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows. ``last``: the group that has been durable last, in this
        mount.
        """
        return {
            "open": len(self._open),
            "committed": len(self._live) - len(self._open),
            "files": len(self._members.group_of),
            "durable": self._durable,
            "last": self._last,
        }


def _unchanged(tx: ReadTransaction, members: dict[int, GroupMember]) -> list[Inode]:
    """Files that are what they were when they were closed."""
    found = []
    for number, member in members.items():
        inode = namespace.find_inode(tx, number)
        if (
            inode is not None
            and inode.nlink
            and (inode.size, inode.mtime_ns) == (member.size, member.mtime_ns)
        ):
            found.append(inode)
    return found


def _below(
    tx: ReadTransaction, files: Sequence[Undrained], tops: frozenset[int]
) -> list[tuple[int, Inode, int]]:
    """Those of the files that lie below one of the directories: directory, inode, since when it is
    undrained.
    """
    found = []
    for file in files:
        top = groups.directory_of(tx, file.ino, tops)
        if top is not None:
            found.append((top, namespace.get_inode(tx, file.ino), file.since_ns))
    return found


def _paths(tx: ReadTransaction, files: Sequence[File]) -> list[tuple[File, str]]:
    return [
        (file, paths.describe(tx, file.ino).encode(errors="replace").decode()) for file in files
    ]


async def _cannot_publish(ino: int, final: bytes, caller: CallerLike) -> None:
    raise NotSupported()


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
