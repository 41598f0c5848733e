"""Stages of a start, such as imports, the checkpoint and the first step: when each rank has begun
and ended each of them, and which rank was last.

    DIR/JOB/RUN/HOST.jsonl    a line for each event: JSON with ``event`` (begin or end), ``stage``,
                              ``rank`` and ``at_s`` (since the epoch); at the end ``spent_s``, how
                              the seconds of the stage were spent, by cause

``aifs start run`` says by two variables of the environment where that is; without them nothing is
written. Works in any directory. A line that is torn is left out. Nothing here makes a job fail.
Others may make names there, too: no symlink is followed, from the directory of the job on."""

import json
import math
import os
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from aifs.client.checkpoints import attributes
from aifs.client.startup.jobs import JOB, StartUnknown, opened
from aifs.core import files, trees
from aifs.core.clock import require_time
from aifs.core.mountinfo import FSTYPE, mount_of

PROCESSOR = "processor"
_DAEMON = "the daemon itself"  # as aifs why calls it

_ASKED = 32
"""Processes that a mount is asked about at a time."""
_LEAST_S = 0.001

_MYSELF = 0
"""Number of the process that asks: in a container it has another one outside."""

Spent = dict[str, float]
"""How processes have spent their seconds so far, by cause; the difference of two such answers is a
stage's.

    processor             of the process, and of the children that it has waited for
    data server 2 ...     the waits of ``aifs why``, of requests that took 10 ms or longer
    the daemon itself     the rest of those

The mount remembers ten minutes, so of longer stages it is the end. Several threads and processes
can spend more seconds than have passed."""


def of_this_process(directory: str) -> Spent:
    """``directory``: lies on the mount that is asked."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {PROCESSOR: sum(map(processor_s, usages))} | _waited(directory, [_MYSELF])


def of_others(directory: str, processor_s: float, pids: Iterable[int]) -> Spent:
    """Of these processes, with known processor seconds; no waits if the mount has other numbers for
    them."""
    told = attributes.get_json(_mount(directory), f"{attributes.WHY}.{_MYSELF}")
    known = [*pids][:_ASKED] if told.get("pid") == os.getpid() else []
    return {PROCESSOR: processor_s} | _waited(directory, known)


def since(before: Spent, now: Spent) -> Spent:
    """The seconds that were spent from ``before`` until ``now``."""
    spent = {cause: seconds - before.get(cause, 0.0) for cause, seconds in now.items()}
    return {cause: round(seconds, 3) for cause, seconds in spent.items() if seconds >= _LEAST_S}


def processor_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def _mount(directory: str) -> str:
    """Its mountpoint, or '' if it is no AIFS."""
    with suppress(OSError):
        if (mount := mount_of(directory)) and mount.fstype == FSTYPE:
            return mount.mountpoint
    return ""


def _waited(directory: str, pids: Iterable[int]) -> Spent:
    mountpoint, waited = _mount(directory), Counter[str]()
    for pid in pids if mountpoint else ():
        if told := attributes.get_json(mountpoint, f"{attributes.WHY}.{pid}"):
            waited.update(told["waited_s"])
            waited[_DAEMON] += told["seconds"] - sum(told["waited_s"].values())
    return dict(waited)


DIRECTORY, RUN = "AIFS_START_DIR", "AIFS_START_RUN"
"""Variables: the directory of the job, and the name of its start."""

_SUFFIX = ".jsonl"

_NOTED_MAX = 16 << 20
"""Bytes of the events of a host; a file that is longer is left out."""

_CAUSES, _TOLD = 3, 0.05
"""How many of them are described in words, and from which part of the time on."""


@contextmanager
def stage(name: str) -> Iterator[None]:
    """The block is stage ``name`` of this process's rank (``RANK``, or 0), also if it raises."""
    directory = os.environ.get(DIRECTORY, "")
    before = of_this_process(directory) if directory else {}
    note("begin", name, time.time())
    try:
        yield
    finally:
        at_s = time.time()
        now = of_this_process(directory) if directory else {}
        note("end", name, at_s, since(before, now))


def note(event: str, name: str, at_s: float, spent_s: Spent | None = None) -> None:
    """Note that the stage ``name`` begins, or has ended."""
    directory, run = os.environ.get(DIRECTORY, ""), os.environ.get(RUN, "")
    if not directory or not JOB.fullmatch(run):
        return
    rank = os.environ.get("RANK", "0")
    value = {"event": event, "stage": name, "rank": rank, "at_s": at_s}
    if spent_s is not None:
        value["spent_s"] = spent_s
    with suppress(OSError, StartUnknown):
        trees.make_dir(directory)
        with opened(directory) as job:
            trees.make_dir(os.path.join(job, run))
        with opened(directory, run) as at:
            path = os.path.join(at, os.uname().nodename + _SUFFIX)
            fd = files.open_file(path, create=True, append=True, foreign=True)
        try:
            files.append(fd, json.dumps(value).encode() + b"\n")
        finally:
            files.close_file(fd)


