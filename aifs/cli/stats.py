"""``aifs stats``: what a mount does, a line each second."""

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import click

from aifs.cli.arguments import DURATION, MOUNTPOINT
from aifs.core.served import BUCKETS, quantile

EPILOG = """
\b
Examples:
  aifs stats /mnt/store
  aifs stats /mnt/store --interval 10s --json
  aifs stats /mnt/store --count 1

\b
Columns; all are of the time since the line before, the first line of the time since the mount:
  requests, errors   per second, that the daemon has answered
  median, 99%        the time within which it has answered half of them, and 99 of 100
  read, written      bytes per second by way of the daemon; those passed through do not come by
  dirty              bytes that are nowhere but in the burst tier
  drained            bytes per second
  oldest             how long the oldest file waits to be drained
  waiting            writers that wait for room in the burst tier
  memory             of the daemon
A narrow terminal shows those that it has room for.

Every user may ask, and it costs the mount no more than aifs status each time.
"""

_COLUMNS = {
    "requests": 9,
    "errors": 7,
    "median": 8,
    "99%": 8,
    "read": 10,
    "written": 10,
    "dirty": 10,
    "drained": 10,
    "oldest": 9,
    "waiting": 7,
    "memory": 9,
}
_LINES_PER_HEAD = 20


@click.command("stats", epilog=EPILOG, short_help="Show what a mount does, a line each second.")
@click.argument("mountpoint", type=MOUNTPOINT)
@click.option("--interval", "interval_s", type=DURATION, default="1s", show_default=True)
@click.option("--count", "lines", type=click.IntRange(1), help="Stop after so many lines.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON each time.")
def stats_command(mountpoint: str, interval_s: float, lines: int | None, as_json: bool) -> None:
    """Print what the mount at MOUNTPOINT does, as vmstat(8) does for the machine."""
    from aifs.cli.mounts import mount_of, read_status

    path, shown = mount_of(mountpoint), _fitting()
    before: dict[str, Any] | None = None
    number = 0
    while lines is None or number < lines:
        if number:
            time.sleep(interval_s)
        status = read_status(path)
        told = between(before, status)
        if not as_json and number % _LINES_PER_HEAD == 0:
            print(_aligned(_COLUMNS, shown), flush=True)
        print(json.dumps(told) if as_json else _aligned(_cells(told), shown), flush=True)
        before = status
        number += 1


def between(before: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """What a mount has done between two times when it was asked (vfs/reports.py); None: since it
    was mounted, as after another mount. Per second, where the name says so; in seconds and bytes.
    """
    if before is None or before["pid"] != now["pid"]:
        before = {"uptime_s": 0.0, "requests": {}, "drain": {"drained_bytes": 0}}
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
    return {
        "seconds": round(passed_s, 3),
        "requests_per_s": grown("count"),
        "errors_per_s": grown("errors"),
        "median_s": quantile(buckets, 0.5),
        "p99_s": quantile(buckets, 0.99),
        "read_bytes_per_s": grown("bytes", ("read",)),
        "written_bytes_per_s": grown("bytes", ("write",)),
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


def _fitting() -> list[int]:
    """The widths of the first columns, as many as the terminal has room for."""
    from aifs.cli.output import terminal_width

    shown, left = list[int](), terminal_width()
    for width in _COLUMNS.values():
        left -= width + 1
        if left < -1:
            break
        shown.append(width)
    return shown


def _aligned(cells: Iterable[object], shown: Sequence[int]) -> str:
    return " ".join(f"{cell!s:>{width}}" for cell, width in zip(cells, shown, strict=False))


def _cells(told: dict[str, Any]) -> tuple[object, ...]:
    from aifs.core.units import describe_size

    def size(key: str) -> str:
        return describe_size(round(told[key])) if told[key] else "-"

    def duration(key: str) -> str:
        seconds = told[key]
        if not seconds:
            return "-"
        return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.4g} s"

    return (
        f"{told['requests_per_s']:.0f}",
        f"{told['errors_per_s']:.0f}" if told["errors_per_s"] else "-",
        duration("median_s"),
        duration("p99_s"),
        size("read_bytes_per_s"),
        size("written_bytes_per_s"),
        size("dirty_bytes"),
        size("drained_bytes_per_s"),
        duration("oldest_undrained_s"),
        told["waiting_writers"] or "-",
        size("resident_bytes"),
    )
