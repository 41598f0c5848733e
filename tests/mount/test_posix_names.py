"""What POSIX and Linux promise about names and directories, case by case, on a mount."""

import ctypes
import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support import caches
from tests.support.machine import RENAME_EXCHANGE, RENAME_NOREPLACE, renameat2
from tests.support.mounts import Mounted
from tests.support.users import errno_of

_libc = ctypes.CDLL(None, use_errno=True)

# --- names ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_names_up_to_255_bytes(here: Path) -> None:
    for make in (
        os.mkdir,
        os.mkfifo,
        lambda name: os.symlink("x", name),
        lambda name: open(name, "x").close(),
    ):
        make("n" * 255)
        assert os.listdir() == ["n" * 255]
        os.rename("n" * 255, "short")
        os.rename("short", "m" * 255)
        (os.rmdir if stat.S_ISDIR(os.lstat("m" * 255).st_mode) else os.unlink)("m" * 255)
        assert errno_of(make, "n" * 256) == errno.ENAMETOOLONG
    assert errno_of(os.stat, "n" * 256) == errno.ENAMETOOLONG
    assert os.listdir() == []


@pytest.mark.sweep
def test_names_may_hold_any_byte_but_slash_and_nul(here: Path) -> None:
    names = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    names += [b"...", b". ", b"\xc3\x28", "ä".encode(), b"-rf", b"\n\n"]
    for name in names:
        os.close(os.open(name, os.O_CREAT | os.O_EXCL))
    assert sorted(os.listdir(b".")) == sorted(names)
    for name in names:
        os.unlink(name)
    assert os.listdir() == []


def test_long_paths_and_deep_directories(here: Path) -> None:
    depth = 15
    for _ in range(depth):
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    open("bottom", "x").close()
    for _ in range(depth):
        os.chdir("..")
    path = "/".join(["d" * 250] * depth)
    assert os.stat(path + "/bottom").st_size == 0
    assert errno_of(os.stat, "/".join(["d" * 250] * (depth + 2))) == errno.ENAMETOOLONG
    assert errno_of(os.stat, "missing/below") == errno.ENOENT
    assert errno_of(os.stat, path + "/bottom/below") == errno.ENOTDIR


def test_symlinks(here: Path) -> None:
    os.symlink("loop", "loop")
    assert errno_of(os.stat, "loop") == errno.ELOOP
    os.symlink("t" * 4095, "long")
    assert os.readlink("long") == "t" * 4095
    assert os.lstat("long").st_size == 4095
    os.symlink("nowhere", "dangling")
    assert errno_of(os.open, "dangling", os.O_RDONLY) == errno.ENOENT
    assert errno_of(os.open, "dangling", os.O_RDONLY | os.O_NOFOLLOW) == errno.ELOOP
    os.close(os.open("dangling", os.O_CREAT | os.O_WRONLY))
    assert os.path.isfile("nowhere")
    assert errno_of(os.open, "dangling", os.O_CREAT | os.O_EXCL) == errno.EEXIST
    assert errno_of(os.readlink, "nowhere") == errno.EINVAL
    os.link("dangling", "another", follow_symlinks=False)
    assert os.lstat("dangling").st_nlink == 2
    assert stat.S_IMODE(os.lstat("dangling").st_mode) == 0o777


def test_dot_and_dot_dot(here: Path) -> None:
    os.mkdir("a")
    assert os.stat("a/..").st_ino == os.stat(".").st_ino == os.stat("a/../a/..").st_ino
    assert os.stat("..").st_ino == here.parent.stat().st_ino
    assert errno_of(os.rmdir, "a/.") == errno.EINVAL
    assert errno_of(os.rmdir, "a/..") == errno.ENOTEMPTY
    assert errno_of(os.rename, "a/.", "b") == errno.EBUSY
    assert errno_of(os.mkdir, "a/.") == errno.EEXIST


# --- directories ----------------------------------------------------------------------------------


