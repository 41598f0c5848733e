"""What POSIX and Linux promise about modes, owners, times and extended attributes, case by case, on
a mount.
"""

import ctypes
import errno
import os
import select
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from aifs.core import files
from tests.support.mounts import Mounted
from tests.support.users import errno_of, in_process

NOBODY = 65534
PUNCH = files.PUNCH_HOLE | files.KEEP_SIZE
_libc = ctypes.CDLL(None, use_errno=True)

# --- modes, owners, times -------------------------------------------------------------------------


def test_umask(here: Path) -> None:
    before = os.umask(0o027)
    try:
        os.close(os.open("file", os.O_CREAT, 0o777))
        os.mkdir("dir", 0o777)
        os.mknod("fifo", stat.S_IFIFO | 0o666)
    finally:
        os.umask(before)
    assert [stat.S_IMODE(os.stat(name).st_mode) for name in ("file", "dir", "fifo")] == [
        0o750,
        0o750,
        0o640,
    ]


@pytest.mark.sweep
def test_setuid_and_setgid_are_cleared_by_writing(here: Path) -> None:
    os.chmod(".", 0o777)

    def as_nobody(change: Callable[[int], object]) -> int:
        path = here / "file"
        path.write_bytes(b"content")
        path.chmod(0o6777)

        def act() -> None:
            fd = os.open(path, os.O_RDWR)
            change(fd)
            os.close(fd)

        in_process(act, NOBODY)
        mode = stat.S_IMODE(path.stat().st_mode)
        path.unlink()
        return mode

    def zero(fd: int, mode: int) -> None:
        if errno_of(files.change_allocation, fd, mode, 0, 4) == errno.EOPNOTSUPP:
            os.write(fd, bytes(4))  # a mount without the bridge knows no holes

    assert as_nobody(lambda fd: os.write(fd, b"x")) == 0o777
    assert as_nobody(lambda fd: os.ftruncate(fd, 2)) == 0o777
    assert as_nobody(lambda fd: os.posix_fallocate(fd, 0, 100)) == 0o777
    assert as_nobody(lambda fd: zero(fd, PUNCH)) == 0o777
    assert as_nobody(lambda fd: zero(fd, files.ZERO_RANGE)) == 0o777
    assert as_nobody(lambda fd: os.copy_file_range(fd, fd, 2, 0, 4)) == 0o777
    assert as_nobody(lambda fd: os.read(fd, 2)) == 0o6777


def test_setuid_and_setgid_are_cleared_by_chown(file: Path) -> None:
    os.chmod("file", 0o6755)
    os.chown("file", 1000, 1000)
    assert stat.S_IMODE(os.stat("file").st_mode) == 0o755
    os.chmod("file", 0o2644)  # without group execution it means mandatory locking, and stays
    os.chown("file", 1001, 1001)
    assert stat.S_IMODE(os.stat("file").st_mode) in (0o2644, 0o644)
    os.mkdir("dir")
    os.chmod("dir", 0o6755)
    os.chown("dir", 1000, 1000)
    assert stat.S_IMODE(os.stat("dir").st_mode) == 0o6755


def test_setgid_directories_hand_down_their_group(here: Path) -> None:
    os.mkdir("shared")
    os.chown("shared", 0, 1234)
    os.chmod("shared", 0o2777)
    in_process(
        lambda: (
            os.mkdir("shared/dir"),
            open("shared/file", "x").close(),
            os.mkfifo("shared/fifo"),
        ),
        NOBODY,
    )
    assert {os.stat(f"shared/{name}").st_gid for name in ("dir", "file", "fifo")} == {1234}
    assert os.stat("shared/dir").st_mode & stat.S_ISGID
    assert not os.stat("shared/file").st_mode & stat.S_ISGID
    os.mkdir("plain", 0o777)
    os.chmod("plain", 0o777)
    in_process(lambda: open("plain/file", "x").close(), NOBODY)
    assert os.stat("plain/file").st_gid == NOBODY


def test_large_ids(file: Path) -> None:
    os.chown("file", 4_294_967_294, 3_000_000_000)
    info = os.stat("file")
    assert (info.st_uid, info.st_gid) == (4_294_967_294, 3_000_000_000)


def test_times_with_nanoseconds(file: Path, module_mount: Mounted) -> None:
    for atime_ns, mtime_ns in (
        (1, 2),
        (1_700_000_000_123_456_789, 4_102_444_800_999_999_999),
        (-1_500_000_000, 0),
    ):
        os.utime("file", ns=(atime_ns, mtime_ns))
        info = os.stat("file")
        assert (info.st_atime_ns, info.st_mtime_ns) == (atime_ns, mtime_ns)
        assert abs(info.st_ctime_ns - time.time_ns()) < 10**10
    os.chdir("/")
    module_mount.remount()
    assert (file.stat().st_atime_ns, file.stat().st_mtime_ns) == (-1_500_000_000, 0)


