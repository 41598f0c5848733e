"""Environments: directories that are made once for their key, by one of all ranks and hosts that
want them, and used in place by all.

    DIR/NAME                 an environment, whole; NAME is a hash of its key
    DIR/.aifs-env/NAME       its record: JSON (EnvironmentRecord); its time of change is that of its
                             last use
    DIR/.xxxxxxxx            one that is being made, or removed: a name as long as NAME

Locks of the record's file: byte 0 has who makes or removes the environment, byte 1 share all who
use it. The kernel lets go of them when a process has ended, however it did. On a filesystem without
locks two may make the same environment; the second throws its own away.

Several users may share DIR: so a record is data of somebody else. It names nothing but what is
beside it, no symlink is followed, and where everybody may make names in DIR an environment is used
only if the caller, root, or who owns DIR has made it.

Rules (S3, S4 of docs/startup.md): an environment without its name does not exist; a maker that dies
loses its lock, and the next one removes what it left; one in use is never removed.
"""

import errno
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from aifs.client import hashing, locks
from aifs.client.startup.keys import DIGITS, name_of, platform_key
from aifs.client.startup.relocate import relocate
from aifs.core import files, trees
from aifs.core.errors import UserError

RECORDS = ".aifs-env"

_MAKER, _USERS = 0, 1  # bytes that are locked

_NAME = re.compile(f"[0-9a-f]{{{DIGITS}}}")
_PENDING = re.compile(rf"\.[0-9a-f]{{{DIGITS - 1}}}")


class EnvironmentFailed(UserError):
    """An environment could not be made, or is not there."""

    exit_code = 10


@dataclass
class EnvironmentRecord:
    """What is known of an environment. A record that cannot be read is taken for an empty one."""

    key: Mapping[str, Any] | None = None
    """None until it has been made."""

    made_s: float = 0.0
    """When, in seconds since the epoch."""

    took_s: float = 0.0
    """How long it took to make it."""

    bytes: int = 0
    """Of all files."""

    expire_s: float | None = None
    """It may be removed when nobody has used it for so long; None: never."""

    making: str = ""
    """The name, beside it, under which it is being made or removed."""

    attempt: int = 0
    """How often somebody began to make it."""

    failed: str = ""
    """Why the last attempt failed."""


# What the fields of a record may be: others may have written it.
_TYPES: dict[str, tuple[type, ...]] = {
    "key": (dict, type(None)),
    "made_s": (int, float),
    "took_s": (int, float),
    "bytes": (int,),
    "expire_s": (int, float, type(None)),
    "making": (str,),
    "attempt": (int,),
    "failed": (str,),
}


class Environment:
    """An environment that is in use until ``close``, or until this process has ended."""

    def __init__(self, path: str, made: bool, record: EnvironmentRecord, fd: int) -> None:
        self.path = path
        self.made = made  # by this call
        self.record = record
        self.fd = fd  # a process that inherits it uses the environment, too; -1: closed

    def close(self) -> None:
        """It is in use no more. May be repeated."""
        if self.fd >= 0:
            files.close_file(self.fd)
            self.fd = -1

    def __fspath__(self) -> str:
        return self.path

    def __enter__(self) -> "Environment":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def environment(
    directory: str | os.PathLike[str],
    *,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None = None,
) -> Environment:
    """The environment for ``key`` and this platform (``platform_key``, which ``key`` may override),
    below ``directory``; made by ``make(path)`` if it is not there.

    One of all callers, on any host, makes it; the others wait. ``make`` fills the empty directory
    ``path``, which is renamed afterwards; where files in it say its name they then say the new
    one. It is durable, with all in it, when it has its name. If ``make`` fails those
    who waited for it fail, too; the next call tries again.

    ``expire_s``: who makes another one below ``directory`` removes this one when nobody has used it
    for so many seconds. Raises what ``make`` raises, EnvironmentFailed, OSError, TypeError for a
    key that JSON does not have.
    """
    above = os.path.realpath(directory)
    whole = {**platform_key(), **key}
    name = name_of(whole)
    trees.make_dir(os.path.join(above, RECORDS))
    before = _read(above, name)
    seen = before.attempt - bool(before.making)  # which is, or may be, under way
    fd = _in_use(above, name)
    try:
        made = False
        if not _is_there(above, name):
            with _as_maker(fd):
                made = _make_if_missing(above, name, whole, make, expire_s, seen, fd)
        _note_use(fd)
        found = Environment(os.path.join(above, name), made, _read_open(fd), fd)
    except BaseException:
        files.close_file(fd)
        raise
    if made:
        with suppress(OSError):  # room is a matter of who needs it
            expire(above)
    return found


