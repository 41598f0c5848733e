"""The file by which a rank says that it lives, and what it has done: locked by its process, written
by nobody else.

Each line is one JSON object; the last whole one counts.
"""

import json
import os
import weakref
from contextlib import suppress
from typing import Any

from aifs.client import locks
from aifs.core import files, trees


class RankIsTaken(Exception):
    """A process that lives is this rank."""


class RankFile:
    """The file ``path`` of this process: empty, and locked where the filesystem has locks. Raises
    RankIsTaken, OSError."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_ending = False
        """Whether ``remove`` will follow, whatever others do."""
        self._fd, self._end = self._open(), 0
        _own.add(self)

    def _open(self) -> int:
        while True:
            trees.make_dir(os.path.dirname(self.path))
            try:
                fd = files.open_file(self.path, create=True)
            except FileNotFoundError:  # the directory has just been removed
                continue
            try:
                locks.lock(fd)
                if locks.is_at(self.path, fd):
                    files.truncate(fd, 0)
                    return fd
            except locks.Locked:
                files.close_file(fd)
                raise RankIsTaken from None
            except BaseException:
                files.close_file(fd)
                raise
            files.close_file(fd)

    def say(self, **value: Any) -> None:
        """Replace what others read. Not durable."""
        line = json.dumps(value).encode() + b"\n"
        files.write_at(self._fd, line, self._end)
        self._end += len(line)

    def remove(self) -> None:
        """This process is not the rank any more."""
        try:
            if locks.is_at(self.path, self._fd):
                files.unlink(self.path)
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Close it, and leave the file."""
        files.close_file(self._fd)
        _own.discard(
            self
        )  # afterwards: who asks ``is_ending`` and then tries finds it taken no more


_own: "weakref.WeakSet[RankFile]" = weakref.WeakSet()


def is_own(path: str) -> bool:
    """Whether the file is one of this process."""
    return any(file.path == path for file in list(_own))


def is_ending(path: str) -> bool:
    """Whether the file is one of this process, which will soon remove it."""
    return any(file.path == path and file.is_ending for file in list(_own))


def _after_fork() -> None:
    """A child is not the rank: with its copies of the descriptors the locks would outlive the
    parent.
    """
    for file in list(_own):
        file.let_go()


os.register_at_fork(after_in_child=_after_fork)


def read(path: str) -> dict[str, Any]:
    """What a rank has said last; {} if nothing. Raises OSError."""
    lines = (files.read_file(path) or b"").split(b"\n")[:-1]
    with suppress(ValueError):
        return json.loads(lines[-1]) if lines else {}
    return {}
