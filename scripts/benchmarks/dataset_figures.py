"""Measure what the orders of datasets teach a model, and how fast datasets are read, and put the
numbers into the guide: docs/measured/figures/datasets.json, the figures beside it, and the tables
of docs/measured/datasets.md, between the marks.

    scripts/figures datasets                                    measure, then draw
    scripts/figures datasets --bench FILE                       the speeds anew, which
                                                                `scripts/bench data --json` has told
    scripts/figures datasets --from FILE                        draw again what has been measured
                                                                (docs/measured/figures/datasets.json)
    scripts/figures datasets --quick --docs DIRECTORY           little work: does it run
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dataset_speeds
import shuffle_quality
from figures import machine, put_numbers, pyplot_svg, write_figure
from systems import REPOSITORY

NUMBERS = "figures/datasets.json"
GUIDE = "datasets.md"

QUICK, NORMAL = (2, 40), (5, shuffle_quality.STEPS)
"""Seeds, steps."""

SHUFFLES = {
    "rows": "full shuffle (`rows`)",
    "blocks": "`blocks` (the default)",
    "window": "`window`",
    "none": "`none`",
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--from", dest="source", type=Path, help="JSON of an earlier run; nothing is measured"
    )
    parser.add_argument(
        "--bench", type=Path, help="JSON of `scripts/bench data`; with --quick, of a quick run"
    )
    parser.add_argument("--quick", action="store_true", help="little work in one round")
    parser.add_argument(
        "--docs", type=Path, default=REPOSITORY / "docs/measured", help="where the page is"
    )
    chosen = parser.parse_args(words)
    target = chosen.docs / NUMBERS
    if chosen.source or chosen.bench:
        found = json.loads((chosen.source or target).read_text())
    else:
        found = measure(chosen.quick)
    if chosen.bench:
        found["speed"] = {"quick": chosen.quick, "rows": json.loads(chosen.bench.read_text())}
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(found, indent=1) + "\n")
    for name, draw in FIGURES.items():
        draw(found, target.parent / name)
    put_numbers(chosen.docs / GUIDE, tables(found))


def measure(quick: bool) -> dict[str, Any]:
    """Of each shuffle and seed the losses on the way; the rows of the bench."""
    seeds, steps = QUICK if quick else NORMAL
    return {
        "machine": machine(),
        "seeds": seeds,
        "steps": steps,
        "quality": shuffle_quality.measure(seeds, steps),
        "speed": dataset_speeds.measured(quick),
    }


def tables(found: dict[str, Any]) -> str:
    """What the guide says of a run: by shuffle the loss on what was held out; the speeds."""
    means = shuffle_quality.summary(found["quality"])
    lines = [
        f"{found['steps']} steps, {found['seeds']} seeds: mean and standard deviation.",
        "",
        "| shuffle | loss on what was held out, nats per token | perplexity |",
        "|---|---|---|",
        *(
            f"| {SHUFFLES[shuffle]} | {mean:.3f} ± {spread:.3f} | {perplexity:.2f} |"
            for shuffle, (mean, spread, perplexity) in means.items()
        ),
        "",
        "![loss by step in each order](figures/datasets-quality.svg)",
        "",
        "## How fast it is",
        "",
        dataset_speeds.table(found["speed"]),
    ]
    return "\n".join(lines)


def _draw_quality(found: dict[str, Any], path: Path) -> None:
    """By step the loss in each order, a line for each seed."""
    figure, axes = pyplot_svg().subplots(figsize=(6, 3.4), layout="constrained")
    colours = {"rows": "#08306b", "blocks": "#4292c6", "window": "#fd8d3c", "none": "#a63603"}
    seen = set()
    for one in found["quality"]:
        shuffle = one["shuffle"]
        steps, losses = zip(*one["curve"], strict=True)
        label = None if shuffle in seen else shuffle
        seen.add(shuffle)
        axes.plot(steps, losses, color=colours[shuffle], label=label, linewidth=1, alpha=0.8)
    axes.set_xlabel("step of one epoch", fontsize=8)
    axes.set_ylabel("loss on what was held out", fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8)
    write_figure(figure, path)


FIGURES: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "datasets-quality.svg": _draw_quality,
    "datasets-speed.svg": lambda found, path: dataset_speeds.draw_targets(found["speed"], path),
    "datasets-peers.svg": lambda found, path: dataset_speeds.draw_peers(found["speed"], path),
}

if __name__ == "__main__":
    main()