def environment_at(path: str | os.PathLike[str]) -> Environment:
    """The environment with this path, in use. Raises EnvironmentFailed, OSError."""
    above, name = os.path.split(os.path.realpath(path))
    if not _NAME.fullmatch(name) or not os.path.exists(_record_path(above, name)):
        raise EnvironmentFailed(f"{os.fspath(path)}: is no environment; aifs env ls lists them")
    fd = _in_use(above, name)
    try:
        if not _is_there(above, name):
            raise EnvironmentFailed(f"{os.fspath(path)}: has not been made, or was removed")
    except BaseException:
        files.close_file(fd)
        raise
    _note_use(fd)
    return Environment(os.path.join(above, name), False, _read_open(fd), fd)


def list_environments(
    directory: str | os.PathLike[str],
) -> dict[str, tuple[EnvironmentRecord, float]]:
    """What is known of each environment that is there, by its name, and when it was used last, in
    seconds since the epoch. Raises OSError."""
    above = os.path.realpath(directory)
    found = {}
    for name in _names(above):
        with suppress(FileNotFoundError):
            used_s = os.lstat(_record_path(above, name)).st_mtime
            if _is_dir(os.path.join(above, name)):
                found[name] = (_read(above, name), used_s)
    return found


def expire(directory: str | os.PathLike[str]) -> list[str]:
    """Remove the environments whose time is over and that nobody uses, and what makers left that
    died; returns the names. Raises OSError."""
    above = os.path.realpath(directory)
    return [name for name in _names(above) if _expire(above, name)]


def _names(above: str) -> list[str]:
    try:
        found = os.listdir(os.path.join(above, RECORDS))
    except FileNotFoundError:
        return []
    return sorted(name for name in found if _NAME.fullmatch(name))


