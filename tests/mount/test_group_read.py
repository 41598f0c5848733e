"""Processes that read the same bytes of a mount at once: each byte is asked of the servers once."""

import errno
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest

from tests.support.groups import begin, wait_durable
from tests.support.mounts import Mounted, aifs, mounted_store

pytestmark = pytest.mark.sweep

MIB = 1 << 20
SIZE = 16 * MIB
READERS = 4
MOST = READERS - 1
"""Bytes that servers are asked for, to those of a file. One, what is fetched by the block before it
is known that the rest of the block is wanted, which depends on who comes first, and what is read
ahead behind its end, where the files that were stored with it lie: as much again for one that is as
small as this. But not as many as there are readers."""

WAYS = {"together": (0, False), "apart": (0, True), "past the page cache": (os.O_DIRECT, False)}


@cache
def content_of(name: str) -> bytes:
    """Half of it can be compressed."""
    return (
        random.Random(name).randbytes(SIZE // 2)
        + bytes(range(1, 256)) * (SIZE // 510)
        + bytes(SIZE // 2 % 255)
    )


READ = """
import hashlib, mmap, os, sys
path, flags, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
print("ready", flush=True)
sys.stdin.readline()
fd = os.open(path, os.O_RDONLY | flags)
size, buffer, parts = os.fstat(fd).st_size, mmap.mmap(-1, 1 << 20), {}
for offset in (*range(first, size, 1 << 20), *range(0, first, 1 << 20)):
    count = os.preadv(fd, [buffer], offset)
    parts[offset] = buffer[:count]
digest = hashlib.sha256()
for offset in sorted(parts):
    digest.update(parts[offset])
print(digest.hexdigest(), flush=True)
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mounted]:
    # The kernel reads one object by itself.
    options = ("burst.drain_delay=0s", "meta.backup_interval=0", "layout.stripe_above=0")
    with mounted_store(tmp_path_factory.mktemp("read"), options) as store:
        yield store


def read_at_once(
    store: Mounted, paths: Sequence[Path], content: bytes, flags: int = 0, apart: bool = False
) -> float:
    """Processes begin to read these at the same time. How often the servers are asked for each byte
    of a file."""
    evict(store, set(paths))
    before = asked(store)
    firsts = [number * (SIZE // len(paths) // MIB * MIB) * apart for number in range(len(paths))]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", READ, path, str(flags), str(first)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for path, first in zip(paths, firsts, strict=True)
    ]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for reader in readers:
        reader.stdin.write("\n")
        reader.stdin.flush()
    found = {reader.communicate(timeout=100)[0].strip() for reader in readers}
    assert found == {hashlib.sha256(content).hexdigest()}
    return (asked(store) - before) / SIZE


def evict(store: Mounted, paths: set[Path]) -> None:
    """The bytes are on the disks of the data servers alone."""
    objects = [path for path in (store.source / "data").rglob("*") if path.is_file()]
    for path in paths:
        wait_until(lambda path=path: gives_up_its_copy(path))
    for path in (*paths, *objects):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def gives_up_its_copy(path: Path) -> bool:
    """Not while the kernel has not said yet that it is closed."""
    try:
        os.setxattr(path, "user.aifs.evict", b"")
    except OSError as error:
        assert error.errno == errno.EBUSY
        return False
    assert not json.loads(os.getxattr(path, "user.aifs.state"))["copy"]
    return True


def asked(store: Mounted) -> int:
    servers = json.loads(os.getxattr(store.path, "user.aifs.status"))["servers"]
    return sum(server["read_bytes"] for server in servers)


def make(store: Mounted, name: str, layout: str) -> Path:
    directory = store.path / name
    directory.mkdir()
    os.setxattr(directory, "user.aifs.layout", layout.encode())
    return directory


@pytest.mark.parametrize("layout", ["kind=striped", "kind=interleaved", "replicas=2"])
def test_readers_of_one_file(store: Mounted, layout: str) -> None:
    directory = make(store, layout, layout)
    paths = [directory / way for way in WAYS]
    for path in paths:
        path.write_bytes(content_of("one file"))
    aifs("drain", directory)
    for path, (flags, apart) in zip(paths, WAYS.values(), strict=True):
        assert (
            0 < read_at_once(store, [path] * READERS, content_of("one file"), flags, apart) < MOST
        )


@pytest.mark.parametrize(
    ("layout", "name", "flags"),
    [("replicas=1", "a", 0), ("ec=2+1", "b", os.O_DIRECT), ("compress=zstd:1", "c", 0)],
)
def test_readers_of_files_that_share_their_chunks(
    store: Mounted, layout: str, name: str, flags: int
) -> None:
    directory = make(store, f"shared {layout}", layout)
    begin(directory, f"name=read,ranks={READERS}")
    paths = [directory / f"rank{number}" for number in range(READERS)]
    for path in paths:
        path.write_bytes(content_of(name))
    wait_durable(directory)
    assert 0 < read_at_once(store, paths, content_of(name), flags) < MOST
