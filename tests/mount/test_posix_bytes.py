"""What POSIX and Linux promise about bytes, mappings, locks and the filesystem as a whole, case by
case.
"""

import ctypes
import errno
import fcntl
import json
import mmap
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mounted
from tests.support.users import errno_of, in_process

_libc = ctypes.CDLL(None, use_errno=True)
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_MS_SYNC = 4

# --- bytes ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_sparse_file_of_8_tib(here: Path) -> None:
    size = 8 << 40
    fd = os.open("sparse", os.O_RDWR | os.O_CREAT)
    os.ftruncate(fd, size)
    assert os.fstat(fd).st_size == size
    assert os.fstat(fd).st_blocks == 0
    os.pwrite(fd, b"end", size - 3)
    os.pwrite(fd, b"middle", size // 2 - 3)
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    assert os.pread(fd, 100, 0) == bytes(100)
    assert os.pread(fd, 100, size // 2 - 50) == bytes(47) + b"middle" + bytes(47)
    assert os.pread(fd, 100, size - 50) == bytes(47) + b"end"
    assert os.pread(fd, 100, size) == b""
    os.pwrite(fd, b"beyond", size)
    assert os.fstat(fd).st_size == size + 6
    os.close(fd)
    os.unlink("sparse")


def test_the_end_of_what_a_file_can_be(here: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_CREAT)
    assert errno_of(os.ftruncate, fd, (1 << 63) - 1) == errno.EFBIG
    assert errno_of(os.ftruncate, fd, -1) == errno.EINVAL
    assert os.fstat(fd).st_size == 0
    os.close(fd)


def test_blocks(here: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 3_000_000, 0)
    assert 3_000_000 <= os.fstat(fd).st_blocks * 512 <= 3_100_000
    os.fsync(fd)
    assert 3_000_000 <= os.fstat(fd).st_blocks * 512 <= 3_100_000
    os.ftruncate(fd, 0)
    assert os.fstat(fd).st_blocks == 0
    os.pwrite(fd, b"x", 50 << 20)
    assert 1 <= os.fstat(fd).st_blocks <= 64
    os.close(fd)
    assert 1 <= os.stat("file").st_blocks <= 64
    Path("tiny").write_bytes(b"tiny")
    assert os.stat("tiny").st_blocks >= 1


def test_data_and_hole_seeking_is_correct_if_not_clever(here: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_CREAT)
    os.pwrite(fd, b"x" * 5000, 10 << 20)
    size = os.fstat(fd).st_size
    assert 0 <= os.lseek(fd, 0, os.SEEK_DATA) <= 10 << 20
    assert os.lseek(fd, 10 << 20, os.SEEK_DATA) == 10 << 20
    assert os.lseek(fd, 10 << 20, os.SEEK_HOLE) == size
    assert errno_of(os.lseek, fd, size, os.SEEK_DATA) == errno.ENXIO
    os.close(fd)


def test_data_that_a_mapping_has_written_is_found(here: Path, file: Path) -> None:
    """Also where the kernel holds it back, as of a file that is not passed through when it is
    opened first."""
    file.chmod(0o4755)
    fd = os.open(file, os.O_RDWR)
    os.ftruncate(fd, 0)
    os.pwrite(fd, b"x" * 1000, 80_000)
    with mmap.mmap(fd, 20_000) as memory:
        memory[5000] = 1
        assert os.lseek(fd, 101, os.SEEK_DATA) <= 5000
        assert os.lseek(fd, 5000, os.SEEK_HOLE) > 5000
    os.close(fd)
    fd = os.open(file, os.O_RDONLY)
    assert os.lseek(fd, 101, os.SEEK_DATA) <= 5000
    os.close(fd)


def test_append_of_several_writers(here: Path) -> None:
    def write(letter: bytes) -> Callable[[], None]:
        def act() -> None:
            fd = os.open("log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            for _ in range(100):
                os.write(fd, letter * 99 + b"\n")
            os.close(fd)

        return act

    pids = []
    for letter in (b"a", b"b", b"c"):
        pid = os.fork()
        if pid == 0:
            try:
                write(letter)()
                os._exit(0)
            finally:
                os._exit(1)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0, 0, 0]
    lines = Path("log").read_bytes().splitlines()
    assert sorted(lines) == sorted([letter * 99 for letter in (b"a", b"b", b"c")] * 100)


def test_posix_fallocate_works(here: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_CREAT)
    os.write(fd, b"start")
    result = errno_of(os.posix_fallocate, fd, 0, 100_000)
    assert result in (0, errno.EOPNOTSUPP)
    assert os.fstat(fd).st_size == (100_000 if result == 0 else 5)
    assert os.pread(fd, 10, 0).startswith(b"start")
    os.close(fd)


def test_copying_in_the_kernel(here: Path) -> None:
    data = os.urandom(300_000)
    Path("from").write_bytes(data)
    source, target = os.open("from", os.O_RDONLY), os.open("to", os.O_RDWR | os.O_CREAT)
    count = 0
    while part := os.copy_file_range(source, target, len(data) - count, count, count):
        count += part
    assert os.pread(target, 400_000, 0) == data
    os.ftruncate(target, 0)
    while sent := os.sendfile(target, source, None, 1 << 20):
        count -= sent
    assert count == 0
    assert Path("to").read_bytes() == data
    os.close(source)
    os.close(target)


def test_mappings(here: Path) -> None:
    data = os.urandom(5 << 20)
    Path("file").write_bytes(data)
    with open("file", "r+b") as stream:
        shared = mmap.mmap(stream.fileno(), 0)
        private = mmap.mmap(stream.fileno(), 0, mmap.MAP_PRIVATE)
        assert shared[:] == data
        shared[(1 << 20) - 5 : (1 << 20) + 5] = b"0123456789"
        private[:3] = b"own"
        assert private[(1 << 20) - 5 : (1 << 20) + 5] == b"0123456789"
        assert os.pread(stream.fileno(), 10, (1 << 20) - 5) == b"0123456789"
        assert os.pread(stream.fileno(), 3, 0) == data[:3]
        os.pwrite(stream.fileno(), b"by write", 100)
        assert shared[100:108] == b"by write"
        shared.flush()
        shared.close()
        private.close()
    expected = bytearray(data)
    expected[(1 << 20) - 5 : (1 << 20) + 5] = b"0123456789"
    expected[100:108] = b"by write"
    assert Path("file").read_bytes() == expected


def test_mapping_beside_an_append_descriptor(here: Path) -> None:
    """The kernel writes changed pages back through any descriptor that is open for writing."""
    data = os.urandom(80_000)
    append = os.open("file", os.O_RDWR | os.O_APPEND | os.O_CREAT)
    os.write(append, data)
    with mmap.mmap(append, 0) as shared:
        shared[20_000:20_003] = b"new"
        shared.flush()
    assert os.fstat(append).st_size == 80_000
    os.write(append, b"end")
    os.close(append)
    assert Path("file").read_bytes() == data[:20_000] + b"new" + data[20_003:] + b"end"


def test_a_program_runs_from_the_mount(here: Path) -> None:
    program = Path("program")
    program.write_bytes(Path("/bin/true").resolve().read_bytes())
    program.chmod(0o755)
    assert subprocess.run([program.absolute()], check=False).returncode == 0
    script = Path("script")
    script.write_text("#!/bin/sh\necho $1\n")
    script.chmod(0o755)
    assert (
        subprocess.run([script.absolute(), "word"], check=True, capture_output=True).stdout
        == b"word\n"
    )


# --- locks ----------------------------------------------------------------------------------------


@pytest.mark.sweep
def test_locks_between_processes(file: Path) -> None:
    def try_lock(lock: Callable[[int, int], object]) -> int:
        def act() -> int:
            fd = os.open(file, os.O_RDWR)
            return errno_of(lock, fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

        return in_process(act)

    fd = os.open("file", os.O_RDWR)
    for lock in (fcntl.flock, fcntl.lockf):
        lock(fd, fcntl.LOCK_EX)
        assert try_lock(lock) == errno.EAGAIN
        lock(fd, fcntl.LOCK_UN)
        assert try_lock(lock) == 0
        lock(fd, fcntl.LOCK_SH)
        assert try_lock(lock) == errno.EAGAIN
        lock(fd, fcntl.LOCK_UN)
    fcntl.lockf(fd, fcntl.LOCK_EX, 10, 0)
    assert in_process(lambda: errno_of(_lock_range, file, 10)) == 0
    assert in_process(lambda: errno_of(_lock_range, file, 9)) == errno.EAGAIN
    os.close(fd)
    assert try_lock(fcntl.lockf) == 0


def _lock_range(path: Path, start: int) -> None:
    fcntl.lockf(os.open(path, os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB, 5, start)


# --- mappings and times ---------------------------------------------------------------------------


@pytest.mark.parametrize("is_closed", [False, True], ids=["open", "closed"])
def test_each_write_by_a_mapping_moves_mtime(
    here: Path, module_mount: Mounted, is_closed: bool
) -> None:
    """Whoever copies what has changed (rsync) sees it by that, while the file stays mapped, also
    without a descriptor."""
    expected = mtimes_of_mapped_writes(module_mount.path.parent / "local", is_closed)
    if not all(expected):
        pytest.skip("the local filesystem, such as tmpfs, does not move it either")
    assert mtimes_of_mapped_writes(here / "file", is_closed) == expected


def mtimes_of_mapped_writes(path: Path, is_closed: bool) -> list[bool]:
    """After each of some mapped writes, and in its listing, whether stat shows a new mtime."""
    size, moved = 64 << 10, []
    path.write_bytes(bytes(size))
    fd = os.open(path, os.O_RDWR)
    address = _mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    if is_closed:
        os.close(fd)
    for offset in range(0, size, size // 4):
        os.utime(path, (1, 1))
        assert path.stat().st_mtime == 1
        listed = [
            each.stat().st_mtime for each in os.scandir(path.parent) if each.name == path.name
        ]
        assert listed == [1]
        ctypes.memset(address + offset, 1, 1)
        assert _libc.msync(ctypes.c_void_p(address), ctypes.c_size_t(size), _MS_SYNC) == 0
        moved.append(path.stat().st_mtime > 1)
        os.utime(path, (1, 1))
        assert path.stat().st_mtime == 1
    _libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))
    if not is_closed:
        os.close(fd)
    assert path.read_bytes().count(1) == 4
    return moved


# --- the whole ------------------------------------------------------------------------------------


def test_statvfs(here: Path, module_mount: Mounted) -> None:
    while json.loads(os.getxattr(module_mount.path, "user.aifs.status"))["collector_backlog"]:
        pass  # what earlier tests have removed counts until it has been collected
    found, below = os.statvfs(here), os.statvfs(module_mount.source)
    assert found.f_namemax == 255
    total, expected = found.f_blocks * found.f_frsize, below.f_blocks * below.f_frsize
    assert abs(total - expected) <= expected // 1000
    assert 0 < found.f_bavail <= found.f_bfree <= found.f_blocks
    used = found.f_files - found.f_ffree
    for number in range(50):
        open(f"f{number}", "x").close()
    after = os.statvfs(here)
    assert after.f_files - after.f_ffree - used == 50


def test_statfs_does_not_end_with_a_signal(here: Path) -> None:
    """Nor does any other call that knows no EINTR."""
    came = []
    before = signal.signal(signal.SIGALRM, lambda *_: came.append(1))
    buffer = ctypes.create_string_buffer(1024)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        for _ in range(200):
            assert _libc.statfs(b".", buffer) == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert came


def test_sync_calls(file: Path) -> None:
    fd = os.open("file", os.O_RDWR | os.O_SYNC)
    os.write(fd, b"x" * 10_000)
    os.fdatasync(fd)
    assert _libc.syncfs(fd) == 0
    os.close(fd)
    directory = os.open(".", os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)
    os.sync()
    assert file.read_bytes() == b"x" * 10_000


@pytest.mark.sweep
def test_inode_numbers_are_permanent(here: Path, module_mount: Mounted) -> None:
    os.mkdir("d")
    open("d/f", "x").close()
    os.symlink("x", "d/s")
    before = {name: os.lstat(here / name).st_ino for name in ("d", "d/f", "d/s", ".")}
    os.rename("d/f", "d/g")
    before["d/g"] = before.pop("d/f")
    os.chdir("/")
    module_mount.remount()
    assert {name: os.lstat(here / name).st_ino for name in before} == before
