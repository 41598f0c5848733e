"""What the filesystem keeps in memory for each inode, as allocated bytes of Python objects."""

import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from aifs.meta.keys import ROOT_INO
from aifs.vfs import Filesystem
from tests.support import modes, stores

pytestmark = pytest.mark.sweep

MANY = 2000
KNOWN_BYTES = 64
"""What the kernel knows costs nothing here: it asks again for what it has forgotten. An object for
each inode would take more."""
UNDRAINED_BYTES = 800
"""A burst copy that is not drained yet: its place in the queue, in the ledger, in what is
unsynced."""


async def grown(fs: Filesystem, act: Callable[[int], Awaitable[object]]) -> float:
    """Bytes per call that are still allocated after MANY calls, but for records: these wait for
    their way into LMDB."""

    async def level() -> int:
        await fs.collector.drain()
        gc.collect()
        found = tracemalloc.take_snapshot().filter_traces(
            [
                tracemalloc.Filter(False, "*/aifs/meta/*"),
                tracemalloc.Filter(False, tracemalloc.__file__),
            ]
        )
        return sum(trace.size for trace in found.traces)

    tracemalloc.start()
    try:
        before = await level()
        for number in range(MANY):
            await act(number)
        return (await level() - before) / MANY
    finally:
        tracemalloc.stop()


async def test_what_waits_to_be_drained_is_small(directory: Path) -> None:
    async with stores.opened(directory, base=modes.WAITING) as fs:

        async def create(number: int) -> None:
            await stores.write_file(fs, b"%d" % number, b"x" * 4096)

        assert await grown(fs, create) < UNDRAINED_BYTES


async def test_what_the_kernel_knows_costs_nothing(directory: Path) -> None:
    async with stores.opened(directory, base=modes.WAITING) as fs:
        for number in range(MANY):
            await stores.write_file(fs, b"%d" % number, b"x" * 100)
    async with stores.opened(directory, base=modes.WAITING) as fs:

        async def look_up(number: int) -> None:
            inode = await fs.lookup(ROOT_INO, b"%d" % number)
            await fs.getattr(inode.ino)

        assert await grown(fs, look_up) < KNOWN_BYTES
