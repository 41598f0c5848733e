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
"""Bytes that are done, and bytes in all."""


@contextmanager
def progress(what: str) -> Iterator[Show]:
    """``what`` is being done: ``with progress("draining") as show: show(done, total)``."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(what)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _lines(what: str) -> Show:
    last = time.monotonic()

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= NOTICE_S:
            last = time.monotonic()
            print_error(f"{what}: {describe_size(done)} of {describe_size(total)}")

    return show
