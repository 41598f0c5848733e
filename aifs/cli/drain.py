"""``aifs drain``: have files on the capacity tier, and wait for it."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from aifs.cli import hints
from aifs.cli.arguments import DURATION, PATH
from aifs.cli.output import count, print_error
from aifs.core.errors import TimeoutReached
from aifs.core.units import describe_size, format_duration

EPILOG = """
\b
Examples:
  aifs drain /mnt/store/step-100
  aifs drain /mnt/store --timeout 5min

Ctrl-C and the time-out end the waiting, not the drain. Files that are open for writing are drained
when they have been closed. `getfattr -n user.aifs.state PATH` says where the bytes are.
"""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.02, 2.0


class Left(NamedTuple):
    """What is still in the burst tier alone."""

    files: int
    bytes: int
    open_files: int
    error: str = ""
    """Why draining has to wait, if it does."""
    hosts: tuple[str, ...] = ()
    """Other hosts that have some of it."""

    def __str__(self) -> str:
        are_open = f", {self.open_files} open for writing" if self.open_files else ""
        elsewhere = f", of host {', '.join(self.hosts)}, too" if self.hosts else ""
        return f"{count(self.files, 'file')} ({describe_size(self.bytes)}{are_open}{elsewhere})"


@click.command(
    "drain", epilog=EPILOG, short_help="Have files on the data servers now, and wait for it."
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option(
    "--timeout", "timeout_s", type=DURATION, help="Stop waiting after so long (exit code 7)."
)
def drain_command(paths: tuple[str, ...], timeout_s: float | None) -> None:
    """Drain the files PATH, and all below the directories PATH, ahead of all else; wait until they
    are on the capacity tier.

    Returns when all that had been written before the command began is on stable storage of the data
    servers. What is written below PATH meanwhile is not waited for.
    """
    from aifs.cli.trees import require_files

    require_files(paths)
    begin = time.monotonic()
    drained = drain(paths, timeout_s)
    if drained.files:
        elapsed_s = max(time.monotonic() - begin, 1e-3)
        print(f"drained {drained}, {describe_size(int(drained.bytes / elapsed_s))}/s")
    else:
        print("nothing was undrained")


def left(paths: Sequence[str], before_ns: int | None = None) -> Left:
    """What is undrained of ``paths``; with ``before_ns`` nothing, once all that was so at that time
    (epoch) is drained.
    """
    answers = [hints.read(path, hints.DRAIN) for path in paths]
    if before_ns is not None:
        answers = [
            answer
            for answer in answers
            if answer["files"] and answer["oldest_since_ns"] <= before_ns
        ]
    files, size, writers = (
        sum(answer[key] for answer in answers) for key in ("files", "bytes", "open_files")
    )
    hosts = sorted({host for answer in answers for host in answer["hosts"]})
    error = next((answer["error"] for answer in answers), "")
    return Left(files, size, writers, error, tuple(hosts))


def _pause_s(first: Left, remaining: Left, elapsed_s: float) -> float:
    """How long not to ask again: half of what it will take, as far as can be told. Each answer
    takes the daemon longer the more files are left."""
    done = first.files - remaining.files
    expected_s = elapsed_s * remaining.files / done if done > 0 else elapsed_s
    return min(max(expected_s / 2, _PAUSE_MIN_S), _PAUSE_MAX_S)


def drain(paths: Sequence[str], timeout_s: float | None) -> Left:
    """Drain ``paths`` and wait, with a progress bar; what there was to drain. Raises
    TimeoutReached, OSError.
    """
    from aifs.cli.progress import progress

    begin_ns, begin = time.time_ns(), time.monotonic()
    first = remaining = left(paths, begin_ns)  # before it is asked for: a little is drained at once
    for path in paths:
        hints.put(path, hints.DRAIN)
    said = ""
    try:
        with progress("draining") as show:
            while remaining.files:
                show(max(first.bytes - remaining.bytes, 0), first.bytes)
                if remaining.error and not said:
                    said = remaining.error
                    print_error(f"draining is tried again and again: {said}")
                if timeout_s is not None and time.monotonic() - begin >= timeout_s:
                    raise TimeoutReached(
                        f"not drained after {format_duration(timeout_s)}: {remaining}; draining "
                        "goes on, and aifs status shows what holds it up"
                    )
                elapsed_s = time.monotonic() - begin
                pause_s = _pause_s(first, remaining, elapsed_s)
                if timeout_s is not None:
                    pause_s = min(pause_s, max(timeout_s - elapsed_s, _PAUSE_MIN_S))
                time.sleep(pause_s)
                remaining = left(paths, begin_ns)
    except KeyboardInterrupt:
        print_error(f"draining goes on in the background; left: {remaining}")
        raise
    return first
