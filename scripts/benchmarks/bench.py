"""AIFS against the plain directory and the do-nothing filesystem: ratios of rates measured in the
same run.
"""

import signal
import statistics
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import click
from background import Extent, background_rows
from changing import changing_rows
from checkpoint import checkpoint_rows
from clones import clones_rows
from dataset_rates import NORMAL as NORMAL_DATA
from dataset_rates import QUICK as QUICK_DATA
from dataset_rates import data_rows
from endurance import endurance_rows
from environments import Amounts, env_rows
from epochs import epoch_rows
from first_reads import NORMAL as NORMAL_FIRST
from first_reads import QUICK as QUICK_FIRST
from first_reads import first_read_rows
from gate import gate
from gate_rows import ROWS
from grouped import grouped_rows
from hosts import NORMAL as NORMAL_HOSTS
from hosts import QUICK as QUICK_HOSTS
from hosts import hosts_rows
from latency import latency_row
from movement import movement_rows
from objects import object_rows
from operations import operations_rows
from outlive import outlive_rows
from protection import protection_rows
from publishing import publishing_rows
from report import Row, rate, show
from rich.console import Console
from starts import NORMAL as NORMAL_START
from starts import QUICK as QUICK_START
from starts import start_rows
from systems import Aifs, Nothing, System, medium, touch_memory
from trash import trash_row
from works import COURSES, WORKS, Size, Work

QUICK = Size(files=1000, entries=10_000, mib=128)
NORMAL = Size(files=5000, entries=100_000, mib=512)

QUICK_ENV = Amounts(unpacked=2000, copied=1000, trees=1, extras=())
NORMAL_ENV = Amounts(unpacked=50_000, copied=10_000, trees=10, extras=("test", "figures"))

QUICK_BESIDE = Extent(files=500, deleted=2000, mib=512, probed=2000)
NORMAL_BESIDE = Extent(files=4000, deleted=100_000, mib=4096, probed=20_000)

QUICK_PICTURES, NORMAL_PICTURES = 200, 2000

QUICK_QUALITY, NORMAL_QUALITY = (1, 40), (5, 400)
"""Seeds, steps."""

SPECIAL = (
    "background",
    "changing",
    "latency",
    "movement",
    "publishing",
    "protection",
    "checkpoint",
    "grouped",
    "hosts",
    "data",
    "env",
    "first-reads",
    "memory",
    "objects",
    "operations",
    "outlive",
    "start",
)

Rates = dict[tuple[str, str], list[float]]

log = Console(stderr=True)


@click.command(
    epilog=f"WORK is one of: {', '.join((*WORKS, *SPECIAL))}. Without any, all are done."
)
@click.argument("works", nargs=-1, metavar="[WORK]...", type=click.Choice([*WORKS, *SPECIAL]))
@click.option(
    "--dir", "directory", help="The medium of data, metadata and baselines; without it a tmpfs."
)
@click.option(
    "--rounds",
    default=3,
    show_default=True,
    help="Each system is measured once in each; medians count.",
)
@click.option(
    "--quick", is_flag=True, help="Little work in one round: does it run, roughly how fast."
)
@click.option(
    "--long", is_flag=True, help="Memory over a million files, 20 GiB, a million operations."
)
@click.option(
    "--bare",
    is_flag=True,
    help="Let the do-nothing filesystem wait for requests as pyfuse3 does by itself.",
)
@click.option(
    "--wheels",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="What `env` and `start` install: a directory of wheels; without it they are downloaded.",
)
@click.option(
    "--quality",
    is_flag=True,
    help="With `data`: train a small GPT on rows in each order, instead of measuring speed.",
)
@click.option(
    "--peers",
    is_flag=True,
    help="With `data`: also read the same pictures by the loaders of others (extra `peers`).",
)
@click.option(
    "--gate",
    "as_gate",
    is_flag=True,
    help="Compare this tree with another one (docs/measured/speed.md): exits with 1 if a row is "
    "slower.",
)
@click.option(
    "--against",
    metavar="TREE",
    help="With `--gate`: a git revision, or a directory. Without it: where this branch left main; "
    "on main HEAD, if the package has changed since, or else its parent.",
)
@click.option(
    "--row",
    "gate_rows",
    multiple=True,
    type=click.Choice([*ROWS]),
    metavar="ROW",
    help="With `--gate`: this row alone, in as many rounds as ten minutes have. Can be repeated.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON.")
