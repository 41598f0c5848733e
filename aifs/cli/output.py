"""How commands print: JSON, tables, errors in one line, and sizes, times and durations."""

import difflib
import errno
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from aifs.core.units import describe_size

_WIDE = 1 << 16  # columns of what is no terminal: nothing is folded
_LEAST = 12  # columns that a cell is folded to; a table of narrower ones is printed row by row
_USUAL = 80  # columns of a terminal that does not know
_GAP = 2
NOTICE_S = 10.0  # between lines of progress where there is no terminal
_NEAR = 0.7  # names that look less alike are no suggestion

_exact = False


def set_exact(exact: bool) -> None:
    """Whether sizes are printed in bytes (``--bytes``) or with three digits and a unit."""
    global _exact
    _exact = exact


def size(number: float) -> str:
    """A size in bytes."""
    return str(round(number)) if _exact else describe_size(round(number))


def rate(bytes_per_s: float) -> str:
    return f"{size(bytes_per_s)}/s"


def duration(seconds: float) -> str:
    """Three digits and a unit: ``12.5 ms``, ``4.21 s``, ``2.5 h``."""
    for factor, unit, most in (
        (1e6, "us", 1e-3),
        (1e3, "ms", 1),
        (1, "s", 600),
        (1 / 60, "min", 7200),
    ):
        if seconds < most:
            value = seconds * factor
            return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"
    return f"{seconds / 3600:.3g} h" if seconds < 3.6e6 else f"{seconds / 86400:.0f} d"


def when(seconds: float) -> str:
    """A time since the epoch, by the clock of this place, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def near(word: str, names: Iterable[str]) -> list[str]:
    """The names that look like ``word``, the nearest first; at most two."""
    return difflib.get_close_matches(word, list(names), n=2, cutoff=_NEAR)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Lines of a name and a value, the values aligned."""
    lines = [(name, str(value)) for name, value in facts]
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        for line in fold(value, width + _GAP):
            print(f"{name:<{width}}  {line}")
            name = ""


def fold(text: str, indent: int) -> list[str]:
    """A text's lines in the terminal behind so many columns; one without a terminal, or room."""
    left = terminal_width() - indent
    return textwrap.wrap(text, left) or [""] if _LEAST <= left < len(text) else [text]


def terminal_width() -> int:
    """Columns that a line may have."""
    if not sys.stdout.isatty():
        return _WIDE
    with suppress(OSError):
        return os.get_terminal_size(sys.stdout.fileno()).columns or _USUAL
    return _USUAL


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """One line a row; the columns ``right`` are aligned to the right. Nothing is cut: in a narrow
    terminal long cells are folded, and empty columns left out; in a narrower one each cell has a
    line."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    cells, width = [[str(cell) for cell in row] for row in rows], terminal_width()
    widths = _column_widths(columns, cells, right, width)
    if widths is None:
        shown = [n for n in range(len(columns)) if not cells or any(row[n] for row in cells)]
        columns, cells = _only(columns, shown), [_only(row, shown) for row in cells]
        widths = _column_widths(columns, cells, right, width)
    if widths is None:
        for number, row in enumerate(cells):
            print(end="\n" if number else "")
            print_facts((name, cell) for name, cell in zip(columns, row, strict=True) if cell)
        return
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, wide in zip(columns, widths, strict=True):
        justify: Literal["right", "left"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, width=wide, overflow="fold")
    for row in cells:
        table.add_row(*map(Text, row))
    Console(file=sys.stdout, width=width, height=_WIDE).print(table)  # else a dumb one is 80 wide


def _only(row: Sequence[str], shown: Sequence[int]) -> list[str]:
    return [row[number] for number in shown]


def _column_widths(
    columns: Sequence[str], cells: Sequence[Sequence[str]], right: Sequence[str], width: int
) -> list[int] | None:
    """Each column's width; None if not even folded cells fit."""
    from rich.cells import cell_len

    whole = [
        max(cell_len(cell) for cell in (column, *(row[number] for row in cells)))
        for number, column in enumerate(columns)
    ]
    foldable = [wide for column, wide in zip(columns, whole, strict=True) if column not in right]
    left = width - _GAP * (len(columns) - 1) - sum(whole) + sum(foldable)
    if sum(foldable) <= left:
        return whole
    # Those that are narrower than the others' share stay as they are.
    most, foldable = 0, sorted(foldable)
    for number, wide in enumerate(foldable):
        most = left // (len(foldable) - number)
        if wide > most:
            break
        left -= wide
    if most < _LEAST:
        return None
    return [
        wide if column in right else min(wide, most)
        for column, wide in zip(columns, whole, strict=True)
    ]


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_error(error: BaseException) -> str:
    """The error in one line, an error of the system with its file first."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        where = (
            f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        )
        what = (
            error.strerror
            if error.errno != errno.ENOTCONN
            else "the daemon of this mount is gone; mount the store here again"
        )
        text = f"{where}{what}"
    return " ".join(text.split())


def print_error(message: str) -> None:
    print(f"aifs: {message}", file=sys.stderr)


Show = Callable[[int, int], None]
"""Called with the bytes (or files) that are done, and with all of them."""


@contextmanager
def progress(what: str, of: str = "bytes") -> Iterator[Show]:
    """Show how far ``what`` is: ``with progress("draining") as show: show(done, total)``, in bytes
    or files (``of``)."""
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
    describe = size if of == "bytes" else lambda number: f"{number} {of}"

    def show(done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= NOTICE_S:
            last = time.monotonic()
            print_error(f"{what}: {describe(done)} of {describe(total)}")

    return show
