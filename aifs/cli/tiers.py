"""``aifs drain``, ``warm``, ``evict``, ``pin`` and ``unpin``: where the bytes of files are."""

import errno
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from aifs.cli import door
from aifs.cli.command import DURATION, PATH, SIZE, Column, Report, Table, command, number
from aifs.cli.door import require_files, walk
from aifs.cli.output import count, print_error, progress, rate, size
from aifs.core.errors import StoreError, TimeoutReached
from aifs.core.units import format_duration

_PATHS = click.argument("paths", nargs=-1, required=True, type=PATH, metavar="PATH...")

# --- drain ----------------------------------------------------------------------------------------

_DRAIN_PAUSE_MIN_S, _DRAIN_PAUSE_MAX_S = 0.02, 2.0


class Left(NamedTuple):
    """Files that are still in the burst tier alone."""

    files: int
    bytes: int
    open_files: int
    error: str = ""
    """Why draining has to wait, if it does."""
    hosts: tuple[str, ...] = ()
    """Other hosts that have some of it."""

    def __str__(self) -> str:
        are_open = f", {self.open_files} open for writing" if self.open_files else ""
        elsewhere = f", of host {', '.join(self.hosts)}, too" if self.hosts else ""
        return f"{count(self.files, 'file')} ({size(self.bytes)}{are_open}{elsewhere})"


@command(
    "drain",
    short_help="Have files on the data servers now, and wait for it.",
    examples="aifs drain /mnt/store/step-100\naifs drain /mnt/store --timeout 5min",
    epilog="""
Ctrl-C and the time-out end the waiting, not the drain. Files that are open for writing are drained
when they have been closed. `getfattr -n user.aifs.state PATH` says where the bytes are.
""",
    sizes=True,
)
@_PATHS
@click.option(
    "--timeout", "timeout_s", type=DURATION, help="Stop waiting after so long (exit code 7)."
)
def drain_command(paths: tuple[str, ...], timeout_s: float | None) -> Report:
    """Drain the files PATH, and all below the directories PATH, ahead of all else; wait until they
    are on the capacity tier.

    Returns when all that had been written before the command began is on stable storage of the data
    servers. Later writes below PATH are not waited for.
    """
    require_files(paths)
    begin = time.monotonic()
    drained = drain(paths, timeout_s)
    elapsed_s = max(time.monotonic() - begin, 1e-3)
    text = "nothing was undrained"
    if drained.files:
        text = f"drained {drained}, {rate(drained.bytes / elapsed_s)}"
    facts = {"files": drained.files, "bytes": drained.bytes, "seconds": round(elapsed_s, 3)}
    return Report(facts, text)


def left(paths: Sequence[str], before_ns: int | None = None) -> Left:
    """The undrained files of ``paths``. With ``before_ns`` there are none once all that was
    undrained at that time (epoch) is drained.
    """
    answers = [door.read(path, "drain") for path in paths]
    if before_ns is not None:
        answers = [
            answer
            for answer in answers
            if answer["files"] and answer["oldest_since_ns"] <= before_ns
        ]
    files, bytes_, writers = (
        sum(answer[key] for answer in answers) for key in ("files", "bytes", "open_files")
    )
    hosts = sorted({host for answer in answers for host in answer["hosts"]})
    error = next((answer["error"] for answer in answers), "")
    return Left(files, bytes_, writers, error, tuple(hosts))


def _pause_s(first: Left, remaining: Left, elapsed_s: float) -> float:
    """How long not to ask again: half of the expected time. Each answer takes the daemon longer the
    more files are left."""
    done = first.files - remaining.files
    expected_s = elapsed_s * remaining.files / done if done > 0 else elapsed_s
    return min(max(expected_s / 2, _DRAIN_PAUSE_MIN_S), _DRAIN_PAUSE_MAX_S)


