"""``aifs top``: who uses a mount now, on a screen that is drawn again and again."""

import json
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from aifs.cli import trace
from aifs.cli.arguments import DURATION, PATH
from aifs.watch import usage
from aifs.watch.usage import Usage

if TYPE_CHECKING:
    from rich.table import Table

EPILOG = """
\b
Examples:
  aifs top /mnt/store
  aifs top /mnt/store --by path --sort bytes
  aifs top /mnt/store --for 5s --json

\b
Keys:
  p u d o    sums by process, user, path (directory), operation
  t r b e    sort by time, requests, bytes, errors
  q          end

Where the output is no terminal, a table is printed each time instead; with --json, a line of JSON.

The mount is traced meanwhile, so opens take longer; what it passes through is not seen (aifs trace
--help says more). For root, and for who has mounted.
"""

_GROUP_KEYS = {"p": "process", "u": "user", "d": "path", "o": "operation"}
_SORT_KEYS = {"t": "time", "r": "requests", "b": "bytes", "e": "errors"}
_HEAD_LINES = 4


@click.command("top", epilog=EPILOG, short_help="Show who uses a mount now.")
@click.argument("mountpoint", type=PATH)
@click.option("--by", type=click.Choice(list(usage.GROUPS)), default="process", show_default=True)
@click.option("--sort", type=click.Choice(list(usage.SORTS)), default="time", show_default=True)
@click.option("--interval", "interval_s", type=DURATION, default="1s", show_default=True)
@click.option("--for", "limit_s", type=DURATION, help="Stop after so long; else at q or Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON each time.")
def top_command(
    mountpoint: str,
    by: str,
    sort: str,
    interval_s: float,
    limit_s: float | None,
    as_json: bool,
) -> None:
    """Show the requests that the mount at MOUNTPOINT answers: whose they are, and how long they
    take.
    """
    from rich.console import Console
    from rich.live import Live

    from aifs.cli.mounts import mount_of

    batches = trace.follow(mount_of(mountpoint), limit_s)
    if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        for passed_s, lost, records in _intervals(batches, interval_s):
            found = usage.ordered(usage.summed(records, by), sort)
            if as_json:
                told = [{by: key, **one.told()} for key, one in found]
                print(
                    json.dumps({"seconds": round(passed_s, 3), "lost": lost, by: told}), flush=True
                )
            else:
                Console(width=100).print(_table(by, sort, found, passed_s, lost))
        return
    with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        for passed_s, lost, records in _intervals(batches, interval_s, pressed):
            for key in pressed():
                if key == "q":
                    return
                by, sort = _GROUP_KEYS.get(key, by), _SORT_KEYS.get(key, sort)
            found = usage.ordered(usage.summed(records, by), sort)
            shown = found[: max(1, live.console.size.height - _HEAD_LINES)]
            table = _table(by, sort, shown, passed_s, lost)
            table.caption = "by: p u d o    sort: t r b e    end: q"
            live.update(table, refresh=True)


def _intervals(
    batches: Iterator[trace.Batch], interval_s: float, woken: Any = None
) -> Iterator[tuple[float, int, list[dict[str, Any]]]]:
    """The requests of each interval: its seconds, how many were lost, and which came. A key ends
    one early."""
    begun_s, lost, records = time.monotonic(), 0, list[dict[str, Any]]()
    for lost_now, more in batches:
        lost += lost_now
        records += more
        passed_s = time.monotonic() - begun_s
        if passed_s >= interval_s or (woken is not None and woken.waiting()):
            yield passed_s, lost, records
            begun_s, lost, records = time.monotonic(), 0, []
    if records:
        yield time.monotonic() - begun_s, lost, records


class _Pressed:
    """The keys of the terminal that have been pressed."""

    def waiting(self) -> bool:
        return bool(select.select([sys.stdin], [], [], 0)[0])

    def __call__(self) -> str:
        return os.read(sys.stdin.fileno(), 64).decode(errors="replace") if self.waiting() else ""


@contextmanager
def _keys() -> Iterator[_Pressed]:
    """Keys count without Enter, and are not shown."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield _Pressed()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _table(
    by: str, sort: str, found: list[tuple[str, Usage]], passed_s: float, lost: int
) -> "Table":
    from rich.table import Table
    from rich.text import Text

    from aifs.core.units import describe_size

    title = f"by {by}, the largest {sort} first"
    if lost:
        title += f"; {lost} requests were lost, so this is less than all"
    table = Table(box=None, pad_edge=False, title=Text(title), title_justify="left", expand=True)
    table.add_column(by, ratio=1, no_wrap=True, overflow="ellipsis")
    for column in ("requests/s", "errors", "busy", "mean us", "slowest us", "bytes/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, one in found:
        table.add_row(
            Text(key),
            f"{one.requests / passed_s:.0f}",
            str(one.errors or "-"),
            f"{one.seconds / passed_s:.0%}",
            f"{one.seconds / one.requests * 1e6:.0f}",
            f"{one.slowest_s * 1e6:.0f}",
            describe_size(round(one.bytes / passed_s)) if one.bytes else "-",
        )
    return table
