"""Publishing random trees until the power fails, or the daemon dies: the reader sees the old or the
new ones, whole.

Names, sizes, bytes, the symlink and the tracker file have to be those of one moment: the one before
or the one after the publication that was under way. docs/design/publish.md has the crash table.
"""

import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import pytest
import trio

from aifs.check.fsck import check
from aifs.core import faults
from aifs.meta import namespace
from aifs.meta.publishing import Publication
from aifs.vfs import Caller, SetAttr, open_filesystem
from tests.support import modes
from tests.support.kernel import Kernel
from tests.support.modes import config_of, make_store
from tests.support.powercut import Cut, is_crash, make_sizes_small
from tests.support.stores import call

ROOT, CALLER = 1, Caller()
SETTINGS = {
    "layout.unit": "4096",
    "meta.commit_interval": "10ms",
    "data.writeback_interval": "100ms",
}
MODES = {
    "off": modes.OFF,
    "on": modes.ON,
    "tiny": modes.TINY,
    "daemon": modes.TINY | modes.BY_DAEMON,
    "interleaved": modes.TINY | modes.INTERLEAVED | {"layout.inline_limit": "0"},
}
POINTS = [
    "vfs.publish.durable",
    "vfs.publish.shown",
    "vfs.doomed.removed",
    "vfs.doomed.emptied",
    "vfs.burst.synced",
]
POINTS += sorted(
    name
    for name in faults.POINTS
    if name.startswith(("meta.", "vfs.drain.", "vfs.collect."))
    and not name.startswith("meta.copy.")
)
LATEST, TRACKER, PENDING = b"latest", b"tracker", b"tmp"
SIZES = (0, 10, 3000, 5000, 20_000, 70_000)

Tree = dict[bytes, tuple[int, int] | None]
"""Size and CRC by path below the checkpoint; None: a directory."""


class State(NamedTuple):
    """What a reader sees, besides the pending directory."""

    checkpoints: dict[bytes, Tree]
    latest: bytes = b""
    tracker: bytes = b""


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)


class Saver:
    """Saves checkpoints one after the other. ``seen`` is what has been acknowledged, ``coming``
    what is under way."""

    def __init__(self, directory: Path, rng: random.Random, seen: State) -> None:
        self.directory, self.rng = directory, rng
        self.seen = self.coming = seen
        self.saves = 0

    async def run(self, saves: int, before_note: Callable[[], None]) -> None:
        """``before_note`` is called before anything counts as acknowledged, and may raise."""
        async with open_filesystem(config_of(self.directory)) as fs, Kernel(fs) as kernel:
            await self._clear(kernel)
            for _ in range(saves):
                await self._save(kernel)
                before_note()
                self.seen = self.coming
                self.saves += 1

    async def _clear(self, fs: Kernel) -> None:
        """What a crashed attempt has left."""
        if PENDING in {name for name, _, _ in await fs.readdir(ROOT, 0)}:
            await fs.remove_tree(ROOT, PENDING)

    async def _save(self, fs: Kernel) -> None:
        rng, ino = self.rng, (await fs.mkdir(ROOT, PENDING, 0o755, CALLER)).ino
        tree = await self._write(fs, ino)
        if rng.random() < 0.5:
            await fs.setxattr(ino, b"user.aifs.pending", b"ranks=2")
            await fs.setxattr(ino, b"user.aifs.commit", b"1")
            await call(fs, ino, "commit", CALLER, rank=0)
        old = rng.choice([None, *self.seen.checkpoints])
        step = b"%d" % rng.randrange(10_000, 100_000)
        if old is None and rng.random() < 0.3:
            self.coming = self.seen._replace(checkpoints=self.seen.checkpoints | {step: tree})
            await fs.rename(ROOT, PENDING, ROOT, step)
        elif old is not None and rng.random() < 0.3:
            self.coming = self.seen._replace(checkpoints=self.seen.checkpoints | {old: tree})
            await fs.rename(ROOT, PENDING, ROOT, old, namespace.RENAME_EXCHANGE)
            await fs.remove_tree(ROOT, PENDING)
        else:
            name = step if old is None else old
            self.coming = State(self.seen.checkpoints | {name: tree}, name, step)
            await fs.publish(
                Publication(ino, ROOT, name, old is not None, False, LATEST, TRACKER, step), CALLER
            )

    async def _write(self, fs: Kernel, top: int) -> Tree:
        rng = self.rng
        tree: Tree = {}
        directories = {b"": top}
        for number in range(rng.randint(1, 6)):
            above = rng.choice(list(directories))
            path = above + b"%d" % number
            if rng.random() < 0.25:
                directories[path + b"/"] = (
                    await fs.mkdir(directories[above], b"%d" % number, 0o755, CALLER)
                ).ino
                tree[path] = None
                continue
            data = bytes([rng.randint(1, 255)]) * rng.choice(SIZES)
            handle, _ = await fs.create(
                directories[above], b"%d" % number, 0o644, os.O_RDWR, CALLER
            )
            middle = rng.randint(0, len(data))
            await fs.write(handle, middle, data[middle:])
            await fs.write(handle, 0, data[:middle])
            if rng.random() < 0.2:
                await fs.fsync(handle)
            if rng.random() < 0.2:
                data = data[: rng.randint(0, len(data))]
                await fs.setattr(
                    (await fs.lookup(directories[above], b"%d" % number)).ino,
                    SetAttr(size=len(data)),
                    CALLER,
                    handle,
                )
            await fs.release(handle)
            tree[path] = len(data), crc32(data)
        return tree