def test_rmdir(here: Path) -> None:
    os.makedirs("a/b")
    assert errno_of(os.rmdir, "a") == errno.ENOTEMPTY
    os.symlink("b", "a/link")
    assert errno_of(os.rmdir, "a/link") == errno.ENOTDIR
    os.rmdir("a/b")
    assert errno_of(os.rmdir, "a") == errno.ENOTEMPTY
    os.unlink("a/link")
    assert errno_of(os.unlink, "a") == errno.EISDIR
    os.rmdir("a")
    assert errno_of(os.rmdir, "a") == errno.ENOENT
    assert os.listdir() == []


def test_link_counts_of_directories(here: Path) -> None:
    assert os.stat(".").st_nlink == 2
    for number in range(20):
        os.mkdir(f"d{number}")
    open("file", "x").close()
    assert os.stat(".").st_nlink == 22
    os.rename("d0", "d1/d0")
    assert os.stat(".").st_nlink == 21
    assert os.stat("d1").st_nlink == 3
    os.rename("d1/d0", "d2")
    assert (os.stat(".").st_nlink, os.stat("d1").st_nlink, os.stat("d2").st_nlink) == (21, 2, 2)


def test_a_removed_working_directory(here: Path) -> None:
    os.mkdir("gone")
    os.chdir("gone")
    os.rmdir("../gone")
    assert os.listdir() == []
    assert errno_of(os.mkdir, "x") == errno.ENOENT
    assert errno_of(os.open, "x", os.O_CREAT | os.O_WRONLY) == errno.ENOENT
    assert errno_of(os.symlink, "x", "y") == errno.ENOENT
    assert errno_of(os.stat, "x") == errno.ENOENT
    assert errno_of(os.getcwd) == errno.ENOENT
    assert os.stat(".").st_nlink == 0
    os.chdir(here)


def test_an_open_directory_that_is_removed(here: Path) -> None:
    os.mkdir("gone")
    fd = os.open("gone", os.O_RDONLY | os.O_DIRECTORY)
    os.rmdir("gone")
    assert os.listdir(fd) == []
    assert os.fstat(fd).st_nlink == 0
    assert errno_of(os.open, "x", os.O_CREAT | os.O_WRONLY, dir_fd=fd) == errno.ENOENT
    os.fsync(fd)
    os.close(fd)


class _Dirent(ctypes.Structure):
    _fields_ = (
        ("ino", ctypes.c_uint64),
        ("off", ctypes.c_int64),
        ("reclen", ctypes.c_ushort),
        ("type", ctypes.c_ubyte),
        ("name", ctypes.c_char * 256),
    )


class _Dir:
    """opendir(3), readdir(3), telldir(3), seekdir(3)."""

    def __init__(self, path: str) -> None:
        _libc.opendir.restype = _libc.readdir.restype = ctypes.c_void_p
        _libc.telldir.restype = ctypes.c_long
        self._stream = ctypes.c_void_p(_libc.opendir(path.encode()))
        assert self._stream.value

    def read(self) -> str | None:
        address = _libc.readdir(self._stream)
        return _Dirent.from_address(address).name.decode() if address else None

    def read_inode(self) -> tuple[str, int]:
        entry = _Dirent.from_address(_libc.readdir(self._stream))
        return entry.name.decode(), entry.ino

    def rest(self) -> list[str]:
        return list(iter(self.read, None))

    def tell(self) -> int:
        return _libc.telldir(self._stream)

    def seek(self, place: int) -> None:
        _libc.seekdir(self._stream, ctypes.c_long(place))

    def close(self) -> None:
        _libc.closedir(self._stream)


@pytest.mark.sweep
def test_telldir_and_seekdir(here: Path) -> None:
    names = {f"n{number}" for number in range(700)}
    for name in names:
        open(name, "x").close()
    directory = _Dir(".")
    start = directory.tell()
    places: list[tuple[int, str | None]] = []
    while True:
        place = directory.tell()
        name = directory.read()
        places.append((place, name))
        if name is None:
            break
    listed = [name for _, name in places if name not in (None, ".", "..")]
    assert sorted(listed) == sorted(names)
    for place, name in places[::-37]:
        directory.seek(place)
        assert directory.read() == name
    directory.seek(start)
    assert set(directory.rest()) >= names
    directory.close()


