"""``aifs warm``: bring files into the burst tier."""

import errno
import time
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import click

from aifs.cli import hints
from aifs.cli.arguments import PATH, SIZE
from aifs.cli.output import count, print_error
from aifs.core.errors import StoreError
from aifs.core.units import describe_size

EPILOG = """
\b
Examples:
  aifs warm /mnt/store/datasets/train
  aifs warm /mnt/store/datasets --limit 10GiB
  aifs warm --check /mnt/store/datasets /mnt/store/step-100
"""

PARALLEL = 64
"""Files that are being staged, or wait for it, at a time: the oldest is done, as a rule, when it is
asked about.
"""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.002, 0.1
_NO_ROOM = "no room in the burst tier, or changed meanwhile"
_EVICTED = "evicted again: the burst tier has no room for all"


@click.command(
    "warm", epilog=EPILOG, short_help="Bring files into the burst tier before they are read."
)
@click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")
@click.option(
    "--check", is_flag=True, help="Only count what is in the burst tier, and what is not."
)
@click.option("--limit", type=SIZE, help="Stage so many bytes at most.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON; its keys keep their meaning.")
def warm_command(paths: tuple[str, ...], check: bool, limit: int | None, as_json: bool) -> int:
    """Stage the files PATH, and all below the directories PATH: copy them from the data servers
    into the burst tier, so that the next open reads at the local disk's speed.

    What does not fit stays where it is, with exit code 1. Staged files may be evicted when room is
    needed; aifs pin keeps them.
    """
    from aifs.cli.output import print_json
    from aifs.cli.trees import require_files, walk

    require_files(paths)
    if check:
        _check(paths, as_json)
        return 0
    total = sum(hints.read(path, hints.STATE)["bytes"]["clean"] for path in paths)
    staged = stage((file for path in paths for file in walk(path)), total, limit)
    if as_json:
        print_json(vars(staged))
    else:
        print(f"staged {staged}")
        staged.print_rest()
    return 1 if staged.refused else 0


def _check(paths: Iterable[str], as_json: bool) -> None:
    from aifs.cli.output import print_json, print_table

    states = {path: hints.read(path, hints.STATE) for path in paths}
    if as_json:
        print_json(states)
        return
    rows = []
    for path, state in states.items():
        files, sizes = state["files"], state["bytes"]
        missing = sizes["clean"]
        there = sum(sizes.values()) - missing
        counts = (
            sum(files.values()) - files["clean"],
            describe_size(there),
            files["clean"],
            describe_size(missing),
        )
        rows.append((*counts, path))
    columns = ("files there", "bytes there", "files to stage", "bytes to stage", "path")
    print_table(columns, rows, right=columns[:-1])


@dataclass
class Staged:
    """What has become of the files: how many were staged, were there, were refused and why, or
    exceeded the limit.
    """

    files: int = 0
    """Those that are in the burst tier at the end."""
    bytes: int = 0
    there: int = 0
    over_limit: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        return (
            f"{count(self.files, 'file')}, {describe_size(self.bytes)}; there already: {self.there}"
        )

    def print_rest(self) -> None:
        """What is not in the burst tier now."""
        if self.over_limit:
            print(f"left out by the limit: {count(self.over_limit, 'file')}")
        for reason, number in self.refused.items():
            print_error(f"{count(number, 'file')} not staged: {reason}")


def stage(files: Iterable[str], total: int, limit: int | None = None) -> Staged:
    """Stage ``files``, several at a time, with a progress bar up to ``total`` bytes. Raises
    StoreError, OSError.
    """
    from aifs.cli.progress import progress

    if limit is not None:
        total = min(total, limit)
    staged, running, asked_for = Staged(), deque[tuple[str, int]](), 0
    done: list[tuple[str, int]] = []
    with progress("staging") as show:
        for path in files:
            state = _state(path)
            if state is None:
                continue
            size = sum(state["bytes"].values())
            if state["state"] != "clean":
                staged.there += 1
            elif limit is not None and asked_for + size > limit:
                staged.over_limit += 1
            elif _ask(path, staged):
                running.append((path, size))
                asked_for += size
                if len(running) == PARALLEL:
                    done += _wait(*running.popleft(), staged)
                    show(staged.bytes, total)
        while running:
            done += _wait(*running.popleft(), staged)
            show(staged.bytes, total)
    _count_out_evicted(done, staged)
    return staged


def _count_out_evicted(done: Iterable[tuple[str, int]], staged: Staged) -> None:
    """Later ones may have displaced earlier ones."""
    for path, size in done:
        state = _state(path)
        if state is not None and state["state"] == "clean":
            staged.files -= 1
            staged.bytes -= size
            staged.refused[_EVICTED] += 1


def _state(path: str) -> dict[str, Any] | None:
    """None if the file is gone."""
    try:
        return hints.read(path, hints.STATE)
    except FileNotFoundError:
        return None


def _ask(path: str, staged: Staged) -> bool:
    try:
        hints.put(path, hints.STAGE)
        return True
    except FileNotFoundError:
        return False
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:
            raise StoreError(
                f"{path}: the store has no burst tier; burst.directories names its directories"
            ) from None
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise
        staged.refused["only the owner and root may"] += 1
        return False


def _wait(path: str, size: int, staged: Staged) -> list[tuple[str, int]]:
    """Until the file is not being staged any more; the file, if it is in the burst tier then."""
    pause_s = _PAUSE_MIN_S
    while (state := _state(path)) is not None and state["staging"]:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    if state is not None and state["state"] == "clean":
        staged.refused[_NO_ROOM] += 1
    elif state is not None:
        staged.files += 1
        staged.bytes += size
        return [(path, size)]
    return []
