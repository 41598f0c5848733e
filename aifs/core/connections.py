"""The kernel's FUSE connections, and how one is ended from outside. Touches fusectl, the filesystem
that lists them.

A request that a daemon has read cannot be interrupted: a caller of a dead or stuck daemon waits
until the connection ends. It ends when its last descriptor is closed, or by fusectl. A thread that
waits in the kernel keeps the descriptors of a process that was killed, so for such a mount fusectl
is the only way.
"""

import os
from contextlib import suppress

from aifs.core.libc import library

_DEVICE = "/dev/fuse"
_FUSECTL = "/sys/fs/fuse/connections"
_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432  # numbers of system calls, the same on all machines
_CLOEXEC, _CONFIG_CREATE = 1, 6


def open_abort(device: int) -> int:
    """A descriptor that ends a connection as soon as ``abort`` is called with it; the caller closes
    it.

    ``device`` is the number that stat gives for files of the mount. The descriptor means this
    connection alone, also when the number has been given to another mount. Raises OSError: not
    there, or neither root nor its owner.
    """
    path = f"{os.minor(device)}/abort"
    try:
        return os.open(f"{_FUSECTL}/{path}", os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        pass  # fusectl need not be mounted
    root = _mount_unseen()
    try:
        return os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=root)
    finally:
        os.close(root)


def abort(fd: int) -> None:
    """All requests of the connection, waiting ones and later ones, end with an error. Nothing if it
    has ended.
    """
    os.write(fd, b"1")


def open_paths(pid: int) -> list[str]:
    """The files behind the descriptors of a process, as the system names them: the files are asked
    nothing. Raises OSError.
    """
    paths = []
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):  # closed meanwhile
            paths.append(os.readlink(entry.path))
    return paths


def serves(pid: int) -> bool:
    """Whether the process has a FUSE connection. Raises OSError."""
    return _DEVICE in open_paths(pid)


def _mount_unseen() -> int:
    """The root of fusectl, mounted nowhere: for root where the system has not mounted it. Raises
    OSError.
    """
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
