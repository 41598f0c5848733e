"""Opens that the bridge answers by itself, on a real mount: that it does, what everybody else sees
meanwhile, and that the daemon gets back what it has to decide.
"""

import fcntl
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from aifs.core import ioctl
from aifs.fuse import extension
from tests.support.mounts import Mounted, call, mounted_store
from tests.support.users import in_process

OPEN, READ, RELEASE = "14", "15", "18"
CONTENT = os.urandom(100_000)

pytestmark = [
    pytest.mark.skipif(extension is None, reason="the bridge has not been built"),
    pytest.mark.usefixtures("names_stay_cached"),
]


@pytest.fixture(scope="module")
def store() -> Iterator[Mounted]:
    with tempfile.TemporaryDirectory(prefix="aifs-opens-") as scratch:
        # All of these take files back into core, where an open is the daemon's.
        options = "burst.drain_delay=1h", "data.writeback_interval=1h", "meta.commit_interval=1h"
        with mounted_store(Path(scratch), options) as mounted:
            if not status(mounted)["bridge"]["passthrough"]:
                pytest.skip("this machine cannot pass files through")
            yield mounted


@pytest.fixture
def path(store: Mounted, request: pytest.FixtureRequest) -> Path:
    """A file whose next open for reading is answered by the bridge."""
    return written(store, store.path / request.node.name)


def written(store: Mounted, path: Path, content: bytes = CONTENT) -> Path:
    path.write_bytes(content)
    until_closed(store)
    return path


def status(store: Mounted) -> dict:
    return json.loads(os.getxattr(store.path, "user.aifs.status"))


def state(path: Path) -> dict:
    return json.loads(os.getxattr(path, "user.aifs.state"))


def until_closed(store: Mounted) -> None:
    """close(2) does not wait for the daemon."""
    while status(store)["open_files"]:
        pass


@contextmanager
def by_python(store: Mounted) -> Iterator[dict[str, int]]:
    """The requests for opens, reads and closes that the daemon itself answers; filled in at the
    end, as are those of the bridge (``answered``)."""
    found: dict[str, int] = {}
    before = status(store)["bridge"]
    yield found
    after = status(store)["bridge"]
    for opcode in (OPEN, READ, RELEASE):
        asked, answered = (
            after[which].get(opcode, 0) - before[which].get(opcode, 0)
            for which in ("requests", "answered")
        )
        found[opcode], found["answered" + opcode] = asked - answered, answered


def test_a_file_that_was_written_is_read_without_the_daemon(store: Mounted, path: Path) -> None:
    with by_python(store) as asked:
        for _ in range(10):
            with path.open("rb", buffering=0) as one, path.open("rb", buffering=0) as other:
                assert one.read(len(CONTENT)) == other.read(len(CONTENT)) == CONTENT
        until_closed(store)
    assert (asked[OPEN], asked[READ], asked[RELEASE]) == (0, 0, 0)
    assert asked["answered" + OPEN] == asked["answered" + RELEASE] == 20


def test_a_file_whose_attributes_change_is_read_without_the_daemon(
    store: Mounted, path: Path
) -> None:
    with by_python(store) as asked:
        os.utime(path, ns=(1, 2))
        assert (os.stat(path).st_atime_ns, os.stat(path).st_mtime_ns) == (1, 2)
        assert path.read_bytes() == CONTENT
    assert asked[OPEN] == 0 and asked["answered" + OPEN] == 1
    assert os.stat(path).st_atime_ns > 2  # by relatime
    other = written(store, path.with_name("other"))
    os.chmod(other, 0o4755)
    with by_python(store) as asked:
        assert other.read_bytes() == CONTENT
    assert asked[OPEN] == 1  # a write would have to be seen


def test_a_change_of_nothing_changes_the_ctime(store: Mounted, path: Path) -> None:
    before = os.stat(path)
    with path.open("r+b") as file:
        os.fchmod(file.fileno(), before.st_mode & 0o7777)
        os.fchown(file.fileno(), before.st_uid, before.st_gid)
        changed = os.fstat(file.fileno())
    assert changed.st_ctime_ns > before.st_ctime_ns
    assert changed[:7] == before[:7] and changed.st_mtime_ns == before.st_mtime_ns
    store.remount()
    after = os.stat(path)
    assert after.st_ctime_ns == changed.st_ctime_ns and after.st_mtime_ns == before.st_mtime_ns


