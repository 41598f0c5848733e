"""Files that are one object of a local server on a real mount: the kernel reads them by itself,
whatever others do.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.fuse import extension
from tests.mount.test_posix_bytes import mtimes_of_mapped_writes
from tests.support.mounts import Mounted, call, mounted_store

READ = "15"
SIZE = 3 << 20
CONTENT = os.urandom(SIZE)

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")


@pytest.fixture(scope="module")
def store() -> Iterator[Mounted]:
    with tempfile.TemporaryDirectory(prefix="aifs-objects-") as scratch:
        options = ("layout.inline_limit=0", "burst.drain_delay=1h")
        with mounted_store(Path(scratch), options) as mounted:
            if not status(mounted)["passthrough"]:
                pytest.skip("this machine cannot pass files through")
            os.setxattr(mounted.path, "user.aifs.layout", b"count=1")
            os.setxattr(mounted.path, "user.aifs.tier", b"capacity")
            yield mounted


@pytest.fixture
def path(store: Mounted, request: pytest.FixtureRequest) -> Path:
    """A settled file on one server, of which the kernel has no pages of ours."""
    path = store.path / request.node.name
    with path.open("wb") as file:
        file.write(CONTENT)
        os.fsync(file.fileno())
    until_closed(store)
    return path


def status(store: Mounted) -> dict:
    return json.loads(os.getxattr(store.path, "user.aifs.status"))["bridge"]


def until_closed(store: Mounted) -> None:
    """close(2) does not wait for the daemon."""
    while json.loads(os.getxattr(store.path, "user.aifs.status"))["open_files"]:
        pass


def reads(store: Mounted) -> int:
    """READ requests that the kernel has sent so far."""
    return status(store)["requests"].get(READ, 0)


def elsewhere(code: str, path: Path, *args: Path) -> None:
    """Run Python statements about ``path`` in another process."""
    command = [sys.executable, "-c", f"import os, sys; path = sys.argv[1]; {code}", path, *args]
    subprocess.run(command, check=True, timeout=60)


@contextmanager
def stopped(store: Mounted) -> Iterator[None]:
    """The daemon does nothing meanwhile, unless that makes us wait for long."""
    watchdog = threading.Timer(20, store.signal, (signal.SIGCONT,))
    store.signal(signal.SIGSTOP)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        store.signal(signal.SIGCONT)


def test_the_daemon_is_not_needed_for_reading(store: Mounted, path: Path) -> None:
    before = reads(store)
    with path.open("rb", buffering=0) as file:
        with mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped, stopped(store):
            # No other call: that might ask for attributes.
            assert os.pread(file.fileno(), SIZE + 1, 0) == CONTENT
            assert mapped[:] == CONTENT
    assert reads(store) == before


def test_a_reader_sees_what_another_process_writes(store: Mounted, path: Path) -> None:
    with (
        path.open("rb", buffering=0) as file,
        mmap.mmap(file.fileno(), SIZE, prot=mmap.PROT_READ) as mapped,
    ):
        before = reads(store)
        elsewhere("open(path, 'ab').write(b'appended')", path)
        expected = CONTENT + b"appended"
        assert file.read(2 * SIZE) == expected and os.fstat(file.fileno()).st_size == len(expected)
        elsewhere(
            "file = open(path, 'r+b'); file.seek(4096); file.write(b'over'); "
            "os.fsync(file.fileno())",
            path,
        )
        expected = expected[:4096] + b"over" + expected[4100:]
        assert mapped[:] == expected[:SIZE]
        elsewhere("os.truncate(path, 2_000_000)", path)
        assert os.pread(file.fileno(), SIZE, 0) == expected[:2_000_000] == mapped[:2_000_000]
        elsewhere("os.truncate(path, 2_500_000)", path)
        assert os.pread(file.fileno(), SIZE, 0) == expected[:2_000_000] + bytes(500_000)
        elsewhere("open(path, 'wb').write(b'rewritten')", path)
        assert os.pread(file.fileno(), SIZE, 0) == b"rewritten" == mapped[:9]
        elsewhere("open(path, 'wb')", path)
        elsewhere("open(path, 'wb').write(b'again')", path)
        assert os.pread(file.fileno(), SIZE, 0) == b"again"
        assert reads(store) == before
    until_closed(store)
    assert path.read_bytes() == b"again" and path.stat().st_size == 5


def test_a_writer_reads_what_it_writes_and_may_map_it(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as reader, path.open("r+b", buffering=0) as writer:
        os.pwrite(writer.fileno(), b"written", 100)
        assert os.pread(writer.fileno(), 7, 100) == os.pread(reader.fileno(), 7, 100) == b"written"
        with mmap.mmap(writer.fileno(), SIZE) as mapped:
            assert mapped[100:107] == b"written"
            mapped[200:206] = b"mapped"
            mapped.flush()
            os.fsync(writer.fileno())
            assert (
                os.pread(writer.fileno(), 6, 200) == os.pread(reader.fileno(), 6, 200) == b"mapped"
            )
            os.pwrite(writer.fileno(), b"later", 300)
            assert mapped[300:305] == b"later"
        os.ftruncate(writer.fileno(), 1000)
        assert os.lseek(writer.fileno(), 0, os.SEEK_END) == 1000
        os.posix_fallocate(writer.fileno(), 0, 5000)
        assert os.pread(reader.fileno(), SIZE, 1000) == bytes(4000)
        expected = os.pread(reader.fileno(), SIZE, 0)
    until_closed(store)
    assert (
        path.read_bytes() == expected and expected[200:206] == b"mapped" and len(expected) == 5000
    )


def test_a_second_reader_of_a_file_that_is_written_first_and_the_other_way_round(
    store: Mounted, path: Path
) -> None:
    with path.open("r+b", buffering=0) as writer, path.open("rb", buffering=0) as reader:
        os.pwrite(writer.fileno(), b"cached", 0)
        assert os.pread(reader.fileno(), 6, 0) == b"cached"
        os.fsync(writer.fileno())
    until_closed(store)
    with path.open("rb", buffering=0) as reader:
        before = reads(store)
        with path.open("r+b", buffering=0) as writer:
            os.pwrite(writer.fileno(), b"direct", 0)
        assert os.pread(reader.fileno(), 6, 0) == b"direct" and reads(store) == before
        with path.open("rb", buffering=0) as other:
            assert other.read(6) == b"direct" and reads(store) == before
    until_closed(store)
    # Still dirty: through the daemon, from no old page.
    assert path.read_bytes() == b"direct" + CONTENT[6:]
    assert reads(store) > before


def test_names_may_change_and_go(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        moved = path.with_name("moved")
        elsewhere("os.rename(path, sys.argv[2])", path, moved)
        assert os.pread(file.fileno(), SIZE, 0) == CONTENT
        elsewhere(
            "os.link(path, path + 2 * '+'); os.unlink(path); os.unlink(path + 2 * '+')", moved
        )
        moved.write_bytes(b"another file")
        assert os.pread(file.fileno(), SIZE, 0) == CONTENT and os.fstat(file.fileno()).st_nlink == 0


def test_direct_reads(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffer = mmap.mmap(-1, 8192)
    assert os.preadv(fd, [buffer], 4096) == 8192 and buffer[:] == CONTENT[4096:12288]
    os.close(fd)


def test_a_drained_and_evicted_file_is_read_from_its_object(store: Mounted) -> None:
    (store.path / "d").mkdir()
    os.setxattr(store.path / "d", "user.aifs.tier", b"burst")
    path = store.path / "d" / "file"
    path.write_bytes(CONTENT)
    call(path, "drain")
    until_closed(store)
    os.setxattr(path, "user.aifs.evict", b"")
    state = json.loads(os.getxattr(path, "user.aifs.state"))
    assert (state["state"], state["copy"]) == ("clean", False)
    before = reads(store)
    assert path.read_bytes() == CONTENT
    assert reads(store) == before


def test_a_writer_that_is_killed_leaves_a_file_that_is_in_order(scratch: Path) -> None:
    with mounted_store(scratch, ("layout.inline_limit=0",)) as store:
        os.setxattr(store.path, "user.aifs.layout", b"count=1")
        os.setxattr(store.path, "user.aifs.tier", b"capacity")
        path = store.path / "file"
        with path.open("wb") as file:
            file.write(CONTENT)
            os.fsync(file.fileno())
        until_closed(store)
        with path.open("rb", buffering=0) as reader, path.open("wb", buffering=0) as writer:
            assert reader.read() == b""
            os.fsync(writer.fileno())
            store.kill()
        store.mount()
        assert path.read_bytes() == b""


def test_what_is_written_by_a_mapping_moves_mtime(store: Mounted, path: Path) -> None:
    """Of an object that readers have passed through; an mtime that is set stays otherwise."""
    if not all(mtimes_of_mapped_writes(store.path.parent / "local", is_closed=False)):
        pytest.skip("the local filesystem, such as tmpfs, does not move it either")
    with path.open("rb") as reader, path.open("r+b") as file:
        assert reader.read(1)
        with mmap.mmap(file.fileno(), SIZE) as mapped:
            for offset in (0, mmap.PAGESIZE):
                os.utime(path, (1, 1))
                assert path.stat().st_mtime == 1
                mapped[offset] ^= 1
                mapped.flush()
                assert path.stat().st_mtime > 1
        os.utime(path, (1, 1))
    until_closed(store)
    assert path.stat().st_mtime == 1
