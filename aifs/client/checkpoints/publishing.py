"""Publish: a directory that has been written gets its name, with a manifest of its files.

The order: the bytes are durable; the manifest is; the name appears; then the pointers change (the
``latest`` symlink, the tracker file). On AIFS name and pointers change in one transaction;
elsewhere a crash may leave old pointers, never ones to a missing checkpoint.
"""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from aifs.client.checkpoints import attributes, manifest
from aifs.client.checkpoints.hashing import is_reserved, list_files, sync_directories, sync_files
from aifs.client.checkpoints.manifest import CheckpointError, Files, Manifest
from aifs.core import files, retention, trees
from aifs.core.names import is_path

_COMMIT = re.compile(r"\.aifs-commit\.(\d+)\.json")

PathLike = str | os.PathLike[str]


def plain(path: PathLike) -> str:
    """An absolute path without ``.``, ``..`` and a final slash. Raises CheckpointError for an empty
    one, and for KIND://REST."""
    text = os.fspath(path)
    if not text:
        raise CheckpointError("the path is empty")
    if not is_path(text):
        raise CheckpointError(f"{text}: is not the path of a file or directory")
    return os.path.abspath(text)


def step_of(name: str) -> int | None:
    """The number at the end of a checkpoint's name, such as 100 of ``step-100``."""
    return retention.step_of(os.fsencode(name))


def commit(
    tmp: PathLike, rank: int, names: Iterable[str] | None = None, *, hash: bool = True
) -> None:
    """Commit the files of rank ``rank`` in the pending directory ``tmp``; durable on return.

    ``names``: paths below ``tmp``; None: all that no other rank has committed. May be repeated
    until the publish. ``publish(..., ranks=N)`` wants one of each rank. Raises CheckpointError,
    OSError.
    """
    directory = plain(tmp)
    if names is None:
        others = {
            name
            for other, found in read_commits(directory).items()
            if other != rank
            for name in found
        }
        names = list_files(directory).keys() - others
    write_commit(directory, rank, sync_files(directory, sorted(names), hash))


def write_commit(directory: str, rank: int, found: Files) -> None:
    """Record that the rank's files are durable, with their sizes and digests."""
    text = json.dumps({"rank": rank, "files": found})
    trees.replace_file(_commit_path(directory, rank), text.encode(), durable=False)
    if attributes.get(directory, attributes.PENDING):
        attributes.put(directory, attributes.COMMIT, json.dumps({"rank": rank, "again": True}))


def withdraw_commits(directory: str) -> None:
    """Nobody has committed."""
    for name in os.listdir(directory):
        if _COMMIT.fullmatch(name):
            files.unlink(os.path.join(directory, name))


def _commit_path(directory: str, rank: int) -> str:
    return os.path.join(directory, f".aifs-commit.{rank}.json")


def read_commits(directory: str) -> dict[int, Files]:
    """The files of each rank that has committed. Raises CheckpointError, OSError."""
    commits = {}
    for name in os.listdir(directory):
        match = _COMMIT.fullmatch(name)
        data = manifest.read_document(os.path.join(directory, name)) if match else None
        if match and data is not None:
            try:
                commits[int(match[1])] = manifest.decode_files(json.loads(data)["files"])
            except (ValueError, KeyError, TypeError, AttributeError):
                raise CheckpointError(f"{os.path.join(directory, name)}: cannot be read") from None
    return commits


class Pointers(NamedTuple):
    """The ways to a checkpoint besides its name."""

    step: int | None
    latest: str | None
    """The name of a symlink."""
    tracker: str | None
    """The name of a file that holds the step."""


def publish(
    tmp: PathLike,
    final: PathLike,
    *,
    step: int | None = None,
    ranks: int | None = None,
    latest: str | None = None,
    tracker: str | None = None,
    replace: bool = False,
    hash: bool = True,
) -> Manifest:
    """Make the directory ``tmp`` appear as ``final``, whole and durable, with a manifest.

    ``ranks``: refuse unless so many have committed. ``latest``, ``tracker``: names beside ``final``
    of a symlink that shall lead to it, and of a file that shall hold its step. ``step``: by default
    the number at the end of the name. ``replace``: of a ``final`` that is there already; it is
    removed. Raises CheckpointError, FileExistsError, OSError.
    """
    target = plain(final)
    pointers = pointers_to(target, step, latest, tracker)
    return publish_attempt(plain(tmp), target, pointers, ranks, replace, hash)


