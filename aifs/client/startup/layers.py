"""A layer of a container image, applied to a directory: the changes that a tar archive lists (the
image specification of the OCI, "Image Layer Filesystem Changeset").

An archive is not trusted. Every entry is made by descriptors from the directory down. A symlink on
its way is resolved as by a process whose root the directory is, so it leads nowhere else. An entry
is refused if it names what lies above the directory, or a device of the host, is an order to a
filesystem, or grows without bound. The caller then throws all of it away.

umoci (0.4.7, that of Debian) does less, so it does not do this: of the hostile layers in
tests/unit/test_images.py it takes names above the directory, devices of the host, orders to the
filesystem (``user.aifs.*``, ``trusted.overlay.*``) and directories without end, and a whiteout of
``..`` makes it remove the directory above the image. It has no limit of bytes.
"""

import errno
import os
import stat
import tarfile
from collections.abc import Container
from decimal import Decimal
from typing import IO

from aifs.client.startup.once import MakingFailed
from aifs.core import beneath, files

PIECE = 1 << 20
HEADER_MAX = 4 << 20
"""Bytes of one header of an archive, which is read at once."""

ENTRIES_MAX = 4 << 20
"""Files and directories that an image may have, each time that a layer names one."""

DEPTH_MAX = 255
NAME_MAX = 3000
"""Bytes of a path in an image: with the directory before it the kernel takes it (PATH_MAX)."""

SYMLINKS_MAX = 40
"""On the way to one file, as in the kernel."""

_NAME_ERRORS = frozenset(
    (errno.EEXIST, errno.EINVAL, errno.EISDIR, errno.ENAMETOOLONG, errno.EPERM, errno.EROFS)
)
"""A name cannot be made here: on a mount some are the filesystem's own (``.aifs-data/x``)."""

_WHITEOUT, _AUFS, _OPAQUE = ".wh.", ".wh..wh.", ".wh..wh..opq"

_XATTR = "SCHILY.xattr."
_KEPT = ("user.", "security.capability", "system.posix_acl_")
"""Extended attributes that are applied; labels of another host's security modules are not."""
_ORDERS = ("user.aifs", "user.overlay.", "trusted.overlay.")
_NOBODY = (1 << 32) - 1  # chown(2) takes it for nothing to be changed

# /dev/null, zero, full, random, urandom, tty, console, ptmx: what any container has.
_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)}


class ImageRefused(MakingFailed):
    """An archive is not an image, is damaged, or would do harm."""


