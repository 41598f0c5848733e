"""Results as rows of one table, for people and as JSON."""

import json
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One measured work. Rates are per second in ``unit``; ratios are of rates, None where they
    mean nothing. ``c_to_plain``: libfuse's C pass-through, where it was measured.
    """

    work: str
    plain: str
    nothing_to_plain: float | None
    aifs_to_plain: float | None
    aifs_to_nothing: float | None
    aifs: str
    target: str
    passed: bool
    c_to_plain: float | None = None


def show(rows: list[Row], as_json: bool) -> None:
    if as_json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    with_c = any(row.c_to_plain is not None for row in rows)
    table = Table(
        "work",
        "plain",
        *(["C pass-through\n/ plain"] if with_c else []),
        "do-nothing\n/ plain",
        "AIFS\n/ plain",
        "AIFS\n/ do-nothing",
        "AIFS",
        "target",
        "",
    )
    for column in table.columns[1:-2]:
        column.justify = "right"
    for row in rows:
        verdict = "[green]pass[/]" if row.passed else "[red]fail[/]"
        ratios = map(_ratio, (row.nothing_to_plain, row.aifs_to_plain, row.aifs_to_nothing))
        c = [_ratio(row.c_to_plain)] if with_c else []
        table.add_row(row.work, row.plain, *c, *ratios, row.aifs, row.target, verdict)
    console = Console()
    if not console.is_terminal:
        console.width = 150
    console.print(table)


def _ratio(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.3f}" if value < 0.1 else f"{value:.2f}"


def rate(value: float, unit: str) -> str:
    return f"{value:,.0f} {unit}"
