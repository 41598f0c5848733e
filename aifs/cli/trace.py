"""``aifs trace``, ``aifs top`` and ``aifs profile``: a mount's requests, singly and in sums."""

import errno
import json
import os
import select
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import DURATION, PATH, Column, Report, Table, command, number
from aifs.cli.door import mount_of
from aifs.cli.output import count, duration, fold, print_error, rate, size
from aifs.core.errors import MountError, UserError
from aifs.watch import usage
from aifs.watch.usage import Usage

_PAUSE_S = 0.05
_COLUMNS = ("time", "us", "operation", "result", "bytes", "uid", "pid", "path")
_WIDTHS = (15, 9, 15, 12, 10, 6, 8, 0)
_LEFT = ("operation", "result", "path")


@command(
    "trace",
    short_help="Show the requests that a mount answers.",
    examples="aifs trace /mnt/store\n"
    "aifs trace /mnt/store --op open --op create --path /run/step-100\n"
    "aifs trace /mnt/store --pid 4711 --for 10s --json",
    epilog="""
\b
Columns:
  time       when the request came
  us         microseconds until it was answered
  operation  what was asked for
  result     ok, or the error that the program was told
  bytes      read or written
  uid, pid   whose request it was; - where nobody knows, pid 0 where the kernel asks for itself
  path       as it is now; inode N where there is none, or several

Only what the kernel asks the daemon is seen. Reads and writes of files in the burst tier are passed
through to the local disk and do not come by (`aifs doctor` says whether they are), nor does what
the kernel has cached, or what the bridge answers by itself (`aifs status --json` counts it). A
mount without the bridge does not know whose reads, writes and closes these are, nor of which file.

For root, and for the user who has mounted. While nobody traces, it costs nothing.
""",
)
@click.argument("mountpoint", type=PATH)
@click.option("--op", "operations", multiple=True, metavar="OPERATION", help="Only these.")
@click.option(
    "--path", "prefix", metavar="PATH", help="Only files there or below; / is the mount's root."
)
@click.option("--pid", "pids", multiple=True, type=int, metavar="PID", help="Only these processes.")
@click.option("--for", "limit_s", type=DURATION, help="Stop after so long; else at Ctrl-C.")
@click.option("--json", "as_json", is_flag=True, help="Print a line of JSON for each request.")
def trace_command(
    mountpoint: str,
    operations: tuple[str, ...],
    prefix: str | None,
    pids: tuple[int, ...],
    limit_s: float | None,
    as_json: bool,
) -> None:
    """Print each request that the mount at MOUNTPOINT answers from now on.

    The mount keeps some ten thousand requests for a slow reader; how many were lost beyond that is
    said on stderr.
    """
    top = mount_of(mountpoint)
    below = None if prefix is None else _inside(top, prefix)
    batches = follow(top, limit_s)
    if not as_json:
        print(_line(_COLUMNS), flush=True)
    for record in told(batches):
        wanted = (
            (not operations or record["operation"] in operations)
            and (not pids or record["pid"] in pids)
            and (below is None or _is_below(record["path"], below))
        )
        if wanted:
            print(json.dumps(record) if as_json else _line(_cells(record)), flush=True)


Batch = tuple[int, list[dict[str, Any]]]
"""The number of lost requests, and the requests that came after them."""


def told(batches: Iterator[Batch]) -> Iterator[dict[str, Any]]:
    """The requests of all batches; losses are said on stderr."""
    for lost, records in batches:
        if lost:
            print_error(f"{count(lost, 'request')} lost: they come faster than they are read")
        yield from records


def follow(mountpoint: str, limit_s: float | None) -> Iterator[Batch]:
    """A mount's requests from now on (vfs/operation_log.py), for ``limit_s``; now and then none.
    Raises MountError if the caller may not trace, OSError."""
    try:
        number = door.read(mountpoint, "trace")["next"]
    except PermissionError:
        raise MountError(
            f"{mountpoint}: only root and the user who has mounted may trace: it shows the "
            "requests of all users"
        ) from None
    return _batches(mountpoint, number, limit_s)


def _batches(mountpoint: str, number: int, limit_s: float | None) -> Iterator[Batch]:
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while end_s is None or time.monotonic() < end_s:
        answer = door.read(mountpoint, f"trace.{number}")
        yield answer["lost"], answer["records"]
        number = answer["next"]
        if not answer["records"]:
            time.sleep(_PAUSE_S)


def _inside(mountpoint: str, prefix: str) -> str:
    """``prefix`` from the mount's root on, given from there or the system's."""
    if prefix == mountpoint or prefix.startswith(f"{mountpoint}/"):
        prefix = prefix[len(mountpoint) :]
    return f"/{prefix.strip('/')}"


def _is_below(path: str | None, prefix: str) -> bool:
    return path is not None and (path == prefix or path.startswith(prefix.rstrip("/") + "/"))


