"""``aifs trash``: what was removed and is kept, to have it back, or to be rid of it."""

import errno
import os
from collections.abc import Iterator
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH

_EMPTIED_AT_ONCE = 256


@click.group("trash", short_help="List, restore and empty what was removed and is kept.")
def trash_group() -> None:
    """Where a directory, or one above it, has a trash, names that are removed below can be restored
    for a time:

    \b
      setfattr -n user.aifs.trash -v 7d /mnt/store/run

    What you own, or have removed yourself, is yours here; root's is everything. When the store runs
    out of space, what would go first goes at once.
    """


@trash_group.command(
    "ls",
    epilog="\b\nExamples:\n  aifs trash ls /mnt/store\n  aifs trash ls --all --json /mnt/store/run",
)
@click.argument("path", type=PATH)
@click.option("--all", "is_all", is_flag=True, help="Also what lay in removed directories.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def ls_command(path: str, is_all: bool, as_json: bool) -> None:
    """List what of yours was removed at PATH, or below, and is kept; what goes first comes first.

    What was removed with its directory is counted with that. The id tells apart what had the same
    name.
    """
    from aifs.cli.output import describe_time, print_json, print_table
    from aifs.core.units import describe_size

    found = list(_entries(path))
    if not is_all:
        found = _tops(found)
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["id"],
            one["path"] or f"(gone)/{one['name']}",
            one["type"],
            "" if one["bytes"] is None else describe_size(one["bytes"]),
            _user(one["removed_by"]),
            describe_time(one["removed_s"]),
            describe_time(one["until_s"]),
        )
        for one in found
    ]
    columns = ("id", "path", "type", "size", "removed by", "removed", "kept until")
    print_table(columns, rows, right=("id", "size"))


