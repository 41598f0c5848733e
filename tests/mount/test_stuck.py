"""No program waits for a daemon that is dead or stuck: requests end when it dies, and commands of
ours in any case.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from aifs.core import connections
from tests.support.mounts import ROOT, TIMEOUT_S, Mounted, aifs
from tests.support.stalled import NAME

LOCK = "fuse_reverse_inval"
"""Where a thread waits that sends an invalidation."""

CREATE = "import os, sys; os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY)"


def wait_for_lock(pid: int) -> None:
    """Until the kernel keeps a thread of the process waiting for a lock."""
    threads = Path(f"/proc/{pid}/task")
    while not any(LOCK in path.read_text() for path in threads.glob("*/wchan")):
        assert threads.exists()


def wait_until_stalled(pid: int) -> None:
    """Until the process waits for an answer of its daemon."""
    while "request_wait_answer" not in Path(f"/proc/{pid}/wchan").read_text():
        assert Path(f"/proc/{pid}").exists()


@contextmanager
def blocked(mounted: Mounted) -> Iterator[subprocess.Popen]:
    """A program that holds a directory's lock and waits for the daemon, which wants to invalidate a
    name there."""
    directory = mounted.path / "directory"
    (directory / "tree").mkdir(parents=True)
    # Other tests drop the kernel's caches, and to look the name up anew takes the directory's lock.
    held = os.open(directory / "tree", os.O_PATH)
    abort = connections.open_abort(os.stat(mounted.path).st_dev)
    program = subprocess.Popen([sys.executable, "-c", CREATE, directory / os.fsdecode(NAME)])
    try:
        wait_until_stalled(program.pid)
        aifs("rm", "-r", directory / "tree")
        wait_for_lock(mounted.pid)
        yield program
    finally:
        program.kill()
        connections.abort(abort)
        os.close(abort)
        os.close(held)
        program.wait(TIMEOUT_S)


@pytest.fixture
def stalling(mounted: Mounted) -> Mounted:
    mounted.unmount()
    command = [sys.executable, "-m", "tests.support.stalled", "mount"]
    subprocess.run([*command, mounted.source, mounted.path], cwd=ROOT, check=True)
    mounted.adopt()
    return mounted


@pytest.mark.sweep
def test_a_killed_daemon_ends_though_the_kernel_holds_one_of_its_threads(
    stalling: Mounted,
) -> None:
    with blocked(stalling) as program:
        stalling.kill_only()
        assert program.wait(TIMEOUT_S) != 0
    stalling.mount()


IMPATIENT = """
import sys
from aifs.cli import door
from aifs.cli.main import main

door.WAITS_S = (0.5, 0.5, 1.0)
door.ANSWER_S = sum(door.WAITS_S)
sys.exit(main())
"""


def impatient(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """The command ``aifs`` of somebody who waits for two seconds."""
    return subprocess.run(
        [sys.executable, "-c", IMPATIENT, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=TIMEOUT_S,
    )


def commands(besides: int) -> Iterator[bytes]:
    """The command lines of all processes but one."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended meanwhile
            if path.parent.name != str(besides):
                yield path.read_bytes()


@pytest.fixture
def stopped(mounted: Mounted) -> Iterator[Mounted]:
    """A mount whose daemon lives and door nothing."""
    (mounted.path / "before").write_bytes(b"acknowledged")
    mounted.signal(signal.SIGSTOP)
    yield mounted
    if mounted.is_alive():
        mounted.signal(signal.SIGCONT)


@pytest.mark.sweep
def test_no_command_waits_for_a_daemon_that_is_stuck(stopped: Mounted, tmp_path: Path) -> None:
    path, link = stopped.path, tmp_path / "link"
    link.symlink_to(path)
    asked = (
        ("status", path),
        ("status", link),
        ("umount", path),
        ("info", path / "before"),
        ("drain", path),
        ("rm", path / "before"),
        ("server", "ls", path),
        ("server", "ls", stopped.source),
        ("meta", "backup", stopped.source),
        ("doctor", path),
        ("checkpoint", "publish", path / "a", path / "b"),
    )
    with ThreadPoolExecutor() as threads:
        for done in threads.map(lambda words: impatient(*words), asked):
            assert done.returncode == 6 and "is stuck" in done.stderr, done
            assert done.stderr.count("\n") == 1
    stopped.signal(signal.SIGCONT)
    assert (path / "before").read_bytes() == b"acknowledged"
    while any(os.fsencode(path) in command for command in commands(besides=stopped.pid)):
        # the children that commands have left behind keep the mount busy until they are answered
        pass


@pytest.mark.sweep
def test_mount_ends_a_daemon_that_is_stuck(stopped: Mounted) -> None:
    name = stopped.path / "waits"
    program = subprocess.Popen([sys.executable, "-c", CREATE, name])
    wait_until_stalled(program.pid)
    done = impatient("mount", stopped.source, stopped.path)
    assert done.returncode == 0 and "is stuck" in done.stderr
    assert program.wait(TIMEOUT_S) != 0
    stopped.wait_for_end()
    stopped.adopt()
    assert (stopped.path / "before").read_bytes() == b"acknowledged"


def test_umount_force_ends_a_daemon_that_is_stuck(stopped: Mounted) -> None:
    aifs("umount", "--force", stopped.path)
    stopped.wait_for_end()
