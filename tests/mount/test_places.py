"""Reads of striped and packed files that the bridge answers by itself, on a real mount: that it
does, and that programs read the same as from a plain file, whatever others do meanwhile.
"""

import ctypes
import json
import mmap
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core.config import DIRECTORY_FILE
from aifs.fuse import extension
from tests.support.mounts import Mounted, call, mounted_store

LOOKUP, OPEN, READ, RELEASE = "1", "14", "15", "18"
SIZE = 3_000_001
CONTENT = os.urandom(SIZE)
SMALL, COUNT = 20_000, 200
OPTIONS = ("layout.inline_limit=0", "burst.stage_for_write=0", "burst.drain_delay=1h")

pytestmark = [
    pytest.mark.skipif(extension is None, reason="the bridge has not been built"),
    pytest.mark.usefixtures("names_stay_cached"),
]


@pytest.fixture(scope="module")
def store() -> Iterator[Mounted]:
    with tempfile.TemporaryDirectory(prefix="aifs-places-", dir="/dev/shm") as scratch:
        source = Path(scratch) / "store"
        source.mkdir()
        settings = "servers: [data/0, data/1, data/2]\ndata: {movers: 0}\n"
        (source / DIRECTORY_FILE).write_text(settings)
        with mounted_store(Path(scratch), OPTIONS) as mounted:
            if not status(mounted)["passthrough"]:
                pytest.skip("this machine cannot pass files through")
            yield mounted


def status(store: Mounted) -> dict:
    return json.loads(os.getxattr(store.path, "user.aifs.status"))["bridge"]


def until_closed(store: Mounted) -> None:
    """close(2) does not wait for the daemon."""
    while json.loads(os.getxattr(store.path, "user.aifs.status"))["open_files"]:
        pass


@contextmanager
def by_python(store: Mounted) -> Iterator[dict[str, int]]:
    """The requests that the daemon answers meanwhile; filled in at the end."""
    found: dict[str, int] = {}
    before = status(store)
    yield found
    after = status(store)
    for opcode in (OPEN, READ, RELEASE):
        asked, answered = (
            after[which].get(opcode, 0) - before[which].get(opcode, 0)
            for which in ("requests", "answered")
        )
        found[opcode] = asked - answered


def evicted(store: Mounted, *paths: Path) -> None:
    """The files lie on the data servers alone, and the kernel has none of their pages."""
    for path in paths:
        call(path, "drain")
    until_closed(store)
    for path in paths:
        os.setxattr(path, "user.aifs.evict", b"")
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    until_closed(store)


@pytest.fixture
def striped(store: Mounted, request: pytest.FixtureRequest) -> Path:
    return make_striped(store, request.node.name)


def make_striped(store: Mounted, name: str) -> Path:
    """A file on three servers."""
    directory = store.path / name
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", b"count=3,unit=64KiB")
    os.setxattr(directory, "user.aifs.tier", b"capacity")
    path = directory / "file"
    with path.open("wb") as file:
        file.write(CONTENT)
        os.fsync(file.fileno())
    until_closed(store)
    return path


def direct(fd: int, offset: int, length: int) -> bytes:
    """With O_DIRECT."""
    buffer = mmap.mmap(-1, length)
    return buffer[: os.preadv(fd, [buffer], offset)]


def test_random_reads_of_a_striped_file(store: Mounted, striped: Path) -> None:
    draw = random.Random(1)
    fd = os.open(striped, os.O_RDONLY | os.O_DIRECT)
    assert direct(fd, 0, 4096) == CONTENT[:4096]
    with by_python(store) as asked:
        for _ in range(300):
            offset, length = draw.randrange(SIZE) & -4096, 4096 << draw.randrange(9)
            assert direct(fd, offset, length) == CONTENT[offset : offset + length]
        assert direct(fd, SIZE + 4095 & -4096, 4096) == b""
    os.close(fd)
    assert asked[READ] == 0
    with by_python(store) as asked:
        assert striped.read_bytes() == CONTENT
        with striped.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        assert mapped[:] == CONTENT
        mapped.close()
        until_closed(store)
    assert asked == {OPEN: 0, READ: 0, RELEASE: 0}