async def read_state(fs: Kernel) -> State:
    """What a reader sees."""
    checkpoints, latest, tracker = {}, b"", b""
    for name, inode, _ in await fs.readdir(ROOT, 0):
        if name == LATEST:
            latest = await fs.readlink(inode.ino)
        elif name == TRACKER:
            tracker = await read_file(fs, inode.ino)
        elif name != PENDING:
            checkpoints[name] = await read_tree(fs, inode.ino)
    return State(checkpoints, latest, tracker)


async def read_tree(fs: Kernel, top: int) -> Tree:
    found: Tree = {}
    left = [(b"", top)]
    while left:
        above, ino = left.pop()
        for name, inode, _ in await fs.readdir(ino, 0):
            if stat.S_ISDIR(inode.mode):
                found[above + name] = None
                left.append((above + name + b"/", inode.ino))
            else:
                data = await read_file(fs, inode.ino)
                found[above + name] = len(data), crc32(data)
    return found


async def read_file(fs: Kernel, ino: int) -> bytes:
    handle = await fs.open(ino, os.O_RDONLY)
    try:
        data = bytes(await fs.read(handle, 0, 1 << 20))
    finally:
        await fs.release(handle)
    assert len(data) == (await fs.getattr(ino)).size
    return data


def look(directory: Path) -> State:
    """Recover the store; it has to be sound."""

    async def read() -> State:
        async with open_filesystem(config_of(directory)) as fs, Kernel(fs) as kernel:
            return await read_state(kernel)

    state = trio.run(read)
    findings = check(config_of(directory), repair=False).findings
    assert not findings, findings
    return state


def stop(cut: Cut, saver: Saver, arm: Callable[[], None], saves: int) -> None:
    """Save until the end comes as armed, or all is saved."""

    try:
        arm()
        trio.run(saver.run, saves, cut.stop_if_crashed)
    except BaseException as error:
        if not (cut.crashed and is_crash(error)):
            raise


def sweep(scratch: Path, mode: str, point: str | None, seed: int) -> int:
    """Two crashes, one after the other. Returns how many publications were under way when they
    came."""
    rng = random.Random(f"{mode} {point} {seed}")
    directory, state, caught = scratch / "0", State({}), 0
    make_store(directory, SETTINGS | MODES[mode])
    for life in range(1, 3):
        killed = rng.random() < 0.3  # the daemon alone: all that it has written is there
        with Cut(directory, killed) as cut:
            saver = Saver(directory, rng, state)
            if point is None:
                cut.changes_left = rng.randint(1, 400)
                stop(cut, saver, lambda: None, 20)
            else:
                occurrence = rng.choice((1, rng.randint(1, 4), rng.randint(1, 12)))
                stop(cut, saver, lambda: cut.crash_at(point, occurrence), 20)
            copy = directory if killed else scratch / f"{life}"
            if not killed:
                cut.materialise(copy, rng)
        found = look(copy)
        assert found in (saver.seen, saver.coming), (
            f"{found}\nis neither {saver.seen}\nnor {saver.coming}"
        )
        caught += cut.crashed and saver.seen != saver.coming
        directory, state = copy, found
    return caught


@pytest.mark.sweep("mode")
@pytest.mark.parametrize("mode", MODES)
def test_a_power_cut_at_any_moment_leaves_the_old_or_the_new(scratch: Path, mode: str) -> None:
    caught = 0
    for seed in range(80):
        if seed >= 8 and caught:
            break
        directory = scratch / str(seed)
        directory.mkdir()
        caught += sweep(directory, mode, None, seed)
        shutil.rmtree(directory)
    assert caught, "no publication was under way at any crash"


@pytest.mark.parametrize(("number", "point"), list(enumerate(POINTS)))
def test_a_power_cut_at_a_fault_point_leaves_the_old_or_the_new(
    scratch: Path, number: int, point: str
) -> None:
    mode = list(MODES)[1 + number % (len(MODES) - 1)]
    sweep(scratch, mode, point, 0)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_many_power_cuts(scratch: Path, mode: str) -> None:
    for seed in range(1000, 2000):
        directory = scratch / str(seed)
        directory.mkdir()
        sweep(directory, mode, random.Random(seed).choice([None, None, *POINTS]), seed)
        shutil.rmtree(directory)
