"""The kernel's FUSE connections, and ending one from outside, by fusectl.

A read request cannot be interrupted: callers of a dead or stuck daemon wait until the connection
ends, by closing its last descriptor, or by fusectl. A thread waiting in the kernel keeps a killed
process's descriptors; then fusectl is the only way.
"""

import os
from contextlib import suppress

from aifs.core.libc import library

_DEVICE = "/dev/fuse"
_FUSECTL = "/sys/fs/fuse/connections"
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # numbers of system calls, the same on all machines
_CLOEXEC, _CONFIG_CREATE = 1, 6


def open_abort(device: int) -> int:
    """A descriptor to end a connection by ``abort``; the caller closes it.

    ``device``: stat's number of the mount's files. It means this connection alone, even if another
    mount gets the number. Raises OSError: not there, or neither root nor its owner.
    """
    return _open(f"{os.minor(device)}/abort", os.O_WRONLY)


def open_waiting(device: int) -> int:
    """A descriptor that tells how many requests wait for an answer, as text: to be opened anew for
    each reading. As ``open_abort``."""
    return _open(f"{os.minor(device)}/waiting", os.O_RDONLY)


def _open(path: str, flags: int) -> int:
    try:
        return os.open(f"{_FUSECTL}/{path}", flags | os.O_CLOEXEC)
    except FileNotFoundError:
        pass  # fusectl need not be mounted
    root = _mount_unseen()
    try:
        return os.open(path, flags | os.O_CLOEXEC, dir_fd=root)
    finally:
        os.close(root)


def abort(fd: int) -> None:
    """Fail all present and later requests of the connection, if not ended."""
    os.write(fd, b"1")


def open_paths(pid: int) -> list[str]:
    """Paths of a process's descriptors, from the system, not from the files. Raises OSError."""
    paths = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(entry.path))
    return paths


def serves(pid: int) -> bool:
    """Whether the process has a FUSE connection. Raises OSError."""
    return _DEVICE in open_paths(pid)


def _mount_unseen() -> int:
    """The root of fusectl, mounted nowhere, for root without a system mount. Raises OSError."""
    context = _call(_FSOPEN, b"fusectl", _CLOEXEC)
    try:
        _call(_FSCONFIG, context, _CONFIG_CREATE, None, None, 0)
        return _call(_FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)


def _call(*arguments: object) -> int:
    import ctypes

    result = library().syscall(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), "fusectl")
    return result
