"""A mount outlives its daemon: programs wait, and see no error; nothing is done twice."""

import errno
import json
import mmap
import os
import random
import re
import resource
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from aifs.core import mountinfo
from aifs.fuse.kept import HEAD_AT, Head, kept_file
from aifs.store.owner import read_owner
from tests.support.mounts import TIMEOUT_S, Mounted, aifs, call, keepers, mounted_store
from tests.support.outcomes import PROGRAMS, exchange

KEPT = "kernel.restarts=1000"
"""Their daemons are killed before they have served for long."""


def daemon_of(store: Mounted) -> int:
    owner = read_owner(str(store.source / "meta"))
    return 0 if owner is None else owner.pid


def kill(store: Mounted) -> None:
    """kill -9 of the daemon, and wait for the next one to serve."""
    store.kill_only()
    store.adopt()


def _name(fd: int, path: Path) -> None:
    """linkat(2) of a file without a name."""
    os.link(f"/proc/self/fd/{fd}", path, src_dir_fd=fd, follow_symlinks=True)


def standing_by(store: Mounted) -> int:
    """The daemon that waits for its turn, when there is one."""
    (keeper,) = keepers(store)
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
        if waiting := {int(pid) for pid in children} - {daemon_of(store)}:
            return waiting.pop()
        time.sleep(0.01)
    raise TimeoutError("no daemon stands by")


@pytest.fixture
def kept(scratch: Path) -> Iterator[Mounted]:
    with mounted_store(scratch, (KEPT,)) as store:
        yield store


