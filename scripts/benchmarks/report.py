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


def faster(work: str, before_s: float, now_s: float, least: float) -> Row:
    """How many times as long as now it took ``before``: ``least`` is the target."""
    ratio = before_s / now_s
    told = f"{now_s:.2f} s"
    target = f"{ratio:.1f} times faster >= {least:g}"
    return Row(work, f"{before_s:.2f} s", None, ratio, None, told, target, ratio >= least)


def longer(work: str, anchor_s: float, now_s: float, most: float) -> Row:
    """How many times as long as the anchor it takes: ``most`` is the target."""
    ratio = now_s / anchor_s
    told, target = f"{now_s:.2f} s", f"{ratio:.2f} of its time <= {most:g}"
    return Row(work, f"{anchor_s:.2f} s", None, 1 / ratio, None, told, target, ratio <= most)


def at_most(work: str, value: float, most: float, told: str = "") -> Row:
    """A number that has no unit."""
    said = f"{value:.3f}{', ' if told else ''}{told}"
    return Row(work, "", None, None, None, said, f"<= {most:g}", value <= most)


def told(work: str, text: str) -> Row:
    """What explains other rows."""
    return Row(work, "", None, None, None, text, "", True)


def at_least(work: str, against: str, baseline: float, reached: float, target: float) -> Row:
    """How many times the baseline's rate was reached: ``target`` is the least."""
    ratio = reached / baseline
    return Row(
        work,
        f"{against} {rate(baseline, 'MiB/s')}",
        None,
        ratio,
        None,
        rate(reached, "MiB/s"),
        f">= {target}",
        ratio >= target,
    )
