"""What ranks ask of groups (to begin, join, commit, wait for and cancel them), which files belong
to them, and what becomes of groups by themselves: time-outs and deaths, and, after the last commit,
the publish and the drain; and what an earlier mount has left. docs/commit.md has the protocol.
"""

import json
import math
import os
import stat
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import trio

from aifs.core import faults
from aifs.core.errors import (
    Busy,
    FsError,
    Invalid,
    NoAttribute,
    NotPermitted,
    NotSupported,
    Stale,
    TimedOut,
)
from aifs.core.log import logger
from aifs.core.role import Role
from aifs.core.tasks import run_all
from aifs.core.upkeep import Upkeep, Work
from aifs.data.patience import giving_up
from aifs.files import permissions
from aifs.files.drain import Drain, Undrained
from aifs.files.file_io import FileIO
from aifs.files.types import ROOT, CallerLike
from aifs.files.writeback import WriteBack
from aifs.meta import groups, hosts, namespace, paths
from aifs.meta.askers import Asker
from aifs.meta.groups import (
    ANY_SIZE,
    GroupMember,
    GroupOptions,
    GroupPart,
    GroupRecord,
    Pending,
)
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Dentry, Inode
from aifs.peers.peers import Peers
from aifs.peers.transport import Answer, Body, Peer
from aifs.store.ids import IdAllocator
from aifs.vfs import rights
from aifs.vfs.groups import processes
from aifs.vfs.groups.group import DirectoryGroup, File, FileState
from aifs.vfs.groups.group_text import Wanted, format_group
from aifs.vfs.groups.joint import (
    KEEP,
    OFFER,
    HostOffer,
    Joint,
    decode_digests,
    decode_wanted,
    encode_digests,
)
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.parts import FILES, STORE, Parts
from aifs.vfs.groups.report import GroupReport
from aifs.vfs.publishing.barrier import Barrier
from aifs.vfs.publishing.listed import find_file, first_wrong, look_up, path_below

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
_ASKED_S = 10.0
"""How long a host waits to be asked for its part of a group that is committed: as a lease lasts."""

_LOOK_S = 1.0  # how often the burst tier's room is looked at while files are withheld

_DIRECTORY = stat.S_IFDIR >> 12

_NAMED_MAX = 8  # processes that a message names

Publish = Callable[[int, bytes, CallerLike], Awaitable[None]]


class Commit(NamedTuple):
    """A rank has written its part."""

    rank: int
    files: tuple[tuple[bytes, int], ...] | None = None
    """What it has written, as (path below the directory, bytes). None: all that is unsynced below,
    and nothing has to be there later."""
    listing: bytes = b""
    """Path of a file that says it, which has to be there."""
    again: bool = False
    """It may have committed before."""
    sized: bytes = b""
    """Path of a file whose size is compared if all files have to have one."""


