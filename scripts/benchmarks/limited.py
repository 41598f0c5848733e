"""The command ``aifs`` with data servers that give and take so many bytes per second, all hosts of
this machine together, through the tests' hook.

SERVER_LINKS (environment) is a directory for what the hosts' daemons share; SERVER_MIB_S what each
server gives. Requests to one server queue up behind each other as behind a network link.
"""

import fcntl
import os
import re
import struct
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from aifs.cli.main import main
from aifs.core import files

LINKS = Path(os.environ["SERVER_LINKS"])
BYTES_S = float(os.environ["SERVER_MIB_S"]) * (1 << 20)
SERVER = re.compile(r".*/store/data/(\d+)/.*objects/")
FREE = struct.Struct("d")
"""When a link is free, on the clock that all processes have."""


class Links:
    """Has paths of descriptors known, and nothing read past us."""

    def before(self, op: str, path: str) -> None:
        pass

    def after(self, op: str, path: str, *args: object) -> None:
        if op == "write_at":
            _wait(path, len(args[0]))


def read_into(fd: int, buffer: memoryview, offset: int) -> int:
    done = READ_INTO(fd, buffer, offset)
    _wait(files._path_of(fd), done)
    return done


def _wait(path: str, size: int) -> None:
    found = SERVER.match(path)
    if found is not None:
        time.sleep(_queue(LINKS / found[1], size))


def _queue(link: Path, size: int) -> float:
    """How long ``size`` bytes take on the link, after those that wait for it already."""
    fd = os.open(link, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        now_s = time.monotonic()
        (free_s,) = FREE.unpack(os.pread(fd, FREE.size, 0) or bytes(FREE.size))
        free_s = max(now_s, free_s) + size / BYTES_S
        os.pwrite(fd, FREE.pack(free_s), 0)
        return free_s - now_s
    finally:
        os.close(fd)


files.set_hook(Links())
READ_INTO, files.read_into = files.read_into, read_into  # which tells how many
sys.exit(main())