def test_programs_go_on_with_their_files(kept: Mounted) -> None:
    top = kept.path
    (top / "read").write_bytes(b"r" * 100_000)
    (top / "small").write_bytes(b"s")
    reading, small = os.open(top / "read", os.O_RDONLY), os.open(top / "small", os.O_RDONLY)
    writing = os.open(top / "written", os.O_CREAT | os.O_RDWR)
    os.write(writing, b"a" * 5000)
    appending = os.open(top / "appended", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.write(appending, b"one")
    gone = os.open(top / "gone", os.O_CREAT | os.O_RDWR)
    os.write(gone, b"g" * 70_000)
    os.unlink(top / "gone")
    nameless = os.open(top, os.O_TMPFILE | os.O_RDWR)
    os.write(nameless, b"n")
    mapped = os.open(top / "mapped", os.O_CREAT | os.O_RDWR)
    os.ftruncate(mapped, 8192)
    mapping = mmap.mmap(mapped, 8192)
    os.close(mapped)
    mapping[0:2] = b"m1"
    (top / "removed").mkdir()
    inside = os.open(top / "removed", os.O_RDONLY)
    os.rmdir(top / "removed")
    for number in range(3):
        kill(kept)
        assert os.pread(reading, 1 << 20, 0) == b"r" * 100_000
        assert os.pread(small, 10, 0) == b"s"
        os.pwrite(writing, b"b", 4990 + number)
        os.write(appending, b"+")
        assert os.pread(gone, 1 << 20, 0) == b"g" * 70_000
        os.pwrite(gone, b"g", 70_000 - number - 1)
        assert os.pread(nameless, 10, 0) == b"n"
        mapping[4096 + number] = ord("M")
        assert os.listdir(inside) == []
        assert os.fstat(gone).st_nlink == 0
    _name(nameless, top / "named")
    mapping.flush()
    mapping.close()
    for fd in (reading, small, writing, appending, gone, nameless, inside):
        os.close(fd)
    assert (top / "written").read_bytes() == b"a" * 4990 + b"bbb" + b"a" * 7
    assert (top / "appended").read_bytes() == b"one+++"
    assert (top / "named").read_bytes() == b"n"
    found = (top / "mapped").read_bytes()
    assert found[:2] == b"m1" and found[4096:4099] == b"MMM" and len(found) == 8192


def test_a_virtual_file_is_not_taken_for_an_earlier_one(kept: Mounted) -> None:
    for name in ("one", "two"):
        (kept.path / name).mkdir()
        (kept.path / name / name).write_text(name)
    before = (kept.path / "one" / ".aifs-data" / "files.tar").read_bytes()
    kill(kept)
    after = (kept.path / "two" / ".aifs-data" / "files.tar").read_bytes()
    assert b"one" in before and b"two" in after and b"one" not in after


def test_virtual_files_stay_open(kept: Mounted) -> None:
    """As long as their bytes are the same."""
    for name in ("same", "changed"):
        (kept.path / name).mkdir()
        for number in range(40):
            (kept.path / name / f"{number}.txt").write_text(f"{name} {number}\n" * 100)
    paths = [kept.path / name / ".aifs-data" / "files.tar" for name in ("same", "changed")]
    before = [path.read_bytes() for path in paths]
    same, changed, closed = (os.open(path, os.O_RDONLY) for path in (*paths, paths[0]))
    assert os.read(same, 5000) == before[0][:5000] and os.read(changed, 1) == before[1][:1]
    size = os.fstat(same).st_size
    kill(kept)
    os.close(closed)
    (kept.path / "changed" / "0.txt").write_text("other")
    os.posix_fadvise(same, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(changed, 0, 0, os.POSIX_FADV_DONTNEED)
    for _ in range(2):
        assert os.lseek(same, 0, os.SEEK_CUR) == 5000
        assert os.read(same, 1 << 20) == before[0][5000:]
        assert os.fstat(same).st_size == size == os.lseek(same, 0, os.SEEK_HOLE)
        with pytest.raises(OSError) as raised:
            os.pread(changed, 1 << 20, 0)
        assert raised.value.errno == errno.ESTALE
        kill(kept)
        os.posix_fadvise(same, 0, 0, os.POSIX_FADV_DONTNEED)
        os.lseek(same, 5000, os.SEEK_SET)
    assert os.fstat(same).st_ino == os.stat(paths[0]).st_ino
    assert paths[0].read_bytes() == before[0] and b"other" in paths[1].read_bytes()
    os.close(same)
    os.close(changed)


def test_what_was_set_stays_set(kept: Mounted) -> None:
    aifs("config", "set", kept.path, "burst.drain_delay", "1h")
    aifs("config", "set", kept.path, "log.level", "debug")
    os.setxattr(kept.path, "user.aifs.atime", b"noatime")
    job = kept.path / "job"
    job.mkdir()
    os.setxattr(job, "user.aifs.start", b"record=run")
    file = kept.path / "file"
    file.write_bytes(b"a" * 5000)
    os.utime(file, (1, 1))
    for _ in range(2):
        kill(kept)
        told = json.loads(os.getxattr(kept.path, "user.aifs.config"))
        assert told["burst.drain_delay"]["value"] == "1h"
        assert told["log.level"]["value"] == "debug"
    file.read_bytes()
    assert file.stat().st_atime == 1
    os.setxattr(job, "user.aifs.start", b"stop")
    told = {"state": ""}
    while told["state"] != "ended":
        told = json.loads(os.getxattr(job, "user.aifs.start"))
    assert told["run"] == "run" and told["files"] == 1
    assert "what was touched before is left out" in told["notes"][0]
    kill(kept)
    with pytest.raises(OSError) as raised:
        os.getxattr(job, "user.aifs.start")
    assert raised.value.errno == errno.ENODATA


def test_what_it_says_of_itself(kept: Mounted) -> None:
    kill(kept)
    told = json.loads(os.getxattr(kept.path, "user.aifs.status"))["keeper"]
    assert told["restarts"] == 1 and told["last_death"] == "signal 9"
    assert re.search(
        r"daemon .*; 1 restart, the last one after signal 9", aifs("status", kept.path).stdout
    )
    assert [pid for pid in keepers(kept) if pid] and len(keepers(kept)) == 1


def _create(top: Path) -> None:
    fd = os.open(top / "new", os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o640)
    os.write(fd, b"new")
    os.close(fd)
    assert (top / "new").read_bytes() == b"new" and (top / "new").stat().st_mode & 0o777 == 0o640


def _tmpfile(top: Path) -> None:
    fd = os.open(top, os.O_TMPFILE | os.O_RDWR)
    os.write(fd, b"new")
    _name(fd, top / "new")
    os.close(fd)
    assert (top / "new").read_bytes() == b"new"


def _open(top: Path, flags: int) -> None:
    fd = os.open(top / "old", flags)
    assert os.pread(fd, 10, 0) == (b"" if flags & os.O_TRUNC else b"old")
    os.close(fd)


def _exchanged(top: Path) -> None:
    exchange(top / "old", top / "other")
    assert (top / "old").read_bytes() == b"other" and (top / "other").read_bytes() == b"old"


def _linked(top: Path) -> None:
    os.link(top / "old", top / "new")
    assert (top / "old").stat().st_nlink == 2


def _renamed(top: Path) -> None:
    os.rename(top / "old", top / "other")
    assert (top / "other").read_bytes() == b"old" and not (top / "old").exists()


def _set(top: Path) -> None:
    os.chmod(top / "old", 0o604)
    os.truncate(top / "old", 1)
    assert (top / "old").read_bytes() == b"o" and (top / "old").stat().st_mode & 0o777 == 0o604


def _write(top: Path) -> None:
    with open(top / "old", "ab", buffering=0) as file:
        assert file.write(b"er") == 2
    assert (top / "old").read_bytes() == b"older"


def _removed_attribute(top: Path) -> None:
    os.removexattr(top / "old", "user.a")
    assert os.listxattr(top / "old") == []


def _directory(top: Path) -> None:
    (top / "new").mkdir()
    assert top.stat().st_nlink == 4


def _removed_directory(top: Path) -> None:
    (top / "directory").rmdir()
    assert top.stat().st_nlink == 2


def _read(top: Path) -> None:
    assert (top / "old").read_bytes() == b"old"


def _cloned(top: Path) -> None:
    call(top, "clone", name="directory", clone="new")
    assert (top / "new" / "inside").read_bytes() == b"inside"


def _cloned_file(top: Path) -> None:
    call(top, "clone", name="old", clone="new")
    assert (top / "new").read_bytes() == b"old"


def _removed_tree(top: Path) -> None:
    assert (top / "directory" / "inside").exists()
    call(top, "remove", name="directory")
    assert not (top / "directory").exists()


def _removed_tree_by_attribute(top: Path) -> None:
    os.setxattr(top, "user.aifs.remove", b"directory")
    deadline_s = time.monotonic() + TIMEOUT_S
    while (top / "directory").exists():  # the kernel forgets the name soon
        assert time.monotonic() < deadline_s


def _published(top: Path) -> None:
    fields = {"final": "new", "latest": "latest"}
    call(top / "directory", "publish-as", **fields)
    assert (top / "latest" / "inside").read_bytes() == b"inside"
    assert not (top / "directory").exists()


def _restored(top: Path) -> None:
    ino = (top / "removed" / "file").stat().st_ino
    (top / "removed" / "file").unlink()
    told = call(top, "restore", path="removed/file")
    assert told == {"id": ino, "parent": (top / "removed").stat().st_ino}
    assert (top / "removed" / "file").read_bytes() == b"file"


def _emptied(top: Path) -> None:
    ino = (top / "removed" / "file").stat().st_ino
    (top / "removed" / "file").unlink()
    call(top, "trash.empty", ids=[ino])
    with pytest.raises(FileNotFoundError):
        call(top, "trash.empty", ids=[ino])


REQUESTS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "create": ("create", _create),
    "tmpfile": ("create", _tmpfile),
    "mkdir": ("mkdir", _directory),
    "mknod": ("mknod", lambda top: os.mkfifo(top / "new")),
    "symlink": ("symlink", lambda top: os.symlink("x", top / "new")),
    "link": ("link", _linked),
    "unlink": ("unlink", lambda top: os.unlink(top / "old")),
    "rmdir": ("rmdir", _removed_directory),
    "rename": ("rename", _renamed),
    "exchange": ("rename", _exchanged),
    "setattr": ("setattr", _set),
    "setxattr": ("setxattr", lambda top: os.setxattr(top / "old", "user.b", b"1")),
    "setxattr of a new name": (
        "setxattr",
        lambda top: os.setxattr(top / "old", "user.b", b"1", os.XATTR_CREATE),
    ),
    "setxattr of a name that is there": (
        "setxattr",
        lambda top: os.setxattr(top / "old", "user.a", b"1", os.XATTR_REPLACE),
    ),
    "removexattr": ("removexattr", _removed_attribute),
    "open to read": ("open", lambda top: _open(top, os.O_RDONLY)),
    "open to write": ("open", lambda top: _open(top, os.O_RDWR)),
    "open to truncate": ("open", lambda top: _open(top, os.O_RDWR | os.O_TRUNC)),
    "write": ("write", _write),
    "release": ("release", _write),
    "read": ("read", _read),
    "getattr": ("getattr", lambda top: _set(top)),
    "lookup": ("lookup", lambda top: (top / "nothing").exists() and None),
    "readdir": ("readdir", lambda top: os.listdir(top) and None),
    "clone of a tree": ("ioctl", _cloned),
    "clone of a file": ("ioctl", _cloned_file),
    "removal of a tree": ("ioctl", _removed_tree),
    "removal of a tree by attribute": ("setxattr", _removed_tree_by_attribute),
    "publishing": ("ioctl", _published),
    "restore": ("ioctl", _restored),
    "emptying the trash": ("ioctl", _emptied),
}


TREES = (
    "clone of a tree",
    "removal of a tree",
    "removal of a tree by attribute",
    "publishing",
)


@pytest.mark.sweep
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_done_once(
    name: str, when: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operation, program = REQUESTS[name]
    now = scratch / "now"
    monkeypatch.setenv("KILL_AT", f"{when}:{operation}:{now}")
    options = (KEPT, "burst.passthrough=false") if name in ("write", "read") else (KEPT,)
    with mounted_store(scratch, options, mount=False) as store:
        store.module = "tests.support.killed_mount"
        store.mount()
        top = store.path / "top"
        top.mkdir()
        (top / "old").write_bytes(b"old")
        os.setxattr(top / "old", "user.a", b"1")
        (top / "other").write_bytes(b"other")
        (top / "directory").mkdir()
        if name in TREES:
            (top / "directory" / "inside").write_bytes(b"inside")
        if name in ("restore", "emptying the trash"):
            (top / "removed").mkdir()
            (top / "removed" / "file").write_bytes(b"file")
            os.setxattr(top, "user.aifs.trash", b"1h")
        if name == "setattr":
            os.stat(top / "old")
        now.touch()
        program(top)
        first = store.pid
        assert name in ("readdir", "lookup", "read", "open to read") or daemon_of(store) != first
        if daemon_of(store) != first:
            store.follow()


def test_it_ends_when_no_daemon_serves(scratch: Path) -> None:
    with mounted_store(scratch, ("kernel.restarts=2",)) as store:
        store.expected += [r"the mount ends", r"the daemon stops"]
        settings = store.source / "aifs.yaml"
        right = settings.read_text()
        settings.write_text("no: {such: section}\n")
        os.kill(standing_by(store), signal.SIGKILL)  # it has read them already
        file = os.open(store.path, os.O_RDONLY)
        store.kill_only()
        with pytest.raises(OSError) as raised:
            os.statvfs(file)
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED, errno.EIO)
        os.close(file)
        settings.write_text(right)
        subprocess.run(["umount", "-l", store.path], check=True, timeout=TIMEOUT_S)
        store.mount()


def test_it_ends_when_daemons_die_again_and_again(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request kills each daemon that begins with it, and is sent again to the next one."""
    now = scratch / "now"
    monkeypatch.setenv("KILL_AT", f"before:unlink:{now}")
    monkeypatch.setenv("KILL_ALL", "1")
    with mounted_store(scratch, ("kernel.restarts=3",), mount=False) as store:
        store.expected += [r"3 daemons in a row died .* the last one by signal 9"]
        store.module = "tests.support.killed_mount"
        store.mount()
        (store.path / "a").write_bytes(b"a")
        now.touch()
        with pytest.raises(OSError) as raised:
            (store.path / "a").unlink()
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        subprocess.run(["umount", "-l", store.path], check=True, timeout=TIMEOUT_S)
        now.unlink()
        store.mount()
        assert (store.path / "a").read_bytes() == b"a"


def test_one_stands_by_that_goes_on(kept: Mounted) -> None:
    for _ in range(2):
        waiting = standing_by(kept)
        kill(kept)
        assert daemon_of(kept) == waiting
    (keeper,), waiting = keepers(kept), standing_by(kept)
    os.kill(keeper, signal.SIGKILL)
    ended = os.pidfd_open(waiting)
    assert select.select([ended], [], [], TIMEOUT_S)[0]
    os.close(ended)


def test_the_keeper_waits_until_it_can_start_one(kept: Mounted) -> None:
    (keeper,) = keepers(kept)
    soft, hard = resource.prlimit(keeper, resource.RLIMIT_NOFILE)
    resource.prlimit(keeper, resource.RLIMIT_NOFILE, (3, hard))
    kept.kill_only()
    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit((kept.path / "file").write_bytes, b"written")
        with pytest.raises(TimeoutError):
            asking.result(0.5)  # so long it has tried
        resource.prlimit(keeper, resource.RLIMIT_NOFILE, (soft, hard))
        assert asking.result(TIMEOUT_S) == 7
    kept.adopt()
    assert (kept.path / "file").read_bytes() == b"written"


def test_a_stuck_daemon_is_replaced(scratch: Path) -> None:
    with mounted_store(scratch, (KEPT, "kernel.replace_stuck=2s")) as store:
        store.expected += [r"keeper: the daemon .* has done nothing for"]
        file = os.open(store.path / "file", os.O_CREAT | os.O_RDWR)
        os.kill(store.pid, signal.SIGSTOP)
        (store.path / "other").write_bytes(b"other")
        store.follow()
        told = json.loads(os.getxattr(store.path, "user.aifs.status"))["keeper"]
        assert told["restarts"] == 1 and told["last_death"] == "it did nothing"
        os.close(file)


def program(path: Path, script: str) -> Path:
    """An interpreter that can be asked whether it could go on, and then runs ``script``."""
    path.write_text(f"""#!/bin/sh
case "$*" in *--descriptors*) ;; *) exit 0;; esac
{script}
""")
    path.chmod(0o755)
    return path


def test_another_version_goes_on(kept: Mounted, scratch: Path) -> None:
    """It has its code elsewhere."""
    shutil.copytree(Path(mountinfo.__file__).parents[1], scratch / "new" / "aifs")
    version = scratch / "new" / "aifs" / "__init__.py"
    version.write_text(version.read_text() + '\n__version__ = "9.9"\n')
    newer = program(scratch / "python", f'exec {sys.executable} "$@"')
    newer.write_text(newer.read_text().replace("exec", f"PYTHONPATH={scratch}/new exec"))
    file = os.open(kept.path / "file", os.O_CREAT | os.O_RDWR)
    os.write(file, b"before")
    done = aifs("upgrade", kept.path, "--python", newer)
    assert "version 9.9 (before: " in done.stdout
    kept.adopt()
    assert os.pread(file, 10, 0) == b"before"
    os.close(file)
    kill(kept)
    told = json.loads(os.getxattr(kept.path, "user.aifs.status"))["keeper"]
    assert told["version"] == "9.9" and told["program"] == sys.executable


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        pytest.param("exit 3", "does not stand by", marks=pytest.mark.sweep),
        (
            f"exec {sys.executable} -c '\n"
            "import os, sys\n"
            "_, table, turn = map(int, sys.argv[-3:])\n"
            "os.pwrite(table, os.getpid().to_bytes(8, sys.byteorder), int(sys.argv[1]))\n"
            f'os.read(turn, 1)\' {HEAD_AT + 8 * Head.READY} "$@"',
            "does not serve",
        ),
    ],
)
def test_a_version_that_fails_leaves_the_mount_to_the_one_before(
    kept: Mounted, scratch: Path, script: str, reason: str
) -> None:
    kept.expected += [reason]
    file = os.open(kept.path / "file", os.O_CREAT | os.O_RDWR)
    other = program(scratch / "python", script)
    done = aifs("upgrade", kept.path, "--python", other, check=False)
    assert done.returncode == 6 and "did not go on with it" in done.stderr
    kept.adopt()
    os.write(file, b"after")
    assert os.pread(file, 10, 0) == b"after"
    os.close(file)


def test_it_ends_with_its_daemon_where_no_request_is_sent_again(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = scratch / "now"
    monkeypatch.setenv("KILL_AT", f"before:unlink:{now}")
    monkeypatch.setenv("WITHOUT_RESEND", "1")
    with mounted_store(scratch, (KEPT,), mount=False) as store:
        store.expected += [r"the mount ends"]
        store.module = "tests.support.killed_mount"
        store.mount()
        (store.path / "a").write_bytes(b"a")
        now.touch()
        with pytest.raises(OSError) as raised:
            (store.path / "a").unlink()
        assert raised.value.errno in (errno.ENOTCONN, errno.ECONNABORTED)
        store.wait_for_end()
        subprocess.run(["umount", "-l", store.path], check=True, timeout=TIMEOUT_S)
        now.unlink()
        store.mount()
        assert (store.path / "a").read_bytes() == b"a"


def test_without_its_keeper_it_goes_on_and_ends_with_the_daemon(kept: Mounted) -> None:
    (keeper,) = keepers(kept)
    os.kill(keeper, signal.SIGKILL)
    (kept.path / "a").write_bytes(b"a")
    assert (kept.path / "a").read_bytes() == b"a"
    kept.kill_only()
    with pytest.raises(OSError) as raised:
        os.statvfs(kept.path)
    assert raised.value.errno == errno.ENOTCONN
    subprocess.run(["umount", "-l", kept.path], check=True, timeout=TIMEOUT_S)
    kept.mount()
    assert (kept.path / "a").read_bytes() == b"a"


def test_a_signal_ends_it_in_order(kept: Mounted) -> None:
    kill(kept)
    (kept.path / "a").write_bytes(b"a")
    kept.signal(signal.SIGTERM)
    kept.wait_for_end()
    assert mountinfo.mounted_at(str(kept.path)) is None
    deadline_s = time.monotonic() + TIMEOUT_S
    while keepers(kept) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not keepers(kept)


def _storm(store: Mounted, scratch: Path, kills: int) -> None:
    """Programs of all kinds, and their daemon is killed at random moments, some before it
    serves."""
    stop, rng = scratch / "stop", random.Random(kills)
    command = [sys.executable, "-m", "tests.support.outcomes"]
    programs = {
        name: subprocess.Popen(
            [*command, name, str(store.path / name), str(stop)], stdout=subprocess.PIPE, text=True
        )
        for name in PROGRAMS
    }
    try:
        for number in range(kills):
            if number == kills // 2:
                aifs("upgrade", store.path)
                store.adopt()
            time.sleep(rng.uniform(0, 0.4))  # a moment that nothing else decides
            store.kill_only()
            if rng.random() < 0.2:
                _kill_next(store)
            store.adopt()
            ended = [name for name, program in programs.items() if program.poll() is not None]
            assert not ended
        stop.touch()
        rounds = {name: program.communicate(timeout=600)[0] for name, program in programs.items()}
    finally:
        for program in programs.values():
            program.kill()
            program.wait()
    assert all(not program.returncode for program in programs.values()), rounds
    told = json.loads(os.getxattr(store.path, "user.aifs.status"))["keeper"]
    assert told["restarts"] >= kills


def _kill_next(store: Mounted) -> None:
    """The next daemon, when it has the store."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while (pid := daemon_of(store)) in (0, store.pid) and time.monotonic() < deadline_s:
        time.sleep(0.001)
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _sizes(pid: int) -> tuple[int, int]:
    """Descriptors of a process, and its own memory in KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"^RssAnon:\s+(\d+) kB$", status, re.MULTILINE)
    assert found
    return len(os.listdir(f"/proc/{pid}/fd")), int(found[1])


@pytest.mark.parametrize(
    "restarts",
    [pytest.param(5, marks=pytest.mark.sweep), pytest.param(100, marks=pytest.mark.long)],
)
def test_nothing_grows_with_restarts(restarts: int, kept: Mounted) -> None:
    for name in map(str, range(20)):
        (kept.path / name).write_bytes(b"a" * 5000)
    virtual = kept.path / ".aifs-data" / "files.tar"
    fds = [os.open(kept.path / str(name), os.O_RDWR) for name in range(20)]
    fds.append(os.open(virtual, os.O_RDONLY))
    (keeper,) = keepers(kept)
    found = []
    for _ in range(restarts):
        standing_by(kept)
        kill(kept)
        for fd in fds:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            assert len(os.pread(fd, 5000, 0)) == 5000
        standing_by(kept)
        table = os.open(kept_file(kept.pid), os.O_RDONLY)
        used = [
            int.from_bytes(os.pread(table, 8, HEAD_AT + 8 * word), sys.byteorder)
            for word in (Head.USED, Head.NOTES)
        ]
        os.close(table)
        found.append((*_sizes(keeper), *_sizes(kept.pid), *used))
    for fd in fds:
        os.close(fd)
    (first, *_), last = found[2:], found[-1]
    assert last[0] == first[0] and last[2] <= first[2] + 2 and last[4:] == first[4:], found
    assert last[1] < first[1] + 512 and last[3] < first[3] * 1.1, found


@pytest.mark.parametrize(
    "kills", [pytest.param(10, marks=pytest.mark.sweep), pytest.param(100, marks=pytest.mark.long)]
)
def test_programs_in_a_storm_of_kills(kills: int, scratch: Path) -> None:
    with mounted_store(scratch, (KEPT, "data.movers=1", "burst.drain_delay=0s")) as store:
        _storm(store, scratch, kills)


def test_a_daemon_dies_while_a_tiny_file_leaves_its_copy(
    scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last close is sent again, of a handle whose copy the record does not name any more."""
    now = scratch / "now"
    monkeypatch.setenv("DIE_AT", f"meta.journal.after_append:{now}")
    with mounted_store(scratch, (KEPT,), mount=False) as store:
        store.module = "tests.support.dying_mount"
        store.mount()
        fd = os.open(store.path / "tiny", os.O_CREAT | os.O_RDWR)
        os.write(fd, b"tiny")
        os.fsync(fd)
        first = store.pid
        now.touch()
        os.close(fd)
        store.wait_for_end()
        now.unlink()
        store.adopt()
        assert (store.path / "tiny").read_bytes() == b"tiny"
        assert store.pid != first


