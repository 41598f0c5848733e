"""Stages of a start, such as imports, the checkpoint and the first step: when each rank has begun
and ended each of them, and who was last.

    DIR/JOB/RUN/HOST.jsonl    a line for each event: JSON with ``event`` (begin or end), ``stage``,
                              ``rank`` and ``at_s`` (since the epoch)

``aifs start run`` says by two variables of the environment where that is; without them nothing is
written. Works in any directory. A line that is torn is left out. Nothing here makes a job fail.
"""

import json
import os
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from aifs.client.startup.jobs import JOB, StartUnknown
from aifs.core import files, trees

DIRECTORY, RUN = "AIFS_START_DIR", "AIFS_START_RUN"
"""Variables: the directory of the job, and the name of its start."""

_SUFFIX = ".jsonl"


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What is done in the block is the stage ``name`` of this process's rank (``RANK``, or 0). It
    has ended when the block has, with an error, too."""
    note("begin", name, time.time())
    try:
        yield
    finally:
        note("end", name, time.time())


def note(event: str, name: str, at_s: float) -> None:
    """Note that the stage ``name`` begins or ends."""
    directory, run = os.environ.get(DIRECTORY, ""), os.environ.get(RUN, "")
    if not directory or not JOB.fullmatch(run):
        return
    rank = os.environ.get("RANK", "0")
    value = {"event": event, "stage": name, "rank": rank, "at_s": at_s}
    path = os.path.join(directory, run, socket.gethostname() + _SUFFIX)
    with suppress(OSError):
        trees.make_dir(os.path.dirname(path))
        fd = files.open_file(path, create=True)
        try:
            files.append(fd, json.dumps(value).encode() + b"\n")
        finally:
            files.close_file(fd)


class StageReport(NamedTuple):
    """A stage of all ranks. Those that have not ended it do not count in the times."""

    stage: str
    """Its name."""
    ranks: int
    """How many have ended it."""
    median_s: float
    """Of how long it took them."""
    max_s: float
    """How long it took the slowest one."""
    slowest: str
    """Which that was: host and rank."""
    unfinished: tuple[str, ...]
    """Those that have begun it and not ended it."""

    @property
    def ratio(self) -> float:
        """The slowest one's time, by the median."""
        return self.max_s / self.median_s if self.median_s else 1.0


def report(directory: str, run: str = "") -> tuple[str, list[StageReport]]:
    """The name of the start ``run`` (otherwise the one that was noted last), and its stages, in the
    order in which the first rank has begun them. Raises StartUnknown, OSError.
    """
    run = run or _newest(directory)
    events = sorted(_events(os.path.join(directory, run)))
    begun: dict[tuple[str, str], float] = {}
    took: dict[str, dict[str, float]] = defaultdict(dict)
    for at_s, event, name, who in events:
        took[name]  # in the order of the first event
        if event == "begin":
            begun[name, who] = at_s
        elif (name, who) in begun:
            took[name][who] = took[name].get(who, 0.0) + at_s - begun.pop((name, who))
    return run, [
        _summary(name, times, tuple(sorted(who for of, who in begun if of == name)))
        for name, times in took.items()
    ]


def _summary(name: str, times: dict[str, float], unfinished: tuple[str, ...]) -> StageReport:
    if not times:
        return StageReport(name, 0, 0.0, 0.0, "", unfinished)
    slowest = max(times, key=lambda who: times[who])
    median_s = statistics.median(times.values())
    return StageReport(name, len(times), median_s, times[slowest], slowest, unfinished)


def _newest(directory: str) -> str:
    """Raises StartUnknown if no start of the job has noted stages."""
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(directory) as entries:
        found = [(entry.stat().st_mtime, entry.name) for entry in entries if entry.is_dir()]
        if found:
            return max(found)[1]
    raise StartUnknown(f"{directory}: no start of this job has noted stages: see startup.stage")


def _events(directory: str) -> Iterator[tuple[float, str, str, str]]:
    """Time, event, stage, and whose. Raises StartUnknown, OSError."""
    try:
        names = [name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
    except (FileNotFoundError, NotADirectoryError):
        raise StartUnknown(f"{directory}: no stages of this start were noted") from None
    for name in names:
        for line in (files.read_file(os.path.join(directory, name)) or b"").splitlines():
            with suppress(ValueError, KeyError, TypeError):
                value = json.loads(line)
                who = f"{name.removesuffix(_SUFFIX)} rank {value['rank']}"
                yield float(value["at_s"]), str(value["event"]), str(value["stage"]), who
