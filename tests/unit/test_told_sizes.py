"""What the kernel is told of the sizes of files that grow without its knowing."""

import stat

import pytest
import trio
from trio.testing import Sequencer

from aifs.files.kernel import Kernel
from aifs.files.open_table import ToldSizes
from aifs.meta.records import Inode

pytestmark = pytest.mark.sweep


def file_of(size: int) -> Inode:
    return Inode(5, stat.S_IFREG, 0, 0, 1, 0, size, 0, 0, 0, 0)


async def test_who_asks_for_a_size_waits_for_no_later_writer() -> None:
    """Writers overlap without end, as those of a log to which several hosts append."""
    told, step = ToldSizes(Kernel()), Sequencer()

    async def write(size: int, first: int, last: int) -> None:
        async with step(first):
            hold = told.hold(5, size)
        async with step(last):
            told.let_go(hold)

    async def ask() -> None:
        async with step(1):
            pass
        with trio.fail_after(5):
            await told.settled(5)
        assert told.size(file_of(30)) == 20
        async with step(4):
            pass

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write, 10, 0, 3)
        nursery.start_soon(write, 20, 2, 5)
        nursery.start_soon(ask)
    assert told.size(file_of(30)) == 30
