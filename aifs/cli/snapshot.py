"""``aifs snapshot``: what a directory holds now, kept read-only in its ``.snapshots``."""

import os
from contextlib import suppress
from datetime import datetime
from typing import Any

import click

from aifs.cli.arguments import PATH
from aifs.cli.output import print_json, print_table

DIRECTORY = ".snapshots"

EPILOG = """
\b
Examples:
  aifs snapshot /mnt/store/run before-merge
  aifs snapshot ls /mnt/store/run
  aifs snapshot rm /mnt/store/run before-merge
  aifs clone /mnt/store/run/.snapshots/before-merge /mnt/store/run-again
"""


class _MakesByDefault(click.Group):
    """What follows the command is a directory, unless it is the name of a subcommand."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, args if args[0] in self.commands else ["make", *args])


@click.group(
    "snapshot",
    cls=_MakesByDefault,
    epilog=EPILOG,
    short_help="Keep what a directory holds now, read-only.",
    subcommand_metavar="DIR NAME | COMMAND [ARGS]...",
)
def snapshot_group() -> None:
    """Keep what the directory DIR holds now as DIR/.snapshots/NAME, which nobody can change.

    It appears when it is complete, and is durable then. As with aifs clone no bytes are copied.
    DIR/.snapshots is made if it is missing, as a directory like any other; clones and
    snapshots of DIR leave it out. `aifs clone` makes a tree that can be changed of a snapshot.
    """


@snapshot_group.command("make", epilog=EPILOG)
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("name")
def make_command(directory: str, name: str) -> None:
    """Make the snapshot NAME of the directory DIR."""
    from aifs.cli.clone import clone
    from aifs.cli.mounts import require_inside

    if "/" in name or name in ("", ".", ".."):
        raise click.UsageError(f"{name!r} is not the name of a snapshot")
    require_inside(directory)
    place = os.path.join(directory, DIRECTORY)
    with suppress(FileExistsError):
        os.mkdir(place)
    clone(directory, os.path.join(place, name), snapshot=True)


@snapshot_group.command("ls", epilog=EPILOG)
@click.argument("directory", type=PATH, metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def ls_command(directory: str, as_json: bool) -> None:
    """List the snapshots of the directory DIR, the oldest first, and when they were made. Other
    directories in DIR/.snapshots are left out."""
    found = _snapshots(directory)
    if as_json:
        print_json(found)
    else:
        made = [datetime.fromtimestamp(each["made_s"]).strftime("%Y-%m-%d %H:%M") for each in found]
        names = [each["name"] for each in found]
        print_table(["snapshot", "made"], list(map(list, zip(names, made, strict=True))))


def _snapshots(directory: str) -> list[dict[str, Any]]:
    """Raises MountError, OSError."""
    from aifs.cli.mounts import require_inside
    from aifs.cli.output import print_error

    require_inside(directory)
    found = []
    try:
        with os.scandir(os.path.join(directory, DIRECTORY)) as entries:
            for entry in entries:
                if not entry.is_dir(follow_symlinks=False):
                    continue
                try:
                    if _is_snapshot(entry.path):
                        made_s = entry.stat(follow_symlinks=False).st_ctime
                        found.append({"name": entry.name, "made_s": made_s})
                except PermissionError:
                    print_error(f"{entry.path}: left out, because you may not read it")
    except FileNotFoundError:
        return []
    return sorted(found, key=lambda each: each["made_s"])


def _is_snapshot(path: str) -> bool:
    """Whether a directory is a snapshot: in .snapshots anybody who may write there can make other
    ones. Raises PermissionError unless the caller may read it."""
    from aifs.cli import hints

    return bool(hints.read(path, hints.INFO, follow=False).get("snapshot"))


@snapshot_group.command("rm", epilog=EPILOG)
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm_command(directory: str, names: tuple[str, ...]) -> None:
    """Remove snapshots of the directory DIR, each in one step, and for good: they go to no trash.
    `aifs info` says how many bytes of one would come back."""
    from aifs.cli.mounts import require_inside
    from aifs.cli.rm import remove_tree
    from aifs.core.errors import MountError

    place = os.path.join(directory, DIRECTORY)
    for name in names:
        path = os.path.join(place, name)
        require_inside(path, follow=False)
        with suppress(PermissionError):  # who may remove it need not be allowed to read it
            if not _is_snapshot(path):
                raise MountError(f"{path}: is no snapshot; aifs rm -r removes it")
        remove_tree(place, name)