def drain(paths: Sequence[str], timeout_s: float | None) -> Left:
    """Drain ``paths`` and wait, with a progress bar; returns what there was to drain. Raises
    TimeoutReached, OSError.
    """
    begin_ns, begin = time.time_ns(), time.monotonic()
    first = remaining = left(paths, begin_ns)  # before it is asked for: a little is drained at once
    for path in paths:
        door.put(path, "drain")
    said = ""
    try:
        with progress("draining") as show:
            while remaining.files:
                show(max(first.bytes - remaining.bytes, 0), first.bytes)
                if remaining.error and not said:
                    said = remaining.error
                    print_error(f"draining is tried again and again: {said}")
                if timeout_s is not None and time.monotonic() - begin >= timeout_s:
                    raise TimeoutReached(
                        f"not drained after {format_duration(timeout_s)}: {remaining}; draining "
                        "goes on, and aifs status shows what holds it up"
                    )
                elapsed_s = time.monotonic() - begin
                pause_s = _pause_s(first, remaining, elapsed_s)
                if timeout_s is not None:
                    pause_s = min(pause_s, max(timeout_s - elapsed_s, _DRAIN_PAUSE_MIN_S))
                time.sleep(pause_s)
                remaining = left(paths, begin_ns)
    except KeyboardInterrupt:
        print_error(f"draining goes on in the background; left: {remaining}")
        raise
    return first


# --- warm -----------------------------------------------------------------------------------------

PARALLEL = 64
"""Files that are being staged, or wait for it, at a time: the oldest is done, as a rule, when it is
asked about.
"""

_PAUSE_MIN_S, _PAUSE_MAX_S = 0.002, 0.1
_NO_ROOM = "no room in the burst tier, or changed meanwhile"
_NO_BLOCKS = (
    "no room in the burst tier, changed, written to in place, or on data servers that are as near"
)
_EVICTED = "evicted again: the burst tier has no room for all"

_STAGES = (
    Column("files there", "files_there", number),
    Column("bytes there", "bytes_there", size),
    Column("files to stage", "files_to_stage", number),
    Column("bytes to stage", "bytes_to_stage", size),
    Column("bytes in blocks", "block_bytes", size),
    Column("path"),
)


@command(
    "warm",
    short_help="Bring files into the burst tier before they are read.",
    examples="aifs warm /mnt/store/datasets/train\naifs warm /mnt/store/datasets --limit 10GiB\n"
    "aifs warm --check /mnt/store/datasets /mnt/store/step-100",
    sizes=True,
)
@_PATHS
@click.option(
    "--check", is_flag=True, help="Only count what is in the burst tier, and what is not."
)
@click.option("--limit", type=SIZE, help="Stage so many bytes at most.")
def warm_command(paths: tuple[str, ...], check: bool, limit: int | None) -> Report:
    """Stage the files PATH, and all below the directories PATH: read them from the data servers
    into blocks in the burst tier, so that programs read them at the local disk's speed.

    What does not fit, or can be in no blocks, stays where it is, with exit code 1. Blocks may be
    evicted when room is needed; aifs pin keeps files.
    """
    require_files(paths)
    if check:
        states = {path: door.read(path, "state") for path in paths}
        return Report(states, Table(_STAGES, [_stage_of(*each) for each in states.items()]))
    total = sum(door.read(path, "state")["bytes"]["clean"] for path in paths)
    staged = stage((file for path in paths for file in walk(path)), total, limit)
    return staged.report("staged")


def _stage_of(path: str, state: dict[str, Any]) -> dict[str, Any]:
    files, sizes = state["files"], state["bytes"]
    return {
        "files_there": sum(files.values()) - files["clean"],
        "bytes_there": sum(sizes.values()) - sizes["clean"],
        "files_to_stage": files["clean"],
        "bytes_to_stage": sizes["clean"],
        "block_bytes": state["block_bytes"],
        "path": path,
    }


