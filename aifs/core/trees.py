"""Users' files and directories on any filesystem, made with the caller's umask. As in ``files``,
whose hook sees these: all blocks, errors are the system's, nothing is durable until synced, unless
stated."""

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
    """Make the directory ``path`` with missing parents, unsynced; whether ``path`` is new."""
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
    """Make the directory ``path`` with missing parents; new names are durable."""
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
    """Make ``path`` hold ``data``, all or nothing, also among concurrent calls. ``durable``: the
    bytes are before the name, not the name: that takes a ``sync_dir``."""
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
    """Replace ``path`` by a symlink to ``target`` at once. Not synced."""
    temporary = beside(path)
    _before("symlink", temporary)
    os.symlink(target, temporary)
    _after("symlink", temporary, target)
    files.rename(temporary, path)


def replace_by_link(path: str, source: str) -> bool:
    """Replace ``path`` by a hard link to ``source`` at once. False: impossible, as between
    filesystems. Not synced."""
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
    """An unused name beside ``path`` that shows what it is left over from."""
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
    """Exchange two names at once. Not synced. EINVAL or ENOSYS if unsupported."""
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
    """Remove the directory ``path`` with its tree; missing names are no error. Not synced. Raises
    NotADirectoryError for a symlink; follows none."""
    with suppress(FileNotFoundError):
        empty_dir(path)
        files.remove_dir(path)


def empty_dir(path: str) -> None:
    """Remove all in the directory ``path``, by descriptors (fwalk): no symlink leads elsewhere.
    Raises FileNotFoundError if it is missing. Not synced."""
    if not stat.S_ISDIR(os.lstat(path).st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    for where, directories, others, fd in os.fwalk(path, topdown=False, follow_symlinks=False):
        for name in others + directories:
            with suppress(FileNotFoundError):
                remove = files.remove_dir if _is_directory(name, fd) else files.unlink
                remove(os.path.join(where, name), fd)


def _is_directory(name: str, parent: int) -> bool:
    """A symlink is none, unlike in fwalk."""
    return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