def publish_attempt(
    directory: str,
    target: str,
    pointers: Pointers,
    ranks: int | None,
    replace: bool,
    hash: bool,
    attempt: str = "",
) -> Manifest:
    """As ``publish``; ``attempt``: its id, for the manifest: the ranks know it by that."""
    if not stat.S_ISDIR(_mode(directory)):
        what = "is not a directory" if os.path.lexists(directory) else "there is no such directory"
        raise CheckpointError(f"{directory}: {what}")
    require_free(target, replace)
    above = os.path.realpath(os.path.dirname(target))
    if os.path.commonpath([above, os.path.realpath(directory)]) == os.path.realpath(directory):
        raise CheckpointError(f"{target}: lies in {directory}, which cannot be moved into itself")
    if os.path.realpath(directory).startswith(os.path.join(above, os.path.basename(target), "")):
        raise CheckpointError(f"{directory}: lies in {target}, so it cannot take its place")
    if os.stat(directory).st_dev != os.stat(os.path.dirname(target)).st_dev:
        raise CheckpointError(
            f"{directory}: is on another filesystem than {target}, so it cannot be renamed"
        )
    done = _complete(
        directory, pointers.step, ranks, hash, attempt, _time_after(target, pointers.latest)
    )
    if attributes.is_aifs(directory):
        _switch_by_mount(directory, target, pointers, replace)
    else:
        _switch(directory, target, pointers, replace)
    return done


def require_free(target: str, replace: bool) -> None:
    """Check that a checkpoint may get the name. Raises FileExistsError, CheckpointError for an
    irreplaceable file, OSError."""
    there = _mode(target)
    if there and not replace:
        raise FileExistsError(errno.EEXIST, "a checkpoint of this name is there already", target)
    if there and not stat.S_ISDIR(there):
        raise CheckpointError(f"{target}: is no directory, so no checkpoint can replace it")


def _mode(path: str) -> int:
    """The mode of this name, also of a symlink; 0 if there is none."""
    try:
        return os.lstat(path).st_mode
    except FileNotFoundError:
        return 0


def pointers_to(target: str, step: int | None, latest: str | None, tracker: str | None) -> Pointers:
    """``step``: by default the number at the end of the name. Raises CheckpointError if the
    pointers are no names beside ``target``, or a tracker has no step to hold; OSError."""
    step = step_of(os.path.basename(target)) if step is None else step
    for name in [name for name in (latest, tracker) if name is not None]:
        if os.path.basename(name) != name or name in ("", ".", "..", os.path.basename(target)):
            raise CheckpointError(f"{name!r} cannot be the name of a pointer beside {target}")
        place = os.path.join(os.path.dirname(target), name)
        if stat.S_ISDIR(_mode(place)):
            raise CheckpointError(f"{place}: is a directory, so it cannot be a pointer to {target}")
    if latest is not None and latest == tracker:
        raise CheckpointError(
            f"{latest!r} cannot be both the symlink and the tracker file beside {target}"
        )
    if tracker is not None and step is None:
        raise CheckpointError(
            f"{target}: its step is not known, so the tracker file {tracker} cannot hold it"
        )
    return Pointers(step, latest, tracker)


def _time_after(target: str, latest: str | None) -> float:
    """Now, or just after the checkpoint before if the clock went back: times order checkpoints."""
    with suppress(CheckpointError, OSError):
        before = manifest.read(os.path.join(os.path.dirname(target), latest)) if latest else None
        if before is not None:
            return max(time.time(), before.time + 0.001)
    return time.time()


