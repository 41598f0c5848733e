"""Captured installations: the files that an installation adds to an existing directory, such as the
site-packages of an image. They are captured the first time, and put there from then on, instead of
installing.

    ENVIRONMENT/files/...        files that are new, or have changed, with modes and times
    ENVIRONMENT/captured.json    target (where that was), removed (paths that are gone)
    TARGET/.aifs-capture         while it is installed: the files that were there before

The process that installs or restores locks the last one. If it dies, or the installation fails,
that stays, and the next attempt begins from there: so half-installed files never count as having
been there.

Files are hard links of those of the environment where both lie on one filesystem: a program that
changes them must replace them, as installers do. Elsewhere they are copies."""

import json
import os
import re
import stat
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any

from aifs.client.checkpoints import hashing, locks
from aifs.client.startup import relocate
from aifs.client.startup.environments import environment
from aifs.client.startup.once import MadeDirectory, MakingFailed
from aifs.core import beneath, files, trees

_MARK, _FILES, _TOLD = ".aifs-capture", "files", "captured.json"
_TOLD_MAX = 64 << 20  # bytes
_NAMED = 5
"""Files that a message names at most."""

State = dict[str, list[int]]
"""By path: kind, and, except of directories, inode, size and time of change."""


def capture(
    directory: str | os.PathLike[str],
    *,
    key: Mapping[str, Any],
    target: str | os.PathLike[str],
    install: Callable[[], object],
    expire_s: float | None = None,
) -> MadeDirectory:
    """Bring to ``target`` the files that ``install()`` puts there: call it, and keep them as an
    environment, or take those of the environment with this key. Of all callers on all hosts one
    installs.

    ``target`` may differ from the captured path: text that names the old one is changed, compiled
    Python left out, other binary files changed if the new path is not longer; else nothing is
    restored. Owners and attributes are not kept; restored files are not synced. Raises as
    ``environment``; MakingFailed.
    """
    path = os.path.realpath(target)
    trees.make_dir(path)
    with _alone(path) as mark:
        whole = {**key, "captured": True}
        found = environment(
            directory,
            key=whole,
            make=lambda made: _make(made, path, mark, install),
            expire_s=expire_s,
        )
        try:
            if not found.made:
                _restore(found.path, path)
        except BaseException:
            found.close()
            raise
        files.unlink(os.path.join(path, _MARK))
    return found


@contextmanager
def _alone(target: str) -> Iterator[int]:
    """Exclude others on this filesystem from ``target``: a descriptor of its mark."""
    path = os.path.join(target, _MARK)
    while True:
        fd = files.open_file(path, create=True, foreign=True)
        try:
            locks.wait(fd, 0, shared=False)
            if locks.is_at(path, fd):
                yield fd
                return
        finally:
            files.close_file(fd)


# --- the first time ---


def _make(made: str, target: str, mark: int, install: Callable[[], object]) -> None:
    data = files.read_at(mark, os.fstat(mark).st_size, 0)
    before = _decode_state(data)
    if before is None:
        before = _look(target)
        data = json.dumps(before).encode()
        files.write_at(mark, data, 0)
        files.truncate(mark, len(data))
    install()
    after = _look(target)
    changed = [path for path, state in after.items() if before.get(path) != state]
    removed = [path for path in before if path not in after]
    gone = set(removed)
    kept = os.path.join(made, _FILES)
    trees.make_dir(kept)
    for path in changed:
        parts = path.split(os.sep)
        for count in range(1, len(parts) + 1):  # directories that were there, too
            part = os.path.join(*parts[:count])
            if not os.path.lexists(os.path.join(kept, part)):
                _put(os.path.join(target, part), os.path.join(kept, part), linked=False)
    told = {
        "target": target,
        "removed": [path for path in removed if os.path.dirname(path) not in gone],
    }
    trees.replace_file(os.path.join(made, _TOLD), json.dumps(told).encode())


