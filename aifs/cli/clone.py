"""``aifs clone``: make a file or a tree a second time, without copying its bytes."""

import click

from aifs.cli.arguments import PATH

EPILOG = """
\b
Examples:
  aifs clone /mnt/store/run/step-100 /mnt/store/run/step-100-edited
  aifs clone /mnt/store/data/c4.bin /mnt/store/data/c4-fixed.bin
"""


@click.command("clone", epilog=EPILOG, short_help="Copy a file or a tree without its bytes.")
@click.argument("source", type=PATH)
@click.argument("new", type=PATH)
def clone_command(source: str, new: str) -> None:
    """Make NEW, which must not exist, a clone of the file or directory SOURCE in the same AIFS
    mount, with all that lies below.

    The bytes are those of SOURCE: none are copied until one of both is changed, and then those of
    that file alone. NEW appears when it is complete, in one step, and is durable then. Names, hard
    links, modes, ACLs, times and extended attributes are kept; owners, too, if root clones. Others
    own what they clone, and must be able to read all of it. What is not drained yet is drained
    first; a file in a directory that is open for writing is copied as it is now.
    """
    clone(source, new)


def clone(source: str, new: str, snapshot: bool = False) -> None:
    """Raises MountError, OSError."""
    import os

    from aifs.cli.mounts import require_inside
    from aifs.core import ioctl
    from aifs.core.errors import MountError

    status = require_inside(source, follow=False)
    parent, name = os.path.split(new.rstrip("/"))
    place = os.stat(parent or ".")
    if place.st_dev != status.st_dev:
        raise MountError(f"{new}: does not lie in the mount of {source}; cp copies it there")
    above, own_name = os.path.split(source.rstrip("/"))
    if own_name in ("", ".", "..") or os.path.ismount(source):
        above, own_name = source, "."
    wanted = {"name": own_name, "parent": place.st_ino, "clone": name, "snapshot": snapshot}
    fd = os.open(above or ".", os.O_RDONLY | os.O_DIRECTORY)
    try:
        ioctl.call(fd, "clone", new, **wanted)
    except OSError as error:
        raise OSError(error.errno, error.strerror, new) from None
    finally:
        os.close(fd)
