"""What ``aifs umount`` says and when it ends, of a daemon that does not end. The daemon is another
process that sleeps.
"""

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from aifs.cli import door, umount
from aifs.core import connections, mountinfo
from aifs.core.errors import StoreBusy, TimeoutReached
from aifs.core.mountinfo import FSTYPE, Mount
from aifs.store.owner import IN_ORDER, Owner, OwnerLock, find_holder, read_owner

WAITS = "data server 2 (/two) has not answered 3 calls"


class Daemon:
    """``write`` says for it what its owner file says."""

    def __init__(self, store: Path, process: subprocess.Popen) -> None:
        (store / "meta").mkdir(parents=True)
        self.meta = str(store / "meta")
        self.fd = os.pidfd_open(process.pid)
        self.status = {"pid": process.pid, "mountpoint": "/mnt", "source": str(store)}
        self._pid = process.pid

    def write(self, **fields: str) -> None:
        lock = OwnerLock(self.meta, "/mnt")
        lock.put(Owner(self._pid, socket.gethostname(), "/mnt", **fields))
        lock.release(orderly=False)

    def wait(self, limit_s: float) -> str:
        return umount.wait_for_daemon(
            "/mnt", self.fd, self.status, True, time.monotonic() + limit_s
        )


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Daemon]:
    for name in ("_PAUSE_S", "_END_S", "NOTICE_S"):
        monkeypatch.setattr(umount, name, 0.01)
    with subprocess.Popen(["sleep", "3600"]) as process:
        daemon = Daemon(tmp_path / "store", process)
        yield daemon
        os.close(daemon.fd)
        process.kill()


def test_it_says_what_the_daemon_waits_for_and_what_is_safe(
    daemon: Daemon, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.write(doing=WAITS)
    with pytest.raises(TimeoutReached) as caught:
        daemon.wait(0.5)
    pid = daemon.status["pid"]
    assert str(caught.value) == (
        f"/mnt: the daemon (pid {pid}) has not closed the store in time: {WAITS}. It goes on; what "
        "was acknowledged survives the end of the daemon; what fsync, syncfs or a publish "
        f"acknowledged, a power cut, too. To end it now: kill -9 {pid}; the next mount recovers "
        "the store"
    )
    assert capsys.readouterr().err == f"aifs: waiting for the daemon (pid {pid}): {WAITS}\n"


def test_it_does_not_wait_for_a_daemon_that_has_closed_the_store_and_cannot_end(
    daemon: Daemon,
) -> None:
    daemon.write(doing=WAITS, closed=IN_ORDER)
    assert daemon.wait(3600) == WAITS


def test_a_store_that_calls_are_left_of_is_refused_with_their_names(tmp_path: Path) -> None:
    """And is free when they have ended."""
    import threading

    go = threading.Event()
    thread = threading.Thread(target=go.wait)
    thread.start()
    lock = OwnerLock(str(tmp_path), "/mnt")
    lock.tell(WAITS)
    assert read_owner(str(tmp_path)).doing == WAITS
    assert find_holder(str(tmp_path)) == os.getpid()
    lock.release(orderly=True, stuck=[thread], waits_for=WAITS)
    with pytest.raises(StoreBusy, match="which has unmounted it, and cannot end: data server 2"):
        OwnerLock(str(tmp_path), "")
    go.set()
    while read_owner(str(tmp_path)) is not None:
        time.sleep(0.001)
    assert find_holder(str(tmp_path)) is None


def test_a_process_that_has_the_number_of_a_dead_daemon_is_not_taken_for_it(daemon: Daemon) -> None:
    daemon.write()
    assert read_owner(daemon.meta).pid == daemon.status["pid"]
    assert find_holder(daemon.meta) is None


def test_a_number_that_is_another_process_here_is_not_a_daemons(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A daemon in a container tells its number there; umount --force outside must not kill
    who has it here."""
    monkeypatch.setattr(door, "read_status", lambda path: {"pid": os.getpid()})
    mount = Mount(1, str(tmp_path), FSTYPE, str(tmp_path / "store"))
    assert door.daemon_of(mount) is None
    fuse = os.open("/dev/null", os.O_RDONLY)
    try:
        monkeypatch.setattr(connections, "_DEVICE", "/dev/null")
        assert door.daemon_of(mount) == os.getpid()
    finally:
        os.close(fuse)


def test_no_daemon_is_killed_that_serves_another_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    """By force, and where a store is to be mounted over a bind mount that does not answer."""
    first, bind, other = (
        Mount(n, path, FSTYPE, "/s") for n, path in ((1, "/a"), (1, "/b"), (2, "/c"))
    )
    monkeypatch.setattr(mountinfo, "all_mounts", lambda: [first, bind, other])
    taken: list[str] = []
    monkeypatch.setattr(umount, "unmount", lambda path, lazy: taken.append(path))
    monkeypatch.setattr(umount, "daemon_of", lambda mount: pytest.fail("its daemon is asked for"))
    umount.end(bind)
    umount.end(first)
    umount.end(Mount(3, "/d", FSTYPE, "/s", "/directory"))
    assert taken == ["/b", "/a", "/d"]
