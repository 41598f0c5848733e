"""A mount's life: ready only when it serves, ended by signals or umount, nothing lost, nothing
left.
"""

import mmap
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support.mounts import Mounted, aifs


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_unmounts_in_order_and_keeps_pages_that_mmap_left_dirty(
    mounted: Mounted, number: int
) -> None:
    path = mounted.path / "mapped"
    path.write_bytes(bytes(1 << 20))
    with path.open("r+b") as file:
        pages = mmap.mmap(file.fileno(), 0)
    with pages:
        pages[4096:4101] = b"dirty"
        mounted.signal(number)
        mounted.wait_for_end()
    assert not mounted.is_mounted()
    mounted.mount()
    assert path.read_bytes()[4096:4101] == b"dirty"


def test_a_lazy_unmount_serves_open_files_to_their_end(mounted: Mounted) -> None:
    file = (mounted.path / "open").open("wb", buffering=0)
    subprocess.run(["umount", "-l", mounted.path], check=True)
    file.write(b"written after the unmount")
    file.close()
    mounted.wait_for_end()
    mounted.mount()
    assert (mounted.path / "open").read_bytes() == b"written after the unmount"


def test_the_mount_names_its_source_and_type(mounted: Mounted) -> None:
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    (fields,) = [line for line in lines if line[1] == str(mounted.path)]
    assert fields[0] == str(mounted.source) and fields[2] == "fuse.aifs"
    assert {"default_permissions", "allow_other"} <= set(fields[3].split(","))


def test_the_command_returns_when_read_ahead_is_set(mounted: Mounted) -> None:
    mounted.unmount()
    aifs("mount", mounted.source, mounted.path, "-o", "kernel.read_ahead=2MiB")
    device = mounted.path.stat().st_dev
    limit = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}/read_ahead_kb").read_text()
    aifs("umount", mounted.path)
    assert limit == "2048\n"


def test_a_store_that_is_in_use_is_not_mounted_again(mounted: Mounted, scratch: Path) -> None:
    other = scratch / "other"
    other.mkdir()
    refused = aifs("mount", mounted.source, other, check=False)
    assert refused.returncode == 5 and str(mounted.pid) in refused.stderr
    assert not os.path.ismount(other)
    mounted.expected.append("owns|in use|owned")


def test_sigusr1_writes_all_stacks_to_the_log(mounted: Mounted) -> None:
    mounted.signal(signal.SIGUSR1)
    os.stat(mounted.path / ".")
    mounted.unmount()
    text = mounted.log.read_text()
    assert "stacks of all threads and tasks" in text and "aifs.fuse.session" in text


def test_a_negative_name_is_asked_for_once_and_appears_when_it_is_made(on_mount: Path) -> None:
    path = on_mount / "late"
    for _ in range(3):
        assert not path.exists()
    path.write_bytes(b"")
    assert path.exists()
    path.rename(on_mount / "later")
    assert not path.exists() and (on_mount / "later").exists()


def test_opening_for_reading_shows_a_newer_atime_at_once(mounted: Mounted) -> None:
    path = mounted.path / "read"
    path.write_bytes(b"bytes")
    os.utime(path, ns=(10**9, 2 * 10**9))
    assert path.stat().st_atime_ns == 10**9
    assert path.read_bytes() == b"bytes"
    assert path.stat().st_atime_ns > 10**9 and path.stat().st_mtime_ns == 2 * 10**9


@pytest.mark.sweep
def test_a_directory_read_in_pieces_is_complete(on_mount: Path) -> None:
    names = {f"{number:04}-{'x' * (number % 200)}" for number in range(1500)}
    for name in names:
        (on_mount / name).touch()
    assert set(os.listdir(on_mount)) == names
    with os.scandir(on_mount) as entries:
        first = [next(entries).name for _ in range(100)]
        for name in names - set(first):
            (on_mount / name).unlink()
        rest = [entry.name for entry in entries]
    assert len(set(first + rest)) == len(first + rest) and set(first + rest) <= names
