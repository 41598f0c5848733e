"""Grouped writes until the power fails, or the daemon dies, at every fault point and anywhere
between.

Afterwards: what a rank has been told is committed is there, byte for byte; a directory that is
published is whole; every group either goes on to be durable or is cancelled, and its files are
drained as usual; and fsck finds nothing. docs/design/commit.md has the crash table.
"""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core import faults
from aifs.core.errors import NoAttribute
from aifs.vfs import Caller, open_filesystem
from tests.support import modes
from tests.support.hanging import until
from tests.support.kernel import Kernel
from tests.support.modes import config_of, make_store
from tests.support.powercut import Cut, is_crash, make_sizes_small

ROOT, CALLER = 1, Caller()
BLOCK = 64 << 10
SETTINGS = {"meta.commit_interval": "10ms", "data.writeback_interval": "100ms"}
MODES = {
    "on": modes.ON,
    "daemon": modes.ON | modes.BY_DAEMON,
    "interleaved": modes.ON | modes.INTERLEAVED | {"layout.inline_limit": "0"},
    "replicas": modes.ON | modes.REPLICAS,
    "coded": modes.ON | modes.CODED,
}
OWN = sorted(
    name
    for name in faults.POINTS
    if name.startswith("vfs.group.") and name not in ("vfs.group.replaced", "vfs.group.kept")
)
"""The points of groups; ``replaced`` needs a bad chunk (test_group_drain), ``kept`` another host
(contract/test_groups_hosts)."""

OTHERS = [
    "vfs.drain.flipped",
    "vfs.burst.synced",
    "vfs.publish.durable",
    "vfs.publish.shown",
    "data.append.written",
]
POINTS = OWN + [name for name in OTHERS if name in faults.POINTS]
ROUNDS = 12
SEEDS_MAX = 40
LIMIT_S = 60


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)


def content(rng: random.Random) -> bytes:
    """Blocks of which many are equal, or zeros."""
    count = rng.randint(1, 4)
    blocks = [
        bytes([kind]) * BLOCK if (kind := rng.randrange(5)) < 4 else rng.randbytes(BLOCK)
        for _ in range(count)
    ]
    return b"".join(blocks)[: rng.choice([10, BLOCK, count * BLOCK - 100, count * BLOCK])]


class Job:
    """Saves steps as groups. ``written``: all files by step, then name; ``promised``: which of them
    are acknowledged; ``published``: the steps whose last commit has returned."""

    def __init__(self, directory: Path, rng: random.Random, stop: Callable[[], None]) -> None:
        self.directory, self.rng = directory, rng
        self.written: dict[str, dict[str, bytes]] = {}
        self.promised: dict[str, set[str]] = {}
        self.published: set[str] = set()
        self._stop = stop

    async def run(self) -> None:
        async with open_filesystem(config_of(self.directory)) as fs, Kernel(fs) as kernel:
            with trio.fail_after(LIMIT_S):
                for number in range(ROUNDS):
                    await self._save(kernel, f"step{number}")

    async def _save(self, fs: Kernel, step: str) -> None:
        rng, ranks = self.rng, self.rng.randint(1, 3)
        explicit, publish = rng.random() < 0.6, rng.random() < 0.5
        ino = (await fs.mkdir(ROOT, step.encode(), 0o755, CALLER)).ino
        text = f"name=step,ranks={ranks},dedup=64KiB,commit={'explicit' if explicit else 'close'}"
        await fs.setxattr(
            ino, b"user.aifs.group", (text + (f",publish=final-{step}" if publish else "")).encode()
        )
        if explicit and rng.random() < 0.3:
            await fs.setxattr(ino, b"user.aifs.pending", f"ranks={ranks}".encode())
        files, promised = self.written.setdefault(step, {}), self.promised.setdefault(step, set())
        for rank in range(ranks):
            for part in range(rng.randint(1, 2) if explicit else 1):
                name = f"{rank}.{part}"
                files[name] = content(rng)
                handle, _ = await fs.create(ino, name.encode(), 0o644, os.O_RDWR, CALLER)
                await fs.write(handle, 0, files[name])
                await fs.release(handle)
            if explicit:
                await fs.setxattr(ino, b"user.aifs.group.commit", str(rank).encode())
                self._stop()
                promised.update(files)
        if not explicit:
            await fs.groups.wait(ino, 0, False, LIMIT_S)
            self._stop()
            promised.update(files)
        if publish:
            self.published.add(step)
        if rng.random() < 0.7:
            await fs.groups.wait(ino, 0, True, LIMIT_S)
            self._stop()


