"""Measure grouped I/O and put the numbers into the guide: docs/measured/figures/grouped.json, the
figures beside it, and the tables of docs/measured/grouped.md, between the marks.

    scripts/figures                                   measure, then draw
    scripts/figures --from FILE                       draw again what has been measured
    scripts/figures --quick --docs DIRECTORY          little work: does it run

scripts/figures datasets does the same for docs/measured/datasets.md (dataset_figures.py), and
scripts/figures start for docs/measured/startup.md (start_figures.py).
"""

import argparse
import json
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from grouped import RANKS, measure, rows
from systems import REPOSITORY, medium, touch_memory

NUMBERS = "figures/grouped.json"
GUIDE = "grouped.md"
MARKS = (
    "<!-- numbers: scripts/figures writes what is between these marks -->\n",
    "<!-- end of the numbers -->\n",
)
WHERE = {"memory": "servers in memory", "network": "servers across a network, one of them slow"}
READS = {"one": "one file", "shared": "a file each, of shared chunks"}

QUICK, NORMAL = (8, 1), (256, 3)
"""MiB per rank, rounds."""


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="source", type=Path, help="JSON of an earlier run; nothing is measured"
    )
    parser.add_argument("--quick", action="store_true", help="little work in one round")
    parser.add_argument("--mib", type=int, help=f"of each rank; without it {NORMAL[0]}")
    parser.add_argument("--dir", help="measure below this directory, not on a tmpfs")
    parser.add_argument(
        "--docs", type=Path, default=REPOSITORY / "docs/measured", help="where the page is"
    )
    chosen = parser.parse_args(words)
    if chosen.source:
        found = json.loads(chosen.source.read_text())
    else:
        mib, rounds = QUICK if chosen.quick else NORMAL
        mib = chosen.mib or mib
        with medium(chosen.dir) as base:
            touch_memory(base, 12 * mib)
            found = {"machine": machine(), **measure(base, mib, rounds)}
    target = chosen.docs / NUMBERS
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=1) + "\n")
    for name, draw in FIGURES.items():
        draw(found, target.parent / name)
    put_numbers(chosen.docs / GUIDE, tables(found))


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "processors": len(os.sched_getaffinity(0)),
        "memory": memory,
        "kernel": platform.release(),
    }


def put_numbers(guide: Path, text: str) -> None:
    """Have ``text`` in ``guide`` in the place of what is between the marks."""
    before, _, rest = guide.read_text().partition(MARKS[0])
    _, mark, after = rest.partition(MARKS[1])
    if not mark:
        raise SystemExit(f"{guide.name}: the marks are missing: {''.join(MARKS)}")
    guide.write_text(before + MARKS[0] + text + MARKS[1] + after)


def tables(found: dict[str, Any]) -> str:
    """What the guide says of a run: targets, then every way beside the one before, then the
    readers.
    """
    lines = [
        fill(
            f"{found['ranks']} ranks save {found['mib']} MiB each, the same in all; medians of "
            f"{found['rounds']} on {found['machine']['processors']} processors, everything in "
            "memory. Bytes are parts of those saved.",
            100,
        ),
        "",
        "| | | AIFS | target |",
        "|---|---|---|---|",
        *(f"| {row.work} | {row.plain} | {row.aifs} | {row.target} |" for row in rows(found)),
        "",
    ]
    for key, where in WHERE.items():
        lines += [
            (
                f"| {where} | in the buffer | durable | daemon's processor time | hashed | "
                "compared | bytes on servers |"
            ),
            "|---|---|---|---|---|---|---|",
            *(
                f"| {one['way']} | {one['buffer_s']:.2f} s | {one['durable_s']:.2f} s | "
                f"{one['cpu_s']:.2f} s | {_part(one, 'hashed_bytes')} | "
                f"{_part(one, 'compared_bytes')} | {_part(one, 'stored_bytes')} |"
                for one in found[key]
            ),
            "",
        ]
    lines += [
        (
            "| readers, servers 1 ms away | time, to that of one | read from servers, to one "
            "file's bytes |"
        ),
        "|---|---|---|",
        *(
            f"| {one['readers']}, {READS[one['files']]} | "
            f"{one['seconds'] / _alone_s(found, one['files']):.2f} | "
            f"{one['fetched_bytes'] / one['bytes']:.2f} |"
            for one in found["reads"]
        ),
        "",
    ]
    return "\n".join(lines)


def _part(one: dict[str, Any], key: str) -> str:
    """Of the bytes that were saved."""
    return f"{one[key] / one['bytes']:.2f}" if key in one else ""


def _alone_s(found: dict[str, Any], what: str) -> float:
    return next(
        one["seconds"] for one in found["reads"] if (one["files"], one["readers"]) == (what, 1)
    )


def _draw_factors(found: dict[str, Any], path: Path) -> None:
    """One panel for each kind of servers; for each way how long ranks wait, and until all is
    durable.
    """
    pyplot = pyplot_svg()
    figure, panels = pyplot.subplots(1, len(WHERE), figsize=(10, 3.4), layout="constrained")
    for panel, (key, where) in zip(panels, WHERE.items(), strict=True):
        ways = found[key]
        for offset, (measured, label, colour) in enumerate(
            (("buffer_s", "in the buffer", "#9ecae1"), ("durable_s", "durable", "#2171b5"))
        ):
            places = [number + 0.38 * (offset - 0.5) for number in range(len(ways))]
            bars = panel.bar(
                places, [one[measured] for one in ways], 0.36, label=label, color=colour
            )
            panel.bar_label(bars, fmt="%.2g", fontsize=7)
        panel.set_xticks(range(len(ways)), [_label(one["way"]) for one in ways], fontsize=7)
        panel.set_title(where, fontsize=9)
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel(f"seconds, {RANKS} x {found['mib']} MiB")
    panels[0].legend(frameon=False, fontsize=8)
    write_figure(figure, path)


def _label(way: str) -> str:
    return way.replace("+ ", "+\u00a0").replace(" ", "\n", 1)


def _draw_reads(found: dict[str, Any], path: Path) -> None:
    """By number of readers: how long they take, and what the servers had to give; both to those of
    one reader.
    """
    figure, panels = pyplot_svg().subplots(1, 2, figsize=(7, 2.8), layout="constrained")
    for what, label in READS.items():
        cases = [one for one in found["reads"] if one["files"] == what]
        readers = [one["readers"] for one in cases]
        panels[0].plot(
            readers,
            [one["seconds"] / cases[0]["seconds"] for one in cases],
            marker="o",
            label=label,
        )
        panels[1].plot(
            readers, [one["fetched_bytes"] / one["bytes"] for one in cases], marker="o", label=label
        )
    for panel, title in zip(
        panels,
        ("time, to that of one reader", "read from servers, to one file's bytes"),
        strict=True,
    ):
        panel.set_ylim(0, 1.1 * panel.get_ylim()[1])
        panel.set_title(title, fontsize=9)
        panel.set_xlabel("readers", fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(frameon=False, fontsize=8, loc="lower right")
    write_figure(figure, path)


FIGURES = {"grouped-factors.svg": _draw_factors, "grouped-reads.svg": _draw_reads}


def pyplot_svg() -> Any:
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and a figure of the same numbers is the same file.
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "aifs", "font.family": "sans-serif"}
    )
    from matplotlib import pyplot

    return pyplot


def write_figure(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    pyplot_svg().close(figure)


if __name__ == "__main__":
    main()
