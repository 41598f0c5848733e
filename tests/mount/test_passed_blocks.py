"""Files all blocks of which are in a burst directory, on a real mount: the kernel reads them there
by itself, and programs see what others change, whatever ends meanwhile.
"""

import errno
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core import ioctl
from aifs.core.config import DIRECTORY_FILE
from aifs.fuse import extension
from tests.support.mounts import TIMEOUT_S, Mounted, mounted_store

READ = "15"
SIZE = 3_000_001
CONTENT = os.urandom(SIZE)

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")


@pytest.fixture
def store(request: pytest.FixtureRequest) -> Iterator[Mounted]:
    with tempfile.TemporaryDirectory(prefix="aifs-passed-", dir="/dev/shm") as scratch:
        options = (
            "layout.inline_limit=0",
            "layout.count=3",
            "layout.pack_below=0",
            "burst.stage_for_write=0",
            "burst.drain_delay=1h",
            "burst.blocks=always",
            *getattr(request, "param", ()),
        )
        source = Path(scratch) / "store"
        source.mkdir()
        settings = "servers: [data/0, data/1, data/2]\ndata: {movers: 0}\n"
        (source / DIRECTORY_FILE).write_text(settings)
        with mounted_store(Path(scratch), options) as mounted:
            if not status(mounted)["bridge"]["passthrough"]:
                pytest.skip("this machine cannot pass files through")
            yield mounted


def status(store: Mounted) -> dict:
    return json.loads(os.getxattr(store.path, "user.aifs.status"))


def until_closed(store: Mounted) -> None:
    """close(2) does not wait for the daemon."""
    while status(store)["open_files"]:
        pass


@contextmanager
def by_kernel(store: Mounted) -> Iterator[None]:
    """No READ comes to the mount meanwhile."""
    before = status(store)["bridge"]["requests"].get(READ, 0)
    yield
    assert status(store)["bridge"]["requests"].get(READ, 0) == before


@pytest.fixture
def path(store: Mounted) -> Path:
    """A clean file, all blocks of which are there."""
    path = store.path / "file"
    path.write_bytes(CONTENT)
    fd = os.open(path, os.O_RDONLY)
    ioctl.call(fd, "drain")
    os.close(fd)
    until_closed(store)
    os.setxattr(path, "user.aifs.evict", b"")
    come(store, path)
    return path


def come(store: Mounted, path: Path) -> None:
    """All of it is read, and kept."""
    assert read(path) == CONTENT
    while status(store)["blocks"]["waiting_bytes"]:
        pass
    until_closed(store)


