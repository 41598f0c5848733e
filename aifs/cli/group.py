"""``aifs group``: grouped reads and writes. ``plan`` explains the plan that a pattern gets,
``show`` a group of a mount.
"""

import errno
import os
from typing import IO, TYPE_CHECKING, Any

import click

from aifs.cli.arguments import PATH
from aifs.cli.output import count, print_facts, print_json, print_table
from aifs.core.units import describe_size

if TYPE_CHECKING:
    from rich.console import RenderableType

    from aifs.group.plan import Load, Plan

_LINKS_SHOWN = 16
_BAR_WIDTH = 40
_PICTURE_WIDTH = 110


@click.group("group", short_help="Grouped writes: show one, or plan one.")
def group_group() -> None:
    """Grouped I/O: what many ranks write or read together is planned as one."""


SHOW_EPILOG = """
\b
Examples:
  aifs group show /mnt/store/step-100
  aifs group show /mnt/store/step-100 --json
"""


@group_group.command("show", epilog=SHOW_EPILOG)
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def show_command(path: str, as_json: bool) -> None:
    """Show the group that PATH belongs to: who is missing, what is stored once, how long it took.

    PATH is a directory that has a group, or had one, or anything below it.
    """
    from aifs.cli import hints
    from aifs.cli.mounts import require_inside
    from aifs.core.errors import UserError

    require_inside(path)
    try:
        told = hints.read(path, hints.GROUP)
    except OSError as error:
        if error.errno != errno.ENODATA:
            raise
        raise UserError(
            f"{path} has no group, and lies below none; setfattr -n user.aifs.group begins one"
        ) from None
    if as_json:
        print_json(told)
        return
    print_facts(_told(told))
    if told["files"]:
        print()
        rows = [
            (file["name"], describe_size(file["bytes"]), file["state"]) for file in told["files"]
        ]
        print_table(("file", "bytes", "state"), rows, ("bytes",))
        if told["file_count"] > len(rows):
            print(f"and {count(told['file_count'] - len(rows), 'file')} more")


def _told(told: dict[str, Any]) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("group", f"{told['name']}, {count(told['ranks'], 'rank')}, committed by {told['commit']}"),
        ("state", told["state"] + (f": {told['error']}" if told["error"] else "")),
    ]
    if told["missing"]:
        facts.append(("missing", "ranks " + ", ".join(map(str, told["missing"]))))
    elif told["missing_files"]:
        facts.append(("missing", count(told["missing_files"], "file")))
    shares = [
        ("distinct", "distinct_bytes"),
        ("duplicates", "duplicate_bytes"),
        ("zeros", "zero_bytes"),
        ("found", "found_bytes"),
    ]
    facts.append(("bytes", describe_size(told["bytes"])))
    facts += [(name, describe_size(told[key])) for name, key in shares]
    begun, times = told["times"]["open"], told["times"]
    facts += [
        (name, f"{times[name] - begun:.3f} s after the beginning")
        for name in ("committed", "buffered", "durable")
        if times[name]
    ]
    if told["publish"]:
        facts.append(
            (
                "publish",
                (
                    f"{told['publish']}: "
                    f"{'done' if told['published'] else told['publish_error'] or 'not yet'}"
                ),
            )
        )
    if told["drain_error"]:
        facts.append(("waits", told["drain_error"]))
    return facts


EPILOG = """
\b
Examples:
  aifs group plan /etc/aifs/group-64-ranks.yaml
  aifs group plan pattern.yaml --svg plan.svg
  aifs group plan pattern.yaml --solver lp --json
The directory config/ of the source code has patterns: group-*.yaml.
"""


