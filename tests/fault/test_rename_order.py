"""Files that are replaced by renames until the power fails: each is the old one or the new one,
whole, and what came later is not there without what came before.
"""

import random
import shutil
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.vfs import open_filesystem
from tests.support import modes, stores
from tests.support.modes import config_of, make_store
from tests.support.powercut import Cut, is_crash, make_sizes_small

ROOT = stores.ROOT_INO
NAMES = (b"first", b"second", b"third")
ROUNDS = 12
SETTINGS = {"layout.unit": "4096", "meta.commit_interval": "10ms"}


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)


def content(number: int) -> bytes:
    return b"%08d" % number * 900


async def replace(directory: Path, shown: list[int], synced: list[int], cut: Cut) -> None:
    """Replace all by the next version, in order. ``shown``: the version of each whose rename has
    returned; ``synced``: those that an fsync of the directory has covered."""
    async with open_filesystem(config_of(directory)) as fs:
        for number in range(1, ROUNDS):
            for place, name in enumerate(NAMES):
                await stores.write_file(fs, b"new", content(number))
                await fs.rename(ROOT, b"new", ROOT, name)
                shown[place] = number
                if cut.crashed:
                    return
            if number % 4 == 0:
                before = [*shown]
                await fs.fsyncdir(ROOT)
                synced[:] = before


def found(directory: Path) -> list[int]:
    """The version of each; 0: it is not there. All bytes are of that one."""

    async def read() -> list[int]:
        numbers = []
        async with open_filesystem(config_of(directory)) as fs:
            names = {name: inode.ino for name, inode, *_ in await fs.readdir(ROOT, 0)}
            for name in NAMES:
                data = await stores.read_file(fs, names[name]) if name in names else content(0)
                numbers.append(int(data[:8]))
                assert data == content(numbers[-1])
        return numbers

    numbers = trio.run(read)
    findings = check(config_of(directory), repair=False).findings
    assert not findings, findings
    return numbers


@pytest.mark.sweep("mode")
@pytest.mark.parametrize("mode", ["on", "daemon"])
def test_a_power_cut_keeps_the_order_of_renames(scratch: Path, mode: str) -> None:
    caught = later = 0
    for seed in range(12):
        rng = random.Random(f"{mode} {seed}")
        directory, copy = scratch / str(seed), scratch / f"{seed} cut"
        more = modes.TINY | modes.BY_DAEMON if mode == "daemon" else modes.ON
        make_store(directory, SETTINGS | more)
        shown, synced = [0] * len(NAMES), [0] * len(NAMES)
        with Cut(directory, killed=False) as cut:
            cut.changes_left = rng.randint(40, 500)
            try:
                trio.run(replace, directory, shown, synced, cut)
            except BaseException as error:
                if not (cut.crashed and is_crash(error)):
                    raise
            cut.materialise(copy, rng)
        numbers = found(copy)
        assert numbers == sorted(numbers, reverse=True) and numbers[0] - numbers[-1] <= 1
        assert all(map(int.__ge__, numbers, synced)), (numbers, synced)
        assert all(number <= last + 1 for number, last in zip(numbers, shown, strict=True))
        caught += cut.crashed
        later += numbers != shown
        shutil.rmtree(directory)
        shutil.rmtree(copy)
    assert caught and later, "no rename was lost by any crash"