@pytest.mark.sweep
def test_readdir_while_the_directory_changes(here: Path) -> None:
    stay = {f"stay{number}" for number in range(600)}
    go = [f"go{number}" for number in range(600)]
    for name in [*stay, *go]:
        open(name, "x").close()
    directory = _Dir(".")
    seen: list[str] = []
    for number in range(600):
        seen.append(directory.read() or "")
        os.unlink(go[number])
        open(f"new{number}", "x").close()
        if number % 3 == 0:
            os.rename(f"new{number}", f"renamed{number}")
    seen += directory.rest()
    directory.close()
    seen = [name for name in seen if name not in ("", ".", "..")]
    assert stay <= set(seen)
    assert len(seen) == len(set(seen))
    assert set(os.listdir()) == stay | {
        name for name in os.listdir() if name.startswith(("new", "renamed"))
    }
    assert len(os.listdir()) == 1200


@pytest.mark.sweep
def test_removing_while_listing(here: Path) -> None:
    """What rm -r does: each name is removed as soon as it has been read."""
    for number in range(1500):
        open(f"f{number}", "x").close()
    removed = 0
    with os.scandir(".") as entries:
        for entry in entries:
            os.unlink(entry.name)
            removed += 1
    assert removed == 1500
    assert os.listdir() == []


def test_entry_types_and_inode_numbers_in_listings(here: Path) -> None:
    os.mkdir("dir")
    open("file", "x").close()
    os.symlink("file", "link")
    os.mkfifo("fifo")
    with os.scandir(".") as entries:
        for entry in entries:
            assert entry.inode() == os.lstat(entry.name).st_ino
            expected = (entry.name == "dir", entry.name == "file", entry.name == "link")
            assert (
                entry.is_dir(follow_symlinks=False),
                entry.is_file(follow_symlinks=False),
                entry.is_symlink(),
            ) == expected


def test_a_listing_begins_with_the_directory_and_its_parent(here: Path) -> None:
    os.makedirs("dir/below")
    for path, above in (("dir", "."), ("dir/below", "dir")):
        directory = _Dir(path)
        assert directory.read_inode() == (".", os.stat(path).st_ino)
        after_dot = directory.tell()
        assert directory.read_inode() == ("..", os.stat(above).st_ino)
        rest = directory.rest()
        directory.seek(after_dot)
        assert directory.rest() == ["..", *rest]
        directory.close()
    assert rest == []


# --- file handles ---------------------------------------------------------------------------------


class _FileHandle(ctypes.Structure):
    _fields_ = (
        ("bytes", ctypes.c_uint),
        ("type", ctypes.c_int),
        ("handle", ctypes.c_char * 128),
    )


def _file_handle(path: str) -> _FileHandle:
    """name_to_handle_at(2)."""
    handle, mount = _FileHandle(128), ctypes.c_int()
    if _libc.name_to_handle_at(-100, path.encode(), ctypes.byref(handle), ctypes.byref(mount), 0):
        raise OSError(ctypes.get_errno(), path)
    return handle


def _open_by_handle(handle: _FileHandle, flags: int = os.O_RDONLY) -> int:
    """open_by_handle_at(2) on the filesystem of the working directory."""
    mount = os.open(".", os.O_RDONLY)
    try:
        fd = _libc.open_by_handle_at(mount, ctypes.byref(handle), flags)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "open_by_handle_at")
        return fd
    finally:
        os.close(mount)


@pytest.mark.sweep
def test_file_handles_find_what_the_kernel_has_forgotten(here: Path) -> None:
    os.makedirs("a/b")
    Path("a/b/file").write_bytes(b"content")
    os.link("a/b/file", "other")
    handles = {path: _file_handle(path) for path in ("a/b/file", "a/b", "other")}
    os.rename("a/b/file", "moved")
    os.unlink("other")
    caches.drop()
    for path, handle in handles.items():
        fd = _open_by_handle(handle)
        if path == "a/b":
            assert os.readlink(f"/proc/self/fd/{fd}") == str(here / "a/b")
            assert os.fstat(fd).st_ino == os.stat("a/b").st_ino
        else:
            assert os.read(fd, 100) == b"content"
        os.close(fd)
    os.unlink("moved")
    caches.drop()
    assert errno_of(_open_by_handle, handles["a/b/file"]) == errno.ESTALE


