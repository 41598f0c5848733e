"""Leases on files: the proof that nobody has one open, or mapped, for writing, or at all."""

import fcntl
import signal


def take_read_lease(fd: int) -> bool:
    """Lease a file (``fd`` is open for reading alone); False if it is open, or mapped, for writing
    anywhere.

    The system breaks the lease when somebody opens the file for writing, after up to 45 s in which
    that one waits. The signal that it announces this with is one that does no harm.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)  # the usual one, SIGIO, kills
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except BlockingIOError:
        return False
    return True


def is_used(fd: int) -> bool:
    """Whether a file is open or mapped, be it for reading, by anything but ``fd``; False where that
    cannot be told.
    """
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        return True
    except OSError:  # there are no leases here
        return False
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return False


def is_whole(fd: int) -> bool:
    """Whether the lease on a file still holds, and nobody waits for its end."""
    return fcntl.fcntl(fd, fcntl.F_GETLEASE) == fcntl.F_RDLCK


def drop_lease(fd: int) -> bool:
    """End the lease; returns whether it was whole until now."""
    whole = is_whole(fd)
    fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return whole
