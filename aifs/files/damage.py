"""The work of the rebuild, as reads and writes find it out."""

from aifs.core.upkeep import Upkeep, Work

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
