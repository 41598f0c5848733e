"""The planner: a pattern becomes a plan.

``fast``, the default: flows in bytes (``relaxed``), then whole chunks and exchanges (``whole``). A
flow has an edge per source, destination and holder of each distinct set of holders, and S * D more
with links; a handful of flows are solved, then a bounded number of exchanges. The number of chunks
does not matter. ``lp``: the linear program (``lp``, the reference) in place of the flows.
"""

from aifs.core.errors import Invalid
from aifs.group import lp, relaxed, whole
from aifs.group.pattern import Pattern
from aifs.group.plan import Plan

SOLVERS = {"fast": relaxed.relax, "lp": lp.solve}


def plan(pattern: Pattern, solver: str = "fast") -> Plan:
    """The plan of a grouped write. Raises NoSpace (what is in the way), Invalid (``lp`` is not
    installed).
    """
    if solver not in SOLVERS:
        raise Invalid(f"{solver} is no solver; there are {', '.join(SOLVERS)}")
    parts, lower_bound_s = SOLVERS[solver](pattern)
    return Plan(pattern, whole.shares(pattern, parts, lower_bound_s), lower_bound_s, solver)
