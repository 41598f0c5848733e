"""What happens to groups by themselves: earlier mounts' ones go on, time-outs and deaths of ranks
end them, and files do not wait for ever for complete ones."""

import math
import os
import select
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import trio

from aifs.core import files
from aifs.core.errors import FsError, NotSupported
from aifs.core.log import logger
from aifs.core.upkeep import Role
from aifs.files.drain import Drain, Undrained
from aifs.files.services import Services
from aifs.files.types import CallerLike
from aifs.meta import groups, hosts, namespace
from aifs.meta.groups import GroupMember
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import Inode
from aifs.saves.course import Course, Publish
from aifs.saves.group import DirectoryGroup, File
from aifs.saves.members import Members
from aifs.saves.parts import Parts
from aifs.saves.table import GroupTable

_log = logger(__name__)

_SLICE = 256
_LOOK_S = 1.0  # how often the burst tier's room is looked at while files are withheld


def process_of(thread: int) -> int:
    """The process of a thread's number. Raises NotSupported if unseen: ended, or numbered
    otherwise."""
    try:
        lines = Path(f"/proc/{thread}/status").read_text(errors="replace").splitlines()
        return int(next(line for line in lines if line.startswith("Tgid:")).split()[1])
    except (OSError, StopIteration):
        raise NotSupported(
            f"process {thread} cannot be seen, so nobody could tell when it ends"
        ) from None


def watch(process: int) -> int | None:
    """A descriptor for ``wait_for_end``; None if the process has ended."""
    try:
        return os.pidfd_open(process)
    except ProcessLookupError:
        return None


def lives(process: int) -> bool:
    """Now; a task that waits for its end hears of that a little later."""
    pidfd = watch(process)
    if pidfd is None:
        return False
    try:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        return not poll.poll(0)
    finally:
        files.close_file(pidfd)


async def wait_for_end(pidfd: int) -> None:
    """Until the process has ended. Closes the descriptor."""
    try:
        await trio.lowlevel.wait_readable(pidfd)
    finally:
        files.close_file(pidfd)


class Living:
    """Processes that go on with a group: ranks that joined, and markers of its directory. Used from
    one trio thread."""

    def __init__(self, table: GroupTable, parts: Parts, course: Course) -> None:
        self._table = table
        self._parts = parts
        self._course = course

    def take_note(self, group: DirectoryGroup, caller: CallerLike) -> None:
        """The caller's process, if seen, goes on with the directory while it lives."""
        with suppress(NotSupported):
            process = process_of(caller.pid)
            if process not in group.markers:
                group.markers.add(process)
                self.watch(group, None, process)

    def look_at(self, group: DirectoryGroup) -> None:
        """A process that was killed just now may not have been heard of."""
        known: list[tuple[int | None, int]] = [*group.processes.items()]
        known += [(None, process) for process in group.markers]
        for rank, process in known:
            if not lives(process):
                group.left(rank, process, trio.current_time())
        self._table.look()

    def watch_all(self, group: DirectoryGroup) -> None:
        """Those that are known: a run begins."""
        for rank, process in group.processes.items():
            self.watch(group, rank, process)
        for process in group.markers:
            self.watch(group, None, process)

    def watch(self, group: DirectoryGroup, rank: int | None, process: int) -> None:
        """The process has joined as this rank, or, if that is None, has marked the directory."""
        self._course.start(self._see_out, group, rank, process)

    async def _see_out(self, group: DirectoryGroup, rank: int | None, process: int) -> None:
        pidfd = watch(process)
        if pidfd is not None:
            await wait_for_end(pidfd)
        group.left(rank, process, trio.current_time())
        if rank is not None and group.is_open:
            with suppress(FsError):  # the mount ends, or the group has
                await self._parts.left(group, rank)
        group.wake()
        self._table.look()