@trash_group.command(
    "restore",
    epilog="\b\nExamples:\n  aifs trash restore /mnt/store/run/step-100\n"
    "  aifs trash restore /mnt/store/notes.txt --to /mnt/store/old\n"
    "  aifs trash restore --id 4711 /mnt/store",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--to", type=PATH, help="Where to put it: a directory, or a new name.")
@click.option("--id", "number", type=int, default=0, help="Which one; PATH is any of the mount.")
def restore_command(paths: tuple[str, ...], to: str | None, number: int) -> int:
    """Restore what was last removed under the names PATH; it is durable when the command returns.

    A directory comes back with all that was in it: also with what `rm -r` removed from it first,
    that is in the hour before. Without --to it goes to where it was, or, if that directory is gone,
    to the nearest one above that is there. Nothing is ever replaced. What cannot be restored is
    named, the rest is; the exit code is 1 then.
    """
    from aifs.cli.output import describe_error, print_error
    from aifs.core.errors import MountError

    failed = False
    for path in paths:
        try:
            print(f"restored {_restore(path, to, number)}")
        except (MountError, OSError) as error:
            print_error(describe_error(error))
            failed = True
    return 1 if failed else 0


@trash_group.command(
    "empty",
    epilog="\b\nExamples:\n  aifs trash empty /mnt/store/run/step-100\n"
    "  aifs trash empty /mnt/store",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--id", "number", type=int, default=0, help="Which one; PATH is any of the mount.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def empty_command(paths: tuple[str, ...], number: int, as_json: bool) -> None:
    """Have what of yours was removed at PATH, or below, go for good; space comes back in the
    background."""
    from aifs.cli.output import print_json

    emptied = 0
    for path in paths:
        found = [number] if number else [one["id"] for one in _entries(path)]
        place = _existing(path)[0]
        for first in range(0, len(found), _EMPTIED_AT_ONCE):
            _call("trash.empty", place, ids=found[first : first + _EMPTIED_AT_ONCE])
        emptied += len(found)
    if as_json:
        print_json({"emptied": emptied})
    else:
        print(f"{emptied} emptied")


def _restore(path: str, to: str | None, number: int) -> str:
    """Where it is now."""
    from aifs.core.errors import MountError

    place, rest = _existing(path)
    if not rest and not number:
        raise OSError(errno.EINVAL, "names a mount, not what was in it", path)
    parent, name = 0, ""
    if to is not None:
        directory, name = (to, "") if os.path.isdir(to) else os.path.split(to.rstrip("/"))
        found = os.stat(directory or ".")
        if found.st_dev != os.stat(place).st_dev:
            raise MountError(f"{to}: does not lie in the mount of {path}; mv copies it there")
        parent = found.st_ino
    wanted = {"id": number, "parent": parent, "name": name, "path": "" if number else rest}
    restored = _call("restore", place, path, **wanted)
    ino, home = restored["id"], restored["parent"]
    if to is not None:
        return to if name else os.path.join(to, _name_of(to, ino))
    above = os.path.dirname(path.rstrip("/")) or "."
    while not os.path.isdir(above) or os.stat(above).st_ino != home:
        if os.path.ismount(above) or above in ("", "."):
            return f"{path} (inode {ino})"
        above = os.path.dirname(above)
    return os.path.join(above, os.path.basename(path.rstrip("/")))


def _name_of(directory: str, ino: int) -> str:
    with os.scandir(directory) as entries:
        return next((entry.name for entry in entries if entry.inode() == ino), f"inode {ino}")


def _call(name: str, place: str, shown: str = "", /, **fields: Any) -> dict[str, Any]:
    """The answer of a call on the directory *place*. Raises OSError about *shown*, with the reason
    of the mount.
    """
    from aifs.core import ioctl
    from aifs.core.errors import MountError

    path = shown or place
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return ioctl.call(fd, name, path, **fields)
    except OSError as error:
        if error.errno == errno.ENOTTY:
            raise MountError(f"{path}: the mount is without its bridge (aifs doctor)") from None
        if error.errno == errno.EEXIST:
            raise MountError(f"{path}: the name is taken; say where to put it (--to)") from None
        if error.errno == errno.EXDEV:
            raise MountError(
                f"{path}: {error.strerror}; restore it without --to, then mv copies it"
            ) from None
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(fd)


def _existing(path: str) -> tuple[str, str]:
    """The deepest directory above a path that is there, and the rest of the path. Raises
    MountError if it does not lie in an AIFS."""
    from aifs.cli.mounts import require_inside

    path = os.path.abspath(path)
    place, rest = os.path.split(path)
    if os.path.ismount(path):
        place, rest = path, ""
    while not os.path.isdir(place):
        place, name = os.path.split(place)
        rest = os.path.join(name, rest)
    require_inside(path if os.path.lexists(path) else place, follow=False)
    return os.path.realpath(place), rest


def _entries(path: str) -> Iterator[dict[str, Any]]:
    """What was removed at a path, or below; ``path`` of each is as one would say it here."""
    from aifs.core.mountinfo import mount_of

    place, rest = _existing(path)
    mount = mount_of(place)
    assert mount is not None
    top = os.path.join(place, rest).rstrip("/")
    cursor = ""
    while cursor is not None:
        page = hints.read(mount.mountpoint, f"{hints.TRASHED}.{cursor}".rstrip("."))
        for one in page["entries"]:
            if one["path"] is not None:
                one["path"] = mount.mountpoint.rstrip("/") + one["path"]
            if top == mount.mountpoint or f"{one['path']}/".startswith(f"{top}/"):
                yield one
        cursor = page["next"]


def _tops(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that lay in no directory that was removed itself, with what lay in them."""
    by_path = {one["path"]: one for one in found if one["path"] and one["type"] == "directory"}
    tops = []
    for one in found:
        top, above = one, os.path.dirname(one["path"] or "")
        while above not in ("", "/"):
            other = by_path.get(above)
            if other is not None and other["removed_s"] >= one["removed_s"]:
                top = other
            above = os.path.dirname(above)
        if top is one:
            tops.append(one)
        elif one["bytes"] and top["bytes"] is not None:
            top["bytes"] += one["bytes"]
    return tops


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