def _complete(
    directory: str, step: int | None, ranks: int | None, hash: bool, attempt: str, time_s: float
) -> Manifest:
    """Make the directory durable, with its manifest and nothing else."""
    commits = read_commits(directory)
    members = attributes.get_json(directory, attributes.PENDING).get("members", [])
    missing = sorted(set(range(ranks or 0)) - commits.keys() - set(members))
    if missing:
        raise CheckpointError(f"{directory}: {name_ranks(missing)} did not commit")
    present = list_files(directory)
    if not present:
        raise CheckpointError(f"{directory}: holds no file, so there is nothing to publish")
    known: Files = {}
    for rank, committed in sorted(commits.items()):
        for name, digest in committed.items():
            size = present[name].st_size if name in present else None
            if size != digest.size:
                what = "is missing" if size is None else f"has {size} bytes, not {digest.size}"
                raise CheckpointError(f"{directory}: {name} of rank {rank} {what}")
        known |= committed
    known |= sync_files(directory, sorted(present.keys() - known.keys()), hash)
    done = Manifest(
        step, time_s, ranks or 1, attempt, attributes.get(directory, attributes.LAYOUT), known
    )
    manifest.write(directory, done)
    for name in os.listdir(directory):
        if is_reserved(name) and name != manifest.NAME:
            path = os.path.join(directory, name)
            trees.remove_tree(path) if os.path.isdir(path) else files.unlink(path)
    sync_directories(directory)
    return done


def name_ranks(ranks: list[int]) -> str:
    """``rank 3``, ``ranks 0, 2, 5``; not more than eight."""
    shown = ", ".join(map(str, ranks[:8])) + (
        f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    )
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _switch(directory: str, target: str, pointers: Pointers, replace: bool) -> None:
    """By rename alone."""
    parent = os.path.dirname(target)
    try:
        trees.rename_new(directory, target)
    except FileExistsError:
        if not replace:
            raise
        _replace(directory, target)
    files.sync_dir(parent)
    if os.path.dirname(directory) != parent:
        files.sync_dir(os.path.dirname(directory))
    step, latest, tracker = pointers
    if latest is not None:
        trees.replace_symlink(os.path.join(parent, latest), os.path.basename(target))
    if tracker is not None:
        trees.replace_file(os.path.join(parent, tracker), str(step).encode())
    if latest is not None or tracker is not None:
        files.sync_dir(parent)


def _replace(directory: str, target: str) -> None:
    """The old one gets the name of the pending one, and is removed."""
    if os.path.samefile(directory, target):  # it has its name, and is all there is
        return
    require_free(target, replace=True)  # removing follows what has become a symlink meanwhile
    try:
        trees.exchange(directory, target)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOSYS):
            raise
        raise CheckpointError(
            f"{target}: cannot be replaced at once on this filesystem; remove it first"
        ) from None
    files.sync_dir(os.path.dirname(target))
    trees.remove_tree(directory)


def _switch_by_mount(directory: str, target: str, pointers: Pointers, replace: bool) -> None:
    """In one transaction of the metadata."""
    parent, name = os.path.split(target)
    way = os.path.relpath(os.path.realpath(parent), os.path.realpath(os.path.dirname(directory)))
    wanted = {
        "final": os.path.join(way, name),
        "latest": pointers.latest,
        "tracker": pointers.tracker,
        "content": pointers.tracker and str(pointers.step),
        "manifest": manifest.NAME,
        "replace": replace,
        "exclusive": not replace,
    }
    try:
        attributes.put(
            directory,
            attributes.PUBLISH_AS,
            json.dumps({key: value for key, value in wanted.items() if value}),
        )
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise FileExistsError(
                errno.EEXIST, "a checkpoint of this name is there already", target
            ) from None
        refused = attributes.get_json(directory, attributes.PENDING).get("refused", "")
        if error.errno == errno.EBUSY and refused:
            raise CheckpointError(f"{directory}: {refused}") from None
        raise


def pending_path(target: str) -> Path:
    """Where a checkpoint is written before it gets its name: ``.NAME.pending`` beside it."""
    parent, name = os.path.split(target)
    return Path(parent, f".{name}.pending")
