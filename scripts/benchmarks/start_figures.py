"""Measure starts of jobs and put the numbers into the guide: docs/measured/figures/start.json, the
figure beside it, and the table of docs/measured/startup.md, between the marks.

    scripts/figures start --wheels DIRECTORY                measure, then draw
    scripts/figures start --from docs/measured/figures/start.json
                                                            draw again what has been measured
    scripts/figures start --from ROWS                       the same of scripts/bench start --json
    scripts/figures start --quick --docs DIRECTORY          little work: does it run
"""

import argparse
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from figures import machine, put_numbers, pyplot_svg, write_figure
from starts import NORMAL, PARTS, QUICK, start_rows
from systems import REPOSITORY, medium

NUMBERS, FIGURE = "figures/start.json", "start-times.svg"
GUIDE = "startup.md"
ROUNDS = 3

_SECONDS = re.compile(r"([0-9.]+) s")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from",
        dest="source",
        type=Path,
        help="JSON of an earlier run, or of scripts/bench start --json; nothing is measured",
    )
    parser.add_argument("--quick", action="store_true", help="little work in one round")
    parser.add_argument(
        "--wheels", type=Path, help="a directory of what is installed; without it it is downloaded"
    )
    parser.add_argument(
        "--docs", type=Path, default=REPOSITORY / "docs/measured", help="where the page is"
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; without any, all")
    chosen = parser.parse_args(words)
    if unknown := set(chosen.parts) - set(PARTS):
        parser.error(f"there is no part {unknown.pop()}; there are: {', '.join(PARTS)}")
    if chosen.source:
        found = json.loads(chosen.source.read_text())
        if isinstance(found, list):
            found = {"machine": machine(), "rows": found}
    else:
        found = measure(chosen.quick, chosen.wheels, chosen.parts)
    target = chosen.docs / NUMBERS
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=1) + "\n")
    _draw_times(found, target.parent / FIGURE)
    put_numbers(chosen.docs / GUIDE, tables(found))


def measure(quick: bool, wheels: Path | None, parts: Sequence[str]) -> dict[str, Any]:
    extent, rounds = (QUICK, 1) if quick else (NORMAL, ROUNDS)
    with medium(None) as base:
        rows = start_rows(base, extent, rounds, wheels, parts)
    return {"machine": machine(), "rows": [asdict(row) for row in rows]}


def tables(found: dict[str, Any]) -> str:
    """What the guide says of a run: each row of the bench, then the figure."""
    lines = [
        (
            f"{found['machine']['processors']} processors, everything in memory, servers with 1 ms "
            "for each request; ratios in one run."
        ),
        "",
        "| what | before | AIFS | target | |",
        "|---|---|---|---|---|",
        *(
            f"| {row['work']} | {row['plain']} | {row['aifs']} | {row['target']} | "
            f"{_verdict(row)} |"
            for row in found["rows"]
        ),
        "",
    ]
    if _timed(found):
        lines += [f"![seconds of each start, before and now](figures/{FIGURE})", ""]
    return "\n".join(lines)


def _verdict(row: dict[str, Any]) -> str:
    if not row["target"]:
        return ""
    return "reached" if row["passed"] else "missed"


def _timed(found: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Of the rows that compare seconds: the work, before and now."""
    timed = []
    for row in found["rows"]:
        before, now = (_SECONDS.fullmatch(row[key]) for key in ("plain", "aifs"))
        if before and now:
            timed.append((row["work"], float(before[1]), float(now[1])))
    return timed


def _draw_times(found: dict[str, Any], path: Path) -> None:
    """A pair of bars for each row that compares seconds."""
    timed = _timed(found)
    figure, axes = pyplot_svg().subplots(
        figsize=(8, 0.8 + 0.6 * max(len(timed), 1)), layout="constrained"
    )
    for offset, column, label, colour in (
        (-0.2, 1, "before", "#bdbdbd"),
        (0.2, 2, "AIFS", "#2171b5"),
    ):
        places = [place + offset for place in range(len(timed))]
        bars = axes.barh(places, [row[column] for row in timed], 0.38, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2g s", fontsize=7)
    axes.set_yticks(range(len(timed)), [row[0] for row in timed], fontsize=7)
    axes.invert_yaxis()  # in the order of the table
    axes.set_xscale("log")
    axes.set_xlabel("seconds", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    write_figure(figure, path)


if __name__ == "__main__":
    main()
