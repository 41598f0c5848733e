"""``aifs hints``: what has been said of a file or directory by its extended attributes, and what
can be."""

import json
import os
from contextlib import suppress
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH

_ELSEWHERE = ("info", "why", "hints", "places.N")
"""``aifs info`` and ``aifs why`` show them; all the others are in this table, or for the client."""


@click.command(
    "hints",
    short_help="Show what the attributes user.aifs.* of a file or directory say.",
    epilog="\b\nExample:\n  aifs hints /mnt/store/datasets\n"
    "  setfattr -n user.aifs.tier -v capacity /mnt/store/datasets",
)
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def hints_command(path: str, as_json: bool) -> None:
    """Show the hints (extended attributes user.aifs.*) of PATH: what each says now, and what may be
    set by setfattr(1). A directory's layout, tier, expected_size, publish and mirror hold for what
    is made in it from then on. A hint without a value has not been set."""
    from aifs.cli.mounts import require_inside
    from aifs.cli.output import print_json, print_table

    require_inside(path)
    found = {}
    for row in hints.read(path, hints.HINTS)["hints"]:
        name = row["name"].partition("[")[0]
        if row["get"] and row["where"] != "root" and name not in _ELSEWHERE:
            is_walk = row["is_costly"] and os.path.isdir(path)
            found[name] = None if is_walk else _value(path, f"user.aifs.{name}"), row["help"]
    if as_json:
        print_json({name: value for name, (value, _) in found.items() if value is not None})
        return
    rows = [(f"user.aifs.{name}", _short(value), help) for name, (value, help) in found.items()]
    print_table(("hint", "value", "meaning"), rows)


def _value(path: str, name: str) -> Any:
    """None if there is none, or none for this user."""
    with suppress(OSError):
        text = os.fsdecode(os.getxattr(path, name)).strip()
        with suppress(ValueError):
            return json.loads(text) if text.startswith("{") else text
        return text
    return None


def _short(value: Any) -> str:
    """Of JSON, what is worth a line."""
    if not isinstance(value, dict):
        return value or ""
    for key in ("reason", "state"):
        if key in value:
            return str(value[key])
    return ", ".join(f"{value[key]} {key}" for key in ("files", "bytes") if key in value)
