"""Lists, stats and reads all that is below an open directory, again and again, until stdin ends.
Says what failed that no change by others explains; then it ends with 1.

python -m tests.support.watcher DESCRIPTOR
"""

import errno
import os
import select
import stat
import sys

_EXPLAINED = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO}
"""It has gone, or is something else by now."""
_READ_MAX = 1 << 20
"""Files may be long, and nearly all hole."""
_OPEN = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOATIME  # tests compare times of access


def _look(directory: int, path: str) -> None:
    """At all below an open directory."""
    for name in os.listdir(directory):
        here = f"{path}/{name}"
        try:
            found = os.stat(name, dir_fd=directory, follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
                fd = os.open(name, _OPEN, dir_fd=directory)
                try:
                    opened = os.fstat(fd)  # the name may be something else by now
                    if stat.S_ISDIR(opened.st_mode):
                        _look(fd, here)
                    elif stat.S_ISREG(opened.st_mode):
                        os.read(fd, _READ_MAX)
                        os.pread(fd, _READ_MAX, max(0, opened.st_size - _READ_MAX))
                finally:
                    os.close(fd)
        except OSError as error:
            if error.errno not in _EXPLAINED:
                raise OSError(error.errno, f"{here}: {error.strerror}") from error


if __name__ == "__main__":
    while not select.select([sys.stdin], [], [], 0)[0]:
        try:
            _look(int(sys.argv[1]), ".")
        except OSError as failed:
            print(failed)
            sys.exit(1)
