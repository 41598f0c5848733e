"""The work of the rebuild, as reads and writes find it out; and the clean burst copies that are
needed meanwhile, because they may hold bytes that nobody else has."""

from collections.abc import Callable, Iterable, Mapping, Set

import trio

from aifs.core.upkeep import Upkeep, Work
from aifs.data.servers import Servers
from aifs.meta.degraded import any_degraded
from aifs.meta.kv import Engine
from aifs.meta.server_uses import is_file_whole

_REPORTS_MAX = 1000

Report = tuple[int, int, int]
"""Object id, inode number (0: a container), and mask of one column."""


class Damage:
    """Columns to protect, rebuild or move. Used from one trio thread; does not block."""

    def __init__(self, upkeep: Upkeep) -> None:
        self._upkeep = upkeep
        self._reports: dict[Report, None] = {}
        self.asked = 0
        """Counts the reasons to look for what is due."""

    def due(self) -> None:
        """Note that a record asks for a rebuild or move, or that servers have changed."""
        self.asked += 1
        self._upkeep.wake(Work.REBUILD)

    def report(self, oid: int, ino: int, column: int) -> None:
        """A column has wrong bytes, or has none where it should have."""
        report = (oid, ino, 1 << column)
        if report not in self._reports and len(self._reports) < _REPORTS_MAX:
            self._reports[report] = None
            self.due()

    def first(self) -> Report | None:
        """The oldest report that nobody has seen to."""
        return next(iter(self._reports), None)

    def seen_to(self, report: Report) -> None:
        """It is on record, or not true any more."""
        self._reports.pop(report, None)


# --- copies that are needed -----------------------------------------------------------------------


class Needs:
    """A clean copy is needed if the data servers cannot read its file (a server lost, absent or
    failing; wrong columns), or a scrub found it wrong there. Used from one trio thread."""

    def __init__(
        self, engine: Engine, servers: Servers, wrong_objects: Callable[[], Set[int]]
    ) -> None:
        """``wrong_objects``: oids of files that are known to have lost bytes."""
        self._engine = engine
        self._servers = servers
        self._wrong_objects = wrong_objects
        self._needed: set[int] = set()  # as was found when they were last looked at

    async def find(self, owners: Mapping[int, int]) -> set[int]:
        """Which of these clean copies, with their files, are needed now."""
        gone, wrong = missing(self._servers), self._wrong_objects()
        needed: set[int] = set()
        if not gone and not wrong and not await self._engine.view(any_degraded):
            return needed
        for copy_id, ino in owners.items():
            if not await self._engine.view(is_file_whole, ino, gone, wrong):
                needed.add(copy_id)
            await trio.lowlevel.checkpoint()
        return needed

    def note(self, looked_at: Set[int], needed: Set[int]) -> None:
        """Somebody wanted to drop the copies ``looked_at``; ``needed`` of them stay."""
        self._needed = (self._needed - looked_at) | needed

    def is_needed(self, copy_id: int) -> bool:
        """Whether a copy could not be dropped, because the data servers miss bytes of it."""
        return copy_id in self._needed

    def released(self, copy_id: int) -> None:
        """The copy is no cache any more."""
        self._needed.discard(copy_id)

    @property
    def copies(self) -> Iterable[int]:
        """Those that stayed."""
        return self._needed


def missing(servers: Servers) -> frozenset[int]:
    """Data servers that cannot be relied on now: lost, absent or failing."""
    return frozenset(server.id for server in servers.capacity() if server.state != "ok")
