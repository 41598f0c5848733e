"""``aifs status`` and ``aifs stats``: the state of a mount, now and in each second."""

import json
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import click

from aifs.cli import door
from aifs.cli.command import (
    DURATION,
    MOUNTPOINT,
    Column,
    Pairs,
    Report,
    Table,
    command,
    number,
)
from aifs.cli.door import ANSWER_S, AwaitsDatabase, mount_of, read_status
from aifs.cli.output import duration, rate, size, terminal_width, when
from aifs.core.limits import within
from aifs.core.served import BUCKETS, quantile
from aifs.watch import figures

_SERVERS = (
    Column("server", "id", number),
    Column("standing"),
    Column("state"),
    Column("domain"),
    Column("class"),
    Column("used", "used_bytes", size, "unknown"),
    Column("free", "free_bytes", size, "unknown"),
    Column("path"),
    Column("last error", "last_error"),
)
_SIZES = ("dirty", "clean", "pinned", "free", "low_water", "high_water")
_DEVICES = (
    Column("burst", "id", number),
    Column("state"),
    *(Column(one.partition("_")[0], f"{one}_bytes", size, "unknown") for one in _SIZES),
    Column("path"),
    Column("new files", lambda device: _admission_of(device)),
)
SHOWS = {"size": size, "rate": rate, "duration": duration, "when": when}
_HOSTS_SAY = "what is undrained can be read as long as its host is there"


@command(
    "status",
    short_help="Show the state of a mount.",
    examples="aifs status /mnt/store\naifs status /mnt/store --json",
    sizes=True,
)
@click.argument("mountpoint", type=MOUNTPOINT)
def status_command(mountpoint: str) -> Report:
    """Show the state of the mount at MOUNTPOINT, or that a path lies in, of its data servers, its
    burst tier and its drain.
    """
    path = mount_of(mountpoint)
    try:
        status = read_status(path)
    except AwaitsDatabase as error:  # nobody else can be asked
        owner = error.owner
        known = {"pid": owner.pid, "mountpoint": path, "waits_for": owner.doing}
        return Report(known, Pairs(known.items()))
    facts = [(name, value) for name, value in status.items() if not isinstance(value, list | dict)]
    facts += figures.describe(status, SHOWS)
    if status["cluster"]["hosts"]:
        facts.append(("undrained", _undrained_of_hosts(path)))
    parts: list[Pairs | Table] = [Pairs(facts), Table(_SERVERS, status["servers"])]
    if devices := status["burst"]["devices"]:
        parts.append(Table(_DEVICES, devices))
    return Report(status, *parts)


def _undrained_of_hosts(path: str) -> str:
    """Which host has how much in its burst tier alone, by the database."""
    try:
        hosts = within(ANSWER_S, door.read, path, "hosts")["hosts"]
    except OSError as error:
        return f"not known: {error.strerror}"
    sizes = [(host["name"], host["undrained_bytes"]) for host in hosts]
    each = [f"{name} {'unknown' if known is None else size(known)}" for name, known in sizes]
    return f"{', '.join(each)}; {_HOSTS_SAY}"


def refusal_of(device: dict[str, Any]) -> str:
    """Why a burst directory takes no new files; '' if it does."""
    return ": ".join(filter(None, (device["refuses"], device.get("last_error"))))


def _admission_of(device: dict[str, Any]) -> str:
    refusal = refusal_of(device)
    return f"go to the data servers: {refusal}" if refusal else "are admitted"


# --- stats ----------------------------------------------------------------------------------------


class _Rate(NamedTuple):
    """A column of ``aifs stats``."""

    title: str
    width: int
    key: str
    """In JSON."""
    show: Callable[[float], str]
    help: str


def _whole(value: float) -> str:
    return f"{value:.0f}"


_RATES = (
    _Rate("requests", 9, "requests_per_s", _whole, "per second, that the daemon has answered"),
    _Rate("errors", 7, "errors_per_s", _whole, "per second, of these"),
    _Rate("median", 8, "median_s", duration, "the time within which it has answered half of them"),
    _Rate("99%", 8, "p99_s", duration, "the time within which it has answered 99 of 100"),
    _Rate("read", 10, "read_bytes_per_s", size, "bytes per second that the daemon has read"),
    _Rate(
        "written", 10, "written_bytes_per_s", size, "the same; passed-through ones do not come by"
    ),
    _Rate(
        "grown",
        10,
        "grown_bytes_per_s",
        size,
        "by which files in the burst tier have grown, passed through or not",
    ),
    _Rate("dirty", 10, "dirty_bytes", size, "bytes that are nowhere but in the burst tier"),
    _Rate("drained", 10, "drained_bytes_per_s", size, "bytes per second"),
    _Rate(
        "oldest", 9, "oldest_undrained_s", duration, "how long the oldest file waits to be drained"
    ),
    _Rate("waiting", 7, "waiting_writers", str, "writers that wait for room in the burst tier"),
    _Rate("memory", 9, "resident_bytes", size, "of the daemon"),
)
_LINES_PER_HEAD = 20


