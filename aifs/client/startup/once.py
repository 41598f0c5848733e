"""Directories that are made once for their name, by one of all ranks and hosts that want them, and
used in place by all: environments and images.

    DIR/NAME                 one that has been made, whole; NAME is a hash of what it is made from
    DIR/.aifs-env/NAME       its record: JSON (MadeRecord); its time of change is that of its last
                             use
    DIR/.xxxxxxxx            one that is being made, or removed: a name as long as NAME

Locks of the record's file: the process that makes or removes the directory has byte 0, all that use
it share byte 1. The kernel lets go of them when a process has ended, however it did. On a
filesystem without locks two may make the same directory; the second throws its own away.

Several users may share DIR, so a record is not trusted. It can only name directories beside it that
belong to the record's owner, and no symlink is followed. Where everybody may make names in DIR, a
directory there is used only if the caller, root, or the owner of DIR has made it. DIR is open all
the while, so it stays the same one even if another directory gets its name.

Rules (docs/guide/startup.md): a directory exists when it has got its name; a maker that dies loses
its lock, and the next one removes the rest of it; one in use is never removed.
"""

import errno
import json
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, NamedTuple

from aifs.client.checkpoints import locks
from aifs.core import beneath, clock, files, trees
from aifs.core.errors import UserError

RECORDS = ".aifs-env"

_MAKER, _USERS = 0, 1  # bytes that are locked
_NUMBER_MAX = 1 << 62
_RECORD_MAX = 16 << 20  # bytes; the files that a key is made of are in it

_NAME = re.compile("[0-9a-f]{32,64}")
_PENDING = re.compile(r"\.[0-9a-f]{31,63}")


class MakingFailed(UserError):
    """A directory could not be made, or is not there."""

    exit_code = 10


class MadeRecord(NamedTuple):
    """The record of a directory. One that cannot be read is taken for an empty one."""

    key: Mapping[str, Any] | None = None
    """None until it has been made."""

    made_s: float = 0.0
    """When, in seconds since the epoch."""

    took_s: float = 0.0
    """How long it took to make it."""

    bytes: int = 0
    """Of all files."""

    expire_s: float | None = None
    """It may be removed after so long without a use; None: never."""

    making: str = ""
    """The name, beside it, under which it is being made or removed."""

    attempt: int = 0
    """How many attempts to make it have begun."""

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


class MadeDirectory:
    """One that is in use until ``close``, or until this process has ended."""

    def __init__(self, path: str, made: bool, record: MadeRecord, fd: int) -> None:
        self.path = path
        self.made = made  # by this call
        self.record = record
        self.fd = fd  # a process that inherits it uses the directory, too; -1: closed

    def close(self) -> None:
        """It is in use no more. May be repeated."""
        if self.fd >= 0:
            files.close_file(self.fd)
            self.fd = -1

    def __fspath__(self) -> str:
        return self.path

    def __enter__(self) -> "MadeDirectory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def make_once(
    directory: str | os.PathLike[str],
    name: str,
    *,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None = None,
    owner: int | None = None,
) -> MadeDirectory:
    """The directory ``name`` (32 to 64 hexadecimal digits) below ``directory``; made by
    ``make(path)`` if it is missing.

    One of all callers, on any host, makes it; the others wait. ``make`` fills the empty directory
    ``path``, whose name is as long, and which is renamed afterwards. It is durable, with all in it,
    when it has its name. If ``make`` fails nothing is left, and callers that waited for it fail,
    too; the next call tries again. ``key`` goes to the record.

    ``expire_s``: after so many seconds without a use, the next call that makes another one below
    ``directory`` removes this one. ``owner``: of ``directory``, no symlink then, and of all that is
    used in it; those of other users are refused. Raises the errors of ``make``, MakingFailed,
    OSError."""
    with _opened(directory, owner, make=True) as place:
        place.require_trusted_records()
        before = _read(place.records, name)
        seen = before.attempt - bool(before.making)  # which is, or may be, under way
        fd = _in_use(place.records, name)
        try:
            made = False
            if not _is_there(place, name):
                with _as_maker(fd, name):
                    made = _make_if_missing(place, name, key, make, expire_s, seen, fd)
            _note_use(fd)
            found = MadeDirectory(os.path.join(place.path, name), made, _read_open(fd), fd)
        except BaseException:
            files.close_file(fd)
            with suppress(OSError):  # the record alone, unless a caller waits for it
                _expire(place, name)
            raise
        if made:
            with suppress(OSError):  # making room is no part of this call
                _expire_all(place)
    return found


