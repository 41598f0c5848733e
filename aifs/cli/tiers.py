"""``aifs drain``, ``warm``, ``evict``, ``pin`` and ``unpin``: where the bytes of files are."""

import errno
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from aifs.cli import door
from aifs.cli.command import DURATION, PATH, SIZE, Column, Report, Table, command, number
from aifs.cli.door import require_files
from aifs.cli.output import count, print_error, progress, rate, size
from aifs.core.errors import TimeoutReached
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

_CALLS = 4
"""Under way at a time."""

_NAMES_MAX = 256
"""Of files in a call."""

_SOON_S, _LATE_S = 0.1, 1.0
"""The next call takes more files if one took less than the first, and fewer if it took more than
the second: the progress bar moves after each."""

_PAUSE_S = 0.01

_NO_FAULT = {
    "near": "on data servers that are as near as the burst tier, and need no staging",
    "limit": "left out by the limit",
}
_NOT_STAGED = {
    "owner": "only the owner and root may",
    "off": "burst.blocks is off",
    "capacity": "user.aifs.tier keeps them on the data servers",
    "room": (
        "no room in the burst tier, changed meanwhile, written to in place, or not told by the "
        "data servers"
    ),
    "again": "evicted again: the burst tier has no room for all",
}

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

    Files without room, and files that cannot be in blocks, stay where they are; the exit code is
    1. Files whose data servers are as near as the burst tier need no blocks, and are no error.
    Blocks may be evicted when room is needed; aifs pin keeps files.
    """
    require_files(paths)
    if check:
        states = {path: door.read(path, "state") for path in paths}
        return Report(states, Table(_STAGES, [_stage_of(*each) for each in states.items()]))
    return stage(paths, "staged", limit)


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
class Moves:
    """Files that calls have brought or dropped."""

    files: int = 0
    bytes: int = 0
    there: int = 0
    kept: Counter[str] = field(default_factory=Counter)
    """By reason, how many stay where they were."""

    def add(self, answer: dict[str, Any]) -> None:
        self.files += answer["files"]
        self.bytes += answer["bytes"]
        self.there += answer.get("there", 0)
        self.kept.update(answer["kept"])


def stage(paths: Sequence[str], done: str, limit: int | None = None) -> Report:
    """Stage the files, and all below, with a progress bar; the report begins with ``done``. Exit
    code 1 if files are not in the burst tier that should be. Raises OSError.
    """
    total = sum(
        door.read(path, "state")["bytes"]["clean"] if os.path.isdir(path) else os.path.getsize(path)
        for path in paths
    )
    moved, now = Moves(), Moves()
    with progress("staging") as show:
        for answer in _stage(paths, limit):
            moved.add(answer)
            show(moved.bytes, total if limit is None else min(total, limit))
    for answer in _stage(paths, 0) if moved.files else ():  # it only counts
        now.add(answer)
    if moved.files:  # later ones may have displaced earlier ones
        moved.kept += Counter(again=now.kept.total() - moved.kept.total())
    lines = [f"{done} {count(moved.files, 'file')}, {size(moved.bytes)}"]
    lines[0] += f"; there already: {moved.there}"
    for reason, files in moved.kept.items():
        if reason in _NO_FAULT:
            lines.append(f"{_NO_FAULT[reason]}: {count(files, 'file')}")
        else:
            print_error(f"{count(files, 'file')} not staged: {_NOT_STAGED.get(reason, reason)}")
    return Report(vars(moved), *lines, code=1 if moved.kept.keys() - _NO_FAULT else 0)


def _stage(paths: Sequence[str], limit: int | None) -> Iterator[dict[str, Any]]:
    """Answers of calls, several at a time, unless the next one's limit depends on the last one."""
    most, running = 1, 0
    answers = queue.SimpleQueue[tuple[dict[str, Any] | Exception, float]]()

    def call(batch: door.Batch, fields: dict[str, int]) -> None:
        begin = time.monotonic()
        try:
            answers.put((batch.call("stage", **fields), time.monotonic() - begin))
        except Exception as error:  # noqa: BLE001 (raised below)
            answers.put((error, 0.0))

    def take() -> dict[str, Any]:
        nonlocal limit, most, running
        answer, took_s = answers.get()
        running -= 1
        if isinstance(answer, Exception):
            raise answer
        if took_s < _SOON_S:
            most = min(2 * most, _NAMES_MAX)
        elif took_s > _LATE_S:
            most = max(most // 2, 1)
        if limit is not None:
            limit -= answer["bytes"]
        return answer

    try:
        for batch in door.batches(door.files_below(paths), lambda: most):
            fields = {} if limit is None else {"limit": limit}
            # Nobody waits for the thread after an interrupt: the process ends, and so its call.
            threading.Thread(target=call, args=(batch, fields), daemon=True).start()
            running += 1
            if running == (_CALLS if limit is None else 1):
                yield take()
        while running:
            yield take()
    except OSError as error:
        if error.errno != errno.ENOTTY:
            raise
        yield _by_attributes(paths, "stage", limit)


def _by_attributes(paths: Sequence[str], name: str, limit: int | None = None) -> dict[str, Any]:
    """The answer of the calls, made file by file: a mount without its bridge has no calls."""
    moved = Moves()
    for path in (file for path in paths for file, _ in door.walk(path)):
        try:
            before = door.read(path, "state")
            bytes_ = sum(before["bytes"].values())
            is_there = before["local"] if before["pinned"] else before["state"] != "clean"
            if name == "stage" and is_there:
                moved.there += 1
                continue
            if limit is not None and moved.bytes + bytes_ > limit:
                moved.kept["limit"] += 1
                continue
            door.put(path, name)
            while (after := door.read(path, "state"))["staging"]:
                time.sleep(_PAUSE_S)
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno not in (errno.EBUSY, errno.EPERM):
                raise
            moved.kept[error.strerror or ""] += 1
            continue
        here = bytes_ * (after["copy"] - before["copy"])
        here += after["block_bytes"] - before["block_bytes"]
        moved.files += here != 0
        moved.bytes += abs(here)
        moved.kept["room"] += name == "stage" and after["state"] == "clean"
    moved.kept += Counter()  # without zeros
    return vars(moved)


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
    evicted = Moves()
    for is_last in (False, True):
        try:
            answers = [batch.call("evict") for batch in door.batches(door.named(paths))]
        except OSError as error:
            if error.errno != errno.ENOTTY:
                raise
            answers = [_by_attributes(paths, "evict")]
        evicted.kept.clear()
        for answer in answers:
            evicted.add(answer)
        if is_last or not evicted.kept["open"]:
            break
        time.sleep(_CLOSING_S)
    kept = +evicted.kept
    for reason, files in kept.items():
        print_error(f"{count(files, 'file')} not evicted: {_REASONS.get(reason, reason)}")
    report = {"files": evicted.files, "bytes": evicted.bytes, "kept": kept}
    text = f"evicted {count(evicted.files, 'file')}, {size(evicted.bytes)}"
    return Report(report, text, code=1 if kept else 0)


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
    _set_tier(paths, "pinned")
    return stage(paths, "pinned; staged")


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


def _set_tier(paths: tuple[str, ...], tier: str) -> None:
    """Set the tier of files and directories that have another one."""
    require_files(paths)
    for path in (item for path in paths for item, _ in door.walk(path, directories=True)):
        try:
            if os.getxattr(path, "user.aifs.tier") != tier.encode():
                door.put(path, "tier", tier)
        except FileNotFoundError:  # it is gone
            continue
