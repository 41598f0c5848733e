"""Facts about processes. Reads /proc."""

import fcntl
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress

_TICKS = os.sysconf("SC_CLK_TCK")
_EXITING = 0x4
"""Of the kernel's flags of a task: it is past its last instruction (PF_EXITING)."""
_SIGKILL_BIT = 1 << signal.SIGKILL - 1

_DYING_S, _LOOK_S = 10.0, 0.02


def process_of(thread: int) -> int:
    """The process of a thread, as FUSE names callers; the same number if ended or unseen."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return thread


def is_dying(pid: int) -> bool:
    """Whether a process of this host has ended or is about to, closing its files."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stat, open(f"/proc/{pid}/status", "rb") as status:
            return says_dying(stat.read(), status.read())
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def lock_after_dying(fd: int, is_held: Callable[[], bool]) -> None:
    """Lock a file (flock), once the dying processes that hold it have ended. Raises OSError if a
    process that lives holds it (``is_held``), or they take too long."""
    until_s = time.monotonic() + _DYING_S
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if is_held() or time.monotonic() > until_s:
                raise
            time.sleep(_LOOK_S)


def says_dying(stat: bytes, status: bytes) -> bool:
    """Whether these /proc files show a zombie, an exit, or a pending SIGKILL."""
    state, *numbers = stat.rpartition(b") ")[2].split()
    if state in b"ZX" or int(numbers[5]) & _EXITING:
        return True
    lines = (line.split() for line in status.splitlines())
    pending = (words[1] for words in lines if words[0] in (b"SigPnd:", b"ShdPnd:"))
    return any(int(mask, 16) & _SIGKILL_BIT for mask in pending)


def all_below(pid: int) -> dict[int, float]:
    """A process and its unwaited descendants by number, with processor seconds, also of waited
    children. {}: it is gone. Without those of ended parents. Some 20 us a process of the system."""
    children: dict[int, list[int]] = {}
    seconds: dict[int, float] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                fields = file.read().rpartition(b") ")[2].split()
                children.setdefault(int(fields[1]), []).append(int(name))
                seconds[int(name)] = sum(map(int, fields[11:15])) / _TICKS
    found = [pid] if pid in seconds else []
    for one in found:  # grows meanwhile
        found += children.get(one, [])
    return {one: seconds[one] for one in found}
