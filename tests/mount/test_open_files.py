"""Many open files on a mount whose daemon may have few descriptors."""

import os
from pathlib import Path

import pytest

from tests.support.mounts import mounted_store

MAX = 512


@pytest.mark.sweep
def test_open_files_of_one_program_do_not_keep_others_from_opening_theirs(scratch: Path) -> None:
    with mounted_store(scratch, ("burst.drain_delay=1h",), mount=False) as store:
        store.descriptors = MAX
        store.expected.append("descriptors are few")
        store.mount()
        hold_many(store.path)


def hold_many(path: Path) -> None:
    held = []
    try:
        for number in range(2 * MAX):
            held.append(os.open(path / f"{number}", os.O_RDWR | os.O_CREAT))
            os.write(held[-1], b"%d" % number * 5000)
        other = path / "other"
        other.write_bytes(b"other" * 1000)
        assert other.read_bytes() == b"other" * 1000
        for number, fd in enumerate(held):
            os.pwrite(fd, b"x", 10_000_000)
            assert os.fstat(fd).st_size == 10_000_001
            assert os.pread(fd, 20, 0) == (b"%d" % number * 20)[:20]
        for fd in held[:: MAX // 2]:
            os.fsync(fd)
    finally:
        for fd in held:
            os.close(fd)
