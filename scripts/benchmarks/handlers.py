#!/usr/bin/env python3
"""What the filesystem's own code costs: microseconds of processor per operation, of the thread that
serves, in process and without a mount, on a store in memory. Nothing but what is asked for is
drained. With ``--profile OPERATION`` also where they go. Compare two trees in turns, by the
smallest of several rounds: other load makes all of it larger."""

import argparse
import cProfile
import gc
import os
import pstats
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from aifs.core.config import DIRECTORY_FILE, Config, load
from aifs.core.errors import NotFound
from aifs.files.types import ROOT
from aifs.meta.keys import ROOT_INO
from aifs.store.store import format_store
from aifs.vfs import Filesystem, SetAttr, open_filesystem

PAGE = b"x" * 4096
WAIT = "burst: {drain_delay: 1h}\nmeta: {backup_interval: 0}\n"
PAST_NS = 10**18


async def one_round(
    fs: Filesystem,
    top: int,
    time_it: Callable[[str, Callable[[bytes], Awaitable[object]]], Awaitable],
) -> None:
    """All operations in turn, each on files or directories of one directory."""

    async def write(prefix: bytes, name: bytes, data: bytes) -> int:
        opened, inode = await fs.create(top, prefix + name, 0o600, os.O_WRONLY, ROOT)
        if data:
            await fs.write(opened.handle, 0, data)
        await fs.release(opened.handle)
        return inode.ino

    async def miss(name: bytes) -> None:
        try:
            await fs.lookup(top, name)
        except NotFound:
            pass

    async def as_rsync(name: bytes) -> None:
        await miss(name)
        ino = await write(b".", name, PAGE)
        await fs.setattr(ino, SetAttr(atime_ns=PAST_NS, mtime_ns=PAST_NS), ROOT)
        await fs.setattr(ino, SetAttr(mode=0o100644), ROOT)
        await fs.rename(top, b"." + name, top, b"r" + name, 0, ROOT)

    await time_it("create, close", lambda name: write(b"a", name, b""))
    await time_it("create, write 1 kB, close", lambda name: write(b"b", name, PAGE[:1000]))
    await time_it("create, write 4 KiB, close", lambda name: write(b"c", name, PAGE))
    await time_it("lookup", lambda name: fs.lookup(top, b"a" + name))
    await time_it("lookup of nothing", miss)
    await time_it("rename of an unsynced file", lambda n: fs.rename(top, b"c" + n, top, b"d" + n))
    await time_it("rename", lambda n: fs.rename(top, b"a" + n, top, b"e" + n))
    await time_it("as rsync: a file of 4 KiB", as_rsync)
    await time_it("unlink", lambda name: fs.unlink(top, b"e" + name))
    await time_it("mkdir", lambda name: fs.mkdir(top, b"f" + name, 0o700, ROOT))
    await time_it("rename of a directory", lambda n: fs.rename(top, b"f" + n, top, b"g" + n))
    await time_it("rmdir", lambda name: fs.rmdir(top, b"g" + name))


async def measure(config: Config, count: int, rounds: int, profiled: str) -> dict[str, float]:
    """Microseconds per call, by operation: the least of all rounds."""
    least: dict[str, float] = {}
    names = [b"%d" % number for number in range(count)]
    profile = cProfile.Profile()

    async def time_it(operation: str, act: Callable[[bytes], Awaitable[object]]) -> None:
        gc.collect()
        await trio.sleep(0.02)  # what is to be done in the background
        if operation == profiled:
            profile.enable()
        begin_s = time.thread_time()
        for name in names:
            await act(name)
        each_us = (time.thread_time() - begin_s) / count * 1e6
        profile.disable()
        least[operation] = min(each_us, least.get(operation, each_us))

    async with open_filesystem(config) as fs:
        for number in range(rounds):
            top = (await fs.mkdir(ROOT_INO, b"%d" % number, 0o700, ROOT)).ino
            await one_round(fs, top, time_it)
            await fs.collector.drain()
    if profiled:
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
    return least


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=1000, help="operations of each kind (1000)")
    parser.add_argument("--rounds", type=int, default=5, help="the least of so many counts (5)")
    parser.add_argument("--profile", default="", metavar="OPERATION")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        (Path(directory) / DIRECTORY_FILE).write_text(WAIT)
        config = load(directory, {})
        format_store(config, force=False)
        least = trio.run(measure, config, asked.n, asked.rounds, asked.profile)
    for operation, each_us in least.items():
        print(f"{operation:28} {each_us:7.1f} us")


if __name__ == "__main__":
    main()
