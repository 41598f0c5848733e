"""How far a long command is: a bar on a terminal, a line now and then elsewhere. On stderr, so that
output stays clean.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from aifs.cli.output import print_error
from aifs.core.units import describe_size

NOTICE_S = 10.0

Show = Callable[[int, int], None]
"""Bytes (or files) that are done, and how many they are in all."""


@contextmanager
def progress(what: str, of: str = "bytes") -> Iterator[Show]:
    """``what`` is being done: ``with progress("draining") as show: show(done, total)``.

    ``of``: what is counted, bytes or files."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what, of)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        *(
            (DownloadColumn(binary_units=True), TransferSpeedColumn())
            if of == "bytes"
            else (MofNCompleteColumn(), TextColumn(of))
        ),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str, of: str) -> Show:
    last = time.monotonic()
    describe = describe_size if of == "bytes" else lambda number: f"{number} {of}"

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= NOTICE_S:
            last = time.monotonic()
            print_error(f"{what}: {describe(done)} of {describe(total)}")

    return show