class Groups:
    """The groups of a mount. ``run`` and ``work`` do what takes time; used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        io: FileIO,
        writeback: WriteBack,
        barrier: Barrier,
        ids: IdAllocator,
        drain: Drain,
        members: Members,
        upkeep: Upkeep,
        deadline_s: float,
        role: Role,
        parts: Parts,
        joint: Joint,
        peers: Peers | None,
    ) -> None:
        self._show: Publish | None = None  # while ``run`` runs
        self.by_directory: dict[int, DirectoryGroup] = {}
        """All that are live, or keep their directory pending, and some that have ended, the
        youngest last.
        """
        self._followed: dict[int, DirectoryGroup] = {}  # by id
        self._open: frozenset[int] = frozenset()  # directories whose groups take files
        self._closing: dict[int, object] = {}  # by inode number: the last close that is under way
        self._recording = trio.Lock()
        """Held while records of groups are written, so that they are in the order of what happens.
        """
        self._engine = engine
        self._io = io
        self._writeback = writeback
        self._barrier = barrier
        self._role = role
        self._parts = parts
        self._joint = joint
        self._ids = ids
        self._drain = drain
        self._members = members
        self._upkeep = upkeep
        self._deadline_s = deadline_s
        self._nursery: trio.Nursery | None = None
        """Where what takes time runs; None while ``run`` does not."""
        self._durable = 0
        """How many groups have ended well since the mount."""
        self._last: dict[str, Any] | None = None
        """What the drain of the last of them has said."""
        if peers is not None:
            peers.serve(STORE, self._serve_store)
            peers.serve(FILES, self._serve_files)
            peers.serve(OFFER, self._serve_offer)
            peers.serve(KEEP, self._serve_keep)

    # --- which group ------------------------------------------------------------------------------

    async def find(self, ino: int, group_id: int = 0) -> DirectoryGroup:
        """The group of a directory, or one that it has followed, by its id (0: the present, or
        last, one). Raises NoAttribute; Stale: nothing is known of that one (any more)."""
        group = self.by_directory.get(ino)
        if group is None:
            group = await self._find_on_record(ino)
        if group_id not in (0, group.record.id):
            followed = self._followed.get(group_id)
            if followed is not None and followed.ino == ino:
                return followed
            raise Stale(
                f"group {group_id} of the directory has been followed by group {group.record.id}"
            )
        return group

    async def _find_on_record(self, ino: int) -> DirectoryGroup:
        """One that has ended long ago, unless another begins just now. Raises NoAttribute."""
        async with self._recording:
            group = self.by_directory.get(ino)
            if group is not None:
                return group
            record = await self._engine.view(groups.find, ino)
        if record is None:
            raise NoAttribute("the directory has no group")
        return self._new(ino, record)

    async def find_above(self, ino: int) -> DirectoryGroup:
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
    def _live(self) -> list[DirectoryGroup]:
        """Those that have files."""
        return [group for group in self.by_directory.values() if group.is_live and group.shares]

    def _new(self, ino: int, record: GroupRecord) -> DirectoryGroup:
        return DirectoryGroup(ino, record, GroupReport(), trio.current_time(), time.time_ns())

    async def _begin(
        self, ino: int, record: GroupRecord, before: DirectoryGroup | None
    ) -> DirectoryGroup:
        """A new group of a directory, after ``before``. How that one has ended is known to those
        who ask by its id. Whoever calls this is recording. Raises NotFound, NotADirectory,
        Invalid."""
        known = None if before is None else before.record.id
        recorded = await self._engine.transact(groups.begin, ino, record, known)
        if before is not None and before.is_live:
            before.record = before.record._replace(
                state="cancelled", error="its directory is pending anew"
            )
            before.wake()
        ended = before.record if before is not None else recorded
        if ended is not None and ended.state not in groups.LIVE:
            followed = self._new(ino, ended)
            followed.publish_failure = None if before is None else before.publish_failure
            self._remember(followed)
        self.by_directory.pop(ino, None)  # the youngest to the end
        group = self.by_directory[ino] = self._new(ino, record)
        self._look()
        return group

    def _remember(self, followed: DirectoryGroup) -> None:
        """How a group has ended, for those who ask for it by its id."""
        self._followed[followed.record.id] = followed
        for group_id in list(self._followed)[:-_FOLLOWED_MAX]:
            del self._followed[group_id]

    async def _change(self, group: DirectoryGroup, **more: Any) -> DirectoryGroup:
        """More is asked of a group: fields of its record. Whoever calls this is recording. Raises
        NotFound, Invalid."""
        await self._engine.transact(groups.change, group.ino, group.record.id, more)
        group.record = group.record._replace(**more)  # it may have ended meanwhile
        self._look()
        return group

    def _look(self) -> None:
        """Something has changed that a time-out or the place of files depends on."""
        ended = [ino for ino, group in self.by_directory.items() if not group.is_held]
        for ino in ended[: max(0, len(ended) - _ENDED_MAX)]:
            del self.by_directory[ino]
        self._open = frozenset(group.ino for group in self._live if group.is_open)
        self._upkeep.wake(Work.GROUPS)

    # --- what ranks ask for -----------------------------------------------------------------------

    async def begin(self, ino: int, wanted: Wanted, caller: CallerLike) -> DirectoryGroup:
        """The directory's group does what is wanted, on stable storage with the next commit.

        It is the one that is there, if that was asked for the same, or keeps its directory pending,
        or has files and is to keep it pending, too; its commits count. Else a new one begins, after
        what another job has left, or, if it is to begin anew, whatever there was, has been
        cancelled. Raises Invalid: another one is open, or of a job whose ranks live; Busy: it is
        not durable yet; NotPermitted: who marks a directory owns it, or begins anew what nobody
        goes on with; NotFound, NotADirectory."""
        asker = permissions.asker_of(caller)
        while True:
            number = await self._ids.take()
            async with self._recording:
                if wanted.mark is not None:
                    await self._require_may_mark(ino, wanted.anew, caller)
                there = self.by_directory.get(ino)
                reason = self._left_behind(there, wanted)
                if not reason:
                    try:
                        group = await self._begin_or_join(ino, there, wanted, asker, number)
                        break
                    except namespace.Overtaken:
                        continue  # the engine has told us of it
            assert there is not None
            await self._cancel(there, reason)
        if wanted.mark is not None:
            self._take_note(group, caller)
        return group

    async def _begin_or_join(
        self, ino: int, there: DirectoryGroup | None, wanted: Wanted, asker: Asker, number: int
    ) -> DirectoryGroup:
        now_ns, options = time.time_ns(), wanted.options
        pending = (
            None if wanted.mark is None else Pending(wanted.mark[0], now_ns, wanted.mark[1], asker)
        )
        if there is None or not there.is_held or wanted.anew:
            host = self._engine.host
            record = GroupRecord(number, options, asker, now_ns, pending=pending, host=host)
            return await self._begin(ino, record, there)
        if pending is not None and there.pending is not None:
            _require_same_mark(there, options, pending)
        if there.is_live and there.shares:
            if options.shares:
                _require_same(there, options)
            if pending is None or there.pending is not None:
                return there
            _require_same_ranks(there, options)
            return await self._change(there, pending=pending)
        if not options.shares:
            return there
        _require_same_ranks(there, options)
        if there.is_open:
            return await self._change(there, options=options, asker=asker, created_ns=now_ns)
        host = self._engine.host
        record = GroupRecord(number, options, asker, now_ns, pending=there.pending, host=host)
        return await self._begin(ino, record, there)

    def _left_behind(self, there: DirectoryGroup | None, wanted: Wanted) -> str:
        """Why the group that is there has to be cancelled before what is wanted can begin; ''.
        Raises Invalid: its ranks live."""
        if there is None or not there.is_live or not there.shares:
            return ""
        if wanted.anew:
            return "its directory is pending anew"
        job = wanted.options.job
        if not there.is_open or not wanted.options.shares or job in (b"", there.record.options.job):
            return ""
        self._look_who_lives(there)
        there.require_left_to(job)
        return f"it was left behind: nobody of it lives, and job {job.decode()} has begun anew"

    async def _require_may_mark(self, ino: int, anew: bool, caller: CallerLike) -> None:
        """The directory's owner may; and, to begin anew, whoever may write to it if no process
        lives that has marked it, or joined its group. Raises NotPermitted, AccessDenied."""
        inode = await self._engine.view(namespace.get_directory, ino)
        there = self.by_directory.get(ino)
        if not anew or there is None or there.pending is None:
            rights.owner(inode, caller)
            return
        try:
            rights.owner(inode, caller)
        except NotPermitted:
            rights.writer(inode, caller)
            self._look_who_lives(there)
            living = sorted({*there.processes.values(), *there.markers})
            whose = ", ".join(map(str, living[:_NAMED_MAX]))
            if not living and there.joined_elsewhere:
                whose = "of other hosts"
            if whose:
                raise NotPermitted(
                    "only its owner and root may begin anew while others save here: processes "
                    f"{whose}"
                ) from None

    def _take_note(self, group: DirectoryGroup, caller: CallerLike) -> None:
        """The process that asks goes on with the directory as long as it lives, if it can be
        seen."""
        with suppress(NotSupported):
            process = processes.process_of(caller.pid)
            if process not in group.markers:
                group.markers.add(process)
                self._start(self._watch, group, None, process)

    def _look_who_lives(self, group: DirectoryGroup) -> None:
        """A process that was killed just now may not have been heard of."""
        known: list[tuple[int | None, int]] = [*group.processes.items()]
        known += [(None, process) for process in group.markers]
        for rank, process in known:
            if not processes.lives(process):
                group.left(rank, process, trio.current_time())
        self._look()

    async def join(self, ino: int, group_id: int, rank: int, caller: CallerLike) -> None:
        """The process that asks is this rank. Raises Invalid, NotSupported, and what the group has
        ended with.
        """
        group = await self.find(ino, group_id)
        group.require_rank(rank)
        process = processes.process_of(caller.pid)
        if group.processes.get(rank) != process:
            group.require_free(rank)
            if self._engine.host:
                await self._parts.take(group, frozenset([rank]))
            try:
                group.join(rank, process)
            except Invalid:
                await self._parts.left(group, rank)
                raise
            self._start(self._watch, group, rank, process)
        group.wake()
        self._look()

    async def commit(self, ino: int, group_id: int, what: Commit) -> None:
        """A rank of a group commits: its files, or all that is unsynced below the directory, are
        durable in the burst tier on return, and so is the commit. The last one also waits for the
        publish, and raises what that fails with. Raises Invalid, and what the group has ended with.
        """
        group = await self.find(ino, group_id)
        group.require_success()
        await self._commit(group, what)
        await self._settled(group)

    async def commit_pending(self, ino: int, what: Commit) -> None:
        """As ``commit``, for the name of a pending directory, whatever has become of its group;
        waits for no publish. Raises Invalid: not pending, no such rank, it has committed before, or
        a file is not there in that size."""
        group = self.by_directory.get(ino)
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
                await self._io.forget_marks(synced)
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
            self._look()
        self._complete(group)

    async def _right_size(self, group: DirectoryGroup, what: Commit) -> int:
        """The size of the file of a rank that is about to commit. Raises Invalid if it has another
        one than that of the first rank.
        """
        rank = what.rank
        inode = await self._engine.view(find_file, group.ino, path_below(what.sized))
        if inode is None:
            raise Invalid(
                f"rank {rank}: {os.fsdecode(what.sized)} is no file in the group's directory"
            )
        opened = self._io.open.get(inode.ino)
        path = await self._engine.view(paths.describe, inode.ino)
        group.require_may_commit(rank, what.again)
        size = (inode if opened is None else self._io.attributes(opened)).size
        for first, expected in group.sizes.items():
            if size != expected and first != rank:
                raise Invalid(
                    f"rank {rank}: {path} has {size} bytes, not the {expected} of rank {first}"
                )
        return size

    async def commit_file(self, inode: Inode) -> None:
        """A file counts as closed, though the caller has it open: it is durable in the burst tier
        on return. Raises NoAttribute, Busy if others write to it, Invalid if the group's ranks
        commit."""
        group = await self.find_above(inode.ino)
        if group.record.options.explicit:
            raise Invalid("the group's ranks commit, on its directory; files do not")
        group.require_open()
        self._require_one_writer(inode.ino)
        await self._writeback.sync_inode(inode.ino)
        group.require_open()
        if self._require_one_writer(inode.ino):
            self._members.committed_open(group, inode)
        elif not self._members.closed(group, inode) and inode.in_burst:
            self._drain.closed(inode)
        self._complete(group)

    def _require_one_writer(self, ino: int) -> bool:
        """Whether a file is open for writing. Raises Busy if it is more than once."""
        opened = self._io.open.get(ino)
        if opened is not None and opened.writers > 1:
            raise Busy("others have the file open for writing")
        return opened is not None and opened.writers == 1

    async def _settled(self, group: DirectoryGroup) -> None:
        """If the group is complete: it is buffered, and published if that is wanted. Raises what
        either has failed with.
        """
        while group.is_complete and not group.is_buffered:
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
            if durable and not group.shares:
                raise Invalid("the directory is pending, and its files are drained as usual")
            while not (group.state == "durable" or (group.is_buffered and not durable)):
                await group.event.wait()
                group.require_success()
        if scope.cancelled_caught:
            raise TimedOut(f"the group is {group.state} after {timeout_s} s")

    async def cancel(
        self, ino: int, group_id: int = 0, reason: str = "", caller: CallerLike = ROOT
    ) -> None:
        """End a group; nothing happens to one that has ended. Its files are drained as usual, and a
        pending directory stays so; if that is all that was asked of the group, it is pending no
        more. Raises NoAttribute, Stale, NotPermitted.
        """
        group = await self.find(ino, group_id)
        if group.shares:
            await self._cancel(group, reason or "it was cancelled")
        elif group.pending is not None:
            await self.abandon(ino, caller)

    async def abandon(self, ino: int, caller: CallerLike) -> None:
        """A directory is pending no more, and no commit counts; its files stay. A group that is
        open is cancelled. Raises NoAttribute, NotPermitted."""
        rights.owner(await self._engine.view(namespace.get_inode, ino), caller)
        async with self._recording:
            group = self.by_directory.get(ino)
            if group is None or group.pending is None:
                raise NoAttribute("the directory is not pending")
            await self._engine.transact(groups.abandon, ino, group.record.id)
            if group.shares:
                group.record = group.record._replace(pending=None)  # it may have ended meanwhile
            else:
                self._drop(group, "the directory is pending no more")
        if group.shares and group.is_open:
            await self._cancel(group, "its directory is pending no more")

    def _drop(self, group: DirectoryGroup, reason: str) -> None:
        """Nothing is on record any more of a group without files; who waits is told."""
        if self.by_directory.get(group.ino) is group:
            del self.by_directory[group.ino]
        group.record = group.record._replace(state="cancelled", error=reason, pending=None)
        group.wake()

    # --- what a directory's new name waits for ---

    def pending(self, ino: int) -> DirectoryGroup:
        """The group of a pending directory. Raises NoAttribute."""
        group = self.by_directory.get(ino)
        if group is None or group.pending is None:
            raise NoAttribute()
        return group

    async def require_complete(self, ino: int) -> None:
        """A directory may get a new name, as far as its group is concerned: early, because what
        follows may take long. The transaction decides. Raises Busy."""
        group = self.by_directory.get(ino)
        if group is not None and group.record.seals:
            await self._engine.view(groups.require_complete, ino, group.record)

    async def check_files(self, ino: int) -> None:
        """The files that the ranks of a directory have committed are there, in their sizes, and, if
        they must, all have one. Raises Busy, which names the first that is not."""
        group = self.by_directory.get(ino)
        if group is None or not group.record.seals:
            return
        for rank in await self._engine.view(groups.committed, ino):
            member = await self._engine.view(groups.get_member, ino, rank)
            files = () if member is None else member.files
            wrong = await first_wrong(self._engine, self._io, ino, files)
            if wrong:
                raise Busy(f"rank {rank}: {wrong}")
        unequal = await self._unequal(group) if group.is_open else ""
        if unequal:
            raise Busy(unequal)

    @asynccontextmanager
    async def naming(self, *inos: int) -> AsyncIterator[None]:
        """What is done inside gives these directories new names, in a transaction."""
        async with self._recording:
            yield
            sealed = [g for g in map(self.by_directory.get, inos) if g and g.record.seals]
            for group in sealed:
                group.record = group.record._replace(pending=None)
                if not group.shares:
                    group.record = group.record._replace(state="committed")
                    del self.by_directory[group.ino]
                    group.wake()
            if sealed:
                self._look()

    # --- what happens to files --------------------------------------------------------------------

    async def closed(self, inode: Inode) -> bool:
        """The last writer has closed this file. Whether the usual drain must not have it."""
        group = self._members.group_of.get(inode.ino)
        top = None
        if (group is None or group.is_open) and self._open:
            this = self._closing[inode.ino] = object()
            try:
                top = await self._engine.view(groups.directory_of, inode.ino, self._open)
                if top is not None and self._engine.host:
                    await self._take_part(top)
            finally:
                is_last = self._closing.get(inode.ino) is this
                if is_last:
                    del self._closing[inode.ino]
            if not is_last:
                return True  # who has closed it after that sees to it
            group = self._members.group_of.get(inode.ino)
        if group is not None and not group.is_open:
            return self._members.closed_late(inode)
        opened = self._io.open.get(inode.ino)
        if (opened is not None and opened.writers) or not inode.nlink:
            return False
        if group is not None and group.ino != top:
            self._members.moved(group, inode.ino)
        group = None if top is None else self.by_directory.get(top)
        if group is None or not group.is_open or not self._takes_part(group):
            return False
        withheld = self._members.closed(group, inode)
        if withheld and not self._members.is_watched:
            self._look()
        self._complete(group)
        return withheld

    async def _take_part(self, top: int) -> None:
        """A file of this host may belong to the group of a directory from now on."""
        group = self.by_directory.get(top)
        if group is not None and group.is_open:
            try:
                await self._parts.take(group, has_files=True)
            except FsError as error:
                _log.info("group %d: a file is drained as usual: %s", group.record.id, error)

    def _takes_part(self, group: DirectoryGroup) -> bool:
        """Whether others know that files of the group are here, where there are others."""
        host = self._engine.host
        return not host or group.parts.get(host, GroupPart()).has_files

    def opened(self, ino: int) -> None:
        """Somebody has opened it for writing."""
        group = self._members.group_of.get(ino)
        self._members.opened(ino)
        if self._engine.host:
            group = group or next((one for one in self._live if ino in one.elsewhere), None)
            if group is not None and not group.record.options.explicit:
                group.elsewhere.pop(ino, None)
                self._start(self._reopened, group, ino, time.time_ns())

    async def _reopened(self, group: DirectoryGroup, ino: int, opened_ns: int) -> None:
        """Nobody counts a file any more that was closed, and is being written here."""
        with suppress(FsError):  # then it counts as it was closed
            await self._engine.transact(
                groups.remove_closed, group.ino, group.record.id, ino, opened_ns
            )

    def gone(self, ino: int) -> None:
        """An inode has lost its last name."""
        self._members.gone(ino)
        group = self.by_directory.get(ino)
        if group is not None and not group.shares:
            self._drop(group, "its directory was removed")
        elif group is not None and group.is_live:
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

    # --- what other hosts do ----------------------------------------------------------------------

    def follow(self, ino: int, record: GroupRecord | None) -> None:
        """Another host has made this of the record of a directory's group; None: it has none any
        more. Does not block."""
        group = self.by_directory.get(ino)
        if group is not None and (record is None or record.id != group.record.id):
            self._ended_elsewhere(group)
            group = None
        if record is None or (
            group is None and record.state not in groups.LIVE and record.pending is None
        ):
            return
        if group is None:
            self.by_directory.pop(ino, None)  # the youngest to the end
            group = self.by_directory[ino] = self._new(ino, record)
        elif group.is_live and record.state not in groups.LIVE:
            self._members.leave(group)
        was_open, was_settled = group.is_open, group.state == "draining"
        group.record = record
        self._adopt_state(group, was_settled)
        if was_open and not group.is_open and group.is_live:
            self._members.settle(group)
            self._start(self._store_unasked, group)
        group.wake()
        self._look()

    def _adopt_state(self, group: DirectoryGroup, is_settled: bool = False) -> None:
        """On record a group is committed until it is durable. ``is_settled``: here it was draining
        already; of one that another host sees to the record says whether it is."""
        record = group.record
        if record.state != "committed":
            return
        if not group.is_of(self._engine.host):
            is_settled = is_settled or not record.options.publish or record.published
            if record.publish_error:
                group.publish_failure, is_settled = Busy(record.publish_error), True
        if is_settled:
            group.record = record._replace(state="draining")

    def follow_part(self, ino: int, host: int, part: GroupPart | None) -> None:
        """Another host has this of a group, or nothing any more. Does not block."""
        group = self.by_directory.get(ino)
        if group is not None:
            if part is None:
                group.parts.pop(host, None)
            else:
                group.parts[host] = part
                for rank in part.ranks:
                    group.away.pop(rank, None)
            group.wake()
            self._look()

    def _ended_elsewhere(self, group: DirectoryGroup) -> None:
        """What it came to is on record no more: it has its name, or it was given up."""
        if group.is_live and not group.shares and group.is_complete:
            group.record = group.record._replace(state="committed", pending=None)
        elif group.is_held:
            reason = "another host has given its directory's group up"
            self._members.leave(group)
            group.record = group.record._replace(state="cancelled", error=reason, pending=None)
        del self.by_directory[group.ino]
        followed = self._new(group.ino, group.record)
        followed.publish_failure = group.publish_failure
        self._remember(followed)
        group.wake()
        self._look()

    def follow_member(self, ino: int, number: int, member: GroupMember | None) -> None:
        """A rank has committed on another host, or a file was closed there; None: it counts no
        more. Does not block."""
        group = self.by_directory.get(ino)
        if group is None:
            return
        if group.record.options.explicit:
            if member is None:
                return
            if member.mtime_ns:
                group.sizes[number] = member.size
            group.commit(number)
        else:
            if number in group.files:  # it has changed hands
                self._members.gone(number)
            if member is None:
                group.elsewhere.pop(number, None)
            else:
                group.elsewhere[number] = File(number, member.size, trio.current_time())
        group.wake()
        self._look()
        self._complete(group)

    # --- after the last commit --------------------------------------------------------------------

    def _complete(self, group: DirectoryGroup) -> None:
        if not group.is_of(self._engine.host):
            return
        if group.is_open and group.shares and group.is_complete and not group.settling:
            group.settling = True
            self._start(self._settle, group)

    async def _settle(self, group: DirectoryGroup) -> None:
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

    async def _buffer(self, group: DirectoryGroup) -> None:
        committed_ns = time.time_ns()
        try:
            if not group.record.options.explicit:
                await self._members.sync(
                    group, [file for file in group.files.values() if file.counted]
                )
            if (
                self._engine.host
                and group.record.options.explicit
                and group.record.options.same_size
            ):
                group.elsewhere = await self._parts.files(group)
            error = await self._unequal(group)
            faults.reach(_BUFFERED)
        finally:
            group.settling = False
        if not group.is_open or not group.is_complete:
            return  # it has been cancelled, or a file opened again
        if error:
            await self._end(group, group.record._replace(state="failed", error=error, unequal=True))
            return
        record = group.record._replace(
            state="committed", committed_ns=committed_ns, buffered_ns=time.time_ns()
        )

        def settle() -> None:
            self._members.settle(group)
            self._look()

        if await self._become(group, record, settle):
            faults.reach(_COMMITTED)

    async def _unequal(self, group: DirectoryGroup) -> str:
        while group.differs:
            files, closes = group.closed_now, group.closes
            whose, size = next(
                ((f"rank {rank}", size) for rank, size in group.sizes.items()), ("", 0)
            )
            first: File | None = None  # whose size counts, and may change meanwhile
            for start in range(0, len(files), _SLICE):
                for file, path in await self._engine.view(paths_of, files[start : start + _SLICE]):
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

    async def _publish(self, group: DirectoryGroup) -> None:
        assert self._show is not None  # it is ``run`` that publishes
        try:
            await self._show(group.ino, group.record.options.publish, group.record.asker)
            faults.reach(_PUBLISHED)
            record = group.record._replace(published=True)
        except FsError as error:
            _log.info("group %d is not published: %s", group.record.id, error)
            group.publish_failure = error
            record = group.record._replace(publish_error=str(error))
        await self._become(group, record)

    async def _store(self, group: DirectoryGroup) -> None:
        """Returns when it is durable."""
        lost: list[str] = []
        if self._engine.host:
            lost = await self._store_all(group)
        else:
            await self._store_own(group)
        while not group.is_settled:
            await group.event.wait()
        if group.is_live and lost:
            names = ", ".join(lost)
            why = f"its files on host {names} were not on the data servers when that one ended"
            await self._end(group, group.record._replace(state="failed", error=why))
        elif group.is_live:
            report = json.dumps(group.report.to_json()).encode()
            record = group.record._replace(
                state="durable", durable_ns=time.time_ns(), report=report
            )

            def leave() -> None:
                self._members.leave(group)
                self._durable += 1
                self._last = {"name": record.options.name.decode(), **group.report.to_json()}
                group.drain_error = ""

            await self._become(group, record, leave)
            group.wake()
            self._look()

    async def _store_own(self, group: DirectoryGroup) -> None:
        """What this host has of a group that is committed is on the data servers on return."""
        await self._members.store(group)
        usual = [file.ino for file in group.in_states(FileState.USUAL)]
        await self._drain.wait(usual)

    async def _end(self, group: DirectoryGroup, record: GroupRecord) -> None:
        """It ends without success: its files are drained as usual."""

        def leave() -> None:
            _log.info(
                "group %d of directory %d is %s: %s",
                record.id,
                group.ino,
                record.state,
                record.error,
            )
            self._members.leave(group)
            group.wake()
            self._look()

        await self._become(group, record, leave)

    async def _cancel(self, group: DirectoryGroup, reason: str) -> None:
        """Nothing happens to one that has ended."""
        if group.is_live:
            await self._end(group, group.record._replace(state="cancelled", error=reason))

    async def _become(
        self, group: DirectoryGroup, record: GroupRecord, then: Callable[[], None] = lambda: None
    ) -> bool:
        """The group is as ``record`` says, in core and on record; ``then`` is called when it is so
        in core. False, with nothing done: another host was first.
        """
        if self._engine.host:
            if not await self._put_first(group, record):
                return False
            then()
        else:
            group.record = record
            then()
            await self._put(group)
        return True

    async def _put(self, group: DirectoryGroup) -> None:
        """What has become of it is on stable storage on return. Where that cannot be written, it
        counts in this mount alone.
        """
        try:
            async with self._recording:
                await self._engine.transact(groups.update, group.ino, group.record)
            await self._engine.barrier()
        except FsError as error:
            _log.warning(
                "group %d: its state %s is not on record: %s", group.record.id, group.state, error
            )

    async def _put_first(self, group: DirectoryGroup, record: GroupRecord) -> bool:
        """Where there are several hosts: have a group be as ``record`` says, which is on stable
        storage on return. False: another host was first, whose change is known then."""
        before, after = group.record._asdict(), record._asdict()
        changes = {name: value for name, value in after.items() if value != before[name]}
        try:
            async with self._recording:
                done, there = await self._engine.transact(
                    groups.alter, group.ino, group.record.id, group.recorded_state, changes
                )
            await self._engine.barrier()
        except FsError as error:
            _log.warning("group %d is not %s: %s", group.record.id, record.state, error)
            return False
        if not done:
            self.follow(group.ino, there)
            return False
        now = group.record.state
        if self.by_directory.get(group.ino) is not group or now not in (
            before["state"],
            record.state,
        ):
            return False  # others have gone on from there
        group.record = group.record._replace(**changes)
        return True

    # --- parts of hosts ---------------------------------------------------------------------------

    async def _store_all(self, group: DirectoryGroup) -> list[str]:
        """What all hosts have of a group is on the data servers on return, but for that of hosts
        that have died: their names."""
        await self._engine.shown()  # they know that it is committed
        lost: list[str] = []
        kept: dict[int, set[bytes]] = {}
        if self._parts.others(group):
            kept = await self._joint.spread(group)
            group.kept = kept.get(self._engine.host, set())

        async def others() -> None:
            lost.extend(await self._parts.store(group, kept))

        await run_all(partial(self._store_own, group), others)
        return lost

    async def _serve_store(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """What is here of a group, given as [directory, id], is on the data servers on return."""
        group = self._find_asked(arguments)
        if group is None:
            return Answer({})
        group.kept = decode_digests(body)
        with giving_up():
            await self._store_own(group)
        return Answer(group.report.to_json())

    async def _serve_offer(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """What is here of a group, given as [directory, id]: see HostOffer.encode."""
        group = self._find_asked(arguments)
        with giving_up():
            offer = HostOffer((), {}, 0) if group is None else await self._joint.offer(group)
        return offer.encode()

    async def _serve_keep(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """Chunks of a group, given as [directory, id, ...] and by ``encode_wanted``, are stored for
        all; the digests of those that are."""
        group = self._find_asked(arguments[:2])
        kept: set[bytes] = set()
        if group is not None:
            with giving_up():
                kept = await self._joint.keep(group, *decode_wanted(arguments[2:], body))
        return Answer(None, encode_digests(kept))

    def _find_asked(self, arguments: Any) -> DirectoryGroup | None:
        """A group that is live, given as [directory, id], of which another host asks."""
        ino, group_id = arguments
        group = self.by_directory.get(ino)
        if group is None or group.record.id != group_id or not group.is_live:
            return None
        group.asked.set()
        return group

    async def _serve_files(self, asker: Peer, arguments: Any, body: Body) -> Answer:
        """The files of a group, given as [directory, id], that were closed here, in the body: JSON,
        [inode number, size] of each."""
        ino, group_id = arguments
        group = self.by_directory.get(ino)
        known = group is not None and group.record.id == group_id
        files = [file for file in group.files.values() if file.counted] if known and group else []
        return Answer(None, json.dumps([[file.ino, file.size] for file in files]).encode())

    async def _store_unasked(self, group: DirectoryGroup) -> None:
        """The host that sees to a group that is committed may hang, or be cut off: the files here
        do not wait for it longer than a lease lasts."""
        while group.is_live and not group.is_of(self._engine.host):
            group.asked = trio.Event()
            with trio.move_on_after(_ASKED_S):
                await group.asked.wait()
            name = await self._engine.view(hosts.name_of, group.record.host)
            if not group.asked.is_set() and not self._parts.hears(name):
                await self._members.store(group)

    async def _watch_hosts(self) -> None:
        """See to what hosts leave that have died."""
        live = None
        while True:
            while live == self._role.live:
                await self._role.change()
            live = self._role.live
            held = [group for group in self.by_directory.values() if group.is_held]
            if any(not live.issuperset({*group.parts, group.record.host}) for group in held):
                try:
                    now_live = await self._parts.live()
                except FsError as error:
                    _log.info("which hosts are there is not known: %s", error)
                    continue
                for group in held:
                    try:
                        await self._look_after(group, now_live)
                    except FsError as error:
                        _log.info("group %d: %s", group.record.id, error)

    async def _look_after(self, group: DirectoryGroup, live: frozenset[int]) -> None:
        """The host that has the role takes over what dead hosts have seen to; who sees to a group
        deals with the parts of dead hosts."""
        host = self._engine.host
        if group.record.host not in live and self._role.held and group.is_held:
            record = group.record._replace(host=host, state=group.recorded_state)
            if await self._become(group, record):
                self._resume(group)
        if not group.is_of(host) or not group.is_open:
            return
        for gone in group.parts.keys() - live:
            part = group.parts[gone]
            if part.has_files:
                name = await self._engine.view(hosts.name_of, gone)
                error = f"host {name} ended, which had files of it, before all had committed"
                dead = min(set(part.ranks) - group.committed, default=-1)
                record = group.record._replace(state="failed", dead=dead, error=error)
                await self._end(group, record)
                return
            await self._engine.transact(groups.drop_part, group.ino, group.record.id, gone)
            group.parts.pop(gone, None)
            for rank in set(part.ranks) - group.committed:
                group.away[rank] = trio.current_time()
        self._look()

    # --- in the background ------------------------------------------------------------------------

    async def load(self, undrained: list[Undrained]) -> None:
        """What an earlier mount has left; the drain knows of the files already."""
        now, now_ns = trio.current_time(), time.time_ns()
        found, damaged = await self._engine.view(groups.load)
        for ino in damaged:
            _log.warning(
                "the record of the group of directory %d is damaged, its files are drained as "
                "usual; run aifs fsck",
                ino,
            )
        for ino, (record, members) in found.items():
            group = self.by_directory[ino] = self._new(ino, record)
            if self._engine.host:
                await self._parts.load(group)
                self._adopt_state(group)
            if record.options.explicit:
                group.committed.update(members)
                sized = sorted(
                    (member.when_ns, rank) for rank, member in members.items() if member.mtime_ns
                )
                group.sizes = {rank: members[rank].size for _, rank in sized}
            else:
                for inode in await self._engine.view(_unchanged, members):
                    if self._parts.is_elsewhere(inode):
                        group.elsewhere[inode.ino] = File(inode.ino, inode.size, now)
                    else:
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

    async def run(self, publish: Publish) -> None:
        """Until cancelled. ``publish`` shows a directory (inode number, final name, on whose
        behalf) when its group is complete."""
        self._show = publish
        try:
            async with trio.open_nursery() as self._nursery:
                self._nursery.start_soon(self._members.run)
                for group in self.by_directory.values():
                    self._resume(group)
                if self._role.is_shared:
                    self._nursery.start_soon(self._watch_hosts)
                await trio.sleep_forever()
        finally:
            self._nursery = None

    def _resume(self, group: DirectoryGroup) -> None:
        group.settling = False
        if group.is_live and not group.is_open and not group.is_of(self._engine.host):
            self._start(self._store_unasked, group)
            return
        for rank, process in group.processes.items():
            self._start(self._watch, group, rank, process)
        for process in group.markers:
            self._start(self._watch, group, None, process)
        if group.is_open:
            self._complete(group)
        elif group.is_live:
            self._start(self._settle, group)

    def _start(
        self, work: Callable[..., Awaitable[None]], group: DirectoryGroup, *args: Any
    ) -> None:
        """In the background; ``run`` begins what is due when it begins."""
        if self._nursery is not None:
            with giving_up():  # also where somebody's commit is what begins it
                self._nursery.start_soon(work, group, *args)

    async def _watch(self, group: DirectoryGroup, rank: int | None, process: int) -> None:
        pidfd = processes.watch(process)
        if pidfd is not None:
            await processes.wait_for_end(pidfd)
        group.left(rank, process, trio.current_time())
        if rank is not None and self._engine.host and group.is_open:
            with suppress(FsError):  # the mount ends, or the group has
                await self._parts.left(group, rank)
        group.wake()
        self._look()

    async def work(self) -> float:
        """See to what is overdue, or waited for; in how many seconds something may be."""
        self._give_back_wanted()
        now = trio.current_time()
        for group in self._timed:
            record = group.overdue(now)
            if record is not None:
                await self._end(group, record)
        until = math.inf
        for group in self._timed:
            deadline = group.deadline()
            until = min(until, deadline if deadline > now else now + _LOOK_S)  # it has not ended
        if self._members.relieve(self._deadline_s):
            until = min(until, now + _LOOK_S)
        return until - trio.current_time()

    @property
    def _timed(self) -> list[DirectoryGroup]:
        """The groups that may end here because of time: of one to which all have committed that is
        for who sees to it."""
        host = self._engine.host
        return [g for g in self.by_directory.values() if g.is_of(host) or not g.is_complete]

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows. ``last``: the group that has been durable last, in this
        mount.
        """
        return {
            "open": len(self._open),
            "committed": len(self._live) - len(self._open),
            "pending": sum(group.pending is not None for group in self.by_directory.values()),
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


def paths_of(tx: ReadTransaction, files: Sequence[File]) -> list[tuple[File, str]]:
    return [
        (file, paths.describe(tx, file.ino).encode(errors="replace").decode()) for file in files
    ]


def _require_going_on(group: DirectoryGroup) -> None:
    """Raises what a group has ended with, unless its directory is pending all the same."""
    if group.pending is None:
        group.require_success()


def _require_same(there: DirectoryGroup, options: GroupOptions) -> None:
    """Raises Invalid unless the group that is there was asked for in the same words, Busy if all
    have committed."""
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
    """Raises Invalid unless the ranks of a pending directory are those of its group."""
    present = there.record.options
    if (True, options.ranks) != (options.explicit and present.explicit, present.ranks):
        raise Invalid(
            "the ranks of a pending directory and of its group are the same, and commit: there "
            f"are {present.ranks}, and the group needs commit=explicit"
        )
