"""``aifs hints``: the extended attributes of a file or directory, and their meaning."""

import json
import os
from contextlib import suppress
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.command import PATH, Column, Report, Table, command
from aifs.cli.door import require_inside

_ELSEWHERE = ("info", "why", "hints", "places.N")
"""``aifs info`` and ``aifs why`` show them; all the others are in this table, or for the client."""


_HINTS = (Column("hint"), Column("value", show=lambda value: _short(value)), Column("meaning"))


@command(
    "hints",
    short_help="Show the attributes user.aifs.* of a file or directory.",
    examples="aifs hints /mnt/store/datasets\n"
    "setfattr -n user.aifs.tier -v capacity /mnt/store/datasets",
)
@click.argument("path", type=PATH)
def hints_command(path: str) -> Report:
    """Show the hints (extended attributes user.aifs.*) of PATH: their values, and those that can
    be set by setfattr(1). A directory's layout, tier, expected_size, publish and mirror hold for
    files that are made in it from then on. A hint without a value has not been set."""
    require_inside(path)
    found = {}
    for row in hints.read(path, hints.HINTS)["hints"]:
        name = row["name"].partition("[")[0]
        if row["get"] and row["where"] != "root" and name not in _ELSEWHERE:
            is_walk = row["is_costly"] and os.path.isdir(path)
            found[name] = None if is_walk else _value(path, f"user.aifs.{name}"), row["help"]
    rows = [
        {"hint": f"user.aifs.{name}", "value": value, "meaning": text}
        for name, (value, text) in found.items()
    ]
    told = {name: value for name, (value, _) in found.items() if value is not None}
    return Report(told, Table(_HINTS, rows))


def _value(path: str, name: str) -> Any:
    """None if there is none, or none for this user."""
    with suppress(OSError):
        text = os.fsdecode(os.getxattr(path, name)).strip()
        with suppress(ValueError):
            return json.loads(text) if text.startswith("{") else text
        return text
    return None


def _short(value: Any) -> str:
    """The part of JSON that is worth a line."""
    if not isinstance(value, dict):
        return value or ""
    for key in ("reason", "state"):
        if key in value:
            return str(value[key])
    return ", ".join(f"{value[key]} {key}" for key in ("files", "bytes") if key in value)
