"""Reads that the bridges of two hosts answer by themselves, on real mounts, while the other host
changes the files."""

import json
import os
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from aifs.fuse import extension
from tests.support.hosts import Both, Cluster, Host, until
from tests.support.mounts import call

READ = "15"
SMALL, COUNT = 20_000, 64
LARGE = 1_000_001
ROUNDS = 30

pytestmark = [
    pytest.mark.skipif(extension is None, reason="the bridge has not been built"),
    pytest.mark.usefixtures("names_stay_cached"),
]


def status(host: Host) -> dict:
    return json.loads(os.getxattr(host.path, "user.aifs.status"))


def reads(host: Host) -> tuple[int, int]:
    """How many READs the kernel has asked for, and how many of them the bridge has answered."""
    bridge = status(host)["bridge"]
    return bridge["requests"].get(READ, 0), bridge["answered"].get(READ, 0)


def content_of(number: int, generation: int = 0) -> bytes:
    return b"%d of %d " % (generation, number) * (SMALL // 8)


def evicted(host: Host, *paths: Path) -> None:
    """The files lie on the data servers alone."""
    for path in paths:
        call(path, "drain")
    while status(host)["open_files"]:
        pass
    for path in paths:
        os.setxattr(path, "user.aifs.evict", b"")


def read(path: Path) -> bytes:
    """Not from the kernel's pages."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return os.pread(fd, 2 * LARGE, 0)
    finally:
        os.close(fd)


@pytest.fixture
def stored(two: Cluster, both: Both) -> dict[str, bytes]:
    """The contents of files that lie on the data servers alone, by name."""
    if not status(two[0])["bridge"]["passthrough"]:
        pytest.skip("this machine cannot pass files through")
    here, _ = both
    contents = {f"small-{number}": content_of(number) for number in range(COUNT)}
    for name, data in contents.items():
        (here / name).write_bytes(data)
    (here / "wide").mkdir()
    os.setxattr(here / "wide", "user.aifs.layout", b"count=2,unit=64KiB")
    os.setxattr(here / "wide", "user.aifs.tier", b"capacity")
    contents["wide/file"] = os.urandom(LARGE)
    (here / "wide/file").write_bytes(contents["wide/file"])
    evicted(two[0], *(here / name for name in contents))
    return contents


def test_clean_files_are_read_without_the_daemon(
    two: Cluster, both: Both, stored: dict[str, bytes]
) -> None:
    for host, directory in zip(two, both, strict=True):
        for name, data in stored.items():
            assert read(directory / name) == data
        until(partial(all_answered, host, directory, stored), f"the bridge of {host.name} reads")


def all_answered(host: Host, directory: Path, stored: dict[str, bytes]) -> bool:
    """Whether the bridge answers all reads of these files."""
    before = reads(host)
    for name, data in stored.items():
        assert read(directory / name) == data
    asked, answered = (now - old for now, old in zip(reads(host), before, strict=True))
    assert asked >= len(stored)
    return asked == answered


def test_what_the_other_host_changes_is_read_at_once(
    two: Cluster, both: Both, stored: dict[str, bytes]
) -> None:
    here, there = both
    with (there / "wide/file").open("rb", buffering=0) as opened:
        for generation in range(1, ROUNDS):
            for name, data in stored.items():
                assert read(there / name) == data
            number = generation % COUNT
            name, data = f"small-{number}", content_of(number, generation)
            if generation % 3 == 0:
                (here / name).write_bytes(data)
            else:
                if generation % 3 == 1:
                    (here / name).unlink()
                    assert not (there / name).exists()
                (here / "new").write_bytes(data)
                (here / "new").rename(here / name)
            assert (there / name).read_bytes() == data
            evicted(two[0], here / name)
            assert (there / name).read_bytes() == data
            with (here / "wide/file").open("r+b") as file:
                file.seek(generation * 1000)
                file.write(data)
                file.truncate(LARGE - generation)
            wide = bytearray(stored["wide/file"])
            wide[generation * 1000 : generation * 1000 + len(data)] = data
            stored |= {name: data, "wide/file": bytes(wide[: LARGE - generation])}
            assert (there / "wide/file").read_bytes() == stored["wide/file"]
            assert os.pread(opened.fileno(), 2 * LARGE, 0) == stored["wide/file"]
    _, answered = reads(two[1])
    assert answered > ROUNDS * COUNT // 2


def test_a_host_that_was_killed_or_fenced_has_changed_what_others_read(
    two: Cluster, both: Both, stored: dict[str, bytes]
) -> None:
    """It has a file open that it changes in place; the others go on with what is on the servers."""
    here, there = both
    with two.another("dies") as host:
        host.mount()
        file = host.path / here.name / "wide/file"
        for directory in both:
            for _ in range(2):
                assert read(directory / "wide/file") == stored["wide/file"]
        fd = os.open(file, os.O_RDWR)
        os.pwrite(fd, b"changed", 10)
        os.fsync(fd)
        host.kill()
        with suppress(OSError):  # its mount has gone
            os.close(fd)
        wide = stored["wide/file"][:10] + b"changed" + stored["wide/file"][17:]
        for directory in both:
            for _ in range(2):
                assert read(directory / "wide/file") == wide
        host.mount()
        with file.open("r+b") as again:
            again.write(b"again")
        for directory in both:
            for _ in range(2):
                assert read(directory / "wide/file") == b"again" + wide[5:]
