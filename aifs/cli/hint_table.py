"""``aifs hints``: what has been said of a file or directory by its extended attributes, and what
can be."""

import json
import os
from contextlib import suppress
from typing import Any

import click

from aifs.cli.arguments import PATH

_MEANINGS = {
    "layout": "how new bytes lie: kind=, unit=, count=, servers=, replicas=, ec=, compress=",
    "tier": "where new bytes go: burst, capacity, pinned, or default (burst, evicted at need)",
    "expected_size": "how large new files become: room is kept in the burst tier",
    "publish": "where bytes must be before a rename shows them: burst, capacity",
    "mirror": "1: another host keeps a copy of what is fsynced, until it is drained",
    "keep": "which checkpoints in it remain: last=3,every=1000,age=7d,bytes=2TiB",
    "shown": "when a publish or a rename has shown it as a whole: seconds since 1970",
    "age": "what becomes of files below that nobody uses for so long: 30d:cold,compress=zstd:3",
    "trash": "how long what is removed below is kept, to be restored: 7d, or off",
    "quota": "how much may lie below, and does (aifs quota): size=1TiB,files=1M",
    "pending": "a checkpoint that is being saved, by whom: ranks=8,step=100",
    "group": "files that are written together: name=step,ranks=8",
    "state": "where the bytes are: dirty, draining, clean, cached",
    "sharing": "bytes that nobody else has, and others; of a directory: aifs info --tree",
    "drain": "what is not on the data servers; set it to '' to drain that first",
    "start": "which start of a job is recorded in it, and how it goes: record=RUN, stop",
    "order": "epochs of the dataset in it that are read, and what is there ahead of the readers",
    "refused": "the last request here that you were refused, and why",
}
"""The hints that say something of a file or directory, and not of the mount. What is set once
(stage, evict, commit, remove, publish-as) has commands of its own."""

_WALKED = "sharing"
"""What takes a walk through all files below a directory, and is no hint."""


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
    values = {
        name: None if name == _WALKED and os.path.isdir(path) else _value(path, f"user.aifs.{name}")
        for name in _MEANINGS
    }
    if as_json:
        print_json({name: value for name, value in values.items() if value is not None})
        return
    rows = [(f"user.aifs.{name}", _short(values[name]), _MEANINGS[name]) for name in _MEANINGS]
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
