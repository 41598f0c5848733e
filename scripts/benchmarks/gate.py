"""Is this tree slower than another one? Both trees and the plain directory do the same, in turns;
each row that takes longer than before, beyond its noise, is named.

A *round* has a new daemon and a new store of each tree, both mounted at the same time below one
directory. In it a course visits the trees in the order this, that, that, this, or the other way
round; then the plain directory. So what drifts slowly, on the machine or in a store, meets both
alike, and what a daemon got by chance (where its memory lies, how its tables are hashed) is drawn
anew in each round.

The gate and all that it starts go before other programs (nice -20), where that is allowed.

Two costs of an operation are compared: the time by the clock, and the processor time of the daemon,
its movers and its database. Other load changes the latter much less; it counts where it is at least
a fifth of the former.

**The statistic.** What a round says of a tree is the mean of the logarithms of its faster visits, a
half of all: other load makes some visits slower, and none faster. The ratio of a round is what it
says of this tree, less what it says of the other; that of a row is the median of its rounds. Its
*noise* is the standard error of that median, 1.25 s / sqrt(rounds), where s is the median deviation
of the rounds from their median, a robust estimate of what the ratio of a round is off by. Fewer
than ``MANY`` rounds can agree by chance: there s is at least the median of how much a tree differs
from itself, between the first and the second half of its visits in a round. A row is *slower* if
its ratio exceeds ``LEAST`` by more than ``ERRORS`` times its noise.

After ``ROUNDS`` rounds a row is done if it is not slower, and if a slow-down of ``LOOKED_FOR`` can
be excluded. The others are measured in further rounds, as long as there is time; from ``MANY`` on
only those that look slower than ``LEAST``. A row is named that is slower by all of its rounds.
"""

import json
import math
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from gate_rows import COURSES, NORMAL, ROWS, WARM, Amount, Cost, Course, Plain, Row
from machines import Failed
from rich.console import Console
from rich.table import Table
from systems import touch_memory
from trees import Absent, Tree, default_revision, installed, this_tree

ROUNDS, MANY, MOST_ROUNDS = 5, 8, 30
LEAST = 0.03
ERRORS = 2.5
LOOKED_FOR = 0.10
PROCESSOR_SHARE = 0.2
"""Of the time by the clock: less is not compared."""
QUICK_S, ALL_S = 510.0, 2160.0
"""After that no further round begins."""
FIRST = -20
"""Nice value."""
BOTH = THIS, THAT = "this", "that"
PLAIN = "plain"

Visits = tuple[Sequence[float], Sequence[float]]
"""What each visit of a round cost: of this tree, of that tree."""


# --- the statistic ---


class Comparison(NamedTuple):
    """``ratio``: what an operation of this tree costs, in that of the other. ``noise``: the
    standard error of its logarithm."""

    ratio: float
    noise: float

    @property
    def is_slower(self) -> bool:
        return math.log(self.ratio) > math.log1p(LEAST) + ERRORS * self.noise

    @property
    def is_faster(self) -> bool:
        return -math.log(self.ratio) > math.log1p(LEAST) + ERRORS * self.noise

    @property
    def is_clear(self) -> bool:
        """Whether what is looked for would have been found, or is excluded."""
        return self.is_slower or math.log(self.ratio) + ERRORS * self.noise < math.log1p(LOOKED_FOR)


def compare(rounds: Sequence[Visits]) -> Comparison:
    ratios = [_level(this) - _level(that) for this, that in rounds]
    middle = statistics.median(ratios)
    off = statistics.median(abs(ratio - middle) for ratio in ratios)
    if len(rounds) < MANY:
        off = max(off, _of_itself(rounds))
    error = 1.4826 * off  # of a normal distribution, by the median
    return Comparison(math.exp(middle), 1.2533 * error / math.sqrt(len(rounds)))


