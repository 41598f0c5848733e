"""The users of a mount: sums of the requests that ``aifs trace`` tells, for ``aifs top``, ``aifs
profile`` and the page. Reads /proc and the names of users, which may take long where a directory
service knows them.
"""

import os
import pwd
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from aifs.core.processes import process_of
from aifs.core.served import ANSWERS

DEPTH = 2
"""Components of a path that are told apart."""

OWN = "the daemon itself"
"""The cause of a request that waits for nothing else: its work, and its queue."""

_KNOWN_S = 60
"""For how long a name is not looked up again: a number may be given to another process."""


@dataclass(slots=True)
class Usage:
    """The requests of one process, user, directory or kind."""

    requests: int = 0
    errors: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    bytes: int = 0

    def add(self, record: dict[str, Any], took_us: int) -> None:
        """One more: a record of vfs/operation_log.py, of whose time so much counts here."""
        seconds = took_us / 1e6
        self.requests += 1
        self.errors += record["errno"] not in (0, *ANSWERS)
        self.seconds += seconds
        self.slowest_s = max(self.slowest_s, seconds)
        self.bytes += record["bytes"]

    def told(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "requests": self.requests,
            "errors": self.errors,
            "seconds": round(self.seconds, 6),
            "slowest_s": self.slowest_s,
            "bytes": self.bytes,
        }


SORTS: dict[str, Callable[[Usage], float]] = {
    "time": lambda usage: usage.seconds,
    "requests": lambda usage: usage.requests,
    "bytes": lambda usage: usage.bytes,
    "errors": lambda usage: usage.errors,
}


def operation(record: dict[str, Any]) -> str:
    return str(record["operation"])


def process(record: dict[str, Any]) -> str:
    """Number and name; the name is known while it runs."""
    thread = record["pid"]
    if not thread:
        return "the kernel" if thread == 0 else "not known"
    return _process(thread, time.monotonic() // _KNOWN_S)


@lru_cache(maxsize=4096)
def _process(thread: int, period: float) -> str:
    """As it was at first sight in this period: threads of one process are the same process, also
    when they have ended."""
    pid = process_of(thread)
    try:
        with open(f"/proc/{pid}/comm", errors="replace") as file:
            return f"{pid} {file.read().strip()}"
    except OSError:
        return str(pid)


def user(record: dict[str, Any]) -> str:
    uid = record["uid"]
    if uid is None:
        return "not known"
    return _user(uid, time.monotonic() // _KNOWN_S)


@lru_cache(maxsize=4096)
def _user(uid: int, period: float) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def path(record: dict[str, Any]) -> str:
    """The first components of the directory."""
    if record["path"] is None:
        return "not known"
    components = os.path.dirname(record["path"]).split("/")
    return "/".join(components[: DEPTH + 1]) or "/"


GROUPS: dict[str, Callable[[dict[str, Any]], str]] = {
    "process": process,
    "user": user,
    "path": path,
    "operation": operation,
}


def summed(
    records: Iterable[dict[str, Any]], by: str, into: dict[str, Usage] | None = None
) -> dict[str, Usage]:
    """The usage by each member of the group ``by``, added to what is in ``into``."""
    sums, key_of = {} if into is None else into, GROUPS[by]
    for record in records:
        key = key_of(record)
        if key not in sums:
            sums[key] = Usage()
        sums[key].add(record, record["duration_us"])
    return sums


def sum_waits(record: dict[str, Any], sums: dict[tuple[str, str], Usage]) -> None:
    """Divide the time of a request among what it has waited for (core/waiting.py); the rest is the
    daemon's own. ``sums``: by cause and operation."""
    waited_us = record["waited_us"]
    own_us = max(0, record["duration_us"] - sum(waited_us.values()))
    for cause, took_us in (*waited_us.items(), (OWN, own_us)):
        if took_us:
            sums.setdefault((cause, record["operation"]), Usage()).add(record, took_us)


Key = TypeVar("Key", str, tuple[str, str])


def ordered(sums: dict[Key, Usage], sort: str) -> list[tuple[Key, Usage]]:
    """The largest first."""
    return sorted(sums.items(), key=lambda item: (-SORTS[sort](item[1]), item[0]))
