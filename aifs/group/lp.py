"""The reference: the plan's linear program, solved by HiGHS through scipy (extra ``plan``).

AITurbo bisects on the time t and asks each time whether the constraints (see ``pattern``) can be
met. They are linear in t as well as in the chunks, so the least t comes out of one program,
exactly; ``feasible`` asks about one t.
"""

from aifs.core.errors import Invalid, NoSpace
from aifs.group.pattern import Link, Pattern
from aifs.group.relaxed import Part

_UNIT = float(1 << 20)  # of bytes: keeps the numbers within what solvers like
_INFEASIBLE = 2  # of scipy.optimize.linprog


def solve(pattern: Pattern) -> tuple[list[Part], float]:
    """Parts of a plan that may cut chunks, and its time, which no plan beats. Raises NoSpace,
    Invalid (no scipy).
    """
    if not pattern.classes:
        return [], 0.0
    program = _Program(pattern)
    found = program.run(None)
    if found is None:
        raise NoSpace("memory and space are too small for all bytes, at any time")
    return found


def feasible(pattern: Pattern, time_s: float) -> bool:
    """Whether some assignment, which may cut chunks, takes at most ``time_s``. Raises Invalid (no
    scipy).
    """
    return not pattern.classes or _Program(pattern).run(time_s) is not None


class _Program:
    """The variables x[k, s, d] (in units of bytes), then t; rows of constraints by name."""

    def __init__(self, pattern: Pattern) -> None:
        self.pattern = pattern
        self.columns = [
            (kind, source, destination)
            for kind, chunks in enumerate(pattern.classes)
            for source in chunks.sources
            for destination in range(len(pattern.destinations))
        ]
        self.rows: dict[tuple[str, object], int] = {}
        self.limits: list[float] = []
        self.entries: list[tuple[int, int, float]] = []
        for column, (kind, source, destination) in enumerate(self.columns):
            chunks = pattern.classes[kind]
            self._limit(("once", (kind, destination)), column, fixed=chunks.bytes)
            self._limit(("egress", source), column, rate=pattern.sources[source].bandwidth)
            self._limit(
                ("ingress", destination), column, rate=pattern.destinations[destination].bandwidth
            )
            self._limit(
                ("link", (source, destination)), column, rate=self._bandwidth((source, destination))
            )
            self._limit(("memory", source), column, fixed=pattern.sources[source].memory)
            self._limit(
                ("space", destination), column, fixed=pattern.destinations[destination].space
            )

    def _bandwidth(self, link: Link) -> int | None:
        return self.pattern.links.get(link)

    def _limit(
        self,
        name: tuple[str, object],
        column: int,
        fixed: int | None = None,
        rate: int | None = None,
    ) -> None:
        """Let a column count against the row ``name``: sum <= fixed, or sum - rate * t <= 0;
        neither: no limit.
        """
        if fixed is None and rate is None:
            return
        row = self.rows.get(name)
        if row is None:
            row = self.rows[name] = len(self.limits)
            self.limits.append((fixed or 0) / _UNIT)
            if rate is not None:
                self.entries.append((row, len(self.columns), -rate / _UNIT))
        self.entries.append((row, column, 1.0))

    def run(self, time_s: float | None) -> tuple[list[Part], float] | None:
        """The optimum; or, given a time, anything that takes no longer. None: there is nothing."""
        try:
            from scipy.optimize import linprog
            from scipy.sparse import coo_array
        except ImportError:
            raise Invalid(
                "the solver lp needs scipy: pip install 'aifs[plan]', or use the solver fast"
            ) from None
        width = len(self.columns) + 1
        rows, columns, values = zip(*self.entries, strict=True)
        above = coo_array((values, (rows, columns)), shape=(len(self.limits), width))
        kinds = [kind for kind, _, _ in self.columns]
        equal = coo_array(
            ([1.0] * len(kinds), (kinds, range(len(kinds)))),
            shape=(len(self.pattern.classes), width),
        )
        copies = [self.pattern.replicas * chunks.bytes / _UNIT for chunks in self.pattern.classes]
        goal = [0.0] * (width - 1) + [1.0]
        bounds = [(0.0, None)] * (width - 1) + [(0.0, time_s)]
        result = linprog(
            goal, above.tocsr(), self.limits, equal.tocsr(), copies, bounds, method="highs"
        )
        if result.status == _INFEASIBLE:
            return None
        if not result.success:
            raise Invalid(f"the solver lp gave up: {result.message}")
        parts = [
            Part(*column, value * _UNIT / self.pattern.classes[column[0]].size)
            for column, value in zip(self.columns, result.x, strict=False)
            if value > 0
        ]
        return parts, float(result.fun)