@dataclass
class Staged:
    """How many files were staged, were there, were refused and why, or exceeded the limit."""

    files: int = 0
    """Those that are in the burst tier at the end."""
    bytes: int = 0
    there: int = 0
    over_limit: int = 0
    refused: Counter[str] = field(default_factory=Counter)

    def report(self, done: str) -> Report:
        """Exit code 1 if files are not in the burst tier."""
        for reason, files in self.refused.items():
            print_error(f"{count(files, 'file')} not staged: {reason}")
        lines = [f"{done} {count(self.files, 'file')}, {size(self.bytes)}"]
        lines[0] += f"; there already: {self.there}"
        if self.over_limit:
            lines.append(f"left out by the limit: {count(self.over_limit, 'file')}")
        return Report(vars(self), *lines, code=1 if self.refused else 0)


def stage(
    files: Iterable[str], total: int, limit: int | None = None, is_pinned: bool = False
) -> Staged:
    """Stage ``files``, several at a time, with a progress bar up to ``total`` bytes;
    ``is_pinned``: blocks of them do not do. Raises StoreError, OSError.
    """
    if limit is not None:
        total = min(total, limit)
    staged, running, asked_for = Staged(), deque[tuple[str, int]](), 0
    done: list[tuple[str, int]] = []
    with progress("staging") as show:
        for path in files:
            state = _state(path)
            if state is None:
                continue
            bytes_ = sum(state["bytes"].values())
            if _is_there(state, is_pinned):
                staged.there += 1
            elif limit is not None and asked_for + bytes_ > limit:
                staged.over_limit += 1
            elif _ask(path, staged):
                running.append((path, bytes_))
                asked_for += bytes_
                if len(running) == PARALLEL:
                    done += _wait(*running.popleft(), staged, is_pinned)
                    show(staged.bytes, total)
        while running:
            done += _wait(*running.popleft(), staged, is_pinned)
            show(staged.bytes, total)
    _count_out_evicted(done, staged, is_pinned)
    return staged


def _is_there(state: dict[str, Any], is_pinned: bool) -> bool:
    """Whether a file is in the burst tier; ``is_pinned``: and not in blocks."""
    return state["local"] if is_pinned else state["state"] != "clean"


def _count_out_evicted(done: Iterable[tuple[str, int]], staged: Staged, is_pinned: bool) -> None:
    """Later ones may have displaced earlier ones."""
    for path, bytes_ in done:
        state = _state(path)
        if state is not None and not _is_there(state, is_pinned):
            staged.files -= 1
            staged.bytes -= bytes_
            staged.refused[_EVICTED] += 1


def _state(path: str) -> dict[str, Any] | None:
    """None if the file is gone."""
    try:
        return door.read(path, "state")
    except FileNotFoundError:
        return None


def _ask(path: str, staged: Staged) -> bool:
    try:
        door.put(path, "stage")
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


def _wait(path: str, bytes_: int, staged: Staged, is_pinned: bool) -> list[tuple[str, int]]:
    """Until the file is not being staged any more; the file, if it is in the burst tier then."""
    pause_s = _PAUSE_MIN_S
    while (state := _state(path)) is not None and state["staging"]:
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _PAUSE_MAX_S)
    if state is not None and not _is_there(state, is_pinned):
        staged.refused[_NO_ROOM if is_pinned else _NO_BLOCKS] += 1
    elif state is not None:
        staged.files += 1
        staged.bytes += bytes_
        return [(path, bytes_)]
    return []


# --- evict ----------------------------------------------------------------------------------------

_REASONS = {
    "dirty": "the newest bytes are in the burst tier alone; aifs drain moves them",
    "pinned": "pinned; aifs unpin lets go",
    "open": "open",
    "needed": (
        "data servers that have its bytes are lost, fail or have wrong ones: the copy may be "
        "all there is"
    ),
    "owner": "only the owner and root may",
}

_CLOSING_S = 0.3
"""After so long a file that a program has just closed is closed for the mount, too: close(2) does
not wait for that."""