def test_times_beyond_what_is_kept_are_cut(file: Path) -> None:
    last_ns = (1 << 63) - 1
    for asked_s, kept_ns in (
        (1 << 40, last_ns),
        (-(1 << 40), -last_ns - 1),
        (13_569_465_600, last_ns),
    ):
        os.utime("file", ns=(asked_s * 10**9, asked_s * 10**9))
        assert (os.stat("file").st_atime_ns, os.stat("file").st_mtime_ns) == (kept_ns, kept_ns)


@pytest.mark.sweep
def test_times_are_in_the_order_of_changes(here: Path) -> None:
    """As make(1) needs it: of bytes, names, attributes and accesses, by the kernel and by us."""
    there, other = here / "there", here / "other"
    for _ in range(50):
        times = []
        there.write_bytes(b"source")
        times.append(there.stat().st_mtime_ns)
        there.read_bytes()
        times.append(there.stat().st_atime_ns)
        other.touch()
        times.append(other.stat().st_mtime_ns)
        os.utime(other)
        times.append(other.stat().st_mtime_ns)
        os.truncate(other, 5)
        times.append(other.stat().st_mtime_ns)
        with other.open("r+b") as file:
            file.write(b"more")
        times.append(other.stat().st_mtime_ns)
        os.mkdir("dir")
        times.append(os.stat("dir").st_mtime_ns)
        there.write_bytes(b"anew")
        times.append(there.stat().st_mtime_ns)
        there.chmod(0o640)
        times.append(there.stat().st_ctime_ns)
        os.setxattr(other, "user.x", b"")
        times.append(other.stat().st_ctime_ns)
        os.rmdir("dir")
        times.append(here.stat().st_mtime_ns)
        os.link(other, "link")
        times.append(other.stat().st_ctime_ns)
        os.unlink("link")
        times.append(other.stat().st_ctime_ns)
        other.unlink()
        times.append(here.stat().st_mtime_ns)
        assert times == sorted(times)


def test_which_times_move(file: Path) -> None:
    def moved(action: Callable[[], object], path: str = "file") -> str:
        before = os.lstat(path)
        action()
        after = os.lstat(path)
        return "".join(
            kind
            for kind in "mc"
            if getattr(after, f"st_{kind}time_ns") > getattr(before, f"st_{kind}time_ns")
        )

    def write(data: bytes) -> None:
        with open("file", "r+b") as stream:
            stream.write(data)

    os.mkdir("dir")
    assert moved(lambda: os.chmod("file", 0o600)) == "c"
    assert moved(lambda: os.chown("file", -1, 5)) == "c"
    assert moved(lambda: os.setxattr("file", "user.a", b"")) == "c"
    assert moved(lambda: os.removexattr("file", "user.a")) == "c"
    assert moved(lambda: os.link("file", "dir/link")) == "c"
    assert moved(lambda: os.unlink("dir/link")) == "c"
    assert moved(lambda: os.rename("file", "renamed") or os.rename("renamed", "file")) == "c"
    assert moved(lambda: write(b"x")) == "mc"
    assert moved(lambda: write(b"")) == ""
    assert moved(lambda: os.truncate("file", 1)) == "mc"
    assert moved(lambda: file.read_bytes()) == ""
    assert moved(lambda: os.symlink("x", "dir/s"), "dir") == "mc"
    assert moved(lambda: os.rename("dir/s", "dir/t"), "dir") == "mc"
    assert moved(lambda: os.unlink("dir/t"), "dir") == "mc"
    assert moved(lambda: os.mkdir("dir/sub"), "dir") == "mc"
    assert moved(lambda: open("dir/sub/file", "x").close(), "dir") == ""
    assert moved(lambda: os.stat("dir/sub/file"), "dir") == ""


def test_relatime(file: Path) -> None:
    old = 10**18
    os.utime("file", ns=(old, old + 1))
    assert file.read_bytes() == b"content"
    first = os.stat("file").st_atime_ns
    assert first > old + 1
    assert file.read_bytes() == b"content"
    assert os.stat("file").st_atime_ns == first


def test_an_old_access_time_is_renewed_after_a_day(file: Path) -> None:
    assert file.read_bytes() == b"content"
    os.utime("file", ns=(time.time_ns() - 2 * 86400 * 10**9, 5))
    before = os.stat("file").st_atime_ns
    assert file.read_bytes() == b"content"
    assert os.stat("file").st_atime_ns > before


