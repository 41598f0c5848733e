"""``aifs rm`` and ``aifs trash``: remove files, and trees at one stroke; restore or erase removed
ones."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click

from aifs.cli import door
from aifs.cli.command import PATH, Column, Report, Table, command, group, number
from aifs.cli.door import require_inside
from aifs.cli.output import describe_error, print_error, size, when
from aifs.core import ioctl
from aifs.core.errors import MountError
from aifs.core.mountinfo import Mount, all_mounts, mount_of

_EMPTIED_AT_ONCE = 256


# --- rm -------------------------------------------------------------------------------------------


@command(
    "rm",
    short_help="Remove files, and whole trees in one step.",
    examples="aifs rm -r /mnt/store/step-100\naifs rm -r /mnt/store/runs/*",
    epilog="Space comes back in the background; `aifs status` shows how far that is.",
)
@click.option(
    "-r", "recursive", is_flag=True, help="Remove directories, too, with all that lies below them."
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
def rm_command(recursive: bool, paths: tuple[str, ...]) -> Report:
    """Remove the files PATH, and with -r the directories PATH, which must lie in an AIFS mount.

    A directory takes the same few milliseconds however much lies below: its name is gone when the
    command returns, in one step, also after a crash. Files that programs have open go on until they
    close them. The owner of a directory may remove it with files of others below. Paths that cannot
    be removed are named, the others are removed; the exit code is 1 then.
    """
    removed = []
    mounts = all_mounts()
    for path in paths:
        try:
            remove_path(path, recursive, mounts)
            removed.append(path)
        except (MountError, OSError) as error:
            print_error(describe_error(error))
    return Report({"removed": removed}, code=0 if len(removed) == len(paths) else 1)


def remove_path(path: str, recursive: bool, mounts: list[Mount]) -> None:
    status = require_inside(path, follow=False)
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(path)
        return
    if not recursive:
        raise MountError(f"{path}: is a directory; -r removes it with all that lies below it")
    parent, name = os.path.split(path.rstrip("/"))
    if name in ("", ".", ".."):
        raise MountError(f"{path}: name the directory by its parent and its name")
    full = os.path.join(os.path.realpath(parent or "."), name)
    for mount in mounts:
        if mount.mountpoint == full or mount.mountpoint.startswith(f"{full}/"):
            what = (
                "is a mount; name what lies in it"
                if mount.mountpoint == full
                else f"{mount.mountpoint} is a mount; unmount it first"
            )
            raise MountError(f"{path}: {what}")
    try:
        remove_tree(parent or ".", name)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None


def remove_tree(parent: str, name: str) -> None:
    """By ioctl, which needs no right to change the parent's attributes, else by extended
    attribute."""
    try:
        ioctl.call_at(parent, "remove", name=name)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EACCES):
            raise
        door.put(parent, "remove", name)
        _look_up_anew(os.path.join(parent, name))


def _look_up_anew(path: str) -> None:
    """Have the kernel look the name up in spite of its cache: it held the directory's lock for
    setting the attribute. Makes an impossible link, across filesystems, refused only after the
    lookup."""
    with suppress(OSError):
        os.link("/proc/self/exe", path, follow_symlinks=False)


# --- trash ----------------------------------------------------------------------------------------


@group("trash", short_help="List, restore and erase removed files that are kept.")
def trash_command() -> None:
    """Where a directory, or one above it, has a trash, names that are removed below can be restored
    for a time:

    \b
      setfattr -n user.aifs.trash -v 7d /mnt/store/run

    Entries that you own, or have removed yourself, are yours here; all are root's. When the store
    runs out of space, the entries that would go first go at once.
    """


_ENTRIES = (
    Column("id", show=number),
    Column("path", lambda one: one["path"] or f"(gone)/{one['name']}"),
    Column("type"),
    Column("size", "bytes", size),
    Column("removed by", "removed_by", lambda uid: _user(uid)),
    Column("removed", "removed_s", when),
    Column("kept until", "until_s", when),
)


@trash_command.command(
    "ls",
    examples="aifs trash ls /mnt/store\naifs trash ls --all --json /mnt/store/run",
    sizes=True,
)
@click.argument("path", type=PATH)
@click.option("--all", "is_all", is_flag=True, help="Also entries that lay in removed directories.")
def ls_command(path: str, is_all: bool) -> Report:
    """List your entries that were removed at PATH, or below; those that go first come first.

    An entry that was removed with its directory is counted with that. The id tells apart entries
    that had the same name.
    """
    found = list(_entries(path))
    if not is_all:
        found = _tops(found)
    return Report(found, Table(_ENTRIES, found))


@trash_command.command(
    "restore",
    examples="aifs trash restore /mnt/store/run/step-100\n"
    "aifs trash restore /mnt/store/notes.txt --to /mnt/store/old\n"
    "aifs trash restore --id 4711 /mnt/store",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--to", type=PATH, help="Where to put it: a directory, or a new name.")
@click.option("--id", "number", type=int, default=0, help="Which one; PATH is any of the mount.")
def restore_command(paths: tuple[str, ...], to: str | None, number: int) -> Report:
    """Restore the entries that were last removed under the names PATH; they are durable when the
    command returns.

    A directory comes back with all that was in it: also with the entries that `rm -r` removed from
    it first, that is in the hour before. Without --to it goes to where it was, or, if that
    directory is gone, to the nearest one above that is there. Nothing is ever replaced. Entries
    that cannot be restored are named, the others are restored; the exit code is 1 then.
    """
    restored = []
    for path in paths:
        try:
            restored.append(_restore(path, to, number))
        except (MountError, OSError) as error:
            print_error(describe_error(error))
    lines = [f"restored {path}" for path in restored]
    return Report({"restored": restored}, *lines, code=0 if len(restored) == len(paths) else 1)


@trash_command.command(
    "rm",
    examples="aifs trash rm /mnt/store/run/step-100\naifs trash rm /mnt/store",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option("--id", "number", type=int, default=0, help="Which one; PATH is any of the mount.")
def rm_trash_command(paths: tuple[str, ...], number: int) -> Report:
    """Have your entries that were removed at PATH, or below, go for good; space comes back in the
    background."""
    emptied = 0
    for path in paths:
        found = [number] if number else [one["id"] for one in _entries(path)]
        place = _existing(path)[0]
        for first in range(0, len(found), _EMPTIED_AT_ONCE):
            _call("trash.empty", place, ids=found[first : first + _EMPTIED_AT_ONCE])
        emptied += len(found)
    return Report({"emptied": emptied}, f"{emptied} emptied")


def _restore(path: str, to: str | None, number: int) -> str:
    """Its new place."""
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
    """The answer of a call on the directory *place*. Raises OSError about *shown*, with the mount's
    reason."""
    path = shown or place
    try:
        return ioctl.call_at(place, name, path, **fields)
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


def _existing(path: str) -> tuple[str, str]:
    """The deepest existing directory above a path, and the rest. Raises MountError outside of an
    AIFS."""
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
    """Entries removed at a path, or below; ``path`` is its path here."""
    place, rest = _existing(path)
    mount = mount_of(place)
    assert mount is not None
    top = os.path.join(place, rest).rstrip("/")
    cursor = ""
    while cursor is not None:
        page = door.read(mount.mountpoint, f"trashed.{cursor}".rstrip("."))
        for one in page["entries"]:
            if one["path"] is not None:
                one["path"] = mount.mountpoint.rstrip("/") + one["path"]
            if top == mount.mountpoint or f"{one['path']}/".startswith(f"{top}/"):
                yield one
        cursor = page["next"]


def _tops(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Entries of no removed directory, with those in them."""
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
