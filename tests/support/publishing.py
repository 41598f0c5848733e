"""Pending directories and trees of files, for the tests of publishing and retention."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import pytest

from aifs.files.types import ROOT as ROOT_USER
from aifs.vfs import Caller, Filesystem, SetAttr
from tests.support import modes, stores
from tests.support.stores import OWNER, put

ROOT, OTHER = 1, Caller(uid=2000, gid=2000)
SIZE = 20_000
TRACKER = "latest_checkpointed_iteration.txt"

ask = partial(stores.ask, name="pending")


@asynccontextmanager
async def opened(directory: Path, sound: bool = True) -> AsyncIterator[Filesystem]:
    """The store of the test, in whose root all may write; without ``sound`` the test sees to fsck
    itself."""
    async with stores.opened(
        directory, base=modes.WAITING | {"layout.unit": "4KiB"}, sound=sound
    ) as fs:
        await fs.setattr(ROOT, SetAttr(mode=0o777), ROOT_USER)
        yield fs


@pytest.fixture
async def fs(directory: Path) -> AsyncIterator[Filesystem]:
    async with opened(directory) as fs:
        yield fs


async def make(
    fs: Filesystem, parent: int, name: bytes, size: int = SIZE, caller: Caller = OWNER
) -> int:
    """A closed file."""
    return await stores.write_file(fs, name, bytes([name[0]]) * size, parent, caller)


async def tree(
    fs: Filesystem, name: bytes, parent: int = ROOT, files: int = 2, caller: Caller = OWNER
) -> int:
    ino = (await fs.mkdir(parent, name, 0o755, caller)).ino
    for number in range(files):
        await make(fs, ino, b"%d.pt" % number, caller=caller)
    return ino


async def pending(
    fs: Filesystem, name: bytes, ranks: int = 1, parent: int = ROOT, files: int = 2
) -> int:
    ino = await tree(fs, name, parent, files)
    await put(fs, ino, "pending", f"ranks={ranks},step=100,job=job 7")
    return ino


async def get(fs: Filesystem, ino: int, name: str) -> str:
    return (await stores.get(fs, ino, name)).strip()


async def names(fs: Filesystem, ino: int = ROOT) -> set[bytes]:
    return {name for name, _, _ in await fs.readdir(ino, 0)}


async def marks(fs: Filesystem) -> set[int]:
    """Inodes with a dirty mark."""
    return set(
        await fs.store.engine.view(
            lambda tx: [int.from_bytes(key[1:], "big") for key, _ in tx.range(b"w", b"x")]
        )
    )


async def chmod(fs: Filesystem, ino: int, mode: int, caller: Caller = OWNER) -> None:
    await fs.setattr(ino, SetAttr(mode=mode, uid=caller.uid, gid=caller.gid), ROOT_USER)