class Life:
    """``run`` and ``work`` do what takes time; used from one trio thread."""

    def __init__(
        self,
        services: Services,
        drain: Drain,
        table: GroupTable,
        members: Members,
        parts: Parts,
        course: Course,
        living: Living,
        role: Role,
    ) -> None:
        """``deadline_s``: how long files are withheld from the usual drain at most."""
        self._engine = services.engine
        self._drain = drain
        self._table = table
        self._members = members
        self._parts = parts
        self._course = course
        self._living = living
        self._role = role
        self._deadline_s = services.config.burst.drain_deadline_s

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
            group = self._table.add(ino, record)
            await self._parts.load(group)
            self._course.adopt_state(group)
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
        self._table.look()
        explicit = frozenset(
            group.ino for group in self._table.live if group.record.options.explicit
        )
        for start in range(0, len(undrained) if explicit else 0, _SLICE):
            some = undrained[start : start + _SLICE]
            for top, inode, since_ns in await self._engine.view(_below, some, explicit):
                self._members.restore(
                    self._table.by_directory[top], inode, now - (now_ns - since_ns) / 1e9
                )
            await trio.lowlevel.checkpoint()

    async def run(self, publish: Publish) -> None:
        """Until cancelled. ``publish``: for groups that are complete."""
        async with self._course.running(publish) as nursery:
            nursery.start_soon(self._members.run)
            for group in self._table.by_directory.values():
                self._resume(group)
            if self._role.is_shared:
                nursery.start_soon(self._watch_hosts)
            await trio.sleep_forever()

    def _resume(self, group: DirectoryGroup) -> None:
        self._living.watch_all(group)
        self._course.resume(group)

    async def close(self) -> None:
        """At an orderly end: what has been closed is on record as such, if that is possible."""
        for group in self._table.live:
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

    # --- time ---

    async def work(self) -> float:
        """See to what is overdue, or waited for; in how many seconds something may be."""
        self._give_back_wanted()
        now = trio.current_time()
        for group in self._timed:
            record = group.overdue(now)
            if record is not None:
                await self._course.end(group, record)
        until = math.inf
        for group in self._timed:
            deadline = group.deadline()
            until = min(until, deadline if deadline > now else now + _LOOK_S)  # it has not ended
        if self._members.relieve(self._deadline_s):
            until = min(until, now + _LOOK_S)
        return until - trio.current_time()

    @property
    def _timed(self) -> list[DirectoryGroup]:
        """Groups that may time out here: not those fully committed, of which another host
        decides."""
        return [g for g in self._table.by_directory.values() if g.is_ours or not g.is_complete]

    def _give_back_wanted(self) -> None:
        """Give back files that are waited for on the capacity tier, of open groups."""
        for ino in self._drain.take_wanted():
            group = self._members.group_of.get(ino)
            if group is None:
                self._drain.give_back([ino])
            elif group.is_open and not group.settling:
                self._members.give_back(group, [group.files[ino]])

    # --- hosts that have died ---

    async def _watch_hosts(self) -> None:
        """Deal with dead hosts' groups."""
        live = None
        while True:
            while live == self._role.live:
                await self._role.change()
            live = self._role.live
            held = [group for group in self._table.by_directory.values() if group.is_held]
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
        """The holder of the role takes dead hosts' groups over; a group's host deals with dead
        parts."""
        if group.record.host not in live and self._role.held and group.is_held:
            record = group.record._replace(host=group.host, state=group.recorded_state)
            if await self._course.become(group, record):
                self._resume(group)
        if not group.is_ours or not group.is_open:
            return
        for gone in group.parts.keys() - live:
            part = group.parts[gone]
            if part.has_files:
                name = await self._engine.view(hosts.name_of, gone)
                error = f"host {name} ended, which had files of it, before all had committed"
                dead = min(set(part.ranks) - group.committed, default=-1)
                record = group.record._replace(state="failed", dead=dead, error=error)
                await self._course.end(group, record)
                return
            await self._engine.transact(groups.drop_part, group.ino, group.record.id, gone)
            group.parts.pop(gone, None)
            for rank in set(part.ranks) - group.committed:
                group.away[rank] = trio.current_time()
        self._table.look()

    def status(self) -> dict[str, Any]:
        """The status. ``last``: the last durable group of this mount."""
        return {
            "open": len(self._table.open),
            "committed": len(self._table.live) - len(self._table.open),
            "pending": sum(
                group.pending is not None for group in self._table.by_directory.values()
            ),
            "files": len(self._members.group_of),
            "durable": self._course.durable,
            "last": self._course.last,
        }


def _unchanged(tx: ReadTransaction, members: dict[int, GroupMember]) -> list[Inode]:
    """Files unchanged since they were closed."""
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
    """Files below these directories: directory, inode, since when undrained."""
    found = []
    for file in files:
        top = groups.directory_of(tx, file.ino, tops)
        if top is not None:
            found.append((top, namespace.get_inode(tx, file.ino), file.since_ns))
    return found