@pytest.mark.parametrize("size", [0, 10, 2000])
def test_pages_of_a_file_that_is_not_passed_through_stay_cached(
    store: Mounted, request: pytest.FixtureRequest, size: int
) -> None:
    path = written(store, store.path / f"inline{size}", CONTENT[:size])
    assert path.read_bytes() == CONTENT[:size]
    until_closed(store)
    for _ in range(5):  # the kernel may take a page that it has not seen in use, at any moment
        with by_python(store) as asked:
            for _ in range(5):
                assert path.read_bytes() == CONTENT[:size]
        if asked[READ] == 0:
            break
        until_closed(store)
    assert (asked[OPEN], asked[READ], asked[RELEASE]) == (0, 0, 0)
    assert asked["answered" + OPEN] == 5
    with path.open("rb", buffering=0) as reader:
        elsewhere = path.with_name(path.name + "x")
        os.link(path, elsewhere)
        with elsewhere.open("ab", buffering=0) as writer:
            writer.write(b"more" * 1000)
            assert reader.read(10_000) == CONTENT[:size] + b"more" * 1000


def test_the_object_of_a_file_is_read_without_the_daemon(store: Mounted) -> None:
    directory = store.path / "capacity"
    directory.mkdir()
    os.setxattr(directory, "user.aifs.tier", b"capacity")
    os.setxattr(directory, "user.aifs.layout", b"count=1")
    path = written(store, directory / "file")
    with path.open("r+b") as file:
        os.fsync(file.fileno())
    until_closed(store)
    assert path.read_bytes() == CONTENT
    until_closed(store)
    with by_python(store) as asked:
        for _ in range(5):
            assert path.read_bytes() == CONTENT
    assert (asked[OPEN], asked[READ], asked[RELEASE]) == (0, 0, 0)
    with path.open("rb", buffering=0) as reader:
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"over")
            assert os.pread(reader.fileno(), len(CONTENT), 0) == b"over" + CONTENT[4:]
    until_closed(store)
    assert path.read_bytes() == b"over" + CONTENT[4:]


def test_who_changes_the_file_asks_the_daemon(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as reader:
        with by_python(store) as asked:
            with path.open("r+b", buffering=0) as writer:
                os.pwrite(writer.fileno(), b"changed", 10)
                assert os.pread(reader.fileno(), 7, 10) == b"changed"
                with path.open("rb", buffering=0) as other:
                    assert os.pread(other.fileno(), 7, 10) == b"changed"
                os.fsync(writer.fileno())
        assert asked[OPEN] == 2 and asked["answered" + OPEN] == 0
        os.truncate(path, 5000)
        assert os.pread(reader.fileno(), 10_000, 0) == CONTENT[:10] + b"changed" + CONTENT[17:5000]
        assert os.fstat(reader.fileno()).st_size == 5000
        path.write_bytes(b"anew")
        assert os.pread(reader.fileno(), 10, 0) == b"anew"
    until_closed(store)
    with by_python(store) as asked:
        assert path.read_bytes() == b"anew"
    assert asked[OPEN] == 0


def test_calls_on_a_file_that_the_bridge_has_opened(store: Mounted, path: Path) -> None:
    for _ in range(2):
        fd = os.open(path, os.O_RDONLY)
        assert ioctl.call(fd, "version") == {"version": ioctl.VERSION}
        assert os.lseek(fd, 0, os.SEEK_DATA) == 0
        assert os.lseek(fd, 0, os.SEEK_HOLE) == len(CONTENT)
        assert os.lseek(fd, 0, os.SEEK_END) == len(CONTENT)
        os.fsync(fd)
        os.fdatasync(fd)
        os.fchmod(fd, 0o600)
        os.utime(fd, ns=(5, 7))
        assert (os.fstat(fd).st_mode & 0o777, os.fstat(fd).st_atime_ns) == (0o600, 5)
        fcntl.flock(fd, fcntl.LOCK_SH)
        fcntl.lockf(fd, fcntl.LOCK_SH)
        target = os.open(path.with_name("copy"), os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        assert os.copy_file_range(fd, target, len(CONTENT), 0, 0) == len(CONTENT)
        assert os.pread(target, len(CONTENT) + 1, 0) == CONTENT
        os.close(target)
        with pytest.raises(OSError):
            os.write(fd, b"x")
        with pytest.raises(OSError):
            os.ftruncate(fd, 1)
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
        assert os.pread(again, len(CONTENT), 0) == CONTENT
        os.close(again)
        os.close(fd)
        until_closed(store)


def test_direct_reads_and_mappings(store: Mounted, path: Path) -> None:
    with by_python(store) as asked:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
        buffer = mmap.mmap(-1, 8192)
        assert os.preadv(fd, [buffer], 4096) == 8192 and buffer[:] == CONTENT[4096:12288]
        os.close(fd)
        with path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), len(CONTENT), prot=mmap.PROT_READ)
        assert mapped[:] == CONTENT
    assert asked[OPEN] == asked[READ] == 0
    with path.open("r+b") as file:
        file.write(b"seen")
    assert mapped[:4] == b"seen"
    call(path, "drain")
    with pytest.raises(OSError):
        os.setxattr(path, "user.aifs.evict", b"")  # it is mapped
    assert mapped[:4] == path.read_bytes()[:4] == b"seen"
    mapped.close()


