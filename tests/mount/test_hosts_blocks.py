"""Three hosts on real mounts, of which two keep blocks of a file that they have open: they read the
changes of the third one at their next open, also if it dies meanwhile."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from aifs.fuse import extension
from tests.support import postgres
from tests.support.hosts import Cluster, Host, many_hosts, until
from tests.support.mounts import call

SIZE = 1_000_001
PART = 10_000
ROUNDS = 3
SETTINGS = {
    "burst": {"blocks": "always", "stage_for_write": 0, "drain_delay": "1h"},
    "layout": {"inline_limit": 0, "pack_below": 0, "count": 2, "unit": "64KiB"},
}

pytestmark = pytest.mark.skipif(extension is None, reason="the bridge has not been built")


@pytest.fixture(scope="module")
def hosts(postgres_servers: postgres.Servers) -> Iterator[Cluster]:
    """Those that read."""
    with tempfile.TemporaryDirectory(prefix="aifs-blocks-", dir="/dev/shm") as place:
        server = postgres_servers.get("wheel")
        with many_hosts(Path(place), server, settings=SETTINGS) as cluster:
            yield cluster


def status(host: Host) -> dict:
    return json.loads(os.getxattr(host.path, "user.aifs.status"))


def store(host: Host, path: Path, data: bytes) -> None:
    """The file lies on the data servers alone, and was not changed there."""
    path.write_bytes(data)
    call(path, "drain")
    until(lambda: not status(host)["open_files"], "it is closed")
    os.setxattr(path, "user.aifs.evict", b"")


def read(fd: int) -> bytes:
    """Not from the kernel's pages."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return os.pread(fd, 2 * SIZE, 0)


def opened_and_read(path: Path) -> bytes:
    fd = os.open(path, os.O_RDONLY)
    try:
        return read(fd)
    finally:
        os.close(fd)


def keep(readers: list[Host], paths: list[Path], expected: bytes) -> None:
    """The readers have all blocks of the file."""

    def has_all(host: Host, path: Path) -> bool:
        assert opened_and_read(path) == expected
        return json.loads(os.getxattr(path, "user.aifs.state"))["block_bytes"] >= SIZE

    for host, path in zip(readers, paths, strict=True):
        until(partial(has_all, host, path), f"{host.name} keeps all")
        assert opened_and_read(path) == expected


def write(path: Path, kind: str, data: bytes) -> None:
    if kind == "in place":
        with path.open("r+b") as file:
            file.write(data[: SIZE // 2])
            file.write(data[SIZE // 2 :])
    elif kind == "truncated":
        path.write_bytes(data)
    else:
        path.with_name("new").write_bytes(data)
        path.with_name("new").rename(path)


def test_what_one_host_writes_two_others_read_at_their_next_open(hosts: Cluster) -> None:
    readers = list(hosts)
    with hosts.another("writes") as writer:
        writer.mount()
        data = os.urandom(SIZE)
        file, paths = writer.path / "file", [host.path / "file" for host in readers]
        for kind in ("in place", "truncated", "renamed") * ROUNDS:
            store(writer, file, data)
            keep(readers, paths, data)
            fds = [os.open(path, os.O_RDONLY) for path in paths]
            for fd in fds:
                assert read(fd) == data
            before, data = data, os.urandom(SIZE)
            write(file, kind, data)
            for path in paths:
                assert opened_and_read(path) == data
            for fd in fds:
                assert read(fd) == (before if kind == "renamed" else data)
                os.close(fd)
            for path in paths:
                assert opened_and_read(path) == data
        file.unlink()


def test_what_a_host_has_written_that_dies(hosts: Cluster) -> None:
    """In place, in parts: each is there, or not, and for both of the others it is the same."""
    readers = list(hosts)
    with hosts.another("dies") as writer:
        writer.mount()
        data = os.urandom(SIZE)
        file, paths = writer.path / "file", [host.path / "file" for host in readers]
        for number in range(3):
            store(writer, file, data)
            keep(readers, paths, data)
            fds = [os.open(path, os.O_RDONLY) for path in paths]
            new, fd = os.urandom(SIZE), os.open(file, os.O_WRONLY)
            for start in range(0, SIZE // (number + 1), PART):
                os.pwrite(fd, new[start : start + PART], start)
                if start == 5 * PART:
                    os.fsync(fd)
            writer.kill()
            with suppress(OSError):  # its mount has gone
                os.close(fd)
            found = opened_and_read(paths[0])
            assert found[: 6 * PART] == new[: 6 * PART] and len(found) == SIZE
            for start in range(0, SIZE, PART):
                each = slice(start, start + PART)
                assert found[each] in (data[each], new[each])
            for path, fd in zip(paths, fds, strict=True):
                assert opened_and_read(path) == read(fd) == found
                os.close(fd)
            writer.mount()
            assert opened_and_read(file) == found
            for path in paths:
                assert opened_and_read(path) == found
            data = os.urandom(SIZE)
            write(file, "in place", data)
            for path in paths:
                assert opened_and_read(path) == data
        file.unlink()
