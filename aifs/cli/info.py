"""``aifs info``: where the bytes of a file lie."""

import json
import os
import stat
from typing import Any

import click

from aifs.cli.arguments import PATH
from aifs.core.errors import MountError

INFO_XATTR = "user.aifs.info"
_TYPES = {
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


@click.command("info", epilog="\b\nExample:\n  aifs info /mnt/store/model.pt")
@click.argument("path", type=PATH)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def info_command(path: str, as_json: bool) -> None:
    """Show the inode of PATH, its layout, and where each part of it lies. A symlink is not followed."""
    from aifs.cli.output import print_facts, print_json, print_table
    from aifs.core.units import describe_size, format_size

    info = _read_info(path)
    if as_json:
        print_json(info)
        return
    parts, layout = info.pop("parts", []), info.pop("layout", None)
    if layout:
        servers = ":".join(map(str, layout["servers"]))
        info["layout"] = f"{layout['kind']}, unit {format_size(layout['unit'])}, servers {servers}"
    print_facts(info.items())
    if parts:
        print()
        rows = [(part["server"], describe_size(part["bytes"]), part["path"]) for part in parts]
        print_table(("server", "bytes", "path"), rows, right=("server", "bytes"))


def _read_info(path: str) -> dict[str, Any]:
    from aifs.cli.mounts import FSTYPE, all_mounts

    found = os.lstat(path)
    fstypes = {mount.fstype for mount in all_mounts() if mount.device == found.st_dev}
    if FSTYPE not in fstypes:
        raise MountError(f"{path}: does not lie in an AIFS mount")
    kind = _TYPES.get(stat.S_IFMT(found.st_mode))
    if kind:  # the kernel lets nobody ask user.* attributes of these
        return {"inode": found.st_ino, "type": kind, "size": found.st_size, "links": found.st_nlink}
    return json.loads(os.getxattr(path, INFO_XATTR, follow_symlinks=False))
