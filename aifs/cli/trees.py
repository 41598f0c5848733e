"""The files and directories that PATH arguments mean."""

import os
import stat
from collections.abc import Iterable, Iterator

from aifs.cli.mounts import require_inside
from aifs.core.errors import MountError


def require_files(paths: Iterable[str]) -> None:
    """Each path is a regular file or a directory in an AIFS mount. Raises MountError, OSError."""
    for path in paths:
        mode = require_inside(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise MountError(f"{path}: is neither a file nor a directory")


def walk(path: str, directories: bool = False) -> Iterator[str]:
    """``path`` if it is a regular file, else those below it, in the order of the directory; on
    request the directories, too.

    Symlinks and other mounts below are left alone. What is removed meanwhile is passed over. Raises
    OSError.
    """
    if not os.path.isdir(path):
        yield path
        return
    device = os.stat(path).st_dev
    waiting = [path]
    while waiting:
        directory = waiting.pop()
        if directories:
            yield directory
        try:
            entries = list(os.scandir(directory))
        except FileNotFoundError:
            continue
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                yield entry.path
            elif (
                entry.is_dir(follow_symlinks=False)
                and entry.stat(follow_symlinks=False).st_dev == device
            ):
                waiting.append(entry.path)