def _cells(record: dict[str, Any]) -> tuple[object, ...]:
    at_s = record["at_s"]
    clock = time.strftime("%H:%M:%S", time.localtime(at_s)) + f"{at_s % 1:.6f}"[1:]
    number = record["errno"]
    path = record["path"] or f"inode {record['inode'] or '-'} {record['name']}".rstrip()
    return (
        clock,
        record["duration_us"],
        record["operation"],
        errno.errorcode.get(number, number) if number else "ok",
        record["bytes"] or "-",
        *("-" if record[key] is None else record[key] for key in ("uid", "pid")),
        f"{path} {record['attribute']}".rstrip(),
    )


def _line(cells: tuple[object, ...]) -> str:
    aligned = (
        f"{cell!s:<{width}}" if column in _LEFT else f"{cell!s:>{width}}"
        for cell, column, width in zip(cells, _COLUMNS, _WIDTHS, strict=True)
    )
    *fixed, path = aligned
    head = "".join(f"{cell}  " for cell in fixed)
    return "\n".join(
        f"{head if not number else ' ' * len(head)}{line}".rstrip()
        for number, line in enumerate(fold(path, len(head)))
    )


# --- top ------------------------------------------------------------------------------------------

_GROUP_KEYS = {"p": "process", "u": "user", "d": "path", "o": "operation"}
_SORT_KEYS = {"t": "time", "r": "requests", "b": "bytes", "e": "errors"}
_HEAD_LINES = 4


@command(
    "top",
    short_help="Show who uses a mount now.",
    examples="aifs top /mnt/store\naifs top /mnt/store --by path --sort bytes\n"
    "aifs top /mnt/store --for 5s --json",
    epilog="""
\b
Keys:
  p u d o    sums by process, user, path (directory), operation
  t r b e    sort by time, requests, bytes, errors
  q          end

Where the output is no terminal, a table is printed each time instead; with --json, a line of JSON.

The mount is traced meanwhile, so opens take longer; what it passes through is not seen (aifs trace
--help says more). For root, and for the user who has mounted.
""",
    sizes=True,
)
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
    from rich import table
    from rich.live import Live
    from rich.text import Text

    batches = follow(mount_of(mountpoint), limit_s)
    if as_json or not (sys.stdout.isatty() and sys.stdin.isatty()):
        for passed_s, lost, records in _intervals(batches, interval_s):
            found = usage.ordered(usage.summed(records, by), sort)
            if as_json:
                told = [{by: key, **one.told()} for key, one in found]
                print(
                    json.dumps({"seconds": round(passed_s, 3), "lost": lost, by: told}), flush=True
                )
            else:
                print(_title(by, sort, lost))
                Table(_columns_of(by, passed_s), found).print()
        return
    with _keys() as pressed, Live(screen=True, auto_refresh=False) as live:
        for passed_s, lost, records in _intervals(batches, interval_s, pressed):
            for key in pressed():
                if key == "q":
                    return
                by, sort = _GROUP_KEYS.get(key, by), _SORT_KEYS.get(key, sort)
            found = usage.ordered(usage.summed(records, by), sort)
            shown = found[: max(1, live.console.size.height - _HEAD_LINES)]
            screen = table.Table(
                box=None,
                pad_edge=False,
                title=Text(_title(by, sort, lost)),
                title_justify="left",
                caption="by: p u d o    sort: t r b e    end: q",
                expand=True,
            )
            columns = _columns_of(by, passed_s)
            screen.add_column(by, ratio=1, no_wrap=True, overflow="ellipsis")
            for column in columns[1:]:
                screen.add_column(column.title, justify="right", no_wrap=True)
            for row in shown:
                screen.add_row(*(Text(column.cell(row)) for column in columns))
            live.update(screen, refresh=True)


def _intervals(
    batches: Iterator[Batch], interval_s: float, woken: Any = None
) -> Iterator[tuple[float, int, list[dict[str, Any]]]]:
    """The requests of each interval: its seconds, lost ones, and those that came. A key ends it."""
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


def _title(by: str, sort: str, lost: int) -> str:
    less = f"; {lost} requests were lost, so this is less than all" if lost else ""
    return f"by {by}, the largest {sort} first{less}"


def _columns_of(by: str, passed_s: float) -> list[Column]:
    """The columns of rows that are a name and its usage."""
    return [
        Column(by, lambda row: row[0]),
        Column("requests/s", lambda row: f"{row[1].requests / passed_s:.0f}", number),
        Column("errors", lambda row: row[1].errors or "-", number),
        Column("busy", lambda row: f"{row[1].seconds / passed_s:.0%}", number),
        Column("mean", lambda row: row[1].seconds / row[1].requests, duration),
        Column("slowest", lambda row: row[1].slowest_s, duration),
        Column("bytes/s", lambda row: row[1].bytes / passed_s or None, rate, "-"),
    ]


