"""The FUSE edge without a kernel: error choke point, conversions, directory listings, waiting for
requests.
"""

import errno
import logging
import os
import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pyfuse3
import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from aifs.core.errors import NotEmpty, NotFound
from aifs.core.served import AllServed
from aifs.files.handles import HANDLE_MAX
from aifs.files.types import Opened, StatFs
from aifs.fuse import kernel_cache, operations, requests, session
from aifs.fuse.bridge import HANDLE_BITS, UNKNOWN, KeptName
from aifs.fuse.kernel_cache import KernelCache
from aifs.fuse.operations import Operations
from aifs.fuse.options import MountOptions
from aifs.fuse.requests import ReaderLock, Scheduler
from aifs.fuse.session import mount_arguments
from aifs.meta.records import Inode
from aifs.vfs.operation_log import OperationLog, Request

KERNEL = SimpleNamespace(
    entry_timeout_s=10.0, attr_timeout_s=20.0, negative_timeout_s=30.0, read_ahead=0
)
SETTABLE = ("mode", "uid", "gid", "size", "atime", "mtime", "ctime")
CALLER = SimpleNamespace(uid=1, gid=2, pid=3, umask=0o22)


def inode(ino: int = 7) -> Inode:
    return Inode(ino, 0o100644, 11, 12, 3, 0x801, 1 << 44, 17, 10**18 + 1, 10**18 + 2, -5)


LAST_REQUEST = (77, 1000, 4321)


class FakeFilesystem:
    """Answers each method with ``answer``, or raises it; ``calls`` has the arguments."""

    def __init__(self, answer: Any = None) -> None:
        self.answer = answer
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.on_attr_change = None
        self.operation_log = OperationLog(lambda _: None)
        self.served = AllServed()

    def changes_unseen(self, ino: int) -> bool:
        return False

    kernel = SimpleNamespace(kept=None)

    def told_size(self, inode: Inode) -> int:
        return inode.size

    def keeps_name(self, directory: int, name: bytes) -> bool:
        return True

    def forget(self, inos: list[int]) -> None:
        self.calls.append(("forget", (inos,)))

    def __getattr__(self, name: str) -> Any:
        async def method(*args: Any) -> Any:
            self.calls.append((name, args))
            if isinstance(self.answer, BaseException):
                raise self.answer
            return self.answer

        return method


def over(fs: Any, scheduler: Scheduler | None = None, kill_privileges: bool = False) -> Operations:
    return Operations(
        fs,
        KERNEL,
        scheduler or Scheduler(0.0),
        lambda: kill_privileges,
        lambda ino: None,
        lambda: LAST_REQUEST,
        lambda: False,
    )


def edge(answer: Any = None, kill_privileges: bool = False) -> tuple[Operations, FakeFilesystem]:
    fs = FakeFilesystem(answer)
    return over(fs, None, kill_privileges), fs


# --- the choke point ---


HANDLERS = [
    name
    for name in vars(pyfuse3.Operations)
    if not name.startswith("_") and callable(getattr(pyfuse3.Operations, name))
]
UNUSED = {"init", "access", "poll", "stacktrace", "flush"}


def test_every_handler_is_ours_and_passes_the_choke_point() -> None:
    for name in set(HANDLERS) - UNUSED:
        assert vars(Operations)[name].__wrapped__.__name__ == name


async def test_errors_are_answered_with_their_errno_and_bugs_with_eio_and_their_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ops, fs = edge(NotEmpty())
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await ops.rmdir(1, b"d", CALLER)
    assert caught.value.errno == errno.ENOTEMPTY and not caplog.records
    fs.answer = ZeroDivisionError("a bug")
    fs.operation_log.follow()
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await ops.getattr(1, CALLER)
    assert caught.value.errno == errno.EIO
    (record,) = caplog.records
    assert record.levelno == logging.ERROR and record.exc_info[0] is ZeroDivisionError
    assert "getattr" in record.message
    caplog.clear()
    assert [one.errno for one in fs.operation_log.records(0)[1]] == [errno.EIO]


async def test_cancellation_is_no_error_and_in_the_operation_log() -> None:
    ops, fs = edge()
    fs.operation_log.follow()
    fs.getattr = lambda ino: trio.sleep_forever()  # type: ignore[attr-defined]
    with trio.CancelScope() as scope:
        scope.cancel()
        await ops.getattr(2, CALLER)
    assert scope.cancelled_caught
    assert [one.errno for one in fs.operation_log.records(0)[1]] == [errno.EINTR]