def read(path: Path) -> bytes:
    """Past the page cache of the mount."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    found = direct(fd)
    os.close(fd)
    return found


def direct(fd: int) -> bytes:
    buffer = mmap.mmap(-1, SIZE + 1_000_000 & -4096)
    return buffer[: os.preadv(fd, [buffer], 0)]


def test_the_kernel_reads_blocks_by_itself(store: Mounted, path: Path) -> None:
    with by_kernel(store):
        for _ in range(2):
            assert read(path) == CONTENT == path.read_bytes()
            until_closed(store)
        with path.open("rb") as file, mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped:
            assert mapped[:] == CONTENT
    store.remount()
    assert read(path) == CONTENT  # what an earlier daemon has kept is compared first
    until_closed(store)
    with by_kernel(store):
        assert read(path) == CONTENT


def test_readers_see_what_others_do(store: Mounted, path: Path) -> None:
    expected = bytearray(CONTENT)
    fd, buffered = os.open(path, os.O_RDONLY | os.O_DIRECT), path.open("rb", buffering=0)
    mapped = mmap.mmap(buffered.fileno(), SIZE, prot=mmap.PROT_READ)

    def same() -> bool:
        found = (direct(fd), os.pread(buffered.fileno(), len(expected) + 1, 0), path.read_bytes())
        return all(it == expected for it in found)

    assert same() and mapped[:] == CONTENT
    with path.open("r+b", buffering=0) as writer:
        for offset in (0, 70_000, SIZE - 7, SIZE + 100_000):
            os.pwrite(writer.fileno(), b"written", offset)
            expected += bytes(max(0, offset + 7 - len(expected)))
            expected[offset : offset + 7] = b"written"
            assert same() and mapped[:] == expected[:SIZE]
        with mmap.mmap(writer.fileno(), SIZE) as writing:
            writing[5:9] = expected[5:9] = b"seen"
            assert same()
        os.fsync(writer.fileno())
        for size in (2_999_999, 3_500_000):
            os.truncate(path, size)
            expected = expected[:size] + bytes(size - len(expected[:size]))
            assert same() and os.fstat(fd).st_size == size
    assert same()
    mapped.close()
    ioctl.call(buffered.fileno(), "drain")
    assert same()
    os.close(fd)
    buffered.close()
    until_closed(store)
    os.setxattr(path, "user.aifs.evict", b"")
    store.remount()
    assert path.read_bytes() == expected


def test_a_file_that_nobody_has_open_is_changed_in_place(store: Mounted, path: Path) -> None:
    """Though the kernel would have passed it through."""
    for _ in range(2):
        assert read(path) == CONTENT
        until_closed(store)
    with path.open("r+b", buffering=0) as writer:
        writer.write(b"other")
        os.fsync(writer.fileno())
    until_closed(store)
    assert not json.loads(os.getxattr(path, "user.aifs.state"))["copy"]
    assert read(path) == b"other" + CONTENT[5:]


def test_a_file_that_is_replaced_and_removed(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as reader:
        other = path.with_name("other")
        other.write_bytes(b"short")
        os.replace(other, path)
        assert path.read_bytes() == b"short" and reader.read(SIZE) == CONTENT
        path.unlink()
        assert os.pread(reader.fileno(), SIZE, 0) == CONTENT


def test_what_is_mapped_is_not_evicted(store: Mounted, path: Path) -> None:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)
        with pytest.raises(OSError, match="busy"):
            os.setxattr(path, "user.aifs.evict", b"")
    assert mapped[:] == CONTENT
    with path.open("r+b") as writer:
        writer.write(b"other")
    assert mapped[:] == b"other" + CONTENT[5:]
    mapped.close()


def test_a_server_that_is_away_is_not_needed(store: Mounted, path: Path) -> None:
    data = store.source / "data"
    with path.open("rb", buffering=0) as reader:
        data.rename(data.with_name("away"))
        assert reader.read(SIZE) == CONTENT
        data.with_name("away").rename(data)


def test_what_is_mapped_outlives_the_daemon(store: Mounted, path: Path) -> None:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ)  # it keeps a descriptor
    store.kill()
    store.mount()
    os.setxattr(path, "user.aifs.evict", b"")
    assert mapped[:] == CONTENT == path.read_bytes()
    mapped.close()


def test_the_daemon_ends_while_blocks_become_a_copy(store: Mounted, path: Path) -> None:
    """As a reader has it open, a writer changes it, and nobody has synced."""
    reader = path.open("rb", buffering=0)
    assert reader.read(SIZE) == CONTENT
    with path.open("r+b", buffering=0) as writer:
        writer.write(b"other")
    store.kill()
    reader.close()
    store.mount()
    assert path.read_bytes() == b"other" + CONTENT[5:]


KEPT = pytest.mark.parametrize("store", [("kernel.restarts=1000",)], indirect=True, ids=["kept"])


def pass_through(store: Mounted, path: Path) -> None:
    """The map on disk has all blocks."""
    deadline_s = time.monotonic() + TIMEOUT_S
    before = status(store)["bridge"]["requests"].get(READ, 0)
    while read(path) == CONTENT and time.monotonic() < deadline_s:
        until_closed(store)
        after = status(store)["bridge"]["requests"].get(READ, 0)
        if after == before:
            return
        before = after
    raise TimeoutError("the kernel does not read it by itself")


def go_on(store: Mounted) -> None:
    store.kill_only()
    store.adopt()


@KEPT
def test_readers_go_on_with_the_next_daemon(store: Mounted, path: Path) -> None:
    pass_through(store, path)
    fd, buffered = os.open(path, os.O_RDONLY | os.O_DIRECT), path.open("rb", buffering=0)
    mapped = mmap.mmap(buffered.fileno(), SIZE, prot=mmap.PROT_READ)
    expected = bytearray(CONTENT)
    for number in range(2):
        go_on(store)
        with by_kernel(store):
            assert direct(fd) == expected == path.read_bytes() == mapped[:]
        with path.open("r+b", buffering=0) as writer:
            os.pwrite(writer.fileno(), b"written", 100_000 * number)
            expected[100_000 * number : 100_000 * number + 7] = b"written"
            assert direct(fd) == expected == mapped[:]
            go_on(store)
            os.pwrite(writer.fileno(), b"again", 200_000)
        expected[200_000:200_005] = b"again"
        assert direct(fd) == expected == path.read_bytes() == mapped[:]
    mapped.close()
    buffered.close()
    os.close(fd)


@pytest.mark.sweep
@KEPT
def test_what_it_had_open_may_go_when_it_is_closed(store: Mounted, path: Path) -> None:
    pass_through(store, path)
    fd = os.open(path, os.O_RDONLY)
    go_on(store)
    assert status(store)["blocks"]["staying_bytes"] >= SIZE
    os.close(fd)
    until_closed(store)
    with path.open("r+b") as writer:
        writer.write(b"in place")
    assert path.read_bytes() == b"in place" + CONTENT[8:]


@pytest.mark.sweep
@KEPT
def test_blocks_that_the_map_has_lost_are_those_of_their_readers(
    store: Mounted, path: Path
) -> None:
    pass_through(store, path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    (found,) = (store.source / "burst").glob("**/blocks/map")
    found.write_bytes(b"")
    go_on(store)
    assert direct(fd) == CONTENT == path.read_bytes()
    with pytest.raises(OSError) as raised:
        path.open("r+b")
    assert raised.value.errno == errno.EBUSY
    os.close(fd)
    until_closed(store)
    with path.open("r+b") as writer:
        writer.write(b"other")
    assert path.read_bytes() == b"other" + CONTENT[5:]
