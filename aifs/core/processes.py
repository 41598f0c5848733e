"""What the kernel says of processes. Reads /proc."""

import os
from contextlib import suppress

_TICKS = os.sysconf("SC_CLK_TCK")


def process_of(thread: int) -> int:
    """The process of a thread: FUSE tells who asks by the number of the thread. The same number if
    it has ended, or is not to be seen from here."""
    try:
        with open(f"/proc/{thread}/status", "rb") as file:
            for line in file:
                if line.startswith(b"Tgid:"):
                    return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return thread


def all_below(pid: int) -> dict[int, float]:
    """A process and those that it has started, directly or not, which have not been waited for, by
    number: the seconds of processor of each, and of the children that it has waited for. {}: it is
    gone. Not among them: those whose parent has ended. Some 20 us for each process that there is.
    """
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