def made_at(path: str | os.PathLike[str], owner: int | None = None) -> MadeDirectory:
    """The one with this path, in use; ``owner``: see ``make_once``. Raises MakingFailed,
    OSError."""
    above, name = os.path.split(os.path.realpath(path))
    unknown = MakingFailed(f"{os.fspath(path)}: is no environment or image")
    try:
        with _opened(above, owner) as place:
            if not _NAME.fullmatch(name) or not os.path.lexists(os.path.join(place.records, name)):
                raise unknown
            place.require_trusted_records()
            fd = _in_use(place.records, name)
            try:
                if not _is_there(place, name):
                    raise MakingFailed(f"{os.fspath(path)}: has not been made, or was removed")
            except BaseException:
                files.close_file(fd)
                raise
            _note_use(fd)
            return MadeDirectory(os.path.join(above, name), False, _read_open(fd), fd)
    except FileNotFoundError:
        raise unknown from None


def list_made(directory: str | os.PathLike[str]) -> dict[str, tuple[MadeRecord, float]]:
    """By name, the record of each made directory, and its last use (s since the epoch). Raises
    MakingFailed, OSError."""
    found = {}
    with suppress(FileNotFoundError), _opened(directory) as place:
        for name in _names(place.records):
            with suppress(FileNotFoundError):
                used_s = os.lstat(os.path.join(place.records, name)).st_mtime
                if _is_dir(os.path.join(place.at, name)):
                    found[name] = (_read(place.records, name), used_s)
    return found


def expire(directory: str | os.PathLike[str]) -> list[str]:
    """Remove expired unused directories, and dead makers'; returns the names. Raises MakingFailed,
    OSError."""
    with suppress(FileNotFoundError), _opened(directory) as place:
        return _expire_all(place)
    return []


def remove(path: str | os.PathLike[str], owner: int | None = None) -> None:
    """Remove the one with this path; ``owner``: see ``make_once``. Raises MakingFailed if in use,
    or another user's; OSError."""
    made_at(path, owner).close()
    above, name = os.path.split(os.path.realpath(path))
    with _opened(above, owner) as place:
        if not _expire(place, name, now=True):
            raise MakingFailed(f"{os.fspath(path)}: is in use, or belongs to somebody else")


class _Place(NamedTuple):
    """A directory that is open, and the records in it."""

    path: str
    """As others know it."""
    at: str
    """Leads to the same directory whatever gets its name meanwhile, as does ``records``."""
    records: str
    owner: int | None
    """All that is used must belong to this user; None: to a user that may be trusted."""

    def require_trusted_records(self) -> None:
        self.require_trusted(RECORDS, os.stat(self.records))

    def require_trusted(self, name: str, found: os.stat_result) -> None:
        """Raises MakingFailed if an untrusted user may have made ``name``: everybody may here."""
        if self.owner is None:
            is_foreign = beneath.is_foreign(found, os.stat(self.at))
        else:
            is_foreign = found.st_uid != self.owner
        if is_foreign:
            raise _untrusted(os.path.join(self.path, name), found)


def _untrusted(path: str, found: os.stat_result) -> MakingFailed:
    return MakingFailed(
        f"{path}: was made by user {found.st_uid}, where others may make names; remove it, or use "
        "a directory that only trusted users may write to"
    )


