"""The course of a group: after the last commit it is buffered, recorded, published and drained; it
may end before, or be decided by another host (states: docs/design/commit.md)."""

import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import trio

from aifs.core import faults
from aifs.core.errors import Busy, FsError
from aifs.core.log import logger
from aifs.core.tasks import run_all
from aifs.core.waiting import PUBLISH, Ended, doing, waits_for
from aifs.data.patience import giving_up
from aifs.files.types import CallerLike
from aifs.meta import groups
from aifs.meta.groups import GroupMember, GroupPart, GroupRecord
from aifs.meta.kv import Engine
from aifs.saves.group import DirectoryGroup, File
from aifs.saves.joint import Joint, PartHost
from aifs.saves.listed import find_unequal
from aifs.saves.members import Members
from aifs.saves.parts import Parts
from aifs.saves.table import GroupTable

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

Publish = Callable[[int, bytes, int, CallerLike], Awaitable[None]]
"""Shows a directory (inode number, final name, how many ranks have saved it, on whose behalf)."""


class Course:
    """Used from one trio thread."""

    def __init__(
        self,
        engine: Engine,
        table: GroupTable,
        members: Members,
        parts: Parts,
        joint: Joint,
        part_host: PartHost,
        ended: Ended,
    ) -> None:
        """``ended`` is told of drains and publishes."""
        self._engine = engine
        self._ended = ended
        self._table = table
        self._members = members
        self._parts = parts
        self._joint = joint
        self._part_host = part_host
        self._nursery: trio.Nursery | None = None
        """Where what takes time goes on; None while ``running`` does not."""
        self._show: Publish | None = None  # as long
        self.durable = 0
        """How many groups have ended well since the mount."""
        self.last: dict[str, Any] | None = None
        """What the drain of the last of them has said."""

    # --- in the background ---

    @asynccontextmanager
    async def running(self, publish: Publish) -> AsyncIterator[trio.Nursery]:
        """Within the block started work goes on, also the caller's in the nursery. ``publish``: for
        complete groups."""
        self._show = publish
        try:
            async with trio.open_nursery() as self._nursery:
                yield self._nursery
        finally:
            self._nursery = None

    def start(
        self, work: Callable[..., Awaitable[None]], group: DirectoryGroup, *args: Any
    ) -> None:
        """In the background; entering ``running`` begins what is due then (``resume``)."""
        if self._nursery is not None:
            with giving_up():  # also where somebody's commit is what begins it
                self._nursery.start_soon(work, group, *args)

    def resume(self, group: DirectoryGroup) -> None:
        """Go on with a group where an earlier run, or another host, has left it."""
        group.settling = False
        if group.is_live and not group.is_open and not group.is_ours:
            self.start(self._part_host.store_unasked, group)
            return
        if group.is_open:
            self.complete(group)
        elif group.is_live:
            self.start(self._settle, group)

    # --- after the last commit ---

    def complete(self, group: DirectoryGroup) -> None:
        """If all have committed, its end begins."""
        if not group.is_ours:
            return
        if group.is_open and group.shares and group.is_complete and not group.settling:
            group.settling = True
            self.start(self._settle, group)

    async def _settle(self, group: DirectoryGroup) -> None:
        """After the last commit: buffer, record, publish, drain."""
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

    async def _buffer(self, group: DirectoryGroup) -> None:
        committed_ns = time.time_ns()
        try:
            if not group.record.options.explicit:
                await self._members.sync(
                    group, [file for file in group.files.values() if file.counted]
                )
            if group.record.options.explicit and group.record.options.same_size:
                group.elsewhere = await self._parts.files(group)
            error = await find_unequal(self._engine, group)
            faults.reach(_BUFFERED)
        finally:
            group.settling = False
        if not group.is_open or not group.is_complete:
            return  # it has been cancelled, or a file opened again
        if error:
            await self.end(group, group.record._replace(state="failed", error=error, unequal=True))
            return
        record = group.record._replace(
            state="committed", committed_ns=committed_ns, buffered_ns=time.time_ns()
        )

        def settle() -> None:
            self._members.settle(group)
            self._table.look()

        if await self.become(group, record, settle):
            faults.reach(_COMMITTED)

    async def _publish(self, group: DirectoryGroup) -> None:
        assert self._show is not None  # it is ``run`` that publishes
        try:
            with doing(self._ended, "publish", [group.ino]):
                options = group.record.options
                await self._show(group.ino, options.publish, options.ranks, group.record.asker)
            faults.reach(_PUBLISHED)
            record = group.record._replace(published=True)
        except FsError as error:
            _log.info("group %d is not published: %s", group.record.id, error)
            group.publish_failure = error
            record = group.record._replace(publish_error=str(error))
        await self.become(group, record)

    async def _store(self, group: DirectoryGroup) -> None:
        """Wait until it is durable."""
        with doing(self._ended, "drain", [group.ino]):
            lost = await self._store_all(group)
            while not group.is_settled:
                with waits_for(PUBLISH):
                    await group.event.wait()
        if group.is_live and lost:
            names = ", ".join(lost)
            why = f"its files on host {names} were not on the data servers when that one ended"
            await self.end(group, group.record._replace(state="failed", error=why))
        elif group.is_live:
            report = json.dumps(group.report.to_json()).encode()
            record = group.record._replace(
                state="durable", durable_ns=time.time_ns(), report=report
            )

            def leave() -> None:
                self._members.leave(group)
                self.durable += 1
                self.last = {"name": record.options.name.decode(), **group.report.to_json()}
                group.drain_error = ""

            await self.become(group, record, leave)
            group.wake()
            self._table.look()

    async def _store_all(self, group: DirectoryGroup) -> list[str]:
        """Have all hosts bring a group to the data servers; returns names of hosts that died
        before."""
        await self._engine.shown()  # they know that it is committed
        lost: list[str] = []
        kept: dict[int, set[bytes]] = {}
        if group.others:
            kept = await self._joint.spread(group)
            group.kept = kept.get(group.host, set())

        async def others() -> None:
            lost.extend(await self._parts.store(group, kept))

        await run_all(partial(self._part_host.store, group), others)
        return lost

    # --- how it ends ---

    async def end(self, group: DirectoryGroup, record: GroupRecord) -> None:
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
            self._table.look()

        await self.become(group, record, leave)

    async def cancel(self, group: DirectoryGroup, reason: str) -> None:
        """Nothing happens to one that has ended."""
        if group.is_live:
            await self.end(group, group.record._replace(state="cancelled", error=reason))

    async def become(
        self, group: DirectoryGroup, record: GroupRecord, then: Callable[[], None] = lambda: None
    ) -> bool:
        """Make the group as ``record`` says, in core and on record; ``then`` is called when core
        is. False, with nothing done: another host was first."""
        if group.host:
            if not await self._put_first(group, record):
                return False
            then()
        else:
            group.record = record
            then()
            await self._put(group)
        return True

    async def _put(self, group: DirectoryGroup) -> None:
        """Bring the group's state to stable storage; if that fails it counts in this mount
        alone."""
        try:
            async with self._table.recording:
                await self._engine.transact(groups.update, group.ino, group.record)
            await self._engine.barrier()
        except FsError as error:
            _log.warning(
                "group %d: its state %s is not on record: %s", group.record.id, group.state, error
            )

    async def _put_first(self, group: DirectoryGroup, record: GroupRecord) -> bool:
        """With several hosts: bring ``record`` to stable storage. False: another host was first;
        its change is known then."""
        before, after = group.record._asdict(), record._asdict()
        changes = {name: value for name, value in after.items() if value != before[name]}
        try:
            async with self._table.recording:
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
        if self._table.by_directory.get(group.ino) is not group or now not in (
            before["state"],
            record.state,
        ):
            return False  # others have gone on from there
        group.record = group.record._replace(**changes)
        return True

    # --- what other hosts make of it ---

    def follow(self, ino: int, record: GroupRecord | None) -> None:
        """Another host has changed the record of a directory's group (None: removed). Does not
        block."""
        group = self._table.by_directory.get(ino)
        if group is not None and (record is None or record.id != group.record.id):
            self._ended_elsewhere(group)
            group = None
        if record is None or (
            group is None and record.state not in groups.LIVE and record.pending is None
        ):
            return
        if group is None:
            group = self._table.add(ino, record)
        elif group.is_live and record.state not in groups.LIVE:
            self._members.leave(group)
        was_open, was_settled = group.is_open, group.state == "draining"
        group.record = record
        self.adopt_state(group, was_settled)
        if was_open and not group.is_open and group.is_live:
            self._members.settle(group)
            self.start(self._part_host.store_unasked, group)
        group.wake()
        self._table.look()

    def adopt_state(self, group: DirectoryGroup, is_settled: bool = False) -> None:
        """Take the recorded state over: committed until durable. ``is_settled``: it was draining
        here; else the record of the host that sees to it says so."""
        record = group.record
        if record.state != "committed":
            return
        if not group.is_ours:
            is_settled = is_settled or not record.options.publish or record.published
            if record.publish_error:
                group.publish_failure, is_settled = Busy(record.publish_error), True
        if is_settled:
            group.record = record._replace(state="draining")

    def follow_part(self, ino: int, host: int, part: GroupPart | None) -> None:
        """Another host has this of a group, or nothing any more. Does not block."""
        group = self._table.by_directory.get(ino)
        if group is not None:
            if part is None:
                group.parts.pop(host, None)
            else:
                group.parts[host] = part
                for rank in part.ranks:
                    group.away.pop(rank, None)
            group.wake()
            self._table.look()

    def _ended_elsewhere(self, group: DirectoryGroup) -> None:
        """It is off record: its directory has its name, or it was given up."""
        if group.is_live and not group.shares and group.is_complete:
            group.record = group.record._replace(state="committed", pending=None)
        elif group.is_held:
            reason = "another host has given its directory's group up"
            self._members.leave(group)
            group.record = group.record._replace(state="cancelled", error=reason, pending=None)
        del self._table.by_directory[group.ino]
        self._table.remember(group.ino, group.record, group.publish_failure)
        group.wake()
        self._table.look()

    def follow_member(self, ino: int, number: int, member: GroupMember | None) -> None:
        """Another host has recorded a rank's commit or a closed file (None: removed). Does not
        block."""
        group = self._table.by_directory.get(ino)
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
        self._table.look()
        self.complete(group)