async def test_what_is_answered_is_logged_while_somebody_reads() -> None:
    ops, fs = edge(NotEmpty())
    log = fs.operation_log
    with pytest.raises(pyfuse3.FUSEError):
        await ops.rmdir(1, b"before", CALLER)
    log.follow()
    with pytest.raises(pyfuse3.FUSEError):
        await ops.rmdir(1, b"d", CALLER)
    fs.answer = b"content"
    await ops.read(5, 0, 4096)
    await ops.getxattr(9, b"user.x", CALLER)
    await ops.getxattr(1, b"user.aifs.trace.0", CALLER)  # who reads the log is not in it
    fs.answer = 3
    await ops.write(5, 0, b"abc")
    await ops.forget([(7, 1)])
    fs.answer = StatFs(4096, 1, 1, 1, 1, 1, 255)
    await ops.statfs(CALLER)
    _, records = log.records(0)
    assert [(record.request, record.errno, record.bytes) for record in records] == [
        (Request("rmdir", 1, b"d", b"", 1, 3), errno.ENOTEMPTY, 0),
        (Request("read", *LAST_REQUEST[:1], b"", b"", *LAST_REQUEST[1:]), 0, 7),
        (Request("getxattr", 9, b"", b"user.x", 1, 3), 0, 0),
        (Request("write", *LAST_REQUEST[:1], b"", b"", *LAST_REQUEST[1:]), 0, 3),
        (Request("forget", *LAST_REQUEST[:1], b"", b"", *LAST_REQUEST[1:]), 0, 0),
        (Request("statfs", 0, b"", b"", 1, 3), 0, 0),
    ]
    assert all(record.duration_us >= 0 and record.at_ns > 0 for record in records)


@pytest.mark.parametrize("answer", [inode(), NotFound(), ValueError()])
async def test_no_request_is_counted_as_waiting_after_its_answer(answer: Any) -> None:
    fs = FakeFilesystem(answer)
    scheduler = Scheduler(0.0)
    ops = over(fs, scheduler)
    logging.getLogger(operations.__name__).disabled = True
    try:
        await ops.getattr(1, CALLER)
    except pyfuse3.FUSEError:
        pass
    finally:
        logging.getLogger(operations.__name__).disabled = False
    assert scheduler.waiting_requests == 0 and len(fs.calls) == 1


async def test_background_work_may_go_on_when_no_request_is_read_any_more() -> None:
    cache = KernelCache()
    cache.drop_attributes_soon([7])
    cache.drop_name_soon(1, b"name")
    await cache.forget_names([(1, b"name")])
    await cache.look_up_anew([(1, b"name")])


async def test_what_is_sent_when_the_mount_ends_is_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that still sends then finds no connection. A warning would fail this test."""
    sending, ended = threading.Event(), threading.Event()
    sent = []

    def refuse(*what: object) -> None:
        sent.append(what)
        sending.set()
        ended.wait()
        raise OSError(errno.EINVAL, "no connection")

    monkeypatch.setattr(pyfuse3, "invalidate_inode", refuse)
    cache = KernelCache()
    async with trio.open_nursery() as nursery:
        with cache.serving(nursery):
            cache.drop_attributes_soon([7, 8])
            await trio.to_thread.run_sync(sending.wait)
        ended.set()
    assert sent == [(7, True)]


async def test_what_another_host_has_changed_is_told_by_one_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whose pages have to be dropped is known then; a name that has to wait keeps no attributes
    waiting."""
    told: list[tuple[object, ...]] = []
    threads, unlocked = set(), threading.Event()

    def tell(*what: object) -> None:
        threads.add(threading.get_ident())
        told.append(what)
        if what[0] == 8:
            raise FileNotFoundError
        if what == (1, b"locked"):
            unlocked.wait()

    monkeypatch.setattr(pyfuse3, "invalidate_inode", tell)
    monkeypatch.setattr(pyfuse3, "invalidate_entry", tell)
    monkeypatch.setattr(kernel_cache, "LOCKED_S", 60.0)
    cache = KernelCache()
    async with trio.open_nursery() as nursery:
        with cache.serving(nursery):
            known = await cache.forget({(1, b"name"): 0}, [1, 7, 8], [1])
            assert known == {1, 7} and len(threads) == 1
            assert set(told) == {(1,), (7, True), (8, True), (1, b"name")}
            monkeypatch.setattr(kernel_cache, "LOCKED_S", 0.0)
            bridge = KeepsNames({(1, b"locked"): KeptName(9, time.monotonic_ns() + 10**7)})
            cache.announce(bridge, [])  # type: ignore[arg-type]
            assert await cache.forget({(1, b"locked"): 0}, [7], []) == {7}
            unlocked.set()


