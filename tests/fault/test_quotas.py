"""Quotas that are set, removed and used when the daemon dies."""

import os
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from aifs.core import faults
from aifs.core.config import Config
from aifs.core.errors import FsError
from aifs.core.faults import SimulatedCrash
from aifs.files.types import ROOT
from aifs.meta import keys
from aifs.meta.keys import ROOT_INO
from aifs.meta.kv import ReadTransaction
from aifs.meta.records import charge_of
from aifs.vfs.filesystem import Filesystem
from tests.support import modes, stores
from tests.support.points import crash
from tests.support.stores import require_sound, served, write_file

pytestmark = pytest.mark.sweep

SETTINGS = modes.WAITING | {"layout.unit": 4096, "layout.inline_limit": 100}
STEPS = [1, 2, 3, 5, 8, 13]
FILES = 40


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("aifs.vfs.quotas.NAMES", 3)


@asynccontextmanager
async def crashing(config: Config, at: int) -> AsyncIterator[Filesystem]:
    """The daemon dies at the step ``at`` of giving a tree its project."""
    steps = Counter[str]()

    def reached() -> None:
        steps["spread"] += 1
        if steps["spread"] >= at:
            crash()

    with pytest.raises(SimulatedCrash):
        async with served(config) as fs:
            faults.arm("vfs.quota.spread", reached)
            yield fs
            await trio.sleep_forever()
    faults.disarm_all()
    assert steps["spread"] >= at


async def make(scratch: Path) -> Config:
    await trio.to_thread.run_sync(modes.make_store, scratch / "store", SETTINGS)
    config = modes.config_of(scratch / "store")
    rng = random.Random(5)
    async with served(config) as fs:
        directories = [(await fs.mkdir(ROOT_INO, b"team", 0o755, ROOT)).ino]
        for number in range(FILES):
            parent = rng.choice(directories)
            if number % 4 == 0:
                directories.append((await fs.mkdir(parent, b"d%d" % number, 0o755, ROOT)).ino)
            await write_file(fs, b"%d" % number, bytes(rng.randrange(300)), parent)
    return config


async def team_of(fs: Filesystem) -> int:
    return (await fs.lookup(ROOT_INO, b"team")).ino


def projects(tx: ReadTransaction) -> Counter[int]:
    """How many inodes have each."""
    records = tx.range(*keys.all_of(b"i"))
    return Counter(charge_of(record)[0] for _, record in records)


async def complete(fs: Filesystem) -> None:
    """All quotas are counted, and those that were removed are gone."""
    await fs.quota_trees.work()


@pytest.mark.parametrize("at", STEPS)
async def test_a_quota_is_set_at_once_and_counted_in_the_end(scratch: Path, at: int) -> None:
    config = await make(scratch)
    async with crashing(config, at) as fs:
        await stores.put(fs, await team_of(fs), "quota", "size=1MiB", ROOT)
    await require_sound(config)
    async with served(config) as fs:
        team = await team_of(fs)
        await complete(fs)
        told = await stores.ask(fs, team, "quota")
        found = await fs.store.engine.view(projects)
        (inside,) = [count for project, count in found.items() if project]
        assert found[0] == 1, "all but the root lies in it"
        assert (told["state"], told["used_files"]) == ("counted", inside)
    await require_sound(config)


@pytest.mark.parametrize("at", STEPS)
async def test_a_quota_is_removed_at_once_and_forgotten_in_the_end(scratch: Path, at: int) -> None:
    config = await make(scratch)
    async with served(config) as fs:
        team = await team_of(fs)
        await stores.put(fs, team, "quota", "files=1", ROOT)
        await complete(fs)
    async with crashing(config, at) as fs:
        await fs.removexattr(team, b"user.aifs.quota", ROOT)
        await write_file(fs, b"more", b"", team)
    await require_sound(config)
    async with served(config) as fs:
        await complete(fs)
        assert set(await fs.store.engine.view(projects)) == {0}
        assert not await stores.numbers(fs, b"Q") + await stores.numbers(fs, b"P")
    await require_sound(config)


@pytest.mark.parametrize("seed", range(3))
async def test_who_works_there_meanwhile_and_after_a_crash(scratch: Path, seed: int) -> None:
    """Several set quotas within each other, and make, write, move and remove files."""
    config = await make(scratch)
    rng = random.Random(seed)

    async def work(fs: Filesystem, number: int) -> None:
        for turn in range(25):
            directories = await all_directories(fs)
            parent, other = rng.choice(directories), rng.choice(directories)
            name = b"%d-%d" % (number, turn)
            try:
                if turn % 6 == 5:
                    await stores.put(fs, parent, "quota", f"size={rng.randrange(9999)}", ROOT)
                elif turn % 12 == 10:
                    await fs.removexattr(parent, b"user.aifs.quota", ROOT)
                elif turn % 12 == 4 and parent != directories[0]:
                    await fs.remove_tree(*await place_of(fs, parent), ROOT)
                else:
                    (handle, *_), _ = await fs.create(parent, name, 0o644, os.O_RDWR, ROOT)
                    try:
                        await fs.write(handle, 0, bytes(rng.randrange(300)))
                        await fs.rename(parent, name, other, name + b"m", 0)
                    finally:
                        await fs.release(handle)
            except FsError:
                pass

    for at in (9, 17):
        async with crashing(config, at) as fs, trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(work, fs, number + at * 10)
        await require_sound(config)
    async with served(config) as fs:
        await complete(fs)
    await require_sound(config)


async def all_directories(fs: Filesystem) -> list[int]:
    found, pending = [], [ROOT_INO]
    while pending:
        found.append(pending.pop())
        listing = await fs.readdir(found[-1], 0, 1000)
        pending += [inode.ino for _, inode, _ in listing if inode.is_dir]
    return found[1:]


async def place_of(fs: Filesystem, ino: int) -> tuple[int, bytes]:
    parent = (await fs.getattr(ino)).parent
    listing = await fs.readdir(parent, 0, 1000)
    return next((parent, name) for name, inode, _ in listing if inode.ino == ino)