@command(
    "evict",
    short_help="Drop clean copies from the burst tier.",
    examples="aifs evict /mnt/store/datasets/old\naifs evict /mnt/store/step-100/shard-0.pt",
    sizes=True,
)
@_PATHS
def evict_command(paths: tuple[str, ...]) -> Report:
    """Delete the copies and blocks that the files PATH, and those below the directories PATH, have
    in the burst tier. Blocks of containers stay, because other files lie in them, too.

    The files stay on the data servers. Files that are not drained, are pinned, are open, or that
    the data servers cannot tell at present keep theirs; the command says how many and why, with
    exit code 1. The burst tier does this by itself when it needs room.
    """
    files = sizes = 0
    for is_last in (False, True):
        answers = _evict(paths)
        kept = sum((Counter(answer["kept"]) for answer in answers), Counter[str]())
        files += sum(answer["files"] for answer in answers)
        sizes += sum(answer["bytes"] for answer in answers)
        if is_last or not kept["open"]:
            break
        time.sleep(_CLOSING_S)
    for reason, kept_files in kept.items():
        print_error(f"{count(kept_files, 'file')} not evicted: {_REASONS[reason]}")
    report = {"files": files, "bytes": sizes, "kept": kept}
    return Report(report, f"evicted {count(files, 'file')}, {size(sizes)}", code=1 if kept else 0)


def _evict(paths: Sequence[str]) -> list[dict[str, Any]]:
    try:
        return list(door.call_for(paths, "evict"))
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
    kept, evicted = Counter[str](), list[int]()  # the mount is without its bridge
    for path in (file for path in paths for file in walk(path)):
        try:
            state = door.read(path, "state")
            if state["copy"] or state["block_bytes"]:
                door.put(path, "evict")
                left = door.read(path, "state")["block_bytes"]
                copied = sum(state["bytes"].values()) if state["copy"] else 0
                if state["copy"] or left < state["block_bytes"]:
                    evicted.append(copied + max(0, state["block_bytes"] - left))
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
            is_dirty = state["state"] in ("dirty", "draining")
            asked = ["pinned", "open", "needed"]
            kept["dirty" if is_dirty else next((it for it in asked if state[it]), "open")] += 1
    return [{"files": len(evicted), "bytes": sum(evicted), "kept": kept}]


# --- pin and unpin --------------------------------------------------------------------------------


@command(
    "pin",
    short_help="Bring files into the burst tier and keep them there.",
    examples="aifs pin /mnt/store/datasets/train",
    sizes=True,
)
@_PATHS
def pin_command(paths: tuple[str, ...]) -> Report:
    """Bring the files PATH, and all below the directories PATH, into the burst tier, and never
    evict them.

    New files in these directories are pinned, too. Pinned files are drained as all others are. What
    does not fit is not staged, with exit code 1.
    """
    total = _set_tier(paths, "pinned")
    files = (file for path in paths for file in walk(path))
    return stage(files, total, is_pinned=True).report("pinned; staged")


@command(
    "unpin",
    short_help="Let the burst tier evict files again.",
    examples="aifs unpin /mnt/store/datasets/train",
)
@_PATHS
def unpin_command(paths: tuple[str, ...]) -> None:
    """Let the burst tier evict the files PATH, and all below the directories PATH, again.

    Their tier is default then, as it is without any setting. aifs evict removes the copies now.
    """
    _set_tier(paths, "default")


def _set_tier(paths: tuple[str, ...], tier: str) -> int:
    """Set the tier of files and directories that have another one; returns the bytes that are not
    in the burst tier.
    """
    require_files(paths)
    for path in (item for path in paths for item in walk(path, directories=True)):
        try:
            if os.getxattr(path, "user.aifs.tier") != tier.encode():
                door.put(path, "tier", tier)
        except FileNotFoundError:  # it is gone
            continue
    return sum(door.read(path, "state")["bytes"]["clean"] for path in paths)