class Limits:
    """The bytes and entries that the layers of an image may still unpack to."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes = bytes_max
        self.entries = ENTRIES_MAX

    def take(self, count: int) -> None:
        self.bytes -= count
        if self.bytes < 0:
            raise ImageRefused("it unpacks to more bytes than it may (--bytes-max)")

    def take_entry(self) -> None:
        self.entries -= 1
        if self.entries < 0:
            raise ImageRefused(f"it has more than {ENTRIES_MAX} entries")


class Rootfs:
    """The directory that layers are applied to, one after the other."""

    def __init__(self, path: str, limits: Limits) -> None:
        self._root = beneath.open_directory(path)
        self._limits = limits
        # Of directories, in ns: set at the end, as what is made in them changes it.
        self._times: dict[str, int] = {}
        # The last directory that was needed, open: entries come directory by directory.
        self._reached = ("", self._root)
        # What the layer has made so far, and what lies above it: whiteouts hide the rest.
        self._fresh: set[str] = set()

    def close(self) -> None:
        self._leave()
        files.close_file(self._root)

    def apply(self, layer: IO[bytes]) -> None:
        """Apply a layer, the unpacked bytes of an archive. Raises ImageRefused, OSError, errors of
        tarfile."""
        self._fresh = {""}
        archive = tarfile.TarFile(
            fileobj=_Forward(layer),  # type: ignore[arg-type]
            encoding="utf-8",
            errors="surrogateescape",
        )
        while (member := archive.next()) is not None:
            archive.members = []  # type: ignore[attr-defined]  # it would keep them all
            self._limits.take_entry()
            try:
                self._apply(archive, member)
            except OSError as error:
                if error.errno not in _NAME_ERRORS:
                    raise
                raise ImageRefused(f"{member.name}: {error.strerror}") from error

    def finish(self) -> None:
        """Give directories their times, when all layers are there."""
        for path, mtime_ns in self._times.items():
            if reached := self._reach(path, make=False):
                beneath.set_time(".", mtime_ns, reached[1])

    def _apply(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        path = _path_of(member.name)
        above, _, name = path.rpartition("/")
        if name.startswith(_WHITEOUT):
            self._hide(above, name)
        elif not path:
            if not member.isdir():
                raise ImageRefused("its root is no directory")
            self._set_attributes(".", self._root, path, member)
        else:
            reached = self._reach(above, make=True)
            assert reached is not None
            above, parent = reached
            path = _join(above, name)
            self._make(archive, member, path, name, parent)
            self._note(path)
            if not member.islnk():  # it has those of what it is a name of
                self._set_attributes(name, parent, path, member)

    def _make(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        path: str,
        name: str,
        parent: int,
    ) -> None:
        source = _path_of(member.linkname) if member.islnk() else ""
        if member.isdir() and _is_directory(name, parent):
            return
        self._remove(name, parent, path)
        if member.isdir():
            beneath.make_directory(name, parent)
        elif member.isreg():
            self._write(archive, member, name, parent)
        elif member.issym():
            beneath.make_symlink(member.linkname, name, parent)
        elif member.islnk():
            self._link(source, path, name, parent)
        elif member.isfifo():
            beneath.make_node(name, stat.S_IFIFO, 0, parent)
        elif member.ischr() and (member.devmajor, member.devminor) in _DEVICES:
            device = os.makedev(member.devmajor, member.devminor)
            beneath.make_node(name, stat.S_IFCHR, device, parent)
        elif member.isdev():
            raise ImageRefused(f"{path}: is a device of the host")
        else:
            raise ImageRefused(f"{path}: is of the unknown type {member.type!r}")

    def _write(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, name: str, parent: int
    ) -> None:
        parts: list[tuple[int, int]] = getattr(member, "sparse", None) or [(0, member.size)]
        self._limits.take(member.size)  # also of holes
        if any(offset < 0 or size < 0 or offset + size > member.size for offset, size in parts):
            raise ImageRefused(f"{member.name}: has data beyond its end")
        source = archive.extractfile(member)
        assert source is not None
        fd = beneath.create_file(name, parent)
        try:
            for offset, size in parts:
                source.seek(offset)
                for at in range(offset, offset + size, PIECE):
                    files.write_at(fd, source.read(min(PIECE, offset + size - at)), at)
            if os.fstat(fd).st_size != member.size:
                files.truncate(fd, member.size)  # it ends with a hole
        finally:
            files.close_file(fd)

    def _link(self, source: str, path: str, name: str, parent: int) -> None:
        above, _, last = source.rpartition("/")
        fd = os.dup(parent)  # the next line may leave it
        try:
            reached = self._reach(above, make=False)
            if reached is None:
                raise FileNotFoundError
            beneath.make_link(last, reached[1], name, fd)
        except (FileNotFoundError, PermissionError):
            raise ImageRefused(f"{path}: is a link to {source}, which is no file here") from None
        finally:
            os.close(fd)

    def _set_attributes(self, name: str, parent: int, path: str, member: tarfile.TarInfo) -> None:
        if not (0 <= member.uid < _NOBODY and 0 <= member.gid < _NOBODY):
            raise ImageRefused(f"{path}: belongs to an impossible user")
        beneath.set_owner(name, member.uid, member.gid, parent)
        if not member.issym():
            beneath.set_mode(name, member.mode & 0o7777, parent)
        for key, value in member.pax_headers.items():
            if key.startswith(_XATTR):
                self._set_xattr(name, parent, key.removeprefix(_XATTR), value, member)
        seconds = Decimal(member.pax_headers.get("mtime", member.mtime))
        mtime_ns = int(seconds * 1_000_000_000)
        if member.isdir():
            self._times[path] = mtime_ns
        else:
            beneath.set_time(name, mtime_ns, parent)

    def _set_xattr(
        self, name: str, parent: int, attribute: str, value: str, member: tarfile.TarInfo
    ) -> None:
        if attribute.startswith(_ORDERS):
            raise ImageRefused(f"{member.name}: has the attribute {attribute}, an order")
        if attribute.startswith(_KEPT) and (member.isreg() or member.isdir()):
            data = value.encode("utf-8", "surrogateescape")
            beneath.set_attribute(name, attribute, data, parent)

    def _hide(self, above: str, whiteout: str) -> None:
        """Remove a name, or all in a directory, of other layers."""
        hidden = whiteout.removeprefix(_WHITEOUT)
        if hidden in ("", ".", ".."):
            raise ImageRefused(f"{above}/{whiteout}: hides no name")
        reached = self._reach(above, make=False)
        if reached is None or (whiteout.startswith(_AUFS) and whiteout != _OPAQUE):
            return
        above, parent = reached
        fd = os.dup(parent)
        try:
            for name in os.listdir(fd) if whiteout == _OPAQUE else [hidden]:
                self._remove(name, fd, _join(above, name), self._fresh)
        finally:
            os.close(fd)

    def _remove(
        self, name: str, parent: int, path: str, kept: Container[str] = frozenset()
    ) -> None:
        """Remove this name and all below, except paths ``kept``."""
        if _is_directory(name, parent):
            fd = beneath.open_directory(name, parent)
            try:
                for below in os.listdir(fd):
                    self._remove(below, fd, _join(path, below), kept)
            finally:
                os.close(fd)
        if path not in kept:
            self._times.pop(path, None)
            if path == self._reached[0]:
                self._leave()
            beneath.remove(name, parent)

    def _note(self, path: str) -> None:
        while path not in self._fresh:
            self._fresh.add(path)
            path = path.rpartition("/")[0]

    def _reach(self, path: str, make: bool) -> tuple[str, int] | None:
        """A directory's path without symlinks, and a descriptor until the next call. Makes missing
        ones, or returns None."""
        if path == self._reached[0]:
            return self._reached
        self._leave()
        left = path.split("/")[::-1]
        names: list[str] = []
        fds = [os.dup(self._root)]  # of the root, and of each of the names
        followed = 0
        try:
            while left:
                name = left.pop()
                if name == "..":
                    if names:
                        names.pop()
                        os.close(fds.pop())
                elif name not in ("", "."):
                    if make and not _is_there(name, fds[-1]):
                        beneath.make_directory(name, fds[-1])
                    target = _target(name, fds[-1])
                    if target is None:
                        fds.append(beneath.open_directory(name, fds[-1]))
                        names.append(name)
                    else:
                        followed += 1
                        left += target.split("/")[::-1]
                        while names and target.startswith("/"):
                            names.pop()
                            os.close(fds.pop())
                if len(names) > DEPTH_MAX or followed > SYMLINKS_MAX:
                    raise ImageRefused(f"{path[:60]}: leads over too many directories or symlinks")
            self._reached = ("/".join(names), os.dup(fds[-1]))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ImageRefused(f"{path}: leads over a file") from None
        finally:
            for fd in fds:
                os.close(fd)
        return self._reached

    def _leave(self) -> None:
        _, fd = self._reached
        if fd != self._root:
            os.close(fd)
        self._reached = ("", self._root)


class _Forward:
    """A stream for tarfile that goes forward only."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self._at = 0

    def read(self, size: int) -> bytes:
        if size > HEADER_MAX:
            raise ImageRefused(f"a header of {size} bytes is too long")
        data = self._stream.read(size)
        self._at += len(data)
        return data

    def seek(self, offset: int) -> None:
        if offset < self._at:
            raise tarfile.ReadError("an entry refers to what lies before it")
        while self._at < offset and self.read(min(PIECE, offset - self._at)):
            pass

    def tell(self) -> int:
        return self._at

    def seekable(self) -> bool:
        """tarfile asks; it goes forward where entries do."""
        return True


def _path_of(name: str) -> str:
    """A path from the root, without ``.`` and leading slash; empty for the root."""
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if ".." in parts or "\0" in name:
        raise ImageRefused(f"{name!r}: leads out of the image")
    if any(part.startswith(_WHITEOUT) for part in parts[:-1]):
        raise ImageRefused(f"{name}: lies below a whiteout")
    if len(parts) > DEPTH_MAX or len(os.fsencode(name)) > NAME_MAX:
        raise ImageRefused(f"{name[:60]}...: is too long a path")
    return "/".join(parts)


def _join(above: str, name: str) -> str:
    return f"{above}/{name}" if above else name


def _is_there(name: str, parent: int) -> bool:
    try:
        os.lstat(name, dir_fd=parent)
    except FileNotFoundError:
        return False
    return True


def _is_directory(name: str, parent: int) -> bool:
    try:
        return stat.S_ISDIR(os.lstat(name, dir_fd=parent).st_mode)
    except FileNotFoundError:
        return False


def _target(name: str, parent: int) -> str | None:
    """A symlink's target, or None."""
    if not stat.S_ISLNK(os.lstat(name, dir_fd=parent).st_mode):
        return None
    return os.readlink(name, dir_fd=parent)
