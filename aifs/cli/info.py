"""``aifs info``: where the bytes of a file lie, and who else has them."""

import stat
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH

_TYPES = {
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "character device",
    stat.S_IFBLK: "block device",
}


@click.command(
    "info",
    short_help="Show where the bytes of a file lie.",
    epilog="\b\nExamples:\n  aifs info /mnt/store/model.pt\n"
    "  aifs info --tree /mnt/store/run/.snapshots/before-merge",
)
@click.argument("path", type=PATH)
@click.option("--tree", is_flag=True, help="Of a directory, add up what all files below have.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def info_command(path: str, tree: bool, as_json: bool) -> None:
    """Show the inode of PATH, its form and layout, and where each part of it lies. A symlink is not
    followed.

    Of files in containers, stored_bytes are those that they take there, before redundancy, and
    compression how many times fewer that is than their size.

    unique_bytes are those that would come back if it were removed, shared_bytes those that clones
    and snapshots elsewhere have, too. Those of a directory are added up with --tree, with the
    number of files below and their bytes as ls shows them.
    """
    from aifs.cli.output import print_facts, print_json, print_table
    from aifs.core.units import describe_size

    info = _read_info(path, tree)
    if as_json:
        print_json(info)
        return
    parts, layout, copy = info.pop("parts", []), info.pop("layout", None), info.pop("copy", None)
    if copy:
        where = f"host {copy['host']}" if "host" in copy else copy["path"]
        info["copy"] = f"{copy['state']}, burst directory {copy['device']}, {where}"
    if layout:
        info["layout"] = describe_layout(layout)
    if "compression" in info:
        info["compression"] = f"{info['compression']:.2f}x"
    print_facts(info.items())
    if parts:
        print()
        rows = [
            (
                part["server"],
                part["domain"],
                part["state"],
                describe_size(part["bytes"]),
                part["path"],
            )
            for part in parts
        ]
        what = "container" if "chunk" in layout else "path"
        print_table(("server", "domain", "state", "bytes", what), rows, right=("server", "bytes"))


def describe_layout(layout: dict[str, Any]) -> str:
    from aifs.core.units import format_size

    name = "chunk" if "chunk" in layout else "unit"
    servers = ":".join(map(str, layout["servers"]))
    protection = ""
    if layout.get("replicas", 1) > 1:
        protection = f", {layout['replicas']} replicas"
    elif layout.get("parity"):
        protection = f", {layout['width']}+{layout['parity']} coded"
    return f"{layout['kind']}, {name} {format_size(layout[name])}, servers {servers}{protection}"


def _read_info(path: str, tree: bool) -> dict[str, Any]:
    from aifs.cli.mounts import require_inside

    found = require_inside(path, follow=False)
    kind = _TYPES.get(stat.S_IFMT(found.st_mode))
    if kind:  # the kernel lets nobody ask user.* attributes of these
        return {"inode": found.st_ino, "type": kind, "size": found.st_size, "links": found.st_nlink}
    info = hints.read(path, hints.INFO, follow=False)
    if tree or not stat.S_ISDIR(found.st_mode):
        info |= hints.read(path, hints.SHARING, follow=False)
    return info
