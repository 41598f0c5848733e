"""Grouped drains and power cuts: at each step every file that was durable still is, and the store
is sound.
"""

import os
import random
from pathlib import Path

import pytest
import trio

from aifs.check.fsck import check
from aifs.core import faults
from aifs.core.tasks import first_error
from aifs.files.types import ROOT
from aifs.layout.hint import Policy
from aifs.meta.keys import ROOT_INO
from aifs.saves.group_drain import DrainOutcome, GroupDrain, GroupReport, Prepared
from aifs.vfs import open_filesystem
from aifs.vfs.filesystem import Filesystem
from tests.support.modes import WAITING, config_of, make_store
from tests.support.powercut import PowerCut, make_sizes_small
from tests.support.stores import set_policy

pytestmark = pytest.mark.sweep

CHUNK = 4096
POINTS = ["vfs.group.appended", "vfs.group.replaced", "vfs.group.flipped"]
PROTECTED = [Policy(replicas=2), Policy(data=2, parity=1)]


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    make_sizes_small(monkeypatch)


@pytest.fixture
def scratch(scratch: Path) -> Path:
    make_store(scratch / "0", WAITING | {"meta.commit_interval": "10ms"})
    return scratch


async def write_durably(fs: Filesystem, name: bytes, data: bytes, policy: Policy) -> int:
    opened, inode = await fs.create(ROOT_INO, name, 0o600, os.O_RDWR, ROOT)
    await set_policy(fs, inode.ino, policy)
    await fs.write(opened.handle, 0, data)
    await fs.fsync(opened.handle, False)
    await fs.release(opened.handle)
    return inode.ino


async def read_file(fs: Filesystem, name: bytes) -> bytes:
    inode = await fs.lookup(ROOT_INO, name)
    opened = await fs.open(inode.ino, os.O_RDONLY)
    try:
        return bytes(await fs.read(opened.handle, 0, inode.size))
    finally:
        await fs.release(opened.handle)


async def work(
    directory: Path, rng: random.Random, durable: dict[bytes, bytes], rounds: int
) -> None:
    """Groups whose members share chunks with each other, and with those of other groups and other
    protection; some files are deleted. ``durable``: what must be there, whatever happens."""
    pool = [rng.randbytes(CHUNK) for _ in range(6)] + [bytes(CHUNK)]
    async with open_filesystem(config_of(directory)) as fs:
        drain = GroupDrain(fs.services, fs.drain.drainer)
        for number in range(rounds):
            members = []
            if number % 2 == 0:
                pool[:3] = [rng.randbytes(CHUNK) for _ in range(3)]
            for rank in range(3):
                name = b"%d-%d" % (number, rank)
                data = b"".join([*pool[:3], *rng.choices(pool, k=3)]) + rng.randbytes(
                    rng.randrange(1, 2 * CHUNK)
                )
                policy = rng.choice(PROTECTED) if number % 2 else Policy()
                members.append(Prepared(await write_durably(fs, name, data, policy)))
                durable[name] = data
            for member in members:
                await drain.prepare(member, CHUNK, GroupReport())
            await drain.store(members, CHUNK, GroupReport())
            assert [member.outcome for member in members] == [DrainOutcome.DRAINED] * 3
            for member in members:
                await fs.evictor.evict(member.ino)
            if number % 2:
                name = rng.choice(sorted(durable))
                ino = (await fs.lookup(ROOT_INO, name)).ino
                del durable[name]
                await fs.unlink(ROOT_INO, name)
                fs.forget([ino])
                await fs.collector.drain()


async def find(directory: Path, durable: dict[bytes, bytes]) -> None:
    async with open_filesystem(config_of(directory)) as fs:
        for name, data in durable.items():
            assert await read_file(fs, name) == data, name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("point", POINTS)
def test_a_power_cut_takes_nothing_that_was_durable(scratch: Path, point: str, seed: int) -> None:
    rng, durable = random.Random(f"{point} {seed}"), {}
    with PowerCut(scratch / "0") as cut:
        cut.crash_at(point, 1 + seed)
        try:
            trio.run(work, scratch / "0", rng, durable, 8)
        except BaseException as error:
            if not (cut.crashed and isinstance(first_error(error), faults.SimulatedCrash)):
                raise
        assert cut.crashed, f"{point} was not reached"
        cut.materialise(scratch / "1", rng)
    trio.run(find, scratch / "1", durable)
    findings = check(config_of(scratch / "1"), repair=False, deep=True).findings
    assert not findings, [str(finding) for finding in findings]
