"""The filesystem in process, on a store in memory, and what most suites do with it: files written,
drained, read.
"""

import json
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import MappingProxyType

import pytest
import trio

from aifs.check.fsck import check
from aifs.core.config import Config
from aifs.files.services import ServeOptions
from aifs.files.types import ROOT
from aifs.layout.hint import Policy
from aifs.meta import keys
from aifs.meta.keys import ROOT_INO
from aifs.meta.records import Inode
from aifs.vfs import Caller, Filesystem, open_filesystem
from tests.support import modes

OWNER = Caller(uid=1000, gid=1000)
PIECE = 1 << 20
LIMIT_S = 60


@asynccontextmanager
async def served(config: Config, read_only: bool = False) -> AsyncIterator[Filesystem]:
    """The filesystem of a store; all is to be over within LIMIT_S."""
    with trio.fail_after(LIMIT_S):
        async with open_filesystem(config, ServeOptions(read_only=read_only)) as fs:
            yield fs


@asynccontextmanager
async def opened(
    directory: Path,
    settings: Mapping[str, object] = MappingProxyType({}),
    *,
    base: Mapping[str, object] = modes.ON,
    servers: int | Sequence[str] = 0,
    sound: bool = True,
) -> AsyncIterator[Filesystem]:
    """The filesystem of the store in ``directory``, which is made where it is missing: with a
    suite's settings ``base`` and a test's own. When it is closed its garbage has been collected,
    and with ``sound`` fsck finds nothing."""
    if not directory.exists():
        await trio.to_thread.run_sync(modes.make_store, directory, {**base, **settings}, servers)
    config = modes.config_of(directory)
    async with served(config) as fs:
        yield fs
        await fs.collector.drain()
    if sound:
        await require_sound(config)


def marked(request: pytest.FixtureRequest) -> tuple[tuple, dict]:
    """The arguments that the marks ``store`` of a test and of its module give to the fixture that
    makes its store."""
    args, options = (), {}
    for mark in request.node.iter_markers("store"):
        args, options = args or mark.args, {**mark.kwargs, **options}
    return args, options


def by_kind(kinds: Mapping[str, Mapping[str, object]], *names: str) -> pytest.MarkDecorator:
    """A parameter ``kind``: these (without names: all), each with its settings of the store."""
    cases = [pytest.param(name, marks=pytest.mark.store(kinds[name])) for name in names or kinds]
    return pytest.mark.parametrize("kind", cases)


@pytest.fixture
async def fs(request: pytest.FixtureRequest, directory: Path) -> AsyncIterator[Filesystem]:
    """The filesystem of the test's store; marks ``store`` have the arguments of ``opened``."""
    args, options = marked(request)
    async with opened(directory, *args, **options) as fs:
        yield fs


async def require_sound(config: Config) -> None:
    await trio.to_thread.run_sync(assert_sound, config)


def assert_sound(config: Config) -> None:
    """A thorough fsck finds nothing."""
    found = check(config, repair=False, deep=True).findings
    assert not found, "\n".join(map(str, found))


# --- files ---


async def write_file(
    fs: Filesystem, name: bytes, data: bytes = b"", parent: int = ROOT_INO, caller: Caller = ROOT
) -> int:
    """The inode number of a new file, which is closed."""
    (handle, *_), inode = await fs.create(parent, name, 0o644, os.O_RDWR, caller)
    await write_pieces(fs, handle, data)
    await fs.release(handle)
    return inode.ino


async def write_pieces(fs: Filesystem, handle: int, data: bytes) -> None:
    """From the file's beginning on."""
    for start in range(0, len(data), PIECE):
        await fs.write(handle, start, data[start : start + PIECE])


async def set_policy(fs: Filesystem, ino: int, policy: Policy) -> None:
    """The policy of a file, also while it is being written."""
    await fs.attributes.change(ino, _set_policy, policy)


def _set_policy(inode: Inode, policy: Policy) -> None:
    inode.policy = policy


async def overwrite(fs: Filesystem, ino: int, offset: int, data: bytes, flags: int = 0) -> None:
    """A program opens a file, with ``flags`` besides, writes there, and closes it."""
    handle, *_ = await fs.open(ino, os.O_RDWR | flags)
    await fs.write(handle, offset, data)
    await fs.release(handle)


async def rewrite(fs: Filesystem, ino: int, data: bytes) -> None:
    """A program replaces all of a file."""
    await overwrite(fs, ino, 0, data, os.O_TRUNC)


async def read_file(fs: Filesystem, ino: int) -> bytes:
    handle, *_ = await fs.open(ino, os.O_RDONLY)
    try:
        size = (await fs.getattr(ino)).size
        return b"".join([bytes(await fs.read(handle, at, PIECE)) for at in range(0, size, PIECE)])
    finally:
        await fs.release(handle)


async def drained(fs: Filesystem, *inos: int) -> None:
    """What was written so far is on the data servers."""
    fs.drain.request(inos)
    await fs.drain.wait(inos)


async def moved_out(fs: Filesystem, *inos: int) -> None:
    """The files are on the data servers alone."""
    await drained(fs, *inos)
    for ino in inos:
        await fs.evictor.evict(ino)


# --- records ---


async def numbers(fs: Filesystem, kind: bytes) -> list[int]:
    """Of the records of a kind: what stands first in their keys."""
    return await fs.store.engine.view(
        lambda tx: [keys.number(key) for key, _ in tx.range(*keys.all_of(kind))]
    )


# --- hints ---


async def get(fs: Filesystem, ino: int, name: str, caller: Caller = ROOT) -> str:
    """What the hint ``user.aifs.NAME`` tells."""
    return (await fs.getxattr(ino, f"user.aifs.{name}".encode(), caller)).decode()


async def ask(fs: Filesystem, ino: int, name: str, caller: Caller = ROOT) -> dict:
    """A hint that tells JSON."""
    return json.loads(await get(fs, ino, name, caller))


async def call(
    fs: Filesystem, ino: int, hint: str, caller: Caller = OWNER, /, **fields: object
) -> dict:
    """The ioctl of this name."""
    return json.loads(await fs.call(ino, hint, json.dumps(fields).encode(), caller))


async def put(
    fs: Filesystem, ino: int, name: str, value: object = "", caller: Caller = OWNER
) -> None:
    """Give a hint; what is no text is given as JSON."""
    text = value if isinstance(value, str) else json.dumps(value)
    await fs.setxattr(ino, f"user.aifs.{name}".encode(), text.encode(), caller=caller)


async def whole(fs: Filesystem) -> None:
    """Wait until nothing is due."""
    fs.rebuild.look()
    while not fs.rebuild.idle:
        await fs.rebuild.news()
    assert fs.rebuild.status()["failing_objects"] == 0


async def is_marked(fs: Filesystem, ino: int) -> bool:
    """Whether the file waits to be drained."""
    return await fs.store.engine.view(lambda tx: tx.get(keys.dirty(ino)) is not None)