# --- links, rename, removal -----------------------------------------------------------------------


def test_hard_links_share_everything(file: Path) -> None:
    os.link("file", "other")
    assert os.stat("file").st_ino == os.stat("other").st_ino
    assert os.stat("file").st_nlink == 2
    os.chmod("other", 0o600)
    os.setxattr("file", "user.a", b"1")
    with open("other", "ab") as stream:
        stream.write(b" more")
    assert (stat.S_IMODE(file.stat().st_mode), file.read_bytes()) == (0o600, b"content more")
    assert os.getxattr("other", "user.a") == b"1"
    os.unlink("file")
    assert os.stat("other").st_nlink == 1
    assert Path("other").read_bytes() == b"content more"
    os.mkdir("dir")
    assert errno_of(os.link, "dir", "dirlink") == errno.EPERM
    assert errno_of(os.link, "other", "dir") == errno.EEXIST
    assert errno_of(os.link, "missing", "x") == errno.ENOENT


def test_an_unlinked_open_file_lives_on(here: Path) -> None:
    for size in (100, 3_000_000):
        fd = os.open("file", os.O_RDWR | os.O_CREAT, 0o600)
        os.write(fd, b"a" * size)
        os.unlink("file")
        assert os.fstat(fd).st_nlink == 0
        assert os.pread(fd, 10, size - 10) == b"a" * 10
        os.pwrite(fd, b"b" * 5000, size)
        os.ftruncate(fd, size + 4000)
        os.fchmod(fd, 0o400)
        os.setxattr(fd, "user.x", b"y")
        os.fsync(fd)
        assert os.pread(fd, 10000, size) == b"b" * 4000
        info = os.fstat(fd)
        assert (info.st_size, stat.S_IMODE(info.st_mode), os.getxattr(fd, "user.x")) == (
            size + 4000,
            0o400,
            b"y",
        )
        open("file", "x").close()
        assert os.stat("file").st_ino != info.st_ino
        os.unlink("file")
        os.close(fd)


def test_an_unlinked_open_file_is_reached_by_proc(here: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"hidden")
    os.unlink("file")
    assert Path(f"/proc/self/fd/{fd}").read_bytes() == b"hidden"
    os.truncate(f"/proc/self/fd/{fd}", 3)
    assert os.pread(fd, 10, 0) == b"hid"
    os.close(fd)


@pytest.mark.sweep
def test_space_of_deleted_files_comes_back(here: Path, module_mount: Mounted) -> None:
    def sizes() -> dict[Path, int]:
        """Meanwhile the objects go that other tests have left, and directories of objects."""
        found = {}
        for directory, _, names in os.walk(module_mount.source):
            for path in map(Path(directory).joinpath, names):
                if "objects" in path.parts:
                    with suppress(FileNotFoundError):
                        found[path] = path.stat().st_size
        return found

    before = sizes()
    with open("large", "xb") as stream:
        stream.write(b"x" * 8_000_000)
        os.fsync(stream.fileno())
        made = {path: size for path, size in sizes().items() if before.get(path) != size}
    objects = [
        path for path, size in made.items() if size == 8_000_000
    ] or made  # one in the burst tier, or several
    assert sum(made[path] for path in objects) == 8_000_000
    os.unlink("large")
    os.chdir("/")
    module_mount.remount()
    assert not any(path.exists() for path in objects)


