"""The bridge on a real mount: what the kernel is not asked any more, ioctls, listings that the
kernel caches.
"""

import ctypes
import errno
import fcntl
import json
import os
import random
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core import ioctl
from aifs.fuse import extension
from tests.support.mounts import Mounted, mounted_store

LOOKUP, READLINK, READ, WRITE, FLUSH, OPENDIR = "1", "5", "15", "16", "25", "27"
CREATE, INTERRUPT, IOCTL, READDIRPLUS = "35", "36", "39", "44"

pytestmark = [
    pytest.mark.skipif(extension is None, reason="the bridge has not been built"),
    pytest.mark.usefixtures("names_stay_cached"),
]

CAPABILITY = struct.pack("<5I", 0x02000001, 1 << 10, 0, 0, 0)
"""cap_net_bind_service, permitted and effective, as setcap(8) stores it."""


@pytest.fixture(scope="module")
def module_mount(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    with mounted_store(tmp_path_factory.mktemp("bridge")) as mounted:
        yield mounted


def bridge_of(mounted: Mounted) -> dict:
    return json.loads(os.getxattr(mounted.path, "user.aifs.status"))["bridge"]


@contextmanager
def requests(mounted: Mounted) -> Iterator[dict[str, int]]:
    """The requests that the body makes the kernel send, by opcode; filled in at the end."""
    found: dict[str, int] = {}
    before = bridge_of(mounted)["requests"]
    yield found
    after = bridge_of(mounted)["requests"]
    found.update({opcode: count - before.get(opcode, 0) for opcode, count in after.items()})


def test_the_bridge_is_in_use(module_mount: Mounted) -> None:
    assert bridge_of(module_mount)["in_use"] is True
    assert "not in use" not in module_mount.log.read_text()


@pytest.mark.sweep
def test_without_the_bridge_everything_else_works(mount_store: Callable[..., Mounted]) -> None:
    mounted = mount_store("kernel.bridge=off")
    status = bridge_of(mounted)
    assert (status["in_use"], status["passthrough"], status["requests"]) == (False, False, {})
    assert [each["what"] for each in status["missing"]] == ["the bridge"]
    (mounted.path / "d").mkdir()
    (mounted.path / "d" / "file").write_bytes(b"content")
    assert os.listdir(mounted.path / "d") == ["file"]
    with (mounted.path / "d" / "file").open("rb") as file:
        assert file.read() == b"content"
        with pytest.raises(OSError) as caught:
            ioctl.call(file.fileno(), "version")
    assert caught.value.errno == errno.ENOTTY
    with pytest.raises(OSError) as caught:
        os.open(mounted.path, os.O_TMPFILE | os.O_RDWR)
    assert caught.value.errno == errno.EOPNOTSUPP  # programs fall back when the error is this one
    assert "not in use" not in mounted.log.read_text()


def test_the_kernel_asks_for_nothing_that_is_known(module_mount: Mounted) -> None:
    paths = [module_mount.path / f"known{number}" for number in range(50)]
    with requests(module_mount) as asked:
        for path in paths:
            path.write_bytes(b"content")
    assert (asked[CREATE], asked.get(FLUSH, 0)) == (50, 0)
    with requests(module_mount) as asked:
        for path in paths:
            path.stat()
            assert path.read_bytes() == b"content"
            path.stat()
    assert asked.get(FLUSH, 0) == 0 and asked.get(LOOKUP, 0) == 0


def test_pages_stay_cached_when_mtime_changes(module_mount: Mounted) -> None:
    path, content = module_mount.path / "pages", b"content!" * (1 << 17)
    path.write_bytes(content)
    path.stat()
    os.utime(path, (1, 2))
    with requests(module_mount) as asked:
        assert path.read_bytes() == content
    assert asked.get(READ, 0) == 0


def test_a_symlink_is_read_once(module_mount: Mounted) -> None:
    link = module_mount.path / "link"
    link.symlink_to("target")
    with requests(module_mount) as asked:
        assert [os.readlink(link) for _ in range(5)] == ["target"] * 5
    assert asked[READLINK] == 1


# --- ioctl ---


def test_the_version_can_be_asked_of_files_and_directories(module_mount: Mounted) -> None:
    (module_mount.path / "versioned").touch()
    for path in (module_mount.path, module_mount.path / "versioned"):
        fd = os.open(path, os.O_RDONLY)
        assert ioctl.call(fd, "version") == {"version": ioctl.VERSION}
        os.close(fd)


def test_no_ioctl_is_taken_for_another(module_mount: Mounted) -> None:
    rng = random.Random(1)
    with (module_mount.path / "controlled").open("wb") as file:
        assert not file.isatty()
        for _ in range(300):
            size = rng.randrange(64)
            request = rng.randrange(4) << 30 | size << 16 | ioctl.TYPE << 8 | rng.randrange(256)
            if request in ioctl.REQUESTS:
                continue
            with pytest.raises(OSError) as caught:
                fcntl.ioctl(file, request, bytearray(64), True)
            assert caught.value.errno == errno.ENOTTY
        with pytest.raises(OSError) as caught:
            ioctl.call(file.fileno(), "drain", flags=7)
        assert caught.value.errno == errno.EINVAL
    assert bridge_of(module_mount)["in_use"] is True


@pytest.mark.sweep
def test_waiting_for_a_drain_ends_with_its_timeout_or_a_signal(module_mount: Mounted) -> None:
    path = module_mount.path / "drain.undrained"  # of no kind that is expected to be tiny
    with path.open("wb", buffering=0) as file:  # open for writing, so it cannot be drained
        file.write(b"bytes")
        with pytest.raises(OSError) as caught:
            ioctl.call(file.fileno(), "drain", timeout_ms=1)
        assert caught.value.errno == errno.ETIMEDOUT
        opened = f"os.open({str(path)!r}, os.O_RDONLY)"
        wait = f"import os; from aifs.core import ioctl; ioctl.call({opened}, 'drain')"
        before = bridge_of(module_mount)["requests"][IOCTL]
        with requests(module_mount) as asked:
            waiting = subprocess.Popen([sys.executable, "-c", wait])
            while bridge_of(module_mount)["requests"][IOCTL] == before and waiting.poll() is None:
                pass
            waiting.kill()
            assert waiting.wait(timeout=60) == -signal.SIGKILL
        assert asked[INTERRUPT] >= 1


# --- bytes ---


def test_the_daemon_sees_no_byte_of_a_file_that_is_passed_through(module_mount: Mounted) -> None:
    if not bridge_of(module_mount)["passthrough"]:
        pytest.skip("this machine cannot pass files through")
    path = module_mount.path / "file.passed"  # of no kind that is expected to be tiny
    with requests(module_mount) as asked:
        path.write_bytes(b"content!" * (1 << 17))
        assert path.read_bytes() == b"content!" * (1 << 17)
    assert asked.get(WRITE, 0) == asked.get(READ, 0) == 0


# --- extended attributes that the bridge answers ---


def test_file_capabilities_are_seen_after_the_bridge_has_answered_that_there_are_none(
    module_mount: Mounted,
) -> None:
    path = module_mount.path / "program"
    path.write_bytes(b"first")
    with path.open("ab") as file:
        file.write(b"second")
    with pytest.raises(OSError) as caught:
        os.getxattr(path, "security.capability")
    assert caught.value.errno == errno.ENODATA
    os.setxattr(path, "security.capability", CAPABILITY)
    assert os.getxattr(path, "security.capability") == CAPABILITY
    with path.open("ab") as file:
        file.write(b"third")
    with pytest.raises(OSError) as caught:
        os.getxattr(path, "security.capability")
    assert caught.value.errno == errno.ENODATA


# --- listings ---


_libc = ctypes.CDLL(None, use_errno=True)
_SYS_GETDENTS64 = 217


def entries(fd: int, size: int) -> list[tuple[str, int]]:
    """One getdents64(2): names and the positions behind them."""
    buffer = ctypes.create_string_buffer(size)
    count = _libc.syscall(_SYS_GETDENTS64, fd, buffer, size)
    assert count >= 0, os.strerror(ctypes.get_errno())
    found, place = [], 0
    while place < count:
        _, position, length, _ = struct.unpack_from("=QqHB", buffer.raw, place)
        found.append((buffer.raw[place + 19 : place + length].split(b"\0")[0].decode(), position))
        place += length
    return found


def rest(fd: int, size: int = 32768) -> list[str]:
    found = []
    while batch := entries(fd, size):
        found += [name for name, _ in batch]
    return found


@pytest.fixture
def directory(module_mount: Mounted, request: pytest.FixtureRequest) -> Path:
    """A directory with 600 files."""
    path = module_mount.path / request.node.name
    path.mkdir()
    for number in range(600):
        (path / f"f{number:03}").touch()
    return path


@pytest.mark.sweep
def test_a_listing_is_cached_until_something_changes(
    module_mount: Mounted, directory: Path
) -> None:
    names = set(os.listdir(directory))
    with requests(module_mount) as asked:
        assert set(os.listdir(directory)) == names and len(names) == 600
    assert asked.get(READDIRPLUS, 0) == asked.get(OPENDIR, 0) == 0
    file = directory / "f000"
    changes: list[tuple[Callable[[], object], set[str], set[str]]] = [
        (lambda: (directory / "new").touch(), {"new"}, set()),
        (lambda: (directory / "new").unlink(), set(), {"new"}),
        (lambda: (directory / "sub").mkdir(), {"sub"}, set()),
        (lambda: os.link(file, directory / "link"), {"link"}, set()),
        (lambda: (directory / "symlink").symlink_to("x"), {"symlink"}, set()),
        (lambda: os.mkfifo(directory / "fifo"), {"fifo"}, set()),
        (lambda: file.rename(directory / "renamed"), {"renamed"}, {"f000"}),
        (lambda: (directory / "renamed").rename(directory / "sub" / "moved"), set(), {"renamed"}),
        (lambda: (directory / "sub" / "moved").replace(directory / "f001"), set(), set()),
        (lambda: (directory / "sub").rmdir(), set(), {"sub"}),
    ]
    for change, appears, disappears in changes:
        change()
        names = (names | appears) - disappears
        assert set(os.listdir(directory)) == names
        assert set(os.listdir(directory)) == names


@pytest.mark.sweep
def test_a_listing_in_progress_is_complete_whatever_becomes_of_the_cache(directory: Path) -> None:
    rng = random.Random(2)
    for turn in range(20):
        before = set(os.listdir(directory))
        fd = os.open(directory, os.O_RDONLY)
        found: list[str] = []
        for _ in range(rng.randint(1, 5)):
            found += [name for name, _ in entries(fd, 1024)]
        victims = {found[-1], *rng.sample(sorted(before), 4)} - {".", ".."}
        for name in victims:
            (directory / name).unlink()
        for number in range(4):
            (directory / f"n{turn}-{number}").touch()
        if turn % 3:
            os.listdir(directory)  # makes the kernel begin its cache anew
        found += rest(fd, 1024)
        os.close(fd)
        assert len(set(found)) == len(found)
        assert before - victims <= set(found)


@pytest.mark.sweep
def test_seeking_in_a_listing(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    whole: list[tuple[str, int]] = []
    while batch := entries(fd, 2048):
        whole += batch
    for place in (0, 1, 17, 300, len(whole) - 2):
        os.lseek(fd, whole[place][1], os.SEEK_SET)
        assert entries(fd, 2048)[0] == whole[place + 1]
    (directory / whole[300][0]).unlink()
    os.listdir(directory)
    os.lseek(fd, whole[300][1], os.SEEK_SET)
    assert entries(fd, 2048)[0] == whole[301]
    (directory / "late").touch()
    os.lseek(fd, 0, os.SEEK_SET)
    assert {"late", "f599"} <= set(rest(fd)) - {whole[300][0]}
    os.fsync(fd)
    os.close(fd)


@pytest.mark.sweep
def test_listings_beside_writers_hold_every_lasting_name_once(directory: Path) -> None:
    lasting, ended, faults = set(os.listdir(directory)), threading.Event(), []

    def write(writer: int) -> None:
        for number in range(10**6):
            path = directory / f"w{writer}-{number % 40}"
            path.unlink() if path.exists() else path.touch()
            if ended.is_set():
                return

    def read(size: int) -> None:
        for _ in range(25):
            fd = os.open(directory, os.O_RDONLY)
            found = rest(fd, size)
            os.close(fd)
            if not lasting <= set(found) or len(set(found)) != len(found):
                faults.append(lasting - set(found))

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    readers = [threading.Thread(target=read, args=(size,)) for size in (1024, 32768)]
    for thread in (*writers, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    ended.set()
    for thread in writers:
        thread.join()
    assert not faults


@pytest.mark.sweep
def test_two_at_once_remove_a_tree(directory: Path) -> None:
    for number in range(5):
        (directory / f"sub{number}").mkdir()
        (directory / f"sub{number}" / "file").touch()
    removing = [
        subprocess.Popen(["rm", "-rf", directory], stderr=subprocess.PIPE) for _ in range(2)
    ]
    said = [process.communicate(timeout=60)[1] for process in removing]
    assert said == [b"", b""] and not directory.exists()


@pytest.mark.sweep
def test_a_required_bridge_is_used(scratch: Path) -> None:
    with mounted_store(scratch, ("kernel.bridge=require", "kernel.max_background=7")) as mounted:
        device = mounted.path.stat().st_dev
        assert bridge_of(mounted)["in_use"] is True
        connections = Path(f"/sys/fs/fuse/connections/{os.minor(device)}/max_background")
        if connections.exists():
            assert connections.read_text() == "7\n"
