"""``aifs hint``: the extended attributes of a file or directory, and their meaning."""

import json
import os
from contextlib import suppress
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Report, Table, group
from aifs.cli.door import require_inside

_ELSEWHERE = ("info", "why", "hints", "places.N")
"""``aifs info`` and ``aifs why`` show them; all the others are in this table, or for the client."""


_HINTS = (Column("hint"), Column("value", show=lambda value: _short(value)), Column("meaning"))


@group("hint", short_help="Show and set the attributes user.aifs.* of files and directories.")
def hint_command() -> None:
    """Show and set hints: the extended attributes user.aifs.* of files and directories. getfattr(1)
    and setfattr(1) do the same."""


@hint_command.command(
    "ls",
    short_help="List hints, their values, and their meaning.",
    examples="aifs hint ls /mnt/store/datasets",
)
@click.argument("path", type=PATH)
def ls_command(path: str) -> Report:
    """List the hints of PATH: their values, and those that can be set. A directory's layout, tier,
    expected_size, publish and mirror hold for files that are made in it from then on. A hint
    without a value has not been set."""
    require_inside(path)
    found = {}
    for row in door.read(path, "hints")["hints"]:
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


@hint_command.command(
    "show",
    examples="aifs hint show /mnt/store/model.pt state",
)
@click.argument("path", type=PATH)
@click.argument("key")
def show_command(path: str, key: str) -> Report:
    """Print the value of the hint KEY of PATH."""
    require_inside(path)
    value = _parsed(os.getxattr(path, door.PREFIX + _stem_of(key)))
    return Report(value, value if isinstance(value, str) else json.dumps(value, indent=2))


@hint_command.command(
    "set",
    examples="aifs hint set /mnt/store/datasets tier=capacity\n"
    "aifs hint set /mnt/store/run trash=7d keep=last=3",
)
@click.argument("path", type=PATH)
@click.argument("settings", nargs=-1, required=True, metavar="KEY=VALUE...")
def set_command(path: str, settings: tuple[str, ...]) -> None:
    """Set hints of PATH, in this order."""
    require_inside(path)
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise click.UsageError(f"{setting} is not KEY=VALUE")
        door.put(path, _stem_of(key), value)


@hint_command.command(
    "rm", short_help="Take hints back.", examples="aifs hint rm /mnt/store/datasets tier"
)
@click.argument("path", type=PATH)
@click.argument("keys", nargs=-1, required=True, metavar="KEY...")
def rm_command(path: str, keys: tuple[str, ...]) -> None:
    """Take the hints KEY of PATH back."""
    require_inside(path)
    for key in keys:
        door.remove(path, _stem_of(key))


def _stem_of(key: str) -> str:
    """The name without user.aifs., which may be given."""
    return key.removeprefix(door.PREFIX)


def _parsed(value: bytes) -> Any:
    """Most are text, those of the state are JSON."""
    text = os.fsdecode(value).strip()
    with suppress(ValueError):
        return json.loads(text) if text.startswith("{") else text
    return text


def _value(path: str, name: str) -> Any:
    """None if there is none, or none for this user."""
    with suppress(OSError):
        return _parsed(os.getxattr(path, name))
    return None


def _short(value: Any) -> str:
    """The part of JSON that is worth a line."""
    if not isinstance(value, dict):
        return value or ""
    for key in ("reason", "state"):
        if key in value:
            return str(value[key])
    return ", ".join(f"{value[key]} {key}" for key in ("files", "bytes") if key in value)
