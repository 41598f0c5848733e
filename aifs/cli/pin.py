"""``aifs pin`` and ``aifs unpin``: keep files in the burst tier, or not any more."""

import os

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH


@click.command(
    "pin",
    short_help="Bring files into the burst tier and keep them there.",
    epilog="\b\nExample:\n  aifs pin /mnt/store/datasets/train",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
def pin_command(paths: tuple[str, ...]) -> int:
    """Bring the files PATH, and all below the directories PATH, into the burst tier, and never
    evict them.

    New files in these directories are pinned, too. Pinned files are drained as all others are. What
    does not fit is not staged, with exit code 1.
    """
    from aifs.cli.trees import walk
    from aifs.cli.warm import stage

    total = _set_tier(paths, "pinned")
    staged = stage((file for path in paths for file in walk(path)), total)
    print(f"pinned; staged {staged}")
    staged.print_rest()
    return 1 if staged.refused else 0


@click.command(
    "unpin",
    short_help="Let the burst tier evict files again.",
    epilog="\b\nExample:\n  aifs unpin /mnt/store/datasets/train",
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
def unpin_command(paths: tuple[str, ...]) -> None:
    """Let the burst tier evict the files PATH, and all below the directories PATH, again.

    Their tier is default then, as it is without any setting. aifs evict removes the copies now.
    """
    _set_tier(paths, "default")


def _set_tier(paths: tuple[str, ...], tier: str) -> int:
    """Set the tier of files and directories that have another one; bytes that are not in the burst
    tier.
    """
    from aifs.cli.trees import require_files, walk

    require_files(paths)
    for path in (item for path in paths for item in walk(path, directories=True)):
        try:
            if os.getxattr(path, hints.TIER) != tier.encode():
                hints.put(path, hints.TIER, tier)
        except FileNotFoundError:  # it is gone
            continue
    return sum(hints.read(path, hints.STATE)["bytes"]["clean"] for path in paths)
