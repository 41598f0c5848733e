"""``aifs rm``: remove files, and whole trees at one stroke."""

import errno
import os
import stat
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH

if TYPE_CHECKING:
    from aifs.cli.mounts import Mount

EPILOG = """
\b
Examples:
  aifs rm -r /mnt/store/step-100
  aifs rm -r /mnt/store/runs/*

Space comes back in the background; `aifs status` shows how far that is.
"""


@click.command("rm", epilog=EPILOG, short_help="Remove files, and whole trees in one step.")
@click.option(
    "-r", "recursive", is_flag=True, help="Remove directories, too, with all that lies below them."
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
def rm_command(recursive: bool, paths: tuple[str, ...]) -> int:
    """Remove the files PATH, and with -r the directories PATH, which must lie in an AIFS mount.

    A directory takes the same few milliseconds however much lies below: its name is gone when the
    command returns, in one step, also after a crash. What programs have open goes on until they
    close it. Who owns a directory may remove it with what others own below. What cannot be removed
    is named, the rest is; the exit code is 1 then.
    """
    from aifs.cli.mounts import all_mounts
    from aifs.cli.output import describe_error, print_error
    from aifs.core.errors import MountError

    failed = False
    mounts = all_mounts()
    for path in paths:
        try:
            remove_path(path, recursive, mounts)
        except (MountError, OSError) as error:
            print_error(describe_error(error))
            failed = True
    return 1 if failed else 0


def remove_path(path: str, recursive: bool, mounts: "list[Mount]") -> None:
    from aifs.cli.mounts import require_inside
    from aifs.core.errors import MountError

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
    """By ioctl, which needs no right to change attributes of the parent; by extended attribute
    where there is none.
    """
    from aifs.core import ioctl

    try:
        fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            ioctl.call(fd, "remove", parent, name=name)
        finally:
            os.close(fd)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EACCES):
            raise
        hints.put(parent, hints.REMOVE, name)
        _look_up_anew(os.path.join(parent, name))


def _look_up_anew(path: str) -> None:
    """Have the kernel ask for the name, whatever it has cached: it held the directory's lock for
    setting the attribute.

    By a link that cannot be made, across filesystems, of which the kernel finds out when it knows
    about the name.
    """
    with suppress(OSError):
        os.link("/proc/self/exe", path, follow_symlinks=False)
