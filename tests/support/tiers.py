"""Which tests a run executes.

- by default: each test that is not marked, once for each combination of what it is about. A
  parameter that is an *axis*, a configuration in which the same is to hold, takes its values in
  turn: ``AXES``, and the names in a test's mark ``sweep("a", "b")``;
- ``--all``: with each value of each axis; also the tests marked ``sweep`` alone: more cases of what
  a test of the default run shows, at a higher price;
- ``--long``: also those marked ``long``, which take minutes to hours each;
- ``--changed[=REVISION]``: of ``--all`` the files that the changes since then can reach; the tests
  that failed last come first.

Tests of a file that is named on the command line run with their sweeps, unless ``--default`` is
given.
"""

import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable
from pathlib import Path

import pytest

from tests.support import reach

AXES = {
    *("form", "kind", "layout", "policy", "redundancy", "shape", "way"),  # of stores
    *("here", "module_mount", "place", "where"),  # where a mount or a test works
    "seed",
    *("a_postgres", "engine", "engine_kind"),
}
"""Names of parameters and fixtures, in all tests."""
_ALWAYS_FIRST = {"a_postgres", "engine", "engine_kind", "module_mount"}
"""Not in turn: the default run has the engine, the database and the mount that users have."""

DEFAULT, SWEEP, LONG = range(3)
TIER = pytest.StashKey[int]()
"""Of a test: the smallest run that has it."""
_SWEPT_FILE = "\npytestmark = pytest.mark.sweep\n"
_LEFT_OUT = "left out, as the time is up"


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="also run the cases marked sweep")
    parser.addoption("--default", action="store_true", help="no sweeps of named files")
    parser.addoption("--long", action="store_true", help="also those that take minutes to hours")
    parser.addoption(
        "--changed",
        nargs="?",
        const="HEAD",
        metavar="REVISION",
        help="run the files of --all that the changes since REVISION can reach (HEAD: what is not"
        " committed yet)",
    )
    parser.addoption(
        "--beyond", action="store_true", help="of these, only what the default run leaves out"
    )
    parser.addoption(
        "--budget", type=float, metavar="SECONDS", help="start no test later than this"
    )


class Tiers:
    """Leaves out the tests that are not asked for, without a report for each."""

    def __init__(self, config: pytest.Config) -> None:
        option = config.getoption
        named = any(Path(arg.partition("::")[0]).is_file() for arg in config.args)
        sweeps = option("--all") or option("--changed") is not None
        sweeps |= named and not option("--default")
        self._wanted = {DEFAULT, SWEEP, LONG} if option("--long") else {DEFAULT}
        if sweeps:
            self._wanted.add(SWEEP)
        if option("--beyond"):
            self._wanted.remove(DEFAULT)
        self._left_out: Counter[str] = Counter()
        self._reached: set[str] | None
        given = getattr(config, "workerinput", None)
        if given is not None:
            self._reached, self._end_s = given["reached"], given["end_s"]
            return
        self._reached, budget_s = None, option("--budget")
        self._end_s = None if budget_s is None else time.time() + budget_s
        if (revision := option("--changed")) is not None:
            config.option.failedfirst = True
            try:
                self._reached = reach.reached(reach.changed_since(revision))
            except ValueError as error:
                raise pytest.UsageError(f"--changed={revision}: {error}") from None

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Tell a process that runs tests what it would have to find out again."""
        given = {"reached": self._reached, "end_s": self._end_s}
        node.workerinput.update(given)  # type: ignore[attr-defined]

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        """Files of which no test is wanted are not even imported: torch takes seconds."""
        is_test = collection_path.name.startswith("test_")
        return True if is_test and not self.wants(collection_path) else None

    def wants(self, file: Path) -> bool:
        """Whether any test of a file may be wanted."""
        if self._reached is not None:
            return str(file.relative_to(reach.ROOT)) in self._reached
        return self._wanted != {DEFAULT} or _SWEPT_FILE not in file.read_text()

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        _assign_tiers(items)
        left_out = [item for item in items if item.stash[TIER] not in self._wanted]
        if left_out:
            config.hook.pytest_deselected(items=left_out)
            items[:] = [item for item in items if item.stash[TIER] in self._wanted]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self) -> None:
        if self._end_s is not None and time.time() > self._end_s:
            pytest.skip(_LEFT_OUT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and _LEFT_OUT in str(report.longrepr):
            self._left_out[report.nodeid.partition("::")[0]] += 1

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self._left_out:
            terminalreporter.section(f"{self._left_out.total()} tests {_LEFT_OUT}")
            for file, count in sorted(self._left_out.items()):
                terminalreporter.write_line(f"{count:5} of {file}")


def _assign_tiers(items: Iterable[pytest.Item]) -> None:
    cases: defaultdict[tuple[Hashable, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marks = list(item.iter_markers("sweep"))
        if item.get_closest_marker("long"):
            item.stash[TIER] = LONG
        elif any(not mark.args for mark in marks):
            item.stash[TIER] = SWEEP
        elif key := _swept_from(item, {name for mark in marks for name in mark.args}):
            item.stash[TIER] = SWEEP
            cases[key].append(item)
        else:
            item.stash[TIER] = DEFAULT
    turns: dict[Hashable, int] = {}
    for (parent, name, *_), some in cases.items():
        some = [item for item in some if _uses_first(item)] or some
        turn = turns.get((parent, name), zlib.crc32(str(name).encode()))  # not all begin alike
        turns[parent, name] = turn + 1
        some[turn % len(some)].stash[TIER] = DEFAULT


def _swept_from(item: pytest.Item, named: set[str]) -> tuple[Hashable, ...]:
    """What the cases have in common of which the default run has one; empty: it has them all."""
    call = getattr(item, "callspec", None)
    if call is None:
        return ()
    if unknown := named - call.params.keys():
        raise pytest.UsageError(f"{item.nodeid}: sweep names {unknown}, which it does not have")
    axes = call.params.keys() & (AXES | named)
    others = (
        (name, value if isinstance(value, Hashable) else call.indices[name])
        for name, value in call.params.items()
        if name not in axes
    )
    return (item.parent, item.originalname, *others) if axes else ()  # type: ignore[attr-defined]


def _uses_first(item: pytest.Item) -> bool:
    indices = item.callspec.indices  # type: ignore[attr-defined]
    return not any(indices[name] for name in indices.keys() & _ALWAYS_FIRST)
