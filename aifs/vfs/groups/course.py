"""What becomes of groups by themselves: time-outs and deaths, and, after the last commit, the
publish and the drain; and what an earlier mount has left. docs/grouped.md has the protocol.
"""

import json
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import FsError, NoAttribute, NotSupported, Stale
from aifs.core.log import logger
from aifs.data.patience import background
from aifs.files.drain import Drain, Undrained
from aifs.files.types import CallerLike
from aifs.meta import groups, namespace, paths
from aifs.meta.groups import GroupMember, GroupRecord
from aifs.meta.kv import Engine, ReadTransaction
from aifs.meta.records import Inode
from aifs.vfs.groups import processes
from aifs.vfs.groups.members import Members
from aifs.vfs.groups.state import File, FileState, Group

_log = logger(__name__)

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

Publish = Callable[[int, bytes, CallerLike], Awaitable[None]]


class Course:
    """All groups, by directory, and what happens to them. ``run`` does what takes time; used from
    one trio thread.
    """

    def __init__(
        self,
        engine: Engine,
        drain: Drain,
        members: Members,
        new_report: Callable[[], Any],
        deadline_s: float,
    ) -> None:
        self.publish: Publish = _cannot_publish
        """Publishes a directory (inode number, final name, on whose behalf); the filesystem's."""
        self.groups: dict[int, Group] = {}
        self._followed: dict[int, Group] = {}  # by id
        self.open: frozenset[int] = frozenset()
        """The directories whose groups are open."""
        self.recording = trio.Lock()
        """Held while records of groups are written, so that they are in the order of what happens.
        """
        self._engine = engine
        self._drain = drain
        self._members = members
        self._new_report = new_report
        self._deadline_s = deadline_s
        self._nursery: trio.Nursery | None = None
        self._news = trio.Event()
        self._durable = 0
        self._last: dict[str, Any] | None = None

    # --- which group ------------------------------------------------------------------------------

    async def find(self, ino: int, group_id: int = 0) -> Group:
        """The group of a directory, or one that it has followed, by its id (0: the present, or
        last, one). Raises NoAttribute; Stale: nothing is known of that one (any more)."""
        group = self.groups.get(ino)
        if group is None:
            record = await self._engine.view(groups.find, ino)
            if record is None:
                raise NoAttribute("the directory has no group")
            group = self.new(ino, record)  # it has ended long ago
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
    def live(self) -> list[Group]:
        return [group for group in self.groups.values() if group.is_live]

    def new(self, ino: int, record: GroupRecord) -> Group:
        return Group(ino, record, self._new_report(), trio.current_time(), time.time_ns())

    async def begin(self, ino: int, record: GroupRecord, before: Group | None) -> Group | None:
        """A new group of a directory, after ``before``, which has ended; None if another one has
        begun meanwhile. How the one before has ended is known to those who ask by its id. Raises
        NotFound, NotADirectory."""
        async with self.recording:
            if self.groups.get(ino) is not before:
                return None
            recorded = await self._engine.transact(groups.begin, ino, record)
            ended = before.record if before is not None else recorded
            if ended is not None and ended.state not in groups.LIVE:
                followed = self._followed[ended.id] = self.new(ino, ended)
                followed.publish_failure = None if before is None else before.publish_failure
            for group_id in list(self._followed)[:-_FOLLOWED_MAX]:
                del self._followed[group_id]
            self.groups.pop(ino, None)  # the youngest to the end
            group = self.groups[ino] = self.new(ino, record)
            self.look()
        return group

    def look(self) -> None:
        """Something has changed that a time-out or the place of files depends on."""
        ended = [ino for ino, group in self.groups.items() if not group.is_live]
        for ino in ended[: max(0, len(ended) - _ENDED_MAX)]:
            del self.groups[ino]
        self.open = frozenset(ino for ino, group in self.groups.items() if group.is_open)
        self._news.set()
        self._news = trio.Event()

    # --- after the last commit --------------------------------------------------------------------

    def complete(self, group: Group) -> None:
        if group.is_open and group.is_complete and not group.settling:
            group.settling = True
            self.start(self._settle, group)

    async def _settle(self, group: Group) -> None:
        """All have committed: all is buffered, recorded, published, drained."""
        if group.is_open:
            try:
                await self._buffer(group)
            except FsError as error:
                what = f"not all could be written to the burst tier: {error}"
                await self.end(group, group.record._replace(state="failed", error=what))
                return
        if group.state != "committed":
            return
        self.start(self._store, group)
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
            await self.end(group, group.record._replace(state="failed", error=error, unequal=True))
            return
        now_ns = time.time_ns()
        self._members.settle(group)
        group.record = group.record._replace(
            state="committed", committed_ns=committed_ns, buffered_ns=now_ns
        )
        self.look()
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
            self.look()

    async def end(self, group: Group, record: GroupRecord) -> None:
        """It ends without success: its files are drained as usual."""
        _log.info(
            "group %d of directory %d is %s: %s", record.id, group.ino, record.state, record.error
        )
        group.record = record
        self._members.leave(group)
        group.wake()
        self.look()
        await self._put(group)

    async def cancel(self, group: Group, reason: str) -> None:
        """Nothing happens to one that has ended."""
        if group.is_live:
            await self.end(group, group.record._replace(state="cancelled", error=reason))

    async def _put(self, group: Group) -> None:
        """What has become of it is on stable storage on return. Where that cannot be written, it
        counts in this mount alone.
        """
        async with self.recording:
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
            group = self.groups[ino] = self.new(ino, record)
            if record.options.explicit:
                group.committed.update(members)
                sized = sorted(
                    (member.when_ns, rank) for rank, member in members.items() if member.mtime_ns
                )
                group.sizes = {rank: members[rank].size for _, rank in sized}
            else:
                for inode in await self._engine.view(_unchanged, members):
                    self._members.restore(group, inode, now)
        self.look()
        explicit = frozenset(group.ino for group in self.live if group.record.options.explicit)
        for start in range(0, len(undrained) if explicit else 0, _SLICE):
            some = undrained[start : start + _SLICE]
            for top, inode, since_ns in await self._engine.view(_below, some, explicit):
                self._members.restore(self.groups[top], inode, now - (now_ns - since_ns) / 1e9)
            await trio.lowlevel.checkpoint()

    async def close(self) -> None:
        """At an orderly end: what has been closed is on record as such, if that is possible."""
        for group in self.live:
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
                for group in self.groups.values():
                    self._resume(group)
                while True:
                    await self._watch_time()
        finally:
            self._nursery = None

    def _resume(self, group: Group) -> None:
        group.settling = False
        for rank, process in group.processes.items():
            self.start(self.watch, group, rank, process)
        if group.is_open:
            self.complete(group)
        elif group.is_live:
            self.start(self._settle, group)

    def start(self, work: Callable[..., Awaitable[None]], group: Group, *args: Any) -> None:
        """In the background; ``run`` begins what is due when it begins."""
        if self._nursery is not None:
            with background():  # also where somebody's commit is what begins it
                self._nursery.start_soon(work, group, *args)

    async def watch(self, group: Group, rank: int, process: int) -> None:
        pidfd = processes.watch(process)
        if pidfd is not None:
            await processes.wait_for_end(pidfd)
        group.left(rank, process, trio.current_time())
        group.wake()
        self.look()

    async def _watch_time(self) -> None:
        """See to what is overdue, then wait until something may be."""
        now = trio.current_time()
        for group in list(self.groups.values()):
            record = group.overdue(now)
            if record is not None:
                await self.end(group, record)
        until = min((group.deadline() for group in self.groups.values()), default=math.inf)
        if self._members.relieve(self._deadline_s):
            until = min(until, now + _LOOK_S)
        with trio.move_on_at(until):
            await self._news.wait()

    def status(self) -> dict[str, Any]:
        """What ``aifs status`` shows. ``last``: the group that has been durable last, in this
        mount.
        """
        return {
            "open": len(self.open),
            "committed": len(self.live) - len(self.open),
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