def test_a_reader_sees_what_others_do(store: Mounted, striped: Path) -> None:
    expected = bytearray(CONTENT)
    fd = os.open(striped, os.O_RDONLY | os.O_DIRECT)

    def same() -> bool:
        found = b"".join(direct(fd, at, 1 << 20) for at in range(0, len(expected) + 1, 1 << 20))
        return found == expected == striped.read_bytes()

    assert same() and same()
    with striped.open("r+b", buffering=0) as writer:
        for offset in (0, 70_000, SIZE - 3, SIZE + 100_000):
            os.pwrite(writer.fileno(), b"written", offset)
            expected += bytes(max(0, offset + 7 - len(expected)))
            expected[offset : offset + 7] = b"written"
            assert same()
        os.fsync(writer.fileno())
        assert same()
        for size in (1_000_000, 2_500_000):
            os.truncate(striped, size)
            expected = expected[:size] + bytes(size - len(expected[:size]))
            assert same()
        libc = ctypes.CDLL(None, use_errno=True)
        off = ctypes.c_long
        assert libc.fallocate(writer.fileno(), 3, off(100_000), off(200_000)) == 0
        expected[100_000:300_000] = bytes(200_000)
        assert same()
    until_settled = striped.open("rb")
    os.fsync(until_settled.fileno())
    until_settled.close()
    assert same()
    with by_python(store) as asked:
        assert same()
    assert asked[READ] == 0  # it is settled
    striped.unlink()
    with by_python(store) as asked:
        assert direct(fd, 0, 1 << 20) == expected[: 1 << 20]
    os.close(fd)


def test_replaced_and_truncated_by_name(store: Mounted, striped: Path) -> None:
    assert striped.read_bytes() == CONTENT
    until_closed(store)
    striped.write_bytes(b"short")
    assert striped.read_bytes() == b"short"
    other = striped.with_name("other")
    other.write_bytes(CONTENT[::-1])
    os.replace(other, striped)
    assert striped.read_bytes() == CONTENT[::-1]


def test_trace_sees_each_read(mount_store: Callable[..., Mounted]) -> None:
    store = mount_store(*OPTIONS)  # reads of others would be by Python for some seconds
    striped = make_striped(store, "directory")
    fd = os.open(striped, os.O_RDONLY | os.O_DIRECT)
    assert direct(fd, 0, 4096) == direct(fd, 0, 4096)
    start = json.loads(os.getxattr(store.path, "user.aifs.trace"))["next"]
    assert direct(fd, 8192, 4096) == CONTENT[8192:12288]
    log = json.loads(os.getxattr(store.path, f"user.aifs.trace.{start}"))
    assert [each for each in log["records"] if each["operation"] == "read"]
    os.close(fd)


@pytest.fixture
def packed(store: Mounted, request: pytest.FixtureRequest) -> list[Path]:
    """Small files in containers, with their names as their first bytes."""
    directory = store.path / request.node.name
    directory.mkdir()
    paths = [directory / f"{number:04}" for number in range(COUNT)]
    for path in paths:
        path.write_bytes(content_of(path))
    evicted_files(store, directory, paths)
    return paths


def content_of(path: Path) -> bytes:
    return (path.name.encode() * SMALL)[: SMALL + int(path.name)]


def evicted_files(store: Mounted, directory: Path, paths: list[Path]) -> None:
    call(directory, "drain")
    until_closed(store)
    for path in paths:
        os.setxattr(path, "user.aifs.evict", b"")
        assert not json.loads(os.getxattr(path, "user.aifs.state"))["copy"]
    until_closed(store)
    store.remount()
    os.listdir(directory)
    for path in paths:
        path.stat()


def test_first_reads_of_packed_files(store: Mounted, packed: list[Path]) -> None:
    with by_python(store) as asked:
        for path in packed:
            assert path.read_bytes() == content_of(path)
        until_closed(store)
    assert asked[OPEN] < COUNT / 8 and asked[READ] == asked[RELEASE] == 0
    with by_python(store) as asked:
        for path in packed:
            assert path.read_bytes() == content_of(path)
    assert asked[OPEN] == 0
    assert all(path.stat().st_atime_ns > path.stat().st_mtime_ns for path in packed)