async def look(job: Job, directory: Path) -> None:
    """Recover, compare, end what is left of the groups, drain, compare again."""
    async with open_filesystem(config_of(directory)) as fs, Kernel(fs) as kernel:
        with trio.fail_after(LIMIT_S):
            await compare(job, kernel)
            for _, inode, _ in await fs.readdir(ROOT, 0):
                if not inode.is_dir:  # the pointer, which a publication may replace now
                    continue
                if await state_of(kernel, inode.ino) == "open":
                    await fs.removexattr(inode.ino, b"user.aifs.group")
                elif await state_of(kernel, inode.ino) in ("committed", "draining"):
                    await fs.groups.wait(inode.ino, 0, True, LIMIT_S)
            await fs.wait_drained(ROOT, LIMIT_S)
            await compare(job, kernel)
            # The records say that all is drained before the queue of the drain knows it.
            await until(lambda: fs.drain.status()["files"] == 0)


async def state_of(fs: Kernel, ino: int) -> str:
    try:
        return json.loads(await fs.getxattr(ino, b"user.aifs.group"))["state"]
    except NoAttribute:
        return ""


async def compare(job: Job, fs: Kernel) -> None:
    tops = {name.decode(): inode.ino for name, inode, _ in await fs.readdir(ROOT, 0)}
    for step, files in job.written.items():
        is_shown = f"final-{step}" in tops
        if is_shown:
            await fs.lookup(tops[f"final-{step}"], b".aifs-manifest.json")
        assert is_shown or step not in job.published, f"{step} has been published, and is not"
        wanted = set(files) if is_shown else job.promised[step]
        top = tops.get(f"final-{step}", tops.get(step))
        for name in wanted:
            inode = await fs.lookup(top, name.encode())
            handle = await fs.open(inode.ino, os.O_RDONLY)
            assert bytes(await fs.read(handle, 0, 1 << 20)) == files[name], (
                f"{step}/{name} is not what was committed"
            )
            await fs.release(handle)


def crash(directory: Path, mode: str, point: str | None, rng: random.Random) -> bool:
    """Save until the end comes, recover; whether it came."""
    directory.mkdir()
    store = directory / "0"
    make_store(store, SETTINGS | MODES[mode])
    killed = rng.random() < 0.4  # the daemon alone: all that it has written is there
    with Cut(store, killed) as cut:
        job = Job(store, rng, cut.stop_if_crashed)
        try:
            if point is None:
                cut.changes_left = rng.randint(1, 600)
            else:
                cut.crash_at(point, rng.choice((1, 1, 2, 3)))
            trio.run(job.run)
        except BaseException as error:
            if not (cut.crashed and is_crash(error)):
                raise
        copy = directory / "1"
        if killed:  # what this process has open still must not be in the way of leases
            shutil.copytree(store, copy)
        else:
            cut.materialise(copy, rng)
    trio.run(look, job, copy)
    findings = check(config_of(copy), repair=False, deep=True).findings
    assert not findings, findings
    return cut.crashed


@pytest.mark.parametrize(("number", "point"), list(enumerate(POINTS)))
def test_a_crash_at_a_fault_point_of_a_group_loses_nothing(
    scratch: Path, number: int, point: str
) -> None:
    for seed in range(SEEDS_MAX):
        mode = list(MODES)[(number + seed) % len(MODES)]
        if crash(scratch / str(seed), mode, point, random.Random(f"{point} {seed}")) and seed >= 2:
            return
    raise AssertionError(f"{point} is never reached")


@pytest.mark.sweep
@pytest.mark.parametrize("mode", MODES)
def test_a_crash_at_any_moment_of_a_group_loses_nothing(scratch: Path, mode: str) -> None:
    for seed in range(3):
        crash(scratch / str(seed), mode, None, random.Random(f"{mode} {seed}"))


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("mode", MODES)
def test_many_crashes_of_groups(scratch: Path, mode: str) -> None:
    for seed in range(1000, 1300):
        rng = random.Random(f"{mode} {seed}")
        directory = scratch / str(seed)
        crash(directory, mode, rng.choice([None, *POINTS]), rng)
        shutil.rmtree(directory)
