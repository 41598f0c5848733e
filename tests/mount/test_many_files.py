"""Many files in one directory, and several filesystems at once."""

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.mounts import Mounted

pytestmark = pytest.mark.sweep

MountStore = Callable[..., Mounted]


def _fill_and_empty(store: Mounted, count: int) -> None:
    directory = store.path / "many"
    directory.mkdir()
    before = os.getcwd()
    os.chdir(directory)
    try:
        names = [f"file-{number:06}" for number in range(count)]
        for number, name in enumerate(names):
            fd = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            if number % 100 == 0:
                os.write(fd, name.encode())
            os.close(fd)
        assert sorted(os.listdir()) == names
        with os.scandir() as entries:
            inodes = {entry.inode() for entry in entries if entry.stat().st_nlink == 1}
        assert len(inodes) == count
    finally:
        os.chdir(before)
    store.remount()
    os.chdir(directory)
    try:
        assert sorted(os.listdir()) == names
        assert all(
            os.stat(name).st_size == (0 if number % 100 else 11)
            for number, name in enumerate(names)
        )
        for number in range(0, count, 2):
            os.rename(names[number], f"renamed-{number:06}")
        assert os.path.exists("renamed-000000") and not os.path.exists("file-000000")
        assert len(os.listdir()) == count
        for name in os.listdir():
            os.unlink(name)
        assert os.listdir() == []
    finally:
        os.chdir(before)
    directory.rmdir()
    while _used(store) >= 10:  # deleted files are collected when no request keeps coming
        time.sleep(0.01)


def _used(store: Mounted) -> int:
    found = os.statvfs(store.path)
    return found.f_files - found.f_ffree


def test_10_000_files_in_a_directory(mounted: Mounted) -> None:
    _fill_and_empty(mounted, 10_000)


@pytest.mark.long
def test_100_000_files_in_a_directory(mounted: Mounted) -> None:
    _fill_and_empty(mounted, 100_000)


def test_two_stores_at_once(mount_store: MountStore) -> None:
    stores = [mount_store(), mount_store("layout.unit=4KiB")]
    problems: list[BaseException] = []

    def work(store: Mounted, letter: bytes) -> None:
        try:
            for number in range(200):
                path = store.path / f"file{number}"
                path.write_bytes(letter * (number * 50))
                path.rename(store.path / f"done{number}")
        except BaseException as problem:
            problems.append(problem)
            raise

    threads = [
        threading.Thread(target=work, args=pair) for pair in zip(stores, (b"x", b"y"), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    stores[0].kill()
    for store, letter in ((stores[1], b"y"), (stores[0], b"x")):
        if not store.is_mounted():
            store.mount()
        assert len(os.listdir(store.path)) == 200
        assert _all_hold(store.path, letter)
    assert stores[0].path.stat().st_dev != stores[1].path.stat().st_dev


def _all_hold(directory: Path, letter: bytes) -> bool:
    return all(
        path.read_bytes() == letter * (int(path.name[4:]) * 50) for path in directory.iterdir()
    )


def test_several_processes_in_one_directory(mounted: Mounted) -> None:
    """Each makes, renames and removes its own names; nobody sees a name twice or misses one."""
    directory = mounted.path / "shared"
    directory.mkdir()
    pids = []
    for worker in range(4):
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                for number in range(150):
                    path = directory / f"{worker}-{number}"
                    path.write_bytes(b"%d" % number)
                    if number % 3 == 0:
                        path.rename(directory / f"{worker}-{number}-renamed")
                    elif number % 3 == 1:
                        path.unlink()
                code = 0
            finally:
                os._exit(code)
        pids.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids] == [0] * 4
    expected = {
        f"{worker}-{number}" + ("-renamed" if number % 3 == 0 else "")
        for worker in range(4)
        for number in range(150)
        if number % 3 != 1
    }
    assert set(os.listdir(directory)) == expected
    mounted.remount()
    assert {path.name for path in directory.iterdir() if int(path.read_bytes()) < 150} == expected
