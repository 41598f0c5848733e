"""``aifs group``: grouped reads and writes. ``show`` shows a group of a mount."""

import errno
from typing import Any

import click

from aifs.cli.arguments import PATH
from aifs.cli.output import count, print_facts, print_json, print_table
from aifs.core.units import describe_size


@click.group("group", short_help="Grouped writes: show one.")
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


def _host(told: dict[str, Any]) -> str:
    has = [f"ranks {', '.join(map(str, told['ranks']))}"] if told["ranks"] else []
    has += ["files"] if told["has_files"] else []
    has += ["sees to it"] if told["sees_to_it"] else []
    return f"{told['name']} ({'; '.join(has)})" if has else told["name"]


def _told(told: dict[str, Any]) -> list[tuple[str, object]]:
    facts: list[tuple[str, object]] = [
        ("group", f"{told['name']}, {count(told['ranks'], 'rank')}, committed by {told['commit']}"),
        ("state", told["state"] + (f": {told['error']}" if told["error"] else "")),
    ]
    if told["hosts"]:
        facts.append(("hosts", ", ".join(map(_host, told["hosts"]))))
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