def _is_dir(path: str) -> bool:
    """A symlink is none."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_there(above: str, name: str) -> bool:
    """Whether the environment has been made. Raises EnvironmentFailed if it is not one that the
    caller should run: programs of somebody who may make names there, as everybody may."""
    path = os.path.join(above, name)
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return False
    shared = os.stat(above)
    trusted = (os.geteuid(), 0, shared.st_uid)
    if not stat.S_ISDIR(found.st_mode):
        raise EnvironmentFailed(f"{path}: is no environment, but in the place of one; remove it")
    if shared.st_mode & stat.S_IWOTH and found.st_uid not in trusted:
        raise EnvironmentFailed(
            f"{path}: was made by user {found.st_uid}, in a directory that everybody may write to; "
            "use one that only trusted users may write to"
        )
    return True


def _record_path(above: str, name: str) -> str:
    return os.path.join(above, RECORDS, name)


def _in_use(above: str, name: str) -> int:
    """A descriptor of the record, which is made if it is missing, with the lock of those who use
    the environment."""
    path = _record_path(above, name)
    while True:
        try:
            fd = trees.create_file(path)
        except FileExistsError:
            try:
                fd = _open(path)
            except FileNotFoundError:
                continue
        try:
            locks.wait(fd, _USERS, shared=True)
            if locks.is_at(path, fd):
                return fd
        except BaseException:
            files.close_file(fd)
            raise
        files.close_file(fd)  # who removed it had the lock


def _open(path: str) -> int:
    """Users who may not write may use what others have made."""
    try:
        return files.open_file(path, foreign=True)
    except PermissionError:
        return files.open_file(path, write=False, foreign=True)


def _note_use(fd: int) -> None:
    with suppress(PermissionError):  # the record is somebody else's
        files.set_mtime(fd, time.time_ns())


@contextmanager
def _as_maker(fd: int) -> Iterator[None]:
    try:
        locks.wait(fd, _MAKER, shared=False)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise EnvironmentFailed(
            "the environment has not been made, and its record belongs to somebody else"
        ) from None
    try:
        yield
    finally:
        locks.unlock(fd, _MAKER)


def _make_if_missing(
    above: str,
    name: str,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None,
    seen: int,
    fd: int,
) -> bool:
    """Whether this call has made it. ``seen``: attempts that had ended when the caller came."""
    record = _read_open(fd)
    if _is_there(above, name):
        return False
    if record.failed and record.attempt > seen:
        raise EnvironmentFailed(f"the environment {name} could not be made: {record.failed}")
    if record.making:  # by one that died
        trees.remove_tree(os.path.join(above, record.making))
    began_s = time.monotonic()
    pending = _pending(name)
    path = os.path.join(above, pending)
    _write(fd, EnvironmentRecord(making=pending, attempt=record.attempt + 1))
    try:
        trees.make_dir(path)
        make(path)
        relocate(path, pending, name)
        sizes = hashing.sync_files(path, hashing.list_files(path), hash=False)
        hashing.sync_directories(path)
        took_s = time.monotonic() - began_s
        done = EnvironmentRecord(
            key=key,
            made_s=time.time(),
            took_s=took_s,
            bytes=sum(digest.size for digest in sizes.values()),
            expire_s=expire_s,
            attempt=record.attempt + 1,
        )
        made = _show(path, os.path.join(above, name))
    except BaseException as error:
        trees.remove_tree(path)
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _write(fd, EnvironmentRecord(attempt=record.attempt + 1, failed=what))
        raise
    _write(fd, done)
    return made


def _pending(name: str) -> str:
    """Another name of the same length, which ``ls`` does not show."""
    return "." + secrets.token_hex(len(name))[: len(name) - 1]


def _show(path: str, final: str) -> bool:
    """Give it its name. False: another one has it, on a filesystem without locks."""
    try:
        trees.rename_new(path, final)
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        trees.remove_tree(path)
        return False
    files.sync_dir(os.path.dirname(final))
    return True


def _expire(above: str, name: str) -> bool:
    """Whether the environment was removed."""
    path = _record_path(above, name)
    try:
        fd = files.open_file(path, foreign=True)
    except (FileNotFoundError, PermissionError):  # it is somebody else's to remove
        return False
    try:
        locks.lock(fd, _USERS)  # so nobody makes it, either
        locks.lock(fd, _MAKER)
        record = _read_open(fd)
        idle_s = time.time() - os.fstat(fd).st_mtime
        is_over = record.expire_s is not None and idle_s > record.expire_s
        final = os.path.join(above, name)
        if not locks.is_at(path, fd) or (not is_over and _is_dir(final)):
            return False
        # What is left when this process dies is found by the record.
        hidden = record.making or _pending(name)
        record.making = hidden
        _write(fd, record)
        with suppress(FileNotFoundError):
            files.rename(final, os.path.join(above, hidden))
        trees.remove_tree(os.path.join(above, hidden))
        files.unlink(path)
        return is_over
    except locks.Locked:
        return False
    finally:
        files.close_file(fd)


def _read(above: str, name: str) -> EnvironmentRecord:
    try:
        fd = files.open_file(_record_path(above, name), write=False, foreign=True)
    except FileNotFoundError:
        return EnvironmentRecord()
    try:
        return _read_open(fd)
    finally:
        files.close_file(fd)


def _read_open(fd: int) -> EnvironmentRecord:
    return _decode(files.read_at(fd, os.fstat(fd).st_size, 0))


def _decode(data: bytes) -> EnvironmentRecord:
    try:
        values = json.loads(data)
        known = {name: value for name, value in values.items() if name in _TYPES}
    except (ValueError, AttributeError, RecursionError):
        return EnvironmentRecord()
    if not all(isinstance(value, _TYPES[name]) for name, value in known.items()):
        return EnvironmentRecord()
    record = EnvironmentRecord(**known)
    if not _PENDING.fullmatch(record.making):  # it is going to be removed
        record.making = ""
    return record


def _write(fd: int, record: EnvironmentRecord) -> None:
    """Where it is: the locks are those of this file. A torn one counts as empty."""
    data = json.dumps(asdict(record)).encode()
    files.write_at(fd, data, 0)
    files.truncate(fd, len(data))
    files.sync_file(fd)
