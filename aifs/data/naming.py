"""Where objects lie below a data server's directory, and what lies there.

    objects/<oid >> 16>/<bits 8 to 15 of oid, two digits>/<oid, sixteen digits>.<ino>

All numbers are hexadecimal. 256 consecutive object ids share a directory, so files that are made
together lie together, and recovery finds a range of ids without a scan. Functions that read the
disk block and raise OSError.
"""

import errno
import os
import re
import stat
from collections.abc import Iterator

from aifs.core import files
from aifs.data.marker import NAME as MARKER
from aifs.data.storage import ASIDE, BACKUP, CLAIM, ForeignFile, StoredObject

OBJECTS = "objects"
BLOCKS = "blocks"
"""Of clean blocks, in burst directories (burst/block_cache.py)."""

_UPPER = re.compile(r"0|[1-9a-f][0-9a-f]*")
_LOWER = re.compile(r"[0-9a-f]{2}")
_OBJECT = re.compile(r"([0-9a-f]{16})\.(0|[1-9a-f][0-9a-f]*)")


def directory_of(root: str, oid: int) -> str:
    return f"{root}/{OBJECTS}/{oid >> 16:x}/{oid >> 8 & 0xFF:02x}"


def name_of(ino: int, oid: int) -> str:
    return f"{oid:016x}.{ino:x}"


def object_path(root: str, ino: int, oid: int) -> str:
    return f"{directory_of(root, oid)}/{name_of(ino, oid)}"


def list_range(root: str, first_oid: int, end_oid: int) -> list[tuple[int, int]]:
    """(ino, oid) of the objects with first_oid <= oid < end_oid."""
    found = []
    for block in range(first_oid >> 8, (end_oid + 0xFF) >> 8):
        directory = directory_of(root, block << 8)
        for name in _names_in(directory):
            key = _parse(root, directory, name)
            if key is not None and first_oid <= key[1] < end_oid:
                found.append(key)
    return found


def list_all(root: str) -> Iterator[StoredObject | ForeignFile]:
    """All below ``root`` in order of path, without our marker, claim, probe, backups, directories,
    and objects moved aside."""
    for name in _names_in(root):
        if name not in (MARKER, CLAIM, PROBE, OBJECTS, BLOCKS, BACKUP, ASIDE):
            yield ForeignFile(f"{root}/{name}")
    for upper in _directories(f"{root}/{OBJECTS}", _UPPER):
        if isinstance(upper, ForeignFile):
            yield upper
            continue
        for directory in _directories(upper, _LOWER):
            if isinstance(directory, ForeignFile):
                yield directory
            else:
                yield from _list_objects(root, directory)


def _directories(parent: str, pattern: re.Pattern[str]) -> Iterator[str | ForeignFile]:
    for name in _names_in(parent):
        path = f"{parent}/{name}"
        ours = pattern.fullmatch(name) and os.path.isdir(path) and not os.path.islink(path)
        yield path if ours else ForeignFile(path)


def _list_objects(root: str, directory: str) -> Iterator[StoredObject | ForeignFile]:
    for name in _names_in(directory):
        path = f"{directory}/{name}"
        try:
            status = os.lstat(path)
        except FileNotFoundError:
            continue  # removed meanwhile
        key = _parse(root, directory, name)
        if key is None or not stat.S_ISREG(status.st_mode):
            yield ForeignFile(path)
        else:
            yield StoredObject(*key, status.st_size, status.st_blocks * 512, path)


def _names_in(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except FileNotFoundError:
        return []


def _parse(root: str, directory: str, name: str) -> tuple[int, int] | None:
    match = _OBJECT.fullmatch(name)
    if match is None or directory_of(root, int(match[1], 16)) != directory:
        return None
    return int(match[2], 16), int(match[1], 16)


def id_bound(root: str) -> int:
    """No object below ``root`` has this id or a larger one."""
    numbers = [int(name, 16) for name in _names_in(f"{root}/{OBJECTS}") if _UPPER.fullmatch(name)]
    return (max(numbers, default=-1) + 1) << 16


# --- whether it works -----------------------------------------------------------------------------

# When an operation on one object failed. EIO may concern one file alone, such as a sync of one
# written both with O_DIRECT and through a mapping, or a bad sector. So the object fails, until this
# probe does, too.

PROBE = ".aifs-probe"

_NO_ANSWER = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a probe that say nothing about the directory."""


def works(root: str, write: bool) -> bool:
    """Whether the marker can be read; ``write``: whether a file can be written, synced and read.
    From the device, past the page cache, if possible. Blocks. One at a time."""
    try:
        _read(f"{root}/{MARKER}")
        if write:
            _write(f"{root}/{PROBE}")
    except OSError as error:
        return error.errno in _NO_ANSWER
    return True


def _read(path: str) -> None:
    fd = files.open_file(path, write=False)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        files.read_into(fd, memoryview(bytearray(1)), 0)
    finally:
        files.close_file(fd)


def _write(path: str) -> None:
    fd = files.open_file(path, create=True)
    try:
        files.write_at(fd, b"x", 0)
        files.sync_file(fd)
        _read(path)
    finally:
        files.close_file(fd)
        files.unlink(path)