POINTS = (
    "meta.journal.before_append",
    "meta.journal.after_append",
    "meta.journal.before_sync",
    "meta.journal.after_sync",
    "meta.commit.before",
    "meta.commit.after_lmdb",
    "meta.commit.frozen",
    "meta.commit.after_cut",
    "vfs.burst.entered",
    "vfs.burst.synced",
    "vfs.collect.erased",
    "vfs.collect.deleted",
    "data.append.synced",
    "vfs.drain.copied",
    "vfs.drain.flipped",
    "vfs.doomed.removed",
    "vfs.doomed.emptied",
    "vfs.publish.durable",
    "vfs.publish.shown",
)
"""Those that the programs reach."""


@pytest.mark.sweep
@pytest.mark.parametrize("point", POINTS)
def test_a_daemon_dies_at_a_point(
    point: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, stop = scratch / "now", scratch / "stop"
    monkeypatch.setenv("DIE_AT", f"{point}:{now}")
    options = (KEPT, "burst.drain_delay=0s", "meta.commit_interval=100ms")
    with mounted_store(scratch, options, mount=False) as store:
        store.module = "tests.support.dying_mount"
        store.mount()
        now.touch()
        command = [sys.executable, "-m", "tests.support.outcomes"]
        programs = [
            subprocess.Popen(
                [*command, name, str(store.path / name), str(stop)], stdout=subprocess.DEVNULL
            )
            for name in ("mixed", "torch", "sqlite")
        ]
        try:
            store.follow()
            stop.touch()
            assert [program.wait(TIMEOUT_S) for program in programs] == [0, 0, 0]
        finally:
            for program in programs:
                program.kill()
                program.wait()
