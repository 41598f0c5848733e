"""Stores with files that nobody has used for long, and servers for them."""

import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from aifs.core.config import Config
from aifs.files.types import ROOT, SetAttr
from aifs.meta.keys import ROOT_INO
from aifs.vfs import Caller
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.stores import moved_out, require_sound, served, write_file

UNIT = 4096
DAY_NS = 86_400 * 10**9
DATA = random.Random("old").randbytes(9 * UNIT + 17)
SETTINGS = modes.STRIPED | {
    "layout.unit": UNIT,
    "layout.inline_limit": 0,
    "burst.drain_delay": "0s",
    "meta.backup_interval": "0",
}
KINDS = {
    "plain": {"layout.count": 2},
    "replicas": {"layout.replicas": 2, "layout.count": 1},
    "coded": {"layout.ec": "2+1"},
}
COLD = {5, 6, 7}


async def make(scratch: Path, settings: dict[str, object]) -> Config:
    """A store with five servers for new files."""
    settings = SETTINGS | {"burst.directories": ["burst"]} | settings
    await trio.to_thread.run_sync(modes.make_store, scratch / "store", settings, 5)
    return modes.config_of(scratch / "store")


@asynccontextmanager
async def opened(config: Config, cold: int = 3) -> AsyncIterator[Filesystem]:
    """Its filesystem, with servers for old files."""
    async with served(config) as fs:
        for number in range(cold):
            order = {"path": f"{config.source}/cold{number}", "class": "cold"}
            await stores.put(fs, ROOT_INO, "server-add", order, ROOT)
        yield fs
        await fs.collector.drain(urgent=True)
    await require_sound(config)


@pytest.fixture
async def fs(request: pytest.FixtureRequest, scratch: Path) -> AsyncIterator[Filesystem]:
    """A mark ``store`` has the settings, and the number of servers for old files."""
    (settings,), options = stores.marked(request)
    async with opened(await make(scratch, settings), **options) as fs:
        yield fs


async def old_file(
    fs: Filesystem, name: str, parent: int = ROOT_INO, days: int = 40, data: bytes = DATA
) -> int:
    """Its inode number; see ``aged``."""
    ino = await write_file(fs, name.encode(), data, parent, ROOT)
    await aged(fs, ino, days)
    return ino


async def aged(fs: Filesystem, ino: int, days: int = 40) -> None:
    """The file is on the data servers alone, and nobody has used it for ``days``."""
    await moved_out(fs, ino)
    then_ns = time.time_ns() - days * DAY_NS
    await fs.setattr(ino, SetAttr(atime_ns=then_ns, mtime_ns=then_ns), ROOT)


async def servers_of(fs: Filesystem, ino: int) -> set[int]:
    layout = (await fs.getattr(ino)).objects
    assert layout is not None
    return set(layout.servers)


async def passed(fs: Filesystem) -> None:
    """A pass that begins now has ended."""
    await fs.aging.work()


async def rule(fs: Filesystem, ino: int, text: str, caller: Caller = ROOT) -> None:
    """Set it, and have a pass end."""
    await stores.put(fs, ino, "age", text, caller)
    await passed(fs)
