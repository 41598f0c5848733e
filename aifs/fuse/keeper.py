"""The keeper of a mount: has its descriptor, so that the mount outlives the daemon, and the next
daemon goes on when one has died. A process of its own that runs this file with the standard library
alone; it does no I/O of the mount's.

While a daemon serves, the next one stands by: it has started, and waits for its turn at a pipe. So
programs do not wait for the start of an interpreter.

Its arguments, as JSON in the first one: ``device``, ``table`` (kept.py) and ``abort`` (fusectl; -1)
are descriptors, ``pid`` the first daemon, ``number`` the mount's device, ``tries`` how many daemons
in a row may die before they serve, ``command`` starts the next one, with the descriptors of the
mount, the table and the pipe behind it, ``log`` is the log file ("": standard error).
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable

LOOK_S = 1.0
"""How often it looks whether the daemon is about to end, though a thread keeps it in the kernel."""

SERVES_S = 0.1
"""How often it looks whether the daemon serves, so that another one may stand by."""

FIRST_PAUSE_S, PAUSE_MAX_S = 0.02, 5.0

HEAD_AT = 4096 + 16384 * 48  # kept.py
SERVED, ENDED, RESTARTS, DEATH = 1, 2, 3, 4


def head(table: int, word: int, value: int | None = None) -> int:
    at = HEAD_AT + 8 * word
    if value is None:
        return int.from_bytes(os.pread(table, 8, at), sys.byteorder)
    return os.pwrite(table, value.to_bytes(8, sys.byteorder), at)


def is_dying(pid: int) -> bool:
    """Whether its main thread has ended, or a SIGKILL waits for it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] in b"ZX"
    except OSError:
        return True


def wait_for(pid: int, is_child: bool, stand_by: Callable[[], bool]) -> int:
    """Until the daemon has ended, or will have as soon as it leaves the kernel; its status.
    ``stand_by`` is called until it says True."""
    try:
        ended = os.pidfd_open(pid)
    except OSError:
        ended = None
    poll = select.poll()
    if ended is not None:
        poll.register(ended, select.POLLIN)
    look_s = SERVES_S
    while ended is not None and not poll.poll(look_s * 1000) and not is_dying(pid):
        if look_s == SERVES_S and stand_by():
            look_s = LOOK_S
    if ended is not None:
        os.close(ended)
    if is_child:
        found, status = os.waitpid(pid, os.WNOHANG)
        return status if found else signal.SIGKILL
    return signal.SIGKILL


def is_over(device: int, number: bytes) -> bool:
    """Whether the connection has ended, or nothing is mounted any more."""
    poll = select.poll()
    poll.register(device, select.POLLIN)
    if any(events & select.POLLERR for _, events in poll.poll(0)):
        return True
    with open("/proc/self/mountinfo", "rb") as mounts:
        return not any(line.split()[2] == number for line in mounts)


def say(log: str, text: str) -> None:
    line = f"{time.strftime('%Y-%m-%d %H:%M:%S')} WARNING keeper: {text}\n".encode()
    try:
        if not log:
            os.write(2, line)
            return
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(fd, line)
        os.close(fd)
    except OSError:
        pass


class Daemons:
    """Those that it starts; at most one stands by."""

    def __init__(self, command: list[str], *descriptors: int) -> None:
        self._command = command
        self._descriptors = descriptors
        self._pid, self._turn = 0, -1

    def stand_by(self) -> None:
        """Start one that waits until it is its turn."""
        waits, self._turn = os.pipe()
        descriptors = (*self._descriptors, waits)
        self._pid = os.fork()
        if self._pid:
            os.close(waits)
            return
        try:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for fd in descriptors:
                os.set_inheritable(fd, True)
            os.execv(self._command[0], [*self._command, ":".join(map(str, descriptors))])
        finally:
            os._exit(127)

    def next(self) -> int:
        """It is the turn of one; its pid."""
        if not self._pid or os.waitpid(self._pid, os.WNOHANG)[0]:  # none stands by, or it has died
            self.stand_by()
        try:
            os.write(self._turn, b"1")
        except BrokenPipeError:
            pass  # it has just died
        os.close(self._turn)
        pid, self._pid = self._pid, 0
        return pid


def main() -> None:
    it = json.loads(sys.argv[1])
    device, table, abort = it["device"], it["table"], it["abort"]
    number, pid, is_child = it["number"].encode(), it["pid"], False
    # A batch system may send all processes of a job any signal.
    signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    daemons = Daemons(it["command"], device, table)
    failed = served = 0

    def stand_by() -> bool:
        if does_serve := head(table, SERVED) > served:
            daemons.stand_by()
        return does_serve

    while True:
        status = wait_for(pid, is_child, stand_by)
        if head(table, ENDED) or is_over(device, number):
            break
        failed = 0 if head(table, SERVED) != served or not is_child else failed + 1
        served = head(table, SERVED)
        if served == 0 or failed >= it["tries"]:
            say(it["log"], f"the mount ends: {failed} daemons in a row died before they served")
            break
        head(table, DEATH, status)
        if failed:
            time.sleep(min(FIRST_PAUSE_S * 2**failed, PAUSE_MAX_S))
        head(table, RESTARTS, head(table, RESTARTS) + 1)
        pid, is_child = daemons.next(), True
    if abort >= 0:
        try:
            os.write(abort, b"1")
        except OSError:
            pass


if __name__ == "__main__":
    main()
