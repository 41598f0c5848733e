"""A program that writes a file past the page cache (O_DIRECT) and through a mapping at once: its
errors are its own.
"""

import json
import mmap
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, aifs

SIZE, PIECE = 1 << 20, 64 << 10
TRIES = 300


def write_both_ways(path: Path) -> int:
    """How often fsync fails with EIO: the kernel says so when it meets pages that a mapping has
    just made dirty again."""
    errors = 0
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    os.ftruncate(fd, SIZE)
    child = os.fork()
    if child == 0:
        with mmap.mmap(fd, SIZE) as mapping:
            while True:
                for offset in range(0, SIZE, mmap.PAGESIZE):
                    mapping[offset] = 1
    try:
        direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        with mmap.mmap(-1, PIECE) as piece:
            for number in range(TRIES):
                os.pwrite(direct, piece, number * PIECE % SIZE)
                if number % 16 == 15:
                    try:
                        os.fsync(fd)
                    except OSError:
                        errors += 1
        os.close(direct)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(fd)
    return errors


@pytest.mark.parametrize("how", ["umount", "aifs"])
def test_errors_of_a_file_do_not_make_the_burst_device_fail(
    mount_store: Callable[..., Mounted], how: str
) -> None:
    store = mount_store("burst.drain_delay=1h")
    store.expected.append(r"inode \d+: what was written to it last may be lost: burst directory 0 ")
    store.expected.append("could not be settled, the next mount will try again: burst directory 0 ")
    if not write_both_ways(store.source / "plain"):
        pytest.skip("the kernel, or this filesystem, gives no such errors")
    (store.source / "plain").unlink()
    while not write_both_ways(store.path / "file"):
        pass
    (device,) = json.loads(os.getxattr(store.path, "user.aifs.status"))["burst"]["devices"]
    assert (device["state"], device["refuses"]) == ("ok", "")
    (store.path / "other").write_bytes(b"x" * SIZE)
    state = json.loads(os.getxattr(store.path / "other", "user.aifs.state"))
    assert state["state"] == "dirty"
    if how == "umount":
        store.unmount()
    else:
        assert aifs("umount", store.path).returncode == 0
        store.wait_for_end()
    store.mount()
    assert (store.path / "other").read_bytes() == b"x" * SIZE
    subprocess.run(["dd", f"if={store.path}/file", "of=/dev/null"], check=True, capture_output=True)
