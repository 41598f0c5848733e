"""A process that ends the mount's connection when the daemon has died, or, as its keeper, goes on
with it. Touches fusectl and one child process.

A killed process ends its connection, unless a thread waits in the kernel, as senders of
invalidations may: for a lock held by a program that waits for the killed process. The guard,
without descriptor of the connection, can end it.
"""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from aifs.core import connections, mountinfo
from aifs.fuse.kept import KeptMount

log = logging.getLogger(__name__)

_PROGRAM = """
import ctypes, os, signal, sys
fd, daemon = int(sys.argv[1]), int(sys.argv[2])
signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
# It is sent when the daemon's main thread has ended, whatever the others do.
ctypes.CDLL(None).prctl(1, signal.SIGRTMIN)
while os.getppid() == daemon and signal.sigwaitinfo([signal.SIGRTMIN]).si_pid != daemon:
    pass  # a batch system may send all processes of a job any signal
os.write(fd, b"1")
"""


@dataclass(slots=True)
class KeeperOrders:
    """How a mount is kept."""

    kept: KeptMount
    again: Sequence[str]
    """The command that starts the next daemon, without its descriptors."""
    tries: int
    """How many daemons in a row may die before they have served for some seconds."""
    stuck_s: float
    """After how long a daemon is replaced that does nothing while requests wait; 0: never."""
    log: str
    """The log file; "": standard error."""


class Guard:
    """Guards the mount at ``mountpoint`` in the block, and then aborts the connection. Made by the
    main thread, after the mount. ``keeping``: by the keeper, which starts the next daemon; a kept
    mount has one."""

    def __init__(self, mountpoint: str, keeping: KeeperOrders | None = None) -> None:
        self._fd: int | None = None
        self.process: subprocess.Popen | None = None
        try:
            mount = mountinfo.mounted_at(mountpoint)
            if mount is not None:
                self._fd = connections.open_abort(mount.device)
                if keeping is None:
                    program = ["-c", _PROGRAM, str(self._fd), str(os.getpid())]
                    self.process = _start(program, [self._fd], subprocess.DEVNULL)
                elif not keeping.kept.is_taken:
                    start_keeper(keeping, self._fd, mount.device)
        except OSError as error:  # of a user who may have no more processes, too
            log.info(
                "if this process is killed, programs may have to wait for aifs mount: %s", error
            )

    def __enter__(self) -> "Guard":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._fd is not None:
            connections.abort(self._fd)
            os.close(self._fd)
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def start_keeper(keeping: KeeperOrders, abort: int, device: int) -> None:
    """It ends with the mount."""
    kept = keeping.kept
    asked = connections.open_waiting(device)
    descriptors = [kept.device, kept.table, abort, asked]
    told = {
        "descriptors": descriptors,
        "pid": os.getpid(),
        "number": f"{os.major(device)}:{os.minor(device)}",
        "tries": keeping.tries,
        "stuck_s": keeping.stuck_s,
        "command": list(keeping.again),
        "log": keeping.log,
    }
    program = [str(Path(__file__).with_name("keeper.py")), json.dumps(told)]
    _start(program, descriptors, None)
    os.close(asked)


def _start(program: list[str], fds: list[int], errors: int | None) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", *program],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd="/",
        pass_fds=fds,
        start_new_session=True,  # an interrupt from the terminal is for the daemon
    )
