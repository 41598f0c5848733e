"""How processes have spent their seconds so far: on processors, and waiting for a mount of AIFS,
which says for what (``user.aifs.why``). By cause; the difference of two such answers is a stage's.

    processor             of the process, and of the children that it has waited for
    data server 2 ...     the waits of ``aifs why``, of requests that took 10 ms or longer
    the daemon itself     the rest of those

The mount remembers ten minutes, so of longer stages it is the end. Several threads and processes
can spend more seconds than have passed."""

import os
import resource
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress

from aifs.client.checkpoints import attributes
from aifs.core.mountinfo import FSTYPE, mount_of

PROCESSOR = "processor"
_DAEMON = "the daemon itself"  # as aifs why calls it

_ASKED = 32
"""Processes that a mount is asked about at a time."""
_LEAST_S = 0.001

_MYSELF = 0
"""Number of the process that asks: in a container it has another one outside."""

Spent = dict[str, float]


def of_this_process(directory: str) -> Spent:
    """``directory``: lies on the mount that is asked."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {PROCESSOR: sum(map(processor_s, usages))} | _waited(directory, [_MYSELF])


def of_others(directory: str, processor_s: float, pids: Iterable[int]) -> Spent:
    """Of these processes, whose seconds of processor are known. Their waits are left out where the
    mount knows them by other process numbers."""
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
