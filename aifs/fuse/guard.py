"""A process that ends the mount's connection when the daemon has died. Touches fusectl and one
child process.

Killing a process ends its connection, unless one of its threads waits in the kernel meanwhile, as
those that send invalidations may: for a lock that a program holds until it gets an answer from the
process that was killed. The guard has no descriptor of the connection, so nothing keeps it from
ending that, nor is it in the way of anything.
"""

import logging
import os
import subprocess
import sys
from types import TracebackType

from aifs.core import connections, mountinfo

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


class Guard:
    """Guards the mount at ``mountpoint`` from ``with`` on; at its end the connection is aborted in
    any case.

    Made by the main thread, when the mount has been made.
    """

    def __init__(self, mountpoint: str) -> None:
        self._fd: int | None = None
        self.process: subprocess.Popen | None = None
        try:
            mount = mountinfo.mounted_at(mountpoint)
            if mount is not None:
                self._fd = connections.open_abort(mount.device)
                self.process = _start(self._fd)
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


def _start(fd: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", _PROGRAM, str(fd), str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        pass_fds=[fd],
        start_new_session=True,  # an interrupt from the terminal is for the daemon
    )