@command(
    "stats",
    short_help="Show what a mount does, a line each second.",
    examples="aifs stats /mnt/store\naifs stats /mnt/store --interval 10s --json\n"
    "aifs stats /mnt/store --count 1",
    epilog="\b\nColumns; all since the line before, those of the first line since the mount:\n"
    + "\n".join(f"  {one.title:<10} {one.help}" for one in _RATES)
    + "\nA narrow terminal shows those that it has room for.\n\n"
    "Every user may ask, and it costs the mount no more than aifs status each time.",
    sizes=True,
)
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("--interval", "interval_s", type=DURATION, default="1s", show_default=True)
@click.option("--count", "lines", type=click.IntRange(1), help="Stop after so many lines.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON each time.")
def stats_command(mountpoint: str, interval_s: float, lines: int | None, as_json: bool) -> None:
    """Print what the mount at MOUNTPOINT does, as vmstat(8) does for the machine."""
    path, shown = mount_of(mountpoint), _fitting()
    before: dict[str, Any] | None = None
    line = 0
    while lines is None or line < lines:
        if line:
            time.sleep(interval_s)
        status = read_status(path)
        told = between(before, status)
        if as_json:
            print(json.dumps(told), flush=True)
        else:
            if line % _LINES_PER_HEAD == 0:
                print(" ".join(f"{one.title:>{one.width}}" for one in shown))
            cells = [
                (one.show(told[one.key]) if told[one.key] else "-", one.width) for one in shown
            ]
            print(" ".join(f"{cell:>{width}}" for cell, width in cells), flush=True)
        before = status
        line += 1


def between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """A mount's work between two statuses (vfs/reports.py); None: since it was mounted, as after
    another mount. Per second, if the name says so; in seconds and bytes."""
    if before is None or before["pid"] != now["pid"]:
        before = {"uptime_s": 0.0, "requests": {}, "drain": {"drained_bytes": 0}}
        before["burst"] = {"grown_bytes": 0}
    passed_s = max(now["uptime_s"] - before["uptime_s"], 1e-3)

    def grown(kind: str, operations: tuple[str, ...] = ()) -> float:
        def whole(status: dict[str, Any]) -> int:
            found = status["requests"].items()
            return sum(
                sum(one["errors"].values()) if kind == "errors" else one[kind]
                for operation, one in found
                if not operations or operation in operations
            )

        return round((whole(now) - whole(before)) / passed_s, 3)

    buckets = [now_n - n for now_n, n in zip(_buckets(now), _buckets(before), strict=True)]
    devices = now["burst"]["devices"]
    drained = now["drain"]["drained_bytes"] - before["drain"]["drained_bytes"]
    grown_bytes = now["burst"]["grown_bytes"] - before["burst"]["grown_bytes"]
    return {
        "seconds": round(passed_s, 3),
        "requests_per_s": grown("count"),
        "errors_per_s": grown("errors"),
        "median_s": quantile(buckets, 0.5),
        "p99_s": quantile(buckets, 0.99),
        "read_bytes_per_s": grown("bytes", ("read",)),
        "written_bytes_per_s": grown("bytes", ("write",)),
        "grown_bytes_per_s": round(grown_bytes / passed_s),
        "dirty_bytes": sum(device["dirty_bytes"] or 0 for device in devices),
        "drained_bytes_per_s": round(drained / passed_s),
        "oldest_undrained_s": now["drain"]["oldest_age_s"],
        "waiting_writers": now["burst"]["throttled_writers"],
        "resident_bytes": now["process"]["resident_bytes"],
    }


def _buckets(status: dict[str, Any]) -> list[int]:
    whole = [0] * BUCKETS
    for one in status["requests"].values():
        for bucket, n in enumerate(one["buckets"]):
            whole[bucket] += n
    return whole


def _fitting() -> list[_Rate]:
    """The first columns that fit into the terminal."""
    shown, left = list[_Rate](), terminal_width()
    for one in _RATES:
        left -= one.width + 1
        if left < -1:
            break
        shown.append(one)
    return shown
