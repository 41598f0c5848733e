"""Names made and removed by an open directory's descriptor: paths above may change, and no symlink
is followed. Otherwise as in ``files``, whose hook sees bare names for paths: everything blocks, is
durable once synced, and raises OSError."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from aifs.core import files
from aifs.core.files import _after, _before

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def open_directory(name: str, parent: int | None = None) -> int:
    """A descriptor of the directory. Raises NotADirectoryError also for a symlink."""
    return os.open(name, _DIRECTORY, dir_fd=parent)


def is_foreign(found: os.stat_result, above: os.stat_result) -> bool:
    """Whether an untrusted user may have made what is in ``above``: everybody may, and it is
    neither the caller's, root's, nor its owner's."""
    trusted = (os.geteuid(), 0, above.st_uid)
    return bool(above.st_mode & stat.S_IWOTH) and found.st_uid not in trusted


def reach(path: str, top: int) -> int:
    """A descriptor (O_PATH) of the directory with this path from ``top``, never above that,
    following no symlink. Raises OSError."""
    fd = os.dup(top)
    try:
        for name in path.split("/"):
            if name == "..":
                raise NotADirectoryError(errno.ENOTDIR, "leads above the directory", path)
            if name:
                above, fd = fd, os.open(name, _DIRECTORY | os.O_PATH, dir_fd=fd)
                os.close(above)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_file(path: str, top: int) -> int:
    """A descriptor to read the regular file with this path from ``top``, on its filesystem, like
    ``reach``. Raises OSError: EINVAL for other files."""
    above, name = os.path.split(path)
    parent = reach(above, top)
    with path_of(parent, above) as at:
        if os.fstat(parent).st_dev != os.fstat(top).st_dev:
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), path)
        return files.open_file(os.path.join(at, name), write=False, foreign=True)


@contextmanager
def path_of(fd: int, known_as: str) -> Iterator[str]:
    """A path of the directory ``fd``, whatever gets its name, in the context, which closes ``fd``.
    OSErrors within say ``known_as``."""
    path = f"/proc/self/fd/{fd}"
    try:
        yield path
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = error.filename.replace(path, known_as, 1)
        raise
    finally:
        os.close(fd)


def create_file(name: str, parent: int) -> int:
    """A descriptor of a new file (mode 0600), for writing. Raises FileExistsError."""
    _before("open_file", name)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, 0o600, dir_fd=parent)
    _after("open_file", name, True)
    return fd


def make_directory(name: str, parent: int) -> None:
    """Mode 0755, whatever the umask."""
    _before("make_dir", name)
    os.mkdir(name, dir_fd=parent)
    os.chmod(name, 0o755, dir_fd=parent)
    _after("make_dir", name)


def make_symlink(target: str, name: str, parent: int) -> None:
    _before("symlink", name)
    os.symlink(target, name, dir_fd=parent)
    _after("symlink", name, target)


def make_link(source: str, source_parent: int, name: str, parent: int) -> None:
    """Make ``name`` one more name of what ``source`` is, also of a symlink itself."""
    _before("link", name)
    os.link(source, name, src_dir_fd=source_parent, dst_dir_fd=parent, follow_symlinks=False)
    _after("link", name)


def make_node(name: str, kind: int, device: int, parent: int) -> None:
    """``kind``: S_IFIFO, S_IFCHR or S_IFBLK."""
    _before("make_node", name)
    os.mknod(name, kind | 0o600, device, dir_fd=parent)
    _after("make_node", name)


def remove(name: str, parent: int) -> None:
    """A directory must be empty. A name that is gone already is no error."""
    _before("remove", name)
    try:
        if stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode):
            os.rmdir(name, dir_fd=parent)
        else:
            os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        return
    _after("remove", name)


def set_owner(name: str, uid: int, gid: int, parent: int) -> None:
    """Of a symlink itself. Takes set-user-ID bits and capabilities away, as chown(2) does."""
    os.chown(name, uid, gid, dir_fd=parent, follow_symlinks=False)


def set_mode(name: str, mode: int, parent: int) -> None:
    """``name`` is no symlink."""
    os.chmod(name, mode, dir_fd=parent)


def set_time(name: str, mtime_ns: int, parent: int) -> None:
    """Of a symlink itself."""
    os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=parent, follow_symlinks=False)


def set_attribute(name: str, attribute: str, value: bytes, parent: int) -> None:
    """An extended attribute; of a symlink itself."""
    os.setxattr(f"/proc/self/fd/{parent}/{name}", attribute, value, follow_symlinks=False)