def bench(
    works: tuple[str, ...],
    directory: str | None,
    rounds: int,
    quick: bool,
    long: bool,
    bare: bool,
    wheels: Path | None,
    quality: bool,
    peers: bool,
    as_gate: bool,
    against: str | None,
    gate_rows: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure AIFS, a do-nothing pyfuse3 filesystem and a plain directory in turn, and print their
    ratios.

    Exits with 1 if a target is missed. Needs root (mounts, dropping the kernel's caches).
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # and take down
    if as_gate:
        asked = [
            row
            for row in ROWS.values()
            if (row.name in gate_rows if gate_rows else row.quick or not quick)
        ]
        with medium(directory) as base:
            sys.exit(0 if gate(against, base, asked, as_json, log) else 1)
    size, rounds = (QUICK, 1) if quick else (NORMAL, rounds)
    chosen = works or (*WORKS, *SPECIAL)
    with medium(directory) as base:
        systems = [System("plain", base), Nothing("nothing", base, bare), Aifs("aifs", base)]
        with log.status("touching memory"):
            touch_memory(base, 12 * size.mib)
        rates = _measure(systems, chosen, size, rounds)
        rows = [_row(work, rates) for name, work in WORKS.items() if name in chosen]
        if "background" in chosen:
            with log.status("background"):
                extent = QUICK_BESIDE if quick else NORMAL_BESIDE
                rows += background_rows(base, extent, rounds)
        if "changing" in chosen:
            with log.status("changing"):
                rows += changing_rows(base)
        if "latency" in chosen:
            with log.status("latency"):
                rows.append(latency_row(base, size.mib, rounds))
        if "movement" in chosen:
            with log.status("movement"):
                rows += movement_rows(base, size.mib, rounds)
        if "publishing" in chosen:
            with log.status("publishing"):
                rows += publishing_rows(base, size.mib, rounds)
        if "protection" in chosen:
            with log.status("protection"):
                rows += protection_rows(base, size.mib, rounds)
        if "checkpoint" in chosen:
            with log.status("checkpoint"):
                rows += checkpoint_rows(base, 2 * size.mib, rounds)
        if "grouped" in chosen:
            with log.status("grouped"):
                rows += grouped_rows(base, size.mib // 2, rounds)
        if "hosts" in chosen:
            with log.status("hosts"):
                rows += hosts_rows(base, *(QUICK_HOSTS if quick else NORMAL_HOSTS))
        if "data" in chosen and not quality:
            with log.status("data"):
                amount = QUICK_DATA if quick else NORMAL_DATA
                rows += data_rows(base, amount, rounds) + epoch_rows(base, amount, rounds)
        if "data" in chosen and peers:
            from peers import peer_rows  # needs torch

            with log.status("data, peers"):
                rows += peer_rows(base, QUICK_PICTURES if quick else NORMAL_PICTURES, rounds)
        if "data" in chosen and quality:
            from shuffle_quality import quality_rows  # needs torch

            with log.status("data, quality"):
                rows += quality_rows(*(QUICK_QUALITY if quick else NORMAL_QUALITY))
        if "env" in chosen:
            with log.status("env"):
                rows += env_rows(base, QUICK_ENV if quick else NORMAL_ENV, rounds, wheels)
        if "first-reads" in chosen:
            with log.status("first reads"):
                rows += first_read_rows(base, QUICK_FIRST if quick else NORMAL_FIRST, rounds)
        if "memory" in chosen:
            with log.status("memory"):
                amounts = (1_000_000, 20, 1_000_000) if long else (size.entries, 4, size.entries)
                rows += endurance_rows(base, *amounts)
        if "objects" in chosen:
            with log.status("objects"):
                rows += object_rows(base, *((64, 500) if quick else (128, 10_000)), rounds)
        if "operations" in chosen:
            with log.status("operations"):
                rows += operations_rows(base, size.files, rounds)
                rows.append(trash_row(base, size.files, rounds))
                rows += clones_rows(base, size.files, size.entries, rounds)
        if "outlive" in chosen:
            with log.status("outlive"):
                rows += outlive_rows(base, 5 if quick else 20, size, rounds)
        if "start" in chosen:
            with log.status("start"):
                rows += start_rows(base, QUICK_START if quick else NORMAL_START, rounds, wheels)
    show(rows, as_json)
    sys.exit(0 if all(row.passed for row in rows) else 1)


def _measure(systems: list[System], chosen: tuple[str, ...], size: Size, rounds: int) -> Rates:
    """The rates of each (system, work). Courses that hold no chosen work are left out."""
    courses = [course for course, held in COURSES.items() if set(held) & set(chosen)]
    rates: Rates = defaultdict(list)
    if not courses:
        return rates
    with ExitStack() as stack:
        for system in systems:
            stack.enter_context(system)
        for course in courses:
            for round_ in range(rounds):
                for system in systems:
                    with log.status(
                        f"{course.__name__}, round {round_ + 1} of {rounds}: {system.name}"
                    ):
                        for work, found in course(system, size, round_):
                            rates[system.name, work].append(found)
    return rates


def _row(work: Work, rates: Rates) -> Row:
    plain, nothing, aifs = (
        statistics.median(rates[system, work.name]) for system in ("plain", "nothing", "aifs")
    )
    targets, passed = [], True
    if work.of_nothing is not None:
        targets.append(f">= {work.of_nothing} of do-nothing")
        passed &= aifs / nothing >= work.of_nothing
    if work.of_plain is not None:
        targets.append(f"> {work.of_plain} of plain{f' ({work.peer})' if work.peer else ''}")
        passed &= aifs / plain > work.of_plain
    if work.of_work is not None:
        other, ratio = work.of_work
        targets.append(f">= {ratio} of {other}")
        passed &= aifs / statistics.median(rates["aifs", other]) >= ratio
    return Row(
        work.name,
        rate(plain, work.unit),
        nothing / plain,
        aifs / plain,
        aifs / nothing,
        rate(aifs, work.unit),
        ", ".join(targets),
        passed,
    )


if __name__ == "__main__":
    bench()
