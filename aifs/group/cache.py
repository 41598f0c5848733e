"""Plans from step to step: the same ranks write the same shapes, so the plan of the last step
serves again.

Rules of reuse. A plan is for one fingerprint: names, classes (sizes, counts, holders), links,
replicas. So duplicates that come or go between steps (optimizer state is all zero at first:
AITurbo's false duplicates) are another pattern, and are planned anew. Bandwidths are measured and
never the same twice: a plan serves while none of them has changed by more than ``TOLERANCE``.
Memory and space are what they are now: a plan that no longer fits them is not used. What is handed
out is the old plan on the new pattern, so its times are those of now; its lower bound stays one.
"""

from collections import OrderedDict
from dataclasses import replace

from aifs.group import planner
from aifs.group.pattern import Destination, Pattern, Source
from aifs.group.plan import Plan, problems

TOLERANCE = 0.1
"""By what fraction a bandwidth may differ from the one that was planned with."""


class PlanCache:
    """The ``capacity`` plans used last. Not for several threads at once."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._plans: OrderedDict[tuple[str, str], Plan] = OrderedDict()
        self.hits = self.misses = 0

    def __len__(self) -> int:
        return len(self._plans)

    def plan(self, pattern: Pattern, solver: str = "fast") -> Plan:
        """A plan for ``pattern``: one from before if the rules allow, else a new one. Raises as
        ``planner.plan``.
        """
        key = (solver, pattern.fingerprint)
        old = self._plans.get(key)
        found = old and _again(old, pattern)
        if found:
            self.hits += 1
        else:
            self.misses += 1
            found = self._plans[key] = planner.plan(pattern, solver)
        self._plans.move_to_end(key)
        if len(self._plans) > self._capacity:
            self._plans.popitem(last=False)
        return found


def _again(plan: Plan, pattern: Pattern) -> Plan | None:
    """``plan`` for a pattern of the same fingerprint, or None: it does not do any more."""
    fastest = 1.0
    for now, then in zip(_bandwidths(pattern), _bandwidths(plan.pattern), strict=True):
        if abs(now - then) > TOLERANCE * then:
            return None
        fastest = max(fastest, now / then)
    if problems(pattern, plan.shares):
        return None
    return replace(plan, pattern=pattern, lower_bound_s=plan.lower_bound_s / fastest)


def _bandwidths(pattern: Pattern) -> list[int]:
    nodes: list[Source | Destination] = [*pattern.sources, *pattern.destinations]
    return [
        *(node.bandwidth for node in nodes),
        *(bandwidth for _, bandwidth in sorted(pattern.links.items())),
    ]