@pytest.mark.parametrize("closed", [False, True])
def test_names_may_go(store: Mounted, path: Path, closed: bool) -> None:
    other = written(store, path.with_name(path.name + "-other"), b"other" * 1000)
    with path.open("rb", buffering=0) as file:
        os.replace(other, path)
        assert os.pread(file.fileno(), len(CONTENT), 0) == CONTENT
        assert os.fstat(file.fileno()).st_nlink == 0
        if not closed:
            assert path.read_bytes() == b"other" * 1000
        with path.open("rb", buffering=0) as second:
            path.unlink()
            os.fsync(second.fileno())
            assert second.read(10_000) == b"other" * 1000
        assert os.pread(file.fileno(), len(CONTENT), 0) == CONTENT
    until_closed(store)
    while status(store)["collector_backlog"]:
        pass


def test_a_tree_is_removed_with_files_that_are_open(store: Mounted) -> None:
    directory = store.path / "doomed"
    directory.mkdir()
    paths = [written(store, directory / f"{number}") for number in range(3)]
    with paths[0].open("rb", buffering=0) as file:
        call(store.path, "remove", name="doomed")
        while status(store)["doomed"]["trees"]:
            pass
        assert os.pread(file.fileno(), len(CONTENT), 0) == CONTENT
        os.fsync(file.fileno())
        assert os.pread(file.fileno(), len(CONTENT), 0) == CONTENT
    until_closed(store)