@contextmanager
def _opened(
    directory: str | os.PathLike[str], owner: int | None = None, make: bool = False
) -> Iterator[_Place]:
    """``make``: directory and records, if missing. Raises MakingFailed, FileNotFoundError,
    OSError."""
    path = os.path.realpath(directory)
    if owner is not None:
        above, name = os.path.split(os.path.abspath(directory))
        path = os.path.join(os.path.realpath(above), name)
    if make:
        trees.make_dir(path)
    with _without_symlink(path, path) as at:
        found = os.stat(at)
        if owner not in (None, found.st_uid):
            raise _untrusted(path, found)
        if make:
            trees.make_dir(os.path.join(at, RECORDS))
        with _without_symlink(os.path.join(at, RECORDS), os.path.join(path, RECORDS)) as records:
            yield _Place(path, at, records, owner)


@contextmanager
def _without_symlink(path: str, known_as: str) -> Iterator[str]:
    """Another path of the directory, valid in the context; errors say ``known_as``. Raises
    MakingFailed for no directory."""
    try:
        fd = beneath.open_directory(path)
    except NotADirectoryError:
        raise MakingFailed(
            f"{known_as}: is no directory, but in the place of one; remove it"
        ) from None
    with beneath.path_of(fd, known_as) as at:
        yield at


def _names(records: str) -> list[str]:
    try:
        found = os.listdir(records)
    except FileNotFoundError:
        return []
    return sorted(name for name in found if _NAME.fullmatch(name))


def _is_dir(path: str) -> bool:
    """A symlink is none."""
    try:
        return stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return False


def _is_there(place: _Place, name: str) -> bool:
    """Whether it was made. Raises MakingFailed if the caller should not run it."""
    try:
        found = os.lstat(os.path.join(place.at, name))
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(found.st_mode):
        path = os.path.join(place.path, name)
        raise MakingFailed(f"{path}: is no directory, but in the place of one; remove it")
    place.require_trusted(name, found)
    return True


def _in_use(records: str, name: str) -> int:
    """A descriptor of the record, made if missing, with the users' lock."""
    path = os.path.join(records, name)
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
        files.close_file(fd)  # the process that removed it had the lock


def _open(path: str) -> int:
    """Users who may not write may use what others have made."""
    try:
        return files.open_file(path, foreign=True)
    except PermissionError:
        return files.open_file(path, write=False, foreign=True)


def _note_use(fd: int) -> None:
    with suppress(PermissionError):  # the record is another user's
        files.set_mtime(fd, clock.kernel_ns())


@contextmanager
def _as_maker(fd: int, name: str) -> Iterator[None]:
    try:
        locks.wait(fd, _MAKER, shared=False)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        raise MakingFailed(
            f"{name} has not been made, and its record belongs to somebody else"
        ) from None
    try:
        yield
    finally:
        locks.unlock(fd, _MAKER)


def _make_if_missing(
    place: _Place,
    name: str,
    key: Mapping[str, Any],
    make: Callable[[str], object],
    expire_s: float | None,
    seen: int,
    fd: int,
) -> bool:
    """Whether this call made it. ``seen``: attempts ended when the caller came."""
    record = _read_open(fd)
    if _is_there(place, name):
        return False
    if record.failed and record.attempt > seen:
        raise MakingFailed(f"{place.path}/{name} could not be made: {record.failed}")
    if record.making and _is_of_record(place, record.making, fd):  # by one that died
        trees.remove_tree(os.path.join(place.at, record.making))
    began_s = time.monotonic()
    pending = _pending(name)
    path = os.path.join(place.path if place.owner is None else place.at, pending)
    _write(fd, MadeRecord(making=pending, attempt=record.attempt + 1))
    try:
        from aifs.client.checkpoints import hashing  # callers that find it there need none of this

        trees.make_dir(os.path.join(place.at, pending))
        make(path)
        sizes = hashing.sync_files(path, hashing.list_files(path), hash=False)
        hashing.sync_directories(path)
        took_s = time.monotonic() - began_s
        done = MadeRecord(
            key=key,
            made_s=time.time(),
            took_s=took_s,
            bytes=sum(digest.size for digest in sizes.values()),
            expire_s=expire_s,
            attempt=record.attempt + 1,
        )
        made = _show(place, pending, name)
    except BaseException as error:
        trees.remove_tree(os.path.join(place.at, pending))
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _write(fd, MadeRecord(attempt=record.attempt + 1, failed=what))
        raise
    _write(fd, done)
    return made