class KeepsNames:
    """A bridge that has told the kernel of inode 1 and 3, and of these names."""

    def __init__(self, kept: dict[tuple[int, bytes], KeptName]) -> None:
        self.kept = kept
        self.in_use = self.keeps_account = True
        self.expired: list[tuple[int, bytes]] = []

    def was_told(self, ino: int) -> bool:
        return ino in (1, 3, 7)

    def kept_name(self, parent: int, name: bytes) -> KeptName:
        found = self.kept.get((parent, name), KeptName(0, 0))
        return found if found.until_ns > time.monotonic_ns() else KeptName(0, 0)

    def drop_name(self, parent: int, name: bytes, kept: KeptName) -> None:
        assert self.kept.pop((parent, name)) == kept

    def expire_name(self, parent: int, name: bytes) -> None:
        self.expired.append((parent, name))


async def test_what_the_kernel_was_never_told_of_is_not_told_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So a host pays nearly nothing for what others do in directories that nobody uses here."""
    told: list[tuple[object, ...]] = []

    monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda *what: told.append(what))
    monkeypatch.setattr(pyfuse3, "invalidate_entry", lambda *what: told.append(what))
    cache = KernelCache()
    later = time.monotonic_ns() + 60 * 10**9
    told_names = {b"moved": 5, b"same": 6, b"absent": 0, b"unknown": UNKNOWN}
    bridge = KeepsNames({(3, name): KeptName(ino, later) for name, ino in told_names.items()})
    cache.announce(bridge, [])  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        with cache.serving(nursery):
            monkeypatch.setattr(trio.to_thread, "run_sync", None)
            names = {(2, b"name"): 0, (3, b"other"): 9, (3, b"same"): 6}
            assert await cache.forget(names, [2, 8], [2]) == set()
            assert told == []
            monkeypatch.undo()
            monkeypatch.setattr(pyfuse3, "invalidate_inode", lambda *what: told.append(what))
            monkeypatch.setattr(pyfuse3, "invalidate_entry", lambda *what: told.append(what))
            monkeypatch.setattr(kernel_cache, "LOCKED_S", 60.0)
            names = {(3, name): 6 for name in told_names} | {(2, b"name"): 0}
            assert await cache.forget(names, [3, 8], [3, 2]) == {3}
            assert set(told) == {(3,), (3, b"moved"), (3, b"unknown")}
            # What leads somewhere now, and did not, takes nothing away from programs.
            assert bridge.expired == [(3, b"absent")] and bridge.kept.keys() == {(3, b"same")}


# --- conversions ---


async def test_all_attributes_and_timeouts_reach_the_kernel() -> None:
    ops, _ = edge(inode())
    entry = await ops.getattr(7, CALLER)
    found = inode()
    fields = "mode uid gid nlink rdev size blocks ino atime_ns mtime_ns ctime_ns"
    for field in fields.split():
        assert getattr(entry, f"st_{field}") == getattr(found, field)
    assert (entry.entry_timeout, entry.attr_timeout) == (10.0, 20.0)


async def test_a_missing_name_is_a_cached_negative_entry() -> None:
    ops, _ = edge(NotFound())
    entry = await ops.lookup(1, b"missing", CALLER)
    assert (entry.st_ino, entry.entry_timeout) == (0, 30.0)


def updated(chosen: str) -> Any:
    """What setattr is told to change."""
    return SimpleNamespace(**{f"update_{name}": name == chosen for name in SETTABLE})


@pytest.mark.parametrize("chosen", SETTABLE)
def test_setattr_changes_what_is_asked_for_and_nothing_else(chosen: str) -> None:
    entry = operations.fill(pyfuse3.EntryAttributes(), inode())
    asked = operations.changes(entry, updated(chosen), False)
    names = {name: f"{name}_ns" if name.endswith("time") else name for name in SETTABLE}
    for name, attribute in names.items():
        expected = getattr(inode(), attribute) if name == chosen else None
        assert getattr(asked, attribute) == expected


async def test_each_request_is_counted_with_its_outcome() -> None:
    ops, fs = edge(b"123")
    await ops.read(3, 0, 8)
    for answer in (NotEmpty(), RuntimeError()):  # an answer, and an error
        fs.answer = answer
        with pytest.raises(pyfuse3.FUSEError):
            await ops.unlink(1, b"x", CALLER)
    fs.answer = NotFound()
    await ops.lookup(1, b"none", CALLER)  # an answer that the kernel keeps, and no error
    told = fs.served.status()
    assert told["read"]["count"] == 1 and told["read"]["bytes"] == 3
    assert told["unlink"]["count"] == 2 and told["unlink"]["errors"] == {"EIO": 1}
    assert told["lookup"]["count"] == 1 and not told["lookup"]["errors"]


@pytest.mark.parametrize("owed", [False, True])
async def test_what_a_request_owes_to_set_id_bits_is_passed_on(owed: bool) -> None:
    ops, fs = edge(Opened(3), owed)
    await ops.open(7, os.O_WRONLY, CALLER)
    fs.answer = 5
    await ops.write(3, 10, b"bytes")
    fs.answer = inode()
    await ops.setattr(7, pyfuse3.EntryAttributes(), updated(""), None, CALLER)
    (_, opened), (_, written), (_, set_to) = fs.calls
    assert (opened, written) == ((7, os.O_WRONLY, owed, CALLER), (3, 10, b"bytes", owed, False))
    assert set_to[1].kill_privileges is owed


@pytest.mark.parametrize("backing", [0, 1, 70_000, (1 << 31) - 1])
async def test_an_open_file_is_answered_with_its_backing_id_above_its_handle(backing: int) -> None:
    ops, fs = edge(Opened(HANDLE_MAX, backing))
    info = await ops.open(7, os.O_RDONLY, CALLER)
    assert (info.fh >> HANDLE_BITS, info.fh & (1 << HANDLE_BITS) - 1) == (backing, HANDLE_MAX)
    assert info.keep_cache and not info.direct_io
    fs.answer = Opened(3, backing, direct=True)
    assert (await ops.open(7, os.O_RDWR, CALLER)).direct_io
    fs.answer = Opened(5, backing), inode()
    info, entry = await ops.create(1, b"new", 0o644, os.O_RDWR, CALLER)
    assert (info.fh, entry.st_ino) == (backing << HANDLE_BITS | 5, 7)


async def test_statfs_reports_blocks_of_the_stated_size() -> None:
    ops, _ = edge(StatFs(4096, 100, 50, 40, 30, 20, 255))
    reply = await ops.statfs(CALLER)
    found = (reply.f_bsize, reply.f_frsize, reply.f_blocks, reply.f_bfree, reply.f_bavail)
    assert found == (4096, 4096, 100, 50, 40)
    assert (reply.f_files, reply.f_ffree, reply.f_favail, reply.f_namemax) == (30, 20, 20, 255)


async def test_forgotten_inodes_are_passed_on_without_counts() -> None:
    ops, fs = edge()
    await ops.forget([(5, 1), (6, 20)])
    assert fs.calls == [("forget", ([5, 6],))]


def test_options_name_source_and_type_and_survive_commas() -> None:
    config = SimpleNamespace(source="/a,b\\c")
    options = mount_arguments(config, MountOptions(True, True, ["nodev"]))  # type: ignore[arg-type]
    assert options == {
        "fsname=/a\\,b\\\\c",
        "subtype=aifs",
        "default_permissions",
        "nodev",
        "ro",
        "allow_other",
    }


# --- listings ---


class Directory(FakeFilesystem):
    """``count`` entries whose cookies are not consecutive, given in batches."""

    def __init__(self, count: int, batch: int) -> None:
        super().__init__(inode(1))
        self.entries = [(b"e%d" % place, inode(place + 2), 3 * place + 5) for place in range(count)]
        self.batch = batch

    async def readdir(self, handle: int, cookie: int) -> list[tuple[bytes, Inode, int]]:
        return [entry for entry in self.entries if entry[2] > cookie][: self.batch]


class Reply:
    """Stands for pyfuse3.readdir_reply with a buffer for ``room`` entries."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.got: list[tuple[bytes, int, int]] = []

    def __call__(
        self, token: object, name: bytes, entry: pyfuse3.EntryAttributes, next_id: int
    ) -> bool:
        if len(self.got) == self.room:
            return False
        self.got.append((name, entry.st_ino, next_id))
        return True


