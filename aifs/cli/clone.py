"""``aifs clone`` and ``aifs snapshot``: files or trees a second time without copying bytes, and
read-only contents in ``.snapshots``."""

import os
from contextlib import suppress
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Report, Table, command, group
from aifs.cli.door import require_inside
from aifs.cli.output import print_error, when
from aifs.cli.trash import remove_tree
from aifs.core import ioctl
from aifs.core.errors import MountError

DIRECTORY = ".snapshots"


@command(
    "clone",
    short_help="Copy a file or a tree without its bytes.",
    examples="aifs clone /mnt/store/run/step-100 /mnt/store/run/step-100-edited\n"
    "aifs clone /mnt/store/data/c4.bin /mnt/store/data/c4-fixed.bin",
)
@click.argument("source", type=PATH)
@click.argument("new", type=PATH)
def clone_command(source: str, new: str) -> None:
    """Make NEW, which must not exist, a clone of the file or directory SOURCE in the same AIFS
    mount, with all that lies below.

    The bytes are those of SOURCE: none are copied until one of both is changed, and then those of
    that file alone. NEW appears when it is complete, in one step, and is durable then. Names, hard
    links, modes, ACLs, times and extended attributes are kept; owners, too, if root clones. Other
    users own their clones, and must be able to read all of SOURCE. Undrained files are drained
    first; a file in a directory that is open for writing is copied as it is now.
    """
    clone(source, new)


def clone(source: str, new: str, snapshot: bool = False) -> None:
    """Raises MountError, OSError."""
    status = require_inside(source, follow=False)
    parent, name = os.path.split(new.rstrip("/"))
    place = os.stat(parent or ".")
    if place.st_dev != status.st_dev:
        raise MountError(f"{new}: does not lie in the mount of {source}; cp copies it there")
    above, own_name = os.path.split(source.rstrip("/"))
    if own_name in ("", ".", "..") or os.path.ismount(source):
        above, own_name = source, "."
    wanted = {"name": own_name, "parent": place.st_ino, "clone": name, "snapshot": snapshot}
    try:
        ioctl.call_at(above, "clone", new, **wanted)
    except OSError as error:
        raise OSError(error.errno, error.strerror, new) from None


# --- snapshot -------------------------------------------------------------------------------------

_EXAMPLES = """
aifs snapshot make /mnt/store/run before-merge
aifs snapshot ls /mnt/store/run
aifs snapshot rm /mnt/store/run before-merge
aifs clone /mnt/store/run/.snapshots/before-merge /mnt/store/run-again
"""

_SNAPSHOTS = (Column("snapshot", "name"), Column("made", "made_s", when))


@group(
    "snapshot",
    short_help="Keep the contents of a directory, read-only.",
)
def snapshot_command() -> None:
    """Keep the contents of a directory DIR as DIR/.snapshots/NAME, which nobody can change.

    It appears when it is complete, and is durable then. As with aifs clone no bytes are copied.
    DIR/.snapshots is made if it is missing, as a directory like any other; clones and
    snapshots of DIR leave it out. `aifs clone` makes a tree that can be changed of a snapshot.
    """


@snapshot_command.command("make", examples=_EXAMPLES)
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("name")
def make_command(directory: str, name: str) -> None:
    """Make the snapshot NAME of the directory DIR."""
    if "/" in name or name in ("", ".", ".."):
        raise click.UsageError(f"{name!r} is not the name of a snapshot")
    require_inside(directory)
    place = os.path.join(directory, DIRECTORY)
    with suppress(FileExistsError):
        os.mkdir(place)
    clone(directory, os.path.join(place, name), snapshot=True)


@snapshot_command.command("ls", examples=_EXAMPLES)
@click.argument("directory", type=PATH, metavar="DIR")
def ls_command(directory: str) -> Report:
    """List the snapshots of the directory DIR, the oldest first, and when they were made. Other
    directories in DIR/.snapshots are left out."""
    found = _snapshots(directory)
    return Report(found, Table(_SNAPSHOTS, found))


def _snapshots(directory: str) -> list[dict[str, Any]]:
    """Raises MountError, OSError."""
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
    """Whether a directory is a snapshot; others can be made in .snapshots. Raises PermissionError
    unless the caller may read it."""
    return bool(door.read(path, "info", follow=False).get("snapshot"))


@snapshot_command.command("rm", examples=_EXAMPLES)
@click.argument("directory", type=PATH, metavar="DIR")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
def rm_command(directory: str, names: tuple[str, ...]) -> None:
    """Remove snapshots of the directory DIR, each in one step, and for good: they go to no trash.
    `aifs info` says how many bytes of one would come back."""
    place = os.path.join(directory, DIRECTORY)
    for name in names:
        path = os.path.join(place, name)
        require_inside(path, follow=False)
        with suppress(PermissionError):  # it may be removed all the same
            if not _is_snapshot(path):
                raise MountError(f"{path}: is no snapshot; aifs rm -r removes it")
        remove_tree(place, name)