def _of_itself(rounds: Sequence[Visits]) -> float:
    """How much a tree differs from itself: the median, as an error of a ratio of two trees."""
    halves = [
        abs(_level(visits[: len(visits) // 2]) - _level(visits[len(visits) // 2 :]))
        for both in rounds
        for visits in both
        if len(visits) > 1
    ]
    return statistics.median(halves) / math.sqrt(2) if halves else 0.0


def _level(visits: Sequence[float]) -> float:
    """The mean logarithm of the faster half."""
    return statistics.fmean(map(math.log, sorted(visits)[: (len(visits) + 1) // 2]))


# --- measuring ---


def _wall_s(cost: Cost) -> float:
    return cost.wall_s


def _processor_s(cost: Cost) -> float:
    return cost.processor_s


@dataclass
class Found:
    """What was measured of a row. ``costs``: by system, by round, of each visit. ``absent``: why a
    tree has none."""

    row: Row
    costs: dict[str, list[list[Cost]]] = field(default_factory=lambda: defaultdict(list))
    absent: dict[str, str] = field(default_factory=dict)

    def comparisons(self) -> dict[str, Comparison]:
        """Of what counts: ``clock``, ``processor``."""
        if self.absent or not self.costs:
            return {}
        found = {"clock": self._compare(_wall_s)}
        shares = (self.median(name, _processor_s) / self.median(name, _wall_s) for name in BOTH)
        if min(shares) >= PROCESSOR_SHARE:
            found["processor"] = self._compare(_processor_s)
        return found

    @property
    def systems(self) -> list[str]:
        """That were measured."""
        return [name for name, costs in self.costs.items() if costs and name not in self.absent]

    def _compare(self, of: Callable[[Cost], float]) -> Comparison:
        both = zip(self.costs[THIS], self.costs[THAT], strict=True)
        return compare([([*map(of, this)], [*map(of, that)]) for this, that in both])

    def median(self, name: str, of: Callable[[Cost], float]) -> float:
        """Of the rounds."""
        return statistics.median(statistics.median(map(of, visits)) for visits in self.costs[name])

    @property
    def slower(self) -> list[str]:
        return [what for what, found in self.comparisons().items() if found.is_slower]

    @property
    def is_clear(self) -> bool:
        least = min(self.comparisons().values(), key=lambda one: one.noise, default=None)
        return least is None or least.is_clear

    def needs(self, round_: int) -> bool:
        """Whether this round would tell more."""
        if round_ < ROUNDS or self.slower:
            return True
        looks_slower = any(one.ratio > 1 + LEAST for one in self.comparisons().values())
        return not self.is_clear and (round_ < MANY or looks_slower)

    @property
    def verdict(self) -> str:
        if self.absent:
            return "absent"
        if self.slower:
            return f"slower ({', '.join(self.slower)})"
        if not self.is_clear:
            return "unclear"
        faster = [what for what, found in self.comparisons().items() if found.is_faster]
        return f"faster ({', '.join(faster)})" if faster else "same"

    @property
    def is_named(self) -> bool:
        """That this tree lacks what the other has counts, too."""
        return bool(self.slower) or (THIS in self.absent and THAT not in self.absent)


class Gate:
    """``found``: by the row's name. ``say``: shows what goes on."""

    def __init__(
        self,
        trees: Mapping[str, Tree],
        base: Path,
        rows: Iterable[Row],
        say: Callable[[str], None],
        amount: Amount = NORMAL,
    ) -> None:
        self.found = {row.name: Found(row) for row in rows}
        self._trees = trees
        self._base = base
        self._say = say
        self._amount = amount

    def measure(self, budget_s: float) -> None:
        """Takes longer only where ``ROUNDS`` rounds do."""
        begin_s = now_s = time.monotonic()
        touch_memory(self._base, 12 * self._amount.mib)
        for round_ in range(MOST_ROUNDS):
            left = {name for name, one in self.found.items() if one.needs(round_)}
            took_s, now_s = time.monotonic() - now_s, time.monotonic()
            if not left or (round_ >= ROUNDS and now_s + took_s > begin_s + budget_s):
                break
            courses = [one for one in COURSES if any(row.name in left for row in one.rows)]
            for _, of_place in groupby(courses, lambda course: course.place):
                self._round(round_, list(of_place))

    def _round(self, round_: int, courses: Sequence[Course]) -> None:
        """Of courses of one place."""
        with ExitStack() as stack:
            systems: dict[str, Any] = {PLAIN: stack.enter_context(Plain(PLAIN, self._base))}
            for name, tree in self._trees.items():
                with self._absent_if_it_fails(name, courses):
                    system = courses[0].place(name, tree, self._base)
                    systems[name] = stack.enter_context(system)
            for course in courses:
                if not course.has_plain and PLAIN in systems:
                    del systems[PLAIN]
                self._measure(round_, course, systems)

    def _measure(self, round_: int, course: Course, systems: Mapping[str, Any]) -> None:
        told = ", ".join(row.name for row in course.rows if row.name in self.found)
        self._say(f"round {round_ + 1}: {told}")
        visits: dict[tuple[str, str], list[Cost]] = defaultdict(list)
        for name, system in systems.items():
            with self._absent_if_it_fails(name, [course]):
                for _ in course.act(system, WARM):
                    pass
        for turn in range(course.turns):
            order = [THIS, THAT] if (round_ + turn) % 2 == 0 else [THAT, THIS]
            for name in [*order, *reversed(order), PLAIN]:
                if name not in systems or self._is_absent(name, course):
                    continue
                with self._absent_if_it_fails(name, [course]):
                    for row, cost in course.act(systems[name], self._amount):
                        visits[row, name].append(cost)
        for (row, name), costs in visits.items():
            if row in self.found:
                self.found[row].costs[name].append(costs)

    def _is_absent(self, name: str, course: Course) -> bool:
        return any(name in self.found[row.name].absent for row in self._rows(course))

    def _rows(self, course: Course) -> Iterator[Row]:
        return (row for row in course.rows if row.name in self.found)

    @contextmanager
    def _absent_if_it_fails(self, name: str, courses: Iterable[Course]) -> Iterator[None]:
        try:
            yield
        except (Absent, Failed, OSError, RuntimeError, subprocess.SubprocessError) as error:
            for course in courses:
                for row in self._rows(course):
                    self.found[row.name].absent.setdefault(name, str(error))


# --- the report ---


def gate(
    against: str | None,
    base: Path,
    asked: Sequence[Row],
    as_json: bool,
    log: Console,
) -> bool:
    """Measure this tree against another one; print all rows. Returns whether none is named."""
    with log.status("looking for the trees") as status:
        before = installed(against or default_revision(), status.update)
        trees = {THIS: this_tree(), THAT: before}
        measured = Gate(trees, base, asked, status.update)
        with _before_others():
            measured.measure(ALL_S if len(asked) == len(ROWS) else QUICK_S)
    found = list(measured.found.values())
    if as_json:
        titles = {name: tree.title for name, tree in trees.items()}
        print(json.dumps({"trees": titles, "rows": [*map(_as_json, found)]}, indent=2))
    else:
        _show(found, trees)
    return not any(one.is_named for one in found)


@contextmanager
def _before_others() -> Iterator[None]:
    """Other programs have the processors when what is measured does not want them. Linux weighs
    whole sessions against each other, if it makes a group of each (sched_autogroup)."""
    session = Path("/proc/self/autogroup")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, FIRST)
    with suppress(OSError):
        session.write_text(str(FIRST))
    try:
        yield
    finally:
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, before)
        with suppress(OSError):
            session.write_text(str(before))


def _as_json(one: Found) -> dict[str, Any]:
    return {
        "row": one.row.name,
        "unit": one.row.unit,
        "rounds": len(one.costs[THIS]),
        "wall_s": {name: one.median(name, _wall_s) for name in one.systems},
        "processor_s": {name: one.median(name, _processor_s) for name in one.systems},
        "compared": {what: found._asdict() for what, found in one.comparisons().items()},
        "absent": one.absent,
        "verdict": one.verdict,
        "named": one.is_named,
    }


def _show(found: Sequence[Found], trees: Mapping[str, Tree]) -> None:
    table = Table(
        "row",
        *(PLAIN, THAT, THIS, "longer by"),
        *("processor:\nthat", "processor:\nthis", "more by"),
        *("rounds", "verdict"),
    )
    for column in table.columns[1:-1]:
        column.justify = "right"
    for one in found:
        compared = one.comparisons()
        table.add_row(
            one.row.name,
            *(_rate(one, name) for name in (PLAIN, THAT, THIS)),
            _change(compared.get("clock")),
            *(_processor(one, name) for name in (THAT, THIS)),
            _change(compared.get("processor")),
            str(len(one.costs[THIS])),
            one.verdict,
        )
    console = Console()
    if not console.is_terminal:
        console.width = 180
    console.print(f"this: {trees[THIS].title}; that: {trees[THAT].title}")
    console.print(table)
    for one in found:
        for name, why in one.absent.items():
            console.print(f"{one.row.name}: absent in {name} tree: {why}")
    named = ", ".join(one.row.name for one in found if one.is_named)
    console.print(f"slower than before: {named}" if named else "no row is slower than before")


def _rate(one: Found, name: str) -> str:
    if name not in one.systems:
        return "absent" if name in one.absent else ""
    each_s = one.median(name, _wall_s)
    return f"{each_s:.2f} s" if each_s > 0.1 else f"{1 / each_s:,.0f} {one.row.unit}/s"


def _processor(one: Found, name: str) -> str:
    return f"{1e6 * one.median(name, _processor_s):,.0f} us" if name in one.systems else ""


def _change(found: Comparison | None) -> str:
    return f"{found.ratio - 1:+.1%} ± {found.noise:.1%}" if found else ""
