"""The rows of ``scripts/bench data``, as the guide to datasets shows them: a table, and figures of
how far each is from its target, and of the pictures that others read.
"""

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from figures import pyplot_svg, write_figure
from peers import OURS
from systems import HERE

Found = dict[str, Any]
"""``rows``: as ``scripts/bench data --json`` prints them; ``quick``: whether it did little work."""

MET, MISSED = "#4292c6", "#a63603"


def measured(quick: bool) -> Found:
    """A run of the bench. What misses its target is in the figures like everything else."""
    command = [sys.executable, HERE / "bench.py", "data", "--peers", "--json"]
    done = subprocess.run(
        command + ["--quick"] * quick, check=False, stdout=subprocess.PIPE, text=True
    )
    try:
        return {"quick": quick, "rows": json.loads(done.stdout)}
    except ValueError:
        raise SystemExit(f"scripts/bench data has failed (exit code {done.returncode})") from None


def table(found: Found) -> str:
    """What the guide says of the run."""
    quick = " --quick`: little work in one round, so roughly."
    lines = [
        f"`scripts/bench data --peers{quick if found['quick'] else '`: medians of three rounds.'}",
        "",
        "| what / beside what | that | AIFS | ratio | target | |",
        "|---|---|---|---|---|---|",
    ]
    for row in found["rows"]:
        ratio = row["aifs_to_plain"]
        told = "" if ratio is None else f"{ratio:.2f}"
        met = "" if row["passed"] else "missed"
        lines.append(
            f"| {row['work']} | {row['plain']} | {row['aifs']} | {told} | {row['target']} | {met} |"
        )
    lines += ["", "![each row beside its target](figures/datasets-speed.svg)", ""]
    if _pictures(found):
        lines += ["![pictures that each loader reads](figures/datasets-peers.svg)", ""]
    return "\n".join(lines)


def draw_targets(found: Found, path: Path) -> None:
    """How many times as good as its target each row is."""
    bars = []
    for row in found["rows"]:
        target = re.fullmatch(r"(>=|<=) ([\d.]+)( \w+)?", row["target"])
        if target is None or row["work"].startswith("pictures"):
            continue
        ratio = row["aifs_to_plain"]
        value = _number(row["aifs"]) if ratio is None else ratio
        times = value / float(target[2]) if target[1] == ">=" else float(target[2]) / value
        bars.append((row["work"], times, MET if row["passed"] else MISSED))
    figure, axes = pyplot_svg().subplots(figsize=(7, 0.9 + 0.24 * len(bars)), layout="constrained")
    works, times, colours = zip(*reversed(bars), strict=True)
    axes.barh(range(len(bars)), [each - 1 for each in times], left=1, color=colours, height=0.6)
    axes.set_xscale("log")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(bars)), works, fontsize=7)
    axes.set_xlabel("times as good as the target, which is 1", fontsize=8)
    axes.tick_params(axis="x", labelsize=7)
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def draw_peers(found: Found, path: Path) -> None:
    """Pictures per second of each loader, by where they lie. Nothing if none was measured."""
    rates = _pictures(found)
    if not rates:
        return
    names = list(dict.fromkeys(name for of_place in rates.values() for name in of_place))
    figure, axes = pyplot_svg().subplots(
        1, len(rates), figsize=(8, 0.7 + 0.3 * len(names)), layout="constrained", sharey=True
    )
    for one, (place, of_place) in zip(figure.axes, rates.items(), strict=True):
        values = [of_place.get(name, 0) for name in reversed(names)]
        colours = [MET if name.startswith("AIFS") else "#9ecae1" for name in reversed(names)]
        one.barh(range(len(names)), values, color=colours, height=0.6)
        one.set_yticks(range(len(names)), list(reversed(names)), fontsize=7)
        one.set_title(place, fontsize=8)
        one.set_xlabel("pictures per second", fontsize=8)
        one.tick_params(axis="x", labelsize=7)
        one.spines[["top", "right"]].set_visible(False)
    write_figure(figure, path)


def _pictures(found: Found) -> dict[str, dict[str, float]]:
    """By place and loader the pictures per second."""
    rates: dict[str, dict[str, float]] = defaultdict(dict)
    for row in found["rows"]:
        place, _, loaders = row["work"].removeprefix("pictures, ").partition(": ")
        if row["work"].startswith("pictures, "):
            rates[place][OURS] = _number(row["aifs"])
            rates[place][loaders.removeprefix(f"{OURS} / ")] = _number(row["plain"])
    return rates


def _number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))
