"""How commands print: JSON for programs, tables for people, errors in one line."""

import errno
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

_WIDE = (
    1 << 16
)  # rich cuts cells off at the width; what is wider than the terminal wraps there instead


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_facts(facts: Iterable[tuple[str, object]]) -> None:
    """Lines of a name and a value, the values aligned."""
    facts = [(name, str(value)) for name, value in facts]
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name:<{width}}  {value}")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[object]], right: Sequence[str] = ()
) -> None:
    """One line per row, nothing cut off; the columns named in ``right`` are aligned to the
    right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(file=sys.stdout, width=_WIDE).print(table)


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def describe_time(seconds: float) -> str:
    """A time since the epoch, by the clock of this place, to the second."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def describe_error(error: BaseException) -> str:
    """What went wrong in one line; an error of the system names its file first, as other commands
    do.
    """
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
