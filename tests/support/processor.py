"""The processor time of tests, with that of the daemons and other processes that they start.

Each file has a budget for its part of the default run: ``PROCESSOR_S`` in the file, else that of
its folder. A run names the files above theirs, and the 20 tests that took longest.
"""

import os
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import tiers

BUDGETS_S = {"unit": 4.0, "contract": 8.0, "fault": 10.0, "model": 15.0, "mount": 12.0}
"""By folder: seconds of processor time of one file in the default run."""
_SLOWEST = 20
_KEY = "processor_s"


class Meter:
    """Counts the processor time of this process and of all that it starts from now on.

    It uses a control group of version 2, in which daemons count too, which no process waits for.
    Where none can be made (no rights, no version 2), it counts children that were waited for.
    """

    def __init__(self) -> None:
        self._group: Path | None = None
        self._parent = _own_group()
        if self._parent is not None:
            group = self._parent / f"aifs-tests-{os.getpid()}"
            with suppress(OSError):
                group.mkdir()
                (group / "cgroup.procs").write_text(str(os.getpid()))
                self._group = group

    def read_s(self) -> float:
        if self._group is None:
            return sum(os.times()[:4])
        usage = (self._group / "cpu.stat").read_text().split()
        return int(usage[1]) / 1e6

    def close(self) -> None:
        """Remove the control group. What still runs in it goes back to where this process was."""
        if self._group is None or self._parent is None:
            return
        for pid in (self._group / "cgroup.procs").read_text().split():
            with suppress(OSError):  # it has ended meanwhile
                (self._parent / "cgroup.procs").write_text(pid)
        with suppress(OSError):
            self._group.rmdir()
        self._group = None


def _own_group() -> Path | None:
    """The directory of this process's control group of version 2."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    roots = [fields[1] for fields in mounts if fields[2] == "cgroup2"]
    groups = Path("/proc/self/cgroup").read_text().splitlines()
    paths = [line.removeprefix("0::") for line in groups if line.startswith("0::")]
    return Path(roots[0] + paths[0]) if roots and paths else None


class Measuring:
    """In a process that runs tests: its last report of each says what the test took."""

    def __init__(self) -> None:
        self._meter = Meter()
        self._start = 0.0, 0.0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self) -> None:
        self._start = self._meter.read_s(), time.monotonic()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "teardown":
            used_s = self._meter.read_s() - self._start[0]
            passed_s = time.monotonic() - self._start[1]
            item.user_properties.append(
                (_KEY, (round(used_s, 3), round(passed_s, 3), _budget_of(item)))
            )

    def pytest_sessionfinish(self) -> None:
        self._meter.close()


def _budget_of(item: pytest.Item) -> float | None:
    """None for a test that the default run leaves out: it counts for no budget."""
    if item.stash[tiers.TIER] != tiers.DEFAULT:
        return None
    module = item.getparent(pytest.Module)
    own = getattr(module.obj, "PROCESSOR_S", None) if module is not None else None
    return own or BUDGETS_S.get(item.path.parent.name, 4.0)


class Report:
    """In the process that prints: what took longest, and which files are above their budgets."""

    def __init__(self) -> None:
        self._tests: list[tuple[float, float, str]] = []
        self._files: dict[str, float] = defaultdict(float)
        self._budgets: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        figures = dict(report.user_properties).get(_KEY)
        if report.when != "teardown" or not isinstance(figures, tuple | list):
            return
        used_s, passed_s, budget_s = figures
        self._tests.append((used_s, passed_s, report.nodeid))
        if budget_s is not None:
            file = report.nodeid.partition("::")[0]
            self._files[file] += used_s
            self._budgets[file] = budget_s

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if len(self._tests) < 2 * _SLOWEST:
            return
        total = sum(used for used, _, _ in self._tests)
        terminalreporter.section(f"processor time: {total:.0f} s; the slowest {_SLOWEST} tests")
        for used, passed, name in sorted(self._tests, reverse=True)[:_SLOWEST]:
            terminalreporter.write_line(f"{used:7.1f} s of {passed:6.1f} s  {name}")
        above = sorted(
            (used - self._budgets[file], file)
            for file, used in self._files.items()
            if used > self._budgets[file]
        )
        for excess, file in reversed(above):
            used, budget = self._files[file], self._budgets[file]
            terminalreporter.write_line(
                f"above its budget: {file} took {used:.1f} s of {budget:.0f} s"
            )
