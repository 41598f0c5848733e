"""What was written with O_SYNC or O_DSYNC survives a power cut that comes when the write has
returned.
"""

import os
import random
from pathlib import Path

import pytest
import trio

from aifs.files.types import Caller
from aifs.meta.keys import ROOT_INO
from aifs.vfs import open_filesystem
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.powercut import PowerCut

pytestmark = pytest.mark.sweep

DATA = b"written" * 1000
ME = Caller(0, 0, 0)
CUTS = 8
SETTINGS = modes.WAITING | {"meta.commit_interval": "1h", "data.writeback_interval": "1h"}


@pytest.fixture(params=["passed-through", "by-daemon"])
def store(scratch: Path, request: pytest.FixtureRequest) -> Path:
    directory = scratch / "store"
    by_daemon = modes.BY_DAEMON if request.param == "by-daemon" else {}
    modes.make_store(directory, SETTINGS | by_daemon)
    return directory


async def write(kernel: Kernel, handle: int, flags: int) -> None:
    """write(2): where the bytes come to the daemon, the kernel asks for an fsync if it has to."""
    passed = kernel.direct_bytes
    await kernel.write(handle, 0, DATA)
    if flags & os.O_DSYNC and kernel.direct_bytes == passed:
        await kernel.fsync(handle)


async def new_file(kernel: Kernel, parent: int, flags: int) -> None:
    handle, inode = await kernel.create(parent, b"file", 0o644, flags, ME)
    await write(kernel, handle, flags)


async def opened_again(kernel: Kernel, parent: int, flags: int) -> None:
    handle, inode = await kernel.create(parent, b"file", 0o644, os.O_WRONLY, ME)
    await kernel.release(handle)
    handle = await kernel.open(inode.ino, flags)
    await write(kernel, handle, flags)


async def opened_twice(kernel: Kernel, parent: int, flags: int) -> None:
    handle, inode = await kernel.create(parent, b"file", 0o644, os.O_WRONLY, ME)
    handle = await kernel.open(inode.ino, flags)
    await write(kernel, handle, flags)


async def beside_a_reader(kernel: Kernel, parent: int, flags: int) -> None:
    """Of an object that the reader maps: the kernel bypasses its cache, and asks for no fsync."""
    await kernel.setxattr(parent, b"user.aifs.layout", b"count=1")
    await kernel.setxattr(parent, b"user.aifs.tier", b"capacity")
    handle, inode = await kernel.create(parent, b"file", 0o644, os.O_WRONLY, ME)
    await kernel.write(handle, 0, bytes(len(DATA)))
    await kernel.fsync(handle)
    await kernel.release(handle)
    await kernel.open(inode.ino, os.O_RDONLY)
    handle = await kernel.open(inode.ino, flags)
    if kernel.handles[handle].file.on_object:
        await kernel.write(handle, 0, DATA)
    else:
        await write(kernel, handle, flags)


@pytest.mark.parametrize("flags", [os.O_SYNC, os.O_DSYNC], ids=["sync", "dsync"])
@pytest.mark.parametrize(
    "how", [new_file, opened_again, opened_twice, beside_a_reader], ids=lambda how: how.__name__
)
def test_it_survives(store: Path, scratch: Path, how, flags: int) -> None:
    async def live() -> None:
        async with open_filesystem(modes.config_of(store)) as fs, Kernel(fs) as kernel:
            directory = await kernel.mkdir(ROOT_INO, b"directory", 0o755, ME)
            await how(kernel, directory.ino, os.O_WRONLY | flags)
            for number in range(CUTS):
                cut.materialise(scratch / f"after{number}", random.Random(number))

    async def look(after: Path) -> bytes:
        async with open_filesystem(modes.config_of(after)) as fs:
            directory = await fs.lookup(ROOT_INO, b"directory")
            ino = (await fs.lookup(directory.ino, b"file")).ino
            handle = (await fs.open(ino, os.O_RDONLY)).handle
            found = bytes(await fs.read(handle, 0, 2 * len(DATA)))
            await fs.release(handle)
            return found

    with PowerCut(store) as cut:
        trio.run(live)
    for number in range(CUTS):
        assert trio.run(look, scratch / f"after{number}") == DATA