def _look(target: str) -> State:
    """Raises MakingFailed for other files than regular ones, directories, symlinks; OSError."""
    found = {}
    for path, status in hashing.walk(target):
        if path == _MARK:
            continue
        kind = stat.S_IFMT(status.st_mode)
        if kind not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
            raise MakingFailed(f"{target}/{path}: is no file, directory or symlink: not captured")
        found[path] = [kind]
        if kind != stat.S_IFDIR:  # whose time and size change with what is in it
            found[path] += [status.st_ino, status.st_size, status.st_ctime_ns]
    return found


def _decode_state(data: bytes) -> State | None:
    """None for an unwritten or torn mark: nothing was installed yet."""
    try:
        value = json.loads(data)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


# --- from then on ---


def _restore(made: str, target: str) -> None:
    """May be repeated after an interruption."""
    told = _told(made)
    source = os.path.join(made, _FILES)
    entries = list(hashing.walk(source))
    moved = None if told["target"] == target else _Move(told["target"], target)
    rewritten = set() if moved is None else moved.plan(source, entries)
    for path in told["removed"]:
        with suppress(FileNotFoundError, NotADirectoryError), _reached(target, path) as to:
            _remove(to)

    def restore(path: str, status: os.stat_result) -> None:
        with _reached(target, path) as to:
            put(path, status, to)

    def put(path: str, status: os.stat_result, to: str) -> None:
        if moved is not None and path in rewritten:
            data = moved.rewrite(os.path.join(source, path))
            _make_way(to)
            if data is not None:
                with _new(to, status) as fd:
                    files.write_at(fd, data, 0)
        elif moved is not None and stat.S_ISLNK(status.st_mode):
            link = moved.text(os.fsencode(os.readlink(os.path.join(source, path))))
            _make_way(to)
            trees.replace_symlink(to, os.fsdecode(link))
        elif not _is_same(to, status):
            _put(os.path.join(source, path), to, linked=True)

    directories = [entry for entry in entries if stat.S_ISDIR(entry[1].st_mode)]
    others = [entry for entry in entries if not stat.S_ISDIR(entry[1].st_mode)]
    for entry in directories:
        restore(*entry)
    above = ["", *(path for path, _ in directories)]
    _remove_temporary(target, above, {path for path, _ in others})
    with ThreadPoolExecutor(hashing.WORKERS) as pool:
        list(pool.map(lambda entry: restore(*entry), others))  # which raises what they raise
    for path, _ in entries:
        if rewritten and path.endswith(".dist-info/RECORD"):
            with _reached(target, path) as record:
                relocate.note(target, path, rewritten, record)


@contextmanager
def _reached(target: str, path: str) -> Iterator[str]:
    """Another path below the target, without symlinks, which others may put there."""
    top = beneath.open_directory(target)
    try:
        above = beneath.reach(os.path.dirname(path), top)
    finally:
        os.close(top)
    with beneath.path_of(above, os.path.join(target, os.path.dirname(path))) as at:
        yield os.path.join(at, os.path.basename(path))


def _remove_temporary(target: str, directories: Sequence[str], wanted: Container[str]) -> None:
    """Remove names that a killed process left beside ``wanted`` files."""
    for directory in directories:
        with _reached(target, os.path.join(directory, "")) as at:
            for name in os.listdir(at):
                if os.path.join(directory, trees.whose(name)) in wanted:
                    files.unlink(os.path.join(at, name))


def _told(made: str) -> dict[str, Any]:
    """Raises MakingFailed if one is missing, or out of the target."""
    path = os.path.join(made, _TOLD)
    try:
        told = json.loads(files.read_foreign(path, _TOLD_MAX) or b"")
        paths = [told["target"], *told["removed"]]
        if not all(isinstance(one, str) for one in paths):
            raise TypeError
        if any(os.path.isabs(one) or ".." in one.split("/") for one in told["removed"]):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise MakingFailed(f"{path}: is no account of what was captured") from None
    return told


