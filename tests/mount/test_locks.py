"""flock(2) and fcntl(2) locks that come to us, as on a mount of a cluster: programs see what they
see on a local file.
"""

import fcntl
import os
import select
import signal
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import pytest

from aifs.fuse import extension
from tests.mount.test_bridge import FLUSH, bridge_of
from tests.support.mounts import TIMEOUT_S, Mounted, mounted_store

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")

OPEN, SETLK, SETLKW = "14", "32", "33"
MANY = 400
LOCKING = ("72", "73")
"""Numbers of the system calls fcntl and flock, as /proc has them."""

PROGRAM = """
import errno, fcntl, os, signal, struct, sys

files = {}

def ofd(name, command, kind, start, length):
    packed = struct.pack("@hhqqi4x", getattr(fcntl, kind), 0, start, length, 0)
    return struct.unpack("@hhqqi4x", fcntl.fcntl(files[name], command, packed))

def alarm(number, frame):
    raise InterruptedError(errno.EINTR, "alarm")

signal.signal(signal.SIGALRM, alarm)
print("ready", flush=True)
for line in sys.stdin:
    try:
        print(eval(line), flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


class Program:
    """A process that evaluates what it is told: a line with the result, or with the name of the
    errno."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        assert self.answer() == "ready"

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        """Readable when it has answered."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def begin(self, line: str) -> Self:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self

    def answer(self) -> str:
        assert self._process.stdout is not None
        assert select.select([self], [], [], TIMEOUT_S)[0], "no answer"
        return self._process.stdout.readline().strip()

    def do(self, line: str) -> str:
        return self.begin(line).answer()

    def open(self, path: Path, name: str = "f") -> None:
        self.do(f"files.__setitem__({name!r}, os.open({str(path)!r}, os.O_RDWR))")

    def close(self, name: str = "f") -> None:
        assert self.do(f"os.close(files.pop({name!r}))") == "None"

    def lockf(self, flags: str, length: int = 0, start: int = 0, name: str = "f") -> str:
        return self.do(self.lockf_line(flags, length, start, name))

    @staticmethod
    def lockf_line(flags: str, length: int = 0, start: int = 0, name: str = "f") -> str:
        names = "|".join(f"fcntl.LOCK_{flag}" for flag in flags.split())
        return f"fcntl.lockf(files[{name!r}], {names}, {length}, {start})"

    def flock(self, flags: str, name: str = "f") -> str:
        names = "|".join(f"fcntl.LOCK_{flag}" for flag in flags.split())
        return self.do(f"fcntl.flock(files[{name!r}], {names})")

    def kill(self) -> None:
        self._process.kill()
        self.end()

    def end(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(TIMEOUT_S)
        self._process.stdout.close()


@contextmanager
def programs(count: int, path: Path) -> Iterator[list[Program]]:
    """Programs that have ``path`` open."""
    found = [Program() for _ in range(count)]
    try:
        for program in found:
            program.open(path)
        yield found
    finally:
        for program in found:
            program.kill()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    """A mount that has locks as in a cluster."""
    with mounted_store(tmp_path_factory.mktemp("locks"), mount=False) as mounted:
        mounted.module = "tests.support.lock_mount"
        mounted.mount()
        yield mounted


@pytest.fixture(params=["cluster", "local"])
def file(request: pytest.FixtureRequest, tmp_path: Path, cluster: Mounted) -> Iterator[Path]:
    """A file on a mount of a cluster, and one on a local filesystem, which shows what is right."""
    directory = tmp_path
    if request.param == "cluster":
        directory = cluster.path / request.node.name.replace("[", "-").rstrip("]")
        directory.mkdir()
    path = directory / "file"
    path.write_bytes(b"0" * 100)
    yield path


def until(condition: object, *args: object) -> None:
    """Wait until it is so."""
    end = time.monotonic() + TIMEOUT_S
    while not condition(*args):  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.01)


def waits(program: Program) -> bool:
    """Whether the process waits, though not for its next line."""
    state = Path(f"/proc/{program.pid}/syscall").read_text().split()[0]
    return state in LOCKING


@pytest.mark.sweep
def test_the_kernel_keeps_locks_of_directories_and_fifos_to_itself(cluster: Mounted) -> None:
    """So they cannot hold over hosts, nor be refused, as README and `aifs doctor` say. A kernel
    that sends them makes this fail."""
    fifo, file = cluster.path / "fifo", cluster.path / "regular"
    os.mkfifo(fifo)
    file.touch()
    sent = {}
    for path, flags in ((cluster.path, os.O_RDONLY), (fifo, os.O_RDWR), (file, os.O_RDONLY)):
        before = bridge_of(cluster)["requests"].get(SETLK, 0)
        fd = os.open(path, flags)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        sent[path.name] = bridge_of(cluster)["requests"].get(SETLK, 0) - before
    assert sent == {cluster.path.name: 0, "fifo": 0, "regular": 1}


def test_ranges_are_held_and_tested(file: Path) -> None:
    with programs(2, file) as (one, other):
        assert one.lockf("EX NB", 10) == "None"
        assert other.lockf("EX NB", 10, 10) == "None"
        assert other.lockf("SH NB", 1, 9) in ("EAGAIN", "EACCES")
        asked = struct.pack("@hhqqi4x", fcntl.F_WRLCK, 0, 0, 0, 0)
        found = other.do(
            f"struct.unpack('@hhqqi4x', fcntl.fcntl(files['f'], fcntl.F_GETLK, {asked}))"
        )
        assert found == str((fcntl.F_WRLCK, 0, 0, 10, one.pid))
        assert one.lockf("UN", 5) == "None"
        assert other.lockf("EX NB", 5) == "None"
        assert one.lockf("UN") == "None"
        free = other.do(
            f"struct.unpack('@hhqqi4x', fcntl.fcntl(files['f'], fcntl.F_GETLK, {asked}))"
        )
        assert free.startswith(f"({fcntl.F_UNLCK},")


def test_a_lock_becomes_one_of_the_other_kind(file: Path) -> None:
    with programs(2, file) as (one, other):
        assert (one.lockf("SH"), other.lockf("SH")) == ("None", "None")
        assert one.lockf("EX NB") in ("EAGAIN", "EACCES")
        assert other.lockf("EX NB") in ("EAGAIN", "EACCES")  # what it has, it keeps
        assert one.lockf("UN") == "None"
        assert other.lockf("EX") == "None"
        assert other.lockf("SH") == "None"
        assert one.lockf("SH") == "None"


@pytest.mark.sweep
def test_who_waits_gets_it_and_holds_nobody_up(file: Path) -> None:
    with programs(3, file) as (holder, first, second):
        assert holder.lockf("EX") == "None"
        first.begin(first.lockf_line("EX"))
        until(waits, first)
        second.begin(second.lockf_line("EX"))
        until(waits, second)
        assert file.read_bytes() == b"0" * 100
        (file.parent / "new").write_bytes(b"x")
        assert holder.lockf("UN") == "None"
        # Either may be the first: no order is promised, and requests may overtake each other.
        ((has_it,), _, _) = select.select([first, second], [], [], TIMEOUT_S)
        other = second if has_it is first else first
        assert has_it.answer() == "None"
        assert waits(other)
        assert has_it.lockf("UN") == "None"
        assert other.answer() == "None"


@pytest.mark.sweep
@pytest.mark.parametrize("call", ["fcntl.lockf", "fcntl.flock"])
def test_a_signal_ends_a_wait(file: Path, call: str) -> None:
    with programs(2, file) as (holder, waiter):
        assert holder.do(f"{call}(files['f'], fcntl.LOCK_EX)") == "None"
        waiter.begin(f"{call}(files['f'], fcntl.LOCK_EX)")
        until(waits, waiter)
        os.kill(waiter.pid, signal.SIGALRM)
        assert waiter.answer() == "EINTR"
        assert holder.do(f"{call}(files['f'], fcntl.LOCK_UN)") == "None"
        assert holder.do(f"{call}(files['f'], fcntl.LOCK_EX | fcntl.LOCK_NB)") == "None"


@pytest.mark.sweep
def test_the_end_of_a_process_ends_its_locks_and_its_waits(file: Path) -> None:
    with programs(4, file) as (holder, waiter, killed, flocker):
        assert holder.lockf("EX") == "None"
        assert flocker.flock("EX") == "None"
        killed.begin(killed.lockf_line("EX"))
        until(waits, killed)
        waiter.begin(waiter.lockf_line("EX"))
        until(waits, waiter)
        killed.kill()
        holder.kill()
        assert waiter.answer() == "None"
        waiter.begin("fcntl.flock(files['f'], fcntl.LOCK_EX)")
        flocker.kill()
        assert waiter.answer() == "None"


def test_close_of_any_descriptor_ends_the_locks_of_the_process(file: Path) -> None:
    with programs(2, file) as (one, other):
        one.open(file, "second")
        assert one.lockf("EX") == "None"
        one.close("second")
        assert other.lockf("EX NB") == "None"
        assert other.lockf("UN") == "None"
        assert one.lockf("EX") == "None"
        one.close()
        assert other.lockf("EX NB") == "None"


def test_flock_is_of_the_open_file(file: Path) -> None:
    with programs(2, file) as (one, other):
        one.open(file, "second")
        assert one.flock("EX") == "None"
        assert one.flock("EX NB", "second") == "EAGAIN"
        assert other.flock("SH NB") == "EAGAIN"
        assert one.lockf("EX NB", 0, 0, "second") == "None"  # a space of its own
        assert one.do("files.__setitem__('copy', os.dup(files['f']))") == "None"
        one.close()
        one.close("second")
        assert other.flock("SH NB") == "EAGAIN"
        # A child has it, too: it ends with the last of them.
        child = int(one.do("os.fork() or signal.pause()"))
        one.close("copy")
        assert other.flock("SH NB") == "EAGAIN"
        os.kill(child, signal.SIGKILL)
        assert one.do(f"os.waitpid({child}, 0)[0]") == str(child)
        until(lambda: other.flock("SH NB") == "None")


def test_flock_changes_its_kind(file: Path) -> None:
    with programs(2, file) as (one, other):
        assert (one.flock("SH"), other.flock("SH")) == ("None", "None")
        assert one.flock("EX NB") == "EAGAIN"
        assert other.flock("EX NB") == "None"  # what one had is lost
        assert other.flock("SH") == "None"
        assert one.flock("SH NB") == "None"


def test_locks_of_an_open_file_description(file: Path) -> None:
    with programs(2, file) as (one, other):
        one.open(file, "second")
        lock = "ofd({!r}, fcntl.F_OFD_SETLK, 'F_WRLCK', 0, 0)[0]"
        assert one.do(lock.format("f")) == str(fcntl.F_WRLCK)
        assert one.do(lock.format("second")) == "EAGAIN"
        one.close("second")
        assert other.lockf("SH NB") in ("EAGAIN", "EACCES")
        one.close()
        until(lambda: other.lockf("SH NB") == "None")


def test_a_circle_is_refused(file: Path) -> None:
    second = file.with_name("second")
    second.write_bytes(b"")
    with programs(2, file) as (one, other):
        one.open(second, "g")
        other.open(second, "g")
        assert one.lockf("EX", 1) == "None"
        assert other.lockf("EX", 0, 0, "g") == "None"
        one.begin(one.lockf_line("EX", 0, 0, "g"))
        until(waits, one)
        other.begin(other.lockf_line("EX", 1))
        told = one if select.select([one, other], [], [], TIMEOUT_S)[0] == [one] else other
        assert told.answer() == "EDEADLOCK"
        assert told.lockf("UN", 1) == told.lockf("UN", 0, 0, "g") == "None"
        rest = other if told is one else one
        assert rest.answer() in ("None", "EDEADLOCK")  # both may have found it at once


def test_reading_opens_that_the_bridge_answers_are_locked_like_others(file: Path) -> None:
    for _ in range(3):
        file.read_bytes()
    with open(file, "rb") as one, open(file, "rb") as other:
        fcntl.flock(one, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        one.close()
        until(lambda: _has_flock(other.fileno()))
        assert other.read() == b"0" * 100
    assert file.read_bytes() == b"0" * 100


def _has_flock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def test_files_that_are_not_locked_cost_python_nothing(cluster: Mounted) -> None:
    """Nor does close(2) wait for us, but where a lock may end."""
    path = cluster.path / "unlocked"
    path.write_bytes(b"content")
    path.read_bytes()
    before = bridge_of(cluster)
    for _ in range(50):
        assert path.read_bytes() == b"content"
    status = bridge_of(cluster)
    assert status["answered"][OPEN] - before["answered"].get(OPEN, 0) >= 49
    assert status["requests"][FLUSH] - before["requests"][FLUSH] <= 1
    with path.open("rb") as file:
        fcntl.lockf(file, fcntl.LOCK_SH)
    flushes = bridge_of(cluster)["requests"][FLUSH]
    for _ in range(3):
        path.read_bytes()
    assert bridge_of(cluster)["requests"][FLUSH] == flushes + 3


def test_a_lock_by_a_file_that_was_open_before_ends_with_it(cluster: Mounted) -> None:
    """Nobody had locked the inode when it was opened, so close(2) of it is not told to us."""
    path = cluster.path / "read-only"
    path.write_bytes(b"content")
    path.read_bytes()  # opens for reading are answered by the bridge from now on
    path.with_name("another").write_bytes(b"")
    with programs(3, path.with_name("another")) as (one, two, other):
        opening = f"files.__setitem__('r', os.open({str(path)!r}, os.O_RDONLY))"
        for program in (one, two):
            program.do(opening)
        assert one.lockf("SH", name="r") == "None"
        assert two.lockf("SH", name="r") == "None"
        other.open(path)  # as "f"
        assert other.lockf("EX NB") in ("EAGAIN", "EACCES")
        assert one.lockf("UN", name="r") == "None"
        one.close("r")
        assert other.lockf("EX NB") in ("EAGAIN", "EACCES")
        two.kill()
        until(lambda: other.lockf("EX NB") == "None")
        one.do(opening)  # it is known to be locked now
        assert other.lockf("UN") == "None"
        assert one.lockf("SH", name="r") == "None"
        one.close("r")
        assert other.lockf("EX NB") == "None"


def test_sqlite_of_two_processes(cluster: Mounted) -> None:
    path = cluster.path / "data.sqlite"
    with sqlite3.connect(path) as database:
        database.execute("create table count (value int)")
        database.execute("insert into count values (0)")
    database.close()
    code = (
        "import sqlite3, sys\n"
        "db = sqlite3.connect(sys.argv[1], timeout=100, isolation_level=None)\n"
        "for _ in range(25):\n"
        "    db.execute('begin immediate')\n"
        "    db.execute('update count set value = value + 1')\n"
        "    db.execute('commit')\n"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, path]) for _ in range(2)]
    assert [process.wait(TIMEOUT_S) for process in running] == [0, 0]
    with sqlite3.connect(path) as database:
        assert database.execute("select value from count").fetchone() == (50,)
    database.close()


@pytest.mark.sweep
def test_a_thousand_locks_leave_nothing(cluster: Mounted) -> None:
    path = cluster.path / "many"
    path.write_bytes(b"")
    with path.open("r+b") as file:
        for start in range(0, MANY, 2):
            fcntl.lockf(file, fcntl.LOCK_EX, 1, start)
        fcntl.lockf(file, fcntl.LOCK_UN)
    with path.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