def _pending(name: str) -> str:
    """Another name of this length, hidden from ``ls``."""
    return "." + os.urandom(len(name)).hex()[: len(name) - 1]


def _show(place: _Place, pending: str, name: str) -> bool:
    """Name it. False: another one has the name, without locks."""
    path = os.path.join(place.at, pending)
    try:
        trees.rename_new(path, os.path.join(place.at, name))
    except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
            raise
        trees.remove_tree(path)
        return False
    files.sync_dir(place.at)
    return True


def _is_of_record(place: _Place, name: str, fd: int) -> bool:
    """Whether the directory belongs to the owner of its record ``fd``: others may be making it."""
    with suppress(FileNotFoundError):
        found = os.lstat(os.path.join(place.at, name))
        return found.st_uid == os.fstat(fd).st_uid
    return True


def _expire_all(place: _Place) -> list[str]:
    return [name for name in _names(place.records) if _expire(place, name)]


def _expire(place: _Place, name: str, now: bool = False) -> bool:
    """Whether it was removed. ``now``: even if its time is not over."""
    path = os.path.join(place.records, name)
    try:
        fd = files.open_file(path, foreign=True)
    except (FileNotFoundError, PermissionError):  # another user has to remove it
        return False
    try:
        locks.lock(fd, _USERS)  # so no process makes it, either
        locks.lock(fd, _MAKER)
        record = _read_open(fd)
        idle_s = time.time() - os.fstat(fd).st_mtime
        is_over = now or (record.expire_s is not None and idle_s > record.expire_s)
        final = os.path.join(place.at, name)
        if not locks.is_at(path, fd) or (not is_over and _is_dir(final)):
            return False
        # What is left when this process dies is found by the record.
        hidden = record.making or _pending(name)
        if not (_is_of_record(place, hidden, fd) and (now or _is_of_record(place, name, fd))):
            return False
        _write(fd, record._replace(making=hidden))
        with suppress(FileNotFoundError):
            files.rename(final, os.path.join(place.at, hidden))
        trees.remove_tree(os.path.join(place.at, hidden))
        files.unlink(path)
        return is_over
    except locks.Locked:
        return False
    finally:
        files.close_file(fd)


def _read(records: str, name: str) -> MadeRecord:
    try:
        fd = files.open_file(os.path.join(records, name), write=False, foreign=True)
    except FileNotFoundError:
        return MadeRecord()
    try:
        return _read_open(fd)
    finally:
        files.close_file(fd)


def _read_open(fd: int) -> MadeRecord:
    return _decode(files.read_at(fd, _RECORD_MAX, 0))


def _decode(data: bytes) -> MadeRecord:
    try:
        values = json.loads(data)
        known = {name: value for name, value in values.items() if name in _TYPES}
    except (ValueError, AttributeError, RecursionError):
        return MadeRecord()
    if not all(isinstance(value, _TYPES[name]) for name, value in known.items()):
        return MadeRecord()
    numbers = [value for value in known.values() if isinstance(value, int | float)]
    if not all(0 <= number < _NUMBER_MAX for number in numbers):
        return MadeRecord()
    record = MadeRecord(**known)
    try:
        clock.require_time(record.made_s)
    except ValueError:
        return MadeRecord()
    is_name = _PENDING.fullmatch(record.making)  # of what is going to be removed
    return record if is_name else record._replace(making="")


def _write(fd: int, record: MadeRecord) -> None:
    """In place: the locks are this file's. A torn one counts as empty."""
    data = json.dumps(record._asdict()).encode()
    if len(data) > _RECORD_MAX:
        raise MakingFailed(f"a key of {len(data)} bytes: at most {_RECORD_MAX} are kept")
    files.write_at(fd, data, 0)
    files.truncate(fd, len(data))
    files.sync_file(fd)
