"""The groups that this mount knows of, by their directories: found, begun, changed, forgotten."""

import time
from typing import Any

import trio

from aifs.core.errors import FsError, NoAttribute, Stale
from aifs.core.upkeep import Upkeep, Work
from aifs.meta import groups
from aifs.meta.groups import GroupRecord
from aifs.meta.kv import Engine
from aifs.saves.group import DirectoryGroup, GroupReport

_ENDED_MAX = 16  # groups that have ended and are remembered with their files
# groups of which it is known how they ended, though another one of the directory has followed
_FOLLOWED_MAX = 64


class GroupTable:
    """Used from one trio thread."""

    def __init__(self, engine: Engine, upkeep: Upkeep) -> None:
        self.by_directory: dict[int, DirectoryGroup] = {}
        """Live groups, those with pending directories, and some ended ones, the youngest last."""
        self.open: frozenset[int] = frozenset()
        """Directories whose groups take files."""
        self.recording = trio.Lock()
        """Held while groups' records are written, to keep their order."""
        self.host = engine.host
        """The number of this host; 0 where the store has one."""
        self._followed: dict[int, DirectoryGroup] = {}  # by id
        self._engine = engine
        self._upkeep = upkeep

    async def find(self, ino: int, group_id: int = 0) -> DirectoryGroup:
        """The directory's group, or a followed one by id (0: the present, or last). Raises
        NoAttribute; Stale: unknown (now)."""
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
        """One that ended long ago, unless another begins. Raises NoAttribute."""
        async with self.recording:
            group = self.by_directory.get(ino)
            if group is not None:
                return group
            record = await self._engine.view(groups.find, ino)
        if record is None:
            raise NoAttribute("the directory has no group")
        return self._new(ino, record)

    def pending(self, ino: int) -> DirectoryGroup:
        """The group of a pending directory. Raises NoAttribute."""
        group = self.by_directory.get(ino)
        if group is None or group.pending is None:
            raise NoAttribute()
        return group

    @property
    def live(self) -> list[DirectoryGroup]:
        """Those that have files."""
        return [group for group in self.by_directory.values() if group.is_live and group.shares]

    def add(self, ino: int, record: GroupRecord) -> DirectoryGroup:
        """The group of a directory from now on; callers look (``look``) afterwards."""
        self.by_directory.pop(ino, None)  # the youngest to the end
        group = self.by_directory[ino] = self._new(ino, record)
        return group

    async def begin(
        self, ino: int, record: GroupRecord, before: DirectoryGroup | None
    ) -> DirectoryGroup:
        """A new group of a directory, after ``before``; its end can be asked for by its id. Callers
        hold ``recording``. Raises NotFound, NotADirectory, Invalid."""
        known = None if before is None else before.record.id
        recorded = await self._engine.transact(groups.begin, ino, record, known)
        if before is not None and before.is_live:
            before.record = before.record._replace(
                state="cancelled", error="its directory is pending anew"
            )
            before.wake()
        ended = before.record if before is not None else recorded
        if ended is not None and ended.state not in groups.LIVE:
            self.remember(ino, ended, None if before is None else before.publish_failure)
        group = self.add(ino, record)
        self.look()
        return group

    def remember(self, ino: int, record: GroupRecord, publish_failure: FsError | None) -> None:
        """How a group has ended, for those who ask for it by its id."""
        followed = self._followed[record.id] = self._new(ino, record)
        followed.publish_failure = publish_failure
        for group_id in list(self._followed)[:-_FOLLOWED_MAX]:
            del self._followed[group_id]

    async def change(self, group: DirectoryGroup, **more: Any) -> DirectoryGroup:
        """Change fields of a group's record. Callers hold ``recording``. Raises NotFound,
        Invalid."""
        await self._engine.transact(groups.change, group.ino, group.record.id, more)
        group.record = group.record._replace(**more)  # it may have ended meanwhile
        self.look()
        return group

    def drop(self, group: DirectoryGroup, reason: str) -> None:
        """Nothing is on record any more of a group without files; tasks that wait for it go on."""
        if self.by_directory.get(group.ino) is group:
            del self.by_directory[group.ino]
        group.record = group.record._replace(state="cancelled", error=reason, pending=None)
        group.wake()

    def look(self) -> None:
        """Something has changed that a time-out or the place of files depends on."""
        ended = [ino for ino, group in self.by_directory.items() if not group.is_held]
        for ino in ended[: max(0, len(ended) - _ENDED_MAX)]:
            del self.by_directory[ino]
        self.open = frozenset(group.ino for group in self.live if group.is_open)
        self._upkeep.wake(Work.GROUPS)

    def _new(self, ino: int, record: GroupRecord) -> DirectoryGroup:
        now, now_ns = trio.current_time(), time.time_ns()
        return DirectoryGroup(ino, record, GroupReport(), now, now_ns, self.host)