async def _read(
    ops: Operations, handle: int, cookie: int, room: int
) -> list[tuple[bytes, int, int]]:
    reply = Reply(room)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pyfuse3, "readdir_reply", reply)
        await ops.readdir(handle, cookie, None)
    return reply.got


@pytest.mark.sweep
@given(st.integers(0, 40), st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_listing_is_complete(count: int, batch: int, rooms: list[int]) -> None:
    async def check() -> None:
        fs = Directory(count, batch)
        ops = over(fs)
        handle = await ops.opendir(1, CALLER)
        found: list[tuple[bytes, int, int]] = []
        for turn in range(count + 4):
            got = await _read(ops, handle, found[-1][2] if found else 0, rooms[turn % len(rooms)])
            if not got:
                break
            found += got
        assert [name for name, _, _ in found[:2]] == [b".", b".."]
        assert [(name, ino) for name, ino, _ in found[2:]] == [
            (name, entry.ino) for name, entry, _ in fs.entries
        ]
        await ops.releasedir(handle)

    trio.run(check)


async def test_each_request_is_answered_with_what_is_there_when_it_comes() -> None:
    fs = Directory(10, 4)
    ops = over(fs)
    handle = await ops.opendir(1, CALLER)
    first = await _read(ops, handle, 0, 4)
    removed = fs.entries.pop(2)  # it was in the batch that the first reply did not hold all of
    names = [name for name, _, _ in await _read(ops, handle, first[-1][2], 20)]
    assert removed[0] not in names and len(names) == 7


async def test_seekdir_and_rewinddir_read_afresh() -> None:
    fs = Directory(10, 4)
    ops = over(fs)
    handle = await ops.opendir(1, CALLER)
    whole = await _read(ops, handle, 0, 8)
    assert await _read(ops, handle, whole[2][2], 3) == whole[3:6]
    assert await _read(ops, handle, 0, 8) == whole


# --- waiting for requests ---


async def test_the_reader_lock_lets_one_task_in_at_a_time() -> None:
    lock, inside, most, turns = ReaderLock(), 0, 0, 0

    async def reader() -> None:
        nonlocal inside, most, turns
        for _ in range(20):
            async with lock:
                inside += 1
                most = max(most, inside)
                await trio.lowlevel.checkpoint()
                inside -= 1
                turns += 1

    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(reader)
    assert (most, turns) == (1, 100)


async def test_the_reader_lock_may_be_taken_again_before_those_who_wait() -> None:
    lock, order = ReaderLock(), []

    async def waiting() -> None:
        async with lock:
            order.append("waiting")

    async with trio.open_nursery() as nursery:
        async with lock:
            nursery.start_soon(waiting)
            await trio.testing.wait_all_tasks_blocked()
        async with lock:
            order.append("again")
    assert order == ["again", "waiting"]


async def test_a_cancelled_waiter_leaves_the_reader_lock_usable() -> None:
    lock = ReaderLock()
    async with lock:
        with trio.CancelScope() as scope:
            scope.cancel()
            async with lock:
                raise AssertionError("entered twice")
    async with lock:
        pass
    assert scope.cancelled_caught


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Its ends, for reading and for writing."""
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


async def test_what_is_readable_is_read_without_a_turn_for_others(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    os.write(writing, b"request")
    scheduler = Scheduler(1.0)
    await scheduler.wait_readable(reading)
    with pytest.raises(StopIteration):  # else it is suspended
        scheduler.wait_readable(reading).send(None)
    scheduler.waiting_requests = 1  # now somebody else needs the turn
    with trio.CancelScope() as scope:
        scope.cancel()
        await scheduler.wait_readable(reading)
    assert scope.cancelled_caught


async def test_other_tasks_get_their_turn_while_requests_keep_coming(pipe: tuple[int, int]) -> None:
    os.write(pipe[1], b"request")
    scheduler, ran = Scheduler(1.0), trio.Event()

    async def other() -> None:
        ran.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        while not ran.is_set():
            await scheduler.wait_readable(pipe[0])


async def test_a_session_that_ends_wakes_the_waiting_reader(pipe: tuple[int, int]) -> None:
    scheduler = Scheduler(0.0)

    async def read() -> None:
        with pytest.raises(scheduler.ClosedResourceError):
            await scheduler.wait_readable(pipe[0])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(read)
        await trio.testing.wait_all_tasks_blocked()
        scheduler.notify_closing(pipe[0])


def test_install_gives_pyfuse3_all_that_it_uses_of_trio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyfuse3, "trio", trio)
    scheduler = requests.install()
    assert pyfuse3.trio is scheduler and scheduler.lowlevel is scheduler
    for name in ("Lock", "open_nursery", "ClosedResourceError"):
        assert hasattr(scheduler, name)


@pytest.mark.parametrize(
    ("reason", "kept"), [("No such file or directory", False), ("Invalid argument", True)]
)
def test_a_reply_that_nobody_waits_for_is_no_error_in_the_log(reason: str, kept: bool) -> None:
    record = logging.LogRecord(
        "pyfuse3", logging.ERROR, "", 0, "fuse_read(): failed with %s", (reason,), None
    )
    assert session.is_error(record) is kept