@group_group.command("plan", epilog=EPILOG)
@click.argument("file", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
@click.option(
    "--svg",
    "picture",
    type=click.File("w", encoding="utf-8", lazy=True),
    metavar="OUT",
    help="Also draw the loads, into the file OUT (-: stdout).",
)
@click.option(
    "--solver",
    type=click.Choice(["fast", "lp"]),
    default="fast",
    show_default=True,
    help="lp: linear programming, the slower reference (needs scipy).",
)
def plan_command(file: str, as_json: bool, picture: IO[str] | None, solver: str) -> None:
    """Plan the grouped write of the pattern in FILE and explain the plan.

    It shows how many bytes each source sends, each destination takes and each link carries, what is
    busy longest, and the time that no plan could beat.
    """
    from aifs.group import pattern_file, planner

    plan = planner.plan(pattern_file.read(file), solver)
    if as_json:
        print_json(_described(plan))
    else:
        print_facts(_facts(plan))
        if plan.shares:
            print()
            rows = [
                (
                    load.role,
                    load.name,
                    describe_size(load.bytes),
                    _speed(load),
                    f"{load.time_s:.4g} s",
                    _bar(load, plan),
                    "bottleneck" if load == plan.bottleneck else "",
                )
                for load in _shown(plan)
            ]
            print_table(
                ("role", "name", "bytes", "bandwidth", "busy", "", ""),
                rows,
                ("bytes", "bandwidth", "busy"),
            )
            _tell_hidden(plan)
    if picture is not None:
        picture.write(_drawn(plan, os.path.basename(file)))


def _facts(plan: "Plan") -> list[tuple[str, object]]:
    pattern = plan.pattern
    facts: list[tuple[str, object]] = [
        ("chunks", sum(chunks.count for chunks in pattern.classes)),
        ("classes", len(pattern.classes)),
        (
            "bytes",
            f"{describe_size(pattern.bytes)}, to {count(pattern.replicas, 'destination')} each",
        ),
        ("time", f"{plan.time_s:.4g} s"),
        ("lower bound", f"{plan.lower_bound_s:.4g} s; the plan takes {plan.gap:.2%} longer"),
    ]
    if plan.shares:
        facts += [
            ("bottleneck", f"{plan.bottleneck.role} {plan.bottleneck.name}"),
            (
                "balance",
                (
                    f"sources {plan.balance('source'):.0%}, destinations "
                    f"{plan.balance('destination'):.0%}"
                ),
            ),
        ]
    return facts


def _shown(plan: "Plan") -> list["Load"]:
    """Sources, destinations, and the links that are busiest, or carry most where none is
    limited.
    """
    links = sorted(
        (load for load in plan.loads if load.role == "link"),
        key=lambda load: (-load.time_s, -load.bytes),
    )
    return [load for load in plan.loads if load.role != "link"] + links[:_LINKS_SHOWN]


def _tell_hidden(plan: "Plan") -> None:
    hidden = len(plan.loads) - len(_shown(plan))
    if hidden:
        print(f"and {count(hidden, 'link')} that are less busy (--json shows all)")


def _speed(load: "Load") -> str:
    return "" if load.bandwidth is None else f"{describe_size(load.bandwidth)}/s"


def _bar(load: "Load", plan: "Plan") -> str:
    return "█" * round(_BAR_WIDTH * load.time_s / plan.time_s)


def _described(plan: "Plan") -> dict[str, Any]:
    pattern = plan.pattern
    return {
        "solver": plan.solver,
        "bytes": pattern.bytes,
        "replicas": pattern.replicas,
        "time_s": plan.time_s,
        "lower_bound_s": plan.lower_bound_s,
        "bottleneck": plan.bottleneck._asdict(),
        "balance": {role: plan.balance(role) for role in ("source", "destination")},
        "loads": [load._asdict() for load in plan.loads],
        "shares": [
            {
                "class": share.kind,
                "source": pattern.sources[share.source].name,
                "destination": pattern.destinations[share.destination].name,
                "chunks": share.count,
                "bytes": share.count * pattern.classes[share.kind].size,
            }
            for share in plan.shares
        ],
    }


def _drawn(plan: "Plan", title: str) -> str:
    """The picture, as SVG that refers to nothing outside itself: fonts are the reader's."""
    import io
    import re

    from rich.console import Console

    console = Console(file=io.StringIO(), record=True, width=_PICTURE_WIDTH)
    for name, value in _facts(plan):
        console.print(f"{name:<12} {value}", highlight=False, markup=False)
    console.print(_chart(plan))
    svg = console.export_svg(title=f"aifs group plan {title}")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)


def _chart(plan: "Plan") -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("role", "name", "bytes", "bandwidth", "busy"):
        table.add_column(
            column, justify="left" if column in ("role", "name") else "right", no_wrap=True
        )
    table.add_column("of the time that the plan takes", no_wrap=True)
    for load in _shown(plan):
        worst = load == plan.bottleneck
        bar = Text(_bar(load, plan), style="red" if worst else "cyan")
        table.add_row(
            load.role,
            Text(load.name),
            describe_size(load.bytes),
            _speed(load),
            f"{load.time_s:.4g} s",
            bar.append(" bottleneck" if worst else ""),
        )
    return table
