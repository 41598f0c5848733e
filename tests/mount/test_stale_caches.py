"""What the kernel has cached is never stale: listings in progress, and counts of blocks that were
guesses.
"""

import json
import os
import stat
from pathlib import Path

import pytest

from tests.support.mounts import Mounted

pytestmark = pytest.mark.sweep


def test_a_listing_in_progress_brings_nothing_back(remounted: Mounted, on_remounted: Path) -> None:
    directory = on_remounted / "d"
    directory.mkdir()
    count = 1000
    for number in range(count):
        (directory / f"{number}").write_bytes(b"content")
    remounted.remount()
    with os.scandir(directory) as listing:
        next(listing)
        for number in range(1, count):
            path = directory / f"{number}"
            if number % 3 == 0:
                path.unlink()
            elif number % 3 == 1:
                path.chmod(0o600)
            else:
                os.truncate(path, 0)
        for _ in listing:
            pass
    for number in range(1, count):
        path = directory / f"{number}"
        assert path.exists() == (number % 3 != 0)
        if number % 3 == 1:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
        elif number % 3 == 2:
            assert path.stat().st_size == 0


def blocks_of(path: Path) -> int:
    return path.stat().st_blocks


def test_the_count_of_blocks_is_exact_after_fsync_and_after_close(
    remounted: Mounted, on_remounted: Path
) -> None:
    path = on_remounted / "sparse"
    exact = 2 * 4096 // 512
    with path.open("wb", buffering=0) as file:
        os.pwrite(file.fileno(), b"a" * 4096, 0)
        os.pwrite(file.fileno(), b"a" * 4096, 64 << 20)
        for _ in range(50):
            os.pwrite(file.fileno(), b"b" * 4096, 0)
        assert blocks_of(path) >= exact
        os.fsync(file.fileno())
        assert blocks_of(path) == exact
        for _ in range(50):
            os.pwrite(file.fileno(), b"c" * 4096, 0)
        assert blocks_of(path) >= exact
    # close(2) does not wait for the daemon.
    while json.loads(os.getxattr(remounted.path, "user.aifs.status"))["open_files"]:
        pass
    assert blocks_of(path) == exact
    remounted.remount()
    assert blocks_of(path) == exact
