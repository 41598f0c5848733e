"""``aifs evict``: give up copies in the burst tier."""

import errno
from collections import Counter

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH
from aifs.core.units import describe_size

EPILOG = """
\b
Examples:
  aifs evict /mnt/store/datasets/old
  aifs evict /mnt/store/step-100/shard-0.pt
"""

_REASONS = {
    "dirty": "the newest bytes are in the burst tier alone; aifs drain moves them",
    "pinned": "pinned; aifs unpin lets go",
    "open": "open",
    "needed": (
        "data servers that have its bytes are lost, fail or have wrong ones: the copy may be "
        "all there is"
    ),
}


@click.command("evict", epilog=EPILOG, short_help="Drop clean copies from the burst tier.")
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
def evict_command(paths: tuple[str, ...]) -> int:
    """Delete the copies that the files PATH, and those below the directories PATH, have in the
    burst tier.

    The files stay on the data servers. Files that are not drained, are pinned, are open, or that
    the data servers cannot tell at present keep theirs; the command says how many and why, with
    exit code 1. The burst tier does this by itself when it needs room.
    """
    from aifs.cli.output import count, print_error
    from aifs.cli.trees import require_files, walk

    require_files(paths)
    files = freed = 0
    kept = Counter[str]()
    for path in (file for path in paths for file in walk(path)):
        try:
            state = hints.read(path, hints.STATE)
            if not state["copy"]:
                continue
            hints.put(path, hints.EVICT)
        except FileNotFoundError:  # it is gone
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            kept[_reason(path)] += 1
            continue
        files += 1
        freed += sum(state["bytes"].values())
    print(f"evicted {count(files, 'file')}, {describe_size(freed)}")
    for reason, number in kept.items():
        print_error(f"{count(number, 'file')} not evicted: {_REASONS[reason]}")
    return 1 if kept else 0


def _reason(path: str) -> str:
    state = hints.read(path, hints.STATE)
    if state["state"] in ("dirty", "draining"):
        return "dirty"
    if state["pinned"]:
        return "pinned"
    return "needed" if state["needed"] and not state["open"] else "open"
