"""``aifs trace``: the requests that a mount answers, one line each, as they are answered."""

import errno
import json
import time
from collections.abc import Iterator
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import DURATION, PATH
from aifs.cli.output import count, fold, print_error
from aifs.core.errors import MountError

EPILOG = """
\b
Examples:
  aifs trace /mnt/store
  aifs trace /mnt/store --op open --op create --path /run/step-100
  aifs trace /mnt/store --pid 4711 --for 10s --json

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

For root, and for who has mounted. While nobody traces, it costs nothing.
"""

_PAUSE_S = 0.05
_COLUMNS = ("time", "us", "operation", "result", "bytes", "uid", "pid", "path")
_WIDTHS = (15, 9, 15, 12, 10, 6, 8, 0)
_LEFT = ("operation", "result", "path")


@click.command("trace", epilog=EPILOG, short_help="Show the requests that a mount answers.")
@click.argument("mountpoint", type=PATH)
@click.option("--op", "operations", multiple=True, metavar="OPERATION", help="Only these.")
@click.option(
    "--path", "prefix", metavar="PATH", help="Only what is there, or below; / is the mount's root."
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

    The mount keeps some ten thousand requests for whoever reads too slowly; how many were lost
    beyond that is said on stderr.
    """
    from aifs.cli.mounts import mount_of

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
"""How many requests were lost, and those that came after them."""


def told(batches: Iterator[Batch]) -> Iterator[dict[str, Any]]:
    """The requests of all batches; losses are said on stderr."""
    for lost, records in batches:
        if lost:
            print_error(f"{count(lost, 'request')} lost: they come faster than they are read")
        yield from records


def follow(mountpoint: str, limit_s: float | None) -> Iterator[Batch]:
    """The requests that a mount answers from now on (vfs/operation_log.py), for ``limit_s``; now
    and then none. Raises MountError for who may not, OSError."""
    try:
        number = hints.read(mountpoint, hints.TRACE)["next"]
    except PermissionError:
        raise MountError(
            f"{mountpoint}: only root and who has mounted may trace: it shows what all users do"
        ) from None
    return _batches(mountpoint, number, limit_s)


def _batches(mountpoint: str, number: int, limit_s: float | None) -> Iterator[Batch]:
    end_s = None if limit_s is None else time.monotonic() + limit_s
    while end_s is None or time.monotonic() < end_s:
        answer = hints.read(mountpoint, f"{hints.TRACE}.{number}")
        yield answer["lost"], answer["records"]
        number = answer["next"]
        if not answer["records"]:
            time.sleep(_PAUSE_S)


def _inside(mountpoint: str, prefix: str) -> str:
    """``prefix`` from the mount's root on: it may be given from the system's root on, too."""
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