# --- profile --------------------------------------------------------------------------------------

_CAUSE = "cause"
_GROUPS = [*usage.GROUPS, _CAUSE]

_Rows = Sequence[tuple[tuple[str, ...], Usage]]
"""The names of each, and its sums."""


@command(
    "profile",
    short_help="Show where the time of requests went.",
    examples="aifs profile /mnt/store --for 10s\n"
    "aifs trace /mnt/store --for 1min --json > job.trace; aifs profile job.trace\n"
    "aifs profile job.trace --by path --sort bytes --json\n"
    "aifs profile job.trace --by cause",
    epilog="""
\b
Columns:
  requests   that were answered, and how many of them with an error
  time       that their answers took, all together: more than the clock's where they overlap
  share      of the time of all
  mean, slowest, bytes

By cause, the time of each request is divided among what it has waited for: data servers, burst
directories, the journal, locks, other hosts (aifs why --help lists them), and the daemon itself,
which is its own work, and its queue. Requests and bytes are those that have waited for it, so they
count once for each cause.

A mount is traced meanwhile, so opens take longer. For root, and for the user who has mounted.
""",
    sizes=True,
)
@click.argument("source", metavar="FILE|MNT", type=PATH)
@click.option("--by", type=click.Choice(_GROUPS), help="Only these sums; else all five.")
@click.option("--sort", type=click.Choice(list(usage.SORTS)), default="time", show_default=True)
@click.option("--for", "limit_s", type=DURATION, help="Trace the mount so long; else 10 s.")
@click.option("--lines", type=click.IntRange(1), default=10, show_default=True, help="Of each sum.")
def profile_command(
    source: str, by: str | None, sort: str, limit_s: float | None, lines: int
) -> Report:
    """Sum up the requests in FILE, which aifs trace --json has printed, or those that the mount MNT
    answers from now on: by process, user, directory, operation, and by what they waited for."""
    groups = [by] if by else _GROUPS
    sums: dict[str, dict[str, Usage]] = {group: {} for group in groups if group != _CAUSE}
    waits: dict[tuple[str, str], Usage] = {}
    for record in _records(source, limit_s):
        for group, found in sums.items():
            usage.summed([record], group, found)
        usage.sum_waits(record, waits)
    tables: dict[str, _Rows] = {
        group: [((key,), one) for key, one in usage.ordered(found, sort)]
        for group, found in sums.items()
    }
    if _CAUSE in groups:
        tables[_CAUSE] = [*usage.ordered(waits, sort)]
    told = {
        group: [dict(zip(_names(group), key, strict=True)) | one.told() for key, one in rows]
        for group, rows in tables.items()
    }
    parts = list[Table | str]()
    for group, rows in tables.items():
        parts.append(Table(_sums(group, rows), rows[:lines]))
        if len(rows) > lines:
            parts.append(f"and {len(rows) - lines} more")
    return Report(told, *parts)


def _records(source: str, limit_s: float | None) -> Iterator[dict[str, Any]]:
    if os.path.isfile(source):
        if limit_s is not None:
            raise click.UsageError("--for is for a mount; a file is read as it is")
        return _read(source)
    if not os.path.lexists(source):
        raise UserError(f"{source}: no such file or mount")
    return told(follow(mount_of(source), 10 if limit_s is None else limit_s))


def _read(file_name: str) -> Iterator[dict[str, Any]]:
    with open(file_name, encoding="utf-8", errors="surrogateescape") as file:
        for number, line in enumerate(file, 1):
            try:
                record = json.loads(line)
                usage.summed([record], "path")  # has all that is summed up
                usage.sum_waits(record, {})
            except (ValueError, KeyError, TypeError, AttributeError):
                raise click.UsageError(
                    f"{file_name}:{number}: is not a line of aifs trace --json"
                ) from None
            yield record


def _names(group: str) -> tuple[str, ...]:
    return (group, "operation") if group == _CAUSE else (group,)


def _sums(group: str, found: _Rows) -> list[Column]:
    whole = sum(one.seconds for _, one in found) or 1.0
    return [
        Column(group, lambda row: row[0][0]),
        *([Column("operation", lambda row: row[0][1])] if group == _CAUSE else []),
        Column("requests", lambda row: row[1].requests, number),
        Column("errors", lambda row: row[1].errors or "-", number),
        Column("time", lambda row: row[1].seconds, duration),
        Column("share", lambda row: f"{row[1].seconds / whole:.0%}", number),
        Column("mean", lambda row: row[1].seconds / row[1].requests, duration),
        Column("slowest", lambda row: row[1].slowest_s, duration),
        Column("bytes", lambda row: row[1].bytes or None, size, "-"),
    ]