def test_packed_files_that_are_lent_ahead_change(store: Mounted, packed: list[Path]) -> None:
    assert packed[0].read_bytes() == content_of(packed[0])
    with packed[1].open("r+b", buffering=0) as file:
        file.write(b"new")
    assert packed[1].read_bytes() == b"new" + content_of(packed[1])[3:]
    packed[2].write_bytes(b"other")
    assert packed[2].read_bytes() == b"other"
    os.truncate(packed[3], 7)
    assert packed[3].read_bytes() == content_of(packed[3])[:7]
    packed[4].unlink()
    with pytest.raises(FileNotFoundError):
        packed[4].open()
    os.replace(packed[5], packed[6])
    assert packed[6].read_bytes() == content_of(packed[5])
    packed[7].chmod(0)
    os.utime(packed[8], ns=(1, 2))
    assert packed[8].read_bytes() == content_of(packed[8])
    assert packed[8].stat().st_mtime_ns == 2 < packed[8].stat().st_atime_ns
    with packed[9].open("rb", buffering=0) as held:
        with packed[9].open("r+b", buffering=0) as file:
            file.write(b"seen")
            assert os.pread(held.fileno(), 4, 0) == b"seen"
        packed[9].unlink()
        assert os.pread(held.fileno(), SMALL, 4) == content_of(packed[9])[4:][:SMALL]
    until_closed(store)
    for path in packed[10:]:
        assert path.read_bytes() == content_of(path)


def test_no_descriptor_of_a_removed_object_stays(store: Mounted, packed: list[Path]) -> None:
    for path in packed:
        assert path.read_bytes() == content_of(path)
    call(store.path, "remove", name=packed[0].parent.name)
    store.remount()
    links = [os.readlink(link) for link in Path(f"/proc/{store.pid}/fd").iterdir()]
    assert not [link for link in links if link.endswith("(deleted)") and "objects" in link]


@pytest.fixture
def forgetful(scratch: Path) -> Iterator[Mounted]:
    """A mount of which the kernel keeps no names."""
    options = ("layout.inline_limit=0", "burst.drain_delay=1h")
    with mounted_store(scratch, (*options, "kernel.entry_timeout=0s")) as mounted:
        yield mounted


def lookups(store: Mounted) -> int:
    """LOOKUP requests that the daemon itself has answered."""
    found = status(store)
    return found["requests"].get(LOOKUP, 0) - found["answered"].get(LOOKUP, 0)


def test_names_of_lent_files_are_looked_up_without_the_daemon(forgetful: Mounted) -> None:
    store = forgetful
    directory = store.path / "d"
    directory.mkdir()
    paths = [directory / f"{number:04}" for number in range(20)]
    for path in paths:
        path.write_bytes(content_of(path))
    evicted_files(store, directory, paths)
    for path in paths[:10] * 2:
        assert path.read_bytes() == content_of(path)
    until_closed(store)
    inside = os.open(directory, os.O_RDONLY)  # its own name is not a file's

    def content(path: Path) -> bytes:
        fd = os.open(path.name, os.O_RDONLY, dir_fd=inside)
        with os.fdopen(fd, "rb") as file:
            return file.read()

    before = lookups(store)
    for path in paths[:10]:
        assert content(path) == content_of(path)
        found = os.stat(path.name, dir_fd=inside)
        assert found.st_size == len(content_of(path)) and found.st_atime_ns > found.st_mtime_ns
    assert lookups(store) == before
    os.rename("0000", "moved", src_dir_fd=inside, dst_dir_fd=inside)
    with pytest.raises(FileNotFoundError):
        content(paths[0])
    assert content(directory / "moved") == content_of(paths[0])
    os.unlink("0001", dir_fd=inside)
    with pytest.raises(FileNotFoundError):
        content(paths[1])
    os.rename("0002", "0003", src_dir_fd=inside, dst_dir_fd=inside)
    assert content(paths[3]) == content_of(paths[2])
    os.chmod("0004", 0o600, dir_fd=inside)
    assert os.stat("0004", dir_fd=inside).st_mode & 0o777 == 0o600
    os.utime("0005", ns=(3, 4), dir_fd=inside)
    assert os.stat("0005", dir_fd=inside).st_atime_ns == 3
    (directory / "0006").write_bytes(b"new")
    assert content(paths[6]) == b"new" and os.stat("0006", dir_fd=inside).st_size == 3
    call(store.path, "remove", name="d")
    with pytest.raises(FileNotFoundError):
        content(paths[7])
    os.close(inside)


def test_a_name_that_publishing_changes_is_looked_up_each_time(
    store: Mounted, packed: list[Path]
) -> None:
    """The kernel would keep it until the other names of a publication are new."""
    directory = packed[0].parent
    (directory / "tmp").mkdir()
    wanted = {"final": "final", "tracker": "tracker", "content": "1"}
    os.setxattr(directory / "tmp", "user.aifs.publish-as", json.dumps(wanted).encode())
    tracker = directory / "tracker"
    tracker.unlink()
    os.link(packed[0], tracker)
    assert tracker.read_bytes() == content_of(packed[0])
    before = lookups(store)
    for _ in range(5):
        assert tracker.stat().st_size == SMALL
    assert lookups(store) == before + 5