@pytest.mark.sweep
def test_special_files(here: Path, module_mount: Mounted) -> None:
    os.mknod("char", stat.S_IFCHR | 0o600, os.makedev(1, 3))
    os.mknod("block", stat.S_IFBLK | 0o600, os.makedev(259, 70000))
    os.mknod("socket", stat.S_IFSOCK | 0o600)
    os.mknod("plain", stat.S_IFREG | 0o600)
    os.mkfifo("fifo")

    def look() -> list[tuple[int, int]]:
        infos = [os.lstat(here / name) for name in ("char", "block", "socket", "plain", "fifo")]
        return [(stat.S_IFMT(info.st_mode), info.st_rdev) for info in infos]

    expected = [
        (stat.S_IFCHR, os.makedev(1, 3)),
        (stat.S_IFBLK, os.makedev(259, 70000)),
        (stat.S_IFSOCK, 0),
        (stat.S_IFREG, 0),
        (stat.S_IFIFO, 0),
    ]
    assert look() == expected
    os.chdir("/")
    module_mount.remount()
    assert look() == expected


def test_fifos_carry_bytes(here: Path) -> None:
    os.mkfifo("fifo")
    reader = os.open("fifo", os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open("fifo", os.O_WRONLY)
    os.write(writer, b"through")
    assert select.select([reader], [], [], 10)[0]
    assert os.read(reader, 100) == b"through"
    os.close(reader)
    os.close(writer)


def test_sockets_can_be_bound(here: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("s")
        server.listen()
        client.connect("s")
        connection, _ = server.accept()
        client.sendall(b"hello")
        assert connection.recv(10) == b"hello"
        connection.close()
    assert stat.S_ISSOCK(os.stat("s").st_mode)


# --- extended attributes --------------------------------------------------------------------------


def test_extended_attributes(file: Path) -> None:
    assert errno_of(os.getxattr, "file", "user.a") == errno.ENODATA
    assert errno_of(os.setxattr, "file", "user.a", b"1", os.XATTR_REPLACE) == errno.ENODATA
    os.setxattr("file", "user.a", b"1", os.XATTR_CREATE)
    assert errno_of(os.setxattr, "file", "user.a", b"1", os.XATTR_CREATE) == errno.EEXIST
    os.setxattr("file", "user.a", b"", os.XATTR_REPLACE)
    assert os.getxattr("file", "user.a") == b""
    for name in ("user.b", "trusted.c", "security.d"):
        os.setxattr("file", name, os.urandom(10))
    assert sorted(os.listxattr("file")) == ["security.d", "trusted.c", "user.a", "user.b"]
    os.removexattr("file", "user.a")
    assert errno_of(os.removexattr, "file", "user.a") == errno.ENODATA
    os.mkdir("dir")
    os.setxattr("dir", "user.a", b"of a directory")
    os.symlink("file", "link")
    os.setxattr("link", "trusted.a", b"of a link", follow_symlinks=False)
    assert os.getxattr("link", "trusted.a", follow_symlinks=False) == b"of a link"
    assert errno_of(os.setxattr, "link", "user.a", b"", follow_symlinks=False) == errno.EPERM
    assert errno_of(os.setxattr, "file", "unknown.a", b"") == errno.EOPNOTSUPP


@pytest.mark.sweep
def test_limits_of_extended_attributes(file: Path) -> None:
    large = os.urandom(65536)
    os.setxattr("file", "user.large", large)
    assert os.getxattr("file", "user.large") == large
    assert errno_of(os.setxattr, "file", "user.x", bytes(65537)) == errno.E2BIG
    os.setxattr("file", "user." + "n" * 250, b"")
    assert errno_of(os.setxattr, "file", "user." + "n" * 251, b"") == errno.ERANGE
    buffer = ctypes.create_string_buffer(100)
    assert _libc.getxattr(b"file", b"user.large", buffer, 100) == -1
    assert ctypes.get_errno() == errno.ERANGE
    assert _libc.getxattr(b"file", b"user.large", None, 0) == 65536
    assert _libc.listxattr(b"file", buffer, 3) == -1
    assert ctypes.get_errno() == errno.ERANGE
    numbers = range(1000)
    failed = [
        number
        for number in numbers
        if errno_of(os.setxattr, "file", f"user.{number:0200}", b"") != 0
    ]
    assert (
        failed == [] or errno_of(os.setxattr, "file", f"user.{failed[0]:0200}", b"") == errno.ENOSPC
    )
    assert len(os.listxattr("file")) == 2 + len(numbers) - len(failed)


def test_each_change_of_an_open_file_that_was_written_moves_its_ctime(here: Path) -> None:
    """The last stamp that a program saw may be the kernel's of the burst copy."""
    with (here / "written").open("w+b", buffering=0) as opened:
        for number in range(50):
            os.pwrite(opened.fileno(), bytes(5000), number)
            before = os.fstat(opened.fileno()).st_ctime_ns
            os.setxattr(opened.fileno(), "user.number", b"%d" % number)
            after = os.fstat(opened.fileno()).st_ctime_ns
            os.fchmod(opened.fileno(), 0o600 + number % 2)
            assert before < after < os.fstat(opened.fileno()).st_ctime_ns
