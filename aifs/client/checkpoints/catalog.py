"""The checkpoints in a directory: the newest, whether they are whole, which have to go.

A checkpoint is a directory with a manifest, or one whose name ends in a step; its name does not
begin with a dot. It is *shown* if it appeared as a whole: in an AIFS, if it was published or
renamed into place, which the mount records; elsewhere, if it has a manifest. Only shown ones count
for ``keep``. A shown one is the newest; without any, one that has all files of its manifest.

Checkpoints whose names differ in their step alone are a run, and ordered by it. The newest is the
last one of the run in which something was published last.
"""

import errno
import glob
import os
import re
import stat
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from aifs.client.checkpoints import attributes, manifest
from aifs.client.checkpoints.hashing import digest_files, is_reserved, walk
from aifs.client.checkpoints.manifest import CheckpointError, Digest, Files
from aifs.client.checkpoints.publishing import PathLike, plain, step_of
from aifs.core import files, retention, trees
from aifs.core.files import sync_dir
from aifs.core.log import logger

_log = logger(__name__)

COMPLETE, PENDING, DAMAGED, UNLISTED = "complete", "pending", "damaged", "no manifest"

NOT_SHOWN = "not known to be whole: neither published nor renamed into place"

_PENDING_PREFIX, _PENDING_SUFFIX = ".", ".pending"
_REMOVED = re.compile(r"\..+\.[0-9a-f]{8}\.removed", re.DOTALL)
_TEMPORARY = re.compile(r"\..+(\.[0-9a-f]{8}\.tmp|\.ranks)", re.DOTALL)
_TEMPORARY_AGE_S = (
    3600.0  # of what lives for milliseconds, or as long as there is a pending directory
)


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint."""

    path: Path
    """Its directory."""
    state: str
    """*complete*, *pending* (a save, or its rest), *damaged* (files are missing or of another size,
    or it cannot be read), or *no manifest*."""
    step: int | None
    """None if it is not known."""
    time: float
    """Of the publish, seconds since 1970; of a pending one, when it began."""
    size: int
    """Bytes of its files together."""
    files: int
    """How many there are."""
    problem: str = ""
    """The damage, or the missing part; '' if there is none."""
    shown: bool = False
    """It appeared as a whole."""

    @property
    def may_be_whole(self) -> bool:
        """Whether nothing says that it is empty, pending or damaged."""
        return self.files > 0 and self.state in (COMPLETE, UNLISTED)


def list_checkpoints(path: PathLike, *, pending: bool = False) -> list[Checkpoint]:
    """The checkpoints in the directory ``path``, the newest last; ``pending``: also unpublished
    ones. Raises OSError."""
    directory = plain(path)
    mounted = attributes.is_aifs(directory)
    found = []
    for entry in list(os.scandir(directory)):
        with suppress(FileNotFoundError, NotADirectoryError):  # it is gone
            if entry.is_dir(follow_symlinks=False) and (one := _look_at(entry, pending)):
                found.append(_judge(one, mounted))
    return _in_order(found)


def latest(path: PathLike, *, in_place: bool = False) -> Path | None:
    """The newest complete checkpoint in ``path``, or None. ``in_place``: also one not known to be
    whole, unless it is empty or damaged. Raises OSError."""
    return newest_of(list_checkpoints(path), in_place)


def newest_of(found: Iterable[Checkpoint], in_place: bool = False) -> Path | None:
    """As ``latest``, of these."""
    full = [one for one in found if one.may_be_whole]
    if not in_place:
        shown = [one for one in full if one.shown]
        full = shown or [one for one in full if one.state == COMPLETE]
    return _in_order(full)[-1].path if full else None


def _judge(one: Checkpoint, mounted: bool) -> Checkpoint:
    """Note whether it was shown, and when."""
    if not mounted:
        one = replace(one, shown=one.state == COMPLETE)
    elif one.state != PENDING and (shown_s := attributes.get(str(one.path), attributes.SHOWN)):
        one = replace(one, shown=True, time=float(shown_s))
    if not one.shown and one.state == UNLISTED:
        one = replace(one, problem=NOT_SHOWN)
    return one


def _in_order(found: list[Checkpoint]) -> list[Checkpoint]:
    """By steps within a run; runs by their last publication."""
    places = [(*retention.run_of(os.fsencode(one.path.name)), one.time) for one in found]
    last: dict[bytes, float] = {}
    for run, _, time_s in places:
        last[run] = max(last.get(run, time_s), time_s)
    ordered = sorted(zip(places, found, strict=True), key=lambda row: (last[row[0][0]], row[0]))
    return [one for _, one in ordered]


def is_checkpoint(path: PathLike) -> bool:
    """Whether ``path`` is a checkpoint in any state, also the rest of an unpublished one."""
    directory = plain(path)
    name = os.path.basename(directory)
    if os.path.islink(directory) or not os.path.isdir(directory):
        return False
    listed = os.path.lexists(os.path.join(directory, manifest.NAME))
    return listed or step_of(name) is not None or is_pending_name(name)


def is_pending_name(name: str) -> bool:
    return name.startswith(_PENDING_PREFIX) and name.endswith(_PENDING_SUFFIX)


def _look_at(entry: os.DirEntry[str], with_pending: bool) -> Checkpoint | None:
    """None if it is no checkpoint. Raises OSError, except for files that the user may not read."""
    try:
        return _inspect(entry, with_pending)
    except PermissionError as error:
        step = step_of(entry.name)
        if step is None or entry.name.startswith("."):
            return None
        time_s = entry.stat(follow_symlinks=False).st_mtime
        return Checkpoint(
            Path(entry.path), DAMAGED, step, time_s, 0, 0, f"{entry.path}: {error.strerror}"
        )


def _inspect(entry: os.DirEntry[str], with_pending: bool) -> Checkpoint | None:
    name, path = entry.name, entry.path
    if is_pending_name(name) or (
        not name.startswith(".") and attributes.get(path, attributes.PENDING)
    ):
        return _look_at_pending(path) if with_pending else None
    if name.startswith("."):
        return None
    try:
        listed = manifest.read(path)
    except CheckpointError as error:
        return Checkpoint(
            Path(path), DAMAGED, step_of(name), entry.stat().st_mtime, *_measure(path), str(error)
        )
    if listed is None:
        if step_of(name) is None:
            return None
        return Checkpoint(
            Path(path), UNLISTED, step_of(name), entry.stat().st_mtime, *_measure(path)
        )
    problem = next(iter(_check_sizes(path, listed.files).values()), "")
    state = DAMAGED if problem else COMPLETE
    return Checkpoint(
        Path(path), state, listed.step, listed.time, listed.size, len(listed.files), problem
    )


def _look_at_pending(path: str) -> Checkpoint:
    told = attributes.get_json(path, attributes.PENDING)
    name = os.path.basename(path)
    if is_pending_name(name):
        name = name[len(_PENDING_PREFIX) : -len(_PENDING_SUFFIX)]
    missing = told.get("missing", [])
    step = told["step"] if told.get("step") is not None else step_of(name)
    problem = f"{len(missing)} of {told['ranks']} ranks have not committed" if missing else ""
    began = told.get("created_s", os.stat(path).st_mtime)
    return Checkpoint(Path(path), PENDING, step, began, *_measure(path), problem)


def _measure(path: str) -> tuple[int, int]:
    sizes = [
        found.st_size
        for name, found in walk(path)
        if stat.S_ISREG(found.st_mode) and not is_reserved(name)
    ]
    return sum(sizes), len(sizes)


def _check_sizes(path: str, listed: Files) -> dict[str, str]:
    """Name -> what is wrong with it."""
    problems = {}
    for name, (size, _) in listed.items():
        try:
            found = os.stat(os.path.join(path, name), follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            problems[name] = f"{name}: is missing"
            continue
        if not stat.S_ISREG(found.st_mode):
            problems[name] = f"{name}: is no regular file"
        elif found.st_size != size:
            problems[name] = f"{name}: has {found.st_size} bytes, not {size}"
    return problems


def verify(path: PathLike, on_bytes: Callable[[int], None] = lambda count: None) -> list[str]:
    """Compare the checkpoint ``path`` with its manifest; returns faults, each with the file's name.

    Files outside the manifest are not looked at. Raises CheckpointError without a manifest,
    OSError.
    """
    directory = plain(path)
    try:
        listed = manifest.read(directory)
    except CheckpointError as error:
        return [str(error)]
    if listed is None:
        if not os.path.isdir(directory):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), directory)
        raise CheckpointError(f"{directory}: has no manifest, so nothing says what belongs to it")
    problems = _check_sizes(directory, listed.files)
    for name, expected in listed.files.items():
        if name not in problems:
            problem = _compare(directory, name, expected, on_bytes)
            if problem:
                problems[name] = problem
    return [problems[name] for name in listed.files if name in problems]


def _compare(directory: str, name: str, expected: Digest, on_bytes: Callable[[int], None]) -> str:
    try:
        found = digest_files(directory, [name], on_bytes)[name]
    except OSError as error:
        return f"{name}: {error.strerror}"
    if found.size != expected.size:
        return f"{name}: has {found.size} bytes, not {expected.size}"
    if expected.blake3 and found.blake3 != expected.blake3:
        return f"{name}: its bytes are not those that were saved"
    return ""


def remove(path: PathLike) -> None:
    """Remove the checkpoint ``path``, its name first, in one step. Raises OSError."""
    directory = plain(path)
    if not stat.S_ISDIR(os.lstat(directory).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
    parent, name = os.path.split(directory)
    if attributes.is_aifs(parent):
        attributes.put(parent, attributes.REMOVE, name)
        return
    doomed = os.path.join(parent, f".{name}.{os.urandom(4).hex()}.removed")
    files.rename(directory, doomed)
    sync_dir(parent)
    remove_leftovers(parent)


def remove_leftovers(directory: str) -> None:
    """Finish crashed removals, and remove the rest of saves that crashed after publishing. Raises
    OSError."""
    names = set(os.listdir(directory))
    for name in names:
        path = os.path.join(directory, name)
        if _REMOVED.fullmatch(name):
            trees.remove_tree(path)
        elif _TEMPORARY.fullmatch(name) and name.removesuffix("ranks") + "pending" not in names:
            with suppress(FileNotFoundError):
                status = os.lstat(path)
                if time.time() - status.st_mtime > _TEMPORARY_AGE_S:
                    trees.remove_tree(path) if stat.S_ISDIR(status.st_mode) else files.unlink(path)


def keep(path: PathLike, policy: str, *, dry_run: bool = False) -> list[Path]:
    """Apply a policy such as 'last=3,every=1000' to the checkpoints in ``path``; returns those that
    go.

    A mount keeps to it from now on. Elsewhere it is applied once, except to checkpoints that a
    process of this host has open. Nothing goes, and a warning is logged, if steps and times of
    publishing disagree. Raises CheckpointError for an unreadable policy, OSError.
    """
    directory, wanted = plain(path), parse_keep(policy)
    found = {os.fsencode(one.path.name): one for one in list_checkpoints(directory)}
    used = _used_below(directory)
    candidates = [
        retention.ListedCheckpoint(
            name,
            one.step,
            int(one.time * 1e9),
            one.size,
            one.shown and one.may_be_whole,
            name in used,
        )
        for name, one in found.items()
    ]
    if disorder := retention.find_disorder(candidates):
        _log.warning("%s: all checkpoints stay, despite %s: %s", directory, policy, disorder)
    going = [found[one.name].path for one in retention.decide(candidates, wanted, time.time_ns())]
    if dry_run:
        return going
    if set_policy(directory, wanted):
        return going
    for one in going:
        with suppress(FileNotFoundError):  # another process does the same
            remove(one)
    return going


def set_policy(directory: str, wanted: retention.Keep) -> bool:
    """Set the policy of the directory's mount, if there is one. Raises OSError."""
    if not attributes.is_aifs(directory):
        return False
    text = retention.format_keep(wanted)
    if attributes.get(directory, attributes.KEEP) != text:
        try:
            attributes.put(directory, attributes.KEEP, text)
        except PermissionError as error:
            reason = "only its owner and root may say which checkpoints remain in it"
            raise PermissionError(error.errno, reason, directory) from None
    return True


def parse_keep(policy: str) -> retention.Keep:
    """Raises CheckpointError."""
    try:
        return retention.parse_keep(policy)
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _used_below(directory: str) -> set[bytes]:
    """Names to which symlinks beside them lead, or below which this host has files open."""
    top = os.path.realpath(directory)
    links = [entry.path for entry in os.scandir(directory) if entry.is_symlink()]
    used = {os.path.realpath(link) for link in links}
    for process in glob.glob("/proc/[0-9]*"):
        open_files = [f"{process}/cwd"]
        for kind in ("fd", "map_files"):
            with suppress(OSError):  # it has ended, or is another user's
                open_files += [
                    f"{process}/{kind}/{name}" for name in os.listdir(f"{process}/{kind}")
                ]
        for link in open_files:
            with suppress(OSError):  # closed meanwhile
                used.add(os.readlink(link))
    below = f"{top}/"
    return {
        os.fsencode(path[len(below) :].partition("/")[0]) for path in used if path.startswith(below)
    }
