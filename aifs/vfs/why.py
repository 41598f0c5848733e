"""Why something takes long: waits of requests about a file, or of a process, now and in the last
minutes (``user.aifs.why``); and the log line of a slow request.

Each activity knows its waits (core/waiting.py); the operation log keeps long ended ones. Users see
their own requests, and drains of readable files; root and the daemon's user see all.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import trio

from aifs.core.errors import NoAttribute
from aifs.core.log import logger, stack_lines
from aifs.core.processes import process_of
from aifs.core.waiting import Activity, Request, under_way
from aifs.files import rights
from aifs.files.asks import ANY, ROOT, Ask, Hint
from aifs.files.rights import sees_all
from aifs.files.types import CallerLike
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import Engine
from aifs.meta.paths import those_below
from aifs.vfs import operation_log
from aifs.vfs.operation_log import LONG_S, OperationLog, Record, described, paths_of

_log = logger(__name__)

_SHOWN_MAX = 64  # of each list
_LENGTH_MAX = 24_000  # of each list; an extended attribute has up to 64 KiB

_LOOK_S = _NAMES_S = 1.0
_PATIENT = ("setlkw", "drain")
"""They wait for others by intention, or no program waits for them."""


class Why:
    """The requests that wait, and those that were answered."""

    HINTS = (
        Hint(
            "why[.PID]",
            ANY,
            "what requests there and below, of a process (0: the caller), wait for now, and how "
            "their seconds were spent",
            rights.reader,  # each user is told of his own requests, and of drains
            get=lambda why, ask: why.tell(ask),
        ),
        Hint(
            "trace[.N]",
            ROOT,
            "requests as they are answered, from number N on",
            rights.overseer,
            get=lambda why, ask: operation_log.tell(why.log, why.engine, ask.number),
        ),
    )

    def __init__(self, log: OperationLog, engine: Engine) -> None:
        self.log = log
        self.engine = engine

    async def tell(self, ask: Ask) -> dict[str, Any]:
        """See the function. Raises NoAttribute for a process that the daemon cannot see."""
        pid = 0
        if ask.number is not None:
            pid = ask.number or process_of(ask.caller.pid)
            if not pid:
                raise NoAttribute("the process that asks cannot be seen from here")
        return await tell(self.log, self.engine, ask.ino, ask.caller, pid)


async def tell(
    log: OperationLog, engine: Engine, ino: int, caller: CallerLike, pid: int = 0
) -> dict[str, Any]:
    """For JSON: ``pid`` (0: all); ``now``, the requests in progress, longest first, with
    ``seconds``, ``waits_for`` (newest first; []: the daemon works on it) and ``waited_us``;
    ``since_s`` (epoch), and of ended ones of ``long_s`` or more: how many ``requests``, and the
    ``slowest``, as in the trace. ``seconds`` and ``waited_s`` by cause sum both. Of ``ino`` and
    below; with ``pid``, that process."""
    running = [(about, activity) for activity, _ in under_way() if (about := activity.about)]
    since_s, ended = log.long()
    if pid:
        running = [one for one in running if pid in (one[0].pid, process_of(one[0].pid))]
        ended = [record for record in ended if record.request.pid == pid]

    async def wanted(requests: Iterable[Request]) -> set[Request]:
        told = {one for one in requests if _may_know(one, caller)}
        if ino == ROOT_INO:
            return told
        inos = {each for one in told for each in (one.ino, *one.others)}
        below = set(await those_below(engine, list(inos), ino))
        return {one for one in told if not below.isdisjoint((one.ino, *one.others))}

    of_now = await wanted(about for about, _ in running)
    of_ended = await wanted(record.request for record in ended)
    now = [_so_far(about, activity) for about, activity in running if about in of_now]
    ended = [record for record in ended if record.request in of_ended]
    waited_us = Counter[str]()
    for record in (*ended, *(record for record, _ in now)):
        waited_us.update(record.waited_us)
    now.sort(key=lambda one: -one[0].duration_us)
    slowest = sorted(ended, key=lambda record: -record.duration_us)[:_SHOWN_MAX]
    shown = {record.request.ino for record in (*slowest, *(record for record, _ in now))}
    names = await engine.view(paths_of, shown) if sees_all(caller) else {}
    return {
        "pid": pid,
        "since_s": round(since_s, 3),
        "long_s": LONG_S,
        "requests": len(ended),
        "seconds": sum(r.duration_us for r in (*ended, *(r for r, _ in now))) / 1e6,
        "waited_s": {cause: us / 1e6 for cause, us in waited_us.most_common()},
        "now": _fitting(
            [
                described(record, names) | {"seconds": record.duration_us / 1e6, "waits_for": waits}
                for record, waits in now[:_SHOWN_MAX]
            ]
        ),
        "slowest": _fitting([described(record, names) for record in slowest]),
    }


def _may_know(request: Request, caller: CallerLike) -> bool:
    return sees_all(caller) or request.uid in (caller.uid, -1)


def _so_far(about: Request, activity: Activity) -> tuple[Record, list[str]]:
    duration_ns = time.perf_counter_ns() - activity.began_ns
    waited_us = {cause: ns // 1000 for cause, ns in activity.spent_ns().items()}
    about = about._replace(pid=process_of(about.pid))
    at_ns = time.time_ns() - duration_ns
    return Record(about, at_ns, duration_ns // 1000, 0, 0, waited_us), activity.waits


def _fitting(told: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    length, found = 0, []
    for one in told:
        length += len(json.dumps(one))
        if length > _LENGTH_MAX:
            break
        found.append(one)
    return found


def tell_if_stuck(root: trio.lowlevel.Task, alive_s: Callable[[], float], after_s: float) -> None:
    """Log all requests that wait, once, when the event loop of this root has not run for so long.
    ``alive_s()``: when it did last, on the monotonic clock. Never returns: in a thread of its own.
    """
    is_said = False
    while True:
        time.sleep(_LOOK_S)
        is_stuck = time.monotonic() - alive_s() > after_s
        found: list[Activity] = []
        if is_stuck and not is_said:
            with suppress(RuntimeError):  # it has just gone on
                found = [activity for activity, _ in under_way(root)]
        for activity in found:
            if about := activity.about:
                seconds, waits = (time.perf_counter_ns() - activity.began_ns) / 1e9, activity.waits
                _log.warning(
                    "the daemon is stuck, and %s of inode %d %s by process %d has waited for %.0f "
                    "s, for %s",
                    about.operation,
                    about.ino,
                    os.fsdecode(about.name or about.attribute),
                    about.pid,
                    seconds,
                    ", for ".join(waits) or "the daemon itself",
                )
        is_said = is_stuck


async def watch_slow(engine: Engine, after_s: Callable[[], float]) -> None:
    """Log each request unanswered for ``after_s()`` (0: none) once, with its tasks' stacks. Runs
    until cancelled."""
    said: set[Activity] = set()
    while True:
        await trio.sleep(_LOOK_S)
        late_ns = time.perf_counter_ns() - (after_s() or math.inf) * 1e9
        late = [(one, tasks) for one, tasks in under_way() if one.began_ns <= late_ns]
        said &= {one for one, _ in late}
        for activity, tasks in late:
            about = activity.about
            if activity in said or about is None or about.operation in _PATIENT:
                continue
            said.add(activity)
            record, waits = _so_far(about, activity)
            stacks = "\n".join(line for task in tasks for line in stack_lines(task))
            names: dict[int, bytes | None] = {}
            with trio.move_on_after(_NAMES_S):  # the database may be what is waited for
                names = await engine.view(paths_of, {about.ino})
            told = described(record, names)
            _log.warning(
                "%s of %s (inode %d) by process %d has not been answered for %.0f s, and waits for "
                "%s\n%s",
                about.operation,
                told["path"] or about.name or "?",
                about.ino,
                record.request.pid,
                record.duration_us / 1e6,
                ", for ".join(waits) or "the daemon itself",
                stacks,
            )
