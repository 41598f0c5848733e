"""Which processes go on with a group until they end: those that have joined as ranks, and those
that have marked its directory.
"""

from contextlib import suppress

import trio

from aifs.core.errors import FsError, NotSupported
from aifs.files.types import CallerLike
from aifs.meta.kv import Engine
from aifs.saves import processes
from aifs.saves.course import Course
from aifs.saves.group import DirectoryGroup
from aifs.saves.parts import Parts
from aifs.saves.table import GroupTable


class Living:
    """Used from one trio thread."""

    def __init__(self, engine: Engine, table: GroupTable, parts: Parts, course: Course) -> None:
        self._engine = engine
        self._table = table
        self._parts = parts
        self._course = course

    def take_note(self, group: DirectoryGroup, caller: CallerLike) -> None:
        """The process that asks goes on with the directory as long as it lives, if it can be
        seen."""
        with suppress(NotSupported):
            process = processes.process_of(caller.pid)
            if process not in group.markers:
                group.markers.add(process)
                self.watch(group, None, process)

    def look_at(self, group: DirectoryGroup) -> None:
        """A process that was killed just now may not have been heard of."""
        known: list[tuple[int | None, int]] = [*group.processes.items()]
        known += [(None, process) for process in group.markers]
        for rank, process in known:
            if not processes.lives(process):
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
        pidfd = processes.watch(process)
        if pidfd is not None:
            await processes.wait_for_end(pidfd)
        group.left(rank, process, trio.current_time())
        if rank is not None and self._engine.host and group.is_open:
            with suppress(FsError):  # the mount ends, or the group has
                await self._parts.left(group, rank)
        group.wake()
        self._table.look()