class StageSpan(NamedTuple):
    """A stage of one rank, from its begin to its end."""

    stage: str
    """Its name."""
    who: str
    """Host and rank."""
    began_s: float
    """Since the epoch, by the clock of the host, as ``ended_s``."""
    ended_s: float | None
    """None: it has not ended."""
    spent_s: Spent
    """By cause, how its seconds were spent, as far as that is known."""


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
    spent_s: Spent
    """By cause, how the slowest one spent it."""
    unfinished: tuple[str, ...]
    """Those that have begun it and not ended it."""

    @property
    def ratio(self) -> float:
        """The slowest one's time, by the median."""
        return self.max_s / self.median_s if self.median_s else 1.0


def report(directory: str, run: str = "") -> tuple[str, list[StageReport]]:
    """The name of the start ``run`` (or the last noted), and its stages by first begin. Raises
    StartUnknown, OSError."""
    run, found = spans(directory, run)
    return run, summary(found)


def spans(directory: str, run: str = "") -> tuple[str, list[StageSpan]]:
    """As ``report``: each stage of each rank, in the order in which they have begun."""
    run = run or _newest(directory)
    begun: dict[tuple[str, str], float] = {}
    found = []
    for event in sorted(_events(directory, run)):
        key = event.stage, event.who
        if event.event == "begin":
            begun[key] = event.at_s
        elif key in begun:
            found.append(StageSpan(*key, begun.pop(key), event.at_s, dict(event.spent_s)))
    found += [StageSpan(*key, began_s, None, {}) for key, began_s in begun.items()]
    return run, sorted(found, key=lambda span: span.began_s)


def summary(found: Iterable[StageSpan]) -> list[StageReport]:
    """Of all of them, which are in the order in which they have begun."""
    stages: dict[str, list[StageSpan]] = defaultdict(list)
    for span in found:
        stages[span.stage].append(span)
    return [_summary(name, of_it) for name, of_it in stages.items()]


def _summary(name: str, of_it: list[StageSpan]) -> StageReport:
    took: dict[str, float] = defaultdict(float)
    for span in of_it:
        if span.ended_s is not None:
            took[span.who] += span.ended_s - span.began_s
    unfinished = tuple(sorted(span.who for span in of_it if span.ended_s is None))
    if not took:
        return StageReport(name, 0, 0.0, 0.0, "", {}, unfinished)
    slowest = max(took, key=lambda who: took[who])
    spent_s = Counter[str]()
    for span in of_it:
        if span.who == slowest:
            spent_s.update(span.spent_s)
    from statistics import median  # a job that notes stages needs none of this

    median_s = median(took.values())
    return StageReport(name, len(took), median_s, took[slowest], slowest, dict(spent_s), unfinished)


def describe_spent(took_s: float, spent_s: Spent) -> str:
    """The largest causes of the time, in words; '' if none is known."""
    if not spent_s:
        return ""
    causes = [item for item in spent_s.items() if item[1] >= _TOLD * took_s]
    causes = sorted(causes, key=lambda item: -item[1])[:_CAUSES]
    if (rest_s := took_s - sum(seconds for _, seconds in causes)) >= _TOLD * took_s:
        causes.append(("else", rest_s))
    return ", ".join(f"{cause} {seconds:.2f} s" for cause, seconds in causes)


def _newest(directory: str) -> str:
    """Raises StartUnknown if no start of the job has noted stages."""
    with suppress(StartUnknown), opened(directory) as job, os.scandir(job) as entries:
        found = []
        for entry in entries:
            with suppress(FileNotFoundError):  # it is gone
                if entry.is_dir(follow_symlinks=False):
                    found.append((entry.stat(follow_symlinks=False).st_mtime, entry.name))
        if found:
            return max(found)[1]
    raise StartUnknown(f"{directory}: no start of this job has noted stages: see startup.stage")


class _Event(NamedTuple):
    """Sort key of a line."""

    at_s: float
    event: str
    stage: str
    who: str
    spent_s: tuple[tuple[str, float], ...]


def _events(directory: str, run: str) -> Iterator[_Event]:
    """Raises StartUnknown, OSError."""
    with opened(directory, run) as top:
        for name in os.listdir(top):
            data = b""
            with suppress(OSError):
                if name.endswith(_SUFFIX):
                    data = files.read_foreign(os.path.join(top, name), _NOTED_MAX) or b""
            for line in data.splitlines():
                with suppress(*_FOREIGN):
                    yield _event(name.removesuffix(_SUFFIX), json.loads(line))


_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""Errors of lines that are torn, or that another program has written."""


def _event(host: str, value: Mapping[str, Any]) -> _Event:
    spent_s = tuple((_text(cause), _number(s)) for cause, s in value.get("spent_s", {}).items())
    who = f"{host} rank {value['rank']}"
    stage, at_s = _text(value["stage"]), require_time(value["at_s"])
    return _Event(at_s, str(value["event"]), stage, _text(who), spent_s)


def _text(value: object) -> str:
    """Without what would do something to a terminal."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in str(value))


def _number(value: Any) -> float:
    if not math.isfinite(number := float(value)):
        raise ValueError(value)
    return number
