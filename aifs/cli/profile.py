"""``aifs profile``: where the time of a job's requests went."""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import click

from aifs.cli.arguments import DURATION, PATH
from aifs.core.errors import UserError
from aifs.watch import usage
from aifs.watch.usage import Usage

EPILOG = """
\b
Examples:
  aifs profile /mnt/store --for 10s
  aifs trace /mnt/store --for 1min --json > job.trace; aifs profile job.trace
  aifs profile job.trace --by path --sort bytes --json
  aifs profile job.trace --by cause

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

A mount is traced meanwhile, so opens take longer. For root, and for who has mounted.
"""

_CAUSE = "cause"
_GROUPS = [*usage.GROUPS, _CAUSE]

_Rows = Sequence[tuple[tuple[str, ...], Usage]]
"""What each is called, and its sums."""


@click.command("profile", epilog=EPILOG, short_help="Show where the time of requests went.")
@click.argument("source", metavar="FILE|MNT", type=PATH)
@click.option("--by", type=click.Choice(_GROUPS), help="Only these sums; else all five.")
@click.option("--sort", type=click.Choice(list(usage.SORTS)), default="time", show_default=True)
@click.option("--for", "limit_s", type=DURATION, help="Trace the mount so long; else 10 s.")
@click.option("--lines", type=click.IntRange(1), default=10, show_default=True, help="Of each sum.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with all lines.")
def profile_command(
    source: str, by: str | None, sort: str, limit_s: float | None, lines: int, as_json: bool
) -> None:
    """Sum up the requests in FILE, which aifs trace --json has printed, or those that the mount MNT
    answers from now on: by process, user, directory, operation, and by what they waited for."""
    from aifs.cli.output import print_json

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
    if as_json:
        told = {
            group: [dict(zip(_columns(group), key, strict=True)) | one.told() for key, one in rows]
            for group, rows in tables.items()
        }
        print_json(told)
        return
    for number, (group, rows) in enumerate(tables.items()):
        if number:
            print()
        _print(_columns(group), rows, lines)


def _records(source: str, limit_s: float | None) -> Iterator[dict[str, Any]]:
    from aifs.cli import trace
    from aifs.cli.mounts import mount_of

    if os.path.isfile(source):
        if limit_s is not None:
            raise click.UsageError("--for is for a mount; a file is read as it is")
        return _read(source)
    if not os.path.lexists(source):
        raise UserError(f"{source}: no such file or mount")
    return trace.told(trace.follow(mount_of(source), 10 if limit_s is None else limit_s))


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


def _columns(group: str) -> tuple[str, ...]:
    """What the members of a group are called by."""
    return (group, "operation") if group == _CAUSE else (group,)


def _print(columns: tuple[str, ...], found: _Rows, lines: int) -> None:
    from aifs.cli.output import print_table
    from aifs.core.units import describe_size

    whole = sum(one.seconds for _, one in found) or 1.0
    numbers = ("requests", "errors", "time", "share", "mean", "slowest", "bytes")
    rows = [
        (
            *key,
            one.requests,
            one.errors or "-",
            f"{one.seconds:.3f} s",
            f"{one.seconds / whole:.0%}",
            f"{one.seconds / one.requests * 1e6:.0f} us",
            f"{one.slowest_s * 1e6:.0f} us",
            describe_size(one.bytes) if one.bytes else "-",
        )
        for key, one in found[:lines]
    ]
    print_table((*columns, *numbers), rows, right=numbers)
    if len(found) > lines:
        print(f"and {len(found) - lines} more")