def _is_same(path: str, wanted: os.stat_result) -> bool:
    """By mode, size and time, as installed."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    if found.st_mode != wanted.st_mode or stat.S_ISLNK(wanted.st_mode):
        return False
    return stat.S_ISDIR(wanted.st_mode) or (
        (found.st_size, found.st_mtime_ns) == (wanted.st_size, wanted.st_mtime_ns)
    )


def _remove(path: str) -> None:
    _make_way(path)
    if os.path.lexists(path):
        files.unlink(path)


def _make_way(path: str) -> None:
    if os.path.isdir(path) and not os.path.islink(path):
        trees.remove_tree(path)


def _put(source: str, to: str, linked: bool) -> None:
    """Make the file, symlink or empty directory; ``linked``: a hard link if possible. Directories
    there stay."""
    status = os.lstat(source)
    if stat.S_ISDIR(status.st_mode):
        if os.path.lexists(to) and (os.path.islink(to) or not os.path.isdir(to)):
            files.unlink(to)
        if trees.make_dir(to):
            trees.set_mode(to, stat.S_IMODE(status.st_mode))
        return
    _make_way(to)
    if stat.S_ISLNK(status.st_mode):
        trees.replace_symlink(to, os.readlink(source))
    elif not (linked and trees.replace_by_link(to, source)):
        _copy(source, to, status)


def _copy(source: str, to: str, status: os.stat_result) -> None:
    fd = files.open_file(source, write=False, foreign=True)
    try:
        with _new(to, status) as copy:
            files.copy_range(fd, 0, copy, 0, status.st_size)
    finally:
        files.close_file(fd)


@contextmanager
def _new(path: str, status: os.stat_result) -> Iterator[int]:
    """A file for writing, which then gets mode, time and name."""
    temporary = trees.beside(path)
    fd = trees.create_file(temporary)
    try:
        yield fd
        files.copy_mode(fd, status)
        files.set_mtime(fd, status.st_mtime_ns)
    except BaseException:
        files.unlink(temporary)
        raise
    finally:
        files.close_file(fd)
    files.rename(temporary, path)


class _Move:
    """From one path to another one, of any length."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = os.fsencode(old), os.fsencode(new)
        path = re.escape(self._old) + rb"(?![A-Za-z0-9._-])"  # and no other name that begins so
        self._path = re.compile(path)
        self._string = re.compile(path + rb"[^\0]*")

    def text(self, data: bytes) -> bytes:
        """``data`` with the new path."""
        return self._path.sub(lambda _: self._new, data)

    def plan(self, source: str, entries: list[tuple[str, os.stat_result]]) -> set[str]:
        """The files that say the old path. Raises MakingFailed if one cannot say the new one."""
        says, refused = set(), []
        for path, status in entries:
            if stat.S_ISREG(status.st_mode):
                data = files.read_file(os.path.join(source, path)) or b""
                if self._path.search(data):
                    says.add(path)
                    if b"\0" in data and not path.endswith(".pyc"):
                        refused.append(path)
        if refused and len(self._new) > len(self._old):
            more = f" and {len(refused) - _NAMED} more" if len(refused) > _NAMED else ""
            raise MakingFailed(
                f"{os.fsdecode(self._new)}: binary files say the path that they were installed to, "
                f"{os.fsdecode(self._old)}, and have no room for a longer one: "
                f"{', '.join(sorted(refused)[:_NAMED])}{more}; choose a path of at most "
                f"{len(self._old)} bytes"
            )
        return says

    def rewrite(self, path: str) -> bytes | None:
        """The file's new content; None: it is left out, because Python makes it anew."""
        data = files.read_file(path) or b""
        if b"\0" not in data:
            return self.text(data)
        if path.endswith(".pyc"):  # its strings have lengths
            return None
        return self._string.sub(lambda found: self.text(found[0]).ljust(len(found[0]), b"\0"), data)
