"""Whether a data server's or burst directory works, when an operation on one object failed.

EIO may concern one file alone, such as a sync of one written both with O_DIRECT and through a
mapping, or a bad sector. So the object fails, until this probe does, too.
"""

import errno
import os

from aifs.core import files
from aifs.data.marker import NAME as MARKER

NAME = ".aifs-probe"

_NO_ANSWER = (errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Errors of a probe that say nothing about the directory."""


def works(root: str, write: bool) -> bool:
    """Whether the marker can be read; ``write``: whether a file can be written, synced and read.
    From the device, past the page cache, if possible. Blocks. One at a time."""
    try:
        _read(f"{root}/{MARKER}")
        if write:
            _write(f"{root}/{NAME}")
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
