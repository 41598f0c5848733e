"""Files and directories of users, on a mount or any other filesystem: made with the caller's umask,
as programs do.

The same rules as in ``files``, whose hook sees these operations too: everything blocks, errors are
the operating system's own, and nothing is durable until it is synced; where a function syncs, it
says so.
"""

import errno
import os
import re
import stat
from contextlib import suppress

from aifs.core import files, libc
from aifs.core.files import _after, _before

_BESIDE = re.compile(r"\.(.+)\.[0-9a-f]{8}\.tmp", re.DOTALL)

_AT_FDCWD, _RENAME_NOREPLACE, _RENAME_EXCHANGE = -100, 1, 2


def make_dir(path: str) -> bool:
    """Make the directory ``path`` and its missing parents; returns whether ``path`` is new. The
    names are not synced."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_dir(parent)
    _before("make_dir", path)
    try:
        os.mkdir(path)
    except FileExistsError:
        return False
    _after("make_dir", path)
    return True


def make_durable_dir(path: str) -> None:
    """Make the directory ``path`` and its missing parents; the names that are new are durable on
    return.
    """
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        make_durable_dir(parent)
    if make_dir(path):
        files.sync_dir(parent or ".")


def create_file(path: str) -> int:
    """A descriptor of a new file, for writing. Raises FileExistsError."""
    _before("open_file", path)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    _after("open_file", path, True)
    return fd


def replace_file(path: str, data: bytes, durable: bool = True) -> None:
    """Make ``path`` hold ``data``, all or nothing, even if others do so at the same time.

    If ``durable`` the bytes are when they get the name, but not the name: that takes a
    ``sync_dir``.
    """
    temporary = beside(path)
    fd = create_file(temporary)
    try:
        files.write_at(fd, data, 0)
        if durable:
            files.sync_file(fd)
    finally:
        files.close_file(fd)
    files.rename(temporary, path)


def replace_symlink(path: str, target: str) -> None:
    """Make ``path`` a symlink to ``target``, replacing any file or symlink of that name at once.
    Not synced."""
    temporary = beside(path)
    _before("symlink", temporary)
    os.symlink(target, temporary)
    _after("symlink", temporary, target)
    files.rename(temporary, path)


def replace_by_link(path: str, source: str) -> bool:
    """Make ``path`` a hard link to the file ``source``, replacing any file of that name at once.
    False: that cannot be, such as between filesystems. Not synced."""
    temporary = beside(path)
    _before("link", temporary)
    try:
        os.link(source, temporary, follow_symlinks=False)
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            raise
        return False
    _after("link", source, temporary)
    files.rename(temporary, path)
    return True


def set_mode(path: str, mode: int) -> None:
    """Of a directory; not synced."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        files.set_mode(fd, mode)
    finally:
        os.close(fd)


def beside(path: str) -> str:
    """A name beside ``path`` that nobody else uses, and that says of what it is left over if it
    is.
    """
    directory, name = os.path.split(path)
    return os.path.join(directory, f".{name}.{os.urandom(4).hex()}.tmp")


def whose(name: str) -> str:
    """Of which name beside it ``beside`` has made this one; "" of none."""
    found = _BESIDE.fullmatch(name)
    return found[1] if found else ""


def rename_new(old: str, new: str) -> None:
    """Rename, replacing nothing. Raises FileExistsError."""
    _rename(old, new, _RENAME_NOREPLACE, "rename")


def exchange(old: str, new: str) -> None:
    """Let two names change places, at once. Not synced. EINVAL or ENOSYS where the filesystem
    cannot.
    """
    _rename(old, new, _RENAME_EXCHANGE, "exchange")


def _rename(old: str, new: str, flags: int, op: str) -> None:
    _before(op, old)
    names = (_AT_FDCWD, os.fsencode(old), _AT_FDCWD, os.fsencode(new))
    if number := libc.call("renameat2", *names, flags):
        if op != "rename" or number not in (errno.EINVAL, errno.ENOSYS) or os.path.lexists(new):
            raise OSError(number, os.strerror(number), old, None, new)
        os.rename(old, new)  # onto a directory that is not empty it fails, too
    _after(op, old, new)


def remove_tree(path: str) -> None:
    """Remove the directory ``path`` and all below it; a name that is gone already is no error.
    Not synced. Raises NotADirectoryError for a symlink: none is followed, there or below.
    """
    with suppress(FileNotFoundError):
        empty_dir(path)
        files.remove_dir(path)


def empty_dir(path: str) -> None:
    """Remove all that is in the directory ``path``. Raises FileNotFoundError if there is none. Not
    synced.

    It goes by descriptors (fwalk), so a user that puts a symlink where a directory was has
    nothing removed behind it.
    """
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    for where, directories, others, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in others + directories:
            with suppress(FileNotFoundError):
                remove = files.remove_dir if _is_directory(name, fd) else files.unlink
                remove(os.path.join(where, name), fd)


def _is_directory(name: str, parent: int) -> bool:
    """A symlink to one is none, though fwalk counts it among them."""
    return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