def test_rename_replaces(here: Path) -> None:
    Path("a").write_bytes(b"new")
    Path("b").write_bytes(b"old")
    os.link("b", "keep")
    open_fd = os.open("b", os.O_RDONLY)
    number = os.stat("a").st_ino
    before = os.stat("a").st_ctime_ns
    os.rename("a", "b")
    assert os.stat("b").st_ino == number
    assert os.stat("b").st_ctime_ns > before
    assert os.stat("keep").st_nlink == os.fstat(open_fd).st_nlink == 1
    assert os.read(open_fd, 10) == b"old"
    os.close(open_fd)
    assert errno_of(os.stat, "a") == errno.ENOENT
    os.link("b", "same")
    os.rename("b", "same")
    assert sorted(os.listdir()) == ["b", "keep", "same"]


def test_rename_of_directories(here: Path) -> None:
    os.makedirs("a/b/c")
    os.makedirs("full/x")
    os.mkdir("empty")
    open("file", "x").close()
    assert errno_of(os.rename, "a", "a/b/d") == errno.EINVAL
    assert errno_of(os.rename, "a", "full") == errno.ENOTEMPTY
    assert errno_of(os.rename, "a/b", "a") == errno.ENOTEMPTY
    assert errno_of(os.rename, "a", "file") == errno.ENOTDIR
    assert errno_of(os.rename, "file", "empty") == errno.EISDIR
    assert errno_of(os.rename, "missing", "x") == errno.ENOENT
    assert errno_of(os.rename, "a", "missing/x") == errno.ENOENT
    os.rename("a", "empty")
    assert os.path.isdir("empty/b/c")
    os.chdir("empty/b")
    os.rename("../../empty", "../../moved")
    assert os.getcwd() == str(here / "moved" / "b")
    assert os.stat("..").st_ino == os.stat(here / "moved").st_ino
    os.chdir(here)
    os.rename("moved/b", "b")
    assert os.stat("b/..").st_ino == os.stat(".").st_ino


def test_rename_flags(here: Path) -> None:
    Path("a").write_bytes(b"a")
    os.makedirs("d/below")
    assert errno_of(renameat2, b"a", b"d", RENAME_NOREPLACE) == errno.EEXIST
    assert errno_of(renameat2, b"a", b"missing", RENAME_EXCHANGE) == errno.ENOENT
    assert errno_of(renameat2, b"a", b"d", RENAME_EXCHANGE | RENAME_NOREPLACE) == errno.EINVAL
    assert errno_of(renameat2, b"d", b"d/below", RENAME_EXCHANGE) == errno.EINVAL
    renameat2(b"a", b"b", RENAME_NOREPLACE)
    renameat2(b"b", b"d", RENAME_EXCHANGE)
    assert Path("d").read_bytes() == b"a"
    assert os.listdir("b") == ["below"]
    renameat2(b"d", b"b/below", RENAME_EXCHANGE)
    assert Path("b/below").read_bytes() == b"a"
    assert os.stat("d/..").st_ino == os.stat(".").st_ino
    assert (os.stat("b").st_nlink, os.stat(".").st_nlink) == (2, 4)


def test_rename_of_an_open_file(file: Path) -> None:
    fd = os.open("file", os.O_RDWR)
    os.write(fd, b"C")
    os.mkdir("d")
    os.rename("file", "d/moved")
    os.pwrite(fd, b"T", 6)
    os.close(fd)
    assert Path("d/moved").read_bytes() == b"ContenT"


def test_create_flags(file: Path) -> None:
    assert errno_of(os.open, "file", os.O_CREAT | os.O_EXCL) == errno.EEXIST
    assert errno_of(os.open, "missing", os.O_RDWR) == errno.ENOENT
    os.mkdir("dir")
    assert errno_of(os.open, "dir", os.O_WRONLY) == errno.EISDIR
    assert errno_of(os.open, "dir", os.O_RDWR | os.O_CREAT) == errno.EISDIR
    assert errno_of(os.open, "file", os.O_DIRECTORY) == errno.ENOTDIR
    assert errno_of(os.open, "file/", os.O_RDONLY) == errno.ENOTDIR
    os.close(os.open("file", os.O_WRONLY | os.O_TRUNC))
    assert os.stat("file").st_size == 0
    fd = os.open("readonly", os.O_RDWR | os.O_CREAT, 0o000)
    assert os.write(fd, b"still writable") == 14
    os.close(fd)