def test_draining_evicting_and_staging_while_it_is_open(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as file:
        call(path, "drain")
        assert state(path)["state"] == "cached" and state(path)["open"]
        with pytest.raises(OSError):
            os.setxattr(path, "user.aifs.evict", b"")  # it is open
        assert state(path)["copy"]
        with path.open("rb", buffering=0) as other:
            assert other.read(len(CONTENT)) == os.pread(file.fileno(), len(CONTENT), 0) == CONTENT
    until_closed(store)
    assert path.read_bytes() == CONTENT and not state(path)["open"]
    os.setxattr(path, "user.aifs.evict", b"")
    assert (state(path)["state"], state(path)["copy"]) == ("clean", False)
    assert path.read_bytes() == CONTENT
    until_closed(store)
    with path.open("rb", buffering=0) as file:
        os.setxattr(path, "user.aifs.tier", b"pinned")
        os.setxattr(path, "user.aifs.stage", b"")
        while not state(path)["copy"]:
            pass
        assert file.read(len(CONTENT)) == CONTENT
        with path.open("rb", buffering=0) as other:
            assert other.read(len(CONTENT)) == CONTENT
    until_closed(store)
    for _ in range(2):
        assert path.read_bytes() == CONTENT
        until_closed(store)
    with by_python(store) as asked:
        assert path.read_bytes() == CONTENT
    assert (asked[OPEN], asked[READ], asked[RELEASE]) == (0, 0, 0)


def test_publishing_while_a_file_is_open(store: Mounted) -> None:
    directory = store.path / "step.tmp"
    directory.mkdir()
    path = written(store, directory / "weights")
    with path.open("rb", buffering=0) as file:
        directory.rename(store.path / "step")
        assert file.read(len(CONTENT)) == CONTENT
        with (store.path / "step" / "weights").open("rb") as other:
            assert other.read() == CONTENT
    until_closed(store)


@pytest.mark.parametrize("size", [len(CONTENT), 1000])
def test_times_of_access(store: Mounted, request: pytest.FixtureRequest, size: int) -> None:
    content = CONTENT[:size]
    path = written(store, store.path / request.node.name, content)
    before = path.stat()
    assert path.read_bytes() == content
    after = path.stat()
    assert after.st_atime_ns > max(before.st_atime_ns, after.st_mtime_ns, after.st_ctime_ns)
    assert path.read_bytes() == content
    assert path.stat().st_atime_ns == after.st_atime_ns  # relatime
    os.utime(path, ns=(3, 4))
    assert path.stat().st_atime_ns == 3
    os.close(os.open(path, os.O_RDONLY | os.O_NOATIME))
    assert path.stat().st_atime_ns == 3
    path.read_bytes()
    accessed_ns = path.stat().st_atime_ns
    assert accessed_ns > after.st_atime_ns
    path.chmod(0o640)
    assert path.stat().st_atime_ns == accessed_ns


def test_the_rule_for_times_of_access_may_change(store: Mounted, path: Path) -> None:
    path.read_bytes()
    for rule, moves in ((b"strictatime", True), (b"noatime", False), (b"relatime", False)):
        os.setxattr(store.path, "user.aifs.atime", rule)
        for _ in range(3):
            before_ns = path.stat().st_atime_ns
            while time.time_ns() < before_ns + 20_000_000:  # the kernel's coarse clock ticks
                pass
            path.read_bytes()
            assert (path.stat().st_atime_ns > before_ns) == moves
            until_closed(store)


def test_set_id_bits_go_with_a_write(store: Mounted, path: Path) -> None:
    with path.open("rb", buffering=0) as reader:
        path.chmod(0o4755)
        os.chown(path, 1000, 1000)
        path.chmod(0o4755)
        assert reader.read(10) == CONTENT[:10]
    until_closed(store)
    assert path.read_bytes() == CONTENT
    until_closed(store)
    assert path.read_bytes() == CONTENT
    store.path.parent.chmod(0o755)
    in_process(lambda: path.write_bytes(b"x"), uid=1000)
    assert path.stat().st_mode & 0o7777 == 0o755


@pytest.mark.sweep
def test_more_files_than_the_bridge_remembers(store: Mounted) -> None:
    directory, count = store.path / "many", 17_000
    directory.mkdir()
    for number in range(count):
        os.close(os.open(directory / f"{number}", os.O_WRONLY | os.O_CREAT))
    for number in range(0, count, 500):
        (directory / f"{number}").write_bytes(b"%d" % number * 1000)
    held = [os.open(directory / f"{number}", os.O_RDONLY) for number in range(0, count, 500)]
    for number in range(count):
        os.close(os.open(directory / f"{number}", os.O_RDONLY))
    for number, fd in zip(range(0, count, 500), held, strict=True):
        assert os.pread(fd, 6000, 0) == b"%d" % number * 1000
        assert (directory / f"{number}").read_bytes() == b"%d" % number * 1000
        os.close(fd)
    until_closed(store)


def test_a_daemon_that_is_killed(store: Mounted) -> None:
    directory = store.path / "killed"
    directory.mkdir()
    path = written(store, directory / "file")
    assert path.read_bytes() == CONTENT
    with path.open("rb", buffering=0) as file:
        assert file.read(len(CONTENT)) == CONTENT
        with path.open("r+b", buffering=0) as writer:
            writer.write(b"last")
        path.with_name("gone").write_bytes(CONTENT)
        with path.with_name("gone").open("rb"):
            path.with_name("gone").unlink()
            store.kill()
    store.mount()
    assert path.read_bytes() == b"last" + CONTENT[4:]
    assert os.listdir(directory) == ["file"]


def test_a_mount_ends_while_files_are_open(store: Mounted, path: Path) -> None:
    accessed_ns = path.stat().st_atime_ns
    with path.open("rb", buffering=0) as file:
        assert file.read(len(CONTENT)) == CONTENT
        path.with_name("gone").write_bytes(CONTENT)
    store.remount()
    assert path.read_bytes() == CONTENT and path.stat().st_atime_ns > accessed_ns


def test_without_passthrough(mount_store: Callable[..., Mounted]) -> None:
    mounted = mount_store("burst.passthrough=false")
    path = written(mounted, mounted.path / "file")
    with by_python(mounted) as asked:
        for _ in range(3):
            assert path.read_bytes() == CONTENT
            until_closed(mounted)
    assert asked["answered" + OPEN] == 0 and asked[OPEN] == 3


def test_who_reads_the_operation_log_sees_each_open(mount_store: Callable[..., Mounted]) -> None:
    mounted = mount_store()
    path = written(mounted, mounted.path / "file")
    start = json.loads(os.getxattr(mounted.path, "user.aifs.trace"))["next"]
    assert path.read_bytes() == CONTENT
    until_closed(mounted)
    log = json.loads(os.getxattr(mounted.path, f"user.aifs.trace.{start}"))
    assert {"open", "release"} <= {record["operation"] for record in log["records"]}
